"""`python -m seqkern`: what this machine is, and for every op which kernel runs and why, on the CPU and on a GPU."""

import argparse

import torch

import seqkern
from seqkern._explain import describe_machine, explain
from seqkern._library import FUNCTIONS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m seqkern", description=__doc__)
    parser.add_argument("--version", action="version", version=f"seqkern {seqkern.__version__}")
    parser.parse_args()
    rows = describe_machine()
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        float32 = {op: _choice(op, torch.float32, device) for op in FUNCTIONS}
        print(f"\n{device} tensors, float32:", *float32.values(), sep="\n")
        bfloat16 = {op: _choice(op, torch.bfloat16, device) for op in FUNCTIONS}
        if others := [choice for op, choice in bfloat16.items() if choice != float32[op]]:
            print(f"\n{device} tensors, bfloat16, where another kernel runs:", *others, sep="\n")


def _choice(op: str, dtype: torch.dtype, device: str) -> str:
    try:
        return str(explain(op, torch.empty((1, 1, 1, 64), dtype=dtype, device=device)))
    except NotImplementedError as error:  # the backend that SEQKERN_BACKEND asks for does not run there
        return str(error)


if __name__ == "__main__":
    main()
