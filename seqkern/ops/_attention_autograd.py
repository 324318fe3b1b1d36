"""Attention's derivatives, fake kernels and batching rules: what stands between its API and its kernels.

Its arguments, in the kernels' order: query, key, value, then attn_mask, query_starts, key_starts, key_lengths,
alibi_slopes, sinks and seed, each a tensor or None, then the numbers max_queries, max_keys, diagonal, lower_right,
left, right, scale, softcap and dropout_p. All tensors have the shapes that csrc/attention/attention.h asks for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._library import kernel
from seqkern.ops._autograd import apply, eager, gradients, per_sample, tangents, wants_gradient

_TENSORS, _NUMBERS = 10, 9


def run(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the backend's kernel, or by the reference with the reference's own derivatives.

    The log-sum-exp as the kernel keeps it for the backward pass: see `lse_dtype`.
    """
    query, key, value, attn_mask, _, _, _, alibi_slopes, sinks, *_ = arguments
    if backend == "reference":
        return formula(*arguments)
    wanted = wants_gradient(query, key, value, attn_mask, alibi_slopes, sinks)
    return apply(_Attention, _AttentionEager, wanted, *arguments)


def formula(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The reference, from the arguments of the kernels."""
    query, key, value, attn_mask, query_starts, key_starts, key_lengths, alibi_slopes, sinks, seed = arguments[
        :_TENSORS
    ]
    _, _, diagonal, lower_right, *numbers = arguments[_TENSORS:]
    tensors = (attn_mask, key_lengths, alibi_slopes, sinks, seed)
    if query_starts is not None:
        return reference.attention_varlen(
            query, key, value, query_starts, key_starts, *tensors, diagonal, lower_right, *numbers
        )
    if lower_right:
        diagonal = diagonal + _lengths(key_lengths, key.shape[2]) - query.shape[2]
    return reference.attention(query, key, value, *tensors, diagonal, *numbers)


def lse_dtype(query: Tensor) -> torch.dtype:
    """Of the kernels' log-sum-exp: on a CPU, beside float32, it is not rounded (csrc/attention/attention.h)."""
    if query.device.type == "cpu" and query.dtype == torch.float32:
        return torch.float64
    return torch.promote_types(query.dtype, torch.float32)


def rounded_lse(lse: Tensor, out: Tensor) -> Tensor:
    """The kernels' log-sum-exp as users get it: float32 or wider, as the output."""
    return lse.to(torch.promote_types(out.dtype, torch.float32))


def _lengths(key_lengths: Tensor | None, rows: int) -> Any:
    """The number of keys: of all sequences, or of every one, (B, 1, 1, 1)."""
    return rows if key_lengths is None else key_lengths.clamp(0, rows)[:, None, None, None]


def _owned(t: Tensor, packed: bool) -> Tensor:
    """A kernel's result, not as the view that it is of packed sequences: nothing else holds its memory."""
    return torch.ops.aten._unsafe_view.default(t, t.shape) if packed else t


# ---- autograd -----------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """The arguments -> out, lse. Backward is a Function again, so that it can be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, *rest: Any) -> Any:
        out, lse = kernel("attention_fwd", query)(query, *rest)
        return _owned(out, rest[3] is not None), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.numbers = inputs[_TENSORS:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_TENSORS], *output)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:_TENSORS], *output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(saved[_TENSORS])
        needs = ctx.needs_input_grad
        need_mask, need_slopes, need_sinks = needs[3], needs[7], needs[8]
        grad_query, grad_key, grad_value, *others = apply(
            _AttentionBackward, _AttentionBackwardEager, torch.is_grad_enabled(),
            grad_out, grad_lse, *saved, *ctx.numbers, need_mask, need_slopes, need_sinks,
        )  # fmt: skip
        others = list(others)  # to Dynamo before 2.12, the rest of a tuple is a tuple
        grad_mask = others.pop(0) if need_mask else None
        grad_slopes = others.pop(0) if need_slopes else None
        grad_sinks = others.pop(0) if need_sinks else None
        grads = (grad_query, grad_key, grad_value, grad_mask, None, None, None, grad_slopes, grad_sinks, None)
        return *grads, *[None] * _NUMBERS

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        inputs = ctx.saved_tensors[:_TENSORS]
        blocks = _Blocks(inputs, ctx.numbers)

        def of_block(block: _Block, inputs: Any, directions: Any) -> Any:
            return tangents(functools.partial(blocks.outputs, block), inputs, directions)

        arguments = [(_INPUTS, _differentiable(inputs)), (_INPUTS, _differentiable(input_tangents))]
        return blocks.map(of_block, arguments, ("row", "row"), _like_outputs(inputs))

    @staticmethod
    def plain(*args: Any) -> Any:
        inputs, blocks = args[:_TENSORS], _Blocks(args[:_TENSORS], args[_TENSORS:])

        def of_block(block: _Block, inputs: Any) -> Any:
            return blocks.outputs(block, *inputs)

        arguments = [(_INPUTS, _differentiable(inputs))]
        out, lse = blocks.map(of_block, arguments, ("row", "row"), _like_outputs(inputs))
        assert lse is not None
        row, starts = torch.arange(lse.shape[2], device=lse.device), blocks.starts["row"]
        return out, lse.masked_fill((row < starts[0]) | (row >= starts[-1]), -math.inf)


class _AttentionBackward(torch.autograd.Function):
    """grad_out, grad_lse, the tensors, out, lse, the numbers, three needs -> the gradients.

    They are those of query, key and value, and, as far as needed, of mask, slopes and sinks.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(grad_out: Tensor, grad_lse: Tensor | None, *rest: Any) -> Any:
        *tensors, sinks, seed, out, lse = rest[: _TENSORS + 2]
        *numbers, need_mask, need_slopes, need_sinks = rest[_TENSORS + 2 :]
        query, key, value, *others = tensors
        grad_query, grad_key, grad_value, grad_mask, grad_distance = kernel("attention_bwd", query)(
            grad_out, grad_lse, query, key, value, out, lse, *others, seed, *numbers, need_mask, need_slopes
        )
        results = [_owned(t, others[1] is not None) for t in (grad_query, grad_key, grad_value)]
        if need_mask:
            results.append(grad_mask)
        if need_slopes:
            results.append(-_sum_of_sequences(grad_distance, others[1]))
        if need_sinks:
            results.append(_grad_sinks(grad_out, grad_lse, out, lse, sinks))
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.numbers, ctx.needs = inputs[_TENSORS + 4 : -3], inputs[-3:]
        tensors = inputs[: _TENSORS + 2]
        ctx.save_for_backward(*tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)

    @staticmethod
    def parts(saved: Sequence[Any], numbers: Sequence[Any], needs: Sequence[bool]) -> Any:
        """The gradients of a block as a function of the cotangents and the inputs, and the roles of both."""
        grad_out, grad_lse, *inputs = saved
        blocks = _Blocks(inputs, numbers)
        wanted = [0, 1, 2, *(3 + n for n, need in enumerate(needs) if need)]

        def grads(block: _Block, grad_out: Tensor, grad_lse: Tensor | None, *inputs: Any) -> Any:
            def outputs(*inputs: Any) -> Any:
                out, lse = blocks.outputs(block, *inputs)
                return out if grad_lse is None else (out, lse)

            # The reference computes in what the query is in here.
            cotangents = grad_out if grad_lse is None else (grad_out, grad_lse.to(inputs[0].dtype))
            found = gradients(outputs, inputs, cotangents)
            return tuple(found[n] for n in wanted)

        tensors = (grad_out, grad_lse, *_differentiable(inputs))
        return blocks, grads, tensors, [_INPUTS[n] for n in wanted], [tensors[2 + n] for n in wanted]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        blocks, grads, tensors, roles, _ = _AttentionBackward.parts(ctx.saved_tensors, ctx.numbers, ctx.needs)

        def of_block(block: _Block, inputs: Any, cotangents: Any) -> Any:
            return gradients(functools.partial(grads, block), inputs, cotangents)

        arguments = [(_COTANGENTS + _INPUTS, tensors), (roles, cotangents)]
        found = blocks.map(of_block, arguments, _COTANGENTS + _INPUTS, tensors)
        grad_out, grad_lse, query, key, value, mask, slopes, sinks = found
        first = (grad_out, grad_lse, query, key, value, mask, None, None, None, slopes, sinks)
        return *first, *[None] * (1 + 2 + _NUMBERS + 3)

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        blocks, grads, tensors, roles, like = _AttentionBackward.parts(ctx.saved_tensors, ctx.numbers, ctx.needs)

        def of_block(block: _Block, inputs: Any, directions: Any) -> Any:
            return tangents(functools.partial(grads, block), inputs, directions)

        directions = (*input_tangents[:2], *_differentiable(input_tangents[2 : 2 + _TENSORS]))
        known = tuple(None if t is None else d for t, d in zip(tensors, directions, strict=True))
        arguments = [(_COTANGENTS + _INPUTS, tensors), (_COTANGENTS + _INPUTS, known)]
        return blocks.map(of_block, arguments, roles, like)

    @staticmethod
    def plain(*args: Any) -> Any:
        saved, numbers, needs = args[: _TENSORS + 2], args[_TENSORS + 4 : -3], args[-3:]
        blocks, grads, tensors, roles, like = _AttentionBackward.parts(saved, numbers, needs)

        def of_block(block: _Block, inputs: Any) -> Any:
            return grads(block, *inputs)

        return blocks.map(of_block, [(_COTANGENTS + _INPUTS, tensors)], roles, like)


_AttentionEager, _AttentionBackwardEager = eager(_Attention), eager(_AttentionBackward)


def _sum_of_rows(t: Tensor) -> Tensor:
    """The sum over the last dimension, in pieces: bitwise the same on any number of threads."""
    length = 1024
    pieces = (t.shape[-1] + length - 1) // length
    padded = F.pad(t, (0, pieces * length - t.shape[-1]))
    return padded.reshape(*t.shape[:-1], pieces, length).sum(-1, dtype=torch.float64).sum(-1)


def _sum_of_sequences(distance: Tensor, query_starts: Tensor | None) -> Tensor:
    """(B, H, Nq) to (B, H); packed, (1, H, T) to (S, H)."""
    if query_starts is None:
        total = _sum_of_rows(distance)
    else:
        rows = distance[0].t().double()
        total = torch.segment_reduce(rows, "sum", offsets=query_starts.long(), axis=0)
    return total.to(distance.dtype)


def _grad_sinks(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    delta = (grad_out.to(sinks.dtype) * out.to(sinks.dtype)).sum(-1, dtype=torch.float64)
    if grad_lse is not None:
        delta = delta - grad_lse
    weight = torch.exp(sinks[:, None].double() - lse)  # of the sink in each row's softmax
    share = torch.where(lse.isneginf(), 0, -weight * delta)
    return _sum_of_rows(share).sum(0).to(sinks.dtype)


# ---- higher derivatives, a block of queries at a time --------------------------------------------------------------

# Rows of the output depend on their own queries and on all keys, so a block of queries has derivatives of its own;
# those of keys, values, slopes and sinks are sums over the blocks. No more than a block's scores are held at once.

_ALL = slice(None)
_SCORES, _QUERIES = 1 << 18, 32  # a block has so many elements in its score matrix, but so many queries at least

_COTANGENTS = ("row", "row")
_INPUTS = ("row", "key", "key", "mask", "slopes", "sinks")


def _like_outputs(inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Sizes and dtypes of output and log-sum-exp."""
    query, rows = inputs[0], inputs[0].shape[:3]
    lse = query.new_empty((), dtype=lse_dtype(query))
    return query.new_empty(()).expand(*rows, inputs[2].shape[3]), lse.expand(rows)


def _differentiable(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """query, key, value, additive mask, slopes and sinks, of the tensor arguments or of their tangents."""
    mask = tensors[3]
    return (*tensors[:3], None if mask is None or mask.dtype == torch.bool else mask, tensors[7], tensors[8])


@dataclass(frozen=True)
class _Block:
    """Consecutive queries of one sequence, or of all sequences of a dense batch."""

    sequence: slice  # of key_lengths, alibi_slopes and attn_mask
    rows: slice  # of the query tensor
    keys: slice  # of the key tensor
    own: slice  # of the sequence's queries
    diagonal: int | Tensor

    def take(self, role: str, t: Tensor | None) -> Any:
        """The part of an argument that the block needs; numbers in float32 or wider, so that sums are exact enough."""
        if t is None:
            return None
        at: tuple[slice, ...] = ()
        if role in ("row", "key"):
            at = (_ALL, _ALL, self.rows if role == "row" else self.keys)
        elif role == "slopes":
            at = (self.sequence,)
        elif role == "mask":
            at = (self.sequence, _ALL, self.own, slice(0, self.keys.stop - self.keys.start))
            at = tuple(s if size > 1 else _ALL for s, size in zip(at, t.shape, strict=True))
        for d, s in enumerate(at):  # nothing where it is all: the older vmap has no rule for a view of everything
            if s != _ALL and (s.start, s.stop) != (0, t.shape[d]):
                t = t.narrow(d, s.start or 0, len(range(*s.indices(t.shape[d]))))
        return t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t


class _Blocks:
    """All blocks of a call: maps functions of a block over them."""

    def __init__(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
        self.query, self.key, _, mask, query_starts, key_starts, self.lengths, _, _, self.seed = tensors[:_TENSORS]
        _, _, diagonal, lower_right, left, right, scale, softcap, dropout_p = numbers
        self.numbers = (left, right, scale, softcap, dropout_p)
        self.hidden = mask if mask is not None and mask.dtype == torch.bool else None
        self.packed = query_starts is not None
        batch, heads, queries = self.query.shape[:3]
        starts = [0, queries], [0, self.key.shape[2]]
        if self.packed:
            starts = query_starts.tolist(), key_starts.tolist()
        self.starts = dict(zip(("row", "key"), starts, strict=True))
        self.sequences = []
        for s in range(len(starts[0]) - 1):
            (first, last), (first_key, last_key) = (at[s : s + 2] for at in starts)
            own = slice(s, s + 1) if self.packed else slice(None)
            offset = diagonal
            if lower_right:
                lengths = None if self.lengths is None else self.lengths[own]
                offset = diagonal + _lengths(lengths, last_key - first_key) - (last - first)
            step = max(_SCORES // max(batch * heads * (last_key - first_key), 1), _QUERIES)
            self.sequences.append(
                [
                    _Block(
                        sequence=own,
                        rows=slice(i, min(i + step, last)),
                        keys=slice(first_key, last_key),
                        own=slice(i - first, min(i + step, last) - first),
                        diagonal=offset + i - first,
                    )
                    for i in range(first, max(last, first + 1), step)
                ]
            )

    def outputs(
        self, block: _Block, query: Tensor, key: Tensor, value: Tensor, mask: Any, *slopes_and_sinks: Any
    ) -> Any:
        """Output and log-sum-exp of a block, from its own parts of the inputs."""
        rows = None
        if self.seed is not None:
            count = torch.arange(self.query.shape[:3].numel(), device=query.device)
            rows = count.view(self.query.shape[:3])[:, :, block.rows]
        if self.hidden is not None:
            mask = block.take("mask", self.hidden)
        lengths = None if self.lengths is None else self.lengths[block.sequence]
        slopes, sinks = slopes_and_sinks
        tensors = (query, key, value, mask, lengths, slopes, sinks, self.seed)
        return reference.attention(*tensors, block.diagonal, *self.numbers, rows)

    def map(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Sequence[str], Sequence[Any]]],
        roles: Sequence[str],
        like: Sequence[Any],
    ) -> tuple[Tensor | None, ...]:
        """function(block, *its parts of the arguments), put together: results with the dtypes (and sizes) of `like`."""
        parts: list[list[list[Tensor]]] = [[] for _ in roles]
        for blocks in self.sequences:
            for per_sequence in parts:
                per_sequence.append([])
            for block in blocks:
                inputs = [
                    tuple(block.take(role, t) for role, t in zip(*argument, strict=True)) for argument in arguments
                ]
                for role, whole, per_sequence, t in zip(roles, like, parts, function(block, *inputs), strict=True):
                    found = per_sequence[-1]
                    joined = role == "row" or (role == "mask" and whole is not None and whole.shape[2] > 1)
                    if t is not None and (joined or not found):
                        found.append(t)
                    elif t is not None:
                        found[0] = found[0] + t
        return tuple(map(self._put, roles, parts, like))

    def _put(self, role: str, parts: list[list[Tensor]], like: Tensor | None) -> Tensor | None:
        """A result from its blocks' parts: joined along the rows, or summed already."""
        if like is None:
            return None
        if not any(parts):
            return torch.zeros_like(like)
        whole = [torch.cat(found, 2) if len(found) > 1 else found[0] for found in parts]
        if role in ("row", "key"):
            starts, t = self.starts[role], whole[0]
            rows = (self.query if role == "row" else self.key).shape[2]
            shape = list(t.shape)
            before, after = (t.new_zeros([*shape[:2], n, *shape[3:]]) for n in (starts[0], rows - starts[-1]))
            result = torch.cat([before, *whole, after], 2)
        elif role == "sinks":
            result = functools.reduce(torch.add, whole)
        else:
            if role == "mask":
                whole = [F.pad(t, (0, like.shape[3] - t.shape[3], 0, like.shape[2] - t.shape[2])) for t in whole]
            joined = not self.packed or role == "slopes" or like.shape[0] > 1
            result = torch.cat(whole) if joined else functools.reduce(torch.add, whole)
        return result.to(like.dtype)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


def _empty(like: Tensor, packed: bool, last: int) -> Tensor:
    """(B, H, N, last) of like's B, H and N; of packed sequences, a view of (N, H, last)."""
    batch, heads, rows = like.shape[:3]
    if packed:
        return like.new_empty((batch, rows, heads, last)).transpose(1, 2)
    return like.new_empty((batch, heads, rows, last))


@torch.library.register_fake("seqkern::attention_fwd")
def _(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, query_starts: Tensor | None, *_: Any) -> Any:
    lse = query.new_empty(query.shape[:3], dtype=lse_dtype(query))
    return _empty(query, query_starts is not None, value.shape[3]), lse


@torch.library.register_fake("seqkern::attention_bwd")
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    query_starts: Tensor | None,
    *rest: Any,
) -> Any:
    need_mask, need_slopes = rest[-2:]
    packed = query_starts is not None
    grad_mask = query.new_empty(0)
    if need_mask and attn_mask is not None:
        grad_mask = attn_mask.new_empty(attn_mask.shape)
    acc = torch.promote_types(query.dtype, torch.float32)
    distance = query.new_empty(query.shape[:3] if need_slopes else 0, dtype=acc)
    return *(_empty(t, packed, t.shape[3]) for t in (query, key, value)), grad_mask, distance


@torch.library.register_vmap("seqkern::attention_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return _fold(torch.ops.seqkern.attention_fwd, info.batch_size, in_dims, args, first=0, fixed=(8,), need_mask=False)


@torch.library.register_vmap("seqkern::attention_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return _fold(torch.ops.seqkern.attention_bwd, info.batch_size, in_dims, args, first=2, fixed=(), need_mask=args[-2])


def _fold(op: Any, samples: int, in_dims: Any, args: Any, first: int, fixed: Sequence[int], need_mask: bool) -> Any:
    """The samples become part of the batch, which every tensor but a mask has as its first dimension.

    Not of packed sequences, which have no batch; nor with dropout, which counts the rows of the batch. `first` is the
    position of the query, `fixed` are those of tensors without a batch.
    """
    mask, starts, seed = (3, 4, 9) if first == 0 else (7, 8, 12)

    def per_batch(n: int) -> int:
        """The size of the first dimension of a sample."""
        return args[n].shape[1 if in_dims[n] == 0 else 0]

    shared = args[mask] is not None and per_batch(mask) != per_batch(first)  # one mask for every sequence of a sample
    alone = args[starts] is not None or args[seed] is not None or any(in_dims[n] is not None for n in fixed)
    if samples == 0 or alone or (shared and need_mask):
        return per_sample(op, samples, in_dims, args)

    def fold(n: int, t: Any) -> Any:
        if not isinstance(t, Tensor) or n in fixed or (n == mask and shared and in_dims[n] is None):
            return t
        t = t.expand(samples, *t.shape) if in_dims[n] is None else t.movedim(in_dims[n], 0)
        if n == mask and shared:
            t = t.expand(samples, per_batch(first), *t.shape[2:])
        return t.flatten(0, 1)

    outputs = op(*(fold(n, argument) for n, argument in enumerate(args)))
    return tuple(t.unflatten(0, (samples, t.shape[0] // samples)) for t in outputs), (0,) * len(outputs)
