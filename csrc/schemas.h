// Schemas of ops that stand in both libraries, `seqkern` (ops.cpp) and `seqkern_cuda` (cuda_ops.cpp).
#pragma once

constexpr const char* kLayerNormForward =
    "layer_norm_fwd(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps, "
    "float dropout_p, bool centred, float weight_offset, bool round_before_weight) "
    "-> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)";
constexpr const char* kLayerNormBackward =
    "layer_norm_bwd(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? seed, float dropout_p, bool centred, float weight_offset, bool need_weight, bool need_bias) "
    "-> (Tensor grad_residual, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)";
// With what the kernels in CUDA C++ are told beside.
#define SK_ATTENTION_FWD(more)                                                                          \
  "attention_fwd(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? query_starts, "     \
  "Tensor? key_starts, Tensor? key_lengths, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, "        \
  "SymInt max_queries, SymInt max_keys, SymInt diagonal, bool lower_right, SymInt left, SymInt right, " \
  "float scale, float softcap, float dropout_p" more ") -> (Tensor out, Tensor lse)"
#define SK_ATTENTION_BWD(more)                                                                            \
  "attention_bwd(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, " \
  "Tensor lse, Tensor? attn_mask, Tensor? query_starts, Tensor? key_starts, Tensor? key_lengths, "        \
  "Tensor? alibi_slopes, Tensor? seed, SymInt max_queries, SymInt max_keys, SymInt diagonal, "            \
  "bool lower_right, SymInt left, SymInt right, float scale, float softcap, float dropout_p, "            \
  "bool need_mask, bool need_slopes" more                                                                 \
  ") "                                                                                                    \
  "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask, Tensor grad_distance)"
