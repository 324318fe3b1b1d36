// Pooling over sequences on CPU: sums, largest and smallest numbers, ends and log-sum-exps of each column. Compiled
// once per instruction-set tier.
//
// A sequence's own rows alone are read. Sums are in the accumulation type, in blocks of rows. Of equal numbers the
// first is the largest, and a NaN is larger and smaller than any number, as torch's max and min have it.
#include "sequence_pool/sequence_pool.h"
#include "vectors.h"

namespace seqkern {
namespace SK_TIER {
namespace {

constexpr int64_t kBlock = 64;  // rows that are summed before the sum is added to others
constexpr int kVectors = static_cast<int>(kPoolVectors);

// Columns [c, c + C vectors), of which a single vector may have only n numbers.
template <class T, int C>
SK_INLINE void load_row(const T* row, int64_t n, Vec<acc_t<T>> (&v)[C]) {
  using A = acc_t<T>;
  if constexpr (C == 1) {
    v[0] = load_upto(row, n);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) v[i] = load(row + i * W<A>);
  }
}
template <class T, int C>
SK_INLINE void store_row(T* row, int64_t n, const Vec<acc_t<T>> (&v)[C]) {
  using A = acc_t<T>;
  for (int i = 0; i < C; ++i) store_upto(row + i * W<A>, v[i], C == 1 ? n : int64_t{W<A>});
}

template <class T, int C>
SK_INLINE void sum_columns(const T* x, int64_t stride, int64_t length, acc_t<T> factor, int64_t n, T* output) {
  using A = acc_t<T>;
  Vec<A> totals[C], v[C];
  for (int i = 0; i < C; ++i) totals[i] = Vec<A>{};
  for (int64_t first = 0; first < length; first += kBlock) {
    const int64_t end = first + kBlock < length ? first + kBlock : length;
    Vec<A> sums[C];
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) sums[i] = Vec<A>{};
    for (int64_t r = first; r < end; ++r) {
      load_row<T, C>(x + r * stride, n, v);
#pragma GCC unroll 8
      for (int i = 0; i < C; ++i) sums[i] += v[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) totals[i] += sums[i];
  }
  for (int i = 0; i < C; ++i) totals[i] *= factor;
  store_row<T, C>(output, n, totals);
}

template <class T, int C, bool Max>
SK_INLINE void extreme_columns(const T* x, int64_t stride, int64_t length, int64_t n, T* output, int32_t* index) {
  using A = acc_t<T>;
  using I = typename VecTraits<A>::integer;
  Vec<A> best[C], v[C];
  IVec<A> at[C];
  load_row<T, C>(x, n, best);
  for (int i = 0; i < C; ++i) at[i] = IVec<A>{};
  for (int64_t r = 1; r < length; ++r) {
    load_row<T, C>(x + r * stride, n, v);
    const IVec<A> row = static_cast<I>(r) - IVec<A>{};
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      const IVec<A> better = (Max ? v[i] > best[i] : v[i] < best[i]) | ((v[i] != v[i]) & (best[i] == best[i]));
      best[i] = better ? v[i] : best[i];
      at[i] = better ? row : at[i];
    }
  }
  store_row<T, C>(output, n, best);
  for (int i = 0; i < C; ++i)
    for (int lane = 0; lane < (C == 1 ? n : W<A>); ++lane) index[i * W<A> + lane] = static_cast<int32_t>(at[i][lane]);
}

template <class T, int C>
SK_INLINE void logsumexp_columns(const T* x, int64_t stride, int64_t length, int64_t n, T* output) {
  using A = acc_t<T>;
  constexpr A infinity = __builtin_inf();
  Vec<A> most[C], v[C], totals[C];
  for (int i = 0; i < C; ++i) most[i] = broadcast<A>(-infinity), totals[i] = Vec<A>{};
  for (int64_t r = 0; r < length; ++r) {
    load_row<T, C>(x + r * stride, n, v);
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) most[i] = vmax(v[i], most[i]);
  }
  Vec<A> shift[C];
  for (int i = 0; i < C; ++i) shift[i] = most[i] == -infinity ? Vec<A>{} : most[i];
  for (int64_t first = 0; first < length; first += kBlock) {
    const int64_t end = first + kBlock < length ? first + kBlock : length;
    Vec<A> sums[C];
    for (int i = 0; i < C; ++i) sums[i] = Vec<A>{};
    for (int64_t r = first; r < end; ++r) {
      load_row<T, C>(x + r * stride, n, v);
      for (int i = 0; i < C; ++i) sums[i] += exp_nonpositive<A>(v[i] - shift[i]);
    }
    for (int i = 0; i < C; ++i) totals[i] += sums[i];
  }
  for (int i = 0; i < C; ++i) {
    for (int lane = 0; lane < W<A>; ++lane) {
      const A sum = totals[i][lane];
      totals[i][lane] = most[i][lane] == infinity ? infinity
                        : sum == 0                ? -infinity
                        : sizeof(A) == 4 ? shift[i][lane] + static_cast<A>(__builtin_logf(static_cast<float>(sum)))
                                         : shift[i][lane] + static_cast<A>(__builtin_log(static_cast<double>(sum)));
    }
  }
  store_row<T, C>(output, n, totals);
}

// The row that a column of first or last takes.
SK_INLINE int64_t end_row(const PoolSequences& p, int64_t column, int64_t length) {
  const bool from_the_end = column >= p.columns - p.reversed;
  return (p.kind == PoolKind::last) != from_the_end ? length - 1 : 0;
}

template <class T, int C>
void forward_columns(const PoolForward& f, int64_t b, int64_t c, int64_t n) {
  using A = acc_t<T>;
  const PoolSequences& p = f.of;
  const T* x = static_cast<const T*>(f.x) + p.in.begin(b, f.x_batch, f.x_row) + c;
  T* const output = static_cast<T*>(f.output) + b * p.columns + c;
  const int64_t length = p.in.length(b);
  switch (p.kind) {
    case PoolKind::sum: return sum_columns<T, C>(x, f.x_row, length, 1, n, output);
    case PoolKind::mean: return sum_columns<T, C>(x, f.x_row, length, 1 / static_cast<A>(length), n, output);
    case PoolKind::max: return extreme_columns<T, C, true>(x, f.x_row, length, n, output, f.index + b * p.columns + c);
    case PoolKind::min: return extreme_columns<T, C, false>(x, f.x_row, length, n, output, f.index + b * p.columns + c);
    case PoolKind::logsumexp: return logsumexp_columns<T, C>(x, f.x_row, length, n, output);
    default: break;
  }
}

template <class T>
void forward_sequence(const PoolForward& f, int64_t b, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const PoolSequences& p = f.of;
  const int64_t length = p.in.length(b);
  T* const output = static_cast<T*>(f.output) + b * p.columns;
  if (length == 0) {
    const A nothing = p.kind == PoolKind::logsumexp ? A(-__builtin_inf()) : A(0);
    for_vectors<A>(begin, end, [&](int64_t c, int64_t n) SK_INLINED { store_upto(output + c, broadcast(nothing), n); });
    if (f.index)
      for (int64_t c = begin; c < end; ++c) f.index[b * p.columns + c] = -1;
    return;
  }
  if (p.kind == PoolKind::first || p.kind == PoolKind::last) {
    const T* x = static_cast<const T*>(f.x) + p.in.begin(b, f.x_batch, f.x_row);
    const auto copy = [&](int64_t first, int64_t last) {
      if (first < last)
        __builtin_memcpy(output + first, x + end_row(p, first, length) * f.x_row + first,
                         static_cast<size_t>(last - first) * sizeof(T));
    };
    const int64_t border = p.columns - p.reversed;
    copy(begin, end < border ? end : border);
    copy(begin > border ? begin : border, end);
    return;
  }
  int64_t c = begin;
  for (; c + kVectors * W<A> <= end; c += kVectors * W<A>) forward_columns<T, kVectors>(f, b, c, W<A>);
  for (; c < end; c += W<A>) forward_columns<T, 1>(f, b, c, end - c < W<A> ? end - c : W<A>);
}

template <class T>
void backward_rows(const PoolBackward& f, int64_t b, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  using I = typename VecTraits<A>::integer;
  const PoolSequences& p = f.of;
  const int64_t length = p.in.length(b), columns = p.columns;
  const T* upstream = static_cast<const T*>(f.grad_output) + b * columns;
  T* const grad = static_cast<T*>(f.grad) + p.in.begin(b, p.in.rows * columns, columns);
  const A factor = p.kind == PoolKind::mean && length > 0 ? 1 / static_cast<A>(length) : A(1);
  const bool summed = p.kind == PoolKind::sum || p.kind == PoolKind::mean;
  for (int64_t r = begin; r < end; ++r) {
    T* const row = grad + r * columns;
    if (r >= length) {
      __builtin_memset(row, 0, static_cast<size_t>(columns) * sizeof(T));
    } else if (summed) {
      for_vectors<A>(0, columns, [&](int64_t c, int64_t n) SK_INLINED {
        store_upto(row + c, load_upto(upstream + c, n) * factor, n);
      });
    } else if (p.kind == PoolKind::max || p.kind == PoolKind::min) {
      const int32_t* index = f.index + b * columns;
      for_vectors<A>(0, columns, [&](int64_t c, int64_t n) SK_INLINED {
        const IVec<A> here = load_index(index + c, n, A(0)) == static_cast<I>(r);
        store_upto(row + c, here ? load_upto(upstream + c, n) : Vec<A>{}, n);
      });
    } else if (p.kind == PoolKind::logsumexp) {
      const T* x = static_cast<const T*>(f.x) + p.in.begin(b, f.x_batch, f.x_row) + r * f.x_row;
      const T* lse = static_cast<const T*>(f.output) + b * columns;
      for_vectors<A>(0, columns, [&](int64_t c, int64_t n) SK_INLINED {
        const Vec<A> of_all = load_upto(lse + c, n);
        const Vec<A> shift = of_all == A(-__builtin_inf()) ? Vec<A>{} : of_all;
        store_upto(row + c, load_upto(upstream + c, n) * exp_nonpositive<A>(load_upto(x + c, n) - shift), n);
      });
    } else {
      __builtin_memset(row, 0, static_cast<size_t>(columns) * sizeof(T));
      if (r != 0 && r != length - 1) continue;
      for (int64_t c = 0; c < columns; ++c)
        if (r == end_row(p, c, length)) row[c] = upstream[c];
    }
  }
}

int64_t columns(Dtype dtype) { return kVectors * (dtype == Dtype::f64 ? W<double> : W<float>); }
void forward(const PoolForward& f, int64_t b, int64_t begin, int64_t end) {
  SK_DISPATCH(f.of.dtype, forward_sequence<T>(f, b, begin, end));
}
void backward(const PoolBackward& f, int64_t b, int64_t begin, int64_t end) {
  SK_DISPATCH(f.of.dtype, backward_rows<T>(f, b, begin, end));
}

}  // namespace

const PoolKernels pool_kernels = {columns, forward, backward};

}  // namespace SK_TIER
}  // namespace seqkern
