"""Cases of embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal


def embedding_case(
    classes: int = 50, columns: int = 33, shape: tuple[int, ...] = (3, 40), *, positions: str | None = "learned",
    norm: bool = True, scale: float = 1.5, dropout_p: float = 0.0, offset: Any = 2,
) -> Case:  # fmt: skip
    """ids come again and again; positions is "learned", "sinusoidal" or None."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(classes, shape, generator=generator)
    every = offset if isinstance(offset, Tensor) else torch.tensor(offset)
    places = every if every.shape == shape else every[..., None] + torch.arange(shape[-1])
    places = places.expand(shape).reshape(-1)
    longest = int(places.max()) + 3 if places.numel() else 4

    def make(g: torch.Generator) -> dict[str, Tensor]:
        found = {"weight": normal(g, classes, columns)}
        found |= {"positions": normal(g, longest, columns)} if positions == "learned" else {}
        return found | ({"norm_weight": normal(g, columns), "norm_bias": normal(g, columns)} if norm else {})

    def table_of(t: dict[str, Tensor]) -> Tensor | None:
        if positions == "sinusoidal":
            return reference.sinusoids(torch.arange(longest), columns).to(t["weight"].device)
        return t.get("positions")

    def parameters(t: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        return (t["norm_weight"], t["norm_bias"]) if norm else None

    def ours(**t: Tensor) -> Tensor:
        device = t["weight"].device
        given: Any = "sinusoidal" if positions == "sinusoidal" else t.get("positions")
        begin = offset.to(device) if isinstance(offset, Tensor) else offset
        return seqkern.embedding(
            ids.to(device), t["weight"], positions=given, offset=begin, scale=scale, norm=parameters(t),
            dropout_p=dropout_p, seed=5,
        )  # fmt: skip

    def plain(**t: Tensor) -> Tensor:
        device = t["weight"].device
        s = scale * F.embedding(ids.to(device), t["weight"])
        table = table_of(t)
        if table is not None:
            s = s + F.embedding(places.view(shape).to(device), table.to(s.dtype))
        if norm:
            s = F.layer_norm(s, (columns,), t["norm_weight"], t["norm_bias"])
        if dropout_p:
            mask = reference.keep_mask(torch.tensor(5, device=device), dropout_p, ids.numel(), columns)
            s = torch.where(mask.view(s.shape), s / (1 - dropout_p), 0)
        return s

    def oracle(**t: Tensor) -> Tensor:
        seed = torch.tensor(5) if dropout_p else None
        found = reference.embedding(
            ids.reshape(-1), t["weight"], table_of(t), places, scale, norm, t.get("norm_weight"), t.get("norm_bias"),
            1e-5, seed, dropout_p,
        )  # fmt: skip
        return found.view(*shape, columns)

    return Case(inputs=make, ours=ours, torch=plain, reference=oracle)
