"""Cases of cross-entropy; targets and options of `linear_cross_entropy`'s too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal


@dataclass(frozen=True)
class Loss:
    """Targets and options of a case, and what torch and the reference make of its logits."""

    target: Tensor
    class_weight: Tensor | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    return_lse: bool

    @classmethod
    def drawn(cls, rows: int, classes: int, *, ignored: float, class_weight: bool, **options: Any) -> Loss:
        """`ignored`: the share of rows without a target."""
        generator = torch.Generator().manual_seed(rows + classes)
        target = torch.randint(max(classes, 1), (rows,), generator=generator)
        target[torch.rand(rows, generator=generator) < ignored] = -100
        weights = torch.rand(classes, generator=generator) + 0.1 if class_weight else None
        return cls(target, weights, **options)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("loss", "lse") if self.return_lse else ("loss",)

    def options(self, device: torch.device) -> dict[str, Any]:
        """seqkern's keywords, beside the targets."""
        return {
            "class_weight": None if self.class_weight is None else self.class_weight.to(device),
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "reduction": self.reduction,
            "return_lse": self.return_lse,
        }

    def of_torch(self, logits: Tensor) -> Any:
        """As models have it: logits in the dtype, then float32."""
        logits = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        y = self.target.to(logits.device)
        w = self.weights_of(logits)
        loss = F.cross_entropy(logits, y, w, label_smoothing=self.label_smoothing, reduction=self.reduction)
        lse = logits.logsumexp(-1).masked_fill(y == -100, 0)
        if self.z_loss:
            loss = loss + self.z_loss * reference.reduced(lse.square(), y, w, -100, self.reduction)
        return (loss, lse) if self.return_lse else loss

    def of_reference(self, logits: Tensor) -> Any:
        """Of capped logits, in the accumulator's dtype."""
        y = self.target.to(logits.device)
        w = self.weights_of(logits)
        losses, lse = reference.cross_entropy_rows(logits, y, w, -100, self.label_smoothing, self.z_loss)
        loss = reference.reduced(losses, y, w, -100, self.reduction)
        return (loss, lse) if self.return_lse else loss

    def weights_of(self, logits: Tensor) -> Tensor | None:
        return None if self.class_weight is None else self.class_weight.to(logits.device, logits.dtype)


def cross_entropy_case(
    rows: int = 37,
    classes: int = 300,
    *,
    class_weight: bool = False,
    ignored: float = 0.25,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    scale: float = 1.0,
) -> Case:
    """`ignored`: the share of rows without a target; `scale`: of the logits: a large one saturates the softmax."""
    loss = Loss.drawn(
        rows, classes, ignored=ignored, class_weight=class_weight, label_smoothing=label_smoothing, z_loss=z_loss,
        softcap=softcap, reduction=reduction, return_lse=return_lse,
    )  # fmt: skip

    def ours(logits: Tensor) -> Any:
        return seqkern.cross_entropy(logits, loss.target.to(logits.device), **loss.options(logits.device))

    def of_reference(logits: Tensor) -> Any:
        return loss.of_reference(reference.softcapped(logits, softcap or 0.0))

    return Case(
        inputs=lambda g: {"logits": normal(g, rows, classes, scale=scale)},
        ours=ours,
        torch=loss.of_torch,
        reference=of_reference,
        outputs=loss.outputs,
    )
