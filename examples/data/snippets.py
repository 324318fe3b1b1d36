"""Film reviews in a sentence each, and whether they praise: movie snippets that twenty people rated from -4 to 4.

They are in the source distribution of vaderSentiment 3.3.2 (MIT), additional_resources/hutto_ICWSM_2014.tar.gz; its
wheels have them not. The sentences come from reviews on rottentomatoes.com, the texts are their authors' (Pang and Lee
2005); the ratings are Hutto and Gilbert's (2014).

    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2 -d build/data
"""

from __future__ import annotations

import hashlib
import html
import io
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
MEMBER = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
SNIPPETS, NEUTRAL = 10605, 533  # in the file; of them rated below STRENGTH, which are dropped
STRENGTH = 0.5
HELD_OUT = 10  # one snippet of so many
LABELS = ("negative", "positive")
PAD, UNKNOWN = 0, 1
WORD = re.compile(r"n't\b|'(?:s|re|ve|ll|d|m)\b|[a-z]+?(?=n't\b)|[^\W\d_]+|\d+|[^\w\s]")


@dataclass(frozen=True)
class Part:
    """Snippets as rows of word numbers (N, T) with padding, their lengths (N,) and labels (N,), 1 is positive."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor
    words: list[list[str]]
    ratings: Tensor  # the mean of the people's

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch, (tokens, labels, lengths), as long as its longest snippet."""
        lengths = self.lengths[rows]
        return self.tokens[rows, : int(lengths.max())], self.labels[rows], lengths


@dataclass(frozen=True)
class Snippets:
    vocabulary: list[str]  # by number: padding, the unknown word, words of the training part
    train: Part
    held_out: Part


def read() -> list[tuple[float, str]]:
    """(rating, text) of each snippet in the file."""
    folders = [Path(__file__).parents[2] / "build" / "data", *map(Path, filter(None, [os.environ.get("SEQKERN_DATA")]))]
    found = next((folder / ARCHIVE for folder in folders if (folder / ARCHIVE).exists()), None)
    if found is None:
        raise FileNotFoundError(
            f"{ARCHIVE} is neither in {folders[0]} nor in $SEQKERN_DATA: `make data`, or `pip download --no-deps "
            "--no-binary :all: vaderSentiment==3.3.2 -d build/data` fetches it"
        )
    data = found.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ValueError(f"{found} is not the vaderSentiment 3.3.2 of PyPI: its SHA-256 differs")
    with tarfile.open(fileobj=io.BytesIO(data)) as outer:
        inner = outer.extractfile(INNER)
        assert inner is not None
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as archive:
            member = archive.extractfile(MEMBER)
            assert member is not None
            lines = member.read().decode().splitlines()
    rows = [line.split("\t", 2) for line in lines if line]
    return [(float(rating), text) for _, rating, text in rows]


def tokenize(text: str) -> list[str]:
    """Words in lower case, numbers and marks; 's, n't and their like are words of their own."""
    return WORD.findall(html.unescape(text).lower().replace("''", '"').replace("’", "'"))


def load(least: int = 2) -> Snippets:
    """Words that the training part has fewer than `least` times are unknown. There is no part to tune on."""
    every = read()
    kept = [(rating, tokenize(text)) for rating, text in every if abs(rating) >= STRENGTH]
    found = len(every), len(every) - len(kept)
    if found != (SNIPPETS, NEUTRAL):
        raise ValueError(f"{SNIPPETS} snippets and {NEUTRAL} neutral ones were expected, got {found[0]} and {found[1]}")
    parts: tuple[list[tuple[float, list[str]]], ...] = ([], [])
    seen = set()
    for rating, words in kept:
        key = " ".join(word for word in words if word.isalnum())
        if key and key not in seen:
            seen.add(key)
            parts[zlib.crc32(key.encode()) % HELD_OUT == 0].append((rating, words))
    counts = Counter(word for _, words in parts[0] for word in words)
    vocabulary = ["<pad>", "<unk>", *sorted(word for word, count in counts.items() if count >= least)]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    return Snippets(vocabulary, *(_part(part, numbers) for part in parts))


def _part(snippets: Sequence[tuple[float, list[str]]], numbers: dict[str, int]) -> Part:
    words = [words for _, words in snippets]
    ratings = torch.tensor([rating for rating, _ in snippets])
    rows = [torch.tensor([numbers.get(word, UNKNOWN) for word in row]) for row in words]
    lengths = torch.tensor([len(row) for row in rows])
    return Part(pad_sequence(rows, batch_first=True), lengths, (ratings > 0).long(), words, ratings)
