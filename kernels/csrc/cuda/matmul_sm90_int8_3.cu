#include "matmul_sm90_instances.cuh"

QSYNC_INSTANCES(int8_3, Code::kInt8, Code::kInt8, QSYNC_TILES_3)
