"""Attention, forward and backward, in Triton.

The idea. Neither the scores nor their gradients ever reach memory. The forward pass walks the keys block by block
beside a tile of queries and keeps a running maximum and sum of each row (online softmax: Milakov & Gimelshein 2018;
Dao et al. 2022); of the softmax only lse is stored. The backward pass recomputes the probabilities from lse, in two
passes that each own what they write: dQ over query tiles (which also computes delta), then dK and dV over key tiles,
summed over the query heads of a group. No atomics: the same bits every run.

The equations, with s = scale q.k over the visible keys j <= i + diagonal:

    lse_i = log sum_j e^s_ij      p_ij = e^(s_ij - lse_i)         out_i = sum_j p_ij v_j
    dv_j = sum_i p_ij do_i        dp_ij = do_i.v_j                delta_i = do_i.out_i - dlse_i
    ds_ij = p_ij (dp_ij - delta_i)    dq_i = scale sum_j ds_ij k_j    dk_j = scale sum_i ds_ij q_i

Exponentials are powers of two with scale log2(e) folded into one multiplication. A row that sees no key gives out 0,
lse -inf and zero gradients. Blocks above the diagonal are never visited, and only edge blocks compute a mask.

What was tried, judged by the compiler's register report (no GPU speed has been measured yet):
- one loop with a branch around the mask instead of two loops: a third fewer registers, but Triton then no longer sees
  that the two products are chained, splits a row over several warps, and every softmax crosses shared memory;
- the loop over the heads of a group around the loop over queries: at D 128 288 bytes of spills on sm_100 and 56 on
  sm_90; as one flat loop none;
- 64-bit offset tensors for lse and delta: some 500 bytes of spills; a 64-bit scalar base and 32-bit offsets: none;
- fp32 "ieee" and fp64 with whole tiles as operands: spills from head dimension 128 on, in kilobytes at 256; see
  `tile_scores`. The loop over slices must not unroll, so head dimensions are runtime arguments.
"""

import math

import torch
import triton
import triton.language as tl

from ._common import (
    TRITON_DTYPE,
    Launch,
    accumulator,
    aligned,
    dot,
    head_rows,
    load_tile,
    run,
    scalar,
    shared_memory,
    store_tile,
    tile_scores,
    unit_last,
)

LOG2E = tl.constexpr(math.log2(math.e))
_SIZES = ["diagonal", "H", "Hk", "Nq", "Nk", "D", "DV", "g_strides", "q_strides", "k_strides", "v_strides", "o_strides"]
LN2 = tl.constexpr(math.log(2.0))


# fmt: off
# Signatures are kept in groups: pointers, strides, sizes, then what the kernel is compiled for.

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
    acc, row_max, row_sum, query, query_ptr, q_stride, key_ptr, k_stride, value_ptr, v_stride, first, last, query0,
    diagonal, scale, Nq, Nk, D, DV,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr, SLICE: tl.constexpr,
):
    """Adds the keys first ... last - 1 to the running maximum, sum and weighted values of a tile of queries."""
    for key0 in range(first, last, BLOCK_K):
        key_at = key_ptr + key0 * k_stride
        key = load_tile(key_at, Nk - key0, D, k_stride, BLOCK_K, query.shape[1], EDGE)
        score = tile_scores(
            query, query_ptr, Nq - query0, q_stride, key, key_at, Nk - key0, k_stride, D, ACC, SLICE, PRECISION
        )
        if EDGE:
            visible = _visible(query0, key0, Nk, diagonal, CAUSAL, query.shape[0], BLOCK_K)
            score = tl.where(visible, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # no key yet: exp2(-inf - 0) = 0, not NaN
        p = tl.exp2(score * scale - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(p, 1)
        row_max = new_max
        value = load_tile(value_ptr + key0 * v_stride, Nk - key0, DV, v_stride, BLOCK_K, BLOCK_DV, EDGE)
        acc = dot(p.to(value.dtype), value, acc * decay[:, None], PRECISION)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=_SIZES)
def _forward_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr,
    q_strides, k_strides, v_strides, scale: tl.float64, diagonal, H, Hk, Nq, Nk, D, DV,
    CAUSAL: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SLICE: tl.constexpr,
):
    blocks = tl.cdiv(Nq, BLOCK_Q)
    query0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b = head // H
    h = head % H
    hk = h // (H // Hk)
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    query_ptr, q_stride = head_rows(query_ptr, q_strides, b, h, query0, ALIGNED)
    key_ptr, k_stride = head_rows(key_ptr, k_strides, b, hk, 0, ALIGNED)
    value_ptr, v_stride = head_rows(value_ptr, v_strides, b, hk, 0, ALIGNED)
    scale = scalar(scale, ACC) * LOG2E
    last, full = _key_range(query0, Nq, Nk, diagonal, CAUSAL, BLOCK_Q)

    query = load_tile(query_ptr, Nq - query0, D, q_stride, BLOCK_Q, BLOCK_D)
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
    store_tile(out_ptr + first * DV, acc / row_sum[:, None], Nq - query0, DV)
    row = tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + first + row, (row_max + tl.log2(row_sum)) * LN2, mask=row < Nq - query0)


@triton.jit
def _grad_query_blocks(
    grad_query, query, query_ptr, q_stride, grad_out, grad_out_ptr, g_stride, lse, delta, key_ptr, k_stride,
    value_ptr, v_stride, first, last, query0, diagonal, scale, Nq, Nk, D, DV,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
):
    rows = Nq - query0
    for key0 in range(first, last, BLOCK_K):
        key_at = key_ptr + key0 * k_stride
        value_at = value_ptr + key0 * v_stride
        keys = Nk - key0
        key = load_tile(key_at, keys, D, k_stride, BLOCK_K, query.shape[1], EDGE)
        score = tile_scores(query, query_ptr, rows, q_stride, key, key_at, keys, k_stride, D, ACC, SLICE, PRECISION)
        p = tl.exp2(score * scale - lse[:, None])
        if EDGE:
            p = tl.where(_visible(query0, key0, Nk, diagonal, CAUSAL, query.shape[0], BLOCK_K), p, 0.0)
        value = load_tile(value_at, keys, DV, v_stride, BLOCK_K, grad_out.shape[1], EDGE)
        grad_p = tile_scores(
            grad_out, grad_out_ptr, rows, g_stride, value, value_at, keys, v_stride, DV, ACC, SLICE, PRECISION
        )
        grad_score = p * (grad_p - delta[:, None])
        grad_query = dot(grad_score.to(key.dtype), key, grad_query, PRECISION)
    return grad_query


@triton.jit(do_not_specialize=_SIZES)
def _grad_query_kernel(
    grad_out_ptr, grad_lse_ptr, query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, delta_ptr, grad_query_ptr,
    g_strides, q_strides, k_strides, v_strides, o_strides, scale: tl.float64, diagonal, H, Hk, Nq, Nk, D, DV,
    CAUSAL: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SLICE: tl.constexpr,
):
    blocks = tl.cdiv(Nq, BLOCK_Q)
    query0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b = head // H
    h = head % H
    hk = h // (H // Hk)
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    grad_out_ptr, g_stride = head_rows(grad_out_ptr, g_strides, b, h, query0, ALIGNED)
    query_ptr, q_stride = head_rows(query_ptr, q_strides, b, h, query0, ALIGNED)
    out_ptr, o_stride = head_rows(out_ptr, o_strides, b, h, query0, ALIGNED)
    key_ptr, k_stride = head_rows(key_ptr, k_strides, b, hk, 0, ALIGNED)
    value_ptr, v_stride = head_rows(value_ptr, v_strides, b, hk, 0, ALIGNED)
    scale = scalar(scale, ACC)
    scale_log2 = scale * LOG2E
    last, full = _key_range(query0, Nq, Nk, diagonal, CAUSAL, BLOCK_Q)

    first = head * Nq + query0
    row = tl.arange(0, BLOCK_Q)
    rows = Nq - query0
    grad_out = load_tile(grad_out_ptr, rows, DV, g_stride, BLOCK_Q, BLOCK_DV)
    out = load_tile(out_ptr, rows, DV, o_stride, BLOCK_Q, BLOCK_DV)
    lse = tl.load(lse_ptr + first + row, mask=row < rows, other=float("-inf"))
    delta = tl.sum(grad_out.to(ACC) * out.to(ACC), 1)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + first + row, mask=row < rows, other=0.0)
    delta = tl.where(lse == float("-inf"), 0.0, delta)  # whatever the gradient of an lse of -inf is, it goes nowhere
    tl.store(delta_ptr + first + row, delta, mask=row < rows)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # then p = exp2(. - inf) = 0

    query = load_tile(query_ptr, rows, D, q_stride, BLOCK_Q, BLOCK_D)
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
    store_tile(grad_query_ptr + first * D, grad_query * scale, rows, D)


@triton.jit
def _grad_key_value_blocks(
    grad_key, grad_value, key, key_ptr, k_stride, value, value_ptr, v_stride, query_ptr, q_strides, grad_out_ptr,
    g_strides, lse_ptr, delta_ptr, b, hk, first, last, key0, diagonal, scale, H, Hk, Nq, Nk, D, DV,
    EDGE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr,
    SLICE: tl.constexpr,
):
    keys = Nk - key0
    row = tl.arange(0, BLOCK_Q)
    group = H // Hk
    blocks = tl.cdiv(tl.maximum(0, last - first), BLOCK_Q)
    for step in range(group * blocks):
        h = hk * group + step // tl.maximum(blocks, 1)
        query0 = first + step % tl.maximum(blocks, 1) * BLOCK_Q
        rows = Nq - query0
        query_at, q_stride = head_rows(query_ptr, q_strides, b, h, query0, ALIGNED)
        grad_out_at, g_stride = head_rows(grad_out_ptr, g_strides, b, h, query0, ALIGNED)
        query = load_tile(query_at, rows, D, q_stride, BLOCK_Q, key.shape[1])
        at = (b * H + h) * Nq + query0
        lse = tl.load(lse_ptr + at + row, mask=row < rows, other=float("-inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        score = tile_scores(key, key_ptr, keys, k_stride, query, query_at, rows, q_stride, D, ACC, SLICE, PRECISION)
        p = tl.exp2(score * scale - lse[None, :])  # transposed: (BLOCK_K, BLOCK_Q)
        if EDGE:
            j = key0 + tl.arange(0, key.shape[0])
            p = tl.where(j[:, None] <= (query0 + row + diagonal)[None, :], p, 0.0)
        grad_out = load_tile(grad_out_at, rows, DV, g_stride, BLOCK_Q, value.shape[1])
        grad_value = dot(p.to(grad_out.dtype), grad_out, grad_value, PRECISION)
        grad_p = tile_scores(
            value, value_ptr, keys, v_stride, grad_out, grad_out_at, rows, g_stride, DV, ACC, SLICE, PRECISION
        )
        delta = tl.load(delta_ptr + at + row, mask=row < rows, other=0.0)
        grad_score = p * (grad_p - delta[None, :])
        grad_key = dot(grad_score.to(query.dtype), query, grad_key, PRECISION)
    return grad_key, grad_value


@triton.jit(do_not_specialize=_SIZES)
def _grad_key_value_kernel(
    grad_out_ptr, query_ptr, key_ptr, value_ptr, lse_ptr, delta_ptr, grad_key_ptr, grad_value_ptr,
    g_strides, q_strides, k_strides, v_strides, scale: tl.float64, diagonal, H, Hk, Nq, Nk, D, DV,
    CAUSAL: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SLICE: tl.constexpr,
):
    blocks = tl.cdiv(Nk, BLOCK_K)
    key0 = tl.program_id(0) % blocks * BLOCK_K
    key_head = (tl.program_id(0) // blocks).to(tl.int64)
    b = key_head // Hk
    hk = key_head % Hk
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    key_ptr, k_stride = head_rows(key_ptr, k_strides, b, hk, key0, ALIGNED)
    value_ptr, v_stride = head_rows(value_ptr, v_strides, b, hk, key0, ALIGNED)
    scale = scalar(scale, ACC)
    scale_log2 = scale * LOG2E
    keys = Nk - key0
    key = load_tile(key_ptr, keys, D, k_stride, BLOCK_K, BLOCK_D)
    value = load_tile(value_ptr, keys, DV, v_stride, BLOCK_K, BLOCK_DV)
    grad_key = tl.zeros([BLOCK_K, BLOCK_D], ACC)
    grad_value = tl.zeros([BLOCK_K, BLOCK_DV], ACC)
    full = 0
    if CAUSAL:
        first = tl.maximum(0, key0 - diagonal) // BLOCK_Q * BLOCK_Q
        full = tl.cdiv(tl.minimum(Nq, tl.maximum(0, key0 + BLOCK_K - 1 - diagonal)), BLOCK_Q) * BLOCK_Q
        grad_key, grad_value = _grad_key_value_blocks(
            grad_key, grad_value, key, key_ptr, k_stride, value, value_ptr, v_stride,
            query_ptr, q_strides, grad_out_ptr, g_strides, lse_ptr,
            delta_ptr, b, hk, first, full, key0, diagonal, scale_log2, H, Hk, Nq, Nk, D, DV,
            True, ACC, PRECISION, ALIGNED, BLOCK_Q, SLICE
        )
    grad_key, grad_value = _grad_key_value_blocks(
        grad_key, grad_value, key, key_ptr, k_stride, value, value_ptr, v_stride,
        query_ptr, q_strides, grad_out_ptr, g_strides, lse_ptr,
        delta_ptr, b, hk, full, Nq, key0, diagonal, scale_log2, H, Hk, Nq, Nk, D, DV,
        False, ACC, PRECISION, ALIGNED, BLOCK_Q, SLICE
    )
    first_key = key_head * Nk + key0
    store_tile(grad_key_ptr + first_key * D, grad_key * scale, keys, D)
    store_tile(grad_value_ptr + first_key * DV, grad_value, keys, DV)

# fmt: on
# ---- plans and launchers ------------------------------------------------------------------------------------------

# (BLOCK_Q, BLOCK_K, num_warps, num_stages) for head dimensions up to 64, 128 and 256: the largest tiles found that
# compile without spills for causal and full attention, exact and padded head dimensions. Queries (in the last kernel:
# keys) are split over the warps, 16 rows each at least; fewer rows than that and two warps do the same work.
_TILES = {
    # 16 bits, 227 KB of shared memory (sm_90, sm_100): operands stay in shared memory, so tiles are large
    "wgmma": {
        "forward": ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2)),
        "grad_query": ((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2)),
        "grad_key_value": ((64, 128, 8, 2), (32, 128, 8, 2), (32, 32, 8, 2)),
    },
    # 16 bits, 99 KB (sm_80, sm_120): operands pass through registers
    "mma": {
        "forward": ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        "grad_query": ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
        "grad_key_value": ((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
    },
    # 16 bits, some stride or head dimension no multiple of 8: elements are loaded one by one
    "unaligned": {
        "forward": ((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        "grad_query": ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
        "grad_key_value": ((32, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    },
    "float32": {
        "forward": ((64, 64, 8, 1), (64, 32, 4, 1), (64, 32, 8, 1)),
        "grad_query": ((64, 32, 4, 1), (64, 32, 4, 1), (64, 64, 8, 1)),
        "grad_key_value": ((64, 64, 8, 1), (64, 64, 8, 1), (32, 32, 8, 1)),
    },
    "float32 unaligned": {
        "forward": ((64, 64, 8, 1), (64, 32, 8, 1), (64, 32, 8, 1)),
        "grad_query": ((32, 32, 8, 1), (16, 16, 4, 1), (32, 16, 4, 1)),
        "grad_key_value": ((32, 64, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    },
    "float64": {
        "forward": ((32, 16, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
        "grad_query": ((32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        "grad_key_value": ((16, 8, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    },
}


def _tile(kernel, head_dim, element_size, aligned, limit):
    """The row of the table for a kernel: by head dimension, bytes per element, alignment and shared memory."""
    if element_size == 8:
        kind = "float64"
    elif element_size == 4:
        kind = "float32" if aligned else "float32 unaligned"
    else:
        kind = "unaligned" if not aligned else "wgmma" if limit >= 227 * 1024 else "mma"
    return _TILES[kind][kernel][0 if head_dim <= 64 else 1 if head_dim <= 128 else 2]


def _plan(kernel, pointers, strided, query, key, value, causal, diagonal, scale, limit):
    """One launch: `pointers` lead its arguments, the strides of `strided` follow, then what all three kernels share."""
    (b, h, nq, d), (hk, nk), dv = query.shape, key.shape[1:3], value.size(-1)
    name = kernel.__name__.strip("_").removesuffix("_kernel")
    strides = tuple(tensor.stride()[:3] for tensor in strided)
    aligned = all(n % 8 == 0 for n in (d, dv, *sum(strides, ())))
    block_q, block_k, warps, stages = _tile(name, max(d, dv), query.element_size(), aligned, limit)
    tf32 = query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    constants = {
        "CAUSAL": causal,
        "ACC": TRITON_DTYPE[accumulator(query.dtype)],
        "PRECISION": "tf32" if tf32 else "ieee",
        "ALIGNED": aligned,
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "BLOCK_D": max(16, triton.next_power_of_2(d)),
        "BLOCK_DV": max(16, triton.next_power_of_2(dv)),
        "SLICE": 256 if query.element_size() == 2 else 32,
    }
    programs = b * hk * triton.cdiv(nk, block_k) if name == "grad_key_value" else b * h * triton.cdiv(nq, block_q)
    diagonal = min(max(diagonal, -nq), nk)  # further out nothing changes, and it has to fit 32 bits
    arguments = (*pointers, *strides, float(scale), diagonal, h, hk, nq, nk, d, dv)
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


def _positive(query, scale):
    """(query', scale', sign) with the same products and scale' > 0, which the running maximum needs."""
    if scale > 0:
        return query, scale, None
    sign = -1.0 if scale < 0 else 0.0
    return query * sign, -scale or 1.0, sign


def _inputs(query, key, value):
    if not (1 <= query.size(-1) <= 256 and 1 <= value.size(-1) <= 256):
        raise NotImplementedError(
            "seqkern attention: the Triton kernels take head dimensions of 1 to 256, got query "
            f'{tuple(query.shape)} and value {tuple(value.shape)}; use_backend("reference") runs any'
        )
    return unit_last(query), unit_last(key), unit_last(value)


def attention_fwd(query, key, value, causal, diagonal, scale):
    """The launcher behind `seqkern::attention_fwd`: (out, lse)."""
    query, key, value = _inputs(query, key, value)
    query, scale, _ = _positive(query, scale)
    limit = shared_memory(query.device)
    results, plan = _plan_forward(query, key, value, causal, diagonal, scale, limit)
    run(plan, query.device)
    return results


def attention_bwd(grad_out, grad_lse, query, key, value, out, lse, causal, diagonal, scale):
    """The launcher behind `seqkern::attention_bwd`: (grad_query, grad_key, grad_value)."""
    query, key, value = _inputs(query, key, value)
    query, scale, sign = _positive(query, scale)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    limit = shared_memory(query.device)
    tensors = (unit_last(grad_out), grad_lse, query, key, value, unit_last(out), lse.contiguous())
    (grad_query, *grads), plan = _plan_backward(*tensors, causal, diagonal, scale, limit)
    run(plan, query.device)
    return (grad_query if sign is None else grad_query * sign, *grads)


def aot_configurations(limit, thorough):
    """The launches to compile ahead of time for a device with `limit` bytes of shared memory, as (name, launch).

    thorough False: the common head dimensions. True: every row of the tile table, exact, padded and unaligned.
    """
    floats = (torch.bfloat16, torch.float32)
    cases = [(dtype, d, d, True) for dtype in floats for d in (64, 128)]
    if thorough:
        dims = [(d - less, d - less) for d in (16, 64, 128, 256) for less in (0, 8, 3)] + [(192, 128)]
        dtypes = (*floats, torch.float16, torch.float64)
        cases = [(dtype, d, dv, causal) for dtype in dtypes for d, dv in dims for causal in (False, True)]
    for dtype, d, dv, causal in cases:
        query = torch.empty((2, 4, 1024, d), dtype=dtype, device="meta")
        key, value = query[:, :2], query.new_empty((2, 2, 1024, dv))
        (out, lse), forward = _plan_forward(query, key, value, causal, 0, 0.1, limit)
        _, backward = _plan_backward(out, lse, query, key, value, out, lse, causal, 0, 0.1, limit)
        for launch in forward + backward:
            mask = "causal" if causal else "full"
            yield f"{launch.name}-{str(dtype).removeprefix('torch.')}-D{d}-Dv{dv}-{mask}", launch
