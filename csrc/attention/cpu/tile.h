// A tile of attention scores: its visible entries, the strips in which it is computed, and rows of inputs as operands
// of its products. Scores are stored transposed, keys by queries.
#pragma once

#include "attention/attention.h"
#include "gemm.h"
#include "scratch.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// BLOCK_Q queries by BLOCK_K keys; a variant may define its own before including this file.
#if defined(SK_BLOCK_Q)
constexpr int64_t kBlockQ = SK_BLOCK_Q, kBlockK = SK_BLOCK_K;
#else
constexpr int64_t kBlockQ = 128, kBlockK = 64;
#endif
// Row stride of a transposed tile: not a power of two, whose rows would share a few sets of the cache.
constexpr int64_t kLaneStride = kBlockQ + 16;
// Rows of a strip. A tile that the band's edge crosses is computed in strips, each only as wide as needed.
constexpr int64_t kStrip = 16;

SK_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
SK_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
SK_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return min(max(x, low), high); }

template <class A>
constexpr A kInfinity = static_cast<A>(__builtin_inf());

template <class A>
struct Tile {
  const A* data;
  int64_t stride;
};

template <class T>
SK_INLINE const T* at(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + row * rows.stride;
}
template <class T>
SK_INLINE T* at(const MutableRows& rows, int64_t row) {
  return static_cast<T*>(rows.data) + row * rows.stride;
}

// `count` rows as accumulators, readable in whole vectors: in place where possible, else converted into `scratch` and
// padded with zeros.
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

// to[c, r] = rows[r, c] * factor: (columns, to_stride); lanes from `count` to `lanes` are zero.
template <class T, class A = acc_t<T>>
void transpose(const T* rows, int64_t stride, int64_t count, int64_t lanes, int64_t columns, A factor, A* to,
               int64_t to_stride = kLaneStride) {
  for (int64_t r = 0; r < lanes; ++r) {
    for (int64_t c = 0; c < columns; c += W<A>) {
      const Vec<A> v = r < count ? load_upto(rows + r * stride + c, columns - c) * factor : Vec<A>{};
      const int64_t n = min(W<A>, columns - c);
      for (int64_t i = 0; i < n; ++i) to[(c + i) * to_stride + r] = v[i];
    }
  }
}

// Stores rows of accumulators times a factor, as T.
template <class T, class A>
SK_INLINE void write_rows(const A* from, int64_t stride, int64_t rows, int64_t columns, A factor, T* to,
                          int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += W<A>)
      store_upto(to + r * to_stride + c, load(from + r * stride + c) * factor, columns - c);
}

// The tile of one query block and one key block.
struct Geometry {
  int64_t q0, queries;      // of the block
  int64_t lanes;            // queries rounded up to whole vectors
  int64_t k0, begin, keys;  // of the block; its queries see only keys in [begin, keys)
  int64_t low, high;        // query q of the block sees keys q + low <= k <= q + high
  bool crossed;             // not every query sees every key
  // The keys that a query sees.
  SK_INLINE int64_t first_key(int64_t q) const { return clamp(q + low, 0, keys); }
  SK_INLINE int64_t end_key(int64_t q) const { return clamp(q + high + 1, 0, keys); }
};

template <class A>
SK_INLINE Geometry geometry(const AttentionSequence& s, int64_t query_block, int64_t key_block) {
  Geometry g;
  g.q0 = query_block * kBlockQ;
  g.queries = min(kBlockQ, s.queries - g.q0);
  g.lanes = round_up<A>(g.queries);
  g.k0 = key_block * kBlockK;
  const Range seen = visible_range(s, g.q0, g.q0 + g.queries);
  g.keys = min(kBlockK, seen.end - g.k0);
  g.low = g.q0 + s.lower - g.k0;
  g.high = g.q0 + s.upper - g.k0;
  g.crossed = g.high < g.keys - 1 || g.low + g.queries - 1 > 0;
  g.begin = g.crossed ? max(0, seen.begin - g.k0) / kStrip * kStrip : 0;
  return g;
}

// A part of a tile: keys [begin, end) by queries [first, last), whole vectors.
struct Part {
  int64_t begin, end, first, last;
};

// The strip of a crossed tile that begins at key k, as wide as the queries that see any of its keys; first >= last if
// none does.
template <int64_t ROWS = kStrip>
SK_INLINE Part strip(const Geometry& g, int64_t k) {
  const int64_t end = min(k + ROWS, g.keys);
  return {k, end, max(0, k - g.high) / kStrip * kStrip,
          clamp((end - g.low + kStrip - 1) / kStrip * kStrip, 0, g.lanes)};
}

// Calls body(part) for the whole tile, or for its strips of keys if the band's edge crosses it.
template <int64_t ROWS = kStrip, class Body>
SK_INLINE void for_key_strips(const Geometry& g, const Body& body) {
  if (!g.crossed) {
    body(Part{0, g.keys, 0, g.lanes});
    return;
  }
  for (int64_t k = g.begin / ROWS * ROWS; k < g.keys; k += ROWS) {
    const Part part = strip<ROWS>(g, k);
    if (part.first < part.last) body(part);
  }
}

// Calls body(query_begin, query_end, key_begin, key_end) for strips of queries and the keys that any of them sees.
template <int64_t COLUMNS = kStrip, class Body>
SK_INLINE void for_query_strips(const Geometry& g, const Body& body) {
  if (!g.crossed) {
    body(int64_t{0}, g.queries, int64_t{0}, g.keys);
    return;
  }
  for (int64_t q = 0; q < g.queries; q += COLUMNS) {
    const int64_t end = min(q + COLUMNS, g.queries);
    body(q, end, g.first_key(q), g.end_key(end - 1));
  }
}

template <int N>
struct Vectors {
  static constexpr int count = N;
};
// Calls body(Vectors<n>, query) for queries [begin, end), with as many vectors at a time as the registers allow.
template <class A, class Body>
SK_INLINE void for_lanes(int64_t begin, int64_t end, const Body& body) {
  int64_t q = begin;
  for (; q + kGemmVecs * W<A> <= end; q += kGemmVecs * W<A>) body(Vectors<kGemmVecs>{}, q);
  for (; q < end; q += W<A>) body(Vectors<1>{}, q);
}

// Overwrites the hidden entries of a part.
template <class A>
SK_INLINE void hide(const Geometry& g, const Part& part, A value, A* tile, int64_t stride = kLaneStride) {
  if (!g.crossed) return;
  for (int64_t k = part.begin; k < part.end; ++k) {
    for (int64_t q = part.first; q < min(k - g.high, part.last); ++q) tile[k * stride + q] = value;
    for (int64_t q = max(part.first, k - g.low + 1); q < part.last; ++q) tile[k * stride + q] = value;
  }
}

// scores[k, q] = sum_d rows[k, d] * columns[d, q]
template <class A>
SK_INLINE void products(const Part& part, Tile<A> rows, int64_t dim, const A* columns, A* scores) {
  gemm<A>(part.end - part.begin, part.last - part.first, dim, rows.data + part.begin * rows.stride, rows.stride, 1,
          columns + part.first, kLaneStride, scores + part.begin * kLaneStride + part.first, kLaneStride, false);
}

// out[q, c] (+)= sum_k tile[k, q] rows[k, c]. A hidden entry of the tile is 0, but 0 times NaN is NaN. So where the
// band's edge crosses the tile, a strip's queries take together the keys that all of them see, and the other keys one
// query at a time.
template <class A>
SK_INLINE void add_seen(const Geometry& g, const A* tile, Tile<A> rows, int64_t width, bool accumulate, A* out) {
  for_query_strips(g, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
    if (g.crossed) {
      first = g.first_key(end - 1);
      last = max(first, g.end_key(begin));
    }
    gemm<A>(end - begin, width, last - first, tile + first * kLaneStride + begin, 1, kLaneStride,
            rows.data + first * rows.stride, rows.stride, out + begin * width, width, accumulate);
    if (!g.crossed) return;
    for (int64_t q = begin; q < end; ++q) {
      const int64_t seen = g.first_key(q), seen_end = g.end_key(q);
      for (const auto& [from, to] : {Range{seen, min(seen_end, first)}, Range{max(seen, last), seen_end}}) {
        if (from < to)
          gemm<A>(1, width, to - from, tile + from * kLaneStride + q, 1, kLaneStride, rows.data + from * rows.stride,
                  rows.stride, out + q * width, width, true);
      }
    }
  });
}

template <class A>
SK_INLINE bool all_finite(Tile<A> rows, int64_t count, int64_t columns) {
  Vec<A> sum = {};  // 0, or NaN if a number is not finite
  for (int64_t r = 0; r < count; ++r)
    for (int64_t c = 0; c < columns; c += W<A>) {
      const Vec<A> x = load(rows.data + r * rows.stride + c);
      sum += x - x;
    }
  return sum_lanes<A>(sum) == 0;
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
