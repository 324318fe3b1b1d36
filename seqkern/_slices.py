"""The slices of the library: one record for each op, and the tables made from the records.

Code that registers, loads, explains, verifies, tests or compiles ops reads these records; a new op adds one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """An op, with the name of its files (CONTRIBUTING.md: one op is one slice)."""

    name: str
    ops: tuple[str, ...]  # dispatcher ops, `seqkern::...`: each has CPU and Triton kernels
    functions: tuple[str, ...]  # public functions that these kernels serve
    cuda_ops: tuple[str, ...] = ()  # CUDA C++ ops, in `seqkern_cuda`
    cuda_module: str = ""  # of seqkern, launches them for each of `ops` by its name; "": they have the names of `ops`
    own_bf16: bool = False  # whether its kernels or products are others in the bf16 tiers


ALL = (
    Slice(
        name="attention",
        ops=("attention_fwd", "attention_bwd"),
        functions=("scaled_dot_product_attention", "attention", "attention_varlen", "attention_decode"),
        cuda_ops=("attention_fwd", "attention_bwd", "attention_plan", "attention_decode"),
        cuda_module="_attention_cuda",
        own_bf16=True,
    ),
    Slice(
        name="layer_norm",
        ops=("layer_norm_fwd", "layer_norm_bwd"),
        functions=("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
        cuda_ops=("layer_norm_fwd", "layer_norm_bwd"),
    ),
    Slice(name="glu", ops=("glu_fwd", "glu_bwd"), functions=("swiglu", "geglu")),
    Slice(name="ffn", ops=("ffn_fwd", "ffn_bwd"), functions=("ffn",)),
    Slice(name="highway", ops=("highway_fwd", "highway_bwd"), functions=("highway",)),
    Slice(name="embedding", ops=("embedding_fwd", "embedding_bwd"), functions=("embedding",)),
    Slice(
        name="additive_attention",
        ops=("additive_attention_fwd", "additive_attention_bwd"),
        functions=("additive_attention",),
    ),
    Slice(
        name="attention_rnn",
        ops=("attention_rnn_fwd", "attention_rnn_bwd"),
        functions=("attention_rnn",),
        own_bf16=True,
    ),
    Slice(
        name="sequence_pool",
        ops=("sequence_pool_fwd", "sequence_pool_bwd"),
        functions=("sequence_pool",),
    ),
    Slice(
        name="conv1d",
        ops=("conv1d_fwd", "conv1d_bwd", "conv1d_max_fwd", "conv1d_max_bwd"),
        functions=("conv1d", "conv1d_max"),
        own_bf16=True,
    ),
    Slice(name="rope", ops=("rope", "rope_tables"), functions=("rope",)),
    Slice(
        name="cross_entropy",
        ops=("cross_entropy_fwd", "cross_entropy_bwd"),
        functions=("cross_entropy",),
    ),
    Slice(
        name="linear_cross_entropy",
        ops=("linear_cross_entropy_fwd", "linear_cross_entropy_bwd"),
        functions=("linear_cross_entropy",),
        own_bf16=True,
    ),
    Slice(name="sample", ops=("sample", "filter_logits"), functions=("sample", "filter_logits")),
    Slice(
        name="sgns_loss",
        ops=("sgns_loss_fwd", "sgns_loss_bwd", "word_ngrams", "word2vec_train"),
        functions=("sgns_loss",),
    ),
    Slice(name="beam_step", ops=("beam_step",), functions=("beam_step",)),
    Slice(
        name="rnn",
        ops=("rnn_fwd", "rnn_bwd"),
        functions=("lstm", "gru", "rnn_tanh", "rnn_relu", "additive_rnn", "interpolated_rnn"),
        cuda_ops=("rnn_scan_fwd", "rnn_scan_bwd", "rnn_scan_plan"),
        cuda_module="_rnn_cuda",
        own_bf16=True,
    ),
    Slice(
        name="rnn_cell",
        ops=("rnn_cell_fwd", "rnn_cell_bwd"),
        functions=("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    ),
    Slice(
        name="tree_lstm",
        ops=("tree_schedule", "tree_lstm_fwd", "tree_lstm_bwd"),
        functions=("tree_lstm",),
        own_bf16=True,
    ),
)
# Slices by name, by dispatcher op, by CUDA C++ op and by public function.
SLICES = {slice.name: slice for slice in ALL}
OPS = {op: slice for slice in ALL for op in slice.ops}
CUDA_OPS = {op: slice for slice in ALL for op in slice.cuda_ops}
FUNCTIONS = {function: slice for slice in ALL for function in slice.functions}
