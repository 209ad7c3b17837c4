// Scaled products of 8-bit codes on Hopper: tensor copies into shared memory, warpgroup products, fused epilogue.
//
// Grid: one block per multiprocessor that the stream has, in clusters; each walks over its share of the tiles. A block has
// three warpgroups: one copies operands in, two multiply. Either both work on one tile (cooperative), or each has its own
// and one multiplies while the other writes out (alternating). Blocks of a cluster share what they read of A and B.
// Traffic: (kRows + kColumns) * 128 bytes of codes per tile and 128 k, less what the cluster shares; the result once.
// Contract: INT8 sums are exact in INT32. FP8 sums are the tensor core's (FP32 with a shortened mantissa), or with
// kPromote FP32 sums over blocks of 128 k. Scales and bias in FP32, one rounding to the result's type.
// Specification: `product` in kernels/matmul/scaled.py.
#pragma once

#include "matmul_sm90_output.cuh"
#include "matmul_sm90_tile.cuh"

namespace qsync::matmul {

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

// Multiplies one tile; `sums` is written, not added to. Arrives at `turn` once `announced` blocks have been asked for.
template <class T>
__device__ __forceinline__ void multiply(
    const Shared<T>& shared, Ring<T::kStages>& ring, int blocks, int group_row, int thread, int rank, int announced,
    Sums<T> (&sums)[T::kSlabs][T::kColumns / 2]) {
  using Product = Wgmma<T::kA, T::kB, T::kColumns>;
  const uint32_t first_a = matrix_descriptor(shared.a(0) + group_row * kDepth), first_b = matrix_descriptor(shared.b(0));
  int previous = 0;
  for (int block = 0; block < blocks; ++block) {
    barrier_wait(shared.full + 8 * ring.stage, ring.parity);
    const uint32_t a = first_a + ring.stage * (T::kStageBytes / 16), b = first_b + ring.stage * (T::kStageBytes / 16);
    products_begin();
#pragma unroll
    for (int step = 0; step < kDepth / 32; ++step) {
#pragma unroll
      for (int slab = 0; slab < T::kSlabs; ++slab) {
        // 64 rows further on are 64 * 128 bytes, 32 k are 32 bytes; descriptors count in 16 bytes.
        Product::run(sums[slab], a + slab * (64 * kDepth / 16) + step * 2, b + step * 2, step > 0 ? 1 : block);
      }
    }
    products_commit();
    if (!T::kAlternating && block + 1 == announced && thread % 32 == 0) {
      barrier_arrive(shared.turn);
    }
    if (block > 0) {
      products_wait<1>();
      release<T>(shared, previous, thread, rank);
    }
    previous = ring.stage;
    ring.next();
  }
}

// Block scales on their way from memory into a warpgroup's products: its rows' through registers, the columns' through shared
// memory, where their order fits that of the sums. Each warpgroup fetches its own, so that none waits for another.
template <class T>
struct BlockScales {
  static_assert(!T::kPromote || T::kColumns == kGroupThreads, "a thread fetches the scale of one column");
  const float *upper, *lower, *column;
  int64_t step_rows, step_columns;

  __device__ __forceinline__ BlockScales(
      const Launch& p, const Work& work, int first_row, int first_column, int thread) {
    const int row = first_row + thread / 32 * 16 + thread % 32 / 4, own = first_column + thread;
    const float* of_a = p.a_scale + work.z * p.a_scale_batch + work.first_block * p.a_scale_block;
    const float* of_b = p.b_scale + work.z * p.b_scale_batch + work.first_block * p.b_scale_block;
    upper = p.block_scales && row < p.rows ? of_a + row * p.a_scale_row : nullptr;
    lower = p.block_scales && row + 8 < p.rows ? of_a + (row + 8) * p.a_scale_row : nullptr;
    column = p.block_scales && own < p.columns ? of_b + own * p.b_scale_row : nullptr;
    step_rows = p.a_scale_block, step_columns = p.b_scale_block;
  }

  // Scales of the upper row, the lower row and the column, then on to the next block. 1 where there is none.
  __device__ __forceinline__ float3 next() {
    const float3 found{
        upper != nullptr ? *upper : 1.0f, lower != nullptr ? *lower : 1.0f, column != nullptr ? *column : 1.0f};
    upper = upper != nullptr ? upper + step_rows : nullptr;
    lower = lower != nullptr ? lower + step_rows : nullptr;
    column = column != nullptr ? column + step_columns : nullptr;
    return found;
  }
};

// The same with a sum of its own for every 128 k, multiplied by the block's scales and added in FP32. `half` says which of the
// two rows of column scales in shared memory is written next.
template <class T>
__device__ __forceinline__ void multiply_promoting(
    const Shared<T>& shared, Ring<T::kStages>& ring, int blocks, int group_row, int group, int thread, int rank,
    BlockScales<T> scales, int& half, float (&sums)[T::kSlabs][T::kColumns / 2]) {
  using Product = Wgmma<T::kA, T::kB, T::kColumns>;
  static_assert(T::kSlabs == 1, "a second set of sums has room only beside 64 rows");
  typename Sum<T::kA, T::kB>::type part[T::kColumns / 2];
#pragma unroll
  for (float& sum : sums[0]) {
    sum = 0.0f;
  }
  float3 scale = scales.next();
  for (int block = 0; block < blocks; ++block) {
    barrier_wait(shared.full + 8 * ring.stage, ring.parity);
    const uint32_t a = matrix_descriptor(shared.a(ring.stage) + group_row * kDepth);
    const uint32_t b = matrix_descriptor(shared.b(ring.stage));
    products_begin();
#pragma unroll
    for (int step = 0; step < kDepth / 32; ++step) {
      Product::run(part, a + step * 2, b + step * 2, step);
    }
    products_commit();
    // Two rows in turn: who writes one again has met the others since they read it, at the barrier for the other one.
    float* const row = shared.scale_row(group, half);
    row[thread] = scale.z;
    const float upper = scale.x, lower = scale.y;
    if (block + 1 < blocks) {
      scale = scales.next();
    }
    named_barrier(1 + group, kGroupThreads);
    const float2* columns = reinterpret_cast<const float2*>(row) + thread % 4;
    half ^= 1;
    products_wait<0>();
    release<T>(shared, ring.stage, thread, rank);
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; ++j) {
      const float2 column = columns[4 * j];
      sums[0][4 * j] = fmaf(static_cast<float>(part[4 * j]), upper * column.x, sums[0][4 * j]);
      sums[0][4 * j + 1] = fmaf(static_cast<float>(part[4 * j + 1]), upper * column.y, sums[0][4 * j + 1]);
      sums[0][4 * j + 2] = fmaf(static_cast<float>(part[4 * j + 2]), lower * column.x, sums[0][4 * j + 2]);
      sums[0][4 * j + 3] = fmaf(static_cast<float>(part[4 * j + 3]), lower * column.y, sums[0][4 * j + 3]);
    }
    ring.next();
  }
}

// Two or three warpgroups: multiply and write out. Those that share a tile go at their own pace, within the ring's stages:
// while one writes out, another multiplies. A lead of the first one, enforced at the beginning of each tile, keeps them apart.
template <class T>
__device__ __forceinline__ void compute(
    const Launch& p, const Shared<T>& shared, int cluster, int clusters, int group, int thread) {
  constexpr int kEach = (T::kColumns + kFactorColumns - 1) / kFactorColumns;
  const int rank = T::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
  const int group_row = T::kAlternating ? 0 : group * T::kGroupRows;
  float4* const pairs = shared.column_pairs(group);
  Ring<T::kStages> ring;
  Outlet<T> outlet(p, shared, group, thread);
  Sums<T> sums[T::kSlabs][T::kColumns / 2];
  const float one_scale = p.one_scale ? *p.a_scale * *p.b_scale : 1.0f;
  uint32_t turn = 0;
  int count = 0, half = 0;
  float largest = 0.0f;
  for (int index = cluster; index < p.total; index += clusters, ++count) {
    const Work work = work_at(p, index);
    if (T::kAlternating && count % 2 != group) {
      ring.skip(work.blocks);
      continue;
    }
    const int first_row = (work.tile_row * T::kClusterRows + rank % T::kClusterRows) * T::kRows + group_row;
    const int first_column = (work.tile_column * T::kClusterColumns + rank / T::kClusterRows) * T::kColumns;
    // Scales and bias are asked for now and needed after the product.
    const bool scaled = !p.raw && !p.block_scales && !p.one_scale;
    float row_scales[T::kSlabs][2], column_scale[kEach], bias[kEach];
#pragma unroll
    for (int i = 0; i < 2 * T::kSlabs; ++i) {
      const int row = first_row + i / 2 * 64 + thread / 32 * 16 + i % 2 * 8 + thread % 32 / 4;
      row_scales[i / 2][i % 2] =
          scaled && row < p.rows ? p.a_scale[work.z * p.a_scale_batch + row * p.a_scale_row] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = first_column + thread + i * kGroupThreads;
      const bool inside = column < p.columns && thread + i * kGroupThreads < T::kColumns;
      column_scale[i] = scaled && inside ? p.b_scale[work.z * p.b_scale_batch + column * p.b_scale_row] : 1.0f;
      bias[i] = p.bias != nullptr && inside ? load_float(p.bias, p.bias_float, column) : 0.0f;
    }
    if (p.one_scale) {
      row_scales[0][0] = one_scale;
    }
    if constexpr (T::kAlternating) {
      // A warpgroup begins when the other has seen all of its stages: it may not run ahead by more than one round.
      if (group == 1 || count > 1) {
        barrier_wait(shared.turn + 8 * group, turn);
        turn ^= 1;
      }
    } else if (p.lead > 0 && group > 0) {
      barrier_wait(shared.turn, turn);
      turn ^= 1;
    }
    if constexpr (T::kPromote) {
      const BlockScales<T> scales(p, work, first_row, first_column, thread);
      multiply_promoting<T>(shared, ring, work.blocks, group_row, group, thread, rank, scales, half, sums);
    } else {
      multiply<T>(shared, ring, work.blocks, group_row, thread, rank, group == 0 ? p.lead : 0, sums);
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
    // Factors of columns go through shared memory, where their order fits that of the sums, 128 at a time. Each warpgroup has
    // a place of its own, so that only its own warps wait for each other; a lone scale needs none of that.
    const auto bring = [&](int part) {
      named_barrier(1 + group, kGroupThreads);  // the columns before have been read
      if (thread + part * kFactorColumns < T::kColumns) {
        reinterpret_cast<float2*>(pairs)[thread] = float2{column_scale[part], bias[part]};
      }
      named_barrier(1 + group, kGroupThreads);
    };
    const auto write = [&](auto format, auto plain, auto one, auto largest_too) {
      write_tile<T, decltype(format)::value, decltype(plain)::value, decltype(one)::value, decltype(largest_too)::value>(
          p, outlet, work, first_row, first_column, pairs, bring, row_scales, sums, largest);
    };
    const auto write_as = [&](auto format) {
      if (p.activation != Activation::kNone || p.preactivation_pointer != nullptr || !p.copy_out) {
        write(format, std::false_type(), std::false_type(), std::false_type());
      } else if (!p.one_scale) {
        write(format, std::true_type(), std::false_type(), std::false_type());
      } else if (p.largest == nullptr) {
        write(format, std::true_type(), std::true_type(), std::false_type());
      } else if constexpr (decltype(format)::value != Float::kFP32) {
        write(format, std::true_type(), std::true_type(), std::true_type());
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
  if (thread % 32 == 0) {
    copies_out_read<0>();
  }
  if (p.largest != nullptr) {
    // Rounded like the results: the largest of what was rounded is what the largest was rounded to.
    const uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest));
    if (thread % 32 == 0) {
      const uint32_t pair = pack_pair(__uint_as_float(bits), 0.0f, p.out_float == Float::kBF16);
      const float rounded = p.out_float == Float::kBF16
                                ? __uint_as_float(pair << 16)
                                : __half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xFFFF)));
      atomicMax(p.largest, __float_as_uint(rounded) & 0x7FFFFFFFu);
    }
  }
}

// What the host must know of an instance to launch it.
struct Instance {
  const void* kernel;
  int rows, columns, cluster_rows, cluster_columns;
  bool alternating, promote;
  int shared_bytes, threads, stages;
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) product_kernel(const __grid_constant__ Launch p) {
  extern __shared__ __align__(1024) char memory[];
  const Shared<T> shared(memory);
  // Taken from one lane, so that the compiler knows: what depends on it alone lies in the registers of the whole warp.
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kGroupThreads, 0);
  const int cluster = blockIdx.x / T::kCluster, clusters = gridDim.x / T::kCluster;
  if (threadIdx.x == 0) {
    constexpr int kReaders = (T::kAlternating ? 1 : T::kGroups) * (T::kClusterRows + T::kClusterColumns - 1);
    for (int stage = 0; stage < T::kStages; ++stage) {
      barrier_init(shared.full + 8 * stage, 1);
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
    give_registers<T::kGroups == 2 ? 40 : 32>();
    if (threadIdx.x == 0) {
      copy_operands<T>(p, shared, cluster, clusters);
    }
    __syncwarp();
  } else {
    take_registers<T::kGroups == 2 ? 232 : 160>();
    compute<T>(p, shared, cluster, clusters, group - 1, threadIdx.x % kGroupThreads);
  }
  if constexpr (T::kCluster > 1) {
    cluster_sync();  // nobody leaves while others still write into its shared memory
  }
}

template <class T>
Instance instance() {
  return {reinterpret_cast<const void*>(&product_kernel<T>), T::kRows, T::kColumns, T::kClusterRows, T::kClusterColumns,
          T::kAlternating, T::kPromote, T::kSharedBytes, T::kThreads, T::kStages};
}

}  // namespace qsync::matmul
