"""Cells of LSTM, GRU and RNN, a step at a time: against the float64 oracle, at extremes, in every transform."""

from __future__ import annotations

import functools

import pytest
import torch
from test_rnn import leaves_of, parameters, run_cell, sequence, states_of

import seqkern
from seqkern.ops.rnn import CELLS as ALL_CELLS
from seqkern.ops.rnn import GATES, RNN_RELU
from seqkern.testing import check_case, rnn_cell_case, verify

CELL_SHAPES = [(3, 129, 7), (33, 17, 65)]

CELLS = {name: cell for name, cell in ALL_CELLS.items() if cell <= RNN_RELU}  # those with an op of a single step


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


@pytest.mark.parametrize("shape", CELL_SHAPES, ids=str)
def test_error_rule(cell, shape, dtype, isa, passes):
    passes(check_case(rnn_cell_case(cell, *shape), dtype))


@pytest.mark.parametrize("cell", [c for c in CELLS if c != "rnn_relu"])
def test_saturated_gates(cell, dtype, isa, passes):
    passes(check_case(rnn_cell_case(cell, 33, 5, 19, std=30.0), dtype))


@pytest.mark.parametrize("value", [1e4, -1e4, 1e30, float("inf"), -float("inf")])
def test_extreme_gates(cell, value, isa):
    kind, groups = CELLS[cell], GATES[CELLS[cell]]
    for dtype in (torch.float64, torch.float32):
        gates, state = torch.full((2, groups * 17), value, dtype=dtype), torch.ones(2, 17, dtype=dtype)
        zeros, c = torch.zeros_like(gates), state if cell == "lstm" else None
        h_new, c_new, activated = torch.ops.seqkern.rnn_cell_fwd(gates, zeros, state, c, kind)
        open_, sign = (1.0, 1.0) if value > 0 else (0.0, -1.0)
        expected = {
            "lstm": [open_, open_, sign, open_], "gru": [open_, open_, sign, 0.0], "rnn_tanh": [sign],
            "rnn_relu": [max(value, 0.0)],
        }[cell]  # fmt: skip
        expected = torch.tensor(expected, dtype=dtype).repeat_interleave(17).expand(2, -1)
        tiny = torch.finfo(dtype).tiny
        torch.testing.assert_close(activated, expected, rtol=0, atol=4 * tiny)
        if cell == "lstm":
            assert (c_new - (1 + sign) * open_).abs().max() <= 8 * tiny
        if cell == "gru":
            assert (h_new - (1 if value > 0 else -1)).abs().max() <= 8 * tiny  # z h = 1, or n = -1
        grads = torch.ops.seqkern.rnn_cell_bwd(
            state, state if cell == "lstm" else None, state, c, c_new if cell == "lstm" else None, activated, kind
        )
        assert all(g.isfinite().all() for g in grads)
        if cell != "rnn_relu":
            assert grads[0].abs().max() <= 4 * tiny


def test_gradcheck(cell):
    tensors = leaves_of(cell, 1, 2, 2, 3)
    n = 1 + states_of(cell)
    leaves = [t.detach()[0].requires_grad_() for t in tensors[:n]] + tensors[n:]
    function = functools.partial(run_cell, cell)
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True)


def test_functional_transforms(cell):
    n = states_of(cell)
    tensors = [torch.randn(4, *t.shape[1:], dtype=torch.float64) for t in sequence(cell, 1, 2, 3, 5)]
    weights = parameters(cell, 3, 5, dtype=torch.float64)

    def loss(*tensors):
        return sum(t.square().sum() for t in run_cell(cell, *tensors)).sin()

    for f in (loss, torch.func.grad(loss, argnums=(0, n, n + 1))):
        mapped = torch.func.vmap(f, in_dims=(*[0] * (n + 1), *[None] * 4))(*tensors, *weights)
        each = [f(*(t[i] for t in tensors), *weights) for i in range(4)]
        columns = zip(*each, strict=True) if isinstance(each[0], tuple) else [each]
        stacked = tuple(torch.stack(list(column)) for column in columns)
        torch.testing.assert_close(mapped if isinstance(mapped, tuple) else (mapped,), stacked)


def test_compiled_training(cell):
    """The compiler gives a gradient to every result, even to the cell state that only an LSTM has."""
    tensors = [t[0] for t in sequence(cell, 1, 2, 3, 5)]
    weights = parameters(cell, 3, 5)

    def gradients(function):
        leaves = [t.detach().float().requires_grad_() for t in (*tensors, *weights)]
        return torch.autograd.grad(sum(t.square().sum() for t in function(*leaves)), leaves)

    function = functools.partial(run_cell, cell)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(function))


@pytest.mark.parametrize("state", [True, False])
def test_modules_take_replaced_weights(state):
    """As torch's, whatever input_size says: by the fast path and without it."""
    module, theirs = seqkern.nn.GRUCell(5, 4), torch.nn.GRUCell(10, 4)
    module.weight_ih = torch.nn.Parameter(torch.randn(12, 10))
    theirs.load_state_dict(module.state_dict())
    arguments = (torch.randn(3, 10), torch.randn(3, 4)) if state else (torch.randn(3, 10),)
    torch.testing.assert_close(module(*arguments), theirs(*arguments))
    with pytest.raises(ValueError, match="input_size = 10"):
        module(torch.randn(3, 5), *arguments[1:])


def test_no_samples(cell):
    tensors = [torch.randn(0, 3, 4), *[torch.randn(0, 3, 7)] * states_of(cell)]
    weights = parameters(cell)
    assert torch.func.vmap(lambda *t: run_cell(cell, *t, *weights)[0])(*tensors).shape == (0, 3, 7)


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_backends_agree(cell, backend, dtype, passes):
    passes(verify(f"{cell}_cell", dtype, backend=backend))


def test_interpreted_triton(interpreted):
    interpreted(
        "-c",
        """
import torch
import seqkern
from seqkern.testing import check_case, poison, rnn_cell_case
cases = [rnn_cell_case(cell, 9, 5, 33) for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
with poison(), seqkern.use_backend("triton"):
    for dtype, some in ((torch.float32, cases), (torch.float16, cases[1::2])):
        for case in some:
            reports = check_case(case, dtype)
            assert reports and all(report.passed for report in reports), (dtype, list(map(str, reports)))
""",
    )


@pytest.mark.parametrize("reset_after", [True, False])
def test_the_two_conventions_of_the_gru(reset_after):
    """torch's, after the product, and Cho et al.'s, before it."""
    x, h, w_ih, w_hh, b_ih, b_hh = sequence("gru")[0][0], torch.randn(3, 7), *parameters("gru")
    ours = seqkern.reference.gru_cell(x, h, w_ih, w_hh, b_ih, b_hh, reset_after=reset_after)
    if reset_after:
        expected = torch.gru_cell(x, h, w_ih, w_hh, b_ih, b_hh)
    else:
        r, z, n = (x @ w.t() + b for w, b in zip(w_ih.chunk(3), b_ih.chunk(3), strict=True))
        (u_r, u_z, u_n), (b_r, b_z, b_n) = w_hh.chunk(3), b_hh.chunk(3)
        r, z = torch.sigmoid(r + h @ u_r.t() + b_r), torch.sigmoid(z + h @ u_z.t() + b_z)
        expected = (1 - z) * torch.tanh(n + (r * h) @ u_n.t() + b_n) + z * h
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("number", [-1, 4, 5, 6])
def test_the_op_refuses_cells_of_layers_alone(number):
    x, h = torch.zeros(2, 6), torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match="rnn_cell_fwd: cell must"):
        torch.ops.seqkern.rnn_cell_fwd(x, x, h, None, number)
    with pytest.raises(RuntimeError, match="rnn_cell_bwd: cell must"):
        torch.ops.seqkern.rnn_cell_bwd(h, None, h, None, None, x, number)
