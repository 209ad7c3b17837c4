// Codes of GELU and of its gradient, formed on the way: for FP8, whose scale needs no more than a bound of what is rounded.
#include "cuda/quantize_tiles.cuh"

namespace qsync {
namespace {

constexpr int kAcross = 32, kDown = 8;  // threads of a block that adds rows up

template <typename T, Format F, bool kStochastic, Values kValues>
void run(const Matrix& x, const void* grad, const Codes& out, const Scaling& scaling, float* sums, cudaStream_t stream) {
  const int64_t across = (x.cols + kTile - 1) / kTile, down = (x.rows + kTile - 1) / kTile;
  tiles_kernel<T, F, kStochastic, true, kValues><<<static_cast<unsigned>(across * down), kTileThreads, 0, stream>>>(
      static_cast<const T*>(x.data), static_cast<const T*>(grad), x.row_stride, x.rows, x.cols, across,
      Granularity::kTensor, scaling, out.codes, out.transposed, out.stream, sums);
}

template <typename T>
void run_type(
    const Matrix& x, const void* grad, const Codes& out, const Scaling& scaling, float* sums, cudaStream_t stream) {
  with_rounding(out.stochastic, [&](auto stochastic) {
    constexpr bool kStochastic = decltype(stochastic)::value;
    if (grad == nullptr) {
      run<T, Format::kE4M3, kStochastic, Values::kGelu>(x, grad, out, scaling, sums, stream);
    } else {
      run<T, Format::kE5M2, kStochastic, Values::kGeluGradient>(x, grad, out, scaling, sums, stream);
    }
  });
}

// Grid: x over 32 columns, y over tiles of rows. Traffic: each element read once. The order of additions is fixed.
template <typename T>
__global__ void __launch_bounds__(kAcross* kDown) tile_sums_kernel(const T* x, int64_t rows, int64_t cols, float* sums) {
  __shared__ float partial[kDown][kAcross];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kAcross + threadIdx.x;
  for (int64_t tile = blockIdx.y; tile * kTile < rows; tile += gridDim.y) {
    const int64_t end = min((tile + 1) * kTile, rows);
    float total = 0.0f;
    for (int64_t row = tile * kTile + threadIdx.y; row < end && col < cols; row += kDown) total += to_float(x[row * cols + col]);
    partial[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y == 0 && col < cols) {
      for (int i = 1; i < kDown; ++i) total += partial[i][threadIdx.x];
      sums[tile * cols + col] = total;
    }
    __syncthreads();
  }
}

// Grid: a thread per column. Traffic: each sum of a tile read once.
__global__ void __launch_bounds__(kTileThreads) whole_sums_kernel(const float* sums, int64_t tiles, int64_t cols, float* whole) {
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kTileThreads + threadIdx.x;
  if (col >= cols) return;
  float total = 0.0f;
  for (int64_t tile = 0; tile < tiles; ++tile) total += sums[tile * cols + col];
  whole[col] = total;
}

}  // namespace

bool forms_gelu(const Matrix& x, const void* grad, const Codes& out) {
  const Format wanted = grad == nullptr ? Format::kE4M3 : Format::kE5M2;
  const bool aligned = is_packed(x) && reinterpret_cast<uintptr_t>(grad) % 16 == 0;
  return aligned && x.element != Element::kFloat && out.format == wanted && out.transposed != nullptr &&
         x.rows % 4 == 0 && x.rows > 0 && x.cols > 0;
}

void quantize_gelu(const Matrix& x, const void* grad, const Codes& out, const uint32_t* amax, float stretch, float* scale,
                   float* sums, cudaStream_t stream) {
  const Scaling scaling{nullptr, amax, scale, stretch};
  if (x.element == Element::kBFloat16) return run_type<__nv_bfloat16>(x, grad, out, scaling, sums, stream);
  run_type<__half>(x, grad, out, scaling, sums, stream);
}

int64_t sum_tiles(int64_t rows) { return (rows + kTile - 1) / kTile; }

void add_tile_rows(const Matrix& x, float* sums, cudaStream_t stream) {
  if (x.rows == 0 || x.cols == 0) return;
  const dim3 grid(static_cast<unsigned>((x.cols + kAcross - 1) / kAcross),
                  static_cast<unsigned>(std::min<int64_t>(sum_tiles(x.rows), 65535)));
  with_element(x.element, [&](auto element) {
    using T = typename decltype(element)::type;
    tile_sums_kernel<T><<<grid, dim3(kAcross, kDown), 0, stream>>>(static_cast<const T*>(x.data), x.rows, x.cols, sums);
  });
}

void add_tiles(const float* sums, int64_t tiles, int64_t cols, float* whole, cudaStream_t stream) {
  if (cols == 0) return;
  const unsigned grid = static_cast<unsigned>((cols + kTileThreads - 1) / kTileThreads);
  whole_sums_kernel<<<grid, kTileThreads, 0, stream>>>(sums, tiles, cols, whole);
}

}  // namespace qsync
