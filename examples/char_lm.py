"""A character-aware language model of docstrings: it reads words letter by letter, and writes them as words.

python -m examples.char_lm --twin          convolutions over characters, highway, LSTM
python -m examples.char_lm --variant words  an LSTM that reads words as numbers, for comparison
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import seqkern
from examples import ngrams, runner, twins
from examples.data import docstrings
from examples.data.docstrings import START
from examples.runner import Exhibit, Recipe

ROWS, CONTEXT, HELD_OUT_CONTEXT = 8, 32, 128
LONGEST_WORD = 16  # characters that are read
CHARS: dict[str, Any] = {"char_dim": 16, "filters": (25, 25, 50, 50, 50, 50, 50), "hidden_size": 128}
WORDS: dict[str, Any] = {"embedding_dim": 128, "hidden_size": 128}  # about as many parameters
STRANGE = ("retrun", "deserializes", "get_filename", "subclassing", "encodable")  # looked up, whether known or not

VOCABULARY = 2048

corpus = runner.cached(lambda: docstrings.load(VOCABULARY))


@runner.cached
def alphabet() -> dict[str, int]:
    """Numbers of the vocabulary's characters; 0 is any other one, 1 and 2 are a word's beginning and end."""
    data = corpus()
    return {c: number for number, c in enumerate(sorted(set("".join(data.words[: data.vocabulary]))), 3)}


def spelt(words: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Character numbers (words, longest) of words between a beginning and an end, and how many each has."""
    numbers = alphabet()
    pieces = [[1, *(numbers.get(c, 0) for c in word[:LONGEST_WORD]), 2] for word in words]
    table = torch.zeros(len(words), LONGEST_WORD + 2, dtype=torch.int64)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece)] = torch.tensor(piece)
    return table, torch.tensor([len(piece) for piece in pieces])


spellings = runner.cached(lambda: spelt(corpus().words))
streams = runner.cached(lambda: tuple(docstrings.stream(part) for part in (corpus().train, corpus().held_out)))


def readable(variant: str, tokens: Tensor) -> Tensor:
    """What a model reads: characters tell of words that are not in the vocabulary, numbers do not."""
    return tokens if variant == "chars" else corpus().known(tokens)


def neighbours(model: Any, words: Sequence[str], count: int = 5) -> list[list[str]]:
    """Each word and the words of the vocabulary whose vectors are nearest to its own, by cosine."""
    data = corpus()
    known = [word for word in data.words[: data.vocabulary] if word.isalpha() and len(word) > 2]
    table = nn.functional.normalize(model.encode(*spelt(known)), dim=-1)
    found = nn.functional.normalize(model.encode(*spelt(words)), dim=-1) @ table.T
    rows = []
    for word, near in zip(words, found, strict=True):
        nearest = [known[place] for place in near.topk(count + 1).indices.tolist() if known[place] != word]
        place = data.words.index(word) if word in data.words else len(data.words)
        rows.append([word, "yes" if place < data.vocabulary else "no", ", ".join(nearest[:count])])
    return rows


def written(variant: str, model: Any, length: int = 40) -> Exhibit:
    """Documents that the model begins and writes itself."""
    data, pieces = corpus(), []
    prompts = [docstrings.tokenise(text) for text in ("Return the", "Raised when", "This module")]
    for number, prompt in enumerate(prompts):
        tokens = torch.tensor([[START, *data.numbers(" ".join(prompt)).tolist()]])
        found = seqkern.generate(
            model.step, model.start(1, length), readable(variant, tokens), max_new_tokens=length, stop_tokens=START,
            temperature=0.7, top_k=40, seed=number,
        )  # fmt: skip
        new = [token for token in found.tokens[0, tokens.shape[1] :].tolist() if token != START]
        pieces += [(" ".join(prompt) + " ", "soft"), (data.text(new) + "\n\n", "")]
    return Exhibit(
        "Written", "Beginnings, and how the model goes on; temperature 0.7, the 40 likeliest words", text=pieces
    )


class System(runner.System):
    name = "char_lm"
    title = "Character-aware language model"
    about = (
        "Convolutions of widths 1 to 7 over a word's characters, the maximum over its length, a highway layer, and an "
        "LSTM that predicts the next word (Kim et al. 2016). It reads any word, and writes one of 2044 or <unk>. "
        "Beside it an LSTM with a vector of each word and about as many parameters."
    )
    data = "docstrings of this Python's standard library, lower case; PSF licence; a tenth of the files is held out"
    metric, higher_is_better = "perplexity", False
    loss, tokens = "nats", "words"
    against, margin, target, tolerance = "bigram, Kneser-Ney", 3.0, 98.0, 3.0
    recipes: ClassVar = {
        "chars": Recipe(steps=2000, learning_rate=3e-3),
        "words": Recipe(steps=2000, learning_rate=5e-3),
    }

    def model(self, variant: str) -> nn.Module:
        if variant == "words":
            return seqkern.models.RecurrentLM(corpus().vocabulary, **WORDS)
        return seqkern.models.CharAwareLM(*spellings(), corpus().vocabulary, **CHARS)

    def twin(self, variant: str) -> nn.Module:
        if variant == "words":
            return twins.recurrent_lm.RecurrentLM(corpus().vocabulary, **WORDS)
        return twins.char_lm.CharAwareLM(*spellings(), corpus().vocabulary, **CHARS)

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        generator, train = torch.Generator().manual_seed(seed), streams()[0]
        inputs, targets = readable(variant, train), corpus().known(train)
        while True:
            places = torch.randint(len(train) - CONTEXT, (ROWS, 1), generator=generator) + torch.arange(CONTEXT)
            yield inputs[places], targets[places + 1]

    def size(self, batch: tuple[Any, ...]) -> int:
        return batch[0].numel()

    def evaluate(self, variant: str, model: nn.Module) -> float:
        held_out, loss_of = streams()[1], model.loss
        assert callable(loss_of)
        windows = (len(held_out) - 1) // HELD_OUT_CONTEXT
        end = windows * HELD_OUT_CONTEXT
        inputs = readable(variant, held_out[:end]).view(windows, -1)
        targets = corpus().known(held_out[1 : end + 1]).view(windows, -1)
        losses = [loss_of(x, y) * len(x) for x, y in zip(inputs.split(16), targets.split(16), strict=True)]
        return (torch.stack(losses).sum() / windows).exp().item()

    def baselines(self) -> dict[str, float]:
        vocabulary = corpus().vocabulary
        train, held_out = (corpus().known(part) for part in streams())
        return {
            "unigram": ngrams.unigram(train, held_out, vocabulary),
            "bigram, Kneser-Ney": ngrams.kneser_ney(train, held_out, vocabulary, 2),
            "trigram, Kneser-Ney": ngrams.kneser_ney(train, held_out, vocabulary, 3),
        }

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        found = [written(variant, model)]
        if variant == "chars":
            table = [["word", "in the vocabulary", "nearest words"], *neighbours(model, ("returns", *STRANGE))]
            note = "By cosine of vectors made from characters, of unseen and misspelt words too"
            found.append(Exhibit("Nearest words by spelling", note, table=table))
        return found


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
