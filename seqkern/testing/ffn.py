"""Cases of the feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.ops.ffn import ACTIVATIONS, Activation
from seqkern.reference.glu import GELU, RELU, SILU
from seqkern.testing._checks import Case, normal


def ffn_case(
    activation: Activation = "gelu", rows: int = 70, depth: int = 33, width: int = 130, outputs: int = 20, *,
    bias: bool = True, recompute: bool = False,
) -> Case:  # fmt: skip
    number, gated = ACTIVATIONS[activation]

    def make(g: torch.Generator) -> dict[str, Tensor]:
        inner = 2 * width if gated else width
        found = {"x": normal(g, rows, depth), "w1": normal(g, inner, depth, scale=depth**-0.5)}
        found |= {"b1": normal(g, inner)} if bias else {}
        found |= {"w2": normal(g, outputs, width, scale=width**-0.5)}
        return found | ({"b2": normal(g, outputs)} if bias else {})

    def of_torch(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        z, up = F.linear(x, w1, b1), None
        if gated:
            z, up = z.chunk(2, -1)
        if number == RELU:
            hidden = F.relu(z)
        elif number == SILU:
            hidden = F.silu(z)
        else:
            hidden = F.gelu(z, approximate="none" if number == GELU else "tanh")
        return F.linear(hidden if up is None else hidden * up, w2, b2)

    def given(x: Tensor, w1: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        return (x, w1, *rest) if bias else (x, w1, None, rest[0], None)  # type: ignore[return-value]

    return Case(
        inputs=make,
        ours=lambda **t: seqkern.ffn(*given(*t.values()), activation, recompute=recompute),
        torch=lambda **t: of_torch(*given(*t.values())),
        reference=lambda **t: reference.ffn(*given(*t.values()), number, gated),
    )
