"""The examples' own logic: fits, memory measurement, text, the checks, and the whole job."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_cases import RATES, synthetic_points
from torch.nn import functional as F

from examples import (
    console,
    demo,
    memory,
    quadratic_cost,
    recurrent_cost,
    text,
    timing,
    verification,
)
from examples.quadratic_cost import DIRECTIONS, IMPLEMENTATIONS, Point
from seqkern import _library

ROOT = Path(__file__).parents[2]
MEGABYTE = 1e6


# ---- cost over length -----------------------------------------------------------------------------------------------


def test_fit_recovers_the_exponent_of_a_power_law() -> None:
    lengths = [1024, 2048, 4096, 8192]
    assert quadratic_cost.fit_exponent(lengths, [3e-7 * n**1.7 for n in lengths]) == pytest.approx(1.7)
    assert quadratic_cost.fit_exponent(lengths[:2], [1.0, 2.0]) is None


def test_crossover_lies_where_the_curves_cross() -> None:
    lengths = [64, 128, 256, 512]
    square, line = [float(n * n) for n in lengths], [100.0 * n for n in lengths]
    assert quadratic_cost.crossover(lengths, square, line) == pytest.approx(100)
    assert quadratic_cost.crossover(lengths, line, square) is None  # never becomes dearer
    assert quadratic_cost.crossover(lengths, square, [1.0] * 4) is None  # dearer from the start


def test_timing_stops_at_what_the_budget_and_the_memory_allow() -> None:
    measured = list(quadratic_cost.measure_times([16, 32, 2**20], budget=5.0))
    assert [points[0].length for points in measured] == [16, 32]
    assert {(p.implementation, p.direction) for p in measured[0]} == {
        (i, d) for i in IMPLEMENTATIONS for d in DIRECTIONS
    }
    assert all(0 < p.fastest <= p.seconds <= p.slowest for points in measured for p in points)


def test_beyond_the_required_length_the_slowest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0  # a clock that only the works move

    def prepare(name: str, length: int, direction: str) -> Any:
        def work() -> None:
            nonlocal now
            now += 0.02 if name == "torch LSTM" else 1e-4

        return work

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing.yardstick, "slowness", lambda: 1.0)
    monkeypatch.setattr(quadratic_cost, "REQUIRED_LENGTH", 16)
    monkeypatch.setattr(quadratic_cost, "prepare", prepare)
    first, second = ({p.implementation for p in points} for points in quadratic_cost.measure_times([16, 32], 0.5))
    assert first == set(IMPLEMENTATIONS)
    assert second == first - {"torch LSTM", "materialised"}


def test_every_implementation_of_attention_computes_the_same() -> None:
    # No longer than the window, which then hides nothing.
    query, key, value = (torch.randn(1, 1, 70, quadratic_cost.WIDTH, dtype=torch.float64) for _ in range(3))
    results = [function(query, key, value) for function in quadratic_cost.ATTENTION.values()]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_the_window_hides_what_lies_before_it() -> None:
    query, key, value = (torch.randn(1, 1, 600, quadratic_cost.WIDTH, dtype=torch.float64) for _ in range(3))
    distance = torch.arange(600)[:, None] - torch.arange(600)
    visible = (distance >= 0) & (distance < quadratic_cost.WINDOW)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    torch.testing.assert_close(quadratic_cost.ATTENTION[quadratic_cost.WINDOWED](query, key, value), expected)
    for direction, products in (("forward", 2), ("backward", 5)):
        flops = 2 * quadratic_cost.WIDTH * products * int(visible.sum())
        assert quadratic_cost.needed_flops(quadratic_cost.WINDOWED, 600, direction) == flops
        assert quadratic_cost.needed_flops("seqkern", 600, direction) > flops


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_backward_goes_over_one_graph_again_and_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = quadratic_cost.prepare(name, 40, "forward+backward")()
    functions: Any = quadratic_cost.ATTENTION if name in quadratic_cost.ATTENTION else vars(quadratic_cost)
    key, runs = (name if name in functions else "lstm_output"), []
    function = functions[key]
    monkeypatch.setitem(functions, key, lambda *inputs: (runs.append(name), function(*inputs))[1])
    work = quadratic_cost.prepare(name, 40, "backward")
    for _ in range(2):
        gradients = work()
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert runs == [name]  # forward ran once, before
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    assert all(gradient.dtype == dtype and gradient.any() for gradient in gradients)
    output = quadratic_cost.prepare(name, 40, "forward")()
    assert output.dtype == dtype
    assert not output.requires_grad


def test_the_rate_of_a_matrix_product_is_of_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "seconds_of", lambda work, calls=1: 2e-3 if work().dtype == torch.float32 else 1e-3)
    rates = quadratic_cost.gemm_rates(size=256)
    assert rates == pytest.approx({"float32": 2 * 256**3 / 2e-3, "bfloat16": 2 * 256**3 / 1e-3})


def test_a_dtype_without_instructions_is_held_against_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def product_rate(dtype: torch.dtype, size: int, products: int) -> float:
        measured.append((dtype, size))
        return 100.0 if dtype == torch.float32 else 1.0

    monkeypatch.setattr(quadratic_cost, "product_rate", product_rate)
    assert quadratic_cost.gemm_rates(size=2048) == {"float32": 100.0, "bfloat16": 100.0}
    assert (torch.bfloat16, 2048) not in measured  # it would take the time of the whole demo


def test_share_of_gemm_is_the_needed_operations_over_the_rate() -> None:
    rates = {"float32": 1e9, "bfloat16": 4e9}
    visible = 1000 * 1001 // 2
    point = Point("seqkern", "forward", 1000, 2.0, 1.0, 3.0, 3)  # the round counts whose time is told: not the fastest
    assert quadratic_cost.share_of_gemm(point, rates) == pytest.approx(4 * quadratic_cost.WIDTH * visible / 2e9)
    share = 4 * quadratic_cost.WIDTH * visible / 1e9  # of a second
    shares = {
        (name, direction): quadratic_cost.share_of_gemm(Point(name, direction, 1000, 1.0, 1.0, 1.0, 3), rates)
        for name in IMPLEMENTATIONS
        for direction in DIRECTIONS
    }
    assert shares["seqkern", "backward"] == pytest.approx(2.5 * share)
    assert shares["torch SDPA bfloat16", "forward"] == pytest.approx(share / 4)
    assert shares[quadratic_cost.WINDOWED, "forward"] == pytest.approx(
        4 * quadratic_cost.WIDTH * (256 * 257 // 2 + 744 * 256) / 1e9
    )
    assert shares["torch LSTM", "forward"] is None
    assert quadratic_cost.share_of_gemm(point, {}) is None


def test_analysis_of_known_points() -> None:
    result = quadratic_cost.analyse(synthetic_points(), RATES)
    fits = {(e["implementation"], e["direction"]): e for e in result["exponents"]}
    assert fits["materialised", "forward"]["memory"] == pytest.approx(2)
    assert fits["seqkern", "forward"]["time"] == pytest.approx(2)
    assert fits["seqkern LSTM", "forward"]["time"] == pytest.approx(1)
    assert fits["seqkern", "forward"]["memory"] is None  # two points above the resolution are no fit
    assert [c["length"] for c in result["crossovers"]] == [pytest.approx(2000)] * 4
    assert result["memory_check"]["passed"]
    assert result["window_check"] == {
        "limit": quadratic_cost.WINDOW_LIMIT_EXPONENT, "window": pytest.approx(1), "full": pytest.approx(2),
        "passed": True,
    }  # fmt: skip
    shares = [p["share_of_gemm"] for p in result["points"] if (p["implementation"], p["length"]) == ("seqkern", 8192)]
    flops = 4 * quadratic_cost.WIDTH * 8192 * 8193 // 2
    assert shares == pytest.approx([x * flops / (5e-10 * 8192**2) / RATES["float32"] for x in (1, 2.5)])


def test_exponents_leave_out_what_was_disturbed() -> None:
    def fits(*lengths: int) -> dict[str, Any]:
        """With the points of these lengths ten times slower, and marked."""
        points = [
            replace(p, seconds=10 * p.seconds, disturbed=True) if p.length in lengths else p for p in synthetic_points()
        ]
        found = quadratic_cost.analyse(points, RATES)["exponents"]
        return next(e for e in found if (e["implementation"], e["direction"]) == ("seqkern", "forward"))

    assert fits()["time"] == pytest.approx(2)
    assert (fits(8192)["time"], fits(8192)["disturbed"]) == (pytest.approx(2), False)
    assert fits(4096, 8192)["time"] > 2.7  # two points alone are no line: of all, and marked
    assert fits(4096, 8192)["disturbed"]


def test_memory_check_fails_when_seqkern_needs_too_much() -> None:
    points = [
        Point(p.implementation, p.direction, p.length, 1.0, 1.0, 1.0, 1, int(65e6))
        if p.implementation == "seqkern"
        else p
        for p in synthetic_points()
    ]
    check = quadratic_cost.memory_check(points)
    assert check is not None
    assert not check["passed"]
    # The memory of both passes stands beside the time of backward.
    assert check["seqkern"] == dict.fromkeys(("forward", "forward+backward"), int(65e6))
    assert quadratic_cost.memory_check([p for p in points if p.length < 8192]) is None


def test_memory_is_of_forward_and_of_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def peaks(tasks: list[memory.Task]) -> list[int]:
        seen.extend(task.arguments["direction"] for task in tasks)
        return [7] * len(tasks)

    monkeypatch.setattr(quadratic_cost, "peaks_in_fresh_processes", peaks)
    points = [Point("seqkern", direction, 64, 1.0, 1.0, 1.0, 1) for direction in DIRECTIONS]
    measured = list(quadratic_cost.measure_memory(points))
    assert seen == ["forward", "forward+backward"]
    assert [(p.direction, p.peak_bytes) for p in measured] == [("forward", 7), ("backward", 7)]


@pytest.mark.parametrize(("window", "full", "passed"), [(1.0, 1.9, True), (1.8, 1.9, False), (1.0, 1.1, False)])
def test_window_check_wants_linear_beside_quadratic_time(window: float, full: float, passed: bool) -> None:
    def point(name: str, length: int, exponent: float) -> Point:
        fastest = 1e-8 * length**exponent
        return Point(name, "forward", length, 1.0, fastest, 2.0, 5)  # the medians say nothing

    lengths = (128, 1024, 2048, 4096, 8192)
    points = [point(quadratic_cost.WINDOWED, n, window) for n in lengths] + [point("seqkern", n, full) for n in lengths]
    check = quadratic_cost.window_check(points)
    assert check is not None
    assert (check["window"], check["full"]) == (pytest.approx(window), pytest.approx(full))
    assert check["passed"] == passed
    assert quadratic_cost.window_check([p for p in points if p.length < 8192]) is None
    assert quadratic_cost.window_check([p for p in points if p.implementation == "seqkern"]) is None


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_a_known_allocation_is_measured_in_fresh_processes() -> None:
    sizes = (20.0, 5.0, 60.0)
    tasks = [memory.Task("examples.memory:allocate", {"megabytes": size}) for size in sizes]
    peaks = list(memory.peaks_in_fresh_processes(tasks))
    assert peaks == [pytest.approx(size * MEGABYTE, abs=MEGABYTE) for size in sizes]


def test_memory_that_is_freed_again_counts_once() -> None:
    def work() -> None:
        for _ in range(3):
            memory.allocate(30)()

    assert memory.peak_extra_memory(work) == pytest.approx(30 * MEGABYTE, abs=3 * MEGABYTE)


def test_sampling_sees_what_lasts() -> None:
    # What platforms without a resettable peak use. A process of its own has nothing free that could be used again.
    program = "from examples import memory; print(memory._sampled_peak(memory.allocate(40)))"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(printed.stdout) == pytest.approx(40 * MEGABYTE, abs=3 * MEGABYTE)


def test_a_failing_task_raises() -> None:
    tasks = [memory.Task("examples.memory:allocate", {"megabytes": "x"})] * 2
    with pytest.raises(RuntimeError, match="memory measurement failed"):
        list(memory.peaks_in_fresh_processes(tasks))


# ---- text -----------------------------------------------------------------------------------------------------------


def test_held_out_is_the_end_and_nothing_is_lost() -> None:
    data = bytes(range(250)) * 100
    corpus = text.split(data, "test")
    assert bytes(corpus.train.tolist()) + bytes(corpus.held_out.tolist()) == data
    assert len(corpus.held_out) == 2500


def test_targets_are_the_inputs_one_byte_later() -> None:
    corpus = text.split(bytes(range(250)) * 100, "test")
    for inputs, targets in (corpus.batch(torch.Generator().manual_seed(0), 5, 64), corpus.held_out_windows(64)):
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal((inputs + 1) % 250, targets)
    assert corpus.held_out_windows(64)[0].shape == (39, 64)
    assert corpus.held_out_windows(64, limit=4)[0].shape == (4, 64)
    with pytest.raises(ValueError, match="window needs"):
        corpus.held_out_windows(4000)


def test_python_documentation_repeats_no_paragraph() -> None:
    paragraphs = [" ".join(p.split()) for p in text.python_documentation().decode().split("\n\n") if p.strip()]
    assert len(paragraphs) > 1000
    assert len(set(paragraphs)) == len(paragraphs)


def test_baselines_of_uniform_bytes() -> None:
    found = text.baselines(text.split(bytes(range(256)) * 1000, "test"))
    assert found["unigram"] == pytest.approx(8, abs=0.01)
    assert found["zlib"] < 0.1  # repeats itself


def test_a_file_with_too_little_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(ValueError, match="too little text"):
        text.load(path)
    assert demo.main(["--text", str(path), "--out", str(tmp_path / "report")]) == 2


# ---- verification, the whole job ------------------------------------------------------------------------------------


def test_a_failed_verification_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "DTYPES", (torch.float32,))
    rows = list(verification.run())
    sweep = verification.mean_sweep()
    cost = {"memory_check": None, "window_check": None}
    assert all(check["passed"] for check in demo.all_checks(rows, sweep, cost, []))
    rows[0]["passed"] = sweep[-1]["passed"] = False
    assert not any(check["passed"] for check in demo.all_checks(rows, sweep, cost, []))


@pytest.mark.parametrize("op", ["attention_options", "layer_norm"])
def test_the_verification_runs_a_tier_where_it_has_kernels(op: str) -> None:
    isas = {
        dtype: {options.get("isa") for _, options in verification.kernels(op, dtype)} - {None}
        for dtype in verification.DTYPES
    }
    others = set(_library.available_isas()).difference(_library.BF16_ISAS)
    own = set(_library.available_isas()) if op == "attention_options" else others
    assert isas == {dtype: own if dtype == torch.bfloat16 else others for dtype in verification.DTYPES}


@pytest.mark.parametrize("name", ["memory_check", "window_check"])
def test_a_failed_check_of_the_cost_fails_the_job(name: str) -> None:
    cost = quadratic_cost.analyse(synthetic_points(), RATES)
    sweep = [{"errors": {"output": [1e-8, 1e-8]}, "passed": True}]
    assert [check["passed"] for check in demo.all_checks([], sweep, cost, [])] == [True] * 4
    cost[name]["passed"] = False
    verdicts = [check["passed"] for check in demo.all_checks([], sweep, cost, [])]
    assert verdicts == [True, True, name != "memory_check", name != "window_check"]


def test_progress_in_a_log_is_a_few_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "console", console.Console(force_terminal=False))
    with console.progress("work", 1000) as advance:
        for step in range(1000):
            advance(str(step))
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_numbers_are_written_with_units() -> None:
    assert [console.seconds(s) for s in (4.21e-5, 0.00307, 0.9999, 1.2)] == ["42.1 us", "3.07 ms", "1 s", "1.2 s"]
    assert [console.megabytes(b) for b in (None, 1.25e6, 9.96e6, 876e6)] == [
        "out of memory",
        "1.2 MB",
        "10 MB",
        "876 MB",
    ]


@pytest.mark.parametrize("layer", recurrent_cost.LAYERS)
def test_recurrent_layers_do_the_same_work(layer: str) -> None:
    for work in recurrent_cost.PASSES:
        calls, tokens = recurrent_cost.works(layer, work)
        ours, theirs = (calls[name]() for name in ("seqkern", "torch"))
        if work == "training":
            for a, b in zip(ours[1:], theirs[1:], strict=True):  # of the weights, whatever the order of the tokens
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
        assert tokens == (16 * 64 if "ragged" not in layer else 16 * 48)


def test_recurrent_rows_have_times_and_shares() -> None:
    rows = list(recurrent_cost.measure(0.0, least=1))
    assert [(row["layer"], row["work"]) for row in rows] == list(
        itertools.product(recurrent_cost.LAYERS, recurrent_cost.PASSES)
    )
    for row in rows:
        # Everything that the table says of a row comes from the same two times.
        times = row["step_seconds"]
        assert row["speed_ratio"] == times["torch"] / times["seqkern"] > 0
        shared = recurrent_cost.with_shares(row, rate=1e12)
        for name, share in shared["share_of_gemm"].items():
            assert share * times[name] * 1e12 == pytest.approx(row["step_flops"])
        assert set(row["disturbed"]) == {"torch", "seqkern"}


@pytest.mark.slow
def test_the_whole_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--quick", "--out", str(tmp_path / "report")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert str(tmp_path / "report" / "index.html") in result.stdout.splitlines()[-1]
    assert len(result.stdout.splitlines()) < 240
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert all(check["passed"] for check in results["checks"])
    assert [chapter["name"] for chapter in results["chapters"]] == list(demo.SYSTEMS)
