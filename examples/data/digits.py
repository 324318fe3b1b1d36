"""Handwritten digits: 1797 images of 8 x 8 pixels, 16 levels of grey, as scikit-learn carries them.

python -m examples.data.digits         sizes
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

IMAGES, SIDE, CLASSES, BRIGHTEST = 1797, 8, 10, 16
SHARES, PARTS = 8, {"held_out": range(2), "tuning": range(2, 3), "train": range(3, 8)}  # of the images' hashes


@dataclass(frozen=True)
class Part:
    images: Tensor  # (N, 1, 8, 8), from 0 to 1
    labels: Tensor  # (N,)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Digits:
    train: Part
    tuning: Part  # to choose a recipe on
    held_out: Part


def load() -> Digits:
    """The digits, split by a hash of their pixels: an image that comes twice is on one side, and no image does.

    The tuning part is there to choose recipes on; the baselines' regularisation is chosen on it.

    Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits" of the UCI repository, its test part,
    in scikit-learn. Licence: scikit-learn's is BSD, 3 clauses; the data's is CC BY 4.0.
    """
    try:
        import importlib

        load_digits = importlib.import_module("sklearn.datasets").load_digits
    except ModuleNotFoundError:
        raise ModuleNotFoundError("the digits are scikit-learn's: pip install 'seqkern[data]'") from None
    found = load_digits()
    pixels, labels = torch.tensor(found.images), torch.tensor(found.target).long()
    counts = (len(pixels), len(pixels.flatten(1).unique(dim=0)), int(pixels.min()), int(pixels.max()))
    if counts != (IMAGES, IMAGES, 0, BRIGHTEST):
        raise RuntimeError(
            f"load_digits must have {IMAGES} distinct images, from 0 to {BRIGHTEST}, but has {counts}: "
            "pip install 'seqkern[data]'"
        )
    rows = (row.to(torch.uint8).numpy().tobytes() for row in pixels)
    hashes = torch.tensor([zlib.crc32(row) % SHARES for row in rows])
    images = (pixels / BRIGHTEST).float()[:, None]
    parts = {}
    for name, some in PARTS.items():
        chosen = torch.isin(hashes, torch.tensor([*some]))
        parts[name] = Part(images[chosen], labels[chosen])
    return Digits(**parts)


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by -1, 0 or 1 pixels to each side, drawn from the generator; what comes in is 0."""
    side = images.shape[-1]
    around = torch.nn.functional.pad(images, (1, 1, 1, 1))
    starts = torch.randint(3, (2, len(images)), generator=generator)
    rows, columns = starts[:, :, None] + torch.arange(side)
    every = torch.arange(len(images))[:, None, None]
    return around[every, :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


if __name__ == "__main__":
    found = load()
    for name in PARTS:
        part: Part = getattr(found, name)
        print(f"{name}: {len(part)} images, of each digit {torch.bincount(part.labels).tolist()}")
