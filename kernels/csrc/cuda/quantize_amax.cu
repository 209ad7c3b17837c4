// Largest magnitudes of the slices, and the scales that follow from them.
#include "cuda/quantize_kernels.cuh"

namespace qsync {

bool is_packed(const Matrix& x) {
  const int64_t count = x.element == Element::kFloat ? 4 : 8;
  const bool aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row_stride % count == 0;
  return x.col_stride == 1 && x.cols % count == 0 && aligned;
}

int blocks_per_wave(int per_multiprocessor) {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count * per_multiprocessor;
}

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ uint32_t block_max(uint32_t bits) {
  __shared__ uint32_t partial[kThreads / 32];
  bits = group_max<32>(bits);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = threadIdx.x % 32 < kThreads / 32 ? partial[threadIdx.x % 32] : 0;
  return group_max<32>(bits);
}

// Grid: a wave of blocks over the packs of a dense tensor, kUnroll neighbouring lines of kThreads packs at a time, from its end
// to its start: what the kernel before wrote last is still in the second-level cache. Traffic: each element read once, one
// atomic per block.
template <typename T>
__global__ void __launch_bounds__(kThreads) amax_tensor_kernel(const uint4* x, int64_t packs, uint32_t* amax) {
  constexpr int kUnroll = 4;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kUnroll;
  int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  float magnitude = 0.0f;
  for (; p + (kUnroll - 1) * kThreads < packs; p += step) {
    uint4 raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) raw[i] = __ldg(x + packs - 1 - p - i * kThreads);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) magnitude = larger(magnitude, Pack<T>::magnitude(raw[i]));
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (p + i * kThreads < packs) magnitude = larger(magnitude, Pack<T>::magnitude(__ldg(x + packs - 1 - p - i * kThreads)));
  }
  const uint32_t bits = block_max(__float_as_uint(magnitude));
  if (threadIdx.x == 0) atomicMax(amax, bits);
}

// Grid: x over rows, a block per row. Traffic: each element read once.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_rows_kernel(const T* x, int64_t row_stride, int64_t packs, uint32_t* amax) {
  const uint4* source = reinterpret_cast<const uint4*>(x + static_cast<int64_t>(blockIdx.x) * row_stride);
  float magnitude = 0.0f;
#pragma unroll 4
  for (int64_t p = threadIdx.x; p < packs; p += kThreads) magnitude = larger(magnitude, Pack<T>::magnitude(__ldg(source + p)));
  const uint32_t bits = block_max(__float_as_uint(magnitude));
  if (threadIdx.x == 0) amax[blockIdx.x] = bits;
}

// Grid: x over packs of columns (32 per block), y over chunks of rows; 8 rows per step of a block. Traffic: each element
// read once, one atomic per column and chunk.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_columns_kernel(const T* x, int64_t row_stride, int64_t rows, int64_t cols, int64_t chunk, uint32_t* amax) {
  constexpr int kCount = Pack<T>::kCount;
  __shared__ uint32_t partial[kThreads / 32][32 * kCount];
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * 32 + lane) * kCount;
  const int64_t end = min(rows, (static_cast<int64_t>(blockIdx.y) + 1) * chunk);
  float magnitude[kCount] = {};
  if (col < cols) {
#pragma unroll 4
    for (int64_t row = blockIdx.y * chunk + line; row < end; row += kThreads / 32) {
      float v[kCount];
      Pack<T>::unpack(__ldg(reinterpret_cast<const uint4*>(x + row * row_stride + col)), v);
#pragma unroll
      for (int i = 0; i < kCount; ++i) magnitude[i] = larger(magnitude[i], fabsf(v[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) partial[line][i * 32 + lane] = __float_as_uint(magnitude[i]);
  __syncthreads();
  for (int c = threadIdx.x; c < 32 * kCount; c += kThreads) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) bits = max(bits, partial[i][c]);
    const int64_t target = (static_cast<int64_t>(blockIdx.x) * 32 + c % 32) * kCount + c / 32;
    if (target < cols) atomicMax(amax + target, bits);
  }
}

// Any strides and sizes. Grid: x over pieces of 1024 columns of a row, row after row. One element per thread and step.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_any_kernel(const T* x, Matrix shape, Granularity granularity, int64_t pieces, uint32_t* amax) {
  const int64_t row = blockIdx.x / pieces;
  const int64_t first = (blockIdx.x - row * pieces) * 1024;
  const int64_t blocks = (shape.cols + kBlockLength - 1) / kBlockLength;
  uint32_t all = 0;
  for (int64_t col = first + threadIdx.x; col - threadIdx.x < min(first + 1024, shape.cols); col += kThreads) {
    uint32_t bits = 0;
    if (col < shape.cols) {
      bits = __float_as_uint(fabsf(to_float(x[row * shape.row_stride + col * shape.col_stride])));
      if (granularity == Granularity::kColumn) atomicMax(amax + col, bits);
    }
    if (granularity == Granularity::kBlock) {
      const uint32_t group = group_max<32>(bits);
      const int64_t block = (col - threadIdx.x % 32) / kBlockLength;
      if (threadIdx.x % 32 == 0 && block < blocks) atomicMax(amax + row * blocks + block, group);
    }
    all = max(all, bits);
  }
  if (granularity == Granularity::kTensor || granularity == Granularity::kRow) {
    const uint32_t bits = block_max(all);
    if (threadIdx.x == 0) atomicMax(amax + (granularity == Granularity::kRow ? row : 0), bits);
  }
}

template <Format F, bool kStochastic>
__global__ void scales_kernel(const uint32_t* amax, float* scale, float* factors, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float s = scale_of<F>(__uint_as_float(amax[i]));
  scale[i] = s;
  factors[i] = factor_of<F, kStochastic>(s);
}

__global__ void stretch_kernel(const float* amax, float stretch, float* result) { *result = __fmul_rn(*amax, stretch); }

template <typename T>
void launch_amax(const Matrix& x, Granularity granularity, uint32_t* amax, cudaStream_t stream) {
  const T* data = static_cast<const T*>(x.data);
  const int64_t packs = x.cols / Pack<T>::kCount;
  const bool packed = is_packed(x);
  if (packed && granularity == Granularity::kTensor && x.row_stride == x.cols) {
    const int64_t total = x.rows * packs;
    const int64_t needed = (total + kThreads * 4 - 1) / (kThreads * 4);
    const int64_t grid = std::min(needed, static_cast<int64_t>(blocks_per_wave(8)));
    amax_tensor_kernel<T><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(static_cast<const uint4*>(x.data), total, amax);
  } else if (packed && granularity == Granularity::kRow && x.rows <= 0x7fffffff) {
    amax_rows_kernel<T><<<static_cast<unsigned>(x.rows), kThreads, 0, stream>>>(data, x.row_stride, packs, amax);
  } else if (packed && granularity == Granularity::kColumn) {
    const int64_t across = (packs + 31) / 32;
    const int64_t wanted = std::max(int64_t{1}, blocks_per_wave(16) / across);
    const int64_t chunk = std::max(int64_t{64}, (x.rows + wanted - 1) / wanted);
    const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>((x.rows + chunk - 1) / chunk));
    amax_columns_kernel<T><<<grid, kThreads, 0, stream>>>(data, x.row_stride, x.rows, x.cols, chunk, amax);
  } else {
    const int64_t pieces = (x.cols + 1023) / 1024;
    amax_any_kernel<T><<<static_cast<unsigned>(x.rows * pieces), kThreads, 0, stream>>>(data, x, granularity, pieces, amax);
  }
}

}  // namespace

void find_amax(const Matrix& x, Granularity granularity, uint32_t* amax, cudaStream_t stream) {
  const int64_t blocks = (x.cols + kBlockLength - 1) / kBlockLength;
  const int64_t counts[] = {1, x.rows, x.cols, x.rows * blocks};
  cudaMemsetAsync(amax, 0, counts[static_cast<int>(granularity)] * sizeof(uint32_t), stream);
  if (x.rows == 0 || x.cols == 0) return;
  with_element(x.element, [&](auto element) {
    launch_amax<typename decltype(element)::type>(x, granularity, amax, stream);
  });
}

void stretch_amax(const uint32_t* amax, float stretch, float* result, cudaStream_t stream) {
  stretch_kernel<<<1, 1, 0, stream>>>(reinterpret_cast<const float*>(amax), stretch, result);
}

void find_scales(const Codes& out, const uint32_t* amax, float* scale, float* factors, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const unsigned grid = static_cast<unsigned>((count + 255) / 256);
  const int threads = count == 1 ? 1 : 256;
  with_format(out.format, [&](auto format) {
    with_rounding(out.stochastic, [&](auto stochastic) {
      scales_kernel<decltype(format)::value, decltype(stochastic)::value>
          <<<grid, threads, 0, stream>>>(amax, scale, factors, count);
    });
  });
}

}  // namespace qsync
