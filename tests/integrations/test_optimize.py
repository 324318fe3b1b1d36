"""`optimize`, `restore` and `explain` of whole models."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqkern
from seqkern._optimize import SWAPS


class Tagger(nn.Module):
    """One of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.norm = nn.LayerNorm(16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(32, 16, batch_first=True)
        self.rnn = nn.RNN(16, 16, nonlinearity="relu", batch_first=True)
        self.rms = nn.RMSNorm(16)
        self.cells = nn.ModuleList([nn.LSTMCell(16, 16), nn.GRUCell(16, 16), nn.RNNCell(16, 16)])
        self.transformer = nn.Transformer(16, 2, 1, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        x = self.rms(self.rnn(self.gru(self.lstm(x)[0])[0])[0])
        x = self.transformer(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(7), tgt_is_causal=True)
        h = self.cells[0](x[:, -1])[0]
        return self.head(x + self.cells[2](self.cells[1](h))[:, None])


def tagger() -> tuple[Tagger, Tensor]:
    torch.manual_seed(0)
    return Tagger().eval(), torch.randint(30, (3, 7))


def state(model: nn.Module) -> list[tuple[type, list[tuple[str, Any]]]]:
    """The classes and everything that the instances hold."""
    return [(type(m), [(key, id(value)) for key, value in vars(m).items()]) for m in model.modules()]


def test_everything_is_swapped_and_restored_without_a_trace() -> None:
    model, tokens = tagger()
    before, text, expected = state(model), repr(model), model(tokens)
    expected.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    assert seqkern.optimize(model) is model
    assert {type(m) for m in model.modules()} >= set(SWAPS.values())
    assert repr(model) == text
    assert [v for _, v in state(model)] == [v for _, v in before], "nothing is added to an instance"
    assert not {type(m) for m in model.modules()} & set(SWAPS)
    found = model(tokens)
    found.square().sum().backward()
    assert torch.allclose(found, expected, atol=1e-5)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert torch.allclose(p.grad, grad, atol=1e-4, rtol=1e-4)
    optimizer.step()  # of the same parameters
    assert not torch.equal(model(tokens), found)
    assert seqkern.restore(model) is model
    assert state(model) == before


def test_twice_is_as_once() -> None:
    model, _ = tagger()
    kinds = [type(m) for m in seqkern.optimize(model).modules()]
    assert [type(m) for m in seqkern.optimize(model).modules()] == kinds
    assert [type(m) for m in seqkern.restore(seqkern.restore(model)).modules()] == [
        type(m) for m in tagger()[0].modules()
    ]


def test_hooks_ties_and_state_dict_stay() -> None:
    model, tokens = tagger()
    other = nn.LayerNorm(16)
    other.weight = model.norm.weight  # tied
    model.other = other
    calls = []
    model.norm.register_forward_hook(lambda *_: calls.append("forward"))
    model.lstm.register_full_backward_hook(lambda *_: calls.append("backward"))
    saved = model.state_dict()
    seqkern.optimize(model)
    model(tokens).sum().backward()
    assert calls == ["forward", "backward"]
    assert model.other.weight is model.norm.weight
    assert list(model.state_dict()) == list(saved)
    fresh = tagger()[0]
    fresh.other = nn.LayerNorm(16)
    assert fresh.load_state_dict(model.state_dict()).missing_keys == []


def test_copies_and_pickles() -> None:
    model, tokens = tagger()
    expected = seqkern.optimize(model)(tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(other(tokens), expected)
        assert type(seqkern.restore(other).norm) is nn.LayerNorm
    assert type(model.norm) is seqkern.nn.LayerNorm


def test_a_whole_model_saved_and_loaded_with_a_safe_list() -> None:
    model = seqkern.optimize(nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.LSTM(8, 4)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    file.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    assert "seqkern.nn.layer_norm.LayerNorm" in unsafe
    file.seek(0)
    safe = [seqkern.nn.LayerNorm, seqkern.nn.RMSNorm, seqkern.nn.LSTM, nn.Sequential]
    with torch.serialization.safe_globals(safe):
        loaded = torch.load(file, weights_only=True)
    x = torch.randn(3, 2, 8)
    assert torch.equal(loaded(x)[0], model(x)[0])


def test_what_is_left_alone_and_why() -> None:
    class Other(nn.LayerNorm):
        pass

    model = nn.ModuleDict(
        {
            "other": Other(8),
            "replaced": nn.LayerNorm(8),
            "parametrized": torch.nn.utils.parametrizations.weight_norm(nn.LSTM(4, 4), "weight_ih_l0"),
            "plain": nn.GRU(4, 4),
        }
    )
    model["replaced"].forward = lambda x: x
    before = [type(m) for m in model.values()][:3]
    seqkern.optimize(model)
    assert [type(m) for m in model.values()] == [*before, seqkern.nn.GRU]
    reasons = {row.module: row.reason for row in seqkern.explain(model).rows}
    assert reasons["other"] == "a subclass of LayerNorm may mean something else"
    assert reasons["replaced"] == "its forward was replaced"
    assert reasons["parametrized"] == "parametrized, which made it a ParametrizedLSTM: optimize before that"
    assert "restore(model) first" in reasons["plain"]


def test_options_beyond_torchs_are_kept_by_restore() -> None:
    model = nn.Sequential(seqkern.nn.LSTM(4, 4, layer_norm=True), seqkern.nn.LSTM(4, 4), seqkern.nn.AddRMSNorm(4))
    seqkern.restore(model)
    assert [type(m) for m in model] == [seqkern.nn.LSTM, nn.LSTM, seqkern.nn.AddRMSNorm]


def test_the_table() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(12)))
    choices = seqkern.explain(model)
    assert [(row.module, row.kind, row.runs, row.count) for row in choices.rows] == [("*.1", "LayerNorm", "torch", 12)]
    assert choices.others == 25
    text = str(seqkern.explain(seqkern.optimize(model)))
    assert "*.1 (12)  LayerNorm  C++ " in text
    assert "25 other modules" in text
    with seqkern.use_backend("reference"):
        assert seqkern.explain(model).rows[0].runs.startswith("reference")


def test_quantize_dynamic_sees_restored_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = seqkern.optimize(nn.Sequential(nn.LSTM(4, 4)))
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.LSTM})
        assert type(quantized[0]) is seqkern.nn.LSTM  # passed over, as the table says
        assert "quantize_dynamic" in str(seqkern.explain(model))
        quantized = torch.ao.quantization.quantize_dynamic(seqkern.restore(model), {nn.LSTM})
    assert type(quantized[0]) is torch.ao.nn.quantized.dynamic.LSTM


def test_data_parallel() -> None:
    """Without a GPU it calls the module; a replica is made by `_replicate_for_data_parallel`."""
    model, tokens = tagger()
    seqkern.optimize(model)
    assert torch.equal(nn.DataParallel(model)(tokens), model(tokens))
    replica = model.lstm._replicate_for_data_parallel()
    assert type(replica) is seqkern.nn.LSTM
    for name, parameter in model.lstm._parameters.items():
        setattr(replica, name, parameter.detach().clone())
    x = torch.randn(2, 5, 16)
    assert torch.equal(replica(x)[0], model.lstm(x)[0])


def test_compiled_models() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8))
    x = torch.randn(4, 8)
    expected = model(x)
    torch._dynamo.reset()
    found = torch.compile(seqkern.optimize(model), fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(found, expected, atol=1e-6)


def test_wrong_use() -> None:
    for function in (seqkern.optimize, seqkern.restore):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module, got int"):
            function(3)
    with pytest.raises(ValueError, match="nothing in Sequential that seqkern could run .it has 2 Linear, 1"):
        seqkern.optimize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="a model is explained without tensors"):
        seqkern.explain(nn.Linear(2, 2), torch.ones(2))
    assert seqkern.explain(nn.Linear(2, 2)).rows == ()


# ---- attention and the layers of the Transformer ------------------------------------------------------------------


class Stack(nn.TransformerEncoder):
    """A user's own, which stays torch's and hands its layers nested tensors in evaluation."""


@pytest.mark.parametrize("kind", [nn.TransformerEncoder, Stack])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh], ids=["relu", "gelu", "tanh"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True")
def test_an_encoder(kind: type[nn.TransformerEncoder], activation: Any, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation=activation, batch_first=True)
    model = kind(layer, 2, nn.LayerNorm(16)).train(training)
    x, lengths = torch.randn(3, 6, 16), torch.tensor([6, 2, 4])
    padding = torch.arange(6) >= lengths[:, None]
    names = list(model.state_dict())
    with torch.inference_mode(not training):
        expected = model(x, src_key_padding_mask=padding)
        seqkern.optimize(model)
        found = model(x, src_key_padding_mask=padding)
        assert torch.allclose(found[~padding], expected[~padding], atol=1e-5)
        assert list(model.state_dict()) == names
        assert {type(m).__module__.split(".")[0] for m in model.layers} == {"seqkern"}
        assert (type(model) is Stack) == (kind is Stack)
        seqkern.restore(model)
        assert torch.equal(model(x, src_key_padding_mask=padding), expected)


def test_a_layer_made_here_is_restored_to_a_working_one_of_torchs() -> None:
    model = seqkern.nn.TransformerEncoder(seqkern.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    x = torch.randn(3, 6, 16)
    with torch.inference_mode():
        expected = model(x)
        seqkern.restore(model)
        assert {type(m).__module__.split(".")[0] for m in model.modules()} == {"torch"}
        assert torch.allclose(model(x), expected, atol=1e-5)


def test_attention_with_options_of_its_own_stays_and_keeps_its_layer() -> None:
    rope = seqkern.nn.RotaryEmbedding(4)
    for options in ({"num_kv_heads": 2}, {"window": (3, 0)}, {"qk_norm": True}, {"rope": rope}, {"head_dim": 16}):
        model = seqkern.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options).eval()
        x = torch.randn(3, 6, 16)
        with torch.inference_mode():
            expected = model(x)
            seqkern.restore(model)
            assert type(model) is seqkern.nn.TransformerEncoderLayer
            assert type(model.self_attn) is seqkern.nn.MultiheadAttention
            assert torch.allclose(model(x), expected, atol=1e-5)
        reasons = {row.kind: row.reason for row in seqkern.explain(model).rows}
        assert reasons["TransformerEncoderLayer"] == reasons["MultiheadAttention"] == f"with {next(iter(options))}"


def test_explain_of_layers() -> None:
    model = nn.Transformer(16, 4, 2, 2, 32)
    assert {row.kind for row in seqkern.explain(model).rows} == {
        "LayerNorm", "MultiheadAttention", "TransformerDecoderLayer", "TransformerEncoderLayer",
    }  # fmt: skip
    rows = seqkern.explain(seqkern.optimize(model)).rows
    assert all(row.runs.startswith("C++") and not row.reason for row in rows)


# ---- RMS norms that models bring ----------------------------------------------------------------------------------


class LlamaLike(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class GemmaLike(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Twice(LlamaLike):
    """Looks like one and is none."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class WithoutMean(LlamaLike):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.variance_epsilon)


class Failing(LlamaLike):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("kind", "flavour"), [(LlamaLike, (0.0, True)), (GemmaLike, (1.0, False))])
@pytest.mark.parametrize("size", [8, 96, 4096])
def test_a_home_made_norm_is_proved_by_numbers(kind, flavour, dtype, size) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(size)).to(dtype)
    x = torch.randn(64, size).to(dtype)
    nn.init.normal_(model[0].weight)
    before, expected = dict(vars(model[0])), model(x)
    seqkern.optimize(model)
    assert isinstance(model[0], kind)
    assert type(model[0]) is not kind
    if dtype != torch.float32:  # where rounding does not tell the kinds apart there is more than one answer
        assert tuple(type(model[0])._seqkern_flavour) == flavour
    assert dict(vars(model[0])) == before
    found = model(x)
    assert found.dtype == dtype
    if dtype == torch.float32:
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    else:  # the mean of another order of sums is another one only in its last bits
        assert (found == expected).float().mean() > 0.99
    seqkern.restore(model)
    assert type(model[0]) is kind
    assert torch.equal(model(x), expected)


def test_a_home_made_norm_that_is_none_stays() -> None:
    model = nn.Sequential(Twice(8), WithoutMean(8), Failing(8), LlamaLike(8))
    seqkern.optimize(model)
    assert [type(m) for m in model][:3] == [Twice, WithoutMean, Failing]
    rows = seqkern.explain(model).rows
    assert [row.reason for row in rows][:3] == ["a probe gave other numbers than each kind of RMS norm here"] * 3
    with pytest.raises(ValueError, match="nothing in Twice"):
        seqkern.optimize(Twice(8))


def test_the_probe_touches_nothing() -> None:
    model = LlamaLike(8)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    weight, drawn = model.weight, torch.get_rng_state()
    seqkern.optimize(model)
    assert not calls
    assert model.weight is weight
    assert torch.equal(weight, torch.ones(8))
    assert weight.requires_grad
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_fused_norm_copies_pickles_and_trains() -> None:
    model = seqkern.optimize(nn.Sequential(LlamaLike(8))).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is type(model[0])
        assert torch.equal(other(x), expected)
        assert type(seqkern.restore(other)[0]) is LlamaLike
    expected.sum().backward()
    assert model[0].weight.grad is not None
    wide = torch.randn(4, 8)  # a dtype beside the weight's runs as it did
    assert torch.equal(model(wide), seqkern.restore(copy.deepcopy(model))(wide))


# ---- models of transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "qwen3", "t5"])
def test_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'seqkern[transformers]'")
    from models import inputs, make

    model, call = make(name, "eager"), inputs(name)
    kinds = [type(m) for m in model.modules()]
    expected = model(**call).logits
    seqkern.optimize(model)
    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):  # T5 of old versions
        assert model.config._attn_implementation == "eager"
        assert "not through transformers' interface" in str(seqkern.explain(model))
        pytest.skip("this version's model has no attention interface")
    assert model.config._attn_implementation == "seqkern"
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    assert norms
    assert all(type(m) not in kinds for m in norms)
    assert torch.allclose(model(**call).logits, expected, atol=1e-5)
    assert not [row for row in seqkern.explain(model).rows if row.reason]
    seqkern.restore(model)
    assert model.config._attn_implementation == "eager"
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(model(**call).logits, expected)
    seqkern.optimize(model, attention=False)
    assert model.config._attn_implementation == "eager"
    gc.collect()


@pytest.mark.slow
def test_the_rms_norms_of_all_models_of_transformers() -> None:
    """Swapped, and the same numbers; what stays is gated, has no weight, or is told to compute something else."""
    models = pytest.importorskip("transformers.models")
    classes = set()
    for path in sorted(Path(models.__path__[0]).glob("*/modeling_*.py")):
        if "RMSNorm" not in path.read_text():
            continue
        try:
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        except ImportError:  # needs a package that is not here
            continue
        kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, nn.Module)]
        classes |= {each for each in kinds if "RMSNorm" in each.__name__ and each.__module__ == module.__name__}
    swapped, x = 0, torch.randn(3, 64)
    for kind in sorted(classes, key=lambda kind: kind.__name__):
        if "Gated" in kind.__name__:
            continue
        norm = kind(64)
        expected, box = norm(x), nn.Sequential(norm)
        if not list(norm.parameters()):
            continue
        (row,) = seqkern.explain(box).rows
        if row.reason == "optimize(model) swaps it":
            seqkern.optimize(box)
            assert type(norm) is not kind, kind
            assert torch.allclose(norm(x), expected, atol=1e-6), kind
            swapped += 1
        else:
            assert row.reason == "a probe gave other numbers than each kind of RMS norm here", kind
    assert swapped > 150
    print(f"{swapped} of {len(classes)} classes")
