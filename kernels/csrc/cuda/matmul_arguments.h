// What a scaled product is asked to do, in plain types: the joint between the torch glue and the kernels.
//
// out[z, r, c] = act(a_scale[z, r] * b_scale[z, c] * sum_k a[z, r, k] * b[z, c, k] + bias[c]); both operands are contiguous
// along k. With block scales the sum runs over blocks of 128 k, each multiplied by its own two scales.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace qsync::matmul {

enum class Code : int { kInt8 = 0, kE4M3 = 1, kE5M2 = 2 };
enum class Float : int { kBF16 = 0, kFP16 = 1, kFP32 = 2 };
enum class Activation : int { kNone = 0, kRelu = 1, kGelu = 2 };

constexpr int kScaleBlock = 128;

struct Arguments {
  const void* a;           // codes, (batch, rows, depth)
  const void* b;           // codes, (batch, columns, depth)
  void* out;               // (batch, rows, columns), dense
  void* preactivation;     // like out, what the activation is applied to; null if nobody wants it
  uint32_t* largest;       // bits of the largest magnitude of out, raised to it; null if nobody wants it
  const float* a_scale;    // see the strides below
  const float* b_scale;
  const void* bias;        // (columns,) or null
  int64_t batch, rows, columns, depth;
  int64_t a_pitch, b_pitch;    // elements from row to row
  int64_t a_batch, b_batch;    // elements from matrix to matrix
  int64_t a_scale_row, a_scale_block, a_scale_batch;  // elements; 0 where a scale is shared
  int64_t b_scale_row, b_scale_block, b_scale_batch;
  Code a_code, b_code;
  Float out_float, bias_float;
  Activation activation;
  bool block_scales;
  bool accurate;           // FP8: FP32 sums of blocks of 128 products instead of the tensor core's own
  int multiprocessors;     // of the stream: a partition of a card has fewer than the card
  cudaStream_t stream;
};

// How the product is cut: found by tuning, never a matter of correctness (see matmul_choice.h).
struct Choice {
  int variant;   // index into the table of tiles
  int splits;    // parts of the depth that are summed separately
  int group;     // tile rows that are walked together, so that operands stay in the second-level cache
};

enum class Status : int { kOk = 0, kUnsupported = 1, kDriver = 2, kLaunch = 3 };

}  // namespace qsync::matmul
