"""The loss of negative sampling in Triton: gathered rows, scores and losses in one pass, and sums over equal rows.

A program takes an example forward. Backward, examples are sorted by row, and a program for each row of a table adds up
what its examples give, in their order: no atomics. Equations and sources: seqkern/reference/sgns_loss.py. Training in
place (seqkern/embeddings) runs on the CPU only.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, cdiv, power_of_two, rounded, unit_last
from ._replay import Memory, noted, planned

__all__ = ["aot_configurations", "sgns_loss_bwd", "sgns_loss_fwd", "word2vec_train", "word_ngrams"]

SIZES = ["columns", "ins", "outs", "in_stride", "out_stride", "negatives", "entries"]  # not compiled in


@triton.jit
def softplus(s):
    """log(1 + exp(s)): of the logarithm near 1 the rounding of its argument is made up for."""
    small = tl.exp(-tl.abs(s))
    more = 1.0 + small
    rest = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(s > 0, s, 0.0) + rest


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    center_ptr, context_ptr, negatives_ptr, in_ptr, out_ptr, loss_ptr, scores_ptr, columns, ins, outs, in_stride,
    out_stride, negatives, ACC: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The scores and the loss of an example; nan where there is no such row."""
    n = tl.program_id(0).to(tl.int64)
    own, positive = tl.load(center_ptr + n), tl.load(context_ptr + n)
    known = (own >= 0) & (own < ins)
    loss = tl.zeros([], ACC)
    for k in range(negatives + 1):
        row = positive
        if k > 0:
            row = tl.load(negatives_ptr + n * negatives + k - 1)
        there = known & (row >= 0) & (row < outs)
        total = tl.zeros([BLOCK_C], ACC)
        for first in range(0, columns, BLOCK_C):
            column = first + tl.arange(0, BLOCK_C)
            live = there & (column < columns)
            v = tl.load(in_ptr + own * in_stride + column, mask=live, other=0.0).to(ACC)
            total += v * tl.load(out_ptr + row * out_stride + column, mask=live, other=0.0).to(ACC)
        score = tl.where(there, tl.sum(total, 0), float("nan"))
        tl.store(scores_ptr + n * (negatives + 1) + k, score)
        term = softplus(tl.where(k == 0, -score, score))
        loss += tl.where((k > 0) & (row == positive), 0.0, term)
    tl.store(loss_ptr + n, loss)


@triton.jit(do_not_specialize=SIZES)
def _errors_kernel(
    grad_ptr, context_ptr, negatives_ptr, scores_ptr, errors_ptr, negatives, entries, ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the scores."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = entry < entries
    n = entry // (negatives + 1)
    k = entry % (negatives + 1)
    grad = tl.load(grad_ptr + n, mask=live, other=0.0)
    score = tl.load(scores_ptr + entry, mask=live, other=0.0)
    positive = tl.load(context_ptr + n, mask=live, other=0)
    row = tl.load(negatives_ptr + n * negatives + k - 1, mask=live & (k > 0), other=-1)
    s = tl.where(k == 0, -score, score)
    small = tl.exp(-tl.abs(s))
    slope = tl.where(s > 0, 1.0, small) / (1.0 + small)
    error = grad * tl.where(k == 0, -slope, slope)
    tl.store(errors_ptr + entry, tl.where((k > 0) & (row == positive), 0.0, error).to(ACC), mask=live)


@triton.jit(do_not_specialize=SIZES)
def _sum_kernel(
    source_ptr, order_ptr, rows_ptr, errors_ptr, begins_ptr, ends_ptr, target_ptr, columns, outs, out_stride,
    ACC: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A row of a gradient: the sum of errors times rows of the other table, over its entries in their order."""
    target = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = column < columns
    total = tl.zeros([BLOCK_C], ACC)
    for n in range(tl.load(begins_ptr + target), tl.load(ends_ptr + target)):
        entry = tl.load(order_ptr + n)
        row = tl.load(rows_ptr + entry)
        there = live & (row >= 0) & (row < outs)
        u = tl.load(source_ptr + row * out_stride + column, mask=there, other=0.0).to(ACC)
        total += tl.load(errors_ptr + entry) * u
    tl.store(target_ptr + target * columns + column, rounded(total, target_ptr.dtype.element_ty), mask=live)


def sgns_loss_fwd(center, context, negatives, w_in, w_out):
    """The launcher behind `seqkern::sgns_loss_fwd`: (loss, scores)."""
    tensors = (center.contiguous(), context.contiguous(), negatives.contiguous(), unit_last(w_in), unit_last(w_out))
    return planned(_plan_forward, tensors, (), w_in.device)


def sgns_loss_bwd(grad_loss, center, context, negatives, w_in, w_out, scores, need_in, need_out, sparse):
    """The launcher behind `seqkern::sgns_loss_bwd`: (grad_in, in_rows, grad_out, out_rows)."""
    tensors = (grad_loss.contiguous(), context.contiguous(), negatives.contiguous(), scores.contiguous())
    errors = planned(_plan_errors, tensors, (), w_in.device)[0]
    outputs = torch.cat((context[:, None], negatives), 1).flatten()
    inputs = center.repeat_interleave(negatives.size(1) + 1)
    found = []
    for need, keys, rows, like, source in (
        (need_in, inputs, outputs, w_in, w_out),
        (need_out, outputs, inputs, w_out, w_in),
    ):
        found += _summed(errors, keys, rows, like, unit_last(source), sparse) if need else _nothing(like, keys)
    return tuple(found)


def word_ngrams(letters, *rest):
    """Behind `seqkern::word_ngrams`."""
    raise NotImplementedError(f"word_ngrams: letters must be on the CPU, got {letters.device}")


def word2vec_train(w_in, *rest):
    """Behind `seqkern::word2vec_train`."""
    raise NotImplementedError(f"word2vec_train: trains on the CPU, got vectors on {w_in.device}")


def _nothing(like, keys):
    return like.new_empty((0, like.size(1))), keys.new_empty(0)


def _summed(errors, keys, rows, like, source, sparse):
    """For each of like's rows the sum over the entries with its number; sparse: of the numbers that are there."""
    ordered, order = keys.sort(stable=True)
    numbers = torch.arange(like.size(0), device=keys.device)
    if sparse:
        numbers = ordered.unique_consecutive()
        numbers = numbers[(numbers >= 0) & (numbers < like.size(0))]
    begins, ends = (torch.searchsorted(ordered, numbers, right=right) for right in (False, True))
    target = planned(_plan_sum, (source, order, rows, errors, begins, ends, like), (), keys.device)[0]
    return target, numbers if sparse else keys.new_empty(0)


def _plan_forward(memory, center, context, negatives, w_in, w_out):
    examples, each = negatives.size(0), negatives.size(1)
    acc, columns = accumulator(w_in.dtype), w_in.size(1)
    loss = memory.empty(w_in, (examples,), acc)
    scores = memory.empty(w_in, (examples, each + 1), acc)
    block = min(1024, max(16, power_of_two(columns)))
    arguments = (
        center, context, negatives, w_in, w_out, loss, scores, columns, w_in.size(0), w_out.size(0), w_in.stride(0),
        w_out.stride(0), each,
    )  # fmt: skip
    constants = {"ACC": TRITON_DTYPE[acc], "BLOCK_C": block}
    launch = Launch(
        "sgns_loss_forward", _forward_kernel, (examples,), arguments, constants, max(1, min(4, block // 256))
    )
    return (loss, scores), [launch]


def _plan_errors(memory, grad, context, negatives, scores):
    errors = memory.empty(scores, tuple(scores.shape), scores.dtype)
    entries = scores.size(0) * scores.size(1)
    arguments = (grad, context, negatives, scores, errors, negatives.size(1), entries)
    constants = {"ACC": TRITON_DTYPE[scores.dtype], "BLOCK": 256}
    return (errors,), [Launch("sgns_loss_errors", _errors_kernel, (cdiv(entries, 256),), arguments, constants, 4)]


def _plan_sum(memory, source, order, rows, errors, begins, ends, like):
    columns = like.size(1)
    target = memory.empty(like, (begins.size(0), columns))
    block = min(1024, max(16, power_of_two(columns)))
    arguments = (
        source, order, rows, errors, begins, ends, target, columns, source.size(0), source.stride(0)
    )  # fmt: skip
    constants = {"ACC": TRITON_DTYPE[errors.dtype], "BLOCK_C": block}
    grid = (begins.size(0), cdiv(columns, block))
    return (target,), [Launch("sgns_loss_sum", _sum_kernel, grid, arguments, constants, max(1, min(4, block // 256)))]


def explained(op, center, context=None, negatives=None, w_in=None, w_out=None, *_):
    """The launches of a call and of its way back; nothing is launched."""
    if not center.dtype.is_floating_point and w_in is not None:
        plan = (center.reshape(-1), context.reshape(-1), negatives.flatten(0, -2), w_in, w_out)
    else:
        ids = center.new_empty(64, dtype=torch.int64)
        table = center.new_empty((1000, 128), dtype=torch.float32)
        plan = (ids, ids, ids[:, None].expand(-1, 5), table, table)
    with noted() as launches:
        loss, scores = planned(_plan_forward, plan, (), plan[3].device)
        planned(_plan_errors, (loss, *plan[1:3], scores), (), plan[3].device)
        ids = plan[0]
        planned(_plan_sum, (plan[4], ids, ids, scores, ids, ids, plan[3]), (), plan[3].device)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use no shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        for columns in (100, 256, 1000, 4096) if thorough else (100, 256):
            ids = torch.empty(64, dtype=torch.int64, device="meta")
            table = torch.empty(1000, columns, dtype=dtype, device="meta")
            (loss, scores), (forward,) = _plan_forward(Memory(), ids, ids, ids[:, None].expand(64, 5), table, table)
            _, (errors,) = _plan_errors(Memory(), loss, ids, ids[:, None].expand(64, 5), scores)
            _, (sums,) = _plan_sum(Memory(), table, ids, ids, scores, ids, ids, table)
            for launch in (forward, errors, sums):
                yield f"{launch.name}-{str(dtype).removeprefix('torch.')}-{columns}", launch
