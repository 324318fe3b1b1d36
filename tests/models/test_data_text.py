"""The baselines of the language models of Python's documentation."""

import pytest

from examples import gpt, ngrams, recurrent_lm, text


def test_counting_is_among_the_baselines(monkeypatch):
    """Both language models of bytes are compared with 7-grams, which are ahead of zlib; the counts are made once."""
    found = gpt.SYSTEM.baselines()
    assert list(found) == ["uniform", "unigram", "zlib", "lzma", "7-gram, Kneser-Ney"]
    assert found["lzma"] < found["zlib"]
    assert found["7-gram, Kneser-Ney"] < found["zlib"] - gpt.SYSTEM.margin
    monkeypatch.setattr(ngrams, "kneser_ney", lambda *_: pytest.fail("counted again"))
    assert recurrent_lm.SYSTEM.baselines() == found


def test_a_longer_text_is_counted_at_its_end(monkeypatch):
    monkeypatch.setattr(gpt, "COUNTED_BYTES", 1000)
    corpus = text.split(bytes(20_000) + b"abcdefg " * 3000, "test")
    found = gpt.System(corpus).baselines()
    assert 0 < found["7-gram, Kneser-Ney"] < 0.01  # of the zeros before there is nothing


def test_seven_grams_of_what_repeats_itself():
    """Seven bytes tell what comes next, six do not."""
    corpus = text.split((b"abcdef0123456" + b"zbcdef0123457") * 2000, "test")
    found = gpt.System(corpus).baselines()["7-gram, Kneser-Ney"]
    assert 0 < found < 0.2
