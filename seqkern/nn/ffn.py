"""The feed-forward block as a module."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.types import Device

from seqkern._keywords import explicit, refuse
from seqkern.ops.ffn import ACTIVATIONS, Activation, ffn


class FeedForward(torch.nn.Module):
    """linear2(activation(linear1(x))), kept for the backward pass as `seqkern.ffn` does.

    Args:
        d_model: features of input and output. dim_feedforward: width in between; gated, linear1 has twice as many.
        activation, recompute: as `seqkern.ffn`.
        bias: whether the linear layers have one.
        device, dtype: of the parameters.

    Parameters are linear1's and linear2's, torch.nn.Linear, with its start; their hooks are not called.

    Raises:
        ValueError: an unknown activation.

    Example:
        >>> import torch, seqkern
        >>> block = seqkern.nn.FeedForward(16, 64, "swiglu", bias=False)
        >>> block(torch.randn(2, 5, 16)).shape, sorted(block.state_dict())
        (torch.Size([2, 5, 16]), ['linear1.weight', 'linear2.weight'])
    """

    @explicit
    def __init__(
        self,
        d_model: int,
        dim_feedforward: int,
        activation: Activation = "gelu",
        bias: bool = True,
        recompute: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(FeedForward.__init__, unexpected, "FeedForward")
        super().__init__()
        if activation not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise ValueError(f"FeedForward: activation must be one of {names}, got {activation!r}")
        width = dim_feedforward * (2 if ACTIVATIONS[activation][1] else 1)
        self.activation, self.recompute = activation, recompute
        self.linear1 = torch.nn.Linear(d_model, width, bias, device, dtype)
        self.linear2 = torch.nn.Linear(dim_feedforward, d_model, bias, device, dtype)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}" + (", recompute=True" if self.recompute else "")

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.linear1, self.linear2
        return ffn(x, one.weight, one.bias, two.weight, two.bias, self.activation, recompute=self.recompute)
