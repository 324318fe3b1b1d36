"""Cutting sequences, context parallelism, DDP, FSDP2 and bad input, on 2 and 4 processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import workers
from processes import run

import seqkern.distributed as sd


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("group"), request.param, "other_cases")


@pytest.mark.parametrize("case", workers.OTHERS)
def test_in_processes(outcomes: dict[str, str], case: str) -> None:
    assert not outcomes[case], outcomes[case]


def test_not_initialised() -> None:
    x = torch.randn(1, 2, 8, 4)
    for function, args in (
        (sd.ring_attention, (x, x, x)),
        (sd.shard_sequence, (x,)),
        (sd.unshard_sequence, (x,)),
        (sd.local_positions, (8,)),
        (sd.lstm, (x[0], None, [])),
        (sd.gru, (x[0], None, [])),
    ):
        with pytest.raises(RuntimeError, match="group is not initialised: call torch.distributed.init_process_group"):
            function(*args)
    with pytest.raises(RuntimeError, match="group is not initialised"), sd.context_parallel(None):
        pass


def test_import_is_lazy() -> None:
    """`import seqkern` takes neither this package nor DTensor with it; this package does not take DTensor."""
    program = (
        "import sys, torch; before = set(sys.modules); import seqkern; "
        "assert 'seqkern.distributed' not in sys.modules; import seqkern.distributed; "
        "assert not [m for m in set(sys.modules) - before if m.startswith('torch.distributed.tensor')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_memory_grows_with_the_part(tmp_path: Path) -> None:
    """Twice the sequence is twice the memory of a process, not four times; a ring's is the least."""
    run(tmp_path, 4, "memory", str(tmp_path))
    for rank in range(4):
        peak = torch.load(tmp_path / f"memory{rank}.pt")
        print(rank, peak)
        for method in ("ring", "allgather", "ulysses"):
            assert peak[method, 1 << 17] < 3 * peak[method, 1 << 16], (rank, peak)  # between 2, linear, and 4
        assert peak["ring", 1 << 17] < peak["allgather", 1 << 17], (rank, peak)
