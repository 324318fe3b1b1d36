"""Skip-gram with negative sampling: word vectors, learned by telling a word's neighbours from other words."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.types import Device

import seqkern
from seqkern.models._checks import check_positive


class SkipGram(torch.nn.Module):
    """Two vectors of each word: v as the middle of a window, u as a neighbour.

        L = -log s(v_centre . u_context) - sum over negatives of log s(-v_centre . u_negative),  s = sigmoid

    To learn vectors of a text fast and without a loop of one's own, see `seqkern.embeddings.Word2Vec`. This one is a
    module as any other: for batches and optimisers of one's own.

    Args:
        vocab_size: V. dim: of a vector.
        sparse: gradients are sparse tensors, for torch.optim.SGD and SparseAdam.
        device, dtype: of the parameters: `vectors` begins uniform in +-1 / 2 dim, as word2vec's, `contexts` with zeros.

    Shape: forward(centres (...), candidates (..., K)) returns the scores v . u, (..., K). `loss(centres, contexts,
    negatives)`, (B,), (B,) and (B, K): the mean of an example's loss in nats. A negative that is the example's context
    counts nothing.

    Raises:
        ValueError: a number below 1.

    Source: Mikolov et al., "Distributed Representations of Words and Phrases and their Compositionality", 2013.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.SkipGram(100, 16)
        >>> (centres, contexts), negatives = torch.randint(100, (2, 8)), torch.randint(100, (8, 5))
        >>> model.loss(centres, contexts, negatives).backward()
        >>> model(centres, negatives).shape
        torch.Size([8, 5])
    """

    def __init__(
        self, vocab_size: int, dim: int, *, sparse: bool = False, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        check_positive("SkipGram", vocab_size=vocab_size, dim=dim)
        super().__init__()
        self.sparse = sparse
        self.vectors = torch.nn.Parameter(torch.empty(vocab_size, dim, device=device, dtype=dtype))
        self.contexts = torch.nn.Parameter(torch.zeros(vocab_size, dim, device=device, dtype=dtype))
        torch.nn.init.uniform_(self.vectors, -0.5 / dim, 0.5 / dim)

    def forward(self, centres: Tensor, candidates: Tensor) -> Tensor:
        found: Tensor = (self.vectors[centres][..., None, :] * self.contexts[candidates]).sum(-1)
        return found

    def loss(self, centres: Tensor, contexts: Tensor, negatives: Tensor) -> Tensor:
        return seqkern.sgns_loss(centres, contexts, negatives, self.vectors, self.contexts, sparse=self.sparse)
