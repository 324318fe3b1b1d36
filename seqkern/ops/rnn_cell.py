"""Recurrent cells, a step at a time: the functional API, gradients, fake kernels, batching rules and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import _direct, reference
from seqkern._arguments import RnnCell, RnnCellBackward
from seqkern._direct import Context, fast, long_way
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import is_proxy, record
from seqkern.ops._autograd import Cost, apply, eager, gradients, tangents, transforms_active, wants_gradient
from seqkern.ops._rnn_autograd import fold
from seqkern.ops._rnn_checks import (
    CELLS,
    GATES,
    GRU,
    LSTM,
    check_like,
    check_pair,
    check_state,
    check_tensor,
    kept_gates,
)


@explicit
def lstm_cell(
    input: Tensor,
    hx: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    **unexpected: NoReturn,
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
    if is_proxy(input):
        return record(lstm_cell, locals())
    if unexpected:
        refuse(lstm_cell, unexpected)
    return _cell("lstm", input, hx, w_ih, w_hh, b_ih, b_hh)


@explicit
def gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    **unexpected: NoReturn,
) -> Tensor:
    """One step of a gated recurrent unit, as `torch.nn.GRUCell` takes it: two products, then one fused kernel.

    The reset gate stands after the recurrent product, as in torch: see `gru`.

    Args:
        input: (B, I); float64, float32, bfloat16 or float16.
        hx: h before the step, (B, H), in the input's dtype.
        w_ih: (3H, I), gates in the order r, z, n.
        w_hh: (3H, H).
        b_ih, b_hh: (3H,) or None.

    Returns:
        h after the step, (B, H). Under autocast the products are cast, as torch's are.

    Raises:
        As `lstm_cell`.

    Source: Cho et al. 2014.

    Example:
        >>> import torch, seqkern
        >>> cell = torch.nn.GRUCell(5, 8)
        >>> seqkern.gru_cell(torch.randn(3, 5), torch.zeros(3, 8), *cell.parameters()).shape
        torch.Size([3, 8])
    """
    if is_proxy(input):
        return record(gru_cell, locals())
    if unexpected:
        refuse(gru_cell, unexpected)
    return _cell("gru", input, hx, w_ih, w_hh, b_ih, b_hh)


@explicit
def rnn_tanh_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    **unexpected: NoReturn,
) -> Tensor:
    """One step of a simple recurrent network, tanh(W x + b + U h + b'), as `torch.nn.RNNCell` takes it.

    Args:
        input: (B, I); float64, float32, bfloat16 or float16.
        hx: h before the step, (B, H), in the input's dtype.
        w_ih: (H, I). w_hh: (H, H). b_ih, b_hh: (H,) or None.

    Returns:
        h after the step, (B, H). Under autocast in its dtype, as torch's.

    Raises:
        As `lstm_cell`.

    Example:
        >>> import torch, seqkern
        >>> cell = torch.nn.RNNCell(5, 8)
        >>> seqkern.rnn_tanh_cell(torch.randn(3, 5), torch.zeros(3, 8), *cell.parameters()).shape
        torch.Size([3, 8])
    """
    if is_proxy(input):
        return record(rnn_tanh_cell, locals())
    if unexpected:
        refuse(rnn_tanh_cell, unexpected)
    return _cell("rnn_tanh", input, hx, w_ih, w_hh, b_ih, b_hh)


@explicit
def rnn_relu_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    **unexpected: NoReturn,
) -> Tensor:
    """`rnn_tanh_cell` with max(0, .) in the place of tanh, as `torch.nn.RNNCell(nonlinearity="relu")` takes it.

    Args:
        As `rnn_tanh_cell`.

    Returns:
        As `rnn_tanh_cell`.

    Raises:
        As `lstm_cell`.

    Example:
        >>> import torch, seqkern
        >>> cell = torch.nn.RNNCell(5, 8)
        >>> seqkern.rnn_relu_cell(torch.randn(3, 5), torch.zeros(3, 8), *cell.parameters()).min().item() >= 0
        True
    """
    if is_proxy(input):
        return record(rnn_relu_cell, locals())
    if unexpected:
        refuse(rnn_relu_cell, unexpected)
    return _cell("rnn_relu", input, hx, w_ih, w_hh, b_ih, b_hh)


def _cell(
    name: str, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> Any:
    op, cell = f"{name}_cell", CELLS[name]
    if fast():
        state = _direct.rnn_cell(cell, input, hx, w_ih, w_hh, b_ih, b_hh)
        if state is not None:
            return state
    check_tensor(op, "input", input, 2)
    h, c = check_pair(op, hx) if cell == LSTM else (check_state(op, hx), None)
    check_tensor(op, "w_hh", w_hh, 2)
    batch, inputs, hidden = input.shape[0], input.shape[1], w_hh.shape[1]
    gates = GATES[cell] * hidden
    check_like(op, "hx" if c is None else "hx[0]", h, input, (batch, hidden))
    if c is not None:
        check_like(op, "hx[1]", c, input, (batch, hidden))
    check_like(op, "w_ih", w_ih, input, (gates, inputs))
    check_like(op, "w_hh", w_hh, input, (gates, hidden))
    for bias_name, bias in (("b_ih", b_ih), ("b_hh", b_hh)):
        if bias is not None:
            check_like(op, bias_name, bias, input, (gates,))
    transforms_active()  # refuses before the compiler looks at a tensor
    if c is h:  # the compiler wants them apart
        c = h.clone()
    x_gates, h_gates = F.linear(input, w_ih, b_ih), F.linear(h, w_hh, b_hh)
    # Under autocast the products are narrower than a state that is added to them.
    wide = torch.promote_types(x_gates.dtype, h.dtype) if cell in (LSTM, GRU) else x_gates.dtype
    c = None if c is None else c.to(wide)
    arguments = RnnCell(x_gates.to(wide), h_gates.to(wide), h.to(wide), c, cell)
    h_new, c_new = _run(backend_for(op, input), arguments)
    return (h_new, c_new) if cell == LSTM else h_new


def cost(
    batch: int, inputs: int, hidden: int, dtype: torch.dtype, *, cell: str = "lstm", backward: bool = False
) -> Cost:
    """Work of one step, in its products; `backward` counts the backward pass alone.

    `cell` is "lstm", "gru", "rnn_tanh" or "rnn_relu".
    """
    kind, size = CELLS[cell], dtype.itemsize
    gates, states = GATES[kind] * hidden, 2 if kind == LSTM else 1
    flops, parameters = 2 * batch * gates * (inputs + hidden), gates * (inputs + hidden + 2)
    if backward:  # reads x, h, the weights and the gradients of the states; writes those of all
        return Cost(2 * flops, size * (2 * batch * (inputs + hidden) + 2 * parameters + states * batch * hidden))
    return Cost(flops, size * (batch * (inputs + 2 * states * hidden) + parameters))


# ---- autograd ------------------------------------------------------------------------------------------------------


def _run(backend: str, arguments: RnnCell) -> Any:
    """h and c after a step (c: of an LSTM)."""
    if backend == "reference":
        return _step(*arguments.differentiable(), cell=arguments.cell)
    wanted = wants_gradient(*arguments.differentiable())
    return apply(_RnnCell, _RnnCellEager, wanted, *arguments)[:2]


def _step(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None, *, cell: int) -> tuple[Tensor, Tensor]:
    """The reference in the dtype of its arguments: h and c after the step, c of shape (0) where there is none."""
    wide = torch.promote_types(h.dtype, torch.float32)
    wide_c = None if c is None else c.to(wide)
    h_new, *c_new = reference.rnn_step(x_gates.to(wide), h_gates.to(wide), h.to(wide), wide_c, cell)
    return h_new.to(h.dtype), c_new[0].to(h.dtype) if c_new else h.new_empty(0)


class _RnnCell(torch.autograd.Function):
    """The arguments of a step -> h_new, c_new, activated gates. Backward is a Function again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None, cell: int) -> Any:
        return kernel("rnn_cell_fwd", h)(x_gates, h_gates, h, c, cell)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x_gates, h_gates, h, c, ctx.cell = inputs
        _, c_new, activated = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_gates, h_gates, h, c, c_new, activated)
        if forward_ad._current_level >= 0:  # then under vmap marks are of no effect, and every output has a tangent
            ctx.save_for_forward(x_gates, h_gates, h, c, c_new, activated)
        elif ctx.cell == LSTM:
            ctx.mark_non_differentiable(activated)
        else:
            ctx.mark_non_differentiable(c_new, activated)

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None, *_: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a tensor
        x_gates, h_gates, h, c, c_new, activated = ctx.saved_tensors
        if grad_h is None:
            grad_h = torch.zeros_like(h)
        if ctx.cell != LSTM:  # torch.compile makes one up, whatever is marked
            grad_c = None
        arguments = RnnCellBackward(grad_h, grad_c, x_gates, h_gates, h, c, c_new, activated, ctx.cell)
        grad_x, grad_hg, grad_h_prev, grad_c_prev = apply(
            _RnnCellBackward, _RnnCellBackwardEager, torch.is_grad_enabled(), *arguments
        )
        if ctx.cell == LSTM:
            return grad_x, grad_x, None, grad_c_prev, None
        return (grad_x, grad_hg, grad_h_prev, None, None) if ctx.cell == GRU else (grad_x, grad_x, None, None, None)

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        x_gates, h_gates, h, c, _, activated = ctx.saved_tensors
        arguments = RnnCell(x_gates, h_gates, h, c, ctx.cell)
        known = RnnCell(*directions)

        def step(*differentiable: Any) -> Any:
            return _step(*differentiable, cell=ctx.cell)

        h_new, c_new = tangents(step, arguments.differentiable(), known.differentiable())
        return h_new, c_new, torch.zeros_like(activated)

    @staticmethod
    def plain(*args: Any) -> Any:
        arguments = RnnCell(*args)
        return *_step(*arguments.differentiable(), cell=arguments.cell), None


class _RnnCellBackward(torch.autograd.Function):
    """The arguments of a step's backward pass -> the gradients of x_gates, h_gates, h and c.

    Those of h_gates (where they are those of x_gates) and of h and c (where there are none) are of shape (0).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        step = RnnCellBackward(*args)
        c_new = step.c_new if step.cell == LSTM else None
        return kernel("rnn_cell_bwd", step.h)(
            step.grad_h, step.grad_c, step.h, step.c, c_new, step.activated, step.cell
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        step = RnnCellBackward(*inputs)
        ctx.cell = step.cell
        saved = step.differentiable()
        ctx.save_for_backward(*saved)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*saved)

    @staticmethod
    def formula(cell: int) -> Callable[..., Any]:
        """The gradients as a function of what is differentiable in the backward pass."""

        def grads(grad_h: Tensor, grad_c: Tensor | None, *inputs: Any) -> Any:
            def some(*inputs: Any) -> Any:
                h_new, c_new = _step(*inputs, cell=cell)
                return h_new if grad_c is None else (h_new, c_new)

            found = gradients(some, inputs, grad_h if grad_c is None else (grad_h, grad_c))
            grad_x, grad_hg, grad_h_prev, grad_c_prev = found
            empty = grad_h.new_empty(0)
            if cell == GRU:
                return grad_x, grad_hg, grad_h_prev, empty
            return grad_x, empty, empty, grad_c_prev if cell == LSTM else empty

        return grads

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        # Behind what is differentiable are c_new, activated and cell.
        return *gradients(_RnnCellBackward.formula(ctx.cell), ctx.saved_tensors, cotangents), None, None, None

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        known = RnnCellBackward(*directions)
        return tangents(_RnnCellBackward.formula(ctx.cell), ctx.saved_tensors, known.differentiable())

    @staticmethod
    def plain(*args: Any) -> Any:
        step = RnnCellBackward(*args)
        return _RnnCellBackward.formula(step.cell)(*step.differentiable())


_RnnCellEager, _RnnCellBackwardEager = eager(_RnnCell), eager(_RnnCellBackward)


@long_way("RnnCellNode")
def _backward_of_node(
    grads: Sequence[Tensor | None],
    saved: Sequence[Any],
    kept: Sequence[Tensor],
    numbers: Sequence[float],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients of x_gates, h_gates, h and c; they are differentiable again."""
    x_gates, h_gates, h, c, activated, *c_new = saved
    context: Any = Context((x_gates, h_gates, h, c, c_new[0] if c_new else h.new_empty(0), activated), needs)
    context.cell = int(numbers[0])
    found: tuple[Tensor | None, ...] = _RnnCell.backward(context, *grads, *[None] * (2 - len(grads)))
    return found[:-1]


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::rnn_cell_fwd")
def _(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None, cell: int) -> Any:
    batch, hidden = h.shape
    acc = torch.promote_types(h.dtype, torch.float32)
    return (
        h.new_empty(h.shape),
        h.new_empty(h.shape if cell == LSTM else 0),
        h.new_empty((batch, kept_gates(cell) * hidden), dtype=acc),
    )


@torch.library.register_fake("seqkern::rnn_cell_bwd")
def _(
    grad_h: Tensor,
    grad_c: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    c_new: Tensor | None,
    activated: Tensor,
    cell: int,
) -> Any:
    batch, hidden = h.shape
    gates = (batch, GATES[cell] * hidden)
    return (
        h.new_empty(gates),
        h.new_empty(gates if cell == GRU else 0),
        h.new_empty(h.shape if cell == GRU else 0),
        h.new_empty(h.shape if cell == LSTM else 0),
    )


@torch.library.register_vmap("seqkern::rnn_cell_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return fold(torch.ops.seqkern.rnn_cell_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::rnn_cell_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return fold(torch.ops.seqkern.rnn_cell_bwd, info.batch_size, in_dims, args)
