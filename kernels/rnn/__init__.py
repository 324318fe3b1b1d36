"""The Triton kernels of recurrent layers."""

from .aot import aot_configurations
from .rnn import explained, rnn_bwd, rnn_fwd

__all__ = ["aot_configurations", "explained", "rnn_bwd", "rnn_fwd"]
