"""A convolution and its maximum over time: the functional API, gradients, fake kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import is_proxy, record
from seqkern._tensors import accumulator
from seqkern.ops._autograd import (
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
from seqkern.ops.conv1d import check_filters, check_tensors, in_one_dtype
from seqkern.reference.conv1d import ACTIVATIONS

Activation = Literal["none", "relu", "tanh", "sigmoid"]


@explicit
def conv1d_max(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "relu",
    lengths: Tensor | Sequence[int] | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    **unexpected: NoReturn,
) -> Tensor:
    """activation(max over windows of conv1d(x, weight) + bias), without a matrix of windows or of their products.

    Windows of K rows that lie within a sequence; those that touch padding cannot win, so the result does not depend on
    the batch. The backward pass follows one window of each sequence and filter: a small part of a convolution's.

    Args:
        x: padded sequences, shape (B, L, D), features last, or with cu_seqlens packed ones, (T, D); float64, float32,
            bfloat16 or float16.
        weight: shape (C, K, D), x's dtype: torch.nn.Conv1d's weight (C, D, K) is conv.weight.transpose(1, 2). Filters
            of other widths are other calls.
        bias: shape (C,), x's dtype; or None.
        activation: "relu", "tanh", "sigmoid" or "none". They never decrease, so they are applied to the maximum.
        lengths: rows of each padded sequence, int32 or int64 of shape (B,), or numbers. Default: L. They are cut to L.
        cu_seqlens: as in `sequence_pool`.

    Returns:
        Shape (B, C), x's dtype. A sequence of fewer than K rows has one window, with zeros behind its rows. Of equal
        windows the first has the gradient. Derivatives of every order.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes, devices, an activation or boundaries that do not fit.
        NotImplementedError: the backend in force does not run on the device.

    Source: Collobert et al. 2011, Kim 2014, as reference/conv1d.py.

    Example:
        >>> import torch, seqkern
        >>> x, weights = torch.randn(2, 20, 8), [torch.randn(16, width, 8) for width in (3, 4, 5)]
        >>> torch.cat([seqkern.conv1d_max(x, w, lengths=[20, 7]) for w in weights], 1).shape
        torch.Size([2, 48])
    """
    if any(map(is_proxy, (x, weight, bias, lengths, cu_seqlens))):
        return record(conv1d_max, locals())
    if unexpected:
        refuse(conv1d_max, unexpected)
    op = "conv1d_max"
    _check(op, x, weight, bias, activation, lengths, cu_seqlens)
    x, weight, bias = in_one_dtype(op, x, weight, bias)
    every = None if lengths is None else sequence_lengths(op, lengths, x)
    starts = None if cu_seqlens is None else sequence_starts(op, cu_seqlens, x)
    number = ACTIVATIONS.index(activation)
    transforms_active()  # raises before Dynamo looks at a tensor
    if backend_for(op, x) == "reference":
        return reference.conv1d_max(x, weight, bias, every, starts, number)
    wanted = wants_gradient(x, weight, bias)
    output: Tensor = apply(_Conv1dMax, _Conv1dMaxEager, wanted, x, weight, bias, every, starts, number)[0]
    return output


def cost(
    windows: int, sequences: int, width: int, columns: int, filters: int, dtype: torch.dtype, *, backward: bool = False
) -> Cost:
    """Work of a call on `windows` windows of all sequences together; `backward` of the backward pass."""
    depth = width * columns
    flops = 4 * sequences * filters * depth if backward else 2 * windows * filters * depth
    return Cost(flops, (windows * columns + filters * depth + sequences * filters) * dtype.itemsize)


def _check(op: str, x: Any, weight: Any, bias: Any, activation: Any, lengths: Any, starts: Any) -> None:
    check_tensors(op, x, weight, bias, "give it x.values(), with cu_seqlens=x.offsets()")
    if activation not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise ValueError(f"{op}: activation must be one of {names}, which never decrease, got {activation!r}")
    if lengths is not None and starts is not None:
        raise ValueError(f"{op}: lengths are of padded sequences and cu_seqlens of packed ones, got both")
    if x.dim() != (3 if starts is None else 2):
        wanted = "(B, L, D)" if starts is None else "(T, D), with cu_seqlens,"
        raise ValueError(f"{op}: x must have shape {wanted} got {tuple(x.shape)}")
    check_filters(op, x, weight, bias)


# ---- autograd -----------------------------------------------------------------------------------------------------


def _formula(lengths: Tensor | None, starts: Tensor | None, activation: int) -> Callable[..., Tensor]:
    def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return reference.conv1d_max(x, weight, bias, lengths, starts, activation)

    return formula


class _Conv1dMax(torch.autograd.Function):
    """-> output, the sums before the activation, and the windows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, starts: Tensor | None, activation: int
    ) -> Any:
        wide = None if bias is None else bias.to(accumulator(x.dtype))
        output, z, index = kernel("conv1d_max_fwd", x)(x, weight, wide, lengths, starts, activation)
        return output, z, index

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.activation = inputs
        ctx.set_materialize_grads(False)
        kept = (*tensors, *output[1:])
        ctx.save_for_backward(*kept)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*kept)
            ctx.mark_non_differentiable(output[2])
        else:
            ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        if grad is None:
            return (None,) * 6
        needs = ctx.needs_input_grad[:3]
        found = apply(
            _Conv1dMaxBackward, _Conv1dMaxBackwardEager, torch.is_grad_enabled(), grad, *ctx.saved_tensors,
            ctx.activation, *needs,
        )  # fmt: skip
        return *(g if need else None for g, need in zip(found, needs, strict=True)), None, None, None

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        x, weight, bias, lengths, starts, z, _ = ctx.saved_tensors
        formula = _formula(lengths, starts, ctx.activation)
        return tangents(formula, (x, weight, bias), directions[:3]), torch.zeros_like(z), None

    @staticmethod
    def plain(
        x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, starts: Tensor | None, activation: int
    ) -> Any:
        return reference.conv1d_max(x, weight, bias, lengths, starts, activation), None, None


def _pullback(lengths: Tensor | None, starts: Tensor | None, activation: int) -> Callable[..., Any]:
    """(grad, x, weight, bias) -> the gradients of those of the last three that are given."""

    def pullback(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        found = gradients(_formula(lengths, starts, activation), (x, weight, bias), grad)
        return tuple(g for g in found if g is not None)

    return pullback


class _Conv1dMaxBackward(torch.autograd.Function):
    """(grad, the forward pass's tensors, z, index) -> gradients of x, weight and bias, empty where not needed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, starts: Tensor | None,
        z: Tensor, index: Tensor, activation: int, need_x: bool, need_weight: bool, need_bias: bool,
    ) -> Any:  # fmt: skip
        of_x, of_weight, slopes = kernel("conv1d_max_bwd", x)(
            grad, x, weight, lengths, starts, z, index, activation, need_x, need_weight
        )
        of_bias = slopes.sum(0).to(x.dtype) if need_bias else x.new_empty(0)
        return of_x, of_weight, of_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.activation, *ctx.wanted = inputs[8:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:6])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:6])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grad, x, weight, bias, lengths, starts = ctx.saved_tensors
        along = tuple(
            torch.zeros_like(t) if c is None or not wanted else c
            for c, t, wanted in zip(cotangents, (x, weight, bias), ctx.wanted, strict=True)
            if t is not None
        )
        found = gradients(_pullback(lengths, starts, ctx.activation), (grad, x, weight, bias), along)
        return *found, *(None,) * 8

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        grad, x, weight, bias, lengths, starts = ctx.saved_tensors
        every = tangents(_pullback(lengths, starts, ctx.activation), (grad, x, weight, bias), directions[:4])
        found, none = [*every, *([None] if bias is None else [])], grad.new_empty(0)
        return tuple(t if wanted and t is not None else none for t, wanted in zip(found, ctx.wanted, strict=True))

    @staticmethod
    def plain(
        grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, starts: Tensor | None,
        z: Tensor, index: Tensor, activation: int, *rest: Any,
    ) -> Any:  # fmt: skip
        found = _pullback(lengths, starts, activation)(grad, x, weight, bias)
        return found if bias is not None else (*found, None)


_Conv1dMaxEager, _Conv1dMaxBackwardEager = eager(_Conv1dMax), eager(_Conv1dMaxBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::conv1d_max_fwd")
def _(
    x: Tensor, weight: Tensor, bias: Any, lengths: Any, starts: Tensor | None, activation: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0] if starts is None else starts.shape[0] - 1, weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape, dtype=accumulator(x.dtype)), x.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("seqkern::conv1d_max_bwd")
def _(
    grad_output: Tensor, x: Tensor, weight: Tensor, lengths: Any, starts: Any, z: Tensor, index: Any, activation: int,
    need_x: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        x.new_empty(x.shape if need_x else 0), weight.new_empty(weight.shape if need_weight else 0),
        z.new_empty(z.shape),
    )  # fmt: skip


@torch.library.register_vmap("seqkern::conv1d_max_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.conv1d_max_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::conv1d_max_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.conv1d_max_bwd, info.batch_size, in_dims, args)
