"""Attention against torch's scaled_dot_product_attention: the grid of lengths, decoding, and every option that torch
leaves to its unfused formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import seqkern
from benchmarks.harness import Contest, backward_only, chosen_device, compete, forward_backward, forward_only
from seqkern import reference
from seqkern.ops._autograd import Cost
from seqkern.ops.attention import cost
from seqkern.testing import ErrorReport, attention_case, check_case, compare

HEADS = 8
DIRECTIONS = {"forward": forward_only, "backward": backward_only}
sdpa = F.scaled_dot_product_attention


# On a CPU one sequence of 8 heads. On a GPU 16k tokens with 2048 columns of heads, as FlashAttention's papers have it.
CPU_GRID = [(n, d) for d in (64, 128) for n in (256, 1024, 4096, 8192)]
GPU_GRID = [(n, d) for d in (64, 128, 256) for n in (512, 1024, 2048, 4096, 8192, 16384, 32768)]
GPU_TOKENS, GPU_COLUMNS = 16384, 2048


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "grid" in metafunc.fixturenames:
        grid = GPU_GRID if chosen_device(metafunc.config) == "cuda" else CPU_GRID
        metafunc.parametrize("grid", grid, ids=[f"D{d}-N{n}" for n, d in grid])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_attention(benchmark, direction, causal, grid, dtype, device, path):
    length, head_dim = grid
    batch, heads = (max(1, GPU_TOKENS // length), GPU_COLUMNS // head_dim) if device == "cuda" else (1, HEADS)
    inputs = qkv(length, length, head_dim, dtype, device, batch=batch, heads=heads)
    if path == "hopper" and dtype == torch.float32:
        pytest.skip("the Hopper kernels are for 16-bit types")
    peers = {"torch": lambda q, k, v: sdpa(q, k, v, is_causal=causal)}
    if device == "cuda":
        from benchmarks.attention_peers import on_gpu

        peers = on_gpu(inputs, causal)
    contest(
        benchmark,
        name="attention causal" if causal else "attention",
        shape=f"B{batch} H{heads} N{length} D{head_dim}",
        mode=direction,
        inputs=inputs,
        ours=lambda q, k, v: seqkern.scaled_dot_product_attention(q, k, v, is_causal=causal),
        peers=peers,
        work=cost(batch, heads, length, length, head_dim, dtype, causal=causal, backward=direction == "backward"),
        case=attention_case(min(length, 512), heads=2, head_dim=head_dim, causal=causal),
    )


# Sequences, new tokens of each, keys, query heads. The last three are for a GPU's memory: its reads need many blocks to
# be fast.
DECODED = [
    (1, 1, 4096, 32), (1, 1, 8192, 32), (1, 1, 16384, 32), (1, 1, 32768, 32), (1, 1, 8192, 64), (1, 1, 8192, 128),
    (32, 1, 8192, 32), (1, 8, 8192, 32), (32, 8, 8192, 32),
]  # fmt: skip


@pytest.mark.parametrize("calls", DECODED, ids="B{0[0]} H{0[3]} Q{0[1]} N{0[2]}".format)
@pytest.mark.parametrize("head_dim", [64, 128], ids="D{}".format)
def test_decode(benchmark, head_dim, calls, dtype, device):
    """New tokens, on 8 key heads."""
    (batch, queries, keys, heads), kv_heads = calls, 8
    if device == "cpu" and (batch, queries) != (1, 1):
        pytest.skip("for GPUs")
    query, key, value = qkv(queries, keys, head_dim, dtype, device, batch=batch, heads=heads, kv_heads=kv_heads)
    lengths = torch.full((batch,), keys, device=device)
    visible = None
    if queries > 1:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)

    def ours(q, k, v):
        return seqkern.attention_decode(q, k, v, lengths)

    def theirs(q, k, v):
        return sdpa(q, k, v, visible, enable_gqa=True)

    def gate():  # of the first sequence: float64 has room for it
        q, k, v = query[:1], key[:1], value[:1]
        exact, _ = reference.attention(q.double(), k.double(), v.double(), diagonal=keys - queries, right=0)
        return [compare(ours(query, key, value)[:1], theirs(q, k, v), exact, name="out")]

    contest(
        benchmark,
        name="attention decode",
        shape=f"B{batch} H{heads}/{kv_heads} N{keys} D{head_dim}" + (f" Q{queries}" if queries > 1 else ""),
        mode="forward",
        inputs=[query, key, value],
        ours=ours,
        peers={"torch": theirs},
        work=cost(batch, heads, queries, keys, head_dim, dtype, kv_heads=kv_heads),
        gate=gate,
        reads=True,
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


# ---- masks as models hand them over ---------------------------------------------------------------------------------


def handed_over(length: int, device: str) -> dict[str, tuple[torch.Tensor, dict[str, Any] | None]]:
    """Matrices (True is visible), each with the options that say the same."""
    i, j = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    causal = j <= i
    left = length // 8
    lengths = torch.tensor([length, length * 5 // 8], device=device)
    return {
        "causal": (causal[None, None], {"causal": True}),
        "window N/8": ((causal & (j >= i - left))[None, None], {"causal": True, "window": (left, 0)}),
        "padded": ((j < lengths[:, None, None, None]).expand(2, 1, length, length), {"key_lengths": lengths}),
        "padded on the left": ((j >= length - lengths[:, None, None, None]) & causal, None),
        "random": (torch.rand(2, 1, length, length, device=device) < 0.5, None),
    }


@pytest.mark.parametrize("form", ["boolean", "numbers"])
@pytest.mark.parametrize("pattern", list(handed_over(8, "cpu")))
def test_matrix(benchmark, pattern, form, dtype, mode, device):
    """What a model that knows matrices only pays, beside seqkern's option where there is one."""
    length = 2048
    mask, options = handed_over(length, device)[pattern]
    mask = mask.contiguous() if form == "boolean" else torch.zeros(mask.shape, device=device, dtype=dtype).masked_fill(
        ~mask, float("-inf"))  # fmt: skip
    peers: dict[str, Callable[..., Any]] = {"torch": lambda q, k, v: sdpa(q, k, v, mask)}
    if options is not None:
        peers["seqkern's option"] = lambda q, k, v: seqkern.attention(q, k, v, **options)
    share = mask if form == "boolean" else mask == 0
    visible = float(share.float().mean())
    works = [cost(2, 4, length, length, 64, dtype, backward=back) for back in (False, True)]
    works = works[:1] if mode == "forward" else works
    contest(
        benchmark,
        name=f"attention, {pattern} in {form}",
        shape=f"B2 H4 N{length} D64",
        mode=mode,
        inputs=qkv(length, length, 64, dtype, device, batch=2, heads=4),
        ours=lambda q, k, v: seqkern.attention(q, k, v, attn_mask=mask),
        peers=peers,
        work=Cost(sum(round(w.flops * visible) for w in works), sum(w.bytes for w in works) + mask.nbytes),
        case=attention_case(300, heads=2, causal=True),
    )


def test_shared_bias(benchmark, dtype, mode, device):
    """T5's: one bias for all sequences, trained."""
    batch, heads, length = 4, 8, 512
    inputs = [*qkv(length, length, 64, dtype, device, batch=batch, heads=heads)]
    bias = torch.randn(1, heads, length, length, device=device).to(dtype)
    works = [cost(batch, heads, length, length, 64, dtype, backward=back) for back in (False, True)]
    works = works[:1] if mode == "forward" else works
    contest(
        benchmark,
        name="attention, trained bias",
        shape=f"B{batch} H{heads} N{length} D64",
        mode=mode,
        inputs=[*inputs, bias],
        ours=lambda q, k, v, bias: seqkern.attention(q, k, v, bias=bias),
        peers={"torch": sdpa},
        work=Cost(sum(w.flops for w in works), sum(w.bytes for w in works) + len(works) * bias.nbytes),
        case=attention_case(300, batch=2, heads=2, causal=False, mask="added", mask_shape=(1, 2, 300, 300)),
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
    batch: int = 1,
    heads: int = HEADS,
    kv_heads: int | None = None,
    value_dim: int | None = None,
) -> list[torch.Tensor]:
    shapes = [
        (batch, heads, queries, head_dim),
        (batch, kv_heads or heads, keys, head_dim),
        (batch, kv_heads or heads, keys, value_dim or head_dim),
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
    case: Any = None,
    gate: Callable[[], list[ErrorReport]] | None = None,
    reads: bool = False,
) -> None:
    """`gate` instead of a case; `reads`: nearly all of its bytes are read."""
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
            gate=gate or (lambda: check_case(case, dtype, device=device)),
            cost=work,
            reads=reads,
        ),
    )
