"""The Transformer with an encoder and a decoder in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.twins.layers import DecoderLayer, EncoderLayer, padding_mask, sinusoidal
from examples.twins.recurrent_lm import Head


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module], d_model: int, norm_first: bool):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(d_model) if norm_first else nn.Identity()

    def forward(self, x: Tensor, *read: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, *read)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(
        self, source_vocab: int, target_vocab: int, d_model: int, nhead: int, num_encoder_layers: int,
        num_decoder_layers: int, dim_feedforward: int | None = None, *, norm_first: bool = False,
        rotary: bool = False, tie_weights: bool = False, label_smoothing: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        sizes = (d_model, nhead, dim_feedforward or 4 * d_model, "relu", norm_first)
        encoder: list[Any] = [EncoderLayer(*sizes) for _ in range(num_encoder_layers)]
        decoder: list[Any] = [DecoderLayer(*sizes) for _ in range(num_decoder_layers)]
        for layer in encoder + decoder:
            layer.self_attn.rotary = rotary
        self.encoder, self.decoder = Stack(encoder, d_model, norm_first), Stack(decoder, d_model, norm_first)
        self.source_embedding = nn.Embedding(source_vocab, d_model)
        self.target_embedding = nn.Embedding(target_vocab, d_model)
        self.head = Head(d_model, target_vocab, not tie_weights)
        if tie_weights:
            self.head.linear.weight = self.target_embedding.weight
        self.label_smoothing = label_smoothing

    @staticmethod
    def embed(tokens: Tensor, table: nn.Embedding) -> Tensor:
        width = table.embedding_dim
        return math.sqrt(width) * table(tokens) + sinusoidal(tokens.shape[1], width).to(table.weight.dtype)

    def decode(self, target_in: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        return self.decoder(self.embed(target_in, self.target_embedding), memory, mask)

    def encode(self, source: Tensor, source_lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        mask = padding_mask(source_lengths, source.shape[1])
        return self.encoder(self.embed(source, self.source_embedding), mask), mask

    def loss(self, source: Tensor, source_lengths: Tensor, target_in: Tensor, target_out: Tensor) -> Tensor:
        logits = self.head.linear(self.decode(target_in, *self.encode(source, source_lengths)))
        return F.cross_entropy(logits.flatten(0, 1), target_out.flatten(), label_smoothing=self.label_smoothing)

    @torch.no_grad()
    def translate(self, source: Tensor, source_lengths: Tensor, begin: int, end: int, max_new_tokens: int) -> Tensor:
        """Greedily, without a cache: the whole target once more for each token."""
        read, tokens = self.encode(source, source_lengths), source.new_full((len(source), 1), begin)
        done = torch.zeros(len(source), dtype=torch.bool)
        while tokens.shape[1] <= max_new_tokens and not done.all():
            logits = self.head.linear(self.decode(tokens, *read)[:, -1])
            token = logits.argmax(-1).masked_fill(done, end)
            done |= token == end
            tokens = torch.cat((tokens, token[:, None]), 1)
        return tokens[:, 1:]
