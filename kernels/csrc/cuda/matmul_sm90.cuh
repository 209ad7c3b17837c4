// Scaled products of 8-bit codes on Hopper: tensor copies into shared memory, warpgroup products, fused epilogue.
//
// Grid: one block per multiprocessor that the stream has, in clusters; each walks over its share of the tiles. A block has
// three warpgroups: one copies operands in, two multiply. Either both work on one tile (cooperative), or each has its own
// and one multiplies while the other writes out (alternating). Blocks of a cluster share what they read of A and B.
// Traffic: (kRows + kColumns) * 128 bytes of codes per tile and 128 k, less what the cluster shares; the result once.
// Contract: INT8 sums are exact in INT32. FP8 sums are the tensor core's (FP32 with a shortened mantissa), or with
// kPromote FP32 sums over blocks of 128 k. Scales and bias in FP32, one rounding to the result's type.
// Specification: `product` in kernels/matmul.py.
#pragma once

#include <type_traits>

#include "matmul_arguments.h"
#include "matmul_epilogue.cuh"
#include "matmul_ptx.cuh"
#include "matmul_wgmma.cuh"

namespace qsync::matmul {

constexpr int kDepth = 128;            // k per stage: the width of the 128-byte swizzle
constexpr int kGroupThreads = 128;     // a warpgroup
constexpr int kThreads = 3 * kGroupThreads;
constexpr int kChunkRows = 64;         // a piece of the result on its way out: 64 rows of 128 bytes
constexpr int kChunkBytes = kChunkRows * 128;
constexpr int kSharedLimit = 232448;   // bytes a block may have

// Division by a number known at launch, for dividends below 2^31: a multiplication and a shift.
// Source: T. Granlund, P. Montgomery, "Division by invariant integers using multiplication", PLDI 1994.
struct Divisor {
  uint32_t number, factor, shift;

  void set(int divisor) {
    number = uint32_t(divisor), shift = 0;
    while ((uint64_t{1} << shift) < number) {
      ++shift;
    }
    factor = uint32_t(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - number)) / number + 1);
  }
  // Quotient; `rest` becomes the remainder.
  __device__ __forceinline__ int divide(int dividend, int* rest) const {
    const uint32_t n = uint32_t(dividend), quotient = (__umulhi(n, factor) + n) >> shift;
    *rest = int(n - quotient * number);
    return int(quotient);
  }
};

// Everything a launch needs besides the code; lives in the constant bank.
struct Launch {
  CUtensorMap a, b, out, preactivation;
  const float *a_scale, *b_scale;
  const void* bias;
  void *out_pointer, *preactivation_pointer;
  int64_t a_scale_row, a_scale_block, a_scale_batch, b_scale_row, b_scale_block, b_scale_batch;
  int rows, columns, depth_blocks;
  int tile_rows, tile_columns;  // tiles of a whole cluster
  int batch, split_blocks, group, total;
  Divisor tiles, matrices, width, height, last_height;  // of a matrix; of a split; tiles of a group of rows; its rows
  Float out_float, bias_float;
  Activation activation;
  bool raw;          // the result is the sums themselves, 32 bits each, one matrix per split
  bool block_scales;
  bool copy_out;     // the result's rows are aligned to 16 bytes, as the copy engine wants them
};

template <Code kA_, Code kB_, int kRows_, int kColumns_, int kClusterRows_, int kClusterColumns_, bool kAlternating_,
          bool kPromote_, int kBuffers_>
struct Tile {
  static constexpr Code kA = kA_, kB = kB_;
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kClusterRows = kClusterRows_, kClusterColumns = kClusterColumns_;
  static constexpr int kCluster = kClusterRows * kClusterColumns;
  static constexpr bool kAlternating = kAlternating_, kPromote = kPromote_;
  static constexpr int kGroupRows = kAlternating ? kRows : kRows / 2;  // rows of one warpgroup
  static constexpr int kSlabs = kGroupRows / 64;
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth;
  static constexpr int kScaleBytes = kPromote ? (kRows + kColumns) * 4 : 0;  // block scales, per stage
  static constexpr int kColumnCopies = kAlternating ? 2 : 1;
  static constexpr int kColumnBytes = kColumnCopies * kColumns * 8;  // scale and bias of each column
  static constexpr int kBarrierBytes = 256;
  static constexpr int kFree = kSharedLimit - kColumnBytes - kBarrierBytes;
  static constexpr int kBuffers = kBuffers_;  // chunks of each warpgroup that may be under way
  static constexpr int kStages = (kFree - 2 * kBuffers * kChunkBytes) / (kStageBytes + kScaleBytes);
  static constexpr int kSharedBytes =
      kStages * (kStageBytes + kScaleBytes) + 2 * kBuffers * kChunkBytes + kColumnBytes + kBarrierBytes;
  static_assert(kStages >= 3 && kStages <= 12 && kSharedBytes <= kSharedLimit, "tile does not fit shared memory");
};

struct Work {
  int tile_row, tile_column, z, split, first_block, blocks;
};

__device__ __forceinline__ Work work_at(const Launch& p, int index) {
  Work work;
  int tile, within;
  const int outer = p.tiles.divide(index, &tile);
  work.split = p.matrices.divide(outer, &work.z);
  const int first = p.width.divide(tile, &within) * p.group;
  const Divisor& height = first + p.group <= p.tile_rows ? p.height : p.last_height;
  work.tile_column = height.divide(within, &work.tile_row);
  work.tile_row += first;
  work.first_block = work.split * p.split_blocks;
  work.blocks = min(p.split_blocks, p.depth_blocks - work.first_block);
  return work;
}

// A block's shared memory, as addresses of the shared window.
template <class T>
struct Shared {
  uint32_t stages, chunks, columns, scales, full, empty, turn;
  char* base;

  __device__ __forceinline__ explicit Shared(char* memory) : base(memory) {
    stages = shared_address(memory);
    chunks = stages + T::kStages * T::kStageBytes;
    columns = chunks + 2 * T::kBuffers * kChunkBytes;
    scales = columns + T::kColumnBytes;
    full = scales + T::kStages * T::kScaleBytes;
    empty = full + 8 * T::kStages;
    turn = empty + 8 * T::kStages;
  }
  __device__ __forceinline__ uint32_t a(int stage) const { return stages + stage * T::kStageBytes; }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + T::kRows * kDepth; }
  __device__ __forceinline__ float* scale(int stage) const {
    return reinterpret_cast<float*>(base + (scales - stages)) + stage * (T::kRows + T::kColumns);
  }
  __device__ __forceinline__ float4* column_pairs(int copy) const {
    return reinterpret_cast<float4*>(base + (columns - stages)) + copy * (T::kColumns / 2);
  }
};

// Position in the ring of stages.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count) {
    const int to = stage + count;
    parity ^= (to / kStages) & 1;
    stage = to % kStages;
  }
};

// One thread: copies every stage of every tile of this block in.
template <class T>
__device__ __forceinline__ void copy_operands(const Launch& p, const Shared<T>& shared, int cluster, int clusters) {
  constexpr int kSliceA = T::kRows / T::kClusterColumns, kSliceB = T::kColumns / T::kClusterRows;
  const int rank = T::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
  const int row = rank % T::kClusterRows, column = rank / T::kClusterRows;
  uint16_t sharers_a = 0;
  for (int i = 0; i < T::kClusterColumns; ++i) {
    sharers_a |= uint16_t(1u << (row + i * T::kClusterRows));
  }
  const uint16_t sharers_b = uint16_t(((1u << T::kClusterRows) - 1) << (column * T::kClusterRows));
  Ring<T::kStages> ring;
  for (int index = cluster; index < p.total; index += clusters) {
    const Work work = work_at(p, index);
    const int first_row = (work.tile_row * T::kClusterRows + row) * T::kRows + column * kSliceA;
    const int first_column = (work.tile_column * T::kClusterColumns + column) * T::kColumns + row * kSliceB;
    for (int block = 0; block < work.blocks; ++block) {
      const uint32_t full = shared.full + 8 * ring.stage;
      barrier_wait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
      barrier_expect(full, T::kStageBytes);
      const int k = (work.first_block + block) * kDepth;
      const uint32_t to_a = shared.a(ring.stage) + column * kSliceA * kDepth;
      const uint32_t to_b = shared.b(ring.stage) + row * kSliceB * kDepth;
      if constexpr (T::kClusterColumns > 1) {
        copy_in_to(sharers_a, to_a, &p.a, full, k, first_row, work.z);
      } else {
        copy_in(to_a, &p.a, full, k, first_row, work.z);
      }
      if constexpr (T::kClusterRows > 1) {
        copy_in_to(sharers_b, to_b, &p.b, full, k, first_column, work.z);
      } else {
        copy_in(to_b, &p.b, full, k, first_column, work.z);
      }
      ring.next();
    }
  }
}

__device__ const float kOne = 1.0f;

// One warp: copies the block scales of every stage in, four bytes at a time; each lane counts at the stage's barrier.
template <class T>
__device__ __forceinline__ void copy_scales(
    const Launch& p, const Shared<T>& shared, int cluster, int clusters, int lane) {
  const int rank = T::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
  Ring<T::kStages> ring;
  for (int index = cluster; index < p.total; index += clusters) {
    const Work work = work_at(p, index);
    const int first_row = (work.tile_row * T::kClusterRows + rank % T::kClusterRows) * T::kRows;
    const int first_column = (work.tile_column * T::kClusterColumns + rank / T::kClusterRows) * T::kColumns;
    for (int block = 0; block < work.blocks; ++block) {
      barrier_wait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
      const uint32_t to = shared_address(shared.scale(ring.stage));
      const int64_t k = work.first_block + block;
      for (int i = lane; i < T::kRows + T::kColumns; i += 32) {
        const bool of_a = i < T::kRows;
        const int at = of_a ? first_row + i : first_column + i - T::kRows;
        const float* from = &kOne;
        int bytes = 4;
        if (p.block_scales) {
          from = of_a ? p.a_scale + work.z * p.a_scale_batch + at * p.a_scale_row + k * p.a_scale_block
                      : p.b_scale + work.z * p.b_scale_batch + at * p.b_scale_row + k * p.b_scale_block;
          if (at >= (of_a ? p.rows : p.columns)) {
            from = &kOne;
            bytes = 0;  // zeros instead
          }
        }
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + 4 * i), "l"(from), "r"(bytes) : "memory");
      }
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared.full + 8 * ring.stage) : "memory");
      ring.next();
    }
  }
}

// Tells every block that wrote into this stage that this warpgroup has read it.
template <class T>
__device__ __forceinline__ void release(const Shared<T>& shared, int stage, int thread, int rank) {
  if constexpr (T::kCluster == 1) {
    if (thread == 0) {
      barrier_arrive(shared.empty + 8 * stage);
    }
  } else if (thread < T::kCluster) {
    if (thread % T::kClusterRows == rank % T::kClusterRows || thread / T::kClusterRows == rank / T::kClusterRows) {
      barrier_arrive_at(shared.empty + 8 * stage, thread);
    }
  }
}

template <class T>
using Sums = std::conditional_t<T::kPromote, float, typename Sum<T::kA, T::kB>::type>;

// Multiplies one tile; `sums` is written, not added to.
template <class T>
__device__ __forceinline__ void multiply(
    const Shared<T>& shared, Ring<T::kStages>& ring, int blocks, int group_row, int thread, int rank,
    Sums<T> (&sums)[T::kSlabs][T::kColumns / 2]) {
  using Product = Wgmma<T::kA, T::kB, T::kColumns>;
  int previous = 0;
  for (int block = 0; block < blocks; ++block) {
    barrier_wait(shared.full + 8 * ring.stage, ring.parity);
    const uint64_t a = matrix_descriptor(shared.a(ring.stage) + group_row * kDepth);
    const uint64_t b = matrix_descriptor(shared.b(ring.stage));
    products_begin();
#pragma unroll
    for (int step = 0; step < kDepth / 32; ++step) {
#pragma unroll
      for (int slab = 0; slab < T::kSlabs; ++slab) {
        // 64 rows further on are 64 * 128 bytes, 32 k are 32 bytes; descriptors count in 16 bytes.
        Product::run(sums[slab], a + slab * (64 * kDepth / 16) + step * 2, b + step * 2, block + step);
      }
    }
    products_commit();
    if (block > 0) {
      products_wait<1>();
      release<T>(shared, previous, thread, rank);
    }
    previous = ring.stage;
    ring.next();
  }
}

// The same with a sum of its own for every 128 k, multiplied by the block's scales and added in FP32.
template <class T>
__device__ __forceinline__ void multiply_promoting(
    const Shared<T>& shared, Ring<T::kStages>& ring, int blocks, int group_row, int group, int thread, int rank,
    float (&sums)[T::kSlabs][T::kColumns / 2]) {
  using Product = Wgmma<T::kA, T::kB, T::kColumns>;
  static_assert(T::kSlabs == 1, "a second set of sums has room only beside 64 rows");
  typename Sum<T::kA, T::kB>::type part[T::kColumns / 2];
#pragma unroll
  for (float& sum : sums[0]) {
    sum = 0.0f;
  }
  const int row = group_row + thread / 32 * 16 + thread % 32 / 4;
  for (int block = 0; block < blocks; ++block) {
    barrier_wait(shared.full + 8 * ring.stage, ring.parity);
    const uint64_t a = matrix_descriptor(shared.a(ring.stage) + group_row * kDepth);
    const uint64_t b = matrix_descriptor(shared.b(ring.stage));
    products_begin();
#pragma unroll
    for (int step = 0; step < kDepth / 32; ++step) {
      Product::run(part, a + step * 2, b + step * 2, step);
    }
    products_commit();
    const float* scale = shared.scale(ring.stage);
    const float upper = scale[row], lower = scale[row + 8];
    const float2* columns = reinterpret_cast<const float2*>(scale + T::kRows) + thread % 4;
    products_wait<0>();
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; ++j) {
      const float2 column = columns[4 * j];
      sums[0][4 * j] = fmaf(static_cast<float>(part[4 * j]), upper * column.x, sums[0][4 * j]);
      sums[0][4 * j + 1] = fmaf(static_cast<float>(part[4 * j + 1]), upper * column.y, sums[0][4 * j + 1]);
      sums[0][4 * j + 2] = fmaf(static_cast<float>(part[4 * j + 2]), lower * column.x, sums[0][4 * j + 2]);
      sums[0][4 * j + 3] = fmaf(static_cast<float>(part[4 * j + 3]), lower * column.y, sums[0][4 * j + 3]);
    }
    named_barrier(1 + group, kGroupThreads);  // every thread has read the scales
    release<T>(shared, ring.stage, thread, rank);
    ring.next();
  }
}

// A warpgroup's way out: chunks of 64 rows x 128 bytes through shared memory, where they lie swizzled.
template <class T>
struct Outlet {
  const Launch& p;
  uint32_t chunks;
  char* memory;
  int group, thread;
  int slot = 0;

  __device__ __forceinline__ Outlet(const Launch& launch, const Shared<T>& shared, int group_, int thread_)
      : p(launch), group(group_), thread(thread_) {
    chunks = shared.chunks + group * T::kBuffers * kChunkBytes;
    memory = shared.base + (chunks - shared.stages);
  }

  // Returns a buffer that nothing reads any more.
  __device__ __forceinline__ uint32_t acquire() {
    if (thread == 0) {
      copies_out_read<T::kBuffers - 1>();
    }
    named_barrier(1 + group, kGroupThreads);
    return chunks + slot * kChunkBytes;
  }

  // Sends the buffer that was acquired last to (row, column) of matrix z. kPlain: by the copy engine in any case.
  template <bool kPlain>
  __device__ __forceinline__ void send(
      const CUtensorMap* map, void* pointer, int row, int column, int z, int bytes_each) {
    if (kPlain || p.copy_out) {
      fence_copies();
      named_barrier(1 + group, kGroupThreads);
      if (thread == 0) {
        copy_out(map, chunks + slot * kChunkBytes, column, row, z);
      }
    } else {
      named_barrier(1 + group, kGroupThreads);
      const int each_row = 128 / bytes_each;
      for (int i = thread; i < kChunkRows * each_row; i += kGroupThreads) {
        const int r = i / each_row, c = i % each_row, byte = c * bytes_each;
        if (row + r < p.rows && column + c < p.columns) {
          const char* from = memory + slot * kChunkBytes + r * 128 + ((((byte >> 4) ^ (r & 7)) << 4) | (byte & 15));
          const int64_t at = (int64_t{z} * p.rows + row + r) * p.columns + column + c;
          if (bytes_each == 2) {
            static_cast<uint16_t*>(pointer)[at] = *reinterpret_cast<const uint16_t*>(from);
          } else {
            static_cast<uint32_t*>(pointer)[at] = *reinterpret_cast<const uint32_t*>(from);
          }
        }
      }
    }
    slot = slot + 1 == T::kBuffers ? 0 : slot + 1;
  }
};

// Writes 64 x 64 values of 16 bits: value 4 * j + i of a thread is row (i / 2) * 8 + lane / 4, column 8 * j + lane % 4 * 2 + i % 2.
template <bool kBF16>
__device__ __forceinline__ void put_chunk16(uint32_t buffer, const float (&v)[32], int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t at = buffer + row * 128 + (((j + lane / 16) ^ (row & 7)) << 4);
    store_matrices(
        at, pack_pair(v[4 * j], v[4 * j + 1], kBF16), pack_pair(v[4 * j + 2], v[4 * j + 3], kBF16),
        pack_pair(v[4 * j + 4], v[4 * j + 5], kBF16), pack_pair(v[4 * j + 6], v[4 * j + 7], kBF16));
  }
}

// Writes 64 x 32 values of 32 bits, in the same order.
__device__ __forceinline__ void put_chunk32(uint32_t buffer, const float (&v)[16], int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + half * 8, byte = j * 32 + lane % 4 * 8;
      const uint32_t at = buffer + r * 128 + ((((byte >> 4) ^ (r & 7)) << 4) | (byte & 15));
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[4 * j + 2 * half]), "f"(v[4 * j + 2 * half + 1])
                   : "memory");
    }
  }
}

__device__ __forceinline__ float bits_of(int32_t sum) { return __int_as_float(sum); }
__device__ __forceinline__ float bits_of(float sum) { return sum; }

// Scales, adds, activates and sends a warpgroup's sums. kPlain: no activation, nobody wants what it would be applied to, and
// the copy engine takes the result; apart from the rest, because jumping over that code costs more than running what is left.
template <class T, Float kFloat, bool kPlain>
__device__ __forceinline__ void write_tile(
    const Launch& p, Outlet<T>& outlet, const Work& work, int first_row, int first_column, const float4* columns,
    const float (&row_scales)[T::kSlabs][2], const Sums<T> (&sums)[T::kSlabs][T::kColumns / 2]) {
  constexpr bool kWide = kFloat == Float::kFP32;
  constexpr int kWidth = kWide ? 32 : 64, kValues = kWidth / 2, kBytes = kWide ? 4 : 2;
  const int lane = outlet.thread % 32, z = p.raw ? work.split * p.batch + work.z : work.z;
#pragma unroll
  for (int slab = 0; slab < T::kSlabs; ++slab) {
#pragma unroll
    for (int chunk = 0; chunk < T::kColumns / kWidth; ++chunk) {
      const int row = first_row + slab * 64, column = first_column + chunk * kWidth;
      float v[kValues];
      if (kWide && p.raw) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          v[i] = bits_of(sums[slab][chunk * kValues + i]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kWidth / 8; ++j) {
          const float4 pair = columns[chunk * (kWidth / 2) + 4 * j + lane % 4];  // scale, bias of two columns
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float scale = row_scales[slab][i / 2] * (i % 2 ? pair.z : pair.x);
            const float sum = static_cast<float>(sums[slab][chunk * kValues + 4 * j + i]);
            v[4 * j + i] = fmaf(sum, scale, i % 2 ? pair.w : pair.y);
          }
        }
      }
      const auto send = [&](const CUtensorMap* map, void* pointer) {
        const uint32_t buffer = outlet.acquire();
        if constexpr (kWide) {
          put_chunk32(buffer, v, outlet.thread);
        } else {
          put_chunk16<kFloat == Float::kBF16>(buffer, v, outlet.thread);
        }
        outlet.template send<kPlain>(map, pointer, row, column, z, kBytes);
      };
      if constexpr (!kPlain) {
        if (p.preactivation_pointer != nullptr) {
          send(&p.preactivation, p.preactivation_pointer);
        }
        if (p.activation == Activation::kRelu) {
#pragma unroll
          for (float& value : v) {
            value = value < 0.0f ? 0.0f : value;
          }
        } else if (p.activation == Activation::kGelu) {
#pragma unroll
          for (float& value : v) {
            value = gelu(value);
          }
        }
      }
      send(&p.out, p.out_pointer);
    }
  }
}

// Two warpgroups: multiply and write out.
template <class T>
__device__ __forceinline__ void compute(
    const Launch& p, const Shared<T>& shared, int cluster, int clusters, int group, int thread) {
  constexpr int kTeam = T::kAlternating ? kGroupThreads : 2 * kGroupThreads;  // threads that share a tile's columns
  constexpr int kEach = (T::kColumns + kTeam - 1) / kTeam;
  const int rank = T::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
  const int in_team = T::kAlternating ? thread : group * kGroupThreads + thread;
  const int team_barrier = T::kAlternating ? 1 + group : 3;
  const int group_row = T::kAlternating ? 0 : group * T::kGroupRows;
  float* const columns = reinterpret_cast<float*>(shared.column_pairs(T::kAlternating ? group : 0));
  Ring<T::kStages> ring;
  Outlet<T> outlet(p, shared, group, thread);
  Sums<T> sums[T::kSlabs][T::kColumns / 2];
  uint32_t turn = 0;
  int count = 0;
  for (int index = cluster; index < p.total; index += clusters, ++count) {
    const Work work = work_at(p, index);
    if (T::kAlternating && count % 2 != group) {
      ring.skip(work.blocks);
      continue;
    }
    const int first_row = (work.tile_row * T::kClusterRows + rank % T::kClusterRows) * T::kRows + group_row;
    const int first_column = (work.tile_column * T::kClusterColumns + rank / T::kClusterRows) * T::kColumns;
    // Scales and bias are asked for now and needed after the product.
    const bool scaled = !p.raw && !p.block_scales;
    float row_scales[T::kSlabs][2], column_scale[kEach], bias[kEach];
#pragma unroll
    for (int i = 0; i < 2 * T::kSlabs; ++i) {
      const int row = first_row + i / 2 * 64 + thread / 32 * 16 + i % 2 * 8 + thread % 32 / 4;
      row_scales[i / 2][i % 2] =
          scaled && row < p.rows ? p.a_scale[work.z * p.a_scale_batch + row * p.a_scale_row] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = first_column + in_team + i * kTeam;
      const bool inside = column < p.columns && in_team + i * kTeam < T::kColumns;
      column_scale[i] = scaled && inside ? p.b_scale[work.z * p.b_scale_batch + column * p.b_scale_row] : 1.0f;
      bias[i] = p.bias != nullptr && inside ? load_float(p.bias, p.bias_float, column) : 0.0f;
    }
    if constexpr (T::kAlternating) {
      // A warpgroup begins when the other has seen all of its stages: it may not run ahead by more than one round.
      if (group == 1 || count > 1) {
        barrier_wait(shared.turn + 8 * group, turn);
        turn ^= 1;
      }
    }
    if constexpr (T::kPromote) {
      multiply_promoting<T>(shared, ring, work.blocks, group_row, group, thread, rank, sums);
    } else {
      multiply<T>(shared, ring, work.blocks, group_row, thread, rank, sums);
    }
    if constexpr (T::kAlternating) {
      if (thread % 32 == 0) {
        barrier_arrive(shared.turn + 8 * (1 - group));
      }
    }
    if constexpr (!T::kPromote) {
      products_wait<0>();
      release<T>(shared, ring.stage == 0 ? T::kStages - 1 : ring.stage - 1, thread, rank);
    }
    named_barrier(team_barrier, kTeam);  // the last tile's columns have been read
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (in_team + i * kTeam < T::kColumns) {
        columns[2 * (in_team + i * kTeam)] = column_scale[i];
        columns[2 * (in_team + i * kTeam) + 1] = bias[i];
      }
    }
    named_barrier(team_barrier, kTeam);
    const float4* pairs = reinterpret_cast<const float4*>(columns);
    const auto write = [&](auto format, auto plain) {
      write_tile<T, decltype(format)::value, decltype(plain)::value>(
          p, outlet, work, first_row, first_column, pairs, row_scales, sums);
    };
    const auto write_as = [&](auto format) {
      if (p.activation == Activation::kNone && p.preactivation_pointer == nullptr && p.copy_out) {
        write(format, std::true_type());
      } else {
        write(format, std::false_type());
      }
    };
    if (p.raw || p.out_float == Float::kFP32) {
      write_as(std::integral_constant<Float, Float::kFP32>());
    } else if (p.out_float == Float::kBF16) {
      write_as(std::integral_constant<Float, Float::kBF16>());
    } else {
      write_as(std::integral_constant<Float, Float::kFP16>());
    }
  }
  if (thread == 0) {
    copies_out_read<0>();
  }
}

// What the host must know of an instance to launch it.
struct Instance {
  const void* kernel;
  int rows, columns, cluster_rows, cluster_columns;
  bool alternating, promote;
  int shared_bytes;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1) product_kernel(const __grid_constant__ Launch p) {
  extern __shared__ __align__(1024) char memory[];
  const Shared<T> shared(memory);
  const int group = threadIdx.x / kGroupThreads;
  const int cluster = blockIdx.x / T::kCluster, clusters = gridDim.x / T::kCluster;
  if (threadIdx.x == 0) {
    constexpr int kReaders = (T::kAlternating ? 1 : 2) * (T::kClusterRows + T::kClusterColumns - 1);
    for (int stage = 0; stage < T::kStages; ++stage) {
      barrier_init(shared.full + 8 * stage, T::kPromote ? 33 : 1);
      barrier_init(shared.empty + 8 * stage, kReaders);
    }
    barrier_init(shared.turn, 4);
    barrier_init(shared.turn + 8, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    prefetch_map(&p.a);
    prefetch_map(&p.b);
    prefetch_map(&p.out);
  }
  __syncthreads();
  if constexpr (T::kCluster > 1) {
    cluster_sync();
  }
  // All of the above overlaps with the end of the kernel before; nothing that it may have written has been read.
  launch_next();
  wait_for_previous();
  if (group == 0) {
    give_registers<40>();
    const int warp = threadIdx.x / 32;
    if (warp == 0 && threadIdx.x % 32 == 0) {
      copy_operands<T>(p, shared, cluster, clusters);
    }
    if constexpr (T::kPromote) {
      if (warp == 1) {
        copy_scales<T>(p, shared, cluster, clusters, threadIdx.x % 32);
      }
    }
    __syncwarp();
  } else {
    take_registers<232>();
    compute<T>(p, shared, cluster, clusters, group - 1, threadIdx.x % kGroupThreads);
  }
  if constexpr (T::kCluster > 1) {
    cluster_sync();  // nobody leaves while others still write into its shared memory
  }
}

template <class T>
Instance instance() {
  return {reinterpret_cast<const void*>(&product_kernel<T>), T::kRows, T::kColumns, T::kClusterRows, T::kClusterColumns,
          T::kAlternating, T::kPromote, T::kSharedBytes};
}

}  // namespace qsync::matmul
