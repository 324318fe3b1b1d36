"""Recurrent networks in torch's surroundings: modules, packed sequences, compile, export, autocast, errors."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import seqkern

KINDS = {"LSTM": {}, "GRU": {}, "RNN": {}, "RNN relu": {"nonlinearity": "relu"}, "LSTM projected": {"proj_size": 3}}
OPS = torch.ops.seqkern


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def pair(kind, *arguments, **options):
    """Ours and torch's, with the same weights."""
    name, options = kind.split()[0], KINDS[kind] | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dropout without a second layer
        theirs = getattr(torch.nn, name)(*arguments, **options)
        ours = getattr(seqkern.nn, name)(*arguments, **options)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def state_for(model, batch=3, dtype=torch.float32):
    runs = model.num_layers * (2 if model.bidirectional else 1)
    h = torch.randn(runs, batch, model.proj_size or model.hidden_size, dtype=dtype)
    return (h, torch.randn(runs, batch, model.hidden_size, dtype=dtype)) if model.mode == "LSTM" else h


def flat(result):
    """Tensors of outputs and states, packed ones too."""
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def over_state(function, state):
    return tuple(map(function, state)) if isinstance(state, tuple) else function(state)


def results(model, *inputs):
    """Results and the gradients of the weights."""
    torch.manual_seed(1)  # the same units are dropped
    found = [t for t in flat(model(*inputs)) if t.is_floating_point()]
    return [*found, *torch.autograd.grad(sum(t.sin().sum() for t in found), list(model.parameters()))]


ARGUMENTS = [
    {}, {"bias": False}, {"batch_first": True}, {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 3, "dropout": 0.4}, {"num_layers": 2, "dropout": 0.9, "bidirectional": True},
    {"dtype": torch.float64},
]  # fmt: skip


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_module_is_a_drop_in(kind, arguments, training, batched):
    ours, theirs = pair(kind, 4, 7, **arguments)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    x = torch.randn(5, 5, 4, dtype=arguments.get("dtype"))
    state = state_for(ours, 5, arguments.get("dtype"))
    if not batched:
        x, state = x[:, 0], over_state(lambda t: t[:, 0], state)
    for given in ([], [state]):
        torch.testing.assert_close(
            *(results(model.train(training), x, *given) for model in (ours, theirs)), rtol=1e-5, atol=1e-5
        )


LENGTHS = {"sorted": [6, 6, 4, 1], "unsorted": [3, 6, 1, 6, 2], "all the same": [5, 5, 5], "one": [4]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("arguments", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
@pytest.mark.parametrize("with_state", [True, False])
def test_packed_sequences(kind, lengths, arguments, with_state):
    ours, theirs = pair(kind, 4, 7, dtype=torch.float64, **arguments)
    x = torch.randn(len(lengths), max(lengths), 4, dtype=torch.float64)
    is_sorted = lengths == sorted(lengths, reverse=True)
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=is_sorted)
    given = [state_for(ours, len(lengths), torch.float64)] if with_state else []
    torch.testing.assert_close(results(ours, packed, *given), results(theirs, packed, *given))
    (output, _), (expected, _) = ours(packed, *given), theirs(packed, *given)
    assert isinstance(output, PackedSequence)
    assert torch.equal(output.batch_sizes, expected.batch_sizes)
    for name in ("sorted_indices", "unsorted_indices"):
        mine, other = getattr(output, name), getattr(expected, name)
        assert (mine is None and other is None) or torch.equal(mine, other)


def test_packed_input_has_a_gradient():
    ours, theirs = pair("LSTM", 4, 7, dtype=torch.float64)
    grads = []
    for model in (ours, theirs):
        leaves = [torch.sin(torch.arange(4 * n, dtype=torch.float64)).view(n, 4).requires_grad_() for n in (3, 5, 1)]
        output, (h_n, _) = model(pack_sequence(leaves, enforce_sorted=False))
        grads.append(torch.autograd.grad(output.data.sum() + h_n.cos().sum(), leaves))
    torch.testing.assert_close(*grads)


def test_packed_sequences_with_options():
    model = seqkern.nn.LSTM(4, 7, batch_first=True, bidirectional=True)
    x, resets = torch.randn(3, 6, 4), torch.rand(3, 6) < 0.3
    lengths = torch.tensor([2, 6, 4])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output, state, cells = model(packed, resets=resets, return_all_c=True)
    expected, expected_state, expected_cells = model(x, lengths=lengths, resets=resets, return_all_c=True)
    assert all(map(torch.equal, state, expected_state))
    for mine, other in ((output, expected), (cells, expected_cells)):
        padded, _ = torch.nn.utils.rnn.pad_packed_sequence(mine, batch_first=True)
        assert torch.equal(padded, other)


@pytest.mark.parametrize("form", [tuple, list])
def test_the_state_may_be_a_list(form):
    """As torch takes it."""
    ours, theirs = pair("LSTM", 4, 7)
    x, state = torch.randn(5, 3, 4), form(state_for(ours))
    packed = pack_padded_sequence(x, torch.tensor([2, 5, 3]), enforce_sorted=False)
    for given in (x, packed):
        torch.testing.assert_close(flat(ours(given, state)), flat(theirs(given, state)))
    one = form(t[:, 0] for t in state)
    torch.testing.assert_close(ours(x[:, 0], one), ours(x[:, 0], tuple(one)))


CELLS = {"LSTMCell": {}, "GRUCell": {}, "RNNCell": {}, "RNNCell relu": {"nonlinearity": "relu"}}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_cell_module_is_a_drop_in(name, bias, batched):
    kind = name.split()[0]
    theirs = getattr(torch.nn, kind)(4, 7, bias, **CELLS[name])
    ours = getattr(seqkern.nn, kind)(4, 7, bias, **CELLS[name])
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x, h, c = (torch.randn(3, n) if batched else torch.randn(n) for n in (4, 7, 7))
    for state in ([], [(h, c) if kind == "LSTMCell" else h]):
        torch.testing.assert_close(results(ours, x, *state), results(theirs, x, *state))


def test_backward_in_eval_mode(kind):
    ours, theirs = pair(kind, 4, 7, 2, dropout=0.5)
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(results(ours.eval(), x), results(theirs.eval(), x))


def test_functional_call_copies_and_flatten_parameters(kind):
    model, theirs = pair(kind, 4, 7, 2)
    x = torch.randn(5, 3, 4)
    twice = {name: 2 * p for name, p in model.named_parameters()}
    theirs.load_state_dict(twice)
    torch.testing.assert_close(torch.func.functional_call(model, twice, (x,)), theirs(x))
    model.flatten_parameters()
    expected = flat(model(x))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to(torch.float64).to(torch.float32)):
        assert all(map(torch.equal, flat(other(x)), expected))


def test_a_replaced_or_parametrised_weight_is_used():
    model = seqkern.nn.GRU(4, 7)
    x = torch.randn(5, 3, 4)
    model.weight_hh_l0 = torch.nn.Parameter(torch.zeros(21, 7))
    expected = seqkern.gru(x, None, list(model.parameters()))[0]
    torch.testing.assert_close(model(x)[0], expected)
    torch.nn.utils.parametrizations.weight_norm(model, "weight_ih_l0")
    torch.testing.assert_close(model(x)[0], expected)


# ---- the options' parameters --------------------------------------------------------------------------------------


def test_options_add_their_parameters_and_no_others():
    plain = seqkern.nn.LSTM(4, 7, 2, bidirectional=True)
    model = seqkern.nn.LSTM(4, 7, 2, bidirectional=True, layer_norm=True, peephole=True, dtype=torch.float64)
    added = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in dict(plain.named_parameters())}
    expected = {}
    for end in ("l0", "l0_reverse", "l1", "l1_reverse"):
        expected[f"peephole_{end}"] = (3, 7)
        for side, size in (("ih", 28), ("hh", 28), ("c", 7)):
            expected |= {f"layer_norm_{side}_{end}.{part}": (size,) for part in ("weight", "bias")}
    assert added == expected
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert torch.equal(model.layer_norm_c_l1.weight, torch.ones(7, dtype=torch.float64))
    model.reset_parameters()
    assert torch.equal(model.layer_norm_hh_l0.weight, torch.ones(28, dtype=torch.float64))
    assert model.peephole_l0.abs().max() > 0
    assert "layer_norm=True, peephole=True" in repr(model)


def test_module_options_are_the_functions():
    x, resets = torch.randn(6, 3, 4), torch.rand(6, 3) < 0.3
    model = seqkern.nn.LSTM(4, 7, layer_norm=True, peephole=True, zoneout=(0.1, 0.2), recurrent_dropout=0.3)
    norms = [p for side in ("ih", "hh", "c") for p in getattr(model, f"layer_norm_{side}_l0").parameters()]
    options = {"norms": norms, "peepholes": [model.peephole_l0], "zoneout": (0.1, 0.2), "recurrent_dropout": 0.3}
    options |= {"resets": resets, "lengths": [6, 2, 3], "return_all_c": True}
    for training in (True, False):
        torch.manual_seed(3)
        ours = model.train(training)(x, lengths=[6, 2, 3], resets=resets, return_all_c=True)
        torch.manual_seed(3)
        expected = seqkern.lstm(x, None, model.all_weights[0], training=training, **options)
        assert all(map(torch.equal, flat(ours), flat(expected)))


def test_unbatched_options():
    model = seqkern.nn.GRU(4, 7, bidirectional=True, batch_first=True)
    x, resets = torch.randn(6, 4), torch.rand(6) < 0.3
    output, h_n = model(x, lengths=4, resets=resets)
    expected, expected_n = model(x[None], lengths=[4], resets=resets[None])
    assert torch.equal(output, expected[0])
    assert torch.equal(h_n, expected_n[:, 0])


# ---- compile, export, opcheck -------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["lstm", "gru", "rnn_tanh"])
def test_compile_fullgraph(function, compilation):
    if function != "lstm" and compilation["backend"] == "inductor":
        compilation["backend"] = "aot_eager"  # the same node in the same places
    groups = {"lstm": 4, "gru": 3, "rnn_tanh": 1}[function]
    weights = [torch.randn(s).requires_grad_() for s in ((7 * groups, 4), (7 * groups, 7), (7 * groups, 14))]
    weights = [weights[0], weights[1], weights[0].cos(), weights[1].sin(), *[weights[2], weights[1]] * 2]
    weights = [w.detach().requires_grad_() for w in weights]

    def call(x, lengths, *weights):
        output, state = getattr(seqkern, function)(
            x, None, list(weights), lengths=lengths, num_layers=2, bidirectional=True
        )
        return output.sin().sum() + sum(t.cos().sum() for t in flat(state))

    compiled = torch.compile(call, **compilation)
    for steps, batch in ((5, 3), (6, 4)) if compilation["dynamic"] else ((5, 3),):
        leaves = [torch.randn(steps, batch, 4).requires_grad_(), *weights]
        lengths = torch.tensor([5, 2, 1, 3][:batch])
        output, expected = (f(leaves[0], lengths, *weights) for f in (compiled, call))
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad(output, leaves), torch.autograd.grad(expected, leaves))


def test_compile_with_every_option():
    torch._dynamo.reset()
    model = seqkern.nn.LSTM(4, 7, layer_norm=True, peephole=True, zoneout=0.2, recurrent_dropout=0.3)
    x, resets = torch.randn(6, 3, 4), torch.rand(6, 3) < 0.3
    norms = [p for side in ("ih", "hh", "c") for p in getattr(model, f"layer_norm_{side}_l0").parameters()]
    weights, peepholes = model.all_weights[0], [model.peephole_l0]

    def call(x, lengths, seed):
        return seqkern.lstm(
            x, None, weights, norms=norms, peepholes=peepholes, zoneout=(0.1, 0.2),
            recurrent_dropout=0.3, resets=resets, lengths=lengths, return_all_c=True, seed=seed, training=True,
            recompute=True,
        )  # fmt: skip

    arguments = (x, torch.tensor([6, 2, 3]), torch.tensor(5))
    ours, expected = (f(*arguments) for f in (torch.compile(call, backend="aot_eager", fullgraph=True), call))
    torch.testing.assert_close(ours, expected)
    grads = [torch.autograd.grad(sum(t.sum() for t in flat(r)), list(model.parameters())) for r in (ours, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell"])
def test_compile_modules(name):
    """torch.compile refuses subclasses of torch.nn.LSTM in a whole graph unless allow_rnn says otherwise."""
    torch._dynamo.reset()
    model = getattr(seqkern.nn, name)(4, 7)
    x = torch.randn(3, 4) if name.endswith("Cell") else torch.randn(5, 3, 4)
    backend = "inductor" if name == "LSTM" else "aot_eager"
    with torch._dynamo.config.patch(allow_rnn=True):
        whole = torch.compile(model, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(whole, model(x))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_export_keeps_one_node_a_layer(name, layer_norm):
    model = getattr(seqkern.nn, name)(4, 7, 2, batch_first=True, bidirectional=True, layer_norm=layer_norm)
    dims = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("steps", min=2, max=64)}

    class WithLengths(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, lengths):
            return self.model(x, lengths=lengths)

    program = torch.export.export(
        WithLengths(), (torch.randn(3, 5, 4), torch.tensor([5, 1, 2])), dynamic_shapes=(dims, {0: dims[0]})
    )
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(OPS.rnn_fwd.default) == 2
    x, lengths = torch.randn(8, 9, 4), torch.arange(1, 9)
    torch.testing.assert_close(program.module()(x, lengths), model(x, lengths=lengths))


def op_case(cell, steps, batch, directions, options):
    """Arguments up to the cell, with every option or none; what is kept past an end is undefined: full lengths."""
    groups, hidden, width = (4, 3, 1, 1)[cell], 6, 4 if options and cell == 0 else 6

    def tensors(*shape, **kind):
        return [torch.randn(shape, **kind) for _ in range(directions)]

    def some(wanted, *shape):
        return tensors(*shape) if wanted else []

    inputs = directions * groups * hidden if options else 5
    x, h0 = torch.randn(steps, batch, inputs), torch.randn(directions, batch, width)
    c0 = torch.randn(directions, batch, hidden) if cell == 0 else None
    lists = [
        some(not options, groups * hidden, 5), tensors(groups * hidden, width), some(not options, groups * hidden),
        tensors(groups * hidden), some(options and cell == 0, width, hidden), some(options and cell == 0, 3, hidden),
        some(options, 2 * groups * hidden + (2 * hidden if cell == 0 else 0)),
    ]  # fmt: skip
    rest = [None] * 4
    if options:
        rest = [
            torch.full((batch,), steps),
            torch.rand(steps, batch) < 0.5,
            torch.rand_like(h0),
            torch.tensor(7),
        ]
    return [x, h0, c0, *lists, *rest, 0.2 * options, 0.1 * options * (cell == 0), 1e-5, cell]


ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(("cell", "steps", "batch"), [*[(c, 3, 2) for c in range(4)], (0, 3, 0), (1, 0, 2)])
@pytest.mark.parametrize("options", [False, True])
def test_opcheck(cell, steps, batch, options):
    directions = 2 if batch else 1
    arguments = op_case(cell, steps, batch, directions, options)
    for keep in (True, False):
        torch.library.opcheck(OPS.rnn_fwd.default, (*arguments, keep))
    output, h_n, c_n, cells, *kept = OPS.rnn_fwd(*arguments, True)
    grads = [torch.ones(()).expand_as(output), h_n, c_n if cell == 0 else None, cells if cell == 0 else None]
    needs = [(True, True), (False, False)] if steps and batch else [(True, True)]
    for need_input, need_weights in needs:
        for saved in (kept, [t.new_empty(0) for t in kept]):
            arguments_of = (*grads, *arguments, output, cells, *saved, need_input, need_weights)
            # Traced, which takes longest, with what is kept and without, for all gradients and for none.
            traced = (saved is kept) == need_input or len(needs) == 1
            torch.library.opcheck(
                OPS.rnn_bwd.default, arguments_of, test_utils=ALL_CHECKS if traced else ALL_CHECKS[:-1]
            )


@pytest.mark.parametrize("batch", [3, 0])
@pytest.mark.parametrize("cell", range(4))
def test_opcheck_of_cells(cell, batch):
    gates = [torch.randn(batch, (4, 3, 1, 1)[cell] * 6) for _ in range(2)]
    h, c = torch.randn(batch, 6), torch.randn(batch, 6) if cell == 0 else None
    torch.library.opcheck(OPS.rnn_cell_fwd.default, (*gates, h, c, cell))
    h_new, c_new, activated = OPS.rnn_cell_fwd(*gates, h, c, cell)
    for grad_c in (c_new, None) if cell == 0 else (None,):
        arguments = (h_new, grad_c, h, c, c_new if cell == 0 else None, activated, cell)
        torch.library.opcheck(OPS.rnn_cell_bwd.default, arguments)


# ---- autocast -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_state", [True, False])
def test_autocast(kind, with_state):
    """Everything in its dtype, as torch on CUDA; torch on CPU leaves some cells out, and oneDNN some processors."""
    ours, _ = pair(kind, 4, 7)
    x = torch.randn(5, 3, 4)
    given = [state_for(ours)] if with_state else []
    low = copy.deepcopy(ours).bfloat16()
    low_given = [over_state(lambda t: t.bfloat16(), s) for s in given]
    with torch.autocast("cpu", torch.bfloat16):
        found = flat(ours(x, *given))
        assert ours.double()(x.double())[0].dtype == torch.float64
    torch.testing.assert_close(found, flat(low(x.bfloat16(), *low_given)), rtol=0, atol=0)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("with_state", [True, False])
def test_autocast_of_cells_as_torch(name, with_state):
    kind = name.split()[0]
    x, h, c = (torch.randn(3, n) for n in (4, 7, 7))
    state = [(h, c) if kind == "LSTMCell" else h] if with_state else []
    models = (getattr(module, kind)(4, 7, **CELLS[name]) for module in (seqkern.nn, torch.nn))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = ([t.dtype for t in flat(model(x, *state))] for model in models)
    assert ours == theirs


def test_float64_stays_out_of_autocast():
    x, model = torch.randn(5, 3, 4, dtype=torch.float64), seqkern.nn.LSTM(4, 7, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x)[0].dtype == torch.float64
        with pytest.raises(TypeError, match="must have the input's dtype torch.float64, got torch.float32"):
            seqkern.lstm(x, None, [p.float() for p in model.parameters()])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_gpu_autocast_with_norms(name):
    """On a GPU layer norms come in float32 under autocast, the network's own not excepted."""
    model, x = getattr(seqkern.nn, name)(4, 7, layer_norm=True).cuda(), torch.randn(5, 3, 4, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        output, state = model(x)
    assert {t.dtype for t in flat([output, state])} == {torch.bfloat16}
    torch.testing.assert_close(output.float(), model(x)[0], atol=0.05, rtol=0.05)


# ---- errors -------------------------------------------------------------------------------------------------------

X, H0, C0 = torch.randn(5, 3, 4), torch.randn(1, 3, 7), torch.randn(1, 3, 7)
WEIGHTS = [t.detach() for t in torch.nn.LSTM(4, 7).parameters()]
GRU_WEIGHTS = [t.detach() for t in torch.nn.GRU(4, 7).parameters()]
NORMS = [torch.ones(28)] * 4 + [torch.ones(7)] * 2


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "lstm: input must be a tensor, got list", lambda: seqkern.lstm([1.0], None, WEIGHTS)),
        (TypeError, "lstm: input must be float64.*got torch.int64", lambda: seqkern.lstm(X.long(), None, WEIGHTS)),
        (ValueError, r"lstm: input must have 3 dimensions, got shape \(3, 4\)",
         lambda: seqkern.lstm(X[0], None, WEIGHTS)),
        (TypeError, "lstm: weights must be a list of tensors, got Tensor", lambda: seqkern.lstm(X, None, X)),
        (ValueError, r"lstm: weights must hold 8 tensors, or 4 without biases \(10 or 6 with projections\), for 2 "
         "layers in 1 directions, got 5", lambda: seqkern.lstm(X, None, [*WEIGHTS, WEIGHTS[0]], num_layers=2)),
        (ValueError, "gru: weights must hold 4 tensors, or 2 without biases, for 1 layers in 1 directions, got 5",
         lambda: seqkern.gru(X, None, [*GRU_WEIGHTS, WEIGHTS[0]])),
        (ValueError, r"lstm: weights\[0\] \(w_ih\) must have shape \(28, 5\), got \(28, 4\)",
         lambda: seqkern.lstm(torch.randn(5, 3, 5), None, WEIGHTS)),
        (ValueError, r"gru: weights\[0\] \(w_ih\) must have shape \(21, 4\), got \(28, 4\)",
         lambda: seqkern.gru(X, None, WEIGHTS)),
        (ValueError, r"lstm: weights\[3\] \(b_hh\) must have shape \(28,\), got \(27,\)",
         lambda: seqkern.lstm(X, None, [*WEIGHTS[:3], torch.randn(27)])),
        (ValueError, "lstm: a projection must be narrower than the hidden size 7, not 0, got 7",
         lambda: seqkern.lstm(X, None, [*WEIGHTS, torch.randn(7, 7)])),
        (ValueError, r"lstm: weights\[0\] \(w_ih\) must have shape \(32, 4\), got \(28, 4\)",
         lambda: seqkern.lstm(X, None, [*WEIGHTS, torch.randn(7, 8)])),
        (TypeError, r"lstm: weights\[1\] \(w_hh\) must have the input's dtype torch.float32, got torch.float64",
         lambda: seqkern.lstm(X, None, [WEIGHTS[0], WEIGHTS[1].double(), *WEIGHTS[2:]])),
        (ValueError, r"lstm: weights\[2\] \(b_ih\) must be on the input's device cpu, got meta",
         lambda: seqkern.lstm(X, None, [*WEIGHTS[:2], WEIGHTS[2].to("meta"), WEIGHTS[3]])),
        (ValueError, r"lstm: hx\[0\] must have shape \(1, 3, 7\), got \(1, 2, 7\)",
         lambda: seqkern.lstm(X, (H0[:, :2], C0), WEIGHTS)),
        (ValueError, r"lstm: hx\[1\] must have 3 dimensions, got shape \(3, 7\)",
         lambda: seqkern.lstm(X, (H0, C0[0]), WEIGHTS)),
        (TypeError, r"lstm: hx\[1\] must have the input's dtype", lambda: seqkern.lstm(X, (H0, C0.double()), WEIGHTS)),
        (TypeError, r"lstm: hx must be a pair of tensors \(h, c\), got Tensor", lambda: seqkern.lstm(X, H0, WEIGHTS)),
        (TypeError, "gru: hx must be a tensor, got tuple", lambda: seqkern.gru(X, (H0, C0), GRU_WEIGHTS)),
        (ValueError, r"gru: hx must have shape \(1, 3, 7\), got \(1, 2, 7\)",
         lambda: seqkern.gru(X, H0[:, :2], GRU_WEIGHTS)),
        (ValueError, "lstm: dropout must be a probability.*1.5", lambda: seqkern.lstm(X, None, WEIGHTS, dropout=1.5)),
        (TypeError, "lstm: dropout must be a probability, got str",
         lambda: seqkern.lstm(X, None, WEIGHTS, dropout="1")),
        (ValueError, "lstm: recurrent_dropout must be a probability.*-1",
         lambda: seqkern.lstm(X, None, WEIGHTS, recurrent_dropout=-1)),
        (ValueError, r"lstm: zoneout\[1\] must be a probability.*2",
         lambda: seqkern.lstm(X, None, WEIGHTS, zoneout=(0.1, 2))),
        (ValueError, r"lstm: zoneout must be a probability or a pair \(of h, of c\), got 3 of them",
         lambda: seqkern.lstm(X, None, WEIGHTS, zoneout=(0.1, 0.2, 0.3))),
        (ValueError, r"gru: zoneout\[1\] must be 0, there is no cell state, got 0.2",
         lambda: seqkern.gru(X, None, GRU_WEIGHTS, zoneout=(0.1, 0.2))),
        (ValueError, "lstm: num_layers must be at least 1, got 0",
         lambda: seqkern.lstm(X, None, WEIGHTS, num_layers=0)),
        (ValueError, r"lstm: lengths must have shape \(3,\), the batch size, got \(2,\)",
         lambda: seqkern.lstm(X, None, WEIGHTS, lengths=[5, 4])),
        (ValueError, "lstm: lengths must be between 0 and 5, the steps, got 6 for sequence 1",
         lambda: seqkern.lstm(X, None, WEIGHTS, lengths=torch.tensor([5, 6, 0]))),
        (ValueError, r"lstm: lengths must be between 0 and 5, the steps, got \[5, 6, 0\]",
         lambda: seqkern.lstm(X.to("meta"), None, [w.to("meta") for w in WEIGHTS], lengths=[5, 6, 0])),
        (TypeError, "lstm: lengths must be int32 or int64, got torch.float32",
         lambda: seqkern.lstm(X, None, WEIGHTS, lengths=torch.ones(3))),
        (TypeError, r"lstm: lengths must be whole numbers, got \[1.5, 2, 3\]",
         lambda: seqkern.lstm(X, None, WEIGHTS, lengths=[1.5, 2, 3])),
        (TypeError, "lstm: lengths must be a tensor or a sequence of numbers, got str",
         lambda: seqkern.lstm(X, None, WEIGHTS, lengths="543")),
        (ValueError, r"lstm: resets must have shape \(5, 3\), got \(3, 5\)",
         lambda: seqkern.lstm(X, None, WEIGHTS, resets=torch.ones(3, 5, dtype=torch.bool))),
        (TypeError, "lstm: resets must be bool, got torch.float32",
         lambda: seqkern.lstm(X, None, WEIGHTS, resets=torch.ones(5, 3))),
        (ValueError, "lstm: norms must hold 6 tensors for each of the 1 layers and directions, 6, got 4",
         lambda: seqkern.lstm(X, None, WEIGHTS, norms=NORMS[:4])),
        (ValueError, r"lstm: norms\[4\] \(norm_c weight\) must have shape \(7,\), got \(28,\)",
         lambda: seqkern.lstm(X, None, WEIGHTS, norms=[*NORMS[:4], NORMS[0], NORMS[5]])),
        (ValueError, "lstm: peepholes must hold a tensor for each of the 1 layers and directions, got 2",
         lambda: seqkern.lstm(X, None, WEIGHTS, peepholes=[torch.ones(3, 7)] * 2)),
        (ValueError, r"lstm: peepholes\[0\] must have shape \(3, 7\), got \(3, 6\)",
         lambda: seqkern.lstm(X, None, WEIGHTS, peepholes=[torch.ones(3, 6)])),
        (TypeError, "lstm: seed must be a whole number, a tensor or None, got float",
         lambda: seqkern.lstm(X, None, WEIGHTS, seed=0.5)),
        (ValueError, r"lstm: seed must have one element, got shape \(2,\)",
         lambda: seqkern.lstm(X, None, WEIGHTS, seed=torch.zeros(2, dtype=torch.int64))),
        (TypeError, "lstm: seed must be int64, got torch.float32",
         lambda: seqkern.lstm(X, None, WEIGHTS, seed=torch.tensor(1.0))),
        (ValueError, "lstm: seed must fit 64 bits", lambda: seqkern.lstm(X, None, WEIGHTS, seed=2**63)),
        (ValueError, r"lstm_cell: input must have 2 dimensions, got shape \(5, 3, 4\)",
         lambda: seqkern.lstm_cell(X, (H0[0], C0[0]), *WEIGHTS)),
        (ValueError, r"lstm_cell: hx\[1\] must have shape \(3, 7\), got \(2, 7\)",
         lambda: seqkern.lstm_cell(X[0], (H0[0], C0[0, :2]), *WEIGHTS)),
        (ValueError, r"gru_cell: hx must have shape \(3, 7\), got \(2, 7\)",
         lambda: seqkern.gru_cell(X[0], H0[0, :2], *GRU_WEIGHTS)),
        (TypeError, "rnn_tanh_cell: hx must be a tensor, got NoneType",
         lambda: seqkern.rnn_tanh_cell(X[0], None, torch.ones(7, 4), torch.ones(7, 7))),
        (ValueError, r"lstm_cell: w_ih must have shape \(28, 3\)",
         lambda: seqkern.lstm_cell(X[0, :, :3], (H0[0], C0[0]), *WEIGHTS)),
        (TypeError, "lstm_cell: b_hh must have the input's dtype torch.float32, got torch.bfloat16",
         lambda: seqkern.lstm_cell(X[0], (H0[0], C0[0]), *WEIGHTS[:3], WEIGHTS[3].bfloat16())),
        (ValueError, "LSTM: lengths must be None beside a packed sequence",
         lambda: seqkern.nn.LSTM(4, 7)(pack_padded_sequence(X, torch.tensor([5, 4, 3])), lengths=[5, 4, 3])),
        (ValueError, "LSTM: input must have 2 or 3 dimensions", lambda: seqkern.nn.LSTM(4, 7)(X[None])),
        (ValueError, r"LSTM: hx\[0\] must have 2 dimensions beside an input without a batch",
         lambda: seqkern.nn.LSTM(4, 7)(X[:, 0], (H0, C0))),
        (ValueError, "GRU: hx must have 2 dimensions beside an input without a batch",
         lambda: seqkern.nn.GRU(4, 7)(X[:, 0], H0)),
        (ValueError, r"LSTM: input's last dimension must be input_size = 4, got \(5, 3, 7\)",
         lambda: seqkern.nn.LSTM(4, 7)(torch.randn(5, 3, 7))),
        (ValueError, "LSTMCell: input's last dimension must be input_size = 4",
         lambda: seqkern.nn.LSTMCell(4, 7)(torch.randn(3, 7))),
        (TypeError, r"LSTM: hx\[1\] must be a tensor, got list",
         lambda: seqkern.nn.LSTM(4, 7)(X[:, 0], (H0[:, 0], [0.0]))),
        (ValueError, "GRUCell: input must have 1 or 2 dimensions", lambda: seqkern.nn.GRUCell(4, 7)(X)),
        (TypeError, "LSTMCell: hx must be a pair of tensors.*got 3 of them",
         lambda: seqkern.nn.LSTMCell(4, 7)(X[0, 0], (H0, C0, C0))),
        (ValueError, "GRU: zoneout must be a probability.*1.5", lambda: seqkern.nn.GRU(4, 7, zoneout=1.5)),
        (ValueError, "Unknown nonlinearity 'cos'", lambda: seqkern.nn.RNN(4, 7, nonlinearity="cos")),
        (ValueError, "proj_size has to be smaller than hidden_size", lambda: seqkern.nn.LSTM(4, 7, proj_size=7)),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, words, call):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("input must have 3 dimensions, got 2", {0: X[0]}),
        ("input must be float64", {0: X.int()}),
        ("c0 must have size 3 in dimension 1, got 2", {2: C0[:, :2]}),
        ("w_ih must have size 4 in dimension 1, got 3", {3: [WEIGHTS[0][:, :3]]}),
        ("w_hh must have ScalarType", {4: [WEIGHTS[1].double()]}),
        ("b_ih and b_hh must both be given", {6: []}),
        ("w_hh must have one tensor for each of 1 directions, got 2", {4: WEIGHTS[1:2] * 2}),
        ("lengths must be between 0 and 5", {10: torch.tensor([5, 6, 1])}),
        ("lengths must be between 0 and 5", {10: torch.tensor([5, -1, 1])}),
        ("resets must have size 5 in dimension 0, got 4", {11: torch.ones(4, 3, dtype=torch.bool)}),
        ("recurrent_mask must have size 7 in dimension 2, got 6", {12: torch.ones(1, 3, 6)}),
        ("norm must have size 70 in dimension 0, got 56", {9: [torch.ones(56)]}),
        ("peephole must have size 3 in dimension 0, got 2", {8: [torch.ones(2, 7)]}),
        ("cell must be", {17: 6}),
    ],
)
def test_the_op_itself_guards_its_pointers(words, change):
    lists = [[w] for w in WEIGHTS] + [[]] * 3
    arguments = dict(enumerate([X, H0, C0, *lists, *[None] * 4, 0.0, 0.0, 1e-5, 0, True])) | change
    with pytest.raises(RuntimeError, match=f"rnn_fwd: {words}"):
        OPS.rnn_fwd(*arguments.values())


# ---- what a packed sequence and an input without a batch are asked before they are rearranged ---------------------

PACKED = pack_sequence([torch.randn(n, 4) for n in (2, 3, 1)], enforce_sorted=False)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "hx must have the batch size 3", (PACKED, torch.randn(1, 5, 5))),
        (ValueError, "hx must have the batch size 3", (PACKED, torch.randn(1, 2, 5))),
        (ValueError, "hx must have 3 dimensions", (PACKED, torch.randn(5))),
        (ValueError, r"resets must have shape \(3, 3\), got \(3, 7\)", (PACKED, None, torch.zeros(3, 7).bool())),
        (TypeError, "resets must be a tensor", (PACKED, None, [[True]])),
        (TypeError, "resets must be a tensor", (torch.randn(3, 4), None, [True, False, True])),
        (ValueError, r"resets must have shape \(3,\)", (torch.randn(3, 4), None, torch.zeros(4).bool())),
    ],
)
def test_errors_come_before_the_order_of_the_batch(error, words, arguments):
    input, hx, resets = (*arguments, None)[:3]
    with pytest.raises(error, match=f"GRU: {words}"):
        seqkern.nn.GRU(4, 5)(input, hx, resets=resets)


@pytest.mark.parametrize("lengths", [[2**70, 1], [-1, 2], [4, 1]])
def test_lengths_out_of_range(lengths):
    with pytest.raises(ValueError, match="GRU|gru: lengths must be between 0 and 3"):
        seqkern.nn.GRU(4, 5)(torch.randn(3, 2, 4), lengths=lengths)


def test_weights_that_passed_once_are_looked_at_again():
    """Shapes that passed pass again; all else counts, and the same shapes may mean another network."""
    x = torch.randn(3, 2, 5)
    for _ in range(2):
        for options in ({"bidirectional": True}, {"num_layers": 2}):
            theirs = torch.nn.LSTM(5, 5, **options)
            ours = seqkern.lstm(x, None, list(theirs.parameters()), **options)
            torch.testing.assert_close((ours[0], *ours[1]), (theirs(x)[0], *theirs(x)[1]))
        for nonlinearity in ("tanh", "relu"):
            theirs = torch.nn.RNN(5, 5, nonlinearity=nonlinearity)
            ours = getattr(seqkern, f"rnn_{nonlinearity}")(x, None, list(theirs.parameters()))
            torch.testing.assert_close(ours, theirs(x))
    weights = list(torch.nn.LSTM(5, 5).parameters())
    seqkern.lstm(x, None, weights)
    changes = [
        (TypeError, "must have the input's dtype torch.float32, got torch.float64", lambda t: t.double()),
        (ValueError, "must be on the input's device cpu, got meta", lambda t: t.to("meta")),
        (TypeError, "must be a tensor, got ndarray", lambda t: t.detach().numpy()),
    ]
    for error, words, change in changes:
        for n in range(4):
            with pytest.raises(error, match=rf"lstm: weights\[{n}\] .*{words}|lstm: weights\[1\] {words}"):
                seqkern.lstm(x, None, [change(t) if i == n else t for i, t in enumerate(weights)])
    with pytest.raises(ValueError, match=r"lstm: weights\[0\] \(w_ih\) must have shape \(20, 4\), got \(20, 5\)"):
        seqkern.lstm(x[..., :4], None, weights)
    with pytest.raises(ValueError, match=r"lstm: weights\[2\] \(w_ih\) must have 2 dimensions"):
        seqkern.lstm(x, None, weights, num_layers=2)


@pytest.mark.parametrize("differentiable", [False, True])
def test_parametrized_weights_are_found(differentiable):
    class Twice(torch.nn.Module):
        def forward(self, t):
            return 2 * t

    ours, x = seqkern.nn.GRU(4, 6), torch.randn(3, 2, 4)
    with torch.set_grad_enabled(differentiable):
        before = ours(x)[0]
        torch.nn.utils.parametrize.register_parametrization(ours, "weight_hh_l0", Twice())
        expected = seqkern.gru(x, None, [ours.weight_ih_l0, ours.weight_hh_l0, ours.bias_ih_l0, ours.bias_hh_l0])[0]
        after = ours(x)[0]
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


def test_a_projection_to_nothing_is_refused():
    weights = [torch.ones(8, 1), torch.zeros(8, 0), torch.zeros(0, 2)]
    with pytest.raises(ValueError, match="a projection must be narrower than the hidden size 2, not 0, got 0"):
        seqkern.lstm(torch.ones(2, 1, 1), None, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recompute_does_not_move_the_bend_of_relu(dtype):
    torch.manual_seed(0)
    weights = [(torch.randn(8, n) * 0.4).to(dtype) for n in (33, 8)]
    x, h = torch.randn(33, 64, 33).to(dtype).requires_grad_(), torch.zeros(1, 64, 8, dtype=dtype)
    kept, found = (
        torch.autograd.grad(seqkern.rnn_relu(x, h, weights, recompute=recompute)[0].float().sum(), x)[0]
        for recompute in (False, True)
    )
    assert torch.equal(kept, found)


@pytest.mark.parametrize("layer", [seqkern.nn.AdditiveRNN, seqkern.nn.InterpolatedRNN])
def test_networks_that_torch_has_not_are_never_its_own(layer, monkeypatch):
    """ONNX export hands torch's layers to torch; these have no operator there."""
    network, x = layer(4, 3), torch.randn(5, 2, 4)
    expected = network(x)[0]
    monkeypatch.setattr("seqkern.nn.rnn.exports_onnx", lambda: True)
    assert torch.equal(network(x)[0], expected)
