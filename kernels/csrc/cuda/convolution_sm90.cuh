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
// kCopies: copies per pipeline stage; kResident: blocks per multiprocessor. Clusters whose blocks share the weights'
// copies were tried and were never the fastest.
template <int kGroups_, int kBlocks_, int kColumns_, int kBytes_, int kCopies_, int kResident_>
struct Sm90Tile {
  static constexpr int kGroups = kGroups_, kBlocks = kBlocks_, kColumns = kColumns_, kBytes = kBytes_;
  static constexpr int kCopies = kCopies_, kResident = kResident_;
  static constexpr int kRows = 64 * kGroups * kBlocks;
  // Three consumers need more registers than an even share: the producer, a whole warpgroup, gives its own.
  static constexpr bool kHandsOver = kGroups == 3 && kResident == 1;
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
  // Scales and biases of a tile's columns travel with its first stage. A tile has at least one stage, so that the
  // producer is at most kStages tiles ahead of a warp that still reads them.
  static constexpr int kFactorBytes = 2 * 4 * kColumns;
  static constexpr int kFit = (kBudget - kStagingBytes - kFactorBytes) / (kStageBytes + kFactorBytes);
  static constexpr int kStages = kFit > 8 ? 8 : kFit, kSlots = kStages + 1;
  static constexpr int kStagingAt = kStages * kStageBytes, kFactorsAt = kStagingAt + kStagingBytes;
  static constexpr int kBarriersAt = kFactorsAt + kSlots * kFactorBytes;
  static constexpr int kSharedBytes = kBarriersAt + kBarrierBytes;
  static_assert(kStages >= 2, "the tile leaves no room for a pipeline");
};

// The tiles of one block, in order: every gridDim-th, column tiles of the same rows next to each other.
struct Sm90Walk {
  int row, column, row_step, column_step, row_tiles, column_tiles;

  __device__ __forceinline__ explicit Sm90Walk(const Sm90Params& params) {
    row_tiles = params.row_tiles;
    column_tiles = params.column_tiles;
    row = blockIdx.x / column_tiles;
    column = blockIdx.x % column_tiles;
    row_step = gridDim.x / column_tiles;
    column_step = gridDim.x % column_tiles;
  }
  __device__ __forceinline__ bool more() const { return row < row_tiles; }
  __device__ __forceinline__ void next() {
    row += row_step;
    column += column_step;
    if (column >= column_tiles) {
      column -= column_tiles;
      ++row;
    }
  }
};

// Converts a warp's 16 rows of one 64-row block and stores them. Warps do not wait for each other.
template <class Tile, Output kOutput, bool kPerSample>
struct Sm90Store {
  static constexpr int kChunkColumns = kOutput == Output::kFloat32 ? 32 : 64;

  static __device__ __forceinline__ float shifted(int sum, float factor, float bias) {
    return __fadd_rn(__fmul_rn(__int2float_rn(sum), factor), bias);
  }

  // max(value, least) that keeps NaN.
  static __device__ __forceinline__ float at_least(float value, float least) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(least));
    return value;
  }

  // Rounds two values; the activation follows the rounding, which it commutes with.
  static __device__ __forceinline__ uint32_t packed(float first, float second, bool relu) {
    if constexpr (kOutput == Output::kFloat16) {
      __half2 pair = __floats2half2_rn(first, second);
      if (relu) pair = __hmax2_nan(pair, __half2{__half_raw{0}, __half_raw{0}});
      return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
      if (relu) pair = __hmax2_nan(pair, __nv_bfloat162{__nv_bfloat16_raw{0}, __nv_bfloat16_raw{0}});
      return *reinterpret_cast<const uint32_t*>(&pair);
    }
  }

  // 128 bytes of every row into shared memory, swizzled as the tensor store expects. `factors`: those of this thread's
  // first column; biases lie one tile's columns behind the scales.
  static __device__ __forceinline__ void chunk(
      const int* sums, uint32_t staging, const float* factors, float low, float high, bool relu) {
    const int lane = threadIdx.x % 32;
    const float least = relu ? 0.0f : -INFINITY;
#pragma unroll
    for (int j = 0; j < kChunkColumns / 8; j += 2) {
      float value[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 scale = *reinterpret_cast<const float2*>(factors + 8 * (j + i));
        const float2 bias = *reinterpret_cast<const float2*>(factors + Tile::kColumns + 8 * (j + i));
        const int* four = sums + 4 * (j + i);
        const float first = __fmul_rn(low, scale.x), second = __fmul_rn(low, scale.y);
        value[i][0] = shifted(four[0], first, bias.x);
        value[i][1] = shifted(four[1], second, bias.y);
        value[i][2] = shifted(four[2], kPerSample ? __fmul_rn(high, scale.x) : first, bias.x);
        value[i][3] = shifted(four[3], kPerSample ? __fmul_rn(high, scale.y) : second, bias.y);
      }
      if constexpr (kOutput == Output::kFloat32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + 8 * (i % 2), byte = 32 * (j + i / 2) + 8 * (lane % 4);
          const uint32_t target = staging + row * 128 + ((byte / 16) ^ (row & 7)) * 16 + byte % 16;
          const float* two = &value[i / 2][2 * (i % 2)];
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(at_least(two[0], least)),
                       "f"(at_least(two[1], least)));
        }
      } else {
        const int row = lane % 16, unit = (j + lane / 16) ^ (row & 7);
        sm90::store_matrix(
            staging + row * 128 + unit * 16, packed(value[0][0], value[0][1], relu),
            packed(value[0][2], value[0][3], relu), packed(value[1][0], value[1][1], relu),
            packed(value[1][2], value[1][3], relu));
      }
    }
  }

  static __device__ __forceinline__ void block(
      const Sm90Params& params, const int (&sums)[Tile::kParts][Tile::kWidth / 2], uint32_t staging, int& stored,
      const float* factors, int row0, int column0, float x_scale) {
    const int lane = threadIdx.x % 32;
    const Epilogue& e = params.epilogue;
    const bool relu = e.relu != 0;
    float low = x_scale, high = x_scale;
    if constexpr (kPerSample) {
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
        chunk(part, target, factors + index * kChunkColumns + 2 * (lane % 4), low, high, relu);
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

template <class Tile, bool kPerSample, class Sums>
__device__ __forceinline__ void sm90_store(
    const Sm90Params& params, const Sums& sums, uint32_t staging, int& stored, const float* factors, int row0,
    int column0, float x_scale) {
  if (params.epilogue.output == Output::kBFloat16) {
    Sm90Store<Tile, Output::kBFloat16, kPerSample>::block(
        params, sums, staging, stored, factors, row0, column0, x_scale);
  } else if (params.epilogue.output == Output::kFloat16) {
    Sm90Store<Tile, Output::kFloat16, kPerSample>::block(
        params, sums, staging, stored, factors, row0, column0, x_scale);
  } else {
    Sm90Store<Tile, Output::kFloat32, kPerSample>::block(
        params, sums, staging, stored, factors, row0, column0, x_scale);
  }
}

// One warp: fills the stages in the order in which the consumers read them.
template <class Tile>
__device__ __forceinline__ void sm90_produce(
    const Sm90Params& params, uint32_t stages, uint32_t full, uint32_t empty) {
  const Epilogue& e = params.epilogue;
  const int total = params.r * params.s * params.channel_blocks;
  int stage = 0, parity = 1, slot = 0;
  for (Sm90Walk walk(params); walk.more(); walk.next()) {
    const int column0 = walk.column * Tile::kColumns;
    const int row0 = walk.row * Tile::kRows;
    const int image = row0 / params.pixels, pixel = row0 % params.pixels;
    const int h = pixel / params.q * params.stride_h - params.pad_h;
    const int w = pixel % params.q * params.stride_w - params.pad_w;
    int block = 0, r = 0, s = 0;
    for (int done = 0; done < total; done += Tile::kCopies) {
      const uint32_t ready = full + 8 * stage;
      sm90::barrier_wait(empty + 8 * stage, parity);
      if (done == 0) {
        const int bytes = 4 * min(Tile::kColumns, params.columns - column0);
        const uint32_t factors = stages + Tile::kFactorsAt + slot * Tile::kFactorBytes;
        sm90::barrier_expect(ready, Tile::kStageBytes + (e.bias == nullptr ? 1 : 2) * bytes);
        sm90::load_bulk(factors, e.weight_scale + column0, ready, bytes);
        if (e.bias != nullptr) sm90::load_bulk(factors + 4 * Tile::kColumns, e.bias + column0, ready, bytes);
        slot = slot + 1 == Tile::kSlots ? 0 : slot + 1;
      } else {
        sm90::barrier_expect(ready, Tile::kStageBytes);
      }
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
        sm90::load_3d(columns + copy * Tile::kColumnBytes, &params.weight, ready, channel, tap, column0);
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

// One warpgroup: multiplies what the stages hold, then scales and stores its rows of the tile.
template <class Tile>
__device__ __forceinline__ void sm90_consume(
    const Sm90Params& params, const uint8_t* shared, uint32_t full, uint32_t empty) {
  const uint32_t stages = sm90::shared_address(shared);
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int total = params.r * params.s * params.channel_blocks;
  int sums[Tile::kBlocks][Tile::kParts][Tile::kWidth / 2];
  int stage = 0, parity = 0, stored = 0, slot = 0;
  const uint32_t staging = stages + Tile::kStagingAt + threadIdx.x / 32 * Tile::kBuffers * Tile::kChunkBytes;
  const float x_scale = __ldg(params.epilogue.x_scale);
  for (Sm90Walk walk(params); walk.more(); walk.next()) {
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
      if (previous >= 0 && lane == 0) sm90::barrier_arrive(empty + 8 * previous);
      previous = stage;
      if (++stage == Tile::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    sm90::wgmma_wait<0>();
    if (lane == 0) sm90::barrier_arrive(empty + 8 * previous);
    const float* factors = reinterpret_cast<const float*>(shared + Tile::kFactorsAt + slot * Tile::kFactorBytes);
    slot = slot + 1 == Tile::kSlots ? 0 : slot + 1;
    const int column0 = walk.column * Tile::kColumns;
    const int tile_row = walk.row * Tile::kRows;
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) {
      const int row0 = tile_row + (group * Tile::kBlocks + m) * 64 + threadIdx.x / 32 % 4 * 16;
      if (row0 >= params.rows) continue;
      if (params.epilogue.x_step == 0) {
        sm90_store<Tile, false>(params, sums[m], staging, stored, factors, row0, column0, x_scale);
      } else {
        sm90_store<Tile, true>(params, sums[m], staging, stored, factors, row0, column0, x_scale);
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
  const uint32_t full = base + Tile::kBarriersAt, empty = full + 8 * Tile::kStages;
  if (params.epilogue.bias == nullptr) {
    // Every slot's biases, once: no copy overwrites them.
    for (int i = threadIdx.x; i < Tile::kSlots * Tile::kColumns; i += Tile::kThreads) {
      const int slot = i / Tile::kColumns, column = i % Tile::kColumns;
      reinterpret_cast<float*>(shared + Tile::kFactorsAt + slot * Tile::kFactorBytes)[Tile::kColumns + column] = 0.0f;
    }
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      sm90::barrier_init(full + 8 * stage, 1);
      sm90::barrier_init(empty + 8 * stage, 4 * Tile::kGroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    sm90::prefetch_map(&params.x);
    sm90::prefetch_map(&params.weight);
    sm90::prefetch_map(&params.out);
  }
  __syncthreads();
  if (threadIdx.x >= 128 * Tile::kGroups) {
    if constexpr (Tile::kHandsOver) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == 128 * Tile::kGroups) sm90_produce<Tile>(params, base, full, empty);
    __syncwarp();
  } else {
    if constexpr (Tile::kHandsOver) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    sm90_consume<Tile>(params, shared, full, empty);
  }
#endif
}

using Sm90Launch = cudaError_t (*)(Sm90Params&, int multiprocessors, cudaStream_t);

template <class Tile>
cudaError_t sm90_launch(Sm90Params& params, int multiprocessors, cudaStream_t stream) {
  params.row_tiles = (params.rows + Tile::kRows - 1) / Tile::kRows;
  params.column_tiles = (params.columns + Tile::kColumns - 1) / Tile::kColumns;
  auto* kernel = sm90_convolution<Tile>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t tiles = int64_t{params.row_tiles} * params.column_tiles;
  const int64_t blocks = int64_t{multiprocessors} * Tile::kResident;
  const dim3 grid(static_cast<unsigned>(tiles < blocks ? tiles : blocks));
  kernel<<<grid, Tile::kThreads, Tile::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

// One row of the table of tiles: how to encode the tensor maps for it, how to launch it, and how long it took: a round
// of tiles over the card, and every copy of kBytes channels of one tap in it.
struct Sm90Variant {
  const char* name;
  int rows, columns, bytes, copies, resident;
  double round_ns, copy_ns;
  Sm90Launch launch;
};

}  // namespace qsync::convolution
