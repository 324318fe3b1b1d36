"""Tree-LSTMs as modules."""

from __future__ import annotations

import math
from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch.types import Device

from seqkern._keywords import explicit, refuse
from seqkern.ops.tree_lstm import TreeSchedule, tree_lstm


class _TreeLSTM(torch.nn.Module):
    """Parameters and calls of both kinds."""

    kind: Literal["child_sum", "nary"]

    def __init__(
        self, input_size: int, hidden_size: int, slots: int, bias: bool, device: Device, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.slots = input_size, hidden_size, slots
        rows, columns = (3 + slots, slots) if self.kind == "nary" else (4, 1)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight_ih = parameter(4 * hidden_size, input_size)
        self.weight_hh = parameter(rows * hidden_size, columns * hidden_size)
        if bias:
            self.bias_ih = parameter(4 * hidden_size)
            self.bias_hh = parameter(4 * hidden_size)
        else:
            self.register_parameter("bias_ih", None)
            self.register_parameter("bias_hh", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1 / sqrt(hidden_size), as torch.nn.LSTMCell's."""
        bound = 1 / math.sqrt(self.hidden_size) if self.hidden_size else 0
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        slots = f", slots={self.slots}" if self.kind == "nary" else ""
        return f"{self.input_size}, {self.hidden_size}{slots}" + ("" if self.bias_ih is not None else ", bias=False")

    def forward(self, x: Tensor, schedule: TreeSchedule) -> tuple[Tensor, Tensor]:
        """As the class says."""
        return tree_lstm(
            x, schedule, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, kind=self.kind
        )  # fmt: skip


class ChildSumTreeLSTM(_TreeLSTM):
    """A Tree-LSTM whose nodes sum their children's states: any number of children, whose order does not count.

    Args:
        input_size: features of a node's input.
        hidden_size: of the state.
        bias: whether it has biases.
        device, dtype: of the parameters, which are torch.nn.LSTMCell's: its state_dict loads, and on a chain the
            module computes the same.

    Shape, of forward(x, schedule): x (nodes, input_size) in the order of the `seqkern.TreeSchedule`. Returns h and c of
    all nodes, (nodes, hidden_size); `h[schedule.roots]` are those of the trees. Equations and errors:
    `seqkern.tree_lstm`.

    Source: Tai, Socher and Manning 2015, equations 2 to 8.

    Example:
        >>> import torch, seqkern
        >>> schedule = seqkern.TreeSchedule.from_parents([-1, 0, 0, 2])
        >>> h, c = seqkern.nn.ChildSumTreeLSTM(5, 8)(torch.randn(4, 5), schedule)
        >>> h[schedule.roots].shape
        torch.Size([1, 8])
    """

    kind = "child_sum"

    @explicit
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(ChildSumTreeLSTM.__init__, unexpected, "ChildSumTreeLSTM")
        super().__init__(input_size, hidden_size, 0, bias, device, dtype)


class NaryTreeLSTM(_TreeLSTM):
    """A Tree-LSTM with weights of its own for each child slot: binary trees, or at most `slots` children in order.

    Args:
        input_size: features of a node's input.
        hidden_size: of the state.
        slots: children of a node, at most; a slot that is empty counts as a state of zeros.
        bias: whether it has biases.
        device, dtype: of the parameters: weight_ih (4H, input_size), weight_hh ((3 + slots)H, slots H), bias_ih and
            bias_hh (4H,).

    Shape: as `ChildSumTreeLSTM`.

    Source: Tai, Socher and Manning 2015, equations 9 to 14.

    Example:
        >>> import torch, seqkern
        >>> schedule = seqkern.TreeSchedule.from_nested([(("the", "cat"), "sleeps")])
        >>> h, c = seqkern.nn.NaryTreeLSTM(5, 8)(torch.randn(schedule.nodes, 5), schedule)
        >>> h.shape
        torch.Size([5, 8])
    """

    kind = "nary"

    @explicit
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        slots: int = 2,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(NaryTreeLSTM.__init__, unexpected, "NaryTreeLSTM")
        if slots < 1:
            raise ValueError(f"NaryTreeLSTM: slots must be at least 1, got {slots}")
        super().__init__(input_size, hidden_size, slots, bias, device, dtype)
