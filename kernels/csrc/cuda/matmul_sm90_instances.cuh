// One part of the tiles for one pair of code types, as a function that looks an instance up.
#pragma once

#include "matmul_sm90.cuh"
#include "matmul_sm90_tiles.h"

#define QSYNC_INSTANCE(INDEX, ROWS, COLUMNS, CLUSTER_ROWS, CLUSTER_COLUMNS, ALTERNATING, PROMOTE, BUFFERS) \
  case INDEX: \
    *found = instance<Tile<kA, kB, ROWS, COLUMNS, CLUSTER_ROWS, CLUSTER_COLUMNS, ALTERNATING, PROMOTE, BUFFERS>>(); \
    return true;

#define QSYNC_INSTANCES(NAME, A, B, TILES) \
  namespace qsync::matmul { \
  bool find_##NAME(int index, Instance* found) { \
    constexpr Code kA = A, kB = B; \
    switch (index) { TILES(QSYNC_INSTANCE) } \
    return false; \
  } \
  }
