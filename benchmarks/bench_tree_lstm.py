"""Tree-LSTMs over syntax trees of Python functions, against plain torch: level by level, and node by node."""

from __future__ import annotations

import argparse
import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops.tree_lstm import cost
from seqkern.testing import check_case, tree_lstm_case


def function_trees(count: int) -> list[list[int]]:
    """The parents of each node of the syntax trees of `count` functions of the standard library's argparse and ast."""
    trees: list[list[int]] = []
    for module in (argparse, ast):
        for function in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if not isinstance(function, ast.FunctionDef) or len(trees) == count:
                continue
            parents: list[int] = []
            waiting: list[tuple[ast.AST, int]] = [(function, -1)]
            while waiting:
                node, parent = waiting.pop()
                waiting.extend((child, len(parents)) for child in ast.iter_child_nodes(node))
                parents.append(parent)
            trees.append(parents)
    return trees


def binary_trees(count: int, leaves: int) -> list[list[int]]:
    """Sentences' binary trees: neighbours are joined at random."""
    generator = torch.Generator().manual_seed(0)
    trees = []
    for _ in range(count):
        nodes, parents = list(range(leaves)), [-1] * (2 * leaves - 1)
        for new in range(leaves, 2 * leaves - 1):
            at = int(torch.randint(len(nodes) - 1, (), generator=generator))
            parents[nodes[at]] = parents[nodes[at + 1]] = new
            nodes[at : at + 2] = [new]
        trees.append(parents)
    return trees


FORESTS = {"64 functions": lambda: function_trees(64), "64 binary trees of 25": lambda: binary_trees(64, 25)}
KINDS = [("64 functions", "child_sum"), ("64 binary trees of 25", "child_sum"), ("64 binary trees of 25", "nary")]


class Forest:
    def __init__(self, name: str, kind: Any, device: str):
        trees = FORESTS[name]()
        parents = torch.tensor([parent for tree in trees for parent in tree])
        self.schedule = seqkern.TreeSchedule.from_parents(parents, [len(tree) for tree in trees]).to(device)
        self.kind, self.nary = kind, 2 if kind == "nary" else 0
        order, levels, starts, children, slots, *_ = self.schedule.arguments(self.nary)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=device)
        self.order, self.place = order, place
        bounds = levels.t().tolist()
        self.levels = []
        for (begin, first), (end, last) in itertools.pairwise(bounds):
            counts = starts[begin + 1 : end + 1] - starts[begin:end]
            owner = torch.repeat_interleave(counts)
            self.levels.append((begin, end, place[children[first:last]], owner, slots[first:last]))

    def ours(self, x: Tensor, w_ih: Tensor, w_hh: Tensor, b: Tensor) -> Tensor:
        return seqkern.tree_lstm(x, self.schedule, w_ih, w_hh, b, kind=self.kind)[0]

    def by_levels(self, x: Tensor, w_ih: Tensor, w_hh: Tensor, b: Tensor) -> Tensor:
        hidden = w_ih.shape[0] // 4
        gates = F.linear(x, w_ih, b)[self.order]
        u_iou, u_f = torch.cat([w_hh[:hidden], w_hh[2 * hidden : 4 * hidden]]), w_hh[hidden : 2 * hidden]
        h: list[Tensor] = []
        c: list[Tensor] = []
        for begin, end, below, owner, slots in self.levels:
            z_i, z_f, z_g, z_o = gates[begin:end].chunk(4, 1)
            kept: Any = 0
            if len(owner):
                done_h, done_c = torch.cat(h), torch.cat(c)
                of_children = done_h[below]
                if self.nary:
                    every = x.new_zeros(end - begin, self.nary, hidden).index_put((owner, slots), of_children)
                    u_i, *of_f, u_g, u_o = F.linear(every.flatten(1), w_hh).chunk(3 + self.nary, 1)
                    f = torch.stack(of_f, 1)[owner, slots]
                else:
                    total = x.new_zeros(end - begin, hidden).index_add(0, owner, of_children)
                    u_i, u_g, u_o = F.linear(total, u_iou).chunk(3, 1)
                    f = F.linear(of_children, u_f)
                z_i, z_g, z_o = z_i + u_i, z_g + u_g, z_o + u_o
                kept = torch.zeros_like(z_g).index_add(0, owner, (z_f[owner] + f).sigmoid() * done_c[below])
            c.append(z_i.sigmoid() * z_g.tanh() + kept)
            h.append(z_o.sigmoid() * c[-1].tanh())
        return torch.cat(h)[self.place]

    def by_nodes(self, x: Tensor, w_ih: Tensor, w_hh: Tensor, b: Tensor) -> Tensor:
        """As the code of the papers: a call of the cell for each node. Child-sum only."""
        hidden = w_ih.shape[0] // 4
        u_iou, u_f = torch.cat([w_hh[:hidden], w_hh[2 * hidden :]]), w_hh[hidden : 2 * hidden]
        _, _, starts, children, *_ = self.schedule.arguments(0)
        of, bounds = children.tolist(), starts.tolist()
        gates = F.linear(x, w_ih, b)
        states: dict[int, tuple[Tensor, Tensor]] = {}
        for place, node in enumerate(self.order.tolist()):
            z_i, z_f, z_g, z_o = gates[node].chunk(4)
            below = [states[child] for child in of[bounds[place] : bounds[place + 1]]]
            kept: Any = 0
            if below:
                every = torch.stack([h for h, _ in below])
                u_i, u_g, u_o = (u_iou @ every.sum(0)).chunk(3)
                z_i, z_g, z_o = z_i + u_i, z_g + u_g, z_o + u_o
                kept = ((z_f + F.linear(every, u_f)).sigmoid() * torch.stack([c for _, c in below])).sum(0)
            c = z_i.sigmoid() * z_g.tanh() + kept
            states[node] = (z_o.sigmoid() * c.tanh(), c)
        return torch.stack([states[node][0] for node in range(len(x))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [128, 300])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("part", ["forward", "forward+backward"])
def test_tree_lstm(benchmark, part, kind, hidden, dtype, device):
    name, which = kind
    forest = Forest(name, which, device)
    nodes, nary = forest.schedule.nodes, forest.nary
    shapes = (
        (nodes, hidden), (4 * hidden, hidden),
        ((3 + nary) * hidden, nary * hidden) if nary else (4 * hidden, hidden), (4 * hidden,),
    )  # fmt: skip
    inputs = [torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5 for shape in shapes]
    make = forward_only if part == "forward" else forward_backward
    peers = {"torch": make(forest.by_levels, inputs)}
    if kind == KINDS[0] and hidden == 128:
        peers["node by node"] = make(forest.by_nodes, inputs)
    compete(
        benchmark,
        Contest(
            op="tree_lstm",
            shape=f"{which} {name} ({nodes} nodes) H{hidden}",
            mode=part,
            dtype=dtype,
            device=device,
            ours=make(forest.ours, inputs),
            peers=peers,
            gate=lambda: check_case(tree_lstm_case(which), dtype, device=device),
            cost=cost(
                nodes,
                nodes - forest.schedule.arguments(nary)[-1],
                hidden,
                hidden,
                dtype,
                nary=nary,
                backward=part != "forward",
            ),
        ),
    )
