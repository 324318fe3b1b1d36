"""The benchmarks' own arithmetic, on a clock that only the contestants move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import harness
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
