"""Additive attention in Triton: scores w^T tanh(q + k) of a chunk of queries, their softmax, and the ways back.

The scores of a chunk are there at once, (B, chunk, Tk), and between the kernels the products with values are torch's:

  scores      a tile of queries and keys, summed over slices of channels
  softmax     a row: P in place of the scores, the log-sum-exp
  grad_scores a row: P and dS = P (dP - sum of P dP + dlse) in place of the scores and of dP = grad_output value^T
  grad_query  a tile of queries and channels, over all keys: dq = w sum of dS (1 - tanh^2), and what dw = sum of dS tanh
              and the bias's gradient get from it
  grad_key    a tile of keys and channels, over the chunk's queries: dk = w sum of dS (1 - tanh^2)

No atomics. Equations and sources: seqkern/reference/additive_attention.py. The product form of the CPU kernels
(csrc/additive_attention) would halve the special functions.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, cdiv, power_of_two, rounded, run
from ._replay import noted
from .rnn.cells import tanh

__all__ = ["additive_attention_bwd", "additive_attention_fwd", "aot_configurations"]

SCORES = 1 << 26  # of a chunk of queries
BLOCK_Q, BLOCK_K = 16, 32
SIZES = ["queries", "keys", "channels", "rows", "first", "mask_batch", "mask_row", "mask_column"]  # not compiled in


@triton.jit
def _hidden_tile(
    query_ptr, key_ptr, bias_ptr, query, key, channel, queries, keys, channels, ACC: tl.constexpr
):  # fmt: skip
    """tanh(q + bias + k) of queries (BQ), keys (BK) and channels (BD): (BQ, BK, BD)."""
    live = channel < channels
    q = tl.load(
        query_ptr + query[:, None] * channels + channel[None, :],
        mask=(query < queries)[:, None] & live[None, :], other=0.0,
    ).to(ACC)  # fmt: skip
    k = tl.load(
        key_ptr + key[:, None] * channels + channel[None, :], mask=(key < keys)[:, None] & live[None, :], other=0.0
    ).to(ACC)  # fmt: skip
    if bias_ptr is not None:
        q += tl.load(bias_ptr + channel, mask=live, other=0.0).to(ACC)[None, :]
    return tanh(q[:, None, :] + k[None, :, :])


@triton.jit(do_not_specialize=SIZES)
def _scores_kernel(
    query_ptr, key_ptr, weight_ptr, bias_ptr, lengths_ptr, mask_ptr, scores_ptr, queries, keys, channels, rows, first,
    mask_batch, mask_row, mask_column, MASK_IS_BOOL: tl.constexpr, ACC: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores of the queries first, ..., first + rows - 1: (B, rows, keys); -inf where a key is hidden."""
    b = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(keys, BLOCK_K)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    key = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    query = first + row
    scores = tl.zeros([BLOCK_Q, BLOCK_K], ACC)
    for d in range(0, channels, BLOCK_D):
        channel = d + tl.arange(0, BLOCK_D)
        t = _hidden_tile(
            query_ptr + b * queries * channels, key_ptr + b * keys * channels, bias_ptr, query, key, channel, queries,
            keys, channels, ACC,
        )  # fmt: skip
        w = tl.load(weight_ptr + channel, mask=channel < channels, other=0.0).to(ACC)
        scores += tl.sum(t * w[None, None, :], 2)
    there = (row < rows)[:, None] & (key < keys)[None, :]
    visible = there
    if mask_ptr is not None:
        at = mask_ptr + b * mask_batch + query[:, None] * mask_row + key[None, :] * mask_column
        if MASK_IS_BOOL:
            visible = visible & (tl.load(at, mask=there, other=0) != 0)
        else:
            added = tl.load(at, mask=there, other=0.0)
            visible = visible & (added != float("-inf"))
            scores += tl.where(visible, added, 0.0)
    if lengths_ptr is not None:
        visible = visible & (key < tl.load(lengths_ptr + b))[None, :]
    scores = tl.where(visible, scores, float("-inf"))
    tl.store(scores_ptr + (b * rows + row[:, None]) * keys + key[None, :], scores, mask=there)


@triton.jit
def _row_sum(scores, keys, ACC: tl.constexpr, BLOCK_K: tl.constexpr):
    """The largest score of a row, and the sum of exp(s - largest); 0 and 1 where every key is hidden."""
    most = tl.full([BLOCK_K], float("-inf"), ACC)
    for k in range(0, keys, BLOCK_K):
        key = k + tl.arange(0, BLOCK_K)
        most = tl.maximum(most, tl.load(scores + key, mask=key < keys, other=float("-inf")))
    top = tl.max(most, 0)
    top = tl.where(top == float("-inf"), 0.0, top).to(ACC)
    sums = tl.zeros([BLOCK_K], ACC)
    for k in range(0, keys, BLOCK_K):
        key = k + tl.arange(0, BLOCK_K)
        sums += tl.exp(tl.load(scores + key, mask=key < keys, other=float("-inf")) - top)
    total = tl.sum(sums, 0)
    return top, tl.where(total == 0.0, 1.0, total).to(ACC)


@triton.jit(do_not_specialize=SIZES)
def _softmax_kernel(
    scores_ptr, weights_ptr, lse_ptr, queries, keys, rows, first, ACC: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Of a row of scores: the weights (B, rows, keys) and the log-sum-exp, (B, queries)."""
    row = tl.program_id(0).to(tl.int64)
    at = scores_ptr + row * keys
    top, total = _row_sum(at, keys, ACC, BLOCK_K)
    seen = tl.zeros([BLOCK_K], ACC)
    for k in range(0, keys, BLOCK_K):
        key = k + tl.arange(0, BLOCK_K)
        p = tl.exp(tl.load(at + key, mask=key < keys, other=float("-inf")) - top) / total
        tl.store(weights_ptr + row * keys + key, rounded(p, weights_ptr.dtype.element_ty), mask=key < keys)
        seen += p
    lse = tl.where(tl.sum(seen, 0) == 0.0, float("-inf"), top + tl.log(total))
    tl.store(lse_ptr + row // rows * queries + first + row % rows, lse.to(ACC))


@triton.jit(do_not_specialize=SIZES)
def _grad_scores_kernel(
    scores_ptr, products_ptr, grad_lse_ptr, grad_weights_ptr, queries, keys, rows, first, ACC: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of a row: P in place of its scores, dS in place of dP. P has the softmax's sum: exp(s - lse) is less exact."""
    row = tl.program_id(0).to(tl.int64)
    query = row // rows * queries + first + row % rows
    scores = scores_ptr + row * keys
    products = products_ptr + row * keys
    top, total = _row_sum(scores, keys, ACC, BLOCK_K)
    sums = tl.zeros([BLOCK_K], ACC)
    for k in range(0, keys, BLOCK_K):
        key = k + tl.arange(0, BLOCK_K)
        live = key < keys
        s = tl.load(scores + key, mask=live, other=float("-inf"))
        p = tl.exp(s - top) / total
        dp = tl.load(products + key, mask=live, other=0.0)
        if grad_weights_ptr is not None:
            dp += tl.load(grad_weights_ptr + query * keys + key, mask=live, other=0.0).to(ACC)
        dp = tl.where(s == float("-inf"), 0.0, dp)  # of a hidden key nothing counts, not even a NaN
        tl.store(scores + key, p, mask=live)
        tl.store(products + key, dp, mask=live)
        sums += p * dp
    delta = tl.sum(sums, 0)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + query)
    for k in range(0, keys, BLOCK_K):
        key = k + tl.arange(0, BLOCK_K)
        live = key < keys
        p = tl.load(scores + key, mask=live, other=0.0)
        tl.store(products + key, p * (tl.load(products + key, mask=live, other=0.0) - delta), mask=live)


@triton.jit(do_not_specialize=SIZES)
def _grad_query_kernel(
    query_ptr, key_ptr, weight_ptr, bias_ptr, grad_scores_ptr, grad_query_ptr, parts_ptr, queries, keys, channels,
    rows, first, ACC: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries and channels; parts: sums for weight and bias, (2, B, blocks of queries, D)."""
    b = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(channels, BLOCK_D)
    block = tl.program_id(0) // blocks
    row = block.to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    channel = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    live = channel < channels
    query = first + row
    dq = tl.zeros([BLOCK_Q, BLOCK_D], ACC)
    dw = tl.zeros([BLOCK_Q, BLOCK_D], ACC)
    for k in range(0, keys, BLOCK_K):
        key = k + tl.arange(0, BLOCK_K)
        there = (row < rows)[:, None] & (key < keys)[None, :]
        ds = tl.load(grad_scores_ptr + (b * rows + row[:, None]) * keys + key[None, :], mask=there, other=0.0)
        t = _hidden_tile(
            query_ptr + b * queries * channels, key_ptr + b * keys * channels, bias_ptr, query, key, channel, queries,
            keys, channels, ACC,
        )  # fmt: skip
        dq += tl.sum(ds[:, :, None] * (1.0 - t * t), 1)
        dw += tl.sum(ds[:, :, None] * t, 1)
    dq *= tl.load(weight_ptr + channel, mask=live, other=0.0).to(ACC)[None, :]
    at = grad_query_ptr + (b * queries + query[:, None]) * channels + channel[None, :]
    tl.store(at, rounded(dq, grad_query_ptr.dtype.element_ty), mask=(row < rows)[:, None] & live[None, :])
    groups = tl.cdiv(rows, BLOCK_Q)
    part = parts_ptr + (b * groups + block) * channels + channel
    tl.store(part, tl.sum(dw, 0), mask=live)
    tl.store(part + tl.num_programs(1).to(tl.int64) * groups * channels, tl.sum(dq, 0), mask=live)


@triton.jit(do_not_specialize=SIZES)
def _grad_key_kernel(
    query_ptr, key_ptr, weight_ptr, bias_ptr, grad_scores_ptr, sums_ptr, queries, keys, channels, rows, first,
    ACC: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds what the chunk gives a tile of keys and channels to `sums`, (B, keys, D)."""
    b = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(channels, BLOCK_D)
    key = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    channel = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    live = channel < channels
    dk = tl.zeros([BLOCK_K, BLOCK_D], ACC)
    for r in range(0, rows, BLOCK_Q):
        row = r + tl.arange(0, BLOCK_Q)
        there = (row < rows)[:, None] & (key < keys)[None, :]
        ds = tl.load(grad_scores_ptr + (b * rows + row[:, None]) * keys + key[None, :], mask=there, other=0.0)
        t = _hidden_tile(
            query_ptr + b * queries * channels, key_ptr + b * keys * channels, bias_ptr, first + row, key, channel,
            queries, keys, channels, ACC,
        )  # fmt: skip
        dk += tl.sum(ds[:, :, None] * (1.0 - t * t), 0)
    dk *= tl.load(weight_ptr + channel, mask=live, other=0.0).to(ACC)[None, :]
    at = sums_ptr + (b * keys + key[:, None]) * channels + channel[None, :]
    there = (key < keys)[:, None] & live[None, :]
    tl.store(at, tl.load(at, mask=there, other=0.0) + dk, mask=there)


# ---- launchers ----------------------------------------------------------------------------------------------------


def additive_attention_fwd(query, key, value, weight, bias, key_lengths, mask, need_weights):
    """The launcher behind `seqkern::additive_attention_fwd`: (output, lse, weights)."""
    call = _Call(query, key, value, weight, bias, key_lengths, mask)
    batch, queries, keys = call.sizes
    output = query.new_empty((batch, queries, value.size(2)))
    lse = query.new_empty((batch, queries), dtype=call.acc)
    weights = query.new_empty((batch, queries, keys) if need_weights else 0)
    for first, rows in call.chunks():
        scores = call.scores(first, rows)
        of_rows = scores if scores.dtype == query.dtype else query.new_empty(scores.shape)
        run([softmax_step(scores, of_rows, lse, first)], query.device)
        output[:, first : first + rows] = of_rows @ call.value
        if need_weights:
            weights[:, first : first + rows] = of_rows
    return output, lse, weights


def additive_attention_bwd(
    grad_output, grad_lse, grad_weights, query, key, value, weight, bias, key_lengths, mask, need_mask
):  # fmt: skip
    """The launcher behind `seqkern::additive_attention_bwd`: gradients of query, key, value, weight, bias, mask."""
    call = _Call(query, key, value, weight, bias, key_lengths, mask)
    batch, queries, keys = call.sizes
    acc, channels = call.acc, query.size(2)
    grad_lse, grad_weights = (None if g is None else g.contiguous() for g in (grad_lse, grad_weights))
    grad_query = query.new_empty(query.shape)
    key_sums = query.new_zeros(key.shape, dtype=acc)
    value_sums = query.new_zeros(value.shape, dtype=acc)
    totals = query.new_zeros((2, channels), dtype=acc)
    grad_mask = query.new_empty((batch, queries, keys) if need_mask else 0, dtype=acc)
    wide = call.value.to(acc).transpose(1, 2)
    for first, rows in call.chunks():
        scores = call.scores(first, rows)
        grad = None if grad_output is None else grad_output[:, first : first + rows].to(acc)
        products = torch.zeros_like(scores) if grad is None else torch.bmm(grad, wide)
        run([grad_scores_step(scores, products, grad_lse, grad_weights, first, queries)], query.device)
        parts = query.new_empty((2, batch, cdiv(rows, BLOCK_Q), channels), dtype=acc)
        run(call.grad_steps(products, grad_query, parts, key_sums, first), query.device)
        totals += parts.sum((1, 2))
        if grad is not None:
            value_sums += torch.bmm(scores.transpose(1, 2), grad)
        if need_mask:
            grad_mask[:, first : first + rows] = products
    return grad_query, key_sums.to(query.dtype), value_sums.to(query.dtype), totals[0], totals[1], grad_mask


class _Call:
    """The arguments of a call, and its launches for a chunk of queries."""

    def __init__(self, query, key, value, weight, bias, key_lengths, mask) -> None:
        self.query, self.key, self.weight = query.contiguous(), key.contiguous(), weight.contiguous()
        self.bias = None if bias is None else bias.contiguous()
        self.lengths = None if key_lengths is None else key_lengths.contiguous()
        self.mask, self.acc = mask, accumulator(query.dtype)
        self.sizes = query.size(0), query.size(1), key.size(1)
        self.value = value
        if self.lengths is not None or mask is not None:  # what no query sees does not count, not even a NaN
            seen = torch.ones(self.sizes[0], self.sizes[2], dtype=torch.bool, device=query.device)
            if self.lengths is not None:
                seen &= torch.arange(self.sizes[2], device=query.device) < self.lengths[:, None]
            if mask is not None:
                seen &= (mask if mask.dtype == torch.bool else mask != float("-inf")).any(1)
            self.value = value.masked_fill(~seen[..., None], 0)

    def chunks(self):
        batch, queries, keys = self.sizes
        if queries and not (batch and keys):
            return [(0, queries)]
        size = max(BLOCK_Q, SCORES // max(1, batch * keys) // BLOCK_Q * BLOCK_Q)
        return [(first, min(size, queries - first)) for first in range(0, queries, size)]

    def scores(self, first, rows):
        scores = self.query.new_empty((self.sizes[0], rows, self.sizes[2]), dtype=self.acc)
        run([self.scores_step(scores, first)], self.query.device)
        return scores

    def scores_step(self, scores, first):
        batch, rows, keys = scores.shape
        strides = (0, 0, 0) if self.mask is None else self.mask.stride()
        mask = self.mask if self.mask is None or self.mask.dtype != torch.bool else self.mask.view(torch.uint8)
        arguments = (
            self.query, self.key, self.weight, self.bias, self.lengths, mask, scores, self.query.size(1), keys,
            self.query.size(2), rows, first, *strides,
        )  # fmt: skip
        constants = {
            "MASK_IS_BOOL": self.mask is not None and self.mask.dtype == torch.bool, "ACC": TRITON_DTYPE[self.acc],
            **_blocks(self.acc),
        }  # fmt: skip
        grid = (cdiv(rows, BLOCK_Q) * cdiv(keys, BLOCK_K), batch)
        return Launch("additive_scores", _scores_kernel, grid, arguments, constants, _warps(self.acc), registers=255)

    def grad_steps(self, grad_scores, grad_query, parts, key_sums, first):
        batch, rows, keys = grad_scores.shape
        channels = self.query.size(2)
        constants = {"ACC": TRITON_DTYPE[self.acc], **_blocks(self.acc)}
        strips = cdiv(channels, constants["BLOCK_D"])
        given = (self.query, self.key, self.weight, self.bias, grad_scores)
        sizes = (self.query.size(1), keys, channels, rows, first)
        of_query = Launch(
            "additive_grad_query", _grad_query_kernel, (cdiv(rows, BLOCK_Q) * strips, batch),
            (*given, grad_query, parts, *sizes), constants, _warps(self.acc), registers=255,
        )  # fmt: skip
        of_key = Launch(
            "additive_grad_key", _grad_key_kernel, (cdiv(keys, BLOCK_K) * strips, batch), (*given, key_sums, *sizes),
            constants, _warps(self.acc), registers=255,
        )  # fmt: skip
        return [of_query, of_key]


def _blocks(acc):
    return {"BLOCK_Q": BLOCK_Q, "BLOCK_K": BLOCK_K, "BLOCK_D": 4 if acc == torch.float64 else 8}


def _warps(acc):
    return 8 if acc == torch.float64 else 4


def softmax_step(scores, weights, lse, first):
    batch, rows, keys = scores.shape
    constants = {"ACC": TRITON_DTYPE[scores.dtype], "BLOCK_K": min(1024, max(16, power_of_two(keys)))}
    arguments = (scores, weights, lse, lse.size(1), keys, rows, first)
    return Launch("additive_softmax", _softmax_kernel, (batch * rows,), arguments, constants, registers=255)


def grad_scores_step(scores, products, grad_lse, grad_weights, first, queries):
    batch, rows, keys = scores.shape
    constants = {"ACC": TRITON_DTYPE[scores.dtype], "BLOCK_K": min(1024, max(16, power_of_two(keys)))}
    arguments = (scores, products, grad_lse, grad_weights, queries, keys, rows, first)
    return Launch("additive_grad_scores", _grad_scores_kernel, (batch * rows,), arguments, constants, registers=255)


def explained(op, query, key=None, value=None, weight=None):
    """What a call does with each chunk of queries; nothing is launched."""
    if key is None or query.dim() != 3:
        return []
    weight = query.new_empty(query.size(-1)) if weight is None else weight
    with noted():
        call = _Call(query, key, key if value is None else value, weight, None, None, None)
        scores = torch.empty((query.size(0), call.chunks()[0][1], key.size(1)), dtype=call.acc, device="meta")
        of_rows = scores[..., 0]
        return [
            f"chunks of {scores.size(1)} queries, and between the products of torch", call.scores_step(scores, 0),
            softmax_step(scores, scores, of_rows, 0), *call.grad_steps(scores, query, scores, key, 0),
        ]  # fmt: skip


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use little shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        acc = accumulator(dtype)
        for keys in (500, 4096) if thorough else (500,):
            rows = torch.empty(4, 100, 256, dtype=dtype, device="meta")
            scores = torch.empty(4, 100, keys, dtype=acc, device="meta")
            weights = torch.empty(4, 100, keys, dtype=dtype, device="meta")
            memory = torch.empty(4, keys, 256, dtype=dtype, device="meta")
            lse, lengths = torch.empty(4, 100, dtype=acc, device="meta"), torch.empty(4, device="meta").long()
            for kind in ("plain", "bool", "added") if thorough else ("plain", "added"):
                mask = {"plain": None, "bool": scores.bool(), "added": scores}[kind]
                options = (None, None) if kind == "plain" else (rows[0, 0], lengths)
                call = _Call.__new__(_Call)
                call.query, call.key, call.value, call.weight = rows, memory, memory, rows[0, 0]
                (call.bias, call.lengths), call.mask, call.acc = options, mask, acc
                of_lse, of_weights = (None, None) if kind == "plain" else (lse, weights)
                steps = [
                    call.scores_step(scores, 0), softmax_step(scores, weights, lse, 0),
                    grad_scores_step(scores, scores, of_lse, of_weights, 0, 100),
                    *call.grad_steps(scores, rows, scores, memory.to(acc), 0),
                ]  # fmt: skip
                for step in steps:
                    yield f"{step.name}-{kind}-{str(dtype).removeprefix('torch.')}-{keys}", step
