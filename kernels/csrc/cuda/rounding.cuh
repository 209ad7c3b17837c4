// What a thread does to a few elements: load, draw noise, round to a format, decode. No torch here.
//
// The numerical contract is that of kernels/quantize/operators.py, bit for bit: the same scales, noise and codes as the plain
// PyTorch implementation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/random_words.cuh"

namespace qsync {

enum class Format : int { kInt8 = 0, kE4M3 = 1, kE5M2 = 2 };

template <Format F>
constexpr float largest() {
  return F == Format::kInt8 ? 127.0f : F == Format::kE4M3 ? 448.0f : 57344.0f;
}

constexpr float kSmallestNormal = 1.17549435e-38f;
constexpr uint64_t kMultiplier1 = 0xBF58476D1CE4E5B9ull;
constexpr uint64_t kMultiplier2 = 0x94D049BB133111EBull;

// Key of a call and, on the card, the step that is mixed into it (null: none).
struct Stream {
  uint64_t key;
  const int64_t* step;
};

__device__ __forceinline__ uint64_t stream_key(Stream stream) {
  if (stream.step == nullptr) return stream.key;
  uint64_t v = stream.key + static_cast<uint64_t>(__ldg(reinterpret_cast<const long long*>(stream.step))) + kGolden;
  v = (v ^ (v >> 30)) * kMultiplier1;
  v = (v ^ (v >> 27)) * kMultiplier2;
  return v ^ (v >> 31);
}

// The largest of two magnitudes, NaN if one is NaN.
__device__ __forceinline__ float larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));  // both have a clear sign
#endif
}

// Largest magnitude among the lanes of `mask`, groups of `width` lanes; as bits, which order magnitudes and NaN.
template <int kWidth>
__device__ __forceinline__ uint32_t group_max(uint32_t bits) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kWidth == 32) {
    return __reduce_max_sync(0xffffffffu, bits);
  } else
#endif
  {
#pragma unroll
    for (int step = kWidth / 2; step > 0; step /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
    return bits;
  }
}

// 16 bytes of input as floats.
template <typename T>
struct Pack;

template <>
struct Pack<float> {
  static constexpr int kCount = 4;
  __device__ __forceinline__ static void unpack(const uint4& raw, float* v) {
    v[0] = __uint_as_float(raw.x);
    v[1] = __uint_as_float(raw.y);
    v[2] = __uint_as_float(raw.z);
    v[3] = __uint_as_float(raw.w);
  }
  __device__ __forceinline__ static float magnitude(const uint4& raw) {
    const float a = larger(fabsf(__uint_as_float(raw.x)), fabsf(__uint_as_float(raw.y)));
    const float b = larger(fabsf(__uint_as_float(raw.z)), fabsf(__uint_as_float(raw.w)));
    return larger(a, b);
  }
};

// Two 16-bit magnitudes as one word: their bits order them, NaN above infinity.
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) {
  return __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
}

__device__ __forceinline__ uint32_t largest_half(const uint4& raw) {
  const uint32_t both = larger_halves(larger_halves(raw.x, raw.y), larger_halves(raw.z, raw.w));
  return max(both & 0xffffu, both >> 16);
}

template <>
struct Pack<__nv_bfloat16> {
  static constexpr int kCount = 8;
  __device__ __forceinline__ static void pair(uint32_t raw, float* v) {
    v[0] = __uint_as_float(raw << 16);
    v[1] = __uint_as_float(raw & 0xffff0000u);
  }
  __device__ __forceinline__ static void unpack(const uint4& raw, float* v) {
    pair(raw.x, v);
    pair(raw.y, v + 2);
    pair(raw.z, v + 4);
    pair(raw.w, v + 6);
  }
  __device__ __forceinline__ static float magnitude(const uint4& raw) {
    return __uint_as_float(largest_half(raw) << 16);
  }
};

template <>
struct Pack<__half> {
  static constexpr int kCount = 8;
  __device__ __forceinline__ static void pair(uint32_t raw, float* v) {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&raw));
    v[0] = both.x;
    v[1] = both.y;
  }
  __device__ __forceinline__ static void unpack(const uint4& raw, float* v) {
    pair(raw.x, v);
    pair(raw.y, v + 2);
    pair(raw.z, v + 4);
    pair(raw.w, v + 6);
  }
  __device__ __forceinline__ static float magnitude(const uint4& raw) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(largest_half(raw))));
  }
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (sizeof(T) == 4) return v;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(v);
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(v);
}

template <Format F>
__device__ __forceinline__ float scale_of(float amax) {
  const float scale = fmaxf(__fdiv_rn(amax, largest<F>()), kSmallestNormal);
  return amax < INFINITY ? scale : __uint_as_float(0x7fc00000u);  // infinity and NaN poison the slice
}

// What values are multiplied by before they are rounded: rounding.py, factor_of().
template <Format F, bool kStochastic>
__device__ __forceinline__ float factor_of(float scale) {
  const float inverse = __frcp_rn(scale);
  return F == Format::kInt8 && kStochastic ? __uint_as_float(__float_as_uint(inverse) - 1) : inverse;
}

// Byte of a rounded word that holds the code.
template <Format F, bool kStochastic>
__device__ constexpr int code_byte() {
  return F == Format::kInt8 || !kStochastic ? 0 : 3;
}

// What stands above the 16 random bits of an element where they are used: the exponent of 2^23, or nothing.
template <Format F>
__device__ constexpr uint32_t above_lane() {
  return F == Format::kInt8 ? 0x4b000000u : 0;
}

// One code, in byte code_byte(), from y = value * factor, which callers form with __fmul_rn: the sum below must not be
// contracted with that product, which is rounded by itself; `lane` is the element's 16 random bits, already odd, as an
// offset number in [1, 65535], with above_lane() above them.
template <Format F, bool kStochastic>
__device__ __forceinline__ uint32_t round_one(float y, uint32_t lane) {
  if constexpr (F == Format::kInt8) {
    if constexpr (kStochastic) {
      const float noise = __uint_as_float(lane) - 8421376.0f;  // exact: the 16 bits - 32768
      y = fmaf(noise, 1.52587890625e-05f, y);
    }
    return __float_as_uint(y + 12582912.0f);  // the lowest byte is the integer
  } else if constexpr (kStochastic) {
    // Times 2^-120 (2^-112) the subnormals of the format are those of FP32, and the code is sign and bits 26..20
    // (27..21); the largest magnitude lies too close to its code for the largest noise to lift it further.
    constexpr uint32_t kBelow = F == Format::kE4M3 ? 16 : 32;
    const float tiny = y * (F == Format::kE4M3 ? 7.52316385e-37f : 1.92592994e-34f);
    const uint32_t bits = __float_as_uint(tiny) + lane * kBelow;
    const uint32_t shifted = bits * (F == Format::kE4M3 ? 16u : 8u);
    return (shifted & 0x7fffffffu) | (bits & 0x80000000u);
  } else {
    return __nv_cvt_float_to_fp8(y, __NV_SATFINITE, F == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2);
  }
}

// Codes of four successive elements, packed; `word` is their random word.
template <Format F, bool kStochastic>
__device__ __forceinline__ uint32_t round_four(const float* y, uint64_t word) {
  if constexpr (F != Format::kInt8 && !kStochastic) {
    constexpr auto kKind = F == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(y[0], y[1]), __NV_SATFINITE, kKind);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(y[2], y[3]), __NV_SATFINITE, kKind);
    return low | (high << 16);
  } else {
    const uint32_t low = (static_cast<uint32_t>(word) | 0x00010001u) ^ 0x80008000u;
    const uint32_t high = (static_cast<uint32_t>(word >> 32) | 0x00010001u) ^ 0x80008000u;
    constexpr uint32_t kAbove = above_lane<F>();
    const uint32_t a = round_one<F, kStochastic>(y[0], __byte_perm(low, kAbove, 0x7410));
    const uint32_t b = round_one<F, kStochastic>(y[1], __byte_perm(low, kAbove, 0x7432));
    const uint32_t c = round_one<F, kStochastic>(y[2], __byte_perm(high, kAbove, 0x7410));
    const uint32_t d = round_one<F, kStochastic>(y[3], __byte_perm(high, kAbove, 0x7432));
    constexpr uint32_t kPair = code_byte<F, kStochastic>() == 0 ? 0x0040 : 0x0073;
    return __byte_perm(__byte_perm(a, b, kPair), __byte_perm(c, d, kPair), 0x5410);
  }
}

// Code of the element at `index` of a stream.
template <Format F, bool kStochastic>
__device__ __forceinline__ uint8_t round_at(float y, uint64_t key, uint64_t index) {
  uint32_t lane = 0;
  if constexpr (kStochastic) {
    const uint64_t word = random_word(counter(key, index >> 2));
    lane = ((static_cast<uint32_t>(word >> (16 * (index & 3))) & 0xffffu) | 1u) ^ 0x8000u;
    lane |= above_lane<F>();
  }
  return static_cast<uint8_t>(round_one<F, kStochastic>(y, lane) >> (8 * code_byte<F, kStochastic>()));
}

// Value of a code.
template <Format F>
__device__ __forceinline__ float decode(uint32_t code) {
  if constexpr (F == Format::kInt8) {
    return static_cast<float>(static_cast<int8_t>(code));
  } else if constexpr (F == Format::kE5M2) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(code << 8)));
  } else {
    const float v = __uint_as_float((code & 0x7fu) << 20) * 1.329227995784916e36f;
    const float magnitude = (code & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u) : v;
    return __uint_as_float(__float_as_uint(magnitude) | ((code & 0x80u) << 24));
  }
}

}  // namespace qsync
