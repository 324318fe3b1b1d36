"""torch's `scaled_dot_product_attention` over a sequence that is split, in code that nobody has to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from seqkern.distributed._attention import METHODS, ring_attention
from seqkern.distributed._group import LAYOUTS, check_choice, check_device, check_group, pieces
from seqkern.distributed._sequence import shard_sequence
from seqkern.integrations import sdpa


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    layout: str = "zigzag",
    method: str = "allgather",
) -> Iterator[None]:
    """Within the block, every process holds its part of the sequence, and attention is of the whole.

    `torch.distributed.tensor.experimental.context_parallel`, argument by argument, on CPU too: buffers become this
    process's part, in place, and `torch.nn.functional.scaled_dot_product_attention` becomes `ring_attention`, by
    `seqkern.integrations.sdpa`, which is enabled meanwhile if it is not. `seqkern.attention` is not replaced. Run the
    backward pass inside or outside; with activation checkpoints, inside. The gradients of parameters are this process's
    share, as under DDP with the processes' own data.

    Args:
        mesh: a one-dimensional DeviceMesh.
        buffers: what has a dimension of the sequence: inputs, labels, positions, masks of a loss. Not parameters.
        buffer_seq_dims: that dimension, of each buffer.
        no_restore_buffers: those of `buffers` that need not be whole again after the block.
        layout, method: as `ring_attention`.

    Raises:
        TypeError: a mesh without a group, a buffer that is no tensor.
        ValueError: a mesh of several dimensions, buffers and dimensions that differ in number, a buffer in
            no_restore_buffers only, a buffer that needs a gradient, and as `shard_sequence`.
        RuntimeError: torch.distributed is not initialised; within another such block; sdpa is enabled for another
            device only.
        NotImplementedError: from a call in the block: an attn_mask, queries that are not (B, H, N, D), a tensor that
            `sdpa` leaves to torch (it would attend to its own part only).

    Example (in each of R processes)::

        mesh = torch.distributed.init_device_mesh("cpu", (R,))
        with seqkern.distributed.context_parallel(mesh, buffers=[x, labels], buffer_seq_dims=[1, 1]):
            loss = criterion(model(x), labels)
            loss.backward()
    """
    op = "context_parallel"
    check_choice(op, "layout", layout, LAYOUTS)
    check_choice(op, "method", method, METHODS)
    check_group(op, None)
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "device_type"):
        raise TypeError(f"{op}: mesh must be a torch.distributed.DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"{op}: mesh must have one dimension, got {mesh.ndim}: take one of them, mesh[name]")
    group, rank, ranks = check_group(op, mesh.get_group())
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(buffers) != len(dims):
        raise ValueError(f"{op}: buffer_seq_dims must be as many as buffers, {len(buffers)}, got {len(dims)}")
    for i, (t, dim) in enumerate(zip(buffers, dims, strict=True)):
        check_device(op, f"buffers[{i}]", t, group)
        if not isinstance(dim, int) or not -t.dim() <= dim < t.dim():
            raise ValueError(
                f"{op}: buffer_seq_dims[{i}] must be one of the buffer's {t.dim()} dimensions, got {dim!r}"
            )
        if t.requires_grad:
            raise ValueError(f"{op}: buffers[{i}] must not require a gradient: use shard_sequence for it")
        pieces(op, t.shape[dim], rank, ranks, layout, f"buffers[{i}].shape[{dim}]")
    lost = {id(t) for t in no_restore_buffers or ()}
    if lost - {id(t) for t in buffers}:
        raise ValueError(f"{op}: no_restore_buffers must be among buffers")

    def attend(
        reason: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
        is_causal: bool, scale: float | None, enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        if reason:
            raise NotImplementedError(f"{op}: scaled_dot_product_attention must be of plain tensors, got {reason}")
        if attn_mask is not None:
            raise NotImplementedError(f"{op}: attn_mask must be None in scaled_dot_product_attention; is_causal works")
        if query.dim() != 4:
            raise NotImplementedError(f"{op}: query must be (B, H, N, D), got shape {tuple(query.shape)}")
        if not enable_gqa and key.shape[1] != query.shape[1]:
            raise ValueError(
                f"{op}: key must have the query's {query.shape[1]} heads without enable_gqa, got {key.shape[1]}"
            )
        return ring_attention(
            query, key, value, group=group, causal=is_causal, layout=layout, method=method, dropout_p=dropout_p,
            scale=scale,
        )  # fmt: skip

    with sdpa.redirected(attend, mesh.device_type):
        originals = [None if id(t) in lost else t.clone() for t in buffers]
        with torch.no_grad():
            for t, dim in zip(buffers, dims, strict=True):
                _become(t, shard_sequence(t, group=group, dim=dim, layout=layout))
        try:
            yield
        finally:
            with torch.no_grad():
                for t, original in zip(buffers, originals, strict=True):
                    if original is not None:
                        _become(t, original)


def _become(t: Tensor, other: Tensor) -> None:
    """In place, as what views and holds the tensor sees it."""
    t.resize_(other.shape)
    t.copy_(other)
