"""The feed-forward block of a transformer in one op that keeps less: the functional API, gradients, fake kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import _direct, reference
from seqkern._direct import fast, long_way
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
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
from seqkern.reference.glu import GELU, GELU_TANH, RELU, SILU

Activation = Literal["relu", "silu", "gelu", "gelu_tanh", "reglu", "swiglu", "geglu", "geglu_tanh"]
# By name: the number of the activation, and whether it is that of a gate.
ACTIVATIONS: dict[str, tuple[int, bool]] = {
    "relu": (RELU, False), "silu": (SILU, False), "gelu": (GELU, False), "gelu_tanh": (GELU_TANH, False),
    "reglu": (RELU, True), "swiglu": (SILU, True), "geglu": (GELU, True), "geglu_tanh": (GELU_TANH, True),
}  # fmt: skip
# Numbers of the activation that the forward pass holds at once, on a CPU and on other devices; rows at least.
CHUNK, CHUNK_ELSEWHERE, CHUNK_ROWS = 1 << 23, 1 << 27, 256


@explicit
def ffn(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: Activation = "gelu",
    *,
    recompute: bool = False,
    **unexpected: NoReturn,
) -> Tensor:
    """linear(activation(linear(x, w1, b1)), w2, b2), for the backward pass of which fewer tensors are kept.

    With a linear layer of width H in between, torch keeps x, linear's output and the activation's: D + 2H numbers a
    row, D + 3H with a gate. This op keeps D + H (gated D + 2H), or with `recompute` D.

    Args:
        x: shape (..., D); float64, float32, bfloat16 or float16.
        w1: shape (H, D), or gated (2H, D): the gate's rows, then those that it is multiplied with. x's dtype.
        b1: shape (H,), gated (2H,), x's dtype; or None.
        w2: shape (E, H), x's dtype.
        b2: shape (E,), x's dtype; or None.
        activation: "relu", "silu", "gelu", "gelu_tanh" (gelu's approximation by tanh); or gated, "reglu", "swiglu",
            "geglu", "geglu_tanh": activation(gate) * up.
        recompute: the backward pass makes the first product again, instead of keeping its result.

    Returns:
        Shape (..., E), x's dtype. Under autocast everything is cast, as torch's linear casts. Derivatives of every
        order.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes, devices or an activation that do not fit.
        NotImplementedError: the backend in force does not run on the device.

    Source: Vaswani et al. 2017, Shazeer 2020, as reference/ffn.py.

    Example:
        >>> import torch, seqkern
        >>> x, w1, w2 = torch.randn(2, 5, 8), torch.randn(64, 8), torch.randn(8, 32)
        >>> seqkern.ffn(x, w1, None, w2, None, "swiglu").shape
        torch.Size([2, 5, 8])
    """
    if any(map(is_proxy, (x, w1, b1, w2, b2))):
        return record(ffn, locals())
    if unexpected:
        refuse(ffn, unexpected)
    op = "ffn"
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    number, gated = ACTIVATIONS[activation]
    if fast():
        found: Tensor | None = _direct.ffn(x, w1, b1, w2, b2, number, gated, CHUNK, recompute)
        if found is not None:
            return found
    _check(op, x, w1, b1, w2, b2, gated)
    if autocasts(x) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w1, w2 = x.to(dtype), w1.to(dtype), w2.to(dtype)
        b1, b2 = (b if b is None else b.to(dtype) for b in (b1, b2))
    for name, t in (("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{op}: {name} must have x's dtype {x.dtype}, got {t.dtype}")
    transforms_active()  # raises before Dynamo looks at a tensor
    if backend_for(op, x) == "reference":
        return reference.ffn(x, w1, b1, w2, b2, number, gated)
    wanted = wants_gradient(x, w1, b1, w2, b2)
    keep = not recompute and (wanted or transforms_active())
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    y, _ = apply(_Ffn, _FfnEager, wanted, rows, w1, b1, w2, b2, number, gated, keep)
    return y.view(*x.shape[:-1], w2.shape[0]) if x.dim() != 2 else y


def cost(rows: int, depth: int, width: int, outputs: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a call with an inner layer of `width` columns, gated half of them; `backward` of the backward pass."""
    flops = 2 * rows * width * (depth + outputs)
    traffic = (rows * (depth + outputs) + width * (depth + outputs)) * dtype.itemsize
    return Cost((2 if backward else 1) * flops, (2 if backward else 1) * traffic)


def _check(op: str, x: Any, w1: Any, b1: Any, w2: Any, b2: Any, gated: bool) -> None:
    for name, t in (("x", x), ("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2)):
        if t is None and name in ("b1", "b2"):
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        check_not_nested(op, name, t, "give it the values of a jagged one, t.values()")
        if t.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} must be float64, float32, bfloat16 or float16, got {t.dtype}")
        if t.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device {x.device}, got {t.device}")
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have shape (..., D), got {tuple(x.shape)}")
    if w1.dim() != 2 or w1.shape[1] != x.shape[-1] or (gated and w1.shape[0] % 2):
        rows = "2H" if gated else "H"
        raise ValueError(f"{op}: w1 must have shape ({rows}, {x.shape[-1]}), got {tuple(w1.shape)}")
    width = w1.shape[0] // 2 if gated else w1.shape[0]
    if w2.dim() != 2 or w2.shape[1] != width:
        raise ValueError(f"{op}: w2 must have shape (E, {width}), got {tuple(w2.shape)}")
    for name, b, weight in (("b1", b1, w1), ("b2", b2, w2)):
        if b is not None and b.shape != weight.shape[:1]:
            raise ValueError(f"{op}: {name} must have shape ({weight.shape[0]},), got {tuple(b.shape)}")


# ---- autograd -----------------------------------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _chunk_rows(x: Tensor, width: int) -> int:
    """How many rows the forward pass takes at once."""
    if torch.compiler.is_compiling() or transforms_active():
        return max(1, x.shape[0])
    held = CHUNK if x.device.type == "cpu" else CHUNK_ELSEWHERE
    return max(CHUNK_ROWS, held // max(1, width))


def _pullback(activation: int, gated: bool, biased: bool) -> Callable[..., Any]:
    """(grad, x, w1, b1, w2) -> gradients of x, w1, b1 (None without it), w2 and b2 (likewise)."""

    def pullback(grad: Tensor, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor) -> tuple[Tensor | None, ...]:
        def formula(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor) -> Tensor:
            return reference.ffn(x, w1, b1, w2, None, activation, gated)

        found = gradients(formula, (x, w1, b1, w2), grad)
        return tuple(g for g in (*found, grad.sum(0) if biased else None) if g is not None)

    return pullback


class _Ffn(torch.autograd.Function):
    """-> the output, and if it is to be kept the first product's result, else nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: int, gated: bool,
        keep: bool,
    ) -> Any:  # fmt: skip
        op, size = kernel("ffn_fwd", x), _chunk_rows(x, w2.shape[1])
        if x.shape[0] <= size:
            z = _linear(x, w1, b1)
            return _linear(op(z, activation, gated), w2, b2), z if keep else x.new_empty(0)
        z = x.new_empty((x.shape[0], w1.shape[0])) if keep else x.new_empty(0)
        y = x.new_empty((x.shape[0], w2.shape[0]))
        for first in range(0, x.shape[0], size):
            rows = slice(first, first + size)
            part = _linear(x[rows], w1, b1)
            if keep:
                z[rows] = part
            y[rows] = _linear(op(part, activation, gated), w2, b2)
        return y, z

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w1, b1, w2, b2, ctx.activation, ctx.gated, ctx.keep = inputs
        ctx.biased = b2 is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w1, b1, w2, output[1])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(x, w1, b1, w2, output[1])
        else:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        if grad is None:
            return (None,) * 8
        x, w1, b1, w2, z = ctx.saved_tensors
        needs = ctx.needs_input_grad[:5]
        found = apply(
            _FfnBackward, _FfnBackwardEager, torch.is_grad_enabled(), grad, x, w1, b1, w2, z, ctx.activation, ctx.gated,
            ctx.keep, *needs,
        )  # fmt: skip
        return *(g if needed else None for g, needed in zip(found, needs, strict=True)), None, None, None

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        x, w1, b1, w2, z = ctx.saved_tensors

        def formula(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor) -> Tensor:
            return reference.ffn(x, w1, b1, w2, None, ctx.activation, ctx.gated)

        tangent = None
        if any(d is not None for d in directions[:4]):
            tangent = tangents(formula, (x, w1, b1, w2), directions[:4])
        if directions[4] is not None:
            shift = directions[4].expand(x.shape[0], w2.shape[0])
            tangent = shift.clone() if tangent is None else tangent + shift
        return tangent, torch.zeros_like(z)

    @staticmethod
    def plain(
        x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: int, gated: bool,
        keep: bool,
    ) -> Any:  # fmt: skip
        return reference.ffn(x, w1, b1, w2, b2, activation, gated), None


class _FfnBackward(torch.autograd.Function):
    """(grad, x, w1, b1, w2, z, ...) -> gradients of x, w1, b1, w2, b2; empty where none is needed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, z: Tensor, activation: int, gated: bool,
        keep: bool, need_x: bool, need_w1: bool, need_b1: bool, need_w2: bool, need_b2: bool,
    ) -> Any:  # fmt: skip
        off: Any = contextlib.nullcontext()
        if autocasts(grad):  # as torch's own products in a backward pass
            off = torch.autocast(grad.device.type, enabled=False)
        none = grad.new_empty(0)
        with off:
            grad_b2 = grad.sum(0) if need_b2 else none
            if not (need_x or need_w1 or need_b1 or need_w2):
                return none, none, none, none, grad_b2
            if not keep:
                z = _linear(x, w1, b1)
            grad_z, hidden = kernel("ffn_bwd", x)(grad @ w2, z, activation, gated)
            grad_w2 = grad.t() @ hidden if need_w2 else none
            del hidden
            grad_w1 = grad_z.t() @ x if need_w1 else none
            return grad_z @ w1 if need_x else none, grad_w1, grad_z.sum(0) if need_b1 else none, grad_w2, grad_b2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (ctx.activation, ctx.gated), ctx.wanted = inputs[6:8], inputs[9:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:5])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grad, x, w1, b1, w2 = ctx.saved_tensors
        shapes = (x, w1, b1, w2, grad[0] if len(grad) else grad.new_zeros(grad.shape[1:]))
        given = tuple(
            torch.zeros_like(t) if c is None or not wanted else c
            for c, t, wanted in zip(cotangents, shapes, ctx.wanted, strict=True)
            if t is not None
        )
        found = gradients(_pullback(ctx.activation, ctx.gated, True), (grad, x, w1, b1, w2), given)
        return *found, *(None,) * 9

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        grad, x, w1, b1, w2 = ctx.saved_tensors
        along = tangents(_pullback(ctx.activation, ctx.gated, True), (grad, x, w1, b1, w2), directions[:5])
        parts = list(along)
        if b1 is None:
            parts.insert(2, grad.new_empty(0))
        none = grad.new_empty(0)
        return tuple(t if wanted else none for t, wanted in zip(parts, ctx.wanted, strict=True))

    @staticmethod
    def plain(
        grad: Tensor, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, z: Tensor, activation: int, gated: bool,
        *rest: Any,
    ) -> Any:  # fmt: skip
        parts: list[Tensor | None] = list(_pullback(activation, gated, True)(grad, x, w1, b1, w2))
        if b1 is None:
            parts.insert(2, None)
        return tuple(parts)


_FfnEager, _FfnBackwardEager = eager(_Ffn), eager(_FfnBackward)


@long_way("FfnNode")
def _backward_of_node(
    grads: Sequence[Tensor | None],
    saved: Sequence[Any],
    kept: Sequence[Tensor],
    numbers: Sequence[float],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients of x, w1, b1, w2 and b2; they are differentiable again."""
    x, w1, b1, w2, z = saved
    grad = grads[0]
    assert grad is not None
    rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, w2.shape[0])
    found = apply(
        _FfnBackward, _FfnBackwardEager, torch.is_grad_enabled(), grad, rows, w1, b1, w2, z, int(numbers[0]),
        bool(numbers[1]), True, *needs,
    )  # fmt: skip
    grad_x, *others = (g if needed else None for g, needed in zip(found, needs, strict=True))
    return None if grad_x is None else grad_x.view(x.shape), *others


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::ffn_fwd")
def _(z: Tensor, activation: int, gated: bool) -> Tensor:
    return z.new_empty((z.shape[0], z.shape[1] // 2 if gated else z.shape[1]))


@torch.library.register_fake("seqkern::ffn_bwd")
def _(grad_output: Tensor, z: Tensor, activation: int, gated: bool) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), grad_output.new_empty(grad_output.shape)


@torch.library.register_vmap("seqkern::ffn_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    def op(*given: Any) -> tuple[Tensor, ...]:
        return (torch.ops.seqkern.ffn_fwd(*given),)

    (output,), (dim,) = per_sample(op, info.batch_size, in_dims, args)
    return output, dim


@torch.library.register_vmap("seqkern::ffn_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.ffn_bwd, info.batch_size, in_dims, args)
