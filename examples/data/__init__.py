"""What the examples learn from: one file a set, with its source and licence."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

POOL = 20  # batches whose rows are sorted together


def shuffled(lengths: Tensor, rows: int, seed: int) -> Iterator[Tensor]:
    """Numbers of rows for batches without end, in another order every time; rows of a batch have about one length."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for pool in torch.randperm(len(lengths), generator=generator).split(rows * POOL):
            batches = pool[lengths[pool].argsort(stable=True)].split(rows)
            for number in torch.randperm(len(batches), generator=generator).tolist():
                if len(batches[number]) == rows:
                    yield batches[number]


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's search for cycles, which looks through every syntax tree time and again: a third less time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
