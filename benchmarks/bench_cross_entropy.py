"""Cross-entropy of logits against torch, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.cross_entropy import cost
from seqkern.testing import check_case, cross_entropy_case

SHAPES = [(64, 10), (4096, 100), (512, 8192), (1024, 32000)]  # rows, classes


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "classes"), SHAPES, ids=[f"{r}x{c}" for r, c in SHAPES])
def test_cross_entropy(benchmark, rows, classes, smoothing, dtype, mode, device):
    inputs = [torch.randn(rows, classes, device=device).to(dtype)]
    target = torch.randint(classes, (rows,), device=device)

    def theirs(z: Tensor) -> Tensor:
        return F.cross_entropy(z, target, label_smoothing=smoothing)

    functions: dict[str, Any] = {
        "seqkern": lambda z: seqkern.cross_entropy(z, target, label_smoothing=smoothing),
        "torch": theirs,
        "torch.compile": torch.compile(theirs),
    }
    make = forward_only if mode == "forward" else forward_backward
    calls = {name: make(function, inputs) for name, function in functions.items()}
    work = cost(rows, classes, dtype)
    if mode != "forward":
        back = cost(rows, classes, dtype, backward=True)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    compete(
        benchmark,
        Contest(
            op="cross_entropy" + (" smoothed" if smoothing else ""),
            shape=f"{rows} x {classes}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=calls.pop("seqkern"),
            peers=calls,
            gate=lambda: check_case(cross_entropy_case(64, classes, label_smoothing=smoothing), dtype, device=device),
            cost=work,
            reads=mode == "forward",
        ),
    )
