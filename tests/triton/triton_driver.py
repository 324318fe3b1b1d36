"""Triton without a GPU: a driver that compiles and checks every launch, and then drops it.

Triton's own JIT runs unchanged: argument binding, specialisation (by value, alignment and element of tuples), code
generation, LLVM and ptxas. Only what needs a GPU stands in: the device is sm_80, 90, 100 or 120, tensors on the CPU
stand for CUDA tensors, and the launcher checks what cuLaunchKernel would refuse and launches nothing. So results hold
garbage; what is found is everything between a call of a launcher and the launch:

    with compile_only(90) as driver:
        kernels.attention_fwd(...)                # or with use_backend("triton"): seqkern.attention(...)
    driver.launches, driver.compiled              # how many launches, how many kernels were compiled or loaded

TRITON_INTERPRET must be unset before triton is imported: tests run this in a process of its own
(tests/triton/test_triton_driver.py).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver

import seqkern.kernels
from seqkern import _library


class Device(NamedTuple):
    """What kernels and launchers ask of a GPU, from the CUDA programming guide's table of compute capabilities."""

    shared_memory: int  # bytes that one block may use
    shared_memory_per_multiprocessor: int
    multiprocessors: int  # of the largest GPU of the kind
    warp_size: int = 32
    registers: int = 65536  # of a multiprocessor, and the most of a block
    threads: int = 1024  # the most of a block
    grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)


DEVICES = {
    80: Device(163 << 10, 164 << 10, 108),
    90: Device(227 << 10, 228 << 10, 132),
    100: Device(227 << 10, 228 << 10, 148),
    120: Device(99 << 10, 100 << 10, 188),
}
_INTEGERS = {f"{'i' if signed else 'u'}{bits}": (signed, bits) for signed in (True, False) for bits in (8, 16, 32, 64)}
_INTEGERS |= {"i1": (False, 1), "u1": (False, 1)}
_POINTERS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


def check_argument(name: str, kind: Any, value: Any) -> None:
    """That a kernel compiled for an argument of `kind` can take the value: what Triton's launcher packs in C."""
    if isinstance(kind, tuple):
        if not isinstance(value, tuple) or len(value) != len(kind):
            raise TypeError(f"{name}: the kernel takes a tuple of {len(kind)}, got {value!r}")
        for i, pair in enumerate(zip(kind, value, strict=True)):
            check_argument(f"{name}[{i}]", *pair)
    elif kind == "constexpr":
        pass
    elif kind.startswith("*"):
        if not isinstance(value, torch.Tensor) or _POINTERS.get(value.dtype) != kind[1:].removeprefix("k"):
            raise TypeError(f"{name}: the kernel takes a pointer {kind}, got {getattr(value, 'dtype', repr(value))}")
    elif kind in _INTEGERS:
        signed, bits = _INTEGERS[kind]
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        if not isinstance(value, int) or not low <= value <= high:
            raise TypeError(f"{name}: the kernel takes {kind}, {low} to {high}, got {value!r}")
    elif kind in ("fp16", "bf16", "fp32", "f32", "fp64"):
        if not isinstance(value, float):
            raise TypeError(f"{name}: the kernel takes {kind}, got {value!r}")
    else:
        raise TypeError(f"{name}: the compile-only driver knows no argument of type {kind}")


class _Utils:
    """What a kernel's handle asks of the CUDA driver."""

    def __init__(self, device: Device) -> None:
        self._properties = {
            "max_shared_mem": device.shared_memory,
            "max_num_regs": device.registers,
            "multiprocessor_count": device.multiprocessors,
            "warpSize": device.warp_size,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }
        self._threads = device.threads

    def get_device_properties(self, index: int) -> dict[str, int]:
        return self._properties

    def load_binary(self, name: str, cubin: bytes, shared: int, index: int) -> tuple[object, object, int, int, int]:
        """(module, function, registers, spills, the most threads of a block). The cubin must be one."""
        if not cubin.startswith(b"\x7fELF"):
            raise RuntimeError(f"{name}: ptxas left no cubin")
        return object(), object(), 0, 0, self._threads

    def unload_module(self, module: object) -> None:
        pass


class CompileOnlyDriver(GPUDriver):
    """Stands for the driver of one GPU of compute capability `arch` (80 for 8.0)."""

    def __init__(self, arch: int, checks: bool = True) -> None:
        self.checks = checks
        self.device = DEVICES[arch]
        self.target = GPUTarget("cuda", arch, self.device.warp_size)
        self.utils = _Utils(self.device)
        self.launches = 0
        self.names: set[str] = set()  # of the kernels whose launches passed the checks
        self.compiled = 0  # specialisations: compiled, or found in Triton's cache
        self.get_device_capability = lambda device=None: divmod(arch, 10)
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device=None: 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """The launcher of a compiled kernel; Triton makes one when it loads it."""
        self.compiled += 1
        kinds = dict(source.signature)

        def launch(x: int, y: int, z: int, stream: int, function: object, packed: Any, about: Any, enter: Any,
                   leave: Any, *arguments: Any) -> None:  # fmt: skip
            self.launches += 1
            if not self.checks:
                return
            for axis, programs, most in zip("xyz", (x, y, z), self.device.grid, strict=True):
                if not 0 <= programs <= most:
                    raise RuntimeError(f"{metadata.name}: a grid takes up to {most} programs in {axis}, got {programs}")
            if metadata.shared > self.device.shared_memory:
                raise RuntimeError(
                    f"{metadata.name}: a block has {self.device.shared_memory} bytes of shared memory, the kernel "
                    f"takes {metadata.shared}"
                )
            if len(arguments) != len(kinds):
                raise TypeError(f"{metadata.name}: the kernel takes {len(kinds)} arguments, got {len(arguments)}")
            for (name, kind), value in zip(kinds.items(), arguments, strict=True):
                check_argument(f"{metadata.name}: {name}", kind, value)
            self.names.add(metadata.name)

        return launch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")  # what stands for the GPU

    def get_device_interface(self) -> ModuleType:
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> str:
        raise NotImplementedError("the compile-only driver builds no launcher in C")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("the compile-only driver launches nothing that could be timed")

    @classmethod
    def is_active(cls) -> bool:
        return True


def _kernel_modules() -> list[ModuleType]:
    """Every module of seqkern.kernels."""
    (folder,) = seqkern.kernels.__path__
    paths = (path.relative_to(folder) for path in Path(folder).rglob("*.py") if path.stem != "__init__")
    names = sorted(".".join(path.with_suffix("").parts) for path in paths)
    return [importlib.import_module(f"seqkern.kernels.{name}") for name in names]


def forget() -> None:
    """Drops the kernels that were specialised so far: their binders keep the target that they were made for."""
    for module in _kernel_modules():
        for each in vars(module).values():
            if isinstance(each, triton.runtime.JITFunction):
                each.device_caches.clear()
    seqkern.kernels._replay.forget()


@contextlib.contextmanager
def compile_only(arch: int, checks: bool = True) -> Iterator[CompileOnlyDriver]:
    """Makes CPU tensors stand for those of a GPU of capability `arch`, until the block ends.

    checks False: launches are only counted, for timing what a call costs the host.
    """
    if arch not in DEVICES:
        raise ValueError(f"arch must be one of {', '.join(map(str, DEVICES))}, got {arch!r}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels would be interpreted; unset it before triton is imported")
    driver = CompileOnlyDriver(arch, checks)
    properties = {
        "shared_memory": lambda device: driver.device.shared_memory,
        "multiprocessors": lambda device: driver.device.multiprocessors,
    }
    before = triton.runtime.driver._active
    with contextlib.ExitStack() as stack:
        for module in _kernel_modules():  # each has them under names of its own
            for name in properties.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, properties[name]))
        # the backend "triton" takes CPU tensors where kernels are interpreted: it does here, too
        stack.enter_context(mock.patch.object(_library, "triton_interpreted", return_value=True))
        forget()
        triton.runtime.driver.set_active(driver)
        try:
            yield driver
        finally:
            forget()
            if before is not None:  # else kernels that something still holds unload through this one
                triton.runtime.driver.set_active(before)
