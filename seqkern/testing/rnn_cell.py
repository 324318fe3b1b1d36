"""Cases of recurrent cells: one step of an LSTM, GRU or RNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.ops._rnn_checks import CELLS, GATES, LSTM
from seqkern.testing._checks import Case, normal


def rnn_cell_case(cell: str = "lstm", batch: int = 33, inputs: int = 17, hidden: int = 65, *, std: float = 1.0) -> Case:
    kind = CELLS[cell]
    gates = GATES[kind] * hidden
    shapes: dict[str, tuple[int, ...]] = {"input": (batch, inputs), "h": (batch, hidden)}
    if kind == LSTM:
        shapes["c"] = batch, hidden
    shapes |= {"w_ih": (gates, inputs), "w_hh": (gates, hidden), "b_ih": (gates,), "b_hh": (gates,)}

    def expected(
        input: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, c: Any = None
    ) -> Any:
        states = reference.rnn_step(input @ w_ih.t() + b_ih, h @ w_hh.t() + b_hh, h, c, kind)
        return states if kind == LSTM else states[0]

    def run_in(function: Any) -> Any:
        def run(input: Tensor, h: Tensor, c: Any = None, **weights: Tensor) -> Any:
            return function(input, (h, c) if kind == LSTM else h, *weights.values())

        return run

    return Case(
        inputs=lambda g: {
            name: normal(g, *shape, scale=std if name == "input" else hidden**-0.5) for name, shape in shapes.items()
        },
        ours=run_in(getattr(seqkern, f"{cell}_cell")),
        torch=run_in(getattr(torch, f"{cell}_cell")),
        reference=expected,
        outputs=("h", "c") if kind == LSTM else ("h",),
    )
