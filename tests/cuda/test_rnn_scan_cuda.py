"""The recurrent scan in CUDA C++, forward: `seqkern_cuda::rnn_scan_fwd` itself, in the host executor.

Against the reference in float64, by the error rule; in the place of torch stands the reference in float32 that rounds
where the kernels do. Every tier is forced, with devices made small enough (SEQKERN_SIMT_*). The executor's library is
loaded into a process of its own: this file, run.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_checks import run_words

from seqkern import reference
from seqkern.testing import compare, poison
from seqkern.testing.rnn_calls import GATES, GRU, KEPT, LSTM, RNN_RELU, RNN_TANH, OpCase

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TIERS = ("block", "cluster", "grid")


@dataclass
class ScanCase(OpCase):
    """A call of the scan, which is all of a layer but the products over all steps."""

    ragged: bool = False  # with lengths, drawn
    in_place: bool = True  # the gates take the memory of x
    wide: bool = True  # x, h0 and c0 in float32
    x_scale: float = 1.0
    tier: str = "auto"


Tensors = dict[str, Any]


def build(case: ScanCase, seed: int) -> Tensors:
    """What both kernels get: x (D, T, B, G H) without biases, the biases apart, the rest by its name."""
    generator = torch.Generator().manual_seed(seed)
    t, b, h, d, g = case.steps, case.batch, case.hidden, case.directions, GATES[case.cell]

    def tensor(*shape: int, scale: float = 1.0) -> torch.Tensor:  # of numbers that every dtype has
        return (torch.randn(shape, generator=generator) * scale).to(case.dtype)

    norm = None
    if case.norm:
        norm = torch.randn((d, 2 * g * h + (2 * h if case.cell == LSTM else 0)), generator=generator) * 0.5
        norm[:, : g * h] += 1.0
    return {
        "x": tensor(d, t, b, g * h, scale=case.x_scale),
        "w_hh": tensor(d, g * h, h, scale=h**-0.5),
        "b_hh": tensor(d, g * h) if case.bias else None,
        "h0": tensor(d, b, h),
        "c0": tensor(d, b, h) if case.cell == LSTM else None,
        "norm": norm,
        "lengths": torch.randint(0, t + 1, (b,), generator=generator) if case.ragged else None,
        "resets": torch.rand((t, b), generator=generator) < case.resets if case.resets else None,
        "mask": (torch.rand((d, b, h), generator=generator) < 0.7) / 0.7 if case.mask else None,
        "seed": torch.tensor([seed]) if any(case.zoneout) and case.training else None,
    }


def ours(case: ScanCase, tensors: Tensors) -> dict[str, torch.Tensor]:
    t, b, h, d, g, r = case.steps, case.batch, case.hidden, case.directions, GATES[case.cell], KEPT[case.cell]
    wide = F32 if case.wide else case.dtype
    memory = tensors["x"].to(wide, copy=True)
    with poison():
        gates = memory if g == r and case.in_place and case.wide else memory.new_empty((d, t, b, r * h), dtype=F32)
        output = memory.new_empty((t, b, d * h), dtype=case.dtype)
        cells = torch.empty((d, t, b, h)) if case.cell == LSTM else None
        products = torch.empty((d, t, b, g * h)) if case.norm else None
        bias = tensors["b_hh"]
        if bias is not None and case.cell == GRU:  # r, z, n of x, n of h
            bias = torch.cat([bias[:, : 2 * h], torch.zeros(d, h), bias[:, 2 * h :]], 1)
        kept = (cells, gates, products) if case.keep else (None,) * 3
        h_n, c_n = torch.ops.seqkern_cuda.rnn_scan_fwd(
            memory, tensors["w_hh"], None if bias is None else bias.float(), tensors["norm"], tensors["lengths"],
            None if tensors["resets"] is None else tensors["resets"].view(torch.uint8), tensors["mask"],
            tensors["seed"], tensors["h0"].to(wide), None if tensors["c0"] is None else tensors["c0"].to(wide),
            *case.zoneout, 1e-5, case.cell, output, *kept, case.tier,
        )  # fmt: skip
    results = {"output": output, "h_n": h_n, "c_n": c_n}
    if case.keep:
        results |= {"cells": cells, "gates": gates, "products": products}
    return {name: each for name, each in results.items() if each is not None}


def by_reference(case: ScanCase, tensors: Tensors, rounded: bool) -> dict[str, torch.Tensor]:
    """The reference in float64, or in float32 with h rounded on its way into the product, as the kernels do it."""
    wide = F32 if rounded else torch.float64
    products = []

    def linear(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mask = 1.0 if tensors["mask"] is None else tensors["mask"][len(products) // case.steps]
        if rounded:
            h = (h.to(case.dtype) * mask).to(case.dtype).to(wide)
        else:
            h = h * mask
        products.append(h @ weight.t())
        return products[-1]

    def each(name: str) -> list[torch.Tensor]:
        return [] if tensors[name] is None else list(tensors[name].to(wide))

    x = tensors["x"].to(wide)
    c0 = None if tensors["c0"] is None else tensors["c0"].to(wide)
    with mock.patch.object(torch.nn.functional, "linear", linear):
        results = reference.rnn(
            x.permute(1, 2, 0, 3).flatten(2), tensors["h0"].to(wide), c0, [], each("w_hh"), [], each("b_hh"), [], [],
            each("norm"), tensors["lengths"], tensors["resets"], None, tensors["seed"], *case.zoneout, 1e-5, case.cell,
        )  # fmt: skip
    named = dict(zip(("output", "h_n", "c_n", "cells"), results, strict=False))
    if case.steps:  # in the order of time
        runs = torch.stack(products).unflatten(0, (case.directions, case.steps))
        named["products"] = torch.stack([run.flip(0) if d == 1 else run for d, run in enumerate(runs)])
    else:
        named["products"] = x
    named["gates"] = gates_of(case, x, named["products"], each("b_hh"), each("norm"))
    return named


def gates_of(
    case: ScanCase, x: torch.Tensor, products: torch.Tensor, bias: list[torch.Tensor], norm: list[torch.Tensor]
) -> torch.Tensor:
    width, gates = products.shape[-1], []
    for d, z in enumerate(products):
        if norm:
            z = torch.nn.functional.layer_norm(z, (width,), norm[d][:width], norm[d][width : 2 * width], 1e-5)
        z = z + bias[d] if bias else z
        if case.cell == GRU:
            h = case.hidden
            r, u = (x[d] + z)[..., : 2 * h].sigmoid().chunk(2, -1)
            gates.append(torch.cat([r, u, (x[d][..., 2 * h :] + r * z[..., 2 * h :]).tanh(), z[..., 2 * h :]], -1))
        elif case.cell == LSTM:
            i, f, g, o = (x[d] + z).chunk(4, -1)
            gates.append(torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], -1))
        else:
            gates.append((x[d] + z).tanh() if case.cell == RNN_TANH else (x[d] + z).relu())
    return torch.stack(gates)


def active(case: ScanCase, tensors: Tensors, name: str, result: torch.Tensor) -> torch.Tensor:
    """Gates and products of steps that are not active mean nothing."""
    if name not in ("gates", "products") or tensors["lengths"] is None:
        return result
    live = torch.arange(case.steps)[:, None] < tensors["lengths"]
    return torch.where(live[None, :, :, None], result, 0.0)


def check(case: ScanCase, seed: int = 0) -> None:
    tensors = build(case, seed)
    results = ours(case, tensors)
    theirs, oracle = (by_reference(case, tensors, rounded) for rounded in (True, False))
    for name, result in results.items():
        if name == "c_n" and case.cell != LSTM:
            continue
        parts = [active(case, tensors, name, each[name].reshape(result.shape)) for each in (theirs, oracle)]
        report = compare(active(case, tensors, name, result), *parts, name=name)
        assert report.passed, f"{case}: {report}"
        if case.ragged and name in ("output", "cells"):
            live = torch.arange(case.steps)[:, None] < tensors["lengths"]
            dead = result[~live] if name == "output" else result[:, ~live]
            assert not dead.any(), f"{case}: {name} of inactive steps"


def set_device(**settings: int) -> None:
    """What the executor's device is like from now on."""
    for name in ("seed", "arch", "shared", "multiprocessors", "cluster"):
        os.environ.pop(f"SEQKERN_SIMT_{name.upper()}", None)
    os.environ.update({f"SEQKERN_SIMT_{name.upper()}": str(value) for name, value in settings.items()})


# ---- what this file does when it is run ----------------------------------------------------------------------------


def plan_of(case: ScanCase) -> str:
    weights = build(case, 0)["w_hh"]
    return torch.ops.seqkern_cuda.rnn_scan_plan(weights, case.batch, case.cell, case.norm, False, case.tier)


def sizes() -> Iterator[ScanCase]:
    """One block: every size beside a border of tiles."""
    for cell, dtype in itertools.product(range(4), (F32, BF16, F16)):
        for i, hidden in enumerate((1, 7, 8, 16, 17, 33, 64)):
            batch, steps = (1, 3, 9, 17)[(i + cell) % 4], (0, 1, 2, 5)[(i + 1) % 4]
            yield ScanCase(cell, steps, batch, hidden=hidden, directions=1 + i % 2, dtype=dtype, wide=bool(i % 2))


def teams(tier: str) -> Iterator[ScanCase]:
    """Several blocks: teams of 2 blocks and more, some of them without any unit of the layer."""
    for cell, dtype in itertools.product((LSTM, GRU, RNN_RELU), (F32, BF16, F16)):
        for i, hidden in enumerate((1, 17, 33, 72, 130)):
            yield ScanCase(
                cell, (5, 2, 3, 0, 4)[(i + cell) % 5], (3, 9, 1, 17, 8)[i], hidden=hidden, directions=1 + i % 2,
                dtype=dtype, tier=tier,
            )  # fmt: skip


def options() -> Iterator[ScanCase]:
    base = ScanCase(steps=5, batch=9, hidden=20)
    for cell, dtype in itertools.product(range(4), (F32, BF16)):
        for i, tier in enumerate(TIERS):
            case = replace(base, cell=cell, dtype=dtype, tier=tier, directions=1 + (cell + i) % 2)
            yield replace(case, ragged=True, resets=0.3)
            yield replace(case, mask=True, ragged=True, bias=False)
            yield replace(case, zoneout=(0.4, 0.3), resets=0.3)
            yield replace(case, zoneout=(0.4, 0.3), training=False, ragged=True, keep=False)
            yield replace(case, resets=0.3, mask=True, zoneout=(1.0, 0.0), wide=False, in_place=False)


def norms() -> Iterator[ScanCase]:
    for cell, dtype in itertools.product(range(4), (F32, BF16)):
        for i, (tier, hidden) in enumerate(itertools.product(TIERS, (1, 24, 65))):
            batch = 17 if hidden == 1 else (3, 9)[i % 2]  # of a handful of numbers the reference's errors say little
            case = ScanCase(cell, 3, batch, hidden=hidden, directions=1 + i % 2, dtype=dtype, norm=True, tier=tier)
            yield replace(
                case, ragged=i % 3 == 0, resets=0.3 * (i % 3 == 1), zoneout=(0.3, 0.3) if i % 3 == 2 else (0.0, 0.0)
            )


def in_turn() -> Iterator[ScanCase]:
    """More tiles of the batch than teams, some of them without a step."""
    for cell, norm in itertools.product((LSTM, GRU), (False, True)):
        yield ScanCase(cell, 3, 33, hidden=33, directions=2, dtype=BF16, tier="grid", norm=norm)
        yield ScanCase(cell, 4, 20, hidden=20, directions=2, tier="grid", norm=norm, ragged=True, resets=0.3)


def large_batches() -> Iterator[ScanCase]:
    """Tiles of 16 rows, where the device is full."""
    for cell, dtype, (tier, hidden) in itertools.product(range(4), (BF16, F16), zip(TIERS, (33, 40, 70), strict=True)):
        case = ScanCase(
            cell, 3, 75 if cell > GRU else 35, hidden=hidden, directions=2, dtype=dtype, ragged=True, tier=tier
        )
        assert plan_of(case).endswith("16 rows of the batch a team"), plan_of(case)
        yield case
        yield replace(case, norm=True, resets=0.3)
        yield replace(case, zoneout=(0.3, 0.2), mask=True, batch=case.batch + 15)


def saturated() -> Iterator[ScanCase]:
    for cell, dtype, tier in itertools.product((LSTM, GRU, RNN_TANH), (F32, BF16, F16), TIERS):
        yield ScanCase(cell, 3, 3, hidden=20, dtype=dtype, x_scale=1e4, bias=False, tier=tier)


def small_devices() -> None:
    """The tier that a device has room for, and the same results from each."""

    def plan(case: ScanCase, **device: int) -> str:
        set_device(**device)
        check(case)
        return plan_of(case)

    case = ScanCase(hidden=64, batch=9)
    assert plan(case).startswith("block: teams of 1 blocks of 8 warps")
    assert plan(case, shared=60 << 10).startswith("cluster: teams of 4 blocks of 4 warps")
    assert plan(case, shared=60 << 10, cluster=1, multiprocessors=5).startswith("grid: teams of 4 blocks")
    assert plan(case, shared=60 << 10, arch=80, multiprocessors=3).startswith("grid: teams of 2 blocks")
    assert plan(replace(case, hidden=130, dtype=BF16), arch=80, multiprocessors=9).startswith("grid: teams of 9 blocks")
    assert plan(replace(case, hidden=129, cell=GRU, dtype=BF16)).startswith("cluster: teams of 2 blocks of 5 warps")
    set_device(arch=80, shared=16 << 10)
    why = plan_of(case)
    assert why.startswith("none: one block would need"), why
    assert "the device has no clusters; the whole device does not hold the weights" in why
    raises("no tier of the scan serves a hidden size of 64: none", case)
    raises("tier must be", replace(case, tier="warp"))


def raises(message: str, case: ScanCase, **changes: Any) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ours(case, build(case, 0) | changes)


def wrong_arguments() -> None:
    set_device()
    case = ScanCase()
    raises("w_hh must have size 28 in dimension 1, got 27", case, w_hh=torch.zeros(1, 27, 7))
    raises("w_hh must be float32, bfloat16 or float16, got float64", case, w_hh=torch.zeros(1, 28, 7).double())
    raises("c0 is for an LSTM", case, c0=None)
    raises("c0 is for an LSTM", replace(case, cell=GRU), c0=torch.zeros(1, 3, 7))
    raises("h0 must have size 3 in dimension 1, got 2", case, h0=torch.zeros(1, 2, 7))
    raises("lengths must have size 3 in dimension 0, got 1", case, lengths=torch.ones(1, dtype=torch.int64))
    raises("x must have a contiguous last dimension", case, x=torch.zeros(1, 28, 3, 3).transpose(1, 3))
    raises("zoneout must be a probability, between 0 and 1, got 1.5", replace(case, zoneout=(1.5, 0.0)))
    raises("norm must have size 70 in dimension 1, got 69", case, norm=torch.zeros(1, 69))


def same_bits() -> None:
    """Whatever the schedule, and whatever else is in the batch."""
    # All of the batch in tiles of 16 rows (not float32), one sequence in a tile of 8.
    device = {"multiprocessors": 2, "shared": 100 << 10}
    set_device(**device)
    for cell, dtype, tier, norm in itertools.product((LSTM, GRU), (F32, BF16), TIERS, (False, True)):
        case = ScanCase(
            cell, 4, 43, hidden=40, directions=2, dtype=dtype, ragged=True, resets=0.3, mask=True, norm=norm, tier=tier
        )
        assert dtype == F32 or plan_of(case).endswith("16 rows of the batch a team")
        assert plan_of(replace(case, batch=1)).endswith("8 rows of the batch a team"), plan_of(case)
        tensors = build(case, 1)
        first = ours(case, tensors)
        for seed in (1, 2, 3):
            set_device(**device, seed=seed)
            for name, result in ours(case, tensors).items():
                shown = [active(case, tensors, name, each) for each in (result, first[name])]
                assert torch.equal(*shown), f"{case}: {name} with seed {seed}"
        for row in (0, 17, 42):
            rows = slice(row, row + 1)
            alone = dict(tensors)
            for name, dim in (("x", 2), ("h0", 1), ("c0", 1), ("mask", 1), ("lengths", 0), ("resets", 1)):
                if tensors[name] is not None:
                    alone[name] = tensors[name].narrow(dim, row, 1).contiguous()
            one = ours(replace(case, batch=1), alone)
            assert torch.equal(one["output"], first["output"][:, rows]), f"{case}: row {row}"
            assert torch.equal(one["h_n"], first["h_n"][:, rows]), f"{case}: row {row}"


def strided() -> None:
    """x as any strides give it: here, rows of the batch first. And no batch at all."""
    set_device()
    case = ScanCase(GRU, 4, 5, hidden=12, wide=False, dtype=BF16)
    tensors = build(case, 0)
    expected = ours(case, tensors)["output"]
    apart = torch.full((5, 4, 2 * 36 + 1), float("nan"), dtype=BF16)
    apart[:, :, 3:39] = tensors["x"][0].transpose(0, 1)
    output = torch.empty_like(expected)
    bias = tensors["b_hh"].float()
    bias = torch.cat([bias[:, :24], torch.zeros(1, 12), bias[:, 24:]], 1)
    nothing = replace(case, batch=0)
    assert ours(nothing, build(nothing, 0))["output"].shape == (4, 0, 12)
    torch.ops.seqkern_cuda.rnn_scan_fwd(
        apart[:, :, 3:39].transpose(0, 1)[None], tensors["w_hh"], bias, None, None, None, None, None, tensors["h0"],
        None, 0.0, 0.0, 0.0, GRU, output, None, None, None, "auto",
    )  # fmt: skip
    assert torch.equal(output, expected)


def infinite() -> None:
    """What is padded stays out of every sum: one infinite weight reaches its own unit alone."""
    set_device(multiprocessors=16)
    for tier, dtype in itertools.product(TIERS, (F32, BF16)):
        case = ScanCase(steps=1, batch=5, hidden=33, dtype=dtype, bias=False, tier=tier)
        tensors = build(case, 0)
        tensors["w_hh"][0, 4, 7] = float("inf")  # of unit 4
        finite = ours(case, tensors)["gates"].view(-1, 4, 33).isfinite()
        assert finite[..., [u for u in range(33) if u != 4]].all(), case


def check_all(cases: Callable[[], Iterator[ScanCase]], **device: int) -> Callable[[], None]:
    def run() -> None:
        set_device(**device)
        for i, case in enumerate(cases()):
            check(case, i)

    return run


PARTS = {
    "sizes": check_all(sizes),
    "cluster": check_all(lambda: teams("cluster")),
    "grid": check_all(lambda: teams("grid"), multiprocessors=16),
    "options": check_all(options),
    "norms": check_all(norms),
    "in_turn": check_all(in_turn),
    "large_batches": check_all(large_batches, multiprocessors=3, shared=44 << 10),
    "saturated": check_all(saturated),
    "small_devices": small_devices,
    "wrong_arguments": wrong_arguments,
    "same_bits": same_bits,
    "strided": strided,
    "infinite": infinite,
}


# A process takes seconds to start: several parts each.
@pytest.mark.parametrize(
    "what",
    [
        ("sizes", "cluster", "grid"),
        ("options", "norms", "in_turn", "large_batches", "saturated"),
        ("small_devices", "wrong_arguments", "same_bits", "strided", "infinite"),
    ],
    ids="-".join,
)
def test_scan(simt: Callable[..., str], what: tuple[str, ...]) -> None:
    simt(__file__, *what)


if __name__ == "__main__":
    run_words(PARTS)
