"""The loader of the standard library's docstrings, and the language models that count."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch

from examples import ngrams
from examples.data import docstrings
from examples.data.docstrings import KINDS, PAD, SPECIALS, START, UNKNOWN

SOURCE = b'''
"""Of the module."""
def function():
    """Of the function."""
    def inner():
        """Of the inner function."""
class Class:
    """Of the class."""
    if True:
        async def method(self):
            """Of the method."""
            def inner(self):
                """Of the method's function."""
    class Inner:
        """Of the inner class."""
def silent(): pass
'''


@pytest.fixture(scope="module")
def data():
    return docstrings.load(2048)


def test_kinds_of_docstrings():
    found = [(KINDS[kind], text) for kind, text in docstrings.docstrings_of(SOURCE)]
    assert found == [
        ("module", "Of the module."),
        ("function", "Of the function."),
        ("function", "Of the inner function."),
        ("class", "Of the class."),
        ("method", "Of the method."),
        ("function", "Of the method's function."),
        ("class", "Of the inner class."),
    ]


def test_paragraphs_come_once_and_doctests_never(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "COUNTS", range(1, 10))
    (tmp_path / "a.py").write_text('"""One two.\n\nThree\nfour."""\n')
    (tmp_path / "b.py").write_text('"""three  Four.\n\nFive.\n\n    >>> 6\n    6"""\ndef f():\n    """One two."""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text('"""Seven."""\n')
    (tmp_path / "d.py").write_text("no Python\n")
    assert docstrings.read(tmp_path) == [("a.py", 0, "One two. Three four."), ("b.py", 0, "Five.")]


def test_a_library_without_docstrings_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="0 docstrings"):
        docstrings.read(tmp_path)


def test_sizes(data):
    assert 4500 < len(data.train) < 11000
    assert 0.03 < len(data.held_out) / len(data.train) < 0.2
    assert len(docstrings.stream(data.train)) > 200_000
    assert data.vocabulary == 2048
    assert data.words[: len(SPECIALS)] == list(SPECIALS)
    assert len(set(data.words)) == len(data.words)


def test_parts_share_no_file_and_no_document(data):
    assert not {d.path for d in data.train} & {d.path for d in data.held_out}
    assert not {d.text.lower() for d in data.train} & {d.text.lower() for d in data.held_out}


def test_held_out_documents_are_not_copies(data):
    """Of no held-out document half of the runs of eight tokens, or of the tokens in them, are in the training part."""
    known = {run for document in data.train for run in docstrings.runs(document.tokens.tolist())}
    for document in data.held_out:
        tokens = document.tokens.tolist()
        found = [tuple(tokens[start : start + 8]) in known for start in range(len(tokens) - 7)]
        assert 2 * sum(found) <= len(found)
        covered = {start + i for start, there in enumerate(found) if there for i in range(8)}
        assert 2 * len(covered) <= len(tokens)
        assert docstrings.copied(tokens, known) == len(covered) / len(tokens)
    assert any(docstrings.copied(document.tokens.tolist(), known) > 0 for document in data.held_out)


def test_copies_with_small_changes_are_left_out(monkeypatch):
    """One, whose path is held out, has 9 of its 17 tokens in a known run, the other 9 of 18."""
    same = "one two three four five six seven eight nine"
    documents = [
        ("train.py", 0, f"zero {same} ten"),
        ("unseen.py", 0, f"{same} a b c d e f g h"),
        ("unseen.py", 1, f"{same} a b c d e f g h i"),
        ("train.py", 1, f"ten {same}"),  # the training part keeps its own copies
        ("unseen.py", 1, "one two three four five six seven"),  # shorter than a run
    ]
    monkeypatch.setattr(docstrings, "held_out", lambda path: path == "unseen.py")
    monkeypatch.setattr(docstrings, "read", lambda root: documents)
    found = docstrings.load(30)
    assert [d.text for d in found.train] == [documents[0][2], documents[3][2]]
    assert [d.text for d in found.held_out] == [documents[2][2], documents[4][2]]


def test_warnings_do_not_matter():
    """Old escapes in strings make the parser warn; where warnings are errors the file must not be lost."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert docstrings.docstrings_of(b'"""Of the module."""\nold = "\\d"\n') == [(0, "Of the module.")]


def test_the_same_every_time(data, monkeypatch):
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda *arguments: reversed([*rglob(*arguments)]))  # as files may be found
    again = docstrings.load(2048)
    assert again.words == data.words
    assert torch.equal(docstrings.stream(again.held_out), docstrings.stream(data.held_out))


def test_the_vocabulary_is_the_training_parts(data):
    tokens = data.known(docstrings.stream(data.train))
    counts = torch.bincount(tokens, minlength=data.vocabulary)
    counts[START] = 0
    assert torch.equal(counts, data.counts)
    inside = data.counts[len(SPECIALS) :]
    assert torch.equal(inside, inside.sort(descending=True)[0])


def test_tokens_are_the_texts_words(data):
    document = data.held_out[3]
    assert torch.equal(data.numbers(document.text), document.tokens)
    assert data.numbers("zyxwvut the").tolist() == [UNKNOWN, data.words.index("the")]
    assert docstrings.tokenise("Don't (get_item).") == ["don", "'", "t", "(", "get_item", ")", "."]


def test_rows_and_padding(data):
    documents = data.held_out[:20]
    found = docstrings.rows(documents, 10)
    assert all(row[0] == START and len(row) <= 10 for row in found)
    assert torch.equal(torch.cat([row[1:] for row in found]), torch.cat([d.tokens for d in documents]))
    tokens, lengths = docstrings.padded(found)
    assert ((tokens == PAD).sum(1) == tokens.shape[1] - lengths).all()


def test_unigram_perplexity():
    train, held_out = torch.tensor([0, 0, 1]), torch.tensor([0, 1])
    assert ngrams.unigram(train, held_out, 2) == pytest.approx(1 / math.sqrt(3 / 5 * 2 / 5))


@pytest.mark.parametrize("order", [2, 3])
def test_kneser_ney_is_a_distribution(order):
    """After any context the probabilities of all words sum to 1."""
    generator = torch.Generator().manual_seed(order)
    train = torch.randint(5, (200,), generator=generator)
    for context in ([0, 1], [2, 2], [5, 0]):  # 5 was never seen
        before = torch.tensor(context)
        whole = ngrams.kneser_ney(train, before, 6, order) ** -len(before)
        following = [
            ngrams.kneser_ney(train, torch.cat([before, torch.tensor([word])]), 6, order) ** -(len(before) + 1)
            for word in range(6)
        ]
        assert sum(following) / whole == pytest.approx(1)


def test_kneser_ney_of_two_bigrams():
    # Train: a b a c. Bigrams ab, ba, ac: a follows 1 kind, b 1, c 1 of 3 continuations; below them 1 / 4.
    train, held_out = torch.tensor([0, 1, 0, 2]), torch.tensor([0, 1])
    unigram = 0.25 / 3 + 0.75 * 3 / 3 / 4
    bigram = 0.25 / 2 + 0.75 * 2 / 2 * unigram
    assert ngrams.kneser_ney(train, held_out, 4, 2) == pytest.approx((unigram * bigram) ** -0.5)
