"""A decoder that attends in every step: accuracy, gradients, steps one by one, masks, threads, layouts, errors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern import reference
from seqkern.ops.attention_rnn import AttentionRnnState, cost
from seqkern.testing import attention_rnn_case, check_case, poison


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(
    cell="lstm", order="bahdanau", score="additive", batch=2, steps=3, keys=4, inputs=3, hidden=3, columns=2,
    channels=4, outputs=2, feeding=True, dtype=torch.float64,
):  # fmt: skip
    """All tensors of a call by name, its options, and the state's."""
    luong, channels = order == "luong", hidden if score == "dot" else channels
    fed, gates = (outputs * feeding if luong else columns), (4 if cell == "lstm" else 3) * hidden
    shapes = {
        "input": (batch, steps, inputs), "key": (batch, keys, channels), "value": (batch, keys, columns),
        "w_ih": (gates, inputs + fed), "w_hh": (gates, hidden), "b_ih": (gates,), "b_hh": (gates,),
    }  # fmt: skip
    shapes |= {"w_query": (channels, hidden), "b_query": (channels,)} if score != "dot" else {}
    shapes |= {"w_score": (channels,)} if score == "additive" else {}
    shapes |= {"w_out": (outputs, columns + hidden), "b_out": (outputs,)} if luong else {}
    tensors = {name: draw(*shape, dtype=dtype, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    state = [
        draw(batch, hidden, dtype=dtype, seed=20),
        draw(batch, hidden, dtype=dtype, seed=21) if cell == "lstm" else None,
        draw(batch, outputs, dtype=dtype, seed=22) if luong and feeding else None,
    ]
    options = {"cell": cell, "order": order, "input_feeding": feeding, "scale": 0.7}
    return tensors, options, state


def everything(found):
    """What is differentiable of a result, or at least a tensor."""
    return [t for t in (found.output, found.context, *found.state, found.weights) if t is not None]


KINDS = [
    (cell, order, score, feeding)
    for cell, order, score, feeding in itertools.product(
        ("lstm", "gru"), ("bahdanau", "luong"), ("additive", "projected", "dot"), (True, False)
    )
    if feeding or order == "luong"
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_error_rule(kind, dtype, isa, passes):
    cell, order, score, feeding = kind
    for mask in (False, True):
        case = attention_rnn_case(cell=cell, order=order, score=score, input_feeding=feeding, mask=mask)
        passes(check_case(case, dtype))


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
@pytest.mark.parametrize("scale", [0.01, 0.1, 1, 10])
def test_error_rule_at_every_scale(order, scale, isa, passes):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        passes(check_case(attention_rnn_case(order=order, scale=scale), dtype))


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1, 1), (5, 2, 70, 3, 16, 65), (33, 3, 4, 5, 17, 1), (2, 40, 3, 1, 64, 16)], ids=str
)
def test_sizes(sizes, isa, passes):
    """One step, one key, one unit; more rows than a product's tile; many steps. No bias, no lengths, no state."""
    for order, score in itertools.product(("bahdanau", "luong"), ("additive", "dot")):
        options = {"order": order, "score": score, "bias": False, "lengths": False, "state": False}
        passes(check_case(attention_rnn_case(*sizes, channels=9, outputs=33, **options), torch.float32))


def test_one_key_is_the_network_on_its_value(isa):
    """Attention to a single key gives its value: what is left is the cell on [x; value]."""
    tensors, options, (h, c, _) = arguments(keys=1)
    found = seqkern.attention_rnn(**tensors, **options, state=(h, c, None), return_weights=True)
    x = torch.cat([tensors["input"], tensors["value"].expand(-1, 3, -1)], 2)
    weights = [tensors[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh")]
    output, (h_n, c_n) = seqkern.lstm(x, (h[None], c[None]), weights, batch_first=True)
    torch.testing.assert_close(found.output, output)
    torch.testing.assert_close(found.state.h, h_n[0])
    torch.testing.assert_close(found.state.c, c_n[0])
    assert (found.weights == 1).all()


# ---- the sequence and its steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_steps_one_by_one(kind, isa):
    """The state is worth the steps before it."""
    cell, order, score, feeding = kind
    for dtype in (torch.float64, torch.float32):
        tensors, options, state = arguments(cell, order, score, 3, 5, hidden=17, feeding=feeding, dtype=dtype)
        whole = seqkern.attention_rnn(**tensors, **options, state=state, return_weights=True)
        rows = []
        for x in tensors["input"].split([1, 2, 1, 1], 1):
            found = seqkern.attention_rnn(**tensors | {"input": x}, **options, state=state, return_weights=True)
            state = found.state
            rows.append(found)
        for name in ("output", "context", "weights"):
            torch.testing.assert_close(torch.cat([getattr(row, name) for row in rows], 1), getattr(whole, name))
        for a, b in zip(state, whole.state, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[3]], ids=str)
def test_the_kernel_step_by_step_to_the_bit(kind, isa):
    """From the same products of the inputs, which torch makes, and whose bits depend on the number of rows."""
    cell, order, score, _ = kind
    t, _, state = arguments(cell, order, score, 3, 5, hidden=17, dtype=torch.float32)
    x, w_feed = F.linear(t["input"], t["w_ih"][:, :3]), t["w_ih"][:, 3:]
    option = [t.get(name) for name in ("w_query", "b_query", "w_score", "w_out", "b_out")]

    def run(x, state):
        h, c, context, attended, _, weights, _, _ = torch.ops.seqkern.attention_rnn_fwd(
            x, t["key"], t["value"], *state, w_feed, t["w_hh"], t["b_hh"], *option, None, None, 0.7, int(cell == "gru"),
            order == "luong",
        )  # fmt: skip
        after = (h[:, -1], c if cell == "lstm" else None, attended[:, -1] if order == "luong" else None)
        return (h, context, *((attended,) if order == "luong" else ()), weights), after

    whole, after = run(x, state)
    steps = []
    for at in range(5):
        found, state = run(x[:, at : at + 1], state)
        steps.append(found)
    for every, parts in zip(whole, zip(*steps, strict=True), strict=True):
        assert torch.equal(every, torch.cat(parts, 1))
    for a, b in zip(state, after, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
def test_state_reordered_as_beams_are(order):
    """A state is a tree whose rows `generate` reorders."""
    from seqkern._states import chosen_rows

    tensors, options, state = arguments(order=order)
    found = seqkern.attention_rnn(**tensors, **options, state=state)
    rows = torch.tensor([1, 1])
    beams = chosen_rows(found.state, rows, 2, 0)
    assert isinstance(beams, AttentionRnnState)
    for before, after in zip(found.state, beams, strict=True):
        assert (before is None) == (after is None)
        assert before is None or torch.equal(after, before[rows])


@pytest.fixture
def steady_products(monkeypatch):
    """The products that torch makes have other bits with other rows or threads on some processors (docs/numerics.md).

    Sums over the last dimension have not; what is left is the kernels'.
    """

    def linear(x, weight, bias=None):
        sums = (x[..., None, :] * weight).sum(-1)
        return sums if bias is None else sums + bias

    monkeypatch.setattr("seqkern.ops.attention_rnn.F.linear", linear)


@pytest.mark.usefixtures("steady_products")
def test_a_sequence_does_not_depend_on_the_others(isa):
    for kind in KINDS:
        cell, order, score, feeding = kind
        if not feeding:
            continue
        tensors, options, state = arguments(cell, order, score, batch=7, hidden=16, dtype=torch.float32)
        every = seqkern.attention_rnn(**tensors, **options, state=state).output
        for b in range(7):
            own = {n: t[b : b + 1] if n in ("input", "key", "value") else t for n, t in tensors.items()}
            own_state = [None if s is None else s[b : b + 1] for s in state]
            assert torch.equal(seqkern.attention_rnn(**own, **options, state=own_state).output[0], every[b]), kind


@pytest.mark.usefixtures("steady_products")
@pytest.mark.parametrize("batch", [1, 2])
def test_more_workers_than_sequences(batch, isa):
    """Of a team some have columns of the products, and no row."""
    for order in ("bahdanau", "luong"):
        tensors, options, state = arguments(
            order=order, batch=batch, steps=4, keys=9, inputs=20, hidden=300, columns=200, channels=150, outputs=170,
            dtype=torch.float32,
        )  # fmt: skip
        before, results = torch.get_num_threads(), []
        try:
            for threads in (1, 4):
                torch.set_num_threads(threads)
                leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
                with poison():
                    found = seqkern.attention_rnn(**leaves, **options, state=state)
                    grads = torch.autograd.grad(
                        found.output.sin().sum(), [leaves[n] for n in ("input", "key", "value")]
                    )
                results.append([*everything(found), *grads])
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), order


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
@pytest.mark.parametrize("score", ["additive", "dot"])
def test_bits_do_not_depend_on_padding(order, score, isa):
    """Keys beyond the length are not read, and their gradients are zero."""
    tensors, options, _ = arguments(order=order, score=score, keys=12, steps=4, hidden=5, dtype=torch.float32)
    lengths = torch.tensor([12, 5])
    expected = seqkern.attention_rnn(**tensors, **options, key_lengths=lengths)
    padded = {
        name: torch.cat([tensors[name], torch.full((2, 9, tensors[name].shape[2]), torch.nan)], 1).requires_grad_()
        for name in ("key", "value")
    }
    found = seqkern.attention_rnn(**(tensors | padded), **options, key_lengths=lengths.int(), return_weights=True)
    assert torch.equal(found.output, expected.output)
    assert not found.weights[1, :, 5:].any()
    for grad in torch.autograd.grad(found.output.sin().sum(), padded.values()):
        assert not grad[:, 12:].any()
        assert not grad[1, 5:].any()
        assert grad.isfinite().all()


@pytest.mark.usefixtures("steady_products")
def test_the_same_bits_on_any_number_of_threads(isa):
    """Large enough for teams of workers, whose turns wait for each other."""
    for order, score, cell in (("bahdanau", "additive", "lstm"), ("luong", "dot", "gru")):
        tensors, options, state = arguments(
            cell, order, score, batch=19, steps=6, keys=33, inputs=20, hidden=130, columns=150, channels=70, outputs=90,
            dtype=torch.float32,
        )  # fmt: skip
        lengths = torch.arange(19) * 2
        before, results = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
                with poison():
                    found = seqkern.attention_rnn(
                        **leaves, **options, state=state, key_lengths=lengths, return_weights=True
                    )
                    total = found.output.sin().sum() + found.weights.square().sum() + found.context.cos().sum()
                    grads = torch.autograd.grad(total, [leaves[n] for n in ("input", "key", "value")])
                results.append([*everything(found), *grads])
        finally:
            torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), (order, score)


# ---- masks --------------------------------------------------------------------------------------------------------


def test_masks(isa):
    """Every shape that broadcasts; lengths are a mask; a step without keys has context and weights 0."""
    for order, score in itertools.product(("bahdanau", "luong"), ("additive", "dot")):
        tensors, options, _ = arguments(order=order, score=score)
        for shape in [(4,), (1, 4), (3, 4), (3, 1), (2, 1, 4), (1, 3, 4), (2, 3, 4), (2, 3, 1)]:
            visible = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.6
            found = seqkern.attention_rnn(**tensors, **options, mask=visible, return_weights=True)
            full = visible.expand(2, 3, 4)
            same = seqkern.attention_rnn(**tensors, **options, mask=full.contiguous(), return_weights=True)
            assert all(torch.equal(a, b) for a, b in zip(everything(found), everything(same), strict=True))
            assert not found.weights[~full].any()
            torch.testing.assert_close(found.weights.sum(2), full.any(2).double())
            assert not found.context[~full.any(2)].any()
        lengths = torch.tensor([4, 1])
        by_length = seqkern.attention_rnn(**tensors, **options, key_lengths=lengths)
        by_mask = seqkern.attention_rnn(**tensors, **options, mask=(torch.arange(4) < lengths[:, None])[:, None])
        torch.testing.assert_close(by_length.output, by_mask.output)


@pytest.mark.parametrize("how", ["mask", "lengths", "no keys"])
@pytest.mark.parametrize("score", ["additive", "dot"])
@pytest.mark.parametrize("order", ["bahdanau", "luong"])
def test_without_keys(how, score, order, isa):
    """Contexts, weights and the gradients of keys and values are zero, and the cell goes on."""
    tensors, options, state = arguments(order=order, score=score, keys=0 if how == "no keys" else 4)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    given = {"mask": torch.zeros(1, 1, dtype=torch.bool), "lengths": torch.zeros(2, dtype=torch.int64)}
    if how != "no keys":
        options["mask" if how == "mask" else "key_lengths"] = given[how]
    found = seqkern.attention_rnn(**leaves, **options, state=state, return_weights=True)
    assert not found.context.any()
    assert not found.weights.any()
    of_key, of_value, of_input = torch.autograd.grad(
        found.output.sin().sum() + found.context.sum(), [leaves[n] for n in ("key", "value", "input")]
    )
    assert not of_key.any()
    assert not of_value.any()
    assert of_input.any(2).all()


@pytest.mark.parametrize("score", ["additive", "dot"])
def test_a_hidden_nan_does_not_count(score, isa):
    """A key and a value that only the second sequence's last step sees."""
    tensors, options, _ = arguments(score=score, dtype=torch.float32)
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[:, :, 2] = False
    mask[1, 2, 2] = True
    for name in ("key", "value"):
        tensors[name][:, 2] = torch.nan
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    found = seqkern.attention_rnn(**leaves, **options, mask=mask)
    wrong = found.output.isnan().any(2)
    assert wrong.tolist() == [[False] * 3, [False, False, True]]
    (grad,) = torch.autograd.grad(found.output[~wrong].sin().sum(), [leaves["input"]])
    assert grad[0].isfinite().all()


# ---- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradcheck(kind):
    cell, order, score, feeding = kind
    tensors, options, state = arguments(cell, order, score, steps=2, keys=3, hidden=2, feeding=feeding)
    lengths, mask = torch.tensor([3, 2]), torch.ones(2, 3, dtype=torch.bool).tril(1)
    names, states = list(tensors), [i for i, s in enumerate(state) if s is not None]
    leaves = [t.requires_grad_() for t in (*tensors.values(), *(state[i] for i in states))]

    def function(*given):
        begin = list(state)
        for i, t in zip(states, given[len(names) :], strict=True):
            begin[i] = t
        found = seqkern.attention_rnn(
            **dict(zip(names, given, strict=False)), **options, state=begin, key_lengths=lengths, mask=mask,
            return_weights=True,
        )  # fmt: skip
        return tuple(everything(found))

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_only_what_is_needed(order, cell, isa):
    """Each tensor's gradient alone, and each result's, as the equations have them."""
    tensors, options, state = arguments(cell, order)

    def run(function, wanted):
        given = {n: t.clone().requires_grad_(n in wanted) for n, t in tensors.items()}
        found = function(**given)
        leaves = [given[n] for n in wanted]
        wants = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return [torch.autograd.grad(t.sin().sum(), leaves, **wants) for t in everything(found)]

    def ours(**given):
        return seqkern.attention_rnn(**given, **options, state=state, return_weights=True)

    def plain(**given):
        with seqkern.use_backend("reference"):
            return ours(**given)

    every, expected = run(ours, list(tensors)), run(plain, list(tensors))
    for result, exact in zip(every, expected, strict=True):
        for a, b in zip(result, exact, strict=True):
            torch.testing.assert_close(a, b)
    for index, name in enumerate(tensors):
        for result, alone in zip(every, run(ours, [name]), strict=True):
            assert torch.equal(alone[0], result[index]), name


def test_upstream_gradients(isa):
    """One that is expanded, one that is strided; a second backward pass gives the same."""
    tensors, options, state = arguments(order="luong")
    leaves = [t.requires_grad_() for t in tensors.values()]
    output = seqkern.attention_rnn(**tensors, **options, state=state).output
    for upstream in (torch.ones(()).double().expand(output.shape), draw(*reversed(output.shape)).permute(2, 1, 0)):
        plain = torch.autograd.grad(output, leaves, upstream.contiguous(), retain_graph=True)
        for _ in range(2):
            found = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


# ---- transforms, compilation, memory ------------------------------------------------------------------------------


def test_opcheck():
    forward, back = torch.ops.seqkern.attention_rnn_fwd.default, torch.ops.seqkern.attention_rnn_bwd.default
    lengths, mask = torch.tensor([4, 2]), torch.rand(2, 3, 4) < 0.7
    for cell, order, score in itertools.product(("lstm", "gru"), ("bahdanau", "luong"), ("additive", "dot")):
        t, _, (h, c, feed) = arguments(cell, order, score, dtype=torch.float32)
        x, w_feed = F.linear(t["input"], t["w_ih"][:, :3]), t["w_ih"][:, 3:]
        luong, kind = order == "luong", int(cell == "gru")
        option = {name: t.get(name) for name in ("w_query", "b_query", "w_score", "w_out", "b_out")}
        given = (x, t["key"], t["value"], h, c, feed, w_feed, t["w_hh"], t["b_hh"], *option.values(), lengths, mask)
        torch.library.opcheck(forward, (*given, 0.7, kind, luong))
        states, last, context, attended, query, weights, cells, gates = forward(*given, 0.7, kind, luong)
        upstream = (states, last if c is not None else None, context, attended if luong else None, weights)
        saved = (states, attended, query, weights, cells, gates)
        some = (option["w_query"], option["w_score"], option["w_out"], lengths, mask, 0.7, kind, luong)
        torch.library.opcheck(back, (*upstream, *given[1:8], *some, *saved))


def test_compiled(compilation):
    for order, cell in (("bahdanau", "lstm"), ("luong", "gru")):
        tensors, options, state = arguments(cell, order, dtype=torch.float32)
        leaves = [t.requires_grad_() for t in tensors.values()]

        def model(*given, names=tuple(tensors), options=options, state=state):
            found = seqkern.attention_rnn(**dict(zip(names, given, strict=True)), **options, state=state)
            return found.output * 2, found.context, found.state.h

        ours, theirs = torch.compile(model, **compilation)(*leaves), model(*leaves)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        losses = [sum(t.sin().sum() for t in results) for results in (ours, theirs)]
        torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


def test_autocast():
    for feeding in (True, False):
        tensors, options, _ = arguments(order="luong", feeding=feeding, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            found = seqkern.attention_rnn(**tensors, **options, return_weights=True)
        assert all(t.dtype == torch.bfloat16 for t in everything(found))
        cast = {name: t.bfloat16() for name, t in tensors.items()}
        torch.testing.assert_close(found.output, seqkern.attention_rnn(**cast, **options).output)


# ---- layouts and edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
def test_layouts(order, isa):
    """Every argument strided: expanded, transposed, a slice of a wider tensor."""
    tensors, options, state = arguments(order=order)
    expected = seqkern.attention_rnn(**tensors, **options, state=state, return_weights=True)

    def strided(t):
        if t is None:
            return None
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 3), torch.nan, dtype=t.dtype)
        wide[..., 1:-2:2] = t
        return wide[..., 1:-2:2]

    def sliced(t):
        if t is None:
            return None
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), torch.nan, dtype=t.dtype)
        wide[..., 1:-2] = t
        return wide[..., 1:-2]

    for change in (strided, sliced, lambda t: None if t is None else t.mT.contiguous().mT if t.dim() > 1 else t):
        found = seqkern.attention_rnn(
            **{n: change(t) for n, t in tensors.items()}, **options, state=[change(s) for s in state],
            return_weights=True,
        )  # fmt: skip
        for a, b in zip(everything(found), everything(expected), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("empty", ["batch", "steps", "inputs", "hidden", "columns", "channels", "outputs"])
@pytest.mark.parametrize("order", ["bahdanau", "luong"])
def test_empty(empty, order, isa):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tensors, options, state = arguments(order=order, **{empty: 0}, dtype=dtype)
        leaves = [t.requires_grad_() for t in (*tensors.values(), *state) if t is not None]

        def run(leaves=leaves, tensors=tensors, options=options, state=state):
            found = everything(seqkern.attention_rnn(**tensors, **options, state=state, return_weights=True))
            loss = sum(t.double().sin().sum() for t in found)
            return *found, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

        with poison():
            ours = run()
        with seqkern.use_backend("reference"):
            exact = run()
        for a, b in zip(ours, exact, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.isfinite().all()
            if dtype != torch.bfloat16:  # whose steps round more than a comparison of two rounded results allows
                torch.testing.assert_close(a, b)


def test_lengths_out_of_range():
    """As in attention: cut to the keys that there are."""
    tensors, options, _ = arguments()
    found = seqkern.attention_rnn(**tensors, **options, key_lengths=torch.tensor([-3, 99]))
    expected = seqkern.attention_rnn(**tensors, **options, key_lengths=torch.tensor([0, 4]))
    assert torch.equal(found.output, expected.output)


# ---- Triton, errors, cost -----------------------------------------------------------------------------------------


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for cell, order, score, feeding in KINDS:
            small = {"batch": 3, "steps": 3, "keys": 5, "inputs": 4, "hidden": 9, "columns": 6, "channels": 8}
            for mask in (False, True):
                case = attention_rnn_case(
                    **small, outputs=7, cell=cell, order=order, score=score, input_feeding=feeding, mask=mask
                )
                reports = check_case(case, torch.float32)
                assert all(report.passed for report in reports), (cell, order, score, [*map(str, reports)])
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            reports = check_case(attention_rnn_case(3, 3, 5, 4, 9, 6, channels=8, order="luong"), dtype)
            assert all(report.passed for report in reports), (dtype, [*map(str, reports)])
        for how in ("mask", "no keys"):
            test_without_keys(how, "additive", "luong", None)
            test_without_keys(how, "dot", "bahdanau", None)


def test_errors():
    tensors, options, state = arguments()

    def call(**changed):
        return seqkern.attention_rnn(**{**tensors, **options, "state": state, **changed})

    wrong = [
        ({"cell": "rnn"}, ValueError, 'cell must be "lstm" or "gru"'),
        ({"order": "vaswani"}, ValueError, 'order must be "bahdanau" or "luong"'),
        ({"input": tensors["input"][0]}, ValueError, "input must have 3 dimensions"),
        ({"input": 3}, TypeError, "input must be a tensor, got int"),
        ({"key": tensors["key"][:1]}, ValueError, r"key must have shape \(2, 4, 4\), got \(1, 4, 4\)"),
        ({"value": tensors["value"][:, :3]}, ValueError, r"value must have shape \(2, 4, 2\)"),
        ({"key": tensors["key"].float()}, TypeError, "key must have the input's dtype"),
        ({"w_ih": tensors["w_ih"][:, :-1]}, ValueError, r"w_ih must have shape \(12, 5\), got \(12, 4\)"),
        ({"w_hh": tensors["w_hh"][:-1]}, ValueError, r"w_hh must have shape \(12, 3\)"),
        ({"b_ih": tensors["b_ih"][:-1]}, ValueError, "b_ih must have shape"),
        ({"w_query": None}, ValueError, "additive scores"),
        ({"w_query": None, "w_score": None}, ValueError, r"key must have shape \(2, 4, 3\), as the state has"),
        ({"w_query": tensors["w_query"][1:]}, ValueError, "w_query must have shape"),
        ({"w_score": tensors["w_score"][1:]}, ValueError, r"w_score must have shape \(4,\)"),
        ({"w_out": torch.zeros(2, 5).double()}, ValueError, 'w_out is of order="luong"'),
        ({"order": "luong"}, ValueError, "needs w_out"),
        ({"b_out": torch.zeros(2).double()}, ValueError, "b_out needs w_out"),
        ({"input_feeding": False}, ValueError, "input_feeding=False is of"),
        ({"state": state[:2]}, TypeError, r"state must be \(h, c or None, feed or None\), got 2"),
        ({"state": (state[0], None, None)}, ValueError, r"state.c is there for cell=\"lstm\", and only then, got None"),
        ({"state": (state[0], state[1], state[0])}, ValueError, "state.feed is there for"),
        ({"state": (state[0][:1], state[1], None)}, ValueError, r"state.h must have shape \(2, 3\)"),
        ({"key_lengths": torch.ones(2)}, TypeError, "key_lengths must be int32 or int64"),
        ({"key_lengths": torch.ones(3).long()}, ValueError, r"key_lengths must have shape \(2,\)"),
        ({"key_lengths": [1, 2]}, TypeError, "key_lengths must be a tensor or None, got list"),
        ({"mask": torch.zeros(2, 3, 4)}, TypeError, "mask must be bool"),
        ({"mask": torch.zeros(2, 2, 4).bool()}, ValueError, r"mask must broadcast to \(2, 3, 4\)"),
        ({"input": tensors["input"].to("meta")}, ValueError, "must be on the input's device"),
    ]
    for changed, error, message in wrong:
        with pytest.raises(error, match=message):
            call(**changed)


def test_op_checks_its_arguments():
    """The op itself, called without the function."""
    t, _, (h, c, _) = arguments(dtype=torch.float32)
    x, w_feed = F.linear(t["input"], t["w_ih"][:, :3]), t["w_ih"][:, 3:]
    good = [x, t["key"], t["value"], h, c, None, w_feed, t["w_hh"], t["b_hh"], t["w_query"], t["b_query"], t["w_score"],
            None, None, None, None, 1.0, 0, False]  # fmt: skip
    torch.ops.seqkern.attention_rnn_fwd(*good)
    wrong = [
        (0, x[:, :, 1:], "x_gates"), (1, t["key"][:, :, 1:], "w_query"), (2, t["value"][:1], "value"),
        (3, h[:, 1:], "w_hh"), (4, None, "c is for LSTM"), (5, h, "feed is for Luong"), (6, w_feed[:, 1:], "w_feed"),
        (7, t["w_hh"][1:], "w_hh"), (9, None, "w_query may be left out"), (12, t["w_hh"], "w_out is for Luong"),
        (17, 2, "cell must be"), (14, torch.ones(3).long(), "key_lengths"), (15, torch.ones(2, 3, 4), "mask"),
    ]  # fmt: skip
    for index, value, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.seqkern.attention_rnn_fwd(*[value if i == index else g for i, g in enumerate(good)])


def test_cost():
    """Twice the multiply-adds of all weights for every step, and attention."""
    found = cost(2, 3, 4, 5, 6, 7, 8, torch.float32, outputs=9)
    weights = 24 * (5 + 9 + 6) + 7 * 6 + 9 * (8 + 6)
    assert found.flops == 2 * 2 * 3 * weights + 2 * 3 * 4 * (4 * 7 + 2 * 8)
    assert cost(2, 3, 4, 5, 6, 7, 8, torch.float32, outputs=9, backward=True).flops == 3 * found.flops
    assert cost(2, 3, 4, 5, 6, 7, 8, torch.float64).bytes == 2 * cost(2, 3, 4, 5, 6, 7, 8, torch.float32).bytes


def test_reference_is_the_textbooks():
    """One step of each order, written out."""
    t, _, (h, c, feed) = arguments(order="luong", steps=1)
    x = F.linear(t["input"], t["w_ih"][:, :3], t["b_ih"])
    found = reference.attention_rnn(
        x, t["key"], t["value"], h, c, feed, t["w_ih"][:, 3:], t["w_hh"], t["b_hh"], t["w_query"], t["b_query"],
        t["w_score"], t["w_out"], t["b_out"], None, None, 1.0, True,
    )  # fmt: skip
    state, memory = torch.lstm_cell(
        torch.cat([t["input"][:, 0], feed], 1), (h, c), t["w_ih"], t["w_hh"], t["b_ih"], t["b_hh"]
    )
    query = F.linear(state, t["w_query"], t["b_query"])
    alpha = (torch.tanh(query[:, None] + t["key"]) @ t["w_score"]).softmax(1)
    context = torch.einsum("bk,bkm->bm", alpha, t["value"])
    attended = torch.tanh(torch.cat([context, state], 1) @ t["w_out"].t() + t["b_out"])
    for a, b in zip(found, (state[:, None], memory, context[:, None], attended[:, None], alpha[:, None]), strict=True):
        torch.testing.assert_close(a, b)
