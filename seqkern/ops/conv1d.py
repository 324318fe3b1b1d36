"""A convolution over the rows of sequences: the functional API, gradients, fake kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern._tensors import accumulator
from seqkern.ops._autocast import autocasts
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
from seqkern.ops._sequences import sequence_lengths

Padding = Literal["valid", "same", "causal"] | int | tuple[int, int]


class Steps(NamedTuple):
    """How windows lie: their distance, rows of zeros before and behind a sequence, the distance of a window's rows."""

    stride: int
    left: int
    right: int
    dilation: int


@explicit
def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: Padding = "valid",
    dilation: int = 1,
    lengths: Tensor | Sequence[int] | None = None,
    **unexpected: NoReturn,
) -> Tensor:
    """A convolution over the rows of sequences, features last, without a matrix of windows.

    y[t] = sum over k of weight[:, k] x[t * stride + k * dilation - left] + bias, where rows outside a sequence are
    zeros. With lengths a sequence has the same result in every batch, whatever the padding holds.

    Args:
        x: shape (B, L, D); float64, float32, bfloat16 or float16.
        weight: shape (C, K, D), x's dtype: torch.nn.Conv1d's weight (C, D, K) is conv.weight.transpose(1, 2).
        bias: shape (C,), x's dtype; or None.
        stride, dilation: at least 1.
        padding: rows of zeros before and behind each sequence: a number for both, or (left, right); "valid" is 0;
            "same" as torch's, an output for each row, with stride 1; "causal" all before, so that y[t] sees no row
            after t * stride.
        lengths: rows of each sequence, int32 or int64 of shape (B,), or numbers. Default: L. They are cut to L.

    Returns:
        Shape (B, L', C), x's dtype, L' = floor((L + left + right - dilation * (K - 1) - 1) / stride) + 1, or 0. A
        sequence of `n` rows has as many rows of its own as this formula says of n (of 0 rows none); zeros are behind
        them. Derivatives of every order.

    Raises:
        TypeError: not tensors or numbers, or dtypes that do not fit.
        ValueError: shapes, devices or numbers that do not fit.
        NotImplementedError: the backend in force does not run on the device.

    Source: van den Oord et al. 2016, as reference/conv1d.py.

    Example:
        >>> import torch, seqkern
        >>> x, weight = torch.randn(2, 20, 8), torch.randn(16, 3, 8)
        >>> seqkern.conv1d(x, weight, padding="causal", dilation=4, lengths=[20, 7]).shape
        torch.Size([2, 20, 16])
    """
    if any(map(is_proxy, (x, weight, bias, lengths))):
        return record(conv1d, locals())
    if unexpected:
        refuse(conv1d, unexpected)
    op = "conv1d"
    check_tensors(op, x, weight, bias, "pad it by torch.nested.to_padded_tensor and give lengths")
    if x.dim() != 3:
        raise ValueError(f"{op}: x must have shape (B, L, D), got {tuple(x.shape)}")
    check_filters(op, x, weight, bias)
    steps = _steps(op, stride, padding, dilation, weight)
    x, weight, bias = in_one_dtype(op, x, weight, bias)
    every = None if lengths is None else sequence_lengths(op, lengths, x)
    transforms_active()  # raises before Dynamo looks at a tensor
    if backend_for(op, x) == "reference":
        return reference.conv1d(x, weight, bias, every, *steps)
    output: Tensor = apply(_Conv1d, _Conv1dEager, wants_gradient(x, weight, bias), x, weight, bias, every, *steps)
    return output


def cost(windows: int, width: int, columns: int, filters: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a call on `windows` windows of all sequences together; `backward` of the backward pass."""
    depth, factor = width * columns, 2 if backward else 1
    traffic = windows * (columns + filters) + filters * depth
    return Cost(factor * 2 * windows * filters * depth, factor * traffic * dtype.itemsize)


def check_tensors(op: str, x: Any, weight: Any, bias: Any, instead: str) -> None:
    """instead: what to do with a nested tensor."""
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if name == "bias" and t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        check_not_nested(op, name, t, instead)
        if t.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} must be float64, float32, bfloat16 or float16, got {t.dtype}")
        if t.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device {x.device}, got {t.device}")


def check_filters(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 3 or weight.shape[2] != x.shape[-1] or weight.shape[1] < 1:
        raise ValueError(f"{op}: weight must have shape (C, K, {x.shape[-1]}), K at least 1, got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")


def in_one_dtype(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Under autocast in its dtype."""
    if autocasts(x) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{op}: {name} must have x's dtype {x.dtype}, got {t.dtype}")
    return x, weight, bias


def _steps(op: str, stride: Any, padding: Any, dilation: Any, weight: Tensor) -> Steps:
    for name, number in (("stride", stride), ("dilation", dilation)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{op}: {name} must be a whole number, got {number!r}")
        if not 1 <= number < 2**31:
            raise ValueError(f"{op}: {name} must be at least 1, got {number}")
    reach = dilation * (weight.shape[1] - 1)
    if isinstance(padding, str):
        if padding not in ("valid", "same", "causal"):
            raise ValueError(f'{op}: padding must be "valid", "same", "causal" or numbers of rows, got {padding!r}')
        if padding == "same" and stride != 1:
            raise ValueError(f'{op}: padding "same" is of stride 1, got {stride}')
        sides = {"valid": (0, 0), "same": (reach // 2, reach - reach // 2), "causal": (reach, 0)}[padding]
    else:
        sides = tuple(padding) if isinstance(padding, (tuple, list)) else (padding, padding)
        if len(sides) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) for n in sides):
            raise TypeError(f"{op}: padding must be a name, a whole number or two, got {padding!r}")
        if not all(0 <= n < 2**31 for n in sides):
            raise ValueError(f"{op}: padding must be rows of zeros, at least 0, got {padding!r}")
    return Steps(stride, *sides, dilation)


# ---- autograd -----------------------------------------------------------------------------------------------------


def _formula(lengths: Tensor | None, steps: Steps) -> Callable[..., Tensor]:
    def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return reference.conv1d(x, weight, bias, lengths, *steps)

    return formula


class _Conv1d(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, *steps: int) -> Any:
        wide = None if bias is None else bias.to(accumulator(x.dtype))
        return kernel("conv1d_fwd", x)(x, weight, wide, lengths, *steps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.steps = Steps(*inputs[4:])
        ctx.save_for_backward(*inputs[:4])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        needs = ctx.needs_input_grad[:3]
        found = apply(
            _Conv1dBackward, _Conv1dBackwardEager, torch.is_grad_enabled(), grad, *ctx.saved_tensors, *ctx.steps,
            needs[0], needs[1] or needs[2],
        )  # fmt: skip
        return *(g if need else None for g, need in zip(found, needs, strict=True)), *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        x, weight, bias, lengths = ctx.saved_tensors
        return tangents(_formula(lengths, ctx.steps), (x, weight, bias), directions[:3])

    @staticmethod
    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, *steps: int) -> Any:
        return reference.conv1d(x, weight, bias, lengths, *steps)


def _pullback(lengths: Tensor | None, steps: Steps) -> Callable[..., Any]:
    """(grad, x, weight) -> the gradients of x, weight and the bias."""

    def pullback(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        bias = grad.new_zeros(weight.shape[0])
        return gradients(_formula(lengths, steps), (x, weight, bias), grad)

    return pullback


class _Conv1dBackward(torch.autograd.Function):
    """(grad, x, weight, bias, lengths, ...) -> gradients of x, weight and bias; empty where not needed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, stride: int, left: int,
        right: int, dilation: int, need_x: bool, need_weight: bool,
    ) -> Any:  # fmt: skip
        of_x, of_weight, of_bias = kernel("conv1d_bwd", x)(
            grad, x, weight, lengths, stride, left, right, dilation, need_x, need_weight
        )
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, x, weight, _, lengths, *rest = inputs
        ctx.steps, ctx.wanted = Steps(*rest[:4]), (rest[4], rest[5], rest[5])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, x, weight, lengths)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(grad, x, weight, lengths)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grad, x, weight, lengths = ctx.saved_tensors
        shapes = (x, weight, grad.new_empty(weight.shape[0]))
        along = tuple(
            torch.zeros_like(t) if c is None or not wanted else c
            for c, t, wanted in zip(cotangents, shapes, ctx.wanted, strict=True)
        )
        found = gradients(_pullback(lengths, ctx.steps), (grad, x, weight), along)
        return *found, *(None,) * 8

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        grad, x, weight, lengths = ctx.saved_tensors
        found = tangents(_pullback(lengths, ctx.steps), (grad, x, weight), directions[:3])
        none = grad.new_empty(0)
        return tuple(t if wanted else none for t, wanted in zip(found, ctx.wanted, strict=True))

    @staticmethod
    def plain(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, *rest: Any) -> Any:
        return _pullback(lengths, Steps(*rest[:4]))(grad, x, weight)


_Conv1dEager, _Conv1dBackwardEager = eager(_Conv1d), eager(_Conv1dBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::conv1d_fwd")
def _(x: Tensor, weight: Tensor, bias: Any, lengths: Any, stride: int, left: int, right: int, dilation: int) -> Tensor:
    return x.new_empty((x.shape[0], _outputs(x.shape[1], weight, stride, left, right, dilation), weight.shape[0]))


def _outputs(rows: Any, weight: Tensor, stride: int, left: int, right: int, dilation: int) -> Any:
    if isinstance(rows, int) and rows == 0:
        return 0
    return max(0, (rows + left + right - dilation * (weight.shape[1] - 1) - 1) // stride + 1)


@torch.library.register_fake("seqkern::conv1d_bwd")
def _(
    grad_output: Tensor, x: Tensor, weight: Tensor, lengths: Any, stride: int, left: int, right: int, dilation: int,
    need_x: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        x.new_empty(x.shape if need_x else 0),
        weight.new_empty(weight.shape if need_weight else 0, dtype=accumulator(x.dtype)),
        weight.new_empty(weight.shape[0] if need_weight else 0, dtype=torch.float64),
    )


@torch.library.register_vmap("seqkern::conv1d_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    def op(*given: Any) -> tuple[Tensor, ...]:
        return (torch.ops.seqkern.conv1d_fwd(*given),)

    (output,), (dim,) = per_sample(op, info.batch_size, in_dims, args)
    return output, dim


@torch.library.register_vmap("seqkern::conv1d_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.conv1d_bwd, info.batch_size, in_dims, args)
