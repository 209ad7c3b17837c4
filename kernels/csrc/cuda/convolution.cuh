// INT8 convolution: what its kernels take, and the arithmetic of their epilogue.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace qsync::convolution {

enum class Output : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Geometry of one 2-D convolution: channels-last input, output-channel-major weight (K, R, S, C / groups).
struct Geometry {
  int n, h, w, c;  // input
  int k, r, s;     // output channels, taps
  int p, q;        // output rows and columns
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int groups;
};

// Scales, bias and activation: out = act(sums * (x_scale * weight_scale) + bias), formed in FP32, rounded once.
struct Epilogue {
  const float* x_scale;
  const float* weight_scale;
  const float* bias;  // null: none
  int x_step;         // 0: one scale for the tensor, 1: one per sample
  int weight_step;    // 0: one scale for the tensor, 1: one per output channel
  int relu;
  Output output;
};

struct Operands {
  const int8_t* x;                // channels contiguous
  int64_t x_n, x_h, x_w;          // strides in elements
  const int8_t* weight;           // contiguous
  void* out;                      // contiguous (N, P, Q, K)
};

// Multiplication and addition stay apart, so that the result is bit for bit that of the plain PyTorch operator.
__device__ __forceinline__ float finish(int sum, float scale, float bias, bool has_bias, bool relu) {
  float value = __fmul_rn(__int2float_rn(sum), scale);
  if (has_bias) value = __fadd_rn(value, bias);
  if (relu) value = value < 0.0f ? 0.0f : value;
  return value;
}

__device__ __forceinline__ void store(void* out, int64_t index, float value, Output output) {
  if (output == Output::kFloat32) {
    static_cast<float*>(out)[index] = value;
  } else if (output == Output::kFloat16) {
    static_cast<__half*>(out)[index] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(out)[index] = __float2bfloat16_rn(value);
  }
}

// Implicit GEMM on mma.sync (sm_75 and later) and, for few channels per group, one thread per result.
cudaError_t launch_general(const Geometry&, const Operands&, const Epilogue&, cudaStream_t);

// Space to depth of a narrow input and of its weight: see convolution_pack.cu.
struct Folding {
  int stride_h, stride_w;  // pixels folded into channels
  int channels;            // bytes per folded pixel: 16, as the row step needs
  int rows, columns;       // folded input, padding included
  int r, s;                // folded taps
};
cudaError_t launch_fold_input(const Geometry&, const Operands&, const Folding&, int8_t* out, cudaStream_t);
cudaError_t launch_fold_weight(const Geometry&, const int8_t* weight, const Folding&, int8_t* out, cudaStream_t);

// Implicit GEMM on wgmma with TMA im2col loads (sm_90a). `variant` indexes the tile table; -1 chooses by shape.
int sm90_variants();
const char* sm90_variant_name(int variant);
bool sm90_variant_fits(const Geometry&, int variant);
bool sm90_fits(const Geometry&, const Operands&, const Epilogue&);
cudaError_t launch_sm90(
    const Geometry&, const Operands&, const Epilogue&, int variant, int multiprocessors, cudaStream_t);

}  // namespace qsync::convolution
