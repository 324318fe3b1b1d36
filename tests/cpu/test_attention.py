"""Attention: every kernel against the float64 oracle, its gradients of every order, and torch's interfaces."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import seqkern
from seqkern import reference
from seqkern.ops.attention import cost
from seqkern.testing import attention_case, check_case, poison, verify
from seqkern.testing.option_sets import ATTENTION_SHAPES as SHAPES

NAMES = ("query", "key", "value")


def qkv(queries=5, keys=None, *, batch=2, heads=4, kv_heads=None, head_dim=8, value_dim=None, **options):
    keys, kv_heads, value_dim = keys or queries, kv_heads or heads, value_dim or head_dim
    return [
        torch.randn(batch, heads, queries, head_dim, **options),
        torch.randn(batch, kv_heads, keys, head_dim, **options),
        torch.randn(batch, kv_heads, keys, value_dim, **options),
    ]


def everything(inputs, grad=None, **options):
    """Output, log-sum-exp and the gradients."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = seqkern.attention(*leaves, return_lse=True, **options)
    grads = torch.autograd.grad(
        (out, lse), leaves, (torch.cos(out.detach()) if grad is None else grad, torch.ones_like(lse))
    )
    return [out.detach(), lse.detach(), *grads]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_error_rule(shape, dtype, isa, passes):
    passes(check_case(attention_case(**shape), dtype))


@pytest.mark.parametrize("options", [{"std": 30.0}, {"scale": 3.0}], ids=str)
def test_large_scores(options, isa, passes):
    passes(check_case(attention_case(140, head_dim=32, **options), torch.float32))


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_any_scale(scale, isa):
    """torch gives NaN where the scale is not positive; the formula does not."""
    inputs = qkv(140, dtype=torch.float64, requires_grad=True)
    ours = seqkern.attention(*inputs, causal=True, scale=scale, return_lse=True)
    formula = reference.attention(*inputs, right=0, scale=scale)
    torch.testing.assert_close(ours, formula)
    grads = [torch.autograd.grad(out.sin().sum() + lse.sin().sum(), inputs) for out, lse in (ours, formula)]
    torch.testing.assert_close(*grads)


def test_saturated_scores_pick_the_largest(isa):
    """Scores of +-1e4: the softmax is a choice, exp must neither overflow nor lose it."""
    query, key, value = qkv(150, heads=1, batch=1, head_dim=4)
    query[..., 1:] = 0
    query[..., 0] = torch.where(torch.arange(150) % 2 == 0, 1e4, -1e4)
    key[..., 0] = torch.linspace(-1, 1, 150)[torch.randperm(150)]
    out, lse = seqkern.attention(query, key, value, scale=1.0, return_lse=True)
    best = (query @ key.mT).argmax(-1)
    assert torch.equal(out, value.gather(2, best[..., None].expand_as(out)))
    assert torch.equal(lse, (query @ key.mT).amax(-1))
    assert all(t.isfinite().all() for t in everything((query, key, value), scale=1.0))


@pytest.mark.parametrize("keys", [1, 64, 65, 200])
def test_queries_that_see_nothing(keys, isa, dtype):
    inputs = qkv(210, keys, kv_heads=2, dtype=dtype)
    unseen = 210 - keys
    out, lse, grad_query, grad_key, grad_value = everything(inputs, causal=True)
    assert torch.equal(out[:, :, :unseen], torch.zeros_like(out[:, :, :unseen]))
    assert (lse[:, :, :unseen] == -math.inf).all()
    assert torch.equal(grad_query[:, :, :unseen], torch.zeros_like(grad_query[:, :, :unseen]))
    assert all(t.isfinite().all() for t in (out, lse[:, :, unseen:], grad_query, grad_key, grad_value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "heads"), [(200, 1), (3, 1), (3, 4)])
def test_bad_numbers_reach_only_who_sees_them(queries, heads, isa, dtype):
    clean = qkv(queries, 200, batch=1, heads=heads, kv_heads=1, dtype=dtype)
    before = seqkern.attention(*clean, causal=True)
    at = torch.arange(200 - queries, 200)
    for name, position in itertools.product(NAMES, (0, 70, 198, 199)):
        if name == "query" and position < at[0]:
            continue
        inputs = [t.clone() for t in clean]
        inputs[NAMES.index(name)][..., position - at[0] if name == "query" else position, 2] = math.nan
        out = seqkern.attention(*inputs, causal=True)
        sees = at == position if name == "query" else at >= position
        assert torch.equal(out.isnan().any(-1), sees.expand(1, heads, queries)), (name, position)
        assert torch.equal(out[:, :, ~sees], before[:, :, ~sees])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 1e4}], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(150, 300), (2, 1024)])
def test_scores_that_rise_along_the_keys(queries, keys, options, isa, dtype):
    """Each block of keys, or chunk of them, outweighs all before it: the running maximum rises at every one."""
    query, key, value = qkv(queries, keys, head_dim=16, dtype=dtype)
    query[..., 0], key[..., 0] = 1, torch.linspace(0, 300, keys)
    query[..., 1:] /= 8
    inputs = [query, key, value]
    out, lse, *grads = everything(inputs, scale=1.0, **options)
    doubles = [t.double().requires_grad_() for t in inputs]
    diagonal = {"right": 0, "diagonal": keys - queries} if options.get("causal") else {}
    expected = reference.attention(*doubles, scale=1.0, softcap=options.get("softcap", 0.0), **diagonal)
    cotangents = torch.cos(out.double()), torch.ones_like(expected[1])
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    close(out, expected[0], 4 * torch.finfo(dtype).eps + 1000 * wide)
    close(lse, expected[1], 8 * wide)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, doubles, cotangents), strict=True):
        close(ours, theirs, 8 * torch.finfo(dtype).eps + 1000 * wide)


def close(actual, expected, tolerance):
    """In L2, over the whole tensor."""
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infinite_scores(isa, dtype):
    query, key, value = (torch.randn(1, 1, *shape).to(dtype) for shape in ((2, 1), (150, 1), (150, 3)))
    query[:] = 1
    key[:, :, :100] = -math.inf  # a whole block of scores, and more, that is -inf
    out, lse = seqkern.attention(query, key, value, return_lse=True)
    seen, seen_lse = seqkern.attention(query, key[:, :, 100:], value[:, :, 100:], return_lse=True)
    torch.testing.assert_close((out, lse), (seen, seen_lse))
    key[:, :, 120] = math.inf
    assert seqkern.attention(query, key, value).isnan().all()

    out, lse, _, grad_key, grad_value = everything((query, torch.full_like(key, -math.inf), value))
    assert (lse == -math.inf).all()
    assert not any(t.count_nonzero() for t in (out, grad_key, grad_value))  # NaN counts as nonzero


def test_interpreted_triton(interpreted):
    interpreted(
        "-c",
        """
import torch
from seqkern.testing import attention_case, check_case, poison
import seqkern
shapes = [
    dict(queries=5, keys=3, heads=1, head_dim=4, causal=False),
    dict(queries=33, keys=70, heads=4, kv_heads=2, head_dim=16, value_dim=8),
    dict(queries=40, keys=20, heads=1, head_dim=24),
    dict(queries=20, keys=40, heads=1, head_dim=16, causal_align="upper_left"),
]
with poison(), seqkern.use_backend("triton"):
    for shape in shapes:
        for dtype in (torch.float32, torch.float16):
            for report in check_case(attention_case(**shape), dtype):
                assert report.passed, (shape, dtype, str(report))
""",
    )


# ---- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys"), [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty(batch, heads, queries, keys, causal, isa):
    inputs = [torch.randn(batch, heads, n, 8) for n in (queries, keys, keys)]
    out, lse, *grads = everything(inputs, causal=causal)
    assert out.shape == (batch, heads, queries, 8)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -math.inf).all()
    assert [g.shape for g in grads] == [t.shape for t in inputs]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(0, 3), (3, 0)])
def test_empty_heads(head_dim, value_dim, isa):
    query, key, value = torch.randn(1, 2, 5, head_dim), torch.randn(1, 2, 6, head_dim), torch.randn(1, 2, 6, value_dim)
    out, *_ = everything((query, key, value))
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand(1, 2, 5, value_dim))


LAYOUTS = {
    "heads last": lambda n: torch.randn(2, n, 4, 33).transpose(1, 2),
    "a slice of a projection": lambda n: torch.randn(2, n, 3, 4, 33)[:, :, 1].transpose(1, 2),
    "every other row": lambda n: torch.randn(2, 4, 2 * n, 40)[:, :, ::2, :33],
    "transposed": lambda n: torch.randn(2, 4, 33, n).mT,
    "one head for all": lambda n: torch.randn(2, 1, n, 33).expand(2, 4, n, 33),
    "one row for all": lambda n: torch.randn(2, 4, 1, 33).expand(2, 4, n, 33),
    "one number for all": lambda n: torch.randn(()).expand(2, 4, n, 33),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(make, isa):
    inputs, grad = [make(150), make(70), make(70)], make(150)
    strided = everything(inputs, grad, causal=True)
    dense = everything([t.contiguous() for t in inputs], grad.contiguous(), causal=True)
    assert equal(strided, dense)
    assert strided[0].is_contiguous()


sizes = st.integers(1, 4)


@given(
    data=st.data(),
    rank=st.integers(0, 3),
    queries=st.integers(1, 140),
    keys=st.integers(1, 70),
    head_dim=st.integers(1, 20),
    value_dim=st.integers(1, 20),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
@settings(max_examples=80, deadline=None)
def test_any_shape_means_what_torch_means(data, rank, queries, keys, head_dim, value_dim, is_causal, scale):
    full = [data.draw(sizes) for _ in range(rank)]

    def tensor(length, dim):
        leading = [data.draw(st.sampled_from([1, n])) for n in full[data.draw(st.integers(0, rank)) :]]
        if data.draw(st.booleans()):
            return torch.randn(*leading, dim, length, dtype=torch.float64).mT
        return torch.randn(*leading, length, 2 * dim, dtype=torch.float64)[..., :dim]

    inputs = tensor(queries, head_dim), tensor(keys, head_dim), tensor(keys, value_dim)
    out = seqkern.scaled_dot_product_attention(*inputs, is_causal=is_causal, scale=scale)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*inputs, is_causal=is_causal, scale=scale))


@pytest.mark.parametrize("kv", [(6, 6), (2, 2), (1, 1), (2, 3), (6, 1)], ids=str)
def test_enable_gqa_means_what_torch_means(kv):
    query = torch.randn(2, 6, 5, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, heads, 7, 8, dtype=torch.float64, requires_grad=True) for heads in kv)
    ours, theirs = (
        function(query, key, value, is_causal=True, enable_gqa=True)
        for function in (seqkern.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(out.sin().sum(), (query, key, value)) for out in (ours, theirs)]
    torch.testing.assert_close(*grads)


def test_inputs_are_not_modified_and_every_output_is_written(isa, dtype):
    for shape in ({"queries": 150, "keys": 70}, {"queries": 70, "keys": 150}, {"queries": 1, "keys": 63}):
        for causal, align in ((False, "lower_right"), (True, "lower_right"), (True, "upper_left")):
            inputs = qkv(**shape, kv_heads=2, value_dim=5, dtype=dtype)
            before = [t.clone() for t in inputs]
            with poison():
                out, lse, *grads = everything(inputs, causal=causal, causal_align=align)
            assert all(t.isfinite().all() for t in (out, *grads))
            assert not lse.isnan().any()
            assert equal(before, inputs)


# ---- determinism --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{"heads": 1, "batch": 1}, {"heads": 6, "kv_heads": 2}], ids=["one head", "groups"])
@pytest.mark.parametrize("causal", [True, False])
def test_same_bits_on_any_number_of_threads(shape, causal, isa):
    """The blocks of queries take turns at the gradients of a key block: in one order, whoever computes them."""
    inputs = qkv(700, 450, head_dim=33, **shape)
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2, 3, 8, 2, 8):
            torch.set_num_threads(count)
            runs.append(everything(inputs, causal=causal))
    finally:
        torch.set_num_threads(threads)
    assert all(equal(runs[0], other) for other in runs[1:])


def test_a_head_does_not_see_the_batch(isa):
    inputs = qkv(150, batch=3, heads=4, kv_heads=2)
    alone = everything([inputs[0][1:2, 2:], inputs[1][1:2, 1:], inputs[2][1:2, 1:]], causal=True)
    together = everything(inputs, causal=True)
    queries, keys = (slice(1, 2), slice(2, None)), (slice(1, 2), slice(1, None))
    assert equal(alone, [t[at] for t, at in zip(together, (queries, queries, queries, keys, keys), strict=True)])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_grows_with_the_length_alone():
    """8192 x 8192 scores would take 256 MB; inputs, output and gradients are 2 MB each."""
    source = """
import re, torch, seqkern
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024
inputs = [torch.randn(1, 1, 8192, 64, requires_grad=True) for _ in range(3)]
seqkern.scaled_dot_product_attention(*(t[:, :, :300] for t in inputs), is_causal=True).sum().backward()
open("/proc/self/clear_refs", "w").write("5")
before = peak()
seqkern.scaled_dot_product_attention(*inputs, is_causal=True).sum().backward()
assert peak() - before < 24, peak() - before
"""
    subprocess.run([sys.executable, "-c", source], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_of_higher_derivatives_grows_with_the_length_alone():
    """The formula at once takes 170 MB (forward mode) to 380 MB (double backward); the scores of a block take 1 MB."""
    source = """
import re, torch, seqkern
from torch.autograd import forward_ad
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024
def work(inputs):
    out = seqkern.attention(*inputs, causal=True)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
    with forward_ad.dual_level():
        seqkern.attention(*(forward_ad.make_dual(t.detach(), t.detach().cos()) for t in inputs), causal=True)
inputs = [torch.randn(1, 1, 2500, 8, requires_grad=True) for _ in range(3)]
work([t[:, :, :300].detach().requires_grad_() for t in inputs])
open("/proc/self/clear_refs", "w").write("5")
before = peak()
work(inputs)
assert peak() - before < 150, peak() - before
"""
    subprocess.run([sys.executable, "-c", source], check=True)


# ---- derivatives --------------------------------------------------------------------------------------------------


OPTIONS = [{}, {"causal": True}, {"causal": True, "causal_align": "upper_left"}]


def small(**options):
    inputs = qkv(3, 2, batch=1, heads=2, kv_heads=1, head_dim=2, value_dim=3, dtype=torch.float64, requires_grad=True)

    def function(query, key, value):
        out, lse = seqkern.attention(query, key, value, return_lse=True, **options)
        return out, lse.masked_fill(lse.isinf(), 0)

    return function, inputs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options, isa):
    assert torch.autograd.gradcheck(*small(**options), check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradgradcheck(options):
    assert torch.autograd.gradgradcheck(*small(**options), check_fwd_over_rev=True)


def test_gradients_beyond_one_block():
    """Finite differences along one direction, over several blocks of queries and keys; the second derivative too."""
    inputs = qkv(150, 140, batch=1, heads=2, kv_heads=1, dtype=torch.float64, requires_grad=True)
    directions = [torch.randn_like(t) for t in inputs]

    def loss(step):
        out, lse = seqkern.attention(*(t + step * d for t, d in zip(inputs, directions, strict=True)), return_lse=True)
        return out.sin().sum() + lse.square().sum()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, step)
    assert torch.autograd.gradgradcheck(loss, step)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=["query", "key", "value", "query and value"])
def test_gradients_only_for_what_needs_them(wanted):
    inputs = qkv(dtype=torch.float64)
    for i in wanted:
        inputs[i].requires_grad_()
    leaves = [inputs[i] for i in wanted]
    ours, theirs = (
        torch.autograd.grad(function(*inputs).square().sum(), leaves)
        for function in (seqkern.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, theirs)


def test_gradient_of_the_log_sum_exp_alone(isa):
    inputs = qkv(70, 130, kv_heads=2, dtype=torch.float64, requires_grad=True)
    grads = []
    for attention in (seqkern.attention, reference.attention):
        options = {"return_lse": True} if attention is seqkern.attention else {}
        grads.append(torch.autograd.grad(attention(*inputs, **options)[1].sin().sum(), inputs[:2]))
    torch.testing.assert_close(*grads)


def test_functional_transforms():
    inputs = [t.requires_grad_(False) for t in qkv(4, 3, batch=3, heads=2, dtype=torch.float64)]

    def loss(attention):
        return lambda q, k, v: attention(q, k, v, is_causal=True).square().sum().sin()

    def by_formula(q, k, v, is_causal):
        rank = q.dim()
        inputs = (t[(None,) * (4 - rank)] for t in (q, k, v))
        return reference.attention(*inputs, right=0 if is_causal else -1)[0].reshape(q.shape)

    ours, theirs = loss(seqkern.scaled_dot_product_attention), loss(by_formula)
    for transform in (
        lambda f: torch.func.vmap(f),
        lambda f: lambda q, k, v: torch.func.vmap(f, in_dims=(0, None, 0))(q, k[0], v),
        lambda f: lambda q, k, v: torch.func.vmap(f, in_dims=(0, None, 1))(q, k[0], v.movedim(0, 1)),
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1, 2))),
        lambda f: lambda q, k, v: torch.func.hessian(f)(q[0], k[0], v[0]),
        lambda f: lambda q, k, v: torch.func.jvp(lambda q, v: f(q, k, v), (q, v), (q.cos(), v.sin())),
        lambda f: lambda q, k, v: torch.func.jacrev(torch.func.jacrev(f))(q[0], k[0], v[0]),
    ):
        torch.testing.assert_close(transform(ours)(*inputs), transform(theirs)(*inputs))


def test_no_samples_and_no_heads():
    none = torch.empty(0, 2, 4, 5, 8)
    assert torch.func.vmap(seqkern.attention)(none, none, none).shape == none.shape
    query, value = torch.empty(2, 0, 5, 8), torch.randn(2, 2, 5, 3)
    output = seqkern.scaled_dot_product_attention(query, query, value, enable_gqa=True)
    assert output.shape == (2, 0, 5, 3)


# ---- torch's machinery --------------------------------------------------------------------------------------------

OPCHECK_INPUTS = {
    "grouped heads": lambda: qkv(5, 6, kv_heads=2, value_dim=3),
    "heads last": lambda: [t.transpose(1, 2) for t in qkv(4)],
    "transposed": lambda: [t.mT for t in qkv(8)],
    "no batch": lambda: qkv(batch=0),
    "no keys": lambda: [torch.randn(2, 4, 5, 8), torch.randn(2, 4, 0, 8), torch.randn(2, 4, 0, 8)],
}


@pytest.mark.parametrize("make", OPCHECK_INPUTS.values(), ids=OPCHECK_INPUTS)
def test_opcheck(make):
    inputs = make()
    numbers = (inputs[0].shape[2], inputs[1].shape[2], 1, False, -1, 0, 0.5, 0.0, 0.0)
    arguments = (*inputs, *[None] * 7, *numbers)
    torch.library.opcheck(torch.ops.seqkern.attention_fwd.default, arguments)
    out, lse = torch.ops.seqkern.attention_fwd(*arguments)
    for grad, grad_lse in ((torch.randn_like(out), None), (torch.ones(()).expand(out.shape), torch.ones_like(lse))):
        arguments = (grad, grad_lse, *inputs, out, lse, *[None] * 6, *numbers, False, False)
        torch.library.opcheck(torch.ops.seqkern.attention_bwd.default, arguments)


def test_compile_fullgraph(compilation):
    def function(query, key, value):
        out, lse = seqkern.attention(query, key, value, causal=True, return_lse=True)
        return seqkern.scaled_dot_product_attention(out, key, value, is_causal=True, enable_gqa=True) + lse[..., None]

    compiled = torch.compile(function, **compilation)
    inputs = qkv(5, 9, kv_heads=2, requires_grad=True)
    output, expected = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


class Decoder(torch.nn.Module):
    def forward(self, query, key, value):
        return seqkern.attention(query, key, value, causal=True)


def test_compile_once_for_every_length():
    """Decoding: the diagonal, Nk - Nq, moves with every token and must not be a constant of the graph."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(Decoder(), fullgraph=True, dynamic=True, backend=backend)
    for keys in (7, 8, 20):
        inputs = qkv(2, keys)
        torch.testing.assert_close(compiled(*inputs), Decoder()(*inputs))
    assert len(graphs) == 1


def test_export_keeps_one_node():
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(Decoder(), tuple(qkv(2, 7)), dynamic_shapes=({}, {2: length}, {2: length}))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.seqkern.attention_fwd.default) == 1
    inputs = qkv(2, 11)
    assert torch.equal(program.module()(*inputs), Decoder()(*inputs))


def test_autocast_as_torch():
    inputs = qkv()
    mixed = [inputs[0], inputs[1].bfloat16(), inputs[2].half()]
    with torch.autocast("cpu", torch.bfloat16):
        for arguments in (inputs, mixed, [t.double() for t in inputs]):
            ours = seqkern.scaled_dot_product_attention(*arguments)
            theirs = F.scaled_dot_product_attention(*arguments)
            assert ours.dtype == theirs.dtype == seqkern.attention(*arguments).dtype
            cast = [t.to(theirs.dtype) for t in arguments]
            assert torch.equal(ours, seqkern.scaled_dot_product_attention(*cast))
    with pytest.raises(TypeError, match="key must have the query's dtype"):
        seqkern.scaled_dot_product_attention(*mixed)


def test_cost_counts_visible_scores():
    full = cost(2, 4, 10, 20, 8, torch.float32)
    assert full.flops == 2 * 2 * 4 * 10 * 20 * (8 + 8)
    assert full.bytes == 4 * (2 * 4 * (2 * 10 + 2 * 20) * 8 + 2 * 4 * 10)
    causal = cost(1, 1, 4, 6, 8, torch.float32, value_dim=16, causal=True, diagonal=2)
    assert causal.flops == 2 * (3 + 4 + 5 + 6) * (8 + 16)
    assert cost(2, 4, 10, 20, 8, torch.bfloat16, backward=True).flops == full.flops * 5 // 2


# ---- backends and errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_backends_agree(backend, dtype, passes):
    passes(verify("attention", dtype, backend=backend))


Q = torch.randn(2, 4, 5, 8)
sdpa, attention = seqkern.scaled_dot_product_attention, seqkern.attention
LEARNT = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "query must be a tensor, got list", lambda: sdpa([1.0], Q, Q)),
        (TypeError, "attention: value must be a tensor, got NoneType", lambda: attention(Q, Q, None)),
        (TypeError, "query must be float64.*got torch.int64", lambda: sdpa(Q.long(), Q.long(), Q.long())),
        (TypeError, "query must be .*complex64", lambda: sdpa(*[Q.to(torch.complex64)] * 3)),
        (TypeError, "value must have the query's dtype torch.float32, got torch.float64",
         lambda: sdpa(Q, Q, Q.double())),
        (ValueError, r"key must be on the query's device cpu, got meta", lambda: sdpa(Q, Q.to("meta"), Q)),
        (ValueError, r"query must have at least 2 dimensions, got shape \(8,\)", lambda: sdpa(Q[0, 0, 0], Q, Q)),
        (ValueError, r"key must have at least 3 dimensions", lambda: sdpa(Q, Q[0, 0], Q, enable_gqa=True)),
        (ValueError, r"key must have 4 dimensions, got shape \(4, 5, 8\)", lambda: attention(Q, Q[0], Q)),
        (ValueError, r"key must have the query's head dimension 8.*\(2, 4, 5, 7\)", lambda: sdpa(Q, Q[..., :7], Q)),
        (ValueError, r"value must have the key's length 5.*\(2, 4, 4, 8\)", lambda: attention(Q, Q, Q[:, :, :4])),
        (ValueError, r"leading dimensions must broadcast.*query \(2, 4, 5, 8\), key \(2, 2, 5, 8\)",
         lambda: sdpa(Q, Q[:, :2], Q)),
        (ValueError, "key must have the query's batch size 2, got", lambda: attention(Q, Q[:1], Q)),
        (ValueError, "value must have the key's 4 heads, got 2", lambda: attention(Q, Q, Q[:, :2])),
        (ValueError, "the 4 heads of query must be a multiple of the 3 heads of key",
         lambda: attention(Q, Q[:, :3], Q[:, :3])),
        (ValueError, "the 2 heads of query must be a multiple of the 4", lambda: sdpa(Q[:, :2], Q, Q, enable_gqa=True)),
        (ValueError, "causal_align must be .*got 'left'", lambda: attention(Q, Q, Q, causal_align="left")),
        (ValueError, "dropout_p must be a probability.*got 1.5", lambda: sdpa(Q, Q, Q, dropout_p=1.5)),
        (ValueError, "dropout_p must be a probability.*got nan", lambda: attention(Q, Q, Q, dropout_p=math.nan)),
        (TypeError, "dropout_p must be a probability, got None", lambda: sdpa(Q, Q, Q, dropout_p=None)),
        (TypeError, "scale must be .*, got one that wants a gradient; multiply", lambda: sdpa(Q, Q, Q, scale=LEARNT)),
        (TypeError, r"scale must be .*, got shape \(1,\); multiply", lambda: sdpa(Q, Q, Q, scale=torch.ones(1))),
        (TypeError, "scale must be a number or None, got '1'", lambda: attention(Q, Q, Q, scale="1")),
        (ValueError, "scale must be a finite float32 number, got 1e\\+39", lambda: attention(Q, Q, Q, scale=1e39)),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, words, call):
    with pytest.raises(error, match=f"attention: .*{words}|^{words}"):
        call()


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("query must have 4 dimensions, got 3", (Q[0], Q, Q)),
        ("query must be float64", (Q.int(), Q, Q)),
        ("key must have size 8 in dimension 3, got 7", (Q, Q[..., :7], Q)),
        ("value must have size 5 in dimension 2, got 4", (Q, Q, Q[:, :, :4])),
        ("the 4 heads of query must be a multiple of the 3", (Q, Q[:, :3], Q[:, :3])),
    ],
)
def test_the_op_itself_guards_its_pointers(words, arguments):
    with pytest.raises(RuntimeError, match=f"attention_fwd: {words}"):
        torch.ops.seqkern.attention_fwd(*arguments, *[None] * 7, 5, 5, 0, False, -1, 0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("diagonal", [-(2**63), -1000, 1000, 2**63 - 1])
def test_any_diagonal(diagonal, isa):
    query, key, value = qkv(70, 140)
    numbers = (70, 140, diagonal, False, -1, 0, 0.5, 0.0, 0.0)
    out, _ = torch.ops.seqkern.attention_fwd(query, key, value, *[None] * 7, *numbers)
    expected = seqkern.attention(query, key, value, scale=0.5) if diagonal > 0 else torch.zeros_like(query)
    assert torch.equal(out, expected)
