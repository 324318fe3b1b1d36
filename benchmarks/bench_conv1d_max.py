"""A convolution and its maximum over time against torch's convolution, and its products of copied windows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.conv1d_max import cost
from seqkern.testing import check_case, conv1d_max_case

# Sequences, rows, features, filters of each width, widths: sentences (Kim 2014), words of characters (Kim 2016).
SHAPES = [(64, 48, 128, 100, (3, 4, 5)), (320, 16, 16, 200, (3,)), (320, 16, 16, 100, (1, 2, 3, 4, 5, 6, 7))]


def ours(x: Tensor, *tensors: Tensor) -> Tensor:
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return torch.cat([seqkern.conv1d_max(x, weight, bias) for weight, bias in pairs], 1)


def convolved(x: Tensor, *tensors: Tensor) -> Tensor:
    columns, pairs = x.transpose(1, 2), zip(tensors[::2], tensors[1::2], strict=True)
    found = [F.relu(F.conv1d(columns, weight.transpose(1, 2), bias)).max(2).values for weight, bias in pairs]
    return torch.cat(found, 1)


def unfolded(x: Tensor, *tensors: Tensor) -> Tensor:
    found = []
    for weight, bias in zip(tensors[::2], tensors[1::2], strict=True):
        windows = x.unfold(1, weight.shape[1], 1).transpose(2, 3).flatten(2)
        found.append(F.relu(F.linear(windows, weight.flatten(1), bias)).max(1).values)
    return torch.cat(found, 1)


def work(batch: int, rows: int, columns: int, filters: int, widths: Sequence[int], dtype: torch.dtype) -> list[Cost]:
    every = []
    for backward in (False, True):
        costs = [
            cost(batch * (rows - width + 1), batch, width, columns, filters, dtype, backward=backward)
            for width in widths
        ]
        every.append(Cost(sum(c.flops for c in costs), sum(c.bytes for c in costs)))
    return every


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("part", ["forward", "forward+backward"])
def test_conv1d_max(benchmark, part, shape, dtype, device):
    batch, rows, columns, filters, widths = shape
    inputs = [torch.randn(batch, rows, columns, device=device, dtype=dtype)]
    for width in widths:
        scale = (width * columns) ** -0.5
        inputs.append(torch.randn(filters, width, columns, device=device, dtype=dtype) * scale)
        inputs.append(torch.randn(filters, device=device, dtype=dtype))
    make = forward_only if part == "forward" else forward_backward
    forward, backward = work(batch, rows, columns, filters, widths, dtype)
    both = Cost(forward.flops + backward.flops, forward.bytes + backward.bytes)
    compete(
        benchmark,
        Contest(
            op="conv1d_max",
            shape=f"{batch} x {rows} x {columns}, {filters} of {', '.join(map(str, widths))}",
            mode=part,
            dtype=dtype,
            device=device,
            ours=make(ours, inputs),
            peers={"torch": make(convolved, inputs), "torch unfolded": make(unfolded, inputs)},
            gate=lambda: check_case(conv1d_max_case(), dtype, device=device),
            cost=forward if part == "forward" else both,
        ),
    )
