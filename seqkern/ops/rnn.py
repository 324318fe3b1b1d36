"""Recurrent networks: the functional API, its gradients, fake kernels and batching rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqkern import reference
from seqkern._library import backend_for, kernel
from seqkern.ops._autograd import FLOATING, Cost, apply, eager, gradients, per_sample, tangents, wants_gradient


def lstm(
    input: Tensor,
    hx: tuple[Tensor, Tensor] | None,
    weights: Sequence[Tensor],
    *,
    lengths: Tensor | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    training: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A long short-term memory of one or more layers over whole sequences: `torch.nn.LSTM`'s meaning.

    i, f, o = sigmoid(W x_t + U h_{t-1} + b), g = tanh(likewise), c_t = f * c_{t-1} + i * g, h_t = o * tanh(c_t). The
    state is kept in float32 (float64 for float64) from step to step, whatever the dtype is.

    Args:
        input: (T, B, I), or (B, T, I) with batch_first; float64, float32, bfloat16 or float16.
        hx: h and c before the first step, each (num_layers * directions, B, H) in the input's dtype; None for zeros.
        weights: for every layer, and in it for every direction, w_ih (4H, I), w_hh (4H, H) and, unless no layer has
            any, b_ih (4H,) and b_hh (4H,): a flat list, as `torch.nn.LSTM.parameters()` gives it. Gates in the order
            i, f, g, o. I is directions * H from the second layer on.
        lengths: not available yet.
        num_layers: layers; each reads the outputs of the one below.
        bidirectional: a second direction, from the last step to the first, beside each; their outputs are concatenated.
        batch_first: whether the batch is the first dimension of input and output. That of hx is always its second.
        dropout: the probability with which an output of any layer but the last is dropped, when `training`.

    Returns:
        The outputs of the last layer, (T, B, directions * H) or batch first, and (h_n, c_n): the state after each
        layer's and direction's last step, shaped as hx. Under autocast the inputs are cast first, as torch's op does.

    Raises:
        TypeError: an argument that is not a tensor, or dtypes that are not floating point or differ.
        ValueError: shapes or a number of weights that do not fit, or tensors on different devices.
        NotImplementedError: lengths; or the backend in force does not run on the input's device.

    Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; the forget gate: Gers et al. 2000.

    Example:
        >>> import torch, seqkern
        >>> theirs = torch.nn.LSTM(5, 8)
        >>> x = torch.randn(10, 3, 5)
        >>> output, (h_n, c_n) = seqkern.lstm(x, None, list(theirs.parameters()))
        >>> torch.allclose(output, theirs(x)[0], atol=1e-6)
        True
    """
    op = "lstm"
    if lengths is not None:
        raise NotImplementedError(f"{op}: lengths is not available yet; use torch.nn.LSTM on a packed sequence")
    if not 0 <= dropout <= 1:
        raise ValueError(f"{op}: dropout must be a probability, between 0 and 1, got {dropout}")
    if num_layers < 1:
        raise ValueError(f"{op}: num_layers must be at least 1, got {num_layers}")
    directions = 2 if bidirectional else 1
    _check_tensor(op, "input", input, 3)
    per_cell = _check_weights(op, input, weights, num_layers, directions)
    hidden, batch = weights[1].shape[1], input.shape[0 if batch_first else 1]
    expected = (num_layers * directions, batch, hidden)
    if hx is None:
        zeros = input.new_zeros(expected)
        hx = (zeros, zeros)
    else:
        hx = check_pair(op, hx)
        for name, state in zip(("hx[0]", "hx[1]"), hx, strict=True):
            _check_like(op, name, state, input, expected)
    input, h0, c0, *weights = _autocast(input, *hx, *weights)

    layer_input = input.transpose(0, 1) if batch_first else input
    h_n, c_n = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            parameters = weights[index * per_cell : (index + 1) * per_cell]
            output, h, c = _layer(layer_input, h0[index], c0[index], parameters, direction == 1)
            outputs.append(output)
            h_n.append(h)
            c_n.append(c)
        layer_input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and training and layer < num_layers - 1:
            layer_input = F.dropout(layer_input, dropout)
    output = layer_input.transpose(0, 1) if batch_first else layer_input
    return output, (torch.stack(h_n), torch.stack(c_n))


def lstm_cell(
    input: Tensor,
    hx: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of a long short-term memory, as `torch.nn.LSTMCell` takes it: two products, then one fused kernel.

    Args:
        input: (B, I); float64, float32, bfloat16 or float16.
        hx: h and c before the step, each (B, H), in the input's dtype.
        w_ih: (4H, I), gates in the order i, f, g, o.
        w_hh: (4H, H).
        b_ih, b_hh: (4H,) or None.

    Returns:
        h and c after the step, (B, H). Under autocast the products are cast, as torch's are.

    Raises:
        TypeError: an argument that is not a tensor, or dtypes that are not floating point or differ.
        ValueError: shapes that do not fit each other, or tensors on different devices.
        NotImplementedError: the backend in force does not run on the input's device.

    Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; the forget gate: Gers et al. 2000.

    Example:
        >>> import torch, seqkern
        >>> cell = torch.nn.LSTMCell(5, 8)
        >>> h, c = seqkern.lstm_cell(torch.randn(3, 5), (torch.zeros(3, 8), torch.zeros(3, 8)), *cell.parameters())
        >>> h.shape
        torch.Size([3, 8])
    """
    op = "lstm_cell"
    _check_tensor(op, "input", input, 2)
    h, c = check_pair(op, hx)
    _check_tensor(op, "w_hh", w_hh, 2)
    batch, inputs, hidden = input.shape[0], input.shape[1], w_hh.shape[1]
    _check_like(op, "hx[0]", h, input, (batch, hidden))
    _check_like(op, "hx[1]", c, input, (batch, hidden))
    _check_like(op, "w_ih", w_ih, input, (4 * hidden, inputs))
    _check_like(op, "w_hh", w_hh, input, (4 * hidden, hidden))
    for name, bias in (("b_ih", b_ih), ("b_hh", b_hh)):
        if bias is not None:
            _check_like(op, name, bias, input, (4 * hidden,))
    gates = F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
    wide = torch.promote_types(gates.dtype, c.dtype)  # they differ under autocast only
    gates, c = gates.to(wide), c.to(wide)
    if backend_for(op, gates) == "reference":
        return reference.lstm_cell(gates, c)
    h_new, c_new, _ = apply(_LstmCell, _LstmCellEager, wants_gradient(gates, c), gates, c)
    return h_new, c_new


def cost(
    steps: int,
    batch: int,
    inputs: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    training: bool = False,
    backward: bool = False,
) -> Cost:
    """Work of one layer in one direction, in its products; `backward` counts the backward pass alone.

    `training` counts the gates and cells that the forward pass keeps, in the accumulation type.
    """
    rows, size = steps * batch, dtype.itemsize
    flops = 2 * rows * 4 * hidden * (inputs + hidden)
    parameters = 4 * hidden * (inputs + hidden + 2)
    kept = rows * 5 * hidden * (8 if dtype == torch.float64 else 4)
    if backward:  # reads x, y, dy, the weights and what was kept; writes dx and the weights' gradients
        return Cost(flops=2 * flops, bytes=size * (2 * rows * (inputs + hidden) + 2 * parameters) + kept)
    return Cost(flops=flops, bytes=size * (rows * (inputs + hidden) + parameters) + (kept if training else 0))


# ---- checks -------------------------------------------------------------------------------------------------------


def _check_tensor(op: str, name: str, t: Tensor, dim: int) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    if t.dtype not in FLOATING:
        raise TypeError(f"{op}: {name} must be float64, float32, bfloat16 or float16, got {t.dtype}")
    if t.dim() != dim:
        raise ValueError(f"{op}: {name} must have {dim} dimensions, got shape {tuple(t.shape)}")


def _check_like(op: str, name: str, t: Tensor, input: Tensor, shape: tuple[int, ...]) -> None:
    _check_tensor(op, name, t, len(shape))
    if t.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(t.shape)}")
    exempt = _autocasts(input) and torch.float64 not in (t.dtype, input.dtype)  # autocast leaves float64 alone
    if t.dtype != input.dtype and not exempt:
        raise TypeError(f"{op}: {name} must have the input's dtype {input.dtype}, got {t.dtype}")
    if t.device != input.device:
        raise ValueError(f"{op}: {name} must be on the input's device {input.device}, got {t.device}")


def check_pair(op: str, hx: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """hx as a pair of tensors, or TypeError."""
    if not isinstance(hx, (tuple, list)) or len(hx) != 2:
        got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
        raise TypeError(f"{op}: hx must be a pair of tensors (h, c), got {got}")
    for i, state in enumerate(hx):
        if not isinstance(state, Tensor):
            raise TypeError(f"{op}: hx[{i}] must be a tensor, got {type(state).__name__}")
    return hx[0], hx[1]


def _check_weights(op: str, input: Tensor, weights: Sequence[Tensor], num_layers: int, directions: int) -> int:
    """The number of tensors that a layer has in one direction: 2, or 4 with biases."""
    cells = num_layers * directions
    if len(weights) not in (2 * cells, 4 * cells):
        raise ValueError(
            f"{op}: weights must hold {4 * cells} tensors, or {2 * cells} without biases, for {num_layers} layers in "
            f"{directions} directions, got {len(weights)}"
        )
    per_cell = len(weights) // cells
    _check_tensor(op, "weights[1]", weights[1], 2)
    hidden = weights[1].shape[1]
    for index, t in enumerate(weights):
        cell, kind = divmod(index, per_cell)
        inputs = input.shape[2] if cell < directions else directions * hidden
        shape = ((4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))[kind]
        _check_like(op, f"weights[{index}] ({('w_ih', 'w_hh', 'b_ih', 'b_hh')[kind]})", t, input, shape)
    return per_cell


def _autocasts(input: Tensor) -> bool:
    device = input.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    if not _autocasts(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


# ---- autograd: a layer --------------------------------------------------------------------------------------------


def _layer(
    input: Tensor, h0: Tensor, c0: Tensor, parameters: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    w_ih, w_hh, b_ih, b_hh = parameters if len(parameters) == 4 else (*parameters, None, None)
    arguments: Any = (input, h0, c0, w_ih, w_hh, b_ih, b_hh, reverse)
    if backend_for("lstm", input) == "reference":
        return reference.lstm(*arguments)
    differentiable = wants_gradient(input, h0, c0, *parameters)
    output, h_n, c_n, _, _ = apply(_Lstm, _LstmEager, differentiable, *arguments)
    return output, h_n, c_n


class _Lstm(torch.autograd.Function):
    """input (T, B, I), h0, c0, weights -> output, h_n, c_n, cells, gates. Backward is a Function again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        reverse: bool,
    ) -> Any:
        output, cells, gates = kernel("lstm_fwd", input)(input, h0, c0, w_ih, w_hh, b_ih, b_hh, reverse)
        if input.shape[0] == 0:
            return output, h0.clone(), c0.clone(), cells, gates
        last = 0 if reverse else -1
        return output, output[last].clone(), cells[last].to(input.dtype, copy=True), cells, gates

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.reverse = inputs
        outputs, _, _, cells, gates = output
        ctx.mark_non_differentiable(cells, gates)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, outputs, cells, gates)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_h_n: Tensor | None, grad_c_n: Tensor | None, *_: Any
    ) -> Any:
        *inputs, output, cells, gates = ctx.saved_tensors
        _, h0, c0, *_ = inputs
        needs = ctx.needs_input_grad
        *grads, grad_bias = apply(
            _LstmBackward, _LstmBackwardEager, torch.is_grad_enabled(),
            torch.zeros_like(output) if grad_output is None else grad_output,
            torch.zeros_like(h0) if grad_h_n is None else grad_h_n,
            torch.zeros_like(c0) if grad_c_n is None else grad_c_n,
            *inputs, output, cells, gates, ctx.reverse, needs[0], any(needs[3:7]),
        )  # fmt: skip
        # Both biases have the same gradient, each a tensor of its own: users scale gradients in place.
        grads += [grad_bias if needs[5] else None, grad_bias.clone() if needs[6] else None, None]
        return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        output, h_n, c_n = tangents(reference.lstm, (*ctx.saved_tensors[:7], ctx.reverse), input_tangents)
        return output, h_n, c_n, None, None


class _LstmBackward(torch.autograd.Function):
    """Gradients of output, h_n and c_n, inputs, ... -> those of input, h0, c0, w_ih, w_hh, and of either bias."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_output: Tensor,
        grad_h_n: Tensor,
        grad_c_n: Tensor,
        input: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        output: Tensor,
        cells: Tensor,
        gates: Tensor,
        reverse: bool,
        need_input: bool,
        need_weights: bool,
    ) -> Any:
        return kernel("lstm_bwd", input)(
            grad_output, grad_h_n, grad_c_n, input, h0, c0, w_ih, w_hh, output, cells, gates,
            reverse, need_input, need_weights,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, (ctx.reverse, ctx.need_input, ctx.need_weights) = inputs[:10], inputs[13:]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def formula(ctx: Any) -> Any:
        """The gradients as a function of the cotangents and the inputs, recomputing the steps."""

        def grads(grad_output: Tensor, grad_h_n: Tensor, grad_c_n: Tensor, *inputs: Tensor | None) -> Any:
            cotangents = (grad_output, grad_h_n, grad_c_n)
            dx, dh0, dc0, *weights, _, _ = gradients(reference.lstm, (*inputs, ctx.reverse), cotangents)
            w_ih = inputs[3]
            assert w_ih is not None
            if weights[2] is None:  # no biases: nothing asks for their gradient
                weights[2] = w_ih.new_zeros(w_ih.shape[0])
            empty = w_ih.new_empty(0)
            return dx if ctx.need_input else empty, dh0, dc0, *(weights if ctx.need_weights else [empty] * 3)

        return grads

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        grads = gradients(_LstmBackward.formula(ctx), ctx.saved_tensors, cotangents)
        return *grads, *[None] * 6

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        return tangents(_LstmBackward.formula(ctx), ctx.saved_tensors, input_tangents[:10])


_LstmEager, _LstmBackwardEager = eager(_Lstm), eager(_LstmBackward)


# ---- autograd: a cell ---------------------------------------------------------------------------------------------


class _LstmCell(torch.autograd.Function):
    """gates (B, 4H), c -> h, c_new, activated gates. Backward is a Function again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gates: Tensor, c: Tensor) -> Any:
        return kernel("lstm_cell_fwd", gates)(gates, c)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        gates, c = inputs
        _, c_new, activated = output
        ctx.mark_non_differentiable(activated)
        ctx.save_for_backward(gates, c, c_new, activated)
        ctx.save_for_forward(gates, c)

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor, grad_c: Tensor, *_: Any) -> Any:
        gates, c, c_new, activated = ctx.saved_tensors
        return apply(
            _LstmCellBackward,
            _LstmCellBackwardEager,
            torch.is_grad_enabled(),
            grad_h,
            grad_c,
            gates,
            c,
            c_new,
            activated,
        )

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        h, c = tangents(reference.lstm_cell, ctx.saved_tensors[:2], input_tangents)
        return h, c, None


class _LstmCellBackward(torch.autograd.Function):
    """Gradients of h and c_new, gates, c, ... -> those of gates and c."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad_h: Tensor, grad_c: Tensor, gates: Tensor, c: Tensor, c_new: Tensor, activated: Tensor) -> Any:
        return kernel("lstm_cell_bwd", c)(grad_h, grad_c, activated, c, c_new)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def formula(grad_h: Tensor, grad_c: Tensor, gates: Tensor, c: Tensor) -> Any:
        return gradients(reference.lstm_cell, (gates, c), (grad_h, grad_c))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return *gradients(_LstmCellBackward.formula, ctx.saved_tensors, cotangents), None, None

    @staticmethod
    def jvp(ctx: Any, *input_tangents: Tensor | None) -> Any:
        return tangents(_LstmCellBackward.formula, ctx.saved_tensors, input_tangents[:4])


_LstmCellEager, _LstmCellBackwardEager = eager(_LstmCell), eager(_LstmCellBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


def _accumulation_dtype(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


@torch.library.register_fake("seqkern::lstm_fwd")
def _(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    reverse: bool,
) -> Any:
    steps, batch, _ = input.shape
    hidden, acc = h0.shape[1], _accumulation_dtype(input)
    return (
        input.new_empty((steps, batch, hidden)),
        input.new_empty((steps, batch, hidden), dtype=acc),
        input.new_empty((steps, batch, 4 * hidden), dtype=acc),
    )


@torch.library.register_fake("seqkern::lstm_bwd")
def _(
    grad_output: Tensor,
    grad_h_n: Tensor,
    grad_c_n: Tensor,
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    output: Tensor,
    cells: Tensor,
    gates: Tensor,
    reverse: bool,
    need_input: bool,
    need_weights: bool,
) -> Any:
    return (
        input.new_empty(input.shape if need_input else 0),
        h0.new_empty(h0.shape),
        c0.new_empty(c0.shape),
        w_ih.new_empty(w_ih.shape if need_weights else 0),
        w_hh.new_empty(w_hh.shape if need_weights else 0),
        w_ih.new_empty(w_ih.shape[0] if need_weights else 0),
    )


@torch.library.register_fake("seqkern::lstm_cell_fwd")
def _(gates: Tensor, c: Tensor) -> Any:
    return c.new_empty(c.shape), c.new_empty(c.shape), gates.new_empty(gates.shape, dtype=_accumulation_dtype(gates))


@torch.library.register_fake("seqkern::lstm_cell_bwd")
def _(grad_h: Tensor, grad_c: Tensor, activated: Tensor, c: Tensor, c_new: Tensor) -> Any:
    return grad_h.new_empty(activated.shape), c.new_empty(c.shape)


@torch.library.register_vmap("seqkern::lstm_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    shared_weights = all(dim is None for dim in in_dims[3:7])
    return _batched(
        torch.ops.seqkern.lstm_fwd, info.batch_size, in_dims, args, (3, 4, 5, 6) if shared_weights else None
    )


@torch.library.register_vmap("seqkern::lstm_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    need_weights = args[-1]  # a sample's own: their sum alone comes out of a batch
    shared = (6, 7) if all(dim is None for dim in in_dims[6:8]) and not need_weights else None
    return _batched(torch.ops.seqkern.lstm_bwd, info.batch_size, in_dims, args, shared)


@torch.library.register_vmap("seqkern::lstm_cell_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return _batched(torch.ops.seqkern.lstm_cell_fwd, info.batch_size, in_dims, args, ())


@torch.library.register_vmap("seqkern::lstm_cell_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return _batched(torch.ops.seqkern.lstm_cell_bwd, info.batch_size, in_dims, args, ())


def _batched(op: Any, samples: int, in_dims: Any, args: Any, shared: tuple[int, ...] | None) -> Any:
    """The samples become part of the batch: the first dimension of a matrix, the second of (T, B, ...).

    `shared` are the positions of the weights, which all samples share. None: they do not, so each sample is a call.
    """
    if shared is None or samples == 0:
        return per_sample(op, samples, in_dims, args)
    tensors = [i for i, argument in enumerate(args) if isinstance(argument, Tensor)]
    folded = list(args)
    for i in set(tensors) - set(shared):
        t, dim = args[i], in_dims[i]
        t = t.unsqueeze(0).expand(samples, *t.shape) if dim is None else t.movedim(dim, 0)
        folded[i] = t.movedim(0, t.dim() - 3).flatten(t.dim() - 3, t.dim() - 2)
    outputs = op(*folded)
    # What is not wanted comes back empty, with one dimension.
    out_dims = tuple(None if t.dim() == 1 else t.dim() - 2 for t in outputs)
    unfolded = tuple(t if d is None else t.unflatten(d, (samples, -1)) for t, d in zip(outputs, out_dims, strict=True))
    return unfolded, out_dims
