// Ada: FP8 products by instructions of 16 x 8 results and 32 k.
#include "matmul_mma.cuh"

namespace qsync::matmul {

Status run_ada(const Arguments& args) {
  if (args.a_code == Code::kE4M3) {
    return args.b_code == Code::kE4M3 ? launch_mma<Code::kE4M3, Code::kE4M3>(args)
                                      : launch_mma<Code::kE4M3, Code::kE5M2>(args);
  }
  return args.b_code == Code::kE4M3 ? launch_mma<Code::kE5M2, Code::kE4M3>(args)
                                    : launch_mma<Code::kE5M2, Code::kE5M2>(args);
}

}  // namespace qsync::matmul
