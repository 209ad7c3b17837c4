// How the sums of a Hopper product become results in memory: scales, bias, activation, rounding, tensor copies.
#pragma once

#include "matmul_epilogue.cuh"
#include "matmul_sm90_tile.cuh"

namespace qsync::matmul {

// A warp's way out: pieces of 16 rows x 128 bytes through shared memory, where they lie swizzled. No warp waits for another.
template <class T>
struct Outlet {
  const Launch& p;
  uint32_t pieces;
  char* memory;
  int warp, lane;
  int slot = 0;

  __device__ __forceinline__ Outlet(const Launch& launch, const Shared<T>& shared, int group, int thread)
      : p(launch), warp(__shfl_sync(0xFFFFFFFFu, thread / 32, 0)), lane(thread % 32) {
    pieces = shared.chunks + group * T::kBuffers * kChunkBytes + warp * kWarpBytes;
    memory = shared.base + (pieces - shared.stages);
  }

  // Returns a buffer that nothing reads any more.
  __device__ __forceinline__ uint32_t acquire() {
    if (lane == 0) {
      copies_out_read<T::kBuffers - 1>();
    }
    __syncwarp();
    return pieces + slot * kChunkBytes;
  }

  // Sends the buffer that was acquired last: a warp's part of 64 rows from (row, column) of matrix z on. kPlain: by the copy
  // engine in any case.
  template <bool kPlain>
  __device__ __forceinline__ void send(
      const CUtensorMap* map, void* pointer, int row, int column, int z, int bytes_each) {
    row += warp * kWarpRows;
    if (kPlain || p.copy_out) {
      fence_copies();
      __syncwarp();
      if (lane == 0) {
        copy_out(map, pieces + slot * kChunkBytes, column, row, z);
      }
    } else {
      __syncwarp();
      const int each_row = 128 / bytes_each;
      for (int i = lane; i < kWarpRows * each_row; i += 32) {
        const int r = i / each_row, c = i % each_row, byte = c * bytes_each;
        if (row + r < p.rows && column + c < p.columns) {
          const char* from = memory + slot * kChunkBytes + r * 128 + ((((byte >> 4) ^ (r & 7)) << 4) | (byte & 15));
          const int64_t at = (int64_t{z} * p.rows + row + r) * p.columns + column + c;
          if (bytes_each == 2) {
            static_cast<uint16_t*>(pointer)[at] = *reinterpret_cast<const uint16_t*>(from);
          } else {
            static_cast<uint32_t*>(pointer)[at] = *reinterpret_cast<const uint32_t*>(from);
          }
        }
      }
    }
    slot = slot + 1 == T::kBuffers ? 0 : slot + 1;
  }
};

// Writes 16 x 64 values of 16 bits: value 4 * j + i of a lane is in row i / 2 * 8 + lane / 4 and in column
// 8 * j + lane % 4 * 2 + i % 2.
template <bool kBF16>
__device__ __forceinline__ void put_piece16(uint32_t buffer, const float (&v)[32], int lane) {
  const int row = lane % 16;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t at = buffer + row * 128 + (((j + lane / 16) ^ (row & 7)) << 4);
    store_matrices(
        at, pack_pair(v[4 * j], v[4 * j + 1], kBF16), pack_pair(v[4 * j + 2], v[4 * j + 3], kBF16),
        pack_pair(v[4 * j + 4], v[4 * j + 5], kBF16), pack_pair(v[4 * j + 6], v[4 * j + 7], kBF16));
  }
}

// Writes 16 x 32 values of 32 bits, in the same order.
__device__ __forceinline__ void put_piece32(uint32_t buffer, const float (&v)[16], int lane) {
  const int row = lane / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + half * 8, byte = j * 32 + lane % 4 * 8;
      const uint32_t at = buffer + r * 128 + ((((byte >> 4) ^ (r & 7)) << 4) | (byte & 15));
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[4 * j + 2 * half]), "f"(v[4 * j + 2 * half + 1])
                   : "memory");
    }
  }
}

__device__ __forceinline__ float bits_of(int32_t sum) { return __int_as_float(sum); }
__device__ __forceinline__ float bits_of(float sum) { return sum; }

// The larger of a magnitude and that of a value, NaN if one is NaN.
__device__ __forceinline__ float larger_magnitude(float magnitude, float value) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(magnitude), "f"(fabsf(value)));
  return larger;
}

// Scales, adds, activates and sends a warpgroup's sums. kPlain: no activation, nobody wants what it would be applied to, and
// the copy engine takes the result; apart from the rest, because jumping over that code costs more than running what is left.
// kOne: the first row scale is the factor of every sum, and there is no bias. `bring` makes `columns` hold scale and bias of
// the n-th 128 columns. kLargest: `largest` is raised to the largest magnitude.
template <class T, Float kFloat, bool kPlain, bool kOne, bool kLargest, class Bring>
__device__ __forceinline__ void write_tile(
    const Launch& p, Outlet<T>& outlet, const Work& work, int first_row, int first_column, const float4* columns,
    const Bring& bring, const float (&row_scales)[T::kSlabs][2], const Sums<T> (&sums)[T::kSlabs][T::kColumns / 2],
    float& largest) {
  constexpr bool kWide = kFloat == Float::kFP32;
  constexpr int kWidth = kWide ? 32 : 64, kValues = kWidth / 2, kBytes = kWide ? 4 : 2;
  const int lane = outlet.lane, z = p.raw ? work.split * p.batch + work.z : work.z;
#pragma unroll
  for (int chunk = 0; chunk < (T::kColumns + kWidth - 1) / kWidth; ++chunk) {
    // The last chunk of a width that chunks do not divide begins earlier: a few results are written twice, alike.
    const int begin = chunk * kWidth < T::kColumns - kWidth ? chunk * kWidth : T::kColumns - kWidth;
    const int column = first_column + begin, part = chunk * kWidth / kFactorColumns;
    if (!kOne && !(kWide && p.raw) && chunk * kWidth % kFactorColumns == 0) {
      bring(part);
    }
#pragma unroll
    for (int slab = 0; slab < T::kSlabs; ++slab) {
      const int row = first_row + slab * 64;
      float v[kValues];
      if (kOne) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          v[i] = static_cast<float>(sums[slab][begin / 2 + i]) * row_scales[0][0];
          if constexpr (kLargest) {
            largest = larger_magnitude(largest, v[i]);
          }
        }
      } else if (kWide && p.raw) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          v[i] = bits_of(sums[slab][begin / 2 + i]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kWidth / 8; ++j) {
          const float4 pair = columns[(begin - part * kFactorColumns) / 2 + 4 * j + lane % 4];  // scale, bias of two columns
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float scale = row_scales[slab][i / 2] * (i % 2 ? pair.z : pair.x);
            const float sum = static_cast<float>(sums[slab][begin / 2 + 4 * j + i]);
            v[4 * j + i] = fmaf(sum, scale, i % 2 ? pair.w : pair.y);
          }
        }
      }
      const auto send = [&](const CUtensorMap* map, void* pointer) {
        const uint32_t buffer = outlet.acquire();
        if constexpr (kWide) {
          put_piece32(buffer, v, lane);
        } else {
          put_piece16<kFloat == Float::kBF16>(buffer, v, lane);
        }
        outlet.template send<kPlain>(map, pointer, row, column, z, kBytes);
      };
      if constexpr (!kPlain) {
        if (p.preactivation_pointer != nullptr) {
          send(&p.preactivation, p.preactivation_pointer);
        }
        if (p.activation == Activation::kRelu) {
#pragma unroll
          for (float& value : v) {
            value = value < 0.0f ? 0.0f : value;
          }
        } else if (p.activation == Activation::kGelu) {
#pragma unroll
          for (float& value : v) {
            value = gelu(value);
          }
        }
      }
      send(&p.out, p.out_pointer);
    }
  }
}

}  // namespace qsync::matmul
