"""Cross-entropy of a linear layer's outputs without the matrix of logits: the functional API, gradients, fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import is_proxy, record
from seqkern._tensors import accumulator
from seqkern.ops._autocast import autocasts
from seqkern.ops._autograd import (
    Cost,
    apply,
    eager,
    gradients,
    per_sample,
    readable,
    tangents,
    transforms_active,
    wants_gradient,
)
from seqkern.ops.cross_entropy import (
    REDUCTIONS,
    Numbers,
    Reduction,
    check_class_weight,
    check_numbers,
    check_targets,
    check_tensors,
)

# Logits that a second derivative or a tangent holds at once.
CHUNK = 1 << 22


@overload
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@explicit
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    **unexpected: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """cross_entropy(linear(input, weight, bias), target) without the matrix of logits, and without ignored rows' work.

    Args:
        input: hidden states, shape (..., D); float64, float32, bfloat16 or float16.
        weight: shape (V, D), a row for each class: nn.Linear's, or an embedding's. input's dtype.
        target: classes, int64, shape input.shape[:-1]; in [0, V), or ignore_index.
        bias: shape (V,), any floating dtype; or None.
        ignore_index: rows with this target have loss 0, and are not multiplied.
        class_weight: shape (V,), the weight of each class, without a gradient; or None.
        label_smoothing: e, in [0, 1]: the target is 1 - e, and e / V is given to every class.
        z_loss: adds z_loss * lse^2 to each row that is not ignored, lse the logarithm of the sum of exp(logits).
        softcap: logits become softcap * tanh(logits / softcap).
        reduction: "mean" of the rows that are not ignored, weighted by the class weights of their targets; "sum"; or
            "none".
        return_lse: also returns lse.

    Returns:
        The loss, float32 (float64 for float64), a scalar or of target's shape; or (loss, lse), lse of target's shape,
        0 of ignored rows. "mean" of no row is nan, as torch's; its gradients are 0.

    With "mean" and "sum" the gradients are computed with the loss, with three matrix products, and the backward pass
    hands them on, multiplied by its scalar; a second one (retain_graph=True) makes the logits again. Memory beside
    inputs and gradients: the logits of some hundred rows, and in 16 bits weight's gradient in float32. Derivatives of
    every order; under autocast input and weight are cast as torch's linear casts them.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes, devices or numbers that do not fit; a class_weight that requires gradients.
        RuntimeError: on CPU, a target that is no class.
        NotImplementedError: the backend in force does not run on the device.

    Source: reference/cross_entropy.py names one for each option.

    Example:
        >>> import torch, seqkern
        >>> hidden, embedding = torch.randn(2, 7, 16), torch.randn(100, 16, requires_grad=True)
        >>> loss = seqkern.linear_cross_entropy(hidden, embedding, torch.randint(100, (2, 7)))
        >>> loss.backward()
        >>> embedding.grad.shape
        torch.Size([100, 16])
    """
    if any(map(is_proxy, (input, weight, target, bias, class_weight))):
        return record(linear_cross_entropy, locals())
    if unexpected:
        refuse(linear_cross_entropy, unexpected)
    op = "linear_cross_entropy"
    _check(op, input, weight, target, bias)
    if autocasts(input) and input.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
    if weight.dtype != input.dtype:
        raise TypeError(f"{op}: weight must have input's dtype {input.dtype}, got {weight.dtype}")
    acc = accumulator(input.dtype)
    class_weight = check_class_weight(op, class_weight, weight.shape[0], input.device, acc)
    numbers = check_numbers(op, ignore_index, label_smoothing, z_loss, softcap, reduction)
    transforms_active()  # raises before Dynamo looks at a tensor
    x, y = input.reshape(target.numel(), input.shape[-1]), target.reshape(-1)
    b = None if bias is None else bias.to(acc)
    if backend_for(op, input) == "reference":
        losses, lse = _formula(x, weight, b, y, class_weight, numbers)
        loss = reference.reduced(losses, y, class_weight, numbers.ignore_index, reduction)
    else:
        needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, b))
        loss, lse = apply(
            _Loss, _LossEager, wants_gradient(x, weight, b), x, weight, b, y, class_weight, *numbers, *needs
        )[:2]
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    return (loss, lse.reshape(target.shape)) if return_lse else loss


def cost(rows: int, classes: int, depth: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a call on rows that are not ignored; `backward` with the gradients of input and weight."""
    products = 3 if backward else 1
    exponentials = (8 if backward else 4) * rows * classes
    traffic = (rows + classes) * depth * dtype.itemsize
    return Cost(2 * products * rows * classes * depth + exponentials, traffic * (2 if backward else 1))


def _check(op: str, input: Any, weight: Any, target: Any, bias: Any) -> None:
    check_tensors(op, {"input": input, "weight": weight, "target": target, "bias": bias})
    check_targets(op, target, "input", input)
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"{op}: weight must have shape (V, {input.shape[-1]}), input's last dimension, got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias must have shape {(weight.shape[0],)}, got {tuple(bias.shape)}")


# ---- autograd -----------------------------------------------------------------------------------------------------


def _formula(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, numbers: Numbers
) -> tuple[Tensor, Tensor]:
    """The reference: losses and lse of rows. What ignored rows hold is not looked at."""
    kept = torch.where((target != numbers.ignore_index)[:, None], input, 0)
    logits = reference.logits(kept, weight, bias, numbers.softcap)
    return reference.cross_entropy_rows(logits, target, class_weight, *numbers[:3])


def _chunks(rows: int, classes: int) -> list[slice]:
    """Of rows, so that a chunk has CHUNK logits at most; one chunk at least."""
    size = max(1, CHUNK // max(1, classes))
    return [slice(first, first + size) for first in range(0, max(1, rows), size)]


def _of(rows: slice, tensors: Any) -> list[Any]:
    return [None if t is None else t[rows] for t in tensors]


def _joined(chunks: list[Any], rows: int) -> Any:
    """Of results of chunks of rows: the first `rows` tensors concatenated, the others added."""
    if len(chunks) == 1:
        return tuple(chunks[0])
    results: list[Any] = []
    for i, parts in enumerate(zip(*chunks, strict=True)):
        if parts[0] is None:
            results.append(None)
        else:
            results.append(torch.cat(parts) if i < rows else torch.stack(parts).sum(0))
    return tuple(results)


def _losses(target: Tensor, class_weight: Tensor | None, numbers: Numbers) -> Callable[..., tuple[Tensor, Tensor]]:
    def losses(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return _formula(input, weight, bias, target, class_weight, numbers)

    return losses


def _pullback(target: Tensor, class_weight: Tensor | None, numbers: Numbers) -> Callable[..., Any]:
    """(grad_loss, grad_lse, input, weight, bias) -> gradients of the last three, or two, by the reference."""

    def pullback(
        grad_loss: Tensor, grad_lse: Tensor | None, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        upstream = (grad_loss, torch.zeros_like(grad_loss) if grad_lse is None else grad_lse)
        grads = gradients(_losses(target, class_weight, numbers), (input, weight, bias), upstream)
        return grads if bias is not None else grads[:2]

    return pullback


class _Loss(torch.autograd.Function):
    """-> loss, lse, max, sum, and gradients for the upstream gradient 1 where a reduction lets them be computed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float,
        reduction: int,
        need_input: bool,
        need_weight: bool,
        need_bias: bool,
    ) -> Any:
        now = reduction != 0
        loss, top, total, *grads = kernel("linear_cross_entropy_fwd", input)(
            input, weight, target, bias, class_weight, ignore_index, label_smoothing, z_loss, softcap, reduction,
            now and need_input, now and need_weight, now and need_bias,
        )  # fmt: skip
        return loss, top + total.log(), top, total, *grads

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input, weight, bias, target, class_weight, *numbers = inputs
        ctx.numbers = Numbers(*numbers[:5])
        ctx.set_materialize_grads(False)
        kept = (input, weight, bias, target, class_weight, *output[2:])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*kept)
        else:
            ctx.mark_non_differentiable(*output[2:])
        ctx.own = None
        if not (torch.compiler.is_compiling() or transforms_active()):
            # The gradients belong to the first backward pass, which may then hand them on as they are.
            kept, ctx.own = kept[:7], output[4:]
        ctx.save_for_backward(*kept)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        input, weight, bias, target, class_weight, top, total, *grads = ctx.saved_tensors
        needs, numbers = ctx.needs_input_grad[:3], ctx.numbers
        nothing = (None,) * 10
        if grad_loss is None and grad_lse is None:
            return None, None, None, *nothing
        if numbers.reduction and grad_lse is None and not torch.is_grad_enabled():
            scale = _scaled
            if ctx.own is not None:
                grads, ctx.own, scale = ctx.own, None, _scaled_in_place
            if grads:
                dtypes = (input.dtype, weight.dtype, total.dtype)
                scaled = (
                    scale(g, grad_loss, dtype) if needed else None
                    for g, dtype, needed in zip(grads, dtypes, needs, strict=True)
                )
                return *scaled, *nothing
        if grad_loss is None:
            grad_loss = torch.zeros_like(total)
        elif numbers.reduction:
            grad_loss = _of_rows(grad_loss, target, class_weight, numbers)
        found = apply(
            _Gradient, _GradientEager, torch.is_grad_enabled(), grad_loss, grad_lse, input, weight, bias, target,
            class_weight, top, total, *numbers[:4], *needs,
        )  # fmt: skip
        return *(g if needed else None for g, needed in zip(found, needs, strict=True)), *nothing

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        input, weight, bias, target, class_weight, *rest = ctx.saved_tensors
        numbers, parts = ctx.numbers, []
        for rows in _chunks(*input.shape[:1], *weight.shape[:1]):
            losses = _losses(target[rows], class_weight, numbers)
            along = (None if directions[0] is None else directions[0][rows], *directions[1:3])
            parts.append(tangents(losses, (input[rows], weight, bias), along))
        losses, lse = _joined(parts, 2)
        loss = reference.reduced(losses, target, class_weight, numbers.ignore_index, REDUCTIONS[numbers.reduction])
        return loss, lse, *map(torch.zeros_like, rest)

    @staticmethod
    def plain(
        input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *numbers: Any
    ) -> Any:
        losses, lse = _formula(input, weight, bias, target, class_weight, Numbers(*numbers[:5]))
        loss = reference.reduced(losses, target, class_weight, numbers[0], REDUCTIONS[numbers[4]])
        return loss, lse, *(None,) * 5


def _scaled(grad: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Not in place: a second backward pass finds what the first one found."""
    assert factor is not None
    return (grad * factor).to(dtype)


def _scaled_in_place(grad: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Of a gradient that nobody else has. A second backward pass makes its own."""
    assert factor is not None
    if torch._C._functorch.is_legacy_batchedtensor(factor):  # is_grads_batched=True: a gradient for each factor
        return _scaled(grad, factor, dtype)
    if not (readable(factor) and factor.item() == 1):
        grad.mul_(factor)
    return grad.to(dtype)


def _of_rows(grad_loss: Tensor, target: Tensor, class_weight: Tensor | None, numbers: Numbers) -> Tensor:
    """The upstream gradient of each row's loss, (N), from that of their sum or mean."""
    if REDUCTIONS[numbers.reduction] == "mean":
        ones = torch.ones_like(target, dtype=grad_loss.dtype)
        share = reference.reduced(ones, target, class_weight, numbers.ignore_index, "mean") / ones.sum()
        grad_loss = grad_loss * share
    return grad_loss.expand(target.shape)


class _Gradient(torch.autograd.Function):
    """(grad_loss, grad_lse, input, weight, bias, ...) -> gradients of input, weight and bias, by one more product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        top: Tensor,
        total: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float,
        need_input: bool,
        need_weight: bool,
        need_bias: bool,
    ) -> Any:
        grad_input, grad_weight, grad_bias = kernel("linear_cross_entropy_bwd", input)(
            grad_loss, grad_lse, input, weight, target, bias, class_weight, top, total, ignore_index, label_smoothing,
            z_loss, softcap, need_input, need_weight, need_bias,
        )  # fmt: skip
        return grad_input, grad_weight.to(weight.dtype), grad_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.numbers, ctx.wanted = Numbers(*inputs[9:13]), inputs[13:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:7])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:7])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grad_loss, grad_lse, input, weight, bias, target, class_weight = ctx.saved_tensors
        parts = []
        for rows in _chunks(*input.shape[:1], *weight.shape[:1]):
            pullback = _pullback(target[rows], class_weight, ctx.numbers)
            passed = (*_of(rows, (grad_loss, grad_lse, input)), weight, bias)
            given = []
            for cotangent, t, wanted in zip(cotangents, passed[2:], ctx.wanted, strict=True):
                if t is None:
                    continue
                if cotangent is None or not wanted:
                    given.append(torch.zeros_like(t))
                else:
                    given.append(cotangent if t is not passed[2] else cotangent[rows])
            parts.append(gradients(pullback, passed, tuple(given)))
        return *_joined(parts, 3), *(None,) * 11

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        grad_loss, grad_lse, input, weight, bias, target, class_weight = ctx.saved_tensors
        parts = []
        for rows in _chunks(*input.shape[:1], *weight.shape[:1]):
            pullback = _pullback(target[rows], class_weight, ctx.numbers)
            passed = (*_of(rows, (grad_loss, grad_lse, input)), weight, bias)
            along = (*_of(rows, directions[:3]), *directions[3:5])
            parts.append(tangents(pullback, passed, along))
        none = [t.new_zeros(0) for t in (input, weight, grad_loss)]
        found = (*_joined(parts, 1), None)[:3]
        return tuple(each if wanted else empty for each, wanted, empty in zip(found, ctx.wanted, none, strict=True))

    @staticmethod
    def plain(
        grad_loss: Tensor, grad_lse: Tensor | None, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        class_weight: Tensor | None, top: Tensor, total: Tensor, *numbers: Any,
    ) -> Any:  # fmt: skip
        pullback = _pullback(target, class_weight, Numbers(*numbers[:4]))
        return (*pullback(grad_loss, grad_lse, input, weight, bias), None)[:3]


_LossEager, _GradientEager = eager(_Loss), eager(_Gradient)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::linear_cross_entropy_fwd")
def _(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, reduction: int, need_input: bool, need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    acc = accumulator(input.dtype)
    loss = input.new_empty((), dtype=acc) if reduction else input.new_empty(target.shape, dtype=acc)
    rows = [input.new_empty(target.shape, dtype=acc) for _ in range(2)]
    return loss, *rows, *_fake_gradients(input, weight, acc, need_input, need_weight, need_bias)


@torch.library.register_fake("seqkern::linear_cross_entropy_bwd")
def _(
    grad_loss: Tensor | None, grad_lse: Tensor | None, input: Tensor, weight: Tensor, target: Tensor,
    bias: Tensor | None, class_weight: Tensor | None, top: Tensor, total: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, need_input: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _fake_gradients(input, weight, input.dtype, need_input, need_weight, need_bias)


def _fake_gradients(
    input: Tensor, weight: Tensor, dtype: torch.dtype, need_input: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, ...]:
    acc = accumulator(input.dtype)
    return (
        input.new_empty(input.shape if need_input else 0, dtype=dtype),
        input.new_empty(weight.shape if need_weight else 0, dtype=acc),
        input.new_empty(weight.shape[:1] if need_bias else 0, dtype=acc),
    )


@torch.library.register_vmap("seqkern::linear_cross_entropy_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.linear_cross_entropy_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::linear_cross_entropy_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.linear_cross_entropy_bwd, info.batch_size, in_dims, args)
