"""Attention's backward pass by mma.sync: in the host executor (tests/simt), and the same cases on a GPU where one is.

Every `check_*` runs cases on a device: "cpu" in a process whose CPU tensors stand for the GPU's memory. The forward
results are the CPU kernels', so that these tests need no other CUDA kernel; but float32 is judged with its own.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_backward import BackwardCall
from cuda_checks import assert_same_digest, checks_of, gpu_bits_test, gpu_test, print_digest, run_words

from seqkern.testing.attention_calls import OpCase

SHORT = (torch.bfloat16, torch.float16)
FLOATS = (*SHORT, torch.float32)
Call = functools.partial(BackwardCall, path="mma")


# ---- cases ---------------------------------------------------------------------------------------------------------

GROUP: dict[str, Any] = {"heads": 4, "kv_heads": 2}
OPTIONS: dict[str, OpCase] = {
    "full": OpCase(lengths=((100, 150),), **GROUP),
    "causal": OpCase(lengths=((130, 170),), right=0, lower_right=True, **GROUP),
    "causal, upper left": OpCase(lengths=((170, 130),), right=0, grad_lse=False),
    "window": OpCase(lengths=((150, 190),), left=40, right=9, diagonal=17, strided=True),
    "window that leaves keys unseen": OpCase(lengths=((70, 300),), left=3, right=0, diagonal=120),
    "key lengths": OpCase(lengths=((40, 150),) * 3, key_lengths=(0, 97, 200), right=5, diagonal=60),
    "packed": OpCase(
        lengths=((5, 40), (0, 70), (93, 0), (1, 1), (130, 165)), varlen=True, gaps=(7, 33), right=0, lower_right=True
    ),
    "packed lengths": OpCase(lengths=((70, 90), (33, 150)), varlen=True, gaps=(3, 0), key_lengths=(41, 149), **GROUP),
    "sinks": OpCase(lengths=((65, 70),), sinks=True, **GROUP),
    "negative scale": OpCase(lengths=((65, 70),), scale=-0.2),
    "softcap": OpCase(lengths=((70, 90),), softcap=1.5, **GROUP),
    "alibi": OpCase(lengths=((90, 120),) * 2, slopes=True, need_slopes=True, right=0, lower_right=True, **GROUP),
    "dropout": OpCase(lengths=((90, 120),) * 2, dropout_p=0.3, **GROUP),
    "bool mask": OpCase(lengths=((80, 120),) * 2, mask="bool", mask_sizes=(True, False, True, True), extreme=True),
    "mask by key": OpCase(lengths=((80, 120),) * 2, mask="added", mask_sizes=(True, True, False, True), strided=True),
    "mask of its own": OpCase(lengths=((80, 120),) * 2, mask="added", need_mask=True, right=0, left=50),
    "mask of the dtype": OpCase(lengths=((40, 90), (65, 12)), mask="added own", need_mask=True, varlen=True),
    "mask of all heads": OpCase(
        lengths=((80, 120),) * 2, mask="added", mask_sizes=(True, False, True, True), need_mask=True, right=0
    ),
    "mask of all sequences": OpCase(
        lengths=((80, 120), (10, 65)), mask="added own", mask_sizes=(False, True, True, True), need_mask=True,
        varlen=True, dropout_p=0.2, slopes=True, need_slopes=True,
    ),
    "one mask": OpCase(
        lengths=((70, 80),) * 2, mask="added", mask_sizes=(False, False, True, True), need_mask=True, softcap=4.0,
        **GROUP,
    ),
    "everything": OpCase(
        lengths=((70, 90), (0, 3), (33, 140)), varlen=True, gaps=(5, 9), key_lengths=(70, 3, 139), mask="added",
        need_mask=True, slopes=True, need_slopes=True, softcap=5.0, sinks=True, dropout_p=0.2, right=3, left=60,
        lower_right=True, **GROUP,
    ),
}  # fmt: skip
for option, case in OPTIONS.items():
    OPTIONS[option] = replace(case, head_dim=64, value_dim=64, scale=case.scale if case.scale < 0 else 0.125)


def check_options(device: str) -> None:
    """Every option, in one of the dtypes of two bytes."""
    for n, (name, case) in enumerate(OPTIONS.items()):
        Call(replace(case, dtype=SHORT[n % 2])).check(device, name)


def check_options_float(device: str) -> None:
    for name, case in OPTIONS.items():
        Call(replace(case, head_dim=24, value_dim=40, scale=0.2)).check(device, name)


def check_all_options(device: str) -> None:
    for dtype in FLOATS:
        for dims in ((64, 64), (96, 128), (200, 256)):
            for name, case in OPTIONS.items():
                scale = case.scale if case.scale < 0 else dims[0] ** -0.5
                Call(replace(case, dtype=dtype, head_dim=dims[0], value_dim=dims[1], scale=scale)).check(device, name)


def check_dims(device: str, dims: tuple[tuple[int, int], ...] = ((72, 128), (192, 130), (33, 7), (56, 72))) -> None:
    """Head dims between the buckets, of which one is odd and one larger than the other."""
    for n, (d, dv) in enumerate(dims):
        for m, name in enumerate(("causal", "everything", "mask of all heads")):
            dtype = FLOATS[(n + m) % 3]
            case = replace(OPTIONS[name], dtype=dtype, head_dim=d, value_dim=dv, scale=d**-0.5)
            Call(case).check(device, name)


def check_all_dims(device: str) -> None:
    dims = [1, 5, 8, 16, 32, 64, 65, 80, 96, 128, 160, 192, 255, 256]
    check_dims(device, tuple((d, dv) for k, d in enumerate(dims) for dv in (d, dims[(5 * k + 3) % len(dims)])))


def check_lengths(device: str) -> None:
    """Lengths at the edges of tiles."""
    pairs = ((1, 1), (64, 128), (128, 192), (239, 1), (113, 203), (108, 256), (129, 257), (16, 15), (33, 31))
    for n, (nq, nk) in enumerate(pairs):
        case = OpCase(
            lengths=((nq, nk),), heads=1, kv_heads=1, head_dim=32, value_dim=32, dtype=FLOATS[n % 3], scale=0.2
        )
        for more in (
            {},
            {"right": 0, "lower_right": True},
            {"left": 5, "right": 7, "diagonal": nk // 2},
            {"left": 1, "right": 1},  # just reaches the next block, on both sides
        ):
            Call(replace(case, **more)).check(device)


def check_numbers(device: str) -> None:
    """Saturated scores, rows of which nothing is seen, an lse so low that e^-lse overflows."""
    for dtype in FLOATS:
        case = OpCase(lengths=((192, 192),), heads=1, kv_heads=1, head_dim=64, value_dim=64, dtype=dtype, scale=0.125)
        for more in ({}, {"right": 0}, {"right": 0, "diagonal": -70}):
            Call(replace(case, **more), queries=5.0, keys=3.0).check(device, "saturated")
        low = Call(case)  # keys that point away from every query; those that pad the tile would have score 0
        low.arguments["query"] = low.arguments["query"].abs() * 4 + 1
        low.arguments["key"] = low.arguments["key"].abs() * -6 - 1
        low.forward()
        assert low.results["lse"].max() < -88.7
        low.check(device, "low")
        hidden = Call(replace(case, mask="added", need_mask=True, mask_sizes=(True, False, True, True)))
        hidden.arguments["attn_mask"][:, :, 3:150] = -math.inf
        hidden.arguments["attn_mask"][:, :, :, 77] = -math.inf
        hidden.forward()
        hidden.results["grad_lse"][..., 3:150] = math.nan  # goes nowhere
        ours = hidden.run(device)
        assert not ours["grad_query"][:, :, 3:150].any()
        assert not ours["grad_key"][:, :, 77].any()
        assert not ours["grad_value"][:, :, 77].any()
        assert not ours["grad_mask"][:, :, 3:150].any()
        hidden.results["grad_lse"][..., 3:150] = 0.0
        hidden.check(device, "hidden")
        short = Call(replace(case, key_lengths=(150,)))
        short.results["grad_out"][:, :, 5] = math.inf  # the keys that nobody sees do not get it
        ours = short.run(device)
        assert not ours["grad_key"][:, :, 150:].any()
        assert not ours["grad_value"][:, :, 150:].any()
        assert not ours["grad_query"][:, :, 6:].isnan().any()


def check_float(device: str, dims: tuple[int, ...] = (32, 64, 128, 256), lengths: tuple[int, ...] = (129, 257)) -> None:
    """float32 by its products of tf32: every head dim that has code of its own, long sums."""
    for dim in dims:
        for n in lengths:
            case = OpCase(lengths=((n, n),), heads=1, kv_heads=1, head_dim=dim, value_dim=dim, scale=dim**-0.5)
            for right in (-1, 0):
                Call(replace(case, right=right)).check(device)


def check_all_floats(device: str) -> None:
    check_float(device, (32, 64, 96, 128, 192, 256), (65, 128, 129, 257, 512, 513))


def check_tf32(device: str) -> None:
    """One product of tf32: eleven bits, where three keep nearly all."""
    call = Call(replace(OPTIONS["causal"], dtype=torch.float32))
    exact, once = call.gradients(torch.float64), call.run(device, tf32=True)
    thrice = call.check(device)
    for name, right in exact.items():
        largest = right.abs().max()
        assert 2**-13 < (once[name] - right).abs().max() / largest < 2**-8, name
        assert (thrice[name] - right).abs().max() / largest < 2**-19, name


def sample(seed: int) -> OpCase:
    """A random call with random options."""
    r = random.Random(seed)
    heads, kv_heads = r.choice([(1, 1), (2, 2), (4, 2), (3, 1)])
    varlen = r.random() < 0.4
    pool = [0, 1, 2, 17, 33, 65, 129, 200] if varlen else [1, 5, 33, 65, 129, 200]
    lengths = tuple((r.choice(pool), r.choice(pool)) for _ in range(r.randint(1, 3)))
    lengths = lengths if varlen else lengths[:1] * len(lengths)
    mask = r.choice(["", "", "", "bool", "added", "added own"])
    need_mask = mask.startswith("added") and r.random() < 0.7
    sizes = tuple(r.random() < 0.6 for _ in range(4))
    alibi = r.random() < 0.2
    head_dim = r.choice([8, 16, 61, 64, 96, 128, 200])
    return OpCase(
        lengths=lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        value_dim=head_dim if r.random() < 0.6 else r.choice([8, 64, 99, 128, 256]), dtype=r.choice(FLOATS),
        varlen=varlen, gaps=(r.choice([0, 3]), r.choice([0, 70])) if varlen else (0, 0),
        key_lengths=tuple(r.randint(-1, 200) for _ in lengths) if r.random() < 0.3 else None,
        mask=mask, mask_sizes=(*sizes[:2], True, True) if need_mask else sizes, need_mask=need_mask,
        slopes=alibi, need_slopes=alibi and r.random() < 0.7, softcap=r.choice([0.0, 0.0, 0.0, 2.0]),
        sinks=r.random() < 0.3, dropout_p=r.choice([0.0, 0.0, 0.0, 0.3, 0.9]),
        diagonal=r.choice([0, 0, -3, 7, 100, -(10**12), 10**12]) if not alibi else r.choice([0, 2, -4]),
        lower_right=r.random() < 0.5, left=r.choice([-1, -1, 0, 20, 70, 10**15]),
        right=r.choice([-1, 0, 0, 33, 10**15]), scale=r.choice([head_dim**-0.5] * 4 + [-0.1, 0.0]),
        grad_lse=r.random() < 0.7, strided=r.random() < 0.4,
    )  # fmt: skip


def check_samples(device: str, seeds: range = range(100, 112)) -> None:
    for seed in seeds:
        Call(sample(seed), seed).check(device, seed)


def check_more_samples(device: str) -> None:
    check_samples(device, range(1000, 1300))


def problems() -> Iterator[BackwardCall]:
    for dtype in (torch.bfloat16, torch.float32):
        for name in ("causal", "everything", "mask of all heads"):
            for d, dv in ((64, 64), (136, 128)):
                yield Call(replace(OPTIONS[name], dtype=dtype, head_dim=d, value_dim=dv, scale=d**-0.5))


def check_digest(device: str) -> None:
    """Prints a digest of the bits of all results: the same for every schedule, run, and shape of the tiles."""
    print_digest((t for call in problems() for t in call.run(device).values()), finite=True)


CHECKS = checks_of(globals())
QUICK = [name for name in CHECKS if "_all_" not in name and "_more_" not in name]
HERE = Path(__file__)


# ---- in the host executor ------------------------------------------------------------------------------------------

SMALL = [f"shared={99 << 10}", "multiprocessors=1"]  # blocks with many tiles


def test_executor_options(simt):
    simt(HERE, "check_options", "check_dims", sanitize=False, seed=1)


def test_executor_numbers_and_lengths(simt):
    simt(HERE, "check_numbers", "check_lengths", "check_samples", "check_float", "check_tf32", sanitize=False, seed=2)


def test_executor_sanitized(simt):
    simt(HERE, "check_options_float", seed=3, shared=101376)


def test_executor_same_bits(simt):
    """For every schedule, every grid and every size of shared memory, so of the tiles."""
    shared = ["shared=101376", "check_digest", "shared=166912", "check_digest", "shared=232448", "check_digest"]
    words = ["seed=1", *shared, "seed=2", "check_digest", *SMALL, "check_digest"]
    assert_same_digest(simt(HERE, *words, sanitize=False), 5)


def test_executor_finds_no_race(simt):
    simt(HERE, "check_digest", *SMALL, "check_digest", seed=7, race=True)


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "multiprocessors"), [(101376, 1), (166912, 4), (232448, 4)])
@pytest.mark.parametrize("check", ["check_all_options", "check_all_dims", "check_all_floats", "check_more_samples"])
def test_executor_everything(check, shared, multiprocessors, simt):
    simt(HERE, check, shared=shared, multiprocessors=multiprocessors, seed=shared % 7)


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "multiprocessors"), [(101376, 4), (232448, 1)])
def test_executor_finds_no_race_anywhere(shared, multiprocessors, simt):
    simt(HERE, *QUICK, seed=8, shared=shared, multiprocessors=multiprocessors, race=True)


# ---- on a GPU ------------------------------------------------------------------------------------------------------

test_gpu = gpu_test(CHECKS)
test_gpu_same_bits_every_run = gpu_bits_test(check_digest)


if __name__ == "__main__":
    run_words(CHECKS, "cpu")
