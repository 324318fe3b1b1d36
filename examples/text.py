"""The text: English that every CPython carries, as bytes, split once and for all into train and held-out.

`pydoc_data.topics` holds the language reference that `help("topics")` shows. Its topics quote one another (the page on
special names contains the pages on attribute access, on customisation, ...), so a paragraph that comes back is kept
once: otherwise the held-out part could be recited from the training part. What is left depends on the Python version,
350 to 450 kB.

    python -m examples.text            sizes and baselines
"""

from __future__ import annotations

import lzma
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """A byte-level corpus: both parts are uint8 tensors, the held-out part is the end of the text."""

    source: str
    train: torch.Tensor
    held_out: torch.Tensor

    def batch(self, generator: torch.Generator, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows` random windows of the training part: inputs and, one byte later, targets: (rows, length) int64."""
        starts = torch.randint(len(self.train) - length, (rows, 1), generator=generator)
        windows = self.train[starts + torch.arange(length + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def held_out_windows(self, length: int, limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The held-out part cut into windows side by side (the first `limit`), inputs and targets as in `batch`."""
        count = (len(self.held_out) - 1) // length
        count = count if limit is None else min(limit, count)
        if count == 0:
            raise ValueError(f"the held-out text has {len(self.held_out)} bytes, a window needs {length + 1}")
        inputs = self.held_out[: count * length].long().view(count, length)
        targets = self.held_out[1 : count * length + 1].long().view(count, length)
        return inputs, targets


def python_documentation() -> bytes:
    """The topics of `help()` in alphabetical order, every paragraph once."""
    seen: set[str] = set()
    pages = []
    for name in sorted(topics):
        paragraphs = []
        for paragraph in topics[name].strip("\n").split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                paragraphs.append(paragraph)
        if paragraphs:
            pages.append("\n\n".join(paragraphs))
    return "\n\n\n".join(pages).encode()


def load(path: Path | None = None) -> Text:
    """The text of a file, or without one Python's documentation; the last tenth is held out."""
    data = python_documentation() if path is None else path.read_bytes()
    if len(data) < 20_000:
        raise ValueError(f"{path} has {len(data)} bytes: too little text to learn from, 20000 is the least")
    source = "the Python language reference in pydoc_data.topics" if path is None else str(path)
    return split(data, source)


def split(data: bytes, source: str) -> Text:
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    boundary = len(data) - int(len(data) * HELD_OUT_SHARE)
    return Text(source, values[:boundary], values[boundary:])


def baselines(text: Text) -> dict[str, float]:
    """Bits per byte of the held-out part by means that need no network.

    "unigram": byte frequencies of the training part (plus one, so that no byte is impossible). The compressors get the
    training part first and are charged for what the held-out part adds; deflate looks back 32 kB, LZMA over all of it.
    """
    counts = torch.bincount(text.train.int(), minlength=256).double() + 1
    bits = -(counts / counts.sum()).log2()
    train, both = bytes(text.train.tolist()), bytes(text.train.tolist() + text.held_out.tolist())
    size = len(text.held_out)
    return {
        "uniform": math.log2(256),
        "unigram": bits[text.held_out.int()].mean().item(),
        "zlib": (len(zlib.compress(both, 9)) - len(zlib.compress(train, 9))) * 8 / size,
        "lzma": (len(lzma.compress(both, preset=9)) - len(lzma.compress(train, preset=9))) * 8 / size,
    }


if __name__ == "__main__":
    corpus = load()
    print(f"{corpus.source}: {len(corpus.train)} bytes to train on, {len(corpus.held_out)} held out")
    for label, value in baselines(corpus).items():
        print(f"{label:8s} {value:.3f} bits per byte")
