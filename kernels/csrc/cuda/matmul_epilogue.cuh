// What happens to a sum on its way out, for every code path alike: scales, bias, activation, rounding to the result's type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "matmul_arguments.h"

namespace qsync::matmul {

// x times the normal distribution function, the complementary error function by a polynomial times exp(-x*x/2): absolute
// error under 2e-7 |x|, and no cancellation for large negative x.
// Source: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 7.1.26.
__device__ __forceinline__ float gelu(float x) {
  const float z = fabsf(x) * 0.70710678f;
  const float t = __fdividef(1.0f, fmaf(0.3275911f, z, 1.0f));
  float p = fmaf(1.061405429f, t, -1.453152027f);
  p = fmaf(p, t, 1.421413741f);
  p = fmaf(p, t, -0.284496736f);
  p = fmaf(p, t, 0.254829592f);
  const float half_erfc = 0.5f * p * t * __expf(-z * z);
  return x * (x < 0.0f ? half_erfc : 1.0f - half_erfc);
}

// Comparisons are written so that NaN comes through.
__device__ __forceinline__ float activate(float x, Activation activation) {
  if (activation == Activation::kRelu) {
    return x < 0.0f ? 0.0f : x;
  }
  return activation == Activation::kGelu ? gelu(x) : x;
}

__device__ __forceinline__ float load_float(const void* values, Float type, int64_t index) {
  if (type == Float::kFP32) {
    return static_cast<const float*>(values)[index];
  }
  return type == Float::kBF16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(values)[index])
                              : __half2float(static_cast<const __half*>(values)[index]);
}

__device__ __forceinline__ void store_float(void* values, Float type, int64_t index, float value) {
  if (type == Float::kFP32) {
    static_cast<float*>(values)[index] = value;
  } else if (type == Float::kBF16) {
    static_cast<__nv_bfloat16*>(values)[index] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(values)[index] = __float2half_rn(value);
  }
}

// Two values rounded to a 16-bit type, the first in the low half.
__device__ __forceinline__ uint32_t pack_pair(float low, float high, bool bf16) {
  uint32_t packed;
  if (bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

}  // namespace qsync::matmul
