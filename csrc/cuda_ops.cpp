// Every schema of `seqkern_cuda`, and nothing else: what is written in CUDA C++, csrc/<op>/cuda/. Ops of their own, so
// that `seqkern`'s can choose between them and Triton's (seqkern/_library.py); the schemas are there in every build,
// the kernels where nvcc was.
#include <torch/csrc/stable/library.h>

#include "schemas.h"

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
