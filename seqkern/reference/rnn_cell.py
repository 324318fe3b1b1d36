"""One step of every recurrent cell, from the input's product x_gates = W x + b and the state's h_gates = U h + b'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def lstm_cell(
    x_gates: Tensor,
    h_gates: Tensor,
    c: Tensor,
    peephole: Any = (0, 0, 0),
    norm: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """i, f, o = sigmoid(Wx + Uh + b + p c), g = tanh(Wx + Uh + b), c' = f c + i g, h' = o tanh(c'): (h', c').

    Gates lie in torch's order i, f, g, o. Peepholes p, of i, f and o, see the cell: o the new one, i and f the old. The
    norm is that of c' on its way to h'. Hochreiter and Schmidhuber 1997; the forget gate: Gers et al. 2000; peepholes:
    Gers and Schmidhuber 2000; Jurafsky and Martin, equations 9.19-9.26.
    """
    i, f, g, o = (x_gates + h_gates).chunk(4, -1)
    p_i, p_f, p_o = peephole
    c_new = (f + p_f * c).sigmoid() * c + (i + p_i * c).sigmoid() * g.tanh()
    return (o + p_o * c_new).sigmoid() * (norm(c_new) if norm else c_new).tanh(), c_new


def gru_step(x_gates: Tensor, h_gates: Tensor, h: Tensor) -> Tensor:
    """r, z = sigmoid(Wx + Uh + b), n = tanh(W_n x + b_n + r (U_n h + b'_n)), h' = (1 - z) n + z h: torch's GRU.

    Gates lie in torch's order r, z, n. The reset gate r stands after the recurrent product: `gru_cell`.
    """
    x_r, x_z, x_n = x_gates.chunk(3, -1)
    h_r, h_z, h_n = h_gates.chunk(3, -1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    return (1 - z) * (x_n + r * h_n).tanh() + z * h


def gru_cell(
    input: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None, reset_after: bool = True
) -> Tensor:
    """A gated recurrent unit by either convention of the textbooks, which differ in n alone.

    reset_after (torch, cuDNN, seqkern): n = tanh(W_n x + b_n + r (U_n h + b'_n)), one product for all gates. Else, as
    Cho et al. 2014 and most textbooks: n = tanh(W_n x + b_n + U_n (r h) + b'_n), the reset gate before the product.
    They are different functions: weights of one are no weights of the other. Both have h' = (1 - z) n + z h here; Cho
    et al. call z what is 1 - z in Chung et al. 2014.
    """
    x_gates, h_gates = F.linear(input, w_ih, b_ih), F.linear(h, w_hh, b_hh)
    if reset_after:
        return gru_step(x_gates, h_gates, h)
    hidden = h.shape[-1]
    x_rz, x_n = x_gates.split([2 * hidden, hidden], -1)
    r, z = (x_rz + h_gates[..., : 2 * hidden]).sigmoid().chunk(2, -1)
    n = (x_n + F.linear(r * h, w_hh[2 * hidden :], None if b_hh is None else b_hh[2 * hidden :])).tanh()
    return (1 - z) * n + z * h
