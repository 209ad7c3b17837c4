// The tiles that exist: index, rows, columns, blocks of a cluster along rows and columns, alternating, promoting, buffers of
// results. An index is what a tuned table names, so entries keep theirs. Four parts, compiled apart; pairs of codes that
// training hardly uses (B in E5M2) have the third part only.
#pragma once

#define QSYNC_TILES_0(X) \
  X(0, 128, 256, 1, 1, false, false, 2) \
  X(1, 128, 256, 2, 1, false, false, 2) \
  X(2, 128, 256, 1, 2, false, false, 2) \
  X(3, 256, 128, 1, 2, false, false, 2) \
  X(4, 128, 192, 1, 1, false, false, 3) \
  X(5, 128, 192, 2, 1, false, false, 3)

#define QSYNC_TILES_1(X) \
  X(6, 128, 128, 2, 1, true, false, 4) \
  X(7, 128, 128, 1, 2, true, false, 2) \
  X(8, 128, 128, 2, 2, true, false, 2) \
  X(9, 64, 256, 2, 1, true, false, 2) \
  X(10, 64, 192, 1, 1, true, false, 3) \
  X(11, 64, 128, 1, 1, true, false, 2) \
  X(12, 128, 64, 1, 1, false, false, 1)

#define QSYNC_TILES_2(X) \
  X(13, 128, 128, 1, 1, true, false, 4) \
  X(14, 128, 128, 2, 1, true, false, 2) \
  X(15, 128, 128, 1, 1, false, false, 2) \
  X(16, 128, 128, 1, 1, false, true, 2) \
  X(17, 128, 128, 2, 1, false, true, 2) \
  X(18, 64, 128, 1, 1, true, true, 2)

#define QSYNC_TILES_3(X) \
  X(19, 192, 96, 1, 2, false, false, 1) \
  X(20, 256, 128, 1, 1, false, false, 2) \
  X(21, 128, 256, 2, 1, false, false, 4)

#define QSYNC_TILES_2_BEGIN 13
#define QSYNC_TILES_3_BEGIN 19
#define QSYNC_TILE_COUNT 22
