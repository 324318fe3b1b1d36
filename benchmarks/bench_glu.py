"""Gated linear units against torch's two ops, eager and compiled. Memory sets the time of the large ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.glu import cost
from seqkern.testing import check_case, glu_case

# rows, columns; the halves of one projection are apart by twice the columns
SHAPES = [(8, 64), (64, 2048), (1024, 2816), (4096, 2816)]
OURS = {"swiglu": seqkern.swiglu, "geglu": seqkern.geglu}
THEIRS = {"swiglu": lambda gate, up: F.silu(gate) * up, "geglu": lambda gate, up: F.gelu(gate) * up}


@pytest.mark.parametrize("layout", ["apart", "halves"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=[f"{r}x{c}" for r, c in SHAPES])
@pytest.mark.parametrize("op", OURS)
def test_glu(benchmark, op, rows, columns, layout, dtype, mode, device):
    if layout == "halves":
        inputs = list(torch.randn(rows, 2 * columns, device=device).to(dtype).chunk(2, -1))
    else:
        inputs = [torch.randn(rows, columns, device=device).to(dtype) for _ in range(2)]
    functions = {"seqkern": OURS[op], "torch": THEIRS[op], "torch.compile": torch.compile(THEIRS[op])}
    make = forward_only if mode == "forward" else forward_backward
    calls = {name: make(function, inputs) for name, function in functions.items()}
    work = cost(rows * columns, dtype)
    if mode != "forward":
        back = cost(rows * columns, dtype, backward=True)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    compete(
        benchmark,
        Contest(
            op=op if layout == "apart" else f"{op} of halves",
            shape=f"{rows} x {columns}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=calls.pop("seqkern"),
            peers=calls,
            gate=lambda: check_case(glu_case(op, min(rows, 256), columns), dtype, device=device),
            cost=work,
        ),
    )
