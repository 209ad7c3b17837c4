// Attention of one new token per sequence over keys and values in pages, which are read where they lie.
//
// Reading each key and value once bounds it; with few sequences latency does, so that a sequence is split among blocks. A split
// has so many positions in any batch: the order of sums, and so a result's bits, depends on nothing but the sequence.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/early_start.cuh"
#include "stable.cuh"

namespace qsync {
namespace {

constexpr int kPage = 16;     // positions of a page, runtimes/torch/serving/steps.py
constexpr int kWarps = 4;     // of a block of threads
constexpr int kShare = 16;    // numbers of a head that a lane holds: 32 bytes
constexpr int kQueries = 4;   // that share a head of keys and are answered by a block at a time
constexpr int kLength = 64;   // positions of a split
constexpr int kMostAhead = 4;  // positions of which a lane has keys and values on their way
constexpr float kLowest = -1e30f;    // no score is lower, and differences of it are numbers

struct Paged {
  const void *q, *keys, *values;
  void* y;
  float* partial;  // (sequences, heads, splits, size + 2): weighted values, their largest score, their sum of weights
  const int64_t *table, *contexts;
  int64_t q_stride, columns, slots;
  int group, parts, splits, window;
  float scale;  // of scores, times log2(e)
};

__device__ __forceinline__ float2 widen(const __nv_bfloat162& pair) { return __bfloat1622float2(pair); }
__device__ __forceinline__ float2 widen(const __half2& pair) { return __half22float2(pair); }
__device__ __forceinline__ void narrow(__nv_bfloat16* y, float value) { *y = __float2bfloat16_rn(value); }
__device__ __forceinline__ void narrow(__half* y, float value) { *y = __float2half_rn(value); }

template <class T>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};
template <>
struct PairOf<__half> {
  using type = __half2;
};

// The numbers of a lane, from 32 bytes.
template <class T>
__device__ __forceinline__ void widened(const uint4 (&raw)[2], float (&v)[kShare]) {
  const auto* pairs = reinterpret_cast<const typename PairOf<T>::type*>(raw);
#pragma unroll
  for (int i = 0; i < kShare / 2; ++i) {
    const float2 two = widen(pairs[i]);
    v[2 * i] = two.x;
    v[2 * i + 1] = two.y;
  }
}

// What is known of some positions: the weighted values of a query, relative to its largest score, and the sum of weights.
__device__ __forceinline__ void merge(float& largest, float& sum, float (&v)[kShare], int lanes) {
  const float other = __shfl_xor_sync(0xffffffffu, largest, lanes), common = fmaxf(largest, other);
  const float own_factor = exp2f(largest - common), other_factor = exp2f(other - common);
  sum = sum * own_factor + __shfl_xor_sync(0xffffffffu, sum, lanes) * other_factor;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    v[i] = v[i] * own_factor + __shfl_xor_sync(0xffffffffu, v[i], lanes) * other_factor;
  }
  largest = common;
}

// Grid: (splits, heads of keys times parts of the queries that share one, sequences). Groups of lanes take a position each;
// what they find is merged within the warp, then between warps. Traffic: the keys and values that are seen, once for each part
// of the queries, of which there is one up to four queries per head of keys. Contract: FP32 products and sums, the result
// rounded once. Reference: kernels/paged_attention/operators.py.
template <class T, int kSize>
__global__ void __launch_bounds__(32 * kWarps) attend_kernel(Paged args) {
  constexpr int kLanes = kSize / kShare, kAtOnce = 32 / kLanes;  // lanes of a position, positions of a warp
  constexpr int kRounds = kLength / (kWarps * kAtOnce), kBatch = kRounds < kMostAhead ? kRounds : kMostAhead;
  __shared__ float merged[kWarps][kQueries][kSize + 2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sub = lane % kLanes;
  const int split = blockIdx.x, head = blockIdx.y / args.parts, part = blockIdx.y % args.parts;
  const int64_t sequence = blockIdx.z;
  launch_next();
  wait_for_previous();
  const int first = part * kQueries, queries = min(kQueries, args.group - first);
  const int context = int(args.contexts[sequence]);
  const int low = args.window > 0 ? max(0, context - args.window) : 0;
  const int begin = low + split * kLength, end = min(begin + kLength, context);
  if (begin >= end) {
    return;
  }
  const int64_t heads = int64_t(gridDim.y / args.parts) * args.group;

  float q[kQueries][kShare], v[kQueries][kShare] = {}, largest[kQueries], sum[kQueries] = {};
  const T* rows = static_cast<const T*>(args.q) + sequence * args.q_stride;
#pragma unroll
  for (int j = 0; j < kQueries; ++j) {
    const int query = head * args.group + first + min(j, queries - 1);
    const uint4* at = reinterpret_cast<const uint4*>(rows + query * kSize + sub * kShare);
    const uint4 raw[2] = {at[0], at[1]};
    widened<T>(raw, q[j]);
    largest[j] = kLowest;
  }
  const int64_t* pages = args.table + sequence * args.columns;
  const int64_t base = int64_t(head) * args.slots;
#pragma unroll
  for (int batch = 0; batch < kRounds; batch += kBatch) {
    const int first_position = begin + (batch * kWarps + warp) * kAtOnce;
    if (first_position >= end) {
      break;
    }
    uint4 raw_keys[kBatch][2], raw_values[kBatch][2];
    int64_t places[kBatch];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const int position = min(first_position + r * kWarps * kAtOnce + lane / kLanes, end - 1);
      places[r] = (base + pages[position / kPage] * kPage + position % kPage) * kSize + sub * kShare;
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const uint4* key_at = reinterpret_cast<const uint4*>(static_cast<const T*>(args.keys) + places[r]);
      const uint4* value_at = reinterpret_cast<const uint4*>(static_cast<const T*>(args.values) + places[r]);
      raw_keys[r][0] = key_at[0];
      raw_keys[r][1] = key_at[1];
      raw_values[r][0] = value_at[0];
      raw_values[r][1] = value_at[1];
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const int at_once = first_position + r * kWarps * kAtOnce;
      if (at_once >= end) {
        break;
      }
      const bool seen = at_once + lane / kLanes < end;
      float numbers[kShare];
      widened<T>(raw_keys[r], numbers);
      float score[kQueries];
#pragma unroll
      for (int j = 0; j < kQueries; ++j) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          dot += q[j][i] * numbers[i];
        }
#pragma unroll
        for (int lanes = 1; lanes < kLanes; lanes *= 2) {
          dot += __shfl_xor_sync(0xffffffffu, dot, lanes);
        }
        score[j] = dot * args.scale;
      }
      widened<T>(raw_values[r], numbers);
#pragma unroll
      for (int j = 0; j < kQueries; ++j) {
        const float common = seen ? fmaxf(largest[j], score[j]) : largest[j];
        const float factor = exp2f(largest[j] - common), weight = seen ? exp2f(score[j] - common) : 0.0f;
        largest[j] = common;
        sum[j] = sum[j] * factor + weight;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          v[j][i] = v[j][i] * factor + (seen ? weight * numbers[i] : 0.0f);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kQueries; ++j) {
#pragma unroll
    for (int lanes = kLanes; lanes < 32; lanes *= 2) {
      merge(largest[j], sum[j], v[j], lanes);
    }
    if (lane < kLanes) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        merged[warp][j][sub * kShare + i] = v[j][i];
      }
      if (sub == 0) {
        merged[warp][j][kSize] = largest[j];
        merged[warp][j][kSize + 1] = sum[j];
      }
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < queries * kSize; index += 32 * kWarps) {
    const int j = index / kSize, number = index % kSize;
    float common = kLowest, total = 0.0f, value = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      common = fmaxf(common, merged[w][j][kSize]);
    }
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = exp2f(merged[w][j][kSize] - common);
      total += factor * merged[w][j][kSize + 1];
      value += factor * merged[w][j][number];
    }
    const int64_t query = sequence * heads + head * args.group + first + j;
    if (args.splits == 1) {
      narrow(static_cast<T*>(args.y) + query * kSize + number, value / total);
      continue;
    }
    float* to = args.partial + (query * args.splits + split) * (kSize + 2);
    to[number] = value;
    if (number == 0) {
      to[kSize] = common;
      to[kSize + 1] = total;
    }
  }
}

// Grid: (heads, sequences), a thread per number. Traffic: what the splits found, once. Contract: as above.
template <class T, int kSize>
__global__ void join_kernel(Paged args) {
  launch_next();
  wait_for_previous();
  const int64_t query = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
  const float* from = args.partial + query * args.splits * (kSize + 2);
  const int context = int(args.contexts[blockIdx.y]), positions = args.window > 0 ? min(args.window, context) : context;
  const int splits = (positions + kLength - 1) / kLength;
  float common = kLowest, total = 0.0f, value = 0.0f;
#pragma unroll 8
  for (int split = 0; split < splits; ++split) {
    common = fmaxf(common, from[split * (kSize + 2) + kSize]);
  }
#pragma unroll 8
  for (int split = 0; split < splits; ++split) {
    const float* own = from + split * (kSize + 2);
    const float factor = exp2f(own[kSize] - common);
    total += factor * own[kSize + 1];
    value += factor * own[threadIdx.x];
  }
  narrow(static_cast<T*>(args.y) + query * kSize + threadIdx.x, value / total);
}

template <class T, int kSize>
void run(Paged& args, const Tensor& q, int64_t kv_heads) {
  const int64_t sequences = q.size(0), heads = q.size(1);
  const cudaStream_t stream = stream_of(q);
  const bool early = starts_early(compute_capability(q));
  args.parts = (args.group + kQueries - 1) / kQueries;
  const int64_t all = args.columns * kPage, longest = args.window > 0 && args.window < all ? args.window : all;
  args.splits = int((longest + kLength - 1) / kLength);
  Tensor partial = empty_on(q, {args.splits > 1 ? sequences * heads * args.splits : 0, kSize + 2}, ScalarType::Float);
  args.partial = static_cast<float*>(partial.data_ptr());
  const dim3 grid(unsigned(args.splits), unsigned(kv_heads * args.parts), unsigned(sequences));
  const auto attend = attend_kernel<T, kSize>, join = join_kernel<T, kSize>;
  STD_CUDA_CHECK(launch_early(early, attend, grid, dim3(32 * kWarps), stream, args));
  if (args.splits > 1) {
    STD_CUDA_CHECK(launch_early(early, join, dim3(unsigned(heads), unsigned(sequences)), dim3(kSize), stream, args));
  }
}

template <class T>
void run(Paged& args, const Tensor& q, int64_t kv_heads) {
  switch (q.size(2)) {
    case 64: run<T, 64>(args, q, kv_heads); break;
    case 128: run<T, 128>(args, q, kv_heads); break;
    case 256: run<T, 256>(args, q, kv_heads); break;
    default: STD_TORCH_CHECK(false, "paged_attention: heads of ", q.size(2), " numbers; allowed are 64, 128 and 256");
  }
}

Tensor paged_attention_cuda(const Tensor& q, const Tensor& pool, const Tensor& table, const Tensor& contexts, double scale,
                            int64_t window) {
  const OnDeviceOf guard(q);
  const int device = q.get_device_index();
  STD_TORCH_CHECK(q.dim() == 3 && q.stride(2) == 1 && (q.size(1) == 1 || q.stride(1) == q.size(2)) &&
                      q.stride(0) % 8 == 0 && reinterpret_cast<uintptr_t>(q.data_ptr()) % 16 == 0,
                  "paged_attention: q must be (sequences, heads, size), its rows contiguous from multiples of 16 bytes on");
  STD_TORCH_CHECK(pool.dim() == 4 && pool.is_contiguous() && pool.size(0) == 2 && pool.size(3) == q.size(2) &&
                      pool.size(2) % kPage == 0 && pool.scalar_type() == q.scalar_type() && pool.get_device_index() == device,
                  "paged_attention: pages must be (2, heads, slots, size), contiguous, of the type of q and on its card");
  const int64_t kv_heads = pool.size(1);
  STD_TORCH_CHECK(kv_heads > 0 && q.size(1) % kv_heads == 0, "paged_attention: ", q.size(1), " heads do not share ", kv_heads);
  STD_TORCH_CHECK(table.dim() == 2 && table.is_contiguous() && table.scalar_type() == ScalarType::Long &&
                      table.size(0) == q.size(0) && table.get_device_index() == device && contexts.dim() == 1 &&
                      contexts.is_contiguous() && contexts.scalar_type() == ScalarType::Long && contexts.size(0) == q.size(0) &&
                      contexts.get_device_index() == device,
                  "paged_attention: pages and contexts of each sequence must be contiguous int64 tensors on the card of q");
  STD_TORCH_CHECK(q.size(0) <= 65535, "paged_attention: ", q.size(0), " sequences; split them");
  Tensor y = empty_on(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  if (q.size(0) == 0) {
    return y;
  }
  constexpr double kLog2OfE = 1.4426950408889634;
  Paged args = {};
  args.q = q.data_ptr();
  args.keys = pool.data_ptr();
  args.values = static_cast<const char*>(pool.data_ptr()) + kv_heads * pool.size(2) * pool.size(3) * 2;
  args.y = y.data_ptr();
  args.table = static_cast<const int64_t*>(table.data_ptr());
  args.contexts = static_cast<const int64_t*>(contexts.data_ptr());
  args.q_stride = q.stride(0);
  args.columns = table.size(1);
  args.slots = pool.size(2);
  args.group = int(q.size(1) / kv_heads);
  args.window = window < table.size(1) * kPage ? int(window) : 0;  // one that hides nothing is none
  args.scale = float(scale * kLog2OfE);
  if (q.scalar_type() == ScalarType::BFloat16) {
    run<__nv_bfloat16>(args, q, kv_heads);
  } else {
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::Half, "paged_attention: q must be bfloat16 or float16");
    run<__half>(args, q, kv_heads);
  }
  return y;
}

}  // namespace
}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) { m.impl("paged_attention", TORCH_BOX(&qsync::paged_attention_cuda)); }
