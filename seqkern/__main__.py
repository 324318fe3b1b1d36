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
        print(f"\n{device} tensors, float32:")
        for op in FUNCTIONS:
            try:
                print(explain(op, torch.empty((1, 1, 1, 64), device=device)))
            except NotImplementedError as error:  # the backend that SEQKERN_BACKEND asks for does not run there
                print(error)


if __name__ == "__main__":
    main()
