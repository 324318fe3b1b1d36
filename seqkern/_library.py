"""Loads the extension and picks the backend of every op; `_explain.py` tells of the choice.

A process has one backend setting (`use_backend`, or the environment variable SEQKERN_BACKEND) and one instruction-set
tier for the CPU kernels (`use_cpu_isa`, SEQKERN_CPU_ISA). "auto" means: C++ for CPU tensors; for CUDA tensors Triton,
or CUDA C++ where that measured faster (`FASTEST`). Nothing is tried and caught: what cannot run raises, and `explain`
says beforehand what would.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from seqkern._recording import exports_onnx
from seqkern._slices import CUDA_OPS, FUNCTIONS, OPS, SLICES

BACKENDS = ("auto", "reference", "cpu", "triton", "cuda")
ISAS = ("generic", "avx2", "avx512", "avx512bf16", "amx")
BF16_ISAS = ("avx512bf16", "amx")  # avx512, but for the bfloat16 kernels of the slices that have their own
# What "auto" runs on CUDA tensors, by slice and compute capability (90 for 9.0), where a result under
# benchmarks/results shows that CUDA C++ is faster; Triton elsewhere.
FASTEST: dict[tuple[str, int], str] = {}


def _load() -> ctypes.CDLL:
    path = Path(__file__).parent / "_C.abi3.so"
    if not path.exists():
        raise ImportError(
            f"seqkern's compiled kernels are missing ({path.name} beside {Path(__file__).name}): "
            "build them with `make build`; if a wheel is installed, run Python outside the source tree"
        )
    torch.ops.load_library(str(path))
    extension = ctypes.CDLL(str(path))
    extension.seqkern_active_isa.restype = ctypes.c_char_p
    extension.seqkern_best_isa.restype = ctypes.c_char_p
    extension.seqkern_set_isa.argtypes = [ctypes.c_char_p]
    extension.seqkern_cuda_archs.restype = ctypes.c_char_p
    extension.seqkern_pool_set_limit.argtypes = [ctypes.c_size_t]
    extension.seqkern_pool_waiting.restype = ctypes.c_size_t
    return extension


def _load_executor(path: str) -> None:
    """For the tests (tests/simt): the CUDA kernels compiled for the host, under the CPU key of `seqkern_cuda`."""
    if not Path(path).is_file():
        raise ValueError(f"SEQKERN_SIMT must name the library that tests/simt builds, got {path!r}")
    torch.ops.load_library(path)


def node_library() -> Path | None:
    """The library of the fast path, if it was built for this very torch and Python: nodes have no stable ABI."""
    version = torch.__version__.partition("+")[0]
    path = Path(__file__).parent / f"_node-{version}-{sys.implementation.cache_tag}.so"
    return path if path.exists() else None


_extension = _load()
_OPS: dict[str, Any] = {name: getattr(torch.ops.seqkern, name).default for name in OPS}
_CUDA: dict[str, Any] = {name: getattr(torch.ops.seqkern_cuda, name).default for name in CUDA_OPS}
if _executor := os.environ.get("SEQKERN_SIMT", ""):
    _load_executor(_executor)


# ---- instruction-set tier of the CPU kernels ----------------------------------------------------------------------


def cpu_isa() -> str:
    """The tier that the CPU kernels run in: "generic", "avx2", "avx512", "avx512bf16" or "amx"."""
    return _extension.seqkern_active_isa().decode()


def available_isas() -> list[str]:
    """The tiers that this machine can run, slowest first."""
    return list(ISAS[: ISAS.index(_extension.seqkern_best_isa().decode()) + 1])


def _set_cpu_isa(name: str, source: str) -> None:
    if name not in ISAS:
        raise ValueError(f"{source} must be one of {', '.join(ISAS)}, got {name!r}")
    if not _extension.seqkern_set_isa(name.encode()):
        raise ValueError(f"{source} is {name!r}, which this machine cannot run: it has {', '.join(available_isas())}")


@contextlib.contextmanager
def use_cpu_isa(name: str) -> Iterator[None]:
    """Runs the CPU kernels in another tier, process-wide, until the block ends. Raises ValueError for one it lacks."""
    previous = cpu_isa()
    _set_cpu_isa(name, "isa")
    try:
        yield
    finally:
        _set_cpu_isa(previous, "isa")


# ---- memory of large results --------------------------------------------------------------------------------------


def release_memory() -> None:
    """Gives memory that waits for the next large result back to the system.

    CPU results of 1 MB and more keep their memory for one another when they are freed, at most 512 MB of it: fresh
    pages would cost an op that only streams most of its time. The environment variable SEQKERN_CACHE_MB sets another
    limit, 0 for none. Memory that is kept cannot grow: `resize_` of such a result to more elements raises torch's
    "Trying to resize storage that is not resizable". A copy can, `result.clone().resize_(...)`, and so can every result
    with the limit 0.

    Raises:
        Nothing.

    Example:
        >>> import seqkern
        >>> seqkern.release_memory()
    """
    _extension.seqkern_pool_release()


def waiting_memory() -> int:
    """Bytes that wait for the next large result."""
    return _extension.seqkern_pool_waiting()


def _set_cache_megabytes(text: str) -> None:
    if not text.isdecimal() or int(text) > 2**40:
        raise ValueError(f"SEQKERN_CACHE_MB must be a whole number of megabytes, got {text!r}")
    _extension.seqkern_pool_set_limit(int(text) << 20)


# ---- backend ------------------------------------------------------------------------------------------------------

_backend = "auto"


def _check_backend(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Chooses the kernels of every seqkern op, process-wide, until the block ends.

    Args:
        name: "auto" (C++ for CPU tensors; for CUDA tensors the faster of Triton and CUDA C++ where both were timed,
            else Triton, or CUDA C++ where triton is not installed), "reference" (the equations in plain PyTorch),
            "cpu" (C++), "triton" (CUDA tensors; CPU tensors when TRITON_INTERPRET=1), "cuda" (CUDA C++, compiled with
            the library where nvcc was: attention, norms and recurrent layers on CUDA tensors; CPU tensors only in the
            tests' host executor).

    Raises:
        ValueError: for another name. An op that the backend cannot run raises NotImplementedError when it is called.

    Example:
        >>> import torch, seqkern
        >>> x = torch.randn(2, 8)
        >>> with seqkern.use_backend("reference"):
        ...     y = seqkern.layer_norm(x, (8,))
    """
    global _backend
    previous = _backend
    _backend = _check_backend(name, "backend")
    try:
        yield
    finally:
        _backend = previous


_has_triton = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    return _has_triton


def triton_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def cuda_archs() -> list[str]:
    """What this build's CUDA kernels were compiled for: "80", "90a" ..., and "ptx90"; none where there was no nvcc."""
    return _extension.seqkern_cuda_archs().decode().split()


def _serves(arch: str, capability: tuple[int, int]) -> bool:
    """Whether what was compiled for `arch` runs on a GPU: on later ones of its generation, with "a" on no other."""
    own = divmod(int(re.sub(r"\D", "", arch)), 10)
    if arch.startswith("ptx"):
        return capability >= own
    return capability == own or (not arch.endswith("a") and capability[0] == own[0] and capability >= own)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _present(index: int) -> bool:
    """Whether this process has that CUDA device."""
    return index < torch.cuda.device_count()


def _traced(tensor: torch.Tensor) -> bool:
    """Whether fake kernels alone will run: while compiling, and for a FakeTensor on a GPU that is not here."""
    return torch.compiler.is_compiling() or (tensor.device.type == "cuda" and not _present(tensor.device.index))


@functools.cache
def _runs_on(index: int) -> bool:
    """Whether this build has CUDA kernels for that device."""
    return torch.version.hip is None and any(_serves(arch, _capability(index)) for arch in cuda_archs())


def gpu_backends(slice: str, index: int | None = None) -> list[str]:
    """The backends that have kernels of a slice for a CUDA device (None: the current one)."""
    found = ["triton"] if has_triton() else []
    if SLICES[slice].cuda_ops and _runs_on(torch.cuda.current_device() if index is None else index):
        found.append("cuda")
    return found


@functools.cache
def _automatic(slice: str, index: int) -> str:
    """What "auto" means for a slice on a CUDA device: "triton" or "cuda"."""
    if "cuda" not in gpu_backends(slice, index):
        return "triton"
    if not has_triton():
        return "cuda"
    major, minor = _capability(index)
    return FASTEST.get((slice, 10 * major + minor), "triton")


def backend_for(op: str, tensor: torch.Tensor) -> str:
    """The backend that runs `op` on `tensor`: "cpu", "triton", "cuda" or "reference".

    Raises:
        NotImplementedError: the backend asked for cannot run on the tensor's device.
    """
    device = tensor.device.type
    choice = _backend
    if choice == "reference" or exports_onnx():
        return "reference"
    if choice == "auto":
        if device != "cuda":
            choice = "cpu"
        elif not FUNCTIONS[op].cuda_ops or _traced(tensor):  # a graph holds the op, which chooses itself
            choice = "triton"
        else:
            choice = _automatic(FUNCTIONS[op].name, tensor.device.index)
    if device == "cuda" and choice == "triton" and _traced(tensor):
        return choice
    if choice == "cpu" and device in ("cpu", "meta"):
        return choice
    if choice == "triton":
        if not has_triton():
            raise NotImplementedError(f"{op}: the triton backend needs the triton package, which is not installed")
        if device == "cuda" or (device == "cpu" and triton_interpreted()):
            return choice
        if device == "cpu":
            raise NotImplementedError(
                f"{op}: the triton backend needs CUDA tensors, these are on the CPU (in tests TRITON_INTERPRET=1 "
                'interprets it); use_backend("cpu") runs the C++ kernels'
            )
    if choice == "cuda" and device in ("cuda", "cpu"):
        _check_cuda(op, tensor)
        return choice
    raise NotImplementedError(
        f'{op}: the {choice} backend does not run on {device} tensors; use_backend("reference") runs everywhere'
    )


def _check_cuda(op: str, tensor: torch.Tensor) -> None:
    """Raises NotImplementedError where the CUDA C++ kernels cannot run `op` on a CUDA or CPU tensor."""
    if not FUNCTIONS[op].cuda_ops:
        raise NotImplementedError(
            f'{op}: it has no kernels in CUDA C++; use_backend("triton") runs it on CUDA tensors, "cpu" on CPU tensors'
        )
    if tensor.device.type == "cpu":
        if not _executor:
            raise NotImplementedError(
                f"{op}: the cuda backend needs CUDA tensors, these are on the CPU (in tests they stand for a GPU's, in "
                'the host executor that SEQKERN_SIMT names); use_backend("cpu") runs the C++ kernels'
            )
    elif not _traced(tensor) and not _runs_on(tensor.device.index):
        major, minor = _capability(tensor.device.index)
        raise NotImplementedError(
            f"{op}: this build has CUDA C++ kernels for {' '.join(cuda_archs()) or 'no GPU'}, the "
            f'device is {major}.{minor}; use_backend("triton") runs there, or build with nvcc and SEQKERN_CUDA_ARCHS'
        )


def _in_cuda(slice: str, tensor: torch.Tensor) -> bool:
    """Whether an op that a graph holds runs in CUDA C++ on `tensor`, a CUDA tensor."""
    return _backend == "cuda" or (_backend == "auto" and _automatic(slice, tensor.device.index) == "cuda")


def kernel(name: str, tensor: torch.Tensor) -> Callable[..., Any]:
    """The callable behind the dispatcher op `name` for `tensor`, under the backend in force (never "reference")."""
    if _backend in ("triton", "cuda") and tensor.device.type == "cpu":  # interpreted, or in the host executor
        return _cuda_launcher(name) if _backend == "cuda" and OPS[name].cuda_ops else _triton_launcher(name)
    return _OPS[name]


@functools.cache
def _triton_launcher(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"seqkern.kernels.{OPS[name].name}"), name)


def _cuda_launcher(name: str) -> Callable[..., Any]:
    """The op in CUDA C++, or what makes it of several."""
    module = OPS[name].cuda_module
    return getattr(importlib.import_module(f"seqkern.{module}"), name) if module else _CUDA[name]


def _for_cuda_key(name: str) -> Callable[..., Any]:
    """What the dispatcher runs for CUDA tensors: Triton, imported when it first runs, or CUDA C++."""
    if OPS[name].cuda_ops:
        slice = OPS[name].name

        def launch(*args: Any) -> Any:
            first = next(each for each in args if each is not None)  # a gradient may be None
            return (_cuda_launcher(name) if _in_cuda(slice, first) else _triton_launcher(name))(*args)

    else:

        def launch(*args: Any) -> Any:
            return _triton_launcher(name)(*args)

    return launch


def _register_for_cuda() -> torch.library.Library | None:
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    library = torch.library.Library("seqkern", "IMPL")
    for name in OPS if has_triton() else [name for name in OPS if OPS[name].cuda_ops]:
        library.impl(name, _for_cuda_key(name), "CUDA")
    return library


_cuda_library = _register_for_cuda()


if megabytes := os.environ.get("SEQKERN_CACHE_MB"):
    _set_cache_megabytes(megabytes)
if isa := os.environ.get("SEQKERN_CPU_ISA"):
    _set_cpu_isa(isa, "SEQKERN_CPU_ISA")
if backend := os.environ.get("SEQKERN_BACKEND"):
    _backend = _check_backend(backend, "SEQKERN_BACKEND")
