"""Side-by-side timing: seqkern and its peers in one process, taking turns, after the result was checked.

pytest-benchmark runs and stores. A round of a case is one timed call of every contestant, so that drift of the
machine hits all alike (A B C A B C ...); what counts is the median of the round-by-round ratios. Before that the case
passes the error rule: a wrong kernel has no speed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from seqkern.ops._autograd import Cost
from seqkern.testing import ErrorReport

Thunk = Callable[[], Any]

# Set by `python -m benchmarks --quick`: a tenth of the rounds, and no peer that has to be compiled first.
quick = False


def chosen_device(config: Any) -> str:
    """Of a pytest run: as `--device` says, or a GPU where one is."""
    return config.getoption("--device") or ("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Contest:
    """One measured case: the same work by seqkern and by each peer.

    `gate` returns the error reports of the case; `cost` is the work of one call.
    """

    op: str
    shape: str
    mode: str  # "forward", "backward", "forward+backward"
    dtype: torch.dtype
    device: str
    ours: Thunk
    peers: dict[str, Thunk]
    gate: Callable[[], Sequence[ErrorReport]]
    cost: Cost
    reads: bool = False  # whether nearly all of its bytes are read: then the roofline has the bandwidth of reading


@dataclass(frozen=True)
class Roofline:
    """What this machine reaches: the rate of a large product, and the bandwidth of a large copy or of reading."""

    flops_per_second: float
    bytes_per_second: float

    def seconds(self, cost: Cost) -> float:
        """The least time that the work can take."""
        return max(cost.flops / self.flops_per_second, cost.bytes / self.bytes_per_second)


@functools.cache
def peak_rate(dtype: torch.dtype, device: str) -> float:
    """Operations per second, measured once a process: the best of several products of 2048 x 2048 (8192 on a GPU).

    float32's where a small product of the dtype is slower than float32's by far: a machine without its instructions
    can calculate in float32.
    """
    probe = functools.partial(product_rate, device=device, n=512, times=2)
    slow = dtype != torch.float64 and probe(dtype) < probe(torch.float32) / 4
    return product_rate(torch.float32 if slow else dtype, device, 8192 if device == "cuda" else 2048)


def bandwidth(device: str, reads: bool) -> float:
    """Bytes per second that copying (read and written), or reading, 256 MB moves now: the best of several.

    Measured before and after every contest, because the memory of a shared machine is faster at one time than another.
    """
    source, target = _memory(device)
    move = source.sum if reads else functools.partial(target.copy_, source)
    times = [seconds(move, device) for _ in range(4)]
    return source.nbytes * (1 if reads else 2) / min(times)


@functools.cache
def _memory(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randn(2**26, device=device)
    return source, torch.zeros_like(source)


def product_rate(dtype: torch.dtype, device: str, n: int, times: int = 8) -> float:
    """Operations per second of the fastest of some products of two n x n matrices."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / min(seconds(lambda: a @ b, device) for _ in range(times))


def seconds(call: Thunk, device: str, calls: int = 1) -> float:
    """Wall time of `calls` calls, the device idle before and after."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def forward_backward(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Thunk:
    """A call of function(*inputs) and of its gradients for every input, with a fixed dense cotangent of each result.

    Of a result that is a tuple, what is not a tensor (the states of an LSTM) gets no gradient.
    """
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    with torch.no_grad():
        cotangents = [torch.randn_like(t) for t in _tensors(function(*leaves))]

    def call() -> Any:
        return torch.autograd.grad(_tensors(function(*leaves)), leaves, cotangents)

    return call


def backward_only(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Thunk:
    """As forward_backward, on the graph of one forward pass, which every call uses again."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = _tensors(function(*leaves))
    cotangents = [torch.randn_like(t) for t in outputs]

    def call() -> Any:
        return torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)

    return call


def forward_only(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Thunk:
    def call() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return call


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]


def compete(benchmark: Any, contest: Contest, *, budget: float = 2.0, min_rounds: int = 7) -> None:
    """Checks the contest, times it for about `budget` seconds, and stores the result with the benchmark.

    At least `min_rounds`, of which three are enough for what takes longer than the clock and the machine stutter.

    Raises:
        AssertionError: the gate failed; nothing is timed.
    """
    failed = [str(report) for report in contest.gate() if not report.passed]
    assert not failed, "wrong result, not timed:\n" + "\n".join(failed)

    if quick:
        budget, min_rounds = budget / 10, 3
        contest = replace(contest, peers={name: call for name, call in contest.peers.items() if "compile" not in name})
    before = bandwidth(contest.device, contest.reads)
    contestants = {"seqkern": contest.ours, **contest.peers}
    for call in contestants.values():  # compile, allocate, warm the caches
        call(), call()
    slowest = max(seconds(call, contest.device) for call in contestants.values())
    # Short calls are repeated inside a round until the clock's grain and the round's own cost do not show.
    calls = max(1, min(1000, int(2e-3 / slowest)))
    rounds = max(3 if slowest > 0.3 else min_rounds, min(200, int(budget / (slowest * calls * len(contestants)))))
    times: dict[str, list[float]] = {name: [] for name in contest.peers}

    def peers() -> None:
        for name, call in contest.peers.items():
            times[name].append(seconds(call, contest.device, calls) / calls)
        synchronize(contest.device)

    def ours() -> None:
        for _ in range(calls):
            contest.ours()
        synchronize(contest.device)

    benchmark.pedantic(ours, setup=peers, rounds=rounds, iterations=1, warmup_rounds=0)
    own = [t / calls for t in benchmark.stats.stats.data]
    fastest = max(before, bandwidth(contest.device, contest.reads))
    roof = Roofline(peak_rate(contest.dtype, contest.device), fastest)
    benchmark.extra_info.update(
        op=contest.op,
        shape=contest.shape,
        mode=contest.mode,
        dtype=str(contest.dtype).removeprefix("torch."),
        device=contest.device,
        threads=torch.get_num_threads(),
        calls_per_round=calls,
        milliseconds=statistics.median(own) * 1e3,
        peers={name: _versus(own, theirs[-len(own) :]) for name, theirs in times.items()},
        gflops_per_second=contest.cost.flops / statistics.median(own) / 1e9,
        gbytes_per_second=contest.cost.bytes / statistics.median(own) / 1e9,
        roofline_gflops_per_second=roof.flops_per_second / 1e9,
        roofline_gbytes_per_second=roof.bytes_per_second / 1e9,
        share_of_roofline=roof.seconds(contest.cost) / statistics.median(own),
    )


def _versus(own: list[float], theirs: list[float]) -> dict[str, float]:
    """A peer's time, and how many times faster seqkern was: the median of the ratios, and their quartiles."""
    ratios = [b / a for a, b in zip(own, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "milliseconds": statistics.median(theirs) * 1e3,
        "speedup": statistics.median(ratios),
        "speedup_low": low,
        "speedup_high": high,
    }
