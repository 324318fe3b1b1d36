"""Attention: the functional API, its gradients, fake kernels and batching rules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from seqkern import reference
from seqkern._library import backend_for, kernel
from seqkern.ops._autograd import FLOATING, Cost, apply, eager, gradients, per_sample, tangents, wants_gradient


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q K^T * scale) V: `torch.nn.functional.scaled_dot_product_attention`, argument by argument.

    Memory is O(N): the N x N scores are never stored, forward or backward. Double backward and forward-mode
    derivatives are computed by the formula and do store them.

    Args:
        query: (..., Nq, D), float64, float32, bfloat16 or float16. The leading dimensions of the three broadcast.
            Any strides with a contiguous last dimension are read in place.
        key: (..., Nk, D), the query's dtype and device.
        value: (..., Nk, Dv), the query's dtype and device.
        attn_mask: not available yet.
        dropout_p: 0; dropout is not available yet.
        is_causal: query i sees the keys j <= i, from the upper left corner, whatever Nq and Nk are.
        scale: default 1 / sqrt(D).
        enable_gqa: the heads, dimension -3, of key and value may divide the query's: consecutive query heads share one.

    Returns:
        (..., Nq, Dv), contiguous, in the query's dtype. Under autocast the inputs are cast first, as torch's op does.

    Raises:
        TypeError: an argument that is not a tensor, or dtypes that are not floating point or differ.
        ValueError: shapes that do not fit each other, or tensors on different devices.
        NotImplementedError: attn_mask or dropout; or the backend in force does not run on the query's device.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    Example:
        >>> import torch, seqkern
        >>> q, k, v = (torch.randn(2, 4, 10, 8) for _ in range(3))
        >>> y = seqkern.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> z = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(y, z, atol=1e-6)
        True
    """
    op = "scaled_dot_product_attention"
    _check_not_yet(op, {"attn_mask": attn_mask is not None, "dropout_p": _check_dropout(op, dropout_p) > 0})
    query, key, value = _autocast(_check_tensors(op, query, key, value, least=3 if enable_gqa else 2))
    _check_types(op, query, key, value)
    _check_lengths(op, query, key, value)
    q, k, v = _broadcast(op, query, key, value, enable_gqa)
    out, _ = _attention(q, k, v, bool(is_causal), 0, scale, op)
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    causal_align: str = "lower_right",
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(Q K^T * scale) V, with the log-sum-exp of the scores where wanted.

    Memory is O(N): the N x N scores are never stored, forward or backward. Double backward and forward-mode
    derivatives are computed by the formula and do store them.

    Args:
        query: (B, H, Nq, D), float64, float32, bfloat16 or float16. Any strides with a contiguous last dimension are
            read in place.
        key: (B, Hk, Nk, D) in the query's dtype, H a multiple of Hk: H / Hk consecutive query heads share a key head.
        value: (B, Hk, Nk, Dv) in the query's dtype.
        causal: hides from a query the keys after it.
        causal_align: where the diagonal lies. "lower_right": the last query sees all keys, j <= i + Nk - Nq, which is
            what decoding with cached keys needs; "upper_left": the first query sees one key, j <= i.
        scale: default 1 / sqrt(D).
        return_lse: also return the natural logarithm of the sum of exp(score), from which results over several sets of
            keys can be combined. It is differentiable.
        attn_mask, key_lengths, window, alibi_slopes, softcap, sinks, dropout_p: not available yet.

    Returns:
        The output, (B, H, Nq, Dv), contiguous, in the query's dtype; with return_lse a tuple of it and the log-sum-exp,
        (B, H, Nq), float32 (float64 for float64). A query that sees no key has output 0, log-sum-exp -inf and zero
        gradients.

    Raises:
        TypeError: an argument that is not a tensor, or dtypes that are not floating point or differ.
        ValueError: shapes that do not fit each other, tensors on different devices, or an unknown causal_align.
        NotImplementedError: an option that is not available yet; or the backend in force does not run on the device.

    Source: Vaswani et al. 2017; shared key heads: Ainslie et al. 2023.

    Example:
        >>> import torch, seqkern
        >>> q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 50, 64), torch.randn(1, 2, 50, 64)
        >>> out, lse = seqkern.attention(q, k, v, causal=True, return_lse=True)  # the newest of 50 tokens
        >>> out.shape, lse.shape
        (torch.Size([1, 8, 1, 64]), torch.Size([1, 8, 1]))
    """
    op = "attention"
    options = (attn_mask, key_lengths, window, alibi_slopes, softcap, sinks)
    names = ("attn_mask", "key_lengths", "window", "alibi_slopes", "softcap", "sinks")
    used = {name: option is not None for name, option in zip(names, options, strict=True)}
    _check_not_yet(op, used | {"dropout_p": _check_dropout(op, dropout_p) > 0})
    if causal_align not in ("lower_right", "upper_left"):
        raise ValueError(f'{op}: causal_align must be "lower_right" or "upper_left", got {causal_align!r}')
    query, key, value = _autocast(_check_tensors(op, query, key, value, least=4, most=4))
    _check_types(op, query, key, value)
    _check_lengths(op, query, key, value)
    for name, t in (("key", key), ("value", value)):
        if t.shape[0] != query.shape[0]:
            raise ValueError(f"{op}: {name} must have the query's batch size {query.shape[0]}, got {_shape(t)}")
    if value.shape[1] != key.shape[1]:
        raise ValueError(f"{op}: value must have the key's {key.shape[1]} heads, got {value.shape[1]}")
    _check_heads(op, query, key, "key")
    diagonal = key.shape[2] - query.shape[2] if causal and causal_align == "lower_right" else 0
    out, lse = _attention(query, key, value, bool(causal), diagonal, scale, op)
    return (out, lse) if return_lse else out


def cost(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    causal: bool = False,
    diagonal: int = 0,
    backward: bool = False,
) -> Cost:
    """Work of attention over the visible scores; `backward` counts the backward pass alone (five products to two)."""
    kv_heads, value_dim = kv_heads or heads, value_dim or head_dim
    seen = (min(max(i + diagonal + 1, 0), keys) for i in range(queries)) if causal else (keys for _ in range(queries))
    flops = 2 * batch * heads * sum(seen) * (head_dim + value_dim)
    of_queries = batch * heads * queries * (head_dim + value_dim) * dtype.itemsize  # query and output
    of_keys = batch * kv_heads * keys * (head_dim + value_dim) * dtype.itemsize  # key and value
    lse = batch * heads * queries * (8 if dtype == torch.float64 else 4)
    if backward:  # reads query, output, its gradient, key, value, lse; writes three gradients
        of_output = batch * heads * queries * value_dim * dtype.itemsize
        return Cost(flops=flops * 5 // 2, bytes=2 * of_queries + of_output + 2 * of_keys + lse)
    return Cost(flops=flops, bytes=of_queries + of_keys + lse)


# ---- checks -------------------------------------------------------------------------------------------------------


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)


def _check_not_yet(op: str, used: dict[str, bool]) -> None:
    for name, is_used in used.items():
        if is_used:
            raise NotImplementedError(
                f"{op}: {name} is not available yet; meanwhile use torch.nn.functional.scaled_dot_product_attention"
                + ("" if name in ("attn_mask", "dropout_p") else ", with an attn_mask where that can express it")
            )


def _check_dropout(op: str, dropout_p: float) -> float:
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: dropout_p must be a probability, between 0 and 1, got {dropout_p}")
    return dropout_p


def _check_tensors(op: str, *tensors: Tensor, least: int, most: int | None = None) -> tuple[Tensor, ...]:
    for name, t in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.dim() < least or (most is not None and t.dim() > most):
            wanted = f"{least}" if most == least else f"at least {least}"
            raise ValueError(f"{op}: {name} must have {wanted} dimensions, got shape {_shape(t)}")
    return tensors


def _check_types(op: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dtype not in FLOATING:
        raise TypeError(f"{op}: query must be float64, float32, bfloat16 or float16, got {query.dtype}")
    for name, t in (("key", key), ("value", value)):
        if t.dtype != query.dtype:
            raise TypeError(f"{op}: {name} must have the query's dtype {query.dtype}, got {t.dtype}")
        if t.device != query.device:
            raise ValueError(f"{op}: {name} must be on the query's device {query.device}, got {t.device}")


def _check_lengths(op: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{op}: key must have the query's head dimension {query.shape[-1]} (its last), got shape {_shape(key)}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"{op}: value must have the key's length {key.shape[-2]}, got shape {_shape(value)}")


def _check_heads(op: str, query: Tensor, t: Tensor, name: str) -> None:
    heads, shared = query.shape[-3], t.shape[-3]
    if heads % shared if shared else heads:
        raise ValueError(f"{op}: the {heads} heads of query must be a multiple of the {shared} heads of {name}")


def _autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _broadcast(op: str, query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The three with the same leading dimensions, except that grouped keys and values keep their number of heads."""
    tail = 2
    if grouped:
        _check_heads(op, query, key, "key")
        _check_heads(op, query, value, "value")
        if key.shape[-3] != value.shape[-3]:  # a head of one belongs to several of the other: give every query its own
            key, value = (t.repeat_interleave(query.shape[-3] // max(t.shape[-3], 1), -3) for t in (key, value))
        tail = 3
    batches = [t.shape[:-tail] for t in (query, key, value)]
    if batches[0] == batches[1] == batches[2]:
        return query, key, value
    try:
        batch = torch.broadcast_shapes(*batches)
    except RuntimeError:
        raise ValueError(
            f"{op}: the leading dimensions must broadcast (with enable_gqa, except the heads), "
            f"got query {_shape(query)}, key {_shape(key)}, value {_shape(value)}"
        ) from None
    query, key, value = (t.expand(*batch, *t.shape[-tail:]) for t in (query, key, value))
    return query, key, value


# ---- autograd -----------------------------------------------------------------------------------------------------


def _attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, diagonal: int, scale: float | None, op: str
) -> tuple[Tensor, Tensor]:
    """Any equal number of dimensions >= 2, brought to (batch, heads, length, dim) and back."""
    if isinstance(scale, Tensor):
        raise TypeError(f"{op}: scale must be a number or None, got a tensor: scale the query for a gradient of it")
    if isinstance(scale, str):
        raise TypeError(f"{op}: scale must be a number or None, got {scale!r}")
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale)
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{op}: scale must be a finite float32 number, got {scale}")
    leading = query.shape[:-2]
    if len(leading) < 2:
        query, key, value = (t[(None,) * (2 - len(leading))] for t in (query, key, value))
    elif len(leading) > 2:
        query, key, value = (t.flatten(0, -4) for t in (query, key, value))
    arguments = (query, key, value, causal, diagonal, scale)
    if backend_for(op, query) == "reference":
        out, lse = reference.attention(*arguments)
    else:
        out, lse = apply(_Attention, _AttentionEager, wants_gradient(query, key, value), *arguments)
    if len(leading) == 2:
        return out, lse
    return out.view(*leading, *out.shape[-2:]), lse.view(*leading, lse.shape[-1])


class _Attention(torch.autograd.Function):
    """query, key, value -> out, lse. Backward is a Function again, so that it can be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, diagonal: int, scale: float) -> Any:
        return kernel("attention_fwd", query)(query, key, value, causal, diagonal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, value, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, *output)
        ctx.save_for_forward(query, key, value)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = apply(
            _AttentionBackward, _AttentionBackwardEager, torch.is_grad_enabled(),
            grad_out, grad_lse, query, key, value, out, lse, *ctx.options,
        )  # fmt: skip
        return *grads, None, None, None

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        return tangents(reference.attention, (*ctx.saved_tensors[:3], *ctx.options), input_tangents)


class _AttentionBackward(torch.autograd.Function):
    """grad_out, grad_lse, query, key, value, ... -> grad_query, grad_key, grad_value."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        diagonal: int,
        scale: float,
    ) -> Any:
        return kernel("attention_bwd", query)(grad_out, grad_lse, query, key, value, out, lse, causal, diagonal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad_out, grad_lse, query, key, value, _, _, *ctx.options = inputs
        ctx.save_for_backward(grad_out, grad_lse, query, key, value)
        ctx.save_for_forward(grad_out, grad_lse, query, key, value)

    @staticmethod
    def formula(ctx: Any) -> Any:
        """The gradients as a function of the cotangents and the inputs, through the N x N scores."""

        def grads(grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Any:
            def outputs(query: Tensor, key: Tensor, value: Tensor) -> Any:
                out, lse = reference.attention(query, key, value, *ctx.options)
                return out if grad_lse is None else (out, lse)

            cotangents = grad_out if grad_lse is None else (grad_out, grad_lse)
            return gradients(outputs, (query, key, value), cotangents)

        return grads

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        grads = gradients(_AttentionBackward.formula(ctx), ctx.saved_tensors, cotangents)
        return *grads, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        return tangents(_AttentionBackward.formula(ctx), ctx.saved_tensors, input_tangents[:5])


_AttentionEager, _AttentionBackwardEager = eager(_Attention), eager(_AttentionBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::attention_fwd")
def _(query: Tensor, key: Tensor, value: Tensor, causal: bool, diagonal: int, scale: float) -> Any:
    rows = query.shape[:3]
    lse = query.new_empty(rows, dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty((*rows, value.shape[3])), lse


@torch.library.register_fake("seqkern::attention_bwd")
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    diagonal: int,
    scale: float,
) -> Any:
    return query.new_empty(query.shape), query.new_empty(key.shape), query.new_empty(value.shape)


@torch.library.register_vmap("seqkern::attention_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return _fold(torch.ops.seqkern.attention_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::attention_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return _fold(torch.ops.seqkern.attention_bwd, info.batch_size, in_dims, args)


def _fold(op: Any, samples: int, in_dims: Any, args: Any) -> Any:
    """The samples become part of the batch, which every tensor has as its first dimension."""
    if samples == 0:
        return per_sample(op, samples, in_dims, args)

    def fold(argument: Any, dim: int | None) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        moved = argument.expand(samples, *argument.shape) if dim is None else argument.movedim(dim, 0)
        return moved.flatten(0, 1)

    outputs = op(*(fold(argument, dim) for argument, dim in zip(args, in_dims, strict=True)))
    return tuple(t.unflatten(0, (samples, t.shape[0] // samples)) for t in outputs), (0,) * len(outputs)
