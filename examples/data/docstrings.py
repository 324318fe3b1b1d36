"""The docstrings of Python's standard library, as words: text for language models and word vectors, with labels.

    python -m examples.data.docstrings     sizes of the two parts, and a document

Source: the `.py` files of the standard library that runs this, without its tests; PSF licence. Its size depends on the
Python version: 8400 docstrings, 1.7 MB in 3.11.

Docstrings repeat one another (an overridden method has its parent's), so a paragraph that comes back is kept once,
**before** the split: otherwise the held-out part could be recited. Paragraphs with a doctest are left out, as they are
code. A file is held out as a whole, by the hash of its path: what one file says of its own functions is on one side.
Files copy one another with small changes (asyncio/locks.py and threading.py, the tables of encodings): a held-out
document is left out if more than half of its tokens stand in runs of eight that the training part has too. There is no
part to tune on.

A token is a run of letters, digits and underscores, or one other character that is no space; all in lower case, as
"Return" at a docstring's start is the word "return". So an identifier is one token, and ends of lines are none.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.data import no_collection

PAD, UNKNOWN, MASK, START = range(4)
SPECIALS = ("<pad>", "<unk>", "<mask>", "<doc>")
KINDS = ("module", "class", "function", "method")
TESTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
COUNTS = range(5000, 12000)  # of docstrings: Debian's Python lacks some modules, older ones have more
HELD_OUT_SHARE = 0.1
RUN, COPIED = 8, 0.5  # tokens of a run; the share of a held-out document's tokens that may be in known runs
TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Document:
    """What is left of a docstring, and what it belongs to."""

    path: str  # of the file, inside the library
    kind: int  # of KINDS
    text: str  # as it was written, spaces for ends of lines
    tokens: Tensor  # int64; those from `vocabulary` on are words outside the vocabulary


@dataclass(frozen=True)
class Docstrings:
    words: list[str]  # of each token number: SPECIALS, the vocabulary (most frequent first), then all other words
    vocabulary: int  # how many of them are specials or in the vocabulary
    counts: Tensor  # int64, (vocabulary,): in the training part; those of <unk> are the words outside
    train: list[Document]
    held_out: list[Document]

    def known(self, tokens: Tensor) -> Tensor:
        """Token numbers in which words outside the vocabulary are <unk>."""
        return tokens.where(tokens < self.vocabulary, UNKNOWN)

    def numbers(self, text: str) -> Tensor:
        """Token numbers of a text; words that are nowhere in the data are <unk>."""
        index = {word: number for number, word in enumerate(self.words)}
        return torch.tensor([index.get(word, UNKNOWN) for word in tokenise(text)])

    def text(self, tokens: Sequence[int] | Tensor) -> str:
        """Words with spaces between, but for most of the marks."""
        joined = " ".join(self.words[int(token)] for token in tokens)
        joined = re.sub(r" ([.,:;)\]}?!'])", r"\1", joined)
        return re.sub(r"([(\[{]) ", r"\1", joined)


def tokenise(text: str) -> list[str]:
    return TOKEN.findall(text.lower())


def stream(documents: Sequence[Document]) -> Tensor:
    """The documents one after another, each after a <doc>."""
    start = torch.tensor([START])
    return torch.cat([piece for document in documents for piece in (start, document.tokens)])


def rows(documents: Sequence[Document], longest: int) -> list[Tensor]:
    """Each document cut into rows of at most `longest` tokens, <doc> first in each."""
    start = torch.tensor([START])
    return [torch.cat([start, piece]) for document in documents for piece in document.tokens.split(longest - 1)]


def padded(pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(B, T) with <pad> behind the rows, and their lengths (B,)."""
    lengths = torch.tensor([len(piece) for piece in pieces])
    return torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True, padding_value=PAD), lengths


def held_out(path: str) -> bool:
    return zlib.crc32(path.encode()) < HELD_OUT_SHARE * 2**32


def docstrings_of(source: bytes) -> list[tuple[int, str]]:
    """(kind, docstring) of a file's module, classes, functions and methods."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings that new Pythons do not like
        module = ast.parse(source)
    inside: list[tuple[ast.AST, bool]] = [(module, False)]  # nodes, and whether in a class's own body
    while inside:
        node, in_class = inside.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            by_type = {ast.Module: "module", ast.ClassDef: "class"}
            kind = by_type.get(type(node), "method" if in_class else "function")
            text = ast.get_docstring(node)
            if text:
                found.append((KINDS.index(kind), text))
            in_class = isinstance(node, ast.ClassDef)
        inside.extend((child, in_class) for child in reversed(list(ast.iter_child_nodes(node))))
    return found


def read(root: Path) -> list[tuple[str, int, str]]:
    """(path, kind, text) of every docstring that has something new to say, files in alphabetical order."""
    seen: set[str] = set()
    documents, total = [], 0
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if TESTS.intersection(path.parts):
            continue
        try:
            found = docstrings_of(file.read_bytes())
        except (SyntaxError, ValueError):  # templates that are no Python yet
            continue
        total += len(found)
        for kind, text in found:
            kept = []
            for paragraph in re.split(r"\n\s*\n", text):
                key = " ".join(paragraph.lower().split())
                if key not in seen and ">>>" not in key:
                    kept.append(" ".join(paragraph.split()))
                seen.add(key)
            if any(kept):
                documents.append((path.as_posix(), kind, " ".join(kept)))
    if total not in COUNTS:
        raise RuntimeError(
            f"the standard library in {root} has {total} docstrings, expected {COUNTS.start} to {COUNTS.stop}: "
            "is this a Python without its source files (python -OO, a zipped library)?"
        )
    return documents


def runs(words: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Every RUN words in a row."""
    return zip(*(words[start:] for start in range(RUN)), strict=False)


def copied(words: Sequence[str], known: set[tuple[str, ...]]) -> float:
    """The share of the words that stand in known runs."""
    places = {start + i for start, run in enumerate(runs(words)) if run in known for i in range(RUN)}
    return len(places) / max(1, len(words))


@no_collection()
def load(vocabulary: int = 4096) -> Docstrings:
    """The two parts, with a vocabulary of that many numbers, SPECIALS among them, from the training part."""
    documents = [(*found, tokenise(found[2])) for found in read(Path(sysconfig.get_path("stdlib")))]
    known_runs = {run for path, _, _, words in documents if not held_out(path) for run in runs(words)}
    documents = [d for d in documents if not held_out(d[0]) or copied(d[3], known_runs) <= COPIED]
    counts = Counter(word for path, _, _, words in documents if not held_out(path) for word in words)
    names = [*SPECIALS, *(word for word, _ in counts.most_common(vocabulary - len(SPECIALS)))]
    known = set(names)
    others = sorted({word for *_, words in documents for word in words} - known)
    total = [counts[word] for word in names]
    total[UNKNOWN] = sum(counts.values()) - sum(total)
    index = {word: number for number, word in enumerate([*names, *others])}
    parts: tuple[list[Document], list[Document]] = ([], [])
    for path, kind, text, words in documents:
        tokens = torch.tensor([index[word] for word in words])
        parts[held_out(path)].append(Document(path, kind, text, tokens))
    return Docstrings([*names, *others], len(names), torch.tensor(total), *parts)


if __name__ == "__main__":
    data = load()
    for name, part in (("train", data.train), ("held out", data.held_out)):
        tokens = stream(part)
        files, unknown = len({document.path for document in part}), (tokens >= data.vocabulary).double().mean()
        print(f"{name}: {len(part)} documents of {files} files, {len(tokens)} tokens, {unknown:.1%} of them <unk>")
    print(f"{len(data.words)} words, {data.vocabulary} of them in the vocabulary")
    print(data.held_out[1].path, KINDS[data.held_out[1].kind], data.text(data.held_out[1].tokens))
