// Scaled products of 8-bit codes with the matrix instructions that every card from Turing on has; any alignment.
//
// Grid: one block of 8 warps per tile of 128 x 128 results, 2 x 4 warps of 64 x 32; 64 k per stage, in shared memory with
// swizzled 16-byte pieces. Ampere and later copy asynchronously, three stages deep; Turing and operands whose rows are not
// aligned to 16 bytes go through registers, two stages deep.
// Traffic: 256 * 64 bytes of codes per tile and 64 k; the result once.
// Contract: INT8 sums are exact in INT32; beyond 131,071 terms, or with block scales, FP32 sums of exact blocks of 128.
// FP8 (from compute
// capability 8.9) sums are FP32. Scales and bias in FP32, one rounding to the result's type.
// Specification: `product` in kernels/matmul/scaled.py.
#pragma once

#include <type_traits>

#include "matmul_choice.h"
#include "matmul_epilogue.cuh"

namespace qsync::matmul {
namespace {

constexpr int kTile = 128, kStep = 64, kWarpThreads = 32, kBlockThreads = 256;
constexpr int kStageBytes = 2 * kTile * kStep;
constexpr int kPieces = kTile * kStep / 16 / kBlockThreads;  // 16-byte pieces of one operand that a thread brings

// Byte of 16-byte piece `piece` of row `row`: four rows apart never share banks.
__device__ __forceinline__ uint32_t piece_at(int row, int piece) {
  return static_cast<uint32_t>(row * kStep + ((piece ^ ((row >> 1) & 3)) << 4));
}

__device__ __forceinline__ void load_pieces(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

template <Code kA, Code kB>
using SumOf = std::conditional_t<kA == Code::kInt8, int32_t, float>;

#define QSYNC_MMA_FP8(A, B) \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." A "." B ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}," \
               " {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// d (16 x 8) += a (16 x 32) * b (8 x 32).
template <Code kA, Code kB>
__device__ __forceinline__ void mma(SumOf<kA, kB> (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kA == Code::kInt8) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
                 " {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    // Turing's instruction is a quarter of it: 8 x 8 results, 16 k.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                   : "+r"(d[2 * (i % 2)]), "+r"(d[2 * (i % 2) + 1])
                   : "r"(a[i]), "r"(i < 2 ? b0 : b1));
    }
#endif
  } else {
#if __CUDA_ARCH__ >= 890
    if constexpr (kA == Code::kE4M3 && kB == Code::kE4M3) {
      QSYNC_MMA_FP8("e4m3", "e4m3");
    } else if constexpr (kA == Code::kE4M3) {
      QSYNC_MMA_FP8("e4m3", "e5m2");
    } else if constexpr (kB == Code::kE4M3) {
      QSYNC_MMA_FP8("e5m2", "e4m3");
    } else {
      QSYNC_MMA_FP8("e5m2", "e5m2");
    }
#endif
  }
}

// Brings one operand's part of a stage: rows first.., k from `k`; zeros outside of the matrix.
struct Source {
  const char* base;
  int64_t pitch;
  int64_t first, rows, depth;

  template <bool kAligned>
  __device__ __forceinline__ void fetch(uint4 (&pieces)[kPieces], int64_t k) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int place = threadIdx.x + i * kBlockThreads;
      const int64_t row = first + place / (kStep / 16), at = k + place % (kStep / 16) * 16;
      pieces[i] = make_uint4(0, 0, 0, 0);
      if (row < rows && at < depth) {
        const char* from = base + row * pitch + at;
        if (kAligned && at + 16 <= depth) {
          pieces[i] = *reinterpret_cast<const uint4*>(from);
        } else {
          const int count = static_cast<int>(depth - at < 16 ? depth - at : 16);
          uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            if (j < count) {
              words[j / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(from[j])) << (j % 4 * 8);
            }
          }
          pieces[i] = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  __device__ __forceinline__ static void store(const uint4 (&pieces)[kPieces], char* to) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int place = threadIdx.x + i * kBlockThreads;
      *reinterpret_cast<uint4*>(to + piece_at(place / (kStep / 16), place % (kStep / 16))) = pieces[i];
    }
  }

#if __CUDA_ARCH__ >= 800
  __device__ __forceinline__ void copy(uint32_t to, int64_t k) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int place = threadIdx.x + i * kBlockThreads;
      const int64_t row = first + place / (kStep / 16), at = k + place % (kStep / 16) * 16;
      const int64_t left = row < rows ? depth - at : 0;
      const int bytes = static_cast<int>(left < 0 ? 0 : left > 16 ? 16 : left);
      const char* from = bytes > 0 ? base + row * pitch + at : base;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + piece_at(place / (kStep / 16),
                                                                                        place % (kStep / 16))),
                   "l"(from), "r"(bytes)
                   : "memory");
    }
  }
#endif
};

// A warp's products of one stage.
template <Code kA, Code kB>
__device__ __forceinline__ void multiply_stage(SumOf<kA, kB> (&sums)[4][4][4], uint32_t a_tile, uint32_t b_tile,
                                               int warp_row, int warp_column, int lane) {
#pragma unroll
  for (int k = 0; k < kStep / 32; ++k) {
    uint32_t a[4][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_pieces(a[i], a_tile + piece_at(warp_row + i * 16 + lane % 16, k * 2 + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_pieces(b[j], b_tile + piece_at(warp_column + j * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mma<kA, kB>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

// Place of a thread's value [i][j][v] within the tile.
struct Place {
  int warp_row, warp_column, lane;
  __device__ __forceinline__ int row(int i, int v) const { return warp_row + i * 16 + v / 2 * 8 + lane / 4; }
  __device__ __forceinline__ int column(int j, int v) const { return warp_column + j * 8 + lane % 4 * 2 + v % 2; }
};

// Adds the sums of a block of 128 k times its scales, and clears them.
template <class SumType>
__device__ __forceinline__ void promote(const Arguments& p, float (&totals)[4][4][4], SumType (&sums)[4][4][4],
                                        const Place& place, int64_t first_row, int64_t first_column, int64_t z,
                                        int64_t block) {
  float row_scales[4][2], column_scales[4][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t row = first_row + place.row(i / 2, i % 2 * 2), column = first_column + place.column(i / 2, i % 2);
    row_scales[i / 2][i % 2] =
        !p.block_scales ? 1.0f
        : row < p.rows  ? p.a_scale[z * p.a_scale_batch + row * p.a_scale_row + block * p.a_scale_block]
                        : 0.0f;
    column_scales[i / 2][i % 2] =
        !p.block_scales      ? 1.0f
        : column < p.columns ? p.b_scale[z * p.b_scale_batch + column * p.b_scale_row + block * p.b_scale_block]
                             : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const float scale = row_scales[i][v / 2] * column_scales[j][v % 2];
        totals[i][j][v] = fmaf(static_cast<float>(sums[i][j][v]), scale, totals[i][j][v]);
        sums[i][j][v] = 0;
      }
    }
  }
}

template <class SumType>
__device__ __forceinline__ void write_results(const Arguments& p, const SumType (&sums)[4][4][4], const Place& place,
                                              int64_t first_row, int64_t first_column, int64_t z) {
  const bool scaled = !p.block_scales;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int64_t column = first_column + place.column(j, odd);
      if (column >= p.columns) {
        continue;
      }
      const float column_scale = scaled ? p.b_scale[z * p.b_scale_batch + column * p.b_scale_row] : 1.0f;
      const float bias = p.bias != nullptr ? load_float(p.bias, p.bias_float, column) : 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t row = first_row + place.row(i, half * 2);
          if (row < p.rows) {
            const float row_scale = scaled ? p.a_scale[z * p.a_scale_batch + row * p.a_scale_row] : 1.0f;
            const float x = fmaf(static_cast<float>(sums[i][j][half * 2 + odd]), row_scale * column_scale, bias);
            const int64_t at = (z * p.rows + row) * p.columns + column;
            if (p.preactivation != nullptr) {
              store_float(p.preactivation, p.out_float, at, x);
            }
            store_float(p.out, p.out_float, at, activate(x, p.activation));
          }
        }
      }
    }
  }
}

template <Code kA, Code kB, bool kAligned, bool kPromote>
__global__ void __launch_bounds__(kBlockThreads) mma_kernel(const __grid_constant__ Arguments p, int64_t tile_rows,
                                                            int64_t tile_columns) {
#if __CUDA_ARCH__ >= 800
  constexpr bool kAsynchronous = kAligned;
#else
  constexpr bool kAsynchronous = false;
#endif
  constexpr int kStages = kAsynchronous ? 3 : 2;
  __shared__ __align__(128) char memory[kStages * kStageBytes];
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  constexpr int64_t kGroup = 8;
  const int64_t tiles = tile_rows * tile_columns, tile = blockIdx.x % tiles, z = blockIdx.x / tiles;
  const int64_t width = kGroup * tile_columns, above = tile / width * kGroup;
  const int64_t height = tile_rows - above < kGroup ? tile_rows - above : kGroup;
  const int64_t first_row = (above + tile % width % height) * kTile, first_column = tile % width / height * kTile;
  const Source a{static_cast<const char*>(p.a) + z * p.a_batch, p.a_pitch, first_row, p.rows, p.depth};
  const Source b{static_cast<const char*>(p.b) + z * p.b_batch, p.b_pitch, first_column, p.columns, p.depth};
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  const Place place{warp / 4 * 64, warp % 4 * 32, lane};
  SumOf<kA, kB> sums[4][4][4] = {};
  float totals[kPromote ? 4 : 1][4][4] = {};
  const int64_t steps = (p.depth + kStep - 1) / kStep;
  uint4 a_pieces[kPieces], b_pieces[kPieces];

  if constexpr (kAsynchronous) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (stage < steps) {
        a.copy(shared + stage * kStageBytes, int64_t{stage} * kStep);
        b.copy(shared + stage * kStageBytes + kTile * kStep, int64_t{stage} * kStep);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
#endif
  } else {
    a.fetch<kAligned>(a_pieces, 0);
    b.fetch<kAligned>(b_pieces, 0);
    Source::store(a_pieces, memory);
    Source::store(b_pieces, memory + kTile * kStep);
    __syncthreads();
  }
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t ahead = step + kStages - 1;
    const int here = static_cast<int>(step % kStages) * kStageBytes, there = static_cast<int>(ahead % kStages) * kStageBytes;
    if constexpr (kAsynchronous) {
#if __CUDA_ARCH__ >= 800
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();  // the stage is there for all, and the one before it read by all
      if (ahead < steps) {
        a.copy(shared + there, ahead * kStep);
        b.copy(shared + there + kTile * kStep, ahead * kStep);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    } else if (ahead < steps) {
      a.fetch<kAligned>(a_pieces, ahead * kStep);
      b.fetch<kAligned>(b_pieces, ahead * kStep);
    }
    multiply_stage<kA, kB>(sums, shared + here, shared + here + kTile * kStep, place.warp_row, place.warp_column, lane);
    if constexpr (kPromote) {
      if (step % 2 == 1 || step + 1 == steps) {
        promote(p, totals, sums, place, first_row, first_column, z, step / 2);
      }
    }
    if constexpr (!kAsynchronous) {
      if (ahead < steps) {
        Source::store(a_pieces, memory + there);
        Source::store(b_pieces, memory + there + kTile * kStep);
      }
      __syncthreads();
    }
  }
  if constexpr (kPromote) {
    write_results(p, totals, place, first_row, first_column, z);
  } else {
    write_results(p, sums, place, first_row, first_column, z);
  }
}

inline bool aligned16(const void* pointer, int64_t pitch, int64_t batch) {
  return (reinterpret_cast<uintptr_t>(pointer) | uintptr_t(pitch) | uintptr_t(batch)) % 16 == 0;
}

template <Code kA, Code kB>
Status launch_mma(const Arguments& p) {
  constexpr int64_t kInt8Terms = 131071;  // 2^31 / 128^2
  const bool aligned = aligned16(p.a, p.a_pitch, p.a_batch) && aligned16(p.b, p.b_pitch, p.b_batch);
  const bool promote = p.block_scales || p.accurate || (p.a_code == Code::kInt8 && p.depth > kInt8Terms);
  const int64_t tile_rows = (p.rows + kTile - 1) / kTile, tile_columns = (p.columns + kTile - 1) / kTile;
  const int64_t total = tile_rows * tile_columns * p.batch;
  if (total > INT32_MAX) {
    return Status::kUnsupported;
  }
  const auto kernel = aligned ? (promote ? mma_kernel<kA, kB, true, true> : mma_kernel<kA, kB, true, false>)
                              : (promote ? mma_kernel<kA, kB, false, true> : mma_kernel<kA, kB, false, false>);
  kernel<<<unsigned(total), kBlockThreads, 0, p.stream>>>(p, tile_rows, tile_columns);
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kLaunch;
}

}  // namespace
}  // namespace qsync::matmul
