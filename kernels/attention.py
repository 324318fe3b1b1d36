"""Attention, forward and backward, in Triton.  HEADER
"""

import math

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, aligned, dot, run, scalar, shared_memory, unit_last

LOG2E = tl.constexpr(math.log2(math.e))
_SIZES = ["diagonal", "H", "Hk", "Nq", "Nk", "D", "DV", "g_strides", "q_strides", "k_strides", "v_strides", "o_strides"]
LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _load(pointer, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EDGE: tl.constexpr = True):
    """The (rows, columns) matrix at `pointer` as a (ROWS, COLUMNS) tile, zero where the tile is larger.

    EDGE False promises at least ROWS rows.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (column < columns)[None, :]
    if EDGE:
        mask = mask & (row < rows)[:, None]
    return tl.load(pointer + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _rows(pointer, strides, b, h, row, ALIGNED: tl.constexpr):
    """Where row `row` of head (b, h) begins, and the stride to the next row."""
    stride = aligned(strides[2].to(tl.int64), ALIGNED)
    return pointer + aligned(b * strides[0] + h * strides[1] + row * strides[2].to(tl.int64), ALIGNED), stride


@triton.jit
def _store(pointer, tile, rows, columns):
    """Writes a tile to the contiguous (rows, columns) matrix at `pointer`, as far as that goes."""
    row = tl.arange(0, tile.shape[0])
    column = tl.arange(0, tile.shape[1])
    at = pointer + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, tile.to(pointer.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _scores(a, a_ptr, a_rows, a_stride, b, b_ptr, b_rows, b_stride, width, ACC, SLICE: tl.constexpr, PRECISION):
    """a @ b^T over the head dimension: (A, width) x (B, width) -> (A, B).

    Tensor cores take the tiles whole. Without them (fp32 "ieee", fp64) every thread would hold whole rows of both,
    hundreds of registers, so there the tiles are read again in slices of SLICE columns, in a loop that must not unroll.
    """
    product = tl.zeros([a.shape[0], b.shape[0]], ACC)
    if a.shape[1] <= SLICE:
        product = dot(a, tl.trans(b), product, PRECISION)
    else:
        for first in range(0, width, SLICE):
            a_slice = _load(a_ptr + first, a_rows, width - first, a_stride, a.shape[0], SLICE)
            b_slice = _load(b_ptr + first, b_rows, width - first, b_stride, b.shape[0], SLICE)
            product = dot(a_slice, tl.trans(b_slice), product, PRECISION)
    return product


@triton.jit
def _key_range(query0, Nq, Nk, diagonal, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr):
    """How many keys the queries from query0 on see at all, and how many of them every one of those queries sees."""
    last = Nk
    full = Nk
    if CAUSAL:
        last = tl.minimum(Nk, tl.maximum(0, tl.minimum(query0 + BLOCK_Q, Nq) + diagonal))
        full = tl.minimum(Nk, tl.maximum(0, query0 + 1 + diagonal))
    return last, full


@triton.jit
def _visible(query0, key0, Nk, diagonal, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Which keys a tile of queries sees, (BLOCK_Q, BLOCK_K)."""
    i = query0 + tl.arange(0, BLOCK_Q)
    j = key0 + tl.arange(0, BLOCK_K)
    visible = (j < Nk)[None, :]
    if CAUSAL:
        visible = visible & (j[None, :] <= i[:, None] + diagonal)
    return visible


@triton.jit
def _forward_blocks(
    acc, row_max, row_sum, query, query_ptr, q_stride, key_ptr, k_stride, value_ptr, v_stride,
    first, last, query0, diagonal, scale, Nq, Nk, D, DV,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_DV: tl.constexpr, SLICE: tl.constexpr
):
    for key0 in range(first, last, BLOCK_K):
        key_at = key_ptr + key0 * k_stride
        key = _load(key_at, Nk - key0, D, k_stride, BLOCK_K, query.shape[1], EDGE)
        score = _scores(
            query, query_ptr, Nq - query0, q_stride, key, key_at, Nk - key0, k_stride, D, ACC, SLICE, PRECISION
        )
        if EDGE:
            score = tl.where(_visible(query0, key0, Nk, diagonal, CAUSAL, query.shape[0], BLOCK_K), score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # no key yet: exp2(-inf - 0) = 0, not NaN
        p = tl.exp2(score * scale - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(p, 1)
        row_max = new_max
        value = _load(value_ptr + key0 * v_stride, Nk - key0, DV, v_stride, BLOCK_K, BLOCK_DV, EDGE)
        acc = dot(p.to(value.dtype), value, acc * decay[:, None], PRECISION)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=_SIZES)
def _forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    scale: tl.float64,
    diagonal,
    H,
    Hk,
    Nq,
    Nk,
    D,
    DV,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SLICE: tl.constexpr,
):
    blocks = tl.cdiv(Nq, BLOCK_Q)
    query0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b = head // H
    h = head % H
    hk = h // (H // Hk)
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    query_ptr, q_stride = _rows(query_ptr, q_strides, b, h, query0, ALIGNED)
    key_ptr, k_stride = _rows(key_ptr, k_strides, b, hk, 0, ALIGNED)
    value_ptr, v_stride = _rows(value_ptr, v_strides, b, hk, 0, ALIGNED)
    scale = scalar(scale, ACC) * LOG2E
    last, full = _key_range(query0, Nq, Nk, diagonal, CAUSAL, BLOCK_Q)

    query = _load(query_ptr, Nq - query0, D, q_stride, BLOCK_Q, BLOCK_D)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], ACC)
    row_max = tl.full([BLOCK_Q], float("-inf"), ACC)  # of scale log2(e) q.k, over the keys seen so far
    row_sum = tl.zeros([BLOCK_Q], ACC)
    full = full // BLOCK_K * BLOCK_K
    acc, row_max, row_sum = _forward_blocks(
        acc, row_max, row_sum, query, query_ptr, q_stride, key_ptr, k_stride, value_ptr, v_stride,
        0, full, query0, diagonal, scale, Nq, Nk, D, DV, CAUSAL, False, ACC, PRECISION, BLOCK_K, BLOCK_DV, SLICE
    )
    acc, row_max, row_sum = _forward_blocks(
        acc, row_max, row_sum, query, query_ptr, q_stride, key_ptr, k_stride, value_ptr, v_stride,
        full, last, query0, diagonal, scale, Nq, Nk, D, DV, CAUSAL, True, ACC, PRECISION, BLOCK_K, BLOCK_DV, SLICE
    )

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees no key: out 0, lse -inf
    first = head * Nq + query0
    _store(out_ptr + first * DV, acc / row_sum[:, None], Nq - query0, DV)
    row = tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + first + row, (row_max + tl.log2(row_sum)) * LN2, mask=row < Nq - query0)


@triton.jit
def _grad_query_blocks(
    grad_query, query, query_ptr, q_stride, grad_out, grad_out_ptr, g_stride, lse, delta,
    key_ptr, k_stride, value_ptr, v_stride, first, last, query0, diagonal, scale, Nq, Nk, D, DV,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, SLICE: tl.constexpr
):
    rows = Nq - query0
    for key0 in range(first, last, BLOCK_K):
        key_at = key_ptr + key0 * k_stride
        value_at = value_ptr + key0 * v_stride
        keys = Nk - key0
        key = _load(key_at, keys, D, k_stride, BLOCK_K, query.shape[1], EDGE)
        score = _scores(query, query_ptr, rows, q_stride, key, key_at, keys, k_stride, D, ACC, SLICE, PRECISION)
        p = tl.exp2(score * scale - lse[:, None])
        if EDGE:
            p = tl.where(_visible(query0, key0, Nk, diagonal, CAUSAL, query.shape[0], BLOCK_K), p, 0.0)
        value = _load(value_at, keys, DV, v_stride, BLOCK_K, grad_out.shape[1], EDGE)
        grad_p = _scores(
            grad_out, grad_out_ptr, rows, g_stride, value, value_at, keys, v_stride, DV, ACC, SLICE, PRECISION
        )
        grad_score = p * (grad_p - delta[:, None])
        grad_query = dot(grad_score.to(key.dtype), key, grad_query, PRECISION)
    return grad_query


@triton.jit(do_not_specialize=_SIZES)
def _grad_query_kernel(
    grad_out_ptr,
    grad_lse_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    lse_ptr,
    delta_ptr,
    grad_query_ptr,
    g_strides,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    scale: tl.float64,
    diagonal,
    H,
    Hk,
    Nq,
    Nk,
    D,
    DV,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SLICE: tl.constexpr,
):
    blocks = tl.cdiv(Nq, BLOCK_Q)
    query0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b = head // H
    h = head % H
    hk = h // (H // Hk)
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    grad_out_ptr, g_stride = _rows(grad_out_ptr, g_strides, b, h, query0, ALIGNED)
    query_ptr, q_stride = _rows(query_ptr, q_strides, b, h, query0, ALIGNED)
    out_ptr, o_stride = _rows(out_ptr, o_strides, b, h, query0, ALIGNED)
    key_ptr, k_stride = _rows(key_ptr, k_strides, b, hk, 0, ALIGNED)
    value_ptr, v_stride = _rows(value_ptr, v_strides, b, hk, 0, ALIGNED)
    scale = scalar(scale, ACC)
    scale_log2 = scale * LOG2E
    last, full = _key_range(query0, Nq, Nk, diagonal, CAUSAL, BLOCK_Q)

    first = head * Nq + query0
    row = tl.arange(0, BLOCK_Q)
    rows = Nq - query0
    grad_out = _load(grad_out_ptr, rows, DV, g_stride, BLOCK_Q, BLOCK_DV)
    out = _load(out_ptr, rows, DV, o_stride, BLOCK_Q, BLOCK_DV)
    lse = tl.load(lse_ptr + first + row, mask=row < rows, other=float("-inf"))
    delta = tl.sum(grad_out.to(ACC) * out.to(ACC), 1)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + first + row, mask=row < rows, other=0.0)
    delta = tl.where(lse == float("-inf"), 0.0, delta)  # whatever the gradient of an lse of -inf is, it goes nowhere
    tl.store(delta_ptr + first + row, delta, mask=row < rows)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # then p = exp2(. - inf) = 0

    query = _load(query_ptr, rows, D, q_stride, BLOCK_Q, BLOCK_D)
    grad_query = tl.zeros([BLOCK_Q, BLOCK_D], ACC)
    full = full // BLOCK_K * BLOCK_K
    grad_query = _grad_query_blocks(
        grad_query, query, query_ptr, q_stride, grad_out, grad_out_ptr, g_stride, lse, delta,
        key_ptr, k_stride, value_ptr, v_stride, 0, full, query0, diagonal, scale_log2, Nq, Nk, D, DV,
        CAUSAL, False, ACC, PRECISION, BLOCK_K, SLICE,
    )
    grad_query = _grad_query_blocks(
        grad_query, query, query_ptr, q_stride, grad_out, grad_out_ptr, g_stride, lse, delta,
        key_ptr, k_stride, value_ptr, v_stride, full, last, query0, diagonal, scale_log2, Nq, Nk, D, DV,
        CAUSAL, True, ACC, PRECISION, BLOCK_K, SLICE,
    )
    _store(grad_query_ptr + first * D, grad_query * scale, rows, D)


@triton.jit
def _grad_key_value_blocks(
    grad_key, grad_value, key, key_ptr, k_stride, value, value_ptr, v_stride, query_ptr, q_strides, grad_out_ptr, g_strides,
    lse_ptr, delta_ptr, b, hk, first, last, key0, diagonal, scale, H, Hk, Nq, Nk, D, DV,
    EDGE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, SLICE: tl.constexpr
):
    keys = Nk - key0
    row = tl.arange(0, BLOCK_Q)
    group = H // Hk
    blocks = tl.cdiv(tl.maximum(0, last - first), BLOCK_Q)
    for step in range(0, group * blocks):
        h = hk * group + step // tl.maximum(blocks, 1)
        query0 = first + step % tl.maximum(blocks, 1) * BLOCK_Q
        rows = Nq - query0
        query_at, q_stride = _rows(query_ptr, q_strides, b, h, query0, ALIGNED)
        grad_out_at, g_stride = _rows(grad_out_ptr, g_strides, b, h, query0, ALIGNED)
        query = _load(query_at, rows, D, q_stride, BLOCK_Q, key.shape[1])
        at = (b * H + h) * Nq + query0
        lse = tl.load(lse_ptr + at + row, mask=row < rows, other=float("-inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        score = _scores(key, key_ptr, keys, k_stride, query, query_at, rows, q_stride, D, ACC, SLICE, PRECISION)
        p = tl.exp2(score * scale - lse[None, :])  # transposed: (BLOCK_K, BLOCK_Q)
        if EDGE:
            j = key0 + tl.arange(0, key.shape[0])
            p = tl.where(j[:, None] <= (query0 + row + diagonal)[None, :], p, 0.0)
        grad_out = _load(grad_out_at, rows, DV, g_stride, BLOCK_Q, value.shape[1])
        grad_value = dot(p.to(grad_out.dtype), grad_out, grad_value, PRECISION)
        grad_p = _scores(
            value, value_ptr, keys, v_stride, grad_out, grad_out_at, rows, g_stride, DV, ACC, SLICE, PRECISION
        )
        delta = tl.load(delta_ptr + at + row, mask=row < rows, other=0.0)
        grad_score = p * (grad_p - delta[None, :])
        grad_key = dot(grad_score.to(query.dtype), query, grad_key, PRECISION)
    return grad_key, grad_value


@triton.jit(do_not_specialize=_SIZES)
def _grad_key_value_kernel(
    grad_out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    lse_ptr,
    delta_ptr,
    grad_key_ptr,
    grad_value_ptr,
    g_strides,
    q_strides,
    k_strides,
    v_strides,
    scale: tl.float64,
    diagonal,
    H,
    Hk,
    Nq,
    Nk,
    D,
    DV,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SLICE: tl.constexpr,
):
    blocks = tl.cdiv(Nk, BLOCK_K)
    key0 = tl.program_id(0) % blocks * BLOCK_K
    key_head = (tl.program_id(0) // blocks).to(tl.int64)
    b = key_head // Hk
    hk = key_head % Hk
    group = H // Hk
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    key_ptr, k_stride = _rows(key_ptr, k_strides, b, hk, key0, ALIGNED)
    value_ptr, v_stride = _rows(value_ptr, v_strides, b, hk, key0, ALIGNED)
    scale = scalar(scale, ACC)
    scale_log2 = scale * LOG2E
    keys = Nk - key0
    key = _load(key_ptr, keys, D, k_stride, BLOCK_K, BLOCK_D)
    value = _load(value_ptr, keys, DV, v_stride, BLOCK_K, BLOCK_DV)
    grad_key = tl.zeros([BLOCK_K, BLOCK_D], ACC)
    grad_value = tl.zeros([BLOCK_K, BLOCK_DV], ACC)
    full = 0
    if CAUSAL:
        first = tl.maximum(0, key0 - diagonal) // BLOCK_Q * BLOCK_Q
        full = tl.minimum(tl.cdiv(Nq, BLOCK_Q), tl.cdiv(tl.maximum(0, key0 + BLOCK_K - 1 - diagonal), BLOCK_Q)) * BLOCK_Q
        grad_key, grad_value = _grad_key_value_blocks(
            grad_key, grad_value, key, key_ptr, k_stride, value, value_ptr, v_stride, query_ptr, q_strides, grad_out_ptr, g_strides,
            lse_ptr, delta_ptr, b, hk, first, full, key0, diagonal, scale_log2, H, Hk, Nq, Nk, D, DV,
            True, ACC, PRECISION, ALIGNED, BLOCK_Q, SLICE
        )
    grad_key, grad_value = _grad_key_value_blocks(
        grad_key, grad_value, key, key_ptr, k_stride, value, value_ptr, v_stride, query_ptr, q_strides, grad_out_ptr, g_strides,
        lse_ptr, delta_ptr, b, hk, full, Nq, key0, diagonal, scale_log2, H, Hk, Nq, Nk, D, DV,
        False, ACC, PRECISION, ALIGNED, BLOCK_Q, SLICE
    )
    first_key = key_head * Nk + key0
    _store(grad_key_ptr + first_key * D, grad_key * scale, keys, D)
    _store(grad_value_ptr + first_key * DV, grad_value, keys, DV)


# ---- launchers ----------------------------------------------------------------------------------------------------


def _tile(kernel, head_dim, element_size, limit):
    return (32, 32, 4, 1)


def _launch(name, kernel, blocked, heads, tensors, rest, query, key, value, causal, diagonal, scale, limit):
    """Tiles and shared arguments"""


def _plan(kernel, pointers, strided, query, key, value, causal, diagonal, scale, limit):
    """One launch: `pointers` lead the kernel's arguments, the strides of `strided` follow, then what all three share."""
    (b, h, nq, d), (hk, nk), dv = query.shape, key.shape[1:3], value.size(-1)
    name = kernel.__name__.strip("_").removesuffix("_kernel")
    block_q, block_k, warps, stages = _tile(name, max(d, dv), query.element_size(), limit)
    tf32 = query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    strides = tuple(tensor.stride()[:3] for tensor in strided)
    constants = {
        "CAUSAL": causal,
        "ACC": TRITON_DTYPE[accumulator(query.dtype)],
        "PRECISION": "tf32" if tf32 else "ieee",
        "ALIGNED": all(n % 8 == 0 for n in (d, dv, *sum(strides, ()))),
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "BLOCK_D": max(16, triton.next_power_of_2(d)),
        "BLOCK_DV": max(16, triton.next_power_of_2(dv)),
        "SLICE": 256 if query.element_size() == 2 or tf32 else 32,
    }
    programs = b * hk * triton.cdiv(nk, block_k) if name == "grad_key_value" else b * h * triton.cdiv(nq, block_q)
    diagonal = min(max(diagonal, -nq), nk)  # further out nothing changes, and it has to fit int32
    arguments = (*pointers, *strides, scale, diagonal, h, hk, nq, nk, d, dv)
    return Launch(f"attention_{name}", kernel, (programs,), arguments, constants, warps, stages)


def _plan_forward(query, key, value, causal, diagonal, scale, limit):
    (b, h, nq, _), dv = query.shape, value.size(-1)
    out = query.new_empty((b, h, nq, dv))
    lse = query.new_empty((b, h, nq), dtype=accumulator(query.dtype))
    pointers = (query, key, value, out, lse)
    launch = _plan(_forward_kernel, pointers, (query, key, value), query, key, value, causal, diagonal, scale, limit)
    return (out, lse), [launch]


def _plan_backward(grad_out, grad_lse, query, key, value, out, lse, causal, diagonal, scale, limit):
    delta = torch.empty_like(lse)
    grads = tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    shared = (query, key, value, causal, diagonal, scale, limit)
    pointers = (grad_out, grad_lse, query, key, value, out, lse, delta, grads[0])
    grad_query = _plan(_grad_query_kernel, pointers, (grad_out, query, key, value, out), *shared)
    pointers = (grad_out, query, key, value, lse, delta, grads[1], grads[2])
    grad_key_value = _plan(_grad_key_value_kernel, pointers, (grad_out, query, key, value), *shared)
    return grads, [grad_query, grad_key_value]


def attention_fwd(query, key, value, causal, diagonal, scale):
    results, plan = _plan_forward(query, key, value, causal, diagonal, scale, shared_memory(query.device))
    run(plan, query.device)
    return results


def attention_bwd(grad_out, grad_lse, query, key, value, out, lse, causal, diagonal, scale):
    grad_out = unit_last(grad_out)
    if grad_lse is not None: grad_lse=grad_lse.contiguous()
    results, plan = _plan_backward(grad_out, grad_lse, query, key, value, out, lse, causal, diagonal, scale, shared_memory(query.device))
    run(plan, query.device)
    return results
