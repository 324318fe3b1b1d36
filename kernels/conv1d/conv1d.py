"""A convolution over the rows of sequences in Triton: three products of tiles, of which each program sums one.

  forward      a tile of windows and filters, over taps and features
  grad_x       a tile of rows and features, over taps and filters: dx[p] = sum over k of W[k]^T dy[t] where t stride =
               p + left - k dilation
  grad_weight  a tile of filters and features of a tap, over all sequences and windows, in their order

No atomics. Equations and sources: seqkern/reference/conv1d.py.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from .._common import TRITON_DTYPE, Launch, accumulator, cdiv, dot, rounded
from .._replay import Memory, planned

BLOCK_T, BLOCK_C, BLOCK_D = 32, 32, 32  # windows or rows, filters, features of a tile
SIZES = ["rows", "outputs", "columns", "width", "filters", "batch", "stride", "left", "right", "dilation"]


@triton.jit
def _own(b, lengths_ptr, rows, width, stride, left, right, dilation):
    """(rows, outputs) of a sequence."""
    length = tl.zeros([], tl.int64) + rows
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), length)
    room = length + left + right - dilation * (width - 1) - 1
    return length, tl.where((length > 0) & (room >= 0), room // stride + 1, 0)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, lengths_ptr, y_ptr, rows, outputs, columns, width, filters, stride, left, right,
    dilation, ACC: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(filters, BLOCK_C)
    t = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    filter = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    live = filter < filters
    length, own = _own(b, lengths_ptr, rows, width, stride, left, right, dilation)
    sums = tl.zeros([BLOCK_T, BLOCK_C], ACC)
    for k in range(width):
        place = t * stride + k * dilation - left
        there = (t < own) & (place >= 0) & (place < length)
        for d in range(0, columns, BLOCK_D):
            column = d + tl.arange(0, BLOCK_D)
            inside = column < columns
            a = tl.load(
                x_ptr + (b * rows + place[:, None]) * columns + column[None, :],
                mask=there[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            w = tl.load(
                weight_ptr + (filter[None, :].to(tl.int64) * width + k) * columns + column[:, None],
                mask=live[None, :] & inside[:, None], other=0.0,
            )  # fmt: skip
            sums = dot(a, w, sums, PRECISION)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + filter, mask=live, other=0.0)[None, :]
    sums = tl.where((t < own)[:, None], sums, 0.0)
    at = y_ptr + (b * outputs + t[:, None]) * filters + filter[None, :]
    tl.store(at, rounded(sums, y_ptr.dtype.element_ty), mask=(t < outputs)[:, None] & live[None, :])


@triton.jit(do_not_specialize=SIZES)
def _grad_x_kernel(
    grad_ptr, weight_ptr, lengths_ptr, grad_x_ptr, rows, outputs, columns, width, filters, stride, left, right,
    dilation, ACC: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(columns, BLOCK_D)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    live = column < columns
    length, own = _own(b, lengths_ptr, rows, width, stride, left, right, dilation)
    sums = tl.zeros([BLOCK_T, BLOCK_D], ACC)
    for k in range(width):
        place = row + left - k * dilation
        t = place // stride
        there = (row < length) & (place >= 0) & (t * stride == place) & (t < own)
        for c in range(0, filters, BLOCK_C):
            filter = c + tl.arange(0, BLOCK_C)
            known = filter < filters
            g = tl.load(
                grad_ptr + (b * outputs + t[:, None]) * filters + filter[None, :],
                mask=there[:, None] & known[None, :], other=0.0,
            )  # fmt: skip
            w = tl.load(
                weight_ptr + (filter[:, None].to(tl.int64) * width + k) * columns + column[None, :],
                mask=known[:, None] & live[None, :], other=0.0,
            )  # fmt: skip
            sums = dot(g, w, sums, PRECISION)
    at = grad_x_ptr + (b * rows + row[:, None]) * columns + column[None, :]
    tl.store(at, rounded(sums, grad_x_ptr.dtype.element_ty), mask=(row < rows)[:, None] & live[None, :])


@triton.jit(do_not_specialize=SIZES)
def _grad_weight_kernel(
    grad_ptr, x_ptr, lengths_ptr, grad_weight_ptr, rows, outputs, columns, width, filters, batch, stride, left, right,
    dilation, ACC: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1)
    blocks = tl.cdiv(columns, BLOCK_D)
    filter = tl.program_id(0) // blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    known = filter < filters
    live = column < columns
    sums = tl.zeros([BLOCK_C, BLOCK_D], ACC)
    for n in range(batch):
        b = tl.cast(n, tl.int64)
        length, own = _own(b, lengths_ptr, rows, width, stride, left, right, dilation)
        for first in range(0, own, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            place = t * stride + k * dilation - left
            g = tl.load(
                grad_ptr + (b * outputs + t[None, :]) * filters + filter[:, None],
                mask=known[:, None] & (t < own)[None, :], other=0.0,
            )  # fmt: skip
            there = (t < own) & (place >= 0) & (place < length)
            a = tl.load(
                x_ptr + (b * rows + place[:, None]) * columns + column[None, :],
                mask=there[:, None] & live[None, :], other=0.0,
            )  # fmt: skip
            sums = dot(g, a, sums, PRECISION)
    at = grad_weight_ptr + (filter[:, None].to(tl.int64) * width + k) * columns + column[None, :]
    tl.store(at, sums, mask=known[:, None] & live[None, :])


def conv1d_fwd(x, weight, bias, lengths, stride, left, right, dilation):
    """The launcher behind `seqkern::conv1d_fwd`."""
    tensors = (x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), lengths)
    return planned(_plan_forward, tensors, (stride, left, right, dilation), x.device)[0]


def conv1d_bwd(grad_output, x, weight, lengths, stride, left, right, dilation, need_x, need_weight):
    """The launcher behind `seqkern::conv1d_bwd`: gradients of x, weight and bias."""
    grad, steps = grad_output.contiguous(), (stride, left, right, dilation)
    of_x, of_weight, of_bias = x.new_empty(0), x.new_empty(0, dtype=accumulator(x.dtype)), x.new_empty(0)
    if need_x:
        of_x = planned(_plan_grad_x, (grad, x, weight.contiguous(), lengths), steps, x.device)[0]
    if need_weight:
        of_weight = planned(_plan_grad_weight, (grad, x.contiguous(), weight, lengths), steps, x.device)[0]
        own = grad
        if lengths is not None:
            count = lengths.clamp(0, x.size(1))
            room = count + left + right - dilation * (weight.size(1) - 1) - 1
            count = torch.where((count > 0) & (room >= 0), room // stride + 1, 0)
            behind = torch.arange(grad.size(1), device=grad.device) >= count[:, None]
            own = grad.masked_fill(behind[..., None], 0)
        of_bias = own.sum((0, 1), dtype=torch.float64)
    return of_x, of_weight, of_bias.double()


def _constants(dtype):
    acc = accumulator(dtype)
    size = 16 if acc == torch.float64 else 32
    return {"ACC": TRITON_DTYPE[acc], "PRECISION": "ieee", "BLOCK_T": size, "BLOCK_C": size, "BLOCK_D": size}


def _outputs(rows, width, stride, left, right, dilation):
    room = rows + left + right - dilation * (width - 1) - 1
    return room // stride + 1 if rows > 0 and room >= 0 else 0


def _plan_forward(memory, x, weight, bias, lengths, *steps):
    batch, rows, columns = x.shape
    filters, width, _ = weight.shape
    outputs = _outputs(rows, width, *steps)
    y = memory.empty(x, (batch, outputs, filters))
    constants = _constants(x.dtype)
    arguments = (x, weight, bias, lengths, y, rows, outputs, columns, width, filters, *steps)
    grid = (cdiv(outputs, constants["BLOCK_T"]) * cdiv(filters, constants["BLOCK_C"]), batch)
    return (y,), [Launch("conv1d_forward", _forward_kernel, grid, arguments, constants, registers=255)]


def _plan_grad_x(memory, grad, x, weight, lengths, *steps):
    batch, rows, columns = x.shape
    filters, width, _ = weight.shape
    grad_x = memory.empty(x, x.shape)
    constants = _constants(x.dtype)
    arguments = (grad, weight, lengths, grad_x, rows, grad.size(1), columns, width, filters, *steps)
    grid = (cdiv(rows, constants["BLOCK_T"]) * cdiv(columns, constants["BLOCK_D"]), batch)
    return (grad_x,), [Launch("conv1d_grad_x", _grad_x_kernel, grid, arguments, constants, registers=255)]


def _plan_grad_weight(memory, grad, x, weight, lengths, *steps):
    batch, rows, columns = x.shape
    filters, width, _ = weight.shape
    constants = _constants(x.dtype)
    grad_weight = memory.empty(x, weight.shape, accumulator(x.dtype))
    arguments = (grad, x, lengths, grad_weight, rows, grad.size(1), columns, width, filters, batch, *steps)
    grid = (cdiv(filters, constants["BLOCK_C"]) * cdiv(columns, constants["BLOCK_D"]), width)
    step = Launch("conv1d_grad_weight", _grad_weight_kernel, grid, arguments, constants, registers=255)
    return (grad_weight,), [step]


def plans(x, weight, bias, lengths):
    """The launches of a call and its way back, padded as "same"."""
    width = weight.size(1)
    steps = (1, (width - 1) // 2, width - 1 - (width - 1) // 2, 1)
    grad = torch.empty((*x.shape[:2], weight.size(0)), dtype=x.dtype, device="meta")
    memory = Memory("meta")
    made = (
        _plan_forward(memory, x, weight, bias, lengths, *steps),
        _plan_grad_x(memory, grad, x, weight, lengths, *steps),
        _plan_grad_weight(memory, grad, x, weight, lengths, *steps),
    )
    return [launch for _, launches in made for launch in launches]
