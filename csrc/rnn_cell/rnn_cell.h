// Arguments and entry points of the recurrent cells' kernels: one step, on gates that are already summed over their
// inputs. The order of gates and what is saved: rnn/rnn.h. Torch-free.
#pragma once

#include "rnn/rnn.h"

namespace seqkern {

struct RnnCellForward {
  Dtype dtype;
  Cell cell;
  int64_t hidden;
  const void *x_gates, *h_gates;  // (batch, gates) dtype
  const void *h, *c;              // (batch, hidden) dtype
  void *h_new, *c_new;            // (batch, hidden) dtype
  void* activated;                // (batch, saved) acc
};

struct RnnCellBackward {
  Dtype dtype;
  Cell cell;
  int64_t hidden;
  const void *grad_h, *grad_c;        // (batch, hidden) dtype; grad_c may be null
  const void *h, *c, *c_new;          // (batch, hidden) dtype
  const void* activated;              // (batch, saved) acc
  void *grad_x_gates, *grad_h_gates;  // (batch, gates) dtype; grad_h_gates: GRU only
  void *grad_h_prev, *grad_c_prev;    // (batch, hidden) dtype; GRU only, LSTM only
};

struct RnnCellKernels {
  void (*forward)(const RnnCellForward&, int64_t row_begin, int64_t row_end);
  void (*backward)(const RnnCellBackward&, int64_t row_begin, int64_t row_end);
};

SK_DECLARE_KERNEL_TABLE(RnnCellKernels, rnn_cell_kernels)

}  // namespace seqkern
