"""Cross-entropy of rows of logits.

Source: Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990; label smoothing:
Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016, section 7, with class weights as
torch's cross_entropy has them; z_loss: Chowdhery et al., "PaLM", 2022, section 5; softcap: Gemma Team, "Gemma 2", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(logits / softcap), in the accumulator's dtype; 0: no cap."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return softcap * torch.tanh(z / softcap) if softcap else z


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """logits (N, V), target (N,): the loss and the log-sum-exp of each row, both 0 where the target is ignore_index.

    log(sum exp(z - max)) and z - max stay apart until one is subtracted from the other: lse and z, which may be large,
    would cancel, and exp(z - lse) would have lse's rounding in every class.
    """
    valid = target != ignore_index
    at = torch.where(valid, target, 0)[:, None]
    if logits.shape[1] == 0:
        return logits.sum(-1), logits.sum(-1)
    top = logits.detach().amax(-1, keepdim=True)  # no derivative depends on it
    below = logits - top.masked_fill(top == float("-inf"), 0)
    log_sum = below.exp().sum(-1).log()
    lse = top[:, 0] + log_sum
    weight = logits.new_ones(logits.shape[1]) if class_weight is None else class_weight.to(logits.dtype)
    loss = (1 - label_smoothing) * weight[at[:, 0]] * (log_sum - below.gather(1, at)[:, 0])
    if label_smoothing:
        loss = loss + label_smoothing / logits.shape[1] * (weight * (log_sum[:, None] - below)).sum(-1)
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss.masked_fill(~valid, 0), lse.masked_fill(~valid, 0)


def reduced(losses: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """ "none", "sum", or "mean": by the class weights of the targets that are not ignored."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    valid = target != ignore_index
    if class_weight is None:
        return losses.sum() / valid.sum()
    weights = class_weight.to(losses.dtype)[torch.where(valid, target, 0)]
    return losses.sum() / weights.masked_fill(~valid, 0).sum()
