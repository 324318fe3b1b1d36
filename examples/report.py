"""Writes report/: results.json, the figures as PNG and SVG, and index.html, which holds everything and needs nothing.

python -m examples.report          draws report/index.html again from report/results.json
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from examples import gallery, page, plots


def write(results: dict[str, Any], directory: Path) -> Path:
    """Writes all files into `directory` and returns the path of index.html."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results, indent=1))
    figures: dict[str, str] = {}
    if results.get("cost"):
        figures["cost"] = _save(plots.cost_figure(results["cost"]), directory / "cost")
        figures["variants"] = _save(plots.variants_figure(results["cost"]), directory / "variants")
    path = directory / "index.html"
    path.write_text(render(results, figures), encoding="utf-8")
    return path


def render(results: dict[str, Any], figures: dict[str, str]) -> str:
    """The page; `figures` are data URIs by name."""
    rows = gallery.summary(results["chapters"])
    shown = {chapter["name"] for chapter in results["chapters"]}
    others = [name for name in gallery.SYSTEMS if name not in shown]
    template = page.environment().get_template("report.html.j2")
    return template.render(figures=figures, rows=rows, others=others, **results)


def _save(figure: Figure, stem: Path) -> str:
    """Saves stem.png and stem.svg, and returns the SVG as a data URI."""
    figure.savefig(stem.with_suffix(".png"), dpi=130)
    svg = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": stem.name}):  # the same figure gives the same bytes
        figure.savefig(svg, format="svg", metadata={"Date": None})
    stem.with_suffix(".svg").write_bytes(svg.getvalue())
    return "data:image/svg+xml;base64," + base64.b64encode(svg.getvalue()).decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("report"))
    options = parser.parse_args()
    print(write(json.loads((options.out / "results.json").read_text()), options.out))
