"""LSTM, GRU and RNN: every kernel against the float64 oracle, its gradients of every order, shapes and determinism."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seqkern
from seqkern.ops.rnn import CELLS, GATES, cost
from seqkern.testing import check_case, poison, rnn_case, verify


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def states_of(cell):
    return 2 if cell == "lstm" else 1


def sequence(cell, steps=5, batch=3, inputs=4, hidden=7, *, runs=1, dtype=torch.float32):
    """input, h0 and, of an LSTM, c0."""
    shapes = [(steps, batch, inputs), *[(runs, batch, hidden)] * states_of(cell)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def parameters(cell, inputs=4, hidden=7, *, layers=1, directions=1, bias=True, dtype=torch.float32):
    """The flat list of weights, as torch's modules have it."""
    gates, shapes = GATES[CELLS[cell]] * hidden, []
    for run in range(layers * directions):
        width = inputs if run < directions else directions * hidden
        shapes += [(gates, width), (gates, hidden), *([(gates,)] * 2 if bias else [])]
    return [torch.randn(shape, dtype=dtype) * hidden**-0.5 for shape in shapes]


def split(cell, tensors):
    """input, hx, weights."""
    n = states_of(cell)
    x, *states = tensors[: 1 + n]
    return x, tuple(states) if n == 2 else states[0], list(tensors[1 + n :])


def run(cell, *tensors, **options):
    output, state, *cells = getattr(seqkern, cell)(*split(cell, tensors), **options)
    return output, *(state if cell == "lstm" else (state,)), *cells


def torch_run(cell, *tensors, num_layers=1, bidirectional=False, batch_first=False):
    if not hasattr(torch, cell):  # torch has no such network: the equations
        with seqkern.use_backend("reference"):
            return run(cell, *tensors, num_layers=num_layers, bidirectional=bidirectional, batch_first=batch_first)
    x, hx, weights = split(cell, tensors)
    bias = len(weights) == 4 * num_layers * (2 if bidirectional else 1)
    return getattr(torch, cell)(x, hx, weights, bias, num_layers, 0.0, False, bidirectional, batch_first)


def run_cell(cell, *tensors):
    if not hasattr(seqkern, f"{cell}_cell"):  # a layer of one step
        x, h, *weights = tensors
        return (run(cell, x[None], h[None], *weights)[1][0],)
    state = getattr(seqkern, f"{cell}_cell")(*split(cell, tensors)[:2], *split(cell, tensors)[2])
    return state if cell == "lstm" else (state,)


def everything(cell, tensors, function=run, grads=None, **options):
    """Results, and the gradients of all arguments."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    results = function(cell, *leaves, **options)
    cotangents = [torch.cos(3 * r.detach()) for r in results] if grads is None else grads
    return [*(r.detach() for r in results), *torch.autograd.grad(results, leaves, cotangents)]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- accuracy -----------------------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# steps, batch, inputs, hidden: the tails of every tile. The last two take several chunks of steps.
SHAPES = [
    (2, 130, 3, 1), (65, 33, 1, 1), (2, 8, 64, 7), (1, 33, 7, 129), (2, 1, 129, 64), (65, 8, 3, 64), (65, 3, 129, 65),
    (70, 65, 5, 40),
]  # fmt: skip


# In float64 torch rounds one unit just as the oracle does; any shape is tested below.
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SHAPES for dtype in DTYPES if dtype != torch.float64 or shape[3] > 1],
    ids=lambda v: " x ".join(map(str, v)) if isinstance(v, tuple) else str(v),
)
def test_error_rule(cell, shape, dtype, isa, passes):
    passes(check_case(rnn_case(cell, *shape), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [1024, 2999, 3000])
def test_wide_inputs(inputs, dtype, isa, passes):
    """Several blocks of tokens: rows a multiple of 4 KB apart, and an odd width, are copied; others read in place."""
    passes(check_case(rnn_case("lstm", 5, 40, inputs, 17), dtype))


# Biases keep relu from its bend, where 16 bits decide otherwise than the oracle.
@pytest.mark.parametrize(
    ("cell", "bias", "dtype"),
    [(c, b, d) for c in CELLS for b in (True, False) for d in DTYPES if b or c != "rnn_relu" or d.itemsize > 2],
    ids=str,
)
@pytest.mark.parametrize(("num_layers", "bidirectional"), [(3, False), (2, True)])
def test_layers_and_directions(cell, num_layers, bidirectional, bias, dtype, passes):
    case = rnn_case(cell, 17, 9, 12, 20, num_layers=num_layers, bidirectional=bidirectional, bias=bias)
    passes(check_case(case, dtype))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_both_directions_of_wide_layers(cell, bidirectional, dtype, isa, passes):
    case = rnn_case(cell, 20, 33, 9, 70, bidirectional=bidirectional, recompute=True)
    passes(check_case(case, dtype))


@pytest.mark.parametrize("shape", [(17, 9, 12, 20, 7), (5, 33, 3, 129, 64), (3, 1, 5, 17, 1)], ids=str)
def test_projection(shape, dtype, isa, passes):
    *sizes, width = shape
    passes(check_case(rnn_case("lstm", *sizes, projection=width, num_layers=2, bidirectional=True), dtype))


RAGGED = {
    "batch 1": (9, [4]), "batch 3": (65, [65, 1, 30]), "batch 8": (17, [1, 17, 16, 2, 17, 9, 1, 8]),
    "batch 33": (9, [1 + 5 * b % 9 for b in range(33)]),
    # Its rows lie equally far apart, but for the last; computed again, it is a large product all the same.
    "last row alone": (3, [3, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", RAGGED)
def test_ragged(cell, name, dtype, isa, passes):
    steps, lengths = RAGGED[name]
    options = {"num_layers": 2, "bidirectional": True, "recompute": steps < 9}
    hidden = 7 if steps > 9 else 65
    passes(check_case(rnn_case(cell, steps, len(lengths), 5, hidden, lengths=lengths, **options), dtype))


GRID = [(t, b, h) for b in (1, 3, 8, 33) for t in (1, 2, 65, 257) for h in (1, 7, 64, 129, 256)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "dtype"),
    [(at, d) for at, (t, b, h) in enumerate(GRID) for d in DTYPES if d != torch.float64 or (h > 1 and t * b >= 8)],
    ids=lambda v: "T{} B{} H{}".format(*GRID[v]) if isinstance(v, int) else str(v),
)
def test_grid(cell, at, dtype, passes):
    """Layers, directions and lengths go round the grid; not of one unit or few steps in float64, as above."""
    steps, batch, hidden = GRID[at]
    ragged = [(steps, 1, steps // 2 + 1, steps)[b % 4] for b in range(batch)] if at % 4 == 3 else None
    case = rnn_case(
        cell, steps, batch, (3, 64, 17)[at % 3], hidden, num_layers=1 + at // 2 % 3, bidirectional=at % 2 == 1,
        lengths=ragged, recompute=at % 5 == 0,
    )  # fmt: skip
    passes(check_case(case, dtype))


@pytest.mark.parametrize("cell", [c for c in CELLS if c != "rnn_relu"])
def test_saturated_gates(cell, dtype, isa, passes):
    passes(check_case(rnn_case(cell, 9, 8, 5, 19, std=30.0), dtype))


def test_far_saturated_sequence_is_finite(cell, dtype, isa):
    tensors = sequence(cell, 9, 8, 5, 19, dtype=dtype) + parameters(cell, 5, 19, dtype=dtype)
    tensors[0] *= 100 if (cell, dtype) == ("rnn_relu", torch.float16) else 1e4
    results = everything(cell, tensors, recompute=True) if cell != "rnn_relu" else everything(cell, tensors)
    assert all(t.isfinite().all() for t in results)
    start = tensors[1].abs().max()
    bound = {"rnn_relu": float("inf"), "additive_rnn": start + 9}.get(cell, max(1, start))
    assert results[0].abs().max() <= bound


def test_bad_numbers_stay_in_their_sequence(cell, isa):
    x, *states = sequence(cell, 6, 9, 4, 33)
    weights = parameters(cell, 4, 33)
    clean = run(cell, x, *states, *weights)
    x[2, 3, 1], x[4, 5, 0] = float("nan"), float("inf")
    results = run(cell, x, *states, *weights)
    others = [0, 1, 2, 4, 6, 7, 8]
    if cell != "rnn_relu":  # relu of a NaN: a NaN, too
        assert results[0][2:, 3].isnan().all()
    assert results[0][2:, 3].isnan().any()
    assert equal([results[0][:2, 3], results[0][:4, 5]], [clean[0][:2, 3], clean[0][:4, 5]])
    assert equal([t[:, others] for t in results], [t[:, others] for t in clean])


@pytest.mark.parametrize("c", [1e14, 1e30])
def test_a_saturated_cell_passes_no_gradient(c, isa):
    """tanh'(c) is 0 there; any rest of it would be multiplied by c on its way to the forget gate."""
    weights = [p.detach().requires_grad_() for p in torch.nn.LSTM(3, 5).parameters()]
    state = (torch.zeros(1, 2, 5), torch.full((1, 2, 5), c))
    output, _ = seqkern.lstm(torch.randn(3, 2, 3), state, weights)
    (bias,) = torch.autograd.grad(output.sum(), weights[2:3])
    assert torch.equal(bias[5:10], torch.zeros(5))


def test_interpreted_triton(interpreted):
    interpreted(
        "-c",
        """
import torch
import seqkern
from seqkern.testing import check_case, rnn_case, poison
cases = []
for cell in ("lstm", "gru"):
    cases += [rnn_case(cell, 3, 4, 5, 17), rnn_case(cell, 2, 6, 8, 9, bidirectional=True, bias=False)]
with poison(), seqkern.use_backend("triton"):
    for dtype, some in ((torch.float32, cases), (torch.float16, cases[::2])):
        for case in some:
            reports = check_case(case, dtype)
            assert reports and all(report.passed for report in reports), (dtype, list(map(str, reports)))
""",
    )


# ---- which gradients ----------------------------------------------------------------------------------------------


RESULTS = {"output": (0,), "h": (1,), "c": (2,), "output and c": (0, 2), "h and c": (1, 2)}


@pytest.mark.parametrize(("cell", "name"), [(c, n) for c in CELLS for n in RESULTS if c == "lstm" or "c" not in n])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradient_of_some_results(cell, name, bidirectional):
    wanted = RESULTS[name]
    runs = 2 if bidirectional else 1
    options = {"runs": runs, "dtype": torch.float64}
    tensors = sequence(cell, **options) + parameters(cell, directions=runs, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in tensors]
    ours, theirs = (
        torch.autograd.grad(
            sum(f(cell, *leaves, bidirectional=bidirectional)[i].sin().sum() for i in wanted), leaves, allow_unused=True
        )
        for f in (run, torch_run)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (5,), (0, 5)], ids=str)
def test_gradients_only_for_what_needs_them(cell, wanted):
    tensors = sequence(cell, dtype=torch.float64) + parameters(cell, dtype=torch.float64)
    leaves = [tensors[i].requires_grad_() for i in wanted]
    ours, theirs = (torch.autograd.grad(f(cell, *tensors)[0].square().sum(), leaves) for f in (run, torch_run))
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_weights_are_summed_in_float32(isa):
    """Over many chunks of steps, and rounded once: each of 3000 tokens adds one."""
    x = torch.ones(1000, 3, 2, dtype=torch.bfloat16)
    weights = [torch.full((5, 2), 0.5), torch.zeros(5, 5), torch.zeros(5), torch.zeros(5)]
    weights = [w.bfloat16().requires_grad_() for w in weights]
    output, _ = seqkern.rnn_relu(x, None, weights)
    grad_w_ih, grad_b_ih = torch.autograd.grad(output, (weights[0], weights[2]), torch.ones_like(output))
    expected = torch.tensor(3000.0).bfloat16()
    assert (grad_w_ih == expected).all()
    assert (grad_b_ih == expected).all()


def test_weights_have_gradients_of_their_own():
    model = seqkern.nn.LSTM(4, 7, bidirectional=True)
    model(sequence("lstm")[0])[0].sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.bias_ih_l0.grad.zero_()
    for name, p in model.named_parameters():
        assert name == "bias_ih_l0" or torch.equal(p.grad, before[name])


# ---- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "batch"), [(0, 3), (5, 0), (0, 0)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_empty(cell, steps, batch, bidirectional, isa):
    runs, n = 2 if bidirectional else 1, states_of(cell)
    tensors = sequence(cell, steps, batch, runs=runs) + parameters(cell, directions=runs)
    ones = [torch.ones(s) for s in ((steps, batch, 7 * runs), *[(runs, batch, 7)] * n)]
    results = everything(cell, tensors, grads=ones, bidirectional=bidirectional)
    (output, *states), grads = results[: n + 1], results[n + 1 :]
    assert output.shape == (steps, batch, 7 * runs)
    assert equal(states, tensors[1 : n + 1])
    assert [g.shape for g in grads] == [t.shape for t in tensors]
    assert equal(grads[1 : n + 1], ones[1:])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in (grads[0], *grads[n + 1 :]))


def test_no_inputs_and_cells_without_a_batch(cell, isa):
    output = everything(cell, sequence(cell, 5, 3, 0) + parameters(cell, 0))[0]
    assert output.isfinite().all()
    n = states_of(cell)
    states = [torch.randn(0, 7)] * n
    results = everything(cell, [torch.randn(0, 4), *states, *parameters(cell)], run_cell)
    assert [t.shape for t in results[:n]] == [(0, 7)] * n


LAYOUTS = {
    "batch first": lambda *shape: torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1),
    "strided": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "transposed": lambda *shape: torch.randn(*shape[:-2], shape[-1], shape[-2]).mT,
    "expanded": lambda *shape: torch.randn(*shape[:-2], 1, 1).expand(shape),
    "offset": lambda *shape: torch.randn(*shape[:-1], shape[-1] + 1)[..., 1:],
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(cell, make, isa):
    gates, n = GATES[CELLS[cell]] * 17, states_of(cell)
    states = [make(1, 5, 17) for _ in range(n)]
    tensors = [make(6, 5, 9), *states, make(gates, 9), make(gates, 17), *torch.randn(2, 2 * gates)[:, ::2]]
    grads = [make(6, 5, 17), *(make(1, 5, 17) for _ in range(n))]
    dense = [t.contiguous() for t in tensors]
    ours = everything(cell, tensors, grads=grads)
    assert equal(ours, everything(cell, dense, grads=[g.contiguous() for g in grads]))
    one, dense_one = ([t[0] for t in ts[: n + 1]] + ts[n + 1 :] for ts in (tensors, dense))
    ours, dense_ones = everything(cell, one, run_cell), everything(cell, dense_one, run_cell)
    torch.testing.assert_close(ours, dense_ones, atol=2.5e-5, rtol=1e-6)  # torch's products have other bits there


@given(
    cell=st.sampled_from(list(CELLS)),
    steps=st.integers(0, 5),
    batch=st.integers(0, 8),
    inputs=st.integers(1, 9),
    hidden=st.integers(1, 18),
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_any_shape_means_what_torch_means(cell, steps, batch, inputs, hidden, layers, bidirectional, batch_first, bias):
    directions = 2 if bidirectional else 1
    x, *states = sequence(cell, steps, batch, inputs, hidden, runs=layers * directions, dtype=torch.float64)
    weights = parameters(cell, inputs, hidden, layers=layers, directions=directions, bias=bias, dtype=torch.float64)
    options = {"num_layers": layers, "bidirectional": bidirectional, "batch_first": batch_first}
    tensors = [x.transpose(0, 1) if batch_first else x, *states, *weights]
    if steps and batch:
        torch.testing.assert_close(
            everything(cell, tensors, **options), everything(cell, tensors, torch_run, **options)
        )
    else:  # torch refuses an empty sequence
        assert run(cell, *tensors, **options)[0].shape == (*tensors[0].shape[:2], directions * hidden)


def test_state_is_zero_without_one(cell):
    x, *states = sequence(cell)
    weights = parameters(cell)
    output, state = getattr(seqkern, cell)(x, None, weights)
    zeros = run(cell, x, *(torch.zeros_like(t) for t in states), *weights)
    assert equal(zeros, [output, *(state if cell == "lstm" else [state])])


# ---- determinism --------------------------------------------------------------------------------------------------


def same_bits_on_threads(counts, call):
    threads = torch.get_num_threads()
    try:
        first, *others = [(torch.set_num_threads(count), call())[1] for count in counts]
    finally:
        torch.set_num_threads(threads)
    return all(equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_on_any_number_of_threads(cell, dtype, isa):
    tensors = sequence(cell, 40, 67, 33, 65, runs=2, dtype=dtype) + parameters(cell, 33, 65, directions=2, dtype=dtype)
    assert same_bits_on_threads((1, 2, 3, 2), lambda: everything(cell, tensors, bidirectional=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize(("steps", "batch", "hidden"), [(40, 9, 129), (1, 33, 129)])
def test_same_bits_where_threads_share_a_sequence(cell, steps, batch, hidden, runs, dtype, isa):
    """Few sequences, or one step: several threads work on the same ones, and wait for each other every step."""
    tensors = sequence(cell, steps, batch, 5, hidden, runs=runs, dtype=dtype)
    tensors += parameters(cell, 5, hidden, directions=runs, dtype=dtype)
    assert same_bits_on_threads((1, 2, 3, 8), lambda: everything(cell, tensors, bidirectional=runs == 2))


@pytest.mark.parametrize("batch", [2, 6, 33])
def test_a_sequence_does_not_see_the_batch(cell, batch, dtype, isa):
    tensors = sequence(cell, 9, batch, 33, 65, dtype=dtype)
    weights = parameters(cell, 33, 65, dtype=dtype)
    together = everything(cell, tensors + weights)
    for row in {0, batch // 2, batch - 1}:
        alone = everything(cell, [t[:, row : row + 1] for t in tensors] + weights)
        own = 2 * len(tensors)  # results and the gradients of input and state
        assert equal(alone[:own], [t[:, row : row + 1] for t in together[:own]])


def test_chunks_chain_to_one_long_run(cell, isa):
    for dtype in (torch.float64, torch.float32):
        x, *states = sequence(cell, 50, 40, 6, 65, dtype=dtype)
        weights = parameters(cell, 6, 65, dtype=dtype)
        whole, *state = run(cell, x, *states, *weights)
        pieces = []
        for piece in x.split([1, 30, 2, 17]):
            output, *states = run(cell, piece, *states, *weights)
            pieces.append(output)
        assert equal([torch.cat(pieces), *states], [whole, *state])


def op_arguments(cell, *tensors):
    """The tensors and lists of rnn_fwd, from one layer's in one direction or two; then the numbers up to the cell."""
    x, hx, weights = split(cell, tensors)
    h, c = hx if cell == "lstm" else (hx, None)
    each = len(weights) // len(h)
    lists = [weights[n::each] for n in range(each)] + [[]] * (7 - each)
    return [x, h, c, *lists, None, None, None, None], [0.0, 0.0, 1e-5, CELLS[cell]]


def test_reverse_is_forward_on_the_flipped_sequence(cell, isa):
    """Of a layer in both directions, the second is to the flipped sequence what the first is to the sequence."""
    ops = torch.ops.seqkern
    x, *states = sequence(cell, 50, 40, 6, 65)
    weights = parameters(cell, 6, 65) * 2
    states = [s.expand(2, -1, -1).contiguous() for s in states]
    (x, h, c, *rest), numbers = op_arguments(cell, x, *states, *weights)
    forward = ops.rnn_fwd(x, h, c, *rest, *numbers, True)
    backward = ops.rnn_fwd(x.flip(0), h, c, *rest, *numbers, True)

    def other_way(results, time):
        output, h_n, c_n, *kept = results
        return [output.unflatten(2, (2, 65)).flip(0, 2).flatten(2), h_n.flip(0), c_n.flip(0),
                *(t.flip(0, time) if t.dim() > 1 else t for t in kept)]  # fmt: skip

    assert equal(forward, other_way(backward, 1))
    dy, dh, dc = torch.randn(50, 40, 130), *torch.randn(2, 2, 40, 65)
    there = [dy, dh, dc if cell == "lstm" else None]
    back = [dy.unflatten(2, (2, 65)).flip(0, 2).flatten(2), dh.flip(0), dc.flip(0) if cell == "lstm" else None]
    dx, *grads = ops.rnn_bwd(*there, None, x, h, c, *rest, *numbers, forward[0], *forward[3:], True, True)
    dx_flipped, *others = ops.rnn_bwd(
        *back, None, x.flip(0), h, c, *rest, *numbers, backward[0], *backward[3:], True, True
    )
    assert equal(grads[:2], [t.flip(0) if t.dim() > 1 else t for t in others[:2]])
    # these are sums over the directions, or over the steps, in another order
    for grad, other in zip([dx, *grads[2:]], [dx_flipped.flip(0), *(t.flip(0) for t in others[2:])], strict=True):
        torch.testing.assert_close(
            grad, other, rtol=0, atol=1e-6 * (1 + grad.abs().amax().item() if grad.numel() else 1)
        )


def test_two_directions_are_two_runs(cell, isa):
    x, *states = sequence(cell, 20, 9, 6, 33, runs=2)
    weights = parameters(cell, 6, 33, directions=2)
    together = run(cell, x, *states, *weights, bidirectional=True)
    apart = []
    for d, own in enumerate((x, x.flip(0))):
        tensors, numbers = op_arguments(cell, own, *(s[d : d + 1] for s in states), *weights[4 * d : 4 * d + 4])
        apart.append(torch.ops.seqkern.rnn_fwd(*tensors, *numbers, False))
    assert torch.equal(together[0], torch.cat([apart[0][0], apart[1][0].flip(0)], -1))
    assert torch.equal(together[1], torch.cat([a[1] for a in apart]))


def test_inputs_are_not_modified_and_every_output_is_written(cell, isa, dtype):
    n = states_of(cell)
    tensors = sequence(cell, 9, 7, 5, 33, runs=2, dtype=dtype) + parameters(cell, 5, 33, directions=2, dtype=dtype)
    before = [t.clone() for t in tensors]
    with poison():
        results = everything(cell, tensors, bidirectional=True)
        results += everything(cell, tensors, bidirectional=True, lengths=[9, 1, 0, 5, 9, 2, 3])
        results += everything(cell, [t[0] for t in tensors[: n + 1]] + tensors[n + 1 : n + 5], run_cell)
    assert all(t.isfinite().all() for t in results)
    assert equal(tensors, before)


# ---- derivatives --------------------------------------------------------------------------------------------------


def leaves_of(cell, steps=2, batch=1, inputs=2, hidden=2, runs=1, bias=True):
    tensors = sequence(cell, steps, batch, inputs, hidden, runs=runs, dtype=torch.float64)
    tensors += parameters(cell, inputs, hidden, directions=runs, bias=bias, dtype=torch.float64)
    return [t.requires_grad_() for t in tensors]


def test_gradcheck(cell, isa):
    assert torch.autograd.gradcheck(functools.partial(run, cell), leaves_of(cell, 2, 2, 2, 3))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradcheck_of_every_mode(cell, bidirectional):
    leaves = leaves_of(cell, runs=2 if bidirectional else 1)
    function = functools.partial(run, cell, bidirectional=bidirectional)
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("bias", [True, False])
def test_gradgradcheck(cell, bias):
    leaves = leaves_of(cell, bias=bias)
    assert torch.autograd.gradgradcheck(functools.partial(run, cell), leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("lengths", [None, [3, 1]])
def test_functional_transforms(cell, lengths):
    n = states_of(cell)
    x, *states = (t.expand(4, *t.shape).clone() for t in sequence(cell, 3, 2, 3, 5, dtype=torch.float64))
    x = torch.randn_like(x)
    weights = parameters(cell, 3, 5, dtype=torch.float64)

    def ours(*tensors):
        return sum(t.square().sum() for t in run(cell, *tensors, lengths=lengths)).sin()

    def theirs(*tensors):
        with seqkern.use_backend("reference"):
            return ours(*tensors)

    shared, all_weights = (*[0] * (n + 1), *[None] * 4), tuple(range(n + 1, n + 5))

    def vmap_over_last(f):
        last = (2, *[None] * (n + 4))
        return lambda x, *rest: torch.func.vmap(f, in_dims=last)(x.movedim(0, 2), *(s[0] for s in rest[:n]), *rest[n:])

    def vmap_over_all(f):
        return lambda *t: torch.func.vmap(f)(*t[: n + 1], *(w.expand(4, *w.shape) for w in t[n + 1 :]))

    def jvp(f):
        def along_input_and_weight(x, *rest):
            states, (w_ih, w_hh, *bias) = [s[0] for s in rest[:n]], rest[n:]
            return torch.func.jvp(lambda x, u: f(x, *states, w_ih, u, *bias), (x[0], w_hh), (x[1], w_hh.cos()))

        return along_input_and_weight

    for transform in (
        lambda f: torch.func.vmap(f, in_dims=shared),
        vmap_over_last,
        vmap_over_all,
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=tuple(range(n + 1))), in_dims=shared),
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, *all_weights)), in_dims=shared),
        jvp,
        lambda f: lambda *t: torch.func.hessian(f, argnums=1)(*(s[0] for s in t[: n + 1]), *t[n + 1 :]),
    ):
        tensors = (x, *states, *weights)
        torch.testing.assert_close(transform(ours)(*tensors), transform(theirs)(*tensors))


def test_no_samples(cell):
    x, *_ = (t.expand(0, *t.shape) for t in sequence(cell))
    weights = parameters(cell)
    function = getattr(seqkern, cell)
    for mapped in (
        torch.func.vmap(lambda x: function(x, None, weights)[0])(x),
        torch.func.vmap(lambda x, *w: function(x, None, w)[0])(x, *(w.expand(0, *w.shape) for w in weights)),
    ):
        assert mapped.shape == (0, *x.shape[1:3], 7)


# ---- backends and cost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_backends_agree(cell, backend, dtype, passes):
    passes(verify(cell, dtype, backend=backend))


def test_cost_counts_the_products():
    forward = cost(128, 32, 256, 256, torch.float32)
    assert forward.flops == 2 * 128 * 32 * 1024 * 512
    assert cost(128, 32, 256, 256, torch.float32, cell="gru").flops == forward.flops * 3 // 4
    assert cost(128, 32, 256, 256, torch.float32, backward=True).flops == 2 * forward.flops
    simple = {"cell": "rnn_tanh", "backward": True}  # nothing is found again
    assert cost(128, 32, 256, 256, torch.float32, recompute=True, **simple) == cost(
        128, 32, 256, 256, torch.float32, **simple
    )
    training = cost(128, 32, 256, 256, torch.float32, training=True)
    assert training.bytes > cost(128, 32, 256, 256, torch.float32, training=True, recompute=True).bytes > forward.bytes
