// Arguments and entry points of a convolution's maximum over time; a convolution itself is products alone. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"
#include "sequences.h"

namespace seqkern {

// The order is that of ACTIVATIONS in seqkern/reference/conv1d_max.py: those that never decrease.
enum class MaxActivation : int { none = 0, relu = 1, tanh = 2, sigmoid = 3 };

// Of sequence b and filter c, with windows of `width` rows,
//
//   z = max over t of sum over k, d of weight[c, k, d] x[t + k, d] + bias[c],    y = activation(z)
struct MaxConvolution {
  Dtype dtype;
  Sequences in;
  int64_t columns, width, filters;
  const void* x;  // windows are contiguous
  int64_t x_batch, x_row;

  int64_t windows(int64_t b) const {
    const int64_t length = in.length(b);
    return length > width ? length - width + 1 : 1;  // one of zeros behind the rows of a short sequence
  }
};

// The largest of `count` rows of products, to `best` and `index`; merged with what is there, or not.
struct MaxRows {
  Dtype acc;                      // of products and best
  int64_t filters, count, first;  // the number of the first row
  const void* products;
  int64_t stride;
  void* best;
  int32_t* index;
  bool merge;
};

// y, and z with its bias, of all sequences.
struct MaxOutputs {
  Dtype dtype;
  MaxActivation activation;
  int64_t batch, filters;
  const void* bias;  // (filters) in the accumulation type, or null
  void* z;           // (batch, filters) in the accumulation type: without the bias, then with it
  void* output;
};

struct MaxBackward {
  MaxConvolution of;
  MaxActivation activation;
  const void* grad_output;  // (batch, filters), contiguous
  const void* z;
  const int32_t* index;
  const void* weight;          // (filters, width * columns), contiguous
  void* slopes;                // (batch, filters) in the accumulation type: grad_output activation'(z)
  void *grad_x, *grad_weight;  // contiguous; or null
};

constexpr int64_t kMaxFilters = 16;  // whose gradients are summed side by side

struct MaxConvolutionKernels {
  int64_t (*scratch)(const MaxConvolution&);
  void (*largest)(const MaxRows&);
  void (*outputs)(const MaxOutputs&, int64_t begin, int64_t end);
  void (*slopes)(const MaxBackward&, int64_t begin, int64_t end);
  // The gradients of a sequence, and of at most kMaxFilters filters.
  void (*grad_x)(const MaxBackward&, int64_t b, void* scratch);
  void (*grad_weight)(const MaxBackward&, int64_t begin, int64_t end, void* scratch);
};

SK_DECLARE_KERNEL_TABLE(MaxConvolutionKernels, max_convolution_kernels)

}  // namespace seqkern
