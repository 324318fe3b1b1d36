// The recurrent cells, one vector of hidden units at a time, forward and backward; layer normalisation of a row.
//
// z = zx + zh are the gates before activation, s after it, h' and c' the state before the step.
//   LSTM   i, f, o = sigmoid(z + p c), g = tanh(z);  c~ = f c' + i g;  h~ = o tanh(c~)
//          (p c: peepholes; i and f look at c', o at c~)                Hochreiter & Schmidhuber 1997, Gers et al. 2000
//          dc~ = dh~ o (1 - tanh^2 c~) + dc + p_o do';  di' = dc~ g i(1-i),  df' = dc~ c' f(1-f),  dg' = dc~ i (1-g^2),
//          do' = dh~ tanh(c~) o(1-o);  dc' = dc~ f + p_i di' + p_f df'
//   GRU    r, z = sigmoid, n = tanh(zx_n + r q) with q = zh_n;  h^ = (1 - z) n + z h'
//                                                                               Cho et al. 2014; torch's order of gates
//          dzx_n = dh^ (1-z) (1-n^2),  dr' = dzx_n q r(1-r),  dz' = dh^ (h' - n) z(1-z),  dq = dzx_n r,  dh' += dh^ z
//   RNN    h^ = tanh(z) or max(z, 0)                                                                        Elman 1990
//   Additive      u = tanh(z),  h^ = h' + u;                                dz = dh^ (1 - u^2),  dh' += dh^
//   Interpolated  f = sigmoid(z_f), u = tanh(z_u),  h^ = f h' + (1 - f) u:  two steps from the RNN towards the LSTM
//          df' = dh^ (h' - u) f(1-f),  du' = dh^ (1-f) (1-u^2),  dh' += dh^ f
//   Layer normalisation: y = x^ w + b with x^ = (x - mean) rstd;  dx = rstd (g - mean(g) - x^ mean(g x^)) with g = dy w
//                                                                                                   Ba et al. 2016
#pragma once

#include <cmath>

#include "philox.h"
#include "rnn/rnn.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Peepholes of W hidden units. Without peepholes nothing is added: a zero times an infinite state would be NaN.
template <class A>
struct Peepholes {
  const A* p = nullptr;  // (3, hidden), or null
  int64_t hidden = 0;
  SK_INLINE Vec<A> at(int64_t which, int64_t u) const { return load_upto(p + which * hidden + u, hidden - u); }
};

// z becomes i, f, g, o; returns c~.
template <class A, bool Plain>
SK_INLINE Vec<A> lstm_gates(Vec<A> (&z)[4], Vec<A> c, const Peepholes<A>& peepholes, int64_t u) {
  const bool peeps = !Plain && peepholes.p;
  if (peeps) {
    z[0] += peepholes.at(0, u) * c;
    z[1] += peepholes.at(1, u) * c;
  }
  z[0] = sigmoid<A>(z[0]);
  z[1] = sigmoid<A>(z[1]);
  z[2] = tanh<A>(z[2]);
  const Vec<A> c_new = z[1] * c + z[0] * z[2];
  if (peeps) z[3] += peepholes.at(2, u) * c_new;
  z[3] = sigmoid<A>(z[3]);
  return c_new;
}

// From the gradients of c~ (without o's peephole) and of o to d, the gradients before activation; returns that of c'.
template <class A, bool Plain>
SK_INLINE Vec<A> lstm_gradient(const Vec<A> (&s)[4], Vec<A> c, Vec<A> dc, Vec<A> d_o, const Peepholes<A>& peepholes,
                               int64_t u, Vec<A> (&d)[4]) {
  const bool peeps = !Plain && peepholes.p;
  d[3] = d_o * (s[3] * (A(1) - s[3]));
  if (peeps) dc += peepholes.at(2, u) * d[3];
  d[0] = dc * s[2] * (s[0] * (A(1) - s[0]));
  d[1] = dc * c * (s[1] * (A(1) - s[1]));
  d[2] = dc * s[0] * (A(1) - s[2] * s[2]);
  Vec<A> dc_prev = dc * s[1];
  if (peeps) dc_prev += peepholes.at(0, u) * d[0] + peepholes.at(1, u) * d[1];
  return dc_prev;
}

// s becomes r, z, n, q; returns h^.
template <class A>
SK_INLINE Vec<A> gru_state(const Vec<A> (&zx)[3], const Vec<A> (&zh)[3], Vec<A> h, Vec<A> (&s)[4]) {
  s[0] = sigmoid<A>(zx[0] + zh[0]);
  s[1] = sigmoid<A>(zx[1] + zh[1]);
  s[2] = tanh<A>(zx[2] + s[0] * zh[2]);
  s[3] = zh[2];
  return (A(1) - s[1]) * s[2] + s[1] * h;
}

// d: the gradients of zx_n, r, z and zh_n before activation. Returns the part of h's gradient that bypasses the gates.
template <class A>
SK_INLINE Vec<A> gru_gradient(const Vec<A> (&s)[4], Vec<A> h, Vec<A> dh, Vec<A> (&d)[4]) {
  d[0] = dh * (A(1) - s[1]) * (A(1) - s[2] * s[2]);
  d[1] = d[0] * s[3] * (s[0] * (A(1) - s[0]));
  d[2] = dh * (h - s[2]) * (s[1] * (A(1) - s[1]));
  d[3] = d[0] * s[0];
  return dh * s[1];
}

// s becomes f, u; returns h^.
template <class A>
SK_INLINE Vec<A> interpolated_state(Vec<A> (&s)[2], Vec<A> h) {
  s[0] = sigmoid<A>(s[0]), s[1] = tanh<A>(s[1]);
  return s[0] * h + (A(1) - s[0]) * s[1];
}
// d: the gradients of f and u before activation. Returns the part of h's gradient that bypasses the gates.
template <class A>
SK_INLINE Vec<A> interpolated_gradient(const Vec<A> (&s)[2], Vec<A> h, Vec<A> dh, Vec<A> (&d)[2]) {
  d[0] = dh * (h - s[1]) * (s[0] * (A(1) - s[0]));
  d[1] = dh * (A(1) - s[0]) * (A(1) - s[1] * s[1]);
  return dh * s[0];
}

// NaN stays NaN, as in torch.
template <class A>
SK_INLINE Vec<A> rnn_state(Vec<A> z, bool relu) {
  return relu ? (z <= A(0) ? Vec<A>{} : z) : tanh<A>(z);
}
template <class A>
SK_INLINE Vec<A> rnn_gradient(Vec<A> h, Vec<A> dh, bool relu) {
  return relu ? (h <= A(0) ? Vec<A>{} : dh) : dh * (A(1) - h * h);
}

// ---- zoneout ------------------------------------------------------------------------------------------------------
// Krueger et al. 2017: each hidden unit keeps its old state or takes the new one; in evaluation it takes the
// expectation.
template <class A>
class ZoneoutRow {
 public:
  // which: 0 for h, 1 for c.
  SK_INLINE void begin(const Zoneout& zoneout, int which, int64_t row) {
    training_ = zoneout.training;
    p_ = static_cast<A>(zoneout.p[which]);
    if (training_) random_.begin(zoneout.mask[which], row);
  }
  SK_INLINE Vec<A> mix(Vec<A> old_state, Vec<A> new_state, int64_t u) {
    if (p_ == A(0)) return new_state;
    if (training_) return random_.kept(u) ? new_state : old_state;
    return p_ * old_state + (A(1) - p_) * new_state;
  }
  // Splits the output's gradient into those of the old state (returned) and of the new state.
  SK_INLINE Vec<A> split(Vec<A> grad, int64_t u, Vec<A>& grad_new) {
    if (p_ == A(0)) {
      grad_new = grad;
      return Vec<A>{};
    }
    if (training_) {
      const IVec<A> kept = random_.kept(u);
      grad_new = kept ? grad : Vec<A>{};
      return kept ? Vec<A>{} : grad;
    }
    grad_new = (A(1) - p_) * grad;
    return p_ * grad;
  }

 private:
  bool training_ = false;
  A p_ = 0;
  DropoutRow<A> random_;
};

// ---- layer normalisation of a row -----------------------------------------------------------------------------------
template <class A>
struct RowNorm {
  A mean = 0, rstd = 0;
  RowNorm() = default;
  RowNorm(const A* x, int64_t n, double eps) {
    Vec<A> sum = {};
    for (int64_t i = 0; i < n; i += W<A>) sum += load_upto(x + i, n - i);
    mean = sum_lanes<A>(sum) / static_cast<A>(n);
    Vec<A> squares = {};
    for (int64_t i = 0; i < n; i += W<A>) {
      const Vec<A> v = load_upto(x + i, n - i) - mean;
      squares += n - i < W<A> ? keep_first<A>(v * v, n - i) : v * v;
    }
    rstd = A(1) / std::sqrt(sum_lanes<A>(squares) / static_cast<A>(n) + static_cast<A>(eps));
  }
  SK_INLINE Vec<A> normalized(Vec<A> x) const { return (x - mean) * rstd; }
};

template <class A>
void norm_row(const A* x, int64_t n, double eps, const A* weight, const A* bias, A* y) {
  const RowNorm<A> norm(x, n, eps);
  for (int64_t i = 0; i < n; i += W<A>)
    store_upto(y + i,
               norm.normalized(load_upto(x + i, n - i)) * load_upto(weight + i, n - i) + load_upto(bias + i, n - i),
               n - i);
}

// dx from dy, possibly in place; adds to the sums for weight and bias, if any.
template <class A, class T>
void norm_gradient_row(const A* x, int64_t n, const RowNorm<A>& norm, const A* weight, const T* dy, T* dx,
                       A* weight_sum, A* bias_sum) {
  Vec<A> sum = {}, product = {};
  for (int64_t i = 0; i < n; i += W<A>) {
    const int64_t left = n - i;
    const Vec<A> d = load_upto(dy + i, left), xhat = norm.normalized(load_upto(x + i, left));
    const Vec<A> g = d * load_upto(weight + i, left);  // zero beyond the row
    sum += g;
    product += g * xhat;
    if (weight_sum) {
      store_upto(weight_sum + i, load_upto(weight_sum + i, left) + d * xhat, left);
      store_upto(bias_sum + i, load_upto(bias_sum + i, left) + d, left);
    }
  }
  const A mean = sum_lanes<A>(sum) / static_cast<A>(n), slope = sum_lanes<A>(product) / static_cast<A>(n);
  for (int64_t i = 0; i < n; i += W<A>) {
    const int64_t left = n - i;
    const Vec<A> g = load_upto(dy + i, left) * load_upto(weight + i, left);
    const Vec<A> xhat = norm.normalized(load_upto(x + i, left));
    store_upto(dx + i, norm.rstd * (g - mean - xhat * slope), left);
  }
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern

// Runs a statement with the cell as the constant `kCell`: that of tanh for both RNNs, which part at run time.
// With every cell of a layer; below, with those that have an op of a single step.
#define SK_LAYER_CELL(cell, ...)               \
  if (cell == Cell::additive) {                \
    constexpr Cell kCell = Cell::additive;     \
    __VA_ARGS__;                               \
  } else if (cell == Cell::interpolated) {     \
    constexpr Cell kCell = Cell::interpolated; \
    __VA_ARGS__;                               \
  } else SK_CELL(cell, __VA_ARGS__)
#define SK_CELL(cell, ...)             \
  if (cell == Cell::lstm) {            \
    constexpr Cell kCell = Cell::lstm; \
    __VA_ARGS__;                       \
  } else if (cell == Cell::gru) {      \
    constexpr Cell kCell = Cell::gru;  \
    __VA_ARGS__;                       \
  } else {                             \
    constexpr Cell kCell = Cell::tanh; \
    __VA_ARGS__;                       \
  }
