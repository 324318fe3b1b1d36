// The ops of recurrent networks as functions.
#pragma once

#include "direct.h"

namespace seqkern::direct {

using rnn_fwd = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor& input, const Tensor& h0, const Maybe& c0, const List& w_ih, const List& w_hh, const List& b_ih,
    const List& b_hh, const List& w_hr, const List& peephole, const List& norm, const Maybe& lengths,
    const Maybe& resets, const Maybe& recurrent_mask, const Maybe& seed, double zoneout_h, double zoneout_c, double eps,
    int64_t cell, bool keep);
using rnn_bwd = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Maybe& grad_output, const Maybe& grad_h_n, const Maybe& grad_c_n, const Maybe& grad_cells,
    const Tensor& input, const Tensor& h0, const Maybe& c0, const List& w_ih, const List& w_hh, const List& b_ih,
    const List& b_hh, const List& w_hr, const List& peephole, const List& norm, const Maybe& lengths,
    const Maybe& resets, const Maybe& recurrent_mask, const Maybe& seed, double zoneout_h, double zoneout_c, double eps,
    int64_t cell, const Tensor& output, const Tensor& cells, const Tensor& gates, const Tensor& products,
    bool need_input, bool need_weights);

}  // namespace seqkern::direct
