"""Highway layers against plain torch: the same product, and the gate in one pass instead of five."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.highway import cost
from seqkern.testing import check_case, highway_case

SHAPES = [(256, 128), (4096, 256), (2048, 525)]  # rows, features; 525: of Kim et al.'s small model


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    candidate, gate = F.linear(x, weight, bias).chunk(2, -1)
    t = gate.sigmoid()
    return t * candidate.relu() + (1 - t) * x


@pytest.mark.parametrize(("rows", "dim"), SHAPES, ids=[f"{r}x{d}" for r, d in SHAPES])
def test_highway(benchmark, rows, dim, dtype, mode, device):
    shapes = ((rows, dim), (2 * dim, dim), (2 * dim,))
    inputs = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    make = forward_only if mode == "forward" else forward_backward
    work = cost(rows, dim, dtype)
    if mode != "forward":
        back = cost(rows, dim, dtype, backward=True)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    compete(
        benchmark,
        Contest(
            op="highway",
            shape=f"{rows} x {dim}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=make(seqkern.highway, inputs),
            peers={"torch": make(plain, inputs), "torch.compile": make(torch.compile(plain), inputs)},
            gate=lambda: check_case(highway_case(min(rows, 256), dim), dtype, device=device),
            cost=work,
        ),
    )
