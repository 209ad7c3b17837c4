// What a decoder computes between its products, each in one pass: norms with the residual sum before them, rotary positions with
// the way of keys and values into their pages, and gates.
//
// For a few rows latency bounds them. So they start early and let the next kernel start early: the weights of the product that
// follows are on their way meanwhile.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/early_start.cuh"
#include "cuda/gate.cuh"
#include "cuda/hadamard.cuh"
#include "cuda/heads.cuh"
#include "cuda/rounding.cuh"
#include "stable.cuh"

namespace qsync {
namespace {

constexpr int kVector = 8;         // numbers that a thread reads at a time
constexpr int kMostThreads = 512, kMostHeld = 4;  // of a vector's block of threads, and what each holds of it
constexpr int kWarps = 4;          // of a block of threads whose warps have nothing to do with each other

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    v += __shfl_xor_sync(0xffffffffu, v, lanes);
  }
  return v;
}

struct Norm {
  const void *x, *added, *weight;
  void *y, *sum;
  int64_t heads, row_step, head_step;  // of x; the others are dense
  int size;
  float epsilon;
  float* scales;  // of codes, which y then holds, one for each vector
  int rotated;    // neighbours that are rotated together before they become codes: 0, 64 or 128
  bool is_fp8;    // codes are FP8 (E4M3), else INT8
};

// Stores a vector, of which each thread holds kHeld parts with zeros beyond the end, as codes with one scale.
template <Format kFormat, int kHeld>
__device__ __forceinline__ void store_rounded(const Norm& p, const float (&v)[kHeld][kVector]) {
  __shared__ uint32_t largest_of[kMostThreads / 32];
  uint32_t bits = 0;  // of the largest magnitude: they order magnitudes, NaN above infinity
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      bits = max(bits, __float_as_uint(fabsf(v[k][i])));
    }
  }
  bits = group_max<32>(bits);
  if (threadIdx.x % 32 == 0) {
    largest_of[threadIdx.x / 32] = bits;
  }
  __syncthreads();
  bits = group_max<32>(threadIdx.x % 32 < blockDim.x / 32 ? largest_of[threadIdx.x % 32] : 0);
  const float scale = scale_of<kFormat>(__uint_as_float(bits)), factor = factor_of<kFormat, false>(scale);
  if (threadIdx.x == 0) {
    p.scales[blockIdx.x] = scale;
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (const int at = threadIdx.x + k * blockDim.x; at < p.size / kVector) {
      Numbers<uint8_t, kVector> codes;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        codes.values[i] = uint8_t(round_one<kFormat, false>(__fmul_rn(v[k][i], factor), 0));
      }
      reinterpret_cast<Numbers<uint8_t, kVector>*>(static_cast<uint8_t*>(p.y) + int64_t(blockIdx.x) * p.size)[at] = codes;
    }
  }
}

// Grid: a block of threads per vector. Traffic: x and what is added once, sums and results once. Contract: the sum is rounded to
// the type, as it is without a norm behind it; squares are added in FP32 in an order that depends on the size alone, and the
// result is rounded once. With kRounds the numbers that this gives are rotated and become codes, as weight_only.cu does it with
// stored ones, bit for bit. Reference: kernels/decoder/rows.py.
template <class T, class Weight, bool kAdds, bool kRounds, int kHeld>
__global__ void __launch_bounds__(kMostThreads) norm_kernel(const Norm p) {
  __shared__ float parts[kMostThreads / 32];
  launch_next();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row / p.heads * p.row_step + row % p.heads * p.head_step;
  const int vectors = p.size / kVector;
  float weight[kHeld][kVector] = {}, v[kHeld][kVector] = {}, squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (const int at = threadIdx.x + k * blockDim.x; at < vectors) {
      load(static_cast<const Weight*>(p.weight) + at * kVector, weight[k]);
      load(x + at * kVector, v[k]);
      if constexpr (kAdds) {
        float added[kVector];
        load(static_cast<const T*>(p.added) + row * p.size + at * kVector, added);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          v[k][i] = to_float(from_float<T>(v[k][i] + added[i]));
        }
        store(static_cast<T*>(p.sum) + row * p.size + at * kVector, v[k]);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        squares += v[k][i] * v[k][i];
      }
    }
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) {
    parts[threadIdx.x / 32] = squares;
  }
  __syncthreads();
  squares = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f);
  const float factor = rsqrtf(squares / p.size + p.epsilon);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      v[k][i] = __fmul_rn(v[k][i] * factor, weight[k][i]);
      if constexpr (kRounds) {
        v[k][i] = to_float(from_float<T>(v[k][i]));
      }
    }
    if constexpr (kRounds) {
      if (p.rotated) {
        rotate_block(v[k], p.rotated / kVector);
      }
    } else if (const int at = threadIdx.x + k * blockDim.x; at < vectors) {
      store(static_cast<T*>(p.y) + row * p.size + at * kVector, v[k]);
    }
  }
  if constexpr (kRounds) {
    p.is_fp8 ? store_rounded<Format::kE4M3>(p, v) : store_rounded<Format::kInt8>(p, v);
  }
}

// Grid: a thread per kVector results. Traffic: both halves once, results once. Contract: FP32, rounded once.
template <class T, bool kGelu>
__global__ void gate_kernel(const T* x, T* y, int64_t vectors, int size) {
  launch_next();
  wait_for_previous();
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= vectors) {
    return;
  }
  const int64_t begin = at * kVector, row = begin / size;
  float gate[kVector], up[kVector];
  load(x + row * size + begin, gate);
  load(x + (row + 1) * size + begin, up);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    gate[i] = gated(gate[i], up[i], kGelu);
  }
  store(y + begin, gate);
}

struct Rotation {
  const void *heads, *cos, *sin;
  void *y, *keys, *values;  // keys is null where nothing goes into pages
  float *key_scales, *value_scales;  // (heads of keys, slots); null where pages hold numbers
  const int64_t* slots;
  int64_t row_step, head_step, angle_step, tokens, slots_of_head;
  int queries, kv_heads;
};

// Grid: a warp per head of a token; a lane holds kPairs numbers of each half of it. Traffic: heads once, results once. Contract:
// FP32, rounded once; codes are those of the rounded numbers. Reference: kernels/decoder/rows.py.
template <class T, int kPairs>
__global__ void __launch_bounds__(32 * kWarps) rotate_kernel(const Rotation p) {
  launch_next();
  wait_for_previous();
  constexpr int kHalf = 32 * kPairs;
  const int lane = threadIdx.x % 32, turned = p.queries + p.kv_heads, all = turned + (p.keys ? p.kv_heads : 0);
  const int64_t warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, token = warp / all;
  if (token >= p.tokens) {
    return;
  }
  const int head = int(warp % all);
  Head<T, kPairs> numbers(static_cast<const T*>(p.heads) + token * p.row_step + head * p.head_step, lane);
  if (head < turned) {
    numbers.turn(static_cast<const T*>(p.cos) + token * p.angle_step, static_cast<const T*>(p.sin) + token * p.angle_step);
    numbers.store_to(static_cast<T*>(p.y) + (token * turned + head) * 2 * kHalf);
  }
  if (p.keys && head >= p.queries) {
    const bool is_key = head < turned;
    const int64_t slot = (head - p.queries) % p.kv_heads * p.slots_of_head + p.slots[token];
    numbers.store_in_page(is_key ? p.keys : p.values, is_key ? p.key_scales : p.value_scales, slot);
  }
}

bool aligned(const Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0; }

#define QSYNC_BY_TYPE(type, ...)                                                       \
  switch (type) {                                                                      \
    case ScalarType::BFloat16: {                                                       \
      using T = __nv_bfloat16;                                                         \
      __VA_ARGS__;                                                                     \
      break;                                                                           \
    }                                                                                  \
    case ScalarType::Half: {                                                           \
      using T = __half;                                                                \
      __VA_ARGS__;                                                                     \
      break;                                                                           \
    }                                                                                  \
    case ScalarType::Float: {                                                          \
      using T = float;                                                                 \
      __VA_ARGS__;                                                                     \
      break;                                                                           \
    }                                                                                  \
    default: STD_TORCH_CHECK(false, "decoder: tensors must be bfloat16, float16 or float32"); \
  }

template <class T, class Weight, bool kAdds, bool kRounds>
cudaError_t launch_norm(const Norm& p, int64_t rows, bool early, cudaStream_t stream) {
  const int vectors = p.size / kVector, held = (vectors + kMostThreads - 1) / kMostThreads;
  const int threads = ((vectors + held - 1) / held + 31) / 32 * 32;
  const auto kernel = held == 1 ? norm_kernel<T, Weight, kAdds, kRounds, 1> : norm_kernel<T, Weight, kAdds, kRounds, kMostHeld>;
  return launch_early(early, kernel, dim3(unsigned(rows)), dim3(threads), 0, stream, p);
}

template <class T, class Weight>
cudaError_t launch_norm(const Norm& p, int64_t rows, bool early, cudaStream_t stream) {
  return p.scales  ? launch_norm<T, Weight, true, true>(p, rows, early, stream)
         : p.added ? launch_norm<T, Weight, true, false>(p, rows, early, stream)
                   : launch_norm<T, Weight, false, false>(p, rows, early, stream);
}

// Launches the norm of vectors of x; where its results go is in p already.
void run_norm(Norm p, const Tensor& x, const Tensor* added, const Tensor& weight, double epsilon) {
  const int64_t size = x.size(x.dim() - 1), rows = size > 0 ? x.numel() / size : 0;
  STD_TORCH_CHECK(size % kVector == 0 && size <= kMostHeld * kMostThreads * kVector, "decoder: vectors of ", size, " numbers; allowed are "
                  "multiples of ", kVector, " up to ", kMostHeld * kMostThreads * kVector);
  STD_TORCH_CHECK(x.stride(x.dim() - 1) == 1 && x.stride(0) % kVector == 0 && (x.dim() == 2 || x.stride(1) % kVector == 0) &&
                      aligned(x) && weight.is_contiguous() && aligned(weight) && weight.numel() == size &&
                      weight.get_device_index() == x.get_device_index(),
                  "decoder: x must have contiguous vectors that begin at multiples of 16 bytes, weight as many numbers");
  STD_TORCH_CHECK(!added || (x.is_contiguous() && added->is_contiguous() && added->numel() == x.numel() && aligned(*added) &&
                             added->scalar_type() == x.scalar_type() && added->get_device_index() == x.get_device_index()),
                  "decoder: x and what is added must be contiguous, of one shape and type");
  if (rows == 0) {
    return;
  }
  p.x = x.data_ptr();
  p.added = added ? added->data_ptr() : nullptr;
  p.weight = weight.data_ptr();
  p.heads = x.dim() == 3 ? x.size(1) : 1;
  p.row_step = x.stride(0);
  p.head_step = x.dim() == 3 ? x.stride(1) : 0;
  p.size = int(size);
  p.epsilon = float(epsilon);
  const bool early = starts_early(compute_capability(x));
  const cudaStream_t stream = stream_of(x);
  const bool wide = weight.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(wide || weight.scalar_type() == x.scalar_type(), "decoder: weight must be float32 or of the type of x");
  cudaError_t error = cudaSuccess;
  QSYNC_BY_TYPE(x.scalar_type(), {
    error = wide ? launch_norm<T, float>(p, rows, early, stream) : launch_norm<T, T>(p, rows, early, stream);
  })
  STD_CUDA_CHECK(error);
}

Tensor norm_cuda(const Tensor& x, const Tensor& weight, double epsilon) {
  const OnDeviceOf guard(x);
  STD_TORCH_CHECK(x.dim() == 2 || x.dim() == 3, "decoder: x must have 2 or 3 dimensions");
  Tensor y = x.dim() == 2 ? empty_on(x, {x.size(0), x.size(1)}, x.scalar_type())
                          : empty_on(x, {x.size(0), x.size(1), x.size(2)}, x.scalar_type());
  Norm p = {};
  p.y = y.data_ptr();
  run_norm(p, x, nullptr, weight, epsilon);
  return y;
}

std::tuple<Tensor, Tensor> add_norm_cuda(const Tensor& x, const Tensor& added, const Tensor& weight, double epsilon) {
  const OnDeviceOf guard(x);
  STD_TORCH_CHECK(x.dim() == 2, "decoder: x must have 2 dimensions");
  Tensor y = empty_on(x, {x.size(0), x.size(1)}, x.scalar_type()), sum = empty_on(x, {x.size(0), x.size(1)}, x.scalar_type());
  Norm p = {};
  p.y = y.data_ptr();
  p.sum = sum.data_ptr();
  run_norm(p, x, &added, weight, epsilon);
  return {y, sum};
}

std::tuple<Tensor, Tensor, Tensor> add_norm_and_round_cuda(const Tensor& x, const Tensor& added, const Tensor& weight,
                                                           double epsilon, int64_t rotated, ScalarType dtype) {
  const OnDeviceOf guard(x);
  STD_TORCH_CHECK(x.dim() == 2, "decoder: x must have 2 dimensions");
  STD_TORCH_CHECK((rotated == 0 || rotated == 64 || rotated == 128) && (rotated == 0 || x.size(1) % rotated == 0),
                  "decoder: ", rotated, " neighbours of ", x.size(1), " are rotated together; allowed are none, 64 and 128 that divide");
  STD_TORCH_CHECK(dtype == ScalarType::Char || dtype == ScalarType::Float8_e4m3fn, "decoder: codes are int8 or float8_e4m3fn");
  Tensor codes = empty_on(x, {x.size(0), x.size(1)}, dtype), scales = empty_on(x, {x.size(0), 1}, ScalarType::Float);
  Tensor sum = empty_on(x, {x.size(0), x.size(1)}, x.scalar_type());
  Norm p = {};
  p.y = codes.data_ptr();
  p.scales = static_cast<float*>(scales.data_ptr());
  p.sum = sum.data_ptr();
  p.rotated = int(rotated);
  p.is_fp8 = dtype == ScalarType::Float8_e4m3fn;
  run_norm(p, x, &added, weight, epsilon);
  return {codes, scales, sum};
}

Tensor gate_cuda(const Tensor& x, bool gelu) {
  const OnDeviceOf guard(x);
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(1) % (2 * kVector) == 0 && aligned(x),
                  "decoder: x must be a contiguous matrix of two halves, each a multiple of ", kVector);
  const int64_t size = x.size(1) / 2;
  Tensor y = empty_on(x, {x.size(0), size}, x.scalar_type());
  const int64_t vectors = x.size(0) * size / kVector;
  if (vectors == 0) {
    return y;
  }
  constexpr int kThreads = 128;
  const dim3 grid(unsigned((vectors + kThreads - 1) / kThreads));
  cudaError_t error = cudaSuccess;
  QSYNC_BY_TYPE(x.scalar_type(), {
    const auto kernel = gelu ? gate_kernel<T, true> : gate_kernel<T, false>;
    error = launch_early(starts_early(compute_capability(x)), kernel, grid, dim3(kThreads), 0, stream_of(x),
                         static_cast<const T*>(x.data_ptr()), static_cast<T*>(y.data_ptr()), vectors, int(size));
  })
  STD_CUDA_CHECK(error);
  return y;
}

Tensor run_rotation(const Tensor& heads, const Tensor& cos, const Tensor& sin, const Tensor* slots, const Tensor* pool,
                    const Tensor* scales) {
  const OnDeviceOf guard(heads);
  const int device = heads.get_device_index();
  STD_TORCH_CHECK(heads.dim() == 3 && (heads.size(2) == 64 || heads.size(2) == 128 || heads.size(2) == 256) &&
                      heads.stride(2) == 1 && heads.stride(0) % kVector == 0 && heads.stride(1) % kVector == 0 && aligned(heads),
                  "decoder: heads must be (tokens, heads, 64, 128 or 256), each contiguous from a multiple of 16 bytes on");
  const int64_t tokens = heads.size(0), size = heads.size(2);
  for (const Tensor* angle : {&cos, &sin}) {
    STD_TORCH_CHECK(angle->dim() == 3 && angle->size(0) == tokens && angle->size(1) == 1 && angle->size(2) == size &&
                        angle->is_contiguous() && aligned(*angle) && angle->scalar_type() == heads.scalar_type() &&
                        angle->get_device_index() == device,
                    "decoder: cos and sin must be contiguous (tokens, 1, size), of the type of the heads and on their card");
  }
  Rotation p = {};
  p.heads = heads.data_ptr();
  p.cos = cos.data_ptr();
  p.sin = sin.data_ptr();
  p.row_step = heads.stride(0);
  p.head_step = heads.stride(1);
  p.angle_step = size;
  p.tokens = tokens;
  p.queries = int(heads.size(1));
  if (pool) {
    STD_TORCH_CHECK(pool->dim() == 4 && pool->is_contiguous() && pool->size(0) == 2 && pool->size(3) == size && aligned(*pool) &&
                        pool->scalar_type() == (scales ? ScalarType::Byte : heads.scalar_type()) &&
                        pool->get_device_index() == device && heads.size(1) > 2 * pool->size(1),
                    "decoder: pages must be (2, heads, slots, size), contiguous, on the card of the heads, uint8 with scales or of "
                    "the type of the heads without");
    STD_TORCH_CHECK(!scales || (scales->is_contiguous() && scales->scalar_type() == ScalarType::Float &&
                                scales->numel() == 2 * pool->size(1) * pool->size(2) && scales->get_device_index() == device),
                    "decoder: scales must be one float32 for each head and slot of keys and of values");
    STD_TORCH_CHECK(slots->scalar_type() == ScalarType::Long && slots->is_contiguous() && slots->numel() == tokens &&
                        slots->get_device_index() == device,
                    "decoder: slots must be one int64 per token, on the card of the heads");
    p.kv_heads = int(pool->size(1));
    p.queries -= 2 * p.kv_heads;
    p.slots = static_cast<const int64_t*>(slots->data_ptr());
    p.slots_of_head = pool->size(2);
    p.keys = pool->data_ptr();
    const int bytes = scales ? 1 : heads.scalar_type() == ScalarType::Float ? 4 : 2;
    p.values = static_cast<char*>(pool->data_ptr()) + pool->numel() / 2 * bytes;
    if (scales) {
      p.key_scales = static_cast<float*>(scales->data_ptr());
      p.value_scales = p.key_scales + scales->numel() / 2;
    }
  }
  Tensor y = empty_on(heads, {tokens, p.queries + p.kv_heads, size}, heads.scalar_type());
  p.y = y.data_ptr();
  if (y.numel() == 0) {
    return y;
  }
  const dim3 grid(unsigned((tokens * heads.size(1) + kWarps - 1) / kWarps));
  cudaError_t error = cudaSuccess;
  QSYNC_BY_TYPE(heads.scalar_type(), {
    const auto kernel = size == 64 ? rotate_kernel<T, 1> : size == 128 ? rotate_kernel<T, 2> : rotate_kernel<T, 4>;
    error = launch_early(starts_early(compute_capability(heads)), kernel, grid, dim3(32 * kWarps), 0, stream_of(heads), p);
  })
  STD_CUDA_CHECK(error);
  return y;
}

Tensor rotate_cuda(const Tensor& heads, const Tensor& cos, const Tensor& sin) {
  return run_rotation(heads, cos, sin, nullptr, nullptr, nullptr);
}

Tensor rotate_into_pages_cuda(const Tensor& heads, const Tensor& cos, const Tensor& sin, const Tensor& slots, Tensor pool,
                              std::optional<Tensor> scales) {
  return run_rotation(heads, cos, sin, &slots, &pool, scales ? &*scales : nullptr);
}

}  // namespace
}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) {
  m.impl("decoder_norm", TORCH_BOX(&qsync::norm_cuda));
  m.impl("decoder_add_norm", TORCH_BOX(&qsync::add_norm_cuda));
  m.impl("decoder_add_norm_and_round", TORCH_BOX(&qsync::add_norm_and_round_cuda));
  m.impl("decoder_gate", TORCH_BOX(&qsync::gate_cuda));
  m.impl("decoder_rotate", TORCH_BOX(&qsync::rotate_cuda));
  m.impl("decoder_rotate_into_pages", TORCH_BOX(&qsync::rotate_into_pages_cuda));
}
