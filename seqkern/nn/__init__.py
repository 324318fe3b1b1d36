"""Modules: torch.nn's own, with seqkern's kernels. Same constructor, same state_dict, same meaning."""

from seqkern.nn.layer_norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from seqkern.nn.rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "AddLayerNorm",
    "AddRMSNorm",
    "GRUCell",
    "LSTMCell",
    "LayerNorm",
    "RMSNorm",
    "RNNCell",
]
