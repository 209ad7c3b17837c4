// Random words by counter, the bits of kernels/quantize/random_bits.py.
#pragma once

#include <cstdint>

namespace qsync {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kWordMultiplier = 0xD6E8FEB86659FD93ull;

// Counter of word `index` of a stream; the next word's is kGolden more.
__device__ __forceinline__ uint64_t counter(uint64_t key, uint64_t index) { return key + index * kGolden; }

// The word of a counter; its four 16-bit lanes belong to elements 4 index .. 4 index + 3.
__device__ __forceinline__ uint64_t random_word(uint64_t w) {
  w = (w ^ (w >> 32)) * kWordMultiplier;
  w = (w ^ (w >> 32)) * kWordMultiplier;
  return w ^ (w >> 32);
}

}  // namespace qsync
