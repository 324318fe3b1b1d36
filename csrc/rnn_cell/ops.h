// The ops of recurrent cells as functions.
#pragma once

#include "direct.h"

namespace seqkern::direct {

using rnn_cell_fwd = std::tuple<Tensor, Tensor, Tensor>(const Tensor& x_gates, const Tensor& h_gates, const Tensor& h,
                                                        const Maybe& c, int64_t cell);
using rnn_cell_bwd = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& grad_h, const Maybe& grad_c,
                                                                const Tensor& h, const Maybe& c, const Maybe& c_new,
                                                                const Tensor& activated, int64_t cell);

}  // namespace seqkern::direct
