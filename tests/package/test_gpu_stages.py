"""The stages of a GPU run (benchmarks/GPU.md) without a GPU: a dry run on the CPU, planted faults, interrupts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import gpu, gpu_process, gpu_smoke

ROOT = Path(__file__).parents[2]

# What a machine lent for its GPU may lack.
LACKING = ("hypothesis", "expecttest", "torch_abi_audit", "rich", "matplotlib", "jinja2", "psutil")

CASES = """
import os, time
from dataclasses import replace
from seqkern.testing import layer_norm_case

RIGHT = layer_norm_case(9, 65)

def wrong(**tensors):
    output = RIGHT.ours(**tensors)
    fault = output.new_zeros(output.shape)
    fault[3, 64] = 0.05  # of one element; its gradients stay right
    return output + fault

def nan(**tensors):
    output = RIGHT.ours(**tensors).clone()
    output[0, 0] = float("nan")
    return output

def hangs(**tensors):
    with open(os.environ["HANGING"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)

def crashes(**tensors):
    os.abort()

def raises(**tensors):
    raise RuntimeError("an illegal memory access was encountered")

def unavailable(**tensors):
    raise NotImplementedError("no such kernel")

CASES = {"right": RIGHT}
for function in (wrong, nan, hangs, crashes, raises, unavailable):
    CASES[function.__name__] = replace(RIGHT, ours=function)
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    path = tmp_path / "planted.py"
    path.write_text(CASES)
    return path


def command(out: Path, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", *map(str, (out, *arguments))]


def run(out: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(out, *arguments), cwd=ROOT, env=os.environ | {"HANGING": str(out / "pid")} | more,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "smoke.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """All stages on the CPU where the modules of LACKING cannot be imported, and the rows of the first."""
    out, site = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Lacking(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, *rest):\n"
        f"        return None if name.partition('.')[0] in {LACKING} else PathFinder.find_spec(name, *rest)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking\n"
    )
    blocked = {"PYTHONPATH": str(site), "PYTEST_ADDOPTS": "-p no:hypothesispytest", "SEQKERN_COMMIT": "0123abc"}
    for name in LACKING:
        check = [sys.executable, "-c", f"import {name}"]
        result = subprocess.run(check, env=os.environ | blocked, check=False, capture_output=True, text=True)
        assert f"ModuleNotFoundError: No module named '{name}'" in result.stderr
    picked = ("--ops", "layer_norm,attention_d1", "--dtypes", "bfloat16,float32", "--jobs", 2)
    result = run(out, "--stage", 1, 2, 3, *picked, **blocked)
    assert result.returncode == 0, result.stdout + result.stderr
    return result, rows_of(out)


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "zombie" in status.read_text()


# ---- stage 1 ------------------------------------------------------------------------------------------------------


def test_dry_run_on_the_cpu(dry_run):
    result, rows = dry_run
    assert "cpu: 4 passed" in result.stdout
    expected = {(op, dtype) for op in ("layer_norm", "attention_d1") for dtype in ("bfloat16", "float32")}
    assert {(row["op"], row["dtype"]) for row in rows} == expected
    for row in rows:
        assert (row["ok"], row["outcome"], row["backend"], row["device"]) == (True, "passed", "cpu", "cpu")
        assert 0 <= row["worst_error_to_bound"] <= 1
        assert row["worst_tensor"]
        assert row["seconds"] > 0
        assert row["commit"] == "0123abc"
        assert row["card"]
        assert set(row["versions"]) >= {"seqkern", "torch", "triton", "python", "CUDA"}


def test_stages_2_and_3_import_nothing_that_a_gpu_machine_may_lack(dry_run):
    """They collected all their tests without it, and of the tests marked gpu stage 2 misses none."""
    collected = {line.partition("[")[0] for line in dry_run[0].stdout.splitlines() if "::" in line}
    everything = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    marked = {line.partition("[")[0] for line in everything.splitlines() if "::" in line}
    assert marked
    assert marked == {name for name in collected if name.startswith("tests/")}
    timed = {name for name in collected if name.startswith("benchmarks/")}
    assert {name.rpartition("::")[2] for name in timed} == {"test_attention", "test_norm", "test_layer", "test_decode"}


def test_planted_faults_are_told(tmp_path, planted):
    result = run(tmp_path, "--stage", 1, "--cases", planted, "--dtypes", "float32", "--case-limit", 8, "--jobs", 2)
    assert result.returncode == 1, result.stdout + result.stderr
    rows = {row["op"]: row for row in rows_of(tmp_path)}
    outcomes = {op: (row["ok"], row["outcome"]) for op, row in rows.items()}
    assert outcomes == {
        "right": (True, "passed"), "wrong": (False, "wrong"), "nan": (False, "wrong"), "hangs": (False, "timed out"),
        "crashes": (False, "failed"), "raises": (False, "failed"), "unavailable": (None, "unavailable"),
    }  # fmt: skip
    assert rows["wrong"]["worst_error_to_bound"] > 1
    assert rows["wrong"]["worst_tensor"] == "output"
    assert rows["nan"]["worst_error_to_bound"] == "nan"
    assert "longer than 8 s, in hangs (planted.py:" in rows["hangs"]["why"]
    assert rows["crashes"]["why"].startswith("SIGABRT, in crashes (planted.py:")
    assert rows["raises"]["why"] == "exit code 1: RuntimeError: an illegal memory access was encountered"
    assert rows["unavailable"]["why"] == "no such kernel"
    table = result.stdout[result.stdout.index("largest error of each case") :]
    assert [line.split()[1] for line in table.splitlines()[2:9]] == [
        "ok",
        "WRONG",
        "WRONG",
        *["TIME", "FAILED", "FAILED", "-"],
    ]
    assert "cpu: 1 passed, 2 wrong, 2 failed, 1 timed out, 1 unavailable" in table
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_stage_out_of_time_says_what_did_not_run(tmp_path):
    result = run(tmp_path, "--stage", 1, "--limit", 1, "--ops", "layer_norm,lstm_cell", "--dtypes", "float32")
    assert result.returncode == 3, result.stdout + result.stderr
    assert {row["outcome"] for row in rows_of(tmp_path)} == {"not run"}
    assert "cpu: 2 not run" in result.stdout


def test_an_interrupt_ends_the_cases_and_prints_the_table(tmp_path, planted):
    arguments = ("--stage", 1, "--cases", planted, "--ops", "hangs,right", "--dtypes", "float32", "--jobs", 1)
    environment = os.environ | {"HANGING": str(tmp_path / "pid")}
    process = subprocess.Popen(
        command(tmp_path, *arguments), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 100
    while not (tmp_path / "pid").exists() and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == gpu.INTERRUPTED
    assert "cpu: 2 not run" in output
    assert {(row["op"], row["why"]) for row in rows_of(tmp_path)} == {
        ("hangs", "interrupted"),
        ("right", "interrupted"),
    }
    assert gone(int((tmp_path / "pid").read_text()))


def test_what_tells_most_comes_first():
    dtypes = ["bfloat16", "float32", "float16", "float64"]
    plan = gpu_smoke.Plan(["a", "b", "size"], dtypes, ["triton", "cuda"], "cuda", 90, 12)
    cases = plan.cases(sizes=["size"])
    assert len(cases) == len(set(cases)) == 24
    assert cases[:3] == [("a", "bfloat16", "triton"), ("a", "bfloat16", "cuda"), ("b", "bfloat16", "triton")]
    order = list(dict.fromkeys((dtype, op == "size") for op, dtype, _ in cases))
    assert order == [(d, size) for half in (dtypes[:2], dtypes[2:]) for size in (False, True) for d in half]


def row(outcome: str, backend: str = "triton") -> dict[str, Any]:
    return {"backend": backend, "outcome": outcome, "ok": gpu_smoke.OK.get(outcome, False)}


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["passed", "unavailable"], 0), (["passed", "not run"], 3), (["not run", "timed out"], 1), (["wrong"], 1),
        (["failed"], 1), (["unavailable"], 1),
    ],
)  # fmt: skip
def test_exit_code(outcomes, code):
    plan = gpu_smoke.Plan(["a"], ["float32"], ["triton"], "cuda", 90, 12)
    assert gpu_smoke.exit_code(plan, [row(outcome) for outcome in outcomes]) == code


# ---- build, tests, benchmarks -------------------------------------------------------------------------------------


def stage(number: int, tmp_path: Path, *arguments: str) -> gpu.Stage:
    return gpu.Stage(number, gpu.parse(["--out", str(tmp_path), *arguments]))


def test_a_failed_build_is_said_and_repeated_without_cuda(tmp_path, monkeypatch, capsys):
    script = "import os; a = os.environ['SEQKERN_CUDA_ARCHS']; print('built for', a); exit(a == 'native')"
    monkeypatch.setattr(gpu, "python", lambda *_: [sys.executable, "-c", script])
    monkeypatch.delenv("SEQKERN_CUDA_ARCHS", raising=False)
    assert not gpu.build(stage(1, tmp_path, "--device", "cuda"))
    printed = capsys.readouterr().out
    assert "build for native: ended with 1" in printed
    assert "build without CUDA C++: done" in printed
    assert "built for none" in (tmp_path / "stage1.txt").read_text()


@pytest.mark.slow  # waits for the limit, which has to be long enough for two workers to start beside others
def test_pytest_that_is_cut_off_writes_its_report(tmp_path):
    """With workers, as in stage 2."""
    (tmp_path / "test_slow.py").write_text(
        "import time\ndef test_quick(): pass\ndef test_long(): time.sleep(100)\ndef test_longer(): time.sleep(100)\n"
    )
    report = tmp_path / "report.xml"
    arguments = ["-m", "pytest", tmp_path, f"--junitxml={report}", "-v", "-n", "2", "-p", "no:cacheprovider"]
    lines: list[str] = []
    command = gpu_process.python(*arguments, "--rootdir", tmp_path)
    code, late = gpu_process.follow(command, 45, os.environ, lines.append)
    assert late
    assert code != 0
    assert 'name="test_quick"' in report.read_text(), lines


def test_a_lost_context_and_a_hang_cost_the_tests_of_stage_2_nothing_else(tmp_path):
    """What stage 2's plugin does, with a synchronisation that fails from one test on, as after an illegal access."""
    (tmp_path / "test_it.py").write_text(
        "import time, torch\n"
        "lost = False\n"
        "def synchronize():\n"
        "    if lost: raise RuntimeError('an illegal memory access was encountered')\n"
        "torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize\n"
        "def test_loses():\n"
        "    global lost\n"
        "    lost = True\n"
        "def test_hangs(): time.sleep(1000)\n"
        "def test_right(): synchronize()\n"
    )
    report = tmp_path / "report.xml"
    arguments = ["-m", "pytest", tmp_path, f"--junitxml={report}", "-v", "-n", "1", "-p", "no:cacheprovider"]
    arguments += ["-p", "benchmarks.gpu_plugin", "--max-worker-restart=9", "--rootdir", tmp_path]
    lines: list[str] = []
    environment = gpu_process.environment(SEQKERN_TEST_LIMIT="5")
    code, late = gpu_process.follow(gpu_process.python(*arguments), 100, environment, lines.append)
    printed = "\n".join(lines)
    assert (code, late) == (1, False), printed
    assert "test_loses left the GPU's context unusable" in printed
    assert 'test_it.py", line 9 in test_hangs' in printed
    crashed = [re.search(r"crashed while running '.*::(\w+)'", line) for line in lines]
    assert {found[1] for found in crashed if found} == {"test_loses", "test_hangs"}
    cases = ElementTree.parse(report).iter("testcase")
    assert {case.get("name"): case.find("failure") is None for case in cases}["test_right"], printed


def test_results_are_named_after_the_card():
    assert gpu.card_name("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"
    assert gpu.card_name("NVIDIA GeForce RTX 4090") == "geforce-rtx-4090"


STORED = ROOT / "benchmarks" / "results" / "epyc-zen5-2-cores" / "decode-2-threads.json"


def test_every_timed_case_is_a_line():
    before = STORED.read_bytes()
    lines = list(gpu.results(STORED))
    assert len(lines) == len(json.loads(before)["benchmarks"])
    assert all(" ms, " in line and "torch " in line for line in lines)
    assert STORED.read_bytes() == before


def test_stage_3_keeps_what_was_timed_under_the_name_of_the_card(tmp_path, monkeypatch, capsys):
    """One group fails, one is cut off in the middle of a case, the others end as they should."""
    out, stored = tmp_path / "out", json.loads(STORED.read_text())
    cut_off = json.loads(STORED.read_text())
    cut_off["benchmarks"][-1]["extra_info"] = {"backend": "triton"}
    (tmp_path / "cut_off.json").write_text(json.dumps(cut_off))

    def command(stage: gpu.Stage, *arguments: str) -> list[str]:
        assert arguments[1:3] == ("--device", "cuda")
        picked = next(name for name, _, _, pick in gpu.BENCHMARKS if pick == arguments[4])
        source = tmp_path / "cut_off.json" if picked == "rnn" else STORED
        script = "import shutil, sys; sys.exit(1) if sys.argv[1] == 'norms' else shutil.copy(*sys.argv[2:4])"
        return [sys.executable, "-c", script, picked, str(source), str(out / "h100-80gb-hbm3" / f"{picked}.json")]

    monkeypatch.setattr(gpu, "pytest", command)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert gpu.stage3(stage(3, out, "--device", "cuda", "--no-build")) == 1
    kept = {path.stem: json.loads(path.read_text())["benchmarks"] for path in tmp_path.glob("benchmarks/results/*/*")}
    assert set(kept) == {name for name, *_ in gpu.BENCHMARKS} - {"norms"}
    assert kept["rnn"] == stored["benchmarks"][:-1]
    assert kept["decode"] == stored["benchmarks"]
    printed = capsys.readouterr().out
    assert "norms: ended with 1" in printed
    assert "4 results in benchmarks/results/h100-80gb-hbm3" in printed


@pytest.mark.parametrize(("first", "second", "code"), [(0, 5, 0), (1, 0, 1), (0, 1, 1), (0, 0, 0)])
def test_stage_2_fails_when_a_run_does_and_not_when_none_repeats(tmp_path, monkeypatch, first, second, code):
    def command(stage: gpu.Stage, *arguments: str) -> list[str]:
        assert str(Path(__file__).relative_to(ROOT)) not in arguments  # it only speaks of the mark
        assert "tests/cuda/test_error_rule_gpu.py" in arguments
        return [sys.executable, "-c", f"exit({second if 'same_bits' in arguments else first})"]

    monkeypatch.setattr(gpu, "pytest", command)
    assert gpu.stage2(stage(2, tmp_path, "--device", "cuda", "--no-build")) == code
