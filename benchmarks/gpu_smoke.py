"""Stage 1 of a GPU run: every op, dtype and backend against float64, each in a process of its own with a time limit.

Rows are appended to smoke.jsonl as cases end, those that tell most first. Whatever ends the stage, its table comes.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_process import Deadline, Ended, Processes, environment, python

TO_START = 60.0  # seconds that a process may take before its case begins: imports, a GPU's context
TO_END = 5.0  # seconds of the stage that stay for its table

Row = dict[str, Any]

BACKENDS = {"cuda": ["triton", "cuda"], "cpu": ["cpu"]}
# As a cell of the table. `ok` in a row is True for the first, None for the last two, else False.
SHORT = {"passed": "ok", "wrong": "WRONG", "failed": "FAILED", "timed out": "TIME", "unavailable": "-", "not run": "."}
OK = {"passed": True, "unavailable": None, "not run": None}


@dataclass(frozen=True)
class Plan:
    """What stage 1 runs, and how."""

    ops: Sequence[str]
    dtypes: Sequence[str]
    backends: Sequence[str]
    device: str
    case_limit: float
    jobs: int
    file: str | None = None
    about: Row = field(default_factory=dict)  # the same in every row: card, versions, commit

    def cases(self, sizes: Sequence[str] = ()) -> list[tuple[str, str, str]]:
        """(op, dtype, backend), the most telling first.

        bfloat16 and float32 before the other types, in both the standard cases before the sizes beyond.
        """
        order = ["bfloat16", "float32", "float16", "float64"]
        ranked = [
            (order.index(dtype) // 2, op in sizes, order.index(dtype), self.ops.index(op), backend)
            for op in self.ops
            for dtype in self.dtypes
            for backend in self.backends
        ]
        ranked.sort(key=lambda each: each[:4])
        return [(self.ops[op], order[dtype], backend) for _, _, dtype, op, backend in ranked]


def smoke(
    plan: Plan,
    sizes: Sequence[str],
    out: Path,
    deadline: Deadline,
    say: Callable[[str], None],
    advance: Callable[[int], None],
) -> tuple[list[Row], bool]:
    """All rows, and whether an interrupt ended the stage. Says what is not right, and how many cases are done."""
    cases, rows, interrupted = plan.cases(sizes), [], False
    processes = Processes()
    with out.open("w") as file, ThreadPoolExecutor(plan.jobs) as pool:
        futures = {pool.submit(_one, plan, case, processes, deadline): case for case in cases}

        def keep(row: Row) -> None:
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

        try:
            for future in as_completed(futures):
                row = future.result()
                del futures[future]
                keep(row)
                if row["ok"] is False:
                    say(_line(row))
                advance(len(rows))
        except KeyboardInterrupt:
            interrupted = True
            processes.kill_all()
            for future, case in futures.items():
                if future.cancel() or not future.done():
                    keep(_row(plan, case, "not run", "interrupted", 0.0))
                else:
                    keep(future.result())
    return rows, interrupted


def _one(plan: Plan, case: tuple[str, str, str], processes: Processes, deadline: Deadline) -> Row:
    left = deadline.left() - TO_END
    if left <= 0:
        return _row(plan, case, "not run", "the stage's time was over", 0.0)
    limit = min(plan.case_limit + TO_START, left)
    command = python("-m", "benchmarks.gpu_case", *case, plan.device, plan.case_limit, *filter(None, [plan.file]))
    ended = processes.run(command, limit, environment(OMP_NUM_THREADS="1"))
    if ended is None:
        return _row(plan, case, "not run", "interrupted", 0.0)
    return _judge(plan, case, ended, cut=limit == left)


def _judge(plan: Plan, case: tuple[str, str, str], ended: Ended, cut: bool) -> Row:
    """The row of a process that ended; `cut`: its limit was the stage's."""
    if ended.late and cut:
        return _row(plan, case, "not run", "the stage's time was over before it ended", ended.seconds)
    if ended.late or re.search(r"^Timeout \(", ended.errors, re.MULTILINE):
        why = f"longer than {plan.case_limit:g} s, {_where(ended.errors)}"
        return _row(plan, case, "timed out", why, ended.seconds)
    written = [line for line in ended.output.splitlines() if line.startswith('{"outcome"')]
    if ended.code == 0 and written:
        found = json.loads(written[-1])
        return _row(plan, case, found.pop("outcome"), found.pop("why"), ended.seconds) | found
    if ended.code < 0:
        why = f"{signal.Signals(-ended.code).name}, {_where(ended.errors)}"
    else:
        why = f"exit code {ended.code}: {_last_words(ended.errors)}"
    return _row(plan, case, "failed", why, ended.seconds)


def _where(errors: str) -> str:
    """The innermost frames of a traceback by faulthandler."""
    frames = re.findall(r'^  File "(?:.*/)?([^/"]+)", line (\d+) in (\S+)', errors, re.MULTILINE)
    return "in " + (" < ".join(f"{function} ({file}:{line})" for file, line, function in frames[:6]) or "no frame")


def _last_words(errors: str) -> str:
    """The message at the end of a traceback."""
    lines = [line for line in errors.splitlines() if line.strip()]
    start = max((i for i, line in enumerate(lines) if line.startswith("  ")), default=-1) + 1
    return " ".join(lines[start:] or lines[-1:])[-600:] or "it wrote nothing"


def _row(plan: Plan, case: tuple[str, str, str], outcome: str, why: str, seconds: float) -> Row:
    op, dtype, backend = case
    return {
        "op": op, "dtype": dtype, "backend": backend, "device": plan.device, "ok": OK.get(outcome, False),
        "outcome": outcome, "why": why, "seconds": round(seconds, 1), **plan.about,
    }  # fmt: skip


# ---- the table -----------------------------------------------------------------------------------------------------


def table(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    """One line an op, one column a backend and dtype; then what is not right and why; then the counts."""
    cells = {(row["op"], row["backend"], row["dtype"]): row for row in rows}
    columns = [(backend, dtype) for backend in plan.backends for dtype in plan.dtypes]
    heads = [f"{backend} {dtype.replace('float', 'f')}" for backend, dtype in columns]
    wide = max(map(len, plan.ops), default=0)
    yield "largest error of each case as a share of its bound: above 1 is wrong"
    yield "  ".join([" " * wide, *(f"{head:>12}" for head in heads)])
    for op in plan.ops:
        yield "  ".join([f"{op:<{wide}}", *(f"{_cell(cells.get((op, *column))):>12}" for column in columns)])
    wrong = [row for row in rows if row["ok"] is False]
    yield from (_line(row)[:300] for row in wrong[:40])
    if len(wrong) > 40:
        yield f"and {len(wrong) - 40} more"
    reasons = Counter(f"{row['backend']}: {row['why']}" for row in rows if row["outcome"] == "unavailable")
    yield from (f"unavailable, {number}: {reason[:200]}" for reason, number in reasons.most_common(8))
    for backend in plan.backends:
        counts = Counter(row["outcome"] for row in rows if row["backend"] == backend)
        yield f"{backend}: " + (", ".join(f"{counts[name]} {name}" for name in SHORT if counts[name]) or "nothing")


def _cell(row: Row | None) -> str:
    if row is None:
        return SHORT["not run"]
    ratio = row.get("worst_error_to_bound")
    return SHORT[row["outcome"]] + (f" {float(ratio):.2g}" if ratio is not None else "")


def _line(row: Row) -> str:
    return f"{row['op']} {row['dtype']} {row['backend']} {row['outcome']}, {row['seconds']} s: {row['why']}"


def exit_code(plan: Plan, rows: Sequence[Row]) -> int:
    """1: something is not right, or a backend that was asked for ran nothing. 3: only part of it ran."""
    ran = {row["backend"] for row in rows if row["ok"] is not None}
    if any(row["ok"] is False for row in rows):
        return 1
    if any(row["outcome"] == "not run" for row in rows):
        return 3
    return 0 if ran.issuperset(plan.backends) else 1
