"""Attention over sequences of their own lengths: packed ones, caches that grow, and results that are put together."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seqkern
from seqkern import reference
from seqkern.ops import _attention_autograd
from seqkern.testing import attention_case, check_case
from seqkern.testing.option_sets import PACKED_LENGTHS as LENGTHS
from seqkern.testing.option_sets import PACKED_OPTIONS as CASES

attention, varlen, decode = seqkern.attention, seqkern.attention_varlen, seqkern.attention_decode
weights, merge = seqkern.attention_weights, seqkern.merge_attention


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def starts_of(lengths, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def packed(queries, keys=None, *, heads=4, kv_heads=None, head_dim=8, value_dim=None, extra=0, **options):
    """Query, key and value of sequences with so many rows, and the arguments that say where they begin."""
    keys, kv_heads, value_dim = keys or queries, kv_heads or heads, value_dim or head_dim
    inputs = [
        torch.randn(sum(queries) + extra, heads, head_dim, **options),
        torch.randn(sum(keys) + extra, kv_heads, head_dim, **options),
        torch.randn(sum(keys) + extra, kv_heads, value_dim, **options),
    ]
    return inputs, (starts_of(queries), starts_of(keys), max(queries), max(keys))


def gradients(function, inputs, **tensors):
    """Outputs and gradients of function(*inputs, **tensors), by the cosine of the outputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    options = {n: t.detach().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
    out, lse = function(*leaves, **options)
    wanted = [*leaves, *(t for t in options.values() if t.requires_grad)]
    cotangents = (torch.cos(out.detach()), torch.ones_like(lse))
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), wanted, cotangents)]


# ---- packed sequences: accuracy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_error_rule(case, dtype, passes):
    passes(check_case(attention_case(packed=LENGTHS, **({"head_dim": 24} | case)), dtype))


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_error_rule_in_every_tier(name, dtype, isa, passes):
    passes(check_case(attention_case(packed=LENGTHS, **({"head_dim": 17} | CASES[name])), dtype))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 140)), min_size=1, max_size=4),
    causal=st.booleans(),
    align=st.sampled_from(["lower_right", "upper_left"]),
    group=st.integers(1, 3),
    left=st.integers(-1, 60),
    mask=st.sampled_from([None, "bool", "added"]),
    shared=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    sinks=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_lengths(lengths, causal, align, group, left, mask, shared, sinks, dropout_p):
    sizes = (len(lengths), 2 * group, max(q for q, _ in lengths), max(k for _, k in lengths))
    case = attention_case(
        packed=lengths, heads=2 * group, kv_heads=2, head_dim=12, causal=causal, causal_align=align, mask=mask,
        window=(left, None), mask_shape=[1 if one else n for one, n in zip(shared, sizes, strict=True)], sinks=sinks,
        dropout_p=dropout_p, slopes="own",
    )  # fmt: skip
    for report in check_case(case, torch.float32):
        assert report.error <= 3 * report.bound, str(report)


# ---- packed sequences: the same as alone --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_has_the_bits_of_alone(dtype, isa):
    """And of a dense batch, on any number of threads."""
    counts = [(70, 70), (1, 130), (130, 1), (64, 200), (5, 5)]
    inputs, where = packed(*zip(*counts, strict=True), kv_heads=2, dtype=dtype)
    options = {"causal": True, "window": (60, None), "softcap": 4.0, "return_lse": True}
    slopes = torch.rand(5, 4)
    slopes_of = {"alibi_slopes": slopes}
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (2, 1, 3):
            torch.set_num_threads(count)
            runs.append(gradients(lambda q, k, v, **o: varlen(q, k, v, *where, **options, **o), inputs, **slopes_of))
    finally:
        torch.set_num_threads(threads)
    assert equal(runs[0], runs[1])
    assert equal(runs[0], runs[2])
    together = runs[0][:5]
    for s in range(len(counts)):
        (a, b), (c, d) = (at[s : s + 2].tolist() for at in where[:2])
        rows = (slice(a, b), slice(c, d))
        parts = [t[at].transpose(0, 1)[None] for t, at in zip(inputs, (rows[0], rows[1], rows[1]), strict=True)]
        alone = gradients(
            lambda q, k, v, **o: attention(q, k, v, **options, **o), parts, alibi_slopes=slopes[s : s + 1]
        )
        own = [t[rows[n]] for t, n in zip(together, (0, 0, 0, 1, 1), strict=True)]
        assert equal([t[0].transpose(0, 1) for t in alone[:5]], own)


def test_rows_of_no_sequence(isa):
    inputs, where = packed([5, 60], [7, 70], extra=20)
    for t, end in zip(inputs, (65, 77, 77), strict=True):
        t[end:] = math.nan
    out, lse, *grads = gradients(lambda *t: varlen(*t, *where, causal=True, return_lse=True), inputs)
    short = [t[:end] for t, end in zip(inputs, (65, 77, 77), strict=True)]
    expected = gradients(lambda *t: varlen(*t, *where, causal=True, return_lse=True), short)
    for t, e in zip((out, lse, *grads), expected, strict=True):
        assert torch.equal(t[: len(e)], e)
        rest = t[len(e) :]
        assert torch.equal(rest, torch.full_like(rest, -math.inf if t is lse else 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_kinds_of_starts(dtype):
    inputs, where = packed([3, 4])
    starts = (where[0].to(dtype), where[1].to(torch.int32))
    assert torch.equal(varlen(*inputs, *starts, 4, 4), varlen(*inputs, *where))
    strided = torch.stack([where[0], where[0]], 1)[:, 0]
    assert torch.equal(varlen(*inputs, strided, strided, 100, 100), varlen(*inputs, *where))


def test_layouts_and_no_sequences():
    inputs, where = packed([30, 40], head_dim=9)
    strided = [torch.randn(70, 4, 20)[..., :9] for _ in range(3)]
    heads_first = [torch.randn(4, 70, 9).transpose(0, 1) for _ in range(3)]
    for tensors in (strided, heads_first):
        function = lambda *t: varlen(*t, *where, causal=True, return_lse=True)  # noqa: E731
        assert equal(gradients(function, tensors), gradients(function, [t.contiguous() for t in tensors]))
    out = varlen(*inputs, *where)
    assert out.shape == (70, 4, 9)
    assert out.is_contiguous()
    nothing = torch.zeros(1, dtype=torch.int32)
    out, lse, *grads = gradients(lambda *t: varlen(*t, nothing, nothing, 0, 0, return_lse=True), inputs)
    assert not any(t.count_nonzero() for t in (out, *grads))
    assert (lse == -math.inf).all()
    empty = [torch.randn(0, 4, 9)] * 3
    assert varlen(*empty, nothing, nothing, 0, 0, alibi_slopes=torch.ones(4)).shape == (0, 4, 9)


# ---- packed sequences: derivatives and torch's machinery -----------------------------------------------------------


def small_packed():
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    inputs = [leaf(5, 2, 1), leaf(6, 1, 1), leaf(6, 1, 2), leaf(2, 1, 1, 3), leaf(2, 2), leaf(2)]
    queries, keys = torch.tensor([0, 3, 4]), torch.tensor([0, 2, 5])  # a row of each belongs to none

    def function(query, key, value, mask, slopes, sinks):
        torch.manual_seed(3)
        out, lse = varlen(
            query, key, value, queries, keys, 3, 3, causal=True, window=(2, None), softcap=1.5, dropout_p=0.3,
            attn_mask=mask, alibi_slopes=slopes, sinks=sinks, return_lse=True,
        )  # fmt: skip
        return out, lse.masked_fill(lse.isinf(), 0)

    return function, inputs


def test_gradcheck(isa):
    assert torch.autograd.gradcheck(*small_packed(), check_forward_ad=True, check_batched_grad=True)


def test_gradgradcheck(monkeypatch):
    monkeypatch.setattr(_attention_autograd, "_QUERIES", 2)
    monkeypatch.setattr(_attention_autograd, "_SCORES", 1)
    assert torch.autograd.gradgradcheck(*small_packed(), check_fwd_over_rev=True)


def test_vmap():
    inputs, where = packed([3, 4], dtype=torch.float64)
    samples = [torch.stack([t, t.cos(), t.sin()]) for t in inputs]
    slopes = torch.rand(3, 4)

    def loss(query, key, value, slopes):
        return varlen(query, key, value, *where, causal=True, alibi_slopes=slopes).square().sum()

    for function in (loss, torch.func.grad(loss, argnums=(0, 3))):
        ours = torch.func.vmap(function)(*samples, slopes)
        alone = [function(*(t[s] for t in (*samples, slopes))) for s in range(3)]
        expected = torch.stack(alone) if function is loss else tuple(map(torch.stack, zip(*alone, strict=True)))
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("starts_dtype", [torch.int32, torch.int64], ids=str)
def test_opcheck(starts_dtype):
    inputs, (queries, keys, *longest) = packed([3, 4], [5, 2], kv_heads=2, value_dim=3, extra=2)
    query, key, value = (t.transpose(0, 1)[None] for t in inputs)
    queries, keys = queries.to(starts_dtype), keys.to(starts_dtype)
    numbers = (*longest, 0, True, 3, 0, 0.5, 2.0, 0.3)
    mask, slopes, sinks, seed = torch.randn(2, 1, 4, 5), torch.rand(2, 4), torch.randn(4), torch.tensor(7)
    arguments = (query, key, value, mask, queries, keys, None, slopes, sinks, seed, *numbers)
    torch.library.opcheck(torch.ops.seqkern.attention_fwd.default, arguments)
    out, lse = torch.ops.seqkern.attention_fwd(*arguments)
    rest = (mask, queries, keys, None, slopes, seed, *numbers, True, True)
    arguments = (torch.randn_like(out), torch.randn_like(lse), query, key, value, out, lse, *rest)
    torch.library.opcheck(torch.ops.seqkern.attention_bwd.default, arguments)


def test_compile_fullgraph(compilation):
    def function(query, key, value, queries, keys, slopes, sinks):
        return varlen(
            query, key, value, queries, keys, 9, 9, causal=True, alibi_slopes=slopes, sinks=sinks, return_lse=True
        )

    compiled = torch.compile(function, **compilation)
    for lengths in ([3, 9], [5, 2]):
        inputs, (queries, keys, _, _) = packed(lengths, kv_heads=2)
        leaves = [t.requires_grad_() for t in (*inputs, torch.rand(4), torch.randn(4))]
        arguments = (*leaves[:3], queries, keys, *leaves[3:])
        ours, expected = compiled(*arguments), function(*arguments)
        torch.testing.assert_close(ours, expected)
        grads = [torch.autograd.grad(out.sin().sum() + lse.sum(), leaves) for out, lse in (ours, expected)]
        torch.testing.assert_close(*grads)


def test_dynamic_lengths_make_one_graph():
    torch._dynamo.reset()
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda *a: varlen(*a, 64, 64, causal=True), fullgraph=True, backend=count)
    for lengths in ([3, 5], [4, 4, 9], [17, 30, 1, 1], [2, 2, 2, 2, 2]):
        inputs, (queries, keys, _, _) = packed(lengths)
        for t in (*inputs, queries, keys):
            torch._dynamo.mark_dynamic(t, 0)
        assert torch.equal(compiled(*inputs, queries, keys), varlen(*inputs, queries, keys, 64, 64, causal=True))
    assert len(graphs) == 1


def test_autocast():
    inputs, where = packed([3, 4])
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen(inputs[0], inputs[1].bfloat16(), inputs[2].half(), *where)
    assert torch.equal(out, varlen(*(t.bfloat16() for t in inputs[:2]), inputs[2].half().bfloat16(), *where))


# ---- decoding -----------------------------------------------------------------------------------------------------


def cache(lengths, room=200, *, kv_heads=2, head_dim=16, value_dim=24, dtype=torch.float32):
    """Caches with so many tokens, and NaN behind them."""
    keys = torch.randn(len(lengths), kv_heads, room, head_dim).to(dtype)
    values = torch.randn(len(lengths), kv_heads, room, value_dim).to(dtype)
    for b, length in enumerate(lengths):
        keys[b, :, length:], values[b, :, length:] = math.nan, math.nan
    return keys, values, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize(
    ("queries", "new", "options"),
    [
        (1, 1, {}),
        (1, 0, {"window": (20, 0), "softcap": 3.0}),
        (3, 3, {"window": (100, 0)}),
        (70, 1, {"softcap": 3.0, "scale": 0.3}),
    ],
    ids=str,
)
def test_decode_is_attention_over_the_cache(queries, new, options, isa, dtype):
    lengths = [0, 1, 64, 130, 197]
    keys, values, counts = cache(lengths, dtype=dtype)
    query = torch.randn(5, 8, queries, 16).to(dtype)
    tensors = {"alibi_slopes": torch.rand(5, 8), "sinks": torch.randn(8)}
    token = {"key": torch.randn(5, 2, new, 16).to(dtype), "value": torch.randn(5, 2, new, 24).to(dtype)}
    before = keys.clone(), values.clone(), counts.clone()
    out, lse = decode(query, keys, values, counts, **(token if new else {}), **options, **tensors, return_lse=True)
    assert torch.equal(counts, before[2])
    for b, length in enumerate(lengths):
        total = length + new
        key, value = (torch.cat([old[b : b + 1, :, :length], token[n][b : b + 1]], 2)
                      for old, n in zip(before, ("key", "value"), strict=False))  # fmt: skip
        assert equal((keys[b : b + 1, :, :total], values[b : b + 1, :, :total]), (key, value))
        assert keys[b, :, total:].isnan().all()
        assert values[b, :, total:].isnan().all()
        own = {"alibi_slopes": tensors["alibi_slopes"][b : b + 1], "sinks": tensors["sinks"]}
        expected = attention(query[b : b + 1], key, value, causal=True, **options, **own, return_lse=True)
        assert equal((out[b : b + 1], lse[b : b + 1]), expected)


def test_a_prompt_and_then_token_by_token(isa):
    inputs = [torch.randn(2, h, 70, 16) for h in (4, 2, 2)]
    expected = attention(*inputs, causal=True)
    keys, values, counts = cache([0, 0], value_dim=16)
    outs = []
    for first, last in ((0, 60), *((n, n + 1) for n in range(60, 68)), (68, 70)):
        query, key, value = (t[:, :, first:last] for t in inputs)
        outs.append(decode(query, keys, values, counts, key=key, value=value))
        counts += last - first
    torch.testing.assert_close(torch.cat(outs, 2), expected)


def test_decode_into_strided_caches():
    keys, values, counts = cache([5, 9], value_dim=16)
    inner = torch.stack([keys, values], 3).transpose(1, 2)  # (B, N, H, 2, D)
    strided = [inner[..., n, :].transpose(1, 2) for n in range(2)]
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
    expected = decode(query, keys, values, counts, key=key, value=value)
    assert torch.equal(decode(query, *strided, counts, key=key, value=value), expected)
    torch.testing.assert_close(strided, [keys, values], equal_nan=True, atol=0, rtol=0)


def test_new_rows_from_the_cache_itself():
    """Rows that are written are read as they were before."""
    for counts in (torch.tensor([3, 3]), torch.tensor([3, 5])):
        query, keys, values = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
        copies = [t.clone() for t in (keys, values)]
        expected = decode(query, *copies, counts, key=keys[:, :, 2:5].clone(), value=keys[:, :, 4:7].clone())
        assert torch.equal(decode(query, keys, values, counts, key=keys[:, :, 2:5], value=keys[:, :, 4:7]), expected)
        assert torch.equal(keys, copies[0])
        assert torch.equal(values, copies[1])


def test_queries_from_the_cache_itself():
    """Those too are read as they were before the new rows are written over them."""
    for counts in (torch.tensor([3, 3]), torch.tensor([3, 5])):
        keys, values = torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
        token = {"key": torch.randn(2, 2, 2, 8), "value": torch.randn(2, 2, 2, 8)}
        for source in (0, 1):
            copies = [t.clone() for t in (keys, values)]
            expected = decode(copies[source][:, :, 3:5].clone(), *copies, counts, **token)
            ours = [t.clone() for t in (keys, values)]
            assert torch.equal(decode(ours[source][:, :, 3:5], *ours, counts, **token), expected)


def test_decode_compiles():
    @torch.compile(fullgraph=True)
    def compiled(query, keys, values, counts, key, value):
        return decode(query, keys, values, counts, key=key, value=value)

    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 24)
    first, second = ([t.clone() for t in cache([5, 9])] for _ in range(2))
    second = [t.clone() for t in first]
    ours = compiled(query, *first, key, value)
    assert torch.equal(ours, decode(query, *second, key=key, value=value))
    torch.testing.assert_close(first, second, equal_nan=True, atol=0, rtol=0)


def test_decode_under_autocast_and_with_the_reference():
    keys, values, counts = cache([5, 9], dtype=torch.bfloat16)
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 24)
    with torch.autocast("cpu", torch.bfloat16):
        out = decode(query, keys, values, counts, key=key, value=value)
    assert torch.equal(out, decode(query.bfloat16(), keys, values, counts, key=key.bfloat16(), value=value.bfloat16()))
    with seqkern.use_backend("reference"):
        expected = decode(query.bfloat16(), keys, values, counts + 1)
    torch.testing.assert_close(out, expected)


def test_decode_has_no_gradient():
    keys, values, counts = cache([5, 9])
    query = torch.randn(2, 4, 1, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"attention_decode has no gradient.*torch.no_grad\(\)"):
        decode(query, keys, values, counts)
    with pytest.raises(NotImplementedError, match="attention_decode has no gradient"):
        decode(query.detach(), keys, values, counts, sinks=torch.ones(4, requires_grad=True))
    with torch.no_grad():
        decode(query, keys, values, counts)


def paged(keys, values, counts, page, left):
    """The caches in pages of no order, NaN in those of no token, and -1 where the table is not to be looked at."""
    batch, room = keys.shape[0], keys.shape[2]
    count = room // page
    order = torch.randperm(batch * count + 3)
    table = order[: batch * count].view(batch, count)
    pages = []
    for t in (keys, values):
        pages.append(torch.full((len(order), t.shape[1], page, t.shape[3]), math.nan, dtype=t.dtype))
        pages[-1][table.flatten()] = t.unflatten(2, (count, page)).transpose(1, 2).flatten(0, 1)
    shown = table.to(torch.int32)
    for b, length in enumerate(counts.tolist()):
        shown[b, -(-(length + 2) // page) :] = -1
        first = max(0, min(length, length + 2 - 3 - left)) // page
        pages[0][table[b, :first]], pages[1][table[b, :first]] = math.nan, math.nan
        shown[b, :first] = -1
    return pages, shown, table


@pytest.mark.parametrize("page", [1, 7, 16, 64, 128])
@pytest.mark.parametrize("left", [30, 10_000])
def test_a_cache_in_pages(page, left, dtype):
    """The same bits as from one piece; new tokens go where the table says."""
    lengths = [0, 1, 63, 64, 130]
    keys, values, counts = cache(lengths, room=896, dtype=dtype)
    query, slopes = torch.randn(5, 8, 3, 16).to(dtype), torch.rand(5, 8)
    token = {"key": torch.randn(5, 2, 2, 16).to(dtype), "value": torch.randn(5, 2, 2, 24).to(dtype)}
    pages, shown, table = paged(keys, values, counts, page, left)
    options = {"window": (left, 0), "alibi_slopes": slopes, "return_lse": True}
    ours = decode(query, *pages, counts, **token, page_table=shown, **options)
    expected = decode(query, keys, values, counts, **token, **options)
    assert equal(ours, expected)
    for ours, whole in zip(pages, (keys, values), strict=True):
        for b, length in enumerate(lengths):
            together = ours[table[b]].transpose(0, 1).flatten(1, 2)
            assert torch.equal(together[:, length : length + 2], whole[b, :, length : length + 2])
            assert together[:, length + 2 :].isnan().all()
    longer = decode(query, *pages, counts + 2, page_table=table, **options)
    assert equal(longer, expected)


def test_pages_with_the_reference_and_compiled():
    keys, values, counts = cache([5, 90], room=96)
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 24)
    pages, shown, _ = paged(keys, values, counts, 16, 1000)
    copies = [[t.clone() for t in pages] for _ in range(2)]
    expected = decode(query, *pages, counts, key=key, value=value, page_table=shown)
    with seqkern.use_backend("reference"):
        ours = decode(query, *copies[0], counts, key=key, value=value, page_table=shown)
    torch.testing.assert_close(ours, expected)

    @torch.compile(fullgraph=True)
    def compiled(query, keys, values, counts, key, value, table):
        return decode(query, keys, values, counts, key=key, value=value, page_table=table)

    assert torch.equal(compiled(query, *copies[1], counts, key, value, shown), expected)
    for other in copies:
        torch.testing.assert_close(other, pages, equal_nan=True, atol=0, rtol=0)


def test_no_pages():
    none = torch.zeros(2, 0, dtype=torch.int32)
    out, lse = decode(torch.randn(2, 4, 1, 8), C[:0], C[:0], N * 0, page_table=none, return_lse=True)
    assert not out.count_nonzero()
    assert (lse == -math.inf).all()


def test_nothing_is_written_when_something_is_wrong():
    keys, values, counts = cache([5, 199])
    before = keys.clone(), values.clone()
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 24)
    with pytest.raises(
        ValueError, match="cache_lengths must leave room for 2 new tokens among 200, got 199 for sequence 1"
    ):
        decode(query, keys, values, counts, key=key, value=value)
    with pytest.raises(ValueError, match="value must have shape"):
        decode(query, keys, values, counts - 1, key=key, value=value[:, :, :1])
    torch.testing.assert_close((keys, values), before, equal_nan=True, atol=0, rtol=0)


# ---- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", ["lower_right", "upper_left"])
def test_weights_are_those_of_attention(align, dtype):
    query, key, value = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 100, 8), torch.randn(2, 2, 100, 5)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = torch.randn(2, 1, 70, 100).to(dtype)
    options = {
        "causal": True, "causal_align": align, "attn_mask": mask, "window": (60, None), "softcap": 2.0, "scale": 0.4,
        "key_lengths": torch.tensor([100, 7]), "alibi_slopes": torch.rand(2, 4), "sinks": torch.randn(4),
    }  # fmt: skip
    found = weights(query, key, **options)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    expected = attention(query.double(), key.double(), value.double(), **options | {"attn_mask": mask.double()})
    ours = found.double() @ value.double().repeat_interleave(2, 1)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    rows = torch.tensor([69, 0, 3, 3, 12])
    close = functools.partial(torch.testing.assert_close, atol=0, rtol=1e-5 if found.dtype == torch.float32 else 1e-13)
    close(weights(query, key, rows, **options), found[:, :, rows])  # torch's product has other bits for other rows
    for kind in (mask[:1, :, :1], mask > 0):
        some = weights(query, key, rows, attn_mask=kind)
        close(some, weights(query, key, attn_mask=kind)[:, :, rows])
    torch.testing.assert_close(weights(query, key).sum(-1), torch.ones(2, 4, 70, dtype=found.dtype))


def test_weights_by_blocks_and_of_nothing(monkeypatch):
    query, key = torch.randn(1, 2, 100, 8, dtype=torch.float64), torch.randn(1, 2, 70, 8, dtype=torch.float64)
    whole = weights(query, key, causal=True, alibi_slopes=torch.ones(2))
    assert not whole[:, :, :30].count_nonzero()
    monkeypatch.setattr("seqkern.ops.attention_weights._SCORES", 1)
    torch.testing.assert_close(weights(query, key, causal=True, alibi_slopes=torch.ones(2)), whole)
    assert weights(query, key, torch.tensor([], dtype=torch.int64)).shape == (1, 2, 0, 70)
    assert weights(query, key[:, :, :0]).shape == (1, 2, 100, 0)


def test_weights_are_differentiable():
    query, key = (torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([2, 0])

    def function(query, key, sinks):
        return weights(query, key, rows, causal=True, sinks=sinks)

    assert torch.autograd.gradcheck(function, (query, key, sinks), check_forward_ad=True, check_batched_grad=True)
    samples = torch.stack([query, query.cos()])
    ours = torch.func.vmap(function, in_dims=(0, None, None))(samples, key, sinks)
    torch.testing.assert_close(ours, torch.stack([function(q, key, sinks) for q in samples]))


# ---- merging ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 64, 90])
def test_merging_is_attention_over_both(split, dtype):
    query, key, value = (torch.randn(2, 4, 100, 16).to(dtype) for _ in range(3))
    parts = [(key[:, :, :split], value[:, :, :split]), (key[:, :, split:], value[:, :, split:])]
    results = [attention(query, *part, return_lse=True) for part in parts]
    out, lse = merge(*results[0], *results[1])
    expected = reference.attention(query.double(), key.double(), value.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected[0], atol=4 * eps, rtol=4 * eps)
    assert (out.dtype, lse.dtype) == (dtype, results[0][1].dtype)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-5, rtol=1e-5)
    assert equal(merge(*results[1], *results[0]), (out, lse))


def test_merging_packed_results():
    inputs, where = packed([3, 40])
    half, rest = (
        varlen(*(t[: where[0][-1]] for t in inputs), *where, window=w, return_lse=True) for w in ((50, -1), (0, 0))
    )
    out, lse = merge(*half, *rest)
    assert out.shape == half[0].shape
    torch.testing.assert_close(lse, torch.logaddexp(half[1], rest[1]))


def test_merging_leaves_out_what_has_no_weight():
    out, nothing = torch.randn(5, 3), torch.full((5, 3), math.nan)
    lse, unseen = torch.randn(5), torch.full((5,), -math.inf)
    assert equal(merge(out, lse, nothing, unseen), (out, lse))
    assert equal(merge(nothing, unseen, out, lse), (out, lse))


@pytest.mark.parametrize("unseen", ["a", "b", "both"])
def test_merging_with_nothing(unseen):
    out_a, out_b = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lse_a, lse_b = (torch.randn(5, dtype=torch.float64) * 500 for _ in range(2))
    if unseen in ("a", "both"):
        lse_a[:] = -math.inf
    if unseen in ("b", "both"):
        lse_b[:] = -math.inf
    inputs = (out_a, lse_a.requires_grad_(), out_b, lse_b.requires_grad_())
    out, lse = merge(*inputs)
    expected = {"a": (out_b, lse_b), "b": (out_a, lse_a), "both": (torch.zeros_like(out_a), lse_a)}[unseen]
    assert equal((out, lse), expected)
    grads = torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)), create_graph=True)
    wanted = {"a": (0, 0, 1, 1), "b": (1, 1, 0, 0), "both": (0, 0, 0, 0)}[unseen]
    for grad, number in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, torch.full_like(grad, number), atol=1e-14, rtol=0)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
    assert all(g.isfinite().all() for g in second)


def test_merging_is_differentiable():
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    inputs = (leaf(2, 3, 2), leaf(2, 3), leaf(2, 3, 2), leaf(2, 3))
    assert torch.autograd.gradcheck(merge, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(merge, inputs, check_fwd_over_rev=True)


# ---- errors -------------------------------------------------------------------------------------------------------

Q = torch.randn(10, 4, 8)
S = torch.tensor([0, 3, 10])
C = torch.randn(2, 2, 16, 8)
N = torch.tensor([3, 5])
P = torch.tensor([[1], [0]])
T, K = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, r"query must have 3 dimensions, got shape \(1, 10, 4, 8\)",
         lambda: varlen(Q[None], Q, Q, S, S, 7, 7)),
        (TypeError, "key must have the query's dtype", lambda: varlen(Q, Q.double(), Q, S, S, 7, 7)),
        (ValueError, "key must have the query's head dimension 8", lambda: varlen(Q, Q[..., :7], Q, S, S, 7, 7)),
        (ValueError, r"value must have the key's 10 rows and 4 heads, got shape \(9, 4, 8\)",
         lambda: varlen(Q, Q, Q[:9], S, S, 7, 7)),
        (ValueError, "the 4 heads of query must be a multiple of the 3",
         lambda: varlen(Q, Q[:, :3], Q[:, :3], S, S, 7, 7)),
        (TypeError, "cu_seqlens_q must be a tensor, got list", lambda: varlen(Q, Q, Q, [0, 10], S, 7, 7)),
        (TypeError, "cu_seqlens_k must be int32 or int64, got torch.float32",
         lambda: varlen(Q, Q, Q, S, S.float(), 7, 7)),
        (ValueError, r"cu_seqlens_q must have one dimension and one element more.*got shape \(1, 3\)",
         lambda: varlen(Q, Q, Q, S[None], S, 7, 7)),
        (ValueError, "cu_seqlens_q must have one dimension and one element more.*got shape",
         lambda: varlen(Q, Q, Q, S[:0], S, 7, 7)),
        (ValueError, "cu_seqlens_q must be on the query's device", lambda: varlen(Q, Q, Q, S.to("meta"), S, 7, 7)),
        (ValueError, "cu_seqlens_q must start with 0, got 3", lambda: varlen(Q, Q, Q, S[1:], S[1:], 7, 7)),
        (ValueError, "cu_seqlens_k must not decrease, got 5 and then 4",
         lambda: varlen(Q, Q, Q, S, torch.tensor([0, 5, 4]), 7, 7)),
        (ValueError, "cu_seqlens_k must end at or before 10, the rows of key, got 11",
         lambda: varlen(Q, Q, Q, S, torch.tensor([0, 5, 11]), 7, 7)),
        (ValueError, "cu_seqlens_k must be as long as cu_seqlens_q, 3, got 2", lambda: varlen(Q, Q, Q, S, S[:2], 7, 7)),
        (ValueError, "max_seqlen_q must cover every sequence, got 6 and a sequence 1 of 7",
         lambda: varlen(Q, Q, Q, S, S, 6, 7)),
        (TypeError, "max_seqlen_k must be a whole number, got 7.0", lambda: varlen(Q, Q, Q, S, S, 7, 7.0)),
        (ValueError, "max_seqlen_k must not be negative, got -1", lambda: varlen(Q, Q, Q, S, S, 7, -1)),
        (ValueError, r"max_seqlen_q must be below 2\^62, got", lambda: varlen(Q, Q, Q, S, S, 2**64, 7)),
        (ValueError, r"attn_mask must broadcast to \(2, 4, 7, 7\)",
         lambda: varlen(Q, Q, Q, S, S, 7, 7, attn_mask=torch.ones(10, 10))),
        (ValueError, r"alibi_slopes must have shape \(4,\) or \(2, 4\)",
         lambda: varlen(Q, Q, Q, S, S, 7, 7, alibi_slopes=torch.ones(3, 4))),
        (ValueError, "causal_align must be", lambda: varlen(Q, Q, Q, S, S, 7, 7, causal_align="right")),
        (ValueError, "dropout_p must be a probability", lambda: varlen(Q, Q, Q, S, S, 7, 7, dropout_p=2)),
    ],
)  # fmt: skip
def test_errors_of_packed_sequences(error, words, call):
    with pytest.raises(error, match=f"^attention_varlen: {words}"):
        call()


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "query must be a tensor", lambda: decode(None, C, C, N)),
        (TypeError, "key_cache must be a tensor, got list", lambda: decode(T, [C], C, N)),
        (ValueError, r"value_cache must have 4 dimensions, got shape \(2, 16, 8\)", lambda: decode(T, C, C[0], N)),
        (TypeError, "key_cache must have the query's dtype torch.float64", lambda: decode(T.double(), C, C, N)),
        (ValueError, "key_cache must have the query's batch size 2", lambda: decode(T, C[:1], C, N)),
        (ValueError, "value_cache must have the key's 2 heads, got 1", lambda: decode(T, C, C[:, :1], N)),
        (ValueError, "the 3 heads of query must be a multiple of the 2 heads of key_cache",
         lambda: decode(T[:, :3], C, C, N)),
        (ValueError, "value_cache must have memory of its own for every row, got strides",
         lambda: decode(T, C, C[:1].expand(2, 2, 16, 8), N)),
        (ValueError, "value_cache must have the key_cache's 16 rows", lambda: decode(T, C, C[:, :, :15], N)),
        (TypeError, "cache_lengths must be int32 or int64, got torch.float32", lambda: decode(T, C, C, N.float())),
        (TypeError, "cache_lengths must be a tensor, got NoneType", lambda: decode(T, C, C, None)),
        (ValueError, r"cache_lengths must have shape \(2,\)", lambda: decode(T, C, C, N[:1])),
        (ValueError, "cache_lengths must leave room for 0 new tokens among 16, got 17 for sequence 0",
         lambda: decode(T, C, C, N + 14)),
        (ValueError, "cache_lengths must leave room.*got -1 for sequence 0", lambda: decode(T, C, C, N - 4)),
        (ValueError, "key and value must be given together", lambda: decode(T, C, C, N, key=K)),
        (TypeError, "value must be a tensor, got int", lambda: decode(T, C, C, N, key=K, value=1)),
        (ValueError, r"key must have shape \(2, 2, 1, 8\) to fit the cache, got \(2, 4, 1, 8\)",
         lambda: decode(T, C, C, N, key=T, value=K)),
        (TypeError, "value must have the query's dtype", lambda: decode(T, C, C, N, key=K, value=K.half())),
        (ValueError, "window must have numbers", lambda: decode(T, C, C, N, window=(-5, 0))),
        (NotImplementedError, "the cuda backend needs CUDA tensors.*host executor",
         lambda: on("cuda", lambda: decode(T, C, C, N))),
        (TypeError, "page_table must be a tensor or None, got list", lambda: decode(T, C, C, N, page_table=[[0]])),
        (TypeError, "page_table must be int32 or int64, got torch.float32",
         lambda: decode(T, C, C, N, page_table=torch.zeros(2, 1))),
        (ValueError, r"page_table must have shape \(2, pages\), got \(2,\)", lambda: decode(T, C, C, N, page_table=N)),
        (ValueError, "value_cache must have the key_cache's pages and heads",
         lambda: decode(T, C, C[:1], N, page_table=P)),
        (ValueError, "cache_lengths must leave room for 1 new tokens among 16, got 20 for sequence 1",
         lambda: decode(T, C, C, N * 4, key=K, value=K, page_table=P)),
        (ValueError, "page_table must name pages from 0 to 1, got -1 for sequence 1 of 6 tokens",
         lambda: decode(T, C, C, N, key=K, value=K, page_table=P - P.flip(0))),
        (ValueError, "page_table must name pages from 0 to 1, got 2 for sequence 0", lambda: decode(
            T, C, C, N, page_table=P + 1)),
    ],
)  # fmt: skip
def test_errors_of_decoding(error, words, call):
    with pytest.raises(error, match=f"^attention_decode: {words}"):
        call()


def on(backend, call):
    with seqkern.use_backend(backend):
        return call()


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "query must have 4 dimensions", lambda: weights(Q, C)),
        (ValueError, "key must have the query's batch size 2", lambda: weights(T, C[:1])),
        (TypeError, "queries must be an int64 tensor or None, got list", lambda: weights(T, C, [0])),
        (TypeError, "queries must be an int64 tensor or None, got torch.int32", lambda: weights(T, C, N.int())),
        (ValueError, r"queries must have one dimension, got shape \(1, 2\)", lambda: weights(T, C, N[None])),
        (ValueError, "queries must be from 0 to 0, got 5", lambda: weights(T, C, N)),
        (ValueError, "queries must be from 0 to 0, got -2", lambda: weights(T, C, N - 5)),
        (ValueError, "queries must be on the query's device", lambda: weights(T, C, N.to("meta"))),
        (ValueError, "causal_align must be", lambda: weights(T, C, causal_align="left")),
    ],
)  # fmt: skip
def test_errors_of_weights(error, words, call):
    with pytest.raises(error, match=f"^attention_weights: {words}"):
        call()


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "lse_a must be a tensor, got NoneType", lambda: merge(T, None, T, T[..., 0])),
        (TypeError, "out_a must be of floating point, got torch.int64",
         lambda: merge(T.long(), T[..., 0], T, T[..., 0])),
        (TypeError, "out_b must have the dtype of out_a, torch.float32, got torch.float64",
         lambda: merge(T, T[..., 0], T.double(), T[..., 0])),
        (ValueError, r"lse_b must have shape \(2, 4, 1\), as out_a asks, got \(2, 4, 1, 8\)",
         lambda: merge(T, T[..., 0], T, T)),
        (ValueError, r"out_b must have shape \(2, 4, 1, 8\)", lambda: merge(T, T[..., 0], K, T[..., 0])),
        (ValueError, "out_a must have at least 1 dimension", lambda: merge(T.sum(), T.sum(), T.sum(), T.sum())),
        (ValueError, "lse_b must be on the device of out_a, cpu, got meta",
         lambda: merge(T, T[..., 0], T, T[..., 0].to("meta"))),
    ],
)  # fmt: skip
def test_errors_of_merging(error, words, call):
    with pytest.raises(error, match=f"^merge_attention: {words}"):
        call()
