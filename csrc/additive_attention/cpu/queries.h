// What the kernels of additive attention do for a few queries: prepared queries and keys, scores, the softmax, sums of
// values, and the gradients of all of these. The equations are in kernels.cpp.
#pragma once

#include "additive_attention/additive_attention.h"
#include "scratch.h"
#include "vectors.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Queries and keys of a register tile: its sums fill whole vectors.
constexpr int kTile = SK_VEC_BYTES == 64 ? 16 : 8;
constexpr int kQueries = SK_VEC_BYTES == 64 ? 4 : 2;
// Keys that are prepared at once where a block of queries is all there is.
constexpr int64_t kKeys = 16;
// Terms, and strips of channels, that are summed before the sum is added to others.
constexpr int64_t kTerms = 64, kStrips = 8;
// Vectors of value channels that a block of queries takes at once.
constexpr int kValues = 4;

template <class A>
constexpr A limit = sizeof(A) == 4 ? A(20) : A(170);
template <class A>
constexpr A small_limit = A(0.5);
// What is kept of a key.
enum Form : uint8_t { kWild = 0, kExp = 1, kSmall = 2 };

// Whether a row's numbers are at most a limit in magnitude; a NaN is not.
template <class A>
struct Largest {
  Vec<A> most{}, nan{};
  SK_INLINE void add(Vec<A> x) {
    most = vmax(bit_cast<Vec<A>>(bit_cast<IVec<A>>(x) & ~bit_cast<IVec<A>>(broadcast<A>(A(-0.0)))), most);
    nan += x != x ? broadcast<A>(1) : Vec<A>{};
  }
  bool upto(A limit) const { return max_lanes<A>(most) <= limit && sum_lanes<A>(nan) == 0; }
};

// exp(2x) - 1 below the limit, and exp(2x), both with their relative accuracy.
template <class A>
SK_INLINE Vec<A> expm1_twice(Vec<A> x, Vec<A>& exp) {
  Vec<A> scale;
  const Vec<A> p = expm1_reduced<A>(x + x, scale);
  exp = scale * p + scale;
  return scale * p + (scale - A(1));
}

// tanh from exp(2a) = e and what is kept of a key, exp(2k) or, where Small, exp(2k) - 1; less = exp(2a) - 1.
template <class A, bool Small>
SK_INLINE Vec<A> tanh_of(Vec<A> e, Vec<A> less, Vec<A> key) {
  const Vec<A> u = Small ? e * key + less : e * key - A(1), x = Small ? u + A(2) : e * key + A(1);
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) return u * reciprocal(x);
#endif
  return u / x;
}

// The same, and a quarter of the derivative 1 - tanh^2 = 4 X / (X + 1)^2 with X = exp(2(a + k)): it keeps its relative
// accuracy in both tails, where 1 - tanh^2 would cancel.
template <class A, bool Small>
SK_INLINE Vec<A> tanh_of(Vec<A> e, Vec<A> less, Vec<A> key, Vec<A>& quarter) {
  const Vec<A> product = Small ? e * key + e : e * key;
  const Vec<A> u = Small ? e * key + less : product - A(1), inverse = reciprocal(product + A(1));
  quarter = product * inverse * inverse;
  return u * inverse;
}

// Sums of the lanes of `count` vectors, a multiple of the lanes. The order is the same for each of them.
template <class A>
SK_INLINE void lane_sums(const Vec<A>* v, int count, A* sums) {
  for (int first = 0; first < count; first += W<A>) {
    Vec<A> square[W<A>];
    for (int i = 0; i < W<A>; ++i) square[i] = v[first + i];
    transpose_square<A>(square);
    for (int step = W<A> / 2; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) square[i] += square[i + step];
    store(sums + first, square[0]);
  }
}

// Prepared keys from `first` on: strips of a vector for each key, and each key's form.
template <class A>
struct Keys {
  A* data;
  int64_t strip;
  uint8_t* forms;
  int64_t first;
};

// What the kernels of one element type read.
template <class T>
struct Problem {
  using A = acc_t<T>;
  const AdditiveProblem& p;
  int64_t strips, padded;
  explicit Problem(const AdditiveProblem& problem)
      : p(problem), strips((problem.channels + W<A> - 1) / W<A>), padded(strips * W<A>) {}
  const T* query(int64_t b, int64_t i) const {
    return static_cast<const T*>(p.query) + b * p.query_batch + i * p.query_row;
  }
  const T* key(int64_t b, int64_t j) const { return static_cast<const T*>(p.key) + b * p.key_batch + j * p.key_row; }
  const T* value(int64_t b, int64_t j) const {
    return static_cast<const T*>(p.value) + b * p.value_batch + j * p.value_row;
  }
  const A* weight() const { return static_cast<const A*>(p.wide_weight); }
  const A* bias() const { return weight() + padded; }
  // All keys of a sequence.
  Keys<A> keys(int64_t b) const {
    return {static_cast<A*>(p.wide_keys) + b * strips * p.keys * W<A>, p.keys * W<A>, p.forms + b * p.keys, 0};
  }
  // Numbers of a strip.
  int64_t within(int64_t s) const { return s + 1 < strips ? W<A> : p.channels - s * W<A>; }
  Vec<A> raw_key(int64_t b, int64_t j, int64_t s) const { return load_upto(key(b, j) + s * W<A>, within(s)); }
};

// A query as the kernels read it: for each strip exp(2a) - 1, exp(2a) and a. Returns whether it is not wild.
template <class T>
bool prepare_query(const Problem<T>& of, const T* query, acc_t<T>* wide) {
  using A = acc_t<T>;
  Largest<A> largest;
  for (int64_t s = 0; s < of.strips; ++s, wide += 3 * W<A>) {
    const Vec<A> a = load_upto(query + s * W<A>, of.within(s)) + load(of.bias() + s * W<A>);
    Vec<A> exp;
    store(wide, expm1_twice<A>(a, exp));
    store(wide + W<A>, exp);
    largest.add(a);
    store(wide + 2 * W<A>, a);
  }
  return largest.upto(limit<A>);
}

// Prepares `count` keys, from the first on.
template <class T>
void prepare_key_rows(const Problem<T>& of, int64_t b, const Keys<acc_t<T>>& keys, int64_t count) {
  using A = acc_t<T>;
  for (int64_t j = 0; j < count; ++j) {
    Largest<A> largest;
    for (int64_t s = 0; s < of.strips; ++s) largest.add(of.raw_key(b, keys.first + j, s));
    const Form form = largest.upto(small_limit<A>) ? kSmall : largest.upto(limit<A>) ? kExp : kWild;
    keys.forms[j] = form;
    for (int64_t s = 0; s < of.strips; ++s) {
      Vec<A> exp;
      const Vec<A> less = expm1_twice<A>(of.raw_key(b, keys.first + j, s), exp);
      store(keys.data + s * keys.strip + j * W<A>, form == kSmall ? less : exp);
    }
  }
}

template <class T>
void prepare_wide_weight(const AdditiveProblem& p) {
  using A = acc_t<T>;
  const Problem<T> of(p);
  A *weight = const_cast<A*>(of.weight()), *bias = const_cast<A*>(of.bias());
  const T *from = static_cast<const T*>(p.weight), *from_bias = static_cast<const T*>(p.bias);
  for (int64_t s = 0; s < of.strips; ++s) {
    store(weight + s * W<A>, load_upto(from + s * W<A>, of.within(s)));
    store(bias + s * W<A>, from_bias ? load_upto(from_bias + s * W<A>, of.within(s)) : Vec<A>{});
  }
}

// ---- scores ---------------------------------------------------------------------------------------------------------

// The scores of Q queries and kTile / Q keys of one form from j on; beyond the last key the last one again.
template <class T, int Q, bool Small>
SK_INLINE void tile_scores(const Problem<T>& of, const Keys<acc_t<T>>& all, const acc_t<T>* const* queries, int64_t j,
                           int64_t count, acc_t<T>* scores) {
  using A = acc_t<T>;
  constexpr int K = kTile / Q;
  int64_t at[K];
  for (int n = 0; n < K; ++n) at[n] = (j + n < count ? j + n : count - 1) * W<A>;
  Vec<A> totals[kTile];
  for (int n = 0; n < kTile; ++n) totals[n] = Vec<A>{};
  const A *keys = all.data, *weight = of.weight();
  for (int64_t first = 0; first < of.strips; first += kStrips) {
    const int64_t end = first + kStrips < of.strips ? first + kStrips : of.strips;
    Vec<A> sums[kTile];
#pragma GCC unroll 16
    for (int n = 0; n < kTile; ++n) sums[n] = Vec<A>{};
    for (int64_t s = first; s < end; ++s, keys += all.strip, weight += W<A>) {
      const Vec<A> w = load(weight);
      Vec<A> k[K];
#pragma GCC unroll 16
      for (int n = 0; n < K; ++n) k[n] = load(keys + at[n]);
#pragma GCC unroll 4
      for (int i = 0; i < Q; ++i) {
        const Vec<A> less = load(queries[i] + s * 3 * W<A>), e = load(queries[i] + (s * 3 + 1) * W<A>);
#pragma GCC unroll 16
        for (int n = 0; n < K; ++n) sums[i * K + n] += w * tanh_of<A, Small>(e, less, k[n]);
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < kTile; ++n) totals[n] += sums[n];
  }
  lane_sums<A>(totals, kTile, scores);
}

template <class T>
__attribute__((noinline)) acc_t<T> wild_score(const Problem<T>& of, int64_t b, const acc_t<T>* query, int64_t j) {
  using A = acc_t<T>;
  Vec<A> total{}, sum{};
  for (int64_t s = 0; s < of.strips; ++s) {
    sum += load(of.weight() + s * W<A>) * tanh<A>(load(query + (s * 3 + 2) * W<A>) + of.raw_key(b, j, s));
    if (s % kStrips == kStrips - 1) total += sum, sum = Vec<A>{};
  }
  return sum_lanes<A>(total + sum);
}

// Scores of Q queries and `count` keys, rows `stride` apart.
template <class T, int Q>
SK_INLINE void score_rows(const Problem<T>& of, int64_t b, const Keys<acc_t<T>>& keys, const acc_t<T>* const* queries,
                          const bool* tame_queries, int64_t count, acc_t<T>* scores, int64_t stride) {
  using A = acc_t<T>;
  constexpr int K = kTile / Q;
  const uint8_t* forms = keys.forms;
  for (int64_t j = 0; j < count; j += K) {
    const int64_t there = count - j < K ? count - j : K;
    int found = 0;
    for (int64_t n = 0; n < there; ++n) found |= forms[j + n];
    A exp[kTile], small[kTile];
    if (found & kExp) tile_scores<T, Q, false>(of, keys, queries, j, count, exp);
    if (found & kSmall) tile_scores<T, Q, true>(of, keys, queries, j, count, small);
    for (int i = 0; i < Q; ++i)
      for (int64_t n = 0; n < there; ++n) {
        const uint8_t form = tame_queries[i] ? forms[j + n] : kWild;
        scores[i * stride + j + n] = form == kExp     ? exp[i * K + n]
                                     : form == kSmall ? small[i * K + n]
                                                      : wild_score<T>(of, b, queries[i], keys.first + j + n);
      }
  }
}

// Which of the block's queries see each key, as bits; adds the mask to the scores.
template <class T>
void apply_mask(const AdditiveProblem& p, int64_t b, int64_t begin, int64_t rows, int64_t count, acc_t<T>* scores,
                int64_t stride, uint8_t* seen) {
  using A = acc_t<T>;
  constexpr A hidden = -__builtin_inf();
  for (int64_t j = 0; j < count; ++j) seen[j] = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = b * p.mask_batch + (begin + i) * p.mask_row;
    A* const s = scores + i * stride;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = row + j * p.mask_column;
      const A added = p.mask_is_bool ? (static_cast<const uint8_t*>(p.mask)[at] ? A(0) : hidden)
                                     : static_cast<const A*>(p.mask)[at];
      const bool visible = added != hidden;
      s[j] = visible ? s[j] + added : hidden;
      seen[j] = static_cast<uint8_t>(seen[j] | visible << i);
    }
  }
}

template <class A>
SK_INLINE Vec<A> hidden_beyond(Vec<A> v, int64_t n) {
  for (int i = 0; i < W<A>; ++i) v[i] = i < n ? v[i] : A(-__builtin_inf());
  return v;
}

// exp(scores - max), and the log of their sum; the scores are padded to whole vectors. Returns 1 / sum, 0 of no key.
template <class A>
A softmax_row(A* scores, int64_t count, A& lse) {
  Vec<A> most = broadcast<A>(A(-__builtin_inf()));
  for_vectors<A>(count, [&](int64_t c, int64_t n) SK_INLINED {
    const Vec<A> s = n < W<A> ? hidden_beyond<A>(load(scores + c), n) : load(scores + c);
    store(scores + c, s);
    most = vmax(s, most);
  });
  const A max = max_lanes<A>(most), from = max == A(-__builtin_inf()) ? A(0) : max;
  Vec<A> sums{}, part{};
  for_vectors<A>(count, [&](int64_t c, int64_t) SK_INLINED {
    const Vec<A> e = exp_nonpositive<A>(load(scores + c) - from);
    store(scores + c, e);
    part += e;
    if (c % (kTerms * W<A>) == 0) sums += part, part = Vec<A>{};
  });
  const A sum = sum_lanes<A>(sums + part);
  lse = sum == 0 ? A(-__builtin_inf())
                 : from + static_cast<A>(sizeof(A) == 4 ? __builtin_logf(static_cast<float>(sum)) : __builtin_log(sum));
  return sum == 0 ? A(0) : 1 / sum;
}

// ---- forward --------------------------------------------------------------------------------------------------------

// output = P value for Q queries and C vectors of value channels from c on, of which one vector may be of `last`
// numbers. `seen` has a bit for each query, or is null.
template <class T, int Q, int C>
SK_INLINE void value_tile(const Problem<T>& of, int64_t b, const acc_t<T>* probabilities, int64_t stride, int64_t count,
                          const uint8_t* seen, int64_t c, int64_t last, const acc_t<T>* factors, T* const* outputs) {
  using A = acc_t<T>;
  constexpr unsigned all = (1u << Q) - 1;
  Vec<A> totals[Q][C];
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < C; ++n) totals[i][n] = Vec<A>{};
  for (int64_t first = 0; first < count; first += kTerms) {
    Vec<A> sums[Q][C];
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < C; ++n) sums[i][n] = Vec<A>{};
    const int64_t end = first + kTerms < count ? first + kTerms : count;
    for (int64_t j = first; j < end; ++j) {
      const unsigned who = seen ? seen[j] : all;
      if (who == 0) continue;
      const T* value = of.value(b, j) + c;
      Vec<A> v[C];
#pragma GCC unroll 4
      for (int n = 0; n < C; ++n) v[n] = C > 1 ? load(value + n * W<A>) : load_upto(value, last);
      if (who == all) {
#pragma GCC unroll 4
        for (int i = 0; i < Q; ++i) {
          const Vec<A> p = broadcast<A>(probabilities[i * stride + j]);
#pragma GCC unroll 4
          for (int n = 0; n < C; ++n) sums[i][n] += p * v[n];
        }
      } else {
#pragma GCC unroll 4
        for (int i = 0; i < Q; ++i)
          if (who >> i & 1) {
            const Vec<A> p = broadcast<A>(probabilities[i * stride + j]);
#pragma GCC unroll 4
            for (int n = 0; n < C; ++n) sums[i][n] += p * v[n];
          }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < C; ++n) totals[i][n] += sums[i][n];
  }
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < C; ++n)
      store_upto(outputs[i] + c + n * W<A>, totals[i][n] * factors[i], C > 1 ? int64_t{W<A>} : last);
}

// ---- backward -------------------------------------------------------------------------------------------------------

// dP = grad_output value^T for Q queries, whose gradients are padded to whole vectors.
template <class T, int Q>
SK_INLINE void value_products(const Problem<T>& of, int64_t b, const acc_t<T>* grads, int64_t padded, int64_t count,
                              acc_t<T>* products, int64_t stride) {
  using A = acc_t<T>;
  constexpr int K = kTile / Q;
  const int64_t columns = of.p.value_channels;
  for (int64_t j = 0; j < count; j += K) {
    const T* values[K];
    for (int n = 0; n < K; ++n) values[n] = of.value(b, j + n < count ? j + n : count - 1);
    Vec<A> sums[kTile];
    for (int n = 0; n < kTile; ++n) sums[n] = Vec<A>{};
    for_vectors<A>(columns, [&](int64_t c, int64_t width) SK_INLINED {
      Vec<A> g[Q];
#pragma GCC unroll 4
      for (int i = 0; i < Q; ++i) g[i] = load(grads + i * padded + c);
#pragma GCC unroll 16
      for (int n = 0; n < K; ++n) {
        const Vec<A> v = load_upto(values[n] + c, width);
#pragma GCC unroll 4
        for (int i = 0; i < Q; ++i) sums[i * K + n] += g[i] * v;
      }
    });
    A tile[kTile];
    lane_sums<A>(sums, kTile, tile);
    const int64_t there = count - j < K ? count - j : K;
    for (int i = 0; i < Q; ++i)
      for (int64_t n = 0; n < there; ++n) products[i * stride + j + n] = tile[i * K + n];
  }
}

// Q prepared queries, and the gradients of their scores; rows of `padded` times three, and of `stride`, numbers.
template <class A>
struct GradRows {
  const A* wide;
  const A* grads;
  int64_t stride;
  const uint8_t* tame;
};

// What Q queries give a strip of channels: dq, to rows of `channels` numbers; adds to `sums`, a vector for each key.
template <class T, int Q>
SK_INLINE void grad_strip(const Problem<T>& of, int64_t b, int64_t s, const GradRows<acc_t<T>>& rows, T* grad_query,
                          acc_t<T>* sums, Vec<acc_t<T>>& of_weight, Vec<acc_t<T>>& of_query) {
  using A = acc_t<T>;
  const int64_t count = of.p.keys_of(b), stride = rows.stride;
  const A *wide = rows.wide + s * 3 * W<A>, *grads = rows.grads;
  const Keys<A> every = of.keys(b);
  const A* keys = every.data + s * every.strip;
  const uint8_t *forms = every.forms, *tame_queries = rows.tame;
  Vec<A> u[Q], e[Q], totals[Q];
  bool all = true;
#pragma GCC unroll 4
  for (int i = 0; i < Q; ++i) {
    u[i] = load(wide + i * 3 * of.padded), e[i] = load(wide + i * 3 * of.padded + W<A>);
    totals[i] = Vec<A>{};
    all = all && tame_queries[i];
  }
  for (int64_t begin = 0; begin < count; begin += kTerms) {
    const int64_t end = begin + kTerms < count ? begin + kTerms : count;
    Vec<A> dq[Q], dw{};
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i) dq[i] = Vec<A>{};
    for (int64_t j = begin; j < end; ++j) {
      const Vec<A> k = load(keys + j * W<A>);
      Vec<A> dk = load(sums + j * W<A>), t[Q], quarter[Q];
      if (all && forms[j] == kExp) {
#pragma GCC unroll 4
        for (int i = 0; i < Q; ++i) t[i] = tanh_of<A, false>(e[i], u[i], k, quarter[i]);
      } else if (all && forms[j] == kSmall) {
#pragma GCC unroll 4
        for (int i = 0; i < Q; ++i) t[i] = tanh_of<A, true>(e[i], u[i], k, quarter[i]);
      } else {
        for (int i = 0; i < Q; ++i) {
          const uint8_t form = tame_queries[i] ? forms[j] : kWild;
          if (form == kExp) {
            t[i] = tanh_of<A, false>(e[i], u[i], k, quarter[i]);
          } else if (form == kSmall) {
            t[i] = tanh_of<A, true>(e[i], u[i], k, quarter[i]);
          } else if (grads[i * stride + j] == 0) {  // a hidden NaN
            t[i] = quarter[i] = Vec<A>{};
          } else {
            t[i] = tanh<A>(load(wide + i * 3 * of.padded + 2 * W<A>) + of.raw_key(b, j, s), quarter[i]);
            quarter[i] *= A(0.25);
          }
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < Q; ++i) {
        const Vec<A> ds = broadcast<A>(grads[i * stride + j]), g = ds * quarter[i];
        dw += ds * t[i];
        dq[i] += g;
        dk += g;
      }
      store(sums + j * W<A>, dk);
    }
    of_weight += dw;
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i) totals[i] += dq[i];
  }
  const Vec<A> w = load(of.weight() + s * W<A>) * A(4);
  for (int i = 0; i < Q; ++i) {
    of_query += totals[i];
    store_upto(grad_query + i * of.p.channels + s * W<A>, totals[i] * w, of.within(s));
  }
}

// A chunk's P^T grad_output for C vectors of value channels.
template <class T, int C>
void grad_value_tile(const AdditiveBackward& f, int64_t b, int64_t c, int64_t last) {
  using A = acc_t<T>;
  constexpr int K = kQueries;
  const AdditiveProblem& p = f.of;
  const int64_t count = p.keys_of(b), stride = round_up<A>(p.keys), padded = round_up<A>(p.value_channels);
  const int64_t left = p.queries - f.first, rows = left < f.chunk ? left : f.chunk;
  const A* probabilities = static_cast<const A*>(f.probabilities) + b * f.chunk * stride;
  const T* grads = static_cast<const T*>(f.grad_output) + (b * p.queries + f.first) * p.value_channels + c;
  A* const sums = f.value_sums ? static_cast<A*>(f.value_sums) + b * p.keys * padded + c : nullptr;
  T* const grad = static_cast<T*>(f.grad_value) + b * p.keys * p.value_channels + c;
  for (int64_t j = 0; j < count; j += K) {
    int64_t at[K];
    for (int k = 0; k < K; ++k) at[k] = j + k < count ? j + k : count - 1;
    Vec<A> tile[K][C];
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
      for (int n = 0; n < C; ++n) tile[k][n] = Vec<A>{};
    for (int64_t i = 0; i < rows; ++i) {
      const T* g = grads + i * p.value_channels;
      Vec<A> v[C];
#pragma GCC unroll 4
      for (int n = 0; n < C; ++n) v[n] = C > 1 ? load(g + n * W<A>) : load_upto(g, last);
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) {
        const Vec<A> weight = broadcast<A>(probabilities[i * stride + at[k]]);
#pragma GCC unroll 4
        for (int n = 0; n < C; ++n) tile[k][n] += weight * v[n];
      }
    }
    for (int k = 0; k < K && j + k < count; ++k)
      for (int n = 0; n < C; ++n) {
        if (sums) {
          A* const sum = sums + (j + k) * padded + n * W<A>;
          store(sum, load(sum) + tile[k][n]);
        } else {
          store_upto(grad + (j + k) * p.value_channels + n * W<A>, tile[k][n], C > 1 ? int64_t{W<A>} : last);
        }
      }
  }
  if (sums) return;
  for (int64_t j = count; j < p.keys; ++j)
    for (int n = 0; n < C; ++n)
      store_upto(grad + j * p.value_channels + n * W<A>, Vec<A>{}, C > 1 ? int64_t{W<A>} : last);
}

template <class T>
void grad_value_strip(const AdditiveBackward& f, int64_t b, int64_t strip) {
  using A = acc_t<T>;
  const int64_t columns = f.of.value_channels, width = kValues * W<A>, c = strip * width;
  if (c + width <= columns) return grad_value_tile<T, kValues>(f, b, c, W<A>);
  for (int64_t at = c; at < columns; at += W<A>)
    grad_value_tile<T, 1>(f, b, at, columns - at < W<A> ? columns - at : W<A>);
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
