"""Pooling over sequences in Triton: a program takes some columns of a sequence, forward over its rows.

Backward a program writes a tile of the gradient. Kinds and sources: seqkern/reference/sequence_pool.py.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, cdiv, rounded, unit_last
from ._replay import Memory, noted, planned

__all__ = ["aot_configurations", "sequence_pool_bwd", "sequence_pool_fwd"]

SUM, MEAN, MAX, MIN, FIRST, LAST, LOGSUMEXP = (tl.constexpr(kind) for kind in range(7))
BLOCK_R, BLOCK_C = 16, 64  # rows and columns of a tile
SIZES = ["rows", "columns", "reversed", "batch_stride", "row_stride"]  # not compiled in


@triton.jit
def sequence(b, lengths_ptr, starts_ptr, rows):
    """(first row, length) of a sequence; a packed one's first row is one of all rows."""
    if starts_ptr is not None:
        first = tl.load(starts_ptr + b)
        length = tl.load(starts_ptr + b + 1) - first
    else:
        first = tl.zeros([], tl.int64)
        length = first + rows
        if lengths_ptr is not None:
            length = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), length)
    return first, length


@triton.jit
def _end(column, columns, reversed, length, KIND: tl.constexpr):
    """The row that a column of first or last takes."""
    from_the_end = column >= columns - reversed
    if KIND == LAST:
        return tl.where(from_the_end, 0, length - 1)
    return tl.where(from_the_end, length - 1, 0)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x_ptr, lengths_ptr, starts_ptr, output_ptr, index_ptr, rows, columns, reversed, batch_stride, row_stride,
    KIND: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = column < columns
    first, length = sequence(b, lengths_ptr, starts_ptr, rows)
    x = x_ptr + b * batch_stride + first * row_stride + column
    if (KIND == FIRST) | (KIND == LAST):
        row = _end(column, columns, reversed, length, KIND)
        y = tl.load(x + row * row_stride, mask=live & (length > 0), other=0.0).to(ACC)
    elif (KIND == SUM) | (KIND == MEAN):
        sums = tl.zeros([BLOCK_R, BLOCK_C], ACC)
        for r in range(0, length, BLOCK_R):
            row = r + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
            sums += tl.load(x[None, :] + row * row_stride, mask=(row < length) & live[None, :], other=0.0).to(ACC)
        y = tl.sum(sums, 0)
        if KIND == MEAN:
            y = y / tl.maximum(length, 1).to(ACC)
    else:
        SIGN: tl.constexpr = -1.0 if KIND == MIN else 1.0
        best = tl.full([BLOCK_R, BLOCK_C], float("-inf"), ACC)
        at = tl.full([BLOCK_R, BLOCK_C], 2147483647, tl.int32)
        for r in range(0, length, BLOCK_R):
            row = r + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
            there = (row < length) & live[None, :]
            v = tl.load(x[None, :] + row * row_stride, mask=there, other=0.0).to(ACC) * SIGN
            better = there & ((v > best) | (at == 2147483647) | ((v != v) & (best == best)))
            best = tl.where(better, v, best)
            at = tl.where(better, row.to(tl.int32), at)
        # Of the rows of the tile: a NaN before all, then the largest, of equal ones the first.
        nan = best != best
        some = tl.max(nan.to(tl.int32), 0)[None, :] > 0
        top = tl.max(tl.where(nan | (at == 2147483647), float("-inf"), best), 0)
        chosen = tl.where(some, nan, best == top[None, :]) & (at != 2147483647)
        if KIND == LOGSUMEXP:
            shift = tl.where(top == float("-inf"), 0.0, top).to(ACC)
            sums = tl.zeros([BLOCK_R, BLOCK_C], ACC)
            for r in range(0, length, BLOCK_R):
                row = r + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
                there = (row < length) & live[None, :]
                v = tl.load(x[None, :] + row * row_stride, mask=there, other=float("-inf")).to(ACC)
                sums += tl.exp(v - shift[None, :])
            total = tl.sum(sums, 0)
            empty = total == 0.0
            y = tl.where(empty, float("-inf"), shift + tl.log(tl.where(empty, 1.0, total).to(ACC)))
            y = tl.where(top == float("inf"), float("inf"), y)
        else:
            index = tl.min(tl.where(chosen, at, 2147483647), 0)
            y = tl.where(tl.max(nan.to(tl.int32), 0) > 0, float("nan"), top * SIGN)
            y = tl.where(length > 0, y, 0.0)
            tl.store(index_ptr + b * columns + column, tl.where(length > 0, index, -1), mask=live)
    tl.store(output_ptr + b * columns + column, rounded(y.to(ACC), output_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    grad_ptr, x_ptr, lse_ptr, index_ptr, lengths_ptr, starts_ptr, grad_x_ptr, rows, columns, reversed, batch_stride,
    row_stride, KIND: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A tile of a padded sequence's rows; of a packed sequence a program has every row of some columns."""
    b = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = column < columns
    first, length = sequence(b, lengths_ptr, starts_ptr, rows)
    grad = tl.load(grad_ptr + b * columns + column, mask=live, other=0.0).to(ACC)
    if KIND == MEAN:
        grad = grad / tl.maximum(length, 1).to(ACC)
    target = grad_x_ptr + column
    if starts_ptr is not None:
        end = length
        target += first * columns
    else:
        end = length * 0 + rows
        target += b * rows * columns
    x = x_ptr + b * batch_stride + first * row_stride + column
    if (KIND == MAX) | (KIND == MIN):
        at = tl.load(index_ptr + b * columns + column, mask=live, other=-1).to(tl.int64)
    if (KIND == FIRST) | (KIND == LAST):
        at = _end(column, columns, reversed, length, KIND)
    if KIND == LOGSUMEXP:
        lse = tl.load(lse_ptr + b * columns + column, mask=live, other=0.0).to(ACC)
        shift = tl.where(lse == float("-inf"), 0.0, lse).to(ACC)
    for r in range(0, end, BLOCK_R):
        row = r + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
        there = (row < length) & live[None, :]
        if (KIND == SUM) | (KIND == MEAN):
            g = tl.where(there, grad[None, :], 0.0)
        elif KIND == LOGSUMEXP:
            v = tl.load(x[None, :] + row * row_stride, mask=there, other=float("-inf")).to(ACC)
            g = tl.where(there, grad[None, :] * tl.exp(v - shift[None, :]), 0.0)
        else:
            g = tl.where(there & (row == at[None, :]), grad[None, :], 0.0)
        tl.store(
            target[None, :] + row * columns, rounded(g, grad_x_ptr.dtype.element_ty), mask=(row < end) & live[None, :]
        )


def sequence_pool_fwd(x, lengths, starts, kind, reversed):
    """The launcher behind `seqkern::sequence_pool_fwd`: (output, index)."""
    return planned(_plan_forward, (unit_last(x), lengths, starts), (kind, reversed), x.device)


def sequence_pool_bwd(grad_output, x, output, index, lengths, starts, rows, kind, reversed):
    """The launcher behind `seqkern::sequence_pool_bwd`: the gradient of x."""
    tensors = (
        grad_output.contiguous(), None if x is None else unit_last(x), None if output is None else output.contiguous(),
        None if index is None else index.contiguous(), lengths, starts,
    )  # fmt: skip
    grad = planned(_plan_backward, tensors, (rows, kind, reversed), grad_output.device)[0]
    if starts is not None:  # rows of no sequence
        row = torch.arange(rows, device=grad.device)
        grad.masked_fill_(((row < starts[0]) | (row >= starts[-1]))[:, None], 0)
    return grad


def _constants(kind, dtype):
    return {"KIND": kind, "ACC": TRITON_DTYPE[accumulator(dtype)], "BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C}


def _plan_forward(memory, x, lengths, starts, kind, reversed):
    packed = starts is not None
    batch = starts.size(0) - 1 if packed else x.size(0)
    rows, columns = x.size(-2), x.size(-1)
    output = memory.empty(x, (batch, columns))
    index = memory.empty(x, (batch, columns) if kind in (2, 3) else (0,), torch.int32)
    arguments = (
        x, lengths, starts, output, index, rows, columns, reversed, 0 if packed else x.stride(0), x.stride(-2)
    )  # fmt: skip
    grid = (cdiv(columns, BLOCK_C), batch)
    step = Launch("pool_forward", _forward_kernel, grid, arguments, _constants(kind, x.dtype), registers=255)
    return (output, index), [step]


def _plan_backward(memory, grad, x, output, index, lengths, starts, rows, kind, reversed):
    packed = starts is not None
    batch, columns = grad.shape
    grad_x = memory.empty(grad, (rows, columns) if packed else (batch, rows, columns))
    strides = (0, 0) if x is None else (0 if packed else x.stride(0), x.stride(-2))
    given = (grad if x is None else x, grad if output is None else output, index)
    arguments = (grad, *given, lengths, starts, grad_x, rows, columns, reversed, *strides)
    grid = (cdiv(columns, BLOCK_C), batch)
    step = Launch("pool_backward", _backward_kernel, grid, arguments, _constants(kind, grad.dtype), registers=255)
    return (grad_x,), [step]


def explained(op, x, *_):
    """The launches of a call, forward and backward; nothing is launched."""
    if x.dim() != 3:
        return []
    with noted() as launches:
        sequence_pool_fwd(x, None, None, 1, 0)
        sequence_pool_bwd(x[:, 0], None, None, None, None, None, x.size(1), 1, 0)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use little shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        for kind in range(7):
            for packed in (False, True) if thorough else (False,):
                x = torch.empty((100, 256) if packed else (4, 25, 256), dtype=dtype, device="meta")
                whole = torch.empty(5 if packed else 4, dtype=torch.int64, device="meta")
                of = (None, whole) if packed else (whole, None)
                grad = torch.empty(4, 256, dtype=dtype, device="meta")
                index = torch.empty(4, 256, dtype=torch.int32, device="meta")
                kept = (x, grad) if kind == 6 else (None, None)
                plans = (
                    _plan_forward(Memory(), x, *of, kind, 0),
                    _plan_backward(Memory(), grad, *kept, index, *of, x.size(-2), kind, 0),
                )
                for _, (launch,) in plans:
                    yield f"{launch.name}-{kind}{'-packed' * packed}-{str(dtype).removeprefix('torch.')}", launch
