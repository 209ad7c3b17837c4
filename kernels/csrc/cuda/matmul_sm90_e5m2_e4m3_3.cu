#include "matmul_sm90_instances.cuh"

QSYNC_INSTANCES(e5m2_e4m3_3, Code::kE5M2, Code::kE4M3, QSYNC_TILES_3)
