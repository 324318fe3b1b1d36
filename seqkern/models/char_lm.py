"""A language model that reads the characters of words: convolutions over them, highway layers, an LSTM over words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.types import Device

import seqkern
from seqkern.generation import Chunk
from seqkern.models._checks import check_positive
from seqkern.models._parts import forget_slowly, swapped


class CharAwareLM(torch.nn.Module):
    """P(w_{t+1} | w_<=t), with every word read as the string of its characters.

        f_k = max over windows of tanh(W_k [c_i, ..., c_{i+k-1}] + b_k),  k = 1, 2, ...
        x_t = Highway([f_1, f_2, ...]),    h_t = LSTM(x_t, h_{t-1}),    P(w_{t+1} | w_<=t) = softmax(V h_t + b)

    The words of a batch repeat, so each distinct one is read once and its vector taken wherever it stands. A word need
    not be among those that are predicted to be read: the table of characters may have more rows than vocab_size.

    Args:
        characters: int64, (words, longest): the character numbers of every word, from 0; a buffer.
        lengths: int64, (words,), how many characters each word has, at least 1; a buffer.
        vocab_size: V: the first V words are predicted.
        char_dim: features of a character.
        filters: how many of each width 1, 2, ...; their sum is the size of a word's vector.
        hidden_size, num_layers: of the LSTM.
        highway_layers: between convolutions and LSTM.
        num_characters: rows of the characters' embedding. Default: as many as the table needs.
        dropout: of words' vectors, between layers and of the last states, in training.
        device, dtype: of the parameters. Biases of forget gates begin at 1.

    Shape: forward(words (B, T), state=None, lengths=None) returns the states (B, T, hidden_size) of the last layer and
    the network's state. `encode(characters (N, L), lengths (N,))`: vectors (N, sum of filters), of unseen words too.
    `loss(words, targets)`, both (B, T): the mean of -log P(target) in nats; targets of -100 do not count.
    `logits(hidden)` (..., V). `start` and `step`: for `seqkern.generate`.

    Raises:
        ValueError: tables that do not fit each other or vocab_size, lengths beyond the table; no filters; a number
            below 1.

    Source: Kim, Jernite, Sontag and Rush, "Character-Aware Neural Language Models", 2016.

    Example:
        >>> import torch, seqkern
        >>> characters, lengths = torch.randint(26, (100, 9)), torch.randint(1, 10, (100,))
        >>> model = seqkern.models.CharAwareLM(characters, lengths, 80, 8, (4, 8, 12), 16)
        >>> words = torch.randint(80, (3, 21))
        >>> model.loss(words[:, :-1], words[:, 1:]).backward()
        >>> seqkern.generate(model.step, model.start(3, 30), words, max_new_tokens=9).tokens.shape
        torch.Size([3, 30])
    """

    characters: Tensor
    lengths: Tensor

    def __init__(
        self,
        characters: Tensor,
        lengths: Tensor,
        vocab_size: int,
        char_dim: int,
        filters: Sequence[int],
        hidden_size: int,
        num_layers: int = 1,
        *,
        highway_layers: int = 1,
        num_characters: int | None = None,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if characters.dim() != 2 or lengths.shape != characters.shape[:1]:
            raise ValueError(
                "CharAwareLM: characters must be (words, longest) and lengths (words,), "
                f"got {tuple(characters.shape)} and {tuple(lengths.shape)}"
            )
        if not 0 < vocab_size <= len(characters):
            raise ValueError(f"CharAwareLM: vocab_size must be from 1 to {len(characters)} words, got {vocab_size}")
        if not filters or min(filters) < 1:
            raise ValueError(f"CharAwareLM: filters must be at least 1 of each width, got {tuple(filters)}")
        check_positive(
            "CharAwareLM", char_dim=char_dim, hidden_size=hidden_size, num_layers=num_layers,
            highway_layers=highway_layers,
        )  # fmt: skip
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 1 or longest > characters.shape[1]:
            raise ValueError(
                f"CharAwareLM: lengths must be from 1 to {characters.shape[1]}, the table's columns, "
                f"got {shortest} to {longest}"
            )
        lowest, kinds = int(characters.min()), int(characters.max()) + 1
        if lowest < 0:
            raise ValueError(f"CharAwareLM: characters must be at least 0, got {lowest}")
        if num_characters is not None and num_characters < kinds:
            raise ValueError(f"CharAwareLM: num_characters must be at least {kinds}, the table's, got {num_characters}")
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        self.register_buffer("characters", characters.to(device))
        self.register_buffer("lengths", lengths.to(device))
        self.embedding = torch.nn.Embedding(num_characters or kinds, char_dim, **factory)
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv1d(char_dim, count, width, **factory) for width, count in enumerate(filters, 1)
        )
        size = sum(filters)
        self.highway = seqkern.nn.Highway(size, highway_layers, **factory)
        self.dropout = torch.nn.Dropout(dropout)
        between = dropout if num_layers > 1 else 0.0
        self.rnn = seqkern.nn.LSTM(size, hidden_size, num_layers, batch_first=True, dropout=between, **factory)
        forget_slowly(self.rnn)
        self.head = seqkern.nn.LinearCrossEntropy(hidden_size, vocab_size, bias=True, **factory)

    def encode(self, characters: Tensor, lengths: Tensor) -> Tensor:
        x = seqkern.embedding(characters, self.embedding.weight)
        found = []
        for convolution in self.convolutions:
            weight = convolution.weight.transpose(1, 2)  # type: ignore[operator]
            found.append(seqkern.conv1d_max(x, weight, convolution.bias, "tanh", lengths))  # type: ignore[arg-type]
        vectors: Tensor = self.highway(torch.cat(found, -1))
        return vectors

    def word_vectors(self, words: Tensor) -> Tensor:
        """Vectors of words (...), shape (..., sum of filters); each distinct word is read once."""
        distinct, places = words.unique(return_inverse=True)
        return self.encode(self.characters[distinct], self.lengths[distinct])[places]

    def forward(self, words: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        hidden, state = self.rnn(self.dropout(self.word_vectors(words)), state, lengths=lengths)
        return self.dropout(hidden), state

    def loss(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self(words)
        found: Tensor = self.head(hidden, targets)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head.linear.weight, self.head.linear.bias)

    def start(self, rows: int, longest: int) -> None:
        """The state before the first word: zeros."""
        return None

    def step(self, chunk: Chunk, state: Any) -> tuple[Tensor, Any]:
        """Logits after each word of a chunk, and the state after it, rows first: beam search reorders them."""
        hidden, state = self(chunk.tokens, swapped(state), chunk.lengths)
        return self.logits(hidden), swapped(state)
