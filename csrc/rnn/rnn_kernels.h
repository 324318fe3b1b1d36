// The recurrent kernels' entry points, for the dtypes of a translation unit: all of them (rnn_cpu.cpp), or bfloat16
// with operands of pairs (rnn_bf16.cpp).
#pragma once

#include "rnn_backward.h"
#include "rnn_forward.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// ---- cells alone, on gates that are already summed ------------------------------------------------------------------
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

// ---- entry points ---------------------------------------------------------------------------------------------------
// Runs a statement with the cell as the constant `kCell`: both RNNs share tanh's, and branch at run time.
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

int64_t forward_panel_count(const RnnLayer& l) { SK_BY_ACC(l.dtype, forward_panels<A>(l)); }
int64_t forward_tile_rows(const RnnLayer& l) { return whole_tile(tile_vectors(gate_count(l.cell))); }
int64_t forward_state_bytes(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, ForwardState<A>(l, rows, nullptr).bytes);
}
int64_t forward_scratch_bytes(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, forward_scratch<A>(l, rows) * static_cast<int64_t>(sizeof(A)));
}
// Products with the input on tiles, unless a norm or a projection needs whole rows.
int64_t forward_input_columns(const RnnLayer& l) {
#if defined(SK_TILES)
  return l.inputs > 0 && !l.norm && !l.project ? forward_panels<float>(l) * panel_width<float>(gate_count(l.cell)) : 0;
#else
  (void)l;
  return 0;
#endif
}
int64_t no_input_columns(const RnnLayer&) { return 0; }
int64_t backward_panel_count(const RnnLayer& l) { SK_BY_ACC(l.dtype, backward_panels<A>(l)); }
int64_t backward_tile_rows(const RnnLayer&) { return kTileRows<kGemmVecs>; }
int64_t backward_state_bytes(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, BackwardState<A>(l, rows, nullptr).bytes);
}
int64_t backward_scratch_bytes(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, backward_scratch<A>(l, rows) * static_cast<int64_t>(sizeof(A)));
}

void forward_turn(const RnnForward& p, const RnnShare& share, int64_t turn, int64_t begin, int64_t end, void* scratch) {
  SK_CELL(p.layer->cell,
          SK_BY_ACC(p.layer->dtype, forward_cell_turn<A, kCell>(p, share, turn, begin, end, static_cast<A*>(scratch))));
}
void backward_turn(const RnnBackward& p, const RnnShare& share, int64_t turn, int64_t begin, int64_t end,
                   void* scratch) {
  SK_CELL(p.layer->cell, SK_BY_ACC(p.layer->dtype,
                                   backward_cell_turn<A, kCell>(p, share, turn, begin, end, static_cast<A*>(scratch))));
}

int64_t activate_bytes(const RnnLayer& l) {
  SK_BY_ACC(l.dtype, activate_scratch<A>(l) * static_cast<int64_t>(sizeof(A)));
}
void activate(const RnnActivate& p, int64_t begin, int64_t end, void* scratch) {
  SK_CELL(p.layer->cell, SK_BY_ACC(p.layer->dtype, activate_tokens<A, kCell>(p, begin, end, static_cast<A*>(scratch))));
}

void cell_forward(const RnnCellForward& p, int64_t begin, int64_t end) {
  SK_BY_TYPE(p.dtype, SK_CELL(p.cell, cell_forward_rows<T, kCell>(p, begin, end)));
}
void cell_backward(const RnnCellBackward& p, int64_t begin, int64_t end) {
  SK_BY_TYPE(p.dtype, SK_CELL(p.cell, cell_backward_rows<T, kCell>(p, begin, end)));
}

constexpr RnnKernels kKernels = {
    .forward = {.panels = forward_panel_count,
                .tile_rows = forward_tile_rows,
                .state_bytes = forward_state_bytes,
                .scratch_bytes = forward_scratch_bytes,
                .input_columns = forward_input_columns},
    .backward = {.panels = backward_panel_count,
                 .tile_rows = backward_tile_rows,
                 .state_bytes = backward_state_bytes,
                 .scratch_bytes = backward_scratch_bytes,
                 .input_columns = no_input_columns},
    .forward_turn = forward_turn,
    .backward_turn = backward_turn,
    .activate_scratch = activate_bytes,
    .activate = activate,
    .cell_forward = cell_forward,
    .cell_backward = cell_backward,
};

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
