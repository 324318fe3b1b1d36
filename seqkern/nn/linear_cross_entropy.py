"""A classifier's last layer and its loss as one module."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from seqkern._keywords import explicit, refuse
from seqkern._recording import is_proxy, record_module
from seqkern.ops.cross_entropy import Reduction, check_class_weight, check_numbers
from seqkern.ops.linear_cross_entropy import linear_cross_entropy


class LinearCrossEntropy(torch.nn.Module):
    """`seqkern.linear_cross_entropy` with its weights: torch.nn.LinearCrossEntropyLoss's constructor and state_dict.

    Args:
        in_features: D, the size of hidden states.
        num_classes: V, the size of the vocabulary.
        bias: whether the layer has one, as torch.nn.Linear.
        device, dtype: of the weights.
        reduction, label_smoothing, z_loss, softcap: as `seqkern.linear_cross_entropy`.
        weight: the weight of each class, shape (V,); a buffer.
        ignore_index: of targets that do not count; None is -100.

    Shape: forward(input (..., D), target (...)) -> the loss. `logits(input)` (..., V), with softcap, for generation.

    Share an embedding's weights by assigning them, as with every module; both then add to one gradient, and the
    state_dict has both names: `loss.linear.weight = embedding.weight`. After load_state_dict(..., assign=True), which
    replaces parameters one by one, assign them again.

    Raises:
        ValueError: as the function, for numbers or a weight that do not fit.

    Example:
        >>> import torch, seqkern
        >>> embedding, loss = torch.nn.Embedding(100, 16), seqkern.nn.LinearCrossEntropy(16, 100)
        >>> loss.linear.weight = embedding.weight
        >>> tokens = torch.randint(100, (2, 7))
        >>> loss(embedding(tokens[:, :-1]), tokens[:, 1:]).backward()
        >>> embedding.weight.grad.shape
        torch.Size([100, 16])
    """

    @explicit
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(LinearCrossEntropy.__init__, unexpected, "LinearCrossEntropy")
        super().__init__()
        op = "LinearCrossEntropy"
        ignore_index = -100 if ignore_index is None else ignore_index
        check_numbers(op, ignore_index, label_smoothing, z_loss, softcap, reduction)
        if weight is not None:
            check_class_weight(op, weight, num_classes, weight.device, weight.dtype)
        self.linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.weight: Tensor | None
        self.register_buffer("weight", weight)
        self.num_classes, self.ignore_index, self.reduction = num_classes, ignore_index, reduction
        self.label_smoothing, self.z_loss, self.softcap = label_smoothing, z_loss, softcap

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of the hidden states, (..., D), for the targets (...)."""
        if is_proxy(input) or is_proxy(target):
            return record_module(self, {"input": input, "target": target})
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            self.linear.bias,
            ignore_index=self.ignore_index,
            class_weight=self.weight,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
        )

    def logits(self, input: Tensor) -> Tensor:
        """(..., V) of the hidden states, (..., D), with softcap."""
        z = self.linear(input)
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def extra_repr(self) -> str:
        """The options that are not the defaults."""
        shown = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}
        return ", ".join(
            f"{name}={getattr(self, name)!r}" for name, usual in shown.items() if getattr(self, name) != usual
        )
