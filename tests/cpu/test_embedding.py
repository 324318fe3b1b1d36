"""Embeddings: accuracy, positions, norm, dropout, every derivative, sparse gradients, layouts, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern import reference
from seqkern.ops.embedding import cost
from seqkern.testing import check_case, embedding_case, poison


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids_of(*shape, classes=9, seed=0):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "alone": {"positions": None, "norm": False, "scale": 1.0},
    "scaled": {"positions": None, "norm": False},
    "learned": {"norm": False},
    "sinusoidal": {"positions": "sinusoidal", "norm": False, "columns": 34},
    "norm": {"positions": None},
    "learned and norm": {},
    "sinusoidal and norm": {"positions": "sinusoidal", "columns": 34},
    "dropout": {"norm": False, "dropout_p": 0.3},
    "all": {"dropout_p": 0.3},
    "offsets": {"offset": torch.tensor([0, 9, 3])},
    "sinusoidal offsets": {"positions": "sinusoidal", "columns": 34, "offset": torch.tensor([0, 9, 3])},
    "positions of each": {"offset": torch.arange(120).view(3, 40) * 7 % 50},
}


@pytest.mark.parametrize("case", CASES)
def test_error_rule(case, dtype, isa, passes):
    passes(check_case(embedding_case(**CASES[case]), dtype))


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 64, 300])
@pytest.mark.parametrize("shape", [(1, 1), (7,), (2, 3, 65)], ids=str)
def test_sizes(columns, shape, isa, passes):
    for options in ({}, {"norm": False}, {"positions": None, "norm": False, "scale": 1.0}):
        passes(check_case(embedding_case(columns=columns, shape=shape, **options), torch.float32))


def test_torch_finds_the_same():
    weight, ids = draw(40, 20, dtype=torch.float32), ids_of(5, 7, classes=40)
    assert torch.equal(seqkern.embedding(ids, weight), F.embedding(ids, weight))
    assert torch.equal(seqkern.embedding(ids.int(), weight), F.embedding(ids, weight))


def test_sinusoids_are_vaswanis():
    """By the formula in Python's math; at positions far beyond any table too."""
    for position in (0, 1, 77, 100_000):
        found = seqkern.embedding(torch.tensor([0]), torch.zeros(1, 6), positions="sinusoidal", offset=position)[0]
        angles = [position / 10000 ** (2 * i / 6) for i in range(3)]
        expected = [f(a) for a in angles for f in (math.sin, math.cos)]
        torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
        exact = reference.sinusoids(torch.tensor([position]), 6)[0]
        torch.testing.assert_close(exact, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


# ---- gradients ----------------------------------------------------------------------------------------------------

OPTIONS = {
    "alone": {}, "learned": {"positions": True}, "norm": {"norm": True}, "all": {"positions": True, "norm": True},
    "weight of the norm": {"norm": "weight"}, "padding": {"padding_idx": 3}, "dropout": {"dropout_p": 0.4, "seed": 7},
    "sinusoidal": {"positions": "sinusoidal"}, "every": {"positions": True, "norm": True, "dropout_p": 0.4, "seed": 7},
}  # fmt: skip


def call_of(name, sparse=False):
    """A function of the leaves, and the leaves."""
    options = dict(OPTIONS[name])
    ids, leaves = ids_of(2, 5), [draw(9, 4)]
    learned, norm = options.pop("positions", None), options.pop("norm", None)
    if learned is True:
        leaves.append(draw(8, 4, seed=1))
    if norm:
        leaves.append(draw(4, seed=2) + 2)
    if norm is True:
        leaves.append(draw(4, seed=3))

    def function(weight, *rest):
        rest = list(rest)
        table = rest.pop(0) if learned is True else learned
        parameters = (rest[0], rest[1] if len(rest) > 1 else None) if norm else None
        return seqkern.embedding(
            ids, weight, positions=table, offset=2 if table is not None else 0, scale=1.5, norm=parameters,
            sparse=sparse, **options,
        )  # fmt: skip

    return function, [t.requires_grad_() for t in leaves]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name):
    function, leaves = call_of(name)
    if name != "padding":  # its gradient is not the derivative
        assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, leaves)
    with seqkern.use_backend("reference"):
        expected = torch.autograd.grad(function(*leaves).sin().sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(function(*leaves).sin().sum(), leaves), expected)


@pytest.mark.parametrize("name", ["all", "every"])
def test_only_what_is_needed(name):
    function, leaves = call_of(name)
    every = torch.autograd.grad(function(*leaves).sin().sum(), leaves)
    for wanted in itertools.product([False, True], repeat=len(leaves)):
        if any(wanted):
            given = [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
            found = torch.autograd.grad(function(*given).sin().sum(), [t for t in given if t.requires_grad])
            assert all(torch.equal(a, b) for a, b in zip(found, itertools.compress(every, wanted), strict=True))


def test_padding_gives_no_gradient(isa):
    ids, weight = torch.tensor([1, 3, 3, 0, 1]), draw(5, 6, dtype=torch.float32).requires_grad_()
    for padding in (3, -2):
        (ours,) = torch.autograd.grad(seqkern.embedding(ids, weight, padding_idx=padding).square().sum(), weight)
        (theirs,) = torch.autograd.grad(F.embedding(ids, weight, padding_idx=padding).square().sum(), weight)
        torch.testing.assert_close(ours, theirs)
        assert not ours[3].any()


@pytest.mark.parametrize("name", OPTIONS)
def test_sparse(name, isa):
    """The dense gradient's rows, each once and in order; it goes through torch's optimiser."""
    function, leaves = call_of(name)
    dense = torch.autograd.grad(function(*leaves).sin().sum(), leaves)
    function, leaves = call_of(name, sparse=True)
    found = torch.autograd.grad(function(*leaves).sin().sum(), leaves)
    assert found[0].is_sparse
    assert found[0].is_coalesced()
    rows = found[0].indices()[0]
    used = set(ids_of(2, 5).flatten().tolist()) - {OPTIONS[name].get("padding_idx")}
    assert rows.tolist() == sorted(used)
    torch.sparse_coo_tensor(rows[None], found[0].values(), found[0].shape, check_invariants=True)
    assert torch.equal(found[0].to_dense(), dense[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1:], dense[1:], strict=True))
    weight = leaves[0].detach().clone().requires_grad_()
    function(weight, *leaves[1:]).sin().sum().backward()
    torch.optim.SGD([weight], lr=0.5).step()
    torch.testing.assert_close(weight, leaves[0] - 0.5 * dense[0])


def test_sparse_where_others_would_be_wrong():
    ids, weight = ids_of(4), draw(9, 4).requires_grad_()
    with pytest.raises(NotImplementedError, match="sparse gradients are not compiled, and not those of a transform"):
        torch.func.grad(lambda w: seqkern.embedding(ids, w, sparse=True).sum())(weight)
    (grad,) = torch.autograd.grad(seqkern.embedding(ids, weight, sparse=True).sin().sum(), weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="embedding: sparse gradients cannot be differentiated"):
        grad.to_dense().square().sum().backward()


@pytest.mark.parametrize("classes", [1, 3, 2048, 2049, 100_000])
def test_many_tokens_of_a_row_and_many_rows(classes, isa, passes):
    """Sorted by one digit, two or none."""
    passes(check_case(embedding_case(classes, 5, (2, 400), positions=None, norm=False), torch.float32))


def test_the_same_bits(isa):
    ids, weight = ids_of(3000, classes=500), draw(500, 40, dtype=torch.float32).requires_grad_()
    table, parameters = draw(1000, 40, dtype=torch.float32), (draw(40, dtype=torch.float32).requires_grad_(), None)

    def run(**options):
        y = seqkern.embedding(ids.view(3, 1000), weight, positions=table, norm=parameters, dropout_p=0.2, seed=3)
        return y, *torch.autograd.grad(y.sin().sum(), (weight, parameters[0]))

    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with poison():
                results.append(run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_what_is_kept():
    """Statistics alone, two numbers a token with a norm."""
    weight, table = draw(9, 64).requires_grad_(), draw(100, 64).requires_grad_()
    ids, kept = ids_of(3, 50), 0

    def pack(t):
        nonlocal kept
        kept += 0 if t is weight or t is table or t.dtype == torch.int64 else t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        seqkern.embedding(ids, weight, positions=table, norm=(None, None), dropout_p=0.1)
    assert kept == 300


# ---- transforms and compilation -----------------------------------------------------------------------------------


def test_transforms():
    ids, weight, table = ids_of(2, 5), draw(9, 4), draw(7, 4)

    def ours(weight, table):
        return seqkern.embedding(ids, weight, positions=table, norm=(None, None)).sin().sum()

    def theirs(weight, table):
        s = F.embedding(ids, weight) + table[:5]
        return F.layer_norm(s, (4,)).sin().sum()

    for transform in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(transform(ours)(weight, table), transform(theirs)(weight, table))
    torch.testing.assert_close(torch.func.grad(ours, 1)(weight, table), torch.func.grad(theirs, 1)(weight, table))
    many, tables = torch.stack([weight, 2 * weight]), torch.stack([table, table + 1])
    mapped = torch.func.vmap(torch.func.grad(ours))(many, tables)
    torch.testing.assert_close(mapped, torch.func.vmap(torch.func.grad(theirs))(many, tables))
    samples = ids_of(4, 5, seed=3)
    found = torch.func.vmap(lambda i: seqkern.embedding(i, weight))(samples)
    torch.testing.assert_close(found, F.embedding(samples, weight))


def test_opcheck():
    ids, weight, table = ids_of(6), draw(9, 4, dtype=torch.float32), draw(5, 4, dtype=torch.float32)
    places, row, seed = torch.tensor([0, 4, 2, 1, 0, 3]), torch.ones(4), torch.tensor(5)
    op, back = torch.ops.seqkern.embedding_fwd.default, torch.ops.seqkern.embedding_bwd.default
    torch.library.opcheck(op, (ids, weight, None, None, 0, 1, 1.0, False, None, None, 1e-5, None, 0.0))
    torch.library.opcheck(op, (ids, weight, table, places, 0, 1, 2.0, True, row, None, 1e-5, seed, 0.3))
    _, mean, rstd = op(ids, weight, table, None, 1, 3, 2.0, True, row, row, 1e-5, None, 0.0)
    dy, rest = draw(6, 4, dtype=torch.float32), (2.0, True, row, mean, rstd, None, 0.0, 3, True, False, True, True)
    torch.library.opcheck(back, (dy, ids, weight, table, None, 1, 3, *rest))


def test_compiled(compilation):
    ids, leaves = ids_of(2, 5), [t.float().requires_grad_() for t in (draw(9, 4), draw(8, 4), draw(4), draw(4))]

    def model(weight, table, w, b):
        return seqkern.embedding(ids, weight, positions=table, offset=2, norm=(w, b), padding_idx=1) * 2

    ours, theirs = torch.compile(model, **compilation)(*leaves), model(*leaves)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sin().sum(), leaves), torch.autograd.grad(theirs.sin().sum(), leaves)
    )


def test_dropout():
    ids, weight = ids_of(200, 50), torch.ones(9, 40)
    y = seqkern.embedding(ids, weight, dropout_p=0.25)
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert abs(float((y == 0).float().mean()) - 0.25) < 4 * (0.25 * 0.75 / y.numel()) ** 0.5
    assert torch.equal(seqkern.embedding(ids, weight, dropout_p=0.25, training=False), F.embedding(ids, weight))
    assert not seqkern.embedding(ids, weight, dropout_p=1.0).any()
    torch.manual_seed(3)
    first, second = (seqkern.embedding(ids, weight, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(seqkern.embedding(ids, weight, dropout_p=0.25), first)
    assert not torch.equal(first, second)


# ---- layouts and edges --------------------------------------------------------------------------------------------


def test_layouts(isa):
    ids, weight, table = ids_of(3, 5), draw(9, 6), draw(8, 6)
    expected = seqkern.embedding(ids, weight, positions=table, offset=1)
    wide = torch.full((9, 20), 99.0, dtype=torch.float64)
    wide[:, 3:9] = weight
    layouts = (wide[:, 3:9], weight.t().contiguous().t(), weight.repeat_interleave(2, 0)[::2])
    for w, i in itertools.product(layouts, (ids, ids.t().contiguous().t(), ids.repeat(1, 2)[:, :5])):
        w = w.detach().requires_grad_()
        y = seqkern.embedding(i, w, positions=table.t().contiguous().t(), offset=1)
        assert torch.equal(y, expected)
        (grad,) = torch.autograd.grad(y, w, torch.ones(()).double().expand(y.shape))
        torch.testing.assert_close(grad, ids.flatten().bincount(minlength=9).double()[:, None].expand(9, 6))
    assert seqkern.embedding(ids[0, 0], weight).shape == (6,)
    last = seqkern.embedding(ids[:, -1:], weight, positions=table, offset=torch.full((3,), 5))
    assert torch.equal(last, expected[:, -1:])  # a token at a time, at its position


@pytest.mark.parametrize(("shape", "classes", "columns"), [((0,), 5, 3), ((2, 0), 5, 3), ((2, 3), 5, 0), ((0,), 0, 3)])
def test_empty(shape, classes, columns, isa):
    weight = torch.randn(classes, columns, requires_grad=True)
    y = seqkern.embedding(torch.zeros(shape, dtype=torch.int64), weight)
    assert y.shape == (*shape, columns)
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert grad.shape == weight.shape
    assert not grad.any()


@pytest.mark.parametrize("offset", [3, "rows"])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_empty_at_sinusoidal_positions(shape, offset, isa):
    weight = torch.randn(5, 4, requires_grad=True)
    offset = torch.zeros(shape[:-1], dtype=torch.int64) if offset == "rows" else offset
    y = seqkern.embedding(torch.zeros(shape, dtype=torch.int64), weight, positions="sinusoidal", offset=offset)
    assert y.shape == (*shape, 4)
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert not grad.any()


def test_a_nan_stays_in_its_tokens(isa):
    ids, weight = torch.tensor([0, 1, 2, 1]), draw(4, 20, dtype=torch.float32)
    weight[1, 7] = torch.nan
    y = seqkern.embedding(ids, weight.requires_grad_(), norm=(None, None))
    assert y.isnan().all(1).tolist() == [False, True, False, True]
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert grad.isfinite().all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_ids_that_are_not_there(bad, isa):
    weight, ids = draw(9, 4), torch.tensor([0, bad])
    with pytest.raises(RuntimeError, match=f"ids must be at least 0 and below 9, weight's rows, got {bad} for token 1"):
        seqkern.embedding(ids, weight)
    with pytest.raises(RuntimeError, match=f"positions has 9 rows, but the position of token 1 is {bad}"):
        seqkern.embedding(ids * 0, weight, positions=weight, offset=ids)


# ---- Triton, errors, cost -----------------------------------------------------------------------------------------


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for name, options in CASES.items():
            case = embedding_case(**options | {"shape": (3, 9), "columns": options.get("columns", 33)} | (
                {"offset": torch.arange(27).view(3, 9)} if name == "positions of each" else {}))  # fmt: skip
            reports = check_case(case, torch.float32)
            assert all(report.passed for report in reports), (name, [*map(str, reports)])
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            reports = check_case(embedding_case(columns=17, shape=(70,), dropout_p=0.3), dtype)
            assert all(report.passed for report in reports), (dtype, [*map(str, reports)])
        for name in ("padding", "every"):
            test_sparse(name, None)
        bad = seqkern.embedding(torch.tensor([1, 9, -1]), draw(9, 4))
        assert bad.isnan().all(1).tolist() == [False, True, True]


IDS, W, P = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(5, 4), torch.zeros(7, 4)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (TypeError, ([1], W), {}, "ids must be a tensor, got list"),
        (TypeError, (IDS.float(), W), {}, "ids must be int64 or int32, got torch.float32"),
        (TypeError, (IDS, W.long()), {}, "weight must be float64, float32, bfloat16 or float16, got torch.int64"),
        (ValueError, (IDS, W[0]), {}, r"weight must have shape \(V, D\), got \(4,\)"),
        (ValueError, (IDS, W.to("meta")), {}, "weight must be on ids's device cpu, got meta"),
        (
            ValueError,
            (IDS, W),
            {"positions": "rotary"},
            "positions must be a table, \"sinusoidal\" or None, got 'rotary'",
        ),
        (ValueError, (IDS, W[:, :3]), {"positions": "sinusoidal"}, "sinusoidal positions need an even D"),
        (TypeError, (IDS, W), {"positions": P.double()}, "positions must have weight's dtype torch.float32"),
        (ValueError, (IDS, W), {"positions": P[:, :2]}, r"positions must have shape \(P, 4\), as weight, got \(7, 2\)"),
        (ValueError, (IDS, W), {"positions": P, "offset": 5}, "positions has 7 rows, .* from offset 5 over 3 tokens"),
        (ValueError, (IDS, W), {"positions": P, "offset": -1}, "positions has 7 rows, .* from offset -1 over 3 tokens"),
        (TypeError, (IDS, W), {"offset": 1.5}, "offset must be a whole number or a tensor of them, got 1.5"),
        (TypeError, (IDS, W), {"offset": torch.ones(2)}, "offset must be int64 or int32, got torch.float32"),
        (ValueError, (IDS, W), {"offset": IDS[0]}, r"offset must be a number, or have ids's shape \(2, 3\)"),
        (TypeError, (IDS, W), {"scale": "big"}, "scale must be a number, got 'big'"),
        (ValueError, (IDS, W), {"scale": math.inf}, "scale must be finite, got inf"),
        (ValueError, (IDS, W), {"eps": -1.0}, "eps must be finite and at least 0, got -1.0"),
        (TypeError, (IDS, W), {"norm": W}, r"norm must be \(weight, bias\) or None, got Tensor"),
        (ValueError, (IDS, W), {"norm": (W[:, 0], None)}, r"norm's weight must have shape \(4,\), got \(5,\)"),
        (TypeError, (IDS, W), {"norm": (None, W[0].half())}, "norm's bias must have weight's dtype torch.float32"),
        (TypeError, (IDS, W), {"dropout_p": None}, "dropout_p must be a probability, got None"),
        (ValueError, (IDS, W), {"dropout_p": 1.5}, "dropout_p must be a probability, between 0 and 1, got 1.5"),
        (TypeError, (IDS, W), {"dropout_p": 0.5, "seed": 0.5}, "seed must be an integer or an int64 tensor, got float"),
        (ValueError, (IDS, W), {"padding_idx": 5}, "padding_idx must be at least -5 and below 5, got 5"),
        (TypeError, (IDS, W), {"padding_idx": 1.0}, "padding_idx must be a whole number or None, got 1.0"),
    ],
)
def test_errors(error, arguments, options, message):
    with pytest.raises(error, match=f"embedding: {message}"):
        seqkern.embedding(*arguments, **options)


def test_cost():
    assert cost(3, 10, torch.float32).bytes == 240


if __name__ == "__main__":
    interpreted_cases()
