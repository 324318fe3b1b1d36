"""RMS norms as models have them: `weight_offset` (Gemma) and `round_before_weight` (Llama).

Their bits against the models' own formulas, and the options through every path that a norm can take.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

import seqkern
from seqkern import _direct
from seqkern.testing import add_layer_norm_case, check_case, layer_norm_case, poison

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLAVOURS = {"llama": (0.0, True), "gemma": (1.0, False), "both": (-0.25, True)}
LLAMA, GEMMA = FLAVOURS["llama"], FLAVOURS["gemma"]


@pytest.fixture(params=["direct", "op"])
def way(request, monkeypatch):
    if request.param == "op":
        monkeypatch.setattr(_direct, "enabled", False)
    return request.param


def options(flavour: tuple[float, bool]) -> dict:
    return {"weight_offset": flavour[0], "round_before_weight": flavour[1]}


def exact_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Powers of two: their squares add to the same number in any order, with any fused multiply-add."""
    x = torch.randint(-1, 2, (rows, columns)).double().exp2() * (torch.randint(0, 2, (rows, columns)) * 2 - 1)
    return x.to(dtype)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + weight.to(wide))).to(x.dtype)


@pytest.mark.parametrize("columns", [1, 5, 16, 63, 130, 768, 2100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_the_models(columns, dtype, isa, way):
    for rows in (1, 3, 21):
        x, weight = exact_rows(rows, columns, dtype), torch.randn(columns).to(dtype)
        with poison():
            ours = [seqkern.rms_norm(x, columns, weight, 1e-6, **options(f)) for f in (LLAMA, GEMMA)]
        theirs = [formula(x, weight, 1e-6) for formula in (llama, gemma)]
        assert all(map(torch.equal, ours, theirs))
        total, residual = 2 * x, x.clone()
        with poison():
            added = seqkern.add_rms_norm(x, residual, (columns,), weight, 1e-6, **options(LLAMA))
        assert torch.equal(added[1], total)
        assert torch.equal(added[0], llama(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_flavours_differ_in_16_bits(dtype):
    """Otherwise the tests above prove nothing."""
    x, weight = exact_rows(9, 130, dtype), torch.randn(130).to(dtype)
    assert not torch.equal(llama(x, weight, 1e-6), seqkern.rms_norm(x, 130, weight, 1e-6))
    assert not torch.equal(gemma(x, weight - 1, 1e-6), seqkern.rms_norm(x, 130, weight, 1e-6))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_numbers_stay_in_their_row(value, dtype, isa):
    x, weight = torch.randn(4, 70).to(dtype), torch.randn(70).to(dtype)
    good = [seqkern.rms_norm(x, 70, weight, **options(flavour)) for flavour in FLAVOURS.values()]
    x[1, 3] = value
    for flavour, expected in zip(FLAVOURS.values(), good, strict=True):
        y = seqkern.rms_norm(x, 70, weight, **options(flavour))
        assert y[1].isnan().any()
        assert torch.equal(y[[0, 2, 3]], expected[[0, 2, 3]])


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("shape", [(1, 3), (65, 17), (1, 65), (65, 257), (9, 1024)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_rule(shape, flavour, dtype, isa, way, passes):
    passes(check_case(layer_norm_case(*shape, centred=False, **options(FLAVOURS[flavour])), dtype))


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_rule_with_residual(dropout_p, flavour, dtype, isa, way, passes):
    for shape in ((3, 63), (65, 257)):
        given = options(FLAVOURS[flavour])
        passes(check_case(add_layer_norm_case(*shape, dropout_p=dropout_p, centred=False, **given), dtype))


def test_a_weight_in_another_dtype(isa):
    """bfloat16 rows under a float32 weight: the offset is added in float32."""
    x, weight = torch.randn(9, 70).bfloat16(), torch.randn(70)
    expected = seqkern.rms_norm(x, 70, weight + 1, 1e-6)
    assert torch.equal(seqkern.rms_norm(x, 70, weight, 1e-6, weight_offset=1.0), expected)
    fine = torch.full((70,), 2.0**-12)  # 1 + 2^-12 has no bfloat16
    y = seqkern.rms_norm(x, 70, fine.bfloat16(), 1e-6, weight_offset=1.0)
    assert torch.equal(y, seqkern.rms_norm(x, 70, fine + 1, 1e-6))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_gradients_of_every_order(flavour, way):
    x, residual = (torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    given = options(FLAVOURS[flavour])

    def alone(x, weight):
        return seqkern.rms_norm(x, (6,), weight, 1e-5, **given)

    def added(x, residual, weight):
        return seqkern.add_rms_norm(x, residual, (6,), weight, 1e-5, 0.4, seed=3, **given)

    for function, inputs in ((alone, (x, weight)), (added, (x, residual, weight))):
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_gradient_is_that_of_unrounded_rows(flavour, way):
    """Rounding has no slope: the gradients are those of the weight with its offset, whatever is rounded."""
    offset, _ = FLAVOURS[flavour]
    x, weight = torch.randn(5, 40).bfloat16().requires_grad_(), torch.randn(40).requires_grad_()
    y = seqkern.rms_norm(x, 40, weight, **options(FLAVOURS[flavour]))
    plain = seqkern.rms_norm(x, 40, weight + offset)
    seed = torch.randn_like(y)
    found, expected = (torch.autograd.grad(out, (x, weight), seed) for out in (y, plain))
    assert all(map(torch.equal, found, expected))


def test_transforms():
    x, weight = torch.randn(4, 3, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)

    def norm(x, weight):
        return seqkern.rms_norm(x, 6, weight, **options(GEMMA))

    expected = torch.stack([norm(*each) for each in zip(x, weight, strict=True)])
    torch.testing.assert_close(torch.func.vmap(norm)(x, weight), expected)
    jacobian = torch.func.jacrev(norm, 1)(x[0], weight[0])
    torch.testing.assert_close(torch.func.jacfwd(norm, 1)(x[0], weight[0]), jacobian)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_compile_fullgraph(flavour, compilation):
    x, weight = torch.randn(4, 7).bfloat16().requires_grad_(), torch.randn(7).bfloat16().requires_grad_()

    def step(x, weight):
        return seqkern.add_rms_norm(x, x.cos(), 7, weight, **options(FLAVOURS[flavour]))[0].sin()

    expected, output = step(x, weight), torch.compile(step, **compilation)(x, weight)
    torch.testing.assert_close(output, expected)
    grads = [torch.autograd.grad(y.float().sum(), (x, weight)) for y in (output, expected)]
    torch.testing.assert_close(*grads)


def test_reference_backend_and_jagged_rows():
    x, weight = torch.randn(5, 8), torch.randn(8)
    for flavour in FLAVOURS.values():
        y = seqkern.rms_norm(x, 8, weight, **options(flavour))
        with seqkern.use_backend("reference"):
            torch.testing.assert_close(seqkern.rms_norm(x, 8, weight, **options(flavour)), y)
        nested = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        assert torch.equal(seqkern.rms_norm(nested, 8, weight, **options(flavour)).values(), y)
        assert torch.equal(seqkern.add_rms_norm(nested, nested, 8, weight, **options(flavour))[1].values(), 2 * x)


@pytest.mark.parametrize("kind", [seqkern.nn.RMSNorm, seqkern.nn.AddRMSNorm])
def test_modules(kind):
    norm = kind(8, eps=1e-6, weight_offset=1.0, round_before_weight=True)
    assert torch.equal(norm.weight, torch.zeros(8))  # begins as the norm without a weight
    assert "weight_offset=1.0, round_before_weight=True" in repr(norm)
    assert "weight_offset" not in repr(kind(8))
    assert torch.equal(kind(8).weight, torch.ones(8))
    norm = copy.deepcopy(norm).bfloat16()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 8).bfloat16()
    expected = seqkern.rms_norm(x, 8, norm.weight, 1e-6, weight_offset=1.0, round_before_weight=True)
    y = norm(x)
    assert torch.equal(y if isinstance(y, Tensor) else y[0], expected)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.zeros_like(norm.weight))
    torch.nn.RMSNorm(8).load_state_dict(norm.state_dict())


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
@pytest.mark.parametrize(
    ("error", "words", "given"),
    [
        (ValueError, "weight_offset = 1.0 needs a weight, got None", {"weight_offset": 1.0}),
        (TypeError, "weight_offset must be a number, got '1'", {"weight_offset": "1", "weight": torch.ones(8)}),
        (TypeError, "round_before_weight must be True or False, got 1", {"round_before_weight": 1}),
    ],
)
def test_errors_name_the_argument(op, error, words, given):
    x = torch.randn(2, 8)
    inputs = (x,) if op == "rms_norm" else (x, x)
    for shape in (8, (8,)):
        with pytest.raises(error, match=f"{op}: {words}"):
            getattr(seqkern, op)(*inputs, shape, **given)


def test_a_module_without_a_weight():
    for kind in (seqkern.nn.RMSNorm, seqkern.nn.AddRMSNorm):
        with pytest.raises(ValueError, match="weight_offset = 1.0 needs a weight, got elementwise_affine=False"):
            kind(8, elementwise_affine=False, weight_offset=1.0)


def test_layer_norm_has_no_flavours():
    for name, value in itertools.product(("weight_offset", "round_before_weight"), (0.0, 1.0)):
        with pytest.raises(TypeError, match=name):
            seqkern.layer_norm(torch.randn(2, 8), 8, **{name: value})


def test_interpreted_triton(interpreted):
    interpreted(__file__, "interpreted")


def interpreted() -> None:
    with seqkern.use_backend("triton"):
        for flavour, dtype in itertools.product(FLAVOURS.values(), (torch.float32, torch.bfloat16)):
            x, weight = exact_rows(5, 70, dtype), torch.randn(70).to(dtype)
            y = seqkern.rms_norm(x, 70, weight, 1e-6, **options(flavour))
            with seqkern.use_backend("cpu"):
                assert torch.equal(y, seqkern.rms_norm(x, 70, weight, 1e-6, **options(flavour))), (flavour, dtype)
            for columns in (70, 8200 if dtype == torch.bfloat16 else 4099):  # the second: more than a program keeps
                for case in (
                    layer_norm_case(5, columns, centred=False, **options(flavour)),
                    add_layer_norm_case(5, columns, dropout_p=0.3, centred=False, **options(flavour)),
                ):
                    for report in check_case(case, dtype):
                        assert report.passed, (flavour, columns, dtype, str(report))


if __name__ == "__main__":
    interpreted()
