"""The activation between the products of a feed-forward block in Triton: y = a(z), or a(g) u of z = (g, u).

The products are torch's. A program takes a tile of outputs, each number read once and written once; the backward pass
writes y again, which the gradient of the second weight needs. Activations: kernels/glu.py.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, cdiv, power_of_two, rounded
from ._replay import Memory, noted, planned
from .glu import activate, tile

__all__ = ["aot_configurations", "ffn_bwd", "ffn_fwd"]

RELU = tl.constexpr(3)
TILE = 1024  # elements of a tile
SIZES = ["rows", "columns"]  # not compiled in


@triton.jit
def value_and_slope(g, ACTIVATION: tl.constexpr):
    if ACTIVATION == RELU:
        return tl.where(g < 0, 0.0, g), tl.where(g <= 0, 0.0, 1.0).to(g.dtype)  # of a NaN it, and 1
    return activate(g, ACTIVATION)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    z_ptr, output_ptr, rows, columns, ACTIVATION: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row, column, there = tile(rows, columns, BLOCK_R, BLOCK_C)
    at = row * columns * (2 if GATED else 1) + column
    a, _slope = value_and_slope(tl.load(z_ptr + at, mask=there, other=0.0).to(ACC), ACTIVATION)
    if GATED:
        a *= tl.load(z_ptr + at + columns, mask=there, other=0.0).to(ACC)
    tl.store(output_ptr + row * columns + column, rounded(a, output_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    grad_ptr, z_ptr, grad_z_ptr, output_ptr, rows, columns, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row, column, there = tile(rows, columns, BLOCK_R, BLOCK_C)
    at = row * columns * (2 if GATED else 1) + column
    dy = tl.load(grad_ptr + row * columns + column, mask=there, other=0.0).to(ACC)
    a, slope = value_and_slope(tl.load(z_ptr + at, mask=there, other=0.0).to(ACC), ACTIVATION)
    element = output_ptr.dtype.element_ty
    if GATED:
        u = tl.load(z_ptr + at + columns, mask=there, other=0.0).to(ACC)
        tl.store(grad_z_ptr + at + columns, rounded(dy * a, element), mask=there)
        slope *= u
        a *= u
    tl.store(grad_z_ptr + at, rounded(dy * slope, element), mask=there)
    tl.store(output_ptr + row * columns + column, rounded(a, element), mask=there)


def ffn_fwd(z, activation, gated):
    """The launcher behind `seqkern::ffn_fwd`: the activation of z."""
    return planned(_plan_forward, (z.contiguous(),), (activation, gated), z.device)[0]


def ffn_bwd(grad_output, z, activation, gated):
    """The launcher behind `seqkern::ffn_bwd`: (grad_z, output)."""
    return planned(_plan_backward, (grad_output.contiguous(), z.contiguous()), (activation, gated), z.device)


def _plan_forward(memory, z, activation, gated):
    output = memory.empty(z, (z.size(0), z.size(1) // (2 if gated else 1)))
    return (output,), [_step("ffn_forward", _forward_kernel, (z, output), output, activation, gated)]


def _plan_backward(memory, grad_output, z, activation, gated):
    grad_z, output = memory.empty(z, z.shape), memory.empty(z, grad_output.shape)
    step = _step("ffn_backward", _backward_kernel, (grad_output, z, grad_z, output), output, activation, gated)
    return (grad_z, output), [step]


def _step(name, kernel, tensors, output, activation, gated):
    rows, columns = output.shape
    block = min(TILE, power_of_two(columns))
    constants = {
        "ACTIVATION": activation, "GATED": gated, "ACC": TRITON_DTYPE[accumulator(output.dtype)],
        "BLOCK_R": TILE // block, "BLOCK_C": block,
    }  # fmt: skip
    grid = (cdiv(rows, TILE // block) * cdiv(columns, block),)
    return Launch(name, kernel, grid, (*tensors, rows, columns), constants, registers=255)


def explained(op, x, w1=None, b1=None, w2=None, b2=None):
    """The launches of a call, forward and backward; nothing is launched."""
    rows = x.reshape(-1, x.shape[-1])
    width = w1.shape[0] if w1 is not None else 4 * rows.shape[1]
    z = rows.new_empty((len(rows), width))
    with noted() as launches:
        ffn_fwd(z, 1, False)
        ffn_bwd(z, z, 1, False)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use no shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        for activation in range(4):
            for gated in (False, True):
                for shape in [(512, 4096), (64, 100)] if thorough else [(512, 4096)]:
                    y = torch.empty(shape, dtype=dtype, device="meta")
                    z = torch.empty((shape[0], shape[1] * (1 + gated)), dtype=dtype, device="meta")
                    plans = (
                        _plan_forward(Memory(), z, activation, gated), _plan_backward(Memory(), y, z, activation, gated)
                    )  # fmt: skip
                    for _, (launch,) in plans:
                        kind = f"{activation}{'-gated' * gated}"
                        yield f"{launch.name}-{kind}-{str(dtype).removeprefix('torch.')}-{shape[1]}", launch
