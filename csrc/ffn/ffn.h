// Arguments and entry points of the activation between the products of a feed-forward block. Torch-free.
#pragma once

#include <cstdint>

#include "activation.h"
#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// Of `columns` outputs a row. Its row of z has as many numbers, or gated twice as many: gate, then up. All contiguous.
struct FfnForward {
  Dtype dtype;
  Activation activation;
  bool gated;
  int64_t columns;
  const void* z;
  void* output;
};

struct FfnBackward {
  Dtype dtype;
  Activation activation;
  bool gated;
  int64_t columns;
  const void* grad_output;
  const void* z;
  void* grad_z;
  void* output;  // again what the forward pass gave
};

struct FfnKernels {
  // Outputs [begin, end), counted row by row.
  void (*forward)(const FfnForward&, int64_t begin, int64_t end);
  void (*backward)(const FfnBackward&, int64_t begin, int64_t end);
};

SK_DECLARE_KERNEL_TABLE(FfnKernels, ffn_kernels)

}  // namespace seqkern
