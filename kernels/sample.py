"""Sampling tokens from rows of logits in Triton: filters without sorting, and one draw a row.

A program takes a row. It works on a copy of it in float32, in which minus infinity stands for a token that is left out.
A filter is a limit on a key, the logit or minus the distance of a token's information from the entropy: the largest
limit at and above which there are enough tokens, or enough probability. It is found exactly, bit by bit: a key's bits
as an integer have the order of the keys, and 32 passes over the row halve what is left. Of equal keys at the limit the
first tokens are kept, where not all are. The token is the first at which the sum of probabilities passes the Philox
number of the row's seed and position. Equations and sources: seqkern/reference/sample.py.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import Launch, power_of_two
from ._replay import Memory, noted, planned

__all__ = ["aot_configurations", "filter_logits", "sample"]

BLOCK = 2048  # tokens that a program works on at once; 4096 spill
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # from one seed another one for each row
STREAM = tl.constexpr(0x53414D50)
SLACK = tl.constexpr(1 - 1e-6)  # 9 of 10 equal tokens have a probability of 0.9, however it is rounded
COUNT, LOGIT, TYPICAL = (tl.constexpr(i) for i in range(3))
ORDERS = TRANSFORMERS, VLLM, LLAMA_CPP = tuple(tl.constexpr(i) for i in range(3))


@triton.jit
def key_of(z, top, centre, KIND: tl.constexpr):
    """An integer with the order of the logits, or, TYPICAL, of how near a token's information is to the entropy."""
    if KIND == TYPICAL:
        z = -tl.abs(z - top - centre)
    z = tl.where(z == 0.0, 0.0, z)  # minus 0 is 0
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def total_of(row, top, classes, BLOCK_V: tl.constexpr):
    """The sum of exp(z - top), and that of it times z - top."""
    total = tl.full((), 0.0, tl.float64)
    moment = tl.full((), 0.0, tl.float64)
    for begin in range(0, classes, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        z = tl.load(row + column, mask=column < classes, other=float("-inf"))
        e = tl.exp(z - top)
        total += tl.sum(e, 0).to(tl.float64)
        moment += tl.sum(tl.where(e > 0, e * (z - top), 0.0), 0).to(tl.float64)
    return total, moment


@triton.jit
def weigh(row, top, centre, limit, classes, KIND: tl.constexpr, BLOCK_V: tl.constexpr):
    """The number, or the probability times the total, of tokens whose key is at least `limit`."""
    weight = tl.full((), 0.0, tl.float64)
    for begin in range(0, classes, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        z = tl.load(row + column, mask=column < classes, other=float("-inf"))
        enough = (key_of(z, top, centre, KIND).to(tl.int64) >= limit) & (column < classes)
        each = tl.exp(z - top)
        if KIND == COUNT:
            each = tl.full([BLOCK_V], 1.0, tl.float32)
        weight += tl.sum(tl.where(enough, each, 0.0), 0).to(tl.float64)
    return weight


@triton.jit
def cut(row, top, centre, target, classes, KIND: tl.constexpr, ALL_TIES: tl.constexpr, BLOCK_V: tl.constexpr):
    """Leaves tokens out: keeps those with the largest keys, so that their weight reaches `target`; one at least."""
    target = tl.maximum(target, 1e-300)
    low = tl.full((), -(2**31), tl.int64)
    high = tl.full((), 2**31, tl.int64)
    for _ in range(32):
        middle = (low + high) // 2
        enough = weigh(row, top, centre, middle, classes, KIND, BLOCK_V) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    reached = weigh(row, top, centre, low + 1, classes, KIND, BLOCK_V)
    tl.debug_barrier()
    for begin in range(0, classes, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        z = tl.load(row + column, mask=column < classes, other=float("-inf"))
        key = key_of(z, top, centre, KIND).to(tl.int64)
        tied = (key == low) & (column < classes)
        each = tl.exp(z - top)
        if KIND == COUNT:
            each = tl.full([BLOCK_V], 1.0, tl.float32)
        each = tl.where(tied, each, 0.0).to(tl.float64)
        kept = key > low
        if ALL_TIES:
            kept = kept | tied
        else:
            before = reached + tl.cumsum(each, 0) - each
            kept = kept | (tied & (before < target))
        tl.store(row + column, tl.where(kept, z, float("-inf")), mask=column < classes)
        reached += tl.sum(each, 0)
    tl.debug_barrier()


@triton.jit
def top_k(row, top, k, classes, ALL_TIES: tl.constexpr, BLOCK_V: tl.constexpr):
    if (k > 0) & (k < classes):
        cut(row, top, 0.0, k.to(tl.float64), classes, COUNT, ALL_TIES, BLOCK_V)


@triton.jit
def top_p(row, top, p, classes, BLOCK_V: tl.constexpr):
    if p < 1:
        total, _moment = total_of(row, top, classes, BLOCK_V)
        cut(row, top, 0.0, p * total * SLACK, classes, LOGIT, False, BLOCK_V)


@triton.jit
def min_p(row, top, p, classes, BLOCK_V: tl.constexpr):
    if p > 0:
        least = top + tl.log(p).to(tl.float32)
        for begin in range(0, classes, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            z = tl.load(row + column, mask=column < classes, other=float("-inf"))
            tl.store(row + column, tl.where(z < least, float("-inf"), z), mask=column < classes)
        tl.debug_barrier()


@triton.jit
def typical(row, top, p, classes, BLOCK_V: tl.constexpr):
    if p < 1:
        total, moment = total_of(row, top, classes, BLOCK_V)
        centre = (moment / total).to(tl.float32)
        cut(row, top, centre, p * total * SLACK, classes, TYPICAL, True, BLOCK_V)


@triton.jit
def largest(row, classes, BLOCK_V: tl.constexpr):
    """The largest logit, and its first place."""
    top = tl.full((), float("-inf"), tl.float32)
    place = classes + 0
    for begin in range(0, classes, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        z = tl.load(row + column, mask=column < classes, other=float("-inf"))
        here = tl.max(z, 0)
        at = tl.min(tl.where((z == here) & (column < classes), column, classes), 0)
        place = tl.where(here > top, at, place)
        top = tl.maximum(top, here)
    return top, place


@triton.jit(do_not_specialize=["classes", "stride", "steps"])
def sample_kernel(
    logits_ptr, work_ptr, seed_ptr, position_ptr, temperature_ptr, k_ptr, p_ptr, min_ptr, typical_ptr, token_ptr,
    logprob_ptr, classes, stride, steps, ORDER: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row. steps: how far each option's next number is, 0 where one is for all. No token_ptr: only the filters."""
    r = tl.program_id(0).to(tl.int64)
    row = work_ptr + r * classes
    temperature = tl.full((), 1.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + r * steps[0]).to(tl.float32)
    greedy = temperature < 1e-30
    divisor = tl.where(greedy, 1.0, temperature)
    good = tl.full((), 1, tl.int32)
    for begin in range(0, classes, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        z = tl.load(logits_ptr + r * stride + column, mask=column < classes, other=float("-inf")).to(tl.float32)
        if ORDER != LLAMA_CPP:
            z = z / divisor
        good = good & tl.min((z < float("inf")).to(tl.int32), 0)
        tl.store(row + column, z, mask=column < classes)
    tl.debug_barrier()
    top, place = largest(row, classes, BLOCK_V)
    good = good & (top > float("-inf")).to(tl.int32)
    if greedy & (good == 1):
        for begin in range(0, classes, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            z = tl.load(row + column, mask=column < classes, other=float("-inf"))
            tl.store(row + column, tl.where(column == place, z, float("-inf")), mask=column < classes)
        tl.debug_barrier()
    if (greedy == 0) & (good == 1):
        k = tl.full((), 0, tl.int64)
        p = tl.full((), 1.0, tl.float64)
        least = tl.full((), 0.0, tl.float64)
        mass = tl.full((), 1.0, tl.float64)
        if k_ptr is not None:
            k = tl.load(k_ptr + r * steps[1])
        if p_ptr is not None:
            p = tl.load(p_ptr + r * steps[2])
        if min_ptr is not None:
            least = tl.load(min_ptr + r * steps[3])
        if typical_ptr is not None:
            mass = tl.load(typical_ptr + r * steps[4])
        if ORDER == VLLM:
            min_p(row, top, least, classes, BLOCK_V)
        top_k(row, top, k, classes, ORDER != LLAMA_CPP, BLOCK_V)
        if ORDER == LLAMA_CPP:
            typical(row, top, mass, classes, BLOCK_V)
            top, place = largest(row, classes, BLOCK_V)
        top_p(row, top, p, classes, BLOCK_V)
        if ORDER != VLLM:
            min_p(row, top, least, classes, BLOCK_V)
        if ORDER != LLAMA_CPP:
            typical(row, top, mass, classes, BLOCK_V)
        else:
            for begin in range(0, classes, BLOCK_V):
                column = begin + tl.arange(0, BLOCK_V)
                z = tl.load(row + column, mask=column < classes, other=float("-inf"))
                tl.store(row + column, z / divisor, mask=column < classes)
            tl.debug_barrier()
        top, place = largest(row, classes, BLOCK_V)
        good = good & (tl.abs(top) < float("inf")).to(tl.int32)
    if token_ptr is not None:
        token = tl.full((), 0, tl.int64)
        logprob = tl.full((), float("nan"), tl.float32)
        if good == 1:
            seed = tl.load(seed_ptr + r * steps[5])
            position = tl.load(position_ptr + r * steps[6])
            high, low, _w2, _w3 = tl.philox(
                seed, position.to(tl.uint32), (position >> 32).to(tl.uint32), STREAM, 0, n_rounds=7
            )  # fmt: skip
            bits = (high.to(tl.uint32, bitcast=True).to(tl.int64) << 21) | (
                low.to(tl.uint32, bitcast=True).to(tl.int64) >> 11
            )
            u = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16
            total, _moment = total_of(row, top, classes, BLOCK_V)
            target = u * total
            reached = tl.full((), 0.0, tl.float64)
            found = classes + 0
            last = classes * 0
            for begin in range(0, classes, BLOCK_V):
                column = begin + tl.arange(0, BLOCK_V)
                z = tl.load(row + column, mask=column < classes, other=float("-inf"))
                e = tl.exp(z - top).to(tl.float64)
                passed = (reached + tl.cumsum(e, 0) > target) & (e > 0)
                found = tl.minimum(found, tl.min(tl.where(passed, column, classes), 0))
                last = tl.maximum(last, tl.max(tl.where(e > 0, column, 0), 0))
                reached += tl.sum(e, 0)
            place = tl.where(found < classes, found, last)
            token = place.to(tl.int64)
            logprob = (tl.load(row + place) - top).to(tl.float32) - tl.log(total).to(tl.float32)
        tl.store(token_ptr + r, token)
        if logprob_ptr is not None:
            tl.store(logprob_ptr + r, logprob)


def sample(
    logits, seed, seeds, position, positions, temperature, temperatures, top_k, top_ks, top_p, top_ps, min_p, min_ps,
    typical_p, typical_ps, penalty, penalties, history, length, lengths, order, logprob,
):  # fmt: skip
    """The launcher behind `seqkern::sample`: (token, logprob)."""
    z = _penalised(logits, penalty, penalties, history, length, lengths)
    if seeds is None:
        seeds = seed + GOLDEN * torch.arange(len(logits), device=logits.device)
    numbers = (
        (seeds, 0), (positions, position), (temperatures, temperature), (top_ks, top_k), (top_ps, top_p),
        (min_ps, min_p), (typical_ps, typical_p),
    )  # fmt: skip
    token, logprobs = planned(_plan, (z, *_tensors(z, numbers)), (order, True, logprob), logits.device)
    if logprob == 2:
        raw = logits.float()
        logprobs = raw.gather(1, token[:, None])[:, 0] - raw.logsumexp(1)
    return token, logprobs


def filter_logits(
    logits, temperature, temperatures, top_k, top_ks, top_p, top_ps, min_p, min_ps, typical_p, typical_ps, penalty,
    penalties, history, length, lengths, order,
):  # fmt: skip
    """The launcher behind `seqkern::filter_logits`: what tokens would be drawn by, float32."""
    z = _penalised(logits, penalty, penalties, history, length, lengths)
    numbers = (
        (temperatures, temperature), (top_ks, top_k), (top_ps, top_p), (min_ps, min_p), (typical_ps, typical_p)
    )  # fmt: skip
    tensors = (z, None, None, *_tensors(z, numbers))
    return planned(_plan, tensors, (order, False, 0), logits.device)[0]


def _tensors(z, numbers):
    """Of each number for all rows a tensor of one; and tensors of a number for each row, contiguous."""
    for t, number in numbers:
        if t is not None:
            yield t.contiguous()
        else:
            dtype = torch.int64 if isinstance(number, int) else torch.float64
            yield torch.full((1,), number, dtype=dtype, device=z.device)


def _penalised(logits, penalty, penalties, history, length, lengths):
    """The logits, contiguous; float32 and penalised where tokens are in the history."""
    if history is None:
        return logits.contiguous()
    classes = logits.size(1)
    there = (history >= 0) & (history < classes)
    until = length if lengths is None else lengths[:, None]
    there &= torch.arange(history.size(1), device=history.device) < until
    at = torch.where(there, history, classes)  # a column beyond takes what is no token
    z = torch.nn.functional.pad(logits.float(), (0, 1))
    given, by = z.gather(1, at), penalty if penalties is None else penalties.float()[:, None]
    return z.scatter_(1, at, torch.where(given < 0, given * by, given / by))[:, :classes].contiguous()


def _plan(memory, logits, seed, position, temperature, k, p, least, mass, order, draws, logprob):
    rows, classes = logits.shape
    work = memory.empty(logits, (rows, classes), torch.float32)
    token = memory.empty(logits, (rows,), torch.int64) if draws else None
    logprobs = memory.empty(logits, (rows if logprob else 0,), torch.float32) if draws else None
    options = (temperature, k, p, least, mass, seed, position)
    steps = tuple(0 if t is None or len(t) < rows else 1 for t in options)
    block = min(BLOCK, max(16, power_of_two(classes)))
    arguments = (
        logits, work, seed, position, temperature, k, p, least, mass, token, logprobs if logprob else None, classes,
        logits.stride(0), steps,
    )  # fmt: skip
    constants = {"ORDER": order, "BLOCK_V": block}
    step = Launch("sample", sample_kernel, (rows,), arguments, constants, max(1, min(8, block // 256)), registers=255)
    return (token, logprobs) if draws else (work,), [step]


def explained(op, logits, *_):
    """The launch of a call; nothing is launched."""
    rows = logits.flatten(0, -2) if logits.dim() > 1 else logits[None]
    with noted() as launches:
        planned(_plan, (rows, *(None,) * 7), (0, False, 0), logits.device)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use little shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.float32,)
    for dtype in dtypes:
        for classes in (32000, 100) if thorough else (32000,):
            for order in range(3):
                logits = torch.empty(8, classes, dtype=dtype, device="meta")
                whole, real = (torch.empty(8, dtype=t, device="meta") for t in (torch.int64, torch.float64))
                for draws in (True, False):
                    seeds = (whole, whole) if draws else (None, None)
                    given = (logits, *seeds, real, whole, real, real, real)
                    _, (launch,) = _plan(Memory(), *given, order, draws, int(draws))
                    kind = "draw" if draws else "filter"
                    yield f"{launch.name}-{kind}-{order}-{str(dtype).removeprefix('torch.')}-{classes}", launch
