// Codes of GELU and of its gradient, formed on the way: for FP8, whose scale needs no more than a bound of what is rounded.
#include "cuda/quantize_tiles.cuh"

namespace qsync {
namespace {

template <typename T, Format F, bool kStochastic, Values kValues>
void run(const Matrix& x, const void* grad, const Codes& out, const Scaling& scaling, cudaStream_t stream) {
  const int64_t across = (x.cols + kTile - 1) / kTile, down = (x.rows + kTile - 1) / kTile;
  tiles_kernel<T, F, kStochastic, true, kValues><<<static_cast<unsigned>(across * down), kTileThreads, 0, stream>>>(
      static_cast<const T*>(x.data), static_cast<const T*>(grad), x.row_stride, x.rows, x.cols, across,
      Granularity::kTensor, scaling, out.codes, out.transposed, out.stream);
}

template <typename T>
void run_type(const Matrix& x, const void* grad, const Codes& out, const Scaling& scaling, cudaStream_t stream) {
  with_rounding(out.stochastic, [&](auto stochastic) {
    constexpr bool kStochastic = decltype(stochastic)::value;
    if (grad == nullptr) {
      run<T, Format::kE4M3, kStochastic, Values::kGelu>(x, grad, out, scaling, stream);
    } else {
      run<T, Format::kE5M2, kStochastic, Values::kGeluGradient>(x, grad, out, scaling, stream);
    }
  });
}

}  // namespace

bool forms_gelu(const Matrix& x, const void* grad, const Codes& out) {
  const Format wanted = grad == nullptr ? Format::kE4M3 : Format::kE5M2;
  const bool aligned = is_packed(x) && reinterpret_cast<uintptr_t>(grad) % 16 == 0;
  return aligned && x.element != Element::kFloat && out.format == wanted && out.transposed != nullptr &&
         x.rows % 4 == 0 && x.rows > 0 && x.cols > 0;
}

void quantize_gelu(const Matrix& x, const void* grad, const Codes& out, const uint32_t* amax, float stretch, float* scale,
                   cudaStream_t stream) {
  const Scaling scaling{nullptr, amax, scale, stretch};
  if (x.element == Element::kBFloat16) return run_type<__nv_bfloat16>(x, grad, out, scaling, stream);
  run_type<__half>(x, grad, out, scaling, stream);
}

}  // namespace qsync
