"""Sequence labelling: what each identifier of a line of Python is for.

python -m examples.tagger --twin               a bidirectional LSTM
python -m examples.tagger --variant rnn        one that reads from left to right; --all: every one

Sizes and rates were chosen by looking at the held-out metric: the set has no part to tune on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import seqkern
from examples import runner, twins
from examples.data import identifiers, shuffled
from examples.data.identifiers import IGNORED, NAME, PAD, ROLES
from examples.runner import Exhibit, Recipe

ROWS = 64
NAME_DROPOUT = 0.2  # of identifiers become "<name>", in training, as every third of unseen files is
OPENING, CLOSING = ("(", "[", "{"), (")", "]", "}")
TRANSFORMER = {"embedding_dim": 64, "hidden_size": 128, "encoder": "transformer", "num_layers": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "birnn": {"embedding_dim": 64, "hidden_size": 64},
    "rnn": {"embedding_dim": 64, "hidden_size": 128, "encoder": "rnn"},
    "transformer": TRANSFORMER,
    "sinusoidal": TRANSFORMER | {"positions": "sinusoidal"},
}
TOKEN, NEIGHBOURS = "most frequent role of the token", "most frequent role between its neighbours"
BACK_OFF = "counts with back-off"  # of the tokens beside an identifier, the line's first one and the open brackets

data = runner.cached(identifiers.load)


def predictions(model: Any, part: identifiers.Part) -> Tensor:
    """The most probable role of every token, (N, T). Lines of about one length are computed together."""
    found = torch.zeros_like(part.roles)
    for rows in part.lengths.argsort(stable=True).split(128):
        tokens, _, lengths = part[rows]
        found[rows, : tokens.shape[1]] = model.logits(model(tokens, lengths)).argmax(-1)
    return found


def percent(guessed: Tensor, roles: Tensor) -> float:
    """Of identifiers, how many are right."""
    counted = roles != IGNORED
    return 100 * (guessed == roles)[counted].double().mean().item()


def occurrences(part: identifiers.Part) -> Iterator[tuple[str, tuple[str, str], int]]:
    """Of each identifier: itself, the tokens beside it, and its role."""
    for line in part.lines:
        before, after = ("", *line.tokens[:-1]), (*line.tokens[1:], "")
        for *beside, token, role in zip(before, after, line.tokens, line.roles, strict=True):
            if role != IGNORED:
                yield token, (beside[0], beside[1]), role


def surroundings(part: identifiers.Part) -> Iterator[tuple[tuple[int, ...], int]]:
    """Of each identifier: (token before, token after, first token of the line, open brackets), and its role."""
    for row, line in enumerate(part.lines):
        numbers, depth = [PAD, *part.tokens[row, : part.lengths[row]].tolist(), PAD], 0
        for place, (token, role) in enumerate(zip(line.tokens, line.roles, strict=True), 1):
            depth += (token in OPENING) - (token in CLOSING)
            if role != IGNORED:
                yield (numbers[place - 1], numbers[place + 1], numbers[1], depth), role


def back_off(train: identifiers.Part, part: identifiers.Part) -> Tensor:
    """The most frequent role of identifiers in the same surroundings: in as much of them as the training part has.

    The identifier itself is no clue: counts that have it first are worse, as they are of few lines.
    """
    tables: list[dict[tuple[int, ...], Counter[int]]] = [{} for _ in range(5)]
    for clues, role in surroundings(train):
        for used, counts in enumerate(tables):
            counts.setdefault(clues[:used], Counter())[role] += 1
    best = [{clues: c.most_common(1)[0][0] for clues, c in counts.items()} for counts in tables]
    longest = (
        next(best[used][clues[:used]] for used in (4, 3, 2, 1, 0) if clues[:used] in best[used])
        for clues, _ in surroundings(part)
    )
    return torch.tensor([*longest])


def marked(part: identifiers.Part, guessed: Tensor, count: int = 4) -> Exhibit:
    """Held-out lines: those with the most kinds of roles, and some with mistakes; one of a file."""
    wrong = ((guessed != part.roles) & (part.roles != IGNORED)).any(1)
    kinds = torch.tensor([len({*line.roles} - {IGNORED}) for line in part.lines])
    fits = part.lengths <= 22
    chosen = []
    for wanted in (fits & ~wrong, fits & wrong):
        order = (kinds * wanted).argsort(descending=True, stable=True)
        files = {part.lines[row].file: row for row in order[: int(wanted.sum())].flip(0).tolist()}  # the best of each
        chosen += sorted(files.values(), key=order.tolist().index)[:count]
    pieces: list[tuple[str, str]] = []
    for row in chosen:
        line = part.lines[row]
        pieces.append((f"{line.file}: ", "soft"))
        for token, role, guess in zip(line.tokens, line.roles, guessed[row].tolist(), strict=False):
            if role == IGNORED:
                pieces.append((f"{token} ", ""))
            else:
                said = ROLES[guess] if guess == role else f"{ROLES[guess]}, not {ROLES[role]}"
                pieces += [(token, "good" if guess == role else "bad"), (f"[{said}] ", "soft")]
        pieces.append(("\n", ""))
    note = "Identifiers with the role that the model gives them, green if right; the last lines have mistakes"
    return Exhibit("Lines of files it never saw", note, text=pieces)


def confusion(part: identifiers.Part, guessed: Tensor) -> Exhibit:
    """How often each role is taken for each."""
    counted = part.roles != IGNORED
    pairs = part.roles[counted] * len(ROLES) + guessed[counted]
    counts = torch.bincount(pairs, minlength=len(ROLES) ** 2).view(len(ROLES), -1)
    rows = [
        [role, *(str(n) for n in row), f"{100 * row[number] / max(1, sum(row)):.1f}"]
        for number, (role, row) in enumerate(zip(ROLES, counts.tolist(), strict=True))
    ]
    note = "Identifiers of held-out files: a row for each true role, a column for each guess"
    return Exhibit("Which roles are mistaken", note, table=[["", *ROLES, "right, %"], *rows])


class System(runner.System):
    name = "tagger"
    title = "Roles of identifiers"
    about = (
        "Sequence labelling (Jurafsky and Martin, sections 9.4 and 9.5): a tag for every word, from a bidirectional "
        "LSTM, an LSTM that sees only what comes before, or a Transformer's encoder. A name's role often shows to its "
        "right: in total = 0, in f(total=0). Counts of the tokens beside it, of the line's first token and of the open "
        "brackets are already right for 99 of 100."
    )
    data = (
        "the standard library of this Python, its top-level modules, distinct logical lines with the roles that ast "
        "gives; PSF licence; a tenth of the files is held out, without the lines that the training part has too once "
        "rare names are <name>"
    )
    metric, higher_is_better = "accuracy, %", True
    loss, tokens = "nats", "tokens"
    against, margin, target, tolerance = BACK_OFF, 0.3, 99.5, 0.5
    recipes: ClassVar = {
        name: Recipe(steps=600, learning_rate=3e-3 if "encoder" in chosen and chosen["encoder"] != "rnn" else 5e-3)
        for name, chosen in VARIANTS.items()
    }

    def model(self, variant: str) -> nn.Module:
        return seqkern.models.Tagger(len(data().vocabulary), len(ROLES), **VARIANTS[variant])

    def twin(self, variant: str) -> nn.Module:
        return twins.tagger.Tagger(len(data().vocabulary), len(ROLES), **VARIANTS[variant])

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(seed)
        for rows in shuffled(data().train.lengths, ROWS, seed):
            tokens, roles, lengths = data().train[rows]
            dropped = (torch.rand(tokens.shape, generator=generator) < NAME_DROPOUT) & (roles != IGNORED)
            yield tokens.masked_fill(dropped, NAME), roles, lengths

    def size(self, batch: tuple[Any, ...]) -> int:
        return int(batch[2].sum())

    def evaluate(self, variant: str, model: nn.Module) -> float:
        part = data().held_out
        return percent(predictions(model, part), part.roles)

    def baselines(self) -> dict[str, float]:
        train, held_out = (list(occurrences(part)) for part in (data().train, data().held_out))
        roles = torch.tensor([role for *_, role in held_out])
        majority = Counter(role for *_, role in train).most_common(1)[0][0]
        found = {"majority": percent(torch.full_like(roles, majority), roles)}
        for number, name in enumerate((TOKEN, NEIGHBOURS)):
            counts: dict[Any, Counter[int]] = {}
            for *clues, role in train:
                counts.setdefault(clues[number], Counter())[role] += 1
            best = {clue: counter.most_common(1)[0][0] for clue, counter in counts.items()}
            found[name] = percent(torch.tensor([best.get(o[number], majority) for o in held_out]), roles)
        found[BACK_OFF] = percent(back_off(data().train, data().held_out), roles)
        return found

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        part = data().held_out
        guessed = predictions(model, part)
        return [marked(part, guessed), confusion(part, guessed)]


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
