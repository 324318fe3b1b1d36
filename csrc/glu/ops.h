// The ops of the gated linear units as functions.
#pragma once

#include "direct.h"

namespace seqkern::direct {

using glu_fwd = Tensor(const Tensor& gate, const Tensor& up, int64_t activation);
using glu_bwd = std::tuple<Tensor, Tensor>(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                                           int64_t activation);

}  // namespace seqkern::direct
