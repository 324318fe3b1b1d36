"""MultiheadAttention and the layers of the Transformer beside torch's, which they take the parameters of."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqkern
from seqkern.testing import Case, check_case, compare

N, L, S, E, H = 3, 7, 5, 16, 4


def pair(batch_first: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """torch's module, ours of the same parameters."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, batch_first=batch_first, dtype=dtype, **options)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    ours = seqkern.nn.MultiheadAttention(E, H, batch_first=batch_first, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(module: Any, tensors: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """Outputs, and gradients of inputs and parameters."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    module.zero_grad()
    out, weights = module(*leaves, **options)
    torch.manual_seed(1)
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, dtype=out.dtype)).sum()
    loss.backward()
    grads = [t.grad for t in (*leaves, *module.parameters())]
    return [out.detach(), *([] if weights is None else [weights.detach()]), *grads]


def check(theirs: Any, ours: Any, tensors: tuple[Tensor, ...], **options: Any) -> None:
    """By the error rule, torch's in float64 being the oracle."""
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    oracle = run(copy.deepcopy(theirs).double(), tuple(t.double() for t in tensors), **wide)
    beside = run(theirs, tensors, **options)
    found = run(ours, tensors, **options)
    assert len(found) == len(oracle)
    for mine, peer, exact in zip(found, beside, oracle, strict=True):
        assert mine.shape == exact.shape
        report = compare(mine, peer, exact)
        assert report.passed, report


def inputs(batch_first: bool, same: bool = False, kdim: int = E, vdim: int = E) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    shapes = [(L, N, E), (S, N, kdim), (S, N, vdim)]
    if same:
        shapes = [(L, N, E)]
    made = [torch.randn(shape) for shape in shapes]
    made = [t.transpose(0, 1) for t in made] if batch_first else made
    return tuple(made * 3) if same else tuple(made)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"kdim": 6, "vdim": 10},
    ],
    ids=str,
)
def test_values_and_gradients_of_torchs_options(options: dict[str, Any], batch_first: bool, need_weights: bool) -> None:
    theirs, ours = pair(batch_first, **options)
    tensors = inputs(batch_first, kdim=options.get("kdim", E), vdim=options.get("vdim", E))
    check(theirs, ours, tensors, need_weights=need_weights)


def masks(kind: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    hidden = torch.rand(L, S) < 0.3
    hidden[:, 0] = False
    heads = torch.rand(N * H, L, S) < 0.3
    heads[:, :, 0] = False
    padding = torch.arange(S) >= torch.tensor([[5], [3], [1]])
    return {
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.randn(L, S)},
        "heads": {"attn_mask": heads},
        "float heads": {"attn_mask": torch.randn(N * H, L, S)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "both float": {
            "attn_mask": torch.randn(L, S),
            "key_padding_mask": torch.zeros(N, S).masked_fill(padding, -torch.inf),
        },
    }[kind]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float", "heads", "float heads", "padding", "both", "both float"])
def test_masks(kind: str, need_weights: bool) -> None:
    theirs, ours = pair(True)
    check(theirs, ours, inputs(True), need_weights=need_weights, **masks(kind))
    if not need_weights:
        return
    check(theirs, ours, inputs(True), average_attn_weights=False, **masks(kind))


def test_masks_of_two_kinds_are_those_of_one() -> None:
    _, ours = pair(True)
    x, bias, padding = inputs(True), torch.randn(L, S), masks("padding")["key_padding_mask"]
    found = ours(*x, attn_mask=bias, key_padding_mask=padding)
    hides = torch.zeros(N, S).masked_fill(padding, -torch.inf)
    expected = ours(*x, attn_mask=bias, key_padding_mask=hides)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_row_that_sees_nothing_is_zero_where_torch_has_nan(training: bool, need_weights: bool) -> None:
    theirs, ours = pair(True)
    hidden = torch.zeros(L, L, dtype=torch.bool)
    hidden[2] = True
    x = inputs(True, same=True)
    outs = []
    for module in (theirs.train(training), ours.train(training)):
        with torch.set_grad_enabled(training):
            outs.append(module(*x, attn_mask=hidden, need_weights=need_weights)[0])
    if need_weights or not training:
        assert outs[0][:, 2].isnan().all(), "torch changed: say so in docs"
    assert torch.equal(outs[1][:, 2], ours.out_proj.bias.expand(N, -1))
    seen = [i for i in range(L) if i != 2]
    assert torch.allclose(outs[1][:, seen], outs[0][:, seen], atol=1e-5)
    check(theirs, ours, x)  # and with every row seen nothing is different


def test_one_answer_for_is_causal_beside_a_mask() -> None:
    _, ours = pair(True)
    x = inputs(True, same=True)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    hidden = torch.zeros(L, L, dtype=torch.bool)
    hidden[:, 1] = True
    hidden[1, 0] = False
    expected = ours(*x, attn_mask=causal | hidden)[0]
    for training in (True, False):
        for need_weights in (True, False):
            found = ours.train(training)(*x, attn_mask=hidden, is_causal=True, need_weights=need_weights)[0]
            assert torch.allclose(found, expected, atol=1e-6)
    without = ours(*x, is_causal=True)[0]
    assert torch.allclose(without, ours(*x, attn_mask=causal)[0], atol=1e-6)


def test_unbatched_jagged_copies_and_compiled() -> None:
    theirs, ours = pair(True)
    x = torch.randn(L, E)
    for a, b in zip(ours(x, x, x), theirs(x, x, x), strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=1e-5)
    parts = [torch.randn(n, E) for n in (3, 6, 1)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    found = ours(nested, nested, nested, need_weights=False, is_causal=True)[0]
    for part, out in zip(parts, found.unbind(), strict=True):
        assert torch.allclose(out, ours(part, part, part, is_causal=True)[0], atol=1e-6)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(x, x, x)[0], ours(x, x, x)[0])
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x[None], x[None], x[None], need_weights=False)[0][0], ours(x, x, x)[0], atol=1e-6)
    theirs.load_state_dict(ours.state_dict())


ROPE = {"rope": seqkern.nn.RotaryEmbedding(E // H, 100.0)}


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"window": (2, 0)}, {"qk_norm": True}, ROPE], ids=str)
def test_a_cache_gives_what_the_whole_sequence_gives(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = seqkern.nn.MultiheadAttention(E, H, batch_first=True, **options).eval()
    x = torch.randn(N, L, E)
    with torch.no_grad():
        expected = module(x, x, x, need_weights=False, is_causal=True)[0]
        cache = module.make_cache(N, L)
        first = module(x[:, :3], x[:, :3], x[:, :3], need_weights=False, cache=cache)[0]
        rest = [module(*(x[:, i : i + 1],) * 3, need_weights=False, cache=cache)[0] for i in range(3, L)]
    assert torch.allclose(torch.cat([first, *rest], 1), expected, atol=1e-6)
    assert cache.lengths.tolist() == [L] * N


def test_rotary_embeddings() -> None:
    """The same as heads turned by hand; only distances matter; positions; jagged rows begin anew."""
    torch.manual_seed(0)
    module = seqkern.nn.MultiheadAttention(E, H, batch_first=True, num_kv_heads=2, qk_norm=True, **ROPE)
    assert module.rope is ROPE["rope"]
    assert not [name for name in module.state_dict() if "rope" in name]
    x = torch.randn(N, L, E)
    q, k, v = (t.unflatten(-1, (-1, E // H)).transpose(1, 2) for t in module._project(x, x, x))
    q, k = seqkern.rope(module.q_norm(q), module.k_norm(k), theta=100.0)
    by_hand = module.out_proj(seqkern.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
    y, weights = module(x, x, x, is_causal=True)
    assert torch.allclose(y, by_hand, atol=1e-5)
    assert torch.allclose(weights, seqkern.attention_weights(q, k, causal=True).mean(1), atol=1e-5)
    moved = module(x, x, x, is_causal=True, positions=torch.arange(L) + 1000)[0]
    assert torch.allclose(moved, y, atol=1e-4)
    other = module(x, x, x, is_causal=True, positions=torch.arange(N * L).view(N, L).flip(1))[0]
    assert not torch.allclose(other, y, atol=1e-3)
    parts = [torch.randn(n, E) for n in (3, 6, 1)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    found = module(nested, nested, nested, need_weights=False, is_causal=True)[0]
    for part, out in zip(parts, found.unbind(), strict=True):
        assert torch.allclose(out, module(part, part, part, is_causal=True)[0], atol=1e-5)
    memory = module(x[:, :3], x, x)[0]  # other lengths: each from position 0
    assert torch.allclose(memory, module(x, x, x)[0][:, :3], atol=1e-5)
    with torch.no_grad():
        model = seqkern.nn.Transformer(E, H, 1, 1, 32, batch_first=True, **ROPE).eval()
        assert not torch.allclose(model(x, x), model(x, x.flip(1)).flip(1), atol=1e-3)
        assert sum(type(m) is seqkern.nn.RotaryEmbedding for m in model.modules()) == 2


def test_weights_of_chosen_rows() -> None:
    _, ours = pair(True)
    x = inputs(True)
    rows = torch.tensor([4, 0])
    whole = ours(*x, average_attn_weights=False)[1]
    assert torch.allclose(ours(*x, weight_rows=rows)[1], whole.mean(1)[:, rows], atol=1e-6)
    assert torch.allclose(ours(*x, weight_rows=rows, average_attn_weights=False)[1], whole[:, :, rows], atol=1e-6)


def test_bad_input_is_named() -> None:
    _, ours = pair(True)
    q, k, v = inputs(True)
    with pytest.raises(ValueError, match=r"key's last dimension must be 16, got shape \(3, 5, 15\)"):
        ours(q, k[..., :15], v)
    with pytest.raises(ValueError, match="key and value must have the same length and batch"):
        ours(q, k, v[:, :4])
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(7, 5\) or \(12, 7, 5\), got \(5, 7\)"):
        ours(q, k, v, attn_mask=torch.zeros(S, L))
    with pytest.raises(TypeError, match=r"key_padding_mask must be bool .True hides. or of floating point"):
        ours(q, k, v, key_padding_mask=torch.zeros(N, S, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads = 4, got 3"):
        seqkern.nn.MultiheadAttention(E, H, num_kv_heads=3)
    with pytest.raises(ValueError, match="rope must be for embed_dim / num_heads = 4 features, got 8"):
        seqkern.nn.MultiheadAttention(E, H, rope=seqkern.nn.RotaryEmbedding(8))
    with pytest.raises(TypeError, match="rope must be a seqkern.nn.RotaryEmbedding, got bool"):
        seqkern.nn.MultiheadAttention(E, H, rope=True)
    with pytest.raises(ValueError, match="positions are for rotary embeddings, and there are none"):
        ours(q, q, q, positions=torch.arange(L))
    with pytest.raises(NotImplementedError, match="rope with positions or a cache for 7 queries and 5 keys"):
        seqkern.nn.MultiheadAttention(E, H, batch_first=True, **ROPE)(q, k, v, positions=torch.arange(L))
    with pytest.raises(NotImplementedError, match="attn_mask beside a cache"):
        ours(q, q, q, need_weights=False, attn_mask=torch.zeros(L, L), cache=ours.make_cache(N, L))


# ---- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_layers(name: str, activation: str, norm_first: bool) -> None:
    options: Any = {"norm_first": norm_first, "activation": activation, "batch_first": True, "dropout": 0.0}
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    mask = {"src_mask" if "Encoder" in name else "tgt_mask": causal}
    sequences = {"x": L} if "Encoder" in name else {"x": L, "memory": S}

    def made(package: Any) -> Any:
        return getattr(package, name)(E, H, 32, **options)

    def inputs_of(generator: torch.Generator) -> dict[str, Tensor]:
        torch.manual_seed(int(torch.randint(1 << 31, (), generator=generator)))
        tensors = {each: torch.randn(N, length, E) for each, length in sequences.items()}
        return {each: t.detach().double() for each, t in (tensors | dict(made(nn).named_parameters())).items()}

    def run(layer: Any) -> Any:
        def call(**tensors: Tensor) -> Any:
            given = tuple(tensors.pop(each) for each in sequences)
            return torch.func.functional_call(layer, tensors, given, mask)

        return call

    case = Case(inputs_of, run(made(seqkern.nn)), run(made(nn)), run(made(nn)))
    for report in check_case(case, torch.float32):
        assert report.passed, report
    ours, given = made(seqkern.nn), [torch.randn(N, length, E) for length in sequences.values()]
    with torch.no_grad():
        assert torch.equal(ours.eval()(*given, **mask), ours.train()(*given, **mask)), "one way through"


def test_padding_holds_the_same_in_training_and_evaluation() -> None:
    torch.manual_seed(0)
    layer = seqkern.nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True)
    for made in (seqkern.nn.TransformerEncoder(layer, 2), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)):
        x, padding = torch.randn(N, L, E), torch.arange(L) >= torch.tensor([[7], [2], [0]])
        trained = made.train()(x, src_key_padding_mask=padding)
        with torch.no_grad():
            assert torch.equal(made.eval()(x, src_key_padding_mask=padding), trained)
        assert trained.isfinite().all()
        trained.sum().backward()
        assert all(p.grad.isfinite().all() for p in made.parameters())


def test_the_whole_transformer_is_torchs() -> None:
    torch.manual_seed(0)
    options: Any = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    theirs = nn.Transformer(E, H, 2, 2, **options)
    ours = seqkern.nn.Transformer(E, H, 2, 2, **options)
    ours.load_state_dict(theirs.state_dict())
    src, tgt = torch.randn(N, S, E), torch.randn(N, L, E)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    expected = theirs(src, tgt, tgt_mask=mask)
    assert torch.allclose(ours(src, tgt, tgt_mask=mask), expected, atol=1e-5)
    assert torch.allclose(ours(src, tgt, tgt_is_causal=True), expected, atol=1e-5)
    ours.encoder.layers[0].self_attn.register_forward_hook(lambda *_: called.append(1))
    called: list[int] = []
    with torch.no_grad():
        ours.eval()(src, tgt)
    assert called == [1], "hooks are called in evaluation"
