"""The LSTM cell in Triton, fused, forward and backward, and the sequence as one product and one cell launch a step.

    i, f, o = sigmoid(.), g = tanh(.) of the four pre-activations;  c' = f c + i g;  h = o tanh(c')
    (Hochreiter & Schmidhuber 1997; torch's gate order i, f, g, o)

The backward pass, with t = tanh(c') and d = dc' + dh o (1 - t^2):

    d(pre-activation) of i: d g i (1 - i),  f: d c f (1 - f),  g: d i (1 - g^2),  o: dh t o (1 - o);   dc = d f

A cell is bound by memory: 9 values are read and written for a unit forward, 15 backward, against about 40 operations.
One program takes a run of BLOCK (row, unit) pairs, whatever the shape, so no lane idles at odd hidden sizes; the gates
of a unit lie H apart, each read in whole sectors. The sequence takes the products from torch: x W_ih^T for all steps at
once, h W_hh^T step by step, the weight gradients as two products after the scan. Both products come in the accumulation
dtype, and the cell writes its activations over the first: the sum is rounded nowhere.

A launch a step costs a few microseconds whatever the size: a kernel that keeps W_hh on chip for the whole sequence has
its place behind the same launchers. Not timed on a GPU yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, run, unit_last

_SIZES = ["total", "H", "gates_stride", "c_stride", "grad_h_stride"]
BLOCK, WARPS = 512, 4


@triton.jit
def _sigmoid(x):
    """exp of a non-positive number only: no overflow, and 0 and 1 are reached exactly."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _tanh(x):
    """(1 - e) / (1 + e) with e = exp(-2 |x|), and the series near zero, where that difference would cancel."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    square = a * a
    series = a * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    t = tl.where(a < 0.03, series, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -t, t)


@triton.jit
def _units(total, H, BLOCK: tl.constexpr):
    """The (row, unit) pairs of this program: flat index, row, unit, and which exist."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return index, index // H, index % H, index < total


@triton.jit(do_not_specialize=_SIZES)
def _cell_forward_kernel(
    gates_ptr,
    recurrent_ptr,  # (B, 4H) contiguous, added to the gates; or None
    c_ptr,
    h_ptr,
    c_new_ptr,
    activated_ptr,
    total,
    H,
    gates_stride,
    c_stride,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index, row, unit, mask = _units(total, H, BLOCK)
    at = row * gates_stride + unit
    i = tl.load(gates_ptr + at, mask=mask).to(ACC)
    f = tl.load(gates_ptr + at + H, mask=mask).to(ACC)
    g = tl.load(gates_ptr + at + 2 * H, mask=mask).to(ACC)
    o = tl.load(gates_ptr + at + 3 * H, mask=mask).to(ACC)
    out = row * 4 * H + unit
    if recurrent_ptr is not None:
        i += tl.load(recurrent_ptr + out, mask=mask).to(ACC)
        f += tl.load(recurrent_ptr + out + H, mask=mask).to(ACC)
        g += tl.load(recurrent_ptr + out + 2 * H, mask=mask).to(ACC)
        o += tl.load(recurrent_ptr + out + 3 * H, mask=mask).to(ACC)
    i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
    c = f * tl.load(c_ptr + row * c_stride + unit, mask=mask).to(ACC) + i * g
    tl.store(activated_ptr + out, i, mask=mask)
    tl.store(activated_ptr + out + H, f, mask=mask)
    tl.store(activated_ptr + out + 2 * H, g, mask=mask)
    tl.store(activated_ptr + out + 3 * H, o, mask=mask)
    tl.store(c_new_ptr + index, c.to(c_new_ptr.dtype.element_ty), mask=mask)
    tl.store(h_ptr + index, (o * _tanh(c)).to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def _cell_backward_kernel(
    grad_h_ptr,
    recurrent_ptr,  # (B, H) contiguous, what reaches h from the step after; or None
    grad_c_ptr,
    activated_ptr,
    c_ptr,
    c_new_ptr,
    grad_gates_ptr,
    grad_c_prev_ptr,
    total,
    H,
    grad_h_stride,
    c_stride,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index, row, unit, mask = _units(total, H, BLOCK)
    at = row * 4 * H + unit
    i = tl.load(activated_ptr + at, mask=mask)
    f = tl.load(activated_ptr + at + H, mask=mask)
    g = tl.load(activated_ptr + at + 2 * H, mask=mask)
    o = tl.load(activated_ptr + at + 3 * H, mask=mask)
    grad_h = tl.load(grad_h_ptr + row * grad_h_stride + unit, mask=mask).to(ACC)
    if recurrent_ptr is not None:
        grad_h += tl.load(recurrent_ptr + index, mask=mask).to(ACC)
    t = _tanh(tl.load(c_new_ptr + index, mask=mask).to(ACC))
    grad_c = tl.load(grad_c_ptr + index, mask=mask).to(ACC) + grad_h * o * (1.0 - t * t)
    c = tl.load(c_ptr + row * c_stride + unit, mask=mask).to(ACC)
    out = grad_gates_ptr.dtype.element_ty
    tl.store(grad_gates_ptr + at, (grad_c * g * i * (1.0 - i)).to(out), mask=mask)
    tl.store(grad_gates_ptr + at + H, (grad_c * c * f * (1.0 - f)).to(out), mask=mask)
    tl.store(grad_gates_ptr + at + 2 * H, (grad_c * i * (1.0 - g * g)).to(out), mask=mask)
    tl.store(grad_gates_ptr + at + 3 * H, (grad_h * t * o * (1.0 - o)).to(out), mask=mask)
    tl.store(grad_c_prev_ptr + index, (grad_c * f).to(grad_c_prev_ptr.dtype.element_ty), mask=mask)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch(kernel, pointers, hidden, strides, total):
    name = kernel.__name__.strip("_").removesuffix("_kernel")
    acc = TRITON_DTYPE[accumulator(pointers[0].dtype)]
    grid = (triton.cdiv(total, BLOCK),)
    return Launch(
        f"lstm_{name}", kernel, grid, (*pointers, total, hidden, *strides), {"ACC": acc, "BLOCK": BLOCK}, WARPS
    )


def _forward_plan(gates, recurrent, c, h, c_new, activated):
    pointers = (gates, recurrent, c, h, c_new, activated)
    return [_launch(_cell_forward_kernel, pointers, c.size(1), (gates.stride(0), c.stride(0)), c.numel())]


def _backward_plan(grad_h, recurrent, grad_c, activated, c, c_new, grad_gates, grad_c_prev):
    pointers = (grad_h, recurrent, grad_c, activated, c, c_new, grad_gates, grad_c_prev)
    return [_launch(_cell_backward_kernel, pointers, c.size(1), (grad_h.stride(0), c.stride(0)), c.numel())]


def lstm_cell_fwd(gates, c):
    gates, c = unit_last(gates), unit_last(c)
    h = torch.empty_like(c, dtype=gates.dtype, memory_format=torch.contiguous_format)
    c_new = torch.empty_like(c, memory_format=torch.contiguous_format)
    activated = torch.empty_like(gates, dtype=accumulator(gates.dtype), memory_format=torch.contiguous_format)
    run(_forward_plan(gates, None, c, h, c_new, activated), gates.device)
    return h, c_new, activated


def lstm_cell_bwd(grad_h, grad_c, activated, c, c_new):
    grad_h, c = unit_last(grad_h), unit_last(c)
    grad_c, activated, c_new = grad_c.contiguous(), activated.contiguous(), c_new.contiguous()
    grad_gates = torch.empty_like(activated, dtype=grad_h.dtype)
    grad_c_prev = torch.empty_like(c, memory_format=torch.contiguous_format)
    run(_backward_plan(grad_h, None, grad_c, activated, c, c_new, grad_gates, grad_c_prev), grad_h.device)
    return grad_gates, grad_c_prev


def _product(a, b):
    """a @ b in the accumulation dtype."""
    acc = accumulator(a.dtype)
    if a.dtype == acc:
        return a @ b
    return torch.mm(a, b, out_dtype=acc) if a.is_cuda else a.to(acc) @ b.to(acc)


def lstm_fwd(input, h0, c0, w_ih, w_hh, b_ih, b_hh, reverse):
    steps, batch, width = input.shape
    hidden, acc = h0.size(1), accumulator(input.dtype)
    gates = _product(input.reshape(steps * batch, width), w_ih.t()).view(steps, batch, 4 * hidden)
    for bias in (b_ih, b_hh):
        if bias is not None:
            gates += bias.to(acc)
    output = input.new_empty(steps, batch, hidden)
    cells = input.new_empty(steps, batch, hidden, dtype=acc)
    h, c = h0, unit_last(c0)
    for t in range(steps - 1, -1, -1) if reverse else range(steps):
        recurrent = _product(h, w_hh.t())
        # The activations take the place of the pre-activations, element by element.
        run(_forward_plan(gates[t], recurrent, c, output[t], cells[t], gates[t]), input.device)
        h, c = output[t], cells[t]
    return output, cells, gates


def lstm_bwd(
    grad_output, grad_h_n, grad_c_n, input, h0, c0, w_ih, w_hh, output, cells, gates, reverse, need_input, need_weights
):
    steps, batch, width = input.shape
    hidden, acc = h0.size(1), accumulator(input.dtype)
    grad_output, c0 = unit_last(grad_output), unit_last(c0)
    cells, gates = cells.contiguous(), gates.contiguous()
    # In the inputs' dtype, which is what the products that follow take.
    grad_gates = input.new_empty(steps, batch, 4 * hidden)
    grad_h, grad_c = grad_h_n.to(acc).contiguous(), grad_c_n.to(acc).contiguous()
    order = list(range(steps - 1, -1, -1) if reverse else range(steps))
    for position in range(steps - 1, -1, -1):
        t = order[position]
        before = cells[order[position - 1]] if position else c0
        grad_c_prev = torch.empty_like(grad_c)
        pointers = (grad_output[t], grad_h, grad_c, gates[t], before, cells[t], grad_gates[t], grad_c_prev)
        run(_backward_plan(*pointers), input.device)
        grad_h, grad_c = _product(grad_gates[t], w_hh), grad_c_prev

    flat = grad_gates.view(steps * batch, 4 * hidden)
    nothing = input.new_empty(0)
    grad_input = _product(flat, w_ih).to(input.dtype).view_as(input) if need_input else nothing
    grad_w_ih = grad_w_hh = grad_bias = nothing
    if need_weights:
        earlier = torch.cat([output[1:], h0[None]] if reverse else [h0[None], output[:-1]])[:steps]
        previous = earlier.reshape(steps * batch, hidden)
        grad_w_ih = _product(flat.t(), input.reshape(steps * batch, width)).to(w_ih.dtype)
        grad_w_hh = _product(flat.t(), previous).to(w_hh.dtype)
        grad_bias = flat.sum(0, dtype=acc).to(w_hh.dtype)
    return grad_input, grad_h.to(h0.dtype), grad_c.to(c0.dtype), grad_w_ih, grad_w_hh, grad_bias
