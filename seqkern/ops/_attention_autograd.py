"""Attention's derivatives, fake kernels and batching rules: what stands between its API and its kernels.

Its arguments are those of `seqkern._arguments.Attention`, in the shapes that csrc/attention/attention.h asks for.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._arguments import (
    Attention,
    AttentionBackward,
    AttentionInputs,
    AttentionNeeds,
    AttentionNumbers,
    AttentionTensors,
    by_name,
)
from seqkern._direct import Context, long_way
from seqkern._library import kernel
from seqkern.ops._autograd import (
    apply,
    eager,
    gradients,
    per_sample,
    tangents,
    transforms_active,
    wants_gradient,
)


def run(backend: str, tensors: AttentionTensors, numbers: AttentionNumbers) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the backend's kernel, or by the reference with the reference's own derivatives.

    The log-sum-exp as the kernel keeps it for the backward pass: see `lse_dtype`.
    """
    if backend == "reference":
        return formula(tensors, numbers)
    query, key, value, attn_mask, _, _, _, alibi_slopes, sinks, _ = tensors
    wanted = wants_gradient(query, key, value, attn_mask, alibi_slopes, sinks)
    return apply(_Attention, _AttentionEager, wanted, *tensors, *numbers)


def formula(tensors: AttentionTensors, numbers: AttentionNumbers) -> tuple[Tensor, Tensor]:
    """The reference, from the arguments of the kernels."""
    query, key, value, attn_mask, query_starts, key_starts, key_lengths, alibi_slopes, sinks, seed = tensors
    _, _, diagonal, lower_right, left, right, scale, softcap, dropout_p = numbers
    options = {
        "attn_mask": attn_mask,
        "key_lengths": key_lengths,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "seed": seed,
        "left": left,
        "right": right,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
    }
    if query_starts is not None:
        return reference.attention_varlen(
            query, key, value, query_starts, key_starts, diagonal=diagonal, lower_right=lower_right, **options
        )
    if lower_right:
        diagonal = diagonal + _lengths(key_lengths, key.shape[2]) - query.shape[2]
    return reference.attention(query, key, value, diagonal=diagonal, **options)


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
    def forward(*args: Any) -> Any:
        tensors, _ = Attention.of(args)
        out, lse = kernel("attention_fwd", tensors.query)(*args)
        return _owned(out, tensors.query_starts is not None), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, ctx.numbers = Attention.of(inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a tensor
        out, lse, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        wanted, _ = Attention.of(ctx.needs_input_grad)
        needs = AttentionNeeds(wanted.attn_mask, wanted.alibi_slopes, wanted.sinks)
        grad_query, grad_key, grad_value, *others = apply(
            _AttentionBackward, _AttentionBackwardEager, torch.is_grad_enabled(),
            grad_out, grad_lse, out, lse, *needs, *tensors, *ctx.numbers,
        )  # fmt: skip
        others = list(others)  # to Dynamo before 2.12, the rest of a tuple is a tuple
        grad_mask = others.pop(0) if needs.mask else None
        grad_slopes = others.pop(0) if needs.slopes else None
        grad_sinks = others.pop(0) if needs.sinks else None
        grads = AttentionTensors(
            grad_query, grad_key, grad_value, attn_mask=grad_mask, alibi_slopes=grad_slopes, sinks=grad_sinks
        )
        return *grads, *[None] * len(ctx.numbers)

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        _, _, *saved = ctx.saved_tensors
        tensors, (directions, _) = AttentionTensors(*saved), Attention.of(input_tangents)
        blocks = _Blocks(tensors, ctx.numbers)

        def of_block(block: _Block, inputs: Any, directions: Any) -> Any:
            return tangents(functools.partial(blocks.outputs, block), inputs, directions)

        arguments = [(_INPUTS, tensors.differentiable()), (_INPUTS, directions.differentiable())]
        return blocks.map(of_block, arguments, ("row", "row"), _like_outputs(tensors))

    @staticmethod
    def plain(*args: Any) -> Any:
        tensors, numbers = Attention.of(args)
        blocks = _Blocks(tensors, numbers)

        def of_block(block: _Block, inputs: Any) -> Any:
            return blocks.outputs(block, *inputs)

        arguments = [(_INPUTS, tensors.differentiable())]
        out, lse = blocks.map(of_block, arguments, ("row", "row"), _like_outputs(tensors))
        assert lse is not None
        row, starts = torch.arange(lse.shape[2], device=lse.device), blocks.starts["row"]
        return out, lse.masked_fill((row < starts[0]) | (row >= starts[-1]), -math.inf)


class _AttentionBackward(torch.autograd.Function):
    """The arguments of the backward pass -> the gradients.

    They are those of query, key and value, and, as far as needed, of mask, slopes and sinks.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        grad_out, grad_lse, out, lse, needs, tensors, numbers = AttentionBackward.of(args)
        query, key, value, attn_mask, query_starts, key_starts, key_lengths, alibi_slopes, sinks, seed = tensors
        grad_query, grad_key, grad_value, grad_mask, grad_distance = kernel("attention_bwd", query)(
            grad_out, grad_lse, query, key, value, out, lse, attn_mask, query_starts, key_starts, key_lengths,
            alibi_slopes, seed, *numbers, needs.mask, needs.slopes,
        )  # fmt: skip
        results = [_owned(t, query_starts is not None) for t in (grad_query, grad_key, grad_value)]
        if needs.mask:
            results.append(grad_mask)
        if needs.slopes:
            results.append(-_sum_of_sequences(grad_distance, query_starts))
        if needs.sinks:
            results.append(_grad_sinks(grad_out, grad_lse, out, lse, sinks))
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad_out, grad_lse, _, _, ctx.needs, tensors, ctx.numbers = AttentionBackward.of(inputs)
        ctx.save_for_backward(grad_out, grad_lse, *tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(grad_out, grad_lse, *tensors)

    @staticmethod
    def saved(ctx: Any) -> AttentionBackward:
        """What `setup_context` saved; out and lse are found again where they are needed."""
        grad_out, grad_lse, *tensors = ctx.saved_tensors
        return AttentionBackward(grad_out, grad_lse, None, None, ctx.needs, AttentionTensors(*tensors), ctx.numbers)

    @staticmethod
    def parts(arguments: AttentionBackward) -> Any:
        """The gradients of a block as a function of the cotangents and the inputs, and the roles of both."""
        blocks = _Blocks(arguments.tensors, arguments.numbers)
        wanted = AttentionInputs(True, True, True, *arguments.needs)

        def grads(block: _Block, grad_out: Tensor, grad_lse: Tensor | None, *inputs: Any) -> Any:
            def outputs(*inputs: Any) -> Any:
                out, lse = blocks.outputs(block, *inputs)
                return out if grad_lse is None else (out, lse)

            # The reference computes in what the query is in here.
            cotangents = grad_out if grad_lse is None else (grad_out, grad_lse.to(AttentionInputs(*inputs).query.dtype))
            return tuple(itertools.compress(gradients(outputs, inputs, cotangents), wanted))

        roles = list(itertools.compress(_INPUTS, wanted))
        like = list(itertools.compress(arguments.tensors.differentiable(), wanted))
        return blocks, grads, arguments.differentiable(), roles, like

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        blocks, grads, tensors, roles, _ = _AttentionBackward.parts(_AttentionBackward.saved(ctx))

        def of_block(block: _Block, inputs: Any, cotangents: Any) -> Any:
            return gradients(functools.partial(grads, block), inputs, cotangents)

        arguments = [(_COTANGENTS + _INPUTS, tensors), (roles, cotangents)]
        found = blocks.map(of_block, arguments, _COTANGENTS + _INPUTS, tensors)
        grad_out, grad_lse, query, key, value, mask, slopes, sinks = found
        of_tensors = AttentionTensors(query, key, value, attn_mask=mask, alibi_slopes=slopes, sinks=sinks)
        of_results, of_needs, of_numbers = (None, None), [None] * len(ctx.needs), [None] * len(ctx.numbers)
        return grad_out, grad_lse, *of_results, *of_needs, *of_tensors, *of_numbers

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        blocks, grads, tensors, roles, like = _AttentionBackward.parts(_AttentionBackward.saved(ctx))

        def of_block(block: _Block, inputs: Any, directions: Any) -> Any:
            return tangents(functools.partial(grads, block), inputs, directions)

        directions = AttentionBackward.of(input_tangents).differentiable()
        known = tuple(None if t is None else d for t, d in zip(tensors, directions, strict=True))
        arguments = [(_COTANGENTS + _INPUTS, tensors), (_COTANGENTS + _INPUTS, known)]
        return blocks.map(of_block, arguments, roles, like)

    @staticmethod
    def plain(*args: Any) -> Any:
        blocks, grads, tensors, roles, like = _AttentionBackward.parts(AttentionBackward.of(args))

        def of_block(block: _Block, inputs: Any) -> Any:
            return grads(block, *inputs)

        return blocks.map(of_block, [(_COTANGENTS + _INPUTS, tensors)], roles, like)


_AttentionEager, _AttentionBackwardEager = eager(_Attention), eager(_AttentionBackward)


@long_way("AttentionNode")
def _backward_of_node(
    grads: Sequence[Tensor | None],
    saved: Sequence[Any],
    kept: Sequence[Tensor],
    numbers: Sequence[float],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients of query, key and value of a plain call; they are differentiable again."""
    query, key, value, lse, *lengths, out = saved
    diagonal, left, right, scale, softcap = numbers
    tensors = AttentionTensors(query, key, value, key_lengths=lengths[0] if lengths else None)
    wanted = AttentionTensors(*needs, *[False] * 7)
    context: Any = Context((out, lse, *tensors), wanted)
    context.numbers = AttentionNumbers(
        query.shape[2], key.shape[2], int(diagonal), False, int(left), int(right), scale, softcap, 0.0
    )
    context.needs_input_grad = (*wanted, *[False] * len(context.numbers))
    found = Attention.of(_Attention.backward(context, grads[0], None))
    return found.tensors.query, found.tensors.key, found.tensors.value


@long_way("SelfAttentionNode")
def _backward_of_self_attention(
    grads: Sequence[Tensor | None],
    saved: Sequence[Any],
    kept: Sequence[Tensor],
    numbers: Sequence[float],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradient of queries, keys and values as one product wrote them; it is differentiable again."""
    both, lse, *lengths, out = saved
    heads, kv_heads, batch_first, left, right = map(int, numbers[:5])
    order = (0, 2, 1, 3) if batch_first else (1, 2, 0, 3)  # (batch, heads, tokens, head_dim)
    assert grads[0] is not None

    def split(t: Tensor, count: int) -> Tensor:
        return t.reshape(*t.shape[:2], count, t.shape[2] // count).permute(order)

    parts = split(both, heads + 2 * kv_heads).split((heads, kv_heads, kv_heads), 1)
    numbers = (0, left, right, numbers[5], 0.0)
    found = _backward_of_node(
        [split(grads[0], heads)], [*parts, lse, *lengths, split(out, heads)], kept, numbers, [True] * 3
    )
    joined = torch.cat([t for t in found if t is not None], 1)
    back = (0, 2, 1, 3) if batch_first else (2, 0, 1, 3)
    return [joined.permute(back).reshape(both.shape)]


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
_INPUTS = AttentionInputs(query="row", key="key", value="key", mask="mask", slopes="slopes", sinks="sinks")


def _like_outputs(tensors: AttentionTensors) -> tuple[Tensor, Tensor]:
    """Sizes and dtypes of output and log-sum-exp."""
    query, rows = tensors.query, tensors.query.shape[:3]
    lse = query.new_empty((), dtype=lse_dtype(query))
    return query.new_empty(()).expand(*rows, tensors.value.shape[3]), lse.expand(rows)


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

    def __init__(self, tensors: AttentionTensors, numbers: AttentionNumbers) -> None:
        self.query, self.key, self.lengths, self.seed = tensors.query, tensors.key, tensors.key_lengths, tensors.seed
        self.numbers = numbers
        mask, query_starts, key_starts = tensors.attn_mask, tensors.query_starts, tensors.key_starts
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
            offset = numbers.diagonal
            if numbers.lower_right:
                lengths = None if self.lengths is None else self.lengths[own]
                offset = numbers.diagonal + _lengths(lengths, last_key - first_key) - (last - first)
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

    def outputs(self, block: _Block, *inputs: Any) -> Any:
        """Output and log-sum-exp of a block, from its own parts of the inputs."""
        query, key, value, mask, slopes, sinks = AttentionInputs(*inputs)
        rows = None
        if self.seed is not None:
            count = torch.arange(self.query.shape[:3].numel(), device=query.device)
            rows = count.view(self.query.shape[:3])[:, :, block.rows]
        return reference.attention(
            query,
            key,
            value,
            attn_mask=mask if self.hidden is None else block.take("mask", self.hidden),
            key_lengths=None if self.lengths is None else self.lengths[block.sequence],
            alibi_slopes=slopes,
            sinks=sinks,
            seed=self.seed,
            diagonal=block.diagonal,
            left=self.numbers.left,
            right=self.numbers.right,
            scale=self.numbers.scale,
            softcap=self.numbers.softcap,
            dropout_p=self.numbers.dropout_p,
            rows=rows,
        )

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
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    attn_mask: Tensor | None, query_starts: Tensor | None, key_starts: Tensor | None, key_lengths: Tensor | None,
    alibi_slopes: Tensor | None, seed: Tensor | None, max_queries: int, max_keys: int, diagonal: int, lower_right: bool,
    left: int, right: int, scale: float, softcap: float, dropout_p: float, need_mask: bool, need_slopes: bool,
) -> Any:  # fmt: skip
    packed = query_starts is not None
    grad_mask = query.new_empty(0)
    if need_mask and attn_mask is not None:
        grad_mask = attn_mask.new_empty(attn_mask.shape)
    acc = torch.promote_types(query.dtype, torch.float32)
    distance = query.new_empty(query.shape[:3] if need_slopes else 0, dtype=acc)
    return *(_empty(t, packed, t.shape[3]) for t in (query, key, value)), grad_mask, distance


@torch.library.register_vmap("seqkern::attention_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return _fold(torch.ops.seqkern.attention_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::attention_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return _fold(torch.ops.seqkern.attention_bwd, info.batch_size, in_dims, args)


def _fold(op: Any, samples: int, in_dims: Any, args: Any) -> Any:
    """The samples become part of the batch, which every tensor but mask and sinks has as its first dimension.

    Not of packed sequences, which have no batch; nor with dropout, which counts the rows of the batch.
    """
    named, dims = by_name(op, args), by_name(op, in_dims)

    def per_batch(name: str) -> int:
        """The size of the first dimension of a sample."""
        return named[name].shape[1 if dims[name] == 0 else 0]

    # one mask for every sequence of a sample
    shared = named["attn_mask"] is not None and per_batch("attn_mask") != per_batch("query")
    alone = named["query_starts"] is not None or named["seed"] is not None or dims.get("sinks") is not None
    if samples == 0 or alone or (shared and named.get("need_mask", False)):
        return per_sample(op, samples, in_dims, args)

    def fold(name: str, t: Any) -> Any:
        if not isinstance(t, Tensor) or name == "sinks" or (name == "attn_mask" and shared and dims[name] is None):
            return t
        t = t.expand(samples, *t.shape) if dims[name] is None else t.movedim(dims[name], 0)
        if name == "attn_mask" and shared:
            t = t.expand(samples, per_batch("query"), *t.shape[2:])
        return t.flatten(0, 1)

    outputs = op(*(fold(name, argument) for name, argument in named.items()))
    return tuple(t.unflatten(0, (samples, t.shape[0] // samples)) for t in outputs), (0,) * len(outputs)
