"""The logits of a linear layer, of which `cross_entropy` has the loss; sources there."""

from __future__ import annotations

import torch
from torch import Tensor

from seqkern.reference.cross_entropy import softcapped


def logits(input: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    """input (N, D), weight (V, D), bias (V,): softcap * tanh((input weight^T + bias) / softcap), (N, V); 0: no cap."""
    accumulate = torch.promote_types(input.dtype, torch.float32)
    z = input.to(accumulate) @ weight.to(accumulate).T
    return softcapped(z if bias is None else z + bias.to(accumulate), softcap)
