// What the loops over the steps share, forward and backward: operands and products, the way through the rows of a
// share, and the state that comes and goes with them. The depth of a product and the distance of its operands' rows are
// in units (operand.h), but for that of a Packing's source.
#pragma once

#include <new>

#include "operand.h"
#include "rnn_cell.h"
#if defined(SK_TILES)
#include "rnn_tiles.h"
#else
#include "rnn_products.h"
#endif

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A>
SK_INLINE int64_t padded_stride(int64_t columns) {
  return round_up<A>(columns) + kPad<A>;
}
// Enough for whole panels of kPanel columns.
template <class A>
SK_INLINE int64_t panel_stride(int64_t columns) {
  return (columns + kPanel<A> - 1) / kPanel<A> * kPanel<A> + kPad<A>;
}
// Of an operand's rows of so many numbers, in units; whole vectors of numbers can be stored to them.
template <class A>
SK_INLINE int64_t operand_stride(int64_t numbers) {
  return panel_stride<A>(units(round_up<A>(numbers)));
}

// Rows of `depth` numbers, lda apart, as an operand.
template <class A, class T>
SK_INLINE void as_operand(int64_t rows, int64_t depth, const T* a, int64_t lda, A* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) as_operand_row(a + i * lda, depth, to + i * stride);
}

// The g-th of a turn: every other turn goes backwards, so that it finds the weights in cache that the last one ended
// with.
inline int64_t zigzag(int64_t g, int64_t groups, int64_t turn) { return turn & 1 ? groups - 1 - g : g; }

// C[rows, columns] = A B with B in panels of one group; a row of C has room for whole panels.
template <class A>
void few_rows_product(int64_t rows, int64_t columns, int64_t depth, const A* a, int64_t lda, const A* b, A* c,
                      int64_t ldc) {
  const int64_t panels = (columns + kPanel<A> - 1) / kPanel<A>, group = panel_group<kGemmVecs>(rows);
  const int64_t whole = (depth + kDepthStep - 1) / kDepthStep * kDepthStep;
  for (int64_t q = 0; q < panels; q += group)
    panel_products<A, kGemmVecs>(rows, panels - q < group ? panels - q : group, depth, a, lda,
                                 b + q * whole * kPanel<A>, c + q * kPanel<A>, ldc, kPanel<A>, [](int64_t, int64_t) {});
}

// Work items of such a product whose panels are packed on the way: groups of panels.
inline bool row_major(const Packing& b) { return b.n_stride == 1 && !b.rows; }
template <class A>
int64_t few_rows_group(const RnnFewRows& p) {
  return row_major(p.b) ? kSlicePanels<A> : unpacked_group(p.rows);
}
template <class A>
int64_t few_rows_items(const RnnFewRows& p) {
  return (panel_count<A>(p.b.columns, 1) + few_rows_group<A>(p) - 1) / few_rows_group<A>(p);
}
// Of B, packed on the way.
template <class A>
int64_t few_rows_packed(const RnnFewRows& p) {
  return row_major(p.b) ? kSliceScratch<A> : unpacked_scratch<A>(p.rows, p.b.depth, few_rows_group<A>(p) * kPanel<A>);
}
template <class A>
int64_t few_rows_scratch(const RnnFewRows& p) {
  return few_rows_packed<A>(p) + p.rows * few_rows_group<A>(p) * kPanel<A> +
         (kTerms > 1 ? p.rows * operand_stride<A>(p.b.depth) : 0);
}
template <class A>
void few_rows_item(const RnnFewRows& p, int64_t item, A* scratch) {
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
    unpacked_products<A, kGemmVecs>(p.rows, p.b, first, panels, a, lda, products, group * kPanel<A>, scratch,
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

// Elements of the layer's type. Known when it runs: a branch that always goes the same way costs less than loops of
// their own for every type.
template <class A>
SK_INLINE Vec<A> load_as(Dtype dtype, const void* base, int64_t element, int64_t n) {
  if constexpr (sizeof(A) == 8) {
    return load_upto(static_cast<const double*>(base) + element, n);
  } else {
    if (dtype == Dtype::f32) return load_upto(static_cast<const float*>(base) + element, n);
    if (dtype == Dtype::bf16) return load_upto(static_cast<const BFloat16*>(base) + element, n);
    return load_upto(static_cast<const Half*>(base) + element, n);
  }
}
template <class V>
SK_INLINE void store_as(Dtype dtype, void* base, int64_t element, V v, int64_t n) {
  if constexpr (std::is_same<V, vf64>::value) {
    store_upto(static_cast<double*>(base) + element, v, n);
  } else {
    if (dtype == Dtype::f32) store_upto(static_cast<float*>(base) + element, v, n);
    else if (dtype == Dtype::bf16) store_upto(static_cast<BFloat16*>(base) + element, v, n);
    else store_upto(static_cast<Half*>(base) + element, v, n);
  }
}
template <class A>
SK_INLINE void fetch_as(Dtype dtype, const void* base, int64_t element) {
  __builtin_prefetch(static_cast<const char*>(base) + element * size_of(dtype));
}

// Whether a pass has none of the options that the plain loops leave out.
inline bool plain(const RnnLayer& l, const RnnDirection& d) {
  return !l.norm && !l.project && !l.zoneout.active && !d.peephole && !d.mask;
}

// The rows of a share on their way through the steps of one direction.
struct Rows {
  const RnnLayer& layer;
  const RnnShare& share;
  bool reverse;
  int64_t first_token;  // of the steps at hand

  Rows(const RnnLayer& layer_, const RnnDirection& d, const RnnShare& share_, int64_t step_begin, int64_t step_end)
      : layer(layer_),
        share(share_),
        reverse(d.reverse),
        first_token(layer.starts[d.reverse ? layer.steps - step_end : step_begin]) {}

  int64_t time(int64_t step) const { return reverse ? layer.steps - 1 - step : step; }
  // Active rows at time t.
  int64_t count(int64_t t) const {
    const int64_t left = layer.active[t] - share.first;
    return left > 0 ? (left + share.stride - 1) / share.stride : 0;
  }
  int64_t place(int64_t i) const { return share.first + i * share.stride; }  // in the order
  int64_t row(int64_t i) const { return layer.order[place(i)]; }
  int64_t token(int64_t t, int64_t i) const { return layer.starts[t] - first_token + place(i); }
  // Whether row i, active at t, starts there from zero.
  bool reset(int64_t t, int64_t i) const {
    if (!layer.resets) return false;
    if (!reverse) return layer.resets[t * layer.batch + row(i)];
    return has_later(t, i) && layer.resets[(t + 1) * layer.batch + row(i)];
  }
  bool has_later(int64_t t, int64_t i) const { return t + 1 < layer.steps && place(i) < layer.active[t + 1]; }
  // The time of the step before t, or -1: there is none, it starts from the initial state.
  int64_t previous(int64_t t, int64_t i) const { return !reverse ? t - 1 : has_later(t, i) ? t + 1 : -1; }
  // In the random numbers of zoneout; which: 0 for h, 1 for c.
  int64_t random_row(int64_t direction, int which, int64_t t, int64_t i) const {
    return ((2 * direction + which) * layer.steps + t) * layer.batch + row(i);
  }
};

// Scratch begins with where the rows of a turn lie, worked out once and not for every panel; its products follow.
template <class Row, class A>
constexpr int64_t row_table_size(int64_t rows) {
  return (rows * static_cast<int64_t>(sizeof(Row)) + 63) / 64 * 64 / static_cast<int64_t>(sizeof(A));
}
template <class Row, class A, class RowAt>
SK_INLINE const Row* row_table(A* scratch, int64_t rows, const RowAt& row_at) {
  Row* table = reinterpret_cast<Row*>(scratch);
  for (int64_t i = 0; i < rows; ++i) new (table + i) Row(row_at(i));
  return table;
}

// Copies columns [begin, end) of a row.
template <class A>
SK_INLINE void copy_columns(const A* from, A* to, int64_t begin, int64_t end) {
  for (int64_t u = begin; u < end; u += W<A>) store_upto(to + u, load_upto(from + u, end - u), end - u);
}
template <class A>
SK_INLINE void zero_columns(A* to, int64_t begin, int64_t end) {
  for (int64_t u = begin; u < end; u += W<A>) store_upto(to + u, Vec<A>{}, end - u);
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
