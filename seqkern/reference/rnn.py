"""A layer of a recurrent network over a sequence, in one or two directions, with every option. Cells: rnn_cell.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqkern.reference.dropout import keep_mask
from seqkern.reference.layer_norm import layer_norm
from seqkern.reference.rnn_cell import gru_step, lstm_cell

LSTM, GRU, RNN_TANH, RNN_RELU, ADDITIVE, INTERPOLATED = range(6)


def rnn(input: Tensor, h0: Tensor, c0: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """output (T, B, D P) and h_n (D, B, P); of an LSTM also c_n (D, B, H) and c_t, (D, T, B, H) in float32 or wider.

    `arguments` are those of `scan`, without its first: of every list, one entry for each of the D directions, or none.
    Nothing is rounded from step to step. `h0` is (D, B, P), `c0` (D, B, H); H = P but for an LSTM with a projection.
    """
    lists, options = arguments[:7], arguments[7:]
    runs = []
    for d in range(len(h0)):
        own: Any = [parameters[d] if parameters else None for parameters in lists]
        own += [*options, d == 1]
        gates = input if own[0] is not None else input.chunk(len(h0), -1)[d]
        runs.append(scan(d, gates, h0[d], None if c0 is None else c0[d], *own))
    outputs, h_n, c_n, cells = zip(*runs, strict=True)
    results = torch.cat(outputs, -1).to(input.dtype), torch.stack(h_n).to(input.dtype)
    return results if c0 is None else (*results, torch.stack(c_n).to(input.dtype), torch.stack(cells))


def scan(
    d: int, input: Tensor, h: Any, c: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, w_hr: Any, peephole: Any,
    norm: Any, lengths: Any, resets: Any, mask: Any, seed: Any, zoneout_h: float, zoneout_c: float, eps: float,
    cell: int, backwards: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Direction d by itself. Without w_ih, `input` is W x + b already.

    norm: weight and bias of a layer norm of U h, (G H,) each, and for an LSTM those of c, (H,), in one row. mask
    (D, B, P): factors of h on its way into U h, the same at all steps (Gal and Ghahramani 2016). zoneout (Krueger et
    al. 2017): the old state stays where `seed` would drop the new with that probability; without seed, the mean of it.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    x: Any
    x, h, c, w_ih, w_hh, b_ih, b_hh, w_hr, peephole, norm = (
        None if t is None else t.to(wide) for t in (input, h, c, w_ih, w_hh, b_ih, b_hh, w_hr, peephole, norm)
    )
    (steps, batch), (width, hidden) = input.shape[:2], (h.shape[1], len(w_hh) // (4, 3, 1, 1, 1, 2)[cell])
    x = x if w_ih is None else F.linear(x, w_ih, b_ih)
    if norm is not None:
        n_weight, n_bias, *of_c = norm.split([len(w_hh)] * 2 + [hidden] * 2 * (cell == LSTM))
    end = torch.full((batch,), steps, device=x.device) if lengths is None else lengths
    outputs, cells = [h] * steps, [h] * steps
    for t in reversed(range(steps)) if backwards else range(steps):
        active, old_h, old_c = (t < end)[:, None], h, c
        if resets is not None and t + backwards < steps:  # a reset is a border between the steps t - 1 and t
            border = (resets[t + backwards] & (t + backwards < end))[:, None]
            old_h, old_c = (None if s is None else torch.where(border, 0, s) for s in (h, c))
        h_gates = F.linear(old_h if mask is None else old_h * mask[d], w_hh)
        h_gates = h_gates if norm is None else layer_norm(h_gates, n_weight, n_bias, eps)
        h_gates = h_gates if b_hh is None else h_gates + b_hh
        if cell == LSTM:
            norm_c = None if norm is None else lambda c: layer_norm(c, of_c[0], of_c[1], eps)
            new_h, new_c = lstm_cell(x[t], h_gates, old_c, (0, 0, 0) if peephole is None else peephole, norm_c)
            new_h = new_h if w_hr is None else F.linear(new_h, w_hr)
            new_c = _zoneout(old_c, new_c, zoneout_c, seed, ((2 * d + 1) * steps + t) * batch)
            c = cells[t] = torch.where(active, new_c, c)
        else:
            new_h = rnn_step(x[t], h_gates, old_h, None, cell)[0]
        h = torch.where(active, _zoneout(old_h, new_h, zoneout_h, seed, (2 * d * steps + t) * batch), h)
        outputs[t], cells[t] = torch.where(active, h, 0), torch.where(active, cells[t], 0)
    empty = h.new_zeros(0, batch, width), h.new_zeros(0, batch, hidden)
    return torch.stack(outputs) if steps else empty[0], h, c, torch.stack(cells) if steps else empty[1]


def rnn_step(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Any, cell: int) -> tuple[Tensor, ...]:
    """One step from complete products: h', and for an LSTM c'."""
    if cell == LSTM:
        return lstm_cell(x_gates, h_gates, c)
    if cell == GRU:
        return (gru_step(x_gates, h_gates, h),)
    if cell == ADDITIVE:  # the state is added to
        return (h + (x_gates + h_gates).tanh(),)
    if cell == INTERPOLATED:  # f, u: what is forgotten makes room for what is new
        f, u = (x_gates + h_gates).chunk(2, -1)
        return (f.sigmoid() * h + (-f).sigmoid() * u.tanh(),)
    return ((x_gates + h_gates).tanh() if cell == RNN_TANH else (x_gates + h_gates).relu(),)


def _zoneout(old: Tensor, new: Tensor, p: float, seed: Any, row: int) -> Tensor:
    if not p:
        return new
    if seed is None:
        return p * old + (1 - p) * new
    return torch.where(keep_mask(seed, p, row + torch.arange(len(new), device=new.device), new.shape[1]), new, old)
