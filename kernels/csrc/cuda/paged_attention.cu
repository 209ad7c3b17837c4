// Attention of the newest tokens of each sequence over keys and values in pages, which are read where they lie: numbers, or codes
// of 8 bits with a scale per position and head, of which a draft may read the upper four bits alone.
//
// Reading each key and value once bounds it; with few sequences latency does, so that a sequence is split among blocks. Splits
// begin at multiples of their length: the order of sums, and so a result's bits, depends on the positions that a token sees and on
// nothing else.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/early_start.cuh"
#include "cuda/half_mma.cuh"
#include "cuda/heads.cuh"
#include "stable.cuh"

namespace qsync {
namespace {

constexpr int kPage = 16;     // positions of a page, kernels/paged_attention/operators.py; a warp takes one at a time
template <int kSize>  // of a head
constexpr int kWarpsOf = kSize > 128 ? 4 : 8;  // of a block of threads: what they found fits the shared memory of every card
constexpr int kRows = 16;     // of queries that share a head of keys and are answered by a block at a time
constexpr int kLength = 512;  // positions of a split
constexpr float kLowest = -1e30f;  // no score is lower, and differences of it are numbers

struct Paged {
  const void *q, *keys, *values;
  const float *key_scales, *value_scales;  // (heads, slots), of codes
  void* y;
  float* partial;  // (queries, splits, size + 2): weighted values, their largest score, their sum of weights
  const int64_t *table, *contexts;
  int64_t q_stride, columns, slots;
  int tokens, group, parts, splits, window;
  float scale;   // of scores, times log2(e)
  bool settled;  // whether all but the new positions was complete before the kernel before this one began
};

// The newest token of each sequence where its position is still to come: q then holds queries, keys and values.
struct Newest {
  const void *cos, *sin;     // (sequences, size)
  const int64_t* slots;      // where its key and value go
  void *keys, *values;       // of `Paged`, to be written
  float *key_scales, *value_scales;
};

// What a pass sees of a sequence: positions from `low` on, which its first token sees, up to `context`, where its last one ends.
struct Seen {
  int context, low, first_split, splits;

  __device__ __forceinline__ Seen(const Paged& p, int64_t sequence) {
    context = int(p.contexts[sequence]);
    low = p.window > 0 ? max(0, context - p.tokens + 1 - p.window) : 0;
    first_split = low / kLength;
    splits = (context + kLength - 1) / kLength - first_split;
  }
};

__device__ __forceinline__ void narrow(__nv_bfloat16* y, float value) { *y = __float2bfloat16_rn(value); }
__device__ __forceinline__ void narrow(__half* y, float value) { *y = __float2half_rn(value); }
__device__ __forceinline__ float rounded(float v, __nv_bfloat16) { return __bfloat162float(__float2bfloat16_rn(v)); }
__device__ __forceinline__ float rounded(float v, __half) { return __half2float(__float2half_rn(v)); }

template <class T>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  alignas(4) T both[2];
  narrow(both, low);
  narrow(both + 1, high);
  return *reinterpret_cast<const uint32_t*>(both);
}

template <int kWords>
__device__ __forceinline__ void load_words(const void* from, uint32_t (&to)[kWords]) {
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 v = reinterpret_cast<const uint4*>(from)[i / 4];
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else if constexpr (kWords == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    static_assert(kWords == 1);
    to[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

// How keys and values are kept: numbers of 16 bits, codes of 8 bits, or those of which the upper half is read.
enum class Kept { kNumbers, kCodes, kUpper };

// Codes of both halves of a head, plus 128, from bytes with the upper bits of both and bytes with the lower bits.
__device__ __forceinline__ void whole_codes(uint32_t upper, uint32_t lower, uint32_t& first, uint32_t& second) {
  first = ((upper & 0xF0F0F0F0u) | (lower >> 4 & 0x0F0F0F0Fu)) ^ 0x80808080u;
  second = ((upper << 4 & 0xF0F0F0F0u) | (lower & 0x0F0F0F0Fu)) ^ 0x80808080u;
}

__device__ __forceinline__ void upper_codes(uint32_t upper, uint32_t& first, uint32_t& second) {
  first = (upper & 0xF0F0F0F0u) ^ 0x80808080u;
  second = (upper << 4 & 0xF0F0F0F0u) ^ 0x80808080u;
}

template <class T, Kept kKept>
__device__ __forceinline__ uint32_t number_of_pair(uint32_t bytes) {
  return kKept == Kept::kUpper ? upper_number_of<T>(bytes | kExponent<T>) : number_of<T, 0, 128>(bytes | kExponent<T>);
}

// A lane's part of a page of keys and values as it lies in memory. Of keys, lane (g, t) has the positions g and g + 8 and a fourth
// of a head, by t; of values the positions 2 t, 2 t + 1, 2 t + 8, 2 t + 9 and an eighth of a head, by g. Of codes, parts of both
// halves of a head.
template <class T, int kSize, Kept kKept>
struct Page {
  static constexpr bool kNumbers = kKept == Kept::kNumbers;
  static constexpr int kHalves = kKept == Kept::kCodes ? 2 : 1, kRowBytes = kNumbers ? 2 * kSize : kSize;
  static constexpr int kKeyWords = kNumbers ? kSize / 8 : kSize / 32, kValueWords = kNumbers ? kSize / 16 : kSize / 64;
  uint32_t keys[2][kHalves][kKeyWords], values[4][kHalves][kValueWords];
  float key_scales[2][2], value_scales[4];

  // Positions that are not seen are 0 in values: what stands there may be anything.
  __device__ __forceinline__ void load(const Paged& p, int64_t slot, int position, const Seen& seen, int g, int t) {
    const auto* keys_at = static_cast<const uint8_t*>(p.keys) + slot * kRowBytes;
    const auto* values_at = static_cast<const uint8_t*>(p.values) + slot * kRowBytes;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        load_words(keys_at + (n * 8 + g) * kRowBytes + half * (kSize / 2) + t * (kKeyWords * 4), keys[n][half]);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int own = k / 2 * 8 + 2 * t + k % 2;
      const bool is_seen = position + own >= seen.low && position + own < seen.context;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if (is_seen) {
          load_words(values_at + own * kRowBytes + half * (kSize / 2) + g * (kValueWords * 4), values[k][half]);
        } else {
#pragma unroll
          for (int w = 0; w < kValueWords; ++w) {
            values[k][half][w] = 0;
          }
        }
      }
      if constexpr (!kNumbers) {
        key_scales[k / 2][k % 2] = p.key_scales[slot + own];
        value_scales[k] = is_seen ? p.value_scales[slot + own] : 0.0f;
      }
    }
  }
};

// Where the four numbers of a head begin that lane t multiplies in a step of 16.
template <int kSize, Kept kKept>
__device__ __forceinline__ int numbers_of_step(int step, int t) {
  if constexpr (kKept == Kept::kNumbers) {
    return t * (kSize / 4) + 4 * step;
  } else {
    return step % 2 * (kSize / 2) + t * (kSize / 8) + step / 2 * 4;
  }
}

// Scores of 16 queries and the 16 positions of a page; `q` holds the operands of the steps, by step and lane.
template <class T, int kSize, Kept kKept>
__device__ __forceinline__ void add_scores(float (&scores)[2][4], const Page<T, kSize, kKept>& page, const uint4* q, int lane) {
#pragma unroll
  for (int step = 0; step < kSize / 16; ++step) {
    const uint4 raw = q[step * 32 + lane];
    const uint32_t a[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (kKept == Kept::kNumbers) {
        multiply<T>(scores[n], a, page.keys[n][0][2 * step], page.keys[n][0][2 * step + 1]);
      } else {
        uint32_t codes[2];
        if constexpr (kKept == Kept::kCodes) {
          whole_codes(page.keys[n][0][step / 2], page.keys[n][1][step / 2], codes[0], codes[1]);
        } else {
          upper_codes(page.keys[n][0][step / 2], codes[0], codes[1]);
        }
        const uint32_t own = codes[step % 2];
        multiply<T>(scores[n], a, number_of_pair<T, kKept>(__byte_perm(own, 0, 0x4140)),
                    number_of_pair<T, kKept>(__byte_perm(own, 0, 0x4342)));
      }
    }
  }
}

// Adds weights times values of a page. Weights are two numbers of 16 bits each, the second what the first lacks.
template <class T, int kSize, Kept kKept>
__device__ __forceinline__ void add_values(float (&sums)[kSize / 8][4], const Page<T, kSize, kKept>& page,
                                           const uint32_t (&high)[4], const uint32_t (&low)[4]) {
  const auto add = [&](int n, uint32_t b0, uint32_t b1) {
    multiply<T>(sums[n], high, b0, b1);
    multiply<T>(sums[n], low, b0, b1);
  };
  constexpr int kWords = Page<T, kSize, kKept>::kValueWords;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if constexpr (kKept == Kept::kNumbers) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint32_t select = odd ? 0x7632 : 0x5410;
        add(2 * w + odd, __byte_perm(page.values[0][0][w], page.values[1][0][w], select),
            __byte_perm(page.values[2][0][w], page.values[3][0][w], select));
      }
    } else {
      uint32_t codes[4][2];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kKept == Kept::kCodes) {
          whole_codes(page.values[k][0][w], page.values[k][1][w], codes[k][0], codes[k][1]);
        } else {
          upper_codes(page.values[k][0][w], codes[k][0], codes[k][1]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t select = i | (4 + i) << 8;
          add(half * (kSize / 16) + 4 * w + i,
              number_of_pair<T, kKept>(__byte_perm(codes[0][half], codes[1][half], select | i << 4 | i << 12) & 0x00FF00FFu),
              number_of_pair<T, kKept>(__byte_perm(codes[2][half], codes[3][half], select | i << 4 | i << 12) & 0x00FF00FFu));
        }
      }
    }
  }
}

// Number of a head that column `column` of eight stands for in the sums of group n.
template <int kSize, Kept kKept>
__device__ __forceinline__ int number_of_column(int n, int column) {
  if constexpr (kKept == Kept::kNumbers) {
    return column * (kSize / 8) + n;
  } else {
    return n / (kSize / 16) * (kSize / 2) + column * (kSize / 16) + n % (kSize / 16);
  }
}

// Grid: (splits, heads of keys times parts of the rows that share one, sequences). A row is a query of a token: those of the first
// token come first. With kTurns there is one token, whose queries are one part: they are turned here, and the key by the block
// whose split it is in, which puts it and the value into their page first. Warps take pages in turn; what they find is merged at
// the end. Traffic: the keys and values that are seen, once for each part, of which there is one up to 16 rows. Contract: products
// of numbers and weights of 16 bits or more with FP32 sums, the result rounded once. Reference:
// kernels/paged_attention/operators.py.
template <class T, int kSize, Kept kKept, bool kTurns>
__global__ void __launch_bounds__(32 * kWarpsOf<kSize>) attend_kernel(const Paged p, const Newest newest) {
  constexpr int kWarps = kWarpsOf<kSize>;
  constexpr bool kNumbers = kKept == Kept::kNumbers;
  constexpr int kStride = kSize + 2;
  // Weights are times 64 where numbers from codes are so much too small, and larger in FP16 so that small ones keep their bits:
  // they are 1 at most, with codes times a scale.
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr float kKeyUnit = kNumbers ? 1.0f : kUnit<T>, kValueUnit = !kNumbers ? 64.0f : kHalf ? 32768.0f : 1.0f;
  constexpr float kLast = (kNumbers ? 1.0f : kUnit<T>) / kValueUnit;
  extern __shared__ float merged[];  // (warp, row, kStride)
  __shared__ uint4 queries[kSize / 16 * 32];
  launch_next();
  if (!p.settled) {
    wait_for_previous();
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.y / p.parts, first_row = blockIdx.y % p.parts * kRows;
  const int rows = min(kRows, p.tokens * p.group - first_row);
  const int64_t sequence = blockIdx.z, heads = int64_t(gridDim.y / p.parts) * p.group;
  const Seen seen(p, sequence);
  const bool has_split = int(blockIdx.x) < seen.splits;
  const int64_t* pages = p.table + sequence * p.columns;
  const int begin = (seen.first_split + int(blockIdx.x)) * kLength, end = min(begin + kLength, seen.context);
  const auto load = [&](Page<T, kSize, kKept>& page, int position) {
    const int64_t slot = int64_t(head) * p.slots + pages[position / kPage] * kPage;
    page.load(p, slot, position, seen, g, t);
  };
  int position = begin + warp * kPage;
  while (position + kPage <= seen.low) {
    position += kWarps * kPage;
  }
  Page<T, kSize, kKept> page, ahead;
  bool is_loaded = false;
  if (p.settled) {
    is_loaded = has_split && position < end && position + kPage <= seen.context - p.tokens;
    if (is_loaded) {
      load(page, position);
    }
    wait_for_previous();
  }
  if (!has_split) {
    return;
  }
  const T* q = static_cast<const T*>(p.q) + sequence * p.tokens * p.q_stride + head * p.group * kSize;
  __shared__ __align__(16) T turned[kTurns ? kRows * kSize : 1];
  if constexpr (kTurns) {
    const T *cos = static_cast<const T*>(newest.cos) + sequence * kSize, *sin = static_cast<const T*>(newest.sin) + sequence * kSize;
    // The newest position's key and value follow the queries, where it is in this split.
    for (int own = warp; own < rows + (end == seen.context ? 2 : 0); own += kWarps) {
      const bool is_query = own < rows, is_key = own == rows;
      const int64_t at = is_query ? head * p.group + own : heads + (is_key ? 0 : gridDim.y) + head;
      Head<T, kSize / 64> numbers(static_cast<const T*>(p.q) + sequence * p.q_stride + at * kSize, lane);
      if (is_query || is_key) {
        numbers.turn(cos, sin);
      }
      if (is_query) {
        numbers.store_to(turned + own * kSize);
      } else {
        const int64_t slot = head * p.slots + newest.slots[sequence];
        numbers.store_in_page(is_key ? newest.keys : newest.values, is_key ? newest.key_scales : newest.value_scales, slot);
      }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kSize / 16 * 32; i += 32 * kWarps) {
    uint2 v[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + min(i % 32 / 4 + 8 * half, rows - 1);
      const T* from = (kTurns ? turned + row * kSize : q + row / p.group * p.q_stride + row % p.group * kSize) +
                      numbers_of_step<kSize, kKept>(i / 32, i % 4);
      v[half] = *reinterpret_cast<const uint2*>(from);
    }
    queries[i] = make_uint4(v[0].x, v[1].x, v[0].y, v[1].y);
  }
  __syncthreads();

  float sums[kSize / 8][4] = {}, largest[2] = {kLowest, kLowest}, total[2] = {};
  int ends[2], lows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + min(g + 8 * half, rows - 1);
    ends[half] = seen.context - (p.tokens - 1 - row / p.group);
    lows[half] = p.window > 0 ? ends[half] - p.window : 0;
  }
  if (!is_loaded && position < end) {
    load(page, position);
  }
  for (; position < end; position += kWarps * kPage) {
    const bool more = position + kWarps * kPage < end;
    if (!kNumbers && more) {  // of numbers, two pages do not fit the registers
      load(ahead, position + kWarps * kPage);
    }
    float scores[2][4] = {}, weights[2][4];
    add_scores(scores, page, queries, lane);
    float highest[2] = {kLowest, kLowest};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own = position + n * 8 + 2 * t + e % 2;
        const float factor = kNumbers ? p.scale : p.scale * kKeyUnit * page.key_scales[n][e % 2];
        scores[n][e] = own >= lows[e / 2] && own < ends[e / 2] ? scores[n][e] * factor : -INFINITY;
        highest[e / 2] = fmaxf(highest[e / 2], scores[n][e]);
      }
    }
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(0xffffffffu, highest[half], 1));
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(0xffffffffu, highest[half], 2));
      const float common = fmaxf(largest[half], highest[half]);
      factors[half] = exp2f(largest[half] - common);
      largest[half] = common;
      total[half] *= factors[half];
    }
#pragma unroll
    for (int n = 0; n < kSize / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[n][e] *= factors[e / 2];
      }
    }
    uint32_t high[4], low[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = exp2f(scores[n][e] - largest[e / 2]);
        total[e / 2] += weight;
        weights[n][e] = weight * (kNumbers ? kValueUnit : kValueUnit * page.value_scales[n * 2 + e % 2]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = weights[n][2 * half], b = weights[n][2 * half + 1];
        high[2 * n + half] = pair_of<T>(a, b);
        low[2 * n + half] = pair_of<T>(a - rounded(a, T()), b - rounded(b, T()));
      }
    }
    add_values(sums, page, high, low);
    if (more) {
      if constexpr (kNumbers) {
        load(page, position + kWarps * kPage);
      } else {
        page = ahead;
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
    const int row = g + 8 * half;
    if (row < rows) {
      float* to = merged + (warp * rows + row) * kStride;
#pragma unroll
      for (int n = 0; n < kSize / 8; ++n) {
        to[number_of_column<kSize, kKept>(n, 2 * t)] = sums[n][2 * half];
        to[number_of_column<kSize, kKept>(n, 2 * t + 1)] = sums[n][2 * half + 1];
      }
      if (t == 0) {
        to[kSize] = largest[half];
        to[kSize + 1] = total[half];
      }
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < rows * kSize; index += 32 * kWarps) {
    const int row = index / kSize, number = index % kSize;
    float common = kLowest, sum = 0.0f, value = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      common = fmaxf(common, merged[(w * rows + row) * kStride + kSize]);
    }
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float* own = merged + (w * rows + row) * kStride;
      const float factor = exp2f(own[kSize] - common);
      sum += factor * own[kSize + 1];
      value += factor * own[number];
    }
    value *= kLast;
    const int at = first_row + row;
    const int64_t query = (sequence * p.tokens + at / p.group) * heads + head * p.group + at % p.group;
    if (p.splits == 1) {
      narrow(static_cast<T*>(p.y) + query * kSize + number, value / sum);
      continue;
    }
    float* to = p.partial + (query * p.splits + blockIdx.x) * kStride;
    to[number] = value;
    if (number == 0) {
      to[kSize] = common;
      to[kSize + 1] = sum;
    }
  }
}

// Grid: (heads, tokens), a thread per number. Traffic: what the splits found, once. Contract: as above.
template <class T, int kSize>
__global__ void join_kernel(const Paged p) {
  launch_next();
  wait_for_previous();
  const int64_t query = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
  const float* from = p.partial + query * p.splits * (kSize + 2);
  const int splits = Seen(p, blockIdx.y / p.tokens).splits;
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
  narrow(static_cast<T*>(p.y) + query * kSize + threadIdx.x, value / total);
}

template <class T, int kSize, Kept kKept>
void run(Paged& p, const Newest* newest, const Tensor& q, int64_t kv_heads, int64_t sequences) {
  const int64_t heads = kv_heads * p.group;
  const cudaStream_t stream = stream_of(q);
  const bool early = starts_early(compute_capability(q));
  const int rows = p.tokens * p.group;
  p.parts = (rows + kRows - 1) / kRows;
  const int64_t all = (p.columns * kPage + kLength - 1) / kLength;
  p.splits = int(p.window > 0 ? std::min<int64_t>(all, (p.window + p.tokens - 2) / kLength + 2) : all);
  Tensor partial = empty_on(q, {p.splits > 1 ? q.size(0) * heads * p.splits : 0, kSize + 2}, ScalarType::Float);
  p.partial = static_cast<float*>(partial.data_ptr());
  const auto attend = newest ? attend_kernel<T, kSize, kKept, true> : attend_kernel<T, kSize, kKept, false>;
  constexpr int kWarps = kWarpsOf<kSize>, kRowBytes = kWarps * (kSize + 2) * int(sizeof(float));
  const int shared = std::min(rows, kRows) * kRowBytes;
  STD_CUDA_CHECK(cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, kRows * kRowBytes));
  const dim3 grid(unsigned(p.splits), unsigned(kv_heads * p.parts), unsigned(sequences));
  STD_CUDA_CHECK(launch_early(early, attend, grid, dim3(32 * kWarps), shared, stream, p, newest ? *newest : Newest()));
  if (p.splits > 1) {
    const auto join = join_kernel<T, kSize>;
    STD_CUDA_CHECK(launch_early(early, join, dim3(unsigned(heads), unsigned(q.size(0))), dim3(kSize), 0, stream, p));
  }
}

template <class T, Kept kKept>
void run(Paged& p, const Newest* newest, const Tensor& q, int64_t kv_heads, int64_t sequences) {
  switch (q.size(2)) {
    case 64: run<T, 64, kKept>(p, newest, q, kv_heads, sequences); break;
    case 128: run<T, 128, kKept>(p, newest, q, kv_heads, sequences); break;
    case 256: run<T, 256, kKept>(p, newest, q, kv_heads, sequences); break;
    default: STD_TORCH_CHECK(false, "paged_attention: heads of ", q.size(2), " numbers; allowed are 64, 128 and 256");
  }
}

template <class T>
void run(Paged& p, const Newest* newest, const Tensor& q, int64_t kv_heads, int64_t sequences, Kept kept) {
  switch (kept) {
    case Kept::kNumbers: run<T, Kept::kNumbers>(p, newest, q, kv_heads, sequences); break;
    case Kept::kCodes: run<T, Kept::kCodes>(p, newest, q, kv_heads, sequences); break;
    case Kept::kUpper: run<T, Kept::kUpper>(p, newest, q, kv_heads, sequences); break;
  }
}

// q has the heads of queries, and with `newest` those of keys and values behind them.
Tensor attend(const Tensor& q, Newest* newest, const Tensor& pool, const std::optional<Tensor>& scales, const Tensor& table,
              const Tensor& contexts, double scale, int64_t window, bool high_halves, bool settled) {
  const OnDeviceOf guard(q);
  const int device = q.get_device_index();
  STD_TORCH_CHECK(q.dim() == 3 && q.stride(2) == 1 && (q.size(1) == 1 || q.stride(1) == q.size(2)) &&
                      q.stride(0) % 8 == 0 && reinterpret_cast<uintptr_t>(q.data_ptr()) % 16 == 0,
                  "paged_attention: q must be (tokens, heads, size), its rows contiguous from multiples of 16 bytes on");
  STD_TORCH_CHECK(pool.dim() == 4 && pool.is_contiguous() && pool.size(0) == 2 && pool.size(3) == q.size(2) &&
                      pool.size(2) % kPage == 0 && pool.get_device_index() == device &&
                      reinterpret_cast<uintptr_t>(pool.data_ptr()) % 16 == 0 &&
                      pool.scalar_type() == (scales ? ScalarType::Byte : q.scalar_type()),
                  "paged_attention: pages must be (2, heads, slots, size), contiguous from a multiple of 16 bytes on, on the card of q, "
                  "uint8 with scales or of the type of q without");
  const int64_t kv_heads = pool.size(1), slots = pool.size(2);
  STD_TORCH_CHECK(!scales || (scales->is_contiguous() && scales->scalar_type() == ScalarType::Float &&
                              scales->numel() == 2 * kv_heads * slots && scales->get_device_index() == device),
                  "paged_attention: scales must be one float32 for each head and slot of keys and of values");
  STD_TORCH_CHECK(scales || !high_halves, "paged_attention: only codes of 8 bits have upper halves");
  const int64_t heads = q.size(1) - (newest ? 2 * kv_heads : 0);
  STD_TORCH_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "paged_attention: ", heads, " heads do not share ", kv_heads);
  const int64_t sequences = table.dim() == 2 ? table.size(0) : 0;
  STD_TORCH_CHECK(table.dim() == 2 && table.is_contiguous() && table.scalar_type() == ScalarType::Long &&
                      (sequences ? q.size(0) % sequences : q.size(0)) == 0 && table.get_device_index() == device &&
                      contexts.dim() == 1 && contexts.is_contiguous() && contexts.scalar_type() == ScalarType::Long &&
                      contexts.size(0) == sequences && contexts.get_device_index() == device,
                  "paged_attention: pages and contexts of each sequence must be contiguous int64 tensors on the card of q, which "
                  "has as many tokens of each");
  STD_TORCH_CHECK(q.size(0) * q.size(1) <= 65535 * int64_t(kRows), "paged_attention: ", q.size(0), " tokens of ", q.size(1),
                  " heads; split them");
  STD_TORCH_CHECK(q.size(0) <= 65535, "paged_attention: ", q.size(0), " tokens; split them");
  Tensor y = empty_on(q, {q.size(0), heads, q.size(2)}, q.scalar_type());
  if (q.size(0) == 0) {
    return y;
  }
  constexpr double kLog2OfE = 1.4426950408889634;
  Paged p = {};
  p.q = q.data_ptr();
  p.keys = pool.data_ptr();
  p.values = static_cast<const char*>(pool.data_ptr()) + pool.numel() / 2 * (scales ? 1 : 2);
  if (scales) {
    p.key_scales = static_cast<const float*>(scales->data_ptr());
    p.value_scales = p.key_scales + kv_heads * slots;
  }
  p.y = y.data_ptr();
  p.table = static_cast<const int64_t*>(table.data_ptr());
  p.contexts = static_cast<const int64_t*>(contexts.data_ptr());
  p.q_stride = q.stride(0);
  p.columns = table.size(1);
  p.slots = slots;
  p.tokens = int(q.size(0) / sequences);
  p.group = int(heads / kv_heads);
  p.window = window < table.size(1) * kPage ? int(window) : 0;  // one that hides nothing is none
  p.scale = float(scale * kLog2OfE);
  p.settled = settled;
  if (newest) {
    STD_TORCH_CHECK(p.tokens == 1 && p.group <= kRows, "paged_attention: positions are turned of one token of each sequence with up to ",
                    kRows, " heads for one of keys, not of ", p.tokens, " with ", p.group);
    newest->keys = pool.data_ptr();
    newest->values = const_cast<void*>(p.values);
    newest->key_scales = const_cast<float*>(p.key_scales);
    newest->value_scales = const_cast<float*>(p.value_scales);
  }
  const Kept kept = !scales ? Kept::kNumbers : high_halves ? Kept::kUpper : Kept::kCodes;
  if (q.scalar_type() == ScalarType::BFloat16) {
    run<__nv_bfloat16>(p, newest, q, kv_heads, sequences, kept);
  } else {
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::Half, "paged_attention: q must be bfloat16 or float16");
    run<__half>(p, newest, q, kv_heads, sequences, kept);
  }
  return y;
}

Tensor paged_attention_cuda(const Tensor& q, const Tensor& pool, const std::optional<Tensor>& scales, const Tensor& table,
                            const Tensor& contexts, double scale, int64_t window, bool high_halves, bool settled) {
  return attend(q, nullptr, pool, scales, table, contexts, scale, window, high_halves, settled);
}

Tensor turn_and_attend_cuda(const Tensor& heads, const Tensor& cos, const Tensor& sin, const Tensor& slots, Tensor pool,
                            std::optional<Tensor> scales, const Tensor& table, const Tensor& contexts, double scale, int64_t window,
                            bool high_halves) {
  const int device = heads.get_device_index();
  for (const Tensor* angle : {&cos, &sin}) {
    STD_TORCH_CHECK(angle->dim() == 3 && heads.dim() == 3 && angle->size(0) == heads.size(0) && angle->size(1) == 1 &&
                        angle->size(2) == heads.size(2) && angle->is_contiguous() && angle->scalar_type() == heads.scalar_type() &&
                        angle->get_device_index() == device && reinterpret_cast<uintptr_t>(angle->data_ptr()) % 16 == 0,
                    "paged_attention: cos and sin must be contiguous (tokens, 1, size), of the type of the heads and on their card");
  }
  STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Long && slots.is_contiguous() && slots.numel() == heads.size(0) &&
                      slots.get_device_index() == device,
                  "paged_attention: slots must be one int64 per token, on the card of the heads");
  Newest newest = {};
  newest.cos = cos.data_ptr();
  newest.sin = sin.data_ptr();
  newest.slots = static_cast<const int64_t*>(slots.data_ptr());
  return attend(heads, &newest, pool, scales, table, contexts, scale, window, high_halves, true);
}

}  // namespace
}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) {
  m.impl("paged_attention", TORCH_BOX(&qsync::paged_attention_cuda));
  m.impl("turn_and_attend", TORCH_BOX(&qsync::turn_and_attend_cuda));
}
