"""Recurrent networks: the functional API and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from seqkern import _direct
from seqkern._arguments import Rnn, RnnNumbers, RnnTensors, Weights
from seqkern._direct import fast
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for
from seqkern._recording import is_proxy, record
from seqkern.ops._autograd import Cost
from seqkern.ops._rnn_autograd import run
from seqkern.ops._rnn_checks import (
    CELLS,
    GATES,
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    Sizes,
    autocast,
    check_layers,
    check_norms,
    check_peepholes,
    check_probability,
    check_tensor,
    check_weights,
    check_zoneout,
    kept_gates,
    prepare_lengths,
    prepare_resets,
    prepare_seed,
    prepare_state,
)
from seqkern.ops.layer_norm import layer_norm
from seqkern.reference.dropout import derived_seed, dropout

RECURRENT_DROPOUT, ZONEOUT, DROPOUT = range(3)  # what a layer's seeds decide


@overload
def lstm(
    input: Tensor, hx: tuple[Tensor, Tensor] | None, weights: Sequence[Tensor], *,
    lengths: Tensor | Sequence[int] | None = None, num_layers: int = 1, bidirectional: bool = False,
    batch_first: bool = False, dropout: float = 0.0, training: bool = False, norms: Sequence[Tensor] | None = None,
    peepholes: Sequence[Tensor] | None = None, recurrent_dropout: float = 0.0,
    zoneout: float | tuple[float, float] = 0.0, resets: Tensor | None = None, recompute: bool = False,
    seed: int | Tensor | None = None,
    return_all_c: Literal[False] = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...  # fmt: skip
@overload
def lstm(
    input: Tensor, hx: tuple[Tensor, Tensor] | None, weights: Sequence[Tensor], *,
    lengths: Tensor | Sequence[int] | None = None, num_layers: int = 1, bidirectional: bool = False,
    batch_first: bool = False, dropout: float = 0.0, training: bool = False, norms: Sequence[Tensor] | None = None,
    peepholes: Sequence[Tensor] | None = None, recurrent_dropout: float = 0.0,
    zoneout: float | tuple[float, float] = 0.0, resets: Tensor | None = None, recompute: bool = False,
    seed: int | Tensor | None = None,
    return_all_c: Literal[True],
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]: ...  # fmt: skip
@overload
def lstm(
    input: Tensor, hx: tuple[Tensor, Tensor] | None, weights: Sequence[Tensor], *,
    lengths: Tensor | Sequence[int] | None = None, num_layers: int = 1, bidirectional: bool = False,
    batch_first: bool = False, dropout: float = 0.0, training: bool = False, norms: Sequence[Tensor] | None = None,
    peepholes: Sequence[Tensor] | None = None, recurrent_dropout: float = 0.0,
    zoneout: float | tuple[float, float] = 0.0, resets: Tensor | None = None, recompute: bool = False,
    seed: int | Tensor | None = None,
    return_all_c: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]] | tuple[Tensor, tuple[Tensor, Tensor], Tensor]: ...  # fmt: skip


@explicit
def lstm(
    input: Tensor,
    hx: tuple[Tensor, Tensor] | None,
    weights: Sequence[Tensor],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    norms: Sequence[Tensor] | None = None,
    peepholes: Sequence[Tensor] | None = None,
    recurrent_dropout: float = 0.0,
    zoneout: float | tuple[float, float] = 0.0,
    resets: Tensor | None = None,
    return_all_c: bool = False,
    recompute: bool = False,
    seed: int | Tensor | None = None,
    **unexpected: NoReturn,
) -> tuple[Tensor, tuple[Tensor, Tensor]] | tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """A long short-term memory of one or more layers over whole sequences: `torch.nn.LSTM`'s meaning, and more.

    i, f, o = sigmoid(W x_t + U h_{t-1} + b), g = tanh(likewise), c_t = f * c_{t-1} + i * g, h_t = o * tanh(c_t), and
    with a projection W_hr of that. The state is kept in float32 (float64 for float64) from step to step, whatever the
    dtype is; where the CPU multiplies bfloat16, the products with U take h rounded to it, as torch's do. The equations
    with every option: seqkern/reference/rnn.py.

    Args:
        input: (T, B, I), or (B, T, I) with batch_first; float64, float32, bfloat16 or float16.
        hx: h (num_layers * directions, B, P) and c (num_layers * directions, B, H) before the first step, in the
            input's dtype; None for zeros. P is H, or the width of the projection.
        weights: for every layer, and in it for every direction, w_ih (4H, I), w_hh (4H, P), then, unless no layer has
            any, b_ih (4H,) and b_hh (4H,), then, unless no layer has any, w_hr (P, H) with P < H: a flat list, as
            `torch.nn.LSTM.parameters()` gives it. Gates in the order i, f, g, o. I is directions * P from the second
            layer on.
        lengths: (B,), int64 or int32, or a sequence of numbers, in any order: sequence b has only the first lengths[b]
            steps. Its outputs past them are 0, its final state is that after them (hx for a length of 0), the reverse
            direction starts at the last of them. What the padding holds, NaN even, is never seen.
        num_layers: layers; each reads the outputs of the one below.
        bidirectional: a second direction, from the last step to the first, beside each; their outputs are concatenated.
        batch_first: whether the batch is the first dimension of input and output. That of hx is always its second.
        dropout: the probability with which an output of any layer but the last is dropped, when `training`.
        training: whether dropout and recurrent_dropout are at work, and zoneout draws. All else is the same, gradients
            too.
        norms: layer norms (eps 1e-5) of W x, of U h and of c on its way to h: for every layer and direction the weight
            and bias of each, (4H,), (4H,), (4H,), (4H,), (H,), (H,), in any floating dtype; biases are added after.
        peepholes: for every layer and direction (3, H), in the input's dtype: how i, f and o see the cell, o the new.
        recurrent_dropout: the probability with which an element of h is dropped on its way into U h, when `training`,
            the same elements at all steps of a sequence.
        zoneout: the probability with which an element of h, and of c, keeps its value of the step before, when
            `training`; otherwise, each is the mean of old and new by that probability. One number, or a pair: of h,
            of c.
        resets: (T, B) bool, or (B, T) with batch_first: where True, the state is zero before step t, and for the
            reverse direction after it: no direction sees across the border between t - 1 and t.
        return_all_c: also return the cell states of the last layer at all steps.
        recompute: saves less for backward: gates are found again there, by one product over all steps. (A simple RNN's
            one gate is h: nothing is found again.)
        seed: one int64 number that decides every mask; None draws one from the device's generator
            (torch.manual_seed) where there is a mask to decide. With it, dropout between the layers is decided by it
            too, otherwise by torch's generator as torch.nn.LSTM's. Masks: seqkern/reference/dropout.py.

    Returns:
        The outputs of the last layer, (T, B, directions * P) or batch first, and (h_n, c_n): the state after each
        layer's and direction's last step, shaped as hx. With return_all_c also the cell states, (T, B, directions * H)
        or batch first. Under autocast the inputs are cast first, as torch's op does.

    Raises:
        TypeError: an argument that is not a tensor or number where it must be one, or dtypes that are not floating
            point (of lengths: whole numbers, of resets: bool) or differ.
        ValueError: shapes or numbers of tensors that do not fit, tensors on different devices, or a number out of its
            range (of lengths where they can be read at once: in a list or on the CPU, not compiled; of a tensor, not
            inside a transform either).
        NotImplementedError: the backend in force does not run on the input's device.

    Source: Hochreiter and Schmidhuber 1997; the forget gate: Gers et al. 2000; peepholes: Gers and Schmidhuber 2000;
    projection: Sak et al. 2014; norms: Ba et al. 2016; recurrent dropout: Gal and Ghahramani 2016; zoneout: Krueger et
    al. 2017.

    Example:
        >>> import torch, seqkern
        >>> theirs = torch.nn.LSTM(5, 8)
        >>> x = torch.randn(10, 3, 5)
        >>> output, (h_n, c_n) = seqkern.lstm(x, None, list(theirs.parameters()))
        >>> torch.allclose(output, theirs(x)[0], atol=1e-6)
        True
        >>> output, (h_n, c_n) = seqkern.lstm(x, None, list(theirs.parameters()), lengths=[4, 10, 1])
        >>> output[4:, 0].abs().max().item()
        0.0
    """
    if is_proxy(input):
        return record(lstm, locals())
    if unexpected:
        refuse(lstm, unexpected)
    if (
        peepholes is None
        and not return_all_c
        and _is_plain(
            lengths, num_layers, dropout, training, norms, recurrent_dropout, zoneout, resets, recompute, seed
        )
    ):
        found: Any = _direct.rnn(LSTM, input, hx, weights, num_layers, bidirectional, batch_first)
        if found is not None:
            return found
    output, h_n, c_n, cells = _network(
        "lstm", input, hx, weights, lengths, num_layers, bidirectional, batch_first, dropout, training, norms,
        recurrent_dropout, zoneout, resets, recompute, seed, peepholes, return_all_c,
    )  # fmt: skip
    return (output, (h_n, c_n), cells) if return_all_c else (output, (h_n, c_n))


@explicit
def gru(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    norms: Sequence[Tensor] | None = None,
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    resets: Tensor | None = None,
    recompute: bool = False,
    seed: int | Tensor | None = None,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """Gated recurrent units in one or more layers over whole sequences: `torch.nn.GRU`'s meaning, and more.

    r, z = sigmoid(W x_t + U h_{t-1} + b), n = tanh(W_n x_t + b_n + r * (U_n h_{t-1} + b'_n)),
    h_t = (1 - z) * n + z * h_{t-1}. As in torch and cuDNN, the reset gate r stands after the recurrent product; Cho et
    al. and most textbooks have it before, U_n (r * h), which is another function: `seqkern.reference.gru_cell` has
    both.

    Args:
        input: (T, B, I), or (B, T, I) with batch_first; float64, float32, bfloat16 or float16.
        hx: h before the first step, (num_layers * directions, B, H) in the input's dtype; None for zeros.
        weights: for every layer, and in it for every direction, w_ih (3H, I), w_hh (3H, H) and, unless no layer has
            any, b_ih (3H,) and b_hh (3H,): a flat list, as `torch.nn.GRU.parameters()` gives it. Gates in the order
            r, z, n. I is directions * H from the second layer on.
        norms: layer norms (eps 1e-5) of W x and of U h: for every layer and direction the weight and bias of each, four
            tensors (3H,) in any floating dtype; biases are added after.
        recurrent_dropout: as `lstm`; it is the h of the recurrent product that is dropped, not that of z * h.
        zoneout: as `lstm`, one probability.
        lengths, num_layers, bidirectional, batch_first, dropout, training, resets, recompute, seed: as `lstm`.

    Returns:
        The outputs of the last layer, (T, B, directions * H) or batch first, and h_n: the state after each layer's and
        direction's last step, shaped as hx. Under autocast the inputs are cast first.

    Raises:
        As `lstm`.

    Source: Cho et al. 2014, with the reset gate where Chung et al.'s and cuDNN's implementations have it; options: as
    `lstm`.

    Example:
        >>> import torch, seqkern
        >>> theirs = torch.nn.GRU(5, 8, num_layers=2)
        >>> x = torch.randn(10, 3, 5)
        >>> output, h_n = seqkern.gru(x, None, list(theirs.parameters()), num_layers=2)
        >>> torch.allclose(output, theirs(x)[0], atol=1e-6)
        True
    """
    if is_proxy(input):
        return record(gru, locals())
    if unexpected:
        refuse(gru, unexpected)
    if _is_plain(lengths, num_layers, dropout, training, norms, recurrent_dropout, zoneout, resets, recompute, seed):
        found: Any = _direct.rnn(GRU, input, hx, weights, num_layers, bidirectional, batch_first)
        if found is not None:
            return found
    return _network(
        "gru", input, hx, weights, lengths, num_layers, bidirectional, batch_first, dropout, training, norms,
        recurrent_dropout, zoneout, resets, recompute, seed,
    )[:2]  # fmt: skip


@explicit
def rnn_tanh(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    norms: Sequence[Tensor] | None = None,
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    resets: Tensor | None = None,
    recompute: bool = False,
    seed: int | Tensor | None = None,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """A simple recurrent network of one or more layers over whole sequences: `torch.nn.RNN`'s meaning, and more.

    h_t = tanh(W x_t + b + U h_{t-1} + b').

    Args:
        input: (T, B, I), or (B, T, I) with batch_first; float64, float32, bfloat16 or float16.
        hx: h before the first step, (num_layers * directions, B, H) in the input's dtype; None for zeros.
        weights: as `gru`, w_ih (H, I), w_hh (H, H), b_ih (H,) and b_hh (H,).
        lengths, num_layers, bidirectional, batch_first, dropout, training, norms, recurrent_dropout, zoneout, resets,
            recompute, seed: as `gru`.

    Returns:
        As `gru`.

    Raises:
        As `lstm`.

    Source: Elman, "Finding structure in time", 1990; options: as `lstm`.

    Example:
        >>> import torch, seqkern
        >>> theirs = torch.nn.RNN(5, 8)
        >>> x = torch.randn(10, 3, 5)
        >>> output, h_n = seqkern.rnn_tanh(x, None, list(theirs.parameters()))
        >>> torch.allclose(output, theirs(x)[0], atol=1e-6)
        True
    """
    if is_proxy(input):
        return record(rnn_tanh, locals())
    if unexpected:
        refuse(rnn_tanh, unexpected)
    if _is_plain(lengths, num_layers, dropout, training, norms, recurrent_dropout, zoneout, resets, recompute, seed):
        found: Any = _direct.rnn(RNN_TANH, input, hx, weights, num_layers, bidirectional, batch_first)
        if found is not None:
            return found
    return _network(
        "rnn_tanh", input, hx, weights, lengths, num_layers, bidirectional, batch_first, dropout, training, norms,
        recurrent_dropout, zoneout, resets, recompute, seed,
    )[:2]  # fmt: skip


@explicit
def rnn_relu(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    norms: Sequence[Tensor] | None = None,
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    resets: Tensor | None = None,
    recompute: bool = False,
    seed: int | Tensor | None = None,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """`rnn_tanh` with max(0, .) in the place of tanh: `torch.nn.RNN(nonlinearity="relu")`'s meaning, and more.

    Args:
        As `rnn_tanh`.

    Returns:
        As `gru`.

    Raises:
        As `lstm`.

    Example:
        >>> import torch, seqkern
        >>> theirs = torch.nn.RNN(5, 8, nonlinearity="relu")
        >>> x = torch.randn(10, 3, 5)
        >>> output, h_n = seqkern.rnn_relu(x, None, list(theirs.parameters()))
        >>> torch.allclose(output, theirs(x)[0], atol=1e-6)
        True
    """
    if is_proxy(input):
        return record(rnn_relu, locals())
    if unexpected:
        refuse(rnn_relu, unexpected)
    if _is_plain(lengths, num_layers, dropout, training, norms, recurrent_dropout, zoneout, resets, recompute, seed):
        found: Any = _direct.rnn(RNN_RELU, input, hx, weights, num_layers, bidirectional, batch_first)
        if found is not None:
            return found
    return _network(
        "rnn_relu", input, hx, weights, lengths, num_layers, bidirectional, batch_first, dropout, training, norms,
        recurrent_dropout, zoneout, resets, recompute, seed,
    )[:2]  # fmt: skip


@explicit
def additive_rnn(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    norms: Sequence[Tensor] | None = None,
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    resets: Tensor | None = None,
    recompute: bool = False,
    seed: int | Tensor | None = None,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """A recurrent network whose state is added to, the first of two steps from the simple one towards an LSTM.

    u_t = tanh(W x_t + b + U h_{t-1} + b'), h_t = h_{t-1} + u_t: a gradient reaches earlier steps undiminished beside
    what U makes of it. The state is not bounded: it may grow by 1 a step.

    Args:
        input: (T, B, I), or (B, T, I) with batch_first; float64, float32, bfloat16 or float16.
        hx: h before the first step, (num_layers * directions, B, H) in the input's dtype; None for zeros.
        weights: as `gru`, w_ih (H, I), w_hh (H, H), b_ih (H,) and b_hh (H,).
        lengths, num_layers, bidirectional, batch_first, dropout, training, norms, recurrent_dropout, zoneout, resets,
            recompute, seed: as `gru`; recurrent dropout drops the h of the product, not that which is added to.

    Returns:
        As `gru`.

    Raises:
        As `lstm`.

    Source: the textbooks' step between the simple network and gated ones; options: as `lstm`.

    Example:
        >>> import torch, seqkern
        >>> x, rnn = torch.randn(10, 3, 5), torch.nn.RNN(5, 8)
        >>> output, h_n = seqkern.additive_rnn(x, None, list(rnn.parameters()))
        >>> output.shape
        torch.Size([10, 3, 8])
    """
    if is_proxy(input):
        return record(additive_rnn, locals())
    if unexpected:
        refuse(additive_rnn, unexpected)
    return _network(
        "additive_rnn", input, hx, weights, lengths, num_layers, bidirectional, batch_first, dropout, training, norms,
        recurrent_dropout, zoneout, resets, recompute, seed,
    )[:2]  # fmt: skip


@explicit
def interpolated_rnn(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    norms: Sequence[Tensor] | None = None,
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    resets: Tensor | None = None,
    recompute: bool = False,
    seed: int | Tensor | None = None,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """A recurrent network that interpolates its old state and a new one, the second step towards an LSTM.

    f_t = sigmoid(W_f x_t + b_f + U_f h_{t-1} + b'_f), u_t = tanh(W x_t + b + U h_{t-1} + b'),
    h_t = f_t * h_{t-1} + (1 - f_t) * u_t: `gru` without its reset gate, f its z.

    Args:
        input: (T, B, I), or (B, T, I) with batch_first; float64, float32, bfloat16 or float16.
        hx: h before the first step, (num_layers * directions, B, H) in the input's dtype; None for zeros.
        weights: as `gru`, w_ih (2H, I), w_hh (2H, H), b_ih (2H,) and b_hh (2H,), gates in the order f, u.
        lengths, num_layers, bidirectional, batch_first, dropout, training, norms, recurrent_dropout, zoneout, resets,
            recompute, seed: as `gru`; recurrent dropout drops the h of the product, not that which is interpolated.

    Returns:
        As `gru`.

    Raises:
        As `lstm`.

    Source: the textbooks' step between the additive network and the LSTM; options: as `lstm`.

    Example:
        >>> import torch, seqkern
        >>> x, weights = torch.randn(10, 3, 5), [torch.randn(16, 5), torch.randn(16, 8)]
        >>> output, h_n = seqkern.interpolated_rnn(x, None, weights)
        >>> output.shape
        torch.Size([10, 3, 8])
    """
    if is_proxy(input):
        return record(interpolated_rnn, locals())
    if unexpected:
        refuse(interpolated_rnn, unexpected)
    return _network(
        "interpolated_rnn", input, hx, weights, lengths, num_layers, bidirectional, batch_first, dropout, training,
        norms, recurrent_dropout, zoneout, resets, recompute, seed,
    )[:2]  # fmt: skip


def _is_plain(
    lengths: Any,
    num_layers: Any,
    dropout_p: Any,
    training: Any,
    norms: Any,
    recurrent_dropout: Any,
    zoneout: Any,
    resets: Any,
    recompute: Any,
    seed: Any,
) -> bool:
    """Whether the fast path may be asked: torch's layers without dropout, and no option of ours."""
    return (
        lengths is None
        and norms is None
        and resets is None
        and seed is None
        and recompute is False
        and type(zoneout) is float
        and type(recurrent_dropout) is float
        and type(dropout_p) is float
        and zoneout == recurrent_dropout == 0
        and (dropout_p == 0 or (0 < dropout_p <= 1 and (training is False or num_layers == 1)))
        and fast()
    )


def _network(
    op: str,
    input: Tensor,
    hx: Any,
    weights: Sequence[Tensor],
    lengths: Any,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    dropout_p: float,
    training: bool,
    norms: Any,
    recurrent_dropout: float,
    zoneout: Any,
    resets: Any,
    recompute: bool,
    seed: Any,
    peepholes: Any = None,
    return_all_c: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """output, h_n, c_n and all c of the last layer; others in their places where these are none or not wanted."""
    cell = CELLS[op]
    dropout_p = check_probability(op, "dropout", dropout_p)
    mask_p = check_probability(op, "recurrent_dropout", recurrent_dropout)
    if not training:
        dropout_p = mask_p = 0.0
    zoneouts = check_zoneout(op, zoneout, cell)
    num_layers = check_layers(op, num_layers)
    check_tensor(op, "input", input, 3)
    batch, steps = input.shape[:2] if batch_first else reversed(input.shape[:2])
    sizes = check_weights(op, cell, input, weights, num_layers, bidirectional)
    hx = prepare_state(op, hx, input, batch, sizes)
    norm_lists = None if norms is None else check_norms(op, norms, input, sizes)
    peepholes = None if peepholes is None else check_peepholes(op, peepholes, input, sizes)
    lengths = None if lengths is None else prepare_lengths(op, lengths, input, steps, batch)
    resets = None if resets is None else prepare_resets(op, resets, input, steps, batch, batch_first)
    own_seed = seed is not None
    seed = prepare_seed(op, seed, input)
    if training and not own_seed and (mask_p or any(zoneouts)):
        seed = torch.randint(-(2**63), 2**63 - 1, (), device=input.device)
    input, h0, c0, *weights = autocast(input, *hx, *weights)
    peepholes = None if peepholes is None else [t.to(input.dtype) for t in peepholes]

    # What an RNN keeps is h, and of a rounded h relu's slope is another.
    recompute = recompute and cell not in (RNN_TANH, RNN_RELU)
    directions, backend = sizes.directions, backend_for(op, input)
    x = input.transpose(0, 1) if batch_first else input
    if lengths is not None:  # what stands past the end is not to be multiplied, by a zero gradient even
        x = torch.where((torch.arange(steps, device=x.device)[:, None] < lengths)[..., None], x, 0)
    per_cell = sizes.per_cell
    states, cells = [], x
    numbers = RnnNumbers(*zoneouts, 1e-5, cell)
    for layer in range(num_layers):
        first, end = layer * directions, (layer + 1) * directions
        own = _weights(
            sizes, weights[first * per_cell : end * per_cell], None if peepholes is None else peepholes[first:end]
        )
        source = x
        if norm_lists is not None:
            source, own = _normed(x, own, norm_lists[first:end], sizes)
        h, c = (h0, c0) if num_layers == 1 else (h0[first:end], None if c0 is None else c0[first:end])
        mask = _mask(mask_p, seed, layer, h)
        zoneout_seed = derived_seed(seed, 3 * layer + ZONEOUT) if training and any(zoneouts) else None
        tensors = RnnTensors(source, h, c, lengths, resets, mask, zoneout_seed)
        x, *state = run(backend, Rnn(tensors, numbers, own), recompute, return_all_c and layer == num_layers - 1)
        if cell == LSTM:
            *state, cells = state
        states.append(state)
        if dropout_p and layer < num_layers - 1:
            x = _dropout(x, dropout_p, derived_seed(seed, 3 * layer + DROPOUT) if own_seed else None)
    state_n = [layers[0] if num_layers == 1 else torch.cat(layers) for layers in zip(*states, strict=True)]
    cells = cells.permute(1, 2, 0, 3).flatten(2).to(x.dtype) if return_all_c else x
    if batch_first:
        x, cells = x.transpose(0, 1), cells.transpose(0, 1) if return_all_c else cells
    return x, state_n[0], state_n[-1], cells


def _weights(sizes: Sizes, weights: Sequence[Tensor], peepholes: Sequence[Tensor] | None) -> Weights:
    """Those of a layer, by their kind."""
    each = sizes.per_cell
    return Weights(
        w_ih=list(weights[::each]),
        w_hh=list(weights[1::each]),
        b_ih=list(weights[2::each]) if sizes.bias else [],
        b_hh=list(weights[3::each]) if sizes.bias else [],
        w_hr=list(weights[each - 1 :: each]) if sizes.projected else [],
        peephole=[] if peepholes is None else list(peepholes),
        norm=[],
    )


def _normed(x: Tensor, weights: Weights, norms: list[list[Tensor]], sizes: Sizes) -> tuple[Tensor, Weights]:
    """N(W x) + b of every direction, side by side; and the weights without what is done with, with the other norms."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sides, rest = [], []
    for d, (weight, bias, *others) in enumerate(norms):
        side = layer_norm(F.linear(x, weights.w_ih[d]), (sizes.gates,), weight, bias, 1e-5)
        sides.append(side + weights.b_ih[d] if sizes.bias else side)
        rest.append(torch.cat([t.to(wide) for t in others]))
    # Under autocast a layer norm on a GPU is float32: the rest of the network is not.
    given = (sides[0] if len(sides) == 1 else torch.cat(sides, -1)).to(x.dtype)
    return given, Weights(
        w_ih=[], w_hh=weights.w_hh, b_ih=[], b_hh=weights.b_hh, w_hr=weights.w_hr, peephole=weights.peephole, norm=rest
    )


def _mask(p: float, seed: Tensor | None, layer: int, h0: Tensor) -> Tensor | None:
    """The factors of h in the recurrent product, (D, B, P)."""
    if not p:
        return None
    assert seed is not None
    rows, wide = h0.shape[0] * h0.shape[1], torch.promote_types(h0.dtype, torch.float32)
    ones = torch.ones((rows, h0.shape[2]), dtype=wide, device=h0.device)
    return dropout(ones, derived_seed(seed, 3 * layer + RECURRENT_DROPOUT), p).view(h0.shape)


def _dropout(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Between the layers: torch's, or decided by the seed."""
    return F.dropout(x, p) if seed is None else dropout(x.flatten(0, 1), seed, p).view_as(x)


def cost(
    steps: int,
    batch: int,
    inputs: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    cell: str = "lstm",
    training: bool = False,
    backward: bool = False,
    recompute: bool = False,
) -> Cost:
    """Work of one layer in one direction, in its products; `backward` counts the backward pass alone.

    `cell` is the name of a function here. `training` counts what the forward pass keeps, in the
    accumulation type; with `recompute` that is c alone, and the backward pass has the products of the forward again.
    """
    kind = CELLS[cell]
    recompute = recompute and kind not in (RNN_TANH, RNN_RELU)  # as `_network`
    rows, size, gates = steps * batch, dtype.itemsize, GATES[kind] * hidden
    flops = 2 * rows * gates * (inputs + hidden)
    parameters = gates * (inputs + hidden + 2)
    per_row = (0 if recompute else kept_gates(kind)) + (kind == LSTM)
    kept = rows * per_row * hidden * (8 if dtype == torch.float64 else 4)
    if backward:  # reads x, y, dy, the weights and what was kept; writes dx and the weights' gradients
        return Cost(
            flops=(3 if recompute else 2) * flops, bytes=size * (2 * rows * (inputs + hidden) + 2 * parameters) + kept
        )
    return Cost(flops=flops, bytes=size * (rows * (inputs + hidden) + parameters) + (kept if training else 0))
