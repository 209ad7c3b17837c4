// The largest magnitude of a product's results, where the product itself does not find it.
#include <algorithm>

#include "matmul_choice.h"
#include "matmul_epilogue.cuh"

namespace qsync::matmul {
namespace {

constexpr int kThreads = 256;

// Magnitudes of 16 bytes of results, as bits of a float. Bits order magnitudes, NaN last.
__device__ __forceinline__ uint32_t largest_bits(const uint4& raw, Float type) {
  if (type == Float::kFP32) {
    constexpr uint32_t kMask = 0x7FFFFFFFu;
    return max(max(raw.x & kMask, raw.y & kMask), max(raw.z & kMask, raw.w & kMask));
  }
  constexpr uint32_t kMask = 0x7FFF7FFFu;
  const uint32_t both = __vmaxu2(__vmaxu2(raw.x & kMask, raw.y & kMask), __vmaxu2(raw.z & kMask, raw.w & kMask));
  const uint32_t one = max(both & 0xFFFFu, both >> 16);
  return type == Float::kBF16 ? one << 16 : __float_as_uint(__half2float(__ushort_as_half(static_cast<unsigned short>(one))));
}

// Blocks walk over the results, 16 bytes at a time; what fills no 16 bytes one by one. Traffic: each result read
// once, one atomic per warp.
__global__ void __launch_bounds__(kThreads) largest_kernel(const void* out, Float type, int64_t count, uint32_t* largest) {
  const int each = type == Float::kFP32 ? 4 : 8;
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0;
  const int64_t packs = aligned ? count / each : 0, step = int64_t{gridDim.x} * kThreads;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  uint32_t bits = 0;
#pragma unroll 4
  for (int64_t i = first; i < packs; i += step) {
    bits = max(bits, largest_bits(static_cast<const uint4*>(out)[i], type));
  }
  for (int64_t i = packs * each + first; i < count; i += step) {
    bits = max(bits, __float_as_uint(load_float(out, type, i)) & 0x7FFFFFFFu);
  }
#pragma unroll
  for (int step_down = 16; step_down > 0; step_down /= 2) {
    bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, step_down));
  }
  if (threadIdx.x % 32 == 0) {
    atomicMax(largest, bits);
  }
}

}  // namespace

Status find_largest(const Arguments& args) {
  const int64_t count = args.batch * args.rows * args.columns, needed = (count + 8 * kThreads - 1) / (8 * kThreads);
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(needed, int64_t{16} * std::max(1, args.multiprocessors)));
  largest_kernel<<<grid, kThreads, 0, args.stream>>>(args.out, args.out_float, count, args.largest);
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kLaunch;
}

}  // namespace qsync::matmul
