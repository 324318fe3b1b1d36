"""What the launchers of GPU kernels ask of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_last(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if the stride of its last dimension is not 1 (expanded gradients)."""
    return tensor if tensor.stride(-1) == 1 or tensor.size(-1) <= 1 else tensor.contiguous()
