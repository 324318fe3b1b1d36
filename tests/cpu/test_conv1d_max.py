"""A convolution and its maximum over time: accuracy, short sequences, padding, every derivative, layouts, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern.ops.conv1d_max import cost
from seqkern.reference.conv1d import ACTIVATIONS
from seqkern.testing import check_case, conv1d_max_case, poison


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_error_rule(activation, packed, dtype, isa, passes):
    passes(check_case(conv1d_max_case(activation=activation, packed=packed), dtype))


@pytest.mark.parametrize(("width", "columns"), [(1, 1), (1, 40), (3, 2), (5, 15), (2, 64), (7, 17)])
@pytest.mark.parametrize("filters", [1, 16, 100])
def test_sizes(width, columns, filters, isa, passes):
    for lengths in ((1,), (9, 30, 4), (0, 600, 8)):
        case = conv1d_max_case(lengths, columns, width, filters, bias=filters > 1, activation="tanh")
        for dtype in (torch.float32, torch.bfloat16):
            passes(check_case(case, dtype))


def test_is_torchs(isa):
    """The same as torch's convolution, relu and max, whose gradients are dense."""
    conv = torch.nn.Conv1d(20, 30, 5, dtype=torch.float64)
    x = draw(4, 19, 20).requires_grad_()
    leaves = (x, conv.weight, conv.bias)
    ours = seqkern.conv1d_max(x, conv.weight.transpose(1, 2), conv.bias)
    theirs = F.relu(conv(x.transpose(1, 2))).max(2).values
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_bits_do_not_depend_on_padding_or_on_others(isa):
    """A sequence alone, in a batch, with other padding, and packed: the same bits; of its own gradient too."""
    for dtype in (torch.float32, torch.bfloat16):
        sequences = [draw(n, 24, dtype=dtype, seed=n) for n in (9, 70, 2, 300)]
        weight, bias = draw(33, 5, 24, dtype=dtype, seed=1), draw(33, dtype=dtype, seed=2)
        upstream = draw(4, 33, dtype=dtype, seed=5)
        alone = [t[None].clone().requires_grad_() for t in sequences]
        outputs = [seqkern.conv1d_max(t, weight, bias, "tanh") for t in alone]
        pairs = enumerate(zip(outputs, alone, strict=True))
        grads = [torch.autograd.grad(y, t, upstream[b : b + 1])[0][0] for b, (y, t) in pairs]
        expected, lengths = torch.cat(outputs), [len(t) for t in sequences]
        for fill, longest in itertools.product((0.0, 1e9, math.nan), (300, 311)):
            padded = torch.full((4, longest, 24), fill, dtype=dtype)
            for b, t in enumerate(sequences):
                padded[b, : len(t)] = t
            padded.requires_grad_()
            output = seqkern.conv1d_max(padded, weight, bias, "tanh", lengths)
            assert torch.equal(output, expected)
            (grad,) = torch.autograd.grad(output, padded, upstream)
            for b, n in enumerate(lengths):
                assert torch.equal(grad[b, :n], grads[b])
                assert not grad[b, n:].any()
        packed, starts = torch.cat(sequences).requires_grad_(), torch.tensor([0, 9, 79, 81, 381])
        output = seqkern.conv1d_max(packed, weight, bias, "tanh", cu_seqlens=starts.int())
        assert torch.equal(output, expected)
        assert torch.equal(torch.autograd.grad(output, packed, upstream)[0], torch.cat(grads))


def test_the_first_of_equal_windows(isa):
    x = torch.ones(1, 600, 3).requires_grad_()
    y = seqkern.conv1d_max(x, torch.ones(20, 2, 3), None, "none")
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.eq(6).all()
    assert grad[0, :2].eq(20).all()
    assert not grad[0, 2:].any()


def test_nan(isa):
    """Of a row it reaches the filters of its sequence; and where it is, as in torch, the gradient goes."""
    x = draw(3, 20, 4, dtype=torch.float32)
    x[1, 7, 2] = math.nan
    x.requires_grad_()
    y = seqkern.conv1d_max(x, draw(9, 3, 4, dtype=torch.float32), None, "relu")
    assert y.isnan().all(1).tolist() == [False, True, False]
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 4), (2, 0, 3, 2, 4), (2, 5, 0, 2, 4), (2, 5, 3, 2, 0), (0, 0, 0, 1, 0)])
def test_empty(shape, isa):
    """No rows: a window of zeros, whose sum is the bias."""
    batch, longest, columns, width, filters = shape
    leaves = [torch.ones(batch, longest, columns), torch.ones(filters, width, columns), torch.ones(filters)]
    leaves = [t.requires_grad_() for t in leaves]
    with poison():
        y = seqkern.conv1d_max(*leaves, lengths=[0] * batch)
        grads = torch.autograd.grad(y.sum(), leaves)
    assert y.shape == (batch, filters)
    assert y.eq(1).all()
    assert not grads[0].any()
    assert not grads[1].any()
    assert grads[2].eq(batch).all()
    packed = torch.ones(longest, columns, requires_grad=True)
    with poison():
        starts = torch.zeros(batch + 1, dtype=torch.int64)
        y = seqkern.conv1d_max(packed, leaves[1], leaves[2], cu_seqlens=starts)
        (grad,) = torch.autograd.grad(y.sum(), packed)
    assert y.eq(1).all()
    assert not grad.any()


# ---- gradients, transforms, compilation ---------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(activation, packed, bias):
    leaves = [(draw(9, 3) if packed else draw(3, 5, 3)), draw(4, 2, 3, seed=1), *([draw(4, seed=2)] if bias else [])]
    leaves = [t.requires_grad_() for t in leaves]
    given = {"cu_seqlens": torch.tensor([0, 4, 5, 8])} if packed else {"lengths": torch.tensor([5, 1, 3])}

    def function(x, weight, bias=None):
        return seqkern.conv1d_max(x, weight, bias, activation, **given)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_only_what_is_needed(isa):
    leaves = [draw(3, 9, 4), draw(5, 2, 4, seed=1), draw(5, seed=2)]

    def run(wanted):
        given = [t.detach().clone().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
        y = seqkern.conv1d_max(*given, "tanh", [9, 1, 4])
        return torch.autograd.grad(y.sin().sum(), [t for t in given if t.requires_grad])

    every = run([True] * 3)
    for index in range(3):
        assert torch.equal(run([i == index for i in range(3)])[0], every[index])


def test_transforms():
    leaves, lengths = [draw(3, 5, 4), draw(6, 2, 4, seed=1), draw(6, seed=2)], torch.tensor([5, 1, 3])

    def ours(*t):
        return seqkern.conv1d_max(*t, "tanh", lengths).sin().sum()

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
    op, back = torch.ops.seqkern.conv1d_max_fwd.default, torch.ops.seqkern.conv1d_max_bwd.default
    x, weight, bias = draw(3, 5, 4).float(), draw(6, 2, 4).float(), draw(6).float()
    lengths, starts = torch.tensor([5, 1, 3]), torch.tensor([0, 2, 2, 5])
    for given in ((x, weight, bias, lengths, None), (x, weight, None, None, None), (x[0], weight, bias, None, starts)):
        torch.library.opcheck(op, (*given, 2))
        output, z, index = op(*given, 2)
        torch.library.opcheck(back, (output, *given[:2], *given[3:], z, index, 2, True, True))
    torch.library.opcheck(back, (output, x[0], weight, None, starts, z, index, 1, False, False))


def test_compiled(compilation):
    leaves = [draw(3, 5, 4).float(), draw(6, 2, 4).float(), draw(6).float()]
    leaves, lengths = [t.requires_grad_() for t in leaves], torch.tensor([5, 1, 3])

    def model(x, weight, bias):
        return seqkern.conv1d_max(x, weight, bias, "relu", lengths) * 2

    ours, theirs = torch.compile(model, **compilation)(*leaves), model(*leaves)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(t.sin().sum(), leaves) for t in (ours, theirs)))


def test_autocast():
    leaves = [draw(3, 5, 4).float(), draw(6, 2, 4).float(), draw(6).float()]
    with torch.autocast("cpu", torch.bfloat16):
        y = seqkern.conv1d_max(*leaves)
    assert torch.equal(y, seqkern.conv1d_max(*(t.bfloat16() for t in leaves)))


def test_the_same_bits(isa):
    leaves = [draw(5, 300, 40).float(), draw(50, 3, 40).float(), draw(50).float()]
    leaves = [t.requires_grad_() for t in leaves]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with poison():
                y = seqkern.conv1d_max(*leaves, "tanh", [300, 7, 0, 129, 64])
                results.append((y, *torch.autograd.grad(y.sin().sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- layouts, Triton, errors --------------------------------------------------------------------------------------


def test_layouts(isa):
    x, weight, bias = draw(3, 5, 4), draw(6, 2, 4, seed=1), draw(6, seed=2)
    expected = seqkern.conv1d_max(x, weight, bias)
    wide = torch.full((3, 5, 9), math.nan, dtype=torch.float64)
    wide[..., 2:6] = x
    tall = torch.full((3, 8, 4), math.nan, dtype=torch.float64)
    tall[:, 1:6] = x
    layouts = (wide[..., 2:6], tall[:, 1:6], x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT)
    for y in layouts:
        y = y.detach().requires_grad_()
        for w in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
            found = seqkern.conv1d_max(y, w, bias.repeat_interleave(2)[::2])
            assert torch.equal(found, expected)
            upstream = torch.ones(()).double().expand(found.shape)
            assert torch.autograd.grad(found, y, upstream)[0].shape == y.shape


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for activation, packed in itertools.product(ACTIVATIONS, (False, True)):
            case = conv1d_max_case((35, 2, 0, 17), 9, 3, 18, activation=activation, packed=packed)
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                reports = check_case(case, dtype)
                assert all(report.passed for report in reports), (activation, packed, dtype, [*map(str, reports)])
        for shape in ((0, 5, 3, 2, 4), (2, 0, 3, 2, 4), (2, 5, 3, 2, 0)):
            test_empty(shape, None)
        test_the_first_of_equal_windows(None)
        test_nan(None)
        test_layouts(None)


X, W = torch.zeros(2, 3, 4), torch.zeros(5, 2, 4)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (TypeError, ([1], W), {}, "x must be a tensor, got list"),
        (TypeError, (X, None), {}, "weight must be a tensor, got NoneType"),
        (TypeError, (X.long(), W), {}, "x must be float64, float32, bfloat16 or float16, got torch.int64"),
        (TypeError, (X, W.double()), {}, "weight must have x's dtype torch.float32, got torch.float64"),
        (ValueError, (X[0], W), {}, r"x must have shape \(B, L, D\) got \(3, 4\)"),
        (ValueError, (X, W), {"cu_seqlens": torch.tensor([0, 3])}, r"x must have shape \(T, D\), with cu_seqlens, got"),
        (ValueError, (X, W[..., :3]), {}, r"weight must have shape \(C, K, 4\), K at least 1, got \(5, 2, 3\)"),
        (ValueError, (X, W[:, :0]), {}, r"weight must have shape \(C, K, 4\), K at least 1, got \(5, 0, 4\)"),
        (ValueError, (X, W, W[:4, 0, 0]), {}, r"bias must have shape \(5,\), got \(4,\)"),
        (ValueError, (X, W, None, "gelu"), {}, "activation must be one of none, relu, .* never decrease, got 'gelu'"),
        (ValueError, (X, W), {"lengths": [1, 2, 3]}, r"lengths must have shape \(2,\), the batch size, got \(3,\)"),
        (ValueError, (X, W), {"lengths": [1, 2], "cu_seqlens": torch.tensor([0, 3])}, "lengths are of .* got both"),
        (ValueError, (X[0], W), {"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens must end at or before 3"),
        (ValueError, (X, W.to("meta")), {}, "weight must be on x's device cpu, got meta"),
    ],
)
def test_errors(error, arguments, options, message):
    with pytest.raises(error, match=f"conv1d_max: {message}"):
        seqkern.conv1d_max(*arguments, **options)


def test_errors_of_the_op():
    """The dispatcher's op checks what it reads."""
    op, back = torch.ops.seqkern.conv1d_max_fwd, torch.ops.seqkern.conv1d_max_bwd
    with pytest.raises(RuntimeError, match="weight must have windows of 1 row at least, got 0"):
        op(X, W[:, :0], None, None, None, 0)
    with pytest.raises(RuntimeError, match="activation must be between 0 and 3, got 4"):
        op(X, W, None, None, None, 4)
    y, z, index = op(X, W, None, None, None, 0)
    for bad in (-1, 2):
        with pytest.raises(RuntimeError, match=f"index must be a window of its sequence, got {bad}"):
            back(y, X, W, None, None, z, index * 0 + bad, 0, True, True)


def test_cost():
    assert cost(10, 2, 3, 4, 5, torch.float32).flops == 1200
    assert cost(10, 2, 3, 4, 5, torch.float32, backward=True).flops == 480


if __name__ == "__main__":
    interpreted_cases()
