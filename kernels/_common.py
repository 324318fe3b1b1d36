"""What the Triton kernels share: the launch plan, device limits, and common arithmetic.

A launcher builds a plan, a list of `Launch`, and runs it. The ahead-of-time gate builds the same plans from meta
tensors and compiles them. So tiles, warps and specialisations are chosen in one place, and what is checked is what
ships.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._tensors import accumulator as accumulator
from .._tensors import unit_last as unit_last

# The interpreter multiplies bf16 tiles as if their bits were integers. Only there, `dot` upcasts first.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

TRITON_DTYPE = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class Launch(NamedTuple):
    """One kernel launch: `kernel[grid](*arguments, **constants)`, and a name for reports."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # in the order of the kernel's parameters
    constants: dict[str, Any]  # its constexpr parameters
    num_warps: int = 4
    num_stages: int = 1
    registers: int | None = None  # a thread's limit. None leaves it to ptxas, which may spill to fit more programs

    def __str__(self) -> str:
        blocks = [f"{name} {value}" for name, value in self.constants.items() if name.startswith("BLOCK_")]
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        return f"{self.name}: {math.prod(self.grid)} programs of {', '.join(blocks)}, {self.num_warps} warps{stages}"


# triton.cdiv and triton.next_power_of_2 can also be called in kernels, so from the host they take 4 us each
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest one that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def options_of(step: Launch) -> dict[str, Any]:
    """Triton's options of a launch, beside its arguments and constants."""
    options = {"num_warps": step.num_warps, "num_stages": step.num_stages, "enable_fp_fusion": True}
    if step.registers is not None and torch.version.hip is None:
        options["maxnreg"] = step.registers
    return options


def launch(step: Launch) -> Any:
    """Launches on the current stream of the current device, unless the grid is empty. Returns what was compiled."""
    if 0 in step.grid:
        return None
    return step.kernel[step.grid](*step.arguments, **step.constants, **options_of(step))


def on(device: torch.device) -> AbstractContextManager:
    """A context in which launches go to `device`, if that is a GPU."""
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        return torch.cuda.device(device)
    return _HERE


_HERE = nullcontext()


def run(plan: Iterable[Launch], device: torch.device) -> None:
    """Launches the plan in order on the current stream of `device`."""
    with on(device):
        for step in plan:
            launch(step)


def dropout_scalars(probability: float) -> tuple[float, int]:
    """(scale, threshold) of dropout: an element is kept if its word >= threshold, and then multiplied by scale = 1 / (1
    - p).

    The threshold, min(floor(p 2^32), 2^32 - 1), is passed as the int32 of the same bits: one type for every p.
    """
    threshold = min(int(probability * 2**32), 2**32 - 1)
    return 0.0 if probability == 1 else 1 / (1 - probability), (threshold + 2**31) % 2**32 - 2**31


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; without a GPU, the smallest of the GPUs that we compile for."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return 99 * 1024


def multiprocessors(device: torch.device) -> int:
    """Programs that run at once, one a multiprocessor; without a GPU a few, so that tests run through every loop."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2


class Room(NamedTuple):
    """A GPU's multiprocessors, the programs that each runs at once, and the bytes of its L2 cache."""

    multiprocessors: int
    programs: int
    cache: int


def room(device: torch.device) -> Room:
    """The room of a device; without a GPU a little of each, so that tests run through every loop."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 20
    return Room(multiprocessors(device), 2, cache)


def programs_at_once(step: Launch) -> int:
    """Programs of a launch, 1 to 4, that a multiprocessor's registers hold. Launches nothing."""
    compiled = step.kernel.warmup(*step.arguments, grid=step.grid, **step.constants, **options_of(step))
    compiled._init_handles()  # loads the kernel of the coming launch, which will not load it again
    registers = max(8, cdiv(compiled.n_regs, 8) * 8) * 32 * step.num_warps
    return max(1, min(4, 65536 // registers))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b. PRECISION, "ieee" or "tf32", matters for float32 operands only."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def scalar(value, ACC: tl.constexpr):
    """A float argument in the accumulator's dtype. Kernels declare it float64, so that fp64 inputs keep every bit."""
    return (tl.full((), 1.0, tl.float64) * value).to(ACC)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """The value in DTYPE, rounded to nearest even. The interpreter truncates bf16; only there it is rounded by hand."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        value = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def keep_mask(seed, row, first, threshold, COLUMNS: tl.constexpr):
    """Which elements dropout keeps, (rows, COLUMNS), for int64 rows and columns from `first`, a multiple of 4.

    Philox4x32 (Salmon et al. 2011) of 7 rounds with the int64 `seed` as key. The number of element (row, column) is
    word column % 4 of counter (column // 4, row, row >> 32, 0), so one counter serves four columns. It depends on
    nothing else: the same bits on every backend and with every tile.
    """
    group = (first // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)[None, :]
    low = row.to(tl.uint32)[:, None]
    high = (row >> 32).to(tl.uint32)[:, None]
    word_0, word_1, word_2, word_3 = tl.philox(seed, group, low, high, 0, n_rounds=7)
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))  # (rows, groups, 2, 2): the words in order
    return tl.reshape(words, [row.shape[0], COLUMNS]) >= threshold.to(tl.uint32)


@triton.jit
def aligned(value, ALIGNED: tl.constexpr):
    """The value; if ALIGNED, the compiler knows it is a multiple of 8 (16 bytes of bf16), so loads are vectorised."""
    if ALIGNED:
        value = value // 8 * 8
    return value


@triton.jit
def load_tile(pointer, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EDGE: tl.constexpr = True):
    """The (rows, columns) matrix at `pointer` as a (ROWS, COLUMNS) tile, zero where the tile is larger.

    EDGE False promises at least ROWS rows.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (column < columns)[None, :]
    if EDGE:
        mask = mask & (row < rows)[:, None]
    return tl.load(pointer + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def wide(value):
    """A stride, an element of a tuple, in 64 bits. A stride of 1 is a Python number without `.to`: see `SIZES`."""
    return tl.full((), 0, tl.int64) + value


@triton.jit
def head_rows(pointer, strides, b, h, row, ALIGNED: tl.constexpr):
    """The start of row `row` of head (b, h), and the stride to the next row."""
    stride = wide(strides[2])
    return pointer + aligned(b * strides[0] + h * strides[1] + row * stride, ALIGNED), aligned(stride, ALIGNED)


@triton.jit
def store_tile(pointer, tile, rows, columns, stride):
    """Stores a tile into the (rows, columns) matrix at `pointer`, clipped to it."""
    row = tl.arange(0, tile.shape[0])
    column = tl.arange(0, tile.shape[1])
    at = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, rounded(tile, pointer.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def tile_scores(a, a_ptr, a_rows, a_stride, b, b_ptr, b_rows, b_stride, width, ACC, SLICE: tl.constexpr, PRECISION):
    """a @ b^T over the head dimension: (A, width) x (B, width) -> (A, B).

    Tensor cores take whole tiles. Without them (fp32 "ieee", fp64) every thread would hold whole rows of both, hundreds
    of registers. There the tiles are loaded again in slices of SLICE columns, in a loop that must not unroll.
    """
    product = tl.zeros([a.shape[0], b.shape[0]], ACC)
    if a.shape[1] <= SLICE:
        product = dot(a, tl.trans(b), product, PRECISION)
    else:
        for first in range(0, width, SLICE):
            a_slice = load_tile(a_ptr + first, a_rows, width - first, a_stride, a.shape[0], SLICE)
            b_slice = load_tile(b_ptr + first, b_rows, width - first, b_stride, b.shape[0], SLICE)
            product = dot(a_slice, tl.trans(b_slice), product, PRECISION)
    return product
