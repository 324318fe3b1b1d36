"""The Vision Transformer reads handwritten digits: 16 patches of 2 x 2 pixels.

python -m examples.vit --twin                the class from the state of a class token
python -m examples.vit --variant mean        from the mean of the patches' states
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import seqkern
from examples import plots, runner, twins
from examples.data import digits
from examples.data.digits import CLASSES, SIDE
from examples.runner import Exhibit, Recipe

ROWS, PATCH = 64, 2
SIZES: dict[str, Any] = {"d_model": 64, "nhead": 4, "num_layers": 3, "dim_feedforward": 128}
VARIANTS: dict[str, dict[str, Any]] = {"class token": {"pool": "cls"}, "mean": {"pool": "mean"}}
REGRESSION, NEAREST = "softmax regression on the pixels", "nearest neighbour"

data = runner.cached(digits.load)


def percent(guessed: Tensor, labels: Tensor) -> float:
    return 100 * (guessed == labels).double().mean().item()


def softmax_regression(inputs: Tensor, labels: Tensor, decay: float) -> nn.Linear:
    """Fitted until it converges, by L-BFGS: the mean of -log P(label) + decay * the squares of the weights' sum."""
    model = nn.Linear(inputs.shape[1], CLASSES, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels) + decay * model.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def read_digits(part: digits.Part, guessed: Tensor, sure: Tensor, count: int = 24) -> Exhibit:
    """The mistakes, and then the images that it is least sure of."""
    wrong = guessed != part.labels
    order = (sure + (~wrong).double()).argsort(stable=True)[:count].tolist()
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    for place, row in enumerate(order, 1):
        ax = figure.add_subplot(4, -(-count // 4), place)
        ax.imshow(part.images[row, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[])
        missed = bool(wrong[row])
        said = f"{int(guessed[row])}, not {int(part.labels[row])}" if missed else str(int(guessed[row]))
        ax.set_xlabel(said, fontsize=11, color=plots.TORCH if missed else "#000000")
        for spine in ax.spines.values():
            spine.set(color=plots.TORCH if missed else plots.GREY, linewidth=2.5 if missed else 0.8)
    note = (
        f"{int(wrong.sum())} of {len(part)} held-out digits are mistaken. Framed: mistakes, and what was meant; then "
        "those that the model is least sure of"
    )
    return Exhibit("Hard digits", note, figure=figure)


def looked_at(model: Any, part: digits.Part) -> Exhibit:
    """One image of each of five digits, and below it what the class token sees in the last block."""
    rows = [int((part.labels == label).nonzero()[0, 0]) for label in (0, 3, 4, 7, 8)]
    maps = model.attention_maps(part.images[rows]).mean(1)  # of the heads
    figure = Figure(figsize=(5.2, 2.5), layout="constrained")
    brightest = float(maps.max())
    for column, row in enumerate(rows):
        above, below = (figure.add_subplot(2, len(rows), line * len(rows) + column + 1) for line in (0, 1))
        above.imshow(part.images[row, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
        shown = below.imshow(maps[column].numpy(), cmap="viridis", vmin=0, vmax=brightest, extent=(0, SIDE, SIDE, 0))
        for ax in (above, below):
            ax.set(xticks=[], yticks=[])
        if column == 0:
            above.set_ylabel("image", fontsize=11)
            below.set_ylabel("weight", fontsize=11)
    bar = figure.colorbar(shown, ax=figure.axes, shrink=0.8)
    bar.ax.tick_params(labelsize=10)
    note = "Held-out digits, and the class token's attention weights for each patch, last block, mean of its heads"
    return Exhibit("What the class token looks at", note, figure=figure)


class System(runner.System):
    name = "vit"
    title = "Vision Transformer"
    about = (
        "An encoder of self-attention over the patches of an image (Dosovitskiy et al. 2021): here 16 patches of 2 x 2 "
        "pixels of a digit. The Transformer has to find out for itself which patches are neighbours. Of the same 1339 "
        "images, the nearest one says what 98.0% of the held-out digits are; softmax regression is right for 96.9%."
    )
    data = (
        "1797 handwritten digits of 8 x 8 pixels, sklearn.datasets.load_digits (Alpaydin and Kaynak 1998); "
        "BSD and CC BY 4.0; "
        "a quarter is held out, by a hash of the pixels"
    )
    metric, higher_is_better = "accuracy, %", True
    loss, tokens = "nats", "images"
    against, margin, target, tolerance = REGRESSION, 0.5, 97.0, 1.5
    recipes: ClassVar = {name: Recipe(steps=1100, learning_rate=5e-3, weight_decay=0.05) for name in VARIANTS}

    def model(self, variant: str) -> nn.Module:
        return seqkern.models.ViT(SIDE, PATCH, CLASSES, **SIZES, **VARIANTS[variant])

    def twin(self, variant: str) -> nn.Module:
        return twins.vit.ViT(SIDE, PATCH, CLASSES, **SIZES, **VARIANTS[variant])

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        """Images of the training part and of that to tune on, each shifted by a pixel at most."""
        generator = torch.Generator().manual_seed(seed)
        parts = data().train, data().tuning
        images, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("images", "labels"))
        while True:
            for rows in torch.randperm(len(labels), generator=generator).split(ROWS):
                if len(rows) == ROWS:
                    yield digits.shifted(images[rows], generator), labels[rows]

    def size(self, batch: tuple[Any, ...]) -> int:
        return len(batch[1])

    def evaluate(self, variant: str, model: nn.Module) -> float:
        part = data().held_out
        return percent(model(part.images).argmax(1), part.labels)

    def baselines(self) -> dict[str, float]:
        parts = data().train, data().tuning, data().held_out
        images = [part.images.flatten(1).double() for part in parts]
        labels = [part.labels for part in parts]
        fits = {decay: softmax_regression(images[0], labels[0], decay) for decay in (1e-4, 3e-4, 1e-3, 3e-3)}
        with torch.no_grad():
            right = {decay: percent(fit(images[1]).argmax(1), labels[1]) for decay, fit in fits.items()}
        seen, known = torch.cat(images[:2]), torch.cat(labels[:2])
        best = softmax_regression(seen, known, max(right, key=lambda decay: right[decay]))
        majority = torch.full_like(labels[2], int(known.mode().values))
        with torch.no_grad():
            regression = best(images[2]).argmax(1)
        nearest = known[torch.cdist(images[2], seen).argmin(1)]
        guesses = {"majority": majority, REGRESSION: regression, NEAREST: nearest}
        return {name: percent(guessed, labels[2]) for name, guessed in guesses.items()}

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        part = data().held_out
        sure, guessed = model(part.images).softmax(1).max(1)
        found = [read_digits(part, guessed, sure)]
        return [*found, looked_at(model, part)] if variant == "class token" else found


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
