"""The runner of the examples: rates, turns, shared draws, what is kept of a training, and its checks."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from benchmarks import systems
from examples import gallery, plots, runner


class Line(nn.Module):
    """A line through points, with dropout, and a summation order of its own."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        self.weight, self.reverse = nn.Parameter(torch.randn(8)), reverse
        self.dropout = nn.Dropout(0.5)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        terms = self.dropout(x) * self.weight
        found = sum(terms.unbind(1)[:: -1 if self.reverse else 1])
        return (found - y).square().mean()


class MadeUp(runner.System):
    name, title, about, data = "made_up", "Made up", "A line.", "drawn"
    metric, higher_is_better, loss, tokens = "error", False, "square", "points"
    against, margin, target, tolerance = "zero", 0.5, 0.5, 0.1
    recipes: ClassVar = {
        "main": runner.Recipe(steps=60, learning_rate=0.1, warmup=5),
        "other": runner.Recipe(60, 0.1, 5),
    }

    def model(self, variant: str) -> nn.Module:
        return Line()

    def twin(self, variant: str) -> nn.Module:
        return Line(reverse=True)

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(16, 8, generator=generator)
            yield x, x.sum(1)

    def size(self, batch: tuple[Any, ...]) -> int:
        return len(batch[0])

    def evaluate(self, variant: str, model: nn.Module) -> float:
        assert not model.training
        assert not torch.is_grad_enabled()
        return (model.weight - 1).abs().mean().item()

    def baselines(self) -> dict[str, float]:
        return {"zero": 1.0, "oracle": 0.0}

    def show(self, variant: str, model: nn.Module) -> list[runner.Exhibit]:
        assert not model.training
        return [runner.Exhibit("Weights", text=[(str(w), "good") for w in model.weight.tolist()])]


def test_learning_rate_warms_up_and_decays() -> None:
    recipe = runner.Recipe(steps=100, learning_rate=1.0, warmup=10, evaluations=4)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert max(rates) == 1.0
    assert rates[-1] < 0.001
    assert [step for step in range(100) if recipe.evaluates_after(step)] == [24, 49, 74, 99]
    short = recipe.shortened(6)
    assert (short.steps, short.warmup, short.evaluations) == (6, 2, 1)


def test_both_versions_have_the_same_start_batches_and_draws() -> None:
    record, _ = runner.run(MadeUp(), "main", seeds=(0, 1), memory=False)
    for seed in record["seeds"]:
        assert seed["tokens"] == 60 * 16
        ours, theirs = (seed["runs"][library] for library in ("seqkern", "torch"))
        assert ours["losses"] == pytest.approx(theirs["losses"])  # with dropout: the masks are the same
        assert ours["losses"][0] != ours["losses"][1]
        assert [step for step, _ in ours["evaluations"]] == [15, 30, 45, 60]
        assert ours["metric"] == ours["evaluations"][-1][1]
        assert seed["early"] <= runner.EARLY_LIMIT
        assert seed["speed_quartiles"][0] <= seed["speed_ratio"] <= seed["speed_quartiles"][1]
    assert record["seeds"][0]["runs"]["torch"]["losses"] != record["seeds"][1]["runs"]["torch"]["losses"]
    again, _ = runner.run(MadeUp(), "main", seeds=(0,), memory=False)
    assert again["seeds"][0]["runs"]["seqkern"]["losses"] == record["seeds"][0]["runs"]["seqkern"]["losses"]
    alone, _ = runner.run(MadeUp(), "main", seeds=(0,), twin=False, memory=False)
    assert list(alone["seeds"][0]["runs"]) == ["seqkern"]
    assert alone["seeds"][0]["runs"]["seqkern"]["losses"] == record["seeds"][0]["runs"]["seqkern"]["losses"]
    json.dumps(record)


class Deaf(Line):
    """Slow by a hundredth of a second, and wrong in its third step alone."""

    calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        time.sleep(0.01)
        self.calls += 1
        return super().loss(x, y) * (1.01 if self.calls == 3 else 1)


class Slow(MadeUp):
    nats = 2.0

    def twin(self, variant: str) -> nn.Module:
        return Deaf()


def test_times_are_of_whole_steps_and_early_losses_of_all_of_them() -> None:
    record, _ = runner.run(Slow(), "main", steps=12, memory=False)
    (seed,) = record["seeds"]
    assert seed["runs"]["torch"]["step_seconds"] > 0.01
    assert seed["speed_ratio"] > 1.5
    assert seed["early"] == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert [check["passed"] for check in record["checks"]] == [False]
    run = runner.Run.start(Line(), runner.Recipe(9, 0.1, weight_decay=0.3, betas=(0.7, 0.8)))
    (group,) = run.optimizer.param_groups
    assert (group["weight_decay"], group["betas"]) == (0.3, (0.7, 0.8))
    same, _ = runner.run(MadeUp(), "main", steps=12, memory=False)
    halves = [loss / 2 for loss in same["seeds"][0]["runs"]["seqkern"]["losses"]]
    assert seed["runs"]["seqkern"]["losses"] == halves


def test_versions_take_turns_in_being_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[bool] = []
    plain = Line.loss

    def noted(self: Line, x: Tensor, y: Tensor) -> Tensor:
        order.append(self.reverse)
        return plain(self, x, y)

    monkeypatch.setattr(Line, "loss", noted)
    monkeypatch.setattr(runner, "TURN", 2)
    runner.run(MadeUp(), "main", steps=5, memory=False)
    assert order == [*[False] * 2, *[True] * 4, *[False] * 3, True]


def test_turns_end_with_evaluations_and_with_the_twin() -> None:
    recipe = runner.Recipe(steps=100, learning_rate=1.0, evaluations=3)
    assert [step for turn in runner.turns(recipe, 60) for step in turn] == list(range(100))
    assert [turn[-1] for turn in runner.turns(recipe, 60)] == [24, 33, 58, 59, 66, 91, 99]


def test_a_twin_may_stop_early() -> None:
    record, _ = runner.run(MadeUp(), "main", memory=False, twin_steps=20)
    whole, _ = runner.run(MadeUp(), "main", memory=False)
    ours, theirs = (record["seeds"][0]["runs"][library] for library in ("seqkern", "torch"))
    assert ours["losses"] == whole["seeds"][0]["runs"]["seqkern"]["losses"]
    assert theirs["losses"] == whole["seeds"][0]["runs"]["torch"]["losses"][:20]
    assert [step for step, _ in theirs["evaluations"]] == [15]
    assert (theirs["steps"], theirs["metric"], ours["steps"]) == (20, None, 60)
    assert ours["metric"] == ours["evaluations"][-1][1]
    assert runner.metrics(record, "torch") == []
    assert [check["name"].split(": ")[1] for check in record["checks"]] == [
        "losses of the first 20 steps agree with the twin's within 0.0001 of them",
        "error better than that of zero by 0.5",
        "error at most 0.5",
    ]
    assert len(record["seeds"][0]["speed_quartiles"]) == 2
    plots.curves_figure(record)


def test_memory_is_of_each_library_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def peaks(tasks: list[Any]) -> Iterator[int]:
        return iter([{"torch": 8, "seqkern": 6}[task.arguments["library"]] for task in tasks])

    monkeypatch.setattr(runner, "peaks_in_fresh_processes", peaks)
    record, _ = runner.run(MadeUp(), "main", steps=2)
    assert record["peak_bytes"] == {"torch": 8, "seqkern": 6}
    assert systems.memory_share(record) == 0.75


def checked(ours: list[float], theirs: list[float] | None, early: float = 0.0, variant: str = "main") -> list[bool]:
    """Verdicts on trainings that ended so."""
    system, seeds = MadeUp(), []
    for i, metric in enumerate(ours):
        runs: dict[str, Any] = {"seqkern": {"metric": metric, "steps": 60}}
        if theirs is not None:
            runs["torch"] = {"metric": theirs[i], "steps": 60}
        seeds.append({"runs": runs, "early": early})
    record = {
        "title": "t", "variant": variant, "seeds": seeds, "shortened": False, "recipe": {"steps": 60},
        "baselines": system.baselines(),
    }  # fmt: skip
    return [check["passed"] for check in runner.checks(system, record)]


@pytest.mark.parametrize(
    ("ours", "theirs", "early", "verdicts"),
    [
        # early losses, the twin's metric, better than the baseline, the target
        ([0.1], [0.1], 1e-6, [True, True, True, True]),
        ([0.1], [0.1], 2e-4, [False, True, True, True]),
        ([0.1], [0.1], float("nan"), [False, True, True, True]),
        ([0.1], [0.25], 0.0, [True, False, True, True]),
        ([0.51], [0.5], 0.0, [True, True, False, False]),
        ([0.1, 0.2, 0.3], [0.2, 0.3, 0.4], 0.0, [True, True, True, True]),  # seeds differ as much as the versions
        ([0.1, 0.11, 0.12], [0.2, 0.21, 0.22], 0.0, [True, False, True, True]),
        ([0.1, 0.1, 0.1], [0.1, 0.1, 0.1], 0.0, [True, True, True, True]),
        ([0.1, 0.1, float("nan")], [0.1, 0.1, 0.1], 0.0, [True, False, False, False]),
    ],
)
def test_checks(ours: list[float], theirs: list[float], early: float, verdicts: list[bool]) -> None:
    assert checked(ours, theirs, early) == verdicts


def test_what_is_checked_of_a_variant_and_of_a_version_alone() -> None:
    assert checked([0.9], None) == [False, False]
    assert checked([0.9], None, variant="other") == []
    assert checked([0.4], [0.9], variant="other") == [True, False]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records.json"
    assert runner.main(MadeUp(), ["--all", "--seeds", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(record["variant"], len(record["seeds"])) for record in found] == [("main", 2), ("other", 2)]
    assert "Weights" in capsys.readouterr().out
    for arguments in (["--seeds", "0"], ["--steps", "0"], ["--variant", "none"]):
        with pytest.raises(SystemExit):
            runner.main(MadeUp(), arguments)
    assert runner.main(MadeUp(), ["--steps", "3"]) == 0  # too short for the metric, which is not checked then


def test_the_gallery_keeps_the_numbers_and_draws_itself_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "load", lambda name: MadeUp())
    monkeypatch.setattr(runner, "peaks_in_fresh_processes", lambda tasks: itertools.repeat(7, len(tasks)))
    kept = tmp_path / "systems.json"
    arguments = ["--only", "gpt", "--seeds", "3", "--out", str(tmp_path / "gallery"), "--keep", str(kept)]
    assert gallery.main(arguments) == 0
    page = tmp_path / "gallery" / "index.html"
    source = page.read_text()
    assert "Made up" in source
    assert "A baseline is better than the network: oracle (Made up)." in source
    numbers = json.loads(kept.read_text())
    assert len(numbers["commit"]) == 40 or numbers["commit"] == "unknown"
    (system,) = numbers["systems"]
    assert [record["variant"] for record in system["records"]] == ["main", "other"]
    assert "losses" not in system["records"][0]["seeds"][0]["runs"]["torch"]
    assert system["records"][0]["peak_bytes"] == {"torch": 7, "seqkern": 7}
    (row,), rows = systems.readme_rows(numbers), systems.page_rows(numbers)
    record = system["records"][0]
    errors = [[seed["runs"][library]["metric"] for seed in record["seeds"]] for library in ("seqkern", "torch")]
    expected = [f"{statistics.fmean(found):.4g} ± {statistics.stdev(found):.2g}" for found in errors]
    ratio = statistics.median(seed["speed_ratio"] for seed in record["seeds"])
    assert row[:5] == ["[Made up](examples/made_up.py)", "error", *expected, "**0, oracle**"]
    assert row[5:] == [f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**", "100%"]
    assert (rows[0][1], *rows[0][4:6]) == ("main", *expected)
    assert rows[1][5:] == ["-", "zero 1; oracle 0", "-", "-", "-"]
    page.unlink()
    assert gallery.main(["--redraw", "--out", str(page.parent)]) == 0
    assert page.read_text() == source
    with pytest.raises(SystemExit):
        gallery.main(["--only", "nothing"])


def test_a_failed_check_fails_the_gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(MadeUp):
        target = 1e-9

    monkeypatch.setattr(runner, "load", lambda name: Failing())
    monkeypatch.setattr(runner, "peaks_in_fresh_processes", lambda tasks: itertools.repeat(7, len(tasks)))
    assert gallery.main(["--only", "gpt", "--seeds", "1", "--out", str(tmp_path)]) == 1
    assert "checks failed" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("name", ["gpt", "recurrent_lm"])
def test_memory_is_of_a_step_after_the_first(name: str) -> None:
    variant = next(iter(runner.load(name).recipes))
    for library in runner.LIBRARIES:
        work: Any = runner.prepare_step(name, variant, library)
        (run,) = (cell.cell_contents for cell in work.__closure__ if isinstance(cell.cell_contents, runner.Run))
        assert type(run.model).__module__.startswith("examples.twins" if library == "torch" else "seqkern.models")
        assert len(run.losses) == 1
        assert all(parameter.grad is None for parameter in run.model.parameters())
        work()
        assert len(run.losses) == 2
