"""BERT on docstrings, character by character: it restores letters that are hidden.

python -m examples.bert --twin

Characters, for words would take it too long: after the half minute that it has here, a BERT of words is right about 18%
of the time where the most frequent word is 7% and counts of both neighbours are 28%. Of characters it learns
more than counts of a neighbour to each side know, and less than counts of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import seqkern
from examples import runner, twins
from examples.data import docstrings
from examples.data.docstrings import MASK, SPECIALS, UNKNOWN
from examples.runner import Exhibit, Recipe

LENGTH, ROWS, HELD_OUT_ROWS = 64, 32, 800
SHARE, TRAIN_SHARE = (
    0.15,
    0.3,
)  # of the characters is hidden; in training more, which teaches faster (Wettig et al. 2023)
RARE = 20  # a character that stands fewer times in the training part is <unk>
SIZES: dict[str, Any] = {"d_model": 64, "nhead": 4, "num_layers": 2, "max_len": LENGTH, "local": 2, "norm_first": True}

corpus = runner.cached(docstrings.load)


@runner.cached
def alphabet() -> list[str]:
    """The character of each number, the most frequent first, after SPECIALS."""
    counts = Counter(c for document in corpus().train for c in document.text)
    return [*SPECIALS, *(c for c, count in counts.most_common() if count >= RARE)]


def numbers(text: str) -> Tensor:
    index = {c: number for number, c in enumerate(alphabet())}
    return torch.tensor([index.get(c, UNKNOWN) for c in text])


def pieces(documents: Sequence[docstrings.Document]) -> list[Tensor]:
    """Every document cut into rows of at most LENGTH characters."""
    return [piece for document in documents for piece in numbers(document.text).split(LENGTH)]


train_rows = runner.cached(lambda: pieces(corpus().train))


def hidden(rows: Sequence[Tensor], generator: torch.Generator, held_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, targets, lengths). Held out, every chosen character is <mask>, so that none can be copied."""
    tokens, lengths = docstrings.padded(rows)
    share = SHARE if held_out else TRAIN_SHARE
    inputs, targets = seqkern.models.mask_tokens(
        tokens, lengths, generator, len(alphabet()), MASK, share, specials=len(SPECIALS)
    )
    return (tokens.where(targets == -100, MASK) if held_out else inputs), targets, lengths


@runner.cached
def held_out_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows of held-out text from all over it, with the same characters hidden whenever it is evaluated."""
    rows = pieces(corpus().held_out)
    rows = sorted(rows[:: -(-len(rows) // HELD_OUT_ROWS)], key=len)
    generator = torch.Generator().manual_seed(0)
    return [hidden(rows[start : start + 64], generator, True) for start in range(0, len(rows), 64)]


def guesses_by_context(around: Sequence[tuple[int, ...]]) -> float:
    """Accuracy in % of the character that stood most often in the training part between such neighbours.

    around: places of neighbours, such as (-1, 1); where those were never seen together, or are hidden, the next ones.
    """
    size, edge = len(alphabet()), max(max(map(abs, places), default=0) for places in around)

    def contexts(tokens: Tensor, places: tuple[int, ...]) -> Tensor:
        wide = nn.functional.pad(tokens, (edge, edge))
        keys = torch.zeros_like(tokens)
        for place in places:
            keys = keys * size + wide[..., edge + place : edge + place + tokens.shape[-1]]
        return keys

    train = docstrings.padded(train_rows())[0]
    real = train >= len(SPECIALS)
    batches = held_out_batches()
    guesses = [torch.zeros_like(targets) for _, targets, _ in batches]
    for places in around:
        seen, counts = (contexts(train, places) * size + train)[real].unique(return_counts=True)
        seen, counts = seen[order := counts.argsort(stable=True)], counts[order]
        best = dict(zip((seen // size).tolist(), (seen % size).tolist(), strict=True))  # the most frequent comes last
        for guess, (inputs, _, _) in zip(guesses, batches, strict=True):
            found = contexts(inputs, places).apply_(lambda key, best=best: best.get(key, 0))
            guess.copy_(guess.where(guess > 0, found))
    right = [(guess == targets)[targets != -100] for guess, (_, targets, _) in zip(guesses, batches, strict=True)]
    return 100 * torch.cat(right).double().mean().item()


def restored(model: Any, rows: int = 4) -> Exhibit:
    """Held-out text with hidden letters, as the model fills them in; wrong ones with the true letter behind."""
    batch = held_out_batches()[-1]
    inputs, targets, lengths = (tensor[-rows * 5 :: 5] for tensor in batch)
    names, found = alphabet(), []
    guesses = inputs.clone()
    guesses[targets != -100] = model(inputs, lengths, targets != -100).argmax(-1)
    for shown, guess, true in zip(inputs.tolist(), guesses.tolist(), targets.tolist(), strict=True):
        found.append(("".join("_" if token == MASK else names[token] for token in shown) + "\n", "soft"))
        for token, right in zip(guess, true, strict=True):
            style = "" if right == -100 else "good" if token == right else "bad"
            found.append((names[token] + (f"[{names[right]}]" if style == "bad" else ""), style))
        found.append(("\n\n", ""))
    note = (
        "Held-out text with 15% of its characters hidden, and filled in: green is right, red wrong, the true one behind"
    )
    return Exhibit("Restored", note, text=found)


def attention_map(model: Any, text: str = "Return a list of the file names.") -> Exhibit:
    """The sharpest head of the last layer on a sentence with hidden letters."""
    tokens = numbers(text)[None]
    tokens[0, 4::7] = MASK
    weights = model.bert.attention_weights(tokens)[0]
    head = int(weights.square().sum((1, 2)).argmax())
    letters = ["_" if token == MASK else alphabet()[token] for token in tokens[0].tolist()]
    figure = Figure(figsize=(5.5, 5.2), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights[head].numpy(), cmap="Blues", vmin=0)
    axes.set_xticks(range(len(letters)), letters, fontsize=8, family="monospace")
    axes.set_yticks(range(len(letters)), letters, fontsize=8, family="monospace")
    axes.set_xlabel("character looked at")
    axes.set_ylabel("character that looks")
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8)
    note = f"Head {head + 1} of the last layer; each row sums to 1; _ is hidden"
    return Exhibit("Where a character looks", note, figure=figure)


class System(runner.System):
    name = "bert"
    title = "BERT"
    about = (
        "A bidirectional Transformer encoder, trained to restore hidden tokens from both sides (Devlin et al. 2019): "
        "of those that are chosen 80% are masked, 10% replaced, 10% left. The tokens are characters. The first of its "
        "two blocks sees two characters to each side, the second one all (Warner et al. 2024): so it learns far sooner."
    )
    data = "docstrings of this Python's standard library; PSF licence; a tenth of the files is held out"
    metric, higher_is_better = "% of hidden characters restored", True
    loss, tokens = "nats", "characters"
    against, margin, target, tolerance = "unigram", 20.0, 47.0, 2.0
    recipes: ClassVar = {"mlm": Recipe(steps=1500, learning_rate=8e-3)}

    def model(self, variant: str) -> nn.Module:
        return seqkern.models.MaskedLM(seqkern.models.BERT(len(alphabet()), **SIZES))

    def twin(self, variant: str) -> nn.Module:
        return twins.bert.MaskedLM(twins.bert.BERT(len(alphabet()), **SIZES))

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        generator, rows = torch.Generator().manual_seed(seed), train_rows()
        while True:
            for places in torch.randperm(len(rows), generator=generator).split(ROWS)[:-1]:
                yield hidden([rows[place] for place in places.tolist()], generator, False)

    def size(self, batch: tuple[Any, ...]) -> int:
        return int(batch[2].sum())

    def evaluate(self, variant: str, model: nn.Module) -> float:
        right = []
        for inputs, targets, lengths in held_out_batches():
            chosen = targets != -100
            right.append(model(inputs, lengths, chosen).argmax(-1) == targets[chosen])
        return 100 * torch.cat(right).double().mean().item()

    def baselines(self) -> dict[str, float]:
        left, near, wide = (-1,), (-1, 1), (-2, -1, 1, 2)
        return {
            "unigram": guesses_by_context([()]),
            "left neighbour": guesses_by_context([left, ()]),
            "both neighbours": guesses_by_context([near, left, ()]),
            "two neighbours to both sides": guesses_by_context([wide, near, left, ()]),
        }

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        return [restored(model), attention_map(model)]


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
