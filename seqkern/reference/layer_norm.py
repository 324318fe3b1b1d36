"""Layer norm and RMS norm over the last dimension, and the addition and dropout before them.

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, eq. 4, and Zhang and Sennrich, "Root Mean Square Layer
Normalization", 2019, eq. 4, with eps inside the root as PyTorch has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqkern.reference.dropout import dropout


def layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    centred: bool = True,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    """weight * (x - mean) / sqrt(var + eps) + bias; not centred: weight * x / sqrt(mean(x^2) + eps) + bias.

    `weight_offset` is added to the weight. `round_before_weight`: what the weight multiplies has the input's dtype.
    """
    accumulate = torch.promote_types(input.dtype, torch.float32)
    x = input.to(accumulate)
    centre = x - x.mean(-1, keepdim=True) if centred else x
    variance = centre.square().mean(-1, keepdim=True)
    output = centre * torch.rsqrt(variance + eps)
    if round_before_weight:
        output = output.to(input.dtype).to(accumulate)
    if weight is not None:
        output = output * (weight.to(accumulate) + weight_offset)
    if bias is not None:
        output = output + bias.to(accumulate)
    return output.to(input.dtype)


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    centred: bool = True,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of dropout(input) + residual, and that sum; matrices."""
    total = (input if seed is None else dropout(input, seed, dropout_p)) + residual
    return layer_norm(total, weight, bias, eps, centred, weight_offset, round_before_weight), total
