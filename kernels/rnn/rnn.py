"""LSTM, GRU and RNN layers with every option, forward and backward, in Triton; `seqkern._rnn_cuda` is CUDA C++'s.

The idea. Everything that does not wait for h_{t-1} leaves the loop. One GEMM gives the input's contribution to the
gates of all steps; after the backward scan one GEMM each gives grad_input and the gradients of the weights. The scan
itself runs in one of two ways:

- small hidden sizes (`sequence.py`): one program for a direction and a tile of the batch walks all steps, with the
  weights, h and c on chip. Sequences never meet, so programs need no synchronisation;
- all others (`steps.py`): a step is one product with w_hh, of both directions at once, and one kernel, which adds
  products and biases, normalises, applies gates, zoneout, lengths and resets, and keeps what the backward pass needs.

The equations (Hochreiter & Schmidhuber 1997; Gers & Schmidhuber 2000: peepholes; Cho et al. 2014 in torch's order of
the reset gate; Ba, Kiros & Hinton 2016: layer norm; Krueger et al. 2017: zoneout; Sak et al. 2014: projection):

    zx = w_ih x_t + b_ih        zh = N(w_hh (h m)) + b_hh        h, c = 0 before a step that resets
    LSTM  i f = s(zx + zh + p c)    g = tanh(zx + zh)    c~ = f c + i g    o = s(zx + zh + p_o c~)
          h~ = o tanh(Nc(c~))       h^ = w_hr h~, or h~
    GRU   r z = s(zx + zh)          n = tanh(zx + r zh)                    h^ = (1 - z) n + z h
    RNN   h^ = tanh(zx + zh) or relu(zx + zh)
    zoneout   c_t = c or c~         h_t = h or h^          (where a mask says so; in evaluation their expectation)

    dh^ = dh_t where h_t is h^      do = dh~ tanh(Nc(c~))
    dc~ = dc_t (where c_t is c~) + Nc'(dh~ o tanh') + p_o da_o
    da_i = dc~ g i (1 - i)          da_f = dc~ c f (1 - f)          da_g = dc~ i (1 - g^2)          da_o = do o (1 - o)
    dc = dc~ f + p_i da_i + p_f da_f                                dh = m w_hh^T N'(da)
    da_n = dh^ (1 - z) (1 - n^2)    da_r = da_n q r (1 - r)         da_z = dh^ (h - n) z (1 - z)    dh += z dh^

Preactivations, gates, states and the gradients that pass from step to step are float32 (float64 for float64). For bf16
and fp16 the products write float32 directly, so the only rounding in the loop is that of h as operand of the next
product. Gradients of norm weights and peepholes are summed in the loop, one row for each row of the batch, then over
the rows: a fixed order. An inactive step leaves zeros where the GEMMs after the scan read.

Step by step, a step is two launches from Python, which short steps do not hide. Nothing in the loop waits for the
device, so a caller may capture it in a CUDA graph. No GPU speed has been measured yet; NOTES.md has the host's time.
"""

import torch

from ..._products import product
from ..._rnn_scan import (
    CELLS,
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
    stack_or_none,
)
from ..._tensors import unit_last
from .._common import on, run, shared_memory
from .._replay import Repeated
from . import plans
from .sequence import plan_backward as plan_sequence_backward
from .sequence import plan_forward as plan_sequence_forward
from .sequence import takes_sequence, tile


def explained(op, *tensors):
    """How a layer without options walks over its steps, if h or W_hh is among the tensors; nothing is launched."""
    cell, input = CELLS.index(op), tensors[0]
    hidden = hidden_size(cell, tensors)
    if hidden is None:
        return []
    steps, batch = (*input.shape, 1)[:2] if input.dim() == 3 else (len(input), 1)
    problem = Problem(
        cell, input.dtype, steps, batch, hidden, hidden, 1, *(None,) * 7, 0.0, 0.0, 0.0, input.device
    )  # fmt: skip
    if not takes_sequence(problem, shared_memory(input.device)):
        return ["a product and a launch a step, forward and backward"]
    blocks, warps = tile(problem)
    sizes = ", ".join(f"{name} {blocks[name]}" for name in ("BLOCK_B", "BLOCK_H"))
    return [f"all steps in one launch, forward and backward: {sizes}, {warps} warps"]


def _first_operand(problem, h0):
    """The operand of each direction's first product. Only the first direction can begin with a reset."""
    operand = h0.to(problem.acc) * problem.mask if problem.mask is not None else h0
    operand = operand.to(problem.dtype, copy=True, memory_format=torch.contiguous_format)
    if problem.resets is not None and problem.t > 0:
        operand[0].masked_fill_(problem.resets[0].view(torch.bool)[:, None], 0)
    return operand


def rnn_fwd(
    input, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, peephole, norm, lengths, resets, recurrent_mask, seed, zoneout_h,
    zoneout_c, eps, cell, keep,
):  # fmt: skip
    """The launcher behind `seqkern::rnn_fwd`: (output, h_n, c_n, cells, gates, products), (0,) where not kept."""
    problem = prepare(
        input, h0, w_hh, b_ih, b_hh, peephole, norm, lengths, resets, recurrent_mask, seed, zoneout_h, zoneout_c, eps,
        cell,
    )  # fmt: skip
    plans.check(problem)
    h0 = h0.contiguous()
    output = input.new_empty((problem.t, problem.b, problem.d * problem.p))
    kept = memory_of(problem, h0, keep)
    x = input_gates(input, w_ih, problem, kept.gates if cell != GRU else None)
    w_hh, w_hr = stack(w_hh), stack_or_none(w_hr)
    if w_hr is None and takes_sequence(problem, shared_memory(input.device)):
        h, c = _scan_whole(problem, x, h0, c0, w_hh, output, kept.cells, kept.gates)
    else:
        h, c = _scan_steps(problem, x, h0, c0, w_hh, w_hr, output, *kept)
    c = h0.new_empty(0) if c is None else c.to(input.dtype)
    return output, h.to(input.dtype), c, *kept.given(h0, problem.acc)


def _scan_whole(problem, x, h0, c0, w_hh, output, cells, gates):
    """(h, c) after the last step, from one launch."""
    c0 = None if c0 is None else c0.contiguous()
    (h, c), launches = plan_sequence_forward(problem, x, h0, c0, w_hh.contiguous(), output, cells, gates)
    run(launches, output.device)
    return h, c


def _scan_steps(problem, x, h0, c0, w_hh, w_hr, output, cells, gates, products):
    """(h, c) after the last step, from a product and a launch a step (two of each with a projection)."""
    d, b, acc, device = problem.d, problem.b, problem.acc, output.device
    h = h0.to(acc, copy=True)
    c = None if c0 is None else c0.to(acc, copy=True, memory_format=torch.contiguous_format)
    operand = _first_operand(problem, h0)
    results = h.new_empty((d, b, problem.width))
    hidden, projected = None, None
    if w_hr is not None:
        hidden, projected = operand.new_empty((d, b, problem.h)), torch.empty_like(h)
    rows = [None if s is None else s.flatten(0, 1) for s in (results, h, c)]
    cell = plans.cell_forward(
        problem, x, *rows, *rows[1:], operand, output, cells, gates, products, hidden
    )  # fmt: skip
    cell = Repeated(cell)
    behind = None if w_hr is None else Repeated(plans.state_forward(problem, projected, h, operand, output))
    w_hh = w_hh.transpose(1, 2)
    w_hr = None if w_hr is None else w_hr.transpose(1, 2)
    with on(device):
        for step in range(problem.t):
            product(operand, w_hh, out=results)
            cell(step)
            if behind is not None:
                product(hidden, w_hr, out=projected)
                behind(step)
    return h, c


def _found_again(problem, input, w_ih, x_products, c0, cells):
    """(gates, products in the order of time), recomputed from the operands' products when the forward pass kept
    nothing."""
    shape = (problem.d, problem.t, problem.b)
    gates = input.new_empty((*shape, problem.kept), dtype=problem.acc)
    x = input_gates(input, w_ih, problem, gates if problem.cell != GRU else None)
    kept = None if problem.norm is None else x_products.new_empty((*shape, problem.width))
    run([plans.all_gates(problem, x, x_products, c0, cells, gates, kept)], input.device)
    return gates, kept


def rnn_bwd(
    grad_output, grad_h_n, grad_c_n, grad_cells, input, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, peephole, norm, lengths,
    resets, recurrent_mask, seed, zoneout_h, zoneout_c, eps, cell, output, cells, gates, products, need_input,
    need_weights,
):  # fmt: skip
    """The launcher behind `seqkern::rnn_bwd`.

    (grad_input, grad_h0, grad_c0, grad_w_ih, grad_w_hh, grad_b_ih, grad_b_hh, grad_w_hr, grad_peephole, grad_norm),
    (0,) where not needed.
    """
    problem = prepare(
        input, h0, w_hh, b_ih, b_hh, peephole, norm, lengths, resets, recurrent_mask, seed, zoneout_h, zoneout_c, eps,
        cell,
    )  # fmt: skip
    plans.check(problem)
    t, b, d, device = problem.t, problem.b, problem.d, input.device
    h0, output = h0.contiguous(), output.contiguous()
    c0, grad_cells = (None if each is None else each.contiguous() for each in (c0, grad_cells))
    cells = cells.contiguous() if cell == LSTM else None
    grad_output = None if grad_output is None else unit_last(grad_output)
    w_hh, w_hr = stack(w_hh), stack_or_none(w_hr)

    again = gates.numel() == 0 and t * b > 0
    operands = None
    if need_weights or again:
        operands = h0.new_empty((d, t * b, problem.p))
        run([plans.operands(problem, output, h0, operands)], device)
    if again:
        all_products = product(operands, w_hh.transpose(1, 2))
        gates, products = _found_again(problem, input, w_ih, all_products, c0, cells)
        del all_products
    gates = gates.contiguous()
    products = products.contiguous() if norm else None

    # the gradients of zx, and those of w_hh's product if they differ or are in another order
    grad_x = input.new_empty((t, b, d * problem.width))
    apart = d > 1 or cell == GRU or norm
    grad_products = per_step(problem, problem.width, need_weights) if apart else grad_x.view(1, t, b, problem.width)
    sums = row_sums(problem)
    hidden, grad_hat = None, None
    if w_hr is None and takes_sequence(problem, shared_memory(device)):
        (grad_h0, grad_c0), launches = plan_sequence_backward(
            problem, grad_output, grad_h_n, grad_c_n, grad_cells, gates, cells, c0, output, h0, w_hh.contiguous(),
            grad_x, grad_products if apart else None,
        )  # fmt: skip
        run(launches, device)
    else:
        if w_hr is not None:
            hidden, grad_hat = (per_step(problem, columns, need_weights) for columns in (problem.h, problem.p))
        grad_h0, grad_c0 = _scan_back(
            problem, grad_output, grad_h_n, grad_c_n, grad_cells, gates, cells, c0, output, h0, products, w_hh, w_hr,
            grad_x, grad_products, apart, hidden, grad_hat, sums,
        )  # fmt: skip
    scanned = Scanned(grad_h0, grad_c0, grad_x, grad_products, *sums, hidden, grad_hat)
    return all_gradients(problem, input, w_ih, operands if need_weights else None, scanned, need_input)


def _scan_back(
    problem, grad_output, grad_h_n, grad_c_n, grad_cells, gates, cells, c0, output, h0, products, w_hh, w_hr, grad_x,
    grad_products, apart, hidden, grad_hat, sums,
):  # fmt: skip
    """(grad_h0, grad_c0), from a launch and a product a step (two of each with a projection)."""
    d, b, acc, device = problem.d, problem.b, problem.acc, output.device

    def begin(grad, columns):
        """The initial gradient of the state: that of the final state."""
        if grad is None:
            return h0.new_zeros((d, b, columns), dtype=acc)
        return grad.to(acc, copy=True, memory_format=torch.contiguous_format)

    direct = begin(grad_h_n, problem.p)
    grad_c = begin(grad_c_n, problem.h) if problem.cell == LSTM else None
    recurrent = torch.empty_like(direct)
    flat_direct, flat_c = direct.flatten(0, 1), None if grad_c is None else grad_c.flatten(0, 1)
    grad_hidden = None if w_hr is None else direct.new_empty((d, b, problem.h))

    def plan(back):
        """The launches of a step; the first one run has no product to receive gradients from."""
        cell = plans.cell_backward(
            problem, grad_output, flat_direct, back, grad_hidden, flat_c, grad_cells, gates, cells, c0, output, h0,
            products, grad_x, grad_products if apart else None, flat_direct, flat_c, hidden, *sums,
        )  # fmt: skip
        if w_hr is None:
            return Repeated(cell), None
        return Repeated(cell), Repeated(plans.state_backward(problem, grad_output, direct, back, grad_hat))

    cell, state = plan(None)
    with on(device):
        for step in reversed(range(problem.t)):
            if state is not None:
                state(step)
                product(grad_hat[:, step], w_hr, out=grad_hidden)
            cell(step)
            product(grad_products[:, step], w_hh, out=recurrent)
            if step == problem.t - 1:
                cell, state = plan(recurrent)
    grad_h0 = h0.new_empty((d, b, problem.p))
    back = recurrent if problem.t > 0 else None
    run([plans.first_state(problem, direct, back, grad_h0)], device)
    return grad_h0, grad_c
