"""Embeddings in Triton: rows of the weight, positions, norm and dropout in one pass, and sums over equal ids.

A program takes a token forward, and a block of tokens backward, whose numbers it gathers again. Then the tokens are
sorted by id, and a program for each row of the weight adds up the gradients of its tokens, in their order: no atomics.
Equations and sources: seqkern/reference/embedding.py.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import (
    TRITON_DTYPE,
    Launch,
    accumulator,
    cdiv,
    dropout_scalars,
    keep_mask,
    power_of_two,
    rounded,
    unit_last,
)
from ._replay import Memory, noted, planned

__all__ = ["aot_configurations", "embedding_bwd", "embedding_fwd"]

BLOCK = 64  # tokens whose contributions to the norm's parameters are one sum, where rows are short
MOST_BYTES = 32768  # of a row in the accumulator's dtype: registers hold it
LONG = 8192  # bytes of a row, from which on a program takes one token backward
SIZES = ["columns", "classes", "rows", "strides", "start", "period", "threshold", "tokens"]  # not compiled in


@triton.jit
def gathered(
    ids_ptr, weight_ptr, table_ptr, places_ptr, token, columns, classes, rows, strides, start, period, scale, column,
    ACC: tl.constexpr,
):  # fmt: skip
    """scale * weight[id] + table[place] of a token, 0 beyond the columns; nan where there is no such row."""
    live = column < columns
    id = tl.load(ids_ptr + token)
    there = (id >= 0) & (id < classes)
    s = tl.load(weight_ptr + id * strides[0] + column, mask=live & there, other=0.0).to(ACC) * scale
    if table_ptr is not None:
        if places_ptr is not None:
            place = tl.load(places_ptr + token)
        else:
            place = start + token % period
        known = (place >= 0) & (place < rows)
        s += tl.load(table_ptr + place * strides[1] + column, mask=live & known, other=0.0).to(ACC)
        there = there & known
    return tl.where(live, tl.where(there, s, float("nan")), 0.0)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    ids_ptr, weight_ptr, table_ptr, places_ptr, norm_weight_ptr, norm_bias_ptr, seed_ptr, output_ptr, mean_ptr,
    rstd_ptr, columns, classes, rows, strides, start, period, threshold, dropout_scale, eps,
    SCALE: tl.constexpr, NORMED: tl.constexpr, ACC: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_C)[None, :]
    live = column < columns
    y = gathered(
        ids_ptr, weight_ptr, table_ptr, places_ptr, token, columns, classes, rows, strides, start, period,
        SCALE, column, ACC,
    )  # fmt: skip
    if NORMED:
        mean = tl.sum(tl.sum(y, 1), 0) / columns
        d = tl.where(live, y - mean, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(tl.sum(d * d, 1), 0) / columns + eps)
        tl.store(mean_ptr + token, mean)
        tl.store(rstd_ptr + token, rstd)
        y = d * rstd
        if norm_weight_ptr is not None:
            y *= tl.load(norm_weight_ptr + column, mask=live, other=0.0).to(ACC)
        if norm_bias_ptr is not None:
            y += tl.load(norm_bias_ptr + column, mask=live, other=0.0).to(ACC)
    if seed_ptr is not None:
        row = token + tl.zeros([1], tl.int64)
        y = tl.where(keep_mask(tl.load(seed_ptr), row, 0, threshold, BLOCK_C), y * dropout_scale, 0.0)
    tl.store(output_ptr + token * columns + column, rounded(y, output_ptr.dtype.element_ty), mask=live)


@triton.jit
def token_backward(
    grad_ptr, ids_ptr, weight_ptr, table_ptr, places_ptr, norm_weight_ptr, mean_ptr, rstd_ptr, seed_ptr, sums_ptr,
    token, columns, classes, rows, strides, start, period, threshold, dropout_scale, column, SCALE: tl.constexpr,
    NORMED: tl.constexpr, ACC: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of a token's sum; returns what it gives the norm's weight and bias."""
    live = column < columns
    g = tl.load(grad_ptr + token * columns + column, mask=live, other=0.0).to(ACC)
    if seed_ptr is not None:
        row = token + tl.zeros([1], tl.int64)
        g = tl.where(keep_mask(tl.load(seed_ptr), row, 0, threshold, BLOCK_C), g * dropout_scale, 0.0)
    of_weight = g
    of_bias = g
    if NORMED:
        s = gathered(
            ids_ptr, weight_ptr, table_ptr, places_ptr, token, columns, classes, rows, strides, start, period,
            SCALE, column, ACC,
        )  # fmt: skip
        rstd = tl.load(rstd_ptr + token)
        x = tl.where(live, (s - tl.load(mean_ptr + token)) * rstd, 0.0)
        of_weight = g * x
        if norm_weight_ptr is not None:
            g *= tl.load(norm_weight_ptr + column, mask=live, other=0.0).to(ACC)
        mean_g = tl.sum(tl.sum(g, 1), 0) / columns
        mean_gx = tl.sum(tl.sum(g * x, 1), 0) / columns
        g = (g - mean_g - x * mean_gx) * rstd
    tl.store(sums_ptr + token * columns + column, g, mask=live)
    return of_weight, of_bias


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    grad_ptr, ids_ptr, weight_ptr, table_ptr, places_ptr, norm_weight_ptr, mean_ptr, rstd_ptr, seed_ptr, sums_ptr,
    parts_ptr, tokens, columns, classes, rows, strides, start, period, threshold, dropout_scale,
    SCALE: tl.constexpr, NORMED: tl.constexpr, ACC: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of tokens' sums; parts: sums for the norm's weight, then for its bias, (2, blocks, D)."""
    block = tl.program_id(0).to(tl.int64)
    blocks = tl.num_programs(0).to(tl.int64)
    column = tl.arange(0, BLOCK_C)[None, :]
    live = column < columns
    if BLOCK_T == 1:  # long rows: nothing is carried from token to token
        of_weight, of_bias = token_backward(
            grad_ptr, ids_ptr, weight_ptr, table_ptr, places_ptr, norm_weight_ptr, mean_ptr, rstd_ptr, seed_ptr,
            sums_ptr, block, columns, classes, rows, strides, start, period, threshold, dropout_scale, column, SCALE,
            NORMED, ACC, BLOCK_C,
        )  # fmt: skip
    else:
        of_weight = tl.zeros([1, BLOCK_C], ACC)
        of_bias = tl.zeros([1, BLOCK_C], ACC)
        for token in range(block * BLOCK_T, tl.minimum(tokens, (block + 1) * BLOCK_T)):
            more, bias = token_backward(
                grad_ptr, ids_ptr, weight_ptr, table_ptr, places_ptr, norm_weight_ptr, mean_ptr, rstd_ptr, seed_ptr,
                sums_ptr, token, columns, classes, rows, strides, start, period, threshold, dropout_scale, column,
                SCALE, NORMED, ACC, BLOCK_C,
            )  # fmt: skip
            of_weight += more
            of_bias += bias
    if NORMED:
        tl.store(parts_ptr + block * columns + column, of_weight, mask=live)
        tl.store(parts_ptr + (blocks + block) * columns + column, of_bias, mask=live)


@triton.jit(do_not_specialize=["columns"])
def _sum_kernel(
    source_ptr, order_ptr, begins_ptr, ends_ptr, target_ptr, columns, FACTOR: tl.constexpr, ACC: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A row of the target: factor times the sum of the source's rows order[begin], ..., order[end - 1]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = column < columns
    total = tl.zeros([BLOCK_C], ACC)
    for n in range(tl.load(begins_ptr + row), tl.load(ends_ptr + row)):
        token = tl.load(order_ptr + n)
        total += tl.load(source_ptr + token * columns + column, mask=live, other=0.0).to(ACC)
    total *= FACTOR
    tl.store(target_ptr + row * columns + column, rounded(total, target_ptr.dtype.element_ty), mask=live)


def embedding_fwd(
    ids, weight, table, places, start, period, scale, normed, norm_weight, norm_bias, eps, seed, dropout_p
):  # fmt: skip
    """The launcher behind `seqkern::embedding_fwd`: (output, mean, rstd)."""
    tensors = (ids.contiguous(), _rows(weight), _rows(table), places, _dense(norm_weight), _dense(norm_bias), seed)
    return planned(_plan_forward, tensors, (start, period, scale, normed, eps, dropout_p), weight.device)


def embedding_bwd(
    grad_output, ids, weight, table, places, start, period, scale, normed, norm_weight, mean, rstd, seed, dropout_p,
    padding_idx, need_weight, sparse, need_table, need_norm,
):  # fmt: skip
    """The launcher behind `seqkern::embedding_bwd`: (grad_weight, rows, grad_table, and of the norm's parameters)."""
    grad, none = grad_output.contiguous(), weight.new_empty(0)
    acc, columns = accumulator(weight.dtype), weight.size(1)
    of_norm = [weight.new_empty(0, dtype=acc)] * 2
    source = grad
    if normed or seed is not None:
        tensors = (
            grad, ids.contiguous(), _rows(weight), _rows(table), places, _dense(norm_weight), mean, rstd, seed
        )  # fmt: skip
        source, parts = planned(
            _plan_backward, tensors, (start, period, scale, normed, dropout_p), weight.device
        )  # fmt: skip
        if normed and need_norm:
            of_norm = list(parts.sum(1))
    rows, of_weight, of_table = ids.new_empty(0), none, none
    if need_weight:
        keys = ids if padding_idx < 0 else torch.where(ids == padding_idx, weight.size(0), ids)
        of_weight, rows = _summed(source, keys, weight, scale, sparse)
    if need_table and table is not None:
        at = places
        if at is None:
            at = start + torch.arange(ids.size(0), device=ids.device) % period
        of_table, _ = _summed(source, at, table, 1.0, False)
    return of_weight.view(-1, columns), rows, of_table.view(-1, columns), *of_norm


def _rows(t):
    return None if t is None else unit_last(t)


def _dense(t):
    return None if t is None else t.contiguous()


def _summed(source, keys, like, factor, sparse):
    """For each of like's rows the sum of the source's rows with its number; sparse: of the numbers that are there."""
    ordered, order = keys.sort(stable=True)
    rows = torch.arange(like.size(0), device=keys.device)
    if sparse:
        rows = ordered.unique_consecutive()
        rows = rows[(rows >= 0) & (rows < like.size(0))]
    begins, ends = (torch.searchsorted(ordered, rows, right=right) for right in (False, True))
    target = planned(_plan_sum, (source, order, begins, ends, like), (factor,), keys.device)[0]
    return target, rows if sparse else keys.new_empty(0)


def _block(columns, acc):
    if columns * acc.itemsize > MOST_BYTES:
        raise NotImplementedError(
            f"embedding: the Triton kernels take at most {MOST_BYTES // acc.itemsize} columns, got {columns}; "
            'use_backend("reference") runs any'
        )
    block = max(16, power_of_two(columns))
    return block, max(1, min(16, block * acc.itemsize // 1024))


def _constants(weight, scale, normed):
    return {"SCALE": float(scale), "NORMED": normed, "ACC": TRITON_DTYPE[accumulator(weight.dtype)]}


def _sizes(ids, weight, table, start, period):
    strides = (weight.stride(0), 0 if table is None else table.stride(0))
    return weight.size(1), weight.size(0), 0 if table is None else table.size(0), strides, start, max(1, period)


def _plan_forward(
    memory, ids, weight, table, places, norm_weight, norm_bias, seed, start, period, scale, normed, eps, dropout_p
):  # fmt: skip
    count, columns = ids.size(0), weight.size(1)
    acc = accumulator(weight.dtype)
    output = memory.empty(weight, (count, columns))
    mean, rstd = (memory.empty(weight, (count if normed else 0,), acc) for _ in range(2))
    block, warps = _block(columns, acc)
    dropout_scale, threshold = dropout_scalars(dropout_p)
    arguments = (
        ids, weight, table, places, norm_weight, norm_bias, seed, output, mean, rstd,
        *_sizes(ids, weight, table, start, period), threshold, dropout_scale, float(eps),
    )  # fmt: skip
    constants = _constants(weight, scale, normed) | {"BLOCK_C": block}
    launch = Launch("embedding_forward", _forward_kernel, (count,), arguments, constants, warps)
    return (output, mean, rstd), [launch]


def _plan_backward(
    memory, grad, ids, weight, table, places, norm_weight, mean, rstd, seed, start, period, scale, normed, dropout_p
):  # fmt: skip
    count, columns = ids.size(0), weight.size(1)
    acc = accumulator(weight.dtype)
    tokens = BLOCK if columns * acc.itemsize < LONG else 1
    blocks = cdiv(count, tokens)
    sums = memory.empty(weight, (count, columns), acc)
    parts = memory.empty(weight, (2, blocks if normed else 0, columns), acc)
    block, warps = _block(columns, acc)
    dropout_scale, threshold = dropout_scalars(dropout_p)
    arguments = (
        grad, ids, weight, table, places, norm_weight, mean, rstd, seed, sums, parts, count,
        *_sizes(ids, weight, table, start, period), threshold, dropout_scale,
    )  # fmt: skip
    constants = _constants(weight, scale, normed) | {"BLOCK_T": tokens, "BLOCK_C": block}
    launch = Launch("embedding_backward", _backward_kernel, (blocks,), arguments, constants, warps)
    return (sums, parts), [launch]


def _plan_sum(memory, source, order, begins, ends, like, factor):
    rows, columns = begins.size(0), like.size(1)
    target = memory.empty(like, (rows, columns))
    block = min(1024, max(16, power_of_two(columns)))
    arguments = (source, order, begins, ends, target, columns)
    constants = {"FACTOR": float(factor), "ACC": TRITON_DTYPE[accumulator(like.dtype)], "BLOCK_C": block}
    grid = (rows, cdiv(columns, block))
    launch = Launch("embedding_sum", _sum_kernel, grid, arguments, constants, max(1, min(4, block // 256)))
    return (target,), [launch]


def explained(op, ids, weight=None, *_):
    """The launches of a call and of its way back; nothing is launched."""
    if weight is None:
        weight = ids.new_empty((1, 256), dtype=torch.float32)
    tokens = ids.reshape(-1).long()
    grad = weight.new_empty((tokens.size(0), weight.size(1)))
    with noted() as launches:
        planned(_plan_forward, (tokens, weight, *(None,) * 5), (0, 1, 1.0, False, 1e-5, 0.0), weight.device)
        planned(_plan_sum, (grad, tokens, tokens, tokens, weight), (1.0,), weight.device)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use little shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        for columns in (256, 1024, 4096, 8192, 100) if thorough else (256,):
            if columns * accumulator(dtype).itemsize > MOST_BYTES:
                continue
            for kind in ("", "-learned", "-places", "-norm", "-all") if thorough else ("", "-all"):
                name = f"{kind}-{str(dtype).removeprefix('torch.')}-{columns}"
                ids = torch.empty(64, dtype=torch.int64, device="meta")
                weight = torch.empty(1000, columns, dtype=dtype, device="meta")
                normed = kind in ("-norm", "-all")
                table = weight if kind in ("-learned", "-places", "-all") else None
                places = ids if kind in ("-places", "-all") else None
                seed = ids[:1] if kind == "-all" else None
                row = torch.empty(columns, dtype=dtype, device="meta") if normed else None
                statistics = torch.empty(64, dtype=accumulator(dtype), device="meta") if normed else None
                of = (ids, weight, table, places)
                numbers = (0, 8, 1.0, normed)
                dropout_p = 0.1 if seed is not None else 0.0
                plans = [_plan_forward(Memory(), *of, row, row, seed, *numbers, 1e-5, dropout_p)]
                grad = torch.empty(64, columns, dtype=dtype, device="meta")
                if normed:
                    way = (grad, *of, row, statistics, statistics, seed, *numbers, dropout_p)
                    plans.append(_plan_backward(Memory(), *way))
                if kind == "":
                    plans.append(_plan_sum(Memory(), grad, ids, ids, ids, weight, 1.0))
                for _, (launch,) in plans:
                    yield f"{launch.name}{name}", launch
