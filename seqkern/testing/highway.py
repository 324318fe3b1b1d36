"""Cases of highway layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern.reference.highway import ACTIVATIONS
from seqkern.reference.highway import highway as formula
from seqkern.testing._checks import Case, normal

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "tanh": torch.tanh, "gelu": F.gelu, "silu": F.silu}


def highway_case(
    rows: int = 130, dim: int = 65, *, activation: Literal["relu", "tanh", "gelu", "silu"] = "relu", std: float = 1.0
) -> Case:
    def make(g: torch.Generator) -> dict[str, Tensor]:
        return {
            "x": normal(g, rows, dim, scale=std),
            "weight": normal(g, 2 * dim, dim, scale=dim**-0.5),
            "bias": normal(g, 2 * dim),
        }

    def of_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        candidate, gate = F.linear(x, weight, bias).chunk(2, -1)
        t = gate.sigmoid()
        return t * ACTIVATION[activation](candidate) + (1 - t) * x

    def expected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        candidate, gate = F.linear(x, weight, bias).chunk(2, -1)
        return formula(candidate, gate, x, ACTIVATIONS.index(activation))

    return Case(
        inputs=make,
        ours=lambda x, weight, bias: seqkern.highway(x, weight, bias, activation),
        torch=of_torch,
        reference=expected,
    )
