"""Tree-LSTMs: long short-term memories whose state comes from a node's children.

Source: Tai, Socher and Manning, "Improved Semantic Representations From Tree-Structured Long Short-Term Memory
Networks", 2015: child-sum, equations 2 to 8, and N-ary, equations 9 to 14.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def tree_lstm(
    x_gates: Tensor, w_hh: Tensor, order: Tensor, levels: Tensor, child_starts: Tensor, children: Tensor, slots: Tensor,
    nary: int, leaves: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x_gates (N, 4H), W x + b of every node, gates in the order i, f, g, o (g: the paper's u); returns h and c (N, H).

    Child-sum (nary = 0), w_hh (4H, H), with h~ the sum of the children's h:

        i, g, o = sigmoid, tanh, sigmoid of x_gates + U h~,   f_k = sigmoid(x_f + U_f h_k) for each child k

    N-ary, w_hh ((3 + N)H, NH), gates in the order i, f_1, ..., f_N, g, o, where the child in slot k has h_k, and one
    that is not there 0: the same with U [h_1; ...; h_N] in the place of U h~ and of each U_f h_k. And

        c = i g + sum of f_k c_k,   h = o tanh(c)

    order: nodes by height, leaves first; levels (2, L + 1): where each height begins in it, and its edges; the node at
    place p of it has the children children[child_starts[p] : child_starts[p + 1]], nodes, in slots of the same index.
    """
    wide = torch.promote_types(x_gates.dtype, torch.float32)
    x, w_hh, hidden = x_gates.to(wide)[order], w_hh.to(wide), x_gates.shape[1] // 4
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    h = c = x[:0, :hidden]
    bounds = levels.t().tolist()
    for (begin, first), (end, last) in itertools.pairwise(bounds):
        counts = child_starts[begin + 1 : end + 1] - child_starts[begin:end]
        below, owner = place[children[first:last]], torch.repeat_interleave(counts, output_size=last - first)
        x_i, x_f, x_g, x_o = x[begin:end].unflatten(1, (4, hidden)).unbind(1)
        nothing = x.new_zeros(end - begin, (nary or 1) * hidden)
        if nary:
            at = owner[:, None], slots[first:last, None] * hidden + torch.arange(hidden, device=x.device)
            i, *f_of, g, o = (nothing.index_put(at, h[below]) @ w_hh.t()).unflatten(1, (3 + nary, hidden)).unbind(1)
            f = torch.stack(f_of, 1)[owner, slots[first:last]]
        else:
            u_i, u_f, u_g, u_o = w_hh.unflatten(0, (4, hidden)).unbind(0)
            total = nothing.index_add(0, owner, h[below])
            i, g, o, f = total @ u_i.t(), total @ u_g.t(), total @ u_o.t(), h[below] @ u_f.t()
        kept = (x_f[owner] + f).sigmoid() * c[below]
        new = (x_i + i).sigmoid() * (x_g + g).tanh() + torch.zeros_like(x_g).index_add(0, owner, kept)
        h, c = torch.cat([h, (x_o + o).sigmoid() * new.tanh()]), torch.cat([c, new])
    return h[place], c[place]
