"""Builds seqkern's one extension: C++ kernels for CPU behind the LibTorch stable ABI.

torch.utils.cpp_extension is not used: the kernels are compiled once per instruction-set tier with different flags, and
the binary must not depend on the torch, Python or CUDA version it was built with. Ninja does the incremental work.

Beside it, where Python's headers are there, a small library that does depend on them: autograd nodes in C++, named
after the torch and the Python that it is for, and loaded by no other.
"""

import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"

NODE = "seqkern._node"
NODE_SOURCE = CSRC / "layer_norm" / "layer_norm_node.cpp"

# The oldest torch whose stable ABI the binary needs: 2.10.
TORCH_TARGET_VERSION = "0x020a000000000000"
COMMON_FLAGS = [
    "-std=gnu++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-unknown-pragmas",
    "-Wno-psabi", "-Wno-unused-function",
]  # fmt: skip
X86_TIERS = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    # gcc 12 warns about its own avx512 intrinsics header.
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mprfchw",
        "-mfma",
        "-mf16c",
        "-Wno-maybe-uninitialized",
    ],
}
# Units for the matrix tiles of newer x86 servers, where the compiler knows them: *_amx.cpp, in one tier only.
AMX_FLAGS = [*X86_TIERS["avx512"], "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-fno-exceptions"]
TIERS = X86_TIERS if platform.machine().lower() in ("x86_64", "amd64") else {"generic": []}


def torch_root() -> Path:
    """Where torch is installed, without importing it (an import takes longer than an up-to-date build)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("seqkern needs torch at build time: install torch first, then build without build isolation")
    return Path(spec.submodule_search_locations[0])


class NinjaBuildExt(build_ext):
    """Writes build.ninja and runs it; objects are kept, so only what changed is compiled again."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name == NODE and not python_headers().joinpath("Python.h").exists():
            raise CompileError("no Python headers: small norms keep their autograd nodes in Python, a few us slower")
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        build_dir = (ROOT / "build" / "ninja").resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        node = ext.name == NODE
        text = node_ninja_file(output, torch_root()) if node else ninja_file(output, torch_root())
        path = build_dir / ("node.ninja" if node else "build.ninja")
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        import ninja

        command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(build_dir), "-f", path.name]
        if jobs := os.environ.get("MAX_JOBS"):
            command += ["-j", jobs]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            if node:
                raise CompileError("small norms keep their autograd nodes in Python, see the compiler's message above")
            raise SystemExit("seqkern: the C++ build failed, see the compiler's message above")

    def get_ext_filename(self, fullname: str) -> str:
        *package, name = fullname.split(".")
        if name == NODE.rpartition(".")[2]:
            return str(Path(*package, f"{name}-{torch_version()}-{sys.implementation.cache_tag}.so"))
        return super().get_ext_filename(fullname)


def torch_version() -> str:
    """Without the suffix that tells CUDA's version: the headers are the same."""
    found = re.search(r"__version__ = '([^'+]+)", (torch_root() / "version.py").read_text())
    if found is None:
        raise SystemExit("seqkern: torch/version.py names no version")
    return found.group(1)


def python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def knows_amx() -> bool:
    """Whether this is Linux on x86-64 and the compiler can build for AMX."""
    if len(TIERS) == 1 or not sys.platform.startswith("linux"):
        return False
    command = [*os.environ.get("CXX", "g++").split(), *AMX_FLAGS, "-x", "c++", "-E", "-", "-o", os.devnull]
    try:
        return subprocess.run(command, input=b"", capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False  # the build itself will say so


def ninja_file(output: Path, torch_dir: Path) -> str:
    include = torch_dir / "include"
    host_flags = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        f"-isystem {quote(include)}",
        f"-isystem {quote(include / 'torch' / 'csrc' / 'api' / 'include')}",
    ]
    amx = knows_amx()
    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"flags = {' '.join(COMMON_FLAGS)} -DSK_AMX={int(amx)} {os.environ.get('CXXFLAGS', '')}".rstrip(),
        f"ldflags = {os.environ.get('LDFLAGS', '')}".rstrip(),
        f"includes = -I{quote(CSRC)} -I{quote(CSRC / 'common')}",
        "rule compile",
        "  command = $cxx $flags $includes $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = C++ $out",
        "rule link",
        f"  command = $cxx -shared $in -o $out -L{quote(torch_dir / 'lib')} -ltorch_cpu $ldflags",
        "  description = link $out",
    ]
    objects = []
    for source in sorted(CSRC.rglob("*.cpp")):
        relative = source.relative_to(CSRC).with_suffix("")
        if source.name.endswith("_cpu.cpp"):
            units = [(f"{relative}.{tier}.o", [f"-DSK_TIER={tier}", *flags]) for tier, flags in TIERS.items()]
        elif source == NODE_SOURCE:
            continue
        elif source.name.endswith("_amx.cpp"):
            units = [(f"{relative}.o", ["-DSK_TIER=amx", *AMX_FLAGS])] if amx else []
        else:
            units = [(f"{relative}.o", host_flags)]
        for name, flags in units:
            lines += [f"build {name}: compile {quote(source)}", f"  extra = {' '.join(flags)}"]
            objects.append(name)
    lines += [f"build {quote(output)}: link {' '.join(objects)}", f"default {quote(output)}", ""]
    return "\n".join(lines)


def node_ninja_file(output: Path, torch_dir: Path) -> str:
    include = torch_dir / "include"
    headers = (include, include / "torch" / "csrc" / "api" / "include", python_headers())
    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"flags = -std=gnu++20 -O2 -fPIC -fvisibility=hidden {os.environ.get('CXXFLAGS', '')}".rstrip(),
        f"includes = -I{quote(CSRC)} -I{quote(CSRC / 'common')} {' '.join(f'-isystem {quote(h)}' for h in headers)}",
        "rule library",
        "  command = $cxx -shared $flags $includes -MMD -MF $out.d $in -o $out "
        f"-L{quote(torch_dir / 'lib')} -ltorch_python -ltorch_cpu -lc10",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = C++ $out",
        f"build {quote(output)}: library {quote(NODE_SOURCE)}",
        "",
    ]
    return "\n".join(lines)


def quote(path: Path) -> str:
    """A path as ninja and the shell read it."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


setup(
    # seqkern/kernels is a link to kernels/: installed as seqkern.kernels, never as a top-level package.
    packages=[*find_packages(include=["seqkern", "seqkern.*"]), "seqkern.kernels"],
    ext_modules=[
        Extension("seqkern._C", sources=[], py_limited_api=True),
        Extension(NODE, sources=[], optional=True),
    ],
    cmdclass={"build_ext": NinjaBuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
