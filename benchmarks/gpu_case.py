"""One case of stage 1, in a process of its own: `python -m benchmarks.gpu_case OP DTYPE BACKEND DEVICE LIMIT [FILE]`.

Prints one line of JSON: whether every output and gradient keeps the error rule, and the largest error. A case that
raises ends the process with its traceback; one that takes longer than LIMIT seconds ends it with a traceback of where
it hangs. The cases are those of `seqkern.testing` and some sizes more, or those in `CASES` of a Python file.
"""

from __future__ import annotations

import faulthandler
import json
import math
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import seqkern
from seqkern.testing import CASES, Case, ErrorReport, attention_case, check_case, layer_norm_case, poison, rnn_case

DTYPES = {str(t).removeprefix("torch."): t for t in (torch.bfloat16, torch.float32, torch.float16, torch.float64)}

# What the standard cases leave out: other kernels, tiles and tiers, and the edges between them.
SIZES: dict[str, Case] = {
    **{f"attention_d{d}": attention_case(300, head_dim=d) for d in (128, 256, 72, 1)},
    **{f"layer_norm_{n}": layer_norm_case(130, n) for n in (768, 8192, 16384)},
    **{f"{cell}_{hidden}": rnn_case(cell, 17, 9, 32, hidden) for hidden in (64, 128, 256) for cell in ("lstm", "gru")},
}


def cases_of(file: str | None) -> Mapping[str, Case]:
    """All cases by name, those that tell most first."""
    return runpy.run_path(file)["CASES"] if file else CASES | SIZES


def run(case: Case, dtype: torch.dtype, backend: str, device: str) -> dict[str, Any]:
    """The outcome of a case and, where it ran, the tensor whose error is the largest share of its bound."""
    torch.manual_seed(0)
    try:
        with seqkern.use_backend(backend), poison():
            reports = check_case(case, dtype, device=device)
    except NotImplementedError as error:  # the backend says that it has no such kernel
        return {"outcome": "unavailable", "why": str(error)}
    failed = [str(report) for report in reports if not report.passed]
    worst = max(reports, key=lambda report: (not report.passed, _number(error_to_bound(report))))
    ratio = error_to_bound(worst)
    return {
        "outcome": "wrong" if failed else "passed",
        "why": "; ".join(failed),
        "worst_error_to_bound": ratio if math.isfinite(ratio) else str(ratio),
        "worst_tensor": worst.name,
    }


def error_to_bound(report: ErrorReport) -> float:
    """Its error as a share of its bound: above 1 it is wrong; NaN where the result is."""
    if report.bound == 0:
        return 0.0 if report.error == 0 else math.inf
    return report.error / report.bound


def _number(ratio: float) -> float:
    return math.inf if math.isnan(ratio) else ratio


def main(arguments: Sequence[str]) -> None:
    op, dtype, backend, device, limit, *file = arguments
    faulthandler.enable()  # a signal ends the process with a traceback
    case = cases_of(file[0] if file else None)[op]
    with poison():  # what a GPU takes to begin, and what torch imports late, is not the case's time
        torch.zeros(1, device=device)
    faulthandler.dump_traceback_later(float(limit), exit=True)
    row = run(case, DTYPES[dtype], backend, device)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
