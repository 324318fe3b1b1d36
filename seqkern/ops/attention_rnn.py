"""A recurrent decoder that attends in every step: the functional API, gradients, fake kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import is_proxy, record
from seqkern._tensors import accumulator
from seqkern.ops._autograd import (
    Cost,
    apply,
    eager,
    gradients,
    per_sample,
    tangents,
    transforms_active,
    wants_gradient,
)
from seqkern.ops._rnn_checks import CELLS, GATES, LSTM, autocast, check_like, check_tensor, kept_gates
from seqkern.ops.additive_attention import additive_attention
from seqkern.ops.attention import attention
from seqkern.ops.attention_weights import attention_weights
from seqkern.ops.rnn import gru, lstm
from seqkern.ops.rnn_cell import gru_cell, lstm_cell


class AttentionRnnState(NamedTuple):
    """Where a decoder stands: its rows can be reordered, as `generate` does it for beams."""

    h: Tensor  # (B, H)
    c: Tensor | None  # (B, H), of an LSTM
    feed: Tensor | None  # (B, O): the last attended state, in Luong's order with input feeding


class AttentionRnnOutput(NamedTuple):
    """What `attention_rnn` returns."""

    output: Tensor  # (B, T, H) states in Bahdanau's order, (B, T, O) attended states in Luong's
    context: Tensor  # (B, T, M)
    state: AttentionRnnState  # after the last step
    weights: Tensor | None  # (B, T, Tk)


@explicit
def attention_rnn(
    input: Tensor,
    key: Tensor,
    value: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    w_query: Tensor | None = None,
    b_query: Tensor | None = None,
    w_score: Tensor | None = None,
    w_out: Tensor | None = None,
    b_out: Tensor | None = None,
    state: AttentionRnnState | tuple[Tensor, Tensor | None, Tensor | None] | None = None,
    cell: Literal["lstm", "gru"] = "lstm",
    order: Literal["bahdanau", "luong"] = "bahdanau",
    input_feeding: bool = True,
    scale: float = 1.0,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    return_weights: bool = False,
    **unexpected: NoReturn,
) -> AttentionRnnOutput:
    """A decoder's whole sequence, teacher-forced, that attends to an encoder's output in every step: one op.

    With the state s_t = h_t of the cell and [.; .] for concatenation::

        order="bahdanau":  context_t = attend(h_{t-1}),  h_t = cell([x_t; context_t], h_{t-1});  output h_t
        order="luong":     h_t = cell([x_t; a_{t-1}], h_{t-1}),  context_t = attend(h_t),
                           a_t = tanh(w_out [context_t; h_t] + b_out);  output a_t

    attend(s) = softmax(score(q, key)) value with q = w_query s + b_query, or q = s without w_query. The score is
    w_score^T tanh(q + key) (Bahdanau; "concat" of Luong) if there is a w_score, else scale * q^T key ("dot", and with
    projected keys "general"). Keys are projected before the call, once for each source: `nn.AttentionDecoder` does it.
    A state is worth the steps before it: the sequence may be cut, or come token by token. Without input feeding no step
    of Luong's order waits for attention: then the network, attention of all steps and the output follow each other.

    Args:
        input: (B, T, E), embedded tokens; float64, float32, bfloat16 or float16. All tensors have its dtype.
        key: (B, Tk, D), projected; with D = H unless w_query is given.
        value: (B, Tk, M).
        w_ih: (G, E + F): G = 4H gates of an LSTM in the order i, f, g, o, or 3H of a GRU in the order r, z, n, as
            torch's; F = M in Bahdanau's order, O in Luong's with input feeding, else 0.
        w_hh: (G, H). b_ih, b_hh: (G,) or None.
        w_query: (D, H) or None; additive scores need it. b_query: (D,) or None.
        w_score: (D,) for additive scores, or None for products.
        w_out: (O, M + H) in Luong's order. b_out: (O,) or None.
        state: (h (B, H), c (B, H) or None, feed (B, O) or None) before the first step, or None for zeros: c is an
            LSTM's, feed is a_{-1} of Luong's order with input feeding, zeros where it is None.
        cell: "lstm" or "gru".
        order: "bahdanau", who attends before the step, or "luong", who attends after it.
        input_feeding: whether a step of Luong's order takes the attended state of the one before.
        scale: of products.
        key_lengths: int32 or int64, (B,): a sequence has only its first key_lengths keys. Others are not read.
        mask: bool, broadcasts to (B, T, Tk), True is visible.
        return_weights: also returns the softmax, (B, T, Tk), in the input's dtype.

    Returns:
        `AttentionRnnOutput`: output, context (B, T, M), the state after the last step, and the weights or None. A
        step that sees no key has context and weights 0. Derivatives of every order for all tensors and results.
        Under autocast everything but float64 is cast.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit, an unknown cell or order, or weights that the order needs or
            does not take.
        NotImplementedError: the backend in force does not run on the device.

    Source: Bahdanau et al. 2015; Luong et al. 2015, input feeding: section 3.3.

    Example:
        >>> import torch, seqkern
        >>> x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 32)
        >>> cell = torch.nn.GRUCell(16 + 32, 24)
        >>> w_query, w_score, keys = torch.randn(20, 24), torch.randn(20), torch.randn(2, 7, 20)
        >>> found = seqkern.attention_rnn(
        ...     x, keys, memory, *cell.parameters(), w_query=w_query, w_score=w_score, cell="gru"
        ... )
        >>> found.output.shape, found.context.shape, found.state.h.shape
        (torch.Size([2, 5, 24]), torch.Size([2, 5, 32]), torch.Size([2, 24]))
    """
    if any(map(is_proxy, (input, key, value, w_ih, w_hh, w_query, w_score, w_out, key_lengths, mask))):
        return record(attention_rnn, locals())
    if unexpected:
        refuse(attention_rnn, unexpected)
    op = "attention_rnn"
    if cell not in ("lstm", "gru"):
        raise ValueError(f'{op}: cell must be "lstm" or "gru", got {cell!r}')
    if order not in ("bahdanau", "luong"):
        raise ValueError(f'{op}: order must be "bahdanau" or "luong", got {order!r}')
    luong, kind = order == "luong", CELLS[cell]
    outputs = _check_weights(
        op, input, key, value, w_ih, w_hh, b_ih, b_hh, w_query, b_query, w_score, w_out, b_out, kind, luong,
        input_feeding,
    )  # fmt: skip
    batch, hidden = input.shape[0], w_hh.shape[1]
    h, c, feed = _state(op, input, state, kind, hidden, outputs if luong and input_feeding else None)
    lengths = None if key_lengths is None else _lengths(op, key_lengths, input)
    visible = None if mask is None else _visible(op, mask, input, key)
    input, key, value, w_ih, w_hh, b_ih, b_hh, w_query, b_query, w_score, w_out, b_out, h, c, feed = autocast(
        input, key, value, w_ih, w_hh, b_ih, b_hh, w_query, b_query, w_score, w_out, b_out, h, c, feed
    )
    transforms_active()  # raises before Dynamo looks at a tensor
    weights: Tensor | None
    if luong and not input_feeding:
        states, c_last = _network(cell, input, w_ih, w_hh, b_ih, b_hh, h, c)
        context, weights = _attend(
            states, key, value, w_query, b_query, w_score, scale, lengths, visible, return_weights
        )
        output = F.linear(torch.cat([context, states], -1), w_out, b_out).tanh()
        last = states[:, -1] if states.shape[1] else h
        return AttentionRnnOutput(output, context, AttentionRnnState(last, c_last, None), weights)
    if input.shape[1] == 1:  # weights that are used once are not packed, nor keys prepared
        output, context, after, weights = _step(
            cell, input[:, 0], w_ih, w_hh, b_ih, b_hh, h, c, feed, w_out, b_out,
            lambda s: _attend(s, key, value, w_query, b_query, w_score, scale, lengths, visible, return_weights),
        )  # fmt: skip
        return AttentionRnnOutput(output, context, after, weights)
    inputs = input.shape[2]
    x_gates = F.linear(input, w_ih[:, :inputs], b_ih)
    arguments = (
        x_gates, key, value, h, c, feed, w_ih[:, inputs:], w_hh, b_hh, w_query, b_query, w_score,
        w_out, b_out, lengths, visible, float(scale), kind, luong,
    )  # fmt: skip
    if backend_for(op, input) == "reference":
        states, c_last, context, attended, found = _rounded(arguments, input.dtype)
    else:
        wanted = wants_gradient(*arguments[:14])
        states, c_last, context, attended, _, found, _, _ = apply(_AttentionRnn, _AttentionRnnEager, wanted, *arguments)
    output = attended if luong else states
    steps = input.shape[1]
    after = AttentionRnnState(
        states[:, -1] if steps else h, c_last if kind == LSTM else None,
        (attended[:, -1] if steps else feed) if luong else None,
    )  # fmt: skip
    return AttentionRnnOutput(output, context, after, found.to(input.dtype) if return_weights else None)


def cost(
    batch: int, steps: int, keys: int, inputs: int, hidden: int, channels: int, columns: int, dtype: torch.dtype, *,
    outputs: int = 0, cell: str = "lstm", additive: bool = True, backward: bool = False,
) -> Cost:  # fmt: skip
    """Work of a sequence of steps, keys of `channels` and values of `columns` features.

    outputs: of the attended state in Luong's order, 0 in Bahdanau's. The weights are read in every step.
    """
    gates = GATES[CELLS[cell]] * hidden
    fed = outputs or columns
    parameters = gates * (inputs + fed + hidden) + channels * hidden + outputs * (columns + hidden)
    pairs = batch * steps * keys
    flops = 2 * batch * steps * parameters + pairs * ((4 if additive else 2) * channels + 2 * columns)
    rows = batch * (keys * (channels + columns) + steps * (inputs + gates + hidden + columns + outputs))
    return Cost((3 if backward else 1) * flops, (2 if backward else 1) * (rows + parameters) * dtype.itemsize)


# ---- arguments ----------------------------------------------------------------------------------------------------


def _check_weights(
    op: str, input: Any, key: Any, value: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, w_query: Any, b_query: Any,
    w_score: Any, w_out: Any, b_out: Any, cell: int, luong: bool, input_feeding: bool,
) -> int:  # fmt: skip
    """How many features the attended state has."""
    check_tensor(op, "input", input, 3)
    for name, t in (("key", key), ("value", value)):
        check_tensor(op, name, t, 3)
    check_tensor(op, "w_hh", w_hh, 2)
    batch, hidden, gates = input.shape[0], w_hh.shape[1], GATES[cell] * w_hh.shape[1]
    keys, channels, columns = key.shape[1], key.shape[2], value.shape[2]
    check_like(op, "key", key, input, (batch, keys, channels))
    check_like(op, "value", value, input, (batch, keys, columns))
    outputs = 0
    if luong:
        if w_out is None:
            raise ValueError(f'{op}: order="luong" needs w_out, of the attended state')
        check_tensor(op, "w_out", w_out, 2)
        outputs = w_out.shape[0]
        check_like(op, "w_out", w_out, input, (outputs, columns + hidden))
    elif w_out is not None:
        raise ValueError(f'{op}: w_out is of order="luong", got order="bahdanau"')
    if b_out is not None and w_out is None:
        raise ValueError(f"{op}: b_out needs w_out")
    if not luong and not input_feeding:
        raise ValueError(f'{op}: input_feeding=False is of order="luong": in Bahdanau\'s the context is always fed')
    if w_score is not None and w_query is None:
        raise ValueError(f"{op}: additive scores (w_score) need w_query")
    if w_query is None and channels != hidden:
        raise ValueError(
            f"{op}: key must have shape ({batch}, {keys}, {hidden}), as the state has features, unless w_query is "
            f"given, got {tuple(key.shape)}"
        )
    if b_query is not None and w_query is None:
        raise ValueError(f"{op}: b_query needs w_query")
    fed = (outputs if input_feeding else 0) if luong else columns
    shapes = (
        ("w_ih", w_ih, (gates, input.shape[2] + fed)), ("w_hh", w_hh, (gates, hidden)), ("b_ih", b_ih, (gates,)),
        ("b_hh", b_hh, (gates,)), ("w_query", w_query, (channels, hidden)), ("b_query", b_query, (channels,)),
        ("w_score", w_score, (channels,)), ("b_out", b_out, (outputs,)),
    )  # fmt: skip
    for name, t, shape in shapes:
        if t is not None or name in ("w_ih", "w_hh"):
            check_like(op, name, t, input, shape)
    return outputs


def _state(
    op: str, input: Tensor, state: Any, cell: int, hidden: int, fed: int | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    batch = input.shape[0]
    if state is None:
        h = input.new_zeros(batch, hidden)
        return h, torch.zeros_like(h) if cell == LSTM else None, None if fed is None else input.new_zeros(batch, fed)
    if not isinstance(state, (tuple, list)) or len(state) != 3:
        got = f"{len(state)} of them" if isinstance(state, (tuple, list)) else type(state).__name__
        raise TypeError(f"{op}: state must be (h, c or None, feed or None), got {got}")
    h, c, feed = state
    wanted = (
        ("h", h, (batch, hidden), "every cell"),
        ("c", c, (batch, hidden) if cell == LSTM else None, 'cell="lstm"'),
        ("feed", feed, None if fed is None else (batch, fed), 'order="luong" with input feeding'),
    )
    for name, t, shape, whose in wanted:
        if t is None and shape is not None and name == "feed":
            continue
        if (t is None) != (shape is None):
            got = "None" if t is None else "a tensor" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{op}: state.{name} is there for {whose}, and only then, got {got}")
        if shape is not None:
            check_like(op, f"state.{name}", t, input, shape)
    return h, c, input.new_zeros(batch, fed) if fed is not None and feed is None else feed


def _lengths(op: str, lengths: Any, input: Tensor) -> Tensor:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{op}: key_lengths must be a tensor or None, got {type(lengths).__name__}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: key_lengths must be int32 or int64, got {lengths.dtype}")
    if lengths.shape != input.shape[:1]:
        raise ValueError(f"{op}: key_lengths must have shape {tuple(input.shape[:1])}, got {tuple(lengths.shape)}")
    if lengths.device != input.device:
        raise ValueError(f"{op}: key_lengths must be on the input's device {input.device}, got {lengths.device}")
    return lengths.long()


def _visible(op: str, mask: Any, input: Tensor, key: Tensor) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{op}: mask must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"{op}: mask must be bool, True is visible, got {mask.dtype}")
    if mask.device != input.device:
        raise ValueError(f"{op}: mask must be on the input's device {input.device}, got {mask.device}")
    full = (*input.shape[:2], key.shape[1])
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.dim() > 3 or any(m not in (1, n) for m, n in sizes):
        raise ValueError(f"{op}: mask must broadcast to {tuple(full)}, got shape {tuple(mask.shape)}")
    return mask.expand(full)


# ---- of other ops: a single step, and steps that do not wait for attention ----------------------------------------


def _network(
    cell: str, input: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The states (B, T, H), and the last c."""
    if b_ih is None and b_hh is not None:
        b_ih = torch.zeros_like(b_hh)
    if b_hh is None and b_ih is not None:
        b_hh = torch.zeros_like(b_ih)
    weights = [w_ih, w_hh] if b_ih is None else [w_ih, w_hh, b_ih, b_hh]
    if c is None:
        states, _ = gru(input, h[None], weights, batch_first=True)
        return states, None
    states, (_, c_last) = lstm(input, (h[None], c[None]), weights, batch_first=True)
    return states, c_last[0]


def _step(
    cell: str, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, h: Tensor, c: Tensor | None,
    feed: Tensor | None, w_out: Tensor | None, b_out: Tensor | None,
    attend: Callable[[Tensor], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor, AttentionRnnState, Tensor | None]:  # fmt: skip
    """One step, by the cell's op and attention's: output, context, state, weights; attend: of states (B, 1, H)."""
    if w_out is None:
        context, weights = attend(h[:, None])
        feed = context[:, 0]
    x = torch.cat([x, feed], 1)  # type: ignore[list-item]
    h, c = (gru_cell(x, h, w_ih, w_hh, b_ih, b_hh), None) if c is None else lstm_cell(x, (h, c), w_ih, w_hh, b_ih, b_hh)
    if w_out is None:
        return h[:, None], context, AttentionRnnState(h, c, None), weights
    context, weights = attend(h[:, None])
    attended = F.linear(torch.cat([context[:, 0], h], 1), w_out, b_out).tanh()
    return attended[:, None], context, AttentionRnnState(h, c, attended), weights


def _attend(
    states: Tensor, key: Tensor, value: Tensor, w_query: Any, b_query: Any, w_score: Any, scale: float,
    lengths: Tensor | None, visible: Tensor | None, return_weights: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    query = states if w_query is None else F.linear(states, w_query, b_query)
    if w_score is not None:
        if not return_weights:
            return additive_attention(query, key, value, w_score, key_lengths=lengths, mask=visible), None
        return additive_attention(query, key, value, w_score, key_lengths=lengths, mask=visible, return_weights=True)
    options: dict[str, Any] = {"scale": scale, "key_lengths": lengths}
    options["attn_mask"] = None if visible is None else visible[:, None]
    context = attention(query[:, None], key[:, None], value[:, None], **options)[:, 0]
    if not return_weights:
        return context, None
    return context, attention_weights(query[:, None], key[:, None], **options)[:, 0].to(query.dtype)


# ---- autograd -----------------------------------------------------------------------------------------------------

TENSORS = 14  # the differentiable ones of an op's arguments come first


def _rounded(arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The reference's results as the op has them: h, c_last, context, attended, weights."""
    h, c, context, attended, weights = reference.attention_rnn(*arguments[:17], *arguments[18:])  # c shows the cell
    return h.to(dtype), c.to(dtype), context.to(dtype), attended.to(dtype), weights


def _formula(options: tuple[Any, ...], dtype: torch.dtype) -> Callable[..., Any]:
    """(the tensors) -> h, c_last, context, attended, weights; options: lengths, mask, scale, cell, luong."""

    def formula(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _rounded((*tensors, *options), dtype)

    return formula


class _AttentionRnn(torch.autograd.Function):
    """The op's arguments -> h, c_last, context, attended, query, weights, cells, activated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return kernel("attention_rnn_fwd", args[1])(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.scale, ctx.cell, ctx.luong = inputs
        h, c_last, context, attended, query, weights, cells, activated = output
        ctx.set_materialize_grads(False)
        saved = (*tensors, h, context, attended, query, weights, cells, activated)
        ctx.save_for_backward(*saved)
        if forward_ad._current_level >= 0:  # then under vmap marks are of no effect, and every output has a tangent
            ctx.save_for_forward(*saved)
        else:
            empty = (() if ctx.cell == LSTM else (c_last,)) + (() if ctx.luong else (attended,))
            ctx.mark_non_differentiable(query, cells, activated, *empty)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        grad_h, grad_c, grad_context, grad_attended, _, grad_weights, _, _ = grads
        grad_c = grad_c if ctx.cell == LSTM else None  # torch.compile makes one up, whatever is marked
        grad_attended = grad_attended if ctx.luong else None
        upstream = (grad_h, grad_c, grad_context, grad_attended, grad_weights)
        tensors = ctx.saved_tensors
        nothing = (None,) * 5
        if all(g is None for g in upstream):
            return *(None,) * TENSORS, *nothing
        options = (*tensors[TENSORS : TENSORS + 2], ctx.scale, ctx.cell, ctx.luong)
        found = apply(
            _AttentionRnnBackward, _AttentionRnnBackwardEager, torch.is_grad_enabled(), *upstream,
            *tensors[:TENSORS], *options, *tensors[TENSORS + 2 :],
        )  # fmt: skip
        needs = ctx.needs_input_grad
        kept = tuple(
            g if need and t is not None else None
            for g, t, need in zip(found, tensors[:TENSORS], needs[:TENSORS], strict=True)
        )
        return *kept, *nothing

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        tensors = ctx.saved_tensors
        options = (*tensors[TENSORS : TENSORS + 2], ctx.scale, ctx.cell, ctx.luong)
        formula = _formula(options, tensors[1].dtype)
        h, c_last, context, attended, weights = tangents(formula, tensors[:TENSORS], directions[:TENSORS])
        query, _, cells, activated = (torch.zeros_like(t) for t in tensors[TENSORS + 5 :])
        return h, c_last, context, attended, query, weights, cells, activated

    @staticmethod
    def plain(*args: Any) -> Any:
        h, c_last, context, attended, weights = _rounded(args, args[1].dtype)
        return h, c_last, context, attended, None, weights, None, None


def _pullback(options: tuple[Any, ...], given: tuple[bool, ...]) -> Callable[..., Any]:
    """(5 gradients, tensors of the formula) -> the gradients of those tensors that are given."""

    def pullback(*arguments: Any) -> Any:
        upstream, tensors = arguments[:5], arguments[5:]
        key, value, h, w_out = tensors[1], tensors[2], tensors[3], tensors[12]
        batch, steps = tensors[0].shape[:2]
        outputs = 0 if w_out is None else w_out.shape[0]
        shapes = ((batch, steps, h.shape[1]), h.shape, (batch, steps, value.shape[2]), (batch, steps, outputs))
        along = [key.new_zeros(s) if g is None else g for g, s in zip(upstream[:4], shapes, strict=True)]
        if tensors[4] is None:
            along[1] = key.new_zeros(0)
        if w_out is None:
            along[3] = key.new_zeros(0)
        wide = key.new_zeros((batch, steps, key.shape[1]), dtype=accumulator(key.dtype))
        weights = wide if upstream[4] is None else upstream[4]
        found = gradients(_formula(options, key.dtype), tensors, (*along, weights))
        return tuple(g for g, there in zip(found, given, strict=True) if there)

    return pullback


class _AttentionRnnBackward(torch.autograd.Function):
    """(5 gradients, the op's arguments, what it saved) -> gradients of its tensors, empty where there is none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        upstream, tensors, options, saved = args[:5], args[5:19], args[19:24], args[24:]
        _, key, value, h0, c0, feed0, w_feed, w_hh, b_hh, w_query, b_query, weight, w_out, b_out = tensors
        lengths, mask, scale, cell, luong = options
        h, context, attended, query, weights, cells, activated = saved
        grad_h, grad_c, grad_context, grad_attended, grad_weights = upstream
        of_x, of_h, of_key, of_value, of_h0, of_c0, of_feed, of_query, of_output, of_weight = kernel(
            "attention_rnn_bwd", key
        )(
            grad_h, grad_c, grad_context, grad_attended, grad_weights, key, value, h0, c0, feed0, w_feed, w_hh,
            w_query, weight, w_out, lengths, mask, scale, cell, luong, h, attended, query, weights, cells, activated,
        )  # fmt: skip
        before = torch.cat([h0[:, None], h[:, :-1]], 1) if h.shape[1] else h
        of_h = of_x if cell == LSTM else of_h
        asked = h if luong else before
        fed = context
        if luong and feed0 is not None:
            fed = torch.cat([feed0[:, None], attended[:, :-1]], 1) if h.shape[1] else attended
        none = key.new_empty(0)
        return (
            of_x, of_key, of_value, of_h0, of_c0, of_feed,
            _outer(of_x, fed),
            _outer(of_h, before),
            none if b_hh is None else _total(of_h),
            none if w_query is None else _outer(of_query, asked),
            none if b_query is None else _total(of_query),
            of_weight.to(key.dtype),
            none if w_out is None else _outer(of_output, torch.cat([context, h], 2)),
            none if b_out is None else _total(of_output),
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[21:24]
        ctx.set_materialize_grads(False)
        saved = inputs[:21]
        ctx.save_for_backward(*saved)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        tensors, given = saved[5:19], tuple(t is not None for t in saved[5:19])
        along = tuple(
            torch.zeros_like(t) if g is None else g
            for g, t, there in zip(cotangents, tensors, given, strict=True)
            if there
        )
        found = gradients(_pullback((*saved[19:], *ctx.options), given), saved[:19], along)
        return *found, *(None,) * 12

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        saved = ctx.saved_tensors
        given = tuple(t is not None for t in saved[5:19])
        found = iter(tangents(_pullback((*saved[19:], *ctx.options), given), saved[:19], directions[:19]))
        return tuple(next(found) if there else saved[6].new_zeros(0) for there in given)

    @staticmethod
    def plain(*args: Any) -> Any:
        given = tuple(t is not None for t in args[5:19])
        found = iter(_pullback(args[19:24], given)(*args[:19]))
        return tuple(next(found) if there else None for there in given)


def _outer(grad: Tensor, rows: Tensor) -> Tensor:
    """The gradient of a weight: grad^T rows, over all sequences and steps."""
    with torch.autocast(grad.device.type, enabled=False):
        return grad.flatten(0, 1).t() @ rows.flatten(0, 1)


def _total(grad: Tensor) -> Tensor:
    return grad.flatten(0, 1).sum(0)


_AttentionRnnEager, _AttentionRnnBackwardEager = eager(_AttentionRnn), eager(_AttentionRnnBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::attention_rnn_fwd")
def _(
    x_gates: Tensor, key: Tensor, value: Tensor, h: Tensor, c: Any, feed: Any, w_feed: Tensor, w_hh: Tensor, b_hh: Any,
    w_query: Any, b_query: Any, weight: Any, w_out: Any, b_out: Any, key_lengths: Any, mask: Any, scale: float,
    cell: int, luong: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    (batch, steps), hidden, acc = x_gates.shape[:2], h.shape[1], accumulator(key.dtype)
    return (
        key.new_empty((batch, steps, hidden)),
        key.new_empty((batch, hidden) if cell == LSTM else 0),
        key.new_empty((batch, steps, value.shape[2])),
        key.new_empty((batch, steps, w_out.shape[0]) if luong else 0),
        key.new_empty((batch, steps, key.shape[2]) if w_query is not None or not luong else 0),
        key.new_empty((batch, steps, key.shape[1]), dtype=acc),
        key.new_empty((steps, batch, hidden) if cell == LSTM else 0, dtype=acc),
        key.new_empty((steps, batch, kept_gates(cell) * hidden), dtype=acc),
    )


@torch.library.register_fake("seqkern::attention_rnn_bwd")
def _(
    grad_h: Any, grad_c: Any, grad_context: Any, grad_attended: Any, grad_weights: Any, key: Tensor, value: Tensor,
    h0: Tensor, c0: Any, feed: Any, w_feed: Tensor, w_hh: Tensor, w_query: Any, weight: Any, w_out: Any,
    key_lengths: Any, mask: Any, scale: float, cell: int, luong: bool, h: Tensor, attended: Tensor, query: Tensor,
    weights: Tensor, cells: Tensor, activated: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, steps, hidden = h.shape
    gates = (batch, steps, GATES[cell] * hidden)
    outputs = w_out.shape[0] if luong else 0
    return (
        key.new_empty(gates),
        key.new_empty(0 if cell == LSTM else gates),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        key.new_empty((batch, hidden)),
        key.new_empty((batch, hidden) if cell == LSTM else 0),
        key.new_empty((batch, outputs) if luong else 0),
        key.new_empty((batch, steps, key.shape[2])),
        key.new_empty((batch, steps, outputs) if luong else 0),
        key.new_empty(0 if weight is None else key.shape[2], dtype=accumulator(key.dtype)),
    )


@torch.library.register_vmap("seqkern::attention_rnn_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.attention_rnn_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::attention_rnn_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.attention_rnn_bwd, info.batch_size, in_dims, args)
