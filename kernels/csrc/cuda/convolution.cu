// The operator qsync_opt::scaled_conv2d on CUDA: checks, choice of kernel, folding of narrow inputs.
#include "convolution.cuh"
#include "stable.cuh"

namespace qsync {
namespace {

using convolution::Epilogue;
using convolution::Folding;
using convolution::Geometry;
using convolution::Operands;
using convolution::Output;

constexpr int64_t kIntMax = (int64_t{1} << 31) - 1;

int narrow(int64_t value, const char* what) {
  STD_TORCH_CHECK(
      value >= 0 && value <= kIntMax, "scaled_conv2d: ", what, " of ", value, "; allowed are 0 to ", kIntMax);
  return static_cast<int>(value);
}

int extent(int64_t size, int64_t taps, int64_t stride, int64_t padding, int64_t dilation) {
  const int64_t room = size + 2 * padding - dilation * (taps - 1) - 1;
  STD_TORCH_CHECK(
      room >= 0, "scaled_conv2d: ", taps, " taps of dilation ", dilation, " do not fit an input of ", size,
      " with padding ", padding);
  return narrow(room / stride + 1, "an output size");
}

Geometry geometry_of(
    const Tensor& x, const Tensor& weight, const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups) {
  Geometry g = {};
  g.n = narrow(x.size(0), "a batch");
  g.h = narrow(x.size(1), "a height");
  g.w = narrow(x.size(2), "a width");
  g.c = narrow(x.size(3), "a number of channels");
  g.k = narrow(weight.size(0), "a number of output channels");
  g.r = narrow(weight.size(1), "a kernel height");
  g.s = narrow(weight.size(2), "a kernel width");
  g.stride_h = narrow(stride[0], "a stride");
  g.stride_w = narrow(stride[1], "a stride");
  g.pad_h = narrow(padding[0], "a padding");
  g.pad_w = narrow(padding[1], "a padding");
  g.dilation_h = narrow(dilation[0], "a dilation");
  g.dilation_w = narrow(dilation[1], "a dilation");
  g.groups = narrow(groups, "a number of groups");
  g.p = extent(g.h, g.r, g.stride_h, g.pad_h, g.dilation_h);
  g.q = extent(g.w, g.s, g.stride_w, g.pad_w, g.dilation_w);
  STD_TORCH_CHECK(
      int64_t{g.n} * g.p * g.q <= kIntMax, "scaled_conv2d: ", int64_t{g.n} * g.p * g.q,
      " output pixels; at most 2**31 - 1 fit, split the batch");
  STD_TORCH_CHECK(
      weight.size(1) * weight.size(2) * weight.size(3) <= kIntMax / (127 * 127) + 1,
      "scaled_conv2d: sums of ", weight.size(1) * weight.size(2) * weight.size(3),
      " products may leave INT32; at most 133144 are safe");
  return g;
}

// A dimension of size 1 has no step: torch leaves anything there, tensor maps want a multiple of 16.
Operands operands_of(const Tensor& x, const Tensor& weight, const Geometry& g) {
  Operands o = {};
  o.x = static_cast<const int8_t*>(x.data_ptr());
  o.x_w = g.w == 1 ? g.c : x.stride(2);
  o.x_h = g.h == 1 ? g.w * o.x_w : x.stride(1);
  o.x_n = g.n == 1 ? g.h * o.x_h : x.stride(0);
  o.weight = static_cast<const int8_t*>(weight.data_ptr());
  return o;
}

Output output_of(ScalarType dtype) {
  if (dtype == ScalarType::Float) return Output::kFloat32;
  if (dtype == ScalarType::Half) return Output::kFloat16;
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16, "scaled_conv2d: out_dtype must be FP32, FP16 or BF16");
  return Output::kBFloat16;
}

// How to fold an input of few channels; channels 0: it does not fold.
Folding folding_of(const Geometry& g, Output output) {
  Folding f = {};
  const int bytes = g.stride_h * g.stride_w * g.c;
  const int s = (g.s + g.stride_w - 1) / g.stride_w;
  const int width = output == Output::kFloat32 ? 4 : 8;
  if (g.groups != 1 || g.dilation_h != 1 || g.dilation_w != 1 || bytes > 16 || 16 * s > 128 || g.k % width != 0) {
    return f;
  }
  f.stride_h = g.stride_h;
  f.stride_w = g.stride_w;
  f.channels = 16;
  f.r = (g.r + g.stride_h - 1) / g.stride_h;
  f.s = s;
  f.rows = g.p + f.r - 1;
  f.columns = g.q + f.s - 1;
  // One block per folded row of every image.
  if (int64_t{g.n} * f.rows > kIntMax) f.channels = 0;
  return f;
}

#if QSYNC_HAS_SM90A
cudaError_t launch_sm90(const Geometry& g, const Operands& o, const Epilogue& e, int64_t tile, cudaStream_t stream) {
  STD_TORCH_CHECK(
      tile >= -1 && tile < convolution::sm90_variants(), "scaled_conv2d: tile ", tile, "; allowed are -1 to ",
      convolution::sm90_variants() - 1);
  const int variant = static_cast<int>(tile);
  STD_TORCH_CHECK(
      tile < 0 || convolution::sm90_variant_fits(g, variant), "scaled_conv2d: tile ",
      tile < 0 ? "" : convolution::sm90_variant_name(variant), " does not divide this shape; -1 chooses one");
  return convolution::launch_sm90(g, o, e, variant, multiprocessors(), stream);
}

// The folded convolution: taps of a row are channels of overlapping windows.
cudaError_t launch_folded(
    const Tensor& like, const Geometry& g, const Operands& o, const Epilogue& e, const Folding& f, int64_t tile,
    cudaStream_t stream) {
  const Tensor x = empty_on(like, {g.n, f.rows, f.columns, f.channels}, ScalarType::Char);
  const Tensor weight = empty_on(like, {g.k, f.r, f.s, f.channels}, ScalarType::Char);
  auto* x_data = static_cast<int8_t*>(x.data_ptr());
  auto* weight_data = static_cast<int8_t*>(weight.data_ptr());
  cudaError_t error = convolution::launch_fold_input(g, o, f, x_data, stream);
  if (error == cudaSuccess) error = convolution::launch_fold_weight(g, o.weight, f, weight_data, stream);
  if (error != cudaSuccess) return error;
  Geometry folded = g;
  folded.h = f.rows;
  folded.w = g.q;
  folded.c = f.s * f.channels;
  folded.r = f.r;
  folded.s = 1;
  folded.stride_h = folded.stride_w = 1;
  folded.pad_h = folded.pad_w = 0;
  Operands operands = o;
  operands.x = x_data;
  operands.x_w = f.channels;
  operands.x_h = int64_t{f.columns} * f.channels;
  operands.x_n = f.rows * operands.x_h;
  operands.weight = weight_data;
  if (!convolution::sm90_fits(folded, operands, e)) return convolution::launch_general(g, o, e, stream);
  return launch_sm90(folded, operands, e, tile, stream);
}
#endif

cudaError_t launch(
    const Tensor& like, const Geometry& g, const Operands& o, const Epilogue& e, int64_t tile, cudaStream_t stream) {
#if QSYNC_HAS_SM90A
  if (convolution::sm90_fits(g, o, e)) return launch_sm90(g, o, e, tile, stream);
  const Folding f = folding_of(g, e.output);
  if (f.channels > 0) return launch_folded(like, g, o, e, f, tile, stream);
#endif
  return convolution::launch_general(g, o, e, stream);
}

void check_factor(const Tensor& factor, const Tensor& x, int64_t many, bool one_allowed, const char* name) {
  STD_TORCH_CHECK(
      factor.scalar_type() == ScalarType::Float && factor.is_contiguous() &&
          factor.get_device_index() == x.get_device_index(),
      "scaled_conv2d: ", name, " must be a contiguous FP32 tensor on the card of x");
  STD_TORCH_CHECK(
      factor.numel() == many || (one_allowed && factor.numel() == 1), "scaled_conv2d: ", name, " has ",
      factor.numel(), " elements; allowed are ", many, one_allowed ? " or 1" : "");
}

// The Python wrapper brings operands into this form and names what it cannot bring; direct calls are checked here.
void check(
    const Tensor& x, const Tensor& weight, const Tensor& x_scale, const Tensor& weight_scale,
    const std::optional<Tensor>& bias, const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups, const std::string& activation) {
  STD_TORCH_CHECK(
      x.dim() == 4 && weight.dim() == 4 && x.scalar_type() == ScalarType::Char &&
          weight.scalar_type() == ScalarType::Char && x.get_device_index() == weight.get_device_index(),
      "scaled_conv2d: x (N, H, W, C) and weight (K, R, S, C / groups) must be INT8 and on one card");
  STD_TORCH_CHECK(
      stride.size() == 2 && padding.size() == 2 && dilation.size() == 2 && stride[0] > 0 && stride[1] > 0 &&
          padding[0] >= 0 && padding[1] >= 0 && dilation[0] > 0 && dilation[1] > 0,
      "scaled_conv2d: stride and dilation must be two positive integers each, padding two from 0");
  STD_TORCH_CHECK(
      groups > 0 && x.size(3) == weight.size(3) * groups && weight.size(0) % groups == 0 && x.size(3) > 0 &&
          weight.size(1) > 0 && weight.size(2) > 0,
      "scaled_conv2d: ", x.size(3), " channels and a weight of ", weight.size(0), " x ", weight.size(3),
      " do not fit ", groups, " groups");
  STD_TORCH_CHECK(x.size(3) == 1 || x.stride(3) == 1, "scaled_conv2d: the channels of x must be contiguous");
  STD_TORCH_CHECK(weight.is_contiguous(), "scaled_conv2d: the weight must be contiguous");
  STD_TORCH_CHECK(activation == "none" || activation == "relu", "scaled_conv2d: activation must be none or relu");
  check_factor(x_scale, x, x.size(0), true, "x_scale");
  check_factor(weight_scale, x, weight.size(0), true, "weight_scale");
  if (bias) check_factor(*bias, x, weight.size(0), false, "bias");
}

Tensor scaled_conv2d(
    const Tensor& x, const Tensor& weight, const Tensor& x_scale, const Tensor& weight_scale,
    const std::optional<Tensor>& bias, std::vector<int64_t> stride, std::vector<int64_t> padding,
    std::vector<int64_t> dilation, int64_t groups, std::string activation, ScalarType out_dtype, int64_t tile) {
  check(x, weight, x_scale, weight_scale, bias, stride, padding, dilation, groups, activation);
  const OnDeviceOf guard(x);
  const Geometry g = geometry_of(x, weight, stride, padding, dilation, groups);
  Tensor out = empty_on(x, {g.n, g.p, g.q, g.k}, out_dtype);
  if (out.numel() == 0) return out;
  Operands o = operands_of(x, weight, g);
  o.out = out.data_ptr();
  Epilogue e = {};
  e.x_scale = static_cast<const float*>(x_scale.data_ptr());
  e.weight_scale = static_cast<const float*>(weight_scale.data_ptr());
  e.bias = bias ? static_cast<const float*>(bias->data_ptr()) : nullptr;
  e.x_step = x_scale.numel() == 1 ? 0 : 1;
  e.weight_step = weight_scale.numel() == 1 ? 0 : 1;
  e.relu = activation == "relu";
  e.output = output_of(out_dtype);
  STD_CUDA_CHECK(launch(x, g, o, e, tile, stream_of(x)));
  return out;
}

}  // namespace
}  // namespace qsync

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) { m.impl("scaled_conv2d", TORCH_BOX(&qsync::scaled_conv2d)); }
