"""README's table of trained systems and their part of RESULTS.md, from benchmarks/results/<machine>/systems.json.

`python -m examples.gallery --keep FILE` writes such a file; benchmarks/pages.py puts both where they belong.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def metric(record: Record, library: str) -> str:
    """Mean of the seeds, and their standard deviation where there are several."""
    found = [seed["runs"][library]["metric"] for seed in record["seeds"] if library in seed["runs"]]
    if not found:
        return "-"
    spread = f" ± {statistics.stdev(found):.2g}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.4g}{spread}"


def speed_ratio(record: Record) -> float:
    """The median of torch's time over seqkern's, of the seeds' medians."""
    return statistics.median(seed["speed_ratio"] for seed in record["seeds"])


def memory_share(record: Record) -> float | None:
    peaks = record["peak_bytes"]
    return peaks["seqkern"] / peaks["torch"] if peaks.get("seqkern") and peaks.get("torch") else None


def best_baseline(record: Record) -> tuple[str, float]:
    name, value = (max if record["higher_is_better"] else min)(record["baselines"].items(), key=lambda item: item[1])
    return name, value


def marked(text: str, loses: bool) -> str:
    return f"**{text}**" if loses else text


def newest(folder: Path) -> dict[str, Any] | None:
    """The latest stored run of all systems."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*/systems.json"))]
    return max(files, key=lambda file: file["created"]) if files else None


def readme_rows(stored: dict[str, Any]) -> list[list[str]]:
    """A row for each system: its main variant."""
    rows = []
    for system in stored["systems"]:
        record = system["records"][0]
        name, value = best_baseline(record)
        ours = statistics.fmean(seed["runs"]["seqkern"]["metric"] for seed in record["seeds"])
        beaten = ours > value if record["higher_is_better"] else ours < value
        share = memory_share(record)
        rows.append(
            [
                f"[{system['title']}](examples/{system['name']}.py)",
                record["metric"],
                metric(record, "seqkern"),
                metric(record, "torch"),
                marked(f"{value:.3g}, {name}", not beaten),
                marked(f"{speed_ratio(record):.2f}", speed_ratio(record) < 1),
                "-" if share is None else marked(f"{share:.0%}", share > 1),
            ]
        )
    return rows


README_HEAD = ("system", "metric", "seqkern", "plain torch", "best baseline", "times faster", "memory")

HEAD = (
    "system",
    "variant",
    "parameters",
    "metric",
    "seqkern",
    "plain torch",
    "baselines",
    "ratio",
    "quartiles",
    "peak, MB",
)


def page_rows(stored: dict[str, Any]) -> list[list[str]]:
    """A row for each variant."""
    rows = []
    for system in stored["systems"]:
        for record in system["records"]:
            twin = "speed_ratio" in record["seeds"][0]
            low, high = (f([seed["speed_quartiles"][i] for seed in record["seeds"]]) if twin else 0.0
                         for i, f in enumerate((min, max)))  # fmt: skip
            peaks = record["peak_bytes"]
            rows.append(
                [
                    system["title"],
                    record["variant"],
                    f"{record['parameters']:,}",
                    record["metric"],
                    metric(record, "seqkern"),
                    metric(record, "torch"),
                    "; ".join(f"{name} {value:.4g}" for name, value in record["baselines"].items()),
                    marked(f"{speed_ratio(record):.2f}", speed_ratio(record) < 1) if twin else "-",
                    f"{low:.2f} to {high:.2f}" if twin else "-",
                    ", ".join(f"{peaks[name] / 1e6:.1f}" for name in ("seqkern", "torch")) if twin and peaks else "-",
                ]
            )
    return rows


def about(path: Path) -> str:
    """The run that a stored file holds, in words."""
    stored = json.loads(path.read_text())
    machine = dict(stored["machine"])
    run = f"{machine['processor']}, {machine['CPU kernels'].split(' (')[0]}, torch {machine['torch']}"
    return (
        "## Systems of the textbooks\n\n"
        f"`{path.parent.name}/{path.name}`: {run}, {stored['threads']} threads, commit {stored['commit'][:8]}, "
        f"{stored['created'][:10]}. Each system of `seqkern.models` beside its twin in plain torch, in turns of a few "
        f"steps, {stored['seeds']} seeds (other variants one, without a twin): mean and "
        "standard deviation of the metric on held-out data. Ratio: the median over all steps of torch's time over "
        "seqkern's; its quartiles, the widest of the seeds. Peak: extra memory of a training step, seqkern's and "
        "torch's.\n\n"
    )
