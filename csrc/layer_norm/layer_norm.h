// Arguments and entry points of the layer norm kernels. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dropout.h"
#include "dtype.h"

namespace seqkern {

// Rows are contiguous, with any row stride. Parameters, statistics and partial sums have the accumulation type of
// `dtype`. `centred`: layer norm; otherwise the mean is not subtracted: RMS norm.
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
  bool round_before_weight;  // not centred alone: what the weight multiplies is rounded to `dtype` first
  void* output;              // (rows, columns), contiguous; null for the statistics alone
  void* sum;                 // (rows, columns), contiguous, when there is a residual
  void* mean;                // (rows); null if not needed or not centred
  void* rstd;                // (rows), or null
};

// The rows whose terms of the parameters' gradients are added one by one; their sum is then one term of the next sum.
constexpr int64_t kRowsPerSum = 16;

struct LayerNormBackward {
  Dtype dtype;
  bool centred;
  int64_t rows, columns;
  const void* grad_output;
  int64_t grad_output_stride;
  const void* grad_sum;  // (rows, columns), the gradient of `input` by other paths, or null
  int64_t grad_sum_stride;
  const void* input;  // the normalised matrix: the sum, if there was a residual
  int64_t input_stride;
  const void* mean;  // null if not centred
  const void* rstd;
  const void* weight;   // (columns) or null
  void* grad_residual;  // (rows, columns), contiguous: the gradient of `input`
  Dropout dropout;
  void* grad_input;           // (rows, columns), contiguous: the gradient before the dropout, if any
  int64_t rows_per_chunk;     // chunk c owns rows [c * rows_per_chunk, (c + 1) * rows_per_chunk)
  void* grad_weight_partial;  // (chunks, columns) or null
  void* grad_bias_partial;    // the same
};

struct LayerNormKernels {
  void (*forward)(const LayerNormForward&, int64_t row_begin, int64_t row_end);
  // scratch: 3 * columns numbers of the accumulation type of `dtype`, for this call alone.
  void (*backward)(const LayerNormBackward&, int64_t chunk_begin, int64_t chunk_end, void* scratch);
  // total[c] = sum over chunks, in order, of partial[chunk, c], for the columns [begin, end).
  void (*reduce)(Dtype dtype, int64_t chunks, int64_t columns, const void* partial, void* total, int64_t begin,
                 int64_t end);
  // Converts a parameter of any dtype to the accumulation type of `dtype`, and adds `offset` to it there.
  void (*widen)(Dtype dtype, Dtype from, int64_t count, const void* parameter, double offset, void* widened);
  // The inverse: rounds numbers of the accumulation type of `dtype` to a parameter's dtype.
  void (*narrow)(Dtype dtype, Dtype to, int64_t count, const void* wide, void* parameter);
};

SK_DECLARE_KERNEL_TABLE(LayerNormKernels, layer_norm_kernels)

}  // namespace seqkern
