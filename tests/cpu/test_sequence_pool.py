"""Pooling over sequences: accuracy, ends, ties, what padding holds, every derivative, layouts, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn.utils.rnn import pad_packed_sequence

import seqkern
from seqkern.ops.sequence_pool import cost
from seqkern.reference.sequence_pool import KINDS
from seqkern.testing import check_case, poison, sequence_pool_case


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


ENDS = ("first", "last")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_error_rule(kind, packed, dtype, isa, passes):
    passes(check_case(sequence_pool_case(kind, packed=packed), dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 64, 300])
def test_sizes(kind, columns, isa, passes):
    for lengths in ((1,), (3, 2), (0, 200, 65)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for packed in (False, True):
                passes(check_case(sequence_pool_case(kind, lengths, columns, packed=packed), dtype))


@pytest.mark.parametrize("scale", [1e-3, 30, 1e4])
def test_logsumexp_at_every_scale(scale, isa, passes):
    passes(check_case(sequence_pool_case("logsumexp", scale=scale), torch.float32))


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("packed", [False, True])
def test_ends_of_both_directions(kind, packed, dtype, isa, passes):
    passes(check_case(sequence_pool_case(kind, columns=34, packed=packed, bidirectional=True), dtype))


def test_last_is_the_final_state_of_a_recurrent_layer():
    """Both directions, of packed, padded and time-major outputs."""
    lengths = torch.tensor([5, 1, 3])
    x = draw(3, 5, 4, dtype=torch.float32)
    lstm = torch.nn.LSTM(4, 6, batch_first=True, bidirectional=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, (h, _) = lstm(packed)
    padded, _ = pad_packed_sequence(y, batch_first=True)
    expected = torch.cat([h[0], h[1]], 1)
    assert torch.equal(seqkern.sequence_pool(padded, lengths, "last", bidirectional=True), expected)
    time_major = padded.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(seqkern.sequence_pool(time_major, lengths, "last", bidirectional=True), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_padding_or_on_others(kind, isa):
    """A sequence alone, in a batch, with other padding, and packed: the same bits, gradients too."""
    sequences = [draw(n, 37, dtype=torch.float32, seed=n) for n in (9, 70, 1, 130)]
    upstream = draw(4, 37, dtype=torch.float32, seed=5)
    alone = [t[None].clone().requires_grad_() for t in sequences]
    outputs = [seqkern.sequence_pool(t, None, kind) for t in alone]
    grads = [
        torch.autograd.grad(y, t, upstream[b : b + 1])[0][0]
        for b, (y, t) in enumerate(zip(outputs, alone, strict=True))
    ]
    expected, lengths = torch.cat(outputs), [len(t) for t in sequences]
    for fill, longest in itertools.product((0.0, 1e9, math.nan), (130, 201)):
        padded = torch.full((4, longest, 37), fill)
        for b, t in enumerate(sequences):
            padded[b, : len(t)] = t
        padded.requires_grad_()
        output = seqkern.sequence_pool(padded, lengths, kind)
        assert torch.equal(output, expected)
        (grad,) = torch.autograd.grad(output, padded, upstream)
        for b, n in enumerate(lengths):
            assert torch.equal(grad[b, :n], grads[b])
            assert not grad[b, n:].any()
    packed, starts = torch.cat(sequences).requires_grad_(), torch.tensor([0, 9, 79, 80, 210])
    output = seqkern.sequence_pool(packed, None, kind, cu_seqlens=starts.int())
    assert torch.equal(output, expected)
    assert torch.equal(torch.autograd.grad(output, packed, upstream)[0], torch.cat(grads))


def test_ties_and_nan_are_torchs(isa):
    x = torch.tensor([1.0, 3, 3, -2, -2, 3]).repeat(40)[None, :, None].repeat(1, 1, 20).requires_grad_()
    for kind in ("max", "min"):
        (ours,) = torch.autograd.grad(seqkern.sequence_pool(x, None, kind).sum(), x)
        first = 1 if kind == "max" else 3
        assert ours[0, first].eq(1).all()
        assert ours.sum() == 20
    y = draw(2, 30, 20, dtype=torch.float32)
    y[0, 7, :5] = math.nan
    y[0, 9, 3:8] = math.nan
    y[1, :, 3] = math.inf
    y[1, :, 4] = -math.inf
    y.requires_grad_()
    for kind in ("max", "min"):
        found, expected = seqkern.sequence_pool(y, None, kind), getattr(y, kind)(1).values
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
        grads = [torch.autograd.grad(t, y, torch.ones_like(t))[0] for t in (found, expected)]
        assert torch.equal(grads[0][:, :, :3], grads[1][:, :, :3])
        assert torch.equal(grads[0][:, :, 5:], grads[1][:, :, 5:])
        assert grads[0][0, 7, 3:5].eq(1).all()
    torch.testing.assert_close(seqkern.sequence_pool(y, None, "logsumexp"), y.logsumexp(1), equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0)])
def test_empty(kind, shape, isa):
    x = torch.zeros(shape, requires_grad=True)
    with poison():
        y = seqkern.sequence_pool(x, [0] * shape[0], kind)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == (shape[0], shape[2])
    assert y.eq(-math.inf if kind == "logsumexp" else 0).all()
    assert grad.shape == x.shape
    assert not grad.any()
    packed = torch.zeros(shape[1], shape[2], requires_grad=True)
    with poison():
        y = seqkern.sequence_pool(packed, None, kind, cu_seqlens=torch.zeros(shape[0] + 1, dtype=torch.int64))
        (grad,) = torch.autograd.grad(y.sum(), packed)
    assert y.shape == (shape[0], shape[2])
    assert not grad.any()


# ---- gradients, transforms, compilation ---------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, packed):
    x = (draw(9, 4) if packed else draw(3, 5, 4)).requires_grad_()
    given = {"cu_seqlens": torch.tensor([0, 4, 5, 8])} if packed else {"lengths": torch.tensor([5, 1, 3])}

    def function(x):
        return seqkern.sequence_pool(x, kind=kind, bidirectional=kind in ENDS, **given)

    assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, x)
    with seqkern.use_backend("reference"):
        expected = torch.autograd.grad(function(x).sin().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(function(x).sin().sum(), x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_transforms(kind):
    x, lengths = draw(3, 5, 4), torch.tensor([5, 1, 3])

    def ours(x):
        return seqkern.sequence_pool(x, lengths, kind).sin().sum()

    def theirs(x):
        with seqkern.use_backend("reference"):
            return ours(x)

    for transform in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))
    many = torch.stack([x, 2 * x, -x])
    for transform in (torch.func.grad(ours), ours):
        torch.testing.assert_close(torch.func.vmap(transform)(many), torch.stack([transform(t) for t in many]))
    ragged = torch.stack([lengths, lengths.flip(0)])
    found = torch.func.vmap(lambda n: seqkern.sequence_pool(x, n, kind))(ragged)
    torch.testing.assert_close(found, torch.stack([seqkern.sequence_pool(x, n, kind) for n in ragged]))


def test_opcheck():
    op, back = torch.ops.seqkern.sequence_pool_fwd.default, torch.ops.seqkern.sequence_pool_bwd.default
    x, lengths, starts = draw(3, 5, 4, dtype=torch.float32), torch.tensor([5, 1, 3]), torch.tensor([0, 2, 2, 5])
    for kind in range(7):
        for given, rows in (((x, lengths, None), 5), ((x, None, None), 5), ((x[0], None, starts), 5)):
            torch.library.opcheck(op, (*given, kind, 2 if kind in (4, 5) else 0))
            output, index = op(*given, kind, 0)
            kept = (given[0], output) if kind == 6 else (None, None)
            at = index if kind in (2, 3) else None
            torch.library.opcheck(back, (output, *kept, at, *given[1:], rows, kind, 0))


@pytest.mark.parametrize("kind", ["mean", "max", "logsumexp"])
def test_compiled(kind, compilation):
    x, lengths = draw(3, 5, 4, dtype=torch.float32).requires_grad_(), torch.tensor([5, 1, 3])

    def model(x):
        return seqkern.sequence_pool(x, lengths, kind) * 2

    ours, theirs = torch.compile(model, **compilation)(x), model(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(t.sin().sum(), x) for t in (ours, theirs)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind, isa):
    x = draw(5, 300, 200, dtype=torch.float32).requires_grad_()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with poison():
                y = seqkern.sequence_pool(x, [300, 7, 0, 129, 64], kind)
                results.append((y, *torch.autograd.grad(y[0].sin().sum(), x)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept(kind):
    """x for a log-sum-exp alone."""
    x, kept = draw(2, 50, 8).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        seqkern.sequence_pool(x, [50, 3], kind)
    assert (x.shape in kept) == (kind == "logsumexp")


# ---- layouts, Triton, errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind, isa):
    x, lengths = draw(3, 5, 4), torch.tensor([5, 2, 9])
    expected = seqkern.sequence_pool(x, lengths, kind)
    wide = torch.full((3, 5, 9), math.nan, dtype=torch.float64)
    wide[..., 2:6] = x
    for y in (wide[..., 2:6], x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT, x.flip(0).flip(0)):
        y = y.detach().requires_grad_()
        found = seqkern.sequence_pool(y, lengths.int(), kind)
        assert torch.equal(found, expected)
        upstream = torch.ones(()).double().expand(found.shape)
        assert torch.autograd.grad(found, y, upstream)[0].shape == y.shape
    assert torch.equal(seqkern.sequence_pool(x, [5, 2, 5], kind), expected)
    assert torch.equal(seqkern.sequence_pool(x, [-1, 2, 5], kind)[1:], expected[1:])
    assert torch.equal(
        seqkern.sequence_pool(wide[0, :, 2:6], None, kind, cu_seqlens=torch.tensor([0, 5])), expected[:1]
    )


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for kind, packed in itertools.product(KINDS, (False, True)):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                case = sequence_pool_case(
                    kind, (19, 1, 0, 33), 34 if kind in ENDS else 9, packed=packed, bidirectional=kind in ENDS
                )
                reports = check_case(case, dtype)
                assert all(report.passed for report in reports), (kind, packed, dtype, [*map(str, reports)])
            for shape in ((0, 5, 3), (2, 0, 3), (2, 5, 0)):
                test_empty(kind, shape, None)
            test_layouts(kind, None)
        test_ties_and_nan_are_torchs(None)


X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (TypeError, ([1],), {}, "x must be a tensor, got list"),
        (TypeError, (X.long(),), {}, "x must be float64, float32, bfloat16 or float16, got torch.int64"),
        (ValueError, (X[0],), {}, r"x must have shape \(B, L, D\) got \(3, 4\)"),
        (ValueError, (X,), {"cu_seqlens": torch.tensor([0, 3])}, r"x must have shape \(T, D\), with cu_seqlens, got"),
        (ValueError, (X, None, "median"), {}, "kind must be one of sum, mean, .* got 'median'"),
        (TypeError, (X, 3), {}, "lengths must be a tensor or None, got int"),
        (TypeError, (X, [1.5, 2]), {}, r"lengths must be whole numbers, got \[1.5, 2\]"),
        (TypeError, (X, torch.ones(2)), {}, "lengths must be int32 or int64, got torch.float32"),
        (ValueError, (X, [1, 2, 3]), {}, r"lengths must have shape \(2,\), the batch size, got \(3,\)"),
        (ValueError, (X, [1, 2]), {"cu_seqlens": torch.tensor([0, 3])}, "lengths are of padded .* got both"),
        (ValueError, (X, None, "mean"), {"bidirectional": True}, 'bidirectional is of "first" and "last", got kind'),
        (ValueError, (X[..., :3], None, "last"), {"bidirectional": True}, "bidirectional needs an even number"),
        (ValueError, (X[0],), {"cu_seqlens": torch.tensor([1, 3])}, "cu_seqlens must start with 0, got 1"),
        (ValueError, (X[0],), {"cu_seqlens": torch.tensor([0, 2, 1])}, "cu_seqlens must not decrease, got"),
        (ValueError, (X[0],), {"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens must end at or before 3, .* got 4"),
        (ValueError, (X[0],), {"cu_seqlens": X[0, 0, :0].long()}, "cu_seqlens must have one dimension and one element"),
        (ValueError, (X, torch.ones(2).long().to("meta")), {}, "lengths must be on x's device cpu, got meta"),
    ],
)
def test_errors(error, arguments, options, message):
    with pytest.raises(error, match=f"sequence_pool: {message}"):
        seqkern.sequence_pool(*arguments, **options)


def test_errors_of_the_op():
    """The dispatcher's op checks what it reads."""
    op, back = torch.ops.seqkern.sequence_pool_fwd, torch.ops.seqkern.sequence_pool_bwd
    with pytest.raises(RuntimeError, match="cu_seqlens must end at or before 3, the rows of x, got 4"):
        op(X[0], None, torch.tensor([0, 4]), 0, 0)
    with pytest.raises(RuntimeError, match="cu_seqlens must not decrease, got 3 and then 1"):
        op(X[0], None, torch.tensor([0, 3, 1]), 0, 0)
    with pytest.raises(RuntimeError, match="kind must be between 0 and 6, got 7"):
        op(X, None, None, 7, 0)
    with pytest.raises(RuntimeError, match="max and min need index"):
        back(X[:, 0], None, None, None, None, None, 3, 2, 0)
    with pytest.raises(RuntimeError, match="reversed must be between 0 and 4, got 5"):
        op(X, None, None, 4, 5)


def test_cost():
    assert cost(10, 2, 4, torch.float32).bytes == 192


if __name__ == "__main__":
    interpreted_cases()
