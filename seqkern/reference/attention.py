"""Scaled dot-product attention, as Vaswani et al. 2017 and Jurafsky & Martin (chapter 9, 9.31-9.36) state it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = False,
    diagonal: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T * scale) V, and the logarithm of every softmax's denominator.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D), H a multiple of Hk: consecutive query heads share a key head (Ainslie et al. 2023).
        value: (B, Hk, Nk, Dv).
        causal: query i sees the keys j <= i + diagonal only; the other scores are -inf.
        scale: default 1 / sqrt(D).

    Returns:
        The output (B, H, Nq, Dv) in the query's dtype and the natural log-sum-exp of the scores (B, H, Nq), float32 or
        wider. A query that sees no key has output 0 and log-sum-exp -inf.

    Source: Vaswani et al., "Attention Is All You Need", 2017, equation 1. Computed in float32 or wider.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if scale is None:
        scale = 1 / math.sqrt(max(query.shape[-1], 1))

    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        i = torch.arange(scores.shape[-2], device=scores.device)[:, None]
        j = torch.arange(scores.shape[-1], device=scores.device)[None, :]
        scores = scores.masked_fill(j > i + diagonal, -math.inf)
    # The softmax does not depend on what is subtracted from a row: the row's maximum, so that exp cannot overflow.
    largest = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    if scores.shape[-1]:
        largest = scores.detach().amax(-1, keepdim=True)
    shift = largest.masked_fill(largest == -math.inf, 0)
    exponentials = torch.exp(scores - shift)
    denominator = exponentials.sum(-1, keepdim=True)
    unseen = denominator == 0
    denominator = denominator.masked_fill(unseen, 1)
    lse = (shift + denominator.log()).masked_fill(unseen, -math.inf).squeeze(-1)
    return (exponentials / denominator @ v).to(query.dtype), lse
