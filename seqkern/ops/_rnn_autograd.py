"""Derivatives, fake kernels and batching rules of the recurrent networks: what stands between API and kernels.

The arguments of a layer are those of `seqkern._arguments.Rnn`, in the shapes that csrc/rnn/rnn.h asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._arguments import Rnn, RnnBackward, RnnGrads, RnnKept, RnnNumbers, RnnTensors, Weights, by_name
from seqkern._direct import Context, long_way
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


def run(backend: str, layer: Rnn, recompute: bool, return_cells: bool) -> tuple[Tensor, ...]:
    """output and h_n, and of an LSTM c_n and, if wanted, all c_t (D, T, B, H), by the backend's kernel or reference."""
    tensors, numbers, weights = layer
    if backend != "reference" and _kernel_alone(layer):
        results = _forward(tensors, numbers, weights, return_cells)
        return results[:4] if numbers.cell == LSTM else results[:2]
    if backend == "reference":
        return _outputs(tensors, numbers)(*layer.differentiable())
    if torch.compiler.is_compiling():  # which wants them apart: directions may share weights
        flat = weights.flat()
        flat = [t if t is None or all(t is not s for s in flat[:n]) else t.view_as(t) for n, t in enumerate(flat)]
        layer = Rnn(tensors, numbers, Weights.of(flat))
    wanted = wants_gradient(*layer.differentiable())
    # What recompute finds again, of a cell that has no c, is everything.
    keep = return_cells or ((wanted or transforms_active()) and not (recompute and numbers.cell != LSTM))
    output, h_n, c_n, cells, _, _ = apply(_Rnn, _RnnEager, wanted, keep, recompute, *layer.flat())
    return (output, h_n, c_n, cells) if numbers.cell == LSTM else (output, h_n)


def _kernel_alone(layer: Rnn) -> bool:
    """Whether nobody asks for derivatives: then autograd needs to know nothing of the call."""
    if transforms_active() or torch.compiler.is_compiling():
        return False
    return not torch.is_grad_enabled() or not wants_gradient(*layer.differentiable())


def _forward(tensors: RnnTensors, numbers: RnnNumbers, weights: Weights, keep: bool) -> Any:
    """The kernel's six results; the weights as it takes them."""
    input, h0, c0, *constants = tensors
    return kernel("rnn_fwd", input)(input, h0, c0, *weights, *constants, *numbers, keep)


def _outputs(tensors: RnnTensors, numbers: RnnNumbers) -> Callable[..., Any]:
    """The reference, as a function of what it can be differentiated by: see `Rnn.differentiable`."""
    _, _, _, *constants = tensors

    def function(input: Tensor, h0: Tensor, c0: Tensor | None, *weights: Tensor | None) -> Any:
        return reference.rnn(input, h0, c0, *Weights.of(weights).given(), *constants, *numbers)

    return function


# ---- autograd: a layer --------------------------------------------------------------------------------------------


class _Rnn(torch.autograd.Function):
    """keep, recompute, a layer's arguments -> output, h_n, c_n, cells, gates, products.

    Backward is a Function again, so that it can be differentiated.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(keep: bool, recompute: bool, *args: Any) -> Any:
        tensors, numbers, weights = Rnn.of(args)
        return _forward(tensors, numbers, weights.given(), keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        _, recompute, *args = inputs
        tensors, ctx.numbers, weights = Rnn.split(args)
        output, _, c_n, cells, gates, products = outputs
        ctx.set_materialize_grads(False)
        kept = RnnKept(output, cells, None, None) if recompute else RnnKept(output, cells, gates, products)
        saved = (*kept, *tensors, *weights)
        ctx.save_for_backward(*saved)
        if forward_ad._current_level >= 0:  # then under vmap marks are of no effect, and every output has a tangent
            ctx.empty = [torch.zeros_like(t) for t in outputs[2:]]
            ctx.save_for_forward(*saved)
        elif ctx.numbers.cell == LSTM:
            ctx.mark_non_differentiable(gates, products)
        else:
            ctx.mark_non_differentiable(c_n, cells, gates, products)

    @staticmethod
    def saved(ctx: Any) -> tuple[RnnKept, RnnTensors, list[Any]]:
        """What `setup_context` saved; the weights flat."""
        output, cells, gates, products, input, h0, c0, lengths, resets, mask, seed, *weights = ctx.saved_tensors
        tensors = RnnTensors(input, h0, c0, lengths, resets, mask, seed)
        return RnnKept(output, cells, gates, products), tensors, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a tensor
        (output, cells, gates, products), tensors, weights = _Rnn.saved(ctx)
        _, _, *needs = ctx.needs_input_grad
        needs, _, needs_weights = Rnn.split(needs)
        if gates is None:
            gates = products = cells.new_empty(0)
        count = 4 if ctx.numbers.cell == LSTM else 2  # torch.compile has gradients of what is not differentiable, too
        rest = (
            output, cells, gates, products, needs.input, any(needs_weights), *tensors, *ctx.numbers, *weights
        )  # fmt: skip

        def of_grads(*grads: Tensor | None) -> Any:
            grads = (*grads[:count], *[None] * (4 - count))
            return apply(_RnnBackward, _RnnBackwardEager, torch.is_grad_enabled(), *grads, *rest)

        grad_input, grad_h0, grad_c0, *grad_weights = batched(of_grads, grads[:count])
        of_tensors = RnnTensors(
            input=grad_input if needs.input else None,
            h0=grad_h0 if needs.h0 else None,
            c0=grad_c0 if needs.c0 else None,
        )
        of_weights = [
            each[d] if need else None  # of a direction
            for each, those in zip(grad_weights, Weights.of(needs_weights), strict=True)
            for d, need in enumerate(those)
        ]
        return None, None, *of_tensors, *[None] * len(ctx.numbers), *of_weights

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        _, tensors, weights = _Rnn.saved(ctx)
        layer = Rnn(tensors, ctx.numbers, Weights.of(weights))
        _, _, *known = directions
        found = tangents(_outputs(tensors, ctx.numbers), layer.differentiable(), Rnn.of(known).differentiable())
        return *found, *ctx.empty[len(found) - 2 :]

    @staticmethod
    def plain(keep: bool, recompute: bool, *args: Any) -> Any:
        layer = Rnn.of(args)
        found = _outputs(layer.tensors, layer.numbers)(*layer.differentiable())
        return *found, *[None] * (6 - len(found))


class _RnnBackward(torch.autograd.Function):
    """Gradients of output, h_n, c_n, cells, what was kept, two needs, a layer's arguments -> gradients.

    They are those of input, h0 and c0, and of the seven lists, each list's stacked; of shape (0) where not wanted.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        grads, kept, need_input, need_weights, (tensors, numbers, weights) = RnnBackward.of(args)
        input, h0, c0, *constants = tensors
        return kernel("rnn_bwd", input)(
            *grads, input, h0, c0, *weights.given(), *constants, *numbers, *kept, need_input, need_weights
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grads, _, ctx.need_input, ctx.need_weights, layer = RnnBackward.of(inputs)
        ctx.numbers = layer.numbers
        saved = (*grads, *layer.tensors, *layer.weights.flat())
        ctx.save_for_backward(*saved)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*saved)

    @staticmethod
    def saved(ctx: Any) -> tuple[RnnGrads, Rnn, bool, bool]:
        """What `formula` asks for."""
        grad_output, grad_h_n, grad_c_n, grad_cells, input, h0, c0, lengths, resets, mask, seed, *weights = (
            ctx.saved_tensors
        )
        tensors = RnnTensors(input, h0, c0, lengths, resets, mask, seed)
        grads = RnnGrads(grad_output, grad_h_n, grad_c_n, grad_cells)
        return grads, Rnn(tensors, ctx.numbers, Weights.of(weights)), ctx.need_input, ctx.need_weights

    @staticmethod
    def formula(
        grads: RnnGrads, layer: Rnn, need_input: bool, need_weights: bool
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The gradients as a function of cotangents, states and weights, recomputing the steps; and these."""
        outputs = _outputs(layer.tensors, layer.numbers)
        given = [n for n, t in enumerate(grads) if t is not None]

        def stacked(name: str, each: Sequence[Any], input: Tensor, h0: Tensor, weights: Weights) -> Tensor:
            """The gradients of one kind of weights, as the kernel gives them."""
            found = [g for g in each if g is not None]
            if need_weights and found:
                return torch.stack(found)
            if need_weights and (name == "b_hh" or (name == "b_ih" and weights.w_ih[0] is not None)):
                return h0.new_zeros(h0.shape[0], weights.w_hh[0].shape[0])  # no bias: nothing asks for it
            empty = input.new_empty(0)
            return empty.to(torch.promote_types(h0.dtype, torch.float32)) if name == "norm" else empty

        def function(*inputs: Any) -> Any:
            def some(*states_and_weights: Any) -> Any:
                found = outputs(*states_and_weights)
                return tuple(found[n] for n in given)

            grad_output, grad_h_n, grad_c_n, grad_cells, *differentiable = inputs
            cotangents = RnnGrads(grad_output, grad_h_n, grad_c_n, grad_cells)
            found = gradients(some, differentiable, tuple(cotangents[n] for n in given))
            grad_input, grad_h0, grad_c0, *grad_weights = found
            input, h0, c0, *flat = differentiable
            weights, empty = Weights.of(flat), input.new_empty(0)
            return (
                grad_input if need_input else empty,
                grad_h0,
                empty if c0 is None else grad_c0,
                *[
                    stacked(name, each, input, h0, weights)
                    for name, each in zip(Weights._fields, Weights.of(grad_weights), strict=True)
                ],
            )

        return function, (*grads, *layer.differentiable())

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        formula, inputs = _RnnBackward.formula(*_RnnBackward.saved(ctx))
        found = gradients(formula, inputs, cotangents)
        grad_output, grad_h_n, grad_c_n, grad_cells, input, h0, c0, *weights = found
        of_grads, of_tensors = RnnGrads(grad_output, grad_h_n, grad_c_n, grad_cells), RnnTensors(input, h0, c0)
        nothing = [None] * (len(RnnKept._fields) + 2)
        return *of_grads, *nothing, *of_tensors, *[None] * len(ctx.numbers), *weights

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        formula, inputs = _RnnBackward.formula(*_RnnBackward.saved(ctx))
        known = RnnBackward.of(directions)
        return tangents(formula, inputs, (*known.grads, *known.rnn.differentiable()))

    @staticmethod
    def plain(*args: Any) -> Any:
        grads, _, need_input, need_weights, layer = RnnBackward.of(args)
        formula, inputs = _RnnBackward.formula(grads, layer, need_input, need_weights)
        return formula(*inputs)


_RnnEager, _RnnBackwardEager = eager(_Rnn), eager(_RnnBackward)


@long_way("RnnNode")
def _backward_of_node(
    grads: Sequence[Tensor | None],
    saved: Sequence[Any],
    kept: Sequence[Tensor],
    numbers: Sequence[float],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of input, h0, c0 and the weights that are there, kind by kind; they are differentiable again."""
    *inputs, cells, gates, output = saved
    cell, bias, projected = (int(number) for number in numbers)
    directions = inputs[1].shape[0]
    there = (True, True, bool(bias), bool(bias), bool(projected), False, False)  # of each kind

    def layer(values: Sequence[Any], nothing: Any) -> Rnn:
        input, h0, c0, *flat = values
        rest = iter(flat)
        weights = Weights(*[[next(rest) if given else nothing for _ in range(directions)] for given in there])
        return Rnn(RnnTensors(input, h0, c0, *[nothing] * 4), RnnNumbers(0.0, 0.0, 1e-5, cell), weights)

    given, wanted = layer(inputs, None), layer(needs, False)
    results = (output, cells, gates, cells.new_empty(0))
    context: Any = Context(
        (*results, *given.tensors, *given.weights.flat()),
        (False, False, *wanted.tensors, *[False] * len(given.numbers), *wanted.weights.flat()),
    )
    context.numbers = given.numbers
    _, _, *found = _Rnn.backward(context, *grads, *[None] * (4 - len(grads)))
    tensors, _, weights = Rnn.of(found)
    of_weights = [g for each, given in zip(weights, there, strict=True) for g in each if given]
    return [tensors.input, tensors.h0, tensors.c0, *of_weights]


# ---- fake kernels -------------------------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::rnn_fwd")
def _(
    input: Tensor, h0: Tensor, c0: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, w_hr: Any, peephole: Any, norm: Any,
    lengths: Any, resets: Any, recurrent_mask: Any, seed: Any, zoneout_h: float, zoneout_c: float, eps: float,
    cell: int, keep: bool,
) -> Any:  # fmt: skip
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
    grad_output: Any, grad_h_n: Any, grad_c_n: Any, grad_cells: Any, input: Tensor, h0: Tensor, c0: Any, w_ih: Any,
    w_hh: Any, b_ih: Any, b_hh: Any, w_hr: Any, peephole: Any, norm: Any, lengths: Any, resets: Any,
    recurrent_mask: Any, seed: Any, zoneout_h: float, zoneout_c: float, eps: float, cell: int,
    output: Any, cells: Any, gates: Any, products: Any, need_input: bool, need_weights: bool,
) -> Any:  # fmt: skip
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
    return fold(torch.ops.seqkern.rnn_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::rnn_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return fold(torch.ops.seqkern.rnn_bwd, info.batch_size, in_dims, args)


_BATCH = {"lengths": 0, "resets": 1}  # where tensors of a layer have their batch that are shaped unlike states


def fold(op: Any, samples: int, in_dims: Any, args: Any) -> Any:
    """The samples become part of the batch: dimension 1 of (T, B, ..) and (D, B, ..), 2 of (D, T, B, ..), else 0.

    Not where the weights differ or have gradients of their own, nor with zoneout, which counts the rows of the batch;
    then each sample is a call. Of a cell, which has no weights here, every tensor is (B, ..).
    """
    named, dims = by_name(op, args), by_name(op, in_dims)
    layer = "w_hh" in named
    own = torch.utils._pytree.tree_leaves([dims[name] for name in Weights._fields if layer])
    # Gradients of weights: those of a sample, and only their sum comes out of a batch.
    alone = named.get("seed") is not None or any(dim is not None for dim in own) or named.get("need_weights", False)
    if alone or samples == 0:
        return per_sample(op, samples, in_dims, args)

    def of_samples(name: str, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = t.expand(samples, *t.shape) if dims[name] is None else t.movedim(dims[name], 0)
        if t.dim() == 2 and name != "lengths" and t.shape[1] == 0:  # not kept
            return t[0]
        batch = _BATCH.get(name, t.dim() - 3) if layer else 0
        return t.movedim(0, batch).flatten(batch, batch + 1)

    outputs = op(*(of_samples(name, argument) for name, argument in named.items()))
    # What is not wanted comes back empty, with one dimension.
    out_dims = tuple(None if t.dim() == 1 else t.dim() - 2 for t in outputs)
    unfolded = tuple(t if d is None else t.unflatten(d, (samples, -1)) for t, d in zip(outputs, out_dims, strict=True))
    return unfolded, out_dims
