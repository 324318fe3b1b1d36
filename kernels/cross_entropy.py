"""Cross-entropy on rows of logits, forward and backward, in Triton; `linear_cross_entropy` runs it between products.

    lse = log sum_j exp z_j,   loss = (1 - e) w_y (lse - z_y) + (e / V) sum_j w_j (lse - z_j) + zeta lse^2
    d loss/d z_j = p_j ((1 - e) w_y + (e / V) sum w + 2 zeta lse) - (1 - e) w_y [j = y] - (e / V) w_j

with z = cap tanh((x + bias) / cap), sources in seqkern/reference/cross_entropy.py. A program walks one row in blocks:
once for the running maximum and sums, and, where a gradient is wanted, once more from the L2 cache. The target's 1 is
subtracted in the accumulator's dtype, before the gradient is rounded. Memory sets the time: a row read forward, and
read and written backward.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, power_of_two, rounded, scalar, unit_last
from ._replay import Memory, noted, planned
from .rnn.cells import tanh

__all__ = ["aot_configurations", "cross_entropy_bwd", "cross_entropy_fwd"]

BLOCK = 4096  # classes that a program works on at once; 16 for each thread of 8 warps


@triton.jit
def block_of(pointer, bias_ptr, column, there, softcap, CAP: tl.constexpr, ACC: tl.constexpr):
    """Logits of a row, with bias and cap, minus infinity beyond its end; and the cap's derivative."""
    z = tl.load(pointer + column, mask=there, other=0.0).to(ACC)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, mask=there, other=0.0).to(ACC)
    slope = z
    if CAP:
        t = z / softcap
        z = softcap * tanh(t)
        tail = tl.exp(-2 * tl.abs(t))
        slope = 4 * tail / ((1 + tail) * (1 + tail))  # 1 - tanh^2, which would cancel
    return tl.where(there, z, float("-inf")), slope


@triton.jit(do_not_specialize=["classes", "first", "strides", "ignore_index"])
def rows_kernel(
    logits_ptr, bias_ptr, class_weight_ptr, weights_sum_ptr, target_ptr, rows_ptr, loss_ptr, max_ptr, sum_ptr,
    grad_loss_ptr, grad_lse_ptr, grad_ptr, classes, first, strides, ignore_index, label_smoothing: tl.float64,
    z_loss: tl.float64, softcap: tl.float64, SMOOTH: tl.constexpr, CAP: tl.constexpr, KNOWN: tl.constexpr,
    SAME: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row. KNOWN: its maximum and sum are read, else found and stored with its loss. SAME: one upstream gradient
    for the losses of all rows."""
    program = tl.program_id(0).to(tl.int64)
    row = first + program
    if rows_ptr is not None:
        row = tl.load(rows_ptr + row)
    logits_row = logits_ptr + program * (tl.full((), 0, tl.int64) + strides[0])
    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    target = tl.where(counts, target, 0)
    cap, e, zeta = scalar(softcap, ACC), scalar(label_smoothing, ACC), scalar(z_loss, ACC)
    share = e / classes.to(ACC)
    of_target = tl.full((), 1.0, ACC)
    if class_weight_ptr is not None:
        of_target = tl.load(class_weight_ptr + target).to(ACC)
    weights_sum = classes.to(ACC)
    if weights_sum_ptr is not None:
        weights_sum = tl.load(weights_sum_ptr).to(ACC)
    hit = (1 - e) * of_target
    if KNOWN:
        top = tl.load(max_ptr + row)
        total = tl.load(sum_ptr + row)
    else:
        top = tl.full((), float("-inf"), ACC)
        total = tl.full((), 0.0, ACC)
        weighted = tl.full((), 0.0, ACC)
        seen = tl.full((), 0.0, ACC)
        for begin in range(0, classes, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            there = column < classes
            z, _slope = block_of(logits_row, bias_ptr, column, there, cap, CAP, ACC)
            new = tl.maximum(top, tl.max(z, 0))
            held = tl.where(new == float("-inf"), 0.0, new)  # of minus infinities nothing is subtracted
            moved = tl.where(top == float("-inf"), 0.0, top - held)
            total = total * tl.exp(moved) + tl.sum(tl.exp(z - held), 0)
            if SMOOTH:
                w = tl.where(there, 1.0, 0.0).to(ACC)
                if class_weight_ptr is not None:
                    w = tl.load(class_weight_ptr + column, mask=there, other=0.0).to(ACC)
                weighted += moved * seen + tl.sum(tl.where(there, w * (z - held), 0.0), 0)
                seen += tl.sum(w, 0)
            top = new
        top = tl.where(top == float("-inf"), 0.0, top)
        z_target, _slope = block_of(logits_row, bias_ptr, target, True, cap, CAP, ACC)
        log_sum = tl.log(total)
        loss = hit * (log_sum + (top - z_target))
        if SMOOTH:
            loss += share * (weights_sum * log_sum - weighted)
        loss += zeta * (top + log_sum) * (top + log_sum)
        tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
        tl.store(max_ptr + row, tl.where(counts, top, 0.0))
        tl.store(sum_ptr + row, tl.where(counts, total, 1.0))
    if grad_ptr is not None:
        of_loss = tl.full((), 0.0, ACC)
        if grad_loss_ptr is not None:
            of_loss = tl.load(grad_loss_ptr + (0 if SAME else row)).to(ACC)
        scale = of_loss * (hit + share * weights_sum + 2 * zeta * (top + tl.log(total)))
        if grad_lse_ptr is not None:
            scale += tl.load(grad_lse_ptr + row).to(ACC)
        scale = scale / total
        grad_row = grad_ptr + program * (tl.full((), 0, tl.int64) + strides[1])
        for begin in range(0, classes, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            there = column < classes
            z, slope = block_of(logits_row, bias_ptr, column, there, cap, CAP, ACC)
            d = tl.exp(z - top) * scale - tl.where(column == target, of_loss * hit, 0.0)
            if SMOOTH:
                if class_weight_ptr is not None:
                    d -= of_loss * share * tl.load(class_weight_ptr + column, mask=there, other=0.0).to(ACC)
                else:
                    d -= of_loss * share
            if CAP:
                d *= slope
            tl.store(grad_row + column, rounded(tl.where(counts, d, 0.0), grad_ptr.dtype.element_ty), mask=there)


def rows_step(
    name, logits, target, loss, top, total, options, *, bias=None, class_weight=None, weights_sum=None, rows=None,
    first=0, known=False, grad_loss=None, grad_lse=None, grad=None,
):  # fmt: skip
    """One launch over the rows of `logits`, whose targets, losses, ... are those `first` of `rows`, or `first` itself.

    options: ignore_index, label_smoothing, z_loss and softcap. grad_loss: for each row, or of no dimension, for all.
    """
    ignore_index, label_smoothing, z_loss, softcap = options
    count, classes = logits.shape
    acc = accumulator(logits.dtype)
    wide = acc == torch.float64
    block = min(BLOCK // 4 if wide else BLOCK, max(16, power_of_two(classes)))
    constants = {
        "SMOOTH": label_smoothing != 0, "CAP": softcap != 0, "KNOWN": known,
        "SAME": grad_loss is not None and grad_loss.dim() == 0, "ACC": TRITON_DTYPE[acc], "BLOCK_V": block,
    }  # fmt: skip
    strides = (logits.stride(0), 0 if grad is None else grad.stride(0))
    arguments = (
        logits, bias, class_weight, weights_sum, target, rows, loss, top, total, grad_loss, grad_lse, grad, classes,
        first, strides, ignore_index, label_smoothing, z_loss, softcap,
    )  # fmt: skip
    warps = max(1, min(8, block // (128 if wide else 512)))
    return Launch(f"cross_entropy_{name}", rows_kernel, (count,), arguments, constants, warps, registers=168)


def cross_entropy_fwd(logits, target, class_weight, ignore_index, label_smoothing, z_loss, softcap):
    """The launcher behind `seqkern::cross_entropy_fwd`: (loss, max, sum) of each row."""
    if logits.size(1) == 0:
        zeros = logits.new_zeros(logits.size(0), dtype=accumulator(logits.dtype))
        return zeros, zeros.clone(), zeros + 1
    tensors = (unit_last(logits), target.contiguous(), *_weights(class_weight))
    return planned(_plan_forward, tensors, (ignore_index, label_smoothing, z_loss, softcap), logits.device)


def cross_entropy_bwd(
    grad_loss, grad_lse, logits, target, class_weight, top, total, ignore_index, label_smoothing, z_loss, softcap
):
    """The launcher behind `seqkern::cross_entropy_bwd`: the gradient of the logits."""
    upstream = (None if g is None else g.contiguous() for g in (grad_loss, grad_lse))
    tensors = (*upstream, unit_last(logits), target.contiguous(), *_weights(class_weight))
    tensors = (*tensors, top.contiguous(), total.contiguous())
    return planned(_plan_backward, tensors, (ignore_index, label_smoothing, z_loss, softcap), logits.device)[0]


def _weights(class_weight):
    """Class weights, contiguous, and their sum."""
    if class_weight is None:
        return None, None
    return class_weight.contiguous(), class_weight.sum()


def _plan_forward(memory, logits, target, class_weight, weights_sum, *options):
    results = [memory.empty(logits, target.shape, accumulator(logits.dtype)) for _ in range(3)]
    step = rows_step(
        "forward", logits, target, *results, options, class_weight=class_weight, weights_sum=weights_sum
    )  # fmt: skip
    return tuple(results), [step]


def _plan_backward(memory, grad_loss, grad_lse, logits, target, class_weight, weights_sum, top, total, *options):
    grad = memory.empty(logits, logits.shape)
    step = rows_step(
        "backward", logits, target, None, top, total, options, class_weight=class_weight, weights_sum=weights_sum,
        known=True, grad_loss=grad_loss, grad_lse=grad_lse, grad=grad,
    )  # fmt: skip
    return (grad,), [step]


def explained(op, logits, target=None, class_weight=None):
    """The launches of a call, forward and backward; nothing is launched."""
    logits = logits.flatten(0, -2)
    rows = logits.new_empty(logits.shape[:1], dtype=accumulator(logits.dtype), device="meta")
    target = rows.long()
    with noted() as launches:
        cross_entropy_fwd(logits, target, class_weight, -100, 0.0, 0.0, 0.0)
        cross_entropy_bwd(rows, None, logits, target, class_weight, rows, rows, -100, 0.0, 0.0, 0.0)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use little shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        for classes in (32000, 1000, 10) if thorough else (32000,):
            for smoothing, softcap in ((0.0, 0.0), (0.1, 30.0)):
                logits = torch.empty(8, classes, dtype=dtype, device="meta")
                rows = torch.empty(8, dtype=accumulator(dtype), device="meta")
                weight = torch.empty(classes, dtype=rows.dtype, device="meta") if smoothing else None
                given = (logits, rows.long(), *_weights(weight))
                options = (-100, smoothing, smoothing, softcap)
                plans = (
                    _plan_forward(Memory(), *given, *options),
                    _plan_backward(Memory(), rows, rows if smoothing else None, *given, rows, rows, *options),
                )
                for _, (launch,) in plans:
                    kind = "options" if smoothing else "plain"
                    yield f"{launch.name}-{kind}-{str(dtype).removeprefix('torch.')}-{classes}", launch
