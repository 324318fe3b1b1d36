// Every schema of the library, and nothing else. The kernels register themselves from their slices.
#include <torch/csrc/stable/library.h>

// Of ops that stand in both libraries.
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

STABLE_TORCH_LIBRARY(seqkern, m) {
  // attention: csrc/attention, kernels/attention/attention.py, seqkern/ops/attention.py
  m.def(SK_ATTENTION_FWD(""));
  m.def(SK_ATTENTION_BWD(""));

  // layer_norm: csrc/layer_norm, kernels/layer_norm.py, seqkern/ops/layer_norm.py
  m.def(kLayerNormForward);
  m.def(kLayerNormBackward);

  // glu: csrc/glu, kernels/glu.py, seqkern/ops/glu.py
  m.def("glu_fwd(Tensor gate, Tensor up, int activation) -> Tensor output");
  m.def("glu_bwd(Tensor grad_output, Tensor gate, Tensor up, int activation) -> (Tensor grad_gate, Tensor grad_up)");

  // rope: csrc/rope, kernels/rope.py, seqkern/ops/rope.py
  m.def(
      "rope(Tensor query, Tensor? key, Tensor cos, Tensor sin, int sequence_dim, int rotary_dim, bool interleaved, "
      "bool inverse) -> (Tensor query_out, Tensor key_out)");
  m.def("rope_tables(Tensor positions, Tensor inv_freq, float scaling, bool wide) -> (Tensor cos, Tensor sin)");

  // cross_entropy: csrc/cross_entropy, kernels/cross_entropy.py, seqkern/ops/cross_entropy.py
  m.def(
      "cross_entropy_fwd(Tensor logits, Tensor target, Tensor? class_weight, int ignore_index, float label_smoothing, "
      "float z_loss, float softcap) -> (Tensor loss, Tensor max, Tensor sum)");
  m.def(
      "cross_entropy_bwd(Tensor? grad_loss, Tensor? grad_lse, Tensor logits, Tensor target, Tensor? class_weight, "
      "Tensor max, Tensor sum, int ignore_index, float label_smoothing, float z_loss, float softcap) -> Tensor");

  // linear_cross_entropy: csrc/linear_cross_entropy, kernels/linear_cross_entropy.py,
  // seqkern/ops/linear_cross_entropy.py
  m.def(
      "linear_cross_entropy_fwd(Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, "
      "int ignore_index, float label_smoothing, float z_loss, float softcap, int reduction, bool need_input, "
      "bool need_weight, bool need_bias) -> (Tensor loss, Tensor max, Tensor sum, Tensor grad_input, "
      "Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "linear_cross_entropy_bwd(Tensor? grad_loss, Tensor? grad_lse, Tensor input, Tensor weight, Tensor target, "
      "Tensor? bias, Tensor? class_weight, Tensor max, Tensor sum, int ignore_index, float label_smoothing, "
      "float z_loss, float softcap, bool need_input, bool need_weight, bool need_bias) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // rnn: csrc/rnn, kernels/rnn/rnn.py, seqkern/ops/rnn.py
  m.def(
      "rnn_fwd(Tensor input, Tensor h0, Tensor? c0, Tensor[] w_ih, Tensor[] w_hh, Tensor[] b_ih, Tensor[] b_hh, "
      "Tensor[] w_hr, Tensor[] peephole, Tensor[] norm, Tensor? lengths, Tensor? resets, Tensor? recurrent_mask, "
      "Tensor? seed, float zoneout_h, float zoneout_c, float eps, int cell, bool keep) "
      "-> (Tensor output, Tensor h_n, Tensor c_n, Tensor cells, Tensor gates, Tensor products)");
  m.def(
      "rnn_bwd(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor? grad_cells, Tensor input, Tensor h0, "
      "Tensor? c0, Tensor[] w_ih, Tensor[] w_hh, Tensor[] b_ih, Tensor[] b_hh, Tensor[] w_hr, Tensor[] peephole, "
      "Tensor[] norm, Tensor? lengths, Tensor? resets, Tensor? recurrent_mask, Tensor? seed, float zoneout_h, "
      "float zoneout_c, float eps, int cell, Tensor output, Tensor cells, Tensor gates, "
      "Tensor products, bool need_input, bool need_weights) "
      "-> (Tensor grad_input, Tensor grad_h0, Tensor grad_c0, Tensor grad_w_ih, Tensor grad_w_hh, Tensor grad_b_ih, "
      "Tensor grad_b_hh, Tensor grad_w_hr, Tensor grad_peephole, Tensor grad_norm)");
  m.def(
      "rnn_cell_fwd(Tensor x_gates, Tensor h_gates, Tensor h, Tensor? c, int cell) "
      "-> (Tensor h_new, Tensor c_new, Tensor activated)");
  m.def(
      "rnn_cell_bwd(Tensor grad_h, Tensor? grad_c, Tensor h, Tensor? c, Tensor? c_new, Tensor activated, int cell) "
      "-> (Tensor grad_x_gates, Tensor grad_h_gates, Tensor grad_h_prev, Tensor grad_c_prev)");
}

// What is written in CUDA C++: csrc/<op>/cuda/. Ops of their own, so that `seqkern`'s can choose between them and
// Triton's (seqkern/_library.py); the schemas are there in every build, the kernels where nvcc was.
STABLE_TORCH_LIBRARY(seqkern_cuda, m) {
  // tf32: one product of tf32 numbers where the tensors are float32, else three. path: "auto" by rule, or "mma" or
  // "hopper", which raises where it does not serve.
  m.def(SK_ATTENTION_FWD(", bool tf32, str path"));
  m.def(SK_ATTENTION_BWD(", bool tf32, str path"));
  // Which kernels would run, their tiles, and why, for `explain`.
  m.def("attention_plan(Tensor query, int value_dim, bool backward, str path) -> str");
  m.def(kLayerNormForward);
  m.def(kLayerNormBackward);
  // The scan over the steps of a layer, all that is not a matrix product over all of them: kernels/rnn/rnn.py.
  m.def(
      "rnn_scan_fwd(Tensor x, Tensor w_hh, Tensor? bias, Tensor? norm, Tensor? lengths, Tensor? resets, "
      "Tensor? recurrent_mask, Tensor? seed, Tensor h0, Tensor? c0, float zoneout_h, float zoneout_c, float eps, "
      "int cell, Tensor(a!) output, Tensor(b!)? cells, Tensor(c!)? gates, Tensor(d!)? products, "
      "str tier) -> (Tensor h_n, Tensor c_n)");
  m.def(
      "rnn_scan_bwd(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor? grad_cells, Tensor gates, "
      "Tensor? cells, Tensor? c0, Tensor output, Tensor h0, Tensor? products, Tensor w_hh, Tensor? norm, "
      "Tensor? lengths, Tensor? resets, Tensor? recurrent_mask, Tensor? seed, float zoneout_h, float zoneout_c, "
      "float eps, int cell, Tensor(a!) grad_x, Tensor(b!)? grad_products, Tensor(c!)? norm_sums, "
      "str tier) -> (Tensor grad_h0, Tensor grad_c0)");
  // Which tier of the scan would run ("block", "cluster", "grid" or "none"), and why, for `explain`.
  m.def("rnn_scan_plan(Tensor w_hh, int batch, int cell, bool norm, bool backward, str tier) -> str");
  // Decoding, which appends to the caches: seqkern/ops/attention_decode.py. splits 0: as many as the shapes ask for.
  m.def(
      "attention_decode(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor cache_lengths, Tensor? key, "
      "Tensor? value, Tensor? page_table, Tensor? alibi_slopes, Tensor? sinks, int left, int right, float scale, "
      "float softcap, bool tf32, int splits) -> (Tensor out, Tensor lse)");
}
