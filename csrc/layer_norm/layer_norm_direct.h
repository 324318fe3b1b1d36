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

// `residual` is null, or added to the input into `sum`, which is normalised.
void direct_forward(const DirectNorm& norm, const void* input, const void* residual, const void* weight,
                    const void* bias, void* output, void* sum);
// The gradients of a forward call of the same arguments. Its statistics are found again: that takes less time than the
// allocation of tensors that would keep them. grad_weight and grad_bias are in the parameters' dtypes, or null.
// `input` is what was normalised, `grad_sum` null or a gradient that is added to its.
void direct_backward(const DirectNorm& norm, const void* grad_output, const void* grad_sum, const void* input,
                     const void* weight, void* grad_input, void* grad_weight, void* grad_bias);

}  // namespace seqkern
