"""The short way for small norms: the kernel's address called with the tensors' addresses.

A dispatched call takes several microseconds before the kernel starts, more than a norm of a few thousand elements
does. Where nothing can tell the difference (plain contiguous CPU tensors, no mode, transform, trace or profiler at
work), the kernel is called directly. Results are bitwise those of the op. Everything else returns None here and goes
through the op.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from seqkern import _library
from seqkern.ops._autograd import FLOATING

LARGEST = 1 << 17  # elements; beyond, the dispatcher's share is small

_CODES = {dtype: code for code, dtype in enumerate(FLOATING)}  # csrc/common/dtype.h
_PLAIN = (Tensor, Parameter)

_is_compiling = torch.compiler.is_compiling
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing = torch._C._get_tracing_state
_profiling = torch._C._autograd._profiler_enabled
_is_grad_enabled = torch.is_grad_enabled
_empty_like = torch.empty_like


def _keys(t: Tensor) -> int:
    return torch._C._dispatch_keys(t).raw_repr()


# What a dense CPU tensor has: nothing lazily negated, batched, wrapped or known to be zero.
_PLAIN_KEYS = _keys(torch.empty(0))

_forward = _library._extension.seqkern_layer_norm_fwd
_forward.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 2 + [ctypes.c_double, ctypes.c_int]
_forward.restype = None
_backward = _library._extension.seqkern_layer_norm_bwd
_backward.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 2 + [ctypes.c_double, ctypes.c_int]
_backward.restype = None


def _quiet() -> bool:
    """Whether nothing but autograd watches the calls of this thread."""
    return not (
        _is_compiling()
        or _transforms_active()
        or _dispatch_modes()
        or _function_modes()
        or _profiling()
        or _tracing() is not None
        or forward_ad._current_level >= 0
    )


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> Tensor | None:
    """The norm of a small plain tensor over its last dimension; None when the call is of another kind, or wrong."""
    if not _quiet() or _library._backend not in ("auto", "cpu"):
        return None
    if type(input) not in _PLAIN or not input.is_cpu or not input.is_contiguous() or input.is_neg():
        return None
    code = _CODES.get(input.dtype)
    shape = input.shape
    if code is None or not shape or not eps >= 0 or type(normalized_shape) is int:
        return None
    if len(normalized_shape) != 1 or shape[-1] != normalized_shape[0]:
        return None
    columns = shape[-1]
    elements = input.numel()
    if not 0 < elements <= LARGEST:
        return None
    code |= centred << 6
    grad = input.requires_grad
    weight_address = bias_address = None
    if weight is not None:
        if type(weight) not in _PLAIN or not weight.is_cpu or not weight.is_contiguous() or weight.is_neg():
            return None
        parameter_code = _CODES.get(weight.dtype)
        if parameter_code is None or weight.shape != (columns,):
            return None
        code |= parameter_code << 2
        grad |= weight.requires_grad
        weight_address = weight.data_ptr()
    if bias is not None:
        if type(bias) not in _PLAIN or not bias.is_cpu or not bias.is_contiguous() or bias.is_neg():
            return None
        parameter_code = _CODES.get(bias.dtype)
        if parameter_code is None or bias.shape != (columns,):
            return None
        code |= parameter_code << 4
        grad |= bias.requires_grad
        bias_address = bias.data_ptr()
    address = input.data_ptr()
    if not address or weight_address == 0 or bias_address == 0:  # known to be zero, so without memory
        return None
    if grad and _is_grad_enabled():
        return _apply(input, weight, bias, weight_address, bias_address, columns, eps, code)
    output = _empty_like(input)
    _forward(address, weight_address, bias_address, output.data_ptr(), elements // columns, columns, eps, code)
    return output


class _LayerNormDirect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        weight_address: int | None,
        bias_address: int | None,
        columns: int,
        eps: float,
        code: int,
    ) -> Tensor:
        output = _empty_like(input)
        rows = input.numel() // columns
        _forward(input.data_ptr(), weight_address, bias_address, output.data_ptr(), rows, columns, eps, code)
        ctx.save_for_backward(input, weight, bias)
        ctx.arguments = rows, columns, eps, code
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input, weight, bias = ctx.saved_tensors
        rows, columns, eps, code = ctx.arguments
        if (
            _is_grad_enabled()
            or not _quiet()
            or _keys(grad_output) != _PLAIN_KEYS
            or type(grad_output) not in _PLAIN
            or not grad_output.is_contiguous()
        ):
            from seqkern.ops.layer_norm import backward_of_input

            grads = backward_of_input(grad_output, input, weight, bias, eps, bool(code >> 6), ctx.needs_input_grad[:3])
            return *grads, None, None, None, None, None
        grad_input = _empty_like(input)
        grad_weight = _empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = _empty_like(bias) if ctx.needs_input_grad[2] else None
        _backward(
            grad_output.data_ptr(),
            input.data_ptr(),
            None if weight is None else weight.data_ptr(),
            grad_input.data_ptr(),
            None if grad_weight is None else grad_weight.data_ptr(),
            None if grad_bias is None else grad_bias.data_ptr(),
            rows,
            columns,
            eps,
            code,
        )
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


# Without the binding of default arguments that Function.apply does in Python for torch.func, which is not at work here.
_apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, _LayerNormDirect)
