"""Attention with every option, forward and backward, in Triton.

The idea. Neither scores nor their gradients reach memory. The forward pass walks the keys block by block for a tile of
queries and keeps a running maximum and sum of each row (online softmax: Milakov & Gimelshein 2018; Dao et al. 2022); of
the softmax only lse is stored. The backward pass recomputes the probabilities from lse in two kernels that each own
what they write: dQ over tiles of queries (it also computes delta), then dK and dV over tiles of keys, summed over the
query heads of a group. No atomics: the same bits every run.

The equations, with diag = diagonal, or diagonal + nk - nq, and z = -inf outside the band i + low <= j <= i + high:

    s_ij = scale q_i.k_j      t_ij = softcap tanh(s_ij / softcap)      z_ij = t_ij - slope |i + diag - j| + mask_ij
    lse_i = log (sum_j e^z_ij + e^sink)                   p_ij = e^(z_ij - lse_i)         out_i = sum_j r_ij p_ij v_j
    dv_j = sum_i r_ij p_ij do_i   dp_ij = r_ij do_i.v_j   delta_i = do_i.out_i - dlse_i
    dz_ij = p_ij (dp_ij - delta_i)                        ds_ij = dz_ij (1 - (t_ij / softcap)^2)
    dq_i = scale sum_j ds_ij k_j  dk_j = scale sum_i ds_ij q_i
    dmask = dz, summed over what the mask is broadcast over           ddistance_i = sum_j dz_ij |i + diag - j|

with r_ij = 1 / (1 - p_drop) where dropout keeps (i, j), else 0. blocks.py has what a tile needs of this,
limits.py what a mask hides, decode.py split-KV decode (few queries, many keys), plans.py tiles and arguments.

Exponentials are powers of two. Blocks outside the band are never visited, and only the blocks at its edges compare
positions: a window is a left edge, a middle and a right edge. A row that sees no key gives out 0, lse -inf and zero
gradients. The gradient of a mask per sequence and head is written by the dQ kernel, which visits every score once. A
mask that several share has a kernel that owns its tiles and walks the sharers in order. Packed sequences read their
starts from device memory; tiles beyond a sequence's length end at once. A mask is looked at before (limits.py): keys
before the first and behind the last that it shows to a tile are not visited.

Shipped choices, each for the registers (NOTES.md has the figures): two loops, with and without the band's comparison,
instead of one with a branch; the heads of a group and their queries as one flat loop; 64-bit scalar bases with 32-bit
offsets; slices of the head dimension where there are no tensor cores, in a loop that must not unroll, so that head
dimensions are runtime arguments; lengths of packed sequences loaded again after the loop.
"""

import torch
import triton
import triton.language as tl

from .._common import (
    accumulator,
    aligned,
    dot,
    head_rows,
    keep_mask,
    load_tile,
    rounded,
    scalar,
    shared_memory,
    store_tile,
    tile_scores,
    unit_last,
)
from .._replay import Memory, noted, planned
from .blocks import (
    LN2,
    LOG2E,
    NATURAL,
    biased,
    distance,
    forward_blocks,
    head_mask,
    key_range,
    packed_rows,
    power,
    query_range,
    result_rows,
    scaled_lse,
    score_factor,
    sequence,
    visible,
    zero_gaps,
)
from .decode import decodes, packed, plan_decode
from .limits import limits, looked_at, narrowed
from .plans import SIZES, plan, prepare, result, statistics, tile_rows, usable

# fmt: off
# Signatures are grouped: pointers, strides, sizes, then compile-time constants.

@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    query_ptr, key_ptr, value_ptr, sinks_ptr, out_ptr, lse_ptr, q_strides, k_strides, v_strides,
    limits_ptr, limit_strides,
    mask_ptr, query_starts_ptr, key_starts_ptr, key_lengths_ptr, slopes_ptr, seed_ptr, mask_strides, mask_row,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64, threshold, diagonal, low, high, lower_right,
    S, H, Hk, Nq, Nk, D, DV, max_queries, max_keys,
    SCORES: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLICE: tl.constexpr,
):
    blocks = tl.cdiv(max_queries, BLOCK_Q)
    query0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = (tl.program_id(0) // blocks).to(tl.int64)
    s = head // H
    h = head % H
    hk = h // (H // Hk)
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    b, query_start, nq, key_start, _key_rows, nk = sequence(
        s, query_starts_ptr, key_starts_ptr, key_lengths_ptr, Nq, Nk, max_queries, max_keys
    )
    shift = lower_right * (nk - nq)
    diagonal += shift
    low = None if low is None else low + shift
    high = None if high is None else high + shift
    keys = nk
    if query_starts_ptr is not None:
        keys = tl.where(query0 < nq, nk, 0)  # a tile beyond the sequence visits no key
    first, full, edge, last = key_range(query0, nq, keys, low, high, BLOCK_Q, BLOCK_K)
    if limits_ptr is not None:
        tile = query0 // BLOCK_Q
        first, full, edge, last = narrowed(
            limits_ptr, limit_strides, s, h, 1, tile, first, full, edge, last, BLOCK_K
        )
    query_ptr, q_stride = head_rows(query_ptr, q_strides, b, h, query_start + query0, ALIGNED)
    key_ptr, k_stride = head_rows(key_ptr, k_strides, b, hk, key_start, ALIGNED)
    value_ptr, v_stride = head_rows(value_ptr, v_strides, b, hk, key_start, ALIGNED)
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head)
    mask_at = None if mask_ptr is None else head_mask(mask_ptr, mask_strides, s, h, MASK_COLUMNS)
    seed = None if seed_ptr is None else tl.load(seed_ptr)
    tiles = (query_ptr, q_stride, key_ptr, k_stride, value_ptr, v_stride)
    place = (query0, (b * H + h) * Nq + query_start + query0, nq, nk, diagonal, D, DV)
    keep_scale = scalar(keep_scale, ACC)
    numbers = (scalar(scale, ACC), scalar(softcap, ACC), keep_scale, threshold)

    query = load_tile(query_ptr, nq - query0, D, q_stride, BLOCK_Q, BLOCK_D)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], ACC)
    row_max = tl.full([BLOCK_Q], float("-inf"), ACC)  # over the keys so far, scaled as `power` expects
    row_sum = tl.zeros([BLOCK_Q], ACC)
    i = (query0 + tl.arange(0, BLOCK_Q))[:, None]
    if sinks_ptr is not None:  # a key without a value
        sink = tl.load(sinks_ptr + h)
        row_max = tl.maximum(row_max, sink if SCORES == NATURAL else sink * LOG2E)
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0).to(ACC)
    if low is not None:
        acc, row_max, row_sum = forward_blocks(
            acc, row_max, row_sum, query, i, tiles, first, tl.minimum(full, last), place, low, high, numbers, slope,
            mask_at, mask_row, seed, True, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, BLOCK_K, BLOCK_DV, SLICE,
        )
    acc, row_max, row_sum = forward_blocks(
        acc, row_max, row_sum, query, i, tiles, full, edge, place, low, high, numbers, slope, mask_at,
        mask_row, seed, False, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, BLOCK_K, BLOCK_DV, SLICE,
    )
    acc, row_max, row_sum = forward_blocks(
        acc, row_max, row_sum, query, i, tiles, edge, last, place, low, high, numbers, slope, mask_at,
        mask_row, seed, True, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, BLOCK_K, BLOCK_DV, SLICE,
    )

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees no key: out 0, lse -inf
    out = acc / row_sum[:, None]
    if seed is not None:
        out *= keep_scale
    if query_starts_ptr is not None:
        query_start, nq = packed_rows(s, query_starts_ptr, Nq, max_queries)
    out_ptr, o_stride = result_rows(out_ptr, query_starts_ptr, head, h, H, Nq, DV)
    lse_ptr += (b * H + h) * Nq if query_starts_ptr is not None else head * Nq
    first_row = query_start + query0
    store_tile(out_ptr + first_row * o_stride, out, nq - query0, DV, o_stride)
    lse = row_max + tl.log2(row_sum) * LN2 if SCORES == NATURAL else (row_max + tl.log2(row_sum)) * LN2
    row = tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + first_row + row, lse, mask=row < nq - query0)
    if query_starts_ptr is not None:
        program = s * blocks + query0 // BLOCK_Q
        zero_gaps(out_ptr, o_stride, query_starts_ptr, S, Nq, DV, 0.0, program, S * blocks, BLOCK_Q, BLOCK_DV)
        zero_gaps(lse_ptr, 1, query_starts_ptr, S, Nq, 1, float("-inf"), program, S * blocks, BLOCK_Q, 1)


@triton.jit
def _grad_query_blocks(
    grad_query, grad_distance, query, grad_out, lse, delta, tiles, grad_distance_ptr, grad_mask_ptr, first, last, place,
    low, high, numbers, slope, mask_ptr, mask_row, seed,
    EDGE: tl.constexpr, SCORES: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr,
):
    query_ptr, q_stride, grad_out_ptr, g_stride, key_ptr, k_stride, value_ptr, v_stride = tiles
    query0, first_row, nq, nk, diagonal, D, DV, max_keys = place
    scale, softcap, keep_scale, threshold = numbers
    rows = nq - query0
    row = tl.arange(0, query.shape[0])
    i = (query0 + row)[:, None]
    factor = score_factor(scale, SCORES)
    for key0 in range(first, last, BLOCK_K):
        key_at = key_ptr + key0 * k_stride
        value_at = value_ptr + key0 * v_stride
        keys = nk - key0
        key = load_tile(key_at, keys, D, k_stride, BLOCK_K, query.shape[1], EDGE)
        score = tile_scores(query, query_ptr, rows, q_stride, key, key_at, keys, k_stride, D, ACC, SLICE, PRECISION)
        column = tl.arange(0, BLOCK_K)
        j = (key0 + column)[None, :]
        z, bent = biased(
            score, i, query0, key0, row[:, None], column[None, :], nq, nk, diagonal, scale, softcap, slope, mask_ptr,
            mask_row, EDGE, SCORES, SOFTCAP, MASK_COLUMNS,
        )
        p = power(z, lse[:, None], factor, SCORES)
        if EDGE:
            p = tl.where(visible(i, j, nk, low, high), p, 0.0)
        value = load_tile(value_at, keys, DV, v_stride, BLOCK_K, grad_out.shape[1], EDGE)
        grad_p = tile_scores(
            grad_out, grad_out_ptr, rows, g_stride, value, value_at, keys, v_stride, DV, ACC, SLICE, PRECISION
        )
        if seed is not None:
            grad_p = tl.where(keep_mask(seed, first_row + row, key0, threshold, BLOCK_K), grad_p * keep_scale, 0.0)
        grad_score = p * (grad_p - delta[:, None])
        if grad_distance_ptr is not None:
            grad_distance += tl.sum(grad_score * distance(i, j, diagonal, ACC), 1)
        if grad_mask_ptr is not None:
            at = grad_mask_ptr + key0 + (row[:, None] * max_keys + column[None, :])
            tl.store(at, rounded(grad_score, grad_mask_ptr.dtype.element_ty), mask=(i < nq) & (j < nk))
        if SOFTCAP:
            grad_score *= 1.0 - bent * bent
        grad_query = dot(grad_score.to(key.dtype), key, grad_query, PRECISION)
    return grad_query, grad_distance


@triton.jit(do_not_specialize=SIZES)
def _grad_query_kernel(
    grad_out_ptr, grad_lse_ptr, query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, delta_ptr, grad_query_ptr,
    grad_distance_ptr, grad_mask_ptr, g_strides, q_strides, k_strides, v_strides, o_strides,
    limits_ptr, limit_strides,
    mask_ptr, query_starts_ptr, key_starts_ptr, key_lengths_ptr, slopes_ptr, seed_ptr, mask_strides, mask_row,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64, threshold, diagonal, low, high, lower_right,
    S, H, Hk, Nq, Nk, D, DV, max_queries, max_keys,
    SCORES: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLICE: tl.constexpr,
):
    blocks = tl.cdiv(max_queries, BLOCK_Q)
    query0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = (tl.program_id(0) // blocks).to(tl.int64)
    s = head // H
    h = head % H
    hk = h // (H // Hk)
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    b, query_start, nq, key_start, _key_rows, nk = sequence(
        s, query_starts_ptr, key_starts_ptr, key_lengths_ptr, Nq, Nk, max_queries, max_keys
    )
    shift = lower_right * (nk - nq)
    diagonal += shift
    low = None if low is None else low + shift
    high = None if high is None else high + shift
    keys = nk
    if query_starts_ptr is not None:
        keys = tl.where(query0 < nq, nk, 0)
    first, full, edge, last = key_range(query0, nq, keys, low, high, BLOCK_Q, BLOCK_K)
    if limits_ptr is not None:
        tile = query0 // BLOCK_Q
        first, full, edge, last = narrowed(
            limits_ptr, limit_strides, s, h, 1, tile, first, full, edge, last, BLOCK_K
        )
    at = query_start + query0
    grad_out_ptr, g_stride = head_rows(grad_out_ptr, g_strides, b, h, at, ALIGNED)
    query_ptr, q_stride = head_rows(query_ptr, q_strides, b, h, at, ALIGNED)
    out_ptr, o_stride = head_rows(out_ptr, o_strides, b, h, at, ALIGNED)
    key_ptr, k_stride = head_rows(key_ptr, k_strides, b, hk, key_start, ALIGNED)
    value_ptr, v_stride = head_rows(value_ptr, v_strides, b, hk, key_start, ALIGNED)
    scale = scalar(scale, ACC)

    first_row = (b * H + h) * Nq + at
    row = tl.arange(0, BLOCK_Q)
    rows = nq - query0
    grad_out = load_tile(grad_out_ptr, rows, DV, g_stride, BLOCK_Q, BLOCK_DV)
    out = load_tile(out_ptr, rows, DV, o_stride, BLOCK_Q, BLOCK_DV)
    lse = tl.load(lse_ptr + first_row + row, mask=row < rows, other=float("-inf"))
    delta = tl.sum(grad_out.to(ACC) * out.to(ACC), 1)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + first_row + row, mask=row < rows, other=0.0)
    delta = tl.where(lse == float("-inf"), 0.0, delta)  # the gradient of an lse of -inf has no effect
    tl.store(delta_ptr + first_row + row, delta, mask=row < rows)
    lse = scaled_lse(lse, SCORES)

    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head)
    mask_at = None if mask_ptr is None else head_mask(mask_ptr, mask_strides, s, h, MASK_COLUMNS)
    seed = None if seed_ptr is None else tl.load(seed_ptr)
    grad_mask_at = None if grad_mask_ptr is None else grad_mask_ptr + (head * max_queries + query0) * max_keys
    tiles = (query_ptr, q_stride, grad_out_ptr, g_stride, key_ptr, k_stride, value_ptr, v_stride)
    place = (query0, first_row, nq, nk, diagonal, D, DV, max_keys)
    numbers = (scale, scalar(softcap, ACC), scalar(keep_scale, ACC), threshold)
    query = load_tile(query_ptr, rows, D, q_stride, BLOCK_Q, BLOCK_D)
    grad_query = tl.zeros([BLOCK_Q, BLOCK_D], ACC)
    grad_distance = tl.zeros([BLOCK_Q], ACC)  # optimised away where there is no pointer
    if low is not None:
        grad_query, grad_distance = _grad_query_blocks(
            grad_query, grad_distance, query, grad_out, lse, delta, tiles, grad_distance_ptr, grad_mask_at, first,
            tl.minimum(full, last), place, low, high, numbers, slope, mask_at, mask_row, seed,
            True, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, BLOCK_K, SLICE,
        )
    grad_query, grad_distance = _grad_query_blocks(
        grad_query, grad_distance, query, grad_out, lse, delta, tiles, grad_distance_ptr, grad_mask_at, full, edge,
        place, low, high, numbers, slope, mask_at, mask_row, seed,
        False, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, BLOCK_K, SLICE,
    )
    grad_query, grad_distance = _grad_query_blocks(
        grad_query, grad_distance, query, grad_out, lse, delta, tiles, grad_distance_ptr, grad_mask_at, edge, last,
        place, low, high, numbers, slope, mask_at, mask_row, seed,
        True, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, BLOCK_K, SLICE,
    )
    if query_starts_ptr is not None:
        query_start, nq = packed_rows(s, query_starts_ptr, Nq, max_queries)
    grad_query_ptr, gq_stride = result_rows(grad_query_ptr, query_starts_ptr, head, h, H, Nq, D)
    first_row = query_start + query0
    store_tile(grad_query_ptr + first_row * gq_stride, grad_query * scale, nq - query0, D, gq_stride)
    program = s * blocks + query0 // BLOCK_Q
    if query_starts_ptr is not None:
        zero_gaps(grad_query_ptr, gq_stride, query_starts_ptr, S, Nq, D, 0.0, program, S * blocks, BLOCK_Q, BLOCK_D)
    if grad_distance_ptr is not None:
        grad_distance_ptr += (b * H + h) * Nq
        tl.store(grad_distance_ptr + first_row + row, grad_distance, mask=row < nq - query0)
        if query_starts_ptr is not None:
            zero_gaps(grad_distance_ptr, 1, query_starts_ptr, S, Nq, 1, 0.0, program, S * blocks, BLOCK_Q, 1)


@triton.jit
def _grad_key_value_blocks(
    grad_key, grad_value, key, value, tiles, q_strides, g_strides, first, last, place, low, high, numbers,
    slopes_ptr, mask_ptr, mask_strides, mask_row, seed,
    EDGE: tl.constexpr, SCORES: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, SLICE: tl.constexpr,
):
    """Adds queries first ... last - 1 of every head of the group. Score tiles are (BLOCK_K, BLOCK_Q) here."""
    key_ptr, k_stride, value_ptr, v_stride, query_ptr, grad_out_ptr, lse_ptr, delta_ptr = tiles
    s, b, hk, query_start, key0, nq, nk, diagonal, H, Hk, Nq, D, DV = place
    scale, softcap, keep_scale, threshold = numbers
    keys = nk - key0
    row = tl.arange(0, BLOCK_Q)
    column = tl.arange(0, key.shape[0])
    j = (key0 + column)[:, None]
    factor = score_factor(scale, SCORES)
    group = H // Hk
    blocks = tl.cdiv(tl.maximum(0, last - first), BLOCK_Q)
    for step in range(group * blocks):
        h = hk * group + step // tl.maximum(blocks, 1)
        query0 = first + step % tl.maximum(blocks, 1) * BLOCK_Q
        rows = nq - query0
        i = (query0 + row)[None, :]
        query_at, q_stride = head_rows(query_ptr, q_strides, b, h, query_start + query0, ALIGNED)
        grad_out_at, g_stride = head_rows(grad_out_ptr, g_strides, b, h, query_start + query0, ALIGNED)
        query = load_tile(query_at, rows, D, q_stride, BLOCK_Q, key.shape[1])
        at = (b * H + h) * Nq + query_start + query0
        lse = scaled_lse(tl.load(lse_ptr + at + row, mask=row < rows, other=float("-inf")), SCORES)
        slope = None if slopes_ptr is None else tl.load(slopes_ptr + s * H + h)
        mask_at = None if mask_ptr is None else head_mask(mask_ptr, mask_strides, s, h, MASK_COLUMNS)
        score = tile_scores(key, key_ptr, keys, k_stride, query, query_at, rows, q_stride, D, ACC, SLICE, PRECISION)
        z, bent = biased(
            score, i, query0, key0, row[None, :], column[:, None], nq, nk, diagonal, scale, softcap, slope, mask_at,
            mask_row, True, SCORES, SOFTCAP, MASK_COLUMNS,
        )
        p = power(z, lse[None, :], factor, SCORES)
        if EDGE:
            p = tl.where(visible(i, j, nk, low, high), p, 0.0)
        grad_out = load_tile(grad_out_at, rows, DV, g_stride, BLOCK_Q, value.shape[1])
        kept = p
        if seed is not None:
            keep = tl.trans(keep_mask(seed, at + row, key0, threshold, key.shape[0]))
            kept = tl.where(keep, p, 0.0)
        grad_value = dot(kept.to(grad_out.dtype), grad_out, grad_value, PRECISION)
        grad_p = tile_scores(
            value, value_ptr, keys, v_stride, grad_out, grad_out_at, rows, g_stride, DV, ACC, SLICE, PRECISION
        )
        if seed is not None:
            grad_p = tl.where(keep, grad_p * keep_scale, 0.0)
        delta = tl.load(delta_ptr + at + row, mask=row < rows, other=0.0)
        grad_score = p * (grad_p - delta[None, :])
        if SOFTCAP:
            grad_score *= 1.0 - bent * bent
        grad_key = dot(grad_score.to(query.dtype), query, grad_key, PRECISION)
    return grad_key, grad_value


@triton.jit(do_not_specialize=SIZES)
def _grad_key_value_kernel(
    grad_out_ptr, query_ptr, key_ptr, value_ptr, lse_ptr, delta_ptr, grad_key_ptr, grad_value_ptr,
    g_strides, q_strides, k_strides, v_strides, limits_ptr, limit_strides,
    mask_ptr, query_starts_ptr, key_starts_ptr, key_lengths_ptr, slopes_ptr, seed_ptr, mask_strides, mask_row,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64, threshold, diagonal, low, high, lower_right,
    S, H, Hk, Nq, Nk, D, DV, max_queries, max_keys,
    SCORES: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLICE: tl.constexpr,
):
    blocks = tl.cdiv(max_keys, BLOCK_K)
    key0 = tl.program_id(0) % blocks * BLOCK_K
    key_head = (tl.program_id(0) // blocks).to(tl.int64)
    s = key_head // Hk
    hk = key_head % Hk
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    b, query_start, nq, key_start, rows, nk = sequence(
        s, query_starts_ptr, key_starts_ptr, key_lengths_ptr, Nq, Nk, max_queries, max_keys
    )
    shift = lower_right * (nk - nq)
    diagonal += shift
    low = None if low is None else low + shift
    high = None if high is None else high + shift
    first, full, edge, last = query_range(key0, nq, nk, low, high, BLOCK_Q, BLOCK_K)
    if limits_ptr is not None:
        group = H // Hk
        tile = key0 // BLOCK_K
        first, full, edge, last = narrowed(
            limits_ptr, limit_strides, s, hk * group, group, tile, first, full, edge, last, BLOCK_Q
        )
    at = key_start + key0
    key_ptr, k_stride = head_rows(key_ptr, k_strides, b, hk, at, ALIGNED)
    value_ptr, v_stride = head_rows(value_ptr, v_strides, b, hk, at, ALIGNED)
    seed = None if seed_ptr is None else tl.load(seed_ptr)
    scale = scalar(scale, ACC)
    keep_scale = scalar(keep_scale, ACC)
    tiles = (key_ptr, k_stride, value_ptr, v_stride, query_ptr, grad_out_ptr, lse_ptr, delta_ptr)
    place = (s, b, hk, query_start, key0, nq, nk, diagonal, H, Hk, Nq, D, DV)
    numbers = (scale, scalar(softcap, ACC), keep_scale, threshold)
    key = load_tile(key_ptr, nk - key0, D, k_stride, BLOCK_K, BLOCK_D)
    value = load_tile(value_ptr, nk - key0, DV, v_stride, BLOCK_K, BLOCK_DV)
    grad_key = tl.zeros([BLOCK_K, BLOCK_D], ACC)
    grad_value = tl.zeros([BLOCK_K, BLOCK_DV], ACC)
    if high is not None:
        grad_key, grad_value = _grad_key_value_blocks(
            grad_key, grad_value, key, value, tiles, q_strides, g_strides, first, tl.minimum(full, last), place, low,
            high, numbers, slopes_ptr, mask_ptr, mask_strides, mask_row, seed,
            True, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, ALIGNED, BLOCK_Q, SLICE,
        )
    grad_key, grad_value = _grad_key_value_blocks(
        grad_key, grad_value, key, value, tiles, q_strides, g_strides, full, edge, place, low, high,
        numbers, slopes_ptr, mask_ptr, mask_strides, mask_row, seed,
        False, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, ALIGNED, BLOCK_Q, SLICE,
    )
    if low is not None:
        grad_key, grad_value = _grad_key_value_blocks(
            grad_key, grad_value, key, value, tiles, q_strides, g_strides, edge, last, place, low, high,
            numbers, slopes_ptr, mask_ptr, mask_strides, mask_row, seed,
            True, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, ALIGNED, BLOCK_Q, SLICE,
        )
    if seed is not None:
        grad_value *= keep_scale
    grad_key *= scale
    if key_lengths_ptr is not None:  # keys beyond the length must be 0, whatever their sums are
        counts = (tl.arange(0, BLOCK_K) < nk - key0)[:, None]
        grad_key = tl.where(counts, grad_key, 0.0)
        grad_value = tl.where(counts, grad_value, 0.0)
    if key_starts_ptr is not None:
        key_start, rows = packed_rows(s, key_starts_ptr, Nk, max_keys)
    grad_key_ptr, gk_stride = result_rows(grad_key_ptr, key_starts_ptr, key_head, hk, Hk, Nk, D)
    grad_value_ptr, gv_stride = result_rows(grad_value_ptr, key_starts_ptr, key_head, hk, Hk, Nk, DV)
    at = key_start + key0
    store_tile(grad_key_ptr + at * gk_stride, grad_key, rows - key0, D, gk_stride)
    store_tile(grad_value_ptr + at * gv_stride, grad_value, rows - key0, DV, gv_stride)
    if key_starts_ptr is not None:
        program = s * blocks + key0 // BLOCK_K
        zero_gaps(grad_key_ptr, gk_stride, key_starts_ptr, S, Nk, D, 0.0, program, S * blocks, BLOCK_K, BLOCK_D)
        zero_gaps(grad_value_ptr, gv_stride, key_starts_ptr, S, Nk, DV, 0.0, program, S * blocks, BLOCK_K, BLOCK_DV)


@triton.jit(do_not_specialize=SIZES)
def _grad_mask_kernel(
    grad_out_ptr, query_ptr, key_ptr, value_ptr, lse_ptr, delta_ptr, grad_mask_ptr,
    g_strides, q_strides, k_strides, v_strides, grad_mask_sizes,
    mask_ptr, query_starts_ptr, key_starts_ptr, key_lengths_ptr, slopes_ptr, seed_ptr, mask_strides, mask_row,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64, threshold, diagonal, low, high, lower_right,
    S, H, Hk, Nq, Nk, D, DV, max_queries, max_keys,
    SCORES: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLICE: tl.constexpr,
):
    """The gradient of a mask that sequences or heads share. A program owns a tile and walks the sharers."""
    query_blocks = tl.cdiv(max_queries, BLOCK_Q)
    key_blocks = tl.cdiv(max_keys, BLOCK_K)
    tile = (tl.program_id(0) // (query_blocks * key_blocks)).to(tl.int64)
    query0 = tl.program_id(0) // key_blocks % query_blocks * BLOCK_Q
    key0 = tl.program_id(0) % key_blocks * BLOCK_K
    mask_s = tile // grad_mask_sizes[1]
    mask_h = tile % grad_mask_sizes[1]
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    scale = scalar(scale, ACC)
    softcap = scalar(softcap, ACC)
    keep_scale = scalar(keep_scale, ACC)
    factor = score_factor(scale, SCORES)
    seed = None if seed_ptr is None else tl.load(seed_ptr)
    row = tl.arange(0, BLOCK_Q)
    i = (query0 + row)[:, None]
    column = tl.arange(0, BLOCK_K)
    j = (key0 + column)[None, :]
    heads = H // grad_mask_sizes[1]  # H or 1
    grad_mask = tl.zeros([BLOCK_Q, BLOCK_K], ACC)
    for step in range(S // grad_mask_sizes[0] * heads):
        s = mask_s + step // heads
        h = mask_h + step % heads
        b, query_start, nq, key_start, _key_rows, nk = sequence(
            s, query_starts_ptr, key_starts_ptr, key_lengths_ptr, Nq, Nk, max_queries, max_keys
        )
        shift = lower_right * (nk - nq)
        diag = diagonal + shift
        lowest = None if low is None else low + shift
        highest = None if high is None else high + shift
        first, _full, _edge, last = key_range(query0, nq, nk, lowest, highest, BLOCK_Q, BLOCK_K)
        if (query0 < nq) & (first <= key0) & (key0 < last):
            at = query_start + query0
            query_at, q_stride = head_rows(query_ptr, q_strides, b, h, at, ALIGNED)
            grad_out_at, g_stride = head_rows(grad_out_ptr, g_strides, b, h, at, ALIGNED)
            key_at, k_stride = head_rows(key_ptr, k_strides, b, h // (H // Hk), key_start + key0, ALIGNED)
            value_at, v_stride = head_rows(value_ptr, v_strides, b, h // (H // Hk), key_start + key0, ALIGNED)
            rows = nq - query0
            keys = nk - key0
            query = load_tile(query_at, rows, D, q_stride, BLOCK_Q, BLOCK_D)
            key = load_tile(key_at, keys, D, k_stride, BLOCK_K, BLOCK_D)
            score = tile_scores(query, query_at, rows, q_stride, key, key_at, keys, k_stride, D, ACC, SLICE, PRECISION)
            slope = None if slopes_ptr is None else tl.load(slopes_ptr + s * H + h)
            mask_at = head_mask(mask_ptr, mask_strides, s, h, MASK_COLUMNS)
            z, _bent = biased(
                score, i, query0, key0, row[:, None], column[None, :], nq, nk, diag, scale, softcap, slope, mask_at,
                mask_row, True, SCORES, SOFTCAP, MASK_COLUMNS,
            )
            first_row = (b * H + h) * Nq + at
            lse = scaled_lse(tl.load(lse_ptr + first_row + row, mask=row < rows, other=float("-inf")), SCORES)
            p = tl.where(visible(i, j, nk, lowest, highest), power(z, lse[:, None], factor, SCORES), 0.0)
            grad_out = load_tile(grad_out_at, rows, DV, g_stride, BLOCK_Q, BLOCK_DV)
            value = load_tile(value_at, keys, DV, v_stride, BLOCK_K, BLOCK_DV)
            grad_p = tile_scores(
                grad_out, grad_out_at, rows, g_stride, value, value_at, keys, v_stride, DV, ACC, SLICE, PRECISION
            )
            if seed is not None:
                grad_p = tl.where(keep_mask(seed, first_row + row, key0, threshold, BLOCK_K), grad_p * keep_scale, 0.0)
            delta = tl.load(delta_ptr + first_row + row, mask=row < rows, other=0.0)
            grad_mask += p * (grad_p - delta[:, None])
    at = grad_mask_ptr + (tile * max_queries + query0) * max_keys + key0
    store_tile(at, grad_mask, max_queries - query0, max_keys - key0, max_keys)

# fmt: on
# ---- launchers ----------------------------------------------------------------------------------------------------


def _setting(query):
    """What `plan` asks torch for beside its arguments."""
    return torch.backends.cuda.matmul.fp32_precision if query.dtype == torch.float32 else None


def _limited(memory, kernel, pointers, strided, problem, queries=True):
    """The launch of a kernel, after that of its mask's limits: of its tiles of queries, or of keys."""
    block_q, block_k = tile_rows(kernel, strided, problem)
    found, before = limits(memory, problem, block_q if queries else block_k, queries)
    return [*before, plan(kernel, pointers, strided, problem, *found)]


def _plan_forward(memory, query, key, value, mask, *others):
    """(out, lse), and the launches that write them. `others` as in `attention_fwd`, with the sinks after the seed."""
    *tensors, sinks = others[:6]
    problem = prepare(query, key, value, mask, *tensors, *others[6:16])
    (b, h, nq, _), dv = query.shape, value.size(-1)
    out = result(memory, problem, (b, h, nq, dv))
    lse = statistics(memory, problem, (b, h, nq), float("-inf"))
    pointers = (query, key, value, sinks, out, lse)
    return (out, lse), _limited(memory, _forward_kernel, pointers, (query, key, value), problem)


def _plan_decode(memory, query, key, value, mask, *others):
    """The same for a packed query; the last argument is the number of its heads."""
    *tensors, sinks = others[:6]
    problem = prepare(query, key, value, mask, *tensors, *others[6:16])
    return plan_decode(memory, problem, sinks, others[-1])


def _plan_backward(memory, grad_out, grad_lse, out, lse, query, key, value, mask, *others):
    """What `attention_bwd` returns, and the launches that write it.

    `others` as in `attention_bwd`, without sinks; then (shape, dtype) of a mask that needs a gradient, or None, and
    whether the slopes need one.
    """
    problem = prepare(query, key, value, mask, *others[:15])
    wanted, need_slopes = others[-2:]
    delta = memory.empty(lse, lse.shape)
    grads = [result(memory, problem, tensor.shape) for tensor in (query, key, value)]
    grad_mask, grad_distance, alone = None, None, False
    if wanted is not None:
        shape, dtype = wanted
        alone = shape[:2] == (problem.sequences, query.size(1))
        everywhere = problem.low is None and problem.high is None and problem.visits_every_key
        everywhere = everywhere and not looked_at(problem)
        written = everywhere or not alone
        grad_mask = memory.empty(query, shape, dtype) if written else memory.full(query, shape, 0.0, dtype)
    if need_slopes:
        grad_distance = statistics(memory, problem, lse.shape, 0.0)
    pointers = (grad_out, grad_lse, query, key, value, out, lse, delta, grads[0], grad_distance)
    pointers += (grad_mask if alone else None,)
    strided = (grad_out, query, key, value, out)
    launches = _limited(memory, _grad_query_kernel, pointers, strided, problem)
    pointers = (grad_out, query, key, value, lse, delta, grads[1], grads[2])
    strided = (grad_out, query, key, value)
    launches += _limited(memory, _grad_key_value_kernel, pointers, strided, problem, queries=False)
    if wanted is not None and not alone:
        pointers = (grad_out, query, key, value, lse, delta, grad_mask)
        strided = (grad_out, query, key, value)
        launches.append(plan(_grad_mask_kernel, pointers, strided, problem, shape[:2]))
    others = (memory.empty(lse, (0,)) if each is None else each for each in (grad_mask, grad_distance))
    return (*grads, *others), launches


def attention_fwd(
    query, key, value, attn_mask, query_starts, key_starts, key_lengths, alibi_slopes, sinks, seed, max_queries,
    max_keys, diagonal, lower_right, left, right, scale, softcap, dropout_p,
):  # fmt: skip
    """The launcher behind `seqkern::attention_fwd`: (out, lse)."""
    heads = query.size(1)
    query, key, value, mask, scale, _ = usable(query, key, value, attn_mask, alibi_slopes, scale, softcap)
    limit = shared_memory(query.device)
    options = (max_queries, max_keys, diagonal, lower_right, left, right, scale, softcap, dropout_p, limit)
    options += (_setting(query),)
    make = _plan_forward
    if decodes(query, key, mask, query_starts, seed):
        make, query, options = _plan_decode, packed(query, key), (*options, heads)
    tensors = (query, key, value, mask, query_starts, key_starts, key_lengths, alibi_slopes, seed, sinks)
    return planned(make, tensors, options, query.device)


def attention_bwd(
    grad_out, grad_lse, query, key, value, out, lse, attn_mask, query_starts, key_starts, key_lengths, alibi_slopes,
    seed, max_queries, max_keys, diagonal, lower_right, left, right, scale, softcap, dropout_p, need_mask, need_slopes,
):  # fmt: skip
    """The launcher behind `seqkern::attention_bwd`: (grad_query, grad_key, grad_value, grad_mask, grad_distance)."""
    query, key, value, mask, scale, sign = usable(query, key, value, attn_mask, alibi_slopes, scale, softcap)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    tensors = (
        unit_last(grad_out), grad_lse, unit_last(out), lse.contiguous(), query, key, value, mask, query_starts,
        key_starts, key_lengths, alibi_slopes, seed,
    )  # fmt: skip
    wanted = (tuple(attn_mask.shape), attn_mask.dtype) if need_mask else None
    options = (
        max_queries, max_keys, diagonal, lower_right, left, right, scale, softcap, dropout_p,
        shared_memory(query.device), _setting(query), wanted, need_slopes,
    )  # fmt: skip
    grads = planned(_plan_backward, tensors, options, query.device)
    return grads if sign is None else (grads[0] * sign, *grads[1:])


def explained(op, query, key=None, value=None):
    """The launches of a call without options, forward and backward, for `explain`; nothing is launched."""
    key, value = (query if each is None else each for each in (key, value))
    starts = None
    if op == "attention_varlen":  # packed (T, H, D)
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        starts = torch.empty(2, dtype=torch.int32, device="meta")
    query, key, value = (each[(None,) * (4 - each.dim())].flatten(0, -4) for each in (query, key, value))
    sizes = (query.size(2), key.size(2), 0, False, -1, -1, query.size(-1) ** -0.5, 0.0, 0.0)
    options = (None, starts, starts, None, None)
    with noted() as launches:
        attention_fwd(query, key, value, *options, None, None, *sizes)
        if op != "attention_decode":
            out = torch.empty((*query.shape[:3], value.size(-1)), dtype=query.dtype, device="meta")
            lse = out.new_empty(query.shape[:3], dtype=accumulator(query.dtype))
            attention_bwd(out, None, query, key, value, out, lse, *options, None, *sizes, False, False)
    return launches


# For the ahead-of-time gate: arguments of `prepare` for each option, and whether it comes with gradient tensors.
_AOT_OPTIONS = {
    "full": {},
    "causal": {"right": 0},
    "packed window": {"left": 512, "right": 0, "varlen": True, "sinks": True},
    "lengths": {"right": 0, "lengths": True},
    "bool mask": {"mask": torch.bool},
    "mask": {"mask": torch.float32, "need_mask": True},
    "alibi": {"right": 0, "alibi": True, "need_slopes": True},
    "softcap": {"right": 0, "softcap": 30.0},
    "dropout": {"right": 0, "dropout_p": 0.1},
}
_AOT_OPTIONS["all"] = {name: value for options in _AOT_OPTIONS.values() for name, value in options.items()}


def aot_configurations(limit, thorough):
    """The launches to compile ahead of time for a device with `limit` bytes of shared memory, as (name, launch).

    thorough False: the common head dimensions, and all options at once. True: every row of the tile table, exact,
    padded and unaligned, without options and with each of them.
    """
    floats = (torch.bfloat16, torch.float32)
    cases = [(dtype, d, d, "causal") for dtype in floats for d in (64, 128)] + [(torch.bfloat16, 64, 64, "all")]
    decoding = [(torch.bfloat16, 128, 128, "all")]
    if thorough:
        dtypes = (*floats, torch.float16, torch.float64)
        dims = [(d - less, d - less) for d in (16, 64, 128, 256) for less in (0, 8, 3)] + [(192, 128)]
        cases = [(dtype, d, dv, name) for dtype in dtypes for d, dv in dims for name in ("full", "causal")]
        decoding = [(dtype, d, dv, name) for dtype in dtypes for d, dv in dims for name in ("lengths", "all")]
        cases += [
            (dtype, d, d, name)
            for dtype in (*floats, torch.float64)
            for d in (64, 128, 256)
            for name in _AOT_OPTIONS
            if name not in ("full", "causal")
        ]
        names = ("packed window", "mask", "all")
        cases += [(dtype, d, d, name) for dtype in floats for d in (61, 125, 253) for name in names]
    for launches, configurations in ((_aot_launches, cases), (_aot_decoding, decoding)):
        for dtype, d, dv, name in configurations:
            for launch in launches(dtype, d, dv, limit, **_AOT_OPTIONS[name]):
                yield f"{launch.name}-{str(dtype).removeprefix('torch.')}-D{d}-Dv{dv}-{name}", launch


def _aot_decoding(dtype, d, dv, limit, left=-1, alibi=False, softcap=0.0, sinks=False, **others):
    for queries in (1, 8):
        query = torch.empty((2, 32, queries, d), dtype=dtype, device="meta")
        key, value = query.new_empty((2, 4, 4096, d)), query.new_empty((2, 4, 4096, dv))
        number = torch.empty((2, 32), dtype=accumulator(dtype), device="meta")
        problem = prepare(
            packed(query, key), key, value, None, None, None, query.new_empty(2, dtype=torch.int32),
            number if alibi else None, None, queries, 4096, 0, True, left, 0, 0.1, softcap, 0.0, limit,
        )  # fmt: skip
        yield from plan_decode(Memory(), problem, number[0] if sinks else None, 32)[1]


def _aot_launches(
    dtype, d, dv, limit, left=-1, right=-1, varlen=False, lengths=False, sinks=False, mask=None, need_mask=False,
    alibi=False, need_slopes=False, softcap=0.0, dropout_p=0.0,
):  # fmt: skip
    b, h, n = 1 if varlen else 2, 4, 1024
    query = torch.empty((b, h, n, d), dtype=dtype, device="meta")
    key, value = query[:, :2], query.new_empty((b, 2, n, dv))
    starts = query.new_empty(3, dtype=torch.int32) if varlen else None
    lse = query.new_empty((b, h, n), dtype=accumulator(dtype))
    mask = None if mask is None else query.new_empty((2, h, n, n), dtype=mask)
    slopes = lse.new_empty((2, h)) if alibi else None
    query, key, value, read, scale, _ = usable(query, key, value, mask, slopes, 0.1, softcap)
    tensors = (
        query, key, value, read, starts, starts, query.new_empty(2, dtype=torch.int32) if lengths else None, slopes,
        query.new_empty((), dtype=torch.int64) if dropout_p else None,
    )  # fmt: skip
    options = (n, n, 0, False, left, right, scale, softcap, dropout_p, limit)
    (out, _), launches = _plan_forward(Memory(), *tensors, lse.new_empty(h) if sinks else None, *options)
    yield from launches
    for shape in [None] if not need_mask else [(2, h, n, n), (1, h, n, n)]:
        wanted = None if shape is None else (shape, mask.dtype)
        _, launches = _plan_backward(Memory(), out, lse, out, lse, *tensors, *options, wanted, need_slopes)
        yield from launches if shape in (None, (2, h, n, n)) else launches[-1:]
