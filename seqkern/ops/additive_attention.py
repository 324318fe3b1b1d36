"""Attention by additive scores: the functional API, gradients, fake kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern._tensors import accumulator
from seqkern.ops._autocast import autocasts
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

Pair = tuple[Tensor, Tensor]


@overload
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    return_weights: Literal[True],
    return_lse: Literal[False] = False,
) -> Pair: ...


@overload
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    return_weights: Literal[False] = False,
    return_lse: Literal[True],
) -> Pair: ...


@overload
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
) -> Tensor | Pair | tuple[Tensor, Tensor, Tensor]: ...


@explicit
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    **unexpected: NoReturn,
) -> Tensor | Pair | tuple[Tensor, Tensor, Tensor]:
    """softmax(weight^T tanh(query + bias + key)) value, Bahdanau's attention, in memory that grows with Tq + Tk.

    Queries and keys are projected before the call, the keys once a source sequence: `seqkern.nn.AdditiveAttention`
    does both. Without a kernel the sum of queries and keys is (B, Tq, Tk, D), and so is its tanh.

    Args:
        query: shape (..., Tq, D); float64, float32, bfloat16 or float16.
        key: shape (..., Tk, D), query's dtype.
        value: shape (..., Tk, Dv), query's dtype.
        weight: shape (D,), query's dtype.
        bias: shape (D,), query's dtype; or None.
        key_lengths: int32 or int64, shape (...): a sequence has only its first key_lengths keys. Others are not read.
        mask: broadcasts to (..., Tq, Tk): bool, True is visible, as in `attention` and in torch's
            scaled_dot_product_attention; or numbers, float32 or query's dtype, which are added to the scores.
        return_weights: also returns the softmax, shape (..., Tq, Tk), query's dtype.
        return_lse: also returns the log-sum-exp of the scores, shape (..., Tq), float32 (float64 for float64).

    Returns:
        The output, shape (..., Tq, Dv), query's dtype; or a tuple of it, the weights and the log-sum-exp, of those that
        are asked for. A query that sees no key has output 0, weights 0 and log-sum-exp -inf, and zero gradients.
        Derivatives of every order for all tensors, the mask and all results.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit.
        NotImplementedError: the backend in force does not run on the device.

    Source: Bahdanau et al. 2015, as reference/additive_attention.py.

    Example:
        >>> import torch, seqkern
        >>> query, memory, weight = torch.randn(2, 5, 16), torch.randn(2, 7, 16), torch.randn(16)
        >>> context, weights = seqkern.additive_attention(query, memory, memory, weight, return_weights=True)
        >>> context.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 7]))
    """
    if any(map(is_proxy, (query, key, value, weight, bias, key_lengths, mask))):
        return record(additive_attention, locals())
    if unexpected:
        refuse(additive_attention, unexpected)
    op = "additive_attention"
    _check_tensors(op, query, key, value, weight, bias)
    if autocasts(query) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value, weight = query.to(dtype), key.to(dtype), value.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    _check_types(op, query, key=key, value=value, weight=weight, bias=bias)
    outer = query.shape[:-2]
    lengths = None if key_lengths is None else _lengths(op, key_lengths, query)
    added = None if mask is None else _mask(op, mask, query, key)
    if query.dim() != 3:
        query, key, value = _three(query), _three(key), _three(value)
    transforms_active()  # raises before Dynamo looks at a tensor
    if backend_for(op, query) == "reference":
        output, lse, weights = reference.additive_attention(query, key, value, weight, bias, lengths, added)
        output, weights = output.to(query.dtype), weights.to(query.dtype)
    else:
        of_mask = None if added is None or added.dtype == torch.bool else added
        wanted = wants_gradient(query, key, value, weight, bias, of_mask)
        output, lse, weights = apply(
            _AdditiveAttention, _AdditiveAttentionEager, wanted, query, key, value, weight, bias, lengths, added,
            return_weights,
        )  # fmt: skip
    if len(outer) != 1:
        output, lse = output.view(*outer, *output.shape[1:]), lse.view(*outer, *lse.shape[1:])
        weights = weights.view(*outer, *weights.shape[1:]) if return_weights else weights
    if not return_weights and not return_lse:
        return output
    return (output, *((weights,) if return_weights else ()), *((lse,) if return_lse else ()))


def cost(
    batch: int, queries: int, keys: int, channels: int, columns: int, dtype: torch.dtype, *, backward: bool = False
) -> Cost:
    """Work of a call: a sum, a tanh (counted as one) and a product for each channel of a pair; D channels, Dv columns.

    The backward pass makes the tanh again, and four products with it.
    """
    pairs = batch * queries * keys
    rows = batch * (queries * (channels + columns) + keys * (channels + columns))
    flops = pairs * ((11 if backward else 4) * channels + (6 if backward else 2) * columns)
    return Cost(flops, (2 if backward else 1) * rows * dtype.itemsize)


# ---- arguments ----------------------------------------------------------------------------------------------------


def _check_tensors(op: str, query: Any, key: Any, value: Any, weight: Any, bias: Any) -> None:
    named = (("query", query), ("key", key), ("value", value), ("weight", weight), ("bias", bias))
    for name, t in named:
        if name == "bias" and t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        check_not_nested(op, name, t, "pad it by torch.nested.to_padded_tensor and give key_lengths")
        if t.device != query.device:
            raise ValueError(f"{op}: {name} must be on the query's device {query.device}, got {t.device}")
    if query.dim() < 2:
        raise ValueError(f"{op}: query must have shape (..., Tq, D), got {tuple(query.shape)}")
    outer, channels = tuple(query.shape[:-2]), query.shape[-1]
    before = "".join(f"{n}, " for n in outer)
    if key.dim() != query.dim() or tuple(key.shape[:-2]) != outer or key.shape[-1] != channels:
        raise ValueError(
            f"{op}: key must have shape ({before}Tk, {channels}), as the query's {tuple(query.shape)}, got "
            f"{tuple(key.shape)}"
        )
    if value.dim() != query.dim() or tuple(value.shape[:-2]) != outer or value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{op}: value must have shape ({before}{key.shape[-2]}, Dv), as the key's {tuple(key.shape)}, got "
            f"{tuple(value.shape)}"
        )
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and tuple(t.shape) != (channels,):
            raise ValueError(f"{op}: {name} must have shape ({channels},), got {tuple(t.shape)}")


def _check_types(op: str, query: Tensor, **others: Tensor | None) -> None:
    if query.dtype not in FLOATING:
        raise TypeError(f"{op}: query must be float64, float32, bfloat16 or float16, got {query.dtype}")
    for name, t in others.items():
        if t is not None and t.dtype != query.dtype:
            raise TypeError(f"{op}: {name} must have the query's dtype {query.dtype}, got {t.dtype}")


def _option(op: str, name: str, t: Any, query: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor or None, got {type(t).__name__}")
    if t.device != query.device:
        raise ValueError(f"{op}: {name} must be on the query's device {query.device}, got {t.device}")


def _lengths(op: str, lengths: Any, query: Tensor) -> Tensor:
    _option(op, "key_lengths", lengths, query)
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: key_lengths must be int32 or int64, got {lengths.dtype}")
    if lengths.shape != query.shape[:-2]:
        raise ValueError(
            f"{op}: key_lengths must have shape {tuple(query.shape[:-2])}, the query's leading dimensions, got "
            f"{tuple(lengths.shape)}"
        )
    every: Tensor = lengths.reshape(-1).long()
    return every


def _mask(op: str, mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """As (batch, Tq, Tk), expanded; bool or in the accumulator's dtype."""
    _option(op, "mask", mask, query)
    acc = accumulator(query.dtype)
    if mask.dtype not in (torch.bool, torch.float32, query.dtype, acc):
        raise TypeError(f"{op}: mask must be bool, float32 or the query's dtype {query.dtype}, got {mask.dtype}")
    full = (*query.shape[:-1], key.shape[-2])
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.dim() > len(full) or any(m not in (1, n) for m, n in sizes):
        raise ValueError(f"{op}: mask must broadcast to {tuple(full)}, got shape {tuple(mask.shape)}")
    wide = mask if mask.dtype == torch.bool else mask.to(acc)
    expanded: Tensor = wide.expand(full)
    return expanded if len(full) == 3 else _three(expanded)


def _three(t: Tensor) -> Tensor:
    return t.reshape(math.prod(t.shape[:-2]), *t.shape[-2:])


# ---- autograd -----------------------------------------------------------------------------------------------------


def _formula(lengths: Tensor | None, mask: Tensor | None, dtype: torch.dtype, weights: bool) -> Callable[..., Any]:
    """(query, key, value, weight, bias, float mask) -> (output, lse, weights), the latter empty if not wanted."""

    def formula(
        query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        every = mask if added is None else added
        output, lse, found = reference.additive_attention(query, key, value, weight, bias, lengths, every)
        return output.to(dtype), lse, found.to(dtype) if weights else query.new_empty(0)

    return formula


class _AdditiveAttention(torch.autograd.Function):
    """-> output, log-sum-exp, and the weights or nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None,
        mask: Tensor | None, weights: bool,
    ) -> Any:  # fmt: skip
        output, lse, found = kernel("additive_attention_fwd", query)(
            query, key, value, weight, bias, lengths, mask, weights
        )
        return output, lse, found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.weights = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)
        elif not ctx.weights:
            ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, grad_weights: Tensor | None) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        needs = ctx.needs_input_grad
        if not ctx.weights:
            grad_weights = None
        if grad is None and grad_lse is None and grad_weights is None:
            return (None,) * 8
        found = apply(
            _AdditiveAttentionBackward, _AdditiveAttentionBackwardEager, torch.is_grad_enabled(), grad, grad_lse,
            grad_weights, *ctx.saved_tensors, needs[6],
        )  # fmt: skip
        of_query, of_key, of_value, of_weight, of_bias, of_mask = found
        every = (of_query, of_key, of_value, of_weight, of_bias, None, of_mask)
        return *(g if need else None for g, need in zip(every, needs[:7], strict=True)), None

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        query, key, value, weight, bias, lengths, mask = ctx.saved_tensors
        added = None if mask is None or mask.dtype == torch.bool else mask
        formula = _formula(lengths, mask, query.dtype, ctx.weights)
        along = (*directions[:5], None if added is None else directions[6])
        return tangents(formula, (query, key, value, weight, bias, added), along)

    @staticmethod
    def plain(
        query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None,
        mask: Tensor | None, weights: bool,
    ) -> Any:  # fmt: skip
        added = None if mask is None or mask.dtype == torch.bool else mask
        return _formula(lengths, mask, query.dtype, weights)(query, key, value, weight, bias, added)


def _pullback(lengths: Tensor | None, mask: Tensor | None, given: tuple[bool, ...]) -> Callable[..., Any]:
    """(grad, grad_lse, grad_weights, tensors of the formula) -> the gradients of those tensors that are given."""

    def pullback(grad: Tensor | None, grad_lse: Tensor | None, grad_weights: Tensor | None, *tensors: Any) -> Any:
        query, _, value = tensors[:3]
        weights = grad_weights is not None
        formula = _formula(lengths, mask, query.dtype, weights)
        acc = accumulator(query.dtype)
        cotangents = (
            query.new_zeros((*query.shape[:2], value.shape[2])) if grad is None else grad,
            query.new_zeros(query.shape[:2], dtype=acc) if grad_lse is None else grad_lse,
            grad_weights if weights else query.new_zeros(0),
        )
        found = gradients(formula, tensors, cotangents)
        return tuple(g for g, there in zip(found, given, strict=True) if there)

    return pullback


class _AdditiveAttentionBackward(torch.autograd.Function):
    """(three gradients, the forward pass's tensors) -> gradients of query, key, value, weight, bias, mask."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor | None, grad_lse: Tensor | None, grad_weights: Tensor | None, query: Tensor, key: Tensor,
        value: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, mask: Tensor | None,
        need_mask: bool,
    ) -> Any:  # fmt: skip
        of_query, of_key, of_value, of_weight, of_bias, of_mask = kernel("additive_attention_bwd", query)(
            grad, grad_lse, grad_weights, query, key, value, weight, bias, lengths, mask, need_mask
        )
        return of_query, of_key, of_value, of_weight.to(weight.dtype), of_bias.to(weight.dtype), of_mask

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.need_mask = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        upstream, tensors, lengths, mask, given = _taken(ctx)
        wanted = (True,) * 5 + (ctx.need_mask,)
        along = tuple(
            torch.zeros_like(t) if c is None or not want else c
            for c, t, want in zip(cotangents, tensors, wanted, strict=True)
            if t is not None
        )
        found = gradients(_pullback(lengths, mask, given), (*upstream, *tensors), along)
        return *found[:8], None, found[8], None

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        upstream, tensors, lengths, mask, given = _taken(ctx)
        along = (*directions[:8], None if tensors[5] is None else directions[9])
        found = iter(tangents(_pullback(lengths, mask, given), (*upstream, *tensors), along))
        every = [next(found) if there else None for there in given]
        query, weight = tensors[0], tensors[3]
        if every[4] is None:
            every[4] = torch.zeros_like(weight)
        if not ctx.need_mask:
            every[5] = query.new_zeros(0, dtype=accumulator(query.dtype))
        return tuple(every)

    @staticmethod
    def plain(
        grad: Tensor | None, grad_lse: Tensor | None, grad_weights: Tensor | None, query: Tensor, key: Tensor,
        value: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, mask: Tensor | None,
        need_mask: bool,
    ) -> Any:  # fmt: skip
        tensors = (query, key, value, weight, bias, None if mask is None or mask.dtype == torch.bool else mask)
        given = tuple(t is not None for t in tensors)
        found = iter(_pullback(lengths, mask, given)(grad, grad_lse, grad_weights, *tensors))
        return tuple(next(found) if there else None for there in given)


def _taken(ctx: Any) -> Any:
    """Upstream gradients, the formula's tensors, lengths, the mask, and which of the tensors are there."""
    grad, grad_lse, grad_weights, query, key, value, weight, bias, lengths, mask = ctx.saved_tensors
    added = None if mask is None or mask.dtype == torch.bool else mask
    tensors = (query, key, value, weight, bias, added)
    return (grad, grad_lse, grad_weights), tensors, lengths, mask, tuple(t is not None for t in tensors)


_AdditiveAttentionEager, _AdditiveAttentionBackwardEager = eager(_AdditiveAttention), eager(_AdditiveAttentionBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::additive_attention_fwd")
def _(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Any, key_lengths: Any, mask: Any,
      need_weights: bool) -> tuple[Tensor, ...]:  # fmt: skip
    batch, queries = query.shape[:2]
    return (
        query.new_empty((batch, queries, value.shape[2])),
        query.new_empty((batch, queries), dtype=accumulator(query.dtype)),
        query.new_empty((batch, queries, key.shape[1]) if need_weights else 0),
    )


@torch.library.register_fake("seqkern::additive_attention_bwd")
def _(
    grad_output: Any, grad_lse: Any, grad_weights: Any, query: Tensor, key: Tensor, value: Tensor, weight: Tensor,
    bias: Any, key_lengths: Any, mask: Any, need_mask: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    acc = accumulator(query.dtype)
    of_mask = query.new_empty((*query.shape[:2], key.shape[1]) if need_mask else 0, dtype=acc)
    rows = (query.new_empty(t.shape) for t in (query, key, value))
    return *rows, *(weight.new_empty(weight.shape, dtype=acc) for _ in range(2)), of_mask


@torch.library.register_vmap("seqkern::additive_attention_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.additive_attention_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::additive_attention_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.additive_attention_bwd, info.batch_size, in_dims, args)
