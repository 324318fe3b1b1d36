// Few queries against many keys: decoding. All query rows that share a key head lie side by side in one vector or a few
// of lanes, so that every key and value is read once for the group; the keys are cut into chunks, each worked on alone.
//
// With o_c, m_c, l_c the sums, maximum and denominator of chunk c: m = max m_c, O = sum_c exp(m_c - m) o_c / sum_c
// exp(m_c - m) l_c, in the order of the chunks (Dao et al. 2023, "Flash-Decoding").
#pragma once

#include "attention_scores.h"

namespace seqkern {
namespace SK_TIER {
namespace {

constexpr int64_t kFewRows = 16, kFewKeys = 512;
// Up to so many rows, scores are sums along the keys' rows; beyond, a product with one vector of lanes is faster,
// though it takes as long for one row as for 16.
constexpr int64_t kDotRows = 8;
// Up to so many rows, values are read in place, in their own type, and outputs stay in registers.
constexpr int64_t kDirectRows = 4;
// How many keys ahead memory is asked for: a core that waits for each line as it comes to it gets half the bandwidth.
constexpr int64_t kAhead = 32;

template <class A>
struct FewScratch {
  A *query, *query_t, *scores, *key, *value, *max, *sum;  // query: one of (rows, dim) and (dim, rows)
  int64_t *first, *end;                                   // the keys that a lane sees
  Lanes<A>* lanes;
  int64_t elements;
  SK_INLINE FewScratch(const AttentionShape& s, void* memory) {
    Arena<A> arena{static_cast<A*>(memory)};
    query = query_t = arena.take(round_up<A>(s.head_dim) * kFewRows);
    scores = arena.take(kFewKeys * kFewRows);
    key = arena.take(kBlockK * round_up<A>(s.head_dim));
    value = arena.take(kBlockK * round_up<A>(s.value_dim));
    max = arena.take(kFewRows);
    sum = arena.take(kFewRows);
    first = reinterpret_cast<int64_t*>(arena.take(kFewRows * 8 / sizeof(A)));
    end = reinterpret_cast<int64_t*>(arena.take(kFewRows * 8 / sizeof(A)));
    lanes = reinterpret_cast<Lanes<A>*>(arena.take(kLanesElements<A>));
    elements = arena.used;
  }
};

// A chunk's part of the result.
template <class A>
struct FewPartial {
  A *max, *sum, *out;
  int64_t width, elements;
  SK_INLINE FewPartial(const AttentionShape& s, const void* memory) {
    Arena<A> arena{static_cast<A*>(const_cast<void*>(memory))};
    width = round_up<A>(s.value_dim);
    max = arena.take(kFewRows);
    sum = arena.take(kFewRows);
    out = arena.take(kFewRows * width);
    elements = arena.used;
  }
};

// Lane i of the result is the sum of the lanes of v[i].
template <class A>
SK_INLINE Vec<A> sum_rows(Vec<A> (&v)[W<A>]) {
#pragma GCC unroll 4
  for (int step = 1; step < W<A>; step *= 2) {
    IVec<A> lower, upper;
    for (int i = 0; i < W<A>; ++i) {
      lower[i] = i & step ? W<A> + i - step : i;
      upper[i] = i & step ? W<A> + i : i + step;
    }
#pragma GCC unroll 16
    for (int i = 0; i < W<A>; i += 2 * step)
      v[i] = __builtin_shuffle(v[i], v[i + step], lower) + __builtin_shuffle(v[i], v[i + step], upper);
  }
  return v[0];
}

// scores[k, row] = sum_d key[k, d] query[row, d]. `query` is padded with zeros to whole vectors.
template <class T, class A = acc_t<T>>
void dot_products(const T* key, int64_t stride, int64_t keys, int64_t dim, const A* query, int64_t rows, bool ahead,
                  A* scores) {
  const int64_t padded = round_up<A>(dim), whole = dim / W<A> * W<A>;
  for (int64_t k = 0; k < keys; k += W<A>) {
    const int64_t count = min(W<A>, keys - k);
    for (int64_t row = 0; row < rows; ++row) {
      const A* q = query + row * padded;
      Vec<A> sums[W<A>] = {};
      if (count == W<A>) {
        for (int64_t d = 0; d < whole; d += W<A>) {
          const Vec<A> x = load(q + d);
#pragma GCC unroll 16
          for (int i = 0; i < W<A>; ++i) {
            const T* from = key + (k + i) * stride + d;
            if (row == 0 && ahead) __builtin_prefetch(from + kAhead * stride, 0, 2);
            sums[i] += load(from) * x;
          }
        }
        if (whole < dim) {
          const Vec<A> x = load(q + whole);
          for (int i = 0; i < W<A>; ++i) sums[i] += load_upto(key + (k + i) * stride + whole, dim - whole) * x;
        }
      } else {
        for (int i = 0; i < count; ++i)
          for (int64_t d = 0; d < dim; d += W<A>)
            sums[i] += load_upto(key + (k + i) * stride + d, dim - d) * load(q + d);
      }
      const Vec<A> result = sum_rows<A>(sums);
      for (int64_t i = 0; i < count; ++i) scores[(k + i) * kFewRows + row] = result[i];
    }
  }
}

// out[row, c] (+)= sum_k P[k, row] V[k, c] for ROWS rows and NV vectors of columns, the last of `count` columns.
template <class T, int ROWS, int NV, class A = acc_t<T>>
SK_INLINE void weigh(const A* scores, int64_t keys, const T* value, int64_t stride, int64_t count, A* out,
                     int64_t width, bool accumulate) {
  Vec<A> sums[ROWS][NV] = {};
  for (int64_t k = 0; k < keys; ++k) {
    const T* from = value + k * stride;
    for (int j = 0; j < NV; ++j) {
      __builtin_prefetch(from + kAhead * stride + j * W<A>, 0, 2);
      const Vec<A> v = NV == 1 ? load_upto(from, count) : load(from + j * W<A>);
      for (int r = 0; r < ROWS; ++r) sums[r][j] += broadcast<A>(scores[k * kFewRows + r]) * v;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int j = 0; j < NV; ++j) {
      A* to = out + r * width + j * W<A>;
      store(to, accumulate ? load(to) + sums[r][j] : sums[r][j]);
    }
  }
}
template <class T, int ROWS, class A = acc_t<T>>
void weighted_values(const A* scores, int64_t keys, const T* value, int64_t stride, int64_t columns, A* out,
                     int64_t width, bool accumulate) {
  constexpr int kVecs = kGemmVecs;
  int64_t c = 0;
  for (; c + kVecs * W<A> <= columns; c += kVecs * W<A>)
    weigh<T, ROWS, kVecs>(scores, keys, value + c, stride, columns - c, out + c, width, accumulate);
  for (; c < columns; c += W<A>)
    weigh<T, ROWS, 1>(scores, keys, value + c, stride, columns - c, out + c, width, accumulate);
}

template <class T>
void few_chunk(const AttentionForward& p, int64_t chunk, void* partial, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const FewScratch<A> t(s, memory);
  const FewPartial<A> to(s, partial);
  const int64_t queries = p.sequence.queries, rows = p.heads * queries, lanes = round_up<A>(rows);
  const bool dots = rows <= kDotRows;
  const Range seen = visible_range(p.sequence, 0, queries);
  const int64_t k0 = chunk * kFewKeys, begin = max(0, seen.begin - k0), end = min(kFewKeys, seen.end - k0);

  for (int64_t head = 0; head < p.heads; ++head) {
    const int64_t lane = head * queries;
    const T* query = static_cast<const T*>(p.query.data) + head * p.query_head_stride;
    if (dots) {
      for (int64_t i = 0; i < queries; ++i)
        for (int64_t d = 0; d < s.head_dim; d += W<A>)
          store(t.query + (lane + i) * round_up<A>(s.head_dim) + d,
                load_upto(query + i * p.query.stride + d, s.head_dim - d) * static_cast<A>(s.scale));
    } else {  // the last head clears the lanes that are left
      transpose(query, p.query.stride, queries, head + 1 < p.heads ? queries : lanes - lane, s.head_dim,
                static_cast<A>(s.scale), t.query_t + lane, kFewRows);
    }
    fill_lanes(s, p.sequence, p.bias, head, 0, queries, lane, t.lanes);
    for (int64_t i = 0; i < queries; ++i) {
      const Range range = visible_range(p.sequence, i, i + 1);
      t.first[lane + i] = max(0, range.begin - k0);
      t.end[lane + i] = min(end, range.end - k0);
    }
  }
  for (int64_t q = 0; q < lanes; ++q) {
    t.max[q] = -kInfinity<A>;
    t.sum[q] = 0;
  }
  int64_t all_first = 0, all_end = end;  // what every lane sees
  for (int64_t q = 0; q < rows; ++q) {
    all_first = max(all_first, t.first[q]);
    all_end = min(all_end, t.end[q]);
  }

  bool any = false;
  if (begin < end && !mask_hides_tile(s, *t.lanes, k0, begin, end)) {
    for (int64_t k = begin / kBlockK * kBlockK; k < end; k += kBlockK) {
      const int64_t from = max(k, begin), keys = min(k + kBlockK, end) - from;
      const T* source = at<T>(p.key, k0 + from);
      A* scores = t.scores + from * kFewRows;
      if (dots && (rows == 1 || sizeof(T) == sizeof(A))) {
        dot_products<T>(source, p.key.stride, keys, s.head_dim, t.query, rows, true, scores);
        continue;
      }
      const Tile<A> key = plain_rows(source, p.key.stride, keys, s.head_dim, t.key);
      if (dots) {
        dot_products<A>(key.data, key.stride, keys, s.head_dim, t.query, rows, false, scores);
        continue;
      }
      for (int64_t q = 0; q < lanes; q += W<A>)
        gemm<A>(keys, W<A>, s.head_dim, key.data, key.stride, 1, t.query_t + q, kFewRows, scores + q, kFewRows, false);
    }
    if (dots) {  // lanes that are no rows
      for (int64_t k = begin; k < end; ++k)
        for (int64_t q = rows; q < lanes; ++q) t.scores[k * kFewRows + q] = 0;
    }
    const Part part{begin, end, 0, lanes};
    if (modified(s)) modify_scores(s, *t.lanes, k0, part, t.scores, kFewRows);
    for (int64_t q = 0; q < rows; ++q) {
      for (int64_t k = begin; k < min(t.first[q], end); ++k) t.scores[k * kFewRows + q] = -kInfinity<A>;
      for (int64_t k = max(begin, t.end[q]); k < end; ++k) t.scores[k * kFewRows + q] = -kInfinity<A>;
    }
    A* scores = t.scores + begin * kFewRows;
    for (int64_t q = 0; q < lanes; q += W<A>) {
      update_max<A, 1>(scores + q, kFewRows, end - begin, t.max + q);
      exponentials<A, 1>(scores + q, kFewRows, end - begin, t.max + q, t.sum + q);
    }
    if (s.dropout.active) drop(s.dropout, *t.lanes, k0, part, t.scores, kFewRows);

    for (int64_t k = begin / kBlockK * kBlockK; k < end; k += kBlockK) {
      const int64_t from = max(k, begin), keys = min(k + kBlockK, end) - from;
      const T* source = at<T>(p.value, k0 + from);
      const A* scores = t.scores + from * kFewRows;
      const bool all = all_first <= from && from + keys <= all_end;
      if (all && rows <= kDirectRows) {
        const auto weighted = rows == 1   ? weighted_values<T, 1>
                              : rows == 2 ? weighted_values<T, 2>
                              : rows == 3 ? weighted_values<T, 3>
                                          : weighted_values<T, 4>;
        weighted(scores, keys, source, p.value.stride, s.value_dim, to.out, to.width, any);
        any = true;
        continue;
      }
      const Tile<A> v = padded_rows(source, p.value.stride, keys, s.value_dim, t.value);
      if (all) {
        gemm<A>(rows, to.width, keys, scores, 1, kFewRows, v.data, v.stride, to.out, to.width, any);
      } else {  // a value that a lane does not see must not reach it, not even times 0
        for (int64_t q = 0; q < rows; ++q) {
          const int64_t first = clamp(t.first[q], from, from + keys), last = clamp(t.end[q], first, from + keys);
          gemm<A>(1, to.width, last - first, t.scores + first * kFewRows + q, 1, kFewRows,
                  v.data + (first - from) * v.stride, v.stride, to.out + q * to.width, to.width, any);
        }
      }
      any = true;
    }
  }
  for (int64_t i = 0; !any && i < rows * to.width; ++i) to.out[i] = 0;
  for (int64_t q = 0; q < rows; ++q) {
    to.max[q] = t.max[q];
    to.sum[q] = t.sum[q];
  }
}

template <class T>
void few_combine_rows(const AttentionForward& p, const void* partials, int64_t chunks) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const int64_t bytes = FewPartial<A>(s, nullptr).elements * static_cast<int64_t>(sizeof(A));
  const auto part = [&](int64_t chunk) { return FewPartial<A>(s, static_cast<const char*>(partials) + chunk * bytes); };
  for (int64_t head = 0; head < p.heads; ++head) {
    const A sink = p.sinks ? static_cast<const A*>(p.sinks)[head] : -kInfinity<A>;
    for (int64_t i = 0; i < p.sequence.queries; ++i) {
      const int64_t q = head * p.sequence.queries + i;
      A most = sink;
      for (int64_t c = 0; c < chunks; ++c) most = part(c).max[q] > most ? part(c).max[q] : most;
      const A shift = most == -kInfinity<A> ? A(0) : most;
      const auto weight = [&](A max) { return exp_nonpositive<A>(broadcast<A>(max - shift)); };
      A sum = weight(sink)[0];
      for (int64_t c = 0; c < chunks; ++c) sum += weight(part(c).max[q])[0] * part(c).sum[q];
      const A inverse = sum == 0 ? A(0) : A(1) / sum;
      T* out = static_cast<T*>(p.out.data) + head * p.out_head_stride + i * p.out.stride;
      for (int64_t column = 0; column < s.value_dim; column += W<A>) {
        Vec<A> total = {};
        for (int64_t c = 0; c < chunks; ++c) {
          const FewPartial<A> from = part(c);
          total += weight(from.max[q]) * load(from.out + q * from.width + column);
        }
        store_upto(out + column, total * inverse, s.value_dim - column);
      }
      static_cast<A*>(p.lse)[head * p.lse_head_stride + i] =
          sum == 0 ? -kInfinity<A> : most + static_cast<A>(__builtin_log(sum));
    }
  }
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
