"""Highway layers in Triton after their product: y = t a(c) + (1 - t) x, t = sigmoid(z); all three gradients.

Equations and sources: csrc/highway/cpu/kernels.cpp. A program takes a tile of elements, as glu.py's do: 4 numbers an
element forward and 7 backward set the time.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, cdiv, power_of_two, rounded, wide
from ._replay import Memory, noted, planned
from .glu import TILE, _matrices, activate, sigmoids, tile
from .rnn.cells import tanh

__all__ = ["aot_configurations", "highway_bwd", "highway_fwd"]

RELU, TANH, GELU, SILU = (tl.constexpr(i) for i in range(4))
SIZES = ["rows", "columns", "strides"]  # not compiled in


@triton.jit
def _activate(c, ACTIVATION: tl.constexpr):
    """a(c) and a'(c)."""
    if ACTIVATION == RELU:
        return tl.where(c < 0.0, 0.0, c), 1.0 - (c <= 0.0).to(c.dtype)
    if ACTIVATION == TANH:
        smaller = tl.exp(-2.0 * tl.abs(c))
        inverse = 1 / (1 + smaller)
        return tanh(c), 4 * smaller * inverse * inverse
    if ACTIVATION == GELU:
        return activate(c, 1)
    return activate(c, 0)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    candidate_ptr, gate_ptr, x_ptr, output_ptr, rows, columns, strides, ACTIVATION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row, column, there = tile(rows, columns, BLOCK_R, BLOCK_C)
    c = tl.load(candidate_ptr + row * wide(strides[0]) + column, mask=there, other=0.0).to(ACC)
    z = tl.load(gate_ptr + row * wide(strides[1]) + column, mask=there, other=0.0).to(ACC)
    x = tl.load(x_ptr + row * wide(strides[2]) + column, mask=there, other=0.0).to(ACC)
    a, _slope = _activate(c, ACTIVATION)
    t, rest = sigmoids(z)
    tl.store(output_ptr + row * columns + column, rounded(t * a + rest * x, output_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    grad_ptr, candidate_ptr, gate_ptr, x_ptr, grad_candidate_ptr, grad_gate_ptr, grad_x_ptr, rows, columns, strides,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row, column, there = tile(rows, columns, BLOCK_R, BLOCK_C)
    dy = tl.load(grad_ptr + row * wide(strides[0]) + column, mask=there, other=0.0).to(ACC)
    c = tl.load(candidate_ptr + row * wide(strides[1]) + column, mask=there, other=0.0).to(ACC)
    z = tl.load(gate_ptr + row * wide(strides[2]) + column, mask=there, other=0.0).to(ACC)
    x = tl.load(x_ptr + row * wide(strides[3]) + column, mask=there, other=0.0).to(ACC)
    a, slope = _activate(c, ACTIVATION)
    t, rest = sigmoids(z)
    at = row * columns + column
    dtype = grad_x_ptr.dtype.element_ty
    tl.store(grad_candidate_ptr + at, rounded(dy * t * slope, dtype), mask=there)
    tl.store(grad_gate_ptr + at, rounded(dy * (a - x) * (t * rest), dtype), mask=there)
    tl.store(grad_x_ptr + at, rounded(dy * rest, dtype), mask=there)


def highway_fwd(candidate, gate, x, activation):
    """The launcher behind `seqkern::highway_fwd`: t activation(candidate) + (1 - t) x."""
    return planned(_plan_forward, _matrices(candidate, gate, x), (activation,), x.device)[0].view(x.shape)


def highway_bwd(grad_output, candidate, gate, x, activation):
    """The launcher behind `seqkern::highway_bwd`: (grad_candidate, grad_gate, grad_x)."""
    grads = planned(_plan_backward, _matrices(grad_output, candidate, gate, x), (activation,), x.device)
    return tuple(grad.view(x.shape) for grad in grads)


def _plan_forward(memory, candidate, gate, x, activation):
    output = memory.empty(x, x.shape)
    return (output,), [_step("highway_forward", _forward_kernel, (candidate, gate, x), (output,), activation)]


def _plan_backward(memory, grad_output, candidate, gate, x, activation):
    grads = tuple(memory.empty(x, x.shape) for _ in range(3))
    return grads, [_step("highway_backward", _backward_kernel, (grad_output, candidate, gate, x), grads, activation)]


def _step(name, kernel, read, written, activation):
    rows, columns = read[0].shape
    block = min(TILE, power_of_two(columns))
    constants = {
        "ACTIVATION": activation, "ACC": TRITON_DTYPE[accumulator(read[0].dtype)], "BLOCK_R": TILE // block,
        "BLOCK_C": block,
    }  # fmt: skip
    grid = (cdiv(rows, TILE // block) * cdiv(columns, block),)
    strides = tuple(t.stride(0) for t in read)
    return Launch(name, kernel, grid, (*read, *written, rows, columns, strides), constants, registers=255)


def explained(op, x, *weights):
    """The launches of a layer after its product, forward and backward; nothing is launched."""
    with noted() as launches:
        highway_fwd(x, x, x, 0)
        highway_bwd(x, x, x, x, 0)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use no shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        for activation in range(4):
            for shape in [(1, 4096), (64, 100), (512, 8)] if thorough else [(1, 4096)]:
                x = torch.empty(shape, dtype=dtype, device="meta")
                plans = _plan_forward(Memory(), x, x, x, activation), _plan_backward(Memory(), x, x, x, x, activation)
                for _, (launch,) in plans:
                    yield f"{launch.name}-{activation}-{str(dtype).removeprefix('torch.')}-{shape[1]}", launch
