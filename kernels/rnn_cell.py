"""One step of a recurrent cell from summed gates: the launchers, on the kernels of a layer's steps.

Equations: kernels/rnn/rnn.py, one step without options. Two products of torch come before.
"""

import torch

from .._rnn_scan import CELLS, GATES, GRU, KEPT, LSTM, hidden_size
from ._common import accumulator, unit_last
from ._replay import noted, planned
from .rnn import plans

__all__ = ["aot_configurations", "rnn_cell_bwd", "rnn_cell_fwd"]


def rnn_cell_fwd(x_gates, h_gates, h, c, cell):
    """The launcher behind `seqkern::rnn_cell_fwd`: (h_new, c_new, activated)."""
    tensors = (unit_last(x_gates), unit_last(h_gates), unit_last(h), None if c is None else unit_last(c))
    return planned(_plan_cell_forward, tensors, (cell,), h.device)


def _plan_cell_forward(memory, x_gates, h_gates, h, c, cell):
    problem = plans.single(h, cell)
    h_new = memory.empty(h, h.shape)
    c_new = memory.empty(h, (0,) if c is None else h.shape)
    activated = memory.empty(h, (problem.b, problem.kept), problem.acc)
    written = None if c is None else c_new
    step = plans.cell_forward(problem, x_gates, h_gates, h, c, h_new, written, gates=activated)
    return (h_new, c_new, activated), [step]


def rnn_cell_bwd(grad_h, grad_c, h, c, c_new, activated, cell):
    """The launcher behind `seqkern::rnn_cell_bwd`: (grad_x_gates, grad_h_gates, grad_h_prev, grad_c_prev)."""
    grad_c = None if grad_c is None or cell != LSTM else unit_last(grad_c)
    c = None if c is None else c.contiguous()
    tensors = (unit_last(grad_h), grad_c, h.contiguous(), c, activated.contiguous())
    return planned(_plan_cell_backward, tensors, (cell,), h.device)


def _plan_cell_backward(memory, grad_h, grad_c, h, c, activated, cell):
    problem = plans.single(h, cell)
    grad_x = memory.empty(h, (problem.b, problem.width))
    grad_h_gates = memory.empty(h, (1, 1, problem.b, problem.width)) if cell == GRU else None
    grad_h_prev = memory.empty(h, h.shape) if cell == GRU else None
    grad_c_prev = memory.empty(h, h.shape) if cell == LSTM else None
    step = plans.cell_backward(
        problem, None, grad_h, None, None, grad_c, None, activated, c, c, h, h, None, grad_x, grad_h_gates,
        grad_h_prev, grad_c_prev, None, None, None,
    )  # fmt: skip
    of_product = None if grad_h_gates is None else memory.view(grad_h_gates, _only)
    results = (of_product, grad_h_prev, grad_c_prev)
    return (grad_x, *(memory.empty(h, (0,)) if each is None else each for each in results)), [step]


def _only(each):
    return each[0, 0]


def explained(op, *tensors):
    """The launches of a step, forward and backward, if h or W_hh is among the tensors; nothing is launched."""
    cell = CELLS.index(op.removesuffix("_cell"))
    hidden = hidden_size(cell, tensors)
    if hidden is None:
        return []
    rows, input = tensors[0].reshape(-1, tensors[0].size(-1)).size(0), tensors[0]

    def empty(columns, dtype=input.dtype):
        return torch.empty((rows, columns), dtype=dtype, device="meta")

    gates, h = empty(GATES[cell] * hidden), empty(hidden)
    c = h if cell == LSTM else None
    kept = empty(KEPT[cell] * hidden, accumulator(input.dtype))
    with noted() as launches:
        rnn_cell_fwd(gates, gates, h, c, cell)
        rnn_cell_bwd(h, c, h, c, c, kept, cell)
    return launches


def aot_configurations(limit, thorough):
    """The launches that test_triton_aot.py compiles, like a layer's `aot_configurations`; any `limit` will do."""
    cases = [(LSTM, torch.bfloat16, 256), (GRU, torch.bfloat16, 256), (LSTM, torch.float32, 1024)]
    if thorough:
        wide = (torch.bfloat16, torch.float32, torch.float64)
        cases = [(cell, dtype, n) for cell in range(4) for dtype in wide for n in (30, 256)]
        cases += [(cell, torch.float16, 64) for cell in range(4)]
    for cell, dtype, n in cases:
        if n > plans.longest(accumulator(dtype)):
            continue
        h = torch.empty((32, n), dtype=dtype, device="meta")
        problem, x = plans.single(h, cell), h.new_empty((1, 1, 32, GATES[cell] * n))
        c, activated = h if cell == LSTM else None, h.new_empty((32, problem.kept), dtype=problem.acc)
        launches = (
            plans.cell_forward(problem, x, x[0, 0], h, c, h, c, gates=activated),
            plans.cell_backward(
                problem, None, h, None, None, c, None, activated, c, c, h, h, None, x[0, 0], x if cell == GRU else None,
                h if cell == GRU else None, c, None, None, None,
            ),
        )  # fmt: skip
        for launch in launches:
            yield f"{launch.name}-{cell}-{str(dtype).removeprefix('torch.')}-H{n}", launch
