"""The host executor in a minute, whatever is proven (proven.py): it compiles, runs kernels, and catches a fault."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PLANTED = "planted_cuda.cu"
NONE, NO_BARRIER, NO_WAIT = 0, 1, 3  # of Fault in planted.cuh


@pytest.fixture(scope="module")
def ops(simt_build: ModuleType) -> Any:
    """The planted kernels, without sanitizers, in this process."""
    source = Path(simt_build.HERE) / PLANTED
    torch.ops.load_library(str(simt_build.build("planted", [source])))
    return torch.ops.seqkern_planted


def test_a_missing_barrier_is_caught(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 200)
    found = {NONE: set(), NO_BARRIER: set()}
    for seed in range(12):
        monkeypatch.setenv("SEQKERN_SIMT_SEED", str(seed))
        for fault, right in found.items():
            right.add(torch.allclose(ops.row_sums(x, fault), x.sum(1), rtol=1e-4, atol=1e-4))
    assert found[NONE] == {True}
    assert False in found[NO_BARRIER]


def test_tensor_cores(ops: Any) -> None:
    a, b = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(128, 96, dtype=torch.bfloat16)
    torch.testing.assert_close(ops.matmul(a, b, NONE), (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)
    assert ops.matmul(a, b, NO_WAIT).isnan().all()
