"""Language models that count: what a network has to be compared with."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor


def unigram(train: Tensor, held_out: Tensor, vocabulary: int) -> float:
    """Perplexity of the held-out tokens by their frequencies in the training part, plus one."""
    counts = torch.bincount(train, minlength=vocabulary).double() + 1
    return (-(counts / counts.sum()).log()[held_out]).mean().exp().item()


def kneser_ney(train: Tensor, held_out: Tensor, vocabulary: int, order: int = 3, discount: float = 0.75) -> float:
    """Perplexity of the held-out tokens by interpolated Kneser-Ney, from n-grams of that order.

    P(w | context) = max(c(context w) - discount, 0) / c(context) + discount kinds(context) / c(context) P(w | shorter),
    where c counts tokens for the longest context, and kinds of preceding tokens for the shorter ones; below the unigram
    is 1 / vocabulary.
    """
    tokens, unseen = train.tolist(), held_out.tolist()
    grams = {n: Counter(zip(*(tokens[i:] for i in range(n)), strict=False)) for n in range(1, order + 1)}
    tables = []
    for n in range(1, order + 1):
        counts = grams[n] if n == order else Counter(gram[1:] for gram in grams[n + 1])
        totals: Counter[tuple[int, ...]] = Counter()
        for gram, count in counts.items():
            totals[gram[:-1]] += count
        tables.append((counts, totals, Counter(gram[:-1] for gram in counts)))
    loss = 0.0
    for place in range(len(unseen)):
        probability = 1 / vocabulary
        for n, (counts, totals, kinds) in enumerate(tables, 1):
            if place < n - 1:
                break
            gram = tuple(unseen[place - n + 1 : place + 1])
            total = totals[gram[:-1]]
            if total:
                rest = discount * kinds[gram[:-1]] / total * probability
                probability = max(counts[gram] - discount, 0) / total + rest
        loss -= math.log(probability)
    return math.exp(loss / len(unseen))
