"""Negative sampling's loss of pairs of words, or of whatever two tables have rows for.

Source: Mikolov et al., "Distributed Representations of Words and Phrases and their Compositionality", 2013, equation 4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sgns_loss(center: Tensor, context: Tensor, negatives: Tensor, w_in: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor]:
    """center (N,), of w_in (V, D); context (N,) and negatives (N, K), of w_out (U, D): losses, (N,), and scores.

    -log sigmoid(v u) - sum over negatives of log sigmoid(-v u'); a negative that is the context counts nothing.
    """
    wide = torch.promote_types(w_in.dtype, torch.float32)
    v = w_in.index_select(0, center).to(wide)
    ids = torch.cat((context[:, None], negatives), 1)
    u = w_out.index_select(0, ids.reshape(-1)).to(wide).view(*ids.shape, -1)
    scores = (u * v[:, None]).sum(-1)
    false = -F.logsigmoid(-scores[:, 1:])
    return torch.where(negatives == context[:, None], 0, false).sum(1) - F.logsigmoid(scores[:, 0]), scores
