"""One step of a recurrent layer, forward and backward, except its matrix products.

A program owns a tile (rows of the batch, hidden units) of one direction. With layer norm the tile holds whole rows, so
that statistics need no second kernel. h and c are in the accumulator's dtype and updated in place: an element belongs
to one program. Beside h the forward step writes `operand`, the input of the next product: h times the recurrent mask, 0
where the next step resets. The backward step reads from `recurrent` what came back through that product.

With a projection h has other columns than the gates. Then the cell kernels end (or begin) at `hidden`, and the state
kernels do what is left on the other side of the product with w_hr.
"""

import triton
import triton.language as tl

from .._common import aligned, rounded, scalar
from .cells import (
    GRU,
    INTERPOLATED,
    LSTM,
    activate,
    add_tiles,
    flags,
    gradients,
    load_tiles,
    new_h,
    normalise,
    normalise_backward,
    position,
    preactivations,
    runs_backwards,
    scale_and_shift,
    slab,
    state_before,
    store_tiles,
    tanh,
    time_of,
    zone,
    zone_backward,
)

# Integers that must not be compiled in: new lengths or sizes compile nothing.
_STRIDES = ["x_strides", "product_stride", "h_stride", "c_stride", "grad_strides", "direct_stride", "grad_c_stride"]
_STRIDES += ["grad_h_gates_strides", "hidden_strides", "grad_new_strides"]
SIZES = [*_STRIDES, "threshold_h", "threshold_c", "T", "B", "H", "P", "D", "step"]

# fmt: off
# Signatures are grouped: pointers, strides, options, sizes, then compile-time constants.


@triton.jit
def _settle(
    new, h, active, t, backwards, d, row, first, column, mask, lengths_ptr, resets_ptr, mask_ptr, seed_ptr,
    h_new_ptr, operand_ptr, output_ptr, threshold, p, T, B, P, D, EXPECTED: tl.constexpr,
):
    """Applies zoneout to h and stores it: the state, the row of the output, and the operand of the next product."""
    new = zone(new, h, seed_ptr, 0, t, d, row, first, threshold, p, T, B, EXPECTED)
    new = tl.where(active[:, None], new, h)
    at = (d * B + row)[:, None] * P + column
    tl.debug_barrier()  # aliased memory: all reads before any write
    tl.store(h_new_ptr + at, rounded(new, h_new_ptr.dtype.element_ty), mask=mask)
    if output_ptr is not None:
        DTYPE: tl.constexpr = output_ptr.dtype.element_ty
        out_at = ((t * B + row) * D + d)[:, None] * P + column
        tl.store(output_ptr + out_at, rounded(tl.where(active[:, None], new, 0.0), DTYPE), mask=mask)
        _, _, reset = flags(t + 1 - 2 * backwards, backwards, row, row < B, T, B, lengths_ptr, resets_ptr)
        operand = rounded(new, DTYPE).to(new.dtype)
        if mask_ptr is not None:
            operand *= tl.load(mask_ptr + at, mask=mask, other=0.0).to(new.dtype)
        operand = tl.where(reset[:, None], 0.0, operand)
        tl.store(operand_ptr + at, rounded(operand, DTYPE), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def cell_forward_kernel(
    x_ptr, product_ptr, bias_ptr, norm_ptr, peephole_ptr, lengths_ptr, resets_ptr, mask_ptr, seed_ptr,
    h_ptr, c_ptr, h_new_ptr, c_new_ptr, operand_ptr, output_ptr, cells_ptr, gates_ptr, products_ptr, hidden_ptr,
    x_strides, product_stride, h_stride, c_stride, threshold_h, threshold_c, p_h: tl.float64, p_c: tl.float64,
    eps: tl.float64, T, B, H, D, step,
    CELL: tl.constexpr, G: tl.constexpr, EXPECTED: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """One step of all directions. `gates` may alias x; `h_new` and `c_new` may alias h and c."""
    H = aligned(H, ALIGNED)
    R: tl.constexpr = G + 1 if CELL == GRU else G
    eps = scalar(eps, ACC)
    d, row, first, column, mask = position(B, H, BLOCK_B, BLOCK_H)
    backwards = runs_backwards(d)
    t = time_of(step, T, backwards)
    _, active, reset = flags(t, backwards, row, row < B, T, B, lengths_ptr, resets_ptr)
    state = (d * B + row)[:, None] * H + column
    stored = ((d * T + t) * B + row)[:, None]  # the row in cells, gates and products
    c = tl.zeros([BLOCK_B, BLOCK_H], ACC)
    if CELL == LSTM:
        c = tl.load(c_ptr + (d * B + row)[:, None] * aligned(c_stride, ALIGNED) + column, mask=mask, other=0.0).to(ACC)
        c = tl.where(reset[:, None], 0.0, c)
        if peephole_ptr is not None:
            peephole_ptr += d * (3 * H)
    at = aligned(d * x_strides[0] + t * x_strides[1], ALIGNED) + row[:, None] * aligned(x_strides[2], ALIGNED)
    x = load_tiles(x_ptr + at + column, H, mask, G, ACC)
    at = (d * B + row)[:, None] * aligned(product_stride, ALIGNED)
    product = load_tiles(product_ptr + at + column, H, mask, G, ACC)
    if products_ptr is not None:
        store_tiles(products_ptr + stored * (G * H) + column, H, mask, product, G)
    if bias_ptr is not None:
        bias_ptr += d * (R * H)
    if norm_ptr is not None:
        norm_ptr += d * (2 * G * H + (2 * H if CELL == LSTM else 0))
    a = preactivations(x, product, bias_ptr, norm_ptr, H, column, mask, eps, CELL, G, ACC)
    gates, c_new = activate(a, c, peephole_ptr, H, column, CELL, ACC)
    tl.debug_barrier()  # aliased memory: all reads before any write
    if gates_ptr is not None:
        store_tiles(gates_ptr + stored * (R * H) + column, H, mask, gates, R)
    if CELL == LSTM:
        if norm_ptr is not None:
            normed, _rstd = normalise((c_new,), mask, H, eps, 1)
            normed = scale_and_shift(normed, norm_ptr + 2 * G * H, H, H, column, 1, ACC)
            new = gates[3] * tanh(normed[0])
        else:
            new = gates[3] * tanh(c_new)
        c_new = zone(c_new, c, seed_ptr, 1, t, d, row, first, threshold_c, scalar(p_c, ACC), T, B, EXPECTED)
        c_new = tl.where(active[:, None], c_new, c)
        tl.store(c_new_ptr + state, rounded(c_new, c_new_ptr.dtype.element_ty), mask=mask)
        if cells_ptr is not None:
            tl.store(cells_ptr + stored * H + column, tl.where(active[:, None], c_new, 0.0), mask=mask)
    if hidden_ptr is not None:
        tl.store(hidden_ptr + state, rounded(new, hidden_ptr.dtype.element_ty), mask=mask)
    else:
        h = tl.load(h_ptr + (d * B + row)[:, None] * aligned(h_stride, ALIGNED) + column, mask=mask, other=0.0).to(ACC)
        h = tl.where(reset[:, None], 0.0, h)
        if CELL != LSTM:
            new = new_h(gates, h, CELL)
        _settle(
            new, h, active, t, backwards, d, row, first, column, mask, lengths_ptr, resets_ptr, mask_ptr, seed_ptr,
            h_new_ptr, operand_ptr, output_ptr, threshold_h, scalar(p_h, ACC), T, B, H, D, EXPECTED,
        )


@triton.jit(do_not_specialize=SIZES)
def state_forward_kernel(
    projected_ptr, lengths_ptr, resets_ptr, mask_ptr, seed_ptr, h_ptr, operand_ptr, output_ptr,
    threshold_h, p_h: tl.float64, T, B, P, D, step,
    EXPECTED: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """After the projection: the end of a step of an LSTM whose h has P columns."""
    P = aligned(P, ALIGNED)
    d, row, first, column, mask = position(B, P, BLOCK_B, BLOCK_H)
    backwards = runs_backwards(d)
    t = time_of(step, T, backwards)
    _, active, reset = flags(t, backwards, row, row < B, T, B, lengths_ptr, resets_ptr)
    at = (d * B + row)[:, None] * P + column
    new = tl.load(projected_ptr + at, mask=mask, other=0.0).to(ACC)
    h = tl.where(reset[:, None], 0.0, tl.load(h_ptr + at, mask=mask, other=0.0))
    _settle(
        new, h, active, t, backwards, d, row, first, column, mask, lengths_ptr, resets_ptr, mask_ptr, seed_ptr,
        h_ptr, operand_ptr, output_ptr, threshold_h, scalar(p_h, ACC), T, B, P, D, EXPECTED,
    )


@triton.jit(do_not_specialize=SIZES)
def operand_kernel(
    output_ptr, h0_ptr, lengths_ptr, resets_ptr, mask_ptr, operands_ptr, T, B, P, D,
    ACC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """The operands of all products, (D, T, B, P), from the output; 0 for steps that are not active.

    With two directions they are in the order of steps, else in the order of time (`slab`).
    """
    P = aligned(P, ALIGNED)
    d, flat, _first, column, exists = position(tl.cast(T, tl.int64) * B, P, BLOCK_B, BLOCK_H)
    backwards = runs_backwards(d)
    t = flat // B
    row = flat - t * B
    length, active, reset = flags(t, backwards, row, flat < tl.cast(T, tl.int64) * B, T, B, lengths_ptr, resets_ptr)
    before = ((t - 1 + 2 * backwards) * B + row) * D + d
    mask = exists & active[:, None]
    h = state_before(output_ptr, before, h0_ptr, t, backwards, d, row, column, mask, length, reset, B, P, ACC)
    if mask_ptr is not None:
        h *= tl.load(mask_ptr + (d * B + row)[:, None] * P + column, mask=mask, other=0.0).to(ACC)
    at = ((d * T + slab(t, d, T)) * B + row)[:, None] * P + column
    tl.store(operands_ptr + at, rounded(h, operands_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=SIZES)
def gates_kernel(
    x_ptr, products_ptr, bias_ptr, norm_ptr, peephole_ptr, lengths_ptr, resets_ptr, c0_ptr, cells_ptr, gates_ptr,
    kept_ptr, x_strides, eps: tl.float64, T, B, H, D,
    CELL: tl.constexpr, G: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """The gates of all steps, from all products (in the order of `slab`). kept: the products in the order of time."""
    H = aligned(H, ALIGNED)
    R: tl.constexpr = G + 1 if CELL == GRU else G
    d, flat, _first, column, mask = position(tl.cast(T, tl.int64) * B, H, BLOCK_B, BLOCK_H)
    backwards = runs_backwards(d)
    t = flat // B
    row = flat - t * B
    length, active, reset = flags(t, backwards, row, flat < tl.cast(T, tl.int64) * B, T, B, lengths_ptr, resets_ptr)
    mask = mask & active[:, None]
    c = tl.zeros([BLOCK_B, BLOCK_H], ACC)
    if CELL == LSTM:
        before = (d * T + t - 1 + 2 * backwards) * B + row
        c = state_before(cells_ptr, before, c0_ptr, t, backwards, d, row, column, mask, length, reset, B, H, ACC)
        if peephole_ptr is not None:
            peephole_ptr += d * (3 * H)
    at = d * aligned(x_strides[0], ALIGNED) + t * aligned(x_strides[1], ALIGNED) + row * aligned(x_strides[2], ALIGNED)
    x = load_tiles(x_ptr + at[:, None] + column, H, mask, G, ACC)
    at = ((d * T + slab(t, d, T)) * B + row)[:, None] * (G * H) + column
    product = load_tiles(products_ptr + at, H, mask, G, ACC)
    stored = (d * T * B + flat)[:, None]
    if kept_ptr is not None:
        store_tiles(kept_ptr + stored * (G * H) + column, H, mask, product, G)
    if bias_ptr is not None:
        bias_ptr += d * (R * H)
    if norm_ptr is not None:
        norm_ptr += d * (2 * G * H + (2 * H if CELL == LSTM else 0))
    a = preactivations(x, product, bias_ptr, norm_ptr, H, column, column < H, scalar(eps, ACC), CELL, G, ACC)
    gates, _ = activate(a, c, peephole_ptr, H, column, CELL, ACC)
    tl.debug_barrier()  # aliased memory: all reads before any write
    store_tiles(gates_ptr + stored * (R * H) + column, H, mask, gates, R)


@triton.jit
def _arriving(
    grad_output_ptr, direct_ptr, recurrent_ptr, mask_ptr, lengths_ptr, resets_ptr, grad_strides, direct_stride,
    active, t, backwards, d, row, column, mask, T, B, P, ACC: tl.constexpr,
):
    """(gradient that later steps send to this step's h, total gradient of this step's h)."""
    at = (d * B + row)[:, None] * direct_stride + column
    later = tl.load(direct_ptr + at, mask=mask, other=0.0).to(ACC)
    if recurrent_ptr is not None:
        at = (d * B + row)[:, None] * P + column
        back = tl.load(recurrent_ptr + at, mask=mask, other=0.0)
        if mask_ptr is not None:
            back *= tl.load(mask_ptr + at, mask=mask, other=0.0).to(ACC)
        later += back
        _, _, reset = flags(t + 1 - 2 * backwards, backwards, row, row < B, T, B, lengths_ptr, resets_ptr)
        later = tl.where(reset[:, None], 0.0, later)
    grad = later
    if grad_output_ptr is not None:
        at = t * grad_strides[0] + row * grad_strides[1] + d * P
        grad += tl.load(grad_output_ptr + at[:, None] + column, mask=mask & active[:, None], other=0.0).to(ACC)
    return later, grad


@triton.jit(do_not_specialize=SIZES)
def cell_backward_kernel(
    grad_output_ptr, direct_ptr, recurrent_ptr, grad_hidden_ptr, grad_c_ptr, grad_cells_ptr,
    gates_ptr, cells_ptr, c0_ptr, output_ptr, h0_ptr, products_ptr, norm_ptr, peephole_ptr, lengths_ptr, resets_ptr,
    mask_ptr, seed_ptr, grad_x_ptr, grad_h_gates_ptr, direct_new_ptr, grad_c_new_ptr, hidden_ptr, norm_sums_ptr,
    peephole_sums_ptr, grad_strides, direct_stride, grad_c_stride, grad_h_gates_strides, hidden_strides,
    threshold_h, threshold_c, p_h: tl.float64, p_c: tl.float64, eps: tl.float64, T, B, H, D,
    step,
    CELL: tl.constexpr, G: tl.constexpr, EXPECTED: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """One step of all directions. `direct_new` and `grad_c_new` may alias `direct` and `grad_c`."""
    H = aligned(H, ALIGNED)
    R: tl.constexpr = G + 1 if CELL == GRU else G
    eps = scalar(eps, ACC)
    d, row, first, column, mask = position(B, H, BLOCK_B, BLOCK_H)
    backwards = runs_backwards(d)
    t = time_of(step, T, backwards)
    length, active, reset = flags(t, backwards, row, row < B, T, B, lengths_ptr, resets_ptr)
    live = mask & active[:, None]
    state = (d * B + row)[:, None] * H + column
    stored = ((d * T + t) * B + row)[:, None]
    if norm_ptr is not None:
        norm_ptr += d * (2 * G * H + (2 * H if CELL == LSTM else 0))
        norm_sums_ptr += (d * B + row)[:, None] * (2 * G * H + (2 * H if CELL == LSTM else 0)) + column

    # the gradient of h^, or of h~ before a projection
    if grad_hidden_ptr is not None:
        grad = tl.load(grad_hidden_ptr + state, mask=live, other=0.0)
    else:
        later, grad = _arriving(
            grad_output_ptr, direct_ptr, recurrent_ptr, mask_ptr, lengths_ptr, resets_ptr, grad_strides, direct_stride,
            active, t, backwards, d, row, column, mask, T, B, H, ACC,
        )
        grad, beside = zone_backward(
            grad, seed_ptr, 0, t, d, row, first, threshold_h, scalar(p_h, ACC), T, B, EXPECTED
        )
    gates = load_tiles(gates_ptr + stored * (R * H) + column, H, live, R, ACC)
    if CELL == LSTM:
        i, f, g, o = gates
        before = (d * T + t - 1 + 2 * backwards) * B + row
        c = state_before(cells_ptr, before, c0_ptr, t, backwards, d, row, column, live, length, reset, B, H, ACC)
        new = f * c + i * g
        if norm_ptr is not None:
            xhat_c, rstd_c = normalise((new,), column < H, H, eps, 1)
            normed = scale_and_shift(xhat_c, norm_ptr + 2 * G * H, H, H, column, 1, ACC)
            tanh_c = tanh(normed[0])
        else:
            tanh_c = tanh(new)
        if hidden_ptr is not None:
            at = d * hidden_strides[0] + slab(t, d, T) * hidden_strides[1] + row * H
            hidden = tl.where(active[:, None], o * tanh_c, 0.0)
            tl.store(hidden_ptr + at[:, None] + column, rounded(hidden, hidden_ptr.dtype.element_ty), mask=mask)
        later_c = tl.zeros([BLOCK_B, BLOCK_H], ACC)
        if grad_c_ptr is not None:
            at = (d * B + row)[:, None] * grad_c_stride + column
            later_c = tl.load(grad_c_ptr + at, mask=mask, other=0.0).to(ACC)
        grad_c = later_c
        if grad_cells_ptr is not None:
            grad_c += tl.load(grad_cells_ptr + stored * H + column, mask=live, other=0.0).to(ACC)
        grad_c, beside_c = zone_backward(
            grad_c, seed_ptr, 1, t, d, row, first, threshold_c, scalar(p_c, ACC), T, B, EXPECTED
        )
        grad_o = grad * tanh_c * o * (1.0 - o)
        grad_tanh = grad * o * (1.0 - tanh_c * tanh_c)
        if norm_ptr is not None:
            at = norm_sums_ptr + 2 * G * H
            add_tiles(at, H, live, (grad_tanh * xhat_c[0], grad_tanh), 2)
            through = normalise_backward((grad_tanh,), xhat_c, rstd_c, norm_ptr + 2 * G * H, H, column, H, 1, ACC)
            grad_c += through[0]
        else:
            grad_c += grad_tanh
        if peephole_ptr is not None:
            peephole_ptr += d * (3 * H)
            p_i, p_f, p_o = load_tiles(peephole_ptr + column, H, column < H, 3, ACC)
            grad_c += grad_o * p_o
        grad_i = grad_c * g * i * (1.0 - i)
        grad_f = grad_c * c * f * (1.0 - f)
        of_x = (grad_i, grad_f, grad_c * i * (1.0 - g * g), grad_o)
        of_h = of_x
        beside_c += grad_c * f
        if peephole_ptr is not None:
            beside_c += grad_i * p_i + grad_f * p_f
            at = peephole_sums_ptr + (d * B + row)[:, None] * (3 * H) + column
            add_tiles(at, H, live, (grad_i * c, grad_f * c, grad_o * new), 3)
        beside_c = tl.where(reset[:, None], 0.0, tl.where(active[:, None], beside_c, later_c))
        tl.debug_barrier()  # aliased memory: all reads before any write
        tl.store(grad_c_new_ptr + state, rounded(beside_c, grad_c_new_ptr.dtype.element_ty), mask=mask)
    else:
        h = grad
        if CELL == GRU or CELL == INTERPOLATED:  # noqa: SIM109
            before = ((t - 1 + 2 * backwards) * B + row) * D + d
            h = state_before(output_ptr, before, h0_ptr, t, backwards, d, row, column, live, length, reset, B, H, ACC)
        of_x, of_h, past = gradients(gates, h, grad, CELL)
        beside += past
    if grad_hidden_ptr is None and direct_new_ptr is not None:
        # The next step applies its `reset` when it reads this, to the product as well.
        beside = tl.where(active[:, None], beside, later)
        tl.debug_barrier()  # aliased memory, as above
        tl.store(direct_new_ptr + state, rounded(beside, direct_new_ptr.dtype.element_ty), mask=mask)
    if norm_ptr is not None:
        raw = load_tiles(products_ptr + stored * (G * H) + column, H, live, G, ACC)
        xhat, rstd = normalise(raw, column < H, G * H, eps, G)
        weighted = ()
        for k in tl.static_range(G):
            weighted += (of_h[k] * xhat[k],)
        add_tiles(norm_sums_ptr, H, live, weighted, G)
        add_tiles(norm_sums_ptr + G * H, H, live, of_h, G)
        of_h = normalise_backward(of_h, xhat, rstd, norm_ptr, H, column, G * H, G, ACC)
    x_tiles = ()
    h_tiles = ()
    for k in tl.static_range(G):
        x_tiles += (tl.where(active[:, None], of_x[k], 0.0),)
        h_tiles += (tl.where(active[:, None], of_h[k], 0.0),)
    store_tiles(grad_x_ptr + ((t * B + row) * D + d)[:, None] * (G * H) + column, H, mask, x_tiles, G)
    if grad_h_gates_ptr is not None:
        at = d * grad_h_gates_strides[0] + slab(t, d, T) * grad_h_gates_strides[1] + row * (G * H)
        store_tiles(grad_h_gates_ptr + at[:, None] + column, H, mask, h_tiles, G)


@triton.jit(do_not_specialize=SIZES)
def state_backward_kernel(
    grad_output_ptr, direct_ptr, recurrent_ptr, lengths_ptr, resets_ptr, mask_ptr, seed_ptr, grad_new_ptr,
    grad_strides, grad_new_strides, threshold_h, p_h: tl.float64, T, B, P, D, step,
    EXPECTED: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """Before the projection's transpose: the gradient of h^, of P columns, and the part that bypasses the cell."""
    P = aligned(P, ALIGNED)
    d, row, first, column, mask = position(B, P, BLOCK_B, BLOCK_H)
    backwards = runs_backwards(d)
    t = time_of(step, T, backwards)
    _, active, _ = flags(t, backwards, row, row < B, T, B, lengths_ptr, resets_ptr)
    later, grad = _arriving(
        grad_output_ptr, direct_ptr, recurrent_ptr, mask_ptr, lengths_ptr, resets_ptr, grad_strides, P, active, t,
        backwards, d, row, column, mask, T, B, P, ACC,
    )
    grad, beside = zone_backward(grad, seed_ptr, 0, t, d, row, first, threshold_h, scalar(p_h, ACC), T, B, EXPECTED)
    beside = tl.where(active[:, None], beside, later)
    tl.debug_barrier()  # aliased memory: all reads before any write
    tl.store(direct_ptr + (d * B + row)[:, None] * P + column, beside, mask=mask)
    at = d * grad_new_strides[0] + slab(t, d, T) * grad_new_strides[1] + row * P
    grad = rounded(tl.where(active[:, None], grad, 0.0), grad_new_ptr.dtype.element_ty)
    tl.store(grad_new_ptr + at[:, None] + column, grad, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def first_state_kernel(
    direct_ptr, recurrent_ptr, lengths_ptr, resets_ptr, mask_ptr, grad_h0_ptr, T, B, P, D,
    ACC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """The gradient of h0: what the first step of each direction sends back."""
    P = aligned(P, ALIGNED)
    d, row, _first, column, mask = position(B, P, BLOCK_B, BLOCK_H)
    backwards = runs_backwards(d)
    t = time_of(-1, T, backwards)
    later, _ = _arriving(
        None, direct_ptr, recurrent_ptr, mask_ptr, lengths_ptr, resets_ptr, (0, 0), P, row < 0, t, backwards, d, row,
        column, mask, T, B, P, ACC,
    )
    at = (d * B + row)[:, None] * P + column
    tl.store(grad_h0_ptr + at, rounded(later, grad_h0_ptr.dtype.element_ty), mask=mask)

# fmt: on
