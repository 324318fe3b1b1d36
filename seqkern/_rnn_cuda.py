"""Recurrent layers in CUDA C++ behind their dispatcher ops: all steps in one launch, products by torch around it.

A thread block, a cluster or the whole device walks over the steps, whichever is the smallest that holds the recurrent
weights on chip (csrc/rnn/cuda/). `plan` says which: `explain` prints it, and a launch asks for its tier. What no tier
serves goes step by step, in Triton (kernels/rnn/rnn.py): float64, projections, peepholes, additive and interpolated
networks, weights too large.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqkern import _library
from seqkern._products import product
from seqkern._rnn_scan import (
    ADDITIVE,
    CELLS,
    GATES,
    GRU,
    LSTM,
    Problem,
    Scanned,
    all_gradients,
    hidden_size,
    input_gates,
    memory_of,
    per_step,
    prepare,
    row_sums,
    stack,
)
from seqkern._tensors import unit_last

TIER = "auto"  # the smallest that holds the weights, or (tests) "block", "cluster", "grid"


class Plan(NamedTuple):
    """How one pass over the steps goes."""

    tier: str  # "block", "cluster" or "grid"; "none": step by step
    why: str

    @property
    def served(self) -> bool:
        return self.tier != "none"

    def __str__(self) -> str:
        return f"{self.tier}: {self.why}"


def plan(
    w_hh: Tensor, batch: int, cell: int, *, norm: bool = False, peepholes: bool = False, projection: bool = False,
    backward: bool = False,
) -> Plan:  # fmt: skip
    """The plan of a scan. Of w_hh, (D, G H, H), shape, dtype and device count."""
    if w_hh.dtype == torch.float64:
        return Plan("none", "float64 goes step by step: the scans in CUDA C++ are for shorter types")
    if cell >= ADDITIVE:
        return Plan("none", "additive and interpolated networks go step by step")
    if peepholes or projection:
        return Plan("none", "projections and peepholes go step by step")
    return Plan(*_library._CUDA["rnn_scan_plan"](w_hh, batch, cell, norm, backward, TIER).split(": ", 1))


def _planned(problem: Problem, w_hh: Tensor, w_hr: Any, backward: bool) -> Plan:
    return plan(
        w_hh, problem.b, problem.cell, norm=problem.norm is not None, peepholes=problem.peephole is not None,
        projection=bool(w_hr), backward=backward,
    )  # fmt: skip


def _by_steps(name: str, plan: Plan) -> Any:
    """The launcher in Triton."""
    if not _library.has_triton():
        raise NotImplementedError(
            f"seqkern rnn: step by step it needs the triton package, which is not installed ({plan})"
        )
    return getattr(importlib.import_module("seqkern.kernels.rnn"), name)


def rnn_fwd(
    input: Tensor, h0: Tensor, c0: Tensor | None, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, w_hr: Any, peephole: Any,
    norm: Any, lengths: Any, resets: Any, recurrent_mask: Any, seed: Any, zoneout_h: float, zoneout_c: float,
    eps: float, cell: int, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The launcher behind `seqkern::rnn_fwd`: (output, h_n, c_n, cells, gates, products), (0,) where not kept."""
    layer = (b_ih, b_hh, peephole, norm, lengths, resets, recurrent_mask, seed, zoneout_h, zoneout_c, eps, cell)
    problem = prepare(input, h0, w_hh, *layer)
    weights = stack(w_hh)
    chosen = _planned(problem, weights, w_hr, backward=False)
    if not chosen.served:
        b_ih, b_hh, *options = layer
        return _by_steps("rnn_fwd", chosen)(input, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, *options, keep)
    h0 = h0.contiguous()
    c0 = None if c0 is None else c0.contiguous()
    output = input.new_empty((problem.t, problem.b, problem.d * problem.p))
    kept = memory_of(problem, h0, keep)
    x = input_gates(input, w_ih, problem, kept.gates if cell != GRU else None)
    h, c = torch.ops.seqkern_cuda.rnn_scan_fwd(
        x, weights.contiguous(), problem.bias, problem.norm, problem.lengths, problem.resets, problem.mask,
        problem.seed, h0, c0, problem.zoneout_h, problem.zoneout_c, problem.eps, cell, output, *kept,
        chosen.tier,
    )  # fmt: skip
    c = h0.new_empty(0) if c0 is None else c.to(input.dtype)
    return (output, h.to(input.dtype), c, *kept.given(h0, problem.acc))


def rnn_bwd(
    grad_output: Tensor | None, grad_h_n: Tensor | None, grad_c_n: Tensor | None, grad_cells: Tensor | None,
    input: Tensor, h0: Tensor, c0: Tensor | None, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, w_hr: Any, peephole: Any,
    norm: Any, lengths: Any, resets: Any, recurrent_mask: Any, seed: Any, zoneout_h: float, zoneout_c: float,
    eps: float, cell: int, output: Tensor, cells: Tensor, gates: Tensor, products: Tensor,
    need_input: bool, need_weights: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The launcher behind `seqkern::rnn_bwd`: the gradients of input, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, peephole
    and norm, (0,) where not needed.
    """
    layer = (b_ih, b_hh, peephole, norm, lengths, resets, recurrent_mask, seed, zoneout_h, zoneout_c, eps, cell)
    problem = prepare(input, h0, w_hh, *layer)
    weights = stack(w_hh)
    chosen = _planned(problem, weights, w_hr, backward=True)
    if not chosen.served:
        b_ih, b_hh, *options = layer
        return _by_steps("rnn_bwd", chosen)(
            grad_output, grad_h_n, grad_c_n, grad_cells, input, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, *options,
            output, cells, gates, products, need_input, need_weights,
        )  # fmt: skip
    t, b, d, width = problem.t, problem.b, problem.d, problem.width
    h0, output, c0 = h0.contiguous(), output.contiguous(), None if c0 is None else c0.contiguous()
    grad_h_n, grad_c_n, grad_cells = (
        None if each is None else each.contiguous() for each in (grad_h_n, grad_c_n, grad_cells)
    )
    operands = None
    again = gates.numel() == 0 and t * b > 0
    if need_weights or again:
        operands = _operands(problem, output, h0)
    if again:
        assert operands is not None
        gates, products = _gates_again(problem, input, w_ih, product(operands, weights.transpose(1, 2)))
    # the gradients of zx, and those of w_hh's product if they differ or are in another order
    grad_x = input.new_empty((t, b, d * width))
    apart = d > 1 or cell == GRU or problem.norm is not None
    grad_products = per_step(problem, width, need_weights) if apart else grad_x.view(1, t, b, width)
    norm_sums, _ = row_sums(problem)
    grad_h0, grad_c0 = torch.ops.seqkern_cuda.rnn_scan_bwd(
        None if grad_output is None else unit_last(grad_output), grad_h_n, grad_c_n, grad_cells,
        gates.contiguous().view(d, t, b, problem.kept), cells.contiguous() if cell == LSTM else None, c0, output, h0,
        None if problem.norm is None else products.contiguous().view(d, t, b, width), weights.contiguous(),
        problem.norm, problem.lengths, problem.resets, problem.mask, problem.seed, problem.zoneout_h, problem.zoneout_c,
        problem.eps, cell, grad_x, grad_products if apart and need_weights else None, norm_sums, chosen.tier,
    )  # fmt: skip
    scanned = Scanned(grad_h0, None if c0 is None else grad_c0, grad_x, grad_products, norm_sums, None)
    return all_gradients(problem, input, w_ih, operands if need_weights else None, scanned, need_input)


def _operands(problem: Problem, output: Tensor, h0: Tensor) -> Tensor:
    """The operands of all products with w_hh, (D, T B, P), from the output; 0 for steps that are not active.

    Of two directions they are in the order of steps, else in the order of time.
    """
    t, b, d, p = problem.t, problem.b, problem.d, problem.p
    result = h0.new_empty((d, t, b, p))
    steps = torch.arange(t, device=h0.device)[:, None]
    for k, (before, start) in enumerate(zip(output.view(t, b, d, p).unbind(2), h0, strict=True)):
        own, backwards = result[k], k == 1
        if t == 0:
            continue
        if backwards:
            own[:-1], own[-1] = before[1:], start
        else:
            own[1:], own[0] = before[:-1], start
        if problem.lengths is not None and backwards:
            torch.where((steps == problem.lengths - 1)[:, :, None], start, own, out=own)
        zero = torch.zeros((t, b), dtype=torch.bool, device=h0.device)
        if problem.resets is not None:  # a flag marks the border between its time and the one before
            resets = problem.resets.view(torch.bool)
            if backwards:
                zero[:-1] = resets[1:]
                if problem.lengths is not None:
                    zero &= steps + 1 < problem.lengths
            else:
                zero |= resets
        if problem.lengths is not None:
            zero |= steps >= problem.lengths
        if problem.mask is not None:
            own.copy_(own.to(problem.acc) * problem.mask[k].to(problem.acc))
        own.masked_fill_(zero[:, :, None], 0)
        if k == 1:
            own.copy_(own.flip(0))
    return result.view(d, t * b, p)


def _gates_again(problem: Problem, input: Tensor, w_ih: Any, products: Tensor) -> tuple[Tensor, Tensor]:
    """(gates, products in the order of time), from all products with w_hh where the forward pass kept nothing."""
    d, t, b, h, width, g = problem.d, problem.t, problem.b, problem.h, problem.width, GATES[problem.cell]
    products = products.view(d, t, b, width)
    if d == 2:
        products = torch.stack([products[0], products[1].flip(0)])
    z = products
    if problem.norm is not None:
        weight, bias = problem.norm[:, None, None, : 2 * width].split(width, -1)
        z = torch.nn.functional.layer_norm(z, (width,), None, None, problem.eps) * weight + bias
    a = [*(input_gates(input, w_ih, problem) + z).unflatten(-1, (g, h)).unbind(-2)]
    if problem.cell == GRU:  # the third gate stays in two parts
        a[2:] = input_gates(input, w_ih, problem)[..., 2 * h :], z[..., 2 * h :]
    if problem.bias is not None:
        parts = problem.bias[:, None, None, :].unflatten(-1, (-1, h)).unbind(-2)
        a = [each + part for each, part in zip(a, parts, strict=True)]
    if problem.cell == LSTM:
        gates = [torch.sigmoid(a[0]), torch.sigmoid(a[1]), torch.tanh(a[2]), torch.sigmoid(a[3])]
    elif problem.cell == GRU:
        r = torch.sigmoid(a[0])
        gates = [r, torch.sigmoid(a[1]), torch.tanh(a[2] + r * a[3]), a[3]]
    else:
        gates = [torch.tanh(a[0]) if problem.cell == 2 else torch.relu(a[0])]
    return torch.cat(gates, -1), products


def explain(op: str, tensors: tuple[Tensor, ...]) -> tuple[bool, str]:
    """Whether CUDA C++ walks over a layer's steps in one launch, forward or backward, and the plans of both."""
    cell = CELLS.index(op)
    found = hidden_size(cell, tensors)
    if found is None and not (tensors and tensors[0].dtype == torch.float64):
        how = "all steps in one launch where the device holds the recurrent weights (tells when it gets w_hh too)"
        return True, how
    hidden = 1 if found is None else found
    # shape, dtype and device are all that counts
    w_hh = tensors[0].new_empty(1).expand(1, GATES[cell] * hidden, hidden)
    batch = tensors[0].size(1) if tensors[0].dim() == 3 else 1
    forward, backward = (plan(w_hh, batch, cell, backward=each) for each in (False, True))
    if forward == backward and not forward.served:
        return False, forward.why
    note = "a pass with none, projections and peepholes go step by step; layer norm needs more room"
    return forward.served or backward.served, f"forward {forward}; backward {backward}; {note}"
