"""Cases of Tree-LSTMs."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal

# A tree of three levels; a node; a chain; a node of five children, of which two are not leaves; each from its own root.
FOREST = ([-1, 0, 0, 1, 1, 2], [-1], [-1, 0, 1, 2], [-1, 0, 0, 0, 0, 0, 1, 3, 3])


def random_parents(nodes: int, seed: int = 0, widest: int = 0) -> list[int]:
    """A tree in which every node has an earlier one as parent, with at most `widest` children, if that is not 0."""
    generator = torch.Generator().manual_seed(seed)
    parents, counts = [-1], [0] * nodes
    for node in range(1, nodes):
        free = [n for n in range(node) if not widest or counts[n] < widest]
        parent = free[int(torch.randint(len(free), (), generator=generator))]
        counts[parent] += 1
        parents.append(parent)
    return parents


def schedule_of(trees: Any) -> seqkern.TreeSchedule:
    parents = torch.tensor([parent for tree in trees for parent in tree], dtype=torch.int64)
    return seqkern.TreeSchedule.from_parents(parents, [len(tree) for tree in trees])


def tree_lstm_case(
    kind: Literal["child_sum", "nary"] = "child_sum", inputs: int = 12, hidden: int = 33, *, trees: Any = FOREST,
    bias: bool = True, std: float = 1.0,
) -> Case:  # fmt: skip
    schedule = schedule_of(trees)
    starts = torch.tensor([0, *map(len, trees)]).cumsum(0).tolist()
    below: list[list[int]] = [[] for _ in range(schedule.nodes)]
    for tree, start in zip(trees, starts, strict=False):
        for node, parent in enumerate(tree):
            if parent >= 0:
                below[start + parent].append(start + node)
    nary = max(1, schedule.slots) if kind == "nary" else 0
    shapes: dict[str, tuple[int, ...]] = {
        "x": (schedule.nodes, inputs), "w_ih": (4 * hidden, inputs),
        "w_hh": ((3 + nary) * hidden, nary * hidden) if nary else (4 * hidden, hidden),
    }  # fmt: skip
    shapes |= {"b_ih": (4 * hidden,), "b_hh": (4 * hidden,)} if bias else {}

    def make(g: torch.Generator) -> dict[str, Tensor]:
        return {
            name: normal(g, *shape, scale=std if name == "x" else shape[-1] ** -0.5) for name, shape in shapes.items()
        }

    def plain(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> tuple[Tensor, Tensor]:
        """Node by node, as the papers' code does it; no tree of a case is deep."""
        states: dict[int, tuple[Tensor, Tensor]] = {}
        zeros, u_f = x.new_zeros(hidden), w_hh[hidden : 2 * hidden]
        u_iou = torch.cat([w_hh[:hidden], w_hh[2 * hidden :]])
        for node in schedule.order.tolist():
            children = [states[child] for child in below[node]]
            z_i, z_f, z_g, z_o = (F.linear(x[node], w_ih, b_ih) + (0 if b_hh is None else b_hh)).chunk(4)
            if nary:
                every = torch.cat([h for h, _ in children] + [zeros] * (nary - len(children)))
                u_i, *of_f, u_g, u_o = (w_hh @ every).chunk(3 + nary)
            else:
                u_i, u_g, u_o = (u_iou @ sum((h for h, _ in children), zeros)).chunk(3)
                of_f = [u_f @ h for h, _ in children]
            c = (z_i + u_i).sigmoid() * (z_g + u_g).tanh()
            for (_, of_child), u in zip(children, of_f, strict=False):
                c = c + (z_f + u).sigmoid() * of_child
            states[node] = ((z_o + u_o).sigmoid() * c.tanh(), c)
        every_h, every_c = zip(*(states[node] for node in range(schedule.nodes)), strict=True)
        return torch.stack(every_h), torch.stack(every_c)

    def ours(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> tuple[Tensor, Tensor]:
        return seqkern.tree_lstm(x, schedule.to(x.device), w_ih, w_hh, b_ih, b_hh, kind=kind)

    def expected(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> tuple[Tensor, Tensor]:
        x_gates = F.linear(x, w_ih, b_ih) + (0 if b_hh is None else b_hh)
        return reference.tree_lstm(x_gates, w_hh, *schedule.arguments(nary))

    return Case(inputs=make, ours=ours, torch=plain, reference=expected, outputs=("h", "c"))
