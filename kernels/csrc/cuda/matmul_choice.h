// How products are cut into tiles: what was tuned, or else an estimate; and the entry points of the code paths.
#pragma once

#include <array>
#include <cstdint>

#include "matmul_arguments.h"

namespace qsync::matmul {

struct TileShape {
  int rows, columns, cluster_rows, cluster_columns;
  bool alternating, promote;
};

// Products that are cut alike: codes of a and b, bytes of a result, promoting, batch, rows, columns, depth, multiprocessors.
using Key = std::array<int64_t, 9>;

Key key_of(const Arguments& args);
bool needs_promotion(const Arguments& args);

// Sets or (variant < 0) forgets what products of a key use.
void remember(const Key& key, const Choice& choice);

// What was remembered for this product, else the estimate; always valid for it.
Choice choose(const Arguments& args);

// Hopper. Number of tiles; the tile of an index, false if products with such codes of b have it not.
int tile_count();
bool tile_at(Code b, int index, TileShape* shape);
// `realign` copies operands whose rows are not aligned to 16 bytes to where they are: (batch, rows, pitch16) bytes each.
bool a_fits_sm90(const Arguments& args);
bool b_fits_sm90(const Arguments& args);
Status realign_sm90(Arguments* args, void* a_copy, void* b_copy);
int64_t workspace_bytes_sm90(const Arguments& args, const Choice& choice);
// Whether the product itself finds the largest magnitude of its results; else find_largest() does, after it.
bool finds_largest_sm90(const Arguments& args, const Choice& choice);
Status run_sm90(const Arguments& args, const Choice& choice, void* workspace);
// A product over nothing: the activation of the bias.
Status run_empty_sm90(const Arguments& args);

// Earlier cards, any alignment: INT8 on Turing, INT8 from Ampere on, FP8 from Ada on.
Status run_turing(const Arguments& args);
Status run_ampere(const Arguments& args);
Status run_ada(const Arguments& args);

// Any card: raises `largest` to the largest magnitude of the dense results.
Status find_largest(const Arguments& args);

}  // namespace qsync::matmul
