"""Sampling a token: which tokens the filters leave, in whose order, and which of them a seed draws.

Source: top-k, Fan et al., "Hierarchical Neural Story Generation", 2018; top-p, Holtzman et al., "The Curious Case of
Neural Text Degeneration", 2020; min-p, Nguyen et al., "Turning Up the Heat", 2024; typical, Meister et al., "Locally
Typical Sampling", 2023; repetition penalty, Keskar et al., "CTRL", 2019.

Each is a function of a row of logits, which returns it with minus infinity where a token is left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from seqkern.reference.dropout import dropout_words

ORDERS = ("transformers", "vllm", "llama.cpp")
STREAM = 0x53414D50
SLACK = 1 - 1e-6  # 9 of 10 equal tokens have a probability of 0.9, however it is rounded


def penalised(z: Tensor, penalty: float, history: Tensor) -> Tensor:
    """Logits of tokens that were there: divided by the penalty, or multiplied where they are negative; once each."""
    at = history[(history >= 0) & (history < len(z))].unique()
    return z.index_put((at,), torch.where(z[at] < 0, z[at] * penalty, z[at] / penalty))


def top_k(z: Tensor, k: int, order: str) -> Tensor:
    """The k largest. With all that equal the last of them; llama.cpp takes k, of equal ones the first tokens."""
    if not 0 < k < len(z):
        return z
    ranked = z.argsort(descending=True, stable=True)
    if order == "llama.cpp":
        return z.index_fill(0, ranked[k:], -math.inf)
    return z.masked_fill(z < z[ranked[k - 1]], -math.inf)


def top_p(z: Tensor, p: float) -> Tensor:
    """The fewest tokens whose probability reaches p, the most probable first, and of equal ones the first tokens.

    (Which of equal ones transformers and vllm keep is up to torch's sort, which is not stable.)
    """
    if p >= 1:
        return z
    ranked = z.argsort(descending=True, stable=True)
    count = 1 + int((z.double().softmax(0)[ranked].cumsum(0) < SLACK * p).sum())
    return z.index_fill(0, ranked[count:], -math.inf)


def min_p(z: Tensor, p: float) -> Tensor:
    """Tokens at least p times as probable as the most probable one."""
    return z.masked_fill(z < z.max() + math.log(p), -math.inf) if p > 0 else z


def typical(z: Tensor, p: float) -> Tensor:
    """The fewest tokens whose probability reaches p, those first whose information is next to the entropy."""
    if p >= 1:
        return z
    log_p = z.double().log_softmax(0)
    entropy = -(log_p * log_p.exp()).nansum()
    distance = (-log_p - entropy).abs()
    ranked = distance.argsort(stable=True)
    reached = (log_p.exp()[ranked].cumsum(0) < SLACK * p).sum().clamp(max=len(z) - 1)
    return z.masked_fill(distance > distance[ranked[reached]], -math.inf)


def processed(z: Tensor, order: str, **options: Any) -> Tensor:
    """All filters of a row, (V,), in the order of a library; then its softmax is what a token is drawn from."""
    if options["history"] is not None:
        z = penalised(z, options["repetition_penalty"], options["history"])
    k, p, least, mass = (options[name] for name in ("top_k", "top_p", "min_p", "typical_p"))
    if order == "llama.cpp":
        return min_p(top_p(typical(top_k(z, k, order), mass), p), least) / options["temperature"]
    z = z / options["temperature"]
    if order == "vllm":
        return typical(top_p(top_k(min_p(z, least), k, order), p), mass)
    return typical(min_p(top_p(top_k(z, k, order), p), least), mass)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A float64 in (0, 1) for each int64 seed and position, by Philox4x32 with 7 rounds (Salmon et al., 2011)."""
    word = 0xFFFFFFFF
    counter = [position & word, position >> 32 & word, torch.full_like(position, STREAM), torch.zeros_like(position)]
    words = dropout_words(counter, [seed & word, seed >> 32 & word])
    return ((words[0] << 21 | words[1] >> 11).double() + 0.5) * 2.0**-53


def drawn(z: Tensor, u: float) -> int:
    """The first token of a row, (V,), at which the sum of probabilities passes u."""
    return int((z.double().softmax(0).cumsum(0) <= u).sum().clamp(max=len(z) - 1))
