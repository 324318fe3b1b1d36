"""Heads of any size: against attention written out head by head in float64, with every option; the layers; errors."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import seqkern

N, L, S, E, H = 3, 6, 5, 12, 4
SIZES = [5, E, 20]  # odd; each head as wide as the module; wider
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "qk_norm": True},
    {"rope": True},
    {"rope": True, "qk_norm": True, "num_kv_heads": 2},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "num_kv_heads": 2},
    {"kdim": 6, "vdim": 10},
    {"kdim": 6, "vdim": 10, "num_kv_heads": 2, "add_bias_kv": True, "qk_norm": True},
]


def made(head_dim: int, dtype: torch.dtype = torch.float64, **options: Any) -> seqkern.nn.MultiheadAttention:
    """A module with weights of which none is zero or one."""
    torch.manual_seed(0)
    if options.pop("rope", False):
        options["rope"] = seqkern.nn.RotaryEmbedding(head_dim, 100.0, rotary_dim=head_dim // 2 * 2)
    module = seqkern.nn.MultiheadAttention(E, H, batch_first=True, dtype=dtype, head_dim=head_dim, **options)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module


def turned(x: Tensor, theta: float = 100.0) -> Tensor:
    """(N, length, D) by rotary embeddings: feature j with j + n / 2 of the first n, an even number."""
    n = x.shape[-1] // 2 * 2
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * theta ** (-torch.arange(0, n, 2, dtype=x.dtype) / n)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., : n // 2], x[..., n // 2 : n]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., n:]], -1)


def by_hand(
    module: Any,
    params: dict[str, Tensor],
    head_dim: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and weights (N, H, L, S), a head at a time; hidden and added broadcast to the weights."""
    heads = H if module.num_kv_heads is None else module.num_kv_heads
    sizes = [H * head_dim, heads * head_dim, heads * head_dim]
    if "in_proj_weight" in params:
        weights = params["in_proj_weight"].split(sizes)
    else:
        weights = tuple(params[f"{name}_proj_weight"] for name in "qkv")
    bias = params["in_proj_bias"].split(sizes) if "in_proj_bias" in params else (0.0, 0.0, 0.0)
    q, k, v = (x @ w.t() + b for x, w, b in zip((query, key, value), weights, bias, strict=True))
    outs, all_weights = [], []
    for head in range(H):
        shared = head * heads // H
        own = slice(shared * head_dim, (shared + 1) * head_dim)
        q_h, k_h, v_h = q[..., head * head_dim : (head + 1) * head_dim], k[..., own], v[..., own]
        if module.qk_norm:
            eps = torch.finfo(module.q_norm.weight.dtype).eps
            q_h = q_h * (q_h.square().mean(-1, keepdim=True) + eps).rsqrt() * params["q_norm.weight"]
            k_h = k_h * (k_h.square().mean(-1, keepdim=True) + eps).rsqrt() * params["k_norm.weight"]
        if module.rope is not None:
            q_h, k_h = turned(q_h), turned(k_h)
        if "bias_k" in params:
            k_h = torch.cat([k_h, params["bias_k"][..., own].expand(N, -1, -1)], 1)
            v_h = torch.cat([v_h, params["bias_v"][..., own].expand(N, -1, -1)], 1)
        if module.add_zero_attn:
            k_h, v_h = (torch.cat([t, t.new_zeros(N, 1, head_dim)], 1) for t in (k_h, v_h))
        scores = q_h @ k_h.mT / math.sqrt(head_dim)
        extra = scores.shape[-1] - key.shape[1]
        if hidden is not None:
            mask = hidden.expand(N, H, query.shape[1], key.shape[1])[:, head]
            scores = scores.masked_fill(nn.functional.pad(mask, (0, extra)), -math.inf)
        if added is not None:
            mask = added.expand(N, H, query.shape[1], key.shape[1])[:, head]
            scores = scores + nn.functional.pad(mask, (0, extra))
        all_weights.append(scores.softmax(-1))
        outs.append(all_weights[-1] @ v_h)
    out = torch.cat(outs, -1) @ params["out_proj.weight"].t() + params.get("out_proj.bias", 0.0)
    return out, torch.stack(all_weights, 1)


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def arguments(call: str, options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(query, key, value), some of them the same; the call's options; those of `by_hand`."""
    sizes = [options.get(name, E) for name in ("kdim", "vdim")]
    x = drawn(N, L, E, dtype=dtype)
    memory = [drawn(N, S, size, seed=2 + i, dtype=dtype) for i, size in enumerate(sizes)]
    lengths = torch.tensor([S, 1, 3])
    padding = torch.arange(S) >= lengths[:, None]
    causal = torch.ones(L, S, dtype=torch.bool).triu(1)
    heads = drawn(N * H, L, S, seed=4, dtype=dtype)
    if call in ("self", "self causal"):
        own = torch.ones(L, L, dtype=torch.bool).triu(1)
        return (x, x, x), *(({"is_causal": True}, {"hidden": own}) if "causal" in call else ({}, {}))
    if call == "memory":
        return (x, memory[0], memory[0]), {}, {}
    given: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    if call == "causal":
        given, expected = {"is_causal": True}, {"hidden": causal}
    elif call == "lengths":
        given, expected = {"key_lengths": lengths}, {"hidden": padding[:, None, None]}
    elif call == "mask":
        given = {"attn_mask": causal, "key_padding_mask": padding}
        expected = {"hidden": causal | padding[:, None, None]}
    elif call == "added":
        given, expected = {"attn_mask": heads}, {"added": heads.view(N, H, L, S)}
    return (x, *memory), given, expected


CALLS = ["self", "self causal", "memory", "three", "causal", "lengths", "mask", "added"]
CASES = [
    (options, call)
    for options in OPTIONS
    for call in CALLS
    if not ("kdim" in options and call in ("self", "self causal", "memory"))
]


def results(function: Any, tensors: tuple[Tensor, ...], params: list[Tensor], kind: str) -> list[Tensor]:
    """Output, weights of a kind, and the gradients of inputs and parameters. The same tensor stays the same one."""
    leaves = {id(t): t.detach().clone().requires_grad_() for t in tensors}
    out, weights = function(*(leaves[id(t)] for t in tensors))
    loss = (out * drawn(*out.shape, seed=8, dtype=out.dtype)).sum()
    if kind != "none":
        loss = loss + (weights * drawn(*weights.shape, seed=9, dtype=out.dtype)).sum()
    grads = torch.autograd.grad(loss, [*leaves.values(), *params])
    return [out.detach(), *([] if kind == "none" else [weights.detach()]), *grads]


def of_module(module: Any, tensors: tuple[Tensor, ...], given: dict[str, Any], kind: str) -> list[Tensor]:
    options = given | {"need_weights": kind != "none", "average_attn_weights": kind == "mean"}
    return results(lambda *t: module(*t, **options), tensors, list(module.parameters()), kind)


def of_hand(
    module: Any, head_dim: int, tensors: tuple[Tensor, ...], expected: dict[str, Any], kind: str
) -> list[Tensor]:
    params = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    expected = {name: t.double() if t.is_floating_point() else t for name, t in expected.items()}

    def function(*t: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = by_hand(module, params, head_dim, *t, **expected)
        return out, weights.mean(1) if kind == "mean" else weights

    wide = {id(t): t.double() for t in tensors}
    return results(function, tuple(wide[id(t)] for t in tensors), list(params.values()), kind)


@pytest.mark.parametrize("kind", ["none", "mean", "heads"])
@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize(("options", "call"), CASES, ids=str)
def test_values_and_gradients(options: dict[str, Any], call: str, head_dim: int, kind: str) -> None:
    module = made(head_dim, **options)
    tensors, given, expected = arguments(call, options, torch.float64)
    found = of_module(module, tensors, given, kind)
    assert_close(found, of_hand(module, head_dim, tensors, expected, kind))


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize(("options", "call"), CASES, ids=str)
def test_float32(options: dict[str, Any], call: str, head_dim: int) -> None:
    module = made(head_dim, torch.float32, **options)
    tensors, given, expected = arguments(call, options, torch.float32)
    found = of_module(module, tensors, given, "none")
    assert_close(found, [t.float() for t in of_hand(module, head_dim, tensors, expected, "none")])


# ---- what it is made of -------------------------------------------------------------------------------------------


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in module.state_dict().items()}


def test_shapes_of_the_parameters() -> None:
    assert shapes(made(5, num_kv_heads=2, add_bias_kv=True, qk_norm=True, rope=True)) == {
        "in_proj_weight": ((4 + 2 * 2) * 5, E),
        "in_proj_bias": ((4 + 2 * 2) * 5,),
        "bias_k": (1, 1, 2 * 5),
        "bias_v": (1, 1, 2 * 5),
        "out_proj.weight": (E, 4 * 5),
        "out_proj.bias": (E,),
        "q_norm.weight": (5,),
        "k_norm.weight": (5,),
    }
    assert shapes(made(E, kdim=6, vdim=10, bias=False)) == {
        "q_proj_weight": (4 * E, E),
        "k_proj_weight": (4 * E, 6),
        "v_proj_weight": (4 * E, 10),
        "out_proj.weight": (E, 4 * E),
    }


def test_parameters_are_initialized_as_torchs() -> None:
    """Within xavier_uniform's bounds of the matrix that there is, and all over them; biases 0."""
    torch.manual_seed(0)
    module = seqkern.nn.MultiheadAttention(E, H, head_dim=40)
    weight, bound = module.in_proj_weight.detach(), math.sqrt(6 / (3 * H * 40 + E))
    assert 0.9 * bound < weight.abs().max() <= bound
    assert not module.in_proj_bias.any()
    assert not module.out_proj.bias.any()
    assert 0.9 * (H * 40) ** -0.5 < module.out_proj.weight.detach().abs().max() <= (H * 40) ** -0.5
    assert type(module.out_proj) is type(nn.MultiheadAttention(E, H).out_proj)
    meta = seqkern.nn.MultiheadAttention(E, H, head_dim=40, device="meta", dtype=torch.bfloat16, qk_norm=True)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("head_dim", [None, E // H])
def test_the_default_is_torchs(head_dim: int | None) -> None:
    modules = []
    for make in (nn.MultiheadAttention, lambda *a: seqkern.nn.MultiheadAttention(*a, head_dim=head_dim)):
        torch.manual_seed(0)
        modules.append(make(E, H))
    theirs, ours = modules
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    assert "head_dim" not in repr(ours)
    for name in ("TransformerEncoderLayer", "TransformerDecoderLayer"):
        assert shapes(getattr(nn, name)(E, H, 7)) == shapes(getattr(seqkern.nn, name)(E, H, 7, head_dim=head_dim))


def test_it_is_shown() -> None:
    assert repr(made(5, num_kv_heads=2)).startswith("MultiheadAttention(\n  num_kv_heads=2, head_dim=5\n")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_copies_and_state(options: dict[str, Any]) -> None:
    module = made(5, **options)
    tensors, given, _ = arguments("causal", options, torch.float64)
    expected = module(*tensors, **given)
    other = made(5, **options)
    for p in other.parameters():
        nn.init.zeros_(p)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for copied in (copy.deepcopy(module), other):
        assert copied.head_dim == 5
        assert_close(copied(*tensors, **given), expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="size mismatch for out_proj.weight"):
        made(4, **options).load_state_dict(module.state_dict())


# ---- calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize(
    "options", [o for o in OPTIONS if not {"add_bias_kv", "add_zero_attn", "kdim"} & {*o}], ids=str
)
@torch.no_grad()
def test_a_cache_gives_what_the_whole_sequence_gives(options: dict[str, Any], head_dim: int) -> None:
    module = made(head_dim, **options).eval()
    x = drawn(N, L, E)
    whole = module(x, x, x, need_weights=False, is_causal=True)[0]
    pages = seqkern.nn.AttentionPages(N, L, page_size=4)
    for cache in (module.make_cache(N, L), module.make_cache(N, L, pages=pages)):
        assert cache.keys.shape[-1] == cache.values.shape[-1] == head_dim
        steps = [module(*(x[:, part],) * 3, need_weights=False, cache=cache)[0] for part in PARTS]
        assert_close(torch.cat(steps, 1), whole)


PARTS = [slice(0, 3), *(slice(i, i + 1) for i in range(3, L))]


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "qk_norm": True, "rope": True}, {"kdim": 6, "vdim": 10}])
def test_layouts_unbatched_and_jagged(options: dict[str, Any], head_dim: int) -> None:
    """The batch first or second, no batch, nested tensors: one answer."""
    module = made(head_dim, **options)
    sizes = (E, options.get("kdim", E), options.get("vdim", E))
    rows = [[drawn(n, size, seed=3 * n + i) for i, size in enumerate(sizes)] for n in (4, 6, 1)]
    padded = [nn.utils.rnn.pad_sequence([row[i] for row in rows], batch_first=True) for i in range(3)]
    nested = [torch.nested.nested_tensor([row[i] for row in rows], layout=torch.jagged) for i in range(3)]
    jagged = module(*nested, need_weights=False, is_causal=True)[0].unbind()
    batched = module(*padded, is_causal=True, key_lengths=torch.tensor([4, 6, 1]))[0]
    second = copy.deepcopy(module)
    second.batch_first = False
    swapped = second(*(t.transpose(0, 1) for t in padded), is_causal=True)[0].transpose(0, 1)
    for i, row in enumerate(rows):
        alone = module(*row, is_causal=True)[0]
        n = len(alone)
        for other in (jagged[i], batched[i, :n], swapped[i, :n], second(*row, is_causal=True)[0]):
            assert_close(other, alone)


@pytest.mark.parametrize("head_dim", SIZES)
def test_window_weights_of_rows_and_compiled(head_dim: int) -> None:
    module = made(head_dim, window=(2, 0), num_kv_heads=2)
    x = drawn(N, L, E)
    at = torch.arange(L)
    hidden = (at > at[:, None]) | (at < at[:, None] - 2)
    out, weights = by_hand(module, dict(module.named_parameters()), head_dim, x, x, x, hidden)
    assert_close(module(x, x, x, average_attn_weights=False), (out, weights))
    rows = torch.tensor([4, 0])
    assert_close(module(x, x, x, weight_rows=rows), (out, weights[:, :, rows].mean(1)))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x, x, x, need_weights=False)[0], out)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_keeps_the_shape_and_the_mean(need_weights: bool) -> None:
    """The weights that are dropped are those of the output."""
    module = made(20, dropout=0.4).train()
    x = drawn(N, L, E)
    torch.manual_seed(5)
    out, weights = module(x, x, x, need_weights=need_weights, average_attn_weights=False)
    assert out.shape == x.shape
    if need_weights:
        value = (x @ module.in_proj_weight[-H * 20 :].t() + module.in_proj_bias[-H * 20 :]).unflatten(-1, (H, 20))
        heads = (weights @ value.transpose(1, 2)).transpose(1, 2).flatten(2)
        assert_close(out, module.out_proj(heads))


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [0, -4, 2.5, "4", True])
def test_bad_sizes_are_named(head_dim: Any) -> None:
    message = f"MultiheadAttention: head_dim must be a positive whole number, got {head_dim}"
    with pytest.raises(ValueError, match=message):
        seqkern.nn.MultiheadAttention(E, H, head_dim=head_dim)
    for name in ("TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer"):
        with pytest.raises(ValueError, match=message):
            getattr(seqkern.nn, name)(E, H, head_dim=head_dim)


def test_other_errors() -> None:
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, both positive, got 12 and 5"):
        seqkern.nn.MultiheadAttention(E, 5, head_dim=4)
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads = 4, got 0"):
        seqkern.nn.TransformerEncoderLayer(E, H, num_kv_heads=0)
    with pytest.raises(ValueError, match="rope must be for head_dim = 8 features, got 4"):
        seqkern.nn.MultiheadAttention(E, H, head_dim=8, rope=seqkern.nn.RotaryEmbedding(4))
    with pytest.raises(TypeError, match="takes .* positional arguments but"):
        seqkern.nn.MultiheadAttention(E, H, 0.0, True, False, False, None, None, False, None, None, 8)
    with pytest.raises(TypeError, match="'head_size': did you mean head_dim"):
        seqkern.nn.MultiheadAttention(E, H, head_size=8)
    module, x = made(5, add_bias_kv=True), drawn(N, L, E)
    with pytest.raises(ValueError, match="MultiheadAttention: key_lengths must"):
        module(x, x, x, key_lengths=torch.tensor([1, 2]))


# ---- layers -------------------------------------------------------------------------------------------------------


def normed(x: Tensor, norm: Any) -> Tensor:
    return nn.functional.layer_norm(x, (E,), norm.weight, norm.bias, norm.eps)


def block(layer: Any, x: Tensor) -> Tensor:
    one, two = layer.linear1, layer.linear2
    return nn.functional.linear(nn.functional.linear(x, one.weight, one.bias).relu(), two.weight, two.bias)


def attended(module: Any, head_dim: int, x: Tensor, memory: Tensor, hidden: Tensor | None) -> Tensor:
    return by_hand(module, dict(module.named_parameters()), head_dim, x, memory, memory, hidden)[0]


def encoder_by_hand(layer: Any, head_dim: int, x: Tensor, hidden: Tensor | None) -> Tensor:
    if layer.norm_first:
        y = normed(x, layer.norm1)
        x = x + attended(layer.self_attn, head_dim, y, y, hidden)
        return x + block(layer, normed(x, layer.norm2))
    x = normed(x + attended(layer.self_attn, head_dim, x, x, hidden), layer.norm1)
    return normed(x + block(layer, x), layer.norm2)


def decoder_by_hand(layer: Any, head_dim: int, x: Tensor, memory: Tensor, hidden: Tensor | None) -> Tensor:
    if layer.norm_first:
        y = normed(x, layer.norm1)
        x = x + attended(layer.self_attn, head_dim, y, y, hidden)
        x = x + attended(layer.multihead_attn, head_dim, normed(x, layer.norm2), memory, None)
        return x + block(layer, normed(x, layer.norm3))
    x = normed(x + attended(layer.self_attn, head_dim, x, x, hidden), layer.norm1)
    x = normed(x + attended(layer.multihead_attn, head_dim, x, memory, None), layer.norm2)
    return normed(x + block(layer, x), layer.norm3)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "qk_norm": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("head_dim", SIZES)
def test_a_transformer(head_dim: int, norm_first: bool, options: dict[str, Any]) -> None:
    """Two layers of each kind, which a stack copies, with the gradients of all."""
    torch.manual_seed(0)
    model = seqkern.nn.Transformer(
        E, H, 2, 2, 10, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64, head_dim=head_dim, **options
    )
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    assert [m.head_dim for m in attentions] == [head_dim] * 6
    assert len({id(m.in_proj_weight) for m in attentions}) == 6
    src, tgt, hidden = drawn(N, S, E), drawn(N, L, E, seed=2), torch.ones(L, L, dtype=torch.bool).triu(1)
    memory, x = src, tgt
    for layer in model.encoder.layers:
        memory = encoder_by_hand(layer, head_dim, memory, None)
    memory = normed(memory, model.encoder.norm)
    for layer in model.decoder.layers:
        x = decoder_by_hand(layer, head_dim, x, memory, hidden)
    expected = normed(x, model.decoder.norm)
    found = model(src, tgt, tgt_is_causal=True)
    assert_close(found, expected)
    direction, params = drawn(*found.shape, seed=9), list(model.parameters())
    grads = [torch.autograd.grad((y * direction).sum(), params) for y in (found, expected)]
    assert_close(*grads)


@torch.no_grad()
def test_layers_with_rope_window_and_caches() -> None:
    rope = seqkern.nn.RotaryEmbedding(6)
    torch.manual_seed(0)
    options: Any = {"batch_first": True, "dtype": torch.float64, "head_dim": 6, "rope": rope, "window": (3, 0)}
    encoder = seqkern.nn.TransformerEncoder(seqkern.nn.TransformerEncoderLayer(E, H, 10, **options), 2).eval()
    decoder = seqkern.nn.TransformerDecoder(seqkern.nn.TransformerDecoderLayer(E, H, 10, **options), 2).eval()
    x, memory = drawn(N, L, E), drawn(N, S, E, seed=2)
    stacks: list[tuple[Any, Any]] = [
        (encoder, encoder(x, is_causal=True)),
        (decoder, decoder(x, memory, tgt_is_causal=True)),
    ]
    for stack, whole in stacks:
        caches = [layer.self_attn.make_cache(N, L) for layer in stack.layers]
        beside = () if stack is encoder else (memory,)
        steps = [stack(x[:, part], *beside, caches=caches) for part in PARTS]
        assert_close(torch.cat(steps, 1), whole)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@torch.no_grad()
def test_in_a_stack_of_torchs() -> None:
    layer = seqkern.nn.TransformerEncoderLayer(E, H, 10, batch_first=True, head_dim=20)
    x, padding = drawn(N, L, E, dtype=torch.float32), torch.arange(L) >= torch.tensor([[6], [2], [4]])
    expected = seqkern.nn.TransformerEncoder(layer, 2).eval()(x, src_key_padding_mask=padding)
    found = nn.TransformerEncoder(layer, 2).eval()(x, src_key_padding_mask=padding)
    assert_close(found[~padding], expected[~padding])


# ---- optimize and restore -----------------------------------------------------------------------------------------


@torch.no_grad()
def test_restore_leaves_what_torch_cannot_run() -> None:
    model = seqkern.nn.Transformer(E, H, 1, 1, 10, batch_first=True, head_dim=20).eval()
    narrow = seqkern.nn.MultiheadAttention(E, H, batch_first=True, head_dim=E // H).eval()
    both = nn.ModuleList([model, narrow])
    x = drawn(N, L, E, dtype=torch.float32)
    expected = model(x, x), narrow(x, x, x)[0]
    seqkern.restore(both)
    kinds = {type(m) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    assert kinds == {seqkern.nn.MultiheadAttention}
    assert type(model.encoder.layers[0]) is seqkern.nn.TransformerEncoderLayer
    assert type(model.decoder.layers[0]) is seqkern.nn.TransformerDecoderLayer
    assert type(model) is nn.Transformer
    assert type(narrow) is nn.MultiheadAttention
    assert_close((model(x, x), narrow(x, x, x)[0]), expected)
    reasons = {row.module: row.reason for row in seqkern.explain(model).rows}
    assert reasons["encoder.layers.0.self_attn"] == reasons["decoder.layers.0.multihead_attn"] == "with head_dim"
    seqkern.optimize(both)
    assert type(model) is seqkern.nn.Transformer
    assert type(narrow) is seqkern.nn.MultiheadAttention
    assert_close((model(x, x), narrow(x, x, x)[0]), expected)
    rope = seqkern.nn.MultiheadAttention(E, H, rope=seqkern.nn.RotaryEmbedding(E // H, rotary_dim=2))
    assert {row.reason for row in seqkern.explain(rope).rows if row.kind == "RotaryEmbedding"} == {""}
