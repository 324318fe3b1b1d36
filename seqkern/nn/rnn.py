"""Recurrent networks as modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeAlias, overload

import torch
from torch import Tensor
from torch.nn import LayerNorm  # by name: users may put seqkern's modules in the place of torch.nn's
from torch.nn.utils.rnn import PackedSequence
from torch.types import Device

from seqkern import _direct
from seqkern._direct import fast
from seqkern._keywords import explicit, refuse
from seqkern._recording import check_not_nested, exports_onnx, is_proxy, record_module
from seqkern.ops._rnn_checks import NO_NESTED, check_pair, check_probability, check_state, check_zoneout
from seqkern.ops.rnn import CELLS, additive_rnn, gru, interpolated_rnn, lstm, rnn_relu, rnn_tanh
from seqkern.ops.rnn_cell import gru_cell, lstm_cell, rnn_relu_cell, rnn_tanh_cell

Lengths: TypeAlias = Tensor | Sequence[int] | int | None  # a number beside an input without a batch
State: TypeAlias = tuple[Tensor, Tensor]  # of an LSTM: h and c

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LSTM": lstm, "GRU": gru, "RNN_TANH": rnn_tanh, "RNN_RELU": rnn_relu, "ADDITIVE_RNN": additive_rnn,
    "INTERPOLATED_RNN": interpolated_rnn,
}  # fmt: skip


class _Recurrent(torch.nn.RNNBase):
    """What the three networks share: the options beyond torch's, and the forms in which sequences come."""

    layer_norm = peephole = recompute = False
    recurrent_dropout: float = 0.0
    zoneout: float | tuple[float, float] = 0.0

    def _set_options(
        self, layer_norm: bool, recurrent_dropout: float, zoneout: Any, peephole: bool, recompute: bool
    ) -> None:
        name = type(self).__name__
        self.layer_norm, self.peephole, self.recompute = layer_norm, peephole, recompute
        self.recurrent_dropout = check_probability(name, "recurrent_dropout", recurrent_dropout)
        check_zoneout(name, zoneout, CELLS[self.mode.lower()])
        self.zoneout = zoneout
        weight = self.weight_ih_l0
        assert isinstance(weight, Tensor)
        factory: Any = {"device": weight.device, "dtype": weight.dtype}
        for suffix in self._suffixes():
            if layer_norm:
                for side in self._sides():
                    size = self.hidden_size if side == "c" else weight.shape[0]
                    self.add_module(f"layer_norm_{side}_{suffix}", LayerNorm(size, **factory))
            if peephole:
                parameter = torch.nn.Parameter(torch.empty(3, self.hidden_size, **factory))
                torch.nn.init.uniform_(parameter, -(self.hidden_size**-0.5), self.hidden_size**-0.5)
                self.register_parameter(f"peephole_{suffix}", parameter)

    def _suffixes(self) -> list[str]:
        """The ends of the parameters' names, for every layer and direction."""
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

    def _weights(self) -> list[Any]:
        """Every weight, in the order of `seqkern.lstm`."""
        names, parameters = [name for names in self._all_weights for name in names], self._parameters
        try:
            return [parameters[name] for name in names]
        except KeyError:  # under a parametrization, or in a replica, they are attributes only
            return [getattr(self, name) for name in names]

    def _options(self, lengths: Any, resets: Any) -> bool:
        """Whether anything is asked for that torch's networks have not."""
        given = lengths is not None or resets is not None or self.layer_norm or self.peephole
        return given or bool(self.recurrent_dropout) or self.zoneout not in (0, (0, 0))

    def _sides(self) -> tuple[str, ...]:
        return ("ih", "hh", "c") if self.mode == "LSTM" else ("ih", "hh")

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for module in self.children():
            if isinstance(module, LayerNorm):
                module.reset_parameters()

    def extra_repr(self) -> str:
        options = [f"{name}=True" for name in ("layer_norm", "peephole", "recompute") if getattr(self, name)]
        options += [f"{name}={p}" for name in ("recurrent_dropout", "zoneout") if (p := getattr(self, name))]
        return ", ".join([super().extra_repr(), *options])

    @overload
    def forward(
        self, input: Tensor, hx: Tensor | None = None, lengths: Lengths = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: Tensor | None = None, lengths: None = None, resets: Tensor | None = None
    ) -> tuple[PackedSequence, Tensor]: ...

    @explicit
    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        lengths: Lengths = None,
        resets: Tensor | None = None,
        **unexpected: NoReturn,
    ) -> tuple[Any, Any]:
        if unexpected:
            refuse(_Recurrent.forward, unexpected, type(self).__name__)
        return self._run(input, hx, lengths, resets)

    def _run(
        self, input: Tensor | PackedSequence, hx: Any, lengths: Any, resets: Tensor | None, return_all_c: bool = False
    ) -> tuple[Any, ...]:
        """Output, final state and, if wanted, all c, in the form of the input."""
        name = type(self).__name__
        known = not isinstance(self, _Variant)
        if exports_onnx() and known and not (return_all_c or self._options(lengths, resets)):
            return super().forward(input, hx)
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise ValueError(f"{name}: lengths must be None beside a packed sequence, which has its own")
            return self._run_packed(input, hx, resets, return_all_c)
        if is_proxy(input):
            given = {"input": input, "hx": hx, "lengths": lengths, "resets": resets, "return_all_c": return_all_c}
            return record_module(self, given)
        if not isinstance(input, Tensor):
            raise TypeError(f"{name}: input must be a tensor, got {type(input).__name__}")
        check_not_nested(name, "input", input, NO_NESTED)
        if input.dim() not in (2, 3):
            raise ValueError(f"{name}: input must have 2 or 3 dimensions, got shape {tuple(input.shape)}")
        if input.dim() == 3:
            return self._run_padded(input, hx, lengths, resets, return_all_c, self.batch_first)
        hx = None if hx is None else _map_state(lambda t: t.unsqueeze(1), _check_dims(name, hx, self.mode, 2))
        resets = None if resets is None else _check_resets(name, resets, (input.shape[0],)).unsqueeze(1)
        if isinstance(lengths, int) or (isinstance(lengths, Tensor) and lengths.dim() == 0):
            lengths = [lengths] if isinstance(lengths, int) else lengths.unsqueeze(0)
        output, state, *cells = self._run_padded(input.unsqueeze(1), hx, lengths, resets, return_all_c, False)
        return output.squeeze(1), _map_state(lambda t: t.squeeze(1), state), *(c.squeeze(1) for c in cells)

    def _run_padded(
        self, input: Tensor, hx: Any, lengths: Any, resets: Tensor | None, return_all_c: bool, batch_first: bool
    ) -> tuple[Any, ...]:
        _check_features(type(self).__name__, input, self.input_size)
        options: dict[str, Any] = {"peepholes": None, "return_all_c": return_all_c} if self.mode == "LSTM" else {}
        if self.peephole:
            options["peepholes"] = [getattr(self, f"peephole_{suffix}") for suffix in self._suffixes()]
        if self.layer_norm:
            options["norms"] = [
                parameter
                for suffix in self._suffixes()
                for side in self._sides()
                for parameter in getattr(self, f"layer_norm_{side}_{suffix}").parameters()
            ]
        return _FUNCTIONS[self.mode](
            input,
            hx,
            self._weights(),
            lengths=lengths,
            num_layers=self.num_layers,
            bidirectional=self.bidirectional,
            batch_first=batch_first,
            dropout=self.dropout,
            training=self.training,
            recurrent_dropout=self.recurrent_dropout,
            zoneout=self.zoneout,
            resets=resets,
            recompute=self.recompute,
            **options,
        )

    def _run_packed(
        self, packed: PackedSequence, hx: Any, resets: Tensor | None, return_all_c: bool
    ) -> tuple[Any, ...]:
        """By way of padding; the order of the batch inside is the packed one, outside the user's."""
        name = type(self).__name__
        data, batch_sizes, sorted_indices, unsorted_indices = packed
        steps: Any = batch_sizes.shape[0]
        _check_features(name, data, self.input_size)
        padded, lengths = torch._VF._pad_packed_sequence(data, batch_sizes, False, 0.0, steps)
        batch = int(batch_sizes[0])
        if resets is not None:
            shape = (batch, steps) if self.batch_first else (steps, batch)
            resets = _check_resets(name, resets, shape)
            resets = resets.t() if self.batch_first else resets
        if sorted_indices is not None:
            if hx is not None:
                hx = _check_dims(name, hx, self.mode, 3)
                for state in hx if isinstance(hx, tuple) else (hx,):
                    if state.shape[1] != batch:
                        raise ValueError(f"{name}: hx must have the batch size {batch}, got shape {tuple(state.shape)}")
                hx = _map_state(lambda t: t.index_select(1, sorted_indices), hx)
            resets = None if resets is None else resets.index_select(1, sorted_indices)
        output, state, *cells = self._run_padded(padded, hx, lengths, resets, return_all_c, False)
        if unsorted_indices is not None:
            state = _map_state(lambda t: t.index_select(1, unsorted_indices), state)
        repacked = (torch._VF._pack_padded_sequence(t, lengths, False)[0] for t in (output, *cells))
        output, *cells = (PackedSequence(t, batch_sizes, sorted_indices, unsorted_indices) for t in repacked)
        return output, state, *cells


class LSTM(_Recurrent, torch.nn.LSTM):
    """`torch.nn.LSTM` on seqkern's kernels: constructor, state_dict and meaning are torch's; options beyond it follow.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype: as
            `torch.nn.LSTM`.
        layer_norm: layer norms of the input's product, of the state's product and of c on its way to h, with parameters
            `layer_norm_ih_l0.weight`, `layer_norm_ih_l0.bias`, `layer_norm_hh_l0.weight` and so on.
        recurrent_dropout, zoneout: probabilities, see `seqkern.lstm`; drawn in training mode, where evaluation has no
            recurrent dropout and the mean of zoneout.
        peephole: gates see the cell, by parameters `peephole_l0` and so on, (3, hidden_size), of i, f and o.
        recompute: saves less for backward, which finds the gates again.

    Shape: input (T, B, I), (B, T, I) with batch_first, (T, I) without a batch, or a `PackedSequence`, which comes out
    packed as torch's does. forward(input, hx=None, lengths=None, resets=None, return_all_c=False): see
    `seqkern.lstm`, for dtypes and errors as well. The backward pass runs in eval mode too.

    torch.compile breaks the graph at every instance of `torch.nn.LSTM`, this one among them, unless
    `torch._dynamo.config.allow_rnn` is set; `seqkern.lstm` is compiled in any case.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.nn.LSTM(5, 8, num_layers=2, bidirectional=True)
        >>> output, (h_n, c_n) = model(torch.randn(10, 3, 5), lengths=[10, 2, 7])
        >>> output.shape, h_n.shape
        (torch.Size([10, 3, 16]), torch.Size([4, 3, 8]))
    """

    @explicit
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        layer_norm: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float | tuple[float, float] = 0.0,
        peephole: bool = False,
        recompute: bool = False,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(LSTM.__init__, unexpected, "LSTM")
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype
        )
        self._set_options(layer_norm, recurrent_dropout, zoneout, peephole, recompute)

    @overload  # type: ignore[override]
    def forward(
        self, input: Tensor, hx: State | None = None, lengths: Lengths = None, resets: Tensor | None = None,
        return_all_c: Literal[False] = False,
    ) -> tuple[Tensor, State]: ...  # fmt: skip

    @overload
    def forward(
        self, input: Tensor, hx: State | None = None, lengths: Lengths = None, resets: Tensor | None = None,
        *, return_all_c: Literal[True],
    ) -> tuple[Tensor, State, Tensor]: ...  # fmt: skip

    @overload
    def forward(
        self, input: Tensor, hx: State | None = None, lengths: Lengths = None, resets: Tensor | None = None,
        return_all_c: bool = False,
    ) -> tuple[Tensor, State] | tuple[Tensor, State, Tensor]: ...  # fmt: skip

    @overload
    def forward(
        self, input: PackedSequence, hx: State | None = None, lengths: None = None, resets: Tensor | None = None,
        return_all_c: Literal[False] = False,
    ) -> tuple[PackedSequence, State]: ...  # fmt: skip

    @overload
    def forward(
        self, input: PackedSequence, hx: State | None = None, lengths: None = None, resets: Tensor | None = None,
        *, return_all_c: Literal[True],
    ) -> tuple[PackedSequence, State, PackedSequence]: ...  # fmt: skip

    @overload
    def forward(
        self, input: PackedSequence, hx: State | None = None, lengths: None = None, resets: Tensor | None = None,
        return_all_c: bool = False,
    ) -> tuple[PackedSequence, State] | tuple[PackedSequence, State, PackedSequence]: ...  # fmt: skip

    @explicit
    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        lengths: Lengths = None,
        resets: Tensor | None = None,
        return_all_c: bool = False,
        **unexpected: NoReturn,
    ) -> tuple[Any, ...]:
        if unexpected:
            refuse(LSTM.forward, unexpected, type(self).__name__)
        return self._run(input, hx, lengths, resets, return_all_c)


class GRU(_Recurrent, torch.nn.GRU):
    """`torch.nn.GRU` on seqkern's kernels: constructor, state_dict and meaning are torch's; options beyond it follow.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as
            `torch.nn.GRU`.
        layer_norm: layer norms of the input's product and of the state's, with parameters `layer_norm_ih_l0.weight`,
            `layer_norm_ih_l0.bias`, `layer_norm_hh_l0.weight` and so on.
        recurrent_dropout, zoneout: probabilities, as `LSTM`; zoneout is one number.
        recompute: saves less for backward, which finds the gates again.

    Shape: as `LSTM`, with one tensor as the state. See `seqkern.gru` for dtypes and errors.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.nn.GRU(5, 8, batch_first=True)
        >>> output, h_n = model(torch.randn(3, 10, 5))
        >>> output.shape, h_n.shape
        (torch.Size([3, 10, 8]), torch.Size([1, 3, 8]))
    """

    @explicit
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        layer_norm: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        recompute: bool = False,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(GRU.__init__, unexpected, "GRU")
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device, dtype=dtype
        )
        self._set_options(layer_norm, recurrent_dropout, zoneout, False, recompute)


class RNN(_Recurrent, torch.nn.RNN):
    """`torch.nn.RNN` on seqkern's kernels: constructor, state_dict and meaning are torch's; options beyond it follow.

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, device, dtype: as
            `torch.nn.RNN`.
        layer_norm, recurrent_dropout, zoneout: as `GRU`.
        recompute: saves nothing here: the one gate is h.

    Shape: as `GRU`. See `seqkern.rnn_tanh` and `seqkern.rnn_relu` for dtypes and errors.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.nn.RNN(5, 8, nonlinearity="relu")
        >>> output, h_n = model(torch.randn(10, 3, 5))
        >>> output.shape
        torch.Size([10, 3, 8])
    """

    @explicit
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        layer_norm: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        recompute: bool = False,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(RNN.__init__, unexpected, "RNN")
        super().__init__(
            input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype,
        )  # fmt: skip
        self._set_options(layer_norm, recurrent_dropout, zoneout, False, recompute)


class _Variant(_Recurrent):
    """What torch.nn.RNNBase does not know: another mode, with `gates` times the rows of a simple network."""

    gates: int
    own_mode: str

    @explicit
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        layer_norm: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        recompute: bool = False,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(type(self).__init__, unexpected, type(self).__name__)
        super().__init__(
            "RNN_TANH", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0, device, dtype
        )
        self.mode = self.own_mode
        for name, parameter in list(self.named_parameters()) if self.gates > 1 else ():
            rows = torch.empty((self.gates * len(parameter), *parameter.shape[1:]), device=device, dtype=dtype)
            setattr(self, name, torch.nn.Parameter(rows))
        self.reset_parameters()
        self._set_options(layer_norm, recurrent_dropout, zoneout, False, recompute)

    def flatten_parameters(self) -> None:
        """There is no cuDNN network of this kind, for which torch would make one block of the parameters."""


class AdditiveRNN(_Variant):
    """A network whose state is added to, h_t = h_{t-1} + tanh(W x_t + U h_{t-1} + b): see `seqkern.additive_rnn`.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as
            `torch.nn.RNN`, whose parameters it has, but without `nonlinearity`.
        layer_norm, recurrent_dropout, zoneout, recompute: as `GRU`.

    Shape: as `GRU`.

    Example:
        >>> import torch, seqkern
        >>> output, h_n = seqkern.nn.AdditiveRNN(5, 8)(torch.randn(10, 3, 5), lengths=[10, 2, 7])
        >>> output.shape
        torch.Size([10, 3, 8])
    """

    gates, own_mode = 1, "ADDITIVE_RNN"


class InterpolatedRNN(_Variant):
    """A network that interpolates, h_t = f_t * h_{t-1} + (1 - f_t) * u_t: see `seqkern.interpolated_rnn`.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as
            `torch.nn.GRU`, with parameters of 2 * hidden_size rows: those of f, then of u.
        layer_norm, recurrent_dropout, zoneout, recompute: as `GRU`.

    Shape: as `GRU`.

    Example:
        >>> import torch, seqkern
        >>> output, h_n = seqkern.nn.InterpolatedRNN(5, 8, bidirectional=True)(torch.randn(10, 3, 5))
        >>> output.shape
        torch.Size([10, 3, 16])
    """

    gates, own_mode = 2, "INTERPOLATED_RNN"


# ---- cells --------------------------------------------------------------------------------------------------------


class LSTMCell(torch.nn.LSTMCell):
    """`torch.nn.LSTMCell` on seqkern's kernels: constructor, state_dict and meaning are torch's.

    Shape: input (B, I) or (I,), hx a pair of (B, H) or (H,); see `seqkern.lstm_cell` for dtypes and errors.

    Example:
        >>> import torch, seqkern
        >>> cell = seqkern.nn.LSTMCell(5, 8)
        >>> h, c = cell(torch.randn(3, 5))
        >>> h, c = cell(torch.randn(3, 5), (h, c))
    """

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        return _run_cell(self, "lstm", input, hx)


class GRUCell(torch.nn.GRUCell):
    """`torch.nn.GRUCell` on seqkern's kernels: constructor, state_dict and meaning are torch's.

    Shape: input (B, I) or (I,), hx (B, H) or (H,); see `seqkern.gru_cell` for dtypes and errors.

    Example:
        >>> import torch, seqkern
        >>> cell = seqkern.nn.GRUCell(5, 8)
        >>> h = cell(torch.randn(3, 5))
        >>> h = cell(torch.randn(3, 5), h)
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return _run_cell(self, "gru", input, hx)


class RNNCell(torch.nn.RNNCell):
    """`torch.nn.RNNCell` on seqkern's kernels: constructor, state_dict and meaning are torch's.

    Shape: input (B, I) or (I,), hx (B, H) or (H,); see `seqkern.rnn_tanh_cell` and `seqkern.rnn_relu_cell` for dtypes
    and errors.

    Example:
        >>> import torch, seqkern
        >>> cell = seqkern.nn.RNNCell(5, 8, nonlinearity="relu")
        >>> h = cell(torch.randn(3, 5))
        >>> h = cell(torch.randn(3, 5), h)
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        if self.nonlinearity not in ("tanh", "relu"):
            raise ValueError(f'RNNCell: nonlinearity must be "tanh" or "relu", got {self.nonlinearity!r}')
        return _run_cell(self, f"rnn_{self.nonlinearity}", input, hx)


_CELL_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lstm": lstm_cell,
    "gru": gru_cell,
    "rnn_tanh": rnn_tanh_cell,
    "rnn_relu": rnn_relu_cell,
}


def _run_cell(module: torch.nn.RNNCellBase, cell: str, input: Tensor, hx: Any) -> Any:
    if is_proxy(input):
        return record_module(module, {"input": input, "hx": hx})
    parameters = module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh
    if fast():
        state = _direct.rnn_cell(CELLS[cell], input, hx, *parameters)
        if state is not None:
            return state
    name = type(module).__name__
    if not isinstance(input, Tensor):
        raise TypeError(f"{name}: input must be a tensor, got {type(input).__name__}")
    check_not_nested(name, "input", input, NO_NESTED)
    if input.dim() not in (1, 2):
        raise ValueError(f"{name}: input must have 1 or 2 dimensions, got shape {tuple(input.shape)}")
    _check_features(name, input, module.weight_ih.shape[-1])
    batched = input.dim() == 2
    if not batched:
        input = input.unsqueeze(0)
    if hx is None:
        hx = input.new_zeros(input.shape[0], module.hidden_size)
        hx = (hx, hx) if cell == "lstm" else hx
    elif not batched:
        hx = _map_state(lambda t: t.unsqueeze(0), _check_dims(name, hx, cell.upper(), 1))
    state = _CELL_FUNCTIONS[cell](input, hx, *parameters)
    return state if batched else _map_state(lambda t: t.squeeze(0), state)


# ---- the form of input and state ----------------------------------------------------------------------------------


def _check_features(op: str, input: Tensor, input_size: int) -> None:
    if input.shape[-1] != input_size:
        raise ValueError(f"{op}: input's last dimension must be input_size = {input_size}, got {tuple(input.shape)}")


def _check_dims(op: str, hx: Any, mode: str, dims: int) -> Any:
    """The state, h or a tuple (h, c), of so many dimensions: two beside an input without a batch."""
    pair = mode == "LSTM"
    states = check_pair(op, hx) if pair else (check_state(op, hx),)
    for i, state in enumerate(states):
        if state.dim() != dims:
            beside = " beside an input without a batch" if dims < 3 else ""
            raise ValueError(
                f"{op}: hx{f'[{i}]' * pair} must have {dims} dimension{'s' * (dims > 1)}{beside}, "
                f"got shape {tuple(state.shape)}"
            )
    return states if pair else hx


def _check_resets(op: str, resets: Any, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(resets, Tensor):
        raise TypeError(f"{op}: resets must be a tensor or None, got {type(resets).__name__}")
    if tuple(resets.shape) != shape:
        raise ValueError(f"{op}: resets must have shape {shape}, got {tuple(resets.shape)}")
    return resets


def _map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Of h, or of h and c."""
    return tuple(map(function, state)) if isinstance(state, tuple) else function(state)
