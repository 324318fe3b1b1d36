"""What the demo shows: every cell of every table beside the data it stands for, and the figures."""

from __future__ import annotations

import html.parser
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from demo_cases import RATES, distinct, synthetic_points, synthetic_results
from rich.table import Table
from rich.text import Text

from examples import console, gallery, plots, quadratic_cost, report, verification

FIGURES = dict.fromkeys(("cost", "variants"), "data:,")


class Page(html.parser.HTMLParser):
    """Everything that a page would fetch, its tags, and the cells of its tables; one that spans two columns is there
    twice."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.cell: str | None = None
        self.span = 1
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.cell, self.span = "", int(dict(attrs).get("colspan") or 1)

    def handle_data(self, data: str) -> None:
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self.cell is not None:
            self.tables[-1][-1] += [" ".join(self.cell.split())] * self.span
            self.cell = None


def rendered(table: Table) -> list[list[str]]:
    """The cells of a table that goes to the terminal, its header first."""
    columns = [
        [str(column.header), *(Text.from_markup(str(c)).plain for c in column.cells)] for column in table.columns
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def expected_errors(rows: list[dict[str, Any]], kernels: list[str]) -> list[list[str]]:
    """What the table of errors has to say in every cell, looked up in the data by op, dtype and kernel."""
    lines = []
    for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
        line = [op, dtype]
        for kernel in kernels:
            found = [row for row in rows if (row["op"], row["dtype"], row["kernel"]) == (op, dtype, kernel)]
            worst = found[0]["worst"] if found else {}
            cell = f"{worst['error']:.1e}, {worst['torch_error']:.1e}" if found else "no kernel"
            line.append(cell + ("" if not found else f" {worst['name']}"))
        lines.append(line)
    return lines


KERNELS = ["C++ generic", "C++ avx2", "Triton", "C++ avx512bf16", "C++ amx"]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_every_error_stands_under_its_op_dtype_and_kernel(seed: int | None) -> None:
    results = synthetic_results()
    rows = results["verification"]
    if seed is not None:
        random.Random(seed).shuffle(rows)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    assert sorted(kernels) == sorted(KERNELS)
    errors = next(t for t in Page(report.render(results, FIGURES)).tables if t[0][:2] == ["op", "format"])
    assert errors[0] == ["op", "format", *kernels]
    shown = [[cell.replace(" FAILED", "") for cell in line] for line in errors[1:]]
    assert shown == expected_errors(rows, kernels)
    # Nothing is left out: every error once, one of them failed, and the rest of the cells say that there is none.
    assert sum("e-" in cell for line in shown for cell in line) == len(rows)
    assert sum(cell == "no kernel" for line in shown for cell in line) == len(shown) * len(kernels) - len(rows) > 0
    assert sum("FAILED" in cell for line in errors for cell in line) == 1
    printed = rendered(console.verification_table(rows))
    assert [[cell.replace(" FAILED", "") for cell in line] for line in printed[1:]] == shown
    assert sum("FAILED" in cell for line in printed for cell in line) == 1
    summary = rendered(console.verification_summary(rows))[1:]
    assert {line[0]: int(line[1]) for line in summary if line[1]} == Counter(row["kernel"] for row in rows)
    assert sum("FAILED" in line[2] for line in summary) == 1


def uneven_results() -> dict[str, Any]:
    """Results with a number of its own in every cell, in no order, with points that are missing and points that other
    work disturbed."""
    results = synthetic_results()
    numbers = distinct()
    points = [
        replace(p, seconds=1e3 * next(numbers), peak_bytes=int(1e15 * next(numbers)), disturbed=i % 7 == 0)
        for i, p in enumerate(synthetic_points())
        if i % 11 != 5
    ]
    random.Random(0).shuffle(points)
    results["cost"] = quadratic_cost.analyse(points, RATES)
    return results


def expected_by_length(cost: dict[str, Any], direction: str, names: Sequence[str], parts: Any) -> list[list[str]]:
    """A table over N: `parts(name)` of every implementation are what it shows of a point."""
    lines = []
    for length in sorted({p["length"] for p in cost["points"]}):
        line = [str(length)]
        for name in names:
            key = (length, name, direction)
            found = [p for p in cost["points"] if (p["length"], p["implementation"], p["direction"]) == key]
            line += [part(found[0]) if found else "not run" for part in parts(name)]
        lines.append(line)
    exponents = ["exponent"]
    for name in names:
        (fit,) = (e for e in cost["exponents"] if (e["implementation"], e["direction"]) == (name, direction))
        shown = [console.optional(fit["time"]) + ("*" if fit["disturbed"] else ""), console.optional(fit["memory"])]
        width = len(parts(name))
        exponents += [""] if width == 1 else [*shown, *[""] * (width - 2)]
    return [*lines, exponents]


def time_of(point: dict[str, Any]) -> str:
    return console.seconds(point["seconds"]) + ("*" if point["disturbed"] else "")


def memory_of(point: dict[str, Any]) -> str:
    return console.megabytes(point["peak_bytes"])


def share_of(point: dict[str, Any]) -> str:
    return f"{point['share_of_gemm']:.0%}"


def test_every_cell_of_every_table_says_what_the_data_say() -> None:
    results = uneven_results()
    cost = results["cost"]
    source = report.render(results, FIGURES)
    tables = Page(source).tables
    kernels = list(dict.fromkeys(row["kernel"] for row in results["verification"]))
    expected = [
        [[label, value] for label, value in results["machine"]],
        [["ops", "kernel", "why"], ["attention, lstm", "C++", "it is"], ["gru", "Triton", "it was asked for"]],
    ]
    errors = expected_errors(results["verification"], kernels)
    expected.append([["op", "format", *kernels], *errors])
    expected.append(
        [
            ["mean", "standard deviation", "output", "dx"],
            ["100", "1", "1.0e-07, 3.0e-02", "not run"],
            ["10000", "0.01", "3.0e-07, 5.0e-06", "2.0e-07, 4.0e-02"],
        ]
    )
    tensors = [
        [row["op"], row["dtype"], row["kernel"], t["name"], f"{t['error']:.2e}", f"{t['torch_error']:.2e}",
         f"{t['bound']:.2e}", f"{t['relative_l2']:.1e}", f"{t['torch_relative_l2']:.1e}"]
        for row in results["verification"] for t in row["tensors"]
    ]  # fmt: skip
    head = ["op", "format", "kernel", "tensor", "seqkern's error", "PyTorch's error", "bound", "relative L2"]
    expected.append([[*head, "PyTorch's"], *tensors])

    def compared(name: str) -> list[Any]:
        return [time_of, memory_of]

    def variants(name: str) -> list[Any]:
        return [share_of] if name in quadratic_cost.COMPARED else [time_of, memory_of, share_of]

    for names, parts in ((quadratic_cost.COMPARED, compared), (quadratic_cost.VARIANTS, variants)):
        for direction in quadratic_cost.DIRECTIONS:
            head = ["N", *(name for name in names for _ in parts(name))]
            expected.append([head, *expected_by_length(cost, direction, names, parts)])
    expected.append(
        [
            ["layer", "work", *["torch's ops, a step"] * 2, *["seqkern's ops, a step"] * 2, "times faster"],
            ["GRU", "training", "200 us*", "20%", "50 us", "80%", "4.00"],
            ["LSTM", "training", "300 us", "10%", "60 us", "70%", "5.00"],
        ]
    )
    expected += [
        [
            ["system", "metric", "seqkern", "plain torch", "baseline", "times faster", "memory, of torch's"],
            ["Made up small", "bits per byte", "2.65 ± 0.07", "2.55", "1.8 lzma", "1.25", "50%"],
        ],
        [
            ["", "bits per byte", "a step", "bytes a second", "extra memory of a step"],
            ["seqkern", "2.65 ± 0.071", "16.7 ms", "6,000", "3.5 MB"],
            ["plain torch", "2.55 ± 0.071", "20.8 ms*", "4,800", "7.0 MB"],
            ["zlib", "3.2", "", "", ""],
            ["lzma", "1.8", "", "", ""],
        ],
        [
            ["variant", "bits per byte", "parameters", "a step"],
            ["small", "2.65", "1,000", "16.7 ms"],
            ["large", "2.2", "2,000", "33.3 ms"],
        ],
        [["word", "<b>"], ["x", "y & z"]],
    ]
    expected.append([["check", "found", ""], ["a check", "fine", "passed"]])
    assert len(tables) == len(expected)
    for shown, wanted in zip(tables, expected, strict=True):
        assert [[cell.replace(" FAILED", "") for cell in line] for line in shown] == wanted
    assert sum(cell == "not run" for table in tables for line in table for cell in line) > 10
    assert sum(cell.endswith("*") for table in tables for line in table for cell in line) > 10
    assert "A baseline is better than the network: lzma (Made up)." in source
    assert "None is slower than plain torch." in source

    # And what goes to the terminal: the same, the parts of a cell in one column.
    for direction in quadratic_cost.DIRECTIONS:
        for table, names, parts in (
            (console.cost_table(cost, direction), quadratic_cost.COMPARED, compared),
            (console.variants_table(cost, direction), quadratic_cost.VARIANTS, variants),
        ):
            lines = []
            for cells in expected_by_length(cost, direction, names, parts):
                line, rest = cells[:1], cells[1:]
                for name in names:
                    part, rest = rest[: len(parts(name))], rest[len(parts(name)) :]
                    line.append("-" if part[0] == "not run" else ", ".join(part).removesuffix(", "))
                lines.append(line)
            assert rendered(table) == [["N", *names], *lines]
            assert "other work disturbed" in str(table.caption)
    recurrent = rendered(console.recurrent_table(results["recurrent"]))
    assert recurrent[1:] == [
        ["GRU", "training", "200 us*, 20%", "50 us, 80%", "4.00"],
        ["LSTM", "training", "300 us, 10%", "60 us, 70%", "5.00"],
    ]
    records = [record for chapter in results["chapters"] for record in chapter["records"]]
    assert rendered(console.systems_table(records))[1:] == [
        ["Made up", "small", "bits per byte", "2.550", "2.650", "1.800, lzma", "1.25", "7.0 MB, 3.5 MB"],
        ["Made up", "large", "bits per byte", "", "2.200", "1.800, lzma", "", ""],
    ]
    sweep = rendered(console.sweep_table(results["mean_sweep"]))
    assert sweep[1:] == [
        ["100", "1", "1.0e-07, 3.0e-02", "-, -"], ["10000", "0.01", "3.0e-07, 5.0e-06", "2.0e-07, 4.0e-02"]
    ]  # fmt: skip


def test_a_twin_that_stopped_early_has_times_and_no_metric() -> None:
    results = synthetic_results()
    (chapter,) = results["chapters"]
    record = chapter["records"][0] = json.loads(json.dumps(chapter["records"][0]))
    for seed in record["seeds"]:
        seed["runs"]["torch"] |= {"steps": 30, "metric": None, "evaluations": [], "seconds": 0.625}
    source = report.render(results, FIGURES)
    lines = [line for table in Page(source).tables for line in table]
    assert ["Made up small", "bits per byte", "2.65 ± 0.07", "-", "1.8 lzma", "1.25", "50%"] in lines
    assert ["plain torch", "-", "20.8 ms*", "4,800", "7.0 MB"] in lines
    assert "120 steps, the first 30 of them with the twin" in " ".join(source.split())
    (_, row, _) = rendered(console.systems_table(chapter["records"]))
    assert row == ["Made up", "small", "bits per byte", "", "2.650", "1.800, lzma", "1.25", "7.0 MB, 3.5 MB"]


def test_a_machine_with_a_tier_for_bfloat16_alone_has_it_in_bfloat16_alone() -> None:
    """The table of the cases that this very machine runs."""
    kernels = dict.fromkeys(kernel for _, _, kernel, _ in verification.cases())
    report = {"name": "output", "error": 0.0, "torch_error": 0.0}
    rows = [
        {"op": op, "dtype": str(dtype), "kernel": kernel, "passed": True, "worst": report}
        for op, dtype, kernel, _ in verification.cases()
    ]
    printed = rendered(console.verification_table(rows))
    assert printed[0] == ["op", "dtype", *kernels]
    for op, dtype, *cells in printed[1:]:
        own = {name for o, d, name, _ in verification.cases() if (o, str(d)) == (op, dtype)}
        assert {name for name, cell in zip(kernels, cells, strict=True) if cell != "no kernel"} == own


def test_report_holds_everything_and_fetches_nothing(tmp_path: Path) -> None:
    page = report.write(synthetic_results(), tmp_path)
    source = page.read_text()
    references = Page(source)
    assert references.tags.count("img") == 2
    assert references.tags.count("svg") == 2
    links = [found for found in references.found if not found.startswith(("data:", "#"))]
    assert links == ["gallery/index.html"]  # which nothing fetches
    assert [name for name in gallery.SYSTEMS if f"<code>{name}</code>" in source] == list(gallery.SYSTEMS)
    assert "script" not in references.tags  # the sample is escaped
    assert all(len(set(map(len, rows))) == 1 for rows in references.tables)
    assert not re.search(r"url\((?!#)", source)  # parts of a figure refer to one another
    assert "@import" not in source
    assert "All 1 checks passed" in source
    # At N = 16384 there is one point alone: "seqkern" forward, which stands in both tables.
    # One row of the sweep lacks a tensor.
    assert source.count("not run") == 2 * 2 * 5 - 2 + 1
    assert (
        "1,000 billion operations per second in float32 and 4,000 billion operations per second in bfloat16." in source
    )
    assert "out of memory" in source
    assert "50 us" in source
    assert "80%" in source
    figures = {f"{name}.{kind}" for name in ("cost", "variants") for kind in ("png", "svg")}
    names = {"index.html", "results.json", *figures}
    assert {path.name for path in tmp_path.iterdir()} == names
    # The page can be drawn again from the JSON alone.
    again = report.write(json.loads((tmp_path / "results.json").read_text()), tmp_path / "again")
    assert again.read_text() == source


def test_figures_draw_every_implementation() -> None:
    result = quadratic_cost.analyse(synthetic_points(), RATES)
    cost, variants = plots.cost_figure(result), plots.variants_figure(result)
    assert (len(cost.axes), len(variants.axes)) == (4, 6)
    for figure, names in ((cost, quadratic_cost.COMPARED), (variants, quadratic_cost.VARIANTS)):
        for ax in figure.axes:
            assert {str(label).split(",")[0] for label in ax.get_legend_handles_labels()[1]} == set(names)
    titles = [ax.get_title("left") for ax in variants.axes]
    assert titles[:2] == ["Time, forward", "Time, backward"]
    assert titles[2:4] == ["Peak extra memory, forward", "Peak extra memory, forward+backward"]
    assert titles[4:] == ["Share of GEMM, forward", "Share of GEMM, backward"]
    drawn = {str(line.get_label()): line.get_ydata()[-1] for line in variants.axes[5].get_lines()}
    point = next(p for p in result["points"] if (p["implementation"], p["length"]) == ("seqkern bfloat16", 8192))
    assert drawn["seqkern bfloat16"] == pytest.approx(2.5 * 100 * point["share_of_gemm"])
    assert variants.axes[5].get_yscale() == "linear"


def test_report_shows_a_failed_check(tmp_path: Path) -> None:
    results = synthetic_results()
    results["checks"].append({"name": "another", "found": "wrong", "passed": False})
    source = report.write(results, tmp_path).read_text()
    assert "1 of 2 checks failed" in source
    assert "checks passed" not in source


def test_tables_say_everything_of_every_length() -> None:
    result = quadratic_cost.analyse(synthetic_points(), RATES)
    for direction, passes in quadratic_cost.PASSES.items():
        for table in (console.cost_table(result, direction), console.variants_table(result, direction)):
            assert table.row_count == 5  # four lengths and the exponents
            assert f"{direction}: time" in str(table.title)
            assert passes in str(table.title)
            assert {cell for column in table.columns for cell in column.cells}.isdisjoint({"-", None})
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert list(columns) == ["N", *quadratic_cost.VARIANTS]
    flops = quadratic_cost.needed_flops(quadratic_cost.WINDOWED, 8192, "backward")
    assert columns["seqkern window"][3] == f"8.19 ms, 8.4 MB, {flops / 8.192e-3 / 1e12:.0%}"
    assert columns["seqkern window"][4] == "1.00, -"
    assert columns["seqkern"][3].endswith("%")
    assert columns["seqkern"][4] == ""
