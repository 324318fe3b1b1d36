"""Peak extra memory of a piece of work: what it needs on top of its inputs, as the operating system sees it.

torch keeps no count of CPU memory, so the resident set of the process is the measure. Three things make it trustworthy:

- Every measurement has a process of its own, forked from one that has imported torch and done nothing else: no buffer
  that an earlier measurement left behind can hide what this one needs.
- glibc is told to take every allocation over 64 kB from the kernel and to give it back at once when it is freed
  (mallopt), and to give back what is free already (malloc_trim) before the measurement starts; so is seqkern.
- Linux keeps the peak itself (VmHWM in /proc/self/status) and resets it on request (/proc/self/clear_refs), so no peak
  is missed. Elsewhere a thread samples the resident set every millisecond.

The resolution is about half a megabyte: page counts are kept per thread and added up lazily.

    python -m examples.memory          measures known allocations
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import seqkern

ROOT = Path(__file__).parent.parent
MEGABYTE = 1e6
M_MMAP_THRESHOLD = -3  # glibc's malloc.h
LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class Task:
    """Work to measure: `function` ("module:name") called with `arguments` prepares the inputs and returns the work.

    `read`, a function too, is called with the arguments before the process is forked: what it loads and keeps is there
    for all tasks.
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    read: str | None = None

    def prepare(self) -> Callable[[], object]:
        return _named(self.function)(**self.arguments)


def _named(function: str) -> Callable[..., Any]:
    module, name = function.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def peak_extra_memory(work: Callable[[], object]) -> int:
    """Bytes by which the resident set of this process grows, at its highest, while `work` runs."""
    return_free_memory()
    peak = _linux_peak(work) if LINUX and _reset_linux_peak() else _sampled_peak(work)
    return max(0, peak)


def peaks_in_fresh_processes(tasks: Sequence[Task]) -> Iterator[int | None]:
    """`peak_extra_memory` of every task in a process of its own, in order; None where the system killed it (memory)."""
    groups = [list(tasks)] if LINUX else [[task] for task in tasks]  # forking is safe on Linux alone
    for group in groups:
        command = [sys.executable, "-m", "examples.memory", json.dumps([asdict(task) for task in group])]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _, line in zip(group, process.stdout, strict=False):
                yield json.loads(line)
            if process.wait() != 0:
                raise RuntimeError(f"the memory measurement failed with exit status {process.returncode}")


def return_free_memory() -> None:
    """Makes seqkern, and glibc now and from now on, hand everything that is free back to the system."""
    seqkern.release_memory()
    if LINUX:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
            libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
            libc.malloc_trim(0)


def _reset_linux_peak() -> bool:
    """Sets VmHWM to the present resident set; False where the kernel does not offer that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _linux_peak(work: Callable[[], object]) -> int:
    before = _status_bytes("VmRSS")
    result = work()
    peak = _status_bytes("VmHWM") - before
    del result  # alive until the peak is read: results count
    return peak


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _sampled_peak(work: Callable[[], object]) -> int:
    process, done = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    samples = [before]

    def sample() -> None:
        while not done.wait(0.001):
            samples[0] = max(samples[0], process.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        result = work()
    finally:
        done.set()
        sampler.join()
    samples[0] = max(samples[0], process.memory_info().rss)
    del result
    return samples[0] - before


def _serve(tasks: list[Task]) -> None:
    """Measures every task and prints one JSON line for each; with several tasks, each in a fork of this process."""
    # torch imports the second one (with sympy) at the first backward: here once, and not in every fork.
    for module in (*(task.function.split(":")[0] for task in tasks), "torch.fx.experimental.symbolic_shapes"):
        importlib.import_module(module)
    if len(tasks) == 1:
        print(json.dumps(peak_extra_memory(tasks[0].prepare())), flush=True)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process with torch's worker threads must not be forked
    for task in tasks:
        if task.read:
            _named(task.read)(**task.arguments)
    for task in tasks:
        child = os.fork()
        if child == 0:
            # Whatever happens, the child ends here: it must not go on with its parent's loop.
            status = 1
            try:
                torch.set_num_threads(threads)
                print(json.dumps(peak_extra_memory(task.prepare())), flush=True)
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            print(json.dumps(None), flush=True)  # most likely the kernel, short of memory
        elif os.WEXITSTATUS(status) != 0:
            raise SystemExit(f"{task.function}({task.arguments}) failed")


def allocate(megabytes: float) -> Callable[[], object]:
    """A task with a known answer: writes that much memory."""
    return lambda: bytearray(b"x") * int(megabytes * MEGABYTE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _serve([Task(**task) for task in json.loads(sys.argv[1])])
    else:
        sizes = (1.0, 10.0, 100.0, 1000.0)
        known = [Task("examples.memory:allocate", {"megabytes": size}) for size in sizes]
        for size, peak in zip(sizes, peaks_in_fresh_processes(known), strict=True):
            print(
                f"{size:6.0f} MB allocated: " + (f"{peak / MEGABYTE:.1f} MB measured" if peak is not None else "killed")
            )
