// The activation of a feed-forward block as a function.
#pragma once

#include "direct.h"

namespace seqkern::direct {

using ffn_fwd = Tensor(const Tensor& z, int64_t activation, bool gated);

}  // namespace seqkern::direct
