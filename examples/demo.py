"""The main job: what this machine runs, whether it is right, what attention costs, and four systems that learn.

Six parts, each also a program of its own: which kernel runs (python -m seqkern), examples.verification,
examples.quadratic_cost, examples.recurrent_cost, four systems of the gallery (examples.gallery has them all),
examples.report. About five minutes on two cores; ends with the path of a report that shows everything. Exits with 1
when a check fails.

    python -m examples.demo --text mybook.txt --out report
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path
from typing import Any

import torch

import seqkern
from examples import gallery, gpt, quadratic_cost, recurrent_cost, report, runner, text, verification
from examples.console import (
    checks_table,
    console,
    cost_table,
    kernels_table,
    machine_table,
    recurrent_table,
    sweep_table,
    systems_table,
    variants_table,
    verification_summary,
)
from seqkern import _explain, _slices

# Of the budget, the share that goes to timing attention and LSTM; the other parts do a fixed amount of work.
COST_SHARE = 0.08
RECURRENT_SECONDS = 4.0
# Steps of a twin, which tell whether losses agree, and times and memory; the gallery trains it to the end.
TWIN_STEPS = 100
QUICK_STEPS, QUICK_LONGEST, QUICK_CASES = 20, 1024, 40
SYSTEMS = ("gpt", "seq2seq", "tree_classifier", "vit")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    try:
        corpus = text.load(options.text)
    except (OSError, ValueError) as error:
        console.print(f"--text: {error}", style="red", highlight=False, soft_wrap=True)
        return 2

    machine, choices = _explain.describe_machine(), _explain.by_reason(map(seqkern.explain, _slices.FUNCTIONS))
    kernels = [{"ops": ops, "kernel": kernel, "reason": reason} for ops, kernel, reason in choices]
    console.print(machine_table(machine), kernels_table(kernels))
    if (share := processor_share()) < 0.8:
        console.print(
            f"Other programs use this machine: a calculation on {torch.get_num_threads()} threads got {share:.0%} of "
            "their time. Expect a longer run, and times below that say little.",
            style="yellow",
        )

    verified = verification.run_with_progress()
    sweep = verification.mean_sweep()
    console.print(verification_summary(verified), sweep_table(sweep))
    drawn = verification.random_options(QUICK_CASES if options.quick else verification.RANDOM_CASES)

    longest = QUICK_LONGEST if options.quick else options.longest
    cost = quadratic_cost.run_with_progress(longest, 2.0 if options.quick else COST_SHARE * options.budget)
    for direction in quadratic_cost.DIRECTIONS:
        console.print(cost_table(cost, direction), variants_table(cost, direction))

    recurrent = recurrent_cost.run_with_progress(1.0 if options.quick else RECURRENT_SECONDS)
    console.print(recurrent_table(recurrent))

    steps = QUICK_STEPS if options.quick and options.steps is None else options.steps
    chapters = []
    for name in SYSTEMS:
        system = gpt.System(corpus) if name == gpt.System.name else runner.load(name)
        chapters.append(gallery.chapter(system, (0,), steps, variants=False, twin_steps=TWIN_STEPS))
    trained = [record for chapter in chapters for record in chapter["records"]]
    console.print(systems_table(trained))

    checks = all_checks(verified, sweep, cost, trained)
    checks.insert(
        1,
        {
            "name": f"random options: at most 1% of {drawn['cases']} sets break the error bound, 4-fold at most",
            "found": f"{drawn['violations']}, the worst at {drawn['worst_share']:.2f} of its bound",
            "passed": drawn["passed"],
        },
    )
    took = time.perf_counter() - begin
    page = report.write(
        {
            "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "version": seqkern.__version__,
            "quick": options.quick,
            "seconds": took,
            "machine": machine,
            "kernels": kernels,
            "verification": verified,
            "mean_sweep": sweep,
            "random_options": drawn,
            "cost": cost,
            "recurrent": recurrent,
            "chapters": chapters,
            "checks": checks,
        },
        options.out,
    )
    console.print(checks_table(checks))
    console.print(f"{took:.0f} s. The report: {page.resolve()}", soft_wrap=True, highlight=False)
    return 0 if all(check["passed"] for check in checks) else 1


def processor_share(duration: float = 0.3) -> float:
    """How much of its threads' time a calculation gets just now: near 1 where nothing else works."""
    matrix = torch.randn(512, 512)
    wall, processor = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < duration:
        matrix @ matrix
    return (time.process_time() - processor) / (time.perf_counter() - wall) / torch.get_num_threads()


def all_checks(
    verified: list[dict[str, Any]], sweep: list[dict[str, Any]], cost: dict[str, Any], trained: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Everything that decides the exit status."""
    failed = sum(not row["passed"] for row in verified)
    checks = [
        {
            "name": f"verification: {len(verified)} cases keep the error bound",
            "found": "all" if failed == 0 else f"{failed} do not",
            "passed": failed == 0,
        }
    ]
    worst = max(error for row in sweep for error, _ in row["errors"].values())
    checks.append(
        {
            "name": f"layer norm: relative error under {verification.SWEEP_LIMIT:.0e} at every mean and spread",
            "found": f"{worst:.1e}",
            "passed": all(row["passed"] for row in sweep),
        }
    )
    if memory := cost["memory_check"]:
        checks.append(
            {
                "name": f"attention at N = {memory['length']}: seqkern needs under 64 MB, the N x N scores over 256 MB",
                "found": f"{max(memory['seqkern'].values()) / 1e6:.0f} MB, "
                f"{min(memory['materialised'].values()) / 1e6:.0f} MB",
                "passed": memory["passed"],
            }
        )
    if window := cost["window_check"]:
        checks.append(
            {
                "name": f"attention's time grows as N^a: a under {window['limit']:g} with a window, over it without",
                "found": f"{window['window']:.2f}, {window['full']:.2f}",
                "passed": window["passed"],
            }
        )
    return checks + [check for result in trained for check in result["checks"]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="learn from this file (default: Python's documentation)"
    )
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIRECTORY", help="default: report")
    parser.add_argument("--quick", action="store_true", help="a minute: short sequences, few training steps")
    parser.add_argument(
        "--budget", type=float, default=240, metavar="SECONDS",
        help="for the whole job; decides how long the sequences get, the rest is fixed (default: 240)",
    )  # fmt: skip
    parser.add_argument("--longest", type=int, default=32768, metavar="N", help="longest sequence (default: 32768)")
    parser.add_argument("--steps", type=int, help="training steps of each model, instead of the recipes'")
    parser.add_argument("--threads", type=int, help="threads for torch and seqkern (default: torch's choice)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        console.print("Stopped. The report is written at the end: --quick or fewer --steps get there sooner.")
        raise SystemExit(130) from None
