"""Additive attention: accuracy at every scale, masks, all results' gradients, memory, layouts, errors, the modules."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch

import seqkern
from seqkern import reference
from seqkern.ops.additive_attention import cost
from seqkern.testing import additive_attention_case, check_case, compare, poison


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch=2, queries=3, keys=5, channels=4, columns=6, dtype=torch.float64, scale=1.0):
    """query, key, value, weight, bias."""
    shapes = [(batch, queries, channels), (batch, keys, channels), (batch, keys, columns), (channels,), (channels,)]
    found = [draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    return [found[0] * scale, found[1] * scale, *found[2:]]


EVERY = {"return_weights": True, "return_lse": True}
CASES = {
    "plain": {"bias": False, "lengths": False}, "lengths": {}, "bool": {"mask": "bool"},
    "added": {"mask": "added"} | EVERY, "all results": EVERY, "many queries": {"queries": 150, "keys": 7},
    "one query": {"queries": 1, "keys": 65, "channels": 130}, "many keys": {"queries": 5, "keys": 300, "channels": 20},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_error_rule(case, dtype, isa, passes):
    passes(check_case(additive_attention_case(**CASES[case]), dtype))


@pytest.mark.parametrize("scale", [0.01, 0.1, 0.3, 1, 3, 10, 30, 100])
def test_error_rule_at_every_scale(scale, isa, passes):
    """Small keys, products of exponentials, wild ones that take tanh itself, and mixtures of these."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        passes(check_case(additive_attention_case(scale=scale), dtype))
    passes(check_case(additive_attention_case(scale=scale, channels=200, queries=2, bias=False), torch.float32))


@pytest.mark.parametrize("channels", [1, 2, 15, 16, 17, 64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 65), (1, 66, 4), (2, 4, 3)], ids=str)
def test_sizes(channels, shape, isa, passes):
    for columns in (1, 17, 70):
        passes(check_case(additive_attention_case(*shape, channels, columns, lengths=False), torch.float32))


def test_each_pair_has_its_own_form(isa):
    """A wild query or key changes no bit of the pairs of others."""
    query, key, value, weight, _ = inputs(1, 9, 21, 33, 40, torch.float32)
    key[:, ::5] *= 0.01
    before = seqkern.additive_attention(query, key, value, weight, return_weights=True, return_lse=True)
    for factor in (1e3, 1e30, math.inf):
        wild = query.clone()
        wild[:, 2] = wild[:, 2].abs() * factor
        after = seqkern.additive_attention(wild, key, value, weight, return_weights=True, return_lse=True)
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a[:, :2], b[:, :2])
            assert torch.equal(a[:, 3:], b[:, 3:])
        tensors = (wild, key, value, weight)
        plain = reference.additive_attention(*tensors, None, None, None)[0]
        exact = reference.additive_attention(*(t.double() for t in tensors), None, None, None)[0]
        assert compare(after[0], plain, exact).passed


def test_a_query_does_not_depend_on_the_others(isa):
    query, key, value, weight, bias = inputs(3, 7, 33, 20, 18, torch.float32)
    every = seqkern.additive_attention(query, key, value, weight, bias)
    for i in range(7):
        one = seqkern.additive_attention(query[:, i : i + 1], key, value, weight, bias)
        assert torch.equal(one[:, 0], every[:, i])
    for b in range(3):
        one = seqkern.additive_attention(query[b : b + 1], key[b : b + 1], value[b : b + 1], weight, bias)
        assert torch.equal(one[0], every[b])


def test_bits_do_not_depend_on_padding(isa):
    """Keys beyond the length are not read, and their gradients are zero."""
    query, key, value, weight, bias = inputs(2, 7, 12, 20, 18, torch.float32)
    padded = [torch.cat([t, torch.full((2, 9, t.shape[2]), torch.nan)], 1).requires_grad_() for t in (key, value)]
    lengths = torch.tensor([12, 5])
    expected = seqkern.additive_attention(query, key, value, weight, bias, key_lengths=lengths)
    output, weights = seqkern.additive_attention(
        query, *padded, weight, bias, key_lengths=lengths.int(), return_weights=True
    )
    assert torch.equal(output, expected)
    assert not weights[1, :, 5:].any()
    for grad in torch.autograd.grad(output.sin().sum(), padded):
        assert not grad[:, 12:].any()
        assert not grad[1, 5:].any()
        assert grad.isfinite().all()


# ---- masks --------------------------------------------------------------------------------------------------------


def test_masks(isa):
    """Every shape that broadcasts; True is visible; -inf of an added mask hides as False does."""
    query, key, value, weight, _ = inputs(2, 3, 5)
    for shape in itertools.product((1, 2), (1, 3), (1, 5)):
        visible = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.6
        found = seqkern.additive_attention(query, key, value, weight, mask=visible, **EVERY)
        full = visible.expand(2, 3, 5)
        expected = reference.additive_attention(query, key, value, weight, None, None, full)
        for a, b in zip(found, (expected[0], expected[2], expected[1]), strict=True):
            torch.testing.assert_close(a, b)
        hidden = torch.zeros(shape, dtype=torch.float64).masked_fill(~visible, -math.inf)
        for a, b in zip(
            found, seqkern.additive_attention(query, key, value, weight, mask=hidden, **EVERY), strict=True
        ):
            assert torch.equal(a, b)
    row = torch.tensor([True, False, True, True, False])
    assert torch.equal(
        seqkern.additive_attention(query, key, value, weight, mask=row),
        seqkern.additive_attention(query, key, value, weight, mask=row.expand(2, 3, 5)),
    )


@pytest.mark.parametrize("how", ["bool", "added", "lengths", "no keys"])
def test_a_query_without_keys(how, isa):
    """Output and weights 0, log-sum-exp -inf, gradients 0; of all results."""
    leaves = [t.requires_grad_() for t in inputs(2, 3, 0 if how == "no keys" else 5)]
    options = {
        "bool": {"mask": torch.zeros(1, 1, 1, dtype=torch.bool)},
        "added": {"mask": torch.full((2, 1, 5), -math.inf).double()},
        "lengths": {"key_lengths": torch.zeros(2, dtype=torch.int64)},
        "no keys": {},
    }[how]
    output, weights, lse = seqkern.additive_attention(*leaves, **options, **EVERY)
    assert not output.any()
    assert not weights.any()
    assert (lse == -math.inf).all()
    upstream = [draw(*t.shape, seed=7) for t in (output, weights, lse)]
    for grad in torch.autograd.grad((output, weights, lse), leaves, upstream):
        assert not grad.any()


def test_a_hidden_nan_does_not_count(isa):
    leaves = [t.requires_grad_() for t in inputs(1, 6, 5, dtype=torch.float32)]
    mask = torch.ones(1, 6, 5, dtype=torch.bool)
    mask[:, 1:, 2] = False  # query 0 alone sees key 2
    with torch.no_grad():
        leaves[1][0, 2] = torch.nan
        leaves[2][0, 2] = torch.nan
    output = seqkern.additive_attention(*leaves, mask=mask)
    assert output.isnan().any(2)[0].tolist() == [True, False, False, False, False, False]
    grads = torch.autograd.grad(output[:, 1:].sin().sum(), leaves[:1])
    assert grads[0][:, 1:].isfinite().all()


# ---- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"key_lengths": torch.tensor([5, 2])}, {"mask": "bool"}, {"mask": "added"}])
@pytest.mark.parametrize("results", [(), ("return_weights",), ("return_lse",), ("return_weights", "return_lse")])
def test_gradcheck(options, results):
    leaves = [t.requires_grad_() for t in inputs()]
    mask = options.get("mask")
    if mask == "added":
        leaves.append(draw(2, 1, 5, seed=9).requires_grad_())
    options = options | dict.fromkeys(results, True)

    def function(*tensors):
        given = dict(options)
        if mask:
            given["mask"] = tensors[5] if mask == "added" else torch.ones(3, 5).tril(2).bool()
        return seqkern.additive_attention(*tensors[:5], **given)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_only_what_is_needed(isa):
    leaves = [*inputs(2, 40, 9), draw(1, 40, 9)]

    def run(wanted):
        given = [t.detach().clone().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
        output = seqkern.additive_attention(*given[:5], mask=given[5])
        return torch.autograd.grad(output.sin().sum(), [t for t in given if t.requires_grad])

    every = run([True] * 6)
    for index in range(6):
        wanted = [i == index for i in range(6)]
        assert torch.equal(run(wanted)[0], every[index])


@pytest.mark.parametrize("queries", [3, 64, 65, 97, 128])
def test_gradients_of_one_chunk_and_of_several(queries, isa, passes):
    case = additive_attention_case(2, queries, 33, 20, 50, mask="added", **EVERY)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        passes(check_case(case, dtype))


def test_upstream_gradients(isa):
    """None of them, one that is expanded, one that is strided; a second backward pass gives the same."""
    leaves = [t.requires_grad_() for t in inputs(2, 5, 6)]
    output, weights, lse = seqkern.additive_attention(*leaves, **EVERY)
    expanded = torch.ones(()).double().expand(output.shape)
    strided = draw(*reversed(output.shape)).permute(2, 1, 0)
    for upstream in (expanded, strided):
        plain = torch.autograd.grad(output, leaves, upstream.contiguous(), retain_graph=True)
        for _ in range(2):
            found = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    (alone,) = torch.autograd.grad(lse.sum(), leaves[2], allow_unused=True, retain_graph=True)
    assert not alone.any()
    (of_value,) = torch.autograd.grad(weights.square().sum(), leaves[2], retain_graph=True)
    assert not of_value.any()


def test_the_same_bits(isa):
    leaves = [t.requires_grad_() for t in inputs(3, 70, 41, 37, 90, torch.float32)]

    def run():
        output, weights, lse = seqkern.additive_attention(*leaves, key_lengths=torch.tensor([41, 9, 0]), **EVERY)
        total = output.sin().sum() + weights.square().sum() + lse[:2].sum()
        return output, weights, lse, *torch.autograd.grad(total, leaves)

    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with poison():
                results.append(run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- transforms, compilation, memory ------------------------------------------------------------------------------


def test_transforms():
    tensors = inputs()

    def ours(*t):
        return seqkern.additive_attention(*t).sin().sum()

    def theirs(*t):
        query = t[0] + t[4]
        scores = torch.tanh(query[:, :, None] + t[1][:, None]) @ t[3]
        return (scores.softmax(-1) @ t[2]).sin().sum()

    for i in range(5):
        for transform in (torch.func.grad, torch.func.hessian):
            torch.testing.assert_close(transform(ours, i)(*tensors), transform(theirs, i)(*tensors))
    many = [torch.stack([t, 2 * t, -t]) for t in tensors]
    mapped = torch.func.vmap(torch.func.grad(ours))
    torch.testing.assert_close(mapped(*many), torch.func.vmap(torch.func.grad(theirs))(*many))


def test_opcheck():
    query, key, value, weight, bias = inputs(2, 3, 5, dtype=torch.float32)
    op, back = torch.ops.seqkern.additive_attention_fwd.default, torch.ops.seqkern.additive_attention_bwd.default
    lengths, mask = torch.tensor([5, 2]), draw(2, 1, 5, dtype=torch.float32).expand(2, 3, 5)
    torch.library.opcheck(op, (query, key, value, weight, None, None, None, False))
    torch.library.opcheck(op, (query, key, value, weight, bias, lengths, mask, True))
    output, lse, weights = op(query, key, value, weight, bias, lengths, mask, True)
    torch.library.opcheck(back, (output, lse, weights, query, key, value, weight, bias, lengths, mask, True))
    torch.library.opcheck(back, (None, lse, None, query, key, value, weight, None, None, mask < 1, False))


def test_compiled(compilation):
    leaves = [t.requires_grad_() for t in inputs(dtype=torch.float32)]
    lengths, mask = torch.tensor([5, 2]), draw(2, 1, 5, dtype=torch.float32).requires_grad_()

    def model(query, key, value, weight, bias, mask):
        options = {"key_lengths": lengths, "mask": mask}
        output, weights = seqkern.additive_attention(query, key, value, weight, bias, return_weights=True, **options)
        return output * 2, weights

    ours, theirs = torch.compile(model, **compilation)(*leaves, mask), model(*leaves, mask)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    wanted = (*leaves, mask)
    losses = [output.sin().sum() + weights.square().sum() for output, weights in (ours, theirs)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, wanted) for loss in losses))


def test_autocast():
    tensors = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, lse = seqkern.additive_attention(*tensors, return_lse=True)
    assert output.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(output, seqkern.additive_attention(*(t.bfloat16() for t in tensors)))


MEMORY = """
import torch, seqkern
torch.set_num_threads(1)
leaves = [torch.randn(shape).requires_grad_() for shape in ((1, 4096, 64), (1, 4096, 64), (1, 4096, 64), (64,))]
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
seqkern.additive_attention(*(t[:, :8] if t.dim() == 3 else t for t in leaves)).sum().backward()
before = peak()
seqkern.additive_attention(*leaves).sum().backward()
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_the_lengths():
    """4096 x 4096 pairs of 64 channels: 67 MB of scores, 4.3 GB of sums. The tensors have 1 MB each."""
    found = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 24 << 10, found.stdout


# ---- layouts and edges --------------------------------------------------------------------------------------------


def test_layouts(isa):
    query, key, value, weight, bias = inputs(2, 3, 5, 6, 7)
    expected = seqkern.additive_attention(query, key, value, weight, bias)

    def layouts(t):
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 5), torch.nan, dtype=t.dtype)
        wide[..., 2:-3] = t
        return wide[..., 2:-3], t.mT.contiguous().mT, t.transpose(0, 1).contiguous().transpose(0, 1)

    for q, k, v in itertools.product(layouts(query), layouts(key), layouts(value)):
        assert torch.equal(seqkern.additive_attention(q, k, v, weight.repeat_interleave(2)[::2], bias), expected)
    one = key[:1].expand(2, -1, -1)
    found = seqkern.additive_attention(query, one, one, weight)
    assert torch.equal(found, seqkern.additive_attention(query, one.contiguous(), one.contiguous(), weight))


def test_leading_dimensions():
    query, key, value, weight, bias = inputs(6, 3, 5)
    lengths, mask = torch.tensor([5, 1, 0, 3, 4, 2]), draw(6, 3, 5)
    expected = seqkern.additive_attention(query, key, value, weight, bias, key_lengths=lengths, mask=mask, **EVERY)
    heads = [t.view(2, 3, *t.shape[1:]) for t in (query, key, value)]
    options = {"key_lengths": lengths.view(2, 3), "mask": mask.view(2, 3, 3, 5)}
    found = seqkern.additive_attention(*heads, weight, bias, **options, **EVERY)
    assert all(torch.equal(a, b.view(a.shape)) for a, b in zip(found, expected, strict=True))
    alone = seqkern.additive_attention(query[0], key[0], value[0], weight, bias, key_lengths=torch.tensor(5))
    assert torch.equal(alone, seqkern.additive_attention(query[:1], key[:1], value[:1], weight, bias)[0])


@pytest.mark.parametrize(
    "shape", [(0, 3, 5, 4, 6), (2, 0, 5, 4, 6), (2, 3, 0, 4, 6), (2, 3, 5, 0, 6), (2, 3, 5, 4, 0), (0, 0, 0, 0, 0)]
)
def test_empty(shape, isa):
    leaves = [t.requires_grad_() for t in inputs(*shape)]
    batch, queries, keys, _, columns = shape
    with poison():
        output, weights, lse = seqkern.additive_attention(*leaves, **EVERY)
        grads = torch.autograd.grad(output.sum() + weights.sum(), leaves)
    assert output.shape == (batch, queries, columns)
    assert weights.shape == (batch, queries, keys)
    assert lse.shape == (batch, queries)
    expected = reference.additive_attention(*leaves, None, None)
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(lse, expected[1])
    wanted = torch.autograd.grad(expected[0].sum() + expected[2].sum(), leaves, allow_unused=True)
    for grad, other, leaf in zip(grads, wanted, leaves, strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(leaf) if other is None else other)


def test_lengths_out_of_range():
    """As in attention: cut to the keys that there are."""
    query, key, value, weight, _ = inputs(2)
    found = seqkern.additive_attention(query, key, value, weight, key_lengths=torch.tensor([-3, 99]))
    expected = seqkern.additive_attention(query, key, value, weight, key_lengths=torch.tensor([0, 5]))
    assert torch.equal(found, expected)


# ---- Triton, errors, cost -----------------------------------------------------------------------------------------


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for name, options in CASES.items():
            small = {"keys": min(40, options.get("keys", 40)), "queries": min(33, options.get("queries", 13))}
            reports = check_case(additive_attention_case(**options | small | {"channels": 9}), torch.float32)
            assert all(report.passed for report in reports), (name, [*map(str, reports)])
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            reports = check_case(additive_attention_case(channels=9, keys=20, mask="added", **EVERY), dtype)
            assert all(report.passed for report in reports), (dtype, [*map(str, reports)])
        for scale in (0.01, 100):
            reports = check_case(additive_attention_case(channels=9, keys=20, scale=scale), torch.float32)
            assert all(report.passed for report in reports), (scale, [*map(str, reports)])
        for how in ("bool", "added", "lengths", "no keys"):
            test_a_query_without_keys(how, None)
        test_masks(None)
        for shape in ((0, 3, 5, 4, 6), (2, 0, 5, 4, 6), (2, 3, 0, 4, 6), (2, 3, 5, 0, 6), (2, 3, 5, 4, 0)):
            test_empty(shape, None)
        test_lengths_out_of_range()
        from seqkern.kernels import additive_attention as kernels

        kernels.SCORES = 1  # chunks of 16 queries
        reports = check_case(
            additive_attention_case(queries=40, channels=5, keys=9, mask="bool", **EVERY), torch.float32
        )
        assert all(report.passed for report in reports), [*map(str, reports)]


Q, K, V, WEIGHT = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4), torch.zeros(2, 5, 6), torch.zeros(4)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (TypeError, ([1], K, V, WEIGHT), {}, "query must be a tensor, got list"),
        (TypeError, (Q, K, V, None), {}, "weight must be a tensor, got NoneType"),
        (TypeError, (Q.long(), K.long(), V.long(), WEIGHT.long()), {}, "query must be float64, .* got torch.int64"),
        (TypeError, (Q, K.double(), V, WEIGHT), {}, "key must have the query's dtype torch.float32, got torch.float64"),
        (TypeError, (Q, K, V, WEIGHT, WEIGHT.half()), {}, "bias must have the query's dtype torch.float32"),
        (ValueError, (Q[0, 0], K, V, WEIGHT), {}, r"query must have shape \(..., Tq, D\), got \(4,\)"),
        (ValueError, (Q, K[:1], V, WEIGHT), {}, r"key must have shape \(2, Tk, 4\), as the query's .* \(1, 5, 4\)"),
        (ValueError, (Q, K[..., :3], V, WEIGHT), {}, r"key must have shape \(2, Tk, 4\), .* got \(2, 5, 3\)"),
        (ValueError, (Q, K, V[:, :4], WEIGHT), {}, r"value must have shape \(2, 5, Dv\), .* got \(2, 4, 6\)"),
        (ValueError, (Q, K, V, WEIGHT[:3]), {}, r"weight must have shape \(4,\), got \(3,\)"),
        (ValueError, (Q, K, V, WEIGHT, WEIGHT[:3]), {}, r"bias must have shape \(4,\), got \(3,\)"),
        (ValueError, (Q, K.to("meta"), V, WEIGHT), {}, "key must be on the query's device cpu, got meta"),
        (TypeError, (Q, K, V, WEIGHT), {"key_lengths": [5, 2]}, "key_lengths must be a tensor or None, got list"),
        (TypeError, (Q, K, V, WEIGHT), {"key_lengths": torch.ones(2)}, "key_lengths must be int32 or int64, got"),
        (ValueError, (Q, K, V, WEIGHT), {"key_lengths": torch.ones(3).long()}, r"key_lengths must have shape \(2,\)"),
        (TypeError, (Q, K, V, WEIGHT), {"mask": torch.ones(3, 5).long()}, "mask must be bool, float32 or the query's"),
        (
            ValueError,
            (Q, K, V, WEIGHT),
            {"mask": torch.ones(2, 5)},
            r"mask must broadcast to \(2, 3, 5\), got .*\(2, 5",
        ),
    ],
)
def test_errors(error, arguments, options, message):
    with pytest.raises(error, match=f"additive_attention: {message}"):
        seqkern.additive_attention(*arguments, **options)


def test_errors_of_the_op():
    """The dispatcher's op checks what it reads."""
    op, back = torch.ops.seqkern.additive_attention_fwd, torch.ops.seqkern.additive_attention_bwd
    with pytest.raises(RuntimeError, match="value must have size 5 in dimension 1, got 4"):
        op(Q, K, V[:, :4], WEIGHT, None, None, None, False)
    with pytest.raises(RuntimeError, match="mask must have size 3 in dimension 1, got 1"):
        op(Q, K, V, WEIGHT, None, None, torch.ones(2, 1, 5).bool(), False)
    with pytest.raises(RuntimeError, match="grad_lse must have size 3 in dimension 1, got 2"):
        back(None, torch.zeros(2, 2), None, Q, K, V, WEIGHT, None, None, None, False)


def test_cost():
    assert cost(2, 3, 5, 4, 6, torch.float32).flops == 30 * (16 + 12)


if __name__ == "__main__":
    interpreted_cases()
