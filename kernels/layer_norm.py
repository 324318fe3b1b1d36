"""Layer norm in Triton, forward and backward.

    y = (x - mu) * rstd * weight + bias,  rstd = 1 / sqrt(var + eps)     Ba et al. 2016; Jurafsky & Martin 9.39-9.42
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * weight,  xhat = (x - mu) * rstd
    dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy

Exact at any mean, as the CPU kernel is: deviations d = x - mean first, then their own mean `shift`, which is what the
rounding of `mean` left; var = mean(d^2) - shift^2 and xhat = (d - shift) * rstd, in both directions.

A row that fits a program's registers is read once; several short rows share a program. A longer row is read in pieces:
three times forward, twice backward, from L2 after the first. Backward runs a fixed number of programs, two a
multiprocessor, each of which sums its rows' parameter gradients in registers; their partial sums are added by one
torch.sum. For long rows those sums are a kernel of their own over (column block, run of rows).

The number of rows is never specialised: a new batch size compiles nothing. Not timed on a GPU yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, multiprocessors, run, scalar, unit_last

WHOLE_ROW_BYTES = 32 * 1024  # in the accumulation dtype: longer rows are read in pieces
PIECE = 4096  # columns of a piece
COLUMNS, RUNS = 128, 64  # a column block, and the most runs of rows, of the parameter gradients of long rows
_SIZES = ["rows", "input_stride", "grad_stride", "run"]


@triton.jit
def _moments(d, inverse):
    """Of the deviations (ROWS, BLOCK): their mean, which is the error of the rounded mean, and the variance."""
    shift = tl.sum(d, 1) * inverse
    return shift, tl.maximum(tl.sum(d * d, 1) * inverse - shift * shift, 0.0)


@triton.jit
def _parameter(pointer, column, mask, ACC: tl.constexpr, DEFAULT: tl.constexpr):
    """A row of weight or bias, (1, BLOCK), or its default where there is none."""
    if pointer is None:
        return tl.full([1, column.shape[0]], DEFAULT, ACC)
    else:
        return tl.load(pointer + column, mask=mask, other=0.0).to(ACC)[None, :]


@triton.jit(do_not_specialize=_SIZES)
def _forward_kernel(
    input_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    mean_ptr,
    rstd_ptr,
    eps: tl.float64,
    rows,
    N,
    input_stride,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    columns = column < N
    mask = (row < rows)[:, None] & columns[None, :]
    inverse = 1.0 / scalar(N, ACC)
    x = tl.load(input_ptr + row[:, None] * input_stride + column[None, :], mask=mask, other=0.0).to(ACC)
    mean = tl.sum(x * inverse, 1)
    d = tl.where(columns[None, :], x - mean[:, None], 0.0)
    shift, variance = _moments(d, inverse)
    rstd = 1.0 / tl.sqrt(variance + scalar(eps, ACC))
    weight = _parameter(weight_ptr, column, columns, ACC, 1.0)
    bias = _parameter(bias_ptr, column, columns, ACC, 0.0)
    y = (d - shift[:, None]) * rstd[:, None] * weight + bias
    tl.store(output_ptr + row[:, None] * N + column[None, :], y.to(output_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=_SIZES)
def _forward_long_kernel(
    input_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    mean_ptr,
    rstd_ptr,
    eps: tl.float64,
    rows,
    N,
    input_stride,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, in pieces of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_stride
    output_ptr += row * N
    inverse = 1.0 / scalar(N, ACC)
    total = tl.zeros([BLOCK], ACC)
    for first in range(0, N, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total += tl.load(input_ptr + column, mask=column < N, other=0.0).to(ACC) * inverse
    mean = tl.sum(total, 0)
    total = tl.zeros([BLOCK], ACC)
    squares = tl.zeros([BLOCK], ACC)
    for first in range(0, N, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(input_ptr + column, mask=column < N, other=0.0).to(ACC)
        d = tl.where(column < N, x - mean, 0.0)
        total += d
        squares += d * d
    shift = tl.sum(total, 0) * inverse
    rstd = 1.0 / tl.sqrt(tl.maximum(tl.sum(squares, 0) * inverse - shift * shift, 0.0) + scalar(eps, ACC))
    for first in range(0, N, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = column < N
        y = (tl.load(input_ptr + column, mask=mask, other=0.0).to(ACC) - mean - shift) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(ACC)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(ACC)
        tl.store(output_ptr + column, y.to(output_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit(do_not_specialize=_SIZES)
def _backward_kernel(
    grad_ptr,
    input_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    grad_input_ptr,
    weight_partial_ptr,  # (programs, N) or None
    bias_partial_ptr,
    rows,
    N,
    grad_stride,
    input_stride,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    columns = column < N
    inverse = 1.0 / scalar(N, ACC)
    weight = _parameter(weight_ptr, column, columns, ACC, 1.0)
    weight_sum = tl.zeros([BLOCK], ACC)
    bias_sum = tl.zeros([BLOCK], ACC)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & columns[None, :]
        dy = tl.load(grad_ptr + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(ACC)
        x = tl.load(input_ptr + row[:, None] * input_stride + column[None, :], mask=mask, other=0.0).to(ACC)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        d = tl.where(mask, x - mean, 0.0)
        xhat = tl.where(mask, (d - (tl.sum(d, 1) * inverse)[:, None]) * rstd, 0.0)
        g = dy * weight
        mean_g = (tl.sum(g, 1) * inverse)[:, None]
        mean_gx = (tl.sum(g * xhat, 1) * inverse)[:, None]
        dx = (g - mean_g - xhat * mean_gx) * rstd
        tl.store(grad_input_ptr + row[:, None] * N + column[None, :], dx.to(grad_input_ptr.dtype.element_ty), mask=mask)
        if weight_partial_ptr is not None:
            weight_sum += tl.sum(dy * xhat, 0)
        if bias_partial_ptr is not None:
            bias_sum += tl.sum(dy, 0)
    partial = tl.program_id(0).to(tl.int64) * N + column
    if weight_partial_ptr is not None:
        tl.store(weight_partial_ptr + partial, weight_sum, mask=columns)
    if bias_partial_ptr is not None:
        tl.store(bias_partial_ptr + partial, bias_sum, mask=columns)


@triton.jit(do_not_specialize=_SIZES)
def _backward_long_kernel(
    grad_ptr,
    input_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    grad_input_ptr,
    shift_ptr,  # (rows), for the parameter gradients
    rows,
    N,
    grad_stride,
    input_stride,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, in pieces: mean(g * xhat) = rstd * (mean(g * d) - shift * mean(g))."""
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_stride
    input_ptr += row * input_stride
    grad_input_ptr += row * N
    inverse = 1.0 / scalar(N, ACC)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    sum_d = tl.zeros([BLOCK], ACC)
    sum_g = tl.zeros([BLOCK], ACC)
    sum_gd = tl.zeros([BLOCK], ACC)
    for first in range(0, N, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = column < N
        g = tl.load(grad_ptr + column, mask=mask, other=0.0).to(ACC)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(ACC)
        d = tl.where(mask, tl.load(input_ptr + column, mask=mask, other=0.0).to(ACC) - mean, 0.0)
        sum_d += d
        sum_g += g
        sum_gd += g * d
    shift = tl.sum(sum_d, 0) * inverse
    mean_g = tl.sum(sum_g, 0) * inverse
    mean_gx = (tl.sum(sum_gd, 0) * inverse - shift * mean_g) * rstd
    tl.store(shift_ptr + row, shift)
    for first in range(0, N, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = column < N
        g = tl.load(grad_ptr + column, mask=mask, other=0.0).to(ACC)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(ACC)
        xhat = (tl.load(input_ptr + column, mask=mask, other=0.0).to(ACC) - mean - shift) * rstd
        dx = (g - mean_g - xhat * mean_gx) * rstd
        tl.store(grad_input_ptr + column, dx.to(grad_input_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def _parameters_long_kernel(
    grad_ptr,
    input_ptr,
    mean_ptr,
    rstd_ptr,
    shift_ptr,
    weight_partial_ptr,  # (runs, N) or None
    bias_partial_ptr,
    rows,
    N,
    grad_stride,
    input_stride,
    run,  # rows of a run
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of columns over a run of rows, ROWS at a time."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = column < N
    begin = tl.program_id(1).to(tl.int64) * run
    end = tl.minimum(begin + run, rows)
    weight_sum = tl.zeros([BLOCK], ACC)
    bias_sum = tl.zeros([BLOCK], ACC)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < end)[:, None] & columns[None, :]
        dy = tl.load(grad_ptr + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(ACC)
        if weight_partial_ptr is not None:
            x = tl.load(input_ptr + row[:, None] * input_stride + column[None, :], mask=mask, other=0.0).to(ACC)
            mean = tl.load(mean_ptr + row, mask=row < end, other=0.0)[:, None]
            shift = tl.load(shift_ptr + row, mask=row < end, other=0.0)[:, None]
            rstd = tl.load(rstd_ptr + row, mask=row < end, other=0.0)[:, None]
            weight_sum += tl.sum(tl.where(mask, dy * ((x - mean - shift) * rstd), 0.0), 0)
        bias_sum += tl.sum(dy, 0)
    partial = tl.program_id(1).to(tl.int64) * N + column
    if weight_partial_ptr is not None:
        tl.store(weight_partial_ptr + partial, weight_sum, mask=columns)
    if bias_partial_ptr is not None:
        tl.store(bias_partial_ptr + partial, bias_sum, mask=columns)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _tile(columns, acc):
    """Of the kernels that hold whole rows: rows and columns of a tile, warps. None where the row is too long."""
    block = max(32, triton.next_power_of_2(columns))
    if block * acc.itemsize > WHOLE_ROW_BYTES:
        return None
    rows = max(1, 1024 // block)
    return rows, block, min(16, max(1, rows * block * acc.itemsize // 2048))


def _launch(kernel, grid, arguments, constants, warps):
    return Launch(
        f"layer_norm_{kernel.__name__.strip('_').removesuffix('_kernel')}", kernel, grid, arguments, constants, warps
    )


def _forward_plan(input, weight, bias, output, mean, rstd, eps):
    (rows, columns), acc = input.shape, mean.dtype
    arguments = (input, weight, bias, output, mean, rstd, eps, rows, columns, input.stride(0))
    constants = {"ACC": TRITON_DTYPE[acc]}
    if tile := _tile(columns, acc):
        block_rows, block, warps = tile
        constants |= {"ROWS": block_rows, "BLOCK": block}
        return [_launch(_forward_kernel, (triton.cdiv(rows, block_rows),), arguments, constants, warps)]
    return [_launch(_forward_long_kernel, (rows,), arguments, constants | {"BLOCK": PIECE}, 8)]


def _backward_programs(rows, columns, acc, device):
    """How many partial sums of the parameter gradients there are."""
    if tile := _tile(columns, acc):
        return min(2 * multiprocessors(device), triton.cdiv(rows, tile[0]))
    return min(RUNS, triton.cdiv(rows, 16))


def _backward_plan(grad_output, input, mean, rstd, weight, grad_input, shift, weight_partial, bias_partial, programs):
    (rows, columns), acc = input.shape, mean.dtype
    sizes = (rows, columns, grad_output.stride(0), input.stride(0))
    constants = {"ACC": TRITON_DTYPE[acc]}
    if tile := _tile(columns, acc):
        block_rows, block, warps = tile
        constants |= {"ROWS": block_rows, "BLOCK": block}
        arguments = (grad_output, input, mean, rstd, weight, grad_input, weight_partial, bias_partial, *sizes)
        return [_launch(_backward_kernel, (programs,), arguments, constants, warps)]
    arguments = (grad_output, input, mean, rstd, weight, grad_input, shift, *sizes)
    plan = [_launch(_backward_long_kernel, (rows,), arguments, constants | {"BLOCK": PIECE}, 8)]
    if weight_partial is not None or bias_partial is not None:
        run_rows = triton.cdiv(rows, max(1, programs))
        arguments = (grad_output, input, mean, rstd, shift, weight_partial, bias_partial, *sizes, run_rows)
        grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, max(1, run_rows)))
        plan.append(_launch(_parameters_long_kernel, grid, arguments, constants | {"ROWS": 16, "BLOCK": COLUMNS}, 4))
    return plan


def layer_norm_fwd(input, weight, bias, eps):
    input = unit_last(input)
    rows, columns = input.shape
    weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
    output = input.new_empty(rows, columns)
    mean = input.new_empty(rows, dtype=accumulator(input.dtype))
    rstd = torch.empty_like(mean)
    if columns:
        run(_forward_plan(input, weight, bias, output, mean, rstd, eps), input.device)
    return output, mean, rstd


def layer_norm_bwd(grad_output, input, mean, rstd, weight, need_weight, need_bias):
    grad_output, input = unit_last(grad_output), unit_last(input)
    rows, columns = input.shape
    acc = accumulator(input.dtype)
    programs = _backward_programs(rows, columns, acc, input.device) if columns else 0
    grad_input = input.new_empty(rows, columns)
    shift = torch.empty_like(mean)
    partial = [input.new_empty(programs, columns, dtype=acc) if need else None for need in (need_weight, need_bias)]
    if rows and columns:
        weight_rows = None if weight is None else weight.contiguous()
        plan = _backward_plan(grad_output, input, mean.contiguous(), rstd.contiguous(), weight_rows, grad_input, shift,
                              *partial, programs)  # fmt: skip
        run(plan, input.device)
    dtype = input.dtype if weight is None else weight.dtype
    return grad_input, *(input.new_empty(0, dtype=dtype) if p is None else p.sum(0).to(dtype) for p in partial)
