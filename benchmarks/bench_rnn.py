"""Recurrent layers against torch.nn: LSTM, GRU and RNN, both directions, ragged sequences, layer-normalised gates.

torch.compile leaves a recurrent layer to eager, so eager is the only peer. Ragged sequences meet torch's packed ones,
and what torch does not have, the layer-normalised LSTM, the additive and the interpolated network, a Python loop over
torch's ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import seqkern
from benchmarks.harness import Contest, Thunk, compete, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.rnn import cost
from seqkern.testing import check_case, rnn_case

# batch, steps, width (input and hidden); then one step, as a model that writes takes it
SHAPES = [(16, 64, 256), (32, 128, 512), (1, 256, 256), (64, 32, 1024)]
STEP_SHAPES = [(1, 1, 256), (1, 1, 1024), (16, 1, 1024)]


def named(shapes: list[tuple[int, int, int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shape", shapes, ids=[f"B{b}-T{t}-H{h}" for b, t, h in shapes])


shapes = named(SHAPES)
LAYERS: dict[str, tuple[type, type]] = {
    "LSTM": (seqkern.nn.LSTM, torch.nn.LSTM),
    "GRU": (seqkern.nn.GRU, torch.nn.GRU),
    "RNN": (seqkern.nn.RNN, torch.nn.RNN),
}

NAMES = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}
NAMES |= {"additive": "additive_rnn", "interpolated": "interpolated_rnn"}


@named(SHAPES + STEP_SHAPES)
@pytest.mark.parametrize("cell", LAYERS)
def test_layer(benchmark, cell, shape, dtype, mode, device):
    batch, steps, hidden = shape
    ours, theirs = pair(cell, hidden, dtype, device)
    input = torch.randn(steps, batch, hidden, device=device).to(dtype)
    contest(benchmark, cell, shape, dtype, mode, device, call(ours, mode, input), call(theirs, mode, input))


@shapes
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_bidirectional(benchmark, cell, shape, dtype, mode, device):
    batch, steps, hidden = shape
    ours, theirs = pair(cell, hidden, dtype, device, bidirectional=True)
    input = torch.randn(steps, batch, hidden, device=device).to(dtype)
    contest(
        benchmark, cell, shape, dtype, mode, device, call(ours, mode, input), call(theirs, mode, input),
        bidirectional=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if s[0] > 1], ids=[f"B{b}-T{t}-H{h}" for b, t, h in SHAPES if b > 1]
)
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_ragged(benchmark, cell, shape, dtype, mode, device):
    """Three quarters of the tokens, the longest sequence of full length; torch gets them packed beforehand."""
    batch, steps, hidden = shape
    ours, theirs = pair(cell, hidden, dtype, device)
    input = torch.randn(steps, batch, hidden, device=device).to(dtype)
    lengths = torch.linspace(steps // 2, steps, batch).round().long()[torch.randperm(batch)]
    packed = pack_padded_sequence(input, lengths, enforce_sorted=False)
    contest(
        benchmark, cell, shape, dtype, mode, device,
        call(ours, mode, input, lengths=lengths.to(device)), call(theirs, mode, packed),
        tokens=int(lengths.sum()), ragged=True,
    )  # fmt: skip


@shapes
def test_layer_normalised(benchmark, shape, dtype, mode, device):
    batch, steps, hidden = shape
    ours = seqkern.nn.LSTM(hidden, hidden, layer_norm=True, device=device, dtype=dtype)
    theirs = LoopedLayerNormLSTM(hidden).to(device, dtype)
    input = torch.randn(steps, batch, hidden, device=device).to(dtype)
    contest(
        benchmark, "LSTM", shape, dtype, mode, device, call(ours, mode, input), call(theirs, mode, input),
        layer_norm=True,
    )  # fmt: skip


class LoopedLayerNormLSTM(torch.nn.Module):
    """Ba, Kiros and Hinton's cell step by step, as it is written with torch's ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w_ih = torch.nn.Linear(width, 4 * width, bias=False)
        self.w_hh = torch.nn.Linear(width, 4 * width)
        self.norm_ih, self.norm_hh = torch.nn.LayerNorm(4 * width), torch.nn.LayerNorm(4 * width)
        self.norm_c = torch.nn.LayerNorm(width)

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        h = c = input.new_zeros(input.shape[1:])
        outputs = []
        for x in self.norm_ih(self.w_ih(input)):
            gates = x + self.norm_hh(F.linear(h, self.w_hh.weight)) + self.w_hh.bias
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * self.norm_c(c).tanh()
            outputs.append(h)
        return torch.stack(outputs), None


@shapes
@pytest.mark.parametrize("cell", ["additive", "interpolated"])
def test_between_networks(benchmark, cell, shape, dtype, mode, device):
    batch, steps, hidden = shape
    ours = (seqkern.nn.AdditiveRNN if cell == "additive" else seqkern.nn.InterpolatedRNN)(
        hidden, hidden, device=device, dtype=dtype
    )
    theirs = Looped(hidden, cell).to(device, dtype)
    input = torch.randn(steps, batch, hidden, device=device).to(dtype)
    contest(
        benchmark, cell, shape, dtype, mode, device, call(ours, mode, input), call(theirs, mode, input), looped=True
    )


class Looped(torch.nn.Module):
    """The additive or the interpolated network step by step, the input's product once."""

    def __init__(self, width: int, cell: str) -> None:
        super().__init__()
        self.gates = 1 if cell == "additive" else 2
        self.w_ih = torch.nn.Linear(width, self.gates * width)
        self.w_hh = torch.nn.Linear(width, self.gates * width)

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        h = input.new_zeros(input.shape[1:])
        outputs = []
        for x in self.w_ih(input):
            gates = x + self.w_hh(h)
            if self.gates == 1:
                h = h + gates.tanh()
            else:
                f, u = gates.chunk(2, -1)
                h = torch.lerp(u.tanh(), h, f.sigmoid())
            outputs.append(h)
        return torch.stack(outputs), None


def pair(cell: str, hidden: int, dtype: torch.dtype, device: str, **options: Any) -> tuple[Any, Any]:
    """A layer of each kind with the same weights."""
    ours, theirs = (layer(hidden, hidden, device=device, dtype=dtype, **options) for layer in LAYERS[cell])
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def call(module: torch.nn.Module, mode: str, input: Any, **options: Any) -> Thunk:
    """The forward pass, or that and the gradients of the input and of every weight."""

    def outputs(x: Any) -> Tensor:
        result = module(x, **options)[0]
        return result if isinstance(result, Tensor) else result.data

    if mode == "forward":
        return forward_only(outputs, [input])
    leaf = (input if isinstance(input, Tensor) else input.data).clone().requires_grad_()
    x = leaf if isinstance(input, Tensor) else input._replace(data=leaf)
    with torch.no_grad():
        cotangent = torch.randn_like(outputs(x))
    wanted = [leaf, *module.parameters()]
    return lambda: torch.autograd.grad(outputs(x), wanted, cotangent)


def contest(
    benchmark: Any,
    cell: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    mode: str,
    device: str,
    ours: Thunk,
    theirs: Thunk,
    *,
    tokens: int | None = None,
    bidirectional: bool = False,
    ragged: bool = False,
    layer_norm: bool = False,
    looped: bool = False,
) -> None:
    batch, steps, hidden = shape
    directions, rows = (2 if bidirectional else 1), tokens or batch * steps
    work = cost(rows, 1, hidden, hidden, dtype, cell=NAMES[cell], training=mode != "forward")
    if mode != "forward":
        back = cost(rows, 1, hidden, hidden, dtype, cell=NAMES[cell], backward=True)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    kind = " both directions" * bidirectional + " ragged" * ragged + " layer norm" * layer_norm
    steps_checked = min(steps, 32)
    lengths = torch.linspace(steps_checked // 2, steps_checked, batch).long().tolist() if ragged else None
    case = rnn_case(
        NAMES[cell], steps_checked, batch, hidden, hidden,
        bidirectional=bidirectional, lengths=lengths, norms=layer_norm,
    )  # fmt: skip
    name = "torch loop" if layer_norm or looped else "torch packed" if ragged else "torch"
    compete(
        benchmark,
        Contest(
            op=cell + kind,
            shape=f"B{batch} T{steps} H{hidden}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=ours,
            peers=dict([runnable(name, theirs)]),
            gate=lambda: check_case(case, dtype, device=device),
            cost=Cost(directions * work.flops, directions * work.bytes),
        ),
    )
    benchmark.extra_info["microseconds_per_step"] = benchmark.extra_info["milliseconds"] * 1e3 / steps


def runnable(name: str, peer: Thunk) -> tuple[str, Callable[[], Any]]:
    """torch's LSTM in bfloat16 needs oneDNN kernels that some processors have not: there it runs without oneDNN."""
    try:
        peer()
    except RuntimeError as error:
        if "primitive" not in str(error):
            raise
    else:
        return name, peer

    def without() -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return peer()

    return f"{name}, oneDNN off", without
