"""A recurrent decoder that attends to an encoder's output in every step.

Source: Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", 2015, which attends
with the state before the step; Luong et al., "Effective Approaches to Attention-based Neural Machine Translation",
2015, which attends with the state after it, equations 5-9 and, for what is fed to the next step, section 3.3.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from seqkern.reference.additive_attention import additive_scores
from seqkern.reference.rnn_cell import gru_step, lstm_cell


def attention_rnn(
    x_gates: Tensor, key: Tensor, value: Tensor, h: Tensor, c: Tensor | None, feed: Tensor | None,
    w_feed: Tensor | None, w_hh: Tensor, b_hh: Tensor | None, w_query: Tensor | None, b_query: Tensor | None,
    weight: Tensor | None, w_out: Tensor | None, b_out: Tensor | None, key_lengths: Tensor | None, mask: Tensor | None,
    scale: float, luong: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x_gates (B, T, gates), the inputs' product; key (B, Tk, D), projected; value (B, Tk, M); states (B, H).

    With state s, feed f and the cell's step (an LSTM's if there is a c, else a GRU's) on x_gates + W_feed f, W_hh s:

        Bahdanau:  context_t = attend(s_{t-1}),  f = context_t,  s_t = cell
        Luong:     f = a_{t-1},  s_t = cell,  context_t = attend(s_t),  a_t = tanh(W_out [context_t; s_t] + b_out)

    attend(s) = softmax(score) value, where the score of key k is weight^T tanh(q + k), or scale q^T k where there is no
    weight, and q = W_query s + b_query, or s. mask (B, T, Tk): true is visible.

    Returns h (B, T, H), the last c (B, H), context (B, T, M), attended (B, T, O), weights (B, T, Tk); c is empty of a
    GRU and attended in Bahdanau's order.
    """
    wide = torch.promote_types(x_gates.dtype, torch.float32)

    x_gates, key, value, h, w_hh = (t.to(wide) for t in (x_gates, key, value, h, w_hh))
    c, feed, w_feed, b_hh, w_query, b_query, weight, w_out, b_out = (
        None if t is None else t.to(wide) for t in (c, feed, w_feed, b_hh, w_query, b_query, weight, w_out, b_out)
    )
    batch, steps = x_gates.shape[:2]
    visible = torch.ones(batch, steps, key.shape[1], dtype=torch.bool, device=key.device)
    if key_lengths is not None:
        visible = visible & (torch.arange(key.shape[1], device=key.device) < key_lengths[:, None])[:, None]
    if mask is not None:
        visible = visible & mask
    seen = torch.where(visible.any(1)[..., None], value, 0)  # a hidden NaN does not count

    def attend(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        query = state if w_query is None else F.linear(state, w_query, b_query)
        if weight is None:
            scores = (key @ query[..., None])[..., 0] * scale
        else:
            scores = additive_scores(query[:, None], key, weight, None)[:, 0]
        found = _softmax(scores, visible[:, t])
        return (found[:, None] @ seen)[:, 0], found

    rows = []
    for t in range(steps):
        if not luong:
            feed, found = attend(h, t)
        gates = x_gates[:, t] if w_feed is None or feed is None else x_gates[:, t] + F.linear(feed, w_feed)
        of_h = F.linear(h, w_hh, b_hh)
        h, c = (gru_step(gates, of_h, h), None) if c is None else lstm_cell(gates, of_h, c)
        context = feed
        if luong and w_out is not None:
            context, found = attend(h, t)
            feed = F.linear(torch.cat([context, h], -1), w_out, b_out).tanh()
        rows.append((h, context, feed if luong else h[:, :0], found))
    sizes = (h.shape[1], value.shape[2], 0 if w_out is None else w_out.shape[0], key.shape[1])
    parts = list(zip(*rows, strict=True))
    states, contexts, attended, weights = [torch.stack(each, 1) for each in parts] or [
        x_gates.new_zeros(batch, 0, n) for n in sizes
    ]
    empty = x_gates.new_zeros(0)
    return states, empty if c is None else c, contexts, attended if luong else empty, weights


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """0 where nothing is visible."""
    if scores.shape[-1] == 0:
        return scores
    hidden = scores.masked_fill(~visible, -math.inf)
    top = hidden.detach().amax(-1, keepdim=True)
    exponentials = torch.where(visible, (scores - top.masked_fill(top == -math.inf, 0)).exp(), 0)
    return exponentials / exponentials.sum(-1, keepdim=True).masked_fill(~visible.any(-1, keepdim=True), 1)
