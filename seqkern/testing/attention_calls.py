"""Calls of attention's ops, built from a description, and the formula that their results are held against.

For kernels of every kind: the ops are called as the dispatcher calls them, with their own arguments.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqkern import reference
from seqkern.testing._checks import ErrorReport, compare, poison


@dataclass
class OpCase:
    """A call of the op. Mask sizes as (by sequence, by head, by query, by key)."""

    lengths: tuple[tuple[int, int], ...] = ((5, 7), (5, 7))  # (queries, keys) of each sequence
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float32
    varlen: bool = False
    gaps: tuple[int, int] = (0, 0)  # varlen: rows before the first sequence and behind the last
    key_lengths: tuple[int, ...] | None = None
    mask: str = ""  # "bool", "added" (float32), "added own" (the query's dtype)
    mask_sizes: tuple[bool, bool, bool, bool] = (True, True, True, True)
    need_mask: bool = False
    slopes: bool = False
    need_slopes: bool = False
    softcap: float = 0.0
    sinks: bool = False
    dropout_p: float = 0.0
    diagonal: int = 0
    lower_right: bool = False
    left: int = -1
    right: int = -1
    scale: float = 0.4
    grad_lse: bool = True
    strided: bool = False
    extreme: bool = False  # whole rows of -inf and of the most negative number in the mask, large scores
    device: str = "cpu"
    # Where the launchers are: tests of other kernels ask the same of them, and say what their arithmetic may cost more.
    kernels: str = "seqkern.kernels.attention"
    slack: float = 1.0


def build(case: OpCase, seed: int) -> dict[str, Any]:
    """The op's arguments."""
    torch.manual_seed(seed)
    dtype, device = case.dtype, case.device
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    sequences = len(case.lengths)
    max_queries = max((q for q, _ in case.lengths), default=0)
    max_keys = max((k for _, k in case.lengths), default=0)

    def tensor(heads: int, rows: int, columns: int) -> torch.Tensor:
        batch = 1 if case.varlen else sequences
        scale = 3.0 if case.extreme else 1.0
        if case.varlen:
            t = (torch.randn(rows, heads, columns * 2) * scale).to(dtype).to(device)
            return (t[..., ::2] if case.strided else t[..., :columns].contiguous()).transpose(0, 1).unsqueeze(0)
        if case.strided:
            return (
                (torch.randn(batch, rows, heads, columns + 3) * scale)
                .to(dtype)
                .to(device)[..., :columns]
                .transpose(1, 2)
            )
        return (torch.randn(batch, heads, rows, columns) * scale).to(dtype).to(device)

    starts: list[Any] = [None, None]
    rows = [max_queries, max_keys]
    if case.varlen:
        for k in range(2):
            cumulative = torch.tensor([0, *(pair[k] for pair in case.lengths)]).cumsum(0) + case.gaps[0]
            rows[k] = int(cumulative[-1]) + case.gaps[1]
            starts[k] = cumulative.to(random.Random(seed).choice([torch.int32, torch.int64])).to(device)
    mask = None
    if case.mask:
        full = (sequences, case.heads, max_queries, max_keys)
        sizes = [n if wanted else 1 for n, wanted in zip(full, case.mask_sizes, strict=True)]
        if case.mask == "bool":
            mask = torch.rand(sizes) > 0.3
        else:
            mask = torch.randn(sizes)
            mask[torch.rand(sizes) > 0.8] = -math.inf
        if case.extreme:
            hidden = torch.rand(*sizes[:3], 1) > 0.6
            lowest = -math.inf if case.mask == "bool" else -math.inf if dtype != torch.float64 else -1e4
            mask = mask & ~hidden if case.mask == "bool" else mask.masked_fill(hidden, lowest)
        if case.mask != "bool":
            mask = mask.to(torch.float32 if case.mask == "added" else dtype)
        mask = mask.to(device)
        if case.strided:
            mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    lengths = None
    if case.key_lengths is not None:
        lengths = torch.tensor(case.key_lengths, dtype=torch.int32, device=device)
    return {
        "query": tensor(case.heads, rows[0], case.head_dim),
        "key": tensor(case.kv_heads, rows[1], case.head_dim),
        "value": tensor(case.kv_heads, rows[1], case.value_dim),
        "attn_mask": mask,
        "query_starts": starts[0],
        "key_starts": starts[1],
        "key_lengths": lengths,
        "alibi_slopes": torch.rand(sequences, case.heads, dtype=acc, device=device) if case.slopes else None,
        "sinks": torch.randn(case.heads, dtype=acc, device=device) if case.sinks else None,
        "seed": torch.tensor(0x1234_5678_9ABC + seed, device=device) if case.dropout_p else None,
        "max_queries": max_queries,
        "max_keys": max_keys,
        "diagonal": case.diagonal,
        "lower_right": case.lower_right,
        "left": case.left,
        "right": case.right,
        "scale": case.scale,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
    }


def out_report(out: Tensor, peer: Tensor, exact: Tensor) -> ErrorReport:
    """The error rule; of float32 with a unit more, since two tf32 numbers hold 22 of a value's 24 bits.

    One key alone, with a weight near 1, has no others to average that with.
    """
    report = compare(out, peer, exact, name="out")
    if out.dtype != torch.float32:
        return report
    bound = report.bound + report.unit
    passed = report.passed or (report.error <= bound and bool(exact.isfinite().all()))
    return replace(report, bound=bound, passed=passed)


def lse_report(
    lse: Tensor, peer: Tensor, exact: Tensor, query: Tensor, key: Tensor, scale: float, block: int = 8
) -> ErrorReport:
    """The error rule, and beside it what tensor cores cut off 16-bit scores.

    On average half a unit in the last place of the score, in float32, for each block of products: the largest score's
    for all.
    """
    report = compare(lse, peer, exact, name="lse")
    if query.dtype == torch.float32 or not key.numel() or not query.numel():
        return report
    q, k = (t.cpu().float().nan_to_num() for t in (query, key))
    largest = float((q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].mT).abs().max()) * abs(scale)
    bound = report.bound + query.shape[-1] / block * torch.finfo(torch.float32).eps / 2 * largest
    passed = report.passed or (report.error <= bound and torch.equal(lse.cpu().isfinite(), exact.isfinite()))
    return replace(report, bound=bound, passed=passed)


def formula(
    query, key, value, attn_mask, query_starts, key_starts, key_lengths, alibi_slopes, sinks, seed, max_queries,
    max_keys, diagonal, lower_right, left, right, scale, softcap, dropout_p,
):  # fmt: skip
    """(out, lse, z) of the whole call, z a list with every (sequence, head)'s scores before the softmax."""
    _, heads, total, _ = query.shape
    group = heads // key.shape[1]
    sequences = query.shape[0] if query_starts is None else len(query_starts) - 1
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    lse = query.new_full(query.shape[:3], -math.inf)
    scores = {}
    kept = None
    if seed is not None:
        rows = query.shape[0] * heads * total
        kept = reference.keep_mask(seed.cpu(), dropout_p, rows, max_keys).reshape(
            query.shape[0], heads, total, max_keys
        )
    for s in range(sequences):
        b, first, last, key_first, key_last = s, 0, total, 0, key.shape[2]
        if query_starts is not None:
            b = 0
            first, last = int(query_starts[s]), int(query_starts[s + 1])
            key_first, key_last = int(key_starts[s]), int(key_starts[s + 1])
        nq, nk = last - first, key_last - key_first
        if key_lengths is not None:
            nk = max(0, min(int(key_lengths[s]), nk))
        diag = diagonal + (nk - nq if lower_right else 0)
        i, j = torch.arange(nq)[:, None], torch.arange(nk)[None, :]
        for h in range(heads):
            q, k, v = (
                query[b, h, first:last],
                key[b, h // group, key_first:][:nk],
                value[b, h // group, key_first:][:nk],
            )
            z = q @ k.T * scale
            if softcap:
                z = softcap * torch.tanh(z / softcap)
            if alibi_slopes is not None:
                z = z - alibi_slopes[s, h] * (i + diag - j).abs()
            if attn_mask is not None:
                m = attn_mask.expand(sequences, heads, max_queries, max_keys)[s, h, :nq, :nk]
                z = z.masked_fill(~m, -math.inf) if m.dtype == torch.bool else z + m
            seen = torch.ones(nq, nk, dtype=torch.bool)
            if left >= 0:
                seen &= j >= i + diag - left
            if right >= 0:
                seen &= j <= i + diag + right
            z = z.masked_fill(~seen, -math.inf)
            if z.requires_grad:
                z.retain_grad()
            scores[s, h] = z, (i + diag - j).abs()
            extended = z
            if sinks is not None:
                extended = torch.cat([z, sinks[h].expand(nq, 1)], 1)
            if extended.shape[1] == 0:
                continue
            largest = extended.detach().amax(1, keepdim=True)
            largest = largest.masked_fill(largest == -math.inf, 0)
            exponentials = torch.exp(extended - largest)
            total_sum = exponentials.sum(1, keepdim=True)
            unseen = total_sum == 0
            p = exponentials / total_sum.masked_fill(unseen, 1)
            if kept is not None:
                p = (
                    torch.where(kept[b, h, first:last, : p.shape[1]], p, 0)
                    if sinks is None
                    else torch.cat([torch.where(kept[b, h, first:last, :nk], p[:, :nk], 0), p[:, nk:]], 1)
                )
                p = p / (1 - dropout_p)
            out[b, h, first:last] = p[:, :nk] @ v
            row = (largest + total_sum.masked_fill(unseen, 1).log()).masked_fill(unseen, -math.inf)
            lse[b, h, first:last] = row.squeeze(1)
    return out, lse, scores


def as_type(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments on the CPU, floating point ones in `dtype`."""
    tensors = {name: t.detach().cpu() for name, t in arguments.items() if isinstance(t, Tensor)}
    return arguments | {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def spoil(arguments: dict[str, Any]) -> None:
    """NaN into all rows that no sequence has, and into keys behind a sequence's length."""
    starts = [arguments["query_starts"], arguments["key_starts"]]
    for names, cut in zip((("query",), ("key", "value")), starts, strict=True):
        if cut is not None:
            for name in names:
                arguments[name][:, :, : int(cut[0])] = math.nan
                arguments[name][:, :, int(cut[-1]) :] = math.nan
    if arguments["key_lengths"] is not None:
        for s, length in enumerate(arguments["key_lengths"].tolist()):
            for name in ("key", "value"):
                t = arguments[name]
                first, last = (0, t.shape[2]) if starts[1] is None else starts[1][s : s + 2].tolist()
                t[s if starts[1] is None else 0, :, min(last, first + max(0, length)) : last] = math.nan


def sample(seed: int, device: str = "cpu") -> OpCase:
    """A random call with random options."""
    r = random.Random(seed)
    heads, kv_heads = r.choice([(1, 1), (2, 2), (4, 2), (3, 1)])
    varlen = r.random() < 0.4
    sequences = r.randint(1, 3)
    pool = [0, 1, 2, 5, 17, 33, 40, 65]
    lengths = tuple((r.choice(pool), r.choice(pool)) for _ in range(sequences))
    if not varlen:
        lengths = lengths[:1] * sequences
        if r.random() < 0.3:  # decoding
            lengths = ((r.choice([1, 2, 5, 16]), r.choice([3, 256, 257, 600, 1100])),) * sequences
    max_keys = max(k for _, k in lengths)
    mask = r.choice(["", "", "bool", "added", "added own"])
    by_sequence, by_head, by_query, by_key = (r.random() < 0.6 for _ in range(4))
    need_mask = mask.startswith("added") and r.random() < 0.7
    alibi = r.random() < 0.3
    dtype = r.choice([torch.float32, torch.float32, torch.float64, torch.float16])
    return OpCase(
        lengths=lengths, heads=heads, kv_heads=kv_heads, head_dim=r.choice([1, 5, 8, 16, 24, 40]),
        value_dim=r.choice([1, 3, 8, 16, 33]),
        dtype=dtype, varlen=varlen,
        gaps=(r.choice([0, 3, 70]), r.choice([0, 5, 130])) if varlen else (0, 0),
        key_lengths=tuple(r.randint(-1, max_keys + 2) for _ in range(sequences)) if r.random() < 0.3 else None,
        mask=mask, mask_sizes=(by_sequence, by_head, need_mask or by_query, need_mask or by_key),
        need_mask=need_mask,
        slopes=alibi, need_slopes=alibi and r.random() < 0.7, softcap=r.choice([0.0, 0.0, 0.0, 3.0, 50.0]),
        sinks=r.random() < 0.3, dropout_p=r.choice([0.0, 0.0, 0.0, 0.3, 0.9]),
        diagonal=r.choice([0, 0, -3, 7, -(10**12), 10**12]) if not alibi else r.choice([0, 2, -4]),
        lower_right=r.random() < 0.5, left=r.choice([-1, -1, 0, 3, 20, 10**15]), right=r.choice([-1, 0, 0, 4, 10**15]),
        scale=r.choice([0.4, 0.4, 0.1, -0.3, 0.0]), grad_lse=r.random() < 0.7, strided=r.random() < 0.4,
        extreme=r.random() < 0.2 and dtype != torch.float16, device=device,
    )  # fmt: skip


# ---- calls ---------------------------------------------------------------------------------------------------------


def call(case: OpCase, seed: int = 0) -> tuple[dict[str, Any], Tensor, Tensor, Tensor, Tensor | None, Sequence[Tensor]]:
    """One call forward and backward: (arguments, out, lse, grad_out, grad_lse, grads)."""
    kernels = importlib.import_module(case.kernels)
    arguments = build(case, seed)
    generator = torch.Generator().manual_seed(seed)
    with poison():
        out, lse = kernels.attention_fwd(**arguments)
        grad_out = torch.randn(out.shape, generator=generator).to(out)
        grad_lse = torch.randn(lse.shape, generator=generator).to(lse) if case.grad_lse else None
        if case.strided:
            grad_out = grad_out[..., :1].expand(grad_out.shape)
        backward = {name: value for name, value in arguments.items() if name != "sinks"}
        grads = kernels.attention_bwd(
            grad_out, grad_lse, **backward, out=out, lse=lse, need_mask=case.need_mask, need_slopes=case.need_slopes
        )
    return arguments, out, lse, grad_out, grad_lse, grads


def check(case: OpCase, seed: int = 0) -> None:
    """One call forward and backward, against the formula."""
    arguments, out, lse, grad_out, grad_lse, grads = call(case, seed)
    exact = as_type(arguments, torch.float64)
    leaves = [exact[name].requires_grad_() for name in ("query", "key", "value")]
    if case.need_mask:
        leaves.append(exact["attn_mask"].requires_grad_())
    right_out, right_lse, scores = formula(**exact)
    loss = (right_out * grad_out.cpu().double()).sum()
    if grad_lse is not None:
        loss = loss + torch.where(right_lse.isinf(), 0, right_lse * grad_lse.cpu().double()).sum()
    if loss.requires_grad:
        wanted = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True, materialize_grads=True)
    else:
        wanted = tuple(torch.zeros_like(leaf) for leaf in leaves)
    shape = "packed" if case.varlen else "dense"
    for t in (out, *grads[:3]):
        assert (t.squeeze(0).transpose(0, 1) if case.varlen else t).is_contiguous(), shape
    assert lse.is_contiguous()
    names = ["out", "lse", "grad_query", "grad_key", "grad_value", "grad_mask"]
    pairs = list(zip(names, (out, lse, *grads[:4]), (right_out, right_lse, *wanted), strict=False))
    if case.need_slopes:
        distance = torch.zeros_like(right_lse)
        pieces = [z for z, _ in scores.values()]
        dz = (
            torch.autograd.grad(loss, pieces, allow_unused=True, materialize_grads=True)
            if loss.requires_grad
            else pieces
        )
        starts = arguments["query_starts"]
        for ((s, h), (z, far)), grad in zip(scores.items(), dz, strict=True):
            b, first = (s, 0) if starts is None else (0, int(starts[s]))
            if loss.requires_grad:
                distance[b, h, first : first + len(z)] = (torch.where(z.isinf(), 0, grad) * far).sum(1)
        pairs.append(("grad_distance", grads[4], distance))
    else:
        assert grads[4].shape == (0,)
    if not case.need_mask:
        assert grads[3].shape == (0,)
    unit = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    for name, ours, right in pairs:
        assert ours.shape == right.shape, (name, ours.shape, right.shape)
        ours_dtype = ours.dtype
        ours, right = ours.detach().cpu().double(), right.detach()
        assert torch.equal(ours.isinf(), right.isinf()), (name, "infinities")
        finite = ~right.isinf()
        bound = (
            (10 if case.extreme else 1)
            * case.slack
            * max(unit[case.dtype], 1e-7 * (ours_dtype == torch.float32))
            * max(1.0, float(right[finite].abs().max()) if finite.any() else 0.0)
        )
        error = float((ours - right)[finite].abs().max()) if finite.any() else 0.0
        assert error <= bound, (name, error, bound)  # a NaN fails


def sequences_apart(device: str = "cpu", module: str = OpCase.kernels) -> None:
    """A sequence has the same bits alone, in a batch, packed, and with a longer cache around it."""
    kernels = importlib.import_module(module)
    lengths = ((33, 70), (5, 9), (50, 40))
    batch = build(OpCase(lengths=((50, 70),) * 3, heads=4, device=device), 0)
    packed = build(OpCase(lengths=lengths, heads=4, varlen=True, right=0, left=21, device=device), 0)
    starts = [[0, *torch.tensor([pair[k] for pair in lengths]).cumsum(0).tolist()] for k in range(2)]
    for s in range(len(lengths)):
        for name, k in (("query", 0), ("key", 1), ("value", 1)):
            packed[name][0, :, starts[k][s] : starts[k][s + 1]] = batch[name][s, :, : lengths[s][k]]
    out, lse = kernels.attention_fwd(**packed)
    grads = kernels.attention_bwd(
        out,
        lse,
        **{k: v for k, v in packed.items() if k != "sinks"},
        out=out,
        lse=lse,
        need_mask=False,
        need_slopes=False,
    )
    for s, (nq, nk) in enumerate(lengths):
        alone = packed | {"query_starts": None, "key_starts": None, "max_queries": nq, "max_keys": nk}
        alone |= {"query": batch["query"][s : s + 1, :, :nq]}
        alone |= {name: batch[name][s : s + 1, :, :nk] for name in ("key", "value")}
        if nq * 2 <= 64 and nq <= 16:
            continue  # few queries alone are decoding, which splits the keys elsewhere
        mine, my_lse = kernels.attention_fwd(**alone)
        mine_bwd = kernels.attention_bwd(
            mine, my_lse, **{k: v for k, v in alone.items() if k != "sinks"}, out=mine, lse=my_lse, need_mask=False,
            need_slopes=False,
        )  # fmt: skip
        rows, keys = slice(*starts[0][s : s + 2]), slice(*starts[1][s : s + 2])
        pairs = [(out[:, :, rows], mine), (lse[:, :, rows], my_lse), (grads[0][:, :, rows], mine_bwd[0])]
        pairs += [(grads[i][:, :, keys], mine_bwd[i]) for i in (1, 2)]
        assert all(torch.equal(a, b) for a, b in pairs), s

    cache = build(
        OpCase(lengths=((2, 700),) * 2, heads=4, key_lengths=(100, 600), lower_right=True, right=0, device=device), 1
    )
    out, lse = kernels.attention_fwd(**cache)
    for s, nk in enumerate((100, 600)):
        alone = cache | {"query": cache["query"][s : s + 1], "key_lengths": None, "max_keys": nk}
        alone |= {name: cache[name][s : s + 1, :, :nk] for name in ("key", "value")}
        mine, my_lse = kernels.attention_fwd(**alone)
        assert torch.equal(out[s : s + 1], mine)
        assert torch.equal(lse[s : s + 1], my_lse)


def most_negative_numbers(device: str = "cpu", module: str = OpCase.kernels) -> None:
    """Rows of nothing but the most negative number, as transformers pads: uniform, and every gradient finite."""
    kernels = importlib.import_module(module)
    arguments = build(OpCase(lengths=((33, 70),), mask="added", need_mask=True, device=device), 0)
    arguments["attn_mask"][:] = torch.finfo(torch.float32).min
    out, lse = kernels.attention_fwd(**arguments)
    torch.testing.assert_close(out, arguments["value"].mean(2, keepdim=True).expand_as(out))
    arguments.pop("sinks")
    grads = kernels.attention_bwd(out, None, **arguments, out=out, lse=lse, need_mask=True, need_slopes=False)
    assert all(t.isfinite().all() for t in grads)


def patterns(queries: int, keys: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Boolean masks that hide whole tiles, of 2 sequences (or all) and 2 heads (or all); True is visible."""
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    lengths = torch.tensor([keys, keys // 3], device=device)[:, None, None, None]
    causal = j <= i + keys - queries
    far = torch.tensor([10, 60], device=device)[:, None, None]
    rows = torch.zeros(2, 1, queries, keys, dtype=torch.bool, device=device)
    rows[0, :, 5, 7] = rows[1, :, queries - 1, keys - 1] = True
    return {
        "causal": causal[None, None],
        "window": (causal & (j > i - 20))[None, None],
        "padded": (j < lengths).expand(2, 1, queries, keys),
        "padded on the left": (j >= keys - lengths) & causal,
        "a row": j < lengths,
        "a column": (i < 40)[None, None].expand(1, 1, queries, 1),
        "by head": (j <= i + far)[None] & (j >= i - far),
        "hidden": torch.zeros(1, 1, queries, keys, dtype=torch.bool, device=device),
        "a pair": rows,
    }


def hidden_tiles(device: str = "cpu", module: str = OpCase.kernels, limits: Any = None) -> None:
    """What a mask hides from a whole tile is not visited, and no bit tells.

    `limits` is the module that decides whether masks are looked at. Without it, the kernels have the same bits for a
    mask of numbers of every sequence and head, which are not looked at.

    Infinite keys and values behind the first and last that a mask shows to any query would be NaN if they were read.
    """
    kernels = importlib.import_module(module)
    queries, keys = 70, 100

    def forget() -> None:
        if limits is not None:
            importlib.import_module("seqkern.kernels._replay").forget()

    for n, (name, mask) in enumerate(patterns(queries, keys, device).items()):
        for kind, band in (("bool", -1), (("added", "gradient")[n % 2], (-1, 40)[n // 2 % 2])):
            case = OpCase(lengths=((queries, keys),) * 2, heads=2, head_dim=16, value_dim=16, device=device)
            arguments = build(replace(case, left=band, right=band), 0)
            given = mask if kind == "bool" else torch.zeros(mask.shape, device=device).masked_fill(~mask, -math.inf)
            need = kind == "gradient"
            arguments["attn_mask"] = given.expand(*given.shape[:2], queries, keys) if need else given
            found = []
            for looked in (True, False):
                before = 0 if limits is None else limits.FEW
                if not looked and limits is None:
                    arguments["attn_mask"] = torch.zeros(2, 2, queries, keys, device=device).masked_fill(
                        ~mask, -math.inf
                    )
                elif not looked:
                    limits.FEW = 1 << 30
                forget()
                try:
                    out, lse = kernels.attention_fwd(**arguments)
                    others = {k: v for k, v in arguments.items() if k != "sinks"}
                    grads = kernels.attention_bwd(
                        out, None, **others, out=out, lse=lse, need_mask=need, need_slopes=False
                    )
                    found.append((out, lse, *grads))
                finally:
                    if limits is not None:
                        limits.FEW = before
                    forget()
            for mine, plain in zip(*(each[: 5 if limits is None else None] for each in found), strict=True):
                assert torch.equal(mine, plain), (name, kind, band)
        for sequence, seen in enumerate(mask.expand(2, 2, queries, keys).any(1).any(1)):
            visible = seen.nonzero().flatten().tolist() or [keys]  # or none, from a block on that is not there
            arguments = build(case, 0) | {"attn_mask": mask}
            for part in (slice(visible[0] // 64 * 64), slice((visible[-1] // 64 + 1) * 64, keys)):
                for each in ("key", "value"):
                    arguments[each][sequence, :, part] = math.inf
            assert kernels.attention_fwd(**arguments)[0][sequence].isfinite().all(), name


# ---- cases by name -------------------------------------------------------------------------------------------------

# One option each, and several at once; lengths cross the blocks of 16 to 64 rows that the kernels take off the GPU.
CASES = {
    "plain": OpCase(lengths=((33, 70),) * 2, heads=4, head_dim=16, value_dim=5),
    "one query sees one key": OpCase(lengths=((40, 20),), left=0, right=0, diagonal=-20, head_dim=24),
    "window": OpCase(lengths=((65, 130),), left=20, right=7, diagonal=65),
    "window that just reaches the next block": OpCase(lengths=((130, 130),), left=1, right=1),
    "left edge one key into a block": OpCase(lengths=((130, 130),), left=62),
    "right edge one key short of a block": OpCase(lengths=((130, 130),), right=62),
    "window beyond the keys": OpCase(lengths=((90, 20),), left=3, right=0, diagonal=10**15),
    "key lengths": OpCase(lengths=((9, 40),) * 3, key_lengths=(0, 17, 99), right=0, diagonal=31, strided=True),
    "packed": OpCase(
        lengths=((5, 40), (0, 7), (33, 0), (1, 1), (40, 65)), varlen=True, gaps=(7, 100), right=0, lower_right=True
    ),
    "packed, nothing in it": OpCase(lengths=((0, 0), (0, 0)), varlen=True, gaps=(0, 9), slopes=True, need_slopes=True),
    "bool mask": OpCase(lengths=((33, 70),) * 2, mask="bool", mask_sizes=(True, False, True, True), extreme=True),
    "bool mask by key": OpCase(
        lengths=((33, 70),) * 2, mask="bool", mask_sizes=(True, False, False, True), strided=True
    ),
    "bool mask in float64": OpCase(lengths=((20, 70),), mask="bool", dtype=torch.float64),
    "mask": OpCase(lengths=((20, 40),) * 2, mask="added", need_mask=True, dtype=torch.float16),
    "mask shared by heads": OpCase(
        lengths=((33, 70),) * 2, heads=4, mask="added own", mask_sizes=(True, False, True, True), need_mask=True
    ),
    "mask shared by packed sequences": OpCase(
        lengths=((5, 40), (33, 8)),
        varlen=True,
        mask="added",
        mask_sizes=(False, True, True, True),
        need_mask=True,
        right=3,
    ),
    "alibi": OpCase(lengths=((33, 40),) * 2, slopes=True, need_slopes=True, right=0, diagonal=7),
    "softcap": OpCase(lengths=((33, 40),), softcap=3.0, scale=-2.0),
    # tiles of their own in 16 bits
    "bool mask in float16": OpCase(lengths=((130, 140),), mask="bool", right=8, dtype=torch.float16),
    "alibi in float16": OpCase(lengths=((130, 140),), slopes=True, need_slopes=True, right=8, dtype=torch.float16),
    "softcap in float16": OpCase(lengths=((130, 140),), softcap=3.0, right=8, dtype=torch.float16),
    "sinks": OpCase(lengths=((40, 33),), sinks=True, right=0, diagonal=-7),
    "dropout": OpCase(lengths=((33, 70),) * 2, heads=4, dropout_p=0.4, dtype=torch.float64),
    "dropout of everything": OpCase(dropout_p=1.0 - 2.0**-33),
    "any scale": OpCase(lengths=((33, 40),), scale=0.0),
    "decoding": OpCase(
        lengths=((3, 700),) * 2, heads=6, key_lengths=(10, 700), left=300, right=0, lower_right=True, sinks=True
    ),
    "decoding, one chunk": OpCase(
        lengths=((16, 100),), slopes=True, softcap=20.0, lower_right=True, right=0, strided=True
    ),
    "everything": OpCase(
        lengths=((33, 70), (40, 20), (0, 9)),
        heads=4,
        varlen=True,
        gaps=(3, 5),
        key_lengths=(60, 20, 1),
        mask="added",
        need_mask=True,
        slopes=True,
        need_slopes=True,
        softcap=5.0,
        sinks=True,
        dropout_p=0.3,
        left=30,
        right=4,
        lower_right=True,
        strided=True,
    ),
}
