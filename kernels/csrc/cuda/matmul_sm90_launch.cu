// Host side of the Hopper products: tensor maps, the choice of tile, launches, and the kernel that adds split sums up.
#include <cuda.h>

#include <algorithm>
#include <atomic>

#include "matmul_choice.h"
#include "matmul_sm90.cuh"
#include "matmul_sm90_tiles.h"

namespace qsync::matmul {

#define QSYNC_FINDERS(NAME) \
  bool find_##NAME##_0(int, Instance*); \
  bool find_##NAME##_1(int, Instance*); \
  bool find_##NAME##_2(int, Instance*); \
  bool find_##NAME##_3(int, Instance*);
QSYNC_FINDERS(int8)
QSYNC_FINDERS(e4m3_e4m3)
QSYNC_FINDERS(e5m2_e4m3)
bool find_e4m3_e5m2_2(int, Instance*);
bool find_e5m2_e5m2_2(int, Instance*);

namespace {

#define QSYNC_FIND(NAME) \
  (find_##NAME##_0(index, found) || find_##NAME##_1(index, found) || find_##NAME##_2(index, found) || \
   find_##NAME##_3(index, found))
bool find(Code a, Code b, int index, Instance* found) {
  if (a == Code::kInt8) {
    return QSYNC_FIND(int8);
  }
  if (a == Code::kE4M3) {
    return b == Code::kE4M3 ? QSYNC_FIND(e4m3_e4m3) : find_e4m3_e5m2_2(index, found);
  }
  return b == Code::kE4M3 ? QSYNC_FIND(e5m2_e4m3) : find_e5m2_e5m2_2(index, found);
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled encoder() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
  }();
  return found;
}

// A map of (matrices, rows, columns) whose boxes are `box_rows` rows of 128 bytes, swizzled.
bool encode(CUtensorMap* map, CUtensorMapDataType type, int bytes_each, const void* pointer, int64_t columns, int64_t rows,
            int64_t matrices, int64_t pitch, int64_t matrix, int box_rows) {
  // A dimension of one element has no step; the driver wants some multiple of 16 all the same.
  const int64_t row_bytes = rows > 1 ? pitch * bytes_each : 16, matrix_bytes = matrices > 1 ? matrix * bytes_each : 16;
  const cuuint64_t sizes[3] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(matrices)};
  const cuuint64_t steps[2] = {cuuint64_t(row_bytes), cuuint64_t(matrix_bytes)};
  const cuuint32_t box[3] = {cuuint32_t(128 / bytes_each), cuuint32_t(box_rows), 1}, each[3] = {1, 1, 1};
  return encoder() != nullptr &&
         encoder()(map, type, 3, const_cast<void*>(pointer), sizes, steps, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool copyable(const void* pointer, int64_t row_bytes, int64_t matrix_bytes) {
  return (reinterpret_cast<uintptr_t>(pointer) | uintptr_t(row_bytes) | uintptr_t(matrix_bytes)) % 16 == 0;
}

constexpr int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Every thread: 16 neighbouring codes of one row, read byte by byte, written at once.
__global__ void __launch_bounds__(256) realign_kernel(const uint8_t* from, uint4* to, int64_t pieces, int64_t rows,
                                                      int64_t depth, int64_t row_pieces, int64_t pitch, int64_t batch) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < pieces; i += gridDim.x * int64_t{256}) {
    const int64_t line = i / row_pieces, k = i % row_pieces * 16;
    const uint8_t* source = from + line / rows * batch + line % rows * pitch + k;
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (k + j < depth) {
        words[j / 4] |= uint32_t{source[j]} << (j % 4 * 8);
      }
    }
    to[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Stores the first `width` of four values, at once where their place is aligned.
__device__ __forceinline__ void store_quad(void* values, Float type, int64_t index, const float (&x)[4], int width) {
  if (width == 4 && index % 4 == 0 && reinterpret_cast<uintptr_t>(values) % 16 == 0) {
    if (type == Float::kFP32) {
      static_cast<float4*>(values)[index / 4] = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      const bool bf16 = type == Float::kBF16;
      static_cast<uint2*>(values)[index / 4] = make_uint2(pack_pair(x[0], x[1], bf16), pack_pair(x[2], x[3], bf16));
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < width) {
      store_float(values, type, index + j, x[j]);
    }
  }
}

// Blocks of 64 x 4 threads over column quads and lines (rows of all matrices); a thread: four neighbouring results of a line.
// Traffic per result: 4 bytes per split in, 2 or 4 bytes out.
// Contract: INT8 sums are added as 64-bit integers, exactly; FP32 sums in the order of the splits, the same on every run.
template <bool kInteger>
__global__ void __launch_bounds__(256) finish_kernel(const __grid_constant__ Arguments p, const void* sums, int64_t pitch,
                                                     int splits, bool scaled) {
  using Part = std::conditional_t<kInteger, int4, float4>;
  using Whole = std::conditional_t<kInteger, int64_t, float>;
  const int64_t column = (blockIdx.x * int64_t{64} + threadIdx.x) * 4, lines = p.batch * p.rows, step = lines * pitch / 4;
  if (column >= p.columns) {
    return;
  }
  wait_for_previous();
  const int width = p.columns - column < 4 ? static_cast<int>(p.columns - column) : 4;
  for (int64_t line = blockIdx.y * int64_t{4} + threadIdx.y; line < lines; line += gridDim.y * int64_t{4}) {
    const int64_t z = p.batch == 1 ? 0 : line / p.rows, row = line - z * p.rows;
    const Part* from = static_cast<const Part*>(sums) + (line * pitch + column) / 4;
    Whole whole[4] = {0, 0, 0, 0};
    // Small results of deep products have many splits and few threads: those must have much under way.
#pragma unroll 16
    for (int s = 0; s < splits; ++s) {
      const Part part = from[s * step];
      whole[0] += part.x, whole[1] += part.y, whole[2] += part.z, whole[3] += part.w;
    }
    const float row_scale = scaled ? p.a_scale[z * p.a_scale_batch + row * p.a_scale_row] : 1.0f;
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < width) {
        const float scale = scaled ? row_scale * p.b_scale[z * p.b_scale_batch + (column + j) * p.b_scale_row] : 1.0f;
        const float bias = p.bias != nullptr ? load_float(p.bias, p.bias_float, column + j) : 0.0f;
        x[j] = fmaf(static_cast<float>(whole[j]), scale, bias);
      }
    }
    if (p.preactivation != nullptr) {
      store_quad(p.preactivation, p.out_float, line * p.columns + column, x, width);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < width) {
        x[j] = activate(x[j], p.activation);
      }
    }
    store_quad(p.out, p.out_float, line * p.columns + column, x, width);
  }
}

// The kernel may start while the one before it ends: it waits for its results itself.
cudaLaunchAttribute early() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

Status finish(const Arguments& args, bool integer, const void* sums, int splits) {
  const int64_t pitch = up(args.columns, 4), wide = up(pitch / 4, 64) / 64, lines = up(args.batch * args.rows, 4) / 4;
  const dim3 grid(unsigned(wide), unsigned(std::min<int64_t>(lines, 65535)));
  const auto kernel = integer ? finish_kernel<true> : finish_kernel<false>;
  cudaLaunchAttribute attribute = early();
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(64, 4);
  config.stream = args.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const bool scaled = splits > 0 && !args.block_scales;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args, sums, pitch, splits, scaled);
  return error == cudaSuccess ? Status::kOk : Status::kLaunch;
}

// Lifts the limit of shared memory, once per instance and card.
Status allow_shared(const Instance& instance) {
  static std::atomic<const void*> done[64][8];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    return Status::kLaunch;
  }
  std::atomic<const void*>* seen = nullptr;
  if (device < 8) {
    seen = &done[reinterpret_cast<uintptr_t>(instance.kernel) / 16 % 64][device];
    if (seen->load(std::memory_order_relaxed) == instance.kernel) {
      return Status::kOk;
    }
  }
  if (cudaFuncSetAttribute(instance.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, instance.shared_bytes) !=
      cudaSuccess) {
    return Status::kLaunch;
  }
  if (seen != nullptr) {
    seen->store(instance.kernel, std::memory_order_relaxed);
  }
  return Status::kOk;
}

// Plain results only: the other ways to write results want factors per column.
bool has_one_scale(const Arguments& args) {
  return !args.block_scales && args.bias == nullptr && args.a_scale_row == 0 && args.a_scale_batch == 0 &&
         args.b_scale_row == 0 && args.b_scale_batch == 0 && args.activation == Activation::kNone &&
         args.preactivation == nullptr && copyable(args.out, args.columns * (args.out_float == Float::kFP32 ? 4 : 2), 0);
}

Status launch_product(const Arguments& args, const Instance& instance, const Choice& choice, void* sums, int64_t pitch) {
  Launch p;
  const int rows = int(args.rows), columns = int(args.columns);
  const bool raw = sums != nullptr;
  if (!encode(&p.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.a, args.depth, rows, args.batch, args.a_pitch, args.a_batch,
              instance.rows / instance.cluster_columns) ||
      !encode(&p.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.b, args.depth, columns, args.batch, args.b_pitch, args.b_batch,
              instance.columns / instance.cluster_rows)) {
    return Status::kDriver;
  }
  const int bytes = raw || args.out_float == Float::kFP32 ? 4 : 2;
  const int64_t out_pitch = raw ? pitch : columns, matrices = args.batch * choice.splits;
  void* out = raw ? sums : args.out;
  p.copy_out = copyable(out, out_pitch * bytes, 0) && copyable(args.preactivation, 0, 0);
  const CUtensorMapDataType type = raw                                ? CU_TENSOR_MAP_DATA_TYPE_INT32
                                   : args.out_float == Float::kFP32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : args.out_float == Float::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto encode_out = [&](CUtensorMap* map, const void* pointer) {
    return encode(map, type, bytes, pointer, columns, rows, matrices, out_pitch, out_pitch * rows, kWarpRows);
  };
  p.preactivation_pointer = raw ? nullptr : args.preactivation;
  if (p.copy_out && (!encode_out(&p.out, out) ||
                     (p.preactivation_pointer != nullptr && !encode_out(&p.preactivation, p.preactivation_pointer)))) {
    return Status::kDriver;
  }
  if (!p.copy_out) {
    p.out = p.preactivation = p.a;  // never used
  }
  p.a_scale = args.a_scale, p.b_scale = args.b_scale, p.bias = raw ? nullptr : args.bias, p.out_pointer = out;
  p.a_scale_row = args.a_scale_row, p.a_scale_block = args.a_scale_block, p.a_scale_batch = args.a_scale_batch;
  p.b_scale_row = args.b_scale_row, p.b_scale_block = args.b_scale_block, p.b_scale_batch = args.b_scale_batch;
  p.rows = rows, p.columns = columns, p.depth_blocks = int(up(args.depth, kDepth) / kDepth);
  const int64_t tile_rows = up(rows, instance.rows * instance.cluster_rows) / (instance.rows * instance.cluster_rows);
  const int64_t tile_columns =
      up(columns, instance.columns * instance.cluster_columns) / (instance.columns * instance.cluster_columns);
  const int64_t total = tile_rows * tile_columns * matrices;
  if (total > INT32_MAX || matrices > INT32_MAX) {
    return Status::kUnsupported;
  }
  p.tile_rows = int(tile_rows), p.tile_columns = int(tile_columns), p.batch = int(args.batch);
  p.split_blocks = int(up(p.depth_blocks, choice.splits) / choice.splits);
  p.group = std::max(1, std::min(choice.group, p.tile_rows)), p.total = int(total);
  p.tiles.set(p.tile_rows * p.tile_columns), p.matrices.set(p.batch), p.width.set(p.group * p.tile_columns);
  p.height.set(p.group), p.last_height.set(p.tile_rows % p.group == 0 ? p.group : p.tile_rows % p.group);
  p.out_float = args.out_float, p.bias_float = args.bias_float;
  p.activation = raw ? Activation::kNone : args.activation;
  p.raw = raw, p.block_scales = args.block_scales;
  p.one_scale = !raw && has_one_scale(args);
  p.largest = finds_largest_sm90(args, choice) ? args.largest : nullptr;
  // The lead is announced once per tile: a tile must be longer than what a warpgroup can run ahead.
  const int least_blocks = p.depth_blocks - (choice.splits - 1) * p.split_blocks;
  p.lead = instance.alternating || instance.promote || least_blocks < instance.stages ? 0 : 1;

  const int cluster = instance.cluster_rows * instance.cluster_columns;
  const int clusters = int(std::min<int64_t>(total, std::max(1, args.multiprocessors / cluster)));
  if (const Status status = allow_shared(instance); status != Status::kOk) {
    return status;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(clusters * cluster));
  config.blockDim = dim3(unsigned(instance.threads));
  config.dynamicSmemBytes = size_t(instance.shared_bytes);
  config.stream = args.stream;
  cudaLaunchAttribute attributes[2] = {early(), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = 2;
  void* parameters[] = {&p};
  return cudaLaunchKernelExC(&config, instance.kernel, parameters) == cudaSuccess ? Status::kOk : Status::kLaunch;
}

}  // namespace

bool tile_at(Code b, int index, TileShape* shape) {
  if (b == Code::kE5M2 && (index < QSYNC_TILES_2_BEGIN || index >= QSYNC_TILES_3_BEGIN)) {
    return false;
  }
#define QSYNC_SHAPE(INDEX, ROWS, COLUMNS, CLUSTER_ROWS, CLUSTER_COLUMNS, ALTERNATING, PROMOTE, BUFFERS) \
  case INDEX: \
    *shape = {ROWS, COLUMNS, CLUSTER_ROWS, CLUSTER_COLUMNS, ALTERNATING, PROMOTE}; \
    return true;
  switch (index) { QSYNC_TILES_0(QSYNC_SHAPE) QSYNC_TILES_1(QSYNC_SHAPE) QSYNC_TILES_2(QSYNC_SHAPE) QSYNC_TILES_3(QSYNC_SHAPE) }
  return false;
}

bool a_fits_sm90(const Arguments& args) {
  return copyable(args.a, args.rows > 1 ? args.a_pitch : 0, args.batch > 1 ? args.a_batch : 0);
}

bool b_fits_sm90(const Arguments& args) {
  return copyable(args.b, args.columns > 1 ? args.b_pitch : 0, args.batch > 1 ? args.b_batch : 0);
}

Status realign_sm90(Arguments* args, void* a_copy, void* b_copy) {
  const int64_t pitch = up(args->depth, 16);
  const auto copy = [&](const void** from, void* to, int64_t rows, int64_t* from_pitch, int64_t* from_batch) {
    const int64_t pieces = args->batch * rows * (pitch / 16);
    const int blocks = int(std::min<int64_t>(up(pieces, 256) / 256, int64_t{16} * args->multiprocessors));
    realign_kernel<<<blocks, 256, 0, args->stream>>>(static_cast<const uint8_t*>(*from), static_cast<uint4*>(to), pieces,
                                                      rows, args->depth, pitch / 16, *from_pitch, *from_batch);
    *from = to, *from_pitch = pitch, *from_batch = rows * pitch;
  };
  if (a_copy != nullptr) {
    copy(&args->a, a_copy, args->rows, &args->a_pitch, &args->a_batch);
  }
  if (b_copy != nullptr) {
    copy(&args->b, b_copy, args->columns, &args->b_pitch, &args->b_batch);
  }
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kLaunch;
}

int64_t workspace_bytes_sm90(const Arguments& args, const Choice& choice) {
  return choice.splits > 1 ? choice.splits * args.batch * args.rows * up(args.columns, 4) * 4 : 0;
}

bool finds_largest_sm90(const Arguments& args, const Choice& choice) {
  return args.largest != nullptr && choice.splits <= 1 && args.out_float != Float::kFP32 && has_one_scale(args);
}

Status run_sm90(const Arguments& args, const Choice& choice, void* workspace) {
  Instance instance;
  if (!find(args.a_code, args.b_code, choice.variant, &instance)) {
    return Status::kUnsupported;
  }
  if (args.rows > INT32_MAX || args.columns > INT32_MAX || args.depth > INT32_MAX - kDepth || args.batch > INT32_MAX) {
    return Status::kUnsupported;
  }
  if (choice.splits <= 1) {
    return launch_product(args, instance, choice, nullptr, 0);
  }
  const int64_t pitch = up(args.columns, 4);
  if (const Status status = launch_product(args, instance, choice, workspace, pitch); status != Status::kOk) {
    return status;
  }
  return finish(args, args.a_code == Code::kInt8 && !instance.promote, workspace, choice.splits);
}

Status run_empty_sm90(const Arguments& args) { return finish(args, true, nullptr, 0); }

}  // namespace qsync::matmul
