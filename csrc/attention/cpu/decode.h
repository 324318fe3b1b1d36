// Decoding: few queries against many keys. All query rows that share a key head are adjacent, in the lanes of one
// vector or a few, so that each key and value is read once for the whole group. The keys are cut into chunks, each
// computed alone.
//
// With o_c, m_c, l_c the sums, maximum and denominator of chunk c: m = max m_c, O = sum_c exp(m_c - m) o_c / sum_c
// exp(m_c - m) l_c, in the order of the chunks (Dao et al. 2023, "Flash-Decoding").
//
// Keys and values that are read in place are prefetched into L1, a line at a time. Measurements, and what was tried and
// lost: NOTES.md.
#pragma once

#include "pair.h"
#include "scores.h"

namespace seqkern {
namespace SK_TIER {
namespace {

constexpr int64_t kDecodeRows = 16, kDecodeQueries = 12, kDecodeKeys = 512;
// With long vectors, scores are dot products along the keys' rows, and are stored by rows. Short vectors gain nothing
// by that: there scores are a product with one vector of lanes, and are stored by keys, as elsewhere.
template <class A>
constexpr bool kDots = W<A> >= 8;
// Output sums in registers; at most so many packets of columns, and rows. (More sums are slower: NOTES.md.)
constexpr int kWeighed = 4 * kGemmVecs, kMostPackets = 4, kMostRows = 2 * kGemmVecs;
// Prefetch distance in bytes: a core that waits for each line in turn gets half the bandwidth. One line at a time,
// between the products: a core has some tens of requests in flight, and stalls while it queues more.
constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kRowStride = kDecodeKeys + 16;

template <class A>
struct DecodeScratch {
  A *query, *query_t;  // one of them: (rows, dim) padded, in packet order; or (dim, kDecodeRows)
  A* weighed;          // (kDecodeRows, value_dim) padded, in packet order: outputs of values read in place
  A *by_row, *by_key;  // scores: (kDecodeRows, kRowStride), with kDots; (kDecodeKeys, kDecodeRows)
  A *key, *value, *max, *sum;
  int64_t *first, *end;  // the keys that a row sees
  Lanes<A>* lanes;
  int64_t bytes;
  SK_INLINE DecodeScratch(const AttentionShape& s, void* memory) {
    Pieces pieces(memory);
    query = query_t = pieces.take<A>(round_up<A>(s.head_dim) * kDecodeRows);
    weighed = pieces.take<A>(kDecodeRows * round_up<A>(s.value_dim));
    by_row = pieces.take<A>(kDots<A> ? kDecodeRows * kRowStride : 0);
    by_key = pieces.take<A>(kDecodeKeys * kDecodeRows);
    key = pieces.take<A>(kBlockK * round_up<A>(s.head_dim));
    value = pieces.take<A>(kBlockK * round_up<A>(s.value_dim));
    max = pieces.take<A>(kDecodeRows);
    sum = pieces.take<A>(kDecodeRows);
    first = pieces.take<int64_t>(kDecodeRows);
    end = pieces.take<int64_t>(kDecodeRows);
    lanes = pieces.take<Lanes<A>>(1);
    bytes = pieces.bytes();
  }
};

// The partial result of a chunk.
template <class A>
struct DecodePartial {
  A *max, *sum, *out;
  int64_t width, bytes;
  SK_INLINE DecodePartial(const AttentionShape& s, const void* memory) {
    Pieces pieces(const_cast<void*>(memory));
    width = round_up<A>(s.value_dim);
    max = pieces.take<A>(kDecodeRows);
    sum = pieces.take<A>(kDecodeRows);
    out = pieces.take<A>(kDecodeRows * width);
    bytes = pieces.bytes();
  }
};

// Transposes N vectors as N x N blocks of `Lanes` lanes.
template <class A, int Lanes, int Step = 1, int N>
SK_INLINE void transpose_blocks(Vec<A> (&v)[N]) {
  if constexpr (Step < N) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
      if (!(i & Step)) exchange<A, Step * Lanes>(v[i], v[i + Step]);
    transpose_blocks<A, Lanes, 2 * Step>(v);
  }
}

// Lane i of the result is the sum of the lanes of v[i].
template <class A, int Step = 1>
SK_INLINE Vec<A> sum_rows(Vec<A> (&v)[W<A>]) {
  if constexpr (Step < W<A>) {
#pragma GCC unroll 16
    for (int i = 0; i < W<A>; i += 2 * Step) {
      exchange<A, Step>(v[i], v[i + Step]);
      v[i] += v[i + Step];
    }
    return sum_rows<A, 2 * Step>(v);
  }
  return v[0];
}

// Packet order: rows of accumulators whose whole packets are stored as Packet<T> loads them from a row of T; the rest
// follows in sequence.
template <class T>
constexpr int64_t kPacketWidth = kVectors<Packet<T>> * W<acc_t<T>>;
SK_INLINE void store_packet(float* p, Pair v) {
  store(p, v.a);
  store(p + W<float>, v.b);
}
template <class A>
SK_INLINE void store_packet(A* p, Vec<A> v) {
  store(p, v);
}
template <class T, class U = Packet<T>, class A = acc_t<T>>
SK_INLINE U load_packet(const A* p) {
  if constexpr (kVectors<U> == 2) return {load(p), load(p + W<A>)};
  else return load(p);
}
// The sum plus the products of a packet's elements.
SK_INLINE vf32 times(Pair x, Pair y, vf32 sum) { return sum + x.a * y.a + x.b * y.b; }
template <class V>
SK_INLINE V times(V x, V y, V sum) {
  return sum + x * y;
}

// bf16 dot products where the processor has them: half the multiplications, and nothing is widened. (Not on AMX
// machines, where this was not timed.)
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define SK_BF16_DOTS 1
template <class T>
constexpr bool kBf16Dots = std::is_same<T, BFloat16>::value;
struct Bf16Pairs {
  __m512i bits;
};
SK_INLINE vf32 times(Bf16Pairs x, Bf16Pairs y, vf32 sum) {
  return bit_cast<vf32>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(x), bit_cast<__m512bh>(y)));
}
// The first n of 32 numbers; the rest is zero.
SK_INLINE Bf16Pairs load_as_pairs(const BFloat16* p, int64_t n) {
  const __mmask32 mask = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
  return {_mm512_maskz_loadu_epi16(mask, p)};
}
#else
#define SK_BF16_DOTS 0
template <class T>
constexpr bool kBf16Dots = false;
#endif

// The distance, in elements, of the row to prefetch while a row of `columns` is read.
template <class T>
SK_INLINE int64_t prefetch_distance(int64_t columns, int64_t stride) {
  return (kPrefetchBytes / (max(columns, 1) * static_cast<int64_t>(sizeof(T))) + 1) * stride;
}

// Calls body(column, packet, count) for the whole packets of a row, then for single vectors, the last of `count`
// columns.
template <class T, class Body>
SK_INLINE void for_packets(int64_t columns, const Body& body) {
  int64_t c = 0;
  for (; c + kPacketWidth<T> <= columns; c += kPacketWidth<T>) body(c, Packet<T>{}, kPacketWidth<T>);
  for (; c < columns; c += W<acc_t<T>>) body(c, Vec<acc_t<T>>{}, columns - c);
}

// As for_packets, for the products of keys with queries: calls body(key, query), two functions that load from a row.
// Loading a key also prefetches the address `ahead` elements further on, unless `ahead` is 0.
template <class T, class Body, class A = acc_t<T>>
SK_INLINE void for_key_packets(const T* keys, int64_t stride, int64_t dim, const A* query, int64_t ahead,
                               const Body& body) {
  const int64_t padded = round_up<A>(dim);
  const auto element = [=](int64_t k, int64_t d) {
    const T* at = keys + k * stride + d;
    if (ahead) __builtin_prefetch(at + ahead, 0, 3);
    return at;
  };
  if constexpr (kBf16Dots<T>) {
#if SK_BF16_DOTS
    for (int64_t d = 0; d < dim; d += 32)
      body([=](int64_t k) { return load_as_pairs(element(k, d), dim - d); },
           [=](int64_t row) {
             return Bf16Pairs{_mm512_load_si512(reinterpret_cast<const T*>(query + row * padded) + d)};
           });
#endif
  } else {
    for_packets<T>(dim, [&](int64_t d, auto packet, int64_t count) {
      using U = decltype(packet);
      body([=](int64_t k) { return load_upto_as<U>(element(k, d), count); },
           [=](int64_t row) { return load_packet<T, U>(query + row * padded + d); });
    });
  }
}

// A query in the layout that for_key_packets reads, padded with zeros to whole vectors.
template <class T, class A = acc_t<T>>
SK_INLINE void store_query(const T* query, int64_t dim, A scale, A* to) {
  if constexpr (kBf16Dots<T>) {
#if SK_BF16_DOTS
    for (int64_t d = 0; d < dim; d += 32)
      _mm512_store_si512(reinterpret_cast<T*>(to) + d, load_as_pairs(query + d, dim - d).bits);
#endif
  } else {
    for_packets<T>(dim, [&](int64_t d, auto packet, int64_t count) {
      store_packet(to + d, load_upto_as<decltype(packet)>(query + d, count) * scale);
    });
  }
}

// scores[row, k] = sum_d key[k, d] query[row, d] for W keys and ROWS rows, W sums at a time. `Prefetch`: for the first
// rows that see these keys.
template <class T, int ROWS, bool Prefetch, class A = acc_t<T>>
SK_INLINE void dot_block(const T* key, int64_t stride, int64_t dim, const A* query, int64_t ahead, A* scores) {
  constexpr int kKeys = W<A> / ROWS;
  Vec<A> result[ROWS];  // for the keys of one pass, the rows one after the other
#pragma GCC unroll 16
  for (int k = 0; k < ROWS; ++k, key += kKeys * stride) {
    Vec<A> sums[W<A>] = {};
    for_key_packets<T>(key, stride, dim, query, Prefetch ? ahead : 0, [&](const auto& one_key, const auto& one_query) {
      if constexpr (kKeys == 2) {  // registers hold both keys, and each load of a query serves both
        const auto x = one_key(0), y = one_key(1);
        for (int r = 0; r < ROWS; ++r) {
          const auto q = one_query(r);
          sums[2 * r] = times(x, q, sums[2 * r]);
          sums[2 * r + 1] = times(y, q, sums[2 * r + 1]);
        }
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i) {
          const auto x = one_key(i);
          for (int r = 0; r < ROWS; ++r) {
            Vec<A>& sum = sums[r * kKeys + i];
            sum = times(x, one_query(r), sum);
          }
        }
      }
    });
    result[k] = sum_rows<A>(sums);
  }
  transpose_blocks<A, kKeys>(result);
  for (int r = 0; r < ROWS; ++r) store(scores + r * kRowStride, result[r]);
}

// The same for any number of keys and rows, with `query` in the layout of store_query.
template <class T, class A = acc_t<T>>
void dot_products(const T* key, int64_t stride, int64_t keys, int64_t dim, const A* query, int64_t rows, A* scores) {
  const int64_t padded = round_up<A>(dim), ahead = prefetch_distance<T>(dim, stride);
  int64_t k = 0;
  for (; k + W<A> <= keys; k += W<A>) {
    int64_t row = 0;
    const auto block = [&](auto count, auto first) {
      dot_block<T, decltype(count)::value, decltype(first)::value>(key + k * stride, stride, dim, query + row * padded,
                                                                   ahead, scores + row * kRowStride + k);
      row += decltype(count)::value;
    };
    const auto blocks = [&](auto count) {
      if (row == 0 && count <= rows) block(count, std::true_type{});
      while (row + count <= rows) block(count, std::false_type{});
    };
    if constexpr (W<A> >= 4) blocks(std::integral_constant<int, 4>{});
    blocks(std::integral_constant<int, 2>{});
    blocks(std::integral_constant<int, 1>{});
  }
  for (; k < keys; ++k) {
    for (int64_t row = 0; row < rows; ++row) {
      Vec<A> sum = {};
      for_key_packets<T>(
          key + k * stride, stride, dim, query + row * padded, 0,
          [&](const auto& one_key, const auto& one_query) { sum = times(one_key(0), one_query(0), sum); });
      scores[row * kRowStride + k] = sum_lanes<A>(sum);
    }
  }
}

// Converts scores stored by rows to scores stored by keys, and back: for keys [begin, end), rounded to whole vectors.
template <class A>
void rows_to_keys(const DecodeScratch<A>& t, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t k = begin / W<A> * W<A>; k < end; k += W<A>) {
    for (int64_t q = 0; q < rows; q += W<A>) {
      Vec<A> v[W<A>];
      for (int i = 0; i < W<A>; ++i) v[i] = q + i < rows ? load(t.by_row + (q + i) * kRowStride + k) : Vec<A>{};
      transpose_square<A>(v);
      for (int i = 0; i < W<A>; ++i) store(t.by_key + (k + i) * kDecodeRows + q, v[i]);
    }
  }
}
template <class A>
void keys_to_rows(const DecodeScratch<A>& t, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t k = begin / W<A> * W<A>; k < end; k += W<A>) {
    for (int64_t q = 0; q < rows; q += W<A>) {
      Vec<A> v[W<A>];
      for (int i = 0; i < W<A>; ++i) v[i] = load(t.by_key + (k + i) * kDecodeRows + q);
      transpose_square<A>(v);
      for (int i = 0; i < min(W<A>, rows - q); ++i) store(t.by_row + (q + i) * kRowStride + k, v[i]);
    }
  }
}

// Scores, stored by rows, to unnormalised probabilities.
template <class A>
void softmax_rows(const DecodeScratch<A>& t, int64_t rows, int64_t begin, int64_t end) {
  const int64_t from = begin / W<A> * W<A>, to = round_up<A>(end);
  for (int64_t q = 0; q < rows; ++q) {
    A* scores = t.by_row + q * kRowStride;
    for (int64_t k = from; k < min(t.first[q], to); ++k) scores[k] = -kInfinity<A>;
    for (int64_t k = max(from, t.end[q]); k < to; ++k) scores[k] = -kInfinity<A>;
    Vec<A> most = broadcast<A>(-kInfinity<A>), sum = {};
    for (int64_t k = from; k < to; k += W<A>) most = vmax(load(scores + k), most);
    t.max[q] = max_lanes<A>(most);
    const Vec<A> shift = broadcast<A>(t.max[q] == -kInfinity<A> ? A(0) : t.max[q]);
    for (int64_t k = from; k < to; k += W<A>) {
      const Vec<A> x = exp_nonpositive<A>(load(scores + k) - shift);
      store(scores + k, x);
      sum += x;
    }
    t.sum[q] = sum_lanes<A>(sum);
  }
}

// The same for scores stored by keys.
template <class A>
void softmax_lanes(const DecodeScratch<A>& t, int64_t rows, int64_t lanes, int64_t begin, int64_t end) {
  for (int64_t q = 0; q < rows; ++q) {
    for (int64_t k = begin; k < min(t.first[q], end); ++k) t.by_key[k * kDecodeRows + q] = -kInfinity<A>;
    for (int64_t k = max(begin, t.end[q]); k < end; ++k) t.by_key[k * kDecodeRows + q] = -kInfinity<A>;
  }
  for (int64_t q = 0; q < lanes; q += W<A>) {
    update_max<A, 1>(t.by_key + begin * kDecodeRows + q, kDecodeRows, end - begin, t.max + q);
    for (int64_t k = begin; k < end; k += kBlockK)  // a sum for each block
      exponentials<A, 1>(t.by_key + k * kDecodeRows + q, kDecodeRows, min(kBlockK, end - k), t.max + q, t.sum + q);
  }
}

// out[row, c] (+)= sum_k P[row, k] V[k, c] for ROWS rows and NP packets U of columns, the last of `count` columns.
// `Prefetch`: for the first rows that see these values.
template <class T, class U, int ROWS, int NP, bool Prefetch, class A = acc_t<T>>
SK_INLINE void weigh(const A* scores, int64_t keys, const T* value, int64_t stride, int64_t ahead, int64_t count,
                     A* out, int64_t width, bool accumulate) {
  constexpr int64_t packet = kVectors<U> * W<A>;
  U sums[ROWS][NP] = {};
  for (int64_t k = 0; k < keys; ++k) {
    const T* from = value + k * stride;
    for (int j = 0; j < NP; ++j) {
      if (Prefetch && j * packet * sizeof(T) % 64 == 0) __builtin_prefetch(from + ahead + j * packet, 0, 3);
      const U v = NP == 1 ? load_upto_as<U>(from, count) : load_as<U>(from + j * packet);
      for (int r = 0; r < ROWS; ++r) sums[r][j] += v * broadcast_as<U>(scores[r * kRowStride + k]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {  // without unrolling, the sums would go through memory
#pragma GCC unroll 16
    for (int j = 0; j < NP; ++j) {
      A* to = out + r * width + j * packet;
      store_packet(to, accumulate ? load_packet<T, U>(to) + sums[r][j] : sums[r][j]);
    }
  }
}
// The same for `packets` whole packets, at most NP.
template <class T, int ROWS, int NP, bool Prefetch, class A = acc_t<T>>
__attribute__((noinline)) void weigh_packets(int packets, const A* scores, int64_t keys, const T* value, int64_t stride,
                                             int64_t ahead, A* out, int64_t width, bool accumulate) {
  if (packets == NP) {
    weigh<T, Packet<T>, ROWS, NP, Prefetch>(scores, keys, value, stride, ahead, kPacketWidth<T>, out, width,
                                            accumulate);
  } else if constexpr (NP > 1) {
    weigh_packets<T, ROWS, NP - 1, Prefetch>(packets, scores, keys, value, stride, ahead, out, width, accumulate);
  }
}
// The same for all columns, over one slice of keys.
template <class T, int ROWS, bool Prefetch, class A = acc_t<T>>
SK_INLINE void weigh_slice(const A* scores, int64_t keys, const T* value, int64_t stride, int64_t ahead,
                           int64_t columns, A* out, int64_t width, bool accumulate) {
  constexpr int fit = kWeighed / (ROWS * kVectors<Packet<T>>), NP = fit < 1              ? 1
                                                                    : fit < kMostPackets ? fit
                                                                                         : kMostPackets;
  const int64_t packets = columns / kPacketWidth<T>, groups = (packets + NP - 1) / NP;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * packets / groups, c = begin * kPacketWidth<T>;
    weigh_packets<T, ROWS, NP, Prefetch>(static_cast<int>((g + 1) * packets / groups - begin), scores, keys, value + c,
                                         stride, ahead, out + c, width, accumulate);
  }
  for (int64_t c = packets * kPacketWidth<T>; c < columns; c += W<A>)
    weigh<T, Vec<A>, ROWS, 1, Prefetch>(scores, keys, value + c, stride, ahead, columns - c, out + c, width,
                                        accumulate);
}
// Values are read in place, in their own type, by a few rows at a time. Slices are those of gemm.h, for the same
// accuracy, and stay in L1 for all rows.
template <class T, class A = acc_t<T>>
void weighted_values(const A* scores, int64_t rows, int64_t keys, const T* value, int64_t stride, int64_t columns,
                     A* out, int64_t width, bool accumulate) {
  const int64_t ahead = prefetch_distance<T>(columns, stride);
  for (int64_t k = 0; k < keys; k += kGemmSlice, accumulate = true) {
    int64_t row = 0;
    const auto some = [&](auto count, auto first) {
      weigh_slice<T, decltype(count)::value, decltype(first)::value>(
          scores + row * kRowStride + k, min(kGemmSlice, keys - k), value + k * stride, stride, ahead, columns,
          out + row * width, width, accumulate);
      row += decltype(count)::value;
    };
    const auto blocks = [&](auto count) {
      if (row == 0 && count <= rows) some(count, std::true_type{});
      while (row + count <= rows) some(count, std::false_type{});
    };
    if constexpr (kMostRows > 4) blocks(std::integral_constant<int, kMostRows>{});
    blocks(std::integral_constant<int, 4>{});
    blocks(std::integral_constant<int, 3>{});
    blocks(std::integral_constant<int, 2>{});
    blocks(std::integral_constant<int, 1>{});
  }
}

// From queries to probabilities, for keys [begin, end) of the chunk that starts at k0.
template <class T, class A = acc_t<T>>
void decode_scores(const AttentionForward& p, const DecodeScratch<A>& t, int64_t rows, int64_t k0, int64_t begin,
                   int64_t end) {
  const AttentionShape& s = p.shape;
  const int64_t lanes = round_up<A>(rows);
  constexpr bool dots = kDots<A>;
  for (int64_t k = begin / kBlockK * kBlockK; k < end; k += kBlockK) {
    const int64_t from = max(k, begin), keys = min(k + kBlockK, end) - from;
    const T* source = at<T>(p.key, k0 + from);
    if (dots) {
      dot_products<T>(source, p.key.stride, keys, s.head_dim, t.query, rows, t.by_row + from);
      continue;
    }
    const Tile<A> key = plain_rows(source, p.key.stride, keys, s.head_dim, t.key);
    for (int64_t q = 0; q < lanes; q += W<A>)
      gemm<A>(keys, W<A>, s.head_dim, key.data, key.stride, 1, t.query_t + q, kDecodeRows,
              t.by_key + from * kDecodeRows + q, kDecodeRows, false);
  }
  if (kBf16Dots<T> && dots) {  // here the queries were not scaled
    for (int64_t q = 0; q < rows; ++q)
      for (int64_t k = begin / W<A> * W<A>; k < end; k += W<A>) {
        A* at = t.by_row + q * kRowStride + k;
        store(at, load(at) * static_cast<A>(s.scale));
      }
  }
  const Part part{begin, end, 0, lanes};
  if (modified(s)) {
    if (dots) rows_to_keys(t, rows, begin, end);
    modify_scores(s, *t.lanes, k0, part, t.by_key, kDecodeRows);
    if (dots) keys_to_rows(t, rows, begin, end);
  }
  if (dots) softmax_rows(t, rows, begin, end);
  else softmax_lanes(t, rows, lanes, begin, end);
  if (s.dropout.active) {
    if (dots) rows_to_keys(t, rows, begin, end);
    drop(s.dropout, *t.lanes, k0, part, t.by_key, kDecodeRows);
    if (dots) keys_to_rows(t, rows, begin, end);
  }
}

template <class T>
void decode_chunk(const AttentionForward& p, int64_t chunk, void* partial, void* memory) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const DecodeScratch<A> t(s, memory);
  const DecodePartial<A> to(s, partial);
  const int64_t queries = p.sequence.queries, rows = p.heads * queries, lanes = round_up<A>(rows);
  constexpr bool dots = kDots<A>;
  const Range seen = visible_range(p.sequence, 0, queries);
  const int64_t k0 = chunk * kDecodeKeys, begin = max(0, seen.begin - k0), end = min(kDecodeKeys, seen.end - k0);

  for (int64_t head = 0; head < p.heads; ++head) {
    const int64_t lane = head * queries;
    const T* query = static_cast<const T*>(p.query.data) + head * p.query_head_stride;
    if (dots) {
      for (int64_t i = 0; i < queries; ++i)
        store_query(query + i * p.query.stride, s.head_dim, static_cast<A>(s.scale),
                    t.query + (lane + i) * round_up<A>(s.head_dim));
    } else {  // the last head zeroes the remaining lanes
      transpose(query, p.query.stride, queries, head + 1 < p.heads ? queries : lanes - lane, s.head_dim,
                static_cast<A>(s.scale), t.query_t + lane, kDecodeRows);
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
  int64_t all_first = 0, all_end = end;  // the keys that every lane sees
  for (int64_t q = 0; q < rows; ++q) {
    all_first = max(all_first, t.first[q]);
    all_end = min(all_end, t.end[q]);
  }

  bool any = false, any_weighed = false;
  if (begin < end && !mask_hides_tile(s, *t.lanes, k0, begin, end)) {
    decode_scores<T>(p, t, rows, k0, begin, end);
    // Probability of row q and key k: weights[q * row_step + k * key_step].
    const A* weights = dots ? t.by_row : t.by_key;
    const int64_t row_step = dots ? kRowStride : 1, key_step = dots ? 1 : kDecodeRows;
    for (int64_t k = begin / kBlockK * kBlockK; k < end; k += kBlockK) {
      const int64_t from = max(k, begin), keys = min(k + kBlockK, end) - from;
      const T* source = at<T>(p.value, k0 + from);
      const bool all = all_first <= from && from + keys <= all_end;
      if (all && dots) {
        weighted_values<T>(weights + from, rows, keys, source, p.value.stride, s.value_dim, t.weighed, to.width,
                           any_weighed);
        any_weighed = true;
        continue;
      }
      const Tile<A> v = padded_rows(source, p.value.stride, keys, s.value_dim, t.value);
      if (all) {
        gemm<A>(rows, to.width, keys, weights + from * key_step, row_step, key_step, v.data, v.stride, to.out, to.width,
                any);
      } else {  // hidden values must not reach a row, not even times 0
        for (int64_t q = 0; q < rows; ++q) {
          const int64_t first = clamp(t.first[q], from, from + keys), last = clamp(t.end[q], first, from + keys);
          gemm<A>(1, to.width, last - first, weights + q * row_step + first * key_step, row_step, key_step,
                  v.data + (first - from) * v.stride, v.stride, to.out + q * to.width, to.width, any);
        }
      }
      any = true;
    }
  }
  for (int64_t i = 0; !any && i < rows * to.width; ++i) to.out[i] = 0;
  for (int64_t q = 0; any_weighed && q < rows; ++q) {
    for_packets<T>(s.value_dim, [&](int64_t c, auto packet, int64_t) {
      using U = decltype(packet);
      A* out = to.out + q * to.width + c;
      store_as<U>(out, load_as<U>(out) + load_packet<T, U>(t.weighed + q * to.width + c));
    });
  }
  for (int64_t q = 0; q < rows; ++q) {
    to.max[q] = t.max[q];
    to.sum[q] = t.sum[q];
  }
}

template <class T>
void decode_combine_rows(const AttentionForward& p, const void* partials, int64_t chunks) {
  using A = acc_t<T>;
  const AttentionShape& s = p.shape;
  const int64_t bytes = DecodePartial<A>(s, nullptr).bytes;
  const auto part = [&](int64_t chunk) {
    return DecodePartial<A>(s, static_cast<const char*>(partials) + chunk * bytes);
  };
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
      const A denominator = sum == 0 ? A(1) : sum;
      T* out = static_cast<T*>(p.out.data) + head * p.out_head_stride + i * p.out.stride;
      for (int64_t column = 0; column < s.value_dim; column += W<A>) {
        Vec<A> total = {};
        for (int64_t c = 0; c < chunks; ++c) {
          const DecodePartial<A> from = part(c);
          total += weight(from.max[q]) * load(from.out + q * from.width + column);
        }
        store_upto(out + column, total / denominator, s.value_dim - column);
      }
      static_cast<lse_t<T>*>(p.lse)[head * p.lse_head_stride + i] = log_sum_exp<lse_t<T>>(most, sum);
    }
  }
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
