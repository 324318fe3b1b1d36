"""Modules: torch.nn's own, with seqkern's kernels: same constructor, same state_dict, same meaning; and a few more."""

from seqkern.nn.attention import MultiheadAttention
from seqkern.nn.attention_cache import AttentionCache, AttentionPages
from seqkern.nn.attention_decoder import AttentionDecoder
from seqkern.nn.cross_attention import AdditiveAttention, BilinearAttention, DotAttention
from seqkern.nn.ffn import FeedForward
from seqkern.nn.highway import Highway
from seqkern.nn.layer_norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from seqkern.nn.linear_cross_entropy import LinearCrossEntropy
from seqkern.nn.rnn import GRU, LSTM, RNN, AdditiveRNN, GRUCell, InterpolatedRNN, LSTMCell, RNNCell
from seqkern.nn.rope import RotaryEmbedding
from seqkern.nn.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from seqkern.nn.tree_lstm import ChildSumTreeLSTM, NaryTreeLSTM

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "AddLayerNorm",
    "AddRMSNorm",
    "AdditiveAttention",
    "AdditiveRNN",
    "AttentionCache",
    "AttentionDecoder",
    "AttentionPages",
    "BilinearAttention",
    "ChildSumTreeLSTM",
    "DotAttention",
    "FeedForward",
    "GRUCell",
    "Highway",
    "InterpolatedRNN",
    "LSTMCell",
    "LayerNorm",
    "LinearCrossEntropy",
    "MultiheadAttention",
    "NaryTreeLSTM",
    "RMSNorm",
    "RNNCell",
    "RotaryEmbedding",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
