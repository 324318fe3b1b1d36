"""The launches of the recurrent kernels that tests/triton/test_triton_aot.py compiles, from the plans that ship."""

import torch

from ..._rnn_scan import GATES, GRU, LSTM, prepare, row_sums
from ..._tensors import accumulator
from . import plans
from .sequence import plan_backward, plan_forward, takes_sequence

# For the ahead-of-time gate: arguments of `prepare` for each option.
_AOT_OPTIONS = {
    "plain": {},
    "lengths": {"lengths": True, "resets": True, "mask": True},
    "all": {
        "lengths": True, "resets": True, "mask": True, "norm": True, "peephole": True, "zoneout": 0.1, "seed": True
    },
    "expected": {"zoneout": 0.1, "peephole": True},
}  # fmt: skip


def aot_configurations(limit, thorough):
    """The launches to compile ahead of time for a device with `limit` bytes of shared memory, as (name, launch).

    thorough False: the common sizes. True: every cell and dtype, all tiles, aligned and not, and every option.
    """
    floats = (torch.bfloat16, torch.float32)
    half, single = floats
    cases = [(LSTM, half, 256, "plain"), (GRU, half, 256, "lengths"), (LSTM, single, 1024, "all")]
    whole = [(LSTM, half, 128, "lengths"), (GRU, half, 64, "lengths"), (LSTM, single, 64, "lengths")]
    if thorough:
        cells, wide = range(6), (*floats, torch.float64)
        cases = [(cell, dtype, n, "plain") for cell in cells for dtype in wide for n in (30, 256)]
        cases += [(cell, torch.float16, 64, "plain") for cell in cells]
        cases += [(cell, dtype, 256, name) for cell in cells for dtype in wide for name in ("lengths", "expected")]
        cases += [(cell, dtype, n, "all") for cell in cells for dtype in wide for n in (30, 1024, 2045, 2048)]
        whole = [
            (cell, dtype, n, "lengths") for cell in cells for dtype in floats for n in (16, 30, 64, 100, 104, 128, 256)
        ]
        whole += [(cell, dtype, n, "plain") for cell in cells for dtype in (*floats, torch.float16) for n in (64, 128)]
    for cell, dtype, n, name in cases:
        if n > plans.longest(accumulator(dtype)):
            continue
        for launch in _aot_steps(cell, dtype, n, **_AOT_OPTIONS[name]):
            yield f"{launch.name}-{cell}-{str(dtype).removeprefix('torch.')}-H{n}-{name}", launch
    for cell, dtype, n, name in whole:
        for launch in _aot_whole(cell, dtype, n, limit, **_AOT_OPTIONS[name]):
            yield f"{launch.name}-{cell}-{str(dtype).removeprefix('torch.')}-H{n}-{name}", launch


def _aot_problem(
    cell, dtype, n, lengths=False, resets=False, mask=False, norm=False, peephole=False, zoneout=0.0, seed=False,
    projection=None,
):  # fmt: skip
    """(problem, what both directions read and write), for 64 steps and 32 sequences."""
    input = torch.empty((64, 32, 64), dtype=dtype, device="meta")
    acc, width = accumulator(dtype), GATES[cell] * n
    lstm = cell == LSTM
    number = input.new_empty
    problem = prepare(
        input, number((2, 32, projection or n)), [number((width, projection or n))] * 2, [number(width)] * 2,
        [number(width)] * 2, [number((3, n))] * 2 if peephole and lstm else [],
        [number(2 * width + (2 * n if lstm else 0), dtype=acc)] * 2 if norm else [],
        number(32, dtype=torch.int64) if lengths else None, number((64, 32), dtype=torch.bool) if resets else None,
        number((2, 32, projection or n), dtype=acc) if mask else None, number(1, dtype=torch.int64) if seed else None,
        zoneout, zoneout if lstm else 0.0, 1e-5, cell,
    )  # fmt: skip

    def wide(*shape):
        return number(shape, dtype=acc)

    cells = wide(2, 64, 32, n) if lstm else None
    return problem, wide, number, cells


def _aot_steps(cell, dtype, n, **options):
    problem, wide, number, cells = _aot_problem(cell, dtype, n, **options)
    width, kept, lstm = problem.width, problem.kept, cell == LSTM
    state, gates, products = (
        wide(64, n),
        wide(2, 64, 32, kept),
        wide(2, 64, 32, width) if problem.norm is not None else None,
    )
    c, c0, h0 = state if lstm else None, number((2, 32, n)) if lstm else None, number((2, 32, n))
    output, operand = number((64, 32, 2 * n)), number((2, 32, n))
    given = number((64, 32, 2 * width)).view(64, 32, 2, width).permute(2, 0, 1, 3)
    per_step = wide(64, width)
    tensors = (per_step, state, c, state, c, operand, output, cells, gates, products)
    yield plans.cell_forward(problem, given, *tensors)
    yield plans.all_gates(problem, given, wide(2, 64 * 32, width), c0, cells, gates, products)
    if problem.norm is None:
        yield plans.cell_forward(problem, wide(2, 64, 32, width), *tensors)
        yield plans.operands(problem, output, h0, number((2, 64 * 32, n)))
        yield plans.first_state(problem, wide(2, 32, n), wide(2, 32, n), number((2, 32, n)))
    sums = row_sums(problem)
    for back in (None, state) if problem.norm is None else (state,):
        yield plans.cell_backward(
            problem, output, state, back, None, c, cells, gates, cells, c0, output, h0, products,
            number((64, 32, 2 * width)), number((2, 64, 32, width)), state, c, None, *sums,
        )  # fmt: skip
    if lstm:
        hidden = number((2, 64, 32, n))
        yield plans.cell_forward(
            problem, given, per_step, None, c, None, c, None, None, cells, gates, products, hidden[0]
        )
        yield plans.state_forward(problem, wide(2, 32, n), state, operand, output)
        yield plans.state_backward(problem, output, wide(2, 32, n), wide(2, 32, n), hidden)
        yield plans.cell_backward(
            problem, None, None, None, wide(2, 32, n), c, cells, gates, cells, c0, output, h0, products,
            number((64, 32, 2 * width)), number((2, 64, 32, width)), None, c, hidden, *sums,
        )  # fmt: skip


def _aot_whole(cell, dtype, n, limit, **options):
    problem, wide, number, cells = _aot_problem(cell, dtype, n, **options)
    h0, gates, output = number((2, 32, n)), wide(2, 64, 32, problem.kept), number((64, 32, 2 * n))
    c0, w_hh = h0 if cell == LSTM else None, number((2, problem.width, n))
    if takes_sequence(problem, limit):
        x = number((64, 32, 2 * problem.width)).view(64, 32, 2, problem.width).permute(2, 0, 1, 3)
        for each in (x, wide(2, 64, 32, problem.width)):
            yield from plan_forward(problem, each, h0, c0, w_hh, output, cells, gates)[1]
        yield from plan_backward(
            problem, output, h0, c0, cells, gates, cells, c0, output, h0, w_hh, number((64, 32, 2 * problem.width)),
            number((2, 64, 32, problem.width)),
        )[1]  # fmt: skip
