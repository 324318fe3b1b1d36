// Arguments and entry points of the attention kernels. Torch-free.
#pragma once

#include <cstdint>

#include "attention_mask.h"
#include "cpu_isa.h"
#include "dropout.h"
#include "dtype.h"

namespace seqkern {

// What the log-sum-exp is kept in. Its rounding is an error of all weights of a row that the backward pass makes of it,
// and of 200 in float32 that would be 1e-5: beside inputs of float32 it is float64, as scores are rounded less than it.
template <class T>
struct LseOf {
  using type = double;  // of double and float
};
template <>
struct LseOf<BFloat16> {
  using type = float;
};
template <>
struct LseOf<Half> {
  using type = float;
};
template <class T>
using lse_t = typename LseOf<T>::type;

// A matrix whose rows have unit stride inside and any distance (in elements) from each other.
struct Rows {
  const void* data;
  int64_t stride;
};
struct MutableRows {
  void* data;
  int64_t stride;
};

// What one call of the op has in common: all that the sizes of scratch memory depend on.
struct AttentionShape {
  Dtype dtype;
  int64_t head_dim, value_dim;
  double scale;
  double softcap;  // 0: none
  bool alibi;
  MaskType mask;
  Dropout dropout;
  bool need_mask, need_slopes;  // backward: which gradients of the bias are wanted
};

// A sequence: key j is visible to query i iff i + lower <= j <= i + upper. |lower| and |upper| <= max(queries, keys),
// so that sums of positions do not overflow. Query i has the position i + diagonal among the keys.
struct AttentionSequence {
  int64_t queries, keys;
  int64_t lower, upper, diagonal;
};

// The bias of a head's scores, and its random numbers; what follows "from one head to the next" is for the kernels that
// take the heads of a group together.
struct AttentionBias {
  const void* slopes = nullptr;  // ALiBi: of this head and the ones after it, in the accumulation type
  const void* mask = nullptr;    // element (0, 0)
  int64_t mask_head_stride = 0, mask_row_stride = 0, mask_key_stride = 0;  // in elements
  int64_t dropout_row = 0, dropout_head_stride = 0;                        // Philox row of query 0
};

// One head; for the `few_` kernels, the `heads` query heads of one key head. `lse` and `grad_lse` are in lse_t, `sinks`
// in the accumulation type of `dtype`.
struct AttentionForward {
  AttentionShape shape;
  AttentionSequence sequence;
  AttentionBias bias;
  Rows query, key, value;  // (queries, head_dim), (keys, head_dim), (keys, value_dim)
  MutableRows out;         // (queries, value_dim)
  void* lse;               // (queries)
  const void* sinks;       // of this head and the ones after it, or null
  const void* packed;      // what `pack` wrote for the key head, or null
  // From one head to the next, in elements.
  int64_t heads, query_head_stride, out_head_stride, lse_head_stride;
};

struct AttentionBackward {
  AttentionShape shape;
  AttentionSequence sequence;
  AttentionBias bias;
  bool decode;  // the forward pass went to the `few_` kernels
  Rows grad_out, query, key, value, out;
  const void* lse;       // (queries)
  const void* grad_lse;  // (queries) or null
  MutableRows grad_query, grad_key, grad_value;
  // Accumulators with rows of at least `padded(dtype, dim)` elements; the gradients themselves where that changes
  // nothing.
  MutableRows key_sum, value_sum;
  void* distance;         // (queries): sum over the keys of dz |position - key|, or null
  MutableRows grad_mask;  // (queries, keys) in the mask's dtype, where the head has a mask of its own; else null
  const void* packed;
};

struct AttentionKernels {
  // The tiles: block_q queries by block_k keys. All positions below count in these blocks.
  int64_t block_q, block_k;
  // The length of a row that the products can write: `dim` rounded up to whole vectors.
  int64_t (*padded)(Dtype dtype, int64_t dim);

  // Keys and values of one key head in the layout that the products want, made once and shared by all blocks of all its
  // query heads. Null where they are read as they lie. `pack_bytes` is the whole buffer's size (64-aligned), for
  // `keys` keys; `pack` fills the part of one key block, in any order and in parallel.
  int64_t (*pack_bytes)(const AttentionShape&, int64_t keys, bool backward);
  void (*pack)(const AttentionShape&, int64_t keys, bool backward, Rows key, Rows value, int64_t key_block,
               void* packed);

  // Bytes of scratch memory that one worker needs, aligned to 64.
  int64_t (*forward_scratch)(const AttentionShape&);
  int64_t (*backward_scratch)(const AttentionShape&);

  // One block of queries against all keys that it sees.
  void (*forward)(const AttentionForward&, int64_t query_block, void* scratch);

  // Few queries and, as a rule, many keys (decoding): all `heads` x queries rows, at most decode_rows of them, against
  // one chunk of decode_keys keys, so that the keys are read once for the group and by as many workers as there are
  // chunks. A chunk's result goes to `partial` (decode_partial bytes, 64-aligned); decode_combine puts `chunks` of
  // them, which lie one after the other, together. The cut depends on the positions of the keys alone.
  int64_t decode_rows, decode_keys;
  int64_t (*decode_scratch)(const AttentionShape&);
  int64_t (*decode_partial)(const AttentionShape&);
  void (*decode_forward)(const AttentionForward&, int64_t chunk, void* partial, void* scratch);
  void (*decode_combine)(const AttentionForward&, const void* partials, int64_t chunks);

  // One block of queries, in four steps: begin; for every key block that it sees, ascending, scores and then keys; end.
  // `keys` adds to the key block's sums, so the blocks of queries must reach it one after the other. The `first` to do
  // so overwrites, the `last` writes the key block's gradients. `scores` returns false where a mask hides the whole
  // tile; that comes back to `keys` as `visible`, which then adds nothing.
  void (*backward_begin)(const AttentionBackward&, int64_t query_block, void* scratch);
  bool (*backward_scores)(const AttentionBackward&, int64_t query_block, int64_t key_block, void* scratch);
  void (*backward_keys)(const AttentionBackward&, int64_t query_block, int64_t key_block, bool visible, bool first,
                        bool last, void* scratch);
  void (*backward_end)(const AttentionBackward&, int64_t query_block, void* scratch);

  // The gradient of a mask that several heads or sequences share: after backward_begin, adds the tile's dz to `sum`,
  // (block_q, stride) in the accumulation type, whose first column is the key block's first key.
  void (*mask_sum)(const AttentionBackward&, int64_t query_block, int64_t key_block, void* sum, int64_t stride,
                   void* scratch);
  // Writes `rows` x `columns` of such sums in the mask's dtype.
  void (*mask_write)(const AttentionShape&, const void* sum, int64_t stride, int64_t rows, int64_t columns,
                     MutableRows grad_mask);
};

SK_DECLARE_KERNEL_TABLE(AttentionKernels, attention_kernels)

SK_DECLARE_BF16_TABLE(AttentionKernels, attention_bf16_kernels)

// Internal linkage: what a tier's translation unit compiles must stay there.
namespace {

struct Range {
  int64_t begin, end;  // empty: 0, 0
};
inline Range intersection(int64_t begin, int64_t end, int64_t length) {
  begin = begin > 0 ? begin : 0;
  end = end < length ? end : length;
  return begin < end ? Range{begin, end} : Range{0, 0};
}
// Keys that a query of [first, end) sees.
inline Range visible_range(const AttentionSequence& s, int64_t first, int64_t end) {
  return intersection(first + s.lower, end + s.upper, s.keys);
}
// Queries that see a key of [first, end).
inline Range seeing_range(const AttentionSequence& s, int64_t first, int64_t end) {
  return intersection(first - s.upper, end - s.lower, s.queries);
}

}  // namespace

}  // namespace seqkern
