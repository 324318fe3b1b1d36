"""What attention takes the softmax of: scaled products, capped, with distance, mask and visibility put in."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def for_query_heads(t: Tensor, heads: int, lengths: Tensor | None) -> Tensor:
    """Keys or values (B, Hk, Nk, D) for each of the query heads; what is beyond the lengths is not read, be it NaN."""
    if lengths is not None:
        beyond = torch.arange(t.shape[2], device=t.device)[:, None] >= lengths[:, None, None, None]
        t = t.masked_fill(beyond, 0)
    return t.to(torch.promote_types(t.dtype, torch.float32)).repeat_interleave(heads // max(t.shape[1], 1), 1)


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    diagonal: int | Tensor = 0,
    left: int = -1,
    right: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """z = c tanh(scale q.k / c) - slope |i + diagonal - j| + mask where query i sees key j, -inf elsewhere.

    It sees the keys i + diagonal - left <= j <= i + diagonal + right that are within the length and that a bool mask
    does not hide. A negative `left` or `right` is no limit, a softcap c of 0 is none, the default scale is 1 / sqrt(D),
    and the diagonal is a number or, with one for every sequence, head or query, broadcasts to (B, H, Nq, 1). Shapes as
    in `attention`; returns (B, H, Nq, Nk), float32 or wider.

    Source: softcap: Gemma 2, 2024; slopes: Press, Smith and Lewis, "Train Short, Test Long", 2022; left and right:
    Beltagy, Peters and Cohan, "Longformer", 2020.
    """
    k = for_query_heads(key, query.shape[1], key_lengths)
    z = query.to(k.dtype) @ k.transpose(2, 3) * (1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    i, j = (torch.arange(t.shape[2], device=t.device) for t in (query, key))
    distance = i[:, None] + diagonal - j
    if alibi_slopes is not None:
        z = z - alibi_slopes[..., None, None].to(z.dtype) * distance.abs()
    visible = torch.ones_like(distance, dtype=torch.bool) if left < 0 else distance <= left
    visible = visible if right < 0 else visible & (-distance <= right)
    if key_lengths is not None:
        visible = visible & (j < key_lengths[:, None, None, None])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        z = z + attn_mask.to(z.dtype)
    return z.masked_fill(~visible, -math.inf)
