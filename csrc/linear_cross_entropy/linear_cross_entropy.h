// Arguments and entry points of cross-entropy on logits that are never a whole matrix. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// Logits of consecutive classes for some rows of the input, logits[class * stride + row]: rows side by side in a
// vector. `stride`, and the arrays (rows), are whole vectors long. All numbers have the accumulation type A.
struct LogitTile {
  Dtype dtype;  // of A: f32 or f64
  int64_t classes, rows;
  void* logits;
  int64_t stride;
  const void* bias;          // (classes) or null
  const void* class_weight;  // (classes) or null
  double softcap;            // 0: none
  const int64_t* targets;    // (rows)
  int64_t first_class;       // the tile's: other tiles' targets are outside
};

// What a tile's classes are to each row, (rows) each. max null: only the last is wanted.
struct TileSums {
  void *max, *sum;   // of the logits, and of exp(logit - max)
  void* weighted;    // the sum of class_weight * (logit - max); or null
  void* hit_logits;  // the target's logit, where it is in the tile
};

// The sums of `tiles` tiles, `stride` apart, become those over all classes, in the place of the first tile's.
struct ClassSums {
  Dtype dtype;
  int64_t tiles, rows, stride;
  void *max, *sum, *weighted;
  const void* tile_weights;  // (tiles): the sum of each tile's class weights; where weighted is
};

// The loss's derivative by the logit of class j in row r: p_scale[r] exp(logit - max[r]) - spread[r] class_weight[j],
// less hit[r] where j is the target; times softcap's derivative.
struct TileGradient {
  const void *max, *p_scale, *hit;  // (rows) each
  const void* spread;               // (rows) or null
  const void* hit_logits;           // (rows), as `sums` left them
  void* bias_sums;                  // (classes) or null: sums over the rows are added
};

struct LinearCrossEntropyKernels {
  // Adds the bias, caps, stores the logits back where that changes them, and reduces them.
  void (*sums)(const LogitTile&, const TileSums&);
  void (*combine)(const ClassSums&);
  // Replaces logits, after `sums`, by derivatives.
  void (*gradient)(const LogitTile&, const TileGradient&);
  // Adds the numbers [begin, end) of `count` arrays, `step` apart, in order; the sums go to the first.
  void (*add)(Dtype dtype, void* arrays, int64_t count, int64_t step, int64_t begin, int64_t end);
  // Rows [begin, end) of `out`, contiguous, become those columns of a matrix of `rows` rows.
  void (*transpose)(Dtype dtype, const void* matrix, int64_t stride, int64_t rows, void* out, int64_t begin,
                    int64_t end);
};

SK_DECLARE_KERNEL_TABLE(LinearCrossEntropyKernels, linear_cross_entropy_kernels)

}  // namespace seqkern
