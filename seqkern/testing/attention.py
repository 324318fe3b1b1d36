"""Cases of attention: every option, dense, packed and decoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.ops import attention as attention_ops
from seqkern.reference.attention_scores import for_query_heads
from seqkern.testing._checks import Case, normal


def attention_case(
    queries: int = 130,
    keys: int | None = None,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    causal: bool = True,
    causal_align: str = "lower_right",
    scale: float | None = None,
    std: float = 1.0,
    mask: str | None = None,
    mask_shape: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    window: tuple[int | None, int | None] | None = None,
    slopes: str | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dropout_p: float = 0.0,
    packed: Sequence[tuple[int, int]] | None = None,
) -> Case:
    """The output and the log-sum-exp.

    `std` is the queries' standard deviation. `mask` is "bool" or "added", of `mask_shape` or (heads, queries, keys),
    and hides a fifth of the scores. `lengths` are the numbers of keys. `slopes` are "shared", (heads,), or "own",
    (batch, heads). `packed` makes it a case of `attention_varlen`: the sequences' numbers of queries and of keys,
    instead of batch, queries and keys. The tensors then have three rows more than the sequences.
    """
    if packed is not None:
        batch, queries, keys = len(packed), max(q for q, _ in packed), max(k for _, k in packed)
    keys, kv_heads, value_dim = keys or queries, kv_heads or heads, value_dim or head_dim
    sizes = packed or [(queries, keys)]
    starts = [torch.tensor([0, *itertools.accumulate(size)]) for size in zip(*sizes, strict=True)]
    seed = torch.tensor(2**40 + 7)
    hidden = torch.rand(mask_shape or (heads, queries, keys), generator=torch.Generator().manual_seed(3)) < 0.2
    options: dict[str, Any] = {"causal": causal, "causal_align": causal_align, "window": window, "softcap": softcap}
    options |= {"scale": scale, "dropout_p": dropout_p, "return_lse": True}

    def make(g: torch.Generator) -> dict[str, Tensor]:
        def tensor(heads: int, length: int, total: Tensor, dim: int) -> Tensor:
            return normal(g, *((int(total[-1]) + 3, heads, dim) if packed else (batch, heads, length, dim)))

        tensors = {
            "query": tensor(heads, queries, starts[0], head_dim) * std,
            "key": tensor(kv_heads, keys, starts[1], head_dim),
            "value": tensor(kv_heads, keys, starts[1], value_dim),
        }
        if mask == "added":
            tensors["attn_mask"] = normal(g, *hidden.shape).masked_fill(hidden, -math.inf)
        if slopes:
            shape = (batch, heads) if slopes == "own" else (heads,)
            tensors["alibi_slopes"] = torch.rand(shape, dtype=torch.float64, generator=g) / 16
        return tensors | ({"sinks": normal(g, heads) + 1} if sinks else {})

    def extra(query: Tensor) -> dict[str, Any]:
        """Options that are tensors without gradients."""
        found = {} if lengths is None else {"key_lengths": torch.tensor(lengths, device=query.device)}
        return found | ({"attn_mask": ~hidden.to(query.device)} if mask == "bool" else {})

    def ours(query: Tensor, key: Tensor, value: Tensor, **tensors: Any) -> Any:
        tensors |= extra(query)
        with mock.patch.object(attention_ops, "_seed", lambda op, p, query: seed.to(query.device) if p else None):
            if packed is None:
                return seqkern.attention(query, key, value, **tensors, **options)
            limits = (*(t.to(query.device) for t in starts), queries, keys)
            function: Any = seqkern.attention_varlen
            return function(query, key, value, *limits, **tensors, **options)

    def with_rows(function: Callable[..., tuple[Tensor, Tensor]]) -> Any:
        """Applies function(sequence or dense batch, its diagonal, its dropout rows) to all sequences."""

        def all_of_them(query: Tensor, key: Tensor, value: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
            tensors |= extra(query)
            bias = tensors.pop("attn_mask", None)
            if bias is not None:
                bias = bias[(None,) * (4 - bias.dim())]
            if packed is not None:
                query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
            rows = torch.arange(query.shape[:3].numel(), device=query.device).view(query.shape[:3])
            out, lse = [], []
            for s in range(len(sizes)):
                (a, b), (c, d) = (at[s : s + 2].tolist() for at in starts)
                own = dict(tensors)
                if packed is not None and slopes == "own":
                    own["alibi_slopes"] = own["alibi_slopes"][s]
                if bias is not None:
                    part = bias[s : s + 1] if packed is not None and len(bias) > 1 else bias
                    own["attn_mask"] = part[:, :, : b - a, : d - c]
                diagonal = d - c - (b - a) if causal_align == "lower_right" else 0
                parts = query[:, :, a:b], key[:, :, c:d], value[:, :, c:d]
                result = function(*parts, **own, diagonal=diagonal, rows=rows[:, :, a:b])
                out.append(result[0])
                lse.append(result[1])
            if packed is None:
                return out[0], lse[0]
            rest = query.shape[2] - int(starts[0][-1])
            out.append(query.new_zeros(1, heads, rest, value_dim))
            lse.append(lse[0].new_full((1, heads, rest), -math.inf))
            return torch.cat(out, 2)[0].transpose(0, 1), torch.cat(lse, 2)[0].transpose(0, 1)

        return all_of_them

    left, right = (-1 if side is None else side for side in window or (None, None))
    band: dict[str, Any] = {"left": left, "right": 0 if causal else right}

    def expected(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        dropped: dict[str, Any] = {"seed": seed.to(query.device), "dropout_p": dropout_p} if dropout_p else {}
        return reference.attention(query, key, value, **rest, **band, **dropped, scale=scale, softcap=softcap or 0.0)

    def first_terms(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        rows: Tensor | None = None,
        **rest: Any,
    ) -> tuple[Tensor, Tensor]:
        """As `expected`, but with constant denominators: of p (dp - delta), gradients through scores keep only p dp."""
        lse = expected(query, key, value, sinks=sinks, rows=rows, **rest)[1]
        z = reference.attention_scores(query, key, **rest, **band, scale=scale, softcap=softcap or 0.0)
        weights = torch.exp(z - lse.detach().masked_fill(lse.isneginf(), 0)[..., None])
        if dropout_p:
            assert rows is not None
            kept = reference.keep_mask(seed, dropout_p, rows.flatten(), z.shape[-1]).view(z.shape)
            weights = weights * kept / (1 - dropout_p)
        return weights @ for_query_heads(value, heads, rest.get("key_lengths")), lse

    plain = not (mask or lengths or window or slopes or softcap or sinks or dropout_p)

    def of_torch(
        query: Tensor, key: Tensor, value: Tensor, diagonal: int, rows: Tensor, sinks: Tensor | None = None, **rest: Any
    ) -> tuple[Tensor, Tensor]:
        # Sums over the head dimension in reverse: in float64 torch would otherwise round exactly like the oracle.
        query, key = query.flip(-1), key.flip(-1)
        wide = torch.promote_types(query.dtype, torch.float32)
        factor = head_dim**-0.5 if scale is None else scale
        z = query.to(wide) @ key.to(wide).repeat_interleave(heads // kv_heads, 1).mT * factor
        if softcap:
            z = softcap * torch.tanh(z / softcap)
        # All other options are an added mask: what the reference makes of scores that are 0.
        nothing = torch.zeros_like(query[..., :1], dtype=wide), torch.zeros_like(key[..., :1], dtype=wide)
        z = z + reference.attention_scores(nothing[0], nothing[1], **rest, diagonal=diagonal, **band)
        if sinks is not None:
            z = torch.cat([z, sinks.to(wide)[:, None, None].expand(*z.shape[:3], 1)], -1)
        unseen = z.isneginf().all(-1, keepdim=True)
        z = z.masked_fill(unseen, 0)
        lse = z.logsumexp(-1).masked_fill(unseen[..., 0], -math.inf)
        if plain:
            visible: dict[str, Any] = {"is_causal": causal}
            if causal and diagonal:  # torch has upper-left alignment only
                visible = {"attn_mask": torch.ones_like(z[0, 0], dtype=torch.bool).tril(diagonal)}
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, scale=scale, enable_gqa=heads != kv_heads, **visible
            ), lse
        weights = z.softmax(-1).masked_fill(unseen, 0)[..., : key.shape[2]]
        if dropout_p:
            kept = reference.keep_mask(seed.to(rows.device), dropout_p, rows.flatten(), key.shape[2]).view(
                weights.shape
            )
            weights = weights * kept / (1 - dropout_p)
        return weights.to(value.dtype) @ value.repeat_interleave(heads // kv_heads, 1), lse

    functions: dict[str, Any] = {"ours": ours, "torch": with_rows(of_torch), "reference": with_rows(expected)}
    functions["terms"] = with_rows(first_terms)
    return Case(inputs=make, **functions, outputs=("output", "lse"))


def attention_decode_case(
    lengths: Sequence[int] = (5, 130, 64), *, queries: int = 3, heads: int = 8, kv_heads: int = 2, head_dim: int = 64
) -> Case:
    """New tokens of sequences with `lengths` keys in their caches, of which the last are the new tokens'.

    For seqkern the caches hold NaN beyond the lengths.
    """
    room = max(lengths) + 7

    def make(g: torch.Generator) -> dict[str, Tensor]:
        caches = {name: normal(g, len(lengths), kv_heads, room, head_dim) for name in ("key_cache", "value_cache")}
        return {"query": normal(g, len(lengths), heads, queries, head_dim)} | caches

    def ours(query: Tensor, **caches: Tensor) -> Tensor:
        ends = torch.tensor(lengths, device=query.device)
        beyond = (torch.arange(room, device=query.device) >= ends[:, None])[:, None, :, None]
        keys, values = (cache.masked_fill(beyond, math.nan) for cache in caches.values())
        output: Any = seqkern.attention_decode(query, keys, values, ends)
        return output

    def one_by_one(function: Callable[..., Tensor]) -> Any:
        def all_of_them(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
            parts = []
            for b, n in enumerate(lengths):
                parts.append(function(query[b : b + 1], key_cache[b : b + 1, :, :n], value_cache[b : b + 1, :, :n]))
            return torch.cat(parts)

        return all_of_them

    def of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Sums over the head dimension in reverse: in float64 torch would otherwise round exactly like the oracle.
        visible = torch.ones(queries, key.shape[2], dtype=torch.bool, device=query.device).tril(key.shape[2] - queries)
        return torch.nn.functional.scaled_dot_product_attention(
            query.flip(-1), key.flip(-1), value, visible, enable_gqa=True
        )

    def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return reference.attention(query, key, value, diagonal=key.shape[2] - queries, right=0)[0]

    return Case(
        inputs=make, ours=ours, torch=one_by_one(of_torch), reference=one_by_one(expected), differentiable=False
    )
