"""Recurrent networks beyond torch's: lengths, resets, norms, peepholes, zoneout, dropout, recompute, all together."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import seqkern
from seqkern import _library, reference
from seqkern.ops._rnn_checks import prepare_lengths, prepare_seed
from seqkern.ops.rnn import CELLS, GATES
from seqkern.testing import check_case, poison, rnn_case


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def network(cell, inputs=4, hidden=7, *, layers=1, directions=1, norms=False, peepholes=False, projection=0, **kind):
    """weights, and the options norms and peepholes."""
    gates, weights, options = GATES[CELLS[cell]] * hidden, [], {}
    sides = [gates, gates, *([hidden] if cell == "lstm" else [])]
    for run in range(layers * directions):
        width = inputs if run < directions else directions * (projection or hidden)
        shapes = [(gates, width), (gates, projection or hidden), (gates,), (gates,)]
        shapes += [(projection, hidden)] if projection else []
        weights += [torch.randn(shape, **kind) * hidden**-0.5 for shape in shapes]
        if norms:
            own = [t for n in sides for t in (0.7 + 0.3 * torch.rand(n, **kind), 0.1 * torch.randn(n, **kind))]
            options.setdefault("norms", []).extend(own)
        if peepholes:
            options.setdefault("peepholes", []).append(torch.randn(3, hidden, **kind) * hidden**-0.5)
    return weights, options


def state(cell, runs, batch, hidden=7, width=None, **kind):
    h = torch.randn(runs, batch, width or hidden, **kind)
    return (h, torch.randn(runs, batch, hidden, **kind)) if cell == "lstm" else h


def flat(result):
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def over_state(function, *states):
    return tuple(map(function, *states)) if isinstance(states[0], tuple) else function(*states)


def everything(cell, x, hx, weights, **options):
    """Results, and the gradients of input, state, weights and of the options' parameters."""
    leaves = [t.detach().requires_grad_() for t in flat([x, hx, weights])]
    x, hx = leaves[0], tuple(leaves[1:3]) if cell == "lstm" else leaves[1]
    own = leaves[2 + (cell == "lstm") :]
    for name in ("norms", "peepholes"):
        if name in options:
            options[name] = [t.detach().requires_grad_() for t in options[name]]
            leaves += options[name]
    found = flat(getattr(seqkern, cell)(x, hx, own, **options))
    wanted = [t for t in found if t.requires_grad]  # not of no steps
    cotangents = [torch.cos(3 * t.detach()) for t in wanted]
    grads = torch.autograd.grad(wanted, leaves, cotangents, materialize_grads=True) if wanted else []
    return [*(t.detach() for t in found), *grads]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- the error rule -----------------------------------------------------------------------------------------------

LENGTHS = (17, 0, 9, 17, 1, 3, 16)
CASES = {
    "lengths": {"lengths": LENGTHS, "bidirectional": True},
    "resets": {"resets": True, "lengths": LENGTHS, "bidirectional": True},
    "norms": {"norms": True, "num_layers": 2},
    "norms without biases": {"norms": True, "bias": False, "bidirectional": True},
    "recurrent dropout": {"recurrent_dropout": 0.3, "bidirectional": True},
    "zoneout": {"zoneout": (0.3, 0.2), "bidirectional": True},
    "mean of zoneout": {"zoneout": (0.3, 0.2), "training": False},
    "recompute": {"recompute": True, "norms": True, "lengths": LENGTHS, "resets": True},
}
LSTM_CASES = {
    "peepholes": {"peepholes": True, "bidirectional": True},
    "peepholes and recompute": {"peepholes": True, "recompute": True, "zoneout": (0.3, 0.2)},
    "projection and all": {
        "projection": 20, "peepholes": True, "norms": True, "lengths": LENGTHS, "resets": True, "recompute": True,
        "zoneout": (0.1, 0.2), "recurrent_dropout": 0.2, "bidirectional": True, "num_layers": 2,
    },
}  # fmt: skip


def case_of(cell, name):
    return rnn_case(cell, 17, 7, 12, 33, **(CASES | LSTM_CASES)[name])


@pytest.mark.parametrize("name", CASES)
def test_error_rule(cell, name, dtype, isa, passes):
    passes(check_case(case_of(cell, name), dtype))


@pytest.mark.parametrize("name", LSTM_CASES)
def test_error_rule_of_the_lstm(name, dtype, isa, passes):
    passes(check_case(case_of("lstm", name), dtype))


# ---- any combination means what the reference means ---------------------------------------------------------------


@st.composite
def combinations(draw):
    cell = draw(st.sampled_from(list(CELLS)))
    steps, batch = draw(st.integers(0, 6)), draw(st.integers(0, 5))
    lstm, layers = cell == "lstm", draw(st.integers(1, 2))
    hidden = draw(st.integers(2, 11))
    lengths = draw(st.none() | st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
    zoneout = draw(st.sampled_from([0.0, 0.4, (0.3, 0.6), (0.0, 1.0), 1.0]))
    return {
        "cell": cell, "steps": steps, "batch": batch, "inputs": draw(st.integers(1, 6)), "hidden": hidden,
        "projection": draw(st.integers(0, hidden - 1)) if lstm else 0, "norms": draw(st.booleans()),
        "peepholes": lstm and draw(st.booleans()), "resets": draw(st.booleans()),
        "options": {
            "num_layers": layers, "bidirectional": draw(st.booleans()), "batch_first": draw(st.booleans()),
            "lengths": lengths, "dropout": draw(st.sampled_from([0.0, 0.5])), "training": draw(st.booleans()),
            "recurrent_dropout": draw(st.sampled_from([0.0, 0.5, 1.0])),
            "zoneout": zoneout if lstm or isinstance(zoneout, float) else zoneout[0], "seed": draw(st.integers(-9, 9)),
        },
        "recompute": draw(st.booleans()), "return_all_c": lstm and draw(st.booleans()),
    }  # fmt: skip


@given(combination=combinations())
@settings(max_examples=150, deadline=None)
def test_any_combination_means_the_reference(combination):
    c = combination
    options, kind = c["options"], {"dtype": torch.float64}
    runs = options["num_layers"] * (1 + options["bidirectional"])
    weights, extra = network(
        c["cell"], c["inputs"], c["hidden"], layers=options["num_layers"], directions=1 + options["bidirectional"],
        norms=c["norms"], peepholes=c["peepholes"], projection=c["projection"], **kind,
    )  # fmt: skip
    x = torch.randn(c["steps"], c["batch"], c["inputs"], **kind)
    hx = state(c["cell"], runs, c["batch"], c["hidden"], c["projection"] or c["hidden"], **kind)
    resets = torch.rand(c["steps"], c["batch"]) < 0.4 if c["resets"] else None
    if options["batch_first"]:
        x, resets = x.transpose(0, 1), None if resets is None else resets.t()
    if c["return_all_c"]:
        extra["return_all_c"] = True
    call = functools.partial(everything, c["cell"], x, hx, weights, resets=resets, **options, **extra)
    with seqkern.use_backend("reference"):
        expected = call()
    torch.testing.assert_close(call(recompute=c["recompute"]), expected)


LONG = {
    "lengths": {},
    "masks": {"recurrent_dropout": 0.3, "zoneout": 0.2},
    "norms": {"norms": True, "peepholes": True, "recurrent_dropout": 0.3, "zoneout": 0.2},
    "projected": {"projection": 4},
}


@pytest.mark.parametrize(("cell", "name"), [(c, n) for c in CELLS for n in LONG if c == "lstm" or n != "projected"])
@pytest.mark.parametrize("recompute", [False, True])
def test_options_over_several_chunks_of_steps(cell, name, recompute):
    """80 steps of 7 sequences go by in chunks of 36: where those meet, sequences end, begin and start again."""
    options, kind = dict(LONG[name]), {"dtype": torch.float64}
    own = {n: options.pop(n) for n in ("norms", "peepholes", "projection") if n in options}
    own["peepholes"] = own.get("peepholes", False) and cell == "lstm"
    weights, extra = network(cell, 5, 9, directions=2, **own, **kind)
    x, hx = torch.randn(80, 7, 5, **kind), state(cell, 2, 7, 9, own.get("projection"), **kind)
    resets = torch.rand(80, 7) < 0.1
    resets[[8, 36, 44, 72], :4] = True
    options |= {"lengths": [80, 36, 72, 8, 44, 0, 80], "resets": resets, "bidirectional": True} | extra
    options |= {"training": True, "seed": 3} | ({"return_all_c": True} if cell == "lstm" else {})
    call = functools.partial(everything, cell, x, hx, weights, **options)
    with seqkern.use_backend("reference"):
        expected = call()
    torch.testing.assert_close(call(recompute=recompute), expected)


# ---- lengths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
def test_lengths_are_runs_of_their_own(cell, bidirectional, dtype, isa):
    """Bit for bit, but for the weights' gradients, which are sums over the batch."""
    runs, lengths = 1 + bidirectional, [9, 1, 4, 0, 9]
    weights, _ = network(cell, 5, 33, directions=runs, dtype=dtype)
    x, hx = torch.randn(9, 5, 5, dtype=dtype), state(cell, runs, 5, 33, dtype=dtype)
    count = 3 if cell == "lstm" else 2
    together = everything(cell, x, hx, weights, lengths=lengths, bidirectional=bidirectional)[: 2 * count]
    for b, length in enumerate(lengths):
        row, own = slice(b, b + 1), over_state(operator.itemgetter((slice(None), slice(b, b + 1))), hx)
        alone = everything(cell, x[:length, row], own, weights, bidirectional=bidirectional)
        for mine, whole in zip(alone, together, strict=False):
            if whole.shape[0] == 9:
                assert torch.equal(whole[length:, row], torch.zeros_like(whole[length:, row]))
                whole = whole[:length]
            assert torch.equal(mine, whole[:, row])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_steps_that_no_sequence_reaches(cell, dtype, isa, norms, recompute):
    """Whole chunks of steps, and calls, without a token. Of one chunk with tokens, so that all sums are the same."""
    weights, extra = network(cell, 20, 33, norms=norms, dtype=dtype)
    x, hx, lengths = torch.randn(300, 3, 20, dtype=dtype), state(cell, 1, 3, 33, dtype=dtype), [2, 0, 3]
    count = 3 if cell == "lstm" else 2
    long = everything(cell, x, hx, weights, lengths=lengths, recompute=recompute, **extra)
    short = everything(cell, x[:3], hx, weights, lengths=lengths, recompute=recompute, **extra)
    for i in (0, count):  # the output, and the gradient of the input
        assert torch.equal(long[i][3:], torch.zeros_like(long[i][3:]))
        long[i] = long[i][:3]
    torch.testing.assert_close(long, short)
    nothing = everything(cell, x, hx, weights, lengths=[0, 0, 0], recompute=recompute, **extra)
    assert equal(nothing[1:count], flat(hx))
    assert not any(t.any() for t in (nothing[0], nothing[count], *nothing[count + 1 + len(flat(hx)) :]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("norms", [False, True])
def test_padding_is_never_seen(cell, bad, norms, isa):
    weights, extra = network(cell, 5, 9, layers=2, directions=2, norms=norms)
    lengths = torch.tensor([6, 1, 0, 4])
    x, hx = torch.randn(6, 4, 5), state(cell, 4, 4, 9)
    past = torch.arange(6)[:, None] >= lengths
    results = []
    for filling in (0.0, bad):
        filled = x.masked_fill(past[..., None], filling)
        results.append(
            everything(cell, filled, hx, weights, lengths=lengths, num_layers=2, bidirectional=True, **extra)
        )
    assert equal(*results)
    assert all(t.isfinite().all() for t in results[0])
    grad_input = results[0][3 if cell == "lstm" else 2]
    assert torch.equal(grad_input[past], torch.zeros_like(grad_input[past]))


def test_gradients_past_the_end_are_not_seen(isa):
    weights, _ = network("lstm")
    x, hx = torch.randn(5, 3, 4).requires_grad_(), state("lstm", 1, 3)
    output, _, cells = seqkern.lstm(x, hx, weights, lengths=[5, 2, 1], return_all_c=True)
    past = torch.arange(5)[:, None] >= torch.tensor([5, 2, 1])
    grads = [torch.ones(5, 3, 7).masked_fill(past[..., None], n) for n in (0.0, float("nan"))]
    clean, bad = (torch.autograd.grad((output, cells), x, (g, g), retain_graph=True)[0] for g in grads)
    assert torch.equal(clean, bad)


@pytest.mark.parametrize("lengths", [[3, 1, 2], (3, 1, 2), torch.tensor([3, 1, 2], dtype=torch.int32)], ids=str)
def test_forms_of_lengths(lengths):
    weights, _ = network("gru")
    x = torch.randn(3, 3, 4)
    expected = seqkern.gru(x, None, weights, lengths=torch.tensor([3, 1, 2]))
    assert equal(flat(seqkern.gru(x, None, weights, lengths=lengths)), flat(expected))
    assert not x[2, 1:].eq(0).any()  # the input is not written to


# ---- resets and chunks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
def test_resets_are_separate_runs(cell, bidirectional, isa):
    runs, borders = 1 + bidirectional, [0, 3, 4, 9]
    weights, _ = network(cell, 5, 9, directions=runs)
    x, resets = torch.randn(9, 2, 5), torch.zeros(9, 2, dtype=torch.bool)
    resets[borders[:-1], 0] = True  # not of the other sequence
    hx = state(cell, runs, 2, 9)
    options = {"bidirectional": bidirectional}
    output, last = getattr(seqkern, cell)(x, hx, weights, resets=resets, **options)
    pieces = []
    for start, end in itertools.pairwise(borders):
        zeros = over_state(torch.zeros_like, hx)
        if bidirectional and end == 9:  # the reverse direction begins here, with the state that was given
            zeros = over_state(lambda z, t: torch.stack([z[0], t[1]]), zeros, hx)
        piece, final = getattr(seqkern, cell)(x[start:end], zeros, weights, **options)
        pieces.append(piece[:, 0])
    assert torch.equal(output[:, 0], torch.cat(pieces))
    assert equal([t[0, 0] for t in flat(last)], [t[0, 0] for t in flat(final)])
    undisturbed, _ = getattr(seqkern, cell)(x, hx, weights, **options)
    assert torch.equal(output[:, 1], undisturbed[:, 1])


def test_a_reset_stops_gradients_and_bad_numbers(cell, isa):
    weights, _ = network(cell)
    x, hx = torch.randn(6, 2, 4).requires_grad_(), state(cell, 1, 2)
    resets = torch.zeros(6, 2, dtype=torch.bool)
    resets[3] = True
    output, _ = getattr(seqkern, cell)(x, hx, weights, resets=resets)
    (grad,) = torch.autograd.grad(output[3:].sum(), x)
    assert torch.equal(grad[:3], torch.zeros(3, 2, 4))
    assert grad[3:].abs().min() > 0 or cell == "rnn_relu"
    with torch.no_grad():
        x[1, 0] = float("nan")
        again, _ = getattr(seqkern, cell)(x, hx, weights, resets=resets)
    assert torch.equal(again[3:], output[3:])


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_chunks_with_lengths_and_state_passing(cell, norms, isa):
    """Truncated back-propagation: ragged sequences, a chunk at a time."""
    weights, extra = network(cell, 5, 9, norms=norms)
    lengths = torch.tensor([10, 3, 7, 4])
    x, hx = torch.randn(10, 4, 5), state(cell, 1, 4, 9)
    function = getattr(seqkern, cell)
    whole, last = function(x, hx, weights, lengths=lengths, **extra)
    pieces, start = [], 0
    for piece in x.split([4, 1, 5]):
        output, hx = function(piece, hx, weights, lengths=(lengths - start).clamp(0, len(piece)), **extra)
        pieces.append(output)
        start += len(piece)
    chunks, at_once = [torch.cat(pieces), *flat(hx)], [whole, *flat(last)]
    if norms:  # their product with the input is torch's, whose bits may change with the rows
        torch.testing.assert_close(chunks, at_once, atol=2e-6, rtol=1e-5)
    else:
        assert equal(chunks, at_once)


def test_all_c(isa):
    weights, _ = network("lstm", layers=2, directions=2)
    x, lengths = torch.randn(6, 3, 4), [6, 2, 4]
    options = {"num_layers": 2, "bidirectional": True, "lengths": lengths}
    output, (_, c_n), cells = seqkern.lstm(x, None, weights, return_all_c=True, **options)
    expected, (_, expected_c) = seqkern.lstm(x, None, weights, **options)
    assert equal([output, c_n], [expected, expected_c])
    assert cells.shape == (6, 3, 14)
    for b, length in enumerate(lengths):
        assert torch.equal(cells[length - 1, b, :7], c_n[2, b])
        assert torch.equal(cells[0, b, 7:], c_n[3, b])
        assert torch.equal(cells[length:, b], torch.zeros(6 - length, 14))
    first = seqkern.lstm(x.transpose(0, 1), None, weights, return_all_c=True, batch_first=True, **options)[2]
    assert torch.equal(first, cells.transpose(0, 1))


# ---- recompute ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norms", [False, True])
def test_recompute_equals_stored(cell, norms, isa):
    weights, extra = network(cell, 5, 33, directions=2, norms=norms, dtype=torch.float64)
    x, hx = torch.randn(9, 6, 5, dtype=torch.float64), state(cell, 2, 6, 33, dtype=torch.float64)
    options = {"bidirectional": True, "lengths": [9, 0, 5, 9, 1, 8], "resets": torch.rand(9, 6) < 0.2, "seed": 4}
    options |= {"recurrent_dropout": 0.3, "zoneout": 0.2, "training": True} | extra
    stored, again = (everything(cell, x, hx, weights, recompute=r, **options) for r in (False, True))
    torch.testing.assert_close(again, stored)


def test_recompute_where_the_second_of_two_steps_starts_anew(cell, isa):
    """A product of one row that is there and one that is not."""
    weights, _ = network(cell)
    x, hx, resets = torch.randn(2, 1, 4), state(cell, 1, 1), torch.tensor([[False], [True]])
    stored, again = (everything(cell, x, hx, weights, resets=resets, recompute=r) for r in (False, True))
    torch.testing.assert_close(again, stored)


def test_recompute_saves_memory(cell):
    def saved(**options):
        weights, _ = network(cell, 5, 33)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nelement()) or t, lambda t: t):
            getattr(seqkern, cell)(torch.randn(50, 6, 5).requires_grad_(), None, weights, **options)
        return sum(sizes)

    # The one gate of a simple RNN is h: it stays.
    kept = {"lstm": 4, "gru": 4, "additive_rnn": 1, "interpolated_rnn": 2}.get(cell, 0)
    assert saved() - saved(recompute=True) == 50 * 6 * 33 * kept


# ---- masks --------------------------------------------------------------------------------------------------------


def test_a_seed_decides_all_masks(cell):
    weights, _ = network(cell, layers=2)
    x = torch.randn(5, 3, 4)
    options = {"num_layers": 2, "dropout": 0.5, "recurrent_dropout": 0.5, "zoneout": 0.5, "training": True}
    call = functools.partial(getattr(seqkern, cell), x, None, weights, **options)
    first, same, tensor, other = (flat(call(seed=s)) for s in (3, 3, torch.tensor([3]), 4))
    assert equal(first, same)
    assert equal(first, tensor)
    assert not torch.equal(first[0], other[0])
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(flat(call()))
    assert equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    quiet = getattr(seqkern, cell)(x, None, weights, num_layers=2)
    silent = getattr(seqkern, cell)(x, None, weights, **(options | {"training": False, "zoneout": 0.0}))
    assert equal(flat(quiet), flat(silent))


def test_zoneout_keeps_units_of_the_step_before(isa):
    weights, _ = network("lstm", hidden=64)
    x, p = torch.randn(40, 20, 4), (0.3, 0.1)
    hx = state("lstm", 1, 20, 64)
    options = {"zoneout": p, "training": True, "return_all_c": True}
    output, _, cells = seqkern.lstm(x, hx, weights, seed=5, **options)
    for values, start, share, k in ((output, hx[0], p[0], 0), (cells, hx[1], p[1], 1)):
        kept = values == torch.cat([start, values[:-1]])
        assert abs(kept.double().mean().item() - share) < 4 * (share * (1 - share) / kept.numel()) ** 0.5
        rows = k * 40 * 20 + torch.arange(40 * 20)
        drops = ~reference.keep_mask(reference.derived_seed(torch.tensor(5), 1), share, rows, 64)
        assert torch.equal(kept.flatten(0, 1), drops)


def test_recurrent_dropout_is_the_same_at_all_steps(isa):
    """Units whose every successor sees them through a mask: with U = 1 and no input, h_t = h_{t-1} m."""
    hidden, weight = 50, torch.eye(50)
    h0 = torch.rand(1, 30, hidden) + 0.5
    x = torch.zeros(4, 30, 1)
    weights = [torch.zeros(hidden, 1), weight]
    output, _ = seqkern.rnn_relu(x, h0, weights, recurrent_dropout=0.4, training=True, seed=9)
    factors = output[0] / h0[0]
    dropped = factors == 0
    assert abs(dropped.double().mean().item() - 0.4) < 0.05
    torch.testing.assert_close(factors[~dropped], torch.full_like(factors[~dropped], 1 / 0.6))
    for t in range(1, 4):
        torch.testing.assert_close(output[t], output[t - 1] * factors)


def test_layers_and_directions_have_masks_of_their_own():
    weights = [torch.zeros(30, 1), torch.eye(30)] * 2
    x, h0 = torch.zeros(1, 2, 1), torch.ones(2, 2, 30)
    output, _ = seqkern.rnn_relu(x, h0, weights, bidirectional=True, recurrent_dropout=0.5, training=True, seed=1)
    assert not torch.equal(output[..., :30], output[..., 30:])
    assert not torch.equal(output[:, 0], output[:, 1])


# ---- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_gradcheck_with_options(cell, recompute):
    kind = {"dtype": torch.float64}
    weights, extra = network(cell, 2, 3, directions=2, norms=True, peepholes=cell == "lstm", **kind)
    x, hx = torch.randn(3, 3, 2, **kind), state(cell, 2, 3, 3, **kind)
    assert torch.autograd.gradcheck(*_checked(cell, x, hx, weights, extra, [3, 1, 2], recompute))


def _checked(cell, x, hx, weights, extra, lengths, recompute=False, bidirectional=True):
    """A function of leaves alone, and the leaves."""
    extra = {name: tensors for name, tensors in extra.items() if tensors}
    leaves = [t.requires_grad_() for t in flat([x, hx, weights, *extra.values()])]
    resets = torch.rand(x.shape[:2]) < 0.3
    n = 1 + (2 if cell == "lstm" else 1)

    def function(*leaves):
        rest = list(leaves[n:])
        own, rest = rest[: len(weights)], rest[len(weights) :]
        options = {}
        for name, tensors in extra.items():
            options[name], rest = rest[: len(tensors)], rest[len(tensors) :]
        found = getattr(seqkern, cell)(
            leaves[0], tuple(leaves[1:n]) if cell == "lstm" else leaves[1], own, lengths=lengths, resets=resets,
            bidirectional=bidirectional, recurrent_dropout=0.3, zoneout=0.2, training=True, seed=3, recompute=recompute,
            **options, **({"return_all_c": True} if cell == "lstm" else {}),
        )  # fmt: skip
        return tuple(flat(found))

    return function, leaves


def test_gradgradcheck_with_options(cell):
    kind = {"dtype": torch.float64}
    weights, extra = network(cell, 1, 2, norms=True, peepholes=cell == "lstm", **kind)
    x, hx = torch.randn(2, 2, 1, **kind), state(cell, 1, 2, 2, **kind)
    function, leaves = _checked(cell, x, hx, weights, extra, [2, 1], bidirectional=False)
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_gradient_of_the_input_alone_with_options(cell, norms, recompute, isa):
    """Nothing is summed for the weights, norms and peepholes then."""
    kind = {"dtype": torch.float64}
    weights, extra = network(cell, 5, 9, directions=2, norms=norms, peepholes=cell == "lstm", **kind)
    options = {"lengths": [6, 2, 5], "bidirectional": True, "recompute": recompute, "recurrent_dropout": 0.3}
    options |= {"zoneout": 0.2, "training": True, "seed": 3} | extra
    x = torch.randn(6, 3, 5, **kind, requires_grad=True)

    def gradient():
        return torch.autograd.grad(getattr(seqkern, cell)(x, None, weights, **options)[0].sin().sum(), x)[0]

    alone = gradient()
    for t in flat([weights, extra]):
        t.requires_grad_()
    assert torch.equal(alone, gradient())


def test_projection_derivatives():
    kind = {"dtype": torch.float64}
    weights, _ = network("lstm", 2, 3, projection=2, **kind)
    leaves = [
        t.requires_grad_() for t in flat([torch.randn(2, 2, 2, **kind), *state("lstm", 1, 2, 3, 2, **kind), weights])
    ]

    def function(x, h, c, *weights):
        return tuple(flat(seqkern.lstm(x, (h, c), list(weights))))

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_vmap_with_options(cell):
    """Lengths and resets of every sample its own; with zoneout, as many calls as samples."""
    weights, extra = network(cell, norms=True, dtype=torch.float64)
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64)
    lengths, resets = torch.randint(0, 6, (3, 2)), torch.rand(3, 5, 2) < 0.3
    for zoneout in (0.0, 0.3):

        def function(x, lengths, resets, zoneout=zoneout):
            options = {"zoneout": zoneout, "recurrent_dropout": 0.2, "training": True, "seed": 3} | extra
            found = getattr(seqkern, cell)(x, None, weights, lengths=lengths, resets=resets, **options)
            return found[0]

        mapped = torch.func.vmap(function)(x, lengths, resets)
        expected = torch.stack([function(x[i], lengths[i], resets[i]) for i in range(3)])
        torch.testing.assert_close(mapped, expected)


def test_every_output_is_written_and_threads_do_not_matter(cell, isa, dtype):
    # Not with norms: the product of the input is torch's then.
    weights, extra = network(cell, 5, 33, directions=2, peepholes=cell == "lstm", dtype=dtype)
    x, hx = torch.randn(20, 37, 5, dtype=dtype), state(cell, 2, 37, 33, dtype=dtype)
    lengths = torch.randint(0, 21, (37,))
    options = {"lengths": lengths, "bidirectional": True, "recurrent_dropout": 0.3, "zoneout": 0.2, "training": True}
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with poison():
                results.append(everything(cell, x, hx, weights, seed=3, **options, **extra))
    finally:
        torch.set_num_threads(threads)
    assert all(t.isfinite().all() for t in results[0])
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


class Recorded(TorchDispatchMode):
    """A GPU as a CUDA graph sees it: copies from memory of the host are refused, what is filled is kept."""

    def __init__(self):
        super().__init__()
        self.part, self.filled = None, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        on_host = [isinstance(t, torch.Tensor) and not t.is_cuda for t in args]
        assert not (any(on_host) and isinstance(result, torch.Tensor) and result.is_cuda), function
        if function is torch.ops.aten.slice.Tensor:
            self.part = range(*args[2:])
        elif function is torch.ops.aten.fill_.Scalar:
            self.filled |= dict.fromkeys(self.part, args[1])
        elif function is torch.ops.aten.full.default:
            self.filled = args[1]
        return result


@pytest.fixture
def capturing(monkeypatch):
    """CUDA tensors without data, while their stream is captured."""
    monkeypatch.setattr(_library, "_present", lambda index: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.empty(7, 5, 3, device="cuda")


@pytest.mark.parametrize("lengths", [[7, 7, 0, 2, 2], (1,) * 5, range(5), torch.tensor([3, 2, 2, 1, 1])], ids=repr)
def test_lengths_while_a_graph_is_captured(capturing, lengths):
    numbers = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
    with Recorded() as recorded:
        found = prepare_lengths("lstm", lengths, capturing, 7, 5)
    assert [recorded.filled[b] for b in range(5)] == numbers
    assert (found.dtype, found.shape, found.device.type) == (torch.int64, (5,), "cuda")


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_seed_while_a_graph_is_captured(capturing, seed):
    with Recorded() as recorded:
        found = prepare_seed("lstm", seed, capturing)
    assert recorded.filled == seed
    assert (found.dtype, found.shape, found.device.type) == (torch.int64, (), "cuda")
