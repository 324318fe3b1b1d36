"""Compiles every Triton kernel for the GPUs that we ship to, without one, and reads what the assembler made of it.

The quick tests share the common configurations among the architectures; the slow ones compile all for each.

The configurations come from the launchers themselves (`aot_configurations` in each kernel file), so what is checked
is what runs. They are compiled in a process of their own, where TRITON_INTERPRET is unset whatever this one has.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from seqkern._slices import SLICES

ROOT = Path(__file__).parent.parent
# shared memory of one block, from the CUDA programming guide's table of compute capabilities
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
REGISTERS, REGISTER_FILE = 255, 65536


def takes_part(module: str, arch: int, i: int) -> bool:
    """Whether configuration i is compiled for `arch` by the quick tests: one architecture each, in turn.

    But all where a block may have the least shared memory, if the launchers look at how much there is.
    """
    least = min(SHARED_MEMORY, key=lambda each: SHARED_MEMORY[each])
    if module != "layer_norm" and arch == least:
        return True
    turns = [each for each in SHARED_MEMORY if module == "layer_norm" or each != least]
    return turns[(i + i // len(turns)) % len(turns)] == arch  # forward and backward follow each other in the list


def compile_module(module: str, arch: int, thorough: bool, tf32: bool) -> list[dict[str, Any]]:
    """Compiles the configurations of seqkern.kernels.<module>; what ptxas reports of each.

    Triton's own JIT binds and specialises the arguments, tensors on the meta device among them: what is checked is what
    a call compiles (but for pointers that are not multiples of 16 and strides of 1: see test_triton_driver.py).
    """
    import triton
    from triton_driver import compile_only

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # a cached kernel has no log
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    reports = []
    known: dict[Any, dict[str, Any]] = {}  # head dimensions are arguments: many configurations are the same kernel
    kernels = importlib.import_module(f"seqkern.kernels.{module}")
    with compile_only(arch):
        for i, (name, launch) in enumerate(kernels.aot_configurations(SHARED_MEMORY[arch], thorough)):
            if not thorough and not takes_part(module, arch, i):
                continue
            for parameter, value in zip(launch.kernel.params, launch.arguments, strict=False):
                compiled_in = isinstance(value, int) and not parameter.do_not_specialize
                assert not compiled_in, f"{parameter.name} would be compiled anew for some of its values"
            options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
            if launch.registers is not None:
                options["maxnreg"] = launch.registers
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants, **options)
            if compiled not in known:
                spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
                registers = re.findall(r"Used (\d+) registers", log.getvalue())
                assert len(spills) == 2, f"{name}: no report from ptxas in {log.getvalue()!r}"
                assert len(registers) == 1, f"{name}: no report from ptxas in {log.getvalue()!r}"
                known[compiled] = {
                    "spills": sum(map(int, spills)),
                    "registers": int(registers[0]),
                    "threads": 32 * launch.num_warps,
                    "shared": compiled.metadata.shared,
                }
            reports.append({"name": name} | known[compiled])
    return reports


def check(module: str, arch: int, thorough: bool = False, tf32: bool = False) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__, module, str(arch), str(int(thorough)), str(int(tf32))]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    reports = json.loads(result.stdout.splitlines()[-1])
    assert reports
    failed = [
        report
        for report in reports
        if (report["spills"] and metadata.version("triton") == PINNED)
        or report["registers"] > REGISTERS
        or report["registers"] * report["threads"] > REGISTER_FILE
        or report["shared"] > SHARED_MEMORY[arch]
    ]
    assert not failed, "\n".join(map(str, failed))


# Tiles are chosen for what this version makes of registers. On 3.6.0 two of the common configurations spill: folding of
# decoding on sm_120, 128 bytes, and dQ at D 128 on sm_100, 56.
(PINNED,) = re.findall(r"^triton==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.fixture
def compiled_ahead() -> Callable[..., None]:
    """`check`, by a name that tells tests/conftest.py that it takes long."""
    return check


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("module", SLICES)
def test_fits_registers_and_shared_memory(module: str, arch: int, compiled_ahead: Callable[..., None]) -> None:
    compiled_ahead(module, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("module", SLICES)
def test_every_configuration_fits(module: str, arch: int) -> None:
    check(module, arch, thorough=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_attention_in_tf32_fits(arch: int) -> None:
    check("attention", arch, thorough=True, tf32=True)


if __name__ == "__main__":
    module, arch, thorough, tf32 = sys.argv[1:]
    print(json.dumps(compile_module(module, int(arch), thorough == "1", tf32 == "1")))
