// Arguments and entry points of the attention kernels. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// A matrix whose rows have unit stride inside and any distance from each other.
struct Rows {
  const void* data;
  int64_t stride;
};

// What the queries of a head see: key j is visible to query i iff !causal or j <= i + diagonal.
// |diagonal| <= max(queries, keys), so that sums of positions do not overflow.
struct AttentionShape {
  Dtype dtype;
  int64_t queries, keys, head_dim, value_dim;
  bool causal;
  int64_t diagonal;
  double scale;
};

// One head. `lse`, `grad_lse` and the accumulators are in the accumulation type of `dtype`.
struct AttentionForward {
  AttentionShape shape;
  Rows query, key, value;  // (queries, head_dim), (keys, head_dim), (keys, value_dim)
  void* out;               // (queries, value_dim), contiguous
  void* lse;               // (queries)
};

struct AttentionBackward {
  AttentionShape shape;
  Rows grad_out, query, key, value, out;
  const void* lse;       // (queries)
  const void* grad_lse;  // (queries) or null
  void* grad_query;      // (queries, head_dim), contiguous
  void* grad_key;        // (keys, head_dim), contiguous
  void* grad_value;      // (keys, value_dim), contiguous
  // Accumulators with rows padded to `padded(dtype, dim)` elements; the gradients themselves where that changes
  // nothing.
  void* key_sum;
  void* value_sum;
};

// The tiles: BLOCK_Q queries by BLOCK_K keys, the same in every tier.
constexpr int64_t kBlockQ = 128, kBlockK = 64;

struct AttentionKernels {
  // The length of a row that the products can write: `dim` rounded up to whole vectors.
  int64_t (*padded)(Dtype dtype, int64_t dim);
  // Bytes of scratch memory that one worker needs, aligned to 64.
  int64_t (*forward_scratch)(const AttentionShape&);
  int64_t (*backward_scratch)(const AttentionShape&);

  // One block of queries against all keys that it sees.
  void (*forward)(const AttentionForward&, int64_t query_block, void* scratch);

  // One block of queries, in four steps: begin; for every key block that it sees, ascending, scores and then keys; end.
  // `keys` adds to the key block's sums, so the blocks of queries must reach it one after the other. The `first` to do
  // so overwrites, the `last` writes the key block's gradients.
  void (*backward_begin)(const AttentionBackward&, int64_t query_block, void* scratch);
  void (*backward_scores)(const AttentionBackward&, int64_t query_block, int64_t key_block, void* scratch);
  void (*backward_keys)(const AttentionBackward&, int64_t query_block, int64_t key_block, bool first, bool last,
                        void* scratch);
  void (*backward_end)(const AttentionBackward&, int64_t query_block, void* scratch);
};

SK_DECLARE_KERNEL_TABLE(AttentionKernels, attention_kernels)

}  // namespace seqkern
