"""Causal attention against torch's scaled_dot_product_attention, eager and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.attention import cost
from seqkern.testing import attention_case, check_case

# batch, heads, kv_heads, length, head_dim
SHAPES = [(1, 8, 8, 128, 64), (1, 8, 8, 1024, 64), (2, 8, 2, 1024, 64), (1, 1, 1, 4096, 128)]


@pytest.mark.parametrize("shape", SHAPES, ids=[f"B{b}-H{h}-{k}-N{n}-D{d}" for b, h, k, n, d in SHAPES])
def test_attention(benchmark, shape, dtype, mode, device):
    batch, heads, kv_heads, length, dim = shape
    inputs = [torch.randn(batch, h, length, dim, device=device).to(dtype) for h in (heads, kv_heads, kv_heads)]
    options = {"is_causal": True, "enable_gqa": heads != kv_heads}
    functions = {
        "seqkern": lambda q, k, v: seqkern.scaled_dot_product_attention(q, k, v, **options),
        "torch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options),
        "torch.compile": torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)),
    }
    make = forward_only if mode == "forward" else forward_backward
    calls = {name: make(function, inputs) for name, function in functions.items()}
    size = (batch, heads, length, length, dim, dtype)
    work = cost(*size, kv_heads=kv_heads, causal=True)
    if mode == "forward+backward":
        back = cost(*size, kv_heads=kv_heads, causal=True, backward=True)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    case = attention_case(min(length, 512), batch=batch, heads=heads, kv_heads=kv_heads, head_dim=dim)
    compete(
        benchmark,
        Contest(
            op="attention",
            shape=f"B{batch} H{heads}/{kv_heads} N{length} D{dim}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=calls.pop("seqkern"),
            peers=calls,
            gate=lambda: check_case(case, dtype, device=device),
            cost=work,
        ),
    )
