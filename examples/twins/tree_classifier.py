"""The Tree-LSTM classifier in plain torch: a product for all nodes of a level, not one for each node."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.twins.recurrent_lm import Head

Level = tuple[int, int, Tensor, Tensor, Tensor]  # begin, end; of its edges: the child's place, the parent's, the slot
_MADE: weakref.WeakKeyDictionary[Any, tuple[Tensor, list[Level]]] = weakref.WeakKeyDictionary()


def levels(schedule: Any) -> tuple[Tensor, list[Level]]:
    """Each node's place in the order of levels, and the levels, leaves first. Made once for a schedule: whoever makes
    the batch asks for it first, so that the training does not wait for it."""
    if schedule not in _MADE:
        place = torch.empty_like(schedule.order)
        place[schedule.order] = torch.arange(len(place))
        starts, found = schedule.child_starts, []
        for (begin, first), (end, last) in itertools.pairwise(schedule.levels.t().tolist()):
            parents = torch.repeat_interleave(starts[begin + 1 : end + 1] - starts[begin:end])
            found.append((begin, end, place[schedule.children[first:last]], parents, schedule.child_slots[first:last]))
        _MADE[schedule] = place, found
    return _MADE[schedule]


class TreeLSTM(nn.Module):
    """Holds the weights by the names that seqkern.nn's modules have."""

    def __init__(self, inputs: int, hidden: int, slots: int):
        super().__init__()
        self.hidden, self.slots = hidden, slots  # of child-sum trees 0
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty((3 + slots if slots else 4) * hidden, (slots or 1) * hidden))
        self.bias_ih, self.bias_hh = nn.Parameter(torch.empty(4 * hidden)), nn.Parameter(torch.empty(4 * hidden))

    def forward(self, x: Tensor, schedule: Any) -> Tensor:
        """The states h of all nodes, in their order."""
        place, steps = levels(schedule)
        hidden, slots = self.hidden, self.slots
        gates = F.linear(x[schedule.order], self.weight_ih, self.bias_ih + self.bias_hh)
        u_i, u_f, u_go = self.weight_hh.split([hidden, hidden * max(1, slots), 2 * hidden])
        u_igo = torch.cat([u_i, u_go])
        h: list[Tensor] = []
        c: list[Tensor] = []
        for begin, end, children, parents, slot in steps:
            i, f, g, o = gates[begin:end].chunk(4, 1)
            kept: Any = 0
            if len(parents):
                below, cells = torch.cat(h)[children], torch.cat(c)[children]
                if slots:
                    full = x.new_zeros(end - begin, slots, hidden).index_put((parents, slot), below)
                    from_i, from_f, from_g, from_o = F.linear(full.flatten(1), self.weight_hh).split(
                        [hidden, slots * hidden, hidden, hidden], 1
                    )
                    forget = from_f.unflatten(1, (slots, hidden))[parents, slot]
                else:
                    total = x.new_zeros(end - begin, hidden).index_add(0, parents, below)
                    from_i, from_g, from_o = F.linear(total, u_igo).chunk(3, 1)
                    forget = F.linear(below, u_f)
                i, g, o = i + from_i, g + from_g, o + from_o
                kept = torch.zeros_like(g).index_add(0, parents, (f[parents] + forget).sigmoid() * cells)
            c.append(i.sigmoid() * g.tanh() + kept)
            h.append(o.sigmoid() * c[-1].tanh())
        return torch.cat(h)[place]


def pooled(hidden: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """The maximum or mean of each tree's rows. torch.segment_reduce's maximum has wrong gradients where rows are equal,
    as those of equal leaves are."""
    if kind == "mean":
        return torch.segment_reduce(hidden, "mean", lengths=lengths)
    tree = torch.repeat_interleave(lengths)
    place = torch.arange(len(tree)) - (lengths.cumsum(0) - lengths)[tree]
    padded = hidden.new_full((len(lengths), int(lengths.max()), hidden.shape[1]), -torch.inf)
    return padded.index_put((tree, place), hidden).max(1).values


class TreeClassifier(nn.Module):
    def __init__(
        self, vocab_size: int, num_classes: int, embedding_dim: int, hidden_size: int, kind: str = "child_sum", *,
        slots: int = 2, pool: str = "root", dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim)
        self.tree = TreeLSTM(embedding_dim, hidden_size, slots if kind == "nary" else 0)
        self.pool, self.dropout = pool, nn.Dropout(dropout)
        self.head = Head(hidden_size if pool == "root" else 2 * hidden_size, num_classes, True)

    def forward(self, tokens: Tensor, schedule: Any, lengths: Tensor | None = None) -> Tensor:
        hidden = self.tree(self.embedding(tokens), schedule)
        found = hidden[schedule.roots]
        if self.pool != "root":
            assert lengths is not None
            found = torch.cat([found, pooled(hidden, lengths, self.pool)], 1)
        return self.head.linear(self.dropout(found))

    def loss(
        self, tokens: Tensor, schedule: Any, labels: Tensor, lengths: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        return F.cross_entropy(self(tokens, schedule, lengths), labels)
