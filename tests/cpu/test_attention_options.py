"""Attention's options, alone and together: masks, lengths, windows, slopes, softcap, sinks and dropout."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import seqkern
from seqkern import reference
from seqkern.ops import _attention_autograd
from seqkern.testing import attention_case, check_case, compare
from seqkern.testing.option_sets import ATTENTION_OPTIONS as CASES

sdpa, attention = seqkern.scaled_dot_product_attention, seqkern.attention


def qkv(queries=5, keys=None, *, batch=2, heads=4, kv_heads=None, head_dim=8, value_dim=None, **options):
    keys, kv_heads, value_dim = keys or queries, kv_heads or heads, value_dim or head_dim
    return [
        torch.randn(batch, heads, queries, head_dim, **options),
        torch.randn(batch, kv_heads, keys, head_dim, **options),
        torch.randn(batch, kv_heads, keys, value_dim, **options),
    ]


def everything(inputs, grad=None, seed=0, **options):
    """Output, log-sum-exp and the gradients of the inputs and of the options that are floating-point tensors."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    wanted = {n: t for n, t in options.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    tensors = {name: t.detach().requires_grad_() for name, t in wanted.items()}
    torch.manual_seed(seed)
    out, lse = attention(*leaves, return_lse=True, **(options | tensors))
    cotangents = (torch.cos(out.detach()) if grad is None else grad, torch.ones_like(lse))
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), [*leaves, *tensors.values()], cotangents)]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def all_options(queries=150, keys=130, batch=3, heads=4, dtype=torch.float32):
    """Every option at once, for `everything`."""
    mask = torch.randn(batch, heads, queries, keys, dtype=dtype)
    return {
        "causal": True,
        "attn_mask": mask.masked_fill(torch.rand_like(mask) < 0.2, -math.inf),
        "key_lengths": torch.randint(keys // 2, keys + 1, (batch,)),
        "window": (100, None),
        "alibi_slopes": torch.rand(batch, heads, dtype=dtype) / 16,
        "softcap": 5.0,
        "sinks": torch.randn(heads, dtype=dtype),
        "dropout_p": 0.2,
    }


# ---- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_error_rule(case, dtype, isa, passes):
    passes(check_case(attention_case(**({"queries": 130, "head_dim": 24} | case)), dtype))


# The lengths in FlashAttention-3's tests.
LENGTHS = [
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
]  # fmt: skip
LONG = [pytest.param(n, n, marks=pytest.mark.slow) for n in (4096, 4224)]


@pytest.mark.parametrize(
    "options", [{}, {"window": (100, 64), "causal": False, "softcap": 10.0}], ids=["causal", "local"]
)
@pytest.mark.parametrize(("queries", "keys"), LENGTHS + LONG)
def test_lengths(queries, keys, options, passes):
    # Of a single key torch's weights and its gradients of scores are exact: float32 has no error to compare with.
    dtype = torch.bfloat16 if options or keys == 1 else torch.float32
    passes(check_case(attention_case(queries, keys, heads=1, **options), dtype))


@st.composite
def cases(draw):
    batch, group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads, queries, keys = group * kv_heads, draw(st.integers(1, 140)), draw(st.integers(1, 140))
    side = st.one_of(st.none(), st.integers(-1, 150))
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "queries": queries,
        "keys": keys,
        "head_dim": draw(st.integers(1, 40)),
        "value_dim": draw(st.integers(1, 40)),
        "causal": draw(st.booleans()),
        "causal_align": draw(st.sampled_from(["lower_right", "upper_left"])),
        "mask": draw(st.sampled_from([None, "bool", "added"])),
        "mask_shape": [draw(st.sampled_from([1, n])) for n in (batch, heads, queries, keys)],
        "lengths": draw(st.one_of(st.none(), st.lists(st.integers(-1, 150), min_size=batch, max_size=batch))),
        "window": draw(st.one_of(st.none(), st.tuples(side, side))),
        "slopes": draw(st.sampled_from([None, "shared", "own"])),
        "softcap": draw(st.sampled_from([None, 0.7, 20.0])),
        "sinks": draw(st.booleans()),
        "dropout_p": draw(st.sampled_from([0.0, 0.3])),
        "scale": draw(st.sampled_from([None, 0.2])),
    }


@given(case=cases(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_combination(case, dtype):
    for report in check_case(attention_case(**case), dtype):
        # Of a few numbers torch may have no error at all by luck.
        assert report.error <= 3 * report.bound, str(report)


# ---- scaled_dot_product_attention ---------------------------------------------------------------------------------


@given(
    data=st.data(),
    rank=st.integers(0, 3),
    queries=st.integers(1, 70),
    keys=st.integers(1, 70),
    is_causal=st.booleans(),
    kind=st.sampled_from(["bool", "float32", "own"]),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_mask_means_what_torch_means(data, rank, queries, keys, is_causal, kind):
    """Any mask that broadcasts, and its gradient; with is_causal, which torch takes on the CPU, both hide."""
    leading = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    inputs = [torch.randn(*leading, n, 4, dtype=torch.float64, requires_grad=True) for n in (queries, keys, keys)]
    sizes = [*leading, queries, keys][data.draw(st.integers(0, rank + 2)) :]
    sizes = [data.draw(st.sampled_from([1, n])) for n in sizes]
    mask = torch.rand(sizes) < 0.7
    if kind != "bool":
        mask = torch.randn(sizes, dtype=torch.float32 if kind == "float32" else torch.float64)
        mask = mask.masked_fill_(torch.rand(sizes) < 0.2, -math.inf).requires_grad_()
    leaves = inputs if kind == "bool" else [*inputs, mask]
    ours = sdpa(*inputs, mask, is_causal=is_causal)
    visible = torch.ones(queries, keys, dtype=torch.bool).tril() if is_causal else torch.ones((), dtype=torch.bool)
    both = mask & visible if kind == "bool" else mask.double().masked_fill(~visible, -math.inf)
    # A query that sees nothing: 0 for us and for torch's fused kernel, but NaN in some of torch's derivatives.
    seen = (both if kind == "bool" else both > -math.inf).expand(*leading, queries, keys).any(-1, keepdim=True)
    both = torch.where(seen, both, torch.ones((), dtype=both.dtype))
    theirs = torch.where(seen, F.scaled_dot_product_attention(*inputs, both), 0)
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (ours, theirs)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_mask_for_half_precision(dtype, isa):
    """Not rounded to the query's dtype; its gradient is float32."""
    inputs, mask = qkv(70, 130, dtype=dtype), torch.randn(4, 70, 130) + 1000  # which bfloat16 and float16 would lose
    out, _, _, _, _, grad = everything(inputs, attn_mask=mask)
    expected = reference.attention(*(t.double() for t in inputs), mask[None].double())[0]
    assert grad.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=0.01, rtol=0.01)
    assert grad.count_nonzero() > grad.numel() / 2


def test_autocast_takes_masks():
    inputs, mask = qkv(), torch.randn(5, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        for m in (mask, mask > 0, mask.half(), mask.bfloat16()):
            out = sdpa(*inputs, m)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, F.scaled_dot_product_attention(*inputs, m), atol=0.02, rtol=0.02)
        seqkern.attention(*inputs, attn_mask=mask, alibi_slopes=torch.ones(4), sinks=torch.ones(4)).sum().backward()
    assert mask.grad is not None
    assert mask.grad.dtype == torch.float32


# ---- each option --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [-3, 0, 1, 63, 64, 65, 130, 200])
def test_what_is_beyond_the_length_is_never_read(length, causal, isa):
    query, key, value = qkv(70, 130, kv_heads=2)
    count = min(max(length, 0), 130)
    clean = [query, key.clone(), value.clone()]
    key[:, :, count:], value[:, :, count:] = math.nan, math.nan
    lengths = torch.tensor([length, length], dtype=torch.int32)
    ours = everything([query, key, value], causal=causal, causal_align="upper_left", key_lengths=lengths)
    short = [query, clean[1][:, :, :count], clean[2][:, :, :count]]
    out, lse, grad_query, grad_key, grad_value = everything(short, causal=causal, causal_align="upper_left")
    beyond = torch.zeros(2, 2, 130 - count, 8)
    assert equal(ours, [out, lse, grad_query, *(torch.cat([g, beyond], 2) for g in (grad_key, grad_value))])


def test_the_diagonal_comes_from_the_shapes():
    query, key, value = qkv(3, 10)
    ours = attention(query, key, value, causal=True, key_lengths=torch.tensor([8, 9]))
    hidden = torch.arange(10) < torch.tensor([8, 9])[:, None, None, None]
    torch.testing.assert_close(ours, attention(query, key, value, causal=True, attn_mask=hidden))


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (0, 70), (3, None), (-1, 2), (64, 64), (2**62, 2**70)])
@pytest.mark.parametrize(("queries", "keys"), [(70, 200), (200, 70)])
@pytest.mark.parametrize("align", ["lower_right", "upper_left"])
def test_window(window, queries, keys, align, isa):
    inputs = qkv(queries, keys, dtype=torch.float64)
    diagonal = keys - queries if align == "lower_right" else 0
    distance = torch.arange(queries)[:, None] + diagonal - torch.arange(keys)
    left, right = (math.inf if side in (None, -1) else float(side) for side in window)
    mask = (distance <= left) & (-distance <= right)
    ours = everything(inputs, window=window, causal_align=align)
    torch.testing.assert_close(ours, everything(inputs, attn_mask=mask))
    causal = everything(inputs, window=window, causal=True, causal_align=align)
    torch.testing.assert_close(causal, everything(inputs, attn_mask=mask & (distance >= 0)))


@pytest.mark.parametrize("causal", [False, True])
def test_slopes_are_a_mask(causal, isa):
    inputs, slopes = qkv(70, 100, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    distance = (torch.arange(70)[:, None] + 30 - torch.arange(100)).abs()
    *ours, grad = everything(inputs, alibi_slopes=slopes, causal=causal)
    *theirs, grad_mask = everything(inputs, attn_mask=-slopes[..., None, None] * distance, causal=causal)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(grad, (-grad_mask * distance).sum((2, 3)))
    torch.testing.assert_close(everything(inputs, alibi_slopes=slopes[0])[-1], everything(
        inputs, alibi_slopes=slopes[:1].expand(2, 4))[-1].sum(0))  # fmt: skip


@pytest.mark.parametrize("softcap", [0.5, 1e6])
def test_softcap_bounds_the_scores(softcap, isa):
    query, key, value = qkv(70, dtype=torch.float64)
    capped = attention(30 * query, key, value, softcap=softcap, return_lse=True)
    torch.testing.assert_close(capped, reference.attention(30 * query, key, value, softcap=softcap))
    assert equal(
        attention(query, key, value, softcap=0.0, return_lse=True), attention(query, key, value, return_lse=True)
    )
    scores = 30 * query @ key.mT / math.sqrt(8)
    if softcap < 1:
        assert (capped[1] - math.log(70)).abs().max() <= softcap < scores.abs().max()


def test_a_sink_is_a_key_without_a_value(isa):
    query, key, value = qkv(70, 100, kv_heads=2, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64)
    *ours, grad_sinks = everything([query, key, value], sinks=sinks)
    mask = torch.zeros(2, 4, 70, 101, dtype=torch.float64)
    mask[..., 100] = sinks[:, None]
    nothing = torch.zeros(2, 2, 1, 8, dtype=torch.float64)
    inputs = [query, torch.cat([key, nothing], 2), torch.cat([value, nothing], 2)]
    *theirs, grad_mask = everything(inputs, attn_mask=mask)
    theirs[3], theirs[4] = theirs[3][:, :, :100], theirs[4][:, :, :100]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(grad_sinks, grad_mask[..., 100].sum((0, 2)))
    assert equal(
        everything([query, key, value], sinks=torch.full((4,), -math.inf))[:5], everything([query, key, value])
    )


def test_dropout_follows_from_the_seed(isa, dtype):
    inputs = qkv(70, 100, kv_heads=2, dtype=dtype)
    torch.manual_seed(5)
    seed = torch.randint(-(2**63), 2**63 - 1, ())
    expected, lse = reference.attention(*inputs, seed=seed, dropout_p=0.4)
    ours, again, other = (everything(inputs, dropout_p=0.4, seed=s) for s in (5, 5, 6))
    assert equal(ours, again)
    assert not torch.equal(ours[0], other[0])
    tolerance = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close((ours[0], ours[1]), (expected, lse), atol=tolerance, rtol=tolerance)
    torch.manual_seed(5)
    assert torch.equal(ours[0], sdpa(*inputs, dropout_p=0.4, enable_gqa=True))


def test_dropout_rate():
    query, key = torch.zeros(4, 8, 256, 4), torch.zeros(4, 8, 256, 4)
    value = torch.eye(256).expand(4, 8, 256, 256)
    weights = attention(query, key, value, dropout_p=0.3) * 256
    assert set(weights.unique().tolist()) <= {0.0, weights.max().item()}
    assert weights.max().item() == pytest.approx(1 / 0.7)
    kept = (weights > 0).float()
    assert kept.mean().item() == pytest.approx(0.7, abs=0.002)
    for dims in ((0, 1, 2), (0, 1, 3), (2, 3)):  # no row, column or head has more than the others
        assert (kept.mean(dims) - 0.7).abs().max() < 6 * math.sqrt(0.21 / (kept.numel() / kept.mean(dims).numel()))


@pytest.mark.parametrize("p", [1.0, 1 - 1e-9])
def test_everything_dropped(p, isa):
    inputs = qkv(70)
    out, lse, *grads = everything(inputs, dropout_p=p)
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, everything(inputs)[1])
    assert all(g.isfinite().all() for g in grads)


def test_no_dropout_draws_nothing():
    state = torch.get_rng_state()
    attention(*qkv_without_random(), dropout_p=0.0)
    assert torch.equal(state, torch.get_rng_state())


def qkv_without_random():
    return [torch.ones(1, 1, 3, 4)] * 3


# ---- rows that see nothing, and tails -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_rows_that_a_mask_hides(kind, isa, dtype):
    inputs = qkv(150, 130, kv_heads=2, dtype=dtype)
    visible = torch.rand(2, 4, 150, 130) < 0.9
    visible[:, :, 40:90] = False  # whole tiles, and parts of them
    visible[:, :, 149] = False
    mask = visible if kind == "bool" else torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -math.inf)
    out, lse, *grads = everything(inputs, attn_mask=mask, alibi_slopes=torch.rand(4))
    hidden = ~visible.any(-1)
    for t in (out, grads[0], *grads[3:-1]):
        assert not t[hidden].count_nonzero()  # NaN counts as nonzero
    assert (lse[hidden] == -math.inf).all()
    assert all(t.isfinite().all() for t in (out, lse[~hidden], *grads))
    *_, grad_sinks = everything(inputs, attn_mask=mask, sinks=torch.zeros(4))
    assert grad_sinks.isfinite().all()
    _, lse, *_ = everything(inputs, attn_mask=torch.zeros(1, dtype=torch.bool), sinks=torch.arange(4.0))
    assert torch.equal(lse, torch.arange(4.0).to(lse.dtype)[:, None].expand(2, 4, 150))


@pytest.mark.parametrize("value", [torch.finfo(torch.bfloat16).min, -1e30, -1e10, 1e10])
def test_a_row_of_one_huge_number_weighs_all_keys_alike(value, isa, dtype):
    """Masks of the smallest number hide nothing in a row that has nothing else: as torch, the mean of the values."""
    value = max(value, torch.finfo(dtype).min)
    inputs = qkv(40, 70, dtype=dtype)
    mask = torch.zeros(40, 70).to(dtype).float() if dtype != torch.float64 else torch.zeros(40, 70, dtype=dtype)
    mask[3] = value
    out, lse, *grads = everything(inputs, attn_mask=mask)
    # In float32, where the scores vanish beside the number, as everywhere: float64 would still see them.
    expected, _ = reference.attention(*(t.to(mask.dtype) for t in inputs), attn_mask=mask)
    assert (out.to(mask.dtype) - expected).abs().max() <= 8 * torch.finfo(dtype).eps * inputs[2].abs().max()
    assert all(t.isfinite().all() for t in (lse, *grads))


def test_huge_scores_keep_their_weights_in_the_backward_pass(isa):
    """Query i has a score of 1.3e5 with key i, which has all the weight: the gradient of its value is exactly 1."""
    query, key = torch.zeros(1, 1, 40, 32), torch.full((1, 1, 40, 32), -1.0)
    query[0, 0, :32], key[0, 0, :32] = torch.eye(32) * 1.37e5, torch.eye(32)
    for dtype in (torch.bfloat16, torch.float32):
        value = torch.randn(1, 1, 40, 32, dtype=dtype, requires_grad=True)
        out = seqkern.attention(query.to(dtype), key.to(dtype), value, scale=0.93)
        (grad,) = torch.autograd.grad(out[:, :, :32].sum(), value)
        assert torch.equal(grad[:, :, :32], torch.ones_like(grad[:, :, :32]))


def test_one_key_leaves_no_gradient_whatever_is_dropped(isa, dtype):
    query, key, value = qkv(40, 1, dtype=dtype)
    query.requires_grad_()
    out = seqkern.attention(query, key, value, dropout_p=0.5)
    kept = out.ne(0).any(-1)
    torch.testing.assert_close(out[kept], (2 * value.expand_as(out))[kept], rtol=torch.finfo(dtype).eps, atol=0)
    (grad,) = torch.autograd.grad(out, query, torch.randn_like(out))
    assert grad.abs().max() <= 32 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def test_keys_that_no_query_sees_do_not_reach_the_gradients(isa, dtype):
    query, key, value = qkv(20, 40, dtype=dtype)
    key[:, :, 20:] = math.nan
    *_, grad_query, _, _ = everything([query, key, value], causal=True, causal_align="upper_left")
    assert grad_query.isfinite().all()


@pytest.mark.parametrize("low", [-95.0, -1e4])
@pytest.mark.parametrize("keys", [64, 192, 200])
def test_tails_of_rows_with_low_scores(low, keys, isa, dtype):
    """Where exp(0 - lse) overflows: columns that pad the last tile must have no weight (cuDNN 9 gave NaN)."""
    query, key, value = qkv(130, keys, head_dim=4, dtype=dtype)
    query[..., 0], key[..., 0] = 1, low
    query[..., 1:] /= 8
    inputs = [query, key, value]
    ours = everything(inputs, scale=1.0)
    assert all(t.isfinite().all() for t in ours)
    assert (ours[1] < -88.8).all()
    theirs = reference.attention(*(t.double() for t in inputs), scale=1.0)
    # A last place of a score of 1e4 in float32 is 1e-3.
    tolerance = {torch.float64: 1e-9, torch.float32: 5e-3}.get(dtype, 0.02)
    torch.testing.assert_close(ours[0].double(), theirs[0], atol=tolerance, rtol=tolerance)
    out, _, *grads = everything(inputs, scale=1.0, causal=True, window=(20, None))
    assert all(t.isfinite().all() for t in (out, *grads))


# ---- layouts ------------------------------------------------------------------------------------------------------

MASKS = {
    "contiguous": lambda: torch.randn(2, 4, 150, 70),
    "one for all": lambda: torch.randn(150, 70),
    "a row for all": lambda: torch.randn(2, 1, 1, 70).expand(2, 4, 150, 70),
    "a column for all": lambda: torch.randn(4, 150, 1),
    "transposed": lambda: torch.randn(2, 4, 70, 150).mT,
    "a slice": lambda: torch.randn(2, 4, 150, 200)[..., 5:145:2],
    "heads last": lambda: torch.randn(2, 150, 70, 4).permute(0, 3, 1, 2),
    "one number": lambda: torch.randn(()),
}


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_layouts_of_masks(make, kind, isa):
    inputs, mask = qkv(150, 70), make()
    full = mask.expand(2, 4, 150, 70).contiguous()
    if kind == "bool":
        assert equal(everything(inputs, attn_mask=mask > -1), everything(inputs, attn_mask=full > -1))
        return
    *strided, grad = everything(inputs, attn_mask=mask)
    *dense, grad_full = everything(inputs, attn_mask=full)
    assert equal(strided, dense)
    torch.testing.assert_close(grad, grad_full.sum_to_size(mask.shape))


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys"), [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (1, 1, 1, 1)]
)
def test_empty(batch, heads, queries, keys, isa):
    inputs = [torch.randn(batch, heads, n, 8) for n in (queries, keys, keys)]
    options = all_options(queries, keys, batch, heads) | {"dropout_p": 0.5}
    out, lse, *grads = everything(inputs, **options)
    assert out.shape == (batch, heads, queries, 8)
    leaves = [*inputs, *(options[name] for name in ("attn_mask", "alibi_slopes", "sinks"))]
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert all(t.isfinite().all() for t in (out, lse, *grads))
    if not keys:
        assert torch.equal(lse, options["sinks"][:, None].expand(2, 2, 3))


def test_inputs_are_not_modified_and_every_output_is_written(isa, dtype):
    """Under the poison of the fixture, which fills what no kernel wrote with NaN."""
    for queries, keys in ((150, 130), (1, 200)):
        inputs, options = qkv(queries, keys, batch=3, kv_heads=2, dtype=dtype), all_options(queries, keys, dtype=dtype)
        tensors = [*inputs, *(t for t in options.values() if isinstance(t, torch.Tensor))]
        before = [t.clone() for t in tensors]
        assert all(t.isfinite().all() for t in everything(inputs, **options))
        assert equal(before, tensors)


# ---- determinism --------------------------------------------------------------------------------------------------


def test_same_bits_every_time_on_any_number_of_threads(isa):
    inputs, options = qkv(150, 130, batch=3, kv_heads=2), all_options()
    threads = torch.get_num_threads()
    first = everything(inputs, **options)
    try:
        for count in (1, 3, 8, *[2] * 50):
            torch.set_num_threads(count)
            assert equal(first, everything(inputs, **options))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("queries", "keys", "shape"),
    [
        (300, 290, (1, 1)),
        (300, 290, (4, 1, 1)),
        (300, 290, (2, 1, 1, 1)),
        (300, 290, (300, 1)),
        (300, 290, (1, 290)),
        (1, 40_000, ()),
        (40_000, 1, ()),
        (20_000, 3, ()),
    ],
)
def test_gradient_of_a_mask_that_broadcasts_has_the_same_bits_on_any_number_of_threads(queries, keys, shape):
    """And it is the sum of the scores' gradients, also of so many that torch would share them out among the threads."""
    batch, heads = (2, 4) if queries == 300 else (1, 1)
    threads = torch.get_num_threads()

    def draw():
        """(ours, torch's, exact) sums."""
        inputs = qkv(queries, keys, batch=batch, heads=heads, head_dim=4)
        grad, grad_lse = torch.randn(batch, heads, queries, 4), torch.randn(batch, heads, queries)

        def grad_mask(shape):
            mask = torch.zeros(shape, requires_grad=True)
            results = attention(*inputs, attn_mask=mask, return_lse=True)
            return torch.autograd.grad(results, mask, (grad, grad_lse))[0]

        each = grad_mask((batch, heads, queries, keys))
        try:
            found = []
            for count in (1, 2, 3, 8):
                torch.set_num_threads(count)
                found.append(grad_mask(shape))
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(found[0], other) for other in found)
        return found[0], each.sum_to_size(shape), each.double().sum_to_size(shape)

    draws = [draw() for _ in range(16 if math.prod(shape) <= 2 and queries == 300 else 1)]  # torch's luck with one sum
    assert compare(*(torch.stack(each) for each in zip(*draws, strict=True))).passed


def test_a_sequence_does_not_see_the_batch(isa):
    inputs, options = qkv(150, 130, batch=3, kv_heads=2), all_options() | {"dropout_p": 0.0}
    del options["sinks"]  # whose gradient is a sum over the batch
    together = everything(inputs, **options)
    for b in range(3):
        own = {
            name: t[b : b + 1] if isinstance(t, torch.Tensor) and t.dim() and len(t) == 3 else t
            for name, t in options.items()
        }
        assert equal(everything([t[b : b + 1] for t in inputs], **own), [t[b : b + 1] for t in together])


# ---- derivatives --------------------------------------------------------------------------------------------------


def small(bool_mask=False):
    """A function of all that is differentiable, with every option, and its arguments."""

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    inputs = [leaf(1, 2, 3, 1), leaf(1, 1, 4, 1), leaf(1, 1, 4, 2), leaf(1, 1, 3, 4), leaf(2), leaf(2)]
    options = {"causal": True, "window": (2, None), "softcap": 1.5, "dropout_p": 0.3, "return_lse": True, "scale": 0.7}
    options["key_lengths"] = torch.tensor([3])
    hidden = torch.rand(1, 2, 3, 4) < 0.3

    def function(query, key, value, mask, slopes, sinks):
        torch.manual_seed(3)
        masks = ~hidden if bool_mask else mask
        out, lse = attention(query, key, value, attn_mask=masks, alibi_slopes=slopes, sinks=sinks, **options)
        return out, lse

    if bool_mask:
        full = function
        inputs.pop(3)
        return lambda q, k, v, slopes, sinks: full(q, k, v, None, slopes, sinks), inputs
    return function, inputs


def test_gradcheck(isa):
    assert torch.autograd.gradcheck(*small(), check_forward_ad=True, check_batched_grad=True)


@pytest.fixture
def two_blocks(monkeypatch):
    """Higher derivatives of three queries by two blocks."""
    monkeypatch.setattr(_attention_autograd, "_QUERIES", 2)
    monkeypatch.setattr(_attention_autograd, "_SCORES", 1)


def test_gradgradcheck(two_blocks):
    assert torch.autograd.gradgradcheck(*small(), check_fwd_over_rev=True)


def test_higher_derivatives_with_a_bool_mask(two_blocks):
    assert torch.autograd.gradcheck(*small(bool_mask=True), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(*small(bool_mask=True))


@pytest.mark.parametrize("shape", [(1, 1, 3, 1), (4,), (2, 1, 1, 4)], ids=str)
def test_second_derivatives_of_a_mask_that_broadcasts(shape, two_blocks):
    inputs = qkv(3, 4, batch=2, heads=1, head_dim=1, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda *tensors: sdpa(*tensors), (*inputs, mask))


def test_sums_over_blocks_are_rounded_once(monkeypatch):
    """Second derivatives in bfloat16 by 100 blocks: what is summed over them is as good as by one."""
    inputs = qkv(200, 40, batch=1, heads=2, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for queries in (1000, 2):
        monkeypatch.setattr(_attention_autograd, "_QUERIES", queries)
        monkeypatch.setattr(_attention_autograd, "_SCORES", 1)
        grads = torch.autograd.grad(attention(*inputs).float().square().sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.float().square().sum() for g in grads), inputs))
    torch.testing.assert_close(*results, atol=0.0, rtol=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("wanted", ["attn_mask", "alibi_slopes", "sinks"])
def test_gradient_of_one_option_alone(wanted):
    inputs = qkv(5, 6, dtype=torch.float64)
    options = {
        "attn_mask": torch.randn(4, 5, 6, dtype=torch.float64),
        "alibi_slopes": torch.rand(4, dtype=torch.float64),
        "sinks": torch.randn(4, dtype=torch.float64),
    }
    options[wanted].requires_grad_()
    (ours,) = torch.autograd.grad(attention(*inputs, **options).sin().sum(), options[wanted])
    with seqkern.use_backend("reference"):
        (theirs,) = torch.autograd.grad(attention(*inputs, **options).sin().sum(), options[wanted])
    torch.testing.assert_close(ours, theirs)


def test_options_in_lower_precision_get_their_own_gradients():
    slopes, sinks = torch.rand(4).half().requires_grad_(), torch.rand(4).bfloat16().requires_grad_()
    attention(*qkv(dtype=torch.float64), alibi_slopes=slopes, sinks=sinks).sum().backward()
    assert slopes.grad is not None
    assert sinks.grad is not None
    assert (slopes.grad.dtype, sinks.grad.dtype) == (torch.float16, torch.bfloat16)


# ---- vmap ---------------------------------------------------------------------------------------------------------


def test_vmap_of_every_option():
    """Whatever is batched and whatever is not: as a loop over the samples."""
    samples, queries, keys = 3, 4, 5
    tensors = {
        "query": torch.randn(samples, 2, 2, queries, 3),
        "key": torch.randn(samples, 2, 2, keys, 3),
        "value": torch.randn(samples, 2, 2, keys, 3),
        "attn_mask": torch.randn(samples, 1, 2, queries, keys),
        "key_lengths": torch.randint(1, keys + 1, (samples, 2)),
        "alibi_slopes": torch.rand(samples, 2),
        "sinks": torch.randn(samples, 2),
    }
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    names = tuple(tensors)

    def loss(*arguments):
        given = dict(zip(names, arguments, strict=True))
        out, lse = attention(**given, return_lse=True)
        return out.square().sum() + lse.sin().sum()

    differentiable = tuple(i for i, n in enumerate(names) if n != "key_lengths")
    for function in (loss, torch.func.grad(loss, argnums=differentiable)):
        for batched in itertools.product([True, False], repeat=4):
            dims = [0, 0, 0, *(0 if b else None for b in batched)]
            given = [t if dim == 0 else t[0] for t, dim in zip(tensors.values(), dims, strict=True)]
            ours = torch.func.vmap(function, in_dims=tuple(dims))(*given)
            alone = [
                function(*(t[s] if dim == 0 else t for t, dim in zip(given, dims, strict=True))) for s in range(samples)
            ]
            if function is loss:
                torch.testing.assert_close(ours, torch.stack(alone))
            else:
                torch.testing.assert_close(ours, tuple(torch.stack(t) for t in zip(*alone, strict=True)))


def test_vmap_of_dropout():
    inputs = [t[None].expand(3, *t.shape) for t in qkv(5, 6)]
    function = functools.partial(attention, dropout_p=0.5)
    same = torch.func.vmap(function, randomness="same")(*inputs)
    different = torch.func.vmap(function, randomness="different")(*inputs)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(function)(*inputs)


# ---- torch's machinery --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["added", "bool", "broadcast"])
def test_opcheck(mask):
    query, key, value = qkv(5, 6, kv_heads=2, value_dim=3)
    masks = torch.randn(1, 4, 5, 6) if mask != "broadcast" else torch.randn(2, 1, 1, 6)
    masks = masks > 0 if mask == "bool" else masks
    lengths, slopes, sinks, seed = torch.tensor([6, 3]), torch.rand(2, 4), torch.randn(4), torch.tensor(7)
    numbers = (5, 6, 0, True, 3, 0, 0.5, 2.0, 0.3)
    arguments = (query, key, value, masks, None, None, lengths, slopes, sinks, seed, *numbers)
    torch.library.opcheck(torch.ops.seqkern.attention_fwd.default, arguments)
    out, lse = torch.ops.seqkern.attention_fwd(*arguments)
    rest = (masks, None, None, lengths, slopes, seed, *numbers, mask == "added", True)
    arguments = (torch.randn_like(out), torch.randn_like(lse), query, key, value, out, lse, *rest)
    torch.library.opcheck(torch.ops.seqkern.attention_bwd.default, arguments)


def test_compile_fullgraph(compilation):
    def function(query, key, value, mask, slopes, sinks, lengths):
        out, lse = attention(
            query, key, value, causal=True, attn_mask=mask, key_lengths=lengths, window=(4, None), alibi_slopes=slopes,
            softcap=3.0, sinks=sinks, return_lse=True,
        )  # fmt: skip
        return sdpa(out, key, value, mask, is_causal=True, enable_gqa=True) + lse[..., None]

    compiled = torch.compile(function, **compilation)
    inputs = [*qkv(5, 9, kv_heads=2), torch.randn(5, 9), torch.rand(4), torch.randn(4)]
    inputs = [t.requires_grad_() for t in inputs]
    lengths = torch.tensor([9, 3])
    output, expected = compiled(*inputs, lengths), function(*inputs, lengths)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


def test_compiled_dropout():
    compiled = torch.compile(lambda *inputs: attention(*inputs, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    inputs = qkv(70)
    torch.manual_seed(1)
    first, second = compiled(*inputs), compiled(*inputs)
    torch.manual_seed(1)
    assert torch.equal(first, compiled(*inputs))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_backends_agree(backend, dtype, passes):
    with seqkern.use_backend(backend):
        passes(check_case(attention_case(**({"queries": 130, "head_dim": 24} | CASES["everything"])), dtype))


# ---- errors -------------------------------------------------------------------------------------------------------

Q = torch.randn(2, 4, 5, 8)
META = torch.empty(2, device="meta")


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (TypeError, "attn_mask must be a tensor or None, got list", {"attn_mask": [1.0]}),
        (TypeError, "attn_mask must be bool, float32 or the query's dtype.*got torch.int64",
         {"attn_mask": torch.ones(5, 5).long()}),
        (TypeError, "attn_mask must be .*got torch.float64", {"attn_mask": torch.ones(5, 5).double()}),
        (TypeError, "attn_mask must be .*got torch.float16", {"attn_mask": torch.ones(5, 5).half()}),
        (ValueError, "attn_mask must be on the query's device cpu, got meta", {"attn_mask": META}),
        (ValueError, r"attn_mask must broadcast to \(2, 4, 5, 5\), got shape \(6,\)", {"attn_mask": torch.ones(6)}),
        (ValueError, "attn_mask must broadcast", {"attn_mask": torch.ones(1, 1, 1, 5, 5)}),
        (ValueError, "attn_mask must broadcast", {"attn_mask": torch.ones(3, 1, 5, 5)}),
        (TypeError, "key_lengths must be a tensor or None, got list", {"key_lengths": [5, 5]}),
        (TypeError, "key_lengths must be int32 or int64, got torch.float32", {"key_lengths": torch.ones(2)}),
        (ValueError, r"key_lengths must have shape \(2,\), the batch size, got \(3,\)",
         {"key_lengths": torch.tensor([1, 2, 3])}),
        (ValueError, "key_lengths must be on the query's device cpu", {"key_lengths": META.int()}),
        (TypeError, r"window must be a pair \(left, right\) or None, got 3", {"window": 3}),
        (TypeError, "window must be a pair", {"window": (1, 2, 3)}),
        (TypeError, r"window must have whole numbers or None in it, got \(1.5, 0\)", {"window": (1.5, 0)}),
        (ValueError, r"window must have numbers >= 0 in it \(-1 or None.*got \(-2, 0\)", {"window": (-2, 0)}),
        (TypeError, "alibi_slopes must be a tensor or None, got float", {"alibi_slopes": 0.5}),
        (TypeError, "alibi_slopes must be float64.*got torch.int64", {"alibi_slopes": torch.ones(4).long()}),
        (ValueError, r"alibi_slopes must have shape \(4,\) or \(2, 4\), got \(5,\)", {"alibi_slopes": torch.ones(5)}),
        (ValueError, "alibi_slopes must be on the query's device", {"alibi_slopes": META}),
        (TypeError, "softcap must be a number or None, got Tensor", {"softcap": torch.ones(())}),
        (TypeError, "softcap must be a number or None, got list", {"softcap": [1.0]}),
        (TypeError, r"scale must be a number or None, got \[1.0\]", {"scale": [1.0]}),
        (TypeError, r"dropout_p must be a probability, got \[0.1\]", {"dropout_p": [0.1]}),
        (ValueError, "softcap must be a finite number >= 0, got -1.0", {"softcap": -1.0}),
        (ValueError, "softcap must be a finite number >= 0, got inf", {"softcap": math.inf}),
        (ValueError, "softcap must be 0 .none. or at least 1e-30, got 1e-39", {"softcap": 1e-39}),
        (TypeError, "sinks must be a tensor or None, got int", {"sinks": 1}),
        (TypeError, "sinks must be float64.*got torch.bool", {"sinks": torch.ones(4).bool()}),
        (ValueError, r"sinks must have shape \(4,\), one for every head.*got \(1,\)", {"sinks": torch.ones(1)}),
        (ValueError, "sinks must be on the query's device", {"sinks": META}),
    ],
)  # fmt: skip
def test_errors_name_the_option(error, words, options):
    with pytest.raises(error, match=f"^attention: {words}"):
        attention(Q, Q, Q, **options)


@pytest.mark.parametrize(
    ("error", "words", "mask"),
    [
        (TypeError, "attn_mask must be bool, float32 or the query's dtype", torch.ones(5, 5).long()),
        (ValueError, r"attn_mask must broadcast to \(2, 4, 5, 5\), got shape \(4, 4, 5, 5\)", torch.ones(4, 4, 5, 5)),
        (ValueError, "attn_mask must broadcast", torch.ones(1, 2, 4, 5, 5)),
    ],
)
def test_errors_of_masks(error, words, mask):
    with pytest.raises(error, match=f"^scaled_dot_product_attention: {words}"):
        sdpa(Q, Q, Q, mask)
