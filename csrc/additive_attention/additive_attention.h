// Arguments and entry points of additive attention. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// Of every sequence b, query i and key j:
//
//   s = sum over channels d of weight[d] tanh(query[i, d] + bias[d] + key[j, d]) + mask,    P = softmax over j of s,
//   output = P value
//
// Strides count elements; the last dimension of every tensor is contiguous, but that of the mask.
struct AdditiveProblem {
  Dtype dtype;
  int64_t batch, queries, keys, channels, value_channels;
  const void *query, *key, *value;
  int64_t query_batch, query_row, key_batch, key_row, value_batch, value_row;
  const void *weight, *bias;   // (channels); bias may be null
  const int64_t* key_lengths;  // (batch) or null: a sequence has only its first keys
  const void* mask;            // or null
  bool mask_is_bool;           // true: visible. Otherwise numbers of the accumulation type, which are added
  int64_t mask_batch, mask_row, mask_column;
  // Made by `prepare_weight` and `prepare_keys`, in the accumulation type.
  void* wide_weight;  // weight, then bias, each padded to whole vectors
  void* wide_keys;    // exp(2 key), or of a small one exp(2 key) - 1, (batch, strips, keys, vector);
                      // null: the forward pass prepares a few keys at a time, for one block of queries
  uint8_t* forms;     // (batch, keys): which of them it is, or neither

  int64_t keys_of(int64_t b) const {
    if (!key_lengths) return keys;
    const int64_t length = key_lengths[b];
    return length < 0 ? 0 : length > keys ? keys : length;
  }
};

struct AdditiveForward {
  AdditiveProblem of;
  void* output;   // (batch, queries, value_channels)
  void* lse;      // (batch, queries), in the accumulation type
  void* weights;  // (batch, queries, keys) or null
};

// Sums begin at zero. They are there where the queries come in several chunks; otherwise the gradients of keys and
// values are written at once.
struct AdditiveBackward {
  AdditiveProblem of;
  const void *grad_output, *grad_lse, *grad_weights;  // as the results, contiguous; each may be null
  void *grad_query, *grad_key, *grad_value;           // contiguous
  void* grad_mask;                                    // (batch, queries, keys) in the accumulation type, or null
  // A chunk of at most `chunk` queries from `first` on, in the accumulation type.
  int64_t first, chunk;
  void *probabilities, *grad_scores;  // (batch, chunk, padded keys)
  void* wide_queries;                 // (batch, chunk, three times the padded channels)
  uint8_t* tame_queries;              // (batch, chunk)
  // Over all chunks, in the accumulation type.
  void* key_sums;                  // (batch, strips, keys, vector), without the factor 4 weight; or null
  void* value_sums;                // (batch, keys, padded value channels), or null
  void *weight_sums, *query_sums;  // (batch, padded channels), the latter without the factor weight
};

struct AdditiveKernels {
  int64_t (*vector)(Dtype dtype);       // numbers of a vector: a strip of channels
  int64_t (*query_block)(Dtype dtype);  // queries of an item
  int64_t (*forward_scratch)(const AdditiveProblem&);
  int64_t (*backward_scratch)(const AdditiveProblem&);
  void (*prepare_weight)(const AdditiveProblem&);
  void (*prepare_keys)(const AdditiveProblem&, int64_t b, int64_t begin, int64_t end);
  // Queries [begin, end) of a sequence, one block.
  void (*forward)(const AdditiveForward&, int64_t b, int64_t begin, int64_t end, void* scratch);
  // A chunk's probabilities and the gradients of its scores: a block of queries.
  void (*grad_scores)(const AdditiveBackward&, int64_t b, int64_t begin, int64_t end, void* scratch);
  // What a chunk adds to a strip of channels, and to a range of value channels.
  void (*grad_channels)(const AdditiveBackward&, int64_t b, int64_t strip, void* scratch);
  void (*grad_values)(const AdditiveBackward&, int64_t b, int64_t strip);
  // Gradients of keys and values [begin, end) from their sums.
  void (*finish)(const AdditiveBackward&, int64_t b, int64_t begin, int64_t end);
};

SK_DECLARE_KERNEL_TABLE(AdditiveKernels, additive_kernels)

}  // namespace seqkern
