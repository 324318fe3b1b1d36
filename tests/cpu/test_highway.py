"""Highway layers: accuracy, layouts, extremes, every derivative and transform, the module, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern.ops.highway import cost
from seqkern.reference.highway import ACTIVATIONS
from seqkern.testing import check_case, highway_case, poison
from seqkern.testing.highway import ACTIVATION


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def theirs(x, weight, bias=None, activation="relu"):
    candidate, gate = F.linear(x, weight, bias).chunk(2, -1)
    return gate.sigmoid() * ACTIVATION[activation](candidate) + (1 - gate.sigmoid()) * x


def inputs(rows=3, dim=5, dtype=torch.float64):
    return [draw(*shape, dtype=dtype, seed=n) for n, shape in enumerate([(rows, dim), (2 * dim, dim), (2 * dim,)])]


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (130, 65), (7, 256)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("std", [0.1, 1.0, 10.0])
def test_error_rule(activation, shape, std, dtype, isa, passes):
    passes(check_case(highway_case(*shape, activation=activation, std=std), dtype))


SLOPES = {"relu": lambda c: (c > 0).double(), "tanh": lambda c: c.cosh() ** -2}


@pytest.mark.parametrize("activation", SLOPES)
def test_the_kernel_itself(activation, isa):
    """Of candidates and gates far apart, relative to each term: no gate cancels in either tail."""
    z = torch.linspace(-80, 80, 1601, dtype=torch.float64)
    c, x, dy = z.flip(0) / 10, torch.full_like(z, -3.0), torch.full_like(z, 0.7)
    t, rest, a = z.sigmoid(), (-z).sigmoid(), ACTIVATION[activation](c)
    for dtype in (torch.float64, torch.float32):
        given = [k.to(dtype) for k in (c, z, x)]
        c, z = (k.double() for k in given[:2])
        t, rest, a = z.sigmoid(), (-z).sigmoid(), ACTIVATION[activation](c)
        found = torch.ops.seqkern.highway_fwd(*given, ACTIVATIONS.index(activation)).double()
        eps = torch.finfo(dtype).eps * 100  # an exponent of 80, rounded
        assert ((found - (t * a + rest * x)).abs() <= eps * ((t * a).abs() + (rest * x).abs())).all()
        grads = torch.ops.seqkern.highway_bwd(dy.to(dtype), *given, ACTIVATIONS.index(activation))
        exact = (dy * t * SLOPES[activation](c), dy * (a - x) * t * rest, dy * rest)
        for grad, expected in zip(grads, exact, strict=True):
            least = eps * expected.abs() + torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # subnormal numbers
            assert ((grad.double() - expected).abs() <= least).all()


def test_extremes(isa):
    """Gates of any size give the candidate or the input, and zero gradients to what does not count."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        big = torch.finfo(dtype).max
        gate = torch.tensor([big, -big, torch.inf, -torch.inf, 0.0, torch.nan], dtype=dtype)
        candidate, x = torch.full_like(gate, 2.0), torch.full_like(gate, 4.0)
        found = torch.ops.seqkern.highway_fwd(candidate, gate, x, 0)
        assert found[:5].tolist() == [2.0, 4.0, 2.0, 4.0, 3.0]
        assert found[5].isnan()
        of_c, of_z, of_x = torch.ops.seqkern.highway_bwd(torch.ones_like(gate), candidate, gate, x, 0)
        assert of_c[:5].tolist() == [1.0, 0.0, 1.0, 0.0, 0.5]
        assert of_x[:5].tolist() == [0.0, 1.0, 0.0, 1.0, 0.5]
        assert of_z[:5].tolist() == [0.0, 0.0, 0.0, 0.0, -0.5]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_every_mode(activation):
    leaves = [t.requires_grad_() for t in inputs()]

    def function(*t):
        return seqkern.highway(*t, activation)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True)
    torch.testing.assert_close(function(*leaves), theirs(*leaves, activation))


def test_layouts(isa):
    x, weight, bias = inputs(6, 33)
    expected = seqkern.highway(x, weight, bias)
    wide = torch.full((6, 70), torch.nan).double()
    wide[:, 1:67:2] = x
    for each in (x.view(2, 3, 33), x.t().contiguous().t(), wide[:, 1:67:2], x.view(3, 2, 33).transpose(0, 1)):
        found = seqkern.highway(each, weight, bias)
        assert found.shape == each.shape
        torch.testing.assert_close(found, theirs(each, weight, bias))
    torch.testing.assert_close(seqkern.highway(x[0], weight, bias), expected[0])
    for shape in ((0, 33), (2, 0, 33)):
        assert seqkern.highway(x.new_zeros(shape), weight).shape == shape
    assert seqkern.highway(torch.zeros(3, 0), torch.zeros(0, 0)).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_on_any_number_of_threads(dtype, isa):
    candidate, gate = draw(77, 2 * 1003, dtype=dtype).chunk(2, -1)
    x = draw(77, 1003, dtype=dtype, seed=2)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with poison():
                output = torch.ops.seqkern.highway_fwd(candidate, gate, x, 1)
                results.append((output, *torch.ops.seqkern.highway_bwd(output, candidate, gate, x, 1)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for each in results for a, b in zip(each, results[0], strict=True))


def test_opcheck():
    for activation in range(4):
        candidate, gate = draw(4, 2 * 9).chunk(2, -1)
        torch.library.opcheck(torch.ops.seqkern.highway_fwd.default, (candidate, gate, draw(4, 9, seed=1), activation))
        given = (candidate.cos(), candidate, gate, draw(9, 4, seed=1).t(), activation)
        torch.library.opcheck(torch.ops.seqkern.highway_bwd.default, given)


def test_compiled(compilation):
    leaves = [t.requires_grad_() for t in inputs(dtype=torch.float32)]

    def model(x, weight, bias):
        return seqkern.highway(x.sin(), weight, bias, "tanh").cos()

    results = []
    for function in (model, torch.compile(model, **compilation)):
        output = function(*leaves)
        results.append((output.detach(), *torch.autograd.grad(output.sum(), leaves)))
    torch.testing.assert_close(*results)


def test_autocast():
    x, weight, bias = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = seqkern.highway(x, weight, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, seqkern.highway(*(t.bfloat16() for t in (x, weight, bias))))


def test_module():
    """Layers in turn; a new one carries most of its input."""
    module = seqkern.nn.Highway(8, layers=3, activation="tanh").double()
    x = draw(4, 8, dtype=torch.float64)
    expected = x
    for layer in module.layers:
        assert torch.equal(layer.bias[8:], torch.full((8,), -2.0).double())
        expected = theirs(expected, layer.weight, layer.bias, "tanh")
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(seqkern.nn.Highway(8, gate_bias=-40.0)(x.float()), x.float())
    assert "activation='tanh'" in repr(module)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        seqkern.nn.Highway(8, layers=0)


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with poison(), seqkern.use_backend("triton"):
        for activation in ACTIVATIONS:
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                reports = check_case(highway_case(7, 33, activation=activation, std=3.0), dtype)
                assert all(report.passed for report in reports), (activation, dtype, [*map(str, reports)])
        test_extremes(None)
        assert seqkern.highway(torch.zeros(0, 3), torch.zeros(6, 3)).shape == (0, 3)


def test_errors():
    x, weight, bias = inputs()
    wrong = [
        (([1.0], weight), TypeError, "x must be a tensor, got list"),
        ((x.int(), weight), TypeError, "x must be float64"),
        ((x, weight.float()), TypeError, "weight must have the dtype of x"),
        ((x, weight[:5]), ValueError, r"weight must have shape \(10, 5\), as x has 5 features, got \(5, 5\)"),
        ((x, weight, bias[:5]), ValueError, r"bias must have shape \(10,\)"),
        ((x, weight, bias, "sigmoid"), ValueError, "activation must be one of relu, tanh, gelu, silu, got 'sigmoid'"),
        ((x, weight.to("meta")), ValueError, "weight must be on the device of x"),
        ((x[0, 0], weight), ValueError, r"x must have shape \(..., D\)"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            seqkern.highway(*arguments)
    with pytest.raises(RuntimeError, match="activation must be 0 .* got 4"):
        torch.ops.seqkern.highway_fwd(x, x, x, 4)
    with pytest.raises(RuntimeError, match="highway_fwd: x must have size 3 in dimension 0, got 2"):
        torch.ops.seqkern.highway_fwd(x, x, x[:2], 0)


def test_cost():
    assert cost(3, 5, torch.float32).flops == 2 * 3 * 10 * 5 + 150
    assert cost(3, 5, torch.bfloat16).bytes == 2 * (6 * 15 + 50)
    assert cost(3, 5, torch.float32, backward=True).bytes == 4 * (8 * 15 + 100)
