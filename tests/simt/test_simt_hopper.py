"""The host executor's wgmma and TMA (tests/simt): right kernels pass on every schedule, planted faults are caught."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_checks import cuda_program
from test_simt import cut_sums, spread

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
PLANTED = ROOT / "tests" / "simt" / "planted_hopper_cuda.cu"
SEEDS = range(8)  # of schedules
RACE_SEEDS = range(3)
# In the order of HopperFault in planted_hopper.cuh.
FAULTS = ["none", "no_wait", "no_commit", "no_fence", "no_proxy_fence", "unswizzled", "wrong_stride", "wrong_step"]
FAULTS += ["misaligned", "barrier_count", "barrier_counts", "no_barrier", "early_release", "no_full", "few_bytes"]
FAULTS += ["no_bytes", "touched", "other_descriptors", "reused", "no_store_wait", "registers", "part_of_registers"]
FAULTS += ["not_elected", "same_sums", "split"]

BF16, F16 = torch.bfloat16, torch.float16
# dtype, columns, a in registers, a transposed, b transposed
VARIANTS = [
    (BF16, 128, False, False, False),
    (BF16, 128, False, False, True),
    (BF16, 128, False, True, True),
    (BF16, 128, True, False, False),
    (BF16, 128, True, False, True),
    (F16, 80, False, False, False),
    (F16, 80, False, True, True),
    (F16, 80, True, False, True),
]
variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(str(x).split(".")[-1] for x in v))


@pytest.fixture(scope="module")
def ops(simt_build: ModuleType) -> Any:
    """The planted kernels, without sanitizers, in this process."""
    torch.ops.load_library(str(simt_build.build("planted_hopper", [PLANTED])))
    return torch.ops.seqkern_planted_hopper


@pytest.fixture(scope="module")
def racing(simt_build: ModuleType) -> Any:
    """The same in the build that looks for races."""
    torch.ops.load_library(str(simt_build.build("planted_hopper", [PLANTED], race=True)))
    return torch.ops.seqkern_planted_hopper_race


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SEQKERN_SIMT_"):
            monkeypatch.delenv(name)


def outcomes(monkeypatch: pytest.MonkeyPatch, call: Callable[[], bool], seeds: Iterable[int] = SEEDS) -> list[str]:
    """One word a schedule: right, wrong, or the error."""
    found = []
    for seed in seeds:
        monkeypatch.setenv("SEQKERN_SIMT_SEED", str(seed))
        try:
            found.append("right" if call() else "wrong")
        except RuntimeError as error:
            found.append(str(error))
    return found


def operand(
    variant: Any, rows: int, depth: int, transposed: bool, outer: int, batches: int
) -> tuple[torch.Tensor, ...]:
    """A matrix of small whole numbers, and how the kernel gets it: the batches lie in the middle of the memory."""
    x = torch.randint(-2, 3, (outer, batches, rows, depth)).to(variant[0])
    laid = x.mT if transposed else x
    inner = laid.shape[3]
    memory = torch.full((outer, laid.shape[2], batches, inner + 8 - inner % 8), torch.nan, dtype=variant[0])
    view = memory.transpose(1, 2)[..., :inner]
    return x, view.copy_(laid)


def product(
    ops: Any, variant: Any, rows: int, depth: int, planted: str = "none", *, sums: bool = False, batches: int = 1
) -> bool:
    """Whether the kernel's product is exact."""
    dtype, columns, registers, transpose_a, transpose_b = variant
    outer = 2 if batches > 1 else 1
    a, a_given = operand(variant, rows, depth, transpose_a, outer, batches)
    b, b_given = operand(variant, columns, depth, transpose_b, outer, batches)
    kind, start = (torch.float32, 3.0) if sums else (dtype, torch.nan)
    out = torch.full((outer, batches, rows, columns), start, dtype=kind)
    ops.product(a_given, b_given, out, registers, transpose_a, transpose_b, FAULTS.index(planted))
    exact = (a.double() @ b.double().mT + (3.0 if sums else 0.0)).to(out.dtype)
    return torch.equal(out, exact)


# ---- right kernels -----------------------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("sums", [False, True], ids=["tiles", "sums"])
def test_products(ops: Any, monkeypatch: pytest.MonkeyPatch, variant: Any, sums: bool) -> None:
    """Of several problems in strided memory, with rows and a depth that are no whole tiles."""
    assert set(outcomes(monkeypatch, lambda: product(ops, variant, 72, 200, sums=sums, batches=2))) == {"right"}


@variants
@pytest.mark.parametrize("width", [0, 3, 12, 70])
def test_sums_are_cut(ops: Any, variant: Any, width: int) -> None:
    """Bit for bit as on 9.0, whatever the exponents."""
    dtype, columns, registers, transpose_a, transpose_b = variant
    half = dtype == F16
    a, b = (spread(n, 100, dtype, min(width, 12) if half else width) for n in (70, columns))
    if width == 0:
        a[5:8], b[3:9] = 1.984375, 1.984375  # sums that 32 bits do not hold
    out = torch.zeros(1, 1, 70, columns)
    given = []
    for x, transposed in ((a, transpose_a), (b, transpose_b)):
        laid = x.mT if transposed else x
        memory = torch.zeros(1, 1, laid.shape[0], laid.shape[1] + 8 - laid.shape[1] % 8, dtype=dtype)
        given.append(memory[..., : laid.shape[1]].copy_(laid))
    ops.product(*given, out, registers, transpose_a, transpose_b, FAULTS.index("none"))
    deep = [torch.nn.functional.pad(x, (0, 12)) for x in (a, b)]  # whole blocks
    assert torch.equal(
        out[0, 0], cut_sums(deep[0], deep[1].mT, torch.zeros(70, columns), 16, 25, -14 if half else -126)
    )
    assert not torch.equal(out[0, 0], (a.double() @ b.double().mT).float())


@variants
def test_no_races(racing: Any, monkeypatch: pytest.MonkeyPatch, variant: Any) -> None:
    for sums in (False, True):
        call = functools.partial(product, racing, variant, 130, 200, sums=sums)
        assert set(outcomes(monkeypatch, call, range(2))) == {"right"}


def handover(ops: Any, planted: str) -> bool:
    out = ops.handover(torch.zeros(1), 6, FAULTS.index(planted))
    return torch.equal(out, (torch.arange(6)[:, None] * 100 + torch.arange(64) % 32).int())


def test_named_barriers(ops: Any, racing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(outcomes(monkeypatch, lambda: handover(ops, "none"))) == {"right"}
    assert set(outcomes(monkeypatch, lambda: handover(racing, "none"))) == {"right"}


# ---- what nvcc makes of it -------------------------------------------------------------------------------------------

SOURCE = """
#include "planted_hopper.cuh"
using namespace seqkern;
template __global__ void seqkern::hopper_product<BFloat16, 128, %s, false, true, false>(
    const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, float*,
    int, int, int, HopperFault);
"""
INSTRUCTIONS = {
    "HGMMA.64x128x16.F32.BF16": "wgmma",
    "UTMALDG.4D": "tma_load_4d",
    "UTMASTG.4D": "tma_store_4d",
    "UBLKRED.G.S.ADD.F32": "bulk_reduce_add_f32",
    "USETMAXREG": "set_registers",
    "SYNCS": "mbarriers",
    "ELECT": "elect_one",
    "FENCE.VIEW.ASYNC": "fence_async_shared",
}


DISASSEMBLER = cuda_program("nvdisasm")
NVCC = shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin:{os.environ.get('PATH', '')}")


@pytest.mark.skipif(NVCC is None or DISASSEMBLER is None, reason="nvcc and nvdisasm are not here")
@pytest.mark.parametrize("registers", ["false", "true"])
def test_instructions(tmp_path: Path, registers: str) -> None:
    """The planted kernel becomes the instructions that it is written for, and products are not made to wait."""
    source, cubin = tmp_path / "product.cu", tmp_path / "product.cubin"
    source.write_text(SOURCE % registers)
    includes = [f"-I{path}" for path in (PLANTED.parent, CSRC, CSRC / "common")]
    command = [NVCC, "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-arch=sm_90a", "-cubin", *includes]
    result = subprocess.run([*command, "-o", cubin, source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "C75" not in result.stderr, result.stderr
    shown = subprocess.run([DISASSEMBLER, cubin], capture_output=True, text=True, check=True).stdout
    assert [name for name in INSTRUCTIONS if name not in shown] == []


# ---- planted faults ----------------------------------------------------------------------------------------------

# What every schedule says, or, after a star, some of them. (Where the others' results are right, it is by luck.)
CAUGHT = {
    "no_wait": "the thread ends without a wgmma_wait for it",
    "no_commit": "the thread ends without a wgmma_wait for it|livelock|wrong",
    "no_fence": "no wgmma_fence since",
    "unswizzled": "wrong",
    "wrong_stride": "wrong",
    "wrong_step": "wrong",
    "misaligned": "tiles begin at multiples of 1024",
    "barrier_count": r"deadlock(.|\n)*named_barrier_sync(.|\n)*at barrier 1 are 128 of 256 threads",
    "barrier_counts": "named_barrier_sync: barrier [12] of (128|256) threads, of which others say (256|128)",
    "no_barrier": "*wrong",
    "early_release": "*wrong|livelock",
    "few_bytes": "*wrong",
    "no_bytes": "lacks 0 arrivals and -65536 bytes|wrong",
    "touched": "its sums were written between a product and the wait for it",
    "other_descriptors": "or the same with other descriptors",
    "reused": "*wrong",
    "no_store_wait": "while its tma_store_4d may still read shared memory",
    "registers": "the warpgroups want 68608 registers, the block has 64512",
    "split": "the warpgroups want 65536 registers, the block has 64512",
    "part_of_registers": "set_registers: not all threads of warpgroup 0 have called the same",
    "not_elected": "livelock|right",
}


@pytest.mark.parametrize("planted", CAUGHT)
def test_faults(ops: Any, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    found = outcomes(monkeypatch, lambda: product(ops, VARIANTS[0], 128, 256, planted))
    words = CAUGHT[planted].removeprefix("*")
    caught = [bool(re.search(words, word)) for word in found]
    assert any(caught) if CAUGHT[planted].startswith("*") else all(caught), found
    assert set(found) != {"right"}


# What only the build that looks for races knows on every schedule.
RACES = {
    "no_proxy_fence": r"a TMA store or bulk addition reads .* wrote .*no fence_async_shared there",
    "no_barrier": r"race: a TMA store or bulk addition reads .* wrote .*nothing orders the two",
    "no_full": r"race: a wgmma of warpgroup [12] reads .* a TMA load wrote .*nothing orders the two",
    "few_bytes": "race: a (wgmma of warpgroup [12]|TMA load) (reads|writes) .* a (TMA load|wgmma)",
    "early_release": "race: a (wgmma of warpgroup [12]|TMA load) (reads|writes) .* a (TMA load|wgmma)",
    "reused": "race: .*(TMA store or bulk addition|it) (reads|writes)",
}


@pytest.mark.parametrize("planted", RACES)
def test_races(racing: Any, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    found = outcomes(monkeypatch, lambda: product(racing, VARIANTS[0], 128, 256, planted), RACE_SEEDS)
    assert all(re.search(RACES[planted], word) for word in found), found


def test_unfenced_sums(racing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(monkeypatch, lambda: product(racing, VARIANTS[0], 64, 64, "no_proxy_fence", sums=True), RACE_SEEDS)
    assert all("no fence_async_shared" in word for word in found), found


def test_sums_in_any_order(racing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the schedule has several blocks at once."""
    found = outcomes(monkeypatch, lambda: product(racing, VARIANTS[0], 64, 64, "same_sums", sums=True, batches=2))
    race = "race: a TMA store or bulk addition writes .* global memory what .* a TMA store or bulk addition wrote"
    assert any(re.search(race, word) for word in found), found
    assert "right" not in found


def test_barrier_overtaken(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(monkeypatch, lambda: handover(ops, "early_release"))
    assert any("comes to barrier 1 twice" in word for word in found), found


def test_refusals(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 64, 136, dtype=BF16)
    b, out = torch.zeros(1, 1, 128, 64, dtype=BF16), torch.zeros(1, 1, 64, 128, dtype=BF16)
    with pytest.raises(RuntimeError, match="hopper_product: no tensor map: the memory does not begin"):
        ops.product(x[..., 1:65], b, out, False, False, False, 0)
    with pytest.raises(RuntimeError, match="no tensor map: the first stride is not 1"):
        ops.product(x[..., :128:2], b, out, False, False, False, 0)
    odd = torch.zeros(1, 1, 64, 65, dtype=BF16)[..., :64]
    with pytest.raises(RuntimeError, match="no tensor map: a stride is not a multiple of 16 bytes"):
        ops.product(odd, b, out, False, False, False, 0)
    monkeypatch.setenv("SEQKERN_SIMT_ARCH", "100")
    with pytest.raises(RuntimeError, match="an instruction of 9.0 alone, this device is 100"):
        ops.product(x[..., :64], b, out, False, False, False, 0)
