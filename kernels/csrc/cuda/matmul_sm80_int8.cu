// Ampere and Ada: INT8 products by instructions of 16 x 8 results and 32 k, operands copied asynchronously.
#include "matmul_mma.cuh"

namespace qsync::matmul {

Status run_ampere(const Arguments& args) { return launch_mma<Code::kInt8, Code::kInt8>(args); }

}  // namespace qsync::matmul
