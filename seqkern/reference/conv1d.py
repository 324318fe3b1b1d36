"""A convolution over the rows of a sequence; and its maximum over time.

Source: LeCun et al., "Backpropagation Applied to Handwritten Zip Code Recognition", 1989; causal and dilated: van den
Oord et al., "WaveNet", 2016; the maximum: Collobert et al., "Natural Language Processing (Almost) from Scratch", 2011,
Kim, "Convolutional Neural Networks for Sentence Classification", 2014.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from seqkern.reference.sequence_pool import unpacked

ACTIVATIONS = ("none", "relu", "tanh", "sigmoid")  # they never decrease: the maximum may come first


def conv1d_outputs(rows: int, width: int, stride: int, left: int, right: int, dilation: int) -> int:
    """Rows of the result of a sequence of `rows` rows; of no rows none."""
    room = rows + left + right - dilation * (width - 1) - 1
    return room // stride + 1 if rows > 0 and room >= 0 else 0


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    stride: int,
    left: int,
    right: int,
    dilation: int,
) -> Tensor:
    """x (B, L, D), weight (C, K, D), bias (C,), lengths (B,): (B, L', C), zero behind a sequence's own rows.

    y[t] = sum over k of weight[:, k] x[t stride + k dilation - left] + bias, rows outside the sequence being zero.
    """
    dtype, width, longest = x.dtype, weight.shape[1], x.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    count = torch.full((len(x),), longest, device=x.device) if lengths is None else lengths.clamp(0, longest)
    real = torch.arange(longest, device=x.device) < count[:, None]
    span = dilation * (width - 1) + 1
    padded = F.pad(torch.where(real[..., None], x.to(wide), 0), (0, 0, left, right + span))
    outputs = conv1d_outputs(longest, width, stride, left, right, dilation)
    windows = padded.unfold(1, span, stride)[:, :outputs, :, ::dilation]  # (B, L', D, K)
    y = torch.einsum("btdk,ckd->btc", windows, weight.to(wide))
    y = y if bias is None else y + bias.to(wide)
    room = torch.where(count > 0, count + left + right - span, -1)
    behind = torch.arange(y.shape[1], device=x.device) > room.div(stride, rounding_mode="floor")[:, None]
    return y.masked_fill(behind[..., None], 0).to(dtype)


def conv1d_max(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, starts: Tensor | None, activation: int
) -> Tensor:
    """x (B, L, D), lengths (B,) or None, or packed (T, D), starts (B + 1,); weight (C, K, D), bias (C,): (B, C).

    activation(max over t of sum over k, d of weight[c, k, d] x[t + k, d] + bias[c]), t over the windows that lie within
    the sequence. A sequence of fewer than K rows has one window, with zeros behind the rows.
    """
    if starts is not None:
        x, lengths = unpacked(x, starts)
    dtype, width, longest = x.dtype, weight.shape[1], x.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    count = torch.full((len(x),), longest, device=x.device) if lengths is None else lengths.clamp(0, longest)
    real = torch.arange(longest, device=x.device) < count[:, None]
    padded = F.pad(torch.where(real[..., None], x.to(wide), 0), (0, 0, 0, width - 1 if longest else width))
    windows = padded.unfold(1, width, 1)  # (B, L, D, K)
    z = torch.einsum("btdk,ckd->btc", windows, weight.to(wide))
    last = (count - width).clamp(min=0)
    hidden = torch.arange(z.shape[1], device=x.device) > last[:, None]
    y = z.masked_fill(hidden[..., None], -math.inf).max(1)[0]
    y = y if bias is None else y + bias.to(wide)
    name = ACTIVATIONS[activation]
    return (y if name == "none" else getattr(torch, name)(y)).to(dtype)
