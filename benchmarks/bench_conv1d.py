"""A convolution over rows against torch's, whose features come second, and its products of copied windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.conv1d import cost
from seqkern.testing import check_case, conv1d_case

# Sequences, rows, features, filters, width, dilation.
SHAPES = [(16, 128, 256, 256, 3, 1), (8, 1024, 64, 64, 5, 1), (8, 1024, 64, 64, 3, 8), (320, 16, 16, 64, 3, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("part", ["forward", "forward+backward"])
def test_conv1d(benchmark, part, shape, dtype, device):
    batch, rows, columns, filters, width, dilation = shape
    inputs = [
        torch.randn(batch, rows, columns, device=device, dtype=dtype),
        torch.randn(filters, width, columns, device=device, dtype=dtype) * (width * columns) ** -0.5,
        torch.randn(filters, device=device, dtype=dtype),
    ]
    left = dilation * (width - 1)
    options: dict[str, Any] = {"padding": "causal", "dilation": dilation}

    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (left, 0))
        return F.conv1d(padded, weight.transpose(1, 2), bias, dilation=dilation).transpose(1, 2)

    def unfolded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, left, 0)).unfold(1, left + 1, 1)[..., ::dilation]
        return F.linear(windows.transpose(2, 3).flatten(2), weight.flatten(1), bias)

    make = forward_only if part == "forward" else forward_backward
    forward, backward = (cost(batch * rows, width, columns, filters, dtype, backward=way) for way in (False, True))
    both = Cost(forward.flops + backward.flops, forward.bytes + backward.bytes)
    compete(
        benchmark,
        Contest(
            op="conv1d",
            shape=f"{batch} x {rows} x {columns}, {filters} of {width}" + f", dilation {dilation}" * (dilation > 1),
            mode=part,
            dtype=dtype,
            device=device,
            ours=make(lambda x, weight, bias: seqkern.conv1d(x, weight, bias, **options), inputs),
            peers={"torch": make(convolved, inputs), "torch unfolded": make(unfolded, inputs)},
            gate=lambda: check_case(conv1d_case(**options), dtype, device=device),
            cost=forward if part == "forward" else both,
        ),
    )
