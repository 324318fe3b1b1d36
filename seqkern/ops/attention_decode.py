"""Decoding: attention of the newest tokens over caches, which it extends."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from seqkern import _attention_cuda, _direct
from seqkern._arguments import AttentionNumbers, AttentionTensors
from seqkern._direct import fast
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for
from seqkern._limits import MOST_DECODE_QUERIES, MOST_HEAD_DIM
from seqkern._recording import is_proxy, record
from seqkern.ops._attention_autograd import rounded_lse, run
from seqkern.ops._attention_checks import (
    check_band,
    check_batch,
    check_head_dim,
    check_heads,
    check_key_lengths,
    check_scale,
    check_softcap,
    check_tensors,
    check_types,
    prepare_sinks,
    prepare_slopes,
    shape_of,
)
from seqkern.ops._autocast import autocasts
from seqkern.ops._autograd import readable, transforms_active, wants_gradient


@overload
def attention_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cache_lengths: Tensor, *, key: Tensor | None = None,
    value: Tensor | None = None, page_table: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attention_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cache_lengths: Tensor, *, key: Tensor | None = None,
    value: Tensor | None = None, page_table: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cache_lengths: Tensor, *, key: Tensor | None = None,
    value: Tensor | None = None, page_table: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, scale: float | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@explicit
def attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    page_table: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    **unexpected: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of the newest tokens over a cache of keys and values, which it extends first.

    With key and value, their N rows are written into the caches at cache_lengths, in place: the one change that seqkern
    makes to its arguments. cache_lengths stays as it is: add N to it before the next call. The queries are the last Nq
    tokens of every sequence, so that query i sees what is at or before position cache_lengths + N - Nq + i; one that
    has no such position has output 0. What the caches hold beyond is never read.

    Args:
        query: (B, H, Nq, D), float64, float32, bfloat16 or float16.
        key_cache: (B, Hk, Nmax, D) in the query's dtype, H a multiple of Hk. value_cache: (B, Hk, Nmax, Dv) likewise.
            With a page_table, pages of P tokens that any sequence may own: (pages, Hk, P, D) and (pages, Hk, P, Dv).
        cache_lengths: (B,), int32 or int64: the tokens in the cache of every sequence, without the new ones.
        key, value: the new tokens' (B, Hk, N, D) and (B, Hk, N, Dv), or both None where the caches have them already.
            They and query may be views of the caches; under torch.compile not of rows that are written.
        page_table: (B, pages of a sequence), int32 or int64: token j of sequence b is row j % P of page
            page_table[b, j // P], for any P; no page that is written belongs to two sequences. Entries of pages without
            a token that is seen or written may be anything, as -1. CUDA C++ reads pages where they lie (for 1 to 16
            queries); the other backends copy those of all sequences together first.
        window: (left, right), as `attention`; right is 0.
        alibi_slopes, softcap, sinks, scale, return_lse: as `attention`.

    Returns:
        As `attention`. Under autocast, query, key and value are cast to the caches' dtype.

    Raises:
        As `attention`. ValueError also for tokens that do not fit the cache, before anything is written, and for
        entries of page_table that name no page, both where lengths and table can be read at once: on the CPU, not
        compiled. (Elsewhere CUDA C++ writes no row without a place; the other backends need numbers that are right.)
        NotImplementedError where a gradient is wanted: there is none; use torch.no_grad(), or `attention`.

    Source: as `attention`.

    Example:
        >>> import torch, seqkern
        >>> keys, values = torch.zeros(2, 1, 16, 8), torch.zeros(2, 1, 16, 8)  # room for 16 tokens
        >>> lengths = torch.tensor([3, 5])  # of which the sequences have 3 and 5
        >>> q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8)
        >>> y = seqkern.attention_decode(q, keys, values, lengths, key=k, value=v)
        >>> lengths += 1
    """
    if is_proxy(query):
        return record(attention_decode, locals())
    if unexpected:
        refuse(attention_decode, unexpected)
    plain = page_table is None and alibi_slopes is None and softcap is None and sinks is None and not return_lse
    if plain and fast():
        found: Tensor | None = _direct.attention_decode(
            query, key_cache, value_cache, cache_lengths, key, value, window, scale
        )
        if found is not None:
            return found
    op = "attention_decode"
    check_tensors(op, query, least=4, most=4)
    if (key is None) != (value is None):
        raise ValueError(f"{op}: key and value must be given together")
    new = {} if key is None or value is None else {"key": key, "value": value}
    for name, t in ({"key_cache": key_cache, "value_cache": value_cache} | new).items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.dim() != 4:
            raise ValueError(f"{op}: {name} must have 4 dimensions, got shape {shape_of(t)}")
    if autocasts(query):
        query = query.to(key_cache.dtype)
        new = {name: t.to(key_cache.dtype) for name, t in new.items()}
    check_types(op, query, key_cache=key_cache, value_cache=value_cache, **new)
    check_head_dim(op, query, key_cache)
    batch, _, queries, head_dim = query.shape
    for name, t in (("key_cache", key_cache), ("value_cache", value_cache)):
        if any(t.shape[d] > 1 and t.stride(d) == 0 for d in range(3)):
            raise ValueError(f"{op}: {name} must have memory of its own for every row, got strides {t.stride()}")
    room = key_cache.shape[2]
    if value_cache.shape[2] != room:
        raise ValueError(f"{op}: value_cache must have the key_cache's {room} rows, got shape {shape_of(value_cache)}")
    if page_table is None:
        check_batch(op, query, key_cache, value_cache, ("key_cache", "value_cache"))
    else:
        page_table = _check_pages(op, page_table, query, key_cache, value_cache)
        room *= page_table.shape[1]
    lengths = check_key_lengths(op, cache_lengths, query, batch, "cache_lengths")
    left, right = check_band(op, True, window)
    if alibi_slopes is not None:
        alibi_slopes = prepare_slopes(op, alibi_slopes, query, batch)
    if sinks is not None:
        sinks = prepare_sinks(op, sinks, query)
    scale, softcap = check_scale(op, scale, head_dim), check_softcap(op, softcap)
    backend = backend_for(op, query)
    if wants_gradient(query, key_cache, value_cache, alibi_slopes, sinks, *new.values()) or transforms_active():
        raise NotImplementedError(
            f"{op} has no gradient and does not run inside transforms: call it under torch.no_grad(), or use attention"
        )
    count = _check_new(op, query, key_cache, value_cache, new)
    if new:  # else nothing is written
        query = _apart(query, key_cache, value_cache)
        new = {name: _apart(t, key_cache, value_cache) for name, t in new.items()}
    ends = _check_room(op, lengths, count, room)
    if page_table is not None and ends is not None and readable(page_table):
        _check_entries(op, page_table, ends, count, queries, left, key_cache)
    if backend == "cuda" and _decodes(query, key_cache, value_cache):
        tf32 = _attention_cuda.tf32(query)
        if page_table is not None and page_table.dtype == torch.int64:  # numbers of no page stay such numbers
            page_table = page_table.clamp(-1, 2**31 - 1).to(torch.int32)
        out, lse = torch.ops.seqkern_cuda.attention_decode(
            query, key_cache, value_cache, lengths, new.get("key"), new.get("value"), page_table, alibi_slopes, sinks,
            left, right, scale, softcap, tf32, 0,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    if backend != "cpu":
        _check_kernels(op, backend, query, value_cache)  # before anything is written
    if new:
        _append(key_cache, value_cache, lengths, ends, new, page_table)
        lengths = lengths + count
    if page_table is not None:
        first = lengths - queries - left if left >= 0 else torch.zeros_like(lengths)
        key_cache, value_cache = (_gathered(t, page_table, first, lengths) for t in (key_cache, value_cache))
    tensors = AttentionTensors(
        query, key_cache, value_cache, key_lengths=lengths, alibi_slopes=alibi_slopes, sinks=sinks
    )
    numbers = AttentionNumbers(
        max_queries=queries, max_keys=room, diagonal=0, lower_right=True, left=left, right=right, scale=scale,
        softcap=softcap, dropout_p=0.0,
    )  # fmt: skip
    out, lse = run(backend, tensors, numbers)
    return (out, rounded_lse(lse, out)) if return_lse else out


def _decodes(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether the kernel in CUDA C++ for few queries serves a call; else that of `attention` does."""
    dims = max(query.shape[3], value_cache.shape[3])
    dense = all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in (key_cache, value_cache))
    some = query.shape[1] > 0 and 0 < query.shape[2] <= MOST_DECODE_QUERIES
    return some and query.dtype != torch.float64 and dims <= MOST_HEAD_DIM and dense


def _check_kernels(op: str, backend: str, query: Tensor, value_cache: Tensor) -> None:
    """Raises for what the kernels of `attention` would refuse."""
    if backend == "cuda":
        _attention_cuda.check(query, value_cache)
    dims = (query.shape[3], value_cache.shape[3])
    if backend == "triton" and not all(1 <= dim <= MOST_HEAD_DIM for dim in dims):
        raise NotImplementedError(
            f"{op}: the Triton kernels take head dimensions of 1 to {MOST_HEAD_DIM}, got query {tuple(query.shape)} "
            f'and value_cache {tuple(value_cache.shape)}; use_backend("reference") runs any'
        )


# ---- what comes in ------------------------------------------------------------------------------------------------


def _check_pages(op: str, table: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    if not isinstance(table, Tensor):
        raise TypeError(f"{op}: page_table must be a tensor or None, got {type(table).__name__}")
    if table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: page_table must be int32 or int64, got {table.dtype}")
    if table.device != query.device:
        raise ValueError(f"{op}: page_table must be on the query's device {query.device}, got {table.device}")
    if table.dim() != 2 or table.shape[0] != query.shape[0]:
        raise ValueError(f"{op}: page_table must have shape ({query.shape[0]}, pages), got {shape_of(table)}")
    if value_cache.shape[:2] != key_cache.shape[:2]:
        raise ValueError(
            f"{op}: value_cache must have the key_cache's pages and heads, {tuple(key_cache.shape[:2])}, "
            f"got shape {shape_of(value_cache)}"
        )
    check_heads(op, query.shape[1], key_cache.shape[1], "key_cache")
    return table


def _check_new(op: str, query: Tensor, key_cache: Tensor, value_cache: Tensor, new: dict[str, Tensor]) -> int:
    """How many tokens are new in every sequence."""
    count = new["key"].shape[2] if new else 0
    for (name, t), cache in zip(new.items(), (key_cache, value_cache), strict=False):
        expected = (query.shape[0], cache.shape[1], count, cache.shape[3])
        if t.shape != expected:
            raise ValueError(f"{op}: {name} must have shape {tuple(expected)} to fit the cache, got {shape_of(t)}")
    return count


def _apart(t: Tensor, *caches: Tensor) -> Tensor:
    """What lies in a cache's memory is copied: it would be read while that memory is written, or after."""
    if torch.compiler.is_compiling():
        return t
    return t.clone() if any(torch._C._is_alias_of(t, cache) for cache in caches) else t  # type: ignore[attr-defined]


def _check_room(op: str, lengths: Tensor, count: int, room: int) -> list[int] | None:
    """The lengths, where they can be read."""
    if not readable(lengths):
        return None
    ends: list[int] = lengths.tolist()
    for b, length in enumerate(ends):
        if length < 0 or length + count > room:
            raise ValueError(
                f"{op}: cache_lengths must leave room for {count} new tokens among {room}, "
                f"got {length} for sequence {b}"
            )
    return ends


def _check_entries(op: str, table: Tensor, ends: list[int], count: int, queries: int, left: int, cache: Tensor) -> None:
    """What is seen or written must lie in a page."""
    pages, _, size, _ = cache.shape
    for b, length in enumerate(ends):
        total = length + count
        first = 0 if left < 0 else max(0, min(length, total - queries - left))
        if total == first:
            continue
        used = table[b, first // size : -(-total // size)]
        low, high = int(used.min()), int(used.max())
        if low < 0 or high >= pages:
            raise ValueError(
                f"{op}: page_table must name pages from 0 to {pages - 1}, got {low if low < 0 else high} "
                f"for sequence {b} of {total} tokens"
            )


# ---- without a kernel of its own ----------------------------------------------------------------------------------


def _append(
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    ends: list[int] | None,
    new: dict[str, Tensor],
    table: Tensor | None,
) -> None:
    """Writes the new keys and values where the caches end."""
    count = new["key"].shape[2]
    if table is None and ends and min(ends) == max(ends):  # one slice for all, which takes half the time
        key_cache.narrow(2, ends[0], count).copy_(new["key"])
        value_cache.narrow(2, ends[0], count).copy_(new["value"])
        return
    where = torch.arange(lengths.shape[0], device=lengths.device)[:, None]
    position = lengths.long()[:, None] + torch.arange(count, device=lengths.device)
    if table is not None:
        size = key_cache.shape[2]
        where, position = table.long().gather(1, position // size), position % size
    key_cache[where, :, position] = new["key"].transpose(1, 2)
    value_cache[where, :, position] = new["value"].transpose(1, 2)


def _gathered(cache: Tensor, table: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """The pages of every sequence in order, (B, Hk, rows, D); 0 where none of the tokens [first, last) lies."""
    size = cache.shape[2]
    start = torch.arange(table.shape[1], device=table.device) * size
    needed = (start < last[:, None]) & (start + size > first[:, None])
    pages = cache[torch.where(needed, table, 0).long()] if cache.shape[0] else cache.new_zeros(())
    pages = torch.where(needed[:, :, None, None, None], pages, 0)  # (B, pages, Hk, size, D)
    return pages.expand(*table.shape, *cache.shape[1:]).transpose(1, 2).flatten(2, 3)


@torch.library.register_fake("seqkern_cuda::attention_decode")
def _(query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = query.shape[:3]
    return query.new_empty((*shape, value_cache.shape[3])), query.new_empty(shape, dtype=torch.float32)
