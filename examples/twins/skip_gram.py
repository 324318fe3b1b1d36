"""Skip-gram with negative sampling in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SkipGram(nn.Module):
    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        self.vectors, self.contexts = (nn.Parameter(torch.empty(vocab_size, dim)) for _ in range(2))

    def forward(self, centres: Tensor, candidates: Tensor) -> Tensor:
        """Scores of the candidates, by a batched product of matrix and vector."""
        vectors = F.embedding(centres, self.vectors)[..., None]
        return (F.embedding(candidates, self.contexts) @ vectors)[..., 0]

    def loss(self, centres: Tensor, contexts: Tensor, negatives: Tensor) -> Tensor:
        scores = self(centres, torch.cat([contexts[:, None], negatives], 1))
        false = F.logsigmoid(-scores[:, 1:]).masked_fill(negatives == contexts[:, None], 0.0)
        return -(F.logsigmoid(scores[:, 0]) + false.sum(1)).mean()
