"""Compiles every Triton kernel for the GPUs that we ship to, without one, and reads what the assembler made of it.

The quick tests share the common configurations among the architectures; the slow ones compile all for each.

The configurations come from the launchers themselves (`aot_configurations` in each kernel file), so what is checked
is what runs. They are compiled in a process of their own, where TRITON_INTERPRET is unset whatever this one has:

    python tests/triton/test_triton_aot.py attention 80 --thorough
    python tests/triton/test_triton_aot.py attention 80 --thorough --first 400      goes on where a run ended
    python tests/triton/test_triton_aot.py attention 80 --thorough --only "grad_query.*bfloat16-D64-.*mask"

It prints a line of JSON for each configuration as soon as that is compiled, and progress and failures to stderr; all
attention takes half an hour of a core for each GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from seqkern._slices import SLICES

ROOT = Path(__file__).parents[2]
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


def compile_module(
    module: str, arch: int, thorough: bool, tf32: bool, first: int = 0, only: str = ""
) -> Iterator[dict[str, Any]]:
    """Compiles the configurations of seqkern.kernels.<module>; what ptxas reports of each, as it does.

    Those from number `first` on whose name matches `only`; with tf32, those that it changes. Triton's own JIT binds and
    specialises the arguments, tensors on the meta device among them: what is checked is what a call compiles (but for
    pointers that are not multiples of 16 and strides of 1: see test_triton_driver.py).
    """
    import triton
    from triton_driver import compile_only

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # a cached kernel has no log
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    known: dict[Any, dict[str, Any]] = {}  # head dimensions are arguments: many configurations are the same kernel
    kernels = importlib.import_module(f"seqkern.kernels.{module}")
    with compile_only(arch):
        configurations = list(kernels.aot_configurations(SHARED_MEMORY[arch], thorough))
        for i, (name, launch) in enumerate(configurations):
            if not thorough and not takes_part(module, arch, i):
                continue
            if i < first or not re.search(only, name) or (tf32 and launch.constants.get("PRECISION") != "tf32"):
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
            yield {"number": i, "of": len(configurations), "name": name} | known[compiled]


# Bytes that ptxas may spill. Attention in float64 at a head dimension of 256: a tile of 16 rows of q, k, v and dO alone
# fills the registers of its threads, and no block is smaller.
SPILLS = {
    ("attention_grad_key_value-float64-D256-Dv256-all", 80): 368,
    ("attention_grad_key_value-float64-D256-Dv256-all", 90): 216,
    ("attention_grad_key_value-float64-D256-Dv256-dropout", 90): 16,
    ("attention_grad_query-float64-D256-Dv256-all", 90): 20,
    ("layer_norm_forward_long-float16-N16381-rms", 120): 112,
}


# Bytes that norms may spill where ptxas had registers left and chose more programs at a time instead: these kernels
# wait for memory, not for its L1.
SPILLS_FOR_OCCUPANCY = 64


def fits(report: dict[str, Any], arch: int) -> bool:
    spills = SPILLS.get((report["name"], arch), 0)
    if report["name"].startswith("layer_norm") and 2 * report["registers"] * report["threads"] <= REGISTER_FILE:
        spills = max(spills, SPILLS_FOR_OCCUPANCY)
    return (
        (report["spills"] <= spills or metadata.version("triton") != PINNED)
        and report["registers"] <= REGISTERS
        and report["registers"] * report["threads"] <= REGISTER_FILE
        and report["shared"] <= SHARED_MEMORY[arch]
    )


def check(module: str, arch: int, thorough: bool = False, tf32: bool = False) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__, module, str(arch)]
    command += ["--thorough"] * thorough + ["--tf32"] * tf32
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    failed = [report for report in map(json.loads, result.stdout.splitlines()) if not fits(report, arch)]
    assert not failed, "\n".join(map(str, failed))
    assert result.returncode == 0, result.stderr


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", choices=SLICES)
    parser.add_argument("arch", type=int, choices=SHARED_MEMORY)
    parser.add_argument("--thorough", action="store_true", help="every configuration, not the common ones alone")
    parser.add_argument("--tf32", action="store_true", help="with TF32 allowed; only what that changes")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the configuration to begin with")
    parser.add_argument("--only", default="", metavar="PATTERN", help="that a configuration's name contains")
    options = parser.parse_args()
    failures = 0
    for report in compile_module(**vars(options)):
        print(json.dumps(report), flush=True)
        position = f"[{report['number']}/{report['of']}]"
        if fits(report, options.arch):
            print(f"{position} {report['name']}", file=sys.stderr, flush=True)
        else:
            failures += 1
            print(f"{position} FAILED {report}", file=sys.stderr, flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
