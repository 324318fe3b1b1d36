"""Additive attention against plain torch, which makes the sum of queries and keys, and its tanh, as (B, Tq, Tk, D)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops.additive_attention import cost
from seqkern.testing import additive_attention_case, check_case

# Sequences, queries, keys, channels, value channels: sentences at once, a decoder's step, long sequences.
SHAPES = [(16, 32, 32, 256, 256), (32, 40, 50, 512, 1024), (64, 1, 50, 512, 1024), (4, 512, 512, 128, 128)]


def plain(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    scores = torch.tanh(query[:, :, None] + key[:, None]) @ weight
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("part", ["forward", "forward+backward"])
def test_additive_attention(benchmark, part, shape, dtype, device):
    batch, queries, keys, channels, columns = shape
    shapes = ((batch, queries, channels), (batch, keys, channels), (batch, keys, columns), (channels,))
    inputs = [torch.randn(each, device=device, dtype=dtype) for each in shapes]
    make = forward_only if part == "forward" else forward_backward
    peers = {"torch": make(plain, inputs)}
    if shape == SHAPES[0]:
        peers["torch.compile"] = make(torch.compile(plain), inputs)
    compete(
        benchmark,
        Contest(
            op="additive_attention",
            shape=f"B{batch} {queries} x {keys} D{channels}, values {columns}",
            mode=part,
            dtype=dtype,
            device=device,
            ours=make(seqkern.additive_attention, inputs),
            peers=peers,
            gate=lambda: check_case(additive_attention_case(lengths=False), dtype, device=device),
            cost=cost(batch, queries, keys, channels, columns, dtype, backward=part != "forward"),
        ),
    )
