// Narrow inputs (an image's three channels): space to depth, so that the tensor copy engine finds 16 bytes per pixel.
//
// A convolution of stride (a, b) over C channels is one of stride 1 over blocks of a x b pixels with a * b * C channels.
// A folded pixel has 16 bytes, the rest of them 0. The padding is written out, and the taps of one row then lie side by side in memory: a window of s' blocks is one run
// of s' * channels bytes, which the convolution reads as its channels, with overlapping windows.
#include "convolution.cuh"

namespace qsync::convolution {
namespace {

constexpr int kThreads = 128;

// Grid: one block per folded row, threads along it, 16 bytes each. Traffic: input read about once, 16 bytes written per
// folded pixel. Numbers: a copy; what lies outside the input is 0.
// kChannels, kStrideH, kStrideW: the geometry's, or 0 where it is not one of those that are compiled for themselves.
template <int kChannels, int kStrideH, int kStrideW>
__global__ void __launch_bounds__(kThreads) fold_input(Geometry g, Operands o, Folding f, uint4* out) {
  const int channels = kChannels > 0 ? kChannels : g.c;
  const int stride_h = kStrideH > 0 ? kStrideH : f.stride_h, stride_w = kStrideW > 0 ? kStrideW : f.stride_w;
  const int image_index = blockIdx.x / f.rows, row = blockIdx.x - image_index * f.rows;
  const int8_t* image = o.x + image_index * o.x_n;
  uint4* target = out + static_cast<int64_t>(blockIdx.x) * f.columns;
  for (int column = threadIdx.x; column < f.columns; column += kThreads) {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int byte = 0; byte < 16; ++byte) {
      const int pixel = byte / channels, c = byte - pixel * channels;
      const int dh = pixel / stride_w, dw = pixel - dh * stride_w;
      const int h = row * stride_h - g.pad_h + dh, w = column * stride_w - g.pad_w + dw;
      if (dh < stride_h && h >= 0 && h < g.h && w >= 0 && w < g.w) {
        const uint8_t code = static_cast<uint8_t>(__ldg(image + h * o.x_h + w * o.x_w + c));
        words[byte / 4] |= uint32_t{code} << (8 * (byte % 4));
      }
    }
    target[column] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Grid: one thread per byte of the folded weight. Numbers: a copy; taps past the end of the kernel are 0.
__global__ void __launch_bounds__(kThreads)
    fold_weight(Geometry g, const int8_t* weight, Folding f, int8_t* out, int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= count) return;
  const int channel = static_cast<int>(index % f.channels);
  int64_t rest = index / f.channels;
  const int s_block = static_cast<int>(rest % f.s);
  rest /= f.s;
  const int r_block = static_cast<int>(rest % f.r);
  const int64_t k = rest / f.r;
  const int pixel = channel / g.c, c = channel - pixel * g.c;
  const int dh = pixel / f.stride_w, dw = pixel - dh * f.stride_w;
  const int r = r_block * f.stride_h + dh, s = s_block * f.stride_w + dw;
  const bool inside = dh < f.stride_h && r < g.r && s < g.s;
  out[index] = inside ? weight[((k * g.r + r) * g.s + s) * g.c + c] : int8_t{0};
}

unsigned blocks_of(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t launch_fold_input(
    const Geometry& g, const Operands& o, const Folding& f, int8_t* out, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(g.n * f.rows);
  auto* target = reinterpret_cast<uint4*>(out);
  const bool twos = f.stride_h == 2 && f.stride_w == 2, ones = f.stride_h == 1 && f.stride_w == 1;
  if (g.c == 3 && twos) {
    fold_input<3, 2, 2><<<grid, kThreads, 0, stream>>>(g, o, f, target);
  } else if (g.c == 3 && ones) {
    fold_input<3, 1, 1><<<grid, kThreads, 0, stream>>>(g, o, f, target);
  } else if (g.c == 1 && ones) {
    fold_input<1, 1, 1><<<grid, kThreads, 0, stream>>>(g, o, f, target);
  } else {
    fold_input<0, 0, 0><<<grid, kThreads, 0, stream>>>(g, o, f, target);
  }
  return cudaGetLastError();
}

cudaError_t launch_fold_weight(
    const Geometry& g, const int8_t* weight, const Folding& f, int8_t* out, cudaStream_t stream) {
  const int64_t count = int64_t{g.k} * f.r * f.s * f.channels;
  fold_weight<<<blocks_of(count), kThreads, 0, stream>>>(g, weight, f, out, count);
  return cudaGetLastError();
}

}  // namespace qsync::convolution
