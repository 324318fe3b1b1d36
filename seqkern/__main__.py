"""`python -m seqkern`: what this machine is, and for every op which kernel runs and why."""

from seqkern._explain import describe_machine, explain
from seqkern._library import FUNCTIONS


def main() -> None:
    rows = describe_machine()
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    print()
    for op in FUNCTIONS:
        print(explain(op))


if __name__ == "__main__":
    main()
