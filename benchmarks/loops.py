"""The inner loops of the products' register tiles, as the compiler made them: `python -m benchmarks loops [--json F]`.

Disassembles the library with binutils (nm, objdump) and counts the instructions of one term of each sum. A tile of R
rows and V vectors needs R V multiply-adds and R + V loads, and no store: a sum that lies in memory instead of a
register would show as one. On top come prefetches, the loop's own counters and jump, and copies of registers.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import seqkern

# What the tiles of a row are called in csrc/common, and their template arguments that give rows and vectors.
TILES = {
    "rows_tile": re.compile(r"rows_tile<(?P<type>\w+), (?P<vectors>\d+), (?P<rows>\d+)>"),
    "gemm_columns": re.compile(r"gemm_columns<(?P<type>\w+), (?P<vectors>\d+), .*UnitStride\)(?P<stride>\d), "),
}
STRIDES = {"0": "any strides", "1": "rows contiguous", "2": "columns contiguous"}
SYMBOL = re.compile(r"^([0-9a-f]+) ([0-9a-f]+) . void seqkern::(\w+)::\(anonymous namespace\)::(.*)$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
PRODUCT = re.compile(r"vfn?m(add|sub)\w+|vdpbf16ps")


@dataclass(frozen=True)
class Loop:
    """The instructions of one turn of an innermost loop."""

    products: int
    loads: int
    stores: int
    prefetches: int
    others: int
    on_stack: int  # loads and stores of the stack: what found no register


@dataclass(frozen=True)
class Tile:
    tier: str
    name: str
    rows: int
    vectors: int
    dtype: str
    loop: Loop

    @property
    def ideal(self) -> tuple[int, int, int]:
        """Products, loads and stores."""
        return self.rows * self.vectors, self.rows + self.vectors, 0


def innermost_loops(lines: Sequence[str]) -> list[Loop]:
    """The loops of a function without another loop in them, from its disassembly."""
    instructions = [match.groups() for line in lines if (match := INSTRUCTION.match(line))]
    places = {address: i for i, (address, _, _) in enumerate(instructions)}
    jumps = []
    for i, (_, name, operands) in enumerate(instructions):
        target = operands.split(" ")[0]
        if name.startswith("j") and places.get(target, i) < i:
            jumps.append((places[target], i))
    inner = [(a, b) for a, b in jumps if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in jumps)]
    return [_count([(name, operands) for _, name, operands in instructions[a : b + 1]]) for a, b in inner]


def _count(instructions: Sequence[tuple[str, str]]) -> Loop:
    counts = dict.fromkeys(("products", "loads", "stores", "prefetches", "others", "on_stack"), 0)
    for name, operands in instructions:
        memory = "(%" in operands and not name.startswith(("lea", "nop", "j"))
        stored = memory and operands.rstrip().endswith(")")
        if name.startswith("prefetch"):
            counts["prefetches"] += 1
            continue
        if PRODUCT.match(name):
            counts["products"] += 1
        if memory:
            counts["stores" if stored and not name.startswith(("cmp", "test")) else "loads"] += 1
            counts["on_stack"] += "(%rsp" in operands or "(%rbp" in operands
        elif not PRODUCT.match(name):
            counts["others"] += 1
    return Loop(**counts)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def library() -> Path:
    """The compiled library beside the package."""
    found = sorted(Path(seqkern.__file__).parent.glob("_C*.so"))
    if not found:
        raise FileNotFoundError("no compiled library beside the package")
    return found[0]


def tiles(path: Path) -> list[Tile]:
    """The whole register tiles of every tier in the library, each once; of float32 and pairs of bfloat16."""
    for tool in ("nm", "objdump"):
        if shutil.which(tool) is None:
            raise FileNotFoundError(f"{tool} (binutils) is not installed")
    found: dict[tuple[str, ...], Tile] = {}
    for line in _output("nm", "-C", "-S", str(path)).splitlines():
        symbol = SYMBOL.match(line)
        if not symbol:
            continue
        start, size, tier, name = int(symbol[1], 16), int(symbol[2], 16), symbol[3], symbol[4]
        for kind, pattern in TILES.items():
            match = pattern.match(name)
            if not match or match["type"] != "float":
                continue
            place = (tier, kind, match["vectors"], match["rows"] if kind == "rows_tile" else match["stride"])
            if place in found:
                continue
            bounds = (f"--start-address={start:#x}", f"--stop-address={start + size:#x}")
            lines = _output("objdump", "-d", "--no-show-raw-insn", *bounds, str(path)).splitlines()
            busiest = max(innermost_loops(lines), key=lambda loop: loop.products, default=None)
            if busiest is None or busiest.products == 0:
                continue
            vectors = int(match["vectors"])
            rows = int(match["rows"]) if kind == "rows_tile" else busiest.products // vectors
            label = kind if kind == "rows_tile" else f"{kind}, {STRIDES[match['stride']]}"
            dtype = "bfloat16" if tier == "avx512bf16" else "float32"
            found[place] = Tile(tier, label, rows, vectors, dtype, busiest)
    return sorted(found.values(), key=lambda tile: (tile.tier, tile.name, -tile.vectors, -tile.rows))


def report(tile: Tile) -> str:
    loop, (products, loads, stores) = tile.loop, tile.ideal
    return (
        f"{tile.tier:10} {tile.dtype:8} {tile.name:32} {tile.rows} x {tile.vectors}: {loop.products:2} products "
        f"({products}), {loop.loads:2} loads ({loads}), {loop.stores} stores ({stores}), {loop.prefetches} prefetches, "
        f"{loop.others} others, {loop.on_stack} on the stack"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks loops", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to store the counts")
    options = parser.parse_args(arguments)
    found = tiles(library())
    for tile in found:
        print(report(tile))
    if options.json:
        options.json.write_text(json.dumps([asdict(tile) for tile in found], indent=1) + "\n")
    return 0
