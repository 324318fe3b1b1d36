// Highway layers on CPU after their product, forward and backward. Compiled once per instruction-set tier.
//
//   t = sigmoid(z),    y = t a(c) + (1 - t) x,                                      Srivastava et al. 2015, eq. 3
//   dc = dy t a'(c),   dz = dy (a(c) - x) t (1 - t),   dx = dy (1 - t)
//
// The activations are those of common/activate.h, and tanh. A product is rounded before it is added to: the compiler
// would otherwise round one of the two last, and not the same one in whole vectors and at the end.
#include "activate.h"
#include "highway/highway.h"
#include "vectors.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A, HighwayActivation kActivation, bool kSlope>
SK_INLINE Vec<A> activated(Vec<A> c, Vec<A>& slope) {
  if constexpr (kActivation == HighwayActivation::relu) return activate<A, Activation::relu, kSlope>(c, slope);
  else if constexpr (kActivation == HighwayActivation::gelu) return activate<A, Activation::gelu, kSlope>(c, slope);
  else if constexpr (kActivation == HighwayActivation::silu) return activate<A, Activation::silu, kSlope>(c, slope);
  else if constexpr (kSlope) return tanh<A>(c, slope);
  else return tanh<A>(c);
}

template <class T>
SK_INLINE const T* at(const HighwayRows& rows, int64_t row, int64_t column) {
  return static_cast<const T*>(rows.data) + row * rows.stride + column;
}

template <class T, HighwayActivation kActivation>
void forward_elements(const HighwayForward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for_runs(p.columns, begin, end, [&](int64_t row, int64_t column, int64_t i, int64_t count) SK_INLINED {
    const T *candidate = at<T>(p.candidate, row, column), *gate = at<T>(p.gate, row, column);
    const T* x = at<T>(p.x, row, column);
    T* output = static_cast<T*>(p.output) + i;
    for_vectors<A>(count, [&](int64_t k, int64_t n) SK_INLINED {
      Vec<A> slope, rest;
      const Vec<A> a = activated<A, kActivation, false>(load_upto(candidate + k, n), slope);
      const Vec<A> t = sigmoid_both<A>(load_upto(gate + k, n), rest);
      store_upto(output + k, rounded(t * a) + rest * load_upto(x + k, n), n);
    });
  });
}

template <class T, HighwayActivation kActivation>
void backward_elements(const HighwayBackward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for_runs(p.columns, begin, end, [&](int64_t row, int64_t column, int64_t i, int64_t count) SK_INLINED {
    const T *candidate = at<T>(p.candidate, row, column), *gate = at<T>(p.gate, row, column);
    const T *x = at<T>(p.x, row, column), *grad = at<T>(p.grad_output, row, column);
    T *grad_candidate = static_cast<T*>(p.grad_candidate) + i, *grad_gate = static_cast<T*>(p.grad_gate) + i;
    T* grad_x = static_cast<T*>(p.grad_x) + i;
    for_vectors<A>(count, [&](int64_t k, int64_t n) SK_INLINED {
      Vec<A> slope, rest;
      const Vec<A> dy = load_upto(grad + k, n);
      const Vec<A> a = activated<A, kActivation, true>(load_upto(candidate + k, n), slope);
      const Vec<A> t = sigmoid_both<A>(load_upto(gate + k, n), rest);
      store_upto(grad_candidate + k, dy * t * slope, n);
      store_upto(grad_gate + k, dy * (rounded(a) - load_upto(x + k, n)) * (t * rest), n);
      store_upto(grad_x + k, dy * rest, n);
    });
  });
}

#define SK_BY_HIGHWAY(function, ...)                                                        \
  switch (p.activation) {                                                                   \
    case HighwayActivation::relu: return function<T, HighwayActivation::relu>(__VA_ARGS__); \
    case HighwayActivation::tanh: return function<T, HighwayActivation::tanh>(__VA_ARGS__); \
    case HighwayActivation::gelu: return function<T, HighwayActivation::gelu>(__VA_ARGS__); \
    case HighwayActivation::silu: return function<T, HighwayActivation::silu>(__VA_ARGS__); \
  }

void forward(const HighwayForward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, SK_BY_HIGHWAY(forward_elements, p, begin, end));
}
void backward(const HighwayBackward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, SK_BY_HIGHWAY(backward_elements, p, begin, end));
}

}  // namespace

const HighwayKernels highway_kernels = {forward, backward};

}  // namespace SK_TIER
}  // namespace seqkern
