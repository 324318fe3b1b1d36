"""The feed-forward block: accuracy, every activation and derivative, what is kept, layouts, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern import _direct
from seqkern.ops import ffn as module
from seqkern.ops.ffn import ACTIVATIONS, cost
from seqkern.testing import check_case, ffn_case


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(activation="gelu", rows=(5,), depth=4, width=6, outputs=3, dtype=torch.float64, bias=True):
    inner = width * (2 if ACTIVATIONS[activation][1] else 1)
    x, w1, w2 = draw(*rows, depth, dtype=dtype), draw(inner, depth, dtype=dtype, seed=1), draw(outputs, width, seed=2)
    b1, b2 = (draw(n, dtype=dtype, seed=3) if bias else None for n in (inner, outputs))
    return [x, w1, b1, w2.to(dtype), b2]


def plain(x, w1, b1, w2, b2, activation):
    z, up = F.linear(x, w1, b1), 1
    if ACTIVATIONS[activation][1]:
        z, up = z.chunk(2, -1)
    name = {"reglu": "relu", "swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}.get(activation, activation)
    act = F.gelu(z, approximate="tanh") if name == "gelu_tanh" else getattr(F, name)(z)
    return F.linear(act * up, w2, b2)


@pytest.fixture(params=[False, True], ids=["kept", "recomputed"])
def recompute(request):
    return request.param


# ---- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_error_rule(activation, recompute, dtype, isa, passes):
    passes(check_case(ffn_case(activation, recompute=recompute), dtype))


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (3, 7, 15, 17), (1000, 16, 2000, 16), (2, 300, 33, 1)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_sizes(size, activation, recompute, isa, passes):
    """1000 rows of 2000 are two chunks of the forward pass."""
    passes(check_case(ffn_case(activation, *size, bias=False, recompute=recompute), torch.float32))


@pytest.mark.parametrize("activation", range(4))
@pytest.mark.parametrize("gated", [False, True])
def test_the_activation_is_the_functions(activation, gated, dtype, isa):
    """Forward and backward of the kernel, bit for bit those of the gated units where there is one."""
    z, dy = draw(9, 2 * 37, dtype=dtype) * 3, draw(9, 37 if gated else 74, dtype=dtype, seed=1)
    y = torch.ops.seqkern.ffn_fwd(z, activation, gated)
    dz, again = torch.ops.seqkern.ffn_bwd(dy, z, activation, gated)
    assert torch.equal(y, again)
    if activation == module.RELU:
        g, u = z.chunk(2, -1) if gated else (z, torch.ones_like(z))
        assert torch.equal(y, F.relu(g) * u)
        expected = [torch.where(g > 0, dy * u, 0)] + ([dy * F.relu(g)] if gated else [])
    else:
        g, u = z.chunk(2, -1) if gated else (z, torch.ones_like(z))
        assert torch.equal(y, torch.ops.seqkern.glu_fwd(g, u, activation))
        expected = torch.ops.seqkern.glu_bwd(dy, g, u, activation)[: 1 + gated]
    assert torch.equal(dz, torch.cat(list(expected), 1))


def test_extremes(isa):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        z = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e4, -1e4] * 5], dtype=dtype)
        leaf = z.clone().requires_grad_()
        expected = F.relu(leaf)
        (slope,) = torch.autograd.grad(expected.sum(), leaf)
        found, _ = torch.ops.seqkern.ffn_bwd(torch.ones_like(z), z, module.RELU, False)
        torch.testing.assert_close(found, slope, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(torch.ops.seqkern.ffn_fwd(z, module.RELU, False), expected, equal_nan=True)


def test_a_nan_stays_in_its_row(isa):
    given = tensors(rows=(600,), width=3000)
    expected = seqkern.ffn(*given)
    given[0][7] = torch.nan
    found = seqkern.ffn(*given)
    assert found[7].isnan().all()
    others = torch.arange(600) != 7
    torch.testing.assert_close(found[others], expected[others])


# ---- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if "relu" not in a and a != "reglu"])
def test_gradcheck(activation, bias, recompute):
    leaves = [t.requires_grad_() for t in tensors(activation, bias=bias) if t is not None]

    def function(*given):
        x, w1, b1, w2, b2 = given if bias else (given[0], given[1], None, given[2], None)
        return seqkern.ffn(x, w1, b1, w2, b2, activation, recompute=recompute)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("needed", range(1, 32))
def test_only_what_is_needed(needed, recompute):
    given = tensors("swiglu")
    for i, t in enumerate(given):
        t.requires_grad_(bool(needed >> i & 1))
    leaves = [t for t in given if t.requires_grad]
    ours = torch.autograd.grad(seqkern.ffn(*given, "swiglu", recompute=recompute).sin().sum(), leaves)
    theirs = torch.autograd.grad(plain(*given, "swiglu").sin().sum(), leaves)
    torch.testing.assert_close(ours, theirs)


def test_backward_twice_and_second_derivatives_of_one(recompute):
    given = [t.requires_grad_() for t in tensors()]
    y = seqkern.ffn(*given, recompute=recompute)
    first = torch.autograd.grad(y.sum(), given, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(y.sum(), given), strict=True))

    def double(function):
        (gx,) = torch.autograd.grad(function().sin().sum(), given[:1], create_graph=True)
        return torch.autograd.grad(gx.square().sum(), given)

    torch.testing.assert_close(
        double(lambda: seqkern.ffn(*given, recompute=recompute)), double(lambda: plain(*given, "gelu"))
    )


def test_transforms():
    x, w1, b1, w2, b2 = tensors("geglu")

    def ours(x):
        return seqkern.ffn(x, w1, b1, w2, b2, "geglu").sin().sum()

    def theirs(x):
        return plain(x, w1, b1, w2, b2, "geglu").sin().sum()

    torch.testing.assert_close(torch.func.grad(ours)(x), torch.func.grad(theirs)(x))
    torch.testing.assert_close(torch.func.hessian(ours)(x), torch.func.hessian(theirs)(x))
    samples = draw(4, 5, 4, seed=7)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(ours))(samples), torch.func.vmap(torch.func.grad(theirs))(samples)
    )
    ensemble = torch.stack([w1, 2 * w1])
    torch.testing.assert_close(
        torch.func.vmap(lambda w: seqkern.ffn(x, w, b1, w2, b2, "geglu"))(ensemble),
        torch.stack([plain(x, w, b1, w2, b2, "geglu") for w in ensemble]),
    )


def test_opcheck():
    z, dy = draw(5, 8, dtype=torch.float32), draw(5, 4, dtype=torch.float32)
    torch.library.opcheck(torch.ops.seqkern.ffn_fwd.default, (z, 1, True))
    torch.library.opcheck(torch.ops.seqkern.ffn_bwd.default, (dy, z, 0, True))
    torch.library.opcheck(torch.ops.seqkern.ffn_bwd.default, (z, z, 3, False))


def test_compiled(compilation, recompute):
    given = [t.float().requires_grad_() for t in tensors("swiglu")]

    def model(*given):
        return seqkern.ffn(*given, "swiglu", recompute=recompute) * 2

    ours, theirs = torch.compile(model, **compilation)(*given), model(*given)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sin().sum(), given), torch.autograd.grad(theirs.sin().sum(), given)
    )


def test_autocast(recompute):
    given = [t.requires_grad_() for t in tensors(dtype=torch.float32, rows=(50,), depth=40, width=60)]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = seqkern.ffn(*given, recompute=recompute), plain(*given, "gelu")
        assert ours.dtype == theirs.dtype == torch.bfloat16
        inside = torch.autograd.grad(ours.float().square().sum(), given, retain_graph=True)
    outside = torch.autograd.grad(ours.float().square().sum(), given)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(inside, outside, strict=True))
    assert seqkern.ffn(*(t.double() for t in given)).dtype == torch.float64


# ---- what is kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("activation", "per_row"), [("gelu", 40), ("swiglu", 80)])
def test_what_is_kept(activation, per_row, recompute):
    """Beside inputs and weights: the first product's result, or nothing."""
    given = [t.requires_grad_() for t in tensors(activation, rows=(700,), depth=8, width=40)]
    own, kept = {id(t) for t in given}, 0

    def pack(t):
        nonlocal kept
        kept += 0 if id(t) in own else t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        seqkern.ffn(*given, activation, recompute=recompute)
    assert kept == (0 if recompute else 700 * per_row)
    with torch.no_grad():
        y = seqkern.ffn(*given, activation, recompute=recompute)
    assert y.grad_fn is None


def test_chunks_change_nothing(monkeypatch, recompute):
    given = [t.requires_grad_() for t in tensors(rows=(700,), depth=16, width=32)]

    def run():
        y = seqkern.ffn(*given, recompute=recompute)
        return y, *torch.autograd.grad(y.sin().sum(), given)

    whole = run()
    monkeypatch.setattr(module, "CHUNK", 1)
    monkeypatch.setattr(module, "CHUNK_ROWS", 64)
    torch.testing.assert_close(run(), whole)


@pytest.mark.skipif(not _direct.FRONTS, reason="the fast path was not built for this torch")
@pytest.mark.parametrize("rows", [(), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_the_fast_path(activation, rows, dtype, monkeypatch):
    """The dispatcher's bits; what is not plain is left to it."""
    given = tensors(activation, rows, dtype=dtype)
    number, gated = ACTIVATIONS[activation]
    for b1, b2 in ((given[2], given[4]), (None, given[4]), (None, None)):
        call = [*given[:2], b1, given[3], b2]
        found = _direct.ffn(*call, number, gated, module.CHUNK, False)
        with monkeypatch.context() as patch:
            patch.setattr(_direct, "enabled", False)
            expected = seqkern.ffn(*call, activation)
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
    x, w1, b1, w2, b2 = given
    others = [
        (x, w1[:-1], b1, w2, b2), (x, w1, b1[:-1], w2, b2), (x, w1, b1, w2[:, :-1], b2), (x, w1, b1, w2, b2[:-1]),
        (x[..., :-1], w1, b1, w2, b2), (x.to(torch.int64), w1, b1, w2, b2),
    ]  # fmt: skip
    assert [_direct.ffn(*other, number, gated, module.CHUNK, False) for other in others] == [None] * len(others)
    assert _direct.ffn(*given, number, gated, 1, False) is None
    assert _direct.ffn(*given, number, gated, module.CHUNK, True) is not None
    x.requires_grad_()
    assert _direct.ffn(*given, number, gated, module.CHUNK, True) is None
    assert _direct.ffn(*given, number, gated, module.CHUNK, False) is not None


# ---- layouts and edges --------------------------------------------------------------------------------------------


def test_layouts(isa):
    x, w1, b1, w2, b2 = tensors(rows=(2, 3))
    expected = plain(x, w1, b1, w2, b2, "gelu")
    wide = torch.full((2, 3, 9), 99.0, dtype=torch.float64)
    wide[..., 2:6] = x
    for layout in (wide[..., 2:6], x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT):
        before = layout.clone()
        torch.testing.assert_close(seqkern.ffn(layout, w1.t().contiguous().t(), b1, w2, b2), expected)
        assert torch.equal(layout, before)
    torch.testing.assert_close(seqkern.ffn(x[0, 0], w1, b1, w2, b2), expected[0, 0])


@pytest.mark.parametrize("size", [(0, 4, 6, 3), (5, 0, 6, 3), (5, 4, 0, 3), (5, 4, 6, 0)], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_empty(size, activation, recompute, isa):
    rows, depth, width, outputs = size
    given = [t.requires_grad_() for t in tensors(activation, (rows,), depth, width, outputs)]
    ours, theirs = seqkern.ffn(*given, activation, recompute=recompute), plain(*given, activation)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), given), torch.autograd.grad(theirs.sum(), given))


def test_threads(isa):
    given = tensors("geglu", rows=(300,), depth=16, width=400, dtype=torch.float32)
    z = F.linear(*given[:3])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(torch.ops.seqkern.ffn_fwd(z, 1, True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(t, results[0]) for t in results)


def test_module():
    block = seqkern.nn.FeedForward(8, 24, "swiglu", bias=False, recompute=True, dtype=torch.float64)
    x = draw(3, 8)
    expected = plain(x, block.linear1.weight, None, block.linear2.weight, None, "swiglu")
    torch.testing.assert_close(block(x), expected)
    assert block.linear1.weight.shape == (48, 8)
    assert "recompute=True" in repr(block)
    with pytest.raises(ValueError, match="FeedForward: activation must be one of relu, .*, got 'tanh'"):
        seqkern.nn.FeedForward(8, 24, "tanh")


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "gelu_tanh", F.silu, torch.tanh])
def test_layers_of_the_transformer_use_it(activation):
    """With torch's numbers; where somebody waits for a linear layer to be called, it is called."""
    torch.manual_seed(0)
    plain = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}.get(activation, activation)
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 20, 0.0, plain, batch_first=True, dtype=torch.float64)
    ours = seqkern.nn.TransformerEncoderLayer(8, 2, 20, 0.0, activation, batch_first=True, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x, calls = draw(2, 5, 8), []
    torch.testing.assert_close(ours(x), theirs(x))
    ours.linear1.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(ours(x), theirs(x))
    assert len(calls) == 1


# ---- Triton, errors, cost -----------------------------------------------------------------------------------------


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for activation in ACTIVATIONS:
            for recompute in (False, True):
                case = ffn_case(activation, 9, 5, 33, 3, recompute=recompute)
                assert all(report.passed for report in check_case(case, torch.float32)), activation
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            for activation in ("relu", "geglu_tanh"):
                reports = check_case(ffn_case(activation, 3, 5, 1100, 3), dtype)
                assert all(report.passed for report in reports), reports


X, W1, B1, W2, B2 = torch.zeros(2, 3, 4), torch.zeros(6, 4), torch.zeros(6), torch.zeros(5, 6), torch.zeros(5)


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [
        (TypeError, ([1.0], W1, B1, W2, B2), "x must be a tensor, got list"),
        (TypeError, (X, None, B1, W2, B2), "w1 must be a tensor, got NoneType"),
        (TypeError, (X.long(), W1, B1, W2, B2), "x must be float64, float32, bfloat16 or float16, got torch.int64"),
        (TypeError, (X, W1.double(), B1, W2, B2), "w1 must have x's dtype torch.float32, got torch.float64"),
        (TypeError, (X, W1, B1, W2, B2.half()), "b2 must have x's dtype torch.float32, got torch.float16"),
        (ValueError, (X[0, 0, 0], W1, B1, W2, B2), r"x must have shape \(\.\.\., D\), got \(\)"),
        (ValueError, (X, W1[:, :3], B1, W2, B2), r"w1 must have shape \(H, 4\), got \(6, 3\)"),
        (ValueError, (X, W1, B1, W2[:, :5], B2), r"w2 must have shape \(E, 6\), got \(5, 5\)"),
        (ValueError, (X, W1, B1[:4], W2, B2), r"b1 must have shape \(6,\), got \(4,\)"),
        (ValueError, (X, W1, B1, W2, B2[:4]), r"b2 must have shape \(5,\), got \(4,\)"),
        (ValueError, (X, W1.to("meta"), B1, W2, B2), "w1 must be on x's device cpu, got meta"),
        (ValueError, (X, W1, B1, W2, B2, "swiglu"), r"w2 must have shape \(E, 3\), got \(5, 6\)"),
        (ValueError, (X, W1[:5], None, W2, B2, "swiglu"), r"w1 must have shape \(2H, 4\), got \(5, 4\)"),
        (ValueError, (X, W1, B1, W2, B2, "tanh"), "activation must be one of relu, silu, .*, got 'tanh'"),
    ],
)
def test_errors(error, given, message):
    with pytest.raises(error, match=f"ffn: {message}"):
        seqkern.ffn(*given)


def test_cost():
    assert cost(2, 3, 5, 7, torch.float32).flops == 2 * 2 * 5 * 10


if __name__ == "__main__":
    interpreted_cases()
