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

// Of a layer's self-attention: results go to tensors of any strides with contiguous rows. -> the log-sum-exp.
using self_attention_fwd = Tensor(const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& key_lengths,
                                  const Tensor& out, int64_t left, int64_t right, double scale);
using self_attention_bwd = void(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
                                const Tensor& out, const Tensor& lse, const Maybe& key_lengths,
                                const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value,
                                int64_t left, int64_t right, double scale);

}  // namespace seqkern::direct
