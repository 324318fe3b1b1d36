"""Trains each language model twice, with torch's ops and with seqkern's, and compares them step by step.

Both versions start from the same seed and see the same batches; they take turns, a step of the one and then a step of
the other, so that a slow moment of the machine hits both. AdamW, linear warm-up, cosine decay, clipped gradients. The
number of steps is fixed: the result does not depend on the speed of the machine.

    python -m examples.training --model transformer
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples import language_model, text
from examples.console import Advance, checks_table, console, progress, sample_panel, training_table
from examples.memory import Task, peaks_in_fresh_processes
from examples.timing import DISTURBED

# The two versions compute the same in another order of summation. Rounding grows as training goes on.
EARLY_STEPS, EARLY_LIMIT, FINAL_LIMIT = 100, 1e-3, 0.02
FINAL_STEPS = 50
HELD_OUT_BYTES = 40_000  # of the held-out text, evaluated


@dataclass(frozen=True)
class Recipe:
    steps: int
    learning_rate: float
    rows: int = 8
    context: int = 128
    warmup: int = 50
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    seed: int = 0
    evaluations: int = 6

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to zero."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (1 + math.cos(math.pi * done)) / 2

    def evaluates_after(self, step: int) -> bool:
        """After equal shares of the steps, the last included."""
        return (step + 1) * self.evaluations // self.steps != step * self.evaluations // self.steps

    def shortened(self, steps: int) -> Recipe:
        evaluations = min(self.evaluations, 1 + steps // 100)
        return replace(self, steps=steps, warmup=min(self.warmup, max(1, steps // 3)), evaluations=evaluations)


RECIPES = {
    "transformer": Recipe(steps=600, learning_rate=4e-3),
    "LSTM": Recipe(steps=600, learning_rate=8e-3),
}


@dataclass
class Run:
    """One version of a model in training."""

    model: language_model.LanguageModel
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)  # bits per byte of each step's batch
    seconds: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (steps done, bits per byte)

    @classmethod
    def start(cls, model: str, library: str, recipe: Recipe) -> Run:
        network = language_model.build(model, library, recipe.seed)
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=0.0, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
        )
        return cls(network, optimizer)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float, clip: float) -> None:
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.model.bits_per_byte(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begin)

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        chunks = zip(inputs.split(32), targets.split(32), strict=True)
        total = sum(self.model.bits_per_byte(x, y).item() * len(x) for x, y in chunks)
        self.held_out.append((len(self.losses), total / len(inputs)))


def train(
    model: str, corpus: text.Text, recipe: Recipe, advance: Advance
) -> tuple[dict[str, Any], dict[str, language_model.LanguageModel]]:
    """Trains `model` with every library in turns: what happened, ready for JSON, and the trained models."""
    runs = {library: Run.start(model, library, recipe) for library in language_model.LIBRARIES}
    first, *others = (run.model.state_dict() for run in runs.values())
    same_start = all(
        first.keys() == other.keys() and all(torch.equal(first[key], other[key]) for key in first) for other in others
    )
    held_out = corpus.held_out_windows(recipe.context, HELD_OUT_BYTES // recipe.context)
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.steps):
        inputs, targets = corpus.batch(generator, recipe.rows, recipe.context)
        for run in runs.values():
            run.step(inputs, targets, recipe.rate(step), recipe.clip)
        if recipe.evaluates_after(step):
            for run in runs.values():
                run.evaluate(*held_out)
        advance(f"{run.losses[-1]:.3f} bits per byte")
    bytes_a_step = recipe.rows * recipe.context
    result: dict[str, Any] = {
        "model": model,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "recipe": vars(recipe) | {"bytes_a_step": bytes_a_step},
        "same_start": same_start,
        "runs": {
            library: {
                "losses": run.losses,
                "held_out": run.held_out,
                "seconds": sum(run.seconds),
                "bytes_per_second": bytes_a_step * recipe.steps / sum(run.seconds),
                # The sum is what a training takes; were no step slower than the median one, it would be far less.
                "disturbed": sum(run.seconds) > DISTURBED * statistics.median(run.seconds) * recipe.steps,
                "peak_bytes": None,
            }
            for library, run in runs.items()
        },
        "speed_ratio": statistics.median(
            a / b for a, b in zip(runs["torch"].seconds, runs["seqkern"].seconds, strict=True)
        ),
    }
    result["agreement"] = agreement(result["runs"]["torch"], result["runs"]["seqkern"])
    return result, {library: run.model for library, run in runs.items()}


def agreement(torch_run: dict[str, Any], seqkern_run: dict[str, Any]) -> dict[str, float]:
    """Largest differences between two runs, in bits per byte."""
    pairs = list(zip(torch_run["losses"], seqkern_run["losses"], strict=True))
    differences = [abs(a - b) for a, b in pairs]
    return {
        "early": largest(differences[:EARLY_STEPS]),
        "largest": largest(differences),
        "final_training": abs(statistics.fmean(a - b for a, b in pairs[-FINAL_STEPS:])),
        "final_held_out": abs(torch_run["held_out"][-1][1] - seqkern_run["held_out"][-1][1]),
    }


def largest(values: list[float]) -> float:
    """As max, but a NaN anywhere is the result: it must not pass for agreement."""
    return torch.tensor(values, dtype=torch.float64).max().item()


def checks(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What has to hold for the two versions of a model to count as the same model."""
    name, found = result["model"], result["agreement"]
    early = min(EARLY_STEPS, result["recipe"]["steps"])
    final = largest([found["final_training"], found["final_held_out"]])
    return [
        {
            "name": f"{name}: both versions start from the same parameters",
            "found": "equal" if result["same_start"] else "different",
            "passed": result["same_start"],
        },
        {
            "name": f"{name}: losses of the first {early} steps agree within {EARLY_LIMIT} bits per byte",
            "found": f"{found['early']:.1e}",
            "passed": found["early"] <= EARLY_LIMIT,
        },
        {
            "name": f"{name}: final losses, training and held-out, agree within {FINAL_LIMIT} bits per byte",
            "found": f"{final:.1e}",
            "passed": final <= FINAL_LIMIT,
        },
    ]


def prepare_step(model: str, library: str, rows: int, context: int) -> Callable[[], object]:
    """The memory task: one training step, after a tiny one that made the optimiser's state."""
    recipe = RECIPES[model]
    run = Run.start(model, library, recipe)

    def work(rows: int, length: int) -> None:
        tokens = torch.zeros(rows, length + 1, dtype=torch.long)
        run.step(tokens[:, :-1], tokens[:, 1:], recipe.learning_rate, recipe.clip)

    work(1, 8)
    run.optimizer.zero_grad()
    return lambda: work(rows, context)


def measure_memory(result: dict[str, Any]) -> None:
    """Adds the peak extra memory of a training step (activations and gradients) to every run of a result."""
    recipe = result["recipe"]
    arguments = {"model": result["model"], "rows": recipe["rows"], "context": recipe["context"]}
    tasks = [Task("examples.training:prepare_step", arguments | {"library": name}) for name in result["runs"]]
    for run, peak in zip(result["runs"].values(), peaks_in_fresh_processes(tasks), strict=True):
        run["peak_bytes"] = peak


def run_with_progress(model: str, corpus: text.Text, recipe: Recipe, sample_length: int = 400) -> dict[str, Any]:
    """Trains, measures memory, and lets seqkern's version continue the first paragraph of the held-out text."""
    title = f"{model}, {' and '.join(language_model.LIBRARIES)} in turns"
    with progress(title, recipe.steps) as advance:
        result, models = train(model, corpus, recipe, advance)
    measure_memory(result)
    unseen = bytes(corpus.held_out.tolist())
    start = unseen.find(b"\n\n") + 2 if b"\n\n" in unseen[:1000] else 0
    prompt = unseen[start : start + recipe.context // 2]
    drawn = {"temperature": 0.8, "top_k": 20, "seed": recipe.seed}
    written = language_model.continued(models["seqkern"], prompt, sample_length, recipe.context, **drawn)
    result["sample"] = {"prompt": prompt.decode(errors="replace"), "continuation": written}
    result["checks"] = checks(result)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(RECIPES), action="append", help="default: all")
    parser.add_argument("--text", type=Path, help="a file to learn from, instead of Python's documentation")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    options = parser.parse_args()
    corpus = text.load(options.text)
    results = []
    for name in options.model or RECIPES:
        recipe = RECIPES[name] if options.steps is None else RECIPES[name].shortened(options.steps)
        results.append(run_with_progress(name, corpus, recipe))
        console.print(sample_panel(results[-1]))
    console.print(training_table(results))
    found = [check for result in results for check in result["checks"]]
    console.print(checks_table(found))
    raise SystemExit(0 if all(check["passed"] for check in found) else 1)
