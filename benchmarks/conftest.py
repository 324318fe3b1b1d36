"""Where the benchmarks run, and what is stored about the machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import chosen_device
from seqkern import _attention_cuda, _library, use_backend
from seqkern._explain import describe_machine
from seqkern._slices import SLICES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), help="where to run (default: cuda when there is one)")
    parser.addoption("--threads", type=int, help="threads of torch and seqkern (default: torch's choice)")


@pytest.fixture(scope="session", autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    if count := request.config.getoption("--threads"):
        torch.set_num_threads(count)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On a GPU a case of a slice that CUDA C++ has as well runs once in Triton and once there.

    One that asks for `path` runs there once with each kind of kernels that the GPU has.
    """
    slice = metafunc.module.__name__.rpartition("bench_")[2]
    op = SLICES.get(slice)
    if "backend" in metafunc.fixturenames and chosen_device(metafunc.config) == "cuda" and op and op.cuda_ops:
        backends = _library.gpu_backends(slice)
        if "path" in metafunc.fixturenames and "cuda" in backends:
            hopper = _library._capability(torch.cuda.current_device()) == (9, 0)
            backends[-1:] = ["cuda mma", "cuda hopper"] if hopper else ["cuda mma"]
        metafunc.parametrize("backend", backends, indirect=True)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return chosen_device(request.config)


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, benchmark: Any) -> Iterator[str]:
    """What seqkern runs on in this case, its gate included."""
    param = getattr(request, "param", "auto")
    name, _, path = param.partition(" ")
    benchmark.extra_info["backend"] = param
    with use_backend(name), _attention_cuda.use_path(path or "auto"):
        yield param


@pytest.fixture
def path(backend: str) -> str:
    """The kind of kernels in CUDA C++ that is asked for, or "auto"."""
    return backend.partition(" ")[2] or "auto"


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["forward", "forward+backward"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    commit = os.environ.get("SEQKERN_COMMIT", "")  # for a copy without .git
    if not commit:
        command = ["git", "rev-parse", "HEAD"]
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        commit = found.stdout.strip()
    machine_info.pop("node", None)  # the name of a machine tells nothing about it
    machine_info["seqkern"] = dict(describe_machine()) | {"commit": commit or "unknown"}
