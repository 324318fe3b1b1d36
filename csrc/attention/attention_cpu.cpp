// Attention on CPU, forward and backward. Compiled once per instruction-set tier.
//
//   S = scale Q K^T,  P = softmax(S),  O = P V                                                     Vaswani et al. 2017
//   m' = max(m, max S_j),  l' = l exp(m - m') + sum exp(S_j - m'),  O' = O exp(m - m') + exp(S_j - m') V_j
//       over the blocks j of keys, and at the end O / l, lse = m + log l                  Milakov & Gimelshein 2018
//   P = exp(S - lse),  delta = rowsum(dO O),  dV = P^T dO,  dS = P (dO V^T - delta + dlse),
//   dK = scale dS^T Q,  dQ = scale dS K                          Dao et al. 2022 (and, for the work partition, Dao
//   2023)
//
// A work item is a block of kBlockQ queries of one head. It goes over the keys that it sees in tiles of kBlockK; no
// score outlives its tile, so memory is O(N). What is done once an item (transposing and converting Q and dO) is paid
// for by all its tiles.
//
// Scores are held transposed, keys by queries. The maximum, the sum, lse and delta are then vectors over the queries:
// the softmax has no reduction inside a vector and no scalar step. And gemm.h reads its left operand element by element
// with any strides, its right one by rows, so that K and V are never packed or transposed: S^T = K Q^T and dP^T = V
// dO^T read them as left operands, O = P V and dQ = dS K as rows, in place where the type and the width allow it.
//
// Tiles that the diagonal crosses are cut into strips: half their products fall away.
//
// The backward pass makes the five products once. dQ belongs to the item; dK and dV of a key block are summed over the
// items in a fixed order, each waiting for its turn (attention.cpp), so that one head of one batch keeps every core
// busy and the bits do not depend on the number of threads. With the roles exchanged, a key block as the item and dQ
// shared, the sums kept in memory would grow with the query heads instead of the shared key heads.
//
// Measured on one Zen 4 core at its own GEMM rate of 99 GFLOP/s (gemm.h: 115), B1 H8 N1024 float32, visible scores:
// causal D64 84 forward, 91 backward; all keys D128 95 and 86. The softmax is a tenth of the forward pass.
//
// Tried and lost: kBlockQ 64 (backward 12% slower at D128: K, V, dK and dV come from L3 twice as often) and 192 (no
// faster); kBlockK 128 (no faster); copies of Q and dO with padded rows against cache conflicts (no faster);
// transposing in registers (0.7% of the forward pass, for 20 lines of shuffles).
#include "attention.h"
#include "gemm.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Tiles that the diagonal crosses are computed in strips of so many rows, each as wide as it needs to be.
constexpr int64_t kStrip = 16;

SK_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
SK_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
SK_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return min(max(x, low), high); }

template <class A>
constexpr A kInfinity = static_cast<A>(__builtin_inf());

// Consecutive pieces of a worker's scratch memory, each aligned to 64 bytes.
template <class A>
struct Arena {
  A* base;
  int64_t used = 0;
  SK_INLINE A* take(int64_t elements) {
    A* piece = base + used;
    used += (elements + 15) / 16 * 16;
    return piece;
  }
};

template <class A>
struct Tile {
  const A* data;
  int64_t stride;
};

template <class T>
SK_INLINE const T* at(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + row * rows.stride;
}

// `count` rows as accumulators whose rows can be read in whole vectors: in place where they already are, else converted
// into `scratch` and padded with zeros.
template <class T, class A = acc_t<T>>
SK_INLINE Tile<A> padded_rows(const T* rows, int64_t stride, int64_t count, int64_t columns, A* scratch) {
  if constexpr (sizeof(T) == sizeof(A)) {
    if (columns % W<A> == 0) return {rows, stride};
  }
  const int64_t padded = round_up<A>(columns);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t c = 0; c < columns; c += W<A>)
      store(scratch + r * padded + c, load_upto(rows + r * stride + c, columns - c));
  return {scratch, padded};
}

// As padded_rows, for rows that are read element by element and need no padding.
template <class T, class A = acc_t<T>>
SK_INLINE Tile<A> plain_rows(const T* rows, int64_t stride, int64_t count, int64_t columns, A* scratch) {
  if constexpr (sizeof(T) == sizeof(A)) {
    return {rows, stride};
  } else {
    return padded_rows(rows, stride, count, columns, scratch);
  }
}

// to[c, r] = rows[r, c] * factor: (columns, kBlockQ), the lanes from `count` to `lanes` zero.
template <class T, class A = acc_t<T>>
void transpose(const T* rows, int64_t stride, int64_t count, int64_t lanes, int64_t columns, A factor, A* to) {
  for (int64_t r = 0; r < lanes; ++r) {
    for (int64_t c = 0; c < columns; c += W<A>) {
      const Vec<A> v = r < count ? load_upto(rows + r * stride + c, columns - c) * factor : Vec<A>{};
      const int64_t n = min(W<A>, columns - c);
      for (int64_t i = 0; i < n; ++i) to[(c + i) * kBlockQ + r] = v[i];
    }
  }
}

// One (query block, key block) tile. Scores are held transposed, keys by queries.
struct Geometry {
  int64_t q0, queries;  // of the block
  int64_t k0, keys;     // of the block, as far as any of its queries sees them
  int64_t lanes;        // queries rounded up to whole vectors
  int64_t offset;       // key k of the block is visible to query q of the block iff q >= offset + k
  SK_INLINE bool crossed() const { return offset + keys - 1 > 0; }
  // First query, rounded down to a strip, that sees any of the keys of the strip that starts at k.
  SK_INLINE int64_t first_query(int64_t k) const { return max(0, offset + k) / kStrip * kStrip; }
  // Keys that any query before `q_end` sees.
  SK_INLINE int64_t visible(int64_t q_end) const { return clamp(q_end - offset, 0, keys); }
};

SK_INLINE int64_t visible_keys(const AttentionShape& s, int64_t query) {
  return s.causal ? clamp(query + s.diagonal + 1, 0, s.keys) : s.keys;
}

template <class A>
SK_INLINE Geometry geometry(const AttentionShape& s, int64_t query_block, int64_t key_block) {
  Geometry g;
  g.q0 = query_block * kBlockQ;
  g.queries = min(kBlockQ, s.queries - g.q0);
  g.lanes = round_up<A>(g.queries);
  g.k0 = key_block * kBlockK;
  g.keys = min(kBlockK, visible_keys(s, g.q0 + g.queries - 1) - g.k0);
  g.offset = s.causal ? g.k0 - s.diagonal - g.q0 : -kBlockK;
  return g;
}

// Calls body(key_begin, key_end, first_query): the whole tile, or its strips where the diagonal crosses it.
template <class Body>
SK_INLINE void for_key_strips(const Geometry& g, const Body& body) {
  if (!g.crossed()) {
    body(int64_t{0}, g.keys, int64_t{0});
    return;
  }
  for (int64_t k = 0; k < g.keys; k += kStrip) body(k, min(k + kStrip, g.keys), g.first_query(k));
}

// Calls body(query_begin, query_end, visible_keys).
template <class Body>
SK_INLINE void for_query_strips(const Geometry& g, const Body& body) {
  if (!g.crossed()) {
    body(int64_t{0}, g.queries, g.keys);
    return;
  }
  for (int64_t q = 0; q < g.queries; q += kStrip) {
    const int64_t end = min(q + kStrip, g.queries);
    body(q, end, g.visible(end));
  }
}

template <int N>
struct Vectors {
  static constexpr int count = N;
};
// Calls body(Vectors<n>, query) for the queries [begin, end), as many vectors at a time as the registers allow.
template <class A, class Body>
SK_INLINE void for_lanes(int64_t begin, int64_t end, const Body& body) {
  int64_t q = begin;
  for (; q + kGemmVecs * W<A> <= end; q += kGemmVecs * W<A>) body(Vectors<kGemmVecs>{}, q);
  for (; q < end; q += W<A>) body(Vectors<1>{}, q);
}

// Overwrites what the queries of a strip do not see.
template <class A>
SK_INLINE void mask(const Geometry& g, int64_t k, int64_t first_query, A value, A* tile) {
  for (int64_t q = first_query; q < min(g.offset + k, g.lanes); ++q) tile[k * kBlockQ + q] = value;
}

// scores[k, q] = sum_d rows[k, d] * columns[d, q]
template <class A>
SK_INLINE void products(const Geometry& g, Tile<A> rows, int64_t dim, const A* columns, A* scores) {
  for_key_strips(g, [&](int64_t begin, int64_t end, int64_t first) {
    if (first >= g.lanes) return;
    gemm<A>(end - begin, g.lanes - first, dim, rows.data + begin * rows.stride, rows.stride, 1, columns + first,
            kBlockQ, scores + begin * kBlockQ + first, kBlockQ, false);
  });
}

// ---- forward -------------------------------------------------------------------------------------------------------

template <class A>
struct ForwardScratch {
  A *query_t, *scores, *out, *key, *value, *max, *sum, *rescale;
  int64_t elements;
  SK_INLINE ForwardScratch(const AttentionShape& s, void* memory) {
    Arena<A> arena{static_cast<A*>(memory)};
    query_t = arena.take(s.head_dim * kBlockQ);
    scores = arena.take(kBlockK * kBlockQ);
    out = arena.take(kBlockQ * round_up<A>(s.value_dim));
    key = arena.take(kBlockK * round_up<A>(s.head_dim));
    value = arena.take(kBlockK * round_up<A>(s.value_dim));
    max = arena.take(kBlockQ);
    sum = arena.take(kBlockQ);
    rescale = arena.take(kBlockQ);
    elements = arena.used;
  }
};

// Running maximum of the scores of `NV` vectors of queries.
template <class A, int NV>
SK_INLINE void update_max(const A* scores, int64_t keys, A* running) {
  Vec<A> m[NV];
  for (int j = 0; j < NV; ++j) m[j] = load(running + j * W<A>);
  for (int64_t k = 0; k < keys; ++k)
    for (int j = 0; j < NV; ++j) m[j] = vmax(load(scores + k * kBlockQ + j * W<A>), m[j]);
  for (int j = 0; j < NV; ++j) store(running + j * W<A>, m[j]);
}

// scores = exp(scores - max), and their sums over the keys.
template <class A, int NV>
SK_INLINE void exponentials(A* scores, int64_t keys, const A* running, A* sum) {
  Vec<A> m[NV], s[NV];
  for (int j = 0; j < NV; ++j) {
    m[j] = load(running + j * W<A>);
    m[j] = m[j] == -kInfinity<A> ? Vec<A>{} : m[j];
    s[j] = Vec<A>{};
  }
  for (int64_t k = 0; k < keys; ++k) {
    for (int j = 0; j < NV; ++j) {
      A* p = scores + k * kBlockQ + j * W<A>;
      const Vec<A> x = exp_nonpositive<A>(load(p) - m[j]);
      store(p, x);
      s[j] += x;
    }
  }
  for (int j = 0; j < NV; ++j) store(sum + j * W<A>, load(sum + j * W<A>) + s[j]);
}

template <class T>
void forward_block(const AttentionForward& p, int64_t query_block, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const ForwardScratch<A> t(s, memory);
  const int64_t width = round_up<A>(s.value_dim);
  const int64_t q0 = query_block * kBlockQ, queries = min(kBlockQ, s.queries - q0), lanes = round_up<A>(queries);
  const int64_t visible = visible_keys(s, q0 + queries - 1);

  transpose(at<T>(p.query, q0), p.query.stride, queries, lanes, s.head_dim, static_cast<A>(s.scale), t.query_t);
  for (int64_t q = 0; q < lanes; ++q) {
    t.max[q] = -kInfinity<A>;
    t.sum[q] = 0;
  }

  for (int64_t block = 0; block * kBlockK < visible; ++block) {
    const Geometry g = geometry<A>(s, query_block, block);
    const Tile<A> k = plain_rows(at<T>(p.key, g.k0), p.key.stride, g.keys, s.head_dim, t.key);
    products(g, k, s.head_dim, t.query_t, t.scores);

    for (int64_t q = 0; q < lanes; ++q) t.rescale[q] = t.max[q];
    for_key_strips(g, [&](int64_t begin, int64_t end, int64_t first) {
      if (g.crossed())
        for (int64_t k = begin; k < end; ++k) mask(g, k, first, -kInfinity<A>, t.scores);
      for_lanes<A>(first, lanes, [&](auto vectors, int64_t q) {
        update_max<A, vectors.count>(t.scores + begin * kBlockQ + q, end - begin, t.max + q);
      });
    });
    for (int64_t q = 0; q < lanes; q += W<A>) {
      const Vec<A> m = load(t.max + q);
      const Vec<A> r = exp_nonpositive<A>(load(t.rescale + q) - (m == -kInfinity<A> ? Vec<A>{} : m));
      store(t.rescale + q, r);
      store(t.sum + q, load(t.sum + q) * r);
    }
    for_key_strips(g, [&](int64_t begin, int64_t end, int64_t first) {
      for_lanes<A>(first, lanes, [&](auto vectors, int64_t q) {
        exponentials<A, vectors.count>(t.scores + begin * kBlockQ + q, end - begin, t.max + q, t.sum + q);
      });
    });
    if (block > 0) {
      for (int64_t q = 0; q < queries; ++q) {
        if (t.rescale[q] == A(1)) continue;
        const Vec<A> r = broadcast<A>(t.rescale[q]);
        for (int64_t c = 0; c < width; c += W<A>) store(t.out + q * width + c, load(t.out + q * width + c) * r);
      }
    }
    const Tile<A> v = padded_rows(at<T>(p.value, g.k0), p.value.stride, g.keys, s.value_dim, t.value);
    // A hidden key has probability 0, but 0 times a NaN is NaN: where the diagonal crosses, the queries of a strip take
    // together the keys that all of them see, and the others one by one.
    for_query_strips(g, [&](int64_t begin, int64_t end, int64_t keys) {
      const int64_t common = g.crossed() ? g.visible(begin + 1) : keys;
      gemm<A>(end - begin, width, common, t.scores + begin, 1, kBlockQ, v.data, v.stride, t.out + begin * width, width,
              block > 0);
      for (int64_t q = begin; q < end && common < keys; ++q)
        gemm<A>(1, width, g.visible(q + 1) - common, t.scores + common * kBlockQ + q, 1, kBlockQ,
                v.data + common * v.stride, v.stride, t.out + q * width, width, true);
    });
  }

  T* out = static_cast<T*>(p.out);
  A* lse = static_cast<A*>(p.lse);
  for (int64_t q = 0; q < queries; ++q) {
    const A sum = t.sum[q];
    const A inverse = sum == 0 ? A(0) : A(1) / sum;
    for (int64_t c = 0; c < s.value_dim; c += W<A>)
      store_upto(out + (q0 + q) * s.value_dim + c, visible > 0 ? load(t.out + q * width + c) * inverse : Vec<A>{},
                 s.value_dim - c);
    lse[q0 + q] = sum == 0 ? -kInfinity<A> : t.max[q] + static_cast<A>(__builtin_log(sum));
  }
}

// ---- backward ------------------------------------------------------------------------------------------------------

template <class A>
struct BackwardScratch {
  A *query_t, *grad_out_t, *query, *grad_out, *scores, *grad_scores, *grad_query, *key, *value, *lse, *delta, *grad_lse;
  int64_t elements;
  SK_INLINE BackwardScratch(const AttentionShape& s, void* memory) {
    Arena<A> arena{static_cast<A*>(memory)};
    const int64_t head_width = round_up<A>(s.head_dim), value_width = round_up<A>(s.value_dim);
    query_t = arena.take(s.head_dim * kBlockQ);
    grad_out_t = arena.take(s.value_dim * kBlockQ);
    query = arena.take(kBlockQ * head_width);
    grad_out = arena.take(kBlockQ * value_width);
    scores = arena.take(kBlockK * kBlockQ);
    grad_scores = arena.take(kBlockK * kBlockQ);
    grad_query = arena.take(kBlockQ * head_width);
    key = arena.take(kBlockK * head_width);
    value = arena.take(kBlockK * value_width);
    lse = arena.take(kBlockQ);
    delta = arena.take(kBlockQ);
    grad_lse = arena.take(kBlockQ);
    elements = arena.used;
  }
};

template <class T>
void begin_block(const AttentionBackward& p, int64_t query_block, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const BackwardScratch<A> t(s, memory);
  const int64_t q0 = query_block * kBlockQ, queries = min(kBlockQ, s.queries - q0), lanes = round_up<A>(queries);
  const T* grad_out = at<T>(p.grad_out, q0);
  transpose(at<T>(p.query, q0), p.query.stride, queries, lanes, s.head_dim, static_cast<A>(s.scale), t.query_t);
  transpose(grad_out, p.grad_out.stride, queries, lanes, s.value_dim, A(1), t.grad_out_t);
  // delta is summed as the product dO V^T sums, so that dP - delta cancels exactly where one key has all the weight.
  A* out_t = t.grad_out;
  transpose(at<T>(p.out, q0), p.out.stride, queries, lanes, s.value_dim, A(1), out_t);
  for (int64_t q = 0; q < lanes; q += W<A>) {
    Vec<A> sum = {};
    for (int64_t c = 0; c < s.value_dim; ++c)
      sum += load(out_t + c * kBlockQ + q) * load(t.grad_out_t + c * kBlockQ + q);
    store(t.delta + q, sum);
  }
  for (int64_t q = 0; q < lanes; ++q) {
    // Padding and queries that see no key: exp(score - inf) = 0.
    const A lse = q < queries ? static_cast<const A*>(p.lse)[q0 + q] : kInfinity<A>;
    t.lse[q] = lse == -kInfinity<A> ? kInfinity<A> : lse;
    t.grad_lse[q] = p.grad_lse && q < queries ? static_cast<const A*>(p.grad_lse)[q0 + q] : A(0);
  }
  padded_rows(at<T>(p.query, q0), p.query.stride, queries, s.head_dim, t.query);
  padded_rows(grad_out, p.grad_out.stride, queries, s.value_dim, t.grad_out);
  const int64_t elements = queries * round_up<A>(s.head_dim);
  for (int64_t i = 0; i < elements; ++i) t.grad_query[i] = 0;
}

// scores = P = exp(scores - lse), grad_scores = dS = P * (dP - delta + dlse)
template <class A, int NV>
SK_INLINE void score_gradients(A* scores, A* grad_scores, int64_t keys, const A* lse, const A* delta,
                               const A* grad_lse) {
  Vec<A> l[NV], d[NV], g[NV];
  for (int j = 0; j < NV; ++j) {
    l[j] = load(lse + j * W<A>);
    d[j] = load(delta + j * W<A>);
    g[j] = load(grad_lse + j * W<A>);
  }
  for (int64_t k = 0; k < keys; ++k) {
    for (int j = 0; j < NV; ++j) {
      const int64_t at = k * kBlockQ + j * W<A>;
      const Vec<A> probability = exp_nonpositive<A>(load(scores + at) - l[j]);
      store(scores + at, probability);
      store(grad_scores + at, probability * (load(grad_scores + at) - d[j] + g[j]));
    }
  }
}

template <class T>
void scores_block(const AttentionBackward& p, int64_t query_block, int64_t key_block, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const BackwardScratch<A> t(s, memory);
  const Geometry g = geometry<A>(s, query_block, key_block);
  const int64_t width = round_up<A>(s.head_dim);
  const Tile<A> key = padded_rows(at<T>(p.key, g.k0), p.key.stride, g.keys, s.head_dim, t.key);
  const Tile<A> value = plain_rows(at<T>(p.value, g.k0), p.value.stride, g.keys, s.value_dim, t.value);
  products(g, key, s.head_dim, t.query_t, t.scores);
  products(g, value, s.value_dim, t.grad_out_t, t.grad_scores);
  for_key_strips(g, [&](int64_t begin, int64_t end, int64_t first) {
    for_lanes<A>(first, g.lanes, [&](auto vectors, int64_t q) {
      const int64_t at = begin * kBlockQ + q;
      score_gradients<A, vectors.count>(t.scores + at, t.grad_scores + at, end - begin, t.lse + q, t.delta + q,
                                        t.grad_lse + q);
    });
    if (!g.crossed()) return;
    for (int64_t k = begin; k < end; ++k) {
      mask(g, k, first, A(0), t.scores);
      mask(g, k, first, A(0), t.grad_scores);
    }
  });
  // dQ[q, d] += sum_k dS[k, q] K[k, d]
  for_query_strips(g, [&](int64_t begin, int64_t end, int64_t keys) {
    gemm<A>(end - begin, width, keys, t.grad_scores + begin, 1, kBlockQ, key.data, key.stride,
            t.grad_query + begin * width, width, true);
  });
}

template <class T, class A>
SK_INLINE void write_rows(const A* from, int64_t stride, int64_t rows, int64_t columns, A factor, T* to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += W<A>)
      store_upto(to + r * columns + c, load(from + r * stride + c) * factor, columns - c);
}

template <class T>
void keys_block(const AttentionBackward& p, int64_t query_block, int64_t key_block, bool first, bool last,
                void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const BackwardScratch<A> t(s, memory);
  const Geometry g = geometry<A>(s, query_block, key_block);
  const int64_t head_width = round_up<A>(s.head_dim), value_width = round_up<A>(s.value_dim);
  A* key_sum = static_cast<A*>(p.key_sum) + g.k0 * head_width;
  A* value_sum = static_cast<A*>(p.value_sum) + g.k0 * value_width;
  // Already converted by begin_block where they are not read in place.
  Tile<A> query{t.query, head_width}, grad_out{t.grad_out, value_width};
  if constexpr (sizeof(T) == sizeof(A)) {
    if (s.head_dim == head_width) query = {at<T>(p.query, g.q0), p.query.stride};
    if (s.value_dim == value_width) grad_out = {at<T>(p.grad_out, g.q0), p.grad_out.stride};
  }
  const int64_t keys = min(kBlockK, s.keys - g.k0);
  if (first) {  // the rows that no query sees
    for (int64_t i = g.keys * head_width; i < keys * head_width; ++i) key_sum[i] = 0;
    for (int64_t i = g.keys * value_width; i < keys * value_width; ++i) value_sum[i] = 0;
  }
  // dV[k, c] += sum_q P[k, q] dO[q, c],  dK[k, d] += sum_q dS[k, q] Q[q, d]
  for_key_strips(g, [&](int64_t begin, int64_t end, int64_t q) {
    const int64_t queries = max(0, g.queries - q);
    gemm<A>(end - begin, value_width, queries, t.scores + begin * kBlockQ + q, kBlockQ, 1,
            grad_out.data + q * grad_out.stride, grad_out.stride, value_sum + begin * value_width, value_width, !first);
    gemm<A>(end - begin, head_width, queries, t.grad_scores + begin * kBlockQ + q, kBlockQ, 1,
            query.data + q * query.stride, query.stride, key_sum + begin * head_width, head_width, !first);
  });
  if (last) {
    write_rows(key_sum, head_width, keys, s.head_dim, static_cast<A>(s.scale),
               static_cast<T*>(p.grad_key) + g.k0 * s.head_dim);
    if (p.value_sum != p.grad_value)
      write_rows(value_sum, value_width, keys, s.value_dim, A(1), static_cast<T*>(p.grad_value) + g.k0 * s.value_dim);
  }
}

template <class T>
void end_block(const AttentionBackward& p, int64_t query_block, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const BackwardScratch<A> t(s, memory);
  const int64_t q0 = query_block * kBlockQ;
  write_rows(t.grad_query, round_up<A>(s.head_dim), min(kBlockQ, s.queries - q0), s.head_dim, static_cast<A>(s.scale),
             static_cast<T*>(p.grad_query) + q0 * s.head_dim);
}

// ---- entry points --------------------------------------------------------------------------------------------------

int64_t padded(Dtype dtype, int64_t dim) { return dtype == Dtype::f64 ? round_up<double>(dim) : round_up<float>(dim); }

template <template <class> class Scratch>
int64_t scratch_bytes(const AttentionShape& s) {
  return s.dtype == Dtype::f64 ? Scratch<double>(s, nullptr).elements * 8 : Scratch<float>(s, nullptr).elements * 4;
}

void forward(const AttentionForward& p, int64_t query_block, void* scratch) {
  SK_DISPATCH(p.shape.dtype, forward_block<T>(p, query_block, scratch));
}
void backward_begin(const AttentionBackward& p, int64_t query_block, void* scratch) {
  SK_DISPATCH(p.shape.dtype, begin_block<T>(p, query_block, scratch));
}
void backward_scores(const AttentionBackward& p, int64_t query_block, int64_t key_block, void* scratch) {
  SK_DISPATCH(p.shape.dtype, scores_block<T>(p, query_block, key_block, scratch));
}
void backward_keys(const AttentionBackward& p, int64_t query_block, int64_t key_block, bool first, bool last,
                   void* scratch) {
  SK_DISPATCH(p.shape.dtype, keys_block<T>(p, query_block, key_block, first, last, scratch));
}
void backward_end(const AttentionBackward& p, int64_t query_block, void* scratch) {
  SK_DISPATCH(p.shape.dtype, end_block<T>(p, query_block, scratch));
}

}  // namespace

const AttentionKernels attention_kernels = {padded,
                                            scratch_bytes<ForwardScratch>,
                                            scratch_bytes<BackwardScratch>,
                                            forward,
                                            backward_begin,
                                            backward_scores,
                                            backward_keys,
                                            backward_end};

}  // namespace SK_TIER
}  // namespace seqkern
