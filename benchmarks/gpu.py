"""The first half hour on a GPU, in three stages of at most 9 minutes: `python -m benchmarks.gpu --stage 1`.

1: build, then every op, dtype and backend against float64. 2: the tests marked gpu. 3: benchmarks for RESULTS.md.
Each stage stands alone and tells the most first. GPU.md beside this is the page for whoever runs them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import gpu_smoke
from benchmarks.gpu_process import ROOT, Deadline, environment, follow, python

INTERRUPTED = 130

# Of stage 3: name of the result, most seconds, file, what of it. Forward and causal first; all in bfloat16.
BENCHMARKS = [
    ("attention-forward", 150, "bench_attention.py",
     "test_attention and bfloat16 and D128-N8192 and forward"),
    ("norms", 80, "bench_layer_norm.py",
     "test_norm and bfloat16 and not rms and not add and (8192x1024 or 2048x4096 or 256x16384)"),
    ("rnn", 80, "bench_rnn.py",
     "test_layer and not normalised and LSTM and bfloat16 and (B32-T128-H512 or B16-T64-H256)"),
    ("decode", 80, "bench_attention.py",
     "test_decode and bfloat16 and D128 and N8192"),
    ("attention-backward", 200, "bench_attention.py",
     "test_attention and bfloat16 and D128-N8192 and backward"),
]  # fmt: skip


class Stage:
    """One stage: its number, its deadline, what it writes under `out`, and how it tells what it does."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self.number, self.options, self.deadline = number, options, Deadline(options.limit)
        self.out: Path = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self._log = (self.out / f"stage{number}.txt").open("w")

    def log(self, line: str) -> None:
        self._log.write(line + "\n")
        self._log.flush()

    def say(self, line: str) -> None:
        line = f"[{self.deadline.passed():.0f} s] {line}"
        print(line, flush=True)
        self.log(line)

    def follow(
        self, what: str, command: Sequence[str], limit: float, on_line: Callable[[str], None], **more: str
    ) -> int:
        """Runs a command into the log, as long as the stage and `limit` let it; says how it ended."""
        limit = min(limit, self.deadline.left() - 20)
        if limit <= 0:
            self.say(f"{what}: not run, the stage's time was over")
            return 3
        code, late = follow(command, limit, environment(**more), on_line)
        ended = f"cut off after {limit:.0f} s" if late else "done" if code == 0 else f"ended with {code}"
        self.say(f"{what}: {ended}")
        return 3 if late else code


# ---- 1 -------------------------------------------------------------------------------------------------------------


def build(stage: Stage) -> bool:
    """Compiles for the GPUs of this machine, or where that fails without CUDA C++; whether it succeeded at once."""
    if stage.options.no_build or stage.options.device == "cpu":
        return True
    command = python("setup.py", "-q", "build_ext", "--inplace")
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        stage.log(line)

    archs = os.environ.get("SEQKERN_CUDA_ARCHS", "native")
    if stage.follow(f"build for {archs}", command, 280, on_line, SEQKERN_CUDA_ARCHS=archs) == 0:
        return True
    stage.say("the build with CUDA C++ failed, without it once more; its last words:")
    for line in lines[-12:]:
        print(f"    {line[:300]}", flush=True)
    stage.follow("build without CUDA C++", command, 150, on_line, SEQKERN_CUDA_ARCHS="none")
    return False


def describe(stage: Stage) -> dict[str, Any]:
    """Card, versions and commit. Imports seqkern, which must have been built."""
    import torch

    from seqkern._explain import describe_machine

    machine = dict(describe_machine())
    for label, value in machine.items():
        stage.log(f"{label}: {value}")
    kept = ("seqkern", "torch", "triton", "python", "CUDA C++ kernels")
    card = torch.cuda.get_device_name() if stage.options.device == "cuda" else machine["processor"]
    versions = {name: machine[name] for name in kept} | {"CUDA": torch.version.cuda or "none"}
    return {"card": card, "versions": versions, "commit": commit()}


def commit() -> str:
    """Of the source; a copy without .git is told by SEQKERN_COMMIT."""
    if told := os.environ.get("SEQKERN_COMMIT"):
        return told
    words = ["git", "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def stage1(stage: Stage) -> int:
    options = stage.options
    built = build(stage)
    about = describe(stage)
    stage.say(f"{about['card']}, commit {about['commit']}, {about['versions']}")
    from benchmarks import gpu_case
    from seqkern import _library

    cases = list(gpu_case.cases_of(options.cases))
    backends = chosen("backends", options.backends, gpu_smoke.BACKENDS[options.device])
    if options.device == "cuda" and not options.backends:
        there = _library.gpu_backends("layer_norm")
        for backend in set(backends).difference(there):
            stage.say(f"{backend}: not here (no triton, or no CUDA C++ kernels for this GPU in the build)")
            backends.remove(backend)
            built = False
    plan = gpu_smoke.Plan(
        ops=chosen("ops", options.ops, cases),
        dtypes=chosen("dtypes", options.dtypes, list(gpu_case.DTYPES)),
        backends=backends,
        device=options.device,
        case_limit=options.case_limit,
        jobs=options.jobs,
        file=options.cases,
        about=about,
    )
    sizes = [] if options.cases else list(gpu_case.SIZES)
    path = stage.out / "smoke.jsonl"
    with progress(stage, len(plan.cases())) as (say, advance):
        rows, interrupted = gpu_smoke.smoke(plan, sizes, path, stage.deadline, say, advance)
    for line in gpu_smoke.table(plan, rows):
        print(line, flush=True)
        stage.log(line)
    stage.say(f"rows in {path}")
    if interrupted:
        return INTERRUPTED
    return gpu_smoke.exit_code(plan, rows) if built else 1


def chosen(option: str, names: str | None, known: list[str]) -> list[str]:
    """Those that an option names, or all."""
    found = [name.strip() for name in names.split(",")] if names else list(known)
    if unknown := [name for name in found if name not in known]:
        raise SystemExit(f"--{option} must be some of {','.join(known)}, got {unknown[0]!r}")
    return found


@contextmanager
def progress(stage: Stage, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """How to tell a line, and that so many cases are done: a bar where a terminal and rich are, else every tenth."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    except ImportError:
        bars = False
    else:
        bars = sys.stdout.isatty()
    if not bars:
        yield stage.say, lambda done: stage.say(f"{done} of {total}") if done % 10 == 0 or done == total else None
        return
    with Progress("cases", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("cases", total=total)

        def say(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False)
            stage.log(line)

        yield say, lambda done: bar.update(task, completed=done)


# ---- 2 -------------------------------------------------------------------------------------------------------------


def gpu_test_files() -> list[Path]:
    """The files that hold tests marked gpu: the others are not imported, for they need more modules."""
    marked = re.compile(r"pytest\.mark\.gpu|^\w+ = gpu_(bits_)?test\(", re.MULTILINE)
    return [path for path in sorted((ROOT / "tests").glob("*/test_*.py")) if marked.search(path.read_text())]


def stage2(stage: Stage) -> int:
    """Those that repeat calls for the same bits come last, in a run of their own."""
    build(stage)
    files = [str(path.relative_to(ROOT)) for path in gpu_test_files()]
    if stage.options.device == "cpu":
        return stage.follow("collection", pytest(stage, *files, "-m", "gpu"), 300, print_and(stage.log))
    code = 0
    for name, what, limit in (("tests", "not same_bits", 400.0), ("same-bits", "same_bits", 120.0)):
        picked = f"({what}) and ({stage.options.pick})" if stage.options.pick else what
        workers = ["-n", str(stage.options.jobs), "--dist", "worksteal", "--max-worker-restart=500"]
        workers += ["-p", "benchmarks.gpu_plugin"]
        report = f"--junitxml={stage.out / f'{name}.xml'}"
        command = pytest(stage, *files, "-m", "gpu", "-v", "--tb=short", "-k", picked, report, *workers)
        ended = stage.follow(name, command, limit, TestLines(stage), OMP_NUM_THREADS="1", SEQKERN_TEST_LIMIT="100")
        code = code or (0 if ended == 5 else ended)  # 5: none was picked
    return code


class TestLines:
    """Every line of pytest to the log; failures, every twentieth part and the end to the terminal."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._told = stage, 0

    def __call__(self, line: str) -> None:
        self._stage.log(line)
        done = re.search(r"\[ *(\d+)%\]", line)
        percent = int(done[1]) if done else 0
        if re.search(r"\b(FAILED|ERROR|crashed)\b", line) or re.match(r"=+ .* in [\d.]+s", line):
            print(line[:240], flush=True)
        elif percent >= self._told + 5:
            self._told = percent
            self._stage.say(f"{percent} %")


# ---- 3 -------------------------------------------------------------------------------------------------------------


def stage3(stage: Stage) -> int:
    """One run and one JSON a group; what was timed when a group is cut off is in its JSON."""
    build(stage)
    options, code = stage.options, 0
    folder = stage.out / "results"
    if options.device == "cuda":
        import torch

        folder = stage.out / card_name(torch.cuda.get_device_name())
        folder.mkdir(exist_ok=True)
    for name, limit, file, pick in BENCHMARKS:
        command = pytest(stage, f"benchmarks/{file}", "--device", options.device, "-k", pick)
        if options.device == "cuda":
            path = folder / f"{name}.json"
            path.unlink(missing_ok=True)  # of an earlier run
            command += ["-v", "--tb=short", "--benchmark-only", "--benchmark-disable-gc", f"--benchmark-json={path}"]
        ended = stage.follow(name, command, limit, print_and(stage.log), SEQKERN_COMMIT=commit())
        code = code or ended
        if options.device == "cuda":
            for line in results(path):
                print(line, flush=True)
                stage.log(line)
    kept = [path for path in sorted(folder.glob("*.json")) if path.stat().st_size] if folder.exists() else []
    if kept:
        target = ROOT / "benchmarks" / "results" / folder.name
        target.mkdir(parents=True, exist_ok=True)
        for path in kept:
            shutil.copy(path, target)
        stage.say(f"{len(kept)} results in {target.relative_to(ROOT)} and {folder}")
    return code


def card_name(card: str) -> str:
    """As a folder of benchmarks/results: "NVIDIA H100 80GB HBM3" is h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower().replace("nvidia", "")).strip("-")


def results(path: Path) -> Iterator[str]:
    """A line for each case that a result file has timed; what was cut off in the middle is taken out of the file."""
    if not path.exists() or not path.stat().st_size:
        return
    stored = json.loads(path.read_text())
    timed = [each for each in stored["benchmarks"] if "milliseconds" in each["extra_info"]]
    if len(timed) < len(stored["benchmarks"]):
        path.write_text(json.dumps(stored | {"benchmarks": timed}, indent=4))
    for case in (each["extra_info"] for each in timed):
        peers = ", ".join(f"{name} {peer['speedup']:.2f}x" for name, peer in case["peers"].items())
        names = " ".join(case[key] for key in ("op", "shape", "dtype", "mode", "backend"))
        rates = f"{case['gflops_per_second'] / 1e3:.3g} TF/s, {case['gbytes_per_second']:.4g} GB/s"
        yield f"{names}: {case['milliseconds']:.3f} ms, {rates}; over {peers}"


# ---- all -----------------------------------------------------------------------------------------------------------


def pytest(stage: Stage, *arguments: str) -> list[str]:
    """On the CPU, where there is nothing for it to run, it only collects."""
    dry = ["--collect-only", "-q"] if stage.options.device == "cpu" else []
    return python("-m", "pytest", *arguments, "-p", "no:cacheprovider", *dry)


def print_and(log: Callable[[str], None]) -> Callable[[str], None]:
    def on_line(line: str) -> None:
        print(line[:240], flush=True)
        log(line)

    return on_line


STAGES = {1: stage1, 2: stage2, 3: stage3}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--stage", type=int, nargs="+", choices=STAGES, default=list(STAGES), help="which (default: all)"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default=os.environ.get("DEVICE", "cuda"),
        help="cpu: a dry run, stage 1 of the C++ kernels, stages 2 and 3 collect only",
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "build" / "gpu")))
    parser.add_argument("--limit", type=float, default=520, help="seconds that a stage may take (520)")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes at a time (12)")
    parser.add_argument("--no-build", action="store_true", help="take what was built")
    parser.add_argument("--case-limit", type=float, default=90, help="stage 1: seconds that a case may take (90)")
    parser.add_argument("--ops", help="stage 1: names of cases, with commas between")
    parser.add_argument("--dtypes", help="stage 1: bfloat16,float32,float16,float64")
    parser.add_argument("--backends", help="stage 1: triton,cuda")
    parser.add_argument("--cases", help="stage 1: a Python file whose CASES are run instead")
    parser.add_argument("--pick", help="stage 2: pytest's -k")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    code = 0
    for number in options.stage:
        stage = Stage(number, options)
        try:
            ended = STAGES[number](stage)
        except KeyboardInterrupt:
            stage.say("interrupted")
            ended = INTERRUPTED
        code = code or ended
        if ended == INTERRUPTED:
            break
        stage.say(f"stage {number} done, exit code {ended}")
    return code


if __name__ == "__main__":
    sys.exit(main())
