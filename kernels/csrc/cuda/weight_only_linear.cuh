// Products of a few rows of activations and packed weights: W4A16, W8A16 and W4A8 of INT8 and FP8. No torch here.
//
// One reading of the weights bounds them, and next to it the instructions that make numbers of codes. So every multiprocessor has
// one block of threads with an equal share of the outputs, every warp of it an equal share of the work, and copies of its next
// steps on their way, from before the kernels that compute the activations have ended.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/early_start.cuh"
#include "cuda/gate.cuh"
#include "cuda/half_mma.cuh"
#include "cuda/rounding.cuh"

namespace qsync {

constexpr int kTile = 64, kStrips = 4;  // a tile is 64 outputs by a block of 64 inputs, of strips of 16 outputs
constexpr int kRows = 16;               // of activations that a block of threads multiplies
constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kWidth = 2;  // strips that a warp multiplies at a time, an item: activations are read half as often
constexpr int kSlots = 2;  // of a warp's copies

// What activations are: numbers of 16 bits, or codes of 8 with a scale for each row.
enum class Inputs { kWide, kInt8, kE4M3 };

struct Arguments {
  const void* x;          // (rows, inputs)
  const float* x_scales;  // (rows), of codes
  const uint8_t* codes;
  const float* scales;                    // (inputs / group, padded outputs)
  void* y;                                // (rows, outputs)
  int64_t rows, outputs, padded, blocks;  // blocks: inputs / 64
  int group_blocks;
  int parts;          // blocks of threads that share the outputs
  int steps;          // of an item: blocks of inputs, in pairs for 4 bits
  uint32_t per_step;  // 2^32 / steps, rounded up
  bool by_gelu;       // of gated results: by GELU, else by SiLU
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

// What a warp copies at a time, a step of an item.
template <int kBits>
struct Slot {
  static constexpr int kBlocks = 8 / kBits, kLoads = kBits / 4;
  uint4 codes[kWidth][kBlocks][kLoads][32];
  float scales[kBlocks][kWidth][16];
};

template <int kBits>
using Ring = Slot<kBits>[kSlots];

// Where the 16 bytes of a lane (g, t) stand among those of a warp: turned within their 128 bytes, so that lanes read without
// conflicts; in memory the lane would be t 8 + g.
__device__ __forceinline__ int turned(int t, int g) { return t * 8 + (g + 2 * t) % 8; }

__device__ const uint4 kZeros[kTile / 8] = {};  // activations of a block of inputs that there is not

__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void copy4(uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
#endif
}

// The strips of a block of threads, in items of two: neighbours, of which the last may be alone, or one of each half of the outputs.
template <bool kGated>
struct Share {
  int first, strips, half;

  __device__ __forceinline__ Share(const Arguments& p, int part) : half(int(p.padded / 32)) {
    const int all = kGated ? half : 2 * half, each = all / p.parts, more = all - each * p.parts;
    first = each * part + min(part, more);
    strips = (each + (part < more)) * (kGated ? 2 : 1);
  }
  __device__ __forceinline__ int items() const { return (strips + 1) / 2; }
  __device__ __forceinline__ int strip(int item, int v) const {
    return kGated ? first + item + v * half : first + min(2 * item + v, strips - 1);
  }
};

// A warp's next steps on their way to shared memory, by asynchronous copies of all lanes.
template <int kBits, bool kGated>
class Copies {
 public:
  using S = Slot<kBits>;

  // Of `left` steps, the first of which is `step` of `item`.
  __device__ __forceinline__ Copies(Ring<kBits>& ring, const Arguments& p, const Share<kGated>& share, int item, int step, int left,
                                    int lane)
      : p_(p), share_(share), to_(uint32_t(__cvta_generic_to_shared(&ring))), to_codes_(turned(lane / 8, lane % 8) * 16),
        lane_(lane), item_(item), step_(step), left_(left), in_group_(step * S::kBlocks % p.group_blocks) {
    begin_item();
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      codes_[v] += step * int64_t(kStepBytes);
    }
    scales_ += step * S::kBlocks / p.group_blocks * p.padded;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      next(slot);
    }
  }

  // Starts the copies of the next step, if there is one.
  __device__ __forceinline__ void next(int slot) {
    if (left_ > 0) {
      const uint32_t to = to_ + slot * uint32_t(sizeof(S));
      const bool whole = S::kBlocks == 1 || (step_ + 1) * S::kBlocks <= p_.blocks;
#pragma unroll
      for (int v = 0; v < kWidth; ++v) {
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
          if (b == 0 || whole) {
#pragma unroll
            for (int q = 0; q < S::kLoads; ++q) {
              copy16(to + to_codes_ + ((v * S::kBlocks + b) * S::kLoads + q) * 512, codes_[v] + b * kBlockBytes + q * 512);
            }
          }
        }
        codes_[v] += kStepBytes;
      }
      const uint32_t to_scales = to + uint32_t(offsetof(S, scales)) + lane_ * 4;
      copy4(to_scales, scales_);
      if (S::kBlocks == 2 && p_.group_blocks % 2) {  // the second block may have other scales
        step_scales();
        if (whole) {
          copy4(to_scales + 128, scales_);
        }
        step_scales();
      } else if ((in_group_ += S::kBlocks) == p_.group_blocks) {
        in_group_ = 0;
        scales_ += p_.padded;
      }
      --left_;
      if (++step_ == p_.steps) {
        step_ = in_group_ = 0;
        ++item_;
        begin_item();
      }
    }
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  // Waits for the oldest step on its way.
  __device__ __forceinline__ static void wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kSlots - 1) : "memory");
#endif
    __syncwarp();
  }

 private:
  static constexpr int kUnit = 512 * S::kLoads, kBlockBytes = kStrips * kUnit, kStepBytes = S::kBlocks * kBlockBytes;

  __device__ __forceinline__ void begin_item() {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      const int strip = share_.strip(item_, v);
      codes_[v] = p_.codes + (strip / kStrips * p_.blocks * kStrips + strip % kStrips) * kUnit + lane_ * 16;
    }
    scales_ = p_.scales + share_.strip(item_, lane_ / 16) * 16 + lane_ % 16;
  }

  __device__ __forceinline__ void step_scales() {
    if (++in_group_ == p_.group_blocks) {
      in_group_ = 0;
      scales_ += p_.padded;
    }
  }

  const Arguments& p_;
  const Share<kGated>& share_;
  uint32_t to_, to_codes_;
  int lane_, item_, step_, left_, in_group_;
  const uint8_t* codes_[kWidth];
  const float* scales_;
};

// A lane's activations of the blocks of a step: 16 inputs of each of its rows.
template <int kBlocks, int kColumns, Inputs kInputs>
struct Activations {
  static constexpr int kLoads = kInputs == Inputs::kWide ? 2 : 1;
  uint4 words[kBlocks][kColumns][kLoads];
  const uint4* rows[kColumns];
  int blocks, steps, step;

  __device__ __forceinline__ Activations(const Arguments& p, int64_t first_row, int first_step, int lane)
      : blocks(int(p.blocks)), steps(p.steps), step(first_step) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int64_t row = min(first_row + n * 8 + lane / 4, p.rows - 1);  // results of missing rows are dropped
      rows[n] = static_cast<const uint4*>(p.x) + (row * p.blocks * 4 + lane % 4) * kLoads;
    }
  }

  // Asks for block b of the next step; after the last one of an item comes the first one of the next.
  __device__ __forceinline__ void load(int b) {
    const int block = step * kBlocks + b;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const uint4* at = b > 0 && block >= blocks ? kZeros : rows[n] + block * (4 * kLoads);
#pragma unroll
      for (int q = 0; q < kLoads; ++q) {
        words[b][n][q] = at[q];
      }
    }
    if (b == kBlocks - 1 && ++step == steps) {
      step = 0;
    }
  }
};

// The sums of the strips of an item over blocks that share a scale: exact products added in FP32 or int32.
template <class T, int kBits, int kColumns, Inputs kInputs>
struct Sums {
  static constexpr bool kNarrow = kInputs != Inputs::kWide;
  using Sum = typename Narrow<kInputs>::Sum;
  Sum of[kWidth][kColumns][4] = {};

  __device__ __forceinline__ void add(const Slot<kBits>& slot, int b, const uint4 (&x)[kColumns][kNarrow ? 1 : 2], int lane) {
    if constexpr (kNarrow) {
      Sum none[kColumns][4] = {};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        Narrow<kInputs>::less(none[n], x[n][0].x, x[n][0].y);
        Narrow<kInputs>::less(none[n], x[n][0].z, x[n][0].w);
#pragma unroll
        for (int v = 0; v < kWidth; ++v) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            of[v][n][e] += none[n][e];
          }
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      uint4 codes[kBits / 4];
#pragma unroll
      for (int q = 0; q < kBits / 4; ++q) {
        codes[q] = slot.codes[v][b][q][turned(lane % 4, lane / 4)];
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
            Narrow<kInputs>::add(of[v][n], a, __byte_perm(word_of(x[n][0], 2 * s), 0, 0x3120),
                                 __byte_perm(word_of(x[n][0], 2 * s + 1), 0, 0x3120));
          } else {
            multiply<T>(of[v][n], a, word_of(x[n][s / 2], s % 2 * 2), word_of(x[n][s / 2], s % 2 * 2 + 1));
          }
        }
      }
    }
  }

  // Adds them times the scales of block b, and begins anew.
  __device__ __forceinline__ void move_to(float (&total)[kWidth][kColumns][4], const Slot<kBits>& slot, int b, int lane) {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      const float scales[2] = {slot.scales[b][v][lane / 4], slot.scales[b][v][lane / 4 + 8]};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[v][n][e] = fmaf(scales[e / 2], float(of[v][n][e]), total[v][n][e]);
          of[v][n][e] = 0;
        }
      }
    }
  }
};

// Grid: `parts` blocks of threads, one for each multiprocessor, per 16 rows; those of the same strips stand next to each other, so
// that all but the first find the codes in the cache. The steps of all items of a block of threads are shared by its warps in
// contiguous ranges. Traffic: codes and scales once from memory, activations once per item, from the cache. Contract: products of
// codes and activations are exact, sums are FP32 in an order that depends on the shape of the weight and the card alone: a row's
// result does not depend on the other rows. Codes and scales are complete before the first of a row of kernels that start early
// begins. With kGated the first half of the outputs gates the second, each rounded first. Reference:
// kernels/weight_only/operators.py.
template <class T, class Out, int kBits, int kColumns, Inputs kInputs, bool kGated>
__global__ void __launch_bounds__(kThreads, 1) linear_kernel(const Arguments p) {
  using S = Slot<kBits>;
  constexpr float kFactor = kInputs == Inputs::kWide ? kUnit<T> : kInputs == Inputs::kInt8 ? 1.0f : kPerStep;
  extern __shared__ __align__(128) uint8_t shared[];
  auto& rings = *reinterpret_cast<Ring<kBits>(*)[kWarps]>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int row_blocks = int((p.rows + kRows - 1) / kRows);
  const int64_t first_row = int64_t(blockIdx.x % row_blocks) * kRows;
  const Share<kGated> share(p, blockIdx.x / row_blocks);
  const int items = share.items(), all = items * p.steps;
  const int begin = all < kWarps ? min(warp, all) : all * warp / kWarps;
  const int end = all < kWarps ? min(warp + 1, all) : all * (warp + 1) / kWarps;
  int item = p.steps == 1 ? begin : __umulhi(begin, p.per_step), step = begin - item * p.steps;
  Copies<kBits, kGated> copies(rings[warp], p, share, item, step, end - begin, lane);
  wait_for_previous();
  launch_next();

  // Sums that end an item stand by item, those of a warp that ends amid one where its copies were; the warps that an item's sums are
  // of by item, too. Of the columns of a product, which are rows of activations, only pairs that there are stand there.
  const int rows = int(min(p.rows - first_row, int64_t(kColumns * 8))), pairs = min(4, (rows + 1) / 2);
  const int item_sums = kWidth * kColumns * 8 * pairs;
  float4* ends = reinterpret_cast<float4*>(shared + sizeof(rings));
  uint8_t(*warps)[2] = reinterpret_cast<uint8_t(*)[2]>(ends + items * item_sums);
  static_assert(sizeof(Ring<kBits>) >= kWidth * kColumns * 32 * sizeof(float4));
  Activations<S::kBlocks, kColumns, kInputs> x(p, first_row, step, lane);
  if (begin < end) {
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      x.load(b);
    }
    if (step == 0) {
      warps[item][0] = uint8_t(warp);
    }
  }
  float total[kWidth][kColumns][4] = {};
  const bool apart = S::kBlocks == 2 && p.group_blocks % 2;
  for (int at = begin; at < end;) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      Copies<kBits, kGated>::wait();
      const S& slot = rings[warp][s];
      Sums<T, kBits, kColumns, kInputs> sums;
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) {
        sums.add(slot, b, x.words[b], lane);
        x.load(b);
        if (b == 0 && apart) {
          sums.move_to(total, slot, b, lane);
        }
      }
      sums.move_to(total, slot, apart ? 1 : 0, lane);
      __syncwarp();
      copies.next(s);
      ++step;
      if (++at == end || step == p.steps) {
        const bool whole = step == p.steps;
        float4* to = whole ? ends + item * item_sums : reinterpret_cast<float4*>(&rings[warp]);
#pragma unroll
        for (int v = 0; v < kWidth; ++v) {
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            if (t < pairs) {
              to[((v * kColumns + n) * 8 + g) * pairs + t] =
                  make_float4(total[v][n][0], total[v][n][1], total[v][n][2], total[v][n][3]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              total[v][n][e] = 0;
            }
          }
        }
        if (whole) {
          warps[item][1] = uint8_t(warp);
        }
        if (at == end) {
          break;
        }
        step = 0;
        warps[++item][0] = uint8_t(warp);
      }
    }
  }
  __syncthreads();

  const auto result_of = [&](int strip, int output, int row) {
    const int item = strip / 2, v = strip % 2;
    const int place = (((v * kColumns + row / 8) * 8 + output % 8) * pairs + row % 8 / 2) * 4 + output / 8 * 2 + row % 2;
    float sum = 0;
    for (int w = warps[item][0]; w < warps[item][1]; ++w) {
      sum += reinterpret_cast<const float*>(&rings[w])[place];
    }
    sum += reinterpret_cast<const float*>(ends + item * item_sums)[place];
    return sum * kFactor * (kInputs == Inputs::kWide ? 1.0f : p.x_scales[first_row + row]);
  };
  const int output = threadIdx.x % 16, strips = kGated ? items : share.strips;
  for (int k = threadIdx.x / 16; k < strips * (8 * kColumns); k += kThreads / 16) {
    const int row = k % (8 * kColumns), strip = k / (8 * kColumns);
    const int64_t place = int64_t(share.first + strip) * 16 + output;
    if (row >= rows) {
      continue;
    }
    if constexpr (kGated) {
      const float gate = to_float(from_float<Out>(result_of(2 * strip, output, row)));
      const float up = to_float(from_float<Out>(result_of(2 * strip + 1, output, row)));
      store(static_cast<Out*>(p.y) + (first_row + row) * (p.outputs / 2) + place, gated(gate, up, p.by_gelu));
    } else if (place < p.outputs) {
      store(static_cast<Out*>(p.y) + (first_row + row) * p.outputs + place, result_of(strip, output, row));
    }
  }
}

// Bytes of shared memory of a block of threads with so many items.
template <int kBits>
int shared_bytes(int items, int64_t rows) {
  const int columns = rows > 8 ? 2 : 1, pairs = rows > 6 ? 4 : int(rows + 1) / 2;
  return kWarps * int(sizeof(Ring<kBits>)) + items * (kWidth * columns * 8 * pairs * int(sizeof(float4)) + 2);
}

}  // namespace qsync
