"""Layer norm and RMS norm, alone and after a residual addition with dropout.

Every kernel against the float64 oracle, its gradients of every order, and torch's interfaces.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import seqkern
from seqkern import _direct, _library, reference
from seqkern.ops import layer_norm as layer_norm_ops
from seqkern.testing import add_layer_norm_case, check_case, layer_norm_case, poison, verify

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NORMS = ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"]


def parameters(columns, dtype=torch.float64, **options):
    return [torch.randn(columns, dtype=dtype, **options) for _ in range(2)]


@pytest.fixture(params=["direct", "op"])
def way(request, monkeypatch):
    """The kernel called with addresses, as small calls are, and through the dispatcher, as the others are."""
    if request.param == "op":
        monkeypatch.setattr(_direct, "enabled", False)
    return request.param


# ---- accuracy -----------------------------------------------------------------------------------------------------


# In float64 torch rounds a row of one element just as the oracle does, and its gradient cancels; gradcheck covers it.
def shapes_and_dtypes(shapes):
    some = [(s, d) for s in shapes for d in DTYPES if s[1] > 1 or d != torch.float64]
    return pytest.mark.parametrize(("shape", "dtype"), some, ids=lambda v: str(v).removeprefix("torch."))


@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
@shapes_and_dtypes([(rows, columns) for rows in (1, 65) for columns in (1, 3, 17, 63, 65, 127, 257, 1024)])
def test_error_rule(shape, centred, dtype, isa, way, passes):
    passes(check_case(layer_norm_case(*shape, centred=centred), dtype))


@pytest.mark.parametrize("centred", [True, False], ids=["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@shapes_and_dtypes([(1, 1), (65, 3), (9, 63), (1, 65), (65, 257), (3, 1024)])
def test_error_rule_with_residual(shape, centred, dropout_p, dtype, isa, way, passes):
    passes(check_case(add_layer_norm_case(*shape, dropout_p=dropout_p, centred=centred), dtype))


@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(37, 5), (37, 64), (37, 130), (600, 520), (130, 2100)],
)
@pytest.mark.parametrize("added", [False, True], ids=["alone", "with residual"])
def test_both_ways_give_the_same_bits(rows, columns, centred, added, dtype, isa, monkeypatch):
    if added:
        case = add_layer_norm_case(rows, columns, dropout_p=0.0, centred=centred)
    else:
        case = layer_norm_case(rows, columns, centred=centred)
    inputs = {k: v.to(dtype).requires_grad_() for k, v in case.inputs(torch.Generator().manual_seed(0)).items()}

    def everything():
        outputs = case.ours(**inputs)
        outputs = outputs if added else (outputs,)
        loss = sum(output.sin().sum() for output in outputs)
        return outputs[0].grad_fn.name(), [*outputs, *torch.autograd.grad(loss, list(inputs.values()))]

    name, direct = everything()
    monkeypatch.setattr(_direct, "enabled", False)
    other, op = everything()
    assert ("Node" in name, "Node" in other) == (bool(_direct.FRONTS), False)
    assert all(torch.equal(a, b) for a, b in zip(direct, op, strict=True))


def test_bfloat16_parameter_gradients(isa):
    """Summed in float32 and rounded once: torch, which adds up bfloat16, is ten times as far off."""
    for report in check_case(layer_norm_case(4096, 96), torch.bfloat16):
        if report.name in ("grad weight", "grad bias"):
            assert report.relative_l2 < 2e-3, report


@pytest.mark.parametrize("std", [1.0, 0.01])
@pytest.mark.parametrize("mean", [0.0, 1e2, 1e3, 1e4])
def test_exact_at_any_mean(mean, std, isa):
    """A single float mean would lose up to six digits here; the bound is on the relative L2 error, torch's is 3e-2."""
    for report in check_case(layer_norm_case(64, 1024, mean=mean, std=std), torch.float32):
        assert report.relative_l2 < 3e-7, report


@pytest.mark.parametrize("columns", [64, 100, 1000])
@pytest.mark.parametrize("outlier", [1e3, -1e6])
def test_exact_where_a_row_begins_with_outliers(columns, outlier, isa, passes):
    """The first elements are the first guess at the mean: here it is far off."""
    case = layer_norm_case(9, columns)

    def make(generator):
        tensors = case.inputs(generator)
        tensors["input"][:, :40] += outlier
        return tensors

    passes(check_case(replace(case, inputs=make), torch.float32))


@pytest.mark.parametrize("value", [0.0, 7.0, -1e4, 3e38, 1e-17, 1e-20])
@pytest.mark.parametrize("columns", [37, 41, 47, 55, 61])  # 1 / columns is not exact: a mean by it would not be, either
def test_constant_rows_are_all_bias(value, columns, isa, way):
    weight, bias = parameters(columns, torch.float32)
    output = seqkern.layer_norm(torch.full((3, columns), value), (columns,), weight, bias)
    assert torch.equal(output, bias.expand(3, columns))
    assert not seqkern.layer_norm(torch.full((3, columns), value), (columns,)).any()


@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_extreme_scales(scale, isa, passes):
    case = layer_norm_case(9, 130, std=scale)
    passes([r for r in check_case(case, torch.float32) if r.name != "grad input" or scale > 1])


def test_bad_numbers_stay_in_their_row(isa, way):
    x = torch.randn(4, 33)
    clean = seqkern.layer_norm(x, (33,))
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    output = seqkern.layer_norm(x, (33,))
    assert output[1].isnan().all()
    assert output[2].isnan().all()
    assert torch.equal(output[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("columns", [5, 45, 300])
def test_sum_has_the_bits_of_an_addition(columns, dtype, isa):
    """Rounded to nearest, ties to even: the error rule would let a cut sum pass."""
    x, residual = torch.randn(2, 40, columns).to(dtype)
    total = seqkern.add_layer_norm(x, residual, (columns,))[1]
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_of_any_bits_stays_nan(dtype, isa):
    """Also one that rounding would carry over into infinity's or zero's place."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF, 0x7FC00000], dtype=torch.int32)
    weight = torch.ones(45)
    weight[::10] = bits.view(torch.float32)
    output = seqkern.layer_norm(torch.randn(3, 45).to(dtype), (45,), weight)
    assert torch.equal(output.isnan(), weight.isnan().expand(3, 45))


def test_interpreted_triton(interpreted):
    interpreted(
        "-c",
        """
import torch
from seqkern.testing import add_layer_norm_case, check_case, layer_norm_case, poison
import seqkern
with poison(), seqkern.use_backend("triton"):
    for rows, columns in [(1, 1), (3, 63), (5, 257), (2, 1536)]:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            if dtype == torch.float64 and columns > 63: continue
            cases = [layer_norm_case(rows, columns, centred=False)] if columns != 1 else []
            for p, centred in ((0.0, True), (0.3, True), (0.0, False), (0.3, False)):
                cases.append(add_layer_norm_case(rows, columns, dropout_p=p, centred=centred))
            for case in cases:
                for report in check_case(case, dtype):
                    assert report.passed, (rows, columns, dtype, str(report))
        for mean, std in [(0.0, 1.0), (1e4, 0.01)]:
            for dtype in (torch.float32, torch.float16):
                if dtype == torch.float16 and mean: continue
                for report in check_case(layer_norm_case(rows, columns, mean=mean, std=std), dtype):
                    assert report.passed, (rows, columns, mean, std, dtype, str(report))
""",
    )


# ---- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 5)])
def test_empty(shape, isa, way):
    x = torch.randn(shape, requires_grad=True)
    weight, bias = parameters(shape[-1], torch.float32, requires_grad=True)
    output = seqkern.layer_norm(x, shape[-1:], weight, bias)
    assert output.shape == shape
    grads = torch.autograd.grad(output.sum(), (x, weight, bias))
    assert [g.shape for g in grads] == [x.shape, weight.shape, bias.shape]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 40)[::2, :33],
        lambda: torch.randn(33, 6).t(),
        lambda: torch.randn(1, 33).expand(6, 33),
        lambda: torch.randn(6, 1).expand(6, 33),
        lambda: torch.randn(4, 6, 33).transpose(0, 1),
    ],
    ids=["strided rows", "transposed", "expanded rows", "expanded columns", "permuted batch"],
)
def test_layouts(make, isa):
    x = make()
    weight, bias = parameters(33, torch.float32)
    expected = seqkern.layer_norm(x.contiguous(), (33,), weight, bias)
    assert torch.equal(seqkern.layer_norm(x, (33,), weight, bias), expected)


def test_strided_gradients(isa):
    x, (weight, bias) = torch.randn(5, 33, requires_grad=True), parameters(33, torch.float32, requires_grad=True)
    output = seqkern.layer_norm(x, (33,), weight, bias)
    for grad in (torch.ones(()).expand(5, 33), torch.randn(33, 5).t(), torch.randn(5, 66)[:, ::2]):
        strided = torch.autograd.grad(output, (x, weight, bias), grad, retain_graph=True)
        dense = torch.autograd.grad(output, (x, weight, bias), grad.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))


@given(
    batch=st.lists(st.integers(0, 4), max_size=3),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    permute=st.booleans(),
    with_weight=st.booleans(),
    with_bias=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_means_what_torch_means(batch, shape, permute, with_weight, with_bias):
    x = torch.randn(*batch, *shape, dtype=torch.float64)
    if permute and len(batch) > 1:
        x = x.transpose(0, len(batch) - 1)
    weight = torch.randn(shape, dtype=torch.float64) if with_weight else None
    bias = torch.randn(shape, dtype=torch.float64) if with_bias else None
    output = seqkern.layer_norm(x, shape, weight, bias)
    torch.testing.assert_close(output, F.layer_norm(x, shape, weight, bias))


def test_parameters_in_another_dtype(isa):
    x = torch.randn(7, 33, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = parameters(33, torch.float32, requires_grad=True)
    output = seqkern.layer_norm(x, (33,), weight, bias)
    grads = torch.autograd.grad(output.sum(), (x, weight, bias))
    assert [output.dtype, *(g.dtype for g in grads)] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    exact = F.layer_norm(x.double(), (33,), weight.double(), bias.double())
    assert torch.equal(output, exact.to(torch.bfloat16))


def test_parameter_gradients_are_rounded_to_their_own_dtype(isa):
    """70000 fits a float32 bias but not a float16 weight; 1007.8125 would lose its end in bfloat16."""
    x, bias = torch.randn(70000, 2), torch.zeros(2, requires_grad=True)
    seqkern.layer_norm(x, (2,), torch.ones(2, dtype=torch.float16), bias).sum().backward()
    assert bias.grad.tolist() == [70000.0, 70000.0]
    bias = torch.zeros(2, requires_grad=True)
    output = seqkern.layer_norm(torch.randn(1000, 2, dtype=torch.bfloat16), (2,), None, bias)
    output.backward(torch.full_like(output, 1.0078125))
    assert bias.grad.tolist() == [1007.8125, 1007.8125]


@pytest.mark.parametrize("outlier", [2e18, 3e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_few_huge_numbers(outlier, dtype, isa, way, passes):
    """Their squares overflow, and beside them the others' are rounded away."""
    x = torch.randn(5, 4096)
    x[:, :3] = outlier
    x[1, :64] = outlier
    x = x.to(dtype)
    for ours, centred in ((seqkern.layer_norm, True), (seqkern.rms_norm, False)):
        exact = reference.layer_norm(x.double(), None, None, 1e-5, centred)
        error = (ours(x, (4096,), eps=1e-5).double() - exact).abs().max()
        assert error < 64 * torch.finfo(dtype).eps, error


@pytest.mark.parametrize("columns", [4097, 10**6])
def test_long_rows(columns, isa, passes):
    """Summed by levels: one sum a lane would lose two digits here."""
    passes(check_case(layer_norm_case(2, columns), torch.float32))
    passes(check_case(layer_norm_case(2, columns, centred=False), torch.float32))
    constant = torch.full((2, columns), 3.7)
    exact = reference.layer_norm(constant.double(), None, None, 1e-5, False)
    assert (seqkern.rms_norm(constant, (columns,), eps=1e-5).double() - exact).abs().max() < 1.1e-6


@pytest.mark.parametrize("columns", [1, 4])
def test_many_rows(columns, isa):
    x = torch.ones(10**6, columns)
    weight = torch.ones(columns, requires_grad=True)
    seqkern.rms_norm(x, (columns,), weight, 1e-5).backward(torch.full_like(x, 0.1))
    exact = 10**6 * torch.tensor(0.1).double() / (1 + 1e-5) ** 0.5
    assert ((weight.grad.double() - exact) / exact).abs().max() < 4e-6


# ---- dropout ------------------------------------------------------------------------------------------------------


def test_philox_known_answers():
    """Random123's vectors for counter and key zero, in 7 and 10 rounds, and for all ones in 10."""
    zero, ones = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    for word, rounds, expected in (
        (zero, 7, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (zero, 10, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (ones, 10, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        words = reference.dropout_words([word] * 4, [word] * 2, rounds)
        assert [int(w) for w in words] == expected


@pytest.mark.parametrize("columns", [1, 5, 64, 130])
@pytest.mark.parametrize("seed", [0, 3, -1, 2**62 + 12345])
def test_every_tier_drops_the_same_elements(columns, seed, dtype, isa):
    input, residual = torch.ones(37, columns, dtype=dtype), torch.zeros(37, columns, dtype=dtype)
    _, total = seqkern.add_layer_norm(input, residual, (columns,), dropout_p=0.5, seed=seed)
    keep = reference.keep_mask(torch.tensor(seed), 0.5, 37, columns)
    assert torch.equal(total, torch.where(keep, 2.0, 0.0).to(dtype))


def test_rows_and_columns_draw_their_own_numbers():
    keep = reference.keep_mask(torch.tensor(11), 0.25, 1024, 1000).double()
    assert abs(keep.mean() - 0.75) < 4 * (0.25 * 0.75 / keep.numel()) ** 0.5
    for dim in (0, 1):
        sigma = (0.25 * 0.75 / keep.shape[dim]) ** 0.5
        assert (keep.mean(dim) - 0.75).abs().max() < 5 * sigma
        shifted = (keep * keep.roll(1, dim)).mean()  # neighbours are independent
        assert abs(shifted - 0.75**2) < 5 * (0.75**2 * (1 - 0.75**2) / keep.numel()) ** 0.5


def test_dropout_follows_manual_seed_training_and_probability():
    x, r = torch.randn(5, 33), torch.randn(5, 33)

    def run(**options):
        return seqkern.add_layer_norm(x, r, (33,), **options)[1]

    torch.manual_seed(3)
    first, second = run(dropout_p=0.5), run(dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, run(dropout_p=0.5))
    assert not torch.equal(first, second)
    assert torch.equal(run(dropout_p=0.5, training=False), x + r)
    assert torch.equal(run(dropout_p=0.0), x + r)
    assert torch.equal(run(dropout_p=1.0), r)
    assert torch.equal(run(dropout_p=0.5, seed=7), run(dropout_p=0.5, seed=torch.tensor([7])))


# ---- what the two results share ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8), (700, 8), (2, 20000, 8)], ids=str)
def test_input_and_residual_have_gradients_of_their_own(shape, way):
    """Users scale gradients in place, and add up several."""
    a, b = (torch.nn.Parameter(torch.randn(shape)) for _ in range(2))
    for _ in range(2):
        seqkern.add_layer_norm(a, b, (8,))[1].sum().backward()
    assert a.grad.data_ptr() != b.grad.data_ptr()
    assert torch.equal(a.grad, torch.full(shape, 2.0))
    assert torch.equal(b.grad, a.grad)
    a.grad = b.grad = None
    x = torch.randn(shape)
    (seqkern.add_layer_norm(a, b, (8,))[0] * x).sum().backward()
    assert a.grad.data_ptr() != b.grad.data_ptr()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_sum_alone(dropout_p, way):
    """Nothing of the norm reaches the gradients then, not even what is not finite in it."""
    x, r, weight = torch.ones(3, 8, requires_grad=True), torch.ones(3, 8, requires_grad=True), torch.ones(8)
    weight.requires_grad_()
    _, total = seqkern.add_layer_norm(x, r, (8,), weight, eps=0.0, dropout_p=dropout_p, seed=1)
    if dropout_p == 0:
        total.add_(1)
    total.sum().backward()
    assert torch.equal(r.grad, torch.ones(3, 8))
    keep = reference.keep_mask(torch.tensor(1), dropout_p, 3, 8) if dropout_p else torch.ones(3, 8)
    assert torch.equal(x.grad, keep / (1 - dropout_p))
    assert weight.grad is None
    output, total = seqkern.add_layer_norm(x.detach(), r.detach(), (8,), weight)
    assert (output.requires_grad, total.requires_grad) == (True, False)


@pytest.mark.parametrize("rows", [4, 20000])
def test_results_can_be_changed_in_place(rows, way):
    x, p = torch.randn(rows, 2, 8), torch.ones(8, requires_grad=True)
    with torch.no_grad():
        results = [seqkern.layer_norm(x, (8,)), *seqkern.add_layer_norm(x, x, (8,))]
    for result in results:
        assert result._base is None
        result.add_(p)


def test_freed_memory_raises():
    x, weight = torch.randn(4, 8), torch.ones(8)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="layer_norm_fwd: input has no memory"):
        seqkern.layer_norm(x, (8,))
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="layer_norm_fwd: weight has no memory"):
        seqkern.layer_norm(X, (8,), weight)
    with pytest.raises(RuntimeError, match="layer_norm_fwd: residual has no memory"):
        seqkern.add_layer_norm(X, x, (8,))


# ---- determinism --------------------------------------------------------------------------------------------------


def test_same_bits_on_any_number_of_threads(isa):
    case = replace(layer_norm_case(333, 130), torch=None)
    inputs = {k: v.float().requires_grad_() for k, v in case.inputs(torch.Generator().manual_seed(0)).items()}

    def everything():
        output = case.ours(**inputs)
        return [output, *torch.autograd.grad(output, list(inputs.values()), torch.cos(output.detach()))]

    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            runs.append(everything())
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_a_row_does_not_see_the_batch(isa):
    x = torch.randn(65, 130)
    assert torch.equal(seqkern.layer_norm(x, (130,))[17:18], seqkern.layer_norm(x[17:18], (130,)))


# ---- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
def test_gradcheck(affine, isa, way):
    x = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, *(parameters(5, requires_grad=True) if affine else ()))

    def function(x, *affine):
        return seqkern.layer_norm(x, (5,), *affine)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("add", [seqkern.add_layer_norm, seqkern.add_rms_norm])
def test_gradcheck_with_residual(add, dropout_p, isa, way):
    x, r = (torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = parameters(5, requires_grad=True)
    inputs = (x, r, weight, bias) if add is seqkern.add_layer_norm else (x, r, weight)
    options = {"dropout_p": dropout_p, "seed": 5}

    def function(x, r, *affine):
        return add(x, r, (5,), *affine, **options)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=dropout_p == 0)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)
    # The normalised result alone, as in a post-norm block, and the sum alone.
    for i in range(2):
        assert torch.autograd.gradcheck(lambda *t, i=i: function(*t)[i], inputs)


def test_rms_gradcheck(isa, way):
    inputs = (torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True), parameters(5, requires_grad=True)[0])

    def function(x, w):
        return seqkern.rms_norm(x, (5,), w)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=["input", "weight", "bias", "input and bias"])
def test_gradients_only_for_what_needs_them(wanted, way):
    inputs = [torch.randn(4, 9, dtype=torch.float64), *parameters(9)]
    for i in wanted:
        inputs[i].requires_grad_()
    leaves = [inputs[i] for i in wanted]
    ours, theirs = (
        torch.autograd.grad(function(inputs[0], (9,), inputs[1], inputs[2]).square().sum(), leaves)
        for function in (seqkern.layer_norm, F.layer_norm)
    )
    torch.testing.assert_close(ours, theirs)


def test_no_samples():
    x, weight = torch.empty(0, 3, 7), torch.ones(7)
    assert torch.func.vmap(lambda x: seqkern.layer_norm(x, (7,), weight))(x).shape == x.shape
    each = torch.func.vmap(lambda x, w: seqkern.layer_norm(x, (7,), w))
    assert each(x, weight.expand(0, 7)).shape == x.shape


def test_functional_transforms():
    x, (weight, bias) = torch.randn(4, 3, 7, dtype=torch.float64), parameters(7)

    def loss(norm):
        return lambda x, w, b: norm(x, (7,), w, b).square().sum().sin()

    ours, theirs = loss(seqkern.layer_norm), loss(F.layer_norm)
    for transform in (
        lambda f: torch.func.vmap(f, in_dims=(0, None, None)),
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1, 2)), in_dims=(0, None, None)),
        lambda f: lambda x, w, b: torch.func.hessian(f)(x[0], w, b),
        lambda f: lambda x, w, b: torch.func.jvp(lambda x: f(x, w, b), (x,), (x.cos(),)),
        lambda f: lambda x, w, b: torch.func.vmap(f, in_dims=(0, 0, 0))(x, w.expand(4, 7), b.expand(4, 7)),
    ):
        torch.testing.assert_close(transform(ours)(x, weight, bias), transform(theirs)(x, weight, bias))


# ---- torch's machinery --------------------------------------------------------------------------------------------

ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OPCHECK_INPUTS = {
    "contiguous": lambda: torch.randn(3, 7),
    "strided": lambda: torch.randn(6, 9)[::2, :7],
    "transposed": lambda: torch.randn(7, 3).t(),
    "empty": lambda: torch.randn(0, 7),
}


@pytest.mark.parametrize("make", OPCHECK_INPUTS.values(), ids=OPCHECK_INPUTS)
def test_opcheck(make):
    x, (weight, bias), seed = make(), parameters(7, torch.float32), torch.tensor(5)
    forward, backward = torch.ops.seqkern.layer_norm_fwd.default, torch.ops.seqkern.layer_norm_bwd.default
    for arguments in (
        (x, None, weight, bias, None, 1e-5, 0.0, True, 0.0, False),
        (x, None, None, None, None, 1e-5, 0.0, False, 0.0, False),
        (x, make(), weight, None, None, 1e-5, 0.0, False, 1.0, True),
        (x, make(), weight, bias, seed, 1e-5, 0.3, True, 0.5, False),
    ):
        torch.library.opcheck(forward, arguments)
        _, total, mean, rstd = forward(*arguments)
        normalised = x if arguments[1] is None else total
        rest = (normalised, mean, rstd, arguments[2], arguments[4], *arguments[6:9])
        for grad in (make(), torch.ones(()).expand(x.shape)):
            for flags in ((True, True), (False, False)):
                # Traced, which takes longest, with either gradient and with either pair of flags.
                checks = ALL_CHECKS if (grad.stride() == (0, 0)) == flags[0] else ALL_CHECKS[:-1]
                arguments_of = (grad, None if arguments[1] is None else make(), *rest, *flags)
                torch.library.opcheck(backward, arguments_of, test_utils=checks)


def test_compile_fullgraph(compilation):
    inputs = [t.requires_grad_() for t in (torch.randn(4, 3, 7), *parameters(7, torch.float32))]
    compiled = torch.compile(lambda x, w, b: seqkern.layer_norm(x, (7,), w, b).sin(), **compilation)
    output = compiled(*inputs)
    expected = seqkern.layer_norm(inputs[0], (7,), *inputs[1:]).sin()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


def test_export_keeps_one_node():
    module = seqkern.nn.LayerNorm(7)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (torch.randn(4, 7),), dynamic_shapes=({0: batch},))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.seqkern.layer_norm_fwd.default in targets
    x = torch.randn(9, 7)
    assert torch.equal(program.module()(x), module(x))


@pytest.mark.parametrize("arguments", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_module_is_a_drop_in(arguments):
    theirs = torch.nn.LayerNorm((3, 7), eps=1e-3, **arguments)
    ours = seqkern.nn.LayerNorm((3, 7), eps=1e-3, **arguments)
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 3, 7)
    torch.testing.assert_close(ours(x), theirs(x))
    theirs.load_state_dict(ours.state_dict())
    assert isinstance(ours, torch.nn.LayerNorm)
    assert repr(ours) == repr(theirs)


def test_autocast_as_torch():
    x, (weight, bias) = torch.randn(4, 7), parameters(7, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert seqkern.layer_norm(x, (7,), weight, bias).dtype == F.layer_norm(x, (7,), weight, bias).dtype
        half = seqkern.layer_norm(x.bfloat16(), (7,), weight, bias)
        assert half.dtype == F.layer_norm(x.bfloat16(), (7,), weight, bias).dtype


@pytest.mark.parametrize("case", [layer_norm_case(9, 33), add_layer_norm_case(9, 33)], ids=["norm", "add"])
def test_inputs_are_not_modified_and_every_output_is_written(case, isa, dtype, way):
    inputs = {k: v.to(dtype).requires_grad_() for k, v in case.inputs(torch.Generator().manual_seed(0)).items()}
    before = {k: v.detach().clone() for k, v in inputs.items()}
    with poison():
        outputs = case.ours(**inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = torch.autograd.grad(sum(output.sum() for output in outputs), list(inputs.values()))
    assert all(t.isfinite().all() for t in (*outputs, *grads))
    assert all(torch.equal(before[k], inputs[k]) for k in inputs)


# ---- a number for the last dimension, and no residual yet ---------------------------------------------------------


@pytest.mark.parametrize("size", [8, np.int64(8), [8], torch.Size([8])], ids=repr)
def test_a_number_is_the_last_dimension(size):
    x, residual, (weight, bias) = torch.randn(4, 8), torch.randn(4, 8), parameters(8, torch.float32)
    assert torch.equal(seqkern.layer_norm(x, size, weight, bias), seqkern.layer_norm(x, (8,), weight, bias))
    assert torch.equal(seqkern.rms_norm(x, size, weight), seqkern.rms_norm(x, (8,), weight))
    for op in (seqkern.add_layer_norm, seqkern.add_rms_norm):
        for dropped in ({}, {"dropout_p": 0.5, "seed": 3}):
            for ours, theirs in zip(op(x, residual, size, **dropped), op(x, residual, (8,), **dropped), strict=True):
                assert torch.equal(ours, theirs)


def test_a_number_takes_the_short_way(monkeypatch):
    def never(*_):
        raise AssertionError("the dispatcher's way")

    monkeypatch.setattr(layer_norm_ops, "_norm", never)
    seqkern.layer_norm(torch.randn(4, 8), 8)
    seqkern.rms_norm(torch.randn(4, 8), 8)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("op", [seqkern.add_layer_norm, seqkern.add_rms_norm])
@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8), (8,), (0, 8)], ids=str)
def test_without_a_residual(op, shape, backend, dtype):
    x, weight = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(8, dtype=dtype)
    norm = seqkern.layer_norm if op is seqkern.add_layer_norm else seqkern.rms_norm
    with seqkern.use_backend(backend):
        output, total = op(x, None, (8,), weight)
        assert total is x
        assert torch.equal(output, norm(x, (8,), weight))
        for p in (0.5, 1.0):
            found = op(x, None, (8,), weight, dropout_p=p, seed=3)
            expected = op(x, torch.zeros_like(x), (8,), weight, dropout_p=p, seed=3)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)
            (ours,), (theirs,) = (torch.autograd.grad(a.sum() + b.sin().sum(), x) for a, b in (found, expected))
            assert torch.equal(ours, theirs)


def test_without_a_residual_derivatives_and_autocast():
    x, weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    for dropped in ({}, {"dropout_p": 0.4, "seed": 7}):
        function = functools.partial(seqkern.add_layer_norm, normalized_shape=5, weight=weight, **dropped)
        assert torch.autograd.gradcheck(lambda x: function(x, None), x, check_forward_ad=True)  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda x: function(x, None), x)  # noqa: B023
    with torch.autocast("cpu", torch.bfloat16):
        output, total = seqkern.add_rms_norm(x.bfloat16(), None, 5)
    assert output.dtype == total.dtype == torch.bfloat16
    rows = torch.randn(5, 8)
    jagged = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 2, 5]))
    output, total = seqkern.add_layer_norm(jagged, None, (8,))
    assert torch.equal(output.values(), seqkern.layer_norm(rows, (8,)))
    assert torch.equal(total.values(), rows)


@pytest.mark.parametrize("kind", [seqkern.nn.AddLayerNorm, seqkern.nn.AddRMSNorm])
def test_modules_without_a_residual(kind):
    x, norm = torch.randn(4, 8), kind(8, dropout=0.5)
    torch.manual_seed(1)
    output, total = norm(x)
    torch.manual_seed(1)
    expected = norm(x, torch.zeros_like(x))
    assert torch.equal(output, expected[0])
    assert torch.equal(total, expected[1])
    assert (total == 0).any()
    assert norm.eval()(x)[1] is x

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = norm, kind(8)

        def forward(self, x):
            y, residual = self.first(x)
            return self.second(y.sin(), residual)

    blocks = Blocks().eval()
    for traced in (torch.fx.symbolic_trace(blocks), torch.compile(blocks, backend="aot_eager", fullgraph=True)):
        for ours, theirs in zip(traced(x), blocks(x), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_a_number_and_without_a_residual(dynamic):
    torch._dynamo.reset()

    def function(x):
        y, total = seqkern.add_rms_norm(seqkern.layer_norm(x, x.shape[-1]), None, x.shape[-1])
        return y + seqkern.rms_norm(total, x.shape[-1])

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for shape in ((3, 8), (4, 6)):
        x = torch.randn(shape, requires_grad=True)
        torch.testing.assert_close(compiled(x), function(x))


# ---- backends and errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("op", NORMS)
def test_backends_agree(op, backend, dtype, passes):
    passes(verify(op, dtype, backend=backend))


X = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "input must be a tensor, got list", lambda: seqkern.layer_norm([1.0], (1,))),
        (TypeError, "input must be float64.*got torch.int64", lambda: seqkern.layer_norm(X.long(), (8,))),
        (TypeError, "input must be .*complex64", lambda: seqkern.layer_norm(X.to(torch.complex64), (8,))),
        (ValueError, r"layer_norm: .*normalized_shape = \(7,\).*got shape \(4, 8\)", lambda: seqkern.layer_norm(X, 7)),
        (ValueError, r"normalized_shape = \(7,\).*got shape \(4, 8\)", lambda: seqkern.layer_norm(X, (7,))),
        (ValueError, r"normalized_shape = \(\)", lambda: seqkern.layer_norm(X, ())),
        (ValueError, r"normalized_shape = \(2, 4, 8\)", lambda: seqkern.layer_norm(X, (2, 4, 8))),
        (ValueError, r"weight must have shape.*\(8,\), got \(7,\)", lambda: seqkern.layer_norm(X, (8,), torch.ones(7))),
        (ValueError, r"bias must have shape.*\(8,\), got \(1, 8\)",
         lambda: seqkern.layer_norm(X, (8,), None, torch.ones(1, 8))),
        (TypeError, "weight must be float64.*int32",
         lambda: seqkern.layer_norm(X, (8,), torch.ones(8, dtype=torch.int32))),
        (ValueError, "weight must be on the input's device cpu, got meta",
         lambda: seqkern.layer_norm(X, (8,), torch.ones(8, device="meta"))),
        (TypeError, "layer_norm: eps must be a number, got None", lambda: seqkern.layer_norm(X, (8,), eps=None)),
        (TypeError, "add_layer_norm: dropout_p must be a probability, got 'x'",
         lambda: seqkern.add_layer_norm(X, X, (8,), dropout_p="x")),
        (TypeError, "rms_norm: eps must be a number, got '1'", lambda: seqkern.rms_norm(X, (8,), eps="1")),
        (TypeError, "rms_norm: input must be a tensor, got list", lambda: seqkern.rms_norm([1.0], (1,))),
        (TypeError, "add_layer_norm: residual must be a tensor or None, got list",
         lambda: seqkern.add_layer_norm(X, [1.0], (8,))),
        (ValueError, "add_rms_norm: dropout_p must be a probability.*got 1.5",
         lambda: seqkern.add_rms_norm(X, None, (8,), dropout_p=1.5)),
        (TypeError, "add_rms_norm: residual must have the input's dtype torch.float32, got torch.bfloat16",
         lambda: seqkern.add_rms_norm(X, X.bfloat16(), (8,))),
        (ValueError, r"add_layer_norm: residual must have the input's shape \(4, 8\), got \(8,\)",
         lambda: seqkern.add_layer_norm(X, X[0], (8,))),
        (ValueError, "add_layer_norm: residual must be on the input's device cpu, got meta",
         lambda: seqkern.add_layer_norm(X, X.to("meta"), (8,))),
        (ValueError, "add_layer_norm: dropout_p must be a probability.*got 1.5",
         lambda: seqkern.add_layer_norm(X, X, (8,), dropout_p=1.5)),
        (TypeError, "add_layer_norm: seed must be an integer or an int64 tensor, got torch.float32",
         lambda: seqkern.add_layer_norm(X, X, (8,), dropout_p=0.5, seed=torch.tensor(1.0))),
        (ValueError, r"add_layer_norm: seed must have one element, got shape \(2,\)",
         lambda: seqkern.add_layer_norm(X, X, (8,), dropout_p=0.5, seed=torch.tensor([1, 2]))),
        (ValueError, "add_layer_norm: seed must fit 64 bits",
         lambda: seqkern.add_layer_norm(X, X, (8,), dropout_p=0.5, seed=2**64)),
        (ValueError, "AddRMSNorm: dropout must be a probability.*got -1",
         lambda: seqkern.nn.AddRMSNorm(8, dropout=-1)),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, words, call):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("input must have 2 dimensions, got 1", {"input": torch.ones(8)}),
        ("input must be float64", {"input": torch.ones(4, 8).int()}),
        ("weight must have size 8 in dimension 0, got 7", {"weight": torch.ones(7)}),
        ("residual must have size 8 in dimension 1, got 7", {"residual": torch.ones(4, 7)}),
        ("residual must have ScalarType", {"residual": torch.ones(4, 8).double()}),
        ("seed must have ScalarType", {"residual": X, "seed": torch.tensor(1.0), "dropout_p": 0.5}),
        ("seed must have one element, got 2", {"residual": X, "seed": torch.tensor([1, 2]), "dropout_p": 0.5}),
        ("dropout_p = 0.5 needs a seed", {"residual": X, "dropout_p": 0.5}),
        ("dropout needs a residual", {"seed": torch.tensor(1), "dropout_p": 0.5}),
        ("round_before_weight is RMS norm's alone", {"round_before_weight": True}),
        ("dropout_p must be a probability", {"residual": X, "seed": torch.tensor(1), "dropout_p": 1.5}),
    ],
)
def test_the_op_itself_guards_its_pointers(words, arguments):
    rest = {
        "residual": None,
        "weight": None,
        "bias": None,
        "seed": None,
        "eps": 1e-5,
        "dropout_p": 0.0,
        "weight_offset": 0.0,
    }
    with pytest.raises(RuntimeError, match=f"layer_norm_fwd: {words}"):
        torch.ops.seqkern.layer_norm_fwd(
            **{"input": X, "round_before_weight": False, **rest, "centred": True, **arguments}
        )


def test_unavailable_backends_raise(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with seqkern.use_backend("triton"), pytest.raises(NotImplementedError, match="triton"):
        seqkern.layer_norm(X, (8,))
    with seqkern.use_backend("cuda"), pytest.raises(NotImplementedError, match="cuda backend needs CUDA tensors"):
        seqkern.layer_norm(X, (8,))
    assert _library.backend_for("layer_norm", X) == "cpu"
