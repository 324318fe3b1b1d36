"""Attention on CPU where the numbers are hard: large scores, and NaN or infinity in keys that a query does not see."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import seqkern

RESULTS = ("out", "grad_query", "grad_key", "grad_value")


def results(function, inputs, grad):
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_softmax(query, key, value):
    """torch's op with all weights in memory: none is made again from a log-sum-exp."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value)


def with_scores_up_to(largest, seed, queries, keys, batch=2, head_dim=16):
    """Numbers as torch's own samples of the op have them, uniform: query, key, value and grad_out."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(rows, bound):
        return (torch.rand(batch, 2, rows, head_dim, generator=generator) * 2 - 1) * bound

    query, key = uniform(queries, 1), uniform(keys, 1)
    factor = (largest / ((query @ key.mT).abs().max() / head_dim**0.5)) ** 0.5
    return [query * factor, key * factor, uniform(keys, 9), uniform(queries, 1)]


# ---- large scores -------------------------------------------------------------------------------------------------


# One row a head and few are decoded, with sums in another order; 150 keys are three tiles.
@pytest.mark.parametrize(("queries", "keys"), [(1, 20), (8, 8), (12, 150), (40, 40), (150, 150)])
@pytest.mark.parametrize("largest", [200, *(pytest.param(n, marks=pytest.mark.slow) for n in (10, 30, 100, 300))])
def test_large_scores_keep_the_accuracy_of_the_gradients(largest, queries, keys, isa):
    """Root mean square errors over some draws: beside torch's op, and beside the softmax that of grad_value, which a
    rounded log-sum-exp falsifies most."""
    functions = (seqkern.scaled_dot_product_attention, F.scaled_dot_product_attention, by_softmax)
    sums = torch.zeros(3, 4, dtype=torch.float64)
    for seed in range(12):
        *inputs, grad = with_scores_up_to(largest, seed, queries, keys, max(2, 4000 // (queries * keys)))
        exact = results(by_softmax, [t.double() for t in inputs], grad.double())
        for function, total in zip(functions, sums, strict=True):
            found = results(function, inputs, grad)
            total += torch.stack([(a - b).square().mean() for a, b in zip(found, exact, strict=True)])
    ours, theirs, softmax = sums.sqrt()
    ratios = dict(zip(RESULTS, (ours / theirs).tolist(), strict=True))
    # Without fused multiply-adds every product is rounded twice: the scores, and so the output, have a larger error.
    bound = 1.2 * max(1.0, ratios["out"]) if isa == "generic" else 1.2
    assert all(ratio <= bound for ratio in ratios.values()), ratios
    if largest >= 100:
        assert ours[3] <= bound * softmax[3], (ours[3] / softmax[3]).item()


def test_the_log_sum_exp_is_float32_and_so_is_its_gradient(isa):
    inputs = [t.requires_grad_() for t in with_scores_up_to(200, 0, 40, 40)[:3]]
    out, lse = seqkern.attention(*inputs, return_lse=True)
    assert out.dtype == lse.dtype == torch.float32
    scores = inputs[0].detach().double() @ inputs[1].detach().double().mT / 4
    assert (lse.double() - scores.logsumexp(-1)).abs().max() <= 4 * torch.finfo(torch.float32).eps * 200
    grads = torch.autograd.grad(lse, inputs[:2], torch.ones_like(lse))
    assert [g.dtype for g in grads] == [torch.float32] * 2


# ---- what a query does not see ------------------------------------------------------------------------------------

UNSEEN = {
    "causal": {"causal": True, "causal_align": "upper_left"},
    "causal, softcap": {"causal": True, "causal_align": "upper_left", "softcap": 5.0},
    "window, softcap": {"window": (20, 3), "causal_align": "upper_left", "softcap": 5.0},
    "causal, slopes, dropout": {"causal": True, "causal_align": "upper_left", "dropout_p": 0.3, "alibi_slopes": True},
}


def spoil(t, first):
    """Not finite from row `first` on."""
    t = t.clone()
    t[:, :, first:], t[:, :, first::2], t[:, :, first::3] = math.nan, math.inf, -math.inf
    return t


@pytest.mark.parametrize("options", UNSEEN.values(), ids=UNSEEN)
@pytest.mark.parametrize(("queries", "first"), [(8, 5), (150, 70)])
def test_later_keys_do_not_reach_earlier_queries(queries, first, options, isa, dtype):
    """Keys and values that are not finite, seen by some queries only: what the others get is what they got without."""
    options = dict(options)
    if options.pop("alibi_slopes", False):
        options["alibi_slopes"] = torch.rand(4)
    inputs = [torch.randn(2, 4, queries, 24, dtype=dtype) for _ in range(3)]
    spoilt = [inputs[0], *(spoil(t, first) for t in inputs[1:])]
    seeing = first - options["window"][1] if "window" in options else first
    grad = torch.randn(2, 4, queries, 24, dtype=dtype)

    def of_earlier_queries(tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        torch.manual_seed(0)
        out, lse = seqkern.attention(*leaves, return_lse=True, **options)
        grads = torch.autograd.grad((out, lse), leaves[:1], (grad, torch.ones_like(lse)))
        return [t.detach()[:, :, :seeing] for t in (out, lse, *grads)]

    tolerance = 8 * torch.finfo(dtype).eps
    for ours, expected in zip(of_earlier_queries(spoilt), of_earlier_queries(inputs), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("hidden_by", ["window", "causal", "key_lengths"])
def test_keys_that_no_query_sees_reach_nothing(hidden_by, softcap, isa, dtype):
    """Not even by way of the derivative of a softcap; their own gradients are 0."""
    queries, keys = 70, 150
    options = {
        "window": {"window": (10, 9)},
        "causal": {"causal": True, "causal_align": "upper_left"},
        "key_lengths": {"key_lengths": torch.tensor([80, 80])},
    }[hidden_by]
    inputs = [torch.randn(2, 4, rows, 24, dtype=dtype) for rows in (queries, keys, keys)]
    hidden = slice(0, 70) if hidden_by == "window" else slice(80, None)
    for t in inputs[1:]:
        t[:, :, hidden] = spoil(t[:, :, hidden], 0)
    leaves = [t.requires_grad_() for t in inputs]
    out, lse = seqkern.attention(*leaves, softcap=softcap, return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), leaves, (torch.randn_like(out), torch.ones_like(lse)))
    assert all(t.isfinite().all() for t in (out, lse, *grads))
    assert all(not grad[:, :, hidden].any() for grad in grads[1:])
