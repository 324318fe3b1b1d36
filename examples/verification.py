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

from examples.console import console, progress, sweep_table, verification_table
from seqkern import _library, _slices
from seqkern.testing import CASES, check_case, layer_norm_case, verify
from seqkern.testing.random_options import outcomes, summarise

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def kernels(op: str, dtype: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
    """The kernels of `op` that can run here, with the arguments of `verify` that force them."""
    function = op.removesuffix("_options")
    slice = _slices.FUNCTIONS[function]
    own = slice.own_bf16 and dtype == torch.bfloat16
    isas = [isa for isa in _library.available_isas() if own or isa not in _library.BF16_ISAS]
    found: list[tuple[str, dict[str, Any]]] = [(f"C++ {isa}", {"isa": isa}) for isa in isas]
    if torch.cuda.is_available():
        names = {"triton": "Triton", "cuda": "CUDA C++"}
        for backend in _library.gpu_backends(slice.name):
            found.append((names[backend], {"backend": backend, "device": "cuda"}))
    return found


def cases() -> list[tuple[str, torch.dtype, str, dict[str, Any]]]:
    return [(op, dtype, name, options) for op in CASES for dtype in DTYPES for name, options in kernels(op, dtype)]


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


# Layer norm of float32 rows whose mean is large beside their spread.
SWEEP_MEANS, SWEEP_STDS, SWEEP_COLUMNS, SWEEP_LIMIT = (0.0, 1e2, 1e3, 1e4), (1.0, 0.01), 1024, 3e-7


def mean_sweep() -> list[dict[str, Any]]:
    """Layer norm's relative L2 errors against float64, seqkern's and torch's, by mean and standard deviation."""
    rows = []
    for std in SWEEP_STDS:
        for mean in SWEEP_MEANS:
            case = layer_norm_case(64, SWEEP_COLUMNS, mean=mean, std=std)
            reports = {report.name: report for report in check_case(case, torch.float32)}
            rows.append(
                {
                    "mean": mean,
                    "std": std,
                    "errors": {name: [r.relative_l2, r.torch_relative_l2] for name, r in reports.items()},
                    "passed": all(r.relative_l2 < SWEEP_LIMIT for r in reports.values()),
                }
            )
    return rows


def run_with_progress() -> list[dict[str, Any]]:
    rows = []
    with progress("verification", len(cases())) as advance:
        for row in run():
            rows.append(row)
            advance(f"{row['op']} {row['dtype']} {row['kernel']}")
    return rows


RANDOM_CASES = 600


def random_options(count: int = RANDOM_CASES) -> dict[str, Any]:
    """The error rule on ops, options, sizes and dtypes drawn at random: how many break it, and by how much."""
    found = []
    with progress("random options", count) as advance:
        for outcome in outcomes(count):
            found.append(outcome)
            advance(outcome.case.op)
    summary = summarise(found)
    verdict = "passed" if summary.passed else "FAILED"
    console.print(f"{summary}; 1% may, 4-fold at most: {verdict}", markup=False, highlight=False)
    return asdict(summary) | {"passed": summary.passed}


if __name__ == "__main__":
    rows = run_with_progress()
    sweep = mean_sweep()
    console.print(verification_table(rows), sweep_table(sweep))
    drawn = random_options()
    raise SystemExit(0 if all(row["passed"] for row in [*rows, *sweep, drawn]) else 1)
