"""Layer normalisation, as Ba et al. 2016 and Jurafsky & Martin (chapter 9, equations 9.39-9.42) state it."""

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """weight * (x - mu) / sqrt(var + eps) + bias over the last dimension; eps under the root is torch's addition.

    Computed in float32 or wider, returned in the input's dtype. Source: Ba, Kiros and Hinton 2016, equation 4.
    """
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    centred = x - x.mean(-1, keepdim=True)  # x - mu
    centred = centred - centred.mean(-1, keepdim=True)  # what rounding left of the mean
    variance = (centred * centred).mean(-1, keepdim=True)  # sigma^2, over all d entries
    output = centred * torch.rsqrt(variance + eps)
    if weight is not None:
        output = output * weight.to(x.dtype)
    if bias is not None:
        output = output + bias.to(x.dtype)
    return output.to(input.dtype)
