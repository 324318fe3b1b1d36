"""Attention in CUDA C++ on a GPU: the checks of test_attention_cuda.py, all lengths, repeats, graphs, torch.compile.

On compute capability 9.0 with both kinds of kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_attention_cuda as executed
import torch
from torch import Tensor

import seqkern
from seqkern import _attention_cuda

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def on_path(path: str) -> Iterator[None]:
    if path == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels are for 9.0")
    with seqkern.use_backend("cuda"), _attention_cuda.use_path(path):
        yield


def long(device: str = "cuda", dim: int = 128, **options: Any) -> Callable[[], list[Tensor]]:
    """A call that fills a GPU; its results from one run to the next."""
    inputs = [torch.randn(2, h, 2048, dim, device=device, dtype=torch.bfloat16) for h in (8, 2, 2)]
    leaves = [t.requires_grad_() for t in inputs]
    grad = torch.randn(2, 8, 2048, dim, device=device, dtype=torch.bfloat16)

    def call() -> list[Tensor]:
        out, lse = seqkern.attention(*leaves, causal=True, return_lse=True, **options)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]

    return call


@pytest.mark.parametrize("check", executed.CHECKS)
def test_check(check: str) -> None:
    executed.CHECKS[check]("cuda")


@pytest.mark.parametrize("path", ["mma", "hopper"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_lengths(dim: int, path: str) -> None:
    with on_path(path):
        executed.lengths_list("cuda", executed.LENGTHS, dim)


@pytest.mark.parametrize("path", ["mma", "hopper"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("repeats", [50, 1000])
def test_same_bits_every_run(repeats: int, dim: int, path: str) -> None:
    """50 calls one after the other, bit for bit; 1,000 with another kernel beside them, as races need company."""
    with on_path(path):
        call = long(dim=dim)
        first = call()
        side, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(repeats):
            if repeats > 50:
                with torch.cuda.stream(side):
                    noise @ noise
            wrong += sum((a != b).sum() for a, b in zip(first, call(), strict=True))
        assert wrong.item() == 0


@pytest.mark.parametrize("path", ["mma", "hopper"])
def test_graph(path: str) -> None:
    """Captured once, replayed with other numbers in the same memory."""
    with on_path(path), torch.no_grad():
        inputs = [torch.randn(2, h, 300, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2)]
        lengths = torch.tensor([300, 17], dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        seqkern.attention(*inputs, key_lengths=lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = seqkern.attention(*inputs, key_lengths=lengths)
        for t in inputs:
            t.normal_()
        lengths.copy_(torch.tensor([5, 300]))
        graph.replay()
        assert torch.equal(out, seqkern.attention(*inputs, key_lengths=lengths))


@pytest.mark.parametrize("path", ["mma", "hopper"])
def test_compile(path: str) -> None:
    inputs = [torch.randn(2, h, 130, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return seqkern.attention(q * 2, k, v, causal=True).float().square().sum()

    with on_path(path):
        results = [torch.autograd.grad(f(*inputs), inputs) for f in (torch.compile(function, fullgraph=True), function)]
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)


def test_opcheck() -> None:
    q, k, v = executed.qkv(5, 6, "cuda")
    numbers = (5, 6, 1, False, -1, 0, 0.5, 0.0, 0.0)
    with seqkern.use_backend("cuda"):
        torch.library.opcheck(torch.ops.seqkern.attention_fwd.default, (q, k, v, *[None] * 7, *numbers))
        out, lse = torch.ops.seqkern.attention_fwd(q, k, v, *[None] * 7, *numbers)
        arguments = (out, None, q, k, v, out, lse, *[None] * 6, *numbers, False, False)
        torch.library.opcheck(torch.ops.seqkern.attention_bwd.default, arguments)
