"""Runs the tests of the integrations on torch x transformers x Python: `make matrix`, or `python tests/matrix.py`.

    python tests/matrix.py --torch 2.10.0 newest --transformers 5.0.0 5.24.0 --python 3.11 -- -k llama

A torch has an environment of its own for each Python (`tests/versions.py`; several GB each), a transformers a folder
of its own that is put first on the module path. A cell is run, or says why it was not: no such Python here, no such
version for it, or a transformers that seqkern refuses. What the tests said goes to build/matrix/*.xml, and the table,
for docs/numerics.md, to build/matrix/table.md and to the screen. Cells that have a report already are not run again:
`--again` does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from versions import ROOT, counts, prepare, table

FOLDER = ROOT / "build" / "matrix"
TORCH = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "newest")
TRANSFORMERS = ("5.0.0", "5.8.1", "5.16.1", "5.24.0")
PYTHON = ("3.10", "3.11", "3.12", "3.13")
TESTS = ("tests/integrations",)
NOT_RUN, REFUSED = "not run", "too old: refused"


def interpreter(version: str) -> str | None:
    """Of that Python, here."""
    if version == "{}.{}".format(*sys.version_info[:2]):
        return sys.executable
    return shutil.which(f"python{version}")


def installed(python: Path, transformers: str) -> Path | None:
    """The folder with that transformers and what it needs besides torch; None if there is none for this Python."""
    folder = FOLDER / f"transformers-{transformers}-{python.parent.parent.name}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        # numpy and what else the environment has come along a second time and would hide the environment's own.
        command = [python, "-m", "pip", "install", "-q", "--target", part, f"transformers=={transformers}"]
        if subprocess.run(command, check=False).returncode:
            return None
        for name in ("torch", "numpy", "triton"):
            for found in part.glob(f"{name}*"):
                shutil.rmtree(found)
        part.rename(folder)
    return folder


def refused(environment: Path, variables: dict[str, str]) -> bool:
    """Whether seqkern says that this transformers is too old."""
    command = [environment, "-c", "import seqkern.integrations.transformers"]
    said = subprocess.run(command, cwd=ROOT, env=variables, check=False, capture_output=True, text=True)
    return said.returncode != 0 and "needs transformers >=" in said.stderr


def run(python: str, torch: str, transformers: str, options: list[str], again: bool) -> str:
    """A cell of the table."""
    found = interpreter(python)
    if found is None:
        return NOT_RUN
    report = FOLDER / f"py{python}-torch{torch}-transformers{transformers}.xml"
    if again or not report.exists():
        report.unlink(missing_ok=True)
        try:
            environment = prepare(torch, found)
        except subprocess.CalledProcessError:
            return NOT_RUN
        folder = installed(environment, transformers)
        if folder is None:
            return NOT_RUN
        variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "editable")])}
        if refused(environment, variables):
            return REFUSED
        command = [environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
        command += ["-n", os.environ.get("WORKERS", "2"), "--dist", "worksteal", *options]
        subprocess.run(command, cwd=ROOT, env=variables, check=False)
    if not report.exists():
        return "no report"
    row = counts(report)
    return f"**{row['failed']} failed**" if row["failed"] != "0" else f"{row['passed']} passed"


def rows(
    pythons: Iterable[str], torches: Iterable[str], transformers: list[str], options: list[str], again: bool
) -> Iterable[dict[str, str]]:
    for python in pythons:
        for torch in torches:
            cells = {name: run(python, torch, name, options, again) for name in transformers}
            yield {"Python": python, "torch": torch} | {f"transformers {name}": cells[name] for name in transformers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCH, metavar="VERSION")
    parser.add_argument("--transformers", nargs="+", default=TRANSFORMERS, metavar="VERSION")
    parser.add_argument("--python", nargs="+", default=PYTHON, metavar="VERSION")
    parser.add_argument("--again", action="store_true", help="also the cells that have a report")
    parser.add_argument("options", nargs="*", help="for pytest, behind --")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = []
    for row in rows(arguments.python, arguments.torch, arguments.transformers, arguments.options, arguments.again):
        found.append(row)
        (FOLDER / "table.md").write_text(table(found))  # also when it is interrupted
    print(table(found), end="")
    return int(any("failed" in cell or cell == "no report" for row in found for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main())
