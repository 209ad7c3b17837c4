// The tiles that exist, in one list: index, rows, columns, blocks of a cluster along rows and columns, alternating, promoting,
// buffers of results. An index is what a tuned table names, so entries keep theirs. Three parts, compiled apart.
#pragma once

#define QSYNC_TILES_0(X) \
  X(0, 128, 256, 1, 1, false, false, 2) \
  X(1, 128, 256, 2, 1, false, false, 2) \
  X(2, 128, 256, 1, 2, false, false, 2) \
  X(3, 128, 256, 1, 1, false, false, 4) \
  X(4, 128, 256, 2, 1, false, false, 4) \
  X(5, 256, 128, 1, 1, false, false, 4) \
  X(6, 256, 128, 1, 2, false, false, 2)

#define QSYNC_TILES_1(X) \
  X(7, 128, 192, 1, 1, false, false, 3) \
  X(8, 128, 192, 2, 1, false, false, 3) \
  X(9, 128, 128, 1, 1, true, false, 4) \
  X(10, 128, 128, 2, 1, true, false, 4) \
  X(11, 128, 128, 2, 1, true, false, 2) \
  X(12, 64, 256, 1, 1, true, false, 4) \
  X(13, 64, 256, 2, 1, true, false, 2) \
  X(14, 64, 256, 2, 1, true, false, 4)

#define QSYNC_TILES_2(X) \
  X(15, 64, 192, 1, 1, true, false, 3) \
  X(16, 64, 128, 1, 1, true, false, 2) \
  X(17, 128, 64, 1, 1, false, false, 1) \
  X(18, 128, 128, 1, 1, false, false, 2) \
  X(19, 128, 128, 1, 1, false, true, 2) \
  X(20, 128, 128, 2, 1, false, true, 2) \
  X(21, 64, 128, 1, 1, true, true, 2)

#define QSYNC_TILE_COUNT 22
