"""The host executor for CUDA kernels (tests/simt): right kernels pass on every schedule, planted faults are caught."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PLANTED = ROOT / "tests" / "simt" / "planted_cuda.cu"
SEEDS = range(12)  # of schedules
# In the order of Fault in planted.cuh.
FAULTS = ["none", "no_barrier", "no_last_barrier", "no_wait", "early_wait", "swapped", "outside_shared"]
FAULTS += ["outside_global", "leaves", "too_many_arrivals", "too_few_bytes", "no_fence"]
FAULTS += ["narrow_wait", "no_acquire", "one_tag"]


def fault(name: str) -> int:
    return FAULTS.index(name)


@pytest.fixture(scope="module")
def ops(simt_build: ModuleType) -> Any:
    """The planted kernels, without sanitizers, in this process."""
    torch.ops.load_library(str(simt_build.build("planted", [PLANTED], sanitize=False)))
    return torch.ops.seqkern_planted


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SEQKERN_SIMT_"):
            monkeypatch.delenv(name)


def schedules(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for seed in SEEDS:
        monkeypatch.setenv("SEQKERN_SIMT_SEED", str(seed))
        yield seed


def outcomes(monkeypatch: pytest.MonkeyPatch, call: Any, expected: torch.Tensor) -> list[str]:
    """One word a schedule: right, wrong, or the error."""
    found = []
    for _ in schedules(monkeypatch):
        try:
            close = torch.allclose(call(), expected, rtol=1e-4, atol=1e-4)
            found.append("right" if close else "wrong")
        except RuntimeError as error:
            found.append(str(error))
    return found


# ---- row sums ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 31, 128, 1000])
def test_row_sums(ops: Any, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    x = torch.randn(5, columns)
    assert set(outcomes(monkeypatch, lambda: ops.row_sums(x, 0), x.sum(1))) == {"right"}


def test_missing_syncthreads(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 200)
    assert "wrong" in outcomes(monkeypatch, lambda: ops.row_sums(x, fault("no_barrier")), x.sum(1))


# ---- matrix products ---------------------------------------------------------------------------------------------


def operands(dtype: torch.dtype, m: int = 64, n: int = 96, k: int = 128) -> tuple[torch.Tensor, ...]:
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    if dtype == torch.float32:  # of the eleven bits that tf32 keeps, so that the oracle sees the same numbers
        a, b = a.half().float(), b.half().float()
    return a, b, (a.double() @ b.double()).float()


MATMUL_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@MATMUL_DTYPES
def test_matmul(ops: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    a, b, expected = operands(dtype)
    assert set(outcomes(monkeypatch, lambda: ops.matmul(a, b, 0), expected)) == {"right"}


@MATMUL_DTYPES
@pytest.mark.parametrize("planted", ["no_barrier", "no_last_barrier", "no_wait", "early_wait", "swapped"])
def test_matmul_faults(ops: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, planted: str) -> None:
    a, b, expected = operands(dtype)
    found = outcomes(monkeypatch, lambda: ops.matmul(a, b, fault(planted)), expected)
    if planted in ("no_wait", "early_wait", "swapped"):  # not a matter of the schedule
        assert set(found) == {"wrong"}
    assert "wrong" in found


def test_missing_wait_gives_nan(ops: Any) -> None:
    a, b, _ = operands(torch.bfloat16)
    assert ops.matmul(a, b, fault("no_wait")).isnan().all()


# ---- instructions ------------------------------------------------------------------------------------------------

# "Matrix Fragments for mma.m16n8k16 with floating point type" and "... mma.m16n8k8" (tf32) in the PTX documentation, in
# its own words: which element of the matrix is element i of a lane's fragment.


def a_16816(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8


def b_16816(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return (thread * 2 + (i & 1) if i < 2 else thread * 2 + (i & 1) + 8), group


def a_1688(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return (group if i in (0, 2) else group + 8), (thread if i in (0, 1) else thread + 4)


def b_1688(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return (thread if i == 0 else thread + 4), group


def sums_168(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def fragments(matrix: torch.Tensor, element: Any, count: int) -> torch.Tensor:
    return torch.stack([torch.stack([matrix[element(lane, i)] for i in range(count)]) for lane in range(32)])


@pytest.mark.parametrize("kind", [0, 1])
def test_mma_16816(ops: Any, kind: int) -> None:
    dtype = (torch.bfloat16, torch.float16)[kind]
    a, b, d = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    registers_a, registers_b = fragments(a, a_16816, 8), fragments(b, b_16816, 4)
    # Two elements a register, the first in the low half.
    found = ops.mma(registers_a.view(torch.int32), registers_b.view(torch.int32), fragments(d, sums_168, 4), kind)
    expected = fragments((d.double() + a.double() @ b.double()).float(), sums_168, 4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_mma_1688_tf32(ops: Any) -> None:
    a, b, d = torch.randn(16, 8).half().float(), torch.randn(8, 8).half().float(), torch.randn(16, 8)
    noise = 0x1FFF  # the low bits are not part of the number
    registers_a = fragments(a, a_1688, 4).view(torch.int32) | noise
    registers_b = fragments(b, b_1688, 2).view(torch.int32) | noise
    found = ops.mma(registers_a, registers_b, fragments(d, sums_168, 4), 2)
    expected = fragments((d.double() + a.double() @ b.double()).float(), sums_168, 4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def cut_sums(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, block: int, bits: int, least: int = -126
) -> torch.Tensor:
    """d + a b as tensor cores sum: the equations in tests/simt/simt_product.h, in float64."""

    def exponents(x: torch.Tensor, least: int) -> torch.Tensor:
        return torch.where(x == 0, -126, (torch.frexp(x).exponent - 1).clamp(min=least))

    d = d.double()
    for k in range(0, a.shape[1], block):
        left, right = a[:, None, k : k + block].double(), b.mT[None, :, k : k + block].double()
        top = (exponents(left, least) + exponents(right, least)).amax(2).maximum(exponents(d, -126))
        units = (1023 + bits - top.long() << 52).view(torch.float64)  # 2^(bits - top)
        exact = ((left * right * units[..., None]).trunc().sum(2) + (d * units).trunc()) / units
        nearest = exact.float()
        below = torch.nextafter(nearest, torch.zeros(()))
        d = torch.where((nearest.double().abs() > exact.abs()) & (exact.abs() < 2.0**128), below, nearest).double()
    return d.float()


def executed_mma(ops: Any, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """d + a b, of 16 x 8, by mma.sync of their type."""
    kind = [torch.bfloat16, torch.float16, torch.float32].index(a.dtype)
    of_a, of_b, counts = (a_1688, b_1688, (4, 2)) if kind == 2 else (a_16816, b_16816, (8, 4))
    registers = [fragments(x, of, n).view(torch.int32) for x, of, n in zip((a, b), (of_a, of_b), counts, strict=True)]
    found = ops.mma(*registers, fragments(d, sums_168, 4), kind)
    result = torch.empty_like(d)
    for lane in range(32):
        for i in range(4):
            result[sums_168(lane, i)] = found[lane, i]
    return result


def spread(rows: int, columns: int, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Numbers of exponents in [-width, width], some of them 0."""
    x = torch.randn(rows, columns) * 2.0 ** torch.randint(-width, width + 1, (rows, columns))
    x = torch.where(torch.rand(rows, columns) < 0.1, 0.0, x)
    # tf32: the low bits are not part of the number.
    return x.to(dtype) if dtype != torch.float32 else (x.view(torch.int32) & -8192).view(torch.float32)


@MATMUL_DTYPES
@pytest.mark.parametrize("width", [0, 2, 6, 12, 40, 80])
def test_sums_are_cut(ops: Any, dtype: torch.dtype, width: int) -> None:
    """Bit for bit as on 8.0, whatever the exponents; float16 has subnormal numbers, the others infinite sums."""
    depth, half = (8 if dtype == torch.float32 else 16), dtype == torch.float16
    rounded = 0
    for _ in range(10):
        a, b = spread(16, depth, dtype, min(width, 12)), spread(depth, 8, dtype, min(width, 12))
        if not half:
            a, b = spread(16, depth, dtype, width), spread(depth, 8, dtype, width)
        d = torch.where(
            torch.rand(16, 8) < 0.2, 0.0, torch.randn(16, 8) * 2.0 ** torch.randint(-width, width + 1, (16, 8))
        )
        found, right = executed_mma(ops, a, b, d), cut_sums(a, b, d, depth // 2, 24, -14 if half else -126)
        assert torch.equal(found, right)
        rounded += int((found != (d.double() + a.double() @ b.double()).float()).sum())
    assert rounded > 100


@MATMUL_DTYPES
def test_sums_keep_a_bit_more(ops: Any, dtype: torch.dtype) -> None:
    """What was found out of hardware: toward zero; 24 bits behind the largest exponent; block by block."""
    depth = 8 if dtype == torch.float32 else 16
    one = torch.ones(16, 8)

    def add(*terms: tuple[int, float], start: torch.Tensor = one) -> float:
        """start + the terms, given with their places in k."""
        a, b = torch.zeros(16, depth), torch.zeros(depth, 8)
        for k, term in terms:
            a[:, k], b[k] = term * 2**12, 2.0**-12
        sums = executed_mma(ops, a.to(dtype), b.to(dtype), start)
        assert (sums == sums[0, 0]).all()
        return sums[0, 0].item()

    last = 2.0**-23
    assert add((0, 0.75 * last)) == 1  # to the nearest: 1 + last
    assert add((0, -0.75 * last)) == 1 - last / 2  # toward zero: -1.5 of the last place becomes -1
    assert add((0, -0.75 * last), start=-one) == -1
    assert add((0, 0.5 * last), (1, 0.5 * last)) == 1 + last  # a bit more than float32 has
    assert add((0, 0.25 * last), (1, 0.25 * last), (2, 0.25 * last), (3, 0.25 * last)) == 1  # but not two
    assert add((0, 0.5 * last), (depth // 2, 0.5 * last)) == 1  # the first block's sum is cut
    assert add((0, 1.0), (1, -1.0), (2, 0.25 * last), start=0 * one) == 0


@MATMUL_DTYPES
def test_sums_that_are_not_finite(ops: Any, dtype: torch.dtype) -> None:
    depth = 8 if dtype == torch.float32 else 16
    a, b, d = torch.randn(16, depth), torch.randn(depth, 8), torch.randn(16, 8)
    a[1, 3], a[2, 5], b[4, 2], d[7, 1] = torch.inf, torch.nan, -torch.inf, torch.inf
    a, b = a.to(dtype), b.to(dtype)
    found, exact = executed_mma(ops, a, b, d), (d.double() + (a.double()[:, :, None] * b.double()).sum(1)).float()
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert found.isinf().sum() > 16


@pytest.mark.parametrize("matrices", [2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(ops: Any, matrices: int, transposed: bool) -> None:
    rows = torch.randint(-(2**15), 2**15, (8 * matrices, 8), dtype=torch.int16)
    found = ops.ldmatrix(rows, transposed).view(torch.int16).view(32, matrices, 2)
    for lane in range(32):
        for m in range(matrices):
            matrix = rows[8 * m : 8 * m + 8]
            matrix = matrix.T if transposed else matrix
            # Thread l receives, of row l / 4, the elements 2 (l % 4) and the next.
            assert torch.equal(found[lane, m], matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2])


def test_part_of_a_copy_is_filled_with_zeros(ops: Any) -> None:
    x = torch.arange(1, 17, dtype=torch.uint8)
    assert torch.equal(ops.part_copies(x), x * (torch.arange(16) < torch.arange(17)[:, None]))


@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("argument", [0, 1, 5, 7])
def test_shuffles(ops: Any, width: int, argument: int) -> None:
    """As CUDA's programming guide has them: within groups of `width` lanes, the own value beyond."""
    x = torch.randn(32)
    lane = torch.arange(32)
    first = lane // width * width
    down, up = lane + argument, lane - argument
    sources = [first + argument % width, lane ^ argument]
    sources += [torch.where(down < first + width, down, lane), torch.where(up >= first, up, lane)]
    for which, source in enumerate(sources):
        assert torch.equal(ops.exchange(x, which, argument, width), x[source])


@pytest.mark.parametrize("argument", [-9, 0, 9])
def test_votes(ops: Any, argument: int) -> None:
    votes = (x := torch.randn(32)) > argument
    expected = [votes.sum().item(), votes.any().item(), votes.all().item()]
    for which in range(6):
        assert torch.equal(ops.exchange(x, 4 + which, argument, 32), torch.full((32,), float(expected[which % 3])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding(ops: Any, dtype: torch.dtype) -> None:
    """All 16-bit numbers, the middles between neighbours, and what lies just beside those."""
    exact = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    bits = exact.view(torch.int32)
    beside = torch.cat([bits + i for i in (0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)]).view(torch.float32)
    for x in (beside, torch.randn(4096) * 2.0 ** torch.randint(-30, 20, (4096,))):
        expected = x.to(dtype).float()
        torch.testing.assert_close(ops.round_trip(x, dtype == torch.float16), expected, rtol=0, atol=0, equal_nan=True)


# ---- clusters and grids ------------------------------------------------------------------------------------------


def cluster_oracle(x: torch.Tensor, steps: int) -> torch.Tensor:
    value = x.double().view(x.shape[0], -1, 32)
    ranks = torch.arange(value.shape[1], dtype=torch.float64).view(1, -1, 1)
    for step in range(steps):
        value = value.mean((1, 2), keepdim=True) + step + ranks + torch.zeros_like(value)
    return (value + value.amax((1, 2), keepdim=True)).view(x.shape).float()


@pytest.mark.parametrize("size", [2, 8, 16])
def test_cluster(ops: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    x = torch.randn(3, size * 32)
    assert set(outcomes(monkeypatch, lambda: ops.cluster_steps(x, 7, 0), cluster_oracle(x, 7))) == {"right"}


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ("no_wait", "more arrivals|wrong"),
        ("no_barrier", "wrong"),
        ("leaves", "has ended|wrong"),
        ("too_many_arrivals", "mbarrier_arrive: more arrivals at the mbarrier at offset [08] than its count of 1"),
        ("too_few_bytes", "livelock|more arrivals|wrong|on their way"),
    ],
)
def test_cluster_faults(ops: Any, monkeypatch: pytest.MonkeyPatch, planted: str, message: str) -> None:
    x = torch.randn(2, 4 * 32)
    found = outcomes(monkeypatch, lambda: ops.cluster_steps(x, 5, fault(planted)), cluster_oracle(x, 5))
    caught = [word for word in found if word != "right"]
    assert caught
    assert all(re.search(message, word) for word in caught), caught


def test_cluster_wait_of_the_block(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for what other blocks send acquires of the cluster: on every schedule."""
    found = outcomes(
        monkeypatch, lambda: ops.cluster_steps(torch.randn(2, 64), 5, fault("narrow_wait")), torch.empty(2, 64)
    )
    words = r"mbarrier_done: other blocks of the cluster come to the mbarrier at offset [08]: mbarrier_done_cluster"
    assert all(re.search(words, word) for word in found), found


def test_cluster_of_one(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX of st.async: "%cluster_nctarank > 1 is true. Otherwise, the behavior is undefined"."""
    found = outcomes(monkeypatch, lambda: ops.cluster_steps(torch.randn(2, 32), 5, 0), torch.empty(2, 32))
    assert all("store_async_16: undefined in a cluster of one block" in word for word in found), found


def grid_oracle(x: torch.Tensor, steps: int) -> torch.Tensor:
    value = x.double()
    for _ in range(steps):
        value = value.mean(0, keepdim=True) + torch.arange(len(x), dtype=torch.float64).view(-1, 1)
    return torch.cat([value.flatten(), torch.tensor([float(len(x))], dtype=torch.float64)]).float()


def packets(blocks: int) -> torch.Tensor:
    return torch.zeros(3 * blocks + 1, 4, dtype=torch.int32)


@pytest.mark.parametrize("blocks", [1, 5, 40])
def test_grid(ops: Any, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    x = torch.randn(blocks, 3)
    found = outcomes(monkeypatch, lambda: ops.grid_steps(x, packets(blocks), 6, True, 0), grid_oracle(x, 6))
    assert set(found) == {"right"}


def test_grid_faults(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 3)
    found = outcomes(monkeypatch, lambda: ops.grid_steps(x, packets(5), 4, True, fault("no_wait")), grid_oracle(x, 4))
    assert "wrong" in found
    # The halves of 16 bytes do not come together.
    found = outcomes(monkeypatch, lambda: ops.grid_steps(x, packets(5), 6, True, fault("one_tag")), grid_oracle(x, 6))
    assert "wrong" in found
    # Blocks that wait for each other without being on the device together.
    with pytest.raises(RuntimeError, match=r"grid_steps: livelock .* threads poll, and nothing changes"):
        ops.grid_steps(torch.randn(40, 3), packets(40), 4, False, 0)
    monkeypatch.setenv("SEQKERN_SIMT_MULTIPROCESSORS", "2")
    with pytest.raises(RuntimeError, match="too many blocks in a cooperative launch: 65, 64 fit the device"):
        ops.grid_steps(torch.randn(65, 3), packets(65), 1, True, 0)


# ---- misuse ------------------------------------------------------------------------------------------------------

MISUSE = [
    (0, "divergent barrier: .* __syncthreads"),
    (1, r"divergent barrier: the thread comes to __syncthreads \(planted.cuh:\d+\) while \d+ others wait at"),
    (2, "absent lane: "),
    (3, r"deadlock .*no thread can go on(.|\n)*__syncwarp(.|\n)*mask 00000003, lanes 0000000[12] have not come"),
    (4, "comes to __.* wait at __.* with the same mask"),
    (5, r"deadlock (.|\n)*32 at __syncthreads(.|\n)*32 at cluster_wait"),
    (6, "livelock (.|\n)*mbarrier_done"),
    (7, "mbarrier_done: there is no mbarrier at offset 0, or not yet"),
    (8, "mbarrier at offset 0 was written over"),
    (9, "cp_async_16: the address is not a multiple of 16 bytes"),
    (10, "cp_async_16: the source is not a multiple of 16 bytes"),
    (11, "ldmatrix: the address is not a multiple of 16 bytes"),
    (12, "cp_async_16: 16 bytes at offset 1024 are not in the block's 1024 bytes"),
    (13, "reads lane 20, which the mask 0000ffff does not name"),
    (14, "mask 00000001 does not name lane"),
    (15, "livelock (.|\n)*load_acquire|livelock (.|\n)*pause"),
]


@pytest.mark.parametrize(("which", "message"), MISUSE)
def test_misuse(ops: Any, monkeypatch: pytest.MonkeyPatch, which: int, message: str) -> None:
    for seed in itertools.islice(schedules(monkeypatch), 4):
        with pytest.raises(RuntimeError, match=message) as caught:
            ops.misuse(torch.zeros(64), which, 1024, 1)
        assert str(caught.value).startswith("misuse: ")
        assert f"seed {seed}" in str(caught.value)
    # The executor is as good as new.
    x = torch.randn(2, 64)
    torch.testing.assert_close(ops.row_sums(x, 0), x.sum(1))


def test_limits(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    with pytest.raises(
        RuntimeError, match="misuse: .*232449 bytes of shared memory asked for, a block may have 232448"
    ):
        ops.misuse(x, 99, 232449, 1)
    with pytest.raises(RuntimeError, match="a cluster of 17 blocks, 16 at most"):
        ops.misuse(x, 99, 0, 17)
    assert ops.residents(x, 64, 0, 1) == (32, 128)
    assert ops.residents(x, 1024, 0, 8) == (2, 1)
    assert ops.residents(x, 128, 100 << 10, 2) == (2, 4)
    # Of 132 multiprocessors 16 are in a GPC, and a cluster lies within one.
    monkeypatch.setenv("SEQKERN_SIMT_MULTIPROCESSORS", "132")
    assert ops.residents(x, 64, 200 << 10, 12) == (1, 8)
    assert ops.residents(x, 64, 100 << 10, 12) == (2, 16)
    monkeypatch.setenv("SEQKERN_SIMT_GPC", "10")
    assert ops.residents(x, 64, 200 << 10, 12) == (1, 0)
    with pytest.raises(RuntimeError, match="a cluster of 12 blocks: a GPC of 10 multiprocessors holds 10"):
        ops.misuse(x, 99, 200 << 10, 12)
    monkeypatch.setenv("SEQKERN_SIMT_SHARED", "1000")
    with pytest.raises(RuntimeError, match="1001 bytes of shared memory asked for, a block may have 1000"):
        ops.misuse(x, 99, 1001, 1)
    monkeypatch.setenv("SEQKERN_SIMT_ARCH", "80")
    with pytest.raises(RuntimeError, match="a cluster of 2 blocks, 1 at most"):
        ops.misuse(x, 99, 0, 2)
    assert ops.residents(x, 64, 0, 2)[1] == 0


def test_schedule_is_the_seeds(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed gives the same wrong result again, and not all seeds give the same one."""
    x = torch.arange(40 * 200, dtype=torch.float32).view(40, 200)
    first, second = (
        [str(ops.row_sums(x, fault("no_barrier")).tolist()) for _ in schedules(monkeypatch)] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) > 3


# ---- races -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def racing(simt_build: ModuleType) -> Any:
    """The planted kernels in the build that looks for races."""
    torch.ops.load_library(str(simt_build.build("planted", [PLANTED], race=True)))
    return torch.ops.seqkern_planted_race


def kernels(racing: Any, kernel: str, planted: int) -> tuple[Any, torch.Tensor]:
    """A call, and what the right kernel gives."""
    if kernel == "row_sums":
        x = torch.randn(3, 200)
        return lambda: racing.row_sums(x, planted), x.sum(1)
    if kernel.startswith("matmul"):
        a, b, c = operands(torch.float32 if kernel == "matmul_tf32" else torch.bfloat16, 32, 64, 128)
        return lambda: racing.matmul(a, b, planted), c
    if kernel == "cluster_steps":
        x = torch.randn(2, 128)
        return lambda: racing.cluster_steps(x, 5, planted), cluster_oracle(x, 5)
    if kernel == "grid_steps":
        x = torch.randn(5, 3)
        return lambda: racing.grid_steps(x, packets(5), 4, True, planted), grid_oracle(x, 4)
    if kernel == "warp_sums":
        return lambda: racing.warp_sums(torch.zeros(1), planted), torch.full((3,), 496.0)
    x = torch.randn(5, 128)
    counter = torch.zeros(1, dtype=torch.int32)
    return lambda: racing.last_block_sums(x, counter.zero_(), planted), x.sum().view(1)


@pytest.mark.parametrize(
    "kernel", ["row_sums", "matmul", "matmul_tf32", "cluster_steps", "grid_steps", "warp_sums", "last_block_sums"]
)
def test_no_races(racing: Any, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    assert set(outcomes(monkeypatch, *kernels(racing, kernel, 0))) == {"right"}


@pytest.mark.parametrize(
    ("kernel", "planted"),
    [
        ("row_sums", "no_barrier"),
        ("matmul", "no_barrier"),
        ("matmul", "no_last_barrier"),
        ("matmul_tf32", "no_last_barrier"),
        ("cluster_steps", "no_wait"),
        ("cluster_steps", "no_barrier"),
        ("warp_sums", "no_barrier"),
        ("last_block_sums", "no_fence"),
        ("last_block_sums", "no_acquire"),
    ],
)
def test_races(racing: Any, monkeypatch: pytest.MonkeyPatch, kernel: str, planted: str) -> None:
    """On every schedule, whether its result is right or not."""
    found = outcomes(monkeypatch, *kernels(racing, kernel, fault(planted)))
    # Where a kernel is inlined into the function that launches it, the compiler may name that one's line.
    where = r"\(planted(_cuda)?\.cuh?:\d+\)"
    message = rf"seed \d+: race: it (reads|writes) {where} (shared|global) memory .* {where}, and"
    # (The exchange of a cluster may also run into what the barriers themselves check.)
    message += "|more arrivals|on their way" if kernel == "cluster_steps" else ""
    assert all(re.search(message, word) for word in found), found


# ---- sanitizers --------------------------------------------------------------------------------------------------

SANITIZED = """
import os, sys, torch
torch.ops.load_library(os.environ["SEQKERN_SIMT"])
ops, x = torch.ops.seqkern_planted, torch.randn(3, 100)
cases = {
    "right": lambda: torch.testing.assert_close(ops.row_sums(x, 0), x.sum(1)),
    "matmul": lambda: ops.matmul(torch.randn(32, 64).bfloat16(), torch.randn(64, 32).bfloat16(), 0),
    "cluster": lambda: ops.cluster_steps(torch.randn(1, 128), 3, 0),
    "grid": lambda: ops.grid_steps(torch.randn(4, 3), torch.zeros(13, 4, dtype=torch.int32), 3, True, 0),
    "raises": lambda: ops.misuse(torch.zeros(64), 0, 64, 1),
    "shared": lambda: ops.row_sums(x, 6),
    "global": lambda: ops.row_sums(x, 7),
    "tile": lambda: ops.matmul(torch.randn(32, 64), torch.randn(32, 32), 0),
    "ended": lambda: [ops.cluster_steps(torch.randn(1, 128), 3, 8) for _ in range(20)],
    "misaligned": lambda: ops.misuse(torch.zeros(64), 16, 1024, 1),
}
for name, case in cases.items():  # each in a process of its own, for the sanitizers end it
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"{sys.argv[1]}/{name}", os.O_CREAT | os.O_WRONLY), 2)
        try:
            case()
        except RuntimeError as error:
            print(error, file=sys.stderr)
            os._exit(3)
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_sanitizers(simt_build: ModuleType, tmp_path: Path) -> None:
    path = simt_build.build("planted", [PLANTED], sanitize=True)
    command = [sys.executable, "-W", "ignore", "-c", SANITIZED, str(tmp_path)]
    environment = simt_build.environment(path, seed=1) | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    codes = {name: int(code) for name, code in (line.split() for line in result.stdout.splitlines())}
    said = {name: (tmp_path / name).read_text() for name in codes}
    for name in ("right", "matmul", "cluster", "grid"):
        assert codes[name] == 0, said[name]
        assert "ERROR" not in said[name], said[name]
    assert codes["raises"] == 3
    assert "divergent barrier" in said["raises"]
    for name in ("shared", "global", "tile"):
        assert codes[name] not in (0, 3)
        assert "AddressSanitizer: heap-buffer-overflow" in said[name], said[name]
    assert "planted.cuh" in said["shared"]
    assert codes["ended"] != 0
    assert "use-after-poison" in said["ended"] or "has ended" in said["ended"], said["ended"]
    assert codes["misaligned"] not in (0, 3)
    assert "misaligned address" in said["misaligned"], said["misaligned"]
