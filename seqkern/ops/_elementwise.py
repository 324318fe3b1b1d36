"""Elementwise ops, a formula of tensors of one shape: `elementwise_op` makes all but kernels and public function.

The kernels compute values and first derivatives, `seqkern::<name>_fwd(*tensors, *constants) -> Tensor` and
`seqkern::<name>_bwd(grad_output, *tensors, *constants) -> (a gradient for each tensor)`; results are contiguous. From
the formula, differentiated by torch.func, come second derivatives, forward mode and transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern._direct import Context, long_way
from seqkern._keywords import refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern.ops._autograd import (
    FLOATING,
    apply,
    eager,
    gradients,
    tangents,
    transforms_active,
    wants_gradient,
)


def elementwise_op(name: str, formula: Callable[..., Tensor], tensors: Sequence[str]) -> Callable[..., Tensor]:
    """Makes the op `name` of `formula(*tensors, *constants)` from its tensors' names; returns a function that runs it.

    Call that as `run(function, arguments, *constants)` with the public function and its arguments by name, `unexpected`
    keywords (_keywords.py) among them; not as `locals()`, which torch 2.10 does not compile. It checks the tensors, and
    raises TypeError and ValueError in the public function's name, and NotImplementedError if the active backend does
    not run on their device. As with torch's formulas, autocast casts nothing.
    """
    count = len(tensors)

    def pullback(constants: tuple[Any, ...]) -> Callable[..., Any]:
        def grads(grad_output: Tensor, *values: Tensor) -> Any:
            return gradients(lambda *t: formula(*t, *constants), values, grad_output)

        return grads

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return kernel(f"{name}_fwd", args[0])(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.constants = inputs[count:]
            _save(ctx, inputs[:count])

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Any:
            transforms_active()  # raises if compiled inside a transform, before Dynamo looks at a gradient
            wanted = torch.is_grad_enabled()
            grads = apply(Backward, BackwardEager, wanted, grad_output, *ctx.saved_tensors, *ctx.constants)
            needed = (g if needs else None for g, needs in zip(grads, ctx.needs_input_grad, strict=False))
            return *needed, *[None] * len(ctx.constants)

        @staticmethod
        def jvp(ctx: Any, *directions: Tensor | None) -> Any:
            return tangents(lambda *t: formula(*t, *ctx.constants), ctx.saved_tensors, directions[:count])

        @staticmethod
        def plain(*args: Any) -> Any:
            return formula(*args)

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return tuple(kernel(f"{name}_bwd", args[0])(*args))

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.constants = inputs[1 + count :]
            _save(ctx, inputs[: 1 + count])

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> Any:
            grads = gradients(pullback(ctx.constants), ctx.saved_tensors, cotangents)
            return *grads, *[None] * len(ctx.constants)

        @staticmethod
        def jvp(ctx: Any, *directions: Tensor | None) -> Any:
            return tangents(pullback(ctx.constants), ctx.saved_tensors, directions[: 1 + count])

        @staticmethod
        def plain(*args: Any) -> Any:
            return pullback(args[1 + count :])(*args[: 1 + count])

    Forward.__name__ = Forward.__qualname__ = f"{name.title()}Forward"
    Backward.__name__ = Backward.__qualname__ = f"{name.title()}Backward"
    ForwardEager, BackwardEager = eager(Forward), eager(Backward)

    @long_way(f"{name.title()}Node")
    def _(grads: Any, saved: Any, kept: Any, numbers: Any, needs: Any) -> Any:
        context: Any = Context(saved, needs)
        context.constants = tuple(map(int, numbers))
        return Forward.backward(context, *grads)[:count]

    _register(name, count)

    def run(function: Callable[..., Any], arguments: dict[str, Any], *constants: Any) -> Any:
        values = [arguments[each] for each in tensors]
        if any(map(is_proxy, values)):
            return record(function, arguments)
        if arguments["unexpected"]:
            refuse(function, arguments["unexpected"])
        op = function.__name__
        _check(op, tensors, values)
        transforms_active()  # raises before Dynamo looks at a tensor
        if backend_for(op, values[0]) == "reference":
            return formula(*values, *constants)
        return apply(Forward, ForwardEager, wants_gradient(*values), *values, *constants)

    return run


def _save(ctx: Any, tensors: Sequence[Tensor]) -> None:
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)


def _check(op: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    first = tensors[0]
    for name, t in zip(names, tensors, strict=True):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        check_not_nested(op, name, t, "give it the values of a jagged one, t.values()")
        if t.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} must be float64, float32, bfloat16 or float16, got {t.dtype}")
        if t.dtype != first.dtype:
            raise TypeError(f"{op}: {name} must have the dtype of {names[0]}, {first.dtype}, got {t.dtype}")
        if t.shape != first.shape:
            raise ValueError(
                f"{op}: {name} must have the shape of {names[0]}, {tuple(first.shape)}, got {tuple(t.shape)}"
            )
        if t.device != first.device:
            raise ValueError(f"{op}: {name} must be on the device of {names[0]}, {first.device}, got {t.device}")


def _register(name: str, count: int) -> None:
    """Registers fake kernels and batching rules, in which samples are one more dimension."""
    forward, backward = f"seqkern::{name}_fwd", f"seqkern::{name}_bwd"

    @torch.library.register_fake(forward)
    def _(first: Tensor, *rest: Any) -> Tensor:
        return first.new_empty(first.shape)

    @torch.library.register_fake(backward)
    def _(grad_output: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(grad_output.new_empty(grad_output.shape) for _ in range(count))

    @torch.library.register_vmap(forward)
    def _(info: Any, in_dims: Any, *args: Any) -> Any:
        return getattr(torch.ops.seqkern, f"{name}_fwd")(*_of_samples(info.batch_size, in_dims, args)), 0

    @torch.library.register_vmap(backward)
    def _(info: Any, in_dims: Any, *args: Any) -> Any:
        grads = getattr(torch.ops.seqkern, f"{name}_bwd")(*_of_samples(info.batch_size, in_dims, args))
        return tuple(grads), (0,) * count


def _of_samples(samples: int, in_dims: Any, args: Any) -> list[Any]:
    """The arguments, with samples as their first dimension."""

    def first(t: Any, dim: int | None) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.expand(samples, *t.shape) if dim is None else t.movedim(dim, 0)

    return [first(t, dim) for t, dim in zip(args, in_dims, strict=True)]
