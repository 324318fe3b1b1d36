"""Cutting sequences, context parallelism, DDP, FSDP2 and bad input, on 2 and 4 processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import workers
from processes import assert_nothing_wrong, run

import seqkern.distributed as sd


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_processes(gloo: Any, ranks: int) -> None:
    """Every case of workers.OTHERS, in one start of the processes."""
    assert_nothing_wrong(gloo(ranks, "other_cases"), workers.OTHERS)


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
def test_memory_grows_with_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the sequence is twice the memory of a process, not four times; of an all-gather the most."""
    monkeypatch.setenv("SEQKERN_CACHE_MB", "0")
    peak = {}
    for method, length in itertools.product(("ring", "allgather", "ulysses"), (1 << 17, 1 << 18)):
        folder = tmp_path / f"{method}{length}"
        folder.mkdir()
        run(folder, 4, "memory", str(folder), method, length)
        peak[method, length] = max(torch.load(folder / f"memory{rank}.pt") for rank in range(4)) // 1024
    print(peak)
    for method in ("ring", "allgather", "ulysses"):
        assert peak[method, 1 << 18] < 3 * peak[method, 1 << 17], peak  # between 2, linear, and 4
    assert peak["allgather", 1 << 18] == max(peak.values()), peak
