// Turing: INT8 products by instructions of 8 x 8 results and 16 k.
#include "matmul_mma.cuh"

namespace qsync::matmul {

Status run_turing(const Arguments& args) { return launch_mma<Code::kInt8, Code::kInt8>(args); }

}  // namespace qsync::matmul
