"""The Triton attention kernels with every option against the formula in float64: interpreted here, compiled on a GPU.

The launchers are called as the dispatcher calls them, with the ops' own arguments. The interpreter has to be chosen
before the kernels are imported, so a process of its own (this file, run) does the work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from seqkern.testing.attention_calls import (
    CASES,
    check,
    hidden_tiles,
    most_negative_numbers,
    sample,
    sequences_apart,
)

RANDOM = range(1000, 1006)  # seeds of `sample`, beside the cases by name
MORE = range(1006, 1030)


def test_interpreted(interpreted: Callable[..., None]) -> None:
    interpreted(__file__)


@pytest.mark.slow
def test_interpreted_random(interpreted: Callable[..., None]) -> None:
    interpreted(__file__, MORE.start, MORE.stop)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, dtype: torch.dtype) -> None:
    check(replace(CASES[name], dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [*RANDOM, *MORE])
def test_compiled_random(seed: int) -> None:
    check(sample(seed, "cuda"), seed)


@pytest.mark.gpu
def test_compiled_sequences_apart() -> None:
    sequences_apart("cuda")


@pytest.mark.gpu
def test_compiled_most_negative_numbers() -> None:
    most_negative_numbers("cuda")


@pytest.mark.gpu
def test_compiled_hidden_tiles() -> None:
    from seqkern.kernels.attention import limits

    hidden_tiles("cuda", limits=limits)


def test_interpreted_hidden_tiles(interpreted: Callable[..., None]) -> None:
    interpreted(__file__, "hidden_tiles")


def main(first: int = RANDOM.start, last: int = RANDOM.stop) -> None:
    """Everything that `check` is asked, or the samples first ... last - 1 alone."""
    cases = [(case, 0) for case in CASES.values()] if first == RANDOM.start else []
    if cases:
        sequences_apart()
        most_negative_numbers()
    for case, seed in [*cases, *((sample(seed), seed) for seed in range(first, last))]:
        try:
            check(case, seed)
        except BaseException:
            print(seed, case, flush=True)
            raise


if __name__ == "__main__":
    if sys.argv[1:] == ["hidden_tiles"]:
        from seqkern.kernels.attention import limits

        hidden_tiles(limits=limits)
    else:
        main(*map(int, sys.argv[1:]))
