// Products of a few rows: with packed panels, inside an op's loops, and with panels packed on the fly.
#pragma once

#include "operand.h"
#if defined(SK_TILES)
#include "few_rows_tiles.h"
#else
#include "few_rows_panels.h"
#endif

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A>
SK_INLINE int64_t padded_stride(int64_t columns) {
  return round_up<A>(columns) + kPad<A>;
}
// Room for whole panels of kPanel columns.
template <class A>
SK_INLINE int64_t panel_stride(int64_t columns) {
  return (columns + kPanel<A> - 1) / kPanel<A> * kPanel<A> + kPad<A>;
}
// Row stride, in words, of an operand with `numbers` columns; rows have room for whole vectors of numbers.
template <class A>
SK_INLINE int64_t operand_stride(int64_t numbers) {
  return panel_stride<A>(words(round_up<A>(numbers)));
}

// Converts rows of `depth` numbers, lda apart, to an operand.
template <class A, class T>
SK_INLINE void as_operand(int64_t rows, int64_t depth, const T* a, int64_t lda, A* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) as_operand_row(a + i * lda, depth, to + i * stride);
}

// C[rows, columns] = A B, with B packed in panels of one group; rows of C have room for whole panels.
template <class A>
void packed_rows_product(int64_t rows, int64_t columns, int64_t depth, const A* a, int64_t lda, const A* b, A* c,
                         int64_t ldc) {
  const int64_t panels = (columns + kPanel<A> - 1) / kPanel<A>, group = panel_group<kPanelVecs>(rows);
  const int64_t whole = (depth + kDepthStep - 1) / kDepthStep * kDepthStep;
  for (int64_t q = 0; q < panels; q += group)
    panel_products<A, kPanelVecs>(
        rows, panels - q < group ? panels - q : group, depth, a, lda, b + q * whole * kPanel<A>, c + q * kPanel<A>, ldc,
        kPanel<A>, b + (q + group < panels ? q + group : 0) * whole * kPanel<A>, [](int64_t, int64_t) {});
}

// Work items of a product whose panels are packed on the fly: groups of panels.
inline bool row_major(const Matrix& b) { return b.n_stride == 1 && !b.rows; }
template <class A>
int64_t few_rows_group(const FewRowsProduct& p) {
  return row_major(p.b) ? kSlicePanels<A> : unpacked_group(p.rows);
}
template <class A>
int64_t few_rows_items(const FewRowsProduct& p) {
  return (panel_count<A>(p.b.columns, 1) + few_rows_group<A>(p) - 1) / few_rows_group<A>(p);
}
// Elements of B that an item packs on the fly.
template <class A>
int64_t few_rows_packed(const FewRowsProduct& p) {
  return row_major(p.b) ? kSliceScratch<A> : unpacked_scratch<A>(p.rows, p.b.depth, few_rows_group<A>(p) * kPanel<A>);
}
template <class A>
int64_t few_rows_scratch(const FewRowsProduct& p) {
  return few_rows_packed<A>(p) + p.rows * few_rows_group<A>(p) * kPanel<A> +
         (kTerms > 1 ? p.rows * operand_stride<A>(p.b.depth) : 0);
}
template <class A>
void few_rows_item(const FewRowsProduct& p, int64_t item, A* scratch) {
  const int64_t group = few_rows_group<A>(p), first = item * group;
  const int64_t left = panel_count<A>(p.b.columns, 1) - first, panels = left < group ? left : group;
  const A* a = static_cast<const A*>(p.a);
  int64_t lda = p.a_stride;
  A* products = scratch + few_rows_packed<A>(p);
  if constexpr (kTerms > 1) {
    A* own = products + p.rows * group * kPanel<A>;
    by_element<A>(p.a_type, [&](auto t) {
      using T = decltype(t);
      as_operand(p.rows, p.b.depth, static_cast<const T*>(p.a), lda, own, operand_stride<A>(p.b.depth));
    });
    a = own, lda = operand_stride<A>(p.b.depth);
  }
  if (row_major(p.b)) {
    const RowTiles tiles(p.rows);
    slice_products(p.rows, panels, a, lda, p.b, first, products, group * kPanel<A>, scratch);
  } else {
    const RowTiles tiles(kUnpackedRows);
    unpacked_products<A, kPanelVecs>(p.rows, p.b, first, panels, a, lda, products, group * kPanel<A>, scratch,
                                     [](int64_t, int64_t) {});
  }
  const A* bias = static_cast<const A*>(p.bias);
  const int64_t begin = first * kPanel<A>, past = begin + panels * kPanel<A>;
  const int64_t end = past < p.b.columns ? past : p.b.columns;
  for (int64_t i = 0; i < p.rows; ++i)
    for (int64_t u = begin; u < end; u += W<A>) {
      Vec<A> v = load(products + i * group * kPanel<A> + u - begin);
      if (bias) v += load_upto(bias + u, end - u);
      store_upto(static_cast<A*>(p.c) + i * p.c_stride + u, v, end - u);
    }
}

// RowsProduct, for panels [begin, end).
template <class A>
void rows_product(const RowsProduct& p, int64_t begin, int64_t end, A* scratch) {
  const int64_t stride = operand_stride<A>(p.depth), columns = (end - begin) * kPanel<A>;
  by_element<A>(p.a_type, [&](auto t) {
    using T = decltype(t);
    as_operand(p.rows, p.depth, static_cast<const T*>(p.a), p.a_stride, scratch, stride);
  });
  const RowTiles tiles(p.rows);
  const A* b = static_cast<const A*>(p.packed_b) + begin * padded_words(p.depth) * kPanel<A>;
  for (int64_t i = 0; i < p.times; ++i)
    packed_rows_product<A>(p.rows, columns, words(p.depth), scratch, stride, b,
                           static_cast<A*>(p.c) + begin * kPanel<A>, p.c_stride);
}

// The peak of multiply-adds: as many sums as registers hold, none of which waits for another.
template <class A>
int64_t spin(int64_t turns, A* memory) {
#if defined(SK_TILES)
  return spin_tiles(turns, memory);
#else
  for (int64_t i = 0; i < kSpinBytes / static_cast<int64_t>(sizeof(A)); ++i) memory[i] = A(0);
  // rounded(): the compiler must not know that these are zeros.
  constexpr int kRows = 6, kVecs = kGemmVecs;
  Vec<A> sums[kRows][kVecs], x = rounded(load(memory)), y = rounded(load(memory + W<A>));
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) sums[i][j] = rounded(load(memory + (2 + i * kVecs + j) * W<A>));
  for (int64_t turn = 0; turn < turns; ++turn)
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kVecs; ++j) sums[i][j] = multiply_add(x, y, sums[i][j]);
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) store(memory + (2 + i * kVecs + j) * W<A>, sums[i][j]);
  return turns * kRows * kVecs * W<A> * kTerms;
#endif
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
