// Row-wise helpers of the products: outer products of few terms, gather and scatter of rows, sums of columns.
#pragma once

#include "blocked_gemm.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// C (+)= A^T B over few terms: C is written once, in four streams; A and B are few rows, and read in place. Register
// tiles of 4 rows and 2 vectors.
template <class T>
void outer_rows(const OuterProduct& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  using Z = Number<A>;
  constexpr int kRows = 4, kVecs = 2;
  const auto in_all_lanes = [](Z z) {
    if constexpr (kTerms > 1) return broadcast<A>(bit_cast<float>(static_cast<uint32_t>(z.bits) << 16));
    else return broadcast<A>(z);
  };
  const auto tile = [&](auto whole, int64_t m, int64_t n_rows, int64_t n) {
    const int64_t rows = decltype(whole)::value ? kRows : n_rows;
    const int64_t left = decltype(whole)::value ? kVecs * W<A> : p.columns - n;
    Vec<A> acc[kRows][kVecs] = {};
    for (int64_t t = 0; t < p.terms; ++t) {
      const T* row = static_cast<const T*>(p.b_rows[t]);
      if (!row) continue;
      const Z* a = static_cast<const Z*>(p.a) + t * p.a_stride + m;
      Vec<A> x[kVecs];
      for (int v = 0; v < kVecs; ++v)
        x[v] = left >= kVecs * W<A> ? load(row + n + v * W<A>) : load_upto(row + n + v * W<A>, left - v * W<A>);
      for (int i = 0; i < kRows; ++i)
        for (int v = 0; v < kVecs; ++v) acc[i][v] += in_all_lanes(a[i < rows ? i : 0]) * x[v];
    }
    by_element<A>(p.c_type, [&](auto element) {
      using C = decltype(element);
      for (int64_t i = 0; i < rows; ++i)
        for (int v = 0; v < kVecs && v * W<A> < left; ++v) {
          C* c = static_cast<C*>(p.c) + (m + i) * p.c_stride + n + v * W<A>;
          const int64_t count = left - v * W<A>;
          store_upto(c, p.accumulate ? load_upto(c, count) + acc[i][v] : acc[i][v], count);
        }
    });
  };
  for (int64_t m = begin; m < end; m += kRows)
    for (int64_t n = 0; n < p.columns; n += kVecs * W<A>) {
      if (end - m >= kRows && p.columns - n >= kVecs * W<A>) tile(std::true_type{}, m, kRows, n);
      else tile(std::false_type{}, m, end - m < kRows ? end - m : kRows, n);
    }
}

template <class T>
void gather_rows(const Gather& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for (int64_t r = begin; r < end; ++r) {
    const T* row = static_cast<const T*>(p.rows[r]);
    const A* factor = p.factors ? static_cast<const A*>(p.factors[r]) : nullptr;
    A* out = static_cast<A*>(p.out) + r * p.out_stride;
    for (int64_t i = 0; i < p.columns; i += W<A>) {
      const int64_t n = p.columns - i;
      Vec<A> v = row ? load_upto(row + i, n) : Vec<A>{};
      if (factor && row) v *= load_upto(factor + i, n);
      if (p.bias) v += load_upto(static_cast<const A*>(p.bias) + i, n);
      store_upto(out + i, v, n);
    }
  }
}

template <class T>
void scatter_rows(const Scatter& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const auto copy = [&](auto of_source) {
    using S = decltype(of_source);
    for (int64_t r = begin; r < end; ++r) {
      const S* source = static_cast<const S*>(p.source) + r * p.source_stride;
      T* row = static_cast<T*>(p.rows[r]) + p.column;
      for (int64_t i = 0; i < p.columns; i += W<A>)
        store_upto(row + i, load_upto(source + i, p.columns - i), p.columns - i);
    }
  };
  if (kTerms > 1 && p.source_type == Dtype::bf16) copy(Number<A>{});
  else copy(A{});
}

// A few rows in the accumulation type, then in double: one chain over all rows would have several times the error.
constexpr int64_t kSumRows = 8;
template <class T>
void add_column_range(const ColumnSums& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t rows = p.rows, stride = p.stride;
  const T* source = static_cast<const T*>(p.source);
  double* sum = p.sums;
  for (int64_t first = 0; first < rows; first += kSumRows) {
    const int64_t last = rows - first < kSumRows ? rows : first + kSumRows;
    for (int64_t c = begin; c < end; c += W<A>) {
      Vec<A> v = {};
      for (int64_t r = first; r < last; ++r) v += load_upto(source + r * stride + c, end - c);
      for (int i = 0; i < W<A> && i < end - c; ++i) sum[c + i] += static_cast<double>(v[i]);
    }
  }
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
