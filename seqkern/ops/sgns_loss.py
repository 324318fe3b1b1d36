"""The loss of skip-gram with negative sampling: the functional API, gradients, fake kernels."""

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

Reduction = Literal["mean", "sum", "none"]
Tensors = tuple[Tensor, ...]


@explicit
def sgns_loss(
    center: Tensor,
    context: Tensor,
    negatives: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    reduction: Reduction = "mean",
    sparse: bool = False,
    **unexpected: NoReturn,
) -> Tensor:
    """-log sigmoid(v u) - sum over negatives of log sigmoid(-v u'), in one pass from the tables to the loss.

    v is a row of w_in, u and u' are rows of w_out. Only scores are kept, 1 + K numbers an example.

    Args:
        center: int64 or int32, shape (...), at least 0 and below V: rows of w_in.
        context: the same for w_out, of center's shape.
        negatives: (..., K): the false rows of w_out; one that is the example's context counts nothing.
        w_in: shape (V, D); float64, float32, bfloat16 or float16.
        w_out: shape (U, D), w_in's dtype.
        reduction: "mean" of the examples, "sum", or "none".
        sparse: the gradients are sparse tensors of the rows that were used, coalesced: for torch.optim.SGD and
            SparseAdam. They cannot be differentiated again; torch.compile breaks the graph there.

    Returns:
        The loss, in float32 or wider: (), or center's shape for "none". Derivatives of every order for both tables. A
        row's gradient is the sum over its examples in their order, in float32 or wider: the same bits in every run.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit, or an unknown reduction.
        RuntimeError: on CPU, numbers that are not rows. On a GPU such an example's loss is nan.
        NotImplementedError: the backend in force does not run on the device; sparse in a transform or compiled.

    Source: Mikolov et al. 2013, equation 4.

    Example:
        >>> import torch, seqkern
        >>> w_in, w_out = torch.randn(100, 16), torch.randn(100, 16)
        >>> center, context, negatives = torch.randint(100, (8,)), torch.randint(100, (8,)), torch.randint(100, (8, 5))
        >>> seqkern.sgns_loss(center, context, negatives, w_in, w_out).shape
        torch.Size([])
    """
    if any(map(is_proxy, (center, context, negatives, w_in, w_out))):
        return record(sgns_loss, locals())
    if unexpected:
        refuse(sgns_loss, unexpected)
    _check(center, context, negatives, w_in, w_out)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'sgns_loss: reduction must be "mean", "sum" or "none", got {reduction!r}')
    active = transforms_active()  # raises before Dynamo looks at a tensor
    if sparse and (active or torch.compiler.is_compiling()):
        raise NotImplementedError("sgns_loss: sparse gradients are not compiled, and not those of a transform")
    shape = (center.numel(), negatives.shape[-1])
    ids = (center.reshape(-1).long(), context.reshape(-1).long(), negatives.reshape(shape).long())
    if backend_for("sgns_loss", w_in) == "reference":
        losses = reference.sgns_loss(*ids, w_in, w_out)[0]
    else:
        losses = apply(_Losses, _LossesEager, wants_gradient(w_in, w_out), *ids, w_in, w_out, sparse)[0]
    if reduction == "none":
        return losses.view(center.shape)
    return losses.mean() if reduction == "mean" else losses.sum()


def cost(examples: int, negatives: int, columns: int, dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Work of a call whose rows are all distinct; `backward` counts the backward pass alone, with sparse gradients."""
    rows = examples * (2 + negatives)
    products, size = examples * (1 + negatives) * columns, rows * columns * dtype.itemsize
    return Cost(4 * products, 2 * size) if backward else Cost(2 * products, size)


def _check(center: Any, context: Any, negatives: Any, w_in: Any, w_out: Any) -> None:
    op = "sgns_loss"
    ids = (("center", center), ("context", context), ("negatives", negatives))
    for name, t in (*ids, ("w_in", w_in), ("w_out", w_out)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        check_not_nested(op, name, t, "give it the values of a jagged one, t.values()")
    for name, t in ids:
        if t.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{op}: {name} must be int64 or int32, got {t.dtype}")
        if t.device != w_in.device:
            raise ValueError(f"{op}: {name} must be on w_in's device {w_in.device}, got {t.device}")
    if context.shape != center.shape:
        raise ValueError(f"{op}: context must have center's shape {tuple(center.shape)}, got {tuple(context.shape)}")
    if negatives.dim() != center.dim() + 1 or negatives.shape[:-1] != center.shape:
        raise ValueError(
            f"{op}: negatives must have center's shape {tuple(center.shape)} and one more dimension, got "
            f"{tuple(negatives.shape)}"
        )
    if w_in.dtype not in FLOATING:
        raise TypeError(f"{op}: w_in must be float64, float32, bfloat16 or float16, got {w_in.dtype}")
    if w_out.dtype != w_in.dtype:
        raise TypeError(f"{op}: w_out must have w_in's dtype {w_in.dtype}, got {w_out.dtype}")
    if w_in.dim() != 2:
        raise ValueError(f"{op}: w_in must have shape (V, D), got {tuple(w_in.shape)}")
    if w_out.dim() != 2 or w_out.shape[1] != w_in.shape[1]:
        raise ValueError(f"{op}: w_out must have shape (U, {w_in.shape[1]}), as w_in, got {tuple(w_out.shape)}")
    if w_out.device != w_in.device:
        raise ValueError(f"{op}: w_out must be on w_in's device {w_in.device}, got {w_out.device}")


# ---- autograd -----------------------------------------------------------------------------------------------------


def _formula(ids: Any) -> Callable[..., Tensor]:
    center, context, negatives = ids
    return lambda w_in, w_out: reference.sgns_loss(center, context, negatives, w_in, w_out)[0]


def _pullback(ids: Any) -> Callable[..., Any]:
    """(grad_loss, w_in, w_out) -> the gradients of both tables."""
    return lambda grad, *tables: gradients(_formula(ids), tables, grad)


class _Losses(torch.autograd.Function):
    """-> the examples' losses, and their scores."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        center: Tensor, context: Tensor, negatives: Tensor, w_in: Tensor, w_out: Tensor, sparse: bool
    ) -> Any:  # fmt: skip
        loss, scores = kernel("sgns_loss_fwd", w_in)(center, context, negatives, w_in, w_out)
        return loss, scores

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.sparse = inputs[5]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:5], output[1])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:5], output[1])
        else:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        if grad is None:
            return (None,) * 6
        *ids, w_in, w_out, scores = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:5]
        found = apply(
            _LossesBackward, _LossesBackwardEager, torch.is_grad_enabled() and not ctx.sparse,
            grad, *ids, w_in, w_out, scores, *needed, ctx.sparse,
        )  # fmt: skip
        of_tables = [found[i] if need else None for i, need in enumerate(needed)]
        if ctx.sparse:
            of_tables = [
                None if g is None else sparse_gradient("sgns_loss", rows, g, table.shape)
                for g, rows, table in zip(of_tables, found[2:], (w_in, w_out), strict=True)
            ]
        return None, None, None, *of_tables, None

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        *ids, w_in, w_out, scores = ctx.saved_tensors
        return tangents(_formula(ids), (w_in, w_out), directions[3:5]), torch.zeros_like(scores)

    @staticmethod
    def plain(
        center: Tensor, context: Tensor, negatives: Tensor, w_in: Tensor, w_out: Tensor, sparse: bool
    ) -> Any:  # fmt: skip
        return reference.sgns_loss(center, context, negatives, w_in, w_out)


class _LossesBackward(torch.autograd.Function):
    """(grad_loss, ids, tables, scores, ...) -> gradients of both tables, and the rows of sparse ones."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor, center: Tensor, context: Tensor, negatives: Tensor, w_in: Tensor, w_out: Tensor, scores: Tensor,
        need_in: bool, need_out: bool, sparse: bool,
    ) -> Any:  # fmt: skip
        of_in, in_rows, of_out, out_rows = kernel("sgns_loss_bwd", w_in)(
            grad, center, context, negatives, w_in, w_out, scores, need_in, need_out, sparse
        )
        return of_in, of_out, in_rows, out_rows

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.wanted = inputs[7:9]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs[:6])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:6])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grad, *ids, w_in, w_out = ctx.saved_tensors
        upstream = tuple(
            torch.zeros_like(t) if c is None or not wanted else c
            for c, t, wanted in zip(cotangents[:2], (w_in, w_out), ctx.wanted, strict=True)
        )
        of_grad, of_in, of_out = gradients(_pullback(ids), (grad, w_in, w_out), upstream)
        return of_grad, None, None, None, of_in, of_out, *(None,) * 4

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        grad, *ids, w_in, w_out = ctx.saved_tensors
        found = tangents(_pullback(ids), (grad, w_in, w_out), (directions[0], *directions[4:6]))
        none = grad.new_zeros((0, w_in.shape[1]), dtype=w_in.dtype)
        return *(t if wanted else none for t, wanted in zip(found, ctx.wanted, strict=True)), None, None

    @staticmethod
    def plain(
        grad: Tensor, center: Tensor, context: Tensor, negatives: Tensor, w_in: Tensor, w_out: Tensor, *_: Any
    ) -> Any:  # fmt: skip
        return *_pullback((center, context, negatives))(grad, w_in, w_out), None, None


_LossesEager, _LossesBackwardEager = eager(_Losses), eager(_LossesBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::sgns_loss_fwd")
def _(center: Tensor, context: Tensor, negatives: Tensor, w_in: Tensor, w_out: Tensor) -> Tensors:
    acc = accumulator(w_in.dtype)
    examples, each = negatives.shape
    return w_in.new_empty(examples, dtype=acc), w_in.new_empty((examples, each + 1), dtype=acc)


@torch.library.register_fake("seqkern::sgns_loss_bwd")
def _(
    grad_loss: Tensor, center: Tensor, context: Tensor, negatives: Tensor, w_in: Tensor, w_out: Tensor, scores: Tensor,
    need_in: bool, need_out: bool, sparse: bool,
) -> Tensors:  # fmt: skip
    if sparse:
        raise NotImplementedError("sgns_loss: sparse gradients are not compiled")
    return tuple(
        t
        for table, need in ((w_in, need_in), (w_out, need_out))
        for t in (table.new_empty((table.shape[0] if need else 0, table.shape[1])), center.new_empty(0))
    )


@torch.library.register_vmap("seqkern::sgns_loss_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.sgns_loss_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::sgns_loss_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.sgns_loss_bwd, info.batch_size, in_dims, args)


@torch.library.register_fake("seqkern::word_ngrams")
def _(letters: Tensor, *rest: Any) -> Any:
    raise NotImplementedError("word_ngrams: makes the numbers of n-grams; there is nothing to compile")


@torch.library.register_fake("seqkern::word2vec_train")
def _(w_in: Tensor, *rest: Any) -> Any:
    raise NotImplementedError("word2vec_train: trains; there is nothing to compile")
