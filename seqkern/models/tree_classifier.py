"""Classification of trees by the state of their root: a Tree-LSTM, child-sum or N-ary."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.types import Device

import seqkern
from seqkern.models._checks import check_positive
from seqkern.ops.tree_lstm import TreeSchedule


class TreeClassifier(torch.nn.Module):
    """The class of a tree, from states that are computed from its leaves up to its root.

        x_j = E[w_j],    h_j, c_j = TreeLSTM(x_j, states of the children of j),    P(class | tree) = softmax(W r + b)

    r is the state of the root, h_root, or it and a pool of the states of all nodes: [h_root ; max_j h_j]. A node of a
    child-sum tree has any number of children, whose order does not count; N-ary ones have weights for each slot.

    Args:
        vocab_size: kinds of nodes' tokens.
        num_classes: kinds of trees.
        embedding_dim: features of a token.
        hidden_size: of a node's state.
        kind: "child_sum" or "nary".
        slots: of N-ary trees, the children of a node at most.
        pool: "root", the root's state alone; "max" or "mean", that of all nodes beside it.
        dropout: of what the last layer reads, in training.
        device, dtype: of the parameters. Biases of forget gates begin at 1: states come up to the root from the start.

    Shape: forward(tokens (nodes,), schedule, lengths=None) returns logits (trees, num_classes). The nodes of all trees
    are one after another, in the order of the `seqkern.TreeSchedule`; lengths (trees,), which pools need, say how
    many each tree has. `loss(tokens, schedule, labels, lengths=None)`, labels (trees,): the mean of -log P(label), in
    nats.

    Raises:
        ValueError: an unknown kind or pool, a number below 1, a pool without lengths, or lengths that are not the
            schedule's (on a CPU: reading them on a GPU would wait for it); what the modules raise.

    Source: Tai, Socher and Manning 2015, equations 2 to 14 and section 4.1.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.TreeClassifier(100, 5, 16, 16)
        >>> schedule = seqkern.TreeSchedule.from_parents([-1, 0, 0, 2, -1, 4])  # a tree of 4 nodes and one of 2
        >>> tokens = torch.randint(100, (6,))
        >>> model.loss(tokens, schedule, torch.tensor([3, 1])).backward()
        >>> model(tokens, schedule).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        embedding_dim: int,
        hidden_size: int,
        kind: Literal["child_sum", "nary"] = "child_sum",
        *,
        slots: int = 2,
        pool: Literal["root", "max", "mean"] = "root",
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if kind not in ("child_sum", "nary"):
            raise ValueError(f"TreeClassifier: kind must be child_sum or nary, got {kind!r}")
        if pool not in ("root", "max", "mean"):
            raise ValueError(f"TreeClassifier: pool must be root, max or mean, got {pool!r}")
        check_positive(
            "TreeClassifier", vocab_size=vocab_size, num_classes=num_classes, embedding_dim=embedding_dim,
            hidden_size=hidden_size, slots=slots,
        )  # fmt: skip
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        self.embedding = torch.nn.Embedding(vocab_size, embedding_dim, **factory)
        torch.nn.init.normal_(self.embedding.weight, std=embedding_dim**-0.5)
        self.tree = (
            seqkern.nn.NaryTreeLSTM(embedding_dim, hidden_size, slots, **factory)
            if kind == "nary"
            else seqkern.nn.ChildSumTreeLSTM(embedding_dim, hidden_size, **factory)
        )
        torch.nn.init.ones_(self.tree.bias_ih.data[hidden_size : 2 * hidden_size])  # gates i, f, g, o
        self.pool: Any = pool
        self.dropout = torch.nn.Dropout(dropout)
        read = hidden_size if pool == "root" else 2 * hidden_size
        self.head = seqkern.nn.LinearCrossEntropy(read, num_classes, bias=True, **factory)

    def read(self, tokens: Tensor, schedule: TreeSchedule, lengths: Tensor | None = None) -> Tensor:
        """What the last layer reads of each tree, (trees, H or 2 H)."""
        hidden, _ = self.tree(seqkern.embedding(tokens, self.embedding.weight), schedule)
        found = hidden[schedule.roots]
        if self.pool != "root":
            if lengths is None or len(lengths) != len(found):
                got = "none" if lengths is None else len(lengths)
                raise ValueError(
                    f"TreeClassifier: pool {self.pool!r} needs lengths of the {len(found)} trees, got {got}"
                )
            if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and not _fits(lengths, schedule):
                raise ValueError(
                    f"TreeClassifier: lengths must be those of the schedule's trees, got {lengths.tolist()}"
                )
            starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            found = torch.cat([found, seqkern.sequence_pool(hidden, kind=self.pool, cu_seqlens=starts)], 1)
        return self.dropout(found)

    def forward(self, tokens: Tensor, schedule: TreeSchedule, lengths: Tensor | None = None) -> Tensor:
        return self.head.logits(self.read(tokens, schedule, lengths))

    def loss(
        self, tokens: Tensor, schedule: TreeSchedule, labels: Tensor, lengths: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        found: Tensor = self.head(self.read(tokens, schedule, lengths), labels)
        return found


def _fits(lengths: Tensor, schedule: TreeSchedule) -> bool:
    """Whether each stretch of nodes is one tree: it has its root, and no edge leaves it."""
    if bool((lengths < 1).any()) or int(lengths.sum()) != schedule.nodes:
        return False
    tree = torch.repeat_interleave(lengths)
    parents = schedule.order.repeat_interleave(schedule.child_starts.diff())
    own = torch.equal(tree[schedule.roots], torch.arange(len(lengths)))
    return own and torch.equal(tree[parents], tree[schedule.children])
