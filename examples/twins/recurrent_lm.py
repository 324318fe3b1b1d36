"""The recurrent language model in plain torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class Head(nn.Module):
    """Holds a linear layer under the name that nn.LinearCrossEntropy has it."""

    def __init__(self, features: int, classes: int, bias: bool):
        super().__init__()
        self.linear = nn.Linear(features, classes, bias)


class RecurrentLM(nn.Module):
    def __init__(
        self, vocab_size: int, embedding_dim: int, hidden_size: int, num_layers: int = 1, cell: str = "lstm", *,
        tie_weights: bool = False, layer_norm: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim)
        kind: Any = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[cell]
        self.rnn = kind(input_size=embedding_dim, hidden_size=hidden_size, num_layers=num_layers, batch_first=True)
        self.norm = nn.LayerNorm(hidden_size) if layer_norm else nn.Identity()
        self.head = Head(hidden_size, vocab_size, not tie_weights)
        if tie_weights:
            self.head.linear.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.head.linear(self.norm(hidden))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
