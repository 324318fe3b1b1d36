"""Gated linear units in Triton: y = a(g) u, dg = dy u a'(g), du = dy a(g).

a is silu, gelu or gelu's tanh approximation: equations and sources in csrc/glu/cpu/kernels.cpp. A program takes a
tile of elements, each read once and written once: 3 numbers an element forward and 5 backward, which set the time.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, cdiv, power_of_two, rounded, unit_last, wide
from ._replay import Memory, noted, planned

__all__ = ["aot_configurations", "glu_bwd", "glu_fwd"]

SILU, GELU, GELU_TANH = (tl.constexpr(i) for i in range(3))
TILE = 1024  # elements of a tile
SIZES = ["rows", "columns", "strides"]  # not compiled in


@triton.jit
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x). As 1 - sigmoid(x) the smaller one would lose its digits."""
    smaller = tl.exp(-tl.abs(x))
    larger = 1 / (1 + smaller)
    smaller *= larger
    return tl.where(x < 0, smaller, larger), tl.where(x < 0, larger, smaller)


@triton.jit
def activate(g, ACTIVATION: tl.constexpr):
    """a(g) and a'(g)."""
    if ACTIVATION == GELU:
        p = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)
        density = 0.3989422804014327 * tl.exp(-0.5 * g * g)
        return g * p, p + g * density
    if ACTIVATION == SILU:
        s, rest = sigmoids(g)
        return g * s, s + g * s * rest
    held = tl.where(g > 100.0, 100.0, tl.where(g < -100.0, -100.0, g))  # beyond, s is 0 or 1
    square = held * held
    s, rest = sigmoids(held * (1.5957691216057308 + 0.07135481627260025 * square))
    return g * s, s + g * s * rest * (1.5957691216057308 + 0.21406444881780075 * square)


@triton.jit
def tile(rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """This program's rows, columns and which of them exist."""
    across = tl.cdiv(columns, BLOCK_C)
    program = tl.program_id(0).to(tl.int64)
    row = (program // across) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = (program % across) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    gate_ptr, up_ptr, output_ptr, rows, columns, strides, ACTIVATION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row, column, there = tile(rows, columns, BLOCK_R, BLOCK_C)
    g = tl.load(gate_ptr + row * wide(strides[0]) + column, mask=there, other=0.0).to(ACC)
    u = tl.load(up_ptr + row * wide(strides[1]) + column, mask=there, other=0.0).to(ACC)
    a, _slope = activate(g, ACTIVATION)
    tl.store(output_ptr + row * columns + column, rounded(a * u, output_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, rows, columns, strides, ACTIVATION: tl.constexpr,
    ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row, column, there = tile(rows, columns, BLOCK_R, BLOCK_C)
    dy = tl.load(grad_ptr + row * wide(strides[0]) + column, mask=there, other=0.0).to(ACC)
    g = tl.load(gate_ptr + row * wide(strides[1]) + column, mask=there, other=0.0).to(ACC)
    u = tl.load(up_ptr + row * wide(strides[2]) + column, mask=there, other=0.0).to(ACC)
    a, slope = activate(g, ACTIVATION)
    at = row * columns + column
    tl.store(grad_gate_ptr + at, rounded(dy * u * slope, grad_gate_ptr.dtype.element_ty), mask=there)
    tl.store(grad_up_ptr + at, rounded(dy * a, grad_up_ptr.dtype.element_ty), mask=there)


def glu_fwd(gate, up, activation):
    """The launcher behind `seqkern::glu_fwd`: activation(gate) * up."""
    return planned(_plan_forward, _matrices(gate, up), (activation,), gate.device)[0].view(gate.shape)


def glu_bwd(grad_output, gate, up, activation):
    """The launcher behind `seqkern::glu_bwd`: (grad_gate, grad_up)."""
    grads = planned(_plan_backward, _matrices(grad_output, gate, up), (activation,), gate.device)
    return tuple(grad.view(gate.shape) for grad in grads)


def _matrices(*tensors):
    """Tensors of one shape as matrices, in place if their rows are evenly spaced; as one row if all are contiguous."""
    if all(t.is_contiguous() for t in tensors):
        return tuple(t.view(1, -1) for t in tensors)
    columns = tensors[0].size(-1)
    rows = tensors[0].numel() // columns if columns else 0
    return tuple(unit_last(t.reshape(rows, columns)) for t in tensors)


def _plan_forward(memory, gate, up, activation):
    output = memory.empty(gate, gate.shape)
    return (output,), [_step("glu_forward", _forward_kernel, (gate, up), (output,), activation)]


def _plan_backward(memory, grad_output, gate, up, activation):
    grads = memory.empty(gate, gate.shape), memory.empty(gate, gate.shape)
    return grads, [_step("glu_backward", _backward_kernel, (grad_output, gate, up), grads, activation)]


def _step(name, kernel, read, written, activation):
    rows, columns = read[0].shape
    block = min(TILE, power_of_two(columns))
    constants = {
        "ACTIVATION": activation, "ACC": TRITON_DTYPE[accumulator(read[0].dtype)], "BLOCK_R": TILE // block,
        "BLOCK_C": block,
    }  # fmt: skip
    grid = (cdiv(rows, TILE // block) * cdiv(columns, block),)
    strides = tuple(t.stride(0) for t in read)
    return Launch(name, kernel, grid, (*read, *written, rows, columns, strides), constants)


def explained(op, gate, up=None):
    """The launches of a call, forward and backward; nothing is launched."""
    up = gate if up is None else up
    with noted() as launches:
        glu_fwd(gate, up, 0)
        glu_bwd(gate, gate, up, 0)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use no shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        for activation in range(3):
            for shape in [(1, 4096), (64, 100), (512, 8)] if thorough else [(1, 4096)]:
                x = torch.empty(shape, dtype=dtype, device="meta")
                plans = _plan_forward(Memory(), x, x, activation), _plan_backward(Memory(), x, x, x, activation)
                for _, (launch,) in plans:
                    yield f"{launch.name}-{activation}-{str(dtype).removeprefix('torch.')}-{shape[1]}", launch
