"""Cross-entropy of a linear layer's outputs: matrix products of torch, and one Triton kernel between them.

Rows that are not ignored are taken in chunks whose logits are at most LOGITS numbers, and are nowhere else:

    logits = X W^T        the losses, and in place of the logits d = their derivatives (kernels/cross_entropy.py)
    dX = d W              dW += d^T X

With gradients in the forward pass that is three products a logit; the backward pass, which takes an upstream gradient
for each row, makes the logits again: four. In 16 bits the logits are float32, d is rounded once, and dW is float32.

The number of rows that are not ignored is read back once a call, so that no row is multiplied in vain and a target that
is no class raises. A CUDA graph that is being captured cannot read it: there ignored rows are multiplied, with d = 0,
and targets are not checked.

No GPU speed has been measured yet.
"""

import torch

from .._products import add_product, product
from .._tensors import accumulator, unit_last
from ._common import cdiv, run
from .cross_entropy import rows_step

__all__ = ["aot_configurations", "linear_cross_entropy_bwd", "linear_cross_entropy_fwd"]

LOGITS = 1 << 26  # of a chunk: 256 MB, which products of any depth keep busy for longer than a launch takes
REDUCTIONS = NONE, MEAN, SUM = range(3)


def linear_cross_entropy_fwd(
    input, weight, target, bias, class_weight, ignore_index, label_smoothing, z_loss, softcap, reduction, need_input,
    need_weight, need_bias,
):  # fmt: skip
    """The launcher behind `seqkern::linear_cross_entropy_fwd`: (loss, max, sum, grad_input, grad_weight, grad_bias)."""
    acc = accumulator(input.dtype)
    call = _Call(
        input, weight, target, bias, class_weight, (ignore_index, label_smoothing, z_loss, softcap),
        (need_input, need_weight, need_bias), acc,
    )  # fmt: skip
    losses, top = (input.new_zeros(target.shape, dtype=acc) for _ in range(2))
    total = torch.ones_like(top)
    counted = call.valid.to(acc) if class_weight is None else class_weight.to(acc)[call.classes_of_rows] * call.valid
    counted = counted.sum()
    upstream = 1 / counted if reduction == MEAN else torch.ones_like(counted)
    call.run("forward", losses, top, total, upstream, None, known=False)
    if reduction == NONE:
        loss = losses
    else:
        loss = losses.sum() / counted if reduction == MEAN else losses.sum()
    return loss, top, total, *call.gradients


def linear_cross_entropy_bwd(
    grad_loss, grad_lse, input, weight, target, bias, class_weight, top, total, ignore_index, label_smoothing, z_loss,
    softcap, need_input, need_weight, need_bias,
):  # fmt: skip
    """The launcher behind `seqkern::linear_cross_entropy_bwd`: (grad_input, grad_weight, grad_bias)."""
    call = _Call(
        input, weight, target, bias, class_weight, (ignore_index, label_smoothing, z_loss, softcap),
        (need_input, need_weight, need_bias), input.dtype,
    )  # fmt: skip
    grad_loss, grad_lse = (None if g is None else g.contiguous() for g in (grad_loss, grad_lse))
    call.run("backward", None, top.contiguous(), total.contiguous(), grad_loss, grad_lse, known=True)
    return call.gradients


class _Call:
    """The arguments of a call, which rows count, and the gradients: (0,) where they are not needed."""

    def __init__(self, input, weight, target, bias, class_weight, options, needs, input_type) -> None:
        self.input, self.weight, self.target = unit_last(input), unit_last(weight), target.contiguous()
        self.bias = None if bias is None else bias.contiguous()
        self.class_weight = None if class_weight is None else class_weight.contiguous()
        self.weights_sum = None if class_weight is None else class_weight.sum()
        self.options, (self.need_input, self.need_weight, self.need_bias) = options, needs
        self.valid = target != options[0]
        self.classes_of_rows = torch.where(self.valid, target, 0)
        self.rows, self.count = self._counted()
        acc = accumulator(input.dtype)
        whole = self.rows is None or self.count == 0
        make = input.new_empty if whole and self.count else input.new_zeros
        self.gradients = (
            make(input.shape if self.need_input else 0, dtype=input_type),
            input.new_zeros(weight.shape if self.need_weight else 0, dtype=acc),
            input.new_zeros(weight.shape[:1] if self.need_bias else 0, dtype=acc),
        )

    def _counted(self):
        """The rows that count, None for all, and their number."""
        rows, classes = len(self.target), len(self.weight)
        if self.target.is_cuda and torch.cuda.is_current_stream_capturing():
            return None, rows
        bad = self.valid & ((self.target < 0) | (self.target >= classes))
        count, wrong = torch.stack((self.valid.sum(), bad.sum())).tolist()
        if wrong:
            raise RuntimeError(
                f"linear_cross_entropy: target must be in [0, {classes}) or ignore_index = {self.options[0]}, "
                f"got another number in {wrong} rows"
            )
        if count == rows:
            return None, rows
        return torch.sort(self.valid.byte(), descending=True, stable=True).indices[:count].contiguous(), count

    def run(self, name, losses, top, total, grad_loss, grad_lse, *, known):
        classes, depth = self.weight.shape
        if self.count == 0 or classes == 0:
            return
        grad_input, grad_weight, grad_bias = self.gradients
        wanted = self.need_input or self.need_weight or self.need_bias
        acc = accumulator(self.input.dtype)
        size = chunk(self.count, classes)
        memory = self.input.new_empty((size, classes), dtype=acc)
        derivatives = memory if acc == self.input.dtype or not wanted else self.input.new_empty((size, classes))
        part = memory.new_empty((size, depth)) if self.need_input else None
        for first in range(0, self.count, size):
            end = min(self.count, first + size)
            logits, d = memory[: end - first], derivatives[: end - first] if wanted else None
            rows = None if self.rows is None else self.rows[first:end]
            x = self.input[first:end] if rows is None else self.input.index_select(0, rows)
            product(x, self.weight.t(), out=logits)
            step = rows_step(
                name, logits, self.target, losses, top, total, self.options, bias=self.bias,
                class_weight=self.class_weight, weights_sum=self.weights_sum, rows=self.rows, first=first, known=known,
                grad_loss=grad_loss, grad_lse=grad_lse, grad=d,
            )  # fmt: skip
            run([step], x.device)
            if self.need_input:
                product(d, self.weight, out=part[: end - first])
                if rows is None:
                    grad_input[first:end] = part[: end - first]
                else:
                    grad_input.index_copy_(0, rows, part[: end - first].to(grad_input.dtype))
            if self.need_weight:
                add_product(grad_weight, d.t(), x)
            if self.need_bias:
                grad_bias += d.sum(0, dtype=acc)


def chunk(rows, classes):
    """Rows of a chunk: equal chunks, in multiples of 64."""
    most = max(64, LOGITS // classes // 64 * 64)
    return min(rows, cdiv(cdiv(rows, cdiv(rows, most)), 64) * 64)


def explained(op, input, weight=None, target=None, bias=None):
    """What a call does with each chunk of rows, if the weights are among the tensors; nothing is launched."""
    if weight is None:
        return []
    rows, classes = max(1, input.numel() // max(1, input.size(-1))), max(1, len(weight))
    size = chunk(rows, classes)
    logits = input.new_empty((size, classes), dtype=accumulator(input.dtype), device="meta")
    of_rows = logits[:, 0]
    step = rows_step(
        "forward", logits, of_rows.long(), of_rows, of_rows, of_rows, (-100, 0.0, 0.0, 0.0), grad_loss=of_rows,
        grad=logits.to(input.dtype),
    )  # fmt: skip
    return [f"chunks of {size} rows, and between the products of torch", step]


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use little shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        acc = accumulator(dtype)
        for classes in (32000, 10) if thorough else (32000,):
            for full in (False, True):
                logits, d = (torch.empty(8, classes, dtype=each, device="meta") for each in (acc, dtype))
                of_rows = torch.empty(8, dtype=acc, device="meta")
                given = {"grad_loss": of_rows, "grad": d}
                if full:
                    given |= {"bias": logits[0], "class_weight": logits[0], "weights_sum": of_rows.sum()}
                    given |= {"rows": of_rows.long(), "grad_lse": of_rows}
                options = (-100, 0.1, 0.1, 30.0) if full else (-100, 0.0, 0.0, 0.0)
                kind = f"{'options' if full else 'plain'}-{str(dtype).removeprefix('torch.')}-{classes}"
                for name in ("forward", "backward"):
                    if name == "forward":
                        scalar = {key: each for key, each in given.items() if key != "grad_lse"}
                        step = rows_step(
                            name, logits, of_rows.long(), of_rows, of_rows, of_rows, options,
                            **(scalar | {"grad_loss": of_rows.sum()}),
                        )  # fmt: skip
                    else:
                        step = rows_step(
                            name, logits, of_rows.long(), None, of_rows, of_rows, options, known=True, **given
                        )  # fmt: skip
                    yield f"linear_{step.name}-{kind}", step
