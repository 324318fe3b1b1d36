"""Rotary position embeddings in Triton: a' = a cos - b sin, b' = b cos + a sin for pairs (a, b) of features.

Equations, pairs and tables as in csrc/rope. A program turns one head of a tile of tokens, read once and written once,
which sets the time; neighbours are read and written with a stride of two, both halves of a line by the same threads.
Angles are float64, as many as the table has numbers: the tables of a call are smaller than its tensors by the heads.

No GPU speed has been measured yet.
"""

import torch
import triton
import triton.language as tl

from ._common import TRITON_DTYPE, Launch, accumulator, cdiv, power_of_two, rounded, unit_last, wide
from ._replay import Memory, noted, planned

__all__ = ["aot_configurations", "rope", "rope_tables"]

TILE = 1024  # pairs of a program
SIZES = ["tokens", "heads", "half", "dim", "in_strides", "out_strides", "table_batch", "rows", "columns"]


@triton.jit(do_not_specialize=SIZES)
def _rope_kernel(
    input_ptr, cos_ptr, sin_ptr, output_ptr, tokens, heads, half, dim, in_strides, out_strides, table_batch,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens of a head. Strides are those of batch, head and token; BLOCK_R: the features that are copied."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(tokens, BLOCK_T)
    token = (program % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    head = (program // blocks) % heads
    batch = program // blocks // heads
    source = input_ptr + batch * wide(in_strides[0]) + head * wide(in_strides[1]) + token * wide(in_strides[2])
    target = output_ptr + batch * wide(out_strides[0]) + head * wide(out_strides[1]) + token * wide(out_strides[2])
    pair = tl.arange(0, BLOCK_P)[None, :]
    live = (token < tokens) & (pair < half)
    if INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + half
    a = tl.load(source + first, mask=live, other=0.0).to(ACC)
    b = tl.load(source + second, mask=live, other=0.0).to(ACC)
    if WIDE:
        row = batch * wide(table_batch) + token * (2 * half)
        cos_a = tl.load(cos_ptr + row + first, mask=live, other=0.0)
        cos_b = tl.load(cos_ptr + row + second, mask=live, other=0.0)
        sin_a = tl.load(sin_ptr + row + first, mask=live, other=0.0)
        sin_b = tl.load(sin_ptr + row + second, mask=live, other=0.0)
    else:
        row = batch * wide(table_batch) + token * half
        cos_a = tl.load(cos_ptr + row + pair, mask=live, other=0.0)
        sin_a = tl.load(sin_ptr + row + pair, mask=live, other=0.0)
        cos_b = cos_a
        sin_b = sin_a
    if INVERSE:
        kept = -sin_a
        sin_a = -sin_b
        sin_b = kept
    tl.store(target + first, rounded(a * cos_a - b * sin_a, output_ptr.dtype.element_ty), mask=live)
    tl.store(target + second, rounded(b * cos_b + a * sin_b, output_ptr.dtype.element_ty), mask=live)
    if BLOCK_R > 0:
        column = 2 * half + tl.arange(0, BLOCK_R)[None, :]
        rest = (token < tokens) & (column < dim)
        tl.store(target + column, tl.load(source + column, mask=rest, other=0.0), mask=rest)


@triton.jit
def _cos_sin(angle):
    """Of float64 angles, as csrc/rope/cpu/kernels.cpp has them; the library's own calls a slow path for large ones."""
    k = tl.floor(angle * 0.63661977236758134308 + 0.5)
    r = angle - k * 1.57079632673412561417  # pi / 2 in three parts
    r = r - k * 6.07710050630396597660e-11
    r = r - k * 2.02226624879595063154e-21
    z = r * r
    s = 2.8114572543455207632e-15 * z - 7.6471637318198164759e-13  # 1 / 17!, -1 / 15!, ...
    s = s * z + 1.6059043836821614599e-10
    s = s * z - 2.5052108385441718775e-8
    s = s * z + 2.7557319223985890653e-6
    s = s * z - 1.9841269841269841270e-4
    s = s * z + 8.3333333333333333333e-3
    s = s * z - 0.16666666666666666667
    s = r + r * (z * s)
    c = 4.7794773323873852974e-14 * z - 1.1470745597729724714e-11  # 1 / 16!, -1 / 14!, ...
    c = c * z + 2.0876756987868098979e-9
    c = c * z - 2.7557319223985890653e-7
    c = c * z + 2.4801587301587301587e-5
    c = c * z - 1.3888888888888888889e-3
    c = c * z + 4.1666666666666666667e-2
    c = c * z - 0.5
    c = c * z + 1.0
    quarter = k - 4.0 * tl.floor(k * 0.25)
    swap = (quarter == 1.0) | (quarter == 3.0)
    sine = tl.where(swap, c, s)
    cosine = tl.where(swap, s, c)
    cosine = tl.where((quarter == 1.0) | (quarter == 2.0), -cosine, cosine)
    return cosine, tl.where(quarter >= 2.0, -sine, sine)


@triton.jit(do_not_specialize=SIZES)
def _tables_kernel(
    position_ptr, frequency_ptr, cos_ptr, sin_ptr, rows, columns, scaling: tl.float64, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_P)
    position = tl.load(position_ptr + row, mask=row < rows, other=0).to(tl.float64)
    frequency = tl.load(frequency_ptr + column, mask=column < columns, other=0.0)
    angle = position[:, None] * frequency[None, :]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    cos, sin = _cos_sin(angle)
    tl.store(cos_ptr + at, (cos * scaling).to(cos_ptr.dtype.element_ty), mask=live)
    tl.store(sin_ptr + at, (sin * scaling).to(sin_ptr.dtype.element_ty), mask=live)


def rope(query, key, cos, sin, sequence_dim, rotary_dim, interleaved, inverse):
    """The launcher behind `seqkern::rope`: (query, key), turned and contiguous; key (0,) if there is none."""
    tensors = (unit_last(query), None if key is None else unit_last(key), cos.contiguous(), sin.contiguous())
    options = (sequence_dim, rotary_dim, bool(interleaved), bool(inverse))
    return planned(_plan_rope, tensors, options, query.device)


def rope_tables(positions, inv_freq, scaling, wide):
    """The launcher behind `seqkern::rope_tables`: (cos, sin), (*positions.shape, columns)."""
    return planned(
        _plan_tables, (positions.contiguous(), inv_freq.contiguous()), (scaling, bool(wide)), positions.device
    )


def _plan_rope(memory, query, key, cos, sin, sequence_dim, rotary_dim, interleaved, inverse):
    results, launches = [], []
    for name, t in (("query", query), ("key", key)):
        out = memory.empty(query, (0,) if t is None else t.shape)
        results.append(out)
        if t is not None and t.numel():
            options = (sequence_dim, rotary_dim, interleaved, inverse)
            launches.append(_step(f"rope_{name}", t, out, cos, sin, *options))
    return tuple(results), launches


def _step(name, t, out, cos, sin, sequence_dim, rotary_dim, interleaved, inverse):
    batch, tokens, heads, dim = t.size(0), t.size(sequence_dim), t.size(3 - sequence_dim), t.size(3)
    block_p = max(1, power_of_two(rotary_dim // 2))
    block_t = max(1, min(power_of_two(tokens), TILE // block_p))
    constants = {
        "INTERLEAVED": interleaved, "INVERSE": inverse, "WIDE": rotary_dim > 0 and cos.size(2) == rotary_dim,
        "ACC": TRITON_DTYPE[accumulator(t.dtype)], "BLOCK_T": block_t, "BLOCK_P": block_p,
        "BLOCK_R": power_of_two(dim - rotary_dim) if rotary_dim < dim else 0,
    }  # fmt: skip
    strides = [tuple(x.stride(d) for d in (0, 3 - sequence_dim, sequence_dim)) for x in (t, out)]
    table_batch = cos.stride(0) if cos.size(0) > 1 else 0
    arguments = (t, cos, sin, out, tokens, heads, rotary_dim // 2, dim, *strides, table_batch)
    return Launch(name, _rope_kernel, (cdiv(tokens, block_t) * heads * batch,), arguments, constants)


def _plan_tables(memory, positions, inv_freq, scaling, wide):
    rows, columns = positions.numel(), inv_freq.size(0)
    dtype = torch.float64 if wide else torch.float32
    results = tuple(memory.empty(positions, (*positions.shape, columns), dtype) for _ in range(2))
    block_p = power_of_two(columns)
    block_t = max(1, min(power_of_two(rows), TILE // block_p))
    arguments = (positions, inv_freq, *results, rows, columns, scaling)
    constants = {"BLOCK_T": block_t, "BLOCK_P": block_p}
    grid = (cdiv(rows, block_t) if columns else 0,)
    return results, [Launch("rope_tables", _tables_kernel, grid, arguments, constants)]


def explained(op, query, key=None, *_):
    """The launches of a call with all features turned; nothing is launched."""
    query, key = (t if t is None or t.dim() == 4 else t.reshape(1, 1, -1, t.size(-1)) for t in (query, key))
    even = query.size(3) // 2 * 2
    tables = torch.empty((1, query.size(2), even // 2), dtype=accumulator(query.dtype), device="meta")
    with noted() as launches:
        rope(query, key, tables, tables, 2, even, False, False)
    return launches


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use no shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    kinds = [(False, False), (True, True)] if not thorough else [(i, w) for i in (False, True) for w in (False, True)]
    for dtype in dtypes:
        for interleaved, full in kinds:
            for dim, rotary in [(128, 128), (80, 32)] if thorough else [(128, 128)]:
                x = torch.empty((2, 8, 512, dim), dtype=dtype, device="meta")
                width = rotary if full else rotary // 2
                tables = torch.empty((1, 512, width), dtype=accumulator(dtype), device="meta")
                plan = _plan_rope(Memory(), x, None, tables, tables, 2, rotary, interleaved, full)
                about = f"{str(dtype).removeprefix('torch.')}-{dim}-{rotary}"
                for launch in plan[1]:
                    yield f"{launch.name}-{about}{'-neighbours' * interleaved}{'-wide-inverse' * full}", launch
    positions = torch.empty((1, 512), dtype=torch.int64, device="meta")
    frequencies = torch.empty(64, dtype=torch.float64, device="meta")
    for wide_ in (False, True) if thorough else (False,):
        _, (launch,) = _plan_tables(Memory(), positions, frequencies, 1.0, wide_)
        yield f"rope_tables-{'float64' if wide_ else 'float32'}", launch
