"""Runs functions of tests/distributed/workers.py in gloo processes: one start for many cases."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(folder: Path, ranks: int, function: str, *args: Any) -> dict[str, str]:
    """`workers.<function>(rank, ranks, report, *args)` in every process; what it reported: a case to what is wrong."""
    mp.spawn(_main, (ranks, str(folder), function, args), nprocs=ranks, join=True)
    found: dict[str, str] = {}
    for rank in range(ranks):
        for case, wrong in torch.load(folder / f"{rank}.pt").items():
            found[case] = "\n".join(filter(None, (found.get(case), wrong and f"rank {rank}: {wrong}")))
    return found


def assert_nothing_wrong(found: dict[str, str], cases: Collection[str]) -> None:
    """Every case was run, and none reported anything."""
    assert found.keys() == set(cases)
    wrong = [f"{case}: {what}" for case, what in found.items() if what]
    assert not wrong, "\n".join(wrong)


def _main(rank: int, ranks: int, folder: str, function: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import workers

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    found: dict[str, str] = {}

    def report(case: str, check: Any, *args: Any) -> None:
        """What a check raises is what is wrong; processes that then wait for one another run into the timeout."""
        try:
            check(*args)
            found[case] = ""
        except Exception:
            found[case] = traceback.format_exc()

    getattr(workers, function)(rank, ranks, report, *args)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
