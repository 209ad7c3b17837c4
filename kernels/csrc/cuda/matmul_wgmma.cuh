// One warpgroup's matrix instruction, 64 rows x kColumns x 32 k of 8-bit codes from shared memory, per type and width.
// Written by a small script: the operand lists are all there is to it.
#pragma once

#include <cstdint>

#include "matmul_arguments.h"
#include "matmul_ptx.cuh"

namespace qsync::matmul {

template <Code kA, Code kB>
struct Sum {
  using type = float;
};
template <>
struct Sum<Code::kInt8, Code::kInt8> {
  using type = int32_t;
};

// d (kColumns / 2 registers of each thread) = a * b, plus d itself unless `add` is 0. a and b: matrix_descriptor().
template <Code kA, Code kB, int kColumns>
struct Wgmma;

#define QSYNC_REGISTERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define QSYNC_OPERANDS_64(C) \
  C(d[0]), C(d[1]), C(d[2]), C(d[3]), C(d[4]), C(d[5]), C(d[6]), C(d[7]), \
  C(d[8]), C(d[9]), C(d[10]), C(d[11]), C(d[12]), C(d[13]), C(d[14]), C(d[15]), \
  C(d[16]), C(d[17]), C(d[18]), C(d[19]), C(d[20]), C(d[21]), C(d[22]), C(d[23]), \
  C(d[24]), C(d[25]), C(d[26]), C(d[27]), C(d[28]), C(d[29]), C(d[30]), C(d[31])

#define QSYNC_REGISTERS_96 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"

#define QSYNC_OPERANDS_96(C) \
  C(d[0]), C(d[1]), C(d[2]), C(d[3]), C(d[4]), C(d[5]), C(d[6]), C(d[7]), \
  C(d[8]), C(d[9]), C(d[10]), C(d[11]), C(d[12]), C(d[13]), C(d[14]), C(d[15]), \
  C(d[16]), C(d[17]), C(d[18]), C(d[19]), C(d[20]), C(d[21]), C(d[22]), C(d[23]), \
  C(d[24]), C(d[25]), C(d[26]), C(d[27]), C(d[28]), C(d[29]), C(d[30]), C(d[31]), \
  C(d[32]), C(d[33]), C(d[34]), C(d[35]), C(d[36]), C(d[37]), C(d[38]), C(d[39]), \
  C(d[40]), C(d[41]), C(d[42]), C(d[43]), C(d[44]), C(d[45]), C(d[46]), C(d[47])

#define QSYNC_REGISTERS_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define QSYNC_OPERANDS_128(C) \
  C(d[0]), C(d[1]), C(d[2]), C(d[3]), C(d[4]), C(d[5]), C(d[6]), C(d[7]), \
  C(d[8]), C(d[9]), C(d[10]), C(d[11]), C(d[12]), C(d[13]), C(d[14]), C(d[15]), \
  C(d[16]), C(d[17]), C(d[18]), C(d[19]), C(d[20]), C(d[21]), C(d[22]), C(d[23]), \
  C(d[24]), C(d[25]), C(d[26]), C(d[27]), C(d[28]), C(d[29]), C(d[30]), C(d[31]), \
  C(d[32]), C(d[33]), C(d[34]), C(d[35]), C(d[36]), C(d[37]), C(d[38]), C(d[39]), \
  C(d[40]), C(d[41]), C(d[42]), C(d[43]), C(d[44]), C(d[45]), C(d[46]), C(d[47]), \
  C(d[48]), C(d[49]), C(d[50]), C(d[51]), C(d[52]), C(d[53]), C(d[54]), C(d[55]), \
  C(d[56]), C(d[57]), C(d[58]), C(d[59]), C(d[60]), C(d[61]), C(d[62]), C(d[63])

#define QSYNC_REGISTERS_192 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define QSYNC_OPERANDS_192(C) \
  C(d[0]), C(d[1]), C(d[2]), C(d[3]), C(d[4]), C(d[5]), C(d[6]), C(d[7]), \
  C(d[8]), C(d[9]), C(d[10]), C(d[11]), C(d[12]), C(d[13]), C(d[14]), C(d[15]), \
  C(d[16]), C(d[17]), C(d[18]), C(d[19]), C(d[20]), C(d[21]), C(d[22]), C(d[23]), \
  C(d[24]), C(d[25]), C(d[26]), C(d[27]), C(d[28]), C(d[29]), C(d[30]), C(d[31]), \
  C(d[32]), C(d[33]), C(d[34]), C(d[35]), C(d[36]), C(d[37]), C(d[38]), C(d[39]), \
  C(d[40]), C(d[41]), C(d[42]), C(d[43]), C(d[44]), C(d[45]), C(d[46]), C(d[47]), \
  C(d[48]), C(d[49]), C(d[50]), C(d[51]), C(d[52]), C(d[53]), C(d[54]), C(d[55]), \
  C(d[56]), C(d[57]), C(d[58]), C(d[59]), C(d[60]), C(d[61]), C(d[62]), C(d[63]), \
  C(d[64]), C(d[65]), C(d[66]), C(d[67]), C(d[68]), C(d[69]), C(d[70]), C(d[71]), \
  C(d[72]), C(d[73]), C(d[74]), C(d[75]), C(d[76]), C(d[77]), C(d[78]), C(d[79]), \
  C(d[80]), C(d[81]), C(d[82]), C(d[83]), C(d[84]), C(d[85]), C(d[86]), C(d[87]), \
  C(d[88]), C(d[89]), C(d[90]), C(d[91]), C(d[92]), C(d[93]), C(d[94]), C(d[95])

#define QSYNC_REGISTERS_256 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define QSYNC_OPERANDS_256(C) \
  C(d[0]), C(d[1]), C(d[2]), C(d[3]), C(d[4]), C(d[5]), C(d[6]), C(d[7]), \
  C(d[8]), C(d[9]), C(d[10]), C(d[11]), C(d[12]), C(d[13]), C(d[14]), C(d[15]), \
  C(d[16]), C(d[17]), C(d[18]), C(d[19]), C(d[20]), C(d[21]), C(d[22]), C(d[23]), \
  C(d[24]), C(d[25]), C(d[26]), C(d[27]), C(d[28]), C(d[29]), C(d[30]), C(d[31]), \
  C(d[32]), C(d[33]), C(d[34]), C(d[35]), C(d[36]), C(d[37]), C(d[38]), C(d[39]), \
  C(d[40]), C(d[41]), C(d[42]), C(d[43]), C(d[44]), C(d[45]), C(d[46]), C(d[47]), \
  C(d[48]), C(d[49]), C(d[50]), C(d[51]), C(d[52]), C(d[53]), C(d[54]), C(d[55]), \
  C(d[56]), C(d[57]), C(d[58]), C(d[59]), C(d[60]), C(d[61]), C(d[62]), C(d[63]), \
  C(d[64]), C(d[65]), C(d[66]), C(d[67]), C(d[68]), C(d[69]), C(d[70]), C(d[71]), \
  C(d[72]), C(d[73]), C(d[74]), C(d[75]), C(d[76]), C(d[77]), C(d[78]), C(d[79]), \
  C(d[80]), C(d[81]), C(d[82]), C(d[83]), C(d[84]), C(d[85]), C(d[86]), C(d[87]), \
  C(d[88]), C(d[89]), C(d[90]), C(d[91]), C(d[92]), C(d[93]), C(d[94]), C(d[95]), \
  C(d[96]), C(d[97]), C(d[98]), C(d[99]), C(d[100]), C(d[101]), C(d[102]), C(d[103]), \
  C(d[104]), C(d[105]), C(d[106]), C(d[107]), C(d[108]), C(d[109]), C(d[110]), C(d[111]), \
  C(d[112]), C(d[113]), C(d[114]), C(d[115]), C(d[116]), C(d[117]), C(d[118]), C(d[119]), \
  C(d[120]), C(d[121]), C(d[122]), C(d[123]), C(d[124]), C(d[125]), C(d[126]), C(d[127])

#define QSYNC_AS_INT(x) "+r"(x)
#define QSYNC_AS_FLOAT(x) "+f"(x)

#define QSYNC_WGMMA_64(A, B, TYPE, C, NAME, TAIL) \
  template <> \
  struct Wgmma<Code::A, Code::B, 64> { \
    static __device__ __forceinline__ void run(TYPE (&d)[32], uint32_t a, uint32_t b, int add) { \
      asm volatile( \
          "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %34, 0;\n" \
          "mov.b64 da, {%32, " QSYNC_DESCRIPTOR_HIGH "};\nmov.b64 db, {%33, " QSYNC_DESCRIPTOR_HIGH "};\n" \
          "wgmma.mma_async.sync.aligned.m64n64k32." NAME " {" QSYNC_REGISTERS_64 "}, da, db, p" TAIL ";\n}\n" \
          : QSYNC_OPERANDS_64(C) \
          : "r"(a), "r"(b), "r"(add)); \
    } \
  };

#define QSYNC_WGMMA_96(A, B, TYPE, C, NAME, TAIL) \
  template <> \
  struct Wgmma<Code::A, Code::B, 96> { \
    static __device__ __forceinline__ void run(TYPE (&d)[48], uint32_t a, uint32_t b, int add) { \
      asm volatile( \
          "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %50, 0;\n" \
          "mov.b64 da, {%48, " QSYNC_DESCRIPTOR_HIGH "};\nmov.b64 db, {%49, " QSYNC_DESCRIPTOR_HIGH "};\n" \
          "wgmma.mma_async.sync.aligned.m64n96k32." NAME " {" QSYNC_REGISTERS_96 "}, da, db, p" TAIL ";\n}\n" \
          : QSYNC_OPERANDS_96(C) \
          : "r"(a), "r"(b), "r"(add)); \
    } \
  };

#define QSYNC_WGMMA_128(A, B, TYPE, C, NAME, TAIL) \
  template <> \
  struct Wgmma<Code::A, Code::B, 128> { \
    static __device__ __forceinline__ void run(TYPE (&d)[64], uint32_t a, uint32_t b, int add) { \
      asm volatile( \
          "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %66, 0;\n" \
          "mov.b64 da, {%64, " QSYNC_DESCRIPTOR_HIGH "};\nmov.b64 db, {%65, " QSYNC_DESCRIPTOR_HIGH "};\n" \
          "wgmma.mma_async.sync.aligned.m64n128k32." NAME " {" QSYNC_REGISTERS_128 "}, da, db, p" TAIL ";\n}\n" \
          : QSYNC_OPERANDS_128(C) \
          : "r"(a), "r"(b), "r"(add)); \
    } \
  };

#define QSYNC_WGMMA_192(A, B, TYPE, C, NAME, TAIL) \
  template <> \
  struct Wgmma<Code::A, Code::B, 192> { \
    static __device__ __forceinline__ void run(TYPE (&d)[96], uint32_t a, uint32_t b, int add) { \
      asm volatile( \
          "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %98, 0;\n" \
          "mov.b64 da, {%96, " QSYNC_DESCRIPTOR_HIGH "};\nmov.b64 db, {%97, " QSYNC_DESCRIPTOR_HIGH "};\n" \
          "wgmma.mma_async.sync.aligned.m64n192k32." NAME " {" QSYNC_REGISTERS_192 "}, da, db, p" TAIL ";\n}\n" \
          : QSYNC_OPERANDS_192(C) \
          : "r"(a), "r"(b), "r"(add)); \
    } \
  };

#define QSYNC_WGMMA_256(A, B, TYPE, C, NAME, TAIL) \
  template <> \
  struct Wgmma<Code::A, Code::B, 256> { \
    static __device__ __forceinline__ void run(TYPE (&d)[128], uint32_t a, uint32_t b, int add) { \
      asm volatile( \
          "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %130, 0;\n" \
          "mov.b64 da, {%128, " QSYNC_DESCRIPTOR_HIGH "};\nmov.b64 db, {%129, " QSYNC_DESCRIPTOR_HIGH "};\n" \
          "wgmma.mma_async.sync.aligned.m64n256k32." NAME " {" QSYNC_REGISTERS_256 "}, da, db, p" TAIL ";\n}\n" \
          : QSYNC_OPERANDS_256(C) \
          : "r"(a), "r"(b), "r"(add)); \
    } \
  };

#define QSYNC_WGMMA(N) \
  QSYNC_WGMMA_##N(kInt8, kInt8, int32_t, QSYNC_AS_INT, "s32.s8.s8", "") \
  QSYNC_WGMMA_##N(kE4M3, kE4M3, float, QSYNC_AS_FLOAT, "f32.e4m3.e4m3", ", 1, 1") \
  QSYNC_WGMMA_##N(kE4M3, kE5M2, float, QSYNC_AS_FLOAT, "f32.e4m3.e5m2", ", 1, 1") \
  QSYNC_WGMMA_##N(kE5M2, kE4M3, float, QSYNC_AS_FLOAT, "f32.e5m2.e4m3", ", 1, 1") \
  QSYNC_WGMMA_##N(kE5M2, kE5M2, float, QSYNC_AS_FLOAT, "f32.e5m2.e5m2", ", 1, 1")

QSYNC_WGMMA(64)
QSYNC_WGMMA(96)
QSYNC_WGMMA(128)
QSYNC_WGMMA(192)
QSYNC_WGMMA(256)

#undef QSYNC_WGMMA
#undef QSYNC_WGMMA_64
#undef QSYNC_WGMMA_96
#undef QSYNC_WGMMA_128
#undef QSYNC_WGMMA_192
#undef QSYNC_WGMMA_256

}  // namespace qsync::matmul
