"""Results as the demo would have them, made up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from examples import gallery, page, plots, quadratic_cost, runner
from examples.quadratic_cost import DIRECTIONS, IMPLEMENTATIONS, Point


def synthetic_points() -> list[Point]:
    """Attention quadratic, LSTM and the window linear; only the materialised version needs N x N memory."""
    points = []
    for length in (1024, 2048, 4096, 8192):
        for name in IMPLEMENTATIONS:
            for direction in DIRECTIONS:
                linear = "LSTM" in name or name == quadratic_cost.WINDOWED
                seconds = 1e-6 * length if linear else 5e-10 * length**2
                peak = 12 * length**2 if name == "materialised" else 1024 * length
                points.append(Point(name, direction, length, seconds, seconds, seconds, 3, peak))
    return points


RATES = {"float32": 1e12, "bfloat16": 4e12}


def trained(metric: float, seconds: float, disturbed: bool = False, apart: float = 0.0) -> dict[str, Any]:
    """What is kept of one version's training of 120 steps."""
    losses = [6.0 - 0.01 * step + apart for step in range(120)]
    return {
        "steps": 120, "losses": losses, "evaluations": [(120, metric)], "metric": metric, "seconds": seconds,
        "step_seconds": seconds / 120, "disturbed": disturbed,
    }  # fmt: skip


def synthetic_chapter(seeds: int = 2) -> gallery.Chapter:
    """A system whose second version is 1.25 times as fast, needs less memory, and beats one of two baselines."""
    found = [
        {
            "seed": seed, "tokens": 12000, "speed_ratio": 1.25, "speed_quartiles": (1.2, 1.3), "early": 1e-7,
            "runs": {
                "torch": trained(2.5 + seed / 10, 2.5, disturbed=True),
                "seqkern": trained(2.6 + seed / 10, 2.0, apart=1e-6),
            },
        }
        for seed in range(seeds)
    ]  # fmt: skip
    record = {
        "system": "made_up", "variant": "small", "title": "Made up", "parameters": 1000,
        "recipe": vars(runner.Recipe(120, 1e-3)), "shortened": False, "metric": "bits per byte",
        "higher_is_better": False, "against": "zlib", "margin": 0.1, "target": 3.0, "tolerance": 0.2, "loss": "bits",
        "baselines": {"zlib": 3.2, "lzma": 1.8}, "seeds": found, "checks": [],
        "peak_bytes": {"torch": 7_000_000, "seqkern": 3_500_000},
    }  # fmt: skip
    alone = {"seed": 0, "tokens": 12000, "runs": {"seqkern": trained(2.2, 4.0)}}
    other = record | {"variant": "large", "parameters": 2000, "seeds": [alone], "peak_bytes": {}}
    text = [("<script>", "soft"), ("alert & end", "")]
    shown = [
        gallery.drawn(runner.Exhibit("Written", "a <note>", text=text)),
        gallery.drawn(runner.Exhibit("A table", table=[["word", "<b>"], ["x", "y & z"]])),
        gallery.drawn(runner.Exhibit("A picture", "of it", plots.curves_figure(record))),
    ]
    return {
        "name": "made_up", "title": "Made up", "about": "Nothing.", "data": "none", "tokens": "bytes",
        "records": [record, other], "exhibits": shown, "curves": page.svg(plots.curves_figure(record)),
    }  # fmt: skip


def distinct() -> Iterator[float]:
    """Numbers that all differ in their first two digits or their power of ten."""
    for power in itertools.count():
        yield from (digits * 10.0 ** -(9 + power) for digits in range(10, 100))


def verified() -> list[dict[str, Any]]:
    """Every op in every dtype, with kernels that only some of them have, one op that lacks a dtype, and one failure."""
    numbers, rows = distinct(), []
    for op, dtype in itertools.product(("attention", "layer_norm", "lstm"), ("float32", "bfloat16", "float16")):
        kernels = ["C++ generic", "C++ avx2"]
        if dtype == "bfloat16" and op != "layer_norm":
            kernels += ["C++ avx512bf16", "C++ amx"]
        kernels += ["Triton"] if op != "lstm" else []
        if (op, dtype) == ("lstm", "float16"):
            continue
        for kernel in kernels:
            failed = (op, dtype, kernel) == ("layer_norm", "bfloat16", "Triton")
            tensors = [
                {"name": name, "error": next(numbers), "torch_error": next(numbers), "unit": 1e-8, "bound": 4e-7,
                 "relative_l2": next(numbers), "torch_relative_l2": next(numbers), "passed": not failed,
                 "share_of_bound": 0.25}
                for name in ("output", f"gradient of {op}")
            ]  # fmt: skip
            rows.append(
                {"op": op, "dtype": dtype, "kernel": kernel, "passed": not failed, "worst": tensors[1],
                 "tensors": tensors}
            )  # fmt: skip
    return rows


def synthetic_results() -> dict[str, Any]:
    return {
        "created": "2030-01-01", "version": "0", "quick": False, "seconds": 1.0,
        "machine": [("processor", "any")], "kernels": [
            {"ops": ["attention", "lstm"], "kernel": "C++", "reason": "it is"},
            {"ops": ["gru"], "kernel": "Triton", "reason": "it was asked for"},
        ],
        "verification": verified(),
        "mean_sweep": [
            {"mean": 1e2, "std": 1.0, "errors": {"output": [1e-7, 3e-2]}, "passed": True},
            {"mean": 1e4, "std": 0.01, "errors": {"dx": [2e-7, 4e-2], "output": [3e-7, 5e-6]}, "passed": True},
        ],
        "random_options": {"cases": 2000, "tensors": 14252, "violations": 13, "worst_share": 2.75,
                           "worst": "grad query of attention(scale=0.5) in float32", "passed": True},
        "cost": quadratic_cost.analyse(
            [*synthetic_points(), Point("seqkern", "forward", 16384, 1.0, 1.0, 1.0, 3)], RATES
        ),
        "recurrent": {"batch": 16, "steps": 64, "width": 256, "rows": [
            {"layer": "GRU", "work": "training", "step_seconds": {"torch": 2e-4, "seqkern": 5e-5}, "speed_ratio": 4.0,
             "share_of_gemm": {"torch": 0.2, "seqkern": 0.8}, "disturbed": {"torch": True, "seqkern": False}},
            {"layer": "LSTM", "work": "training", "step_seconds": {"seqkern": 6e-5, "torch": 3e-4}, "speed_ratio": 5.0,
             "share_of_gemm": {"seqkern": 0.7, "torch": 0.1}, "disturbed": {"torch": False, "seqkern": False}},
        ]},
        "chapters": [synthetic_chapter()],
        "checks": [{"name": "a check", "found": "fine", "passed": True}],
    }  # fmt: skip
