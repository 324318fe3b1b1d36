"""Cases of a step of beam search."""

from __future__ import annotations

import torch
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal


def beam_step_case(batch: int = 3, beams: int = 4, classes: int = 300, *, candidates: int = 8) -> Case:
    def scores_of(logits: Tensor) -> Tensor:
        return -torch.arange(beams, dtype=torch.float32, device=logits.device).expand(batch, beams) / 3

    def ours(logits: Tensor) -> Tensor:
        return seqkern.beam_step(logits, scores_of(logits), candidates=candidates).scores

    def plain(logits: Tensor) -> Tensor:
        every = logits.float().log_softmax(-1) + scores_of(logits)[:, :, None]
        return every.flatten(1).topk(candidates).values

    return Case(
        inputs=lambda g: {"logits": normal(g, batch, beams, classes, scale=3.0)},
        ours=ours,
        torch=plain,
        reference=lambda logits: reference.beam_step(logits, scores_of(logits), candidates)[0],
        outputs=("scores",),
        differentiable=False,
    )
