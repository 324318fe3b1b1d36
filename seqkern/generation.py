"""One loop for everything that writes a token at a time: a step and its state, whatever they are.

The loop knows tokens, logits and when to stop; the step knows the model. So a cache of keys, the state of a recurrent
layer, an attention decoder and another library's model go through the same greedy search, sampling and beam search.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from seqkern import _beam_search
from seqkern._beam_search import EarlyStopping
from seqkern._keywords import explicit, refuse
from seqkern._states import chosen_rows
from seqkern.ops.sample import Order, Sampler
from seqkern.reference.sample import ORDERS

_BETWEEN_CHECKS = 16  # steps on a GPU between two looks at whether all rows are finished: each waits for it


class Chunk(NamedTuple):
    """Tokens that a step is given: first the prompts, then one token of each row.

    Attributes:
        tokens: int64, (B, T), each row from its left; what lies beyond its length is padding.
        positions: int64, (B,): of each row's first one in its sequence, 0 for the prompts.
        lengths: int64, (B,): how many of each row count.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor


class Generated(NamedTuple):
    """What `generate` returns, of R rows: the prompts, or by beam search `sequences` for each, the best first.

    Attributes:
        tokens: int64, (R, L): prompts and what follows them, then pad_token.
        lengths: int64, (R,): tokens of each row that count.
        finished: bool, (R,): whether a stop token came; it is the last one that counts.
        logprobs: float32, (R, new tokens): of the new tokens, 0 beyond a row's end; None unless asked for.
        scores: float32, (R,): of beam search, else None. Minus infinity: fewer sequences than wanted are possible.
    """

    tokens: Tensor
    lengths: Tensor
    finished: Tensor
    logprobs: Tensor | None
    scores: Tensor | None


Step = Callable[[Chunk, Any], tuple[Tensor, Any]]


@explicit
@torch.no_grad()
def generate(
    step: Step,
    state: Any,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    prompt_lengths: Tensor | None = None,
    stop_tokens: int | Sequence[int] = (),
    pad_token: int = 0,
    temperature: float | Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    typical_p: float | Tensor | None = None,
    repetition_penalty: float | Tensor | None = None,
    order: Order = "transformers",
    seed: int | Tensor | None = None,
    beams: int = 1,
    sequences: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    state_dim: int = 0,
    reorder: Callable[[Any, Tensor], Any] | None = None,
    return_logprobs: bool = False,
    callback: Callable[[Tensor], object] | None = None,
    progress: bool = False,
    **unexpected: NoReturn,
) -> Generated:
    """Continues prompts token by token: greedily, by sampling, or by beam search.

    Args:
        step: a function of (chunk, state), which returns (logits, state): logits (B, V) after each row's last token,
            or (B, T, V) after each, of which that one is taken. The chunk is a `Chunk`: the prompts, then a token of
            each row at a time. Rows that are finished go on with pad_token.
        state: what the step needs of the tokens so far: a tensor, None, or whatever it is made of. The loop owns it
            from now on: caches that are written in place are.
        prompt: int64, (B, T), T >= 1.
        max_new_tokens, min_new_tokens: how many follow a prompt; no stop token is among the first min_new_tokens.
        prompt_lengths: int64, (B,), 1 to T: tokens of each prompt, from its left. None: T.
        stop_tokens: end a row, which includes them.
        pad_token: fills rows after their end.
        temperature, top_k, top_p, min_p, typical_p, order, seed: as `sample`. None of them: greedily. A row's tokens
            depend on its own seed, not on the rows beside it.
        repetition_penalty: as `sample`, with the row's tokens so far, its prompt's too, as history.
        beams: hypotheses of each sequence in beam search; 1: none. It takes no option of sampling.
        sequences: how many of the beams' results are returned for each prompt.
        length_penalty: a result's score is its log-probability / (new tokens) ** length_penalty.
        early_stopping: of a sequence, once `beams` results are there. True: at once; False: when the best running
            hypothesis, scored at its length, is not better than one of them; "never": nor would be at any length.
        state_dim: the dimension of rows in the state's tensors: for beams. What hypotheses share is best in the step
            itself, not in the state.
        reorder: a function of (state, rows), rows int64 on the state's device: the state with those rows, which may be
            more than there were. None: tuples, lists, dicts and dataclasses of tensors, and objects with a method
            reorder(rows) or transformers' reorder_cache(rows), in all their parts.
        return_logprobs: also the new tokens' log-probabilities, of what they were drawn from. Not for beams.
        callback: called with the tokens of every step, int64, (B,), pad_token where a row is finished; if it returns
            True, that was the last one. Not for beams.
        progress: shows a bar of steps; needs the package rich.

    Returns:
        A `Generated`: (tokens, lengths, finished, logprobs, scores).

    Raises:
        TypeError, ValueError: arguments that do not fit, logits of another shape, or a state that beams cannot reorder.
        RuntimeError: as `sample`, for logits that no token can be drawn from.
        ModuleNotFoundError: progress without rich.

    Source: `sample` and `beam_step` name theirs; finished hypotheses as in transformers' beam search.

    Example:
        >>> import torch, seqkern
        >>> table = torch.eye(5).roll(1, 1)  # after each token comes the next one
        >>> def step(chunk, state):
        ...     return table[chunk.tokens], state
        >>> found = seqkern.generate(step, None, torch.tensor([[0, 1]]), max_new_tokens=8, stop_tokens=4)
        >>> found.tokens.tolist(), found.finished.tolist()
        ([[0, 1, 2, 3, 4]], [True])
    """
    if unexpected:
        refuse(generate, unexpected)
    lengths = _check_prompt(prompt, prompt_lengths)
    _check_count("max_new_tokens", max_new_tokens, 0)
    _check_count("min_new_tokens", min_new_tokens, 0)
    stops = _check_stops(stop_tokens, prompt.device)
    _check_count("pad_token", pad_token, -(2**63))
    if order not in ORDERS:
        raise ValueError(f'generate: order must be "transformers", "vllm" or "llama.cpp", got {order!r}')
    _beam_search.check("generate", beams, sequences, length_penalty, early_stopping)
    filters: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p,
        "seed": seed,
    }  # fmt: skip
    loop = _Loop(step, state, prompt, lengths, stops, max_new_tokens, min_new_tokens, pad_token)
    if beams > 1:
        given = filters | {"repetition_penalty": repetition_penalty, "callback": callback}
        wrong = [name for name, value in given.items() if value is not None]
        if wrong or return_logprobs:
            raise ValueError(
                f"generate: {wrong[0] if wrong else 'return_logprobs'} is not for beam search, beams={beams}"
            )
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        with _bar(progress, max_new_tokens) as advance:
            return _by_beams(loop, beams, sequences, state_dim, reorder, advance, options)
    draws = any(value is not None for value in filters.values())
    wanted = filters if draws else None
    with _bar(progress, max_new_tokens) as advance:
        return _by_draws(loop, wanted, order, repetition_penalty, return_logprobs, callback, advance)


class _Loop:
    """The tokens so far, and the step's calls."""

    def __init__(
        self, step: Step, state: Any, prompt: Tensor, lengths: Tensor, stops: Tensor, longest: int, least: int, pad: int
    ):
        rows, width = prompt.shape
        self.step, self.state, self.stops, self.longest, self.least, self.pad = step, state, stops, longest, least, pad
        self.rows, self.prompt_lengths, self.device = rows, lengths, prompt.device
        there = torch.arange(width, device=self.device) < lengths[:, None]
        self.tokens = prompt.new_full((rows, width + longest), pad)
        self.tokens[:, :width] = torch.where(there, prompt, pad)
        self.prompts = Chunk(self.tokens[:, :width].clone(), torch.zeros_like(lengths), lengths.clone())

    def logits(self, chunk: Chunk, count: int) -> Tensor:
        """After the chunk; `count` new tokens were there before."""
        logits, self.state = self.step(chunk, self.state)
        rows, width = chunk.tokens.shape
        if not isinstance(logits, Tensor):
            raise TypeError(f"generate: step must return logits, a tensor, and the state, got {type(logits).__name__}")
        if logits.dim() not in (2, 3) or tuple(logits.shape[:-1]) not in ((rows,), (rows, width)):
            raise ValueError(
                f"generate: step must return logits of shape ({rows}, V) or ({rows}, {width}, V), got "
                f"{tuple(logits.shape)}"
            )
        if logits.dim() == 3:
            logits = logits[:, 0] if width == 1 else logits[torch.arange(rows, device=self.device), chunk.lengths - 1]
        if count < self.least and len(self.stops):
            logits = logits.index_fill(1, self.stops, -math.inf)
        return logits

    def stopped(self, tokens: Tensor) -> Tensor:
        return (tokens[:, None] == self.stops).any(1)


def _by_draws(
    loop: _Loop,
    filters: dict[str, Any] | None,
    order: Order,
    penalty: float | Tensor | None,
    return_logprobs: bool,
    callback: Callable[[Tensor], object] | None,
    advance: Callable[[], object],
) -> Generated:
    """With few small operations a step: each costs 25 us after a large one, which empties the caches."""
    rows, stops, on_cpu = loop.rows, len(loop.stops) > 0, loop.device.type == "cpu"
    greedy = filters is None and penalty is None and not return_logprobs  # `sample` would take three times as long
    options = {"temperature": 0.0, "order": order} if filters is None else filters | {"order": order}
    past: dict[str, Any] = {} if penalty is None else {"repetition_penalty": penalty, "history": loop.tokens}
    draw: Sampler | None = None
    positions = (loop.prompt_lengths + torch.arange(loop.longest, device=loop.device)[:, None]).unbind(0)
    ones = torch.ones_like(loop.prompt_lengths)
    finished, ended = torch.zeros(rows, dtype=torch.bool, device=loop.device), 0  # rows, and how many are known to be
    chunk, chosen, values, before = loop.prompts, [], [], []
    for count in range(loop.longest if rows else 0):
        logits, position = loop.logits(chunk, count), positions[count]
        if greedy:
            value, token = logits.max(-1)
        else:
            if draw is None:
                draw = Sampler("generate", logits, logprobs=return_logprobs, **options, **past)
            token, value = draw(logits, position)
        if stops:
            before.append(finished)
            token = torch.where(finished, loop.pad, token) if ended or not on_cpu else token
            finished = finished | loop.stopped(token)
            if on_cpu or (count + 1) % _BETWEEN_CHECKS == 0:
                ended = int(finished.sum())
        chosen.append(token)
        values.append(value)
        if past:
            loop.tokens.scatter_(1, position[:, None], token[:, None])
        advance()
        if (callback is not None and callback(token) is True) or ended == rows:
            break
        chunk = Chunk(token[:, None], position, ones)
    if greedy and values:
        top = torch.stack(values, 1)
        _check_largest(top.masked_fill(torch.stack(before, 1), 0) if before else top)
    lengths = loop.prompt_lengths + len(chosen)
    if before:
        lengths = lengths - torch.stack(before).sum(0)
    if chosen:
        at = loop.prompt_lengths[:, None] + torch.arange(len(chosen), device=loop.device)
        loop.tokens.scatter_(1, at, torch.stack(chosen, 1))
    longest = int(lengths.max()) if rows else loop.tokens.shape[1] - loop.longest
    logprobs = None
    if return_logprobs:
        logprobs = torch.stack(values, 1) if values else torch.zeros((rows, 0), dtype=torch.float32, device=loop.device)
        logprobs = logprobs.masked_fill(torch.stack(before, 1), 0) if before else logprobs
    return Generated(loop.tokens[:, :longest], lengths, finished, logprobs, None)


def _check_largest(top: Tensor) -> None:
    """Of each row and step the largest logit; 0 where the row had ended."""
    if not bool(top.isfinite().all()):
        row, count = (~top.isfinite()).nonzero()[0].tolist()
        raise RuntimeError(
            f"generate: logits must not be nan, infinite or all minus infinity, but those of row {row} for its "
            f"new token {count} are"
        )


def _by_beams(
    loop: _Loop,
    beams: int,
    sequences: int,
    state_dim: int,
    reorder: Callable[[Any, Tensor], Any] | None,
    advance: Callable[[], object],
    options: dict[str, Any],
) -> Generated:
    here = torch.arange(loop.rows, device=loop.device)
    every = here.repeat_interleave(sequences)
    if loop.longest == 0 or loop.rows == 0:
        scores = torch.zeros(len(every), dtype=torch.float32, device=loop.device)
        finished = torch.zeros(len(every), dtype=torch.bool, device=loop.device)
        return Generated(loop.prompts.tokens[every], loop.prompt_lengths[every], finished, None, scores)
    before = here  # rows of the state
    lengths = loop.prompt_lengths.repeat_interleave(beams)
    ones = torch.ones_like(lengths)

    def following(rows: Tensor, token: Tensor, count: int) -> Tensor:
        nonlocal before
        if not torch.equal(rows, before):
            if reorder is None:
                loop.state = chosen_rows(loop.state, rows, len(before), state_dim)
            else:
                loop.state = reorder(loop.state, rows)
        before = torch.arange(len(rows), device=loop.device)
        return loop.logits(Chunk(token[:, None], lengths + (count - 1), ones), count)

    found = _beam_search.search(
        loop.logits(loop.prompts, 0), following, beams=beams, longest=loop.longest, stops=loop.stops,
        pad_token=loop.pad, advance=advance, **options,
    )  # fmt: skip
    new, counts, stopped, scores = (t[:, :sequences].flatten(0, 1) for t in found)
    tokens, starts = loop.tokens[every], loop.prompt_lengths[every]
    column = torch.arange(loop.longest, device=loop.device)
    tokens.scatter_(1, starts[:, None] + column, torch.where(column < counts[:, None], new, loop.pad))
    ends = starts + counts
    return Generated(tokens[:, : int(ends.max())], ends, stopped, None, scores)


# ---- arguments ----------------------------------------------------------------------------------------------------


def _check_prompt(prompt: Any, lengths: Any) -> Tensor:
    """The lengths of the prompts."""
    for name, t in (("prompt", prompt), ("prompt_lengths", lengths)):
        if t is None and name == "prompt_lengths":
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"generate: {name} must be a tensor, got {type(t).__name__}")
        if t.dtype != torch.int64:
            raise TypeError(f"generate: {name} must be int64, got {t.dtype}")
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"generate: prompt must have shape (B, T) with T >= 1, got {tuple(prompt.shape)}")
    rows, width = prompt.shape
    if lengths is None:
        return torch.full((rows,), width, dtype=torch.int64, device=prompt.device)
    if lengths.shape != (rows,):
        raise ValueError(f"generate: prompt_lengths must have shape ({rows},), got {tuple(lengths.shape)}")
    if lengths.device != prompt.device:
        raise ValueError(f"generate: prompt_lengths must be on prompt's device {prompt.device}, got {lengths.device}")
    if rows and not 1 <= int(lengths.min()) <= int(lengths.max()) <= width:
        raise ValueError(f"generate: prompt_lengths must be at least 1 and at most {width}, got {lengths.tolist()}")
    return lengths


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"generate: {name} must be a whole number, got {value!r}")
    if not least <= value < 2**63:
        raise ValueError(f"generate: {name} must be at least {least}, got {value}")


def _check_stops(stops: Any, device: torch.device) -> Tensor:
    given = [stops] if isinstance(stops, int) else list(stops)
    for stop in given:
        _check_count("stop_tokens", stop, 0)
    return torch.tensor(sorted(set(given)), dtype=torch.int64, device=device)


@contextlib.contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Callable[[], object]]:
    if not wanted:
        yield lambda: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("generate: progress=True needs rich: pip install rich") from error
    columns = (TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("tokens", total=total)
        yield lambda: bar.advance(task)
