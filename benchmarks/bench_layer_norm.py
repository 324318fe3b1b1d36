"""Layer norm against torch's, eager and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.layer_norm import cost
from seqkern.testing import check_case, layer_norm_case

SHAPES = [(8, 64), (4096, 768), (8192, 1024), (2048, 4096)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=[f"{r}x{c}" for r, c in SHAPES])
def test_layer_norm(benchmark, rows, columns, dtype, mode, device):
    inputs = [torch.randn(shape, device=device).to(dtype) for shape in ((rows, columns), (columns,), (columns,))]
    functions = {
        "seqkern": lambda x, w, b: seqkern.layer_norm(x, (columns,), w, b),
        "torch": lambda x, w, b: F.layer_norm(x, (columns,), w, b),
        "torch.compile": torch.compile(lambda x, w, b: F.layer_norm(x, (columns,), w, b)),
    }
    make = forward_only if mode == "forward" else forward_backward
    calls = {name: make(function, inputs) for name, function in functions.items()}
    work = cost(rows, columns, dtype)
    if mode == "forward+backward":
        back = cost(rows, columns, dtype, backward=True)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    compete(
        benchmark,
        Contest(
            op="layer_norm",
            shape=f"{rows} x {columns}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=calls.pop("seqkern"),
            peers=calls,
            gate=lambda: check_case(layer_norm_case(min(rows, 512), columns), dtype, device=device),
            cost=work,
        ),
    )
