"""A decoder that attends in every step: the launchers, step after step on the kernels of the cell and of attention.

A step is the cell's kernel, additive attention's (of one query for each sequence; products of keys and their softmax
are torch's), and torch's products with the weights. CUDA graphs take the launches' cost away: a call records into one.
Equations and sources: seqkern/reference/attention_rnn.py.

No GPU speed has been measured yet.
"""

import torch

from .._products import add_product, product
from .._rnn_scan import CELLS, GATES, GRU, KEPT, LSTM
from . import additive_attention, rnn_cell
from ._common import accumulator
from ._replay import noted

__all__ = ["aot_configurations", "attention_rnn_bwd", "attention_rnn_fwd"]


class _Attention:
    """Attention of one step, forward and backward: additive with a weight, else products of queries and keys."""

    def __init__(self, key, value, weight, key_lengths, mask, scale):
        self.key, self.value, self.weight, self.scale = key, value, weight, scale
        self.lengths, self.mask, self.acc = key_lengths, mask, accumulator(key.dtype)
        if weight is None:
            keys = key.size(1)
            hidden = torch.zeros(key.size(0), 1, keys, dtype=torch.bool, device=key.device)
            if key_lengths is not None:
                hidden = torch.arange(keys, device=key.device) >= key_lengths[:, None, None]
            self.hidden = hidden
            unseen = hidden.all(1) if mask is None else (hidden | ~mask).all(1)
            self.seen_key = key.masked_fill(unseen[..., None], 0)  # what no step sees does not count, not even a NaN
            self.seen_value = value.masked_fill(unseen[..., None], 0)

    def __call__(self, query, t):
        """query (B, D) -> the context (B, M), in the key's dtype, and the weights (B, Tk) in the accumulator's."""
        if self.weight is not None:
            context, _, weights = additive_attention.additive_attention_fwd(
                query[:, None], self.key, self.value, self.weight, None, self.lengths, self._mask(t), True
            )
            return context[:, 0], weights[:, 0].to(self.acc)
        scores = product(query[:, None], self.key.transpose(1, 2)) * self.scale
        hidden = self.hidden if self.mask is None else self.hidden | ~self.mask[:, t : t + 1]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        weights = weights.masked_fill(hidden, 0)  # a query without keys
        return product(weights.to(query.dtype), self.seen_value)[:, 0].to(query.dtype), weights[:, 0]

    def backward(self, grad, grad_weights, query, weights, t, sums):
        """Adds to the sums (of key, value and weight) and returns the query's gradient (B, D), in its dtype."""
        if self.weight is not None:
            of_weights = None if grad_weights is None else grad_weights[:, None].to(query.dtype)
            of_query, of_key, of_value, of_weight, _, _ = additive_attention.additive_attention_bwd(
                grad[:, None], None, of_weights, query[:, None], self.key, self.value, self.weight, None, self.lengths,
                self._mask(t), False,
            )  # fmt: skip
            for total, each in zip(sums, (of_key, of_value, of_weight), strict=True):
                total += each
            return of_query[:, 0]
        p = weights[:, None]
        of_p = product(grad[:, None], self.seen_value.transpose(1, 2))
        if grad_weights is not None:
            of_p = of_p + grad_weights[:, None]
        of_p = of_p.masked_fill(p == 0, 0)
        of_scores = (p * (of_p - (p * of_p).sum(-1, keepdim=True)) * self.scale).to(query.dtype)
        sums[0] += product(of_scores.transpose(1, 2), query[:, None])
        sums[1] += product(p.to(query.dtype).transpose(1, 2), grad[:, None])
        return product(of_scores, self.seen_key)[:, 0].to(query.dtype)

    def _mask(self, t):
        return None if self.mask is None else self.mask[:, t : t + 1]


def _linear(x, weight, bias=None):
    """x weight^T + bias, in the accumulator's dtype."""
    found = product(x, weight.t())
    return found if bias is None else found + bias


def attention_rnn_fwd(
    x_gates, key, value, h, c, feed, w_feed, w_hh, b_hh, w_query, b_query, weight, w_out, b_out, key_lengths, mask,
    scale, cell, luong,
):  # fmt: skip
    """The launcher behind `seqkern::attention_rnn_fwd`: (h, c_last, context, attended, query, weights, cells,
    gates)."""
    attend = _Attention(key, value, weight, key_lengths, mask, scale)
    dtype, acc, (batch, steps) = key.dtype, attend.acc, x_gates.shape[:2]
    hidden, outputs = h.size(1), 0 if w_out is None else w_out.size(0)
    asks = w_query is not None or not luong
    states = key.new_empty(batch, steps, hidden)
    contexts = key.new_empty(batch, steps, value.size(2))
    attended = key.new_empty((batch, steps, outputs) if luong else 0)
    queries = key.new_empty((batch, steps, key.size(2)) if asks else 0)
    weights = key.new_empty((batch, steps, key.size(1)), dtype=acc)
    cells = key.new_empty((steps, batch, hidden) if cell == LSTM else 0, dtype=acc)
    gates = key.new_empty((steps, batch, KEPT[cell] * hidden), dtype=acc)
    wide_c = None if c is None else c.to(acc)

    def ask(state, t):
        query = state if w_query is None else _linear(state, w_query, b_query).to(dtype)
        if asks:
            queries[:, t] = query
        contexts[:, t], weights[:, t] = attend(query, t)
        return contexts[:, t]

    for t in range(steps):
        if not luong:
            feed = ask(h, t)
        x = x_gates[:, t].to(acc)
        if feed is not None:
            add_product(x := x.clone(), feed, w_feed.t())
        h_new, c_new, gates[t] = rnn_cell.rnn_cell_fwd(x, _linear(h, w_hh, b_hh), h.to(acc), wide_c, cell)
        if cell == LSTM:
            cells[t] = wide_c = c_new
        h = states[:, t] = h_new.to(dtype)
        if luong:
            context = ask(h, t)
            attended[:, t] = feed = torch.tanh(_linear(torch.cat([context, h], 1), w_out, b_out)).to(dtype)
    c_last = key.new_empty(0) if wide_c is None else wide_c.to(dtype, copy=True)
    return states, c_last, contexts, attended, queries, weights, cells, gates


def attention_rnn_bwd(
    grad_h, grad_c, grad_context, grad_attended, grad_weights, key, value, h0, c0, feed, w_feed, w_hh, w_query, weight,
    w_out, key_lengths, mask, scale, cell, luong, h, attended, query, weights, cells, gates,
):  # fmt: skip
    """The launcher behind `seqkern::attention_rnn_bwd`, whose results are listed there (csrc/ops.cpp)."""
    attend = _Attention(key, value, weight, key_lengths, mask, scale)
    dtype, acc, (batch, steps, hidden) = key.dtype, attend.acc, h.shape
    columns, lstm = value.size(2), cell == LSTM
    outputs = 0 if w_out is None else w_out.size(0)
    query = h if luong and w_query is None else query
    of_gates = key.new_empty(batch, steps, GATES[cell] * hidden)
    of_h_gates = torch.empty_like(of_gates) if cell == GRU else key.new_empty(0)
    of_query = key.new_empty(batch, steps, key.size(2))
    of_output = key.new_empty((batch, steps, outputs) if luong else 0)
    sums = [torch.zeros_like(each, dtype=acc) for each in (key, value)]
    sums.append(key.new_zeros(0 if weight is None else key.size(2), dtype=acc))
    dh = key.new_zeros((batch, hidden), dtype=acc)
    dc = None if not lstm else torch.zeros_like(dh) if grad_c is None else grad_c.to(acc)
    da = key.new_zeros((batch, outputs), dtype=acc)

    def ask(of_context, state, t):
        """state += what the query's gradient gives it."""
        if grad_context is not None:
            of_context = of_context + grad_context[:, t]
        of_weights = None if grad_weights is None else grad_weights[:, t]
        of_query[:, t] = attend.backward(of_context.to(dtype), of_weights, query[:, t], weights[:, t], t, sums)
        return state + (of_query[:, t] if w_query is None else product(of_query[:, t], w_query))

    for t in reversed(range(steps)):
        if grad_h is not None:
            dh = dh + grad_h[:, t]
        if luong:
            if grad_attended is not None:
                da = da + grad_attended[:, t]
            y = attended[:, t].to(acc)
            of_output[:, t] = da * (1 - y * y)
            of_both = product(of_output[:, t], w_out)
            dh = ask(of_both[:, :columns], dh + of_both[:, columns:], t)
        before, c_before = (h[:, t - 1], cells[t - 1] if lstm else None) if t else (h0, c0)
        of_x, of_h, direct, dc = rnn_cell.rnn_cell_bwd(
            dh, dc, before.to(acc), None if c_before is None else c_before.to(acc), cells[t] if lstm else None,
            gates[t], cell,
        )  # fmt: skip
        of_gates[:, t] = of_x
        if not lstm:
            dc = None
            of_h_gates[:, t] = of_h
        dh = product((of_gates if lstm else of_h_gates)[:, t], w_hh)
        dh = dh if lstm else dh + direct
        of_feed = product(of_gates[:, t], w_feed)
        if luong:
            da = of_feed
        else:
            dh = ask(of_feed, dh, t)
    return (
        of_gates, of_h_gates, sums[0].to(dtype), sums[1].to(dtype), dh.to(dtype), key.new_empty(0) if dc is None else
        dc.to(dtype), da.to(dtype) if luong else key.new_empty(0), of_query, of_output, sums[2],
    )  # fmt: skip


def explained(op, input, key=None, value=None, *others):
    """The launches of a step with additive scores, forward; nothing is launched."""
    if key is None or key.dim() != 3:
        return []
    value = key if value is None else value
    weight = key.new_empty(key.size(-1))
    query = torch.empty((key.size(0), 1, key.size(2)), dtype=key.dtype, device="meta")
    return ["for each step", *additive_attention.explained("additive_attention", query, key, value, weight)]


def aot_configurations(limit, thorough):
    """The launches of a step, which are those of other slices: a few, for tests/triton/test_triton_aot.py."""
    cells = CELLS.index("lstm"), CELLS.index("gru")
    with noted() as launches:
        for cell in cells:
            h = torch.empty((32, 256), device="meta")
            gates, kept = h.new_empty(32, GATES[cell] * 256), h.new_empty(32, KEPT[cell] * 256)
            c = h if cell == LSTM else None
            rnn_cell.rnn_cell_fwd(gates, gates, h, c, cell)
            rnn_cell.rnn_cell_bwd(h, c, h, c, c, kept, cell)
    for number, launch in enumerate(launches):
        yield f"{launch.name}-{number}", launch
    yield from additive_attention.aot_configurations(limit, False)
