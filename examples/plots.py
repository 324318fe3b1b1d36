"""The figures of the reports, drawn from their JSON: cost over sequence length, and loss curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

# Colours that stay apart for colour-blind readers (Okabe & Ito); the same library has the same colour everywhere.
TORCH, SEQKERN, GREY = "#d55e00", "#0072b2", "#777777"
# torch's lines are wide and pale, seqkern's thin on top: where they agree, both can be seen.
WIDE: dict[str, Any] = {"color": TORCH, "alpha": 0.55, "linewidth": 3.2, "markersize": 7}
THIN: dict[str, Any] = {"color": SEQKERN, "linewidth": 1.5, "markersize": 4}
STYLE: dict[str, dict[str, Any]] = {
    "materialised": THIN | {"color": GREY, "marker": "s"},
    "torch SDPA": WIDE | {"marker": "o"},
    "seqkern": THIN | {"marker": "o"},
    "torch LSTM": WIDE | {"marker": "^", "linestyle": "--"},
    "seqkern LSTM": THIN | {"marker": "^", "linestyle": "--"},
    "torch SDPA bfloat16": WIDE | {"marker": "D", "linestyle": "--"},
    "seqkern bfloat16": THIN | {"marker": "D", "linestyle": "--"},
    "seqkern window": THIN | {"marker": "v", "linestyle": ":"},
}


def cost_figure(result: dict[str, Any]) -> Figure:
    """float32 attention beside the LSTMs: time above, memory below; forward on the left, backward on the right."""
    figure, axes = _by_direction(result, result["compared"], ("seconds", "peak_bytes"))
    for column, direction in enumerate(result["memory_of"]):
        for cross in result["crossovers"]:
            if cross["direction"] == direction and cross["length"] is not None:
                color = STYLE[cross["attention"]]["color"]
                axes[0, column].axvline(cross["length"], color=color, linewidth=0.8, linestyle=":")
    return figure


def variants_figure(result: dict[str, Any]) -> Figure:
    """Attention in two dtypes and with a window: time, memory, and the share of the speed of a matrix product."""
    figure, axes = _by_direction(result, result["variants"], ("seconds", "peak_bytes", "share_of_gemm"))
    for ax in axes[2]:
        ax.set_yscale("linear")
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=100, decimals=0))
    return figure


# What is drawn of a point: its name, the factor to the axis' unit, that unit, and which fitted exponent belongs to it.
QUANTITIES: dict[str, tuple[str, float, str, str | None]] = {
    "seconds": ("Time", 1e3, "milliseconds", "time"),
    "peak_bytes": ("Peak extra memory", 1e-6, "megabytes", "memory"),
    "share_of_gemm": ("Share of GEMM", 100.0, "of the rate of a large matrix product", None),
}


def _by_direction(result: dict[str, Any], names: Sequence[str], quantities: Sequence[str]) -> tuple[Figure, Any]:
    """A row of axes for each quantity, a column for each direction, a line for each implementation; log-log."""
    figure = Figure(figsize=(11, 0.5 + 4 * len(quantities)), layout="constrained")
    axes = figure.subplots(len(quantities), 2, sharex=True, sharey="row")
    for column, (direction, passes) in enumerate(result["memory_of"].items()):
        points = [p for p in result["points"] if p["direction"] == direction]
        fits = {e["implementation"]: e for e in result["exponents"] if e["direction"] == direction}
        for row, key in enumerate(quantities):
            ax, (title, scale, unit, fitted) = axes[row, column], QUANTITIES[key]
            for name in sorted(names, key=list(STYLE).index):
                drawn = [(p["length"], p[key] * scale) for p in points if p["implementation"] == name and p[key]]
                if not drawn:
                    continue
                exponent = fits[name][fitted] if fitted else None
                label = name if exponent is None else f"{name}, grows as $N^{{{exponent:.2f}}}$"
                ax.plot(*zip(*drawn, strict=True), label=label, **STYLE[name])
                marked = [
                    (p["length"], p[key] * scale)
                    for p in points
                    if p["implementation"] == name and p[key] and p["disturbed"] and key != "peak_bytes"
                ]
                if marked:
                    ax.plot(*zip(*marked, strict=True), "x", color="black", markersize=9)
            _log_log(ax, sorted({p["length"] for p in points}))
            ax.set_title(f"{title}, {passes if key == 'peak_bytes' else direction}", loc="left")
            ax.legend(fontsize=8, frameon=False)
            if column == 0:
                ax.set_ylabel(unit)
        axes[-1, column].set_xlabel("sequence length N")
    return figure, axes


def _log_log(ax: Axes, lengths: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _quiet(ax)


def _quiet(ax: Axes) -> None:
    ax.grid(True, which="major", color="#e4e4e4", linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def curves_figure(record: dict[str, Any]) -> Figure:
    """A system's losses of one seed, both versions over each other, and below them how far apart they are."""
    figure = Figure(figsize=(4.8, 3.8), layout="constrained")  # small, so that its text is legible on a phone
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    runs = record["seeds"][-1]["runs"]
    ours, theirs = (runs[library]["losses"] for library in ("seqkern", "torch"))
    steps = range(1, len(theirs) + 1)
    curves.plot(steps, theirs, color=TORCH, alpha=0.5, linewidth=3.5, label="plain torch")
    curves.plot(range(1, len(ours) + 1), ours, color=SEQKERN, linewidth=1, label="seqkern")
    top = sorted(ours)[-max(1, len(ours) // 50)]  # the first steps would flatten the rest
    curves.set_ylim(min(*ours, *theirs) * 0.95, top * 1.05)
    curves.set_ylabel(record["loss"])
    legend = curves.legend(frameon=False)
    # Where both are equal there is nothing to draw on a logarithmic axis.
    apart = [abs(a - b) / abs(a) or math.nan for a, b in zip(theirs, ours, strict=False)]
    differences.plot(steps, apart, ".", color=GREY, markersize=4)
    differences.set_yscale("log")
    differences.set_ylabel("apart, share")
    differences.set_xlabel("training step")
    for ax in (curves, differences):
        _quiet(ax)
        ink(ax)
    for text in legend.get_texts():
        text.set_color(INK)
    return figure


INK = "#000000"  # the page replaces it by the colour of its text


def ink(ax: Axes) -> None:
    """Text and lines of axes in the page's own colour, light or dark."""
    ax.tick_params(colors=INK, which="both")
    for part in (ax.xaxis.label, ax.yaxis.label, ax.title):
        part.set_color(INK)
    for spine in ax.spines.values():
        spine.set_edgecolor(INK)
    ax.grid(color=GREY, alpha=0.25, linewidth=0.7) if ax.xaxis.get_gridlines()[0].get_visible() else None
