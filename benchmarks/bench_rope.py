"""Rotary position embeddings against the rotate-half form of transformers' models, eager and compiled.

Memory sets the time. The peer gets its tables ready made; seqkern as well ("tables"), or makes them in the call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.rope import cost
from seqkern.testing import check_case, rope_case

# batch, heads, heads of keys, tokens, head dimension: Llama 3 8B, a step of decoding, GPT-J's size
SHAPES = [(1, 32, 8, 2048, 128), (8, 32, 8, 1, 128), (2, 16, 16, 512, 256)]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@pytest.mark.parametrize("tables", ["tables", "positions"])
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_rope(benchmark, shape, pairs, tables, dtype, mode, device):
    batch, heads, kv_heads, tokens, dim = shape
    # As a model has them: heads of a projection, tokens before heads in memory.
    inputs = [
        torch.randn(batch, tokens, count, dim, device=device).to(dtype).transpose(1, 2) for count in (heads, kv_heads)
    ]
    given = seqkern.rope_tables(torch.arange(tokens, device=device), dim)
    if pairs == "halves":
        cos, sin = (torch.cat((t, t), -1).to(dtype) for t in given)
        partner = rotate_half
    else:
        cos, sin = (t.repeat_interleave(2, -1).to(dtype) for t in given)
        partner = rotate_neighbours

    def theirs(q: Tensor, k: Tensor) -> Any:
        return q * cos + partner(q) * sin, k * cos + partner(k) * sin

    options: dict[str, Any] = {"interleaved": pairs == "neighbours"}
    options |= {"tables": given} if tables == "tables" else {}
    functions = {
        "seqkern": lambda q, k: seqkern.rope(q, k, **options), "torch": theirs, "torch.compile": torch.compile(theirs)
    }  # fmt: skip
    make = forward_only if mode == "forward" else forward_backward
    calls = {name: make(function, inputs) for name, function in functions.items()}
    work = cost(batch * tokens, heads + kv_heads, dim, dtype)
    if mode != "forward":
        work = Cost(2 * work.flops, 2 * work.bytes)
    compete(
        benchmark,
        Contest(
            op=f"rope {pairs} by {tables}",
            shape=" x ".join(map(str, shape)),
            mode=mode,
            dtype=dtype,
            device=device,
            ours=calls.pop("seqkern"),
            peers=calls,
            gate=lambda: check_case(rope_case(dim=dim, interleaved=pairs == "neighbours"), dtype, device=device),
            cost=work,
        ),
    )
