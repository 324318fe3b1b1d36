// Arguments and entry points of a step of beam search. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

struct BeamCandidate {
  float logit;
  int32_t token;
};

struct BeamRow {
  Dtype dtype;
  const void* logits;  // contiguous
  int64_t classes;
  int64_t most;               // candidates that are wanted
  BeamCandidate* candidates;  // (most)
};

struct BeamFound {
  bool finite;    // no logit is nan or infinity
  int64_t count;  // candidates: the largest logits, in order, of equal ones the first tokens; none is minus infinity
  double lse;     // the log of the sum of exp(logit)
};

struct BeamKernels {
  int64_t (*scratch_bytes)(int64_t classes, int64_t most);
  BeamFound (*find)(const BeamRow&, void* scratch);
};

SK_DECLARE_KERNEL_TABLE(BeamKernels, beam_kernels)

}  // namespace seqkern
