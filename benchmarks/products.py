"""The shared products alone, as shares of the multiply-add peak: `python -m benchmarks products [--quick] [--json F]`.

The peak is that of the same threads in the same round: multiply-adds in registers that wait for nothing. Beside it
torch's matmul, and oneDNN's linear. What takes turns is one call of each; what counts is the median of the rounds'
shares. The rounds of a product are spread over five passes through all products: a machine that others use has slow
spells, in which large products lose more than the peak does.

packed      B is packed beforehand, as weights are that stay: C = A B
packing     the same, and packing B
transposed  A is read by columns and B is packed: the gradient of weights, a sum over all tokens
loop        A of a few rows and B packed, again and again, as a recurrent layer's steps are; without its cells
once        A of a few rows and a B that is read in place, packed a few panels at a time: a single step
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import seqkern

Thunk = Callable[[], Any]
LOOP_STEPS = 20
WAYS = ("packed", "packing", "transposed", "loop", "once")


@dataclass(frozen=True)
class Product:
    """(rows, depth) times (depth, columns), and what calls it."""

    use: str
    rows: int
    columns: int
    depth: int
    way: str


def _lstm(hidden: int, tokens: int, rows: tuple[int, ...]) -> list[Product]:
    name, gates = f"LSTM, H {hidden}", 4 * hidden
    return [
        Product(f"{name}: input", tokens, gates, hidden, "packed"),
        *(Product(f"{name}: step", count, gates, hidden, "loop") for count in rows),
        *(Product(f"{name}: step back", count, hidden, gates, "loop") for count in rows),
        Product(f"{name}: gradient of weights", gates, hidden, tokens, "transposed"),
    ]


PRODUCTS = (
    Product("square", 2048, 2048, 2048, "packed"),
    Product("square", 2048, 2048, 2048, "packing"),
    *_lstm(256, 1024, (1, 16, 32, 64)),
    *_lstm(512, 4096, (16, 32, 64, 128)),
    *_lstm(1024, 2048, (16, 64)),
    Product("LSTM, H 256: one step", 16, 1024, 256, "once"),
    Product("LSTM, H 1024: one step", 16, 4096, 1024, "once"),
    Product("attention, D 64: scores", 64, 512, 64, "loop"),
    Product("attention, D 128: scores", 64, 512, 128, "loop"),
    Product("attention, D 128: output", 64, 128, 512, "loop"),
    Product("loss: logits", 4096, 8192, 512, "packing"),
    Product("loss: logits, few classes", 4096, 256, 256, "packing"),
)


def calls(product: Product, dtype: torch.dtype) -> dict[str, Thunk]:
    """By whom: the product, LOOP_STEPS times in a loop."""
    ops = torch.ops.seqkern
    rows, columns, depth = product.rows, product.columns, product.depth
    if product.way == "transposed":
        a, b = torch.randn(depth, rows).to(dtype).t(), torch.randn(depth, columns).to(dtype)
    else:
        a, b = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype).t()
    packed, out = ops.products_pack(b), torch.empty(rows, columns, dtype=dtype)
    times = steps(product)

    def matmul() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    def ours() -> Tensor:
        found: Tensor
        if product.way == "loop":
            found = ops.products_rows(a, packed, columns, times)
        elif product.way == "once":
            found = ops.products_few_rows(a, b)
        else:
            found = ops.products_multiply(a, packed if product.way == "packed" else ops.products_pack(b), columns)
        return found

    found: dict[str, Thunk] = {"seqkern": ours, "torch": matmul}
    if torch.backends.mkldnn.is_available() and product.way != "transposed":

        def onednn() -> None:
            for _ in range(times):
                torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")

        found["oneDNN"] = onednn
    exact = a.double() @ b.double()
    error, theirs = ((result.double() - exact).norm() / exact.norm() for result in (ours(), a @ b))
    if not error <= 2 * theirs + torch.finfo(dtype).eps:
        raise AssertionError(f"{product}, {dtype}: wrong result, not timed: error {error:.1e}, torch {theirs:.1e}")
    return found


def steps(product: Product) -> int:
    return LOOP_STEPS if product.way == "loop" else 1


def _seconds(call: Thunk) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Contest:
    """The shares that a product reaches, of the peak measured in the same round."""

    def __init__(self, product: Product, dtype: torch.dtype) -> None:
        self.product, self.dtype = product, dtype
        self.contestants = calls(product, dtype)
        self.shares: dict[str, list[float]] = {name: [] for name in self.contestants}
        self.peaks: list[float] = []

    def take_turns(self, rounds: int) -> None:
        like, turns = torch.empty(0, dtype=self.dtype), 1_000_000  # 3 to 9 ms
        product = self.product
        work = 2 * product.rows * product.columns * product.depth * steps(product)
        for call in self.contestants.values():
            call(), call()
        for _ in range(rounds):
            torch.ops.seqkern.products_peak(like, 1)  # after a large product a first call is slower by 0.1 ms
            start = time.perf_counter()
            done = torch.ops.seqkern.products_peak(like, turns)
            self.peaks.append(2 * done / (time.perf_counter() - start))
            for name, call in self.contestants.items():
                self.shares[name].append(work / _seconds(call) / self.peaks[-1])

    def row(self) -> dict[str, Any]:
        """Medians of the rounds, and seqkern's quartiles."""
        product = self.product
        quartiles = statistics.quantiles(self.shares["seqkern"], n=4, method="inclusive")
        return {
            "use": product.use,
            "shape": f"{product.rows} x {product.columns} x {product.depth}",
            "way": product.way,
            "dtype": str(self.dtype).removeprefix("torch."),
            "peak_gflops": round(statistics.median(self.peaks) / 1e9, 1),
            "shares": {name: round(statistics.median(found), 3) for name, found in self.shares.items()},
            "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        }


def report(row: dict[str, Any]) -> str:
    shares = "  ".join(f"{name} {share:4.0%}" for name, share in row["shares"].items())
    case = f"{row['use']:32} {row['shape']:19} {row['way']:10} {row['dtype']:8}"
    return f"{case} {row['peak_gflops']:7.1f} GF/s: {shares}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks products", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, less certain")
    parser.add_argument("--threads", type=int, help="default: torch's choice")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to store the figures")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    passes, rounds = (1, 5) if options.quick else (5, 9)
    for dtype in [getattr(torch, options.dtype)] if options.dtype else [torch.float32, torch.bfloat16]:
        contests = [Contest(product, dtype) for product in PRODUCTS]
        for _ in range(passes - 1):
            for contest in contests:
                contest.take_turns(rounds)
        for contest in contests:
            contest.take_turns(rounds)
            rows.append(contest.row())
            print(report(rows[-1]), flush=True)
    if options.json:
        machine = dict(seqkern._explain.describe_machine())
        stored = {
            "machine": {key: machine[key] for key in ("processor", "CPU kernels")}
            | {"python": platform.python_version(), "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "products": rows,
        }
        options.json.write_text(json.dumps(stored, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
