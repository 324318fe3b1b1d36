// Arguments and entry points of the recurrent kernels. Torch-free.
//
// "dtype" marks memory of the layer's element type, "acc" of its accumulation type, "operand" of the type that products
// take, which is one of the two. Addresses may be null where the comment says so. LSTM's gates are in the order i, f,
// g, o, GRU's in the order r, z, n.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dropout.h"
#include "dtype.h"
#include "products.h"

namespace seqkern {

enum class Cell : int { lstm = 0, gru = 1, tanh = 2, relu = 3, additive = 4, interpolated = 5 };

// Gates, each `hidden` wide. What is saved of a cell: LSTM its gates; GRU r, z, n and q = zh_n; RNN its output;
// additive u; interpolated f and u. Parts of the gradients before activation: those of the gates, but of a GRU those of
// zx_n, r, z and zh_n, in this order, so that both the input's and the recurrent side's are contiguous.
constexpr int64_t gate_count(Cell cell) {
  return cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : cell == Cell::interpolated ? 2 : 1;
}
constexpr int64_t saved_count(Cell cell) { return cell == Cell::gru ? 4 : gate_count(cell); }
// Whether h is also added to the next state, beside the products.
constexpr bool adds_h(Cell cell) { return cell == Cell::gru || cell == Cell::additive || cell == Cell::interpolated; }
// The first part of the gradients of the recurrent side.
constexpr int64_t recurrent_part(Cell cell) { return cell == Cell::gru ? 1 : 0; }
// Columns of the norms' weights and biases: of the products, and for LSTM of c.
constexpr int64_t norm_columns(Cell cell, int64_t hidden) {
  return 2 * gate_count(cell) * hidden + (cell == Cell::lstm ? 2 * hidden : 0);
}

struct Zoneout {
  bool active = false, training = false;
  double p[2] = {0, 0};  // of h and of c
  Dropout mask[2];       // in training
};

// What the directions of a layer share. Rows of the batch are processed in `order`, the longest first: the rows active
// at step t are the first active[t] of it. They are the tokens: row g of step t is token starts[t] + g.
struct RnnLayer {
  Dtype dtype;
  Cell cell;
  int64_t steps, batch, inputs, hidden, width;  // inputs: 0 where there is no W_ih; width: of h
  bool norm, project;
  double eps;
  Zoneout zoneout;
  const int64_t* order;   // (batch)
  const int64_t* active;  // (steps)
  const int64_t* starts;  // (steps + 1)
  const uint8_t* resets;  // (steps, batch), or null
};

// A single step uses the recurrent weights only once: they are packed on the fly, into scratch.
inline bool packs_on_the_fly(const RnnLayer& l) { return l.steps == 1; }
inline bool packs_on_the_fly_back(const RnnLayer& l) {
  return l.steps == 1 && l.batch <= kFewRows && !l.norm && !l.project;
}

struct RnnDirection {
  int64_t index;
  bool reverse;
  const void* packed_w_hh;  // forward: W_hh transposed, grouped by gates; backward: W_hh, one group; or null
  const void* packed_w_hr;  // forward: W_hr transposed; backward: W_hr; one group; null without a projection
  const void* b_hn;         // (hidden) acc, GRU's bias inside the reset gate, or null
  const void* peephole;     // (3, hidden) acc, or null
  const void* norm;         // one row acc, or null
  const void* mask;         // (batch, width) acc, the recurrent mask, or null
  Matrix w_hh;              // the source of packed_w_hh; if that is null, packed in scratch by parts
};

// Where the turns make the products with the input (RnnPass::input_columns), each worker for its own hidden units: at
// every step those of its rows, which need no memory for zx, or in the first turn those of all tokens. Then a share's
// zx begins share_stride after that of the share before. Its panels are panel_stride apart, and a panel has a row of
// the panel's columns for each of the share's tokens.
struct RnnInput {
  const void* packed_w_ih;  // W_ih transposed, grouped by gates; or null if zx is given
  const void* bias;         // (gates) acc, or null
  const void* x;            // (steps, batch, inputs) dtype
  bool every_step;
  int64_t share_stride, panel_stride;
};

// Steps [step_begin, step_end) of one direction, counted in the order of its forward pass. Memory "by token" holds only
// the tokens of these steps, from the earliest t on.
struct RnnForward {
  const RnnLayer* layer;
  RnnDirection direction;
  int64_t step_begin, step_end;
  void* h;   // (batch, width) acc: before step_begin on entry, after the last step on return
  void* c;   // (batch, hidden) acc: likewise; LSTM only
  void* zx;  // by token, rows of zx_stride, acc: W_ih x and all biases but b_hn
  int64_t zx_stride;
  void* output;  // (steps, batch, ...) dtype, rows of output_stride
  int64_t output_stride;
  void* cells;     // (steps, batch, hidden) acc, or null
  void* gates;     // (steps, batch, saved) acc, or null
  void* products;  // (steps, batch, gates) acc, the raw W_hh h, or null
  RnnInput input;
};

struct RnnBackward {
  const RnnLayer* layer;
  RnnDirection direction;
  int64_t step_begin, step_end;
  const void* grad_output;  // (steps, batch, ...) dtype, rows of output_stride, or null
  const void* grad_cells;   // (steps, batch, hidden) acc, or null
  const void* output;       // (steps, batch, ...) dtype, rows of output_stride
  int64_t output_stride;
  const void* h0;     // (batch, width) dtype
  const void* c0;     // (batch, hidden) acc
  const void* cells;  // (steps, batch, hidden) acc
  const void* gates;  // (steps, batch, saved) acc, or by token
  const void* products;
  bool by_token;     // whether gates and products are
  void* grad_h;      // (batch, width) acc: of h after the last step on entry, before step_begin on return
  void* grad_c;      // (batch, hidden) acc: likewise
  void* grad_z;      // by token, rows of grad_z_stride, operand: of the gates before activation
  void* grad_zh;     // by token, rows of grad_z_stride, operand: of the raw products, with norm only
  void* h_wide;      // by token, rows of hidden, acc: the projection's input
  void* grad_h_hat;  // by token, rows of width, acc: the gradient of its output; or both null
  int64_t grad_z_stride;
  void* sums;           // (batch, sum_columns) acc, added to: sums over the steps of the gradients of the
  int64_t sum_columns;  // peepholes, if any, and of the norm, if any; or null
};

// Recomputes the gates from the products of all steps.
struct RnnActivate {
  const RnnLayer* layer;
  RnnDirection direction;
  const void* zx;  // acc, rows of zx_stride
  int64_t zx_stride;
  const void* zh;             // acc, (tokens, gates)
  const void* const* c_prev;  // of each token, acc; null: zeros. LSTM only
  void* gates;                // acc, (tokens, saved)
};

// A share: every stride-th row of the order, and the memory that its workers share. It counts its own tokens: those of
// step t begin at starts[t].
struct RnnShare {
  int64_t first, stride, rows;
  void* state;
  const int64_t* starts;  // (steps + 1)
};

// Memory sizes are in bytes. A pass over steps [begin, end) is cut into turns 0 ... end - begin, and a turn into panels
// of hidden units. Every panel of a turn needs all panels of the turn before, and nothing else. Scratch belongs to one
// worker at a time.
struct RnnPass {
  int64_t (*panels)(const RnnLayer&);
  int64_t (*tile_rows)(const RnnLayer&);  // of a whole tile of the recurrent product
  int64_t (*state_bytes)(const RnnLayer&, int64_t rows);
  int64_t (*scratch_bytes)(const RnnLayer&, int64_t rows);
  // Columns of zx over all panels if the turns make the products with the input; 0 if not.
  int64_t (*input_columns)(const RnnLayer&);
  int64_t every_step_from;  // rows of a share from which on they make them at every step; 0: never
  bool same_bits;           // whether a product of all tokens' inputs beforehand gives the same bits
};

struct RnnKernels {
  RnnPass forward, backward;
  void (*forward_turn)(const RnnForward&, const RnnShare&, int64_t turn, int64_t panel_begin, int64_t panel_end,
                       void* scratch);
  void (*backward_turn)(const RnnBackward&, const RnnShare&, int64_t turn, int64_t panel_begin, int64_t panel_end,
                        void* scratch);
  int64_t (*activate_scratch)(const RnnLayer&);
  void (*activate)(const RnnActivate&, int64_t token_begin, int64_t token_end, void* scratch);
};

SK_DECLARE_KERNEL_TABLE(RnnKernels, rnn_kernels)
SK_DECLARE_BF16_TABLE(RnnKernels, rnn_bf16_kernels)

inline const RnnKernels& rnn_kernels_for(Dtype dtype) {
  const RnnKernels* bf16 = dtype == Dtype::bf16 ? rnn_bf16_kernels() : nullptr;
  return bf16 ? *bf16 : rnn_kernels();
}

}  // namespace seqkern
