"""What a run of the benchmarks shows while it lasts, and which cases a quick one takes: plugins for pytest."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import pytest


class Progress:
    """A line for each case: how many are done, for how long, what was found, and what is left at this pace."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.begin = 0.0
        self.found = ""
        self.reporter: Any = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """From here on the first Ctrl-C ends the run after the case that runs now, and the second one at once."""

        def stop(number: int, frame: Any) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            session.shouldstop = "Ctrl-C"
            print("\nstopping after this case (Ctrl-C again: now)", file=sys.stderr, flush=True)

        signal.signal(signal.SIGINT, stop)
        self.reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        self.total, self.begin = len(session.items), time.perf_counter()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """In a terminal also what runs now: one case can take a minute."""
        self.found = ""
        if self.reporter.isatty:
            self.reporter.rewrite(f"[{self.done + 1}/{self.total}] {_name(nodeid)} ...", erase=True)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        yield
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        if call.when == "call" and benchmark is not None:
            self.found = describe(benchmark.extra_info)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: the lines below say it."""
        ended = _ended(report)
        return ("" if ended is None else ended, "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ended = _ended(report)
        if ended is None:
            return
        self.done += 1
        spent = time.perf_counter() - self.begin
        left = spent / self.done * (self.total - self.done)
        line = (
            f"[{self.done}/{self.total}] {_name(report.nodeid)}: {self.found if ended == 'passed' else ended.upper()}"
        )
        line += f"  ({_minutes(spent)}, about {_minutes(left)} left)" if self.done < self.total else ""
        if self.reporter.isatty:
            self.reporter.rewrite("", erase=True)
            self.reporter.rewrite("")
        self.reporter.write_line(line, red=ended == "failed")


class Sample:
    """Of each test the middle one of its cases, in every dtype and mode."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        groups: dict[tuple[str, ...], list[pytest.Item]] = {}
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            kept = (str(params.get(name)) for name in ("dtype", "mode", "backend"))
            groups.setdefault((item.nodeid.partition("[")[0], *kept), []).append(item)
        chosen = [group[len(group) // 2] for group in groups.values()]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def describe(info: dict[str, Any]) -> str:
    """A case in a few words: seqkern's time, and how many times faster it was than each peer."""
    if "peers" not in info:
        return ""
    ratios = (f"{peer['speedup']:.2f}x {name}" for name, peer in info["peers"].items())
    return ", ".join([f"{info['milliseconds']:.3g} ms", *ratios])


def _ended(report: pytest.TestReport) -> str | None:
    """How the case ended, if this is the report that says so: "passed", "failed" or "skipped"."""
    if report.when == "call" or (report.when == "setup" and not report.passed) or report.failed:
        return report.outcome
    return None


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2].removeprefix("test_")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
