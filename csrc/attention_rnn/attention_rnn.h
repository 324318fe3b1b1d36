// Arguments and entry points of a recurrent decoder that attends in every step. Torch-free.
//
// The cell's step is in rnn_cell, the products are products.h's: here are attention of one step, and rows' sums.
#pragma once

#include "additive_attention/additive_attention.h"

namespace seqkern {

// Attention of step t of sequence b. Its scores are additive, or, where `of.weight` is null, scale * query key.
struct Attend {
  AdditiveProblem of;   // its queries are the steps; of.query is not read
  double scale;         // of products
  void* probabilities;  // (batch, steps, keys) acc
  void* context;        // (batch, steps, value_channels) dtype
};

struct GradAttend {
  Attend of;
  const void* grad_context;        // (batch, steps, value_channels) dtype
  const void* grad_probabilities;  // (batch, steps, keys) acc, or null
  void* grad_query;                // (batch, steps, channels) dtype
  void *grad_key, *grad_value;     // contiguous, dtype
  // Of all steps: (batch, steps, padded keys) acc.
  void *padded_probabilities, *grad_scores;
  // Over the steps, from zero on; of additive scores: (batch, strips, keys, vector) acc, without the factor 4 weight,
  // and (batch, padded channels) acc.
  void *key_sums, *weight_sums;
};

// Rows of a matrix of the accumulation type, and rows of dtype.
struct Rows {
  Dtype dtype;
  int64_t count, columns;
  void* matrix;
  int64_t stride;
  const void* const* rows;
};

struct AttentionRnnKernels {
  int64_t (*attend_scratch)(const AdditiveProblem&);
  void (*attend)(const Attend&, int64_t b, int64_t t, const void* query, void* scratch);
  void (*grad_attend)(const GradAttend&, int64_t b, int64_t t, const void* query, void* scratch);
  // Gradients of the keys and values of sequence b, after its last step; queries: (batch, steps, channels).
  void (*finish)(const GradAttend&, int64_t b, const void* queries);
  void (*add)(const Rows&);                    // matrix += rows, but those that are null
  void (*tanh)(const Rows&, void* const* to);  // to = tanh(matrix)
  void (*grad_tanh)(const Rows&);              // matrix *= 1 - rows^2, where rows = tanh(.)
};

SK_DECLARE_KERNEL_TABLE(AttentionRnnKernels, attention_rnn_kernels)

}  // namespace seqkern
