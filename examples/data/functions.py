"""What a function is called: syntax trees of the functions of Python's standard library.

The Python that runs, without its tests; PSF licence. A tree is a function as `ast` reads it, of ast's nodes. Its class
is the first word of the name, one of the 24 most frequent: `init` of `__init__`, `get` of `get_data` and `getData`. The
name is not in the tree: where a function calls itself, or its namesake of another class, it is "<own>". Docstrings are
left out.

A node's token is its kind, with what makes it: "BinOp.Add", "Compare.Is", "Name.Store:local", "Attribute:append",
"Constant:None". Names are what they stand for: "self", a parameter, a local or global name, or that builtin. Attributes
have their names where enough functions of the training part use them.

Trees are alike once rare details are gone: a tenth of the held-out files' trees then stand in the other parts. They are
left out, so that no held-out tree was seen. The tuning part is there to choose recipes on; the baselines'
regularisation is chosen on it. The other parts are left as they are.

python -m examples.data.functions      sizes, and a function
"""

from __future__ import annotations

import ast
import builtins
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import seqkern
from examples.data import no_collection
from seqkern import TreeSchedule

CLASSES = 24
LARGEST = 300  # nodes; 3 of 100 functions are larger
SHARES, PARTS = 10, {"held_out": range(2), "tuning": range(2, 4), "train": range(4, 10)}  # of the files' hashes
SKIPPED = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
# The standard libraries of Python 3.10 to 3.14; some distributions leave out idlelib, tkinter, lib2to3.
FILES, DISTINCT, KEPT = (350, 900), (8_000, 20_000), (2_500, 7_000)
UNKNOWN = "<unknown>"
BUILTINS = frozenset(dir(builtins))
MARKED = (
    ast.operator,
    ast.boolop,
    ast.unaryop,
    ast.cmpop,
    ast.Store,
    ast.Del,
)  # parts of their node's token, as is whether it is stored
Tree = tuple[list[int], list[str]]  # each node's parent, -1 of the first, the root; and token. Parents come first


@dataclass(frozen=True)
class Function:
    """file: of the standard library. parents: each node's, which comes before it; -1 of the first one, the root."""

    file: str
    name: str
    parents: list[int]
    tokens: list[int]
    label: int
    source: str

    def __len__(self) -> int:
        return len(self.parents)


@dataclass(frozen=True)
class Functions:
    vocabulary: list[str]  # of nodes, by number
    words: list[str]  # the classes, the most frequent first
    train: list[Function]
    tuning: list[Function]  # to choose a recipe on
    held_out: list[Function]  # each of other files; no tree is in the other parts


def first_word(name: str) -> str:
    """`get` of `get_data`, `getData` and `__get__`; `HTTP` begins `HTTPServer`. In small letters."""
    found = re.search(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return found[0].lower() if found else ""


def tree(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Tree | None:
    """The nodes from the root on, a parent before its children and those from left to right; None if too many."""
    of_names = _names(function)
    parents: list[int] = []
    tokens: list[str] = []
    waiting: list[tuple[ast.AST, int]] = [(function, -1)]
    while waiting:
        node, parent = waiting.pop()
        if len(parents) == LARGEST:
            return None
        token, children = type(node).__name__, []
        for field, value in ast.iter_fields(node):
            if isinstance(value, MARKED):
                token += f".{type(value).__name__}"
            elif isinstance(value, ast.AST) and not isinstance(value, ast.Load):
                children.append(value)
            elif isinstance(value, list) and field == "ops":
                token += "." + "/".join(type(operator).__name__ for operator in value)
            elif isinstance(value, list):
                documented = node is function and field == "body" and ast.get_docstring(function, clean=False)
                children += [child for child in value[bool(documented) :] if isinstance(child, ast.AST)]
        waiting += [(child, len(parents)) for child in reversed(children)]
        detail = _detail(node, of_names)
        tokens.append(f"{token}:{detail}" if detail else token)
        parents.append(parent)
    return parents, tokens


def _names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """What names stand for in a function; the function's own one comes last, it wins."""
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    found = {name.id: "local" for name in names if isinstance(name.ctx, ast.Store)}
    given = function.args
    found |= {a.arg: "parameter" for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    found |= {a.arg: "parameter" for a in (given.vararg, given.kwarg) if a}
    return found | {"self": "self", "cls": "cls", function.name: "<own>"}


def _detail(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id if node.id in BUILTINS else "global")
    if isinstance(node, ast.arg):
        return node.arg if node.arg in ("self", "cls") else ""
    if isinstance(node, ast.Attribute):
        return "<own>" if names.get(node.attr) == "<own>" else node.attr
    if isinstance(node, ast.Constant):
        value = node.value
        named = value is None or isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
        return str(value) if named else type(value).__name__
    return ""


def files() -> Iterator[tuple[str, bytes]]:
    """(name, source) of the standard library's files."""
    root = Path(ast.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not SKIPPED & {*name.parts[:-1]}:
            yield name.as_posix(), path.read_bytes()


@no_collection()
def load(least: int = 20) -> Functions:
    """Attributes, builtins and constants that fewer than `least` functions of the training part have lose their detail.

    Of functions with the same tree and the same first word, one is kept, before the split by a hash of the file's name.
    Words and vocabulary are those of the training part. Of the held-out functions those are kept whose trees, as
    numbers, are in neither of the other parts; and one of those with the same tree and the same first word.
    """
    distinct: dict[tuple[object, ...], tuple[str, str, str, Tree]] = {}
    count = 0
    for file, source in files():
        count += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings that new Pythons do not like
            module = ast.parse(source)
        lines = source.decode("utf-8", "replace").splitlines()
        for node in ast.walk(module):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found, word = tree(node), first_word(node.name)
                if found and word:
                    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                    key = (word, *found[0], *found[1])
                    distinct.setdefault(key, (file, node.name, text, found))
    parts: dict[str, list[tuple[str, str, str, Tree]]] = {name: [] for name in PARTS}
    for entry in distinct.values():
        number = zlib.crc32(entry[0].encode()) % SHARES
        parts[next(name for name, numbers in PARTS.items() if number in numbers)].append(entry)
    ranked = Counter(first_word(name) for _, name, *_ in parts["train"])
    words = sorted(ranked, key=lambda word: (-ranked[word], word))[:CLASSES]
    kept = {name: [e for e in part if first_word(e[1]) in words] for name, part in parts.items()}
    total = sum(map(len, kept.values()))
    for what, number, (low, high) in zip(
        ("files", "distinct functions", f"functions of {CLASSES} first words"), (count, len(distinct), total),
        (FILES, DISTINCT, KEPT), strict=True,
    ):  # fmt: skip
        if not low <= number <= high:
            raise RuntimeError(
                f"a standard library of {low} to {high} {what} was expected, got {number}: is "
                f"{Path(ast.__file__).parent} complete?"
            )
    seen = Counter(token for *_, (_, tokens) in kept["train"] for token in {*tokens})
    frequent = {token for token, times in seen.items() if times >= least}
    plain = {token.partition(":")[0] for token in seen}
    vocabulary = [UNKNOWN, *sorted(frequent | plain)]
    numbers = {token: number for number, token in enumerate(vocabulary)}

    def numbered(token: str) -> int:
        return numbers.get(token, numbers.get(token.partition(":")[0], 0))

    def made(entry: tuple[str, str, str, Tree]) -> Function:
        file, name, source, (parents, tokens) = entry
        return Function(file, name, parents, [*map(numbered, tokens)], words.index(first_word(name)), source)

    made_of = {name: [*map(made, part)] for name, part in kept.items()}
    known = {(*f.parents, *f.tokens) for name in ("train", "tuning") for f in made_of[name]}
    unseen: dict[tuple[int, ...], Function] = {}
    for f in made_of["held_out"]:
        if (*f.parents, *f.tokens) not in known:
            unseen.setdefault((f.label, *f.parents, *f.tokens), f)
    return Functions(vocabulary, words, made_of["train"], made_of["tuning"], [*unseen.values()])


def pruned(function: Function, probability: float, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Parents and tokens without subtrees that are drawn: every node but the root, with all that is below it."""
    stays = (torch.rand(len(function), generator=generator) >= probability).tolist()
    places, parents, tokens = {0: 0}, [-1], [function.tokens[0]]
    for node, parent in enumerate(function.parents[1:], 1):
        if stays[node] and parent in places:
            places[node] = len(parents)
            parents.append(places[parent])
            tokens.append(function.tokens[node])
    return parents, tokens


def left_child_right_sibling(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """The binary tree that stands for a tree of any number of children: parents and slots.

    A node has its first child in slot 0 and its next sibling in slot 1. The order of the children is kept.
    """
    last: dict[int, int] = {}  # child of each node
    found: tuple[list[int], list[int]] = ([], [])
    for node, parent in enumerate(parents):
        found[0].append(last.get(parent, parent) if parent >= 0 else -1)
        found[1].append(int(parent in last and parent >= 0))
        last[parent] = node
    return found


def batch(
    functions: Sequence[Function], binary: bool, probability: float = 0.0, generator: torch.Generator | None = None
) -> tuple[Tensor, TreeSchedule, Tensor, Tensor]:
    """(tokens, schedule, labels, lengths): the nodes of all trees one after another, and how many each has.

    binary: left-child right-sibling. probability: of each subtree to be left out, drawn from the generator.
    """
    if generator is None:
        trees = [(function.parents, function.tokens) for function in functions]
    else:
        trees = [pruned(function, probability, generator) for function in functions]
    lengths = torch.tensor([len(parents) for parents, _ in trees])
    tokens = torch.tensor([token for _, tokens in trees for token in tokens])
    slots = None
    if binary:
        pairs = [left_child_right_sibling(parents) for parents, _ in trees]
        of_nodes, slots = ([number for pair in pairs for number in pair[which]] for which in (0, 1))
    else:
        of_nodes = [parent for parents, _ in trees for parent in parents]
    schedule = seqkern.TreeSchedule.from_parents(of_nodes, lengths, slots=slots)
    return tokens, schedule, torch.tensor([function.label for function in functions]), lengths


def bags(functions: Sequence[Function], size: int) -> Tensor:
    """log(1 + how often each token is in the function), (N, size): the function without its structure."""
    return torch.stack([torch.bincount(torch.tensor(f.tokens), minlength=size).double().log1p() for f in functions])


if __name__ == "__main__":
    found = load()
    print(f"{len(found.vocabulary)} tokens; words: {', '.join(found.words)}")
    for name in PARTS:
        part: list[Function] = getattr(found, name)
        print(f"{name}: {len(part)} functions, {sum(map(len, part))} nodes")
    shortest = min(found.train, key=len)
    print(shortest.source, [found.vocabulary[token] for token in shortest.tokens], shortest.parents)
