"""A step of beam search: the best continuations of all beams.

Source: Graves, "Sequence Transduction with Recurrent Neural Networks", 2012; Sutskever et al., "Sequence to Sequence
Learning with Neural Networks", 2014.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def beam_step(logits: Tensor, scores: Tensor, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, beams and tokens, (B, candidates), of logits (B, K, V) and the beams' log-probabilities (B, K).

    A continuation has the beam's log-probability plus the token's. The best are first, and of equal ones the first beam
    and the first token. What is not possible is not there: minus infinity, beam and token 0.
    """
    classes = logits.shape[2]
    beams = logits.masked_fill((scores == -math.inf)[:, :, None], -math.inf)  # nothing goes on from a dead one
    lse = beams.logsumexp(2, keepdim=True)
    every = scores.to(logits.dtype)[:, :, None] + (beams - lse)
    every = torch.where(beams == -math.inf, -math.inf, every).flatten(1)
    ranked = every.argsort(dim=1, descending=True, stable=True)[:, :candidates]
    best = every.gather(1, ranked)
    possible = best > -math.inf
    found = (best, torch.where(possible, ranked // classes, 0), torch.where(possible, ranked % classes, 0))
    missing = candidates - ranked.shape[1]
    best, beam, token = (torch.nn.functional.pad(t, (0, missing)) for t in found)
    best[:, candidates - missing :] = -math.inf
    return best, beam, token
