// Tensor core products of 16-bit numbers with FP32 sums, and 16-bit numbers from codes of 4 and 8 bits. No torch here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace qsync {

// c += a b of 16 x 16 and 16 x 8 numbers. A lane (g, t) of a warp has of a the rows g, g + 8, g, g + 8 and the columns 2 t and
// 2 t + 1, of the last two registers 8 more; of b the same as rows, and column g; of c rows g and g + 8, columns 2 t, 2 t + 1.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// Numbers from codes cost a masked word and one fused multiply-add for each two, for the instructions are what bounds kernels
// that read codes next to memory. A code in the low 8 bits of an FP16 number of the exponent of 1024 adds to it; in the low 8
// bits of a BF16 number of no exponent it is a subnormal one, code times 2^-133. All results are exact, and those of BF16 are 64
// times too small: 2^127 is the largest factor.
template <class T>
constexpr float kUnit = 64.0f;
template <>
inline constexpr float kUnit<__half> = 1.0f;

template <class T>
constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x64006400u : 0u;

__device__ __forceinline__ uint32_t multiply_add(uint32_t x, uint32_t factor, uint32_t more) {
  uint32_t value = 0;
#if __CUDA_ARCH__ >= 800
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(value) : "r"(x), "r"(factor), "r"(more));
#endif
  return value;
}

// The two codes of a pair in bits kShift and up of each half of the word, less `zero`, over kUnit.
template <class T, int kShift, int kZero>
__device__ __forceinline__ uint32_t number_of(uint32_t pair) {
  static_assert((kShift == 0 || kShift == 4) && (kZero == 8 || kZero == 128));
  if constexpr (std::is_same_v<T, __half>) {
    constexpr float kFactor = kShift == 4 ? 0.0625f : 1.0f;
    const __half2 value = __hfma2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(kFactor),
                                  __float2half2_rn(-1024.0f * kFactor - kZero));
    return *reinterpret_cast<const uint32_t*>(&value);
  } else {
    constexpr uint32_t kFactor = kShift == 4 ? 0x7D007D00u : 0x7F007F00u;  // 2^123 or 2^127
    constexpr uint32_t kLess = kZero == 8 ? 0xBE00BE00u : 0xC000C000u;     // -8 / 64 or -128 / 64
    return multiply_add(pair, kFactor, kLess);
  }
}

// The same of 8-bit codes whose lower four bits are 0 and stand for 7.5, the middle of what they may be.
template <class T>
__device__ __forceinline__ uint32_t upper_number_of(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 whole = __hadd2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(-1144.0f));
    const __half2 value = __hadd2(whole, __float2half2_rn(-0.5f));
    return *reinterpret_cast<const uint32_t*>(&value);
  } else {
    return multiply_add(pair, 0x7F007F00u, 0xBFF1BFF1u);  // -120.5 / 64
  }
}

}  // namespace qsync
