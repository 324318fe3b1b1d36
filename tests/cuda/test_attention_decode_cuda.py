"""Decoding in CUDA C++: in the host executor (tests/simt), and the same cases on a GPU where one is.

Every `check_*` runs cases on a device: "cpu" in a process whose CPU tensors stand for the GPU's memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_checks import assert_same_digest, checks_of, gpu_bits_test, gpu_test, moved, print_digest, run_words
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing import compare

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


# ---- one call ------------------------------------------------------------------------------------------------------


def layout(t: Tensor, form: str) -> Tensor:
    """The same numbers, at other strides: "dense", "tokens" (heads inside tokens), or "odd" (no row on 16 bytes)."""
    if form == "tokens":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "odd":
        return torch.cat([t, torch.full_like(t[..., :1], math.nan)], -1)[..., 1:].copy_(t)
    return t.clone()


class DecodeCase:
    """The arguments of a call, made on the CPU, and what the equations say of it.

    `lengths` are the tokens of every sequence with the `new` ones. What must not be read is NaN, in the caches and in
    pages, and -1 in the page table, whose pages lie in no order.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        heads: int = 4,
        kv_heads: int = 2,
        queries: int = 1,
        head_dim: int = 64,
        value_dim: int | None = None,
        new: int = 0,
        room: int | None = None,
        page: int | None = None,
        form: str = "dense",
        left: int = -1,
        scale: float | None = None,
        softcap: float = 0.0,
        slopes: bool = False,
        sinks: bool = False,
        std: float = 1.0,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths) * 1009 + sum(lengths) * 7 + head_dim)
        batch, value_dim = len(lengths), value_dim or head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator)

        self.dtype, self.page, self.form, self.new = dtype, page, form, new
        self.scale, self.softcap, self.left = head_dim**-0.5 if scale is None else scale, softcap, left
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.room = room or max(1, *lengths) + 5
        if page:
            self.room = -(-self.room // page) * page
        self.query = (normal(batch, heads, queries, head_dim) * std).to(dtype)
        self.keys = normal(batch, kv_heads, self.room, head_dim).to(dtype)
        self.values = normal(batch, kv_heads, self.room, value_dim).to(dtype)
        self.slopes = torch.rand(batch, heads, generator=generator) / 8 if slopes else None
        self.sinks = normal(heads).float() + 1 if sinks else None
        self.order = torch.randperm(batch * self.room // page + 3, generator=generator) if page else None

    def arguments(self, new: int | None = None) -> dict[str, Any]:
        """Of the op. The last `new` tokens of every sequence are not in the caches yet."""
        new = self.new if new is None else new
        batch, low = len(self.lengths), self.unseen()
        caches, tokens = [], []
        for t in (self.keys, self.values):
            cache = t.clone()
            rows = [cache[b, :, n - new : n].clone() for b, n in enumerate(self.lengths)]
            for b, n in enumerate(self.lengths.tolist()):
                cache[b, :, n - new :] = math.nan
                cache[b, :, : low[b]] = math.nan
            caches.append(cache)
            tokens.append(layout(torch.stack(rows), self.form) if new else None)
        table = None
        if self.page:
            assert self.order is not None
            count = self.room // self.page
            table = self.order[: batch * count].view(batch, count).to(torch.int32)
            pages = []
            for cache in caches:
                shape = (len(self.order), cache.size(1), self.page, cache.size(3))
                pages.append(torch.full(shape, math.nan, dtype=self.dtype))
                split = cache.unflatten(2, (count, self.page)).transpose(1, 2).flatten(0, 1)
                pages[-1][table.flatten().long()] = split
            caches = pages
            for b, n in enumerate(self.lengths.tolist()):
                table[b, -(-n // self.page) :] = -1
                table[b, : min(low[b], n - new) // self.page] = -1
        caches = [layout(t, self.form) for t in caches]
        return {
            "query": layout(self.query, self.form), "key_cache": caches[0], "value_cache": caches[1],
            "cache_lengths": self.lengths - new, "key": tokens[0], "value": tokens[1], "page_table": table,
            "alibi_slopes": self.slopes, "sinks": self.sinks, "left": self.left, "right": 0, "scale": self.scale,
            "softcap": self.softcap, "tf32": False, "splits": 0,
        }  # fmt: skip

    def unseen(self) -> list[int]:
        """How many of the first keys of every sequence no query sees."""
        queries = self.query.size(2)
        return [0 if self.left < 0 else max(0, int(n) - queries - self.left) for n in self.lengths]

    def run(self, device: str, splits: int = 0, new: int | None = None, **changes: Any) -> tuple[Tensor, Tensor]:
        """out and lse on the CPU; what the caches must hold afterwards is looked at."""
        arguments = self.arguments(new) | {"splits": splits} | changes
        there = {n: moved(t, device) for n, t in arguments.items()}
        expected = {n: t.clone() for n, t in arguments.items() if isinstance(t, Tensor)}
        self.append(expected)
        out, lse = torch.ops.seqkern_cuda.attention_decode(**there)
        for name, t in expected.items():
            assert same(there[name].cpu(), t), f"{name} after the call"
        return out.cpu(), lse.cpu()

    def append(self, arguments: dict[str, Any]) -> None:
        if "key" not in arguments:
            return
        for name in ("key", "value"):
            cache, tokens = arguments[f"{name}_cache"], arguments[name]
            for b, n in itertools.product(range(tokens.size(0)), range(tokens.size(2))):
                where, row = b, int(arguments["cache_lengths"][b]) + n
                if "page_table" in arguments:
                    where, row = arguments["page_table"][b, row // self.page], row % self.page
                cache[where, :, row] = tokens[b, :, n]

    def exact(self) -> tuple[Tensor, Tensor]:
        """The reference in float64."""
        numbers = {"left": self.left, "right": 0, "scale": self.scale, "softcap": self.softcap}
        diagonal = self.lengths[:, None, None, None] - self.query.size(2)
        tensors = (self.query.double(), self.keys.double(), self.values.double(), None, self.lengths)
        return reference.attention(*tensors, self.slopes, self.sinks, None, diagonal, **numbers)

    def of_torch(self) -> tuple[Tensor, Tensor]:
        """By torch: scores in float32, weights in the dtype. The head dimension the other way round."""
        diagonal = self.lengths[:, None, None, None] - self.query.size(2)
        z = reference.attention_scores(
            self.query.flip(-1), self.keys.flip(-1), None, self.lengths, self.slopes, diagonal, self.left, 0,
            self.scale, self.softcap,
        )  # fmt: skip
        if self.sinks is not None:
            z = torch.cat([z, self.sinks[:, None, None].expand(*z.shape[:3], 1)], -1)
        none = z.isneginf().all(-1, keepdim=True)
        z = z.masked_fill(none, 0)
        weights = z.softmax(-1).masked_fill(none, 0)[..., : self.room].to(self.dtype)
        hidden = torch.arange(self.room)[:, None] >= self.lengths[:, None, None, None]
        values = self.values.masked_fill(hidden, 0).repeat_interleave(self.query.size(1) // self.keys.size(1), 1)
        return weights @ values, z.logsumexp(-1).masked_fill(none[..., 0], -math.inf)

    def check(self, device: str, splits: Sequence[int] = (0,), about: object = None, **changes: Any) -> None:
        """The error rule, for every number of splits."""
        exact, peer = self.exact(), self.of_torch()
        for count in splits:
            ours = self.run(device, count, **changes)
            for name, a, b, c in zip(("out", "lse"), ours, peer, exact, strict=True):
                report = compare(a, b, c, name=name)
                assert report.passed, f"{about}, {count} splits, {self.dtype}: {report}"


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits, also of NaN."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(same(a, b) for a, b in zip(left, right, strict=True))


# ---- cases ---------------------------------------------------------------------------------------------------------

LENGTHS = (0, 1, 33, 64, 203)
DIMS = ((64, 64), (128, 128), (256, 256), (16, 80), (40, 24), (136, 200), (7, 33), (129, 5))
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"left": 40},
    "small window": {"left": 2, "queries": 4},
    "softcap": {"softcap": 1.5, "std": 3.0},
    "slopes": {"slopes": True},
    "sinks": {"sinks": True},
    "scale 0": {"scale": 0.0},
    "scale below 0": {"scale": -0.3},
    "large scores": {"scale": 20.0},
    "everything": {"left": 70, "softcap": 2.0, "slopes": True, "sinks": True, "scale": -0.2, "queries": 5, "new": 3},
}


def check_head_dims(device: str) -> None:
    for dtype, (head_dim, value_dim) in itertools.product(FLOATS, DIMS):
        case = DecodeCase(LENGTHS, dtype=dtype, head_dim=head_dim, value_dim=value_dim)
        case.check(device, (1, 0), (head_dim, value_dim))


def check_groups(device: str) -> None:
    """Heads that share a key head, and several tokens: rows in one tile, in four, and in several blocks."""
    for dtype, (heads, kv_heads, queries) in itertools.product(
        FLOATS, ((3, 3, 1), (8, 2, 1), (8, 1, 1), (8, 2, 5), (4, 1, 16), (8, 1, 6), (1, 1, 16), (8, 1, 16))
    ):
        about = (heads, kv_heads, queries)
        DecodeCase((0, 7, 130), dtype=dtype, heads=heads, kv_heads=kv_heads, queries=queries).check(device, (2,), about)
    for dtype in FLOATS:
        DecodeCase((3, 70), dtype=dtype, heads=4, kv_heads=1, queries=13, head_dim=200).check(device, (2,), "wide")


def check_options(device: str) -> None:
    for (name, options), dtype in itertools.product(OPTIONS.items(), FLOATS):
        lengths = tuple(max(n, options.get("new", 0)) for n in LENGTHS)
        DecodeCase(lengths, dtype=dtype, heads=6, **options).check(device, (0, 3), name)


def check_pages(device: str) -> None:
    """Pages of any size, in any order, in caches of any strides; new rows too."""
    forms = itertools.cycle(("dense", "tokens", "odd"))
    for dtype, page, head_dim in itertools.product(FLOATS, (1, 7, 16, 64, 256), (64, 136)):
        form = next(forms)
        case = DecodeCase(LENGTHS, dtype=dtype, page=page, head_dim=head_dim, form=form)
        case.check(device, (1, 4), (page, form))
        dense = DecodeCase(LENGTHS, dtype=dtype, head_dim=head_dim, room=case.room)
        dense.query, dense.keys, dense.values = case.query, case.keys, case.values
        assert equal(case.run(device, 2), dense.run(device, 2)), (dtype, page, form)
        more = DecodeCase(
            [n + 9 for n in LENGTHS], dtype=dtype, page=page, head_dim=head_dim, form=form, new=9, left=90
        )
        more.check(device, (3,), (page, form, "new"))


def check_alignment(device: str) -> None:
    """One tensor alone whose rows do not begin on 16 bytes: the same bits."""
    for dtype in FLOATS:
        case = DecodeCase((9, 70), dtype=dtype, new=2, queries=2, head_dim=64, value_dim=40)
        right = case.run(device, 2)
        for name in ("query", "key_cache", "value_cache", "key", "value"):
            odd = layout(case.arguments()[name], "odd")
            assert equal(case.run(device, 2, **{name: odd}), right), (dtype, name)


def check_new_rows(device: str) -> None:
    """Appending, then decoding, is decoding with the appended cache, bit for bit; `run` looks at the cache."""
    for dtype, new, queries in itertools.product(FLOATS, (1, 3, 70), (1, 3)):
        for form in ("dense", "odd"):
            lengths = [n + new for n in (0, 1, 62, 64, 130)]
            case = DecodeCase(lengths, dtype=dtype, queries=queries, new=new, head_dim=40, value_dim=72, form=form)
            case.check(device, (2,), (new, queries, form))
            assert equal(case.run(device, 2), case.run(device, 2, new=0)), (dtype, new, queries, form)
    only = DecodeCase((5, 80), new=5, queries=2, heads=8, kv_heads=1, room=80)  # no room is left
    assert equal(only.run(device, 3), only.run(device, 3, new=0))
    # What has no room is not written, and not seen either; lengths beyond the cache are cut.
    full = only.arguments()
    full["cache_lengths"] = torch.tensor([78, 2**32 + 1])
    there = {n: moved(t, device) for n, t in full.items()}
    torch.ops.seqkern_cuda.attention_decode(**there)
    written = there["key_cache"].cpu()
    assert same(written[0, :, 78:], full["key"][0, :, :2])
    assert same(written[0, :, :78], full["key_cache"][0, :, :78])
    assert same(written[1], full["key_cache"][1])


def check_idle_places(device: str) -> None:
    """New rows without a place are written nowhere: in no page, beyond the room, of sequences of negative length."""
    # Sequences that write three rows, two (the third has no page), none (no page), none (negative), one (no more room),
    # none (no room), none (negative, and no page), none (their page is beyond the pool, as are those that are seen).
    lengths, written = [3, 6, 0, -1, 15, 40, -7, 12], [3, 2, 0, 0, 1, 0, 0, 0]
    table = torch.tensor([[5, 1], [2, -1], [-1, -1], [4, 6], [7, 8], [0, 3], [-1, 11], [-1, 11]], dtype=torch.int32)
    for dtype, page, splits, integer in itertools.product(FLOATS, (None, 8), (1, 3), (torch.int32, torch.int64)):
        generator = torch.Generator().manual_seed(11)

        def normal(*shape: int, generator: torch.Generator = generator, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        batch = len(lengths)
        query, key, value = normal(batch, 4, 2, 40), normal(batch, 2, 3, 40), normal(batch, 2, 3, 24)
        caches = [normal(11 if page else batch, 2, page or 16, n) for n in (40, 24)]
        expected = [t.clone() for t in caches]
        for b, n in enumerate(written if page else [3, 3, 3, 0, 1, 0, 0, 3]):
            for row in range(lengths[b], lengths[b] + n):
                where, at = (table[b, row // page], row % page) if page else (b, row)
                for cache, tokens in zip(expected, (key, value), strict=True):
                    cache[where, :, at] = tokens[b, :, row - lengths[b]]
        arguments = [query, *caches, torch.tensor(lengths, dtype=integer), key, value, table if page else None]
        there = [moved(t, device) for t in arguments]
        rest = (None, None, -1, 0, 40**-0.5, 0.0, False, splits)
        out, lse = torch.ops.seqkern_cuda.attention_decode(*there, *rest)
        assert equal([t.cpu() for t in there[1:3]], expected), (dtype, page, splits)
        negative = torch.tensor(lengths) < 0
        assert not out.cpu()[negative].count_nonzero()
        assert (lse.cpu()[negative] == -math.inf).all()
        assert lse.cpu()[~negative].isfinite().all()


def check_wide_page_numbers(device: str) -> None:
    """A page number of 64 bits that names no page does not name another one in 32: nothing is written."""
    for number in (2**32, -(2**32), 2**31, -1):
        caches = [torch.zeros(3, 1, 8, 16, device=device) for _ in range(2)]
        token = torch.ones(1, 1, 1, 16, device=device)
        table, lengths = torch.tensor([[number]], device=device), torch.tensor([2], device=device)
        unread = mock.patch("seqkern.ops.attention_decode.readable", return_value=False)  # as on a GPU
        with seqkern.use_backend("cuda"), unread:
            seqkern.attention_decode(token, *caches, lengths, key=token, value=token, page_table=table)
        assert not any(cache.any() for cache in caches), number


def check_no_pages(device: str) -> None:
    """A pool without pages: nothing to see and nothing to write, whatever the table says."""
    for dtype, new, splits in itertools.product(FLOATS, (0, 2), (0, 3)):

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        tokens = [zeros(2, 2, new, n) if new else None for n in (8, 24)]
        table, lengths = zeros(2, 3, dtype=torch.int32) - 1, zeros(2, dtype=torch.int32)
        arguments = (zeros(2, 4, 2, 8), zeros(0, 2, 16, 8), zeros(0, 2, 16, 24), lengths, *tokens, table)
        for sinks in (None, torch.ones(4, device=device)):
            rest = (None, sinks, -1, 0, 1.0, 0.0, False, splits)
            out, lse = torch.ops.seqkern_cuda.attention_decode(*arguments, *rest)
            assert out.shape == (2, 4, 2, 24)
            assert not out.count_nonzero()
            torch.testing.assert_close(lse, torch.full_like(lse, -math.inf if sinks is None else 1), rtol=3e-7, atol=0)
        if new:
            continue
        results = []
        for backend in ("cuda", "reference"):
            with seqkern.use_backend(backend):
                some = seqkern.attention_decode(*arguments[:4], page_table=table, return_lse=True)
                results.append([t.cpu() for t in some])
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1].to(results[0][1].dtype))


def check_splits(device: str) -> None:
    """As many as asked for give what one gives, within the rule; the rule's number among them."""
    for dtype, page in itertools.product(FLOATS, (None, 16)):
        case = DecodeCase((1, 300, 1000), dtype=dtype, heads=2, kv_heads=1, sinks=True, left=900, page=page)
        case.check(device, (1, 2, 5, 16, 1000, 0), page)
    several = DecodeCase((64, 1000), heads=2, kv_heads=1)
    assert not equal(several.run(device, 1), several.run(device, 5))  # what the rule's number is, is another test's


def check_bits(device: str) -> None:
    """A sequence does not feel the others, nor, with its number of splits fixed, how many there are."""
    for dtype in FLOATS:
        case = DecodeCase((200, 0, 77), dtype=dtype, slopes=True, queries=2, new=0)
        out, lse = case.run(device)
        case.keys[:2] *= 3
        case.query[:2] -= 1
        case.lengths[:2] = torch.tensor([3, 150])
        other = case.run(device)
        assert equal((out[2], lse[2]), (other[0][2], other[1][2])), dtype
        alone = DecodeCase((77,), dtype=dtype, slopes=True, queries=2, room=case.room)
        for name in ("query", "keys", "values", "slopes"):
            setattr(alone, name, getattr(case, name)[2:])
        out, lse = case.run(device, 3)
        assert equal((out[2], lse[2]), (t[0] for t in alone.run(device, 3))), dtype


def check_few_or_none(device: str) -> None:
    """Nothing to see: output 0, lse -inf, or the sink's; and tensors without elements."""
    for splits, sinks in itertools.product((1, 3), (False, True)):
        case = DecodeCase((0, 2, 0), queries=4, sinks=sinks, room=300)
        out, lse = case.run(device, splits)
        unseen = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()[:, None].expand(3, 4, 4)
        assert not out[unseen].count_nonzero()
        assert out[~unseen].count_nonzero()
        expected = case.sinks[None, :, None].expand(3, 4, 4) if sinks else torch.full((3, 4, 4), -math.inf)
        torch.testing.assert_close(lse[unseen], expected[unseen], rtol=3e-7, atol=0)
        assert not (lse[~unseen] == expected[~unseen]).any()
    op = torch.ops.seqkern_cuda.attention_decode
    rest = (None, None, None, None, None, -1, 0, 1.0, 0.0, False, 0)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    counts = torch.zeros(2, dtype=torch.int32, device=device)
    out, lse = op(zeros(2, 4, 1, 8), zeros(2, 2, 0, 8), zeros(2, 2, 0, 8), counts, *rest)
    assert not out.count_nonzero()
    assert (lse == -math.inf).all()
    assert op(zeros(0, 4, 1, 8), zeros(0, 2, 5, 8), zeros(0, 2, 5, 8), counts[:0], *rest)[0].shape == (0, 4, 1, 8)
    assert op(zeros(2, 0, 1, 8), zeros(2, 0, 5, 8), zeros(2, 0, 5, 8), counts, *rest)[0].shape == (2, 0, 1, 8)
    assert op(zeros(2, 4, 1, 0), zeros(2, 2, 5, 0), zeros(2, 2, 5, 8), counts + 3, *rest)[0].shape == (2, 4, 1, 8)
    assert op(zeros(2, 4, 1, 8), zeros(2, 2, 5, 8), zeros(2, 2, 5, 0), counts + 3, *rest)[0].shape == (2, 4, 1, 0)


def check_api(device: str) -> None:
    """Through the public function, against the other backends (the interpreter of Triton's kernels: float32 alone)."""
    for dtype, page in itertools.product(FLOATS, (None, 16)):
        case = DecodeCase((9, 100, 65), dtype=dtype, new=2, queries=2, page=page, softcap=4.0, slopes=True, sinks=True)
        results = []
        for backend in ("cuda", "reference", "triton")[: 3 if dtype == torch.float32 else 2]:
            arguments = {n: moved(t, device) for n, t in case.arguments().items()}
            for name in ("left", "right", "tf32", "splits"):
                del arguments[name]
            with seqkern.use_backend(backend):
                positional = [arguments.pop(n) for n in ("query", "key_cache", "value_cache", "cache_lengths")]
                out, lse = seqkern.attention_decode(*positional, **arguments, return_lse=True)
            results.append([t.cpu() for t in (out, lse, *positional[1:3])])
        for other in results[1:]:
            assert equal(results[0][2:], other[2:])
            atol = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}[dtype]
            torch.testing.assert_close(results[0][0], other[0], rtol=0, atol=atol)
            torch.testing.assert_close(results[0][1], other[1], rtol=0, atol=2e-6)


def check_refusals(device: str) -> None:
    case = DecodeCase((9, 100), new=1, page=16)
    pages = case.order.numel()

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    for words, changes in (
        ("query must have 1 to 16 tokens, got 17", {"query": tensor(2, 4, 17, 64)}),
        ("query must have 1 to 16 tokens, got 0", {"query": tensor(2, 4, 0, 64)}),
        ("query must have 4 dimensions, got 3", {"query": tensor(2, 4, 64)}),
        ("query must be float32, bfloat16 or float16", {"query": tensor(2, 4, 1, 64, dtype=torch.float64)}),
        ("the 3 heads of query must be a multiple of the 2", {"query": tensor(2, 3, 1, 64)}),
        ("key_cache must have size 64 in dimension 3, got 32", {"key_cache": tensor(pages, 2, 16, 32)}),
        ("key_cache must have 4 dimensions, got 3", {"key_cache": tensor(24, 2, 64)}),
        ("value_cache must have size 16 in dimension 2, got 15", {"value_cache": tensor(pages, 2, 15, 64)}),
        ("value_cache must have 4 dimensions, got 3", {"value_cache": tensor(24, 2, 64)}),
        ("key_cache's last dimension must be contiguous, got stride 16", {"key_cache": tensor(pages, 2, 64, 16).mT}),
        ("value_cache's last dimension must be contiguous", {"value_cache": tensor(pages, 2, 64, 16).mT}),
        ("value_cache must have memory of its own for every row, got stride 0 in dimension 0",
         {"value_cache": tensor(1, 2, 16, 64).expand(pages, 2, 16, 64)}),
        ("head dimensions must be at most 256, got 64 and 257", {"value_cache": tensor(pages, 2, 16, 257)}),
        ("query must have heads where there are new rows",
         {"query": tensor(2, 0, 1, 64)} | dict.fromkeys(("key_cache", "value_cache"), tensor(pages, 0, 16, 64))
         | dict.fromkeys(("key", "value"), tensor(2, 0, 1, 64)) | {"alibi_slopes": None, "sinks": None}),
        ("cache_lengths must be int32 or int64", {"cache_lengths": tensor(2)}),
        ("cache_lengths must have 1 dimensions", {"cache_lengths": tensor(2, 1, dtype=torch.int32)}),
        ("cache_lengths must have size 2", {"cache_lengths": tensor(3, dtype=torch.int32)}),
        ("page_table must have 2 dimensions", {"page_table": tensor(2, dtype=torch.int32)}),
        ("page_table must have size 2 in dimension 0", {"page_table": tensor(3, 7, dtype=torch.int32)}),
        ("page_table must have ScalarType", {"page_table": tensor(2, 7, dtype=torch.int64)}),
        ("key and value go together", {"value": None}),
        ("key must have 4 dimensions, got 3", {"key": tensor(2, 2, 64)}),
        ("key must have size 64 in dimension 3, got 32", {"key": tensor(2, 2, 1, 32)}),
        ("value must have size 1 in dimension 2", {"value": tensor(2, 2, 2, 64)}),
        ("alibi_slopes must have ScalarType", {"alibi_slopes": tensor(2, 4)}),
        ("alibi_slopes must have 2 dimensions", {"alibi_slopes": tensor(4, dtype=torch.float32)}),
        ("sinks must have size 4", {"sinks": tensor(5, dtype=torch.float32)}),
        ("splits must be", {"splits": -1}),
    ):  # fmt: skip
        arguments = {n: moved(t, device) for n, t in case.arguments().items()} | changes
        with pytest.raises(RuntimeError, match=words):
            torch.ops.seqkern_cuda.attention_decode(**arguments)


def digests() -> list[DecodeCase]:
    return [
        DecodeCase(LENGTHS, dtype=dtype, head_dim=head_dim, queries=queries, heads=8, kv_heads=1, page=page, sinks=True)
        for dtype, (head_dim, queries, page) in itertools.product(
            FLOATS, ((64, 1, None), (128, 3, 7), (256, 8, 16), (33, 5, None))
        )
    ]


def check_digest(device: str) -> None:
    """Prints a digest of the bits of all results: the same for every schedule and run."""
    more = DecodeCase([n + 3 for n in LENGTHS], new=3, page=7, heads=8, kv_heads=1, queries=10)
    calls = [*itertools.product(digests(), (1, 0)), (more, 2)]
    print_digest(t for case, splits in calls for t in case.run(device, splits))


CHECKS = checks_of(globals())
HERE = Path(__file__)


# ---- in the host executor ------------------------------------------------------------------------------------------


def test_executor_error_rule(simt):
    simt(HERE, "check_head_dims", "check_groups", "check_options", seed=1, sanitize=False)


def test_executor_pages_and_new_rows(simt):
    new_rows = ["check_new_rows", "check_alignment", "check_idle_places", "check_wide_page_numbers"]
    simt(HERE, "check_pages", *new_rows, "check_api", seed=2, sanitize=False)


def test_executor_memory(simt):
    """Nothing beside the tensors is touched."""
    simt(HERE, "check_few_or_none", "check_no_pages", "check_idle_places", "check_refusals", "check_digest", seed=3)


def test_executor_splits_and_bits(simt):
    """The same bits for every schedule, and on every device."""
    runs = ["seed=1", "check_digest", "seed=2", "multiprocessors=7", "check_digest", "seed=3", "check_digest"]
    assert_same_digest(simt(HERE, "check_splits", "check_bits", *runs, sanitize=False), 3)


def test_executor_finds_no_race(simt):
    simt(HERE, "check_digest", seed=7, race=True)


@pytest.mark.slow
def test_executor_finds_no_race_anywhere(simt):
    simt(HERE, *CHECKS, seed=8, race=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_executor_everything(seed, simt):
    simt(HERE, *CHECKS, seed=seed)


# ---- on a GPU ------------------------------------------------------------------------------------------------------

test_gpu = gpu_test(CHECKS)
test_gpu_same_bits_every_run = gpu_bits_test(check_digest)


@pytest.mark.gpu
def test_gpu_graph_serves_every_length():
    """One recording; lengths and tokens change under it."""
    case = DecodeCase((300, 40, 1000), new=1, queries=1, heads=8, kv_heads=2, head_dim=128, page=16)
    arguments = {n: moved(t, "cuda") for n, t in case.arguments().items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.ops.seqkern_cuda.attention_decode(**arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = torch.ops.seqkern_cuda.attention_decode(**arguments)
    for lengths in ((300, 40, 1000), (17, 1, 999), (1, 48, 512)):
        case.lengths = torch.tensor(lengths, dtype=torch.int32)
        for name, t in case.arguments().items():
            if isinstance(t, Tensor):
                arguments[name].copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        assert equal((out.cpu(), lse.cpu()), case.run("cuda"))


if __name__ == "__main__":
    run_words(CHECKS, "cpu")
