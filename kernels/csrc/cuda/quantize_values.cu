// From codes back to values, and from the codes of one format to those of another.
#include "cuda/quantize_kernels.cuh"

namespace qsync {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float scale_at(const float* scale, Granularity granularity, int64_t row, int64_t col,
                                          int64_t blocks) {
  if (granularity == Granularity::kTensor) return __ldg(scale);
  if (granularity == Granularity::kRow) return __ldg(scale + row);
  if (granularity == Granularity::kColumn) return __ldg(scale + col);
  return __ldg(scale + row * blocks + col / kBlockLength);
}

// Grid: x over pieces of kThreads x kCount codes of a row, row after row; kCount codes per thread: 8 where rows divide
// into them, else 1. Traffic: each code read once, each value written once.
// Contract: dequantize(): the product is formed in FP32 and rounded once.
template <Format F, typename T, int kCount>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const uint8_t* codes, int64_t cols, int64_t pieces,
                                                              const float* scale, Granularity granularity, T* values) {
  const int64_t row = blockIdx.x / pieces;
  const int64_t col = ((blockIdx.x - row * pieces) * kThreads + threadIdx.x) * kCount;
  if (col >= cols) return;
  const int64_t blocks = (cols + kBlockLength - 1) / kBlockLength;
  const int64_t element = row * cols + col;
  float s = scale_at(scale, granularity, row, col, blocks);
  if constexpr (kCount == 1) {
    values[element] = from_float<T>(decode<F>(codes[element]) * s);
  } else {
    const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(codes + element));
    __align__(16) T v[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t code = ((i < 4 ? raw.x : raw.y) >> (8 * (i % 4))) & 0xffu;
      if (granularity == Granularity::kColumn) s = __ldg(scale + col + i);
      v[i] = from_float<T>(decode<F>(code) * s);
    }
    uint4* target = reinterpret_cast<uint4*>(values + element);
#pragma unroll
    for (int i = 0; i < static_cast<int>(kCount * sizeof(T) / 16); ++i) target[i] = reinterpret_cast<uint4*>(v)[i];
  }
}

}  // namespace

void dequantize(Format format, const uint8_t* codes, int64_t rows, int64_t cols, const float* scale,
                Granularity granularity, Element element, void* values, cudaStream_t stream) {
  if (rows == 0 || cols == 0) return;
  const bool packed = cols % 8 == 0 && reinterpret_cast<uintptr_t>(codes) % 8 == 0;
  const int64_t per_block = packed ? kThreads * 8 : kThreads;
  const int64_t pieces = (cols + per_block - 1) / per_block;
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    with_format(format, [&](auto f) {
      constexpr Format F = decltype(f)::value;
      T* out = static_cast<T*>(values);
      const unsigned grid = static_cast<unsigned>(rows * pieces);
      if (packed) {
        dequantize_kernel<F, T, 8><<<grid, kThreads, 0, stream>>>(codes, cols, pieces, scale, granularity, out);
      } else {
        dequantize_kernel<F, T, 1><<<grid, kThreads, 0, stream>>>(codes, cols, pieces, scale, granularity, out);
      }
    });
  });
}

}  // namespace qsync
