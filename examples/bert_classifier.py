"""BERT as a classifier, from scratch: what does a docstring belong to, a module, a class, a function or a method?

python -m examples.bert_classifier --twin            the state of the first token, as BERT's
python -m examples.bert_classifier --variant mean    the mean of all states
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import seqkern
from examples import runner, twins
from examples.data import docstrings
from examples.data.docstrings import KINDS, Document
from examples.plots import SEQKERN
from examples.runner import Exhibit, Recipe

LENGTH, ROWS = 40, 32
SIZES: dict[str, Any] = {"d_model": 64, "nhead": 4, "num_layers": 2, "max_len": LENGTH, "norm_first": True}

corpus = runner.cached(lambda: docstrings.load(2048))


def rows(documents: Sequence[Document]) -> list[tuple[Tensor, int]]:
    """The beginning of each document, after a <doc>, and its kind."""
    pieces = (docstrings.rows([document], LENGTH)[0] for document in documents)
    return [(corpus().known(piece), document.kind) for piece, document in zip(pieces, documents, strict=True)]


def batch(chosen: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, kinds, lengths)."""
    tokens, lengths = docstrings.padded([piece for piece, _ in chosen])
    return tokens, torch.tensor([kind for _, kind in chosen]), lengths


train_rows = runner.cached(lambda: rows(corpus().train))


@runner.cached
def held_out_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    found = sorted(rows(corpus().held_out), key=lambda row: len(row[0]))
    return [batch(found[start : start + 64]) for start in range(0, len(found), 64)]


def guesses(model: Any) -> tuple[Tensor, Tensor]:
    """Kinds of the held-out documents, true and guessed."""
    found = [(kinds, model(tokens, lengths).argmax(-1)) for tokens, kinds, lengths in held_out_batches()]
    true, guessed = zip(*found, strict=True)
    return torch.cat(true), torch.cat(guessed)


def naive_bayes() -> float:
    """Accuracy in % by the words of the same beginning as a bag, each counted once, with add-one smoothing."""

    def bags(found: Sequence[tuple[Tensor, int]]) -> Tensor:
        bag = torch.zeros(len(found), corpus().vocabulary, dtype=torch.float64)
        for row, (piece, _) in zip(bag, found, strict=True):
            row[piece] = 1
        return bag

    kinds = torch.tensor([kind for _, kind in train_rows()])
    member = nn.functional.one_hot(kinds, len(KINDS)).double()
    counts = member.T @ bags(train_rows()) + 1
    held_out = rows(corpus().held_out)
    scores = bags(held_out) @ (counts / counts.sum(1, keepdim=True)).log().T + member.mean(0).log()
    return 100 * (scores.argmax(1) == torch.tensor([kind for _, kind in held_out])).double().mean().item()


class System(runner.System):
    name = "bert_classifier"
    title = "BERT classifier"
    about = (
        "A bidirectional Transformer encoder with a classifier on the state of its first token, or on the mean of all "
        "(Devlin et al. 2019). It tells from a docstring's first words what it belongs to, and learns it from scratch."
    )
    data = "docstrings of this Python's standard library, lower case; PSF licence; a tenth of the files is held out"
    metric, higher_is_better = "accuracy in %", True
    loss, tokens = "nats", "words"
    against, margin, target, tolerance = "majority", 5.0, 60.0, 3.0
    recipes: ClassVar = {name: Recipe(steps=500, learning_rate=1e-3, weight_decay=0.1) for name in ("first", "mean")}

    def model(self, variant: Any) -> nn.Module:
        bert = seqkern.models.BERT(corpus().vocabulary, **SIZES)
        return seqkern.models.BERTClassifier(bert, len(KINDS), variant)

    def twin(self, variant: str) -> nn.Module:
        return twins.bert.BERTClassifier(twins.bert.BERT(corpus().vocabulary, **SIZES), len(KINDS), variant)

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        generator, found = torch.Generator().manual_seed(seed), train_rows()
        while True:
            order = torch.randperm(len(found), generator=generator)
            for pool in order.split(16 * ROWS)[:-1]:  # rows of about the same length together
                places = sorted(pool.tolist(), key=lambda place: len(found[place][0]))
                for number in torch.randperm(16, generator=generator).tolist():
                    yield batch([found[place] for place in places[number * ROWS : (number + 1) * ROWS]])

    def size(self, batch: tuple[Any, ...]) -> int:
        return int(batch[2].sum())

    def evaluate(self, variant: str, model: nn.Module) -> float:
        true, guessed = guesses(model)
        return 100 * (true == guessed).double().mean().item()

    def baselines(self) -> dict[str, float]:
        common = max(range(len(KINDS)), key=[kind for _, kind in train_rows()].count)
        held_out = [document.kind for document in corpus().held_out]
        return {
            "majority": 100 * held_out.count(common) / len(held_out),
            "naive Bayes on words": naive_bayes(),
        }

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        true, guessed = guesses(model)
        table = torch.zeros(len(KINDS), len(KINDS), dtype=torch.int64)
        table.index_put_((true, guessed), torch.tensor(1), accumulate=True)
        figure = Figure(figsize=(5, 4.2), layout="constrained")
        axes = figure.subplots()
        shares = table / table.sum(1, keepdim=True)
        for row in range(len(KINDS)):
            for column in range(len(KINDS)):
                axes.scatter(column, row, s=1500 * shares[row, column].item(), color=SEQKERN, alpha=0.35, linewidths=0)
                axes.text(column, row, str(table[row, column].item()), ha="center", va="center", color="#000000")
        axes.set_xticks(range(len(KINDS)), KINDS)
        axes.set_yticks(range(len(KINDS)), KINDS)
        axes.set_xlim(-0.6, len(KINDS) - 0.4)
        axes.set_ylim(len(KINDS) - 0.4, -0.6)
        axes.set_xlabel("guessed")
        axes.set_ylabel("true")
        rows = [["docstring", "true", "guessed"]]
        for tokens, kinds, lengths in held_out_batches()[2:6]:
            guess = int(model(tokens[:1], lengths[:1]).argmax())
            text = corpus().text(tokens[0, 1 : int(lengths[0])])
            rows.append([text, KINDS[int(kinds[0])], KINDS[guess]])
        note = "Held-out docstrings by kind; a circle's area is the share of its row"
        return [Exhibit("Confusions", note, figure=figure), Exhibit("Examples", table=rows)]


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
