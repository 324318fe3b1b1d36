"""What the examples print: progress bars in a terminal, a few lines in a log, and the tables of every part."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

# A log has no width of its own: the tables keep theirs.
console = Console()
if not console.is_terminal:
    console = Console(width=120)

LIBRARIES = ("torch", "seqkern")

# In a table of every op and every kernel: this kernel does not have the op in the dtype.
NO_KERNEL = "no kernel"

# advance(note) after each step of a progress bar.
Advance = Callable[[str], None]


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """A progress bar over `total` steps; without a terminal, a line at the start, at each quarter, and at the end."""
    begin = time.perf_counter()
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("[dim]{task.fields[note]}"), console=console, transient=True) as bar:
            task = bar.add_task(title, total=total, note="")
            yield lambda note: bar.update(task, advance=1, note=note)
    else:
        console.print(f"{title} ...")
        done = 0

        def advance(note: str) -> None:
            nonlocal done
            done += 1
            if done < total and done * 4 // total != (done - 1) * 4 // total:
                console.print(f"  {done}/{total}  {time.perf_counter() - begin:.0f} s  {note}", markup=False)

        yield advance
    console.print(f"{title}: {time.perf_counter() - begin:.1f} s")


def seconds(value: float) -> str:
    """Three digits with a unit: 42.1 us, 3.07 ms, 1.20 s."""
    for scale, unit in ((1e-6, "us"), (1e-3, "ms")):
        if value < 999.5 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} s"


def timed(value: float, disturbed: bool) -> str:
    """A time, with a mark where other work changed it."""
    return seconds(value) + ("*" if disturbed else "")


DISTURBED = "* other work disturbed this time, and again when it was repeated (a training is not)"


def megabytes(value: float | None) -> str:
    if value is None:
        return "out of memory"
    return f"{value / 1e6:.1f} MB" if value < 9.95e6 else f"{value / 1e6:.0f} MB"


def optional(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def machine_table(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title="This machine", show_header=False)
    for label, value in rows:
        table.add_row(label, value)
    return table


def kernels_table(choices: Sequence[dict[str, Any]]) -> Table:
    """A row for all ops that run the same kernel for the same reason."""
    table = Table("ops", "kernel", "why", title="Which kernel runs")
    for choice in choices:
        table.add_row(", ".join(choice["ops"]), choice["kernel"], choice["reason"])
    return table


def by_kernel(
    rows: Sequence[dict[str, Any]],
) -> tuple[list[str], list[tuple[str, str, list[dict[str, Any] | None]]]]:
    """The kernels, and for each (op, dtype) its row of every kernel, in that order; None where there is none.

    Not every kernel has every op in every dtype: those of bfloat16 have nothing else.
    """
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    cells = {(row["op"], row["dtype"], row["kernel"]): row for row in rows}
    lines = dict.fromkeys((row["op"], row["dtype"]) for row in rows)
    return kernels, [(op, dtype, [cells.get((op, dtype, kernel)) for kernel in kernels]) for op, dtype in lines]


def verification_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One column for each kernel: seqkern's error, then torch's, of the tensor that comes closest to its bound."""
    kernels, lines = by_kernel(rows)
    title = "Largest error against float64, of outputs and gradients: seqkern's, torch's"
    table = Table("op", "dtype", *kernels, title=title)
    for op, dtype, cells in lines:
        table.add_row(op, dtype, *map(_error_cell, cells))
    table.caption = "bound: twice torch's error plus two units of the dtype; " + (
        "every case keeps it" if all(row["passed"] for row in rows) else "FAILED where red"
    )
    return table


def verification_summary(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each kernel, and one for each case that breaks the rule."""
    table = Table(
        "kernel", "cases", "closest to its bound", "share", title="Errors against float64, of outputs and gradients"
    )
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == kernel]
        worst = max(own, key=lambda row: row["worst"]["share_of_bound"])
        name = f"{worst['op']} {worst['dtype']}, {worst['worst']['name']}"
        table.add_row(kernel, str(len(own)), name, f"{worst['worst']['share_of_bound']:.2f}")
    for row in rows:
        if not row["passed"]:
            table.add_row(row["kernel"], "", f"[red]{row['op']} {row['dtype']}, {row['worst']['name']} FAILED", "")
    table.caption = "bound: twice torch's error plus two units of the dtype; the report has every case"
    return table


def _error_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return f"[dim]{NO_KERNEL}"
    color, failed = ("green", "") if row["passed"] else ("red", " [red]FAILED")
    worst = row["worst"]
    return f"[{color}]{worst['error']:.1e}[/], {worst['torch_error']:.1e} [dim]{worst['name']}[/]{failed}"


def sweep_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Layer norm where the mean outgrows the spread: seqkern's relative L2 error, then torch's."""
    names = list(dict.fromkeys(name for row in rows for name in row["errors"]))
    table = Table("mean", "std", *names, title="Layer norm in float32, relative error (L2): seqkern's, torch's")
    for row in rows:
        color = "green" if row["passed"] else "red"
        cells = []
        for name in names:
            ours, theirs = row["errors"].get(name, (None, None))
            lost = "red" if theirs is not None and theirs > 1e-5 else "default"
            cells.append(f"[{color}]{optional(ours, '.1e')}[/], [{lost}]{optional(theirs, '.1e')}[/]")
        table.add_row(f"{row['mean']:g}", f"{row['std']:g}", *cells)
    table.caption = "red: more than half of float32's digits lost"
    return table


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def cost_table(result: dict[str, Any], direction: str) -> Table:
    """float32 attention beside the LSTMs."""
    shown: dict[str, Cell] = dict.fromkeys(
        result["compared"],
        lambda point: f"{timed(point['seconds'], point['disturbed'])}, {megabytes(point['peak_bytes'])}",
    )
    title = f"One head of width {result['width']}, float32, {_measured(result, direction)}"
    table = _by_length(result, direction, shown, title)
    table.add_section()
    table.add_row("exponent", *(_exponents(result, name, direction) for name in shown))
    return _with_note(table)


def variants_table(result: dict[str, Any], direction: str) -> Table:
    """Attention in bfloat16 and with a window, and what each makes of the machine; float32 is in the other table."""

    def share(point: dict[str, Any]) -> str:
        return percent(point["share_of_gemm"])

    def everything(point: dict[str, Any]) -> str:
        return f"{timed(point['seconds'], point['disturbed'])}, {megabytes(point['peak_bytes'])}, {share(point)}"

    compared = set(result["compared"])
    shown: dict[str, Cell] = {name: share if name in compared else everything for name in result["variants"]}
    title = f"Variants of attention, {_measured(result, direction)}, share of GEMM"
    table = _by_length(result, direction, shown, title)
    table.add_section()
    table.add_row("exponent", *("" if n in compared else _exponents(result, n, direction) for n in shown))
    rates = (f"{rate / 1e9:,.0f} in {dtype}" for dtype, rate in result["gemm"]["flops_per_second"].items())
    table.caption = f"window of {result['window']}; GEMM, a large matrix product, GFLOP/s: {', '.join(rates)}"
    return _with_note(table)


Cell = Callable[[dict[str, Any]], str]  # what a table says of a point


def _measured(result: dict[str, Any], direction: str) -> str:
    passes = result["memory_of"][direction]
    return f"{direction}: time, peak extra memory{'' if passes == direction else f' of {passes}'}"


def _by_length(result: dict[str, Any], direction: str, shown: dict[str, Cell], title: str) -> Table:
    """A row for each length, a column for each implementation."""
    points = {(p["length"], p["implementation"]): p for p in result["points"] if p["direction"] == direction}
    table = Table("N", *shown, title=title)
    for length in sorted({length for length, _ in points}):
        cells = {name: points.get((length, name)) for name in shown}
        table.add_row(str(length), *("-" if p is None else shown[name](p) for name, p in cells.items()))
    return table


def _exponents(result: dict[str, Any], name: str, direction: str) -> str:
    fit = next(e for e in result["exponents"] if (e["implementation"], e["direction"]) == (name, direction))
    mark = "*" if fit["time"] is not None and fit["disturbed"] else ""
    return f"{optional(fit['time'])}{mark}, {optional(fit['memory'])}"


def recurrent_table(result: dict[str, Any]) -> Table:
    """Time of a step and share of GEMM, torch's and seqkern's."""
    title = f"Recurrent layers of width {result['width']}, batch {result['batch']}, {result['steps']} steps, float32"
    table = Table("layer", "work", *(f"{name}, a step" for name in LIBRARIES), "times faster", title=title)
    for row in result["rows"]:
        cells = (
            f"{timed(row['step_seconds'][name], row['disturbed'][name])}, {percent(row['share_of_gemm'][name])}"
            for name in LIBRARIES
        )
        table.add_row(row["layer"], row["work"], *cells, f"{row['speed_ratio']:.2f}")
    table.caption = "share: of the speed of a matrix product"
    return _with_note(table)


def _with_note(table: Table) -> Table:
    """What the mark says, where there is one."""
    if any("*" in str(cell) for column in table.columns for cell in column.cells):
        table.caption = f"{table.caption}; {DISTURBED}" if table.caption else DISTURBED
    return table


def checks_table(checks: Sequence[dict[str, Any]]) -> Table:
    table = Table("check", "found", "verdict", title="Checks")
    for check in checks:
        table.add_row(check["name"], check["found"], "[green]passed" if check["passed"] else "[red]FAILED")
    return table


def exhibit(shown: Any) -> Panel | Table:
    """An `Exhibit` of a system in a terminal; a figure is only named."""
    title = shown.title
    if shown.table is not None:
        head, *rows = shown.table
        table = Table(*head, title=title, caption=shown.note or None)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        return table
    styles = {"": "", "soft": "dim", "good": "green", "bad": "red"}
    if shown.text is not None:
        pieces = Text.assemble(*((text, styles[style]) for text, style in shown.text))
        return Panel(pieces, title=title, subtitle=shown.note or None)
    return Panel(shown.note or "a figure of the gallery's report", title=title)


def systems_table(records: Sequence[dict[str, Any]]) -> Table:
    """A row for each trained system and variant."""
    columns = ("system", "variant", "metric", "torch", "seqkern", "best baseline", "times faster", "memory of a step")
    table = Table(*columns, title="Systems", caption="means over the seeds; memory: torch's, seqkern's")
    for record in records:
        runs = record["seeds"][0]["runs"]

        def mean(library: str, record: dict[str, Any] = record) -> str:
            found = [seed["runs"][library]["metric"] for seed in record["seeds"]]
            return "" if None in found else f"{statistics.fmean(found):.3f}"

        name, best = min(record["baselines"].items(), key=lambda b: -b[1] if record["higher_is_better"] else b[1])
        ratios = [seed["speed_ratio"] for seed in record["seeds"] if "speed_ratio" in seed]
        memory = ", ".join(megabytes(record["peak_bytes"].get(library)) for library in LIBRARIES)
        table.add_row(
            record["title"], record["variant"], record["metric"],
            mean("torch") if "torch" in runs else "", mean("seqkern"), f"{best:.3f}, {name}",
            f"{statistics.median(ratios):.2f}" if ratios else "", memory if record["peak_bytes"] else "",
        )  # fmt: skip
    return table
