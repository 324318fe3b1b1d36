"""Attention's CUDA C++ kernels behind its dispatcher ops; kernels/attention/attention.py has the Triton kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from seqkern._limits import MOST_DECODE_QUERIES, MOST_HEAD_DIM

PATHS = ("auto", "mma", "hopper")
_path = "auto"


@contextlib.contextmanager
def use_path(name: str) -> Iterator[None]:
    """Chooses among the CUDA C++ kernels, process-wide, for tests and benchmarks; "auto" leaves it to the ops."""
    global _path
    if name not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {name!r}")
    previous = _path
    _path = name
    try:
        yield
    finally:
        _path = previous


def check(query: Tensor, value: Tensor) -> None:
    """Raises NotImplementedError for dtypes and head dimensions that the kernels do not support."""
    if query.dtype == torch.float64:
        raise NotImplementedError(
            "seqkern attention: the CUDA C++ kernels take float32, bfloat16 and float16, got float64; "
            'use_backend("triton") runs it'
        )
    if not (1 <= query.size(-1) <= MOST_HEAD_DIM and 1 <= value.size(-1) <= MOST_HEAD_DIM):
        raise NotImplementedError(
            f"seqkern attention: the CUDA C++ kernels take head dimensions of 1 to {MOST_HEAD_DIM}, got query "
            f'{tuple(query.shape)} and value {tuple(value.shape)}; use_backend("reference") runs any'
        )


def tf32(query: Tensor) -> bool:
    """Whether float32 products may use tf32: torch's flag for its own matrix products."""
    return query.dtype == torch.float32 and _allow_tf32()


def _allow_tf32() -> bool:
    """torch.compile treats the answer as a constant: its guard on torch's global state includes the flag.

    It cannot trace the flag. It can trace `torch._C._get_cublas_allow_tf32`, but that raises once `fp32_precision` was
    set.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# As torch.compiler.assume_constant_result does, which would import the compiler, with numpy and triton.
setattr(_allow_tf32, "_dynamo_marked_constant", True)  # noqa: B010


def attention_fwd(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The arguments of `seqkern::attention_fwd` -> out, lse."""
    check(query, value)
    own = {"tf32": tf32(query), "path": _path}
    return torch.ops.seqkern_cuda.attention_fwd(query, key, value, *rest, **named, **own)


def attention_bwd(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, ...]:
    """The arguments of `seqkern::attention_bwd` -> the gradients."""
    check(query, value)
    own = {"tf32": tf32(query), "path": _path}
    return torch.ops.seqkern_cuda.attention_bwd(grad_out, grad_lse, query, key, value, *rest, **named, **own)


def plan(op: str, tensors: tuple[Tensor, ...]) -> str:
    """For `explain`: which kernels would run for query, key and value, and why."""
    query, value = tensors[0], tensors[min(2, len(tensors) - 1)]
    least = 2 if op == "scaled_dot_product_attention" else 3
    if query.dim() < least:
        raise ValueError(f"{op}: query must have at least {least} dimensions, got shape {tuple(query.shape)}")
    check(query, value)
    if op == "attention_decode" and query.dim() == 4 and 0 < query.shape[2] <= MOST_DECODE_QUERIES:
        return "keys split over blocks, the heads of a group in one product, mma.sync"
    passes = [
        torch.ops.seqkern_cuda.attention_plan(query, value.size(-1), backward, _path) for backward in (False, True)
    ]
    return f"forward {passes[0]}; backward {passes[1]}"
