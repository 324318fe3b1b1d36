"""The equations in plain PyTorch, one file an op: the executable specification and, in float64, the tests' oracle."""

from seqkern.reference.additive_attention import additive_attention, additive_scores
from seqkern.reference.attention import attention
from seqkern.reference.attention_rnn import attention_rnn
from seqkern.reference.attention_scores import attention_scores
from seqkern.reference.attention_varlen import attention_varlen
from seqkern.reference.attention_weights import attention_weights
from seqkern.reference.beam_step import beam_step
from seqkern.reference.conv1d import conv1d, conv1d_max, conv1d_outputs
from seqkern.reference.cross_entropy import cross_entropy_rows, reduced, softcapped
from seqkern.reference.dropout import derived_seed, dropout, dropout_words, keep_mask
from seqkern.reference.embedding import embedding, sinusoids
from seqkern.reference.ffn import ffn
from seqkern.reference.glu import glu
from seqkern.reference.highway import highway
from seqkern.reference.layer_norm import add_layer_norm, layer_norm
from seqkern.reference.linear_cross_entropy import logits
from seqkern.reference.rnn import rnn, rnn_step
from seqkern.reference.rnn_cell import gru_cell, gru_step, lstm_cell
from seqkern.reference.rope import rope, rope_tables
from seqkern.reference.sample import drawn, processed, uniform
from seqkern.reference.sequence_pool import sequence_pool
from seqkern.reference.sgns_loss import sgns_loss
from seqkern.reference.tree_lstm import tree_lstm

__all__ = [
    "add_layer_norm",
    "additive_attention",
    "additive_scores",
    "attention",
    "attention_rnn",
    "attention_scores",
    "attention_varlen",
    "attention_weights",
    "beam_step",
    "conv1d",
    "conv1d_max",
    "conv1d_outputs",
    "cross_entropy_rows",
    "derived_seed",
    "drawn",
    "dropout",
    "dropout_words",
    "embedding",
    "ffn",
    "glu",
    "gru_cell",
    "gru_step",
    "highway",
    "keep_mask",
    "layer_norm",
    "logits",
    "lstm_cell",
    "processed",
    "reduced",
    "rnn",
    "rnn_step",
    "rope",
    "rope_tables",
    "sequence_pool",
    "sgns_loss",
    "sinusoids",
    "softcapped",
    "tree_lstm",
    "uniform",
]
