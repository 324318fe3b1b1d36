"""What is shipped: complete slices, tiers that cannot leak into each other, one wheel that imports elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from seqkern import _library
from seqkern._slices import CUDA_OPS, FUNCTIONS, OPS, SLICES

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "seqkern" / "_C.abi3.so"


@contextlib.contextmanager
def alone():
    """setuptools works in the source tree: one process at a time."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "package.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def call(*command, **options):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# ---- one op, one slice --------------------------------------------------------------------------------------------


def test_every_schema_belongs_to_a_slice():
    """Or to the measurements of the shared products (csrc/products)."""
    sources = ("ops.cpp", "cuda_ops.cpp", "schemas.h")
    declared = [name for file in sources for name in re.findall(r'"(\w+)\(', (ROOT / "csrc" / file).read_text())]
    products = {name for name in declared if name.startswith("products_")}
    assert len(products) == 5
    assert set(declared) == set(OPS) | set(CUDA_OPS) | products


@pytest.mark.parametrize("name", SLICES)
def test_slice_is_complete(name):
    package = f"{name}/" if (ROOT / "kernels" / name).is_dir() else ""
    for path in (
        f"csrc/{name}/{name}.h",
        f"csrc/{name}/{name}.cpp",
        f"csrc/{name}/cpu/kernels.cpp",
        f"kernels/{package}{name}.py",
        f"seqkern/reference/{name}.py",
        f"seqkern/ops/{name}.py",
        f"tests/cpu/test_{name}.py",
        f"seqkern/testing/{name}.py",
        f"benchmarks/bench_{name}.py",
    ):
        assert (ROOT / path).is_file(), f"slice {name} lacks {path}"
    cuda = {path.suffix for path in (ROOT / "csrc" / name).glob("cuda/*.cu*")}
    if cuda:
        assert cuda == {".cu", ".cuh"}
        assert SLICES[name].cuda_ops


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_cpu_and_a_fake_kernel(name):
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"seqkern::{name}", key), key


def test_references_are_short():
    for path in (ROOT / "seqkern" / "reference").glob("*.py"):
        assert len(path.read_text().splitlines()) < 100, f"{path.name} is a specification: keep it under 100 lines"


# ---- the binary ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", _library.ISAS)
def test_tiers_define_nothing_outside_their_namespace(tier):
    """A shared inline function compiled for AVX-512 could be the one that the linker keeps for all."""
    own = tier in _library.BF16_ISAS
    objects = sorted((ROOT / "build" / "ninja").glob(f"*/cpu/*.{tier}.o"))
    if own and not objects and tier not in _library.available_isas():
        pytest.skip("the compiler or the machine does not know it")
    if not objects and sysconfig.get_platform().endswith(("x86_64", "amd64")):
        pytest.fail("no objects: build with `make build` first")
    for path in objects:
        symbols = [line.split(" ", 2)[1:] for line in call("nm", "-C", "--defined-only", path).splitlines()]
        shared = [name for kind, name in symbols if kind in "TDBRVWu" and not name.startswith(f"seqkern::{tier}::")]
        assert not shared, f"{path.name} defines {shared}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="torch-abi-audit needs Python 3.11")
def test_binary_keeps_to_the_stable_abi():
    audit = Path(sysconfig.get_path("scripts")) / "torch-abi-audit"
    (library,) = json.loads(call(audit, "--json", EXTENSION))["bundled_libs"]
    torch_abi = library["torch"]
    assert torch_abi["uses_torch"]
    assert torch_abi["stable"], torch_abi["unstable_symbols"]
    assert torch_abi["min_torch_version"] == "2.10.0"
    assert not torch_abi["unknown_shim_symbols"]


def test_needs_no_more_than_torch_and_the_system():
    needed = re.findall(r"NEEDED\s+(\S+)", call("objdump", "-p", EXTENSION))
    needed = {name for name in needed if not name.startswith("ld-linux")}  # thread-local storage; part of glibc
    assert needed <= {"libtorch_cpu.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    with alone():
        call(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_is_small_and_for_every_python(wheel):
    assert "-cp310-abi3-" in wheel.name
    assert wheel.stat().st_size < 25e6
    files = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in files}
    assert sorted(tops) == ["seqkern", "seqkern-0.1.0.dist-info"], "nothing but seqkern at the top level"
    kernels = {f"seqkern/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert {"seqkern/_C.abi3.so", "seqkern/py.typed"} | kernels <= set(files)
    libraries = [name for name in files if name.endswith(".so")]
    assert libraries == ["seqkern/_C.abi3.so"], "nothing that is tied to one torch or one Python"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of a new virtual environment that sees this one's torch, and seqkern from the wheel alone."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_imports_in_another_environment(installed, tmp_path):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    written = [name for name in CUDA_OPS if has_kernel(f"seqkern_cuda::{name}", "CUDA")]
    program = (
        f"written, archs = {written}, {_library.cuda_archs()}"
        + """
import os, seqkern, torch
assert "env" in seqkern.__file__, seqkern.__file__
x = torch.randn(4, 8)
torch.testing.assert_close(seqkern.layer_norm(x, (8,)), torch.nn.functional.layer_norm(x, (8,)))
assert seqkern._library.cuda_archs() == archs
for name in written:  # on a torch without CUDA too
    assert torch._C._dispatch_has_kernel_for_dispatch_key("seqkern_cuda::" + name, "CUDA"), name
import importlib.util
found = importlib.util.find_spec("kernels")  # another project's package has that name
assert found is None or "_replay.py" not in os.listdir(os.path.dirname(found.origin)), found
"""
    )
    call(installed, "-I", "-c", program, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("op", SLICES)
def test_wheel_passes_the_tests(installed, tmp_path, op):
    call(installed, "-m", "pytest", "-q", "-x", ROOT / "tests" / "cpu" / f"test_{op}.py", cwd=tmp_path)


def test_source_archive_has_every_source(tmp_path):
    with alone():
        call(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path, cwd=ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {Path(name).suffix for name in sources} == {".cpp", ".h", ".cu", ".cuh", ".md"}
    assert sources | {"seqkern/py.typed", "setup_cuda.py"} <= names


# ---- import -------------------------------------------------------------------------------------------------------


def test_import_brings_torch_alone():
    program = "import torch, sys; before = set(sys.modules); import seqkern; print(*(set(sys.modules) - before))"
    new = {name.split(".")[0] for name in call(sys.executable, "-c", program, cwd=ROOT).split()}
    assert not new & {"triton", "numpy", "matplotlib", "rich", "jinja2", "psutil", "transformers"}


def test_tier_and_backend_from_the_environment():
    program = "from seqkern import _library; print(_library.cpu_isa(), _library._backend)"
    environment = os.environ | {"SEQKERN_CPU_ISA": "generic", "SEQKERN_BACKEND": "reference"}
    assert call(sys.executable, "-c", program, cwd=ROOT, env=environment).split() == ["generic", "reference"]


@pytest.mark.parametrize("backend", ["auto", "triton", "cuda"])
def test_the_command_tells_of_every_op(backend):
    """Also of those that the backend cannot run here."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("SEQKERN_SIMT", "TRITON_INTERPRET")
    }
    told = call(sys.executable, "-m", "seqkern", cwd=ROOT, env=environment | {"SEQKERN_BACKEND": backend})
    for op in FUNCTIONS:
        assert re.search(rf"^      .*\b{op}(,|$)", told, re.MULTILINE), told


@pytest.mark.parametrize(("variable", "value"), [("SEQKERN_CPU_ISA", "sse9"), ("SEQKERN_BACKEND", "fast")])
def test_wrong_environment_raises_at_import(variable, value):
    result = subprocess.run(
        [sys.executable, "-c", "import seqkern"],
        env=os.environ | {variable: value}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert f"ValueError: {variable} must be one of" in result.stderr
    assert f"got '{value}'" in result.stderr
