"""LSTM in Triton: the fused cell, and a layer as one matrix product a step around it.

The idea. Everything that does not wait for h_{t-1} leaves the loop: one GEMM gives what the input contributes to the
gates of all steps, and after the backward scan one GEMM each gives grad_input, grad_w_ih and grad_w_hh. Inside the
loop a step is one product with w_hh and one kernel, which adds the products and the biases, applies the four gates
and the state update, and keeps the gates for the backward pass where their preactivations were.

The equations (Hochreiter & Schmidhuber 1997; Jurafsky & Martin 9.19-9.26; gate order i f g o as in torch):

    a = w_ih x_t + w_hh h_{t-1} + b_ih + b_hh                i f o = sigmoid(a_i a_f a_o)      g = tanh(a_g)
    c_t = f c_{t-1} + i g                                    h_t = o tanh(c_t)
    dc = dc_t + dh_t o (1 - tanh(c_t)^2)                     dc_{t-1} = dc f
    da_i = dc g i (1 - i)    da_f = dc c_{t-1} f (1 - f)     da_g = dc i (1 - g^2)    da_o = dh_t tanh(c_t) o (1 - o)
    dh_{t-1} = w_hh^T da

Preactivations, gates, cell states and the gradients that pass from step to step are float32 (float64 for float64):
for bf16 and fp16 the products write float32 directly, so h_t is the only thing that is rounded in the loop.

No GPU speed has been measured yet. A step is two launches from Python, which short steps will not hide; nothing in
the loop waits for the device, so a caller may capture it in a CUDA graph.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, aligned, run, unit_last


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x). For x -> -inf e^-x becomes infinite and 1 / inf is 0: no NaN."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """tanh to a few ulp everywhere.

    From |x| = 0.625 on 1 - 2 / (e^2|x| + 1), which saturates without NaN. Nearer to 0 that is the difference of two
    ones: there x + x^3 P(x^2) / Q(x^2), the rational function of Cephes (tanh.c). One division serves both.
    """
    size = tl.abs(x)
    z = x * x
    p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491631932402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    small = size < 0.625
    top = tl.where(small, size * z * p, -2.0)
    bottom = tl.where(small, q, tl.exp(2.0 * size) + 1.0)
    y = tl.where(small, size, 1.0) + top / bottom
    return tl.where(x < 0, -y, y)


@triton.jit
def _load_gates(pointer, at, mask, H, ACC: tl.constexpr):
    """The tiles i, f, g, o of a row of 4 H."""
    i = tl.load(pointer + at, mask=mask, other=0.0).to(ACC)
    f = tl.load(pointer + at + H, mask=mask, other=0.0).to(ACC)
    g = tl.load(pointer + at + 2 * H, mask=mask, other=0.0).to(ACC)
    o = tl.load(pointer + at + 3 * H, mask=mask, other=0.0).to(ACC)
    return i, f, g, o


@triton.jit
def _store_gates(pointer, at, mask, H, i, f, g, o):
    dtype: tl.constexpr = pointer.dtype.element_ty
    tl.store(pointer + at, i.to(dtype), mask=mask)
    tl.store(pointer + at + H, f.to(dtype), mask=mask)
    tl.store(pointer + at + 2 * H, g.to(dtype), mask=mask)
    tl.store(pointer + at + 3 * H, o.to(dtype), mask=mask)


@triton.jit
def _position(B, H, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr):
    """The rows (BLOCK_B, 1) and units (1, BLOCK_H) of this program, and the mask of those that exist."""
    blocks = tl.cdiv(H, BLOCK_H)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
    unit = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    return row, unit, (row < B) & (unit < H)


@triton.jit(do_not_specialize=["gates_stride", "recurrent_stride", "c_stride", "B", "H"])
def _cell_forward_kernel(
    gates_ptr,
    recurrent_ptr,
    bias_ptr,
    c_ptr,
    h_ptr,
    c_new_ptr,
    activated_ptr,
    gates_stride,
    recurrent_stride,
    c_stride,
    B,
    H,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """(BLOCK_B, BLOCK_H) cells a program. `recurrent` and `bias` may be None; `activated` may be `gates` itself."""
    H = aligned(H, ALIGNED)
    row, unit, mask = _position(B, H, BLOCK_B, BLOCK_H)
    at = row * H + unit
    c = tl.load(c_ptr + row * aligned(c_stride, ALIGNED) + unit, mask=mask, other=0.0).to(ACC)
    i, f, g, o = _load_gates(gates_ptr, row * aligned(gates_stride, ALIGNED) + unit, mask, H, ACC)
    if recurrent_ptr is not None:
        at_r = row * aligned(recurrent_stride, ALIGNED) + unit
        i_r, f_r, g_r, o_r = _load_gates(recurrent_ptr, at_r, mask, H, ACC)
        i, f, g, o = i + i_r, f + f_r, g + g_r, o + o_r
    if bias_ptr is not None:
        i_b, f_b, g_b, o_b = _load_gates(bias_ptr, unit, unit < H, H, ACC)
        i, f, g, o = i + i_b, f + f_b, g + g_b, o + o_b
    i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
    c = f * c + i * g
    tl.store(h_ptr + at, (o * _tanh(c)).to(h_ptr.dtype.element_ty), mask=mask)
    tl.store(c_new_ptr + at, c.to(c_new_ptr.dtype.element_ty), mask=mask)
    tl.debug_barrier()  # in place: every thread has read before any writes
    _store_gates(activated_ptr, row * (4 * H) + unit, mask, H, i, f, g, o)


@triton.jit(do_not_specialize=["grad_h_stride", "grad_c_stride", "c_stride", "B", "H"])
def _cell_backward_kernel(
    grad_h_ptr,
    recurrent_ptr,
    grad_c_ptr,
    activated_ptr,
    c_ptr,
    c_new_ptr,
    grad_gates_ptr,
    grad_c_prev_ptr,
    grad_h_stride,
    grad_c_stride,
    c_stride,
    B,
    H,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """(BLOCK_B, BLOCK_H) cells a program.

    `recurrent`, the part of dh that comes back through w_hh, may be None; `grad_c_prev` may be `grad_c` itself.
    """
    H = aligned(H, ALIGNED)
    row, unit, mask = _position(B, H, BLOCK_B, BLOCK_H)
    at = row * H + unit
    grad_h_at = grad_h_ptr + row * aligned(grad_h_stride, ALIGNED) + unit
    grad_c_at = grad_c_ptr + row * aligned(grad_c_stride, ALIGNED) + unit
    i, f, g, o = _load_gates(activated_ptr, row * (4 * H) + unit, mask, H, ACC)
    c = tl.load(c_ptr + row * aligned(c_stride, ALIGNED) + unit, mask=mask, other=0.0).to(ACC)
    tanh_c = _tanh(tl.load(c_new_ptr + at, mask=mask, other=0.0).to(ACC))
    grad_h = tl.load(grad_h_at, mask=mask, other=0.0).to(ACC)
    if recurrent_ptr is not None:
        grad_h += tl.load(recurrent_ptr + at, mask=mask, other=0.0).to(ACC)
    grad_c = tl.load(grad_c_at, mask=mask, other=0.0).to(ACC) + grad_h * o * (1.0 - tanh_c * tanh_c)
    grad_i = grad_c * g * i * (1.0 - i)
    grad_f = grad_c * c * f * (1.0 - f)
    grad_g = grad_c * i * (1.0 - g * g)
    grad_o = grad_h * tanh_c * o * (1.0 - o)
    _store_gates(grad_gates_ptr, row * (4 * H) + unit, mask, H, grad_i, grad_f, grad_g, grad_o)
    tl.debug_barrier()  # in place: every thread has read before any writes
    tl.store(grad_c_prev_ptr + at, (grad_c * f).to(grad_c_prev_ptr.dtype.element_ty), mask=mask)


# ---- plans and launchers ------------------------------------------------------------------------------------------

_CELLS = 512  # of a tile: 4 a thread, so that the few thousand cells of a step spread over the whole device


def _plan(kernel, tensors, rows, b, h, acc):
    """One launch of a cell kernel; `rows` are the tensors whose row stride it takes."""
    block_h = min(128, max(16, triton.next_power_of_2(h)))
    strides = tuple(0 if tensor is None else tensor.stride(0) for tensor in rows)
    constants = {
        "ACC": TRITON_DTYPE[acc],
        "ALIGNED": all(n % 8 == 0 for n in (h, *strides)),
        "BLOCK_B": _CELLS // block_h,
        "BLOCK_H": block_h,
    }
    grid = (triton.cdiv(b, constants["BLOCK_B"]) * triton.cdiv(h, block_h),)
    name = kernel.__name__.strip("_").removesuffix("_kernel")
    return Launch(f"lstm_{name}", kernel, grid, (*tensors, *strides, b, h), constants)


def _plan_cell_forward(gates, recurrent, bias, c, h, c_new, activated):
    tensors = (gates, recurrent, bias, c, h, c_new, activated)
    return _plan(_cell_forward_kernel, tensors, (gates, recurrent, c), *h.shape, activated.dtype)


def _plan_cell_backward(grad_h, recurrent, grad_c, activated, c, c_new, grad_gates, grad_c_prev):
    tensors = (grad_h, recurrent, grad_c, activated, c, c_new, grad_gates, grad_c_prev)
    return _plan(_cell_backward_kernel, tensors, (grad_h, grad_c, c), *grad_h.shape, activated.dtype)


def lstm_cell_fwd(gates, c):
    """The launcher behind `seqkern::lstm_cell_fwd`: (h, c_new, activated)."""
    gates, c = unit_last(gates), unit_last(c)
    h = gates.new_empty(c.shape)
    c_new = c.new_empty(c.shape)
    activated = gates.new_empty(gates.shape, dtype=accumulator(gates.dtype))
    run([_plan_cell_forward(gates, None, None, c, h, c_new, activated)], gates.device)
    return h, c_new, activated


def lstm_cell_bwd(grad_h, grad_c, activated, c, c_new):
    """The launcher behind `seqkern::lstm_cell_bwd`: (grad_gates, grad_c_prev)."""
    grad_h, grad_c, c = unit_last(grad_h), unit_last(grad_c), unit_last(c)
    activated, c_new = activated.contiguous(), c_new.contiguous()
    grad_gates = grad_h.new_empty(activated.shape)
    grad_c_prev = c.new_empty(c.shape)
    run([_plan_cell_backward(grad_h, None, grad_c, activated, c, c_new, grad_gates, grad_c_prev)], grad_h.device)
    return grad_gates, grad_c_prev


def _product(a, b):
    """a @ b in the accumulator's dtype, without rounding to a shorter one in between."""
    acc = accumulator(a.dtype)
    if a.dtype == acc:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=acc)
    return a.to(acc) @ b.to(acc)  # interpreted: torch has no mixed product on the CPU


def _bias(b_ih, b_hh, acc):
    """The sum of the biases that there are, or None."""
    present = [bias.to(acc) for bias in (b_ih, b_hh) if bias is not None]
    return sum(present[1:], start=present[0]) if present else None


def lstm_fwd(input, h0, c0, w_ih, w_hh, b_ih, b_hh, reverse):
    """The launcher behind `seqkern::lstm_fwd`: (output, cells, gates)."""
    (t, b, _), n = input.shape, h0.size(1)
    acc = accumulator(input.dtype)
    output = input.new_empty((t, b, n))
    cells = input.new_empty((t, b, n), dtype=acc)
    gates = _product(input.reshape(t * b, input.size(2)), w_ih.t()).view(t, b, 4 * n)
    bias = _bias(b_ih, b_hh, acc)
    h, c = h0, unit_last(c0)
    for step in reversed(range(t)) if reverse else range(t):
        recurrent = _product(h, w_hh.t())
        at = gates[step]
        run([_plan_cell_forward(at, recurrent, bias, c, output[step], cells[step], at)], input.device)
        h, c = output[step], cells[step]
    return output, cells, gates


def lstm_bwd(
    grad_output,
    grad_h_n,
    grad_c_n,
    input,
    h0,
    c0,
    w_ih,
    w_hh,
    output,
    cells,
    gates,
    reverse,
    need_input,
    need_weights,
):
    """The launcher behind `seqkern::lstm_bwd`.

    (grad_input, grad_h0, grad_c0, grad_w_ih, grad_w_hh, grad_bias), (0,) where not needed.
    """
    (t, b, n), dtype, acc = output.shape, input.dtype, accumulator(input.dtype)
    grad_output, c0 = unit_last(grad_output), unit_last(c0)
    output, cells, gates = output.contiguous(), cells.contiguous(), gates.contiguous()
    grad_gates = input.new_empty((t, b, 4 * n))
    grad_h = grad_h_n.to(acc, copy=True, memory_format=torch.contiguous_format)  # what comes from the later steps
    grad_c = grad_c_n.to(acc, copy=True, memory_format=torch.contiguous_format)
    order = range(t) if reverse else range(t)[::-1]
    for position, step in enumerate(order, 1):
        c = cells[order[position]] if position < t else c0
        tensors = (grad_output[step], grad_h, grad_c, gates[step], c, cells[step], grad_gates[step], grad_c)
        run([_plan_cell_backward(*tensors)], input.device)
        grad_h = _product(grad_gates[step], w_hh)

    grad_input, grad_w_ih, grad_w_hh, grad_bias = (input.new_empty((0,)) for _ in range(4))
    flat = grad_gates.view(t * b, 4 * n)
    if need_input:
        grad_input = (flat @ w_ih).view(input.shape)
    if need_weights:
        grad_w_ih = _product(flat.t(), input.reshape(t * b, input.size(2))).to(dtype)
        # h_{t-1}: the output one step earlier, and h0 at the step that ran first
        later, before = (slice(0, -1), slice(1, None)) if reverse else (slice(1, None), slice(0, -1))
        grad_w_hh = _product(grad_gates[later].reshape(-1, 4 * n).t(), output[before].reshape(-1, n))
        if t > 0:
            grad_w_hh += _product(grad_gates[-1 if reverse else 0].t(), h0)
        grad_w_hh = grad_w_hh.to(dtype)
        grad_bias = flat.sum(0, dtype=acc).to(dtype)
    return grad_input, grad_h.to(dtype), grad_c.to(dtype), grad_w_ih, grad_w_hh, grad_bias


def aot_configurations(limit, thorough):
    """The launches to compile ahead of time, as (name, launch); they do not depend on shared memory (`limit`).

    Each as the cell alone and as a step of a layer. thorough adds hidden sizes and dtypes.
    """
    floats = (torch.bfloat16, torch.float32)
    cases = [(dtype, 256) for dtype in floats]
    if thorough:
        cases = [(dtype, n) for dtype in (*floats, torch.float16, torch.float64) for n in (3, 64, 256, 1001)]
    for dtype, n in cases:
        h = torch.empty((32, n), dtype=dtype, device="meta")
        c = h.new_empty(h.shape, dtype=accumulator(dtype))
        gates, wide = h.new_empty((32, 4 * n)), c.new_empty((32, 4 * n))
        label = f"{str(dtype).removeprefix('torch.')}-H{n}"
        yield f"lstm_cell_forward-{label}", _plan_cell_forward(gates, None, None, h, h, h, wide)
        yield f"lstm_step_forward-{label}", _plan_cell_forward(wide, wide, wide[0], c, h, c, wide)
        yield f"lstm_cell_backward-{label}", _plan_cell_backward(h, None, h, wide, h, h, gates, h)
        yield f"lstm_step_backward-{label}", _plan_cell_backward(h, c, c, wide, c, c, gates, c)
