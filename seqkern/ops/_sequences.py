"""Checks of what says where sequences begin and end: lengths of padded ones, boundaries of packed ones."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from seqkern.ops._autograd import readable


def sequence_lengths(op: str, lengths: Any, x: Tensor) -> Tensor:
    if isinstance(lengths, (list, tuple)):
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in lengths):
            raise TypeError(f"{op}: lengths must be whole numbers, got {lengths!r}")
        lengths = torch.tensor(lengths, dtype=torch.int64, device=x.device)
    _check_integers(op, "lengths", lengths, x)
    if lengths.shape != x.shape[:1]:
        raise ValueError(f"{op}: lengths must have shape ({x.shape[0]},), the batch size, got {tuple(lengths.shape)}")
    every: Tensor = lengths.long()
    return every


def sequence_starts(op: str, starts: Any, x: Tensor) -> Tensor:
    _check_integers(op, "cu_seqlens", starts, x)
    if starts.dim() != 1 or starts.shape[0] == 0:
        raise ValueError(
            f"{op}: cu_seqlens must have one dimension and one element more than there are sequences, got shape "
            f"{tuple(starts.shape)}"
        )
    if readable(starts):
        ends = starts.tolist()
        if ends[0] != 0:
            raise ValueError(f"{op}: cu_seqlens must start with 0, got {ends[0]}")
        if any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(f"{op}: cu_seqlens must not decrease, got {ends}")
        if ends[-1] > x.shape[0]:
            raise ValueError(f"{op}: cu_seqlens must end at or before {x.shape[0]}, the rows of x, got {ends[-1]}")
    every: Tensor = starts.long()
    return every


def _check_integers(op: str, name: str, t: Any, x: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor or None, got {type(t).__name__}")
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be int32 or int64, got {t.dtype}")
    if t.device != x.device:
        raise ValueError(f"{op}: {name} must be on x's device {x.device}, got {t.device}")
