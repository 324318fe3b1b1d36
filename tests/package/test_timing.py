"""Times of works that take turns, on a clock that only they move."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from examples import timing


class Machine:
    """A clock, and works that take the next of their durations at every call; the last one stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.order: list[str] = []
        self.slow = iter(())
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.yardstick, "slowness", lambda: next(self.slow, 1.0))

    def work(self, name: str, *seconds: float) -> Callable[[], object]:
        durations: Iterator[float] = iter(seconds)

        def call() -> None:
            self.order.append(name)
            self.now += next(durations, seconds[-1])

        return call


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_works_take_turns(machine: Machine) -> None:
    timings = timing.time_in_turns({name: machine.work(name, 0.01) for name in "ab"}, budget=0.0, least=3, most=10)
    assert machine.order == ["a", "b"] * 3
    assert [len(found.rounds) for found in timings.values()] == [3, 3]


def test_what_is_short_has_more_rounds(machine: Machine) -> None:
    works = {"long": machine.work("long", 0.021), "short": machine.work("short", 0.002)}
    timings = timing.time_in_turns(works, budget=0.08, least=1, most=10)
    assert len(timings["long"].rounds) == 2  # half of the budget each
    assert len(timings["short"].rounds) == 10


def test_what_is_shorter_than_the_clock_runs_again_within_a_round(machine: Machine) -> None:
    timings = timing.time_in_turns({"a": machine.work("a", 9e-4, 1e-5)}, budget=0.0, least=3)
    assert timings["a"].rounds == pytest.approx([1e-5] * 3)  # the first call, a warm-up, does not count
    assert len(machine.order) == 1 + 3 * 2


def test_the_time_is_of_a_round_that_there_was() -> None:
    assert timing.Timing([4.0, 1.0, 2.0, 3.0]).seconds == 2.0


def test_what_was_disturbed_is_timed_again(machine: Machine) -> None:
    """One work, whose median round takes far longer than its fastest; the other one is left in peace."""
    works = {"a": machine.work("a", 0.01, 0.1, 0.1, 0.01), "b": machine.work("b", 0.02)}
    timings = timing.time_undisturbed(works, 0.0, timing.Allowance(10.0))
    assert machine.order == ["a", "b"] * 3 + ["a"] * 3
    assert timings["a"].seconds == pytest.approx(0.01)
    assert not any(found.disturbed for found in timings.values())


def test_a_machine_that_is_slow_for_a_whole_series_is_seen(machine: Machine) -> None:
    """All rounds are alike, and ten times too long: only the machine tells."""
    machine.slow = iter([9.0, 9.0, 9.0])
    timings = timing.time_undisturbed({"a": machine.work("a", 0.1, 0.1, 0.1, 0.01)}, 0.0, timing.Allowance(10.0))
    assert timings["a"].seconds == pytest.approx(0.01)
    assert not timings["a"].disturbed


def test_what_stays_disturbed_is_marked_and_the_quietest_series_counts(machine: Machine) -> None:
    durations = [0.01, 0.1, 0.1, 0.01, 0.03, 0.03, 0.01, 0.2, 0.2]
    timings = timing.time_undisturbed({"a": machine.work("a", *durations)}, 0.0, timing.Allowance(10.0))
    assert len(machine.order) == 3 * (1 + timing.REPEATS)
    assert timings["a"].disturbed
    assert timings["a"].rounds == pytest.approx([0.01, 0.03, 0.03])


def test_repeating_ends_with_its_allowance(machine: Machine) -> None:
    durations = [0.01, 0.1, 0.1] * 3
    allowance = timing.Allowance(0.35)
    timings = timing.time_undisturbed({"a": machine.work("a", *durations)}, 0.0, allowance)
    assert len(machine.order) == 3 * 2  # a third series would take longer than is left
    assert allowance.left == pytest.approx(0.35 - 0.21)
    assert timings["a"].disturbed


def test_the_yardstick_knows_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = iter([3.0, 2.0, 4.0, 6.0, 5.0, 8.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(timing, "seconds_of", lambda work: next(durations))
    yardstick = timing.Yardstick()
    assert [yardstick.slowness() for _ in range(4)] == [1.0, 2.5, 1.0, 2.0]
