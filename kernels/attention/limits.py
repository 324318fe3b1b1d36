"""Which keys a mask lets a tile of queries see, and which queries a tile of keys: the first and the last of them.

Masks come as matrices that are mostly causal, windowed or padded. A kernel of its own reads the mask once before the
call, and the tiles then walk what lies between their limits, as for a band. What is hidden within them is visited.

Only masks that sequences or heads share are looked at, and boolean ones: to read a bias of every head a second time
takes longer than it saves.
"""

import torch
import triton
import triton.language as tl

from .._common import Launch, cdiv
from .blocks import head_mask
from .plans import SIZES, mask_layout

FEW = 32  # queries, or keys, that are not worth a launch
NONE = (None, (0, 0))  # limits_ptr and limit_strides of a call without

# fmt: off

@triton.jit(do_not_specialize=SIZES)
def _mask_limits_kernel(
    mask_ptr, limits_ptr, mask_strides, mask_row, H, max_queries, max_keys,
    QUERIES: tl.constexpr, NUMBERS: tl.constexpr, MASK_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):
    """A program: the limits of a tile of queries (QUERIES) or keys, of one mask."""
    size = max_queries if QUERIES else max_keys
    others = max_keys if QUERIES else max_queries
    tiles = tl.cdiv(size, BLOCK)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    mask_ptr = head_mask(mask_ptr, mask_strides, head // H, head % H, MASK_COLUMNS)
    own = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, STEP)
    lowest = tl.full([STEP], 2147483647, tl.int32)
    highest = tl.full([STEP], 0, tl.int32)
    for first in range(0, others, STEP):
        other = first + step
        inside = (own < size)[:, None] & (other < others)[None, :]
        at = mask_ptr
        query = own[:, None] if QUERIES else other[None, :]
        key = other[None, :] if QUERIES else own[:, None]
        at += tl.zeros([BLOCK, STEP], tl.int64)
        if mask_row is not None:
            at += query.to(tl.int64) * mask_row
        if MASK_COLUMNS:
            at += key
        mask = tl.load(at, mask=inside, other=0)
        seen = mask != float("-inf") if NUMBERS else mask != 0
        some = tl.max((seen & inside).to(tl.int32), 0) > 0
        lowest = tl.where(some, tl.minimum(lowest, other), lowest)
        highest = tl.where(some, other + 1, highest)
    at = limits_ptr + tl.program_id(0).to(tl.int64) * 2
    tl.store(at, tl.min(lowest, 0))
    tl.store(at + 1, tl.max(highest, 0))


@triton.jit
def narrowed(limits_ptr, strides, s, h, heads, tile, first, full, edge, last, BLOCK: tl.constexpr):
    """The range of `key_range` or `query_range` within the limits of tile `tile` of heads h ... h + heads - 1."""
    lowest = 2147483647
    highest = 0
    for head in range(heads):
        at = limits_ptr + s * strides[0] + (h + head) * strides[1] + tile * 2
        lowest = tl.minimum(lowest, tl.load(at))
        highest = tl.maximum(highest, tl.load(at + 1))
    start = tl.minimum(lowest, highest) // BLOCK * BLOCK
    first = tl.maximum(first, start)
    full = tl.maximum(full, start)
    last = tl.minimum(last, highest)
    edge = tl.maximum(full, tl.minimum(edge, tl.cdiv(highest, BLOCK) * BLOCK))
    return first, full, edge, last

# fmt: on


def looked_at(problem):
    """Whether a call's mask is."""
    mask = problem.mask
    if mask is None or min(problem.max_queries, problem.max_keys) <= FEW:
        return False
    scores = problem.sequences * problem.query.size(1) * problem.max_queries * problem.max_keys
    return mask.dtype == torch.uint8 or mask.numel() * 4 <= scores


def limits(memory, problem, block, queries):
    """(limits_ptr, limit_strides) for tiles of `block` queries, or keys, and the launch that finds them, in a list."""
    mask = problem.mask
    if not looked_at(problem):
        return NONE, []
    (sequences, heads), tiles = mask.shape[:2], cdiv(problem.max_queries if queries else problem.max_keys, block)
    table = memory.empty(mask, (sequences, heads, tiles, 2), torch.int32)
    strides = (heads * tiles * 2 if sequences > 1 else 0, tiles * 2 if heads > 1 else 0)
    mask_strides, mask_row, mask_columns = mask_layout(mask)
    constants = {
        "QUERIES": queries,
        "NUMBERS": mask.dtype != torch.uint8,
        "MASK_COLUMNS": mask_columns,
        "BLOCK": block,
        "STEP": max(16, 4096 // block),
    }
    arguments = (mask, table, mask_strides, mask_row, heads, problem.max_queries, problem.max_keys)
    step = Launch("attention_mask_limits", _mask_limits_kernel, (sequences * heads * tiles,), arguments, constants)
    return (table, strides), [step]
