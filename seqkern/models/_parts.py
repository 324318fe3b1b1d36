"""What several systems are made of: cells by name, embeddings, an encoder, and how they begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import seqkern
from seqkern.nn import GRU, LSTM, RNN

CELLS: dict[str, Any] = {"lstm": LSTM, "gru": GRU, "rnn": RNN}


class Embedding(torch.nn.Embedding):
    """E[w]; with positions sqrt(d) E[w] + Vaswani's sinusoids, in one pass."""

    def __init__(self, vocab_size: int, embedding_dim: int, positions: bool = False, **factory: Any) -> None:
        super().__init__(vocab_size, embedding_dim, **factory)
        torch.nn.init.normal_(self.weight, std=embedding_dim**-0.5)
        self.positions = positions

    def forward(self, tokens: Tensor) -> Tensor:
        options: Any = {"positions": "sinusoidal", "scale": self.embedding_dim**0.5} if self.positions else {}
        return seqkern.embedding(tokens, self.weight, **options)


def make_encoder(
    d_model: int, nhead: int, num_layers: int, dim_feedforward: int | None, rotary: bool, factory: Any
) -> torch.nn.Module:
    """Pre-norm blocks with gelu, without dropout, and a norm at the end."""
    rope = seqkern.nn.RotaryEmbedding(d_model // nhead) if rotary else None
    layer = seqkern.nn.TransformerEncoderLayer(
        d_model, nhead, 4 * d_model if dim_feedforward is None else dim_feedforward, 0.0, "gelu", batch_first=True,
        norm_first=True, rope=rope, **factory,
    )  # fmt: skip
    stack = seqkern.nn.TransformerEncoder(layer, num_layers, seqkern.nn.LayerNorm(d_model, **factory))
    for parameter in stack.parameters():  # torch's stack copies its layer: every block would begin as the first
        if parameter.dim() > 1:
            torch.nn.init.xavier_uniform_(parameter)
    return stack


def forget_slowly(rnn: torch.nn.RNNBase) -> None:
    """An LSTM's forget gates begin open: their bias is 1."""
    for name, parameter in rnn.named_parameters():
        if rnn.mode == "LSTM" and name.startswith("bias_ih"):
            torch.nn.init.ones_(parameter.data[rnn.hidden_size : 2 * rnn.hidden_size])  # gates i, f, g, o


def swapped(state: Any) -> Any:
    """(layers, rows, hidden_size) and (rows, layers, hidden_size), the one from the other."""
    if isinstance(state, tuple):
        return tuple(map(swapped, state))
    return None if state is None else state.transpose(0, 1)
