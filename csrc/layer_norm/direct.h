// Norms of plain contiguous matrices by their addresses: what the short way calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layer_norm.h"
#include "pool.h"

namespace seqkern {

struct DirectNorm {
  Dtype dtype, weight_dtype, bias_dtype;
  bool centred;
  int64_t rows, columns;
  double eps;
};

// Bytes of what a forward call leaves for its backward call: their number, and a mean and a 1 / sqrt(var + eps) of each
// row.
size_t statistics_size(const DirectNorm& norm);

// `residual` is null, or added to the input into `sum`, which is normalised. `statistics` may be null.
void direct_forward(const DirectNorm& norm, const void* input, const void* residual, const void* weight,
                    const void* bias, void* output, void* sum, void* statistics);
// The gradients of a forward call of the same arguments, with its statistics. Without, or where they are not as many as
// the rows, they are found again.
// grad_weight and grad_bias are in the parameters' dtypes, or null. `input` is what was normalised, `grad_sum` null or
// a gradient that is added to its.
void direct_backward(const DirectNorm& norm, const void* statistics, const void* grad_output, const void* grad_sum,
                     const void* input, const void* weight, void* grad_input, void* grad_weight, void* grad_bias);

// What the library of the nodes (node.cpp) calls in this one.
struct DirectCalls {
  decltype(&direct_backward) backward;
  decltype(&pool_take) take;
  decltype(&pool_give) give;
};

}  // namespace seqkern
