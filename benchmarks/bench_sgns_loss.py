"""The loss of negative sampling against torch's ops: gathers, products, logsigmoid."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.sgns_loss import cost
from seqkern.testing import check_case, sgns_loss_case

SHAPES = [(1024, 5, 30000, 100), (8192, 5, 30000, 300), (8192, 20, 100000, 128)]  # examples, negatives, rows, features


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("part", ["forward", "forward+backward", "sparse"])
def test_sgns_loss(benchmark, part, shape, dtype, device):
    examples, negatives, rows, columns = shape
    center, context = (torch.randint(rows, (examples,), device=device) for _ in range(2))
    false = torch.randint(rows, (examples, negatives), device=device)
    tables = [(torch.randn(rows, columns, device=device) / 10).to(dtype) for _ in range(2)]
    sparse = part == "sparse"

    def ours(w_in: Tensor, w_out: Tensor) -> Tensor:
        return seqkern.sgns_loss(center, context, false, w_in, w_out, sparse=sparse)

    def plain(w_in: Tensor, w_out: Tensor) -> Tensor:
        v = F.embedding(center, w_in, sparse=sparse)
        positive = (v * F.embedding(context, w_out, sparse=sparse)).sum(-1)
        others = torch.bmm(F.embedding(false, w_out, sparse=sparse), v[..., None])[..., 0]
        ignored = F.logsigmoid(-others).masked_fill(false == context[:, None], 0)
        return -(F.logsigmoid(positive) + ignored.sum(-1)).mean()

    make = forward_only if part == "forward" else forward_backward
    work = cost(examples, negatives, columns, dtype)
    if part != "forward":
        back = cost(examples, negatives, columns, dtype, backward=True)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    peers = {"torch": make(plain, tables)}
    if not sparse:
        peers["torch.compile"] = make(torch.compile(plain), tables)
    compete(
        benchmark,
        Contest(
            op=f"sgns_loss{', sparse gradients' * sparse}",
            shape=f"{examples} examples, {negatives} negatives, {rows} x {columns}",
            mode="forward" if part == "forward" else "forward+backward",
            dtype=dtype,
            device=device,
            ours=make(ours, tables),
            peers=peers,
            gate=lambda: check_case(sgns_loss_case((70,), negatives, columns), dtype, device=device),
            cost=work,
        ),
    )
