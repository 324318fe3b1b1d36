// The activation between the products of a feed-forward block, on CPU. Compiled once per instruction-set tier.
//
//   y = a(z),      dz = dy a'(z);    gated, z = (g, u):    y = a(g) u,    dg = dy u a'(g),    du = dy a(g)
//
// The backward pass writes y again: the gradient of the second weight needs it, and it was not kept.
#include "activate.h"
#include "ffn/ffn.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class T, Activation kActivation, bool kGated>
void forward_elements(const FfnForward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for_runs(p.columns, begin, end, [&](int64_t row, int64_t column, int64_t i, int64_t count) SK_INLINED {
    const T* z = static_cast<const T*>(p.z) + row * p.columns * (kGated ? 2 : 1) + column;
    T* output = static_cast<T*>(p.output) + i;
    const auto one = [&](int64_t c, int64_t n) SK_INLINED {
      Vec<A> slope, a = activate<A, kActivation, false>(load_upto(z + c, n), slope);
      if constexpr (kGated) a *= load_upto(z + p.columns + c, n);
      store_upto(output + c, a, n);
    };
    int64_t c = 0;
    for (; c + W<A> <= count; c += W<A>) one(c, W<A>);
    if (c < count) one(c, count - c);
  });
}

template <class T, Activation kActivation, bool kGated>
void backward_elements(const FfnBackward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for_runs(p.columns, begin, end, [&](int64_t row, int64_t column, int64_t i, int64_t count) SK_INLINED {
    const int64_t at = row * p.columns * (kGated ? 2 : 1) + column;
    const T *z = static_cast<const T*>(p.z) + at, *grad = static_cast<const T*>(p.grad_output) + i;
    T *grad_z = static_cast<T*>(p.grad_z) + at, *output = static_cast<T*>(p.output) + i;
    const auto one = [&](int64_t c, int64_t n) SK_INLINED {
      Vec<A> slope;
      const Vec<A> dy = load_upto(grad + c, n), a = activate<A, kActivation, true>(load_upto(z + c, n), slope);
      if constexpr (kGated) {
        const Vec<A> u = load_upto(z + p.columns + c, n);
        store_upto(grad_z + c, dy * u * slope, n);
        store_upto(grad_z + p.columns + c, dy * a, n);
        store_upto(output + c, a * u, n);
      } else {
        store_upto(grad_z + c, dy * slope, n);
        store_upto(output + c, a, n);
      }
    };
    int64_t c = 0;
    for (; c + W<A> <= count; c += W<A>) one(c, W<A>);
    if (c < count) one(c, count - c);
  });
}

template <class T, Activation kActivation>
void forward_of(const FfnForward& p, int64_t begin, int64_t end) {
  if (p.gated) forward_elements<T, kActivation, true>(p, begin, end);
  else forward_elements<T, kActivation, false>(p, begin, end);
}
template <class T, Activation kActivation>
void backward_of(const FfnBackward& p, int64_t begin, int64_t end) {
  if (p.gated) backward_elements<T, kActivation, true>(p, begin, end);
  else backward_elements<T, kActivation, false>(p, begin, end);
}

void forward(const FfnForward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, SK_BY_ACTIVATION(forward_of, p, begin, end));
}
void backward(const FfnBackward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, SK_BY_ACTIVATION(backward_of, p, begin, end));
}

}  // namespace

const FfnKernels ffn_kernels = {forward, backward};

}  // namespace SK_TIER
}  // namespace seqkern
