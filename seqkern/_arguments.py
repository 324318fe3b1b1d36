"""The arguments of the ops by name: what passes between the public functions, autograd and the reference.

They become flat in two places: where an op of the dispatcher is called, in the order of its schema (csrc/ops.cpp), and
where a Function is applied, because autograd sees tensors only that are arguments by themselves. What a Function gets
becomes named again at once: `Rnn.of(args)`. `split` leaves the weights flat, for those who only hand them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


def by_name(op: Any, values: Sequence[Any]) -> dict[str, Any]:
    """What comes in the order of an op's schema (`torch.ops.seqkern.layer_norm_fwd`), by the names there."""
    return {argument.name: value for argument, value in zip(op.default._schema.arguments, values, strict=True)}


# ---- norms --------------------------------------------------------------------------------------------------------


class LayerNormNumbers(NamedTuple):
    eps: float
    dropout_p: float
    centred: bool
    weight_offset: float
    round_before_weight: bool
    dims: int  # how many, the last ones, are normalised together


class LayerNorm(NamedTuple):
    """A norm, of a sum where there is a residual; also the gradients of its arguments."""

    input: Any = None
    residual: Any = None
    weight: Any = None
    bias: Any = None
    seed: Any = None
    eps: Any = None
    dropout_p: Any = None
    centred: Any = None
    weight_offset: Any = None
    round_before_weight: Any = None
    dims: Any = None

    def numbers(self) -> LayerNormNumbers:
        return LayerNormNumbers(
            self.eps, self.dropout_p, self.centred, self.weight_offset, self.round_before_weight, self.dims
        )

    def differentiable(self) -> tuple[Any, ...]:
        return (self.input, self.residual, self.weight, self.bias)


class LayerNormBackward(NamedTuple):
    """The backward pass of a norm; also the gradients of its arguments."""

    grad_output: Any = None
    grad_sum: Any = None
    normalised: Any = None
    weight: Any = None
    bias: Any = None
    mean: Any = None
    rstd: Any = None
    seed: Any = None
    eps: Any = None
    dropout_p: Any = None
    centred: Any = None
    weight_offset: Any = None
    dims: Any = None
    need_weight: Any = None
    need_bias: Any = None

    def numbers(self) -> tuple[Any, ...]:
        """What is no tensor."""
        numbers = (self.eps, self.dropout_p, self.centred, self.weight_offset, self.dims)
        return (*numbers, self.need_weight, self.need_bias)

    def differentiable(self) -> tuple[Any, ...]:
        return (self.grad_output, self.grad_sum, self.normalised, self.weight, self.bias)


# ---- recurrent layers ---------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """The parameters of a layer: of each kind a tensor for each direction, or none (an empty list, or None's)."""

    w_ih: Sequence[Any]
    w_hh: Sequence[Any]
    b_ih: Sequence[Any]
    b_hh: Sequence[Any]
    w_hr: Sequence[Any]
    peephole: Sequence[Any]
    norm: Sequence[Any]

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Weights:
        directions = len(flat) // len(cls._fields)
        return cls(*[flat[first : first + directions] for first in range(0, len(flat), directions)])

    def flat(self) -> list[Any]:
        """One list behind the other, with None where there is no tensor."""
        nothing = [None] * len(self.w_hh)
        return [t for each in self for t in each or nothing]

    def given(self) -> Weights:
        """As the ops take them: an empty list where there is no tensor."""
        return Weights(*[[t for t in each if t is not None] for each in self])


class RnnTensors(NamedTuple):
    """The tensors of a layer but for its weights; also their gradients."""

    input: Any = None
    h0: Any = None
    c0: Any = None
    lengths: Any = None
    resets: Any = None
    recurrent_mask: Any = None
    seed: Any = None


class RnnNumbers(NamedTuple):
    zoneout_h: float
    zoneout_c: float
    eps: float
    cell: int


class Rnn(NamedTuple):
    """A recurrent layer, of one direction or two."""

    tensors: RnnTensors
    numbers: RnnNumbers
    weights: Weights

    @classmethod
    def split(cls, args: Sequence[Any]) -> tuple[RnnTensors, RnnNumbers, list[Any]]:
        """The parts of what `flat` gives; the weights as they are there."""
        input, h0, c0, lengths, resets, mask, seed, zoneout_h, zoneout_c, eps, cell, *weights = args
        tensors = RnnTensors(input, h0, c0, lengths, resets, mask, seed)
        return tensors, RnnNumbers(zoneout_h, zoneout_c, eps, cell), weights

    @classmethod
    def of(cls, args: Sequence[Any]) -> Rnn:
        tensors, numbers, weights = cls.split(args)
        return cls(tensors, numbers, Weights.of(weights))

    def flat(self) -> tuple[Any, ...]:
        return (*self.tensors, *self.numbers, *self.weights.flat())

    def differentiable(self) -> tuple[Any, ...]:
        """What there are derivatives of: input, h0, c0 and the weights, flat."""
        return (self.tensors.input, self.tensors.h0, self.tensors.c0, *self.weights.flat())


class RnnGrads(NamedTuple):
    """The gradients of a layer's results."""

    output: Tensor | None
    h_n: Tensor | None
    c_n: Tensor | None
    cells: Tensor | None


class RnnKept(NamedTuple):
    """What the backward pass needs of a layer's results; gates and products are empty where it finds them again."""

    output: Tensor
    cells: Tensor
    gates: Any
    products: Any


class RnnBackward(NamedTuple):
    """The backward pass of a layer."""

    grads: RnnGrads
    kept: RnnKept
    need_input: bool
    need_weights: bool
    rnn: Rnn

    @classmethod
    def of(cls, args: Sequence[Any]) -> RnnBackward:
        grad_output, grad_h_n, grad_c_n, grad_cells, output, cells, gates, products, *rest = args
        need_input, need_weights, *layer = rest
        grads = RnnGrads(grad_output, grad_h_n, grad_c_n, grad_cells)
        return cls(grads, RnnKept(output, cells, gates, products), need_input, need_weights, Rnn.of(layer))


class RnnCell(NamedTuple):
    """A step of a recurrent cell, from products that are complete."""

    x_gates: Any
    h_gates: Any
    h: Any
    c: Any
    cell: int

    def differentiable(self) -> tuple[Any, ...]:
        return (self.x_gates, self.h_gates, self.h, self.c)


class RnnCellBackward(NamedTuple):
    """The backward pass of a step: the gradients of its results, its arguments, its results, the cell."""

    grad_h: Any
    grad_c: Any
    x_gates: Any
    h_gates: Any
    h: Any
    c: Any
    c_new: Any
    activated: Any
    cell: int

    def differentiable(self) -> tuple[Any, ...]:
        return (self.grad_h, self.grad_c, self.x_gates, self.h_gates, self.h, self.c)


# ---- attention ----------------------------------------------------------------------------------------------------


class AttentionInputs(NamedTuple):
    """What there are derivatives of; also what belongs to each, as its gradient."""

    query: Any
    key: Any
    value: Any
    mask: Any  # added to the scores, None where it is bool
    slopes: Any
    sinks: Any


class AttentionTensors(NamedTuple):
    """The tensors that attention takes; also their gradients."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    query_starts: Any = None
    key_starts: Any = None
    key_lengths: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    seed: Any = None

    def differentiable(self) -> AttentionInputs:
        mask = self.attn_mask
        if mask is not None and not mask.is_floating_point():
            mask = None
        return AttentionInputs(self.query, self.key, self.value, mask, self.alibi_slopes, self.sinks)


class AttentionNumbers(NamedTuple):
    max_queries: int
    max_keys: int
    diagonal: int
    lower_right: bool
    left: int
    right: int
    scale: float
    softcap: float
    dropout_p: float


class Attention(NamedTuple):
    """The arguments of attention; flat: `(*tensors, *numbers)`."""

    tensors: AttentionTensors
    numbers: AttentionNumbers

    @classmethod
    def of(cls, args: Sequence[Any]) -> Attention:
        count = len(AttentionTensors._fields)
        return cls(AttentionTensors(*args[:count]), AttentionNumbers(*args[count:]))


class AttentionNeeds(NamedTuple):
    """Which gradients beside those of query, key and value are wanted."""

    mask: bool
    slopes: bool
    sinks: bool


class AttentionBackward(NamedTuple):
    """The arguments of attention's backward pass; flat: the gradients, out and lse, the needs, then `Attention`'s."""

    grad_out: Any
    grad_lse: Any
    out: Any
    lse: Any
    needs: AttentionNeeds
    tensors: AttentionTensors
    numbers: AttentionNumbers

    @classmethod
    def of(cls, args: Sequence[Any]) -> AttentionBackward:
        grad_out, grad_lse, out, lse, need_mask, need_slopes, need_sinks, *rest = args
        tensors, numbers = Attention.of(rest)
        needs = AttentionNeeds(need_mask, need_slopes, need_sinks)
        return cls(grad_out, grad_lse, out, lse, needs, tensors, numbers)

    def differentiable(self) -> tuple[Any, ...]:
        return (self.grad_out, self.grad_lse, *self.tensors.differentiable())
