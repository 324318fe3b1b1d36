"""The classifiers in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.twins.layers import ragged
from examples.twins.recurrent_lm import Head
from examples.twins.tagger import CELLS, Encoder, with_positions


def valid(lengths: Tensor, length: int) -> Tensor:
    """(B, length, 1), True within a row."""
    return (torch.arange(length) < lengths[:, None])[..., None]


def mean(x: Tensor, lengths: Tensor) -> Tensor:
    return x.masked_fill(~valid(lengths, x.shape[1]), 0.0).sum(1) / lengths[:, None]


class SequenceClassifier(nn.Module):
    def __init__(self, vocab_size: int, width: int, features: int, num_classes: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout, self.head = nn.Dropout(dropout), Head(features, num_classes, True)

    def pooled(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.head.linear(self.dropout(self.pooled(tokens, lengths)))

    def loss(self, tokens: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens, lengths), labels)


class RNNClassifier(SequenceClassifier):
    def __init__(
        self, vocab_size: int, num_classes: int, embedding_dim: int, hidden_size: int, num_layers: int = 1,
        cell: str = "lstm", *, pool: str = "last", bidirectional: bool = False, dropout: float = 0.0,
    ):  # fmt: skip
        features = hidden_size * (2 if bidirectional else 1)
        super().__init__(vocab_size, embedding_dim, features, num_classes, dropout)
        self.pool = pool
        self.rnn = CELLS[cell](
            input_size=embedding_dim, hidden_size=hidden_size, num_layers=num_layers, batch_first=True,
            bidirectional=bidirectional,
        )  # fmt: skip

    def pooled(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        output, state = ragged(self.rnn, self.dropout(self.embedding(tokens)), lengths)
        if self.pool == "last":
            h_n = state[0] if isinstance(state, tuple) else state
            return torch.cat([*h_n[-2:]], 1) if self.rnn.bidirectional else h_n[-1]
        if self.pool == "mean":
            return mean(output, lengths)
        return output.masked_fill(~valid(lengths, output.shape[1]), -torch.inf).max(1).values


class CNNClassifier(SequenceClassifier):
    """Padding is masked after the convolution: of windows that touch it none wins."""

    def __init__(
        self, vocab_size: int, num_classes: int, embedding_dim: int, filters: int = 100,
        widths: Sequence[int] = (3, 4, 5), *, dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__(vocab_size, embedding_dim, filters * len(widths), num_classes, dropout)
        self.convolutions = nn.ModuleList(nn.Conv1d(embedding_dim, filters, width) for width in widths)

    def pooled(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        x = x.masked_fill(~valid(lengths, x.shape[1]), 0.0).transpose(1, 2)
        maxima = []
        convolution: Any
        for convolution in self.convolutions:
            width = convolution.kernel_size[0]
            y = F.relu(convolution(F.pad(x, (0, max(0, width - x.shape[2])))))
            last = (lengths - width).clamp(min=0)  # a row shorter than a window has one, filled with zeros
            y = y.masked_fill((torch.arange(y.shape[2]) > last[:, None])[:, None], -torch.inf)
            maxima.append(y.max(2).values)
        return torch.cat(maxima, 1)


class TransformerClassifier(SequenceClassifier):
    def __init__(
        self, vocab_size: int, num_classes: int, d_model: int, nhead: int, num_layers: int,
        dim_feedforward: int | None = None, *, dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__(vocab_size, d_model, d_model, num_classes, dropout)
        self.encoder = Encoder(d_model, nhead, num_layers, dim_feedforward or 4 * d_model)

    def pooled(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.dropout(with_positions(self.embedding(tokens)))
        return mean(self.encoder(x, lengths), lengths)
