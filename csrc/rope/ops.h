// The ops of rotary position embeddings as functions.
#pragma once

#include "direct.h"

namespace seqkern::direct {

using rope = std::tuple<Tensor, Tensor>(const Tensor& query, const Maybe& key, const Tensor& cos, const Tensor& sin,
                                        int64_t sequence_dim, int64_t rotary_dim, bool interleaved, bool inverse);
using rope_tables = std::tuple<Tensor, Tensor>(const Tensor& positions, const Tensor& inv_freq, double scaling,
                                               bool wide);

}  // namespace seqkern::direct
