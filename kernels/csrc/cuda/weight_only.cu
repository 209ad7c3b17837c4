// Products of activations and packed 4- or 8-bit weights: W4A16, W8A16 and W4A8 for few rows, and unpacking for many;
// Hadamard rotations of activations, alone and with rounding to INT8 or FP8.
//
// Layout of the codes: tiles of 64 outputs by 64 inputs, (outputs / 64, inputs / 64, 4, bits / 4, 32, 16 bytes). A lane
// of a warp reads 16 bytes that are the operand A of tensor core products for 16 outputs; which inputs these are is
// chosen so that the lane's activations are contiguous too: lane (g, t) has outputs g and g + 8 and inputs 16 t to
// 16 t + 15, four for each of the steps s. kernels/weight_only/layout.py is the specification.
#include <algorithm>

#include "cuda/hadamard.cuh"
#include "cuda/rounding.cuh"
#include "cuda/weight_only_linear.cuh"
#include "stable.cuh"

namespace qsync {
namespace {

constexpr int kPlainWarps = 8;  // of a block of threads in kernels whose warps have nothing to do with each other
// Of a Hopper multiprocessor's shared memory. Blocks of threads that start early ask for it: else multiprocessors that end first
// would get two of the next kernel's, and others none.
constexpr int kMoreThanHalf = 118 * 1024;

// Of a block of threads on the current card.
int most_shared_bytes() {
  int device = 0, bytes = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

// Grid: a warp per strip of 16 outputs by 64 inputs, of whose rows four lanes write whole lines, 16 bytes at a time. Traffic:
// codes once, results once. Contract: code times scale in FP32, rounded once.
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
    words[q] = __ldcs(reinterpret_cast<const uint4*>(at + q * 512));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = scales[block / group_blocks * padded + output + 8 * half];
    alignas(16) Out values[16];
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
        store(values + 4 * s + k, float(int(code) - kZero) * scale);
      }
    }
    uint4* to = reinterpret_cast<uint4*>(y + ((output + 8 * half) * blocks + block) * kTile + t * 16);
#pragma unroll
    for (int q = 0; q < int(sizeof(values) / sizeof(uint4)); ++q) {
      to[q] = reinterpret_cast<const uint4*>(values)[q];
    }
  }
}

// A lane's kCount consecutive inputs of a rotated block of 32 kCount.
template <int kCount, class T>
__device__ __forceinline__ void load_rotated(const T* x, int lane, float (&v)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    v[k] = to_float(x[lane * kCount + k]);
  }
  rotate_block(v, 32);
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
template <int kCount, class T, Format kFormat>
__global__ void rotate_and_round_kernel(const T* x, uint8_t* codes, float* scales, int64_t blocks) {
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
  const float scale = scale_of<kFormat>(__uint_as_float(bits));
  const float factor = factor_of<kFormat, false>(scale);
  if (threadIdx.x == 0) {
    scales[row] = scale;
  }
  for (int64_t block = warp; block < blocks; block += warps) {
    float v[kCount];
    load_rotated<kCount>(x + first + block * 32 * kCount, lane, v);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      codes[first + block * 32 * kCount + lane * kCount + k] = uint8_t(round_one<kFormat, false>(__fmul_rn(v[k], factor), 0));
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

template <class T, class Out, int kBits, int kColumns, Inputs kInputs, bool kGated>
void launch(Arguments args, bool early, cudaStream_t stream) {
  const auto kernel = linear_kernel<T, Out, kBits, kColumns, kInputs, kGated>;
  if constexpr (kInputs == Inputs::kE4M3) {
    static const int version = [&] {  // of the code, which does not change
      cudaFuncAttributes code;
      STD_CUDA_CHECK(cudaFuncGetAttributes(&code, kernel));
      return code.ptxVersion;
    }();
    STD_TORCH_CHECK(version >= 89, "weight_only: products of FP8 need code for compute capability 8.9 or later, this is for ",
                    version / 10, ".", version % 10);
  }
  // How a weight is shared does not depend on the rows, which would change the order of sums.
  const int strips = int(args.padded / 16) / (kGated ? 2 : 1), most = most_shared_bytes();
  const auto shared_by = [&](int parts, int64_t rows) {
    const int of_one = (strips + parts - 1) / parts;
    return shared_bytes<kBits>(kGated ? of_one : (of_one + 1) / 2, rows);
  };
  args.steps = int((args.blocks + Slot<kBits>::kBlocks - 1) / Slot<kBits>::kBlocks);
  args.per_step = uint32_t(((uint64_t(1) << 32) + args.steps - 1) / args.steps);
  args.parts = std::min(strips, multiprocessors());
  while (shared_by(args.parts, kRows) > most) {  // of a vocabulary, say
    args.parts += multiprocessors();
  }
  const int shared = std::max(shared_by(args.parts, args.rows), early ? kMoreThanHalf : 0);
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  // The kernel may start while the ones before it end: it waits for what they compute itself.
  const auto grid = unsigned(args.parts * ((args.rows + kRows - 1) / kRows));
  const cudaError_t error = launch_early(early, kernel, dim3(grid), dim3(kThreads), shared, stream, args);
  STD_TORCH_CHECK(error == cudaSuccess, "weight_only: the launch failed: ", cudaGetErrorString(error));
}

template <class T, class Out, int kBits, Inputs kInputs, bool kGated = false>
void run(const Arguments& args, bool early, cudaStream_t stream) {
  args.rows <= 8 ? launch<T, Out, kBits, 1, kInputs, kGated>(args, early, stream)
                 : launch<T, Out, kBits, 2, kInputs, kGated>(args, early, stream);
}

Arguments arguments(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t group, int64_t outputs) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(1) == codes.size(1) * kTile &&
                      x.get_device_index() == codes.get_device_index(),
                  "weight_only: x must be a contiguous matrix of ", codes.size(1) * kTile, " columns on the card of the codes");
  STD_TORCH_CHECK(x.size(0) <= int64_t(kRows) * 65535, "weight_only: x has ", x.size(0), " rows; split it");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0, "weight_only: x must begin at a multiple of 16 bytes");
  STD_TORCH_CHECK(outputs > 0 && outputs <= codes.size(0) * kTile, "weight_only: ", outputs, " outputs do not fit the codes");
  STD_TORCH_CHECK(compute_capability(x) >= 8, "weight_only: the kernels need compute capability 8.0 or later");
  STD_TORCH_CHECK((reinterpret_cast<uintptr_t>(codes.data_ptr()) | reinterpret_cast<uintptr_t>(scales.data_ptr())) % 16 == 0,
                  "weight_only: codes and scales must begin at multiples of 16 bytes");
  Arguments args = {};
  args.x = x.data_ptr();
  args.codes = static_cast<const uint8_t*>(codes.data_ptr());
  args.scales = static_cast<const float*>(scales.data_ptr());
  args.rows = x.size(0);
  args.outputs = outputs;
  args.padded = codes.size(0) * kTile;
  args.blocks = codes.size(1);
  args.group_blocks = int(group / kTile);
  return args;
}

template <bool kGated>
void run_wide(const Arguments& args, int64_t bits, const Tensor& x) {
  const bool early = starts_early(compute_capability(x));
  const auto run_as = [&](auto number) {
    using T = decltype(number);
    bits == 8 ? run<T, T, 8, Inputs::kWide, kGated>(args, early, stream_of(x))
              : run<T, T, 4, Inputs::kWide, kGated>(args, early, stream_of(x));
  };
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: run_as(__nv_bfloat16()); break;
    case ScalarType::Half: run_as(__half()); break;
    default: STD_TORCH_CHECK(false, "weight_only: x is of another type; allowed are bfloat16 and float16");
  }
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
  run_wide<false>(args, bits, x);
  return y;
}

// As `linear_cuda`, the first half of the results gating the second.
Tensor linear_gated_cuda(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t bits, int64_t group, int64_t outputs,
                         bool by_gelu) {
  const OnDeviceOf guard(x);
  check_packed(codes, scales, bits, group);
  Arguments args = arguments(x, codes, scales, group, outputs);
  STD_TORCH_CHECK(outputs == args.padded, "weight_only: gated results need a multiple of ", kTile, " outputs, not ", outputs);
  Tensor y = empty_on(x, {args.rows, outputs / 2}, x.scalar_type());
  args.y = y.data_ptr();
  args.by_gelu = by_gelu;
  if (args.rows == 0) {
    return y;
  }
  run_wide<true>(args, bits, x);
  return y;
}

template <Inputs kInputs>
void run_rounded(const Arguments& args, ScalarType dtype, const Tensor& x) {
  const bool early = starts_early(compute_capability(x));
  switch (dtype) {
    case ScalarType::BFloat16: run<__half, __nv_bfloat16, 4, kInputs>(args, early, stream_of(x)); break;
    case ScalarType::Half: run<__half, __half, 4, kInputs>(args, early, stream_of(x)); break;
    default: STD_TORCH_CHECK(false, "weight_only: results are bfloat16 or float16");
  }
}

Tensor linear_rounded_cuda(const Tensor& x, const Tensor& x_scales, const Tensor& codes, const Tensor& scales, int64_t group,
                           int64_t outputs, ScalarType dtype) {
  const OnDeviceOf guard(x);
  check_packed(codes, scales, 4, group);
  const bool is_fp8 = x.scalar_type() == ScalarType::Float8_e4m3fn;
  STD_TORCH_CHECK(is_fp8 || x.scalar_type() == ScalarType::Char, "weight_only: x must hold int8 or float8_e4m3fn codes");
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
  is_fp8 ? run_rounded<Inputs::kE4M3>(args, dtype, x) : run_rounded<Inputs::kInt8>(args, dtype, x);
  return y;
}

template <class Out>
void run_unpack(const Tensor& codes, const Tensor& scales, void* y, int64_t bits, int64_t group) {
  const int64_t blocks = codes.size(1), strips = codes.size(0) * blocks * kStrips;
  const auto* bytes = static_cast<const uint8_t*>(codes.data_ptr());
  const auto* factors = static_cast<const float*>(scales.data_ptr());
  const auto grid = unsigned((strips + kPlainWarps - 1) / kPlainWarps);
  auto* kernel = bits == 4 ? unpack_kernel<Out, 4> : unpack_kernel<Out, 8>;
  kernel<<<grid, 32 * kPlainWarps, 0, stream_of(codes)>>>(bytes, factors, static_cast<Out*>(y), strips, blocks,
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
  kernel<<<unsigned((blocks + kPlainWarps - 1) / kPlainWarps), 32 * kPlainWarps, 0, stream_of(x)>>>(static_cast<const T*>(x.data_ptr()),
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

template <class T, Format kFormat>
void run_rotate_and_round(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t block) {
  auto* kernel = block == 128 ? rotate_and_round_kernel<4, T, kFormat> : rotate_and_round_kernel<2, T, kFormat>;
  kernel<<<unsigned(x.size(0)), 128 * kPlainWarps, 0, stream_of(x)>>>(
      static_cast<const T*>(x.data_ptr()), static_cast<uint8_t*>(codes.data_ptr()), static_cast<float*>(scales.data_ptr()),
      x.size(1) / block);
  STD_CUDA_CHECK(cudaGetLastError());
}

template <class T>
void run_rotate_and_round(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t block) {
  codes.scalar_type() == ScalarType::Char ? run_rotate_and_round<T, Format::kInt8>(x, codes, scales, block)
                                          : run_rotate_and_round<T, Format::kE4M3>(x, codes, scales, block);
}

std::tuple<Tensor, Tensor> rotate_and_round_cuda(const Tensor& x, int64_t block, ScalarType dtype) {
  const OnDeviceOf guard(x);
  check_rotated(x, block);
  STD_TORCH_CHECK(dtype == ScalarType::Char || dtype == ScalarType::Float8_e4m3fn,
                  "weight_only: codes are int8 or float8_e4m3fn");
  Tensor codes = empty_on(x, {x.size(0), x.size(1)}, dtype);
  Tensor scales = empty_on(x, {x.size(0)}, ScalarType::Float);
  if (x.size(0) == 0) {
    return {codes, scales};
  }
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: run_rotate_and_round<__nv_bfloat16>(x, codes, scales, block); break;
    case ScalarType::Half: run_rotate_and_round<__half>(x, codes, scales, block); break;
    case ScalarType::Float: run_rotate_and_round<float>(x, codes, scales, block); break;
    default: STD_TORCH_CHECK(false, "weight_only: x must be bfloat16, float16 or float32");
  }
  return {codes, scales};
}

}  // namespace
}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) {
  m.impl("weight_only_linear", TORCH_BOX(&qsync::linear_cuda));
  m.impl("weight_only_linear_gated", TORCH_BOX(&qsync::linear_gated_cuda));
  m.impl("weight_only_linear_rounded", TORCH_BOX(&qsync::linear_rounded_cuda));
  m.impl("weight_only_unpack", TORCH_BOX(&qsync::unpack_cuda));
  m.impl("weight_only_rotate", TORCH_BOX(&qsync::rotate_cuda));
  m.impl("weight_only_rotate_and_round", TORCH_BOX(&qsync::rotate_and_round_cuda));
}
