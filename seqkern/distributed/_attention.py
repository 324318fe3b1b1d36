"""Attention over a sequence that is split over the processes of a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from seqkern._arguments import AttentionNumbers, AttentionTensors
from seqkern._library import backend_for, kernel
from seqkern.distributed._group import (
    LAYOUTS,
    check_choice,
    check_device,
    check_group,
    gather,
    in_order,
    of_ranks,
    pieces,
    split,
    unsplit,
)
from seqkern.ops._attention_autograd import _grad_sinks, _sum_of_sequences, lse_dtype, rounded_lse
from seqkern.ops._attention_checks import (
    autocast,
    check_band,
    check_batch,
    check_dropout,
    check_head_dim,
    check_lengths,
    check_scale,
    check_softcap,
    check_tensors,
    check_types,
    prepare_sinks,
    prepare_slopes,
)
from seqkern.ops.attention import attention

METHODS = ("allgather", "ring", "ulysses")


@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any = None, causal: bool = False, layout: str = "zigzag",
    method: str = "allgather", window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any = None, causal: bool = False, layout: str = "zigzag",
    method: str = "allgather", window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any = None, causal: bool = False, layout: str = "zigzag",
    method: str = "allgather", window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    causal: bool = False,
    layout: str = "zigzag",
    method: str = "allgather",
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`seqkern.attention` of a whole sequence, each process holding its part of queries, keys and values.

    What is added up over processes (partial outputs, gradients of keys and values) is float32, float64 for float64, and
    rounded once, at the end. For that, 16-bit inputs are multiplied as float32 where there are partial results: by
    "ring", and in the backward pass of "allgather"; "ulysses" has none.

    Args:
        query: (B, H, N / R, D): of the whole (B, H, N, D) what `shard_sequence` with the same layout gives. One shape
            and dtype on all processes.
        key: (B, Hk, N / R, D), value: (B, Hk, N / R, Dv), likewise; H a multiple of Hk.
        group: of torch.distributed; None is the default group.
        causal, window, softcap, scale: as `attention`, of positions in the whole sequence.
        layout: how the sequence is split: "zigzag" (equal work under a causal mask) or "contiguous".
        method: "allgather": keys and values of the whole on every process, one layer's at a time, found again for the
            backward pass; "ring": they travel, two parts at a time are here; "ulysses": all-to-all to whole sequences
            of H / R heads.
        alibi_slopes: (H,) or (B, H), the same on every process. sinks: (H,) likewise. The gradients are this process's
            share: their sum over the group is the whole (DDP: its mean, with a loss that is the mean of the ranks').
        dropout_p: as `attention`; only by "allgather". The mask is that of one process whose generator stands where
            that of the group's first process does. Queries then take the memory of the whole sequence.
        return_lse: also return the log-sum-exp.

    Returns:
        (B, H, N / R, Dv), this process's part of the output, in the query's dtype; with return_lse a tuple of it and
        the log-sum-exp, (B, H, N / R), float32 (float64 for float64). Differentiable once ("ulysses": as often as
        `attention`); every process of the group must run the backward pass.

    Raises:
        TypeError, ValueError: as `attention`; ValueError also for an unknown layout or method, a length that does not
            divide, heads that R does not divide ("ulysses"), a device that the group does not exchange.
        RuntimeError: torch.distributed is not initialised.
        NotImplementedError: dropout by "ring" or "ulysses": their kernels count rows or keys of a part only. As
            `attention`, and the reference backend.

    Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023; all-gather: Llama 3, 2024;
    all-to-all: Jacobs et al., "DeepSpeed Ulysses", 2023.
    """
    op = "ring_attention"
    check_choice(op, "layout", layout, LAYOUTS)
    check_choice(op, "method", method, METHODS)
    group, rank, ranks = check_group(op, group)
    query, key, value = autocast(check_tensors(op, query, key, value, least=4, most=4))
    check_types(op, query, key=key, value=value)
    check_head_dim(op, query, key)
    check_lengths(op, key, value)
    check_batch(op, query, key, value, ("key", "value"))
    check_device(op, "query", query, group)
    _, _, rows, head_dim = query.shape
    if key.shape[2] != rows:
        raise ValueError(f"{op}: key must have as many rows as query, {rows}, got {key.shape[2]}")
    length = rows * ranks
    pieces(op, length, rank, ranks, layout, f"N, {ranks} times the rows of query,")
    left, right = check_band(op, causal, window)
    softcap, scale = check_softcap(op, softcap), check_scale(op, scale, head_dim)
    if alibi_slopes is not None:
        alibi_slopes = prepare_slopes(op, alibi_slopes, query, query.shape[0])
    if sinks is not None:
        sinks = prepare_sinks(op, sinks, query)
    seed = None
    if check_dropout(op, dropout_p):
        if method != "allgather":
            raise NotImplementedError(
                f'{op}: dropout_p must be 0 by method {method!r}, got {dropout_p}: use method="allgather"'
            )
        seed = torch.randint(-(2**63), 2**63 - 1, (), device=query.device)
        dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
    if method == "ulysses":
        return _ulysses(
            query, key, value, group, rank, ranks, layout, causal, window, alibi_slopes, softcap, sinks, scale,
            return_lse,
        )  # fmt: skip
    if backend_for("attention", query) == "reference":
        raise NotImplementedError(f"{op}: method {method!r} has no reference backend: use_backend('auto')")
    numbers = AttentionNumbers(0, 0, 0, False, left, right, scale, softcap, dropout_p)
    plan = _Plan(group, rank, ranks, layout, method, length, numbers)
    out, lse = _Parallel.apply(query, key, value, alibi_slopes, sinks, seed, plan)
    return (out, rounded_lse(lse, out)) if return_lse else out


def _ulysses(
    query: Tensor, key: Tensor, value: Tensor, group: Any, rank: int, ranks: int, layout: str, causal: bool,
    window: Any, slopes: Tensor | None, softcap: float, sinks: Tensor | None, scale: float, return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    for name, t in (("query", query), ("key", key)):
        if t.shape[1] % ranks:
            raise ValueError(
                f"ring_attention: {name} must have a multiple of {ranks} heads, as many as processes, "
                f"by method 'ulysses', got {t.shape[1]}"
            )
    own = query.shape[1] // ranks
    out, lse = attention(
        *(split(t, 1, 2, group, ranks, layout) for t in (query, key, value)),
        causal=causal,
        window=window,
        alibi_slopes=None if slopes is None else slopes[:, rank * own : (rank + 1) * own],
        softcap=softcap,
        sinks=None if sinks is None else sinks[rank * own : (rank + 1) * own],
        scale=scale,
        return_lse=True,
    )
    out = unsplit(out, 1, 2, group, ranks, layout)
    return (out, unsplit(lse, 1, 2, group, ranks, layout)) if return_lse else out


class _Plan(NamedTuple):
    group: Any
    rank: int
    ranks: int
    layout: str
    method: str
    length: int  # of the whole sequence
    numbers: AttentionNumbers

    def held_by(self, rank: int) -> list[tuple[int, int]]:
        return pieces("ring_attention", self.length, rank, self.ranks, self.layout)

    def pairs(self, keys: list[tuple[int, int]], dropout: bool) -> Iterator[tuple[slice, slice, int, int]]:
        """Rows of this process's queries and rows of the keys that they see, and where both stand in the whole."""
        left, right = self.numbers.left, self.numbers.right
        row = 0
        for query, queries in self.held_by(self.rank):
            key_row = 0
            for key, count in keys:
                first = max(key, query - left) if left >= 0 and not dropout else key
                end = min(key + count, query + queries + right) if right >= 0 else key + count
                if first < end:
                    seen = slice(key_row + first - key, key_row + end - key)
                    yield slice(row, row + queries), seen, query, first
                key_row += count
            row += queries


class _Call:
    """The kernels' calls for one pair: queries that stand at `query`, keys that stand at `key`.

    With dropout, whose mask counts rows of the whole: heads of all sequences, one behind the other, as those of one
    packed sequence, whose rows before the queries see no key.
    """

    def __init__(self, plan: _Plan, query: int, key: int, seed: Tensor | None) -> None:
        self.plan, self.query, self.key, self.seed = plan, query, key, seed

    def _whole(self, t: Tensor) -> Tensor:
        """(B, H, n, ...) to (1, B H, N, ...), in its place."""
        flat = t.flatten(0, 1)[None]
        whole = flat.new_zeros((1, flat.shape[1], self.plan.length, *flat.shape[3:]))
        whole[:, :, self.query : self.query + t.shape[2]] = flat
        return whole

    def _part(self, t: Tensor, like: Tensor) -> Tensor:
        part = t[0, :, self.query : self.query + like.shape[2]]
        return part.reshape(*like.shape[:3], *t.shape[3:])

    def _tensors(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None
    ) -> tuple[AttentionTensors, AttentionNumbers]:
        queries, keys = q.shape[2], k.shape[2]
        numbers = self.plan.numbers._replace(max_queries=queries, max_keys=keys, diagonal=self.query - self.key)
        if self.seed is None:
            return AttentionTensors(q, k, v, alibi_slopes=slopes, sinks=sinks), numbers
        starts = torch.tensor([[0, self.query, self.query + queries], [0, 0, keys]], device=q.device)
        if slopes is not None:
            slopes = slopes.flatten()[None].expand(2, -1).contiguous()
        if sinks is not None:
            sinks = sinks.repeat(q.shape[0])
        k, v = (t.flatten(0, 1)[None] for t in (k, v))
        tensors = AttentionTensors(
            self._whole(q), k, v, None, starts[0], starts[1], alibi_slopes=slopes, sinks=sinks, seed=self.seed
        )
        return tensors, numbers._replace(max_queries=max(queries, self.query))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tensors, numbers = self._tensors(q, k, v, slopes, sinks)
        out, lse = kernel("attention_fwd", q)(*tensors, *numbers)
        if self.seed is None:
            return out, lse
        return self._part(out, q), self._part(lse, q)

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        slopes: Tensor | None, need_slopes: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        tensors, numbers = self._tensors(q, k, v, slopes, None)
        if self.seed is not None:
            grad_out, out, lse = (self._whole(t) for t in (grad_out, out, lse))
            grad_lse = None if grad_lse is None else self._whole(grad_lse)
        grad_q, grad_k, grad_v, _, distance = kernel("attention_bwd", q)(
            grad_out, grad_lse, *tensors[:3], out, lse, None, *tensors[4:8], self.seed, *numbers, False, need_slopes
        )
        if self.seed is not None:
            grad_q = self._part(grad_q, q)
            grad_k, grad_v = (grad[0].reshape(t.shape) for grad, t in ((grad_k, k), (grad_v, v)))
        grad_slopes = None
        if need_slopes:
            assert slopes is not None
            sums = _sum_of_sequences(distance, tensors.query_starts)
            grad_slopes = -(sums if self.seed is None else sums.sum(0).view(slopes.shape))
        return grad_q, grad_k, grad_v, grad_slopes


class _Parallel(torch.autograd.Function):
    """query, key, value, slopes, sinks -> out, lse of this process's rows; by "allgather" and by "ring"."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, sinks: Tensor | None,
        seed: Tensor | None, plan: _Plan,
    ) -> Any:  # fmt: skip
        of_method = _gathered_forward if plan.method == "allgather" else _ring_forward
        out, lse = of_method(query, key, value, slopes, sinks, seed, plan)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, slopes, sinks, seed, out, lse)
        return out.to(query.dtype), lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, slopes, sinks, seed, out, lse = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)
        q, out = query.to(wide), out.to(wide)
        lse = lse.to(lse_dtype(q))
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.to(wide)
        if grad_lse is not None:
            grad_lse = grad_lse.to(lse.dtype)
        grads = _Gradients(ctx.plan, grad_out, grad_lse, q, out, lse, slopes, seed, ctx.needs_input_grad[3])
        of_method = _gathered_backward if ctx.plan.method == "allgather" else _ring_backward
        grad_key, grad_value = of_method(grads, key, value)
        grad_sinks = _grad_sinks(grad_out, grad_lse, out, lse, sinks) if ctx.needs_input_grad[4] else None
        return (
            grads.query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grads.slopes, grad_sinks,
            None, None,
        )  # fmt: skip


class _Gradients:
    """Adds up what the pairs give."""

    def __init__(
        self, plan: _Plan, grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, out: Tensor, lse: Tensor,
        slopes: Tensor | None, seed: Tensor | None, need_slopes: bool,
    ) -> None:  # fmt: skip
        self.plan, self.seed = plan, seed
        self.rows = (grad_out, grad_lse, q, out, lse)
        self.given, self.need_slopes = slopes, need_slopes
        self.query = torch.zeros_like(q)
        self.slopes = torch.zeros_like(slopes) if slopes is not None and need_slopes else None

    def add(self, keys: list[tuple[int, int]], k: Tensor, v: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        """What this process's queries give to keys and values that stand at `keys`, into grad_k and grad_v."""
        for rows, seen, query, key in self.plan.pairs(keys, self.seed is not None):
            own: list[Any] = [t if t is None else t[:, :, rows] for t in self.rows]
            grad_out, grad_lse, q, out, lse = own
            call = _Call(self.plan, query, key, self.seed)
            found = call.backward(
                grad_out, grad_lse, q, k[:, :, seen], v[:, :, seen], out, lse, self.given, self.need_slopes
            )
            self.query[:, :, rows] += found[0]
            grad_k[:, :, seen] += found[1]
            grad_v[:, :, seen] += found[2]
            if self.slopes is not None and found[3] is not None:
                self.slopes += found[3]


# ---- all-gather ----------------------------------------------------------------------------------------------------


def _whole_of(t: Tensor, plan: _Plan) -> Tensor:
    return in_order(torch.cat(gather(t, plan.group).unbind(0), 2), 2, plan.ranks, plan.layout)


def _gathered_forward(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
    plan: _Plan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k, v = (_whole_of(t, plan) for t in (key, value))
    outs, lses = [], []
    for rows, seen, at, first in plan.pairs([(0, plan.length)], seed is not None):
        call = _Call(plan, at, first, seed)
        out, lse = call.forward(query[:, :, rows], k[:, :, seen], v[:, :, seen], slopes, sinks)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _gathered_backward(grads: _Gradients, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    plan, wide = grads.plan, grads.query.dtype
    k, v = (_whole_of(t, plan).to(wide) for t in (key, value))
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    grads.add([(0, plan.length)], k, v, grad_k, grad_v)
    del k, v
    return _share(grad_k, plan), _share(grad_v, plan)


def _share(grad: Tensor, plan: _Plan) -> Tensor:
    """The sum over the processes of the rows that are this process's."""
    parts = torch.stack(of_ranks(grad, 2, plan.ranks, plan.layout).chunk(plan.ranks, 2))
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=plan.group)
    return out.sum(0)  # in the order of the ranks: the same bits every time


# ---- ring ----------------------------------------------------------------------------------------------------------


class _Travel:
    """Tensors on their way to the next process of the ring, others of their shapes on the way here."""

    def __init__(self, plan: _Plan, tensors: list[Tensor], tag: int) -> None:
        to, of = (dist.get_global_rank(plan.group, (plan.rank + step) % plan.ranks) for step in (1, -1))
        self.sent = [t.contiguous() for t in tensors]
        self.received = [torch.empty_like(t) for t in self.sent]
        self.works: list[Any] = []
        if plan.ranks == 1:
            self.received = self.sent
            return
        posts = []
        for i, (sent, received) in enumerate(zip(self.sent, self.received, strict=True)):
            posts.append(dist.P2POp(dist.isend, sent, to, plan.group, 2 * tag + i))
            posts.append(dist.P2POp(dist.irecv, received, of, plan.group, 2 * tag + i))
        self.works = dist.batch_isend_irecv(posts)

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def _ring_forward(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
    plan: _Plan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q = query.to(torch.promote_types(query.dtype, torch.float32))
    out = q.new_zeros((*q.shape[:3], value.shape[3]))
    lse = torch.full(q.shape[:3], -torch.inf, dtype=lse_dtype(q), device=q.device)
    held = [key, value]
    for step in range(plan.ranks):
        travel = _Travel(plan, held, 0) if step < plan.ranks - 1 else None
        k, v = (t.to(q.dtype) for t in held)
        for rows, seen, at, first in plan.pairs(plan.held_by((plan.rank - step) % plan.ranks), False):
            call = _Call(plan, at, first, None)
            merge(
                out[:, :, rows],
                lse[:, :, rows],
                *call.forward(q[:, :, rows], k[:, :, seen], v[:, :, seen], slopes, None),
            )
        if travel is not None:
            held = travel.wait()
    if sinks is not None:
        merge(out, lse, None, sinks[:, None].to(lse.dtype).expand_as(lse))
    return out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor | None, more_lse: Tensor) -> None:
    """Another set of keys into the output and log-sum-exp, in place. None: a score without a value."""
    total = torch.logaddexp(lse, more_lse)
    shift = total.masked_fill(total.isneginf(), 0)
    out.mul_(torch.exp(lse - shift)[..., None])
    if more is not None:
        out.add_(torch.exp(more_lse - shift)[..., None].to(out.dtype) * more)
    lse.copy_(total)


def _ring_backward(grads: _Gradients, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    plan, wide = grads.plan, grads.query.dtype
    held = [key, value]
    coming: _Travel | None = None
    for step in range(plan.ranks):
        travel = _Travel(plan, held, 0) if step < plan.ranks - 1 else None
        k, v = (t.to(wide) for t in held)
        sums = [torch.zeros_like(k), torch.zeros_like(v)]
        grads.add(plan.held_by((plan.rank - step) % plan.ranks), k, v, *sums)
        if coming is not None:
            for own, others in zip(sums, coming.wait(), strict=True):
                own += others
        coming = _Travel(plan, sums, 1)  # to who holds these keys next; after the last step, to whom they belong
        if travel is not None:
            held = travel.wait()
    assert coming is not None
    grad_key, grad_value = coming.wait()
    return grad_key, grad_value
