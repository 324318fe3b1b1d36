// Attention's products in bfloat16 with float32 sums: on matrix tiles (AMX), or by bf16 dot products (AVX512-BF16).
// Both take the same operands (bf16.h).
//
// VDPBF16PS adds both products of each of 16 pairs to 16 floats. A row of a right tile is multiplied by a pair of a
// left tile's row, which is broadcast as if it were a float. The register tile is 4 rows by 4 column tiles: 16
// accumulators hide the latency of 6 cycles at one instruction a cycle (Zen 4). Alternatives that lost are in NOTES.md.
#pragma once

#include "bf16.h"
#include "matrix_tiles.h"

namespace seqkern {
namespace SK_TIER {
namespace {

#if defined(__AMX_BF16__)
// ---- matrix tiles --------------------------------------------------------------------------------------------------

// An element of C does not depend on the other tiles.
inline void multiply(int64_t row_tiles, int64_t column_tiles, int64_t steps, const Tiles& a, const Tiles& b, float* c,
                     int64_t ldc, bool accumulate) {
  for (int64_t n = 0; n < column_tiles; n += 2) {
    const bool two = n + 1 < column_tiles;
    for (int64_t m = 0; m < row_tiles; m += 2) {
      float* corner = c + m * 16 * ldc + n * 16;
      const Tiles left = a.at(m, 0), right = b.at(n, 0);
      const Addend addend{accumulate ? corner : nullptr, ldc, 16 * ldc};
      if (m + 1 < row_tiles) {
        if (two) tile_block<2, 2>(steps, left, right, corner, ldc, 16 * ldc, addend);
        else tile_block<2, 1>(steps, left, right, corner, ldc, 16 * ldc, addend);
      } else {
        if (two) tile_block<1, 2>(steps, left, right, corner, ldc, 16 * ldc, addend);
        else tile_block<1, 1>(steps, left, right, corner, ldc, 16 * ldc, addend);
      }
    }
  }
}

// The same where C ends after `rows` rows: the last tile goes through scratch.
inline void multiply_rows(int64_t rows, int64_t column_tiles, int64_t steps, const Tiles& a, const Tiles& b, float* c,
                          int64_t ldc, bool accumulate) {
  const int64_t whole = rows / 16, rest = rows % 16;
  if (whole > 0) multiply(whole, column_tiles, steps, a, b, c, ldc, accumulate);
  if (rest == 0) return;
  alignas(64) float last[16 * 16] = {};
  for (int64_t n = 0; n < column_tiles; ++n) {
    float* corner = c + whole * 16 * ldc + n * 16;
    for (int64_t r = 0; accumulate && r < rest; ++r) store(last + r * 16, load(corner + r * ldc));
    tile_block<1, 1>(steps, a.at(whole, 0), b.at(n, 0), last, 16, 0, {accumulate ? last : nullptr, 16, 0});
    for (int64_t r = 0; r < rest; ++r) store(corner + r * ldc, load(last + r * 16));
  }
}

// A group's scores, (32, 32), in tiles 0 to 3: begin zeroes them, add adds steps [from, to) of K Q^T, end stores them.
SK_INLINE void scores_begin() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
SK_INLINE void scores_add(const BFloat16* key, const BFloat16* query, int64_t depth, int64_t from, int64_t to) {
#pragma GCC unroll 4
  for (int64_t d = from; d < to; ++d) {
    SK_TILE_LOAD(4, key + d * kTileElements, 64);
    SK_TILE_LOAD(6, query + d * kTileElements, 64);
    _tile_dpbf16ps(0, 4, 6);
    SK_TILE_LOAD(7, query + (depth + d) * kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    SK_TILE_LOAD(5, key + (depth + d) * kTileElements, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
SK_INLINE void scores_end(float* scores) {
  SK_TILE_STORE(0, scores, 4 * 32);
  SK_TILE_STORE(1, scores + 16, 4 * 32);
  SK_TILE_STORE(2, scores + 16 * 32, 4 * 32);
  SK_TILE_STORE(3, scores + 16 * 32 + 16, 4 * 32);
}

// The three together.
SK_INLINE void scores_product(const BFloat16* key, const BFloat16* query, int64_t depth, float* scores) {
  scores_begin();
  scores_add(key, query, depth, 0, depth);
  scores_end(scores);
}

// O^T, 32 columns of V by 32 queries, in tiles 4 to 7.
SK_INLINE void out_begin(const float* out) {
  SK_TILE_LOAD(4, out, 64);
  SK_TILE_LOAD(5, out + 256, 64);
  SK_TILE_LOAD(6, out + 2 * 256, 64);
  SK_TILE_LOAD(7, out + 3 * 256, 64);
}
SK_INLINE void out_add(const BFloat16* value_t, const BFloat16* weights) {
  SK_TILE_LOAD(0, value_t, 64);
  SK_TILE_LOAD(2, weights, 64);
  _tile_dpbf16ps(4, 0, 2);
  SK_TILE_LOAD(3, weights + kTileElements, 64);
  _tile_dpbf16ps(5, 0, 3);
  SK_TILE_LOAD(1, value_t + kTileElements, 64);
  _tile_dpbf16ps(6, 1, 2);
  _tile_dpbf16ps(7, 1, 3);
}
SK_INLINE void out_end(float* out) {
  SK_TILE_STORE(4, out, 64);
  SK_TILE_STORE(5, out + 256, 64);
  SK_TILE_STORE(6, out + 2 * 256, 64);
  SK_TILE_STORE(7, out + 3 * 256, 64);
}
// The three together, over `groups` groups of 32 keys, whose V are `value_stride` elements apart.
SK_INLINE void out_product(const BFloat16* value_t, int64_t value_stride, const BFloat16* weights, int64_t groups,
                           float* out) {
  out_begin(out);
  for (int64_t g = 0; g < groups; ++g) out_add(value_t + g * value_stride, weights + g * 2 * kTileElements);
  out_end(out);
}

#else
// ---- dot products --------------------------------------------------------------------------------------------------

class TileConfiguration {
 public:
  TileConfiguration() {}
};

// sum = A B for R rows, from row `row` of A's first tile on, and N column tiles. A's stride STRIDE is known to the
// compiler: the addresses of R rows are then one register and constants.
template <int R, int N, int STRIDE>
SK_INLINE void dot_sums(int64_t steps, const Tiles& a, int64_t row, const Tiles& b, __m512 (&sum)[R][N]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = _mm512_setzero_ps();
  const char *left = static_cast<const char*>(a.data) + row * STRIDE, *right = static_cast<const char*>(b.data);
  for (int64_t k = 0; k < steps; ++k, left += a.depth, right += b.depth) {
    for (int64_t i = 0; i < 16; ++i) {
      __m512i columns[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) columns[n] = _mm512_load_si512(right + n * b.outer + i * 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float pair;
        __builtin_memcpy(&pair, left + r * STRIDE + i * 4, 4);
        const __m512bh row_pair = bit_cast<__m512bh>(_mm512_set1_ps(pair));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = _mm512_dpbf16_ps(sum[r][n], row_pair, bit_cast<__m512bh>(columns[n]));
      }
    }
  }
}

// C (+)= A B for the same; C's tiles are `c_tile` apart.
template <int R, int N, int STRIDE>
SK_INLINE void dot_block(int64_t steps, const Tiles& a, int64_t row, const Tiles& b, float* c, int64_t ldc,
                         int64_t c_tile, bool accumulate) {
  // C is wanted last, and by then it has come from L3.
  for (int r = 0; accumulate && r < R; ++r)
    for (int n = 0; n < N; ++n) __builtin_prefetch(c + r * ldc + n * c_tile, 1);
  __m512 sum[R][N];
  dot_sums<R, N, STRIDE>(steps, a, row, b, sum);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* at = c + r * ldc + n * c_tile;
      _mm512_storeu_ps(at, accumulate ? _mm512_add_ps(_mm512_loadu_ps(at), sum[r][n]) : sum[r][n]);
    }
}

// N column tiles for all rows: R rows at a time, the rest one by one.
template <int R, int N, int STRIDE>
SK_INLINE void dot_columns(int64_t rows, int64_t steps, const Tiles& a, const Tiles& b, float* c, int64_t ldc,
                           bool accumulate) {
  const int64_t whole = rows / R * R;
  for (int64_t r = 0; r < whole; r += R)
    dot_block<R, N, STRIDE>(steps, a.at(r / 16, 0), r % 16, b, c + r * ldc, ldc, 16, accumulate);
  for (int64_t r = whole; r < rows; ++r)
    dot_block<1, N, STRIDE>(steps, a.at(r / 16, 0), r % 16, b, c + r * ldc, ldc, 16, accumulate);
}

template <int STRIDE>
__attribute__((noinline)) void dot_matrix(int64_t rows, int64_t column_tiles, int64_t steps, const Tiles& a,
                                          const Tiles& b, float* c, int64_t ldc, bool accumulate) {
  int64_t n = 0;
  for (; n + 4 <= column_tiles; n += 4)
    dot_columns<4, 4, STRIDE>(rows, steps, a, b.at(n, 0), c + n * 16, ldc, accumulate);
  for (; n + 2 <= column_tiles; n += 2)
    dot_columns<8, 2, STRIDE>(rows, steps, a, b.at(n, 0), c + n * 16, ldc, accumulate);
  if (n < column_tiles) dot_columns<8, 1, STRIDE>(rows, steps, a, b.at(n, 0), c + n * 16, ldc, accumulate);
}
inline void multiply_rows(int64_t rows, int64_t column_tiles, int64_t steps, const Tiles& a, const Tiles& b, float* c,
                          int64_t ldc, bool accumulate) {
  if (a.stride == 64) dot_matrix<64>(rows, column_tiles, steps, a, b, c, ldc, accumulate);
  else dot_matrix<kBlockQ * 2>(rows, column_tiles, steps, a, b, c, ldc, accumulate);
}
inline void multiply(int64_t row_tiles, int64_t column_tiles, int64_t steps, const Tiles& a, const Tiles& b, float* c,
                     int64_t ldc, bool accumulate) {
  multiply_rows(row_tiles * 16, column_tiles, steps, a, b, c, ldc, accumulate);
}

// A group's scores, (32, 32): K Q^T.
SK_INLINE void scores_product(const BFloat16* key, const BFloat16* query, int64_t depth, float* scores) {
  dot_columns<8, 2, 64>(32, depth, {key, depth * kTileBytes, kTileBytes}, {query, depth * kTileBytes, kTileBytes},
                        scores, 32, false);
}
// O^T, 32 columns of V by 32 queries in four tiles, += V^T P^T over `groups` groups of 32 keys, whose V are
// `value_stride` elements apart.
SK_INLINE void out_product(const BFloat16* value_t, int64_t value_stride, const BFloat16* weights, int64_t groups,
                           float* out) {
  for (int64_t m = 0; m < 2; ++m)
    for (int64_t r = 0; r < 16; r += 8)
      dot_block<8, 2, 64>(groups, {value_t + m * kTileElements, 0, 2 * value_stride}, r,
                          {weights, kTileBytes, 2 * kTileBytes}, out + m * 512 + r * 16, 16, 256, true);
}

#endif

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
