"""Classifiers of sequences: recurrent with three ways of pooling, convolutional, and a Transformer's encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.types import Device

import seqkern
from seqkern.models._checks import check_heads, check_positive
from seqkern.models._parts import CELLS, Embedding, forget_slowly, make_encoder

Pool = Literal["last", "mean", "max"]


class SequenceClassifier(torch.nn.Module):
    """What the classifiers share: P(class | w_1 .. w_n) = softmax(V pool(h_1 .. h_n) + b), and its loss.

    A subclass makes `pooled`, (B, features), of (tokens (B, T), lengths (B,)); dropout comes between it and V.
    """

    def __init__(self, features: int, num_classes: int, dropout: float, factory: Any) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)
        self.head = seqkern.nn.LinearCrossEntropy(features, num_classes, bias=True, **factory)

    def pooled(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.head.logits(self.dropout(self.pooled(tokens, lengths)))

    def loss(self, tokens: Tensor, labels: Tensor, lengths: Tensor | None = None) -> Tensor:
        found: Tensor = self.head(self.dropout(self.pooled(tokens, lengths)), labels)
        return found


class RNNClassifier(SequenceClassifier):
    """A recurrent network whose states are pooled: the last one, their mean or their maximum.

        last:  softmax(V h_n)              mean:  softmax(V 1/n sum_t h_t)        max:  softmax(V max_t h_t)

    Bidirectional, the last state is [forward h_n; backward h_1], what each direction knows after its whole way.

    Args:
        vocab_size, num_classes: kinds of tokens, and classes.
        embedding_dim, hidden_size: features of a token, and of a state in each direction.
        num_layers: stacked.
        cell: "lstm", "gru" or "rnn" (Elman's, tanh).
        pool: "last", "mean" or "max".
        bidirectional: whether a second network reads from the end.
        dropout: of embeddings and of what is pooled, in training.
        device, dtype: of the parameters. An LSTM's forget gates begin open: their bias is 1.

    Shape: forward(tokens (B, T), lengths (B,)) returns logits (B, num_classes); without lengths rows have no padding.
    `loss(tokens, labels, lengths)`, labels (B,): the mean of -log P(label) in nats. `pooled`: what V is applied to.

    Raises:
        ValueError: an unknown cell or pool, or a number below 1; lengths beyond T.

    Source: mean pooling: Jurafsky and Martin, section 9.4 and equation 9.14; bidirectional: section 9.5; maximum:
    Conneau et al. 2017.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.RNNClassifier(100, 2, 16, 16, pool="max", bidirectional=True)
        >>> tokens, labels, lengths = torch.randint(100, (3, 9)), torch.tensor([0, 1, 1]), torch.tensor([9, 2, 5])
        >>> model.loss(tokens, labels, lengths).backward()
        >>> model(tokens, lengths).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        embedding_dim: int,
        hidden_size: int,
        num_layers: int = 1,
        cell: Literal["lstm", "gru", "rnn"] = "lstm",
        *,
        pool: Pool = "last",
        bidirectional: bool = False,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if cell not in CELLS:
            raise ValueError(f"RNNClassifier: cell must be one of {', '.join(CELLS)}, got {cell!r}")
        if pool not in ("last", "mean", "max"):
            raise ValueError(f"RNNClassifier: pool must be last, mean or max, got {pool!r}")
        check_positive(
            "RNNClassifier", vocab_size=vocab_size, num_classes=num_classes, embedding_dim=embedding_dim,
            hidden_size=hidden_size, num_layers=num_layers,
        )  # fmt: skip
        factory: Any = {"device": device, "dtype": dtype}
        super().__init__(hidden_size * (2 if bidirectional else 1), num_classes, dropout, factory)
        self.pool: Pool = pool
        self.embedding = Embedding(vocab_size, embedding_dim, **factory)
        self.rnn = CELLS[cell](
            embedding_dim, hidden_size, num_layers, batch_first=True, bidirectional=bidirectional, **factory
        )
        forget_slowly(self.rnn)

    def pooled(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        states, _ = self.rnn(self.dropout(self.embedding(tokens)), lengths=lengths)
        ends = self.pool == "last" and self.rnn.bidirectional
        return seqkern.sequence_pool(states, lengths, self.pool, bidirectional=ends)


class CNNClassifier(SequenceClassifier):
    """Convolutions over windows of tokens, of several widths side by side, and the maximum over time of each filter.

        c_i = max_t relu(F_i . [e_t; ...; e_{t+k-1}] + b_i),    P(class | w) = softmax(V [c_1; ...; c_m] + b)

    Args:
        vocab_size, num_classes: kinds of tokens, and classes.
        embedding_dim: features of a token.
        filters: of each width.
        widths: tokens in a window.
        dropout: of embeddings and of the maxima, in training.
        device, dtype: of the parameters.

    Shape: as `RNNClassifier`; a row shorter than a window is filled with zeros, lengths beyond T are cut to T.
    `pooled` (B, filters * len(widths)).

    Raises:
        ValueError: no widths, or a number below 1.

    Source: Kim 2014, CNN-rand; Collobert et al. 2011.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.CNNClassifier(100, 2, 16, 8, (2, 3))
        >>> model(torch.randint(100, (3, 9)), torch.tensor([9, 2, 5])).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        embedding_dim: int,
        filters: int = 100,
        widths: Sequence[int] = (3, 4, 5),
        *,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not widths or min(widths) < 1:
            raise ValueError(f"CNNClassifier: widths must be one or more positive numbers, got {tuple(widths)}")
        check_positive(
            "CNNClassifier", vocab_size=vocab_size, num_classes=num_classes, embedding_dim=embedding_dim,
            filters=filters,
        )  # fmt: skip
        factory: Any = {"device": device, "dtype": dtype}
        super().__init__(filters * len(widths), num_classes, dropout, factory)
        self.embedding = Embedding(vocab_size, embedding_dim, **factory)
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv1d(embedding_dim, filters, width, **factory) for width in widths
        )

    def pooled(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        layers: Any = self.convolutions
        maxima = [seqkern.conv1d_max(x, c.weight.transpose(1, 2), c.bias, "relu", lengths) for c in layers]
        return torch.cat(maxima, 1)


class TransformerClassifier(SequenceClassifier):
    """A Transformer's encoder, whose last states' mean is classified.

        x = sqrt(d) E[w] + positions,    x = Block(x) for each layer,    P(class | w) = softmax(V 1/n sum_t x_t + b)

    Args:
        vocab_size, num_classes: kinds of tokens, and classes.
        d_model: features; of each head d_model / nhead.
        nhead, num_layers: heads of a block, and blocks, `seqkern.nn.TransformerEncoderLayer`, pre-norm, with gelu.
        dim_feedforward: width inside the feed-forward network. Default: 4 d_model.
        dropout: of embeddings and of the mean, in training.
        device, dtype: of the parameters. Positions are Vaswani's, of any length.

    Shape: as `RNNClassifier`; lengths beyond T are cut to T. `pooled` (B, d_model).

    Raises:
        ValueError: a number below 1, an odd d_model, or an nhead that does not divide it.

    Source: Vaswani et al. 2017; mean: Jurafsky and Martin, equation 9.14.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.TransformerClassifier(100, 2, 16, 4, 1)
        >>> model(torch.randint(100, (3, 9)), torch.tensor([9, 2, 5])).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        d_model: int,
        nhead: int,
        num_layers: int,
        dim_feedforward: int | None = None,
        *,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads("TransformerClassifier", nhead, sinusoidal=True, d_model=d_model)
        check_positive(
            "TransformerClassifier", vocab_size=vocab_size, num_classes=num_classes, num_layers=num_layers,
            dim_feedforward=dim_feedforward,
        )  # fmt: skip
        factory: Any = {"device": device, "dtype": dtype}
        super().__init__(d_model, num_classes, dropout, factory)
        self.embedding = Embedding(vocab_size, d_model, positions=True, **factory)
        self.encoder = make_encoder(d_model, nhead, num_layers, dim_feedforward, False, factory)

    def pooled(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        states = self.encoder(self.dropout(self.embedding(tokens)), key_lengths=lengths)
        return seqkern.sequence_pool(states, lengths, "mean")
