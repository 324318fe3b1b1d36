"""Split-KV decode: attention of few queries over many keys. Forward only.

The idea (Flash-Decoding: Dao et al. 2023). One tile of queries a head would leave the GPU idle and most of its rows
empty. So the queries of all heads that share a key head are packed into the rows of one tile, which reads the keys
once, and the keys are split into chunks of CHUNK, one program each. A program stores the maximum, the sum and the
weighted values of its chunk; a second kernel combines a row's chunks in order. The chunk size is fixed and missing
chunks contribute nothing, so a row has the same bits however long the cache around it is. With one chunk there is no
second kernel, and again the bits are the same. The sink is added at the end for the same reason.
"""

import torch
import triton
import triton.language as tl

from ..._limits import MOST_DECODE_QUERIES
from .._common import (
    Launch,
    accumulator,
    aligned,
    cdiv,
    head_rows,
    load_tile,
    power_of_two,
    scalar,
    store_tile,
)
from .blocks import LN2, LOG2E, NATURAL, forward_blocks, power, sequence
from .plans import SIZES, plan

CHUNK = tl.constexpr(256)  # keys

# fmt: off
# Signatures are grouped: pointers, strides, sizes, then compile-time constants.

@triton.jit
def _finish(acc, row_max, row_sum, sink, SCORES: tl.constexpr):
    """(out, lse) of rows after all their keys; acc is (rows, columns)."""
    if sink is not None:
        sink = sink if SCORES == NATURAL else sink * LOG2E
        new_max = tl.maximum(row_max, sink)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = power(row_max, shift, 1.0, SCORES)
        row_sum = row_sum * decay + power(sink, shift, 1.0, SCORES)
        row_max = new_max
        acc *= decay[:, None]
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees no key: out 0, lse -inf
    lse = row_max + tl.log2(row_sum) * LN2 if SCORES == NATURAL else (row_max + tl.log2(row_sum)) * LN2
    return acc / row_sum[:, None], lse


@triton.jit(do_not_specialize=SIZES)
def _decode_kernel(
    query_ptr, key_ptr, value_ptr, sinks_ptr, out_ptr, lse_ptr, chunk_max_ptr, chunk_sum_ptr,
    q_strides, k_strides, v_strides, queries, chunks,
    mask_ptr, query_starts_ptr, key_starts_ptr, key_lengths_ptr, slopes_ptr, seed_ptr, mask_strides, mask_row,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64, threshold, diagonal, low, high, lower_right,
    S, H, Hk, Nq, Nk, D, DV, max_queries, max_keys,
    SCORES: tl.constexpr, SOFTCAP: tl.constexpr, MASK_COLUMNS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLICE: tl.constexpr,
):
    """One chunk of keys for up to BLOCK_Q rows of a key head; row r is query r % queries of its head r // queries.

    Here H = Hk, and Nq = queries times the heads of a group. chunk_max_ptr None: there is one chunk, and out and lse
    are the results. Otherwise out holds the chunks' values, (B, Hk, Nq, chunks, DV), the other two the same without DV.
    """
    chunk = tl.program_id(0) % chunks
    blocks = tl.cdiv(Nq, BLOCK_Q)
    row0 = tl.program_id(0) // chunks % blocks * BLOCK_Q
    head = (tl.program_id(0) // chunks // blocks).to(tl.int64)
    s = head // H
    h = head % H
    D = aligned(D, ALIGNED)
    DV = aligned(DV, ALIGNED)
    b, _query_start, _nq, _key_start, _key_rows, nk = sequence(
        s, query_starts_ptr, key_starts_ptr, key_lengths_ptr, Nq, Nk, max_queries, max_keys
    )
    shift = lower_right * (nk - queries)
    diagonal += shift
    low = None if low is None else low + shift
    high = None if high is None else high + shift
    first = chunk * CHUNK
    last = tl.minimum(nk, first + CHUNK)
    if low is not None:
        first = tl.maximum(first, tl.maximum(0, low) // BLOCK_K * BLOCK_K)
    if high is not None:
        last = tl.minimum(last, tl.maximum(0, queries + high))
    query_ptr, q_stride = head_rows(query_ptr, q_strides, b, h, row0, ALIGNED)
    key_ptr, k_stride = head_rows(key_ptr, k_strides, b, h, 0, ALIGNED)
    value_ptr, v_stride = head_rows(value_ptr, v_strides, b, h, 0, ALIGNED)
    row = row0 + tl.arange(0, BLOCK_Q)
    group = Nq // queries
    of_head = h * group + row // queries
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + s * H * group + of_head, mask=row < Nq, other=0.0)[:, None]
    tiles = (query_ptr, q_stride, key_ptr, k_stride, value_ptr, v_stride)
    place = (row0, 0, Nq, nk, diagonal, D, DV)
    numbers = (scalar(scale, ACC), scalar(softcap, ACC), scalar(keep_scale, ACC), threshold)
    query = load_tile(query_ptr, Nq - row0, D, q_stride, BLOCK_Q, BLOCK_D)
    acc, row_max, row_sum = forward_blocks(
        tl.zeros([BLOCK_Q, BLOCK_DV], ACC), tl.full([BLOCK_Q], float("-inf"), ACC), tl.zeros([BLOCK_Q], ACC),
        query, (row % queries)[:, None], tiles, first, last, place, low, high, numbers, slope, None, None, None,
        True, SCORES, SOFTCAP, MASK_COLUMNS, ACC, PRECISION, BLOCK_K, BLOCK_DV, SLICE,
    )
    at = head * Nq + row0
    if chunk_max_ptr is not None:
        tl.store(chunk_max_ptr + at * chunks + chunk + tl.arange(0, BLOCK_Q) * chunks, row_max, mask=row < Nq)
        tl.store(chunk_sum_ptr + at * chunks + chunk + tl.arange(0, BLOCK_Q) * chunks, row_sum, mask=row < Nq)
        if first < last:
            stride = aligned(chunks.to(tl.int64) * DV, ALIGNED)
            store_tile(out_ptr + at * stride + chunk * DV, acc, Nq - row0, DV, stride)
    else:
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + of_head, mask=row < Nq, other=0.0)
        out, lse = _finish(acc, row_max, row_sum, sink, SCORES)
        store_tile(out_ptr + at * DV, out, Nq - row0, DV, DV)
        tl.store(lse_ptr + at + tl.arange(0, BLOCK_Q), lse, mask=row < Nq)


@triton.jit(do_not_specialize=SIZES)
def _fold_kernel(
    partial_ptr, chunk_max_ptr, chunk_sum_ptr, sinks_ptr, out_ptr, lse_ptr, queries, chunks, H, DV,
    SCORES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_DV: tl.constexpr,
):
    """One row a program: combines its chunks into the output."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_DV)
    ACC: tl.constexpr = chunk_max_ptr.dtype.element_ty
    acc = tl.zeros([1, BLOCK_DV], ACC)
    row_max = tl.full([1], float("-inf"), ACC)
    row_sum = tl.zeros([1], ACC)
    for first in range(0, chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        largest = tl.load(chunk_max_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
        total = tl.load(chunk_sum_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
        seen = largest > float("-inf")  # other chunks wrote nothing
        at = partial_ptr + (row * chunks + first) * DV + tl.arange(0, BLOCK_C)[:, None] * DV + column[None, :]
        part = tl.load(at, mask=seen[:, None] & (column < DV)[None, :], other=0.0)
        new_max = tl.maximum(row_max, tl.max(largest, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = power(largest[None, :], shift[:, None], 1.0, SCORES)
        decay = power(row_max, shift, 1.0, SCORES)
        row_sum = row_sum * decay + tl.sum(total[None, :] * weight, 1)
        acc = acc * decay[:, None] + tl.sum(part * tl.trans(weight), 0)[None, :]
        row_max = new_max
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row // queries % H)
    out, lse = _finish(acc, row_max, row_sum, sink, SCORES)
    store_tile(out_ptr + row * DV, out, 1, DV, DV)
    tl.store(lse_ptr + row + tl.arange(0, 1), lse)

# fmt: on


def decodes(query, key, mask, query_starts, seed):
    """Whether `plan_decode` runs a call. Decided by the number of queries, never by lengths, so that the bits are the
    same."""
    if mask is not None or query_starts is not None or seed is not None:
        return False
    _, h, nq, _ = query.shape
    return 0 < nq <= MOST_DECODE_QUERIES and h > 0 and nq * (h // key.size(1)) <= 64


def packed(query, key):
    """The queries of all heads that share a key head as rows: (B, Hk, rows, D). Where it copies, there are few."""
    b, h, nq, d = query.shape
    hk = key.size(1)
    return query.reshape(b, hk, h // hk * nq, d)


def plan_decode(memory, problem, sinks, heads):
    """(out, lse), contiguous, and the launches that write them. The problem's query is `packed`."""
    query, key, value = problem.query, problem.key, problem.value
    (b, hk, rows, _), dv = query.shape, value.size(-1)
    nq, acc = rows * hk // heads, accumulator(query.dtype)
    out, lse = memory.empty(query, (b, heads, nq, dv)), memory.empty(query, (b, heads, nq), acc)
    chunks = max(1, cdiv(problem.max_keys, CHUNK.value))
    strided = (query, key, value)
    if chunks == 1:
        pointers = (query, key, value, sinks, out, lse, None, None)
        return (out, lse), [plan(_decode_kernel, pointers, strided, problem, nq, chunks)]
    rows = b * heads * nq
    chunk_max, chunk_sum = (memory.empty(lse, (rows, chunks)) for _ in range(2))
    partial = memory.empty(lse, (rows, chunks, dv))
    pointers = (query, key, value, None, partial, None, chunk_max, chunk_sum)
    block_dv = max(16, power_of_two(dv))
    constants = {
        "SCORES": problem.scores,
        "BLOCK_C": min(256, max(4, 8192 // block_dv // (2 if acc == torch.float64 else 1))),
        "BLOCK_DV": block_dv,
    }
    arguments = (partial, chunk_max, chunk_sum, sinks, out, lse, nq, chunks, heads, dv)
    return (out, lse), [
        plan(_decode_kernel, pointers, strided, problem, nq, chunks),
        Launch("attention_fold", _fold_kernel, (rows,), arguments, constants, 4, 1),
    ]
