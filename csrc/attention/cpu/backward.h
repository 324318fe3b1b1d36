// The backward pass of one query block, in the steps of attention.h.
#pragma once

#include "decode.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A>
struct BackwardScratch {
  A *query_t, *decode_query, *grad_out_t, *query, *grad_out, *scores, *grad_scores, *grad_query, *key, *value, *delta,
      *grad_lse;
  A *lse, *remainder;               // their sum is the lse
  A *distance, *derivative, *kept;  // derivative: with softcap; kept: with dropout; both are tiles
  Lanes<A>* lanes;
  int64_t bytes;
  SK_INLINE BackwardScratch(const AttentionShape& s, void* memory) {
    Pieces pieces(memory);
    const int64_t head_width = round_up<A>(s.head_dim), value_width = round_up<A>(s.value_dim);
    query_t = pieces.take<A>(s.head_dim * kLaneStride);
    decode_query = pieces.take<A>(kDecodeRows * head_width);
    grad_out_t = pieces.take<A>(s.value_dim * kLaneStride);
    query = pieces.take<A>(kBlockQ * head_width);
    grad_out = pieces.take<A>(max(kBlockQ * value_width, s.value_dim * kLaneStride));  // or its transpose
    scores = pieces.take<A>(kBlockK * kLaneStride);
    grad_scores = pieces.take<A>(kBlockK * kLaneStride);
    grad_query = pieces.take<A>(kBlockQ * head_width);
    key = pieces.take<A>(kBlockK * head_width);
    value = pieces.take<A>(kBlockK * value_width);
    lse = pieces.take<A>(kBlockQ);
    remainder = pieces.take<A>(kBlockQ);
    delta = pieces.take<A>(kBlockQ);
    grad_lse = pieces.take<A>(kBlockQ);
    distance = pieces.take<A>(kBlockQ);
    derivative = pieces.take<A>(s.softcap != 0 ? kBlockK * kLaneStride : 0);
    kept = pieces.take<A>(s.dropout.active ? kBlockK * kLaneStride : 0);
    lanes = pieces.take<Lanes<A>>(1);
    bytes = pieces.bytes();
  }
};

// Whether decode_scores made the scores. It sums in another order, and here they must have the same bits, because lse
// belongs to them. (Where results are rounded to 16 bits the difference does not count.)
template <class T>
SK_INLINE bool decode_products(const AttentionBackward& p) {
  return kDots<acc_t<T>> && sizeof(T) == sizeof(acc_t<T>) && p.decode;
}

// The scores of a tile, as decode_scores makes them. All queries are in one block.
template <class T, class A>
void decode_tile(const AttentionBackward& p, const Geometry& g, const BackwardScratch<A>& t) {
  static_assert(kDecodeRows * kRowStride <= kBlockK * kLaneStride, "rows of scores, where the gradients come later");
  A* by_row = t.grad_scores;
  const int64_t begin = max(0, visible_range(p.sequence, 0, g.queries).begin - g.k0);
  for (int64_t q = 0; q < g.queries; ++q)
    for (int64_t k = begin / W<A> * W<A>; k < g.keys; k += W<A>) store(by_row + q * kRowStride + k, Vec<A>{});
  dot_products<T>(at<T>(p.key, g.k0 + begin), p.key.stride, g.keys - begin, p.shape.head_dim, t.decode_query, g.queries,
                  by_row + begin);
  for (int64_t k = g.begin; k < g.keys; k += W<A>) {
    for (int64_t q = 0; q < g.lanes; q += W<A>) {
      Vec<A> v[W<A>];
      for (int i = 0; i < W<A>; ++i)
        v[i] = q + i < g.queries && k + W<A> > begin ? load(by_row + (q + i) * kRowStride + k) : Vec<A>{};
      transpose_square<A>(v);
      for (int i = 0; i < W<A>; ++i) store(t.scores + (k + i) * kLaneStride + q, v[i]);
    }
  }
}

template <class T>
void begin_block(const AttentionBackward& p, int64_t query_block, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const BackwardScratch<A> t(s, memory);
  const int64_t q0 = query_block * kBlockQ, queries = min(kBlockQ, p.sequence.queries - q0);
  const int64_t lanes = round_up<A>(queries);
  const T* grad_out = at<T>(p.grad_out, q0);
  transpose(at<T>(p.query, q0), p.query.stride, queries, lanes, s.head_dim, static_cast<A>(s.scale), t.query_t);
  transpose(grad_out, p.grad_out.stride, queries, lanes, s.value_dim, A(1), t.grad_out_t);
  if (decode_products<T>(p)) {
    for (int64_t q = 0; q < queries; ++q)
      store_query(at<T>(p.query, q0 + q), s.head_dim, static_cast<A>(s.scale),
                  t.decode_query + q * round_up<A>(s.head_dim));
  }
  fill_lanes(s, p.sequence, p.bias, 0, q0, queries, 0, t.lanes);
  // delta is summed in the order of the product dO V^T, so that dP - delta cancels exactly where one key has all the
  // weight.
  A* out_t = t.grad_out;
  transpose(at<T>(p.out, q0), p.out.stride, queries, lanes, s.value_dim, A(1), out_t);
  for (int64_t q = 0; q < lanes; q += W<A>) {
    Vec<A> sum = {};
    for (int64_t c = 0; c < s.value_dim; ++c)
      sum += load(out_t + c * kLaneStride + q) * load(t.grad_out_t + c * kLaneStride + q);
    store(t.delta + q, sum);
  }
  for (int64_t q = 0; q < lanes; ++q) {
    // Padding and queries that see no key: exp(score - inf) = 0.
    using L = lse_t<T>;
    const L lse = q < queries ? static_cast<const L*>(p.lse)[q0 + q] : -kInfinity<L>;
    const bool sees = lse != -kInfinity<L>;
    t.lse[q] = sees ? static_cast<A>(lse) : kInfinity<A>;
    t.remainder[q] = lse - lse == 0 ? static_cast<A>(lse - static_cast<L>(t.lse[q])) : A(0);
    t.delta[q] = sees ? t.delta[q] : A(0);
    t.grad_lse[q] = p.grad_lse && sees ? static_cast<A>(static_cast<const L*>(p.grad_lse)[q0 + q]) : A(0);
    t.distance[q] = 0;
  }
  padded_rows(at<T>(p.query, q0), p.query.stride, queries, s.head_dim, t.query);
  padded_rows(grad_out, p.grad_out.stride, queries, s.value_dim, t.grad_out);
  const int64_t elements = queries * round_up<A>(s.head_dim);
  for (int64_t i = 0; i < elements; ++i) t.grad_query[i] = 0;
}

// scores = P, grad_scores = dz, both 0 for hidden entries. With dropout, P is the dropped one, of which `out` was made.
template <class T, class A>
SK_INLINE void bias_gradients(const AttentionBackward& p, const Geometry& g, const BackwardScratch<A>& t, Tile<A> key) {
  const AttentionShape& s = p.shape;
  const Tile<A> value = plain_rows(at<T>(p.value, g.k0), p.value.stride, g.keys, s.value_dim, t.value);
  if (decode_products<T>(p)) decode_tile<T>(p, g, t);
  else for_key_strips(g, [&](const Part& part) { products(part, key, s.head_dim, t.query_t, t.scores); });
  for_key_strips(g, [&](const Part& part) { products(part, value, s.value_dim, t.grad_out_t, t.grad_scores); });
  for_key_strips(g, [&](const Part& part) {
    if (modified(s)) modify_scores(s, *t.lanes, g.k0, part, t.scores, kLaneStride, t.derivative);
    if (s.dropout.active) {
      drop_factors(s.dropout, *t.lanes, g.k0, part, t.kept, kLaneStride);
      multiply(part, t.kept, t.grad_scores, kLaneStride);
    }
    for_lanes<A>(part.first, part.last, [&](auto vectors, int64_t q) {
      const int64_t at = part.begin * kLaneStride + q;
      score_gradients<A, vectors.count>(t.scores + at, t.grad_scores + at, kLaneStride, part.end - part.begin,
                                        t.lse + q, t.remainder + q, t.delta + q, t.grad_lse + q);
    });
    if (s.dropout.active) multiply(part, t.kept, t.scores, kLaneStride);
    hide(g, part, A(0), t.scores);
    hide(g, part, A(0), t.grad_scores);
  });
}

template <class T>
bool scores_block(const AttentionBackward& p, int64_t query_block, int64_t key_block, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const BackwardScratch<A> t(s, memory);
  const Geometry g = geometry<A>(p.sequence, query_block, key_block);
  if (mask_hides_tile(s, *t.lanes, g.k0, g.begin, g.keys)) return false;
  const int64_t width = round_up<A>(s.head_dim);
  const Tile<A> key = padded_rows(at<T>(p.key, g.k0), p.key.stride, g.keys, s.head_dim, t.key);
  bias_gradients<T>(p, g, t, key);
  if (p.grad_mask.data || p.mask_sum.data || p.distance || s.softcap != 0) {
    for_key_strips(g, [&](const Part& part) {
      if (p.distance) add_distances(*t.lanes, g.k0, part, t.grad_scores, kLaneStride, t.distance);
      if (p.grad_mask.data) {
        char* corner = static_cast<char*>(p.grad_mask.data) + (g.q0 * p.grad_mask.stride + g.k0) * mask_size(s.mask);
        write_to_mask(s.mask, part, g.queries, t.grad_scores, kLaneStride, corner, p.grad_mask.stride);
      }
      if (p.mask_sum.data) {
        A* sum = static_cast<A*>(p.mask_sum.data) + g.k0;
        add_to_mask(part, g.queries, t.grad_scores, kLaneStride, sum, p.mask_sum.stride);
      }
      if (s.softcap != 0) {
        multiply(part, t.derivative, t.grad_scores, kLaneStride);
        hide(g, part, A(0), t.grad_scores);  // again: the derivative of a hidden entry may be NaN
      }
    });
  }
  // dQ[q, d] += sum_k dS[k, q] K[k, d]
  if (g.crossed && !all_finite(key, g.keys, width)) {
    add_seen(g, t.grad_scores, key, width, true, t.grad_query);
    return true;
  }
  for_query_strips(g, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
    if (first < last)
      gemm<A>(end - begin, width, last - first, t.grad_scores + first * kLaneStride + begin, 1, kLaneStride,
              key.data + first * key.stride, key.stride, t.grad_query + begin * width, width, true);
  });
  return true;
}

template <class T>
void keys_block(const AttentionBackward& p, int64_t query_block, int64_t key_block, bool visible, bool first, bool last,
                void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const BackwardScratch<A> t(s, memory);
  const Geometry g = geometry<A>(p.sequence, query_block, key_block);
  const int64_t head_width = round_up<A>(s.head_dim), value_width = round_up<A>(s.value_dim);
  const int64_t keys = min(kBlockK, p.sequence.keys - g.k0);
  A *key_sum = at<A>(p.key_sum, g.k0), *value_sum = at<A>(p.value_sum, g.k0);
  const int64_t key_stride = p.key_sum.stride, value_stride = p.value_sum.stride;
  // begin_block converted them where they are not read in place.
  Tile<A> query{t.query, head_width}, grad_out{t.grad_out, value_width};
  if constexpr (sizeof(T) == sizeof(A)) {
    if (s.head_dim == head_width) query = {at<T>(p.query, g.q0), p.query.stride};
    if (s.value_dim == value_width) grad_out = {at<T>(p.grad_out, g.q0), p.grad_out.stride};
  }
  bool accumulate = !first;
  if (first && (g.crossed || g.keys < keys || !visible)) {  // some rows of the sums are not written below
    for (int64_t k = 0; k < keys; ++k) {
      for (int64_t c = 0; c < head_width; c += W<A>) store(key_sum + k * key_stride + c, Vec<A>{});
      for (int64_t c = 0; c < value_width; c += W<A>) store(value_sum + k * value_stride + c, Vec<A>{});
    }
    accumulate = true;
  }
  // dV[k, c] += sum_q P[k, q] dO[q, c],  dK[k, d] += sum_q dS[k, q] Q[q, d]
  if (visible) {
    for_key_strips(g, [&](const Part& part) {
      const int64_t q = part.first, queries = max(0, min(part.last, g.queries) - q), rows = part.end - part.begin;
      gemm<A, Prefetch::sums>(rows, value_width, queries, t.scores + part.begin * kLaneStride + q, kLaneStride, 1,
                              grad_out.data + q * grad_out.stride, grad_out.stride,
                              value_sum + part.begin * value_stride, value_stride, accumulate);
      gemm<A, Prefetch::sums>(rows, head_width, queries, t.grad_scores + part.begin * kLaneStride + q, kLaneStride, 1,
                              query.data + q * query.stride, query.stride, key_sum + part.begin * key_stride,
                              key_stride, accumulate);
    });
  }
  if (last) {
    write_rows(key_sum, key_stride, keys, s.head_dim, static_cast<A>(s.scale), at<T>(p.grad_key, g.k0),
               p.grad_key.stride);
    if (p.value_sum.data != p.grad_value.data)
      write_rows(value_sum, value_stride, keys, s.value_dim, A(1), at<T>(p.grad_value, g.k0), p.grad_value.stride);
  }
}

template <class T>
void end_block(const AttentionBackward& p, int64_t query_block, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const BackwardScratch<A> t(s, memory);
  const int64_t q0 = query_block * kBlockQ, queries = min(kBlockQ, p.sequence.queries - q0);
  write_rows(t.grad_query, round_up<A>(s.head_dim), queries, s.head_dim, static_cast<A>(s.scale),
             at<T>(p.grad_query, q0), p.grad_query.stride);
  for (int64_t q = 0; p.distance && q < queries; ++q) static_cast<A*>(p.distance)[q0 + q] = t.distance[q];
}

template <class T>
void mask_block(const AttentionBackward& p, int64_t query_block, int64_t key_block, void* sum, int64_t stride,
                void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const BackwardScratch<A> t(s, memory);
  const Geometry g = geometry<A>(p.sequence, query_block, key_block);
  if (mask_hides_tile(s, *t.lanes, g.k0, g.begin, g.keys)) return;
  const Tile<A> key = plain_rows(at<T>(p.key, g.k0), p.key.stride, g.keys, s.head_dim, t.key);
  bias_gradients<T>(p, g, t, key);
  for_key_strips(g, [&](const Part& part) {
    add_to_mask(part, g.queries, t.grad_scores, kLaneStride, static_cast<A*>(sum), stride);
  });
}

template <class A>
void write_mask(const AttentionShape& s, const A* sum, int64_t stride, int64_t rows, int64_t columns,
                MutableRows grad_mask) {
  SK_DISPATCH_MASK(s.mask, A, {
    if constexpr (sizeof(M) > 1) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; c += W<A>)
          store_bias<M, A>(at<M>(grad_mask, r) + c, load(sum + r * stride + c), columns - c);
    }
  });
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
