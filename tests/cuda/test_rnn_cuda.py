"""Recurrent layers with the scans in CUDA C++, every option, against the reference in float64.

The launchers of kernels/rnn/rnn.py do the rest, as for Triton: in the host executor, where a process of its own (this
file, run) does the work, or on a GPU. Every tier of the scans is forced, on devices that are made small enough to need
it.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

import seqkern
from seqkern import _rnn_cuda
from seqkern.testing.rnn_calls import GRU, LSTM, RNN_RELU, RNN_TANH, OpCase, build, check, sample

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@contextlib.contextmanager
def cuda_scans(tier: str = "auto") -> Iterator[None]:
    """Both scans in CUDA C++ in that tier, and no other scan."""
    other = AssertionError("it went step by step")
    with (
        seqkern.use_backend("cuda"),
        mock.patch.object(_rnn_cuda, "TIER", tier),
        mock.patch.object(_rnn_cuda, "_by_steps", side_effect=other),
    ):
        yield


CASES = {
    "LSTM": OpCase(),
    "LSTM, both directions": OpCase(directions=2, batch=9, hidden=17, dtype=BF16),
    "LSTM, two directions without biases": OpCase(directions=2, bias=False, dtype=F16, hidden=24),
    "GRU": OpCase(cell=GRU, dtype=BF16, hidden=17, directions=2),
    "GRU, two directions": OpCase(cell=GRU, directions=2, need_weights=False, dtype=F16),
    "GRU in float32": OpCase(cell=GRU, hidden=19, batch=9),
    "tanh": OpCase(cell=RNN_TANH, hidden=33, dtype=BF16),
    "relu": OpCase(cell=RNN_RELU, directions=2, dtype=F16),
    "tanh in float32": OpCase(cell=RNN_TANH, hidden=9),
    "lengths": OpCase(directions=2, batch=5, lengths=(3, 0, 1, 2, 2), dtype=BF16),
    "GRU, lengths": OpCase(cell=GRU, directions=2, batch=5, lengths=(3, 0, 1, 2, 2), keep=False),
    "resets": OpCase(directions=2, steps=6, resets=0.4, lengths=(6, 5, 3), dtype=F16),
    "GRU, resets": OpCase(cell=GRU, steps=6, resets=0.4, mask=True, keep=False),
    "mask": OpCase(mask=True, directions=2, dtype=BF16),
    "given": OpCase(given=True, directions=2, strided=True),
    "given, without bias": OpCase(given=True, cell=GRU, bias=False, dtype=F16),
    "recompute": OpCase(keep=False, directions=2, dtype=BF16, hidden=24),
    "zoneout": OpCase(zoneout=(0.4, 0.3), directions=2, lengths=(3, 0, 2), hidden=17),
    "zoneout in evaluation": OpCase(zoneout=(0.4, 0.2), training=False, dtype=BF16),
    "GRU, zoneout": OpCase(cell=GRU, zoneout=(0.5, 0.0), hidden=17, dtype=F16),
    "relu, zoneout in evaluation": OpCase(cell=RNN_RELU, zoneout=(0.5, 0.0), training=False, directions=2),
    "norm": OpCase(norm=True, directions=2, hidden=17),
    "norm, recompute": OpCase(norm=True, keep=False, lengths=(3, 2, 0), dtype=BF16),
    "GRU, norm": OpCase(cell=GRU, norm=True, hidden=17, resets=0.3, dtype=F16),
    "tanh, norm": OpCase(cell=RNN_TANH, norm=True, directions=2, need_weights=False),
    "everything": OpCase(
        norm=True, mask=True, resets=0.3, zoneout=(0.3, 0.2), directions=2, lengths=(3, 2, 1), strided=True, hidden=17
    ),
    "everything, GRU": OpCase(
        cell=GRU, norm=True, mask=True, resets=0.3, zoneout=(0.3, 0.0), directions=2, keep=False, dtype=BF16
    ),
    "no steps": OpCase(steps=0, directions=2),
    "no steps, norm": OpCase(steps=0, norm=True, cell=GRU),
    "no batch": OpCase(batch=0, directions=2),
    "only c": OpCase(grads="c", dtype=BF16),
    "only h": OpCase(grads="h", cell=GRU, directions=2),
    "only cells": OpCase(grads="s", hidden=17),
    "nothing needed": OpCase(need_input=False, need_weights=False, directions=2, cell=GRU),
    "saturated": OpCase(scale=100.0, hidden=9),
}  # fmt: skip
# Teams of several blocks that walk several tiles of the batch, with units that no tile is full of.
WIDE = {
    "LSTM": OpCase(hidden=70, batch=19, steps=4, dtype=BF16, directions=2),
    "LSTM in float32": OpCase(hidden=41, batch=9, lengths=(3, 0, 1, 2, 2, 3, 1, 3, 2), mask=True),
    "GRU": OpCase(cell=GRU, hidden=75, batch=17, steps=4, dtype=F16, zoneout=(0.3, 0.0)),
    "GRU in float32": OpCase(cell=GRU, hidden=33, resets=0.3, steps=5),
    "tanh": OpCase(cell=RNN_TANH, hidden=130, batch=9, dtype=BF16, directions=2),
    "norm": OpCase(norm=True, hidden=60, batch=17, dtype=BF16, steps=4),
    "GRU, norm": OpCase(cell=GRU, norm=True, hidden=35, batch=9, directions=2, lengths=(3, 0, 1, 2, 2, 3, 1, 3, 2)),
    "tanh, norm": OpCase(cell=RNN_TANH, norm=True, hidden=45, dtype=F16, keep=False),
}  # fmt: skip
RACES = ("LSTM, both directions", "GRU in float32", "tanh", "lengths", "resets", "everything", "everything, GRU")
# More units than the registers of a team hold.
HUGE = {
    "LSTM": OpCase(hidden=400, batch=9, dtype=BF16, steps=2, directions=2),  # of the grid, a launch for each direction
    "norm": OpCase(norm=True, hidden=290, dtype=F16, steps=2, need_weights=False),
    "GRU": OpCase(cell=GRU, hidden=523, dtype=BF16, steps=2, keep=False),
}
# What makes a device need a tier: bytes of shared memory, multiprocessors.
DEVICE = {"block": {}, "cluster": {"shared": 40 << 10}, "grid": {"shared": 40 << 10, "multiprocessors": 16, "arch": 80}}


def blocks_of(case: OpCase, tier: str) -> tuple[int, int]:
    """How many blocks the teams of both scans have, as the plans say."""
    gates, directions = (4, 3, 1, 1)[case.cell], case.directions
    weight = torch.empty(directions, gates * case.hidden, case.hidden, dtype=case.dtype, device=case.device)
    plans = [
        torch.ops.seqkern_cuda.rnn_scan_plan(weight, case.batch, case.cell, case.norm, backward, tier)
        for backward in (False, True)
    ]
    assert all(plan.startswith(tier if tier != "auto" else ("block", "cluster", "grid")) for plan in plans), plans
    return tuple(int(plan.partition("teams of ")[2].partition(" ")[0]) for plan in plans)


def bits_repeat(tier: str, device: str = "cpu") -> None:
    """The same bits again, and for a row whatever is beside it in the batch, and before it in its team."""
    for case in (
        OpCase(hidden=40, batch=35, directions=2, dtype=BF16, given=True, device=device),
        OpCase(cell=GRU, hidden=40, batch=35, norm=True, given=True, device=device),
    ):
        arguments, results = build(case, 5), []
        one = {
            name: value[:, 33:34].contiguous() if name in ("input", "h0", "c0") and value is not None else value
            for name, value in arguments.items()
        }
        with cuda_scans(tier):
            for each in (arguments, arguments, one):
                forward = _rnn_cuda.rnn_fwd(**each, keep=True)
                grad = torch.linspace(-1, 1, forward[0].shape[-1], device=device, dtype=case.dtype)
                back = _rnn_cuda.rnn_bwd(
                    grad.expand_as(forward[0]), None, None, None, **each, output=forward[0], cells=forward[3],
                    gates=forward[4], products=forward[5], need_input=False, need_weights=True,
                )  # fmt: skip
                results.append((forward, back))
        (forward, back), again, alone = results
        assert all(map(torch.equal, [*forward, *back], [*again[0], *again[1]]))
        assert torch.equal(forward[0][:, 33:34], alone[0][0])
        assert torch.equal(back[1][:, 33:34], alone[1][1])


def not_served(device: str = "cpu") -> None:
    """What the scans do not serve goes step by step: the same results, no scan in CUDA C++."""
    cases = (OpCase(peephole=True), OpCase(projection=3, directions=2), OpCase(dtype=torch.float64, hidden=9))
    refuse = mock.Mock(side_effect=AssertionError("a scan in CUDA C++ was called"))
    with seqkern.use_backend("cuda"):
        ops = torch.ops.seqkern_cuda
        with mock.patch.object(ops, "rnn_scan_fwd", refuse), mock.patch.object(ops, "rnn_scan_bwd", refuse):
            for case in cases:
                check(replace(case, device=device))


def explained(device: str = "cpu") -> None:
    x, h0 = torch.empty(5, 3, 8, device=device), torch.empty(1, 3, 16, device=device)
    with seqkern.use_backend("cuda"):
        assert "when it gets w_hh too" in seqkern.explain("gru", x).reason
        for op in ("lstm", "gru", "rnn_tanh"):
            choice = seqkern.explain(op, x, h0)
            assert "forward block: teams of 1 block" in choice.reason, choice
            assert "backward block: teams of 1 block" in choice.reason, choice
        huge = seqkern.explain("lstm", x, torch.empty(1, 3, 20000, device=device))
        assert "forward none: " in huge.reason, huge
        assert "float64 goes step by step" in seqkern.explain("lstm", x.double(), h0.double()).reason


def wrong_arguments() -> None:
    """The backward op looks at what it gets before a kernel does."""
    d, t, b, h = 2, 3, 4, 8
    right = {
        "grad_output": torch.ones(t, b, d * h), "grad_h_n": None, "grad_c_n": None, "grad_cells": None,
        "gates": torch.ones(d, t, b, 4 * h), "cells": torch.ones(d, t, b, h), "c0": torch.ones(d, b, h),
        "output": torch.ones(t, b, d * h), "h0": torch.ones(d, b, h), "products": None,
        "w_hh": torch.ones(d, 4 * h, h), "norm": None, "lengths": None, "resets": None, "recurrent_mask": None,
        "seed": None, "zoneout_h": 0.0, "zoneout_c": 0.0, "eps": 1e-5, "cell": LSTM,
        "grad_x": torch.ones(t, b, d * 4 * h), "grad_products": None, "norm_sums": None, "tier": "auto",
    }  # fmt: skip
    call = torch.ops.seqkern_cuda.rnn_scan_bwd
    assert all(result.shape == (d, b, h) for result in call(**right))
    for change, words in (
        ({"cell": 4}, "cell must be 0"),
        ({"tier": "warp"}, "tier must be auto, block, cluster or grid, got warp"),
        ({"w_hh": right["w_hh"].double()}, "w_hh must be float32, bfloat16 or float16"),
        ({"w_hh": right["w_hh"][:, :24]}, "w_hh must have size 32 in dimension 1, got 24"),
        ({"w_hh": right["w_hh"].mT.contiguous().mT}, "w_hh must be contiguous"),
        ({"gates": right["gates"].half()}, "gates must have ScalarType"),
        ({"gates": right["gates"][..., :24]}, "gates must have size 32 in dimension 3"),
        ({"c0": None}, "c0 and cells are for LSTM, which needs them"),
        ({"grad_output": right["grad_output"][:2]}, "grad_output must have size 3 in dimension 0, got 2"),
        ({"grad_h_n": torch.ones(b, h)}, "grad_h_n must have 3 dimensions, got 2"),
        ({"lengths": torch.ones(b)}, "lengths must have ScalarType"),
        ({"resets": torch.ones(t, 1, dtype=torch.uint8)}, "resets must have size 4 in dimension 1"),
        ({"norm": torch.ones(d, 80)}, "products and norm_sums are for layer norm, which needs them"),
        ({"zoneout_h": 1.5}, "zoneout must be a probability"),
        ({"seed": torch.ones(2, dtype=torch.int64)}, "seed must be one int64"),
        ({"seed": torch.ones(())}, "seed must be one int64"),
        ({"grad_x": right["grad_x"][..., ::2].repeat(1, 1, 2)[..., 1:]}, "grad_x must have size 64"),
        ({"grad_products": torch.ones(d, t, 2 * b, 4 * h)[:, :, ::2]}, "rows of grad_products must lie next to each"),
        ({"w_hh": torch.ones(1).expand(2, 80000 * 4, 80000)}, "hidden sizes of 1 to 65536, got 80000"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call(**right | change)


@pytest.mark.parametrize("tier", ["block", "cluster", "grid"])
def test_executed(simt: Callable[..., str], tier: str) -> None:
    simt(__file__, "cases", tier, **DEVICE[tier])


@pytest.mark.parametrize("tier", ["block", "cluster", "grid"])
def test_executed_without_races(simt: Callable[..., str], tier: str) -> None:
    simt(__file__, "races", tier, race=True, **DEVICE[tier])


def test_executed_huge(simt: Callable[..., str]) -> None:
    simt(__file__, "huge", multiprocessors=24)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_executed_random(simt: Callable[..., str], seed: int) -> None:
    device = DEVICE["grid"] | {"arch": 80 if seed % 2 else 90, "seed": seed}
    simt(__file__, "random", 2000 + 40 * seed, 2040 + 40 * seed, sanitize=False, **device)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["auto", "block", "cluster", "grid"])
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, tier: str) -> None:
    if tier == "cluster" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no clusters")
    with cuda_scans(tier):
        check(replace(CASES[name], device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["auto", "cluster", "grid"])
def test_compiled_wide(tier: str) -> None:
    if tier == "cluster" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no clusters")
    for cases in (WIDE, HUGE):
        run({name: replace(case, device="cuda") for name, case in cases.items()}, tier)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("hidden", [128, 200, 256, 512, 1024])
@pytest.mark.parametrize("cell", range(4))
def test_compiled_sizes(cell: int, hidden: int, dtype: torch.dtype) -> None:
    with seqkern.use_backend("cuda"):
        check(OpCase(cell=cell, steps=9, batch=33, hidden=hidden, directions=2, dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["block", "grid"])
def test_compiled_bits_repeat(tier: str) -> None:
    bits_repeat(tier, "cuda")


@pytest.mark.gpu
def test_compiled_not_served() -> None:
    not_served("cuda")
    explained("cuda")


def one_group() -> None:
    """Stores within a cluster of one block are undefined: of 8 units and fewer, backward, a block stands alone."""
    for hidden in (1, 8, 9):
        weight = torch.empty(1, 4 * hidden, hidden)
        plan = torch.ops.seqkern_cuda.rnn_scan_plan(weight, 3, LSTM, False, True, "cluster")
        team = "cluster: teams of 2 blocks" if hidden > 8 else "block: teams of 1 block"
        assert plan.startswith(team), (hidden, plan)
        assert ("a cluster would have units for one block alone" in plan) == (hidden <= 8), plan
        run({"one group": OpCase(hidden=hidden, norm=True, batch=9)}, "cluster")


def run(cases: dict[str, OpCase], tier: str) -> None:
    for name, case in cases.items():
        try:
            with cuda_scans(tier):
                check(case)
        except BaseException:
            print(tier, name, case, flush=True)
            raise


def main(what: str, *arguments: str) -> None:
    if what == "random":
        for seed in range(*map(int, arguments)):
            case = sample(seed)
            case = replace(
                case,
                cell=min(case.cell, RNN_RELU),
                projection=None,
                peephole=False,
                dtype=F32 if case.dtype == torch.float64 else case.dtype,
            )
            case = replace(case, hidden=random.Random(seed).choice([case.hidden, 24, 35, 50]))
            tier = random.Random(seed).choice(["auto", "grid"])
            run({f"seed {seed}": case}, tier)
        return
    if what == "races":
        (tier,) = arguments
        run({name: CASES[name] for name in RACES} | ({} if tier == "block" else WIDE), tier)
        return
    if what == "huge":
        for tier in ("cluster", "grid"):
            run(HUGE, tier)
        return
    (tier,) = arguments
    run(CASES, tier)
    if tier == "block":
        not_served()
        explained()
        wrong_arguments()
    else:
        for case in WIDE.values():
            assert min(blocks_of(case, tier)) > 1
        run(WIDE, tier)
        bits_repeat(tier)
    if tier == "cluster":
        one_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
