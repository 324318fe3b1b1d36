"""Groups of processes: checks, the order of the pieces of a sequence, and exchanges that can be differentiated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LAYOUTS = ("zigzag", "contiguous")
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # what a group of one backend exchanges
# torch 2.13 gave it another name.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def check_choice(op: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_group(op: str, group: Any) -> tuple[Any, int, int]:
    """The group (None is the default one), this process's rank in it and how many it has."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{op}: group is not initialised: call torch.distributed.init_process_group in every process first"
        )
    if group is None:
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: group must be one that this process, rank {dist.get_rank()}, belongs to")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"{op}: group must be one that this process, rank {dist.get_rank()}, belongs to")
    return group, rank, ranks


def check_device(op: str, name: str, t: Any, group: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    backend = dist.get_backend(group)
    expected = _DEVICES.get(backend)
    if expected is not None and t.device.type != expected:
        raise ValueError(f"{op}: {name} must be on {expected}, as the group's backend {backend} asks, got {t.device}")


def pieces(op: str, length: int, rank: int, ranks: int, layout: str, name: str = "n") -> list[tuple[int, int]]:
    """(first position, number) of every piece that a rank holds, of a whole sequence of `length`."""
    parts = ranks if layout == "contiguous" else 2 * ranks
    if length % parts:
        raise ValueError(
            f"{op}: {name} must be a multiple of {parts} for layout {layout!r} on {ranks} processes, got {length}"
        )
    size = length // parts
    if layout == "contiguous":
        return [(rank * size, size)]
    return [(rank * size, size), ((parts - 1 - rank) * size, size)]


def of_ranks(t: Tensor, dim: int, ranks: int, layout: str) -> Tensor:
    """A sequence in order to what rank 0 holds, what rank 1 holds, and so on."""
    if layout == "contiguous" or ranks == 1:
        return t
    parts = t.chunk(2 * ranks, dim)
    return torch.cat([parts[i] for r in range(ranks) for i in (r, 2 * ranks - 1 - r)], dim)


def in_order(t: Tensor, dim: int, ranks: int, layout: str) -> Tensor:
    """The inverse of `of_ranks`."""
    if layout == "contiguous" or ranks == 1:
        return t
    parts = t.chunk(2 * ranks, dim)
    return torch.cat([*parts[::2], *reversed(parts[1::2])], dim)


class Exchange(torch.autograd.Function):
    """(R, ...): part i goes to rank i; what comes from rank i is part i of the result."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Any) -> Tensor:
        ctx.group = group
        t = t.contiguous()
        out = torch.empty_like(t)
        dist.all_to_all_single(out, t, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Exchange.apply(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """t of every rank, (R, ...). The gradient is the sum of the ranks', in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather(t, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return Exchange.apply(wide, ctx.group).sum(0).to(grad.dtype), None


def gather(t: Tensor, group: Any) -> Tensor:
    """t of every rank, (R, ...)."""
    t = t.contiguous()
    out = t.new_empty((dist.get_world_size(group), *t.shape))
    _all_gather(out.flatten(0, 1) if t.dim() else out, t, group=group)
    return out


def split(t: Tensor, away: int, together: int, group: Any, ranks: int, layout: str) -> Tensor:
    """From the sequence split over the ranks to another dimension split: `together` is the sequence, in order after."""
    parts = torch.stack(t.chunk(ranks, away))
    return in_order(torch.cat(Exchange.apply(parts, group).unbind(0), together), together, ranks, layout)


def unsplit(t: Tensor, away: int, together: int, group: Any, ranks: int, layout: str) -> Tensor:
    """The inverse of `split`, with its arguments."""
    parts = torch.stack(of_ranks(t, together, ranks, layout).chunk(ranks, together))
    return torch.cat(Exchange.apply(parts, group).unbind(0), away)
