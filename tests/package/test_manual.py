"""The manual: it builds without a warning, documents every public name once, and needs nothing from the network."""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import seqkern
from seqkern._slices import FUNCTIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
pytest.importorskip("sphinx", reason="the extra `docs` is not installed")

# Modules whose `__all__` the manual documents; and what it documents of others.
MODULES = tuple(
    f"seqkern{name}" for name in ("", ".nn", ".models", ".embeddings", ".distributed", ".testing", ".reference")
)
OTHERS = {
    "seqkern.generation.Chunk",
    "seqkern.generation.Generated",
    "seqkern.integrations.kernels.kernelize",
    "seqkern.integrations.kernels.mapping",
    "seqkern.integrations.sdpa.Enabled",
    "seqkern.integrations.sdpa.disable",
    "seqkern.integrations.sdpa.enable",
    "seqkern.integrations.sdpa.enabled",
    "seqkern.integrations.transformers.register",
    "seqkern.integrations.transformers.takeover_sdpa",
}


def build(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["-W", "--keep-going", "-q", "-b", "html", "-d", folder / "doctrees", source, folder / "html"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built manual, which workers share."""
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "manual"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = shared / "told"
        if not told.exists():
            result = build(DOCS, shared)
            told.write_text(f"{result.returncode}\n{result.stdout}{result.stderr}")
    returncode, _, output = told.read_text().partition("\n")
    assert returncode == "0", output
    return shared / "html"


def test_no_page_is_left_out(manual: Path) -> None:
    """And no page warns: the fixture fails then."""
    pages = [path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")]
    assert len(pages) > 25
    assert not [page for page in pages if not (manual / page).exists()]
    index = (DOCS / "index.md").read_text()
    assert not [path.name for path in (DOCS / "ops").glob("*.md") if f"](ops/{path.name})" not in index]


def test_every_public_name_is_documented(manual: Path) -> None:
    """Twice would be a warning of Sphinx's, and so would be a name that does not exist."""
    *_, packed = (manual / "objects.inv").read_bytes().split(b"\n", 4)
    lines = [line.split() for line in zlib.decompress(packed).decode().splitlines()]
    kinds = ("py:function", "py:class", "py:data", "py:module", "py:exception")
    found = {name for name, kind, priority, *_ in lines if kind in kinds and priority != "-1"}  # -1: an alias
    expected = {f"{name}.{each}" for name in MODULES for each in importlib.import_module(name).__all__} | OTHERS
    assert found - set(MODULES) == expected - set(MODULES)


def test_every_op_has_its_tables() -> None:
    """The kernels and the errors of each function stand on one page of a family."""
    pages = {path.name: path.read_text() for path in (DOCS / "ops").glob("*.md")}
    kernels = [name for text in pages.values() for block in blocks("kernels", text) for name in block.split()]
    errors = [name for text in pages.values() for block in blocks("errors", text) for name in block.split()]
    assert sorted(kernels) == sorted(FUNCTIONS)
    assert sorted(errors) == sorted(seqkern.testing.CASES)
    for name, text in pages.items():
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        wanted = ["Meaning", "Examples and options", "Numbers", "Costs", "Kernels", "Performance", "API"]
        assert headings == wanted, name


def test_every_stored_result_of_an_op_stands_on_a_page() -> None:
    from benchmarks import pages

    stored = {key[0] for run in pages.load() for key in map(pages.key_of, run.cases)}
    texts = [path.read_text() for path in (DOCS / "ops").glob("*.md")]
    shown = {line for text in texts for block in blocks("measured", text) for line in block.splitlines()}
    assert shown == stored


def blocks(directive: str, text: str) -> list[str]:
    return re.findall(rf"^```\{{{directive}\}}[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_status_is_readmes() -> None:
    def status(path: Path) -> str:
        (found,) = re.findall(r"^\*\*Status\.\*\*.*?(?=\n\n)", path.read_text(), re.DOTALL | re.MULTILINE)
        return found

    assert status(DOCS / "index.md") == status(ROOT / "README.md")


def test_it_loads_nothing_from_elsewhere(manual: Path) -> None:
    """No script, style, font or image, and so it reads without a network."""
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"((?:https?:)?//[^\"]*)\"")
    styles = re.compile(r"url\([\"']?((?:https?:)?//[^)]*)\)|@import")
    for path in [*manual.rglob("*.html"), *manual.rglob("*.css")]:
        text = path.read_text()
        found = (loaded if path.suffix == ".html" else styles).findall(text)
        assert not found, (path, found)


WRONG = {
    "[a](ops/nowhere.md)": "ops/nowhere.md, which is not there",
    "[a](../seqkern/nowhere.py)": "../seqkern/nowhere.py, which is not there",
    "[a](#no-heading)": "no-heading",
    "```{kernels}\nlstm lstn\n```": "lstn is not a function",
    "```{cost} rope\ntokens=8 heads=2 dim=4\nforward: 2 * tokens * heads * dim; 1\n```": "cost() (192, 512)",
    "```{errors}\nlayer_morn\n```": "op must be one of",
    "```{measured}\nGRV\n```": "no stored result of GRV",
    "```{names} seqkern.nowhere\n```": "No module named 'seqkern.nowhere'",
    "```{eval-rst}\n.. autofunction:: seqkern.nothing\n```": "nothing",
}


def test_what_is_wrong_fails(tmp_path: Path) -> None:
    """A page with these faults, by this manual's configuration."""
    configuration = DOCS / "conf.py"
    (tmp_path / "conf.py").write_text(f"__file__ = {str(configuration)!r}\n{configuration.read_text()}")
    (tmp_path / "index.md").write_text("\n\n".join(["# A", *WRONG]))
    result = build(tmp_path, tmp_path / "built")
    assert result.returncode != 0
    assert not [told for told in WRONG.values() if told not in result.stderr], result.stderr
