"""Modules: torch.nn's own, with seqkern's kernels. Same constructor, same state_dict, same meaning."""

from seqkern.nn.layer_norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from seqkern.nn.rnn import LSTM, LSTMCell

__all__ = ["LSTM", "AddLayerNorm", "AddRMSNorm", "LSTMCell", "LayerNorm", "RMSNorm"]
