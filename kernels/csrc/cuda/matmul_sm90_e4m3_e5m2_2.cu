#include "matmul_sm90_instances.cuh"

QSYNC_INSTANCES(e4m3_e5m2_2, Code::kE4M3, Code::kE5M2, QSYNC_TILES_2)
