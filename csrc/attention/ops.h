// The ops of attention as functions.
#pragma once

#include "direct.h"

namespace seqkern::direct {

using attention_fwd = std::tuple<Tensor, Tensor>(const Tensor& query, const Tensor& key, const Tensor& value,
                                                 const Maybe& attn_mask, const Maybe& query_starts,
                                                 const Maybe& key_starts, const Maybe& key_lengths,
                                                 const Maybe& alibi_slopes, const Maybe& sinks, const Maybe& seed,
                                                 int64_t max_queries, int64_t max_keys, int64_t diagonal,
                                                 bool lower_right, int64_t left, int64_t right, double scale,
                                                 double softcap, double dropout_p);
using attention_bwd = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor& grad_out, const Maybe& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const Maybe& attn_mask, const Maybe& query_starts, const Maybe& key_starts,
    const Maybe& key_lengths, const Maybe& alibi_slopes, const Maybe& seed, int64_t max_queries, int64_t max_keys,
    int64_t diagonal, bool lower_right, int64_t left, int64_t right, double scale, double softcap, double dropout_p,
    bool need_mask, bool need_slopes);

}  // namespace seqkern::direct
