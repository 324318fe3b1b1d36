"""Recurrent layers in a CUDA graph: what came as a list or a number is held by the graph."""

from __future__ import annotations

import pytest
import torch

import seqkern
from seqkern.ops._rnn_checks import numbers_on


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[7, 7, 0, 2, 2], torch.tensor([3, 2, 2, 1, 1])], ids=repr)
def test_gpu_graph_holds_lengths_and_seed(lengths):
    shapes = (28, 4), (28, 7), (28,), (28,)
    weights = [0.4 * torch.randn(shape, device="cuda") for shape in shapes]
    x = torch.randn(7, 5, 4, device="cuda")

    def call():
        return seqkern.lstm(x, None, weights, lengths=lengths, zoneout=0.3, training=True, seed=2**40 + 7)[0]

    expected = call()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
    numbers_on(x.device, [9, 9, 9, 9, 9])  # what is pinned next may be where the lengths were
    found.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
