// GELU and its gradient with the largest magnitude of what they write: the first of the two passes of a quantizer.
#include "cuda/quantize_gelu.cuh"
#include "cuda/quantize_kernels.cuh"

namespace qsync {
namespace {

constexpr int kThreads = 256;

// Grid: a wave of blocks over the packs of dense tensors, from their end to their start, as amax_tensor_kernel; the elements
// that fill no pack go to the first block.
// Traffic: each operand read once, each result written once, one atomic per block.
// Contract: gelu_amax() and gelu_backward_amax() within 5e-7 (times grad) and the rounding of the element type.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(kThreads)
    gelu_kernel(const T* x, const T* grad, int64_t count, T* result, uint32_t* amax) {
  constexpr int kCount = Pack<T>::kCount, kUnroll = 2;
  __shared__ uint32_t partial[kThreads / 32];
  const int64_t packs = count / kCount, step = static_cast<int64_t>(gridDim.x) * kThreads;
  float magnitude = 0.0f;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < packs; first += kUnroll * step) {
    uint4 raw[kUnroll], raw_grad[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t p = packs - 1 - first - u * step;
      if (p >= 0) raw[u] = __ldcs(reinterpret_cast<const uint4*>(x) + p);
      if (kBackward && p >= 0) raw_grad[u] = __ldcs(reinterpret_cast<const uint4*>(grad) + p);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t p = packs - 1 - first - u * step;
      if (p < 0) continue;
      float v[kCount], g[kCount];
      Pack<T>::unpack(raw[u], v);
      if constexpr (kBackward) Pack<T>::unpack(raw_grad[u], g);
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = kBackward ? gelu_gradient(v[i], g[i]) : gelu_value(v[i]);
      const uint4 packed = pack<T>(v);
      magnitude = larger(magnitude, Pack<T>::magnitude(packed));
      reinterpret_cast<uint4*>(result)[p] = packed;
    }
  }
  for (int64_t i = packs * kCount + threadIdx.x; blockIdx.x == 0 && i < count; i += kThreads) {
    const float v = to_float(x[i]);
    result[i] = from_float<T>(kBackward ? gelu_gradient(v, to_float(grad[i])) : gelu_value(v));
    magnitude = larger(magnitude, fabsf(to_float(result[i])));
  }
  uint32_t bits = group_max<32>(__float_as_uint(magnitude));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = group_max<32>(threadIdx.x % 32 < kThreads / 32 ? partial[threadIdx.x % 32] : 0);
  if (threadIdx.x == 0) atomicMax(amax, bits);
}

template <bool kBackward>
void launch(Element element, const void* x, const void* grad, int64_t count, void* result, uint32_t* amax,
            cudaStream_t stream) {
  cudaMemsetAsync(amax, 0, sizeof(uint32_t), stream);
  if (count == 0) return;
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t needed = count / (kThreads * Pack<T>::kCount) + 1;
    const int64_t grid = std::min(needed, static_cast<int64_t>(blocks_per_wave(8)));
    gelu_kernel<T, kBackward><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(grad), count, static_cast<T*>(result), amax);
  });
}

}  // namespace

void gelu_amax(Element element, const void* x, int64_t count, void* result, uint32_t* amax, cudaStream_t stream) {
  launch<false>(element, x, nullptr, count, result, amax, stream);
}

void gelu_backward_amax(Element element, const void* grad, const void* x, int64_t count, void* result, uint32_t* amax,
                        cudaStream_t stream) {
  launch<true>(element, x, grad, count, result, amax, stream);
}

}  // namespace qsync
