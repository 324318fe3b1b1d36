"""The recurrent decoder of encoder-decoder models with attention, as a module."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.types import Device

from seqkern._keywords import explicit, refuse
from seqkern._recording import is_proxy, record_module
from seqkern.nn.cross_attention import AdditiveAttention, BilinearAttention, DotAttention
from seqkern.nn.rnn import GRUCell, LSTMCell
from seqkern.ops.attention_rnn import AttentionRnnOutput, AttentionRnnState, attention_rnn


class AttentionDecoder(torch.nn.Module):
    """An LSTM or GRU that attends to an encoder's output in every step: a whole teacher-forced sequence is one op.

    Bahdanau's order attends with the state before the step and feeds the context to the cell; Luong's attends with the
    state after it, and makes the attended state tanh(output([context; h])), which the next step is fed
    (`input_feeding`). Equations: `seqkern.attention_rnn`.

    Args:
        input_dim: features of the embedded tokens.
        hidden_dim: of the state.
        key_dim: features of the encoder's output.
        cell: "lstm" or "gru".
        order: "bahdanau" or "luong".
        score: "additive" (Bahdanau's; "concat" of Luong), "bilinear" ("general" of Luong) or "dot", which needs
            key_dim = hidden_dim.
        input_feeding: whether a step of Luong's order takes the attended state of the one before. Without it no step
            waits for another's attention.
        value_dim: features of the values, if they are not the keys. Default: key_dim.
        attention_dim: features inside the additive score. Default: hidden_dim.
        output_dim: features of the attended state. Default: hidden_dim.
        bias: of the cell, of the query's projection and of the output.
        device, dtype: of the parameters: those of `cell` (torch.nn.LSTMCell's or GRUCell's, whose input is the token
            and what it is fed), of `attention` (`AdditiveAttention`, `BilinearAttention` or `DotAttention`) and, in
            Luong's order, of `output` (torch.nn.Linear on [context; h]).

    Shape, of forward(input, key, value=None, state=None, key_padding_mask=None, *, key_lengths=None,
    need_weights=False, projected_key=None): input (B, T, input_dim), or (B, input_dim) for a single step; key
    (B, Tk, key_dim); value (B, Tk, value_dim), by default key. state: of the call before, or (h, c or None, feed or
    None), each (B, .); zeros by default, and for a feed that is not there. key_padding_mask (B, Tk): bool, **True
    hides**, as torch's. key_lengths (B,): sequence b has only its first key_lengths[b] keys. projected_key:
    `project_key(key)`, made before, when many calls come one after another. Returns `AttentionRnnOutput`: output
    (B, T, .), context (B, T, value_dim), the state, whose rows beam search can reorder, and the weights (B, T, Tk) if
    need_weights, else None; without T of a single step.

    Raises:
        TypeError, ValueError: arguments that do not fit, by name.

    Source: Bahdanau et al. 2015; Luong et al. 2015.

    Example:
        >>> import torch, seqkern
        >>> decoder = seqkern.nn.AttentionDecoder(16, 24, 32, order="luong")
        >>> memory, tokens = torch.randn(2, 7, 32), torch.randn(2, 5, 16)
        >>> decoder(tokens, memory, key_lengths=torch.tensor([7, 4])).output.shape
        torch.Size([2, 5, 24])
        >>> keys, found = decoder.project_key(memory), decoder(tokens[:, 0], memory)
        >>> found = decoder(tokens[:, 1], memory, state=found.state, projected_key=keys)
        >>> found.output.shape
        torch.Size([2, 24])
    """

    @explicit
    def __init__(
        self,
        input_dim: int,
        hidden_dim: int,
        key_dim: int,
        *,
        cell: Literal["lstm", "gru"] = "lstm",
        order: Literal["bahdanau", "luong"] = "bahdanau",
        score: Literal["additive", "bilinear", "dot"] = "additive",
        input_feeding: bool = True,
        value_dim: int | None = None,
        attention_dim: int | None = None,
        output_dim: int | None = None,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unexpected: NoReturn,
    ) -> None:
        name = "AttentionDecoder"
        if unexpected:
            refuse(AttentionDecoder.__init__, unexpected, name)
        for argument, given, known in (
            ("cell", cell, ("lstm", "gru")), ("order", order, ("bahdanau", "luong")),
            ("score", score, ("additive", "bilinear", "dot")),
        ):  # fmt: skip
            if given not in known:
                raise ValueError(f"{name}: {argument} must be one of {', '.join(known)}, got {given!r}")
        luong, columns = order == "luong", key_dim if value_dim is None else value_dim
        if not luong and not input_feeding:
            raise ValueError(f'{name}: input_feeding=False is of order="luong": Bahdanau\'s always feeds the context')
        if not luong and output_dim is not None:
            raise ValueError(f'{name}: output_dim is of order="luong", got {output_dim} with order="bahdanau"')
        if score != "additive" and attention_dim is not None:
            raise ValueError(f'{name}: attention_dim is of score="additive", got {attention_dim} with score={score!r}')
        if score == "dot" and key_dim != hidden_dim:
            raise ValueError(f'{name}: score="dot" needs key_dim = hidden_dim, got {key_dim} and {hidden_dim}')
        super().__init__()
        self.kind, self.order, self.score, self.input_feeding = cell, order, score, input_feeding
        outputs = hidden_dim if output_dim is None else output_dim
        fed = (outputs if input_feeding else 0) if luong else columns
        of_cell = LSTMCell if cell == "lstm" else GRUCell
        self.cell = of_cell(input_dim + fed, hidden_dim, bias, device=device, dtype=dtype)
        self.attention: AdditiveAttention | BilinearAttention | DotAttention
        if score == "additive":
            self.attention = AdditiveAttention(hidden_dim, key_dim, attention_dim, bias, device, dtype)
        elif score == "bilinear":
            self.attention = BilinearAttention(hidden_dim, key_dim, device, dtype)
        else:
            self.attention = DotAttention()
        self.output = torch.nn.Linear(columns + hidden_dim, outputs, bias, device, dtype) if luong else None

    def project_key(self, key: Tensor) -> Tensor:
        """The keys as the scores take them: made once for each source sequence, for many calls with projected_key."""
        return self.attention.project_key(key)

    def extra_repr(self) -> str:
        feeding = "" if self.input_feeding else ", input_feeding=False"
        return f"cell={self.kind!r}, order={self.order!r}, score={self.score!r}{feeding}"

    @explicit
    def forward(
        self,
        input: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        state: AttentionRnnState | tuple[Tensor, Tensor | None, Tensor | None] | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        key_lengths: Tensor | None = None,
        need_weights: bool = False,
        projected_key: Tensor | None = None,
        **unexpected: NoReturn,
    ) -> AttentionRnnOutput:
        """As the class says."""
        if is_proxy(input) or is_proxy(key):
            given: dict[str, Any] = {
                "input": input, "key": key, "value": value, "state": state, "key_padding_mask": key_padding_mask,
                "key_lengths": key_lengths, "need_weights": need_weights, "projected_key": projected_key,
            }  # fmt: skip
            return record_module(self, given)
        name = "AttentionDecoder"
        if unexpected:
            refuse(AttentionDecoder.forward, unexpected, name)
        for argument, t, least in (("input", input, 2), ("key", key, 3)):
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}: {argument} must be a tensor, got {type(t).__name__}")
            if not least <= t.dim() <= 3:
                shapes = "(B, T, D) or (B, D)" if argument == "input" else "(B, Tk, D)"
                raise ValueError(f"{name}: {argument} must have shape {shapes}, got {tuple(t.shape)}")
        step = input.dim() == 2
        mask = None if key_padding_mask is None else _visible(name, key_padding_mask, key)
        attend, cell = self.attention, self.cell
        options: dict[str, Any] = {"w_out": None, "b_out": None}
        if isinstance(attend, AdditiveAttention):
            projection = attend.query_proj
            options |= {"w_query": projection.weight, "b_query": projection.bias, "w_score": attend.weight}
        if self.output is not None:
            options |= {"w_out": self.output.weight, "b_out": self.output.bias}
        found = attention_rnn(
            input[:, None] if step else input,
            self.project_key(key) if projected_key is None else projected_key,
            key if value is None else value,
            cell.weight_ih, cell.weight_hh, cell.bias_ih if cell.bias else None, cell.bias_hh if cell.bias else None,
            **options,
            state=state,
            cell=self.kind,
            order=self.order,
            input_feeding=self.input_feeding,
            key_lengths=key_lengths,
            mask=mask,
            return_weights=need_weights,
        )  # fmt: skip
        if not step:
            return found
        output, context, after, weights = found
        return AttentionRnnOutput(output[:, 0], context[:, 0], after, None if weights is None else weights[:, 0])


def _visible(name: str, mask: Any, key: Tensor) -> Tensor:
    """torch's key_padding_mask as attention_rnn's mask, (B, 1, Tk)."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: key_padding_mask must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: key_padding_mask must be bool, True hides, got {mask.dtype}")
    if mask.shape != key.shape[:2]:
        raise ValueError(f"{name}: key_padding_mask must have shape {tuple(key.shape[:2])}, got {tuple(mask.shape)}")
    visible: Tensor = ~mask[:, None]
    return visible
