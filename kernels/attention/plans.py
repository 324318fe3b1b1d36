"""Tiles and arguments of the attention kernels, chosen before a launch from shapes, dtypes and options alone."""

from typing import NamedTuple

import torch

from ..._limits import MOST_HEAD_DIM
from .._common import TRITON_DTYPE, Launch, accumulator, cdiv, dropout_scalars, power_of_two, unit_last
from .blocks import NATURAL, RAW, SCALED

# Integers that must not be compiled in: new lengths compile nothing. In tuples (strides, and a mask's sizes) Triton
# still specialises two things: a 1 is a constant, and a multiple of 16 is known to be one. So a kernel is compiled
# again when a stride becomes 1, or becomes or stops being a multiple of 16.
SIZES = [
    "diagonal", "low", "high", "lower_right", "threshold", "S", "H", "Hk", "Nq", "Nk", "D", "DV", "max_queries",
    "max_keys", "mask_row", "mask_strides", "grad_mask_sizes", "g_strides", "q_strides", "k_strides", "v_strides",
    "o_strides", "queries", "chunks", "limit_strides",
]  # fmt: skip
_FAR = 2**30  # a limit this far from the diagonal hides nothing; its sums with positions fit 32 bits


class Problem(NamedTuple):
    """What all kernels of one call share, as they take it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None  # bool as uint8; columns contiguous, or a single one
    query_starts: torch.Tensor | None
    key_starts: torch.Tensor | None
    key_lengths: torch.Tensor | None
    slopes: torch.Tensor | None
    seed: torch.Tensor | None
    max_queries: int
    max_keys: int
    diagonal: int
    low: int | None
    high: int | None
    lower_right: bool
    scale: float
    softcap: float
    dropout_p: float
    limit: int  # bytes of shared memory

    @property
    def sequences(self) -> int:
        return self.query.size(0) if self.query_starts is None else self.query_starts.numel() - 1

    @property
    def memory(self) -> int:
        """KB of shared memory that tells the GPUs apart: 99 (sm_120), 163 (sm_80) or 227 (sm_90 and sm_100)."""
        return 99 if self.limit < 163 * 1024 else 163 if self.limit < 227 * 1024 else 227

    @property
    def visits_every_key(self) -> bool:
        """Whether a tile of queries visits every column of the mask, apart from the band."""
        return self.query_starts is None and self.key_lengths is None

    @property
    def scores(self) -> int:
        if self.mask is not None and self.mask.is_floating_point():
            return NATURAL.value
        return SCALED.value if self.softcap or self.slopes is not None else RAW.value


def usable(query, key, value, mask, slopes, scale, softcap):
    """(query, key, value, mask, scale, sign) as the kernels read them; the query is multiplied by `sign`."""
    if not (1 <= query.size(-1) <= MOST_HEAD_DIM and 1 <= value.size(-1) <= MOST_HEAD_DIM):
        raise NotImplementedError(
            f"seqkern attention: the Triton kernels take head dimensions of 1 to {MOST_HEAD_DIM}, got query "
            f'{tuple(query.shape)} and value {tuple(value.shape)}; use_backend("reference") runs any'
        )
    sign = None
    if scale <= 0 and not softcap and slopes is None and (mask is None or not mask.is_floating_point()):
        # The maximum is taken before the scale, which must therefore be positive: the query takes its sign.
        sign = -1.0 if scale < 0 else 0.0
        query, scale = query * sign, -float(scale) or 1.0
    mask = None if mask is None else _mask(mask, query.dtype)
    return unit_last(query), unit_last(key), unit_last(value), mask, scale, sign


def prepare(
    query, key, value, mask, query_starts, key_starts, key_lengths, slopes, seed, max_queries, max_keys, diagonal,
    lower_right, left, right, scale, softcap, dropout_p, limit,
):  # fmt: skip
    """The problem; tensors and scale come from `usable`."""

    def within(position):
        return min(max(position, -_FAR), _FAR)

    return Problem(
        query, key, value, mask, query_starts, key_starts, key_lengths, slopes, seed, max_queries, max_keys,
        within(diagonal), None if left < 0 else within(diagonal - left),
        None if right < 0 else within(diagonal + right), lower_right, float(scale), float(softcap), dropout_p, limit,
    )  # fmt: skip


def _mask(mask, dtype):
    mask = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    if dtype == torch.float64:
        # Triton lays out the operands of a product by the smallest element loaded for them: bytes fail with fp64, and
        # with float32 and dropout on sm_80 and sm_90.
        added = mask.dtype != torch.bool
        mask = mask.to(dtype) if added else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    elif mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    mask = unit_last(mask)
    return mask if mask.stride(-2) < 2**24 else mask.contiguous()  # offsets within a tile fit 32 bits


def result(memory, problem, shape):
    """Memory for a result with a head dimension. Packed sequences are (T, H, D), without a batch dimension."""
    if problem.query_starts is None:
        return memory.empty(problem.query, shape)
    _, heads, rows, columns = shape
    shape = (rows, heads, columns)
    empty = _launches_nothing(problem)
    packed = memory.full(problem.query, shape, 0.0) if empty else memory.empty(problem.query, shape)
    return memory.view(packed, _unpacked)


def _unpacked(tensor):
    return tensor.transpose(0, 1).unsqueeze(0)


def statistics(memory, problem, shape, unseen):
    """Memory for one number a row, and the value for rows of no sequence where no kernel writes it."""
    acc = accumulator(problem.query.dtype)
    if problem.query_starts is not None and _launches_nothing(problem):
        return memory.full(problem.query, shape, unseen, acc)
    return memory.empty(problem.query, shape, acc)


def _launches_nothing(problem):
    return 0 in (problem.sequences, problem.max_queries, problem.max_keys)


# (BLOCK_Q, BLOCK_K, num_warps, num_stages) for head dimensions up to 64, 128 and 256: the largest tiles found that
# compile without spills for causal and full attention, exact and padded head dimensions. Warps split the queries (in
# the last kernel the keys), at least 16 rows each; with fewer rows two warps do the same work. Options halve the blocks
# that a kernel walks: see `_tile`.
_TILES = {
    # 16 bits, 227 KB of shared memory (sm_90, sm_100): wgmma reads operands from shared memory, so tiles are large
    "wgmma": {
        "forward": ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2)),
        "grad_query": ((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2)),
        "grad_key_value": ((64, 128, 8, 2), (32, 128, 8, 2), (32, 32, 8, 2)),
    },
    # 16 bits, 163 KB and 99 KB (sm_80, sm_120), using at most 99 KB: operands pass through registers
    "mma": {
        "forward": ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        "grad_query": ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
        "grad_key_value": ((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
    },
    # 16 bits, a stride or head dimension that is no multiple of 8: elements are loaded one by one
    "unaligned": {
        "forward": ((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        "grad_query": ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
        "grad_key_value": ((32, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    },
    "float32": {
        "forward": ((64, 64, 8, 1), (64, 32, 4, 1), (64, 32, 8, 1)),
        "grad_query": ((64, 32, 4, 1), (64, 32, 4, 1), (64, 64, 8, 1)),
        "grad_key_value": ((64, 64, 8, 1), (64, 64, 8, 1), (32, 32, 8, 1)),
    },
    "float32 unaligned": {
        "forward": ((64, 64, 8, 1), (64, 32, 8, 1), (64, 32, 8, 1)),
        "grad_query": ((32, 32, 8, 1), (16, 16, 4, 1), (32, 16, 4, 1)),
        "grad_key_value": ((32, 64, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    },
    "float64": {
        "forward": ((32, 16, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
        "grad_query": ((32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        "grad_key_value": ((16, 8, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    },
}


# The same for decode, BLOCK_Q at most: shared memory must hold two stages of keys and values; few rows in registers.
_DECODE_TILES = {
    "wgmma": ((64, 64, 4, 3), (64, 64, 4, 2), (32, 32, 8, 2)),
    "mma": ((64, 64, 4, 2), (64, 64, 4, 2), (32, 32, 8, 2)),
    "unaligned": ((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 8, 1)),
    "float32": ((16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
    "float32 unaligned": ((16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
    "float64": ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}


# Exceptions, where halving does not fit the options of a level, or an option that comes alone.
_EXCEPTIONS = {
    ("wgmma", "forward", 1, 1): (128, 32, 8, 2),
    ("wgmma", "forward", 2, "window"): (128, 32, 8, 2),
    ("wgmma", "forward", 2, 1): (64, 32, 8, 2),
    ("wgmma", "forward", 2, 2): (64, 16, 8, 2),
    ("wgmma", "forward", 2, "softcap"): (128, 32, 8, 2),
    ("wgmma", "grad_query", 2, 2): (32, 16, 8, 1),
    ("wgmma", "grad_key_value", 0, "softcap"): (32, 128, 8, 2),  # 40 bytes in blocks of 64 on sm_90
    ("wgmma", "grad_key_value", 1, 2): (16, 64, 8, 2),
    ("mma", "grad_query", 0, "alibi"): (128, 16, 8, 2),
    ("mma", "grad_query", 1, 2): (128, 16, 8, 1),  # 8 bytes with two stages on sm_80
    ("mma", "grad_query", 2, 2): (32, 16, 8, 1),
    ("mma", "grad_key_value", 0, 2): (16, 64, 8, 1),
    ("mma", "grad_key_value", 1, 2): (16, 64, 8, 1),
    ("float32", "grad_query", 1, 2): (32, 16, 4, 1),
    ("float32", "grad_key_value", 1, 1): (32, 32, 8, 1),
    ("float64", "grad_query", 1, 1): (16, 16, 4, 1),
    # sm_120, recognised by its shared memory. At D 64 it spills with two stages, dK and dV at any block size; with one
    # stage it does not. From D 128 on, and in float64, these are the largest tiles found that do not spill.
    ("mma, 99 KB", "forward", 1, "window"): (128, 32, 8, 3),
    ("mma, 99 KB", "grad_query", 0, "mask"): (128, 16, 8, 2),
    ("mma, 99 KB", "grad_query", 1, "lengths"): (128, 32, 8, 1),
    ("mma, 99 KB", "grad_query", 1, "bool mask"): (128, 32, 8, 1),
    ("mma, 99 KB", "grad_query", 1, "alibi"): (128, 32, 8, 1),
    ("mma, 99 KB", "grad_query", 1, "softcap"): (128, 32, 8, 1),
    ("mma, 99 KB", "grad_query", 1, "dropout"): (128, 16, 8, 1),
    ("mma, 99 KB", "grad_query", 1, 2): (128, 16, 8, 1),
    ("mma, 99 KB", "grad_query", 2, "mask"): (64, 16, 8, 2),
    ("mma, 99 KB", "grad_query", 2, "dropout"): (64, 16, 8, 2),
    ("mma, 99 KB", "grad_query", 2, 2): (16, 32, 8, 1),
    ("mma, 99 KB", "grad_key_value", 0, "mask"): (16, 128, 8, 1),
    ("mma, 99 KB", "grad_key_value", 0, "alibi"): (32, 128, 8, 1),
    ("mma, 99 KB", "grad_key_value", 0, "softcap"): (32, 128, 8, 1),
    ("mma, 99 KB", "grad_key_value", 2, 2): (32, 32, 8, 1),
    ("unaligned, 99 KB", "grad_query", 2, "mask"): (16, 32, 8, 1),
    ("unaligned, 99 KB", "grad_query", 2, 2): (16, 32, 8, 1),
    ("unaligned, 99 KB", "grad_key_value", 2, "mask"): (32, 16, 8, 1),
    ("float32 unaligned, 99 KB", "grad_query", 2, 2): (32, 16, 8, 1),
    ("float64, 99 KB", "forward", 1, "mask"): (32, 32, 4, 1),
    ("float64, 99 KB", "forward", 1, 2): (16, 16, 4, 1),
    ("float64, 99 KB", "grad_query", 1, 2): (32, 16, 8, 1),
    ("float64, 99 KB", "grad_key_value", 1, "mask"): (16, 16, 8, 1),
    # sm_80
    ("float32, 163 KB", "grad_query", 2, 0): (64, 32, 8, 1),
    ("float32, 163 KB", "grad_query", 2, "window"): (64, 32, 8, 1),
    ("float32 unaligned, 163 KB", "grad_query", 2, 2): (16, 16, 4, 1),
    ("float32 unaligned, 163 KB", "grad_key_value", 0, 2): (16, 32, 8, 1),
    ("float32 unaligned, 163 KB", "grad_key_value", 2, "mask"): (16, 16, 8, 1),
    ("float64, 163 KB", "forward", 1, "softcap"): (32, 16, 4, 1),
    ("float64, 163 KB", "grad_query", 1, 2): (16, 16, 4, 1),
    ("float64, 163 KB", "grad_key_value", 1, 2): (16, 16, 8, 1),
    # sm_90 and sm_100
    ("unaligned, 227 KB", "grad_query", 2, 2): (16, 16, 8, 1),
    ("float32 unaligned, 227 KB", "grad_query", 2, "mask"): (16, 16, 4, 1),
    ("float32 unaligned, 227 KB", "grad_query", 2, 2): (16, 16, 4, 1),
    ("float32 unaligned, 227 KB", "grad_key_value", 2, "mask"): (16, 16, 8, 1),
    ("float64, 227 KB", "forward", 1, "softcap"): (32, 16, 4, 1),
    ("float64, 227 KB", "forward", 1, "mask"): (16, 16, 4, 1),
    ("float64, 227 KB", "forward", 1, 2): (16, 16, 4, 1),
    ("float64, 227 KB", "grad_query", 0, 2): (16, 16, 4, 1),
    ("float64, 227 KB", "grad_query", 1, 2): (16, 16, 8, 1),
    ("float64, 227 KB", "grad_query", 2, 2): (16, 16, 8, 1),  # 20 bytes on sm_90, 144 in four warps
    ("float64, 227 KB", "grad_key_value", 1, "mask"): (16, 16, 8, 1),
    ("float64, 227 KB", "grad_key_value", 1, 2): (16, 16, 8, 1),
}


def _pieces(problem):
    """Registers that the options keep beside the scores, in halves of a tile."""
    pieces = 2 * (problem.mask is not None) + 2 * (problem.dropout_p > 0)
    return pieces + (problem.softcap > 0) + (problem.slopes is not None)


def _names(problem, level):
    """Keys of `_EXCEPTIONS` for a problem's options: the single one that comes alone, then the shape or the level."""
    options = (problem.mask is not None, problem.slopes is not None, problem.softcap > 0, problem.dropout_p > 0)
    names = [name for name, there in zip(("mask", "alibi", "softcap", "dropout"), options, strict=True) if there]
    names = names if len(names) == 1 else []
    if names == ["mask"] and problem.mask.dtype == torch.uint8:
        names.insert(0, "bool mask")
    shape = "window" if problem.low is not None else "lengths" if problem.key_lengths is not None else level
    return [*names, shape if level == 0 else level]


def _tile(kernel, problem, head_dim, aligned):
    """A kernel's row of the table: by head dimension, bytes an element, alignment, options, shared memory."""
    size = problem.query.element_size()
    if size == 8:
        kind = "float64"
    elif size == 4:
        kind = "float32" if aligned else "float32 unaligned"
    else:
        kind = "unaligned" if not aligned else "wgmma" if problem.memory == 227 else "mma"
    if kernel == "grad_mask":  # reads its tiles in slices, whatever the head dimension
        return (32, 32, 4, 1) if size == 8 else (64, 64, 8, 1) if kind == "wgmma" else (64, 32, 8, 1)
    if kernel == "decode":
        return _DECODE_TILES[kind][0 if head_dim <= 64 else 1 if head_dim <= 128 else 2]
    column = 0 if head_dim <= 64 else 1 if head_dim <= 128 else 2
    pieces = _pieces(problem)
    if kernel == "grad_query" and problem.slopes is not None:  # sums distances
        pieces += 1
    level = min(2, max(0, pieces - 1))
    for key in (f"{kind}, {problem.memory} KB", kind):
        for option in _names(problem, level):
            if (key, kernel, column, option) in _EXCEPTIONS:
                return _EXCEPTIONS[key, kernel, column, option]
    block_q, block_k, warps, stages = _TILES[kind][kernel][column]
    if kernel == "grad_key_value":
        block_q = max(min(16, block_q), block_q >> level)
    else:
        block_k = max(min(16, block_k), block_k >> level)
    return block_q, block_k, warps, stages


def _layout(kernel, strided, problem):
    """(name, strides, whether all rows are aligned, tile) of a kernel."""
    name = kernel.__name__.strip("_").removesuffix("_kernel")
    strides = tuple(tensor.stride()[:3] for tensor in strided)
    d, dv = problem.query.size(-1), problem.value.size(-1)
    aligned = all(n % 8 == 0 for n in (d, dv, *sum(strides, ())))
    return name, strides, aligned, _tile(name, problem, max(d, dv), aligned)


def tile_rows(kernel, strided, problem):
    """How many queries, and keys, a tile of a kernel has."""
    return _layout(kernel, strided, problem)[-1][:2]


def mask_layout(mask):
    """(strides of sequences and heads, of rows or None, MASK_COLUMNS): see `biased`."""
    by_sequence, by_head, by_row, by_column = (
        0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)
    )
    columns = 0
    if by_column:
        columns = 8 if all(n % 8 == 0 for n in (by_sequence, by_head, by_row)) else 1
    return (by_sequence, by_head), by_row or None, columns


def plan(kernel, pointers, strided, problem, *more):
    """One launch. Its arguments are `pointers`, the strides of `strided` and `more`, then what all kernels share."""
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    (_, h, nq, d), (hk, nk), dv = query.shape, key.shape[1:3], value.size(-1)
    name, strides, aligned, (block_q, block_k, warps, stages) = _layout(kernel, strided, problem)
    if name == "decode":
        block_q = min(block_q, max(16, power_of_two(nq)))
    width = 32 if query.element_size() > 2 else 256  # width of the slices in which `tile_scores` reads a tile
    if name == "grad_mask" and width > 64:
        width = 64 if aligned else 32  # loads one by one: of 64 columns they spill on every GPU
    tf32 = query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    mask_strides, mask_row, mask_columns = ((0, 0), None, 0) if mask is None else mask_layout(mask)
    constants = {
        "SCORES": problem.scores,
        "SOFTCAP": problem.softcap > 0,
        "MASK_COLUMNS": mask_columns,
        "ACC": TRITON_DTYPE[accumulator(query.dtype)],
        "PRECISION": "tf32" if tf32 else "ieee",
        "ALIGNED": aligned,
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "BLOCK_D": max(16, power_of_two(d)),
        "BLOCK_DV": max(16, power_of_two(dv)),
        "SLICE": width,
    }
    query_blocks, key_blocks = cdiv(problem.max_queries, block_q), cdiv(problem.max_keys, block_k)
    if name == "decode":
        programs = problem.sequences * hk * cdiv(nq, block_q) * more[1]
    elif name == "grad_mask":
        ((mask_sequences, mask_heads),) = more
        programs = mask_sequences * mask_heads * query_blocks * key_blocks
    elif name == "grad_key_value":
        programs = problem.sequences * hk * key_blocks
    else:
        programs = problem.sequences * h * query_blocks
    keep_scale, threshold = dropout_scalars(problem.dropout_p)
    arguments = (
        *pointers, *strides, *more, mask, problem.query_starts, problem.key_starts, problem.key_lengths, problem.slopes,
        problem.seed, mask_strides, mask_row, problem.scale, problem.softcap or 1.0, keep_scale, threshold,
        problem.diagonal, problem.low, problem.high, int(problem.lower_right), problem.sequences,
        h, hk, nq, nk, d, dv, problem.max_queries, problem.max_keys,
    )  # fmt: skip
    # Otherwise ptxas would fit several programs, and spill: with options, and of gradients and float32 without any.
    shaped = any(option is not None for option in (problem.low, problem.query_starts, problem.key_lengths))
    if query.dtype == torch.float32:
        full = name == ("grad_key_value" if aligned else "forward")
    else:
        full = name in ("grad_query", "grad_key_value") and (query.dtype == torch.float64 or not aligned)
    registers = 255 if shaped or full or _pieces(problem) else None
    return Launch(f"attention_{name}", kernel, (programs,), arguments, constants, warps, stages, registers)
