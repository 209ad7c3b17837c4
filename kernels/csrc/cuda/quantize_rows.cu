// Quantizers of one pass: the slice that shares a scale stays in registers between its maximum and its rounding.
#include "cuda/quantize_kernels.cuh"

namespace qsync {
namespace {

constexpr int kMaxThreads = 512;

template <typename T, Format F, bool kStochastic>
__device__ __forceinline__ void store_codes(const uint4& raw, float factor, uint64_t count, uint8_t* out) {
  constexpr int kCount = Pack<T>::kCount;
  float y[kCount];
  Pack<T>::unpack(raw, y);
#pragma unroll
  for (int i = 0; i < kCount; ++i) y[i] = __fmul_rn(y[i], factor);
  const uint32_t low = round_four<F, kStochastic>(y, kStochastic ? random_word(count) : 0);
  if constexpr (kCount == 4) {
    *reinterpret_cast<uint32_t*>(out) = low;
  } else {
    const uint32_t high = round_four<F, kStochastic>(y + 4, kStochastic ? random_word(count + kGolden) : 0);
    *reinterpret_cast<uint2*>(out) = make_uint2(low, high);
  }
}

// Grid: blockDim.y rows per block, blockDim.x (a multiple of 32) threads per row, kPacks 16-byte packs per thread.
// Traffic: each element read once, each code written once, all loads of a row in flight together.
// Contract: quantize(granularity="row"), the same codes and scales bit for bit.
template <typename T, Format F, bool kStochastic, int kPacks>
__global__ void __launch_bounds__(kMaxThreads)
    rows_kernel(const T* x, int64_t row_stride, int64_t rows, int64_t cols, uint8_t* codes, float* scales, Stream stream) {
  constexpr int kCount = Pack<T>::kCount;
  __shared__ uint32_t partial[kMaxThreads / 32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int packs = row < rows ? static_cast<int>(cols / kCount) : 0;
  const uint4* source = reinterpret_cast<const uint4*>(x + row * row_stride);
  uint4 raw[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int p = threadIdx.x + i * blockDim.x;
    raw[i] = p < packs ? __ldcs(source + p) : make_uint4(0, 0, 0, 0);
  }
  float magnitude = 0.0f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) magnitude = larger(magnitude, Pack<T>::magnitude(raw[i]));
  uint32_t bits = group_max<32>(__float_as_uint(magnitude));
  if (blockDim.x > 32) {  // then blockDim.y is 1
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = bits;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    bits = group_max<32>(lane < static_cast<int>(blockDim.x / 32) ? partial[lane] : 0);
  }
  const float scale = scale_of<F>(__uint_as_float(bits));
  const float factor = factor_of<F, kStochastic>(scale);
  const int64_t start = row * cols + static_cast<int64_t>(threadIdx.x) * kCount;
  const uint64_t first = kStochastic ? counter(stream_key(stream), static_cast<uint64_t>(start) / 4) : 0;
  const uint64_t stride = blockDim.x * (kCount / 4) * kGolden;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int p = threadIdx.x + i * blockDim.x;
    if (p >= packs) continue;
    store_codes<T, F, kStochastic>(raw[i], factor, first + i * stride, codes + start + i * blockDim.x * kCount);
  }
  if (packs > 0 && threadIdx.x == 0) scales[row] = scale;
}

template <typename T, Format F, bool kStochastic, int kPacks>
void launch_rows(const Matrix& x, const Codes& out, float* scale, cudaStream_t stream) {
  const int64_t packs = x.cols / Pack<T>::kCount;
  const int threads = static_cast<int>((packs + 32 * kPacks - 1) / (32 * kPacks) * 32);
  const dim3 block(threads, threads == 32 ? 8 : 1);
  const unsigned grid = static_cast<unsigned>((x.rows + block.y - 1) / block.y);
  rows_kernel<T, F, kStochastic, kPacks><<<grid, block, 0, stream>>>(
      static_cast<const T*>(x.data), x.row_stride, x.rows, x.cols, out.codes, scale, out.stream);
}

// Grid: a warp takes kUnroll x 32 packs in memory order, row after row; a block of 128 elements is 32 or 16 lanes.
// Traffic: each element read once, each code written once.
// Contract: quantize(granularity="block"), the same codes and scales bit for bit.
template <typename T, Format F, bool kStochastic, int kUnroll>
__global__ void __launch_bounds__(256) blocks_kernel(const T* x, int64_t row_stride, int64_t rows, int64_t cols,
                                                     bool dense, uint8_t* codes, float* scales, Stream stream) {
  constexpr int kCount = Pack<T>::kCount;
  constexpr int kLanes = kBlockLength / kCount;
  const int64_t blocks = (cols + kBlockLength - 1) / kBlockLength;
  const int64_t total = rows * blocks;
  const int lane = threadIdx.x % kLanes;
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const int64_t groups = static_cast<int64_t>(gridDim.x) * blockDim.x / kLanes;
  const uint64_t key = kStochastic ? stream_key(stream) : 0;
  uint4 raw[kUnroll];
  int64_t element[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t b = group + i * groups;
    // Whole blocks, one after the other in memory, need no division.
    const int64_t row = dense ? 0 : b / blocks;
    const int64_t col = (b - row * blocks) * kBlockLength + lane * kCount;
    const bool inside = b < total && (dense || col < cols);
    raw[i] = inside ? __ldcs(reinterpret_cast<const uint4*>(x + row * row_stride + col)) : make_uint4(0, 0, 0, 0);
    element[i] = inside ? row * cols + col : -1;
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const uint32_t bits = group_max<kLanes>(__float_as_uint(Pack<T>::magnitude(raw[i])));
    const float scale = scale_of<F>(__uint_as_float(bits));
    if (element[i] < 0) continue;
    const uint64_t count = kStochastic ? counter(key, static_cast<uint64_t>(element[i]) / 4) : 0;
    store_codes<T, F, kStochastic>(raw[i], factor_of<F, kStochastic>(scale), count, codes + element[i]);
    if (lane == 0) scales[group + i * groups] = scale;
  }
}

}  // namespace

bool quantize_rows(const Matrix& x, const Codes& out, float* scale, cudaStream_t stream) {
  bool fits = true;
  with_element(x.element, [&](auto element) {
    using T = typename decltype(element)::type;
    const int64_t packs = x.cols / Pack<T>::kCount;
    if (packs > kMaxThreads * 8 || x.rows > 0x7fffffff) {
      fits = false;
      return;
    }
    with_format(out.format, [&](auto format) {
      with_rounding(out.stochastic, [&](auto stochastic) {
        constexpr Format F = decltype(format)::value;
        constexpr bool S = decltype(stochastic)::value;
        if (packs <= 32) return launch_rows<T, F, S, 1>(x, out, scale, stream);
        if (packs <= 128) return launch_rows<T, F, S, 2>(x, out, scale, stream);
        if (packs <= kMaxThreads * 4) return launch_rows<T, F, S, 4>(x, out, scale, stream);
        return launch_rows<T, F, S, 8>(x, out, scale, stream);
      });
    });
  });
  return fits;
}

void quantize_blocks(const Matrix& x, const Codes& out, float* scale, cudaStream_t stream) {
  with_element(x.element, [&](auto element) {
    using T = typename decltype(element)::type;
    constexpr int kLanes = kBlockLength / Pack<T>::kCount;
    constexpr int kUnroll = 4;
    const int64_t total = x.rows * ((x.cols + kBlockLength - 1) / kBlockLength);
    const int64_t grid = (total * kLanes + 256 * kUnroll - 1) / (256 * kUnroll);
    const bool dense = x.row_stride == x.cols && x.cols % kBlockLength == 0;
    with_format(out.format, [&](auto format) {
      with_rounding(out.stochastic, [&](auto stochastic) {
        blocks_kernel<T, decltype(format)::value, decltype(stochastic)::value, kUnroll>
            <<<static_cast<unsigned>(grid), 256, 0, stream>>>(static_cast<const T*>(x.data), x.row_stride, x.rows, x.cols,
                                                              dense, out.codes, scale, out.stream);
      });
    });
  });
}

}  // namespace qsync
