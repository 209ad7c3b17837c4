// The tiles of the INT8 convolution of Hopper, which of them a shape takes, and the tensor maps that a launch needs.
#include "convolution_sm90.cuh"

#include <algorithm>
#include <cudaTypedefs.h>

namespace qsync::convolution {
namespace {

template <int kGroups, int kBlocks, int kColumns, int kBytes, int kCopies, int kResident>
constexpr Sm90Variant variant(const char* name, double round_ns, double copy_ns) {
  using Tile = Sm90Tile<kGroups, kBlocks, kColumns, kBytes, kCopies, kResident>;
  return {name,      Tile::kRows, kColumns, kBytes, kCopies, kResident, round_ns, copy_ns, &sm90_launch<Tile>};
}

// Names: rows x columns x channels of a copy x copies per stage, r blocks per multiprocessor. These are the best of 32
// that were timed on the convolutions of ResNet-50 (batch 128, H200); the times are a fit of those timings.
constexpr Sm90Variant kVariants[] = {
    variant<3, 1, 128, 128, 1, 1>("192x128x128", 1558, 560),
    variant<2, 2, 64, 64, 1, 2>("256x64x64 r2", 2362, 553),
    variant<3, 1, 256, 64, 1, 1>("192x256x64", 3937, 840),
    variant<3, 1, 64, 128, 1, 1>("192x64x128", 758, 477),
    variant<1, 1, 128, 128, 1, 3>("64x128x128 r3", 1513, 994),
    variant<2, 1, 64, 128, 1, 2>("128x64x128 r2", 1207, 486),
    variant<2, 2, 64, 64, 3, 1>("256x64x64x3", 1373, 253),
    variant<2, 1, 128, 128, 1, 1>("128x128x128", 1204, 432),
};
constexpr int kCount = sizeof(kVariants) / sizeof(kVariants[0]);

// Shapes on which another tile was measured to be faster than the one of the lowest estimate.
struct Tuned {
  int c, k, taps, stride, rows, variant;
};
constexpr Tuned kTuned[] = {
    {64, 256, 1, 1, 401408, 3},  {256, 128, 1, 1, 401408, 4},  {512, 128, 1, 1, 100352, 7},
    {256, 256, 9, 2, 25088, 2},  {1024, 256, 1, 1, 25088, 2},  {256, 256, 9, 1, 25088, 2},
};

int bytes_of(Output output) { return output == Output::kFloat32 ? 4 : 2; }

int channel_blocks(const Geometry& g, const Sm90Variant& v) { return (g.c + v.bytes - 1) / v.bytes; }

bool usable(const Geometry& g, const Sm90Variant& v) {
  return g.r * g.s * channel_blocks(g, v) % v.copies == 0;
}

// Estimated time: rounds of tiles over the card.
double cost_ns(const Geometry& g, const Sm90Variant& v, int multiprocessors) {
  const int64_t rows = int64_t{g.n} * g.p * g.q;
  const int64_t tiles = (rows + v.rows - 1) / v.rows * ((g.k + v.columns - 1) / v.columns);
  const int64_t at_once = int64_t{multiprocessors} * v.resident;
  const int copies = g.r * g.s * channel_blocks(g, v);
  return static_cast<double>((tiles + at_once - 1) / at_once) * (v.round_ns + v.copy_ns * copies);
}

int choose(const Geometry& g, int multiprocessors) {
  const int64_t rows = int64_t{g.n} * g.p * g.q;
  for (const Tuned& t : kTuned) {
    const bool same = g.c == t.c && g.k == t.k && g.r * g.s == t.taps && g.stride_h == t.stride;
    // The batch may differ somewhat.
    if (same && rows >= t.rows - t.rows / 5 && rows <= t.rows + t.rows / 5) return t.variant;
  }
  int best = -1;
  double lowest = 0;
  for (int i = 0; i < kCount; ++i) {
    if (!usable(g, kVariants[i])) continue;
    const double found = cost_ns(g, kVariants[i], multiprocessors);
    if (best < 0 || found < lowest) {
      best = i;
      lowest = found;
    }
  }
  return best;
}

struct Encoders {
  PFN_cuTensorMapEncodeTiled_v12000 tiled = nullptr;
  PFN_cuTensorMapEncodeIm2col_v12000 im2col = nullptr;
};

// The driver's functions, without linking against the driver.
const Encoders& encoders() {
  static const Encoders found = [] {
    Encoders e;
    cudaDriverEntryPointQueryResult result;
    void* function = nullptr;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) ==
        cudaSuccess) {
      e.tiled = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeIm2col", &function, 12000, cudaEnableDefault, &result) ==
        cudaSuccess) {
      e.im2col = reinterpret_cast<PFN_cuTensorMapEncodeIm2col_v12000>(function);
    }
    return e;
  }();
  return found;
}

bool is_flat(const Geometry& g, const Operands& o) {
  return g.r == 1 && g.s == 1 && g.stride_h == 1 && g.stride_w == 1 && g.pad_h == 0 && g.pad_w == 0 &&
         o.x_h == g.w * o.x_w && o.x_n == g.h * o.x_h;
}

CUresult encode_tiled(
    CUtensorMap* map, CUtensorMapDataType type, int rank, const void* base, const cuuint64_t* sizes,
    const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  const cuuint32_t steps[3] = {1, 1, 1};
  return encoders().tiled(
      map, type, rank, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

CUresult encode_input(Sm90Params& params, const Geometry& g, const Operands& o, const Sm90Variant& v) {
  const auto swizzle = v.bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  if (params.flat) {
    const cuuint64_t sizes[2] = {cuuint64_t(g.c), cuuint64_t(params.rows)}, strides[1] = {cuuint64_t(o.x_w)};
    const cuuint32_t box[2] = {cuuint32_t(v.bytes), cuuint32_t(v.rows)};
    return encode_tiled(&params.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, o.x, sizes, strides, box, swizzle);
  }
  const cuuint64_t sizes[4] = {cuuint64_t(g.c), cuuint64_t(g.w), cuuint64_t(g.h), cuuint64_t(g.n)};
  const cuuint64_t strides[3] = {cuuint64_t(o.x_w), cuuint64_t(o.x_h), cuuint64_t(o.x_n)};
  const int lower[2] = {-g.pad_w, -g.pad_h};
  const int upper[2] = {g.pad_w - (g.s - 1) * g.dilation_w, g.pad_h - (g.r - 1) * g.dilation_h};
  const cuuint32_t steps[4] = {1, cuuint32_t(g.stride_w), cuuint32_t(g.stride_h), 1};
  return encoders().im2col(
      &params.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<int8_t*>(o.x), sizes, strides, lower, upper, v.bytes,
      v.rows, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

CUresult encode_weight(Sm90Params& params, const Geometry& g, const Operands& o, const Sm90Variant& v) {
  const int64_t taps = int64_t{g.r} * g.s;
  const cuuint64_t sizes[3] = {cuuint64_t(g.c), cuuint64_t(taps), cuuint64_t(g.k)};
  const cuuint64_t strides[2] = {cuuint64_t(g.c), cuuint64_t(taps * g.c)};
  const cuuint32_t box[3] = {cuuint32_t(v.bytes), 1, cuuint32_t(v.columns)};
  return encode_tiled(
      &params.weight, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, o.weight, sizes, strides, box,
      v.bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

CUresult encode_output(Sm90Params& params, const Geometry& g, const Operands& o) {
  const Output output = params.epilogue.output;
  const auto type = output == Output::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                    : output == Output::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[2] = {cuuint64_t(g.k), cuuint64_t(params.rows)};
  const cuuint64_t strides[1] = {cuuint64_t(g.k) * bytes_of(output)};
  const cuuint32_t box[2] = {cuuint32_t(128 / bytes_of(output)), 16};  // one warp's share of a block
  return encode_tiled(&params.out, type, 2, o.out, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace

int sm90_variants() { return kCount; }

const char* sm90_variant_name(int variant) { return kVariants[variant].name; }

bool sm90_variant_fits(const Geometry& g, int variant) { return usable(g, kVariants[variant]); }

bool sm90_fits(const Geometry& g, const Operands& o, const Epilogue& e) {
  const auto addresses = reinterpret_cast<uintptr_t>(o.x) | reinterpret_cast<uintptr_t>(o.weight) |
                         reinterpret_cast<uintptr_t>(o.out);
  // The copy engine reads factors, one per column.
  const auto factors = reinterpret_cast<uintptr_t>(e.weight_scale) | reinterpret_cast<uintptr_t>(e.bias);
  if (factors % 16 != 0 || (e.weight_step == 0 && g.k > 1)) return false;
  const auto steps = o.x_n | o.x_h | o.x_w | int64_t{g.c} | int64_t{g.k} * bytes_of(e.output);
  if (g.groups != 1 || addresses % 16 != 0 || steps % 16 != 0) return false;
  // What the instruction and the tensor map can hold: offsets of a tap, corners of the box, steps, coordinates.
  const int reach = std::max((g.r - 1) * g.dilation_h, (g.s - 1) * g.dilation_w);
  if (reach > 127 || std::max(g.pad_h, g.pad_w) > 127 || std::max(g.stride_h, g.stride_w) > 8) return false;
  return int64_t{g.n} * g.p * g.q < (int64_t{1} << 31) - 1024 && encoders().tiled != nullptr &&
         encoders().im2col != nullptr;
}

cudaError_t launch_sm90(
    const Geometry& g, const Operands& o, const Epilogue& e, int variant, int multiprocessors, cudaStream_t stream) {
  const Sm90Variant& v = kVariants[variant < 0 ? choose(g, multiprocessors) : variant];
  Sm90Params params = {};
  params.epilogue = e;
  params.rows = g.n * g.p * g.q;
  params.columns = g.k;
  params.pixels = g.p * g.q;
  params.q = g.q;
  params.stride_h = g.stride_h;
  params.stride_w = g.stride_w;
  params.pad_h = g.pad_h;
  params.pad_w = g.pad_w;
  params.dilation_h = g.dilation_h;
  params.dilation_w = g.dilation_w;
  params.r = g.r;
  params.s = g.s;
  params.channel_blocks = channel_blocks(g, v);
  params.flat = is_flat(g, o);
  if (encode_input(params, g, o, v) != CUDA_SUCCESS || encode_weight(params, g, o, v) != CUDA_SUCCESS ||
      encode_output(params, g, o) != CUDA_SUCCESS) {
    return cudaErrorInvalidValue;
  }
  return v.launch(params, multiprocessors, stream);
}

}  // namespace qsync::convolution
