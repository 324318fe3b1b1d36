"""The character-aware language model in plain torch. It too reads each distinct word of a batch once: a fair peer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.twins.recurrent_lm import Head


class Highway(nn.Module):
    def __init__(self, dim: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            candidate, gate = layer(x).chunk(2, -1)
            x = torch.lerp(x, F.relu(candidate), torch.sigmoid(gate))
        return x


class CharAwareLM(nn.Module):
    characters: Tensor
    lengths: Tensor

    def __init__(
        self, characters: Tensor, lengths: Tensor, vocab_size: int, char_dim: int, filters: Sequence[int],
        hidden_size: int, num_layers: int = 1, *, highway_layers: int = 1, num_characters: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.register_buffer("characters", characters)
        self.register_buffer("lengths", lengths)
        self.embedding = nn.Embedding(num_characters or int(characters.max()) + 1, char_dim)
        self.convolutions = nn.ModuleList(nn.Conv1d(char_dim, count, width) for width, count in enumerate(filters, 1))
        self.highway = Highway(sum(filters), highway_layers)
        self.rnn = nn.LSTM(sum(filters), hidden_size, num_layers, batch_first=True)
        self.head = Head(hidden_size, vocab_size, True)

    def encode(self, characters: Tensor, lengths: Tensor) -> Tensor:
        """Windows that touch padding cannot win; a word shorter than the filter has one window, with zeros behind."""
        longest = characters.shape[1]
        real = torch.arange(longest) < lengths[:, None]
        x = (self.embedding(characters) * real[:, :, None]).transpose(1, 2)
        found = []
        for width, convolution in enumerate(self.convolutions, 1):
            windows = convolution(F.pad(x, (0, max(0, width - longest))))
            allowed = torch.arange(windows.shape[-1]) < (lengths - width + 1).clamp(min=1)[:, None]
            found.append(windows.masked_fill(~allowed[:, None], -torch.inf).max(-1)[0])
        return self.highway(torch.tanh(torch.cat(found, -1)))

    def forward(self, words: Tensor) -> Tensor:
        distinct, places = words.unique(return_inverse=True)
        lengths = self.lengths[distinct]
        vectors = self.encode(self.characters[distinct, : int(lengths.max())], lengths)
        hidden, _ = self.rnn(vectors[places])
        return self.head.linear(hidden)

    def loss(self, words: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(words).flatten(0, 1), targets.flatten())
