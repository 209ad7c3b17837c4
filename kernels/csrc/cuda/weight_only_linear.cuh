// Products of a few rows of activations and packed weights: W4A16, W8A16 and W4A8 of INT8 and FP8. No torch here.
//
// One reading of the weights bounds them, and next to it the instructions that make numbers of codes and, where weights are
// small, the latencies in a row. So every warp has copies of several blocks on their way, from before the kernels that compute
// the activations have ended, and sums are sent to the block of threads that adds them without a barrier of the cluster.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/early_start.cuh"
#include "cuda/gate.cuh"
#include "cuda/half_mma.cuh"
#include "cuda/rounding.cuh"

namespace qsync {

constexpr int kTile = 64, kStrips = 4;  // a tile is 64 outputs by a block of 64 inputs, of strips of 16 outputs
constexpr int kRows = 16;               // of activations that a block of threads multiplies
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStages = 2;  // of a warp's copies: two blocks of threads fit a multiprocessor
constexpr int kAhead = 2;   // blocks of inputs of which a lane has activations on their way

// What activations are: numbers of 16 bits, or codes of 8 with a scale for each row.
enum class Inputs { kWide, kInt8, kE4M3 };

struct Arguments {
  const void* x;          // (rows, inputs)
  const float* x_scales;  // (rows), of codes
  const uint8_t* codes;
  const float* scales;                    // (inputs / group, padded outputs)
  void* y;                                // (rows, outputs)
  int64_t rows, outputs, padded, blocks;  // blocks: inputs / 64
  int group_blocks, cluster;
  bool hopper;   // whether the card and the code have clusters and early starts
  bool by_gelu;  // of gated results: by GELU, else by SiLU
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// kSigned: of the operand A; the other always is.
template <bool kSigned>
__device__ __forceinline__ void multiply_int8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// A byte k from 0 to 15 is k / 512 in E4M3, of which the first eight are subnormal.
constexpr float kPerStep = 512.0f;

__device__ __forceinline__ void multiply_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 890
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Adds 4-bit codes times activations of 8 bits: codes stay plus 8, which the product with kLess takes back.
template <Inputs kInputs>
struct Narrow {
  using Sum = std::conditional_t<kInputs == Inputs::kInt8, int, float>;

  __device__ __forceinline__ static void less(Sum (&c)[4], uint32_t b0, uint32_t b1) {
    constexpr uint32_t kLess = kInputs == Inputs::kInt8 ? 0xF8F8F8F8u : 0x88888888u;  // -8 in INT8, -8 steps in E4M3
    const uint32_t a[4] = {kLess, kLess, kLess, kLess};
    if constexpr (kInputs == Inputs::kInt8) {
      multiply_int8<true>(c, a, b0, b1);
    } else {
      multiply_e4m3(c, a, b0, b1);
    }
  }

  __device__ __forceinline__ static void add(Sum (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kInputs == Inputs::kInt8) {
      multiply_int8<false>(c, a, b0, b1);
    } else {
      multiply_e4m3(c, a, b0, b1);
    }
  }
};

// The operand of eight 4-bit codes: pair r has bits 4 r to 4 r + 3 of each half of the word.
template <class T>
__device__ __forceinline__ void widen4(uint32_t word, uint32_t (&a)[4]) {
  const uint32_t upper = word >> 8;
  a[0] = number_of<T, 0, 8>(word & 0x000F000Fu | kExponent<T>);
  a[1] = number_of<T, 4, 8>(word & 0x00F000F0u | kExponent<T>);
  a[2] = number_of<T, 0, 8>(upper & 0x000F000Fu | kExponent<T>);
  a[3] = number_of<T, 4, 8>(upper & 0x00F000F0u | kExponent<T>);
}

// The operand of eight 8-bit codes: pairs are the halves of the words.
template <class T>
__device__ __forceinline__ void widen8(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
  a[0] = number_of<T, 0, 128>(__byte_perm(low, kExponent<T>, 0x7150));
  a[1] = number_of<T, 0, 128>(__byte_perm(low, kExponent<T>, 0x7352));
  a[2] = number_of<T, 0, 128>(__byte_perm(high, kExponent<T>, 0x7150));
  a[3] = number_of<T, 0, 128>(__byte_perm(high, kExponent<T>, 0x7352));
}

__device__ __forceinline__ void store(__half* y, float value) { *y = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* y, float value) { *y = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store(float* y, float value) { *y = value; }

// What is copied at a time: two blocks of inputs of a tile for 4 bits, one for 8, as they lie in memory, each with its scales.
template <int kBits>
struct Stage {
  static constexpr int kBlocks = 8 / kBits;
  uint4 codes[kBlocks][kStrips][kBits / 4][32];
  float scales[kBlocks][kTile];
};

template <int kBits>
struct Buffer {
  Stage<kBits> stages[kStages];
  alignas(16) uint64_t arrived[(kStages + 1) / 2 * 2];
};

__device__ __forceinline__ uint32_t address_of(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
#endif
}

// Makes initialized barriers known to copies and to other blocks of the cluster.
__device__ __forceinline__ void fence_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t odd) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}\n" ::"r"(barrier),
               "r"(odd)
               : "memory");
#endif
}

// The blocks of one warp on their way to shared memory: by bulk copies that one lane starts where there are any, else by
// asynchronous copies of all lanes.
template <int kBits>
class Pipeline {
 public:
  __device__ __forceinline__ Pipeline(Buffer<kBits>& buffer, const Arguments& p, int tile, int block, int blocks, int lane)
      : to_(address_of(&buffer)), lane_(lane), left_(blocks), in_group_(block % p.group_blocks), group_blocks_(p.group_blocks),
        padded_(p.padded), codes_(p.codes + (int64_t(tile) * p.blocks + block) * kBlockBytes),
        scales_(p.scales + block / p.group_blocks * p.padded + tile * kTile) {
    if (lane == 0) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(barrier(stage));
      }
      fence_barriers();
    }
    __syncwarp();
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      fetch(stage);
    }
  }

  // Starts the copy of the next blocks, as far as they are left.
  __device__ __forceinline__ void fetch(int stage) {
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0 && left_ > 0) {
#else
    if (left_ > 0) {
#endif
      const uint32_t to = to_ + stage * sizeof(Stage<kBits>);
      const int count = min(left_, Stage<kBits>::kBlocks);
#if __CUDA_ARCH__ >= 900
      barrier_expect(barrier(stage), count * (kBlockBytes + kTile * 4));
#endif
      copy(to, codes_, count * kBlockBytes, stage);
#pragma unroll
      for (int b = 0; b < Stage<kBits>::kBlocks; ++b) {
        if (b < count) {
          copy(to + Stage<kBits>::kBlocks * kBlockBytes + b * kTile * 4, scales_, kTile * 4, stage);
          if (++in_group_ == group_blocks_) {
            in_group_ = 0;
            scales_ += padded_;
          }
        }
      }
      codes_ += count * kBlockBytes;
      left_ -= count;
    }
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  // Waits for the oldest stage; `odd` says whether it was waited for an odd number of times before.
  __device__ __forceinline__ void wait(int stage, uint32_t odd) const {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barrier(stage), odd);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    __syncwarp();
#endif
  }

 private:
  static constexpr int kBlockBytes = kTile * kTile * kBits / 8;

  __device__ __forceinline__ uint32_t barrier(int stage) const {
    return to_ + kStages * sizeof(Stage<kBits>) + stage * sizeof(uint64_t);
  }

  __device__ __forceinline__ void copy(uint32_t to, const void* from, int bytes, int stage) const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(to), "l"(from),
        "r"(barrier(stage)), "r"(bytes)
        : "memory");
#elif __CUDA_ARCH__ >= 800
    for (int at = lane_ * 16; at < bytes; at += 512) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(static_cast<const uint8_t*>(from) + at)
                   : "memory");
    }
#endif
  }

  uint32_t to_;
  int lane_, left_, in_group_, group_blocks_;
  int64_t padded_;
  const uint8_t* codes_;
  const float* scales_;
};

// A lane's activations of a block of inputs: 16 of each of its rows.
template <int kColumns, Inputs kInputs>
struct Activations {
  static constexpr int kLoads = kInputs == Inputs::kWide ? 2 : 1;
  uint4 words[kColumns][kLoads];

  __device__ __forceinline__ void load(const uint4* const (&rows)[kColumns], int block) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int q = 0; q < kLoads; ++q) {
        words[n][q] = rows[n][block * (4 * kLoads) + q];
      }
    }
  }
};

// Adds scale times (codes x activations) of a block of inputs. Sums of a block are exact products added in FP32 or int32.
template <class T, int kBits, int kColumns, Inputs kInputs>
__device__ __forceinline__ void add_block(float (&total)[kStrips][kColumns][4], const Stage<kBits>& stage, int b,
                                          const Activations<kColumns, kInputs>& x, int lane) {
  constexpr bool kNarrow = kInputs != Inputs::kWide;
  using Sum = typename Narrow<kInputs>::Sum;
  const int g = lane / 4, place = lane % 4 * 8 + g;
  Sum none[kColumns][4] = {};
  if constexpr (kNarrow) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      Narrow<kInputs>::less(none[n], x.words[n][0].x, x.words[n][0].y);
      Narrow<kInputs>::less(none[n], x.words[n][0].z, x.words[n][0].w);
    }
  }
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    Sum sums[kColumns][4];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[n][e] = none[n][e];
      }
    }
    uint4 codes[kBits / 4];
#pragma unroll
    for (int q = 0; q < kBits / 4; ++q) {
      codes[q] = stage.codes[b][i][q][place];
    }
#pragma unroll
    for (int s = 0; s < (kNarrow ? 2 : 4); ++s) {
      uint32_t a[4];
      if constexpr (kNarrow) {
        const uint32_t low = word_of(codes[0], 2 * s), high = word_of(codes[0], 2 * s + 1);
        a[0] = low & 0x0F0F0F0Fu, a[1] = low >> 4 & 0x0F0F0F0Fu, a[2] = high & 0x0F0F0F0Fu, a[3] = high >> 4 & 0x0F0F0F0Fu;
      } else if constexpr (kBits == 4) {
        widen4<T>(word_of(codes[0], s), a);
      } else {
        widen8<T>(word_of(codes[s / 2], s % 2 * 2), word_of(codes[s / 2], s % 2 * 2 + 1), a);
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if constexpr (kNarrow) {
          // A word's codes of one output are of inputs 0, 2, 1, 3.
          Narrow<kInputs>::add(sums[n], a, __byte_perm(word_of(x.words[n][0], 2 * s), 0, 0x3120),
                               __byte_perm(word_of(x.words[n][0], 2 * s + 1), 0, 0x3120));
        } else {
          multiply<T>(sums[n], a, word_of(x.words[n][s / 2], s % 2 * 2), word_of(x.words[n][s / 2], s % 2 * 2 + 1));
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[i][n][e] = fmaf(stage.scales[b][i * 16 + g + e / 2 * 8], float(sums[n][e]), total[i][n][e]);
      }
    }
  }
}

// Stores at `to` of the shared memory of a block of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void send(float4* to, uint64_t* barrier, int rank, const float (&v)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 to, barrier;\nmapa.shared::cluster.u32 to, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%3, %4, %5, %6}, [barrier];\n}\n" ::"r"(address_of(to)),
      "r"(address_of(barrier)), "r"(rank), "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])),
      "r"(__float_as_uint(v[3]))
      : "memory");
#endif
}

// Grid: a cluster of blocks of threads per kTiles tiles of outputs and 16 rows; those of the same tiles stand next to each other,
// so that all but the first find the codes in the cache. The warps of a cluster that have the same tile share its inputs in
// contiguous ranges; warps of a block that have the same range read the same activations, of which all but the first find them in
// the cache next to them. Traffic: codes and scales once from memory, activations once per block of threads, from the cache.
// Contract: products of codes and activations are exact, sums are FP32 in an order that depends on the shape of the weight and the
// card alone: a row's result does not depend on the other rows. Codes and scales are complete before the first of a row of kernels
// that start early begins. With kGated a block has a tile of the first half of the outputs and the same one of the second, no
// cluster, and stores the gated results of both: the bits of storing both and gating them after. Reference:
// kernels/weight_only/operators.py.
template <class T, class Out, int kBits, int kColumns, Inputs kInputs, int kTiles, bool kGated>
__global__ void __launch_bounds__(kThreads, 2) linear_kernel(const Arguments p) {
  constexpr int kShares = kWarps / kTiles, kTileParts = kStrips * kColumns * 32, kParts = kTiles * kTileParts;
  constexpr float kFactor = kInputs == Inputs::kWide ? kUnit<T> : kInputs == Inputs::kInt8 ? 1.0f : kPerStep;
  using Warp = Buffer<kBits>;
  using Received = float4[kShares * kParts];
  extern __shared__ __align__(128) uint8_t shared[];
  auto& buffers = *reinterpret_cast<Warp(*)[kWarps]>(shared);
  auto& received = *reinterpret_cast<Received*>(shared + sizeof(buffers));  // of a cluster: sums of all warps that this block adds
  auto* received_all = reinterpret_cast<uint64_t*>(&received + 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const bool alone = p.cluster == 1;
  const int rank = blockIdx.x % p.cluster, part = blockIdx.x / p.cluster, row_blocks = int((p.rows + kRows - 1) / kRows);
  static_assert(!kGated || kTiles == 2);
  const int first_tile = part / row_blocks * (kGated ? 1 : kTiles);
  const int tile = first_tile + warp / kShares * (kGated ? int(p.padded / kTile / 2) : 1);
  const int64_t first_row = int64_t(part % row_blocks) * kRows;
  const int share = rank * kShares + warp % kShares, shares = p.cluster * kShares, pairs = int(p.blocks + 1) / 2;
  const int begin = pairs * share / shares * 2, end = min(pairs * (share + 1) / shares * 2, int(p.blocks));
  const int blocks = tile * kTile < p.padded ? end - begin : 0;
  Pipeline<kBits> pipeline(buffers[warp], p, tile, begin, blocks, lane);
#if __CUDA_ARCH__ >= 900
  if (!alone) {
    if (threadIdx.x == 0) {
      barrier_init(address_of(received_all));
      fence_barriers();
      barrier_expect(address_of(received_all), sizeof(Received));
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
#endif
  wait_for_previous();
  launch_next();

  const uint4* rows[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int64_t row = min(first_row + n * 8 + g, p.rows - 1);  // results of missing rows are dropped
    rows[n] = static_cast<const uint4*>(p.x) + ((row * p.blocks + begin) * 4 + t) * Activations<kColumns, kInputs>::kLoads;
  }
  constexpr int kBlocks = Stage<kBits>::kBlocks, kInFlight = kStages * kBlocks;
  Activations<kColumns, kInputs> x[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    if (u < blocks) {
      x[u].load(rows, u);
    }
  }
  float total[kStrips][kColumns][4] = {};
  constexpr int kUnrolled = kAhead > kInFlight ? kAhead : kInFlight;
  static_assert(kUnrolled % kAhead == 0 && kUnrolled % kInFlight == 0);
  for (int first = 0; first < blocks; first += kUnrolled) {
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      const int block = first + u, stage = u / kBlocks % kStages;
      if (block < blocks) {
        if (u % kBlocks == 0) {
          pipeline.wait(stage, block / kInFlight % 2);
        }
        add_block<T, kBits>(total, buffers[warp].stages[stage], u % kBlocks, x[u % kAhead], lane);
        if (block + kAhead < blocks) {
          x[u % kAhead].load(rows, block + kAhead);
        }
        if (u % kBlocks == kBlocks - 1) {
          __syncwarp();
          pipeline.fetch(stage);
        }
      }
    }
  }

  // What a lane has summed stays together, (tile, strip, column, lane). It goes to the block of the cluster that adds it; with no
  // cluster to where the warp's copies were.
  static_assert(sizeof(Warp::stages) >= kTileParts * sizeof(float4));
  const int own = kParts / p.cluster;
#if __CUDA_ARCH__ >= 900
  if (!alone) {
    __syncwarp();
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the other blocks have begun
  }
#endif
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int place = (i * kColumns + n) * 32 + lane, at = warp / kShares * kTileParts + place;
      const auto& v = total[i][n];
      if (alone) {
        reinterpret_cast<float4*>(&buffers[warp])[place] = make_float4(v[0], v[1], v[2], v[3]);
      } else {
        send(&received[share * own + (at & (own - 1))], received_all, at / own, v);
      }
    }
  }
  if (alone) {
    __syncthreads();
  } else {
    barrier_wait(address_of(received_all), 0);
  }
  if constexpr (kGated) {
    for (int k = threadIdx.x; k < kTileParts * 4; k += kThreads) {
      float halves[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto* from = reinterpret_cast<const float*>(&buffers[half * kShares]) + k;
        halves[half] = *from;
#pragma unroll
        for (int other = 1; other < kShares; ++other) {
          halves[half] += from[other * int(sizeof(Warp) / 4)];
        }
        halves[half] = to_float(from_float<Out>(halves[half] * kFactor));
      }
      const int at = k / 4, e = k % 4;
      const int64_t row = first_row + at / 32 % kColumns * 8 + at % 4 * 2 + e % 2;
      const int64_t output = int64_t(first_tile) * kTile + at / 32 / kColumns * 16 + at % 32 / 4 + e / 2 * 8;
      if (row < p.rows) {
        store(static_cast<Out*>(p.y) + row * (p.outputs / 2) + output, gated(halves[0], halves[1], p.by_gelu));
      }
    }
    return;
  }
  for (int k = threadIdx.x; k < own * 4; k += kThreads) {
    const auto* from = alone ? reinterpret_cast<const float*>(&buffers[k / (4 * kTileParts) * kShares]) + k % (4 * kTileParts)
                             : reinterpret_cast<const float*>(received) + k;
    const int step = alone ? int(sizeof(Warp) / 4) : own * 4;
    float sum = *from;
#pragma unroll 4
    for (int part = 1; part < shares; ++part) {
      sum += from[part * step];
    }
    const int at = rank * own + k / 4, e = k % 4, strip = at % kTileParts / 32 / kColumns;
    const int64_t row = first_row + at / 32 % kColumns * 8 + at % 4 * 2 + e % 2;
    const int64_t output = int64_t(first_tile + at / kTileParts) * kTile + strip * 16 + at % 32 / 4 + e / 2 * 8;
    if (row < p.rows && output < p.outputs) {
      store(static_cast<Out*>(p.y) + row * p.outputs + output, sum * kFactor * (kInputs == Inputs::kWide ? 1.0f : p.x_scales[row]));
    }
  }
}

template <int kBits, int kColumns>
constexpr int shared_bytes(int cluster) {
  constexpr int kReceived = kWarps * kStrips * kColumns * 32 * int(sizeof(float4)) + 16;
  return kWarps * int(sizeof(Buffer<kBits>)) + (cluster > 1 ? kReceived : 0);
}

}  // namespace qsync
