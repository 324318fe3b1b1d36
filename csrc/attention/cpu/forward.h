// The forward pass of one query block: an online softmax over its visible tiles.
#pragma once

#include "scores.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A>
struct ForwardScratch {
  A *query_t, *scores, *out, *key, *value, *max, *sum, *rescale;
  Lanes<A>* lanes;
  int64_t bytes;
  SK_INLINE ForwardScratch(const AttentionShape& s, void* memory) {
    Pieces pieces(memory);
    query_t = pieces.take<A>(s.head_dim * kLaneStride);
    scores = pieces.take<A>(kBlockK * kLaneStride);
    out = pieces.take<A>(kBlockQ * round_up<A>(s.value_dim));
    key = pieces.take<A>(kBlockK * round_up<A>(s.head_dim));
    value = pieces.take<A>(kBlockK * round_up<A>(s.value_dim));
    max = pieces.take<A>(kBlockQ);
    sum = pieces.take<A>(kBlockQ);
    rescale = pieces.take<A>(kBlockQ);
    lanes = pieces.take<Lanes<A>>(1);
    bytes = pieces.bytes();
  }
};

template <class T>
void forward_block(const AttentionForward& p, int64_t query_block, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const ForwardScratch<A> t(s, memory);
  const int64_t width = round_up<A>(s.value_dim);
  const int64_t q0 = query_block * kBlockQ, queries = min(kBlockQ, p.sequence.queries - q0);
  const int64_t lanes = round_up<A>(queries);
  const Range seen = visible_range(p.sequence, q0, q0 + queries);

  transpose(at<T>(p.query, q0), p.query.stride, queries, lanes, s.head_dim, static_cast<A>(s.scale), t.query_t);
  fill_lanes(s, p.sequence, p.bias, 0, q0, queries, 0, t.lanes);
  // A sink is a key with this score and the value 0.
  const A sink = p.sinks ? *static_cast<const A*>(p.sinks) : -kInfinity<A>;
  for (int64_t q = 0; q < lanes; ++q) {
    t.max[q] = sink;
    t.sum[q] = sink == -kInfinity<A> ? A(0) : A(1);
  }

  bool first = true;
  for (int64_t block = seen.begin / kBlockK; block * kBlockK < seen.end; ++block) {
    const Geometry g = geometry<A>(p.sequence, query_block, block);
    if (mask_hides_tile(s, *t.lanes, g.k0, g.begin, g.keys)) continue;
    const Tile<A> k = plain_rows(at<T>(p.key, g.k0), p.key.stride, g.keys, s.head_dim, t.key);

    for (int64_t q = 0; q < lanes; ++q) t.rescale[q] = t.max[q];
    for_key_strips(g, [&](const Part& part) { products(part, k, s.head_dim, t.query_t, t.scores); });
    for_key_strips(g, [&](const Part& part) {
      if (modified(s)) modify_scores(s, *t.lanes, g.k0, part, t.scores, kLaneStride);
      hide(g, part, -kInfinity<A>, t.scores);
      for_lanes<A>(part.first, part.last, [&](auto vectors, int64_t q) {
        update_max<A, vectors.count>(t.scores + part.begin * kLaneStride + q, kLaneStride, part.end - part.begin,
                                     t.max + q);
      });
    });
    for (int64_t q = 0; q < lanes; q += W<A>) {
      const Vec<A> m = load(t.max + q);
      const Vec<A> r = exp_nonpositive<A>(load(t.rescale + q) - (m == -kInfinity<A> ? Vec<A>{} : m));
      store(t.rescale + q, r);
      store(t.sum + q, load(t.sum + q) * r);
    }
    for_key_strips(g, [&](const Part& part) {
      for_lanes<A>(part.first, part.last, [&](auto vectors, int64_t q) {
        exponentials<A, vectors.count>(t.scores + part.begin * kLaneStride + q, kLaneStride, part.end - part.begin,
                                       t.max + q, t.sum + q);
      });
      if (s.dropout.active) drop(s.dropout, *t.lanes, g.k0, part, t.scores, kLaneStride);
    });
    if (!first) {
      for (int64_t q = 0; q < queries; ++q) {
        if (t.rescale[q] == A(1)) continue;
        const Vec<A> r = broadcast<A>(t.rescale[q]);
        for (int64_t c = 0; c < width; c += W<A>) store(t.out + q * width + c, load(t.out + q * width + c) * r);
      }
    }
    const Tile<A> v = padded_rows(at<T>(p.value, g.k0), p.value.stride, g.keys, s.value_dim, t.value);
    add_seen(g, t.scores, v, width, !first, t.out);
    first = false;
  }

  auto* lse = static_cast<lse_t<T>*>(p.lse);
  for (int64_t q = 0; q < queries; ++q) {
    const A sum = t.sum[q];
    const A inverse = sum == 0 ? A(0) : A(1) / sum;
    for (int64_t c = 0; c < s.value_dim; c += W<A>)
      store_upto(at<T>(p.out, q0 + q) + c, first ? Vec<A>{} : load(t.out + q * width + c) * inverse, s.value_dim - c);
    lse[q0 + q] = log_sum_exp<lse_t<T>>(t.max[q], sum);
  }
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
