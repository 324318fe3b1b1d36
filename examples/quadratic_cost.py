"""What causal attention costs as the sequence grows, in time and in memory, and where an LSTM becomes cheaper.

Three implementations of the same attention, one head of width 64, float32: one that materialises the N x N scores as
the textbook writes them, torch's scaled_dot_product_attention, and seqkern's. Beside them one LSTM layer of width 64,
from torch and from seqkern. Then the two fused ones in bfloat16, and seqkern's with a sliding window, whose work grows
with N alone. Each runs for N = 128, 256, ... while the budget lasts.

Forward and backward are timed apart, backward again and again on one kept graph. Times are medians of rounds in which
the implementations take turns, so that a slow moment of the machine hits all of them; what other work disturbed is
timed again, and marked if that does not help (examples/timing.py). Memory is that of a forward pass,
and of forward and backward together; it is measured apart from time, every point in a process of its own
(examples/memory.py). The exponent is the slope of a least-squares line in log-log over the upper part, N >= 1024, where
fixed costs no longer show, without the disturbed points where three others are left.

The share of GEMM is what attention reaches of the machine's speed: the operations that the visible scores need, over
that same time, beside the rate of the fastest large matrix product in the same dtype and the same run
(in float32 where the machine has no instructions for the dtype).

    python -m examples.quadratic_cost --budget 60
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
from torch.nn import functional as F

import seqkern
from examples.console import console, cost_table, progress, variants_table
from examples.memory import Task, peaks_in_fresh_processes
from examples.timing import Allowance, time_in_turns, time_undisturbed
from seqkern.ops.attention import cost

WIDTH = 64
WINDOW = 256  # with a sliding window a position sees itself and the 255 before it
# What is timed, and the passes whose memory belongs to it: what a forward pass keeps is the larger part of the peak.
PASSES = {"forward": "forward", "backward": "forward+backward"}
DIRECTIONS = tuple(PASSES)
MATERIALISED, WINDOWED = "materialised", "seqkern window"
# Fixed costs no longer show above these: the exponents are fitted to the points there.
ASYMPTOTIC_LENGTH = 1024
ASYMPTOTIC_BYTES = 4e6
# What materialised attention holds at its peak, for each of the N x N scores: a few float32 matrices and a mask.
BYTES_PER_SCORE = 20
# What has to hold: at this length seqkern stays under the one, and the N x N scores need more than the other.
REQUIRED_LENGTH = 8192
SEQKERN_LIMIT_BYTES = 64e6
MATERIALISED_LEAST_BYTES = 256e6
# The window's time has to grow more slowly, full attention's faster: between linear and quadratic, with room for noise.
WINDOW_LIMIT_EXPONENT = 1.4
# A product of two such matrices is large enough for the machine's full rate.
GEMM_SIZE = 2048
PROBE_SIZE = 128


def materialised_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """softmax(Q K^T / sqrt(d)) V with the scores of later keys at -inf: the equation, with every N x N tensor in it."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ value


def lstm_output(layer: torch.nn.LSTM, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]


ATTENTION: dict[str, Callable[..., Any]] = {
    MATERIALISED: materialised_attention,
    "torch SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
    "seqkern": partial(seqkern.scaled_dot_product_attention, is_causal=True),
    "torch SDPA bfloat16": partial(F.scaled_dot_product_attention, is_causal=True),
    "seqkern bfloat16": partial(seqkern.scaled_dot_product_attention, is_causal=True),
    WINDOWED: partial(seqkern.attention, causal=True, window=(WINDOW - 1, 0)),
}
LSTM: dict[str, type[torch.nn.LSTM]] = {"torch LSTM": torch.nn.LSTM, "seqkern LSTM": seqkern.nn.LSTM}
IMPLEMENTATIONS = (*ATTENTION, *LSTM)
# What is shown together: the same float32 attention beside the LSTMs, and what the fused ones make of the machine.
COMPARED = (MATERIALISED, "torch SDPA", "seqkern", *LSTM)
VARIANTS = tuple(name for name in ATTENTION if name != MATERIALISED)


@dataclass(frozen=True)
class Point:
    """One implementation at one length: seconds of the median, the fastest and the slowest round, and bytes (None: not
    measured).

    The bytes are those of `PASSES[direction]`: beside the time of backward, the peak of forward and backward together.
    """

    implementation: str
    direction: str
    length: int
    seconds: float
    fastest: float
    slowest: float
    rounds: int
    peak_bytes: int | None = None
    disturbed: bool = False  # other work changed the times, and again when they were repeated


def dtype_of(implementation: str) -> torch.dtype:
    return torch.bfloat16 if implementation.endswith("bfloat16") else torch.float32


def prepare(implementation: str, length: int, direction: str) -> Callable[[], object]:
    """The inputs made, the rest left to run: the work that is timed and whose memory is measured.

    "backward" has run forward as well, and goes back over its graph at every call.
    """
    torch.manual_seed(0)
    learns = direction != "forward"
    function: Callable[..., torch.Tensor]
    if implementation in ATTENTION:
        function, parameters, dtype = ATTENTION[implementation], [], dtype_of(implementation)
        inputs = [torch.randn(1, 1, length, WIDTH).to(dtype).requires_grad_(learns) for _ in range(3)]
    else:
        layer = LSTM[implementation](WIDTH, WIDTH, batch_first=True)
        function, parameters = partial(lstm_output, layer), list(layer.parameters())
        inputs = [torch.randn(1, length, WIDTH, requires_grad=learns)]
    cotangent = torch.randn_like(inputs[0])

    def forward() -> torch.Tensor:
        with torch.set_grad_enabled(learns):
            return function(*inputs)

    def backward(output: torch.Tensor, keep: bool) -> object:
        return torch.autograd.grad(output, [*inputs, *parameters], cotangent, retain_graph=keep)

    def both() -> object:
        output = forward()
        return output, backward(output, keep=False)

    if direction == "backward":
        return partial(backward, forward(), keep=True)
    return both if learns else forward


def prepare_warm(implementation: str, length: int, direction: str) -> Callable[[], object]:
    """As `prepare`, after one run at N = 64: thread pools and code generators have made what they keep."""
    prepare(implementation, 64, direction)()
    return prepare(implementation, length, direction)


def measure_times(lengths: Iterable[int], budget: float) -> Iterator[list[Point]]:
    """The timed points of each length in turn, within a budget of seconds.

    Up to N = 8192 every implementation runs, three rounds at least while the budget lasts. Beyond, the materialised one
    does not, the slowest are dropped until the rounds of the rest fit into what is left, and the series ends when none
    would. Repeating what was disturbed may take half of the budget again.
    """
    begin, previous, repeats = time.perf_counter(), 0, Allowance(budget / 2)
    fastest = dict.fromkeys(IMPLEMENTATIONS, 0.0)  # seconds of a round, both directions, at the length before
    for length in lengths:
        left = budget + (budget / 2 - repeats.left) - (time.perf_counter() - begin)
        running = list(fastest)
        if length**2 * BYTES_PER_SCORE > psutil.virtual_memory().available / 2 and MATERIALISED in running:
            running.remove(MATERIALISED)
        if length > REQUIRED_LENGTH:
            # Three rounds, at a cost that grows with the square of the length at most.
            growth = 3 * (length / previous) ** 2 if previous else 0.0
            running = sorted((name for name in running if name != MATERIALISED), key=lambda name: fastest[name])
            while running and growth * sum(fastest[name] for name in running) > left:
                running.pop()
            if not running:
                return
        points = []
        for direction in DIRECTIONS:
            works = {name: prepare(name, length, direction) for name in running}
            for name, timing in time_undisturbed(works, budget / 50, repeats, least=3 if left > 0 else 1).items():
                found = timing.seconds, timing.fastest, timing.slowest, len(timing.rounds)
                points.append(Point(name, direction, length, *found, disturbed=timing.disturbed))
        fastest = {name: sum(p.fastest for p in points if p.implementation == name) for name in running}
        previous = length
        yield points


def measure_memory(points: Sequence[Point]) -> Iterator[Point]:
    """The same points with their peak extra memory."""
    tasks = [
        Task(
            "examples.quadratic_cost:prepare_warm",
            {"implementation": p.implementation, "length": p.length, "direction": PASSES[p.direction]},
        )
        for p in points
    ]
    for point, peak in zip(points, peaks_in_fresh_processes(tasks), strict=True):
        yield replace(point, peak_bytes=peak)


def needed_flops(implementation: str, length: int, direction: str) -> int:
    """The floating-point operations that attention needs for the scores which its queries may see."""

    shape = (1, 1, length, length, WIDTH, dtype_of(implementation))
    window = (WINDOW - 1, 0) if implementation == WINDOWED else None
    return cost(*shape, causal=True, window=window, backward=direction == "backward").flops


def gemm_rates(size: int = GEMM_SIZE, products: int = 3) -> dict[str, float]:
    """Operations per second of the fastest of a few products of two square matrices, by dtype.

    A dtype for which the machine has no instructions can be calculated in float32: its rate is float32's where a small
    product of its own is slower, by far (torch's bfloat16 product without them takes a thousand times as long).
    """
    rates = {torch.float32: product_rate(torch.float32, size, products)}
    small = partial(product_rate, size=PROBE_SIZE, products=3)
    for dtype in map(dtype_of, VARIANTS):
        if dtype not in rates:
            has_instructions = small(dtype) > small(torch.float32) / 4
            rates[dtype] = product_rate(dtype, size, products) if has_instructions else rates[torch.float32]
    return {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()}


def product_rate(dtype: torch.dtype, size: int, products: int) -> float:
    """Operations per second of the fastest of some products of two square matrices."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    fastest = time_in_turns({"product": partial(torch.mm, a, b)}, budget=0.3, least=1, most=products)["product"].fastest
    return 2 * size**3 / fastest


def share_of_gemm(point: Point, rates: dict[str, float]) -> float | None:
    """What the median round reached of the rate of a matrix product; None of an LSTM, and without a rate."""
    rate = rates.get(str(dtype_of(point.implementation)).removeprefix("torch."))
    if rate is None or point.implementation not in ATTENTION:
        return None
    return needed_flops(point.implementation, point.length, point.direction) / point.seconds / rate


def fit_exponent(lengths: Sequence[float], values: Sequence[float]) -> float | None:
    """Slope of the least-squares line through (log length, log value); None with fewer than three points."""
    if len(lengths) < 3:
        return None
    return statistics.linear_regression([math.log(x) for x in lengths], [math.log(y) for y in values]).slope


def crossover(lengths: Sequence[int], a: Sequence[float], b: Sequence[float]) -> float | None:
    """The length at which `a`, cheaper before, begins to cost more than `b`; between points linear in log-log."""
    gaps = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    for i in range(len(gaps) - 1, 0, -1):
        if gaps[i - 1] < 0 <= gaps[i]:
            share = -gaps[i - 1] / (gaps[i] - gaps[i - 1])
            return math.exp(math.log(lengths[i - 1]) * (1 - share) + math.log(lengths[i]) * share)
    return None


def series(points: Iterable[Point], implementation: str, direction: str) -> list[Point]:
    chosen = [p for p in points if p.implementation == implementation and p.direction == direction]
    return sorted(chosen, key=lambda point: point.length)


def analyse(points: Sequence[Point], rates: dict[str, float]) -> dict[str, Any]:
    """Everything that the report shows, ready for JSON: points, exponents, crossovers, and what has to hold.

    `rates` are those of a matrix product, `gemm_rates`.
    """
    exponents = []
    for name in IMPLEMENTATIONS:
        for direction in DIRECTIONS:
            upper = [p for p in series(points, name, direction) if p.length >= ASYMPTOTIC_LENGTH]
            quiet = [p for p in upper if not p.disturbed]
            timed = quiet if len(quiet) >= 3 else upper
            large = [p for p in upper if p.peak_bytes and p.peak_bytes >= ASYMPTOTIC_BYTES]
            exponents.append(
                {
                    "implementation": name,
                    "direction": direction,
                    "time": fit_exponent([p.length for p in timed], [p.seconds for p in timed]),
                    "disturbed": any(p.disturbed for p in timed),
                    "memory": fit_exponent([p.length for p in large], [float(p.peak_bytes or 0) for p in large]),
                }
            )
    crossovers = []
    for attention, lstm in (("torch SDPA", "torch LSTM"), ("seqkern", "seqkern LSTM")):
        for direction in DIRECTIONS:
            a, b = (series(points, name, direction) for name in (attention, lstm))
            shared = min(len(a), len(b))
            at = crossover(
                [p.length for p in a[:shared]], [p.seconds for p in a[:shared]], [p.seconds for p in b[:shared]]
            )
            crossovers.append({"attention": attention, "lstm": lstm, "direction": direction, "length": at})
    return {
        "width": WIDTH,
        "window": WINDOW,
        "fitted_from_length": ASYMPTOTIC_LENGTH,
        "compared": COMPARED,
        "variants": VARIANTS,
        "memory_of": PASSES,
        "gemm": {"size": GEMM_SIZE, "flops_per_second": rates},
        "points": [asdict(point) | {"share_of_gemm": share_of_gemm(point, rates)} for point in points],
        "exponents": exponents,
        "crossovers": crossovers,
        "memory_check": memory_check(points),
        "window_check": window_check(points),
    }


def memory_check(points: Sequence[Point]) -> dict[str, Any] | None:
    """Whether attention at N = 8192 keeps the promised memory; None if that length was not measured."""
    peaks = {
        (p.implementation, p.direction): p.peak_bytes
        for p in points
        if p.length == REQUIRED_LENGTH and p.peak_bytes is not None
    }
    if not all((name, direction) in peaks for name in (MATERIALISED, "seqkern") for direction in DIRECTIONS):
        return None
    ours = {passes: peaks["seqkern", direction] for direction, passes in PASSES.items()}
    theirs = {passes: peaks[MATERIALISED, direction] for direction, passes in PASSES.items()}
    passed = max(ours.values()) < SEQKERN_LIMIT_BYTES and min(theirs.values()) > MATERIALISED_LEAST_BYTES
    return {"length": REQUIRED_LENGTH, "seqkern": ours, MATERIALISED: theirs, "passed": passed}


def window_check(points: Sequence[Point]) -> dict[str, Any] | None:
    """Whether the window's forward time grows with N alone, where full attention's does not.

    Fitted to the fastest rounds, which other programs disturb least. None if N = 8192 was not measured: a line through
    shorter lengths says little.
    """
    found = []
    for name in (WINDOWED, "seqkern"):
        upper = [p for p in series(points, name, "forward") if p.length >= ASYMPTOTIC_LENGTH]
        if not upper or upper[-1].length < REQUIRED_LENGTH:
            return None
        found.append(fit_exponent([p.length for p in upper], [p.fastest for p in upper]))
    window, full = found
    if window is None or full is None:
        return None
    passed = window < WINDOW_LIMIT_EXPONENT < full
    return {"limit": WINDOW_LIMIT_EXPONENT, "window": window, "full": full, "passed": passed}


def run_with_progress(longest: int, budget: float) -> dict[str, Any]:
    """Times, then measures memory; `budget` is the seconds for timing, memory takes about half as long again."""
    lengths = [2**k for k in range(7, longest.bit_length()) if 2**k <= longest]
    points: list[Point] = []
    rates = gemm_rates()
    with progress("cost of causal attention and LSTM: time", len(lengths)) as advance:
        for timed in measure_times(lengths, budget):
            points += timed
            # Again and again: the machine's best moment is what the attention of all lengths is held against.
            rates = {dtype: max(rate, rates[dtype]) for dtype, rate in gemm_rates().items()}
            advance(f"N = {timed[0].length}")
    with progress("cost of causal attention and LSTM: memory", len(points)) as advance:
        measured = []
        for point in measure_memory(points):
            measured.append(point)
            advance(f"{point.implementation}, N = {point.length}")
    return analyse(measured, rates)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=32768, help="longest sequence to try")
    parser.add_argument("--budget", type=float, default=45, help="seconds for the timing")
    options = parser.parse_args()
    result = run_with_progress(options.longest, options.budget)
    for direction in DIRECTIONS:
        console.print(cost_table(result, direction), variants_table(result, direction))
    for c in result["crossovers"]:
        at = "not in this range" if c["length"] is None else f"from N = {c['length']:.0f}"
        console.print(f"{c['attention']} costs more than {c['lstm']}, {c['direction']}: {at}")
