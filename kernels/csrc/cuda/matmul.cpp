// The operators qsync_opt::scaled_mm and its like on CUDA: what torch hands over becomes Arguments, or one clear refusal.
#include <cuda.h>

#include <optional>
#include <vector>

#include "matmul_choice.h"
#include "stable.cuh"

namespace qsync {
namespace {

using matmul::Activation;
using matmul::Arguments;
using matmul::Choice;
using matmul::Code;
using matmul::Float;
using matmul::Status;

template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

// Multiprocessors that kernels of a stream may use: those of its green context, of the current context, or of the card.
int multiprocessors_of(cudaStream_t stream) {
  static const auto stream_context = driver_function<CUresult (*)(CUstream, CUgreenCtx*)>("cuStreamGetGreenCtx", 12040);
  static const auto green_resource =
      driver_function<CUresult (*)(CUgreenCtx, CUdevResource*, CUdevResourceType)>("cuGreenCtxGetDevResource", 12040);
  static const auto current = driver_function<CUresult (*)(CUcontext*)>("cuCtxGetCurrent", 12000);
  static const auto resource =
      driver_function<CUresult (*)(CUcontext, CUdevResource*, CUdevResourceType)>("cuCtxGetDevResource", 12040);
  CUdevResource found = {};
  CUgreenCtx green = nullptr;
  if (stream_context != nullptr && green_resource != nullptr && stream_context(stream, &green) == CUDA_SUCCESS &&
      green != nullptr && green_resource(green, &found, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS) {
    return int(found.sm.smCount);
  }
  CUcontext context = nullptr;
  if (current != nullptr && resource != nullptr && current(&context) == CUDA_SUCCESS && context != nullptr &&
      resource(context, &found, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS && found.sm.smCount > 0) {
    return int(found.sm.smCount);
  }
  return multiprocessors();
}

Code code_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Char: return Code::kInt8;
    case ScalarType::Float8_e4m3fn: return Code::kE4M3;
    case ScalarType::Float8_e5m2: return Code::kE5M2;
    default:
      STD_TORCH_CHECK(false, "scaled_mm: ", name, " has no 8-bit codes; allowed are int8, float8_e4m3fn and float8_e5m2");
  }
}

Float float_of(ScalarType type, const char* name) {
  switch (type) {
    case ScalarType::BFloat16: return Float::kBF16;
    case ScalarType::Half: return Float::kFP16;
    case ScalarType::Float: return Float::kFP32;
    default: STD_TORCH_CHECK(false, "scaled_mm: ", name, " is of another type; allowed are bfloat16, float16 and float32");
  }
}

Activation activation_of(const std::string& epilogue) {
  if (epilogue == "none") {
    return Activation::kNone;
  }
  if (epilogue == "relu") {
    return Activation::kRelu;
  }
  STD_TORCH_CHECK(epilogue == "gelu", "scaled_mm: epilogue '", epilogue, "'; allowed are none, relu and gelu");
  return Activation::kGelu;
}

struct Operand {
  const void* codes;
  int64_t pitch, batch;
};

Operand operand_of(const Tensor& x, const char* name) {
  const int64_t last = x.dim() - 1;
  STD_TORCH_CHECK(x.size(last) <= 1 || x.stride(last) == 1, "scaled_mm: ", name,
                  " is not contiguous along the contraction, its last dimension; pass codes written transposed");
  return {x.data_ptr(), x.stride(last - 1), last == 2 ? x.stride(0) : 0};
}

struct ScaleSteps {
  const float* scales;
  int64_t row, block, batch;
  bool blocks;
};

// One scale in all, per matrix, per row, or per row and block of 128: told apart by their number.
ScaleSteps scale_of(const Tensor& scale, const Tensor& codes, const char* name) {
  const int64_t last = codes.dim() - 1, rows = codes.size(last - 1), batch = last == 2 ? codes.size(0) : 1;
  const int64_t blocks = (codes.size(last) + matmul::kScaleBlock - 1) / matmul::kScaleBlock, count = scale.numel();
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float && scale.is_contiguous() && scale.is_cuda() &&
                      scale.get_device_index() == codes.get_device_index(),
                  "scaled_mm: ", name, " must be a contiguous float32 tensor on the card of the codes");
  const auto* values = static_cast<const float*>(scale.data_ptr());
  if (count == 1) {
    return {values, 0, 0, 0, false};
  }
  if (count == batch * rows) {
    return {values, 1, 0, rows, false};
  }
  if (count == batch) {
    return {values, 0, 0, 1, false};
  }
  STD_TORCH_CHECK(count == batch * rows * blocks, "scaled_mm: ", name, " has ", count, " elements; allowed are 1, ", batch,
                  " (one per matrix), ", batch * rows, " (one per row) and ", batch * rows * blocks,
                  " (one per row and block of 128)");
  return {values, blocks, 1, rows * blocks, true};
}

void check(Status status) {
  STD_TORCH_CHECK(status != Status::kUnsupported, "scaled_mm: more tiles, rows or columns than 2^31 - 1; split the product");
  STD_TORCH_CHECK(status != Status::kDriver, "scaled_mm: the driver made no tensor map; update it to CUDA 12 or later");
  STD_TORCH_CHECK(status == Status::kOk, "scaled_mm: the launch failed: ", cudaGetErrorString(cudaGetLastError()));
}

bool runs_hopper(int major) {
#if QSYNC_HAS_SM90A
  return major == 9;
#else
  return false;
#endif
}

void run_earlier(const Arguments& args, int capability) {
#if QSYNC_HAS_SM89
  if (args.a_code != Code::kInt8 && capability >= 89) {
    return check(matmul::run_ada(args));
  }
#endif
#if QSYNC_HAS_SM80 || QSYNC_HAS_SM86 || QSYNC_HAS_SM89
  if (args.a_code == Code::kInt8 && capability >= 80) {
    return check(matmul::run_ampere(args));
  }
#endif
#if QSYNC_HAS_SM75
  if (args.a_code == Code::kInt8 && capability >= 75) {
    return check(matmul::run_turing(args));
  }
#endif
  STD_TORCH_CHECK(args.a_code == Code::kInt8, "scaled_mm: FP8 products need compute capability 8.9 and code for it; use INT8");
  STD_TORCH_CHECK(false, "scaled_mm: this library has no code for compute capability ", capability, "; build it again");
}

#if QSYNC_HAS_SM90A
void run_hopper(Arguments args, const Tensor& like) {
  if (args.depth == 0) {
    check(matmul::run_empty_sm90(args));
    if (args.largest != nullptr) {
      check(matmul::find_largest(args));
    }
    return;
  }
  const int64_t pitch = (args.depth + 15) / 16 * 16;
  // They live until the kernels are launched; the allocator gives their memory to this stream alone after that.
  std::optional<Tensor> a, b;
  if (!matmul::a_fits_sm90(args)) {
    a = empty_on(like, {args.batch * args.rows * pitch}, ScalarType::Byte);
  }
  if (!matmul::b_fits_sm90(args)) {
    b = empty_on(like, {args.batch * args.columns * pitch}, ScalarType::Byte);
  }
  if (a.has_value() || b.has_value()) {
    check(matmul::realign_sm90(&args, a.has_value() ? a->data_ptr() : nullptr, b.has_value() ? b->data_ptr() : nullptr));
  }
  const Choice choice = matmul::choose(args);
  const int64_t bytes = matmul::workspace_bytes_sm90(args, choice);
  if (bytes == 0) {
    check(matmul::run_sm90(args, choice, nullptr));
  } else {
    const Tensor workspace = empty_on(like, {bytes}, ScalarType::Byte);
    check(matmul::run_sm90(args, choice, workspace.data_ptr()));
  }
  if (args.largest != nullptr && !matmul::finds_largest_sm90(args, choice)) {
    check(matmul::find_largest(args));
  }
}
#endif

Tensor multiply(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                const std::optional<Tensor>& bias, const std::string& epilogue, ScalarType out_dtype, bool accurate,
                Tensor* preactivation, Tensor* largest) {
  STD_TORCH_CHECK((a.dim() == 2 || a.dim() == 3) && a.dim() == b.dim(), "scaled_mm: codes of ", a.dim(), " and ", b.dim(),
                  " dimensions; allowed are two matrices or two batches of them");
  const int64_t last = a.dim() - 1;
  STD_TORCH_CHECK(a.size(last) == b.size(last) && (last == 1 || a.size(0) == b.size(0)),
                  "scaled_mm: a ends in ", a.size(last), " and b in ", b.size(last),
                  "; both end in the contraction, and begin with the same batch if they have one");
  STD_TORCH_CHECK(b.is_cuda() && b.get_device_index() == a.get_device_index(), "scaled_mm: a and b are on different devices");
  Arguments args = {};
  args.a_code = code_of(a, "a"), args.b_code = code_of(b, "b");
  STD_TORCH_CHECK((args.a_code == Code::kInt8) == (args.b_code == Code::kInt8), "scaled_mm: one operand is INT8, one FP8");
  args.batch = last == 2 ? a.size(0) : 1;
  args.rows = a.size(last - 1), args.columns = b.size(last - 1), args.depth = a.size(last);
  const Operand left = operand_of(a, "a"), right = operand_of(b, "b");
  args.a = left.codes, args.a_pitch = left.pitch, args.a_batch = left.batch;
  args.b = right.codes, args.b_pitch = right.pitch, args.b_batch = right.batch;
  const ScaleSteps rows = scale_of(a_scale, a, "a_scale"), columns = scale_of(b_scale, b, "b_scale");
  args.a_scale = rows.scales, args.a_scale_row = rows.row, args.a_scale_block = rows.block, args.a_scale_batch = rows.batch;
  args.b_scale = columns.scales, args.b_scale_row = columns.row, args.b_scale_block = columns.block;
  args.b_scale_batch = columns.batch;
  args.block_scales = rows.blocks || columns.blocks;
  args.out_float = float_of(out_dtype, "out_dtype"), args.activation = activation_of(epilogue), args.accurate = accurate;
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->is_cuda() && bias->get_device_index() == a.get_device_index() && bias->is_contiguous() &&
                        bias->numel() == args.columns,
                    "scaled_mm: bias has ", bias->numel(), " elements; needed are ", args.columns,
                    ", contiguous, on the card of the codes");
    args.bias = bias->data_ptr();
    args.bias_float = float_of(bias->scalar_type(), "bias");
  }
  const OnDeviceOf guard(a);
  const auto make = [&] {
    return last == 2 ? empty_on(a, {args.batch, args.rows, args.columns}, out_dtype)
                     : empty_on(a, {args.rows, args.columns}, out_dtype);
  };
  Tensor out = make();
  args.out = out.data_ptr();
  if (preactivation != nullptr) {
    *preactivation = make();
    args.preactivation = preactivation->data_ptr();
  }
  args.stream = stream_of(a);
  if (largest != nullptr) {
    *largest = empty_on(a, {1}, ScalarType::Float);
    args.largest = static_cast<uint32_t*>(largest->data_ptr());
    STD_CUDA_CHECK(cudaMemsetAsync(args.largest, 0, sizeof(uint32_t), args.stream));
  }
  if (out.numel() == 0) {
    return out;
  }
  args.multiprocessors = multiprocessors_of(args.stream);
  int device = 0, major = 0, minor = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (!runs_hopper(major)) {
    run_earlier(args, major * 10 + minor);
    if (args.largest != nullptr) {
      check(matmul::find_largest(args));
    }
    return out;
  }
#if QSYNC_HAS_SM90A
  run_hopper(args, a);
#endif
  return out;
}

Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                 const std::optional<Tensor>& bias, const std::string& epilogue, ScalarType out_dtype, bool accurate) {
  return multiply(a, b, a_scale, b_scale, bias, epilogue, out_dtype, accurate, nullptr, nullptr);
}

std::tuple<Tensor, Tensor> scaled_mm_aux(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                                         const std::optional<Tensor>& bias, const std::string& epilogue,
                                         ScalarType out_dtype, bool accurate) {
  Tensor preactivation;
  Tensor out = multiply(a, b, a_scale, b_scale, bias, epilogue, out_dtype, accurate, &preactivation, nullptr);
  return {out, preactivation};
}

std::tuple<Tensor, Tensor> scaled_mm_amax(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                                          const std::optional<Tensor>& bias, ScalarType out_dtype) {
  Tensor largest;
  Tensor out = multiply(a, b, a_scale, b_scale, bias, "none", out_dtype, false, nullptr, &largest);
  return {out, largest};
}

matmul::Key key_from(const std::vector<int64_t>& numbers) {
  matmul::Key key;
  STD_TORCH_CHECK(numbers.size() == key.size(), "scaled_mm: a key has ", key.size(), " numbers, not ", numbers.size());
  std::copy(numbers.begin(), numbers.end(), key.begin());
  return key;
}

// Sets (or with a negative variant forgets) how products of a key are cut.
void scaled_mm_remember(std::vector<int64_t> key, int64_t variant, int64_t splits, int64_t group) {
#if QSYNC_HAS_SM90A
  matmul::remember(key_from(key), Choice{int(variant), int(splits), int(group)});
#endif
}

// How a product of a key is cut: variant, splits, group.
std::vector<int64_t> scaled_mm_choice(std::vector<int64_t> key) {
#if QSYNC_HAS_SM90A
  const matmul::Key of = key_from(key);
  Arguments args = {};
  args.a_code = Code(of[0]), args.b_code = Code(of[1]), args.out_float = of[2] == 4 ? Float::kFP32 : Float::kBF16;
  args.accurate = args.block_scales = of[3] != 0;
  args.batch = of[4], args.rows = of[5], args.columns = of[6], args.depth = of[7], args.multiprocessors = int(of[8]);
  const Choice choice = matmul::choose(args);
  return {choice.variant, choice.splits, choice.group};
#else
  return {};
#endif
}

// Indices of the tiles that products with such codes of b have.
std::vector<int64_t> scaled_mm_variants(int64_t b_code, bool promoting) {
  std::vector<int64_t> found;
#if QSYNC_HAS_SM90A
  matmul::TileShape tile;
  for (int index = 0; index < matmul::tile_count(); ++index) {
    if (matmul::tile_at(Code(b_code), index, &tile) && tile.promote == promoting) {
      found.push_back(index);
    }
  }
#endif
  return found;
}

// Multiprocessors that the stream now current on the card of `like` may use.
int64_t stream_multiprocessors(const Tensor& like) {
  const OnDeviceOf guard(like);
  return multiprocessors_of(stream_of(like));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CUDA, m) {
  m.impl("scaled_mm", TORCH_BOX(&scaled_mm));
  m.impl("scaled_mm_aux", TORCH_BOX(&scaled_mm_aux));
  m.impl("scaled_mm_amax", TORCH_BOX(&scaled_mm_amax));
  m.impl("stream_multiprocessors", TORCH_BOX(&stream_multiprocessors));
}

STABLE_TORCH_LIBRARY_IMPL(qsync_opt, CompositeExplicitAutograd, m) {
  m.impl("scaled_mm_remember", TORCH_BOX(&scaled_mm_remember));
  m.impl("scaled_mm_variants", TORCH_BOX(&scaled_mm_variants));
  m.impl("scaled_mm_choice", TORCH_BOX(&scaled_mm_choice));
}

}  // namespace qsync
