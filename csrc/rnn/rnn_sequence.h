// What the loops over the steps share, forward and backward: products of a few rows with packed weights, the way
// through the rows of a share, and the state that comes and goes with them.
#pragma once

#include <new>

#include "blocked_gemm.h"
#include "rnn_cell.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// A tile: MR rows times NP panels of NV vectors, over one slice of the depth. Many accumulators hide the latency of
// the multiply-add; one or two rows take those of several panels. As gemm_tile() sums, so sums this.
template <class A, int MR, int NP, int NV>
__attribute__((noinline)) void panel_tile(int64_t depth, const A* a, int64_t lda, const A* b, int64_t panel_stride,
                                          A* c, int64_t ldc, int64_t c_panel, bool accumulate) {
  int64_t k = 0;
  do {
    const int64_t end = depth - k < kPanelSlice ? depth : k + kPanelSlice;
    Vec<A> acc[MR][NP][NV] = {};
    for (; k < end; ++k) {
      Vec<A> x[MR];
      for (int i = 0; i < MR; ++i) x[i] = broadcast<A>(a[i * lda + k]);
      for (int q = 0; q < NP; ++q)
        for (int v = 0; v < NV; ++v) {
          const Vec<A> w = load(b + q * panel_stride + (k * NV + v) * W<A>);
          for (int i = 0; i < MR; ++i) acc[i][q][v] += x[i] * w;
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

// Rows of a tile of one panel, and panels of a tile of one or two rows.
template <int NV>
constexpr int kTileRows = (kGemmRows * kGemmVecs) / NV;
template <int NV>
constexpr int kTilePanels = NV >= 8 ? 1 : 8 / NV;

template <class A, int NV, int R = kTileRows<NV>>
__attribute__((noinline)) void rows_tile(int64_t rows, int64_t depth, const A* a, int64_t lda, const A* b, A* c,
                                         int64_t ldc, bool accumulate) {
  if (rows == R) gemm_tile<A, R, NV, Unit::k, kPanelSlice>(depth, a, lda, 1, b, NV * W<A>, c, ldc, accumulate);
  else if constexpr (R > 1) rows_tile<A, NV, R - 1>(rows, depth, a, lda, b, c, ldc, accumulate);
}

// Panels that are worked on together: as many as a tile of one or two rows takes.
template <int NV>
int64_t panel_group(int64_t rows) {
  return rows == 1 ? kTilePanels<NV> : rows == 2 && kTilePanels<NV> > 1 ? kTilePanels<NV> / 2 : 1;
}

// C = A B for `panels` panels of B, at most panel_group(rows), each over the whole depth and one after the other. C of
// a panel begins c_panel after the last one's, its rows are ldc apart. before(row_begin, row_end) is called before a
// tile's rows are first worked on.
template <class A, int NV, class Before>
SK_INLINE void panel_products(int64_t rows, int64_t panels, int64_t depth, const A* a, int64_t lda, const A* b, A* c,
                              int64_t ldc, int64_t c_panel, const Before& before) {
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
  for (int64_t q = 0; q < panels; ++q) {
    // A slice of the panel stays in L1 over all rows.
    for (int64_t k = 0; k < depth; k += kBlockDepth) {
      const int64_t slice = depth - k < kBlockDepth ? depth - k : kBlockDepth;
      for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
        const int64_t count = tile_rows + (tile < longer);
        if (k == 0 && q == 0) before(r, r + count);
        rows_tile<A, NV>(count, slice, a + r * lda + k, lda, b + q * panel_stride + k * NV * W<A>,
                         c + q * c_panel + r * ldc, ldc, k > 0);
        r += count;
      }
    }
  }
}

// The g-th of a turn: every other turn goes backwards, so that it finds the weights in cache that the last one ended
// with.
inline int64_t zigzag(int64_t g, int64_t groups, int64_t turn) { return turn & 1 ? groups - 1 - g : g; }

// C[rows, columns] = A B with B in panels of one group; a row of C has room for whole panels.
template <class A>
void few_rows_product(int64_t rows, int64_t columns, int64_t depth, const A* a, int64_t lda, const A* b, A* c,
                      int64_t ldc) {
  const int64_t panels = (columns + kPanel<A> - 1) / kPanel<A>, group = panel_group<kGemmVecs>(rows);
  for (int64_t q = 0; q < panels; q += group)
    panel_products<A, kGemmVecs>(rows, panels - q < group ? panels - q : group, depth, a, lda,
                                 b + q * depth * kPanel<A>, c + q * kPanel<A>, ldc, kPanel<A>, [](int64_t, int64_t) {});
}

// Work items of such a product whose panels are packed on the way: groups of panels.
template <class A>
int64_t few_rows_items(const RnnFewRows& p) {
  const int64_t group = panel_group<kGemmVecs>(p.rows);
  return (panel_count<A>(p.b.columns, 1) + group - 1) / group;
}
template <class A>
int64_t few_rows_scratch(const RnnFewRows& p) {
  return panel_group<kGemmVecs>(p.rows) * kPanel<A> * (p.b.depth + p.rows);
}
template <class A>
void few_rows_item(const RnnFewRows& p, int64_t item, A* scratch) {
  const int64_t group = panel_group<kGemmVecs>(p.rows), first = item * group, depth = p.b.depth;
  const int64_t left = panel_count<A>(p.b.columns, 1) - first, panels = left < group ? left : group;
  for (int64_t q = 0; q < panels; ++q) pack_panel(p.b, first + q, scratch + q * depth * kPanel<A>);
  A* products = scratch + group * depth * kPanel<A>;
  panel_products<A, kGemmVecs>(p.rows, panels, depth, static_cast<const A*>(p.a), p.a_stride, scratch, products,
                               group * kPanel<A>, kPanel<A>, [](int64_t, int64_t) {});
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

template <class A>
SK_INLINE int64_t padded_stride(int64_t columns) {
  return round_up<A>(columns) + kPad<A>;
}
// Enough for whole panels of kPanel columns.
template <class A>
SK_INLINE int64_t panel_stride(int64_t columns) {
  return (columns + kPanel<A> - 1) / kPanel<A> * kPanel<A> + kPad<A>;
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
