"""Cases of the cross-entropy of a linear layer's outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal
from seqkern.testing.cross_entropy import Loss

ORACLE_CLASSES = 64  # of a part of the oracle's product


def linear_cross_entropy_case(
    rows: int = 37,
    classes: int = 300,
    depth: int = 24,
    *,
    bias: bool = False,
    class_weight: bool = False,
    ignored: float = 0.25,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    scale: float = 1.0,
) -> Case:
    """`ignored`: the share of rows without a target; `scale`: of the logits: a large one saturates the softmax."""
    loss = Loss.drawn(
        rows, classes, ignored=ignored, class_weight=class_weight, label_smoothing=label_smoothing, z_loss=z_loss,
        softcap=softcap, reduction=reduction, return_lse=return_lse,
    )  # fmt: skip

    def make(g: torch.Generator) -> dict[str, Tensor]:
        weight = normal(g, classes, depth, scale=scale * max(depth, 1) ** -0.5)
        made = {"input": normal(g, rows, depth), "weight": weight}
        return made | ({"bias": normal(g, classes)} if bias else {})

    def ours(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        options = loss.options(input.device)
        return seqkern.linear_cross_entropy(input, weight, loss.target.to(input.device), bias, **options)

    def of_torch(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return loss.of_torch(F.linear(input, weight, bias))

    def of_reference(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        kept = torch.where((loss.target.to(input.device) != -100)[:, None], input, 0)
        # The oracle's product is torch's, too. By parts its sums over all classes, gradients of the input, are more
        # accurate than those of the versions that are compared, in float64 as well.
        biases = [None] * len(weight) if bias is None else bias.split(ORACLE_CLASSES)
        parts = zip(weight.split(ORACLE_CLASSES), biases, strict=False)
        return loss.of_reference(torch.cat([reference.logits(kept, w, b, softcap or 0.0) for w, b in parts], -1))

    return Case(inputs=make, ours=ours, torch=of_torch, reference=of_reference, outputs=loss.outputs)
