// Gated linear units on CPU, forward and backward. Compiled once per instruction-set tier.
//
//   y = a(g) u,    dg = dy u a'(g),    du = dy a(g)                                     Shazeer 2020, eq. 5 and 6
//
// The activations are those of common/activate.h. Measurements: NOTES.md.
#include "activate.h"
#include "glu/glu.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class T, Activation kActivation>
void forward_elements(const GluForward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for_runs(p.columns, begin, end, [&](int64_t row, int64_t column, int64_t i, int64_t count) SK_INLINED {
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride + column;
    const T* up = static_cast<const T*>(p.up) + row * p.up_stride + column;
    T* output = static_cast<T*>(p.output) + i;
    const auto one = [&](int64_t c, int64_t n) SK_INLINED {
      Vec<A> slope;
      const Vec<A> a = activate<A, kActivation, false>(load_upto(gate + c, n), slope);
      store_upto(output + c, a * load_upto(up + c, n), n);
    };
    int64_t c = 0;
    for (; c + W<A> <= count; c += W<A>) one(c, W<A>);
    if (c < count) one(c, count - c);
  });
}

template <class T, Activation kActivation>
void backward_elements(const GluBackward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for_runs(p.columns, begin, end, [&](int64_t row, int64_t column, int64_t i, int64_t count) SK_INLINED {
    const T* grad = static_cast<const T*>(p.grad_output) + row * p.grad_output_stride + column;
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride + column;
    const T* up = static_cast<const T*>(p.up) + row * p.up_stride + column;
    T *grad_gate = static_cast<T*>(p.grad_gate) + i, *grad_up = static_cast<T*>(p.grad_up) + i;
    const auto one = [&](int64_t c, int64_t n) SK_INLINED {
      Vec<A> slope;
      const Vec<A> dy = load_upto(grad + c, n), u = load_upto(up + c, n);
      const Vec<A> a = activate<A, kActivation, true>(load_upto(gate + c, n), slope);
      store_upto(grad_gate + c, dy * u * slope, n);
      store_upto(grad_up + c, dy * a, n);
    };
    int64_t c = 0;
    for (; c + W<A> <= count; c += W<A>) one(c, W<A>);
    if (c < count) one(c, count - c);
  });
}

void forward(const GluForward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, SK_BY_ACTIVATION(forward_elements, p, begin, end));
}
void backward(const GluBackward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, SK_BY_ACTIVATION(backward_elements, p, begin, end));
}

}  // namespace

const GluKernels glu_kernels = {forward, backward};

}  // namespace SK_TIER
}  // namespace seqkern
