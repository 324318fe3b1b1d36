"""What the documents say that can be looked up: figures in stored results, links, files, variables, targets and ops."""

from __future__ import annotations

import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import seqkern
from benchmarks import pages

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
DOCUMENTS = {name: (ROOT / name).read_text() for name in NAMES}
README = DOCUMENTS["README.md"]
PAGE = pages.PAGE.read_text()
COMMAND = "run `python -m benchmarks.report --results`"

# ---- figures: the pages are what benchmarks/pages.py makes of the stored results ----------------------------------


@pytest.fixture(scope="module")
def runs() -> list[pages.Run]:
    return pages.load()


def test_the_pages_are_up_to_date(runs: list[pages.Run]) -> None:
    assert pages.results_page(runs) == PAGE, COMMAND
    assert pages.with_table(README, pages.readme_table(runs)) == README, COMMAND
    assert pages.with_table(README, pages.systems_table(), pages.SYSTEMS) == README, COMMAND
    description = next(e for e in ElementTree.parse(pages.PICTURE).iter() if e.tag.endswith("}description"))
    assert json.loads(str(description.text)) == pages.ranges(runs), COMMAND


# ---- figures: and each of them stands in the files, looked up without benchmarks/pages.py -------------------------


def stored(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name and measurements of every benchmark of a machine; of one that two files have, the later measurement."""
    files = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for file in sorted((f for f in files if "benchmarks" in f), key=lambda file: file["datetime"]):
        for case in file["benchmarks"]:
            found[case["name"], case["extra_info"]["threads"]] = case["extra_info"]
    return [(name, info) for (name, _), info in found.items()]


def op(info: dict[str, Any]) -> str:
    """With the backend where a run forced one."""
    backend = info.get("backend", "auto")
    return info["op"] if backend == "auto" else f"{info['op']} {backend}"


def place(info: dict[str, Any]) -> str:
    return "GPU" if info["device"] == "cuda" else {1: "1 thread"}.get(info["threads"], f"{info['threads']} threads")


def strongest(info: dict[str, Any]) -> dict[str, Any]:
    others = [name for name in info["peers"] if "seqkern" not in name and name != "products alone"]  # a bound, no peer
    name = min(others, key=lambda name: info["peers"][name]["speedup"])
    return {"name": name, **info["peers"][name]}


def tables(text: str) -> list[tuple[str, list[list[str]]]]:
    """Every table with the last heading before it; rows of cells, the first being the head."""
    found, heading, rows = [], "", []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            found.append((heading, [rows[0], *rows[2:]]))
            rows = []
        if line.startswith("#"):
            heading = line.lstrip("# ")
    return found


MACHINES = sorted(path.name for path in RESULTS.iterdir())


@pytest.mark.parametrize("machine", MACHINES)
def test_every_case_of_a_machine_stands_once_in_the_results_with_its_numbers(machine: str) -> None:
    (section,) = re.findall(rf"^## {machine}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    shown = {}
    for heading, (head, *rows) in tables(section)[1:]:
        assert head == [
            "shape",
            "dtype",
            "pass",
            "seqkern, ms",
            "best peer",
            "its ms",
            "ratio",
            "quartiles",
            "of roofline",
        ]
        for row in rows:
            assert (heading, *row[:3]) not in shown
            shown[(heading, *row[:3])] = row[3:]
    cases = stored(RESULTS / machine)
    assert len(shown) == len(cases)
    for _, info in cases:
        ours, name, theirs, ratio, quartiles, roofline = shown[
            f"{op(info)}, {place(info)}", info["shape"], info["dtype"], info["mode"]
        ]
        peer = strongest(info)
        assert name == peer["name"]
        assert float(ours) == pytest.approx(info["milliseconds"], rel=5.1e-3)
        assert float(theirs) == pytest.approx(peer["milliseconds"], rel=5.1e-3)
        assert all(len(re.sub(r"^[0.]+|\.", "", figure)) >= 3 for figure in (ours, theirs))
        assert ratio.strip("*") == f"{peer['speedup']:.2f}"
        assert ratio.startswith("**") == (peer["speedup_high"] < 1)
        assert quartiles == f"{peer['speedup_low']:.2f} to {peer['speedup_high']:.2f}"
        assert roofline == f"{info['share_of_roofline'] * 100:.0f}%"


def counted(cases: list[dict[str, Any]]) -> list[int]:
    """How many cases, and how many are faster, even and slower."""
    peers = [strongest(info) for info in cases]
    faster, slower = sum(p["speedup_low"] > 1 for p in peers), sum(p["speedup_high"] < 1 for p in peers)
    return [len(peers), faster, len(peers) - faster - slower, slower]


def test_wins_and_losses_are_those_of_the_cases() -> None:
    (rows,) = (rows for heading, rows in tables(PAGE) if heading == "Wins and losses")
    expected = []
    for machine in MACHINES:
        cases = [info for _, info in stored(RESULTS / machine)]
        for where in {place(info) for info in cases}:
            chosen = [info for info in cases if place(info) == where]
            expected.append([machine, where, *map(str, counted(chosen))])
    assert sorted(rows[1:]) == sorted(expected)


def test_ranges_are_those_of_the_cases() -> None:
    (rows,) = (rows for heading, rows in tables(PAGE) if heading == "By op")
    assert rows[0] == ["op", "dtype", *MACHINES]
    for column, machine in enumerate(MACHINES, start=2):
        ratios: dict[tuple[str, str], list[float]] = {}
        cases = [info for _, info in stored(RESULTS / machine)]
        for info in cases:
            if info["threads"] == max(info["threads"] for info in cases):
                ratios.setdefault((op(info), info["dtype"]), []).append(strongest(info)["speedup"])
        for row in rows[1:]:
            found = ratios.pop((row[0], row[1]), [])
            expected = f"{min(found):.2f}, **{statistics.median(found):.2f}**, {max(found):.2f}" if found else "-"
            assert row[column] == expected, (machine, row[:2])
        assert not ratios


def test_every_stored_file_is_cited_with_its_run() -> None:
    cited = {}
    for _, (head, *rows) in tables(PAGE):
        if head[0] == "file":
            cited |= {row[0].strip("`"): row[1:] for row in rows}
    timed = {}
    for path in RESULTS.glob("*/*.json"):
        file = json.loads(path.read_text())
        if "benchmarks" not in file:
            assert f"`{path.parent.name}/{path.name}`" in PAGE
            continue
        about, infos = file["machine_info"]["seqkern"], [case["extra_info"] for case in file["benchmarks"]]
        kernels = about.get("cuda:0", f"{about['processor']}, {about['CPU kernels'].split(' (')[0]}")
        spans = []
        for key, dtype in (("gflops", "float32"), ("gflops", "bfloat16"), ("gbytes", "")):
            rates = [info[f"roofline_{key}_per_second"] for info in infos if dtype in info["dtype"]]
            ends = [f"{end:.0f}" for end in (min(rates), max(rates))] if rates else ["-"]
            spans.append(" to ".join(dict.fromkeys(ends)))
        timed[f"{path.parent.name}/{path.name}"] = [
            kernels, about["torch"], about["commit"][:8], file["datetime"][:10], *spans
        ]  # fmt: skip
    assert cited == timed


def test_host_time_is_that_of_the_stored_file() -> None:
    (rows,) = (rows for heading, rows in tables(PAGE) if heading.startswith("Host time"))
    file = json.loads((RESULTS / "epyc-avx2-2-cores" / "host-time.json").read_text())
    assert rows[1:] == [[r["call"], f"{r['new_us']:.1f}", f"{r['made_before_us']:.1f}"] for r in file["rows"]]


README_MACHINES = {
    "Zen 3, AVX2": "epyc-avx2-2-cores",
    "Zen 4, AVX-512": "epyc-avx512-2-cores",
    "Zen 5, AVX-512": "epyc-zen5-2-cores",
    "Xeon, AMX": "xeon-amx-2-cores",
}
README_CASES = {
    "attention forward, causal, N 4096, D 64": "test_attention[D64-N4096-float32-forward-causal]",
    "attention backward, causal, N 1024, D 64": "test_attention[D64-N1024-bfloat16-backward-causal]",
    "attention backward, no mask, N 4096, D 128": "test_attention[D128-N4096-float32-backward-full]",
    "decoding, 32 heads on 8, 8192 keys, D 128": "test_decode[bfloat16-D128-B1 H32 Q1 N8192]",
    "layer norm training, 4096 x 768": "test_norm[float32-forward+backward-layer_norm-4096x768]",
    "add + RMS norm training, 4096 x 768": "test_norm[bfloat16-forward+backward-add_rms_norm-4096x768]",
    "ragged LSTM training, 32 x 128, width 512": "test_ragged[float32-forward+backward-LSTM-B32-T128-H512]",
    "LSTM inference, 32 x 128, width 512": "test_layer[float32-forward-LSTM-B32-T128-H512]",
    "LSTM training, 64 x 32, width 1024": "test_layer[float32-forward+backward-LSTM-B64-T32-H1024]",
    "RNN training, one step, width 256": "test_layer[float32-forward+backward-RNN-B1-T1-H256]",
}


def two_digits(x: float) -> str:
    return f"{x:.2f}" if x < 0.995 else f"{x:.1f}" if x < 9.95 else f"{x:.0f}"


def test_readmes_table_is_that_of_the_stored_results() -> None:
    (rows,) = (rows for heading, rows in tables(README) if heading == "Speed")
    assert rows[0] == ["case", "", *README_MACHINES]
    assert [row[0] for row in rows[1:]] == list(README_CASES)
    everything: list[dict[str, Any]] = []
    for column, folder in enumerate(README_MACHINES.values(), start=2):
        cases = {name: info for name, info in stored(RESULTS / folder) if info["threads"] == 2}
        everything += cases.values()
        for row in rows[1:]:
            name = README_CASES[row[0]]
            info = cases[name if name in cases else name.replace("H32 ", "")]  # older files have 32 heads alone
            peer = strongest(info)
            figure = two_digits(peer["speedup"])
            assert row[1] == {"float32": "fp32", "bfloat16": "bf16"}[info["dtype"]]
            assert row[column] == (f"**{figure}**" if peer["speedup_high"] < 1 else figure), (folder, row[0])
    total, faster, even, slower = counted(everything)
    sentence = f"Of all {total:,} cases on these machines, 2 threads each, seqkern is faster in {faster:,}, "
    assert sentence + f"even in {even:,}, slower in {slower:,}." in README


def test_readmes_systems_are_those_of_the_latest_stored_run() -> None:
    files = [json.loads(path.read_text()) for path in RESULTS.glob("*/systems.json")]
    shown = [rows[1:] for _, rows in tables(README) if rows[0][0] == "system"]
    assert len(shown) == min(1, len(files))
    if not files:  # nothing is claimed then
        return
    stored, (rows,) = max(files, key=lambda file: file["created"]), shown
    for row, system in zip(rows, stored["systems"], strict=True):
        record = system["records"][0]
        assert row[:2] == [f"[{system['title']}](examples/{system['name']}.py)", record["metric"]]
        assert (ROOT / "examples" / f"{system['name']}.py").exists()
        assert len(record["seeds"]) == 3
        for library, cell in zip(("seqkern", "torch"), row[2:4], strict=True):
            found = [seed["runs"][library]["metric"] for seed in record["seeds"]]
            mean, deviation = map(float, cell.split(" ± "))
            assert mean == pytest.approx(statistics.fmean(found), rel=1e-3)
            assert deviation == pytest.approx(statistics.stdev(found), rel=0.06, abs=1e-9)
        name = row[4].strip("*").split(", ", 1)[1]
        best = sorted(record["baselines"].values(), reverse=record["higher_is_better"])[0]
        assert record["baselines"][name] == best
        lost = mean_of(record) < best if record["higher_is_better"] else mean_of(record) > best
        assert row[4].startswith("**") == lost
        ratio = statistics.median(seed["speed_ratio"] for seed in record["seeds"])
        assert row[5] == (f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**")
        share = record["peak_bytes"]["seqkern"] / record["peak_bytes"]["torch"]
        assert row[6] == (f"{share:.0%}" if share <= 1 else f"**{share:.0%}**")
        assert all(check["passed"] for check in record["checks"])


def mean_of(record: dict[str, Any]) -> float:
    return statistics.fmean(seed["runs"]["seqkern"]["metric"] for seed in record["seeds"])


def test_readme_is_short_and_has_no_other_figures() -> None:
    text = README
    for start, end in (pages.MARKERS, pages.SYSTEMS):
        text = text[: text.index(start)] + text[text.index(end) :]
    assert len(re.sub(r"^\|.*\n", "", README, flags=re.MULTILINE).split()) <= 900  # and three tables
    assert not re.findall(r"\d[\d.,]* ?(?:times|x faster|%|us\b|ms\b|GF/s|GB/s)", text)


# ---- names --------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [*DOCUMENTS, "benchmarks/RESULTS.md", "benchmarks/GPU.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_every_public_op_stands_in_readmes_support_matrix() -> None:
    (rows,) = (rows for heading, rows in tables(README) if heading == "What is supported")
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows[1:]))
    others = {
        "explain",
        "generate",
        "models",
        "nn",
        "optimize",
        "reference",
        "release_memory",
        "restore",
        "use_backend",
    }
    assert sorted(named) == sorted(set(seqkern.__all__) - others)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_exist(name: str) -> None:
    folders = "csrc|kernels|seqkern|tests|benchmarks|examples|docs"
    paths = re.findall(rf"(?<![\w./])((?:{folders})/[\w./-]+)(?![\w<*./-])", DOCUMENTS[name])
    missing = [path for path in paths if not (ROOT / path.rstrip("./")).exists()]
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_variables_and_targets_exist(name: str) -> None:
    sources = [path for folder in ("seqkern", "tests/simt") for path in (ROOT / folder).rglob("*.*")]
    code = "".join(p.read_text() for p in [*sources, *ROOT.glob("setup*.py")] if p.suffix in (".py", ".cpp", ".h"))
    variables = set(re.findall(r"SEQKERN_[A-Z_]+", DOCUMENTS[name]))
    assert not {v for v in variables if not re.search(rf'"{v}"', code)}
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^|\d )make ([\w-]+)", DOCUMENTS[name], re.MULTILINE))
    assert not {t for t in targets if not re.search(rf"^([\w-]+ )*{t}( [\w-]+)*:", makefile, re.MULTILINE)}
