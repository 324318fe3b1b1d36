"""Gated linear units: an activation of one tensor times another one.

Source: Shazeer, "GLU Variants Improve Transformer", 2020, eq. 5 and 6; gelu and its approximation by tanh: Hendrycks
and Gimpel, "Gaussian Error Linear Units", 2016.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SILU, GELU, GELU_TANH, RELU = range(4)


def glu(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """activation(gate) * up."""
    return (activated(gate.to(torch.promote_types(gate.dtype, torch.float32)), activation) * up).to(gate.dtype)


def activated(x: Tensor, activation: int) -> Tensor:
    if activation == RELU:
        return torch.relu(x)
    if activation == SILU:
        factor = F.logsigmoid(x).exp()  # the sigmoid, in a form whose derivative does not cancel
    elif activation == GELU:
        factor = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    else:
        factor = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * factor
