"""Layer norm: every kernel against the float64 oracle, its gradients of every order, and torch's interfaces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import seqkern
from seqkern import _library
from seqkern.testing import check_case, layer_norm_case, poison, verify


def parameters(columns, dtype=torch.float64, **options):
    return [torch.randn(columns, dtype=dtype, **options) for _ in range(2)]


# ---- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 3, 17, 63, 65, 127, 257, 1024])
@pytest.mark.parametrize("rows", [1, 65])
def test_error_rule(rows, columns, dtype, isa, passes):
    passes(check_case(layer_norm_case(rows, columns), dtype))


@pytest.mark.parametrize("std", [1.0, 0.01])
@pytest.mark.parametrize("mean", [0.0, 1e2, 1e3, 1e4])
def test_exact_at_any_mean(mean, std, isa):
    """A single float mean would lose up to six digits here; the bound is on the relative L2 error, torch's is 3e-2."""
    for report in check_case(layer_norm_case(64, 1024, mean=mean, std=std), torch.float32):
        assert report.relative_l2 < 3e-7, report


@pytest.mark.parametrize("value", [0.0, 7.0, -1e4, 3e38])
def test_constant_rows_are_all_bias(value, isa):
    weight, bias = parameters(37, torch.float32)
    output = seqkern.layer_norm(torch.full((3, 37), value), (37,), weight, bias)
    assert torch.equal(output, bias.expand(3, 37))


@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_extreme_scales(scale, isa, passes):
    case = layer_norm_case(9, 130, std=scale)
    passes([r for r in check_case(case, torch.float32) if r.name != "grad input" or scale > 1])


def test_bad_numbers_stay_in_their_row(isa):
    x = torch.randn(4, 33)
    clean = seqkern.layer_norm(x, (33,))
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    output = seqkern.layer_norm(x, (33,))
    assert output[1].isnan().all()
    assert output[2].isnan().all()
    assert torch.equal(output[[0, 3]], clean[[0, 3]])


def test_interpreted_triton(interpreted):
    interpreted(
        """
import torch
from seqkern.testing import check_case, layer_norm_case, poison
import seqkern
with poison(), seqkern.use_backend("triton"):
    for rows, columns in [(1, 1), (3, 63), (5, 257)]:
        for mean, std in [(0.0, 1.0), (1e4, 0.01)]:
            for dtype in (torch.float32, torch.float16):
                if dtype == torch.float16 and mean: continue
                for report in check_case(layer_norm_case(rows, columns, mean=mean, std=std), dtype):
                    assert report.passed, (rows, columns, mean, std, dtype, str(report))
"""
    )


# ---- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 5)])
def test_empty(shape, isa):
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
def test_gradcheck(affine, isa):
    x = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    inputs = (x, *(parameters(7, requires_grad=True) if affine else ()))

    def function(x, *affine):
        return seqkern.layer_norm(x, (7,), *affine)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=["input", "weight", "bias", "input and bias"])
def test_gradients_only_for_what_needs_them(wanted):
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

OPCHECK_INPUTS = {
    "contiguous": lambda: torch.randn(3, 7),
    "strided": lambda: torch.randn(6, 9)[::2, :7],
    "transposed": lambda: torch.randn(7, 3).t(),
    "empty": lambda: torch.randn(0, 7),
}


@pytest.mark.parametrize("make", OPCHECK_INPUTS.values(), ids=OPCHECK_INPUTS)
def test_opcheck(make):
    x, (weight, bias) = make(), parameters(7, torch.float32)
    torch.library.opcheck(torch.ops.seqkern.layer_norm_fwd.default, (x, weight, bias, 1e-5))
    torch.library.opcheck(torch.ops.seqkern.layer_norm_fwd.default, (x, None, None, 1e-5))
    _, mean, rstd = torch.ops.seqkern.layer_norm_fwd(x, weight, bias, 1e-5)
    for grad in (make(), torch.ones(()).expand(x.shape)):
        for flags in ((True, True), (False, False)):
            torch.library.opcheck(torch.ops.seqkern.layer_norm_bwd.default, (grad, x, mean, rstd, weight, *flags))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    inputs = [t.requires_grad_() for t in (torch.randn(4, 3, 7), *parameters(7, torch.float32))]
    compiled = torch.compile(lambda x, w, b: seqkern.layer_norm(x, (7,), w, b).sin(), fullgraph=True, dynamic=dynamic)
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


def test_inputs_are_not_modified_and_every_output_is_written(isa, dtype):
    case = layer_norm_case(9, 33)
    inputs = {k: v.to(dtype).requires_grad_() for k, v in case.inputs(torch.Generator().manual_seed(0)).items()}
    before = {k: v.detach().clone() for k, v in inputs.items()}
    with poison():
        output = case.ours(**inputs)
        grads = torch.autograd.grad(output.sum(), list(inputs.values()))
    assert all(t.isfinite().all() for t in (output, *grads))
    assert all(torch.equal(before[k], inputs[k]) for k in inputs)


# ---- backends and errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_backends_agree(backend, dtype, passes):
    passes(verify("layer_norm", dtype, backend=backend))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 63, 768, 1024, 5120, 16384])
def test_gpu_error_rule(columns, dtype, passes):
    passes(check_case(layer_norm_case(130, columns), dtype, device="cuda"))


X = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "input must be a tensor, got list", lambda: seqkern.layer_norm([1.0], (1,))),
        (TypeError, "input must be float64.*got torch.int64", lambda: seqkern.layer_norm(X.long(), (8,))),
        (TypeError, "input must be .*complex64", lambda: seqkern.layer_norm(X.to(torch.complex64), (8,))),
        (TypeError, "normalized_shape must be a sequence.*8", lambda: seqkern.layer_norm(X, 8)),
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
        (ValueError, "eps must be a number >= 0, got -1", lambda: seqkern.layer_norm(X, (8,), eps=-1.0)),
        (ValueError, "eps must be a number >= 0, got nan", lambda: seqkern.layer_norm(X, (8,), eps=float("nan"))),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, words, call):
    with pytest.raises(error, match=f"layer_norm: .*{words}"):
        call()


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("input must have 2 dimensions, got 1", (torch.ones(8), None, None, 1e-5)),
        ("input must be float64", (torch.ones(4, 8).int(), None, None, 1e-5)),
        ("weight must have size 8 in dimension 0, got 7", (X, torch.ones(7), None, 1e-5)),
    ],
)
def test_the_op_itself_guards_its_pointers(words, arguments):
    with pytest.raises(RuntimeError, match=f"layer_norm_fwd: {words}"):
        torch.ops.seqkern.layer_norm_fwd(*arguments)


def test_unavailable_backends_raise(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with seqkern.use_backend("triton"), pytest.raises(NotImplementedError, match="triton"):
        seqkern.layer_norm(X, (8,))
    with seqkern.use_backend("cuda"), pytest.raises(NotImplementedError, match="cuda backend does not run on cpu"):
        seqkern.layer_norm(X, (8,))
    assert _library.backend_for("layer_norm", X) == "cpu"
