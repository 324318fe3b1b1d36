"""A step of beam search against log_softmax, addition and topk over all beams, as transformers' generation has it."""

from __future__ import annotations

import pytest
import torch

import seqkern
from benchmarks.harness import Contest, compete
from seqkern.ops.beam_step import cost
from seqkern.testing import beam_step_case, check_case

SHAPES = [(1, 4, 32000), (16, 4, 32000), (1, 4, 151936), (16, 8, 500)]  # sequences, beams, tokens of the vocabulary


@pytest.mark.parametrize(("batch", "beams", "classes"), SHAPES, ids=["x".join(map(str, shape)) for shape in SHAPES])
def test_beam_step(benchmark, batch, beams, classes, device):
    logits = 2 * torch.randn(batch, beams, classes, device=device)
    scores = torch.randn(batch, beams, device=device)

    def plain() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        every = logits.log_softmax(-1) + scores[:, :, None]
        best, at = every.flatten(1).topk(2 * beams)
        return best, at // classes, at % classes

    compete(
        benchmark,
        Contest(
            op="beam_step",
            shape=f"{batch} x {beams} x {classes}",
            mode="forward",
            dtype=torch.float32,
            device=device,
            ours=lambda: seqkern.beam_step(logits, scores),
            peers={"torch": plain},
            gate=lambda: check_case(beam_step_case(), torch.float32, device=device),
            cost=cost(batch * beams, classes, torch.float32),
            reads=True,
        ),
    )
