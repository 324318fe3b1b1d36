"""Runs the CPU tests on several versions of torch: `make versions`, or `python tests/versions.py 2.10.0 2.11.0`.

Every version gets an environment of its own under build/versions (several GB each: torch brings CUDA's libraries), in
which this tree's extension is loaded as it is: its ABI is stable. What the tests said goes to
build/versions/VERSION.xml, and the table, for docs/numerics.md, to build/versions/table.md and to the screen. Arguments
behind -- go to pytest (`-- -k compile`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "versions"
VERSIONS = ("2.10.0", "2.11.0", "newest")
# The interpreter of triton 3.6, which comes with torch before 2.12, fails beside numpy 2.4; setuptools before 77 do not
# know how pyproject.toml writes a licence.
PACKAGES = (
    "numpy<2.4", "setuptools>=77", "wheel", "ninja", "pytest>=8", "pytest-benchmark>=4", "pytest-xdist>=3.5",
    "hypothesis", "expecttest", "torch-abi-audit; python_version >= '3.11'", "rich", "matplotlib", "jinja2", "psutil",
    "packaging",
)  # fmt: skip
PROBE = "import torch, sys; print(torch.__version__, '%d.%d' % sys.version_info[:2])"


def prepare(version: str, interpreter: str = sys.executable) -> Path:
    """The Python of an environment made by that interpreter, with that torch in it."""
    other = "" if interpreter == sys.executable else f"-{Path(interpreter).name}"
    folder = FOLDER / f"{version}{other}"
    python = folder / "bin" / "python"
    if not (folder / ".stamp").exists():
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
        torch = "torch" if version == "newest" else f"torch=={version}"
        subprocess.run([python, "-m", "pip", "install", "-q", torch, *PACKAGES], check=True)
        if subprocess.run([python, "-c", "import triton"], check=False, stderr=subprocess.DEVNULL).returncode:
            pinned = ["-c", str(ROOT / "constraints.txt"), "triton"]  # builds for the CPU bring none
            subprocess.run([python, "-m", "pip", "install", "-q", *pinned], check=True)
        (folder / ".stamp").touch()
    return python


def run(version: str, options: list[str]) -> dict[str, str]:
    """A row of the table."""
    python, report = prepare(version), FOLDER / f"{version}.xml"
    report.unlink(missing_ok=True)
    workers = os.environ.get("WORKERS", "2")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-n", workers, "--dist", "worksteal", *options]
    subprocess.run(command, cwd=ROOT, check=False)  # what failed is in the report
    if not report.exists():
        raise SystemExit(f"versions: pytest left no report with torch {version}")
    torch, of_python = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True).stdout.split()
    return {"torch": torch, "Python": of_python, **counts(report)}


def counts(report: Path) -> dict[str, str]:
    """Of pytest's report in JUnit's form."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total = {name: sum(int(s.get(name, 0)) for s in suites) for name in ("tests", "failures", "errors", "skipped")}
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    return {"passed": f"{passed:,}", "failed": f"{failed:,}", "skipped": f"{total['skipped']:,}"}


def table(rows: list[dict[str, str]]) -> str:
    """In Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    versions, options = arguments[:split] or list(VERSIONS), arguments[split + 1 :]
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for version in versions:
        rows.append(run(version, options))
        (FOLDER / "table.md").write_text(table(rows))  # also when it is interrupted
    print(table(rows), end="")
    return int(any(row["failed"] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
