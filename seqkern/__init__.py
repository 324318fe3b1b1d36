"""Fused kernels for sequence models in PyTorch: attention, layer norm and recurrent networks, on CPU and GPU."""

from seqkern import nn, reference
from seqkern._library import explain, use_backend
from seqkern.ops.layer_norm import layer_norm

__version__ = "0.1.0"
__all__ = ["explain", "layer_norm", "nn", "reference", "use_backend"]
