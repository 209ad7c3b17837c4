// y = x W for packed 4- and 8-bit weights on a CPU; kernels/weight_only/layout.py is the specification of the layout.
//
// A vector holds 32-bit words of the packed codes: one word is a step s (4 bits) or half of one (8 bits) of an output g.
// The same nibble or byte of all its words is one input per word, so that one vector of activations serves all outputs.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kWords = 4, kOutputs = kLanes / kWords, kMostRows = 4, kTile = 64;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

inline Words load(const uint8_t* at) {
  Words words;
  std::memcpy(&words, at, sizeof(words));
  return words;
}

template <int kBits>
struct Layout {
  static constexpr int kCodes = 32 / kBits, kLoads = kBits / 4, kZero = kBits == 4 ? 8 : 128;
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  // Which of the two outputs (g or g + 8), and which of the word's inputs, a code j of a word is of.
  static constexpr int half(int j) { return kBits == 4 ? j & 1 : j >> 1; }
  static constexpr int input(int j) { return kBits == 4 ? (j >> 1 & 1) * 2 + (j >> 2) : j & 1; }
  static constexpr int kInputs = kBits == 4 ? 4 : 2;  // of one word
};

// Activations of a block in the order of the words: [load][t][input][lane]; and their sum.
template <int kBits>
void order(const float* x, Floats* to, float* sum) {
  using L = Layout<kBits>;
  float total = 0;
  for (int k = 0; k < kTile; ++k) {
    total += x[k];
  }
  *sum = total;
  for (int q = 0; q < L::kLoads; ++q) {
    for (int t = 0; t < 4; ++t) {
      for (int k = 0; k < L::kInputs; ++k, ++to) {
        for (int lane = 0; lane < kLanes; ++lane) {
          (*to)[lane] = x[16 * t + 16 / L::kLoads * q + L::kInputs * (lane % kWords) + k];
        }
      }
    }
  }
}

template <int kBits, int kRows>
void run_tile(const Floats* x, const float* sums, int64_t blocks, int64_t group_blocks, const uint8_t* codes,
              const float* scales, int64_t padded, float* y) {
  using L = Layout<kBits>;
  constexpr int kPerBlock = L::kLoads * 4 * L::kInputs, kVectors = 8 / kOutputs;
  Floats totals[4][kVectors][2][kRows] = {};
  float offsets[kRows][kTile] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    const float* block_scales = scales + block / group_blocks * padded;
    for (int i = 0; i < 4; ++i, codes += L::kLoads * 512) {
      for (int v = 0; v < kVectors; ++v) {
        Floats part[2][kRows] = {};
        for (int q = 0; q < L::kLoads; ++q) {
          for (int t = 0; t < 4; ++t) {
            const Words words = load(codes + q * 512 + (t * 8 + v * kOutputs) * 16);
            const Floats* inputs = x + block * kPerBlock + (q * 4 + t) * L::kInputs;
#pragma GCC unroll 8
            for (int j = 0; j < L::kCodes; ++j) {
              const Floats values = __builtin_convertvector((Ints)(words >> (kBits * j) & L::kMask), Floats);
#pragma GCC unroll 4
              for (int n = 0; n < kRows; ++n) {
                part[L::half(j)][n] += values * inputs[n * blocks * kPerBlock + L::input(j)];
              }
            }
          }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          Floats factor;
          for (int lane = 0; lane < kLanes; ++lane) {
            factor[lane] = block_scales[i * 16 + half * 8 + v * kOutputs + lane / kWords];
          }
#pragma GCC unroll 4
          for (int n = 0; n < kRows; ++n) {
            totals[i][v][half][n] += part[half][n] * factor;
          }
        }
      }
    }
    for (int n = 0; n < kRows; ++n) {
      const float offset = sums[n * blocks + block];
      for (int m = 0; m < kTile; ++m) {
        offsets[n][m] += offset * block_scales[m];
      }
    }
  }
  for (int n = 0; n < kRows; ++n) {
    for (int m = 0; m < kTile; ++m) {
      const Floats& lanes = totals[m / 16][m % 8 / kOutputs][m / 8 % 2][n];
      float sum = 0;
      for (int word = 0; word < kWords; ++word) {
        sum += lanes[m % kOutputs * kWords + word];
      }
      y[n * padded + m] = sum - L::kZero * offsets[n][m];
    }
  }
}

template <int kBits>
void run(const float* x, int64_t rows, const uint8_t* codes, const float* scales, int64_t tiles, int64_t blocks,
         int64_t group_blocks, float* y, int threads) {
  using L = Layout<kBits>;
  constexpr int kPerBlock = L::kLoads * 4 * L::kInputs;
  const int64_t padded = tiles * kTile, tile_bytes = blocks * 4 * L::kLoads * 512;
  std::vector<Floats> ordered(rows * blocks * kPerBlock);
  std::vector<float> sums(rows * blocks);
  for (int64_t at = 0; at < rows * blocks; ++at) {
    order<kBits>(x + at * kTile, ordered.data() + at * kPerBlock, sums.data() + at);
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int64_t row = 0; row < rows;) {
      const Floats* inputs = ordered.data() + row * blocks * kPerBlock;
      const float* offsets = sums.data() + row * blocks;
      float* to = y + row * padded + tile * kTile;
      const auto go = [&](auto kernel, int done) {
        kernel(inputs, offsets, blocks, group_blocks, codes + tile * tile_bytes, scales + tile * kTile, padded, to);
        row += done;
      };
      switch (rows - row) {
        case 1: go(run_tile<kBits, 1>, 1); break;
        case 2: go(run_tile<kBits, 2>, 2); break;
        case 3: go(run_tile<kBits, 3>, 3); break;
        default: go(run_tile<kBits, kMostRows>, kMostRows);
      }
    }
  }
}

template <int kBits>
void unpack(const uint8_t* codes, const float* scales, int64_t tiles, int64_t blocks, int64_t group_blocks, float* y,
            int threads) {
  using L = Layout<kBits>;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int64_t block = 0; block < blocks; ++block) {
      const float* factors = scales + block / group_blocks * tiles * kTile + tile * kTile;
      for (int i = 0; i < 4; ++i) {
        const uint8_t* strip = codes + ((tile * blocks + block) * 4 + i) * L::kLoads * 512;
        for (int g = 0; g < 8; ++g) {
          float* rows[2];
          for (int half = 0; half < 2; ++half) {
            rows[half] = y + ((tile * kTile + i * 16 + half * 8 + g) * blocks + block) * kTile;
          }
          const float factor[2] = {factors[i * 16 + g], factors[i * 16 + 8 + g]};
          for (int t = 0; t < 4; ++t) {
            for (int word = 0; word < kWords * L::kLoads; ++word) {
              uint32_t bits;
              std::memcpy(&bits, strip + word / kWords * 512 + (t * 8 + g) * 16 + word % kWords * 4, sizeof(bits));
              for (int j = 0; j < L::kCodes; ++j) {
                const int code = int(bits >> (kBits * j) & L::kMask) - L::kZero;
                rows[L::half(j)][16 * t + L::kInputs * word + L::input(j)] = float(code) * factor[L::half(j)];
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

// x: (rows, 64 blocks), y: (rows, 64 tiles). A row's result does not depend on the other rows.
extern "C" void qsync_weight_only_linear(const float* x, int64_t rows, const uint8_t* codes, const float* scales,
                                         int64_t tiles, int64_t blocks, int64_t group_blocks, int bits, float* y,
                                         int threads) {
  if (bits == 4) {
    run<4>(x, rows, codes, scales, tiles, blocks, group_blocks, y, threads);
  } else {
    run<8>(x, rows, codes, scales, tiles, blocks, group_blocks, y, threads);
  }
}

// y: (64 tiles, 64 blocks).
extern "C" void qsync_weight_only_unpack(const uint8_t* codes, const float* scales, int64_t tiles, int64_t blocks,
                                         int64_t group_blocks, int bits, float* y, int threads) {
  if (bits == 4) {
    unpack<4>(codes, scales, tiles, blocks, group_blocks, y, threads);
  } else {
    unpack<8>(codes, scales, tiles, blocks, group_blocks, y, threads);
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
