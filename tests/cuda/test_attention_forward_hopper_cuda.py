"""Attention's forward kernel for Hopper: `seqkern_cuda::attention_fwd(..., path="hopper")` in the host executor.

Against the reference in float64, by the error rule; in the place of torch stands the reference in float32 with the
weights rounded as the kernel rounds them. What no query may see is NaN: keys behind a sequence's length, rows of no
sequence. The executor's library is loaded into a process of its own: this file, run. What nvcc made of the kernel is
looked at too: the instructions, and how they are ordered.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from cuda_checks import gpu_test, machine_code, run_words
from torch import Tensor

from seqkern.reference.attention_scores import attention_scores, for_query_heads
from seqkern.reference.attention_weights import attention_weights
from seqkern.reference.dropout import keep_mask
from seqkern.testing import assert_passed, compare, poison
from seqkern.testing.attention_calls import lse_report

BF16, F16 = torch.bfloat16, torch.float16
NAN = float("nan")


@dataclass(frozen=True)
class OpCase:
    """A call of the op: queries and keys of each sequence, which are all the same unless they are packed."""

    queries: tuple[int, ...] = (70,)
    keys: tuple[int, ...] = (150,)
    lengths: tuple[int, ...] | None = None  # of the keys
    packed: bool = False
    gaps: tuple[int, int] = (0, 0)  # packed: rows before the first sequence and behind the last
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = BF16
    diagonal: int = 0
    lower_right: bool = False
    left: int = -1
    right: int = -1
    sinks: bool = False
    scale: float = 0.3
    softcap: float = 0.0
    slopes: bool = False
    mask: str = ""  # "bool", "float", "own" (the call's dtype), of (1 or sequences, heads, queries, keys)
    dropout_p: float = 0.0
    layout: str = "heads"  # "rows": (batch, rows, heads, columns) in memory; "one": a head and a batch entry for all


Tensors = dict[str, Tensor | None]


def build(case: OpCase, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if case.packed else len(case.queries)

    def tensor(heads: int, rows: int, columns: int, alike: bool = False) -> Tensor:
        if alike and case.layout == "one":
            return torch.randn((1, 1, rows, columns), generator=generator).to(case.dtype).expand(batch, heads, -1, -1)
        if case.layout == "rows" or case.packed:
            wide = torch.randn((batch, rows, heads, columns + 8), generator=generator).to(case.dtype)
            return wide[..., :columns].transpose(1, 2)
        return torch.randn((batch, heads, rows, columns), generator=generator).to(case.dtype)

    query_starts, key_starts = (
        torch.tensor([0, *itertools.accumulate(lengths)]) + case.gaps[0] for lengths in (case.queries, case.keys)
    )
    rows = [int(starts[-1]) + case.gaps[1] for starts in (query_starts, key_starts)]
    if not case.packed:
        rows = [case.queries[0], case.keys[0]]
    tensors: Tensors = {
        "query": tensor(case.heads, rows[0], case.head_dim),
        "key": tensor(case.kv_heads, rows[1], case.head_dim, alike=True),
        "value": tensor(case.kv_heads, rows[1], case.value_dim, alike=True),
        "query_starts": query_starts.int() if case.packed else None,
        "key_starts": key_starts if case.packed else None,
        "key_lengths": None if case.lengths is None else torch.tensor(case.lengths),
        "sinks": torch.randn(case.heads, generator=generator) if case.sinks else None,
        "slopes": torch.rand((len(case.queries), case.heads), generator=generator) if case.slopes else None,
        "mask": mask_of(case, generator) if case.mask else None,
        "seed": torch.tensor(2**40 + seed) if case.dropout_p else None,
    }
    seen = torch.zeros((batch, rows[1]), dtype=torch.bool)
    for s, (b, _, keys) in enumerate(places(case, tensors)):
        seen[b, keys.start : keys.stop] = True
        assert len(range(*keys.indices(rows[1]))) <= case.keys[s]
    if case.layout != "one":
        tensors["key"].masked_fill_(~seen[:, None, :, None], NAN)
        tensors["value"].masked_fill_(~seen[:, None, :, None], NAN)
    if case.packed:
        tensors["query"][:, :, : case.gaps[0]] = NAN
        tensors["query"][:, :, int(query_starts[-1]) :] = NAN
    return tensors


def mask_of(case: OpCase, generator: torch.Generator) -> Tensor:
    sizes = (len(case.queries) if case.packed else 1, case.heads, max(case.queries), max(case.keys))
    hidden = torch.rand(sizes, generator=generator) < 0.3
    if case.mask == "bool":
        return ~hidden
    added = torch.randn(sizes, generator=generator).to(torch.float32 if case.mask == "float" else case.dtype)
    added.masked_fill_(hidden, -math.inf)
    added[:, :, -1] = torch.finfo(added.dtype).min  # finite: the row is uniform
    return added


def places(case: OpCase, tensors: Tensors) -> Iterator[tuple[int, slice, slice]]:
    """Of every sequence: the batch entry, the rows of its queries, those of its keys that count."""
    for s, (queries, keys) in enumerate(zip(case.queries, case.keys, strict=True)):
        count = keys if case.lengths is None else min(keys, case.lengths[s])
        if case.packed:
            q, k = int(tensors["query_starts"][s]), int(tensors["key_starts"][s])
            yield 0, slice(q, q + queries), slice(k, k + count)
        else:
            yield s, slice(0, queries), slice(0, count)


def ours(case: OpCase, tensors: Tensors, device: str) -> tuple[Tensor, Tensor]:
    t = {name: None if each is None else each.to(device) for name, each in tensors.items()}
    with poison():
        out, lse = torch.ops.seqkern_cuda.attention_fwd(
            t["query"], t["key"], t["value"], t["mask"], t["query_starts"], t["key_starts"], t["key_lengths"],
            t["slopes"], t["sinks"], t["seed"], max(case.queries), max(case.keys), case.diagonal, case.lower_right,
            case.left, case.right, case.scale, case.softcap, case.dropout_p, False, "hopper",
        )  # fmt: skip
    return out.cpu(), lse.cpu()


def by_reference(case: OpCase, t: Tensors, rounded: bool) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if rounded else torch.float64
    query, key, value = (t[name].to(wide) for name in ("query", "key", "value"))
    out = torch.zeros((*query.shape[:3], case.value_dim), dtype=wide)
    lse = torch.full(query.shape[:3], -math.inf, dtype=wide)
    sinks, slopes = (None if t[name] is None else t[name].to(wide) for name in ("sinks", "slopes"))
    numbers = torch.arange(lse.numel()).view(lse.shape)
    for s, (b, rows, keys) in enumerate(places(case, t)):
        q, k, v = query[b : b + 1, :, rows], key[b : b + 1, :, keys], value[b : b + 1, :, keys]
        diagonal = case.diagonal + case.lower_right * (k.shape[2] - q.shape[2])
        mask = t["mask"]
        if mask is not None:
            mask = mask[min(s, mask.shape[0] - 1) :][:1, :, : q.shape[2], : k.shape[2]]
            mask = mask if case.mask == "bool" else mask.to(wide)
        band = (diagonal, case.left, case.right)
        z = attention_scores(q, k, mask, None, None if slopes is None else slopes[s], *band, case.scale, case.softcap)
        weights, sums = attention_weights(z, sinks)
        if case.dropout_p:
            kept = keep_mask(t["seed"], case.dropout_p, numbers[b : b + 1, :, rows].flatten(), z.shape[-1])
            weights = torch.where(kept.view(z.shape), weights / (1 - case.dropout_p), 0)
        if rounded:
            weights = weights.to(case.dtype).to(wide)
        out[b : b + 1, :, rows] = weights @ for_query_heads(v, case.heads, None)
        lse[b : b + 1, :, rows] = sums
    return out, lse


def check(case: OpCase, seed: int = 0, device: str = "cpu") -> None:
    check_tensors(case, build(case, seed), device)


def check_tensors(case: OpCase, tensors: Tensors, device: str) -> None:
    result = ours(case, tensors, device)
    exact, rounded = (by_reference(case, tensors, each) for each in (False, True))
    reports = [
        compare(result[0], rounded[0].to(case.dtype), exact[0], name="out"),
        lse_report(result[1], rounded[1], exact[1], tensors["query"], tensors["key"], case.scale, block=16),
    ]
    assert_passed(reports, case)


# ---- cases ---------------------------------------------------------------------------------------------------------

CAUSAL = {"right": 0}


def quick() -> Iterator[OpCase]:
    """Each option once; blocks of 128 keys (80 from dim 129 on), tiles of 192 queries (128)."""
    yield OpCase((200,), (300,))
    yield OpCase((130,), (290,), head_dim=128, value_dim=104, dtype=F16, sinks=True, **CAUSAL, lower_right=True)
    yield OpCase((70,), (250,), head_dim=136, value_dim=256, **CAUSAL, diagonal=100, left=120)
    yield OpCase((20, 20), (140, 140), (131, 0), heads=2, kv_heads=1, layout="rows", head_dim=40)
    yield OpCase((200, 0, 9, 70), (130, 5, 0, 200), packed=True, gaps=(3, 5), **CAUSAL, lower_right=True, left=90)


def scored() -> Iterator[OpCase]:
    """Scores that are more than scale q.k, alone and together; blocks of 64 keys, tiles of 128 queries."""
    yield OpCase((150,), (200,), softcap=2.0, head_dim=72, value_dim=128, **CAUSAL, lower_right=True)
    yield OpCase((150,), (200,), slopes=True, dtype=F16, heads=2)
    yield OpCase((70, 70), (150, 150), mask="bool", heads=2, kv_heads=1, lengths=(150, 60))
    yield OpCase((70,), (150,), mask="own", head_dim=128, value_dim=128, **CAUSAL, diagonal=80)
    yield OpCase((130,), (90,), dropout_p=0.3, sinks=True, heads=2)
    yield OpCase((30,), (90,), scale=-0.2)
    every = {"softcap": 3.0, "slopes": True, "dropout_p": 0.2, "sinks": True, "left": 70, "right": 30, "heads": 2}
    yield OpCase((70, 9), (140, 100), packed=True, gaps=(1, 2), mask="float", lower_right=True, **every)
    yield OpCase((200,), (200,), mask="own", dtype=F16, head_dim=104, value_dim=96, layout="rows", **every)


def options() -> Iterator[OpCase]:
    for dim, dtype in ((64, BF16), (128, F16), (256, BF16)):
        base = OpCase(head_dim=dim, value_dim=dim, dtype=dtype)
        yield replace(base, queries=(1,), keys=(1,))
        yield replace(base, queries=(65,), keys=(400,), sinks=True)
        yield replace(base, queries=(200,), keys=(200,), **CAUSAL)
        yield replace(base, queries=(200,), keys=(130,), **CAUSAL, lower_right=True, sinks=True)  # some see nothing
        yield replace(base, queries=(330,), keys=(330,), **CAUSAL, left=40)
        yield replace(base, queries=(260,), keys=(500,), left=100, right=90, lower_right=True)
        yield replace(base, queries=(150,), keys=(600,), left=30)
        yield replace(base, queries=(140, 140, 140), keys=(270, 270, 270), lengths=(256, 0, 129), heads=2, kv_heads=2)
        yield replace(base, queries=(100, 100), keys=(170, 170), layout="one", heads=4, kv_heads=2, **CAUSAL)
        packed = {"packed": True, "gaps": (9, 70), "heads": 2, "layout": "rows"}
        packed_causal = packed | CAUSAL | {"lower_right": True}
        yield replace(base, queries=(64, 129, 300, 0, 1), keys=(64, 160, 20, 7, 333), **packed_causal)
        yield replace(base, queries=(128, 200, 5), keys=(129, 300, 90), lengths=(100, 299, 0), **packed)
        yield replace(base, queries=(90,), keys=(500,), scale=40.0, **CAUSAL, diagonal=300)  # one key takes it all


def sizes() -> Iterator[OpCase]:
    for dim, value_dim in ((8, 64), (40, 24), (72, 128), (96, 96), (192, 128), (200, 256), (16, 136)):
        yield OpCase((70,), (330,), head_dim=dim, value_dim=value_dim, **CAUSAL, lower_right=True, dtype=F16)
    for queries, keys in itertools.product((1, 63, 64, 65, 191, 193), (1, 127, 128, 129, 255, 385)):
        yield OpCase((queries,), (keys,), right=0, lower_right=True, dtype=BF16 if queries % 2 else F16)


def check_all(cases: Callable[[], Iterator[OpCase]]) -> Callable[[str], None]:
    def run(device: str) -> None:
        for i, case in enumerate(cases()):
            check(case, i, device)

    return run


def many_tiles(device: str) -> None:
    """More tiles than blocks: the walk, the rings and the turns go on from tile to tile."""
    band = {"right": 0, "lower_right": True}
    check(OpCase((400, 400), (300, 300), heads=4, kv_heads=2, **band), device=device)
    check(OpCase((300, 40, 0, 513), (200, 0, 9, 260), packed=True, heads=2, left=150, **band), device=device)


def same_bits(device: str) -> None:
    case = OpCase((200, 200), (260, 260), (260, 141), heads=2, right=0)
    first, second = (ours(case, build(case, 0), device) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def not_served(device: str) -> None:
    case = OpCase()
    tensors = build(case, 0)
    wide = OpCase(head_dim=256, value_dim=256, softcap=1.0)
    with pytest.raises(RuntimeError, match="Hopper kernels do not serve this call"):
        ours(wide, build(wide, 0), device)
    for name, wrong in (("query", tensors["query"].float()), ("value", tensors["value"][..., :60])):
        given = tensors | {name: wrong}
        if name == "query":
            given = {n: None if t is None else t.float() for n, t in tensors.items()}
        with pytest.raises(RuntimeError, match="Hopper kernels do not serve this call"):
            ours(case, given, device)


def repeated(device: str) -> None:
    """Heads and batch entries that are one in memory are served, a row that stands for all is not."""
    case = OpCase((70, 70), (150, 150), heads=4, kv_heads=2, right=0, lower_right=True)
    for names in (("key",), ("value",), ("query", "key", "value")):
        for heads, batch in ((1, 2), (4, 1), (1, 1)):
            tensors = build(case, 0)
            for name in names:
                t = tensors[name]
                tensors[name] = t[:batch, :heads].expand(t.shape)
            check_tensors(case, tensors, device)
    for name in ("query", "key", "value"):
        tensors = build(case, 0)
        tensors[name] = tensors[name][:, :, :1].expand(tensors[name].shape)
        with pytest.raises(RuntimeError, match="Hopper kernels do not serve this call"):
            ours(case, tensors, device)
    single = OpCase((1,), (1,), heads=2)  # a stride that nobody uses
    tensors = build(single, 0)
    strides = tensors["key"].stride()
    tensors["key"] = tensors["key"].as_strided((1, 1, 1, 64), (0, strides[1], 0, 1))
    check_tensors(single, tensors, device)


PARTS: dict[str, Callable[[str], None]] = {
    "quick": check_all(quick),
    "scored": check_all(scored),
    "options": check_all(options),
    "sizes": check_all(sizes),
    "many_tiles": many_tiles,
    "same_bits": same_bits,
    "not_served": not_served,
    "repeated": repeated,
}


@pytest.mark.parametrize("seed", [0, 1])
def test_forward(simt: Callable[..., str], seed: int) -> None:
    parts = ("quick", "scored", "many_tiles", "same_bits", "not_served", "repeated")
    simt(__file__, *parts, sanitize=False, seed=seed, arch=90, multiprocessors=2)


def test_memory(simt: Callable[..., str]) -> None:
    simt(__file__, "quick", "scored", "many_tiles", arch=90, multiprocessors=3)


def test_races(simt: Callable[..., str]) -> None:
    simt(__file__, "quick", "scored", "many_tiles", race=True, arch=90, multiprocessors=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_options_and_sizes(simt: Callable[..., str], seed: int) -> None:
    simt(__file__, "options", "sizes", sanitize=False, seed=seed, arch=90, multiprocessors=seed - 1)


@pytest.mark.slow
def test_options_in_memory(simt: Callable[..., str]) -> None:
    simt(__file__, "options", arch=90, multiprocessors=3)


@pytest.mark.slow
def test_races_of_options(simt: Callable[..., str]) -> None:
    simt(__file__, "options", race=True, arch=90, multiprocessors=2)


test_gpu = gpu_test(PARTS, hopper=True)


# ---- what nvcc made of it ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_target")
def test_instructions_overlap() -> None:
    kernels = machine_code("attention/cuda/hopper/forward.cu")
    found = {name: lines for name, lines in kernels.items() if "attention_forward_hopper" in name}
    assert found
    for name, lines in found.items():
        text = "\n".join(lines)
        for wanted in ("HGMMA", "UTMALDG.4D", "UTMASTG.4D", "USETMAXREG"):
            assert wanted in text, (name, wanted)
        assert not re.search(r"\b(LDL|STL)\b", text), name
        # The main loop: the products of the scores, those with the values, the wait for the first alone, powers of two
        # while the second run, and the wait for these.
        (one,) = (i for i, line in enumerate(lines) if re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", line))
        zeros = [i for i, line in enumerate(lines) if re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", line)]
        before, after = max(i for i in zeros if i < one), min(i for i in zeros if i > one)
        products = [line for line in lines[before:one] if line.startswith("HGMMA")]
        closed = [i for i, line in enumerate(products) if "gsb0" in line]
        assert len(closed) == 2, name
        assert closed[1] == len(products) - 1, name
        scores, values = products[: closed[0] + 1], products[closed[0] + 1 :]
        assert not any("tnspB" in line for line in scores), name
        assert all("tnspB" in line for line in values), name
        between = lines[one:after]
        assert not any("HGMMA" in line for line in between), name
        keys = 16 * len(values)
        # A thread has every second row of 8 lanes' columns: keys / 2 scores.
        assert sum("MUFU.EX2" in line for line in between) >= keys / 2, name


if __name__ == "__main__":
    run_words(PARTS, "cpu")
