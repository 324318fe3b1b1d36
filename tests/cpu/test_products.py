"""The shared products on their own, in every tier: odd sizes, both layouts, the error rule, equal bits, errors."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch

from benchmarks import loops, products
from seqkern import _library
from seqkern.testing import compare, poison

OPS = torch.ops.seqkern
TIERS = _library.available_isas()
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (2, 17, 33), (5, 64, 7), (16, 130, 129), (31, 65, 300), (97, 257, 66), (200, 48, 513)]


# The tiers of bfloat16 differ in it alone.
OWN = [(t, d) for t in TIERS for d in DTYPES if d == torch.bfloat16 or t not in _library.BF16_ISAS]


@pytest.fixture(params=OWN, ids=lambda p: f"{p[0]}-{p[1]}".replace("torch.", ""))
def dtype(request):
    tier, dtype = request.param
    with _library.use_cpu_isa(tier):
        yield dtype


def operands(rows, columns, depth, dtype, transposed=False):
    """a, and b as weights are stored; transposed: both as a gradient of weights has them."""
    if transposed:
        return torch.randn(depth, rows).to(dtype).t(), torch.randn(depth, columns).to(dtype)
    return torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype).t()


def wide_product(a, b):
    wide = a.double().numpy().astype(np.longdouble) @ b.double().numpy().astype(np.longdouble)
    return torch.from_numpy(wide.astype(np.float64))


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_rule(shape, transposed, dtype, passes):
    rows, columns, _ = shape
    a, b = operands(*shape, dtype, transposed)
    exact, theirs = wide_product(a, b), a @ b
    wide = torch.promote_types(dtype, torch.float32)
    packed = OPS.products_pack(b)
    reports = [compare(OPS.products_multiply(a, packed, columns), theirs, exact, name="multiply")]
    if not transposed:
        for times in (1, 3):
            loop = OPS.products_rows(a, packed, columns, times)
            assert loop.dtype == wide
            reports.append(compare(loop.to(dtype), theirs, exact, name="rows"))
    if rows <= 32 and not transposed:
        reports.append(compare(few_rows(a, b).to(dtype), theirs, exact, name="few rows"))
    passes(reports)


def few_rows(a, b):
    try:
        return OPS.products_few_rows(a, b)
    except RuntimeError:  # the tier multiplies float32
        assert a.dtype.itemsize == 2
        return OPS.products_few_rows(a.float(), b)


def test_same_bits_on_any_number_of_threads_and_with_any_rows(dtype):
    a, b = operands(201, 333, 257, dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with poison():
                packed = OPS.products_pack(b)
                whole = OPS.products_multiply(a, packed, 333)
                rows = OPS.products_rows(a, packed, 333, 2)
                results.append((packed, whole, rows, few_rows(a[:20], b)))
                assert torch.equal(OPS.products_multiply(a[7:30], packed, 333), whole[7:30])
                assert torch.equal(OPS.products_rows(a[7:30], packed, 333, 1), rows[7:30])
    finally:
        torch.set_num_threads(before)
    for packed, whole, rows, few in results[1:]:
        assert torch.equal(packed, results[0][0])
        assert torch.equal(whole, results[0][1])
        assert torch.equal(rows, results[0][2])
        assert torch.equal(few, results[0][3])


def test_the_peak_is_counted(dtype):
    like, before = torch.empty(0, dtype=dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = OPS.products_peak(like, 10)
        assert OPS.products_peak(like, 30) == 3 * one > 0
        torch.set_num_threads(2)
        assert OPS.products_peak(like, 10) == 2 * one
    finally:
        torch.set_num_threads(before)


def test_bad_arguments():
    a, b = torch.randn(4, 6), torch.randn(5, 6).t()
    packed = OPS.products_pack(b)
    for call in (
        lambda: OPS.products_pack(torch.randn(8, 8)[::2, ::2]),
        lambda: OPS.products_pack(torch.ones(3, 3, dtype=torch.int32)),
        lambda: OPS.products_multiply(a, packed, 5000),
        lambda: OPS.products_multiply(a, packed, 0),
        lambda: OPS.products_multiply(torch.randn(4, 7), packed, 5),
        lambda: OPS.products_multiply(a, packed[1:], 5),
        lambda: OPS.products_rows(a.t(), packed, 5, 1),
        lambda: OPS.products_rows(a, packed, 5, 0),
        lambda: OPS.products_few_rows(torch.randn(33, 6), b),
        lambda: OPS.products_few_rows(torch.randn(4, 7), b),
        lambda: OPS.products_peak(a, 0),
    ):
        with pytest.raises(RuntimeError, match="products_"):
            call()


@pytest.mark.parametrize("way", products.WAYS)
def test_the_benchmark(way, capsys):
    dtype = torch.float32
    case = products.Product("a test", 30, 256, 200, way)
    contest = products.Contest(case, dtype)
    for _ in range(2):
        contest.take_turns(2)
    row = contest.row()
    assert len(contest.peaks) == len(contest.shares["seqkern"]) == 4
    assert set(row["shares"]) >= {"seqkern", "torch"}
    assert all(share > 0 for share in row["shares"].values()), row
    assert row["quartiles"][0] <= row["shares"]["seqkern"] <= row["quartiles"][1]
    assert "30 x 256 x 200" in products.report(row)


def test_a_wrong_product_is_not_timed(monkeypatch):
    monkeypatch.setattr(products, "steps", lambda product: 1)
    monkeypatch.setattr(torch, "randn", lambda *shape: torch.full(shape, float("nan")))
    with pytest.raises(AssertionError, match="wrong result"):
        products.calls(products.Product("a test", 5, 40, 30, "packed"), torch.float32)


LISTING = """
    10:\tvxorps %xmm0,%xmm0,%xmm0
    14:\txor    %eax,%eax
    18:\tvmovups (%rdx),%zmm1
    1e:\tprefetcht1 (%rsi)
    22:\tvfmadd231ps 0x8(%rsp),%zmm1,%zmm2
    2a:\tvfmadd231ps %zmm3,%zmm1,%zmm4
    30:\tvmovaps %zmm4,0x48(%rsp)
    38:\tadd    $0x40,%rdx
    3c:\tcmp    %rax,%rdx
    40:\tjne    18 <f+0x8>
    44:\tcmp    %rcx,%rax
    48:\tjl     14 <f+0x4>
    4c:\tret
"""


def test_what_a_loop_counts():
    (loop,) = loops.innermost_loops(LISTING.splitlines())
    assert loop == loops.Loop(products=2, loads=2, stores=1, prefetches=1, others=3, on_stack=2)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="counts x86 instructions")
def test_inner_loops_keep_their_sums_in_registers(capsys, monkeypatch):
    """A tile of whole rows takes the products and loads that it must, and nothing of it lies on the stack."""
    found = [tile for tile in loops.tiles(loops.library()) if tile.rows * tile.vectors >= 10]
    assert {tile.tier for tile in found} >= {"avx2", "avx512"}
    for tile in found:
        loop = tile.loop
        counted = (loop.products, loop.loads, loop.stores, loop.on_stack)
        assert counted == (*tile.ideal, 0), loops.report(tile)
    monkeypatch.setattr(loops, "tiles", lambda path: found)
    assert loops.main([]) == 0
    assert loops.report(found[0]) in capsys.readouterr().out
