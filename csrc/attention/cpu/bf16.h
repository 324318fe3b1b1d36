// Operands of attention's products in bfloat16, and exp2.
//
// A tile is 16 rows of 64 bytes. A left tile is 16 rows of 32 bfloat16. Row i of a right tile holds rows 2i and 2i + 1
// of the operand, interleaved as pairs. Packed operands are consecutive tiles of 1 KB, padded with zeros:
//
//   rows        left tiles of the matrix as it lies: 16 rows by 32 columns
//   transposed  left tiles of its transpose: 16 columns by 32 rows
//   columns     right tiles of its transpose: a tile multiplies 32 columns, and gives 16 rows as the result's columns
//   pairs       right tiles of the matrix as it lies: 32 rows by 16 columns
#pragma once

#include "scores.h"

namespace seqkern {
namespace SK_TIER {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileElements = kTileBytes / 2;
constexpr float kLog2e = 1.44269504088896f;

SK_INLINE int64_t tiles(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// ---- packing -------------------------------------------------------------------------------------------------------

SK_INLINE __mmask32 first_lanes(int64_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << max(n, 0)) - 1; }

// 32 columns of a row from `column` on; those from `columns` on are zero.
SK_INLINE __m512i load_columns(const BFloat16* row, int64_t column, int64_t columns) {
  return _mm512_maskz_loadu_epi16(first_lanes(columns - column), row + column);
}
// 16 columns of two rows, interleaved as pairs.
SK_INLINE __m512i load_pairs(const Rows& m, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const __mmask16 mask = static_cast<__mmask16>(first_lanes(min(columns - column, 16)));
  __m512i pair = _mm512_setzero_si512();
  if (row < rows) pair = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at<BFloat16>(m, row) + column));
  if (row + 1 < rows) {
    const __m256i second = _mm256_maskz_loadu_epi16(mask, at<BFloat16>(m, row + 1) + column);
    pair = _mm512_or_si512(pair, _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
  }
  return pair;
}

// Rows [first, first + count) of m: tile (row / 16, column / 32), columns fastest.
inline void pack_rows(const Rows& m, int64_t first, int64_t count, int64_t columns, BFloat16* to) {
  const int64_t depth = tiles(columns, 32);
  for (int64_t r = 0; r < (count + 15) / 16 * 16; ++r) {
    for (int64_t d = 0; d < depth; ++d) {
      const __m512i v = r < count ? load_columns(at<BFloat16>(m, first + r), d * 32, columns) : _mm512_setzero_si512();
      _mm512_store_si512(to + ((r / 16) * depth + d) * kTileElements + r % 16 * 32, v);
    }
  }
}

// Tile (row / 16, column / 32), columns fastest. Its row i holds columns 2i and 2i + 1 of 16 rows of m.
inline void pack_columns(const Rows& m, int64_t first, int64_t count, int64_t columns, BFloat16* to) {
  const int64_t depth = tiles(columns, 32);
  for (int64_t t = 0; t < tiles(count, 16); ++t) {
    for (int64_t d = 0; d < depth; ++d) {
      Vec<float> v[16];
      for (int r = 0; r < 16; ++r) {
        const bool exists = t * 16 + r < count;
        v[r] = bit_cast<Vec<float>>(exists ? load_columns(at<BFloat16>(m, first + t * 16 + r), d * 32, columns)
                                           : _mm512_setzero_si512());
      }
      transpose_square<float>(v);
      BFloat16* tile = to + (t * depth + d) * kTileElements;
      for (int r = 0; r < 16; ++r) _mm512_store_si512(tile + r * 32, bit_cast<__m512i>(v[r]));
    }
  }
}

// Tile (row / 32, column / 16), columns fastest. Its row i holds rows 2i and 2i + 1 of m.
inline void pack_pairs(const Rows& m, int64_t first, int64_t count, int64_t columns, BFloat16* to) {
  for (int64_t t = 0; t < tiles(count, 32); ++t)
    for (int64_t c = 0; c < tiles(columns, 16); ++c)
      for (int64_t i = 0; i < 16; ++i)
        _mm512_store_si512(to + (t * tiles(columns, 16) + c) * kTileElements + i * 32,
                           load_pairs(m, first + t * 32 + 2 * i, first + count, c * 16, columns));
}

// Tile (row / 32, column / 16), columns fastest, `width` of them. Its rows are 16 columns of m, each with 32 rows of m.
// Numbers that are not finite become 0, because 0 times such a number would be NaN where a row is hidden; `bad`, one
// flag for every 32 rows, marks them.
inline void pack_transposed(const Rows& m, int64_t first, int64_t count, int64_t columns, int64_t width, BFloat16* to,
                            uint8_t* bad) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  for (int64_t t = 0; t < tiles(count, 32); ++t) {
    __mmask32 finite = ~__mmask32{0};
    for (int64_t c = 0; c < width; ++c) {
      Vec<float> v[16];
      for (int64_t i = 0; i < 16; ++i) {
        const __m512i pair = load_pairs(m, first + t * 32 + 2 * i, first + count, c * 16, columns);
        const __mmask32 kept = _mm512_cmpneq_epi16_mask(_mm512_and_si512(pair, exponent), exponent);
        finite &= kept;
        v[i] = bit_cast<Vec<float>>(_mm512_maskz_mov_epi16(kept, pair));
      }
      transpose_square<float>(v);
      BFloat16* tile = to + (t * width + c) * kTileElements;
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(tile + i * 32, bit_cast<__m512i>(v[i]));
    }
    if (bad) bad[t] = finite != ~__mmask32{0};
  }
}

// ---- exp2 ----------------------------------------------------------------------------------------------------------

// 2^x = 2^floor(x) p(x - floor(x)) with a relative error of 3e-6, for results that are rounded to bfloat16 (4e-3). 0 at
// -inf.
SK_INLINE __m512 exp2_bf16(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_set1_ps(0x1.b7f738p-7f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.abf866p-5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ee2452p-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.62d6c6p-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
