"""The benchmarks' own arithmetic, on a clock that only the contestants move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import harness, pages
from seqkern.ops._autograd import Cost
from seqkern.testing import compare


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def takes(self, *seconds: float) -> harness.Thunk:
        """A call that takes so long, each time the next of the durations, from the first one again after the last."""
        calls = [0]

        def call() -> None:
            self.now += seconds[calls[0] % len(seconds)]
            calls[0] += 1

        return call


class Benchmark:
    """What `compete` needs of pytest-benchmark's fixture, on that clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.extra_info = clock, {}
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))

    def pedantic(self, function: Any, setup: Any, rounds: int, **_: Any) -> None:
        for _round in range(rounds):
            setup()
            start = self.clock.now
            function()
            self.stats.stats.data.append(self.clock.now - start)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(harness, "peak_rate", lambda dtype, device: 5e9)
    return clock


def contest(clock: Clock, ours: harness.Thunk, theirs: harness.Thunk, cost: Cost, error: float = 0.0) -> dict[str, Any]:
    ones = torch.ones(8)
    benchmark = Benchmark(clock)
    harness.compete(
        benchmark,
        harness.Contest(
            "op", "shape", "forward", torch.float32, "cpu", ours, {"torch": theirs},
            lambda: [compare(ones + error, ones, ones.double())], cost,
        ),
        budget=0.1,
    )  # fmt: skip
    return benchmark.extra_info


def test_times_ratios_and_the_share_of_a_bandwidth(clock, monkeypatch):
    """The bandwidth is the better one of before and after, whichever that is."""
    for before, after in ((2e9, 1e9), (1e9, 2e9)):
        rates = iter((before, after))
        monkeypatch.setattr(harness, "bandwidth", lambda device, reads, rates=rates: next(rates))
        info = contest(clock, clock.takes(2e-3), clock.takes(6e-3), Cost(flops=1e6, bytes=1e6))
        assert info["milliseconds"] == pytest.approx(2)
        assert info["peers"]["torch"]["milliseconds"] == pytest.approx(6)
        assert info["peers"]["torch"]["speedup"] == pytest.approx(3)
        assert info["gflops_per_second"] == info["gbytes_per_second"] == pytest.approx(0.5)
        assert info["roofline_gbytes_per_second"] == pytest.approx(2)
        assert info["share_of_roofline"] == pytest.approx(0.25)  # 0.5 ms at 2 GB/s


def test_share_of_the_rate_of_products(clock, monkeypatch):
    monkeypatch.setattr(harness, "bandwidth", lambda device, reads: 1e9)
    info = contest(clock, clock.takes(1e-3), clock.takes(1e-3), Cost(flops=4e6, bytes=1e3))
    assert info["share_of_roofline"] == pytest.approx(0.8)


def test_what_counts_is_the_median_of_the_rounds_ratios(clock, monkeypatch):
    """Not the ratio of the medians, which is 1 here: a machine that is slow for a while is slow for both."""
    monkeypatch.setattr(harness, "bandwidth", lambda device, reads: 1e9)
    ours, theirs = clock.takes(10e-3, 40e-3, 100e-3), clock.takes(40e-3, 40e-3, 200e-3)
    versus = contest(clock, ours, theirs, Cost(flops=1e6, bytes=1e6))["peers"]["torch"]
    assert [versus[k] for k in ("speedup_low", "speedup", "speedup_high")] == pytest.approx([1, 2, 4])


def test_a_wrong_result_is_not_timed(clock, monkeypatch):
    monkeypatch.setattr(harness, "bandwidth", lambda device, reads: 1e9)
    with pytest.raises(AssertionError, match="wrong result, not timed"):
        contest(clock, clock.takes(1e-3), clock.takes(1e-3), Cost(flops=1e6, bytes=1e6), error=1e-3)
    assert clock.now == 0


def test_bandwidth_counts_a_copy_twice(monkeypatch):
    monkeypatch.setattr(harness, "_memory", lambda device: (torch.ones(1000), torch.zeros(1000)))
    monkeypatch.setattr(harness, "seconds", lambda call, device: call() is None or 1e-3)
    assert harness.bandwidth("cpu", reads=False) == pytest.approx(8e6)
    assert harness.bandwidth("cpu", reads=True) == pytest.approx(4e6)


# ---- the pages ----------------------------------------------------------------------------------------------------


def timed(ratios: tuple[float, float, float], shape: str = "8 x 64", **others: Any) -> dict[str, Any]:
    """A stored case: quartile, median, quartile of the ratio to a peer, beside one that is twice as slow."""
    low, middle, high = ratios
    peers = {
        name: {"milliseconds": f * middle, "speedup": f * middle, "speedup_low": f * low, "speedup_high": f * high}
        for name, f in (("torch.compile", 2), ("torch", 1))
    }
    return {
        "op": "layer_norm", "shape": shape, "dtype": "float32", "mode": "forward", "device": "cpu", "threads": 2,
        "milliseconds": 1.0, "peers": peers, "share_of_roofline": 0.5, **others,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "outcome", "shown"),
    [
        ((1.01, 1.2, 1.3), "faster", "1.20"),
        ((0.9, 1.2, 1.3), "even", "1.20"),
        ((0.7, 0.8, 1.1), "even", "0.80"),
        ((0.7, 0.8, 0.9), "slower", "**0.80**"),
    ],
)
def test_a_case_is_won_or_lost_against_its_strongest_peer_and_beyond_its_spread(ratios, outcome, shown):
    case = timed(ratios)
    assert pages.outcome(case) == outcome
    assert pages.row(case)[3:7] == ["1.00", "torch", pages.digits(ratios[1]), shown]


def test_of_a_case_in_two_files_the_later_run_counts_and_places_are_apart():
    def run(file: str, date: str, *cases: dict[str, Any]) -> pages.Run:
        return pages.Run("machine", file, date, {}, list(cases))

    old, new, other = timed((1, 1, 1)), timed((2, 2, 2)), timed((3, 3, 3), "64 x 768")
    alone, gpu = timed((4, 4, 4), threads=1), timed((5, 5, 5), device="cuda", backend="triton")
    found = pages.latest([run("a", "2026-02", new, alone), run("b", "2026-01", other, old, gpu)])
    assert list(found.values()) == [new, alone, other, gpu]
    assert [key[0] for key in found] == ["layer_norm"] * 3 + ["layer_norm triton"]
    assert [key[-1] for key in found] == ["2 threads", "1 thread", "2 threads", "GPU"]


@pytest.mark.parametrize(
    ("x", "text"),
    [(0.0049309, "0.00493"), (0.61499, "0.615"), (1.1067, "1.11"), (12.34, "12.3"), (249.56, "250"), (1234.5, "1234")],
)
def test_times_have_three_digits(x, text):
    assert pages.digits(x) == text


def test_quartiles_lie_among_the_cases(monkeypatch):
    monkeypatch.setattr(pages, "COLUMNS", {"machine": "machine"})
    cases = [timed((x, x, x), shape) for x, shape in ((1.0, "a"), (3.0, "b"))]
    found = pages.ranges([pages.Run("machine", "file", "2026-01", {}, cases)])
    assert found == {"layer_norm": {"float32": [1.0, 1.5, 2.0, 2.5, 3.0]}}
    found = pages.ranges([pages.Run("machine", "file", "2026-01", {}, cases[:1])])
    assert found == {"layer_norm": {"float32": [1.0] * 5}}


def test_the_picture_draws_every_range():
    found = {"LSTM": {"float32": [0.5, 0.8, 1.0, 2.0, 4.0]}, "decode": {"bfloat16": [2.0, 3.0, 5.0, 6.0, 9.0]}}
    (axes,) = pages.picture(found).axes
    drawn = [list(line.get_xdata()) for line in axes.get_lines()]
    for numbers in (found["LSTM"]["float32"], found["decode"]["bfloat16"]):
        low, first, median, third, high = numbers
        assert all(part in drawn for part in ([low, high], [first, third], [median]))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["LSTM", "decode"]
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"float32", "bfloat16"}


def test_the_table_goes_between_readmes_markers():
    start, end = pages.MARKERS
    changed = pages.with_table(f"before\n{start}old\n{end}after\n", "| new |\n")
    assert changed == f"before\n{start}\n| new |\n\n{end}after\n"
    assert pages.with_table(changed, "| new |\n") == changed
    with pytest.raises(ValueError, match="found 0 pairs"):
        pages.with_table("no markers", "| new |\n")
