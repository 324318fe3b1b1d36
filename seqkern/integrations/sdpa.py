"""seqkern in the place of torch's `scaled_dot_product_attention`, in code that nobody has to change.

    from seqkern.integrations import sdpa
    sdpa.enable()       # until sdpa.disable(), in the whole process
    with sdpa.enable(): # or for a block

The op itself is replaced, `aten::scaled_dot_product_attention`, for tensors of a device, so that it does not matter who
calls it or how: `torch.nn.functional`, a name imported from there, `nn.MultiheadAttention`, transformers, diffusers,
compiled code that is traced meanwhile. What seqkern does not take goes to torch's own kernels, and is counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from seqkern._recording import exports_onnx
from seqkern.ops.attention import scaled_dot_product_attention

_OP = torch.ops.aten.scaled_dot_product_attention.default
_KEYS = {"cpu": ("CPU", "AutogradCPU"), "cuda": ("CUDA", "AutogradCUDA")}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor, FunctionalTensor)

_lock = threading.Lock()
_enabled: Enabled | None = None
_instead: Callable[..., Tensor] | None = None  # what takes every call (seqkern.distributed.context_parallel)


class Enabled:
    """What `enable` returns: a context manager whose end disables.

    Attributes:
        devices: whose tensors run on seqkern.
        calls: how many calls ran on seqkern, under "seqkern", and how many were left to torch, under the reason. Those
            inside compiled code count when it is traced.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices
        self.calls: Counter[str] = Counter()
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        self._library = torch.library.Library("aten", "IMPL")
        for device in devices:
            for key in _KEYS[device]:
                self._library.impl("scaled_dot_product_attention", _override, key)
        torch.backends.mha.set_fastpath_enabled(False)  # C++ that calls no op that could be replaced

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *error: object) -> None:
        if _enabled is self:
            disable()


def enable(*devices: str) -> Enabled:
    """Runs torch's `scaled_dot_product_attention` on seqkern, in the whole process, until `disable` or a `with` ends.

    The meaning of every argument is torch's; `is_causal` starts from the upper left corner. Differences: a query that
    sees no key gives 0; the dropout mask is seqkern's (both follow from torch.manual_seed); an `attn_mask` beside
    `is_causal` is allowed, what either hides is hidden.

    Left to torch: `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, tensor subclasses (DTensor), transforms of
    `torch.func` (vmap takes the op apart before anybody can count it), ONNX exports. The fast path of
    nn.MultiheadAttention and nn.TransformerEncoder, which calls no such op, is off meanwhile. Code that was compiled
    before keeps what it was compiled with.

    Args:
        devices: "cpu", "cuda"; without any, "cpu".

    Returns:
        A context manager with the counts of calls (`Enabled.calls`).

    Raises:
        ValueError: a device without kernels.
        RuntimeError: it is enabled already.

    Example:
        >>> import torch
        >>> from seqkern.integrations import sdpa
        >>> x = torch.randn(1, 2, 5, 8)
        >>> with sdpa.enable() as enabled:
        ...     y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> enabled.calls["seqkern"]
        1
    """
    global _enabled
    devices = devices or ("cpu",)
    for device in devices:
        if device not in _KEYS:
            raise ValueError(f"sdpa.enable: devices must be of {', '.join(_KEYS)}, got {device!r}")
    with _lock:
        if _enabled is not None:
            raise RuntimeError(f"sdpa.enable: enabled already, for {', '.join(_enabled.devices)}: disable() it first")
        _enabled = Enabled(devices)
        return _enabled


def disable() -> None:
    """Gives `scaled_dot_product_attention` back to torch.

    Raises:
        RuntimeError: it is not enabled.
    """
    global _enabled
    with _lock:
        if _enabled is None:
            raise RuntimeError("sdpa.disable: it is not enabled")
        _enabled._library._destroy()
        torch.backends.mha.set_fastpath_enabled(_enabled._fastpath)
        _enabled = None


def enabled() -> Enabled | None:
    """What is in force now; None if torch's own kernels are."""
    return _enabled


@contextlib.contextmanager
def redirected(instead: Callable[..., Tensor], device: str) -> Iterator[None]:
    """Hands every call, and why it would be left to torch, to `instead` until the block ends; enabled meanwhile."""
    global _instead
    if _instead is not None:
        raise RuntimeError("context_parallel: within another such block")
    if _enabled is not None and device not in _enabled.devices:
        raise RuntimeError(
            f"context_parallel: sdpa is enabled for {', '.join(_enabled.devices)} only, not for {device}"
        )
    with contextlib.nullcontext() if _enabled is not None else enable(device):
        _instead = instead
        try:
            yield
        finally:
            _instead = None


def _override(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    reason = _left_to_torch(query, key, value, attn_mask)
    if (current := _enabled) is not None:
        current.calls[reason or "seqkern"] += 1
    if (instead := _instead) is not None:
        return instead(reason, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason:
        arguments: tuple[Any, ...] = (query, key, value, attn_mask, dropout_p, is_causal)
        out: Tensor = _OP.decompose(*arguments, scale=scale, enable_gqa=enable_gqa)
        return out
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _left_to_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Why torch's kernels run a call; "" if seqkern's do."""
    for t in (query, key, value) if mask is None else (query, key, value, mask):
        if type(t) not in _TYPES:
            return f"a {type(t).__name__}"
        if t.device != query.device:
            return "tensors on different devices"
    if query.dtype not in _DTYPES:
        return f"{query.dtype}"
    if not (query.dtype == key.dtype == value.dtype):
        return "tensors of different dtypes"
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return f"an attn_mask of {mask.dtype}"
    if query.dim() < 3 or key.dim() != query.dim() or value.dim() != query.dim():
        return "shapes that torch checks"
    if query.device.type == "cuda" and max(query.shape[-1], value.shape[-1]) > 256:
        return "a head dimension above 256"
    if not (torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()):
        return "sdpa_kernel without a fused backend"
    if torch._C._are_functorch_transforms_active():  # in the middle of one, where no autograd.Function can be called
        return "a transform of torch.func"
    if exports_onnx():
        return "an ONNX export"
    return ""
