"""Every op in every dtype and every kernel tier of this machine: its error beside torch's own.

The oracle is the op's equation in float64 on the same rounded inputs. The rule (seqkern.testing.compare): no output and
no gradient may be further from it than twice torch's error in the same dtype, plus two units of the dtype.

    python -m examples.verification
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from examples.console import console, progress, verification_table
from seqkern import _library
from seqkern.testing import CASES, verify

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def kernels() -> list[tuple[str, dict[str, Any]]]:
    """The kernels that can run here, with the arguments of `verify` that force them."""
    found: list[tuple[str, dict[str, Any]]] = [(f"C++ {isa}", {"isa": isa}) for isa in _library.available_isas()]
    if torch.cuda.is_available() and _library.has_triton():
        found.append(("Triton", {"backend": "triton", "device": "cuda"}))
    return found


def cases() -> list[tuple[str, torch.dtype, str, dict[str, Any]]]:
    return [(op, dtype, name, options) for op in CASES for dtype in DTYPES for name, options in kernels()]


def run() -> Iterator[dict[str, Any]]:
    """One row for each case: the report of every tensor, and the one that comes closest to its bound."""
    for op, dtype, kernel, options in cases():
        reports = [asdict(report) for report in verify(op, dtype, **options)]
        for report in reports:
            report["name"] = report["name"].removeprefix(f"{op} ")
            report["share_of_bound"] = report["error"] / report["bound"] if report["bound"] else 0.0
        # A failure is the worst, whatever its numbers (they may be NaN).
        worst = max(reports, key=lambda report: (not report["passed"], report["share_of_bound"]))
        yield {
            "op": op,
            "dtype": str(dtype).removeprefix("torch."),
            "kernel": kernel,
            "passed": all(report["passed"] for report in reports),
            "worst": worst,
            "tensors": reports,
        }


def run_with_progress() -> list[dict[str, Any]]:
    rows = []
    with progress("verification", len(cases())) as advance:
        for row in run():
            rows.append(row)
            advance(f"{row['op']} {row['dtype']} {row['kernel']}")
    return rows


if __name__ == "__main__":
    rows = run_with_progress()
    console.print(verification_table(rows))
    raise SystemExit(0 if all(row["passed"] for row in rows) else 1)
