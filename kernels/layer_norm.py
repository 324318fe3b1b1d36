"""Layer norm and RMS norm, with the residual sum and dropout before them, forward and backward, in Triton.

The idea. A row is read once and kept in registers: sum, mean, variance and output come from the same copy (rows of up
to 8192 columns; longer rows are walked in blocks, twice forward and twice backward, the second time from the cache). In
the backward pass a fixed set of programs walks all rows, with one accumulator tile each for weight and bias in
registers. A program writes one partial row, and a second kernel adds the partial rows in a fixed order: no atomics, the
same bits every run. Dropout's mask is never stored: both passes draw it from a counter.

The equations (Ba, Kiros & Hinton 2016, eq. 4; eps under the root as in torch), over the N columns of a row:

    s = x, or with a residual r: s = round(drop(x) + r)             drop(x) = x / (1 - p) where kept, else 0
    mean = sum(s) / N      var = sum((s - mean)^2) / N      rstd = 1 / sqrt(var + eps)      xhat = (s - mean) rstd
    y = xhat (weight + offset) + bias                xhat may be rounded to the dtype before, as Llama does
    g = dy weight          ds = rstd (g - sum(g) / N - xhat sum(g xhat) / N) + dsum, the gradient of the returned s
    dr = ds                dx = drop(ds), with the same mask
    dweight = sum over rows of dy xhat         dbias = sum over rows of dy

RMS norm (Zhang & Sennrich 2019) is the same with mean = 0, and without the sum(g) that comes from it.

The mean is rounded: with |mean| / std = 1e4 half a ulp of it is 3e-4 of a std, in every element of the row. So the
centred values are centred again: d = s - mean is exact there (Sterbenz), and shift = sum(d) / N is the rounding error.
The stored mean is rounded as well, and the backward pass finds its own shift in the same way. Long rows are centred on
the mean of their first block, and var = sum(d^2) / N - shift^2: what cancels there is at most N / BLOCK_N times the
variance, when that block is far from the others.

The tile does not follow N to the next power of two. A row is CHUNKS equal blocks, a tuple of tiles: 3 of a quarter of
that power, or 5 or 7 of an eighth, where one block would leave more than 15 % of the lanes empty (768, 1536, 2560,
5120: nothing is empty). The tiles are first added element by element, so a row still takes one reduction a sum. The
weight is loaded through tile-shaped pointers, in the tile's own layout. NOTES.md lists what was tried.
"""

import itertools

import torch
import triton
import triton.language as tl

from ._common import (
    TRITON_DTYPE,
    Launch,
    Room,
    accumulator,
    aligned,
    cdiv,
    dropout_scalars,
    keep_mask,
    power_of_two,
    programs_at_once,
    room,
    rounded,
    scalar,
    unit_last,
)
from ._replay import Memory, noted, planned


@triton.jit
def _columns(first, N, BLOCK_N: tl.constexpr, EDGE: tl.constexpr):
    """BLOCK_N columns from `first`, and (1, BLOCK_N): which of them exist. EDGE False promises that all do."""
    column = first + tl.arange(0, BLOCK_N)
    if EDGE:
        inside = (column < N)[None, :]
    else:
        inside = tl.full([1, BLOCK_N], True, tl.int1)
    return column, inside


@triton.jit
def _load(pointer, row, stride, column, live, ACC: tl.constexpr):
    """A tile of a matrix in the accumulator's dtype, zero where not live."""
    return tl.load(pointer + row[:, None] * stride + column[None, :], mask=live, other=0.0).to(ACC)


@triton.jit
def _store(pointer, row, N, column, live, tile):
    """Rounds a tile into a contiguous matrix of N columns."""
    at = pointer + row[:, None] * N + column[None, :]
    tl.store(at, rounded(tile, pointer.dtype.element_ty), mask=live)


@triton.jit
def _affine(x, pointer, column, N, MULTIPLY: tl.constexpr, OFFSET: tl.constexpr = 0.0):
    """x times (or plus) the vector at `pointer` and OFFSET; it may be None; x is (rows, columns)."""
    if pointer is not None:
        at = tl.broadcast_to(pointer + column[None, :], x.shape)  # in the tile's own layout: threads exchange nothing
        vector = tl.load(at, mask=(column < N)[None, :], other=0.0).to(x.dtype)
        if OFFSET != 0.0:
            vector += OFFSET
        if MULTIPLY:
            x = x * vector
        else:
            x = x + vector
    return x


@triton.jit
def _scaled(x, weight_ptr, column, N, OFFSET: tl.constexpr, T: tl.constexpr, ROUND: tl.constexpr):
    """x times the weight and OFFSET; ROUND: x rounded to T before."""
    if ROUND:
        x = rounded(x, T).to(x.dtype)
    return _affine(x, weight_ptr, column, N, True, OFFSET)


@triton.jit
def _summed(input_ptr, residual_ptr, row, strides, first, column, live, seed, threshold, scale):
    """s, the input of the norm: input, or the rounded sum of the dropped-out input and the residual; zero where not
    live.

    The select between product and sum keeps the compiler from contracting them into a multiply-add: two roundings.
    """
    s = _load(input_ptr, row, strides[0], column, live, scale.dtype)
    if residual_ptr is not None:
        if seed is not None:
            s = tl.where(keep_mask(seed, row, first, threshold, column.shape[0]), s * scale, 0.0)
        s += _load(residual_ptr, row, strides[1], column, live, scale.dtype)
        s = rounded(s, input_ptr.dtype.element_ty).to(scale.dtype)
    return s


@triton.jit(do_not_specialize=["stride", "residual_stride", "M", "N", "threshold"])
def _forward_kernel(
    input_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    output_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    stride,
    residual_stride,
    M,
    N,
    threshold,
    scale: tl.float64,
    eps: tl.float64,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """BLOCK_M whole rows a program, each in CHUNKS tiles of BLOCK_N columns."""
    strides = (aligned(stride, ALIGNED), aligned(residual_stride, ALIGNED))
    N = aligned(N, ALIGNED)
    scale = scalar(scale, ACC)
    seed = None if seed_ptr is None else tl.load(seed_ptr)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = ()  # s, later centred
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for i in tl.static_range(CHUNKS):
        first = i * BLOCK_N
        column, inside = _columns(first, N, BLOCK_N, i == CHUNKS - 1)
        live = inside & (row < M)[:, None]
        d += (_summed(input_ptr, residual_ptr, row, strides, first, column, live, seed, threshold, scale),)
        if residual_ptr is not None:
            _store(sum_ptr, row, N, column, live, d[i])
        total += d[i]
    if mean_ptr is not None:
        mean = tl.zeros([BLOCK_M], ACC)
        for _ in tl.static_range(2):  # the mean, then its rounding error
            shift = tl.sum(total, 1) / N
            mean += shift
            s = d
            d = ()
            total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
            for i in tl.static_range(CHUNKS):
                column, inside = _columns(i * BLOCK_N, N, BLOCK_N, i == CHUNKS - 1)
                d += (tl.where(inside, s[i] - shift[:, None], 0.0),)
                total += d[i]
        tl.store(mean_ptr + row, mean, mask=row < M)
    square = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for i in tl.static_range(CHUNKS):
        square += d[i] * d[i]
    rstd = 1.0 / tl.sqrt(tl.sum(square, 1) / N + scalar(eps, ACC))
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    for i in tl.static_range(CHUNKS):
        column, inside = _columns(i * BLOCK_N, N, BLOCK_N, i == CHUNKS - 1)
        y = _scaled(d[i] * rstd[:, None], weight_ptr, column, N, OFFSET, output_ptr.dtype.element_ty, ROUND)
        y = _affine(y, bias_ptr, column, N, False)
        _store(output_ptr, row, N, column, inside & (row < M)[:, None], y)


@triton.jit(do_not_specialize=["stride", "residual_stride", "M", "N", "threshold"])
def _forward_long_kernel(
    input_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    output_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    stride,
    residual_stride,
    M,
    N,
    threshold,
    scale: tl.float64,
    eps: tl.float64,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One row a program, in blocks of BLOCK_N columns; N > BLOCK_N."""
    strides = (aligned(stride, ALIGNED), aligned(residual_stride, ALIGNED))
    N = aligned(N, ALIGNED)
    scale = scalar(scale, ACC)
    seed = None if seed_ptr is None else tl.load(seed_ptr)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    pivot = tl.zeros([1], ACC)
    if mean_ptr is not None:
        column, live = _columns(0, N, BLOCK_N, False)
        s = _summed(input_ptr, residual_ptr, row, strides, 0, column, live, seed, threshold, scale)
        pivot = tl.sum(s, 1) / BLOCK_N
    total = tl.zeros([1, BLOCK_N], ACC)
    square = tl.zeros([1, BLOCK_N], ACC)
    for first in range(0, N, BLOCK_N):
        column, live = _columns(first, N, BLOCK_N, True)
        s = _summed(input_ptr, residual_ptr, row, strides, first, column, live, seed, threshold, scale)
        if residual_ptr is not None:
            _store(sum_ptr, row, N, column, live, s)
        d = tl.where(live, s - pivot[:, None], 0.0)
        total += d
        square += d * d
    shift = tl.zeros([1], ACC)
    variance = tl.sum(square, 1) / N
    if mean_ptr is not None:
        shift = tl.sum(total, 1) / N
        variance = tl.maximum(variance - shift * shift, 0.0)
        tl.store(mean_ptr + row, pivot + shift)
    rstd = 1.0 / tl.sqrt(variance + scalar(eps, ACC))
    tl.store(rstd_ptr + row, rstd)

    if residual_ptr is not None:
        tl.debug_barrier()  # other threads read the sum back than wrote it
    for first in range(0, N, BLOCK_N):
        column, live = _columns(first, N, BLOCK_N, True)
        if residual_ptr is not None:
            s = _load(sum_ptr, row, N, column, live, ACC)
        else:
            s = _load(input_ptr, row, strides[0], column, live, ACC)
        y = (s - pivot[:, None] - shift[:, None]) * rstd[:, None]
        y = _scaled(y, weight_ptr, column, N, OFFSET, output_ptr.dtype.element_ty, ROUND)
        y = _affine(y, bias_ptr, column, N, False)
        _store(output_ptr, row, N, column, live, y)


@triton.jit
def _gradients(
    dx, grad_sum_ptr, grad_residual_ptr, grad_input_ptr, row, sum_stride, N, first, column, live, seed, threshold, scale
):
    """Adds the gradient of the returned sum; stores the total for the residual and, through the dropout, the input."""
    if grad_sum_ptr is not None:
        dx += _load(grad_sum_ptr, row, sum_stride, column, live, dx.dtype)
    _store(grad_residual_ptr, row, N, column, live, dx)
    if seed is not None:
        dx = tl.where(keep_mask(seed, row, first, threshold, column.shape[0]), dx * scale, 0.0)
        _store(grad_input_ptr, row, N, column, live, dx)


@triton.jit(do_not_specialize=["grad_stride", "sum_stride", "stride", "M", "N", "threshold"])
def _backward_kernel(
    grad_output_ptr,
    grad_sum_ptr,
    input_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    seed_ptr,
    grad_residual_ptr,
    grad_input_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    grad_stride,
    sum_stride,
    stride,
    M,
    N,
    threshold,
    scale: tl.float64,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Every num_programs-th group of BLOCK_M whole rows; partial sums go to row program_id."""
    grad_stride = aligned(grad_stride, ALIGNED)
    sum_stride = aligned(sum_stride, ALIGNED)
    stride = aligned(stride, ALIGNED)
    N = aligned(N, ALIGNED)
    scale = scalar(scale, ACC)
    seed = None if seed_ptr is None else tl.load(seed_ptr)
    grad_weight = ()
    grad_bias = ()
    for _ in tl.static_range(CHUNKS):
        grad_weight += (tl.zeros([BLOCK_M, BLOCK_N], ACC),)
        grad_bias += (tl.zeros([BLOCK_M, BLOCK_N], ACC),)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
        xhat = ()  # x, then centred, then xhat
        g = ()  # dy, then g
        total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        for i in tl.static_range(CHUNKS):
            column, inside = _columns(i * BLOCK_N, N, BLOCK_N, i == CHUNKS - 1)
            live = inside & (row < M)[:, None]
            x = _load(input_ptr, row, stride, column, live, ACC)
            if mean_ptr is not None:
                mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
                x = tl.where(inside, x - mean[:, None], 0.0)
                total += x
            xhat += (x,)
            g += (_load(grad_output_ptr, row, grad_stride, column, live, ACC),)
        shift = tl.sum(total, 1) / N
        d = xhat
        dy = g
        dw = grad_weight
        db = grad_bias
        xhat = ()
        g = ()
        grad_weight = ()
        grad_bias = ()
        sum_g = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        sum_gx = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        for i in tl.static_range(CHUNKS):
            column, inside = _columns(i * BLOCK_N, N, BLOCK_N, i == CHUNKS - 1)
            if mean_ptr is not None:
                xhat += (tl.where(inside, (d[i] - shift[:, None]) * rstd[:, None], 0.0),)
            else:
                xhat += (d[i] * rstd[:, None],)
            grad_weight += (dw[i] + dy[i] * xhat[i],)
            grad_bias += (db[i] + dy[i],)
            g += (_affine(dy[i], weight_ptr, column, N, True, OFFSET),)
            sum_g += g[i]
            sum_gx += g[i] * xhat[i]
        along = tl.sum(sum_gx, 1) / N
        mean_g = tl.zeros([BLOCK_M], ACC)
        if mean_ptr is not None:
            mean_g = tl.sum(sum_g, 1) / N
        for i in tl.static_range(CHUNKS):
            first = i * BLOCK_N
            column, inside = _columns(first, N, BLOCK_N, i == CHUNKS - 1)
            live = inside & (row < M)[:, None]
            dx = (g[i] - mean_g[:, None] - xhat[i] * along[:, None]) * rstd[:, None]
            _gradients(
                dx, grad_sum_ptr, grad_residual_ptr, grad_input_ptr,
                row, sum_stride, N, first, column, live, seed, threshold, scale,
            )  # fmt: skip
    for i in tl.static_range(CHUNKS):
        column, inside = _columns(i * BLOCK_N, N, BLOCK_N, True)
        at = tl.program_id(0).to(tl.int64) * N + column
        if partial_weight_ptr is not None:
            tl.store(partial_weight_ptr + at, tl.sum(grad_weight[i], 0), mask=column < N)
        if partial_bias_ptr is not None:
            tl.store(partial_bias_ptr + at, tl.sum(grad_bias[i], 0), mask=column < N)


@triton.jit(do_not_specialize=["grad_stride", "sum_stride", "stride", "M", "N", "threshold"])
def _backward_long_kernel(
    grad_output_ptr,
    grad_sum_ptr,
    input_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    seed_ptr,
    grad_residual_ptr,
    grad_input_ptr,
    shift_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    grad_stride,
    sum_stride,
    stride,
    M,
    N,
    threshold,
    scale: tl.float64,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every num_programs-th group of BLOCK_M long rows: first their sums, then dx from the cache.

    With partial sums, the group's share is added to their row program_id, which also stays in the cache. Without, every
    row's shift is stored for `_columns_kernel`.
    """
    grad_stride = aligned(grad_stride, ALIGNED)
    sum_stride = aligned(sum_stride, ALIGNED)
    stride = aligned(stride, ALIGNED)
    N = aligned(N, ALIGNED)
    scale = scalar(scale, ACC)
    seed = None if seed_ptr is None else tl.load(seed_ptr)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
        mean = tl.zeros([BLOCK_M], ACC)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
        sum_d = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        sum_g = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        sum_gd = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        for first in range(0, N, BLOCK_N):
            column, inside = _columns(first, N, BLOCK_N, True)
            live = inside & (row < M)[:, None]
            d = tl.where(live, _load(input_ptr, row, stride, column, live, ACC) - mean[:, None], 0.0)
            g = _load(grad_output_ptr, row, grad_stride, column, live, ACC)
            g = _affine(g, weight_ptr, column, N, True, OFFSET)
            sum_d += d
            sum_g += g
            sum_gd += g * d
        shift = tl.zeros([BLOCK_M], ACC)
        mean_g = tl.zeros([BLOCK_M], ACC)
        if mean_ptr is not None:
            shift = tl.sum(sum_d, 1) / N
            mean_g = tl.sum(sum_g, 1) / N
            if shift_ptr is not None:
                tl.store(shift_ptr + row, shift, mask=row < M)
        along = (tl.sum(sum_gd, 1) / N - shift * mean_g) * rstd  # sum(g xhat) / N

        for first in range(0, N, BLOCK_N):
            column, inside = _columns(first, N, BLOCK_N, True)
            live = inside & (row < M)[:, None]
            x = _load(input_ptr, row, stride, column, live, ACC)
            xhat = (x - mean[:, None] - shift[:, None]) * rstd[:, None]
            dy = _load(grad_output_ptr, row, grad_stride, column, live, ACC)
            g = _affine(dy, weight_ptr, column, N, True, OFFSET)
            dx = (g - mean_g[:, None] - xhat * along[:, None]) * rstd[:, None]
            _gradients(
                dx, grad_sum_ptr, grad_residual_ptr, grad_input_ptr,
                row, sum_stride, N, first, column, live, seed, threshold, scale,
            )  # fmt: skip
            again = (column < N) & (tile >= tl.num_programs(0))  # not in the first group: nothing to add to
            at = tl.program_id(0).to(tl.int64) * N + column
            if partial_weight_ptr is not None:
                so_far = tl.load(partial_weight_ptr + at, mask=again, other=0.0)
                tl.store(partial_weight_ptr + at, so_far + tl.sum(dy * xhat, 0), mask=column < N)
            if partial_bias_ptr is not None:
                so_far = tl.load(partial_bias_ptr + at, mask=again, other=0.0)
                tl.store(partial_bias_ptr + at, so_far + tl.sum(dy, 0), mask=column < N)
        if partial_weight_ptr is not None or partial_bias_ptr is not None:
            tl.debug_barrier()  # other threads may read the partial sums than wrote them


@triton.jit(do_not_specialize=["grad_stride", "stride", "M", "N"])
def _columns_kernel(
    grad_output_ptr,
    input_ptr,
    mean_ptr,
    rstd_ptr,
    shift_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    grad_stride,
    stride,
    M,
    N,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Parameter sums of long rows: BLOCK_N columns of every num_programs(1)-th tile of BLOCK_M rows."""
    grad_stride = aligned(grad_stride, ALIGNED)
    stride = aligned(stride, ALIGNED)
    N = aligned(N, ALIGNED)
    column, inside = _columns(tl.program_id(0) * BLOCK_N, N, BLOCK_N, True)
    grad_weight = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    grad_bias = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for tile in range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1)):
        row = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        live = inside & (row < M)[:, None]
        dy = _load(grad_output_ptr, row, grad_stride, column, live, ACC)
        if partial_weight_ptr is not None:
            x = _load(input_ptr, row, stride, column, live, ACC)
            if mean_ptr is not None:
                mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
                shift = tl.load(shift_ptr + row, mask=row < M, other=0.0)
                x = x - mean[:, None] - shift[:, None]
            rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
            grad_weight += dy * (x * rstd[:, None])
        if partial_bias_ptr is not None:
            grad_bias += dy
    at = tl.program_id(1).to(tl.int64) * N + column
    if partial_weight_ptr is not None:
        tl.store(partial_weight_ptr + at, tl.sum(grad_weight, 0), mask=column < N)
    if partial_bias_ptr is not None:
        tl.store(partial_bias_ptr + at, tl.sum(grad_bias, 0), mask=column < N)


@triton.jit(do_not_specialize=["PARTS", "N"])
def _reduce_kernel(partial_ptr, first_ptr, second_ptr, PARTS, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums the PARTS partial rows of a (PARTS, N) matrix; program_id(1) is the matrix."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    partial_ptr += tl.program_id(1).to(tl.int64) * PARTS * N
    total = tl.zeros([BLOCK_M, BLOCK_N], partial_ptr.dtype.element_ty)
    for first in range(0, PARTS, BLOCK_M):
        part = first + tl.arange(0, BLOCK_M)
        live = (part < PARTS)[:, None] & (column < N)[None, :]
        total += tl.load(partial_ptr + part.to(tl.int64)[:, None] * N + column[None, :], mask=live, other=0.0)
    if tl.program_id(1) == 0:
        tl.store(first_ptr + column, tl.sum(total, 0), mask=column < N)
    elif second_ptr is not None:
        tl.store(second_ptr + column, tl.sum(total, 0), mask=column < N)


# ---- plans and launchers ------------------------------------------------------------------------------------------

_TILE = 16 << 10  # bytes of accumulators in a tile: 16 floats a thread with 8 warps
_LONGEST = 32 << 10  # the longest row that fits registers, in bytes of accumulators: 8192 floats, 32 a thread
_NARROWEST = 64  # columns of a chunk: 128 bytes of bf16, a cache line
_LONG_BLOCK = {"BLOCK_N": 4096}
_LONG_BACKWARD_TILE = 2048  # elements; 4096 spill on sm_120 with fp32, RMS and dropout
_COLUMNS_BLOCK = {"BLOCK_M": 16, "BLOCK_N": 128}
_REDUCE_BLOCK = {"BLOCK_M": 32, "BLOCK_N": 64}


def _row_block(
    n: int, dtype: torch.dtype, longest: int, aligned: bool, backward: bool = False, dropped: bool = False
) -> tuple[dict[str, int], int]:
    """The tile of whole rows of n columns, and its warps; ({}, 0) for rows of more than `longest` bytes.

    A row is one block of the next power of two or, where that leaves more than 15 % of the lanes empty, 3 blocks of a
    quarter of it, or up to 7 of an eighth. The longest rows are always split. In the backward pass 4096 floats are
    split too, and with dropout every row, in a smaller tile: otherwise ptxas aims at 128 registers on sm_100 and
    spills.
    """
    size = accumulator(dtype).itemsize
    power = max(16, power_of_two(n))
    if power * size > longest:
        return {}, 0
    first = 1 if power * size < _TILE or (power * size == _TILE and not backward) else 4
    blocks = [power // parts for parts in (first, 4, 8) if parts == first or power // parts >= _NARROWEST]
    block_n = next((block for block in blocks if 0.85 * block * cdiv(n, block) <= n), blocks[-1])
    chunks = cdiv(n, block_n)
    tile = _TILE * 3 // 2 if aligned else _TILE  # 3 chunks of 8 elements a thread: 16-byte loads of bf16
    if backward and dropped and chunks == 1 and block_n // 4 >= _NARROWEST:
        block_n, chunks, tile = block_n // 4, 4, _TILE // 2
    fits = max(1, tile // (chunks * block_n * size))
    block = {"BLOCK_M": min(64, 1 << fits.bit_length() - 1), "BLOCK_N": block_n, "CHUNKS": chunks}
    return block, 8


def _constants(*matrices: torch.Tensor | None) -> dict[str, object]:
    n = matrices[0].size(1)
    return {
        "ACC": TRITON_DTYPE[accumulator(matrices[0].dtype)],
        "ALIGNED": n % 8 == 0 and all(_stride(matrix) % 8 == 0 for matrix in matrices),
    }


def _stride(matrix: torch.Tensor | None) -> int:
    return 0 if matrix is None else matrix.stride(0)


def _plan_forward(
    memory, input, residual, weight, bias, seed, eps, dropout_p, centred, weight_offset=0.0, round_before_weight=False
):  # fmt: skip
    m, n = input.shape
    acc = accumulator(input.dtype)
    output = memory.empty(input, (m, n))
    total = None if residual is None else memory.empty(input, (m, n))
    mean = memory.empty(input, (m,), acc) if centred else None
    rstd = memory.empty(input, (m,), acc)
    scale, threshold = dropout_scalars(dropout_p)
    tensors = (input, residual, weight, bias, seed, output, total, mean, rstd)
    arguments = (*tensors, _stride(input), _stride(residual), m, n, threshold, scale, eps)
    constants = _constants(input, residual) | {"OFFSET": float(weight_offset), "ROUND": bool(round_before_weight)}
    block, warps = _row_block(n, input.dtype, _LONGEST, constants["ALIGNED"])
    if block:
        grid = (cdiv(m, block["BLOCK_M"]),)
        launch = Launch("layer_norm_forward", _forward_kernel, grid, arguments, constants | block, warps)
    else:
        constants |= _LONG_BLOCK
        launch = Launch("layer_norm_forward_long", _forward_long_kernel, (m,), arguments, constants, 8)
    total = memory.empty(input, (0,)) if total is None else total
    mean = memory.empty(input, (0,), acc) if mean is None else mean
    return (output, total, mean, rstd), [launch]


def _plan_reduce(partials, grads):
    """`partials` (1 or 2, parts, N): one matrix for each of the `grads`."""
    count, parts, n = partials.shape
    grid = (cdiv(n, _REDUCE_BLOCK["BLOCK_N"]), count)
    arguments = (partials, grads[0], grads[1] if count > 1 else None, parts, n)
    return Launch("layer_norm_reduce", _reduce_kernel, grid, arguments, _REDUCE_BLOCK, 4)


def _wave(n: int, dtype: torch.dtype, sums: int, room: Room) -> int:
    """Rows of a group for which long rows are read once; 0 if a group on every multiprocessor exceeds the cache.

    The cache must hold x, dy and the partial sums (`sums` rows of accumulators) of every group at once. Of a row of N
    columns of S bytes, 5 N S bytes go to memory otherwise (x and dy twice, dx) and 3 N S with it. The cache's traffic
    grows from 5 N S by 16 N / rows, for two sums read and written; 8 / S rows keep that at 2 N S.
    """
    rows = 8 // dtype.itemsize
    held = room.multiprocessors * n * (2 * rows * dtype.itemsize + sums * accumulator(dtype).itemsize)
    return rows if sums and held <= 0.9 * room.cache else 0


def _plan_backward(
    memory, grad_output, grad_sum, input, mean, rstd, weight, seed, dropout_p, weight_offset, need_weight, need_bias,
    room,
):  # fmt: skip
    """`mean` None: not centred. `room`: the GPU's, which bounds the number of partial rows."""
    m, n = input.shape
    acc = accumulator(input.dtype)
    grad_residual = memory.empty(input, (m, n))
    grad_input = None if seed is None else memory.empty(input, (m, n))
    scale, threshold = dropout_scalars(dropout_p)
    constants = _constants(input, grad_output, grad_sum)
    offset = {"OFFSET": float(weight_offset)}
    # Four more tiles are live here than in the forward kernel: single elements and doubles spill at half the row
    # length.
    roomy = constants["ALIGNED"] and acc == torch.float32
    block, warps = _row_block(
        n, input.dtype, _LONGEST if roomy else _LONGEST // 2, constants["ALIGNED"], True, seed is not None
    )
    rows = 0 if block else _wave(n, input.dtype, need_weight + need_bias, room)
    tile = rows or (block or _COLUMNS_BLOCK)["BLOCK_M"]
    parts = min(cdiv(m, tile), room.multiprocessors * (1 if rows else room.programs))
    sums = memory.empty(input, (need_weight + need_bias, parts, n), acc)
    partials = [memory.view(sums, each) if need else None for need, each in ((need_weight, _first), (need_bias, _last))]
    inputs = (grad_output, grad_sum, input, mean, rstd, weight, seed, grad_residual, grad_input)
    scalars = (_stride(grad_output), _stride(grad_sum), _stride(input), m, n, threshold, scale)
    name = "layer_norm_backward"
    if block:
        arguments = (*inputs, *partials, *scalars)
        plan = [Launch(name, _backward_kernel, (parts,), arguments, constants | offset | block, warps)]
    elif rows:
        arguments = (*inputs, None, *partials, *scalars)
        block = {"BLOCK_M": rows, "BLOCK_N": 2 * _LONG_BACKWARD_TILE // rows}
        plan = [Launch(f"{name}_long_once", _backward_long_kernel, (parts,), arguments, constants | offset | block, 16)]
    else:
        shift = None if mean is None else memory.empty(mean, (m,))
        arguments = (*inputs, shift, None, None, *scalars)
        block = {"BLOCK_M": 1, "BLOCK_N": _LONG_BACKWARD_TILE}
        plan = [Launch(f"{name}_long", _backward_long_kernel, (m,), arguments, constants | offset | block, 8)]
        if need_weight or need_bias:
            grid = (cdiv(n, _COLUMNS_BLOCK["BLOCK_N"]), parts)
            arguments = (grad_output, input, mean, rstd, shift, *partials, _stride(grad_output), _stride(input), m, n)
            plan.append(Launch("layer_norm_columns", _columns_kernel, grid, arguments, constants | _COLUMNS_BLOCK, 8))
    grads = [memory.empty(input, (0 if partial is None else n,), acc) for partial in partials]
    if need_weight or need_bias:
        wanted = [grad for partial, grad in zip(partials, grads, strict=True) if partial is not None]
        plan.append(_plan_reduce(sums, wanted))
    return (grad_residual, memory.empty(input, (0,)) if grad_input is None else grad_input, *grads), plan


def _first(tensor):
    return tensor[0]


def _last(tensor):
    return tensor[-1]


def _readable(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else unit_last(tensor)


def layer_norm_fwd(
    input, residual, weight, bias, seed, eps, dropout_p, centred, weight_offset, round_before_weight
):  # fmt: skip
    """The launcher behind `seqkern::layer_norm_fwd`: (output, sum, mean, rstd), (0,) for absent ones."""
    tensors = (unit_last(input), _readable(residual), _readable(weight), _readable(bias), seed)
    return planned(_plan_forward, tensors, (eps, dropout_p, centred, weight_offset, round_before_weight), input.device)


def layer_norm_bwd(
    grad_output, grad_sum, input, mean, rstd, weight, seed, dropout_p, centred, weight_offset, need_weight, need_bias
):  # fmt: skip
    """The launcher behind `seqkern::layer_norm_bwd`: (grad_residual, grad_input, grad_weight, grad_bias).

    (0,) for what is not needed, and for grad_input if no dropout makes it differ from grad_residual.
    """
    mean = mean.contiguous() if centred else None
    tensors = (_readable(grad_output), _readable(grad_sum), unit_last(input), mean, rstd.contiguous())
    tensors += (_readable(weight), seed)
    return planned(_plan_occupied, tensors, (dropout_p, weight_offset, need_weight, need_bias), input.device)


def explained(op, input, *parameters):
    """The launches of a call on the last dimension without options, forward and backward; nothing is launched."""
    rows = input.reshape(-1, input.size(-1))
    centred, residual = "rms" not in op, rows if op.startswith("add") else None
    weight = torch.empty(rows.size(1), dtype=rows.dtype, device="meta")
    rstd = torch.empty(len(rows), dtype=accumulator(rows.dtype), device="meta")
    with noted() as launches:
        layer_norm_fwd(rows, residual, weight, weight if centred else None, None, 1e-5, 0.0, centred, 0.0, False)
        layer_norm_bwd(rows, None, rows, rstd, rstd, weight, None, 0.0, centred, 0.0, True, centred)
    return launches


_PROGRAMS: dict[tuple, int] = {}  # of a kernel, those that a multiprocessor holds at once


def _plan_occupied(memory, *arguments):
    """The plan for the GPU at hand."""
    device = arguments[2].device
    most = _occupied(arguments, room(device)) if device.type == "cuda" else room(device)
    return _plan_backward(memory, *arguments, most)


def _occupied(arguments, most):
    """The room, with as many programs as the compiled kernel's registers let the GPU run at once."""
    step = _plan_backward(Memory(), *arguments, most)[1][0]
    if step.kernel is not _backward_kernel:
        return most
    input = arguments[2]
    key = (input.device.index, input.dtype, *(each is None for each in step.arguments[:11]), *step.constants.values())
    if key not in _PROGRAMS:
        _PROGRAMS[key] = programs_at_once(step)
    return most._replace(programs=_PROGRAMS[key])


def aot_configurations(limit, thorough):
    """The launches to compile ahead of time, as (name, launch); they do not depend on shared memory (`limit`).

    thorough False: a few common row lengths. True: every path, aligned and not, and what uses most registers.
    """
    options = {  # residual, dropout, centred, weight and bias, offset of the weight, rounded before it
        "": (False, False, True, True, 0.0, False),
        "-add": (True, False, True, True, 0.0, False),
        "-dropout": (True, True, True, True, 0.0, False),
        "-rms": (False, False, False, True, 0.0, False),
        "-rms-dropout": (True, True, False, True, 0.0, False),
        "-rms-llama": (True, False, False, True, 0.0, True),
        "-rms-gemma": (True, False, False, True, 1.0, False),
        "-plain": (False, False, True, False, 0.0, False),
    }
    floats = (torch.bfloat16, torch.float32)
    lengths, kinds = [768, 4096, 16384], list(options)[:7]
    if thorough:
        floats += (torch.float16, torch.float64)
        lengths = [768, 5120] + [n - less for n in (16, 192, 1024, 2560, 4096, 6656, 8192, 16384) for less in (0, 3)]
        kinds = list(options)
    for dtype, n, kind in itertools.product(floats, lengths, kinds):
        add, drop, centred, affine, offset, rounds = options[kind]
        input = torch.empty((4096, n), dtype=dtype, device="meta")
        residual = input if add else None
        seed = torch.empty((), dtype=torch.int64, device="meta") if drop else None
        weight = input.new_empty((n,)) if affine else None
        p = 0.1 if drop else 0.0
        (_, _, mean, rstd), forward = _plan_forward(
            Memory(), input, residual, weight, weight, seed, 1e-5, p, centred, offset, rounds
        )
        mean = mean if centred else None
        launches = list(forward)
        for cache in (0, 2**30):  # long rows have a kernel for each
            of = Room(132, 2, cache)
            launches += _plan_backward(
                Memory(), input, residual, input, mean, rstd, weight, seed, p, offset, affine, affine, of
            )[1]
        for launch in {launch.name: launch for launch in launches}.values():
            if launch.kernel is not _reduce_kernel:
                yield f"{launch.name}-{str(dtype).removeprefix('torch.')}-N{n}{kind}", launch
    for dtype in (torch.float32, torch.float64):  # the second stage has neither lengths nor options
        for count in (1, 2):
            partials = torch.empty((count, 264, 4096), dtype=dtype, device="meta")
            name = f"layer_norm_reduce-{str(dtype).removeprefix('torch.')}-{count}"
            yield name, _plan_reduce(partials, [partials[0, 0]] * count)
