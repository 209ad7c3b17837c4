// The operators quantize and dequantize of torch: checks, memory, and which kernels run.
#include "cuda/quantize_kernels.cuh"
#include "stable.cuh"

namespace qsync {
namespace {

constexpr int64_t kMostBlocks = 0x7fffffff;
// Above the largest derivative of GELU, 1.1289 at the square root of 2, by more than rounding to 16 bits adds.
constexpr float kSteepestGelu = 1.14f;

Element element_of(ScalarType dtype) {
  if (dtype == ScalarType::Float) return Element::kFloat;
  if (dtype == ScalarType::BFloat16) return Element::kBFloat16;
  STD_TORCH_CHECK(dtype == ScalarType::Half, "quantize: an element type other than float32, bfloat16, float16");
  return Element::kHalf;
}

Format format_of(ScalarType dtype) {
  if (dtype == ScalarType::Char) return Format::kInt8;
  if (dtype == ScalarType::Float8_e4m3fn) return Format::kE4M3;
  STD_TORCH_CHECK(dtype == ScalarType::Float8_e5m2, "codes of a type other than int8, float8_e4m3fn, float8_e5m2");
  return Format::kE5M2;
}

Granularity granularity_of(const std::string& name) {
  if (name == "tensor") return Granularity::kTensor;
  if (name == "row") return Granularity::kRow;
  if (name == "channel") return Granularity::kColumn;
  STD_TORCH_CHECK(name == "block", "quantize: granularity '", name, "': allowed are tensor, row, channel, block");
  return Granularity::kBlock;
}

bool is_stochastic(const std::string& rounding) {
  STD_TORCH_CHECK(rounding == "stochastic" || rounding == "nearest", "rounding '", rounding,
                  "': allowed are nearest, stochastic");
  return rounding == "stochastic";
}

Stream stream_at(int64_t key, const std::optional<Tensor>& step, const Tensor& x) {
  if (!step.has_value()) return {static_cast<uint64_t>(key), nullptr};
  STD_TORCH_CHECK(step->scalar_type() == ScalarType::Long && step->numel() == 1, "step: one int64 is needed");
  STD_TORCH_CHECK(step->is_cuda() && step->get_device_index() == x.get_device_index(),
                  "step: it must be on the card of the tensor that is quantized");
  return {static_cast<uint64_t>(key), static_cast<const int64_t*>(step->const_data_ptr())};
}

template <typename T>
T* pointer(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

}  // namespace

// A checked matrix, and new tensors for its codes.
struct Job {
  Matrix matrix;
  Codes out;
  Tensor codes, transposed;
};

Job prepare(const Tensor& x, ScalarType format, const std::string& rounding, int64_t key,
            const std::optional<Tensor>& step, bool transposed) {
  STD_TORCH_CHECK(x.dim() == 2, "quantize: a tensor of ", x.dim(), " dimensions: two are needed");
  const int64_t rows = x.size(0), cols = x.size(1), pieces = (cols + 1023) / 1024;
  STD_TORCH_CHECK(pieces == 0 || rows <= kMostBlocks / pieces, "quantize: ", rows, " rows of ", cols,
                  ": at most 2147483647 pieces of 1024 elements of a row are allowed; reshape to longer rows");
  const Matrix matrix{x.const_data_ptr(), element_of(x.scalar_type()), rows, cols, rows > 1 ? x.stride(0) : cols,
                      cols > 1 ? x.stride(1) : 1};
  Tensor codes = empty_on(x, {rows, cols}, format);
  Tensor turned = transposed ? empty_on(x, {cols, rows}, format) : empty_on(x, {0}, format);
  const Codes out{format_of(format), is_stochastic(rounding), pointer<uint8_t>(codes),
                  transposed ? pointer<uint8_t>(turned) : nullptr, stream_at(key, step, x)};
  return {matrix, out, codes, turned};
}

std::tuple<Tensor, Tensor, Tensor> quantize_cuda(const Tensor& x, ScalarType format, std::string granularity,
                                                 std::string rounding, int64_t key, std::optional<Tensor> step,
                                                 bool transposed) {
  const OnDeviceOf guard(x);
  const cudaStream_t stream = stream_of(x);
  const Granularity by = granularity_of(granularity);
  STD_TORCH_CHECK(!(transposed && by == Granularity::kBlock), "quantize: blocks have no transposed copy");
  const Job job = prepare(x, format, rounding, key, step, transposed);
  const int64_t rows = job.matrix.rows, cols = job.matrix.cols, blocks = (cols + kBlockLength - 1) / kBlockLength;
  const int64_t scale_rows = by == Granularity::kRow || by == Granularity::kBlock ? rows : 1;
  const int64_t scale_cols = by == Granularity::kColumn ? cols : by == Granularity::kBlock ? blocks : 1;
  Tensor scale = empty_on(x, {scale_rows, scale_cols}, ScalarType::Float);
  float* scales = pointer<float>(scale);
  const bool single = rows > 0 && cols > 0 && !transposed && is_packed(job.matrix);
  bool done = single && by == Granularity::kRow && quantize_rows(job.matrix, job.out, scales, stream);
  if (single && by == Granularity::kBlock) {
    quantize_blocks(job.matrix, job.out, scales, stream);
    done = true;
  }
  if (!done) {
    const int64_t count = scale_rows * scale_cols;
    Tensor work = empty_on(x, {2 * count}, ScalarType::Float);
    float* factors = pointer<float>(work);
    uint32_t* amax = reinterpret_cast<uint32_t*>(factors + count);
    find_amax(job.matrix, by, amax, stream);
    if (folds_scale(job.matrix, job.out, by)) {
      quantize_by_amax(job.matrix, job.out, amax, scales, stream);
    } else {
      find_scales(job.out, amax, scales, factors, count, stream);
      quantize_with(job.matrix, job.out, by, factors, stream);
    }
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return std::make_tuple(job.codes, scale, job.transposed);
}

std::tuple<Tensor, Tensor, Tensor> quantize_by_amax_cuda(const Tensor& x, const Tensor& amax, ScalarType format,
                                                         std::string rounding, int64_t key,
                                                         std::optional<Tensor> step, bool transposed) {
  STD_TORCH_CHECK(amax.scalar_type() == ScalarType::Float && amax.numel() == 1 && amax.is_cuda(),
                  "quantize_by_amax: amax must be one float32 on the card of the tensor");
  const OnDeviceOf guard(x);
  const cudaStream_t stream = stream_of(x);
  const Job job = prepare(x, format, rounding, key, step, transposed);
  Tensor scale = empty_on(x, {1, 1}, ScalarType::Float);
  const uint32_t* bits = static_cast<const uint32_t*>(amax.const_data_ptr());
  if (folds_scale(job.matrix, job.out, Granularity::kTensor)) {
    quantize_by_amax(job.matrix, job.out, bits, pointer<float>(scale), stream);
  } else {
    Tensor factors = empty_on(x, {1}, ScalarType::Float);
    find_scales(job.out, bits, pointer<float>(scale), pointer<float>(factors), 1, stream);
    quantize_with(job.matrix, job.out, Granularity::kTensor, pointer<float>(factors), stream);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return std::make_tuple(job.codes, scale, job.transposed);
}

Tensor dequantize_cuda(const Tensor& codes, const Tensor& scale, ScalarType dtype) {
  STD_TORCH_CHECK(codes.dim() == 2 && scale.dim() == 2, "dequantize: codes and scales of two dimensions are needed");
  const OnDeviceOf guard(codes);
  const Tensor dense = codes.is_contiguous() ? codes : torch::stable::contiguous(codes);
  const Tensor factors = scale.is_contiguous() ? scale : torch::stable::contiguous(scale);
  const int64_t rows = codes.size(0), cols = codes.size(1), blocks = (cols + kBlockLength - 1) / kBlockLength;
  const int64_t high = scale.size(0), wide = scale.size(1);
  Granularity by = Granularity::kBlock;
  if (high == 1 && wide == 1) {
    by = Granularity::kTensor;
  } else if (high == rows && wide == 1) {
    by = Granularity::kRow;
  } else if (high == 1 && wide == cols) {
    by = Granularity::kColumn;
  } else {
    STD_TORCH_CHECK(high == rows && wide == blocks, "dequantize: scales (", high, ", ", wide, ") of codes (", rows,
                    ", ", cols, "): allowed are (1, 1), one per row, column, or 128 elements of a row");
  }
  STD_TORCH_CHECK(rows * ((cols + 255) / 256) <= kMostBlocks, "dequantize: too many rows; reshape to longer rows");
  Tensor values = empty_on(codes, {rows, cols}, dtype);
  dequantize(format_of(codes.scalar_type()), static_cast<const uint8_t*>(dense.const_data_ptr()), rows, cols,
             static_cast<const float*>(factors.const_data_ptr()), by, element_of(dtype), values.mutable_data_ptr(),
             stream_of(codes));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return values;
}

namespace {

// A dense tensor whose packs start on 16 bytes.
Tensor packed(const Tensor& x) {
  const bool fits = x.is_contiguous() && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return fits ? x : torch::stable::clone(torch::stable::contiguous(x));
}

}  // namespace

std::tuple<Tensor, Tensor> gelu_amax_cuda(const Tensor& x) {
  const OnDeviceOf guard(x);
  const Tensor dense = packed(x);
  Tensor result = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  Tensor amax = empty_on(x, {1}, ScalarType::Float);
  gelu_amax(element_of(x.scalar_type()), dense.const_data_ptr(), x.numel(), result.mutable_data_ptr(),
            pointer<uint32_t>(amax), stream_of(x));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return std::make_tuple(result, amax);
}

std::tuple<Tensor, Tensor> gelu_backward_amax_cuda(const Tensor& grad, const Tensor& x) {
  STD_TORCH_CHECK(grad.scalar_type() == x.scalar_type() && grad.numel() == x.numel(),
                  "gelu_backward_amax: grad and x must have one shape and element type");
  const OnDeviceOf guard(x);
  const Tensor dense = packed(x), dense_grad = packed(grad);
  Tensor result = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  Tensor amax = empty_on(x, {1}, ScalarType::Float);
  gelu_backward_amax(element_of(x.scalar_type()), dense_grad.const_data_ptr(), dense.const_data_ptr(), x.numel(),
                     result.mutable_data_ptr(), pointer<uint32_t>(amax), stream_of(x));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return std::make_tuple(result, amax);
}

// Codes of GELU or its gradient, scaled by a bound: `largest` of x, or of grad times the largest derivative; and sums over
// the rows of the gradient, if wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor> gelu_quantize_cuda(const Tensor& x, std::optional<Tensor> grad,
                                                              const Tensor& largest, ScalarType format,
                                                              std::string rounding, int64_t key,
                                                              std::optional<Tensor> step, bool sums) {
  STD_TORCH_CHECK(largest.scalar_type() == ScalarType::Float && largest.numel() == 1 && largest.is_cuda(),
                  "gelu_quantize: largest must be one float32 on the card of the tensor");
  STD_TORCH_CHECK(!grad.has_value() || (grad->scalar_type() == x.scalar_type() && grad->dim() == 2 &&
                                        grad->size(0) == x.size(0) && grad->size(1) == x.size(1)),
                  "gelu_quantize: grad and x must have one shape and element type");
  STD_TORCH_CHECK(grad.has_value() || !sums, "gelu_quantize: sums are those of the gradient, and there is no grad");
  const OnDeviceOf guard(x);
  const cudaStream_t stream = stream_of(x);
  const Tensor dense = packed(x);
  const std::optional<Tensor> dense_grad = grad.has_value() ? std::optional<Tensor>(packed(*grad)) : std::nullopt;
  Job job = prepare(dense, format, rounding, key, step, true);
  const int64_t rows = job.matrix.rows, cols = job.matrix.cols, tiles = sum_tiles(rows);
  const void* gradient = dense_grad.has_value() ? dense_grad->const_data_ptr() : nullptr;
  const uint32_t* bits = static_cast<const uint32_t*>(largest.const_data_ptr());
  const float stretch = grad.has_value() ? kSteepestGelu : 1.0f;
  Tensor scale = empty_on(x, {1, 1}, ScalarType::Float), whole = empty_on(x, {sums ? cols : 0}, ScalarType::Float);
  std::optional<Tensor> parts;
  if (sums) parts = empty_on(x, {tiles, cols}, ScalarType::Float);
  float* partial = sums ? pointer<float>(*parts) : nullptr;
  if (forms_gelu(job.matrix, gradient, job.out)) {
    quantize_gelu(job.matrix, gradient, job.out, bits, stretch, pointer<float>(scale), partial, stream);
  } else {
    Tensor values = empty_on(x, {rows, cols}, x.scalar_type());
    Tensor work = empty_on(x, {3}, ScalarType::Float);
    float* numbers = pointer<float>(work);
    uint32_t* ignored = reinterpret_cast<uint32_t*>(numbers);
    if (gradient == nullptr) {
      gelu_amax(job.matrix.element, dense.const_data_ptr(), x.numel(), values.mutable_data_ptr(), ignored, stream);
    } else {
      gelu_backward_amax(job.matrix.element, gradient, dense.const_data_ptr(), x.numel(), values.mutable_data_ptr(),
                         ignored, stream);
    }
    stretch_amax(bits, stretch, numbers + 1, stream);
    find_scales(job.out, reinterpret_cast<uint32_t*>(numbers + 1), pointer<float>(scale), numbers + 2, 1, stream);
    job.matrix.data = values.const_data_ptr();
    quantize_with(job.matrix, job.out, Granularity::kTensor, numbers + 2, stream);
    if (sums) add_tile_rows(job.matrix, partial, stream);
  }
  if (sums) add_tiles(partial, tiles, cols, pointer<float>(whole), stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return std::make_tuple(job.codes, scale, job.transposed, whole);
}

}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&qsync::quantize_cuda));
  m.impl("quantize_by_amax", TORCH_BOX(&qsync::quantize_by_amax_cuda));
  m.impl("gelu_amax", TORCH_BOX(&qsync::gelu_amax_cuda));
  m.impl("gelu_backward_amax", TORCH_BOX(&qsync::gelu_backward_amax_cuda));
  m.impl("gelu_quantize", TORCH_BOX(&qsync::gelu_quantize_cuda));
  m.impl("dequantize", TORCH_BOX(&qsync::dequantize_cuda));
}
