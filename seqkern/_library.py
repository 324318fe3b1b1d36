"""Loads the extension, picks the backend of every op, and explains the choice.

A process has one backend setting (`use_backend`, or the environment variable SEQKERN_BACKEND) and one instruction-set
tier for the CPU kernels (`use_cpu_isa`, SEQKERN_CPU_ISA). "auto" means: C++ for CPU tensors, Triton for CUDA tensors.
Nothing is tried and caught: what cannot run raises, and `explain` says beforehand what would.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BACKENDS = ("auto", "reference", "cpu", "triton", "cuda")
ISAS = ("generic", "avx2", "avx512", "amx")

# Every dispatcher op, and the slice (the file name) that it belongs to.
SLICES = {
    "attention_fwd": "attention",
    "attention_bwd": "attention",
    "layer_norm_fwd": "layer_norm",
    "layer_norm_bwd": "layer_norm",
    "rnn_fwd": "rnn",
    "rnn_bwd": "rnn",
    "rnn_cell_fwd": "rnn",
    "rnn_cell_bwd": "rnn",
}
# What users call, and the slice whose kernels run.
FUNCTIONS = {
    "scaled_dot_product_attention": "attention",
    "attention": "attention",
    "attention_varlen": "attention",
    "attention_decode": "attention",
    "layer_norm": "layer_norm",
    "rms_norm": "layer_norm",
    "add_layer_norm": "layer_norm",
    "add_rms_norm": "layer_norm",
    "lstm": "rnn",
    "gru": "rnn",
    "rnn_tanh": "rnn",
    "rnn_relu": "rnn",
    "lstm_cell": "rnn",
    "gru_cell": "rnn",
    "rnn_tanh_cell": "rnn",
    "rnn_relu_cell": "rnn",
}


def _load() -> ctypes.CDLL:
    path = Path(__file__).parent / "_C.abi3.so"
    if not path.exists():
        raise ImportError(
            f"seqkern's compiled kernels are missing ({path.name} beside {Path(__file__).name}): "
            "build them with `make build`, or install a wheel"
        )
    torch.ops.load_library(str(path))
    extension = ctypes.CDLL(str(path))
    extension.seqkern_active_isa.restype = ctypes.c_char_p
    extension.seqkern_best_isa.restype = ctypes.c_char_p
    extension.seqkern_set_isa.argtypes = [ctypes.c_char_p]
    extension.seqkern_pool_set_limit.argtypes = [ctypes.c_size_t]
    extension.seqkern_pool_waiting.restype = ctypes.c_size_t
    return extension


_extension = _load()
_OPS: dict[str, Any] = {name: getattr(torch.ops.seqkern, name).default for name in SLICES}


# ---- instruction-set tier of the CPU kernels ----------------------------------------------------------------------


def cpu_isa() -> str:
    """The tier that the CPU kernels run in: "generic", "avx2", "avx512" or "amx"."""
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
    limit, 0 for none: then results can be resized in place as well, which memory that is kept does not allow.

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
        name: "auto" (C++ for CPU tensors, Triton for CUDA tensors), "reference" (the equations in plain PyTorch),
            "cpu" (C++), "triton" (CUDA tensors; CPU tensors when TRITON_INTERPRET=1), "cuda" (none yet).

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


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def backend_for(op: str, tensor: torch.Tensor) -> str:
    """The backend that runs `op` on `tensor`: "cpu", "triton" or "reference".

    Raises:
        NotImplementedError: the backend asked for cannot run on the tensor's device.
    """
    device = tensor.device.type
    choice = _backend
    if choice == "reference":
        return choice
    if choice == "auto":
        choice = "triton" if device == "cuda" else "cpu"
    if choice == "cpu" and device in ("cpu", "meta"):
        return choice
    if choice == "triton":
        if not has_triton():
            raise NotImplementedError(f"{op}: the triton backend needs the triton package, which is not installed")
        if device == "cuda" or (device == "cpu" and triton_interpreted()):
            return choice
        if device == "cpu":
            raise NotImplementedError(
                f"{op}: the triton backend runs on CPU tensors only under TRITON_INTERPRET=1 "
                '(for tests); use_backend("cpu") runs the C++ kernels'
            )
    raise NotImplementedError(
        f'{op}: the {choice} backend does not run on {device} tensors; use_backend("reference") runs everywhere'
    )


def kernel(name: str, tensor: torch.Tensor) -> Callable[..., Any]:
    """The callable behind the dispatcher op `name` for `tensor`, under the backend in force (never "reference")."""
    if _backend == "triton" and tensor.device.type == "cpu":
        return _triton_launcher(name)  # interpreted
    return _OPS[name]


@functools.cache
def _triton_launcher(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"seqkern.kernels.{SLICES[name]}"), name)


def _register_triton() -> torch.library.Library | None:
    """Puts the Triton kernels under the CUDA key; each is imported when it first runs."""
    if not has_triton() or (torch.version.cuda is None and torch.version.hip is None):
        return None
    library = torch.library.Library("seqkern", "IMPL")
    for name in SLICES:

        def launch(*args: Any, _name: str = name) -> Any:
            return _triton_launcher(_name)(*args)

        library.impl(name, launch, "CUDA")
    return library


_triton_library = _register_triton()


# ---- explanation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Which kernel an op runs, and why. `str()` reads as a sentence."""

    op: str
    backend: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.kernel} ({self.reason})"


def explain(op: str, *tensors: torch.Tensor) -> Choice:
    """Says which kernel `op` would run on `tensors` (without any: on a float32 CPU tensor), and why. Runs nothing.

    Args:
        op: "scaled_dot_product_attention", "attention", "attention_varlen", "attention_decode", "layer_norm",
            "rms_norm", "add_layer_norm", "add_rms_norm", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell",
            "gru_cell", "rnn_tanh_cell" or "rnn_relu_cell".
        tensors: the tensors that the op would get; device and dtype of the first decide.

    Raises:
        ValueError: unknown op.
        TypeError: a dtype that the op does not take.
        NotImplementedError: the backend in force cannot run it.

    Example:
        >>> import torch, seqkern
        >>> seqkern.explain("layer_norm", torch.randn(4, 8)).backend
        'cpu'
    """
    if op not in FUNCTIONS:
        raise ValueError(f"op must be one of {', '.join(FUNCTIONS)}, got {op!r}")
    tensor = tensors[0] if tensors else torch.empty(0)
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise TypeError(f"{op}: tensors must be float64, float32, bfloat16 or float16, got {tensor.dtype}")
    backend = backend_for(op, tensor)
    asked = "chosen by use_backend or SEQKERN_BACKEND" if _backend != "auto" else ""
    if backend == "reference":
        return Choice(op, backend, f"seqkern.reference.{FUNCTIONS[op]}", asked)
    if backend == "triton":
        where = "interpreted on CPU" if tensor.device.type == "cpu" else f"compiled for {tensor.device}"
        return Choice(op, backend, f"Triton, {where}", asked or "CUDA tensors run the Triton kernels")
    isa, best = cpu_isa(), available_isas()[-1]
    tier = (
        f"{isa} is the best tier this machine has" if isa == best else f"{isa} is chosen; this machine also has {best}"
    )
    if isa == "amx" and not ("attention" in op and tensor.dtype == torch.bfloat16):
        isa, tier = "avx512", f"{tier}, but has kernels for bfloat16 attention only"
    accumulate = "float64" if tensor.dtype == torch.float64 else "float32"
    copied = [i for i, t in enumerate(tensors) if t.dim() and t.size(-1) > 1 and t.stride(-1) != 1]
    note = f"; argument {copied[0]} is copied once, its last dimension is not contiguous" if copied else ""
    reason = f"{asked or 'CPU tensors run the C++ kernels'}; {tier}; accumulates in {accumulate}{note}"
    return Choice(op, backend, f"C++ {isa}", reason)


def describe_machine() -> list[tuple[str, str]]:
    """What decides which kernels run here, as (label, value) pairs: processor, tier, threads, versions, devices."""
    rows = [
        ("processor", _processor_name()),
        ("CPU kernels", f"{cpu_isa()} (this machine has {', '.join(available_isas())})"),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"),
        ("backend", _backend),
        ("torch", torch.__version__),
        (
            "triton",
            importlib.metadata.version("triton") if has_triton() else "not installed",
        ),
        ("python", platform.python_version()),
    ]
    if torch.cuda.is_available():
        rows += [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    else:
        rows.append(("cuda", "no device"))
    return rows


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if megabytes := os.environ.get("SEQKERN_CACHE_MB"):
    _set_cache_megabytes(megabytes)
if isa := os.environ.get("SEQKERN_CPU_ISA"):
    _set_cpu_isa(isa, "SEQKERN_CPU_ISA")
if backend := os.environ.get("SEQKERN_BACKEND"):
    _backend = _check_backend(backend, "SEQKERN_BACKEND")
