"""Proofs that need not be repeated: tests that take minutes and depend on a few sources, which seldom change.

Those of `PROOFS` run the CUDA kernels in the host executor, compile Triton's kernels ahead of time, or read the machine
code of every GPU target. `make prove` runs them and writes to tests/proven.json a hash of all the sources that a module
depends on, without docstrings; while the hash is the same, `make test` skips that module's long tests (those with a
fixture of `LONG`). A changed source, or another version in constraints.txt, and they run. `pytest --unchanged` runs
them in any case.

    python tests/proven.py                 what is proven, and what has changed
    python tests/proven.py MODULE          the sources of a module
    python tests/proven.py --current MODULE ...     whether all are proven: the exit code
    python tests/proven.py --prove [--all]          runs what is not proven (all), and writes the hashes
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path("tests") / "proven.json"
# Fixtures of tests that a proof stands for; the other tests of a module are short and always run.
LONG = {"simt", "simt_build", "compiled_ahead", "every_target"}


@dataclass(frozen=True)
class Proof:
    """What a test module depends on beside the Python modules that it imports and the headers of its sources."""

    files: tuple[str, ...] = ()  # patterns: sources in C++, scripts
    modules: tuple[str, ...] = ()  # Python modules that are imported by a name made at run time


EXECUTOR = ("tests/simt/build.py", "tests/simt/*.h", "tests/simt/*.c*")
ATTENTION = Proof((*EXECUTOR, "csrc/attention/**/*.cu"), ("seqkern._attention_cuda",))
RECURRENT = Proof((*EXECUTOR, "csrc/rnn/**/*.cu"), ("seqkern.kernels.rnn", "seqkern._rnn_cuda"))
TRITON = ("kernels/**/*.py",)
PROOFS = {
    "test_simt": Proof(EXECUTOR),
    "test_simt_hopper": Proof(EXECUTOR),
    "test_attention_cuda": ATTENTION,
    "test_attention_forward_cuda": ATTENTION,
    "test_attention_forward_hopper_cuda": ATTENTION,
    "test_attention_backward_cuda": ATTENTION,
    "test_attention_backward_hopper_cuda": ATTENTION,
    "test_attention_decode_cuda": ATTENTION,
    "test_layer_norm_cuda": Proof((*EXECUTOR, "csrc/layer_norm/**/*.cu")),
    "test_rnn_cuda": RECURRENT,
    "test_rnn_cuda_api": RECURRENT,
    "test_rnn_scan_cuda": RECURRENT,
    "test_triton_aot": Proof(TRITON),
    "test_triton_driver": Proof((*TRITON, "tests/**/triton_faults.py", "tests/**/triton_launches.py")),
    "test_cuda_build": Proof(("csrc/**/*.cu", "setup.py", "setup_cuda.py")),
}
# Part of every proof: versions, and the schemas that the kernels are called by.
ALWAYS = ("constraints.txt", "csrc/cuda_ops.cpp")
# Part of none: words for wrong keywords, and the list of slices, which every new op makes longer; short tests read
# both. And the loop of generation and whole models, which call the kernels and which none of their tests calls.
NEVER = (
    "seqkern/_beam_search.py", "seqkern/_keywords.py", "seqkern/_slices.py", "seqkern/_states.py",
    "seqkern/generation.py", "seqkern/models/*.py",
)  # fmt: skip


# ---- the sources of a module ---------------------------------------------------------------------------------------


@functools.cache
def sources(module: str, root: Path = ROOT) -> tuple[Path, ...]:
    """Every file that the module's long tests depend on, with all that these include and import."""
    proof = PROOFS[module]
    files = {file for pattern in (*ALWAYS, *proof.files) for file in _glob(root, pattern)}
    files |= {_test_module(module, root)}
    files |= {_module(name, root) for name in proof.modules}
    never = {file for pattern in NEVER for file in _glob(root, pattern)}
    found: set[Path] = set()
    waiting = [file for file in files if file is not None]
    while waiting:
        if (file := waiting.pop()) in found or file in never:
            continue
        found.add(file)
        if file.suffix in (".cu", ".cuh", ".cpp", ".h"):
            waiting += _included(file, root)
        elif file.suffix == ".py":
            waiting += _imported(file, root)
    return tuple(sorted(found))


def _glob(root: Path, pattern: str) -> list[Path]:
    return [file for file in root.glob(pattern) if file.is_file() and "__pycache__" not in file.parts]


@functools.cache
def _included(file: Path, root: Path) -> list[Path]:
    """The project's headers that a source includes: from its own folder or those that the compilers are given."""
    folders = (file.parent, root / "csrc", root / "csrc" / "common", root / "tests" / "simt")
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(), re.MULTILINE)
    places = ([(folder / name).resolve() for folder in folders if (folder / name).is_file()] for name in names)
    return [found[0] for found in places if found]


@functools.cache
def _imported(file: Path, root: Path) -> list[Path]:
    """The project's modules that a Python file imports, or names in a string to import them later.

    Of a package's `__init__.py` only what is asked for counts: `from seqkern import reference` brings no op with it.
    """
    tree = ast.parse(file.read_text())
    found: list[Path] = []
    within = _name(file, root).split(".")
    package = within if file.name == "__init__.py" else within[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            names = [(".".join([*parent, *filter(None, [node.module])]), alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "seqkern":
            names = [("seqkern", node.attr)]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"seqkern(\.\w+)+", str(node.value)):
            names = [(str(node.value), "")]
        else:
            continue
        for module, name in names:
            found += _resolved(module, name, root)
    return found


def _resolved(module: str, name: str, root: Path) -> Iterator[Path]:
    """The file of `name` in a module: a submodule, or where the package's own file has it from."""
    if name and (submodule := _module(f"{module}.{name}", root)):
        yield submodule
        return
    file = _module(module, root)
    # a package itself, `import seqkern`, or a folder without a file of its own, `seqkern.kernels`
    if file is None or (not name and module == "seqkern") or (name and (file.parent / name).is_dir()):
        return
    origin = _origins(file, root).get(name) if file.name == "__init__.py" else None
    if origin is None:
        yield file
    else:
        yield from _resolved(*origin, root)


@functools.cache
def _origins(file: Path, root: Path) -> dict[str, tuple[str, str]]:
    """The names that a package's `__init__.py` imports from its modules, and from which."""
    imports = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom))
    package = _name(file, root).split(".")
    return {
        alias.asname or alias.name: (
            ".".join([*(package[: len(package) - node.level + 1] if node.level else []), *filter(None, [node.module])]),
            alias.name,
        )
        for node in imports
        for alias in node.names
    }


def _name(file: Path, root: Path) -> str:
    """A file's module name: tests by their own."""
    parts = list(file.relative_to(root).with_suffix("").parts)
    if parts[0] == "tests":
        return parts[-1]
    parts = ["seqkern", *parts] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _module(name: str, root: Path) -> Path | None:
    """The file of one of the project's modules; None for others."""
    package, _, rest = name.partition(".")
    if package == "seqkern":
        path = root.joinpath(*name.replace("seqkern.kernels", "kernels", 1).split("."))
        places = (path.with_suffix(".py"), path / "__init__.py")
        return next((place for place in places if place.is_file()), None)
    return None if rest else _test_module(package, root)


def _test_module(name: str, root: Path) -> Path | None:
    return next(iter(sorted((root / "tests").glob(f"**/{name}.py"))), None)


@functools.cache
def _content(file: Path) -> bytes:
    """A source without its docstrings: what they say changes no proof."""
    if file.suffix != ".py":
        return file.read_bytes()
    lines = file.read_bytes().splitlines(keepends=True)
    for node in ast.walk(ast.parse(b"".join(lines))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [b""] * (text.end_lineno - text.lineno + 1)
    return b"".join(lines)


def digest(module: str, root: Path = ROOT) -> str:
    """Of the names of a module's sources, those in tests/ without their folders, and of what they hold."""
    lines = []
    for file in sources(module, root):
        relative = file.relative_to(root)
        name = relative.name if relative.parts[0] == "tests" else relative.as_posix()
        lines.append(f"{name} {hashlib.sha256(_content(file)).hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


# ---- what is proven ------------------------------------------------------------------------------------------------


def recorded(root: Path = ROOT) -> dict[str, str]:
    path = root / TABLE
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


@functools.cache
def is_proven(module: str, root: Path = ROOT) -> bool:
    return module in PROOFS and recorded(root).get(module) == digest(module, root)


def stands_for(module: str, fixtures: Iterable[str]) -> bool:
    """Whether the proof of a module stands for a test of it with these fixtures."""
    return module in PROOFS and not LONG.isdisjoint(fixtures)


def reason(module: str) -> str:
    """Why a test is skipped."""
    return (
        f"proven: none of the {len(sources(module))} sources of {module} changed since `make prove` "
        f"(tests/proven.py); --unchanged runs it"
    )


class _Outcomes:
    """A plugin of pytest that notes how the long tests of each module ended."""

    def __init__(self) -> None:
        self.passed: dict[str, int] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        module = Path(report.nodeid.partition("::")[0]).stem
        if report.failed:
            self.failed.add(module)
        elif report.when == "call" and report.passed:
            self.passed[module] = self.passed.get(module, 0) + 1
        elif report.skipped and any(name == "proof" for name, _ in report.user_properties):  # it did not take place
            self.failed.add(module)


def prove(modules: list[str], arguments: list[str]) -> int:
    """Runs the modules' tests and writes the hashes of those that pass."""
    import pytest

    before = {module: digest(module) for module in modules}
    files = [str(_test_module(module, ROOT)) for module in modules]
    outcomes = _Outcomes()
    code = pytest.main(["--unchanged", *arguments, *files], plugins=[outcomes])
    sources.cache_clear()
    right = [m for m in modules if outcomes.passed.get(m) and m not in outcomes.failed and digest(m) == before[m]]
    if code in (0, 1):  # neither interrupted nor lost
        table = recorded() | {module: before[module] for module in right}
        (ROOT / TABLE).write_text(json.dumps({m: table[m] for m in sorted(table) if m in PROOFS}, indent=2) + "\n")
        print(f"proven: {', '.join(right) or 'nothing'}")
    for module in sorted(set(modules).difference(right)):
        print(f"not proven: {module}")
    return int(code) or int(len(right) < len(modules))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--current", action="store_true", help="tell by the exit code whether all are proven")
    parser.add_argument("--prove", action="store_true", help="run what is not proven and write the hashes")
    parser.add_argument("--all", action="store_true", help="with --prove: run what is proven, too")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="the test modules; all that have a proof")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="with --prove: more arguments for pytest")
    options = parser.parse_args()
    if unknown := set(options.modules).difference(PROOFS):
        parser.error(f"no proof of {', '.join(sorted(unknown))}; there are {', '.join(PROOFS)}")
    modules = options.modules or list(PROOFS)
    if options.prove:
        wanted = [module for module in modules if options.all or not is_proven(module)]
        return prove(wanted, shlex.split(options.pytest)) if wanted else 0
    if options.current:
        return int(not all(map(is_proven, modules)))
    if options.modules:
        for file in sorted({file for module in modules for file in sources(module)}):
            print(file.relative_to(ROOT))
        return 0
    for module in modules:
        state = "proven" if is_proven(module) else "changed" if module in recorded() else "not proven"
        print(f"{module:40} {state:12} {len(sources(module))} sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
