"""Rows of a table of embeddings, with positions, a layer norm and dropout.

Source: positions, learned: Gehring et al., "Convolutional Sequence to Sequence Learning", 2017; sinusoidal: Vaswani et
al., "Attention Is All You Need", 2017, section 3.5; norm: Ba et al., "Layer Normalization", 2016; the mask:
reference/dropout.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqkern.reference.dropout import keep_mask


def sinusoids(positions: Tensor, columns: int) -> Tensor:
    """(N,) -> (N, columns), float64: sin(p w) in column 2i, cos(p w) in column 2i + 1, w = 10000^(-2i / columns)."""
    column = torch.arange(columns, device=positions.device)
    angles = positions.double()[:, None] * 10000.0 ** (-(column // 2 * 2).double() / columns)
    return torch.where(column % 2 == 0, angles.sin(), angles.cos())


def embedding(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None,
    places: Tensor | None,
    scale: float,
    normed: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    seed: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """ids (N,), weight (V, D), table (P, D), places (N,), its rows: (N, D). Row 0 of the mask is the first token's."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    s = scale * weight.index_select(0, ids).to(wide)
    if table is not None and places is not None:
        s = s + table.index_select(0, places).to(wide)
    if normed:
        centred = s - s.mean(1, keepdim=True)
        s = centred * (centred.square().mean(1, keepdim=True) + eps).rsqrt()
        s = s if norm_weight is None else s * norm_weight.to(wide)
        s = s if norm_bias is None else s + norm_bias.to(wide)
    if seed is not None:
        factor = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
        s = torch.where(keep_mask(seed, dropout_p, *s.shape), s * factor, 0.0)
    return s.to(weight.dtype)
