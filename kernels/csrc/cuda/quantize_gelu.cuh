// GELU and its gradient in FP32, and their rounding to 16 bits.
#pragma once

#include "cuda/rounding.cuh"

namespace qsync {

struct Normal {
  float below, density;  // distribution and density function of the standard normal
};

// By the special function unit, without care for subnormal numbers: what is that small adds nothing here.
__device__ __forceinline__ float power_of_two(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Source: M. Abramowitz, I. Stegun, "Handbook of mathematical functions", 7.1.26, for x / sqrt(2) and with coefficients halved:
// absolute error below 3e-7 in FP32. The last product is formed by itself, so that every kernel gives the same bits.
__device__ __forceinline__ Normal normal(float x) {
  const float t = reciprocal(fmaf(0.23164190f, fabsf(x), 1.0f));
  const float bell = power_of_two(x * x * -0.72134752f);  // exp(-x^2 / 2)
  float p = fmaf(0.5307027145f, t, -0.7265760135f);
  p = fmaf(p, t, 0.7107068705f);
  p = fmaf(p, t, -0.142248368f);
  p = fmaf(p, t, 0.127414796f);
  const float tail = __fmul_rn(p * t, bell);
  return {x < 0.0f ? tail : 1.0f - tail, 0.39894228f * bell};
}

__device__ __forceinline__ float gelu_value(float x) { return x * normal(x).below; }

__device__ __forceinline__ float gelu_gradient(float x, float grad) {
  const Normal n = normal(x);
  return grad * fmaf(x, n.density, n.below);
}

// Rounds eight values to 16 bits each, two by two, as the elements of a pack; or keeps four of 32 bits.
template <typename T>
__device__ __forceinline__ uint4 pack(const float* v) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace qsync
