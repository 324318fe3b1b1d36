// Arguments and entry points of the layer norm kernels. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dropout.h"
#include "dtype.h"

namespace seqkern {

// Rows have unit stride inside and any distance from each other. Parameters, statistics and partial sums are in the
// accumulation type of `dtype`. `centred` is layer norm; without it the mean is not subtracted: RMS norm.
struct LayerNormForward {
  Dtype dtype;
  bool centred;
  int64_t columns;
  const void* input;  // (rows, columns)
  int64_t input_stride;
  const void* residual;  // (rows, columns), added to the input before the norm, or null
  int64_t residual_stride;
  Dropout dropout;     // of the input, when there is a residual
  const void* weight;  // (columns) or null
  const void* bias;    // (columns) or null
  double eps;
  void* output;  // (rows, columns), contiguous; null for the statistics alone
  void* sum;     // (rows, columns), contiguous, when there is a residual
  void* mean;    // (rows); null when nobody wants it, or not centred
  void* rstd;    // (rows), or null
};

// Of how many rows the shares of the parameters' gradients are added one by one: the sum of so many is a term of the
// next.
constexpr int64_t kRowsPerSum = 16;

struct LayerNormBackward {
  Dtype dtype;
  bool centred;
  int64_t rows, columns;
  const void* grad_output;
  int64_t grad_output_stride;
  const void* grad_sum;  // (rows, columns), the gradient that reaches what was normalised by another way, or null
  int64_t grad_sum_stride;
  const void* input;  // what was normalised
  int64_t input_stride;
  const void* mean;  // null when not centred
  const void* rstd;
  const void* weight;   // (columns) or null
  void* grad_residual;  // (rows, columns), contiguous: the gradient of what was normalised
  Dropout dropout;
  void* grad_input;           // (rows, columns), contiguous, when there is dropout
  int64_t rows_per_chunk;     // chunk c owns rows [c * rows_per_chunk, (c + 1) * rows_per_chunk)
  void* grad_weight_partial;  // (chunks, columns) or null
  void* grad_bias_partial;    // the same
};

struct LayerNormKernels {
  void (*forward)(const LayerNormForward&, int64_t row_begin, int64_t row_end);
  // scratch: 3 * columns numbers of the accumulation type of `dtype`, this call's alone.
  void (*backward)(const LayerNormBackward&, int64_t chunk_begin, int64_t chunk_end, void* scratch);
  // total[c] = sum over chunks, in order, of partial[chunk, c], for the columns [begin, end).
  void (*reduce)(Dtype dtype, int64_t chunks, int64_t columns, const void* partial, void* total, int64_t begin,
                 int64_t end);
  // A parameter of any dtype in the accumulation type of `dtype`.
  void (*widen)(Dtype dtype, Dtype from, int64_t count, const void* parameter, void* widened);
  // And back: numbers of the accumulation type of `dtype` rounded to a parameter's dtype.
  void (*narrow)(Dtype dtype, Dtype to, int64_t count, const void* wide, void* parameter);
};

SK_DECLARE_KERNEL_TABLE(LayerNormKernels, layer_norm_kernels)

}  // namespace seqkern
