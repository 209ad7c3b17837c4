#include "matmul_sm90_instances.cuh"

QSYNC_INSTANCES(e5m2_e5m2_2, Code::kE5M2, Code::kE5M2, QSYNC_TILES_2)
