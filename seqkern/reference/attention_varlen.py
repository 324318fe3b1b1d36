"""Attention over packed sequences of different lengths: a loop over them."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from seqkern.reference.attention import attention


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    diagonal: int = 0,
    lower_right: bool = False,
    left: int = -1,
    right: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`attention` of every sequence s: rows starts[s] .. starts[s + 1] of query (1, H, T, D), key and value.

    attn_mask broadcasts to (S, H, longest, longest), key_lengths (S,), alibi_slopes (S, H); a row of the dropout matrix
    is a row of the packed query. With lower_right the diagonal counts from the one that ends at the last query and key.
    Rows of no sequence have output 0 and log-sum-exp -inf.
    """
    rows = torch.arange(math.prod(query.shape[:3]), device=query.device).view(query.shape[:3])
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    lse = query.new_full(query.shape[:3], -math.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    queries, keys = (list(itertools.pairwise(starts.tolist())) for starts in (query_starts, key_starts))
    for s, ((a, b), (c, d)) in enumerate(zip(queries, keys, strict=True)):
        if key_lengths is not None:
            d = c + min(d - c, max(int(key_lengths[s]), 0))
        mask = attn_mask
        if mask is not None:
            mask = mask[s if mask.shape[0] > 1 else 0, :, : b - a, : d - c][None]
        slopes = None if alibi_slopes is None else alibi_slopes[s]
        tensors = (query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], mask, None, slopes, sinks, seed)
        band = (diagonal + lower_right * (d - c - (b - a)), left, right)
        out[:, :, a:b], lse[:, :, a:b] = attention(*tensors, *band, scale, softcap, dropout_p, rows[:, :, a:b])
    return out, lse
