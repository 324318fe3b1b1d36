// The activation of a feed-forward block as functions.
#pragma once

#include "direct.h"

namespace seqkern::direct {

using ffn_fwd = Tensor(const Tensor& z, int64_t activation, bool gated);
using ffn_bwd = std::tuple<Tensor, Tensor>(const Tensor& grad_output, const Tensor& z, int64_t activation, bool gated);

}  // namespace seqkern::direct
