"""Long tests are skipped while their sources are those of the last proof, and run after any change (proven.py)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import proven
import pytest

ROOT = proven.ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The project's sources, to change them."""
    skipped = shutil.ignore_patterns("*.so", "__pycache__", "results")
    for name in ("csrc", "kernels", "seqkern", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=skipped)
    for name in ("constraints.txt", "setup.py", "setup_cuda.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for compiled in (ROOT / "seqkern").glob("*.so"):
        (tmp_path / "seqkern" / compiled.name).symlink_to(compiled)
    return tmp_path.resolve()


@pytest.fixture
def digest(tree: Path) -> Callable[[str], str]:
    """A module's digest in the copy as it is now."""

    def compute(module: str) -> str:
        for cached in vars(proven).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        return proven.digest(module, tree)

    return compute


def append(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


def named(tree: Path, pattern: str) -> Path:
    (found,) = tree.glob(pattern)
    return found


# A source, a module that depends on it and one that does not. Which file includes or imports it is in no table.
CHANGES = [
    ("csrc/layer_norm/**/row.cuh", "test_layer_norm_cuda", "test_rnn_cuda"),
    ("csrc/common/cuda/device.cuh", "test_rnn_scan_cuda", "test_triton_aot"),
    ("csrc/**/grad_mask.cuh", "test_attention_backward_cuda", "test_layer_norm_cuda"),
    ("csrc/**/exchange.cuh", "test_cuda_build", "test_attention_cuda"),
    ("tests/simt/simt_mma.cpp", "test_simt", "test_triton_driver"),
    ("tests/**/cuda_checks.py", "test_attention_decode_cuda", "test_simt"),
    ("kernels/_common.py", "test_triton_aot", "test_layer_norm_cuda"),
    ("kernels/rnn/steps.py", "test_rnn_cuda", "test_attention_forward_cuda"),
    ("kernels/layer_norm.py", "test_triton_aot", "test_rnn_cuda"),
    ("seqkern/nn/rnn.py", "test_rnn_cuda_api", "test_rnn_scan_cuda"),
    ("seqkern/testing/_checks.py", "test_layer_norm_cuda", "test_triton_aot"),
    ("constraints.txt", "test_simt_hopper", None),
    ("setup.py", "test_cuda_build", "test_simt"),
]


@pytest.mark.parametrize(("source", "depends", "other"), CHANGES)
def test_a_changed_source_is_proven_again(
    tree: Path, digest: Callable[[str], str], source: str, depends: str, other: str | None
) -> None:
    before = digest(depends), other and digest(other)
    assert before[0] == proven.digest(depends, ROOT), "the same sources in another folder"
    append(named(tree, source))
    assert digest(depends) != before[0]
    assert (other and digest(other)) == before[1]


def test_a_changed_docstring_leaves_it_proven(tree: Path, digest: Callable[[str], str]) -> None:
    path = tree / "seqkern" / "ops" / "attention.py"
    before, text = digest("test_attention_cuda"), path.read_text()
    path.write_text(text.replace("broadcasts to", "is broadcast to"))
    assert path.read_text() != text
    assert digest("test_attention_cuda") == before
    path.write_text(text.replace('"""', '"""\n', 1).replace("def attention(", "def attention_(", 1))
    assert digest("test_attention_cuda") != before


def test_a_moved_test_is_still_proven(tree: Path, digest: Callable[[str], str]) -> None:
    before = digest("test_attention_cuda")
    path = named(tree, "tests/**/cuda_checks.py")
    (tree / "tests" / "elsewhere").mkdir()
    path.rename(tree / "tests" / "elsewhere" / path.name)
    assert digest("test_attention_cuda") == before


def test_every_long_test_has_a_proof() -> None:
    """What takes part in a proof by its fixtures is in the table, and the table names modules that there are."""
    modules = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    assert proven.PROOFS.keys() <= modules.keys()
    using = {name for name, path in modules.items() if re.search(r"\bsimt\(", path.read_text())}
    using |= {name for name, path in modules.items() if re.search(r"\bcompiled_ahead\b", path.read_text())}
    assert using - {"test_proven"} <= proven.PROOFS.keys()


SLOW_ON_PURPOSE = """
import pytest


def test_short():
    pass


def test_long(simt):
    pass
"""


def test_proven_tests_are_skipped_and_say_why(tree: Path, digest: Callable[[str], str]) -> None:
    module = named(tree, "tests/**/test_layer_norm_cuda.py")
    module.write_text(SLOW_ON_PURPOSE)
    table = tree / proven.TABLE

    def outcome(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-rs", "-q", "-p", "no:cacheprovider", *arguments, str(module)]
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        return result.stdout + result.stderr

    table.write_text("{}")
    assert "2 passed" in outcome()
    table.write_text(json.dumps({"test_layer_norm_cuda": digest("test_layer_norm_cuda")}))
    said = outcome()
    assert "1 passed, 1 skipped" in said, said
    assert re.search(r"proven: none of the \d+ sources of test_layer_norm_cuda changed since", said), said
    assert "2 passed" in outcome("--unchanged")
    append(named(tree, "csrc/common/cuda/device.cuh"))
    assert "2 passed" in outcome()


def test_a_proof_is_written_when_everything_passed(tree: Path) -> None:
    module = named(tree, "tests/**/test_layer_norm_cuda.py")
    table = tree / proven.TABLE
    table.write_text("{}")

    def prove(text: str) -> tuple[int, dict[str, str]]:
        module.write_text(text)
        command = [sys.executable, named(tree, "tests/**/proven.py"), "--prove", "test_layer_norm_cuda"]
        command.append("--pytest=-q -x")
        code = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False).returncode
        return code, json.loads(table.read_text())

    for fails in ("    assert False", "    pytest.skip('no compiler')"):
        code, written = prove(SLOW_ON_PURPOSE + fails)
        assert (code != 0, written) == (True, {})
    code, written = prove(SLOW_ON_PURPOSE)
    assert (code, written.keys()) == (0, {"test_layer_norm_cuda"})
    code, written = prove(SLOW_ON_PURPOSE + "    assert False")  # what was proven before is no more
    assert code != 0
    command = [sys.executable, named(tree, "tests/**/proven.py"), "--current", "test_layer_norm_cuda"]
    assert subprocess.run(command, cwd=tree, check=False).returncode == 1


def test_what_calls_the_kernels_from_above_is_part_of_no_proof() -> None:
    models = set((ROOT / "seqkern" / "models").glob("*.py"))
    assert len(models) > 10
    for module in proven.PROOFS:
        found = set(proven.sources(module))
        assert not found & (models | {ROOT / "seqkern" / "generation.py"})
    assert ROOT / "seqkern" / "ops" / "rnn.py" in proven.sources("test_rnn_cuda")
