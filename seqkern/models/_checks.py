"""Checks of the numbers that the systems are made of."""

from __future__ import annotations


def check_positive(model: str, **sizes: int | None) -> None:
    """Sizes and counts; None is one that has a default."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{model}: {name} must be at least 1, got {size}")


def check_heads(model: str, nhead: int, rotary: bool = False, sinusoidal: bool = False, **width: int) -> None:
    """Of a Transformer, whose width goes by the name that the model has for it."""
    ((name, size),) = width.items()
    check_positive(model, nhead=nhead, **width)
    if size % nhead:
        raise ValueError(f"{model}: nhead must divide {name}, {size}, got {nhead}")
    if sinusoidal and size % 2:
        raise ValueError(f"{model}: {name} must be even, for sinusoidal positions, got {size}")
    if rotary and size // nhead % 2:
        raise ValueError(f"{model}: {name} / nhead must be even, for rotary positions, got {size} / {nhead}")
