"""What the reports share: templates with their filters, and figures that are part of the page."""

from __future__ import annotations

import io
import statistics
from pathlib import Path

import jinja2
import matplotlib
from matplotlib.figure import Figure

from examples import console, runner

TEMPLATES = Path(__file__).parent


def environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    for formatter in (console.timed, console.megabytes, console.optional, console.percent, console.by_kernel):
        made.filters[formatter.__name__] = formatter
    made.filters |= {"mean": statistics.fmean, "stdev": statistics.stdev, "median": statistics.median}
    made.globals |= {"no_kernel": console.NO_KERNEL, "libraries": console.LIBRARIES, "metrics": runner.metrics}
    return made


def svg(figure: Figure) -> str:
    """A figure as an element of the page, whose black is the page's ink, in the dark too."""
    file = io.StringIO()
    figure.patch.set_alpha(0)
    for ax in figure.axes:
        ax.patch.set_alpha(0)
    with matplotlib.rc_context({"svg.hashsalt": "seqkern", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")
