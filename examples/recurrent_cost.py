"""What a step of a recurrent layer costs, torch's and seqkern's: LSTM, GRU, and an LSTM on sequences of unequal length.

Inference is a forward pass; training is a forward and a backward pass with every gradient. Sequences of unequal length
have three quarters of the tokens: torch gets them packed, seqkern padded, with their lengths.

    python -m examples.recurrent_cost
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import pack_padded_sequence

import seqkern
from examples.console import console, progress, recurrent_table
from examples.quadratic_cost import gemm_rates, time_in_turns
from seqkern.ops.rnn import cost

BATCH, STEPS, WIDTH = 16, 64, 256
LAYERS: dict[str, tuple[str, bool]] = {"LSTM": ("LSTM", False), "GRU": ("GRU", False), "LSTM, ragged": ("LSTM", True)}
PASSES = ("inference", "training")


def works(layer: str, work: str) -> tuple[dict[str, Callable[[], object]], int]:
    """The same work by torch and by seqkern, and its number of tokens."""
    torch.manual_seed(0)
    kind, ragged = LAYERS[layer]
    theirs, ours = getattr(torch.nn, kind)(WIDTH, WIDTH), getattr(seqkern.nn, kind)(WIDTH, WIDTH)
    ours.load_state_dict(theirs.state_dict())
    input = torch.randn(STEPS, BATCH, WIDTH)
    if not ragged:
        return {"torch": _call(theirs, work, input), "seqkern": _call(ours, work, input)}, BATCH * STEPS
    lengths = torch.linspace(STEPS // 2, STEPS, BATCH).round().long()[torch.randperm(BATCH)]
    packed = pack_padded_sequence(input, lengths, enforce_sorted=False)
    calls = {"torch": _call(theirs, work, packed), "seqkern": _call(ours, work, input, lengths=lengths)}
    return calls, int(lengths.sum())


def _call(module: torch.nn.Module, work: str, input: Any, **options: Any) -> Callable[[], object]:
    packed = not isinstance(input, torch.Tensor)
    leaf = (input.data if packed else input).requires_grad_()

    def outputs() -> torch.Tensor:
        result = module(input._replace(data=leaf) if packed else leaf, **options)[0]
        return result.data if packed else result

    def inference() -> object:
        with torch.no_grad():
            return outputs()

    cotangent = torch.ones_like(outputs())
    return (
        inference
        if work == "inference"
        else lambda: torch.autograd.grad(outputs(), [leaf, *module.parameters()], cotangent)
    )


def measure(budget: float, least: int = 5) -> Iterator[dict[str, Any]]:
    """A row for each layer and work: seconds of a step, and the share of GEMM's rate.

    In about `budget` seconds, but at least so many rounds.
    """
    rate = gemm_rates()["float32"]
    for layer, (kind, _) in LAYERS.items():
        for work in PASSES:
            calls, tokens = works(layer, work)
            for call in calls.values():
                call()
            seconds = time_in_turns(calls, budget / (len(LAYERS) * len(PASSES)), least=least, most=100)
            flops = cost(tokens, 1, WIDTH, WIDTH, torch.float32, cell=kind.lower()).flops
            if work == "training":
                flops += cost(tokens, 1, WIDTH, WIDTH, torch.float32, cell=kind.lower(), backward=True).flops
            ratios = [a / b for a, b in zip(*seconds.values(), strict=False)]  # of the rounds that both ran
            yield {
                "layer": layer,
                "work": work,
                "step_seconds": {name: statistics.median(times) / STEPS for name, times in seconds.items()},
                "speed_ratio": statistics.median(ratios),
                "share_of_gemm": {name: flops / min(times) / rate for name, times in seconds.items()},
            }


def run_with_progress(budget: float) -> dict[str, Any]:
    rows = []
    with progress("cost of recurrent layers", len(LAYERS) * len(PASSES)) as advance:
        for row in measure(budget):
            rows.append(row)
            advance(f"{row['layer']}, {row['work']}")
    return {"batch": BATCH, "steps": STEPS, "width": WIDTH, "rows": rows}


if __name__ == "__main__":
    console.print(recurrent_table(run_with_progress(10.0)))
