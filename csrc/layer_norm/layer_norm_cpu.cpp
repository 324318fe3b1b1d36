// Layer norm on CPU, forward and backward. Compiled once per instruction-set tier.
//
//   y = (x - mu) * rstd * weight + bias,  rstd = 1 / sqrt(var + eps)     Ba et al. 2016; Jurafsky & Martin 9.39-9.42
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * weight,  xhat = (x - mu) * rstd
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
//
// Exact at any mean. A float mean of numbers near 1e4 is wrong in its last bit, 1e-3, which is a tenth of a standard
// deviation of 0.01. So the deviations d = x - mean are taken first (that subtraction is exact there), their own mean
// `shift` is the error of `mean`, and var = mean(d^2) - shift^2, xhat = (d - shift) * rstd. The backward pass finds
// `shift` again from the row, which it reads anyway: mean(g * xhat) = rstd * (mean(g * d) - shift * mean(g)).
//
// A row is read from memory once: the later passes over it find it in cache. The parameter gradients are summed in
// chunks of rows whose number depends on the shape alone, then over the chunks in order: the same bits on any number of
// threads.
//
// Tried and lost: Welford's update (one pass, but a division and a dependent chain per vector), and summing x and x^2
// in one pass (cancels as soon as the mean outgrows the spread).
#include "layer_norm.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

constexpr int kUnroll = 4;  // independent sums, to cover the latency of the addition

// Calls body(column, slot) with `slot` cycling over the unrolled sums, then tail(column, count) for the last part.
template <class A, class Body, class Tail>
SK_INLINE void for_columns(int64_t columns, const Body& body, const Tail& tail) {
  int64_t c = 0;
  for (; c + kUnroll * W<A> <= columns; c += kUnroll * W<A>)
    for (int u = 0; u < kUnroll; ++u) body(c + u * W<A>, u);
  for (; c + W<A> <= columns; c += W<A>) body(c, 0);
  if (c < columns) tail(c, columns - c);
}

template <class A>
struct Sum {
  Vec<A> part[kUnroll] = {};
  SK_INLINE A total() const {
    Vec<A> v = part[0];
    for (int u = 1; u < kUnroll; ++u) v += part[u];
    return sum_lanes<A>(v);
  }
};

template <class T>
void forward_rows(const LayerNormForward& p, int64_t row_begin, int64_t row_end) {
  using A = acc_t<T>;
  const int64_t columns = p.columns;
  const A inverse = A(1) / A(columns);
  const A* weight = static_cast<const A*>(p.weight);
  const A* bias = static_cast<const A*>(p.bias);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
    T* y = static_cast<T*>(p.output) + row * columns;

    // x / columns is summed, not x: the sum stays below the largest x, and what its rounding does is in `shift`.
    Sum<A> sum;
    for_columns<A>(
        columns, [&](int64_t c, int u) { sum.part[u] += load(x + c) * inverse; },
        [&](int64_t c, int64_t n) { sum.part[0] += load_partial(x + c, n) * inverse; });
    const A mean = sum.total();

    Sum<A> first, second;
    for_columns<A>(
        columns,
        [&](int64_t c, int u) {
          const Vec<A> d = load(x + c) - mean;
          first.part[u] += d;
          second.part[u] += d * d;
        },
        [&](int64_t c, int64_t n) {
          const Vec<A> d = keep_first<A>(load_partial(x + c, n) - mean, n);
          first.part[0] += d;
          second.part[0] += d * d;
        });
    const A shift = first.total() / A(columns);
    const A mean_square = second.total() / A(columns) - shift * shift;
    const A variance = mean_square < 0 ? A(0) : mean_square;
    const A rstd =
        A(1) / (sizeof(A) == 8 ? A(__builtin_sqrt(variance + p.eps)) : A(__builtin_sqrtf(variance + A(p.eps))));

    const auto normalise = [&](Vec<A> v, Vec<A> w, Vec<A> b) { return ((v - mean) - shift) * rstd * w + b; };
    const Vec<A> one = broadcast<A>(1), zero = {};
    for_columns<A>(
        columns,
        [&](int64_t c, int) {
          store(y + c, normalise(load(x + c), weight ? load(weight + c) : one, bias ? load(bias + c) : zero));
        },
        [&](int64_t c, int64_t n) {
          store_partial(y + c,
                        normalise(load_partial(x + c, n), weight ? load_partial(weight + c, n) : one,
                                  bias ? load_partial(bias + c, n) : zero),
                        n);
        });
    static_cast<A*>(p.mean)[row] = mean;
    static_cast<A*>(p.rstd)[row] = rstd;
  }
}

// One chunk of rows: dx of each, and the chunk's share of dweight and dbias.
template <class T>
void backward_chunk(const LayerNormBackward& p, int64_t chunk) {
  using A = acc_t<T>;
  const int64_t columns = p.columns;
  const A* weight = static_cast<const A*>(p.weight);
  A* dw = p.grad_weight_partial ? static_cast<A*>(p.grad_weight_partial) + chunk * columns : nullptr;
  A* db = p.grad_bias_partial ? static_cast<A*>(p.grad_bias_partial) + chunk * columns : nullptr;
  for (int64_t c = 0; dw && c < columns; ++c) dw[c] = 0;
  for (int64_t c = 0; db && c < columns; ++c) db[c] = 0;

  const int64_t row_begin = chunk * p.rows_per_chunk;
  const int64_t row_end = row_begin + p.rows_per_chunk < p.rows ? row_begin + p.rows_per_chunk : p.rows;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
    const T* dy = static_cast<const T*>(p.grad_output) + row * p.grad_output_stride;
    T* dx = static_cast<T*>(p.grad_input) + row * columns;
    const A mean = static_cast<const A*>(p.mean)[row], rstd = static_cast<const A*>(p.rstd)[row];

    Sum<A> sum_d, sum_g, sum_gd;
    const auto accumulate = [&](Vec<A> d, Vec<A> g, int u) {
      sum_d.part[u] += d;
      sum_g.part[u] += g;
      sum_gd.part[u] += g * d;
    };
    const Vec<A> one = broadcast<A>(1);
    for_columns<A>(
        columns,
        [&](int64_t c, int u) {
          const Vec<A> g = load(dy + c);
          accumulate(load(x + c) - mean, weight ? rounded(g * load(weight + c)) : g, u);
        },
        [&](int64_t c, int64_t n) {
          const Vec<A> d = keep_first<A>(load_partial(x + c, n) - mean, n);
          accumulate(d, rounded(load_partial(dy + c, n) * (weight ? load_partial(weight + c, n) : one)), 0);
        });
    const A shift = sum_d.total() / A(columns);
    const A mean_g = sum_g.total() / A(columns);
    const A mean_gx = (sum_gd.total() / A(columns) - shift * mean_g) * rstd;

    const auto column = [&](int64_t c, int64_t n) {
      const Vec<A> xhat = ((load_upto(x + c, n) - mean) - shift) * rstd;
      const Vec<A> dout = load_upto(dy + c, n);
      // Rounded as it was when its mean was taken, so that one column alone gives exactly zero.
      const Vec<A> g = weight ? rounded(dout * load_upto(weight + c, n)) : dout;
      store_upto(dx + c, (g - mean_g - xhat * mean_gx) * rstd, n);
      if (dw) store_upto(dw + c, load_upto(dw + c, n) + dout * xhat, n);
      if (db) store_upto(db + c, load_upto(db + c, n) + dout, n);
    };
    for_columns<A>(columns, [&](int64_t c, int) { column(c, W<A>); }, column);
  }
}

template <class A>
void reduce_columns(int64_t chunks, int64_t columns, const A* partial, A* total, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) total[c] = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int64_t c = begin; c < end; ++c) total[c] += partial[chunk * columns + c];
}

void forward(const LayerNormForward& p, int64_t row_begin, int64_t row_end) {
  SK_DISPATCH(p.dtype, forward_rows<T>(p, row_begin, row_end));
}

void backward(const LayerNormBackward& p, int64_t chunk_begin, int64_t chunk_end) {
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) SK_DISPATCH(p.dtype, backward_chunk<T>(p, chunk));
}

void reduce(Dtype dtype, int64_t chunks, int64_t columns, const void* partial, void* total, int64_t begin,
            int64_t end) {
  if (dtype == Dtype::f64) {
    reduce_columns(chunks, columns, static_cast<const double*>(partial), static_cast<double*>(total), begin, end);
  } else {
    reduce_columns(chunks, columns, static_cast<const float*>(partial), static_cast<float*>(total), begin, end);
  }
}

}  // namespace

const LayerNormKernels layer_norm_kernels = {forward, backward, reduce};

}  // namespace SK_TIER
}  // namespace seqkern
