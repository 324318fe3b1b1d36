"""The recurrent encoder-decoder in plain torch: a loop over the steps of the target, as joeynmt 2.3's decoder has it.

Its keys are projected once for each source (joeynmt.attention.BahdanauAttention and LuongAttention), a step is a cell,
scores, softmax and context (joeynmt.decoders.RecurrentDecoder._forward_step).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.twins.layers import padding_mask, ragged
from examples.twins.recurrent_lm import Head


class Attention(nn.Module):
    """Weights and context of a step; parameters as those of the attention modules of seqkern.nn."""

    def __init__(self, size: int, score: str):
        super().__init__()
        self.score = score
        self.key_proj = nn.Linear(size, size, bias=False) if score != "dot" else nn.Identity()
        if score == "additive":
            self.query_proj, self.weight = nn.Linear(size, size), nn.Parameter(torch.empty(size))

    def forward(self, state: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """state (B, H), keys and memory (B, S, H), mask (B, S), True where a key may be seen."""
        if self.score == "additive":
            scores = torch.tanh(self.query_proj(state)[:, None] + keys) @ self.weight
        else:
            scores = (keys @ state[:, :, None])[:, :, 0]
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return (weights[:, None] @ memory)[:, 0], weights


class Decoder(nn.Module):
    def __init__(self, embedding_dim: int, size: int, cell: str, score: str, order: str, input_feeding: bool):
        super().__init__()
        self.order, self.input_feeding, self.lstm = order, input_feeding, cell == "lstm"
        kind: Any = nn.LSTMCell if self.lstm else nn.GRUCell
        self.cell = kind(embedding_dim + size * (order == "bahdanau" or input_feeding), size)
        self.attention = Attention(size, score)
        self.output = nn.Linear(2 * size, size) if order == "luong" else None

    def step(self, x: Tensor, state: Any, feed: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> tuple[Any, ...]:
        """What the softmax reads after a step, the state, what the next step is fed, and the weights."""
        if self.output is None:
            context, weights = self.attention(state[0] if self.lstm else state, keys, memory, mask)
            state = self.cell(torch.cat((x, context), -1), state)
            return torch.cat((context, state[0] if self.lstm else state), -1), state, feed, weights
        state = self.cell(torch.cat((x, feed), -1) if self.input_feeding else x, state)
        h = state[0] if self.lstm else state
        context, weights = self.attention(h, keys, memory, mask)
        feed = torch.tanh(self.output(torch.cat((context, h), -1)))
        return feed, state, feed, weights


class RNNEncoderDecoder(nn.Module):
    def __init__(
        self, source_vocab: int, target_vocab: int, embedding_dim: int, hidden_size: int, num_layers: int = 1, *,
        cell: str = "gru", score: str = "additive", order: str = "bahdanau", input_feeding: bool = True,
        label_smoothing: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.source_embedding = nn.Embedding(source_vocab, embedding_dim)
        self.target_embedding = nn.Embedding(target_vocab, embedding_dim)
        kind: Any = {"gru": nn.GRU, "lstm": nn.LSTM}[cell]
        self.encoder = kind(embedding_dim, hidden_size // 2, num_layers, batch_first=True, bidirectional=True)
        self.lstm, self.label_smoothing = cell == "lstm", label_smoothing
        self.bridge = nn.Linear(hidden_size, hidden_size * (1 + self.lstm))
        self.decoder = Decoder(embedding_dim, hidden_size, cell, score, order, input_feeding)
        self.head = Head(hidden_size * (2 if order == "bahdanau" else 1), target_vocab, True)

    def encode(self, source: Tensor, source_lengths: Tensor) -> tuple[Any, ...]:
        """The decoder's first state and feed, keys, memory and mask."""
        memory, last = ragged(self.encoder, self.source_embedding(source), source_lengths)
        last = last[0] if self.lstm else last
        first = torch.tanh(self.bridge(torch.cat((last[-2], last[-1]), -1)))
        state = first.chunk(2, -1) if self.lstm else first
        mask = padding_mask(source_lengths, source.shape[1])
        assert mask is not None
        return state, torch.zeros_like(memory[:, 0]), self.decoder.attention.key_proj(memory), memory, mask[:, 0, 0]

    def loss(self, source: Tensor, source_lengths: Tensor, target_in: Tensor, target_out: Tensor) -> Tensor:
        state, feed, *read = self.encode(source, source_lengths)
        found = []
        for x in self.target_embedding(target_in).unbind(1):
            hidden, state, feed, _ = self.decoder.step(x, state, feed, *read)
            found.append(hidden)
        logits = self.head.linear(torch.stack(found, 1))
        return F.cross_entropy(logits.flatten(0, 1), target_out.flatten(), label_smoothing=self.label_smoothing)

    @torch.no_grad()
    def translate(
        self, source: Tensor, source_lengths: Tensor, begin: int, end: int, max_new_tokens: int
    ) -> Tensor:  # fmt: skip
        """Greedily."""
        state, feed, *read = self.encode(source, source_lengths)
        token, tokens = source.new_full((len(source),), begin), list[Tensor]()
        done = torch.zeros_like(token, dtype=torch.bool)
        while len(tokens) < max_new_tokens and not done.all():
            hidden, state, feed, _ = self.decoder.step(self.target_embedding(token), state, feed, *read)
            token = self.head.linear(hidden).argmax(-1).masked_fill(done, end)
            done |= token == end
            tokens.append(token)
        return torch.stack(tokens, 1)
