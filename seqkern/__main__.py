"""`python -m seqkern`: what this machine is, and for every op which kernel runs and why, on the CPU and on a GPU.

What it prints belongs into a report of a bug.
"""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import textwrap
from pathlib import Path

import torch

import seqkern
from seqkern._explain import Choice, by_reason, describe_machine, explain
from seqkern._slices import FUNCTIONS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m seqkern", description=__doc__)
    parser.add_argument("--version", action="version", version=f"seqkern {seqkern.__version__}")
    parser.parse_args()
    rows = describe_machine() + _surroundings()
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        float32 = [_choice(op, torch.float32, device) for op in FUNCTIONS]
        print(f"\n{device} tensors, float32:")
        _print_groups(float32)
        bfloat16 = [_choice(op, torch.bfloat16, device) for op in FUNCTIONS]
        if others := [choice for choice in bfloat16 if choice not in float32]:
            print(f"\n{device} tensors, bfloat16, where another kernel runs:")
            _print_groups(others)


def _surroundings() -> list[tuple[str, str]]:
    """What else a report of a bug needs: system, place of the library, packages beside it, variables that are set."""
    found = [("system", platform.platform()), ("installed in", str(Path(seqkern.__file__).parent))]
    for package in ("transformers", "kernels", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((package, importlib.metadata.version(package)))
    names = sorted(name for name in os.environ if name.startswith(("SEQKERN_", "OMP_", "TRITON_", "CUDA_VISIBLE")))
    variables = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return [*found, ("set", variables or "no variable of seqkern's")]


def _choice(op: str, dtype: torch.dtype, device: str) -> Choice:
    try:
        return explain(op, torch.empty((1, 1, 1, 64), dtype=dtype, device=device))
    except NotImplementedError as error:  # the backend that SEQKERN_BACKEND asks for does not run there
        return Choice(op, "none", "none", str(error).removeprefix(f"{op}: "))


def _print_groups(choices: list[Choice]) -> None:
    """A kernel, why it runs, and the ops that run it for that reason."""
    for ops, kernel, reason in by_reason(choices):
        print(f"  {kernel}: {reason}")
        print(textwrap.fill(", ".join(ops), 100, initial_indent=" " * 6, subsequent_indent=" " * 6))


if __name__ == "__main__":
    main()
