"""The fast path: the Python half of csrc/common/node.h.

`layer_norm`, `glu`, `ffn`, `rope`, `attention`, `attention_decode`, `self_attention`, `rnn` and `rnn_cell` take what
their fronts in csrc/*/node.cpp read, and return an op's results, bitwise the op's, or None for any call that is not
the plain one: then the dispatcher takes it, and finds the errors. Each is called only where `fast()` holds.

The way back of such a call is a node in C++ too. What it leaves to Python (gradients that are themselves to be
differentiated, or that a mode or a hook's tensor type watches) goes to the function that the op's module registers
under the node's name by `long_way`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqkern import _library

# (gradients of the results, saved tensors, kept ones, numbers, needs) -> the inputs' gradients, None for none
LongWay = Callable[
    [Sequence[Tensor | None], Sequence[Any], Sequence[Tensor], Sequence[float], Sequence[bool]], Sequence[Tensor | None]
]
_long_ways: dict[str, LongWay] = {}

# Not `is_compiling`, which calls two functions: the compiler's other stages trace tensors of classes of their own,
# which no front takes.
_is_compiling = torch.compiler.is_dynamo_compiling


def fast() -> bool:
    """Whether a front may be asked: C++ is the backend of CPU tensors, and Dynamo does not look on."""
    return not _is_compiling() and _library._backend in ("auto", "cpu") and enabled


def long_way(node: str) -> Callable[[LongWay], LongWay]:
    """Registers what a node of this name calls."""

    def register(function: LongWay) -> LongWay:
        _long_ways[node] = function
        return function

    return register


def _call_long_way(node: str, *arguments: Any) -> Sequence[Tensor | None]:
    return _long_ways[node](*arguments)


class Context:
    """Stands for the context of an autograd.Function, for a long way that is a Function's `backward`."""

    def __init__(self, saved: Sequence[Any], needs: Sequence[bool]) -> None:
        self.saved_tensors = tuple(saved)
        self.needs_input_grad = tuple(needs)


def _load() -> dict[str, Any]:
    path = _library.node_library()
    if path is None:
        return {}
    connect = getattr(ctypes.PyDLL(str(path)), "seqkern_fast_path", None)
    if connect is None:  # of an earlier version
        return {}
    connect.argtypes, connect.restype = [ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p], ctypes.py_object
    kernels = _library._extension
    functions = (kernels.seqkern_direct_op, kernels.seqkern_direct_set_allocate)
    found: dict[str, Any] | None = connect(_call_long_way, *(ctypes.cast(f, ctypes.c_void_p) for f in functions))
    return found or {}


def _nothing(*arguments: Any) -> None:
    """In the place of a front where the library was not built for the torch that runs; it is not called."""


FRONTS = _load()
enabled = bool(FRONTS)  # the tests turn it off
layer_norm, glu, ffn, rope, attention, attention_decode, self_attention, rnn, rnn_cell = (
    FRONTS.get(name, _nothing)
    for name in (
        "layer_norm",
        "glu",
        "ffn",
        "rope",
        "attention",
        "attention_decode",
        "self_attention",
        "rnn",
        "rnn_cell",
    )
)
