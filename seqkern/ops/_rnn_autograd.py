"""Derivatives, fake kernels and batching rules of the recurrent networks: what stands between API and kernels.

A layer's tensors, in the kernels' order: input, h0 and c0 (of an LSTM), then lengths, resets, recurrent_mask and seed,
each a tensor or None; then the numbers zoneout_h, zoneout_c, eps and cell; then seven lists with one tensor for each
direction or none: w_ih, w_hh, b_ih, b_hh, w_hr, peephole and norm. Autograd sees the lists one behind the other, with
None where there is no tensor. All have the shapes that csrc/rnn/rnn.h asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._library import kernel
from seqkern.ops._autograd import (
    apply,
    batched,
    eager,
    gradients,
    per_sample,
    tangents,
    transforms_active,
    wants_gradient,
)
from seqkern.ops._rnn_checks import GATES, LSTM, kept_gates

_STATES, _CONSTANTS, _NUMBERS, _LISTS = 3, 4, 4, 7
_TENSORS = _STATES + _CONSTANTS
_W_IH, _W_HH, _B_IH, _B_HH, _W_HR, _PEEPHOLE, _NORM = range(_LISTS)


def run(
    backend: str,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[Any],
    lists: Sequence[Sequence[Tensor]],
    recompute: bool,
    return_cells: bool,
) -> tuple[Tensor, ...]:
    """output and h_n, and of an LSTM c_n and, if wanted, all c_t (D, T, B, H), by the backend's kernel or reference."""
    input, h0, c0, *constants = tensors
    assert input is not None
    assert h0 is not None
    directions, cell = h0.shape[0], numbers[-1]
    if backend != "reference" and _kernel_alone(input, h0, c0, lists):
        results = kernel("rnn_fwd", input)(input, h0, c0, *lists, *constants, *numbers, False, return_cells)
        return results[:4] if cell == LSTM else results[:2]
    nothing: list[Tensor | None] = [None] * directions
    flat = [t for each in lists for t in (each or nothing)]
    if backend == "reference":
        return _outputs(constants, numbers)(input, h0, c0, *flat)
    if torch.compiler.is_compiling():  # which wants them apart: directions may share weights
        flat = [t if t is None or all(t is not s for s in flat[:n]) else t.view_as(t) for n, t in enumerate(flat)]
    wanted = wants_gradient(input, h0, c0, *flat)
    # What recompute finds again, of a cell that has no c, is everything.
    keep = return_cells or ((wanted or transforms_active()) and not (recompute and cell != LSTM))
    output, h_n, c_n, cells, _, _ = apply(_Rnn, _RnnEager, wanted, *tensors, *numbers, keep, recompute, *flat)
    return (output, h_n, c_n, cells) if cell == LSTM else (output, h_n)


def _kernel_alone(input: Tensor, h0: Tensor, c0: Tensor | None, lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether nobody asks for derivatives: then autograd needs to know nothing of the call."""
    if transforms_active() or torch.compiler.is_compiling():
        return False
    return not torch.is_grad_enabled() or not wants_gradient(input, h0, c0, *(t for each in lists for t in each))


def _split(flat: Sequence[Tensor | None], directions: int) -> list[list[Tensor]]:
    """The seven lists."""
    return [[t for t in flat[n * directions : (n + 1) * directions] if t is not None] for n in range(_LISTS)]


def _outputs(constants: Sequence[Any], numbers: Sequence[Any]) -> Callable[..., Any]:
    """The reference, as a function of what it can be differentiated by."""

    def function(input: Tensor, h0: Tensor, c0: Tensor | None, *flat: Tensor | None) -> Any:
        return reference.rnn(input, h0, c0, *_split(flat, h0.shape[0]), *constants, *numbers, False)

    return function


# ---- autograd: a layer --------------------------------------------------------------------------------------------


class _Rnn(torch.autograd.Function):
    """Tensors, numbers, keep, recompute, weights -> output, h_n, c_n, cells, gates, products.

    Backward is a Function again, so that it can be differentiated.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        input, h0, c0, *constants = args[:_TENSORS]
        *numbers, cell = args[_TENSORS : _TENSORS + _NUMBERS]
        keep, _, *flat = args[_TENSORS + _NUMBERS :]
        lists = _split(flat, h0.shape[0])
        return kernel("rnn_fwd", input)(input, h0, c0, *lists, *constants, *numbers, cell, False, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        tensors, ctx.numbers = inputs[:_TENSORS], inputs[_TENSORS : _TENSORS + _NUMBERS]
        _, recompute, *flat = inputs[_TENSORS + _NUMBERS :]
        output, _, c_n, cells, gates, products = outputs
        ctx.set_materialize_grads(False)
        kept = (*tensors, *flat, output, cells, *((None, None) if recompute else (gates, products)))
        ctx.save_for_backward(*kept)
        if forward_ad._current_level >= 0:  # then under vmap marks are of no effect, and every output has a tangent
            ctx.empty = [torch.zeros_like(t) for t in outputs[2:]]
            ctx.save_for_forward(*kept)
        elif ctx.numbers[-1] == LSTM:
            ctx.mark_non_differentiable(gates, products)
        else:
            ctx.mark_non_differentiable(c_n, cells, gates, products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *inputs, output, cells, gates, products = ctx.saved_tensors
        tensors, flat = inputs[:_TENSORS], inputs[_TENSORS:]
        h0 = tensors[1]
        needs, needs_flat = ctx.needs_input_grad[:_STATES], ctx.needs_input_grad[-len(flat) :]
        if gates is None:
            gates = products = cells.new_empty(0)
        count = 4 if ctx.numbers[-1] == LSTM else 2  # torch.compile has gradients of what is not differentiable, too
        rest = (*tensors, output, cells, gates, products, *ctx.numbers, needs[0], any(needs_flat), *flat)

        def of_grads(*grads: Tensor | None) -> Any:
            grads = (*grads[:count], *[None] * (4 - count))
            return apply(_RnnBackward, _RnnBackwardEager, torch.is_grad_enabled(), *grads, *rest)

        grad_input, grad_h0, grad_c0, *grad_lists = batched(of_grads, grads[:count])
        directions = h0.shape[0]
        of_states = [g if need else None for g, need in zip((grad_input, grad_h0, grad_c0), needs, strict=True)]
        of_lists = [grad_lists[n // directions][n % directions] if need else None for n, need in enumerate(needs_flat)]
        return *of_states, *[None] * (_CONSTANTS + _NUMBERS + 2), *of_lists

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        *tensors, _, _, _, _ = ctx.saved_tensors
        constants, inputs = tensors[_STATES:_TENSORS], (*tensors[:_STATES], *tensors[_TENSORS:])
        known = (*directions[:_STATES], *directions[_TENSORS + _NUMBERS + 2 :])
        found = tangents(_outputs(constants, ctx.numbers), inputs, known)
        return *found, *ctx.empty[len(found) - 2 :]

    @staticmethod
    def plain(*args: Any) -> Any:
        tensors, numbers, flat = args[:_TENSORS], args[_TENSORS : _TENSORS + _NUMBERS], args[_TENSORS + _NUMBERS + 2 :]
        found = _outputs(tensors[_STATES:], numbers)(*tensors[:_STATES], *flat)
        return *found, *[None] * (6 - len(found))


class _RnnBackward(torch.autograd.Function):
    """Gradients of output, h_n, c_n, cells; tensors, what was kept, numbers, two needs, weights -> gradients.

    They are those of input, h0 and c0, and of the seven lists, each list's stacked; of shape (0) where not wanted.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        grads, (input, h0, c0, *constants) = args[:4], args[4 : 4 + _TENSORS]
        kept, rest = args[4 + _TENSORS : 8 + _TENSORS], args[8 + _TENSORS :]
        numbers, (need_input, need_weights, *flat) = rest[:_NUMBERS], rest[_NUMBERS:]
        return kernel("rnn_bwd", input)(
            *grads, input, h0, c0, *_split(flat, h0.shape[0]), *constants, *numbers, False, *kept,
            need_input, need_weights,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        rest = inputs[8 + _TENSORS :]
        ctx.numbers, (ctx.need_input, ctx.need_weights, *flat) = rest[:_NUMBERS], rest[_NUMBERS:]
        tensors = *inputs[: 4 + _TENSORS], *flat
        ctx.save_for_backward(*tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)

    @staticmethod
    def formula(
        saved: Sequence[Any], numbers: Sequence[Any], need_input: bool, need_weights: bool
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The gradients as a function of cotangents, states and weights, recomputing the steps; and these."""
        outputs = _outputs(saved[4 + _STATES : 4 + _TENSORS], numbers)

        def grads(*inputs: Any) -> Any:
            given = [n for n, t in enumerate(inputs[:4]) if t is not None]

            def some(*states_and_weights: Any) -> Any:
                found = outputs(*states_and_weights)
                return tuple(found[n] for n in given)

            found = gradients(some, inputs[4:], tuple(inputs[n] for n in given))
            input, h0, c0, *flat = inputs[4:]
            directions, empty, wide = h0.shape[0], input.new_empty(0), torch.promote_types(h0.dtype, torch.float32)
            stacked = []
            for n in range(_LISTS):
                none = empty.to(wide) if n == _NORM else empty
                each = [g for g in found[_STATES:][n * directions : (n + 1) * directions] if g is not None]
                if not each and need_weights and (n == _B_HH or (n == _B_IH and flat[_W_IH] is not None)):
                    none = h0.new_zeros(directions, flat[directions].shape[0])  # no bias: nothing asks for it
                stacked.append(torch.stack(each) if each and need_weights else none)
            grad_c0 = empty if c0 is None else found[2]
            return found[0] if need_input else empty, found[1], grad_c0, *stacked

        return grads, (*saved[: 4 + _STATES], *saved[4 + _TENSORS :])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        formula, inputs = _RnnBackward.formula(ctx.saved_tensors, ctx.numbers, ctx.need_input, ctx.need_weights)
        found = gradients(formula, inputs, cotangents)
        before = 4 + _STATES
        return *found[:before], *[None] * (_CONSTANTS + 4 + _NUMBERS + 2), *found[before:]

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        formula, inputs = _RnnBackward.formula(ctx.saved_tensors, ctx.numbers, ctx.need_input, ctx.need_weights)
        known = (*directions[: 4 + _STATES], *directions[8 + _TENSORS + _NUMBERS + 2 :])
        return tangents(formula, inputs, known)

    @staticmethod
    def plain(*args: Any) -> Any:
        numbers, (need_input, need_weights, *flat) = args[8 + _TENSORS :][:_NUMBERS], args[8 + _TENSORS + _NUMBERS :]
        saved = (*args[: 4 + _TENSORS], *flat)
        formula, inputs = _RnnBackward.formula(saved, numbers, need_input, need_weights)
        return formula(*inputs)


_RnnEager, _RnnBackwardEager = eager(_Rnn), eager(_RnnBackward)


# ---- fake kernels -------------------------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::rnn_fwd")
def _(input: Tensor, h0: Tensor, c0: Tensor | None, *rest: Any) -> Any:
    w_hh, norm, (cell, _, keep) = rest[_W_HH], rest[_NORM], rest[-3:]
    (steps, batch), (directions, _, width) = input.shape[:2], h0.shape
    gates, acc = w_hh[0].shape[0], torch.promote_types(input.dtype, torch.float32)
    hidden = gates // GATES[cell]
    rows, nothing = (directions, steps, batch), input.new_empty(0, dtype=acc)
    return (
        input.new_empty((steps, batch, directions * width)),
        input.new_empty(h0.shape),
        input.new_empty((directions, batch, hidden) if cell == LSTM else 0),
        input.new_empty((*rows, hidden), dtype=acc) if keep and cell == LSTM else nothing,
        input.new_empty((*rows, kept_gates(cell) * hidden), dtype=acc) if keep else nothing.clone(),
        input.new_empty((*rows, gates), dtype=acc) if keep and norm else nothing.clone(),
    )


@torch.library.register_fake("seqkern::rnn_bwd")
def _(
    grad_output: Any, grad_h_n: Any, grad_c_n: Any, grad_cells: Any, input: Tensor, h0: Tensor, c0: Any, *rest: Any
) -> Any:
    w_ih, w_hh, _, _, w_hr, peephole, norm = rest[:_LISTS]
    need_input, need_weights = rest[-2:]

    def grads(tensors: Sequence[Tensor], wanted: bool = True) -> Tensor:
        dtype = torch.promote_types(h0.dtype, torch.float32) if tensors is norm else h0.dtype
        return h0.new_empty((h0.shape[0], *tensors[0].shape) if need_weights and tensors and wanted else 0, dtype=dtype)

    bias = [w[:, 0] for w in w_hh]
    return (
        input.new_empty(input.shape if need_input else 0),
        h0.new_empty(h0.shape),
        h0.new_empty(0 if c0 is None else c0.shape),
        grads(w_ih),
        grads(w_hh),
        grads(bias, bool(w_ih)),
        grads(bias),
        grads(w_hr),
        grads(peephole),
        grads(norm),
    )


# ---- batching rules -----------------------------------------------------------------------------------------------


@torch.library.register_vmap("seqkern::rnn_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return fold(torch.ops.seqkern.rnn_fwd, info.batch_size, in_dims, args, 3)


@torch.library.register_vmap("seqkern::rnn_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    need_weights = args[-1]  # a sample's own: their sum alone comes out of a batch
    return fold(torch.ops.seqkern.rnn_bwd, info.batch_size, in_dims, args, 7, need_weights)


def fold(op: Any, samples: int, in_dims: Any, args: Any, first_list: int | None = None, apart: bool = False) -> Any:
    """The samples become part of the batch: dimension 1 of (T, B, ..) and (D, B, ..), 2 of (D, T, B, ..), else 0.

    Not where the weights differ or have gradients of their own, nor with zoneout, which counts the rows of the batch;
    then each sample is a call.
    """
    if first_list is not None:
        dims = torch.utils._pytree.tree_leaves(in_dims[first_list : first_list + _LISTS])
        seed = args[first_list + _LISTS + 3]
        apart = apart or seed is not None or any(dim is not None for dim in dims)
    if apart or samples == 0:
        return per_sample(op, samples, in_dims, args)
    lengths, resets = (None, None) if first_list is None else (first_list + _LISTS, first_list + _LISTS + 1)

    def of_samples(n: int, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = t.expand(samples, *t.shape) if in_dims[n] is None else t.movedim(in_dims[n], 0)
        if t.dim() == 2 and n != lengths and t.shape[1] == 0:  # not kept
            return t[0]
        batch = 0 if first_list is None or n == lengths else 1 if n == resets else t.dim() - 3
        return t.movedim(0, batch).flatten(batch, batch + 1)

    outputs = op(*(of_samples(n, argument) for n, argument in enumerate(args)))
    # What is not wanted comes back empty, with one dimension.
    out_dims = tuple(None if t.dim() == 1 else t.dim() - 2 for t in outputs)
    unfolded = tuple(t if d is None else t.unflatten(d, (samples, -1)) for t, d in zip(outputs, out_dims, strict=True))
    return unfolded, out_dims
