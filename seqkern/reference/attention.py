"""Scaled dot-product attention, as Vaswani et al. 2017 and Jurafsky & Martin (chapter 9, 9.31-9.36) state it."""

from __future__ import annotations

import torch
from torch import Tensor

from seqkern.reference.attention_scores import attention_scores, for_query_heads
from seqkern.reference.attention_weights import attention_weights
from seqkern.reference.dropout import keep_mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    diagonal: int | Tensor = 0,
    left: int = -1,
    right: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(z) V, and the logarithm of every softmax's denominator; z is `attention_scores`'.

    query (B, H, Nq, D); key and value (B, Hk, Nk, D or Dv), H a multiple of Hk: consecutive query heads share a key
    head (Ainslie et al. 2023). attn_mask broadcasts to (B, H, Nq, Nk), bool or added; key_lengths (B,); alibi_slopes
    (B, H) or (H,); sinks (H,), see `attention_weights`. With a seed, weights are dropped; `rows` (B, H, Nq) are the
    rows of the dropout matrix, by default counted.

    Returns the output (B, H, Nq, Dv) in the query's dtype and the log-sum-exp (B, H, Nq), float32 or wider. A query
    that sees nothing has output 0 and log-sum-exp -inf.
    """
    z = attention_scores(query, key, attn_mask, key_lengths, alibi_slopes, diagonal, left, right, scale, softcap)
    weights, lse = attention_weights(z, sinks)
    if seed is not None:
        kept = keep_mask(seed, dropout_p, lse.numel() if rows is None else rows.flatten(), z.shape[-1]).view(z.shape)
        weights = torch.where(kept, weights / (1 - dropout_p) if dropout_p < 1 else weights, 0)
    return (weights @ for_query_heads(value, query.shape[1], key_lengths)).to(query.dtype), lse
