// Codes of a matrix by known factors, tile by tile, so that they can be written transposed in the same pass.
#pragma once

#include "cuda/quantize_gelu.cuh"
#include "cuda/quantize_kernels.cuh"

namespace qsync {

constexpr int kTileThreads = 256;
constexpr int kTile = 128;

// Where the factors of a launch come from: an array, or the largest magnitude of the whole tensor. In the second case the
// first thread of the grid writes the scale.
struct Scaling {
  const float* factors;
  const uint32_t* amax;
  float* scale;
  float stretch;  // what the largest magnitude is multiplied by to be that of what is rounded, or above it
};

template <Format F, bool kStochastic>
__device__ __forceinline__ float factor_of_tensor(const Scaling& scaling) {
  if (scaling.amax == nullptr) return __ldg(scaling.factors);
  const float scale = scale_of<F>(__fmul_rn(__uint_as_float(__ldg(scaling.amax)), scaling.stretch));
  if (blockIdx.x == 0 && threadIdx.x == 0) *scaling.scale = scale;
  return factor_of<F, kStochastic>(scale);
}

// What is rounded: the elements themselves, GELU of them, or a gradient times the derivative of GELU at them.
enum class Values : int { kPlain = 0, kGelu = 1, kGeluGradient = 2 };

// Words of the transposition of a 4 x 4 tile of bytes.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&row)[4], uint32_t (&col)[4]) {
  const uint32_t a = __byte_perm(row[0], row[1], 0x5140), b = __byte_perm(row[2], row[3], 0x5140);
  const uint32_t c = __byte_perm(row[0], row[1], 0x7362), d = __byte_perm(row[2], row[3], 0x7362);
  col[0] = __byte_perm(a, b, 0x5410);
  col[1] = __byte_perm(a, b, 0x7632);
  col[2] = __byte_perm(c, d, 0x5410);
  col[3] = __byte_perm(c, d, 0x7632);
}

// Grid: x over tiles of 128 x 128 elements, beginning where the kernel before ended: the pass that found one magnitude for all
// ends at the start, any other at the end. Traffic: each element read
// once, each code written once, and once more, through shared memory, for the transposition.
// Contract: quantize() of any granularity but blocks, second pass; of GELU or its gradient as quantize_gelu.cu rounds it,
// which is formed on the way and written nowhere. `sums` (kGeluGradient only) or null: sums over the rows of each tile, tile
// rows x cols, in a fixed order.
template <typename T, Format F, bool kStochastic, bool kTransposed, Values kValues>
__global__ void __launch_bounds__(kTileThreads)
    tiles_kernel(const T* x, const T* grad, int64_t row_stride, int64_t rows, int64_t cols, int64_t tiles_across,
                 Granularity granularity, Scaling scaling, uint8_t* codes, uint8_t* transposed, Stream stream,
                 float* sums) {
  constexpr int kCount = Pack<T>::kCount;
  constexpr int kAcross = kTile / kCount;           // threads along a row of the tile
  constexpr int kLines = kTileThreads / kAcross;        // groups of four rows at a time
  constexpr int kSteps = kTile / (4 * kLines);
  // Column c of the tile is line (c % kCount) * kAcross + c / kCount: a warp then writes to 32 banks.
  __shared__ uint32_t shared[kTransposed ? kTile : 1][kTile / 4 + 1];
  const int across = threadIdx.x % kAcross, line = threadIdx.x / kAcross;
  const bool from_start = kValues == Values::kPlain && granularity == Granularity::kTensor;
  const int64_t tile = from_start ? blockIdx.x : gridDim.x - 1 - blockIdx.x, tile_row = tile / tiles_across;
  const int64_t top = tile_row * kTile, left = (tile - tile_row * tiles_across) * kTile;
  const int64_t col = left + across * kCount;
  const uint64_t key = kStochastic ? stream_key(stream) : 0;
  float factor[kCount], sum[kCount] = {};
  const float whole = granularity == Granularity::kTensor ? factor_of_tensor<F, kStochastic>(scaling) : 0.0f;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    factor[j] = granularity == Granularity::kColumn && col < cols ? __ldg(scaling.factors + col + j) : whole;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int four = line + s * kLines;
    uint4 raw[4], raw_grad[4];
    uint32_t packed[kCount / 4][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = top + four * 4 + r;
      const bool inside = row < rows && col < cols;
      raw[r] = inside ? __ldcs(reinterpret_cast<const uint4*>(x + row * row_stride + col)) : make_uint4(0, 0, 0, 0);
      if constexpr (kValues == Values::kGeluGradient) {
        const auto* from = reinterpret_cast<const uint4*>(grad + row * row_stride + col);
        raw_grad[r] = inside ? __ldcs(from) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = top + four * 4 + r;
      const bool inside = row < rows && col < cols;
      const int64_t element = row * cols + col;
      const uint64_t count = kStochastic ? counter(key, static_cast<uint64_t>(element) / 4) : 0;
      const float by_row = granularity == Granularity::kRow && inside ? __ldg(scaling.factors + row) : 1.0f;
      float y[kCount];
      Pack<T>::unpack(raw[r], y);
      if constexpr (kValues == Values::kGelu) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) y[j] = gelu_value(y[j]);
        Pack<T>::unpack(pack<T>(y), y);
      } else if constexpr (kValues == Values::kGeluGradient) {
        float g[kCount];
        Pack<T>::unpack(raw_grad[r], g);
#pragma unroll
        for (int j = 0; j < kCount; ++j) y[j] = gelu_gradient(y[j], g[j]);
        Pack<T>::unpack(pack<T>(y), y);
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] += y[j];
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) y[j] = __fmul_rn(y[j], granularity == Granularity::kRow ? by_row : factor[j]);
#pragma unroll
      for (int h = 0; h < kCount / 4; ++h) {
        packed[h][r] = round_four<F, kStochastic>(y + 4 * h, kStochastic ? random_word(count + h * kGolden) : 0);
      }
      if (inside) {
        if constexpr (kCount == 4) {
          *reinterpret_cast<uint32_t*>(codes + element) = packed[0][r];
        } else {
          *reinterpret_cast<uint2*>(codes + element) = make_uint2(packed[0][r], packed[kCount / 4 - 1][r]);
        }
      }
    }
    if constexpr (kTransposed) {
#pragma unroll
      for (int h = 0; h < kCount / 4; ++h) {
        uint32_t turned[4];
        transpose_bytes(packed[h], turned);
#pragma unroll
        for (int j = 0; j < 4; ++j) shared[(4 * h + j) * kAcross + across][four] = turned[j];
      }
    }
  }
  if constexpr (kTransposed) {
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const int64_t row = top + lane * 4;
#pragma unroll 4
    for (int c = threadIdx.x / 32; c < kTile; c += kTileThreads / 32) {
      const int64_t to = left + c;
      if (to < cols && row < rows) {
        *reinterpret_cast<uint32_t*>(transposed + to * rows + row) = shared[(c % kCount) * kAcross + c / kCount][lane];
      }
    }
  }
  if constexpr (kValues == Values::kGeluGradient) {
    if (sums != nullptr) {
      __syncthreads();
      float* const lines = reinterpret_cast<float*>(&shared[0][0]);  // kLines x kTile
#pragma unroll
      for (int j = 0; j < kCount; ++j) lines[line * kTile + across * kCount + j] = sum[j];
      __syncthreads();
      if (threadIdx.x < kTile && left + threadIdx.x < cols) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kLines; ++i) total += lines[i * kTile + threadIdx.x];
        sums[tile_row * cols + left + threadIdx.x] = total;
      }
    }
  }
}

}  // namespace qsync
