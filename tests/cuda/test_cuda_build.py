"""The CUDA kernels as nvcc made them: for which GPUs, and what the assembler says of each kernel.

The build keeps ptxas's report beside every object (setup.py), so that nothing is compiled here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cuda_checks import machine_code

from seqkern import _library
from seqkern._slices import CUDA_OPS, SLICES

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "ninja"
SOURCES = sorted(str(p.relative_to(ROOT / "csrc")) for p in (ROOT / "csrc").rglob("*.cu") if p.name != "launch.cu")
ARCHS = [arch for arch in _library.cuda_archs() if not arch.startswith("ptx")]


@dataclass(frozen=True)
class Budget:
    """What a kernel may take, for every GPU: registers of a thread, bytes of static shared memory and of stack.

    Dynamic shared memory is the launcher's choice: the host executor's tests bound it.
    """

    kernel: str  # a regular expression that matches the whole name, with template arguments
    registers: int
    shared: int = 0
    stack: int = 0


# The first line that matches counts. A kernel without one fails: its author states here what it was designed for.
BUDGETS: list[Budget] = [
    # Norms: blocks of 256 threads, so 128 registers let two of them be on a multiprocessor, 80 three.
    Budget(r"norm_cuda::forward_rows<\w+, [12]>", 80),
    Budget(r"norm_cuda::forward_rows<\w+, [346]>", 128),
    Budget(r"norm_cuda::forward_rows<float, 8>", 160),
    Budget(r"norm_cuda::backward_rows<(\w+, [12]|(BFloat16|Half|float), 3|float, 4)>", 128),
    Budget(r"norm_cuda::backward_rows<\w+, [3468]>", 240),
    Budget(r"norm_cuda::forward_walk<\w+>", 64),
    Budget(r"norm_cuda::backward_(walk|columns)<\w+>", 96),
    Budget(r"norm_cuda::reduce_parts<\w+>", 48),
    # Never launched: its shared memory tells whether it was compiled for sm_90a.
    Budget(r"hopper_probe", 16, shared=512),
    # Decoding: blocks of 128 threads, three of them on a multiprocessor, or two with 256 columns.
    Budget(r"attention_decode::decode_kernel<\w+, 64>", 168),
    Budget(r"attention_decode::decode_kernel<\w+, 128>", 208),  # on 8.x shared memory has room for two
    Budget(r"attention_decode::decode_kernel<\w+, 256>", 255),
    Budget(r"attention_decode::combine_kernel<\w+>", 48),
    # One block a multiprocessor, of 256 threads: all registers that there are for it.
    Budget(r"rnn_forward_kernel<RnnShort, .*>", 255),
    Budget(r"rnn_forward_kernel<float, .*>", 216),
    Budget(r"rnn_backward::scan_backward_kernel<.*>", 255),
    Budget(r"rnn_backward::row_statistics_kernel<.*>", 64),
    # Attention: three blocks of 128 threads where options are looked at, two else, one of 256 for head dimension 256.
    Budget(r"attention_forward::attention_forward_kernel<(BFloat16|Half), (64|128), true>", 168),
    Budget(r"attention_forward::attention_forward_kernel<.*>", 255),
    # Attention backward: eight warps a multiprocessor, so that sums of 16 x 256 fit a warp.
    Budget(r"attention_grad::grad_(query|key)_kernel<(BFloat16|Half|float), .*>", 255),
    Budget(r"attention_limits::mask_limits_kernel", 64),
    Budget(r"attention_grad::grad_mask_kernel<(BFloat16|Half|float)>", 240),
    # One block a multiprocessor; its warps then hand registers to each other: 160 and 32 of four warpgroups, or 240 and
    # 24 of three.
    Budget(r"attention_hopper::attention_forward_hopper<\w+, 64, false>", 128),
    Budget(r"attention_hopper::attention_forward_hopper<.*>", 168),
    # What a thread has at the start; the warpgroups then hand registers on. One block a multiprocessor.
    Budget(r"attention_backward_hopper::backward_kernel<\w+, 64>", 128),
    Budget(r"attention_backward_hopper::(backward_kernel<\w+, 128>|wide_(keys|queries)_kernel<\w+>)", 168),
    Budget(r"attention_backward_hopper::(statistics|convert|gaps)_kernel<.*>", 64),
]


@dataclass(frozen=True)
class Report:
    """What ptxas says of one kernel."""

    arch: str
    kernel: str
    registers: int
    shared: int
    stack: int
    spilled: int


def reports(text: str) -> Iterator[Report]:
    parts = re.split(r"Compiling entry function '(\S+)' for 'sm_(\w+)'", text)
    for mangled, arch, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        # The kernel's own lines, then those of functions that were not inlined: the worst of all.
        stacks, stores, loads = zip(
            *re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", rest),
            strict=True,
        )
        (registers,) = re.findall(r"Used (\d+) registers", rest)
        shared = re.search(r"(\d+) bytes smem", rest)
        yield Report(
            arch, name_of(mangled), int(registers), int(shared[1]) if shared else 0,
            max(map(int, stacks)), sum(map(int, stores + loads)),
        )  # fmt: skip


def name_of(mangled: str) -> str:
    """`norm<float, 4>` of a mangled kernel: without its return type, namespaces and parameters."""
    full = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"(seqkern|\(anonymous namespace\))::", "", full).removeprefix("void ")
    depth = 0
    for i, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:i]
    return name


def complaints(text: str, budgets: list[Budget]) -> list[str]:
    """Everything that a report of ptxas has against the kernels."""
    # C7510 and its like: the instructions of tensor cores, one after the other instead of together
    found = [line for line in text.splitlines() if re.search(r"\(C75\d\d\)|warning|serializ", line, re.IGNORECASE)]
    for report in reports(text):
        budget = next((b for b in budgets if re.fullmatch(b.kernel, report.kernel)), None)
        if report.spilled:
            found.append(f"spills: {report}")
        if budget is None:
            found.append(f"no line of BUDGETS is for {report}")
        elif any(getattr(report, what) > getattr(budget, what) for what in ("registers", "shared", "stack")):
            found.append(f"beyond {budget}: {report}")
    return found


needs_cuda = pytest.mark.skipif(not _library.cuda_archs(), reason="built without nvcc: there are no CUDA kernels")


@pytest.mark.usefixtures("every_target")
@pytest.mark.skipif(not ARCHS, reason="built without nvcc or as PTX alone: ptxas compiled nothing")
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_keep_to_their_budgets(source, setup):
    path = BUILD / Path(source).with_suffix(".cu.o.ptxas")
    assert path.exists(), f"no report of {source}: build with `make build` first"
    text = path.read_text()
    wanted = ARCHS if setup.has_kernels(ROOT / "csrc" / source) else []
    assert {report.arch for report in reports(text)} == set(wanted)
    found = complaints(text, BUDGETS)
    assert not found, "\n".join(found)


@pytest.mark.usefixtures("every_target")
@pytest.mark.skipif("90a" not in ARCHS, reason="not built for sm_90a")
def test_the_probe_knows_its_architecture():
    """csrc/common/cuda/hopper/probe.cu: shared memory where the code is for sm_90a, and only there."""
    found = reports((BUILD / "common/cuda/hopper/probe.cu.o.ptxas").read_text())
    assert {report.arch: report.shared for report in found} == {a: 512 if a == "90a" else 0 for a in ARCHS}


# ---- what the assembler made of it ---------------------------------------------------------------------------------

# In how many places a kernel may empty the first-level cache of its multiprocessor: an acquire beyond the block does.
# Attention launches no clusters; backward, dQ's turns and the ticket are acquired of the device.
FLUSHES = {
    "attention/cuda/hopper/forward.cu": {"attention_forward_hopper": 0},
    "attention/cuda/hopper/backward.cu": {
        "::backward_kernel": 4, "wide_keys_kernel": 0, "wide_queries_kernel": 0, "statistics_kernel": 0,
        "convert_kernel": 0, "gaps_kernel": 0,
    },
}  # fmt: skip


@pytest.mark.usefixtures("every_target")
@pytest.mark.parametrize("source", FLUSHES)
def test_waits_keep_the_first_level_cache(source):
    kernels = machine_code(source)
    assert kernels
    for name, lines in kernels.items():
        (most,) = (count for part, count in FLUSHES[source].items() if part in name)
        found = sum("CCTL.IVALL" in line for line in lines)
        assert found <= most, (name, found)


@pytest.mark.usefixtures("every_target")
def test_recurrent_steps_read_no_parameters_of_memory():
    """In a cluster every step empties the first-level cache: biases and norms are in shared memory, weights on chip.

    What is left of loads through the read-only cache are the weights' 16 bytes, once before the first step.
    """
    kernels = machine_code("rnn/cuda/forward.cu")
    assert kernels
    for name, lines in kernels.items():
        reads = {line.split()[0] for line in lines if "LDG" in line and "CONSTANT" in line}
        assert {read for read in reads if ".128" not in read} == set(), name


@pytest.mark.usefixtures("every_target")
@pytest.mark.skipif("90a" not in ARCHS, reason="not built for sm_90a")
@pytest.mark.parametrize("source", FLUSHES)
def test_registers_of_warps_that_hand_them_on(source):
    """The executor's pool of a block is threads x what ptxas gives each (tests/simt/simt_hopper.cpp: check_pool)."""
    handing = {name for name, lines in machine_code(source).items() if any("USETMAXREG" in line for line in lines)}
    names = {re.sub(r"(seqkern|\(anonymous namespace\))::", "", name).removeprefix("void ") for name in handing}
    path = BUILD / Path(source).with_suffix(".cu.o.ptxas")
    found = [r for r in reports(path.read_text()) if r.arch == "90a" and any(n.startswith(r.kernel) for n in names)]
    assert found
    for report in found:
        threads = 512 if report.kernel.endswith(("64>", "64, false>")) else 384
        assert report.registers == 65536 // threads // 8 * 8, report


REPORT = """
ptxas info    : Compiling entry function '_ZN7seqkern12_GLOBAL__N_16kernelIfLi4EEEvPKfPf' for 'sm_90a'
ptxas info    : Function properties for _ZN7seqkern12_GLOBAL__N_16kernelIfLi4EEEvPKfPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 64 bytes smem
"""
BUDGET = Budget(r"kernel<float, \d>", 40, shared=64)


def test_reports_are_read():
    assert list(reports(REPORT * 2)) == [Report("90a", "kernel<float, 4>", 40, 64, 0, 0)] * 2
    assert complaints(REPORT, [BUDGET]) == []


@pytest.mark.parametrize(
    ("report", "budget", "words"),
    [
        (REPORT.replace("0 bytes spill stores", "8 bytes spill stores"), BUDGET, "spills"),
        (REPORT.replace("0 bytes spill loads", "8 bytes spill loads"), BUDGET, "spills"),
        (REPORT.replace("0 bytes stack", "16 bytes stack"), BUDGET, "beyond"),
        (REPORT, Budget("kernel.*", 39, shared=64), "beyond"),
        (REPORT, Budget("kernel.*", 40, shared=63), "beyond"),
        (REPORT, Budget("kern", 40, shared=64), "no line of BUDGETS"),
        (REPORT + "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized", BUDGET, "C7510"),
    ],
)
def test_the_gate_fails_on(report, budget, words):
    (found,) = complaints(report, [budget])
    assert words in found


# ---- for which GPUs -----------------------------------------------------------------------------------------------


@pytest.fixture
def setup(monkeypatch):
    """setup_cuda.py's functions, where nothing of the environment names a compiler."""
    for name in ("NVCC", "CUDA_HOME", "SEQKERN_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("setup_cuda", ROOT / "setup_cuda.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nvcc(tmp_path):
    """A program that answers as the nvcc of CUDA 12.4 does, which knows no GPU after 9.0."""
    path = tmp_path / "bin" / "nvcc"
    path.parent.mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart_static.a").touch()
    path.write_text(
        f"""#!/bin/sh
case $1 in
  --version) echo 'Cuda compilation tools, release 12.4, V12.4.131' ;;
  --list-gpu-arch) echo compute_80; echo compute_90 ;;
  --dryrun) echo '#$ LIBRARIES=  "-L{tmp_path}/nowhere" "-L{tmp_path}/lib"' >&2 ;;
esac
"""
    )
    path.chmod(0o755)
    return path


def test_nvcc_is_found_by_name_home_and_path(setup, nvcc, monkeypatch):
    for name, value in (("NVCC", nvcc), ("CUDA_HOME", nvcc.parent.parent), ("PATH", f"{nvcc.parent}:/bin:/usr/bin")):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(value))
            assert setup.find_nvcc() == (nvcc, (12, 4))


def test_an_older_nvcc_builds_for_what_it_knows(setup, nvcc, monkeypatch, capsys):
    monkeypatch.setenv("NVCC", str(nvcc))
    cuda = setup.find_cuda()
    assert cuda.archs == ["80", "90a", "ptx90"]
    assert cuda.library == nvcc.parent.parent / "lib" / "libcudart_static.a"
    assert not any("compress" in flag for flag in cuda.flags())  # drivers of CUDA 12.0 cannot read it
    assert "does not know 100a, 120" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "archs"), [("90a", ["90a"]), ("90a;80", ["80", "90a"]), ("80, ptx90", ["80", "ptx90"])]
)
def test_fewer_gpus_on_request(setup, nvcc, monkeypatch, asked, archs):
    monkeypatch.setenv("NVCC", str(nvcc))
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", asked)
    assert setup.find_cuda().archs == archs


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("91", "SEQKERN_CUDA_ARCHS must be native, present, none, or some of 80;90a;100a;120;ptx90, got '91'"),
        ("90a;none", "got 'none'"),
        ("120", "of CUDA 12.4 cannot compile for 120"),
    ],
)
def test_wrong_requests_end_the_build(setup, nvcc, monkeypatch, asked, words):
    monkeypatch.setenv("NVCC", str(nvcc))
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", asked)
    with pytest.raises(SystemExit, match=words):
        setup.find_cuda()


def test_without_nvcc_the_build_says_so(setup, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(setup, "find_nvcc", lambda: None)
    assert setup.find_cuda() is None
    assert "no nvcc" in capsys.readouterr().err
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", "90a")
    with pytest.raises(SystemExit, match="is '90a', but there is no nvcc"):
        setup.find_cuda()
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", "native")  # `make gpu` runs Triton's kernels without it
    monkeypatch.setattr(setup, "native_archs", lambda: ["90a"])
    assert setup.find_cuda() is None
    assert "no nvcc" in capsys.readouterr().err
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", "none")
    assert setup.find_cuda() is None
    assert "no CUDA kernels in this build" in capsys.readouterr().err


def test_an_nvcc_by_name_has_to_be_one(setup, monkeypatch):
    monkeypatch.setenv("NVCC", shutil.which("true"))
    with pytest.raises(SystemExit, match="does not tell its version"):
        setup.find_nvcc()


def test_an_nvcc_without_its_runtime(setup, nvcc, monkeypatch, capsys):
    (nvcc.parent.parent / "lib" / "libcudart_static.a").unlink()
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    assert setup.find_cuda() is None
    assert "without libcudart_static.a: no CUDA C++ kernels in this build" in capsys.readouterr().err
    monkeypatch.setenv("NVCC", str(nvcc))
    with pytest.raises(SystemExit, match="without libcudart_static"):
        setup.find_cuda()


def test_native_is_what_this_machine_runs(setup, nvcc, monkeypatch):
    program = nvcc.parent / "nvidia-smi"
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
    for capabilities, archs in (("8.9", ["80"]), ("9.0 9.0", ["90a"]), ("10.0", ["100a"]), ("12.1", ["120"])):
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' {capabilities}\n")
        program.chmod(0o755)
        assert setup.native_archs() == archs
    for other in ("10.3", "11.0"):  # neither 10.0's machine code nor any other is for these
        program.write_text(f"#!/bin/sh\necho {other}\n")
        assert setup.native_archs() == ["ptx90"]
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(SystemExit, match="nvidia-smi names no GPU"):
        setup.native_archs()


def test_present_is_what_there_is_or_nothing(setup, nvcc, monkeypatch, capsys):
    """What `make demo` compiles for: a machine without a GPU, or without nvidia-smi, builds no CUDA kernels."""
    monkeypatch.setenv("NVCC", str(nvcc))
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", "present")
    program = nvcc.parent / "nvidia-smi"
    monkeypatch.setenv("PATH", str(nvcc.parent))
    for answers in (None, "exit 9", "echo No devices were found"):
        if answers is not None:
            program.write_text(f"#!/bin/sh\n{answers}\n")
            program.chmod(0o755)
        assert setup.find_cuda() is None
        (line,) = capsys.readouterr().err.splitlines()
        assert "nvidia-smi names no GPU: no CUDA C++ kernels in this build" in line
    program.write_text("#!/bin/sh\necho 9.0\n")
    assert setup.find_cuda().archs == ["90a"]
    program.write_text("#!/bin/sh\necho 12.0\n")  # a GPU that this nvcc does not know: nothing was asked for by name
    assert setup.find_cuda() is None
    assert "does not know 120: not in this build" in capsys.readouterr().err
    monkeypatch.setenv("SEQKERN_CUDA_ARCHS", "native")
    with pytest.raises(SystemExit, match="cannot compile for 120"):
        setup.find_cuda()
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(SystemExit, match="is native, but nvidia-smi names no GPU"):
        setup.find_cuda()


@needs_cuda
def test_cuda_kernels_are_registered():
    """On any torch, also one that was built for CPU alone."""
    written = {source.split("/")[0] for source in SOURCES} - {"common"}
    assert written == {slice.name for slice in SLICES.values() if slice.cuda_ops}
    registered = {
        name for name in CUDA_OPS if torch._C._dispatch_has_kernel_for_dispatch_key(f"seqkern_cuda::{name}", "CUDA")
    }
    assert registered == set(CUDA_OPS)


@needs_cuda
def test_the_binary_shows_nothing_of_cudas_runtime():
    """It is linked in, and must not meet the one that torch brings."""
    command = ["nm", "-D", "--defined-only", ROOT / "seqkern" / "_C.abi3.so"]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in symbols if "cuda" in name.lower()] == ["seqkern_cuda_archs"]
