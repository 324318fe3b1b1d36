"""Attention whose scores are additive: w^T tanh(q + k).

Source: Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", 2015, appendix A.1.2;
the projections of queries and keys are outside.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def additive_scores(query: Tensor, key: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """query (B, Tq, D), key (B, Tk, D), weight and bias (D,): scores (B, Tq, Tk)."""
    query = query if bias is None else query + bias
    return (torch.tanh(query[:, :, None] + key[:, None]) * weight).sum(-1)


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """value (B, Tk, Dv), key_lengths (B,), mask (B, Tq, Tk), bool (true: visible) or numbers that are added.

    Returns the output (B, Tq, Dv), the log-sum-exp (B, Tq) of the scores and the weights (B, Tq, Tk). A query that sees
    no key has output and weights 0 and log-sum-exp -inf.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, value, weight = (t.to(wide) for t in (query, key, value, weight))
    scores = additive_scores(query, key, weight, None if bias is None else bias.to(wide))
    visible = torch.ones_like(scores, dtype=torch.bool)
    if key_lengths is not None:
        visible = visible & (torch.arange(key.shape[1], device=key.device) < key_lengths[:, None])[:, None]
    if mask is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask != -math.inf)
        if mask.dtype != torch.bool:
            scores = scores + mask.masked_fill(mask == -math.inf, 0)
    hidden = scores.masked_fill(~visible, -math.inf)
    if key.shape[1] == 0:
        lse = scores.sum(-1) - math.inf
    else:
        top = hidden.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0)
        exponentials = torch.where(visible, (scores - top).exp(), 0)
        total = exponentials.sum(-1, keepdim=True)
        none = ~visible.any(-1)
        lse = (top + total.masked_fill(none[..., None], 1).log())[..., 0].masked_fill(none, -math.inf)
        scores = exponentials / total.masked_fill(none[..., None], 1)
    seen = torch.where(visible.any(1)[..., None], value, 0)  # a hidden NaN does not count
    return scores @ seen, lse, scores
