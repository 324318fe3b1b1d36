"""The loss of negative sampling: accuracy, every derivative, sparse gradients, layouts, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern.ops.sgns_loss import cost
from seqkern.testing import check_case, poison, sgns_loss_case


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids_of(*shape, rows=9, seed=0):
    return torch.randint(rows, shape, generator=torch.Generator().manual_seed(seed))


def arguments(examples=6, negatives=3, columns=5, rows=9, dtype=torch.float64):
    ids = (ids_of(examples, rows=rows), ids_of(examples, rows=rows, seed=1))
    false = ids_of(examples, negatives, rows=rows, seed=2)
    if examples and negatives:
        false[0, 0] = ids[1][0]  # the context itself
    return (*ids, false), [draw(rows, columns, dtype=dtype, seed=seed).requires_grad_() for seed in (3, 4)]


def theirs(ids, w_in, w_out, reduction="mean"):
    center, context, negatives = ids
    v, u = F.embedding(center, w_in), F.embedding(context, w_out)
    scores = (F.embedding(negatives, w_out) * v[..., None, :]).sum(-1)
    others = F.logsigmoid(-scores).masked_fill(negatives == context[..., None], 0).sum(-1)
    losses = -F.logsigmoid((u * v).sum(-1)) - others
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_error_rule(reduction, dtype, isa, passes):
    passes(check_case(sgns_loss_case(reduction=reduction), dtype))


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 64, 300, 1100])
@pytest.mark.parametrize("examples", [(1,), (7, 33), (3, 1, 5)], ids=str)
def test_sizes(columns, examples, isa, passes):
    for negatives in (1, 5, 20):
        passes(check_case(sgns_loss_case(examples, negatives, columns), torch.float32))


@pytest.mark.parametrize("std", [1e-3, 3.0, 30.0])
def test_scales(std, dtype, isa, passes):
    if dtype != torch.float16 or std < 30:  # whose gradients are beyond it
        passes(check_case(sgns_loss_case((70,), std=std), dtype))


def test_many_examples_of_a_row(isa, passes):
    passes(check_case(sgns_loss_case((900,), ins=3, outs=2), torch.float32))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_torch_finds_the_same(reduction, isa):
    ids, tables = arguments(50, rows=20)
    found = seqkern.sgns_loss(*ids, *tables, reduction=reduction)
    expected = theirs(ids, *tables, reduction)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sin().sum(), tables), torch.autograd.grad(expected.sin().sum(), tables)
    )


def test_far_scores(isa):
    """Losses beyond float's smallest number, and as large as the score."""
    for dtype in (torch.float32, torch.float64):
        rows = torch.tensor([[60.0], [-60.0], [3000.0]], dtype=dtype).requires_grad_()
        ones = torch.ones(3, 1, dtype=dtype)
        positive = torch.zeros(3, 0, dtype=torch.int64)
        loss = seqkern.sgns_loss(torch.arange(3), torch.arange(3), positive, rows, ones, reduction="none")
        expected = torch.log1p(torch.exp(torch.tensor([-60.0], dtype=torch.float64)))
        torch.testing.assert_close(loss[:1].double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(loss[1:], torch.tensor([60.0, 0.0], dtype=dtype))
        (grad,) = torch.autograd.grad(loss.sum(), rows)
        torch.testing.assert_close(grad[0].double(), -torch.exp(-torch.tensor([60.0]).double()), rtol=1e-6, atol=0)
        torch.testing.assert_close(grad[1:, 0], torch.tensor([-1.0, 0.0], dtype=dtype))


def test_a_negative_that_is_the_context_counts_nothing(isa):
    (center, context, negatives), tables = arguments()
    negatives[:] = context[:, None]
    every = seqkern.sgns_loss(center, context, negatives, *tables)
    alone = seqkern.sgns_loss(center, context, negatives[:, :0], *tables)
    torch.testing.assert_close(every, alone)
    torch.testing.assert_close(torch.autograd.grad(every, tables), torch.autograd.grad(alone, tables))


# ---- gradients ----------------------------------------------------------------------------------------------------


def test_gradcheck():
    ids, tables = arguments()
    for reduction in ("none", "mean"):
        function = lambda a, b, r=reduction: seqkern.sgns_loss(*ids, a, b, reduction=r)  # noqa: E731
        assert torch.autograd.gradcheck(function, tables, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, tables)


def test_third_derivative():
    ids, tables = arguments(3, 2, 2, 3)

    def third(loss):
        for _ in range(3):
            loss = sum(g.sin().sum() for g in torch.autograd.grad(loss, tables, create_graph=True))
        return loss

    torch.testing.assert_close(third(seqkern.sgns_loss(*ids, *tables)), third(theirs(ids, *tables)))


def test_only_what_is_needed():
    ids, tables = arguments()
    every = torch.autograd.grad(seqkern.sgns_loss(*ids, *tables), tables)
    for wanted in ([True, False], [False, True]):
        given = [t.detach().requires_grad_(w) for t, w in zip(tables, wanted, strict=True)]
        found = torch.autograd.grad(seqkern.sgns_loss(*ids, *given), [t for t in given if t.requires_grad])
        assert all(torch.equal(a, b) for a, b in zip(found, itertools.compress(every, wanted), strict=True))


def test_one_table():
    """The same tensor on both sides gets both gradients."""
    ids, (table, _) = arguments()
    found = torch.autograd.grad(seqkern.sgns_loss(*ids, table, table), table)
    torch.testing.assert_close(found, torch.autograd.grad(theirs(ids, table, table), table))


def test_sparse(isa):
    """The dense gradient's rows, each once and in order; they go through torch's optimisers."""
    ids, tables = arguments(examples=4, rows=50)
    dense = torch.autograd.grad(seqkern.sgns_loss(*ids, *tables), tables)
    found = torch.autograd.grad(seqkern.sgns_loss(*ids, *tables, sparse=True), tables)
    used = (ids[0], torch.cat((ids[1], ids[2].flatten())))
    for sparse, expected, rows in zip(found, dense, used, strict=True):
        assert sparse.is_sparse
        assert sparse.is_coalesced()
        assert sparse.indices()[0].tolist() == sorted(set(rows.tolist()))
        torch.sparse_coo_tensor(sparse.indices(), sparse.values(), sparse.shape, check_invariants=True)
        assert torch.equal(sparse.to_dense(), expected)
    stepped = [t.detach().clone().requires_grad_() for t in tables]
    seqkern.sgns_loss(*ids, *stepped, sparse=True).backward()
    torch.optim.SGD(stepped, lr=0.5).step()
    for t, before, grad in zip(stepped, tables, dense, strict=True):
        torch.testing.assert_close(t, before - 0.5 * grad)


def test_sparse_where_others_would_be_wrong():
    ids, tables = arguments()
    with pytest.raises(NotImplementedError, match="sparse gradients are not compiled, and not those of a transform"):
        torch.func.grad(lambda w: seqkern.sgns_loss(*ids, w, tables[1], sparse=True))(tables[0])
    loss = seqkern.sgns_loss(*ids, *tables, sparse=True)
    for grad in torch.autograd.grad(loss, tables, create_graph=True):
        with pytest.raises(NotImplementedError, match="sgns_loss: sparse gradients cannot be differentiated"):
            grad.to_dense().square().sum().backward()


def test_the_same_bits(isa):
    ids, tables = arguments(3000, 5, 40, 500, torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with poison():
                loss = seqkern.sgns_loss(*ids, *tables, reduction="none")
                results.append((loss, *torch.autograd.grad(loss.sin().sum(), tables)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_an_example_depends_on_no_other(isa):
    (center, context, negatives), tables = arguments(33, 5, 19, 30, torch.float32)
    every = seqkern.sgns_loss(center, context, negatives, *tables, reduction="none")
    for n in range(33):
        one = seqkern.sgns_loss(center[n : n + 1], context[n : n + 1], negatives[n : n + 1], *tables)
        assert torch.equal(one, every[n])


def test_what_is_kept():
    """Scores alone, beside the arguments."""
    ids, tables = arguments(40, 5, 64, 100)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        seqkern.sgns_loss(*ids, *tables)
    assert sum(t.numel() for t in kept if t.dtype != torch.int64 and all(t is not w for w in tables)) == 40 * 6


# ---- transforms and compilation -----------------------------------------------------------------------------------


def test_transforms():
    ids, tables = arguments()
    tables = [t.detach() for t in tables]

    def ours(w_in, w_out):
        return seqkern.sgns_loss(*ids, w_in, w_out)

    def others(w_in, w_out):
        return theirs(ids, w_in, w_out)

    for transform in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(transform(ours)(*tables), transform(others)(*tables))
    many = [torch.stack([t, 2 * t]) for t in tables]
    mapped = torch.func.vmap(torch.func.grad(ours, (0, 1)))(*many)
    torch.testing.assert_close(mapped, torch.func.vmap(torch.func.grad(others, (0, 1)))(*many))
    samples = ids_of(4, 6, seed=3)
    found = torch.func.vmap(lambda c: seqkern.sgns_loss(c, *ids[1:], *tables))(samples)
    torch.testing.assert_close(found, torch.func.vmap(lambda c: theirs((c, *ids[1:]), *tables))(samples))


def test_opcheck():
    ids, tables = arguments(dtype=torch.float32)
    op, back = torch.ops.seqkern.sgns_loss_fwd.default, torch.ops.seqkern.sgns_loss_bwd.default
    tables = [t.detach() for t in tables]
    torch.library.opcheck(op, (*ids, *tables))
    _, scores = op(*ids, *tables)
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(back, (torch.randn(6), *ids, *tables, scores, *needs, False))


def test_compiled(compilation):
    ids, tables = arguments(dtype=torch.float32)

    def model(w_in, w_out):
        return seqkern.sgns_loss(*ids, 2 * w_in, w_out.tanh())

    ours, plain = torch.compile(model, **compilation)(*tables), model(*tables)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad(ours, tables), torch.autograd.grad(plain, tables))


# ---- layouts and edges --------------------------------------------------------------------------------------------


def test_layouts(isa):
    ids, tables = arguments(6, 4, 6, 9)
    shaped = (ids[0].view(2, 3), ids[1].view(2, 3), ids[2].view(2, 3, 4))
    expected = seqkern.sgns_loss(*ids, *tables, reduction="none")
    grads = torch.autograd.grad(expected.sum(), tables)
    assert torch.equal(seqkern.sgns_loss(*shaped, *tables, reduction="none"), expected.view(2, 3))
    wide = torch.full((9, 20), 99.0, dtype=torch.float64)
    for layout in (
        lambda t: wide.clone().index_copy(1, torch.arange(3, 9), t)[:, 3:9],
        lambda t: t.t().contiguous().t(),
        lambda t: t.repeat_interleave(2, 0)[::2],
    ):
        given = [layout(t.detach()).detach().requires_grad_() for t in tables]
        turned = [t.int() if i else t.flip(0).flip(0) for i, t in enumerate(shaped)]
        found = seqkern.sgns_loss(*turned, *given, reduction="none")
        assert torch.equal(found.flatten(), expected)
        cotangent = torch.ones((), dtype=torch.float64).expand(2, 3)
        for a, b in zip(torch.autograd.grad(found, given, cotangent), grads, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("shape", "negatives", "rows", "columns"), [
    ((0,), 3, 5, 4), ((2, 0), 3, 5, 4), ((3,), 0, 5, 4), ((3,), 2, 5, 0), ((0,), 2, 0, 4),
])  # fmt: skip
def test_empty(shape, negatives, rows, columns, isa):
    tables = [torch.randn(rows, columns, requires_grad=True) for _ in range(2)]
    ids = torch.zeros(shape, dtype=torch.int64)
    loss = seqkern.sgns_loss(ids, ids, torch.ones(*shape, negatives, dtype=torch.int64), *tables, reduction="none")
    assert loss.shape == shape
    if columns == 0:  # scores of 0
        torch.testing.assert_close(loss, torch.full(shape, (1 + negatives) * math.log(2)))
    grads = torch.autograd.grad(loss.sum(), tables)
    assert [g.shape for g in grads] == [t.shape for t in tables]
    assert columns == 0 or loss.numel() or not any(g.any() for g in grads)


def test_a_nan_stays_in_its_rows(isa):
    (center, context, negatives), tables = arguments(8, 2, 20, 9, torch.float32)
    tables = [t.detach().clone() for t in tables]
    tables[1][4, 7] = torch.nan
    leaves = [t.requires_grad_() for t in tables]
    losses = seqkern.sgns_loss(center, context, negatives, *leaves, reduction="none")
    touched = (context == 4) | ((negatives == 4) & (context[:, None] != 4)).any(1)
    assert losses.isnan().tolist() == touched.tolist()
    of_in, of_out = torch.autograd.grad(losses.sum(), leaves)
    assert {n for n in range(9) if of_in[n].isnan().any()} <= set(center[touched].tolist())
    assert {n for n in range(9) if of_out[n].isnan().any()} <= {4}


@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_rows_that_are_not_there(bad, isa):
    ids, tables = arguments()
    for n, name in enumerate(("center", "context", "negatives")):
        given = [t.clone() for t in ids]
        given[n].view(-1)[-1] = bad
        with pytest.raises(RuntimeError, match=f"{name} must be at least 0 and below 9, got {bad}"):
            seqkern.sgns_loss(*given, *tables)
        loss, scores = torch.ops.seqkern.sgns_loss_fwd(*ids, *tables)
        with pytest.raises(RuntimeError, match=f"{name} must be at least 0 and below 9, got {bad}"):
            torch.ops.seqkern.sgns_loss_bwd(loss, *given, *tables, scores, True, True, False)


# ---- Triton, errors, cost -----------------------------------------------------------------------------------------


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for case in (sgns_loss_case((3, 4), 3), sgns_loss_case((5,), 2, 1030, reduction="mean")):
                reports = check_case(case, dtype)
                assert all(report.passed for report in reports), (dtype, [*map(str, reports)])
        test_sparse(None)
        test_far_scores(None)
        test_a_negative_that_is_the_context_counts_nothing(None)
        for number, function in enumerate((lambda t: t[:1], lambda t: t[:1].expand_as(t), lambda t: t[::2])):
            center, context, negatives = arguments()[0]
            ids = (center[:1], context[:1], negatives[:1]) if number == 0 else (function(center), context, negatives)
            if number == 2:
                ids = (function(center), context[:3], negatives[:3, :0])
            tables = arguments()[1]
            found = torch.autograd.grad(seqkern.sgns_loss(*ids, *tables), tables)
            torch.testing.assert_close(found, torch.autograd.grad(theirs(ids, *tables), tables))
        ids, tables = arguments()
        ids[1][2] = 9
        assert seqkern.sgns_loss(*ids, *tables, reduction="none").isnan().tolist() == [n == 2 for n in range(6)]


IDS, N, W = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [
        (TypeError, ([1], IDS, N, W, W), "center must be a tensor, got list"),
        (TypeError, (IDS.float(), IDS, N, W, W), "center must be int64 or int32, got torch.float32"),
        (TypeError, (IDS, IDS, N.bool(), W, W), "negatives must be int64 or int32, got torch.bool"),
        (ValueError, (IDS, IDS[0], N, W, W), r"context must have center's shape \(2, 3\), got \(3,\)"),
        (ValueError, (IDS, IDS, IDS, W, W), r"negatives must have center.s shape \(2, 3\) and one more .*got \(2, 3\)"),
        (TypeError, (IDS, IDS, N, W.long(), W), "w_in must be float64, float32, bfloat16 or float16, got torch.int64"),
        (TypeError, (IDS, IDS, N, W, W.double()), "w_out must have w_in's dtype torch.float32, got torch.float64"),
        (ValueError, (IDS, IDS, N, W[0], W), r"w_in must have shape \(V, D\), got \(4,\)"),
        (ValueError, (IDS, IDS, N, W, W[:, :3]), r"w_out must have shape \(U, 4\), as w_in, got \(5, 3\)"),
        (ValueError, (IDS, IDS, N, W, W.to("meta")), "w_out must be on w_in's device cpu, got meta"),
        (ValueError, (IDS.to("meta"), IDS, N, W, W), "center must be on w_in's device cpu, got meta"),
    ],
)
def test_errors(error, given, message):
    with pytest.raises(error, match=f"sgns_loss: {message}"):
        seqkern.sgns_loss(*given)


def test_an_unknown_reduction():
    with pytest.raises(ValueError, match='sgns_loss: reduction must be "mean", "sum" or "none", got \'max\''):
        seqkern.sgns_loss(IDS, IDS, N, W, W, reduction="max")


def test_cost():
    assert cost(3, 5, 10, torch.float32).bytes == 3 * 7 * 10 * 4
    assert cost(3, 5, 10, torch.float32, backward=True).flops == 4 * 3 * 6 * 10


if __name__ == "__main__":
    interpreted_cases()
