"""The Triton kernels of attention."""

from .attention import aot_configurations, attention_bwd, attention_fwd, explained

__all__ = ["aot_configurations", "attention_bwd", "attention_fwd", "explained"]
