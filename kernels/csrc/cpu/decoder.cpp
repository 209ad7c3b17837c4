// What a decoder computes between its products, on a CPU: each reads and writes its numbers once, computes in FP32 and
// rounds once. A row's result has the same bits wherever the row stands.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

typedef uint16_t Bf16;
constexpr int kSums = 32;                   // partial sums, added in one order
constexpr int64_t kWorthThreads = 1 << 14;  // numbers

template <typename To, typename From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

inline float widen(float x) { return x; }
inline float widen(Bf16 x) { return bits_of<float>(uint32_t(x) << 16); }

inline void store(float x, float* to) { *to = x; }
inline void store(float x, Bf16* to) {
  const uint32_t bits = bits_of<uint32_t>(x), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  *to = Bf16(x == x ? rounded : 0x7FC0);
}

// exp within 2e-7 of the result from -87 to 88, and its values there beyond. exp(x) = 2^n exp(r), |r| <= ln(2) / 2; the
// polynomial is Taylor's.
inline float exponential(float x) {
  constexpr float kToInteger = 12582912;  // 1.5 * 2^23: a sum with it has no fraction, and n in its lowest bits
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + kToInteger, n = shifted - kToInteger;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln(2) in two parts, of which n times the first is exact
  float y = 1.0f / 5040;
  y = y * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  return y * bits_of<float>((bits_of<uint32_t>(shifted) << 23) + 0x3F800000u);
}

// Below -88, where a gate is closed, both give a little below 0 in place of less than FP32 holds.
inline float silu(float x) { return x / (1.0f + exponential(-x)); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline float gelu(float x) { return x / (1.0f + exponential(-1.59576912f * (x + 0.044715f * x * x * x))); }

template <typename X>
void rms_norm(const X* x, int64_t rows, int64_t heads, int64_t row_step, int64_t head_step, int64_t size,
              const float* weight, float epsilon, X* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * size > kWorthThreads)
  for (int64_t at = 0; at < rows * heads; ++at) {
    const X* from = x + at / heads * row_step + at % heads * head_step;
    X* to = y + at * size;
    float sums[kSums] = {};
    int64_t k = 0;
    for (; k + kSums <= size; k += kSums) {
      for (int lane = 0; lane < kSums; ++lane) {
        sums[lane] += widen(from[k + lane]) * widen(from[k + lane]);
      }
    }
    for (int lane = 0; k + lane < size; ++lane) {
      sums[lane] += widen(from[k + lane]) * widen(from[k + lane]);
    }
    for (int half = kSums / 2; half; half /= 2) {
      for (int lane = 0; lane < half; ++lane) {
        sums[lane] += sums[lane + half];
      }
    }
    const float factor = 1.0f / std::sqrt(sums[0] / size + epsilon);
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) {
      store(widen(from[j]) * factor * weight[j], to + j);
    }
  }
}

template <typename X>
void rotate(const X* x, int64_t rows, int64_t heads, int64_t row_step, int64_t head_step, int64_t size, const X* cos,
            const X* sin, X* y, int threads) {
  const int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * size > kWorthThreads)
  for (int64_t at = 0; at < rows * heads; ++at) {
    const X* from = x + at / heads * row_step + at % heads * head_step;
    const X *c = cos + at / heads * size, *s = sin + at / heads * size;
    X* to = y + at * size;
#pragma omp simd
    for (int64_t k = 0; k < half; ++k) {
      const float first = widen(from[k]), second = widen(from[k + half]);
      store(first * widen(c[k]) - second * widen(s[k]), to + k);
      store(second * widen(c[k + half]) + first * widen(s[k + half]), to + k + half);
    }
  }
}

template <typename X, float (*kActivation)(float)>
void gate(const X* x, int64_t rows, int64_t size, X* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    const X *first = x + row * 2 * size, *second = first + size;
    X* to = y + row * size;
#pragma omp simd
    for (int64_t k = 0; k < size; ++k) {
      store(kActivation(widen(first[k])) * widen(second[k]), to + k);
    }
  }
}

}  // namespace

// x and y are both FP32 or both BF16. x: (rows, heads, size) with a step from row to row and from head to head.
extern "C" void qsync_decoder_rms_norm(int bf16, const void* x, int64_t rows, int64_t heads, int64_t row_step,
                                       int64_t head_step, int64_t size, const float* weight, float epsilon, void* y,
                                       int threads) {
  const auto go = [&](auto number) {
    using X = decltype(number);
    rms_norm(static_cast<const X*>(x), rows, heads, row_step, head_step, size, weight, epsilon, static_cast<X*>(y),
             threads);
  };
  bf16 ? go(Bf16()) : go(float());
}

// cos and sin: (rows, size), of the type of x.
extern "C" void qsync_decoder_rotate(int bf16, const void* x, int64_t rows, int64_t heads, int64_t row_step,
                                     int64_t head_step, int64_t size, const void* cos, const void* sin, void* y,
                                     int threads) {
  const auto go = [&](auto number) {
    using X = decltype(number);
    rotate(static_cast<const X*>(x), rows, heads, row_step, head_step, size, static_cast<const X*>(cos),
           static_cast<const X*>(sin), static_cast<X*>(y), threads);
  };
  bf16 ? go(Bf16()) : go(float());
}

// x: (rows, 2 size), the gate before what it multiplies.
extern "C" void qsync_decoder_gate(int bf16, const void* x, int64_t rows, int64_t size, int by_gelu, void* y,
                                   int threads) {
  const auto go = [&](auto number) {
    using X = decltype(number);
    const auto run = by_gelu ? gate<X, gelu> : gate<X, silu>;
    run(static_cast<const X*>(x), rows, size, static_cast<X*>(y), threads);
  };
  bf16 ? go(Bf16()) : go(float());
}
