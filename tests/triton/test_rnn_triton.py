"""The Triton kernels of LSTM, GRU and RNN, every option, against the reference in float64: interpreted, or on a GPU.

The interpreter has to be chosen before the kernels are imported, so a process of its own (this file, run) does the
work.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import seqkern
from seqkern import reference
from seqkern.testing import check_case, poison, rnn_case
from seqkern.testing.rnn_calls import (
    ADDITIVE,
    GATES,
    GRU,
    INTERPOLATED,
    KEPT,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    OpCase,
    build,
    check,
    near,
    sample,
)


def check_cell(cell: int, batch: int, hidden: int, dtype: torch.dtype, strided: bool, device: str = "cpu") -> None:
    """One step by itself, against the reference."""
    kernels = importlib.import_module("seqkern.kernels.rnn_cell")
    generator = torch.Generator().manual_seed(7)

    def tensor(columns: int) -> torch.Tensor:
        made = torch.randn(batch, columns * 2, generator=generator).to(device, dtype)
        return made[:, ::2] if strided else made[:, :columns]

    x, zh, h = tensor(GATES[cell] * hidden), tensor(GATES[cell] * hidden), tensor(hidden)
    c = tensor(hidden) if cell == LSTM else None
    grad_h, grad_c = tensor(hidden), None if cell != LSTM or strided else tensor(hidden)
    with poison():
        h_new, c_new, activated = kernels.rnn_cell_fwd(x, zh, h, c, cell)
        found = kernels.rnn_cell_bwd(grad_h, grad_c, h, c, c_new if cell == LSTM else None, activated, cell)
    leaves = [t.cpu().double().requires_grad_() for t in (x, zh, h)]
    state = None if c is None else c.cpu().double().requires_grad_()
    results = reference.rnn_step(*leaves, state, cell)
    loss = (results[0] * grad_h.cpu().double()).sum()
    if grad_c is not None:
        loss = loss + (results[1] * grad_c.cpu().double()).sum()
    leaves += [] if state is None else [state]
    wanted = torch.autograd.grad(loss, leaves, allow_unused=True)
    near("h", h_new, results[0].detach(), dtype)
    near("grad_x", found[0], wanted[0], dtype)
    if cell == LSTM:
        near("c", c_new, results[1].detach(), dtype)
        near("grad_c", found[3], wanted[3], dtype)
    else:
        assert c_new.shape == found[3].shape == (0,)
    if cell == GRU:
        near("grad_h_gates", found[1], wanted[1], dtype)
        near("grad_h", found[2], wanted[2], dtype)
    else:
        assert found[1].shape == found[2].shape == (0,)
    assert activated.shape == (batch, KEPT[cell] * hidden)


ALL = {"norm": True, "mask": True, "resets": 0.3, "zoneout": (0.3, 0.2), "directions": 2}
CASES = {
    "LSTM": OpCase(),
    "LSTM by steps": OpCase(by_steps=True, hidden=17, batch=5),
    "LSTM, both directions": OpCase(directions=2, batch=17, hidden=9),
    "LSTM, both directions by steps": OpCase(directions=2, by_steps=True),
    "LSTM, two directions without biases": OpCase(directions=2, bias=False),
    "LSTM, wide": OpCase(steps=2, batch=2, hidden=130),
    "LSTM in bfloat16": OpCase(dtype=torch.bfloat16, hidden=24, directions=2),
    "LSTM in float16, by steps": OpCase(dtype=torch.float16, hidden=24, by_steps=True),
    "LSTM in float64": OpCase(dtype=torch.float64),
    "GRU": OpCase(cell=GRU),
    "GRU by steps": OpCase(cell=GRU, by_steps=True, directions=2),
    "GRU in bfloat16": OpCase(cell=GRU, dtype=torch.bfloat16, hidden=17, directions=2),
    "GRU in float16, two directions": OpCase(cell=GRU, dtype=torch.float16, directions=2, need_weights=False),
    "tanh": OpCase(cell=RNN_TANH),
    "tanh by steps": OpCase(cell=RNN_TANH, by_steps=True, directions=2),
    "relu": OpCase(cell=RNN_RELU, dtype=torch.bfloat16),
    "relu by steps": OpCase(cell=RNN_RELU, by_steps=True, directions=2),
    "additive": OpCase(cell=ADDITIVE, directions=2, hidden=17),
    "additive by steps": OpCase(cell=ADDITIVE, by_steps=True, lengths=(3, 1, 2), resets=0.3),
    "additive, everything": OpCase(**ALL | {"zoneout": (0.3, 0.0)}, cell=ADDITIVE, lengths=(3, 0, 2)),
    "interpolated": OpCase(cell=INTERPOLATED, directions=2, batch=17, dtype=torch.bfloat16),
    "interpolated by steps": OpCase(cell=INTERPOLATED, by_steps=True, hidden=17, keep=False, resets=0.3),
    "interpolated, lengths": OpCase(cell=INTERPOLATED, directions=2, lengths=(3, 0, 2), keep=False),
    "interpolated, everything": OpCase(**ALL | {"zoneout": (0.3, 0.0)}, cell=INTERPOLATED, lengths=(3, 1, 2)),
    "lengths": OpCase(directions=2, batch=5, lengths=(3, 0, 1, 2, 2)),
    "lengths by steps": OpCase(directions=2, batch=5, lengths=(3, 0, 1, 2, 2), by_steps=True),
    "GRU, lengths": OpCase(cell=GRU, directions=2, batch=5, lengths=(3, 0, 1, 2, 2), by_steps=True, keep=False),
    "resets": OpCase(directions=2, steps=6, resets=0.4, lengths=(6, 5, 3)),
    "resets by steps": OpCase(directions=2, steps=6, resets=0.4, lengths=(6, 5, 3), by_steps=True),
    "GRU, resets": OpCase(cell=GRU, steps=6, resets=0.4, mask=True, keep=False),
    "mask": OpCase(mask=True, directions=2),
    "mask by steps": OpCase(mask=True, cell=GRU, by_steps=True, resets=0.4),
    "given": OpCase(given=True, directions=2, strided=True),
    "given, without bias": OpCase(given=True, cell=GRU, bias=False, dtype=torch.float16),
    "peepholes": OpCase(peephole=True, keep=False),
    "norm": OpCase(norm=True, directions=2),
    "norm, recompute": OpCase(norm=True, keep=False, lengths=(3, 2, 0), peephole=True),
    "GRU, norm": OpCase(cell=GRU, norm=True, hidden=17, resets=0.3),
    "GRU, norm, recompute": OpCase(cell=GRU, norm=True, keep=False, directions=2, given=True),
    "tanh, norm": OpCase(cell=RNN_TANH, norm=True, directions=2),
    "projection": OpCase(projection=3, directions=2, lengths=(3, 1, 2)),
    "projection in bfloat16": OpCase(projection=8, hidden=16, dtype=torch.bfloat16, keep=False),
    "zoneout": OpCase(zoneout=(0.4, 0.3), directions=2, lengths=(3, 0, 2)),
    "zoneout in evaluation": OpCase(zoneout=(0.4, 0.0), training=False),
    "GRU, zoneout": OpCase(cell=GRU, zoneout=(0.5, 0.0), hidden=17),
    "relu, zoneout in evaluation": OpCase(cell=RNN_RELU, zoneout=(0.5, 0.0), training=False, directions=2),
    "everything": OpCase(**ALL, projection=3, peephole=True, lengths=(3, 2, 1)),
    "everything, recompute": OpCase(**ALL, projection=5, peephole=True, keep=False, given=True, strided=True),
    "everything, GRU": OpCase(**ALL | {"zoneout": (0.3, 0.0)}, cell=GRU, lengths=(3, 0, 2), dtype=torch.float64),
    "no steps": OpCase(steps=0, directions=2),
    "no steps by steps": OpCase(steps=0, by_steps=True, norm=True),
    "no batch": OpCase(batch=0, directions=2),
    "no batch by steps": OpCase(batch=0, cell=GRU, by_steps=True, norm=True),
    "only c": OpCase(grads="c"),
    "only h": OpCase(grads="h", cell=GRU, directions=2),
    "only cells": OpCase(grads="s", by_steps=True),
    "nothing needed": OpCase(need_input=False, need_weights=False, directions=2, cell=GRU),
    "states alone": OpCase(need_input=False, need_weights=False, projection=2, directions=2),
    "saturated": OpCase(scale=100.0, hidden=9),
}  # fmt: skip
CELLS = [
    (cell, batch, hidden, dtype, strided)
    for cell in range(4)
    for batch, hidden, dtype, strided in (
        (3, 129, torch.float32, False),
        (33, 17, torch.bfloat16, True),
        (5, 8, torch.float64, True),
    )
]


def extremes(device: str = "cpu") -> None:
    """Far saturated and infinite gates: saturated results, and zero gradients but for those that a state passes on."""
    kernels = importlib.import_module("seqkern.kernels.rnn_cell")
    for value in (1e4, -1e4, 1e30, float("inf"), -float("inf")):
        for cell in (LSTM, GRU, RNN_TANH):
            x = torch.full((2, GATES[cell] * 17), value, device=device)
            h = torch.full((2, 17), 0.5, device=device)
            c = h if cell == LSTM else None
            h_new, c_new, activated = kernels.rnn_cell_fwd(x, torch.zeros_like(x), h, c, cell)
            found = kernels.rnn_cell_bwd(h, c, h, c, c_new if cell == LSTM else None, activated, cell)
            assert all(t.isfinite().all() for t in (h_new, c_new, activated, *found)), (value, cell)
            assert found[0].abs().max() <= 1e-30, (value, cell)
            gate = float(value > 0)
            assert cell == RNN_TANH or torch.equal(activated[:, :17], torch.full_like(h, gate)), (value, cell)


def sequences_apart(device: str = "cpu") -> None:
    """NaN in one sequence, and garbage where nothing is to be read, reach no other."""
    kernels = importlib.import_module("seqkern.kernels.rnn.rnn")
    for cell, by_steps in ((LSTM, False), (GRU, True)):
        case = OpCase(cell=cell, batch=4, directions=2, lengths=(3, 1, 0, 2), by_steps=by_steps, device=device)
        arguments = build(case, 3)
        never = mock.patch.object(kernels, "takes_sequence", return_value=False)
        with never if by_steps else mock.patch.dict({}):
            clean = kernels.rnn_fwd(**arguments, keep=True)
            grad = torch.randn_like(clean[0])
            back = kernels.rnn_bwd(
                grad, None, None, None, **arguments, output=clean[0], cells=clean[3], gates=clean[4],
                products=clean[5], need_input=True, need_weights=True,
            )  # fmt: skip
            dirty, dirty_grad = arguments["input"].clone(), grad.clone()
            dirty[1, 3] = float("nan")
            rows = kernels.rnn_fwd(**arguments | {"input": dirty}, keep=True)
            others = [0, 1, 2]
            assert rows[0][1:3, 3].isnan().any()
            for left, right in ((clean[0][:, others], rows[0][:, others]), (clean[1][:, others], rows[1][:, others])):
                assert torch.equal(left, right)
            for b, length in enumerate(case.lengths or ()):
                dirty_grad[length:, b] = float("nan")
            dirty_back = kernels.rnn_bwd(
                dirty_grad, None, None, None, **arguments, output=clean[0], cells=clean[3], gates=clean[4],
                products=clean[5], need_input=True, need_weights=True,
            )  # fmt: skip
            for left, right in zip(back, dirty_back, strict=True):
                assert torch.equal(left, right)


def autocast_around(device: str = "cpu") -> None:
    """A float32 call takes no notice of autocast, under which a backward pass may come to run."""
    kernels = importlib.import_module("seqkern.kernels.rnn.rnn")
    for case in (OpCase(hidden=130, device=device), OpCase(cell=GRU, by_steps=True, keep=False, device=device)):
        arguments, results = build(case, 3), []
        never = mock.patch.object(kernels, "takes_sequence", return_value=False)
        for enabled in (False, True):
            autocast = torch.autocast(device, torch.bfloat16, enabled=enabled)
            with autocast, never if case.by_steps else mock.patch.dict({}):
                forward = kernels.rnn_fwd(**arguments, keep=True)
                back = kernels.rnn_bwd(
                    forward[0], None, None, None, **arguments, output=forward[0], cells=forward[3],
                    gates=forward[4] if case.keep else forward[4].new_empty(0), products=forward[5],
                    need_input=True, need_weights=True,
                )  # fmt: skip
            results.append([*forward, *back])
        assert all(map(torch.equal, *results)), case


def error_rule(device: str = "cpu") -> None:
    """The functions, through dispatch and autograd, by the error rule: against torch in the same dtype."""
    small = {"steps": 4, "batch": 3, "inputs": 5, "hidden": 9}
    both: dict[str, Any] = small | {"bidirectional": True}
    ragged: dict[str, Any] = both | {"lengths": (4, 1, 2)}
    cases = {
        "two layers": rnn_case("lstm", num_layers=2, **both),
        "GRU": rnn_case("gru", **both | {"hidden": 17}),
        "tanh": rnn_case("rnn_tanh", **small),
        "relu": rnn_case("rnn_relu", bias=False, **small),
        "additive": rnn_case("additive_rnn", **ragged),
        "interpolated": rnn_case("interpolated_rnn", recompute=True, **ragged),
        "lengths": rnn_case("lstm", **ragged),
        "GRU, lengths, recompute": rnn_case("gru", recompute=True, **ragged),
        "projection": rnn_case("lstm", projection=4, **both),
        "norm and peepholes": rnn_case("lstm", norms=True, peepholes=True, **small),
        "GRU, norm, recompute": rnn_case("gru", norms=True, recompute=True, **small),
        "zoneout": rnn_case("lstm", zoneout=(0.3, 0.2), recurrent_dropout=0.3, resets=True, **small),
        "GRU, zoneout in evaluation": rnn_case("gru", zoneout=(0.3, 0.0), training=False, resets=True, **small),
        "saturated": rnn_case("lstm", std=30.0, **small),
    }
    with poison(), seqkern.use_backend("triton"):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for name, case in cases.items():
                for report in check_case(case, dtype, device=device):
                    assert report.passed, (name, dtype, str(report))


RANDOM = range(1000, 1004)  # seeds of `sample`, beside the cases by name


def test_interpreted(interpreted: Callable[..., None]) -> None:
    interpreted(__file__)


@pytest.mark.slow
def test_interpreted_random(interpreted: Callable[..., None]) -> None:
    interpreted(__file__, 1100, 1300)


@pytest.mark.slow
def test_interpreted_error_rule(interpreted: Callable[..., None]) -> None:
    interpreted(__file__, "rule")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, dtype: torch.dtype) -> None:
    check(replace(CASES[name], dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [31, 32, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("cell", range(4))
def test_compiled_sizes(cell: int, hidden: int, dtype: torch.dtype) -> None:
    check(OpCase(cell=cell, steps=9, batch=33, hidden=hidden, directions=2, dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [*RANDOM, *range(1100, 1180)])
def test_compiled_random(seed: int) -> None:
    check(sample(seed, "cuda"), seed)


@pytest.mark.gpu
def test_compiled_cells() -> None:
    for each in CELLS:
        check_cell(*each, device="cuda")


@pytest.mark.gpu
def test_compiled_extremes() -> None:
    extremes("cuda")


@pytest.mark.gpu
def test_compiled_autocast() -> None:
    autocast_around("cuda")


@pytest.mark.gpu
def test_compiled_error_rule() -> None:
    error_rule("cuda")


@pytest.mark.gpu
def test_compiled_sequences_apart() -> None:
    sequences_apart("cuda")


def main(first: int = RANDOM.start, last: int = RANDOM.stop) -> None:
    """Everything that `check` is asked, or the samples first ... last - 1 alone."""
    cases = [(case, 0) for case in CASES.values()] if first == RANDOM.start else []
    if cases:
        for each in CELLS:
            check_cell(*each)
        extremes()
        sequences_apart()
        autocast_around()
    for case, seed in [*cases, *((sample(seed), seed) for seed in range(first, last))]:
        try:
            check(case, seed)
        except BaseException:
            print(seed, case, flush=True)
            raise


if __name__ == "__main__":
    if sys.argv[1:] == ["rule"]:
        error_rule()
    else:
        main(*map(int, sys.argv[1:]))
