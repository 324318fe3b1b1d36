"""A convolution over rows: accuracy, every stride, padding and dilation, ragged sequences, derivatives, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import seqkern
from seqkern.ops.conv1d import cost
from seqkern.testing import check_case, conv1d_case, poison


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


STEPS = {
    "valid": {}, "same": {"padding": "same"}, "causal": {"padding": "causal"}, "both sides": {"padding": 3},
    "one side": {"padding": (0, 5)}, "strided": {"stride": 3, "padding": 2}, "dilated": {"dilation": 3},
    "causal dilated": {"dilation": 5, "padding": "causal"},
    "all": {"stride": 2, "dilation": 3, "padding": (4, 1)},
}  # fmt: skip


@pytest.mark.parametrize("steps", STEPS)
def test_error_rule(steps, dtype, isa, passes):
    passes(check_case(conv1d_case(**STEPS[steps]), dtype))


@pytest.mark.parametrize(("width", "columns"), [(1, 1), (1, 40), (3, 2), (5, 15), (2, 64), (7, 17)])
@pytest.mark.parametrize("filters", [1, 16, 100])
def test_sizes(width, columns, filters, isa, passes):
    for lengths in ((1,), (9, 30, 4), (0, 600, 8)):
        for dtype in (torch.float32, torch.bfloat16):
            case = conv1d_case(lengths, columns, width, filters, bias=filters > 1, padding="same")
            passes(check_case(case, dtype))


@pytest.mark.parametrize(
    ("padding", "stride", "dilation"),
    [("same", 1, 1), ("same", 1, 3), *itertools.product(["valid", 0, 4], [1, 2, 3], [1, 2])],
)
def test_is_torchs(padding, stride, dilation, isa):
    conv = torch.nn.Conv1d(6, 5, 4, stride, padding, dilation, dtype=torch.float64)
    x = draw(3, 19, 6).requires_grad_()
    leaves = (x, conv.weight, conv.bias)
    steps = {"stride": stride, "padding": padding, "dilation": dilation}
    ours = seqkern.conv1d(x, conv.weight.transpose(1, 2), conv.bias, **steps)
    theirs = conv(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_causal(isa):
    """No row after t * stride is seen: not even a NaN there."""
    x, weight = draw(2, 20, 6), draw(5, 4, 6, seed=1)
    for stride, dilation in ((1, 1), (1, 3), (2, 2)):
        steps = {"stride": stride, "dilation": dilation, "padding": "causal"}
        expected = seqkern.conv1d(x, weight, **steps)
        for t in (0, 7, 19):
            later = x.clone()
            later[:, t + 1 :] = math.nan
            found = seqkern.conv1d(later, weight, **steps)
            own = t // stride + 1
            assert torch.equal(found[:, :own], expected[:, :own])


@pytest.mark.parametrize("steps", STEPS)
def test_bits_do_not_depend_on_padding_or_on_others(steps, isa):
    """A sequence alone and in a batch with other padding: the same bits, gradients too; zeros behind it."""
    for dtype in (torch.float32, torch.bfloat16):
        sequences = [draw(n, 24, dtype=dtype, seed=n) for n in (9, 70, 2, 300)]
        weight, bias = draw(33, 3, 24, dtype=dtype, seed=1), draw(33, dtype=dtype, seed=2)
        alone = [t[None].clone().requires_grad_() for t in sequences]
        outputs = [seqkern.conv1d(t, weight, bias, **STEPS[steps]) for t in alone]
        upstream = [draw(*y.shape, dtype=dtype, seed=5) for y in outputs]
        tensors = zip(outputs, alone, upstream, strict=True)
        grads = [torch.autograd.grad(y, t, g)[0][0] for y, t, g in tensors]
        lengths = [len(t) for t in sequences]
        for fill in (0.0, 1e9, math.nan):
            padded = torch.full((4, 311, 24), fill, dtype=dtype)
            for b, t in enumerate(sequences):
                padded[b, : len(t)] = t
            padded.requires_grad_()
            found = seqkern.conv1d(padded, weight, bias, **STEPS[steps], lengths=lengths)
            given = torch.full_like(found, math.nan)
            for b, y in enumerate(outputs):
                own = y.shape[1]
                assert torch.equal(found[b, :own], y[0])
                assert not found[b, own:].any()
                given[b, :own] = upstream[b][0]
            (grad,) = torch.autograd.grad(found, padded, given)  # of zeros behind a sequence nothing is read
            for b, n in enumerate(lengths):
                assert torch.equal(grad[b, :n], grads[b])
                assert not grad[b, n:].any()


@pytest.mark.parametrize(
    "shape", [(0, 5, 3, 2, 4), (2, 0, 3, 2, 4), (2, 5, 0, 2, 4), (2, 5, 3, 2, 0), (2, 1, 3, 2, 4), (0, 0, 0, 1, 0)]
)
@pytest.mark.parametrize("padding", ["valid", "causal"])
def test_empty(shape, padding, isa):
    batch, longest, columns, width, filters = shape
    leaves = [torch.ones(batch, longest, columns), torch.ones(filters, width, columns), torch.ones(filters)]
    leaves = [t.requires_grad_() for t in leaves]
    with poison():
        y = seqkern.conv1d(*leaves, padding=padding)
        grads = torch.autograd.grad(y.sum(), leaves)
    with seqkern.use_backend("reference"):
        expected = seqkern.conv1d(*leaves, padding=padding)
        wanted = torch.autograd.grad(expected.sum(), leaves)
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


# ---- gradients, transforms, compilation ---------------------------------------------------------------------------


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(steps, bias):
    leaves = [draw(3, 8, 3), draw(4, 2, 3, seed=1), *([draw(4, seed=2)] if bias else [])]
    leaves = [t.requires_grad_() for t in leaves]

    def function(x, weight, bias=None):
        return seqkern.conv1d(x, weight, bias, **STEPS[steps], lengths=[8, 1, 5])

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_only_what_is_needed(isa):
    leaves = [draw(3, 9, 4), draw(5, 2, 4, seed=1), draw(5, seed=2)]

    def run(wanted):
        given = [t.detach().clone().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
        y = seqkern.conv1d(*given, padding="same", lengths=[9, 1, 4])
        return torch.autograd.grad(y.sin().sum(), [t for t in given if t.requires_grad])

    every = run([True] * 3)
    for index in range(3):
        assert torch.equal(run([i == index for i in range(3)])[0], every[index])


def test_transforms():
    leaves, lengths = [draw(3, 5, 4), draw(6, 2, 4, seed=1), draw(6, seed=2)], torch.tensor([5, 1, 3])

    def ours(*t):
        return seqkern.conv1d(*t, padding="causal", lengths=lengths).sin().sum()

    def theirs(*t):
        with seqkern.use_backend("reference"):
            return ours(*t)

    for i in range(3):
        for transform in (torch.func.grad, torch.func.hessian):
            torch.testing.assert_close(transform(ours, i)(*leaves), transform(theirs, i)(*leaves))
    many = [torch.stack([t, 2 * t, -t]) for t in leaves]
    mapped = torch.func.vmap(torch.func.grad(ours))(*many)
    torch.testing.assert_close(mapped, torch.stack([torch.func.grad(ours)(*t) for t in zip(*many, strict=True)]))


def test_opcheck():
    op, back = torch.ops.seqkern.conv1d_fwd.default, torch.ops.seqkern.conv1d_bwd.default
    x, weight, bias, lengths = draw(3, 5, 4).float(), draw(6, 2, 4).float(), draw(6).float(), torch.tensor([5, 1, 3])
    for steps in ((1, 0, 0, 1), (2, 1, 3, 2), (1, 0, 0, 9)):
        for given in ((x, weight, bias, lengths), (x, weight, None, None)):
            torch.library.opcheck(op, (*given, *steps))
            y = op(*given, *steps)
            torch.library.opcheck(back, (y, x, weight, given[3], *steps, True, True))
    torch.library.opcheck(back, (y, x, weight, None, *steps, False, False))


def test_compiled(compilation):
    leaves = [t.float().requires_grad_() for t in (draw(3, 5, 4), draw(6, 2, 4), draw(6))]
    lengths = torch.tensor([5, 1, 3])

    def model(x, weight, bias):
        return seqkern.conv1d(x, weight, bias, padding="same", lengths=lengths) * 2

    ours, theirs = torch.compile(model, **compilation)(*leaves), model(*leaves)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(t.sin().sum(), leaves) for t in (ours, theirs)))


def test_autocast():
    leaves = [draw(3, 5, 4).float(), draw(6, 2, 4).float(), draw(6).float()]
    with torch.autocast("cpu", torch.bfloat16):
        y = seqkern.conv1d(*leaves)
    assert torch.equal(y, seqkern.conv1d(*(t.bfloat16() for t in leaves)))


def test_the_same_bits(isa):
    leaves = [t.float().requires_grad_() for t in (draw(5, 300, 40), draw(50, 3, 40), draw(50))]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with poison():
                y = seqkern.conv1d(*leaves, padding="same", lengths=[300, 7, 0, 129, 64])
                results.append((y, *torch.autograd.grad(y.sin().sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- layouts, Triton, errors --------------------------------------------------------------------------------------


def test_layouts(isa):
    x, weight, bias = draw(3, 5, 4), draw(6, 2, 4, seed=1), draw(6, seed=2)
    expected = seqkern.conv1d(x, weight, bias)
    wide = torch.full((3, 5, 9), math.nan, dtype=torch.float64)
    wide[..., 2:6] = x
    tall = torch.full((3, 8, 4), math.nan, dtype=torch.float64)
    tall[:, 1:6] = x
    layouts = (wide[..., 2:6], tall[:, 1:6], x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT)
    for y in layouts:
        y = y.detach().requires_grad_()
        for w in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
            found = seqkern.conv1d(y, w, bias.repeat_interleave(2)[::2])
            assert torch.equal(found, expected)
            upstream = torch.ones(()).double().expand(found.shape)
            assert torch.autograd.grad(found, y, upstream)[0].shape == y.shape


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for name, steps in STEPS.items():
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                reports = check_case(conv1d_case((35, 2, 0, 17), 9, 3, 18, **steps), dtype)
                assert all(report.passed for report in reports), (name, dtype, [*map(str, reports)])
        for shape in ((0, 5, 3, 2, 4), (2, 0, 3, 2, 4), (2, 5, 3, 2, 0), (2, 1, 3, 2, 4)):
            test_empty(shape, "valid", None)
        test_layouts(None)
        test_causal(None)


X, W = torch.zeros(2, 3, 4), torch.zeros(5, 2, 4)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (TypeError, ([1], W), {}, "x must be a tensor, got list"),
        (TypeError, (X, None), {}, "weight must be a tensor, got NoneType"),
        (TypeError, (X.long(), W), {}, "x must be float64, float32, bfloat16 or float16, got torch.int64"),
        (TypeError, (X, W.double()), {}, "weight must have x's dtype torch.float32, got torch.float64"),
        (ValueError, (X[0], W), {}, r"x must have shape \(B, L, D\), got \(3, 4\)"),
        (ValueError, (X, W[..., :3]), {}, r"weight must have shape \(C, K, 4\), K at least 1, got \(5, 2, 3\)"),
        (ValueError, (X, W[:, :0]), {}, r"weight must have shape \(C, K, 4\), K at least 1, got \(5, 0, 4\)"),
        (ValueError, (X, W, W[:4, 0, 0]), {}, r"bias must have shape \(5,\), got \(4,\)"),
        (ValueError, (X, W), {"stride": 0}, "stride must be at least 1, got 0"),
        (TypeError, (X, W), {"stride": (1,)}, r"stride must be a whole number, got \(1,\)"),
        (ValueError, (X, W), {"dilation": -1}, "dilation must be at least 1, got -1"),
        (ValueError, (X, W), {"padding": "full"}, 'padding must be "valid", "same", .* got \'full\''),
        (ValueError, (X, W), {"padding": "same", "stride": 2}, 'padding "same" is of stride 1, got 2'),
        (ValueError, (X, W), {"padding": -1}, "padding must be rows of zeros, at least 0, got -1"),
        (TypeError, (X, W), {"padding": (1, 2, 3)}, "padding must be a name, a whole number or two, got"),
        (TypeError, (X, W), {"padding": 1.5}, "padding must be a name, a whole number or two, got 1.5"),
        (ValueError, (X, W), {"lengths": [1, 2, 3]}, r"lengths must have shape \(2,\), the batch size, got \(3,\)"),
        (ValueError, (X, W.to("meta")), {}, "weight must be on x's device cpu, got meta"),
    ],
)
def test_errors(error, arguments, options, message):
    with pytest.raises(error, match=f"conv1d: {message}"):
        seqkern.conv1d(*arguments, **options)


def test_errors_of_the_op():
    """The dispatcher's op checks what it reads."""
    op, back = torch.ops.seqkern.conv1d_fwd, torch.ops.seqkern.conv1d_bwd
    with pytest.raises(RuntimeError, match="stride must be at least 1 and below 2\\^31, got 0"):
        op(X, W, None, None, 0, 0, 0, 1)
    with pytest.raises(RuntimeError, match="left must be at least 0 and below 2\\^31, got -1"):
        op(X, W, None, None, 1, -1, 0, 1)
    with pytest.raises(RuntimeError, match="grad_output must have size 2 in dimension 1, got 3"):
        back(torch.zeros(2, 3, 5), X, W, None, 1, 0, 0, 1, True, True)


def test_cost():
    assert cost(10, 3, 4, 5, torch.float32).flops == 1200


if __name__ == "__main__":
    interpreted_cases()
