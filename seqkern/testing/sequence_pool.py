"""Cases of pooling over sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.reference.sequence_pool import KINDS
from seqkern.testing._checks import Case, normal


def sequence_pool_case(
    kind: Any = "mean", lengths: Sequence[int] = (40, 1, 0, 17, 64), columns: int = 33, *, packed: bool = False,
    bidirectional: bool = False, scale: float = 1.0,
) -> Case:  # fmt: skip
    """Padded, the numbers beyond the lengths are NaN; packed, so are three rows after the last sequence."""
    longest = max(lengths, default=0)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    beyond = torch.arange(longest) >= torch.tensor(lengths)[:, None]

    def make(g: torch.Generator) -> dict[str, Tensor]:
        if packed:
            x = normal(g, int(starts[-1]) + 3, columns, scale=scale)
            x[int(starts[-1]) :] = torch.nan
            return {"x": x}
        return {"x": normal(g, len(lengths), longest, columns, scale=scale).masked_fill(beyond[..., None], torch.nan)}

    def ours(x: Tensor) -> Tensor:
        if packed:
            return seqkern.sequence_pool(x, None, kind, cu_seqlens=starts.to(x.device), bidirectional=bidirectional)
        return seqkern.sequence_pool(x, torch.tensor(lengths, device=x.device), kind, bidirectional=bidirectional)

    def plain(x: Tensor) -> Tensor:
        """A sequence at a time, by torch's own reductions."""
        found = []
        for b, n in enumerate(lengths):
            rows = x[int(starts[b]) : int(starts[b + 1])] if packed else x[b, :n]
            if n == 0:
                found.append(rows.new_full((columns,), -math.inf if kind == "logsumexp" else 0))
            elif kind in ("max", "min"):
                found.append(getattr(rows, kind)(0).values)
            elif kind in ("first", "last"):
                half = columns // 2 if bidirectional else columns
                ends = (rows[0], rows[-1]) if kind == "first" else (rows[-1], rows[0])
                found.append(torch.cat([ends[0][:half], ends[1][half:]]))
            elif (
                kind == "logsumexp" and x.dtype == torch.float64
            ):  # torch would otherwise round exactly like the oracle
                shift = rows.detach().mean(0)
                found.append((rows - shift).exp().sum(0).log() + shift)
            else:
                found.append(getattr(rows, kind)(0))
        return torch.stack(found)

    def oracle(x: Tensor) -> Tensor:
        of_padded, of_packed = (None, starts) if packed else (torch.tensor(lengths), None)
        reversed = columns // 2 if bidirectional else 0
        return reference.sequence_pool(x, of_padded, of_packed, KINDS.index(kind), reversed)

    return Case(inputs=make, ours=ours, torch=plain, reference=oracle)
