"""Sampling a token against transformers' warpers, in its generation's order, softmax and torch.multinomial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete
from seqkern.ops.sample import cost
from seqkern.testing import check_case, filter_logits_case

SHAPES = [(1, 32000), (16, 32000), (1, 151936)]  # rows, tokens of the vocabulary
CHAINS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
    "penalty, temperature, top_k, top_p": {
        "repetition_penalty": 1.2, "temperature": 0.8, "top_k": 50, "top_p": 0.9
    },
}  # fmt: skip


def of_transformers(options: dict[str, Any], history: Tensor) -> Callable[[Tensor], Tensor]:
    process = pytest.importorskip("transformers.generation.logits_process")
    warpers = {
        "repetition_penalty": process.RepetitionPenaltyLogitsProcessor,
        "temperature": process.TemperatureLogitsWarper,
        "top_k": process.TopKLogitsWarper,
        "top_p": process.TopPLogitsWarper,
        "min_p": process.MinPLogitsWarper,
        "typical_p": process.TypicalLogitsWarper,
    }
    chain = [warpers[name](value) for name, value in options.items()]

    def draw(logits: Tensor) -> Tensor:
        for each in chain:
            logits = each(history, logits)
        return torch.multinomial(logits.softmax(-1), 1)

    return draw


@pytest.mark.parametrize(("rows", "classes"), SHAPES, ids=[f"{r}x{c}" for r, c in SHAPES])
@pytest.mark.parametrize("name", CHAINS)
def test_sample(benchmark, name, rows, classes, device):
    logits = 2 * torch.randn(rows, classes, device=device)
    history = torch.randint(classes, (rows, 64), device=device)
    options = CHAINS[name]
    theirs = of_transformers(options, history)
    given: dict[str, Any] = options | ({"history": history} if "repetition_penalty" in options else {})
    checked = {key: value for key, value in options.items() if key != "repetition_penalty"}
    compete(
        benchmark,
        Contest(
            op=f"sample {name}",
            shape=f"{rows} x {classes}",
            mode="forward",
            dtype=torch.float32,
            device=device,
            ours=lambda: seqkern.sample(logits, seed=3, position=5, **given),
            peers={"transformers": lambda: theirs(logits)},
            gate=lambda: check_case(filter_logits_case(**checked), torch.float32, device=device),
            cost=cost(rows, classes, torch.float32),
            reads=True,
        ),
    )
