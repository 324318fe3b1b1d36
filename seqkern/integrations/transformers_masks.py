"""Masks of transformers that say what they hide instead of storing it.

transformers builds a mask once a forward pass, from a function of (batch, head, query, key), and hands it to every
layer. A function that is known, by identity, to be causal, bidirectional, a sliding window of either, or packed
sequences of those, becomes a `Mask`: a boolean tensor (B, 1, Nq, Nk) without storage, from which the attention function
reads options. Every other function, and every trace of a compiler, gets the stored mask that transformers makes itself.

Whoever else looks into a `Mask` (adds to it, slices it, prints it) finds the stored mask: any operation makes it first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
import transformers.masking_utils as masking
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Pattern:
    """What a query sees, by the positions of queries and keys in the whole sequence."""

    causal: bool
    window: int | None = None  # keys at a distance of `window` and more are hidden
    sequences: Tensor | None = None  # (B, N), the number of the sequence of each token, where several are packed


def read(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of transformers' mask function, None if it is none of those known here."""
    if function is masking.causal_mask_function:
        return Pattern(causal=True)
    if function is masking.bidirectional_mask_function:
        return Pattern(causal=False)
    parts = _closure(function, _AND).get("mask_functions", ())
    if len(parts) != 2:
        return None
    first, second = parts
    if _closure(second, _PACKED):
        inner = _closure(first, _REMAPPED).get("mask_function")
        pattern = None if inner is None else read(inner)
        if pattern is None or pattern.sequences is not None:
            return None
        return replace(pattern, sequences=_closure(second, _PACKED)["packed_sequence_mask"])
    if second is masking.causal_mask_function and _closure(first, _WINDOW):
        return Pattern(causal=True, window=_closure(first, _WINDOW)["sliding_window"])
    if second is masking.bidirectional_mask_function and _closure(first, _WINDOW_BOTH):  # its distance is inclusive
        return Pattern(causal=False, window=_closure(first, _WINDOW_BOTH)["sliding_window"] + 1)
    return None


def _code(make: str, *arguments: Any) -> CodeType | None:
    """What the inner functions of transformers' factory share: their code. None where this version has no such one."""
    factory = getattr(masking, make, None)
    return None if factory is None else factory(*arguments).__code__


_AND = _code("and_masks", masking.causal_mask_function)
_WINDOW = _code("sliding_window_overlay", 1)
_WINDOW_BOTH = _code("sliding_window_bidirectional_overlay", 1)
_PACKED = _code("packed_sequence_mask_function", None)
_REMAPPED = _code("remap_positions_for_packed_sequence", masking.causal_mask_function, None)


def _closure(function: Callable[..., Any], code: CodeType | None) -> dict[str, Any]:
    """The variables that a function of this code was made with; {} if it is another function."""
    same = getattr(function, "__code__", None) is code
    if code is None or not same:
        return {}
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


class Mask(Tensor):
    """A boolean mask, True where a query sees a key, (B, 1, Nq, Nk), that is stored only when somebody looks into it.

    Attributes:
        pattern: what is visible but for the padding.
        padding: (B, Nk), bool, False for a key that is padding; None without any.
        offset: query i stands at the position of key i + offset.
    """

    pattern: Pattern
    padding: Tensor | None
    offset: int
    _starts: Tensor | None

    @staticmethod
    def __new__(
        cls, size: tuple[int, int, int], device: Any, pattern: Pattern, padding: Tensor | None, offset: int
    ) -> Mask:
        batch, queries, keys = size
        shape = (batch, 1, queries, keys)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.pattern, mask.padding, mask.offset, mask._starts = pattern, padding, offset, None
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        args, kwargs = pytree.tree_map_only(Mask, Mask.stored, (args, kwargs or {}))
        return func(*args, **kwargs)

    def stored(self) -> Tensor:
        """The mask as an ordinary tensor."""
        batch, _, queries, keys = self.shape
        i = torch.arange(queries, device=self.device)[:, None] + self.offset
        distance = i - torch.arange(keys, device=self.device)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.pattern.causal:
            visible &= distance >= 0
        if self.pattern.window is not None:
            visible &= distance.abs() < self.pattern.window
        mask = visible.expand(batch, 1, queries, keys)
        if self.pattern.sequences is not None:
            mask = mask & (self.pattern.sequences[:, None, :, None] == self.pattern.sequences[:, None, None])
        if self.padding is not None:
            mask = mask & self.padding[:, None, None]
        return mask.contiguous()

    def starts(self) -> Tensor:
        """Where the packed sequences of all rows begin, one row behind another, and their end; int32. Found once."""
        if self._starts is None:
            assert self.pattern.sequences is not None
            self._starts = _boundaries(self.pattern.sequences)
        return self._starts

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Mask({tuple(self.shape)}, {self.pattern}, padding={self.padding is not None})"


def _boundaries(sequences: Tensor) -> Tensor:
    change = torch.ones_like(sequences, dtype=torch.bool)  # at the first token of every row, too
    change[:, 1:] = sequences.diff(dim=1) != 0
    end = torch.tensor([sequences.numel()], device=sequences.device)
    return torch.cat([change.flatten().nonzero().flatten(), end]).to(torch.int32)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask interface: the mask of a forward pass, None where nothing but `is_causal` hides anything.

    The arguments are those of `transformers.masking_utils.sdpa_mask`.
    """
    compiling = torch.compiler.is_compiling() or torch.jit.is_tracing()
    pattern = None if compiling or use_vmap else read(mask_function)
    offset = _readable(q_offset, q_length)
    if pattern is None or offset is None:
        return masking.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device, **kwargs,
        )  # fmt: skip
    diagonal = offset - kv_offset
    padding = masking.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(device=device, dtype=torch.bool)
        # What causal and window hide anyway need not be in it: a static cache's empty end, for one.
        seen = min(kv_length, diagonal + q_length) if pattern.causal else kv_length
        if bool(padding[:, :seen].all()):
            padding = None
    if padding is None and pattern.window is None and pattern.sequences is None:
        square = diagonal == 0 and q_length == kv_length
        if (allow_is_bidirectional_skip and not pattern.causal) or (
            allow_is_causal_skip and pattern.causal and (square or (q_length == 1 and diagonal + 1 == kv_length))
        ):
            return None
    return Mask((batch_size, q_length, kv_length), device, pattern, padding, diagonal)


def _readable(q_offset: int | Tensor, q_length: int) -> int | None:
    """The position of the first query. A static cache holds it in a tensor: on a GPU reading it, once a step, would
    wait for everything that was launched; it is read once for a prompt."""
    if isinstance(q_offset, Tensor):
        return int(q_offset) if q_offset.device.type == "cpu" or q_length > 1 else None
    return int(q_offset)
