// Which tier of the backward scan would run, for `rnn_scan_plan`.
#pragma once

#include <string>

#include "tensor.h"

namespace seqkern {

// "block", "cluster", "grid" or "none", a colon, and why. w_hh: (directions, G hidden, hidden).
std::string rnn_backward_plan(const Tensor& w_hh, int64_t batch, int64_t cell, bool norm, const std::string& tier);

}  // namespace seqkern
