"""The modules of encoder-decoder attention: against the equations, masks of torch's kind, steps, errors."""

from __future__ import annotations

import math

import pytest
import torch

from seqkern.nn import AdditiveAttention, BilinearAttention, DotAttention

MODULES = {
    "additive": lambda: AdditiveAttention(6, 8, 10),
    "additive, no bias": lambda: AdditiveAttention(6, 8, bias=False),
    "bilinear": lambda: BilinearAttention(6, 8),
    "dot": lambda: DotAttention(),
    "scaled dot": lambda: DotAttention(None),
}


@pytest.fixture(params=MODULES)
def module(request):
    torch.manual_seed(3)
    return MODULES[request.param]().double()


def tensors(module):
    generator = torch.Generator().manual_seed(5)
    keys = 6 if isinstance(module, DotAttention) else 8
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((2, 3, 6), (2, 5, keys))]


def scores_of(module, query, key):
    if isinstance(module, AdditiveAttention):
        hidden = module.query_proj(query)[:, :, None] + module.key_proj(key)[:, None]
        return torch.tanh(hidden) @ module.weight
    if isinstance(module, BilinearAttention):
        return torch.einsum("bqe,ed,bkd->bqk", query, module.key_proj.weight, key)
    return query @ key.mT * (query.shape[-1] ** -0.5 if module.scale is None else module.scale)


HIDDEN = torch.tensor([[False, False, True, False, True], [True, False, False, False, False]])
CAUSAL = torch.ones(3, 5, dtype=torch.bool).triu(3)
ADDED = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"key_padding_mask": HIDDEN}, {"attn_mask": CAUSAL}, {"attn_mask": ADDED},
        {"key_padding_mask": HIDDEN, "attn_mask": CAUSAL}, {"key_padding_mask": HIDDEN, "attn_mask": ADDED},
        {"key_padding_mask": ADDED[:, 0], "attn_mask": CAUSAL}, {"key_lengths": torch.tensor([5, 2])},
        {"key_lengths": torch.tensor([4, 5]), "key_padding_mask": HIDDEN},
    ],
)  # fmt: skip
def test_equations(module, options):
    query, key = tensors(module)
    value = key.flip(1)
    scores = scores_of(module, query, key)
    for name, mask in options.items():
        if name == "key_lengths":
            mask = torch.arange(5) >= mask[:, None]
        mask = mask[:, None] if mask.shape == (2, 5) else mask
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    expected = scores.softmax(-1)
    output, weights = module(query, key, value, **options, need_weights=True)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(output, expected @ value)
    other, none = module(query, key, value, **options)
    assert none is None
    torch.testing.assert_close(other, output)
    parameters = list(module.parameters())
    if parameters:
        upstream = torch.randn_like(output)
        found = torch.autograd.grad(other, parameters, upstream)
        torch.testing.assert_close(found, torch.autograd.grad(expected @ value, parameters, upstream))


def test_a_step_at_a_time(module):
    """(B, D) is a query; keys projected once give the same bits."""
    query, key = tensors(module)
    output, weights = module(query, key, need_weights=True)
    projected = module.project_key(key)
    for i in range(3):
        one, of_one = module(query[:, i], key, need_weights=True, projected_key=projected)
        torch.testing.assert_close(one, output[:, i])
        torch.testing.assert_close(of_one, weights[:, i])
        assert torch.equal(one, module(query[:, i], key)[0])


def test_a_query_that_sees_nothing(module):
    query, key = tensors(module)
    output, weights = module(query, key, key_padding_mask=torch.ones(2, 5, dtype=torch.bool), need_weights=True)
    assert not output.any()
    assert not weights.any()


def test_gradcheck(module):
    query, key = (t.requires_grad_() for t in tensors(module))
    names = [name for name, _ in module.named_parameters()]

    def function(query, key, *parameters):
        call = (query, key), {"key_padding_mask": HIDDEN, "need_weights": True}
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), *call)

    assert torch.autograd.gradcheck(function, (query, key, *module.parameters()))


def test_start():
    torch.manual_seed(0)
    module = AdditiveAttention(100, 50, dtype=torch.float64)
    assert sorted(module.state_dict()) == ["key_proj.weight", "query_proj.bias", "query_proj.weight", "weight"]
    assert module.weight.abs().max() <= 0.1
    assert module.weight.std() > 0.04
    before = module.weight.clone()
    module.reset_parameters()
    assert not torch.equal(module.weight, before)
    assert module.weight.dtype == torch.float64
    assert "scale=None" in repr(DotAttention(None))


def test_compiled(module, compilation):
    module = module.float()
    query, key = (t.float() for t in tensors(module))
    compiled = torch.compile(lambda q, k: module(q, k, key_padding_mask=HIDDEN)[0], **compilation)
    torch.testing.assert_close(compiled(query, key), module(query, key, key_padding_mask=HIDDEN)[0])


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (TypeError, {"query": None}, "query must be a tensor, got NoneType"),
        (ValueError, {"query": torch.zeros(6)}, r"query must have shape \(B, D\) or \(B, Tq, D\), got \(6,\)"),
        (ValueError, {"key": torch.zeros(5, 8)}, r"key must have shape \(B, Tk, D\), got \(5, 8\)"),
        (ValueError, {"key_padding_mask": HIDDEN[:1]}, r"key_padding_mask must have shape \(2, 5\), got \(1, 5\)"),
        (ValueError, {"attn_mask": CAUSAL[:2]}, r"attn_mask must have shape \(3, 5\) or \(2, 3, 5\), got \(2, 5\)"),
        (TypeError, {"attn_mask": CAUSAL.long()}, "attn_mask must be bool, True hides, or numbers that are added"),
        (TypeError, {"key_padding_mask": [1]}, "key_padding_mask must be a tensor or None, got list"),
    ],
)
def test_errors(error, options, message):
    given = {"query": torch.zeros(2, 3, 6), "key": torch.zeros(2, 5, 8)} | options
    with pytest.raises(error, match=f"AdditiveAttention: {message}"):
        AdditiveAttention(6, 8)(**given)
