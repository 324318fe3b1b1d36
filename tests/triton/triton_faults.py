"""Kernels with a fault each, and without one, through the compile-only driver: what it says of them, as JSON.

sm_120: a block has 99 KB of shared memory there. Run by tests/triton/test_triton_driver.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.errors import TritonError
from triton_driver import compile_only


@triton.jit
def _pair(value, limit):
    return value + 1, limit


@triton.jit
def _none_in_a_tuple(out_ptr, value, limit):
    value, limit = _pair(value, limit)
    if limit is not None:
        value += limit
    tl.store(out_ptr, value)


@triton.jit(do_not_specialize=["strides"])
def _strides(out_ptr, strides, METHOD: tl.constexpr):
    stride = strides[0].to(tl.int64) if METHOD else strides[0] + tl.full((), 0, tl.int64)
    tl.store(out_ptr + stride, 1)


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(steps):
        at = step * BLOCK * BLOCK + row
        acc += tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + row, acc)


def said(launch: Callable[[], object]) -> str:
    """The last error in the chain that a launch ends with, "" for none."""
    error: BaseException | None = None
    try:
        launch()
    except (TritonError, RuntimeError, TypeError) as raised:
        error = raised
    text = ""
    while error is not None:
        text, error = f"{type(error).__name__}: {error}", error.__cause__
    return text


def main() -> None:
    out, half = torch.empty(1, dtype=torch.int64), torch.empty(128, 128, dtype=torch.float16)
    with compile_only(120) as driver:
        results = {
            "None in a tuple": said(lambda: _none_in_a_tuple[(1,)](out, 3, None)),
            "no None in a tuple": said(lambda: _none_in_a_tuple[(1,)](out, 3, 5)),
            "a stride of 1 taken for a tensor": said(lambda: _strides[(1,)](out, (1, 7), True)),
            "a stride of 2 taken for a tensor": said(lambda: _strides[(1,)](out, (2, 7), True)),
            "a stride of 1 taken for a number": said(lambda: _strides[(1,)](out, (1, 7), False)),
            "too much shared memory": said(
                lambda: _product[(1,)](half, half, half, 9, BLOCK=128, num_stages=4, num_warps=8)
            ),
            "enough shared memory": said(lambda: _product[(1,)](half, half, half, 9, BLOCK=64, num_stages=2)),
            "too many programs": said(lambda: _strides[(1, 2**16)](out, (2, 7), True)),
            "no program": said(lambda: _strides[(0,)](out, (2, 7), True)),
            "too many programs in x": said(lambda: _strides[(2**31,)](out, (2, 7), True)),
            "most programs": said(lambda: _strides[(2**31 - 1, 2**16 - 1, 2**16 - 1)](out, (2, 7), True)),
        }
    print(json.dumps(results | {"passed": str(sorted(driver.names))}))


if __name__ == "__main__":
    main()
