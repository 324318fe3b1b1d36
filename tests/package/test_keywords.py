"""Signatures: what is not in one raises with the right name, what is in one is in all of a function's overloads."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

import pytest
import torch

import seqkern
import seqkern.embeddings
from seqkern._keywords import HINTS
from seqkern.nn.rnn import _Recurrent

FUNCTIONS = [
    name for name in seqkern.__all__ if inspect.isfunction(getattr(seqkern, name)) and name not in
    ("explain", "optimize", "release_memory", "restore", "use_backend")
]  # fmt: skip
X, H = torch.randn(2, 3, 4), torch.zeros(1, 3, 4)
STARTS = torch.tensor([0, 2])
ARGUMENTS = {
    "scaled_dot_product_attention": (X, X, X),
    "attention": (X[None], X[None], X[None]),
    "attention_varlen": (X, X, X, STARTS, STARTS, 2, 2),
    "attention_decode": (X[None], X[None], X[None], torch.tensor([3])),
    "attention_weights": (X[None], X[None]),
    "merge_attention": (X, X[..., 0], X, X[..., 0]),
    "additive_attention": (X, X, X, torch.ones(4)),
    "attention_rnn": (X, X, X, torch.ones(16, 8), torch.ones(16, 4)),
    "highway": (X, torch.ones(8, 4)),
    "tree_lstm": (X[0], seqkern.TreeSchedule.from_parents([-1, 0, 0]), torch.ones(16, 4), torch.ones(16, 4)),
    "sequence_pool": (X,),
    "conv1d": (X, torch.ones(5, 2, 4)),
    "conv1d_max": (X, torch.ones(5, 2, 4)),
    "layer_norm": (X, (4,)),
    "rms_norm": (X, (4,)),
    "add_layer_norm": (X, X, (4,)),
    "add_rms_norm": (X, X, (4,)),
    "swiglu": (X, X),
    "geglu": (X, X),
    "embedding": (torch.zeros(2, 3, dtype=torch.int64), torch.ones(5, 4)),
    "ffn": (X, torch.ones(5, 4), None, torch.ones(4, 5), None),
    "rope": (X[None], X[None]),
    "rope_tables": (STARTS, 4),
    "cross_entropy": (X, torch.zeros(2, 3, dtype=torch.int64)),
    "linear_cross_entropy": (X, torch.ones(5, 4), torch.zeros(2, 3, dtype=torch.int64)),
    "sgns_loss": (STARTS, STARTS, STARTS[:, None], torch.ones(9, 4), torch.ones(9, 4)),
    "sample": (X,),
    "filter_logits": (X,),
    "beam_step": (X, torch.zeros(2, 3)),
    "generate": (lambda chunk, state: (X[0][chunk.tokens], state), None, torch.zeros(1, 1, dtype=torch.int64)),
    "lstm": (X, None, [torch.ones(16, 4), torch.ones(16, 4)]),
    "gru": (X, None, [torch.ones(12, 4), torch.ones(12, 4)]),
    "additive_rnn": (X, None, [torch.ones(4, 4), torch.ones(4, 4)]),
    "interpolated_rnn": (X, None, [torch.ones(8, 4), torch.ones(8, 4)]),
    "rnn_tanh": (X, None, [torch.ones(4, 4), torch.ones(4, 4)]),
    "rnn_relu": (X, None, [torch.ones(4, 4), torch.ones(4, 4)]),
    "lstm_cell": (X[0], (H[0], H[0]), torch.ones(16, 4), torch.ones(16, 4)),
    "gru_cell": (X[0], H[0], torch.ones(12, 4), torch.ones(12, 4)),
    "rnn_tanh_cell": (X[0], H[0], torch.ones(4, 4), torch.ones(4, 4)),
    "rnn_relu_cell": (X[0], H[0], torch.ones(4, 4), torch.ones(4, 4)),
}
REQUIRED: dict[str, dict[str, int]] = {"generate": {"max_new_tokens": 1}}
MODULES = {"LayerNorm": (4,), "RMSNorm": (4,), "AddLayerNorm": (4,), "AddRMSNorm": (4,)}
MODULES |= {"AttentionDecoder": (4, 4, 4), "Highway": (4,), "ChildSumTreeLSTM": (4, 4), "NaryTreeLSTM": (4, 4)}
MODULES |= dict.fromkeys(("Word2Vec", "FastText"), (4,))
MODULES |= dict.fromkeys(("AdditiveRNN", "InterpolatedRNN"), (4, 4))
MODULES |= dict.fromkeys(("LSTM", "GRU", "RNN", "LinearCrossEntropy", "FeedForward", "AdditiveAttention"), (4, 4))


def space_of(name):
    return seqkern.nn if hasattr(seqkern.nn, name) else seqkern.embeddings


def function_of(op):
    """What an entry of HINTS is about."""
    name, _, method = op.partition(".")
    if op == "forward":
        return seqkern.nn.LSTM.forward
    return getattr(getattr(space_of(name), name), method) if method else getattr(seqkern, name)


def call(op, **keywords):
    name = op.partition(".")[0]
    if op == "forward":
        return seqkern.nn.LSTM(4, 4)(X, **keywords)
    return (
        getattr(space_of(name), name)(*MODULES[name], **keywords)
        if "." in op
        else function_of(op)(*ARGUMENTS[op], **REQUIRED.get(op, {}), **keywords)
    )


# ---- wrong keywords -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [*FUNCTIONS, *(f"{name}.__init__" for name in MODULES), "forward"])
def test_signatures_are_explicit(op):
    """No **keywords in what users and documents look at; and a call works."""
    parameters = inspect.signature(function_of(op)).parameters.values()
    assert {p.kind for p in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert len(parameters) >= 2
    call(op)


@pytest.mark.parametrize("op", [*FUNCTIONS, *(f"{name}.__init__" for name in MODULES), "forward"])
def test_an_unknown_keyword_raises(op):
    own = f"{'LSTM.forward' if op == 'forward' else op}"
    with pytest.raises(
        TypeError, match=rf"^{re.escape(own)}\(\) got an unexpected keyword argument 'xyzzy': it takes "
    ):
        call(op, xyzzy=1)


@pytest.mark.parametrize(("op", "wrong"), [(op, wrong) for op, hints in HINTS.items() for wrong in hints])
def test_a_hint_names_what_there_is(op, wrong):
    parameters = inspect.signature(function_of(op)).parameters
    assert wrong not in parameters
    with pytest.raises(TypeError) as caught:
        call(op, **{wrong: None})
    words = set(re.findall(r"[A-Za-z_]\w*", str(caught.value).partition(": ")[2]))
    public = {*seqkern.__all__, *seqkern.nn.__all__, "dropout", "cu_seqlens_k"}
    advice = {"leave", "bias", "lstm", "call", "constructor"}  # what to leave out, or where else it is
    assert words & (set(parameters) | public | advice), caught.value


@pytest.mark.parametrize(
    ("op", "wrong", "words"),
    [
        ("attention", "is_causal", "use causal=True, which aligns lower-right; scaled_dot_product_attention takes"),
        ("attention", "key_padding_mask", "use key_lengths"),
        ("attention", "softmax_scale", "use scale$"),
        ("attention", "mask", "use attn_mask$"),
        ("attention", "attention_mask", "use attn_mask$"),
        ("attention", "enable_gqa", "leave it out"),
        ("attention", "p", "use dropout_p$"),
        ("attention", "dropout", "use dropout_p$"),
        ("attention", "window_size", r"use window=\(left, right\)$"),
        ("attention", "head_lengths", "did you mean key_lengths"),
        ("scaled_dot_product_attention", "causal", "use is_causal=True, which aligns upper-left"),
        ("scaled_dot_product_attention", "softmax_scale", "use scale$"),
        ("scaled_dot_product_attention", "mask", "use attn_mask$"),
        ("scaled_dot_product_attention", "window_size", r"use attention, which takes it as window=\(left, right\)$"),
        ("attention_varlen", "softmax_scale", "use scale$"),
        ("attention_varlen", "window_size", r"use window=\(left, right\)$"),
        ("attention_varlen", "return_attn_probs", "use return_lse=True"),
        ("attention_varlen", "deterministic", "leave it out"),
        ("attention_decode", "cache_seqlens", "use cache_lengths$"),
        ("attention_decode", "block_table", "use page_table$"),
        ("layer_norm", "epsilon", "use eps$"),
        ("layer_norm", "gamma", "use weight$"),
        ("rms_norm", "beta", "an RMS norm has no bias"),
        ("cross_entropy", "weight", "use class_weight$"),
        ("cross_entropy", "input", "use logits$"),
        ("linear_cross_entropy", "linear_weight", "use weight$"),
        ("linear_cross_entropy", "linear_bias", "use bias$"),
        ("linear_cross_entropy", "lse_square_scale", "use z_loss$"),
        ("LinearCrossEntropy.__init__", "class_weight", "use weight$"),
        ("sample", "p", "use top_p$"),
        ("sample", "generator", "use seed"),
        ("filter_logits", "temp", "use temperature$"),
        ("lstm", "sequence_lengths", "use lengths$"),
        ("gru", "peepholes", "lstm alone"),
        ("lstm_cell", "batch_first", "leave it out: a cell takes one step"),
        ("gru_cell", "weight_ih", "use w_ih$"),
        ("LSTM.__init__", "dropout_p", "use dropout$"),
        ("forward", "sequence_lengths", "use lengths$"),
    ],
)
def test_the_right_name(op, wrong, words):
    with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{wrong}': {words}"):
        call(op, **{wrong: None})


def test_every_wrong_keyword_is_told():
    with pytest.raises(
        TypeError, match=r"'mask': use attn_mask; got an unexpected keyword argument 'p': use dropout_p$"
    ):
        call("attention", mask=None, p=0.1, causal=True)


def test_a_class_of_ones_own_has_the_hints():
    class Mine(seqkern.nn.GRU):
        pass

    with pytest.raises(TypeError, match=r"Mine.forward\(\) got .* 'seq_lengths': use lengths$"):
        Mine(4, 4)(X, seq_lengths=[2, 2, 2])


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(fullgraph):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: seqkern.attention(x, x, x, is_causal=True), backend="eager", fullgraph=fullgraph)
    error = torch._dynamo.exc.Unsupported if fullgraph else TypeError
    with pytest.raises(error, match="is_causal.*: use causal=True"):
        compiled(X[None])


def test_fx():
    """A function may be the root of what is traced, a call in it, or a wrong one."""
    for op in ("layer_norm", "attention", "gru_cell"):
        function, arguments = function_of(op), ARGUMENTS[op]
        traced = torch.fx.symbolic_trace(function)
        assert torch.equal(traced(*arguments), function(*arguments))
    traced = torch.fx.symbolic_trace(lambda x: seqkern.layer_norm(x, 4, eps=0.1))
    (node,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert set(node.kwargs) == {"input", "normalized_shape", "eps"}
    for function in (seqkern.layer_norm, seqkern.rms_norm, seqkern.attention):
        with pytest.raises(TypeError, match="'epsilon': "):
            torch.fx.symbolic_trace(lambda x: function(x, x, x, epsilon=0.1))  # noqa: B023


# ---- types --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [*map(function_of, FUNCTIONS), seqkern.nn.LSTM.forward, _Recurrent.forward])
def test_overloads_have_every_parameter(function):
    """A type checker sees the overloads alone."""
    get_overloads = getattr(typing, "get_overloads", None)
    if get_overloads is None:
        pytest.skip("Python 3.10 does not keep them")
    of_all = [p.name for p in inspect.signature(function).parameters.values()]
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    overloads = get_overloads(function)
    options = {"attention", "attention_varlen", "attention_decode", "lstm", "rope", "forward"}
    options |= {"cross_entropy", "linear_cross_entropy", "sample", "additive_attention"}
    assert bool(overloads) == (function.__name__ in options)
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        assert sorted(parameters) == sorted(of_all)
        assert all(p.default in (inspect.Parameter.empty, defaults[name]) for name, p in parameters.items())


def test_everything_public_is_annotated():
    modules = [getattr(seqkern.nn, name) for name in seqkern.nn.__all__]
    # nn.Transformer's forward is torch's own
    own = [module.forward for module in modules if hasattr(module, "forward") and module is not seqkern.nn.Transformer]
    for function in [*map(function_of, FUNCTIONS), *own]:
        for overload in [function, *getattr(typing, "get_overloads", lambda _: [])(function)]:
            signature = inspect.signature(overload)
            assert signature.return_annotation is not inspect.Signature.empty, function
            named = [p for name, p in signature.parameters.items() if name != "self"]
            assert all(p.annotation is not inspect.Parameter.empty for p in named), function


def test_the_client_uses_everything():
    """What mypy is shown (tests/package/test_build.py) also runs."""
    path = Path(__file__).parent / "typed_client.py"
    used = set(re.findall(r"\w+", path.read_text()))
    assert {*seqkern.__all__, *seqkern.nn.__all__, *seqkern.models.__all__} <= used
    program: dict[str, typing.Any] = {"__name__": "client"}
    exec(compile(path.read_text(), str(path), "exec"), program)
    program["main"]()


def test_the_marker_is_there():
    assert (Path(seqkern.__file__).parent / "py.typed").read_text() == ""
