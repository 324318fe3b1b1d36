// Large products on matrix tiles (AMX), with the panels of blocked_gemm.h: C = A B + bias, A and B as bfloat16.
//
// B's panels already are right tiles. A is copied, two row tiles and a slice of the depth at a time, to scratch that
// stays in L1 over all columns of the block; B streams from L2. The sums stay in tiles over the slice, and go to C
// directly after the last slice.
//
// An element of C is the sum, in ascending order, over steps of 32 terms (matrix_tiles.h): it depends neither on the
// blocks nor on the workers.
#pragma once

#include "blocked_gemm.h"
#include "matrix_tiles.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// A slice of A: 32 rows, 32 KB in all, each row a cache line longer.
constexpr int64_t kTileSlice = 256, kStagedStride = kTileSlice + 16, kTileRows32 = 32;
// Blocks have many rows, so that what comes of B from beyond L2 serves all of them. Their sums wait in L2 if a slice is
// not the whole depth.
constexpr int64_t kTileBlockRows = 256, kTileBlockColumns = 512;
constexpr int64_t kTileC = kTileBlockColumns + 16;
constexpr int64_t kTileScratch = kTileRows32 * kStagedStride + kTileBlockRows * kTileC;

inline int64_t cut_for_tiles(Product& p, int64_t threads) {
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  if (p.rows == 0) return 0;
  int64_t count = blocks(p.rows, kTileBlockRows);
  const int64_t column_blocks = blocks(p.columns, kTileBlockColumns), most = blocks(p.rows, kTileRows32);
  while (count < most && count * column_blocks < threads) ++count;
  p.block_rows = blocks(blocks(p.rows, count), kTileRows32) * kTileRows32, p.block_columns = kTileBlockColumns;
  return blocks(p.rows, p.block_rows) * column_blocks;
}

// Copies A(m0 .. m0 + rows, k0 .. k0 + depth) for left tiles: rows of words, padded with zeros to whole steps. Rows
// beyond `rows` are not written. k0 is the first number of a step.
template <class T>
void stage_rows(const Product& p, int64_t m0, int64_t rows, int64_t k0, int64_t depth, float* staged) {
  const int64_t all = padded_words(depth);
  if (p.a_k_stride == 1) {
    for (int64_t m = 0; m < rows; ++m) {
      const T* row =
          p.a_rows ? static_cast<const T*>(p.a_rows[m0 + m]) : static_cast<const T*>(p.a) + (m0 + m) * p.a_row_stride;
      for (int64_t k = 0; k < all; k += W<float>)
        store(staged + m * kStagedStride + k, row ? load_words(row + k0 + k * kTerms, depth - k * kTerms) : vf32{});
    }
    return;
  }
  const T* in = static_cast<const T*>(p.a) + m0 * p.a_row_stride + k0 * p.a_k_stride;
  for (int64_t k = 0; k < all; k += W<float>) {
    for (int64_t m = 0; m < rows; m += W<float>) {
      vf32 block[W<float>];
      for (int64_t i = 0; i < W<float>; ++i) {
        const auto row = [&](int64_t j) {
          const int64_t at = (k + i) * kTerms + j;
          return at < depth ? in + at * p.a_k_stride : nullptr;
        };
        block[i] = load_rows<T>(row, m, rows - m);
      }
      transpose_square<float>(block);
      for (int64_t i = 0; i < W<float>; ++i) store(staged + (m + i) * kStagedStride + k, block[i]);
    }
  }
}

// Work item: one block of C; `item` counts the rows fastest, so the next block finds B's panels in L2.
inline void multiply_tiles_item(const Product& p, int64_t item, float* scratch) {
  const int64_t row_blocks = (p.rows + p.block_rows - 1) / p.block_rows;
  const int64_t m0 = item % row_blocks * p.block_rows, n0 = item / row_blocks * p.block_columns;
  const int64_t rows = p.rows - m0 < p.block_rows ? p.rows - m0 : p.block_rows;
  const int64_t columns = p.columns - n0 < p.block_columns ? p.columns - n0 : p.block_columns;
  const int64_t all = padded_words(p.depth), panel_words = all * kPanel<float>;
  const float* b = static_cast<const float*>(p.packed_b) + n0 / kPanel<float> * panel_words;
  float *staged = scratch, *sums = scratch + kTileRows32 * kStagedStride;
  const TileConfiguration configuration;
  // Sums without bias, gather or conversion are formed in place.
  const bool in_place = p.c_type == Dtype::f32 && !p.bias && !p.c_rows;
  for (int64_t k = 0; k == 0 || k < all; k += kTileSlice) {
    const int64_t first = k * kTerms, left = p.depth - first;
    const int64_t depth = left < kTileSlice * kTerms ? left : kTileSlice * kTerms, steps = padded_words(depth) / 16;
    const bool last = k + kTileSlice >= all;
    for (int64_t m = 0; m < rows; m += kTileRows32) {
      const int64_t some = rows - m < kTileRows32 ? rows - m : kTileRows32;
      by_element<float>(p.a_type, [&](auto t) { stage_rows<decltype(t)>(p, m0 + m, some, first, depth, staged); });
      const Tiles a{staged, 16 * kStagedStride * 4, 64, kStagedStride * 4};
      float* c = all > kTileSlice ? sums + m * kTileC : sums;
      for (int64_t n = 0; n < columns; n += 32) {
        const int64_t width = columns - n < 32 ? columns - n : 32;
        const Tiles panel{b + n / kPanel<float> * panel_words + k * kPanel<float> + n % kPanel<float> * 16, 1024,
                          kPanelVecs * 1024};
        if (in_place && some == 32 && width == 32) {
          float* out = static_cast<float*>(p.c) + (m0 + m) * p.c_stride + n0 + n;
          const Addend before{k > 0 || p.accumulate ? out : nullptr, p.c_stride, 16 * p.c_stride};
          tile_block<2, 2>(steps, a, panel, out, p.c_stride, 16 * p.c_stride, before);
          continue;
        }
        const Addend before{k > 0 ? c + n : nullptr, kTileC, 16 * kTileC};
        if (last) prefetch_tile(p, m0 + m, some, n0 + n, width);
        if (some > 16) tile_block<2, 2>(steps, a, panel, c + n, kTileC, 16 * kTileC, before);
        else tile_block<1, 2>(steps, a, panel, c + n, kTileC, 0, before);
        if (last) write_back<float>(p, m0 + m, some, n0 + n, width, c + n, kTileC);
      }
    }
  }
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
