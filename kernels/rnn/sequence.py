"""A whole sequence in one launch, for hidden sizes whose recurrent weights fit one program.

A program owns one direction and BLOCK_B rows of the batch, and walks all steps. h and c stay in registers. The weights
of 16-bit layers stay in shared memory, loaded once, one (H, H) tensor core operand for each gate. The gates of a hidden
unit are in the same position of their tiles, so threads exchange nothing but h. float32 has no tensor cores: it loads
weights and operands again in slices, from the cache, because whole ones would take hundreds of registers a thread. A
step's input is prefetched one step ahead where registers allow.

Serves lengths, resets and a recurrent mask. Layers with other options run step by step. NOTES.md lists what was tried.
"""

import torch
import triton
import triton.language as tl

from ..._rnn_scan import GATES, Problem
from .._common import TRITON_DTYPE, Launch, aligned, cdiv, dot, power_of_two, rounded
from .cells import (
    GRU,
    INTERPOLATED,
    LSTM,
    activate,
    flags,
    gradients,
    load_tiles,
    new_h,
    position,
    preactivations,
    runs_backwards,
    slab,
    state_before,
    store_tiles,
    tanh,
    time_of,
)
from .plans import strides_of

# Integers that must not be compiled in: new sizes compile nothing.
_SIZES = ["x_strides", "grad_strides", "grad_products_strides", "T", "B", "H", "D"]

# fmt: off
# Signatures are grouped: pointers, strides, sizes, then compile-time constants.


@triton.jit
def _input_tiles(
    x_ptr, x_strides, t, d, row, column, mask, T, H, G: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr
):
    """zx at time t; zeros at times that do not exist."""
    at = aligned(d * x_strides[0] + t * x_strides[1], ALIGNED) + row[:, None] * aligned(x_strides[2], ALIGNED) + column
    return load_tiles(x_ptr + at, H, mask & (t >= 0) & (t < T), G, ACC)


@triton.jit(do_not_specialize=_SIZES)
def sequence_forward_kernel(
    x_ptr, w_hh_ptr, bias_ptr, lengths_ptr, resets_ptr, mask_ptr, h0_ptr, c0_ptr, operand_ptr, output_ptr, h_n_ptr,
    c_n_ptr, cells_ptr, gates_ptr, x_strides, T, B, H, D,
    CELL: tl.constexpr, G: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, SLICE: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """All steps of BLOCK_B sequences in one direction. SLICE 0: weights on chip. `gates` may alias x."""
    H = aligned(H, ALIGNED)
    R: tl.constexpr = G + 1 if CELL == GRU else G
    DTYPE: tl.constexpr = output_ptr.dtype.element_ty
    d, row, _first, column, mask = position(B, H, BLOCK_B, BLOCK_H)
    backwards = runs_backwards(d)
    state = (d * B + row)[:, None] * H + column
    h = tl.load(h0_ptr + state, mask=mask, other=0.0).to(ACC)
    c = tl.zeros([BLOCK_B, BLOCK_H], ACC)
    if CELL == LSTM:
        c = tl.load(c0_ptr + state, mask=mask, other=0.0).to(ACC)
    if mask_ptr is not None:
        factor = tl.load(mask_ptr + state, mask=mask, other=0.0).to(ACC)
    bias = ()
    if bias_ptr is not None:
        bias = load_tiles(bias_ptr + d * (R * H) + column, H, column < H, R, ACC)
    w_hh_ptr += d * (G * H) * H
    unit = tl.arange(0, BLOCK_H)
    weights = ()
    if SLICE == 0:
        for k in tl.static_range(G):
            weight_at = w_hh_ptr + (k * H + unit)[:, None] * H + unit[None, :]
            weight = tl.load(weight_at, mask=(unit < H)[:, None] & (unit < H)[None, :], other=0.0)
            weights += (tl.trans(weight),)
    if AHEAD:
        x = _input_tiles(x_ptr, x_strides, time_of(0, T, backwards), d, row, column, mask, T, H, G, ACC, ALIGNED)
    for step in range(T):
        t = time_of(step, T, backwards)
        _, active, reset = flags(t, backwards, row, row < B, T, B, lengths_ptr, resets_ptr)
        if AHEAD:
            ahead = time_of(step + 1, T, backwards)
            x_ahead = _input_tiles(x_ptr, x_strides, ahead, d, row, column, mask, T, H, G, ACC, ALIGNED)
        elif SLICE == 0:
            x = _input_tiles(x_ptr, x_strides, t, d, row, column, mask, T, H, G, ACC, ALIGNED)
        h = tl.where(reset[:, None], 0.0, h)
        c = tl.where(reset[:, None], 0.0, c)
        operand = rounded(h, DTYPE)
        if mask_ptr is not None:
            operand = rounded(operand.to(ACC) * factor, DTYPE)
        product = ()
        for _ in tl.static_range(G):
            product += (tl.zeros([BLOCK_B, BLOCK_H], ACC),)
        if SLICE == 0:
            zeros = product
            product = ()
            for k in tl.static_range(G):
                product += (dot(operand, weights[k], zeros[k], "ieee"),)
        else:
            tl.store(operand_ptr + state, operand, mask=mask)
            tl.debug_barrier()  # other threads read it than wrote it
            for first in range(0, H, SLICE):
                part = first + tl.arange(0, SLICE)
                left_at = operand_ptr + (d * B + row)[:, None] * H + part[None, :]
                left = tl.load(left_at, mask=(row < B)[:, None] & (part < H)[None, :], other=0.0)
                sums = product
                product = ()
                for k in tl.static_range(G):
                    right_at = w_hh_ptr + (k * H + unit)[:, None] * H + part[None, :]
                    right = tl.load(right_at, mask=(unit < H)[:, None] & (part < H)[None, :], other=0.0)
                    product += (dot(left, tl.trans(right), sums[k], "ieee"),)
        if SLICE > 0:
            x = _input_tiles(x_ptr, x_strides, t, d, row, column, mask, T, H, G, ACC, ALIGNED)
        a = preactivations(x, product, None, None, H, column, mask, 0.0, CELL, G, ACC)
        if bias_ptr is not None:
            z = a
            a = ()
            for k in tl.static_range(R):
                a += (z[k] + bias[k],)
        gates, c_new = activate(a, c, None, H, column, CELL, ACC)
        if CELL == LSTM:
            new = gates[3] * tanh(c_new)
            c = tl.where(active[:, None], c_new, c)
        else:
            new = new_h(gates, h, CELL)
        h = tl.where(active[:, None], new, h)
        if AHEAD:
            x = x_ahead
        tl.debug_barrier()  # aliased memory, and the operand: all reads before any write
        stored = ((d * T + t) * B + row)[:, None]
        if gates_ptr is not None:
            store_tiles(gates_ptr + stored * (R * H) + column, H, mask, gates, R)
        if cells_ptr is not None:
            tl.store(cells_ptr + stored * H + column, tl.where(active[:, None], c, 0.0), mask=mask)
        at = ((t * B + row) * D + d)[:, None] * H + column
        tl.store(output_ptr + at, rounded(tl.where(active[:, None], h, 0.0), DTYPE), mask=mask)
    tl.store(h_n_ptr + state, rounded(h, DTYPE), mask=mask)
    if CELL == LSTM:
        tl.store(c_n_ptr + state, rounded(c, DTYPE), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def sequence_backward_kernel(
    grad_output_ptr, grad_h_n_ptr, grad_c_n_ptr, grad_cells_ptr, gates_ptr, cells_ptr, c0_ptr, output_ptr, h0_ptr,
    w_hh_ptr, lengths_ptr, resets_ptr, mask_ptr, grad_x_ptr, grad_products_ptr, grad_h0_ptr, grad_c0_ptr,
    grad_strides, grad_products_strides, T, B, H, D,
    CELL: tl.constexpr, G: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, SLICE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """All steps of BLOCK_B sequences in one direction, last step first. SLICE 0: weights on chip."""
    H = aligned(H, ALIGNED)
    R: tl.constexpr = G + 1 if CELL == GRU else G
    DTYPE: tl.constexpr = grad_x_ptr.dtype.element_ty
    d, row, _first, column, mask = position(B, H, BLOCK_B, BLOCK_H)
    backwards = runs_backwards(d)
    state = (d * B + row)[:, None] * H + column
    later = tl.zeros([BLOCK_B, BLOCK_H], ACC)
    if grad_h_n_ptr is not None:
        later = tl.load(grad_h_n_ptr + state, mask=mask, other=0.0).to(ACC)
    later_c = tl.zeros([BLOCK_B, BLOCK_H], ACC)
    if grad_c_n_ptr is not None:
        later_c = tl.load(grad_c_n_ptr + state, mask=mask, other=0.0).to(ACC)
    if mask_ptr is not None:
        factor = tl.load(mask_ptr + state, mask=mask, other=0.0).to(ACC)
    w_hh_ptr += d * (G * H) * H
    unit = tl.arange(0, BLOCK_H)
    weights = ()
    if SLICE == 0:
        for k in tl.static_range(G):
            weight_at = w_hh_ptr + (k * H + unit)[:, None] * H + unit[None, :]
            weights += (tl.load(weight_at, mask=(unit < H)[:, None] & (unit < H)[None, :], other=0.0),)
    for step in range(T):
        t = time_of(T - 1 - step, T, backwards)
        length, active, reset = flags(t, backwards, row, row < B, T, B, lengths_ptr, resets_ptr)
        live = mask & active[:, None]
        stored = ((d * T + t) * B + row)[:, None]
        gates = load_tiles(gates_ptr + stored * (R * H) + column, H, live, R, ACC)
        grad = later
        if grad_output_ptr is not None:
            at = aligned(t * grad_strides[0], ALIGNED) + row * aligned(grad_strides[1], ALIGNED) + d * H
            grad += tl.load(grad_output_ptr + at[:, None] + column, mask=live, other=0.0).to(ACC)
        if CELL == LSTM:
            i, f, g, o = gates
            before = (d * T + t - 1 + 2 * backwards) * B + row
            c = state_before(cells_ptr, before, c0_ptr, t, backwards, d, row, column, live, length, reset, B, H, ACC)
            tanh_c = tanh(f * c + i * g)
            grad_c = later_c
            if grad_cells_ptr is not None:
                grad_c += tl.load(grad_cells_ptr + stored * H + column, mask=live, other=0.0).to(ACC)
            grad_c += grad * o * (1.0 - tanh_c * tanh_c)
            of_x = (
                grad_c * g * i * (1.0 - i), grad_c * c * f * (1.0 - f), grad_c * i * (1.0 - g * g),
                grad * tanh_c * o * (1.0 - o),
            )
            of_h = of_x
            later_c = tl.where(reset[:, None], 0.0, tl.where(active[:, None], grad_c * f, later_c))
            beside = tl.zeros([BLOCK_B, BLOCK_H], ACC)
        else:
            h = grad
            if CELL == GRU or CELL == INTERPOLATED:  # noqa: SIM109
                before = ((t - 1 + 2 * backwards) * B + row) * D + d
                h = state_before(
                    output_ptr, before, h0_ptr, t, backwards, d, row, column, live, length, reset, B, H, ACC
                )
            of_x, of_h, beside = gradients(gates, h, grad, CELL)
        x_tiles = ()
        h_tiles = ()
        for k in tl.static_range(G):
            x_tiles += (rounded(tl.where(active[:, None], of_x[k], 0.0), DTYPE),)
            h_tiles += (rounded(tl.where(active[:, None], of_h[k], 0.0), DTYPE),)
        at_x = grad_x_ptr + ((t * B + row) * D + d)[:, None] * (G * H)
        store_tiles(at_x + column, H, mask, x_tiles, G)
        at_h = at_x
        if grad_products_ptr is not None:
            at_h = d * grad_products_strides[0] + slab(t, d, T) * grad_products_strides[1] + row * (G * H)
            at_h = grad_products_ptr + at_h[:, None]
            store_tiles(at_h + column, H, mask, h_tiles, G)
        back = tl.zeros([BLOCK_B, BLOCK_H], ACC)
        if SLICE == 0:
            for k in tl.static_range(G):
                back = dot(h_tiles[k], weights[k], back, "ieee")
        else:
            tl.debug_barrier()  # other threads read them than wrote them
            for k in tl.static_range(G):
                for first in range(0, H, SLICE):
                    part = first + tl.arange(0, SLICE)
                    left_at = at_h + k * H + part[None, :]
                    left = tl.load(left_at, mask=(row < B)[:, None] & (part < H)[None, :], other=0.0)
                    right_at = w_hh_ptr + (k * H + part)[:, None] * H + unit[None, :]
                    right = tl.load(right_at, mask=(part < H)[:, None] & (unit < H)[None, :], other=0.0)
                    back = dot(left, right, back, "ieee")
            tl.debug_barrier()  # all steps may share the memory of one
        if mask_ptr is not None:
            back *= factor
        later = tl.where(reset[:, None], 0.0, tl.where(active[:, None], beside + back, later))
    tl.store(grad_h0_ptr + state, rounded(later, DTYPE), mask=mask)
    if CELL == LSTM:
        tl.store(grad_c0_ptr + state, rounded(later_c, DTYPE), mask=mask)

# fmt: on
# ---- plans --------------------------------------------------------------------------------------------------------


def takes_sequence(problem, limit):
    """Whether these kernels serve the problem on a device with `limit` bytes of shared memory."""
    options = problem.norm is not None or problem.peephole is not None or problem.zoneout_h or problem.zoneout_c
    block_h = _block(problem)
    if options or problem.dtype == torch.float64:
        return False
    if block_h > 64 and problem.h % 8:  # elements loaded one by one would spill
        return False
    if problem.dtype == torch.float32:
        return block_h <= 128
    if block_h > (128 if GATES[problem.cell] > 1 else 256):
        return False
    # Shared memory holds the weights as operands, and beside them h or the gates' gradients.
    return 2 * block_h * (GATES[problem.cell] * block_h + 96) <= limit


def _block(problem):
    return max(16, power_of_two(problem.h))


def tile(problem):
    """(constants, warps), chosen so that nothing spills."""
    block_h = _block(problem)
    warps = 8 if block_h > 32 or (block_h == 32 and problem.dtype == torch.float32) else 4
    if problem.dtype == torch.float32:
        return {"SLICE": 16, "BLOCK_B": 16 if block_h <= 64 else 8, "BLOCK_H": block_h}, warps
    return {"SLICE": 0, "BLOCK_B": 16, "BLOCK_H": block_h}, warps


def _plan(name, kernel, problem, pointers, strides):
    blocks, warps = tile(problem)
    constants = {
        "CELL": problem.cell,
        "G": GATES[problem.cell],
        "ACC": TRITON_DTYPE[problem.acc],
        "ALIGNED": all(n % 8 == 0 for n in (problem.h, *(n for each in strides for n in each))),
        **blocks,
    }
    if kernel is sequence_forward_kernel:
        constants["AHEAD"] = blocks["SLICE"] == 0 and blocks["BLOCK_H"] <= 64
    grid = (problem.d * cdiv(problem.b, blocks["BLOCK_B"]),)
    sizes = (problem.t, problem.b, problem.h, problem.d)
    return Launch(f"rnn_{name}", kernel, grid, (*pointers, *strides, *sizes), constants, warps, registers=255)


def plan_forward(problem: Problem, x, h0, c0, w_hh, output, cells, gates):
    """(h_n, c_n), and the launch that writes them."""
    h_n = torch.empty_like(h0)
    c_n = None if c0 is None else torch.empty_like(h0)
    operand = h0 if problem.dtype.itemsize == 2 else torch.empty_like(h0)
    pointers = (
        x, w_hh, problem.bias, problem.lengths, problem.resets, problem.mask, h0, c0, operand, output, h_n, c_n, cells,
        gates,
    )  # fmt: skip
    launch = _plan("sequence_forward", sequence_forward_kernel, problem, pointers, (strides_of(x),))
    return (h_n, c_n), [launch]


def plan_backward(
    problem: Problem, grad_output, grad_h_n, grad_c_n, grad_cells, gates, cells, c0, output, h0, w_hh, grad_x,
    grad_products,
):  # fmt: skip
    """(grad_h0, grad_c0), and the launch that writes them."""
    grad_h0 = torch.empty_like(h0)
    grad_c0 = None if c0 is None else torch.empty_like(h0)
    grad_h_n, grad_c_n = (None if each is None else each.contiguous() for each in (grad_h_n, grad_c_n))
    pointers = (
        grad_output, grad_h_n, grad_c_n, grad_cells, gates, cells, c0, output, h0, w_hh, problem.lengths,
        problem.resets, problem.mask, grad_x, grad_products, grad_h0, grad_c0,
    )  # fmt: skip
    strides = tuple((0, 0) if s is None else tuple(s.stride()[:2]) for s in (grad_output, grad_products))
    launch = _plan("sequence_backward", sequence_backward_kernel, problem, pointers, strides)
    return (grad_h0, grad_c0), [launch]
