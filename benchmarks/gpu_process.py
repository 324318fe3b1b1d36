"""Processes with a time limit, for the stages of a GPU run: one that is ended takes all that it started along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATIENCE = 15.0  # seconds from an interrupt to a kill


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = time.monotonic(), seconds

    def left(self) -> float:
        return self._seconds - self.passed()

    def passed(self) -> float:
        return time.monotonic() - self._began


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: a signal), whether it was ended by its limit, what it wrote."""

    code: int
    late: bool
    output: str
    errors: str
    seconds: float


class Processes:
    """Runs commands, from several threads at a time; `kill_all` ends those that run and lets no other begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def run(self, command: Sequence[str], limit: float, environment: Mapping[str, str]) -> Ended | None:
        """None: `kill_all` came first. What a killed process could not be made to let go of is left behind."""
        began = time.monotonic()
        with self._lock:
            if self._closed:
                return None
            process = start(command, environment, subprocess.PIPE)
            self._running.add(process)
        late = False
        try:
            output, errors = process.communicate(timeout=max(limit, 0.1))
        except subprocess.TimeoutExpired:
            late = True
            kill(process)
            try:
                output, errors = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                output, errors = "", f"still there {PATIENCE:.0f} s after it was killed"
        finally:
            with self._lock:
                self._running.discard(process)
        if self._closed:
            return None
        code = -signal.SIGKILL if process.returncode is None else process.returncode
        return Ended(code, late, output, errors, time.monotonic() - began)

    def kill_all(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                kill(process)


def start(command: Sequence[str], environment: Mapping[str, str], errors: int) -> subprocess.Popen[str]:
    """A process, leader of a group of its own, in the repository's root."""
    return subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip


def kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # its end was not waited for yet


def follow(
    command: Sequence[str], limit: float, environment: Mapping[str, str], on_line: Callable[[str], None]
) -> tuple[int, bool]:
    """Runs a command and passes on every line as it comes; the exit code, and whether the limit came first.

    At the limit it is interrupted as by ctrl-c, so that it can write what it has; `PATIENCE` later it is killed.
    """
    process = start(command, environment, subprocess.STDOUT)
    late = threading.Event()

    def interrupt() -> None:
        late.set()
        process.send_signal(signal.SIGINT)

    timers = [threading.Timer(limit, interrupt), threading.Timer(limit + PATIENCE, kill, [process])]
    for timer in timers:
        timer.daemon = True
        timer.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            on_line(line.rstrip("\n"))
        return process.wait(), late.is_set()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            kill(process)
        raise
    finally:
        for timer in timers:
            timer.cancel()
        kill(process)  # what it left behind in its group


def environment(**settings: str) -> dict[str, str]:
    """This process's, with the repository first on the path of modules."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | settings


def python(*arguments: object) -> list[str]:
    return [sys.executable, *map(str, arguments)]
