"""Cross-entropy of logits: the functional API, gradients, fakes; checks and numbers of `linear_cross_entropy` too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern._tensors import accumulator
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

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("none", "mean", "sum")  # by their number in the kernels' schemas


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
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
def cross_entropy(
    logits: Tensor,
    target: Tensor,
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
def cross_entropy(
    logits: Tensor,
    target: Tensor,
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
    """The loss of a classifier: -log softmax(logits)[target], without a matrix of probabilities beside the gradient.

    `linear_cross_entropy` also spares the logits, where they come from a linear layer.

    Args:
        logits: shape (..., V), classes last; float64, float32, bfloat16 or float16.
        target: classes, int64, shape logits.shape[:-1]; in [0, V), or ignore_index.
        ignore_index: rows with this target have loss 0.
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

    Derivatives of every order; logits are not changed. A negative infinity among the logits is a class that cannot be.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes, devices or numbers that do not fit; a class_weight that requires gradients.
        RuntimeError: on CPU, a target that is no class.
        NotImplementedError: the backend in force does not run on the device.

    Source: reference/cross_entropy.py names one for each option.

    Example:
        >>> import torch, seqkern
        >>> logits, target = torch.randn(2, 7, 100), torch.randint(100, (2, 7))
        >>> loss = seqkern.cross_entropy(logits, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
        True
    """
    if any(map(is_proxy, (logits, target, class_weight))):
        return record(cross_entropy, locals())
    if unexpected:
        refuse(cross_entropy, unexpected)
    op = "cross_entropy"
    check_tensors(op, {"logits": logits, "target": target})
    check_targets(op, target, "logits", logits)
    acc = accumulator(logits.dtype)
    class_weight = check_class_weight(op, class_weight, logits.shape[-1], logits.device, acc)
    numbers = check_numbers(op, ignore_index, label_smoothing, z_loss, softcap, reduction)
    transforms_active()  # raises before Dynamo looks at a tensor
    z, y = logits.reshape(target.numel(), logits.shape[-1]), target.reshape(-1)
    if backend_for(op, logits) == "reference":
        losses, lse = _formula(z, y, class_weight, numbers)
    else:
        losses, lse = apply(_Losses, _LossesEager, wants_gradient(z), z, y, class_weight, *numbers[:4])[:2]
    loss = reference.reduced(losses, y, class_weight, numbers.ignore_index, reduction)
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    return (loss, lse.reshape(target.shape)) if return_lse else loss


def cost(rows: int, classes: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a call on rows that are not ignored; `backward` counts the backward pass alone."""
    return Cost((5 if backward else 4) * rows * classes, (2 if backward else 1) * rows * classes * dtype.itemsize)


# ---- checks -------------------------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """The arguments that are no tensors, as the kernels take them."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none
    reduction: int = 0  # none


def check_tensors(op: str, tensors: dict[str, Any]) -> None:
    """Tensors on one device: the targets int64, the others floating point numbers; only a bias may be None."""
    first, input = next(iter(tensors.items()))
    for name, t in tensors.items():
        if name == "bias" and t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        check_not_nested(op, name, t, "give it the values of a jagged one, t.values()")
        if name == "target":
            if t.dtype != torch.int64:
                hint = ": probabilities are not taken, only classes" if t.is_floating_point() else ""
                raise TypeError(f"{op}: target must be int64, got {t.dtype}{hint}")
        elif t.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} must be float64, float32, bfloat16 or float16, got {t.dtype}")
        if t.device != input.device:
            raise ValueError(f"{op}: {name} must be on {first}'s device {input.device}, got {t.device}")


def check_targets(op: str, target: Tensor, name: str, rows: Tensor) -> None:
    if rows.dim() < 1:
        raise ValueError(f"{op}: {name} must have at least 1 dimension, got shape {tuple(rows.shape)}")
    if target.shape != rows.shape[:-1]:
        raise ValueError(
            f"{op}: target must have shape {tuple(rows.shape[:-1])}, {name}'s without the last dimension, "
            f"got {tuple(target.shape)}"
        )


def check_class_weight(op: str, t: Any, classes: int, device: torch.device, acc: torch.dtype) -> Tensor | None:
    if t is None:
        return None
    if not isinstance(t, Tensor) or t.dtype not in FLOATING:
        got = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{op}: class_weight must be a tensor of floating point numbers, got {got}")
    if t.shape != (classes,):
        raise ValueError(f"{op}: class_weight must have shape {(classes,)}, got {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(f"{op}: class_weight must be on the device of the others, {device}, got {t.device}")
    if wants_gradient(t):
        raise ValueError(f"{op}: class_weight has no gradient, and requires one: give class_weight.detach()")
    return t.to(acc)


def check_numbers(
    op: str, ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any, reduction: Any
) -> Numbers:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{op}: ignore_index must be a whole number, got {ignore_index!r}")
    for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss), ("softcap", softcap)):
        if not (value is None and name == "softcap") and not isinstance(value, (int, float)):
            raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be between 0 and 1, got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"{op}: z_loss must be at least 0, got {z_loss}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{op}: softcap must be positive, or None, got {softcap}")
    if reduction not in REDUCTIONS:
        raise ValueError(f'{op}: reduction must be "mean", "sum" or "none", got {reduction!r}')
    return Numbers(
        ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0), REDUCTIONS.index(reduction)
    )


# ---- autograd -----------------------------------------------------------------------------------------------------


def _formula(logits: Tensor, target: Tensor, class_weight: Tensor | None, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """The reference: losses and lse of rows. What ignored rows hold is not looked at."""
    kept = torch.where((target != numbers.ignore_index)[:, None], logits, 0)
    capped = reference.softcapped(kept, numbers.softcap)
    return reference.cross_entropy_rows(capped, target, class_weight, *numbers[:3])


def _losses(target: Tensor, class_weight: Tensor | None, numbers: Numbers) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda logits: _formula(logits, target, class_weight, numbers)


def _pullback(target: Tensor, class_weight: Tensor | None, numbers: Numbers) -> Callable[..., Tensor]:
    """(grad_loss, grad_lse, logits) -> the gradient of the logits, by the reference."""

    def pullback(grad_loss: Tensor | None, grad_lse: Tensor | None, logits: Tensor) -> Tensor:
        given = grad_loss if grad_lse is None else grad_lse
        assert given is not None
        upstream = tuple(torch.zeros_like(given) if g is None else g for g in (grad_loss, grad_lse))
        (grad,) = gradients(_losses(target, class_weight, numbers), (logits,), upstream)
        assert grad is not None
        return grad

    return pullback


class _Losses(torch.autograd.Function):
    """-> losses, lse, max, sum, (N) each."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        target: Tensor,
        class_weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float,
    ) -> Any:
        loss, top, total = kernel("cross_entropy_fwd", logits)(
            logits, target, class_weight, ignore_index, label_smoothing, z_loss, softcap
        )
        return loss, top + total.log(), top, total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.numbers = Numbers(*inputs[3:])
        ctx.set_materialize_grads(False)
        kept = (*inputs[:3], *output[2:])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*kept)
        else:
            ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*kept)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        nothing = (None,) * 6
        if grad_loss is None and grad_lse is None:
            return None, *nothing
        logits, target, class_weight, top, total = ctx.saved_tensors
        grad = apply(
            _Gradient, _GradientEager, torch.is_grad_enabled(), grad_loss, grad_lse, logits, target, class_weight, top,
            total, *ctx.numbers[:4],
        )  # fmt: skip
        return grad, *nothing

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        logits, target, class_weight, *rest = ctx.saved_tensors
        found = tangents(_losses(target, class_weight, ctx.numbers), (logits,), directions[:1])
        return *found, *map(torch.zeros_like, rest)

    @staticmethod
    def plain(logits: Tensor, target: Tensor, class_weight: Tensor | None, *numbers: Any) -> Any:
        return *_formula(logits, target, class_weight, Numbers(*numbers)), None, None


class _Gradient(torch.autograd.Function):
    """(grad_loss, grad_lse, logits, ...) -> the gradient of the logits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_loss: Tensor | None,
        grad_lse: Tensor | None,
        logits: Tensor,
        target: Tensor,
        class_weight: Tensor | None,
        top: Tensor,
        total: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float,
    ) -> Any:
        return kernel("cross_entropy_bwd", logits)(
            grad_loss, grad_lse, logits, target, class_weight, top, total, ignore_index, label_smoothing, z_loss,
            softcap,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.numbers = Numbers(*inputs[7:])
        ctx.save_for_backward(*inputs[:5])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        *passed, target, class_weight = ctx.saved_tensors
        grads = gradients(_pullback(target, class_weight, ctx.numbers), passed, cotangent)
        return *grads, *(None,) * 8

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        *passed, target, class_weight = ctx.saved_tensors
        return tangents(_pullback(target, class_weight, ctx.numbers), passed, directions[:3])

    @staticmethod
    def plain(
        grad_loss: Tensor | None, grad_lse: Tensor | None, logits: Tensor, target: Tensor, class_weight: Tensor | None,
        top: Tensor, total: Tensor, *numbers: Any,
    ) -> Any:  # fmt: skip
        return _pullback(target, class_weight, Numbers(*numbers))(grad_loss, grad_lse, logits)


_LossesEager, _GradientEager = eager(_Losses), eager(_Gradient)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::cross_entropy_fwd")
def _(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(logits.new_empty(target.shape, dtype=accumulator(logits.dtype)) for _ in range(3))


@torch.library.register_fake("seqkern::cross_entropy_bwd")
def _(
    grad_loss: Tensor | None, grad_lse: Tensor | None, logits: Tensor, target: Tensor, class_weight: Tensor | None,
    top: Tensor, total: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape)


@torch.library.register_vmap("seqkern::cross_entropy_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.cross_entropy_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::cross_entropy_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    def op(*given: Any) -> tuple[Tensor, ...]:
        return (torch.ops.seqkern.cross_entropy_bwd(*given),)

    (grads,), (dim,) = per_sample(op, info.batch_size, in_dims, args)
    return grads, dim
