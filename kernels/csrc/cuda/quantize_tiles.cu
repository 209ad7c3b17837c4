// Codes by known factors: dense tensors in memory order, tiles that also write the transposition, and any other layout.
#include "cuda/quantize_tiles.cuh"

namespace qsync {
namespace {

constexpr int kThreads = kTileThreads;
constexpr int kUnroll = 4;

// Grid: a block per kUnroll neighbouring lines of kThreads packs of a dense tensor, from its start to its end: what find_amax
// read last is still in the second-level cache. Traffic: each element read once, each code written once.
// Contract: quantize(granularity="tensor"), second pass.
template <typename T, Format F, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
    dense_kernel(const uint4* x, int64_t packs, Scaling scaling, uint8_t* codes, Stream stream) {
  constexpr int kCount = Pack<T>::kCount;
  const float factor = factor_of_tensor<F, kStochastic>(scaling);
  const uint64_t key = kStochastic ? stream_key(stream) : 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kUnroll;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  for (int64_t start = first; start < packs; start += step) {
    uint4 raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t p = start + i * kThreads;
      if (p < packs) raw[i] = __ldcs(x + p);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t p = start + i * kThreads;
      if (p >= packs) continue;
      float y[kCount];
      Pack<T>::unpack(raw[i], y);
#pragma unroll
      for (int j = 0; j < kCount; ++j) y[j] = __fmul_rn(y[j], factor);
      const uint64_t count = kStochastic ? counter(key, static_cast<uint64_t>(p) * (kCount / 4)) : 0;
      const uint32_t low = round_four<F, kStochastic>(y, kStochastic ? random_word(count) : 0);
      if constexpr (kCount == 4) {
        reinterpret_cast<uint32_t*>(codes)[p] = low;
      } else {
        const uint32_t high = round_four<F, kStochastic>(y + 4, kStochastic ? random_word(count + kGolden) : 0);
        reinterpret_cast<uint2*>(codes)[p] = make_uint2(low, high);
      }
    }
  }
}

// Any strides and sizes. Grid: x over pieces of 1024 columns of a row, row after row; one element per thread and step.
template <typename T, Format F, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
    any_kernel(const T* x, Matrix shape, Granularity granularity, int64_t pieces, const float* factors, uint8_t* codes,
               uint8_t* transposed, Stream stream) {
  const int64_t row = blockIdx.x / pieces;
  const int64_t first = (blockIdx.x - row * pieces) * 1024;
  const int64_t end = min(first + 1024, shape.cols);
  const int64_t blocks = (shape.cols + kBlockLength - 1) / kBlockLength;
  const uint64_t key = kStochastic ? stream_key(stream) : 0;
  for (int64_t col = first + threadIdx.x; col < end; col += kThreads) {
    const int64_t slice = granularity == Granularity::kRow      ? row
                          : granularity == Granularity::kColumn ? col
                          : granularity == Granularity::kBlock  ? row * blocks + col / kBlockLength
                                                                : 0;
    const float y = __fmul_rn(to_float(x[row * shape.row_stride + col * shape.col_stride]), factors[slice]);
    const int64_t element = row * shape.cols + col;
    const uint8_t code = round_at<F, kStochastic>(y, key, static_cast<uint64_t>(element));
    codes[element] = code;
    if (transposed != nullptr) transposed[col * shape.rows + row] = code;
  }
}

bool runs_tiles(const Matrix& x, const Codes& out, Granularity granularity) {
  return is_packed(x) && granularity != Granularity::kBlock && (out.transposed == nullptr || x.rows % 4 == 0);
}

template <typename T, Format F, bool kStochastic>
void launch_codes(const Matrix& x, const Codes& out, Granularity granularity, const Scaling& scaling,
                  cudaStream_t stream) {
  const T* data = static_cast<const T*>(x.data);
  if (!runs_tiles(x, out, granularity)) {
    const int64_t pieces = (x.cols + 1023) / 1024;
    any_kernel<T, F, kStochastic><<<static_cast<unsigned>(x.rows * pieces), kThreads, 0, stream>>>(
        data, x, granularity, pieces, scaling.factors, out.codes, out.transposed, out.stream);
    return;
  }
  if (out.transposed == nullptr && granularity == Granularity::kTensor && x.row_stride == x.cols) {
    const int64_t packs = x.rows * x.cols / Pack<T>::kCount;
    const int64_t grid = std::min((packs + kThreads * kUnroll - 1) / (kThreads * kUnroll), int64_t{0x7fffffff});
    dense_kernel<T, F, kStochastic><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(
        static_cast<const uint4*>(x.data), packs, scaling, out.codes, out.stream);
    return;
  }
  const int64_t across = (x.cols + kTile - 1) / kTile, down = (x.rows + kTile - 1) / kTile;
  const unsigned grid = static_cast<unsigned>(across * down);
  if (out.transposed == nullptr) {
    tiles_kernel<T, F, kStochastic, false, Values::kPlain><<<grid, kThreads, 0, stream>>>(
        data, nullptr, x.row_stride, x.rows, x.cols, across, granularity, scaling, out.codes, nullptr, out.stream, nullptr);
  } else {
    tiles_kernel<T, F, kStochastic, true, Values::kPlain><<<grid, kThreads, 0, stream>>>(
        data, nullptr, x.row_stride, x.rows, x.cols, across, granularity, scaling, out.codes, out.transposed, out.stream, nullptr);
  }
}

void launch(const Matrix& x, const Codes& out, Granularity granularity, const Scaling& scaling, cudaStream_t stream) {
  if (x.rows == 0 || x.cols == 0) return;
  with_element(x.element, [&](auto element) {
    with_format(out.format, [&](auto format) {
      with_rounding(out.stochastic, [&](auto stochastic) {
        launch_codes<typename decltype(element)::type, decltype(format)::value, decltype(stochastic)::value>(
            x, out, granularity, scaling, stream);
      });
    });
  });
}

}  // namespace

bool folds_scale(const Matrix& x, const Codes& out, Granularity granularity) {
  return granularity == Granularity::kTensor && x.rows > 0 && x.cols > 0 && runs_tiles(x, out, granularity);
}

void quantize_by_amax(const Matrix& x, const Codes& out, const uint32_t* amax, float* scale, cudaStream_t stream) {
  launch(x, out, Granularity::kTensor, {nullptr, amax, scale, 1.0f}, stream);
}

void quantize_with(const Matrix& x, const Codes& out, Granularity granularity, const float* factors, cudaStream_t stream) {
  launch(x, out, granularity, {factors, nullptr, nullptr, 1.0f}, stream);
}

}  // namespace qsync
