"""Tables and plots from the JSON that pytest-benchmark stores: `python -m benchmarks.report FILE.json`.

`python -m benchmarks.report --results` writes RESULTS.md, README's table and the picture from all stored files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

try:
    import rich.console
    import rich.table
except ModuleNotFoundError:  # then the same table in plain text
    HAS_RICH = False
else:
    HAS_RICH = True

CAPTION = "speedup: median of the round-by-round ratios and quartiles; above 1 seqkern wins"


def load(path: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The machine and the cases of a result file; of a run that was interrupted, those that were timed."""
    stored = json.loads(path.read_text())
    cases = [b["extra_info"] for b in stored["benchmarks"] if "peers" in b["extra_info"]]
    return stored["machine_info"]["seqkern"], cases


def table(cases: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, head and cells of the table of all cases."""
    peers = list(dict.fromkeys(name for case in cases for name in case["peers"]))
    threads = sorted({case["threads"] for case in cases})
    stepwise = any("microseconds_per_step" in case for case in cases)
    step_columns = ("us a step",) if stepwise else ()
    versus = (f"vs {name}" for name in peers)
    head = [*LABELS, "seqkern ms", *step_columns, *versus, "GFLOP/s", "GB/s", "of roofline"]
    rows = [
        [
            named(case),
            *(case[key] for key in ("shape", "dtype", "mode")),
            f"{case['milliseconds']:.3f}",
            *([_step(case)] if stepwise else []),
            *(_versus(case["peers"].get(name)) for name in peers),
            f"{case['gflops_per_second']:.1f}",
            f"{case['gbytes_per_second']:.1f}",
            f"{case['share_of_roofline']:.0%}",
        ]
        for case in cases
    ]
    return f"{', '.join(map(str, threads))} threads", head, rows


LABELS = ("op", "shape", "dtype", "mode")  # columns of words; the others are numbers


def show(machine: dict[str, str], cases: list[dict[str, Any]]) -> None:
    """Prints the machine and the table."""
    title, head, rows = table(cases)
    if not HAS_RICH:
        print(plain(machine, title, head, rows))
        return
    console = rich.console.Console(width=None if rich.console.Console().is_terminal else 180)
    for label, value in machine.items():
        console.print(f"[bold]{label}[/bold]  {value}", highlight=False)
    drawn = rich.table.Table(title=title, caption=CAPTION)
    for name in head:
        drawn.add_column(name, justify="left" if name in LABELS else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


def plain(machine: dict[str, str], title: str, head: list[str], rows: list[list[str]]) -> str:
    """The same as text."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if name in LABELS else cell.rjust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join([*(f"{label}  {value}" for label, value in machine.items()), title, *lines, CAPTION])


def named(case: dict[str, Any]) -> str:
    """The op, and the backend where a run forced one."""
    backend = case.get("backend", "auto")
    return case["op"] if backend == "auto" else f"{case['op']} {backend}"


def _step(case: dict[str, Any]) -> str:
    return f"{case['microseconds_per_step']:.1f}" if "microseconds_per_step" in case else "-"


def _versus(peer: dict[str, float] | None) -> str:
    if peer is None:
        return "-"
    return f"{peer['speedup']:.2f}x [{peer['speedup_low']:.2f}, {peer['speedup_high']:.2f}]"


def plot(machine: dict[str, str], cases: list[dict[str, Any]], path: Path) -> None:
    """Speedup over every peer, one row a case, as an image in the format of the path's ending."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [f"{named(c)} {c['shape']} {c['dtype']} {c['mode']}" for c in cases]
    peers = list(dict.fromkeys(name for case in cases for name in case["peers"]))
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.3 * len(cases)), layout="constrained")
    for offset, name in enumerate(peers):
        rows = [(i, c["peers"][name]) for i, c in enumerate(cases) if name in c["peers"]]
        x = [p["speedup"] for _, p in rows]
        spread = [
            [p["speedup"] - p["speedup_low"] for _, p in rows],
            [p["speedup_high"] - p["speedup"] for _, p in rows],
        ]
        axes.errorbar(x, [i + 0.15 * offset for i, _ in rows], xerr=spread, fmt="o", markersize=4, label=f"vs {name}")
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the peer (log scale)")
    axes.set_title(f"{machine.get('cuda:0', machine['processor'])}, torch {machine['torch']}", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="a JSON file written by `python -m benchmarks`")
    parser.add_argument("--results", action="store_true", help="write the pages from all files in benchmarks/results")
    parser.add_argument("--plot", type=Path, help="also draw the speedups into this file (.png, .svg, .pdf)")
    arguments = parser.parse_args()
    if arguments.results == (arguments.file is not None):
        parser.error("give either a file or --results")
    if arguments.results:
        from benchmarks import pages

        for path in pages.write():
            print(path)
        return
    machine, cases = load(arguments.file)
    show(machine, cases)
    if arguments.plot:
        plot(machine, cases, arguments.plot)
        print(f"plot: {arguments.plot}")


if __name__ == "__main__":
    main()
