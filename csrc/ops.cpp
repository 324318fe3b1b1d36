// Every schema of `seqkern`, and nothing else. The kernels register themselves from their slices.
#include <torch/csrc/stable/library.h>

#include "schemas.h"

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

  // sample: csrc/sample, kernels/sample.py, seqkern/ops/sample.py
  // Options for all rows, or, where a tensor is given, for each row.
  m.def(
      "sample(Tensor logits, int seed, Tensor? seeds, int position, Tensor? positions, "
      "float temperature, Tensor? temperatures, int top_k, Tensor? top_ks, float top_p, Tensor? top_ps, "
      "float min_p, Tensor? min_ps, float typical_p, Tensor? typical_ps, float repetition_penalty, "
      "Tensor? repetition_penalties, Tensor? history, int history_length, Tensor? history_lengths, int order, "
      "int logprob) -> (Tensor token, Tensor logprob)");
  m.def(
      "filter_logits(Tensor logits, float temperature, Tensor? temperatures, int top_k, Tensor? top_ks, "
      "float top_p, Tensor? top_ps, float min_p, Tensor? min_ps, float typical_p, Tensor? typical_ps, "
      "float repetition_penalty, Tensor? repetition_penalties, Tensor? history, int history_length, "
      "Tensor? history_lengths, int order) -> Tensor");

  // ffn: csrc/ffn, kernels/ffn.py, seqkern/ops/ffn.py: the activation between the products
  m.def("ffn_fwd(Tensor z, int activation, bool gated) -> Tensor output");
  m.def("ffn_bwd(Tensor grad_output, Tensor z, int activation, bool gated) -> (Tensor grad_z, Tensor output)");

  // embedding: csrc/embedding, kernels/embedding.py, seqkern/ops/embedding.py
  m.def(
      "embedding_fwd(Tensor ids, Tensor weight, Tensor? table, Tensor? places, SymInt start, SymInt period, "
      "float scale, bool normed, Tensor? norm_weight, Tensor? norm_bias, float eps, Tensor? seed, float dropout_p) "
      "-> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "embedding_bwd(Tensor grad_output, Tensor ids, Tensor weight, Tensor? table, Tensor? places, SymInt start, "
      "SymInt period, float scale, bool normed, Tensor? norm_weight, Tensor? mean, Tensor? rstd, Tensor? seed, "
      "float dropout_p, int padding_idx, bool need_weight, bool sparse, bool need_table, bool need_norm) "
      "-> (Tensor grad_weight, Tensor rows, Tensor grad_table, Tensor grad_norm_weight, Tensor grad_norm_bias)");

  // additive_attention: csrc/additive_attention, kernels/additive_attention.py, seqkern/ops/additive_attention.py
  m.def(
      "additive_attention_fwd(Tensor query, Tensor key, Tensor value, Tensor weight, Tensor? bias, "
      "Tensor? key_lengths, Tensor? mask, bool need_weights) -> (Tensor output, Tensor lse, Tensor weights)");
  m.def(
      "additive_attention_bwd(Tensor? grad_output, Tensor? grad_lse, Tensor? grad_weights, Tensor query, Tensor key, "
      "Tensor value, Tensor weight, Tensor? bias, Tensor? key_lengths, Tensor? mask, bool need_mask) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weight, Tensor grad_bias, "
      "Tensor grad_mask)");

  // attention_rnn: csrc/attention_rnn, kernels/attention_rnn.py, seqkern/ops/attention_rnn.py. cells and activated are
  // (steps, batch, .); weights, cells and activated are in the accumulation type.
  m.def(
      "attention_rnn_fwd(Tensor x_gates, Tensor key, Tensor value, Tensor h, Tensor? c, Tensor? feed, Tensor w_feed, "
      "Tensor w_hh, Tensor? b_hh, Tensor? w_query, Tensor? b_query, Tensor? weight, Tensor? w_out, Tensor? b_out, "
      "Tensor? key_lengths, Tensor? mask, float scale, int cell, bool luong) -> (Tensor h, Tensor c_last, "
      "Tensor context, Tensor attended, Tensor query, Tensor weights, Tensor cells, Tensor activated)");
  m.def(
      "attention_rnn_bwd(Tensor? grad_h, Tensor? grad_c, Tensor? grad_context, Tensor? grad_attended, "
      "Tensor? grad_weights, Tensor key, Tensor value, Tensor h0, Tensor? c0, Tensor? feed, Tensor w_feed, "
      "Tensor w_hh, Tensor? w_query, Tensor? weight, Tensor? w_out, Tensor? key_lengths, Tensor? mask, float scale, "
      "int cell, bool luong, Tensor h, Tensor attended, Tensor query, Tensor weights, Tensor cells, "
      "Tensor activated) -> (Tensor grad_x_gates, Tensor grad_h_gates, Tensor grad_key, Tensor grad_value, "
      "Tensor grad_h0, Tensor grad_c0, Tensor grad_feed, Tensor grad_query, Tensor grad_output, Tensor grad_weight)");

  // highway: csrc/highway, kernels/highway.py, seqkern/ops/highway.py: what follows the product
  m.def("highway_fwd(Tensor candidate, Tensor gate, Tensor x, int activation) -> Tensor output");
  m.def(
      "highway_bwd(Tensor grad_output, Tensor candidate, Tensor gate, Tensor x, int activation) "
      "-> (Tensor grad_candidate, Tensor grad_gate, Tensor grad_x)");

  // sequence_pool: csrc/sequence_pool, kernels/sequence_pool.py, seqkern/ops/sequence_pool.py
  m.def(
      "sequence_pool_fwd(Tensor x, Tensor? lengths, Tensor? starts, int kind, SymInt reversed) "
      "-> (Tensor output, Tensor index)");
  m.def(
      "sequence_pool_bwd(Tensor grad_output, Tensor? x, Tensor? output, Tensor? index, Tensor? lengths, "
      "Tensor? starts, SymInt rows, int kind, SymInt reversed) -> Tensor");

  // conv1d: csrc/conv1d, kernels/conv1d, seqkern/ops/conv1d.py, seqkern/ops/conv1d_max.py
  m.def(
      "conv1d_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? lengths, int stride, int left, int right, "
      "int dilation) -> Tensor");
  m.def(
      "conv1d_bwd(Tensor grad_output, Tensor x, Tensor weight, Tensor? lengths, int stride, int left, int right, "
      "int dilation, bool need_x, bool need_weight) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
  // z and slopes, (batch, filters), are in the accumulation type; the bias's gradient is the sum of slopes.
  m.def(
      "conv1d_max_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? lengths, Tensor? starts, int activation) "
      "-> (Tensor output, Tensor z, Tensor index)");
  m.def(
      "conv1d_max_bwd(Tensor grad_output, Tensor x, Tensor weight, Tensor? lengths, Tensor? starts, Tensor z, "
      "Tensor index, int activation, bool need_x, bool need_weight) "
      "-> (Tensor grad_x, Tensor grad_weight, Tensor slopes)");

  // sgns_loss: csrc/sgns_loss, kernels/sgns_loss.py, seqkern/ops/sgns_loss.py; losses and scores in the accumulation
  // type. The last two are seqkern/embeddings's.
  m.def(
      "sgns_loss_fwd(Tensor center, Tensor context, Tensor negatives, Tensor w_in, Tensor w_out) "
      "-> (Tensor loss, Tensor scores)");
  m.def(
      "sgns_loss_bwd(Tensor grad_loss, Tensor center, Tensor context, Tensor negatives, Tensor w_in, Tensor w_out, "
      "Tensor scores, bool need_in, bool need_out, bool sparse) "
      "-> (Tensor grad_in, Tensor in_rows, Tensor grad_out, Tensor out_rows)");
  m.def(
      "word_ngrams(Tensor letters, Tensor starts, int least, int most, int buckets) -> (Tensor starts, Tensor "
      "buckets)");
  m.def(
      "word2vec_train(Tensor(a!) w_in, Tensor(b!) w_out, Tensor tokens, Tensor starts, Tensor? keep, Tensor threshold, "
      "Tensor alias, Tensor? row_starts, Tensor? rows, int first, int last, int window, int negatives, bool cbow, "
      "bool shrink, bool parity, int seed, float rate, float last_rate, bool racy, bool wants_loss) -> Tensor");

  // beam_step: csrc/beam_step, kernels/beam_step.py, seqkern/ops/beam_step.py
  m.def("beam_step(Tensor logits, Tensor scores, int candidates) -> (Tensor scores, Tensor beams, Tensor tokens)");

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
  // tree_lstm: csrc/tree_lstm, kernels/tree_lstm.py, seqkern/ops/tree_lstm.py. nary: slots, 0 for the sum of children.
  // levels: (2, height + 1), bounds of places and of edges, on the CPU. cells, (0) where that is c, and gates are in
  // the accumulation type; grad_edge is (0) with slots.
  m.def(
      "tree_schedule(Tensor parents, Tensor? slots) -> (Tensor order, Tensor levels, Tensor child_starts, "
      "Tensor children, Tensor slots_of_children)");
  m.def(
      "tree_lstm_fwd(Tensor x_gates, Tensor w_hh, Tensor order, Tensor levels, Tensor child_starts, Tensor children, "
      "Tensor slots, int nary, SymInt leaves) -> (Tensor h, Tensor c, Tensor sums, Tensor cells, Tensor gates)");
  m.def(
      "tree_lstm_bwd(Tensor? grad_h, Tensor? grad_c, Tensor w_hh, Tensor order, Tensor levels, Tensor child_starts, "
      "Tensor children, Tensor slots, Tensor cells, Tensor gates, int nary, SymInt leaves) "
      "-> (Tensor grad_x_gates, Tensor grad_inner, Tensor grad_edge)");

  // products: csrc/products, csrc/common/products.h, benchmarks/products.py. For measurements and tests alone: a is
  // (rows, depth), b (depth, columns), packed what products_pack makes of b in the active tier.
  m.def("products_pack(Tensor b) -> Tensor packed");
  m.def("products_multiply(Tensor a, Tensor packed, int columns) -> Tensor c");
  m.def("products_rows(Tensor a, Tensor packed, int columns, int times) -> Tensor c");
  m.def("products_few_rows(Tensor a, Tensor b) -> Tensor c");
  m.def("products_peak(Tensor like, int turns) -> int");

  m.def(
      "rnn_cell_fwd(Tensor x_gates, Tensor h_gates, Tensor h, Tensor? c, int cell) "
      "-> (Tensor h_new, Tensor c_new, Tensor activated)");
  m.def(
      "rnn_cell_bwd(Tensor grad_h, Tensor? grad_c, Tensor h, Tensor? c, Tensor? c_new, Tensor activated, int cell) "
      "-> (Tensor grad_x_gates, Tensor grad_h_gates, Tensor grad_h_prev, Tensor grad_c_prev)");
}
