"""Hashes of outputs and gradients, to compare before and after a change that must not change a number.

    python tests/output_hashes.py before.json              # every case x dtype x tier x 1 and 2 threads
    python tests/output_hashes.py after.json before.json   # and what differs; exit status 1 where anything does

The cases: those of `seqkern.testing`, the options on which the error rule is tested, and 400 random option sets.
Hashes hold on one kind of processor and one compiler alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from seqkern import _library, testing
from seqkern.testing import attention_case, random_options, rnn_case, rnn_cell_case
from seqkern.testing.option_sets import ATTENTION_OPTIONS, ATTENTION_SHAPES, PACKED_LENGTHS, PACKED_OPTIONS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
RANDOM = 400


def cases() -> Iterator[tuple[str, testing.Case, tuple[torch.dtype, ...]]]:
    for name, case in testing.CASES.items():
        yield name, case, DTYPES
    for name, options in (ATTENTION_SHAPES | ATTENTION_OPTIONS).items():
        yield f"attention, {name}", attention_case(**{"queries": 130, "head_dim": 32} | options), DTYPES
    for name, options in PACKED_OPTIONS.items():
        yield f"packed, {name}", attention_case(**{"packed": PACKED_LENGTHS, "head_dim": 32} | options), DTYPES
    for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        yield f"{cell}, two layers", rnn_case(cell, 9, 5, 7, 33, num_layers=2, bidirectional=True), DTYPES
        yield f"{cell}, one step", rnn_case(cell, 1, 1, 64, 64), DTYPES
        yield f"{cell}, wide", rnn_case(cell, 12, 70, 130, 257), DTYPES
        yield f"{cell} cell, one row", rnn_cell_case(cell, 1, 64, 64), DTYPES
    for number in range(RANDOM):
        drawn = random_options.random_case(number)
        yield f"{number}: {drawn}", drawn.case, (drawn.dtype,)


def digest(tensor: Tensor) -> str:
    """Of shape, dtype, strides and bits."""
    bits = tensor.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    about = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.stride()}"
    return hashlib.sha256(about.encode() + bits.numpy().tobytes()).hexdigest()[:16]


def hashes() -> dict[str, str]:
    found = {}
    for isa in _library.available_isas():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with _library.use_cpu_isa(isa):
                for name, case, dtypes in cases():
                    for dtype in dtypes:
                        torch.manual_seed(0)
                        exact = case.inputs(torch.Generator().manual_seed(0))
                        inputs = {each: t.to(dtype) for each, t in exact.items()}
                        tensors = testing.run(case.ours, inputs, names=case.outputs, differentiate=case.differentiable)
                        inference = testing.run(case.ours, inputs, names=case.outputs, differentiate=False)
                        tensors |= {f"inference {each}": t for each, t in inference.items()}
                        for each, t in tensors.items():
                            found[f"{isa}, {threads} threads, {name}, {dtype}: {each}"] = digest(t)
    return found


def main(target: Path, before: Path | None) -> None:
    found = hashes()
    target.write_text(json.dumps(found, indent=0))
    print(f"{len(found)} tensors")
    if before is not None:
        old = json.loads(before.read_text())
        differ = [name for name in sorted(found.keys() | old.keys()) if found.get(name) != old.get(name)]
        print("\n".join(differ))
        print(f"{len(differ)} of {len(found)} differ from {before.name}")
        sys.exit(bool(differ))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
