"""Where the benchmarks run, and what is stored about the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from seqkern._library import describe_machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), help="where to run (default: cuda when there is one)")
    parser.addoption("--threads", type=int, help="threads of torch and seqkern (default: torch's choice)")


@pytest.fixture(scope="session", autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    if count := request.config.getoption("--threads"):
        torch.set_num_threads(count)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device") or ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["forward", "forward+backward"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    machine_info.pop("node", None)  # the name of a machine tells nothing about it
    machine_info["seqkern"] = dict(describe_machine()) | {"commit": commit.stdout.strip() or "unknown"}
