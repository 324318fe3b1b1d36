// The ops of the norms as functions.
#pragma once

#include "direct.h"

namespace seqkern::direct {

using layer_norm_fwd = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& input, const Maybe& residual,
                                                                  const Maybe& weight, const Maybe& bias,
                                                                  const Maybe& seed, double eps, double dropout_p,
                                                                  bool centred, double weight_offset,
                                                                  bool round_before_weight);
using layer_norm_bwd = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& grad_output, const Maybe& grad_sum,
                                                                  const Tensor& input, const Tensor& mean,
                                                                  const Tensor& rstd, const Maybe& weight,
                                                                  const Maybe& seed, double dropout_p, bool centred,
                                                                  double weight_offset, bool need_weight,
                                                                  bool need_bias);

}  // namespace seqkern::direct
