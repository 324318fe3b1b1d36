// LSTM, GRU and RNN cells on CPU, forward and backward, on gates that are already summed. Compiled once per
// instruction-set tier. The equations are in rnn/cpu/cell.h.
#include "rnn/cpu/cell.h"
#include "rnn_cell/rnn_cell.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class T, Cell kCell>
void cell_forward_rows(const RnnCellForward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  constexpr int G = static_cast<int>(gate_count(kCell)), R = static_cast<int>(saved_count(kCell));
  const int64_t H = p.hidden;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t u = 0; u < H; u += W<A>) {
      const int64_t at = r * H + u, n = H - u;
      Vec<A> x[G], h[G], s[R];
      for (int g = 0; g < G; ++g) {
        x[g] = load_upto(static_cast<const T*>(p.x_gates) + r * G * H + g * H + u, n);
        h[g] = load_upto(static_cast<const T*>(p.h_gates) + r * G * H + g * H + u, n);
      }
      Vec<A> h_new;
      if constexpr (kCell == Cell::lstm) {
        for (int g = 0; g < 4; ++g) s[g] = x[g] + h[g];
        const Vec<A> c = lstm_gates<A, true>(s, load_upto(static_cast<const T*>(p.c) + at, n), {}, u);
        store_upto(static_cast<T*>(p.c_new) + at, c, n);
        h_new = s[3] * tanh<A>(c);
      } else if constexpr (kCell == Cell::gru) {
        h_new = gru_state<A>(x, h, load_upto(static_cast<const T*>(p.h) + at, n), s);
      } else {
        s[0] = h_new = rnn_state<A>(x[0] + h[0], p.cell == Cell::relu);
      }
      store_upto(static_cast<T*>(p.h_new) + at, h_new, n);
      for (int g = 0; g < R; ++g) store_upto(static_cast<A*>(p.activated) + r * R * H + g * H + u, s[g], n);
    }
  }
}

template <class T, Cell kCell>
void cell_backward_rows(const RnnCellBackward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  constexpr int G = static_cast<int>(gate_count(kCell)), R = static_cast<int>(saved_count(kCell));
  const int64_t H = p.hidden;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t u = 0; u < H; u += W<A>) {
      const int64_t at = r * H + u, gate = r * G * H + u, n = H - u;
      T* grad_x = static_cast<T*>(p.grad_x_gates) + gate;
      Vec<A> s[R], d[R], dh = load_upto(static_cast<const T*>(p.grad_h) + at, n);
      for (int g = 0; g < R; ++g) s[g] = load_upto(static_cast<const A*>(p.activated) + r * R * H + g * H + u, n);
      if constexpr (kCell == Cell::lstm) {
        Vec<A> slope, dc = p.grad_c ? load_upto(static_cast<const T*>(p.grad_c) + at, n) : Vec<A>{};
        const Vec<A> tanh_c = tanh<A>(load_upto(static_cast<const T*>(p.c_new) + at, n), slope);
        const Vec<A> c = load_upto(static_cast<const T*>(p.c) + at, n);
        dc = lstm_gradient<A, true>(s, c, dc + dh * s[3] * slope, dh * tanh_c, {}, u, d);
        store_upto(static_cast<T*>(p.grad_c_prev) + at, dc, n);
        for (int g = 0; g < 4; ++g) store_upto(grad_x + g * H, d[g], n);
      } else if constexpr (kCell == Cell::gru) {
        const Vec<A> direct = gru_gradient<A>(s, load_upto(static_cast<const T*>(p.h) + at, n), dh, d);
        store_upto(static_cast<T*>(p.grad_h_prev) + at, direct, n);
        T* grad_h = static_cast<T*>(p.grad_h_gates) + gate;
        for (int g = 0; g < 3; ++g) {
          store_upto(grad_x + g * H, d[(g + 1) % 3], n);
          store_upto(grad_h + g * H, d[g + 1], n);
        }
      } else {
        store_upto(grad_x, rnn_gradient<A>(s[0], dh, p.cell == Cell::relu), n);
      }
    }
  }
}

void cell_forward(const RnnCellForward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, SK_CELL(p.cell, cell_forward_rows<T, kCell>(p, begin, end)));
}
void cell_backward(const RnnCellBackward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, SK_CELL(p.cell, cell_backward_rows<T, kCell>(p, begin, end)));
}

}  // namespace

const RnnCellKernels rnn_cell_kernels = {.forward = cell_forward, .backward = cell_backward};

}  // namespace SK_TIER
}  // namespace seqkern
