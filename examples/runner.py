"""Trains a system of the textbooks on seqkern's ops, and if wanted its plain-torch twin beside it.

Both start from the same parameters and see the same batches and the same random draws; they take turns of a few steps,
so that a slow stretch of the machine hits both. AdamW, linear warm-up, cosine decay, clipped gradients. The number of
steps is fixed: the result does not depend on the speed of the machine.

An example is a `System` and calls `main`:

    python -m examples.gpt                 seqkern's model alone
    python -m examples.gpt --twin          and its plain-torch twin, in turns
    python -m examples.gpt --seeds 3       three trainings, of each
"""

from __future__ import annotations

import abc
import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import nn

from examples import console
from examples.memory import Task, peaks_in_fresh_processes
from examples.timing import DISTURBED

LIBRARIES = ("torch", "seqkern")
# Two versions add the same numbers in another order. Training amplifies rounding, so early losses tell whether they
# compute the same; the end is compared with the noise of seeds.
EARLY_STEPS, EARLY_LIMIT = 20, 1e-4
# A step after one of the other version is slower by up to a quarter, torch's more than seqkern's: other caches, other
# free memory. Who trains one model does not see that, so versions change after so many steps.
TURN = 25
NOISE = 3.0  # standard deviations of a seed's metric that the means of two versions may be apart


@dataclass(frozen=True)
class Recipe:
    steps: int
    learning_rate: float
    warmup: int = 50
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    evaluations: int = 4

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


@dataclass(frozen=True)
class Exhibit:
    """Something of a trained model to look at: a figure, a table or marked text."""

    title: str
    note: str = ""
    figure: Figure | None = None
    table: Sequence[Sequence[str]] | None = None  # the first row is the head
    text: Sequence[tuple[str, str]] | None = None  # pieces and their style: "", "soft", "good" or "bad"


class System(abc.ABC):
    """What an example says of itself. A variant is another model of the same task; the first one is the main one."""

    name: str  # of the example's module
    title: str
    about: str  # what it is and where it comes from, two or three sentences
    data: str  # what it learns from, its source and licence
    metric: str  # with its unit
    higher_is_better: bool
    loss: str  # the unit of the losses, of which one is `nats` nats
    nats: float = 1.0
    tokens: str  # what speed is counted in
    against: str  # the baseline that the metric must beat
    margin: float  # by so much
    target: float  # that the main variant's metric must reach
    tolerance: float  # of the metrics of two versions of the same seed
    recipes: ClassVar[dict[str, Recipe]]
    show_all: bool = False  # whether the gallery shows exhibits of every variant, not only of the main one

    @abc.abstractmethod
    def model(self, variant: str) -> nn.Module:
        """The model of seqkern.models, with a method loss(*batch); made after torch.manual_seed."""

    @abc.abstractmethod
    def twin(self, variant: str) -> nn.Module:
        """Its twin in plain torch, with the same names of parameters: it loads the model's state_dict."""

    @abc.abstractmethod
    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        """Training batches without end, the same for the same seed."""

    @abc.abstractmethod
    def size(self, batch: tuple[Any, ...]) -> int:
        """How many tokens, or what `tokens` says, a batch has."""

    @abc.abstractmethod
    def evaluate(self, variant: str, model: nn.Module) -> float:
        """The metric on held-out data, of a model in evaluation mode, without gradients."""

    @abc.abstractmethod
    def baselines(self) -> dict[str, float]:
        """The metric of means that need no network, by name."""

    @abc.abstractmethod
    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        """What there is to look at, of a trained model in evaluation mode, without gradients."""


@dataclass
class Run:
    """One version of a model in training."""

    model: nn.Module
    recipe: Recipe
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (steps done, metric)

    @classmethod
    def start(cls, model: nn.Module, recipe: Recipe) -> Run:
        made = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
        )
        return cls(model.train(), recipe, made)

    def step(self, batch: tuple[Any, ...], draws: int) -> None:
        """draws: the seed of what the step draws, dropout for one."""
        torch.manual_seed(draws)
        loss_of: Any = self.model.loss
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(len(self.losses))
        loss = loss_of(*batch)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begin)

    @torch.no_grad()
    def evaluate(self, system: System, variant: str) -> None:
        self.model.eval()
        self.evaluations.append((len(self.losses), system.evaluate(variant, self.model)))
        self.model.train()


def versions(system: System, variant: str, seed: int, twin: bool) -> dict[str, nn.Module]:
    """The model, and its twin with the same parameters, by library."""
    torch.manual_seed(seed)
    model = system.model(variant)
    if not twin:
        return {"seqkern": model}
    other = system.twin(variant)
    other.load_state_dict(model.state_dict())
    return {"torch": other, "seqkern": model}


def turns(recipe: Recipe, twin_steps: int) -> Iterator[range]:
    """The steps of each turn: TURN of them, fewer before an evaluation and before the twin's end."""
    begin = 0
    for step in range(recipe.steps):
        if step + 1 - begin == TURN or recipe.evaluates_after(step) or step + 1 == twin_steps:
            yield range(begin, step + 1)
            begin = step + 1


def train(
    system: System, variant: str, recipe: Recipe, seed: int, twin_steps: int, advance: console.Advance
) -> tuple[dict[str, Any], nn.Module]:
    """Trains every version in turns: what happened, ready for JSON, and seqkern's trained model."""
    made = versions(system, variant, seed, twin_steps > 0)
    runs = {name: Run.start(model, recipe) for name, model in made.items()}
    batches, tokens, done = system.batches(variant, seed), 0, runs["seqkern"]
    for number, turn in enumerate(turns(recipe, twin_steps)):
        drawn = [next(batches) for _ in turn]
        tokens += sum(map(system.size, drawn))
        training = [run for run in runs.values() if run is done or turn[0] < twin_steps]
        for run in training[:: 1 if number % 2 else -1]:  # each is the first after the other work in turn
            for step, batch in zip(turn, drawn, strict=True):
                run.step(batch, draws=1_000_003 * (seed + 1) + step)
                if run is done:
                    advance(f"{statistics.fmean(done.losses[-20:]) / system.nats:.3f} {system.loss}")
        if recipe.evaluates_after(turn[-1]):
            for run in training:
                run.evaluate(system, variant)
    found: dict[str, Any] = {"seed": seed, "tokens": tokens, "runs": {}}
    for name, run in runs.items():
        steps, median = len(run.losses), statistics.median(run.seconds)
        found["runs"][name] = {
            "steps": steps,
            "losses": [loss / system.nats for loss in run.losses],
            "evaluations": run.evaluations,
            "metric": run.evaluations[-1][1] if steps == recipe.steps else None,  # of a whole training
            "seconds": sum(run.seconds),
            "step_seconds": median,
            # The sum is what a training takes; were no step slower than the median one, it would be far less.
            "disturbed": sum(run.seconds) > DISTURBED * median * steps,
        }
    if twin_steps:
        pairs = list(zip(runs["torch"].seconds, runs["seqkern"].seconds, strict=False))
        ratios = sorted(a / b for a, b in pairs)
        quarter = len(ratios) // 4
        found["speed_ratio"] = statistics.median(ratios)
        found["speed_quartiles"] = (ratios[quarter], ratios[-1 - quarter])
        both = list(zip(runs["torch"].losses, runs["seqkern"].losses, strict=False))
        found["early"] = largest([abs(a - b) / abs(a) for a, b in both[:EARLY_STEPS]])
    return found, runs["seqkern"].model.eval()


def largest(values: Sequence[float]) -> float:
    """As max, but a NaN anywhere is the result: it must not pass for agreement."""
    return torch.tensor(values, dtype=torch.float64).max().item()


def read_data(system: str, variant: str, library: str) -> None:
    """What the memory tasks of a system have in common: the data, which it keeps."""
    next(load(system).batches(variant, 0))


def prepare_step(system: str, variant: str, library: str) -> Callable[[], object]:
    """The memory task: a training step, after one that made the optimiser's state."""
    made = load(system)
    run = Run.start(versions(made, variant, 0, library == "torch")[library], made.recipes[variant])
    batch = next(made.batches(variant, 0))
    run.step(batch, draws=0)
    run.optimizer.zero_grad()
    return lambda: run.step(batch, draws=1)


def load(name: str) -> System:
    """The system of examples/<name>.py."""
    import importlib

    found: System = importlib.import_module(f"examples.{name}").SYSTEM
    return found


def run(
    system: System, variant: str, seeds: Sequence[int] = (0,), twin: bool = True, steps: int | None = None,
    memory: bool = True, twin_steps: int | None = None,
) -> tuple[dict[str, Any], list[Exhibit]]:  # fmt: skip
    """Trains a variant for every seed: the record, ready for JSON, and what the last training has to show.

    twin_steps: the steps that its twin takes, all by default; after fewer it has no metric.
    """
    recipe = system.recipes[variant] if steps is None else system.recipes[variant].shortened(steps)
    twin_steps = 0 if not twin else recipe.steps if twin_steps is None else min(twin_steps, recipe.steps)
    trained, model = [], None
    for seed in seeds:
        title = f"{system.title}, {variant}, seed {seed}" + (", twins in turns" if twin else "")
        with console.progress(title, recipe.steps) as advance:
            found, model = train(system, variant, recipe, seed, twin_steps, advance)
        trained.append(found)
    assert model is not None
    names = list(trained[0]["runs"])
    tasks = [
        Task(
            "examples.runner:prepare_step",
            {"system": system.name, "variant": variant, "library": name},
            read="examples.runner:read_data",
        )
        for name in names
    ]
    with ThreadPoolExecutor(1) as other:  # in processes of their own, beside what follows
        peaks = other.submit(lambda: list(peaks_in_fresh_processes(tasks)) if memory else [])
        baselines = system.baselines()
        with torch.no_grad():
            exhibits = system.show(variant, model)
    record: dict[str, Any] = {
        "system": system.name,
        "variant": variant,
        "title": system.title,
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": vars(recipe),
        "shortened": steps is not None,
        "metric": system.metric,
        "higher_is_better": system.higher_is_better,
        "against": system.against,
        "margin": system.margin,
        "target": system.target,
        "tolerance": system.tolerance,
        "loss": system.loss,
        "baselines": baselines,
        "seeds": trained,
        "peak_bytes": dict(zip(names, peaks.result(), strict=True)) if memory else {},
    }
    record["checks"] = checks(system, record)
    return record, exhibits


def metrics(record: dict[str, Any], library: str) -> list[float]:
    """The final metric of every seed, of those that were trained to the end."""
    found = [seed["runs"][library]["metric"] for seed in record["seeds"]]
    return [metric for metric in found if metric is not None]


def checks(system: System, record: dict[str, Any]) -> list[dict[str, Any]]:
    """What has to hold. Of a shortened training only that the versions compute the same."""
    name, found = f"{record['title']}, {record['variant']}", []

    def check(text: str, value: str, passed: bool) -> None:
        found.append({"name": f"{name}: {text}", "found": value, "passed": bool(passed)})

    ours = metrics(record, "seqkern")
    twin = "torch" in record["seeds"][0]["runs"]
    if twin:
        early = largest([seed["early"] for seed in record["seeds"]])
        steps = min(EARLY_STEPS, *(seed["runs"]["torch"]["steps"] for seed in record["seeds"]))
        text = f"losses of the first {steps} steps agree with the twin's within {EARLY_LIMIT:g} of them"
        check(text, f"{early:.1e}", early <= EARLY_LIMIT)
    if record["shortened"]:
        return found
    if twin and (theirs := metrics(record, "torch")):
        apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
        if len(ours) > 2:
            spread = math.sqrt((statistics.variance(ours) + statistics.variance(theirs)) / 2)
            limit = max(NOISE * spread, system.tolerance / 10)
            text = f"mean {system.metric} of {len(ours)} seeds within {limit:.3g} of the twin's, the noise of seeds"
        else:
            limit, text = system.tolerance, f"{system.metric} within {system.tolerance:g} of the twin's"
        check(text, f"{apart:.2g}", apart <= limit)
    if record["variant"] == next(iter(system.recipes)):  # the others are there to compare
        sign, mean = 1 if system.higher_is_better else -1, statistics.fmean(ours)
        over = sign * (mean - record["baselines"][system.against])
        text = f"{system.metric} better than that of {system.against} by {system.margin:g}"
        check(text, f"{over:.3g}", over >= system.margin)
        word = "at least" if system.higher_is_better else "at most"
        check(f"{system.metric} {word} {system.target:g}", f"{mean:.3f}", sign * (mean - system.target) >= 0)
    return found


def main(system: System, arguments: Sequence[str] | None = None) -> int:
    """The command of an example."""
    first = next(iter(system.recipes))
    parser = argparse.ArgumentParser(description=f"{system.title}. {system.about}")
    parser.add_argument(
        "--variant", choices=list(system.recipes), action="append", help=f"default: {first}; may be given several times"
    )
    parser.add_argument("--all", action="store_true", help="every variant")
    parser.add_argument("--twin", action="store_true", help="train the plain-torch twin too, in turns")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="trainings of each (default: 1)")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--threads", type=int, help="default: torch's choice")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the records there, as JSON")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if options.threads:
        torch.set_num_threads(options.threads)
    console.console.print(f"[bold]{system.title}[/]. {system.about}\nData: {system.data}", highlight=False)
    records = []
    for variant in list(system.recipes) if options.all else options.variant or [first]:
        record, exhibits = run(system, variant, range(options.seeds), options.twin, options.steps, options.twin)
        records.append(record)
        console.console.print(*(console.exhibit(e) for e in exhibits))
    console.console.print(console.systems_table(records))
    found = [check for record in records for check in record["checks"]]
    if found:
        console.console.print(console.checks_table(found))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(records, indent=1))
    return 0 if all(check["passed"] for check in found) else 1


cached = functools.lru_cache(maxsize=None)  # of what an example loads
