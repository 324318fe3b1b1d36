"""The Vision Transformer in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.twins.layers import EncoderLayer
from examples.twins.recurrent_lm import Head


class Encoder(nn.Module):
    def __init__(self, d_model: int, nhead: int, num_layers: int, dim_feedforward: int):
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(d_model, nhead, dim_feedforward, "gelu", norm_first=True) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class ViT(nn.Module):
    def __init__(
        self, image_size: int, patch_size: int, num_classes: int, d_model: int, nhead: int, num_layers: int,
        dim_feedforward: int | None = None, *, channels: int = 1, pool: str = "cls",
    ):  # fmt: skip
        super().__init__()
        self.patch_size = patch_size
        places = (image_size // patch_size) ** 2 + (pool == "cls")
        self.projection = nn.Linear(channels * patch_size**2, d_model)
        self.class_token = nn.Parameter(torch.empty(d_model)) if pool == "cls" else None
        self.positions = nn.Parameter(torch.empty(places, d_model))
        self.encoder = Encoder(d_model, nhead, num_layers, dim_feedforward or 4 * d_model)
        self.head = Head(d_model, num_classes, True)

    def forward(self, images: Tensor) -> Tensor:
        x = self.projection(F.unfold(images, self.patch_size, stride=self.patch_size).transpose(1, 2))
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        x = self.encoder(x + self.positions)
        return self.head.linear(x.mean(1) if self.class_token is None else x[:, 0])

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(images), labels)
