"""The feed-forward block against torch's three or four calls, eager and compiled, at a width of 4 times the model's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.ffn import cost
from seqkern.testing import check_case, ffn_case

SHAPES = [(1, 256), (16, 256), (1024, 256), (1024, 768)]  # rows, features


def gelu(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def swiglu(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    gate, up = F.linear(x, w1, b1).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w2, b2)


@pytest.mark.parametrize("kept", ["kept", "recomputed"])
@pytest.mark.parametrize(("rows", "depth"), SHAPES, ids=[f"{r}x{d}" for r, d in SHAPES])
@pytest.mark.parametrize("plain", [gelu, swiglu], ids=lambda f: f.__name__)
def test_ffn(benchmark, plain, rows, depth, kept, dtype, mode, device):
    if mode == "forward" and kept == "recomputed":
        pytest.skip("without a backward pass nothing is kept either way")
    activation, width = plain.__name__, 4 * depth
    inner = 2 * width if activation == "swiglu" else width
    shapes = [(rows, depth), (inner, depth), (inner,), (depth, width), (depth,)]
    inputs = [(torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype) for shape in shapes]

    def ours(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return seqkern.ffn(x, w1, b1, w2, b2, activation, recompute=kept == "recomputed")

    make = forward_only if mode == "forward" else forward_backward
    work, back = (cost(rows, depth, inner, depth, dtype, backward=b) for b in (False, True))
    if mode != "forward":
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    peers = {"torch": make(plain, inputs)}
    if rows > 16:
        peers["torch.compile"] = make(torch.compile(plain), inputs)
    compete(
        benchmark,
        Contest(
            op=f"ffn {activation}{', recomputed' * (kept == 'recomputed')}",
            shape=f"{rows} x {depth}, width {width}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=make(ours, inputs),
            peers=peers,
            gate=lambda: check_case(ffn_case(activation), dtype, device=device),
            cost=work,
        ),
    )
