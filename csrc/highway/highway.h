// Arguments and entry points of highway layers, after their product. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

enum class HighwayActivation : int { relu = 0, tanh = 1, gelu = 2, silu = 3 };

// Element i is in row i / columns, column i % columns. Rows are contiguous, with any row stride; outputs are
// contiguous.
struct HighwayRows {
  const void* data;
  int64_t stride;
};

struct HighwayForward {
  Dtype dtype;
  HighwayActivation activation;
  int64_t columns;
  HighwayRows candidate, gate, x;
  void* output;
};

struct HighwayBackward {
  Dtype dtype;
  HighwayActivation activation;
  int64_t columns;
  HighwayRows grad_output, candidate, gate, x;
  void *grad_candidate, *grad_gate, *grad_x;
};

struct HighwayKernels {
  // The elements [begin, end).
  void (*forward)(const HighwayForward&, int64_t begin, int64_t end);
  void (*backward)(const HighwayBackward&, int64_t begin, int64_t end);
};

SK_DECLARE_KERNEL_TABLE(HighwayKernels, highway_kernels)

}  // namespace seqkern
