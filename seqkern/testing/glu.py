"""Cases of the gated linear units."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern.reference.glu import GELU, GELU_TANH, SILU, glu
from seqkern.testing._checks import Case, normal


def glu_case(
    op: str = "swiglu", rows: int = 130, columns: int = 257, *, approximate: str = "none", std: float = 2.0
) -> Case:
    """`op` is "swiglu" or "geglu"."""
    options: dict[str, Any] = {} if op == "swiglu" else {"approximate": approximate}
    activation = SILU if op == "swiglu" else GELU if approximate == "none" else GELU_TANH

    def make(g: torch.Generator) -> dict[str, Tensor]:
        return {"gate": normal(g, rows, columns, scale=std), "up": normal(g, rows, columns)}

    def of_torch(gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate) if op == "swiglu" else F.gelu(gate, **options)) * up

    return Case(
        inputs=make,
        ours=lambda gate, up: getattr(seqkern, op)(gate, up, **options),
        torch=of_torch,
        reference=lambda gate, up: glu(gate, up, activation),
    )
