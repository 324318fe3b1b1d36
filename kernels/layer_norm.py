"""Layer norm, forward and backward, in Triton.

The idea. A row is read once and kept in registers: mean, variance and output come from the same copy (rows of up to
8192 columns; longer rows are walked in blocks, three times forward and twice backward, from the cache). The backward
pass keeps one accumulator tile for the weight and one for the bias in registers while a fixed set of programs walks
all rows, writes one partial row a program, and a second kernel adds the partials in a fixed order: no atomics, so
the result is the same bits every run.

The equations (Ba, Kiros & Hinton 2016, eq. 4; eps under the root as in torch), over the N columns of a row:

    mean = sum(x) / N      var = sum((x - mean)^2) / N      rstd = 1 / sqrt(var + eps)      xhat = (x - mean) rstd
    y = xhat weight + bias
    g = dy weight          dx = rstd (g - sum(g) / N - xhat sum(g xhat) / N)
    dweight = sum over rows of dy xhat         dbias = sum over rows of dy

The mean is rounded, and with |mean| / std = 1e4 half a unit of it is 3e-4 of a std, in every element of the row. So
the centred values are centred once more: d = x - mean is exact there (Sterbenz), and shift = sum(d) / N is what the
rounding took away. The stored mean is rounded as well, so the backward pass finds its own shift in the same way.

What was tried, judged by the compiler's register report (no GPU speed has been measured yet):
- rows of 8192 floats in one pass: 60 registers forward and 121 to 127 backward with 16 warps, just under the 128 that
  such a program may use. Backward, 288 bytes spill when elements are loaded one by one and 32 with fp64: those walk
  in blocks from half that length on;
- var = sum(d^2) / N - shift^2 in one pass too: needs a guard against a negative result for constant rows. Where d
  is in registers it is centred once more instead.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, aligned, multiprocessors, run, scalar, unit_last


@triton.jit
def _affine(x, pointer, column, N, MULTIPLY: tl.constexpr):
    """x times (or plus) the vector at `pointer`, which may be None; x is (rows, columns)."""
    if pointer is not None:
        vector = tl.load(pointer + column, mask=column < N, other=0.0).to(x.dtype)[None, :]
        if MULTIPLY:
            x = x * vector
        else:
            x = x + vector
    return x


@triton.jit(do_not_specialize=["M", "N", "stride"])
def _forward_kernel(
    input_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    mean_ptr,
    rstd_ptr,
    stride,
    M,
    N,
    eps: tl.float64,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M whole rows a program."""
    stride = aligned(stride, ALIGNED)
    N = aligned(N, ALIGNED)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    inside = (column < N)[None, :]
    live = inside & (row < M)[:, None]
    x = tl.load(input_ptr + row[:, None] * stride + column[None, :], mask=live, other=0.0).to(ACC)
    mean = tl.sum(x, 1) / N
    d = tl.where(inside, x - mean[:, None], 0.0)
    shift = tl.sum(d, 1) / N
    d = tl.where(inside, d - shift[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(d * d, 1) / N + scalar(eps, ACC))
    y = _affine(d * rstd[:, None], weight_ptr, column, N, True)
    y = _affine(y, bias_ptr, column, N, False)
    tl.store(output_ptr + row[:, None] * N + column[None, :], y.to(output_ptr.dtype.element_ty), mask=live)
    tl.store(mean_ptr + row, mean + shift, mask=row < M)
    tl.store(rstd_ptr + row, rstd, mask=row < M)


@triton.jit(do_not_specialize=["M", "N", "stride"])
def _forward_long_kernel(
    input_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    mean_ptr,
    rstd_ptr,
    stride,
    M,
    N,
    eps: tl.float64,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One row a program, in blocks of BLOCK_N columns."""
    N = aligned(N, ALIGNED)
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * aligned(stride, ALIGNED)
    output_ptr += row * N
    block = tl.arange(0, BLOCK_N)

    total = tl.zeros([BLOCK_N], ACC)
    for first in range(0, N, BLOCK_N):
        column = first + block
        total += tl.load(input_ptr + column, mask=column < N, other=0.0).to(ACC)
    mean = tl.sum(total, 0) / N

    total = tl.zeros([BLOCK_N], ACC)
    square = tl.zeros([BLOCK_N], ACC)
    for first in range(0, N, BLOCK_N):
        column = first + block
        x = tl.load(input_ptr + column, mask=column < N, other=0.0).to(ACC)
        d = tl.where(column < N, x - mean, 0.0)
        total += d
        square += d * d
    shift = tl.sum(total, 0) / N
    variance = tl.maximum(tl.sum(square, 0) / N - shift * shift, 0.0)
    rstd = 1.0 / tl.sqrt(variance + scalar(eps, ACC))

    for first in range(0, N, BLOCK_N):
        column = first + block
        x = tl.load(input_ptr + column, mask=column < N, other=0.0).to(ACC)
        y = ((x - mean - shift) * rstd)[None, :]
        y = _affine(y, weight_ptr, column, N, True)
        y = _affine(y, bias_ptr, column, N, False)
        tl.store(output_ptr + column[None, :], y.to(output_ptr.dtype.element_ty), mask=(column < N)[None, :])
    tl.store(mean_ptr + row, mean + shift)
    tl.store(rstd_ptr + row, rstd)


@triton.jit(do_not_specialize=["M", "N", "grad_stride", "stride"])
def _backward_kernel(
    grad_output_ptr,
    input_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    grad_input_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    grad_stride,
    stride,
    M,
    N,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every num_programs-th tile of BLOCK_M whole rows; row program_id of the partial sums."""
    grad_stride = aligned(grad_stride, ALIGNED)
    stride = aligned(stride, ALIGNED)
    N = aligned(N, ALIGNED)
    column = tl.arange(0, BLOCK_N)
    inside = (column < N)[None, :]
    grad_weight = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    grad_bias = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        live = inside & (row < M)[:, None]
        x = tl.load(input_ptr + row[:, None] * stride + column[None, :], mask=live, other=0.0).to(ACC)
        dy = tl.load(grad_output_ptr + row[:, None] * grad_stride + column[None, :], mask=live, other=0.0).to(ACC)
        mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
        d = tl.where(inside, x - mean[:, None], 0.0)
        shift = tl.sum(d, 1) / N
        xhat = tl.where(inside, (d - shift[:, None]) * rstd[:, None], 0.0)
        if partial_weight_ptr is not None:
            grad_weight += dy * xhat
        if partial_bias_ptr is not None:
            grad_bias += dy
        g = _affine(dy, weight_ptr, column, N, True)
        along = tl.sum(g * xhat, 1) / N
        dx = (g - (tl.sum(g, 1) / N)[:, None] - xhat * along[:, None]) * rstd[:, None]
        tl.store(grad_input_ptr + row[:, None] * N + column[None, :], dx.to(grad_input_ptr.dtype.element_ty), mask=live)
    at = tl.program_id(0).to(tl.int64) * N + column
    if partial_weight_ptr is not None:
        tl.store(partial_weight_ptr + at, tl.sum(grad_weight, 0), mask=column < N)
    if partial_bias_ptr is not None:
        tl.store(partial_bias_ptr + at, tl.sum(grad_bias, 0), mask=column < N)


@triton.jit(do_not_specialize=["M", "N", "grad_stride", "stride"])
def _backward_long_kernel(
    grad_output_ptr,
    input_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    grad_input_ptr,
    shift_ptr,
    grad_stride,
    stride,
    M,
    N,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dx of one row a program; keeps the row's shift for the kernel below."""
    N = aligned(N, ALIGNED)
    row = tl.program_id(0).to(tl.int64)
    grad_output_ptr += row * aligned(grad_stride, ALIGNED)
    input_ptr += row * aligned(stride, ALIGNED)
    grad_input_ptr += row * N
    block = tl.arange(0, BLOCK_N)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)

    sum_d = tl.zeros([BLOCK_N], ACC)
    sum_g = tl.zeros([1, BLOCK_N], ACC)
    sum_gd = tl.zeros([1, BLOCK_N], ACC)
    for first in range(0, N, BLOCK_N):
        column = first + block
        x = tl.load(input_ptr + column, mask=column < N, other=0.0).to(ACC)
        dy = tl.load(grad_output_ptr + column, mask=column < N, other=0.0).to(ACC)
        d = tl.where(column < N, x - mean, 0.0)
        g = _affine(dy[None, :], weight_ptr, column, N, True)
        sum_d += d
        sum_g += g
        sum_gd += g * d[None, :]
    shift = tl.sum(sum_d, 0) / N
    mean_g = tl.sum(tl.sum(sum_g, 1), 0) / N
    along = (tl.sum(tl.sum(sum_gd, 1), 0) / N - shift * mean_g) * rstd  # sum(g xhat) / N
    tl.store(shift_ptr + row, shift)

    for first in range(0, N, BLOCK_N):
        column = first + block
        x = tl.load(input_ptr + column, mask=column < N, other=0.0).to(ACC)
        dy = tl.load(grad_output_ptr + column, mask=column < N, other=0.0).to(ACC)
        xhat = ((x - mean - shift) * rstd)[None, :]
        dx = (_affine(dy[None, :], weight_ptr, column, N, True) - mean_g - xhat * along) * rstd
        tl.store(grad_input_ptr + column[None, :], dx.to(grad_input_ptr.dtype.element_ty), mask=(column < N)[None, :])


@triton.jit(do_not_specialize=["M", "N", "grad_stride", "stride"])
def _columns_kernel(
    grad_output_ptr,
    input_ptr,
    mean_ptr,
    rstd_ptr,
    shift_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    grad_stride,
    stride,
    M,
    N,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """For long rows: BLOCK_N columns of every num_programs(1)-th tile of BLOCK_M rows."""
    grad_stride = aligned(grad_stride, ALIGNED)
    stride = aligned(stride, ALIGNED)
    N = aligned(N, ALIGNED)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    grad_weight = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    grad_bias = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for tile in range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1)):
        row = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        live = (column < N)[None, :] & (row < M)[:, None]
        dy = tl.load(grad_output_ptr + row[:, None] * grad_stride + column[None, :], mask=live, other=0.0).to(ACC)
        if partial_weight_ptr is not None:
            x = tl.load(input_ptr + row[:, None] * stride + column[None, :], mask=live, other=0.0).to(ACC)
            mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
            shift = tl.load(shift_ptr + row, mask=row < M, other=0.0)
            rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
            grad_weight += dy * ((x - mean[:, None] - shift[:, None]) * rstd[:, None])
        if partial_bias_ptr is not None:
            grad_bias += dy
    at = tl.program_id(1).to(tl.int64) * N + column
    if partial_weight_ptr is not None:
        tl.store(partial_weight_ptr + at, tl.sum(grad_weight, 0), mask=column < N)
    if partial_bias_ptr is not None:
        tl.store(partial_bias_ptr + at, tl.sum(grad_bias, 0), mask=column < N)


@triton.jit(do_not_specialize=["PARTS", "N"])
def _reduce_kernel(partial_ptr, grad_ptr, PARTS, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """grad = the sum of the PARTS partial rows."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], partial_ptr.dtype.element_ty)
    for first in range(0, PARTS, BLOCK_M):
        part = first + tl.arange(0, BLOCK_M)
        live = (part < PARTS)[:, None] & (column < N)[None, :]
        total += tl.load(partial_ptr + part.to(tl.int64)[:, None] * N + column[None, :], mask=live, other=0.0)
    tl.store(grad_ptr + column, tl.sum(total, 0).to(grad_ptr.dtype.element_ty), mask=column < N)


# ---- plans and launchers ------------------------------------------------------------------------------------------

_TILE = 16 << 10  # bytes of accumulators in a tile: 16 floats a thread with 8 warps
_LONGEST = 32 << 10  # the longest row that fits registers, in the same bytes: 8192 floats, with 16 warps
_LONG_BLOCK = {"BLOCK_N": 4096}
_COLUMNS_BLOCK = {"BLOCK_M": 16, "BLOCK_N": 128}
_REDUCE_BLOCK = {"BLOCK_M": 32, "BLOCK_N": 64}


def _row_block(n: int, dtype: torch.dtype, longest: int) -> tuple[dict[str, int], int]:
    """The tile of whole rows of n columns, and its warps; ({}, 0) for rows of more than `longest` bytes."""
    size = accumulator(dtype).itemsize
    block_n = max(16, triton.next_power_of_2(n))
    if block_n * size > longest:
        return {}, 0
    block_m = min(64, max(1, _TILE // (block_n * size)))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}, 8 if block_n * size <= _TILE else 16


def _constants(*matrices: torch.Tensor) -> dict[str, object]:
    n = matrices[0].size(1)
    return {
        "ACC": TRITON_DTYPE[accumulator(matrices[0].dtype)],
        "ALIGNED": n % 8 == 0 and all(matrix.stride(0) % 8 == 0 for matrix in matrices),
    }


def _plan_forward(input, weight, bias, eps):
    m, n = input.shape
    output = input.new_empty((m, n))
    mean = input.new_empty((m,), dtype=accumulator(input.dtype))
    rstd = torch.empty_like(mean)
    arguments = (input, weight, bias, output, mean, rstd, input.stride(0), m, n, eps)
    constants = _constants(input)
    block, warps = _row_block(n, input.dtype, _LONGEST)
    if block:
        grid = (triton.cdiv(m, block["BLOCK_M"]),)
        launch = Launch("layer_norm_forward", _forward_kernel, grid, arguments, constants | block, warps)
    else:
        constants |= _LONG_BLOCK
        launch = Launch("layer_norm_forward_long", _forward_long_kernel, (m,), arguments, constants, 8)
    return (output, mean, rstd), [launch]


def _plan_backward(grad_output, input, mean, rstd, weight, need_weight, need_bias, programs):
    """`programs` bounds the rows of the partial sums: twice the multiprocessors."""
    m, n = input.shape
    acc = accumulator(input.dtype)
    grad_input = input.new_empty((m, n))
    constants = _constants(input, grad_output)
    # Four more tiles live here than in the forward kernel: single elements and doubles then spill half as far out.
    roomy = constants["ALIGNED"] and acc == torch.float32
    block, warps = _row_block(n, input.dtype, _LONGEST if roomy else _LONGEST // 2)
    tile = (block or _COLUMNS_BLOCK)["BLOCK_M"]
    parts = min(triton.cdiv(m, tile), programs)
    partials = [input.new_empty((parts, n), dtype=acc) if need else None for need in (need_weight, need_bias)]
    strides = (grad_output.stride(0), input.stride(0), m, n)
    if block:
        arguments = (grad_output, input, mean, rstd, weight, grad_input, *partials, *strides)
        plan = [Launch("layer_norm_backward", _backward_kernel, (parts,), arguments, constants | block, warps)]
    else:
        shift = torch.empty_like(mean)
        arguments = (grad_output, input, mean, rstd, weight, grad_input, shift, *strides)
        plan = [Launch("layer_norm_backward_long", _backward_long_kernel, (m,), arguments, constants | _LONG_BLOCK, 8)]
        if need_weight or need_bias:
            grid = (triton.cdiv(n, _COLUMNS_BLOCK["BLOCK_N"]), parts)
            arguments = (grad_output, input, mean, rstd, shift, *partials, *strides)
            plan.append(Launch("layer_norm_columns", _columns_kernel, grid, arguments, constants | _COLUMNS_BLOCK, 8))
    grads = [input.new_empty((0 if partial is None else n,), dtype=acc) for partial in partials]
    for grad, partial in zip(grads, partials, strict=True):
        if partial is not None:
            grid = (triton.cdiv(n, _REDUCE_BLOCK["BLOCK_N"]),)
            plan.append(Launch("layer_norm_reduce", _reduce_kernel, grid, (partial, grad, parts, n), _REDUCE_BLOCK, 4))
    return (grad_input, *grads), plan


def layer_norm_fwd(input, weight, bias, eps):
    """The launcher behind `seqkern::layer_norm_fwd`: (output, mean, rstd)."""
    weight, bias = (None if vector is None else unit_last(vector) for vector in (weight, bias))
    results, plan = _plan_forward(unit_last(input), weight, bias, eps)
    run(plan, input.device)
    return results


def layer_norm_bwd(grad_output, input, mean, rstd, weight, need_weight, need_bias):
    """The launcher behind `seqkern::layer_norm_bwd`: (grad_input, grad_weight, grad_bias), (0,) where not needed."""
    programs = 2 * multiprocessors(input.device)
    weight = None if weight is None else unit_last(weight)
    tensors = (unit_last(grad_output), unit_last(input), mean.contiguous(), rstd.contiguous(), weight)
    results, plan = _plan_backward(*tensors, need_weight, need_bias, programs)
    run(plan, input.device)
    return results


def aot_configurations(limit, thorough):
    """The launches to compile ahead of time, as (name, launch); they do not depend on shared memory (`limit`).

    thorough False: the common row lengths. True: every path, aligned and not, with and without weight and bias.
    """
    floats = (torch.bfloat16, torch.float32)
    cases = [(dtype, n, True) for dtype in floats for n in (1024, 4096, 8192, 16384)]
    if thorough:
        lengths = [n - less for n in (16, 64, 1024, 2048, 4096, 8192, 16384) for less in (0, 3)]
        dtypes = (*floats, torch.float16, torch.float64)
        cases = [(dtype, n, affine) for dtype in dtypes for n in lengths for affine in (True, False)]
    for dtype, n, affine in cases:
        input = torch.empty((4096, n), dtype=dtype, device="meta")
        weight = input.new_empty((n,)) if affine else None
        (_, mean, rstd), forward = _plan_forward(input, weight, weight, 1e-5)
        _, backward = _plan_backward(input, input, mean, rstd, weight, affine, affine, 264)
        for launch in (forward + backward)[: None if not affine else -1]:  # both reductions are the same launch
            yield f"{launch.name}-{str(dtype).removeprefix('torch.')}-N{n}{'' if affine else '-plain'}", launch
