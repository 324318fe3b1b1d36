// Arguments and entry points of embeddings. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dropout.h"
#include "dtype.h"

namespace seqkern {

// Token i, of `columns` numbers:
//
//   s = scale * weight[ids[i]] + table[place(i)],    y = dropout(norm(s)),    place(i) = places[i], or start + i %
//   period
struct EmbeddingRows {
  Dtype dtype;
  int64_t columns;
  const int64_t* ids;
  const void* weight;  // rows are contiguous, `weight_stride` apart
  int64_t weight_stride;
  const void* table;  // or null
  int64_t table_stride;
  bool table_wide;        // the table is of the accumulation type
  const int64_t* places;  // or null
  int64_t start, period;
  double scale;
  bool normed;
  const void *norm_weight, *norm_bias;  // (columns) or null
  double eps;
  Dropout dropout;
  int64_t place(int64_t i) const { return places ? places[i] : start + i % period; }
};

struct EmbeddingForward {
  EmbeddingRows of;
  void* output;
  void *mean, *rstd;  // of each token, in the accumulation type, if normed
};

struct EmbeddingBackward {
  EmbeddingRows of;
  const void* grad_output;
  const void *mean, *rstd;
  void* grad;                        // of s, in the accumulation type
  void *norm_weights, *norm_biases;  // (blocks, columns) in the accumulation type: sums over kEmbeddingBlock tokens
};

// target[c] = factor * sum of source[tokens[n]][c] over n in order; 0 of none.
struct EmbeddingSum {
  Dtype source_type, target_type;
  int64_t columns;
  const void* source;  // contiguous rows
  double factor;
};

// Tokens whose contributions to the norm's parameters are one sum.
constexpr int64_t kEmbeddingBlock = 64;

struct EmbeddingKernels {
  int64_t (*scratch_bytes)(Dtype dtype, int64_t columns);
  // Tokens [begin, end).
  void (*forward)(const EmbeddingForward&, int64_t begin, int64_t end, void* scratch);
  // A block of tokens.
  void (*backward)(const EmbeddingBackward&, int64_t begin, int64_t end, void* scratch);
  void (*sum)(const EmbeddingSum&, const int64_t* tokens, int64_t count, void* target);
};

SK_DECLARE_KERNEL_TABLE(EmbeddingKernels, embedding_kernels)

}  // namespace seqkern
