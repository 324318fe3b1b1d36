"""The short way for small norms, the Python half of csrc/layer_norm/layer_norm_direct.cpp.

`layer_norm(input, normalized_shape, weight, bias, eps, centred, largest)` returns the norm of a plain contiguous CPU
tensor of at most `largest` elements over its last dimension, bitwise what the op gives, and None for any other call:
then the op takes it, and finds the errors.
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

LARGEST = 1 << 17  # elements; beyond, the dispatcher's share of the time is small


def _is_usual(t: Tensor) -> bool:
    """Whether the dispatcher has nothing to do for a tensor but to find the CPU kernel."""
    return torch._C._dispatch_keys(t).raw_repr() == _USUAL


_USUAL = torch._C._dispatch_keys(torch.empty(0)).raw_repr()


class _LayerNormDirect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: tuple[Tensor],
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.options = eps, centred
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        _, *needs, _, _ = ctx.needs_input_grad
        eps, centred = ctx.options
        grads = _backward(grad_output, *ctx.saved_tensors, eps, centred, needs[1], needs[2])
        if grads is None:
            from seqkern.ops.layer_norm import backward_of_input

            grads = backward_of_input(grad_output, ctx.saved_tensors, eps, centred, needs)
        return None, *grads, None, None


_functions = ctypes.PyDLL(_library._extension._name).seqkern_direct_layer_norm
_functions.argtypes = [ctypes.py_object]
_functions.restype = ctypes.py_object

# Anything that watches calls or changes what they mean, as functions that return something true when it is at work.
# torch.compile is not among them: the callers ask for it first, so that it does not see this function.
_guards = (
    torch._C._are_functorch_transforms_active,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._autograd._profiler_enabled,
    torch._C._get_tracing_state,
)

layer_norm, _backward = _functions(
    (
        None,
        Tensor,
        Parameter,
        *FLOATING,  # in the order of csrc/common/dtype.h
        torch.empty_like,
        # Without the binding of default arguments that Function.apply does in Python for torch.func.
        torch._C._FunctionBase.__dict__["apply"].__get__(None, _LayerNormDirect),
        torch.is_grad_enabled,
        _is_usual,
        _guards,
        forward_ad,
    )
)
