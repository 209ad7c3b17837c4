// GELU and its gradient in FP32.
#pragma once

#include "cuda/quantize_device.cuh"

namespace qsync {

struct Normal {
  float below, density;  // distribution and density function of the standard normal
};

// Source: M. Abramowitz, I. Stegun, "Handbook of mathematical functions", 7.1.26: absolute error below 2e-7.
__device__ __forceinline__ Normal normal(float x) {
  const float z = fabsf(x) * 0.70710678f;
  const float t = __fdividef(1.0f, fmaf(0.3275911f, z, 1.0f));
  const float bell = __expf(-z * z);
  float p = fmaf(1.061405429f, t, -1.453152027f);
  p = fmaf(p, t, 1.421413741f);
  p = fmaf(p, t, -0.284496736f);
  p = fmaf(p, t, 0.254829592f);
  const float tail = 0.5f * p * t * bell;
  return {x < 0.0f ? tail : 1.0f - tail, 0.39894228f * bell};
}

__device__ __forceinline__ float gelu_value(float x) { return x * normal(x).below; }

__device__ __forceinline__ float gelu_gradient(float x, float grad) {
  const Normal n = normal(x);
  return grad * fmaf(x, n.density, n.below);
}

}  // namespace qsync
