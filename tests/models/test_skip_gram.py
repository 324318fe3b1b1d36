"""Skip-gram against its twin, and the loader and questions of its example."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqkern
from examples import runner, twins, word_vectors


def both(dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = seqkern.models.SkipGram(50, 8, dtype=dtype)
    torch.nn.init.normal_(model.vectors)
    torch.nn.init.normal_(model.contexts)
    twin = twins.skip_gram.SkipGram(50, 8).to(dtype)
    twin.load_state_dict(model.state_dict())
    return model, twin


def batch(rows: int = 40) -> tuple[torch.Tensor, ...]:
    return torch.randint(50, (rows,)), torch.randint(50, (rows,)), torch.randint(50, (rows, 5))


def test_loss_and_gradients_equal_the_twins():
    model, twin = both()
    examples = batch()
    examples[2][0, 3] = examples[1][0]  # a negative that is the context
    losses = [version.loss(*examples) for version in (model, twin)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_scores_equal_the_twins():
    model, twin = both()
    centres, _, candidates = batch()
    torch.testing.assert_close(model(centres, candidates), twin(centres, candidates))


def test_sparse_gradients_are_the_dense_ones():
    model, _ = both()
    other = seqkern.models.SkipGram(50, 8, sparse=True, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    examples = batch()
    model.loss(*examples).backward()
    other.loss(*examples).backward()
    assert other.vectors.grad.is_sparse
    torch.testing.assert_close(other.vectors.grad.to_dense(), model.vectors.grad)
    torch.testing.assert_close(other.contexts.grad.to_dense(), model.contexts.grad)


def test_begins_as_word2vec_does():
    model = seqkern.models.SkipGram(50, 8)
    assert model.contexts.count_nonzero() == 0
    assert 0.05 < model.vectors.abs().max().item() <= 0.5 / 8


def test_dim_must_be_positive():
    with pytest.raises(ValueError, match="dim"):
        seqkern.models.SkipGram(50, 0)


def test_overfits_a_batch():
    model, _ = both(torch.float32)
    centres = torch.arange(40)
    contexts = torch.randint(25, (40,))
    negatives = torch.randint(25, 50, (40, 5))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(100):
        loss = model.loss(centres, contexts, negatives)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.loss(centres, contexts, negatives).item() < 0.05


def test_pairs_stay_in_their_documents_and_windows(monkeypatch):
    monkeypatch.setattr(word_vectors, "SAMPLE", 1e9)  # all stay
    tokens, documents = torch.arange(100, 140), torch.arange(4).repeat_interleave(10)
    centres, contexts = word_vectors.pairs(tokens, documents, torch.Generator().manual_seed(0))
    distance = (centres - contexts).abs()
    assert distance.min() == 1
    assert distance.max() == word_vectors.WINDOW
    assert torch.equal((centres - 100) // 10, (contexts - 100) // 10)
    pairs = set(zip(centres.tolist(), contexts.tolist(), strict=True))
    assert len(pairs) == len(centres)  # each once
    near = sum(1 for a in range(40) for b in range(40) if abs(a - b) == 1 and a // 10 == b // 10)
    assert (distance == 1).sum() == near  # the next words are in every window


def test_questions_have_one_right_answer():
    centres, candidates = word_vectors.questions()
    assert candidates.shape == (len(centres), word_vectors.CANDIDATES)
    assert (candidates[:, 1:] == candidates[:, :1]).sum() == 0
    assert word_vectors.accuracy(torch.zeros(10, 16)) == pytest.approx(100 / 16)


def test_negatives_follow_their_distribution():
    drawn = word_vectors.draw(200_000, torch.Generator().manual_seed(0))
    found = torch.bincount(drawn, minlength=word_vectors.corpus().vocabulary)
    expected = word_vectors.noise() * len(drawn)
    assert found[: len(word_vectors.SPECIALS)].sum() == 0
    frequent = expected > 100  # five standard deviations of a count
    assert ((found - expected).abs()[frequent] < 5 * expected[frequent].sqrt()).all()


def test_a_short_training_passes_its_checks():
    record, _ = runner.run(word_vectors.SYSTEM, "skip-gram", steps=20, twin=True, memory=False)
    assert [check["name"] for check in record["checks"] if not check["passed"]] == []
