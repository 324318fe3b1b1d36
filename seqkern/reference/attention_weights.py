"""The softmax of attention, with a sink."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_weights(scores: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """exp(z - lse) of scores z (B, H, Nq, Nk), and lse, the logarithm of the denominator, (B, H, Nq).

    A sink, one of (H,), is a score of every query that has no value (Xiao et al., "Efficient Streaming Language Models
    with Attention Sinks", 2023). A query that sees nothing, all its scores -inf, has weights 0 and lse -inf.
    """
    sink = scores.new_full((1, 1, 1), -math.inf) if sinks is None else sinks.to(scores.dtype)[:, None, None]
    scores = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1)
    # The softmax does not depend on what is subtracted from a row: the row's maximum, so that exp cannot overflow.
    largest = scores.detach().amax(-1, keepdim=True)
    exponentials = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0))
    denominator = exponentials.sum(-1, keepdim=True)
    denominator = denominator.masked_fill(denominator == 0, 1)
    return exponentials[..., :-1] / denominator, (largest + denominator.log()).squeeze(-1)
