"""Cases of the filters of sampling; tests/cpu/test_sample.py has the draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal


def filter_logits_case(
    rows: int = 7, classes: int = 300, *, order: str = "transformers", scale: float = 3.0, **options: Any
) -> Case:
    """`scale`: of the logits. options: numbers, as `seqkern.filter_logits`."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}

    def ours(logits: Tensor) -> Tensor:
        return seqkern.filter_logits(logits, order=order, **options)  # type: ignore[arg-type]

    def rows_of(logits: Tensor) -> Tensor:
        left = [reference.processed(z, order, **off | options, history=None, repetition_penalty=1.0) for z in logits]
        return torch.stack(left)

    return Case(
        inputs=lambda g: {"logits": normal(g, rows, classes, scale=scale)},
        ours=ours,
        torch=lambda logits: rows_of(logits.float()),
        reference=rows_of,
        outputs=("filtered",),
        differentiable=False,
    )
