"""`python -m benchmarks` as its user sees it: progress, a sample of the cases, and a table whatever happens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import progress, report

ROOT = Path(__file__).parents[2]

# The command on a machine without rich.
WITHOUT_RICH = """
import runpy, sys
sys.modules["rich"] = None
sys.argv[0] = "benchmarks"
runpy.run_module("benchmarks", run_name="__main__")
"""


def case(**changed: Any) -> dict[str, Any]:
    peer = {"milliseconds": 2.0, "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1}
    return {
        "op": "layer_norm", "shape": "8x64", "dtype": "float32", "mode": "forward", "threads": 2, "milliseconds": 1.0,
        "peers": {"torch": peer}, "gflops_per_second": 3.0, "gbytes_per_second": 4.0, "share_of_roofline": 0.5,
    } | changed  # fmt: skip


def test_interrupted_it_shows_what_was_timed(tmp_path: Path) -> None:
    """Ctrl-C after the first of several cases; in a terminal it goes to the whole group of processes."""
    stored = tmp_path / "stored.json"
    command = [sys.executable, "-c", WITHOUT_RICH, "--quick", "-k", "test_norm", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, f"--benchmark-json={stored}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("[1/"):
            os.killpg(process.pid, signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=300)
    printed = "".join(lines) + rest
    assert process.returncode == 2, printed
    # One case of each test, dtype and mode: two tests, and no peer that has to be compiled.
    assert re.search(r"^\[1/8\] norm.*: [\d.]+ ms, [\d.]+x torch  \(\d+ s, about \d+ (s|min) left\)$", printed, re.M)
    timed = len(re.findall(r"^\[\d/8\]", printed, re.M))
    assert 1 <= timed < 8
    table = rest[rest.rindex("of roofline") :].splitlines()
    assert len([line for line in table if "float32" in line or "bfloat16" in line]) == timed
    assert report.CAPTION in rest
    assert f"stored in {stored}" in rest
    assert len(report.load(stored)[1]) == timed


def test_a_case_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    benchmarks = [{"extra_info": info} for info in (case(), {"backend": "auto"}, {})]
    path = tmp_path / "stored.json"
    path.write_text(json.dumps({"machine_info": {"seqkern": {"torch": "2"}}, "benchmarks": benchmarks}))
    assert report.load(path) == ({"torch": "2"}, [case()])


def test_the_table_is_the_same_without_rich(capsys, monkeypatch) -> None:
    cases = [case(), case(op="lstm", peers={"cuDNN": case()["peers"]["torch"]}, microseconds_per_step=7.0)]
    words = []
    for has_rich in (True, False):
        monkeypatch.setattr(report, "HAS_RICH", has_rich)
        report.show({"torch": "2"}, cases)
        printed = capsys.readouterr().out
        rows = [line for line in printed.splitlines() if "8x64" in line]
        words.append([re.sub("[│|]", " ", row).split() for row in rows])
        assert "vs cuDNN" in printed
        assert report.CAPTION in printed
    assert words[0] == words[1]
    assert words[0][1][:6] == ["lstm", "8x64", "float32", "forward", "1.000", "7.0"]


def test_a_sample_has_every_test_in_every_dtype_and_mode() -> None:
    def item(test: str, **params: str) -> Any:
        return SimpleNamespace(
            nodeid=f"bench.py::{test}[{'-'.join(params.values())}]", callspec=SimpleNamespace(params=params)
        )

    items = [
        item(test, shape=shape, dtype=dtype, mode=mode)
        for test in ("test_a", "test_b") for shape in "123" for dtype in ("float32", "bfloat16") for mode in ("f", "b")
    ]  # fmt: skip
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    chosen = list(items)
    progress.Sample().pytest_collection_modifyitems(SimpleNamespace(hook=hook), chosen)
    assert len(chosen) == 2 * 2 * 2
    assert {one.callspec.params["shape"] for one in chosen} == {"2"}
    assert len(left_out) == len(items) - len(chosen)


def test_a_case_in_a_few_words() -> None:
    assert progress.describe(case()) == "1 ms, 2.00x torch"
    assert progress.describe({"backend": "auto"}) == ""
