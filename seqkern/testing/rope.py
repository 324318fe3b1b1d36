"""Cases of the rotary position embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal


def rope_case(
    batch: int = 2,
    heads: int = 3,
    tokens: int = 37,
    dim: int = 64,
    *,
    kv_heads: int | None = 1,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    wide: bool = False,
    first: int = 0,
    theta: float = 10000.0,
    scaling: float = 1.0,
    sequence_dim: int = -2,
) -> Case:
    """Queries and, unless kv_heads is None, keys. `wide`: by tables with a number for each feature, and random ones."""
    rotary = dim if rotary_dim is None else rotary_dim
    generator = torch.Generator().manual_seed(tokens)
    table = (batch, tokens, rotary)
    tables = tuple(torch.randn(table, generator=generator, dtype=torch.float64) for _ in range(2)) if wide else None
    positions = torch.arange(first, first + tokens)

    def make(g: torch.Generator) -> dict[str, Tensor]:
        sides = {"query": heads} | ({} if kv_heads is None else {"key": kv_heads})
        return {
            name: normal(g, batch, *((tokens, count) if sequence_dim == -3 else (count, tokens)), dim)
            for name, count in sides.items()
        }

    def ours(query: Tensor, key: Tensor | None = None) -> Any:
        options: dict[str, Any] = {"theta": theta, "scaling": scaling}
        if tables is not None:
            accumulate = torch.promote_types(query.dtype, torch.float32)
            options = {"tables": tuple(t.to(query.device, accumulate) for t in tables)}
        found = seqkern.rope(
            query, key, positions.to(query.device), interleaved=interleaved, rotary_dim=rotary_dim,
            sequence_dim=sequence_dim, **options,
        )  # fmt: skip
        return found if key is not None else found[0]

    def angles(like: Tensor) -> tuple[Tensor, Tensor]:
        accumulate = torch.promote_types(like.dtype, torch.float32)
        if tables is None:
            inv_freq = theta ** (torch.arange(0, rotary, 2, dtype=torch.float64) / -rotary)
            found = reference.rope_tables(positions, inv_freq, scaling, accumulate)
        else:  # what was rounded to float32 is what is meant
            cos, sin = (t.float().to(accumulate) if like.dtype != torch.float64 else t for t in tables)
            found = cos, sin
        heads_dim = -2 if sequence_dim == -3 else -3
        cos, sin = (t.to(like.device).unsqueeze(heads_dim) for t in found)
        return cos, sin

    def of_models(t: Tensor) -> Tensor:
        """As models of transformers compose it."""
        cos, sin = (table.to(t.dtype) for table in angles(t))
        turned, rest = t[..., :rotary], t[..., rotary:]
        if interleaved:
            if not wide:
                cos, sin = (table.repeat_interleave(2, -1) for table in (cos, sin))
            partner = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            if not wide:
                cos, sin = (torch.cat((table, table), -1) for table in (cos, sin))
            partner = torch.cat((-turned[..., rotary // 2 :], turned[..., : rotary // 2]), -1)
        return torch.cat((turned * cos + partner * sin, rest), -1)

    def of_reference(t: Tensor) -> Tensor:
        return reference.rope(t, *angles(t), rotary, interleaved)

    def both(function: Any) -> Any:
        def of(query: Tensor, key: Tensor | None = None) -> Any:
            return function(query) if key is None else (function(query), function(key))

        return of

    return Case(
        inputs=make,
        ours=ours,
        torch=both(of_models),
        reference=both(of_reference),
        outputs=("output",) if kv_heads is None else ("query", "key"),
    )
