// Arguments and entry points of the layer norm kernels. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// Rows have unit stride inside and any distance from each other. Parameters, statistics and partial sums are in the
// accumulation type of `dtype`.
struct LayerNormForward {
  Dtype dtype;
  int64_t columns;
  const void* input;  // (rows, columns)
  int64_t input_stride;
  const void* weight;  // (columns) or null
  const void* bias;    // (columns) or null
  double eps;
  void* output;  // (rows, columns), contiguous
  void* mean;    // (rows)
  void* rstd;    // (rows)
};

struct LayerNormBackward {
  Dtype dtype;
  int64_t rows, columns;
  const void* grad_output;
  int64_t grad_output_stride;
  const void* input;
  int64_t input_stride;
  const void* mean;
  const void* rstd;
  const void* weight;         // (columns) or null
  void* grad_input;           // (rows, columns), contiguous
  int64_t rows_per_chunk;     // chunk c owns rows [c * rows_per_chunk, (c + 1) * rows_per_chunk)
  void* grad_weight_partial;  // (chunks, columns) or null
  void* grad_bias_partial;    // (chunks, columns) or null
};

struct LayerNormKernels {
  void (*forward)(const LayerNormForward&, int64_t row_begin, int64_t row_end);
  void (*backward)(const LayerNormBackward&, int64_t chunk_begin, int64_t chunk_end);
  // total[c] = sum over chunks, in order, of partial[chunk, c], for the columns [begin, end).
  void (*reduce)(Dtype dtype, int64_t chunks, int64_t columns, const void* partial, void* total, int64_t begin,
                 int64_t end);
};

SK_DECLARE_KERNEL_TABLE(LayerNormKernels, layer_norm_kernels)

}  // namespace seqkern
