"""What attention is timed against on a GPU: every fused backend of torch's own attention, and FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.harness import synchronize

BACKENDS = {
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch FlashAttention": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def on_gpu(inputs: Sequence[torch.Tensor], causal: bool) -> dict[str, Callable[..., Any]]:
    """Those that take query, key and value (of one length and number of heads) and have gradients for them."""

    def of_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    found: dict[str, Callable[..., Any]] = {}
    for name, backend in BACKENDS.items():
        function = functools.partial(of_torch, backend=backend)
        if _serves(function, inputs):
            found[name] = function
    mask = _causal_mask(inputs[0].shape[2], inputs[0].device.type) if causal else None
    flex = functools.partial(_compiled_flex(), block_mask=mask)
    if _serves(flex, inputs):
        found["FlexAttention"] = flex
    return found


def _serves(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> bool:
    """torch tells what a backend does not take by raising: "No available kernel", or a compiler's error."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    try:
        out = function(*leaves)
        torch.autograd.grad(out, leaves, out.detach())
        synchronize(out.device.type)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    torch._dynamo.config.cache_size_limit = 1000  # it is compiled for every shape
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _causal_mask(length: int, device: str) -> BlockMask:
    return torch.compile(create_block_mask)(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
