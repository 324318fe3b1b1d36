"""What the manual's pages are made of beside their text: tables from the library, and links out of docs/.

Five directives write tables while the manual is built, so that no figure in them is typed by hand:

- `kernels`: backends and tiers of functions, from `seqkern._slices`;
- `names`: what a module's `__all__` names, with the first sentence of each docstring;
- `cost`: FLOP and bytes of an op's `cost()`, with formulas that are compared with it;
- `errors`: what `seqkern.testing.verify` finds on this machine;
- `measured`: ratios from the results under benchmarks/results, made by benchmarks/pages.py.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from benchmarks import pages
from seqkern import _library
from seqkern._slices import FUNCTIONS
from seqkern.testing import verify

ROOT = Path(__file__).parent.parent
logger = logging.getLogger(__name__)


class Table(SphinxDirective):
    """A directive whose content becomes Markdown. `markdown` raises ValueError for content that is wrong."""

    has_content = True
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        try:
            text = self.markdown()
        except (ValueError, AttributeError, ImportError, NameError, SyntaxError, TypeError) as error:
            raise self.error(f"{self.name}: {error}") from error
        return self.parse_text_to_nodes(text)

    def markdown(self) -> str:
        raise NotImplementedError

    @property
    def words(self) -> list[str]:
        return " ".join(self.content).split()

    @property
    def lines(self) -> list[str]:
        return [line for line in self.content if line.strip()]


# ---- kernels ------------------------------------------------------------------------------------------------------


class Kernels(Table):
    """Functions, a row each: which backends have kernels for them."""

    def markdown(self) -> str:
        head = ("function", "CPU, C++", "its own bfloat16 kernels", "Triton", "CUDA C++")
        rows = [[f"`{name}`", *kernels_of(name)] for name in self.words]
        return pages.markdown(head, rows, left=tuple(range(len(head))))


def kernels_of(function: str) -> list[str]:
    """Cells of a function: CPU tiers, tiers with bfloat16 kernels of their own, Triton, CUDA C++."""
    if function not in FUNCTIONS:
        raise ValueError(f"{function} is not a function of seqkern._slices")
    slice = FUNCTIONS[function]
    common = ", ".join(isa for isa in _library.ISAS if isa not in _library.BF16_ISAS)
    own = ", ".join(_library.BF16_ISAS) if slice.own_bf16 else "none"
    return [common, own, "yes", "yes" if slice.cuda_ops else "raises"]


# ---- names ----------------------------------------------------------------------------------------------------------


class Names(Table):
    """`__all__` of a module: a link to each name, and the first sentence of its docstring."""

    required_arguments = 1
    optional_arguments = 0

    def markdown(self) -> str:
        module = importlib.import_module(self.arguments[0])
        rows = [[f"{{py:obj}}`{self.arguments[0]}.{name}`", _summary(getattr(module, name))] for name in module.__all__]
        return pages.markdown(("name", "what it is"), rows, left=(0, 1))


def _summary(member: Any) -> str:
    """For a table; of a thing without a docstring of its own nothing."""
    text = (inspect.getdoc(member) or "") if callable(member) or inspect.ismodule(member) else ""
    first = re.split(r"(?<=\.)\s|\n\n", text.replace("|", "\\|"))[0].replace("\n", " ")
    return first.rstrip(":.") + "." if first else ""


# ---- costs --------------------------------------------------------------------------------------------------------


class CostTable(Table):
    """`cost` of a module of seqkern.ops at the sizes of the first line, and formulas, which must give the same.

    Content: `name=number ...` (the arguments), then lines `LABEL [options]: FLOP formula; bytes formula`, where `size`
    is the number of bytes of an element, `wide` that of an accumulator's.
    """

    required_arguments = 1
    optional_arguments = 0

    def markdown(self) -> str:
        cost = importlib.import_module(f"seqkern.ops.{self.arguments[0]}").cost
        first, *lines = self.lines
        sizes = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", first)}
        rows = []
        for line in lines:
            label, _, formulas = line.partition(": ")
            title, options = _options(label)
            flops, _, traffic = (part.strip() for part in formulas.partition(";"))
            self._check(cost, sizes, options, (flops, traffic), line)
            found = cost(**sizes, dtype=torch.float32, **options)
            rows.append([title, f"`{flops}`", f"{found.flops:,}", f"`{traffic}`", f"{found.bytes:,}"])
        given = ", ".join(f"{name} = {number:,}" for name, number in sizes.items())
        wide = ", `wide` bytes of an accumulator" if any("wide" in line for line in lines) else ""
        text = f"`seqkern.ops.{self.arguments[0]}.cost`; `size` bytes of an element{wide}. "
        text += f"In numbers for float32, {given}.\n\n"
        return text + pages.markdown(("call", "FLOP", "", "bytes, at least", ""), rows, left=(0, 1, 3))

    @staticmethod
    def _check(
        cost: Callable[..., Any], sizes: dict[str, int], options: dict[str, Any], formulas: tuple[str, str], line: str
    ) -> None:
        """At three sizes and for two dtypes."""
        for step in range(3):
            at = {name: number + step * (i + 1) for i, (name, number) in enumerate(sizes.items())}
            for dtype in (torch.float32, torch.bfloat16):
                found = cost(**at, dtype=dtype, **options)
                names = at | {"size": dtype.itemsize, "wide": 4}
                told = tuple(eval(formula, {"__builtins__": {}}, names) for formula in formulas)
                if told != (found.flops, found.bytes):
                    raise ValueError(f"{line!r} gives {told} at {names}, cost() {(found.flops, found.bytes)}")


def _options(label: str) -> tuple[str, dict[str, Any]]:
    """ "backward [backward=True]" as title and keyword arguments."""
    match = re.fullmatch(r"(.*?)(?: \[(.*)\])?", label)
    assert match is not None
    pairs = re.findall(r"(\w+)=([^, ]+)", match[2] or "")
    return match[1], {name: ast.literal_eval(value) for name, value in pairs}


# ---- errors -------------------------------------------------------------------------------------------------------


class Errors(Table):
    """Cases of `seqkern.testing.verify`: of each the tensor that is nearest to its bound."""

    def markdown(self) -> str:
        rows = []
        for name in self.words:
            for dtype in (torch.float32, torch.bfloat16):
                rows.append([f"`{name}`", str(dtype).removeprefix("torch."), *_worst(name, dtype)])
        text = (
            f"Measured when this page was built, in the CPU tier `{_library.cpu_isa()}`: of all outputs and gradients "
            "of a case of `seqkern.testing.verify` the one that is nearest to its bound.\n\n"
        )
        head = ("case", "dtype", "tensor", "largest error", "torch's", "bound", "error / bound")
        return text + pages.markdown(head, rows, left=(0, 1, 2))


@functools.cache
def _worst(name: str, dtype: torch.dtype) -> tuple[str, ...]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small cases, for which threads on a busy machine wait for one another
    try:
        reports = verify(name, dtype)
    finally:
        torch.set_num_threads(threads)
    worst = max(reports, key=lambda report: report.share_of_bound)
    if not worst.passed:
        raise ValueError(f"the error rule is broken: {worst}")
    told = worst.name.removeprefix(name).strip() or "output"
    figures = (f"{x:.3g}" for x in (worst.error, worst.torch_error, worst.bound))
    return told, *figures, f"{worst.share_of_bound:.2f}"


# ---- stored results -----------------------------------------------------------------------------------------------


class Measured(Table):
    """Names of ops as in the stored results, a line each: their ratios on every machine, and how many are slower."""

    def markdown(self) -> str:
        by_machine = _results()
        known = {key[0] for cases in by_machine.values() for key in cases}
        ops = self.lines
        if missing := [op for op in ops if op not in known]:
            raise ValueError(f"no stored result of {', '.join(missing)}")
        chosen = [case for cases in by_machine.values() for key, case in cases.items() if key[0] in ops]
        outcomes = [pages.outcome(case) for case in chosen]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("faster", "even", "slower"))
        link = posixpath.relpath("performance", posixpath.dirname(self.env.docname) or ".")
        text = (
            "Time of the best peer / time of seqkern, over all stored shapes and passes: lowest, **median**, highest. "
            "Above 1 seqkern is faster. CPU, 2 threads; no GPU was measured.\n\n"
        )
        return (
            text
            + pages.overview(by_machine, pages.COLUMNS, ops)
            + f"\nOf these {len(chosen):,} cases: {counts}. Each of them, with its spread: [Performance]({link}.md).\n"
        )


@functools.cache
def _results() -> dict[str, pages.Cases]:
    """Cases of README's machines on two threads."""
    runs = pages.load()
    by_machine = {machine: pages.latest(run for run in runs if run.machine == machine) for machine in pages.COLUMNS}
    return {
        machine: {key: case for key, case in cases.items() if key[-1] == "2 threads"}
        for machine, cases in by_machine.items()
    }


# ---- pages from outside docs/, and links to what lies there ---------------------------------------------------------

# Files of the repository that are pages of the manual.
PAGES = {
    "README.md": "docs/index.md",
    "CONTRIBUTING.md": "docs/contributing.md",
    "CHANGELOG.md": "docs/changelog.md",
    "benchmarks/RESULTS.md": "docs/performance.md",
    "benchmarks/GPU.md": "docs/gpu.md",
    "seqkern/reference": "docs/reference.md",
}
INCLUDED = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]\n]*(?:\n[^\]\n]*)?)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```|^~~~.*?^~~~)", re.MULTILINE | re.DOTALL)


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Puts included files in, and turns links to files outside docs/ into links to pages, or into their text."""
    here = f"docs/{docname}.md"
    if not (ROOT / here).exists():
        return

    def included(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        text = relinked((ROOT / path).read_text(), path, here, docname)
        return _one_level_down(text) if source[0].startswith("# ") else text

    text = INCLUDED.sub(included, source[0])
    source[0] = relinked(text, here, here, docname) if text == source[0] else text


def _one_level_down(text: str) -> str:
    """Its headings under those of a page that has a title of its own."""
    parts = CODE.split(text)
    return "".join(part if i % 2 else re.sub(r"^#", "##", part, flags=re.MULTILINE) for i, part in enumerate(parts))


def relinked(text: str, origin: str, here: str, docname: str) -> str:
    """The text of the file `origin` as a part of the page `here`."""

    def link(match: re.Match[str]) -> str:
        words, (path, _, anchor) = match[1], match[2].partition("#")
        if "://" in path or not path:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if not (ROOT / target).exists():
            logger.warning("link to %s, which is not there", match[2], location=docname)
        page = PAGES.get(target, target)
        if not (page.startswith("docs/") and page.endswith(".md")):
            return words
        near = posixpath.relpath(page, posixpath.dirname(here))
        return f"[{words}]({near}{'#' + anchor if anchor else ''})"

    parts = CODE.split(text)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


# ---- docstrings -----------------------------------------------------------------------------------------------------


def as_written(app: Sphinx, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `code` and **bold**: what else reStructuredText reads into * and | is escaped.

    Examples stay, and indented equations, which become literal blocks. Names of arguments that take two lines become
    one, for napoleon.
    """
    found: list[str] = []
    example, block = False, -1  # within lines of >>>; indentation of the line before a block
    for line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        example = bool(text) and (example or text.startswith(">>> "))
        if text and indent <= block:
            block = -1
        below = [told for told in found if told.strip()][-1:]  # the last line with text
        if text and block < 0 and indent and below and below[0][0] != " " and found[-1] == "" and not example:
            found += ["::", ""] if not below[0].endswith("::") else []
            block = 0
        if not example and block < 0:
            parts = re.split(r"(`[^`]*`|\*\*\w[^*]*\*\*)", line)
            line = "".join(part if i % 2 else re.sub(r"([*|])", r"\\\1", part) for i, part in enumerate(parts))
            if found and found[-1].strip() == "Raises:" and ": " not in text and indent == 4:  # "As `lstm`."
                found[-1] = f"Raises: {text[:1].lower()}{text[1:]}"
                continue
            if found and re.fullmatch(r"    (\w+, )*\w+,", found[-1]) and indent == 8:
                found[-1] += f" {text}"
                continue
            block = indent if text.endswith("::") else -1
        found.append(line)
    lines[:] = found


def _one_signature() -> None:
    """Of a function with overloads, which tell type checkers what an option changes, the manual shows the whole one."""
    analyze = ModuleAnalyzer.analyze

    def without_overloads(self: ModuleAnalyzer) -> None:
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = without_overloads  # type: ignore[method-assign]


def setup(app: Sphinx) -> dict[str, Any]:
    _one_signature()
    directives = {"kernels": Kernels, "names": Names, "cost": CostTable, "errors": Errors, "measured": Measured}
    for name, directive in directives.items():
        app.add_directive(name, directive)
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", as_written, priority=400)  # before napoleon
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
