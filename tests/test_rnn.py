"""LSTM: every kernel against the float64 oracle, its gradients of every order, and torch's interfaces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seqkern
from seqkern import _library
from seqkern.testing import check_case, lstm_case, lstm_cell_case, poison, verify


def parameters(inputs, hidden, *, cells=1, directions=1, bias=True, dtype=torch.float32, scale=None, **options):
    """The flat list of weights, as torch.nn.LSTM has it."""
    scale = hidden**-0.5 if scale is None else scale
    shapes = []
    for cell in range(cells):
        width = inputs if cell < directions else directions * hidden
        shapes += [(4 * hidden, width), (4 * hidden, hidden), *([(4 * hidden,)] * 2 if bias else [])]
    tensors = [torch.randn(shape, dtype=dtype) * scale for shape in shapes]
    return [t.requires_grad_() for t in tensors] if options.get("requires_grad") else tensors


def sequence(steps, batch, inputs, hidden, *, cells=1, dtype=torch.float32, requires_grad=False):
    """input, h0, c0."""
    shapes = [(steps, batch, inputs), (cells, batch, hidden), (cells, batch, hidden)]
    return [torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes]


def run(x, h, c, *weights, **options):
    output, state = seqkern.lstm(x, (h, c), weights, **options)
    return output, *state


def torch_run(x, h, c, *weights, num_layers=1, bidirectional=False, batch_first=False):
    bias = len(weights) == 4 * num_layers * (2 if bidirectional else 1)
    return torch.lstm(x, (h, c), weights, bias, num_layers, 0.0, False, bidirectional, batch_first)


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- accuracy -----------------------------------------------------------------------------------------------------

# (steps, batch, inputs, hidden): tails of every tile. The last is worked through in several chunks of steps.
SHAPES = [
    (65, 33, 1, 1), (1, 33, 7, 129), (2, 8, 64, 7), (65, 3, 129, 64), (2, 1, 33, 129), (1, 1, 1, 64), (80, 67, 3, 65),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids="x".join.__call__ if False else str)
def test_error_rule(shape, dtype, isa, passes):
    passes(check_case(lstm_case(*shape), dtype))
