"""Times of works that take turns, and whether other work on the machine disturbed them.

A time is disturbed where its rounds say so (the median is far above the fastest) or the machine does: a small product,
the same after every turn, takes far longer than it once took in this process. What is disturbed is timed again, and
marked if that does not help.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Work = Callable[[], object]

# The median over the fastest, and the machine's slowness, from which times say little.
DISTURBED = 1.5
REPEATS = 2
# What is shorter is called again and again within a round.
ROUND_SECONDS = 1e-3
YARDSTICK_SIZE = 256


@dataclass(frozen=True)
class Timing:
    """Seconds of a call in every round, and how much slower than at its best the machine was meanwhile."""

    rounds: list[float]
    slowness: float = 1.0

    @property
    def seconds(self) -> float:
        """Of the median round: one that there was, not the mean of two."""
        return statistics.median_low(self.rounds)

    @property
    def fastest(self) -> float:
        return min(self.rounds)

    @property
    def slowest(self) -> float:
        return max(self.rounds)

    @property
    def disturbance(self) -> float:
        """Near 1 where nothing disturbed."""
        return max(self.slowness, self.seconds / self.fastest)

    @property
    def disturbed(self) -> bool:
        return self.disturbance > DISTURBED


class Yardstick:
    """A small calculation, always the same, that tells how fast the machine is just now."""

    def __init__(self) -> None:
        self.best = math.inf

    def slowness(self) -> float:
        """How many times longer than at its best it takes."""
        matrix = torch.ones(YARDSTICK_SIZE, YARDSTICK_SIZE)
        now = min(seconds_of(lambda: matrix @ matrix) for _ in range(3))
        self.best = min(self.best, now)
        return now / self.best


yardstick = Yardstick()


def seconds_of(work: Work, calls: int = 1) -> float:
    """Of one call, the mean of so many."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def time_in_turns(works: Mapping[str, Work], budget: float, least: int = 3, most: int = 30) -> dict[str, Timing]:
    """Rounds of every work in turns, A B C A B C, until each has spent its share of the budget of seconds.

    So what is short has more rounds: a moment that another program takes would be most of its time.
    """
    rounds: dict[str, list[float]] = {name: [] for name in works}
    calls = dict.fromkeys(works, 1)
    slowness: dict[str, list[float]] = {name: [] for name in works}
    for done in range(most):
        turn = [n for n in works if done < least or sum(rounds[n]) * calls[n] < budget / len(works)]
        for name in turn:
            first = seconds_of(works[name], calls[name])
            if done == 0 and first < ROUND_SECONDS:
                # Too short for the clock, and a warm-up besides: this call does not count, and rounds have several.
                calls[name] = min(1000, math.ceil(ROUND_SECONDS / max(first, 1e-9)))
                first = seconds_of(works[name], calls[name])
            rounds[name].append(first)
        now = yardstick.slowness()
        for name in turn:
            slowness[name].append(now)
    return {name: Timing(rounds[name], statistics.median(slowness[name])) for name in works}


@dataclass
class Allowance:
    """Seconds that repeating may still take."""

    left: float


def time_undisturbed(
    works: Mapping[str, Work], budget: float, allowance: Allowance, least: int = 3, most: int = 30
) -> dict[str, Timing]:
    """As `time_in_turns`; what was disturbed is timed again while the allowance lasts.

    Of each work the series counts that was disturbed least.
    """
    timings = time_in_turns(works, budget, least, most)
    for _ in range(REPEATS):
        again = {name: works[name] for name, timing in timings.items() if timing.disturbed}
        if not again or least * sum(timings[name].seconds for name in again) > allowance.left:
            break
        start = time.perf_counter()
        for name, timing in time_in_turns(again, budget * len(again) / len(works), least, most).items():
            timings[name] = min(timings[name], timing, key=lambda timing: timing.disturbance)
        allowance.left -= time.perf_counter() - start
    return timings
