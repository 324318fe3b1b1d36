"""Layer norm: the functional API, its gradients, fake kernels and batching rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqkern import reference
from seqkern._library import backend_for, kernel
from seqkern.ops._autograd import FLOATING, Cost, apply, eager, gradients, per_sample, tangents, wants_gradient


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation over the trailing dimensions: exactly `torch.nn.functional.layer_norm`'s meaning.

    output = weight * (x - mean) / sqrt(var + eps) + bias, mean and (biased) variance over the dimensions of
    `normalized_shape`. Statistics are float32 (float64 for float64) and stay exact at any mean: see the kernel.

    Args:
        input: shape (..., *normalized_shape); float64, float32, bfloat16 or float16. Rows may be strided; a tensor
            whose trailing dimensions are not contiguous is copied once.
        normalized_shape: the trailing dimensions to normalise over, at least one.
        weight: shape normalized_shape, or None for ones. Any floating dtype.
        bias: shape normalized_shape, or None for zeros. Any floating dtype.
        eps: added to the variance, a number >= 0.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        TypeError: a dtype that is not floating point, or an argument that is not a tensor.
        ValueError: shapes that do not fit each other, or tensors on different devices.
        NotImplementedError: the backend in force does not run on the input's device.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Example:
        >>> import torch, seqkern
        >>> x = torch.randn(2, 3, 8)
        >>> y = seqkern.layer_norm(x, (8,), torch.ones(8), torch.zeros(8))
        >>> torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
        True
    """
    shape = _check(input, normalized_shape, weight, bias, eps)
    if input.is_cuda and torch.is_autocast_enabled("cuda"):  # as torch's op: float32 there, no change on CPU
        input, weight, bias = _widen(input), _widen(weight), _widen(bias)
    columns = math.prod(shape)
    rows = math.prod(input.shape[: input.dim() - len(shape)])
    flat = input.reshape(rows, columns)
    flat_weight = None if weight is None else weight.reshape(columns)
    flat_bias = None if bias is None else bias.reshape(columns)
    if backend_for("layer_norm", input) == "reference":
        output = reference.layer_norm(flat, flat_weight, flat_bias, eps)
    else:
        differentiable = wants_gradient(input, weight, bias)
        output, _, _ = apply(_LayerNorm, _LayerNormEager, differentiable, flat, flat_weight, flat_bias, eps)
    return output.view(input.shape)


def _widen(t: Any) -> Any:
    return t if t is None or t.dtype == torch.float64 else t.float()


def cost(rows: int, columns: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a (rows, columns) layer norm with weight and bias; `backward` counts the backward pass alone."""
    size, elements = dtype.itemsize, rows * columns
    if backward:  # reads dy and x, writes dx, dweight and dbias
        return Cost(flops=14 * elements, bytes=3 * elements * size + 3 * columns * size)
    return Cost(flops=8 * elements, bytes=2 * elements * size + 2 * columns * size)


def _check(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[int, ...]:
    if not isinstance(input, Tensor):
        raise TypeError(f"layer_norm: input must be a tensor, got {type(input).__name__}")
    if input.dtype not in FLOATING:
        raise TypeError(f"layer_norm: input must be float64, float32, bfloat16 or float16, got {input.dtype}")
    if isinstance(normalized_shape, int):
        raise TypeError(f"layer_norm: normalized_shape must be a sequence of sizes, got the number {normalized_shape}")
    shape = tuple(normalized_shape)
    if not shape or input.shape[-len(shape) :] != shape:
        raise ValueError(
            f"layer_norm: input must end in the dimensions normalized_shape = {shape} (at least one), "
            f"got shape {tuple(input.shape)}"
        )
    if not eps >= 0:
        raise ValueError(f"layer_norm: eps must be a number >= 0, got {eps}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if not isinstance(parameter, Tensor):
            raise TypeError(f"layer_norm: {name} must be a tensor or None, got {type(parameter).__name__}")
        if parameter.dtype not in FLOATING:
            raise TypeError(f"layer_norm: {name} must be float64, float32, bfloat16 or float16, got {parameter.dtype}")
        if parameter.shape != shape:
            raise ValueError(
                f"layer_norm: {name} must have shape normalized_shape = {shape}, got {tuple(parameter.shape)}"
            )
        if parameter.device != input.device:
            raise ValueError(f"layer_norm: {name} must be on the input's device {input.device}, got {parameter.device}")
    return shape


# ---- autograd -----------------------------------------------------------------------------------------------------


class _LayerNorm(torch.autograd.Function):
    """(rows, columns) -> output, mean, rstd. Backward is a Function again, so that it can be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        return kernel("layer_norm_fwd", input)(input, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input, weight, bias, ctx.eps = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.save_for_forward(input, weight, bias, mean, rstd)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        grads = apply(
            _LayerNormBackward, _LayerNormBackwardEager, torch.is_grad_enabled(),
            grad_output, input, weight, bias, mean, rstd, ctx.eps, ctx.needs_input_grad[1], ctx.needs_input_grad[2],
        )  # fmt: skip
        return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False)), None

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        output = tangents(reference.layer_norm, (*ctx.saved_tensors[:3], ctx.eps), input_tangents)
        return output, None, None


class _LayerNormBackward(torch.autograd.Function):
    """(grad_output, input, weight, bias, ...) -> grad_input, grad_weight, grad_bias."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        eps: float,
        need_weight: bool,
        need_bias: bool,
    ) -> Any:
        grad_input, grad_weight, grad_bias = kernel("layer_norm_bwd", input)(
            grad_output, input, mean, rstd, weight, need_weight, need_bias
        )
        # The sums come in the accumulation dtype: each is rounded once, to its own parameter's.
        grad_weight = grad_weight if weight is None else grad_weight.to(weight.dtype)
        return grad_input, grad_weight, grad_bias if bias is None else grad_bias.to(bias.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad_output, input, weight, bias, _, _, ctx.eps, ctx.need_weight, ctx.need_bias = inputs
        ctx.save_for_backward(grad_output, input, weight, bias)
        ctx.save_for_forward(grad_output, input, weight, bias)

    @staticmethod
    def formula(ctx: Any) -> Any:
        def grads(grad_output: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
            dx, dw, db, _ = gradients(reference.layer_norm, (input, weight, bias, ctx.eps), grad_output)
            empty = input.new_empty(0)
            return dx, dw if ctx.need_weight else empty, db if ctx.need_bias else empty

        return grads

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        grads = gradients(_LayerNormBackward.formula(ctx), ctx.saved_tensors, cotangents)
        return *grads, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        return tangents(_LayerNormBackward.formula(ctx), ctx.saved_tensors, input_tangents[:4])


_LayerNormEager, _LayerNormBackwardEager = eager(_LayerNorm), eager(_LayerNormBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


def _statistics_dtype(input: Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


@torch.library.register_fake("seqkern::layer_norm_fwd")
def _(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    statistics = input.new_empty(input.shape[0], dtype=_statistics_dtype(input))
    return input.new_empty(input.shape), statistics, torch.empty_like(statistics)


@torch.library.register_fake("seqkern::layer_norm_bwd")
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    need_weight: bool,
    need_bias: bool,
) -> Any:
    dtype = _statistics_dtype(input)
    columns = input.shape[1]
    return (
        input.new_empty(input.shape),
        input.new_empty(columns if need_weight else 0, dtype=dtype),
        input.new_empty(columns if need_bias else 0, dtype=dtype),
    )


@torch.library.register_vmap("seqkern::layer_norm_fwd")
def _(info: Any, in_dims: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    op = torch.ops.seqkern.layer_norm_fwd
    if in_dims[1] is not None or in_dims[2] is not None:  # parameters of their own for every sample: one call each
        return per_sample(op, info.batch_size, in_dims, (input, weight, bias, eps))
    x = input.movedim(in_dims[0], 0)
    outputs = op(x.flatten(0, 1), weight, bias, eps)
    return tuple(t.unflatten(0, x.shape[:2]) for t in outputs), (0, 0, 0)


@torch.library.register_vmap("seqkern::layer_norm_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    op = torch.ops.seqkern.layer_norm_bwd
    tensors, (need_weight, need_bias) = args[:5], args[5:]
    if need_weight or need_bias or in_dims[4] is not None:  # gradients of the parameters for every sample
        return per_sample(op, info.batch_size, in_dims, args)
    rows = [
        t.movedim(d, 0) if d is not None else t.expand(info.batch_size, *t.shape)
        for t, d in zip(tensors[:4], in_dims[:4], strict=True)
    ]
    grad_input, empty, _ = op(*(t.flatten(0, 1) for t in rows), tensors[4], False, False)
    return (grad_input.unflatten(0, rows[1].shape[:2]), empty, empty.clone()), (0, None, None)
