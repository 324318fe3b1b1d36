// Norms of plain contiguous matrices by their addresses: what the short way calls.
#pragma once

#include <cstdint>

#include "layer_norm.h"

namespace seqkern {

struct DirectNorm {
  Dtype dtype, weight_dtype, bias_dtype;
  bool centred;
  int64_t rows, columns;
  double eps;
};

void direct_forward(const DirectNorm& norm, const void* input, const void* weight, const void* bias, void* output);
// The gradients of a forward call of the same arguments. Its statistics are found again: that takes less time than the
// allocation of tensors that would keep them. grad_weight and grad_bias are in the parameters' dtypes, or null.
void direct_backward(const DirectNorm& norm, const void* grad_output, const void* input, const void* weight,
                     void* grad_input, void* grad_weight, void* grad_bias);

}  // namespace seqkern
