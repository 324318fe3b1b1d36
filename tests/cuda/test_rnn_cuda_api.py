"""What users call, with the scans in CUDA C++: the same results as the CPU kernels, from whatever tensors people have.

The kernels themselves are held against the reference in test_rnn_cuda.py. In the host executor a process of its own
(this file, run) does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import seqkern
from seqkern import nn

MODULES = {
    "LSTM": lambda: nn.LSTM(5, 24, num_layers=2, bidirectional=True, dropout=0.3),
    "LSTM, zoneout": lambda: nn.LSTM(5, 24, zoneout=(0.3, 0.2)),
    "LSTM, recurrent dropout": lambda: nn.LSTM(5, 17, recurrent_dropout=0.4, batch_first=True),
    "LSTM, layer norm": lambda: nn.LSTM(5, 24, layer_norm=True, recompute=True),
    "LSTM, projection": lambda: nn.LSTM(5, 24, proj_size=7),
    "GRU": lambda: nn.GRU(5, 40, bidirectional=True),
    "GRU, zoneout": lambda: nn.GRU(5, 24, zoneout=0.3),
    "RNN": lambda: nn.RNN(5, 24, nonlinearity="relu", bias=False),
}


def step(make: Callable[[], torch.nn.Module], backend: str, training: bool, ragged: bool) -> list[torch.Tensor]:
    """Outputs, states and gradients of a module made and called from the same seed."""
    torch.manual_seed(7)
    module = make().train(training)
    x = torch.randn(4, 4, 5, requires_grad=True)
    with seqkern.use_backend(backend):
        output, state = module(x, lengths=torch.tensor([4, 1, 3, 2])) if ragged else module(x)
        states = list(state) if isinstance(state, tuple) else [state]
        (output.square().sum() + sum(s.sum() for s in states)).backward()
    return [output, *states, x.grad, *(p.grad for p in module.parameters())]


def modules() -> None:
    for name, make in MODULES.items():
        for training in (True, False):
            for ragged in (False, True):
                ours = step(make, "cuda", training, ragged)
                right = step(make, "cpu", training, ragged)
                atol = 1e-4 if "norm" in name else 6e-6  # a norm divides gradients by the spread of the products
                for a, b in zip(ours, right, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def weights(hidden: int, offset: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of an LSTM, all views of one buffer behind `offset` elements, as vector_to_parameters leaves them."""
    shapes = [(4 * hidden, 5), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    flat = torch.randn(offset + sum(torch.Size(s).numel() for s in shapes)).mul(0.2).to(dtype)
    views = []
    for shape in shapes:
        views.append(flat[offset : offset + torch.Size(shape).numel()].view(shape))
        offset += views[-1].numel()
    return views


def any_alignment() -> None:
    """Weights that begin anywhere in memory."""
    for dtype in (torch.float32, torch.bfloat16):
        for hidden in (16, 32):
            for offset in (0, 1, 3):
                w = weights(hidden, offset, dtype)
                x = torch.randn(3, 2, 5).to(dtype)
                with seqkern.use_backend("cuda"):
                    ours = seqkern.lstm(x, None, w)[0]
                    again = seqkern.lstm(x, None, [each.clone() for each in w])[0]
                assert torch.equal(ours, again), (dtype, hidden, offset)


def lengths_out_of_range() -> None:
    """The ops read no lengths back from a device: one beyond the ends must not reach other memory."""
    t, b, h, d = 3, 2, 8, 2
    x, w = torch.randn(d, t, b, 4 * h), torch.randn(d, 4 * h, h) * 0.3
    h0, c0 = torch.randn(d, b, h), torch.randn(d, b, h)
    options = {"resets": None, "recurrent_mask": None, "seed": None, "zoneout_h": 0.0, "zoneout_c": 0.0, "eps": 1e-5}
    for tier in ("block", "cluster", "grid"):
        results = []
        for lengths in ([5, -2], [2**32 + 1, 1 - 2**33], [3, 0]):
            wide = torch.full((t + 4, b, d * h), 7.0)
            output, cells, gates = wide[2 : t + 2], torch.empty(d, t, b, h), torch.empty(d, t, b, 4 * h)
            common: dict[str, Any] = {**options, "lengths": torch.tensor(lengths), "cell": 0}
            states = torch.ops.seqkern_cuda.rnn_scan_fwd(
                x=x, w_hh=w, bias=None, norm=None, h0=h0, c0=c0, output=output, cells=cells, gates=gates,
                products=None, tier=tier, **common,
            )  # fmt: skip
            assert (wide[:2] == 7).all()
            assert (wide[t + 2 :] == 7).all()
            grads = torch.ops.seqkern_cuda.rnn_scan_bwd(
                grad_output=torch.ones(t, b, d * h), grad_h_n=None, grad_c_n=None, grad_cells=None, gates=gates,
                cells=cells, c0=c0, output=output, h0=h0, products=None, w_hh=w, norm=None,
                grad_x=torch.empty(t, b, d * 4 * h), grad_products=torch.empty(d, t, b, 4 * h), norm_sums=None,
                tier=tier, **common,
            )  # fmt: skip
            results.append([output, *states, *grads])
        first, second, right = results
        assert all(map(torch.equal, first, right)), tier
        assert all(map(torch.equal, second, right)), tier


def nothing_to_do() -> None:
    """No units, no steps, no batch: what the CPU kernels give."""
    for steps, batch, hidden in ((3, 2, 0), (0, 2, 8), (3, 0, 8)):
        x, w = torch.randn(steps, batch, 5), weights(hidden, 0)
        results = []
        for backend in ("cuda", "cpu"):
            with seqkern.use_backend(backend):
                output, (h, c) = seqkern.lstm(x, None, w)
            results.append([output, h, c])
        assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*results, strict=True))


def explained() -> None:
    x, h0 = torch.empty(5, 3, 8), torch.empty(1, 3, 16)
    with seqkern.use_backend("cuda"):
        assert seqkern.explain("lstm", x, h0).kernel.startswith("CUDA C++")
        for huge in (20000, 70000, 0):
            choice = seqkern.explain("lstm", x, torch.empty(1, 3, huge))
            assert choice.kernel.startswith("Triton, step by step"), choice
        assert seqkern.explain("gru", x.double(), h0.double()).kernel.startswith("Triton, step by step")


def derivatives() -> None:
    """Double backward and forward mode: as with the CPU kernels."""
    results = []
    for backend in ("cuda", "cpu"):
        torch.manual_seed(3)
        w = [each.requires_grad_() for each in weights(8, 0)]
        x, tangent = torch.randn(3, 2, 5, requires_grad=True), torch.randn(3, 2, 5)

        def run(x: torch.Tensor, w: list[torch.Tensor] = w) -> torch.Tensor:
            return seqkern.lstm(x, None, w)[0]

        with seqkern.use_backend(backend):
            (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
            second = torch.autograd.grad(grad.square().sum(), [x, *w])
            forward = torch.func.jvp(run, (x,), (tangent,))[1]
        results.append([grad, *second, forward])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


CHECKS = (modules, any_alignment, lengths_out_of_range, nothing_to_do, explained, derivatives)


def test_executed(simt: Callable[..., str]) -> None:
    simt(__file__)


def test_needs_the_executor() -> None:
    """Without it, CPU tensors are refused: none of these checks passes by running something else."""
    with seqkern.use_backend("cuda"), pytest.raises(NotImplementedError, match="host executor"):
        seqkern.lstm(torch.zeros(1, 1, 5), None, weights(4, 0))


if __name__ == "__main__":
    for check in CHECKS:
        check()
