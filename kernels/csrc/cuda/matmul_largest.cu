// The largest magnitude of a product's results, where the product itself does not find it.
#include <algorithm>

#include "matmul_choice.h"
#include "matmul_epilogue.cuh"

namespace qsync::matmul {
namespace {

constexpr int kThreads = 256;

// Blocks walk over the results. Traffic: each result read once, one atomic per warp. Bits of magnitudes order them, NaN last.
__global__ void __launch_bounds__(kThreads) largest_kernel(const void* out, Float type, int64_t count, uint32_t* largest) {
  uint32_t bits = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    bits = max(bits, __float_as_uint(load_float(out, type, i)) & 0x7FFFFFFFu);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, step));
  }
  if (threadIdx.x % 32 == 0) {
    atomicMax(largest, bits);
  }
}

}  // namespace

Status find_largest(const Arguments& args) {
  const int64_t count = args.batch * args.rows * args.columns, needed = (count + kThreads - 1) / kThreads;
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(needed, int64_t{16} * std::max(1, args.multiprocessors)));
  largest_kernel<<<grid, kThreads, 0, args.stream>>>(args.out, args.out_float, count, args.largest);
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kLaunch;
}

}  // namespace qsync::matmul
