"""Highway layers as a module."""

from __future__ import annotations

from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch.types import Device

from seqkern._keywords import explicit, refuse
from seqkern.ops.highway import highway


class Highway(torch.nn.Module):
    """Highway layers one after another: each is t activation(c) + (1 - t) x, [c, z] a product of x, t = sigmoid(z).

    Args:
        dim: features, D.
        layers: how many.
        activation: "relu", "tanh", "gelu" or "silu".
        gate_bias: what the biases of the gates begin with: below 0, a new layer carries most of its input.
        device, dtype: of the parameters: layers.<i>.weight (2D, D), rows of c and then of z, and layers.<i>.bias (2D,).

    Shape: (..., D) to (..., D).

    Source: Srivastava et al. 2015; Kim et al. 2016 put them between convolutions over characters and an LSTM.

    Example:
        >>> import torch, seqkern
        >>> seqkern.nn.Highway(16, layers=2)(torch.randn(3, 16)).shape
        torch.Size([3, 16])
    """

    @explicit
    def __init__(
        self,
        dim: int,
        layers: int = 1,
        activation: Literal["relu", "tanh", "gelu", "silu"] = "relu",
        gate_bias: float = -2.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(Highway.__init__, unexpected, "Highway")
        if layers < 1:
            raise ValueError(f"Highway: layers must be at least 1, got {layers}")
        super().__init__()
        self.activation: Literal["relu", "tanh", "gelu", "silu"] = activation
        self.gate_bias = gate_bias
        self.layers = torch.nn.ModuleList(torch.nn.Linear(dim, 2 * dim, True, device, dtype) for _ in range(layers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.layers:
            assert isinstance(layer, torch.nn.Linear)
            layer.reset_parameters()
            torch.nn.init.constant_(layer.bias[layer.in_features :], self.gate_bias)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, gate_bias={self.gate_bias}"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, torch.nn.Linear)
            x = highway(x, layer.weight, layer.bias, self.activation)
        return x
