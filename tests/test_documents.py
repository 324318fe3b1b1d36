"""What the documents say that can be looked up: figures in stored results, files, variables and targets by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

# ---- figures ------------------------------------------------------------------------------------------------------


def tables() -> dict[str, tuple[str, list[list[str]]]]:
    """README's tables by their first word: the paragraph before, and the rows of cells, the first being the head."""
    found = {}
    for match in re.finditer(r"\n\n((?:[^|\n].*\n)+)\n((?:\|.*\n)+)", README):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[2].splitlines()]
        found[head[0]] = (match[1], [head, *rows])
    return found


def speedups(text: str) -> dict[str, float]:
    """What the result files that the text names say, by the benchmark's name: times faster than torch's own."""
    results: dict[str, float] = {}
    for name in re.findall(r"[\w-]+/[\w-]+\.json", text):
        for case in json.loads((ROOT / "benchmarks" / "results" / name).read_text())["benchmarks"]:
            results[case["name"]] = next(iter(case["extra_info"]["peers"].values()))["speedup"]
    return results


def two_digits(x: float) -> str:
    return f"{x:.2f}" if x < 0.995 else f"{x:.1f}" if x < 9.95 else f"{x:.0f}"


def attention_cases(row: str, column: str) -> list[str]:
    causal, direction, dtype = re.fullmatch(r"(\w+) (\w+), (\w+)", column).groups()  # type: ignore[union-attr]
    return [f"test_attention[D{d}-N{row}-{DTYPES[dtype]}-{direction}-{causal}]" for d in (64, 128)]


def attention_passes(row: str, column: str) -> list[str]:
    (causal, direction), (dtype, d) = row.split(), column.split(", D ")
    lengths = (256, 1024, 4096, 8192) if dtype == "fp32" else (256, 1024)
    return [f"test_attention[D{d}-N{n}-{DTYPES[dtype]}-{direction}-{causal}]" for n in lengths]


def norm_cases(row: str, column: str) -> list[str]:
    op = "add_layer_norm" if column.startswith("add") else "layer_norm"
    return [f"test_norm[{dtype}-forward+backward-{op}-{row.replace(' ', '')}]" for dtype in DTYPES.values()]


def layer_cases(row: str, column: str) -> list[str]:
    (layer, dtype), (batch, steps, width) = row.rsplit(", ", 1), column.split(", ")
    test = "bidirectional" if "both" in layer else "ragged" if "ragged" in layer else "layer"
    cell = re.search("LSTM|GRU", layer)[0]  # type: ignore[index]
    return [
        f"test_{test}[{DTYPES[dtype]}-{mode}-{cell}-B{batch}-T{steps}-H{width}]"
        for mode in ("forward", "forward+backward")
    ]


CASES = {
    "N": attention_cases,
    "pass": attention_passes,
    "rows x columns": norm_cases,
    "layer": layer_cases,
}


@pytest.mark.parametrize("first", CASES)
def test_figures_are_those_of_the_stored_results(first: str) -> None:
    text, (head, *rows) = tables()[first]
    stored = speedups(text)
    assert stored, f"name the result files before the table: {text}"
    wrong = []
    for row, *cells in rows:
        for column, cell in zip(head[1:], cells, strict=True):
            figures = [two_digits(stored[name]) for name in CASES[first](row, column)] if cell else []
            if cell != ", ".join(figures):
                wrong.append(f"{row} | {column}: README has {cell}, the results {', '.join(figures)}")
    assert not wrong, "\n".join(wrong)


# ---- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_exist(name: str) -> None:
    folders = "csrc|kernels|seqkern|tests|benchmarks|examples"
    paths = re.findall(rf"(?<![\w./])((?:{folders})/[\w./-]+)(?![\w<*./-])", DOCUMENTS[name])
    missing = [path for path in paths if not (ROOT / path.rstrip("./")).exists()]
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_variables_and_targets_exist(name: str) -> None:
    sources = [path for folder in ("seqkern", "tests/simt") for path in (ROOT / folder).rglob("*.*")]
    code = "".join(p.read_text() for p in [*sources, ROOT / "setup.py"] if p.suffix in (".py", ".cpp", ".h"))
    variables = set(re.findall(r"SEQKERN_[A-Z_]+", DOCUMENTS[name]))
    assert not {v for v in variables if not re.search(rf'"{v}"', code)}
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^|\d )make ([\w-]+)", DOCUMENTS[name], re.MULTILINE))
    assert not {t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)}
