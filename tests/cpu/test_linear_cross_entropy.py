"""Cross-entropy of a linear layer's outputs: accuracy, what others got wrong, memory, derivatives, module."""

from __future__ import annotations

import copy
import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern.nn import LinearCrossEntropy
from seqkern.ops import linear_cross_entropy as slice
from seqkern.ops.linear_cross_entropy import cost
from seqkern.testing import check_case, compare, linear_cross_entropy_case, poison, verify


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


MANY = 2100  # classes: up to 2048 the kernel divides the rows, not the classes
TARGET = torch.tensor([3, -100, 0, 6, 6, -100, 2])
OURS = seqkern.linear_cross_entropy


def naive(x, w, y, b=None, *, class_weight=None, **options):
    return F.cross_entropy(F.linear(x, w, b), y, class_weight, **options)


def run(function, *tensors):
    """Results and gradients of all tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return (*(t.detach() for t in outputs), *torch.autograd.grad(sum(t.sum() for t in outputs), leaves))


# ---- accuracy -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "smoothing and class weights": {"label_smoothing": 0.3, "class_weight": True},
    "everything smoothed": {"label_smoothing": 1.0, "bias": True},
    "z loss": {"z_loss": 0.01, "return_lse": True},
    "softcap": {"softcap": 5.0},
    "of each row": {"reduction": "none", "return_lse": True},
    "sum of all": {
        "reduction": "sum", "bias": True, "class_weight": True, "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 4.0,
    },
    "all of each row": {
        "reduction": "none", "bias": True, "class_weight": True, "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 4.0,
    },
    "few rows left": {"ignored": 0.9},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_error_rule(options, dtype, isa, passes):
    for size in ({}, {"classes": MANY}):
        with poison():
            passes(check_case(linear_cross_entropy_case(**options, **size), dtype))


@pytest.mark.parametrize("depth", [1, 2, 17, 64, 130])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (3, 15), (65, 16), (127, 257), (9, 4100)])
def test_error_rule_at_other_sizes(rows, classes, depth, dtype, isa, passes):
    for reduction in ("mean", "none"):
        with poison():
            passes(check_case(linear_cross_entropy_case(rows, classes, depth, reduction=reduction), dtype))


@pytest.mark.parametrize(
    ("rows", "classes", "depth"),
    [(700, 65, 16), (900, 700, 200), (2300, 2040, 16), (700, MANY, 16),
     pytest.param(4500, 9000, 16, marks=pytest.mark.slow)],
)  # fmt: skip
def test_error_rule_of_several_blocks_and_chunks(rows, classes, depth, isa, passes):
    for dtype, options in itertools.product((torch.float32, torch.bfloat16), ({}, {"reduction": "none"})):
        options |= {"bias": True, "ignored": 0.05}
        with poison():
            passes(check_case(linear_cross_entropy_case(rows, classes, depth, **options), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_error_rule_of_saturated_rows(scale, dtype, isa, passes):
    """In float64 torch's product is the oracle's, and exp magnifies what rounding is left in the logits."""
    for options in ({}, {"label_smoothing": 0.1, "softcap": 30.0}, {"reduction": "none", "return_lse": True}):
        with poison():
            passes(check_case(linear_cross_entropy_case(scale=scale, **options), dtype))


# ---- what others got wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_are_neither_smoothed_nor_weighted(reduction, passes):
    """They counted in torch's first label smoothing, and class_weight[-100] was read (pytorch 73205, 69339)."""
    x, w, b = draw(7, 5), draw(7, 5, seed=1), draw(7, seed=2)
    for e, weighted in itertools.product((0.0, 0.1, 1.0), (False, True)):
        c = torch.tensor([0.1, 2.0, 0.5, 1.0, 3.0, 0.7, 1e6]) if weighted else None
        options = {"label_smoothing": e, "reduction": reduction}
        found = run(lambda x, w, b: OURS(x, w, TARGET, b, class_weight=c, **options), x, w, b)  # noqa: B023
        peer = run(lambda x, w, b: naive(x, w, TARGET, b, class_weight=c, **options), x, w, b)  # noqa: B023
        c = None if c is None else c.double()
        exact = (t.double() for t in (x, w, b))
        oracle = run(lambda x, w, b: naive(x, w, TARGET, b, class_weight=c, **options), *exact)  # noqa: B023
        names = ("loss", "grad input", "grad weight", "grad bias")
        passes(compare(a, p, o, name=n) for n, a, p, o in zip(names, found, peer, oracle, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_ignored_row_changes_nothing(reduction, isa):
    """pytorch 69511: the mean of two rows, one of them ignored, is the other's loss. Nor is the row read."""
    x, w = draw(2, 5), draw(9, 5, seed=1)
    x[1] = math.nan
    options = {"label_smoothing": 0.2, "z_loss": 0.1, "class_weight": draw(9, seed=2).abs(), "reduction": reduction}
    both = run(lambda x, w: OURS(x, w, torch.tensor([4, -100]), **options), x, w)
    one = run(lambda x, w: OURS(x, w, torch.tensor([4]), **options), x[:1], w)
    assert torch.equal(both[0], one[0])
    assert torch.equal(both[1], torch.cat((one[1], torch.zeros(1, 5))))
    assert torch.equal(both[2], one[2])


def test_every_row_ignored(isa):
    y = torch.full((3,), -100)
    for reduction, expected in (("mean", math.nan), ("sum", 0.0), ("none", 0.0)):
        for bias in (None, draw(7)):
            loss, *grads = run(lambda x, w, *b: OURS(x, w, y, *b, reduction=reduction),  # noqa: B023
                               draw(3, 5), draw(7, 5), *(() if bias is None else (bias,)))  # fmt: skip
            torch.testing.assert_close(loss, torch.full_like(loss, expected), equal_nan=True)
            for grad in grads:
                assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_row_is_the_same_whatever_is_beside_it(reduction, isa):
    """Ignored rows are left out before rows are divided into chunks; a row's numbers do not depend on the others."""
    x, w, y = draw(300, 24), draw(70, 24, seed=1), torch.arange(300) % 70
    y[torch.rand(300) < 0.6] = -100
    kept = y != -100
    losses, lse = OURS(x, w, y, reduction="none", return_lse=True)
    few, few_lse = OURS(x[kept], w, y[kept], reduction="none", return_lse=True)
    assert torch.equal(losses[kept], few)
    assert torch.equal(lse[kept], few_lse)
    alone = torch.stack([OURS(x[i], w, y[i], reduction="none") for i in range(300)])
    assert torch.equal(alone, losses)
    found = run(lambda x, w: OURS(x, w, y, reduction=reduction), x, w)
    packed = run(lambda x, w: OURS(x, w, y[kept], reduction=reduction), x[kept], w)
    assert torch.equal(found[1][kept], packed[1])
    assert torch.equal(found[2], packed[2])
    assert not found[1][~kept].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("up", [1.0, 2.0, -0.25, 0.0])
def test_upstream_gradients(up, dtype, isa):
    """Gradients that come with the loss belong to the first backward pass; a second one does not see what became of
    them."""
    x, w, b = (t.to(dtype).requires_grad_() for t in (draw(7, 5), draw(7, 5, seed=1), draw(7, seed=2)))

    def gradients(factor, retain=False, again=1):
        loss = OURS(x, w, TARGET, b)
        for _ in range(again):
            found = torch.autograd.grad(loss, (x, w, b), torch.tensor(factor), retain_graph=retain)
            kept = [t.clone() for t in found]
            for t in found:
                t.fill_(math.nan)
        return kept

    once, scaled = gradients(1.0), gradients(up)
    for a, c in zip(once, scaled, strict=True):
        torch.testing.assert_close(c, up * a)
    assert all(map(torch.equal, gradients(up, retain=True), scaled))
    for a, c in zip(scaled, gradients(up, retain=True, again=3), strict=True):
        torch.testing.assert_close(a, c)
    loss = OURS(x, w, TARGET, b)
    loss.backward(retain_graph=True)
    loss.backward()
    for t, a in zip((x, w, b), once, strict=True):
        torch.testing.assert_close(t.grad, 2 * a)


def test_batched_upstream_gradients():
    x, w, b = (t.requires_grad_() for t in (draw(7, 5), draw(7, 5, seed=1), draw(7, seed=2)))
    once = torch.autograd.grad(OURS(x, w, TARGET, b), (x, w, b))
    factors = torch.tensor([1.0, 2.0, -3.0])
    for retain in (False, True):
        found = torch.autograd.grad(
            OURS(x, w, TARGET, b), (x, w, b), factors, is_grads_batched=True, retain_graph=retain
        )  # fmt: skip
        for many, one in zip(found, once, strict=True):
            torch.testing.assert_close(many, torch.stack([f * one for f in factors]))


def test_rows_of_unequal_upstream_gradients(isa, passes):
    """reduction="none", weighted: plausible but wrong where gradients come with the loss (Liger 1298)."""
    x, w, up = draw(7, 5), draw(7, 5, seed=1), draw(7, seed=2)

    def of(function, cast=lambda t: t):
        return run(lambda x, w: (function(x, w, TARGET, reduction="none") * cast(up)).sum(), cast(x), cast(w))

    found, peer, oracle = of(OURS), of(naive), of(naive, lambda t: t.double())
    passes(compare(a, p, o) for a, p, o in zip(found, peer, oracle, strict=True))


def test_a_loss_in_16_bits_is_float32(isa):
    x, w = draw(50, 24, dtype=torch.bfloat16), draw(40, 24, dtype=torch.bfloat16, seed=1)
    y = torch.arange(50) % 40
    loss, *grads = run(lambda x, w: OURS(x, w, y), x, w)
    assert loss.dtype == torch.float32
    assert {g.dtype for g in grads} == {torch.bfloat16}
    torch.testing.assert_close(loss, naive(x.float(), w.float(), y))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, *grads = run(lambda x, w: OURS(x, w, y), x.float(), w.float())
    assert torch.equal(mixed, loss)
    assert {g.dtype for g in grads} == {torch.float32}


def test_a_number_of_weights_gradient_is_a_sum_in_float32(isa):
    """4096 equal terms of 1/4096 in bfloat16 would stop at 1/16 of their sum."""
    x, w = torch.ones(4096, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    _, _, grad = run(lambda x, w: OURS(x, w, torch.zeros(4096, dtype=torch.int64)), x, w)
    assert grad.tolist() == [[-0.5], [0.5]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_numbers_stay_in_their_row(bad, isa):
    x, w = draw(7, 5), draw(7, 5, seed=1)
    good = run(lambda x, w: OURS(x, w, TARGET.clamp_min(0), reduction="none"), x, w)
    x[2, 3] = bad
    found = run(lambda x, w: OURS(x, w, TARGET.clamp_min(0), reduction="none"), x, w)
    assert found[0].isnan().tolist() == [i == 2 for i in range(7)]
    rest = torch.tensor([0, 1, 3, 4, 5, 6])
    assert torch.equal(found[0][rest], good[0][rest])
    assert torch.equal(found[1][rest], good[1][rest])
    assert found[1][2].isnan().all()


# ---- layouts ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda n: draw(n, 12),
    "rows apart": lambda n: draw(n, 40)[:, 7:19],
    "transposed": lambda n: draw(12, n).t(),
    "every second column": lambda n: draw(n, 24)[:, ::2],
    "expanded": lambda n: draw(1, 12).expand(n, 12),
    "begins askew": lambda n: draw(n * 12 + 1)[1:].view(n, 12),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("classes", [33, MANY])
def test_layouts(classes, layout, reduction, isa):
    x, w = LAYOUTS[layout](7), LAYOUTS[layout](classes)
    before = x.clone(), w.clone()

    def function(x, w):
        return OURS(x, w, TARGET, reduction=reduction)

    with poison():
        found = run(function, x, w)
    assert all(map(torch.equal, found, run(function, x.contiguous(), w.contiguous())))
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


def test_more_columns_than_a_chunk_has_numbers(passes):
    """Every sum of the logits is exact in float32: that none is left out or counted twice is what is tested."""
    n, y, wide = (1 << 22) + 1, torch.tensor([1]), torch.float64
    x, w = draw(1, n, dtype=wide).sign(), draw(2, n, dtype=wide, seed=1).sign() / 2048
    exact = run(lambda x, w: naive(x, w, y), x, w)
    theirs, found = (run(lambda x, w: f(x, w, y), x.float(), w.float()) for f in (naive, OURS))  # noqa: B023
    passes([compare(*each) for each in zip(found, theirs, exact, strict=True)])


def test_any_dimensions_of_rows(isa):
    x, w = draw(6, 12), draw(33, 12, seed=1)
    y = torch.arange(6)
    flat = run(lambda x, w: OURS(x, w, y, reduction="none"), x, w)
    for shape in ((2, 3), (1, 6, 1)):
        found = run(lambda x, w: OURS(x, w, y.view(shape), reduction="none"), x.view(*shape, 12), w)  # noqa: B023
        assert found[0].shape == shape
        assert all(torch.equal(a.view(b.shape), b) for a, b in zip(found, flat, strict=True))
    assert OURS(x[0], w, y[0], reduction="none").shape == ()


@pytest.mark.parametrize(("rows", "classes", "depth"), [(0, 5, 4), (0, 0, 4), (3, 5, 0), (0, 5, 0)])
def test_empty(rows, classes, depth, isa):
    y = torch.zeros(rows, dtype=torch.int64)
    for reduction in ("mean", "sum", "none"):
        loss, *grads = run(lambda x, w, b: OURS(x, w, y, b, reduction=reduction),  # noqa: B023
                           draw(rows, depth), draw(classes, depth), draw(classes))  # fmt: skip
        expected = run(lambda x, w, b: naive(x, w, y, b, reduction=reduction),  # noqa: B023
                       draw(rows, depth), draw(classes, depth), draw(classes)) if classes else None  # fmt: skip
        if expected:
            torch.testing.assert_close((loss, *grads), (expected[0], *(g.nan_to_num() for g in expected[1:])),
                                       equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("classes", "depth"), [(1001, 40), (1001, 140), (MANY, 40)])
def test_same_bits_on_any_number_of_threads(classes, depth, reduction, isa):
    x, w, b = draw(301, depth), draw(classes, depth, seed=1), draw(classes, seed=2)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            for dtype in (torch.float32, torch.bfloat16):
                given = (t.to(dtype) for t in (x, w, b))
                results.append(run(lambda x, w, b: OURS(x, w, torch.arange(301), b, reduction=reduction), *given))
    finally:
        torch.set_num_threads(before)
    for i, each in enumerate(results):
        assert all(map(torch.equal, each, results[i % 2]))


# ---- memory -------------------------------------------------------------------------------------------------------

PEAK = """
import re, sys, torch, torch.nn.functional as F
import seqkern
torch.set_num_threads(2)
ours = sys.argv[1] == "ours"
x = torch.randn(4096, 64).requires_grad_()
w = torch.randn(32000, 64).requires_grad_()
y = torch.randint(32000, (4096,))
def call(n):
    if ours:
        loss = seqkern.linear_cross_entropy(x[:n], w, y[:n])
    else:
        loss = F.cross_entropy(F.linear(x[:n], w), y[:n])
    torch.autograd.grad(loss, (x, w))
def peak():  # kB; ru_maxrss would begin with that of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
call(8)
before = peak()
call(4096)
print(peak() - before)
"""


def test_peak_memory():
    """Beside inputs, and gradients of a first small call: a quarter at most of what the matrix of logits takes."""
    peaks = {}
    for name in ("ours", "naive"):
        command = [sys.executable, "-c", PEAK, name]
        peaks[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert peaks["naive"] > 2 * 4096 * 32000 * 4 / 1024 * 0.9  # logits, and their gradient
    assert peaks["ours"] <= peaks["naive"] / 4, peaks


# ---- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1 << 22, 14])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_of_every_mode(reduction, chunk, monkeypatch):
    """Second derivatives and tangents go by chunks of rows; 14 logits are two rows."""
    monkeypatch.setattr(slice, "CHUNK", chunk)
    x, w, b = (draw(*shape, dtype=torch.float64, seed=len(shape)).requires_grad_() for shape in ((7, 3), (7, 3), (7,)))
    c = draw(7, dtype=torch.float64, seed=9).abs()

    def function(x, w, b):
        return OURS(
            x, w, TARGET, b, class_weight=c, label_smoothing=0.2, z_loss=0.1, softcap=2.0, reduction=reduction,
            return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (x, w, b), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, (x, w, b), check_fwd_over_rev=True)
    assert torch.autograd.gradgradcheck(lambda x, w: OURS(x, w, TARGET, reduction=reduction), (x, w))


def test_tangents_are_not_lost():
    """torch's own returns 0 here."""
    x, w, along = draw(7, 5), draw(7, 5, seed=1), draw(7, 5, seed=2)
    loss, tangent = torch.func.jvp(lambda x: OURS(x, w, TARGET), (x,), (along,))
    expected = torch.func.jvp(lambda x: naive(x, w, TARGET), (x,), (along,))
    assert tangent
    torch.testing.assert_close((loss, tangent), expected)


def test_gradients_only_for_what_needs_them():
    x, w, b = draw(7, 5), draw(7, 5, seed=1), draw(7, seed=2)
    whole = run(lambda x, w, b: OURS(x, w, TARGET, b), x, w, b)[1:]
    for needs in itertools.product((False, True), repeat=3):
        leaves = [t.detach().requires_grad_(n) for t, n in zip((x, w, b), needs, strict=True)]
        for reduction in ("mean", "none"):
            loss = OURS(*leaves[:2], TARGET, leaves[2], reduction=reduction)
            assert loss.requires_grad == any(needs)
            if any(needs):
                loss = loss if reduction == "mean" else loss.sum() / 5
                loss.backward()
                for t, n, grad in zip(leaves, needs, whole, strict=True):
                    if n:
                        torch.testing.assert_close(t.grad, grad)
                        t.grad = None
                    else:
                        assert t.grad is None


def test_opcheck():
    x, w, b, c = draw(7, 5), draw(9, 5, seed=1), draw(9, seed=2), draw(9, seed=3).abs()
    for bias, weights, needs in ((b, c, (True, True, True)), (None, None, (True, False, False))):
        options = (-100, 0.1, 0.01, 3.0)
        for reduction in (1, 2):
            torch.library.opcheck(
                torch.ops.seqkern.linear_cross_entropy_fwd.default,
                (x, w, TARGET, bias, weights, *options, reduction, *needs),
            )
        results = torch.ops.seqkern.linear_cross_entropy_fwd(
            x, w, TARGET, bias, weights, *options, 0, False, False, False
        )
        torch.library.opcheck(
            torch.ops.seqkern.linear_cross_entropy_bwd.default,
            (results[0], results[1], x, w, TARGET, bias, weights, *results[1:3], *options, *needs),
        )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction, compilation):
    x, w, b = draw(7, 5).requires_grad_(), draw(9, 5, seed=1).requires_grad_(), draw(9, seed=2).requires_grad_()

    def model(x, w, b):
        loss, lse = OURS(
            x.sin(), w, TARGET, b, label_smoothing=0.1, softcap=3.0, reduction=reduction, return_lse=True
        )  # fmt: skip
        return loss.exp(), lse

    results = []
    for function in (model, torch.compile(model, **compilation)):
        outputs = function(x, w, b)
        results.append((*outputs, *torch.autograd.grad(sum(t.sum() for t in outputs), (x, w, b))))
    torch.testing.assert_close(*results)


def test_symbolic_trace():
    graph = torch.fx.symbolic_trace(lambda x, w, y: OURS(x, w, y, softcap=3.0) + 1)
    assert "linear_cross_entropy" in str(graph.graph)
    x, w = draw(7, 5), draw(7, 5, seed=1)
    assert torch.equal(graph(x, w, TARGET), OURS(x, w, TARGET, softcap=3.0) + 1)


# ---- the module, and tied weights ---------------------------------------------------------------------------------


def test_module(isa):
    module = LinearCrossEntropy(5, 7, bias=True, label_smoothing=0.1, weight=draw(7, seed=3).abs(), softcap=4.0)
    assert "label_smoothing=0.1, softcap=4.0" in repr(module)
    x = draw(7, 5)
    options = {"class_weight": module.weight, "label_smoothing": 0.1, "softcap": 4.0}
    expected = OURS(x, module.linear.weight, TARGET, module.linear.bias, **options)
    assert torch.equal(module(x, TARGET), expected)
    assert torch.equal(copy.deepcopy(module)(x, TARGET), expected)
    z = module.logits(x)
    torch.testing.assert_close(F.cross_entropy(z, TARGET, module.weight, label_smoothing=0.1), expected)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = module

        def forward(self, x, y):
            return self.loss(x, y)

    assert torch.equal(torch.fx.symbolic_trace(Model())(x, TARGET), expected)


def test_state_dict_of_torch():
    theirs = getattr(torch.nn, "LinearCrossEntropyLoss", None)
    if theirs is None:
        pytest.skip("torch.nn.LinearCrossEntropyLoss came with torch 2.13")
    peer, module = (
        theirs(5, 7, bias=True, weight=torch.ones(7)),
        LinearCrossEntropy(5, 7, bias=True, weight=torch.zeros(7)),
    )
    module.load_state_dict(peer.state_dict())
    torch.testing.assert_close(module(draw(7, 5), TARGET), peer(draw(7, 5), TARGET))


def tied():
    embedding, head = torch.nn.Embedding(7, 5), LinearCrossEntropy(5, 7)
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    head.linear.weight = embedding.weight
    return model


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tied_weights_have_one_gradient(reduction, passes):
    model = tied()
    assert len(list(model.parameters())) == 1
    ids = torch.tensor([1, 1, 0, 5, 6, 2, 3])

    def loss(function, weight):
        return function(F.embedding(ids, weight).tanh(), weight, TARGET, reduction=reduction).sum()

    weight = model["embedding"].weight
    model["head"].reduction = reduction
    model["head"](model["embedding"](ids).tanh(), TARGET).sum().backward()
    peer = run(lambda w: loss(naive, w), weight)[1]
    oracle = run(lambda w: loss(naive, w), weight.double())[1]
    passes([compare(weight.grad, peer, oracle)])


@pytest.mark.parametrize("assign", [False, True])
def test_loading_tied_weights(assign):
    model, other = tied(), tied()
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    for part in (model["embedding"].weight, model["head"].linear.weight):
        assert torch.equal(part, other["embedding"].weight)
    if assign:  # replaces parameters one by one: the docstring says to tie them again
        model["head"].linear.weight = model["embedding"].weight
    assert model["head"].linear.weight is model["embedding"].weight
    assert len(list(model.parameters())) == 1


# ---- backends, errors, cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("op", ["linear_cross_entropy", "linear_cross_entropy_options"])
def test_backends_agree(op, backend, dtype, passes):
    passes(verify(op, dtype, backend=backend))


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    import importlib
    from unittest import mock

    kernels = importlib.import_module("seqkern.kernels.linear_cross_entropy")
    with poison(), seqkern.use_backend("triton"):
        for dtype, (name, options) in itertools.product((torch.float32, torch.bfloat16), OPTIONS.items()):
            for report in check_case(linear_cross_entropy_case(9, 100, 12, **options), dtype):
                assert report.passed, (dtype, name, str(report))
        for dtype, reduction in itertools.product((torch.float64, torch.float16), ("mean", "none")):
            for shape in ((1, 1, 3), (0, 7, 3), (3, 100, 5), (2, 3, 0)):
                for report in check_case(linear_cross_entropy_case(*shape, reduction=reduction, bias=True), dtype):
                    assert report.passed, (dtype, shape, str(report))
        with mock.patch.object(kernels, "LOGITS", 64 * 100):  # several chunks
            for ignored, reduction in itertools.product((0.0, 0.4), ("mean", "none")):
                case = linear_cross_entropy_case(200, 100, 12, ignored=ignored, reduction=reduction, bias=True)
                for report in check_case(case, torch.float32):
                    assert report.passed, (ignored, reduction, str(report))
        x, w = draw(7, 5), draw(7, 5, seed=1)
        whole = run(lambda x, w: OURS(x, w, TARGET), x, w)
        with mock.patch.object(kernels._Call, "_counted", lambda call: (None, len(call.target))):
            captured = run(lambda x, w: OURS(x, w, TARGET), x, w)  # as in a CUDA graph: nothing is left out
        torch.testing.assert_close(captured, whole)
        with pytest.raises(RuntimeError, match="got another number in 2 rows"):
            OURS(x, w[:6], TARGET)
        loss = OURS(x, w, torch.full((7,), -100))
        assert loss.isnan()


X, W7, Y = torch.zeros(2, 3, 5), torch.zeros(7, 5), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (TypeError, ([1.0], W7, Y), {}, "input must be a tensor, got list"),
        (TypeError, (X.int(), W7, Y), {}, "input must be float64, float32, bfloat16 or float16, got torch.int32"),
        (TypeError, (X, W7.double(), Y), {}, "weight must have input's dtype torch.float32, got torch.float64"),
        (TypeError, (X, W7, Y.int()), {}, "target must be int64, got torch.int32"),
        (TypeError, (X, W7, torch.zeros(2, 3, 7)), {}, "got torch.float32: probabilities are not taken"),
        (ValueError, (X, W7[:, :4], Y), {}, r"weight must have shape \(V, 5\), .* got \(7, 4\)"),
        (ValueError, (X, W7[0], Y), {}, r"weight must have shape \(V, 5\), .* got \(5,\)"),
        (ValueError, (X, W7, Y[0]), {}, r"target must have shape \(2, 3\), .* got \(3,\)"),
        (ValueError, (X, W7, Y, torch.zeros(5)), {}, r"bias must have shape \(7,\), got \(5,\)"),
        (ValueError, (X, W7.to("meta"), Y), {}, "weight must be on input's device cpu, got meta"),
        (ValueError, (X, W7, Y), {"class_weight": torch.ones(5)}, r"class_weight must have shape \(7,\), got \(5,\)"),
        (ValueError, (X, W7, Y), {"softcap": -1.0}, "softcap must be positive, or None, got -1.0"),
        (ValueError, (X, W7, Y), {"reduction": None}, 'reduction must be "mean", "sum" or "none", got None'),
        (RuntimeError, (X, W7, Y + 7), {}, r"target must be in \[0, 7\) or ignore_index = -100, got 7 in row 0"),
    ],
)
def test_errors(error, arguments, options, message):
    with pytest.raises(error, match=message):
        OURS(*arguments, **options)


def test_the_op_checks_by_itself():
    op = torch.ops.seqkern.linear_cross_entropy_fwd
    x, y, options, needs = X[0], Y[0], (-100, 0.0, 0.0, 0.0), (False, False, False)
    for arguments, message in (
        ((X, W7, y, None, None), "input must have 2 dimensions"),
        ((x, W7[:, :4], y, None, None), "weight must have size 5"),
        ((x, W7.double(), y, None, None), "weight must have ScalarType"),
        ((x, W7, y[:2], None, None), "target must have size 3"),
        ((x, W7, y, torch.ones(5), None), "bias must have size 7"),
        ((x, W7, y, None, torch.ones(7).double()), "class_weight must have ScalarType"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments, *options, 1, *needs)
    with pytest.raises(RuntimeError, match="reduction must be 0 .none., 1 .mean. or 2 .sum., got 3"):
        op(x, W7, y, None, None, *options, 3, *needs)
    with pytest.raises(RuntimeError, match="without a reduction the gradients come from linear_cross_entropy_bwd"):
        op(x, W7, y, None, None, *options, 0, True, False, False)


def test_module_errors():
    with pytest.raises(ValueError, match="LinearCrossEntropy: label_smoothing must be between 0 and 1, got 2"):
        LinearCrossEntropy(5, 7, label_smoothing=2)
    with pytest.raises(ValueError, match=r"LinearCrossEntropy: class_weight must have shape \(7,\), got \(5,\)"):
        LinearCrossEntropy(5, 7, weight=torch.ones(5))


def test_cost():
    forward, backward = cost(8, 100, 16, torch.float32), cost(8, 100, 16, torch.float32, backward=True)
    assert forward.flops == 2 * 8 * 100 * 16 + 4 * 800
    assert backward.flops == 6 * 8 * 100 * 16 + 8 * 800


if __name__ == "__main__":
    interpreted_cases()
