// Products with the normalized Hadamard matrix, by sums and differences of neighbours in one order. No torch here.
#pragma once

#include <cuda_runtime.h>

namespace qsync {

// Rotates 64 or 128 numbers that `lanes` neighbouring lanes of a warp hold, kCount consecutive ones each: sums within a lane, then
// between lanes. All lanes of the warp must come here. Reference: kernels/weight_only/rotation.py.
template <int kCount>
__device__ __forceinline__ void rotate_block(float (&v)[kCount], int lanes) {
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if ((k & step) == 0) {
        const float a = v[k], b = v[k + step];
        v[k] = a + b;
        v[k + step] = a - b;
      }
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step < lanes) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const float other = __shfl_xor_sync(0xffffffffu, v[k], step);
        v[k] = threadIdx.x & step ? other - v[k] : v[k] + other;
      }
    }
  }
  const float factor = kCount * lanes == 128 ? 0.08838834764831845f : 0.125f;  // one over the root of the block
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    v[k] *= factor;
  }
}

}  // namespace qsync
