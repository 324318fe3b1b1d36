"""Cases of additive attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal


def additive_attention_case(
    batch: int = 3, queries: int = 13, keys: int = 50, channels: int = 33, columns: int = 40, *, scale: float = 1.0,
    bias: bool = True, lengths: bool = True, mask: str | None = None, return_weights: bool = False,
    return_lse: bool = False,
) -> Case:  # fmt: skip
    """scale: of queries and keys. lengths: the first sequence has all keys, another few. mask: "bool", "added"."""
    real = torch.tensor([keys, (keys + 1) // 2, 1])[torch.arange(batch) % 3] if lengths else None
    generator = torch.Generator().manual_seed(3)
    visible = torch.rand(batch, queries, keys, generator=generator) < 0.7

    def make(g: torch.Generator) -> dict[str, Tensor]:
        found = {
            "query": normal(g, batch, queries, channels, scale=scale),
            "key": normal(g, batch, keys, channels, scale=scale),
            "value": normal(g, batch, keys, columns),
            "weight": normal(g, channels),
        }
        found |= {"bias": normal(g, channels)} if bias else {}
        return found | ({"mask": normal(g, batch, 1, keys)} if mask == "added" else {})

    def options(t: dict[str, Tensor]) -> dict[str, Any]:
        device = t["query"].device
        found: dict[str, Any] = {"key_lengths": None if real is None else real.to(device), "mask": t.get("mask")}
        return found | ({"mask": visible.to(device)} if mask == "bool" else {})

    def chosen(output: Tensor, lse: Tensor, weights: Tensor) -> Any:
        return (output, *((weights,) if return_weights else ()), *((lse,) if return_lse else ()))

    def ours(**t: Tensor) -> Any:
        return seqkern.additive_attention(
            t["query"], t["key"], t["value"], t["weight"], t.get("bias"), **options(t), return_weights=return_weights,
            return_lse=return_lse,
        )  # fmt: skip

    def plain(**t: Tensor) -> Any:
        given = options(t)
        query = t["query"] + t["bias"] if bias else t["query"]
        hidden = query[:, :, None] + t["key"][:, None]
        if hidden.dtype == torch.float64:  # torch would otherwise round exactly like the oracle
            u = torch.expm1(2 * hidden.clamp(max=40))
            scores = (u / (u + 2)).flip(-1) @ t["weight"].flip(-1)
        else:
            scores = torch.tanh(hidden) @ t["weight"]
        if mask == "added":
            scores = scores + given["mask"]
        unseen = torch.zeros_like(scores, dtype=torch.bool) if mask != "bool" else ~given["mask"]
        if real is not None:
            unseen = unseen | (torch.arange(keys, device=scores.device) >= given["key_lengths"][:, None])[:, None]
        scores = scores.masked_fill(unseen, -math.inf)
        lse = scores.logsumexp(-1)
        weights = torch.where(unseen.all(-1, keepdim=True), 0, scores.softmax(-1))
        return chosen(weights @ t["value"], lse.to(torch.promote_types(lse.dtype, torch.float32)), weights)

    def expected(t: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        given = options(t)
        every = given["mask"]
        full = None if every is None else every.expand(batch, queries, keys)
        return reference.additive_attention(
            t["query"], t["key"], t["value"], t["weight"], t.get("bias"), given["key_lengths"], full
        )

    def first_terms(**t: Tensor) -> Any:
        """With constant denominators: of p (dp - delta), gradients through scores keep only p dp."""
        _, lse, weights = expected(t)
        scores = reference.additive_scores(t["query"], t["key"], t["weight"], t.get("bias"))
        if mask == "added":
            scores = scores + t["mask"]
        weights = weights.detach() * (scores - scores.detach()).exp()
        return chosen(weights @ t["value"], lse, weights)

    names = ("output", *(("weights",) if return_weights else ()), *(("lse",) if return_lse else ()))
    return Case(
        inputs=make, ours=ours, torch=plain, reference=lambda **t: chosen(*expected(t)), terms=first_terms,
        outputs=names,
    )  # fmt: skip
