"""What a step of a recurrent layer costs, torch's and seqkern's: LSTM, GRU, and an LSTM on sequences of unequal length.

Inference is a forward pass; training is a forward and a backward pass with every gradient. Sequences of unequal length
have three quarters of the tokens: torch gets them packed, seqkern padded, with their lengths.

    python -m examples.recurrent_cost
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import pack_padded_sequence

import seqkern
from examples.console import console, progress, recurrent_table
from examples.quadratic_cost import gemm_rates
from examples.timing import Allowance, time_undisturbed
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
    """A row for each layer and work: seconds of a step, of the median round, and the operations of a step.

    In about `budget` seconds, but at least so many rounds; as long again for what other work disturbed.
    """
    repeats = Allowance(budget)
    for layer, (kind, _) in LAYERS.items():
        for work in PASSES:
            calls, tokens = works(layer, work)
            for call in calls.values():
                call()
            timings = time_undisturbed(calls, budget / (len(LAYERS) * len(PASSES)), repeats, least=least, most=100)
            flops = cost(tokens, 1, WIDTH, WIDTH, torch.float32, cell=kind.lower()).flops
            if work == "training":
                flops += cost(tokens, 1, WIDTH, WIDTH, torch.float32, cell=kind.lower(), backward=True).flops
            yield {
                "layer": layer,
                "work": work,
                "step_flops": flops / STEPS,
                "step_seconds": {name: timing.seconds / STEPS for name, timing in timings.items()},
                "speed_ratio": timings["torch"].seconds / timings["seqkern"].seconds,
                "disturbed": {name: timing.disturbed for name, timing in timings.items()},
            }


def with_shares(row: dict[str, Any], rate: float) -> dict[str, Any]:
    """The row with the share of GEMM's rate that the time of a step stands for."""
    return row | {"share_of_gemm": {name: row["step_flops"] / s / rate for name, s in row["step_seconds"].items()}}


def run_with_progress(budget: float) -> dict[str, Any]:
    rows = []
    rate = gemm_rates()["float32"]
    with progress("cost of recurrent layers", len(LAYERS) * len(PASSES)) as advance:
        for row in measure(budget):
            rows.append(row)
            rate = max(rate, gemm_rates()["float32"])  # the machine's best moment
            advance(f"{row['layer']}, {row['work']}")
    return {"batch": BATCH, "steps": STEPS, "width": WIDTH, "rows": [with_shares(row, rate) for row in rows]}


if __name__ == "__main__":
    console.print(recurrent_table(run_with_progress(10.0)))
