"""Cases of a convolution over rows, and of its maximum over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.reference.conv1d import ACTIVATIONS
from seqkern.testing._checks import Case, normal


def conv1d_max_case(
    lengths: Sequence[int] = (40, 2, 0, 17, 5), columns: int = 33, width: int = 4, filters: int = 37, *,
    activation: Any = "relu", bias: bool = True, packed: bool = False,
) -> Case:  # fmt: skip
    """Padded, the numbers beyond the lengths are NaN; packed, so are three rows after the last sequence."""
    longest = max(lengths, default=0)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    beyond = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    number = ACTIVATIONS.index(activation)

    def make(g: torch.Generator) -> dict[str, Tensor]:
        if packed:
            x = normal(g, int(starts[-1]) + 3, columns)
            x[int(starts[-1]) :] = torch.nan
        else:
            x = normal(g, len(lengths), longest, columns).masked_fill(beyond[..., None], torch.nan)
        scale = (width * columns) ** -0.5
        found = {"x": x, "weight": normal(g, filters, width, columns, scale=scale)}
        return found | ({"bias": normal(g, filters)} if bias else {})

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if packed:
            return seqkern.conv1d_max(x, weight, bias, activation, cu_seqlens=starts.to(x.device))
        return seqkern.conv1d_max(x, weight, bias, activation, torch.tensor(lengths, device=x.device))

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A sequence at a time, by torch's convolution."""
        found = []
        for b, n in enumerate(lengths):
            rows = x[int(starts[b]) : int(starts[b + 1])] if packed else x[b, :n]
            rows = F.pad(rows, (0, 0, 0, max(0, width - n)))
            z = F.conv1d(rows.t()[None], weight.transpose(1, 2), bias)[0]
            y = z if activation == "none" else getattr(torch, activation)(z)
            found.append(y[torch.arange(filters, device=z.device), z.argmax(1)])
        return torch.stack(found)

    def oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        of_padded, of_packed = (None, starts) if packed else (torch.tensor(lengths), None)
        return reference.conv1d_max(x, weight, bias, of_padded, of_packed, number)

    return Case(inputs=make, ours=ours, torch=plain, reference=oracle)


def conv1d_case(
    lengths: Sequence[int] = (40, 2, 0, 17, 5), columns: int = 33, width: int = 4, filters: int = 37, *,
    bias: bool = True, stride: int = 1, padding: Any = "valid", dilation: int = 1,
) -> Case:  # fmt: skip
    """Padded sequences; the numbers beyond the lengths are NaN."""
    longest = max(lengths, default=0)
    beyond = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    reach = dilation * (width - 1)
    sides = {"valid": (0, 0), "same": (reach // 2, reach - reach // 2), "causal": (reach, 0)}
    left, right = (padding, padding) if isinstance(padding, int) else sides.get(padding, padding)

    def make(g: torch.Generator) -> dict[str, Tensor]:
        x = normal(g, len(lengths), longest, columns).masked_fill(beyond[..., None], torch.nan)
        found = {"x": x, "weight": normal(g, filters, width, columns, scale=(width * columns) ** -0.5)}
        return found | ({"bias": normal(g, filters)} if bias else {})

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        real = torch.tensor(lengths, device=x.device)
        return seqkern.conv1d(x, weight, bias, stride=stride, padding=padding, dilation=dilation, lengths=real)

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A sequence at a time, by torch's convolution."""
        outputs = reference.conv1d_outputs(longest, width, stride, left, right, dilation)
        found = []
        for b, n in enumerate(lengths):
            own = reference.conv1d_outputs(n, width, stride, left, right, dilation)
            y = x.new_zeros(0, filters)
            if own:
                rows = F.pad(x[b, :n].t(), (left, right))[None]
                y = F.conv1d(rows, weight.transpose(1, 2), bias, stride, 0, dilation)[0].t()
            found.append(F.pad(y, (0, 0, 0, outputs - own)))
        return torch.stack(found)

    def oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference.conv1d(x, weight, bias, torch.tensor(lengths), stride, left, right, dilation)

    return Case(inputs=make, ours=ours, torch=plain, reference=oracle)
