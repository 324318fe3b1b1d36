// Attention for bfloat16, on matrix tiles (AMX) or by bf16 dot products (AVX512-BF16): compiled once for each.
// Equations, work items and transposed scores are those of kernels.cpp, and the passes over the scores are those
// of scores.h.
//
// Scores are 16 keys by 16 queries a tile. K and V are left operands as stored; Q and dO are packed once for a query
// block. P and dS leave the softmax as rows of keys, the left operand of dV = P^T dO and dK = dS^T Q. dS also leaves it
// as pairs of keys, the right operand of dQ^T = K^T dS. So nothing is transposed between the products. All sums are in
// float32; only P and dS are rounded to bfloat16.
//
// The operands of a tile of 256 queries and 128 keys stay in L2. The scores never leave L1: S, dP and everything that
// follows are done for 32 keys and 64 queries at a time. Without options on the scores, one pass does exp2, the
// gradient, and the rounding to both layouts; by dot products, register tile by register tile, with dP still in the
// registers that summed it.
//
// Block sizes are by measurement (NOTES.md).
#define SK_BLOCK_Q 256
#define SK_BLOCK_K 128
#include "bf16.h"

#include "backward.h"
#include "bf16_forward.h"
#include "decode.h"

namespace seqkern {
namespace SK_TIER {
namespace {

static_assert(kBlockK % 32 == 0 && kBlockQ % 32 == 0 && kStrip == 16 && W<float> == 16, "tiles of 16, pairs of 32");

// ---- packed keys and values ----------------------------------------------------------------------------------------

// Of one key head: K as rows, V as rows, K transposed.
struct PackedKeys {
  int64_t key_depth, value_depth, key_columns;  // tiles of 32, 32 and 16 columns
  BFloat16 *key, *value, *key_t;
  int64_t bytes;
  SK_INLINE PackedKeys(const AttentionShape& s, int64_t keys, const void* memory)
      : key_depth(tiles(s.head_dim, 32)), value_depth(tiles(s.value_dim, 32)), key_columns(tiles(s.head_dim, 16)) {
    const int64_t rows = tiles(keys, 32) * 2;
    key = static_cast<BFloat16*>(const_cast<void*>(memory));
    value = key + rows * key_depth * kTileElements;
    key_t = value + rows * value_depth * kTileElements;
    bytes = (rows * (key_depth + value_depth) + rows / 2 * key_columns) * kTileBytes;
  }
  SK_INLINE Tiles key_rows(int64_t k0) const {
    return {key + k0 / 16 * key_depth * kTileElements, key_depth * kTileBytes, kTileBytes};
  }
  SK_INLINE Tiles value_rows(int64_t k0) const {
    return {value + k0 / 16 * value_depth * kTileElements, value_depth * kTileBytes, kTileBytes};
  }
  SK_INLINE Tiles key_transposed(int64_t k0) const {
    return {key_t + k0 / 32 * key_columns * kTileElements, kTileBytes, key_columns * kTileBytes};
  }
};

int64_t pack_bytes(const AttentionShape& s, int64_t keys, bool backward) {
  return backward ? PackedKeys(s, keys, nullptr).bytes : PackedForward(s, keys, nullptr).bytes;
}

void pack(const AttentionShape& s, int64_t keys, bool backward, Rows key, Rows value, int64_t key_block, void* packed) {
  if (!backward) {
    pack_forward(s, keys, key, value, key_block, packed);
    return;
  }
  const PackedKeys to(s, keys, packed);
  const int64_t k0 = key_block * kBlockK, count = min(kBlockK, keys - k0);
  const auto tile = [](const Tiles& t) { return static_cast<BFloat16*>(const_cast<void*>(t.data)); };
  // Tiles come in pairs, of 16 rows each: rows without a key are zero.
  const int64_t missing = (count + 31) / 32 * 2 - tiles(count, 16);
  pack_rows(key, k0, count, s.head_dim, tile(to.key_rows(k0)));
  pack_rows(value, k0, count, s.value_dim, tile(to.value_rows(k0)));
  if (missing > 0) {
    __builtin_memset(tile(to.key_rows(k0 + (count + 15) / 16 * 16)), 0, to.key_depth * kTileBytes);
    __builtin_memset(tile(to.value_rows(k0 + (count + 15) / 16 * 16)), 0, to.value_depth * kTileBytes);
  }
  // Keys that are not finite become 0 here: a query that sees one has a dS that is not finite anyway.
  pack_transposed(key, k0, count, s.head_dim, to.key_columns, tile(to.key_transposed(k0)), nullptr);
}

// ---- backward ------------------------------------------------------------------------------------------------------

struct TileScratch {
  static constexpr int64_t kQueryTiles = kBlockQ / 16, kQuerySteps = kBlockQ / 32, kKeySteps = kBlockK / 32;
  // The part of a tile whose scores are made at once.
  static constexpr int64_t kKeys = 32, kQueries = 64, kStride = kQueries + 16, kScores = kKeys * kStride;
  int64_t key_depth, value_depth, key_columns, value_columns;
  // Of the query block: Q and dO packed as columns and as pairs.
  BFloat16 *query, *grad_out, *query_pairs, *grad_out_pairs;
  BFloat16 *p, *ds, *ds_pairs;  // of a tile: (keys, queries), and pairs of keys
  float *scores, *grad_scores, *derivative, *kept, *grad_query_t, *lse, *delta, *grad_lse, *distance;
  float* delta_lse;  // delta - dlse
  Lanes<float>* lanes;
  int64_t bytes;

  SK_INLINE TileScratch(const AttentionShape& s, void* memory)
      : key_depth(tiles(s.head_dim, 32)),
        value_depth(tiles(s.value_dim, 32)),
        key_columns(tiles(s.head_dim, 16)),
        value_columns(tiles(s.value_dim, 16)) {
    Pieces pieces(memory);
    const auto take_tiles = [&](int64_t count) SK_INLINED { return pieces.take<BFloat16>(count * kTileElements); };
    query = take_tiles(kQueryTiles * key_depth);
    grad_out = take_tiles(kQueryTiles * value_depth);
    query_pairs = take_tiles(kQuerySteps * key_columns);
    grad_out_pairs = take_tiles(kQuerySteps * value_columns);
    p = take_tiles(kBlockK * kBlockQ / kTileElements);
    ds = take_tiles(kBlockK * kBlockQ / kTileElements);
    ds_pairs = take_tiles(kKeySteps * kQueryTiles);
    scores = pieces.take<float>(kScores);
    grad_scores = pieces.take<float>(kScores);
    derivative = pieces.take<float>(kScores);
    kept = pieces.take<float>(kScores);
    grad_query_t = pieces.take<float>(key_columns * 16 * kLaneStride);
    lse = pieces.take<float>(kBlockQ);
    delta = pieces.take<float>(kBlockQ);
    grad_lse = pieces.take<float>(kBlockQ);
    distance = pieces.take<float>(kBlockQ);
    delta_lse = pieces.take<float>(kBlockQ);
    lanes = pieces.take<Lanes<float>>(1);
    bytes = pieces.bytes();
  }
  // P and dS as left tiles, from row `key` on.
  SK_INLINE Tiles rows(const BFloat16* matrix, int64_t key) const {
    return {matrix + key * kBlockQ, 16 * kBlockQ * 2, 64, kBlockQ * 2};
  }
  // The first of the 8 rows of pairs for 16 keys and 16 queries.
  SK_INLINE BFloat16* pairs(int64_t k, int64_t q) const {
    return ds_pairs + (k / 32 * kQueryTiles + q / 16) * kTileElements + k % 32 / 2 * 32;
  }
};

// The scores of a part, indexed by the keys and queries of the tile.
struct PartScores {
  float *scores, *grad_scores, *derivative, *kept;
  static constexpr int64_t stride = TileScratch::kStride;
  SK_INLINE PartScores(const TileScratch& t, const Part& part) {
    const int64_t shift = part.begin * stride + part.first;
    scores = t.scores - shift;
    grad_scores = t.grad_scores - shift;
    derivative = t.derivative - shift;
    kept = t.kept - shift;
  }
};

// Calls body(part) for pieces of the visible parts that fit the scratch memory.
template <class Body>
SK_INLINE void for_pieces(const Geometry& g, const Body& body) {
  for_key_strips(g, [&](const Part& part) {
    for (int64_t q = part.first; q < part.last; q += TileScratch::kQueries)
      for (int64_t k = part.begin; k < part.end; k += TileScratch::kKeys)
        body(Part{k, min(k + TileScratch::kKeys, part.end), q, min(q + TileScratch::kQueries, part.last)});
  });
}

int64_t backward_scratch(const AttentionShape& s) { return TileScratch(s, nullptr).bytes; }

// delta[q] = sum_c dO[q, c] O[q, c], the diagonal of the product O dO^T. It is summed in the order of dP = V dO^T, so
// that dP - delta cancels exactly where one key has all the weight.
void row_products(const AttentionBackward& p, int64_t q0, int64_t queries, const TileScratch& t) {
  BFloat16* out_rows = t.p;  // free until the first tile of scores
  float* product = t.scores;
  for (int64_t q = 0; q < queries; q += 16) {
    pack_rows(p.out, q0 + q, min(16, queries - q), p.shape.value_dim, out_rows);
    multiply(1, 1, t.value_depth, {out_rows, 0, kTileBytes},
             {t.grad_out + q / 16 * t.value_depth * kTileElements, 0, kTileBytes}, product, 16, false);
    for (int64_t i = 0; i < 16; ++i) t.delta[q + i] = product[i * 17];
  }
}

void backward_begin(const AttentionBackward& p, int64_t query_block, void* memory) {
  const AttentionShape& s = p.shape;
  const TileScratch t(s, memory);
  const int64_t q0 = query_block * kBlockQ, queries = min(kBlockQ, p.sequence.queries - q0);
  const TileConfiguration configuration;
  pack_columns(p.query, q0, queries, s.head_dim, t.query);
  pack_columns(p.grad_out, q0, queries, s.value_dim, t.grad_out);
  pack_pairs(p.query, q0, queries, s.head_dim, t.query_pairs);
  pack_pairs(p.grad_out, q0, queries, s.value_dim, t.grad_out_pairs);
  fill_lanes(s, p.sequence, p.bias, 0, q0, queries, 0, t.lanes);
  row_products(p, q0, queries, t);
  for (int64_t q = 0; q < kBlockQ; ++q) {
    // Padding and queries that see no key: exp(score - inf) = 0.
    const float lse = q < queries ? static_cast<const float*>(p.lse)[q0 + q] : -kInfinity<float>;
    const bool sees = lse != -kInfinity<float>;
    t.lse[q] = sees ? lse : kInfinity<float>;
    t.delta[q] = sees ? t.delta[q] : 0.0f;
    t.grad_lse[q] = p.grad_lse && sees ? static_cast<const float*>(p.grad_lse)[q0 + q] : 0.0f;
    t.distance[q] = 0;
  }
  for (int64_t q = 0; q < kBlockQ; ++q) t.delta_lse[q] = t.delta[q] - t.grad_lse[q];
  // The products multiply entries that no pass over the scores writes by the zeros of the padding: they must not be
  // NaN.
  __builtin_memset(t.p, 0, kBlockK * kBlockQ * 2);
  __builtin_memset(t.ds, 0, kBlockK * kBlockQ * 2);
  __builtin_memset(t.grad_query_t, 0, t.key_columns * 16 * kLaneStride * 4);
}

// scores = K Q^T, unscaled, and grad_scores = V dO^T.
void score_products(const AttentionBackward& p, const Geometry& g, const Part& part, const TileScratch& t) {
  const PackedKeys packed(p.shape, p.sequence.keys, p.packed);
  const int64_t first = part.first / 16, rows = tiles(part.end - part.begin, 16);
  const int64_t columns = (part.last - part.first) / 16;
  multiply(rows, columns, t.key_depth, packed.key_rows(g.k0 + part.begin),
           Tiles{t.query, t.key_depth * kTileBytes, kTileBytes}.at(first, 0), t.scores, TileScratch::kStride, false);
  multiply(rows, columns, t.value_depth, packed.value_rows(g.k0 + part.begin),
           Tiles{t.grad_out, t.value_depth * kTileBytes, kTileBytes}.at(first, 0), t.grad_scores, TileScratch::kStride,
           false);
}

// scores = P, grad_scores = dz, both 0 for hidden entries. With dropout, P is the dropped one, of which `out` was made.
void bias_gradients(const AttentionShape& s, const Geometry& g, const Part& part, const TileScratch& t) {
  const PartScores at(t, part);
  constexpr int64_t stride = PartScores::stride;
  for (int64_t k = part.begin; k < part.end; ++k)
    for (int64_t q = part.first; q < part.last; q += W<float>)
      store(at.scores + k * stride + q, load(at.scores + k * stride + q) * static_cast<float>(s.scale));
  if (modified(s)) modify_scores(s, *t.lanes, g.k0, part, at.scores, stride, at.derivative);
  if (s.dropout.active) {
    drop_factors(s.dropout, *t.lanes, g.k0, part, at.kept, stride);
    multiply(part, at.kept, at.grad_scores, stride);
  }
  for_lanes<float>(part.first, part.last, [&](auto vectors, int64_t q) {
    const int64_t corner = part.begin * stride + q;
    score_gradients<float, vectors.count>(at.scores + corner, at.grad_scores + corner, stride, part.end - part.begin,
                                          t.lse + q, nullptr, t.delta + q, t.grad_lse + q);
  });
  if (s.dropout.active) multiply(part, at.kept, at.scores, stride);
  hide(g, part, 0.0f, at.scores, stride);
  hide(g, part, 0.0f, at.grad_scores, stride);
}

// Stores P and dS of keys k and k + 1 and 16 queries, rounded to bfloat16.
SK_INLINE void store_rounded(const TileScratch& t, int64_t k, int64_t q, const __m512 (&p)[2], const __m512 (&ds)[2]) {
  typedef short shorts __attribute__((vector_size(64)));
  const __m512i interleave = bit_cast<__m512i>(constant_lanes<shorts, 32>([](int i) { return i / 2 + (i % 2) * 16; }));
  const auto halves = [](BFloat16* to, __m512i pair) SK_INLINED {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(pair));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + kBlockQ), _mm512_extracti64x4_epi64(pair, 1));
  };
  halves(t.p + k * kBlockQ + q, bit_cast<__m512i>(_mm512_cvtne2ps_pbh(p[1], p[0])));
  const __m512i pair = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(ds[1], ds[0]));
  halves(t.ds + k * kBlockQ + q, pair);
  _mm512_store_si512(t.pairs(k, q), _mm512_permutexvar_epi16(interleave, pair));
}

// The queries from q on that see any key. The products include padding and queries that see none: there P and dS become
// 0, whatever the scores are.
SK_INLINE __mmask16 seeing(const TileScratch& t, int64_t q) {
  return _mm512_cmp_ps_mask(_mm512_load_ps(t.lse + q), _mm512_set1_ps(kInfinity<float>), _CMP_NEQ_UQ);
}

// Rounds P and dS of a part, two keys and 16 queries at a time; of(q)(k, P, dS) computes them.
template <class Of>
SK_INLINE void round_part(const Part& part, const TileScratch& t, const Of& of) {
  for (int64_t q = part.first; q < part.last; q += 16) {
    const auto body = of(q);
    const __mmask16 sees = seeing(t, q);
    const auto entries = [&](int64_t k, __m512& p, __m512& ds) {
      body(k, p, ds);
      p = _mm512_maskz_mov_ps(sees, p);
      ds = _mm512_maskz_mov_ps(sees, ds);
    };
    for (int64_t k = part.begin; k < part.end; k += 2) {
      __m512 p[2] = {}, ds[2] = {};
      entries(k, p[0], ds[0]);
      if (k + 1 < part.end) entries(k + 1, p[1], ds[1]);
      store_rounded(t, k, q, p, ds);
    }
  }
}

// P and dS of 16 unscaled scores and their gradients, where no option changes scores.
struct PlainScores {
  __m512 scale, log2e;
  SK_INLINE explicit PlainScores(const AttentionShape& s)
      : scale(_mm512_set1_ps(static_cast<float>(s.scale))), log2e(_mm512_set1_ps(kLog2e)) {}
  SK_INLINE void operator()(__m512 score, __m512 grad, __m512 lse, __m512 delta, __m512& p, __m512& ds) const {
    // The score is rounded before lse is subtracted, as it was when lse was made: large numbers cancel exactly. NaN
    // stays.
    const __m512 x = _mm512_sub_ps(rounded(_mm512_mul_ps(score, scale)), lse);
    p = exp2_bf16(_mm512_mul_ps(_mm512_min_ps(_mm512_setzero_ps(), x), log2e));
    ds = _mm512_mul_ps(p, _mm512_sub_ps(grad, delta));
  }
};

#if !defined(__AMX_BF16__)
// Both products of R keys by N tiles of queries, and P and dS of them: scores leave the registers once, their gradients
// never. Keys from part.end on and entries outside the band become 0.
template <int R, int N, bool CROSSED>
SK_INLINE void plain_block(const PackedKeys& packed, const Geometry& g, const Part& part, const TileScratch& t,
                           const PlainScores& plain, int64_t k, int64_t q) {
  alignas(64) float scores[R][N][16];
  __m512 sum[R][N];
  dot_sums<R, N, 64>(t.key_depth, packed.key_rows(g.k0 + k), k % 16,
                     Tiles{t.query, t.key_depth * kTileBytes, kTileBytes}.at(q / 16, 0), sum);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_store_ps(scores[r][n], sum[r][n]);
  dot_sums<R, N, 64>(t.value_depth, packed.value_rows(g.k0 + k), k % 16,
                     Tiles{t.grad_out, t.value_depth * kTileBytes, kTileBytes}.at(q / 16, 0), sum);
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const int64_t column = q + n * 16;
    const __m512 lse = _mm512_load_ps(t.lse + column), delta = _mm512_load_ps(t.delta_lse + column);
    const __mmask16 sees = seeing(t, column);
#pragma GCC unroll 4
    for (int r = 0; r < R; r += 2) {
      __m512 p[2], ds[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        __mmask16 seen = sees;
        if constexpr (CROSSED) {
          const int64_t key = k + r + i;
          if (key >= part.end) seen = 0;
          seen &= static_cast<__mmask16>(~first_lanes(key - g.high - column) & first_lanes(key - g.low + 1 - column));
        }
        plain(_mm512_load_ps(scores[r + i][n]), sum[r + i][n], lse, delta, p[i], ds[i]);
        p[i] = _mm512_maskz_mov_ps(seen, p[i]);
        ds[i] = _mm512_maskz_mov_ps(seen, ds[i]);
      }
      store_rounded(t, k + r, column, p, ds);
    }
  }
}

// P and dS of a part, of any size, without options. Register tiles of at least 8 sums.
template <bool CROSSED>
__attribute__((noinline)) void plain_part(const AttentionBackward& p, const Geometry& g, const Part& part,
                                          const TileScratch& t) {
  const PackedKeys packed(p.shape, p.sequence.keys, p.packed);
  const PlainScores plain(p.shape);
  int64_t q = part.first;
  const auto columns = [&](auto rows, auto tiles_of_queries) SK_INLINED {
    constexpr int R = rows.count, N = tiles_of_queries.count;
    for (int64_t k = part.begin; k < part.end; k += R) plain_block<R, N, CROSSED>(packed, g, part, t, plain, k, q);
    q += N * 16;
  };
  while (part.last - q >= 64) columns(Vectors<4>{}, Vectors<4>{});
  if (part.last - q == 48) columns(Vectors<4>{}, Vectors<3>{});
  else if (part.last - q == 32) columns(Vectors<8>{}, Vectors<2>{});
  else if (part.last - q == 16) columns(Vectors<8>{}, Vectors<1>{});
}
#endif

// As `hide`, by a boolean mask.
void hide_masked(const Lanes<float>& lanes, int64_t k0, const Part& part, float* scores, float* grad_scores) {
  for (int64_t q = part.first; q < part.last; q += 16) {
    for (int64_t begin = part.begin; begin < part.end; begin += 32) {
      const int64_t end = min(begin + 32, part.end);
      const __m512i bits = seen_bits(lanes, q, k0 + begin, k0 + end);
      for (int64_t k = begin; k < end; ++k) {
        const __mmask16 hidden = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(static_cast<int>(1u << (k - begin))));
        const int64_t at = k * PartScores::stride + q;
        _mm512_mask_store_ps(scores + at, hidden, _mm512_set1_ps(-kInfinity<float>));
        _mm512_mask_store_ps(grad_scores + at, hidden, _mm512_setzero_ps());
      }
    }
  }
}

// The products take P and dS in steps of 32: zeros where a step goes beyond the visible part.
void zero_hidden(const Geometry& g, const TileScratch& t) {
  const int64_t end = (g.keys + 31) / 32 * 32, lanes = g.lanes;
  if (!g.crossed) {
    for (int64_t k = g.keys + g.keys % 2; k < end; k += 2)
      for (int64_t q = 0; q < lanes; q += 16) __builtin_memset(t.pairs(k, q), 0, 64);
    return;
  }
  for (int64_t k = g.begin / 32 * 32; k < end; k += kStrip) {
    Part part{k, clamp(g.keys, k, k + kStrip), 0, 0};
    if (k >= g.begin && part.begin < part.end) {
      const Part visible = strip(g, k);
      if (visible.first < visible.last) part = visible;
    }
    const int64_t written = part.first < part.last ? (part.end - k + 1) / 2 : 0;
    for (int64_t q = 0; q < lanes; q += 16) {
      const int64_t rows = q >= part.first && q < part.last ? written : 0;
      __builtin_memset(t.pairs(k, q) + rows * 32, 0, (8 - rows) * 64);
    }
    // The range of queries that see the rows moves to the right from tile to tile: the part to its left was never
    // written.
    const int64_t taken = strip<32>(g, k / 32 * 32).first / 32 * 32;
    for (int64_t row = k; taken < part.first && row < part.end; ++row) {
      __builtin_memset(t.p + row * kBlockQ + taken, 0, (part.first - taken) * 2);
      __builtin_memset(t.ds + row * kBlockQ + taken, 0, (part.first - taken) * 2);
    }
  }
}

bool backward_scores(const AttentionBackward& p, int64_t query_block, int64_t key_block, void* memory) {
  const AttentionShape& s = p.shape;
  const TileScratch t(s, memory);
  const Geometry g = geometry<float>(p.sequence, query_block, key_block);
  if (mask_hides_tile(s, *t.lanes, g.k0, g.begin, g.keys)) return false;
  const TileConfiguration configuration;
  // With a scale that is not positive, the -inf of hidden entries would change.
  const bool few = s.softcap == 0 && !s.alibi && !s.dropout.active && static_cast<float>(s.scale) > 1e-30f;
  const bool boolean = s.mask == MaskType::boolean && t.lanes->cells;
  const PlainScores plain(s);
  static constexpr int64_t stride = PartScores::stride;
  zero_hidden(g, t);
#if !defined(__AMX_BF16__)
  if (few && s.mask == MaskType::none && !p.grad_mask.data && !p.mask_sum.data) {
    for_key_strips(g, [&](const Part& part) {
      if (g.crossed || part.end % 8 != 0) plain_part<true>(p, g, part, t);
      else plain_part<false>(p, g, part, t);
    });
  } else
#endif
    for_pieces(g, [&](const Part& part) {
      const PartScores at(t, part);
      const MaskCell cell = s.mask == MaskType::none
                                ? MaskCell::seen
                                : cells_of(*t.lanes, g.k0, part.begin, part.end, part.first, min(part.last, g.queries));
      if (cell == MaskCell::hidden) {  // a gradient of the mask is 0 there already
        round_part(part, t, [](int64_t) {
          return [](int64_t, __m512& probability, __m512& ds) { probability = ds = _mm512_setzero_ps(); };
        });
        return;
      }
      score_products(p, g, part, t);
      if (few && (boolean || (cell == MaskCell::seen && !p.grad_mask.data && !p.mask_sum.data))) {
        hide(g, part, -kInfinity<float>, at.scores, stride);
        hide(g, part, 0.0f, at.grad_scores, stride);
        if (cell != MaskCell::seen) hide_masked(*t.lanes, g.k0, part, at.scores, at.grad_scores);
        round_part(part, t, [&](int64_t q) {
          return [&plain, scores = at.scores + q, grad_scores = at.grad_scores + q, lse = _mm512_load_ps(t.lse + q),
                  delta = _mm512_load_ps(t.delta_lse + q)](int64_t k, __m512& probability, __m512& ds) {
            plain(_mm512_load_ps(scores + k * stride), _mm512_load_ps(grad_scores + k * stride), lse, delta,
                  probability, ds);
          };
        });
        return;
      }
      bias_gradients(s, g, part, t);
      if (p.distance) add_distances(*t.lanes, g.k0, part, at.grad_scores, stride, t.distance);
      if (p.grad_mask.data) {
        char* corner = static_cast<char*>(p.grad_mask.data) + (g.q0 * p.grad_mask.stride + g.k0) * mask_size(s.mask);
        write_to_mask(s.mask, part, g.queries, at.grad_scores, stride, corner, p.grad_mask.stride);
      }
      if (p.mask_sum.data) {
        float* sum = static_cast<float*>(p.mask_sum.data) + g.k0;
        add_to_mask(part, g.queries, at.grad_scores, stride, sum, p.mask_sum.stride);
      }
      if (s.softcap != 0) {
        multiply(part, at.derivative, at.grad_scores, stride);
        hide(g, part, 0.0f, at.grad_scores, stride);  // again: the derivative of a hidden entry may be NaN
      }
      round_part(part, t, [&](int64_t q) {
        return [scores = at.scores + q, grad_scores = at.grad_scores + q](int64_t k, __m512& probability, __m512& ds) {
          probability = _mm512_load_ps(scores + k * stride);
          ds = _mm512_load_ps(grad_scores + k * stride);
        };
      });
    });
  // dQ^T[d, q] += sum_k K[k, d] dS[k, q]
  const PackedKeys packed(s, p.sequence.keys, p.packed);
  const Tiles key_t = packed.key_transposed(g.k0);
  const Tiles pairs{t.ds_pairs, kTileBytes, TileScratch::kQueryTiles * kTileBytes};
  if (!g.crossed) {
    multiply(t.key_columns, g.lanes / 16, tiles(g.keys, 32), key_t, pairs, t.grad_query_t, kLaneStride, true);
    return true;
  }
  for_query_strips<32>(g, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
    const int64_t step = first / 32;
    if (first < last)
      multiply(t.key_columns, tiles(end - begin, 16), tiles(last, 32) - step, key_t.at(0, step),
               pairs.at(begin / 16, step), t.grad_query_t + begin, kLaneStride, true);
  });
  return true;
}

void backward_keys(const AttentionBackward& p, int64_t query_block, int64_t key_block, bool visible, bool first,
                   bool last, void* memory) {
  const AttentionShape& s = p.shape;
  const TileScratch t(s, memory);
  const Geometry g = geometry<float>(p.sequence, query_block, key_block);
  const int64_t keys = min(kBlockK, p.sequence.keys - g.k0);
  float *key_sum = at<float>(p.key_sum, g.k0), *value_sum = at<float>(p.value_sum, g.k0);
  const int64_t key_stride = p.key_sum.stride, value_stride = p.value_sum.stride;
  bool accumulate = !first;
  if (first && (g.crossed || g.keys < keys || !visible)) {  // some rows of the sums are not written below
    for (int64_t k = 0; k < keys; ++k) {
      __builtin_memset(key_sum + k * key_stride, 0, t.key_columns * 64);
      __builtin_memset(value_sum + k * value_stride, 0, t.value_columns * 64);
    }
    accumulate = true;
  }
  // dV[k, c] += sum_q P[k, q] dO[q, c],  dK[k, d] += sum_q dS[k, q] Q[q, d]
  if (visible) {
    const TileConfiguration configuration;
    const Tiles grad_out{t.grad_out_pairs, kTileBytes, t.value_columns * kTileBytes};
    const Tiles query{t.query_pairs, kTileBytes, t.key_columns * kTileBytes};
    for_key_strips<32>(g, [&](const Part& part) {
      const int64_t step = part.first / 32, steps = tiles(part.last, 32) - step, rows = part.end - part.begin;
      multiply_rows(rows, t.value_columns, steps, t.rows(t.p, part.begin).at(0, step), grad_out.at(0, step),
                    value_sum + part.begin * value_stride, value_stride, accumulate);
      multiply_rows(rows, t.key_columns, steps, t.rows(t.ds, part.begin).at(0, step), query.at(0, step),
                    key_sum + part.begin * key_stride, key_stride, accumulate);
    });
  }
  if (last) {
    write_rows(key_sum, key_stride, keys, s.head_dim, static_cast<float>(s.scale), at<BFloat16>(p.grad_key, g.k0),
               p.grad_key.stride);
    write_rows(value_sum, value_stride, keys, s.value_dim, 1.0f, at<BFloat16>(p.grad_value, g.k0), p.grad_value.stride);
  }
}

void backward_end(const AttentionBackward& p, int64_t query_block, void* memory) {
  const AttentionShape& s = p.shape;
  const TileScratch t(s, memory);
  const int64_t q0 = query_block * kBlockQ, queries = min(kBlockQ, p.sequence.queries - q0);
  for (int64_t q = 0; q < queries; q += 16) {
    for (int64_t d = 0; d < s.head_dim; d += 16) {
      Vec<float> v[16];
      for (int64_t i = 0; i < 16; ++i)
        v[i] = load(t.grad_query_t + (d + i) * kLaneStride + q) * static_cast<float>(s.scale);
      transpose_square<float>(v);
      for (int64_t i = 0; i < min(16, queries - q); ++i)
        store_upto(at<BFloat16>(p.grad_query, q0 + q + i) + d, v[i], s.head_dim - d);
    }
  }
  for (int64_t q = 0; p.distance && q < queries; ++q) static_cast<float*>(p.distance)[q0 + q] = t.distance[q];
}

void mask_sum(const AttentionBackward& p, int64_t query_block, int64_t key_block, void* sum, int64_t stride,
              void* memory) {
  const AttentionShape& s = p.shape;
  const TileScratch t(s, memory);
  const Geometry g = geometry<float>(p.sequence, query_block, key_block);
  if (mask_hides_tile(s, *t.lanes, g.k0, g.begin, g.keys)) return;
  const TileConfiguration configuration;
  for_pieces(g, [&](const Part& part) {
    score_products(p, g, part, t);
    bias_gradients(s, g, part, t);
    add_to_mask(part, g.queries, PartScores(t, part).grad_scores, PartScores::stride, static_cast<float*>(sum), stride);
  });
}

void mask_write(const AttentionShape& s, const void* sum, int64_t stride, int64_t rows, int64_t columns,
                MutableRows grad_mask) {
  write_mask(s, static_cast<const float*>(sum), stride, rows, columns, grad_mask);
}

// ---- entry points --------------------------------------------------------------------------------------------------

int64_t padded(Dtype, int64_t dim) { return round_up<float>(dim); }

template <class Scratch>
int64_t bytes_of(const AttentionShape& s) {
  return Scratch(s, nullptr).bytes;
}

// Without tiles a block takes two to three times as long: there the decode kernels stay ahead up to their limit.
#if defined(__AMX_BF16__)
constexpr int64_t kTierDecodeQueries = kDecodeQueries;
#else
constexpr int64_t kTierDecodeQueries = kDecodeRows;
#endif

}  // namespace

const AttentionKernels attention_bf16_kernels = {
    .block_q = kBlockQ,
    .block_k = kBlockK,
    .padded = padded,
    .pack_bytes = pack_bytes,
    .pack = pack,
    .forward_scratch = forward_scratch,
    .backward_scratch = backward_scratch,
    .forward = forward,
    .decode_rows = kDecodeRows,
    .decode_queries = kTierDecodeQueries,
    .decode_keys = kDecodeKeys,
    .decode_scratch = bytes_of<DecodeScratch<float>>,
    .decode_partial = bytes_of<DecodePartial<float>>,
    .decode_forward = decode_chunk<BFloat16>,
    .decode_combine = decode_combine_rows<BFloat16>,
    .backward_begin = backward_begin,
    .backward_scores = backward_scores,
    .backward_keys = backward_keys,
    .backward_end = backward_end,
    .mask_sum = mask_sum,
    .mask_write = mask_write,
};

}  // namespace SK_TIER
}  // namespace seqkern
