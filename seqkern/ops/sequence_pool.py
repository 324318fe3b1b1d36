"""Pooling over sequences, padded or packed: the functional API, gradients, fake kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern.ops._autograd import (
    FLOATING,
    Cost,
    apply,
    eager,
    gradients,
    per_sample,
    tangents,
    transforms_active,
    wants_gradient,
)
from seqkern.ops._sequences import sequence_lengths, sequence_starts
from seqkern.reference.sequence_pool import KINDS

Kind = Literal["sum", "mean", "max", "min", "first", "last", "logsumexp"]
_LSE = KINDS.index("logsumexp")


@explicit
def sequence_pool(
    x: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    kind: Kind = "mean",
    *,
    cu_seqlens: Tensor | None = None,
    bidirectional: bool = False,
    **unexpected: NoReturn,
) -> Tensor:
    """A vector of each sequence from its rows: their mean, sum, maximum, minimum, log-sum-exp, the first or the last.

    A sequence's own rows alone are read, so the result does not depend on the padding, whatever it holds.

    Args:
        x: padded sequences, shape (B, L, D), or with cu_seqlens packed ones, (T, D); float64, float32, bfloat16 or
            float16. Any strides with contiguous features: a time-major (L, B, D) is x.transpose(0, 1).
        lengths: rows of each padded sequence, int32 or int64 of shape (B,), or numbers. Default: L. They are cut to L.
        kind: "mean", "sum", "max", "min", "logsumexp"; "first" or "last", the row at that end.
        cu_seqlens: int32 or int64, shape (B + 1,): packed sequence b has the rows cu_seqlens[b], ..., cu_seqlens[b+1] -
            1. It begins with 0, does not decrease, and ends at or before T.
        bidirectional: of "first" and "last": the second half of the features ran backwards, as those of a bidirectional
            recurrent layer, so their last row is the first, and the other way around.

    Returns:
        Shape (B, D), x's dtype, accumulated in float32 or wider. A sequence of no rows has 0, its log-sum-exp is -inf,
        and no gradient. Of equal numbers the first is the maximum, and has the gradient; NaN is larger and smaller
        than any number, as in torch. Derivatives of every order.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes, devices, a kind or boundaries that do not fit. On a GPU the values of boundaries are not
            checked.
        NotImplementedError: the backend in force does not run on the device.

    Source: reference/sequence_pool.py.

    Example:
        >>> import torch, seqkern
        >>> x = torch.tensor([[[1.0], [5.0], [9.0]], [[2.0], [4.0], [9.0]]])
        >>> seqkern.sequence_pool(x, [2, 3], "max"), seqkern.sequence_pool(x, [2, 3], "last")
        (tensor([[5.],
                [9.]]), tensor([[5.],
                [9.]]))
    """
    if any(map(is_proxy, (x, lengths, cu_seqlens))):
        return record(sequence_pool, locals())
    if unexpected:
        refuse(sequence_pool, unexpected)
    op = "sequence_pool"
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: x must be a tensor, got {type(x).__name__}")
    check_not_nested(op, "x", x, "give it x.values(), with cu_seqlens=x.offsets()")
    if x.dtype not in FLOATING:
        raise TypeError(f"{op}: x must be float64, float32, bfloat16 or float16, got {x.dtype}")
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if lengths is not None and cu_seqlens is not None:
        raise ValueError(f"{op}: lengths are of padded sequences and cu_seqlens of packed ones, got both")
    wanted = "(B, L, D)" if cu_seqlens is None else "(T, D), with cu_seqlens,"
    if x.dim() != (3 if cu_seqlens is None else 2):
        raise ValueError(f"{op}: x must have shape {wanted} got {tuple(x.shape)}")
    if bidirectional and kind not in ("first", "last"):
        raise ValueError(f'{op}: bidirectional is of "first" and "last", got kind {kind!r}')
    if bidirectional and x.shape[-1] % 2:
        raise ValueError(f"{op}: bidirectional needs an even number of features, got x {tuple(x.shape)}")
    every = None if lengths is None else sequence_lengths(op, lengths, x)
    starts = None if cu_seqlens is None else sequence_starts(op, cu_seqlens, x)
    number, reversed = KINDS.index(kind), x.shape[-1] // 2 if bidirectional else 0
    transforms_active()  # raises before Dynamo looks at a tensor
    if backend_for(op, x) == "reference":
        return reference.sequence_pool(x, every, starts, number, reversed)
    output: Tensor = apply(_SequencePool, _SequencePoolEager, wants_gradient(x), x, every, starts, number, reversed)[0]
    return output


def cost(rows: int, sequences: int, columns: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a call on `rows` rows of all sequences together, which are read, or written backward."""
    return Cost(rows * columns, (rows + sequences) * columns * dtype.itemsize)


# ---- autograd -----------------------------------------------------------------------------------------------------


def _formula(lengths: Tensor | None, starts: Tensor | None, kind: int, reversed: int) -> Callable[[Tensor], Tensor]:
    def formula(x: Tensor) -> Tensor:
        return reference.sequence_pool(x, lengths, starts, kind, reversed)

    return formula


class _SequencePool(torch.autograd.Function):
    """-> output, and the rows of maxima and minima."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, lengths: Tensor | None, starts: Tensor | None, kind: int, reversed: int) -> Any:
        output, index = kernel("sequence_pool_fwd", x)(x, lengths, starts, kind, reversed)
        return output, index

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, lengths, starts, ctx.kind, ctx.reversed = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        transformed = transforms_active()
        of_lse = output[0] if ctx.kind == _LSE else None
        ctx.kept = transformed or ctx.kind == _LSE
        # Without a transform only a log-sum-exp keeps x, whose derivatives are not those of a linear map.
        kept = (x if ctx.kept else None, of_lse, output[1], lengths, starts)
        ctx.rows, ctx.packed = x.shape[-2], starts is not None
        ctx.save_for_backward(*kept)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        if grad is None:
            return (None,) * 5
        x, output, index, lengths, starts = ctx.saved_tensors
        found = apply(
            _SequencePoolBackward, _SequencePoolBackwardEager, torch.is_grad_enabled(), grad, x, output, index,
            lengths, starts, ctx.rows, ctx.kind, ctx.reversed,
        )  # fmt: skip
        return found, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, along: Tensor, *_: Any) -> Any:
        x, _, _, lengths, starts = ctx.saved_tensors
        return tangents(_formula(lengths, starts, ctx.kind, ctx.reversed), (x,), (along,)), None

    @staticmethod
    def plain(x: Tensor, lengths: Tensor | None, starts: Tensor | None, kind: int, reversed: int) -> Any:
        return reference.sequence_pool(x, lengths, starts, kind, reversed), None


def _spread(
    grad: Tensor, x: Tensor | None, index: Tensor | None, lengths: Tensor | None, starts: Tensor | None, rows: int,
    kind: int, reversed: int,
) -> Tensor:  # fmt: skip
    """The gradient of x, by the equations. Maxima and minima are where they were."""
    if x is None or KINDS[kind] in ("max", "min"):
        shape = (rows, grad.shape[1]) if starts is not None else (grad.shape[0], rows, grad.shape[1])
        x = grad.new_zeros(shape)
    if KINDS[kind] not in ("max", "min"):
        (found,) = gradients(_formula(lengths, starts, kind, reversed), (x,), grad)
        assert found is not None
        return found
    assert index is not None
    first = starts[:-1, None] if starts is not None else 0
    there = index >= 0
    at = torch.where(there, index.long() + first, 0)
    upstream = torch.where(there, grad, 0)
    if starts is None:
        return x.scatter_add(1, at[:, None], upstream[:, None])
    return x.scatter_add(0, at, upstream)


class _SequencePoolBackward(torch.autograd.Function):
    """(grad, x, output, index, lengths, starts, ...) -> the gradient of x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor | None, output: Tensor | None, index: Tensor | None, lengths: Tensor | None,
        starts: Tensor | None, rows: int, kind: int, reversed: int,
    ) -> Any:  # fmt: skip
        of_lse = (x, output) if kind == _LSE else (None, None)
        return kernel("sequence_pool_bwd", grad)(grad, *of_lse, index, lengths, starts, rows, kind, reversed)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, x, _, index, lengths, starts, *ctx.numbers = inputs
        kept = (grad, x, index, lengths, starts)
        ctx.save_for_backward(*kept)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        grad, x, index, lengths, starts = ctx.saved_tensors

        def formula(grad: Tensor, x: Tensor | None) -> Tensor:
            return _spread(grad, x, index, lengths, starts, *ctx.numbers)

        of_grad, of_x = gradients(formula, (grad, x), cotangent)
        return of_grad, of_x, *(None,) * 7

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        grad, x, index, lengths, starts = ctx.saved_tensors

        def formula(grad: Tensor, x: Tensor | None) -> Tensor:
            return _spread(grad, x, index, lengths, starts, *ctx.numbers)

        return tangents(formula, (grad, x), directions[:2])

    @staticmethod
    def plain(
        grad: Tensor, x: Tensor | None, output: Tensor | None, index: Tensor | None, lengths: Tensor | None,
        starts: Tensor | None, rows: int, kind: int, reversed: int,
    ) -> Any:  # fmt: skip
        return _spread(grad, x, index, lengths, starts, rows, kind, reversed)


_SequencePoolEager, _SequencePoolBackwardEager = eager(_SequencePool), eager(_SequencePoolBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::sequence_pool_fwd")
def _(x: Tensor, lengths: Any, starts: Tensor | None, kind: int, reversed: Any) -> tuple[Tensor, Tensor]:
    batch = x.shape[0] if starts is None else starts.shape[0] - 1
    shape = (batch, x.shape[-1])
    return x.new_empty(shape), x.new_empty(shape if KINDS[kind] in ("max", "min") else 0, dtype=torch.int32)


@torch.library.register_fake("seqkern::sequence_pool_bwd")
def _(
    grad_output: Tensor, x: Any, output: Any, index: Any, lengths: Any, starts: Any, rows: Any, kind: int, reversed: Any
) -> Tensor:
    batch, columns = grad_output.shape
    return grad_output.new_empty((batch, rows, columns) if starts is None else (rows, columns))


@torch.library.register_vmap("seqkern::sequence_pool_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.sequence_pool_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::sequence_pool_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    def op(*given: Any) -> tuple[Tensor, ...]:
        return (torch.ops.seqkern.sequence_pool_bwd(*given),)

    (grad,), (dim,) = per_sample(op, info.batch_size, in_dims, args)
    return grad, dim
