// Arguments and entry points of rotary position embeddings. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// Tensors (batch, heads, tokens, dim) by their strides; features are contiguous. What is rotated is query, then key.
struct RopeHeads {
  const void* input;
  void* output;
  int64_t heads;
  int64_t batch_stride, head_stride, token_stride;  // of the input
  int64_t out_batch_stride, out_head_stride, out_token_stride;
};

// Feature i and its partner turn by the angle of their pair. cos and sin: (batch or 1, tokens, width) of the
// accumulation type, width half of rotary_dim, or rotary_dim: a number for each feature.
struct Rope {
  Dtype dtype;
  bool interleaved;  // pairs of neighbours; else feature i and i + rotary_dim / 2
  bool inverse;      // the transposed matrix: the gradient
  int64_t batch, tokens, dim, rotary_dim, width;
  const void *cos, *sin;
  int64_t table_batch_stride;  // 0: the same positions for the whole batch
  RopeHeads sides[2];
  int side_count;
};

// cos and sin of position * inv_freq, times `scaling`.
struct RopeTables {
  Dtype dtype;  // f32 or f64
  int64_t columns;
  const int64_t* positions;  // (rows)
  const double* inv_freq;    // (columns)
  double scaling;
  void *cos, *sin;  // (rows, columns)
};

constexpr int64_t kRopeTokens = 16;  // whose tables stay in cache while all heads are turned

struct RopeKernels {
  // The tokens [begin, end) of a sequence of the batch, at most kRopeTokens.
  void (*rotate)(const Rope&, int64_t sequence, int64_t begin, int64_t end);
  void (*tables)(const RopeTables&, int64_t row_begin, int64_t row_end);
};

SK_DECLARE_KERNEL_TABLE(RopeKernels, rope_kernels)

}  // namespace seqkern
