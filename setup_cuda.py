"""CUDA for the build (setup.py): where nvcc is, its version and runtime library, and which GPUs it compiles for."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# What CUDA kernels are compiled for: machine code by compute capability (80 runs on every 8.x, 120 on 12.x, an "a" on
# its own chip alone), and PTX, which a driver compiles for any other GPU: of 9.0, the oldest that has all that the
# kernels use, because PTX runs on what is newer only. PTX of 10.0 or 12.0 would leave out chips and gain nothing.
CUDA_TARGETS = {
    "80": "arch=compute_80,code=sm_80",
    "90a": "arch=compute_90a,code=sm_90a",
    "100a": "arch=compute_100a,code=sm_100a",
    "120": "arch=compute_120,code=sm_120",
    "ptx90": "arch=compute_90,code=compute_90",
}
CUDA_FLAGS = [
    "-std=c++17", "-O3", "-Xptxas=-v", "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-Wall,-Wno-unknown-pragmas,-Wno-psabi",
]  # fmt: skip


@dataclass(frozen=True)
class Cuda:
    """An nvcc that works, and what it compiles for."""

    nvcc: Path
    version: tuple[int, int]
    archs: list[str]
    library: Path  # CUDA's runtime, static: the binary needs no CUDA to be there

    def flags(self) -> list[str]:
        # A smaller file, which drivers for CUDA 12.4 can read: those that CUDA 13 needs anyway.
        return [*CUDA_FLAGS, *(["--compress-mode=size"] if self.version >= (13, 0) else [])]


def find_cuda() -> Cuda | None:
    """nvcc and the targets that SEQKERN_CUDA_ARCHS asks for, or None where there is no nvcc or "none" is asked for.

    Says so once. A name that is none, or a target that this nvcc does not know, ends the build; so does "native" on a
    machine without a GPU. "present" takes what there is: the targets of the GPUs that are here, or none.
    """
    asked = os.environ.get("SEQKERN_CUDA_ARCHS", "").replace(",", ";").strip()
    wanted = [name.strip() for name in asked.split(";") if name.strip()]
    required = bool(wanted) and wanted != ["present"]  # what cannot be built ends the build
    native = wanted == ["native"]
    if wanted == ["present"]:
        wanted = present_archs()
        if not wanted:
            print(
                "seqkern: nvidia-smi names no GPU: no CUDA C++ kernels in this build (they come with make test, make "
                "wheel, or another SEQKERN_CUDA_ARCHS than present)",
                file=sys.stderr,
            )
            return None
    elif native:
        wanted = native_archs()
    if unknown := [name for name in wanted if name not in CUDA_TARGETS and wanted != ["none"]]:
        raise SystemExit(
            f"seqkern: SEQKERN_CUDA_ARCHS must be native, present, none, or some of {';'.join(CUDA_TARGETS)}, "
            f"got {unknown[0]!r}"
        )
    if wanted == ["none"]:
        print("seqkern: SEQKERN_CUDA_ARCHS is none: no CUDA kernels in this build", file=sys.stderr)
        return None
    nvcc = find_nvcc()
    if nvcc is None:
        if required and not native:
            raise SystemExit(f"seqkern: SEQKERN_CUDA_ARCHS is {asked!r}, but there is no nvcc: set NVCC or CUDA_HOME")
        print(
            "seqkern: no nvcc (NVCC, CUDA_HOME, PATH, /usr/local/cuda): no CUDA C++ kernels in this build; "
            "CPU tensors run C++, CUDA tensors Triton",
            file=sys.stderr,
        )
        return None
    path, version = nvcc
    known = answer(path, "--list-gpu-arch").split()
    archs = [a for a in CUDA_TARGETS if f"compute_{re.sub('[^0-9]', '', a)}" in known and (not wanted or a in wanted)]
    missing = [name for name in wanted or CUDA_TARGETS if name not in archs]
    if missing and (required or not (archs or wanted)):
        raise SystemExit(f"seqkern: {path} of CUDA {version[0]}.{version[1]} cannot compile for {missing[0]}")
    if missing:
        print(f"seqkern: {path} does not know {', '.join(missing)}: not in this build", file=sys.stderr)
    if not archs:
        return None
    library = static_runtime(path)
    if library is None:
        message = f"seqkern: {path} comes without libcudart_static.a"
        if required or os.environ.get("NVCC"):
            raise SystemExit(message)
        print(f"{message}: no CUDA C++ kernels in this build", file=sys.stderr)
        return None
    return Cuda(path, version, archs, library)


def static_runtime(nvcc: Path) -> Path | None:
    """CUDA's runtime library in the folders where this nvcc would look for it."""
    words = re.search(r"^#\$ LIBRARIES=(.*)", answer(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull), re.MULTILINE)
    folders = [Path(word[2:]) for word in shlex.split(words[1]) if word.startswith("-L")] if words else []
    return next((f.resolve() / "libcudart_static.a" for f in folders if (f / "libcudart_static.a").exists()), None)


def native_archs() -> list[str]:
    """The targets of this machine's GPUs, of which there has to be one."""
    found = present_archs()
    if not found:
        raise SystemExit("seqkern: SEQKERN_CUDA_ARCHS is native, but nvidia-smi names no GPU")
    return found


def present_archs() -> list[str]:
    """The targets of this machine's GPUs, as nvidia-smi names them; none where it names none or is not there."""
    answers = answer(Path("nvidia-smi"), "--query-gpu=compute_cap", "--format=csv,noheader").split()
    found = {answer.replace(".", "") for answer in answers if re.fullmatch(r"\d+\.\d", answer)}
    generations = {"8": "80", "12": "120"}
    return [f"{c}a" if f"{c}a" in CUDA_TARGETS else generations.get(c[:-1], "ptx90") for c in sorted(found)]


def find_nvcc() -> tuple[Path, tuple[int, int]] | None:
    """The first nvcc that tells its version; the one that NVCC names has to."""
    named, home = os.environ.get("NVCC"), os.environ.get("CUDA_HOME")
    elsewhere = [home and f"{home}/bin/nvcc", shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in filter(None, [named] if named else elsewhere):
        if release := re.search(r"release (\d+)\.(\d+)", answer(Path(candidate), "--version")):
            return Path(candidate), (int(release[1]), int(release[2]))
    if named:
        raise SystemExit(f"seqkern: NVCC is {named!r}, which does not tell its version as nvcc does")
    return None


def answer(program: Path, *arguments: str) -> str:
    """What it prints, or nothing where it cannot run."""
    try:
        result = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout + result.stderr if result.returncode == 0 else ""


def has_kernels(source: Path) -> bool:
    """Whether a .cu has kernels: its own, or those that it launches (csrc/common/cuda/launch.h)."""
    return source.name != "launch.cu" and re.search(r"\blaunch\(|__global__", source.read_text()) is not None
