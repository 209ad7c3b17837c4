// Heads of queries, keys and values of one token: their rotary positions, and the way of keys and values into pages. No torch here.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

#include "cuda/rounding.cuh"

namespace qsync {

// kCount neighbours, read or written together.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Numbers {
  T values[kCount];
};

template <class T, int kCount>
__device__ __forceinline__ void load(const T* from, float (&v)[kCount]) {
  const auto raw = *reinterpret_cast<const Numbers<T, kCount>*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = to_float(raw.values[i]);
  }
}

template <class T, int kCount>
__device__ __forceinline__ void store(T* to, const float (&v)[kCount]) {
  Numbers<T, kCount> raw;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    raw.values[i] = from_float<T>(v[i]);
  }
  *reinterpret_cast<Numbers<T, kCount>*>(to) = raw;
}

// Rounds the numbers of a head, kPairs of each half in a lane, to codes of 8 bits with one scale, and stores upper and lower bits
// apart: bytes of the upper bits of both halves, then of the lower bits. Returns the scale.
template <int kPairs>
__device__ __forceinline__ float store_codes(uint8_t* to, const float (&v)[2][kPairs]) {
  uint32_t bits = 0;  // of the largest magnitude: they order magnitudes, NaN above infinity
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    bits = max(bits, max(__float_as_uint(fabsf(v[0][i])), __float_as_uint(fabsf(v[1][i]))));
  }
  const float quotient = __fdiv_rn(__uint_as_float(group_max<32>(bits)), 127.0f);
  const float scale = quotient < FLT_MIN ? FLT_MIN : quotient;  // NaN stays, so that it is seen
  Numbers<uint8_t, kPairs> upper, lower;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const uint32_t first = uint32_t(__float2int_rn(__fdiv_rn(v[0][i], scale)));
    const uint32_t second = uint32_t(__float2int_rn(__fdiv_rn(v[1][i], scale)));
    upper.values[i] = uint8_t((first & 0xF0u) | (second >> 4 & 0x0Fu));
    lower.values[i] = uint8_t((first << 4 & 0xF0u) | (second & 0x0Fu));
  }
  *reinterpret_cast<Numbers<uint8_t, kPairs>*>(to) = upper;
  *reinterpret_cast<Numbers<uint8_t, kPairs>*>(to + 32 * kPairs) = lower;
  return scale;
}

// A head in the lanes of a warp, of which each holds kPairs numbers of each half. FP32, rounded once where it is stored.
template <class T, int kPairs>
class Head {
 public:
  static constexpr int kHalf = 32 * kPairs;

  __device__ __forceinline__ Head(const T* from, int lane) : lane_(lane) { load_halves(from, v_); }

  // Turns pairs of numbers, one of each half, by the angles of the token.
  __device__ __forceinline__ void turn(const T* cos, const T* sin) {
    float c[2][kPairs], s[2][kPairs];
    load_halves(cos, c);
    load_halves(sin, s);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float first = v_[0][i], second = v_[1][i];
      v_[0][i] = first * c[0][i] - second * s[0][i];
      v_[1][i] = second * c[1][i] + first * s[1][i];
    }
  }

  __device__ __forceinline__ void store_to(T* to) const {
    store(to + lane_ * kPairs, v_[0]);
    store(to + kHalf + lane_ * kPairs, v_[1]);
  }

  // Numbers where there are no scales, else the codes of the rounded numbers.
  __device__ __forceinline__ void store_in_page(void* pages, float* scales, int64_t slot) {
    if (scales == nullptr) {
      store_to(static_cast<T*>(pages) + slot * 2 * kHalf);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        v_[half][i] = to_float(from_float<T>(v_[half][i]));
      }
    }
    const float scale = store_codes(static_cast<uint8_t*>(pages) + slot * 2 * kHalf + lane_ * kPairs, v_);
    if (lane_ == 0) {
      scales[slot] = scale;
    }
  }

 private:
  __device__ __forceinline__ void load_halves(const T* from, float (&v)[2][kPairs]) const {
    load(from + lane_ * kPairs, v[0]);
    load(from + kHalf + lane_ * kPairs, v[1]);
  }

  int lane_;
  float v_[2][kPairs];
};

}  // namespace qsync
