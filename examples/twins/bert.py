"""BERT in plain torch. Its head too multiplies only the masked positions: a good user gathers them first."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.twins.layers import EncoderLayer, padding_mask


class Encoder(nn.Module):
    def __init__(self, layers: list[nn.Module], norm: nn.Module | None):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm


class BERT(nn.Module):
    def __init__(
        self, vocab_size: int, d_model: int, nhead: int, num_layers: int, dim_feedforward: int | None = None,
        max_len: int = 512, *, local: int | None = None, norm_first: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.local = local
        self.embedding, self.position_embedding = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.norm = nn.LayerNorm(d_model)
        inner = dim_feedforward or 4 * d_model
        layers: list[nn.Module] = [EncoderLayer(d_model, nhead, inner, "gelu", norm_first) for _ in range(num_layers)]
        self.encoder = Encoder(layers, nn.LayerNorm(d_model) if norm_first else None)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        positions = self.position_embedding(torch.arange(tokens.shape[1]))
        x = self.norm(self.embedding(tokens) + positions)
        mask = padding_mask(lengths, tokens.shape[1])
        near = mask
        if self.local is not None:
            places = torch.arange(tokens.shape[1])
            band = (places - places[:, None]).abs() <= self.local
            near = band if mask is None else band & mask
        for number, layer in enumerate(self.encoder.layers):
            x = layer(x, mask if number % 2 else near)
        return x if self.encoder.norm is None else self.encoder.norm(x)


class MaskedLM(nn.Module):
    def __init__(self, bert: BERT):
        super().__init__()
        self.bert = bert
        vocab_size, d_model = bert.embedding.weight.shape
        self.transform, self.norm = nn.Linear(d_model, d_model), nn.LayerNorm(d_model)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, tokens: Tensor, lengths: Tensor, chosen: Tensor) -> Tensor:
        """Logits of the chosen positions."""
        hidden = self.norm(F.gelu(self.transform(self.bert(tokens, lengths)[chosen])))
        return F.linear(hidden, self.bert.embedding.weight, self.bias)

    def loss(self, tokens: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        chosen = targets != -100
        return F.cross_entropy(self(tokens, lengths, chosen), targets[chosen])


class BERTClassifier(nn.Module):
    def __init__(self, bert: BERT, num_classes: int, pool: str = "first"):
        super().__init__()
        self.bert, self.pool = bert, pool
        d_model = bert.embedding.weight.shape[1]
        self.pooler, self.classifier = nn.Linear(d_model, d_model), nn.Linear(d_model, num_classes)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.bert(tokens, lengths)
        if self.pool == "first":
            pooled = hidden[:, 0]
        else:
            real = torch.arange(tokens.shape[1]) < lengths[:, None]
            pooled = hidden.masked_fill(~real[:, :, None], 0.0).sum(1) / lengths[:, None]
        return self.classifier(torch.tanh(self.pooler(pooled)))

    def loss(self, tokens: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens, lengths), targets)
