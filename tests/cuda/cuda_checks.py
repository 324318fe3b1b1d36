"""What the tests of the kernels in CUDA C++ share: how checks are run, what they compare, the machine code.

Checks are functions of a device. On "cpu" they run in a process whose CPU tensors stand for the GPU's memory: the test
file itself, started by the fixture `simt` with their names as words.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqkern import _library
from seqkern.testing import poison

ROOT = Path(__file__).parents[2]

Checks = Mapping[str, Callable[..., None]]


# ---- running checks ------------------------------------------------------------------------------------------------


def checks_of(module: dict[str, Any]) -> dict[str, Callable[[str], None]]:
    """Its own functions check_*, not those that it imports."""
    found = {name: each for name, each in module.items() if name.startswith("check_")}
    return {name: each for name, each in found.items() if each.__module__ == module["__name__"]}


def run_words(checks: Checks, *arguments: str) -> None:
    """What a process of the executor does: the checks that it is told, with its limits changed at `limit=value`."""
    assert os.environ.get("SEQKERN_SIMT"), "started by the tests"
    torch.set_num_threads(1)
    with poison():
        for word in sys.argv[1:]:
            limit, changes, value = word.partition("=")
            if changes:
                os.environ[f"SEQKERN_SIMT_{limit.upper()}"] = value
            else:
                torch.manual_seed(0)
                random.seed(0)
                checks[word](*arguments)


def need_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for GPUs of compute capability 9.0")


def gpu_test(checks: Checks, hopper: bool = False) -> Callable[[str], None]:
    """A test of every check on a GPU."""

    @pytest.mark.gpu
    @pytest.mark.parametrize("check", checks)
    def test_gpu(check: str) -> None:
        if hopper:
            need_hopper()
        checks[check]("cuda")

    return test_gpu


def gpu_bits_test(digest: Callable[[str], None], times: int = 50, hopper: bool = False) -> Callable[..., None]:
    """A test that a check which prints a digest prints the same one every time, on a GPU."""

    @pytest.mark.gpu
    def test_gpu_same_bits_every_run(capsys: pytest.CaptureFixture[str]) -> None:
        if hopper:
            need_hopper()
        for _ in range(times):
            digest("cuda")
        assert_same_digest(capsys.readouterr().out, times)

    return test_gpu_same_bits_every_run


# ---- results -------------------------------------------------------------------------------------------------------


def print_digest(results: Iterable[Tensor], finite: bool = False) -> None:
    """Of the bits of all results, which may have to be finite."""
    digest = hashlib.sha256()
    for result in results:
        assert not finite or result.isfinite().all(), result
        digest.update(result.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    print(digest.hexdigest())


def assert_same_digest(printed: str, times: int) -> None:
    lines = printed.split()
    assert len(lines) == times, lines
    assert len(set(lines)) == 1, lines


def moved(t: Any, device: str) -> Any:
    """A tensor on a device with its strides and its place in memory; anything else as it is."""
    if not isinstance(t, Tensor):
        return t
    memory = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device, copy=True)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


# ---- what the assembler made ---------------------------------------------------------------------------------------


def cuda_program(name: str) -> str | None:
    """A program of CUDA's, of its own or of those that Triton brings."""
    spec = importlib.util.find_spec("triton")
    places = [Path(spec.origin).parent / "backends" / "nvidia" / "bin"] if spec and spec.origin else []
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)]))


@functools.cache
def machine_code(source: str) -> dict[str, list[str]]:
    """The instructions for sm_90a of every kernel of `csrc/source`, from the object that the build left."""
    if "90a" not in _library.cuda_archs():
        pytest.skip("built without nvcc, or not for sm_90a")
    program = cuda_program("cuobjdump")
    if program is None:
        pytest.skip("no cuobjdump")
    path = ROOT / "build" / "ninja" / f"{source}.o"
    assert path.exists(), "build with `make build` first"
    command = [program, "-sass", "-arch", "sm_90a", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *parts = re.split(r"Function : (\S+)", text)
    names = subprocess.run(["c++filt", *parts[::2]], capture_output=True, text=True, check=True).stdout.splitlines()
    named = zip(names, parts[1::2], strict=True)
    return {name: re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", body) for name, body in named}
