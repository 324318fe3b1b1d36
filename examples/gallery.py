"""Every system of the textbooks, trained beside its plain-torch twin, in one report.

For each system the main variant is trained with every seed, twins in turns; its other variants once, on seqkern's ops
alone, to compare them. Exits with 1 when a check fails.

    python -m examples.gallery                     all of them: report/gallery/index.html
    python -m examples.gallery --seeds 3           with the noise of seeds
    python -m examples.gallery --only gpt,vit
    python -m examples.gallery --redraw            the page again, from report/gallery/results.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import seqkern
from examples import console, page, plots, runner
from seqkern import _explain

# In the textbooks' order.
SYSTEMS = (
    "recurrent_lm", "tagger", "classifier", "seq2seq", "gpt", "encoder_decoder", "bert", "bert_classifier",
    "char_lm", "word_vectors",
    "tree_classifier", "vit",
)  # fmt: skip
Chapter = dict[str, Any]


def chapter(
    system: runner.System, seeds: Sequence[int], steps: int | None = None, variants: bool = True,
    twin_steps: int | None = None,
) -> Chapter:  # fmt: skip
    """A system's part of the report: its records, the main variant's first, and what there is to look at."""
    first, *others = system.recipes
    record, exhibits = runner.run(system, first, seeds, twin=True, steps=steps, twin_steps=twin_steps)
    records = [record]
    for variant in others if variants else ():
        other, shown = runner.run(system, variant, seeds[:1], twin=False, steps=steps, memory=False)
        records.append(other)
        exhibits += [replace(e, title=f"{e.title}, {variant}") for e in shown] if system.show_all else []
    return {
        "name": system.name,
        "title": system.title,
        "about": system.about,
        "data": system.data,
        "tokens": system.tokens,
        "records": records,
        "exhibits": [drawn(exhibit) for exhibit in exhibits],
        "curves": page.svg(plots.curves_figure(record)),
    }


def drawn(exhibit: runner.Exhibit) -> dict[str, Any]:
    """Ready for JSON."""
    figure = None if exhibit.figure is None else page.svg(exhibit.figure)
    return {
        "title": exhibit.title,
        "note": exhibit.note,
        "figure": figure,
        "table": exhibit.table,
        "text": exhibit.text,
    }


def summary(chapters: Sequence[Chapter]) -> list[dict[str, Any]]:
    """A row for each system: means over the seeds of the main variant."""
    rows = []
    for found in chapters:
        record = found["records"][0]
        ours, theirs = (runner.metrics(record, library) for library in ("seqkern", "torch"))
        seeds = record["seeds"]
        best = (max if record["higher_is_better"] else min)(record["baselines"].items(), key=lambda item: item[1])
        mean, sign = statistics.fmean(ours), 1 if record["higher_is_better"] else -1
        rows.append(
            {
                "name": found["name"],
                "title": found["title"],
                "variant": record["variant"],
                "metric": record["metric"],
                "ours": mean,
                "theirs": statistics.fmean(theirs) if theirs else None,
                "noise": statistics.stdev(ours) if len(ours) > 1 else None,
                "against": (record["against"], record["baselines"][record["against"]]),
                "best": best,
                "beaten": sign * (mean - best[1]) > 0,
                "speed_ratio": statistics.median(seed["speed_ratio"] for seed in seeds),
                "peak_bytes": record["peak_bytes"],
            }
        )  # fmt: skip
    return rows


def commit() -> str:
    """Of this checkout; of a copy without one, unknown."""
    command = ["git", "-C", str(page.TEMPLATES.parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(results: dict[str, Any], directory: Path) -> Path:
    """results.json and index.html, which holds everything and needs nothing."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results, indent=1))
    path = directory / "index.html"
    rows = summary(results["chapters"])
    path.write_text(page.environment().get_template("gallery.html.j2").render(rows=rows, **results), encoding="utf-8")
    return path


def measured(results: dict[str, Any]) -> dict[str, Any]:
    """What is worth keeping of a run: every number but the curves, and nothing to look at."""
    chapters = []
    for found in results["chapters"]:
        records = json.loads(json.dumps(found["records"]))
        for record in records:
            for seed in record["seeds"]:
                for run in seed["runs"].values():
                    del run["losses"]
        chapters.append({key: found[key] for key in ("name", "title", "data")} | {"records": records})
    kept = ("created", "version", "commit", "seconds", "machine", "threads", "seeds")
    return {key: results[key] for key in kept} | {"systems": chapters}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.redraw:
        results = json.loads((options.out / "results.json").read_text())
        console.console.print(write(results, options.out).resolve(), soft_wrap=True, highlight=False)
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    begin, chapters = time.perf_counter(), []
    for name in options.only or SYSTEMS:
        chapters.append(chapter(runner.load(name), range(options.seeds), options.steps, not options.main_only))
    checks = [check for found in chapters for record in found["records"] for check in record["checks"]]
    results = {
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "version": seqkern.__version__,
        "commit": commit(),
        "seconds": time.perf_counter() - begin,
        "machine": _explain.describe_machine(),
        "threads": torch.get_num_threads(),
        "seeds": options.seeds,
        "shortened": options.steps is not None,
        "chapters": chapters,
        "checks": checks,
    }
    path = write(results, options.out)
    if options.keep:
        options.keep.parent.mkdir(parents=True, exist_ok=True)
        options.keep.write_text(json.dumps(measured(results), indent=1) + "\n")
    console.console.print(console.systems_table([record for found in chapters for record in found["records"]]))
    console.console.print(console.checks_table(checks))
    console.console.print(f"{results['seconds']:.0f} s. {path.resolve()}", soft_wrap=True, highlight=False)
    return 0 if all(check["passed"] for check in checks) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAMES", help=", ".join(SYSTEMS))
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="trainings of each main variant (default: 1)")
    parser.add_argument("--main-only", action="store_true", help="without the other variants")
    parser.add_argument("--steps", type=int, help="instead of the recipes'")
    parser.add_argument("--threads", type=int, help="default: torch's choice")
    parser.add_argument("--out", type=Path, default=Path("report/gallery"), metavar="DIRECTORY")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the numbers there, without curves")
    parser.add_argument("--redraw", action="store_true", help="the page alone, from results.json")
    options = parser.parse_args(arguments)
    for name in options.only or ():
        if name not in SYSTEMS:
            parser.error(f"--only: {name} is not one of {', '.join(SYSTEMS)}")
    for name, least in (("seeds", 1), ("steps", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
