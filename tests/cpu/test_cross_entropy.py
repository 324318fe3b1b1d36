"""Cross-entropy of logits: accuracy, what others got wrong, every derivative and transform, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern.ops.cross_entropy import cost
from seqkern.testing import check_case, compare, cross_entropy_case, poison, verify


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


TARGET = torch.tensor([3, -100, 0, 6, 6, -100, 2])

# ---- accuracy -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "class weights": {"class_weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing and class weights": {"label_smoothing": 0.3, "class_weight": True},
    "everything smoothed": {"label_smoothing": 1.0},
    "z loss": {"z_loss": 0.01, "return_lse": True},
    "softcap": {"softcap": 5.0},
    "of each row": {"reduction": "none", "return_lse": True},
    "sum of all": {
        "reduction": "sum", "class_weight": True, "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 4.0,
        "return_lse": True,
    },
    "few rows left": {"ignored": 0.9},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_error_rule(options, dtype, isa, passes):
    with poison():
        passes(check_case(cross_entropy_case(**options), dtype))


@pytest.mark.parametrize("classes", [1, 2, 15, 16, 17, 63, 64, 65, 127, 1000, 4099])
def test_error_rule_at_other_sizes(classes, dtype, isa, passes):
    smoothed = {"label_smoothing": 0.1} if classes > 1 else {}  # the gradient of one class, 0, would be rounding alone
    for rows, options in ((1, {}), (3, {"class_weight": True} | smoothed), (70, {"softcap": 8.0})):
        with poison():
            passes(check_case(cross_entropy_case(rows, classes, ignored=0.0, **options), dtype))


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_error_rule_of_saturated_rows(scale, dtype, isa, passes):
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none", "return_lse": True}):
        with poison():
            passes(check_case(cross_entropy_case(scale=scale, **options), dtype))


# ---- what others got wrong ----------------------------------------------------------------------------------------


def against_torch(z, y, w, e, reduction):
    """Loss and gradient of seqkern and torch, and of torch in float64: compared by the error rule."""

    def run(z, w, function):
        leaf = z.detach().requires_grad_()
        loss = function(leaf, w)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    def ours(z, w):
        return seqkern.cross_entropy(z, y, class_weight=w, label_smoothing=e, reduction=reduction)

    def theirs(z, w):
        return F.cross_entropy(z, y, w, label_smoothing=e, reduction=reduction)

    found, peer = run(z, w, ours), run(z, w, theirs)
    oracle = run(z.double(), None if w is None else w.double(), theirs)
    return [
        compare(a, b, o, name=name) for name, a, b, o in zip(("loss", "gradient"), found, peer, oracle, strict=True)
    ]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_are_neither_smoothed_nor_weighted(reduction, passes):
    """They counted in torch's first label smoothing, and class_weight[-100] was read (pytorch 73205, 69339)."""
    for e, weighted in itertools.product((0.0, 0.1, 1.0), (False, True)):
        w = torch.tensor([0.1, 2.0, 0.5, 1.0, 3.0, 0.7, 1e6]) if weighted else None
        passes(against_torch(draw(7, 7), TARGET, w, e, reduction))


def test_an_ignored_row_changes_nothing(isa):
    """pytorch 69511: the mean of two rows, one of them ignored, is the other's loss."""
    z = draw(2, 9)
    z[1] = math.nan  # what an ignored row holds is not looked at
    for e, weighted in itertools.product((0.0, 0.2), (False, True)):
        w = draw(9, seed=1).abs() if weighted else None
        both = seqkern.cross_entropy(z, torch.tensor([4, -100]), class_weight=w, label_smoothing=e, z_loss=0.1)
        one = seqkern.cross_entropy(z[:1], torch.tensor([4]), class_weight=w, label_smoothing=e, z_loss=0.1)
        assert torch.equal(both, one)


def test_every_row_ignored(isa):
    for reduction, expected in (("mean", math.nan), ("sum", 0.0), ("none", 0.0)):
        z = draw(3, 5).requires_grad_()
        loss, lse = seqkern.cross_entropy(z, torch.full((3,), -100), reduction=reduction, return_lse=True)
        torch.testing.assert_close(loss, torch.full_like(loss, expected), equal_nan=True)
        assert not lse.any()
        (grad,) = torch.autograd.grad(loss.sum(), z)
        assert not grad.any()
        assert grad.isfinite().all()


def test_another_ignore_index(isa):
    z = draw(7, 7)
    y = torch.where(TARGET == -100, 1, torch.where(TARGET == 6, -1, TARGET))
    a = seqkern.cross_entropy(z, y, ignore_index=-1)
    torch.testing.assert_close(a, F.cross_entropy(z, y, ignore_index=-1))
    b = seqkern.cross_entropy(z, y.clamp_min(0), ignore_index=0)  # a class
    torch.testing.assert_close(b, F.cross_entropy(z, y.clamp_min(0), ignore_index=0))


def test_the_lse_has_a_gradient(isa):
    z = draw(7, 6, dtype=torch.float64).requires_grad_()
    y = torch.where(TARGET > 5, 5, TARGET)
    loss, lse = seqkern.cross_entropy(z, y, return_lse=True)
    (grad,) = torch.autograd.grad(loss + 0.3 * lse.square().sum(), z)
    expected = F.cross_entropy(z, y) + 0.3 * z.logsumexp(-1)[y != -100].square().sum()
    torch.testing.assert_close(grad, torch.autograd.grad(expected, z)[0])


def test_a_loss_in_16_bits_is_float32(isa):
    z = draw(50, 40, dtype=torch.bfloat16)
    y = torch.arange(50) % 40
    loss = seqkern.cross_entropy(z, y)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(z.float(), y))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(seqkern.cross_entropy(z, y), loss)


def test_impossible_classes(isa):
    """Minus infinity: no share, no gradient; and a row of nothing else."""
    z = draw(3, 9)
    z[:, ::2] = -math.inf
    z.requires_grad_()
    y = torch.tensor([1, 3, 7])
    loss = seqkern.cross_entropy(z, y)
    (grad,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(loss, F.cross_entropy(z, y))
    torch.testing.assert_close(grad, torch.autograd.grad(F.cross_entropy(z, y), z)[0])
    assert not grad[:, ::2].any()
    assert seqkern.cross_entropy(z, torch.tensor([0, 1, 1])).isinf()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_numbers_stay_in_their_row(bad, isa):
    z = draw(5, 37)
    z[2, 30] = bad
    z.requires_grad_()
    losses = seqkern.cross_entropy(z, torch.arange(5), reduction="none")
    assert losses.isnan().tolist() == [False, False, True, False, False]
    (grad,) = torch.autograd.grad(losses.nansum(), z)
    (whole,) = torch.autograd.grad(seqkern.cross_entropy(z, torch.arange(5), reduction="sum"), z)
    rest = torch.tensor([0, 1, 3, 4])
    assert whole[2].isnan().all()
    assert torch.equal(whole[rest], grad[rest])
    assert whole[rest].isfinite().all()


# ---- layouts ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda: draw(6, 33),
    "rows apart": lambda: draw(6, 50)[:, 3:36],
    "classes first": lambda: draw(33, 6).t(),
    "every second class": lambda: draw(6, 66)[:, ::2],
    "expanded": lambda: draw(1, 33).expand(6, 33),
    "begins askew": lambda: draw(6 * 33 + 1)[1:].view(6, 33),
    "two dimensions of rows": lambda: draw(2, 3, 33),
    "rows transposed": lambda: draw(3, 2, 33).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, isa):
    z = LAYOUTS[layout]()
    before = z.clone()
    y = torch.arange(6).view(z.shape[:-1])

    def run(z, y):
        leaf = z.detach().requires_grad_()
        loss = seqkern.cross_entropy(leaf, y, label_smoothing=0.1)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0].reshape(6, 33)

    with poison():
        found = run(z, y)
    assert all(map(torch.equal, found, run(z.reshape(6, 33).contiguous(), y.flatten())))
    assert torch.equal(z, before)
    scattered = torch.stack((y, y), -1)[..., 0]
    assert torch.equal(seqkern.cross_entropy(z, scattered), seqkern.cross_entropy(z, y))


def test_expanded_upstream_gradients(isa):
    z = draw(6, 33).requires_grad_()
    losses = seqkern.cross_entropy(z, torch.arange(6), reduction="none")
    expanded = torch.autograd.grad(losses, z, torch.tensor(0.5).expand(6), retain_graph=True)[0]
    assert torch.equal(expanded, torch.autograd.grad(losses, z, torch.full((6,), 0.5))[0])


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (2, 0, 5)])
def test_empty(shape, isa):
    z = draw(*shape).requires_grad_()
    y = torch.zeros(shape[:-1], dtype=torch.int64)
    for reduction in ("mean", "sum", "none"):
        loss = seqkern.cross_entropy(z, y, reduction=reduction)
        assert loss.shape == (shape[:-1] if reduction == "none" else ())
        assert loss.isnan() if reduction == "mean" else not loss.any()
        loss.sum().backward()
        assert z.grad.shape == shape


def test_one_row_without_dimensions(isa):
    z = draw(9)
    assert seqkern.cross_entropy(z, torch.tensor(3), reduction="none").shape == ()
    assert torch.equal(seqkern.cross_entropy(z, torch.tensor(3)), seqkern.cross_entropy(z[None], torch.tensor([3])))
    assert seqkern.cross_entropy(draw(2, 1), torch.tensor([0, 0])) == 0  # one class


def test_same_bits_on_any_number_of_threads(isa):
    z, y = draw(301, 1001).requires_grad_(), torch.arange(301)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            loss = seqkern.cross_entropy(z, y, label_smoothing=0.1)
            results.append((loss, torch.autograd.grad(loss, z)[0]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for each in results for a, b in zip(each, results[0], strict=True))


# ---- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_of_every_mode(reduction):
    z = draw(7, 7, dtype=torch.float64).requires_grad_()
    w = draw(7, dtype=torch.float64, seed=1).abs()

    def function(z):
        return seqkern.cross_entropy(
            z, TARGET, class_weight=w, label_smoothing=0.2, z_loss=0.1, softcap=2.0, reduction=reduction,
            return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, z, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, z, check_fwd_over_rev=True)


def test_a_second_backward_pass_finds_the_same():
    z = draw(7, 7).requires_grad_()
    loss = seqkern.cross_entropy(z, TARGET)
    grads = [torch.autograd.grad(loss, z, torch.tensor(up), retain_graph=True)[0] for up in (1.0, 2.0, 1.0)]
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], 2 * grads[0])


def test_opcheck():
    z, w, y = draw(7, 9), draw(9, seed=1).abs(), TARGET
    for logits, weights in ((z, w), (z, None), (z.t().contiguous().t(), w), (draw(7, 20)[:, 2:11], None)):
        options = (-100, 0.1, 0.01, 3.0)
        results = torch.ops.seqkern.cross_entropy_fwd(logits, y, weights, *options)
        torch.library.opcheck(torch.ops.seqkern.cross_entropy_fwd.default, (logits, y, weights, *options))
        arguments = (results[0], None, logits, y, weights, *results[1:], *options)
        torch.library.opcheck(torch.ops.seqkern.cross_entropy_bwd.default, arguments)


def test_compiled(compilation):
    z = draw(7, 9).requires_grad_()

    def model(z):
        loss, lse = seqkern.cross_entropy(z.sin(), TARGET, label_smoothing=0.1, softcap=3.0, return_lse=True)
        return loss.exp(), lse

    results = []
    for function in (model, torch.compile(model, **compilation)):
        outputs = function(z)
        results.append((*outputs, *torch.autograd.grad(sum(t.sum() for t in outputs), z)))
    torch.testing.assert_close(*results)


def test_symbolic_trace():
    graph = torch.fx.symbolic_trace(lambda z, y: seqkern.cross_entropy(z, y, softcap=3.0) + 1)
    assert "cross_entropy" in str(graph.graph)
    assert torch.equal(graph(draw(7, 9), TARGET), seqkern.cross_entropy(draw(7, 9), TARGET, softcap=3.0) + 1)


# ---- backends, errors, cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy_options"])
def test_backends_agree(op, backend, dtype, passes):
    passes(verify(op, dtype, backend=backend))


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with poison(), seqkern.use_backend("triton"):
        for dtype, (name, options) in itertools.product((torch.float32, torch.bfloat16), OPTIONS.items()):
            for report in check_case(cross_entropy_case(9, 100, **options), dtype):
                assert report.passed, (dtype, name, str(report))
        for dtype in (torch.float64, torch.float32, torch.float16):
            for shape in ((1, 1), (0, 7), (3, 4200)):  # the last takes two blocks of a row
                smoothing = 0.1 if shape[1] > 1 else 0.0
                case = cross_entropy_case(
                    *shape, ignored=0.0, reduction="sum", label_smoothing=smoothing, class_weight=True
                )
                for report in check_case(case, dtype):
                    assert report.passed, (dtype, shape, str(report))
        z = draw(3, 5000)
        z[:, ::2] = -math.inf
        z[1, :4096] = -math.inf  # a block of nothing else
        for make in (lambda: z, *LAYOUTS.values()):
            logits = make()
            rows = logits.shape[:-1]
            y = 2 * torch.arange(rows.numel()).view(rows) + 1
            y = y + 4096 if logits is z else y
            found = seqkern.cross_entropy(logits, y, reduction="none")
            with seqkern.use_backend("cpu"):
                torch.testing.assert_close(found, seqkern.cross_entropy(logits, y, reduction="none"))


Z = torch.zeros(2, 3, 5)
Y = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (TypeError, ([1.0], Y), {}, "logits must be a tensor, got list"),
        (TypeError, (Z.int(), Y), {}, "logits must be float64, float32, bfloat16 or float16, got torch.int32"),
        (TypeError, (Z, Y.int()), {}, "target must be int64, got torch.int32"),
        (TypeError, (Z, Z), {}, "target must be int64, got torch.float32: probabilities are not taken"),
        (TypeError, (Z, None), {}, "target must be a tensor, got NoneType"),
        (ValueError, (Z, Y[0]), {}, r"target must have shape \(2, 3\), logits's without .*, got \(3,\)"),
        (ValueError, (torch.tensor(1.0), Y), {}, r"logits must have at least 1 dimension, got shape \(\)"),
        (ValueError, (Z, Y.to("meta")), {}, "target must be on logits's device cpu, got meta"),
        (TypeError, (Z, Y), {"class_weight": 3}, "class_weight must be a tensor of floating .*, got int"),
        (TypeError, (Z, Y), {"class_weight": Y[0]}, "class_weight must be a tensor of floating .*, got torch.int64"),
        (ValueError, (Z, Y), {"class_weight": torch.ones(4)}, r"class_weight must have shape \(5,\), got \(4,\)"),
        (ValueError, (Z, Y), {"class_weight": torch.ones(5).requires_grad_()}, r"give class_weight.detach\(\)"),
        (TypeError, (Z, Y), {"ignore_index": 1.5}, "ignore_index must be a whole number, got 1.5"),
        (TypeError, (Z, Y), {"label_smoothing": "a"}, "label_smoothing must be a number, got 'a'"),
        (ValueError, (Z, Y), {"label_smoothing": 1.1}, "label_smoothing must be between 0 and 1, got 1.1"),
        (ValueError, (Z, Y), {"label_smoothing": math.nan}, "label_smoothing must be between 0 and 1, got nan"),
        (ValueError, (Z, Y), {"z_loss": -1.0}, "z_loss must be at least 0, got -1.0"),
        (ValueError, (Z, Y), {"softcap": 0.0}, "softcap must be positive, or None, got 0.0"),
        (ValueError, (Z, Y), {"reduction": "avg"}, 'reduction must be "mean", "sum" or "none", got \'avg\''),
        (RuntimeError, (Z, Y + 5), {}, r"target must be in \[0, 5\) or ignore_index = -100, got 5 in row 0"),
        (RuntimeError, (Z, Y - 1), {}, r"target must be in \[0, 5\) or ignore_index = -100, got -1 in row 0"),
    ],
)
def test_errors(error, arguments, options, message):
    with pytest.raises(error, match=message):
        seqkern.cross_entropy(*arguments, **options)


def test_the_op_checks_by_itself():
    op = torch.ops.seqkern.cross_entropy_fwd
    z, y, options = Z[0], Y[0], (-100, 0.0, 0.0, 0.0)
    for arguments, message in (
        ((Z, y, None), "logits must have 2 dimensions"),
        ((z, y[:2], None), "target must have size 3"),
        ((z, y.int(), None), "target must have ScalarType"),
        ((z, y, torch.ones(4)), "class_weight must have size 5"),
        ((z, y, torch.ones(5).double()), "class_weight must have ScalarType"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments, *options)
    with pytest.raises(RuntimeError, match="max must have size 3"):
        torch.ops.seqkern.cross_entropy_bwd(None, None, z, y, None, torch.ones(2), torch.ones(3), *options)


def test_cost():
    forward, backward = cost(8, 100, torch.bfloat16), cost(8, 100, torch.bfloat16, backward=True)
    assert forward.bytes == 1600
    assert backward.bytes == 3200


if __name__ == "__main__":
    interpreted_cases()
