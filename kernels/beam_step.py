"""A step of beam search in Triton: the candidates of each beam, and the best of them all.

A program takes a beam: a pass for the maximum, one for the sum of the exponentials, and one for each candidate, which
looks for the largest logit after the last one, of equal ones the first token. The candidates of a row's beams, some
dozens, are then sorted by torch. Equations: seqkern/reference/beam_step.py.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import Launch, power_of_two
from ._replay import Memory, noted, planned

__all__ = ["aot_configurations", "beam_step"]

BLOCK = 2048


@triton.jit(do_not_specialize=["classes", "most"])
def candidates_kernel(logits_ptr, scores_ptr, best_ptr, token_ptr, classes, most, BLOCK_V: tl.constexpr):
    """One beam: `most` scores in double, minus infinity where there are no more, and their tokens."""
    beam = tl.program_id(0).to(tl.int64)
    row = logits_ptr + beam * classes
    score = tl.load(scores_ptr + beam)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float64)
    good = (score < float("inf")).to(tl.int32)
    alive = score > float("-inf")
    end = tl.where(alive, classes, 0)  # a dead beam's logits are not read
    for begin in range(0, end, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        z = tl.load(row + column, mask=column < classes, other=float("-inf")).to(tl.float32)
        good = good & tl.min((z < float("inf")).to(tl.int32), 0)
        top = tl.maximum(top, tl.max(z, 0))
    for begin in range(0, end, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        z = tl.load(row + column, mask=column < classes, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(z - top), 0).to(tl.float64)
    lse = top.to(tl.float64) + tl.log(total)
    last = tl.full((), float("inf"), tl.float32)
    place = classes * 0 - 1
    for i in range(most):
        here = tl.full((), float("-inf"), tl.float32)
        at = classes + 0
        for begin in range(0, end, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            z = tl.load(row + column, mask=column < classes, other=float("-inf")).to(tl.float32)
            after = (z < last) | ((z == last) & (column > place))
            z = tl.where(after, z, float("-inf"))
            most_here = tl.max(z, 0)
            first = tl.min(tl.where((z == most_here) & after & (column < classes), column, classes), 0)
            at = tl.where(most_here > here, first, at)
            here = tl.maximum(here, most_here)
        there = (good == 1) & (here > float("-inf"))
        value = score.to(tl.float64) + (here.to(tl.float64) - lse)
        tl.store(best_ptr + beam * most + i, tl.where(there, value, float("-inf")))
        tl.store(token_ptr + beam * most + i, tl.where(there, at, 0).to(tl.int64))
        last = here
        place = at


def beam_step(logits, scores, candidates):
    """The launcher behind `seqkern::beam_step`."""
    batch, beams, classes = logits.shape
    most = min(candidates, classes)
    given = (logits.contiguous(), scores.contiguous())
    best, tokens = planned(_plan, given, (most,), logits.device)
    best, tokens = best.view(batch, beams * most), tokens.view(batch, beams * most)
    best, ranked = best.sort(dim=1, descending=True, stable=True)  # candidates of a beam are in order, and beams too
    best, ranked = best[:, :candidates], ranked[:, :candidates]
    possible = best > float("-inf")
    found = (
        best.float(),
        torch.where(possible, ranked // most, 0),
        torch.where(possible, tokens.gather(1, ranked), 0),
    )
    missing = candidates - best.shape[1]
    if not missing:
        return found
    pads = (float("-inf"), 0, 0)
    return tuple(torch.nn.functional.pad(t, (0, missing), value=value) for t, value in zip(found, pads, strict=True))


def _plan(memory, logits, scores, most):
    batch, beams, classes = logits.shape
    best = memory.empty(logits, (batch, beams, most), torch.float64)
    tokens = memory.empty(logits, (batch, beams, most), torch.int64)
    block = min(BLOCK, max(16, power_of_two(classes)))
    arguments = (logits, scores, best, tokens, classes, most)
    warps = max(1, min(8, block // 256))
    return (best, tokens), [
        Launch("beam_step", candidates_kernel, (batch * beams,), arguments, {"BLOCK_V": block}, warps, registers=255)
    ]


def explained(op, logits, scores=None, candidates=None):
    """The launch of a call; nothing is launched."""
    beams = logits if logits.dim() == 3 else logits[None]
    with noted() as launches:
        planned(_plan, (beams, None), (2 * beams.shape[1],), logits.device)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use little shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16)
    for dtype in dtypes if thorough else dtypes[:2]:
        for classes in (32000, 100):
            logits = torch.empty(2, 4, classes, dtype=dtype, device="meta")
            scores = torch.empty(2, 4, dtype=torch.float32, device="meta")
            _, (launch,) = _plan(Memory(), logits, scores, 8)
            yield f"{launch.name}-{str(dtype).removeprefix('torch.')}-{classes}", launch
