"""Masks as others hand them over: matrices that say what an option would say, and any other, cell by cell.

The kernels look at cells of 32 queries by 32 keys (csrc/attention/mask_cells.cpp). The lengths here give whole and
partial ones, and tiles of every kind.
"""

from __future__ import annotations

import math

import pytest
import torch

import seqkern
from seqkern.testing import Case, check_case, compare, poison

QUERIES, KEYS = 333, 301
B, H = 2, 4


def positions():
    return torch.arange(QUERIES)[:, None] + (KEYS - QUERIES), torch.arange(KEYS)[None]


def pattern(name: str) -> torch.Tensor:
    """(B, 1, QUERIES, KEYS), True where a query sees a key."""
    q, k = positions()
    lengths = torch.tensor([KEYS, 70])[:, None, None, None]
    causal = (q >= k)[None, None]
    generator = torch.Generator().manual_seed(3)
    cells = torch.rand(B, 1, -(-QUERIES // 32), -(-KEYS // 32), generator=generator)
    blocks = (cells > 0.5).repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :QUERIES, :KEYS]
    found = {
        "causal": causal,
        "window": causal & (q - k <= 40)[None, None],
        "padded": k[None, None] < lengths,
        "padded on the left": causal & (k[None, None] >= KEYS - lengths),
        "padded on the left alone": k[None, None] >= KEYS - lengths,
        "blocks": blocks,
        "random": torch.rand(B, 1, QUERIES, KEYS, generator=generator) > 0.3,
        "rare": torch.rand(B, 1, QUERIES, KEYS, generator=generator) > 0.99,
        "all": torch.ones(1, 1, 1, 1, dtype=torch.bool),
        "none": torch.zeros(1, 1, 1, 1, dtype=torch.bool),
        "one hole": torch.ones(B, 1, QUERIES, KEYS, dtype=torch.bool).index_put(
            tuple(torch.tensor([n]) for n in (0, 0, 200, 100)), torch.tensor(False)
        ),
    }[name]
    return found.expand(B, 1, QUERIES, KEYS).contiguous()


PATTERNS = [
    "causal", "window", "padded", "padded on the left", "padded on the left alone", "blocks", "random", "rare", "all",
    "none", "one hole",
]  # fmt: skip


def inputs(dtype, dim=32, heads=H, kv_heads=2, generator=None):
    generator = generator or torch.Generator().manual_seed(7)
    shapes = ((B, heads, QUERIES, dim), (B, kv_heads, KEYS, dim), (B, kv_heads, KEYS, dim))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def results(function, tensors, dtype, grad):
    """Output and gradients, of the tensors that can have them."""
    leaves = [t.detach().to(t.dtype if t.dtype == torch.bool else dtype) for t in tensors]
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in leaves]
    out = function(*leaves)
    found = torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad.to(dtype))
    return [out.detach(), *found]


def of_torch(q, k, v, mask, **options):
    """By torch's operations, with zeros where torch has NaN."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
        alive = mask.any(-1, keepdim=True)
    else:
        scores = scores + mask
        alive = (scores > -math.inf).any(-1, keepdim=True)
    return torch.where(alive, scores, 0.0).softmax(-1).masked_fill(~alive, 0.0) @ v


def case_of(mask, heads=1, noise=None):
    """Attention under a boolean mask; or, with a number for `noise`, under its float form, with a gradient."""

    def make(g):
        names = zip(("query", "key", "value"), inputs(torch.float64, generator=g), strict=True)
        if noise is None:
            return dict(names)
        values = noise * torch.randn((B, heads, QUERIES, KEYS), generator=g, dtype=torch.float64)
        return dict(names) | {"added": values.masked_fill(~mask, -math.inf)}

    def ours(query, key, value, added=None):
        return seqkern.attention(query, key, value, attn_mask=mask if added is None else added)

    def exact(query, key, value, added=None):
        return reference_of(query, key, value, mask if added is None else added)

    def theirs(query, key, value, added=None):
        return of_torch(query, key, value, mask if added is None else added)

    return Case(inputs=make, ours=ours, torch=theirs, reference=exact)


def reference_of(q, k, v, mask):
    with seqkern.use_backend("reference"):
        return seqkern.attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_boolean_patterns(name, dtype, isa, passes):
    passes(check_case(case_of(pattern(name)), dtype))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float_patterns(name, dtype, isa, passes):
    """0 and -inf, and noise where a query sees a key; with their gradient, shared by heads and not."""
    if dtype == torch.float32 and name in ("rare", "padded on the left"):
        pytest.skip("rows of a few keys: delta comes from the rounded output, up to 1.8 times torch's error")
    for heads, noise in ((1, 0.0), (1, 1.0), (H, 0.0)):
        passes(check_case(case_of(pattern(name), heads, noise), dtype))


@pytest.mark.parametrize("name", ["causal", "blocks", "padded on the left", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_same_mask_in_other_places(name, dtype, isa):
    tensors = inputs(dtype)
    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(mask):
        with poison():
            return results(lambda *t: seqkern.attention(*t[:3], attn_mask=t[3]), (*tensors, mask), dtype, grad)

    found = run(pattern(name))
    assert all(t.isfinite().all() for t in found)
    one = pattern(name)[:1]
    for mask, expected in (
        (pattern(name).expand(B, H, QUERIES, KEYS), found),
        (pattern(name).expand(B, H, QUERIES, KEYS).contiguous(), found),
        (torch.nn.functional.pad(pattern(name), (3, 5, 1, 0))[:, :, 1:, 3:-5], found),
        (torch.nn.functional.pad(pattern(name), (0, 40), value=True)[..., :KEYS], found),
        (pattern(name).transpose(2, 3).contiguous().transpose(2, 3), found),
        (one[0, 0], run(one.expand(B, H, QUERIES, KEYS).contiguous())),
    ):
        assert all(map(torch.equal, run(mask), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_options_beside(dtype, isa):
    """Against the same with the mask as numbers, which no path takes for a boolean one."""
    q, k, v = inputs(dtype)
    for name in ("causal", "window", "blocks", "padded on the left alone"):
        seen = pattern(name)
        numbers = torch.zeros(seen.shape, dtype=torch.float32).masked_fill(~seen, -math.inf)
        for options in (
            {"softcap": 3.0}, {"alibi_slopes": torch.rand(H)}, {"dropout_p": 0.3}, {"window": (60, 20)},
            {"causal": True}, {"key_lengths": torch.tensor([KEYS, 150])}, {"sinks": torch.randn(H)}, {"scale": 0.0},
            {"scale": -0.5},
        ):  # fmt: skip
            with poison():
                a, b = (drawn(q, k, v, attn_mask=m, return_lse=True, **options) for m in (seen, numbers))
            with seqkern.use_backend("reference"):
                exact = drawn(*(t.double() for t in (q, k, v)), attn_mask=seen, **wide(options))
            for found in (a, b):
                report = compare(found[0], b[0] if found is a else a[0], exact)
                assert report.passed, (name, options, str(report))
            torch.testing.assert_close(a[1], b[1], atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=1e-3)


def drawn(*tensors, **options):
    torch.manual_seed(5)  # of the dropout's mask
    return seqkern.attention(*tensors, **options)


def wide(options):
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in options.items()}


BANDS = {  # a mask, and what says the same
    "causal": {"causal": True, "causal_align": "lower_right"},
    "window": {"window": (40, 0), "causal_align": "lower_right"},
    "padded": {"key_lengths": torch.tensor([KEYS, 70])},
    "all": {},
    "none": {"key_lengths": torch.tensor([0, 0])},
}


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_mask_that_is_a_band_is_the_option(name, dtype, isa):
    """The same bits of the output and the gradients, and beside other options."""
    q, k, v = inputs(dtype)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    slopes = torch.rand(H, dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    def run(**given):
        with poison():
            return results(lambda *t: seqkern.attention(*t, **given), (q, k, v), dtype, grad)

    align = BANDS[name].get("causal_align", "upper_left")
    for beside in ({}, {"softcap": 3.0}, {"alibi_slopes": slopes, "causal_align": align}):
        assert all(map(torch.equal, run(attn_mask=pattern(name), **beside), run(**(BANDS[name] | beside))))


def test_a_sample_whose_mask_is_a_band_does_not_depend_on_others(isa):
    q, k, v = inputs(torch.float32)
    mask = torch.cat([pattern("causal")[:1], pattern("random")[1:]])
    together = seqkern.attention(q, k, v, attn_mask=mask)
    for sample in range(B):
        one = slice(sample, sample + 1)
        assert torch.equal(seqkern.attention(q[one], k[one], v[one], attn_mask=mask[one]), together[one])


def nearly_a_band(g: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """A band with random edges and a random length; in half of the cases with one element turned, mostly at an edge."""

    def one(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    lower, upper = one(-rows - 5, columns), one(-rows, columns + 5)
    q, k = torch.arange(rows)[:, None], torch.arange(columns)
    seen = (k >= q + lower) & (k <= q + upper) & (k < one(0, columns + 20))
    if one(0, 2):
        row = one(0, rows)
        edges = (0, columns - 1, row + lower, row + lower - 1, row + upper, row + upper + 1, one(0, columns))
        column = min(max(edges[one(0, len(edges))], 0), columns - 1)
        seen[row, column] ^= True
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_bands_and_what_is_nearly_one(seed):
    """Exact in float64: one element that is not the band's changes the result, and no other is changed."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = (int(torch.randint(33, 200, (1,), generator=g)) for _ in range(2))
    q, k, v = (torch.randn(2, 2, n, 8, generator=g, dtype=torch.float64) for n in (rows, columns, columns))
    heads = 1 + seed % 2
    mask = torch.stack([nearly_a_band(g, rows, columns) for _ in range(2 * heads)]).view(2, heads, rows, columns)
    options = ({}, {"causal": True}, {"window": (50, 30)}, {"key_lengths": torch.tensor([columns, 40])})[seed // 2 % 4]

    def run():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = seqkern.attention(*leaves, attn_mask=mask, **options)
        return [out, *torch.autograd.grad(out, leaves, torch.cos(out.detach() * 7))]

    with poison():
        found = run()
    with seqkern.use_backend("reference"):
        exact = run()
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seen", [0, 1, 2])
def test_bad_numbers_behind_a_mask(seen, dtype, isa):
    """A hidden key may be anything; a visible one makes its queries NaN and no others."""
    q, k, v = inputs(dtype)
    mask = pattern("padded" if seen < 2 else "random")
    good = seqkern.attention(q, k, v, attn_mask=mask)
    k, v = k.clone(), v.clone()
    hidden = ~mask.any(2).any(1).expand(B, KEYS)  # from everybody
    rows = hidden if seen != 1 else ~hidden & (torch.arange(KEYS) == 40)
    k.masked_fill_(rows[:, None, :, None], math.nan if seen else math.inf)
    bad = seqkern.attention(q, k, v, attn_mask=mask)
    if seen == 1:
        assert bad.isnan().all(-1).any()
    else:
        whole = (mask[1, 0].sum(-1) > 0) & (torch.arange(QUERIES) >= 0)
        assert torch.equal(bad[0], good[0])
        assert whole.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_on_any_number_of_threads(dtype, isa):
    q, k, v = inputs(dtype)
    before, found = torch.get_num_threads(), []
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results(lambda *t: seqkern.attention(*t, attn_mask=pattern("blocks")), (q, k, v), dtype, grad))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))


SHARED = {
    "plain": {},
    "softcap and dropout": {"softcap": 4.0, "dropout_p": 0.2},
    "causal": {"causal": True},
    "lengths": {"key_lengths": torch.tensor([KEYS, 70])},
    "no keys": {"key_lengths": torch.tensor([0, KEYS])},
    "boolean mask": {"attn_mask": pattern("one hole")[1:].tril()},
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_gradient_of_a_bias_that_sequences_share(name, dtype, isa):
    """On few threads a worker sums a block of the bias over the sequences as it goes, on many a second pass does: the
    same bits."""
    q, k, v = inputs(dtype)
    bias = torch.randn(1, H, QUERIES, KEYS, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(bias):
        leaves = [t.detach().requires_grad_() for t in (q, k, v, bias)]
        torch.manual_seed(0)
        with poison():
            out = seqkern.attention(*leaves[:3], bias=leaves[3], **SHARED[name])
            return out.detach(), *torch.autograd.grad(out, leaves, grad)

    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 64):
            torch.set_num_threads(threads)
            found.append(run(bias))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    # What each sequence gives, unrounded: a bias of its own, whose gradient the error rule is asked of above.
    wide = bias.to(torch.promote_types(dtype, torch.float32))
    apart = run(wide.expand(B, -1, -1, -1).contiguous())
    assert all(map(torch.equal, found[0][:4], apart[:4]))
    assert apart[4].any()
    assert torch.equal(found[0][4], apart[4].sum(0, keepdim=True).to(dtype))


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_bias_that_is_a_view(order, dtype, isa):
    """T5's lies (queries, keys, heads) in memory: its values and its gradient are those of a contiguous one."""
    q, k, v = inputs(dtype)
    sizes = (H, QUERIES, KEYS)
    stored = [0, 0, 0]
    for place, at in enumerate(order):
        stored[at] = sizes[place]
    bias = torch.randn(stored, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def attend(q, k, v, bias):
        return seqkern.attention(q, k, v, attn_mask=bias)

    view = bias.permute(order)[None]
    assert view.shape[1:] == sizes
    a = results(attend, (q, k, v, view), dtype, grad)
    b = results(attend, (q, k, v, view.contiguous()), dtype, grad)
    assert all(map(torch.equal, a, b))


def test_the_reference_agrees_with_itself():
    """The oracle of this file against the formula that the kernels' documentation gives."""
    q, k, v = inputs(torch.float64)
    mask = pattern("padded on the left")
    with seqkern.use_backend("reference"):
        found = seqkern.attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(found, of_torch(q, k, v, mask))


# ---- a bias beside a mask -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, H, QUERIES, KEYS), (H, QUERIES, KEYS), (B, H, 1, KEYS)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_beside_a_boolean_mask(shape, dtype, passes):
    mask = pattern("blocks")
    row = pattern("padded")[:, :, :1]

    def case(given):
        def make(g):
            names = zip(("query", "key", "value"), inputs(torch.float64, generator=g), strict=True)
            return dict(names) | {"bias": torch.randn(shape, generator=g, dtype=torch.float64)}

        def added(bias):
            return bias.expand(B, H, QUERIES, KEYS).masked_fill(~given, -math.inf)

        return Case(
            inputs=make,
            ours=lambda query, key, value, bias: seqkern.attention(query, key, value, attn_mask=given, bias=bias),
            torch=lambda query, key, value, bias: of_torch(query, key, value, added(bias)),
            reference=lambda query, key, value, bias: reference_of(query, key, value, added(bias)),
        )

    for given in (mask, row):
        passes(check_case(case(given), dtype))


def test_a_bias_alone_and_beside_numbers():
    q, k, v = inputs(torch.float32)
    bias = torch.randn(1, H, QUERIES, KEYS)
    assert torch.equal(seqkern.attention(q, k, v, bias=bias), seqkern.attention(q, k, v, attn_mask=bias))
    row = torch.randn(B, 1, 1, KEYS)
    together = seqkern.attention(q, k, v, attn_mask=bias + row)
    assert torch.equal(seqkern.attention(q, k, v, attn_mask=row, bias=bias), together)
    short = seqkern.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), attn_mask=row.bfloat16(), bias=bias.bfloat16())
    assert short.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("error", "words", "bias"),
    [
        (TypeError, "bias must be .*float32 or the query's dtype torch.float32", torch.ones(1, 1, 1, 1).bool()),
        (TypeError, "bias must be", 3.0),
        (ValueError, r"bias must broadcast to \(2, 4, 333, 301\), got shape \(3, 301\)", torch.ones(3, KEYS)),
    ],
)
def test_errors_name_the_bias(error, words, bias):
    with pytest.raises(error, match=f"attention: {words}"):
        seqkern.attention(*inputs(torch.float32), attn_mask=pattern("causal"), bias=bias)
