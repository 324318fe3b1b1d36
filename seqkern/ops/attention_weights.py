"""The weights of attention, for those who want to look at them."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._recording import is_proxy, record
from seqkern.ops._attention_checks import (
    autocast,
    check_align,
    check_band,
    check_batch,
    check_head_dim,
    check_key_lengths,
    check_scale,
    check_softcap,
    check_tensors,
    check_types,
    prepare_mask,
    prepare_sinks,
    prepare_slopes,
    readable,
    shape_of,
)
from seqkern.ops._autograd import transforms_active

_SCORES = 1 << 20  # elements of the scores that are held beside the result; 32 queries at least


@explicit
def attention_weights(
    query: Tensor,
    key: Tensor,
    queries: Tensor | None = None,
    *,
    causal: bool = False,
    causal_align: str = "lower_right",
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    **unexpected: NoReturn,
) -> Tensor:
    """The weights that `attention` gives the values, for the queries one wants to look at. No dropout.

    Computed in plain PyTorch, float32 or wider, a block of queries at a time: beside the result, the scores of one
    block are held. Differentiable (which does hold the scores of the queries asked for).

    Args:
        query: (B, H, Nq, D), float64, float32, bfloat16 or float16. key: (B, Hk, Nk, D) in the query's dtype.
        queries: (n,), int64: the rows of the query, each from 0 to Nq - 1, in any order and any number of times.
            Default: all.
        causal, causal_align, attn_mask, key_lengths, window, alibi_slopes, softcap, sinks, scale: as `attention`.

    Returns:
        (B, H, n, Nk), float32 (float64 for float64). The rows sum to one less the weight of the sink; those of queries
        that see no key are 0.

    Raises:
        As `attention`. ValueError also for queries that there are not (checked where they can be read at once: on the
        CPU, not compiled).

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    Example:
        >>> import torch, seqkern
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> last = seqkern.attention_weights(q, k, torch.tensor([99]), causal=True)
        >>> last.shape
        torch.Size([1, 2, 1, 100])
        >>> torch.allclose(last @ v, seqkern.attention(q, k, v, causal=True)[:, :, 99:], atol=1e-5)
        True
    """
    if is_proxy(query):
        return record(attention_weights, locals())
    if unexpected:
        refuse(attention_weights, unexpected)
    op = "attention_weights"
    lower_right = check_align(op, causal_align)
    query, key = autocast(check_tensors(op, query, key, least=4, most=4))
    check_types(op, query, key=key)
    check_head_dim(op, query, key)
    check_batch(op, query, key, None, ("key",))
    batch, heads, length, head_dim = query.shape
    keys = key.shape[2]
    left, right = check_band(op, causal, window)
    diagonal = keys - length if lower_right else 0
    if attn_mask is not None:
        attn_mask = prepare_mask(op, attn_mask, query, (batch, heads, length, keys))
    if key_lengths is not None:
        key_lengths = check_key_lengths(op, key_lengths, query, batch)
    if alibi_slopes is not None:
        alibi_slopes = prepare_slopes(op, alibi_slopes, query, batch)
    if sinks is not None:
        sinks = prepare_sinks(op, sinks, query)
    numbers = (left, right, check_scale(op, scale, head_dim), check_softcap(op, softcap))
    rows = _check_queries(op, queries, query)

    step = max(_SCORES // max(batch * heads * keys, 1), 32)
    blocks = []
    result = query.new_empty((batch, heads, len(rows), keys), dtype=torch.promote_types(query.dtype, torch.float32))
    for first in range(0, len(rows), step):
        own = rows[first : first + step]
        position = (own - torch.arange(len(own), device=own.device) + diagonal)[:, None]
        mask = attn_mask
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, own]
        scores = reference.attention_scores(query[:, :, own], key, mask, key_lengths, alibi_slopes, position, *numbers)
        weights, _ = reference.attention_weights(scores, sinks)
        if transforms_active():
            blocks.append(weights)
        else:
            result[:, :, first : first + step] = weights
    return torch.cat(blocks, 2) if blocks else result


def _check_queries(op: str, queries: Tensor | None, query: Tensor) -> Tensor:
    length = query.shape[2]
    if queries is None:
        return torch.arange(length, device=query.device)
    if not isinstance(queries, Tensor) or queries.dtype != torch.int64:
        got = queries.dtype if isinstance(queries, Tensor) else type(queries).__name__
        raise TypeError(f"{op}: queries must be an int64 tensor or None, got {got}")
    if queries.dim() != 1:
        raise ValueError(f"{op}: queries must have one dimension, got shape {shape_of(queries)}")
    if queries.device != query.device:
        raise ValueError(f"{op}: queries must be on the query's device {query.device}, got {queries.device}")
    if readable(queries) and queries.numel():
        least, most = (int(t) for t in queries.aminmax())
        if least < 0 or most >= length:
            raise ValueError(f"{op}: queries must be from 0 to {length - 1}, got {least if least < 0 else most}")
    return queries
