"""The Transformer language model in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.twins.layers import Attention, FeedForward, sinusoidal


class GPTBlock(nn.Module):
    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int, rotary: bool, norm: str, norm_first: bool,
        activation: str, bias: bool,
    ):  # fmt: skip
        super().__init__()
        kind: type[nn.Module] = nn.RMSNorm if norm == "rms" else nn.LayerNorm
        self.norm_first = norm_first
        self.attention = Attention(d_model, nhead, bias, rotary)
        self.ffn = FeedForward(d_model, dim_feedforward, activation, bias)
        self.norm1, self.norm2 = kind(d_model), kind(d_model)

    def forward(self, x: Tensor) -> Tensor:
        if not self.norm_first:
            x = self.norm1(x + self.attention(x, causal=True))
            return self.norm2(x + self.ffn(x))
        x = x + self.attention(self.norm1(x), causal=True)
        return x + self.ffn(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self, vocab_size: int, d_model: int, nhead: int, num_layers: int, dim_feedforward: int | None = None, *,
        max_len: int = 1024, positions: str = "learned", norm: str = "layer", norm_first: bool = True,
        activation: str = "gelu", bias: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.positions = positions
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(max_len, d_model) if positions == "learned" else None
        self.blocks = nn.ModuleList(
            GPTBlock(
                d_model,
                nhead,
                dim_feedforward or 4 * d_model,
                positions == "rotary",
                norm,
                norm_first,
                activation,
                bias,
            )
            for _ in range(num_layers)
        )
        last: type[nn.Module] = nn.RMSNorm if norm == "rms" else nn.LayerNorm
        self.norm = last(d_model) if norm_first else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(torch.arange(tokens.shape[1]))
        elif self.positions == "sinusoidal":
            x = x + sinusoidal(tokens.shape[1], x.shape[-1])
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
