// The tiles that exist, in one list: index, rows, columns, blocks of a cluster along rows and columns, alternating, promoting.
// An index is what a tuned table names, so entries keep theirs. Three parts, compiled apart.
#pragma once

#define QSYNC_TILES_0(X) \
  X(0, 128, 256, 1, 1, false, false) \
  X(1, 128, 256, 2, 1, false, false) \
  X(2, 128, 256, 1, 2, false, false) \
  X(3, 256, 128, 1, 1, false, false) \
  X(4, 256, 128, 1, 2, false, false) \
  X(5, 128, 192, 1, 1, false, false) \
  X(6, 128, 192, 2, 1, false, false)

#define QSYNC_TILES_1(X) \
  X(7, 128, 128, 1, 1, false, false) \
  X(8, 128, 64, 1, 1, false, false) \
  X(9, 128, 128, 1, 1, true, false) \
  X(10, 128, 128, 2, 1, true, false) \
  X(11, 64, 256, 1, 1, true, false) \
  X(12, 64, 256, 2, 1, true, false)

#define QSYNC_TILES_2(X) \
  X(13, 64, 192, 1, 1, true, false) \
  X(14, 64, 128, 1, 1, true, false) \
  X(15, 128, 256, 2, 2, false, false) \
  X(16, 128, 128, 1, 1, false, true) \
  X(17, 128, 128, 2, 1, false, true) \
  X(18, 64, 128, 1, 1, true, true)

#define QSYNC_TILE_COUNT 19
