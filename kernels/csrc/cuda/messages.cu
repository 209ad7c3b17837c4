// Rows of embeddings as messages of 1, 2, 4, 8 or 16 bits, and back; the contract is kernels/messages/rows.py, bit for bit.
#include "stable.cuh"

namespace qsync {
namespace {

constexpr int kWarps = 8;
constexpr uint64_t kMessageGolden = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kMessageMultiplier = 0xD6E8FEB86659FD93ull;

__device__ __forceinline__ uint64_t random_word(uint64_t key, uint64_t entry) {
  uint64_t word = key + (entry + 1) * kMessageGolden;
  word = (word ^ (word >> 32)) * kMessageMultiplier;
  word = (word ^ (word >> 32)) * kMessageMultiplier;
  return word ^ (word >> 32);
}

__device__ __forceinline__ float uniform(uint64_t key, uint64_t entry) {
  return __fmul_rn(static_cast<float>(static_cast<uint32_t>(random_word(key, entry) >> 40)), 0x1p-24f);
}

// FP32 rounded to BF16 toward plus (up) or minus infinity.
__device__ __forceinline__ float bf16_toward(float value, bool up) {
  uint32_t raw = __float_as_uint(value);
  if (((raw >> 31) == 0) == up) raw += 0xFFFFu;
  return __uint_as_float(raw & 0xFFFF0000u);
}

__device__ __forceinline__ uint32_t code_of(float x, float zero, float step, float levels, float noise) {
  const float scaled = floorf(__fadd_rn(__fdiv_rn(__fsub_rn(x, zero), step), noise));
  return static_cast<uint32_t>(fminf(fmaxf(scaled, 0.0f), levels));
}

// Grid: one warp per row, kWarps rows per block.
// Traffic: each entry read twice (the second time from cache), each code written once.
// Contract: pack_rows, the same bytes; a row that is not finite has NaN as zero point and step, and codes 0.
template <int kBits>
__global__ void __launch_bounds__(32 * kWarps)
    pack_kernel(const float* x, const int64_t* index, int64_t rows, int64_t dim, int64_t row_bytes, uint64_t key, uint8_t* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  const float* source = x + index[row] * dim;
  float low = INFINITY, high = -INFINITY;
  bool bad = false;
  for (int64_t c = lane; c < dim; c += 32) {
    const float value = source[c];
    bad |= !isfinite(value);
    low = fminf(low, value);
    high = fmaxf(high, value);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    low = fminf(low, __shfl_xor_sync(0xFFFFFFFFu, low, offset));
    high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFu, high, offset));
  }
  bad = __any_sync(0xFFFFFFFFu, bad);
  constexpr float kLevels = (1 << kBits) - 1;
  float zero = bf16_toward(low, false);
  const float spread = __fsub_rn(high, zero);
  float step = bf16_toward(__fdiv_rn(spread, kLevels), true);
  bad = bad || !isfinite(spread) || !isfinite(step);
  uint8_t* target = out + row * row_bytes;
  if (lane == 0) {
    const uint32_t first = bad ? 0x7FC0u : __float_as_uint(zero) >> 16;
    const uint32_t second = bad ? 0x7FC0u : __float_as_uint(step) >> 16;
    target[0] = first & 0xFF;
    target[1] = first >> 8;
    target[2] = second & 0xFF;
    target[3] = second >> 8;
  }
  const bool constant = bad || !(step > 0.0f);
  const uint64_t start = static_cast<uint64_t>(row) * dim;
  if (dim * kBits % 32 == 0) {  // rows are multiples of four bytes: whole words
    constexpr int kPerWord = 32 / kBits;
    for (int64_t w = lane; w < dim / kPerWord; w += 32) {
      uint32_t word = 0;
      if (!constant) {
#pragma unroll
        for (int i = 0; i < kPerWord; ++i) {
          const int64_t c = w * kPerWord + i;
          word |= code_of(source[c], zero, step, kLevels, uniform(key, start + c)) << (i * kBits);
        }
      }
      *reinterpret_cast<uint32_t*>(target + 4 + 4 * w) = word;
    }
    return;
  }
  constexpr int kPerByte = 8 / kBits;
  for (int64_t b = lane; b < row_bytes - 4; b += 32) {
    uint32_t packed = 0;
    for (int i = 0; i < kPerByte; ++i) {
      const int64_t c = b * kPerByte + i;
      if (c < dim && !constant) packed |= code_of(source[c], zero, step, kLevels, uniform(key, start + c)) << (i * kBits);
    }
    target[4 + b] = static_cast<uint8_t>(packed);
  }
}

// Grid: one warp per row, kWarps rows per block.
// Traffic: each entry read once, each BF16 number written once.
// Contract: pack_rows with 16 bits, the same bytes; an entry that is not finite is NaN.
__global__ void __launch_bounds__(32 * kWarps)
    pack_bf16_kernel(const float* x, const int64_t* index, int64_t rows, int64_t dim, uint64_t key, uint16_t* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const float* source = x + index[row] * dim;
  const uint64_t start = static_cast<uint64_t>(row) * dim;
  for (int64_t c = threadIdx.x % 32; c < dim; c += 32) {
    const float value = source[c];
    const uint32_t noise = static_cast<uint32_t>(random_word(key, start + c) >> 48);
    out[start + c] = static_cast<uint16_t>(isfinite(value) ? (__float_as_uint(value) + noise) >> 16 : 0x7FC0u);
  }
}

// Grid: one warp per row, kWarps rows per block.
// Traffic: each BF16 number read once, each entry written once.
// Contract: unpack_rows with 16 bits.
__global__ void __launch_bounds__(32 * kWarps)
    unpack_bf16_kernel(const uint16_t* wire, const int64_t* index, int64_t rows, int64_t dim, float* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  float* target = out + index[row] * dim;
  for (int64_t c = threadIdx.x % 32; c < dim; c += 32) {
    target[c] = __uint_as_float(static_cast<uint32_t>(wire[row * dim + c]) << 16);
  }
}

// Grid: one warp per row, kWarps rows per block.
// Traffic: each code read once, each entry written once.
// Contract: unpack_rows: code x step + zero, rounded after each of the two operations.
template <int kBits>
__global__ void __launch_bounds__(32 * kWarps)
    unpack_kernel(const uint8_t* wire, const int64_t* index, int64_t rows, int64_t dim, int64_t row_bytes, float* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const uint8_t* source = wire + row * row_bytes;
  const float zero = __uint_as_float((source[0] | (uint32_t(source[1]) << 8)) << 16);
  const float step = __uint_as_float((source[2] | (uint32_t(source[3]) << 8)) << 16);
  float* target = out + index[row] * dim;
  constexpr int kPerByte = 8 / kBits;
  for (int64_t c = threadIdx.x % 32; c < dim; c += 32) {
    const uint32_t code = (source[4 + c / kPerByte] >> (c % kPerByte * kBits)) & ((1 << kBits) - 1);
    target[c] = __fadd_rn(__fmul_rn(static_cast<float>(code), step), zero);
  }
}

unsigned blocks_of(int64_t rows) { return static_cast<unsigned>((rows + kWarps - 1) / kWarps); }

}  // namespace

Tensor pack_rows(const Tensor& x, const Tensor& index, int64_t bits, int64_t key) {
  STD_TORCH_CHECK(index.is_cuda() && index.get_device_index() == x.get_device_index(), "index must be on the rows' card");
  OnDeviceOf guard(x);
  const int64_t rows = index.size(0), dim = x.size(1), row_bytes = bits == 16 ? 2 * dim : 4 + (dim * bits + 7) / 8;
  Tensor out = empty_on(x, {rows, row_bytes}, ScalarType::Byte);
  if (rows == 0 || dim == 0) return out;
  const auto launch = [&](auto kernel) {
    kernel<<<blocks_of(rows), 32 * kWarps, 0, stream_of(x)>>>(
        static_cast<const float*>(x.data_ptr()), static_cast<const int64_t*>(index.data_ptr()), rows, dim, row_bytes,
        static_cast<uint64_t>(key), static_cast<uint8_t*>(out.data_ptr()));
  };
  switch (bits) {
    case 1: launch(pack_kernel<1>); break;
    case 2: launch(pack_kernel<2>); break;
    case 4: launch(pack_kernel<4>); break;
    case 8: launch(pack_kernel<8>); break;
    case 16:
      pack_bf16_kernel<<<blocks_of(rows), 32 * kWarps, 0, stream_of(x)>>>(
          static_cast<const float*>(x.data_ptr()), static_cast<const int64_t*>(index.data_ptr()), rows, dim,
          static_cast<uint64_t>(key), static_cast<uint16_t*>(out.data_ptr()));
      break;
    default: STD_TORCH_CHECK(false, "width is ", bits, " bits, but 1, 2, 4, 8 and 16 are packed");
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

void unpack_rows(const Tensor& wire, const Tensor& index, const Tensor& out, int64_t bits) {
  STD_TORCH_CHECK(wire.is_cuda() && index.is_cuda(), "packed rows and index must be on the card");
  OnDeviceOf guard(out);
  const int64_t rows = index.size(0), dim = out.size(1), row_bytes = 4 + (dim * bits + 7) / 8;
  if (rows == 0 || dim == 0) return;
  const auto launch = [&](auto kernel) {
    kernel<<<blocks_of(rows), 32 * kWarps, 0, stream_of(out)>>>(
        static_cast<const uint8_t*>(wire.data_ptr()), static_cast<const int64_t*>(index.data_ptr()), rows, dim, row_bytes,
        static_cast<float*>(out.data_ptr()));
  };
  switch (bits) {
    case 1: launch(unpack_kernel<1>); break;
    case 2: launch(unpack_kernel<2>); break;
    case 4: launch(unpack_kernel<4>); break;
    case 8: launch(unpack_kernel<8>); break;
    case 16:
      unpack_bf16_kernel<<<blocks_of(rows), 32 * kWarps, 0, stream_of(out)>>>(
          static_cast<const uint16_t*>(wire.data_ptr()), static_cast<const int64_t*>(index.data_ptr()), rows, dim,
          static_cast<float*>(out.data_ptr()));
      break;
    default: STD_TORCH_CHECK(false, "width is ", bits, " bits, but 1, 2, 4, 8 and 16 are packed");
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) {
  m.impl("pack_rows", TORCH_BOX(&qsync::pack_rows));
  m.impl("unpack_rows", TORCH_BOX(&qsync::unpack_rows));
}
