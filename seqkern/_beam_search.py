"""Beam search, as transformers' generation has it: the running beams, and the best finished ones of each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from seqkern.ops.beam_step import beam_step

EarlyStopping = Literal[False, True, "never"]


class Found(NamedTuple):
    """The best finished first: new tokens int64, (B, K, L); how many count, (B, K); whether a stop token is the last of
    them, (B, K); scores float32, (B, K), minus infinity where there are fewer than K."""

    tokens: Tensor
    counts: Tensor
    stopped: Tensor
    scores: Tensor


def search(
    first: Tensor,
    following: Callable[[Tensor, Tensor, int], Tensor],
    *,
    beams: int,
    longest: int,
    stops: Tensor,
    pad_token: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    advance: Callable[[], object],
) -> Found:
    """The search over at most `longest` new tokens.

    Args:
        first: logits (B, V) after the prompts.
        following: of rows, int64 (B K,), the beams that go on, their next tokens (B K,), and how many there are with
            them: logits (B K, V). Rows are those of the last call, and of the first one the B prompts'.

    A finished one's score is its log-probability divided by length ** length_penalty. At a stop token among the K best
    of a step a beam ends; 2K candidates, or more with several stop tokens, leave K that go on. The search of a sequence
    ends where no running beam is expected to come among its K finished ones: `early_stopping` True when there are K;
    False: when the best running one, divided as it is, is worse than all; "never": when it is worse even at the most
    favourable length.

    Source: Sutskever et al. 2014; lengths, Wu et al., "Google's Neural Machine Translation System", 2016, in
    transformers' form.
    """
    batch, device = first.shape[0], first.device
    candidates = max(2, 1 + len(stops)) * beams
    running = first.new_zeros((batch, 1), dtype=torch.float32)  # scores of the beams: of one, until there are more
    tokens = torch.full((batch, 1, longest), pad_token, dtype=torch.int64, device=device)
    found = Found(
        tokens.expand(-1, beams, -1),
        torch.zeros((batch, beams), dtype=torch.int64, device=device),
        torch.zeros((batch, beams), dtype=torch.bool, device=device),
        torch.full((batch, beams), -math.inf, dtype=torch.float32, device=device),
    )
    finished = torch.zeros((batch, beams), dtype=torch.bool, device=device)
    open_ = torch.ones((batch, 1), dtype=torch.bool, device=device)  # whether more may come among the finished ones
    row = torch.arange(batch, device=device)[:, None]
    logits = first
    for count in range(1, longest + 1):
        width = running.shape[1]
        best = beam_step(logits.unflatten(0, (batch, width)), running, candidates=candidates)
        possible = best.scores > -math.inf
        stopped = (best.tokens[:, :, None] == stops).any(-1) & possible
        ended = possible if count == longest else stopped
        grown = tokens[row, best.beams]
        grown[:, :, count - 1] = torch.where(possible, best.tokens, pad_token)

        counted = ended & open_
        counted[:, beams:] = False
        scores = torch.where(counted, best.scores / count**length_penalty, -math.inf)
        candidates_here = Found(grown, torch.full_like(best.tokens, count), stopped, scores)
        merged = Found(*(torch.cat(pair, 1) for pair in zip(found, candidates_here, strict=True)))
        kept = merged.scores.argsort(dim=1, descending=True, stable=True)[:, :beams]
        found = Found(*(t[row, kept] for t in merged))
        finished = torch.cat((finished, counted), 1)[row, kept]
        if count == longest:
            break

        on = stopped.to(torch.int8).argsort(dim=1, stable=True)[:, :beams]  # the first that did not end
        running = torch.where(stopped, -math.inf, best.scores)[row, on]
        divisor = longest if early_stopping == "never" and length_penalty > 0 else count
        hopeful = running.amax(1, keepdim=True) / divisor**length_penalty > found.scores.amin(1, keepdim=True)
        open_ = open_ & hopeful  # no running one is left, or none is expected among the finished ones
        if early_stopping is True:
            open_ = open_ & ~finished.all(1, keepdim=True)
        advance()
        if not bool(open_.any()):
            break
        running = torch.where(open_, running, -math.inf)
        beam = best.beams[row, on]
        if width == beams:
            places, parents = _in_place(beam.tolist(), (running > -math.inf).tolist())
            order, beam = (torch.tensor(t, device=device) for t in (places, parents))
            on, running = on.gather(1, order), running.gather(1, order)
        tokens = grown[row, on]
        logits = following((row * width + beam).flatten(), tokens[:, :, count - 1].flatten(), count)
    return found


def _in_place(parents: list[list[int]], alive: list[list[bool]]) -> tuple[list[list[int]], list[list[int]]]:
    """For each sequence which continuation goes to which beam's place, and whose state it needs there.

    The first continuation of a beam stays where the beam is, and so does its state. Others take the places of beams
    that do not go on: these states alone are copied, some quarter of them.
    """
    orders, sources = [], []
    for row, there in zip(parents, alive, strict=True):
        order, rest = [-1] * len(row), []
        for child, parent in enumerate(row):
            if there[child] and order[parent] < 0:
                order[parent] = child
            else:
                rest.append(child)
        source, others = list(range(len(row))), iter(rest)
        for place, child in enumerate(order):
            if child < 0:
                order[place] = child = next(others)
                source[place] = row[child] if there[child] else place
        orders.append(order)
        sources.append(source)
    return orders, sources


def check(op: str, beams: Any, sequences: Any, length_penalty: Any, early_stopping: Any) -> None:
    for name, value, most in (("beams", beams, math.inf), ("sequences", sequences, beams)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{op}: {name} must be a whole number, got {value!r}")
        if not 1 <= value <= most:
            limit = "at least 1" if most == math.inf else f"at least 1 and at most beams, {most}"
            raise ValueError(f"{op}: {name} must be {limit}, got {value}")
    if isinstance(length_penalty, bool) or not isinstance(length_penalty, (int, float)):
        raise TypeError(f"{op}: length_penalty must be a number, got {length_penalty!r}")
    if not math.isfinite(length_penalty):
        raise ValueError(f"{op}: length_penalty must be finite, got {length_penalty}")
    if early_stopping is not True and early_stopping is not False and early_stopping != "never":
        raise ValueError(f'{op}: early_stopping must be False, True or "never", got {early_stopping!r}')
