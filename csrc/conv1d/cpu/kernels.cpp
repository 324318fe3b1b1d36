// A convolution and its maximum over time on CPU: what is around the products. Compiled once per instruction-set tier.
//
// The products of all windows and filters are the library's; a window of k rows is k * columns contiguous numbers, so
// its row of the product is read where it lies. The activation never decreases, so it is applied to the maximum. Of a
// sequence and a filter a single window has a gradient:
//
//   g = dy activation'(z),    dx[t + k] += g weight[c, k],    dweight[c, k] += g x[t + k],    t the window of the
//   maximum
#include "conv1d/conv1d.h"
#include "vectors.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A>
void largest_rows(const MaxRows& m) {
  using I = typename VecTraits<A>::integer;
  for_vectors<A>(m.filters, [&](int64_t c, int64_t n) SK_INLINED {
    const A* row = static_cast<const A*>(m.products) + c;
    A* const out = static_cast<A*>(m.best) + c;
    int64_t r = 0;
    Vec<A> best;
    IVec<A> at;
    if (m.merge) {
      best = load_upto(out, n), at = load_index(m.index + c, n, A(0));
    } else {
      best = load_upto(row, n), at = static_cast<I>(m.first) - IVec<A>{};
      r = 1;
    }
    for (; r < m.count; ++r) {
      const Vec<A> v = load_upto(row + r * m.stride, n);
      const IVec<A> better = (v > best) | ((v != v) & (best == best));
      best = better ? v : best;
      at = better ? static_cast<I>(m.first + r) - IVec<A>{} : at;
    }
    store_upto(out, best, n);
    for (int64_t lane = 0; lane < n; ++lane) m.index[c + lane] = static_cast<int32_t>(at[lane]);
  });
}

template <class A>
SK_INLINE Vec<A> activated(MaxActivation activation, Vec<A> z) {
  switch (activation) {
    case MaxActivation::relu: return z < A(0) ? Vec<A>{} : z;
    case MaxActivation::tanh: return tanh<A>(z);
    case MaxActivation::sigmoid: return sigmoid<A>(z);
    default: return z;
  }
}

template <class A>
SK_INLINE Vec<A> slope(MaxActivation activation, Vec<A> z) {
  Vec<A> s = broadcast<A>(1);
  if (activation == MaxActivation::relu) s = z > A(0) ? s : Vec<A>{};
  else if (activation == MaxActivation::tanh) tanh<A>(z, s);
  else if (activation == MaxActivation::sigmoid) s = sigmoid<A>(z) * sigmoid<A>(-z);
  return s;
}

template <class T>
void output_rows(const MaxOutputs& m, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const A* bias = static_cast<const A*>(m.bias);
  for (int64_t b = begin; b < end; ++b) {
    A* const z = static_cast<A*>(m.z) + b * m.filters;
    T* const output = static_cast<T*>(m.output) + b * m.filters;
    for_vectors<A>(m.filters, [&](int64_t c, int64_t n) SK_INLINED {
      Vec<A> v = load_upto(z + c, n);
      if (bias) v += load_upto(bias + c, n);
      store_upto(z + c, v, n);
      store_upto(output + c, activated<A>(m.activation, v), n);
    });
  }
}

template <class T>
void slope_rows(const MaxBackward& m, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t filters = m.of.filters;
  for (int64_t b = begin; b < end; ++b) {
    const T* upstream = static_cast<const T*>(m.grad_output) + b * filters;
    const A* z = static_cast<const A*>(m.z) + b * filters;
    A* const slopes = static_cast<A*>(m.slopes) + b * filters;
    for_vectors<A>(filters, [&](int64_t c, int64_t n) SK_INLINED {
      store_upto(slopes + c, load_upto(upstream + c, n) * slope<A>(m.activation, load_upto(z + c, n)), n);
    });
  }
}

// sum[i] += factor * row[i] for `count` numbers.
template <class T>
SK_INLINE void add_scaled(acc_t<T>* sum, const T* row, acc_t<T> factor, int64_t count) {
  using A = acc_t<T>;
  int64_t i = 0;
  for (; i + W<A> <= count; i += W<A>) store(sum + i, load(sum + i) + factor * load(row + i));
  if (i < count) store_upto(sum + i, load_upto(sum + i, count - i) + factor * load_upto(row + i, count - i), count - i);
}

// How many numbers of a window lie within its sequence.
SK_INLINE int64_t within(const MaxConvolution& p, int64_t b) {
  const int64_t length = p.in.length(b);
  return (length < p.width ? length : p.width) * p.columns;
}

template <class T>
void grad_sequence(const MaxBackward& m, int64_t b, void* scratch) {
  using A = acc_t<T>;
  const MaxConvolution& p = m.of;
  const int64_t rows = p.in.starts ? p.in.length(b) : p.in.rows, numbers = rows * p.columns,
                depth = p.width * p.columns;
  T* const grad = static_cast<T*>(m.grad_x) + p.in.begin(b, p.in.rows * p.columns, p.columns);
  A* sums;
  if constexpr (sizeof(T) == sizeof(A)) sums = reinterpret_cast<A*>(grad);
  else sums = static_cast<A*>(scratch);
  __builtin_memset(sums, 0, static_cast<size_t>(numbers) * sizeof(A));
  const A* slopes = static_cast<const A*>(m.slopes) + b * p.filters;
  const int32_t* index = m.index + b * p.filters;
  const int64_t count = within(p, b);
  for (int64_t c = 0; c < p.filters; ++c)
    if (slopes[c] != 0)
      add_scaled<T>(sums + index[c] * p.columns, static_cast<const T*>(m.weight) + c * depth, slopes[c], count);
  if constexpr (sizeof(T) != sizeof(A))
    for_vectors<A>(numbers, [&](int64_t i, int64_t n) SK_INLINED { store_upto(grad + i, load_upto(sums + i, n), n); });
}

template <class T>
void grad_filters(const MaxBackward& m, int64_t begin, int64_t end, void* scratch) {
  using A = acc_t<T>;
  const MaxConvolution& p = m.of;
  const int64_t depth = p.width * p.columns, numbers = (end - begin) * depth;
  T* const grad = static_cast<T*>(m.grad_weight) + begin * depth;
  A* sums;
  if constexpr (sizeof(T) == sizeof(A)) sums = reinterpret_cast<A*>(grad);
  else sums = static_cast<A*>(scratch);
  __builtin_memset(sums, 0, static_cast<size_t>(numbers) * sizeof(A));
  for (int64_t b = 0; b < p.in.batch; ++b) {
    const T* x = static_cast<const T*>(p.x) + p.in.begin(b, p.x_batch, p.x_row);
    const A* slopes = static_cast<const A*>(m.slopes) + b * p.filters;
    const int32_t* index = m.index + b * p.filters;
    const int64_t count = within(p, b);
    for (int64_t c = begin; c < end; ++c)
      if (slopes[c] != 0) add_scaled<T>(sums + (c - begin) * depth, x + index[c] * p.columns, slopes[c], count);
  }
  if constexpr (sizeof(T) != sizeof(A))
    for_vectors<A>(numbers, [&](int64_t i, int64_t n) SK_INLINED { store_upto(grad + i, load_upto(sums + i, n), n); });
}

int64_t scratch(const MaxConvolution& p) {
  int64_t longest = p.width * kMaxFilters;
  for (int64_t b = 0; b < p.in.batch; ++b) {
    const int64_t rows = p.in.starts ? p.in.length(b) : p.in.rows;
    longest = rows > longest ? rows : longest;
  }
  return p.dtype == Dtype::bf16 || p.dtype == Dtype::f16 ? longest * p.columns * 4 : 0;
}
void largest(const MaxRows& m) {
  if (m.acc == Dtype::f64) largest_rows<double>(m);
  else largest_rows<float>(m);
}
void outputs(const MaxOutputs& m, int64_t begin, int64_t end) { SK_DISPATCH(m.dtype, output_rows<T>(m, begin, end)); }
void slopes(const MaxBackward& m, int64_t begin, int64_t end) { SK_DISPATCH(m.of.dtype, slope_rows<T>(m, begin, end)); }
void grad_x(const MaxBackward& m, int64_t b, void* scratch) {
  SK_DISPATCH(m.of.dtype, grad_sequence<T>(m, b, scratch));
}
void grad_weight(const MaxBackward& m, int64_t begin, int64_t end, void* scratch) {
  SK_DISPATCH(m.of.dtype, grad_filters<T>(m, begin, end, scratch));
}

}  // namespace

const MaxConvolutionKernels max_convolution_kernels = {scratch, largest, outputs, slopes, grad_x, grad_weight};

}  // namespace SK_TIER
}  // namespace seqkern
