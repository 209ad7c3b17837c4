// The INT8 convolution of Hopper: persistent implicit GEMM, im2col done by the tensor copy engine.
#pragma once

#include <cuda.h>

#include "convolution.cuh"
#include "sm90_int8_mma.cuh"

namespace qsync::convolution {

// What one launch of the kernel needs. Rows are output pixels (N P Q flattened), columns output channels.
struct Sm90Params {
  CUtensorMap x, weight, out;
  Epilogue epilogue;
  int rows, columns, row_tiles, column_tiles;
  int pixels, q;  // output pixels per image, per image row
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int r, s, channel_blocks;
  int flat;  // the input is a plain matrix (1 x 1, stride 1, no padding)
};

// kGroups: consumer warpgroups; kBlocks: 64-row blocks of each; kColumns: tile width; kBytes: channels of one copy;
// kCopies: copies per pipeline stage; kResident: blocks per multiprocessor; kCluster: blocks that share weights.
template <int kGroups_, int kBlocks_, int kColumns_, int kBytes_, int kCopies_, int kResident_, int kCluster_>
struct Sm90Tile {
  static constexpr int kGroups = kGroups_, kBlocks = kBlocks_, kColumns = kColumns_, kBytes = kBytes_;
  static constexpr int kCopies = kCopies_, kResident = kResident_, kCluster = kCluster_;
  static constexpr int kRows = 64 * kGroups * kBlocks;
  // Three consumers need more registers than an even share: the producer, a whole warpgroup, gives its own.
  static constexpr bool kHandsOver = kGroups == 3;
  // One product's width; an instruction of 256 columns does not fit the registers that a block of 16 warps starts with.
  static constexpr int kWidth = kHandsOver && kColumns == 256 ? 128 : kColumns, kParts = kColumns / kWidth;
  static constexpr int kThreads = 128 * kGroups + (kHandsOver ? 128 : 32);
  static constexpr int kRowBytes = kRows * kBytes, kColumnBytes = kColumns * kBytes;
  static constexpr int kStageBytes = kCopies * (kRowBytes + kColumnBytes);
  static constexpr int kBarrierBytes = 256;
  // Results leave through shared memory, 16 rows of 128 bytes of a warp at a time. A second buffer per warp lets a store
  // overlap with the next conversion; it is had where the pipeline keeps three stages.
  static constexpr int kChunkBytes = 16 * 128;
  // Of a multiprocessor's 228 KB every block costs 1 KB of the system's.
  static constexpr int kBudget = 233472 / kResident - 1024 - kBarrierBytes;
  static constexpr int kBuffers = (kBudget - kGroups * 4 * 2 * kChunkBytes) / kStageBytes >= 3 ? 2 : 1;
  static constexpr int kStagingBytes = kGroups * 4 * kBuffers * kChunkBytes;
  static constexpr int kFit = (kBudget - kStagingBytes) / kStageBytes;
  static constexpr int kStages = kFit > 8 ? 8 : kFit;
  static constexpr int kSharedBytes = kStages * kStageBytes + kStagingBytes + kBarrierBytes;
  static_assert(kStages >= 2, "the tile leaves no room for a pipeline");
};

// A pair of neighbouring columns' factors; `columns` is even, so that a pair is inside or outside as a whole.
__device__ __forceinline__ float2 pair_of(const float* values, int column) {
  return __ldg(reinterpret_cast<const float2*>(values + column));
}

// Scales and shifts four sums of one warp's fragment: two columns of row `low`, two of the row eight below.
__device__ __forceinline__ void finish_four(
    const int* sums, float2 scale, float2 bias, float low, float high, float least, float (&value)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float factor = __fmul_rn(i < 2 ? low : high, i % 2 == 0 ? scale.x : scale.y);
    value[i] = __fadd_rn(__fmul_rn(__int2float_rn(sums[i]), factor), i % 2 == 0 ? bias.x : bias.y);
    // Keeps NaN, unlike fmaxf.
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(value[i]) : "f"(least));
  }
}

template <Output kOutput>
__device__ __forceinline__ uint32_t packed(float first, float second) {
  if constexpr (kOutput == Output::kFloat16) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Converts a warp's 16 rows of one 64-row block and stores them. Warps do not wait for each other.
template <class Tile, Output kOutput>
struct Sm90Store {
  static constexpr int kChunkColumns = kOutput == Output::kFloat32 ? 32 : 64;

  // 128 bytes of every row into shared memory, swizzled as the tensor store expects.
  static __device__ __forceinline__ void chunk(
      const Epilogue& e, int columns, const int* sums, uint32_t staging, int column0, float low, float high) {
    const int lane = threadIdx.x % 32;
    const float least = e.relu ? 0.0f : -INFINITY;
#pragma unroll
    for (int j = 0; j < kChunkColumns / 8; j += 2) {
      float value[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Columns past the end are computed from the last ones' factors and clipped by the store.
        const int column = min(column0 + 8 * (j + i) + 2 * (lane % 4), columns - 2);
        const float2 scale =
            e.weight_step == 0 ? make_float2(__ldg(e.weight_scale), __ldg(e.weight_scale)) : pair_of(e.weight_scale, column);
        const float2 bias = e.bias == nullptr ? make_float2(0.0f, 0.0f) : pair_of(e.bias, column);
        finish_four(sums + 4 * (j + i), scale, bias, low, high, least, value[i]);
      }
      if constexpr (kOutput == Output::kFloat32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + 8 * (i % 2), byte = 32 * (j + i / 2) + 8 * (lane % 4);
          const uint32_t target = staging + row * 128 + ((byte / 16) ^ (row & 7)) * 16 + byte % 16;
          const float* two = &value[i / 2][2 * (i % 2)];
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(two[0]), "f"(two[1]) : "memory");
        }
      } else {
        const int row = lane % 16, unit = (j + lane / 16) ^ (row & 7);
        sm90::store_matrix(
            staging + row * 128 + unit * 16, packed<kOutput>(value[0][0], value[0][1]),
            packed<kOutput>(value[0][2], value[0][3]), packed<kOutput>(value[1][0], value[1][1]),
            packed<kOutput>(value[1][2], value[1][3]));
      }
    }
  }

  static __device__ __forceinline__ void block(
      const Sm90Params& params, const int (&sums)[Tile::kParts][Tile::kWidth / 2], uint32_t staging, int& stored,
      int row0, int column0, float x_scale) {
    const int lane = threadIdx.x % 32;
    const Epilogue& e = params.epilogue;
    float low = x_scale, high = x_scale;
    if (e.x_step != 0) {
      const int row = row0 + lane / 4, last = params.rows - 1;
      low = __ldg(e.x_scale + min(row, last) / params.pixels);
      high = __ldg(e.x_scale + min(row + 8, last) / params.pixels);
    }
#pragma unroll
    for (int index = 0; index < Tile::kColumns / kChunkColumns; ++index) {
      const int column = column0 + index * kChunkColumns;
      if (column < params.columns) {
        constexpr int kPerPart = Tile::kWidth / kChunkColumns;
        const uint32_t target = staging + stored % Tile::kBuffers * Tile::kChunkBytes;
        if (lane == 0) sm90::store_wait<Tile::kBuffers - 1>();
        __syncwarp();
        const int* part = sums[index / kPerPart] + index % kPerPart * (kChunkColumns / 2);
        chunk(e, params.columns, part, target, column, low, high);
        sm90::fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
          sm90::store_2d(&params.out, target, column, row0);
          sm90::store_commit();
        }
        ++stored;
      }
    }
  }
};

// One warp: fills the stages in the order in which the consumers read them.
template <class Tile>
__device__ __forceinline__ void sm90_produce(
    const Sm90Params& params, uint32_t stages, uint32_t full, uint32_t empty, int rank) {
  const int total = params.r * params.s * params.channel_blocks;
  const int tiles = params.row_tiles * params.column_tiles;
  int stage = 0, parity = 1;
  for (int tile = blockIdx.x / Tile::kCluster; tile < tiles; tile += gridDim.x / Tile::kCluster) {
    const int column0 = tile % params.column_tiles * Tile::kColumns;
    const int row0 = (tile / params.column_tiles * Tile::kCluster + rank) * Tile::kRows;
    const int image = row0 / params.pixels, pixel = row0 % params.pixels;
    const int h = pixel / params.q * params.stride_h - params.pad_h;
    const int w = pixel % params.q * params.stride_w - params.pad_w;
    int block = 0, r = 0, s = 0;
    for (int done = 0; done < total; done += Tile::kCopies) {
      const uint32_t ready = full + 8 * stage;
      sm90::barrier_wait(empty + 8 * stage, parity);
      sm90::barrier_expect(ready, Tile::kStageBytes);
      const uint32_t rows = stages + stage * Tile::kStageBytes;
      const uint32_t columns = rows + Tile::kCopies * Tile::kRowBytes;
      for (int copy = 0; copy < Tile::kCopies; ++copy) {
        const int channel = block * Tile::kBytes, tap = r * params.s + s;
        const uint32_t x_target = rows + copy * Tile::kRowBytes;
        if (params.flat) {
          sm90::load_2d(x_target, &params.x, ready, channel, row0);
        } else {
          sm90::load_im2col(
              x_target, &params.x, ready, channel, w, h, image, s * params.dilation_w, r * params.dilation_h);
        }
        if constexpr (Tile::kCluster == 1) {
          sm90::load_3d(columns + copy * Tile::kColumnBytes, &params.weight, ready, channel, tap, column0);
        } else {
          constexpr int kShare = Tile::kColumns / Tile::kCluster;
          sm90::load_3d_multicast(
              columns + copy * Tile::kColumnBytes + rank * kShare * Tile::kBytes, &params.weight, ready, channel, tap,
              column0 + rank * kShare, (1 << Tile::kCluster) - 1);
        }
        if (++block == params.channel_blocks) {
          block = 0;
          if (++s == params.s) {
            s = 0;
            ++r;
          }
        }
      }
      if (++stage == Tile::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

template <class Tile>
__device__ __forceinline__ void sm90_release(uint32_t empty, int stage, int lane) {
  if constexpr (Tile::kCluster == 1) {
    if (lane == 0) sm90::barrier_arrive(empty + 8 * stage);
  } else {
    if (lane < Tile::kCluster) sm90::barrier_arrive_at(empty + 8 * stage, lane);
  }
}

// One warpgroup: multiplies what the stages hold, then scales and stores its rows of the tile.
template <class Tile>
__device__ __forceinline__ void sm90_consume(
    const Sm90Params& params, uint32_t stages, uint32_t staging, uint32_t full, uint32_t empty, int rank) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int total = params.r * params.s * params.channel_blocks;
  const int tiles = params.row_tiles * params.column_tiles;
  int sums[Tile::kBlocks][Tile::kParts][Tile::kWidth / 2];
  int stage = 0, parity = 0, stored = 0;
  staging += threadIdx.x / 32 * Tile::kBuffers * Tile::kChunkBytes;
  const float x_scale = __ldg(params.epilogue.x_scale);
  for (int tile = blockIdx.x / Tile::kCluster; tile < tiles; tile += gridDim.x / Tile::kCluster) {
    int previous = -1;
    for (int done = 0; done < total; done += Tile::kCopies) {
      sm90::barrier_wait(full + 8 * stage, parity);
      const uint32_t rows = stages + stage * Tile::kStageBytes + group * Tile::kBlocks * 64 * Tile::kBytes;
      const uint32_t columns = stages + stage * Tile::kStageBytes + Tile::kCopies * Tile::kRowBytes;
      sm90::wgmma_fence();
#pragma unroll
      for (int copy = 0; copy < Tile::kCopies; ++copy) {
#pragma unroll
        for (int step = 0; step < Tile::kBytes / 32; ++step) {
#pragma unroll
          for (int part = 0; part < Tile::kParts; ++part) {
            const uint64_t b = sm90::tile_descriptor<Tile::kBytes>(
                columns + copy * Tile::kColumnBytes + part * Tile::kWidth * Tile::kBytes + step * 32);
#pragma unroll
            for (int m = 0; m < Tile::kBlocks; ++m) {
              const uint64_t a = sm90::tile_descriptor<Tile::kBytes>(
                  rows + copy * Tile::kRowBytes + m * 64 * Tile::kBytes + step * 32);
              sm90::wgmma<Tile::kWidth>(sums[m][part], a, b, done + copy + step > 0);
            }
          }
        }
      }
      sm90::wgmma_commit();
      sm90::wgmma_wait<1>();
      if (previous >= 0) sm90_release<Tile>(empty, previous, lane);
      previous = stage;
      if (++stage == Tile::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    sm90::wgmma_wait<0>();
    sm90_release<Tile>(empty, previous, lane);
    const int column0 = tile % params.column_tiles * Tile::kColumns;
    const int tile_row = (tile / params.column_tiles * Tile::kCluster + rank) * Tile::kRows;
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) {
      const int row0 = tile_row + (group * Tile::kBlocks + m) * 64 + threadIdx.x / 32 % 4 * 16;
      if (row0 >= params.rows) continue;
      const Output output = params.epilogue.output;
      if (output == Output::kBFloat16) {
        Sm90Store<Tile, Output::kBFloat16>::block(params, sums[m], staging, stored, row0, column0, x_scale);
      } else if (output == Output::kFloat16) {
        Sm90Store<Tile, Output::kFloat16>::block(params, sums[m], staging, stored, row0, column0, x_scale);
      } else {
        Sm90Store<Tile, Output::kFloat32>::block(params, sums[m], staging, stored, row0, column0, x_scale);
      }
    }
  }
  if (lane == 0) sm90::store_wait<0>();
}

// Grid: persistent, at most kResident blocks per multiprocessor; tiles in order, column tiles of the same rows next to
// each other, so that the rows are read from memory once. Traffic: input and weight read, results written once.
// Numbers: sums exact in INT32; one FP32 multiplication by (x_scale * weight_scale), one addition, one rounding.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    sm90_convolution(const __grid_constant__ Sm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = sm90::shared_address(shared);
  const uint32_t staging = base + Tile::kStages * Tile::kStageBytes;
  const uint32_t full = staging + Tile::kStagingBytes, empty = full + 8 * Tile::kStages;
  const int rank = Tile::kCluster == 1 ? 0 : sm90::cluster_rank();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      sm90::barrier_init(full + 8 * stage, 1);
      sm90::barrier_init(empty + 8 * stage, 4 * Tile::kGroups * Tile::kCluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    sm90::prefetch_map(&params.x);
    sm90::prefetch_map(&params.weight);
    sm90::prefetch_map(&params.out);
  }
  if constexpr (Tile::kCluster == 1) {
    __syncthreads();
  } else {
    sm90::cluster_sync();
  }
  if (threadIdx.x >= 128 * Tile::kGroups) {
    if constexpr (Tile::kHandsOver) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == 128 * Tile::kGroups) sm90_produce<Tile>(params, base, full, empty, rank);
    __syncwarp();
  } else {
    if constexpr (Tile::kHandsOver) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    sm90_consume<Tile>(params, base, staging, full, empty, rank);
  }
  // A block must not leave while its neighbours may still write into it or arrive on its barriers.
  if constexpr (Tile::kCluster != 1) sm90::cluster_sync();
#endif
}

using Sm90Launch = cudaError_t (*)(Sm90Params&, int multiprocessors, cudaStream_t);

template <class Tile>
cudaError_t sm90_launch(Sm90Params& params, int multiprocessors, cudaStream_t stream) {
  const int rows_per_step = Tile::kRows * Tile::kCluster;
  params.row_tiles = (params.rows + rows_per_step - 1) / rows_per_step;
  params.column_tiles = (params.columns + Tile::kColumns - 1) / Tile::kColumns;
  auto* kernel = sm90_convolution<Tile>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t tiles = int64_t{params.row_tiles} * params.column_tiles;
  const int64_t clusters = int64_t{multiprocessors} * Tile::kResident / Tile::kCluster;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((tiles < clusters ? tiles : clusters) * Tile::kCluster));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = Tile::kCluster;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const Sm90Params&>(params));
}

// One row of the table of tiles: how to encode the tensor maps for it, and how to launch it.
struct Sm90Variant {
  const char* name;
  int rows, columns, bytes, copies, resident, cluster;
  Sm90Launch launch;
};

}  // namespace qsync::convolution
