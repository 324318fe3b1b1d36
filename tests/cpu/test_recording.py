"""Those that call without numbers, or with other tensors: torch.fx, jit.trace, ONNX export of old, nested tensors.

Also what torch takes and these ops once did not: a scale in a tensor, a negative eps. Each works as torch's does, or
says what to do.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import seqkern

ROOT = Path(__file__).parents[2]
F = torch.nn.functional
NAMES = ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell", "LayerNorm", "RMSNorm"]


def built(name, **options):
    """A module of ours that maps 4 features to 4, and an input."""
    if name.endswith("Norm"):
        return getattr(seqkern.nn, name)(4, **options), torch.randn(3, 4)
    module = getattr(seqkern.nn, name)(4, 4, **options)
    return module, torch.randn(3, 4) if name.endswith("Cell") else torch.randn(5, 3, 4)


class Around(torch.nn.Module):
    """A model around a module of ours."""

    def __init__(self, module):
        super().__init__()
        self.linear, self.ours = torch.nn.Linear(4, 4), module
        self.first = isinstance(module, (torch.nn.RNNBase, torch.nn.LSTMCell))  # of several results

    def forward(self, x):
        y = self.ours(self.linear(x))
        return (y[0] if self.first else y) * 2


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# ---- torch.fx -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_fx_holds_modules_for_leaves(name):
    module, x = built(name)
    model = Around(module)
    traced = torch.fx.symbolic_trace(model)
    (node,) = [n for n in traced.graph.nodes if n.target == "ours"]
    assert node.op == "call_module"
    assert not [n for n in traced.graph.nodes if n.op == "get_attr"]
    for graph_module in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        same(graph_module(x), model(x))
    traced.graph.lint()


def test_fx_keeps_what_a_leaf_was_called_with():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.norm = seqkern.nn.LSTM(4, 4), seqkern.nn.AddRMSNorm(4)

        def forward(self, x, lengths):
            y, (h, c), cells = self.lstm(x, None, lengths=lengths, return_all_c=True)
            return self.norm(y, x), cells, h, c

    class Tracer(torch.fx.Tracer):  # to unpack results, their number has to be known
        def iter(self, proxy):
            return iter([proxy[i] for i in range(3 if proxy.node.op == "call_module" else 2)])

    model = Model()
    graph = Tracer().trace(model)
    (node,) = [n for n in graph.nodes if n.target == "lstm"]
    assert set(node.kwargs) == {"lengths", "return_all_c"}, node.kwargs
    x, lengths = torch.randn(5, 3, 4), torch.tensor([5, 2, 0])
    same(torch.fx.GraphModule(model, graph)(x, lengths), model(x, lengths))


Q, STARTS = torch.randn(1, 2, 6, 4), torch.tensor([0, 2, 6])
TREES = seqkern.TreeSchedule.from_parents([-1, 0, 0, 1, -1, 4])
W, BIAS = torch.randn(16, 4), torch.randn(16)
CALLS = {
    "scaled_dot_product_attention": (lambda f, x: f(x, x, x, is_causal=True), Q),
    "attention": (lambda f, x: f(x, x, x, window=(2, 0), return_lse=True), Q),
    "attention_varlen": (lambda f, x: f(x, x, x, STARTS, STARTS, 4, 4), Q[0].transpose(0, 1)),
    "attention_decode": (lambda f, x: f(x[:, :, :1], Q.clone(), Q.clone(), torch.tensor([5])), Q),
    "attention_weights": (lambda f, x: f(x, x, causal=True), Q),
    "merge_attention": (lambda f, x: f(x, Q[..., 0], x, Q[..., 1]), Q),
    "additive_attention": (lambda f, x: f(x, x, x, W[0], mask=torch.eye(6).bool()), Q),
    "attention_rnn": (lambda f, x: f(x, x, x, torch.cat([W, W], 1), W, order="bahdanau", scale=0.5), Q[0]),
    "highway": (lambda f, x: f(x, W[:8], BIAS[:8], "tanh"), Q),
    "tree_lstm": (lambda f, x: f(x, TREES, W, W, BIAS), Q[0, 0]),
    "sequence_pool": (lambda f, x: f(x, [3, 6], "max"), Q[0]),
    "conv1d": (lambda f, x: f(x, W.view(8, 2, 4), padding="causal", lengths=[3, 6]), Q[0]),
    "conv1d_max": (lambda f, x: f(x, W.view(8, 2, 4), None, "tanh", lengths=[3, 6]), Q[0]),
    "layer_norm": (lambda f, x: f(x, (4,), eps=1e-3), Q),
    "rms_norm": (lambda f, x: f(x, (4,)), Q),
    "swiglu": (lambda f, x: f(x, x), Q),
    "geglu": (lambda f, x: f(x, x, "tanh"), Q),
    "embedding": (lambda f, x: f(x, W, offset=2, positions="sinusoidal"), STARTS),
    "ffn": (lambda f, x: f(x, W, BIAS, W.t(), None, "silu"), Q),
    "rope": (lambda f, x: f(x, x, 5, theta=100.0), Q),
    "rope_tables": (lambda f, x: f(x, 4, scaling=0.5), STARTS),
    "sgns_loss": (lambda f, x: f(STARTS % 4, STARTS % 3, STARTS[:, None] % 2, x, W[:4]), BIAS[:16].view(4, 4)),
    "cross_entropy": (lambda f, x: f(x, STARTS % 4, softcap=3.0), BIAS[:12].view(3, 4)),
    "linear_cross_entropy": (lambda f, x: f(x, W, STARTS, BIAS, reduction="none"), BIAS[:12].view(3, 4)),
    "sample": (lambda f, x: f(x, top_k=3, seed=5), Q),
    "beam_step": (lambda f, x: f(x.reshape(2, 2, -1), torch.zeros(2, 2), candidates=3), Q),
    "filter_logits": (lambda f, x: f(x, top_p=0.7, order="vllm"), Q),
    "add_layer_norm": (lambda f, x: f(x, x, (4,)), Q),
    "add_rms_norm": (lambda f, x: f(x, x, (4,), W[0]), Q),
    "lstm": (lambda f, x: f(x, None, [W, W, BIAS, BIAS]), Q[0]),
    "gru": (lambda f, x: f(x, None, [W[:12], W[:12]], lengths=[6, 3]), Q[0].transpose(0, 1)),
    "additive_rnn": (lambda f, x: f(x, None, [W[:4], W[:4]]), Q[0]),
    "interpolated_rnn": (lambda f, x: f(x, None, [W[:8], W[:8]], lengths=[6, 3]), Q[0].transpose(0, 1)),
    "rnn_tanh": (lambda f, x: f(x, None, [W[:4], W[:4]]), Q[0]),
    "rnn_relu": (lambda f, x: f(x, None, [W[:4], W[:4]], batch_first=True), Q[0]),
    "lstm_cell": (lambda f, x: f(x, (x, x), W, W, BIAS, BIAS), Q[0, 0]),
    "gru_cell": (lambda f, x: f(x, x, W[:12], W[:12]), Q[0, 0]),
    "rnn_tanh_cell": (lambda f, x: f(x, x, W[:4], W[:4]), Q[0, 0]),
    "rnn_relu_cell": (lambda f, x: f(x, x, W[:4], W[:4]), Q[0, 0]),
}


def test_fx_is_tried_with_every_function():
    others = {
        "models",
        "nn",
        "reference",
        "explain",
        "generate",
        "optimize",
        "release_memory",
        "restore",
        "use_backend",
    }
    others |= {"TreeSchedule"}
    assert set(CALLS) == set(seqkern.__all__) - others


@pytest.mark.parametrize("name", CALLS)
def test_fx_holds_a_function_for_one_call(name):
    call, x = CALLS[name]
    function = getattr(seqkern, name)

    class Model(torch.nn.Module):
        def forward(self, x):
            return call(function, x)

    traced = torch.fx.symbolic_trace(Model())
    (node,) = [n for n in traced.graph.nodes if n.target is function]
    assert node.op == "call_function"
    same(pickle.loads(pickle.dumps(traced))(x), call(function, x))


# ---- torch.jit.trace ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_jit_trace(name):
    """With gradients on, it says what to do; that done, the graph holds our ops and can be saved."""
    module, x = built(name)
    model = Around(module)
    with pytest.raises(NotImplementedError, match=r"trace under torch\.no_grad\(\)"):
        torch.jit.trace(model, x)
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        loaded = torch.jit.load(file)
        assert "seqkern::" in str(loaded.inlined_graph)
        same(loaded(x), model(x))
    model.requires_grad_(False)  # nothing to record a gradient of
    same(torch.jit.trace(model, x)(x), model(x))


def test_jit_trace_of_attention():
    query = torch.randn(1, 2, 6, 4, requires_grad=True)
    function = lambda x: seqkern.scaled_dot_product_attention(x, x, x)  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"trace under torch\.no_grad\(\)"):
        torch.jit.trace(function, query)
    same(torch.jit.trace(function, query.detach())(Q), function(Q))


# ---- torch.onnx.export(dynamo=False) ------------------------------------------------------------------------------


@pytest.fixture
def exported(monkeypatch):
    """Exports by way of torch.jit, without the package onnx, which torch wants only for functions of onnxscript."""
    from torch.onnx._internal.torchscript_exporter import onnx_proto_utils

    monkeypatch.setattr(onnx_proto_utils, "_add_onnxscript_fn", lambda model, *_: model)

    def export(model, x):
        file = io.BytesIO()
        torch.onnx.export(model, (x,), file, dynamo=False, opset_version=17)
        return file.getvalue()

    return export


@pytest.mark.filterwarnings("ignore")  # torch's own, of batch sizes and of the exporter's age
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("training", [True, False])
def test_onnx_export_of_networks_is_torchs(exported, name, training):
    """The same nodes with the same weights, byte for byte but for the numbers in the names of values."""
    module, x = built(name, num_layers=2, bidirectional=True)
    theirs = getattr(torch.nn, name)(4, 4, num_layers=2, bidirectional=True)
    theirs.load_state_dict(module.state_dict())
    of_ours, of_theirs = (exported(m.train(training), x) for m in (module, theirs))
    assert name.encode() in of_ours
    assert re.sub(rb"\d", b"", of_ours) == re.sub(rb"\d", b"", of_theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["LSTMCell", "LayerNorm", "RMSNorm", "attention", "scaled_dot_product_attention"])
def test_onnx_export_of_the_others_is_their_equations(exported, name):
    if name.endswith("attention"):

        class Model(torch.nn.Module):
            def forward(self, x):
                causal = {"is_causal" if name.startswith("scaled") else "causal": True}
                return getattr(seqkern, name)(x, x, x, **causal)

        model, x = Model(), Q
    else:
        model, x = built(name)
    assert b"seqkern" not in exported(model, x).replace(str(ROOT).encode(), b"")


@pytest.mark.filterwarnings("ignore")
def test_onnx_export_with_options_of_ours(exported):
    model, x = built("LSTM", layer_norm=True)
    assert b"Tanh" in exported(model, x)


# ---- nested tensors -----------------------------------------------------------------------------------------------


def jagged(*shape, requires_grad=False):
    torch.manual_seed(0)
    tensors = [torch.randn(n, *shape) for n in (3, 5, 1)]
    return torch.nested.nested_tensor(tensors, layout=torch.jagged, requires_grad=requires_grad)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's: nested tensors are a prototype
@pytest.mark.parametrize(("ours", "theirs"), [(seqkern.layer_norm, F.layer_norm), (seqkern.rms_norm, F.rms_norm)])
@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_norms_of_jagged_tensors(ours, theirs, shape):
    results = []
    for norm in (ours, theirs):
        x, weight = jagged(*shape, requires_grad=True), torch.linspace(1, 2, 8).requires_grad_()
        y = norm(x, (8,), weight)
        (y + x).values().cos().sum().backward()  # of the same structure: they can be added
        results.append([y.values(), x.grad.values(), weight.grad])
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sums_and_norms_of_jagged_tensors():
    x = jagged(8)
    module = seqkern.nn.AddLayerNorm(8)
    normalised, total = module(x, x * 2)
    same(total.values(), x.values() * 3)
    same(normalised.values(), module(x.values(), x.values() * 2)[0])
    assert normalised.shape == x.shape
    dropped = [seqkern.add_rms_norm(t, t, (8,), dropout_p=0.5, seed=1)[1] for t in (x, x.values())]
    same(dropped[0].values(), dropped[1])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_that_are_not_taken():
    x, rows = jagged(8), torch.randn(3, 8)
    heads, old = jagged(2, 8).transpose(1, 2), torch.nested.nested_tensor([rows, rows[:2]])
    weights = list(torch.nn.LSTM(8, 4).parameters())
    for error, message, call in [
        (TypeError, "layer_norm: input must be .* torch.jagged", lambda: seqkern.layer_norm(old, (8,))),
        (ValueError, "rms_norm: normalized_shape must lie behind", lambda: seqkern.rms_norm(x, (9, 8))),
        (TypeError, "add_rms_norm: residual must be a nested", lambda: seqkern.add_rms_norm(x, rows, (8,))),
        (ValueError, "residual must have the input's offsets", lambda: seqkern.add_rms_norm(x, jagged(8), (8,))),
        *(
            (TypeError, rf"{f.__name__}: query must not be a nested tensor.*attention_varlen.*to_padded", call)
            for t in (heads, old)
            for f, call in [
                (seqkern.scaled_dot_product_attention, lambda t=t: seqkern.scaled_dot_product_attention(t, t, t)),
                (seqkern.attention, lambda t=t: seqkern.attention(t, t, t)),
                (seqkern.attention_weights, lambda t=t: seqkern.attention_weights(t, t)),
                (seqkern.attention_decode, lambda t=t: seqkern.attention_decode(t, Q, Q, torch.tensor([1]))),
            ]
        ),
        *(
            (TypeError, "input must not be a nested tensor.*to_padded_tensor.*lengths", call)
            for t in (x, old)
            for call in [
                lambda t=t: seqkern.nn.LSTM(8, 4)(t),
                lambda t=t: seqkern.nn.GRUCell(8, 4)(t),
                lambda t=t: seqkern.lstm(t, None, weights),
            ]
        ),
    ]:
        with pytest.raises(error, match=message):
            call()


# ---- numbers that torch takes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, -2.0, 3])
def test_a_scale_may_stand_in_a_tensor(scale):
    ours = seqkern.scaled_dot_product_attention(Q, Q, Q, scale=torch.tensor(scale))
    same(ours, seqkern.scaled_dot_product_attention(Q, Q, Q, scale=scale))
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(Q, Q, Q, scale=torch.tensor(scale)))
    same(seqkern.attention(Q, Q, Q, scale=torch.tensor(scale)), ours)


@pytest.mark.parametrize("eps", [-1e-3, -100.0, float("nan"), -0.0, torch.tensor(-1e-3)])
@pytest.mark.parametrize(("ours", "theirs"), [(seqkern.layer_norm, F.layer_norm), (seqkern.rms_norm, F.rms_norm)])
def test_any_eps_is_taken(ours, theirs, eps):
    results = []
    for norm in (ours, theirs):
        torch.manual_seed(0)
        x, weight = torch.randn(6, 16, dtype=torch.float64, requires_grad=True), torch.ones(16, dtype=torch.float64)
        y = norm(x, (16,), weight, eps=eps)
        y.cos().sum().backward()
        results.append([y, x.grad])
    torch.testing.assert_close(*results, equal_nan=True)
    x = torch.randn(6, 16)
    of_sum, alone = seqkern.add_rms_norm(x, x * 0, (16,), eps=eps)[0], seqkern.rms_norm(x, (16,), eps=eps)
    torch.testing.assert_close(of_sum, alone, rtol=0, atol=0, equal_nan=True)


# ---- a result that is to grow -------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.__version__ < "2.11", reason="no memory is kept there")
def test_a_large_result_grows_as_a_copy_or_without_kept_memory():
    x = torch.randn(512, 1024)
    with pytest.raises(RuntimeError, match="not resizable"):
        seqkern.layer_norm(x, (1024,)).resize_(1024, 1024)
    assert "not resizable" in seqkern.release_memory.__doc__
    assert seqkern.layer_norm(x, (1024,)).clone().resize_(1024, 1024).shape == (1024, 1024)
    program = (
        "import seqkern, torch; x = torch.randn(512, 1024); y = seqkern.layer_norm(x, (1024,)).resize_(1024, 1024); "
        "assert torch.equal(y[:512], seqkern.layer_norm(x, (1024,)))"
    )
    environment = os.environ | {"SEQKERN_CACHE_MB": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
