"""Layer norm and RMS norm as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.types import Device

from seqkern._keywords import explicit, refuse
from seqkern._recording import is_proxy, record_module
from seqkern.ops.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` on seqkern's kernels: constructor, state_dict and meaning are torch's.

    Shape: input (*, *normalized_shape), output the same. See `seqkern.layer_norm` for dtypes and errors.

    Example:
        >>> import torch, seqkern
        >>> norm = seqkern.nn.LayerNorm(8)
        >>> norm(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    @explicit
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(LayerNorm.__init__, unexpected, "LayerNorm")
        super().__init__(_sizes(normalized_shape), eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        if is_proxy(input):
            return record_module(self, {"input": input})
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` on seqkern's kernels: constructor, state_dict and meaning are torch's.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as `torch.nn.RMSNorm`.
        weight_offset: added to the weight, which begins at 1 - weight_offset: 1.0 is Gemma's.
        round_before_weight: as `seqkern.rms_norm`: True is Llama's.

    Shape: input (*, *normalized_shape), output the same. See `seqkern.rms_norm` for dtypes and errors.

    Example:
        >>> import torch, seqkern
        >>> norm = seqkern.nn.RMSNorm(8)
        >>> norm(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    weight_offset: float = 0.0
    round_before_weight: bool = False

    @explicit
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(RMSNorm.__init__, unexpected, "RMSNorm")
        _begin(self, elementwise_affine, weight_offset, round_before_weight)
        super().__init__(_sizes(normalized_shape), eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        _reset(self)

    def forward(self, x: Tensor) -> Tensor:
        if is_proxy(x):
            return record_module(self, {"x": x})
        return rms_norm(
            x, self.normalized_shape, self.weight, self.eps,
            weight_offset=self.weight_offset, round_before_weight=self.round_before_weight,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return super().extra_repr() + _flavour(self)


class AddLayerNorm(torch.nn.LayerNorm):
    """Dropout, residual addition and layer norm in one pass; parameters and state_dict are `torch.nn.LayerNorm`'s.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as `torch.nn.LayerNorm`.
        dropout: the probability that an element of the input is dropped in training mode.

    Shape: input and residual (*, *normalized_shape); returns (normalised, new_residual), both the same. Without a
    residual, as before the first block, new_residual is the input after dropout. See `seqkern.add_layer_norm` for
    dtypes and errors.

    Example:
        >>> import torch, seqkern
        >>> norm = seqkern.nn.AddLayerNorm(8, dropout=0.1)
        >>> y, x = norm(torch.randn(2, 8))  # before the first block
        >>> y, x = norm(torch.randn(2, 8), x)
    """

    @explicit
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        dropout: float = 0.0,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(AddLayerNorm.__init__, unexpected, "AddLayerNorm")
        super().__init__(_sizes(normalized_shape), eps, elementwise_affine, bias, device, dtype)
        self.dropout = _probability("AddLayerNorm", dropout)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if is_proxy(input):
            return record_module(self, {"input": input, "residual": residual})
        return add_layer_norm(
            input, residual, self.normalized_shape, self.weight, self.bias, self.eps, self.dropout, self.training
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout={self.dropout}"


class AddRMSNorm(torch.nn.RMSNorm):
    """Dropout, residual addition and RMS norm in one pass; parameters and state_dict are `torch.nn.RMSNorm`'s.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as `torch.nn.RMSNorm`.
        weight_offset, round_before_weight: as `seqkern.nn.RMSNorm`.
        dropout: the probability that an element of the input is dropped in training mode.

    Shape: input and residual (*, *normalized_shape); returns (normalised, new_residual), both the same. Without a
    residual, as before the first block, new_residual is the input after dropout. See `seqkern.add_rms_norm` for dtypes
    and errors.

    Example:
        >>> import torch, seqkern
        >>> norm = seqkern.nn.AddRMSNorm(8, dropout=0.1)
        >>> y, x = norm(torch.randn(2, 8))  # before the first block
        >>> y, x = norm(torch.randn(2, 8), x)
    """

    weight_offset: float = 0.0
    round_before_weight: bool = False

    @explicit
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        dropout: float = 0.0,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(AddRMSNorm.__init__, unexpected, "AddRMSNorm")
        _begin(self, elementwise_affine, weight_offset, round_before_weight)
        super().__init__(_sizes(normalized_shape), eps, elementwise_affine, device, dtype)
        self.dropout = _probability("AddRMSNorm", dropout)

    def reset_parameters(self) -> None:
        _reset(self)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if is_proxy(input):
            return record_module(self, {"input": input, "residual": residual})
        return add_rms_norm(
            input, residual, self.normalized_shape, self.weight, self.eps, self.dropout, self.training,
            weight_offset=self.weight_offset, round_before_weight=self.round_before_weight,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout={self.dropout}{_flavour(self)}"


def _begin(
    module: RMSNorm | AddRMSNorm, elementwise_affine: bool, weight_offset: float, round_before_weight: bool
) -> None:
    """Sets the options, before torch's constructor, which calls reset_parameters."""
    if weight_offset and not elementwise_affine:
        raise ValueError(
            f"{type(module).__name__}: weight_offset = {weight_offset} needs a weight, got elementwise_affine=False"
        )
    object.__setattr__(module, "weight_offset", weight_offset)
    object.__setattr__(module, "round_before_weight", round_before_weight)


def _reset(module: RMSNorm | AddRMSNorm) -> None:
    if module.elementwise_affine:
        torch.nn.init.constant_(module.weight, 1 - module.weight_offset)


def _flavour(module: RMSNorm | AddRMSNorm) -> str:
    shown = "" if module.weight_offset == 0 else f", weight_offset={module.weight_offset}"
    return shown + (", round_before_weight=True" if module.round_before_weight else "")


def _sizes(normalized_shape: int | Sequence[int]) -> Any:
    """As torch's constructors take it: their annotation knows lists and torch.Size alone."""
    return normalized_shape


def _probability(module: str, dropout: float) -> float:
    if not 0 <= dropout <= 1:
        raise ValueError(f"{module}: dropout must be a probability, between 0 and 1, got {dropout}")
    return dropout
