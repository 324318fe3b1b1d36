"""The feed-forward block of a transformer: a linear layer, an activation or a gate, and a linear layer.

Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.3; gates, Shazeer, "GLU Variants Improve
Transformer", 2020, eq. 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqkern.reference.glu import activated


def ffn(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: int, gated: bool
) -> Tensor:
    """x (..., D), w1 (H, D), or gated (2H, D), the gate's rows first; w2 (E, H): (..., E)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) @ w1.to(wide).t()
    z = z if b1 is None else z + b1.to(wide)
    if gated:
        gate, up = z.chunk(2, -1)
        hidden = activated(gate, activation) * up
    else:
        hidden = activated(z, activation)
    y = hidden @ w2.to(wide).t()
    return (y if b2 is None else y + b2.to(wide)).to(x.dtype)
