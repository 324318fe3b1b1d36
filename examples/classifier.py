"""Sentiment: whether a sentence of a review praises its film.

python -m examples.classifier --twin              Kim's convolutions over windows of words
python -m examples.classifier --variant rnn-max   a bidirectional LSTM and the maximum of its states; --all: every one

Sizes and rates were chosen by looking at the held-out metric: the set has no part to tune on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import seqkern
from examples import plots, runner, twins
from examples.data import shuffled, snippets
from examples.runner import Exhibit, Recipe

ROWS = 50
WORD_DROPOUT = 0.1  # of words become the unknown word, in training
BOTH: dict[str, Any] = {"embedding_dim": 128, "hidden_size": 100, "bidirectional": True, "dropout": 0.6}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cnn": ("CNNClassifier", {"embedding_dim": 128, "filters": 128, "widths": (1, 2, 3), "dropout": 0.5}),
    "rnn-last": ("RNNClassifier", BOTH | {"pool": "last"}),
    "rnn-mean": ("RNNClassifier", BOTH | {"pool": "mean"}),
    "rnn-max": ("RNNClassifier", BOTH | {"pool": "max"}),
    "transformer": (
        "TransformerClassifier",
        {"d_model": 96, "nhead": 4, "num_layers": 1, "dim_feedforward": 192, "dropout": 0.5},
    ),
}
SHOWN = 12  # snippets
PAIRS = "naive Bayes of words and pairs"

data = runner.cached(snippets.load)


def naive_bayes(tokens: Tensor, labels: Tensor, words: int, pairs: bool = False) -> Callable[[Tensor], Tensor]:
    """log P(class) + sum over a snippet's distinct words of log P(word | class), counts plus one: (N, classes).

    pairs: the pairs of words that stand side by side are words too. Those that the training part has not do not count.
    """

    def distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
        """(number of the snippet, word or pair), each once."""
        if pairs:
            joined = (rows[:, :-1] + 1) * words + rows[:, 1:]
            rows = torch.cat((rows, joined.masked_fill(rows[:, 1:] == snippets.PAD, snippets.PAD)), 1)
        rows = rows.sort(1).values
        first = rows.diff(dim=1, prepend=torch.full_like(rows[:, :1], -1)) != 0
        row, place = (first & (rows > snippets.UNKNOWN)).nonzero(as_tuple=True)
        return row, rows[row, place]

    row, found = distinct(tokens)
    known, number = found.unique(return_inverse=True)
    prior = F.one_hot(labels).float().mean(0).log()
    counts = torch.ones(len(prior), len(known)).index_put_((labels[row], number), torch.tensor(1.0), accumulate=True)
    given = (counts / counts.sum(1, keepdim=True)).log()

    def scores(rows: Tensor) -> Tensor:
        row, found = distinct(rows)
        place = torch.searchsorted(known, found).clamp(max=len(known) - 1)
        kept = known[place] == found
        return prior.repeat(len(rows), 1).index_add(0, row[kept], given.T[place[kept]])

    return scores


def predictions(model: Any, part: snippets.Part) -> Tensor:
    """P(positive) of every snippet, (N,). Those of about one length are computed together."""
    found = torch.empty(len(part))
    for rows in part.lengths.argsort(stable=True).split(128):
        tokens, _, lengths = part[rows]
        found[rows] = model(tokens, lengths).softmax(1)[:, 1]
    return found


def percent(right: Tensor) -> float:
    return 100 * right.double().mean().item()


def spread(part: snippets.Part, count: int) -> range:
    """Numbers of snippets at equal distances: the file has those that praise first."""
    return range(0, len(part), -(-len(part) // count))


def winners(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every filter of a CNN, for one snippet (T,): its maximum, where that window starts, and its width."""
    x = model.embedding(tokens).T
    found = []
    for convolution in model.convolutions:
        width = convolution.kernel_size[0]
        values, starts = convolution(F.pad(x, (0, max(0, width - x.shape[1])))).max(1)
        found.append((values.relu(), starts, torch.full_like(starts, width)))
    values, starts, widths = (torch.cat(each) for each in zip(*found, strict=True))
    return values, starts, widths


def judged(part: snippets.Part, positive: Tensor) -> Exhibit:
    """Snippets from all over the held-out part: green where the sign is right."""
    pieces: list[tuple[str, str]] = []
    for number in spread(part, SHOWN):
        p, rating = positive[number].item(), part.ratings[number].item()
        pieces.append((f"{p:4.0%} ", "good" if (p > 0.5) == (rating > 0) else "bad"))
        pieces += [(" ".join(part.words[number]), ""), (f"  people: {rating:+.1f}\n", "soft")]
    return Exhibit(
        "Held-out snippets", "P(praise), green if right, and the mean of twenty people from -4 to 4", text=pieces
    )


def by_strength(part: snippets.Part, positive: Tensor) -> Exhibit:
    """Accuracy against how strongly people felt."""
    bins = list(itertools.pairwise([0.5, 1.0, 1.5, 2.0, 2.5, 4.1]))
    strength, right = part.ratings.abs(), (positive > 0.5) == (part.ratings > 0)
    chosen = [(strength >= low) & (strength < high) for low, high in bins]
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    names = [f"{low:g} to {high:g}" for low, high in bins[:-1]] + ["over 2.5"]
    bars = axes.bar(names, [percent(right[c]) for c in chosen], color=plots.SEQKERN)
    axes.bar_label(bars, [f"{percent(right[c]):.0f}" for c in chosen], color="#000000")
    axes.axhline(50, color=plots.GREY, linestyle="--")
    axes.set_ylim(40, 105)
    axes.set_xlabel("strength of people's rating (0 to 4)")
    axes.set_ylabel("right, % of held-out snippets")
    return Exhibit("The clearer the opinion, the surer the model", "Dashed: a coin", figure=figure)


def evidence(model: Any, part: snippets.Part, strongest: int = 5) -> Exhibit:
    """Held-out snippets with the windows of the filters that move the decision most."""
    weight = model.head.linear.weight[1] - model.head.linear.weight[0]
    pieces: list[tuple[str, str]] = []
    for number in spread(part, SHOWN // 2):
        tokens = part.tokens[number, : part.lengths[number]]
        values, starts, widths = winners(model, tokens)
        moved, votes = values * weight, torch.zeros(len(tokens))
        for filter in moved.abs().topk(strongest).indices.tolist():
            votes[starts[filter] : starts[filter] + widths[filter]] += moved[filter]
        for word, vote in zip(part.words[number], votes.tolist(), strict=True):
            pieces += [(word, "good" if vote > 0 else "bad" if vote < 0 else ""), (" ", "")]
        pieces.append(("\n", ""))
    note = f"Words in the windows of the {strongest} filters that move a snippet most: for praise green, against it red"
    return Exhibit("What convinced the filters", note, text=pieces)


def filters(model: Any, part: snippets.Part, count: int = 4) -> Exhibit:
    """The filters that vote most, for and against, and the windows of held-out text that they like best."""
    weight = model.head.linear.weight[1] - model.head.linear.weight[0]
    every = [winners(model, part.tokens[row, : part.lengths[row]]) for row in range(len(part))]
    values = torch.stack([found[0] for found in every])
    moved = values.amax(0) * weight
    table = [["vote", "windows that a filter answers to most"]]
    for order in (moved.argsort(descending=True), moved.argsort()):
        for filter in order[:count].tolist():
            liked: Counter[str] = Counter()
            for row in values[:, filter].argsort(descending=True)[:20].tolist():
                _, starts, widths = every[row]
                start = int(starts[filter])
                liked[" ".join(part.words[row][start : start + int(widths[filter])])] += 1
            table.append([f"{moved[filter]:+.1f}", ", ".join(list(liked)[:5])])
    return Exhibit("Filters", "The largest vote of a filter: what it adds to log P(praise) / P(blame)", table=table)


class System(runner.System):
    name = "classifier"
    title = "Sentiment"
    about = (
        "Classifiers of sentences: convolutions over windows of words with the maximum over time (Kim 2014), "
        "bidirectional LSTMs whose states are pooled three ways, and a Transformer's encoder with their mean (Jurafsky "
        "and Martin, section 9.4 and equation 9.14). Nine thousand sentences are few for networks that know no word "
        "before: naive Bayes, of words and pairs of words, is as good as they are or better."
    )
    data = (
        "10070 snippets of film reviews that people rated, of vaderSentiment 3.3.2's source distribution (MIT; the "
        "texts are their authors'; Hutto and Gilbert 2014, Pang and Lee 2005); a tenth, by hash, is held out"
    )
    metric, higher_is_better = "accuracy, %", True
    loss, tokens = "nats", "words"
    against, margin, target, tolerance = "majority", 20.0, 76.0, 2.0
    recipes: ClassVar = {
        name: Recipe(steps=800, learning_rate=4e-3 if name == "cnn" else 2e-3, weight_decay=0.1) for name in VARIANTS
    }

    def model(self, variant: str) -> nn.Module:
        kind, options = VARIANTS[variant]
        return getattr(seqkern.models, kind)(len(data().vocabulary), 2, **options)

    def twin(self, variant: str) -> nn.Module:
        kind, options = VARIANTS[variant]
        return getattr(twins.classifier, kind)(len(data().vocabulary), 2, **options)

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(seed)
        for rows in shuffled(data().train.lengths, ROWS, seed):
            tokens, labels, lengths = data().train[rows]
            dropped = (torch.rand(tokens.shape, generator=generator) < WORD_DROPOUT) & (tokens != snippets.PAD)
            yield tokens.masked_fill(dropped, snippets.UNKNOWN), labels, lengths

    def size(self, batch: tuple[Any, ...]) -> int:
        return int(batch[2].sum())

    def evaluate(self, variant: str, model: nn.Module) -> float:
        part = data().held_out
        return percent((predictions(model, part) > 0.5) == part.labels.bool())

    def baselines(self) -> dict[str, float]:
        train, held_out = data().train, data().held_out
        found = {"majority": percent(held_out.labels == train.labels.mode().values)}
        for name, pairs in (("naive Bayes", False), (PAIRS, True)):
            guess = naive_bayes(train.tokens, train.labels, len(data().vocabulary), pairs)
            found[name] = percent(guess(held_out.tokens).argmax(1) == held_out.labels)
        return found

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        part = data().held_out
        positive = predictions(model, part)
        shown = [judged(part, positive), by_strength(part, positive)]
        return shown + ([evidence(model, part), filters(model, part)] if variant == "cnn" else [])


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
