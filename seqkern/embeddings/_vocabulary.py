"""Words as numbers: one pass over the sentences, counts, subsampling and the table that negatives are drawn from."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

LONGEST = 10_000  # words of a sentence: longer ones are cut into pieces, so that threads share them


def on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """The function with new tensors on the CPU, whatever torch's default device is."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return wrapped


class Corpus:
    """Sentences as numbers of words: tokens (int32), one sentence after another, and where each begins."""

    def __init__(self, words: list[str], counts: Tensor, tokens: Tensor, starts: Tensor) -> None:
        self.words, self.counts, self.tokens, self.starts = words, counts, tokens, starts


def read(name: str, sentences: Iterable[Iterable[str]], min_count: int) -> Corpus:
    """All sentences, each an iterable of words; words that stand fewer than min_count times are left out of them.

    Words are numbered by falling count, those of one count in the order in which they came.
    """
    numbers: dict[str, int] = {}
    tokens, starts = array("i"), array("q", [0])
    for sentence in sentences:
        if isinstance(sentence, (str, bytes)):
            raise TypeError(f"{name}: a sentence must be a list of words, got a string: split it")
        tokens.extend(numbers.setdefault(word, len(numbers)) for word in sentence)
        starts.extend(range(starts[-1] + LONGEST, len(tokens), LONGEST))
        starts.append(len(tokens))
    for word in numbers:
        if not isinstance(word, str):
            raise TypeError(f"{name}: words must be strings, got {type(word).__name__}")
    found = torch.frombuffer(tokens, dtype=torch.int32).clone() if tokens else torch.empty(0, dtype=torch.int32)
    bounds = torch.frombuffer(starts, dtype=torch.int64).clone()
    counts = torch.bincount(found, minlength=len(numbers))
    order = torch.argsort(counts, descending=True, stable=True)
    order = order[counts[order] >= min_count]
    rank = torch.full((len(numbers),), -1, dtype=torch.int32)
    rank[order] = torch.arange(len(order), dtype=torch.int32)
    ranked = rank[found.long()]
    kept = ranked >= 0
    before = torch.zeros(len(found) + 1, dtype=torch.int64)
    before[1:] = kept.cumsum(0)
    names = list(numbers)
    return Corpus([names[i] for i in order.tolist()], counts[order], ranked[kept].contiguous(), before[bounds])


def as_bytes(text: bytes) -> Tensor:
    """(size,), uint8."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def kept_share(counts: Tensor, sample: float) -> Tensor:
    """The share of each word's tokens that subsampling keeps, as word2vec has it: all for sample = 0."""
    if sample == 0:
        return torch.ones_like(counts, dtype=torch.float64)
    ratio = sample * counts.sum() / counts.double()
    return (ratio.sqrt() + ratio).clamp(max=1)


def as_bits(share: Tensor) -> Tensor:
    """Shares as 32-bit thresholds: a random number is at most that with this probability; int32 has their bits."""
    whole = ((share * 2.0**32).round().long() - 1).clamp(min=0)
    return torch.where(whole >= 2**31, whole - 2**32, whole).int()


def noise_weights(counts: Tensor, exponent: float) -> Tensor:
    """counts ** exponent, of which the largest is 1."""
    powers = exponent * counts.double().log()
    return (powers - powers.max()).exp()


def alias_table(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Walker's table for draws with these weights: each column's threshold (32 bits, in int32) and its other word.

    A draw takes a column, each as likely, and of it the column's own word below the threshold, else the other one.
    """
    count = len(weights)
    share = (weights.double() * (count / weights.double().sum())).tolist()
    other = list(range(count))
    small = [n for n in range(count) if share[n] < 1]
    large = [n for n in range(count) if share[n] >= 1]
    while small and large:
        less, more = small.pop(), large[-1]
        other[less] = more
        share[more] -= 1 - share[less]
        if share[more] < 1:
            small.append(large.pop())
    for n in (*small, *large):  # 1, but for rounding
        share[n] = 1.0
    return as_bits(torch.tensor(share, dtype=torch.float64)), torch.tensor(other, dtype=torch.int32)
