// Arguments and entry points of cross-entropy on rows of logits. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// Rows of logits, each contiguous. Statistics have the accumulation type A.
struct LogitRows {
  Dtype dtype;
  int64_t classes;
  const void* logits;
  int64_t stride;
  const void* class_weight;  // (classes) in A, or null
  double softcap;            // 0: none
};

// What the classes are to each row, (rows) each.
struct RowSums {
  const int64_t* targets;  // negative: the row is left out
  void *max, *sum;         // of the capped logits, and of exp(logit - max)
  void* weighted;          // the sum of class_weight * (logit - max); or null
  void* hit_logits;        // the target's capped logit
};

// The loss's derivative by the logit of class j in row r: p_scale[r] exp(logit - max[r]) - spread[r] class_weight[j],
// less hit[r] where j is the target; times softcap's derivative. Zeros for a negative target.
struct RowGradient {
  const int64_t* targets;
  const void *max, *p_scale, *hit;  // (rows) each
  const void* spread;               // (rows) or null
  void* grads;                      // contiguous, in the logits' dtype
};

struct CrossEntropyKernels {
  // The rows [begin, end).
  void (*sums)(const LogitRows&, const RowSums&, int64_t begin, int64_t end);
  void (*gradient)(const LogitRows&, const RowGradient&, int64_t begin, int64_t end);
};

SK_DECLARE_KERNEL_TABLE(CrossEntropyKernels, cross_entropy_kernels)

}  // namespace seqkern
