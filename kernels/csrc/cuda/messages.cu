// Rows of embeddings as messages of 1, 2, 4, 8 or 16 bits, and back; the contract is kernels/messages/rows.py, bit for bit.
#include <algorithm>
#include <type_traits>

#include "cuda/random_words.cuh"
#include "stable.cuh"

namespace qsync {
namespace {

constexpr int kWarps = 8;
constexpr int kKept = 4;    // pieces of four entries that a lane keeps between its two passes over a row
constexpr int kSpread = 5;  // pieces of a lane that are on their way at a time, where a row begins within a line of the cache

// Word `number` of a stream of messages, which begin with the second counter of their key.
__device__ __forceinline__ uint64_t message_word(uint64_t key, uint64_t number) {
  return random_word(counter(key, number + 1));
}

// The 16 random bits of an entry: its quarter of a word, the lowest first.
__device__ __forceinline__ uint32_t quarter_of(uint64_t word, int part) {
  return static_cast<uint32_t>(word >> (16 * part)) & 0xFFFFu;
}

__device__ __forceinline__ float least(float a, float b) {  // NaN if one is NaN
#if __CUDA_ARCH__ >= 800
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return isnan(a) ? a : isnan(b) ? b : fminf(a, b);
#endif
}

__device__ __forceinline__ float most(float a, float b) { return -least(-a, -b); }

// FP32 rounded to BF16 toward plus (up) or minus infinity.
__device__ __forceinline__ float bf16_toward(float value, bool up) {
  uint32_t raw = __float_as_uint(value);
  if (((raw >> 31) == 0) == up) raw += 0xFFFFu;
  return __uint_as_float(raw & 0xFFFF0000u);
}

// What rounding a row takes; of a row that has one value or is not finite, all codes are 0.
struct Range {
  float zero, step, inverse, most;
  bool bad, ordinary;

  __device__ __forceinline__ Range(float low, float high, float levels) {
    zero = bf16_toward(low, false);
    const float spread = __fsub_rn(high, zero);
    step = bf16_toward(__fdiv_rn(spread, levels), true);
    bad = !isfinite(spread) || !isfinite(step);
    const bool constant = bad || !(step > 0.0f);
    ordinary = constant || (step > 0x1p-60f && step < 0x1p60f);
    inverse = constant ? 0.0f : __frcp_rn(step);
    most = constant ? 0.0f : levels;
  }

  // By the reciprocal of a step of ordinary size and one correction, which rounds a quotient by a BF16 number as a division
  // does: tried for all 2**30 pairs of mantissas. Quotients so small that the correction is lost do not show in a code.
  template <int kBits>
  __device__ __forceinline__ uint32_t code(float x, uint32_t random) const {
    const float above = __fsub_rn(x, zero), quotient = __fmul_rn(above, inverse);
    return rounded<kBits>(__fmaf_rn(__fmaf_rn(-quotient, step, above), inverse, quotient), random);
  }

  // By a division.
  template <int kBits>
  __device__ __forceinline__ uint32_t code_of_any(float x, uint32_t random) const {
    return rounded<kBits>(__fdiv_rn(__fsub_rn(x, zero), step), random);
  }

  // Quotients are never below 0, as the zero point is rounded down; of NaN the code is 0, as `most` is then. The noise is an
  // odd multiple of 2**-16, so exact: rounded as if it were added.
  template <int kBits>
  __device__ __forceinline__ uint32_t rounded(float quotient, uint32_t random) const {
    const float sum = __fmaf_rn(static_cast<float>(random | 1u), 0x1p-16f, quotient);
    if constexpr (kBits == 1) return sum >= 1.0f ? 1u : 0u;
    return __float2uint_rz(fminf(sum, most));
  }

  // The first four bytes of a message, one from each of four lanes.
  __device__ __forceinline__ uint8_t header(int byte) const {
    const uint32_t half = bad ? 0x7FC0u : __float_as_uint(byte < 2 ? zero : step) >> 16;
    return static_cast<uint8_t>(half >> (8 * (byte % 2)));
  }
};

// Least and largest entry; NaN if there is one.
struct Extent {
  float low = INFINITY, high = -INFINITY;

  __device__ __forceinline__ void add(float value) {
    low = least(low, value);
    high = most(high, value);
  }

  template <int kLanes>
  __device__ __forceinline__ Range over(float levels) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      low = least(low, __shfl_xor_sync(0xFFFFFFFFu, low, offset));
      high = most(high, __shfl_xor_sync(0xFFFFFFFFu, high, offset));
    }
    return Range(low, high, levels);
  }
};

// pack_rows() for rows of whole fours of entries from 16 bytes on. Grid: kLanes lanes per row, 32 / kLanes * kWarps rows per
// block. Traffic: each entry read once (those past 4 * kKept of a lane twice), each code written once.
template <int kBits, int kLanes>
__global__ void __launch_bounds__(32 * kWarps)
    pack_pieces_kernel(const float* x, const int64_t* index, int64_t rows, int pieces, int64_t row_bytes, uint64_t key,
                       uint8_t* out) {
  const int lane = threadIdx.x % kLanes;
  const int64_t own = (static_cast<int64_t>(blockIdx.x) * (32 * kWarps) + threadIdx.x) / kLanes;
  const int64_t row = own < rows ? own : rows - 1;  // lanes without a row help the others of their warp
  const int there = own < rows ? pieces : 0;
  const float4* source = reinterpret_cast<const float4*>(x) + __ldg(index + row) * pieces;
  float4 kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i] = lane + i * kLanes < pieces ? __ldg(source + lane + i * kLanes) : __ldg(source);
  }
  Extent extent;
  const auto add = [&](float4 v) {
    extent.add(v.x);
    extent.add(v.y);
    extent.add(v.z);
    extent.add(v.w);
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) add(kept[i]);  // what is there twice changes nothing
  for (int piece = lane + kKept * kLanes; piece < pieces; piece += kLanes) add(__ldg(source + piece));
  const Range range = extent.over<kLanes>((1 << kBits) - 1);
  uint8_t* target = out + row * row_bytes;
  if (there > 0 && lane < 4) target[lane] = range.header(lane);
  target += 4;
  const auto write = [&](int piece, float4 v, auto code) {
    const uint64_t word = message_word(key, static_cast<uint64_t>(row) * pieces + piece);
    uint32_t codes = code(v.x, quarter_of(word, 0)) | code(v.y, quarter_of(word, 1)) << kBits |
                     code(v.z, quarter_of(word, 2)) << (2 * kBits) | code(v.w, quarter_of(word, 3)) << (3 * kBits);
    if constexpr (kBits == 1) {  // pairs of lanes write a byte together
      const uint32_t next = __shfl_down_sync(0xFFFFFFFFu, codes, 1);
      if (piece + 1 < pieces) codes |= next << 4;
    }
    if (piece >= there) return;
    if constexpr (kBits == 8) *reinterpret_cast<uint32_t*>(target + 4 * piece) = codes;
    if constexpr (kBits == 4) *reinterpret_cast<uint16_t*>(target + 2 * piece) = static_cast<uint16_t>(codes);
    if constexpr (kBits == 2) target[piece] = static_cast<uint8_t>(codes);
    if (kBits == 1 && piece % 2 == 0) target[piece / 2] = static_cast<uint8_t>(codes);
  };
  const auto fast = [&](float value, uint32_t random) { return range.code<kBits>(value, random); };
  const auto any = [&](float value, uint32_t random) {
    return range.ordinary ? range.code<kBits>(value, random) : range.code_of_any<kBits>(value, random);
  };
  const bool ordinary = __all_sync(0xFFFFFFFFu, range.ordinary);
  if (ordinary) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (i * kLanes < pieces) write(lane + i * kLanes, kept[i], fast);
    }
  }
  for (int first = ordinary ? kKept * kLanes : 0; first < pieces; first += kLanes) {
    const int piece = first + lane;
    write(piece, __ldg(source + min(piece, pieces - 1)), any);
  }
}

// The first piece of this lane, so that what the lanes of a row write at a time begins on a line of the cache; it may be
// before the row.
template <int kLanes>
__device__ __forceinline__ int first_piece(const float4* row) {
  constexpr int kLine = kLanes < 8 ? kLanes : 8;
  return static_cast<int>(threadIdx.x % kLanes) - static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(float4) % kLine);
}

__device__ __forceinline__ bool is_piece(int piece, int pieces) {
  return static_cast<unsigned>(piece) < static_cast<unsigned>(pieces);
}

// unpack_rows() for such rows. Grid: as above. Traffic: each code read once, each entry written once.
template <int kBits, int kLanes>
__global__ void __launch_bounds__(32 * kWarps)
    unpack_pieces_kernel(const uint8_t* wire, const int64_t* index, int64_t rows, int pieces, int64_t row_bytes, float* out) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * (32 * kWarps) + threadIdx.x) / kLanes;
  if (row >= rows) return;
  const uint8_t* source = wire + row * row_bytes;
  float4* target = reinterpret_cast<float4*>(out) + __ldg(index + row) * pieces;
  uint32_t header;
  if (row_bytes % 4 == 0) {
    header = __ldg(reinterpret_cast<const uint32_t*>(source));
  } else {
    header = 0;
    for (int byte = 0; byte < 4; ++byte) header |= uint32_t(__ldg(source + byte)) << (8 * byte);
  }
  source += 4;
  const auto load = [&](int piece) -> uint32_t {
    if constexpr (kBits == 8) return __ldg(reinterpret_cast<const uint32_t*>(source + 4 * piece));
    if constexpr (kBits == 4) return __ldg(reinterpret_cast<const uint16_t*>(source + 2 * piece));
    if constexpr (kBits == 2) return __ldg(source + piece);
    return __ldg(source + piece / 2) >> (4 * (piece % 2));
  };
  const float zero = __uint_as_float(header << 16), step = __uint_as_float(header & 0xFFFF0000u);
  for (int first = first_piece<kLanes>(target); first < pieces; first += kSpread * kLanes) {
    uint32_t codes[kSpread];
#pragma unroll
    for (int i = 0; i < kSpread; ++i) codes[i] = is_piece(first + i * kLanes, pieces) ? load(first + i * kLanes) : 0;
#pragma unroll
    for (int i = 0; i < kSpread; ++i) {
      const auto value = [&](int part) {
        return __fadd_rn(__fmul_rn(static_cast<float>((codes[i] >> (part * kBits)) & ((1u << kBits) - 1)), step), zero);
      };
      if (!is_piece(first + i * kLanes, pieces)) continue;
      target[first + i * kLanes] = make_float4(value(0), value(1), value(2), value(3));
    }
  }
}

// Grid: one warp per row, kWarps rows per block.
// Traffic: each entry read twice (the second time from cache), each code written once.
// Contract: pack_rows, the same bytes; a row that is not finite has NaN as zero point and step, and codes 0.
template <int kBits>
__global__ void __launch_bounds__(32 * kWarps)
    pack_kernel(const float* x, const int64_t* index, int64_t rows, int64_t dim, int64_t row_bytes, uint64_t key,
                uint8_t* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  const float* source = x + index[row] * dim;
  constexpr float kLevels = (1 << kBits) - 1;
  Extent extent;
  for (int64_t c = lane; c < dim; c += 32) extent.add(source[c]);
  const Range range = extent.over<32>(kLevels);
  uint8_t* target = out + row * row_bytes;
  if (lane < 4) target[lane] = range.header(lane);
  const uint64_t start = static_cast<uint64_t>(row) * dim;
  constexpr int kPerByte = 8 / kBits;
  for (int64_t b = lane; b < row_bytes - 4; b += 32) {
    uint32_t packed = 0;
    for (int i = 0; i < kPerByte; ++i) {
      const int64_t c = b * kPerByte + i;
      if (c >= dim || range.most == 0.0f) continue;
      const uint64_t entry = start + c;
      packed |= range.code_of_any<kBits>(source[c], quarter_of(message_word(key, entry / 4), entry % 4)) << (i * kBits);
    }
    target[4 + b] = static_cast<uint8_t>(packed);
  }
}

__device__ __forceinline__ uint16_t rounded_half(float value, uint32_t noise) {
  return static_cast<uint16_t>(isfinite(value) ? (__float_as_uint(value) + noise) >> 16 : 0x7FC0u);
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
    const uint32_t noise = quarter_of(message_word(key, (start + c) / 4), (start + c) % 4);
    out[start + c] = rounded_half(value, noise);
  }
}

// The same for rows of whole fours of entries from 16 bytes on. Grid: as pack_pieces_kernel.
template <int kLanes>
__global__ void __launch_bounds__(32 * kWarps)
    pack_bf16_pieces_kernel(const float* x, const int64_t* index, int64_t rows, int pieces, uint64_t key, ushort4* out) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * (32 * kWarps) + threadIdx.x) / kLanes;
  if (row >= rows) return;
  const float4* source = reinterpret_cast<const float4*>(x) + __ldg(index + row) * pieces;
#pragma unroll 4
  for (int piece = threadIdx.x % kLanes; piece < pieces; piece += kLanes) {
    const float4 v = __ldg(source + piece);
    const uint64_t word = message_word(key, row * pieces + piece);
    out[row * pieces + piece] = {rounded_half(v.x, quarter_of(word, 0)), rounded_half(v.y, quarter_of(word, 1)),
                                 rounded_half(v.z, quarter_of(word, 2)), rounded_half(v.w, quarter_of(word, 3))};
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

// The same for rows of whole fours of entries from 16 bytes on. Grid: as pack_pieces_kernel.
template <int kLanes>
__global__ void __launch_bounds__(32 * kWarps)
    unpack_bf16_pieces_kernel(const ushort4* wire, const int64_t* index, int64_t rows, int pieces, float* out) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * (32 * kWarps) + threadIdx.x) / kLanes;
  if (row >= rows) return;
  float4* target = reinterpret_cast<float4*>(out) + __ldg(index + row) * pieces;
  const auto value = [](uint16_t half) { return __uint_as_float(static_cast<uint32_t>(half) << 16); };
  for (int first = first_piece<kLanes>(target); first < pieces; first += kSpread * kLanes) {
    ushort4 v[kSpread];
#pragma unroll
    for (int i = 0; i < kSpread; ++i) {
      if (is_piece(first + i * kLanes, pieces)) v[i] = __ldg(wire + row * pieces + first + i * kLanes);
    }
#pragma unroll
    for (int i = 0; i < kSpread; ++i) {
      if (!is_piece(first + i * kLanes, pieces)) continue;
      target[first + i * kLanes] = make_float4(value(v[i].x), value(v[i].y), value(v[i].z), value(v[i].w));
    }
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

unsigned blocks_of(int64_t rows, int per_warp = 1) {
  return static_cast<unsigned>((rows + kWarps * per_warp - 1) / (kWarps * per_warp));
}

bool starts_on(const Tensor& x, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % bytes == 0; }

// Calls what it is given with the width and with the lanes of a row as constants; no lanes (0) for rows that are not whole
// fours of entries. So many lanes that each has kKept pieces of four entries, where a warp suffices for that.
template <class Launch>
void by_width(int64_t bits, int64_t dim, bool aligned, Launch launch) {
  const auto by_lanes = [&](auto width) {
    using std::integral_constant;
    if (dim % 4 != 0 || !aligned || dim > (1 << 30)) return launch(width, integral_constant<int, 0>{});
    if (dim <= 4 * kKept * 4) return launch(width, integral_constant<int, 4>{});
    if (dim <= 4 * kKept * 8) return launch(width, integral_constant<int, 8>{});
    if (dim <= 4 * kKept * 16) return launch(width, integral_constant<int, 16>{});
    return launch(width, integral_constant<int, 32>{});
  };
  switch (bits) {
    case 1: return by_lanes(std::integral_constant<int, 1>{});
    case 2: return by_lanes(std::integral_constant<int, 2>{});
    case 4: return by_lanes(std::integral_constant<int, 4>{});
    case 8: return by_lanes(std::integral_constant<int, 8>{});
    case 16: return by_lanes(std::integral_constant<int, 16>{});
    default: STD_TORCH_CHECK(false, "width is ", bits, " bits, but 1, 2, 4, 8 and 16 are packed");
  }
}

}  // namespace

Tensor pack_rows(const Tensor& x, const Tensor& index, int64_t bits, int64_t key) {
  STD_TORCH_CHECK(index.is_cuda() && index.get_device_index() == x.get_device_index(), "index must be on the rows' card");
  OnDeviceOf guard(x);
  const int64_t rows = index.size(0), dim = x.size(1), row_bytes = bits == 16 ? 2 * dim : 4 + (dim * bits + 7) / 8;
  Tensor out = empty_on(x, {rows, row_bytes}, ScalarType::Byte);
  if (rows == 0 || dim == 0) return out;
  const float* source = static_cast<const float*>(x.const_data_ptr());
  const int64_t* which = static_cast<const int64_t*>(index.const_data_ptr());
  void* wire = out.mutable_data_ptr();
  const uint64_t words = static_cast<uint64_t>(key);
  const cudaStream_t stream = stream_of(x);
  by_width(bits, dim, starts_on(x, 16), [&](auto width, auto lanes) {
    constexpr int kBits = width(), kLanes = lanes();
    const unsigned grid = blocks_of(rows, kLanes == 0 ? 1 : 32 / std::max(kLanes, 1));
    if constexpr (kBits == 16 && kLanes == 0) {
      pack_bf16_kernel<<<grid, 32 * kWarps, 0, stream>>>(source, which, rows, dim, words, static_cast<uint16_t*>(wire));
    } else if constexpr (kBits == 16) {
      pack_bf16_pieces_kernel<kLanes>
          <<<grid, 32 * kWarps, 0, stream>>>(source, which, rows, dim / 4, words, static_cast<ushort4*>(wire));
    } else if constexpr (kLanes == 0) {
      pack_kernel<kBits>
          <<<grid, 32 * kWarps, 0, stream>>>(source, which, rows, dim, row_bytes, words, static_cast<uint8_t*>(wire));
    } else {
      pack_pieces_kernel<kBits, kLanes>
          <<<grid, 32 * kWarps, 0, stream>>>(source, which, rows, dim / 4, row_bytes, words, static_cast<uint8_t*>(wire));
    }
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

void unpack_rows(const Tensor& wire, const Tensor& index, const Tensor& out, int64_t bits) {
  STD_TORCH_CHECK(wire.is_cuda() && index.is_cuda(), "packed rows and index must be on the card");
  OnDeviceOf guard(out);
  const int64_t rows = index.size(0), dim = out.size(1), row_bytes = 4 + (dim * bits + 7) / 8;
  if (rows == 0 || dim == 0) return;
  const void* source = wire.const_data_ptr();
  const int64_t* which = static_cast<const int64_t*>(index.const_data_ptr());
  float* target = static_cast<float*>(out.mutable_data_ptr());
  const cudaStream_t stream = stream_of(out);
  by_width(bits, dim, starts_on(out, 16) && starts_on(wire, 8), [&](auto width, auto lanes) {
    constexpr int kBits = width(), kLanes = lanes();
    const unsigned grid = blocks_of(rows, kLanes == 0 ? 1 : 32 / std::max(kLanes, 1));
    if constexpr (kBits == 16 && kLanes == 0) {
      unpack_bf16_kernel<<<grid, 32 * kWarps, 0, stream>>>(static_cast<const uint16_t*>(source), which, rows, dim, target);
    } else if constexpr (kBits == 16) {
      unpack_bf16_pieces_kernel<kLanes>
          <<<grid, 32 * kWarps, 0, stream>>>(static_cast<const ushort4*>(source), which, rows, dim / 4, target);
    } else if constexpr (kLanes == 0) {
      unpack_kernel<kBits>
          <<<grid, 32 * kWarps, 0, stream>>>(static_cast<const uint8_t*>(source), which, rows, dim, row_bytes, target);
    } else {
      unpack_pieces_kernel<kBits, kLanes>
          <<<grid, 32 * kWarps, 0, stream>>>(static_cast<const uint8_t*>(source), which, rows, dim / 4, row_bytes, target);
    }
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) {
  m.impl("pack_rows", TORCH_BOX(&qsync::pack_rows));
  m.impl("unpack_rows", TORCH_BOX(&qsync::unpack_rows));
}
