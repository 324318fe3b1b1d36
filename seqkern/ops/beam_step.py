"""The best continuations in beam search: the functional API and the fake kernel."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern.ops._autograd import FLOATING, Cost, per_sample


class Continuations(NamedTuple):
    """The best first, each (B, candidates): log-probabilities, float32; their beams, and the tokens, int64."""

    scores: Tensor
    beams: Tensor
    tokens: Tensor


@explicit
def beam_step(
    logits: Tensor, scores: Tensor, *, candidates: int | None = None, **unexpected: NoReturn
) -> Continuations:
    """The most probable continuations of beams by a token, without the log-probabilities of all.

    A continuation's score is its beam's plus the token's log-probability, logit - logsumexp(logits).

    Args:
        logits: shape (B, K, V), of K beams each; float64, float32, bfloat16 or float16, taken as float32. Minus
            infinity: a token that cannot be.
        scores: float32, shape (B, K): the beams' log-probabilities. Minus infinity: nothing goes on from a beam, and
            its logits are not read. So give a beginning one beam that counts.
        candidates: how many are wanted; None: 2K, of which K are left when each beam may end by one token.

    Returns:
        scores, float32, beams and tokens, int64, each (B, candidates), the best first; of equal ones the first beam,
        then the first token. Where fewer are possible, minus infinity, beam 0 and token 0. No gradient.

    Raises:
        TypeError: not tensors or a number, or dtypes that do not fit.
        ValueError: shapes, devices or numbers that do not fit.
        RuntimeError: on CPU, nan or infinity among the scores, or among the logits of a beam that counts. On a GPU
            a row with such logits has no continuations.
        NotImplementedError: the backend in force does not run on the device.

    Source: Graves 2012, Sutskever et al. 2014, as reference/beam_step.py.

    Example:
        >>> import torch, seqkern
        >>> logits = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]]])
        >>> best = seqkern.beam_step(logits, torch.tensor([[0.0, -1.0]]), candidates=3)
        >>> best.beams.tolist(), best.tokens.tolist()
        ([[0, 1, 0]], [[1, 0, 2]])
    """
    if any(map(is_proxy, (logits, scores))):
        return record(beam_step, locals())
    if unexpected:
        refuse(beam_step, unexpected)
    op = "beam_step"
    _check_tensors(op, logits, scores)
    if candidates is None:
        candidates = max(1, 2 * logits.shape[1])
    if isinstance(candidates, bool) or not isinstance(candidates, (int, torch.SymInt)):
        raise TypeError(f"{op}: candidates must be a whole number or None, got {candidates!r}")
    if candidates < 1:
        raise ValueError(f"{op}: candidates must be at least 1, got {candidates}")
    z, given = logits.detach(), scores.detach()
    if backend_for(op, z) == "reference":
        return Continuations(*_by_reference(op, z, given, candidates))
    return Continuations(*kernel(op, z)(z, given, candidates))


def cost(rows: int, classes: int, dtype: torch.dtype) -> Cost:
    """Work of a call: each logit is read once."""
    return Cost(4 * rows * classes, rows * classes * dtype.itemsize)


def _check_tensors(op: str, logits: Any, scores: Any) -> None:
    for name, t in (("logits", logits), ("scores", scores)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        check_not_nested(op, name, t, "pad it, with scores of minus infinity")
    if logits.dtype not in FLOATING:
        raise TypeError(f"{op}: logits must be float64, float32, bfloat16 or float16, got {logits.dtype}")
    if scores.dtype != torch.float32:
        raise TypeError(f"{op}: scores must be float32, got {scores.dtype}")
    if logits.dim() != 3 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits must have shape (B, K, V) with V >= 1, got {tuple(logits.shape)}")
    if scores.shape != logits.shape[:2]:
        raise ValueError(f"{op}: scores must have logits's shape {tuple(logits.shape[:2])}, got {tuple(scores.shape)}")
    if scores.device != logits.device:
        raise ValueError(f"{op}: scores must be on logits's device {logits.device}, got {scores.device}")


def _by_reference(op: str, logits: Tensor, scores: Tensor, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    infinity = float("inf")
    if not (scores < infinity).all():
        raise RuntimeError(f"{op}: scores must not be nan or infinity, got {scores.max().item()}")
    if not (logits[scores > -infinity].float() < infinity).all():
        raise RuntimeError(f"{op}: logits must not be nan or infinite, but some are")
    best, beams, tokens = reference.beam_step(logits.float().double(), scores, candidates)
    return best.float(), beams, tokens


@torch.library.register_fake("seqkern::beam_step")
def _(logits: Tensor, scores: Tensor, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (logits.shape[0], candidates)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty(shape, dtype=torch.int64),
    )


@torch.library.register_vmap("seqkern::beam_step")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.beam_step, info.batch_size, in_dims, args)
