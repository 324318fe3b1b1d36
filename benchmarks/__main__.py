"""`python -m benchmarks`: times every op against its peers, stores the JSON, prints the table.

Further arguments go to pytest: `python -m benchmarks -k "layer_norm and float32" --device cpu`. Ctrl-C ends it after
the case that runs, with the table of what was timed until then. `python -m benchmarks products` times the matrix
products that the ops are made of, alone; `python -m benchmarks loops` counts the instructions of their inner loops.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path

import pytest

from benchmarks import harness, loops, products, report
from benchmarks.progress import Progress, Sample

ROOT = Path(__file__).parent.parent


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["products"]:
        return products.main(arguments[1:])
    if arguments[:1] == ["loops"]:
        return loops.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--quick", action="store_true", help="minutes: one case of each test, dtype and mode, a tenth of the rounds, "
        "without torch.compile"
    )  # fmt: skip
    parser.add_argument("--benchmark-json", type=Path, metavar="FILE", help="default: build/benchmarks/<time>.json")
    options, others = parser.parse_known_args(arguments)
    output = (options.benchmark_json or _new_file()).absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    plugins: list[object] = [Progress()]
    if options.quick:
        plugins.append(Sample())
        harness.quick = True
    os.chdir(ROOT)
    code = pytest.main(
        ["benchmarks", "-q", "--benchmark-only", "--benchmark-disable-gc", "--benchmark-columns=median,iqr,rounds",
         f"--benchmark-json={output}", *others],
        plugins=plugins,
    )  # fmt: skip
    if output.exists() and output.stat().st_size:
        report.show(*report.load(output))
        print(f"stored in {output}")
    return int(code)


def _new_file() -> Path:
    return ROOT / "build" / "benchmarks" / f"{datetime.datetime.now():%Y%m%d-%H%M%S}.json"


if __name__ == "__main__":
    sys.exit(main())
