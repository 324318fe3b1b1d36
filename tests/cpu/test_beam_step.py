"""A step of beam search: against the equations and torch.topk, ties, dead beams, layouts, errors."""

from __future__ import annotations

import math

import pytest
import torch

import seqkern
from seqkern.ops.beam_step import cost
from seqkern.testing import poison

INFINITY = math.inf


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def beams(kind="plain", batch=3, beams=4, classes=1000, dtype=torch.float32):
    z, scores = draw(batch, beams, classes, seed=classes) * 3, draw(batch, beams, seed=1)
    if kind == "tied":
        z, scores = (z / 3).round(), scores.round()
    elif kind == "equal":
        z, scores = torch.zeros_like(z), torch.zeros_like(scores)
    elif kind == "ascending":
        z = torch.arange(z.numel(), dtype=torch.float32).view(z.shape) / 100
    elif kind == "with impossible ones":
        z = z.masked_fill(draw(*z.shape, seed=2) > 0, -INFINITY)
    elif kind == "few possible ones":
        z = torch.where(torch.arange(classes) % (classes // 3 + 1) == 0, z, -INFINITY)
    elif kind == "dead beams":
        scores[:, 1::2] = -INFINITY
        z[:, 1::2] = math.nan
    elif kind == "one beam":
        scores[:, 1:] = -INFINITY
    elif kind == "far from 0":
        z = z + 500
    return z.to(dtype), scores


KINDS = (
    "plain", "tied", "equal", "ascending", "with impossible ones", "few possible ones", "dead beams", "one beam",
    "far from 0",
)  # fmt: skip


def check_same(z, scores, candidates=None):
    with poison():
        ours = seqkern.beam_step(z, scores, candidates=candidates)
    with seqkern.use_backend("reference"):
        expected = seqkern.beam_step(z, scores, candidates=candidates)
    torch.testing.assert_close(ours.scores, expected.scores)
    assert torch.equal(ours.beams, expected.beams)
    assert torch.equal(ours.tokens, expected.tokens)
    return ours


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("candidates", [None, 1, 3, 50, 5000])
def test_against_the_equations(kind, candidates, isa):
    check_same(*beams(kind), candidates)


@pytest.mark.parametrize("classes", [1, 2, 15, 16, 17, 255, 256, 257, 5000])
def test_sizes(classes, dtype, isa):
    for candidates in (1, 8, 300):
        check_same(*beams(classes=classes, dtype=dtype), candidates)
    check_same(*beams(batch=1, beams=1, classes=classes, dtype=dtype))


def test_torch_finds_the_same():
    """On 3000 rows of numbers that all differ, by log_softmax, addition and topk in float64."""
    for seed in range(10):
        z, scores = draw(300, 5, 400, seed=seed).float() * 4, draw(300, 5, seed=seed + 100).float()
        every = (z.double().log_softmax(-1) + scores.double()[:, :, None]).flatten(1)
        best, at = every.topk(10)
        ours = seqkern.beam_step(z, scores)
        assert torch.equal(ours.beams * 400 + ours.tokens, at)
        torch.testing.assert_close(ours.scores, best.float())


def test_ties_are_in_order(isa):
    """Of equal ones the first beam and the first token; zeros of both signs are equal."""
    z = torch.zeros(1, 2, 700)
    z[0, :, 300:] *= -1
    z[0, 0, 5] = z[0, 1, 600] = 1
    found = check_same(z, torch.zeros(1, 2), 6)
    assert found.beams.tolist() == [[0, 1, 0, 0, 0, 0]]
    assert found.tokens.tolist() == [[5, 600, 0, 1, 2, 3]]


def test_what_is_not_possible_is_not_there(isa):
    z, scores = torch.full((2, 2, 5), -INFINITY), torch.zeros(2, 2)
    z[0, 1, 3] = 7.0
    found = check_same(z, scores, 3)
    assert found.scores.tolist() == [[0, -INFINITY, -INFINITY], [-INFINITY] * 3]
    assert found.beams.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert found.tokens.tolist() == [[3, 0, 0], [0, 0, 0]]


def test_layouts(isa):
    z, scores = beams()
    expected = seqkern.beam_step(z, scores)
    wide = torch.full((3, 4, 1100), 99.0)
    wide[:, :, 50:1050] = z
    for layout in (wide[:, :, 50:1050], z.transpose(0, 1).contiguous().transpose(0, 1), z.repeat(1, 1, 2)[:, :, :1000]):
        before = layout.clone()
        for given in (scores, scores.t().contiguous().t()):
            found = seqkern.beam_step(layout, given)
            assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
        assert torch.equal(layout, before)


def test_threads_and_other_rows_change_nothing(isa):
    z, scores = beams(batch=9, classes=3000)
    expected = seqkern.beam_step(z, scores)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for row in range(9):
                alone = seqkern.beam_step(z[row : row + 1], scores[row : row + 1])
                assert all(torch.equal(mine[0], other[row]) for mine, other in zip(alone, expected, strict=True))
    finally:
        torch.set_num_threads(before)


def test_empty(isa):
    assert seqkern.beam_step(torch.zeros(0, 3, 5), torch.zeros(0, 3)).tokens.shape == (0, 6)
    none = seqkern.beam_step(torch.zeros(2, 0, 5), torch.zeros(2, 0))
    assert none.scores.tolist() == [[-INFINITY], [-INFINITY]]


def test_no_gradient(isa):
    z, scores = beams()
    found = seqkern.beam_step(z.requires_grad_(), scores.requires_grad_())
    assert not found.scores.requires_grad


def test_opcheck():
    torch.library.opcheck(torch.ops.seqkern.beam_step.default, (*beams(), 7))


def test_compiled(compilation):
    def model(z, scores):
        found = seqkern.beam_step(z * 2, scores)
        return found.scores + 1, found.beams, found.tokens

    torch.testing.assert_close(torch.compile(model, **compilation)(*beams()), model(*beams()))


def test_vmap():
    z, scores = draw(4, 2, 3, 50), draw(4, 2, 3)
    mapped = torch.func.vmap(lambda z, s: tuple(seqkern.beam_step(z, s)))(z, scores)
    alone = [seqkern.beam_step(*each) for each in zip(z, scores, strict=True)]
    assert all(torch.equal(t, torch.stack([one[i] for one in alone])) for i, t in enumerate(mapped))


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for kind in KINDS:
            check_same(*beams(kind, batch=2, classes=100))
            check_same(*beams(kind, batch=1, beams=2, classes=3), 5)
            check_same(*beams(kind, batch=1, beams=2, classes=3), 9)
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            check_same(*beams(batch=1, beams=2, classes=2100, dtype=dtype))  # two blocks
        z, scores = beams(batch=2, beams=2, classes=40)
        z[0, 1, 3] = math.nan  # of this beam nothing goes on, and of that row's other one as ever
        found, alone = seqkern.beam_step(z, scores), seqkern.beam_step(z[:, :1], scores[:, :1], candidates=4)
        assert torch.equal(found.tokens[0], alone.tokens[0])
        assert found.beams[0].tolist() == [0] * 4


Z, S = torch.zeros(2, 3, 5), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, ([1.0], S), "logits must be a tensor, got list"),
        (TypeError, (Z, 0.0), "scores must be a tensor, got float"),
        (TypeError, (Z.long(), S), "logits must be float64, float32, bfloat16 or float16, got torch.int64"),
        (TypeError, (Z, S.double()), "scores must be float32, got torch.float64"),
        (ValueError, (Z[0], S), r"logits must have shape \(B, K, V\) with V >= 1, got \(3, 5\)"),
        (ValueError, (Z[..., :0], S), r"logits must have shape \(B, K, V\) with V >= 1, got \(2, 3, 0\)"),
        (ValueError, (Z, S[:1]), r"scores must have logits's shape \(2, 3\), got \(1, 3\)"),
        (ValueError, (Z, S.to("meta")), "scores must be on logits's device cpu, got meta"),
        (RuntimeError, (Z, S + math.nan), "scores must not be nan or infinite?"),
        (RuntimeError, (Z, S + INFINITY), "scores must not be nan or infinite?"),
        (RuntimeError, (Z + math.nan, S), "logits must not be nan or infinite"),
        (RuntimeError, (Z + INFINITY, S), "logits must not be nan or infinite"),
    ],
)
def test_errors(error, arguments, message):
    for backend in ("auto", "reference"):
        with seqkern.use_backend(backend), pytest.raises(error, match=message):
            seqkern.beam_step(*arguments)


@pytest.mark.parametrize(
    ("error", "candidates", "message"),
    [
        (ValueError, 0, "candidates must be at least 1, got 0"),
        (TypeError, 2.0, "candidates must be a whole number or None, got 2.0"),
        (TypeError, True, "candidates must be a whole number or None, got True"),
    ],
)
def test_errors_of_candidates(error, candidates, message):
    with pytest.raises(error, match=message):
        seqkern.beam_step(Z, S, candidates=candidates)


def test_cost():
    assert cost(2, 100, torch.bfloat16).bytes == 400


if __name__ == "__main__":
    interpreted_cases()
