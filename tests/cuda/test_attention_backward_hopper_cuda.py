"""Attention's backward pass on Hopper: in the host executor (tests/simt), and the same cases on such a GPU.

Every `check_*` runs cases on a device: "cpu" in a process whose CPU tensors stand for the GPU's memory. The forward
results are the CPU kernels', so that these tests need no other CUDA kernel.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_backward import BackwardCall
from cuda_checks import (
    assert_same_digest,
    checks_of,
    gpu_bits_test,
    gpu_test,
    machine_code,
    print_digest,
    run_words,
)

from seqkern.testing.attention_calls import OpCase

BF16, F16 = torch.bfloat16, torch.float16
Call = functools.partial(BackwardCall, path="hopper")


# ---- cases ---------------------------------------------------------------------------------------------------------

GROUP: dict[str, Any] = {"heads": 4, "kv_heads": 2}
ONE: dict[str, Any] = {"heads": 1, "kv_heads": 1}
CASES: dict[str, OpCase] = {
    "full": OpCase(lengths=((200, 300),), **ONE),
    "causal": OpCase(lengths=((330, 290),), right=0, lower_right=True, **ONE),
    "group": OpCase(lengths=((70, 140),) * 2, right=0, **GROUP),
    "window": OpCase(lengths=((250, 290),), left=40, right=9, diagonal=17, **ONE),
    "window that leaves keys unseen": OpCase(lengths=((70, 400),), left=3, right=0, diagonal=120, **ONE),
    "window that leaves queries unseen": OpCase(lengths=((300, 70),), left=3, right=0, diagonal=-120, **ONE),
    "key lengths": OpCase(lengths=((40, 150),) * 3, key_lengths=(0, 97, 200), right=5, diagonal=60, **ONE),
    "packed": OpCase(
        lengths=((5, 40), (0, 70), (93, 0), (1, 1), (130, 165)), varlen=True, gaps=(7, 33), right=0, lower_right=True,
        **ONE,
    ),
    "packed lengths": OpCase(
        lengths=((70, 90), (33, 150)), varlen=True, gaps=(3, 0), key_lengths=(41, 149), sinks=True, heads=2, kv_heads=1
    ),
    "long group": OpCase(lengths=((400, 130),), heads=3, kv_heads=1, left=100, right=70, grad_lse=False),
}  # fmt: skip


def of_dims(case: OpCase, dtype: torch.dtype, d: int, dv: int | None = None) -> OpCase:
    return replace(case, dtype=dtype, head_dim=d, value_dim=dv or d, scale=d**-0.5)


def check_cases(device: str, dims: tuple[int, ...] = (64, 128, 256)) -> None:
    """Every case with the head dimension of every kernel, in one dtype or the other."""
    for k, d in enumerate(dims):
        for n, (name, case) in enumerate(CASES.items()):
            Call(of_dims(case, (BF16, F16)[(n + k) % 2], d)).check(device, name)


def check_dims(device: str) -> None:
    """Head dimensions between those, and values that have another."""
    pairs = ((40, 40), (8, 64), (72, 40), (96, 128), (128, 32), (136, 136), (192, 128), (24, 256), (256, 200))
    for n, (d, dv) in enumerate(pairs):
        for name in ("causal", "packed lengths"):
            Call(of_dims(CASES[name], (BF16, F16)[n % 2], d, dv)).check(device, name)


def check_strided(device: str) -> None:
    """Rows apart, heads within rows."""
    for d in (64, 128, 256):
        call = Call(of_dims(replace(CASES["group"], diagonal=3), BF16, d))
        for name in ("query", "key", "value"):
            t = call.arguments[name]
            wide = t.new_full((t.shape[0], t.shape[2], t.shape[1], d + 16), math.nan)
            wide[..., 8 : d + 8] = t.transpose(1, 2)
            call.arguments[name] = wide[..., 8 : d + 8].transpose(1, 2)
        call.forward()
        call.check(device)


def check_lengths(device: str) -> None:
    """Lengths at the edges of tiles."""
    pairs = ((1, 1), (64, 128), (65, 129), (128, 192), (239, 1), (63, 193), (113, 203), (193, 385), (257, 127))
    more = ({}, {"right": 0, "lower_right": True}, {"left": 5, "right": 7, "diagonal": 20})
    for n, (nq, nk) in enumerate(pairs):
        case = OpCase(lengths=((nq, nk),), **ONE)
        for k, d in enumerate((64, 128, 256)):
            Call(of_dims(replace(case, **more[(n + k) % 3]), (BF16, F16)[n % 2], d)).check(device)


def check_numbers(device: str) -> None:
    """An lse so low that e^-lse overflows, and rows that see nothing, whose dlse may be anything."""
    for d in (64, 128, 256):
        low = Call(of_dims(OpCase(lengths=((100, 150),), key_lengths=(139,), **ONE), BF16, d))
        low.arguments["query"] = low.arguments["query"].abs() * 4 + 1
        low.arguments["key"] = low.arguments["key"].abs() * -6 - 1
        low.forward()
        assert low.results["lse"].max() < -88.7
        low.check(device, "low")
        blind = Call(of_dims(OpCase(lengths=((200, 150),), right=0, lower_right=True, **ONE), F16, d))
        grads = blind.check(device, "blind")
        blind.results["grad_lse"][..., :50] = math.nan
        for name, grad in blind.run(device).items():
            assert torch.equal(grad, grads[name]), name
        assert not grads["grad_query"][:, :, :50].any()


def check_refusals(device: str) -> None:
    case = of_dims(CASES["group"], BF16, 64)
    for other in (
        replace(case, softcap=2.0), replace(case, slopes=True), replace(case, dropout_p=0.5), replace(case, scale=-0.1),
        replace(case, mask="added"), replace(case, head_dim=60), replace(case, value_dim=63),
        replace(case, dtype=torch.float32), replace(case, strided=True),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="do not serve this call"):
            Call(other).run(device)
    # What repeats itself in memory: a row, a head, a batch entry. TMA has no stride of 0.
    for name in ("query", "key", "value", "grad_out"):
        for dim in (0, 1, 2):
            call = Call(case)
            given = call.results if name == "grad_out" else call.arguments
            first = given[name].narrow(dim, 0, 1)
            given[name] = first.expand(given[name].shape)
            with pytest.raises(RuntimeError, match="do not serve this call"):
                call.run(device)
            # One of it, in memory of its own, is served.
            given[name] = given[name].contiguous()
            if name != "grad_out":
                call.forward()
            call.check(device, name, dim)


def sample(seed: int) -> OpCase:
    # With a gradient of lse: of a query that sees one key nothing else has one.
    r = random.Random(seed)
    heads, kv_heads = r.choice([(1, 1), (2, 2), (4, 2), (3, 1)])
    varlen = r.random() < 0.5
    pool = [0, 1, 2, 17, 33, 65, 129, 200, 260] if varlen else [1, 5, 33, 65, 129, 200, 260]
    lengths = tuple((r.choice(pool), r.choice(pool)) for _ in range(r.randint(1, 3)))
    head_dim = r.choice([8, 40, 64, 96, 128, 200, 256])
    return OpCase(
        lengths=lengths if varlen else lengths[:1] * len(lengths), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        value_dim=head_dim if r.random() < 0.6 else r.choice([8, 64, 96, 256]), dtype=r.choice((BF16, F16)),
        varlen=varlen, gaps=(r.choice([0, 3]), r.choice([0, 70])) if varlen else (0, 0),
        key_lengths=tuple(r.randint(-1, 200) for _ in lengths) if r.random() < 0.3 else None, sinks=r.random() < 0.3,
        diagonal=r.choice([0, 0, -3, 7, 100, -(10**12), 10**12]), lower_right=r.random() < 0.5,
        left=r.choice([-1, -1, 0, 20, 70, 10**15]), right=r.choice([-1, 0, 0, 33, 10**15]), scale=head_dim**-0.5,
    )  # fmt: skip


def check_samples(device: str, seeds: range = range(12)) -> None:
    for seed in seeds:
        Call(sample(seed), seed).check(device, seed)


def check_more_samples(device: str) -> None:
    check_samples(device, range(1000, 1200))


def problems() -> Iterator[BackwardCall]:
    for d in (64, 128, 256):
        for name in ("causal", "long group", "packed"):
            yield Call(of_dims(CASES[name], BF16, d))
        # Many blocks of keys that add to the same dQ. In float16 one sum of 2^12 shows another order of its terms.
        for seed in range(4 if d < 256 else 1):
            yield Call(of_dims(OpCase(lengths=((128, 1100),), **ONE), F16, d), seed)


def check_digest(device: str) -> None:
    """Prints a digest of the bits of all results: the same for every schedule and every run."""
    print_digest((t for call in problems() for t in call.run(device).values()), finite=True)


CHECKS = checks_of(globals())
QUICK = ("check_cases", "check_dims", "check_strided", "check_lengths", "check_numbers", "check_samples")
HERE = Path(__file__)


# ---- in the host executor ------------------------------------------------------------------------------------------


def test_executor(simt):
    simt(HERE, *QUICK, "check_refusals", sanitize=False, seed=1)


def test_executor_same_bits(simt):
    words = [word for seed in range(3) for word in (f"seed={seed}", "check_digest")]
    assert_same_digest(simt(HERE, *words, sanitize=False, multiprocessors=8), 3)


def test_executor_sanitized(simt):
    simt(HERE, "check_cases", seed=3)


def test_executor_finds_no_race(simt):
    simt(HERE, "check_cases", seed=7, race=True)


@pytest.mark.slow
def test_executor_samples_sanitized(simt):
    simt(HERE, "check_samples", seed=3)


@pytest.mark.slow
def test_executor_finds_no_race_in_samples(simt):
    simt(HERE, "check_samples", seed=7, race=True)


@pytest.mark.slow
def test_executor_more_samples(simt):
    simt(HERE, "check_more_samples", sanitize=False, seed=4)


# ---- what the assembler made ---------------------------------------------------------------------------------------


# In how many places at least.
OVERLAPS = {"64>": 2, "128>": 3, "wide_keys": 2, "wide_queries": 1}


@pytest.mark.usefixtures("every_target")
def test_products_overlap():
    kernels = machine_code("attention/cuda/hopper/backward.cu")
    found = {name: "\n".join(lines) for name, lines in kernels.items() if any("HGMMA" in line for line in lines)}
    assert len(found) == 2 * (2 + 2)  # dtypes; head dimensions 64 and 128, and 256 in two kernels
    for name, code in found.items():
        assert "UTMALDG.4D" in code, name
        assert "USETMAXREG" in code, name
        assert not re.search(r"\b(LDL|STL)\b", code), name  # no register in memory
        assert re.search(r"HGMMA\S+ R\d+, R\d+, gdesc", code), name  # an operand in registers
        # Newer sums are under way where older ones are waited for.
        (waits,) = (n for kernel, n in OVERLAPS.items() if kernel in name)
        assert len(re.findall(r"WARPGROUP.DEPBAR.LE gsb0, 0x1\b", code)) >= waits, name
        # dQ of head dimensions up to 128 is added by copies in bulk.
        assert ("UBLKRED" in code) == ("wide" not in name), name


# ---- on a GPU ------------------------------------------------------------------------------------------------------

test_gpu = gpu_test(CHECKS, hopper=True)
test_gpu_same_bits_every_run = gpu_bits_test(check_digest, hopper=True)


if __name__ == "__main__":
    run_words(CHECKS, "cpu")
