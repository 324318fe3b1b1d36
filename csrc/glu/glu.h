// Arguments and entry points of the gated linear units. Torch-free.
#pragma once

#include <cstdint>

#include "activation.h"
#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// Element i is in row i / columns, column i % columns. Rows are contiguous, with any row stride; outputs are
// contiguous.
struct GluForward {
  Dtype dtype;
  Activation activation;
  int64_t columns;
  const void* gate;
  int64_t gate_stride;
  const void* up;
  int64_t up_stride;
  void* output;
};

struct GluBackward {
  Dtype dtype;
  Activation activation;
  int64_t columns;
  const void* grad_output;
  int64_t grad_output_stride;
  const void* gate;
  int64_t gate_stride;
  const void* up;
  int64_t up_stride;
  void* grad_gate;
  void* grad_up;
};

struct GluKernels {
  // The elements [begin, end).
  void (*forward)(const GluForward&, int64_t begin, int64_t end);
  void (*backward)(const GluBackward&, int64_t begin, int64_t end);
};

SK_DECLARE_KERNEL_TABLE(GluKernels, glu_kernels)

}  // namespace seqkern
