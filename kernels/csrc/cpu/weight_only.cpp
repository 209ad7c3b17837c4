// y = x W for packed 4- and 8-bit weights on a CPU; kernels/weight_only/layout.py is the specification of the layout.
//
// A vector holds 32-bit words of the packed codes: one word is a step s (4 bits) or half of one (8 bits) of an output g.
// The same nibble or byte of all its words is one input per word, so that one vector of activations serves all outputs.
// Where the processor multiplies pairs of BF16 numbers, BF16 activations meet two inputs of a word at a time.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16, kMostRows = 8;
#else
constexpr int kLanes = 8, kMostRows = 4;
#endif
constexpr int kWords = 4, kOutputs = kLanes / kWords, kTile = 64;
constexpr int kAhead = 4096;  // bytes; processors do not fetch codes early enough by themselves while they multiply
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Bf16;

inline Words load(const uint8_t* at) {
  Words words;
  std::memcpy(&words, at, sizeof(words));
  return words;
}

inline float widen(float x) { return x; }

inline float widen(Bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

inline void store(Floats x, float* to) { std::memcpy(to, &x, sizeof(x)); }

inline void store(Floats x, Bf16* to) {
#ifdef __AVX512BF16__  // magnitudes below 2**-126 become zeros
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
#else
  typedef Bf16 Narrow __attribute__((vector_size(2 * kLanes)));
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const Narrow narrow = __builtin_convertvector(x == x ? rounded : Words{} + 0x7FC0, Narrow);
#endif
  std::memcpy(to, &narrow, sizeof(narrow));
}

// How codes of a word meet activations: as FP32 numbers, one input at a time.
template <int kBits>
struct Singles {
  static constexpr int kCodes = 32 / kBits, kLoads = kBits / 4, kZero = kBits == 4 ? 8 : 128;
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  // Which of the two outputs (g or g + 8), and which of the word's inputs, a code j of a word is of.
  static constexpr int half(int j) { return kBits == 4 ? j & 1 : j >> 1; }
  static constexpr int input(int j) { return kBits == 4 ? (j >> 1 & 1) * 2 + (j >> 2) : j & 1; }
  static constexpr int kInputs = kBits == 4 ? 4 : 2;  // of one word
  // A product has kSteps vectors of numbers by word, for kVectors vectors of activations.
  static constexpr int kSteps = kCodes, kVectors = kInputs;
  static constexpr int half_of(int step) { return half(step); }
  static constexpr int vector_of(int step) { return input(step); }

  template <typename X>
  static uint32_t activation(const X* x, int vector) {
    const float value = widen(x[vector]);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
  static Words numbers(Words words, int step) {
    return (Words)__builtin_convertvector((Ints)(words >> (kBits * step) & kMask), Floats);
  }
  static Floats add(Floats sum, Words numbers, Words x) { return sum + (Floats)numbers * (Floats)x; }
};

#ifdef __AVX512BF16__
// Two inputs at a time, exact as BF16, the zero subtracted.
template <int kBits>
struct Pairs : Singles<kBits> {
  static constexpr int kZero = 0;
  static constexpr int kSteps = Singles<kBits>::kSteps / 2, kVectors = Singles<kBits>::kVectors / 2;
  static constexpr int half_of(int step) { return kBits == 4 ? step & 1 : step; }
  static constexpr int vector_of(int step) { return kBits == 4 ? step >> 1 : 0; }

  static uint32_t activation(const Bf16* x, int vector) {
    uint32_t pair;
    std::memcpy(&pair, x + 2 * vector, sizeof(pair));
    return pair;
  }
  static Words numbers(Words words, int step) {
    if (kBits == 4) {  // the nibbles of both inputs stand 16 bits apart; an index has five bits, the highest unused
      static constexpr Bf16 kCode[16] = {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
                                         0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
      const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)kCode));
      return (Words)_mm512_permutexvar_epi16((__m512i)(words >> (4 * step)), table);
    }
    const Ints codes = (Ints)(words ^ 0x80808080u);
    const Floats low = __builtin_convertvector(codes << (24 - 16 * step) >> 24, Floats);
    const Floats high = __builtin_convertvector(codes << (16 - 16 * step) >> 24, Floats);
    return (Words)low >> 16 | ((Words)high & 0xFFFF0000u);
  }
  static Floats add(Floats sum, Words numbers, Words x) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)numbers, (__m512bh)x);
  }
};
#else
template <int kBits>
using Pairs = Singles<kBits>;
#endif

// Activations of a block in the order of the words: [load][t][vector][lane]; and their sum.
template <typename L, typename X>
void order(const X* x, Words* to, float* sum) {
  float total = 0;
  for (int k = 0; k < kTile; ++k) {
    total += widen(x[k]);
  }
  *sum = total;
  for (int q = 0; q < L::kLoads; ++q) {
    for (int t = 0; t < 4; ++t) {
      for (int k = 0; k < L::kVectors; ++k, ++to) {
        uint32_t words[kWords];
        for (int word = 0; word < kWords; ++word) {
          words[word] = L::activation(x + 16 * t + 16 / L::kLoads * q + L::kInputs * word, k);
        }
        for (int lane = 0; lane < kLanes; ++lane) {
          (*to)[lane] = words[lane % kWords];
        }
      }
    }
  }
}

// The scale of every lane's output; the first lane is of the output v kOutputs among the eight of a half.
inline Floats spread(const float* half_scales, int half, int v) {
  // Whole vectors are loaded and permuted: numbers that are put in one by one take longer than the products.
  const int before = kLanes == 16 ? 8 * half : 0;
  Floats scales;
  std::memcpy(&scales, half_scales - before, sizeof(scales));
  Ints output;
  for (int lane = 0; lane < kLanes; ++lane) {
    output[lane] = before + v * kOutputs + lane / kWords;
  }
  return __builtin_shuffle(scales, output);
}

// Sums of neighbours, those of a first.
inline Floats fold(Floats a, Floats b) {
  Ints even;
  for (int lane = 0; lane < kLanes; ++lane) {
    even[lane] = 2 * lane;
  }
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

// x: [block][row][kPerBlock], where a block has block_vectors of all rows.
template <typename L, int kRows, typename Y>
void run_tile(const Words* x, int64_t block_vectors, const float* sums, int64_t blocks, int64_t group_blocks,
              const uint8_t* codes, const float* scales, int64_t padded, Y* y) {
  constexpr int kPerBlock = L::kLoads * 4 * L::kVectors, kVectors = 8 / kOutputs;
  Floats totals[kRows][4][2][kVectors] = {};
  float offsets[kRows][kTile] = {};
  for (int64_t block = 0; block < blocks; ++block, x += block_vectors) {
    const float* block_scales = scales + block / group_blocks * padded;
    for (int i = 0; i < 4; ++i, codes += L::kLoads * 512) {
      for (int v = 0; v < kVectors; ++v) {
        Floats part[2][kRows] = {};
        for (int q = 0; q < L::kLoads; ++q) {
          for (int t = 0; t < 4; ++t) {
            const Words words = load(codes + q * 512 + (t * 8 + v * kOutputs) * 16);
            __builtin_prefetch(codes + q * 512 + (t * 8 + v * kOutputs) * 16 + kAhead);
            const Words* inputs = x + (q * 4 + t) * L::kVectors;
#pragma GCC unroll 8
            for (int step = 0; step < L::kSteps; ++step) {
              const Words numbers = L::numbers(words, step);
#pragma GCC unroll 8
              for (int n = 0; n < kRows; ++n) {
                Floats& sum = part[L::half_of(step)][n];
                sum = L::add(sum, numbers, inputs[n * kPerBlock + L::vector_of(step)]);
              }
            }
          }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const Floats factor = spread(block_scales + i * 16 + half * 8, half, v);
#pragma GCC unroll 8
          for (int n = 0; n < kRows; ++n) {
            totals[n][i][half][v] += part[half][n] * factor;
          }
        }
      }
    }
    if (L::kZero) {
      for (int n = 0; n < kRows; ++n) {
        const float offset = sums[n * blocks + block];
        for (int m = 0; m < kTile; ++m) {
          offsets[n][m] += offset * block_scales[m];
        }
      }
    }
  }
  for (int n = 0; n < kRows; ++n) {
    const Floats* vectors = &totals[n][0][0][0];  // output m is in the lanes of vector m / kOutputs
    for (int m = 0; m < kTile; m += kLanes, vectors += 4) {
      Floats offset;
      std::memcpy(&offset, offsets[n] + m, sizeof(offset));
      const Floats result = fold(fold(vectors[0], vectors[1]), fold(vectors[2], vectors[3]));
      store(result - float(L::kZero) * offset, y + n * padded + m);
    }
  }
}

template <typename L, typename X>
void run(const X* x, int64_t rows, const uint8_t* codes, const float* scales, int64_t tiles, int64_t blocks,
         int64_t group_blocks, X* y, int threads) {
  constexpr int kPerBlock = L::kLoads * 4 * L::kVectors;
  const int64_t padded = tiles * kTile, tile_bytes = blocks * 4 * L::kLoads * 512;
  std::vector<Words> ordered(rows * blocks * kPerBlock);
  std::vector<float> sums(rows * blocks);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = row * blocks + block;
      order<L>(x + at * kTile, ordered.data() + (block * rows + row) * kPerBlock, sums.data() + at);
    }
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int64_t row = 0; row < rows;) {
      const Words* inputs = ordered.data() + row * kPerBlock;
      const float* offsets = sums.data() + row * blocks;
      X* to = y + row * padded + tile * kTile;
      const auto go = [&](auto count) {
        constexpr int kRows = decltype(count)::value;
        run_tile<L, kRows>(inputs, rows * kPerBlock, offsets, blocks, group_blocks, codes + tile * tile_bytes,
                           scales + tile * kTile, padded, to);
        row += kRows;
      };
      const int64_t left = rows - row;
      if (left >= kMostRows) {
        go(std::integral_constant<int, kMostRows>());
      } else if (left >= 4) {
        go(std::integral_constant<int, 4>());
      } else if (left == 3) {
        go(std::integral_constant<int, 3>());
      } else if (left == 2) {
        go(std::integral_constant<int, 2>());
      } else {
        go(std::integral_constant<int, 1>());
      }
    }
  }
}

// Words of sixteen inputs of an output are spread over lanes in the order of the inputs.
template <int kBits, typename Y>
void unpack(const uint8_t* codes, const float* scales, int64_t tiles, int64_t blocks, int64_t group_blocks, Y* y,
            int threads) {
  using L = Singles<kBits>;
  constexpr int kParts = 16 / kLanes, kVectors = 8 / kOutputs, kInLoad = 16 / L::kLoads;
  Ints word[kParts];
  Words shift[2];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int part = 0; part < kParts; ++part) {
      const int input = part * kLanes + lane;
      word[part][lane] = input / kInLoad * kLanes + input % kInLoad / L::kInputs;
    }
    for (int j = 0; j < L::kCodes; ++j) {
      if (L::input(j) == lane % L::kInputs) {
        shift[L::half(j)][lane] = kBits * j;
      }
    }
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int64_t block = 0; block < blocks; ++block) {
      const float* factors = scales + block / group_blocks * tiles * kTile + tile * kTile;
      for (int i = 0; i < 4; ++i) {
        const uint8_t* strip = codes + ((tile * blocks + block) * 4 + i) * L::kLoads * 512;
        for (int v = 0; v < kVectors; ++v) {
          for (int t = 0; t < 4; ++t) {
            const uint8_t* at = strip + (t * 8 + v * kOutputs) * 16;
            const Words first = load(at), last = load(at + (L::kLoads - 1) * 512);
            for (int output = 0; output < kOutputs; ++output) {
              for (int part = 0; part < kParts; ++part) {
                const Words spread = __builtin_shuffle(first, last, word[part] + output * kWords);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                  const int m = i * 16 + half * 8 + v * kOutputs + output;
                  const Ints numbers = (Ints)(spread >> shift[half] & L::kMask) - L::kZero;
                  store(__builtin_convertvector(numbers, Floats) * factors[m],
                        y + ((tile * kTile + m) * blocks + block) * kTile + 16 * t + part * kLanes);
                }
              }
            }
          }
        }
      }
    }
  }
}

// Blocks of kBlock numbers times the normalized Hadamard matrix, in place; sums in one order for each block.
template <int kBlock>
void rotate(float* x, int64_t blocks, int threads) {
  const float factor = 1 / std::sqrt(float(kBlock));
#pragma omp parallel for num_threads(threads) schedule(static) if (blocks > 256)
  for (int64_t block = 0; block < blocks; ++block) {
    float* v = x + block * kBlock;
    for (int step = 1; step < kBlock; step *= 2) {
      for (int begin = 0; begin < kBlock; begin += 2 * step) {
        for (int k = begin; k < begin + step; ++k) {
          const float a = v[k], b = v[k + step];
          v[k] = a + b;
          v[k + step] = a - b;
        }
      }
    }
    for (int k = 0; k < kBlock; ++k) {
      v[k] *= factor;
    }
  }
}

}  // namespace

// x: (rows, 64 blocks), y: (rows, 64 tiles), both FP32 or both BF16. A row's result does not depend on the other rows.
extern "C" void qsync_weight_only_linear(const void* x, int64_t rows, int bf16, const uint8_t* codes,
                                         const float* scales, int64_t tiles, int64_t blocks, int64_t group_blocks,
                                         int bits, void* y, int threads) {
  const auto go = [&](auto layout, auto number) {
    using X = decltype(number);
    run<decltype(layout)>(static_cast<const X*>(x), rows, codes, scales, tiles, blocks, group_blocks,
                          static_cast<X*>(y), threads);
  };
  if (bf16) {
    bits == 4 ? go(Pairs<4>(), Bf16()) : go(Pairs<8>(), Bf16());
  } else {
    bits == 4 ? go(Singles<4>(), float()) : go(Singles<8>(), float());
  }
}

// y: (64 tiles, 64 blocks), FP32 or BF16.
extern "C" void qsync_weight_only_unpack(int bf16, const uint8_t* codes, const float* scales, int64_t tiles,
                                         int64_t blocks, int64_t group_blocks, int bits, void* y, int threads) {
  const auto go = [&](auto unpack_to, auto number) {
    unpack_to(codes, scales, tiles, blocks, group_blocks, static_cast<decltype(number)*>(y), threads);
  };
  if (bf16) {
    bits == 4 ? go(unpack<4, Bf16>, Bf16()) : go(unpack<8, Bf16>, Bf16());
  } else {
    bits == 4 ? go(unpack<4, float>, float()) : go(unpack<8, float>, float());
  }
}

// x: (blocks, block), in place.
extern "C" void qsync_weight_only_rotate(float* x, int64_t blocks, int block, int threads) {
  if (block == 128) {
    rotate<128>(x, blocks, threads);
  } else {
    rotate<64>(x, blocks, threads);
  }
}
