"""Tiles and arguments of the recurrent kernels, chosen before a launch from shapes, dtypes and options alone."""

import torch

from ..._rnn_scan import GATES, Problem
from .._common import TRITON_DTYPE, Launch, cdiv, dropout_scalars, power_of_two
from . import steps

_CELLS = 512  # elements of a tile: 4 a thread, so that the few thousand of a step spread over the whole device


def check(problem):
    """Raises NotImplementedError where a row of layer norm is too long for one program."""
    if problem.norm is not None and problem.h > longest(problem.acc):
        raise NotImplementedError(
            f"seqkern rnn: with layer norm the Triton kernels take hidden sizes up to {longest(problem.acc)} in "
            f'{problem.dtype}, got {problem.h}; use_backend("reference") runs any'
        )


def single(h, cell):
    """One step of one direction, without options."""
    b, columns = h.shape
    return Problem(cell, h.dtype, 1, b, columns, columns, 1, *(None,) * 7, 0.0, 0.0, 0.0, h.device)


def longest(acc):
    """The longest rows that a program normalises: the backward kernel keeps some twenty tiles of them in registers."""
    return 1024 if acc == torch.float64 else 2048


def _step(name, kernel, problem, pointers, numbers, strides, columns, constants, rows=None, whole=False, step=None):
    """One launch over the tiles of (rows, columns) of all directions; `numbers` are its scalars in order."""
    rows = problem.b if rows is None else rows
    if whole:
        # At most 255 registers for each thread: 8 warps of them hold the rows of four gates, 16 of half as many spill.
        block_h = max(16, power_of_two(columns))
        warps = min(8, max(4, block_h // 128))
    else:
        block_h, warps = min(128, max(16, power_of_two(columns))), 4
    cells = _CELLS // 2 if whole and problem.acc == torch.float64 else _CELLS
    constants = {
        **constants,
        "ACC": TRITON_DTYPE[problem.acc],
        "ALIGNED": all(n % 8 == 0 for n in (columns, *strides)),
        "BLOCK_B": max(1, cells // block_h),
        "BLOCK_H": block_h,
    }
    grid = (problem.d * cdiv(rows, constants["BLOCK_B"]) * cdiv(columns, block_h),)
    sizes = (problem.t, problem.b, columns, problem.d)
    last = () if step is None else (step,)
    return Launch(f"rnn_{name}", kernel, grid, (*pointers, *numbers, *sizes, *last), constants, warps, registers=255)


def _threshold(probability):
    return dropout_scalars(probability)[1]


def _cell_constants(problem):
    return {"CELL": problem.cell, "G": GATES[problem.cell], "EXPECTED": problem.expected}


def strides_of(x):
    """Strides of directions, times and rows of (D, T, B, .). (B, .) is one step of one direction."""
    return (0, 0, x.stride(0)) if x.dim() == 2 else tuple(x.stride()[:3])


def cell_forward(
    problem, x, product, h, c, h_new, c_new, operand=None, output=None, cells=None, gates=None, products=None,
    hidden=None,
):  # fmt: skip
    """x (D, T, B, G H), or (B, G H); product (D B, G H); h, c (D B, H), which like their new values may be
    non-contiguous."""
    pointers = (
        x, product, problem.bias, problem.norm, problem.peephole, problem.lengths, problem.resets, problem.mask,
        problem.seed, h, c, h_new, c_new, operand, output, cells, gates, products, hidden,
    )  # fmt: skip
    strides = (*strides_of(x), product.stride(0), *(0 if s is None else s.stride(0) for s in (h, c)))
    numbers = (
        strides[:3], *strides[3:], _threshold(problem.zoneout_h), _threshold(problem.zoneout_c), problem.zoneout_h,
        problem.zoneout_c, problem.eps,
    )  # fmt: skip
    whole = problem.norm is not None
    return _step(
        "cell_forward", steps.cell_forward_kernel, problem, pointers, numbers, strides, problem.h,
        _cell_constants(problem), whole=whole, step=0,
    )  # fmt: skip


def state_forward(problem, projected, h, operand, output):
    pointers = (projected, problem.lengths, problem.resets, problem.mask, problem.seed, h, operand, output)
    numbers = (_threshold(problem.zoneout_h), problem.zoneout_h)
    constants = {"EXPECTED": problem.expected}
    return _step(
        "state_forward", steps.state_forward_kernel, problem, pointers, numbers, (), problem.p, constants, step=0
    )


def operands(problem, output, h0, result):
    pointers = (output, h0, problem.lengths, problem.resets, problem.mask, result)
    rows = problem.t * problem.b
    return _step("operands", steps.operand_kernel, problem, pointers, (), (), problem.p, {}, rows)


def all_gates(problem, x, products, c0, cells, gates, kept):
    pointers = (
        x, products, problem.bias, problem.norm, problem.peephole, problem.lengths, problem.resets, c0, cells, gates,
        kept,
    )  # fmt: skip
    strides = strides_of(x)
    constants = {"CELL": problem.cell, "G": GATES[problem.cell]}
    return _step(
        "gates", steps.gates_kernel, problem, pointers, (strides, problem.eps), strides, problem.h, constants,
        problem.t * problem.b, whole=problem.norm is not None,
    )  # fmt: skip


def cell_backward(
    problem, grad_output, direct, recurrent, grad_hidden, grad_c, grad_cells, gates, cells, c0, output, h0, products,
    grad_x, grad_h_gates, direct_new, grad_c_new, hidden, norm_sums, peephole_sums,
):  # fmt: skip
    """grad_output (T, B, D P); direct, grad_c (D B, H); grad_h_gates (D, T, B, G H), hidden (D, T, B, H)."""
    pointers = (
        grad_output, direct, recurrent, grad_hidden, grad_c, grad_cells, gates, cells, c0, output, h0, products,
        problem.norm, problem.peephole, problem.lengths, problem.resets, problem.mask, problem.seed, grad_x,
        grad_h_gates, direct_new, grad_c_new, hidden, norm_sums, peephole_sums,
    )  # fmt: skip
    strides = (
        *_pair(grad_output), *(0 if s is None else s.stride(0) for s in (direct, grad_c)), *_pair(grad_h_gates),
        *_pair(hidden),
    )  # fmt: skip
    numbers = (
        strides[:2], *strides[2:4], strides[4:6], strides[6:8], _threshold(problem.zoneout_h),
        _threshold(problem.zoneout_c), problem.zoneout_h, problem.zoneout_c, problem.eps,
    )  # fmt: skip
    return _step(
        "cell_backward", steps.cell_backward_kernel, problem, pointers, numbers, strides, problem.h,
        _cell_constants(problem), whole=problem.norm is not None, step=0,
    )  # fmt: skip


def _pair(tensor):
    """The first two strides; (0, 0) for None."""
    return (0, 0) if tensor is None else tuple(tensor.stride()[:2])


def state_backward(problem, grad_output, direct, recurrent, grad_new):
    pointers = (
        grad_output, direct, recurrent, problem.lengths, problem.resets, problem.mask, problem.seed, grad_new,
    )  # fmt: skip
    strides = (*_pair(grad_output), *_pair(grad_new))
    numbers = (strides[:2], strides[2:], _threshold(problem.zoneout_h), problem.zoneout_h)
    constants = {"EXPECTED": problem.expected}
    return _step(
        "state_backward", steps.state_backward_kernel, problem, pointers, numbers, strides, problem.p, constants,
        step=0,
    )  # fmt: skip


def first_state(problem, direct, recurrent, grad_h0):
    pointers = (direct, recurrent, problem.lengths, problem.resets, problem.mask, grad_h0)
    return _step("first_state", steps.first_state_kernel, problem, pointers, (), (), problem.p, {})
