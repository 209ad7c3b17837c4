// Products of activations and packed 4- or 8-bit weights: W4A16, W8A16 and W4A8 for few rows, and unpacking for many;
// Hadamard rotations of activations, alone and with rounding to INT8.
//
// Layout of the codes: tiles of 64 outputs by 64 inputs, (outputs / 64, inputs / 64, 4, bits / 4, 32, 16 bytes). A lane
// of a warp reads 16 bytes that are the operand A of tensor core products for 16 outputs; which inputs these are is
// chosen so that the lane's activations are contiguous too: lane (g, t) has outputs g and g + 8 and inputs 16 t to
// 16 t + 15, four for each of the steps s. kernels/weight_only/layout.py is the specification.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/rounding.cuh"
#include "stable.cuh"

namespace qsync {
namespace {

namespace groups = cooperative_groups;

constexpr int kWarps = 8, kThreads = 32 * kWarps, kTile = 64, kStrips = 4, kRows = 16, kMostCluster = 8;

struct Arguments {
  const void* x;          // (rows, inputs): bf16, fp16, or int8 codes
  const float* x_scales;  // (rows), for int8 codes
  const uint8_t* codes;
  const float* scales;    // (inputs / group, padded outputs)
  void* y;                // (rows, outputs)
  int64_t rows, outputs, padded, blocks;  // blocks: inputs / 64
  int group_blocks, cluster;
};

__device__ __forceinline__ uint4 load_once(const uint8_t* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

__device__ __forceinline__ void multiply_int8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Two 4-bit codes, in bits 0-3 and 16-19, as two numbers less 8; exact. The codes become the low bits of the significand
// of 128 (bf16) or 1024 (fp16), whose last place is 1.
template <class T>
__device__ __forceinline__ uint32_t widen4(uint32_t codes) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    pair = (codes & 0x000F000Fu) | 0x64006400u;
    const __half2 value = __hsub2(*reinterpret_cast<const __half2*>(&pair), __half2half2(__ushort_as_half(0x6408)));
    return *reinterpret_cast<const uint32_t*>(&value);
  } else {
    pair = (codes & 0x000F000Fu) | 0x43004300u;
    const __nv_bfloat162 value =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&pair), __bfloat162bfloat162(__ushort_as_bfloat16(0x4308)));
    return *reinterpret_cast<const uint32_t*>(&value);
  }
}

// Two of a word's 8-bit codes, the lower (0) or upper (1) two, as two numbers less 128; exact.
template <class T>
__device__ __forceinline__ uint32_t widen8(uint32_t codes, int half) {
  if constexpr (std::is_same_v<T, __half>) {
    const uint32_t pair = __byte_perm(codes, 0x64646464u, half ? 0x4342 : 0x4140);
    const __half2 value = __hsub2(*reinterpret_cast<const __half2*>(&pair), __half2half2(__ushort_as_half(0x6480)));
    return *reinterpret_cast<const uint32_t*>(&value);
  } else {
    const float low = __uint_as_float(__byte_perm(codes, 0x4B000000u, half ? 0x7542 : 0x7540)) - 8388736.0f;
    const float high = __uint_as_float(__byte_perm(codes, 0x4B000000u, half ? 0x7543 : 0x7541)) - 8388736.0f;
    const __nv_bfloat162 value = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&value);
  }
}

// Four 4-bit codes, in the lower halves of the bytes, as four signed bytes less 8.
__device__ __forceinline__ uint32_t widen_bytes(uint32_t codes) {
  return (((codes & 0x0F0F0F0Fu) | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
}

__device__ __forceinline__ void store(__half* y, float value) { *y = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* y, float value) { *y = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store(float* y, float value) { *y = value; }

// What one warp needs of one block of 64 inputs. The weights of the next block are loaded while this one is multiplied;
// the activations come from the cache, so that for two columns of tiles, where registers are short, they are not.
template <int kBits, int kColumns, bool kInt8>
struct Block {
  static constexpr int kLoads = kBits / 4, kXLoads = kInt8 ? 1 : 2;
  uint4 codes[kStrips][kLoads];
  uint4 x[kColumns][kXLoads];
  float scales[kStrips][2];

  __device__ __forceinline__ void load(const Arguments& p, int64_t tile, int64_t block, int64_t first_row, int g, int t) {
    const uint8_t* codes_at = p.codes + (tile * p.blocks + block) * (kStrips * kLoads * 512) + (t * 8 + g) * 16;
    const float* scales_at = p.scales + (block / p.group_blocks) * p.padded + tile * kTile + g;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
#pragma unroll
      for (int q = 0; q < kLoads; ++q) {
        codes[i][q] = load_once(codes_at + (i * kLoads + q) * 512);
      }
      scales[i][0] = __ldg(scales_at + i * 16);
      scales[i][1] = __ldg(scales_at + i * 16 + 8);
    }
    if constexpr (kColumns == 1) {
      load_x(p, block, first_row, g, t);
    }
  }

  __device__ __forceinline__ void load_x(const Arguments& p, int64_t block, int64_t first_row, int g, int t) {
    constexpr int kBytes = kInt8 ? 1 : 2;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int64_t row = first_row + n * 8 + g;
      const auto* x_at = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.x) +
                                                        ((row * p.blocks + block) * kTile + t * 16) * kBytes);
#pragma unroll
      for (int q = 0; q < kXLoads; ++q) {
        x[n][q] = row < p.rows ? __ldg(x_at + q) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Adds scale times (codes x activations) of the block. Sums of a block are exact products added in FP32 or int32.
  template <class T>
  __device__ __forceinline__ void add_to(float (&total)[kStrips][kColumns][4]) const {
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      if constexpr (kInt8) {
        int sums[kColumns][4] = {};
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const uint32_t first = word_of(codes[i][0], 2 * q), second = word_of(codes[i][0], 2 * q + 1);
          const uint32_t a[4] = {widen_bytes(first), widen_bytes(first >> 4), widen_bytes(second), widen_bytes(second >> 4)};
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            // A word's codes of one output are of inputs 0, 2, 1, 3.
            multiply_int8(sums[n], a, __byte_perm(word_of(x[n][0], 2 * q), 0, 0x3120),
                          __byte_perm(word_of(x[n][0], 2 * q + 1), 0, 0x3120));
          }
        }
        add_scaled(total[i], sums, i);
      } else {
        float sums[kColumns][4] = {};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          uint32_t a[4];
          if constexpr (kBits == 4) {
            const uint32_t word = word_of(codes[i][0], s);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              a[r] = widen4<T>(word >> (4 * r));
            }
          } else {
            const uint32_t low = word_of(codes[i][s / 2], s % 2 * 2), high = word_of(codes[i][s / 2], s % 2 * 2 + 1);
            a[0] = widen8<T>(low, 0), a[1] = widen8<T>(low, 1), a[2] = widen8<T>(high, 0), a[3] = widen8<T>(high, 1);
          }
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            multiply<T>(sums[n], a, word_of(x[n][s / 2], s % 2 * 2), word_of(x[n][s / 2], s % 2 * 2 + 1));
          }
        }
        add_scaled(total[i], sums, i);
      }
    }
  }

  template <class Sum>
  __device__ __forceinline__ void add_scaled(float (&total)[kColumns][4], const Sum (&sums)[kColumns][4], int i) const {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[n][e] = fmaf(scales[i][e / 2], float(sums[n][e]), total[n][e]);
      }
    }
  }
};

// Grid: a cluster of blocks per 64 outputs, whose warps share the inputs in contiguous ranges; y: 16 rows each. Traffic:
// codes and scales once from memory, activations once per cluster, from the cache. Contract: products of codes and
// activations are exact, sums are FP32 in an order that depends on the shape of the weight alone: a row's result does
// not depend on the other rows. Reference: kernels/weight_only/operators.py.
template <class T, class Out, int kBits, int kColumns, bool kInt8>
__global__ void __launch_bounds__(kThreads, kBits == 8 && kColumns == 2 ? 1 : 2) linear_kernel(const Arguments p) {
  constexpr int kWidth = 8 * kColumns;
  __shared__ float parts[kWarps][kWidth * kTile];
  __shared__ float sums[kWidth * kTile];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % p.cluster;
  const int64_t tile = blockIdx.x / p.cluster, first_row = int64_t(blockIdx.y) * kRows;
  const int share = rank * kWarps + warp, shares = p.cluster * kWarps;
  const int64_t begin = p.blocks * share / shares, end = p.blocks * (share + 1) / shares;

  float total[kStrips][kColumns][4] = {};
  if (begin < end) {
    Block<kBits, kColumns, kInt8> current;
    current.load(p, tile, begin, first_row, g, t);
    for (int64_t block = begin; block < end; ++block) {
      Block<kBits, kColumns, kInt8> next;
      if (block + 1 < end) {
        next.load(p, tile, block + 1, first_row, g, t);
      }
      if constexpr (kColumns > 1) {
        current.load_x(p, block, first_row, g, t);
      }
      current.template add_to<T>(total);
      current = next;
    }
  }
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        parts[warp][(n * 8 + 2 * t + e % 2) * kTile + i * 16 + g + e / 2 * 8] = total[i][n][e];
      }
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < kWidth * kTile; at += kThreads) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += parts[w][at];
    }
    sums[at] = sum;
  }
#if __CUDA_ARCH__ >= 900
  const auto cluster = groups::this_cluster();
  cluster.sync();
#else
  __syncthreads();
#endif
  for (int at = rank * kThreads + threadIdx.x; at < kWidth * kTile; at += p.cluster * kThreads) {
    float sum = 0;
#if __CUDA_ARCH__ >= 900
    for (int r = 0; r < p.cluster; ++r) {
      sum += cluster.map_shared_rank(sums, r)[at];
    }
#else
    sum = sums[at];
#endif
    const int64_t row = first_row + at / kTile, output = tile * kTile + at % kTile;
    if (row < p.rows && output < p.outputs) {
      store(static_cast<Out*>(p.y) + row * p.outputs + output, kInt8 ? sum * p.x_scales[row] : sum);
    }
  }
#if __CUDA_ARCH__ >= 900
  cluster.sync();  // others may still read this block's sums
#endif
}

// Grid: a warp per strip of 16 outputs by 64 inputs. Traffic: codes once, results once. Contract: code times scale in
// FP32, rounded once.
template <class Out, int kBits>
__global__ void unpack_kernel(const uint8_t* codes, const float* scales, Out* y, int64_t strips, int64_t blocks,
                              int64_t padded, int group_blocks) {
  constexpr int kLoads = kBits / 4, kZero = kBits == 4 ? 8 : 128;
  const int64_t strip = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;  // (tile, block, i)
  if (strip >= strips) {
    return;
  }
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, i = strip % kStrips;
  const int64_t block = strip / kStrips % blocks, tile = strip / kStrips / blocks;
  const int64_t output = tile * kTile + i * 16 + g;
  const uint8_t* at = codes + strip * (kLoads * 512) + (t * 8 + g) * 16;
  uint4 words[kLoads];
#pragma unroll
  for (int q = 0; q < kLoads; ++q) {
    words[q] = load_once(at + q * 512);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = scales[block / group_blocks * padded + output + 8 * half];
    Out* to = y + ((output + 8 * half) * blocks + block) * kTile + t * 16;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t code;
        if constexpr (kBits == 4) {
          code = word_of(words[0], s) >> (4 * (k % 2 * 4 + k / 2 * 2 + half)) & 15u;
        } else {
          code = word_of(words[s / 2], s % 2 * 2 + k / 2) >> (8 * (half * 2 + k % 2)) & 255u;
        }
        store(to + 4 * s + k, float(int(code) - kZero) * scale);
      }
    }
  }
}

// A lane's kCount consecutive inputs of a rotated block of 32 kCount: sums within a lane, then between lanes, in one order.
template <int kCount, class T>
__device__ __forceinline__ void load_rotated(const T* x, int lane, float (&v)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    v[k] = to_float(x[lane * kCount + k]);
  }
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if ((k & step) == 0) {
        const float a = v[k], b = v[k + step];
        v[k] = a + b;
        v[k + step] = a - b;
      }
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float other = __shfl_xor_sync(0xffffffffu, v[k], step);
      v[k] = lane & step ? other - v[k] : v[k] + other;
    }
  }
  const float factor = kCount == 4 ? 0.08838834764831845f : 0.125f;  // one over the root of the block
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    v[k] *= factor;
  }
}

// Grid: a warp per block of a row. Traffic: x once, results once. Contract: FP32 sums in one order, rounded once.
// Reference: kernels/weight_only/rotation.py.
template <int kCount, class T>
__global__ void rotate_kernel(const T* x, T* y, int64_t blocks) {
  const int64_t block = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (block >= blocks) {
    return;
  }
  const int lane = threadIdx.x % 32;
  float v[kCount];
  load_rotated<kCount>(x + block * 32 * kCount, lane, v);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    y[block * 32 * kCount + lane * kCount + k] = from_float<T>(v[k]);
  }
}

// Grid: a block of threads per row, whose warps share the row's blocks. Traffic: x once from memory and once more from the
// cache, for the largest magnitude comes first; codes once. Contract: rotated numbers are not rounded in between; scale and
// codes are those of the row quantizer. Reference: kernels/weight_only/rotation.py.
template <int kCount, class T>
__global__ void rotate_int8_kernel(const T* x, int8_t* codes, float* scales, int64_t blocks) {
  __shared__ uint32_t largest_of[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t row = blockIdx.x, first = row * blocks * 32 * kCount;
  uint32_t bits = 0;
  for (int64_t block = warp; block < blocks; block += warps) {
    float v[kCount];
    load_rotated<kCount>(x + first + block * 32 * kCount, lane, v);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      bits = max(bits, __float_as_uint(fabsf(v[k])));  // bits order magnitudes, NaN above infinity
    }
  }
  bits = group_max<32>(bits);
  if (lane == 0) {
    largest_of[warp] = bits;
  }
  __syncthreads();
  bits = group_max<32>(lane < warps ? largest_of[lane] : 0);
  const float scale = scale_of<Format::kInt8>(__uint_as_float(bits));
  const float factor = factor_of<Format::kInt8, false>(scale);
  if (threadIdx.x == 0) {
    scales[row] = scale;
  }
  for (int64_t block = warp; block < blocks; block += warps) {
    float v[kCount];
    load_rotated<kCount>(x + first + block * 32 * kCount, lane, v);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t code = round_one<Format::kInt8, false>(__fmul_rn(v[k], factor), 0);
      codes[first + block * 32 * kCount + lane * kCount + k] = int8_t(uint8_t(code));
    }
  }
}

void check_packed(const Tensor& codes, const Tensor& scales, int64_t bits, int64_t group) {
  STD_TORCH_CHECK(bits == 4 || bits == 8, "weight_only: bits is ", bits, "; allowed are 4 and 8");
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.is_contiguous() && codes.dim() == 6 && codes.size(2) == 4 &&
                      codes.size(3) == bits / 4 && codes.size(4) == 32 && codes.size(5) == 16,
                  "weight_only: codes must be a contiguous uint8 tensor of shape (outputs / 64, inputs / 64, 4, ", bits / 4,
                  ", 32, 16)");
  STD_TORCH_CHECK(group > 0 && group % kTile == 0, "weight_only: group is ", group, "; allowed are multiples of 64");
  const int64_t groups = (codes.size(1) * kTile + group - 1) / group;
  STD_TORCH_CHECK(scales.scalar_type() == ScalarType::Float && scales.is_contiguous() && scales.dim() == 2 &&
                      scales.size(0) == groups && scales.size(1) == codes.size(0) * kTile &&
                      scales.get_device_index() == codes.get_device_index(),
                  "weight_only: scales must be a contiguous float32 tensor of shape (groups, outputs) on the card of the codes");
}

template <class Kernel>
void launch(Kernel kernel, const Arguments& args, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  const int64_t tiles = args.padded / kTile;
  config.gridDim = dim3(unsigned(tiles * args.cluster), unsigned((args.rows + kRows - 1) / kRows));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(args.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = args.cluster > 1 ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args);
  STD_TORCH_CHECK(error == cudaSuccess, "weight_only: the launch failed: ", cudaGetErrorString(error));
}

template <class T, class Out, int kBits, bool kInt8>
void run(const Arguments& args, cudaStream_t stream) {
  if (args.rows <= 8) {
    launch(linear_kernel<T, Out, kBits, 1, kInt8>, args, stream);
  } else {
    launch(linear_kernel<T, Out, kBits, 2, kInt8>, args, stream);
  }
}

int compute_capability(const Tensor& x) {
  int major = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device_index()));
  return major;
}

// So many blocks share a tile's inputs that about two of them run on each multiprocessor; earlier cards have no clusters.
int cluster_of(const Tensor& x, int64_t tiles, int64_t blocks) {
  int cluster = 1;
#if QSYNC_HAS_SM90A
  if (compute_capability(x) == 9) {
    const int64_t room = 2 * int64_t(multiprocessors());
    while (cluster < kMostCluster && tiles * cluster * 2 <= room && blocks >= 2 * cluster * kWarps) {
      cluster *= 2;
    }
  }
#endif
  return cluster;
}

Arguments arguments(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t group, int64_t outputs) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(1) == codes.size(1) * kTile &&
                      x.get_device_index() == codes.get_device_index(),
                  "weight_only: x must be a contiguous matrix of ", codes.size(1) * kTile, " columns on the card of the codes");
  STD_TORCH_CHECK(x.size(0) <= int64_t(kRows) * 65535, "weight_only: x has ", x.size(0), " rows; split it");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0, "weight_only: x must begin at a multiple of 16 bytes");
  STD_TORCH_CHECK(outputs > 0 && outputs <= codes.size(0) * kTile, "weight_only: ", outputs, " outputs do not fit the codes");
  STD_TORCH_CHECK(compute_capability(x) >= 8, "weight_only: the kernels need compute capability 8.0 or later");
  Arguments args = {};
  args.x = x.data_ptr();
  args.codes = static_cast<const uint8_t*>(codes.data_ptr());
  args.scales = static_cast<const float*>(scales.data_ptr());
  args.rows = x.size(0);
  args.outputs = outputs;
  args.padded = codes.size(0) * kTile;
  args.blocks = codes.size(1);
  args.group_blocks = int(group / kTile);
  args.cluster = cluster_of(x, codes.size(0), codes.size(1));
  return args;
}

Tensor linear_cuda(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t bits, int64_t group, int64_t outputs) {
  const OnDeviceOf guard(x);
  check_packed(codes, scales, bits, group);
  Arguments args = arguments(x, codes, scales, group, outputs);
  Tensor y = empty_on(x, {args.rows, outputs}, x.scalar_type());
  args.y = y.data_ptr();
  if (args.rows == 0) {
    return y;
  }
  const cudaStream_t stream = stream_of(x);
  const bool wide = bits == 8;
  if (x.scalar_type() == ScalarType::BFloat16) {
    wide ? run<__nv_bfloat16, __nv_bfloat16, 8, false>(args, stream) : run<__nv_bfloat16, __nv_bfloat16, 4, false>(args, stream);
  } else {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Half, "weight_only: x is of another type; allowed are bfloat16 and float16");
    wide ? run<__half, __half, 8, false>(args, stream) : run<__half, __half, 4, false>(args, stream);
  }
  return y;
}

Tensor linear_int8_cuda(const Tensor& x, const Tensor& x_scales, const Tensor& codes, const Tensor& scales, int64_t group,
                        int64_t outputs, ScalarType dtype) {
  const OnDeviceOf guard(x);
  check_packed(codes, scales, 4, group);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Char, "weight_only: x must hold int8 codes");
  STD_TORCH_CHECK(x_scales.scalar_type() == ScalarType::Float && x_scales.is_contiguous() && x_scales.numel() == x.size(0) &&
                      x_scales.get_device_index() == x.get_device_index(),
                  "weight_only: x_scales must be one float32 per row of x, on its card");
  Arguments args = arguments(x, codes, scales, group, outputs);
  args.x_scales = static_cast<const float*>(x_scales.data_ptr());
  Tensor y = empty_on(x, {args.rows, outputs}, dtype);
  args.y = y.data_ptr();
  if (args.rows == 0) {
    return y;
  }
  const cudaStream_t stream = stream_of(x);
  switch (dtype) {
    case ScalarType::BFloat16: run<__nv_bfloat16, __nv_bfloat16, 4, true>(args, stream); break;
    case ScalarType::Half: run<__half, __half, 4, true>(args, stream); break;
    case ScalarType::Float: run<__half, float, 4, true>(args, stream); break;
    default: STD_TORCH_CHECK(false, "weight_only: results are bfloat16, float16 or float32");
  }
  return y;
}

template <class Out>
void run_unpack(const Tensor& codes, const Tensor& scales, void* y, int64_t bits, int64_t group) {
  const int64_t blocks = codes.size(1), strips = codes.size(0) * blocks * kStrips;
  const auto* bytes = static_cast<const uint8_t*>(codes.data_ptr());
  const auto* factors = static_cast<const float*>(scales.data_ptr());
  const auto grid = unsigned((strips + kWarps - 1) / kWarps);
  auto* kernel = bits == 4 ? unpack_kernel<Out, 4> : unpack_kernel<Out, 8>;
  kernel<<<grid, kThreads, 0, stream_of(codes)>>>(bytes, factors, static_cast<Out*>(y), strips, blocks,
                                                   codes.size(0) * kTile, int(group / kTile));
  STD_CUDA_CHECK(cudaGetLastError());
}

Tensor unpack_cuda(const Tensor& codes, const Tensor& scales, int64_t bits, int64_t group, ScalarType dtype) {
  const OnDeviceOf guard(codes);
  check_packed(codes, scales, bits, group);
  Tensor y = empty_on(codes, {codes.size(0) * kTile, codes.size(1) * kTile}, dtype);
  switch (dtype) {
    case ScalarType::BFloat16: run_unpack<__nv_bfloat16>(codes, scales, y.data_ptr(), bits, group); break;
    case ScalarType::Half: run_unpack<__half>(codes, scales, y.data_ptr(), bits, group); break;
    case ScalarType::Float: run_unpack<float>(codes, scales, y.data_ptr(), bits, group); break;
    default: STD_TORCH_CHECK(false, "weight_only: results are bfloat16, float16 or float32");
  }
  return y;
}

void check_rotated(const Tensor& x, int64_t block) {
  STD_TORCH_CHECK(block == 64 || block == 128, "weight_only: block is ", block, "; allowed are 64 and 128");
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(1) % block == 0,
                  "weight_only: x must be a contiguous matrix whose columns are a multiple of ", block);
}

template <class T>
void run_rotate(const Tensor& x, void* y, int64_t block) {
  const int64_t blocks = x.numel() / block;
  auto* kernel = block == 128 ? rotate_kernel<4, T> : rotate_kernel<2, T>;
  kernel<<<unsigned((blocks + kWarps - 1) / kWarps), kThreads, 0, stream_of(x)>>>(static_cast<const T*>(x.data_ptr()),
                                                                                  static_cast<T*>(y), blocks);
  STD_CUDA_CHECK(cudaGetLastError());
}

Tensor rotate_cuda(const Tensor& x, int64_t block) {
  const OnDeviceOf guard(x);
  check_rotated(x, block);
  Tensor y = empty_on(x, {x.size(0), x.size(1)}, x.scalar_type());
  if (x.numel() == 0) {
    return y;
  }
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: run_rotate<__nv_bfloat16>(x, y.data_ptr(), block); break;
    case ScalarType::Half: run_rotate<__half>(x, y.data_ptr(), block); break;
    case ScalarType::Float: run_rotate<float>(x, y.data_ptr(), block); break;
    default: STD_TORCH_CHECK(false, "weight_only: x must be bfloat16, float16 or float32");
  }
  return y;
}

template <class T>
void run_rotate_int8(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t block) {
  auto* kernel = block == 128 ? rotate_int8_kernel<4, T> : rotate_int8_kernel<2, T>;
  kernel<<<unsigned(x.size(0)), 4 * kThreads, 0, stream_of(x)>>>(
      static_cast<const T*>(x.data_ptr()), static_cast<int8_t*>(codes.data_ptr()), static_cast<float*>(scales.data_ptr()),
      x.size(1) / block);
  STD_CUDA_CHECK(cudaGetLastError());
}

std::tuple<Tensor, Tensor> rotate_int8_cuda(const Tensor& x, int64_t block) {
  const OnDeviceOf guard(x);
  check_rotated(x, block);
  Tensor codes = empty_on(x, {x.size(0), x.size(1)}, ScalarType::Char);
  Tensor scales = empty_on(x, {x.size(0)}, ScalarType::Float);
  if (x.size(0) == 0) {
    return {codes, scales};
  }
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: run_rotate_int8<__nv_bfloat16>(x, codes, scales, block); break;
    case ScalarType::Half: run_rotate_int8<__half>(x, codes, scales, block); break;
    case ScalarType::Float: run_rotate_int8<float>(x, codes, scales, block); break;
    default: STD_TORCH_CHECK(false, "weight_only: x must be bfloat16, float16 or float32");
  }
  return {codes, scales};
}

}  // namespace
}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) {
  m.impl("weight_only_linear", TORCH_BOX(&qsync::linear_cuda));
  m.impl("weight_only_linear_int8", TORCH_BOX(&qsync::linear_int8_cuda));
  m.impl("weight_only_unpack", TORCH_BOX(&qsync::unpack_cuda));
  m.impl("weight_only_rotate", TORCH_BOX(&qsync::rotate_cuda));
  m.impl("weight_only_rotate_int8", TORCH_BOX(&qsync::rotate_int8_cuda));
}
