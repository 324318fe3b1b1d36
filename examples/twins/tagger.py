"""The tagger in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.twins.layers import EncoderLayer, padding_mask, ragged, sinusoidal
from examples.twins.recurrent_lm import Head

CELLS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Encoder(nn.Module):
    """Pre-norm blocks with gelu, and a norm at the end."""

    def __init__(self, d_model: int, nhead: int, num_layers: int, dim_feedforward: int, rotary: bool = False):
        super().__init__()
        layers = [EncoderLayer(d_model, nhead, dim_feedforward, "gelu", norm_first=True) for _ in range(num_layers)]
        for layer in layers:
            layer.self_attn.rotary = rotary
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = padding_mask(lengths, x.shape[1])
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


def with_positions(x: Tensor) -> Tensor:
    return x * x.shape[-1] ** 0.5 + sinusoidal(x.shape[1], x.shape[2]).to(x.dtype)


class Tagger(nn.Module):
    def __init__(
        self, vocab_size: int, num_tags: int, embedding_dim: int, hidden_size: int, encoder: str = "birnn",
        cell: str = "lstm", num_layers: int = 1, *, nhead: int = 4, positions: str = "rotary", dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim)
        self.positions, both = positions, encoder == "birnn"
        if encoder == "transformer":
            self.encoder: nn.Module = Encoder(embedding_dim, nhead, num_layers, hidden_size, positions == "rotary")
        else:
            self.encoder = CELLS[cell](
                input_size=embedding_dim, hidden_size=hidden_size, num_layers=num_layers, batch_first=True,
                bidirectional=both,
            )  # fmt: skip
        self.dropout = nn.Dropout(dropout)
        features = embedding_dim if encoder == "transformer" else hidden_size * (2 if both else 1)
        self.head = Head(features, num_tags, True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if isinstance(self.encoder, nn.RNNBase):
            # Read from left to right, padding behind a row's end changes nothing that counts: torch's fastest call.
            x = self.dropout(x)
            x, _ = ragged(self.encoder, x, lengths) if self.encoder.bidirectional else self.encoder(x)
            x = x.contiguous()  # dropout draws in the order of memory
        else:
            x = with_positions(x) if self.positions == "sinusoidal" else x
            x = self.encoder(self.dropout(x), lengths)
        return self.dropout(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.linear(hidden)

    def loss(self, tokens: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
        tags = tags.masked_fill(torch.arange(tokens.shape[1]) >= lengths[:, None], -100)
        return F.cross_entropy(self.logits(self(tokens, lengths)).flatten(0, 1), tags.flatten())
