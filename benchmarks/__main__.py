"""`python -m benchmarks`: times every op against its peers, stores the JSON, prints the table.

Further arguments go to pytest: `python -m benchmarks -k "layer_norm and float32" --device cpu`.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    arguments = sys.argv[1:]
    output = next((Path(a.split("=", 1)[1]) for a in arguments if a.startswith("--benchmark-json=")), None)
    if output is None:
        output = ROOT / "build" / "benchmarks" / f"{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        arguments.append(f"--benchmark-json={output}")
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", "-q", "--benchmark-only", "--benchmark-disable-gc",
         "--benchmark-columns=median,iqr,rounds", *arguments],
        cwd=ROOT, check=False,
    ).returncode  # fmt: skip
    if output.exists() and output.stat().st_size:
        subprocess.run([sys.executable, "-m", "benchmarks.report", str(output)], cwd=ROOT, check=True)
        print(f"stored in {output}")
    return code


if __name__ == "__main__":
    sys.exit(main())
