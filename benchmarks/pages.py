"""The pages that show stored results: RESULTS.md, README's table, and the picture of all ratios.

`python -m benchmarks.report --results` writes all three from the JSON files under benchmarks/results, and
tests/package/test_documents.py fails when one of them says anything else than those files.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report, systems

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
STORED = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "ratios.svg"
MARKERS = ("<!-- results: python -m benchmarks.report --results -->\n", "<!-- end of results -->\n")
SYSTEMS = ("<!-- systems: python -m benchmarks.report --results -->\n", "<!-- end of systems -->\n")

# README's columns: a folder of results, and what README calls the machine.
COLUMNS = {
    "epyc-avx2-2-cores": "Zen 3, AVX2",
    "epyc-avx512-2-cores": "Zen 4, AVX-512",
    "epyc-zen5-2-cores": "Zen 5, AVX-512",
    "xeon-amx-2-cores": "Xeon, AMX",
}

# README's rows: label, dtype, and the case by op, shape, dtype and mode.
ROWS = (
    ("attention forward, causal, N 4096, D 64", ("attention causal", "B1 H8 N4096 D64", "float32", "forward")),
    ("attention backward, causal, N 1024, D 64", ("attention causal", "B1 H8 N1024 D64", "bfloat16", "backward")),
    ("attention backward, no mask, N 4096, D 128", ("attention", "B1 H8 N4096 D128", "float32", "backward")),
    ("decoding, 32 heads on 8, 8192 keys, D 128", ("attention decode", "B1 H32/8 N8192 D128", "bfloat16", "forward")),
    ("layer norm training, 4096 x 768", ("layer_norm", "4096 x 768", "float32", "forward+backward")),
    ("add + RMS norm training, 4096 x 768", ("add_rms_norm", "4096 x 768", "bfloat16", "forward+backward")),
    ("ragged LSTM training, 32 x 128, width 512", ("LSTM ragged", "B32 T128 H512", "float32", "forward+backward")),
    ("LSTM inference, 32 x 128, width 512", ("LSTM", "B32 T128 H512", "float32", "forward")),
    ("LSTM training, 64 x 32, width 1024", ("LSTM", "B64 T32 H1024", "float32", "forward+backward")),
    ("RNN training, one step, width 256", ("RNN", "B1 T1 H256", "float32", "forward+backward")),
)

HEAD = ("shape", "dtype", "pass", "seqkern, ms", "best peer", "its ms", "ratio", "quartiles", "of roofline")

INTRODUCTION = """\
# Results

Every number on this page comes from a JSON file under `benchmarks/results`. Do not edit it by hand:
`python -m benchmarks.report --results` writes it, and a test compares it with the files.

How to read it:

- **ratio**: the best peer's time divided by seqkern's, the median over interleaved rounds. Above 1 seqkern is faster.
- **quartiles**: of that ratio over the rounds. A case is *faster* or *slower* when both are on one side of 1, otherwise
  it is *even*. The ratio of a slower case is in bold.
- **best peer**: of the peers timed in the same run, the one with the lowest ratio: `torch` (eager), `torch.compile`,
  `torch packed` (packed sequences), `torch padded`, `torch one by one` (a call for each sequence), `torch loop` (a
  Python loop over the steps), `torch unfolded` (a product of copied windows). Beside masks as matrices the files hold
  seqkern's own option too, beside losses the matrix products alone, without which no implementation does.
- **of roofline**: the least time that the work can take, divided by seqkern's time. The least time follows from the
  rate of a large matrix product and the bandwidth of a large copy (decoding: of reading), measured in the same run. The
  share passes 100 % where the data stay in a cache.
- **shape**: B batch, H heads (32/8: 32 query heads on 8) or, of a recurrent layer, its width, N keys, D head dimension,
  T steps; rows x columns of a norm.
- Of a case that two files of one machine hold, the page shows the later run.

The machines are shared and noisy. Large float32 norms wait for memory, torch's also for fresh pages: their ratios
change most from run to run. The time of small norms is mostly autograd's, torch's and seqkern's. Measure your own
machine with `python -m benchmarks`.
"""
NO_GPU = "**No result of a GPU is stored: speed there is not measured.**\n"


@dataclass(frozen=True)
class Run:
    """One stored file: where it lies, what it says about the machine, and its cases."""

    machine: str
    file: str
    date: str
    about: dict[str, str]
    cases: list[dict[str, Any]]


Cases = dict[tuple[str, ...], dict[str, Any]]  # by op, shape, dtype, mode and place (threads, or the GPU)


def load(folder: Path = STORED) -> list[Run]:
    """All stored runs, by machine and file name."""
    runs = []
    for path in sorted(folder.glob("*/*.json")):
        stored = json.loads(path.read_text())
        if "benchmarks" in stored:
            about, cases = report.load(path)
            runs.append(Run(path.parent.name, path.name, stored["datetime"], about, cases))
    return runs


def latest(runs: Iterable[Run]) -> Cases:
    """The cases of these runs in the files' order, each from the latest run that has it."""
    runs = list(runs)
    order = dict.fromkeys(key for run in runs for key in map(key_of, run.cases))
    found = {key_of(case): case for run in sorted(runs, key=lambda run: run.date) for case in run.cases}
    return {key: found[key] for key in order}


def key_of(case: dict[str, Any]) -> tuple[str, ...]:
    return report.named(case), case["shape"], case["dtype"], case["mode"], place(case)


def place(case: dict[str, Any]) -> str:
    if case["device"] == "cuda":
        return "GPU"
    return f"{case['threads']} thread" + "s" * (case["threads"] != 1)


# Timed beside the peers, but part of the work only: what no implementation can do without.
BOUND = "products alone"


def best_peer(case: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """Name and times of the strongest competitor."""
    others = {name: peer for name, peer in case["peers"].items() if not name.startswith("seqkern") and name != BOUND}
    return min(others.items(), key=lambda peer: peer[1]["speedup"])


def ratio(case: dict[str, Any]) -> float:
    return best_peer(case)[1]["speedup"]


def outcome(case: dict[str, Any]) -> str:
    peer = best_peer(case)[1]
    if peer["speedup_low"] > 1:
        return "faster"
    return "slower" if peer["speedup_high"] < 1 else "even"


# ---- RESULTS.md ---------------------------------------------------------------------------------------------------


def results_page(runs: list[Run], folder: Path = STORED) -> str:
    """The whole page."""
    machines = list(dict.fromkeys(run.machine for run in runs))
    by_machine = {machine: latest(run for run in runs if run.machine == machine) for machine in machines}
    on_gpu = any(key[-1] == "GPU" for cases in by_machine.values() for key in cases)
    parts = [INTRODUCTION, *([] if on_gpu else [NO_GPU]), _counts(by_machine), _overview(by_machine)]
    for machine, cases in by_machine.items():
        parts.append(f"## {machine}\n\n{_files([run for run in runs if run.machine == machine])}")
        for op, where in dict.fromkeys((key[0], key[-1]) for key in cases):
            rows = [row(case) for key, case in cases.items() if (key[0], key[-1]) == (op, where)]
            parts.append(f"### {op}, {where}\n\n{markdown(HEAD, rows, left=(0, 1, 2, 4))}")
    for path in sorted(folder.glob("*/systems.json")):
        rows = systems.page_rows(json.loads(path.read_text()))
        parts.append(systems.about(path) + markdown(systems.HEAD, rows, left=(0, 1, 3, 6)))
    parts += [_small_calls(path) for path in sorted(folder.glob("*/small-calls.json"))]
    parts += [_products(path) for path in sorted(folder.glob("*/products*.json"))]
    parts += [_host_time(path) for path in sorted(folder.glob("*/host-time.json"))]
    return "\n".join(parts)


def row(case: dict[str, Any]) -> list[str]:
    """A case as cells under HEAD."""
    name, peer = best_peer(case)
    return [
        case["shape"], case["dtype"], case["mode"], digits(case["milliseconds"]), name, digits(peer["milliseconds"]),
        bold(f"{peer['speedup']:.2f}", case), f"{peer['speedup_low']:.2f} to {peer['speedup_high']:.2f}",
        f"{case['share_of_roofline']:.0%}",
    ]  # fmt: skip


def _counts(by_machine: dict[str, Cases]) -> str:
    rows = []
    for machine, cases in by_machine.items():
        for where in dict.fromkeys(key[-1] for key in cases):
            outcomes = [outcome(case) for key, case in cases.items() if key[-1] == where]
            shown = [str(outcomes.count(name)) for name in ("faster", "even", "slower")]
            rows.append([machine, where, str(len(outcomes)), *shown])
    return "## Wins and losses\n\n" + markdown(("machine", "", "cases", "faster", "even", "slower"), rows, left=(0, 1))


def _overview(by_machine: dict[str, Cases]) -> str:
    full = {machine: _most_threads(cases) for machine, cases in by_machine.items()}
    text = (
        "## By op\n\nRatio to the best peer over all shapes and passes: lowest, **median**, highest; on the most "
        "threads that the machine was measured with.\n\n"
    )
    return text + overview(full, {machine: machine for machine in full})


def overview(by_machine: dict[str, Cases], titles: dict[str, str], only: Iterable[str] | None = None) -> str:
    """A row for each op and dtype, of all ops or `only` some: the ratios on every machine; titles: of the columns."""
    rows = []
    pairs = dict.fromkeys((key[0], key[2]) for cases in by_machine.values() for key in cases)
    ops = list(dict.fromkeys(op for op, _ in pairs) if only is None else only)
    for op, dtype in sorted((pair for pair in pairs if pair[0] in ops), key=lambda pair: ops.index(pair[0])):
        found = [
            [ratio(case) for key, case in cases.items() if (key[0], key[2]) == (op, dtype)]
            for cases in by_machine.values()
        ]
        rows.append([op, dtype, *(_range(ratios) for ratios in found)])
    return markdown(("op", "dtype", *(titles[machine] for machine in by_machine)), rows, left=(0, 1))


def _most_threads(cases: Cases) -> Cases:
    most = max(case["threads"] for case in cases.values())
    return {key: case for key, case in cases.items() if case["threads"] == most}


def _range(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    return f"{min(ratios):.2f}, **{statistics.median(ratios):.2f}**, {max(ratios):.2f}"


def _files(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        about = run.about
        kernels = about.get("cuda:0") or f"{about['processor']}, {about['CPU kernels'].split(' ')[0]}"
        rates = [_rates([c for c in run.cases if c["dtype"] == dtype]) for dtype in ("float32", "bfloat16")]
        bandwidth = _span([case["roofline_gbytes_per_second"] for case in run.cases])
        versions = (about["torch"], about["commit"][:8], run.date[:10])
        rows.append([f"`{run.machine}/{run.file}`", kernels, *versions, *rates, bandwidth])
    head = ("file", "machine, kernels", "torch", "commit", "date", "float32 GF/s", "bfloat16 GF/s", "GB/s")
    text = "GF/s: rate of a large matrix product. GB/s: bandwidth of memory. Lowest and highest of the run.\n\n"
    return text + markdown(head, rows, left=(0, 1, 2, 3, 4))


def _rates(cases: list[dict[str, Any]]) -> str:
    return _span([case["roofline_gflops_per_second"] for case in cases])


def _span(values: list[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def _host_time(path: Path) -> str:
    stored = json.loads(path.read_text())
    text = (
        "## Host time of a Triton call\n\n"
        f"`{path.parent.name}/{path.name}`: {stored['device']}, torch {stored['torch']}, triton {stored['triton']}. "
        "Microseconds from a launcher's entry to its last launch. The compile-only driver launches nothing, so the "
        "time of a driver's own launch is missing.\n\n"
    )
    rows = [[r["call"], f"{r['new_us']:.1f}", f"{r['made_before_us']:.1f}"] for r in stored["rows"]]
    return text + markdown(("call", "of a new shape", "of a shape seen before"), rows, left=(0,))


def _small_calls(path: Path) -> str:
    stored = json.loads(path.read_text())
    machine = stored["machine"]
    text = (
        "## Small calls\n\n"
        f"`{path.parent.name}/{path.name}`: {machine['processor']}, torch {machine['torch']}, one thread. Microseconds "
        "of a call with hardly any arithmetic, and of it and its backward pass; how many times torch's speed seqkern "
        "has.\n\n"
    )
    rows = []
    for call in stored["calls"]:
        cells = [call["op"]]
        for mode in ("inference", "training"):
            found = call[mode]
            ratio = f"{found['ratio']:.2f}"
            cells += [
                f"{found['ours_us']:.1f}",
                f"{found['torch_us']:.1f}",
                ratio if found["ratio"] >= 1 else f"**{ratio}**",
            ]
        rows.append(cells)
    head = ("call", "inference", "torch", "ratio", "training", "torch", "ratio")
    return text + markdown(head, rows, left=(0,))


def _products(path: Path) -> str:
    stored = json.loads(path.read_text())
    machine, threads = stored["machine"], stored["threads"]
    count = f"{threads} thread{'s' if threads > 1 else ''}"
    text = (
        f"## Products, {count}\n\n"
        f"`{path.parent.name}/{path.name}`: {machine['processor']}, {machine['CPU kernels'].split(' (')[0]}, torch "
        f"{machine['torch']}, {count}. Rows x columns x depth of the products "
        "that the ops are made of (`benchmarks/products.py` says how), and the share of the multiply-add peak that "
        "seqkern, torch's matmul and oneDNN's linear reach in turns; seqkern's quartiles.\n\n"
    )
    rows = []
    for row in stored["products"]:
        shares = row["shares"]
        best = max(share for name, share in shares.items() if name != "seqkern")
        own = f"{shares['seqkern']:.0%}"
        rows.append(
            [
                *(row[key] for key in ("use", "shape", "way", "dtype")),
                f"{row['peak_gflops']:.0f}",
                own if shares["seqkern"] >= best else f"**{own}**",
                " to ".join(f"{quartile:.0%}" for quartile in row["quartiles"]),
                f"{shares['torch']:.0%}",
                f"{shares['oneDNN']:.0%}" if "oneDNN" in shares else "-",
            ]
        )
    head = ("of", "shape", "way", "dtype", "peak, GF/s", "seqkern", "quartiles", "torch", "oneDNN")
    return text + markdown(head, rows, left=(0, 1, 2, 3))


def digits(x: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"


def bold(text: str, case: dict[str, Any]) -> str:
    """The ratio of a slower case in bold."""
    return f"**{text}**" if outcome(case) == "slower" else text


def markdown(head: Iterable[str], rows: list[list[str]], left: tuple[int, ...]) -> str:
    """A table; columns that are not in `left` are numbers."""
    head = list(head)
    rule = ["---" if i in left else "---:" for i in range(len(head))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


# ---- README -------------------------------------------------------------------------------------------------------


def readme_table(runs: list[Run]) -> str:
    """README's ten rows, and of all cases how many were won and lost."""
    by_machine = {machine: latest(run for run in runs if run.machine == machine) for machine in COLUMNS}
    rows = []
    for label, key in ROWS:
        cases = [cases.get((*key, "2 threads")) for cases in by_machine.values()]
        cells = [bold(two_digits(ratio(case)), case) if case else "-" for case in cases]
        rows.append([label, {"float32": "fp32", "bfloat16": "bf16"}[key[2]], *cells])
    outcomes = [outcome(c) for cases in by_machine.values() for key, c in cases.items() if key[-1] == "2 threads"]
    faster, even, slower = (outcomes.count(name) for name in ("faster", "even", "slower"))
    total = (
        f"\nOf all {len(outcomes):,} cases on these machines, 2 threads each, seqkern is faster in {faster:,}, "
        f"even in {even:,}, slower in {slower:,}.\n"
    )
    return markdown(("case", "", *COLUMNS.values()), rows, left=(0, 1)) + total


def two_digits(x: float) -> str:
    return f"{x:.2f}" if x < 0.995 else f"{x:.1f}" if x < 9.95 else f"{x:.0f}"


def systems_table(folder: Path = STORED) -> str:
    """README's table of trained systems, of the latest run that is stored."""
    stored = systems.newest(folder)
    return "" if stored is None else markdown(systems.README_HEAD, systems.readme_rows(stored), left=(0, 1, 4))


def with_table(text: str, table: str, markers: tuple[str, str] = MARKERS) -> str:
    """README with another table between its markers."""
    start, end = map(re.escape, markers)
    changed, count = re.subn(f"({start}).*?({end})", lambda m: f"{m[1]}\n{table}\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"README must have the markers {markers} once, found {count} pairs")
    return changed


# ---- the picture --------------------------------------------------------------------------------------------------

COLORS = {"float32": "#0072b2", "bfloat16": "#d55e00"}  # Okabe and Ito: apart for colour-blind readers


def ranges(runs: list[Run]) -> dict[str, dict[str, list[float]]]:
    """By op and dtype, over README's machines at 2 threads: lowest ratio, quartiles with the median, highest."""
    found: dict[str, dict[str, list[float]]] = {}
    for machine in COLUMNS:
        for (op, _, dtype, _, where), case in latest(run for run in runs if run.machine == machine).items():
            if where == "2 threads":
                found.setdefault(op, {}).setdefault(dtype, []).append(ratio(case))
    return {
        op: {dtype: [round(x, 4) for x in (min(r), *_quartiles(r), max(r))] for dtype, r in dtypes.items()}
        for op, dtypes in found.items()
    }


def _quartiles(ratios: list[float]) -> list[float]:
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def picture(found: dict[str, dict[str, list[float]]]) -> Figure:
    """A line for each op and dtype: all ratios (thin), the middle half (thick), the median (dot)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8, 0.8 + 0.27 * len(found)), layout="constrained")
    axes = figure.subplots()
    dots: dict[str, Any] = {}
    for i, dtypes in enumerate(found.values()):
        for dtype, (low, first, median, third, high) in dtypes.items():
            y, color = i + (0.17 if dtype == "bfloat16" else -0.17), COLORS[dtype]
            axes.plot([low, high], [y, y], color=color, linewidth=1)
            axes.plot([first, third], [y, y], color=color, linewidth=4, solid_capstyle="butt", alpha=0.6)
            (dot,) = axes.plot([median], [y], "o", color=color, markersize=4)
            dots[dtype] = dot
    axes.axvline(1, color="#777777", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel("time of the best peer / time of seqkern (right of 1: seqkern is faster)")
    axes.legend(dots.values(), dots, frameon=False, fontsize=8, loc="lower right")
    return figure


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """As SVG, with its data in the description."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "seqkern", "svg.fonttype": "none", "font.family": "sans-serif"}):
        picture(found).savefig(path, format="svg", metadata={"Date": None, "Description": json.dumps(found)})


def write() -> list[Path]:
    """Writes all three, and says where."""
    runs = load()
    PAGE.write_text(results_page(runs))
    readme = with_table(README.read_text(), readme_table(runs))
    README.write_text(with_table(readme, systems_table(), SYSTEMS))
    PICTURE.parent.mkdir(exist_ok=True)
    draw(ranges(runs), PICTURE)
    return [PAGE, README, PICTURE]
