"""Reading aloud without a network: the baselines of the encoder-decoders, and how readings are scored.

python -m examples.letter_to_sound     the baselines' phoneme errors
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from examples.data.cmudict import LETTERS, PHONES, Words

Reading = Sequence[int]
NONE, PAIRS = 0, 1 + PHONES  # what a letter is spoken as: nothing, one phone (1 + its number), or two
UNITS = PAIRS + PHONES**2
FIRST = 2  # phones begin there in the vocabulary
WIDEST = 14  # letters and phones of words that are aligned: all but one in 200
CONTEXTS = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (3, 3), (4, 4))  # letters before and after, the later the better


def edits(a: Reading, b: Reading) -> int:
    """The fewest insertions, deletions and substitutions that turn a into b (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def errors(found: Sequence[Reading], words: Words) -> tuple[float, float]:
    """Phoneme errors and word errors in percent: edits to the nearest reading over its phones; words without one."""
    wrong = phones = missed = 0
    for guess, readings in zip(found, words.readings, strict=True):
        distance, length = min((edits(guess, reading), len(reading)) for reading in readings)
        wrong, phones, missed = wrong + distance, phones + length, missed + (distance > 0)
    return 100 * wrong / phones, 100 * missed / len(found)


def nearest(train: Words, words: Words) -> list[Reading]:
    """The reading of the training word with the fewest edits; of several the first in the alphabet."""
    letters, found = train.letters.T.contiguous(), list[Reading]()
    rows, lengths = torch.arange(len(train)), train.letter_lengths
    for word in words.words:
        near = (lengths - len(word)).abs() <= 2  # others are nearer than that only where nothing is near
        some = letters[: int(lengths[near].max()), near]
        row = [torch.full((some.shape[1],), j, dtype=torch.int8) for j in range(len(word) + 1)]
        best = torch.empty(some.shape[1], dtype=torch.int8)
        for i, column in enumerate(some, 1):
            corner, row[0] = row[0], torch.full_like(best, i)
            for j, letter in enumerate(word.encode(), 1):
                cost = torch.minimum(row[j], row[j - 1]).add_(1)
                corner, row[j] = row[j], torch.minimum(cost, corner + (column != letter - ord("a")))
            best = torch.where(lengths[near] == i, row[-1], best)
        found.append(train.readings[int(rows[near][best.argmin()])][0])
    return found


def aligned(words: Words, rounds: int = 4, sample: int = 20_000) -> tuple[Tensor, Tensor]:
    """What each letter is spoken as, (N, 14), and which words these are: the most probable alignment, by Viterbi.

    A letter is spoken as no phone, one or two, and the order is kept. The probabilities are learned from a sample:
    alignments and counts in turns, at first by places in the word.
    """
    rows = ((words.letter_lengths <= WIDEST) & (words.phone_lengths <= WIDEST)).nonzero()[:, 0]
    rows = rows[words.phone_lengths[rows] <= 2 * words.letter_lengths[rows]]
    chosen = rows[:: max(1, len(rows) // sample)]
    table = _by_place(words, chosen)
    for _ in range(rounds):
        units = _viterbi(words, chosen, table)
        letters = words.letters[chosen, :WIDEST].long()
        there = torch.arange(WIDEST) < words.letter_lengths[chosen, None]
        counts = torch.bincount((letters * UNITS + units)[there], minlength=len(LETTERS) * UNITS)
        smooth = counts.view(len(LETTERS), UNITS) + 0.01
        table = (smooth / smooth.sum(1, keepdim=True)).log()
    return _viterbi(words, rows, table), rows


def _by_place(words: Words, rows: Tensor) -> Tensor:
    """log P(unit | letter) (26, UNITS) at first: phones at about the same place of the word."""
    letters, phones = words.letters[rows, :WIDEST].long(), words.phones[rows, :WIDEST].long() - FIRST
    place = torch.arange(WIDEST)
    a, b = words.letter_lengths[rows, None], words.phone_lengths[rows, None]
    apart = ((place + 0.5) / a)[:, :, None] - ((place + 0.5) / b)[:, None]
    weight = (-10 * apart.abs()).exp() * ((place < a)[:, :, None] & (place < b)[:, None])
    pairs = letters[:, :, None] * PHONES + phones.clamp(min=0)[:, None]
    single = torch.zeros(len(LETTERS) * PHONES).scatter_add_(0, pairs.flatten(), weight.flatten()) + 1e-3
    single = single.view(len(LETTERS), PHONES)
    single = (single / single.sum(1, keepdim=True)).log()
    double = (single[:, :, None] + single[:, None]).flatten(1) - 1
    return torch.cat((torch.full((len(LETTERS), 1), -3.0), single, double), 1)


def _viterbi(words: Words, rows: Tensor, table: Tensor) -> Tensor:
    letters, phones = words.letters[rows, :WIDEST].long(), words.phones[rows, :WIDEST].long() - FIRST
    lengths, counts = words.letter_lengths[rows], words.phone_lengths[rows]
    phones = phones.clamp(min=0)
    one = 1 + phones  # the unit that ends with phone j
    two = PAIRS + phones.roll(1, 1) * PHONES + phones
    best = torch.full((len(rows), WIDEST + 1), -torch.inf)
    best[:, 0] = 0
    taken = []
    for place in range(WIDEST):
        letter = letters[:, place, None]
        choices = torch.full((3, len(rows), WIDEST + 1), -torch.inf)
        choices[0] = best + table[letter, NONE]
        choices[1, :, 1:] = best[:, :-1] + table[letter, one]
        choices[2, :, 2:] = best[:, :-2] + table[letter, two[:, 1:]]
        value, choice = choices.max(0)
        there = (place < lengths)[:, None]
        best, choice = torch.where(there, value, best), choice.masked_fill(~there, 0)
        taken.append(choice)
    units, at = torch.zeros_like(letters), counts[:, None]
    for place in reversed(range(WIDEST)):
        choice = taken[place].gather(1, at)
        end = (at - 1).clamp(min=0)
        unit = torch.where(choice == 1, one.gather(1, end), two.gather(1, end))
        units[:, place] = torch.where(choice == 0, NONE, unit)[:, 0]
        at = at - choice
    return units


def _windows(letters: Tensor, lengths: Tensor, before: int, after: int) -> Tensor:
    """A number for each letter and those around it, (N, L); beyond a word's ends is a letter of its own."""
    width = letters.shape[1]
    there = torch.arange(width) < lengths[:, None]
    padded = torch.nn.functional.pad(letters.long().masked_fill(~there, 26), (before, after), value=26)
    found = torch.zeros_like(letters, dtype=torch.int64)
    for shift in range(before + after + 1):
        found = found * 27 + padded[:, shift : shift + width]
    return found


def by_rules(train: Words, words: Words) -> dict[str, list[Reading]]:
    """Readings letter by letter: the most frequent unit of the letter; of the letter in the widest known context."""
    units, rows = aligned(train)
    letters, lengths = train.letters[rows, :WIDEST], train.letter_lengths[rows]
    there = torch.arange(WIDEST) < lengths[:, None]
    found: dict[str, list[Reading]] = {}
    spoken = torch.zeros_like(words.letters, dtype=torch.int64)
    for before, after in CONTEXTS:
        seen = _windows(letters, lengths, before, after)[there] * UNITS + units[there]
        each, counts = seen.unique(return_counts=True)
        each = each[counts.argsort(stable=True)]  # of a context the most frequent one is last
        each = each[(each // UNITS).argsort(stable=True)]
        context = each // UNITS
        last = torch.cat((context[1:] != context[:-1], torch.ones(1, dtype=torch.bool)))
        context, unit = context[last], each[last] % UNITS
        wanted = _windows(words.letters, words.letter_lengths, before, after)
        at = torch.searchsorted(context, wanted).clamp(max=len(context) - 1)
        spoken = torch.where(context[at] == wanted, unit[at], spoken)
        if (before, after) == (0, 0):
            found["most frequent phone of the letter"] = _readings(spoken, words)
    found["letters in context"] = _readings(spoken, words)
    return found


def _readings(units: Tensor, words: Words) -> list[Reading]:
    found: list[Reading] = []
    for row, length in zip(units.tolist(), words.letter_lengths.tolist(), strict=True):
        phones: list[int] = []
        for unit in row[:length]:
            if unit >= PAIRS:
                phones += [FIRST + (unit - PAIRS) // PHONES, FIRST + (unit - PAIRS) % PHONES]
            elif unit != NONE:
                phones.append(FIRST + unit - 1)
        found.append(phones)
    return found


def baselines(train: Words, words: Words) -> dict[str, float]:
    """Phoneme errors in percent."""
    found = by_rules(train, words) | {"nearest word": nearest(train, words)}
    return {name: errors(readings, words)[0] for name, readings in found.items()}


if __name__ == "__main__":
    from examples.data import cmudict

    data = cmudict.load()
    for name, value in baselines(data.train, data.held_out).items():
        print(f"{name}: {value:.1f} % phoneme errors")
