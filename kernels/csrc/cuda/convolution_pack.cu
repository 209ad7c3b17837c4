// Narrow inputs (an image's three channels): space to depth, so that the tensor copy engine finds 16 bytes per pixel.
//
// A convolution of stride (a, b) over C channels is one of stride 1 over blocks of a x b pixels with a * b * C channels.
// The padding is written out, and the taps of one row then lie side by side in memory: a window of s' blocks is one run
// of s' * channels bytes, which the convolution reads as its channels, with overlapping windows.
#include "convolution.cuh"

namespace qsync::convolution {
namespace {

constexpr int kThreads = 256;

// Grid: one thread per folded pixel and 16 bytes of it. Traffic: input read about once, 16 bytes written per thread.
// Numbers: a copy; what lies outside the input is 0.
__global__ void __launch_bounds__(kThreads) fold_input(Geometry g, Operands o, Folding f, uint4* out, int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= count) return;
  const int units = f.channels / 16;
  const int unit = static_cast<int>(index % units);
  int64_t rest = index / units;
  const int column = static_cast<int>(rest % f.columns);
  rest /= f.columns;
  const int row = static_cast<int>(rest % f.rows);
  const int8_t* image = o.x + rest / f.rows * o.x_n;
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int byte = 0; byte < 16; ++byte) {
    const int channel = unit * 16 + byte;
    const int pixel = channel / g.c, c = channel - pixel * g.c;
    const int dh = pixel / f.stride_w, dw = pixel - dh * f.stride_w;
    const int h = row * f.stride_h - g.pad_h + dh, w = column * f.stride_w - g.pad_w + dw;
    if (dh < f.stride_h && h >= 0 && h < g.h && w >= 0 && w < g.w) {
      const uint8_t code = static_cast<uint8_t>(__ldg(image + h * o.x_h + w * o.x_w + c));
      words[byte / 4] |= uint32_t{code} << (8 * (byte % 4));
    }
  }
  out[index] = make_uint4(words[0], words[1], words[2], words[3]);
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
  const int64_t count = int64_t{g.n} * f.rows * f.columns * (f.channels / 16);
  fold_input<<<blocks_of(count), kThreads, 0, stream>>>(g, o, f, reinterpret_cast<uint4*>(out), count);
  return cudaGetLastError();
}

cudaError_t launch_fold_weight(
    const Geometry& g, const int8_t* weight, const Folding& f, int8_t* out, cudaStream_t stream) {
  const int64_t count = int64_t{g.k} * f.r * f.s * f.channels;
  fold_weight<<<blocks_of(count), kThreads, 0, stream>>>(g, weight, f, out, count);
  return cudaGetLastError();
}

}  // namespace qsync::convolution
