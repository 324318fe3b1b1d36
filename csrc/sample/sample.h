// Arguments and entry points of sampling a token from a row of logits. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// In which order a row's logits are filtered and divided by the temperature; seqkern/reference/sample.py.
enum class SampleOrder : int { transformers = 0, vllm = 1, llama_cpp = 2 };
// Which log-probability of the token is wanted: none, of what it was drawn from, or of the logits as given.
enum class SampleLogprob : int { none = 0, processed = 1, raw = 2 };

struct SampleRow {
  Dtype dtype;
  const void* logits;  // contiguous
  int64_t classes;
  SampleOrder order;
  SampleLogprob logprob;
  float temperature;               // 0: the largest logit
  int64_t top_k;                   // 0: all
  double top_p, min_p, typical_p;  // 1, 0, 1: all
  float repetition_penalty;        // 1: none
  const int64_t* history;          // tokens in [0, classes); others are left out
  int64_t history_length;
  double uniform;   // in (0, 1): which token is drawn
  float* filtered;  // (classes), or null: the logits that a token would be drawn by, and none is
};

enum class SampleStatus : int { drawn = 0, not_finite = 1, nothing_possible = 2 };

struct SampledToken {
  SampleStatus status;
  int64_t token;
  float logprob;
};

struct SampleKernels {
  int64_t (*scratch_bytes)(int64_t classes);
  SampledToken (*sample)(const SampleRow&, void* scratch);
};

SK_DECLARE_KERNEL_TABLE(SampleKernels, sample_kernels)

}  // namespace seqkern
