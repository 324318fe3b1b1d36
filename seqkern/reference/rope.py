"""Rotary position embeddings: pairs of features are turned by angles that grow with the position.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, eq. 34; pairs of neighbours
are theirs, pairs of halves GPT-NeoX's and Llama's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of positions[..., None] * inv_freq, times `scaling`; the angles are float64."""
    angles = positions.double()[..., None] * inv_freq.double()
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, inverse: bool = False) -> Tensor:
    """x (..., D) with its first rotary_dim features turned; the others stay.

    cos and sin fit x's leading dimensions and have rotary_dim / 2 numbers, one a pair, or rotary_dim, one a feature.
    `inverse`: the transposed matrix, which turns gradients back.
    """
    accumulate = torch.promote_types(x.dtype, torch.float32)
    turned, rest = x[..., :rotary_dim].to(accumulate), x[..., rotary_dim:]

    def halves(t: Tensor) -> tuple[Tensor, Tensor]:
        if interleaved:
            return t[..., ::2], t[..., 1::2]
        return t[..., : rotary_dim // 2], t[..., rotary_dim // 2 :]

    (a, b), wide = halves(turned), cos.shape[-1] == rotary_dim
    cos_a, cos_b = halves(cos) if wide else (cos, cos)
    sin_a, sin_b = halves(sin) if wide else (sin, sin)
    if inverse:
        sin_a, sin_b = -sin_b, -sin_a
    first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    joined = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((joined.to(x.dtype), rest), -1)
