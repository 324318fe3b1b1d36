// What the forward and backward loops over the steps share: operands and products, the rows of a share, and their
// state. Depths and row strides of operands are in words (operand.h), those of a Matrix in elements.
#pragma once

#include <new>

#include "cell.h"
#include "few_rows.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Group g of a turn. Every other turn goes backwards, and so begins with the weights that are still in cache.
inline int64_t zigzag(int64_t g, int64_t groups, int64_t turn) { return turn & 1 ? groups - 1 - g : g; }

// The layer's element type is known at run time only: a predictable branch costs less than separate loops for every
// type.
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
SK_INLINE void prefetch_as(Dtype dtype, const void* base, int64_t element) {
  __builtin_prefetch(static_cast<const char*>(base) + element * size_of(dtype));
}

// Whether a pass has none of the options that the plain loops omit.
inline bool plain(const RnnLayer& l, const RnnDirection& d) {
  return !l.norm && !l.project && !l.zoneout.active && !d.peephole && !d.mask;
}

// The rows of a share, on their way through the steps of one direction.
struct ShareRows {
  const RnnLayer& layer;
  const RnnShare& share;
  bool reverse;
  int64_t first_token;  // of the steps of this pass

  ShareRows(const RnnLayer& layer_, const RnnDirection& d, const RnnShare& share_, int64_t step_begin, int64_t step_end)
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
  int64_t place(int64_t i) const { return share.first + i * share.stride; }  // in the layer's order
  int64_t row(int64_t i) const { return layer.order[place(i)]; }
  int64_t token(int64_t t, int64_t i) const { return layer.starts[t] - first_token + place(i); }
  // Whether row i, active at t, starts from zero there.
  bool reset(int64_t t, int64_t i) const {
    if (!layer.resets) return false;
    if (!reverse) return layer.resets[t * layer.batch + row(i)];
    return has_later(t, i) && layer.resets[(t + 1) * layer.batch + row(i)];
  }
  bool has_later(int64_t t, int64_t i) const { return t + 1 < layer.steps && place(i) < layer.active[t + 1]; }
  // The time of the step before t, or -1 if t starts from the initial state.
  int64_t previous(int64_t t, int64_t i) const { return !reverse ? t - 1 : has_later(t, i) ? t + 1 : -1; }
  // The row of zoneout's random numbers; which: 0 for h, 1 for c.
  int64_t random_row(int64_t direction, int which, int64_t t, int64_t i) const {
    return ((2 * direction + which) * layer.steps + t) * layer.batch + row(i);
  }
};

// Scratch begins with a table of the turn's rows, made once and not for every panel; the products follow.
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
