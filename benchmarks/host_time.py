"""What a call of the Triton kernels costs the host: `python -m benchmarks.host_time [--quick] [--json FILE]`.

The time from a launcher's entry to the last of its launches, of a kind of call that is new (it is planned, and Triton
binds its arguments) and of one that was made before (kernels/_replay.py). On a GPU the launches are made; without one
the compile-only driver of the tests drops them, so the driver's own share is missing (cuLaunchKernel: 2 to 3 us).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
ARCH = 90  # of the compile-only driver


@contextlib.contextmanager
def on_gpu() -> Iterator[torch.device]:
    """The device of the tensors: a GPU, or the CPU in place of one."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.append(str(ROOT / "tests" / "triton"))
    with importlib.import_module("triton_driver").compile_only(ARCH, checks=False):
        yield torch.device("cpu")


def calls(device: torch.device) -> dict[str, tuple[float, Callable[[], Any]]]:
    """By name: microseconds aimed at, and the call."""
    attention = importlib.import_module("seqkern.kernels.attention")
    norm = importlib.import_module("seqkern.kernels.layer_norm")
    cell = importlib.import_module("seqkern.kernels.rnn_cell")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    query, key, value = (normal(2, 8, 256, 64) for _ in range(3))
    token, cache = normal(2, 8, 1, 64), normal(2, 8, 4096, 64)
    lengths = torch.tensor([1000, 3000], dtype=torch.int32).to(device)
    nothing = (None,) * 7
    full = (256, 256, 0, False, -1, 0, 0.125, 0.0, 0.0)
    out, lse = attention.attention_fwd(query, key, value, *nothing, *full)
    decoding = (token, cache, cache, None, None, None, lengths, None, None, None, 1, 4096, *full[2:])
    x, weight = normal(4096, 768), normal(768)
    _, _, mean, rstd = norm.layer_norm_fwd(x, None, weight, weight, None, 1e-5, 0.0, True, 0.0, False)
    gates, state = normal(16, 1024), normal(16, 256)
    _, c_new, activated = cell.rnn_cell_fwd(gates, gates, state, state, 0)
    return {
        "attention forward": (20, lambda: attention.attention_fwd(query, key, value, *nothing, *full)),
        "attention backward": (
            40,
            lambda: attention.attention_bwd(
                out, None, query, key, value, out, lse, *nothing[:6], *full, False, False
            ),
        ),
        "decoding": (30, lambda: attention.attention_fwd(*decoding)),
        "layer norm forward": (
            15,
            lambda: norm.layer_norm_fwd(x, None, weight, weight, None, 1e-5, 0.0, True, 0.0, False),
        ),
        "layer norm backward": (
            25,
            lambda: norm.layer_norm_bwd(x, None, x, mean, rstd, weight, None, 0.0, True, 0.0, True, True),
        ),
        "LSTM cell forward": (15, lambda: cell.rnn_cell_fwd(gates, gates, state, state, 0)),
        "LSTM cell backward": (25, lambda: cell.rnn_cell_bwd(state, state, state, state, c_new, activated, 0)),
    }  # fmt: skip


def step(device: torch.device) -> tuple[float, Callable[[bool], None]]:
    """The launch of one step of a recurrent layer: (aim, call), the call told whether the step is a new one."""
    plans = importlib.import_module("seqkern.kernels.rnn.plans")
    scan = importlib.import_module("seqkern._rnn_scan")
    replay = importlib.import_module("seqkern.kernels._replay")
    state = torch.randn(16, 256, device=device).bfloat16()
    x, product = torch.randn(1, 8, 16, 1024, device=device), torch.randn(16, 1024, device=device)
    h, c = torch.randn(2, 16, 256, device=device)
    launch = plans.cell_forward(plans.single(state, scan.LSTM), x, product, h, c, h, c)
    repeated = replay.Repeated(launch)
    return 8, lambda new: replay.Repeated(launch)(3) if new else repeated(3)


def seconds(call: Callable[[], Any], number: int) -> float:
    """Of the process's time, for one call."""
    begin = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - begin) / number


def measure(quick: bool = False) -> list[dict[str, Any]]:
    """A row for each call, new and made before by turns: medians, in microseconds."""
    rounds, number = (5, 50) if quick else (21, 300)
    rows = []
    with on_gpu() as device, torch.no_grad():
        replay = importlib.import_module("seqkern.kernels._replay")
        every: list[tuple[str, float, Callable[[], Any], Callable[[], Any]]] = []

        def forgotten(call: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: (replay.forget(), call())

        for name, (aim, call) in calls(device).items():
            every.append((name, aim, forgotten(call), call))
        aim, one = step(device)
        every.append(("a step of an LSTM, its launch", aim, lambda: one(True), lambda: one(False)))
        for name, aim, anew, call in every:
            times: dict[str, list[float]] = {"new": [], "before": []}
            for _ in range(rounds):
                times["new"].append(seconds(anew, number // 5))
                call()
                times["before"].append(seconds(call, number))
            new, before = (statistics.median(times[kind]) * 1e6 for kind in ("new", "before"))
            rows.append({"call": name, "aim_us": aim, "new_us": round(new, 1), "made_before_us": round(before, 1)})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a second or two, and less certain")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows as well")
    options = parser.parse_args(arguments)
    rows = measure(options.quick)
    if options.json:
        triton = importlib.import_module("triton")
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"compile-only driver, sm_{ARCH}"
        about = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
    print(f"{'us of the host':32}{'aim':>6}{'new':>8}{'made before':>14}")
    for row in rows:
        print(f"{row['call']:32}{row['aim_us']:6}{row['new_us']:8}{row['made_before_us']:14}")


if __name__ == "__main__":
    main()
