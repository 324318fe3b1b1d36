"""Layer norm and RMS norm, alone and after a residual addition with dropout: the functional API, gradients, fakes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import _direct, reference
from seqkern._arguments import LayerNorm, LayerNormBackward, LayerNormNumbers, by_name
from seqkern._direct import fast, long_way
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import is_proxy, of_jagged, record
from seqkern.ops._autograd import (
    FLOATING,
    Cost,
    apply,
    eager,
    gradients,
    per_sample,
    tangents,
    transforms_active,
    wants_gradient,
)
from seqkern.reference.dropout import dropout

if TYPE_CHECKING:
    from typing_extensions import TypeIs


@explicit
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **unexpected: NoReturn,
) -> Tensor:
    """Layer normalisation over the trailing dimensions: exactly `torch.nn.functional.layer_norm`'s meaning.

    output = weight * (x - mean) / sqrt(var + eps) + bias, mean and (biased) variance over the dimensions of
    `normalized_shape`. Statistics are float32 (float64 for float64) and stay exact at any mean: see the kernel.

    Args:
        input: shape (..., *normalized_shape); float64, float32, bfloat16 or float16. Rows may be strided; a tensor
            whose trailing dimensions are not contiguous is copied once. Or a nested one of layout torch.jagged, whose
            output is nested alike.
        normalized_shape: the trailing dimensions to normalise over, at least one; a number for the last alone.
        weight: shape normalized_shape, or None for ones. Any floating dtype.
        bias: shape normalized_shape, or None for zeros. Any floating dtype.
        eps: added to the variance. As in torch it may be negative; what has no root then is NaN.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        TypeError: a dtype that is not floating point, or an argument that is not a tensor.
        ValueError: shapes that do not fit each other, or tensors on different devices.
        NotImplementedError: the backend in force does not run on the input's device.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Example:
        >>> import torch, seqkern
        >>> x = torch.randn(2, 3, 8)
        >>> y = seqkern.layer_norm(x, (8,), torch.ones(8), torch.zeros(8))
        >>> torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
        True
    """
    if fast():
        output: Tensor | None = _direct.layer_norm(input, None, normalized_shape, weight, bias, eps, True, 0.0, False)
        if output is not None and not unexpected:
            return output
    transforms_active()  # refuses before the compiler looks at a tensor
    if is_proxy(input):
        return record(layer_norm, locals())
    if unexpected:
        refuse(layer_norm, unexpected)
    if _is_number(normalized_shape):
        return layer_norm(input, (normalized_shape,), weight, bias, eps)
    return _norm("layer_norm", input, normalized_shape, weight, bias, eps, True)


@explicit
def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    **unexpected: NoReturn,
) -> Tensor:
    """Root mean square normalisation: `torch.nn.functional.rms_norm`, and the flavours of Llama and of Gemma.

    output = weight * x / sqrt(mean(x^2) + eps), the mean over the dimensions of `normalized_shape`, in float32 (float64
    for float64) and rounded once. In 16 bits models differ, bit for bit:

        torch, OLMo 2         round(weight * x / rms)
        Llama, Qwen, T5       round(weight * round(x / rms))     round_before_weight=True
        Gemma                 round((1 + weight) * x / rms)      weight_offset=1.0

    Args:
        input: shape (..., *normalized_shape); float64, float32, bfloat16 or float16. Rows may be strided.
        normalized_shape: the trailing dimensions to normalise over, at least one; a number for the last alone.
        weight: shape normalized_shape, or None for ones. Any floating dtype.
        eps: added to the mean square; None for the smallest step of float32 (of float64 for float64).
        weight_offset: added to the weight, in the dtype of the statistics. Needs a weight.
        round_before_weight: the normalised rows are rounded to the input's dtype before the weight multiplies them. The
            gradients are those of the unrounded ones.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        As `layer_norm`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Example:
        >>> import torch, seqkern
        >>> x = torch.randn(2, 3, 8)
        >>> torch.allclose(seqkern.rms_norm(x, (8,)), torch.nn.functional.rms_norm(x, (8,)), atol=1e-6)
        True
    """
    if fast():
        output: Tensor | None = _direct.layer_norm(
            input, None, normalized_shape, weight, None, eps, False, weight_offset, round_before_weight
        )
        if output is not None and not unexpected:
            return output
    transforms_active()  # refuses before the compiler looks at a tensor
    if is_proxy(input):
        return record(rms_norm, locals())
    if unexpected:
        refuse(rms_norm, unexpected)
    if eps is None:
        eps = _default_eps(input)
    if _is_number(normalized_shape):
        normalized_shape = (normalized_shape,)
    _check_flavour("rms_norm", weight, weight_offset, round_before_weight)
    return _norm(
        "rms_norm", input, normalized_shape, weight, None, eps, False, float(weight_offset), bool(round_before_weight)
    )


@explicit
def add_layer_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    seed: Tensor | int | None = None,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """Residual addition and layer norm in one pass: new_residual = dropout(input) + residual, then its layer norm.

    A pre-norm block goes on with both results; a post-norm block, z = LayerNorm(x + SelfAttn(x)), with the first. The
    sum is rounded to the dtype before it is normalised, as two ops would do it.

    Args:
        input: shape (..., *normalized_shape), what a sublayer gives; float64, float32, bfloat16 or float16.
        residual: the input's shape, dtype and device. None, as before the first block: new_residual = dropout(input),
            which is the input itself where nothing is dropped.
        normalized_shape, weight, bias, eps: as `layer_norm`.
        dropout_p: the probability that an element of the input is dropped; the others are divided by 1 - dropout_p.
        training: whether dropout happens.
        seed: an integer, or an int64 tensor of one element on the input's device, that alone decides the mask: the same
            on every backend, device and number of threads. None: drawn from the device's generator (torch.manual_seed).

    Returns:
        (normalised, new_residual), contiguous, in the input's shape and dtype; under autocast too.

    Raises:
        As `layer_norm`; ValueError also for a dropout_p that is no probability.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.1; Xiong et al., "On Layer Normalization in the
    Transformer Architecture", 2020; the mask: seqkern/reference/dropout.py.

    Example:
        >>> import torch, seqkern
        >>> x, sublayer = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        >>> y, x = seqkern.add_layer_norm(sublayer, x, (8,), dropout_p=0.1)
    """
    if is_proxy(input):
        return record(add_layer_norm, locals())
    if unexpected:
        refuse(add_layer_norm, unexpected)
    dropped = dropout_p if training else 0.0
    return _add_norm("add_layer_norm", input, residual, normalized_shape, weight, bias, eps, dropped, seed, True)


@explicit
def add_rms_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    seed: Tensor | int | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """Residual addition and RMS norm in one pass: `add_layer_norm` with the norm of `rms_norm`.

    Args:
        input, residual: shape (..., *normalized_shape), of one dtype: float64, float32, bfloat16 or float16. residual
            may be None, as `add_layer_norm`.
        normalized_shape, weight, eps, weight_offset, round_before_weight: as `rms_norm`.
        dropout_p, training, seed: as `add_layer_norm`.

    Returns:
        (normalised, new_residual), contiguous, in the input's shape and dtype; under autocast too.

    Raises:
        As `add_layer_norm`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; the mask: seqkern/reference/dropout.py.

    Example:
        >>> import torch, seqkern
        >>> x, sublayer = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        >>> y, x = seqkern.add_rms_norm(sublayer, x, (8,))
        >>> torch.allclose(y, seqkern.rms_norm(x, (8,)))
        True
    """
    if is_proxy(input):
        return record(add_rms_norm, locals())
    if unexpected:
        refuse(add_rms_norm, unexpected)
    dropped = dropout_p if training else 0.0
    _check_flavour("add_rms_norm", weight, weight_offset, round_before_weight)
    return _add_norm(
        "add_rms_norm", input, residual, normalized_shape, weight, None, eps, dropped, seed, False,
        float(weight_offset), bool(round_before_weight),
    )  # fmt: skip


def cost(
    rows: int, columns: int, dtype: torch.dtype, *, backward: bool = False, add: bool = False, centred: bool = True
) -> Cost:
    """Work of a (rows, columns) norm with its parameters; `backward` counts the backward pass alone.

    `add` counts the residual addition and the gradient that reaches the sum, without dropout.
    """
    size, elements, parameters = dtype.itemsize, rows * columns, 2 if centred else 1
    if backward:  # reads dy, x and the gradient of the sum; writes dx and the parameters' gradients
        matrices, flops = 4 if add else 3, 14 if centred else 10
        return Cost((flops + add) * elements, matrices * elements * size + (1 + parameters) * columns * size)
    matrices, flops = 4 if add else 2, 8 if centred else 4
    return Cost((flops + add) * elements, matrices * elements * size + parameters * columns * size)


# ---- checks -------------------------------------------------------------------------------------------------------


def _is_number(normalized_shape: int | Sequence[int]) -> TypeIs[int]:
    """Whether it is the size of the last dimension alone. Asked after the fast path, which takes sequences."""
    return isinstance(normalized_shape, (int, torch.SymInt, numbers.Integral))


def _default_eps(input: Tensor) -> float:
    return torch.finfo(torch.float64 if getattr(input, "dtype", None) == torch.float64 else torch.float32).eps


def _check(
    op: str, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: Any
) -> tuple[int, ...]:
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: input must be a tensor, got {type(input).__name__}")
    if input.dtype not in FLOATING:
        raise TypeError(f"{op}: input must be float64, float32, bfloat16 or float16, got {input.dtype}")
    shape = tuple(normalized_shape)
    if not shape or input.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{op}: input must end in the dimensions normalized_shape = {shape} (at least one), "
            f"got shape {tuple(input.shape)}"
        )
    if eps is None or isinstance(eps, str):
        raise TypeError(f"{op}: eps must be a number, got {eps!r}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if not isinstance(parameter, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or None, got {type(parameter).__name__}")
        if parameter.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} must be float64, float32, bfloat16 or float16, got {parameter.dtype}")
        if parameter.shape != shape:
            raise ValueError(f"{op}: {name} must have shape normalized_shape = {shape}, got {tuple(parameter.shape)}")
        if parameter.device != input.device:
            raise ValueError(f"{op}: {name} must be on the input's device {input.device}, got {parameter.device}")
    return shape


def _check_flavour(op: str, weight: Tensor | None, weight_offset: Any, round_before_weight: Any) -> None:
    if not isinstance(weight_offset, numbers.Real):
        raise TypeError(f"{op}: weight_offset must be a number, got {weight_offset!r}")
    if not isinstance(round_before_weight, bool):
        raise TypeError(f"{op}: round_before_weight must be True or False, got {round_before_weight!r}")
    if weight_offset and weight is None:
        raise ValueError(f"{op}: weight_offset = {weight_offset} needs a weight, got None")


def _check_residual(op: str, input: Tensor, residual: Tensor | None, dropout_p: float) -> None:
    transforms_active()  # refuses before the compiler looks at a tensor, when it compiles this function alone
    if dropout_p is None or isinstance(dropout_p, str):
        raise TypeError(f"{op}: dropout_p must be a probability, got {dropout_p!r}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: dropout_p must be a probability, between 0 and 1, got {dropout_p}")
    if residual is None:
        return
    if not isinstance(residual, Tensor):
        raise TypeError(f"{op}: residual must be a tensor or None, got {type(residual).__name__}")
    if residual.dtype != input.dtype:
        raise TypeError(f"{op}: residual must have the input's dtype {input.dtype}, got {residual.dtype}")
    if residual.shape != input.shape:
        raise ValueError(
            f"{op}: residual must have the input's shape {tuple(input.shape)}, got {tuple(residual.shape)}"
        )
    if residual.device != input.device:
        raise ValueError(f"{op}: residual must be on the input's device {input.device}, got {residual.device}")


def _check_seed(op: str, seed: Tensor | int | None, input: Tensor) -> Tensor:
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), device=input.device)
    if isinstance(seed, int):
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"{op}: seed must fit 64 bits, got {seed}")
        return torch.full((), seed, dtype=torch.int64, device=input.device)
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64:
        got = seed.dtype if isinstance(seed, Tensor) else type(seed).__name__
        raise TypeError(f"{op}: seed must be an integer or an int64 tensor, got {got}")
    if seed.numel() != 1:
        raise ValueError(f"{op}: seed must have one element, got shape {tuple(seed.shape)}")
    if seed.device != input.device:
        raise ValueError(f"{op}: seed must be on the input's device {input.device}, got {seed.device}")
    return seed


# ---- from the API to matrices -------------------------------------------------------------------------------------


def _norm(
    op: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    if isinstance(input, Tensor) and input.is_nested:

        def of_rows(rows: Tensor) -> Tensor:
            return _norm(op, rows, normalized_shape, weight, bias, eps, centred, weight_offset, round_before_weight)

        nested: Tensor = of_jagged(op, of_rows, len(normalized_shape), input=input)
        return nested
    shape = _check(op, input, normalized_shape, weight, bias, eps)
    if input.is_cuda and torch.is_autocast_enabled("cuda"):  # as torch's ops: float32 there, no change on CPU
        input, weight, bias = _widen(input), _widen(weight), _widen(bias)
    options = (eps, 0.0, centred, weight_offset, round_before_weight, len(shape))
    arguments = LayerNorm(input, None, weight, bias, None, *options)
    if backend_for(op, input) == "reference":
        return _formula(arguments)
    output: Tensor = apply(_LayerNorm, _LayerNormEager, wants_gradient(input, weight, bias), *arguments)[0]
    return output


def _add_norm(
    op: str,
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: Any,
    dropout_p: float,
    seed: Tensor | int | None,
    centred: bool,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    if eps is None and not centred:
        eps = _default_eps(input)
    if dropout_p == 0 and fast():
        results = _direct.layer_norm(
            input, residual, normalized_shape, weight, bias, eps, centred, weight_offset, round_before_weight
        )
        if results is not None:
            return results if residual is not None else (results, input)
    transforms_active()  # refuses before the compiler looks at a tensor
    flavour = (centred, weight_offset, round_before_weight)
    if _is_number(normalized_shape):
        normalized_shape = (normalized_shape,)
    if isinstance(input, Tensor) and input.is_nested:

        def of_rows(rows: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return _add_norm(op, rows, added, normalized_shape, weight, bias, eps, dropout_p, seed, *flavour)

        tensors = {"input": input} if residual is None else {"input": input, "residual": residual}
        nested: tuple[Tensor, Tensor] = of_jagged(op, of_rows, len(normalized_shape), **tensors)
        return nested
    shape = _check(op, input, normalized_shape, weight, bias, eps)
    _check_residual(op, input, residual, dropout_p)
    seed = _check_seed(op, seed, input) if dropout_p else None
    if residual is None and dropout_p:
        residual = torch.zeros_like(input)  # dropout is part of the addition
    arguments = LayerNorm(input, residual, weight, bias, seed, eps, dropout_p, *flavour, len(shape))
    if backend_for(op, input) == "reference":
        results = _formula(arguments)
        output, total = results if residual is not None else (results, input)
    else:
        differentiable = wants_gradient(input, residual, weight, bias)
        output, total, _, _ = apply(_LayerNorm, _LayerNormEager, differentiable, *arguments)
    return output, total if residual is not None else input


def _matrix(t: Tensor, dims: int) -> Tensor:
    """(rows, columns), the columns being the last `dims` dimensions."""
    if dims == 1 and t.dim() == 2:
        return t
    split = t.dim() - dims
    return t.reshape(math.prod(t.shape[:split]), math.prod(t.shape[split:]))


def _vector(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.dim() == 1 else t.reshape(-1)


def _shaped(t: Tensor, shape: Sequence[int]) -> Tensor:
    """A kernel's result in the caller's shape; not as a view, because nothing else holds it."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view.default(t, shape)


def _formula(norm: LayerNorm) -> Any:
    """The reference on tensors of any shape: the output, and the sum when there is a residual."""
    x, weight, bias = _matrix(norm.input, norm.dims), _vector(norm.weight), _vector(norm.bias)
    flavour = (norm.centred, norm.weight_offset, norm.round_before_weight)
    if norm.residual is None:
        return reference.layer_norm(x, weight, bias, norm.eps, *flavour).reshape(norm.input.shape)
    results = reference.add_layer_norm(
        x, _matrix(norm.residual, norm.dims), weight, bias, norm.seed, norm.eps, norm.dropout_p, *flavour
    )
    return tuple(t.reshape(norm.input.shape) for t in results)


def _widen(t: Any) -> Any:
    return t if t is None or t.dtype == torch.float64 else t.float()


# ---- autograd -----------------------------------------------------------------------------------------------------


class _LayerNorm(torch.autograd.Function):
    """Tensors of any shape -> output, sum, mean, rstd. Backward is a Function again, so that it can be differentiated.

    Without a residual, `sum` is empty: what was normalised is the input. The kernels see matrices; everything outside
    of the Function has the caller's shapes, so that a gradient that two arguments share is one tensor, as in torch.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        eps: float,
        dropout_p: float,
        centred: bool,
        weight_offset: float,
        round_before_weight: bool,
        dims: int,
    ) -> Any:
        matrices = (_matrix(input, dims), None if residual is None else _matrix(residual, dims))
        output, total, mean, rstd = kernel("layer_norm_fwd", input)(
            *matrices, _vector(weight), _vector(bias), seed, eps, dropout_p, centred, weight_offset, round_before_weight
        )
        return _shaped(output, input.shape), total if residual is None else _shaped(total, input.shape), mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        norm = LayerNorm(*inputs)
        _, total, mean, rstd = output
        ctx.numbers = norm.numbers()
        ctx.added, ctx.dropped = norm.residual is not None, norm.seed is not None
        # A sum of two constants is one, unless forward mode differentiates it, which `needs_input_grad` does not tell.
        fixed = not ctx.added or not (any(ctx.needs_input_grad[:2]) or transforms_active())
        ctx.set_materialize_grads(False)
        normalised = total if ctx.added else norm.input
        kept: tuple[Any, ...] = (normalised, norm.weight, norm.bias, mean, rstd, norm.seed)
        if forward_ad._current_level >= 0:
            kept = (*kept, norm.input, norm.residual)
            ctx.save_for_forward(*kept)
        else:  # not in forward mode, where under vmap it is of no effect: there every output has a tangent
            ctx.mark_non_differentiable(mean, rstd, *((total,) if fixed else ()))
        ctx.save_for_backward(*kept)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, *_: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        needs = ctx.needs_input_grad
        numbers: LayerNormNumbers = ctx.numbers
        if grad_output is None and not ctx.dropped:  # the sum alone was used, or nothing
            return tuple(LayerNorm(grad_sum if needs[0] else None, grad_sum if needs[1] else None))
        normalised, weight, bias, mean, rstd, seed, *_ = ctx.saved_tensors
        if grad_output is None:
            grad = None
            if grad_sum is not None:
                grad = dropout(_matrix(grad_sum, numbers.dims), seed, numbers.dropout_p)
                grad = grad.reshape(normalised.shape)
            return tuple(LayerNorm(grad if needs[0] else None, grad_sum if needs[1] else None))
        grad_residual, grad_input, grad_weight, grad_bias = apply(
            _LayerNormBackward, _LayerNormBackwardEager, torch.is_grad_enabled(),
            *LayerNormBackward(
                grad_output, grad_sum if ctx.added else None, normalised, weight, bias, mean, rstd, seed, numbers.eps,
                numbers.dropout_p, numbers.centred, numbers.weight_offset, numbers.dims, needs[2], needs[3],
            ),
        )  # fmt: skip
        grads = (grad_input if ctx.dropped else grad_residual, grad_residual, grad_weight, grad_bias)
        return tuple(LayerNorm(*(g if needed else None for g, needed in zip(grads, needs, strict=False))))

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        _, weight, bias, mean, rstd, seed, input, residual = ctx.saved_tensors

        norm = LayerNorm(input, residual, weight, bias, seed, *ctx.numbers)

        def outputs(input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Any:
            return _formula(LayerNorm(input, residual, weight, bias, seed, *ctx.numbers))

        found = tangents(outputs, norm.differentiable(), LayerNorm(*input_tangents).differentiable())
        results = (found, input.new_empty(0)) if residual is None else found
        return *results, torch.zeros_like(mean), torch.zeros_like(rstd)

    @staticmethod
    def plain(*args: Any) -> Any:
        norm = LayerNorm(*args)
        found = _formula(norm)
        results = (found, norm.input.new_empty(0)) if norm.residual is None else found
        return *results, None, None


class _LayerNormBackward(torch.autograd.Function):
    """(grad_output, grad_sum, what was normalised, weight, bias, ...) -> gradients of residual, input and parameters.

    Without dropout, grad_input is empty: it is grad_residual.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_output: Tensor,
        grad_sum: Tensor | None,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        seed: Tensor | None,
        eps: float,
        dropout_p: float,
        centred: bool,
        weight_offset: float,
        dims: int,
        need_weight: bool,
        need_bias: bool,
    ) -> Any:
        grads = (_matrix(grad_output, dims), None if grad_sum is None else _matrix(grad_sum, dims))
        grad_residual, grad_input, grad_weight, grad_bias = kernel("layer_norm_bwd", input)(
            *grads, _matrix(input, dims), mean, rstd, _vector(weight), seed, dropout_p, centred, weight_offset,
            need_weight, need_bias,
        )  # fmt: skip
        # The sums come in the accumulation dtype: each is rounded once, to its own parameter's.
        if weight is not None and need_weight:
            grad_weight = _shaped(grad_weight, weight.shape).to(weight.dtype)
        if bias is not None and need_bias:
            grad_bias = _shaped(grad_bias, bias.shape).to(bias.dtype)
        if seed is not None:
            grad_input = _shaped(grad_input, input.shape)
        return _shaped(grad_residual, input.shape), grad_input, grad_weight, grad_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        passed = LayerNormBackward(*inputs)
        kept = (*passed.differentiable(), passed.seed)
        ctx.numbers = passed.numbers()
        ctx.save_for_backward(*kept)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*kept)

    @staticmethod
    def saved(ctx: Any) -> LayerNormBackward:
        grad_output, grad_sum, normalised, weight, bias, seed = ctx.saved_tensors
        return LayerNormBackward(grad_output, grad_sum, normalised, weight, bias, None, None, seed, *ctx.numbers)

    @staticmethod
    def formula(passed: LayerNormBackward) -> Any:
        """The gradients as a function of cotangents, what was normalised and parameters."""
        seed, dims = passed.seed, passed.dims

        def norm(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
            options = (passed.eps, 0.0, passed.centred, passed.weight_offset, False, dims)
            return _formula(LayerNorm(input, None, weight, bias, None, *options))

        def grads(
            grad_output: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, bias: Tensor | None
        ) -> Any:
            total, grad_weight, grad_bias = gradients(norm, (input, weight, bias), grad_output)
            assert total is not None
            if grad_sum is not None:
                total = total + grad_sum
            empty = input.new_empty(0)
            grad_input = empty
            if seed is not None:
                grad_input = dropout(_matrix(total, dims), seed, passed.dropout_p).reshape(input.shape)
            grad_weight = grad_weight if passed.need_weight else empty
            return total, grad_input, grad_weight, grad_bias if passed.need_bias else empty

        return grads

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        passed = _LayerNormBackward.saved(ctx)
        found = gradients(_LayerNormBackward.formula(passed), passed.differentiable(), cotangents)
        return tuple(LayerNormBackward(*found))

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        passed = _LayerNormBackward.saved(ctx)
        own = LayerNormBackward(*input_tangents).differentiable()
        return tangents(_LayerNormBackward.formula(passed), passed.differentiable(), own)

    @staticmethod
    def plain(*args: Any) -> Any:
        passed = LayerNormBackward(*args)
        return _LayerNormBackward.formula(passed)(*passed.differentiable())


@long_way("LayerNormNode")
@long_way("AddLayerNormNode")
def _backward_of_node(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    numbers: Sequence[float],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the input (or of the two terms), weight and bias of a norm over the last dimension.

    They are differentiable again. What was kept is found again where it is not there, or of other rows.
    """
    (grad_output, *grad_sum), (eps, centred, weight_offset) = grads, numbers
    *need_terms, need_weight, need_bias = needs
    total = grad_sum[0] if grad_sum else None
    if grad_output is None:  # the sum alone was used
        return [*(total if need else None for need in need_terms), None, None]
    weight, bias, normalised = saved
    assert normalised is not None
    with torch.no_grad():
        flat = _matrix(normalised, 1)
        _, _, mean, rstd = kernel("layer_norm_fwd", flat)(
            flat, None, None, None, None, eps, 0.0, bool(centred), 0.0, False
        )
    grad, _, grad_weight, grad_bias = apply(
        _LayerNormBackward, _LayerNormBackwardEager, torch.is_grad_enabled(),
        *LayerNormBackward(
            grad_output, total, normalised, weight, bias, mean, rstd, None, eps, 0.0, bool(centred), weight_offset, 1,
            need_weight, need_bias,
        ),
    )  # fmt: skip
    return [
        *(grad if need else None for need in need_terms),
        grad_weight if need_weight else None,
        grad_bias if need_bias else None,
    ]


_LayerNormEager, _LayerNormBackwardEager = eager(_LayerNorm), eager(_LayerNormBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


def _statistics_dtype(input: Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


@torch.library.register_fake("seqkern::layer_norm_fwd")
def _(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    centred: bool,
    weight_offset: float,
    round_before_weight: bool,
) -> Any:
    rows, dtype = input.shape[0], _statistics_dtype(input)
    return (
        input.new_empty(input.shape),
        input.new_empty(0 if residual is None else input.shape),
        input.new_empty(rows if centred else 0, dtype=dtype),
        input.new_empty(rows, dtype=dtype),
    )


@torch.library.register_fake("seqkern::layer_norm_bwd")
def _(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    centred: bool,
    weight_offset: float,
    need_weight: bool,
    need_bias: bool,
) -> Any:
    columns, dtype = input.shape[1], _statistics_dtype(input)
    return (
        input.new_empty(input.shape),
        input.new_empty(0 if seed is None else input.shape),
        input.new_empty(columns if need_weight else 0, dtype=dtype),
        input.new_empty(columns if need_bias else 0, dtype=dtype),
    )


@torch.library.register_vmap("seqkern::layer_norm_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    op = torch.ops.seqkern.layer_norm_fwd
    named, dims = by_name(op, args), by_name(op, in_dims)
    # Parameters of their own for every sample, or the same dropout mask for all: one call each.
    alone = named["seed"] is not None or dims["weight"] is not None or dims["bias"] is not None
    return _batched(op, info.batch_size, dims, named, ("input", "residual"), alone)


@torch.library.register_vmap("seqkern::layer_norm_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    op = torch.ops.seqkern.layer_norm_bwd
    named, dims = by_name(op, args), by_name(op, in_dims)
    # A sample's own gradients of the parameters: their sum alone comes out of a batch.
    alone = named["seed"] is not None or dims["weight"] is not None or named["need_weight"] or named["need_bias"]
    return _batched(op, info.batch_size, dims, named, ("grad_output", "grad_sum", "input", "mean", "rstd"), alone)


def _batched(
    op: Any, samples: int, dims: dict[str, Any], args: dict[str, Any], rows: tuple[str, ...], alone: bool
) -> Any:
    """The samples become part of the rows, which the arguments `rows` have as their first dimension."""
    if alone or samples == 0:
        return per_sample(op, samples, tuple(dims.values()), tuple(args.values()))
    folded = dict(args)
    for name in rows:
        if isinstance(t := args[name], Tensor):
            t = t.expand(samples, *t.shape) if dims[name] is None else t.movedim(dims[name], 0)
            folded[name] = t.flatten(0, 1)
    outputs = op(**folded)
    count = folded["input"].shape[0]
    out_dims = tuple(0 if t.shape[0] == count else None for t in outputs)  # what is not wanted comes back empty
    unfolded = tuple(
        t if dim is None else t.unflatten(0, (samples, count // samples))
        for t, dim in zip(outputs, out_dims, strict=True)
    )
    return unfolded, out_dims
