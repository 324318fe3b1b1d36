"""A sequence over the processes of a group: cutting it, putting it together, and where its pieces stand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqkern.distributed._group import LAYOUTS, Gather, check_choice, check_device, check_group, in_order, pieces


def shard_sequence(x: Tensor, *, group: Any = None, dim: int = 2, layout: str = "zigzag") -> Tensor:
    """This process's part of a sequence that every process of the group holds.

    "contiguous": of R processes, process r has the r-th of R pieces. "zigzag": the pieces r and 2R - 1 - r of 2R, so
    that under a causal mask every process has the same amount of work.

    Args:
        x: the whole, the same on every process.
        group: of torch.distributed; None is the default group.
        dim: the sequence, a multiple of R long, of 2R for "zigzag". 2 is that of (B, H, N, D).
        layout: "zigzag" or "contiguous".

    Returns:
        A tensor of its own, 1 / R of x. The gradient of x is this process's share, 0 elsewhere: the sum over the
        processes is the whole.

    Raises:
        TypeError: x is no tensor, group no process group.
        ValueError: a length that does not divide, a dim that x has not, an unknown layout, a group without this
            process, a device that the group does not exchange.
        RuntimeError: torch.distributed is not initialised.
    """
    op = "shard_sequence"
    check_choice(op, "layout", layout, LAYOUTS)
    group, rank, ranks = check_group(op, group)
    check_device(op, "x", x, group)
    dim = _dim(op, x, dim)
    found = pieces(op, x.shape[dim], rank, ranks, layout, f"x.shape[{dim}]")
    return torch.cat([x.narrow(dim, first, size) for first, size in found], dim)


def unshard_sequence(x: Tensor, *, group: Any = None, dim: int = 2, layout: str = "zigzag") -> Tensor:
    """The whole sequence, on every process, from the parts that `shard_sequence` gave: its inverse.

    Args:
        x: this process's part; of one shape and dtype on all processes.
        group, dim, layout: as `shard_sequence`.

    Returns:
        The whole. The gradient of x is the sum of those that the processes have for its place: where all compute one
        loss from the whole, R times that of one process, which the mean over processes (DDP) takes back.

    Raises:
        As `shard_sequence`.
    """
    op = "unshard_sequence"
    check_choice(op, "layout", layout, LAYOUTS)
    group, _, ranks = check_group(op, group)
    check_device(op, "x", x, group)
    dim = _dim(op, x, dim)
    pieces(op, x.shape[dim] * ranks, 0, ranks, layout, f"R times x.shape[{dim}]")
    parts: Tensor = Gather.apply(x, group)
    return in_order(torch.cat(parts.unbind(0), dim), dim, ranks, layout)


def local_positions(
    n: int, *, group: Any = None, layout: str = "zigzag", device: torch.device | str | None = None
) -> Tensor:
    """Where the rows of this process's part stand in the whole: what rotary embeddings need.

    Args:
        n: the length of the whole sequence.
        group, layout: as `shard_sequence`.
        device: of the result.

    Returns:
        (n / R,), int64.

    Raises:
        As `shard_sequence`. TypeError: n is no whole number.
    """
    op = "local_positions"
    check_choice(op, "layout", layout, LAYOUTS)
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"{op}: n must be a whole number, got {n!r}")
    if n < 0:
        raise ValueError(f"{op}: n must not be negative, got {n}")
    group, rank, ranks = check_group(op, group)
    found = pieces(op, n, rank, ranks, layout)
    return torch.cat([torch.arange(first, first + size, device=device) for first, size in found])


def _dim(op: str, x: Tensor, dim: int) -> int:
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: dim must be a dimension of x, which has {x.dim()}, got {dim!r}")
    return dim % x.dim()
