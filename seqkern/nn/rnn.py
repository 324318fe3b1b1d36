"""Recurrent networks as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from seqkern.ops.rnn import check_pair, lstm, lstm_cell


class LSTM(torch.nn.LSTM):
    """`torch.nn.LSTM` on seqkern's kernels: constructor, state_dict and meaning are torch's.

    Shape: input (T, B, I), (B, T, I) with batch_first, or (T, I) without a batch; see `seqkern.lstm` for dtypes and
    errors. The backward pass runs in eval mode too. Projections (proj_size) and packed sequences are not available
    yet and raise NotImplementedError.

    torch.compile breaks the graph at every instance of `torch.nn.LSTM`, this one among them, unless
    `torch._dynamo.config.allow_rnn` is set; `seqkern.lstm` is compiled in any case.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.nn.LSTM(5, 8, num_layers=2, bidirectional=True)
        >>> output, (h_n, c_n) = model(torch.randn(10, 3, 5))
        >>> output.shape, h_n.shape
        (torch.Size([10, 3, 16]), torch.Size([4, 3, 8]))
    """

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
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if proj_size > 0:
            raise NotImplementedError("LSTM: proj_size > 0 is not available yet; use torch.nn.LSTM")
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0, device, dtype
        )

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if isinstance(input, PackedSequence):
            raise NotImplementedError(
                "LSTM: packed sequences are not available yet; use torch.nn.LSTM, which takes the same state_dict"
            )
        if not isinstance(input, Tensor):
            raise TypeError(f"LSTM: input must be a tensor, got {type(input).__name__}")
        if input.dim() not in (2, 3):
            raise ValueError(f"LSTM: input must have 2 or 3 dimensions, got shape {tuple(input.shape)}")
        _check_features("LSTM", input, self.input_size)
        batched, batch_dim = input.dim() == 3, 0 if self.batch_first else 1
        if not batched:
            input = input.unsqueeze(batch_dim)
            hx = None if hx is None else _with_batch("LSTM", hx, 2, 1)
        output, (h_n, c_n) = lstm(
            input,
            hx,
            [weight for weights in self.all_weights for weight in weights],
            num_layers=self.num_layers,
            bidirectional=self.bidirectional,
            batch_first=self.batch_first,
            dropout=self.dropout,
            training=self.training,
        )
        if not batched:
            return output.squeeze(batch_dim), (h_n.squeeze(1), c_n.squeeze(1))
        return output, (h_n, c_n)


class LSTMCell(torch.nn.LSTMCell):
    """`torch.nn.LSTMCell` on seqkern's kernels: constructor, state_dict and meaning are torch's.

    Shape: input (B, I) or (I,), hx a pair of (B, H) or (H,); see `seqkern.lstm_cell` for dtypes and errors.

    Example:
        >>> import torch, seqkern
        >>> cell = seqkern.nn.LSTMCell(5, 8)
        >>> h, c = cell(torch.randn(3, 5))
        >>> h, c = cell(torch.randn(3, 5), (h, c))
    """

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if not isinstance(input, Tensor):
            raise TypeError(f"LSTMCell: input must be a tensor, got {type(input).__name__}")
        if input.dim() not in (1, 2):
            raise ValueError(f"LSTMCell: input must have 1 or 2 dimensions, got shape {tuple(input.shape)}")
        _check_features("LSTMCell", input, self.input_size)
        batched = input.dim() == 2
        if not batched:
            input = input.unsqueeze(0)
        if hx is None:
            zeros = input.new_zeros(input.shape[0], self.hidden_size)
            hx = (zeros, zeros)
        elif not batched:
            hx = _with_batch("LSTMCell", hx, 1, 0)
        h, c = lstm_cell(input, hx, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return (h, c) if batched else (h.squeeze(0), c.squeeze(0))


def _check_features(op: str, input: Tensor, input_size: int) -> None:
    if input.shape[-1] != input_size:
        raise ValueError(f"{op}: input's last dimension must be input_size = {input_size}, got {tuple(input.shape)}")


def _with_batch(op: str, hx: tuple[Tensor, Tensor], dims: int, batch_dim: int) -> tuple[Tensor, Tensor]:
    """The state beside an input without a batch, with a batch of one."""
    for i, state in enumerate(check_pair(op, hx)):
        if state.dim() != dims:
            raise ValueError(
                f"{op}: hx[{i}] must have {dims} dimension{'s' * (dims > 1)} beside an input without a batch, "
                f"got shape {tuple(state.shape)}"
            )
    return hx[0].unsqueeze(batch_dim), hx[1].unsqueeze(batch_dim)
