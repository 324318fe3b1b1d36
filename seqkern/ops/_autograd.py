"""Shared by the ops: when autograd is needed, and higher derivatives from the reference.

First derivatives come from kernels. Second derivatives and forward mode come from the equations: torch.func
differentiates the reference, and the result can be differentiated again. Forward mode inside forward mode runs the
equations themselves, because torch does not differentiate the result of a Function's `jvp`.

Besides torch's methods each Function has `plain(*args)`: the results of `forward(*args)` by the equations (None or
empty for results that only backward needs). A Function saves the same tensors in the same order for forward mode and
for backward: torch's vmap rule keeps one list of batch dimensions for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern._recording import refuse_trace

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # what every op takes

_vjp: Any = torch.func.vjp  # its annotation has the three results of has_aux=True as well


@dataclass(frozen=True)
class Cost:
    """The cost of one call: floating-point operations, and the minimal memory traffic in bytes."""

    flops: int
    bytes: int


def eager(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The same Function in the older style, for everyday calls.

    torch.func needs a Function with `setup_context`, and forward mode one with `jvp`. But with `setup_context` torch
    binds the arguments by name, which takes longer than a small kernel; and torch.compile cannot trace a Function with
    `jvp`. So an op has both: the full Function, for transforms, and this one.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = function.forward(*args)
            function.setup_context(ctx, args, output)
            return output

        backward = staticmethod(function.backward)

    Eager.__name__ = Eager.__qualname__ = function.__name__
    return Eager


def transforms_active() -> bool:
    """Whether forward-mode differentiation or a torch.func transform (grad, jvp, vmap, ...) is active.

    Raises:
        NotImplementedError: under torch.compile, which would lose the op's derivatives inside a transform. Without
            fullgraph=True the compiler catches it and leaves the call to eager, where transforms work.
    """
    active = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if active and torch.compiler.is_compiling():
        raise NotImplementedError(
            "seqkern ops inside a torch.func transform or forward-mode differentiation cannot be compiled with "
            "fullgraph=True: compile the function inside the transform, or allow graph breaks"
        )
    return active


def forward_mode_nested() -> bool:
    """Whether forward mode is nested: at least two levels of torch.func.jvp, with any levels between them."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return sum(level.key() == torch._C._functorch.TransformType.Jvp for level in levels) > 1


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether reverse mode needs a gradient of one of the tensors."""
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in tensors)


def readable(t: Tensor) -> bool:
    """Whether the tensor's values can be read now: not while compiling, on a GPU, or inside a transform."""
    return (
        not torch.compiler.is_compiling() and t.device.type == "cpu" and type(t) is Tensor and not transforms_active()
    )


@functools.cache
def _uncompiled() -> Any:
    """Calls a function with torch.compile disabled: Dynamo fails on tensors that a transform has wrapped."""
    return torch.compiler.disable(lambda function, *args: function(*args))


def apply(
    function: type[torch.autograd.Function], eager: type[torch.autograd.Function], differentiable: bool, *args: Any
) -> Any:
    """function(*args) by the fastest path: the Function for transforms, its eager twin, or the kernel alone."""
    if transforms_active():
        if forward_mode_nested():
            # A pullback's saved tensors may be wrapped for a finished transform; Function.apply would unwrap them.
            return function.plain(*torch._functorch.utils.unwrap_dead_wrappers(args))  # type: ignore[attr-defined]
        return _uncompiled()(function.apply, *args)
    if differentiable:
        refuse_trace()
        return eager.apply(*args)
    return function.forward(*args)


class Once(torch.autograd.Function):
    """once(gradient, why) -> the gradient; it cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, why: str) -> Tensor:
        ctx.why = why
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(ctx.why)


def sparse_gradient(op: str, rows: Tensor, values: Tensor, shape: Any) -> Tensor:
    """A coalesced one of these rows, for `backward`; where it is recorded, under create_graph, its gradient raises."""
    values = values.detach()
    if torch.is_grad_enabled():
        why = f"{op}: sparse gradients cannot be differentiated; leave sparse=True out"
        values = Once.apply(values.requires_grad_(), why)
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def gradients(function: Callable[..., Any], inputs: Sequence[Any], cotangents: Any) -> tuple[Tensor | None, ...]:
    """The gradients of function(*inputs) for the inputs that are tensors (None for the others), differentiable again.

    `cotangents` has the shape of the function's result: a tensor or a tuple of them.
    """
    indices = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]

    def of_tensors(*tensors: Tensor) -> Any:
        arguments = list(inputs)
        for i, tensor in zip(indices, tensors, strict=True):
            arguments[i] = tensor
        return function(*arguments)

    _, pullback = _vjp(of_tensors, *(inputs[i] for i in indices))
    result: list[Tensor | None] = [None] * len(inputs)
    for i, grad in zip(indices, pullback(cotangents), strict=True):
        result[i] = grad
    return tuple(result)


def tangents(function: Callable[..., Any], inputs: Sequence[Any], input_tangents: Sequence[Tensor | None]) -> Any:
    """The tangent of function(*inputs) along `input_tangents`, None meaning zero: the Jacobian-vector product.

    The pullback u -> J^T u is linear, so its own pullback is v -> J v. That works inside forward mode too, where
    torch.func.jvp must not be nested.
    """
    indices = [i for i, t in enumerate(input_tangents) if t is not None]

    def of_tensors(*tensors: Tensor) -> Any:
        arguments = list(inputs)
        for i, tensor in zip(indices, tensors, strict=True):
            arguments[i] = tensor
        return function(*arguments)

    output, pullback = _vjp(of_tensors, *(inputs[i] for i in indices))
    zeros = torch.utils._pytree.tree_map(torch.zeros_like, output)
    _, push = _vjp(pullback, zeros)
    (result,) = push(tuple(input_tangents[i] for i in indices))
    return result


def batched(function: Callable[..., Any], tensors: Sequence[Tensor | None]) -> Any:
    """function(*tensors), a tuple of tensors, also inside `torch.autograd.grad(is_grads_batched=True)`.

    That uses a vmap older than torch.func's, which has no rule for ops that take lists: here each sample is a call.
    """
    old = torch._C._functorch.is_legacy_batchedtensor
    if torch.compiler.is_compiling() or not any(t is not None and old(t) for t in tensors):
        return function(*tensors)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    plain = [t if t is None or not old(t) else torch._remove_batch_dim(t, level, 0, 0) for t in tensors]
    samples = [p is not t for p, t in zip(plain, tensors, strict=True)]
    count = next(len(p) for p, own in zip(plain, samples, strict=True) if p is not None and own)
    calls = [
        batched(function, [p[n] if p is not None and own else p for p, own in zip(plain, samples, strict=True)])
        for n in range(count)
    ]
    return tuple(torch._add_batch_dim(torch.stack(each), 0, level) for each in zip(*calls, strict=True))


def per_sample(op: Callable[..., tuple[Tensor, ...]], samples: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    """The fallback batching rule: one call per sample, with the results stacked along a new first dimension.

    An argument may be a list of tensors; then so are its in_dims.
    """

    def sample(argument: Any, dim: Any, index: int) -> Any:
        if isinstance(argument, (list, tuple)):
            return [sample(t, d, index) for t, d in zip(argument, dim, strict=True)]
        if not isinstance(argument, Tensor) or dim is None:
            return argument
        if samples == 0:  # one call is still needed for the shapes of the results
            return argument.new_zeros([size for d, size in enumerate(argument.shape) if d != dim])
        return argument.select(dim, index)

    calls = [
        op(*(sample(argument, dim, index) for argument, dim in zip(args, in_dims, strict=True)))
        for index in range(max(samples, 1))
    ]
    outputs = tuple(torch.stack(results)[:samples] for results in zip(*calls, strict=True))
    return outputs, (0,) * len(outputs)
