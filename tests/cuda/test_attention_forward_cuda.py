"""Attention's forward pass in CUDA C++ (mma.sync): in the host executor (tests/simt), and the same cases on a GPU.

Every `check_*` runs cases on a device: "cpu" in a process whose CPU tensors stand for the GPU's memory. The op is
called as the dispatcher calls it, and held against the formula in float64, the formula in the inputs' dtype its peer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_checks import assert_same_digest, checks_of, gpu_bits_test, gpu_test, print_digest, run_words
from torch import Tensor

from seqkern.testing import assert_passed, compare
from seqkern.testing.attention_calls import (
    CASES,
    OpCase,
    as_type,
    build,
    formula,
    lse_report,
    out_report,
    sample,
    spoil,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FLOATS = (BF16, F16, F32)


# ---- one call of the op --------------------------------------------------------------------------------------------


def run(arguments: dict[str, Any], tf32: bool = False) -> tuple[Tensor, Tensor]:
    before = {name: t.clone() for name, t in arguments.items() if isinstance(t, Tensor)}
    out, lse = torch.ops.seqkern_cuda.attention_fwd(*arguments.values(), tf32, "mma")
    for name, t in before.items():
        assert torch.equal(t.nan_to_num(), arguments[name].nan_to_num()), name
    return out, lse


def check(case: OpCase, device: str, seed: int = 0, spoiled: bool = False) -> tuple[Tensor, Tensor]:
    arguments = build(replace(case, device=device), seed)
    if spoiled:
        spoil(arguments)
    out, lse = run(arguments)
    shape = "packed" if case.varlen else "dense"
    assert (out.squeeze(0).transpose(0, 1) if case.varlen else out).is_contiguous(), shape
    assert lse.is_contiguous()
    assert out.dtype == case.dtype
    assert lse.dtype == F32
    exact_out, exact_lse, _ = formula(**as_type(arguments, torch.float64))
    peer_out = formula(**as_type(arguments, case.dtype))[0]
    peer_lse = formula(**as_type(arguments, F32))[1]
    about_lse = lse_report(lse, peer_lse, exact_lse, arguments["query"], arguments["key"], case.scale)
    assert_passed([out_report(out, peer_out, exact_out), about_lse], case)
    return out, lse


# ---- cases ---------------------------------------------------------------------------------------------------------

# (queries, keys) as FlashAttention-3 tests them, the longest left out
LENGTHS = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128),
)  # fmt: skip
QUICK = ((1, 1), (64, 128), (239, 1), (113, 203), (108, 256))
# (D, Dv) of every kernel, whole tiles and less
DIMS = (
    (64, 64), (32, 32), (40, 64), (64, 24), (128, 128), (96, 96), (80, 128), (128, 72), (256, 256), (192, 192),
    (192, 128), (136, 256),
)  # fmt: skip


def lengths(device: str, pairs: tuple[tuple[int, int], ...]) -> None:
    for n, (queries, keys) in enumerate(pairs):
        for causal in (False, True):
            case = OpCase(lengths=((queries, keys),), heads=1, kv_heads=1, head_dim=64, value_dim=64, scale=0.125)
            check(replace(case, dtype=(BF16, F16)[n % 2], right=0 if causal else -1, lower_right=True), device, n)


def check_lengths(device: str) -> None:
    lengths(device, QUICK)


def check_all_lengths(device: str) -> None:
    lengths(device, LENGTHS)


def dims(device: str, dtypes: tuple[tuple[torch.dtype, ...], ...]) -> None:
    for n, ((dim, value_dim), own) in enumerate(zip(DIMS, itertools.cycle(dtypes), strict=False)):
        for dtype in own:
            case = OpCase(lengths=((20, 70),), heads=2, kv_heads=1, head_dim=dim, value_dim=value_dim, scale=dim**-0.5)
            case = replace(case, dtype=dtype, right=0, lower_right=True)
            check(case, device, n)
            if dtype != F32:
                check(replace(case, dropout_p=0.3), device, n)


def check_dims(device: str) -> None:
    dims(device, ((BF16,), (F16,), (F32,), (F16, BF16)))


def check_all_dims(device: str) -> None:
    """Every kernel: plain, and with an option."""
    dims(device, (FLOATS,))


def options(device: str, names: Iterable[str]) -> None:
    for n, name in enumerate(names):
        try:
            check(replace(CASES[name], dtype=FLOATS[n % 3]), device, n, spoiled=n % 2 == 0)
        except BaseException:
            print(name, flush=True)
            raise


def check_options(device: str) -> None:
    options(device, ("key lengths", "bool mask", "mask shared by heads", "alibi", "softcap", "sinks", "dropout"))
    check(replace(CASES["everything"], dtype=BF16), device, spoiled=True)


def check_all_options(device: str) -> None:
    """One option each, and several at once."""
    options(device, CASES)


def check_wide_options(device: str) -> None:
    """The same on whole tiles: rows of 64 to 256, several blocks of queries and of keys."""
    everything = CASES["everything"]
    for n, (dtype, dim) in enumerate(itertools.product(FLOATS, (64, 128, 256))):
        case = replace(everything, dtype=dtype, head_dim=dim, value_dim=dim, scale=dim**-0.5, strided=False)
        check(replace(case, lengths=((140, 150), (0, 9)), key_lengths=(141, 5)), device, n, spoiled=True)


EDGES = tuple(itertools.product((-1, 0, 1, 31, 32, 62, 63, 64, 65), (-1, 0, 1, 62, 63, 64)))


def edges(device: str, pairs: tuple[tuple[int, int], ...]) -> None:
    for n, (left, right) in enumerate(pairs):
        case = OpCase(lengths=((129, 130),), heads=1, kv_heads=1, head_dim=8, value_dim=8, left=left, right=right)
        check(replace(case, dtype=BF16, diagonal=(0, -1, 1, 33, -64)[n % 5]), device, n)
        if n % 4 == 0:
            check(replace(case, dtype=F16, softcap=9.0, lower_right=True), device, n)


def check_edges(device: str) -> None:
    edges(device, EDGES[::5])


def check_all_edges(device: str) -> None:
    """Places of a band's edges within tiles of 64 or 128 queries and 32 or 64 keys."""
    edges(device, EDGES)


def check_random(device: str, seeds: range = range(2000, 2060)) -> None:
    for seed in seeds:
        case = sample(seed)
        dtype = FLOATS[seed % 3] if case.dtype != F16 and not case.extreme else case.dtype
        if dtype == torch.float64:
            dtype = F32
        try:
            check(replace(case, dtype=dtype), device, seed, spoiled=seed % 2 == 0)
        except BaseException:
            print(seed, case, flush=True)
            raise


def check_unaligned(device: str) -> None:
    """Head dimensions and strides that are no multiple of 16 bytes, of rows that begin anywhere."""
    for n, (dtype, (dim, value_dim)) in enumerate(itertools.product(FLOATS, ((1, 1), (33, 8), (64, 65), (130, 3)))):
        case = OpCase(lengths=((70, 75),), heads=2, kv_heads=1, head_dim=dim, value_dim=value_dim, dtype=dtype)
        check(replace(case, strided=n % 2 == 0, right=0, scale=dim**-0.5), device, n)


def check_packed(device: str) -> None:
    """Lengths around the blocks, gaps, sequences of nothing; a window; NaN where no sequence is."""
    for n, dtype in enumerate(FLOATS):
        pairs = ((0, 5), (1, 64), (64, 65), (129, 70), (0, 0), (7, 0), (3, 40))[2 * n :]
        case = OpCase(lengths=pairs, heads=2, kv_heads=1, head_dim=32, value_dim=40, varlen=True, gaps=(70, 9))
        case = replace(case, dtype=dtype, right=n, lower_right=True, sinks=n == 1)
        check(case, device, n, spoiled=True)
    check(OpCase(lengths=((0, 0), (0, 0)), varlen=True, gaps=(3, 300), dtype=BF16), device)


def check_rows_alone(device: str) -> None:
    """A sequence has the same bits alone, packed, in a batch, and in a longer cache with NaN behind it."""
    pairs = ((33, 70), (130, 65))
    for dtype, dropout_p in ((BF16, 0.0), (F32, 0.0), (F16, 0.0)):
        case = OpCase(lengths=pairs, heads=2, kv_heads=1, head_dim=64, value_dim=64, varlen=True, right=0, left=41)
        packed = build(replace(case, dtype=dtype, dropout_p=dropout_p, device=device), 3)
        out, lse = run(packed)
        starts = [packed[f"{name}_starts"].tolist() for name in ("query", "key")]
        for s, (queries, keys) in enumerate(pairs):
            rows, columns = slice(*starts[0][s : s + 2]), slice(*starts[1][s : s + 2])
            alone = packed | {"query_starts": None, "key_starts": None, "max_queries": queries, "max_keys": keys}
            alone["query"] = packed["query"][:, :, rows]
            for name in ("key", "value"):
                alone[name] = packed[name][:, :, columns]
            mine, my_lse = run(alone)
            assert torch.equal(mine, out[:, :, rows])
            assert torch.equal(my_lse, lse[:, :, rows])
            cache = alone | {"key_lengths": torch.tensor([keys], device=device), "max_keys": keys + 77}
            for name in ("key", "value"):
                cache[name] = torch.nn.functional.pad(alone[name], (0, 0, 0, 77), value=math.nan)
            for a, b in zip(run(cache), (mine, my_lse), strict=True):
                assert torch.equal(a, b)


def check_numbers(device: str) -> None:
    """Masked rows, the most negative number, large scores, sinks of -inf, scales of 0 and below."""
    arguments = build(OpCase(lengths=((33, 70),), mask="added", dtype=F32, device=device), 0)
    arguments["attn_mask"][:] = torch.finfo(torch.float32).min
    uniform = arguments["value"].mean(2, keepdim=True).expand(1, 2, 33, 8)
    torch.testing.assert_close(run(arguments)[0], uniform, rtol=0, atol=1e-7)
    arguments["attn_mask"][:] = -math.inf
    out, lse = run(arguments)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    for dtype, scale in itertools.product(FLOATS, (-0.7, 0.0, 60.0)):
        check(OpCase(lengths=((33, 150),), dtype=dtype, scale=scale, right=0), device)
    # Rows whose scores grow from block to block, by more and by less than what the maximum may lag behind.
    for dtype, step in itertools.product((BF16, F32), (0.5, 3.0, 40.0)):
        arguments = build(OpCase(lengths=((20, 300),), heads=1, kv_heads=1, dtype=dtype, device=device), 1)
        arguments["query"][:] = 1
        arguments["key"][:] = (torch.arange(300, device=device) // 32 * step / (8 * 0.4)).to(dtype)[:, None]
        out, lse = run(arguments)
        exact = formula(**as_type(arguments, torch.float64))
        peers = formula(**as_type(arguments, dtype))[0], formula(**as_type(arguments, F32))[1]
        for mine, peer, right in zip((out, lse), peers, exact[:2], strict=True):
            assert compare(mine, peer, right).passed, (dtype, step, compare(mine, peer, right))
    for sinks in (-math.inf, 30.0, -30.0):
        arguments = build(OpCase(lengths=((33, 20),), sinks=True, dtype=BF16, diagonal=-9, right=0, device=device), 0)
        arguments["sinks"][:] = sinks
        out, lse = run(arguments)
        exact = formula(**as_type(arguments, torch.float64))
        torch.testing.assert_close(lse.cpu().double(), exact[1], rtol=2e-7, atol=1e-6)
        torch.testing.assert_close(out.cpu().double(), exact[0], rtol=5e-3, atol=5e-3)


def check_tf32(device: str) -> None:
    """Three products of tf32 numbers are float32, one is not."""
    case = OpCase(lengths=((70, 90),), heads=1, kv_heads=1, head_dim=128, value_dim=128, scale=0.09, device=device)
    arguments = build(case, 0)
    exact = formula(**as_type(arguments, torch.float64))[0]
    errors = [float((run(arguments, tf32)[0].cpu() - exact).abs().max()) for tf32 in (False, True)]
    assert errors[0] < 9e-7, errors
    assert 3e-5 < errors[1] < 3e-3, errors


def check_digest(device: str) -> None:
    """Prints a digest of the bits of all results: the same for every schedule, grid and number of stages."""
    cases = [
        OpCase(lengths=((150, 300),), heads=2, kv_heads=1, head_dim=64, value_dim=64, dtype=BF16, right=0, scale=0.2),
        OpCase(lengths=((70, 130),), heads=2, kv_heads=1, head_dim=128, value_dim=128, dtype=F16, dropout_p=0.2),
        OpCase(lengths=((40, 100),), heads=1, kv_heads=1, head_dim=256, value_dim=256, dtype=BF16, scale=0.1),
        replace(CASES["everything"], dtype=F32, head_dim=64, value_dim=64),
    ]
    print_digest(t for case in cases for t in run(build(replace(case, device=device), 5)))


CHECKS = checks_of(globals())
HERE = Path(__file__)


# ---- in the host executor ------------------------------------------------------------------------------------------

QUICKLY = ("check_lengths", "check_dims", "check_edges", "check_rows_alone", "check_numbers", "check_tf32")
SMALL = [f"shared={99 << 10}", "multiprocessors=1"]  # one stage where there were two, and blocks with many tiles


def test_executor_sanitized(simt):
    simt(HERE, "check_options", "check_packed", "check_unaligned", seed=1)


def test_executor_numbers(simt):
    simt(HERE, *QUICKLY, seed=2, sanitize=False)


def test_executor_same_bits(simt):
    digests = ["seed=1", "check_digest", "seed=2", "check_digest", *SMALL, "seed=3", "check_digest"]
    assert_same_digest(simt(HERE, *digests, sanitize=False), 3)


def test_executor_finds_no_race(simt):
    simt(HERE, "check_digest", *SMALL, "check_digest", seed=7, race=True)


@pytest.mark.slow
def test_executor_finds_no_race_anywhere(simt):
    simt(HERE, *CHECKS, seed=8, race=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limits", [{}, {"shared": 99 << 10}, {"shared": 163 << 10, "multiprocessors": 1}], ids=str)
def test_executor_everything(limits, seed, simt):
    simt(HERE, *CHECKS, seed=seed, **limits)


# ---- on a GPU ------------------------------------------------------------------------------------------------------

test_gpu = gpu_test(CHECKS)
test_gpu_same_bits_every_run = gpu_bits_test(check_digest)


if __name__ == "__main__":
    run_words(CHECKS, "cpu")
