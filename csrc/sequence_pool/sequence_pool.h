// Arguments and entry points of pooling over sequences. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"
#include "sequences.h"

namespace seqkern {

// The order is that of KINDS in seqkern/reference/sequence_pool.py.
enum class PoolKind : int { sum = 0, mean = 1, max = 2, min = 3, first = 4, last = 5, logsumexp = 6 };

struct PoolSequences {
  Dtype dtype;
  PoolKind kind;
  Sequences in;
  int64_t columns;
  int64_t reversed;  // the last columns, whose sequences run from the end: their first row is the last
};

struct PoolForward {
  PoolSequences of;
  const void* x;  // columns are contiguous
  int64_t x_batch, x_row;
  void* output;    // (batch, columns)
  int32_t* index;  // (batch, columns), of max and min: the row within its sequence; or null
};

struct PoolBackward {
  PoolSequences of;
  const void* grad_output;  // (batch, columns), contiguous
  const void *x, *output;   // of logsumexp, otherwise null
  int64_t x_batch, x_row;
  const int32_t* index;  // of max and min
  void* grad;            // as x, contiguous
};

// Columns of an item forward, rows of one backward.
constexpr int64_t kPoolVectors = 8, kPoolRows = 64;

struct PoolKernels {
  int64_t (*columns)(Dtype dtype);  // of an item
  void (*forward)(const PoolForward&, int64_t b, int64_t begin, int64_t end);
  // Rows [begin, end) of a sequence, also beyond its length, where they are zero.
  void (*backward)(const PoolBackward&, int64_t b, int64_t begin, int64_t end);
};

SK_DECLARE_KERNEL_TABLE(PoolKernels, pool_kernels)

}  // namespace seqkern
