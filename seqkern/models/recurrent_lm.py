"""Recurrent language models: RNN, LSTM or GRU, stacked, with tied weights or not."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.types import Device

import seqkern
from seqkern.generation import Chunk
from seqkern.models._checks import check_positive
from seqkern.models._parts import CELLS, forget_slowly, swapped
from seqkern.nn import LayerNorm, LinearCrossEntropy


class RecurrentLM(torch.nn.Module):
    """A language model with a recurrent layer, or several: P(w_1 .. w_n) = prod_t P(w_t | w_<t).

        e_t = E[w_t],    h_t = cell(e_t, h_{t-1}),    P(w_{t+1} | w_<=t) = softmax(V h_t + b)

    A stacked layer reads the states of the layer below. With tied weights V is the embedding matrix E itself.

    Args:
        vocab_size: V, kinds of tokens.
        embedding_dim: features of a token.
        hidden_size: of the state; tied weights need embedding_dim.
        num_layers: stacked.
        cell: "lstm", "gru" or "rnn" (Elman's, tanh).
        tie_weights: whether the output matrix is the embedding matrix; there is no bias b then.
        layer_norm: normalises the last layer's states before the softmax, which speeds training up.
        dropout: of embeddings, between layers and of the last states, in training.
        device, dtype: of the parameters. Biases of forget gates begin at 1: the state carries over from the start.

    Shape: forward(tokens (B, T), state=None, lengths=None) returns the states (B, T, hidden_size) of the last layer and
    the network's state. `loss(tokens, targets)`, both (B, T): the mean of -log P(target) in nats, teacher-forced;
    targets of -100 do not count. `logits(hidden)` (..., V). `start` and `step`: for `seqkern.generate`.

    Raises:
        ValueError: an unknown cell, tied weights of two sizes, or a number below 1.

    Source: Elman 1990; Hochreiter and Schmidhuber 1997; Cho et al. 2014; Mikolov et al. 2010; weight tying: Press and
    Wolf 2017. Jurafsky and Martin, chapter 9, equations 9.10 to 9.13.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.RecurrentLM(100, 16, 16, num_layers=2, tie_weights=True)
        >>> tokens = torch.randint(100, (4, 21))
        >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        >>> found = seqkern.generate(model.step, model.start(4, 30), tokens, max_new_tokens=9, top_k=20, seed=0)
        >>> found.tokens.shape
        torch.Size([4, 30])
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        hidden_size: int,
        num_layers: int = 1,
        cell: Literal["lstm", "gru", "rnn"] = "lstm",
        *,
        tie_weights: bool = False,
        layer_norm: bool = False,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if cell not in CELLS:
            raise ValueError(f"RecurrentLM: cell must be one of {', '.join(CELLS)}, got {cell!r}")
        if tie_weights and embedding_dim != hidden_size:
            raise ValueError(
                f"RecurrentLM: tie_weights needs embedding_dim = hidden_size, got {embedding_dim} and {hidden_size}"
            )
        check_positive(
            "RecurrentLM", vocab_size=vocab_size, embedding_dim=embedding_dim, hidden_size=hidden_size,
            num_layers=num_layers,
        )  # fmt: skip
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        self.embedding = torch.nn.Embedding(vocab_size, embedding_dim, **factory)
        torch.nn.init.normal_(self.embedding.weight, std=embedding_dim**-0.5)
        between = dropout if num_layers > 1 else 0.0
        self.rnn = CELLS[cell](embedding_dim, hidden_size, num_layers, batch_first=True, dropout=between, **factory)
        self.norm = LayerNorm(hidden_size, **factory) if layer_norm else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(dropout)
        self.head = LinearCrossEntropy(hidden_size, vocab_size, bias=not tie_weights, **factory)
        if tie_weights:
            self.head.linear.weight = self.embedding.weight
        forget_slowly(self.rnn)

    def forward(self, tokens: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        embedded = self.dropout(seqkern.embedding(tokens, self.embedding.weight))
        hidden, state = self.rnn(embedded, state, lengths=lengths)
        return self.dropout(self.norm(hidden)), state

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self(tokens)
        found: Tensor = self.head(hidden, targets)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head.linear.weight, self.head.linear.bias)

    def start(self, rows: int, longest: int) -> Any:
        """The state before the first token: zeros."""
        return None

    def step(self, chunk: Chunk, state: Any) -> tuple[Tensor, Any]:
        """Logits after each token of a chunk, and the state after it, rows first: beam search reorders them."""
        hidden, state = self(chunk.tokens, swapped(state), chunk.lengths)
        return self.logits(hidden), swapped(state)
