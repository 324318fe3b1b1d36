"""Layers that several twins share, written out in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Activations = dict[str, Callable[[Tensor], Tensor]]
GATED: Activations = {"reglu": F.relu, "swiglu": F.silu, "geglu": F.gelu}
PLAIN: Activations = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}


def padding_mask(lengths: Tensor | None, length: int) -> Tensor | None:
    """(B, 1, 1, length), True where a key may be seen."""
    return None if lengths is None else (torch.arange(length) < lengths[:, None])[:, None, None]


@functools.lru_cache(maxsize=64)
def rotation(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0, 1, ...: (length, width / 2)."""
    angles = torch.arange(length, dtype=dtype)[:, None] * 10000.0 ** (-torch.arange(0, width, 2, dtype=dtype) / width)
    return angles.cos(), angles.sin()


def rotate(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, ... of (B, H, N, D): pairs (x[i], x[i + D / 2]) turned by their position's angles."""
    cosines, sines = rotation(*x.shape[-2:], x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosines - b * sines, a * sines + b * cosines], -1)


class Attention(nn.Module):
    """Multi-head attention by torch's scaled_dot_product_attention, with the parameters of nn.MultiheadAttention."""

    def __init__(self, d_model: int, nhead: int, bias: bool = True, rotary: bool = False, head_dim: int | None = None):
        super().__init__()
        self.nhead, self.rotary = nhead, rotary
        inner = nhead * (head_dim or d_model // nhead)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * inner, d_model))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * inner)) if bias else None
        self.out_proj = nn.Linear(inner, d_model, bias)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """x (B, N, d_model) attends to itself, or to memory; mask broadcasts to (B, H, N, keys), True may be seen."""
        if memory is None:
            projected: Sequence[Tensor] = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            inner = self.out_proj.in_features
            w_q, w_kv = self.in_proj_weight.split([inner, 2 * inner])
            b_q, b_kv = (None, None) if self.in_proj_bias is None else self.in_proj_bias.split([inner, 2 * inner])
            projected = (F.linear(x, w_q, b_q), *F.linear(memory, w_kv, b_kv).chunk(2, -1))
        q, k, v = (t.unflatten(-1, (self.nhead, -1)).transpose(1, 2) for t in projected)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """linear2(activation(linear1(x))); gated, the gate is the first half of linear1's output."""

    def __init__(self, d_model: int, dim_feedforward: int, activation: str = "gelu", bias: bool = True):
        super().__init__()
        self.activation = activation
        self.linear1 = nn.Linear(d_model, dim_feedforward * (2 if activation in GATED else 1), bias)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation in GATED:
            gate, up = self.linear1(x).chunk(2, -1)
            return self.linear2(GATED[self.activation](gate) * up)
        return self.linear2(PLAIN[self.activation](self.linear1(x)))


class EncoderLayer(nn.Module):
    """The block of an encoder, with the names of nn.TransformerEncoderLayer; without dropout."""

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int, activation: str = "relu", norm_first: bool = False,
        head_dim: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.norm_first, self.activation = norm_first, activation
        self.self_attn = Attention(d_model, nhead, head_dim=head_dim)
        self.linear1, self.linear2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def ffn(self, x: Tensor) -> Tensor:
        return self.linear2(PLAIN[self.activation](self.linear1(x)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.norm_first:
            x = x + self.self_attn(self.norm1(x), mask=mask)
            return x + self.ffn(self.norm2(x))
        x = self.norm1(x + self.self_attn(x, mask=mask))
        return self.norm2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    """The block of a decoder, with the names of nn.TransformerDecoderLayer; without dropout."""

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int, activation: str = "relu", norm_first: bool = False
    ):
        super().__init__()
        self.norm_first, self.activation = norm_first, activation
        self.self_attn, self.multihead_attn = Attention(d_model, nhead), Attention(d_model, nhead)
        self.linear1, self.linear2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def ffn(self, x: Tensor) -> Tensor:
        return self.linear2(PLAIN[self.activation](self.linear1(x)))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask is the memory's."""
        if self.norm_first:
            x = x + self.self_attn(self.norm1(x), causal=True)
            x = x + self.multihead_attn(self.norm2(x), memory, mask=mask)
            return x + self.ffn(self.norm3(x))
        x = self.norm1(x + self.self_attn(x, causal=True))
        x = self.norm2(x + self.multihead_attn(x, memory, mask=mask))
        return self.norm3(x + self.ffn(x))


@functools.lru_cache(maxsize=64)
def sinusoidal(length: int, width: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i + 1) the cosine: (length, width)."""
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


def ragged(rnn: nn.Module, x: Tensor, lengths: Tensor) -> tuple[Tensor, Any]:
    """A recurrent layer, batch first, on sequences of `lengths`: packed, as torch wants them."""
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output, state = rnn(packed)
    return pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])[0], state
