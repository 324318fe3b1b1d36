"""Recurrent cells, a step at a time, against torch's: what a decoder that writes its own loop calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqkern
from benchmarks.harness import Contest, compete, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.rnn_cell import cost
from seqkern.testing import check_case, rnn_cell_case

# batch, width (input and hidden)
SHAPES = [(1, 64), (1, 1024), (64, 512)]
CELLS: dict[str, tuple[type, type]] = {
    "lstm": (seqkern.nn.LSTMCell, torch.nn.LSTMCell),
    "gru": (seqkern.nn.GRUCell, torch.nn.GRUCell),
    "rnn_tanh": (seqkern.nn.RNNCell, torch.nn.RNNCell),
}


@pytest.mark.parametrize("shape", SHAPES, ids=[f"B{b}-H{h}" for b, h in SHAPES])
@pytest.mark.parametrize("cell", CELLS)
def test_cell(benchmark, cell, shape, dtype, mode, device):
    batch, hidden = shape
    ours, theirs = (module(hidden, hidden, device=device, dtype=dtype) for module in CELLS[cell])
    ours.load_state_dict(theirs.state_dict())
    input = torch.randn(batch, hidden, device=device).to(dtype)
    state: Any = torch.randn(batch, hidden, device=device).to(dtype)
    if cell == "lstm":
        state = state, torch.tanh(state)
    work = cost(batch, hidden, hidden, dtype, cell=cell)
    if mode != "forward":
        back = cost(batch, hidden, hidden, dtype, cell=cell, backward=True)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)

    def call(module: torch.nn.Module) -> Any:
        def h(x: torch.Tensor) -> torch.Tensor:
            result = module(x, state)
            return result[0] if cell == "lstm" else result

        if mode == "forward":
            return forward_only(h, [input])
        leaf = input.clone().requires_grad_()
        cotangent, wanted = torch.randn_like(state[0] if cell == "lstm" else state), [leaf, *module.parameters()]
        return lambda: torch.autograd.grad(h(leaf), wanted, cotangent)

    compete(
        benchmark,
        Contest(
            op=f"{type(ours).__name__}",
            shape=f"B{batch} H{hidden}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=call(ours),
            peers={"torch": call(theirs)},
            gate=lambda: check_case(rnn_cell_case(cell, batch, hidden, hidden), dtype, device=device),
            cost=work,
        ),
    )
