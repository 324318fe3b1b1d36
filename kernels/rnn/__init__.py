"""The Triton kernels of recurrent layers."""

from .aot import aot_configurations
from .rnn import rnn_bwd, rnn_fwd

__all__ = ["aot_configurations", "rnn_bwd", "rnn_fwd"]
