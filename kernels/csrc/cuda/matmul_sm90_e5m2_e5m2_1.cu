#include "matmul_sm90_instances.cuh"

QSYNC_INSTANCES(e5m2_e5m2_1, Code::kE5M2, Code::kE5M2, QSYNC_TILES_1)
