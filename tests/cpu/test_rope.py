"""Rotary position embeddings: accuracy, layouts, models' own formulas, every derivative and transform, the module."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch

import seqkern
from seqkern import reference
from seqkern.nn import RotaryEmbedding
from seqkern.ops.rope import cost
from seqkern.testing import check_case, poison, rope_case, verify


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True], ids=["pairs", "wide"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(2, None), (6, 2), (64, None), (80, 32), (130, 66), (256, 0)])
def test_error_rule(dim, rotary_dim, interleaved, wide, dtype, isa, passes):
    for sequence_dim in (-2, -3):
        options = {"interleaved": interleaved, "rotary_dim": rotary_dim, "wide": wide, "sequence_dim": sequence_dim}
        with poison():
            passes(check_case(rope_case(dim=dim, **options), dtype))


@pytest.mark.parametrize("tokens", [1, 16, 17, 150])
def test_error_rule_at_other_lengths(tokens, dtype, isa, passes):
    passes(check_case(rope_case(tokens=tokens, first=1000, theta=500000.0, scaling=0.7), dtype))
    passes(check_case(rope_case(tokens=tokens, kv_heads=None, batch=3), dtype))


@pytest.mark.parametrize("wide", [False, True])
def test_tables_are_exact_at_any_position(wide, isa):
    """To the last bits of the number: an angle of 1e6 in float32 would be off by 0.03."""
    positions = torch.tensor([[0, 1, 7, 1000, 123456, 10**6], [-1, -7, 3, 65537, 5, 10**6 - 1]])
    inv_freq = 10000.0 ** (torch.arange(0, 70, 2).double() / -70)
    angles = positions.double()[..., None] * inv_freq
    cos, sin = torch.ops.seqkern.rope_tables(positions, inv_freq, 1.25, wide)
    eps = torch.finfo(cos.dtype).eps
    assert cos.dtype == (torch.float64 if wide else torch.float32)
    assert ((cos.double() - 1.25 * angles.cos()).abs() <= 1.5 * eps).all()
    assert ((sin.double() - 1.25 * angles.sin()).abs() <= 1.5 * eps).all()


def test_bad_numbers_stay_in_their_pair(isa):
    x = draw(1, 2, 5, 12)
    good = seqkern.rope(x)[0]
    x[0, 1, 3, 2] = math.nan
    bad = seqkern.rope(x)[0]
    assert bad.isnan().nonzero().tolist() == [[0, 1, 3, 2], [0, 1, 3, 8]]
    assert torch.equal(bad[bad == bad], good[bad == bad])


def test_turning_back_is_the_inverse(dtype, isa):
    x = draw(2, 3, 40, 64, dtype=dtype)
    tables = seqkern.rope_tables(torch.arange(40), 64, dtype=torch.promote_types(dtype, torch.float32))
    (turned, _), (back, _) = seqkern.rope(x, tables=tables), seqkern.rope(x, tables=(tables[0], -tables[1]))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=4 * torch.finfo(dtype).eps)
    again = seqkern.rope(turned, tables=(tables[0], -tables[1]))[0]
    assert torch.allclose(again, x, atol=16 * torch.finfo(dtype).eps)
    assert not torch.allclose(back, turned, atol=0.1)


# ---- positions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_positions(interleaved, isa):
    q, k, options = draw(3, 4, 9, 16), draw(3, 2, 9, 16, seed=1), {"interleaved": interleaved, "theta": 100.0}
    whole = seqkern.rope(q, k, **options)
    same = seqkern.rope(q, k, torch.arange(9, dtype=torch.int32), **options)
    assert all(map(torch.equal, whole, same))
    for i in range(9):  # as decoding does it
        step = seqkern.rope(q[:, :, i : i + 1], k[:, :, i : i + 1], i, **options)
        assert all(torch.equal(a[:, :, i : i + 1], b) for a, b in zip(whole, step, strict=True))
    own = torch.stack((torch.arange(9), torch.arange(9).flip(0), torch.full((9,), 4)))
    mixed = seqkern.rope(q, k, own, **options)
    for b in range(3):
        alone = seqkern.rope(q[b], k[b], own[b], **options)  # without a batch
        assert all(torch.equal(a[b], c) for a, c in zip(mixed, alone, strict=True))


def test_packed_sequences_are_a_batch_of_one():
    """(T, H, D), as `attention_varlen` takes it, with positions that begin anew."""
    lengths = (4, 1, 6)
    q = draw(11, 3, 8)
    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = seqkern.rope(q, None, positions, sequence_dim=-3)[0]
    parts = [seqkern.rope(part, sequence_dim=-3)[0] for part in q.split(lengths)]
    assert torch.equal(packed, torch.cat(parts))


# ---- layouts ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda: draw(2, 3, 37, 12),
    "tokens first": lambda: draw(2, 37, 3, 12).transpose(1, 2),
    "batch inside": lambda: draw(37, 2, 3, 12).permute(1, 2, 0, 3),
    "part of a projection": lambda: draw(2, 37, 5 * 12).unflatten(-1, (5, 12))[:, :, 1:4].transpose(1, 2),
    "expanded": lambda: draw(1, 1, 37, 12).expand(2, 3, 37, 12),
    "strided features": lambda: draw(2, 3, 37, 24)[..., ::2],
    "features outside": lambda: draw(2, 12, 3, 37).permute(0, 2, 3, 1),
    "one head": lambda: draw(2, 1, 37, 12),
    "one token": lambda: draw(2, 3, 1, 12),
    "begins askew": lambda: draw(2 * 3 * 37 * 12 + 1)[1:].view(2, 3, 37, 12),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, interleaved, isa):
    x = LAYOUTS[layout]()
    before = x.clone()
    grad = draw(*x.shape, seed=2).transpose(1, 2).contiguous().transpose(1, 2)

    def run(x):
        leaf = x.detach().requires_grad_()
        y = seqkern.rope(leaf, interleaved=interleaved, rotary_dim=10)[0]
        return y.detach(), torch.autograd.grad(y, leaf, grad)[0]

    with poison():
        results = run(x)
    dense = run(x.contiguous())
    assert all(map(torch.equal, results, dense))
    assert torch.equal(x, before)
    for t in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):  # the same, tokens before heads
        y = seqkern.rope(t, interleaved=interleaved, rotary_dim=10, sequence_dim=-3)[0]
        assert torch.equal(y.transpose(1, 2), results[0])


def test_results_lie_in_memory_as_the_inputs_do():
    for shape in ((2, 3, 5, 8), (2, 5, 3, 8)):
        x = draw(*shape)
        assert seqkern.rope(x)[0].stride() == x.stride()
        y = x.transpose(1, 2)
        assert seqkern.rope(y)[0].stride() == y.stride()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_tables_of_no_positions(shape, backend):
    with seqkern.use_backend(backend):
        positions = torch.zeros(shape, dtype=torch.int64)
        assert [t.shape for t in seqkern.rope_tables(positions, 8)] == [(*shape, 4)] * 2
        if len(shape) == 2:
            query = torch.zeros(shape[0], 2, shape[1], 8)
            assert seqkern.rope(query, positions=positions)[0].shape == query.shape


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (2, 3, 5, 0)])
def test_empty(shape, isa):
    x = draw(*shape).requires_grad_()
    y, k = seqkern.rope(x, x[:, :0])
    assert y.shape == shape
    assert k.shape == (shape[0], 0, *shape[2:])
    y.sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize("interleaved", [False, True])
def test_same_bits_on_any_number_of_threads(interleaved, isa):
    q, k = draw(2, 5, 333, 64), draw(2, 2, 333, 64, seed=1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(seqkern.rope(q, k, interleaved=interleaved))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for each in results for a, b in zip(each, results[0], strict=True))


# ---- what models do -----------------------------------------------------------------------------------------------


def test_llama_of_transformers(isa):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = pytest.importorskip("transformers").LlamaConfig(hidden_size=64, num_attention_heads=4)
    q, k = draw(2, 4, 9, 16), draw(2, 2, 9, 16, seed=1)
    positions = torch.stack((torch.arange(9), torch.arange(9) + 3))
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions)
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(seqkern.rope(q, k, tables=(cos, sin)), expected)
    torch.testing.assert_close(seqkern.rope(q, k, positions), expected, atol=1e-5, rtol=1e-5)


def test_neighbours_of_gptj_of_transformers(isa):
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    q = draw(2, 9, 4, 16)  # tokens before heads
    table = gptj.create_sinusoidal_positions(9, 16)
    sin, cos = (t[None].expand(2, -1, -1) for t in table.chunk(2, -1))
    expected = gptj.apply_rotary_pos_emb(q, sin, cos)
    found = seqkern.rope(q, tables=(cos, sin), interleaved=True, sequence_dim=-3)[0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(seqkern.rope(q, interleaved=True, sequence_dim=-3)[0], expected, atol=1e-5, rtol=1e-5)


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn of DeepSeek": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 1.0,
    },
    "yarn of gpt-oss": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_of_longer_sequences(name):
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = SCALINGS[name]
    longest = scaling.get("original_max_position_embeddings", 256)
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=int(longest * scaling["factor"]),
        rope_parameters={**scaling, "rope_theta": 50000.0},
    )  # fmt: skip
    inv_freq, attention = utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours = RotaryEmbedding(64, 50000.0, scaling=scaling)
    torch.testing.assert_close(ours.inv_freq.float(), inv_freq, rtol=1e-5, atol=0)
    assert ours.attention_scaling == pytest.approx(attention)
    assert not torch.allclose(ours.inv_freq, RotaryEmbedding(64, 50000.0).inv_freq)


# ---- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck_of_every_mode(interleaved, wide):
    q, k = (draw(2, n, 3, 6, dtype=torch.float64, seed=n).requires_grad_() for n in (2, 1))
    width = 4 if wide else 2
    tables = draw(2, 3, width, dtype=torch.float64, seed=3), draw(2, 3, width, dtype=torch.float64, seed=4)

    def both(q, k):
        return seqkern.rope(q, k, interleaved=interleaved, rotary_dim=4, tables=tables)

    def one(q):
        return seqkern.rope(q, interleaved=interleaved, rotary_dim=4, tables=tables)[0]

    for function, inputs in ((both, (q, k)), (one, (q,))):
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_and_frequencies_can_be_learned(interleaved):
    q = draw(1, 2, 3, 6, dtype=torch.float64)
    tables = [draw(3, 3, dtype=torch.float64, seed=n).requires_grad_() for n in (1, 2)]
    inv_freq = draw(3, dtype=torch.float64, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: seqkern.rope(q, tables=t, interleaved=interleaved)[0], tables)
    assert torch.autograd.gradcheck(
        lambda f: seqkern.rope(q, inv_freq=f, interleaved=interleaved, scaling=0.5)[0], (inv_freq,)
    )


def test_gradients_only_for_what_needs_them():
    q, k = draw(1, 2, 3, 4).requires_grad_(), draw(1, 2, 3, 4)
    a, b = seqkern.rope(q, k)
    assert not seqkern.rope(q.detach(), k)[0].requires_grad
    (grad,) = torch.autograd.grad(a.sum(), q)
    assert grad.shape == q.shape
    k = k.requires_grad_()
    a, b = seqkern.rope(q, k)
    only_key = torch.autograd.grad(b.sum(), (q, k), allow_unused=True)
    assert only_key[0] is None
    assert torch.equal(only_key[1], torch.autograd.grad(seqkern.rope(k)[0].sum(), k)[0])


def test_functional_transforms():
    q, k = draw(4, 2, 2, 3, 6, dtype=torch.float64), draw(2, 1, 3, 6, dtype=torch.float64, seed=1)
    tables = seqkern.rope_tables(torch.arange(3), 6, dtype=torch.float64)

    def ours(q, k):
        return seqkern.rope(q, k, tables=tables)

    def theirs(q, k):
        return tuple(reference.rope(t, *tables, 6, False) for t in (q, k))

    def loss(f):
        return lambda q, k: sum(t.square().sum().sin() for t in f(q, k))

    for transform in (
        lambda f: torch.func.vmap(f, in_dims=(0, None)),
        lambda f: torch.func.vmap(torch.func.grad(loss(f), argnums=(0, 1)), in_dims=(0, None)),
        lambda f: lambda q, k: torch.func.jvp(lambda x: f(x, k), (q[0],), (q[1],)),
        lambda f: lambda q, k: torch.func.hessian(loss(f))(q[0], k),
        lambda f: lambda q, k: torch.func.jacfwd(torch.func.jacfwd(loss(f)))(q[0], k),
    ):
        torch.testing.assert_close(transform(ours)(q, k), transform(theirs)(q, k))
    own = [draw(4, 1, 3, 3, dtype=torch.float64, seed=n) for n in (5, 6)]  # tables of each sample
    found = torch.func.vmap(lambda q, c, s: seqkern.rope(q, tables=(c, s))[0])(q, *own)
    expected = torch.stack([seqkern.rope(q[i], tables=(own[0][i], own[1][i]))[0] for i in range(4)])
    assert torch.equal(found, expected)


def test_opcheck():
    q, k, tables = draw(2, 3, 5, 8).requires_grad_(), draw(2, 1, 5, 8), [draw(2, 5, 3), draw(2, 5, 3)]
    op = torch.ops.seqkern.rope.default
    for tokens_dim, interleaved, inverse in itertools.product((1, 2), (False, True), (False, True)):
        x, y = (t.detach().transpose(1, 2) if tokens_dim == 1 else t.detach() for t in (q, k))
        for key in (y, None):
            torch.library.opcheck(op, (x, key, *tables, tokens_dim, 6, interleaved, inverse))
    for wide in (False, True):
        arguments = (torch.arange(6).view(2, 3), torch.ones(4).double(), 1.0, wide)
        torch.library.opcheck(torch.ops.seqkern.rope_tables.default, arguments)


@pytest.mark.parametrize("given", ["positions", "tables", "module"])
def test_compiled(given, compilation):
    q, k = draw(2, 4, 5, 8).requires_grad_(), draw(2, 2, 5, 8, seed=1).requires_grad_()
    tables, module = seqkern.rope_tables(torch.arange(5), 8), RotaryEmbedding(8)

    def model(q, k):
        if given == "tables":
            turned = seqkern.rope(q, k.cos(), tables=tables)
        else:
            turned = module(q, k.cos()) if given == "module" else seqkern.rope(q, k.cos(), 3)
        return turned[0].sin(), turned[1]

    results = []
    for function in (model, torch.compile(model, **compilation)):
        outputs = function(q, k)
        results.append((*outputs, *torch.autograd.grad(sum(t.sum() for t in outputs), (q, k))))
    torch.testing.assert_close(*results)


def test_symbolic_trace():
    graph = torch.fx.symbolic_trace(lambda q, k: seqkern.rope(q, k, 2)[0] + 1)
    assert "rope" in str(graph.graph)
    q, k = draw(1, 2, 3, 4), draw(1, 1, 3, 4)
    assert torch.equal(graph(q, k), seqkern.rope(q, k, 2)[0] + 1)


def test_autocast_changes_nothing():
    q = draw(1, 2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(seqkern.rope(q)[0], seqkern.rope(q)[0].float())


# ---- the module ---------------------------------------------------------------------------------------------------


def test_module():
    module = RotaryEmbedding(16, 500.0, rotary_dim=8, interleaved=True, scaling={"rope_type": "linear", "factor": 2.0})
    assert not module.state_dict()
    assert "rotary_dim=8, interleaved=True, scaling={" in repr(module)
    q, k = draw(2, 4, 5, 16), draw(2, 2, 5, 16, seed=1)
    expected = seqkern.rope(
        q, k, 7, inv_freq=RotaryEmbedding(8, 500.0).inv_freq / 2, rotary_dim=8, interleaved=True
    )  # fmt: skip
    for other in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.bfloat16(), module.half()):
        assert all(map(torch.equal, other(q, k, 7), expected))
        tables = other.tables(torch.arange(7, 12))
        assert all(map(torch.equal, other(q, k, tables=tables), expected))
    with torch.device("meta"):
        made = RotaryEmbedding(16)
    made.to_empty(device="cpu")
    assert torch.equal(made.inv_freq, RotaryEmbedding(16).inv_freq)
    assert RotaryEmbedding(16).to("meta").inv_freq.is_meta


# ---- backends, errors, cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_backends_agree(backend, dtype, passes):
    passes(verify("rope", dtype, backend=backend))


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with poison(), seqkern.use_backend("triton"):
        for dtype, interleaved, wide in itertools.product(
            (torch.float32, torch.float16, torch.bfloat16), (False, True), (False, True)
        ):
            for dim, rotary_dim, sequence_dim in ((64, None, -2), (80, 32, -3), (6, 2, -2), (6, 0, -2)):
                case = rope_case(
                    dim=dim, rotary_dim=rotary_dim, interleaved=interleaved, wide=wide, sequence_dim=sequence_dim
                )
                for report in check_case(case, dtype):
                    assert report.passed, (dtype, interleaved, wide, dim, str(report))
        for make in LAYOUTS.values():
            x = make()
            y = seqkern.rope(x, rotary_dim=10)[0]
            with seqkern.use_backend("cpu"):
                torch.testing.assert_close(y, seqkern.rope(x, rotary_dim=10)[0])
        positions = torch.tensor([0, 1, 123456, 10**6, -3])
        for dtype in (torch.float32, torch.float64):
            cos, sin = seqkern.rope_tables(positions, 12, dtype=dtype)
            angles = positions.double()[:, None] * 10000.0 ** (torch.arange(0, 12, 2).double() / -12)
            torch.testing.assert_close(cos, angles.cos().to(dtype))
            torch.testing.assert_close(sin, angles.sin().to(dtype))


Q = torch.ones(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "query must be a tensor, got list", lambda: seqkern.rope([1.0])),
        (TypeError, "query must be float64, .* got torch.int32", lambda: seqkern.rope(Q.int())),
        (ValueError, r"query must have 3 or 4 dimensions, got shape \(8,\)", lambda: seqkern.rope(Q[0, 0, 0])),
        (TypeError, "key must have the query's dtype torch.float32", lambda: seqkern.rope(Q, Q.double())),
        (ValueError, r"key must have the query's shape .* heads, got \(2, 4, 3, 8\)",
         lambda: seqkern.rope(Q, Q[:, :, :3])),
        (ValueError, "key must be on the query's device cpu, got meta", lambda: seqkern.rope(Q, Q.to("meta"))),
        (ValueError, "rotary_dim must be even and at most .* 8, got 10", lambda: seqkern.rope(Q, rotary_dim=10)),
        (ValueError, "rotary_dim must be even and at most .* 8, got 3", lambda: seqkern.rope(Q, rotary_dim=3)),
        (TypeError, "rotary_dim must be a whole number, got 4.0", lambda: seqkern.rope(Q, rotary_dim=4.0)),
        (ValueError, "sequence_dim must be -2 or -3, got 1", lambda: seqkern.rope(Q, sequence_dim=1)),
        (TypeError, "positions must be whole numbers, .* got torch.float32",
         lambda: seqkern.rope(Q, None, torch.ones(5))),
        (TypeError, "positions must be whole numbers, .* got 1.5", lambda: seqkern.rope(Q, None, 1.5)),
        (ValueError, r"positions must have shape \(5,\) or \(2, 5\)", lambda: seqkern.rope(Q, None, torch.arange(4))),
        (ValueError, "theta must be positive, got 0", lambda: seqkern.rope(Q, theta=0)),
        (TypeError, "theta must be a number, got 'x'", lambda: seqkern.rope(Q, theta="x")),
        (TypeError, "scaling must be a number, got None", lambda: seqkern.rope(Q, scaling=None)),
        (ValueError, r"inv_freq must have shape \(4,\), got \(8,\)", lambda: seqkern.rope(Q, inv_freq=torch.ones(8))),
        (TypeError, "inv_freq must be a tensor of floating point", lambda: seqkern.rope(Q, inv_freq=torch.arange(4))),
        (TypeError, "tables must be a pair, cos and sin, got Tensor", lambda: seqkern.rope(Q, tables=torch.ones(5, 4))),
        (ValueError, r"cos of tables must have shape .* N = 5 .* 4 or 8, got \(5, 3\)",
         lambda: seqkern.rope(Q, tables=(torch.ones(5, 3), torch.ones(5, 3)))),
        (ValueError, r"sin of tables must have shape .* got \(3, 5, 4\)",
         lambda: seqkern.rope(Q, tables=(torch.ones(5, 4), torch.ones(3, 5, 4)))),
        (ValueError, "tables must be of one shape",
         lambda: seqkern.rope(Q, tables=(torch.ones(5, 4), torch.ones(5, 8)))),
        (ValueError, "tables and inv_freq are given",
         lambda: seqkern.rope(Q, tables=(torch.ones(5, 4),) * 2, inv_freq=torch.ones(4))),
        (TypeError, "interleave", lambda: seqkern.rope(Q, interleave=True)),
        (TypeError, "dtype must be torch.float32 or torch.float64",
         lambda: seqkern.rope_tables(torch.arange(3), 8, dtype=torch.bfloat16)),
        (ValueError, "rope_tables: rotary_dim must be even, got 7", lambda: seqkern.rope_tables(torch.arange(3), 7)),
        (TypeError, "rope_tables: positions must be whole numbers", lambda: seqkern.rope_tables(5, 8)),
        (ValueError, "rotary_dim must be even and at most head_dim = 8, got 5",
         lambda: RotaryEmbedding(8, rotary_dim=5)),
        (ValueError, 'must be "default", .* got \'dynamic\'',
         lambda: RotaryEmbedding(8, scaling={"rope_type": "dynamic"})),
        (ValueError, '"linear" must have a number "factor", got None',
         lambda: RotaryEmbedding(8, scaling={"rope_type": "linear"})),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, message, call):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("query must have 4 dimensions", {"query": Q[0]}),
        ("key must have size 5 in dimension 2, got 3", {"key": Q[:, :, :3]}),
        ("cos must have 3 dimensions", {"cos": torch.ones(5, 4)}),
        ("cos must have size 5 in dimension 1, got 4", {"cos": torch.ones(1, 4, 4)}),
        ("cos must have size 1 or 2 in dimension 0, got 3", {"cos": torch.ones(3, 5, 4)}),
        ("cos must have ScalarType", {"cos": torch.ones(1, 5, 4).double()}),
        ("sin must have the shape of cos", {"sin": torch.ones(1, 5, 8)}),
        ("columns or half as many, got 3", {"cos": torch.ones(1, 5, 3), "sin": torch.ones(1, 5, 3)}),
        ("rotary_dim must be even and at most query's 8, got 10", {"rotary_dim": 10}),
        ("rotary_dim must be even and at most query's 8, got 7", {"rotary_dim": 7}),
        ("sequence_dim must be 1 or 2, got 3", {"sequence_dim": 3}),
    ],
)
def test_the_op_itself_guards_its_pointers(message, arguments):
    table = torch.ones(1, 5, 4)
    given = {"query": Q, "key": Q, "cos": table, "sin": table, "sequence_dim": 2, "rotary_dim": 8}
    with pytest.raises(RuntimeError, match=f"rope: .*{message}"):
        torch.ops.seqkern.rope(**{**given, "interleaved": False, "inverse": False, **arguments})
    with pytest.raises(RuntimeError, match="rope_tables: inv_freq must have ScalarType"):
        torch.ops.seqkern.rope_tables(torch.arange(3)[None], torch.ones(4), 1.0, False)


def test_cost_counts_the_bytes():
    assert cost(10, 3, 8, torch.bfloat16).bytes == 2 * 2 * 240


if __name__ == "__main__":
    interpreted_cases()
