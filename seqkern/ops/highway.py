"""Highway layers: the functional API."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from seqkern._keywords import explicit, refuse
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern.ops._autocast import autocasts
from seqkern.ops._autograd import FLOATING, Cost
from seqkern.ops._elementwise import elementwise_op
from seqkern.reference.highway import ACTIVATIONS
from seqkern.reference.highway import highway as formula

_combine = elementwise_op("highway", formula, ("candidate", "gate", "x"))


@explicit
def highway(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Literal["relu", "tanh", "gelu", "silu"] = "relu",
    **unexpected: NoReturn,
) -> Tensor:
    """t activation(c) + (1 - t) x with [c, z] = x weight^T + bias, t = sigmoid(z): one product and one pass.

    Args:
        x: (..., D); float64, float32, bfloat16 or float16.
        weight: (2D, D), x's dtype: rows of the candidate c, then of the transform gate z.
        bias: (2D,), x's dtype, or None. It begins at about -2 for the gate, so that a new layer carries its input.
        activation: "relu", "tanh", "gelu" or "silu".

    Returns:
        (..., D), x's dtype; under autocast in its dtype. Derivatives of every order.

    Raises:
        TypeError: not tensors, or dtypes that are not floating point or differ.
        ValueError: shapes or devices that do not fit, or an unknown activation.
        NotImplementedError: the backend in force does not run on the device.

    Source: Srivastava et al. 2015, equation 3. (AllenNLP's Highway has the gate of the input instead: its rows are -z.)

    Example:
        >>> import torch, seqkern
        >>> x, weight, bias = torch.randn(5, 8), torch.randn(16, 8), torch.zeros(16)
        >>> seqkern.highway(x, weight, bias, "tanh").shape
        torch.Size([5, 8])
    """
    if any(map(is_proxy, (x, weight, bias))):
        return record(highway, locals())
    if unexpected:
        refuse(highway, unexpected)
    if activation not in ACTIVATIONS:
        raise ValueError(f"highway: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    _check(x, weight, bias)
    if autocasts(x) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    candidate, gate = F.linear(x, weight, bias).chunk(2, -1)
    given = {"candidate": candidate, "gate": gate, "x": x, "unexpected": {}}
    return _combine(highway, given, ACTIVATIONS.index(activation))


def cost(rows: int, dim: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a layer on (rows, dim), its product among it; `backward` counts the backward pass alone."""
    product, elements = 4 * rows * dim * dim, rows * dim
    if backward:
        return Cost(2 * product + 20 * elements, (8 * elements + 4 * dim * dim) * dtype.itemsize)
    return Cost(product + 10 * elements, (6 * elements + 2 * dim * dim) * dtype.itemsize)


def _check(x: Any, weight: Any, bias: Any) -> None:
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if name == "bias" and t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"highway: {name} must be a tensor, got {type(t).__name__}")
        check_not_nested("highway", name, t, "give it the values of a jagged one, t.values()")
        if t.dtype not in FLOATING:
            raise TypeError(f"highway: {name} must be float64, float32, bfloat16 or float16, got {t.dtype}")
        exempt = autocasts(x) and torch.float64 not in (t.dtype, x.dtype)  # autocast leaves float64 alone
        if t.dtype != x.dtype and not exempt:
            raise TypeError(f"highway: {name} must have the dtype of x, {x.dtype}, got {t.dtype}")
        if t.device != x.device:
            raise ValueError(f"highway: {name} must be on the device of x, {x.device}, got {t.device}")
    if x.dim() < 1:
        raise ValueError("highway: x must have shape (..., D), got ()")
    dim = x.shape[-1]
    for name, t, shape in (("weight", weight, (2 * dim, dim)), ("bias", bias, (2 * dim,))):
        if t is not None and t.shape != shape:
            raise ValueError(f"highway: {name} must have shape {shape}, as x has {dim} features, got {tuple(t.shape)}")
