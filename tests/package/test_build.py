"""What `make` asks the build for, and what of the build its user sees. The compilers here are stand-ins."""

from __future__ import annotations

import functools
import os
import pty
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# Writes down for which GPUs it was called to build, and does what `python -m venv` has to.
PYTHON = """#!/bin/sh
echo "$(basename "$0") ${SEQKERN_CUDA_ARCHS-unset}: $*" >> "$CALLS"
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/pip"
fi
while [ $# -gt 0 ]; do
  if [ "$1" = --target ]; then mkdir -p "$2"; fi
  shift
done
"""
# Makes what it was asked for, an empty file, and says what that depends on: nothing.
COMPILER = """#!/bin/sh
echo "$*" >> "$CALLS"
while [ $# -gt 0 ]; do
  case "$1" in
    -o) shift; output=$1 ;;
    -MF) shift; depends=$1 ;;
  esac
  shift
done
[ "$output" = /dev/null ] || : > "$output"
[ -z "$depends" ] || echo "$output:" > "$depends"
"""


def program(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    path.chmod(0o755)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the build reads, in a folder of its own."""
    folder = tmp_path / "tree"
    folder.mkdir()
    for name in ("Makefile", "setup.py", "setup_cuda.py", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "kernels", "seqkern"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins write down how they were called, where nothing of the environment chooses a compiler."""
    for name in ("NVCC", "CUDA_HOME", "SEQKERN_CUDA_ARCHS", "NINJA_STATUS", "MAX_JOBS", "MAKEFLAGS", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def make(tree: Path, goal: str) -> None:
    command = ["make", goal, f"PYTHON={tree.parent / 'python3'}"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def archs_of_builds(calls: Path) -> list[str]:
    lines = [line for line in calls.read_text().splitlines() if "build_ext" in line]
    calls.unlink()
    return [line.split()[1].rstrip(":") for line in lines]


def test_the_demo_builds_for_the_gpus_that_are_here_and_the_rest_for_all(
    tree: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tree.parent / "python3", PYTHON)
    make(tree, "demo")
    lines = calls.read_text().splitlines()
    # Compiled in sight before pip compiles out of sight, and for the same GPUs: pip would compile all others again.
    build, install, demo = (
        next(i for i, line in enumerate(lines) if words in line)
        for words in ("build_ext --inplace", "--no-build-isolation -e", "examples.demo")
    )
    assert build < install < demo
    assert all(line.split()[1] == "present:" for line in lines)
    calls.unlink()
    for goal in ("test", "wheel", "bench"):
        make(tree, goal)
        assert archs_of_builds(calls) == ["unset"]
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", "80;90a")
    for goal in ("demo", "test"):
        make(tree, goal)
        assert archs_of_builds(calls) == ["80;90a"]


def test_clean_leaves_no_library(tree: Path) -> None:
    names = ("_C.abi3.so", "_node-2.10.0-cpython-310.so", "_node-2.11.0-cpython-311.so")
    for name in names:
        (tree / "seqkern" / name).touch()
    make(tree, "clean")
    assert not list(tree.rglob("*.so"))


def in_a_terminal(command: list[str], folder: Path) -> str:
    """What a command writes to a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(command, cwd=folder, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    written = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        written += chunk
    os.close(master)
    assert process.wait() == 0, written.decode()
    return written.decode()


def test_compiling_counts_on_the_terminal_and_compiles_nothing_twice(
    tree: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make build`, then what pip does: the same for another folder."""
    monkeypatch.setenv("CXX", str(program(tree.parent / "c++", COMPILER)))
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", "none")
    build = [sys.executable, "setup.py", "-q", "build_ext"]
    written = in_a_terminal([*build, "--inplace"], tree)
    counted = re.findall(r"\[(\d+)/(\d+)\]", written)
    total = int(counted[0][1])
    assert total > 20
    assert {int(done) for done, of in counted if int(of) == total} >= {1, total // 2, total}
    compiled = [line for line in calls.read_text().splitlines() if " -c " in line]
    assert any("layer_norm/node.cpp" in line for line in compiled)
    assert len(set(compiled)) == len(compiled) >= total
    calls.unlink()
    in_a_terminal([*build, "--build-lib", str(tree.parent / "elsewhere")], tree)
    again = calls.read_text().splitlines()
    assert not any(" -c " in line for line in again)
    assert sum("-shared" in line for line in again) == 1  # the nodes are built in place only
    assert {path.suffix for path in (tree.parent / "elsewhere" / "seqkern").iterdir()} == {".so"}


# ---- what a user's type checker finds -----------------------------------------------------------------------------


def call(*command: object, **options: Any) -> str:
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def type_check(
    tree: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool, str], subprocess.CompletedProcess[str]]:
    """`mypy --strict` of a program that stands alone, with seqkern from a wheel or an editable install."""
    pytest.importorskip("mypy")
    monkeypatch.setenv("CXX", str(program(tree.parent / "c++", COMPILER)))
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", "none")

    @functools.cache
    def installed(editable: bool) -> Path:
        folder = tree.parent / ("editable" if editable else "wheel")
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin" / "python"
        site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch, and what builds
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps")
        call(*pip, "--no-build-isolation", *(["-e"] if editable else []), tree)
        return python

    def check(editable: bool, text: str) -> subprocess.CompletedProcess[str]:
        python = installed(editable)
        client = tree.parent / "client" / "client.py"
        client.parent.mkdir(exist_ok=True)
        client.write_text(text)
        options = ("--strict", "--config-file", "", "--cache-dir", tree.parent / "cache", "--python-executable", python)
        command = [str(c) for c in (sys.executable, "-m", "mypy", *options, client.name)]
        return subprocess.run(command, cwd=client.parent, capture_output=True, text=True, check=False)

    return check


def test_type_checkers_know_every_public_name(
    type_check: Callable[[bool, str], subprocess.CompletedProcess[str]],
) -> None:
    """From a wheel and from an editable install: what comes back, and what is wrong, planted mistakes and no other."""
    text = (ROOT / "tests" / "package" / "typed_client.py").read_text()
    for editable in (True, False):
        result = type_check(editable, text)
        assert result.returncode == 0, result.stdout + result.stderr
    lines = text.splitlines()
    planted = {number for number, line in enumerate(lines, 1) if "# type: ignore" in line}
    assert len(planted) > 15
    result = type_check(True, "\n".join(line.partition("  # type: ignore")[0] for line in lines))
    found = {int(number) for number in re.findall(r"^client\.py:(\d+): error:", result.stdout, re.MULTILINE)}
    assert found == planted, result.stdout


def test_an_editable_install_puts_nothing_else_on_the_path(
    tree: Path, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not kernels/, which is the name of another package, nor tests/ and the like; and no hook of setuptools'."""
    monkeypatch.setenv("CXX", str(program(tree.parent / "c++", COMPILER)))
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", "none")
    wheels = tmp_path / "wheels"
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    wheels.mkdir()
    call(sys.executable, "-c", build, cwd=tree)
    (path,) = wheels.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if ".dist-info/" not in name]
        folder = Path(archive.read(name).decode().strip())
    assert name.endswith(".pth")
    assert [p.name for p in folder.iterdir()] == ["seqkern"]
    assert (folder / "seqkern").resolve() == tree / "seqkern"
    assert (folder / "seqkern" / "kernels" / "rnn" / "rnn.py").is_file()
