"""The Vision Transformer: patches of an image as the tokens of an encoder."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.types import Device

import seqkern
from seqkern.models._checks import check_heads, check_positive


class ViT(torch.nn.Module):
    """The class of an image, read as a sequence of its patches by a Transformer encoder.

        z = [class token ; patch_1 W ; ... ; patch_N W] + positions,    z = Encoder(z),
        P(class | image) = softmax(V LayerNorm(z_0) + b)

    A patch is P x P pixels of every channel, flattened. The blocks are pre-norm, with gelu. With pool="mean" there is
    no class token, and the mean of the patches' states takes the place of z_0.

    Args:
        image_size: pixels of a side; images are square.
        patch_size: P; divides image_size.
        num_classes: kinds of images.
        d_model: features; of each head d_model / nhead.
        nhead, num_layers: heads of a block, and blocks.
        dim_feedforward: width inside the feed-forward network. Default: 4 d_model.
        channels: of the images.
        pool: "cls", the state of the class token, or "mean".
        dropout: of the embedded patches, and inside the blocks, in training.
        device, dtype: of the parameters.

    Shape: forward(images (B, channels, image_size, image_size)) returns logits (B, num_classes). `loss(images,
    labels)`, labels (B,): the mean of -log P(label) in nats. `attention_maps(images, layer=-1)`: with which weights the
    class token of a block sees the patches, (B, nhead, rows of patches, columns); the rest of 1 is its own weight.

    Raises:
        ValueError: a patch_size that does not divide image_size, an nhead that does not divide d_model, a number below
            1, an unknown pool, images of another shape, attention maps of a model without class token; what the
            modules raise.

    Source: Dosovitskiy et al. 2021.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.ViT(8, 2, 10, 16, 4, 2)
        >>> images = torch.rand(3, 1, 8, 8)
        >>> model.loss(images, torch.tensor([3, 1, 4])).backward()
        >>> model.attention_maps(images).shape
        torch.Size([3, 4, 4, 4])
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_classes: int,
        d_model: int,
        nhead: int,
        num_layers: int,
        dim_feedforward: int | None = None,
        *,
        channels: int = 1,
        pool: Literal["cls", "mean"] = "cls",
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if patch_size < 1 or image_size < patch_size or image_size % patch_size:
            raise ValueError(f"ViT: patch_size must divide image_size {image_size}, got {patch_size}")
        if pool not in ("cls", "mean"):
            raise ValueError(f"ViT: pool must be cls or mean, got {pool!r}")
        check_heads("ViT", nhead, d_model=d_model)
        check_positive(
            "ViT", num_classes=num_classes, num_layers=num_layers, dim_feedforward=dim_feedforward, channels=channels,
        )  # fmt: skip
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        self.shape = (channels, image_size, image_size)
        self.patch_size, self.side, self.pool = patch_size, image_size // patch_size, pool
        places = self.side**2 + (pool == "cls")
        self.projection = torch.nn.Linear(channels * patch_size**2, d_model, **factory)
        self.class_token = torch.nn.Parameter(torch.zeros(d_model, **factory)) if pool == "cls" else None
        self.positions = torch.nn.Parameter(0.5 * torch.randn(places, d_model, **factory))
        self.dropout = torch.nn.Dropout(dropout)
        width = 4 * d_model if dim_feedforward is None else dim_feedforward
        block = seqkern.nn.TransformerEncoderLayer(
            d_model,
            nhead,
            width,
            dropout,
            "gelu",
            batch_first=True,
            norm_first=True,
            **factory,
        )
        norm = seqkern.nn.LayerNorm(d_model, **factory)
        self.encoder = seqkern.nn.TransformerEncoder(block, num_layers, norm)
        for parameter in self.encoder.parameters():  # the encoder's blocks are copies of one
            if parameter.dim() > 1:
                torch.nn.init.xavier_uniform_(parameter)
        self.head = seqkern.nn.LinearCrossEntropy(d_model, num_classes, bias=True, **factory)

    def patches(self, images: Tensor) -> Tensor:
        """The images' patches from left to right and from above, flattened: (B, N, channels P P)."""
        if images.dim() != 4 or tuple(images.shape[1:]) != self.shape:
            raise ValueError(f"ViT: images must have shape (B, {', '.join(map(str, self.shape))}), "
                             f"got {tuple(images.shape)}")  # fmt: skip
        p, side = self.patch_size, self.side
        cut = images.unflatten(-1, (side, p)).unflatten(-3, (side, p))  # (B, channels, rows, P, columns, P)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(len(images), side * side, self.shape[0] * p * p)

    def embed(self, images: Tensor) -> Tensor:
        """What the first block reads, (B, N or N + 1, d_model)."""
        x: Tensor = self.projection(self.patches(images))
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        embedded: Tensor = self.dropout(x + self.positions)
        return embedded

    def encode(self, images: Tensor) -> Tensor:
        """The state that the class is read from, (B, d_model)."""
        x: Tensor = self.encoder(self.embed(images))
        return x[:, 0] if self.pool == "cls" else seqkern.sequence_pool(x)

    def forward(self, images: Tensor) -> Tensor:
        return self.head.logits(self.encode(images))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.head(self.encode(images), labels)
        return found

    def attention_maps(self, images: Tensor, layer: int = -1) -> Tensor:
        """The class token's weights of the patches, of one block."""
        if self.class_token is None:
            raise ValueError('ViT: attention_maps are the class token\'s, which pool="cls" has')
        x, blocks = self.embed(images), list(self.encoder.layers)
        for block in blocks[: blocks.index(blocks[layer])]:
            x = block(x)
        own: Any = blocks[layer]
        x = own.norm1(x)
        first = torch.zeros(1, dtype=torch.int64, device=x.device)
        weights: Tensor = own.self_attn(x, x, x, average_attn_weights=False, weight_rows=first)[1]
        return weights[:, :, 0, 1:].unflatten(-1, (self.side, self.side))
