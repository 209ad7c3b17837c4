// What a Hopper product is made of: the tile and its shared memory, what a launch carries, the walk over tiles and stages.
#pragma once

#include <type_traits>

#include "matmul_arguments.h"
#include "matmul_ptx.cuh"
#include "matmul_wgmma.cuh"

namespace qsync::matmul {

constexpr int kDepth = 128;            // k per stage: the width of the 128-byte swizzle
constexpr int kGroupThreads = 128;     // a warpgroup
constexpr int kChunkRows = 64;         // a piece of the result on its way out: 64 rows of 128 bytes,
constexpr int kChunkBytes = kChunkRows * 128;
constexpr int kWarpRows = 16;          // of which each warp writes and sends 16
constexpr int kWarpBytes = kWarpRows * 128;
constexpr int kFactorColumns = kGroupThreads;  // columns whose scales and bias a warpgroup has in shared memory at once
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
  uint32_t* largest;  // raised to the bits of the largest magnitude of the result; null: nobody wants it
  int64_t a_scale_row, a_scale_block, a_scale_batch, b_scale_row, b_scale_block, b_scale_batch;
  int rows, columns, depth_blocks;
  int tile_rows, tile_columns;  // tiles of a whole cluster
  int batch, split_blocks, group, total;
  Divisor tiles, matrices, width, height, last_height;  // of a matrix; of a split; tiles of a group of rows; its rows
  Float out_float, bias_float;
  Activation activation;
  bool raw;          // the result is the sums themselves, 32 bits each, one matrix per split
  bool block_scales;
  bool one_scale;    // one scale per operand for all of its matrices, and no bias
  bool copy_out;     // the result's rows are aligned to 16 bytes, as the copy engine wants them
  int lead;          // stages that the first warpgroup of a cooperative tile is ahead of the others; 0: nothing is enforced
};

template <Code kA_, Code kB_, int kRows_, int kColumns_, int kClusterRows_, int kClusterColumns_, bool kAlternating_,
          bool kPromote_, int kBuffers_>
struct Tile {
  static constexpr Code kA = kA_, kB = kB_;
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kClusterRows = kClusterRows_, kClusterColumns = kClusterColumns_;
  static constexpr int kCluster = kClusterRows * kClusterColumns;
  static constexpr bool kAlternating = kAlternating_, kPromote = kPromote_;
  static constexpr int kGroups = kRows == 192 ? 3 : 2;  // warpgroups that multiply
  static constexpr int kThreads = (1 + kGroups) * kGroupThreads;
  static constexpr int kGroupRows = kAlternating ? kRows : kRows / kGroups;  // rows of one warpgroup
  static constexpr int kSlabs = kGroupRows / 64;
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth;
  // Scale and bias of columns, and two rows of block scales, for each warpgroup.
  static constexpr int kColumnBytes = kGroups * (kColumns < kFactorColumns ? kColumns : kFactorColumns) * 8;
  static constexpr int kScaleBytes = kPromote ? kGroups * 2 * kColumns * 4 : 0;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kFree = kSharedLimit - kColumnBytes - kScaleBytes - kBarrierBytes;
  static constexpr int kBuffers = kBuffers_;  // chunks of each warpgroup that may be under way
  static constexpr int kStages = (kFree - kGroups * kBuffers * kChunkBytes) / kStageBytes;
  static constexpr int kSharedBytes =
      kStages * kStageBytes + kGroups * kBuffers * kChunkBytes + kColumnBytes + kScaleBytes + kBarrierBytes;
  static_assert(kColumns % 8 == 0 && kColumns >= 64 && kGroupRows % 64 == 0, "a warpgroup writes 64 x 64 results at once");
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
    columns = chunks + T::kGroups * T::kBuffers * kChunkBytes;
    scales = columns + T::kColumnBytes;
    full = scales + T::kScaleBytes;
    empty = full + 8 * T::kStages;
    turn = empty + 8 * T::kStages;
  }
  __device__ __forceinline__ uint32_t a(int stage) const { return stages + stage * T::kStageBytes; }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + T::kRows * kDepth; }
  __device__ __forceinline__ float* scale_row(int group, int half) const {
    return reinterpret_cast<float*>(base + (scales - stages)) + (group * 2 + half) * T::kColumns;
  }
  __device__ __forceinline__ float4* column_pairs(int group) const {
    return reinterpret_cast<float4*>(base + (columns - stages) + group * (T::kColumnBytes / T::kGroups));
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

// A thread's sums of one tile.
template <class T>
using Sums = std::conditional_t<T::kPromote, float, typename Sum<T::kA, T::kB>::type>;

}  // namespace qsync::matmul
