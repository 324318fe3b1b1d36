"""Recurrent layers over a sequence that is split over the processes of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seqkern.distributed._group import (
    LAYOUTS,
    Gather,
    check_choice,
    check_device,
    check_group,
    pieces,
    split,
    unsplit,
)
from seqkern.ops import rnn as ops
from seqkern.ops._rnn_checks import autocast

METHODS = ("alltoall", "relay")


def lstm(
    input: Tensor,
    hx: tuple[Tensor, Tensor] | None,
    weights: Sequence[Tensor],
    *,
    group: Any = None,
    method: str = "alltoall",
    layout: str = "contiguous",
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    norms: Sequence[Tensor] | None = None,
    peepholes: Sequence[Tensor] | None = None,
    recompute: bool = False,
    slices: int | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`seqkern.lstm` of a whole sequence, each process holding its part of the steps.

    "alltoall": whole sequences of B / R rows on every process, by an all-to-all and another one back. "relay": a
    process waits for the state after the steps before its own and hands it on after them; a slice of the batch at a
    time, so that the processes work at once on different slices. The gradients of the states travel back.

    Args:
        input: (T / R, B, I), or (B, T / R, I) with batch_first: of the whole what `shard_sequence` with the same layout
            gives. One shape and dtype on all processes.
        hx: as `lstm`, of the whole batch before the first step of the whole, the same on every process; None for zeros.
        weights, norms, peepholes: as `lstm`, the same on every process.
        group: of torch.distributed; None is the default group.
        method: "alltoall" (R must divide B) or "relay" (one direction, without lengths, contiguous).
        layout: "contiguous", or "zigzag" by "alltoall".
        lengths: (B,), of the whole sequences, as `lstm`; only by "alltoall".
        num_layers, bidirectional, batch_first, recompute: as `lstm`.
        slices: of the batch, by "relay"; default as many as processes. Each is computed alone: more wait less.

    Returns:
        This process's part of the output, (T / R, B, directions * P) or batch first, and (h_n, c_n) of the whole batch
        after the whole sequence, the same on every process. Differentiable once by "relay"; every process of the group
        must run the backward pass. The gradients of weights and hx are this process's share: their sum over the group
        is the whole (DDP: its mean, with a loss that is the mean of the ranks'). That of h_n and c_n is the sum of what
        the processes give. By "relay", states are handed on in the input's dtype.

    Raises:
        TypeError, ValueError: as `lstm`; ValueError also for an unknown layout or method, lengths or a batch that do
            not divide, a device that the group does not exchange.
        RuntimeError: torch.distributed is not initialised.
        NotImplementedError: two directions, lengths or zigzag by "relay". Dropout and zoneout have no arguments: their
            masks count rows of the whole batch.
    """
    output, (h, c) = _network(
        "lstm", ops.lstm, input, hx, weights, group, method, layout, lengths, num_layers, bidirectional, batch_first,
        slices, {"norms": norms, "peepholes": peepholes, "recompute": recompute},
    )  # fmt: skip
    return output, (h, c)


def gru(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    group: Any = None,
    method: str = "alltoall",
    layout: str = "contiguous",
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    norms: Sequence[Tensor] | None = None,
    recompute: bool = False,
    slices: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`seqkern.gru` of a whole sequence, each process holding its part of the steps: as `lstm` here, with one state."""
    return _single(
        "gru", ops.gru, input, hx, weights, group, method, layout, lengths, num_layers, bidirectional, batch_first,
        norms, recompute, slices,
    )  # fmt: skip


def rnn_tanh(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    group: Any = None,
    method: str = "alltoall",
    layout: str = "contiguous",
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    norms: Sequence[Tensor] | None = None,
    recompute: bool = False,
    slices: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`seqkern.rnn_tanh` of a whole sequence, each process holding its part of the steps: as `gru` here."""
    return _single(
        "rnn_tanh", ops.rnn_tanh, input, hx, weights, group, method, layout, lengths, num_layers, bidirectional,
        batch_first, norms, recompute, slices,
    )  # fmt: skip


def rnn_relu(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    group: Any = None,
    method: str = "alltoall",
    layout: str = "contiguous",
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    norms: Sequence[Tensor] | None = None,
    recompute: bool = False,
    slices: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`seqkern.rnn_relu` of a whole sequence, each process holding its part of the steps: as `gru` here."""
    return _single(
        "rnn_relu", ops.rnn_relu, input, hx, weights, group, method, layout, lengths, num_layers, bidirectional,
        batch_first, norms, recompute, slices,
    )  # fmt: skip


def _single(
    op: str, function: Callable[..., Any], input: Tensor, hx: Any, weights: Sequence[Tensor], group: Any, method: str,
    layout: str, lengths: Any, num_layers: int, bidirectional: bool, batch_first: bool, norms: Any, recompute: bool,
    slices: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    output, (h,) = _network(
        op, function, input, hx if hx is None else (hx,), weights, group, method, layout, lengths, num_layers,
        bidirectional, batch_first, slices, {"norms": norms, "recompute": recompute},
    )  # fmt: skip
    return output, h


def _network(
    name: str, function: Callable[..., Any], input: Tensor, hx: Any, weights: Sequence[Tensor], group: Any, method: str,
    layout: str, lengths: Any, num_layers: int, bidirectional: bool, batch_first: bool, slices: int | None,
    options: dict[str, Any],
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    op = f"distributed.{name}"
    check_choice(op, "layout", layout, LAYOUTS)
    check_choice(op, "method", method, METHODS)
    group, rank, ranks = check_group(op, group)
    check_device(op, "input", input, group)
    if input.dim() != 3:
        raise ValueError(f"{op}: input must have 3 dimensions, got shape {tuple(input.shape)}")
    if slices is not None and (not isinstance(slices, int) or slices < 1):
        raise ValueError(f"{op}: slices must be a number of 1 or more, got {slices!r}")
    x = input.transpose(0, 1) if batch_first else input
    steps, batch = x.shape[:2]
    pieces(op, steps * ranks, rank, ranks, layout, f"T, {ranks} times the steps of input,")
    if hx is not None:
        hx = tuple(hx)
        for i, t in enumerate(hx):
            check_device(op, f"hx[{i}]", t, group)
            if t.dim() != 3 or t.shape[1] != batch:
                raise ValueError(
                    f"{op}: hx[{i}] must have 3 dimensions, the second one the batch, {batch}, "
                    f"got shape {tuple(t.shape)}"
                )
    options = {**options, "num_layers": num_layers}
    if method == "relay":
        for argument, value in (("bidirectional", bidirectional), ("lengths", lengths is not None)):
            if value:
                raise NotImplementedError(f"{op}: {argument} by method 'relay': use method=\"alltoall\"")
        if layout != "contiguous":
            raise NotImplementedError(f"{op}: layout must be 'contiguous' by method 'relay', got {layout!r}")
        return _relay(op, function, x, hx, weights, group, rank, ranks, batch_first, slices or ranks, options)
    if batch % ranks:
        raise ValueError(
            f"{op}: input must have a batch that is a multiple of {ranks}, the processes, by method 'alltoall', "
            f"got {batch}"
        )
    own = slice(rank * (batch // ranks), (rank + 1) * (batch // ranks))
    if hx is not None:
        hx = tuple(t[:, own] for t in hx)
    if lengths is not None:
        lengths = lengths[own]
    output, state = function(
        split(x, 1, 0, group, ranks, layout), _state(hx, function), weights, lengths=lengths,
        bidirectional=bidirectional, **options,
    )  # fmt: skip
    state = tuple(torch.cat(Gather.apply(t, group).unbind(0), 1) for t in _tuple(state))
    output = unsplit(output, 1, 0, group, ranks, layout)
    return output.transpose(0, 1) if batch_first else output, state


def _tuple(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def _state(hx: Any, function: Callable[..., Any]) -> Any:
    """As the function takes it."""
    return hx if hx is None or function is ops.lstm else hx[0]


# ---- relay ---------------------------------------------------------------------------------------------------------


def _relay(
    op: str, function: Callable[..., Any], x: Tensor, hx: Any, weights: Sequence[Tensor], group: Any, rank: int,
    ranks: int, batch_first: bool, slices: int, options: dict[str, Any],
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    with torch.no_grad():  # one step, for every check of `function` before anybody waits, and for sizes and dtype
        _, state = function(x[:1].detach(), None if hx is None else _state(hx, function), weights, **options)
    if hx is None:
        hx = tuple(torch.zeros_like(t) for t in _tuple(state))
    x, *tensors = autocast(x, *hx, *weights)
    hx, weights = tensors[: len(hx)], tensors[len(hx) :]
    names = [name for name in ("norms", "peepholes") if options.get(name) is not None]
    counts = [len(options[name]) for name in names]
    flat = [t for name in names for t in options[name]]

    def run(x: Tensor, state: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        own, given, at = parameters[: len(weights)], dict(options), len(weights)
        for name, count in zip(names, counts, strict=True):
            given[name] = list(parameters[at : at + count])
            at += count
        output, state = function(x, _state(tuple(state), function), list(own), **given)
        return output, *_tuple(state)

    plan = (group, rank, ranks, slices, len(hx))
    output, *state = _Relay.apply(plan, run, x, *hx, *weights, *flat)
    return output.transpose(0, 1) if batch_first else output, tuple(state)


def _send(tensors: Sequence[Tensor], to: int, group: Any) -> list[Any]:
    peer = dist.get_global_rank(group, to)
    tensors = [t.contiguous() for t in tensors]
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer, group, i) for i, t in enumerate(tensors)])
    return [*works, tensors]  # which must live until they are sent


def _receive(like: Sequence[Tensor], of: int, group: Any) -> list[Tensor]:
    peer = dist.get_global_rank(group, of)
    tensors = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]
    posts = [dist.P2POp(dist.irecv, t, peer, group, i) for i, t in enumerate(tensors)]
    for work in dist.batch_isend_irecv(posts):
        work.wait()
    return tensors


def _wait(sent: Sequence[list[Any]]) -> None:
    for *works, _ in sent:
        for work in works:
            work.wait()


class _Relay(torch.autograd.Function):
    """plan, run, x, state, parameters -> output, state after the last process's steps.

    One node for all of it, so that every process sends and receives the same in the same order, whatever a loss uses.
    """

    @staticmethod
    def forward(ctx: Any, plan: Any, run: Any, x: Tensor, *tensors: Tensor) -> Any:
        group, rank, ranks, slices, states = plan
        hx, parameters = tensors[:states], tensors[states:]
        needed = any(ctx.needs_input_grad)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in parameters]
        graph, outputs, ends, sent = [], [], [], []
        bounds = list(zip(x.tensor_split(slices, 1), *(t.tensor_split(slices, 1) for t in hx), strict=True))
        for own, *state in bounds:
            if not own.shape[1]:
                continue
            if rank > 0:
                state = _receive(state, rank - 1, group)
            own, *state = (t.detach().requires_grad_(needed) for t in (own, *state))
            with torch.set_grad_enabled(needed):
                output, *end = run(own, state, leaves)
            if rank < ranks - 1:
                sent.append(_send([t.detach() for t in end], rank + 1, group))
            outputs.append(output.detach())
            ends.append([t.detach() for t in end])
            if needed:
                graph.append(((own, *state), (output, *end)))
        _wait(sent)
        output = torch.cat(outputs, 1)
        end = [torch.cat(parts, 1) for parts in zip(*ends, strict=True)]
        for t in end:
            dist.broadcast(t, dist.get_global_rank(group, ranks - 1), group=group)
        ctx.plan, ctx.graph, ctx.leaves = plan, graph, leaves
        return output, *end

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *grad_end: Tensor) -> Any:
        group, rank, ranks, _, states = ctx.plan
        if ctx.graph is None:
            raise RuntimeError("distributed: method 'relay' frees what it saved in its first backward pass")
        graph, ctx.graph = ctx.graph, None
        grads = [t.contiguous().clone() for t in grad_end]  # from every process, for the last one
        for t in grads:
            dist.all_reduce(t, group=group)
        wanted = [i for i, t in enumerate(ctx.leaves) if t.requires_grad]
        leaves = [ctx.leaves[i] for i in wanted]
        sums = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in leaves]
        found, sent, last = [], [], grad_output.shape[1]
        for inputs, outputs in reversed(graph):
            first = last - inputs[0].shape[1]
            if rank < ranks - 1:
                of_end = _receive(outputs[1:], rank + 1, group)
            else:
                of_end = [t[:, first:last] for t in grads]
            of_inputs = torch.autograd.grad(
                outputs, [*inputs, *leaves], [grad_output[:, first:last], *of_end], allow_unused=True
            )
            of_x, *of_state = (
                torch.zeros_like(t) if grad is None else grad
                for t, grad in zip(inputs, of_inputs[: 1 + states], strict=True)
            )
            if rank > 0:
                sent.append(_send(of_state, rank - 1, group))
                of_state = [torch.zeros_like(t) for t in of_state]
            found.append((of_x, *of_state))
            for total, grad in zip(sums, of_inputs[1 + states :], strict=True):
                if grad is not None:
                    total += grad
            last = first
        _wait(sent)
        of_tensors = [torch.cat(parts, 1) for parts in zip(*reversed(found), strict=True)]
        of_parameters: list[Tensor | None] = [None] * len(ctx.leaves)
        for i, total in zip(wanted, sums, strict=True):
            of_parameters[i] = total.to(ctx.leaves[i].dtype)
        return None, None, *of_tensors, *of_parameters
