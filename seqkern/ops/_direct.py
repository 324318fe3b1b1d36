"""The short way for norms, the Python half of csrc/layer_norm/direct.cpp.

`layer_norm(input, residual, normalized_shape, weight, bias, eps, centred, largest)` returns the norm of a plain
contiguous CPU tensor of at most `largest` elements over its last dimension (with a residual, the norm of the sum, and
the sum), bitwise what the op gives, and None for any other call: then the op takes it, and finds the errors.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from seqkern import _library
from seqkern.ops._autograd import FLOATING


def _is_usual(t: Tensor) -> bool:
    """Whether the dispatcher has nothing to do for a tensor but to find the CPU kernel."""
    return torch._C._dispatch_keys(t).raw_repr() == _USUAL


_USUAL = torch._C._dispatch_keys(torch.empty(0)).raw_repr()


class _LayerNormDirect(torch.autograd.Function):
    """Of a norm that is computed already: `results` holds the output."""

    @staticmethod
    def forward(
        ctx: Any,
        results: tuple[Tensor],
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        statistics: Any,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.options, ctx.statistics = (eps, centred), statistics
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        needs, saved = ctx.needs_input_grad, ctx.saved_tensors  # once: a checkpoint refuses a second time
        grads = _backward(grad_output, None, *saved, *ctx.options, ctx.statistics, needs[2], needs[3])
        if grads is None:
            grads = _long_way(grad_output, None, saved, *ctx.options, needs[2], needs[3])
        grad, grad_weight, grad_bias = grads
        return None, grad, grad_weight, grad_bias, None, None, None


class _AddLayerNormDirect(torch.autograd.Function):
    """Of a sum and its norm that are computed already: `results` holds the output and the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        results: tuple[Tensor, Tensor],
        input: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        statistics: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        if not (input.requires_grad or residual.requires_grad):
            ctx.mark_non_differentiable(results[1])
        ctx.save_for_backward(results[1], weight, bias)
        ctx.options, ctx.statistics = (eps, centred), statistics
        return results

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None) -> Any:
        needs = ctx.needs_input_grad
        if grad_output is None:  # the sum alone was used
            return None, grad_sum if needs[1] else None, grad_sum if needs[2] else None, None, None, None, None, None
        saved = ctx.saved_tensors
        grads = _backward(grad_output, grad_sum, *saved, *ctx.options, ctx.statistics, needs[3], needs[4])
        if grads is None:
            grads = _long_way(grad_output, grad_sum, saved, *ctx.options, needs[3], needs[4])
        grad, grad_weight, grad_bias = grads
        return None, grad if needs[1] else None, grad if needs[2] else None, grad_weight, grad_bias, None, None, None


def _long_way(*arguments: Any) -> Any:
    from seqkern.ops.layer_norm import backward_by_op

    return backward_by_op(*arguments)


def _short_apply(function: type[torch.autograd.Function]) -> Any:
    """function.apply without the binding of default arguments that it does in Python for torch.func."""
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, function)


# Anything that watches calls or changes what they mean, as functions that return something true when it is at work.
# torch.compile is not among them: the callers ask for it first, so that it does not see this function.
_guards = (
    torch._C._are_functorch_transforms_active,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._autograd._profiler_enabled,
    torch._C._get_tracing_state,
)
_library_of_kernels = ctypes.PyDLL(_library._extension._name)


def _connect(nodes: tuple[Any, Any, Any]) -> Any:
    """The short way and its backward pass, which leave the way back to these two functions (one for a sum)."""
    functions = _library_of_kernels.seqkern_direct_layer_norm
    functions.argtypes, functions.restype = [ctypes.py_object], ctypes.py_object
    return functions(
        (
            None,
            Exception,
            Tensor,
            Parameter,
            *FLOATING,  # in the order of csrc/common/dtype.h
            *nodes,
            torch.is_grad_enabled,
            _is_usual,
            _guards,
            forward_ad,
        )
    )


def _cpp_nodes() -> tuple[Any, Any, Any] | None:
    """What csrc/layer_norm/node.cpp makes, where it was built for the torch that runs."""
    path = _library.node_library()
    if path is None:
        return None
    address = _library_of_kernels.seqkern_direct_calls
    address.restype = ctypes.c_void_p
    nodes = getattr(ctypes.PyDLL(str(path)), "seqkern_layer_norm_node_3", None)
    if nodes is None:  # built before this version
        return None
    nodes.argtypes, nodes.restype = [ctypes.py_object, ctypes.c_void_p], ctypes.py_object
    found: tuple[Any, Any, Any] = nodes(_long_way, address())
    return found


# What makes the nodes of a norm and of a sum's norm, and uninitialised memory like a tensor.
PYTHON_NODES = _short_apply(_LayerNormDirect), _short_apply(_AddLayerNormDirect), torch.empty_like
NODES = _cpp_nodes() or PYTHON_NODES
# The most elements; beyond, fresh pages would cost what the dispatcher costs, where they do not come from the pool.
LARGEST = 1 << 17 if NODES is PYTHON_NODES else 1 << 62
layer_norm, _backward = _connect(NODES)
