#include "matmul_choice.h"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>

#include "matmul_sm90_tiles.h"

namespace qsync::matmul {
namespace {

// 2^31 / 128^2 products of codes may be added in 32 bits, less one block for the sign.
constexpr int kInt8Blocks = 1023;

std::mutex guard;
std::map<Key, Choice>& table() {
  static std::map<Key, Choice> choices;
  return choices;
}

// Estimates of products in no table: the same on every run, but the host would search all tiles in every call.
constexpr size_t kMostEstimates = 4096;
std::map<Key, Choice>& estimates() {
  static std::map<Key, Choice> choices;
  return choices;
}

int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple; }

int depth_blocks(const Arguments& args) { return int(up(args.depth, 128)); }

// Splits whose last is not empty and whose INT8 sums fit 32 bits, nearest to the wanted number from above.
int valid_splits(const Arguments& args, int wanted) {
  const int blocks = depth_blocks(args);
  if (args.a_code == Code::kInt8 && !needs_promotion(args)) {
    wanted = std::max<int>(wanted, int(up(blocks, kInt8Blocks)));
  }
  wanted = std::max(1, std::min(wanted, blocks));
  const int each = int(up(blocks, wanted));
  return int(up(blocks, each));
}

// Clock cycles, roughly. The constants were fitted to measurements of every tile on 31 products on an H200 and on a partition
// of 16 of its multiprocessors: there, the estimated best is on average 1 % slower than the measured best, at most 7 %.
double estimate(const Arguments& args, const TileShape& tile, int splits) {
  constexpr double kProductsPerCycle = 4096, kUse = 0.85, kUseAlone = 0.6, kBytesPerCycle = 56, kBytesPerCycleOfFew = 64;
  constexpr double kOutPerCycle = 24, kTileCycles = 1500, kLaunchCycles = 3000, kFinishCycles = 4000, kFinishBytes = 4;
  const int cluster = tile.cluster_rows * tile.cluster_columns;
  const int64_t units = up(args.rows, tile.rows * tile.cluster_rows) *
                        up(args.columns, tile.columns * tile.cluster_columns) * args.batch * splits;
  const double rounds = double(up(units, std::max(1, args.multiprocessors / cluster)));
  const double blocks = double(up(depth_blocks(args), splits)), area = double(tile.rows) * tile.columns;
  const double bytes = 128.0 * (double(tile.rows) / tile.cluster_columns + double(tile.columns) / tile.cluster_rows);
  const double fetch = bytes / (args.multiprocessors > 64 ? kBytesPerCycle : kBytesPerCycleOfFew);
  const double block = std::max(area * 128 / (kProductsPerCycle * kUse), fetch) * (tile.promote ? 1.2 : 1.0);
  const double out = area * (splits > 1 || args.out_float == Float::kFP32 ? 4 : 2) / kOutPerCycle + kTileCycles;
  double cycles = rounds * (blocks * block + out);
  if (tile.alternating) {
    // One warpgroup writes out while the other multiplies; a tile that has the block for itself multiplies more slowly.
    const double alone = blocks * std::max(area * 128 / (kProductsPerCycle * kUseAlone), fetch);
    cycles = std::max({rounds * blocks * block, rounds * (blocks * block + out) / 2, alone}) + out;
  }
  cycles += kLaunchCycles;
  if (splits > 1) {
    const double moved = double(args.rows) * double(args.columns) * double(args.batch) * (4.0 * splits + 2);
    cycles += kFinishCycles + moved / (args.multiprocessors * kFinishBytes);
  }
  return cycles;
}

Choice estimated(const Arguments& args) {
  Choice best{QSYNC_TILES_2_BEGIN, 1, 8};
  double least = std::numeric_limits<double>::infinity();
  for (int index = 0; index < QSYNC_TILE_COUNT; ++index) {
    TileShape tile;
    if (!tile_at(args.b_code, index, &tile) || tile.promote != needs_promotion(args)) {
      continue;
    }
    for (const int wanted : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}) {
      const int splits = valid_splits(args, wanted);
      const double cycles = estimate(args, tile, splits);
      if (cycles < least) {
        least = cycles;
        best = {index, splits, 8};
      }
    }
  }
  return best;
}

}  // namespace

int tile_count() { return QSYNC_TILE_COUNT; }

bool needs_promotion(const Arguments& args) {
  return args.block_scales || (args.accurate && args.a_code != Code::kInt8);
}

Key key_of(const Arguments& args) {
  return {int64_t(args.a_code), int64_t(args.b_code), args.out_float == Float::kFP32 ? 4 : 2, needs_promotion(args) ? 1 : 0,
          args.batch, args.rows, args.columns, args.depth, args.multiprocessors};
}

void remember(const Key& key, const Choice& choice) {
  const std::lock_guard<std::mutex> lock(guard);
  if (choice.variant < 0) {
    table().erase(key);
  } else {
    table()[key] = choice;
  }
}

Choice choose(const Arguments& args) {
  const Key key = key_of(args);
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = table().find(key);
  if (found != table().end()) {
    Choice choice = found->second;
    TileShape tile;
    if (tile_at(args.b_code, choice.variant, &tile) && tile.promote == needs_promotion(args)) {
      choice.splits = valid_splits(args, choice.splits);
      return choice;
    }
  }
  const auto known = estimates().find(key);
  if (known != estimates().end()) {
    return known->second;
  }
  if (estimates().size() >= kMostEstimates) {
    estimates().clear();
  }
  return estimates()[key] = estimated(args);
}

}  // namespace qsync::matmul
