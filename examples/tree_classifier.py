"""Tree-LSTM: what a function is called, from its syntax tree.

python -m examples.tree_classifier --twin             child-sum: a node adds up its children's states
python -m examples.tree_classifier --variant nary     binary trees, left child and right sibling: their order counts
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import seqkern
from examples import plots, runner, twins
from examples.data import functions
from examples.data.functions import CLASSES, Function
from examples.runner import Exhibit, Recipe

ROWS = 96
LEFT_OUT = 0.05  # of subtrees, in training, drawn anew each time
SIZES: dict[str, Any] = {"embedding_dim": 64, "hidden_size": 64, "pool": "max", "dropout": 0.5}
VARIANTS: dict[str, dict[str, Any]] = {"child-sum": {}, "nary": {"kind": "nary", "slots": 2}}
BAG, BAG_MLP = "softmax regression on the bag of nodes", "a network of 256 units on the bag of nodes"

data = runner.cached(functions.load)


@runner.cached
def held_out(variant: str) -> list[tuple[Any, ...]]:
    """The held-out functions in batches of their order."""
    part, binary = data().held_out, variant == "nary"
    return [functions.batch(part[row : row + 128], binary) for row in range(0, len(part), 128)]


def probabilities(variant: str, model: nn.Module) -> Tensor:
    """(N, words) of the held-out functions."""
    found = [model(tokens, schedule, lengths) for tokens, schedule, _, lengths in held_out(variant)]
    return torch.cat(found).softmax(1)


def percent(guessed: Tensor, part: list[Function]) -> float:
    labels = torch.tensor([function.label for function in part])
    return 100 * (guessed == labels).double().mean().item()


def fitted(bags: Tensor, labels: Tensor, hidden: int, decay: float, epochs: int, seed: int = 0) -> nn.Module:
    """A classifier of bags: softmax regression, or with a layer of `hidden` units between, half of them dropped."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(bags.shape[1], hidden or CLASSES)]
        if hidden:
            layers += [nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, CLASSES)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=decay, fused=True)
        for _ in range(epochs):
            for rows in torch.randperm(len(bags)).split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(bags[rows]), labels[rows]).backward()
                optimizer.step()
    return model.eval()


def drawn(function: Function, said: list[tuple[str, float]]) -> Exhibit:
    """The tree from its root on the left to its leaves; a row for each leaf, so that every token can be read."""
    vocabulary, words = data().vocabulary, data().words
    depths, rows = [0] * len(function), [0.0] * len(function)
    children: list[list[int]] = [[] for _ in range(len(function))]
    for node, parent in enumerate(function.parents):
        if parent >= 0:
            depths[node] = depths[parent] + 1
            children[parent].append(node)
    leaves = [node for node in range(len(function)) if not children[node]]
    for line, node in enumerate(leaves):
        rows[node] = float(line)
    for node in reversed(range(len(function))):  # children come after their parent
        if children[node]:
            rows[node] = sum(rows[child] for child in children[node]) / len(children[node])
    figure = Figure(figsize=(5.2, 0.34 * len(leaves) + 0.6), layout="constrained")
    ax = figure.add_subplot()
    for node, parent in enumerate(function.parents):
        if parent >= 0:
            ax.plot([depths[parent], depths[node]], [rows[parent], rows[node]], color=plots.GREY, linewidth=1, zorder=1)
    ax.scatter(depths, rows, s=22, color=plots.SEQKERN, zorder=2)
    for node, (depth, row) in enumerate(zip(depths, rows, strict=True)):
        token = vocabulary[function.tokens[node]]
        if children[node]:
            above = depth % 2 == 0  # neighbours' tokens do not meet
            place: Any = {"y": row - 0.14, "va": "bottom"} if above else {"y": row + 0.14, "va": "top"}
            ax.text(depth, s=token, fontsize=9, color="#000000", ha="center", **place)
        else:
            ax.text(depth + 0.12, row, token, fontsize=10, color="#000000", va="center")
    ax.set(xlim=(-0.5, max(depths) + 2.2), ylim=(len(leaves) - 0.5, -0.9))
    ax.axis("off")
    guesses = ", ".join(f"{word} {100 * probability:.0f}%" for word, probability in said)
    note = (
        f"The syntax tree of {function.name} in {function.file}, a held-out function; the name is not in it. Its first "
        f"word is {words[function.label]}; the model says {guesses}"
    )
    return Exhibit("A function as the model sees it", note, figure=figure)


class System(runner.System):
    name = "tree_classifier"
    title = "Tree-LSTM"
    about = (
        "States that are computed from the leaves of a tree up to its root (Tai, Socher and Manning 2015): child-sum, "
        "of any number of children, or N-ary, with weights for each child. It guesses how a function's name begins."
    )
    data = (
        "syntax trees of the functions of this Python's standard library, the 24 most frequent first words; PSF "
        "licence; a fifth of the files is held out, without the trees that the other files have too"
    )
    metric, higher_is_better = "accuracy, %", True
    loss, tokens = "nats", "nodes"
    against, margin, target, tolerance = BAG, 3.0, 50.0, 2.5
    recipes: ClassVar = {
        "child-sum": Recipe(steps=600, learning_rate=1.2e-2, weight_decay=0.05),
        "nary": Recipe(steps=550, learning_rate=1.2e-2, weight_decay=0.05),
    }

    def model(self, variant: str) -> nn.Module:
        return seqkern.models.TreeClassifier(len(data().vocabulary), CLASSES, **SIZES, **VARIANTS[variant])

    def twin(self, variant: str) -> nn.Module:
        return twins.tree_classifier.TreeClassifier(len(data().vocabulary), CLASSES, **SIZES, **VARIANTS[variant])

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        """Functions of the training part and of that to tune on, without some subtrees.

        The order in which a batch's nodes are computed is made here, once for both versions: seqkern's schedule, and
        from it the twin's levels. It is not part of a step's time.
        """
        generator = torch.Generator().manual_seed(seed)
        part, binary = data().train + data().tuning, variant == "nary"
        while True:
            for rows in torch.randperm(len(part), generator=generator).split(ROWS):
                if len(rows) == ROWS:
                    made = functions.batch([part[row] for row in rows.tolist()], binary, LEFT_OUT, generator)
                    twins.tree_classifier.levels(made[1])
                    yield made

    def size(self, batch: tuple[Any, ...]) -> int:
        return len(batch[0])

    def evaluate(self, variant: str, model: nn.Module) -> float:
        return percent(probabilities(variant, model).argmax(1), data().held_out)

    def baselines(self) -> dict[str, float]:
        """Of the bags: the better of two regularisations on the tuning part, fitted again on both parts."""
        parts, size = (data().train, data().tuning, data().held_out), len(data().vocabulary)
        bags = [functions.bags(part, size).float() for part in parts]
        labels = [torch.tensor([function.label for function in part]) for part in parts]
        seen, known = torch.cat(bags[:2]), torch.cat(labels[:2])
        found = {"majority": percent(torch.full_like(labels[2], int(known.mode().values)), parts[2])}
        for name, hidden in ((BAG, 0), (BAG_MLP, 256)):
            right = {}
            for decay in (0.01, 0.3):
                with torch.enable_grad():
                    fit = fitted(bags[0], labels[0], hidden, decay, 20)
                right[decay] = percent(fit(bags[1]).argmax(1), parts[1])
            with torch.enable_grad():
                fit = fitted(seen, known, hidden, max(right, key=lambda decay: right[decay]), 20)
            found[name] = percent(fit(bags[2]).argmax(1), parts[2])
        return found

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        part, words = data().held_out, data().words
        found = probabilities(variant, model)
        sure, guessed = found.max(1)
        # A tree to draw: small, not trivial, guessed with confidence.
        fits = torch.tensor([18 <= len(f) <= 30 and max_depth(f) <= 6 and f.label != 0 for f in part])
        right = guessed == torch.tensor([function.label for function in part])
        row = int((sure * (fits & right) + 1e-3 * fits).argmax())
        said = [(words[int(n)], float(p)) for p, n in zip(*found[row].topk(3), strict=True)]
        shown = [drawn(part[row], said)]
        head = ["function", "file", "first word", "guess", "probability"]
        table = [
            [part[n].name, part[n].file, words[part[n].label], words[int(guessed[n])], f"{100 * float(sure[n]):.0f}%"]
            for n in range(0, len(part), max(1, len(part) // 24))
        ]
        shown.append(Exhibit("Guesses", "Held-out functions, one of every so many", table=[head, *table]))
        rows = []
        for label, word in enumerate(words):
            own = torch.tensor([function.label == label for function in part])
            if own.any():
                mistaken = torch.bincount(guessed[own & ~right], minlength=CLASSES)
                other = words[int(mistaken.argmax())] if mistaken.any() else ""
                rows.append([word, str(int(own.sum())), f"{100 * right[own].double().mean():.0f}%", other])
        head = ["first word", "held-out functions", "right", "most often mistaken for"]
        return [*shown, Exhibit("By word", table=[head, *rows])]


def max_depth(function: Function) -> int:
    depths = [0]
    for parent in function.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
