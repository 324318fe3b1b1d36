// Attention on CPU, forward and backward. Compiled once per instruction-set tier.
//
//   S = scale Q K^T,  P = softmax(S),  O = P V                                                     Vaswani et al. 2017
//   m' = max(m, max S_j),  l' = l exp(m - m') + sum exp(S_j - m'),  O' = O exp(m - m') + exp(S_j - m') V_j
//       over the blocks j of keys, and at the end O / l, lse = m + log l                  Milakov & Gimelshein 2018
//   P = exp(S - lse), lse not rounded (attention.h),  delta = rowsum(dO O),  dV = P^T dO,
//       dS = P (dO V^T - delta + dlse),  dK = scale dS^T Q,  dQ = scale dS K
//                                                        Dao et al. 2022 (and, for the work partition, Dao 2023)
//
// A work item is a block of kBlockQ queries of one head. It goes over the keys that it sees in tiles of kBlockK. No
// score outlives its tile, so memory is O(N). Work done once an item (transposing and converting Q and dO) is amortised
// over all its tiles.
//
// Scores are stored transposed, keys by queries. The maximum, the sum, lse and delta are then vectors over the queries,
// and the softmax needs no reduction inside a vector and no scalar step. gemm.h reads its left operand element by
// element with any strides, and its right operand by rows, so K and V are never packed or transposed. S^T = K Q^T and
// dP^T = V dO^T read them as left operands, O = P V and dQ = dS K as rows, in place where type and width allow it.
//
// Tiles that the diagonal crosses are cut into strips, which saves half their products.
//
// The backward pass computes each of the five products once. dQ belongs to the item. dK and dV of a key block are
// summed over the items in a fixed order, and each item waits for its turn (attention.cpp): a single head keeps every
// core busy, and the bits do not depend on the number of threads. With the roles exchanged (a key block as the item, dQ
// shared), the sums in memory would grow with the query heads instead of the shared key heads.
//
// Block sizes are by measurement (NOTES.md).
#include "backward.h"
#include "decode.h"
#include "forward.h"

namespace seqkern {
namespace SK_TIER {
namespace {

int64_t padded(Dtype dtype, int64_t dim) { return dtype == Dtype::f64 ? round_up<double>(dim) : round_up<float>(dim); }

template <template <class> class Scratch>
int64_t bytes_of(const AttentionShape& s) {
  return s.dtype == Dtype::f64 ? Scratch<double>(s, nullptr).bytes : Scratch<float>(s, nullptr).bytes;
}

void forward(const AttentionForward& p, int64_t query_block, void* scratch) {
  SK_DISPATCH(p.shape.dtype, forward_block<T>(p, query_block, scratch));
}
void decode_forward(const AttentionForward& p, int64_t chunk, void* partial, void* scratch) {
  SK_DISPATCH(p.shape.dtype, decode_chunk<T>(p, chunk, partial, scratch));
}
void decode_combine(const AttentionForward& p, const void* partials, int64_t chunks) {
  SK_DISPATCH(p.shape.dtype, decode_combine_rows<T>(p, partials, chunks));
}
void backward_begin(const AttentionBackward& p, int64_t query_block, void* scratch) {
  SK_DISPATCH(p.shape.dtype, begin_block<T>(p, query_block, scratch));
}
bool backward_scores(const AttentionBackward& p, int64_t query_block, int64_t key_block, void* scratch) {
  SK_DISPATCH(p.shape.dtype, return scores_block<T>(p, query_block, key_block, scratch));
  return false;
}
void backward_keys(const AttentionBackward& p, int64_t query_block, int64_t key_block, bool visible, bool first,
                   bool last, void* scratch) {
  SK_DISPATCH(p.shape.dtype, keys_block<T>(p, query_block, key_block, visible, first, last, scratch));
}
void backward_end(const AttentionBackward& p, int64_t query_block, void* scratch) {
  SK_DISPATCH(p.shape.dtype, end_block<T>(p, query_block, scratch));
}
void mask_sum(const AttentionBackward& p, int64_t query_block, int64_t key_block, void* sum, int64_t stride,
              void* scratch) {
  SK_DISPATCH(p.shape.dtype, mask_block<T>(p, query_block, key_block, sum, stride, scratch));
}
void mask_write(const AttentionShape& s, const void* sum, int64_t stride, int64_t rows, int64_t columns,
                MutableRows grad_mask) {
  if (s.dtype == Dtype::f64) write_mask(s, static_cast<const double*>(sum), stride, rows, columns, grad_mask);
  else write_mask(s, static_cast<const float*>(sum), stride, rows, columns, grad_mask);
}

}  // namespace

const AttentionKernels attention_kernels = {
    .block_q = kBlockQ,
    .block_k = kBlockK,
    .padded = padded,
    .pack_bytes = nullptr,
    .pack = nullptr,
    .forward_scratch = bytes_of<ForwardScratch>,
    .backward_scratch = bytes_of<BackwardScratch>,
    .forward = forward,
    .decode_rows = kDecodeRows,
    .decode_queries = kDecodeQueries,
    .decode_keys = kDecodeKeys,
    .decode_scratch = bytes_of<DecodeScratch>,
    .decode_partial = bytes_of<DecodePartial>,
    .decode_forward = decode_forward,
    .decode_combine = decode_combine,
    .backward_begin = backward_begin,
    .backward_scores = backward_scores,
    .backward_keys = backward_keys,
    .backward_end = backward_end,
    .mask_sum = mask_sum,
    .mask_write = mask_write,
};

}  // namespace SK_TIER
}  // namespace seqkern
