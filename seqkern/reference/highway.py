"""Highway layers: a gate between an activation of a product and the input itself.

Source: Srivastava, Greff and Schmidhuber, "Highway Networks", 2015, equation 3; before a character-aware language
model's LSTM: Kim et al., "Character-Aware Neural Language Models", 2016, equation 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqkern.reference.glu import GELU, SILU, activated

ACTIVATIONS = ("relu", "tanh", "gelu", "silu")


def highway(candidate: Tensor, gate: Tensor, x: Tensor, activation: int) -> Tensor:
    """t activation(candidate) + (1 - t) x, t = sigmoid(gate); activation is an index of ACTIVATIONS."""
    wide = torch.promote_types(x.dtype, torch.float32)
    c, z = candidate.to(wide), gate.to(wide)
    name = ACTIVATIONS[activation]
    value = (
        c.relu() if name == "relu" else c.tanh() if name == "tanh" else activated(c, GELU if name == "gelu" else SILU)
    )
    t, rest = F.logsigmoid(z).exp(), F.logsigmoid(-z).exp()  # sigmoids, in a form whose derivatives do not cancel
    return (t * value + rest * x.to(wide)).to(x.dtype)
