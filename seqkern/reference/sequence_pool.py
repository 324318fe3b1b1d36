"""Pooling over sequences: a number of each feature from the rows of a sequence.

Source: the mean and the last state, Jurafsky & Martin, chapter 9 (9.14); the maximum over time, Collobert et al.,
"Natural Language Processing (Almost) from Scratch", 2011.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

KINDS = ("sum", "mean", "max", "min", "first", "last", "logsumexp")


def unpacked(x: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Packed rows (T, D) as padded sequences (B, T, D), with their lengths."""
    rows = starts[:-1, None] + torch.arange(x.shape[0], device=x.device)
    padded = x[rows.clamp(max=max(0, x.shape[0] - 1)).flatten()] if x.shape[0] else x.new_zeros(0, x.shape[1])
    return padded.view(len(starts) - 1, x.shape[0], x.shape[1]), starts.diff()


def sequence_pool(x: Tensor, lengths: Tensor | None, starts: Tensor | None, kind: int, reversed: int) -> Tensor:
    """x (B, L, D) with lengths (B,) or None, or packed (T, D) with starts (B + 1,): (B, D).

    `first` and `last` take the other end for the last `reversed` features. Of no rows everything is 0, but the
    log-sum-exp -inf.
    """
    if starts is not None:
        x, lengths = unpacked(x, starts)
    name, dtype = KINDS[kind], x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))
    count = torch.full((len(x),), x.shape[1], device=x.device) if lengths is None else lengths.clamp(0, x.shape[1])
    visible = (torch.arange(x.shape[1], device=x.device) < count[:, None])[..., None]
    some = (count > 0)[:, None]
    if x.shape[1] == 0:
        nothing = x.sum(1)
        return (nothing - math.inf if name == "logsumexp" else nothing).to(dtype)
    if name in ("sum", "mean"):
        found = torch.where(visible, x, 0).sum(1)
        found = found if name == "sum" else found / count.clamp(min=1)[:, None]
    elif name in ("max", "min"):
        sign = 1 if name == "max" else -1
        found = torch.where(some, sign * torch.where(visible, sign * x, -math.inf).max(1)[0], 0)
    elif name == "logsumexp":
        hidden = x.masked_fill(~visible, -math.inf).masked_fill(~some[:, None], 0)
        found = torch.where(some, torch.logsumexp(hidden, 1), -math.inf)
    else:
        from_the_end = torch.arange(x.shape[2], device=x.device) >= x.shape[2] - reversed
        late = ~from_the_end if name == "last" else from_the_end
        row = torch.where(late, (count - 1).clamp(min=0)[:, None], 0)
        found = torch.where(some, x.gather(1, row[:, None])[:, 0], 0)
    return found.to(dtype)
