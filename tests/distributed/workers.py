"""What the processes of the tests do."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import seqkern
import seqkern.distributed as sd
from seqkern.testing import assert_passed, compare

BATCH, LENGTH, DIM = 2, 48, 16


def every_case() -> dict[str, dict[str, Any]]:
    """Every method, layout, causal, window and number of key heads; options and dtypes besides."""
    windows = (None, (7, 3), (5, -1))
    found = {}
    for method, layout, causal, window, kv_heads in itertools.product(
        ("allgather", "ring", "ulysses"), ("zigzag", "contiguous"), (False, True), windows, (8, 4)
    ):
        name = f"{method}-{layout}-{'causal' if causal else 'full'}-{window}-{kv_heads}"
        found[name] = {"method": method, "layout": layout, "causal": causal, "window": window, "kv_heads": kv_heads}
    plain = {"layout": "zigzag", "causal": True, "window": None, "kv_heads": 4}
    for method in ("allgather", "ring", "ulysses"):
        of_method = plain | {"method": method}
        found[f"{method}-options"] = of_method | {"softcap": 5.0, "sinks": True, "slopes": True, "window": (20, None)}
        found[f"{method}-scale"] = of_method | {"scale": 0.5, "layout": "contiguous", "sinks": True}
        found[f"{method}-float64"] = of_method | {"dtype": torch.float64, "sinks": True, "slopes": True}
        found[f"{method}-bfloat16"] = of_method | {"dtype": torch.bfloat16, "sinks": True}
        found[f"{method}-float16"] = of_method | {"dtype": torch.float16, "causal": False}
    for layout, causal, window in itertools.product(("zigzag", "contiguous"), (False, True), windows[:2]):
        name = f"dropout-{layout}-{'causal' if causal else 'full'}-{window}"
        found[name] = plain | {
            "method": "allgather", "layout": layout, "causal": causal, "window": window, "dropout_p": 0.3,
        }  # fmt: skip
    found["dropout-options"] = plain | {"method": "allgather", "dropout_p": 0.3, "sinks": True, "slopes": True}
    found["dropout-bfloat16"] = plain | {"method": "allgather", "dropout_p": 0.3, "dtype": torch.bfloat16}
    return found


def attention_cases(rank: int, ranks: int, report: Any) -> None:
    for name, case in every_case().items():
        report(name, lambda case=case: attention_case(rank, ranks, **case))


def attention_case(
    rank: int, ranks: int, method: str, layout: str, causal: bool, window: Any, kv_heads: int,
    dtype: torch.dtype = torch.float32, softcap: float | None = None, sinks: bool = False, slopes: bool = False,
    scale: float | None = None, dropout_p: float = 0.0,
) -> None:  # fmt: skip
    """Output, log-sum-exp and every gradient of the group against those of one process and the float64 result."""
    g = torch.Generator().manual_seed(1)
    q, grad_out = (torch.randn(BATCH, 8, LENGTH, DIM, generator=g) for _ in range(2))
    k, v = (torch.randn(BATCH, kv_heads, LENGTH, DIM, generator=g) for _ in range(2))
    grad_lse = torch.randn(BATCH, 8, LENGTH, generator=g)
    tensors = {"query": q, "key": k, "value": v}
    if sinks:
        tensors["sinks"] = torch.randn(8, generator=g)
    if slopes:
        tensors["alibi_slopes"] = torch.rand(8, generator=g)
    options: dict[str, Any] = {
        "causal": causal, "window": window, "softcap": softcap, "scale": scale, "dropout_p": dropout_p,
        "return_lse": True,
    }  # fmt: skip
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    grad_out = grad_out.to(dtype)

    def cut(t: Tensor) -> Tensor:
        return sd.shard_sequence(t, layout=layout)

    local = {
        name: (cut(t) if name in ("query", "key", "value") else t.clone()).requires_grad_()
        for name, t in tensors.items()
    }
    torch.manual_seed(7 + rank)  # the first process decides
    out, lse = sd.ring_attention(**local, **options, method=method, layout=layout)
    assert out.dtype == dtype
    torch.autograd.backward([out, lse], [cut(grad_out), cut(grad_lse.to(lse.dtype))])
    results = {"out": out, "lse": lse} | {f"grad of {name}": t.grad for name, t in local.items()}
    for name, t in results.items():
        assert t is not None, name
        if name in ("grad of sinks", "grad of alibi_slopes"):
            results[name] = t.detach().double()
            dist.all_reduce(results[name])
            results[name] = results[name].to(dtype)
        else:
            results[name] = sd.unshard_sequence(t.detach(), layout=layout)
    if rank == 0:
        one = whole(tensors, options, grad_out, grad_lse, dtype)
        exact = whole(tensors, options, grad_out, grad_lse, torch.float64)
        assert_passed([compare(t, one[name], exact[name], name=name) for name, t in results.items()])


def whole(
    tensors: dict[str, Tensor], options: dict[str, Any], grad_out: Tensor, grad_lse: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    leaves = {name: t.to(dtype).clone().requires_grad_() for name, t in tensors.items()}
    torch.manual_seed(7)
    out, lse = seqkern.attention(**leaves, **options)
    torch.autograd.backward([out, lse], [grad_out.to(dtype), grad_lse.to(lse.dtype)])
    found = {"out": out, "lse": lse} | {f"grad of {name}": t.grad for name, t in leaves.items()}
    return {name: t.detach() for name, t in found.items() if t is not None}
