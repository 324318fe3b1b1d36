"""Embeddings with positions, norm and dropout in one pass: the functional API, gradients, fake kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern._tensors import accumulator
from seqkern.ops._autograd import (
    FLOATING,
    Cost,
    apply,
    eager,
    gradients,
    per_sample,
    sparse_gradient,
    tangents,
    transforms_active,
    wants_gradient,
)
from seqkern.ops.layer_norm import _check_seed
from seqkern.ops.rope import rope_tables


@explicit
def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    positions: Tensor | Literal["sinusoidal"] | None = None,
    offset: int | Tensor = 0,
    scale: float = 1.0,
    norm: tuple[Tensor | None, Tensor | None] | None = None,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Tensor | int | None = None,
    padding_idx: int | None = None,
    sparse: bool = False,
    **unexpected: NoReturn,
) -> Tensor:
    """dropout(layer_norm(scale * weight[ids] + positions)) in one pass, of which nothing but statistics is kept.

    Args:
        ids: int64 or int32, shape (..., T), at least 0 and below V.
        weight: shape (V, D); float64, float32, bfloat16 or float16.
        positions: a learned table of shape (P, D), weight's dtype, whose row p is added at position p; "sinusoidal":
            Vaswani's, made for the positions that are there, to any length (D even); or None.
        offset: the position of each row's first token, a number or int64 of shape ids.shape[:-1]; or each token's, of
            ids's shape.
        scale: of the embeddings, not of the positions: sqrt(D) in Vaswani's model.
        norm: (weight, bias) of a layer norm over D, each (D,) in weight's dtype or None; None: no norm.
        eps: of the norm.
        dropout_p, training, seed: as `add_layer_norm`: of the result.
        padding_idx: rows of ids with this number give weight no gradient; negative ones count from V.
        sparse: weight's gradient is a sparse tensor of the rows that were used, coalesced: for torch.optim.SGD and
            SparseAdam. It cannot be differentiated again, or compiled.

    Returns:
        Shape (..., T, D), weight's dtype. Derivatives of every order for weight, positions and norm. A row's gradient
        is the sum over its tokens in their order, in float32 or wider: the same bits in every run.

    Raises:
        TypeError: not tensors or numbers, or dtypes that do not fit.
        ValueError: shapes, devices or numbers that do not fit.
        RuntimeError: on CPU, ids that are not in weight, or positions beyond the table. On a GPU such a token's
            numbers are nan.
        NotImplementedError: the backend in force does not run on the device; sparse in a transform or compiled.

    Source: Vaswani et al. 2017, Gehring et al. 2017, as reference/embedding.py.

    Example:
        >>> import torch, seqkern
        >>> ids, weight, table = torch.randint(100, (2, 7)), torch.randn(100, 16), torch.randn(32, 16)
        >>> seqkern.embedding(ids, weight, positions=table, offset=5, norm=(None, None)).shape
        torch.Size([2, 7, 16])
    """
    if any(map(is_proxy, (ids, weight, positions, offset))):
        return record(embedding, locals())
    if unexpected:
        refuse(embedding, unexpected)
    op = "embedding"
    _check(op, ids, weight, positions, scale, eps)
    padding = _padding(op, padding_idx, weight)
    norm_weight, norm_bias = _check_norm(op, norm, weight)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"{op}: dropout_p must be a probability, got {dropout_p!r}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: dropout_p must be a probability, between 0 and 1, got {dropout_p}")
    dropped = dropout_p if training else 0.0
    drawn = _check_seed(op, seed, weight) if dropped else None
    rows = ids.reshape(-1).long()
    table, places, start, period = _positions(op, positions, offset, ids, weight)
    active = transforms_active()  # raises before Dynamo looks at a tensor
    if sparse and (active or torch.compiler.is_compiling()):
        raise NotImplementedError(f"{op}: sparse gradients are not compiled, and not those of a transform")
    numbers = (scale, norm is not None, norm_weight, norm_bias, eps, drawn, dropped)
    if backend_for(op, weight) == "reference":
        at = _places(rows, places, start, period)
        output = reference.embedding(rows, _without(weight, padding), table, at, *numbers)
    else:
        wanted = wants_gradient(weight, table, norm_weight, norm_bias)
        output = apply(
            _Embedding, _EmbeddingEager, wanted, rows, weight, table, places, start, period, *numbers, padding, sparse
        )[0]
    return output.view(*ids.shape, weight.shape[1])


def cost(tokens: int, columns: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a call without positions: rows that are read and written, or the gradients of as many distinct ones."""
    return Cost(tokens * columns, 2 * tokens * columns * dtype.itemsize)


# ---- arguments ----------------------------------------------------------------------------------------------------


def _check(op: str, ids: Any, weight: Any, positions: Any, scale: Any, eps: Any) -> None:
    for name, t in (("ids", ids), ("weight", weight), ("positions", positions)):
        if name == "positions" and (t is None or isinstance(t, str)):
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        check_not_nested(op, name, t, "give it the values of a jagged one, t.values()")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: ids must be int64 or int32, got {ids.dtype}")
    if weight.dtype not in FLOATING:
        raise TypeError(f"{op}: weight must be float64, float32, bfloat16 or float16, got {weight.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must have shape (V, D), got {tuple(weight.shape)}")
    if weight.device != ids.device:
        raise ValueError(f"{op}: weight must be on ids's device {ids.device}, got {weight.device}")
    if isinstance(positions, str):
        if positions != "sinusoidal":
            raise ValueError(f'{op}: positions must be a table, "sinusoidal" or None, got {positions!r}')
        if weight.shape[1] % 2:
            raise ValueError(f"{op}: sinusoidal positions need an even D, got weight {tuple(weight.shape)}")
    elif positions is not None:
        if positions.dtype != weight.dtype:
            raise TypeError(f"{op}: positions must have weight's dtype {weight.dtype}, got {positions.dtype}")
        if positions.dim() != 2 or positions.shape[1] != weight.shape[1]:
            raise ValueError(
                f"{op}: positions must have shape (P, {weight.shape[1]}), as weight, got {tuple(positions.shape)}"
            )
        if positions.device != weight.device:
            raise ValueError(f"{op}: positions must be on weight's device {weight.device}, got {positions.device}")
    for name, number in (("scale", scale), ("eps", eps)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"{op}: {name} must be a number, got {number!r}")
        if not -3.4e38 <= number <= 3.4e38 or (name == "eps" and number < 0):
            raise ValueError(f"{op}: {name} must be finite{' and at least 0' * (name == 'eps')}, got {number}")


def _padding(op: str, padding_idx: Any, weight: Tensor) -> int:
    """The number whose rows give no gradient, or -1."""
    if padding_idx is None:
        return -1
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise TypeError(f"{op}: padding_idx must be a whole number or None, got {padding_idx!r}")
    count = weight.shape[0]
    if not -count <= padding_idx < count:
        raise ValueError(f"{op}: padding_idx must be at least {-count} and below {count}, got {padding_idx}")
    return padding_idx % count


def _check_norm(op: str, norm: Any, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if norm is None:
        return None, None
    if not isinstance(norm, (tuple, list)) or len(norm) != 2:
        raise TypeError(f"{op}: norm must be (weight, bias) or None, got {type(norm).__name__}")
    for name, t in zip(("weight", "bias"), norm, strict=True):
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: norm's {name} must be a tensor or None, got {type(t).__name__}")
        if t.dtype != weight.dtype:
            raise TypeError(f"{op}: norm's {name} must have weight's dtype {weight.dtype}, got {t.dtype}")
        if t.shape != weight.shape[1:]:
            raise ValueError(f"{op}: norm's {name} must have shape ({weight.shape[1]},), got {tuple(t.shape)}")
        if t.device != weight.device:
            raise ValueError(f"{op}: norm's {name} must be on weight's device {weight.device}, got {t.device}")
    return norm[0], norm[1]


def _positions(
    op: str, positions: Any, offset: Any, ids: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Any, Any]:
    """(table, place of each token, start, period): without places, token i's is start + i % period."""
    length = ids.shape[-1] if ids.dim() else 1
    if isinstance(offset, Tensor):
        if offset.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{op}: offset must be int64 or int32, got {offset.dtype}")
        if offset.device != ids.device:
            raise ValueError(f"{op}: offset must be on ids's device {ids.device}, got {offset.device}")
        if offset.shape == ids.shape:
            every = offset
        elif offset.shape == ids.shape[:-1]:
            every = offset[..., None] + torch.arange(length, device=ids.device)
        else:
            raise ValueError(
                f"{op}: offset must be a number, or have ids's shape {tuple(ids.shape)}, with or without its last "
                f"dimension, got {tuple(offset.shape)}"
            )
        if positions is None:
            return None, None, 0, 1
        every = every.reshape(-1).long()
        if isinstance(positions, str):
            return _sinusoids(every, weight), None, 0, max(1, every.shape[0])
        return positions, every, 0, 1
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise TypeError(f"{op}: offset must be a whole number or a tensor of them, got {offset!r}")
    if positions is None:
        return None, None, 0, 1
    if isinstance(positions, str):
        along: Tensor = torch.arange(length, device=ids.device) + offset  # type: ignore[assignment]
        return _sinusoids(along, weight), None, 0, max(1, length)
    if not offset >= 0 or offset + length > positions.shape[0]:
        raise ValueError(
            f"{op}: positions has {positions.shape[0]} rows, which must reach from offset {offset} over {length} tokens"
        )
    return positions, None, offset, max(1, length)


def _sinusoids(positions: Tensor, weight: Tensor) -> Tensor:
    """(N, D), sines and cosines in turn, in the accumulator's dtype."""
    cos, sin = rope_tables(positions, weight.shape[1], dtype=accumulator(weight.dtype))
    return torch.stack((sin, cos), -1).flatten(1)


def _places(rows: Tensor, places: Tensor | None, start: Any, period: Any) -> Tensor:
    if places is not None:
        return places
    found: Tensor = torch.arange(rows.shape[0], device=rows.device) % period + start
    return found


def _without(weight: Tensor, padding: int) -> Tensor:
    """weight, of which one row has no gradient."""
    if padding < 0:
        return weight
    row = (torch.arange(weight.shape[0], device=weight.device) == padding)[:, None]
    return torch.where(row, weight.detach(), weight)


# ---- autograd -----------------------------------------------------------------------------------------------------


def _formula(
    ids: Tensor, places: Tensor, padding: int, scale: float, normed: bool, eps: float, seed: Tensor | None,
    dropout_p: float,
) -> Callable[..., Tensor]:  # fmt: skip
    def formula(weight: Tensor, table: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None) -> Tensor:
        used = _without(weight, padding)
        return reference.embedding(
            ids, used, table, places, scale, normed, norm_weight, norm_bias, eps, seed, dropout_p
        )

    return formula


class _Embedding(torch.autograd.Function):
    """-> output, and of a norm the means and reciprocal standard deviations."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        ids: Tensor, weight: Tensor, table: Tensor | None, places: Tensor | None, start: int, period: int, scale: float,
        normed: bool, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float, seed: Tensor | None,
        dropout_p: float, padding: int, sparse: bool,
    ) -> Any:  # fmt: skip
        output, mean, rstd = kernel("embedding_fwd", weight)(
            ids, weight, table, places, start, period, scale, normed, norm_weight, norm_bias, eps, seed, dropout_p
        )
        return output, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ids, weight, table, places, start, period, scale, normed, norm_weight, norm_bias, eps, seed, *rest = inputs
        ctx.numbers = (start, period, scale, normed, eps, *rest)
        ctx.set_materialize_grads(False)
        kept = (ids, weight, table, places, norm_weight, norm_bias, seed, *output[1:])
        ctx.save_for_backward(*kept)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*kept)
        else:
            ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        if grad is None:
            return (None,) * 15
        ids, weight, table, places, norm_weight, norm_bias, seed, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        needed = (needs[1], needs[2], needs[8], needs[9])
        found = apply(
            _EmbeddingBackward, _EmbeddingBackwardEager, torch.is_grad_enabled() and not ctx.numbers[-1],
            grad, ids, weight, table, places, norm_weight, norm_bias, seed, mean, rstd, *ctx.numbers, *needed,
        )  # fmt: skip
        of_weight, of_table, of_norm_weight, of_norm_bias = (
            g if need else None for g, need in zip(found[:4], needed, strict=True)
        )
        if of_weight is not None and ctx.numbers[-1]:
            of_weight = sparse_gradient("embedding", found[4], of_weight, weight.shape)
        return None, of_weight, of_table, *(None,) * 5, of_norm_weight, of_norm_bias, *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        ids, weight, table, places, norm_weight, norm_bias, seed, mean, rstd = ctx.saved_tensors
        start, period, scale, normed, eps, dropout_p, padding, _ = ctx.numbers
        at = _places(ids, places, start, period)
        formula = _formula(ids, at, padding, scale, normed, eps, seed, dropout_p)
        along = (directions[1], directions[2], directions[8], directions[9])
        tangent = tangents(formula, (weight, table, norm_weight, norm_bias), along)
        return tangent, torch.zeros_like(mean), torch.zeros_like(rstd)

    @staticmethod
    def plain(
        ids: Tensor, weight: Tensor, table: Tensor | None, places: Tensor | None, start: int, period: int, scale: float,
        normed: bool, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float, seed: Tensor | None,
        dropout_p: float, padding: int, sparse: bool,
    ) -> Any:  # fmt: skip
        at = _places(ids, places, start, period)
        formula = _formula(ids, at, padding, scale, normed, eps, seed, dropout_p)
        return formula(weight, table, norm_weight, norm_bias), None, None


def _pullback(
    ids: Tensor, places: Tensor | None, seed: Tensor | None, numbers: Any, given: tuple[bool, ...]
) -> Callable[..., Any]:
    """(grad, weight, table, norm_weight, norm_bias) -> the gradients of those of the last four that are given."""
    start, period, scale, normed, eps, dropout_p, padding, _ = numbers

    def pullback(grad: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        formula = _formula(ids, _places(ids, places, start, period), padding, scale, normed, eps, seed, dropout_p)
        found = gradients(formula, tensors, grad)
        return tuple(g for g, there in zip(found, given, strict=True) if there)

    return pullback


class _EmbeddingBackward(torch.autograd.Function):
    """(grad, ids, ...) -> gradients of weight, table and the norm's parameters, and rows of a sparse one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor, ids: Tensor, weight: Tensor, table: Tensor | None, places: Tensor | None,
        norm_weight: Tensor | None, norm_bias: Tensor | None, seed: Tensor | None, mean: Tensor, rstd: Tensor,
        start: int, period: int, scale: float, normed: bool, eps: float, dropout_p: float, padding: int, sparse: bool,
        need_weight: bool, need_table: bool, need_norm_weight: bool, need_norm_bias: bool,
    ) -> Any:  # fmt: skip
        of_weight, rows, of_table, of_norm_weight, of_norm_bias = kernel("embedding_bwd", weight)(
            grad, ids, weight, table, places, start, period, scale, normed, norm_weight, mean, rstd, seed, dropout_p,
            padding, need_weight, sparse, need_table, need_norm_weight or need_norm_bias,
        )  # fmt: skip
        return of_weight, of_table, of_norm_weight.to(weight.dtype), of_norm_bias.to(weight.dtype), rows

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.numbers, ctx.wanted = inputs[10:18], inputs[18:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[4])
        ctx.save_for_backward(*inputs[:8])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:8])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grad, ids, weight, table, places, norm_weight, norm_bias, seed = ctx.saved_tensors
        tensors = (weight, table, norm_weight, norm_bias)
        given = tuple(t is not None for t in tensors)
        upstream = tuple(
            torch.zeros_like(t) if c is None or not wanted else c
            for c, t, wanted in zip(cotangents[:4], tensors, ctx.wanted, strict=True)
            if t is not None
        )
        found = gradients(_pullback(ids, places, seed, ctx.numbers, given), (grad, *tensors), upstream)
        of_grad, of_weight, of_table, of_norm_weight, of_norm_bias = found
        return of_grad, None, of_weight, of_table, None, of_norm_weight, of_norm_bias, *(None,) * 15

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        grad, ids, weight, table, places, norm_weight, norm_bias, seed = ctx.saved_tensors
        tensors = (weight, table, norm_weight, norm_bias)
        given = tuple(t is not None for t in tensors)
        along = (directions[0], directions[2], directions[3], directions[5], directions[6])
        found = iter(tangents(_pullback(ids, places, seed, ctx.numbers, given), (grad, *tensors), along))
        every = [next(found) if there else None for there in given]
        of_norm = ctx.numbers[3] and (ctx.wanted[2] or ctx.wanted[3])
        none = [(0, weight.shape[1])] * 2 + [(weight.shape[1] if of_norm else 0,)] * 2
        parts = zip(every, none, ctx.wanted, strict=True)
        return *(t if wanted and t is not None else grad.new_zeros(shape) for t, shape, wanted in parts), None

    @staticmethod
    def plain(
        grad: Tensor, ids: Tensor, weight: Tensor, table: Tensor | None, places: Tensor | None,
        norm_weight: Tensor | None, norm_bias: Tensor | None, seed: Tensor | None, *rest: Any,
    ) -> Any:  # fmt: skip
        tensors = (weight, table, norm_weight, norm_bias)
        given = tuple(t is not None for t in tensors)
        found = iter(_pullback(ids, places, seed, rest[2:10], given)(grad, *tensors))
        return *(next(found) if there else None for there in given), None


_EmbeddingEager, _EmbeddingBackwardEager = eager(_Embedding), eager(_EmbeddingBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::embedding_fwd")
def _(ids: Tensor, weight: Tensor, table: Any, places: Any, start: Any, period: Any, scale: float, normed: bool,
      *rest: Any) -> tuple[Tensor, ...]:  # fmt: skip
    rows = ids.shape if normed else 0
    statistics = [weight.new_empty(rows, dtype=accumulator(weight.dtype)) for _ in range(2)]
    return weight.new_empty((ids.shape[0], weight.shape[1])), *statistics


@torch.library.register_fake("seqkern::embedding_bwd")
def _(
    grad_output: Tensor, ids: Tensor, weight: Tensor, table: Tensor | None, places: Any, start: Any, period: Any,
    scale: float, normed: bool, norm_weight: Any, mean: Any, rstd: Any, seed: Any, dropout_p: float, padding_idx: int,
    need_weight: bool, sparse: bool, need_table: bool, need_norm: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    if sparse:
        raise NotImplementedError("embedding: sparse gradients are not compiled")
    columns = weight.shape[1]
    acc = accumulator(weight.dtype)
    of_norm = columns if normed and need_norm else 0
    return (
        weight.new_empty((weight.shape[0] if need_weight else 0, columns)),
        ids.new_empty(0),
        weight.new_empty((table.shape[0] if need_table and table is not None else 0, columns)),
        weight.new_empty(of_norm, dtype=acc),
        weight.new_empty(of_norm, dtype=acc),
    )


@torch.library.register_vmap("seqkern::embedding_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.embedding_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::embedding_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.embedding_bwd, info.batch_size, in_dims, args)
