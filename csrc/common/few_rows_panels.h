// Products of a few rows on vectors: with packed panels, and with weights read in place. Depths and row strides of
// operands are in words (operand.h), those of a Matrix in elements.
#pragma once

#include "blocked_gemm.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// The matrix tiles' configuration (few_rows_tiles.h); empty here.
struct RowTiles {
  explicit RowTiles(int64_t) {}
  ~RowTiles() {}
};

// A register tile: MR rows times NP panels of NV vectors, over one slice of the depth. Many accumulators hide the
// latency of the multiply-add, so one or two rows take several panels at once. The order of each sum is that of
// gemm_tile().
template <class A, int MR, int NP, int NV>
__attribute__((noinline)) void panel_tile(int64_t depth, const A* a, int64_t lda, const A* b, int64_t panel_stride,
                                          A* c, int64_t ldc, int64_t c_panel, bool accumulate) {
  int64_t k = 0;
  do {
    const int64_t end = depth - k < kPanelSlice ? depth : k + kPanelSlice;
    Vec<A> acc[MR][NP][NV] = {};
    for (; k < end; ++k) {
      Vec<A> x[MR];
      for (int i = 0; i < MR; ++i) x[i] = broadcast_word(a + i * lda + k);
      for (int q = 0; q < NP; ++q)
        for (int v = 0; v < NV; ++v) {
          const Vec<A> w = load(b + q * panel_stride + (k * NV + v) * W<A>);
          for (int i = 0; i < MR; ++i) acc[i][q][v] = multiply_add(x[i], w, acc[i][q][v]);
        }
    }
    for (int i = 0; i < MR; ++i)
      for (int q = 0; q < NP; ++q)
        for (int v = 0; v < NV; ++v) {
          A* out = c + i * ldc + q * c_panel + v * W<A>;
          store(out, accumulate ? load(out) + acc[i][q][v] : acc[i][q][v]);
        }
    accumulate = true;
  } while (k < depth);
}

// Depth of a slice of a panel, which L1 keeps over all rows.
constexpr int64_t kPanelDepth = 512 / kPanelVecs;
// Rows of a tile of one panel; panels of a tile of one or two rows.
constexpr int whole_tile(int64_t vectors) { return static_cast<int>(kGemmRows * kPanelVecs / vectors); }
template <int NV>
constexpr int kTileRows = whole_tile(NV);
template <int NV>
constexpr int kTilePanels = NV >= 8 ? 1 : 8 / NV;

// ahead: see gemm_tile().
template <class A, int NV, int R = kTileRows<NV>>
__attribute__((noinline)) void rows_tile(int64_t rows, int64_t depth, const A* a, int64_t lda, const A* b, A* c,
                                         int64_t ldc, bool accumulate, const A* ahead) {
  if (rows == R)
    gemm_tile<A, R, NV, UnitStride::k, kPanelSlice, kPanelPrefetch>(depth, a, lda, 1, b, NV * W<A>, c, ldc, accumulate,
                                                                    ahead);
  else if constexpr (R > 1) rows_tile<A, NV, R - 1>(rows, depth, a, lda, b, c, ldc, accumulate, ahead);
}

// Panels per tile: as many as a tile of one or two rows takes.
template <int NV>
int64_t panel_group(int64_t rows) {
  return rows == 1 ? kTilePanels<NV> : rows == 2 && kTilePanels<NV> > 1 ? kTilePanels<NV> / 2 : 1;
}

// C = A B for `panels` panels of B, each over the whole depth, one after the other, or a panel_group(rows) at once. C's
// panels are c_panel apart, its rows ldc. next: what is read after these panels. before(row_begin, row_end) is called
// before the first tile of these rows.
template <class A, int NV, class Before>
SK_INLINE void panel_products(int64_t rows, int64_t panels, int64_t depth, const A* a, int64_t lda, const A* b, A* c,
                              int64_t ldc, int64_t c_panel, const A* next, const Before& before) {
  constexpr int NP = kTilePanels<NV>, Half = NP > 1 ? NP / 2 : 1;
  const int64_t panel_stride = depth * NV * W<A>;
  if (rows == 0) return;
  if (NP > 1 && rows == 1 && panels == NP) {
    before(0, 1);
    return panel_tile<A, 1, NP, NV>(depth, a, lda, b, panel_stride, c, ldc, c_panel, false);
  }
  if (Half > 1 && rows == 2 && panels == Half) {
    before(0, 2);
    return panel_tile<A, 2, Half, NV>(depth, a, lda, b, panel_stride, c, ldc, c_panel, false);
  }
  const int64_t tiles = (rows + kTileRows<NV> - 1) / kTileRows<NV>, tile_rows = rows / tiles, longer = rows % tiles;
  // The first tiles of a slice prefetch the next one, a line with each term.
  constexpr int64_t line = kLine<A>, lines = NV * W<A> / line;
  for (int64_t q = 0; q < panels; ++q) {
    for (int64_t k = 0; k < depth; k += kPanelDepth) {
      const int64_t slice = depth - k < kPanelDepth ? depth - k : kPanelDepth;
      const bool last = q + 1 == panels && k + slice == depth;
      const A* after = last ? next : b + q * panel_stride + (k + slice) * NV * W<A>;
      for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
        const int64_t count = tile_rows + (tile < longer);
        if (k == 0 && q == 0) before(r, r + count);
        const A* slice_b = b + q * panel_stride + k * NV * W<A>;
        rows_tile<A, NV>(count, slice, a + r * lda + k, lda, slice_b, c + q * c_panel + r * ldc, ldc, k > 0,
                         tile < lines ? after + tile * slice * line : slice_b);
        r += count;
      }
    }
  }
}

// One row times a vector of columns of B, of which the first `count` exist. A column is stored as a row of `depth`
// numbers, so the columns are transposed in registers. W columns are as many streams as a cache holds whose rows are a
// power of two apart: four vectors of columns at a time, for more sums at once, take up to twice as long.
template <class T>
void column_products(const T* columns, int64_t count, int64_t n_stride, int64_t depth, const acc_t<T>* a, acc_t<T>* c) {
  using A = acc_t<T>;
  const int64_t all = words(depth);
  for (int64_t k = 0; k < all; k += kPanelSlice) {
    const int64_t end = all - k < kPanelSlice ? all : k + kPanelSlice;
    Vec<A> sum = {};
    for (int64_t i = k; i < end; i += W<A>) {
      Vec<A> block[W<A>];
      const int64_t left = end - i < W<A> ? end - i : W<A>, first = i * kTerms, numbers = depth - first;
      if (count == W<A> && numbers >= W<A> * kTerms) {
        for (int n = 0; n < W<A>; ++n) block[n] = load_words(columns + n * n_stride + first, W<A> * kTerms);
        transpose_square<A>(block);
        for (int j = 0; j < W<A>; ++j) sum = multiply_add(broadcast_word(a + i + j), block[j], sum);
      } else {
        for (int n = 0; n < W<A>; ++n)
          block[n] = n < count ? load_words(columns + n * n_stride + first, numbers) : Vec<A>{};
        transpose_square<A>(block);
        for (int j = 0; j < W<A>; ++j)
          if (j < left) sum = multiply_add(broadcast_word(a + i + j), block[j], sum);
      }
    }
    store(c, k > 0 ? load(c) + sum : sum);
  }
}

// The same for whole panels, with the same bits as packed panels give.
template <class T>
void one_row_products_of(const Matrix& b, int64_t first_panel, int64_t panels, const acc_t<T>* a, acc_t<T>* c) {
  using A = acc_t<T>;
  const int64_t vectors = panel_width<A>(b.groups) / W<A>, group = b.columns / b.groups;
  for (int64_t i = 0; i < panels * vectors; ++i) {
    const int64_t panel = first_panel + i / vectors, v = i % vectors;
    const int64_t column = b.groups == 1 ? (panel * vectors + v) * W<A> : v * group + panel * W<A>;
    const int64_t left = b.groups == 1 ? b.columns - column : group - panel * W<A>;
    const int64_t count = left < 0 ? 0 : left < W<A> ? left : W<A>;
    column_products<T>(static_cast<const T*>(b.data) + (count > 0 ? column * b.n_stride : 0), count, b.n_stride,
                       b.depth, a, c + i * W<A>);
  }
}
template <class A>
void one_row_products(const Matrix& b, int64_t first_panel, int64_t panels, const A* a, A* c) {
  by_element<A>(b.dtype, [&](auto t) { one_row_products_of<decltype(t)>(b, first_panel, panels, a, c); });
}

// C = A B for panels of a B that is read in place; TV vectors of a panel are side by side in C. Panels are packed as
// they are needed, into unpacked_scratch() of memory. before() as in panel_products().
template <class A>
int64_t unpacked_scratch(int64_t, int64_t depth, int64_t width) {
  return words(depth) * width;
}
template <class A, int TV, class Before>
SK_INLINE void unpacked_products(int64_t rows, const Matrix& b, int64_t first_panel, int64_t panels, const A* a,
                                 int64_t lda, A* c, int64_t ldc, A* packed, const Before& before) {
  if (rows == 0) return;
  if (rows == 1) {
    before(0, 1);
    return one_row_products(b, first_panel, panels, a, c);
  }
  const int64_t width = panel_width<A>(b.groups), depth = words(b.depth);
  for (int64_t q = 0; q < panels; ++q) pack_panel(b, first_panel + q, packed + q * depth * width);
  panel_products<A, TV>(rows, panels * width / (TV * W<A>), depth, a, lda, packed, c, ldc, TV * W<A>, packed, before);
}
constexpr int64_t kUnpackedRows = 0;
// Panels of one item.
inline int64_t unpacked_group(int64_t rows) { return panel_group<kPanelVecs>(rows); }

// Panels of one item of a row-major B, kPanelSlice rows at a time: reads long contiguous runs of each row.
template <class A>
constexpr int64_t kSlicePanels = 512 / kPanel<A>;
template <class A>
constexpr int64_t kSliceScratch = kSlicePanels<A> * kPanel<A> * kPanelSlice;

// Packs words [k, k + depth) of `panels` panels of a row-major B.
template <class T>
void pack_slice(const Matrix& b, int64_t first_panel, int64_t panels, int64_t k, int64_t depth, acc_t<T>* packed) {
  using A = acc_t<T>;
  const int64_t begin = first_panel * kPanel<A>;
  for (int64_t i = 0; i < depth; ++i) {
    const auto rows = rows_from<T>(b, (k + i) * kTerms);
    A* to = packed + i * kPanel<A>;
    for (int64_t q = 0; q < panels; ++q, to += depth * kPanel<A>) {
      const int64_t first = begin + q * kPanel<A>;
      for (int v = 0; v < kPanelVecs; ++v)
        store(to + v * W<A>, load_rows<T>(rows, first + v * W<A>, b.columns - first - v * W<A>));
    }
  }
}

// The same times one row of A, without packing: four words of B at a time, with the sums in L1. Gives `columns`
// columns; c has room for whole vectors.
template <class T>
void multiply_slice(const Matrix& b, int64_t first_column, int64_t columns, int64_t k, int64_t depth, const acc_t<T>* a,
                    acc_t<T>* c, bool accumulate, acc_t<T>* sums) {
  using A = acc_t<T>;
  const auto rows = [&](auto count, int64_t i) {
    constexpr int kRows = decltype(count)::value;
    Vec<A> x[kRows];
    const T* at[kRows][kTerms];
    for (int r = 0; r < kRows; ++r) {
      x[r] = broadcast_word(a + i + r);
      for (int64_t t = 0; t < kTerms; ++t) at[r][t] = source_row<T>(b, (k + i + r) * kTerms + t);
    }
    const auto add = [&](int64_t u, int64_t n) {
      Vec<A> sum = load(sums + u);
      for (int r = 0; r < kRows; ++r)
        sum = multiply_add(x[r], load_rows<T>([&](int64_t t) { return at[r][t]; }, first_column + u, n), sum);
      store(sums + u, sum);
    };
    int64_t u = 0;
    for (; u + W<A> <= columns; u += W<A>) add(u, W<A>);
    if (u < columns) add(u, columns - u);
  };
  for (int64_t u = 0; u < columns; u += W<A>) store(sums + u, Vec<A>{});
  int64_t i = 0;
  for (; i + 4 <= depth; i += 4) rows(std::integral_constant<int, 4>{}, i);
  for (; i < depth; ++i) rows(std::integral_constant<int, 1>{}, i);
  for (int64_t u = 0; u < columns; u += W<A>) store(c + u, accumulate ? load(c + u) + load(sums + u) : load(sums + u));
}

// C (+)= A B for up to kSlicePanels panels of a row-major B, with the same bits as packed panels give.
template <class T>
void slice_products_of(int64_t rows, int64_t panels, const acc_t<T>* a, int64_t lda, const Matrix& b,
                       int64_t first_panel, acc_t<T>* c, int64_t ldc, acc_t<T>* slice) {
  using A = acc_t<T>;
  const int64_t first = first_panel * kPanel<A>, left = b.columns - first, width = panels * kPanel<A>;
  const int64_t all = words(b.depth);
  for (int64_t k = 0; k < all; k += kPanelSlice) {
    const int64_t depth = all - k < kPanelSlice ? all - k : kPanelSlice;
    if (rows == 1) {
      multiply_slice<T>(b, first, left < width ? left : width, k, depth, a + k, c, k > 0, slice);
      continue;
    }
    pack_slice<T>(b, first_panel, panels, k, depth, slice);
    for (int64_t q = 0; q < panels; ++q)
      for (int64_t r = 0; r < rows; r += kGemmRows)
        rows_tile<A, kPanelVecs>(rows - r < kGemmRows ? rows - r : kGemmRows, depth, a + r * lda + k, lda,
                                 slice + q * depth * kPanel<A>, c + r * ldc + q * kPanel<A>, ldc, k > 0,
                                 slice + q * depth * kPanel<A>);
  }
}
template <class A>
void slice_products(int64_t rows, int64_t panels, const A* a, int64_t lda, const Matrix& b, int64_t first_panel, A* c,
                    int64_t ldc, A* slice) {
  by_element<A>(b.dtype,
                [&](auto t) { slice_products_of<decltype(t)>(rows, panels, a, lda, b, first_panel, c, ldc, slice); });
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
