"""The long short-term memory, as Hochreiter & Schmidhuber 1997 and Jurafsky & Martin (equations 9.19-9.26) state it."""

from __future__ import annotations

import torch
from torch import Tensor


def lstm_cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step from the summed gates W x + U h + b, (B, 4H) in torch's order i, f, g, o, and the cell state c, (B, H).

    c' = sigmoid(f) * c + sigmoid(i) * tanh(g);  h' = sigmoid(o) * tanh(c'). Returns (h', c'). The forget gate is that
    of Gers et al. 2000.
    """
    wide = torch.promote_types(gates.dtype, torch.float32)
    i, f, g, o = gates.to(wide).chunk(4, 1)
    c_new = f.sigmoid() * c.to(wide) + i.sigmoid() * g.tanh()
    return (o.sigmoid() * c_new.tanh()).to(gates.dtype), c_new.to(c.dtype)


def lstm(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction over a sequence.

    Args:
        input: (T, B, I).
        h0, c0: (B, H).
        w_ih: (4H, I), W stacked in the order i, f, g, o. w_hh: (4H, H), U likewise.
        b_ih, b_hh: (4H,), or both None; torch has two biases, only their sum matters.
        reverse: runs from the last step to the first; output[t] still belongs to input[t].

    Returns:
        output (T, B, H), and h and c after the last step computed, (B, H), in the input's dtype. Computed in float32 or
        wider, and nothing is rounded from step to step.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    x, h, c, w, u = (t.to(wide) for t in (input, h0, c0, w_ih, w_hh))
    bias = 0 if b_ih is None or b_hh is None else b_ih.to(wide) + b_hh.to(wide)
    outputs = [h] * len(x)
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        h, c = lstm_cell(x[t] @ w.t() + h @ u.t() + bias, c)
        outputs[t] = h
    output = torch.stack(outputs) if outputs else h.new_empty(0, *h.shape)
    return output.to(input.dtype), h.to(input.dtype), c.to(input.dtype)
