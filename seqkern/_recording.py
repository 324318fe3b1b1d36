"""Calls of an op that record a graph (torch.fx, torch.jit.trace, the old ONNX exporter), and nested tensors.

torch.fx calls with proxies. An op becomes one call of its function. torch.fx recognises torch.nn's modules as leaves by
their name, so seqkern's modules record themselves. torch.jit.trace records kernels, which have no gradient in
TorchScript. The ONNX exporter based on it (`torch.onnx.export(dynamo=False)`) knows only torch's ops: it gets the
equations, or torch's forward for a network without seqkern's own options.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from seqkern._keywords import refuse


def is_proxy(x: Any) -> bool:
    """Whether `x` is torch.fx's proxy of a tensor. Does not import torch.fx, which would import triton and numpy."""
    if isinstance(x, Tensor):
        return False
    fx: Any = sys.modules.get("torch.fx")
    return fx is not None and isinstance(x, fx.Proxy)


def record(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """A node of torch.fx's graph that calls the function; one of its arguments, by name, is a proxy."""
    unexpected = arguments["unexpected"]  # itself a proxy if the function is the root of the trace
    if isinstance(unexpected, dict) and unexpected:
        refuse(function, unexpected)
    kept = _without_defaults(function, arguments)
    tracer = next(each for each in arguments.values() if is_proxy(each)).tracer
    return tracer.create_proxy("call_function", function, (), kept)


def record_module(module: torch.nn.Module, arguments: Mapping[str, Any]) -> Any:
    """A node of torch.fx's graph that calls the module, as torch.fx calls torch.nn's modules."""
    first, *others = _without_defaults(module.forward, arguments).items()
    tracer = first[1].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (first[1],), dict(others))


def _without_defaults(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: arguments[name] for name in parameters if arguments[name] is not parameters[name].default}


def exports_onnx() -> bool:
    """Whether torch.onnx.export(dynamo=False) is running."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is None:
        return False
    return "torch.onnx" in sys.modules and bool(torch.onnx.is_in_onnx_export())


def refuse_trace() -> None:
    """Raises if torch.jit.trace would record an op that needs a gradient."""
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            "seqkern: torch.jit.trace cannot record the gradient of seqkern's ops, whose autograd functions are not "
            "TorchScript: trace under torch.no_grad(), for a graph that only computes (it can be saved); to train, use "
            "torch.compile or torch.export"
        )


def check_not_nested(op: str, name: str, t: Tensor, instead: str) -> None:
    if t.is_nested:
        raise TypeError(f"{op}: {name} must not be a nested tensor: {instead}")


def of_jagged(op: str, function: Callable[..., Any], dims: int, **tensors: Any) -> Any:
    """Applies a function to the rows of nested tensors that share their offsets; the results are nested the same way.

    `dims` is the number of last dimensions that the function works on: their sizes must not vary.
    """
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or not t.is_nested or t.layout != torch.jagged:
            layout = f"a nested tensor of layout {t.layout}" if isinstance(t, Tensor) and t.is_nested else "another"
            raise TypeError(
                f"{op}: {name} must be a nested tensor of layout torch.jagged where one argument is, got {layout}"
            )
    first = next(iter(tensors.values()))
    ragged = next(dim for dim, size in enumerate(first.shape) if dim and not isinstance(size, int))
    if first.dim() - dims <= ragged:
        raise ValueError(
            f"{op}: normalized_shape must lie behind the dimension {ragged} of input, whose size varies, "
            f"got {dims} dimensions of {first.dim()}"
        )
    for name, t in tensors.items():
        if t.shape != first.shape:
            raise ValueError(f"{op}: {name} must have the input's offsets, got shape {t.shape} beside {first.shape}")
    results = function(*(t.values() for t in tensors.values()))
    nest = torch.nested.nested_tensor_from_jagged
    of = {"offsets": first.offsets(), "lengths": first.lengths(), "jagged_dim": ragged}
    return tuple(nest(t, **of) for t in results) if isinstance(results, tuple) else nest(results, **of)
