// The codec of compressed all-reduce. The contract of every kernel is the function of kernels/gradients/reference.py that it
// is named after, bit for bit: products, sums and quotients are rounded one by one, so they are written as intrinsics.
#include <cuda_bf16.h>

#include <algorithm>

#include "cuda/rounding.cuh"
#include "stable.cuh"

namespace qsync {
namespace {

constexpr int kThreads = 256;
constexpr int kBlock = 256;                   // elements that share a scale: eight of each lane of a warp
constexpr int kHalf = kBlock / 2;             // from a lane's first four elements of a block to its others
constexpr int kTogether = 4;                  // fours of elements of a thread that are on their way at a time
constexpr int kRun = kTogether * kHalf;       // elements of a warp
constexpr int kWarps = kThreads / 32;         // blocks of a CTA
constexpr float kSmallestScale = 0x1p-100f;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr int kPiece = 4096;                  // elements of one CTA where a scale belongs to other than kBlock elements

// Four elements from `e` on; those from `count` on are 0.
__device__ __forceinline__ float4 load4(const float* x, int64_t e, int64_t count, bool aligned) {
  if (aligned && e + 4 <= count) return __ldg(reinterpret_cast<const float4*>(x + e));
  float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
  if (e < count) v.x = x[e];
  if (e + 1 < count) v.y = x[e + 1];
  if (e + 2 < count) v.z = x[e + 2];
  if (e + 3 < count) v.w = x[e + 3];
  return v;
}

__device__ __forceinline__ void store4(float* out, int64_t e, int64_t count, bool aligned, float4 v) {
  if (aligned && e + 4 <= count) {
    *reinterpret_cast<float4*>(out + e) = v;
    return;
  }
  if (e < count) out[e] = v.x;
  if (e + 1 < count) out[e + 1] = v.y;
  if (e + 2 < count) out[e + 2] = v.z;
  if (e + 3 < count) out[e + 3] = v.w;
}

// Four codes, which are whole numbers of 8 or 16 bits.
template <class Code>
struct alignas(4 * sizeof(Code)) Codes {
  Code values[4];
};

template <class Code>
__device__ __forceinline__ void store4(Code* out, int64_t e, int64_t count, bool aligned, int4 c) {
  if (aligned && e + 4 <= count) {
    *reinterpret_cast<Codes<Code>*>(out + e) = {Code(c.x), Code(c.y), Code(c.z), Code(c.w)};
    return;
  }
  if (e < count) out[e] = Code(c.x);
  if (e + 1 < count) out[e + 1] = Code(c.y);
  if (e + 2 < count) out[e + 2] = Code(c.z);
  if (e + 3 < count) out[e + 3] = Code(c.w);
}

template <class Code>
__device__ __forceinline__ int4 load_codes(const Code* codes, int64_t e, int64_t count, bool aligned) {
  if (aligned && e + 4 <= count) {
    const Codes<Code> c = *reinterpret_cast<const Codes<Code>*>(codes + e);
    return {c.values[0], c.values[1], c.values[2], c.values[3]};
  }
  int4 c = {0, 0, 0, 0};
  if (e < count) c.x = codes[e];
  if (e + 1 < count) c.y = codes[e + 1];
  if (e + 2 < count) c.z = codes[e + 2];
  if (e + 3 < count) c.w = codes[e + 3];
  return c;
}

__device__ __forceinline__ uint32_t magnitude(float v) { return min(__float_as_uint(v) & 0x7fffffffu, kInfinity); }

__device__ __forceinline__ uint32_t magnitude(float4 v) {
  return max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
}

__device__ __forceinline__ float floored(uint32_t bits) {
  const float scale = __uint_as_float(bits);
  return scale > 0.0f && scale < kSmallestScale ? kSmallestScale : scale;
}

__device__ __forceinline__ uint16_t rounded_up(uint32_t bits) {
  return static_cast<uint16_t>((__float_as_uint(floored(bits)) + 0xffffu) >> 16);
}

__device__ __forceinline__ float inverse_of(float scale, float levels) {
  return scale > 0.0f && scale < __uint_as_float(kInfinity) ? __fdiv_rn(levels, scale) : 0.0f;
}

__device__ __forceinline__ float step_of(float scale, float levels) {
  return scale < __uint_as_float(kInfinity) ? __fdiv_rn(scale, levels) : __uint_as_float(0x7fc00000u);
}

__device__ __forceinline__ float scale_at(const uint16_t* scales, int64_t block) {
  return __uint_as_float(static_cast<uint32_t>(__ldg(scales + block)) << 16);
}

// round(x * inverse + noise), the noise an odd multiple of 2**-16.
__device__ __forceinline__ int code_of(float x, float inverse, float levels, uint32_t bits) {
  const float noise = static_cast<float>(static_cast<int16_t>(bits | 1u));
  const float y = __fmaf_rn(noise, 0x1p-16f, __fmul_rn(x, inverse));  // the noise is exact: rounded like a sum
  return __float2int_rn(fminf(fmaxf(y, -levels), levels));
}

__device__ __forceinline__ int4 codes_of(float4 v, float inverse, float levels, uint64_t key, int64_t e) {
  if (!(inverse > 0.0f)) return {0, 0, 0, 0};
  const uint64_t word = random_word(counter(key, static_cast<uint64_t>(e / 4)));
  return {code_of(v.x, inverse, levels, static_cast<uint32_t>(word) & 0xffffu),
          code_of(v.y, inverse, levels, static_cast<uint32_t>(word >> 16) & 0xffffu),
          code_of(v.z, inverse, levels, static_cast<uint32_t>(word >> 32) & 0xffffu),
          code_of(v.w, inverse, levels, static_cast<uint32_t>(word >> 48))};
}

// Elements that share a scale: of a power of two, what to shift by, for divisions of 64 bits take as long as a code.
struct Length {
  int64_t elements;
  int shift;

  explicit Length(int64_t elements) : elements(elements), shift(-1) {
    for (int bit = 0; bit < 63; ++bit) shift = elements == int64_t(1) << bit ? bit : shift;
  }

  __device__ __forceinline__ int64_t block_of(int64_t e) const { return shift >= 0 ? e >> shift : e / elements; }

  // Whether a warp's kBlock elements have one scale.
  __device__ __forceinline__ bool whole() const { return elements % kBlock == 0; }
};

// Of a warp that has so many elements, the first of this lane's fours; the next ones are kHalf apart.
template <int kElements>
__device__ __forceinline__ int64_t first_four() {
  return (int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * kElements + (threadIdx.x % 32) * 4;
}

// sum_scales() for blocks of kBlock. Grid: a warp per kRun elements. Traffic: each element read once.
__global__ void __launch_bounds__(kThreads)
    block_scales_kernel(const float* x, int64_t count, bool aligned, int64_t blocks, uint16_t* scales) {
  const int64_t first = first_four<kRun>();
  float4 v[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) v[k] = load4(x, first + k * kHalf, count, aligned);
#pragma unroll
  for (int k = 0; k < kTogether; k += 2) {
    const uint32_t bits = group_max<32>(max(magnitude(v[k]), magnitude(v[k + 1])));
    const int64_t block = (first + k * kHalf) / kBlock;
    if (threadIdx.x % 32 == 0 && block < blocks) scales[block] = rounded_up(bits);
  }
}

// Largest magnitudes of blocks of any length. Grid: x over pieces of kPiece elements of a block, block after block.
// Traffic: each element read once, one atomic per warp.
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const float* x, int64_t count, int64_t length, int64_t pieces, uint32_t* largest) {
  const int64_t block = blockIdx.x / pieces;
  const int64_t begin = block * length + (blockIdx.x - block * pieces) * kPiece;
  const int64_t end = min(min(begin + kPiece, (block + 1) * length), count);
  uint32_t bits = 0;
  for (int64_t e = begin + threadIdx.x; e < end; e += kThreads) bits = max(bits, magnitude(__ldg(x + e)));
  bits = group_max<32>(bits);
  if (threadIdx.x % 32 == 0) atomicMax(largest + block, bits);
}

__global__ void round_up_kernel(const uint32_t* largest, int64_t blocks, uint16_t* scales) {
  const int64_t block = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (block < blocks) scales[block] = rounded_up(largest[block]);
}

// Codes that a worker gives scales of its own, or none: two-shot schemes. The order is that of FORMS in reference.py.
enum class Form : int { kInt8, kE4M3, kBf16 };

template <Form kForm>
using CodeOf = std::conditional_t<kForm == Form::kInt8, int8_t, std::conditional_t<kForm == Form::kE4M3, uint8_t, uint16_t>>;

template <Form kForm>
constexpr float kLevels = kForm == Form::kInt8 ? 127.0f : 448.0f;

// E4M3 of y, rounded stochastically by 16 random bits.
__device__ __forceinline__ int e4m3_of(float y, uint32_t random) {
  const uint32_t bits = __float_as_uint(y), size = bits & 0x7fffffffu;
  const int normal = int((size + (random << 4)) >> 20) - ((127 - 7) << 3);
  const int small = int(floorf(__fadd_rn(__fmul_rn(fabsf(y), 512.0f), __fmul_rn(float(random), 0x1p-16f))));
  return min(fabsf(y) < 0x1p-6f ? small : normal, 0x7e) | int(bits >> 24 & 0x80u);
}

// BF16 of v, rounded stochastically by 16 random bits; NaN is 0x7fc0.
__device__ __forceinline__ int bf16_of(float v, uint32_t random) {
  const uint32_t bits = __float_as_uint(v), size = bits & 0x7fffffffu;
  return size > kInfinity ? 0x7fc0 : int((bits + (size < kInfinity ? random : 0u)) >> 16);
}

template <Form kForm>
__device__ __forceinline__ int4 own_codes_of(float4 v, float factor, uint64_t key, int64_t e) {
  if constexpr (kForm == Form::kInt8) {
    return codes_of(v, factor, kLevels<kForm>, key, e);
  } else {
    if (kForm == Form::kE4M3 && !(factor > 0.0f)) return {0, 0, 0, 0};
    const uint64_t word = random_word(counter(key, static_cast<uint64_t>(e / 4)));
    const auto code = [&](float x, int part) {
      const uint32_t random = static_cast<uint32_t>(word >> 16 * part) & 0xffffu;
      return kForm == Form::kE4M3 ? e4m3_of(__fmul_rn(x, factor), random) : bf16_of(x, random);
    };
    return {code(v.x, 0), code(v.y, 1), code(v.z, 2), code(v.w, 3)};
  }
}

template <Form kForm>
__device__ __forceinline__ float value_of(int code, float step) {
  if constexpr (kForm == Form::kInt8) return __fmul_rn(float(code), step);
  if constexpr (kForm == Form::kE4M3) return __fmul_rn(decode<Format::kE4M3>(uint32_t(code)), step);
  return __uint_as_float(uint32_t(code) << 16);
}

template <Form kForm>
__device__ __forceinline__ float4 values_of(int4 c, float step) {
  return {value_of<kForm>(c.x, step), value_of<kForm>(c.y, step), value_of<kForm>(c.z, step), value_of<kForm>(c.w, step)};
}

// encode_sum() to INT8. Grid: a warp per kBlock elements; with more of them it was slower. Traffic: 4 bytes read and 1
// written per element.
__global__ void __launch_bounds__(kThreads) encode_kernel(const float* x, int64_t count, bool aligned,
                                                          const uint16_t* scales, float levels, Length length,
                                                          uint64_t key, int8_t* codes) {
  const int64_t e = first_four<kBlock>(), f = e + kHalf;
  if (e >= count) return;
  const float4 a = load4(x, e, count, aligned), b = load4(x, f, count, aligned);
  const float inverse = inverse_of(scale_at(scales, length.block_of(e)), levels);
  store4(codes, e, count, true, codes_of(a, inverse, levels, key, e));
  if (f >= count) return;
  const float next = length.whole() ? inverse : inverse_of(scale_at(scales, length.block_of(f)), levels);
  store4(codes, f, count, true, codes_of(b, next, levels, key, f));
}

// encode_sum() to lanes of INT32. Grid: four words of a thread. Traffic: 4 bytes read per element, 4 written per word.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const float* x, int64_t count, bool aligned, const uint16_t* scales, int levels, int width, int lanes,
                int64_t words, Length length, uint64_t key, uint4* packed) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (i >= words) return;
  uint4 word = {0, 0, 0, 0};
  for (int first = 0; first < lanes; first += kTogether) {
    float4 v[kTogether];
    uint16_t scale[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t e = (first + k) * words + i;
      if (first + k >= lanes || e >= count) continue;
      v[k] = load4(x, e, count, aligned);
      scale[k] = __ldg(scales + length.block_of(e));
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t e = (first + k) * words + i;
      if (first + k >= lanes || e >= count) continue;
      const float inverse = inverse_of(__uint_as_float(uint32_t(scale[k]) << 16), static_cast<float>(levels));
      const int4 c = codes_of(v[k], inverse, static_cast<float>(levels), key, e);
      const int shift = (first + k) * width;
      word.x |= static_cast<uint32_t>(c.x + levels) << shift;
      if (e + 1 < count) word.y |= static_cast<uint32_t>(c.y + levels) << shift;
      if (e + 2 < count) word.z |= static_cast<uint32_t>(c.z + levels) << shift;
      if (e + 3 < count) word.w |= static_cast<uint32_t>(c.w + levels) << shift;
    }
  }
  packed[i / 4] = word;
}

// decode_sum() from INT8. Grid: a warp per kRun elements. Traffic: 1 byte read and 4 written per element.
__global__ void __launch_bounds__(kThreads) decode_kernel(const int8_t* codes, int64_t count, const uint16_t* scales,
                                                          float divisor, Length length, float* out) {
  const int64_t first = first_four<kRun>();
  int4 c[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) c[k] = load_codes(codes, first + k * kHalf, count, true);
  float step = 0.0f;
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int64_t e = first + k * kHalf;
    if (e >= count) return;
    if (k % 2 == 0 || !length.whole()) step = step_of(scale_at(scales, length.block_of(e)), divisor);
    store4(out, e, count, true, values_of<Form::kInt8>(c[k], step));
  }
}

// decode_sum() from lanes of INT32. Grid: four words of a thread. Traffic: 4 bytes read per word, 4 written per element.
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const uint4* packed, int64_t count, const uint16_t* scales, float divisor, int offset, int width,
                  int lanes, int64_t words, Length length, float* out) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (i >= words) return;
  const uint4 word = __ldg(packed + i / 4);
  const uint32_t mask = (1u << width) - 1u;
#pragma unroll 4
  for (int lane = 0; lane < lanes; ++lane) {
    const int64_t e = lane * words + i;
    if (e >= count) break;
    const float step = step_of(scale_at(scales, length.block_of(e)), divisor);
    const int shift = lane * width;
    const auto value = [&](uint32_t w) { return __fmul_rn(float(int((w >> shift) & mask) - offset), step); };
    store4(out, e, count, true, make_float4(value(word.x), value(word.y), value(word.z), value(word.w)));
  }
}

// What a warp does with one block whose elements it holds: its scale, and codes of four elements at e and at e + kHalf.
template <Form kForm>
__device__ __forceinline__ void encode_block(float4 a, float4 b, int64_t block, int64_t count, uint64_t key,
                                             CodeOf<kForm>* codes, float* scales) {
  const int64_t e = block * kBlock + (threadIdx.x % 32) * 4;
  float factor = 0.0f;
  if constexpr (kForm != Form::kBf16) {
    const float scale = floored(group_max<32>(max(magnitude(a), magnitude(b))));
    factor = inverse_of(scale, kLevels<kForm>);
    if (threadIdx.x % 32 == 0) scales[block] = scale;
  }
  store4(codes, e, count, true, own_codes_of<kForm>(a, factor, key, e));
  store4(codes, e + kHalf, count, true, own_codes_of<kForm>(b, factor, key, e + kHalf));
}

// encode(). Grid: a warp per block. Traffic: 4 bytes read per element, and its code written.
template <Form kForm>
__global__ void __launch_bounds__(kThreads) encode_own_kernel(const float* x, int64_t count, bool aligned,
                                                              int64_t blocks, uint64_t key, CodeOf<kForm>* codes,
                                                              float* scales) {
  const int64_t block = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (block >= blocks) return;
  const int64_t e = block * kBlock + (threadIdx.x % 32) * 4;
  encode_block<kForm>(load4(x, e, count, aligned), load4(x, e + kHalf, count, aligned), block, count, key, codes, scales);
}

__device__ __forceinline__ float4 added(float4 a, float4 b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

__device__ __forceinline__ float4 scaled(float4 v, float share) {
  return {__fmul_rn(v.x, share), __fmul_rn(v.y, share), __fmul_rn(v.z, share), __fmul_rn(v.w, share)};
}

// reduce(). Grid: a warp per block. Traffic: a code read per element and worker, and one written per element.
template <Form kForm>
__global__ void __launch_bounds__(kThreads)
    reduce_own_kernel(const CodeOf<kForm>* codes, const float* scales, int64_t workers, int64_t count, bool aligned,
                      int64_t blocks, float share, uint64_t key, CodeOf<kForm>* out, float* out_scales) {
  const int64_t block = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (block >= blocks) return;
  const int64_t e = block * kBlock + (threadIdx.x % 32) * 4;
  float4 a = {0.0f, 0.0f, 0.0f, 0.0f}, b = a;
  for (int64_t worker = 0; worker < workers; ++worker) {
    const float step = kForm == Form::kBf16 ? 1.0f : step_of(__ldg(scales + worker * blocks + block), kLevels<kForm>);
    const CodeOf<kForm>* own = codes + worker * count;
    const float4 c = values_of<kForm>(load_codes(own, e, count, aligned), step);
    const float4 d = values_of<kForm>(load_codes(own, e + kHalf, count, aligned), step);
    a = worker == 0 ? c : added(a, c);
    b = worker == 0 ? d : added(b, d);
  }
  // Past the end there are zeros, or NaN where all of the block is.
  encode_block<kForm>(scaled(a, share), scaled(b, share), block, count, key, out, out_scales);
}

// decode() of codes with scales. Grid: a warp per block. Traffic: a code read and 4 bytes written per element.
template <Form kForm>
__global__ void __launch_bounds__(kThreads) decode_own_kernel(const CodeOf<kForm>* codes, int64_t count, bool aligned,
                                                              const float* scales, float* out) {
  const int64_t block = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, e = block * kBlock + (threadIdx.x % 32) * 4;
  if (e >= count) return;
  const int4 c = load_codes(codes, e, count, aligned), d = load_codes(codes, e + kHalf, count, aligned);
  const float step = step_of(__ldg(scales + block), kLevels<kForm>);
  store4(out, e, count, true, values_of<kForm>(c, step));
  store4(out, e + kHalf, count, true, values_of<kForm>(d, step));
}

template <typename T>
const T* input(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <typename T>
T* output(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

bool starts_on(const Tensor& x, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % bytes == 0; }

unsigned grid(int64_t count, int64_t per_block) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  STD_TORCH_CHECK(blocks <= 0x7fffffff, "gradients: ", count, " elements are more than one launch takes");
  return static_cast<unsigned>(std::max<int64_t>(blocks, 1));
}

void check_gradient(const Tensor& x, int64_t block) {
  STD_TORCH_CHECK(x.dim() == 1 && x.is_contiguous() && x.scalar_type() == ScalarType::Float,
                  "gradients: a flat contiguous float32 tensor is needed");
  STD_TORCH_CHECK(block > 0 && (block % 4 == 0 || block >= x.size(0)), "gradients: blocks of ", block,
                  ": a multiple of 4 elements is needed");
}

void check_scales(const Tensor& scales, ScalarType dtype, int64_t blocks) {
  STD_TORCH_CHECK(scales.scalar_type() == dtype && scales.is_contiguous() && scales.numel() == blocks,
                  "gradients: ", blocks, " contiguous scales are needed");
}

Tensor sum_scales_cuda(const Tensor& x, int64_t block) {
  check_gradient(x, block);
  const OnDeviceOf guard(x);
  const cudaStream_t stream = stream_of(x);
  const int64_t count = x.size(0), blocks = (count + block - 1) / block;
  Tensor scales = empty_on(x, {blocks}, ScalarType::BFloat16);
  if (count == 0) return scales;
  if (block == kBlock) {
    block_scales_kernel<<<grid(count, kWarps * kRun), kThreads, 0, stream>>>(input<float>(x), count, starts_on(x, 16), blocks,
                                                                       output<uint16_t>(scales));
  } else {
    const int64_t pieces = (std::min(block, count) + kPiece - 1) / kPiece;
    Tensor largest = empty_on(x, {blocks}, ScalarType::Int);
    STD_CUDA_CHECK(cudaMemsetAsync(output<void>(largest), 0, blocks * sizeof(uint32_t), stream));
    largest_kernel<<<grid(blocks * pieces, 1), kThreads, 0, stream>>>(input<float>(x), count, block, pieces,
                                                                      output<uint32_t>(largest));
    round_up_kernel<<<grid(blocks, kThreads), kThreads, 0, stream>>>(input<uint32_t>(largest), blocks,
                                                                     output<uint16_t>(scales));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return scales;
}

Tensor encode_sum_cuda(const Tensor& x, const Tensor& scales, int64_t levels, int64_t width, int64_t lanes,
                       int64_t words, int64_t block, int64_t key) {
  check_gradient(x, block);
  const int64_t count = x.size(0);
  check_scales(scales, ScalarType::BFloat16, (count + block - 1) / block);
  const OnDeviceOf guard(x);
  const cudaStream_t stream = stream_of(x);
  Tensor codes = empty_on(x, {words}, lanes == 1 ? ScalarType::Char : ScalarType::Int);
  if (count == 0) return codes;
  if (lanes == 1) {
    encode_kernel<<<grid(count, kWarps * kBlock), kThreads, 0, stream>>>(
        input<float>(x), count, starts_on(x, 16), input<uint16_t>(scales), static_cast<float>(levels), Length(block),
        static_cast<uint64_t>(key), output<int8_t>(codes));
  } else {
    STD_TORCH_CHECK(words % 4 == 0 && words * lanes >= count && width * lanes <= 32, "gradients: ", words, " words of ",
                    lanes, " lanes do not hold ", count, " codes");
    pack_kernel<<<grid(words, kThreads * 4), kThreads, 0, stream>>>(
        input<float>(x), count, starts_on(x, 16), input<uint16_t>(scales), static_cast<int>(levels),
        static_cast<int>(width), static_cast<int>(lanes), words, Length(block), static_cast<uint64_t>(key),
        output<uint4>(codes));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return codes;
}

Tensor decode_sum_cuda(const Tensor& codes, const Tensor& scales, int64_t levels, int64_t workers, int64_t width,
                       int64_t lanes, int64_t words, int64_t block, int64_t elements) {
  check_scales(scales, ScalarType::BFloat16, (elements + block - 1) / block);
  STD_TORCH_CHECK(codes.is_contiguous() && codes.numel() == words, "gradients: ", words, " contiguous codes are needed");
  STD_TORCH_CHECK(starts_on(codes, lanes == 1 ? 4 : 16), "gradients: codes must begin on a whole word");
  const OnDeviceOf guard(codes);
  const cudaStream_t stream = stream_of(codes);
  Tensor out = empty_on(codes, {elements}, ScalarType::Float);
  if (elements == 0) return out;
  const float divisor = static_cast<float>(levels * workers);
  if (lanes == 1) {
    decode_kernel<<<grid(elements, kWarps * kRun), kThreads, 0, stream>>>(
        input<int8_t>(codes), elements, input<uint16_t>(scales), divisor, Length(block), output<float>(out));
  } else {
    unpack_kernel<<<grid(words, kThreads * 4), kThreads, 0, stream>>>(
        input<uint4>(codes), elements, input<uint16_t>(scales), divisor, static_cast<int>(levels * workers),
        static_cast<int>(width), static_cast<int>(lanes), words, Length(block), output<float>(out));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

// What runs for a form, with kForm known to it.
#define QSYNC_BY_FORM(form, ...)                                                   \
  switch (Form(form)) {                                                            \
    case Form::kInt8: {                                                            \
      constexpr Form kForm = Form::kInt8;                                          \
      __VA_ARGS__;                                                                 \
      break;                                                                       \
    }                                                                              \
    case Form::kE4M3: {                                                            \
      constexpr Form kForm = Form::kE4M3;                                          \
      __VA_ARGS__;                                                                 \
      break;                                                                       \
    }                                                                              \
    case Form::kBf16: {                                                            \
      constexpr Form kForm = Form::kBf16;                                          \
      __VA_ARGS__;                                                                 \
      break;                                                                       \
    }                                                                              \
    default: STD_TORCH_CHECK(false, "gradients: ", form, " is no compiled form");  \
  }

ScalarType type_of(int64_t form) {
  return Form(form) == Form::kInt8 ? ScalarType::Char : Form(form) == Form::kE4M3 ? ScalarType::Byte : ScalarType::BFloat16;
}

// Scales of `blocks` blocks, of which BF16 has none.
int64_t scales_of(int64_t form, int64_t blocks) { return Form(form) == Form::kBf16 ? 0 : blocks; }

void check_block(int64_t form, int64_t block) {
  STD_TORCH_CHECK(block == kBlock || Form(form) == Form::kBf16, "gradients: blocks of ", block, ": compiled are those of 256");
}

std::tuple<Tensor, Tensor> encode_cuda(const Tensor& x, int64_t form, int64_t block, int64_t key) {
  check_gradient(x, block);
  check_block(form, block);
  const OnDeviceOf guard(x);
  const int64_t count = x.size(0), blocks = (count + kBlock - 1) / kBlock;
  Tensor codes = empty_on(x, {count}, type_of(form)), scales = empty_on(x, {scales_of(form, blocks)}, ScalarType::Float);
  if (count == 0) return {codes, scales};
  QSYNC_BY_FORM(form, encode_own_kernel<kForm><<<grid(blocks, kWarps), kThreads, 0, stream_of(x)>>>(
                          input<float>(x), count, starts_on(x, 16), blocks, static_cast<uint64_t>(key),
                          output<CodeOf<kForm>>(codes), output<float>(scales)))
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {codes, scales};
}

std::tuple<Tensor, Tensor> reduce_cuda(const Tensor& codes, const Tensor& scales, int64_t form, int64_t block, int64_t key) {
  STD_TORCH_CHECK(codes.dim() == 2 && codes.is_contiguous() && codes.scalar_type() == type_of(form),
                  "gradients: contiguous codes of (workers, elements) in the type of their form are needed");
  check_block(form, block);
  const OnDeviceOf guard(codes);
  const int64_t workers = codes.size(0), count = codes.size(1), blocks = (count + kBlock - 1) / kBlock;
  const int64_t own_scales = scales_of(form, blocks);
  check_scales(scales, ScalarType::Float, workers * own_scales);
  Tensor out = empty_on(codes, {count}, codes.scalar_type()), out_scales = empty_on(codes, {own_scales}, ScalarType::Float);
  if (count == 0) return {out, out_scales};
  const auto share = static_cast<float>(1.0 / static_cast<double>(workers));
  QSYNC_BY_FORM(form, {
    const bool aligned = count % 4 == 0 && starts_on(codes, 4 * sizeof(CodeOf<kForm>));
    reduce_own_kernel<kForm><<<grid(blocks, kWarps), kThreads, 0, stream_of(codes)>>>(
        input<CodeOf<kForm>>(codes), input<float>(scales), workers, count, aligned, blocks, share, static_cast<uint64_t>(key),
        output<CodeOf<kForm>>(out), output<float>(out_scales));
  })
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {out, out_scales};
}

Tensor decode_cuda(const Tensor& codes, const Tensor& scales, int64_t form, int64_t block) {
  STD_TORCH_CHECK(codes.dim() == 1 && codes.is_contiguous() && codes.scalar_type() == type_of(form) && block % 4 == 0,
                  "gradients: flat contiguous codes in the type of their form, in blocks of a multiple of 4, are needed");
  const OnDeviceOf guard(codes);
  const int64_t count = codes.size(0);
  check_scales(scales, ScalarType::Float, scales_of(form, (count + block - 1) / block));
  Tensor out = empty_on(codes, {count}, ScalarType::Float);
  if (count == 0) return out;
  QSYNC_BY_FORM(form, {
    STD_TORCH_CHECK(kForm != Form::kBf16, "gradients: BF16 codes are decoded by torch");
    decode_own_kernel<kForm><<<grid(count, kWarps * kBlock), kThreads, 0, stream_of(codes)>>>(
        input<CodeOf<kForm>>(codes), count, starts_on(codes, 4), input<float>(scales), output<float>(out));
  })
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

}  // namespace
}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, library) {
  library.impl("gradient_sum_scales", TORCH_BOX(&qsync::sum_scales_cuda));
  library.impl("gradient_encode_sum", TORCH_BOX(&qsync::encode_sum_cuda));
  library.impl("gradient_decode_sum", TORCH_BOX(&qsync::decode_sum_cuda));
  library.impl("gradient_encode", TORCH_BOX(&qsync::encode_cuda));
  library.impl("gradient_reduce", TORCH_BOX(&qsync::reduce_cuda));
  library.impl("gradient_decode", TORCH_BOX(&qsync::decode_cuda));
}
