"""Triton's own JIT without a GPU (triton_driver.py): the calls of the GPU-marked tests, and that faults are caught.

On the triton that is installed and on the oldest that the package claims; the slow tests make every call, and on the
newest too. The others are installed by `make test` and `make test-slow`, into build/triton-<version>.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from seqkern._slices import SLICES

ROOT = Path(__file__).parents[2]
ARCHS = (80, 90, 100, 120)
OLDEST, NEWEST = "3.6.0", "3.9.0"  # also in the Makefile


def installed(version: str) -> str:
    """What goes first in the module path, so that `import triton` finds that version."""
    if version == metadata.version("triton"):
        return ""
    site = ROOT / "build" / f"triton-{version}"
    assert (site / "triton").is_dir(), (
        f"triton {version} is missing in build/triton-{version}: `make test` installs {OLDEST} there, `make test-slow` "
        f"{NEWEST}; or make build/triton-{version}"
    )
    return str(site)


def python(version: str, script: str, *arguments: object, timeout: float = 1200) -> subprocess.CompletedProcess[str]:
    """Runs a script of this folder, on that triton and without its interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, (installed(version), str(ROOT)))),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "triton" / script), *map(str, arguments)],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip


def check_calls(version: str, arch: int, *arguments: str, timeout: float = 1200) -> None:
    result = python(version, "triton_launches.py", arch, *arguments, timeout=timeout)
    assert result.returncode == 0, (result.stdout + result.stderr)[-20000:]
    counts = json.loads(result.stdout.splitlines()[-1])
    print(counts)
    assert (counts["triton"], counts["arch"], counts["failed"]) == (version, arch, 0)
    assert counts["launches"] >= counts["specialisations"] > 0


@pytest.fixture
def compiled_ahead() -> None:
    """A name that tells tests/conftest.py that a test takes long."""


@pytest.mark.usefixtures("compiled_ahead")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", [metadata.version("triton"), OLDEST])
def test_calls(version: str, arch: int) -> None:
    check_calls(version, arch, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("part", SLICES)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", [OLDEST, metadata.version("triton"), NEWEST])
def test_every_call(version: str, arch: int, part: str) -> None:
    check_calls(version, arch, "all", part, timeout=6 * 3600)


def test_the_package_claims_the_oldest() -> None:
    claims = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("triton = ")]
    assert claims == [f"triton = [\"triton>={OLDEST.removesuffix('.0')}; platform_system == 'Linux'\"]"]


# What the driver says of each kernel of triton_faults.py, "" where nothing is wrong.
SAID = {
    "None in a tuple": "cannot convert None of type <class 'NoneType'> to tensor",  # on the oldest alone
    "no None in a tuple": "",
    "a stride of 1 taken for a tensor": "'int' object has no attribute 'to'",
    "a stride of 2 taken for a tensor": "",
    "a stride of 1 taken for a number": "",
    "too much shared memory": "out of resource: shared memory, Required: 196608, Hardware limit: 101376",
    "enough shared memory": "",
    "too many programs": "a grid takes up to 65535 programs in y, got 65536",
    "too many programs in x": "a grid takes up to 2147483647 programs in x, got 2147483648",
    "no program": "",
    "most programs": "",
    "passed": "['_none_in_a_tuple', '_product', '_strides']",
}


@pytest.mark.parametrize("version", [metadata.version("triton"), OLDEST])
def test_faults_are_caught(version: str) -> None:
    result = python(version, "triton_faults.py")
    assert result.returncode == 0, result.stdout + result.stderr
    said = json.loads(result.stdout)
    assert said.keys() == SAID.keys()
    for name, words in SAID.items():
        expected = "" if name == "None in a tuple" and version != OLDEST else words
        assert expected in said[name], (name, said[name])
        assert bool(expected) == bool(said[name]), (name, said[name])
