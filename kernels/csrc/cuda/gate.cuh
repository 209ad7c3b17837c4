// The gate of an MLP.
#pragma once

#include <cuda_runtime.h>

namespace qsync {

// GELU, by its formula with tanh, or SiLU of one number, times another, in FP32.
__device__ __forceinline__ float gated(float gate, float up, bool by_gelu) {
  // GELU by tanh is the number times the logistic function of twice the argument of tanh.
  const float argument = by_gelu ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  return gate / (1.0f + expf(-argument)) * up;
}

}  // namespace qsync
