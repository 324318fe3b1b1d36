"""Embeddings against torch's: alone, with learned positions, and with positions, norm and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, backward_only, compete, forward_backward, forward_only
from seqkern.ops.embedding import cost
from seqkern.testing import check_case, embedding_case

SHAPES = [(2048, 30000, 256), (512, 50257, 768), (16384, 1000, 128)]  # tokens, rows of the table, features


def plain(ids: Tensor, kind: str) -> Callable[..., Tensor]:
    def function(weight: Tensor, *rest: Tensor) -> Tensor:
        y = F.embedding(ids, weight)
        if kind != "alone":
            y = y + rest[0][: ids.shape[1]]
        if kind == "all":
            y = F.dropout(F.layer_norm(y, y.shape[-1:], rest[1], rest[2]), 0.1)
        return y

    return function


@pytest.mark.parametrize("kind", ["alone", "positions", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("part", ["forward", "backward", "sparse backward", "forward+backward"])
def test_embedding(benchmark, part, shape, kind, device):
    tokens, classes, columns = shape
    ids = torch.randint(classes, (8, tokens // 8), device=device)
    inputs = [torch.randn(classes, columns, device=device)]
    if kind != "alone":
        inputs.append(torch.randn(tokens // 8, columns, device=device))
    if kind == "all":
        inputs += [torch.randn(columns, device=device) for _ in range(2)]

    def ours(weight: Tensor, *rest: Tensor) -> Tensor:
        given: dict[str, Any] = {"sparse": part == "sparse backward"}
        if rest:
            given |= {"positions": rest[0]}
        if kind == "all":
            given |= {"norm": (rest[1], rest[2]), "dropout_p": 0.1}
        return seqkern.embedding(ids, weight, **given)

    make = {"forward": forward_only, "forward+backward": forward_backward}.get(part, backward_only)
    peers = {"torch": make(plain(ids, kind), inputs)}
    if part in ("forward", "forward+backward") and shape == SHAPES[0]:
        peers["torch.compile"] = make(torch.compile(plain(ids, kind)), inputs)
    compete(
        benchmark,
        Contest(
            op=f"embedding {kind}{', sparse gradient' * (part == 'sparse backward')}",
            shape=f"{tokens} tokens, {classes} x {columns}",
            mode=part.removeprefix("sparse "),
            dtype=torch.float32,
            device=device,
            ours=make(ours, inputs),
            peers=peers,
            gate=lambda: check_case(embedding_case(norm=kind == "all"), torch.float32, device=device),
            cost=cost(tokens, columns, torch.float32),
        ),
    )
