// Arguments and entry points of the attention kernels. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dropout.h"
#include "dtype.h"
#include "mask.h"

namespace seqkern {

// The type of the log-sum-exp. Its rounding is an error in all weights of a row in the backward pass; for an lse of 200
// in float32 that would be 1e-5. So it is float64 for inputs of float32, whose scores are rounded less than that.
template <class T>
struct LseOf {
  using type = double;  // for double and float
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

// A matrix with contiguous rows and any row stride, in elements.
struct Rows {
  const void* data;
  int64_t stride;
};
struct MutableRows {
  void* data;
  int64_t stride;
};

// What all heads and sequences of a call have in common, and all that the sizes of scratch memory depend on.
struct AttentionShape {
  Dtype dtype;
  int64_t head_dim, value_dim;
  double scale;
  double softcap;  // 0: none
  bool alibi;
  MaskType mask;
  Dropout dropout;
  bool need_mask, need_slopes;  // backward: which gradients of the bias are needed
};

// A sequence. Query i sees key j iff i + lower <= j <= i + upper. |lower| and |upper| are at most max(queries, keys),
// so that sums of positions do not overflow. Query i has position i + diagonal among the keys.
struct AttentionSequence {
  int64_t queries, keys;
  int64_t lower, upper, diagonal;
};

// The bias of a head's scores, and its random numbers. The head strides are for decode kernels, which take all heads of
// a group together.
struct AttentionBias {
  const void* slopes = nullptr;  // ALiBi: of this head and the following, in the accumulation type
  const void* mask = nullptr;    // element (0, 0)
  int64_t mask_head_stride = 0, mask_row_stride = 0, mask_key_stride = 0;  // in elements
  // Of this head's mask, from the cell of element (0, 0) on, and from one row of cells to the next (0: all rows are one
  // row); null if nobody looked.
  const MaskCell* cells = nullptr;
  int64_t cell_stride = 0;
  int64_t dropout_row = 0, dropout_head_stride = 0;  // Philox row of query 0
};

// One head; in decode kernels the `heads` query heads of one key head. `lse` and `grad_lse` have type lse_t, `sinks`
// the accumulation type of `dtype`.
struct AttentionForward {
  AttentionShape shape;
  AttentionSequence sequence;
  AttentionBias bias;
  Rows query, key, value;  // (queries, head_dim), (keys, head_dim), (keys, value_dim)
  MutableRows out;         // (queries, value_dim)
  void* lse;               // (queries)
  const void* sinks;       // of this head and the following, or null
  const void* packed;      // the output of `pack` for the key head, or null
  // Strides between heads, in elements.
  int64_t heads, query_head_stride, out_head_stride, lse_head_stride;
};

struct AttentionBackward {
  AttentionShape shape;
  AttentionSequence sequence;
  AttentionBias bias;
  bool decode;  // the forward pass used the decode kernels
  Rows grad_out, query, key, value, out;
  const void* lse;       // (queries)
  const void* grad_lse;  // (queries) or null
  MutableRows grad_query, grad_key, grad_value;
  // Accumulators, with rows of at least `padded(dtype, dim)` elements; the gradients themselves where they fit.
  MutableRows key_sum, value_sum;
  void* distance;         // (queries): sum over keys of dz |position - key|, or null
  MutableRows grad_mask;  // (queries, keys) in the mask's dtype if the head has its own mask; else null
  // (block_q, keys) in the accumulation type, of the query block at hand: dz is added to it; or null.
  MutableRows mask_sum;
  const void* packed;
};

struct AttentionKernels {
  // The tile size: block_q queries by block_k keys. Block indices below count these.
  int64_t block_q, block_k;
  // The row length that products write: `dim` rounded up to whole vectors.
  int64_t (*padded)(Dtype dtype, int64_t dim);

  // Packs keys and values of one key head for the products, once for all blocks of all its query heads. Null where the
  // kernels read them in place. `pack_bytes` is the size of the whole buffer (64-aligned) for `keys` keys; `pack` fills
  // the part of one key block, in any order and in parallel.
  int64_t (*pack_bytes)(const AttentionShape&, int64_t keys, bool backward);
  void (*pack)(const AttentionShape&, int64_t keys, bool backward, Rows key, Rows value, int64_t key_block,
               void* packed);

  // Scratch memory of a worker in bytes, 64-aligned.
  int64_t (*forward_scratch)(const AttentionShape&);
  int64_t (*backward_scratch)(const AttentionShape&);

  // One query block against all keys that it sees.
  void (*forward)(const AttentionForward&, int64_t query_block, void* scratch);

  // Decode: few queries and usually many keys. Takes all `heads` x queries rows, at most decode_rows of them, against
  // one chunk of decode_keys keys: keys are read once for the whole group, and by as many workers as there are chunks.
  // A chunk's result goes to `partial` (decode_partial bytes, 64-aligned); decode_combine combines `chunks` consecutive
  // results. The chunks depend on the positions of the keys alone. With more than decode_queries queries the blocks of
  // the other kernels are full enough to be faster, although each head reads the keys for itself.
  int64_t decode_rows, decode_queries, decode_keys;
  int64_t (*decode_scratch)(const AttentionShape&);
  int64_t (*decode_partial)(const AttentionShape&);
  void (*decode_forward)(const AttentionForward&, int64_t chunk, void* partial, void* scratch);
  void (*decode_combine)(const AttentionForward&, const void* partials, int64_t chunks);

  // One query block, in four steps: begin; for every key block that it sees, ascending, scores and then keys; end.
  // `keys` adds to the key block's sums, so query blocks must call it one after the other. The `first` overwrites the
  // sums, the `last` writes the key block's gradients. `scores` returns false if a mask hides the whole tile; passed on
  // to `keys` as `visible`, it makes that add nothing.
  void (*backward_begin)(const AttentionBackward&, int64_t query_block, void* scratch);
  bool (*backward_scores)(const AttentionBackward&, int64_t query_block, int64_t key_block, void* scratch);
  void (*backward_keys)(const AttentionBackward&, int64_t query_block, int64_t key_block, bool visible, bool first,
                        bool last, void* scratch);
  void (*backward_end)(const AttentionBackward&, int64_t query_block, void* scratch);

  // For the gradient of a mask that several heads or sequences share, after backward_begin: adds the tile's dz to
  // `sum`, (block_q, stride) in the accumulation type, whose first column is the key block's first key.
  void (*mask_sum)(const AttentionBackward&, int64_t query_block, int64_t key_block, void* sum, int64_t stride,
                   void* scratch);
  // Writes `rows` x `columns` of these sums in the mask's dtype.
  void (*mask_write)(const AttentionShape&, const void* sum, int64_t stride, int64_t rows, int64_t columns,
                     MutableRows grad_mask);
};

SK_DECLARE_KERNEL_TABLE(AttentionKernels, attention_kernels)

SK_DECLARE_BF16_TABLE(AttentionKernels, attention_bf16_kernels)

// Internal linkage: the functions must not leave their tier's translation unit.
namespace {

struct Range {
  int64_t begin, end;  // empty: 0, 0
};
inline Range intersection(int64_t begin, int64_t end, int64_t length) {
  begin = begin > 0 ? begin : 0;
  end = end < length ? end : length;
  return begin < end ? Range{begin, end} : Range{0, 0};
}
// The keys that any query of [first, end) sees.
inline Range visible_range(const AttentionSequence& s, int64_t first, int64_t end) {
  return intersection(first + s.lower, end + s.upper, s.keys);
}
// The queries that see any key of [first, end).
inline Range seeing_range(const AttentionSequence& s, int64_t first, int64_t end) {
  return intersection(first - s.upper, end - s.lower, s.queries);
}

}  // namespace

}  // namespace seqkern
