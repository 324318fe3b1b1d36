"""Linear layer and cross-entropy against torch: the plain two ops, eager and compiled, torch's own fused loss, and what
no implementation can do without: the matrix products alone.

"torch" has the logits in the dtype; in 16 bits "torch, float32 logits" converts them, as most models do. With ignored
rows "gathered" leaves them out by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops.linear_cross_entropy import cost
from seqkern.testing import check_case, linear_cross_entropy_case

# rows, hidden size, classes, the share of ignored rows: language models, of bytes too, and masked ones; a tagger
SHAPES = [
    (1024, 128, 8192, 0.0),
    (1024, 128, 32000, 0.0),
    (1024, 256, 8192, 0.0),
    (1024, 256, 32000, 0.0),
    (1024, 512, 32000, 0.0),
    (2048, 1024, 32000, 0.0),
    (1024, 256, 8192, 0.85),
    (1024, 128, 30000, 0.85),
    (4096, 256, 256, 0.0),
    (4096, 128, 40, 0.0),
]


def torch_loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), y)


def torch_loss_of_float32_logits(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


def torch_gathered(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    kept = y != -100
    return F.cross_entropy(F.linear(x[kept], w), y[kept])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_linear_cross_entropy(benchmark, shape, dtype, mode, device):
    rows, depth, classes, ignored = shape
    inputs = [
        torch.randn(rows, depth, device=device).to(dtype),
        torch.randn(classes, depth, device=device).mul(depth**-0.5).to(dtype),
    ]
    target = torch.randint(classes, (rows,), device=device)
    target[torch.rand(rows, device=device) < ignored] = -100
    left = int((target != -100).sum())

    def of(function: Any) -> Any:
        return lambda x, w: function(x, w, target)

    functions = {
        "seqkern": of(seqkern.linear_cross_entropy),
        "torch": of(torch_loss),
        "torch.compile": torch.compile(of(torch_loss)),
    }
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)  # of torch 2.13
    if options is not None:
        functions["F.linear_cross_entropy"] = lambda x, w: F.linear_cross_entropy(x, w, target, options=options())
    if dtype.itemsize == 2:
        functions["torch, float32 logits"] = of(torch_loss_of_float32_logits)
    if ignored:
        functions["gathered"] = of(torch_gathered)
    make = forward_only if mode == "forward" else forward_backward
    calls = {name: make(function, inputs) for name, function in functions.items()}
    x, w = inputs[0][target != -100], inputs[1]

    def products() -> None:
        logits = x @ w.T
        if mode != "forward":
            torch.mm(logits, w)
            torch.mm(logits.T, x)

    calls["products alone"] = products
    compete(
        benchmark,
        Contest(
            op="linear_cross_entropy" + (f", {ignored:.0%} ignored" if ignored else ""),
            shape=f"N {rows} D {depth} V {classes}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=calls.pop("seqkern"),
            peers=calls,
            gate=lambda: check_case(linear_cross_entropy_case(64, 1000, min(depth, 256)), dtype, device=device),
            cost=cost(left, classes, depth, dtype, backward=mode != "forward"),
        ),
    )
