// Arguments and entry points of the loss of negative sampling. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// Of example n: an input row of w_in, and 1 + negatives output rows of w_out, the positive first. Rows of the matrices
// are contiguous.
struct SgnsForward {
  Dtype dtype;
  int64_t negatives, columns;
  const void *w_in, *w_out;
  int64_t in_stride, out_stride;
  const int64_t *center, *context, *negative;  // (examples), (examples), (examples, negatives)
  void* loss;                                  // (examples) acc
  void* scores;                                // (examples, 1 + negatives) acc
};

// A row of a gradient: the sum over entries of weights times rows, in the entries' order.
struct SgnsRow {
  Dtype dtype;
  int64_t columns;
  const void* source;
  int64_t stride;
  int64_t count;
  const int64_t* rows;  // of the source
  const void* weights;  // acc
  void* to;             // dtype
};

struct SgnsKernels {
  void (*forward)(const SgnsForward&, int64_t begin, int64_t end);  // examples
  // In the place of scores: the gradients of the examples' scores, from those of the losses (acc).
  void (*grad_scores)(const SgnsForward&, const void* grad_loss, void* scores, int64_t begin, int64_t end);
  void (*sum_row)(const SgnsRow&);
};

SK_DECLARE_KERNEL_TABLE(SgnsKernels, sgns_kernels)

}  // namespace seqkern
