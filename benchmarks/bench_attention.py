"""Attention against torch's scaled_dot_product_attention: the grid of lengths, decoding, and every option that torch
leaves to its unfused formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import seqkern
from benchmarks.harness import Contest, backward_only, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.attention import cost
from seqkern.testing import attention_case, check_case

HEADS = 8
DIRECTIONS = {"forward": forward_only, "backward": backward_only}
sdpa = F.scaled_dot_product_attention


@pytest.mark.parametrize("length", [256, 1024, 4096, 8192], ids="N{}".format)
@pytest.mark.parametrize("head_dim", [64, 128], ids="D{}".format)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_attention(benchmark, direction, causal, head_dim, length, dtype, device):
    inputs = qkv(length, length, head_dim, dtype, device)
    size = (1, HEADS, length, length, head_dim, dtype)
    contest(
        benchmark,
        name="attention causal" if causal else "attention",
        shape=f"B1 H{HEADS} N{length} D{head_dim}",
        mode=direction,
        inputs=inputs,
        ours=lambda q, k, v: seqkern.scaled_dot_product_attention(q, k, v, is_causal=causal),
        peers={"torch": lambda q, k, v: sdpa(q, k, v, is_causal=causal)},
        work=cost(*size, causal=causal, backward=direction == "backward"),
        case=attention_case(min(length, 512), heads=2, head_dim=head_dim, causal=causal),
    )


@pytest.mark.parametrize("keys", [4096, 8192, 16384, 32768], ids="N{}".format)
@pytest.mark.parametrize("head_dim", [64, 128], ids="D{}".format)
def test_decode(benchmark, head_dim, keys, dtype, device):
    """One new token, 32 query heads on 8 key heads."""
    heads, kv_heads = 32, 8
    query, key, value = qkv(1, keys, head_dim, dtype, device, heads=heads, kv_heads=kv_heads)
    lengths = torch.full((1,), keys, device=device)
    contest(
        benchmark,
        name="attention decode",
        shape=f"B1 H{heads}/{kv_heads} N{keys} D{head_dim}",
        mode="forward",
        inputs=[query, key, value],
        ours=lambda q, k, v: seqkern.attention_decode(q, k, v, lengths),
        peers={"torch": lambda q, k, v: sdpa(q, k, v, enable_gqa=True)},
        work=cost(1, heads, 1, keys, head_dim, dtype, kv_heads=kv_heads),
        case=attention_case(1, keys, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        decodes=True,
    )


def dropped(length: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    return {
        "inputs": qkv(length, length, 64, dtype, device),
        "ours": lambda q, k, v: seqkern.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True),
        "peers": {"torch": lambda q, k, v: sdpa(q, k, v, dropout_p=0.1, is_causal=True)},
        "size": {"causal": True},
    }


def biased(length: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    bias = torch.randn(1, HEADS, length, length, device=device).to(dtype)
    return {
        "inputs": [*qkv(length, length, 64, dtype, device), bias],
        "ours": lambda q, k, v, bias: seqkern.scaled_dot_product_attention(q, k, v, bias),
        "peers": {"torch": lambda q, k, v, bias: sdpa(q, k, v, bias)},
        "size": {"mask_bytes": bias.nbytes},
    }


def wide_values(length: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    return {
        "inputs": qkv(length, length, 64, dtype, device, value_dim=128),
        "ours": lambda q, k, v: seqkern.scaled_dot_product_attention(q, k, v, is_causal=True),
        "peers": {"torch": lambda q, k, v: sdpa(q, k, v, is_causal=True)},
        "size": {"causal": True, "value_dim": 128},
    }


def window(length: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    left = length // 8
    i, j = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    visible = (j <= i) & (j >= i - left)
    return {
        "inputs": qkv(length, length, 64, dtype, device),
        "ours": lambda q, k, v: seqkern.attention(q, k, v, causal=True, window=(left, 0)),
        "peers": {"torch": lambda q, k, v: sdpa(q, k, v, visible)},
        "size": {"causal": True, "window": (left, 0)},
    }


OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "dropout 0.1": dropped,
    "bias with gradient": biased,
    "Dv 128": wide_values,
    "window N/8": window,
}


@pytest.mark.parametrize("length", [1024, 2048], ids="N{}".format)
@pytest.mark.parametrize("option", OPTIONS)
def test_option(benchmark, option, length, dtype, mode, device):
    call = OPTIONS[option](length, dtype, device)
    size = call.pop("size")
    works = [cost(1, HEADS, length, length, 64, dtype, backward=back, **size) for back in (False, True)]
    contest(
        benchmark,
        name=f"attention {option}",
        shape=f"B1 H{HEADS} N{length} D64",
        mode=mode,
        work=works[0] if mode == "forward" else Cost(sum(w.flops for w in works), sum(w.bytes for w in works)),
        case=attention_case(300, heads=2, causal=option != "bias with gradient"),
        **call,
    )


LENGTHS = (1024, 512, 700, 64, 300, 33, 128, 256)


def test_varlen(benchmark, dtype, mode, device):
    """Eight sequences of 33 to 1024 tokens, packed; torch takes them padded and masked, or one by one.

    Its jagged nested tensors have no causal attention on CPU.
    """
    total, longest = sum(LENGTHS), max(LENGTHS)
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)
    inputs = [torch.randn(total, HEADS, 64, device=device).to(dtype) for _ in range(3)]
    position = torch.arange(longest, device=device)
    real = position < torch.tensor(LENGTHS, device=device)[:, None]  # (sequences, longest)
    visible = real[:, None, None, :] & (position <= position[:, None])

    def packed(q, k, v):
        return seqkern.attention_varlen(q, k, v, starts, starts, longest, longest, causal=True)

    def one_by_one(q, k, v):
        parts = zip(*([x.transpose(0, 1)[None] for x in t.split(LENGTHS)] for t in (q, k, v)), strict=True)
        return torch.cat([sdpa(*part, is_causal=True)[0].transpose(0, 1) for part in parts])  # type: ignore[misc]

    def padded(q, k, v):
        def pad(t):
            return t.new_zeros(len(LENGTHS), longest, HEADS, 64).index_put((real,), t).transpose(1, 2)

        # This index brings the rows back.
        return sdpa(pad(q), pad(k), pad(v), visible).transpose(1, 2)[real]

    works = [
        [cost(1, HEADS, n, n, 64, dtype, causal=True, backward=back) for n in LENGTHS]
        for back in ((False, True) if mode == "forward+backward" else (False,))
    ]
    contest(
        benchmark,
        name="attention varlen",
        shape=f"{len(LENGTHS)} sequences, {total} tokens, H{HEADS} D64",
        mode=mode,
        inputs=inputs,
        ours=packed,
        peers={"torch padded": padded, "torch one by one": one_by_one},
        work=Cost(sum(w.flops for d in works for w in d), sum(w.bytes for d in works for w in d)),
        case=attention_case(300, heads=2),
    )


# ---- shared -------------------------------------------------------------------------------------------------------


def qkv(
    queries: int,
    keys: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    heads: int = HEADS,
    kv_heads: int | None = None,
    value_dim: int | None = None,
) -> list[torch.Tensor]:
    shapes = [
        (1, heads, queries, head_dim),
        (1, kv_heads or heads, keys, head_dim),
        (1, kv_heads or heads, keys, value_dim or head_dim),
    ]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def contest(
    benchmark: Any,
    *,
    name: str,
    shape: str,
    mode: str,
    inputs: Sequence[torch.Tensor],
    ours: Callable[..., Any],
    peers: dict[str, Callable[..., Any]],
    work: Cost,
    case: Any,
    decodes: bool = False,
) -> None:
    make = {"forward+backward": forward_backward, **DIRECTIONS}[mode]
    dtype, device = inputs[0].dtype, inputs[0].device.type
    compete(
        benchmark,
        Contest(
            op=name,
            shape=shape,
            mode=mode,
            dtype=dtype,
            device=device,
            ours=make(ours, inputs),
            peers={peer: make(function, inputs) for peer, function in peers.items()},
            # Decoding has no gradients, and reads nearly all of its bytes.
            gate=lambda: [r for r in check_case(case, dtype, device=device) if not (decodes and "grad" in r.name)],
            cost=work,
            reads=decodes,
        ),
    )
