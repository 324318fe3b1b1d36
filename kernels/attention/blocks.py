"""What a tile of attention needs: which keys a query sees, and how a product q.k becomes the score in the exponent.

An absent option costs nothing: its pointer (or limit) is None, which the compiler knows.

How scores are kept, SCORES, depends on the options, so that plain attention pays one multiply-add a score:

    RAW      z is q.k; the exponential multiplies by scale log2(e), and so does the running maximum
    SCALED   z includes scale, softcap and ALiBi; the exponential multiplies by log2(e)
    NATURAL  also an additive mask; the maximum is kept as it is, because masks hold the most negative finite number:
             times log2(e) it would be -inf, and a row of nothing else would no longer be uniform

Query i sees i + low <= j <= i + high, where None is no limit. An option that may be None is always an argument and
never a result: Triton 3.6 makes a tensor of every element of a returned tuple, and fails with None.
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
# Signatures are grouped: pointers, strides, sizes, then compile-time constants.

@triton.jit
def packed_rows(s, starts_ptr, N, most):
    """First row and number of rows of a packed sequence. Volatile: loaded again after a loop instead of being kept
    across it."""
    first = tl.minimum(tl.maximum(tl.load(starts_ptr + s, volatile=True).to(tl.int64), 0), N)
    end = tl.minimum(tl.load(starts_ptr + s + 1, volatile=True).to(tl.int64), N)
    return first, tl.minimum(tl.maximum(end - first, 0), most).to(tl.int32)


@triton.jit
def sequence(s, query_starts_ptr, key_starts_ptr, key_lengths_ptr, Nq, Nk, max_queries, max_keys):
    """Of sequence s: batch entry, first row and number of queries, first row and number of keys, number of visible
    keys. Clamps starts to the tensors, so every row between them exists."""
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
    """Stores `value` into rows before the first sequence and after the last; `programs` programs share the work."""
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
    """Start and stride of a head's rows in a result: (B, H, N, columns), or packed (N, H, columns)."""
    if starts_ptr is None:
        return pointer + head * N * columns, columns
    else:
        return pointer + h * columns, H * columns


@triton.jit
def key_range(query0, nq, nk, low, high, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Key blocks of a tile of queries: first, full, edge, last. Blocks from full to edge are seen by every query of the
    tile, those before and after (up to last) by some, all others by none."""
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
    """Query blocks of a tile of keys: partly seen in first ... full, fully in full ... edge, partly in edge ... last.
    """
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
    """Which pairs of queries i and keys j are visible; one of them a column, the other a row."""
    seen = j < nk
    if low is not None:
        seen = seen & (j >= i + low)
    if high is not None:
        seen = seen & (j <= i + high)
    return seen


@triton.jit
def tanh(x):
    """tanh, correct to a few last places, also for small x: rational below 0.625 (Cephes; Moshier 1989), above it 1 - 2
    / (e^2x + 1)."""
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
    """Start of the mask of head h of sequence s."""
    return mask_ptr + aligned(s * strides[0] + h * strides[1], MASK_COLUMNS == 8)


@triton.jit
def biased(
    score, i, query0, key0, row, column, nq, nk, diagonal, scale, softcap, slope, mask_ptr, mask_row,
    EDGE: tl.constexpr, SCORES: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr,
):
    """(z, tanh) of a tile of products q.k, without the band. The tanh is softcap's; without softcap it is z.

    i: positions of the queries. row and column: positions within the tile, one a column and one a row. mask_row: the
    mask's row stride, None if it has one row. MASK_COLUMNS: 0 if the mask has one column, 8 if every row starts at a
    multiple of 8, else 1. EDGE False promises that all keys exist.
    """
    z = score
    bent = score
    if SCORES != RAW:
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
        if mask_row is not None:  # a 64-bit scalar and 32-bit offsets
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
        if SCORES == NATURAL:
            z += mask.to(z.dtype)
        else:
            z = tl.where(mask != 0, z, float("-inf"))
    return z, bent


@triton.jit
def power(z, shift, factor, SCORES: tl.constexpr):
    """e^(z - shift); the shift is scaled like the running maximum."""
    if SCORES == NATURAL:
        return tl.exp2((z - shift) * LOG2E)
    return tl.exp2(z * factor - shift)


@triton.jit
def scaled_lse(lse, SCORES: tl.constexpr):
    """A natural lse, scaled like the running maximum; +inf for a row that sees nothing, so that p = 0."""
    if SCORES != NATURAL:
        lse *= LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def score_factor(scale, SCORES: tl.constexpr):
    """The factor that makes z an exponent of two."""
    return scale * LOG2E if SCORES == RAW else scale * 0.0 + LOG2E


@triton.jit
def forward_blocks(
    acc, row_max, row_sum, query, i, tiles, first, last, place, low, high, numbers, slope, mask_ptr, mask_row, seed,
    EDGE: tl.constexpr, SCORES: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_DV: tl.constexpr, SLICE: tl.constexpr,
):
    """Adds keys first ... last - 1 to the running maximum, sum and weighted values of a tile of queries.

    i: positions of the queries, a column.
    """
    query_ptr, q_stride, key_ptr, k_stride, value_ptr, v_stride = tiles
    query0, first_row, nq, nk, diagonal, D, DV = place
    scale, softcap, _keep_scale, threshold = numbers
    row = tl.arange(0, query.shape[0])
    factor = score_factor(scale, SCORES)
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
            mask_row, EDGE, SCORES, SOFTCAP, MASK_COLUMNS,
        )
        if EDGE:
            z = tl.where(visible(i, j, nk, low, high), z, float("-inf"))
        largest = tl.max(z, 1)
        if SCORES != NATURAL:
            largest *= factor
        new_max = tl.maximum(row_max, largest)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # no key yet: e^(-inf - 0) = 0, not NaN
        p = power(z, shift[:, None], factor, SCORES)
        decay = power(row_max, shift, 1.0, SCORES)
        row_sum = row_sum * decay + tl.sum(p, 1)
        row_max = new_max
        if seed is not None:
            p = tl.where(keep_mask(seed, first_row + row, key0, threshold, BLOCK_K), p, 0.0)
        value = load_tile(value_ptr + key0 * v_stride, keys, DV, v_stride, BLOCK_K, BLOCK_DV, EDGE)
        acc = dot(p.to(value.dtype), value, acc * decay[:, None], PRECISION)
    return acc, row_max, row_sum

# fmt: on
