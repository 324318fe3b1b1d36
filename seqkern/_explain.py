"""Which kernels run here, and why: `explain` for an op, `describe_machine` for everything that decides."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch

import seqkern
from seqkern import _attention_cuda, _direct, _library, _rnn_cuda
from seqkern._library import (
    BF16_ISAS,
    available_isas,
    backend_for,
    cpu_isa,
    cuda_archs,
    has_triton,
)
from seqkern._slices import FUNCTIONS

if TYPE_CHECKING:
    from seqkern._optimize import ModelChoices


@dataclass(frozen=True)
class Choice:
    """Which kernel an op runs, and why. `str()` reads as a sentence."""

    op: str
    backend: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.kernel} ({self.reason})"


@overload
def explain(op: str, *tensors: torch.Tensor) -> Choice: ...
@overload
def explain(op: torch.nn.Module) -> ModelChoices: ...


def explain(op: str | torch.nn.Module, *tensors: torch.Tensor) -> Choice | ModelChoices:
    """Says which kernel `op` would run on `tensors` (without any: on a float32 CPU tensor), and why. Runs nothing.

    Args:
        op: a public function that kernels serve, such as "attention" or "lstm_cell"; `python -m seqkern` lists them.
            Or a model: then the result is a table of its modules, what runs, or why seqkern does not (`optimize`).
        tensors: the tensors that the op would get; device and dtype of the first decide. For a recurrent layer in CUDA
            C++ its input and h, or its weights: then it tells which tier would hold them; for attention in CUDA C++
            query, key and value: then it tells the kernels and their tiles. In Triton it tells the launches of a call
            without options, forward and backward, with their tiles.

    Raises:
        ValueError: unknown op.
        TypeError: a dtype that the op does not take.
        NotImplementedError: the backend in force cannot run it.

    Example:
        >>> import torch, seqkern
        >>> seqkern.explain("layer_norm", torch.randn(4, 8)).backend
        'cpu'
    """
    if isinstance(op, torch.nn.Module):
        if tensors:
            raise TypeError(f"explain: a model is explained without tensors, got {len(tensors)}")
        from seqkern._optimize import explain_model  # which calls this function

        return explain_model(op)
    if op not in FUNCTIONS:
        raise ValueError(f"op must be one of {', '.join(FUNCTIONS)}, got {op!r}")
    tensor = tensors[0] if tensors else torch.empty(0)
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise TypeError(f"{op}: tensors must be float64, float32, bfloat16 or float16, got {tensor.dtype}")
    backend = backend_for(op, tensor)
    asked = "chosen by use_backend or SEQKERN_BACKEND" if _library._backend != "auto" else ""
    if backend == "reference":
        return Choice(op, backend, f"seqkern.reference.{FUNCTIONS[op].name}", asked)
    if backend == "triton":
        where = "interpreted on CPU" if tensor.device.type == "cpu" else f"compiled for {tensor.device}"
        kernels = importlib.import_module(f"seqkern.kernels.{FUNCTIONS[op].name}")
        launches = kernels.explained(op, *tensors) if tensors else []
        reason = "; ".join([asked or "CUDA tensors run the Triton kernels", *map(str, launches)])
        return Choice(op, backend, f"Triton, {where}", reason)
    if backend == "cuda":
        where = "executed on the host" if tensor.device.type == "cpu" else f"for {tensor.device}"
        reason = asked or ("it measured faster than Triton here" if has_triton() else "triton is not installed")
        kernel = f"CUDA C++, {where}"
        if FUNCTIONS[op].name == "rnn":
            served, how = _rnn_cuda.explain(op, tensors)
            reason = f"{reason}; {how}"
            kernel = kernel if served else f"Triton, step by step, {where}"
        elif FUNCTIONS[op].name == "attention" and tensors:
            reason = f"{reason}; {_attention_cuda.plan(op, tensors)}"
        return Choice(op, backend, kernel, reason)
    isa, best = cpu_isa(), available_isas()[-1]
    tier = (
        f"{isa} is the best tier this machine has" if isa == best else f"{isa} is chosen; this machine also has {best}"
    )
    if isa in BF16_ISAS and not (FUNCTIONS[op].own_bf16 and tensor.dtype == torch.bfloat16):
        own = "attention, recurrent layers and linear_cross_entropy in bfloat16 only"
        isa, tier = "avx512", f"{tier}, but has kernels of its own for {own}"
    accumulate = "float64" if tensor.dtype == torch.float64 else "float32"
    copied = [i for i, t in enumerate(tensors) if t.dim() and t.size(-1) > 1 and t.stride(-1) != 1]
    note = f"; argument {copied[0]} is copied once, its last dimension is not contiguous" if copied else ""
    reason = f"{asked or 'CPU tensors run the C++ kernels'}; {tier}; accumulates in {accumulate}{note}"
    return Choice(op, backend, f"C++ {isa}", reason)


def by_reason(choices: Iterable[Choice]) -> list[tuple[list[str], str, str]]:
    """The same choices as (ops, kernel, reason): ops with the same kernel for the same reason are told together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        groups.setdefault((choice.kernel, choice.reason), []).append(choice.op)
    return [(ops, *key) for key, ops in groups.items()]


def describe_machine() -> list[tuple[str, str]]:
    """What decides which kernels run here, as (label, value) pairs: processor, tier, threads, versions, devices."""
    rows = [
        ("seqkern", seqkern.__version__),
        ("processor", _processor_name()),
        ("CPU kernels", f"{cpu_isa()} (this machine has {', '.join(available_isas())})"),
        (
            "fast path",
            "past the dispatcher"
            if _direct.FRONTS
            else "none for this torch: pip install --no-build-isolation -e . builds it",
        ),
        ("CUDA C++ kernels", f"for {' '.join(cuda_archs())}" if cuda_archs() else "none in this build"),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"),
        ("backend", _library._backend),
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
