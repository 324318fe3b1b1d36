"""One step of a recurrent cell, forward and backward, on tiles of (rows of the batch, hidden units).

The cells share their shape: G gates of H hidden units each. zx comes from the input, for all steps at once, zh from the
state. An absent option costs nothing: its pointer is None, which the compiler knows. Equations: rnn.py. The kernels
that use this: steps.py (one step) and sequence.py (all steps).
"""

import triton
import triton.language as tl

from .._common import keep_mask, rounded

LSTM = tl.constexpr(0)
GRU = tl.constexpr(1)
RNN_TANH = tl.constexpr(2)
RNN_RELU = tl.constexpr(3)
ADDITIVE = tl.constexpr(4)
INTERPOLATED = tl.constexpr(5)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x). For x -> -inf e^-x becomes infinite and 1 / inf is 0: no NaN."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """tanh, correct to a few ulp everywhere.

    From |x| = 0.625 on 1 - 2 / (e^2|x| + 1), which saturates without NaN. Nearer to 0 that cancels; there x + x^3
    P(x^2) / Q(x^2), the rational function of Cephes (tanh.c). One division serves both.
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


# ---- where a step is ----------------------------------------------------------------------------------------------


@triton.jit
def position(rows, columns, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr):
    """This program's direction, rows (BLOCK_B), first column, columns (1, BLOCK_H), and the mask of its tile."""
    blocks = tl.cdiv(columns, BLOCK_H)
    groups = tl.cdiv(rows, BLOCK_B)
    first = tl.program_id(0) % blocks * BLOCK_H
    group = tl.program_id(0) // blocks
    row = (group % groups).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = first + tl.arange(0, BLOCK_H)[None, :]
    return (group // groups).to(tl.int64), row, first, column, (row < rows)[:, None] & (column < columns)


@triton.jit
def runs_backwards(d):
    """1 where direction d visits the last step first, else 0."""
    return tl.minimum(d, 1).to(tl.int64)


@triton.jit
def time_of(step, T, backwards):
    """The time of a direction's step, int64; negative or >= T for steps that do not exist."""
    step = tl.cast(step, tl.int64)
    return tl.where(backwards == 1, T - 1 - step, step)


@triton.jit
def flags(t, backwards, row, live, T, B, lengths_ptr, resets_ptr):
    """(length, active, reset) of rows of the batch at time t, which is a scalar or has an element for each row."""
    length = row * 0 + T
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + row, mask=live, other=0)
    active = live & (t >= 0) & (t < length)
    reset = tl.full(row.shape, False, tl.int1)
    if resets_ptr is not None:  # a flag marks the border between its time and the one before
        marked = active & (t + backwards < length)
        reset = tl.load(resets_ptr + (t + backwards) * B + row, mask=marked, other=0) != 0
    return length, active, reset


@triton.jit
def state_before(
    states_ptr, stored, first_ptr, t, backwards, d, row, column, mask, length, reset, B, H, ACC: tl.constexpr
):  # fmt: skip
    """The state (rows, columns) before the step at time t: of the previous step, the initial one, or 0.

    stored: the rows of `states` that hold the previous step, where there is one.
    """
    inside = tl.where(backwards == 1, t + 1 < length, t > 0)
    later = (inside & (reset == 0))[:, None] & mask
    initial = ((inside == 0) & (reset == 0))[:, None] & mask
    state = tl.load(states_ptr + stored[:, None] * H + column, mask=later, other=0.0).to(ACC)
    start = tl.load(first_ptr + (d * B + row)[:, None] * H + column, mask=initial, other=0.0).to(ACC)
    return tl.where(later, state, start)


@triton.jit
def slab(t, d, T):
    """Index of time t in memory: step order for the second of two directions, so that a step of both has constant
    strides."""
    return tl.where(d == 1, T - 1 - t, t)


# ---- tiles --------------------------------------------------------------------------------------------------------


@triton.jit
def load_tiles(pointer, H, mask, COUNT: tl.constexpr, ACC: tl.constexpr):
    """Loads COUNT tiles, H columns apart."""
    tiles = ()
    for k in tl.static_range(COUNT):
        tiles += (tl.load(pointer + k * H, mask=mask, other=0.0).to(ACC),)
    return tiles


@triton.jit
def store_tiles(pointer, H, mask, tiles, COUNT: tl.constexpr):
    for k in tl.static_range(COUNT):
        tl.store(pointer + k * H, rounded(tiles[k], pointer.dtype.element_ty), mask=mask)


@triton.jit
def add_tiles(pointer, H, mask, tiles, COUNT: tl.constexpr):
    """Adds to memory. Each element belongs to one program, so sums are in the order of the launches."""
    for k in tl.static_range(COUNT):
        at = pointer + k * H
        tl.store(at, tl.load(at, mask=mask, other=0.0) + tiles[k], mask=mask)


@triton.jit
def normalise(tiles, mask, count, eps, COUNT: tl.constexpr):
    """Layer norm of rows made of COUNT tiles: (xhat, rstd). Centred twice, as in layer_norm.py."""
    for _ in tl.static_range(2):
        total = tiles[0]
        for k in tl.static_range(1, COUNT):
            total += tiles[k]
        shift = (tl.sum(total, 1) / count)[:, None]
        centred = ()
        for k in tl.static_range(COUNT):
            centred += (tl.where(mask, tiles[k] - shift, 0.0),)
        tiles = centred
    square = tiles[0] * tiles[0]
    for k in tl.static_range(1, COUNT):
        square += tiles[k] * tiles[k]
    rstd = (1.0 / tl.sqrt(tl.sum(square, 1) / count + eps))[:, None]
    xhat = ()
    for k in tl.static_range(COUNT):
        xhat += (tiles[k] * rstd,)
    return xhat, rstd


@triton.jit
def normalise_backward(grads, xhat, rstd, pointer, H, column, count, COUNT: tl.constexpr, ACC: tl.constexpr):
    """The gradient of `normalise`'s input. grads: gradients of xhat weight + bias; `pointer`: the weight."""
    weight = load_tiles(pointer + column, H, column < H, COUNT, ACC)
    g = ()
    for k in tl.static_range(COUNT):
        g += (grads[k] * weight[k],)
    sum_g = g[0]
    sum_gx = g[0] * xhat[0]
    for k in tl.static_range(1, COUNT):
        sum_g += g[k]
        sum_gx += g[k] * xhat[k]
    mean_g = (tl.sum(sum_g, 1) / count)[:, None]
    along = (tl.sum(sum_gx, 1) / count)[:, None]
    result = ()
    for k in tl.static_range(COUNT):
        result += ((g[k] - mean_g - xhat[k] * along) * rstd,)
    return result


@triton.jit
def scale_and_shift(xhat, pointer, distance, H, column, COUNT: tl.constexpr, ACC: tl.constexpr):
    """xhat weight + bias; the bias is `distance` after the weight."""
    weight = load_tiles(pointer + column, H, column < H, COUNT, ACC)
    bias = load_tiles(pointer + distance + column, H, column < H, COUNT, ACC)
    result = ()
    for k in tl.static_range(COUNT):
        result += (xhat[k] * weight[k] + bias[k],)
    return result


# ---- the cells ----------------------------------------------------------------------------------------------------


@triton.jit
def preactivations(
    x, product, bias_ptr, norm_ptr, H, column, mask, eps, CELL: tl.constexpr, G: tl.constexpr, ACC: tl.constexpr
):
    """zx + zh of every gate. The GRU's third gate stays in two parts; the last is q = zh_n.

    bias: pointer to the same tiles; b_ih and b_hh are already summed where they are.
    """
    if norm_ptr is not None:
        xhat, _rstd = normalise(product, mask, G * H, eps, G)
        product = scale_and_shift(xhat, norm_ptr, G * H, H, column, G, ACC)
    a = ()
    for k in tl.static_range(G):
        if CELL == GRU and k == 2:
            a += (x[k], product[k])
        else:
            a += (x[k] + product[k],)
    if bias_ptr is not None:
        R: tl.constexpr = G + 1 if CELL == GRU else G
        bias = load_tiles(bias_ptr + column, H, column < H, R, ACC)
        z = ()
        for k in tl.static_range(R):
            z += (a[k] + bias[k],)
        a = z
    return a


@triton.jit
def activate(a, c, peephole_ptr, H, column, CELL: tl.constexpr, ACC: tl.constexpr):
    """The gates as the backward pass needs them, and the LSTM's new cell state before zoneout."""
    new = c
    if CELL == LSTM:
        i, f, g, o = a[0], a[1], tanh(a[2]), a[3]
        if peephole_ptr is not None:
            p_i, p_f, p_o = load_tiles(peephole_ptr + column, H, column < H, 3, ACC)
            i = sigmoid(i + p_i * c)
            f = sigmoid(f + p_f * c)
            new = f * c + i * g
            o = sigmoid(o + p_o * new)
        else:
            i, f, o = sigmoid(i), sigmoid(f), sigmoid(o)
            new = f * c + i * g
        gates = (i, f, g, o)
    elif CELL == GRU:
        r, z = sigmoid(a[0]), sigmoid(a[1])
        gates = (r, z, tanh(a[2] + r * a[3]), a[3])
    elif CELL == RNN_TANH or CELL == ADDITIVE:  # noqa: SIM109
        gates = (tanh(a[0]),)
    elif CELL == INTERPOLATED:
        gates = (sigmoid(a[0]), tanh(a[1]))
    else:
        gates = (tl.where(a[0] < 0, 0.0, a[0]),)
    return gates, new


@triton.jit
def new_h(gates, h, CELL: tl.constexpr):
    """h^ of the cells other than the LSTM, before zoneout."""
    if CELL == GRU:
        y = (1.0 - gates[1]) * gates[2] + gates[1] * h
    elif CELL == ADDITIVE:
        y = h + gates[0]
    elif CELL == INTERPOLATED:
        y = gates[0] * h + (1.0 - gates[0]) * gates[1]
    else:
        y = gates[0]
    return y


@triton.jit
def gradients(gates, h, grad, CELL: tl.constexpr):
    """Of the cells other than the LSTM, from the gradient of h^: gradients of zx and zh, and of h other than through
    zh."""
    if CELL == GRU:
        r, z, n, q = gates
        grad_n = grad * (1.0 - z) * (1.0 - n * n)
        grad_r = grad_n * q * r * (1.0 - r)
        grad_z = grad * (h - n) * z * (1.0 - z)
        of_x = (grad_r, grad_z, grad_n)
        of_h = (grad_r, grad_z, grad_n * r)
        beside = grad * z
    elif CELL == ADDITIVE:
        of_x = (grad * (1.0 - gates[0] * gates[0]),)
        of_h = of_x
        beside = grad
    elif CELL == INTERPOLATED:
        f, u = gates
        of_x = (grad * (h - u) * f * (1.0 - f), grad * (1.0 - f) * (1.0 - u * u))
        of_h = of_x
        beside = grad * f
    else:
        y = gates[0]
        if CELL == RNN_TANH:
            of_x = (grad * (1.0 - y * y),)
        else:
            of_x = (tl.where(y <= 0, 0.0, grad),)
        of_h = of_x
        beside = tl.zeros_like(grad)
    return of_x, of_h, beside


# ---- zoneout ------------------------------------------------------------------------------------------------------


@triton.jit
def stays(seed, kind, t, d, row, first, threshold, T, B, COLUMNS: tl.constexpr):
    """Which elements zoneout keeps at their old value. kind: 0 for h, 1 for c."""
    return keep_mask(seed, ((2 * d + kind) * T + t) * B + row, first, threshold, COLUMNS) == 0


@triton.jit
def zone(new, old, seed_ptr, kind, t, d, row, first, threshold, p, T, B, EXPECTED: tl.constexpr):
    """The state after zoneout. EXPECTED: its expectation."""
    if EXPECTED:
        new = p * old + (1.0 - p) * new
    elif seed_ptr is not None:
        old_stays = stays(tl.load(seed_ptr), kind, t, d, row, first, threshold, T, B, new.shape[1])
        new = tl.where(old_stays, old, new)
    return new


@triton.jit
def zone_backward(grad, seed_ptr, kind, t, d, row, first, threshold, p, T, B, EXPECTED: tl.constexpr):
    """The gradients of the new and of the old value."""
    if EXPECTED:
        new, old = grad * (1.0 - p), grad * p
    elif seed_ptr is not None:
        old_stays = stays(tl.load(seed_ptr), kind, t, d, row, first, threshold, T, B, grad.shape[1])
        new, old = tl.where(old_stays, 0.0, grad), tl.where(old_stays, grad, 0.0)
    else:
        new, old = grad, tl.zeros_like(grad)
    return new, old
