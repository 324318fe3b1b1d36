"""What a name is for: the roles of identifiers in Python's standard library, read off its syntax trees.

The top-level modules of the Python that runs, PSF licence. A sequence is a logical line, cut into tokens by `tokenize`;
`ast` says whether an identifier is loaded, stored, an attribute, a parameter or a keyword argument. Other identifiers,
those that `def`, `class`, `import` and their like name, are "other". The line alone decides: `total` is stored in
`total = 0`, loaded in `f(total)` and a keyword argument in `f(total=0)`, so a tagger must look to the right.

Lines are alike once rare names are "<name>": a quarter of those of the held-out files then stand in the training part.
They are left out, so that no held-out line was seen. There is no part to tune on.
"""

from __future__ import annotations

import ast
import io
import keyword
import tokenize
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples.data import no_collection

ROLES = ("load", "attribute", "store", "parameter", "keyword argument", "other")
IGNORED = -100  # the label of tokens that are no identifiers
PAD, NAME, NUMBER, STRING = range(4)
VOCABULARY = ("<pad>", "<name>", "<number>", "<string>")  # the first numbers; "<name>" are rare identifiers
LONGEST = 64  # tokens; longer lines are tables of constants for the most part
HELD_OUT = 10  # one file of so many
FILES, IDENTIFIERS = (120, 240), (80_000, 200_000)  # the standard libraries of Python 3.10 to 3.14, and some room
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
# Python 3.12 and later cut f-strings (3.14: t-strings) into tokens. Here each is one string, as before.
_OPENS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")} - {None}
_CLOSES = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")} - {None}
_STRINGS = tuple(getattr(ast, name) for name in ("JoinedStr", "TemplateStr") if hasattr(ast, name))


@dataclass(frozen=True)
class Line:
    file: str
    tokens: tuple[str, ...]  # names, keywords and operators as they are, "<number>", "<string>"
    roles: tuple[int, ...]  # of each token, IGNORED where it is no identifier


@dataclass(frozen=True)
class Part:
    """Lines as rows of token numbers (N, T) with padding, their lengths (N,) and roles (N, T)."""

    tokens: Tensor
    lengths: Tensor
    roles: Tensor
    lines: list[Line]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch, (tokens, roles, lengths), as long as its longest line."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        return self.tokens[rows, :longest], self.roles[rows, :longest], lengths


@dataclass(frozen=True)
class Identifiers:
    vocabulary: list[str]  # by number
    train: Part
    held_out: Part  # of other files; as numbers, no line is in the training part or comes twice


def roles(tree: ast.AST) -> Iterator[tuple[tuple[int, int], int]]:
    """((line, byte), role) of the identifiers in a module that have one. Strings that contain code are left out."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _STRINGS):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Del):
            yield (node.lineno, node.col_offset), ROLES.index("store" if isinstance(node.ctx, ast.Store) else "load")
        elif isinstance(node, ast.Attribute) and node.end_lineno and node.end_col_offset:
            yield (node.end_lineno, node.end_col_offset - len(node.attr.encode())), ROLES.index("attribute")
        elif isinstance(node, ast.arg):
            yield (node.lineno, node.col_offset), ROLES.index("parameter")
        elif isinstance(node, ast.keyword) and node.arg:
            yield (node.lineno, node.col_offset), ROLES.index("keyword argument")


def lines(file: str, source: str) -> Iterator[Line]:
    """The logical lines of a module that have identifiers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings that new Pythons do not like
        tree = ast.parse(source)
    known, rows = dict(roles(tree)), list(io.StringIO(source))
    tokens: list[str] = []
    labels: list[int] = []
    inside = 0  # of strings that contain code
    for token in tokenize.generate_tokens(iter(rows).__next__):
        opens, closes = token.type in _OPENS, token.type in _CLOSES
        inside += opens - closes
        if token.type == tokenize.NEWLINE:
            if any(label != IGNORED for label in labels):
                yield Line(file, tuple(tokens), tuple(labels))
            tokens, labels = [], []
        elif (opens and inside == 1) or (token.type == tokenize.STRING and not inside):
            tokens.append(VOCABULARY[STRING])
            labels.append(IGNORED)
        elif not (inside or closes or token.type in _SKIPPED):
            tokens.append(VOCABULARY[NUMBER] if token.type == tokenize.NUMBER else token.string)
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                row, column = token.start
                place = row, len(rows[row - 1][:column].encode())  # ast counts bytes
                labels.append(known.get(place, ROLES.index("other")))
            else:
                labels.append(IGNORED)


def read() -> list[tuple[str, str]]:
    """(name, source) of each top-level module, in the order of their names."""
    found = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        if not path.name.startswith("_sysconfigdata"):  # of the build
            with tokenize.open(path) as file:
                found.append((path.name, file.read()))
    return found


@no_collection()
def load(least: int = 5) -> Identifiers:
    """Identifiers that the training part has fewer than `least` times are one token, "<name>".

    A line that comes back, in whatever file, is kept once. Files, not lines, are held out. Of the held-out lines those
    are kept that a model can tell from the training part's and from one another, by the numbers of their tokens.
    """
    sources = read()
    distinct: dict[tuple[str, ...], Line] = {}
    for file, source in sources:
        for line in lines(file, source):
            distinct.setdefault(line.tokens, line)
    parts: tuple[list[Line], ...] = ([], [])
    for line in distinct.values():
        if len(line.tokens) <= LONGEST:
            parts[zlib.crc32(line.file.encode()) % HELD_OUT == 0].append(line)
    total = sum(role != IGNORED for line in distinct.values() for role in line.roles)
    if not (FILES[0] <= len(sources) <= FILES[1] and IDENTIFIERS[0] <= total <= IDENTIFIERS[1]):
        raise ValueError(
            f"a standard library of {FILES} modules with {IDENTIFIERS} identifiers in distinct lines was expected, got "
            f"{len(sources)} and {total}: is {Path(ast.__file__).parent} complete?"
        )
    counts = Counter(token for line in parts[0] for token in line.tokens)
    names = sorted(token for token, count in counts.items() if count >= least and token not in VOCABULARY)
    vocabulary = [*VOCABULARY, *names]
    numbers = {token: number for number, token in enumerate(vocabulary)}
    seen = {_numbered(line, numbers) for line in parts[0]}
    unseen: dict[tuple[int, ...], Line] = {}
    for line in parts[1]:
        unseen.setdefault(_numbered(line, numbers), line)
    held_out = [line for row, line in unseen.items() if row not in seen]
    return Identifiers(vocabulary, _part(parts[0], numbers), _part(held_out, numbers))


def _numbered(line: Line, numbers: dict[str, int]) -> tuple[int, ...]:
    return tuple(numbers.get(token, NAME) for token in line.tokens)


def _part(lines: list[Line], numbers: dict[str, int]) -> Part:
    rows = [torch.tensor(_numbered(line, numbers)) for line in lines]
    roles = [torch.tensor(line.roles) for line in lines]
    lengths = torch.tensor([len(row) for row in rows])
    return Part(
        pad_sequence(rows, batch_first=True), lengths, pad_sequence(roles, batch_first=True, padding_value=IGNORED),
        lines,
    )  # fmt: skip
