// Products of a few rows on matrix tiles (AMX): with packed panels, and with weights read in place. The same functions
// as in few_rows_panels.h. On every path an element of C is the sum, in ascending order, over steps of 32 terms
// (matrix_tiles.h): it depends only on its own row of A and column of B.
//
// A tile of few rows takes as long as a full one if the right tile changes with every product; panels stream from L2 at
// that rate.
#pragma once

#include "tile_gemm.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Tile configuration for `rows` rows. From 16 rows on, the last tile overlaps the one before it.
using RowTiles = TileConfiguration;

constexpr int whole_tile(int64_t) { return 32; }
template <int NV>
constexpr int kTileRows = 32;
template <int NV>
constexpr int kTilePanels = 1;
template <int NV>
int64_t panel_group(int64_t) {
  return 1;
}

// A panel of NV column tiles times the row tiles that begin at `first` and `second`, or at `first` only if they are
// equal.
template <int NV, class Other = NoOther>
SK_INLINE void panel_block(int64_t first, int64_t second, int64_t steps, const float* a, int64_t lda, const float* b,
                           float* c, int64_t ldc, const Addend& addend, const Other& other = Other{}) {
  const Tiles right{b, 1024, NV * 1024};
  const auto left = [&](int64_t row) { return Tiles{a + row * lda, (second - first) * lda * 4, 64, lda * 4}; };
  const auto from = [&](int64_t row, int64_t n) {
    return Addend{addend.data ? addend.data + row * addend.ld + n : nullptr, addend.ld, (second - first) * addend.ld};
  };
  if (NV == 4 && second != first) {
    for (int64_t n = 0; n < 4; n += 2)
      tile_block<2, 2>(steps, left(first), right.at(n, 0), c + first * ldc + n * 16, ldc, (second - first) * ldc,
                       from(first, n * 16), other);
    return;
  }
  for (int64_t i = 0; i < (second != first ? 2 : 1); ++i) {
    const int64_t row = i == 0 ? first : second;
    tile_row<NV>(steps, left(row), right, c + row * ldc, ldc, from(row, 0), other);
  }
}

// C = A B + addend for one panel over `steps` of the depth. Rows in the overlap of the last two tiles are computed
// twice, with the same result. Where the addend is C itself at most 32 rows are allowed: a block reads all of them
// before it writes.
template <int NV, class Other = NoOther>
SK_INLINE void panel_rows(int64_t rows, int64_t steps, const float* a, int64_t lda, const float* b, float* c,
                          int64_t ldc, const Addend& addend, const Other& other = Other{}) {
  const int64_t tiles = (rows + 15) / 16;
  const auto row = [&](int64_t tile) { return tile * 16 + 16 <= rows || rows < 16 ? tile * 16 : rows - 16; };
  for (int64_t tile = 0; tile < tiles; tile += 2) {
    const int64_t first = row(tile), second = tile + 1 < tiles ? row(tile + 1) : first;
    panel_block<NV>(first, second, steps, a, lda, b, c, ldc, addend, other);
  }
}

// C = A B for `panels` panels of B, each over the whole depth, one after the other. C's panels are c_panel apart, its
// rows ldc. other() is called between the steps, panel_steps() times.
template <int NV, class Other>
SK_INLINE void panel_products_beside(int64_t rows, int64_t panels, int64_t depth, const float* a, int64_t lda,
                                     const float* b, float* c, int64_t ldc, int64_t c_panel, const Other& other) {
  if (rows == 0) return;
  const int64_t steps = (depth + 15) / 16;
  for (int64_t q = 0; q < panels; ++q)
    panel_rows<NV>(rows, steps, a, lda, b + q * steps * 16 * NV * 16, c + q * c_panel, ldc, {}, other);
}
// The number of calls of other().
inline int64_t panel_steps(int64_t rows, int64_t panels, int64_t depth) {
  return (rows + 15) / 16 * panels * ((depth + 15) / 16);
}
// As in few_rows_panels.h; before() is called once, for all rows.
template <class A, int NV, class Before>
SK_INLINE void panel_products(int64_t rows, int64_t panels, int64_t depth, const A* a, int64_t lda, const A* b, A* c,
                              int64_t ldc, int64_t c_panel, const A*, const Before& before) {
  if (rows > 0) before(0, rows);
  panel_products_beside<NV>(rows, panels, depth, a, lda, b, c, ldc, c_panel, NoOther{});
}

// ---- weights in place ----------------------------------------------------------------------------------------------

// C = A B for panels of a B whose columns are stored as rows: C^T = B^T A^T. Rows of B^T are left tiles as they are
// stored; pairs of A^T are right tiles, made in unpacked_scratch() of memory.
template <class A>
int64_t unpacked_scratch(int64_t rows, int64_t depth, int64_t) {
  return (rows + 15) / 16 * padded_words(depth) * 16 + 2 * kPanelVecs * 256;
}

// Copies 16 columns of B from `column` on (`count` of them exist), over the step that begins at number k, to a left
// tile.
template <class T>
void copy_left(const T* columns, int64_t count, int64_t n_stride, int64_t numbers, float* tile) {
  for (int64_t n = 0; n < 16; ++n)
    store(tile + n * 16, n < count ? load_words(columns + n * n_stride, numbers) : vf32{});
}

// NV vectors of columns, at(v), with count(v) columns each, times one row tile of A, transposed.
template <int NV, class T, class At, class Count>
SK_INLINE void column_tiles(const At& at, const Count& count, int64_t n_stride, int64_t depth, const float* right,
                            float* copies, float* sums) {
  const char* left[NV];
  bool whole = std::is_same<T, BFloat16>::value;
  for (int v = 0; v < NV; ++v) left[v] = reinterpret_cast<const char*>(at(v)), whole = whole && count(v) == 16;
  const Tiles b{right, 0, 1024};
  const int64_t steps = whole ? depth / 32 : 0, all = padded_words(depth) / 16;
  tile_column<NV>(steps, left, n_stride * 2, 64, b, sums, 16, false);
  for (int64_t k = steps; k < all; ++k) {
    for (int v = 0; v < NV; ++v) {
      copy_left(at(v) + k * 32, count(v), n_stride, depth - k * 32, copies + v * 256);
      left[v] = reinterpret_cast<const char*>(copies + v * 256);
    }
    tile_column<NV>(1, left, 64, 0, b.at(0, k), sums, 16, true);
  }
}

template <int NV, class T>
void unpacked_products_of(int64_t rows, const Matrix& b, int64_t first_panel, int64_t panels, const float* a,
                          int64_t lda, float* c, int64_t ldc, float* scratch) {
  const int64_t depth = padded_words(b.depth), tiles = (rows + 15) / 16, group = b.columns / b.groups;
  float *copies = scratch + tiles * depth * 16, *sums = copies + NV * 256;
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t k = 0; k < depth; k += 16) {
      vf32 block[16];
      for (int64_t i = 0; i < 16; ++i) block[i] = tile * 16 + i < rows ? load(a + (tile * 16 + i) * lda + k) : vf32{};
      transpose_square<float>(block);
      for (int64_t i = 0; i < 16; ++i) store(scratch + (tile * depth + k + i) * 16, block[i]);
    }
  for (int64_t q = 0; q < panels; ++q) {
    const auto column = [&](int64_t v) {
      return b.groups == 1 ? ((first_panel + q) * NV + v) * 16 : v * group + (first_panel + q) * 16;
    };
    const auto count = [&](int64_t v) {
      const int64_t left = b.groups == 1 ? b.columns - column(v) : group - (first_panel + q) * 16;
      return left < 0 ? 0 : left < 16 ? left : int64_t{16};
    };
    const auto at = [&](int64_t v) {
      return static_cast<const T*>(b.data) + (count(v) > 0 ? column(v) * b.n_stride : 0);
    };
    for (int64_t tile = 0; tile < tiles; ++tile) {
      column_tiles<NV, T>(at, count, b.n_stride, b.depth, scratch + tile * depth * 16, copies, sums);
      for (int64_t v = 0; v < NV; ++v) {
        vf32 block[16];
        for (int64_t i = 0; i < 16; ++i) block[i] = load(sums + v * 256 + i * 16);
        transpose_square<float>(block);
        for (int64_t i = 0; i < 16; ++i)
          if (tile * 16 + i < rows) store(c + (tile * 16 + i) * ldc + (q * NV + v) * 16, block[i]);
      }
    }
  }
}

template <class A, int TV, class Before>
SK_INLINE void unpacked_products(int64_t rows, const Matrix& b, int64_t first_panel, int64_t panels, const A* a,
                                 int64_t lda, A* c, int64_t ldc, A* scratch, const Before& before) {
  if (rows == 0) return;
  before(0, rows);
  by_element<A>(b.dtype, [&](auto t) {
    unpacked_products_of<TV, decltype(t)>(rows, b, first_panel, panels, a, lda, c, ldc, scratch);
  });
}
// Rows that the tiles are configured for here.
constexpr int64_t kUnpackedRows = 16;
// Panels of one item: A is transposed once for them.
inline int64_t unpacked_group(int64_t) { return 8; }

// Panels of one item of a row-major B, a slice of the depth at a time: reads long contiguous runs of each row.
template <class A>
constexpr int64_t kSlicePanels = 4;
constexpr int64_t kSliceWords = 128;
template <class A>
constexpr int64_t kSliceScratch = kSlicePanels<A> * kPanel<A> * kSliceWords;

// C = A B for up to kSlicePanels panels of a row-major B, and at most 32 rows.
template <class A>
void slice_products(int64_t rows, int64_t panels, const A* a, int64_t lda, const Matrix& b, int64_t first_panel, A* c,
                    int64_t ldc, A* slice) {
  const int64_t all = padded_words(b.depth);
  by_element<A>(b.dtype, [&](auto t) {
    using T = decltype(t);
    for (int64_t k = 0; k < all; k += kSliceWords) {
      const int64_t depth = all - k < kSliceWords ? all - k : kSliceWords;
      for (int64_t i = 0; i < depth; ++i) {
        const auto source = rows_from<T>(b, (k + i) * kTerms);
        for (int64_t q = 0; q < panels; ++q)
          for (int64_t v = 0; v < kPanelVecs; ++v) {
            const int64_t column = (first_panel + q) * kPanel<A> + v * 16;
            A* to = slice + q * depth * kPanel<A> + (i / 16 * kPanelVecs + v) * 256 + i % 16 * 16;
            store(to, load_rows<T>(source, column, b.columns - column));
          }
      }
      for (int64_t q = 0; q < panels; ++q)
        panel_rows<kPanelVecs>(rows, depth / 16, a + k, lda, slice + q * depth * kPanel<A>, c + q * kPanel<A>, ldc,
                               {k > 0 ? c + q * kPanel<A> : nullptr, ldc});
    }
  });
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
