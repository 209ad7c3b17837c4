// Cross-entropy of rows of logits, and its gradient in their place; the contract is kernels/cross_entropy/rows.py, up to
// the order of sums.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>

#include "stable.cuh"

namespace qsync {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float wide(__half x) { return __half2float(x); }
__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ double wide(double x) { return x; }
template <typename T, typename Sum>
__device__ __forceinline__ T narrow(Sum x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else return x;
}
__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

// 16 bytes of a row, or one element where rows do not begin at a multiple of 16 bytes.
template <typename T, bool kPacked>
struct alignas(kPacked ? 16 : alignof(T)) Pack {
  static constexpr int kCount = kPacked ? 16 / sizeof(T) : 1;
  T values[kCount];
};

// A sum of exponentials, relative to that of the largest exponent; of nothing and of minus infinities it is 0.
template <typename Sum>
struct Exponentials {
  Sum largest = -INFINITY, sum = 0;

  __device__ __forceinline__ void rescale(Sum other) {
    if (other > largest) {
      sum *= exponential(largest - other);
      largest = other;
    }
  }
  __device__ __forceinline__ void add(Sum x) {  // after rescale(); what is NaN makes the sum NaN
    if (x != -INFINITY) sum += exponential(x - largest);
  }
  __device__ __forceinline__ void add(const Exponentials& other) {
    rescale(other.largest);
    if (other.largest != -INFINITY) sum += other.sum * exponential(other.largest - largest);
    else sum += other.sum;  // 0 or NaN
  }
};

template <typename Value, typename Combine>
__device__ __forceinline__ Value over_block(Value value, Combine combine, Value* shared) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = combine(value, offset);
  const int warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
  __syncthreads();  // what was shared before is read
  if (lane == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = lane < warps ? shared[lane] : Value{};
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = combine(value, offset);
  return value;
}

// Grid: a block per row. Traffic: each logit is read twice, the second time mostly from the second-level cache, and
// its gradient written once.
template <typename T, typename Sum, bool kPacked>
__global__ void rows_kernel(T* logits, const int64_t* target, int64_t classes, int64_t ignore_index, Sum smoothing,
                            bool gradient, Sum* losses) {
  using Packed = Pack<T, kPacked>;
  constexpr int kCount = Packed::kCount;
  __shared__ Exponentials<Sum> shared[kWarp];
  __shared__ Sum shared_sums[kWarp];
  const int64_t row = blockIdx.x, packs = classes / kCount;
  Packed* own = reinterpret_cast<Packed*>(logits + row * classes);
  const int64_t label = target[row];
  if (label == ignore_index) {
    Packed zeros;
#pragma unroll
    for (int i = 0; i < kCount; ++i) zeros.values[i] = narrow<T>(Sum(0));
    for (int64_t p = threadIdx.x; gradient && p < packs; p += blockDim.x) own[p] = zeros;
    if (threadIdx.x == 0) losses[row] = 0;
    return;
  }
  if (label < 0 || label >= classes) {
    if (threadIdx.x == 0) {
      printf("cross-entropy: target[%lld] is %lld: allowed are 0 to %lld and ignore_index=%lld\n",
             static_cast<long long>(row), static_cast<long long>(label), static_cast<long long>(classes - 1),
             static_cast<long long>(ignore_index));
    }
    __trap();  // as torch's own cross-entropy does
  }
  Exponentials<Sum> mine;
#pragma unroll 2
  for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
    const Packed pack = own[p];
    Sum values[kCount], largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = values[i] = wide(pack.values[i]), mine.rescale(largest);
#pragma unroll
    for (int i = 0; i < kCount; ++i) mine.add(values[i]);
  }
  const auto whole = over_block(
      mine,
      [](Exponentials<Sum> value, int offset) {
        Exponentials<Sum> other;
        other.largest = __shfl_xor_sync(kAll, value.largest, offset);
        other.sum = __shfl_xor_sync(kAll, value.sum, offset);
        value.add(other);
        return value;
      },
      shared);
  const Sum normalizer = whole.largest + logarithm(whole.sum);
  if (threadIdx.x == 0) losses[row] = (smoothing - 1) * (wide(logits[row * classes + label]) - normalizer);
  if (!gradient && smoothing == 0) return;
  const Sum each = smoothing / classes;
  Sum logarithms = 0;
  __syncthreads();  // the label's logit is read
#pragma unroll 2
  for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
    Packed pack = own[p];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Sum value = wide(pack.values[i]) - normalizer;
      logarithms += value;
      Sum slope = exponential(value);
      if (smoothing != 0) slope -= each;
      if (p * kCount + i == label) slope += smoothing - 1;
      pack.values[i] = narrow<T>(slope);
    }
    if (gradient) own[p] = pack;
  }
  if (smoothing == 0) return;
  logarithms = over_block(
      logarithms, [](Sum value, int offset) { return value + __shfl_xor_sync(kAll, value, offset); }, shared_sums);
  if (threadIdx.x == 0) losses[row] -= each * logarithms;
}

template <typename T, typename Sum>
void launch(const Tensor& logits, const Tensor& target, int64_t ignore_index, double smoothing, bool gradient, Tensor& losses) {
  const int64_t rows = logits.size(0), classes = logits.size(1);
  if (rows == 0) return;
  T* data = static_cast<T*>(logits.data_ptr());
  const bool packed = classes * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const auto kernel = packed ? rows_kernel<T, Sum, true> : rows_kernel<T, Sum, false>;
  const int threads = classes >= 8192 ? 512 : classes >= 1024 ? 256 : 64;
  kernel<<<static_cast<unsigned>(rows), threads, 0, stream_of(logits)>>>(
      data, static_cast<const int64_t*>(target.data_ptr()), classes, ignore_index, static_cast<Sum>(smoothing), gradient,
      static_cast<Sum*>(losses.data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

Tensor cross_entropy_rows(const Tensor& logits, const Tensor& target, int64_t ignore_index, double smoothing, bool gradient) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous(), "logits must be contiguous, of two dimensions");
  STD_TORCH_CHECK(target.dim() == 1 && target.is_contiguous() && target.size(0) == logits.size(0) &&
                      target.scalar_type() == ScalarType::Long,
                  "targets must be contiguous, of int64, one for each row of logits");
  const OnDeviceOf guard(logits);
  const auto type = logits.scalar_type();
  Tensor losses = empty_on(logits, {logits.size(0)}, type == ScalarType::Double ? type : ScalarType::Float);
  if (type == ScalarType::BFloat16) launch<__nv_bfloat16, float>(logits, target, ignore_index, smoothing, gradient, losses);
  else if (type == ScalarType::Half) launch<__half, float>(logits, target, ignore_index, smoothing, gradient, losses);
  else if (type == ScalarType::Float) launch<float, float>(logits, target, ignore_index, smoothing, gradient, losses);
  else if (type == ScalarType::Double) launch<double, double>(logits, target, ignore_index, smoothing, gradient, losses);
  else STD_TORCH_CHECK(false, "logits must be of 16, 32 or 64 bits");
  return losses;
}

}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, library) {
  library.impl("cross_entropy_rows", TORCH_BOX(&qsync::cross_entropy_rows));
}
