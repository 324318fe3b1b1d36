"""Fused kernels for sequence models in PyTorch: attention, layer norm and recurrent networks, on CPU and GPU."""

from seqkern import models, nn, reference
from seqkern._explain import explain
from seqkern._library import release_memory, use_backend
from seqkern._optimize import optimize, restore
from seqkern.generation import generate
from seqkern.ops.additive_attention import additive_attention
from seqkern.ops.attention import (
    attention,
    attention_varlen,
    merge_attention,
    scaled_dot_product_attention,
)
from seqkern.ops.attention_decode import attention_decode
from seqkern.ops.attention_rnn import attention_rnn
from seqkern.ops.attention_weights import attention_weights
from seqkern.ops.beam_step import beam_step
from seqkern.ops.conv1d import conv1d
from seqkern.ops.conv1d_max import conv1d_max
from seqkern.ops.cross_entropy import cross_entropy
from seqkern.ops.embedding import embedding
from seqkern.ops.ffn import ffn
from seqkern.ops.glu import geglu, swiglu
from seqkern.ops.highway import highway
from seqkern.ops.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from seqkern.ops.linear_cross_entropy import linear_cross_entropy
from seqkern.ops.rnn import additive_rnn, gru, interpolated_rnn, lstm, rnn_relu, rnn_tanh
from seqkern.ops.rnn_cell import gru_cell, lstm_cell, rnn_relu_cell, rnn_tanh_cell
from seqkern.ops.rope import rope, rope_tables
from seqkern.ops.sample import filter_logits, sample
from seqkern.ops.sequence_pool import sequence_pool
from seqkern.ops.sgns_loss import sgns_loss
from seqkern.ops.tree_lstm import TreeSchedule, tree_lstm

__version__ = "0.1.0"
__all__ = [
    "TreeSchedule",
    "add_layer_norm",
    "add_rms_norm",
    "additive_attention",
    "additive_rnn",
    "attention",
    "attention_decode",
    "attention_rnn",
    "attention_varlen",
    "attention_weights",
    "beam_step",
    "conv1d",
    "conv1d_max",
    "cross_entropy",
    "embedding",
    "explain",
    "ffn",
    "filter_logits",
    "geglu",
    "generate",
    "gru",
    "gru_cell",
    "highway",
    "interpolated_rnn",
    "layer_norm",
    "linear_cross_entropy",
    "lstm",
    "lstm_cell",
    "merge_attention",
    "models",
    "nn",
    "optimize",
    "reference",
    "release_memory",
    "restore",
    "rms_norm",
    "rnn_relu",
    "rnn_relu_cell",
    "rnn_tanh",
    "rnn_tanh_cell",
    "rope",
    "rope_tables",
    "sample",
    "scaled_dot_product_attention",
    "sequence_pool",
    "sgns_loss",
    "swiglu",
    "tree_lstm",
    "use_backend",
]
