"""Builds seqkern's one extension: C++ kernels for CPU and CUDA kernels behind the LibTorch stable ABI.

torch.utils.cpp_extension is not used: the kernels are compiled once per instruction-set tier with different flags, the
binary must not depend on the torch, Python or CUDA version it was built with, and CUDA kernels are built wherever nvcc
is, whether or not this torch was built for CUDA. Ninja does the incremental work.

Beside it, where Python's headers are there, a small library that does depend on them: the fast path (csrc/*/node.cpp),
named after the torch and the Python that it is for, and loaded by no other. It is built in place (`make build`, `pip
install -e .`) and is in no wheel.
"""

import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.resolve()
sys.path.append(str(ROOT))  # pip runs this file without its folder on the path
from setup_cuda import CUDA_TARGETS, Cuda, find_cuda, has_kernels  # noqa: E402

CSRC = ROOT / "csrc"

NODE = "seqkern._node"
NODE_SOURCES = sorted(CSRC.rglob("node.cpp"))

# The oldest torch whose stable ABI the binary needs: 2.10.
TORCH_TARGET_VERSION = "0x020a000000000000"
COMMON_FLAGS = [
    "-std=gnu++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-unknown-pragmas",
    "-Wno-psabi", "-Wno-unused-function",
]  # fmt: skip
X86_TIERS = {
    "generic": [],  # -O2 compiles a third sooner and runs 1.5 times as long: gcc 12 leaves loops without vectors
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
# The tiers with products of bfloat16, where the compiler knows them: cpu/*bf16.cpp.
AVX512BF16_FLAGS = [*X86_TIERS["avx512"], "-mavx512bf16", "-fno-exceptions"]
BF16_TIERS = {"avx512bf16": AVX512BF16_FLAGS, "amx": [*AVX512BF16_FLAGS, "-mamx-tile", "-mamx-bf16"]}
TIERS = X86_TIERS if platform.machine().lower() in ("x86_64", "amd64") else {"generic": []}


def torch_root() -> Path:
    """Where torch is installed, without importing it (an import takes longer than an up-to-date build)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("seqkern needs torch at build time: install torch first, then build without build isolation")
    return Path(spec.submodule_search_locations[0])


class NinjaBuildExt(build_ext):
    """Writes build.ninja and runs it; objects are kept, so only what changed is compiled again."""

    def run(self) -> None:
        if not (self.inplace or self.editable_mode):
            # A wheel is for every torch from 2.10 on and every Python: what is for one of each is not part of it, nor
            # what an earlier version of this file left in the folder that becomes the wheel.
            self.extensions = [ext for ext in self.extensions if ext.name != NODE]
            for left in Path(self.build_lib, *NODE.split(".")[:-1]).glob(f"{NODE.split('.')[-1]}-*.so"):
                left.unlink()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        if ext.name == NODE and not python_headers().joinpath("Python.h").exists():
            raise CompileError("no Python headers: calls go through the dispatcher, some tens of us slower")
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

        # ninja counts [k/n] on the terminal that this process writes to; in a log it prints a line for each file.
        command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(build_dir), "-f", path.name]
        if jobs := os.environ.get("MAX_JOBS"):
            command += ["-j", jobs]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            if node:
                raise CompileError("calls go through the dispatcher, see the compiler's message above")
            raise SystemExit("seqkern: the C++ build failed, see the compiler's message above")

    def get_ext_filename(self, fullname: str) -> str:
        *package, name = fullname.split(".")
        if name == NODE.rpartition(".")[2]:
            return str(Path(*package, f"{name}-{node_tag()}.so"))
        return super().get_ext_filename(fullname)


class EditableWheel(editable_wheel):
    """`pip install -e` puts a folder on the module path that holds a link to seqkern and nothing else.

    Type checkers find packages on that path alone, not by the import hook that setuptools would install. The root of
    the tree must not be on it: kernels/, tests/ and benchmarks/ would be top-level packages everywhere.
    """

    def finalize_options(self) -> None:
        link = ROOT / "editable" / "seqkern"
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path("..", "seqkern"))
        self.distribution.package_dir = {"": link.parent.name}
        super().finalize_options()


def node_tag() -> str:
    """What the fast path's library is for."""
    return f"{torch_version()}-{sys.implementation.cache_tag}"


def torch_version() -> str:
    """Without the suffix that tells CUDA's version: the headers are the same."""
    found = re.search(r"__version__ = '([^'+]+)", (torch_root() / "version.py").read_text())
    if found is None:
        raise SystemExit("seqkern: torch/version.py names no version")
    return found.group(1)


def python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def knows_bf16_tiers() -> bool:
    """Whether this is Linux on x86-64 and the compiler can build for AVX512-BF16 and AMX."""
    if len(TIERS) == 1 or not sys.platform.startswith("linux"):
        return False
    command = [*os.environ.get("CXX", "g++").split(), *BF16_TIERS["amx"], "-x", "c++", "-E", "-", "-o", os.devnull]
    try:
        return subprocess.run(command, input=b"", capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False  # the build itself will say so


def ninja_file(output: Path, torch_dir: Path) -> str:
    include = torch_dir / "include"
    cuda = find_cuda()
    host_flags = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        f"-isystem {word(include)}",
        f"-isystem {word(include / 'torch' / 'csrc' / 'api' / 'include')}",
    ]
    bf16_tiers = knows_bf16_tiers()
    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"flags = {' '.join(COMMON_FLAGS)} -DSK_BF16_TIERS={int(bf16_tiers)} {os.environ.get('CXXFLAGS', '')}".rstrip(),
        f"ldflags = {os.environ.get('LDFLAGS', '')}".rstrip(),
        f"includes = -I{word(CSRC)} -I{word(CSRC / 'common')}",
        "rule compile",
        "  command = $cxx $flags $includes $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = C++ $out",
        "rule link",
        f"  command = $cxx -shared $in -o $out -L{word(torch_dir / 'lib')} -ltorch_cpu $cuda $ldflags",
        "  description = link $out",
        *(cuda_rule(cuda) if cuda else ()),
    ]
    objects = []
    for source in sorted(CSRC.rglob("*.cu"), key=lambda p: ("backward" in p.stem, p), reverse=True) if cuda else ():
        # First, because they take longest; what has no kernels is compiled once.
        archs = cuda.archs if has_kernels(source) else cuda.archs[:1]
        name = f"{source.relative_to(CSRC).with_suffix('')}.cu.o"
        targets = " ".join(f"-gencode {CUDA_TARGETS[arch]}" for arch in archs)
        lines += [f"build {name}: cuda {quote(source)}", f"  extra = {' '.join(host_flags)} {targets}"]
        objects.append(name)
    # Kernels first, the longest of which take half a minute, so that no core waits for another at the end.
    for source in sorted(CSRC.rglob("*.cpp"), key=lambda p: (p.parent.name != "cpu", p)):
        relative = source.relative_to(CSRC).with_suffix("")
        if source in NODE_SOURCES:
            continue
        if source.parent.name == "cpu":
            tiers = TIERS if not source.stem.endswith("bf16") else BF16_TIERS if bf16_tiers else {}
            units = [(f"{relative}.{tier}.o", [f"-DSK_TIER={tier}", *flags]) for tier, flags in tiers.items()]
        elif source == CSRC / "library.cpp":
            units = [(f"{relative}.o", [*host_flags, f"'-DSK_CUDA_ARCHS=\"{' '.join(cuda.archs) if cuda else ''}\"'"])]
        else:
            units = [(f"{relative}.o", host_flags)]
        for name, flags in units:
            lines += [f"build {name}: compile {quote(source)}", f"  extra = {' '.join(flags)}"]
            objects.append(name)
    lines += [f"build {quote(output)}: link {' '.join(objects)}", f"default {quote(output)}", ""]
    return "\n".join(lines)


def cuda_rule(cuda: Cuda) -> list[str]:
    """What ptxas says of registers and spills stays beside the object, for the tests; warnings and errors are shown."""
    compiler = [word for word in os.environ.get("CXX", "").split() if not word.startswith("-")]
    host = f" -ccbin {compiler[-1]}" if compiler else ""
    return [
        f"nvcc = {word(cuda.nvcc)}{host}",
        f"cuda_flags = {' '.join(cuda.flags())} {os.environ.get('NVCCFLAGS', '')}".rstrip(),
        f"cuda = {word(cuda.library)} -Wl,--exclude-libs,ALL -ldl -lpthread -lrt",
        "rule cuda",
        "  command = $nvcc $cuda_flags $includes $extra -MMD -MF $out.d -c $in -o $out > $out.ptxas 2>&1 "
        "|| { cat $out.ptxas; exit 1; }; grep -i warning $out.ptxas || true",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = CUDA $out",
    ]


def node_ninja_file(output: Path, torch_dir: Path) -> str:
    include = torch_dir / "include"
    headers = (include, include / "torch" / "csrc" / "api" / "include", python_headers())
    # Objects of their own, for this torch and this Python: each output (in place, in a wheel) is only a link.
    objects = {f"{source.relative_to(CSRC).with_suffix('')}-{node_tag()}.o": source for source in NODE_SOURCES}
    header = f"common/node-{node_tag()}.h"
    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"flags = -std=gnu++20 -O2 -fPIC -fvisibility=hidden {os.environ.get('CXXFLAGS', '')}".rstrip(),
        f"includes = -I{word(CSRC)} -I{word(CSRC / 'common')} {' '.join(f'-isystem {word(h)}' for h in headers)}",
        "rule compile",
        "  command = $cxx $flags $includes $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = C++ $out",
        "rule link",
        f"  command = $cxx -shared $in -o $out -L{word(torch_dir / 'lib')} -ltorch_python -ltorch_cpu -lc10",
        "  description = link $out",
        # All sources begin with node.h. It includes torch's headers, which take most of the time: precompiled, once.
        "rule header",
        "  command = echo '#include \"node.h\"' > $out",
        f"build {header}: header",
        f"build {header}.gch: compile {header}",
        "  extra = -x c++-header",
        *(
            f"build {name}: compile {quote(source)} | {header}.gch\n  extra = -include {header}"
            for name, source in objects.items()
        ),
        f"build {quote(output)}: link {' '.join(objects)}",
        f"default {quote(output)}",
        "",
    ]
    return "\n".join(lines)


def quote(path: Path) -> str:
    """A path as ninja reads it where it names a file."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def word(path: Path) -> str:
    """A path as the shell reads it in a command that ninja writes."""
    return shlex.quote(str(path)).replace("$", "$$")


if __name__ == "__main__":
    setup(
        # seqkern/kernels is a link to kernels/: installed as seqkern.kernels, never as a top-level package.
        packages=[
            *find_packages(include=["seqkern", "seqkern.*"]),
            "seqkern.kernels",
            *(f"seqkern.kernels.{name}" for name in find_packages("kernels")),
        ],
        ext_modules=[
            Extension("seqkern._C", sources=[], py_limited_api=True),
            Extension(NODE, sources=[], optional=True),
        ],
        cmdclass={"build_ext": NinjaBuildExt, "editable_wheel": EditableWheel},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
