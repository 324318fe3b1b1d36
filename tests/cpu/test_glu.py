"""Gated linear units: accuracy, layouts, extremes, every derivative and transform; and what `elementwise_op` makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern.ops.glu import cost
from seqkern.reference.glu import GELU, GELU_TANH, SILU, glu
from seqkern.testing import check_case, glu_case, verify

OPS = {"swiglu": {}, "geglu": {}, "geglu tanh": {"approximate": "tanh"}}
SHAPES = [(1, 1), (3, 65), (130, 257), (7, 1024)]


@pytest.fixture(params=OPS)
def op(request):
    """The function, and its like in torch."""
    name, options = request.param.split()[0], OPS[request.param]

    def ours(gate, up):
        return getattr(seqkern, name)(gate, up, **options)

    def theirs(gate, up):
        return (F.silu(gate) if name == "swiglu" else F.gelu(gate, **options)) * up

    return ours, theirs


@pytest.fixture
def ours(op):
    return op[0]


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("std", [0.1, 2.0, 20.0])
def test_error_rule(name, shape, std, dtype, isa, passes):
    passes(check_case(glu_case(name.split()[0], *shape, std=std, **OPS[name]), dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("activation", [SILU, GELU, GELU_TANH])
def test_tails_keep_their_digits(activation, dtype, isa):
    """Of a negative gate's values and slopes, relative to themselves: torch's gelu is 0 from -5.5 on, in float32."""
    gate = torch.linspace(-8, 8, 4001, dtype=torch.float64).to(dtype)
    one = torch.ones_like(gate)
    x = gate.double()
    if activation == GELU:  # the oracle must not cancel either
        p, density = 0.5 * torch.special.erfc(-x * 0.5**0.5), (-0.5 * x * x).exp() * (2 * torch.pi) ** -0.5
        value, slope = x * p, p + x * density
    else:
        v = x if activation == SILU else (8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
        dv = 1 if activation == SILU else (8 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * x * x)
        value, slope = x * v.sigmoid(), v.sigmoid() + x * v.sigmoid() * (-v).sigmoid() * dv
    found = torch.ops.seqkern.glu_fwd(gate, one, activation).double()
    grad, _ = torch.ops.seqkern.glu_bwd(one, gate, one, activation)
    eps = torch.finfo(dtype).eps
    # the exponent of 32 and its rounding, and that of the approximation's 60 at -8
    most = eps * (4 + (30 if activation == SILU else 120))
    assert ((found - value).abs() <= most * value.abs()).all()
    terms = value.abs() + slope.abs()  # a slope is a difference, 0 somewhere
    assert ((grad.double() - slope).abs() <= 4 * most * terms).all()


def test_extremes(op, isa):
    ours, theirs = op
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        big = torch.finfo(dtype).max
        numbers = [0.0, -0.0, 100.0, -100.0, big, -big, float("inf"), -float("inf"), float("nan")] * 5
        gate = torch.tensor(numbers, dtype=dtype)
        up = torch.full_like(gate, 0.5)
        torch.testing.assert_close(
            ours(gate, up),
            theirs(gate.double(), up.double()).to(dtype),
            equal_nan=True,
            atol=1e-30,
            rtol=2 * torch.finfo(dtype).eps,
        )
        gate = gate[gate.isfinite()].requires_grad_()
        (grad,) = torch.autograd.grad(ours(gate, torch.ones_like(gate)).sum(), gate)
        expected = [0.5, 0.5, 1.0, 0.0, 1.0, 0.0] * 5
        torch.testing.assert_close(grad, torch.tensor(expected).to(dtype), atol=1e-30, rtol=0)


# ---- layouts ------------------------------------------------------------------------------------------------------


LAYOUTS = {
    "halves": lambda: draw(9, 2 * 33).chunk(2, -1),
    "halves of a batch": lambda: draw(2, 3, 2 * 65).chunk(2, -1),
    "transposed": lambda: (draw(33, 9).t(), draw(9, 33)),
    "expanded": lambda: (draw(1, 33).expand(9, 33), draw(9, 1).expand(9, 33)),
    "rows that are no matrix": lambda: (draw(3, 5, 65)[:, ::2], draw(3, 3, 65)),
    "every second column": lambda: (draw(5, 66)[:, ::2], draw(5, 33)),
    "a number": lambda: (draw(1)[0], draw(1, seed=1)[0]),
    "empty": lambda: (draw(0, 7), draw(0, 7)),
    "no columns": lambda: (draw(7, 0), draw(7, 0)),
    "large": lambda: draw(300, 2 * 1000).chunk(2, -1),
    "begins askew": lambda: (draw(1001)[1:], draw(1003)[3:]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ours, layout, isa):
    gate, up = LAYOUTS[layout]()
    before = gate.clone(), up.clone()
    grad = draw(*gate.shape, seed=1).t().contiguous().t() if gate.dim() == 2 else draw(*gate.shape, seed=1)

    def run(gate, up):
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        output = ours(gate, up)
        return output.detach(), *torch.autograd.grad(output, (gate, up), grad)

    results = run(gate, up)
    dense = run(*before)
    assert all(torch.equal(a, b) for a, b in zip(results, dense, strict=True))
    assert all(t.is_contiguous() and t.isfinite().all() for t in results)
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_on_any_number_of_threads(ours, dtype, isa):
    gate, up = draw(77, 2 * 1003, dtype=dtype).chunk(2, -1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            leaf = gate.detach().requires_grad_()
            output = ours(leaf, up)
            results.append((output.detach(), *torch.autograd.grad(output.sum(), leaf)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for each in results for a, b in zip(each, results[0], strict=True))


# ---- derivatives --------------------------------------------------------------------------------------------------


def test_gradcheck_of_every_mode(ours):
    leaves = [draw(2, 5, dtype=torch.float64, seed=n).requires_grad_() for n in (0, 1)]
    assert torch.autograd.gradcheck(ours, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(ours, leaves, check_fwd_over_rev=True)


def test_gradients_only_for_what_needs_them(ours):
    gate, up = draw(3, 5).requires_grad_(), draw(3, 5)
    (grad,) = torch.autograd.grad(ours(gate, up).sum(), gate)
    assert grad.shape == gate.shape
    assert not ours(gate.detach(), up).requires_grad
    with torch.no_grad():
        assert not ours(gate, up).requires_grad


def test_functional_transforms(op):
    ours, theirs = op
    gate, up = draw(4, 3, 5, dtype=torch.float64), draw(5, 3, dtype=torch.float64, seed=1).t()

    def loss(f):
        return lambda gate, up: f(gate, up).square().sum().sin()

    for transform in (
        lambda f: torch.func.vmap(f, in_dims=(0, None)),
        lambda f: torch.func.vmap(torch.func.grad(loss(f), argnums=(0, 1)), in_dims=(0, None)),
        lambda f: lambda g, u: torch.func.jvp(lambda x: f(x, u), (g[0],), (g[1],)),
        lambda f: lambda g, u: torch.func.hessian(loss(f))(g[0], u),
        lambda f: lambda g, u: torch.func.jacfwd(torch.func.jacfwd(loss(f)))(g[0], u),
        lambda f: lambda g, u: torch.func.vmap(torch.func.grad(lambda x: torch.func.vmap(f)(x, u).sum()))(g),
    ):
        torch.testing.assert_close(transform(ours)(gate, up), transform(theirs)(gate, up))


def test_opcheck():
    for activation in range(3):
        gate, up = draw(4, 2 * 9).chunk(2, -1)
        for each in ((gate, up), (gate.t(), up.t())):
            torch.library.opcheck(torch.ops.seqkern.glu_fwd.default, (*each, activation))
            torch.library.opcheck(torch.ops.seqkern.glu_bwd.default, (each[0].cos(), *each, activation))


def test_compiled(ours, compilation):
    gate, up = draw(5, 2 * 9).requires_grad_(), draw(5, 9).requires_grad_()

    def model(x, up):
        gate, other = x.chunk(2, -1)
        return ours(gate, up + other).sin()

    results = []
    for function in (model, torch.compile(model, **compilation)):
        output = function(gate, up)
        results.append((output.detach(), *torch.autograd.grad(output.sum(), (gate, up))))
    torch.testing.assert_close(*results)


def test_autocast_changes_nothing(op):
    ours, theirs = op
    gate, up = draw(3, 5), draw(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(gate, up).dtype == theirs(gate, up).dtype == torch.float32


def test_symbolic_trace(ours):
    graph = torch.fx.symbolic_trace(lambda gate, up: ours(gate, up) + 1)
    assert [node.op for node in graph.graph.nodes].count("call_function") == 2
    gate, up = draw(3, 5), draw(3, 5)
    assert torch.equal(graph(gate, up), ours(gate, up) + 1)
    one = torch.fx.symbolic_trace(lambda up: ours(torch.ones(3, 5), up))
    assert torch.equal(one(up), ours(torch.ones(3, 5), up))


# ---- backends, errors, cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_backends_agree(name, backend, dtype, passes):
    passes(verify(name, dtype, backend=backend))


def test_interpreted_triton(interpreted):
    interpreted(
        "-c",
        """
import torch
import seqkern
from seqkern.testing import check_case, glu_case, poison
cases = [glu_case("swiglu", 3, 65), glu_case("geglu", 1, 2050), glu_case("geglu", 9, 7, approximate="tanh", std=20.0)]
with poison(), seqkern.use_backend("triton"):
    for case in cases:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            reports = check_case(case, dtype)
            assert reports and all(report.passed for report in reports), (dtype, list(map(str, reports)))
    for shape in ((0, 5), (5, 0), ()):
        assert seqkern.swiglu(torch.ones(shape), torch.ones(shape)).shape == shape
    x = torch.randn(2, 3, 66)
    for gate, up in (x.chunk(2, -1), (x[..., ::2], x[..., 1::2]), (x[:, :, :1], x[:, :, 1:2])):
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(seqkern.swiglu(gate, up), expected)
    big = torch.tensor([3e38, -3e38, float("inf"), -float("inf"), float("nan")])
    for tanh in ("none", "tanh"):
        wide = torch.nn.functional.gelu(big.double(), approximate=tanh)  # in float32 NaN at inf on some processors
        torch.testing.assert_close(seqkern.geglu(big, torch.ones(5), tanh), wide.float(), equal_nan=True)
""",
    )


@pytest.mark.parametrize(
    ("gate", "up", "error", "message"),
    [
        ([1.0], torch.ones(1), TypeError, "swiglu: gate must be a tensor, got list"),
        (torch.ones(1), None, TypeError, "swiglu: up must be a tensor, got NoneType"),
        (torch.ones(1).int(), torch.ones(1).int(), TypeError, "gate must be float64, .* got torch.int32"),
        (torch.ones(1), torch.ones(1).double(), TypeError, "up must have the dtype of gate, torch.float32"),
        (torch.ones(2, 3), torch.ones(3), ValueError, r"up must have the shape of gate, \(2, 3\), got \(3,\)"),
        (torch.ones(2), torch.ones(2, device="meta"), ValueError, "up must be on the device of gate, cpu, got meta"),
    ],
)
def test_errors_name_the_argument(gate, up, error, message):
    with pytest.raises(error, match=message):
        seqkern.swiglu(gate, up)


def test_other_errors():
    with pytest.raises(ValueError, match='approximate must be "none" or "tanh", got \'erf\''):
        seqkern.geglu(torch.ones(1), torch.ones(1), approximate="erf")
    with pytest.raises(RuntimeError, match="activation must be 0 .* got 3"):
        torch.ops.seqkern.glu_fwd(torch.ones(1), torch.ones(1), 3)
    with pytest.raises(RuntimeError, match="glu_fwd: up must have size 3 in dimension 1, got 2"):
        torch.ops.seqkern.glu_fwd(torch.ones(2, 3), torch.ones(2, 2), 0)
    with pytest.raises(TypeError, match="jagged"):
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
        seqkern.swiglu(nested, nested)


def test_reference_is_the_oracle():
    gate, up = draw(3, 5), draw(3, 5)
    with seqkern.use_backend("reference"):
        assert torch.equal(seqkern.swiglu(gate, up), glu(gate, up, SILU))


def test_cost_counts_the_bytes():
    assert cost(100, torch.bfloat16).bytes == 600
    assert cost(100, torch.float32, backward=True).bytes == 2000
