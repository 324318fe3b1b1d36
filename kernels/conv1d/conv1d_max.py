"""A convolution and its maximum over time in Triton.

  forward      a program takes some filters of a sequence and walks its windows: a product of (windows, K D) and (K D,
               filters) with the running maximum and its window in registers
  grad_x       a tile of rows and features: the products of a matrix of slopes, of which a row has those of the filters
               whose window begins k rows before, with the filters' rows k
  grad_weight  some numbers of a filter: the sum over the sequences of slope times the window's numbers, in their order

No atomics. Equations and sources: seqkern/reference/conv1d.py.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from .._common import TRITON_DTYPE, Launch, accumulator, cdiv, dot, rounded
from .._replay import Memory, planned
from ..rnn.cells import sigmoid, tanh
from ..sequence_pool import sequence

BLOCK_T, BLOCK_C, BLOCK_D = 32, 32, 32  # windows or rows, filters, features of a tile
NUMBERS = 128  # of a filter, that a program sums
SIZES = ["rows", "columns", "width", "filters", "batch_stride", "batch"]  # not compiled in


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, lengths_ptr, starts_ptr, output_ptr, z_ptr, index_ptr, rows, columns, width, filters,
    batch_stride, ACTIVATION: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    filter = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = filter < filters
    first, length = sequence(b, lengths_ptr, starts_ptr, rows)
    x = x_ptr + b * batch_stride + first * columns
    depth = width * columns
    numbers = length * columns  # of the sequence; zeros are behind them
    windows = tl.maximum(length - width + 1, 1)
    best = tl.full([BLOCK_C], float("-inf"), ACC)
    at = tl.full([BLOCK_C], -1, tl.int64)
    for t in range(0, windows, BLOCK_T):
        window = t + tl.arange(0, BLOCK_T).to(tl.int64)
        there = window < windows
        sums = tl.zeros([BLOCK_T, BLOCK_C], ACC)
        for d in range(0, depth, BLOCK_D):
            number = d + tl.arange(0, BLOCK_D)
            inside = number < depth
            place = window[:, None] * columns + number[None, :]
            a = tl.load(x + place, mask=there[:, None] & inside[None, :] & (place < numbers), other=0.0)
            w = tl.load(
                weight_ptr + filter[None, :].to(tl.int64) * depth + number[:, None],
                mask=live[None, :] & inside[:, None], other=0.0,
            )  # fmt: skip
            sums = dot(a, w, sums, PRECISION)
        nan = there[:, None] & (sums != sums)
        largest = tl.max(tl.where(there[:, None] & (sums == sums), sums, float("-inf")), 0)
        some = tl.max(nan.to(tl.int32), 0) > 0
        chosen = tl.where(some[None, :], nan, there[:, None] & (sums == largest[None, :]))
        row = tl.min(tl.where(chosen, window[:, None], windows), 0)
        value = tl.where(some, float("nan"), largest).to(ACC)
        better = (at < 0) | (value > best) | (some & (best == best))
        best = tl.where(better, value, best)
        at = tl.where(better, row, at)
    if bias_ptr is not None:
        best += tl.load(bias_ptr + filter, mask=live, other=0.0)
    target = b * filters + filter
    tl.store(z_ptr + target, best, mask=live)
    tl.store(index_ptr + target, at.to(tl.int32), mask=live)
    y = best
    if ACTIVATION == 1:
        y = tl.where(best < 0, 0.0, best)
    elif ACTIVATION == 2:
        y = tanh(best)
    elif ACTIVATION == 3:
        y = sigmoid(best)
    tl.store(output_ptr + target, rounded(y.to(ACC), output_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=SIZES)
def _grad_x_kernel(
    weight_ptr, lengths_ptr, starts_ptr, slopes_ptr, index_ptr, grad_ptr, rows, columns, width, filters,
    ACC: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Features of a sequence's rows; of a padded one also those behind it."""
    b = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = column < columns
    first, length = sequence(b, lengths_ptr, starts_ptr, rows)
    end = length
    target = grad_ptr + column
    if starts_ptr is not None:
        target += first * columns
    else:
        end = length * 0 + rows
        target += b * rows * columns
    for t in range(0, end, BLOCK_T):
        row = t + tl.arange(0, BLOCK_T).to(tl.int64)
        sums = tl.zeros([BLOCK_T, BLOCK_D], ACC)
        for c in range(0, filters, BLOCK_C):
            filter = c + tl.arange(0, BLOCK_C)
            known = filter < filters
            slope = tl.load(slopes_ptr + b * filters + filter, mask=known, other=0.0)
            at = tl.load(index_ptr + b * filters + filter, mask=known, other=-1).to(tl.int64)
            for k in range(width):
                here = (row[:, None] == at[None, :] + k) & (row < length)[:, None] & known[None, :]
                g = tl.where(here, slope[None, :], 0.0).to(ACC)
                w = tl.load(
                    weight_ptr + (filter[:, None].to(tl.int64) * width + k) * columns + column[None, :],
                    mask=known[:, None] & live[None, :], other=0.0,
                ).to(ACC)  # fmt: skip
                sums = dot(g, w, sums, PRECISION)
        tl.store(
            target[None, :] + row[:, None] * columns, rounded(sums, grad_ptr.dtype.element_ty),
            mask=(row < end)[:, None] & live[None, :],
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _grad_weight_kernel(
    x_ptr, lengths_ptr, starts_ptr, slopes_ptr, index_ptr, grad_ptr, rows, columns, width, filters, batch_stride, batch,
    ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    filter = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = width * columns
    sums = tl.zeros([BLOCK_N], ACC)
    for n in range(batch):
        b = tl.cast(n, tl.int64)
        first, length = sequence(b, lengths_ptr, starts_ptr, rows)
        at = tl.load(index_ptr + b * filters + filter).to(tl.int64) * columns
        x = x_ptr + b * batch_stride + first * columns + at + number
        inside = (number < depth) & (at + number < length * columns)
        sums += tl.load(slopes_ptr + b * filters + filter) * tl.load(x, mask=inside, other=0.0).to(ACC)
    tl.store(grad_ptr + filter * depth + number, rounded(sums, grad_ptr.dtype.element_ty), mask=number < depth)


def conv1d_max_fwd(x, weight, bias, lengths, starts, activation):
    """The launcher behind `seqkern::conv1d_max_fwd`: (output, z, index)."""
    tensors = (x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), lengths, starts)
    return planned(_plan_forward, tensors, (activation,), x.device)


def conv1d_max_bwd(grad_output, x, weight, lengths, starts, z, index, activation, need_x, need_weight):
    """The launcher behind `seqkern::conv1d_max_bwd`: (grad_x, grad_weight, slopes)."""
    slopes = grad_output.to(z.dtype)
    if activation == 1:
        slopes = torch.where(z > 0, slopes, 0)
    elif activation == 2:
        slopes = slopes * (1 - z.tanh().square())
    elif activation == 3:
        slopes = slopes * z.sigmoid() * (-z).sigmoid()
    slopes, index = slopes.contiguous(), index.contiguous()
    of_x, of_weight = x.new_empty(0), x.new_empty(0)
    if need_x:
        tensors = (x, weight.contiguous(), lengths, starts, slopes, index)
        of_x = planned(_plan_grad_x, tensors, (), x.device)[0]
        if starts is not None:  # rows of no sequence
            row = torch.arange(x.size(0), device=x.device)
            of_x.masked_fill_(((row < starts[0]) | (row >= starts[-1]))[:, None], 0)
    if need_weight:
        of_weight = planned(_plan_grad_weight, (x.contiguous(), weight, lengths, starts, slopes, index), (), x.device)[
            0
        ]
    return of_x, of_weight, slopes


def _sizes(x, weight):
    return x.size(-2), x.size(-1), weight.size(1), weight.size(0)


def _constants(dtype):
    acc = accumulator(dtype)
    small = {"BLOCK_T": 16, "BLOCK_C": 16, "BLOCK_D": 16}
    large = {"BLOCK_T": BLOCK_T, "BLOCK_C": BLOCK_C, "BLOCK_D": BLOCK_D}
    return {"ACC": TRITON_DTYPE[acc], "PRECISION": "ieee", **(small if acc == torch.float64 else large)}


def _plan_forward(memory, x, weight, bias, lengths, starts, activation):
    batch = starts.size(0) - 1 if starts is not None else x.size(0)
    filters, acc = weight.size(0), accumulator(x.dtype)
    output, z = memory.empty(x, (batch, filters)), memory.empty(x, (batch, filters), acc)
    index = memory.empty(x, (batch, filters), torch.int32)
    stride = 0 if starts is not None else x.size(1) * x.size(2)
    arguments = (x, weight, bias, lengths, starts, output, z, index, *_sizes(x, weight), stride)
    constants = {"ACTIVATION": activation} | _constants(x.dtype)
    grid = (cdiv(filters, constants["BLOCK_C"]), batch)
    return (output, z, index), [
        Launch("conv1d_max_forward", _forward_kernel, grid, arguments, constants, registers=255)
    ]


def _plan_grad_x(memory, x, weight, lengths, starts, slopes, index):
    grad = memory.empty(x, x.shape)
    constants = _constants(x.dtype)
    arguments = (weight, lengths, starts, slopes, index, grad, *_sizes(x, weight))
    grid = (cdiv(x.size(-1), constants["BLOCK_D"]), slopes.size(0))
    return (grad,), [Launch("conv1d_max_grad_x", _grad_x_kernel, grid, arguments, constants, registers=255)]


def _plan_grad_weight(memory, x, weight, lengths, starts, slopes, index):
    grad = memory.empty(x, weight.shape)
    stride = 0 if starts is not None else x.size(1) * x.size(2)
    arguments = (x, lengths, starts, slopes, index, grad, *_sizes(x, weight), stride, slopes.size(0))
    constants = {"ACC": TRITON_DTYPE[slopes.dtype], "BLOCK_N": NUMBERS}
    grid = (cdiv(weight.size(1) * weight.size(2), NUMBERS), weight.size(0))
    return (grad,), [Launch("conv1d_max_grad_weight", _grad_weight_kernel, grid, arguments, constants, registers=255)]


def plans(x, weight, bias, lengths, starts, activation):
    """The launches of a call and its way back."""
    batch = starts.size(0) - 1 if starts is not None else x.size(0)
    z = torch.empty(batch, weight.size(0), dtype=accumulator(x.dtype), device="meta")
    index, memory = z.to(torch.int32), Memory("meta")
    made = (
        _plan_forward(memory, x, weight, bias, lengths, starts, activation),
        _plan_grad_x(memory, x, weight, lengths, starts, z, index),
        _plan_grad_weight(memory, x, weight, lengths, starts, z, index),
    )
    return [launch for _, launches in made for launch in launches]
