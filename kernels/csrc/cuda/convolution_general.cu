// INT8 convolution for every card from sm_75 on and for every geometry: mma.sync implicit GEMM, and a direct kernel for
// groups of few channels.
#include "convolution.cuh"

namespace qsync::convolution {
namespace {

constexpr int kRows = 128, kColumns = 64, kDepth = 64;  // tile: output pixels, output channels, bytes of taps x channels
constexpr int kThreads = 256;
constexpr int kPitch = kDepth + 16;  // bytes: rows of eight lanes fall on different banks

// One 32-row, 32-column, 32-deep product of a warp from two tiles of shared memory.
// Lane l holds row l / 4 (and + 8) and bytes 4 (l % 4) .. of every fragment, as the instructions lay them out.
__device__ __forceinline__ void multiply(int (&sums)[2][4][4], const uint32_t* a, const uint32_t* b) {
  constexpr int kWords = kPitch / 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint32_t* row = a + m * 16 * kWords;
    const uint32_t a0 = row[0], a1 = row[8 * kWords], a2 = row[4], a3 = row[8 * kWords + 4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t b0 = b[n * 8 * kWords], b1 = b[n * 8 * kWords + 4];
      int(&d)[4] = sums[m][n];
#if __CUDA_ARCH__ >= 800
      asm volatile(
          "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
      asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                   : "+r"(d[0]), "+r"(d[1])
                   : "r"(a0), "r"(b0));
      asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                   : "+r"(d[0]), "+r"(d[1])
                   : "r"(a2), "r"(b1));
      asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                   : "+r"(d[2]), "+r"(d[3])
                   : "r"(a1), "r"(b0));
      asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                   : "+r"(d[2]), "+r"(d[3])
                   : "r"(a3), "r"(b1));
#endif
    }
  }
}

// Reads 16 bytes of a row of the implicit matrix: output pixel (image, top, left), taps x channels from `depth` on.
struct Reader {
  const Geometry& g;
  const Operands& o;
  int channels, depth_end;  // per group
  int64_t first_channel;

  __device__ __forceinline__ const int8_t* at(int64_t image, int h, int w, int c) const {
    return o.x + image * o.x_n + h * o.x_h + w * o.x_w + first_channel + c;
  }

  template <bool kAligned>
  __device__ __forceinline__ uint4 read(bool valid, int64_t image, int top, int left, int depth) const {
    uint4 result = make_uint4(0, 0, 0, 0);
    if (!valid || depth >= depth_end) return result;
    int tap = depth / channels, c = depth - tap * channels;
    int r = tap / g.s, s = tap - r * g.s;
    if constexpr (kAligned) {
      const int h = top + r * g.dilation_h, w = left + s * g.dilation_w;
      if (h >= 0 && h < g.h && w >= 0 && w < g.w) result = *reinterpret_cast<const uint4*>(at(image, h, w, c));
      return result;
    }
    uint32_t words[4] = {0, 0, 0, 0};
    const int count = min(16, depth_end - depth);
#pragma unroll
    for (int byte = 0; byte < 16; ++byte) {
      const int h = top + r * g.dilation_h, w = left + s * g.dilation_w;
      if (byte < count && h >= 0 && h < g.h && w >= 0 && w < g.w) {
        words[byte / 4] |= uint32_t{static_cast<uint8_t>(*at(image, h, w, c))} << (8 * (byte % 4));
      }
      if (++c == channels) {
        c = 0;
        if (++s == g.s) {
          s = 0;
          ++r;
        }
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

template <bool kAligned>
__device__ __forceinline__ uint4 read_weight(const int8_t* row, bool valid, int depth, int depth_end) {
  uint4 result = make_uint4(0, 0, 0, 0);
  if (!valid || depth >= depth_end) return result;
  if constexpr (kAligned) return *reinterpret_cast<const uint4*>(row + depth);
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int byte = 0; byte < 16; ++byte) {
    if (depth + byte < depth_end) {
      words[byte / 4] |= uint32_t{static_cast<uint8_t>(row[depth + byte])} << (8 * (byte % 4));
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Grid: x tiles of 128 output pixels, y tiles of 64 output channels, z groups; 8 warps of 32 x 32 each.
// Traffic: each input byte up to r * s * (K / 64) times from the caches, results written once.
// Numbers: sums exact in INT32, epilogue as in `finish`.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) implicit_gemm(Geometry g, Operands o, Epilogue e, int64_t rows) {
  __shared__ __align__(16) uint8_t a_tile[2][kRows * kPitch];
  __shared__ __align__(16) uint8_t b_tile[2][kColumns * kPitch];
  const int channels = g.c / g.groups, columns = g.k / g.groups, depth_end = channels * g.r * g.s;
  const int group = blockIdx.z, column0 = blockIdx.y * kColumns;
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const Reader reader{g, o, channels, depth_end, int64_t{group} * channels};

  // Loading: a thread owns 16 bytes at the same depth of two rows of A and of one row of B.
  const int slot = threadIdx.x / 4, offset = threadIdx.x % 4 * 16;
  bool valid[2];
  int64_t image[2];
  int top[2], left[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = row0 + slot + 64 * i;
    valid[i] = row < rows;
    image[i] = row / (int64_t{g.p} * g.q);
    const int pixel = static_cast<int>(row - image[i] * g.p * g.q);
    top[i] = pixel / g.q * g.stride_h - g.pad_h;
    left[i] = pixel % g.q * g.stride_w - g.pad_w;
  }
  const bool has_column = column0 + slot < columns;
  const int8_t* weight_row = o.weight + (int64_t{group} * columns + column0 + slot) * depth_end;

  uint4 next_a[2], next_b;
  auto fetch = [&](int depth) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      next_a[i] = reader.template read<kAligned>(valid[i], image[i], top[i], left[i], depth + offset);
    }
    next_b = read_weight<kAligned>(weight_row, has_column, depth + offset, depth_end);
  };
  auto place = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint4*>(&a_tile[buffer][(slot + 64 * i) * kPitch + offset]) = next_a[i];
    }
    *reinterpret_cast<uint4*>(&b_tile[buffer][slot * kPitch + offset]) = next_b;
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % 4 * 32, warp_column = warp / 4 * 32;
  const int fragment = (lane / 4) * kPitch + (lane % 4) * 4;
  int sums[2][4][4] = {};
  fetch(0);
  place(0);
  __syncthreads();
  for (int depth = 0, buffer = 0; depth < depth_end; depth += kDepth, buffer ^= 1) {
    const bool more = depth + kDepth < depth_end;
    if (more) fetch(depth + kDepth);
#pragma unroll
    for (int step = 0; step < kDepth; step += 32) {
      multiply(
          sums, reinterpret_cast<const uint32_t*>(&a_tile[buffer][warp_row * kPitch + fragment + step]),
          reinterpret_cast<const uint32_t*>(&b_tile[buffer][warp_column * kPitch + fragment + step]));
    }
    if (more) place(buffer ^ 1);
    __syncthreads();
  }

#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = row0 + warp_row + m * 16 + half * 8 + lane / 4;
      if (row >= rows) continue;
      const float x_scale = __ldg(e.x_scale + (e.x_step == 0 ? 0 : row / (int64_t{g.p} * g.q)));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = column0 + warp_column + n * 8 + lane % 4 * 2 + i;
          if (column >= columns) continue;
          const int k = group * columns + column;
          const float scale = __fmul_rn(x_scale, __ldg(e.weight_scale + k * e.weight_step));
          const float bias = e.bias == nullptr ? 0.0f : __ldg(e.bias + k);
          const float value = finish(sums[m][n][half * 2 + i], scale, bias, e.bias != nullptr, e.relu);
          store(o.out, row * g.k + k, value, e.output);
        }
      }
    }
  }
}

// Grid: one thread per result, output channels of a pixel on neighbouring threads. Traffic: input and weight from the
// caches, r * s * C / groups bytes of each per result. Numbers: as above.
__global__ void __launch_bounds__(kThreads) direct(Geometry g, Operands o, Epilogue e, int64_t results) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const int channels = g.c / g.groups, columns = g.k / g.groups;
  for (int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x; index < results; index += step) {
    const int64_t row = index / g.k;
    const int k = static_cast<int>(index - row * g.k);
    const int64_t image = row / (int64_t{g.p} * g.q);
    const int pixel = static_cast<int>(row - image * g.p * g.q);
    const int top = pixel / g.q * g.stride_h - g.pad_h, left = pixel % g.q * g.stride_w - g.pad_w;
    const int8_t* x = o.x + image * o.x_n + int64_t{k / columns} * channels;
    const int8_t* weight = o.weight + int64_t{k} * g.r * g.s * channels;
    int sum = 0;
    for (int r = 0; r < g.r; ++r) {
      const int h = top + r * g.dilation_h;
      if (h < 0 || h >= g.h) continue;
      for (int s = 0; s < g.s; ++s) {
        const int w = left + s * g.dilation_w;
        if (w < 0 || w >= g.w) continue;
        const int8_t* a = x + h * o.x_h + w * o.x_w;
        const int8_t* b = weight + (r * g.s + s) * channels;
        for (int c = 0; c < channels; ++c) sum += int{__ldg(a + c)} * int{__ldg(b + c)};
      }
    }
    const float x_scale = __ldg(e.x_scale + (e.x_step == 0 ? 0 : image));
    const float scale = __fmul_rn(x_scale, __ldg(e.weight_scale + k * e.weight_step));
    const float bias = e.bias == nullptr ? 0.0f : __ldg(e.bias + k);
    store(o.out, index, finish(sum, scale, bias, e.bias != nullptr, e.relu), e.output);
  }
}

bool aligned(const Geometry& g, const Operands& o) {
  const auto bits = reinterpret_cast<uintptr_t>(o.x) | reinterpret_cast<uintptr_t>(o.weight) |
                    static_cast<uintptr_t>(o.x_n | o.x_h | o.x_w | (g.c / g.groups));
  return bits % 16 == 0;
}

}  // namespace

cudaError_t launch_general(const Geometry& g, const Operands& o, const Epilogue& e, cudaStream_t stream) {
  const int64_t rows = int64_t{g.n} * g.p * g.q;
  const int columns = g.k / g.groups;
  // A tile of 64 output channels is mostly empty where a group has only a few.
  if (columns < 8 || g.groups > 65535 || (columns + kColumns - 1) / kColumns > 65535) {
    const int64_t results = rows * g.k, blocks = (results + kThreads - 1) / kThreads;
    const int64_t limit = int64_t{1} << 22;
    direct<<<static_cast<unsigned>(blocks < limit ? blocks : limit), kThreads, 0, stream>>>(g, o, e, results);
    return cudaGetLastError();
  }
  const dim3 grid(
      static_cast<unsigned>((rows + kRows - 1) / kRows), (columns + kColumns - 1) / kColumns, g.groups);
  if (aligned(g, o)) {
    implicit_gemm<true><<<grid, kThreads, 0, stream>>>(g, o, e, rows);
  } else {
    implicit_gemm<false><<<grid, kThreads, 0, stream>>>(g, o, e, rows);
  }
  return cudaGetLastError();
}

}  // namespace qsync::convolution
