"""What recurrent layers on a GPU do before and after the scan over their steps, in torch: `Problem`, products, sums.

Two launchers share it: kernels/rnn/rnn.py, with scans in Triton, and `_rnn_cuda`, with scans in CUDA C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqkern._products import product
from seqkern._tensors import accumulator, unit_last

LSTM, GRU, RNN_TANH, RNN_RELU, ADDITIVE, INTERPOLATED = range(6)
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "additive_rnn", "interpolated_rnn")
GATES = (4, 3, 1, 1, 1, 2)  # G: gates that a cell computes from x and h
KEPT = (4, 4, 1, 1, 1, 2)  # R: values that the backward pass needs of a step; the GRU's q as well


class Problem(NamedTuple):
    """What all kernels of one call share, as they take it."""

    cell: int
    dtype: torch.dtype
    t: int
    b: int
    h: int
    p: int  # columns of h; fewer than H with a projection
    d: int
    bias: Tensor | None  # (D, R H), accumulator's dtype: see `sum_biases`
    peephole: Tensor | None  # (D, 3 H), accumulator's dtype
    norm: Tensor | None  # (D, .)
    lengths: Tensor | None
    resets: Tensor | None  # uint8
    mask: Tensor | None
    seed: Tensor | None
    zoneout_h: float
    zoneout_c: float
    eps: float
    device: torch.device

    @property
    def acc(self) -> torch.dtype:
        return accumulator(self.dtype)

    @property
    def expected(self) -> bool:
        """Whether zoneout uses its expectation."""
        return self.seed is None and (self.zoneout_h > 0 or self.zoneout_c > 0)

    @property
    def width(self) -> int:
        return GATES[self.cell] * self.h

    @property
    def kept(self) -> int:
        return KEPT[self.cell] * self.h


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """D tensors as one."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def stack_or_none(tensors: Sequence[Tensor]) -> Tensor | None:
    return stack(tensors) if tensors else None


def hidden_size(cell: int, tensors: Sequence[Tensor]) -> int | None:
    """H, from what `explain` got behind the input: W_hh, (G H, H), or h, (D, B, H) or (B, H); None without them.

    If W_ih is square in that way too, the answer is the same.
    """
    sizes = [t.size(1) for t in tensors[1:] if t.dim() == 2 and t.size(0) == GATES[cell] * t.size(1)]
    sizes += [t.size(2) for t in tensors[1:] if t.dim() == 3]
    sizes += [t.size(1) for t in tensors[1:] if tensors[0].dim() == 2 and t.dim() == 2 and t.size(0) == len(tensors[0])]
    return sizes[0] if sizes else None


def sum_biases(cell: int, b_ih: Sequence[Tensor], b_hh: Sequence[Tensor], acc: torch.dtype) -> Tensor | None:
    """(D, R H): for the GRU the sums of b_ih and b_hh for r and z, then b_in and b_hn."""
    if not b_hh:
        return None
    recurrent = stack(b_hh).to(acc)
    input = stack(b_ih).to(acc) if b_ih else torch.zeros_like(recurrent)
    if cell != GRU:
        return (input + recurrent).contiguous()
    both = recurrent.size(1) // 3 * 2
    return torch.cat([(input + recurrent)[:, :both], input[:, both:], recurrent[:, both:]], 1)


def prepare(
    input: Tensor, h0: Tensor, w_hh: Sequence[Tensor], b_ih: Sequence[Tensor], b_hh: Sequence[Tensor],
    peephole: Sequence[Tensor], norm: Sequence[Tensor], lengths: Tensor | None, resets: Tensor | None,
    recurrent_mask: Tensor | None, seed: Tensor | None, zoneout_h: float, zoneout_c: float, eps: float, cell: int,
) -> Problem:  # fmt: skip
    (t, b), (d, _, p), acc = input.shape[:2], h0.shape, accumulator(input.dtype)
    h = w_hh[0].size(0) // GATES[cell]
    zones = zoneout_h > 0 or zoneout_c > 0
    peepholes, norms = stack_or_none([each.reshape(3 * h) for each in peephole]), stack_or_none(norm)
    return Problem(
        cell, input.dtype, t, b, h, p, d,
        sum_biases(cell, b_ih, b_hh, acc),
        None if peepholes is None else peepholes.to(acc).contiguous(),
        None if norms is None else norms.contiguous(),
        None if lengths is None else lengths.contiguous(),
        None if resets is None else resets.contiguous().view(torch.uint8),
        None if recurrent_mask is None else recurrent_mask.contiguous(),
        seed.contiguous() if zones and seed is not None else None,
        float(zoneout_h), float(zoneout_c), float(eps), h0.device,
    )  # fmt: skip


# ---- before the scan ----------------------------------------------------------------------------------------------


def input_gates(input: Tensor, w_ih: Sequence[Tensor], problem: Problem, memory: Tensor | None = None) -> Tensor:
    """zx without biases, (D, T, B, G H), in the accumulator's dtype, written to `memory` if that is given.

    Without w_ih the caller gave them as the input.
    """
    if not w_ih:
        return unit_last(input).unflatten(2, (problem.d, problem.width)).permute(2, 0, 1, 3)
    rows = problem.t * problem.b
    if memory is None:
        memory = input.new_empty((problem.d, problem.t, problem.b, problem.width), dtype=problem.acc)
    flat = input.reshape(rows, input.size(2))
    for weight, result in zip(w_ih, memory.view(problem.d, rows, problem.width).unbind(0), strict=True):
        product(flat, weight.t(), out=result)
    return memory


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass, (D, T, B, .): the LSTM's cells, gates, products if norms."""

    cells: Tensor | None
    gates: Tensor | None
    products: Tensor | None

    def given(self, like: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """As the ops return them: (0,) for what is not kept."""
        return [like.new_empty(0, dtype=dtype) if each is None else each for each in self]


def memory_of(problem: Problem, h0: Tensor, keep: bool) -> Kept:
    if not keep:
        return Kept(None, None, None)

    def make(columns: int) -> Tensor:
        return h0.new_empty((problem.d, problem.t, problem.b, columns), dtype=problem.acc)

    return Kept(
        make(problem.h) if problem.cell == LSTM else None,
        make(problem.kept),
        make(problem.width) if problem.norm is not None else None,
    )


# ---- after it -----------------------------------------------------------------------------------------------------


def row_sums(problem: Problem) -> list[Tensor | None]:
    """Where the scan sums the gradients of norm and peepholes, one row for each row of the batch."""
    return [
        None if weight is None else weight.new_zeros((problem.d, problem.b, weight.size(1)))
        for weight in (problem.norm, problem.peephole)
    ]


def per_step(problem: Problem, columns: int, keep: bool) -> Tensor:
    """(D, T, B, columns) in the dtype; without `keep` all times share the memory of one."""
    t = problem.t if keep else 1
    memory = torch.empty((problem.d, t, problem.b, columns), dtype=problem.dtype, device=problem.device)
    return memory if keep else memory.expand(-1, problem.t, -1, -1)


class Scanned(NamedTuple):
    """What the backward scan leaves."""

    grad_h0: Tensor
    grad_c0: Tensor | None
    grad_x: Tensor  # (T, B, D G H), of zx
    grad_products: Tensor  # (D, T, B, G H), of w_hh's products; of one direction it may be grad_x
    norm_sums: Tensor | None
    peephole_sums: Tensor | None
    hidden: Tensor | None = None  # (D, T, B, H), the operands of the projection
    grad_hat: Tensor | None = None  # (D, T, B, P), the gradients of its products


def all_gradients(
    problem: Problem, input: Tensor, w_ih: Sequence[Tensor], operands: Tensor | None, scanned: Scanned,
    need_input: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The results of `seqkern::rnn_bwd`, by a product or a sum each. operands: (D, T B, P), of w_hh's products; None if
    no gradients of weights are needed.
    """
    dtype, acc, rows, d = problem.dtype, problem.acc, problem.t * problem.b, problem.d

    def nothing(dtype: torch.dtype = dtype) -> Tensor:
        return scanned.grad_h0.new_empty(0, dtype=dtype)

    flat = scanned.grad_x.view(rows, d * problem.width)
    grad_input = nothing()
    if need_input:
        grad_input = product(flat, torch.cat(list(w_ih))).to(dtype).view(input.shape) if w_ih else scanned.grad_x
    grad_c0 = nothing() if scanned.grad_c0 is None else scanned.grad_c0.to(dtype)
    result = (grad_input, scanned.grad_h0.to(dtype), grad_c0)
    if operands is None:
        return (*result, *(nothing() for _ in range(6)), nothing(acc))
    grad_w_ih, grad_b_ih, grad_w_hr, grad_peephole = (nothing() for _ in range(4))
    if w_ih:
        grad_w_ih = product(flat.t(), input.reshape(rows, input.size(2))).to(dtype)
        grad_w_ih = grad_w_ih.view(d, problem.width, input.size(2))
    turned = scanned.grad_products.reshape(d, rows, problem.width).transpose(1, 2)
    grad_w_hh = product(turned, operands).to(dtype)
    grad_b_hh = flat.sum(0, dtype=acc).to(dtype).view(d, problem.width)
    if w_ih:
        grad_b_ih = grad_b_hh.clone()
    grad_norm = nothing(acc) if scanned.norm_sums is None else scanned.norm_sums.sum(1)
    if problem.cell == GRU:  # after the norm, like the norm's own bias
        width = problem.width
        of_products = scanned.norm_sums is None
        grad_b = scanned.grad_products.sum((1, 2), dtype=acc) if of_products else grad_norm[:, width : 2 * width]
        grad_b_hh = grad_b.to(dtype).contiguous()
    if scanned.grad_hat is not None and scanned.hidden is not None:
        turned = scanned.grad_hat.reshape(d, rows, problem.p).transpose(1, 2)
        grad_w_hr = product(turned, scanned.hidden.reshape(d, rows, problem.h)).to(dtype)
    if scanned.peephole_sums is not None:
        grad_peephole = scanned.peephole_sums.sum(1).view(d, 3, problem.h).to(dtype)
    return (*result, grad_w_ih, grad_w_hh, grad_b_ih, grad_b_hh, grad_w_hr, grad_peephole, grad_norm)
