// Arguments and entry points of the recurrent kernels. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"
#include "product.h"

namespace seqkern {

// Steps [step_begin, step_end) of one LSTM layer in one direction, counted in the order of the forward pass; `reverse`
// reads and writes the rows of a sequence from the last to the first. "dtype" marks tensors of that type, "acc" of its
// accumulation type; all contiguous. Gates lie in torch's order i, f, g, o, each `hidden` wide.
struct LstmForward {
  Dtype dtype;
  int64_t steps, batch, hidden, step_begin, step_end;
  bool reverse;
  const void* packed_w_hh;  // B(k, n) = w_hh[n, k], packed in 4 groups
  const void* c0;           // (batch, hidden) acc
  void* h;                  // (batch, hidden) acc: h before step_begin on entry, after the last step on return
  void* gates;              // (steps, batch, 4 hidden) acc: W_ih x + b on entry, the activated gates on return
  void* cells;              // (steps, batch, hidden) acc
  void* output;             // (steps, batch, hidden) dtype
};

struct LstmBackward {
  Dtype dtype;
  int64_t steps, batch, hidden, step_begin, step_end;
  bool reverse;
  const void* packed_w_hh;  // B(k, n) = w_hh[k, n], packed in 1 group
  const void* grad_output;  // (steps, batch, hidden) dtype
  const void* c0;           // (batch, hidden) acc
  const void* cells;        // (steps, batch, hidden) acc
  const void* gates;        // (steps, batch, 4 hidden) acc, activated
  void* grad_h;             // (batch, hidden) acc: that of h after the last step on entry, before step_begin on return
  void* grad_c;             // (batch, hidden) acc: likewise
  void* grad_gates;         // (step_end - step_begin, batch, 4 hidden) acc, before activation; in the order of the rows
  void* grad_gates_sum;     // (batch, 4 hidden) acc: the sum over the steps so far, from `steps` down; or null
};

// The cell alone, on gates that are already summed.
struct LstmCellForward {
  Dtype dtype;
  int64_t hidden;
  const void* gates;  // (batch, 4 hidden) dtype, before activation
  const void* c;      // (batch, hidden) dtype
  void* h;            // (batch, hidden) dtype
  void* c_new;        // (batch, hidden) dtype
  void* activated;    // (batch, 4 hidden) acc
};

struct LstmCellBackward {
  Dtype dtype;
  int64_t hidden;
  const void* grad_h;     // (batch, hidden) dtype
  const void* grad_c;     // (batch, hidden) dtype
  const void* activated;  // (batch, 4 hidden) acc
  const void* c;          // (batch, hidden) dtype
  const void* c_new;      // (batch, hidden) dtype
  void* grad_gates;       // (batch, 4 hidden) dtype
  void* grad_c_prev;      // (batch, hidden) dtype
};

// Scratch is counted in elements of the accumulation type, and belongs to one worker at a time.
struct RnnKernels {
  int64_t (*packed_size)(Dtype dtype, int64_t depth, int64_t columns, int64_t groups);
  int64_t (*pack_items)(const Packing&);
  void (*pack)(const Packing&, int64_t item);
  int64_t (*multiply_scratch)(Dtype dtype);
  void (*multiply)(const Product&, int64_t item, void* scratch);
  int64_t (*lstm_scratch)(Dtype dtype, int64_t rows, int64_t hidden);  // of either direction of the sequence loop
  void (*lstm_forward)(const LstmForward&, int64_t row_begin, int64_t row_end, void* scratch);
  void (*lstm_backward)(const LstmBackward&, int64_t row_begin, int64_t row_end, void* scratch);
  void (*lstm_cell_forward)(const LstmCellForward&, int64_t row_begin, int64_t row_end);
  void (*lstm_cell_backward)(const LstmCellBackward&, int64_t row_begin, int64_t row_end);
  // sum[c] = sum over r, in order, of rows[r, c]; both acc.
  void (*sum_rows)(Dtype dtype, int64_t rows, int64_t columns, const void* source, void* sum);
};

SK_DECLARE_KERNEL_TABLE(RnnKernels, rnn_kernels)

}  // namespace seqkern
