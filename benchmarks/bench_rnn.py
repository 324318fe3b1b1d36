"""The LSTM layer against torch.nn.LSTM. torch.compile leaves an LSTM to eager, so eager is the only peer."""

from __future__ import annotations

import pytest
import torch

import seqkern
from benchmarks.harness import Contest, compete, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.rnn import cost
from seqkern.testing import check_case, lstm_case

# batch, steps, width (input and hidden)
SHAPES = [(1, 128, 256), (16, 64, 256), (32, 128, 256), (32, 64, 512)]


@pytest.mark.parametrize("shape", SHAPES, ids=[f"B{b}-T{t}-H{h}" for b, t, h in SHAPES])
def test_lstm(benchmark, shape, dtype, mode, device):
    batch, steps, hidden = shape
    theirs = torch.nn.LSTM(hidden, hidden, device=device, dtype=dtype)
    ours = seqkern.nn.LSTM(hidden, hidden, device=device, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    input = torch.randn(steps, batch, hidden, device=device).to(dtype)
    make = forward_only if mode == "forward" else _training_step
    calls = {"seqkern": make(ours, [input]), "torch": make(theirs, [input])}
    work = cost(steps, batch, hidden, hidden, dtype, training=mode != "forward")
    if mode == "forward+backward":
        back = cost(steps, batch, hidden, hidden, dtype, backward=True)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    case = lstm_case(min(steps, 32), batch, hidden, hidden)
    compete(
        benchmark,
        Contest(
            op="lstm",
            shape=f"B{batch} T{steps} H{hidden}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=calls.pop("seqkern"),
            peers=calls,
            gate=lambda: check_case(case, dtype, device=device),
            cost=work,
        ),
    )


def _training_step(module, inputs):
    """Forward, and the gradients of the input and of every weight."""
    input = inputs[0].clone().requires_grad_()
    with torch.no_grad():
        cotangent = torch.randn_like(module(input)[0])
    return lambda: torch.autograd.grad(module(input)[0], [input, *module.parameters()], cotangent)
