"""What one tile of attention needs: who sees whom, and what becomes of a score before its exponential.

An option that is not there costs nothing: its pointer (or limit) is None, which the compiler knows.

How scores are kept, UNITS, depends on the options, so that plain attention pays one multiply-add a score:

    RAW      z is q.k itself, one multiplication by scale log2(e) comes with the exponential (the running maximum too)
    SCALED   z is the score with scale, softcap and ALiBi in it; log2(e) comes with the exponential
    NATURAL  the same plus an additive mask, and the maximum is kept as it is: masks hold the most negative finite
             number, which times log2(e) would be -inf, and a row of nothing else would no longer be uniform

Query i sees i + low <= j <= i + high, where None is no limit. An option that may be None is an argument, never in a
result: Triton 3.6 makes a tensor of every element of a tuple that a function returns, and fails with None.
"""

import math

import triton
import triton.language as tl

from .._common import aligned, dot, keep_mask, load_tile, tile_scores

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
RAW = tl.constexpr(0)
SCALED = tl.constexpr(1)
NATURAL = tl.constexpr(2)

# fmt: off
# Signatures are kept in groups: pointers, strides, sizes, then what the kernel is compiled for.

@triton.jit
def packed_rows(s, starts_ptr, N, most):
    """The first row and the number of rows of a packed sequence. Volatile: read again behind a loop, not kept in it."""
    first = tl.minimum(tl.maximum(tl.load(starts_ptr + s, volatile=True).to(tl.int64), 0), N)
    end = tl.minimum(tl.load(starts_ptr + s + 1, volatile=True).to(tl.int64), N)
    return first, tl.minimum(tl.maximum(end - first, 0), most).to(tl.int32)


@triton.jit
def sequence(s, query_starts_ptr, key_starts_ptr, key_lengths_ptr, Nq, Nk, max_queries, max_keys):
    """Of sequence s: its batch entry, its first row and number of queries, its first row and number of keys, and how
    many of those keys count. Starts outside the tensors are cut to them: what they enclose is always there."""
    b = s
    query_start = s * 0
    key_start = s * 0
    nq = Nq
    rows = Nk
    if query_starts_ptr is not None:
        b = s * 0
        query_start, nq = packed_rows(s, query_starts_ptr, Nq, max_queries)
        key_start, rows = packed_rows(s, key_starts_ptr, Nk, max_keys)
    nk = rows
    if key_lengths_ptr is not None:
        nk = tl.minimum(tl.maximum(tl.load(key_lengths_ptr + s).to(tl.int64), 0), rows).to(tl.int32)
    return b, query_start, nq, key_start, rows, nk


@triton.jit
def zero_gaps(
    pointer, stride, starts_ptr, S, N, columns, value, program, programs, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """`value` into the rows before the first sequence and behind the last; `programs` of them share the work."""
    before = tl.minimum(tl.maximum(tl.load(starts_ptr).to(tl.int64), 0), N)
    behind = tl.maximum(tl.minimum(tl.load(starts_ptr + S).to(tl.int64), N), before)
    gap = before + N - behind
    column = tl.arange(0, COLUMNS)
    tile = tl.full([ROWS, COLUMNS], value, pointer.dtype.element_ty)
    for first in range(program * ROWS, gap, programs * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        at = tl.where(row < before, row, row + behind - before)
        inside = (row < gap)[:, None] & (column < columns)[None, :]
        tl.store(pointer + at[:, None] * stride + column[None, :], tile, mask=inside)


@triton.jit
def result_rows(pointer, starts_ptr, head, h, H, N, columns):
    """Where the rows of a head of a result begin, and their stride: (B, H, N, columns), or packed (N, H, columns)."""
    if starts_ptr is None:
        return pointer + head * N * columns, columns
    else:
        return pointer + h * columns, H * columns


@triton.jit
def key_range(query0, nq, nk, low, high, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """The key blocks of a tile of queries, as first, full, edge, last: whole blocks from full to edge are seen by every
    query of the tile, the blocks before and behind (up to last) by some, and all others by none."""
    end = tl.minimum(query0 + BLOCK_Q, nq)
    first = 0
    full = 0
    edge = nk
    last = nk
    if high is not None:
        last = tl.minimum(nk, tl.maximum(0, end + high))
        edge = tl.minimum(nk, tl.maximum(0, query0 + 1 + high))
    edge = edge // BLOCK_K * BLOCK_K
    if low is not None:
        first = tl.minimum(nk, tl.maximum(0, query0 + low)) // BLOCK_K * BLOCK_K
        full = tl.cdiv(tl.minimum(last, tl.maximum(0, end - 1 + low)), BLOCK_K) * BLOCK_K
        edge = tl.maximum(edge, full)
    return first, full, edge, last


@triton.jit
def query_range(key0, nq, nk, low, high, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same for a tile of keys: the query blocks first ... full, full ... edge, edge ... last."""
    end = tl.minimum(key0 + BLOCK_K, nk)
    last = tl.where(key0 < nk, nq, 0)
    first = 0
    full = 0
    edge = last
    if high is not None:
        first = tl.maximum(0, key0 - high) // BLOCK_Q * BLOCK_Q
        full = tl.cdiv(tl.minimum(nq, tl.maximum(0, end - 1 - high)), BLOCK_Q) * BLOCK_Q
    if low is not None:
        edge = tl.minimum(last, tl.maximum(0, key0 + 1 - low)) // BLOCK_Q * BLOCK_Q
        edge = tl.maximum(edge, full)
        last = tl.minimum(last, tl.maximum(0, end - low))
    return first, full, edge, last


@triton.jit
def visible(i, j, nk, low, high):
    """Which keys j which queries i see; one of them a column, the other a row."""
    seen = j < nk
    if low is not None:
        seen = seen & (j >= i + low)
    if high is not None:
        seen = seen & (j <= i + high)
    return seen


@triton.jit
def tanh(x):
    """To a few last places, small x too: rational below 0.625 (Cephes; Moshier 1989), 1 - 2 / (e^2x + 1) above."""
    a = tl.abs(x)
    square = x * x
    if x.dtype == tl.float64:
        p = (-9.64399179425052238628e-1 * square - 9.92877231001918586564e1) * square - 1.61468768441708447952e3
        q = (square + 1.12811678491632931402e2) * square + 2.23548839060100448583e3
        q = q * square + 4.84406305325125486048e3
        small = x + x * square * (p / q)
    else:
        p = (-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2
        p = (p * square + 1.33314422036e-1) * square - 3.33332819422e-1
        small = x + x * square * p
    large = 1.0 - 2.0 / (tl.exp2(a * (2.0 * LOG2E)) + 1.0)
    return tl.where(a < 0.625, small, tl.where(x < 0.0, -large, large))


@triton.jit
def distance(i, j, diagonal, ACC: tl.constexpr):
    return tl.abs(i + diagonal - j).to(ACC)


@triton.jit
def head_mask(mask_ptr, strides, s, h, MASK_COLUMNS: tl.constexpr):
    """Where the mask of head h of sequence s begins."""
    return mask_ptr + aligned(s * strides[0] + h * strides[1], MASK_COLUMNS == 8)


@triton.jit
def biased(
    score, i, query0, key0, row, column, nq, nk, diagonal, scale, softcap, slope, mask_ptr, mask_row,
    EDGE: tl.constexpr, UNITS: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr,
):
    """z of a tile of products q.k, but for the band, and the tanh in it (z itself without softcap).

    i: where the queries are; row and column, the positions within the tile, are a column and a row, or the other way
    round. mask_row is the mask's stride, None where it has one row. MASK_COLUMNS: 0 where it has one column, 8 where
    every row begins at a multiple of 8, else 1. EDGE False promises that all keys are there.
    """
    z = score
    bent = score
    if UNITS != RAW:
        if SOFTCAP:
            bent = tanh(score * (scale / softcap))
            z = bent * softcap
        else:
            z = score * scale
    if slope is not None:
        z -= slope * distance(i, key0 + column, diagonal, z.dtype)
    if mask_ptr is not None:
        at = mask_ptr
        inside = True
        if mask_row is not None:  # a scalar of 64 bits and offsets of 32
            mask_row = aligned(mask_row.to(tl.int64), MASK_COLUMNS == 8)
            at = at + query0 * mask_row
            offset = row * mask_row.to(tl.int32)
            inside = row < nq - query0
        if MASK_COLUMNS:
            at = at + key0
            offset = column if mask_row is None else offset + column
            if EDGE:
                inside = inside & (column < nk - key0)
        if MASK_COLUMNS or mask_row is not None:
            at = at + offset
        mask = tl.load(at, mask=inside, other=0)
        if UNITS == NATURAL:
            z += mask.to(z.dtype)
        else:
            z = tl.where(mask != 0, z, float("-inf"))
    return z, bent


@triton.jit
def power(z, shift, factor, UNITS: tl.constexpr):
    """e^(z - shift), the shift in the units that the running maximum has."""
    if UNITS == NATURAL:
        return tl.exp2((z - shift) * LOG2E)
    return tl.exp2(z * factor - shift)


@triton.jit
def rows_to_units(lse, UNITS: tl.constexpr):
    """A natural lse in the units of the running maximum; +inf for a row that sees nothing, so that p = 0."""
    if UNITS != NATURAL:
        lse *= LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def score_factor(scale, UNITS: tl.constexpr):
    """What z is multiplied by to become a power of two."""
    return scale * LOG2E if UNITS == RAW else scale * 0.0 + LOG2E


@triton.jit
def forward_blocks(
    acc, row_max, row_sum, query, i, tiles, first, last, place, low, high, numbers, slope, mask_ptr, mask_row, seed,
    EDGE: tl.constexpr, UNITS: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_DV: tl.constexpr, SLICE: tl.constexpr,
):
    """Adds the keys first ... last - 1 to the running maximum, sum and weighted values of a tile of queries.

    i: where the queries are, a column.
    """
    query_ptr, q_stride, key_ptr, k_stride, value_ptr, v_stride = tiles
    query0, first_row, nq, nk, diagonal, D, DV = place
    scale, softcap, _keep_scale, threshold = numbers
    row = tl.arange(0, query.shape[0])
    factor = score_factor(scale, UNITS)
    for key0 in range(first, last, BLOCK_K):
        key_at = key_ptr + key0 * k_stride
        keys = nk - key0
        key = load_tile(key_at, keys, D, k_stride, BLOCK_K, query.shape[1], EDGE)
        rows = nq - query0
        score = tile_scores(query, query_ptr, rows, q_stride, key, key_at, keys, k_stride, D, ACC, SLICE, PRECISION)
        column = tl.arange(0, BLOCK_K)
        j = (key0 + column)[None, :]
        z, _bent = biased(
            score, i, query0, key0, row[:, None], column[None, :], nq, nk, diagonal, scale, softcap, slope, mask_ptr,
            mask_row, EDGE, UNITS, SOFTCAP, MASK_COLUMNS,
        )
        if EDGE:
            z = tl.where(visible(i, j, nk, low, high), z, float("-inf"))
        largest = tl.max(z, 1)
        if UNITS != NATURAL:
            largest *= factor
        new_max = tl.maximum(row_max, largest)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # no key yet: e^(-inf - 0) = 0, not NaN
        p = power(z, shift[:, None], factor, UNITS)
        decay = power(row_max, shift, 1.0, UNITS)
        row_sum = row_sum * decay + tl.sum(p, 1)
        row_max = new_max
        if seed is not None:
            p = tl.where(keep_mask(seed, first_row + row, key0, threshold, BLOCK_K), p, 0.0)
        value = load_tile(value_ptr + key0 * v_stride, keys, DV, v_stride, BLOCK_K, BLOCK_DV, EDGE)
        acc = dot(p.to(value.dtype), value, acc * decay[:, None], PRECISION)
    return acc, row_max, row_sum

# fmt: on
