"""Compiles the project's CUDA sources for the host executor: `library(sanitize)` for all of `csrc/**/*.cu`.

Ninja does the incremental work, in build/simt. With `sanitize`, kernels are compiled with AddressSanitizer and
UndefinedBehaviorSanitizer, and Python has to be started with `environment(...)`. With `race`, every access to memory
is looked at by simt_race.cpp.

    python tests/simt/build.py [--sanitize | --race]                        prints the library's path
    python tests/simt/build.py [--sanitize | --race] -- script.py ...       runs Python with it
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "simt"

TORCH_TARGET_VERSION = "0x020a000000000000"  # as setup.py
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"
COMMON = (
    "-std=gnu++17 -g1 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -fno-omit-frame-pointer -ffp-contract=fast "
    "-fno-math-errno -Wall -Wno-unknown-pragmas -Wno-unused-function -Wno-psabi -DSK_SIMT"
)


def torch_root() -> Path:
    """Where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the host executor is compiled against torch's headers: install torch first")
    return Path(spec.submodule_search_locations[0])


def library(sanitize: bool = False, race: bool = False) -> Path:
    """All CUDA kernels of the project, registered under the CPU key when the library is loaded."""
    # In the place of launch.cu, which calls CUDA's runtime, is simt_host.cpp.
    sources = sorted(path for path in CSRC.rglob("*.cu") if path.name != "launch.cu")
    return build("kernels", sources, sanitize, race)


def build(name: str, sources: Sequence[Path], sanitize: bool = False, race: bool = False) -> Path:
    """The sources and the executor as one library."""
    if sanitize and race:
        raise ValueError("one of sanitize and race: AddressSanitizer and the search for races need their own builds")
    folder = BUILD / ("asan" if sanitize else "race" if race else "plain")
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"libseqkern_{name}.so"
    torch_dir = torch_root()
    flags = f"-O1 {SANITIZERS}" if sanitize else "-O1 -fsanitize=thread" if race else "-O2"
    define = "-DSIMT_ASAN" if sanitize else "-DSIMT_RACE" if race else ""
    torch_flags = f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION} -isystem {word(torch_dir / 'include')}"
    torch_flags += f" -isystem {word(torch_dir / 'include/torch/csrc/api/include')}"
    libraries = f"-shared -L{word(torch_dir / 'lib')} -ltorch_cpu"
    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"includes = -I{word(HERE)} -I{word(CSRC)} -I{word(CSRC / 'common')}",
        "rule compile",
        f"  command = $cxx -x c++ {COMMON} $includes $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = simt $out",
        "rule link",
        f"  command = $cxx $in -o $out {SANITIZERS if sanitize else ''} {libraries}",
        "  description = link $out",
    ]
    objects = []
    # The executor itself is not instrumented: it tells the sanitizer what it touches for a kernel.
    for source in sorted(HERE.glob("simt_*.cpp")):
        objects.append(f"{source.stem}.o")
        extra = f"-O2 -ftree-vectorize {define} {torch_flags if source.stem == 'simt_host' else ''}"
        lines += [f"build {objects[-1]}: compile {quote(source)}", f"  extra = {extra}"]
    for source in map(Path.resolve, sources):
        where = source.relative_to(ROOT).with_suffix("")
        objects.append(f"{'_'.join(where.parts)}.o")
        lines += [f"build {objects[-1]}: compile {quote(source)}", f"  extra = {flags} {define} {torch_flags}"]
    lines += [f"build {output.name}: link {' '.join(objects)}", f"default {output.name}", ""]
    text = "\n".join(lines)
    script = folder / f"{name}.ninja"
    import ninja

    command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(folder), "-f", script.name]
    if jobs := os.environ.get("MAX_JOBS"):
        command += ["-j", jobs]
    with (folder / "lock").open("w") as lock:  # several test processes may want it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not script.exists() or script.read_text() != text:
            script.write_text(text)
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the kernels do not compile for the host executor:\n{result.stdout}{result.stderr}")
    return output


def environment(path: Path, **settings: object) -> dict[str, str]:
    """What a process that loads the library `path` is started with; `seed=3` becomes SEQKERN_SIMT_SEED=3."""
    result = os.environ | {"SEQKERN_SIMT": str(path), "PYTHONPATH": str(ROOT)}
    result |= {f"SEQKERN_SIMT_{name.upper()}": str(value) for name, value in settings.items()}
    if path.parent.name == "asan":
        # libstdc++ too: the sanitizer looks for the functions that throw when it starts.
        preload = [compiler_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
        result["LD_PRELOAD"] = " ".join(preload)
        result["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
        result["UBSAN_OPTIONS"] = "print_stacktrace=1"
    return result


def run(
    *arguments: object, sanitize: bool = True, race: bool = False, timeout: float = 1200, **settings: object
) -> str:
    """Runs `python arguments` in the executor, for the tests' fixture `simt`; what it printed."""
    path = library(sanitize=sanitize and not race, race=race)
    variables = environment(path, **settings) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    result = subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def compiler_library(name: str) -> str:
    command = [*os.environ.get("CXX", "g++").split(), f"-print-file-name={name}"]
    return str(Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()).resolve())


def quote(path: Path) -> str:
    """A path as ninja reads it where it names a file."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def word(path: Path) -> str:
    """A path as the shell reads it in a command that ninja writes."""
    return shlex.quote(str(path)).replace("$", "$$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sanitize", action="store_true")
    kind.add_argument("--race", action="store_true")
    parser.add_argument("arguments", nargs="*", help="of Python, after --")
    options = parser.parse_args()
    path = library(options.sanitize, options.race)
    if not options.arguments:
        print(path)
        return 0
    return subprocess.run([sys.executable, *options.arguments], env=environment(path), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
