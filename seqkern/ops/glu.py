"""Gated linear units of a transformer's feed-forward layer: swiglu, geglu."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from seqkern import _direct
from seqkern._direct import fast
from seqkern._keywords import explicit
from seqkern.ops._autograd import Cost
from seqkern.ops._elementwise import elementwise_op
from seqkern.reference.glu import GELU, GELU_TANH, SILU, glu

_glu = elementwise_op("glu", glu, ("gate", "up"))


@explicit
def swiglu(gate: Tensor, up: Tensor, **unexpected: NoReturn) -> Tensor:
    """silu(gate) * up, silu(x) = x * sigmoid(x): the gate of Llama's feed-forward layers, in one pass over memory.

    Args:
        gate, up: one shape, dtype and device; float64, float32, bfloat16 or float16. Rows (the last dimension) may be
            strided, as the halves of one projection are: `gate, up = x.chunk(2, -1)`.

    Returns:
        Contiguous, of that shape and dtype. It is rounded once, where silu and product round twice.

    Raises:
        TypeError: not tensors, or dtypes that are not floating point or differ.
        ValueError: shapes or devices that differ.
        NotImplementedError: the backend in force does not run on the device.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.

    Example:
        >>> import torch, seqkern
        >>> gate, up = torch.randn(3, 16).chunk(2, -1)
        >>> torch.allclose(seqkern.swiglu(gate, up), torch.nn.functional.silu(gate) * up, atol=1e-6)
        True
    """
    if fast():
        output: Tensor | None = _direct.glu(gate, up, SILU)
        if output is not None and not unexpected:
            return output
    return _glu(swiglu, {"gate": gate, "up": up, "unexpected": unexpected}, SILU)


@explicit
def geglu(gate: Tensor, up: Tensor, approximate: str = "none", **unexpected: NoReturn) -> Tensor:
    """gelu(gate) * up, gelu(x) = x * P(x), P the normal distribution; arguments, result and errors as `swiglu`'s.

    Args:
        gate, up: as `swiglu`.
        approximate: "none", or "tanh" for 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as Gemma has it.

    Raises:
        As `swiglu`; ValueError also for another `approximate`.

    Example:
        >>> import torch, seqkern
        >>> seqkern.geglu(torch.randn(3, 8), torch.randn(3, 8), approximate="tanh").shape
        torch.Size([3, 8])
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'geglu: approximate must be "none" or "tanh", got {approximate!r}')
    activation = GELU if approximate == "none" else GELU_TANH
    if fast():
        output: Tensor | None = _direct.glu(gate, up, activation)
        if output is not None and not unexpected:
            return output
    return _glu(geglu, {"gate": gate, "up": up, "approximate": approximate, "unexpected": unexpected}, activation)


def cost(elements: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a call; `backward` counts the backward pass alone. An exponential counts as one operation."""
    return Cost((9 if backward else 5) * elements, (5 if backward else 3) * elements * dtype.itemsize)
