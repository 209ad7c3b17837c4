#include "matmul_sm90_instances.cuh"

QSYNC_INSTANCES(e4m3_e4m3_3, Code::kE4M3, Code::kE4M3, QSYNC_TILES_3)
