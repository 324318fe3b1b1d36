"""Pooling over padded sequences against torch's masked ops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops.sequence_pool import cost
from seqkern.testing import check_case, sequence_pool_case

SHAPES = [(64, 128, 256), (32, 512, 768)]


def plain(kind: str, lengths: Tensor, longest: int) -> Callable[[Tensor], Tensor]:
    real = (torch.arange(longest, device=lengths.device) < lengths[:, None])[..., None]
    row = torch.arange(len(lengths), device=lengths.device)

    def function(x: Tensor) -> Tensor:
        if kind == "mean":
            return (x * real).sum(1) / lengths[:, None]
        if kind == "max":
            return x.masked_fill(~real, -math.inf).max(1).values
        if kind == "logsumexp":
            return x.masked_fill(~real, -math.inf).logsumexp(1)
        return x[row, lengths - 1]

    return function


@pytest.mark.parametrize("kind", ["mean", "max", "logsumexp", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("part", ["forward", "forward+backward"])
def test_sequence_pool(benchmark, part, shape, dtype, kind, device):
    batch, longest, columns = shape
    lengths = torch.randint(1, longest + 1, (batch,), generator=torch.Generator().manual_seed(1)).to(device)
    inputs = [torch.randn(shape, device=device, dtype=dtype)]
    make = forward_only if part == "forward" else forward_backward
    peers = {"torch": make(plain(kind, lengths, longest), inputs)}
    if shape == SHAPES[0]:
        peers["torch.compile"] = make(torch.compile(plain(kind, lengths, longest)), inputs)
    rows = batch if kind == "last" else int(lengths.sum())
    read = cost(rows, batch, columns, dtype)
    written = cost(batch * longest, batch, columns, dtype)
    compete(
        benchmark,
        Contest(
            op=f"sequence_pool {kind}",
            shape=f"{batch} x {longest} x {columns}",
            mode=part,
            dtype=dtype,
            device=device,
            ours=make(lambda x: seqkern.sequence_pool(x, lengths, kind), inputs),
            peers=peers,
            gate=lambda: check_case(sequence_pool_case(kind), dtype, device=device),
            cost=read if part == "forward" else type(read)(read.flops + written.flops, read.bytes + written.bytes),
        ),
    )
