// The launchers of the unit, free of torch, and the choice of a template by element type, format and rounding.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/rounding.cuh"

namespace qsync {

enum class Element : int { kFloat = 0, kBFloat16 = 1, kHalf = 2 };
enum class Granularity : int { kTensor = 0, kRow = 1, kColumn = 2, kBlock = 3 };
constexpr int kBlockLength = 128;

// A matrix of rows x cols elements, its strides counted in elements.
struct Matrix {
  const void* data;
  Element element;
  int64_t rows, cols, row_stride, col_stride;
};

struct Codes {
  Format format;
  bool stochastic;
  uint8_t* codes;       // (rows, cols), dense
  uint8_t* transposed;  // (cols, rows), dense, or null
  Stream stream;
};

template <typename T>
struct Type {
  using type = T;
};

template <typename Body>
void with_element(Element element, Body&& body) {
  if (element == Element::kFloat) return body(Type<float>{});
  if (element == Element::kBFloat16) return body(Type<__nv_bfloat16>{});
  return body(Type<__half>{});
}

template <typename Body>
void with_format(Format format, Body&& body) {
  if (format == Format::kInt8) return body(std::integral_constant<Format, Format::kInt8>{});
  if (format == Format::kE4M3) return body(std::integral_constant<Format, Format::kE4M3>{});
  return body(std::integral_constant<Format, Format::kE5M2>{});
}

template <typename Body>
void with_rounding(bool stochastic, Body&& body) {
  if (stochastic) return body(std::true_type{});
  return body(std::false_type{});
}

// Whether rows start on 16 bytes and hold whole 16-byte packs: what the fast kernels need.
bool is_packed(const Matrix& x);

// One pass, a scale per row; false if the rows are too long to be kept on chip.
bool quantize_rows(const Matrix& x, const Codes& out, float* scale, cudaStream_t stream);
// One pass, a scale per 128 elements of a row.
void quantize_blocks(const Matrix& x, const Codes& out, float* scale, cudaStream_t stream);

// Largest magnitudes as bits into `amax` (zeroed here): one element, rows, cols or rows x blocks of them.
void find_amax(const Matrix& x, Granularity granularity, uint32_t* amax, cudaStream_t stream);
// A largest magnitude times a number.
void stretch_amax(const uint32_t* amax, float stretch, float* result, cudaStream_t stream);
// Scales of `count` slices, and the factors that values are multiplied by before they are rounded.
void find_scales(const Codes& out, const uint32_t* amax, float* scale, float* factors, int64_t count, cudaStream_t stream);
// Whether quantize_by_amax() runs for this layout; else find_scales() and quantize_with() do.
bool folds_scale(const Matrix& x, const Codes& out, Granularity granularity);
// Codes, and their transposition if wanted, of a whole tensor by its largest magnitude; writes the scale.
void quantize_by_amax(const Matrix& x, const Codes& out, const uint32_t* amax, float* scale, cudaStream_t stream);
// Codes, and their transposition if wanted, by known factors.
void quantize_with(const Matrix& x, const Codes& out, Granularity granularity, const float* factors, cudaStream_t stream);

// Values of codes (rows, cols).
void dequantize(Format format, const uint8_t* codes, int64_t rows, int64_t cols, const float* scale,
                Granularity granularity, Element element, void* values, cudaStream_t stream);

// GELU of `count` dense elements, and the bits of the largest magnitude of the results (zeroed here).
void gelu_amax(Element element, const void* x, int64_t count, void* result, uint32_t* amax, cudaStream_t stream);
// The same of its gradient: grad times the derivative at x.
void gelu_backward_amax(Element element, const void* grad, const void* x, int64_t count, void* result, uint32_t* amax,
                        cudaStream_t stream);

// Codes (and their transposition) of GELU, or of its gradient if there is one, for dense matrices: the scale comes from
// `stretch` times a magnitude; `sums` as for add_tile_rows(), or null. Whether this runs for a layout and format; else the
// functions above do.
bool forms_gelu(const Matrix& x, const void* grad, const Codes& out);
void quantize_gelu(const Matrix& x, const void* grad, const Codes& out, const uint32_t* amax, float stretch, float* scale,
                   float* sums, cudaStream_t stream);
// Sums over the rows of each tile of a dense matrix, sum_tiles(rows) x cols of them; and their sum over the tiles.
int64_t sum_tiles(int64_t rows);
void add_tile_rows(const Matrix& x, float* sums, cudaStream_t stream);
void add_tiles(const float* sums, int64_t tiles, int64_t cols, float* whole, cudaStream_t stream);

int blocks_per_wave(int per_multiprocessor);

}  // namespace qsync
