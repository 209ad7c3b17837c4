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

// Grid: a thread per four codes. Traffic: each code read once, each written once.
// Contract: recast(), bit for bit.
template <Format From, Format To, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
    recast_kernel(const uint8_t* codes, int64_t count, float ratio, uint8_t* out, Stream stream) {
  const int64_t four = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t left = count - four * 4;
  if (left <= 0) return;
  const uint64_t key = kStochastic ? stream_key(stream) : 0;
  const uint8_t* source = codes + four * 4;
  uint32_t raw = 0;
  const bool whole = left >= 4 && reinterpret_cast<uintptr_t>(codes) % 4 == 0;
  if (whole) {
    raw = *reinterpret_cast<const uint32_t*>(source);
  } else {
    for (int i = 0; i < left && i < 4; ++i) raw |= static_cast<uint32_t>(source[i]) << (8 * i);
  }
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(decode<From>((raw >> (8 * i)) & 0xffu), ratio);
  const uint32_t result = round_four<To, kStochastic>(y, kStochastic ? random_word(counter(key, four)) : 0);
  if (left >= 4) {
    *reinterpret_cast<uint32_t*>(out + four * 4) = result;
  } else {
    for (int i = 0; i < left; ++i) out[four * 4 + i] = static_cast<uint8_t>(result >> (8 * i));
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

void recast(Format from, const uint8_t* codes, int64_t count, float ratio, const Codes& out, cudaStream_t stream) {
  if (count == 0) return;
  const unsigned grid = static_cast<unsigned>((count + kThreads * 4 - 1) / (kThreads * 4));
  with_format(from, [&](auto source) {
    with_format(out.format, [&](auto target) {
      with_rounding(out.stochastic, [&](auto stochastic) {
        recast_kernel<decltype(source)::value, decltype(target)::value, decltype(stochastic)::value>
            <<<grid, kThreads, 0, stream>>>(codes, count, ratio, out.codes, out.stream);
      });
    });
  });
}

}  // namespace qsync
