"""Cases of the loss of negative sampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal


def sgns_loss_case(
    examples: tuple[int, ...] = (7, 19), negatives: int = 5, columns: int = 33, *, ins: int = 40, outs: int = 30,
    reduction: str = "none", std: float = 0.5,
) -> Case:  # fmt: skip
    """Rows come again and again, and some negatives are the context."""
    generator = torch.Generator().manual_seed(11)
    center = torch.randint(ins, examples, generator=generator)
    context = torch.randint(outs, examples, generator=generator)
    false = torch.randint(outs, (*examples, negatives), generator=generator)
    if negatives:
        false[..., -1] = torch.where(context % 3 == 0, context, false[..., -1])

    def make(g: torch.Generator) -> dict[str, Tensor]:
        return {"w_in": normal(g, ins, columns, scale=std), "w_out": normal(g, outs, columns, scale=std)}

    def reduced(losses: Tensor) -> Tensor:
        return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()

    def ours(w_in: Tensor, w_out: Tensor) -> Tensor:
        ids = (t.to(w_in.device) for t in (center, context, false))
        return seqkern.sgns_loss(*ids, w_in, w_out, reduction=reduction)  # type: ignore[misc, arg-type]

    def plain(w_in: Tensor, w_out: Tensor) -> Tensor:
        i, c, n = (t.to(w_in.device) for t in (center, context, false))
        v = F.embedding(i, w_in)
        positive = (v * F.embedding(c, w_out)).sum(-1)
        others = (F.embedding(n, w_out) @ v[..., None]).squeeze(-1)
        ignored = torch.where(n == c[..., None], 0, F.logsigmoid(-others))
        return reduced(-F.logsigmoid(positive) - ignored.sum(-1))

    def oracle(w_in: Tensor, w_out: Tensor) -> Tensor:
        found = reference.sgns_loss(center.flatten(), context.flatten(), false.view(-1, negatives), w_in, w_out)[0]
        return reduced(found.view(center.shape))

    return Case(inputs=make, ours=ours, torch=plain, reference=oracle)
