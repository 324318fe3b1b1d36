"""Layer norm as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from seqkern.ops.layer_norm import layer_norm


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` on seqkern's kernels: constructor, state_dict and meaning are torch's.

    Shape: input (*, *normalized_shape), output the same. See `seqkern.layer_norm` for dtypes and errors.

    Example:
        >>> import torch, seqkern
        >>> norm = seqkern.nn.LayerNorm(8)
        >>> norm(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
