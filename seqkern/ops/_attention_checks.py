"""Checks of attention's arguments, with errors that name them, and their conversion to the kernels' form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqkern._recording import check_not_nested
from seqkern.ops._autocast import autocasts
from seqkern.ops._autograd import FLOATING, readable, transforms_active

_INTEGERS = (torch.int32, torch.int64)
_NO_NUMBERS = (str, Tensor, list, tuple, dict)
_NO_NESTED = (
    "pass values() and offsets() of one with the layout torch.jagged to seqkern.attention_varlen, or pad it by "
    "torch.nested.to_padded_tensor and pass key_lengths to seqkern.attention"
)
_LARGEST = torch.finfo(torch.float32).max


def shape_of(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)


# ---- query, key and value -----------------------------------------------------------------------------------------


def check_tensors(op: str, *tensors: Tensor, least: int, most: int | None = None) -> tuple[Tensor, ...]:
    for name, t in zip(("query", "key", "value"), tensors, strict=False):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.is_nested:
            check_not_nested(op, name, t, _NO_NESTED)
        if t.dim() < least or (most is not None and t.dim() > most):
            wanted = f"{least}" if most == least else f"at least {least}"
            raise ValueError(f"{op}: {name} must have {wanted} dimensions, got shape {shape_of(t)}")
    return tensors


def check_types(op: str, query: Tensor, **others: Tensor) -> None:
    if query.dtype not in FLOATING:
        raise TypeError(f"{op}: query must be float64, float32, bfloat16 or float16, got {query.dtype}")
    for name, t in others.items():
        if t.dtype != query.dtype:
            raise TypeError(f"{op}: {name} must have the query's dtype {query.dtype}, got {t.dtype}")
        if t.device != query.device:
            raise ValueError(f"{op}: {name} must be on the query's device {query.device}, got {t.device}")


def check_head_dim(op: str, query: Tensor, key: Tensor) -> None:
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{op}: key must have the query's head dimension {query.shape[-1]} (its last), got shape {shape_of(key)}"
        )


def check_lengths(op: str, key: Tensor, value: Tensor) -> None:
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"{op}: value must have the key's length {key.shape[-2]}, got shape {shape_of(value)}")


def check_heads(op: str, heads: int, shared: int, name: str = "key") -> None:
    if heads % shared if shared else heads:
        raise ValueError(f"{op}: the {heads} heads of query must be a multiple of the {shared} heads of {name}")


def check_batch(op: str, query: Tensor, key: Tensor, value: Tensor | None, names: Sequence[str]) -> None:
    """Checks tensors of four dimensions: one batch size, and heads that fit."""
    for name, t in zip(names, (key, value), strict=False):
        if t is not None and t.shape[0] != query.shape[0]:
            raise ValueError(f"{op}: {name} must have the query's batch size {query.shape[0]}, got {shape_of(t)}")
    if value is not None and value.shape[1] != key.shape[1]:
        raise ValueError(f"{op}: {names[1]} must have the key's {key.shape[1]} heads, got {value.shape[1]}")
    check_heads(op, query.shape[1], key.shape[1], names[0])


def autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not autocasts(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def broadcast(op: str, query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Expands the three to the same leading dimensions; grouped keys and values keep their number of heads."""
    tail = 2
    if grouped:
        heads = query.shape[-3]
        check_heads(op, heads, key.shape[-3])
        check_heads(op, heads, value.shape[-3], "value")
        if key.shape[-3] != value.shape[-3]:  # key and value heads do not match: repeat both for every query head
            key, value = (t.repeat_interleave(heads // max(t.shape[-3], 1), -3) for t in (key, value))
        tail = 3
    batches = [t.shape[:-tail] for t in (query, key, value)]
    if batches[0] == batches[1] == batches[2]:
        return query, key, value
    try:
        batch = torch.broadcast_shapes(*batches)
    except RuntimeError:
        raise ValueError(
            f"{op}: the leading dimensions must broadcast (with enable_gqa, except the heads), "
            f"got query {shape_of(query)}, key {shape_of(key)}, value {shape_of(value)}"
        ) from None
    query, key, value = (t.expand(*batch, *t.shape[-tail:]) for t in (query, key, value))
    return query, key, value


# ---- numbers ------------------------------------------------------------------------------------------------------


def check_dropout(op: str, dropout_p: float) -> float:
    if dropout_p is None or isinstance(dropout_p, _NO_NUMBERS):
        raise TypeError(f"{op}: dropout_p must be a probability, got {dropout_p!r}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: dropout_p must be a probability, between 0 and 1, got {dropout_p}")
    return dropout_p


def check_scale(op: str, scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(max(head_dim, 1))
    if isinstance(scale, Tensor):
        if scale.dim() or scale.requires_grad:  # a scalar tensor is a number, as in torch
            got = "one that wants a gradient" if scale.requires_grad else f"shape {shape_of(scale)}"
            raise TypeError(
                f"{op}: scale must be a number, a tensor of no dimensions without a gradient, or None, got {got}; "
                "multiply the query by it instead, with scale=1"
            )
        scale = scale.item()
    if isinstance(scale, _NO_NUMBERS):
        raise TypeError(f"{op}: scale must be a number or None, got {scale!r}")
    if not abs(scale) <= _LARGEST:
        raise ValueError(f"{op}: scale must be a finite float32 number, got {scale}")
    return float(scale)


def check_softcap(op: str, softcap: float | None) -> float:
    """0 means none."""
    if softcap is None:
        return 0.0
    if isinstance(softcap, _NO_NUMBERS):
        raise TypeError(f"{op}: softcap must be a number or None, got {type(softcap).__name__}")
    if not 0 <= softcap <= _LARGEST:
        raise ValueError(f"{op}: softcap must be a finite number >= 0, got {softcap}")
    if 0 < softcap < 1e-30:  # its reciprocal would not be finite
        raise ValueError(f"{op}: softcap must be 0 (none) or at least 1e-30, got {softcap}")
    return float(softcap)


def check_band(op: str, causal: bool, window: Sequence[int | None] | None) -> tuple[int, int]:
    """How far a query sees to the left and to the right; -1 means no limit."""
    if window is None:
        return -1, 0 if causal else -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{op}: window must be a pair (left, right) or None, got {window!r}")
    for side in window:
        if not (side is None or isinstance(side, (int, torch.SymInt))):
            raise TypeError(f"{op}: window must have whole numbers or None in it, got {window!r}")
        if side is not None and side < -1:
            raise ValueError(f"{op}: window must have numbers >= 0 in it (-1 or None: no limit), got {tuple(window)}")
    # A side beyond 2^62 is longer than any sequence, and would not fit the op.
    left, right = (-1 if side is None or (isinstance(side, int) and side >= 2**62) else side for side in window)
    return left, 0 if causal else right


def check_align(op: str, causal_align: str) -> bool:
    """Whether the diagonal is at the lower right."""
    if causal_align not in ("lower_right", "upper_left"):
        raise ValueError(f'{op}: causal_align must be "lower_right" or "upper_left", got {causal_align!r}')
    return causal_align == "lower_right"


# ---- tensors of options -------------------------------------------------------------------------------------------


def _check_option(
    op: str, name: str, t: Any, query: Tensor, dtypes: Sequence[torch.dtype], words: str, kind: str = "a tensor or None"
) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be {kind}, got {type(t).__name__}")
    if t.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must be {words}, got {t.dtype}")
    if t.device != query.device:
        raise ValueError(f"{op}: {name} must be on the query's device {query.device}, got {t.device}")


def prepare_mask(op: str, mask: Tensor, query: Tensor, full: Sequence[int], name: str = "attn_mask") -> Tensor:
    """A mask that broadcasts to `full`, (..., heads, queries, keys), as (batch or 1, heads or 1, queries, keys).

    The last two may be 1 too, unless the mask needs a gradient: autograd then sums over the dimensions expanded here.
    """
    dtypes: tuple[torch.dtype, ...] = (torch.bool, torch.float32, query.dtype)
    if isinstance(mask, Tensor) and mask.is_floating_point() and autocasts(query):
        mask = mask if mask.dtype in dtypes else mask.to(query.dtype)
    if name == "bias":
        dtypes = dtypes[1:]
        _check_option(op, name, mask, query, dtypes, f"float32 or the query's dtype {query.dtype}")
    else:
        _check_option(op, name, mask, query, dtypes, f"bool, float32 or the query's dtype {query.dtype}")
    if query.dtype == torch.float64 and mask.dtype == torch.float32:
        mask = mask.double()
    sizes = mask.shape
    if len(sizes) > len(full) or any(m not in (1, n) for m, n in zip(reversed(sizes), reversed(full), strict=False)):
        raise ValueError(f"{op}: {name} must broadcast to {tuple(full)}, got shape {shape_of(mask)}")
    mask = mask[(None,) * (max(len(full), 4) - mask.dim())]
    if mask.dim() > 4:  # several batch dimensions become one
        outer = mask.shape[:-3]
        if any(n != 1 for n in outer):
            mask = mask.expand(*full[:-3], *mask.shape[-3:])
        mask = mask.flatten(0, -4)
    if mask.dtype != torch.bool and (mask.requires_grad or transforms_active()):
        for dim in (2, 3):
            if mask.shape[dim] != full[dim - 4]:
                mask = _spread(mask, dim, full[dim - 4])
    return mask


def with_bias(op: str, mask: Tensor | None, bias: Tensor, query: Tensor, full: Sequence[int]) -> Tensor:
    """Mask and bias as one mask."""
    bias = prepare_mask(op, bias, query, full, "bias")
    if mask is None:
        return bias
    mask = prepare_mask(op, mask, query, full)
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -math.inf)
    total = bias + mask
    return total if total.dtype in (torch.float32, query.dtype) else total.to(query.dtype)


def _spread(t: Tensor, dim: int, size: int) -> Tensor:
    """`t` expanded along one dimension, so that its gradient has the same bits on any number of threads.

    torch sums 32,768 or more numbers to one in as many parts as there are threads. So they are expanded in two steps,
    in pieces of fewer numbers.
    """
    piece = 1 << 14
    sizes = [-1] * t.dim()
    if size <= piece:
        sizes[dim] = size
        return t.expand(sizes)
    sizes[dim] = (size + piece - 1) // piece
    pieces = t.expand(sizes).unsqueeze(dim + 1)
    sizes.insert(dim + 1, piece)
    return pieces.expand(sizes).flatten(dim, dim + 1).narrow(dim, 0, size)


def check_key_lengths(op: str, lengths: Tensor, query: Tensor, batch: int, name: str = "key_lengths") -> Tensor:
    kind = "a tensor" if name == "cache_lengths" else "a tensor or None"
    _check_option(op, name, lengths, query, _INTEGERS, "int32 or int64", kind)
    if lengths.shape != (batch,):
        raise ValueError(f"{op}: {name} must have shape ({batch},), the batch size, got {shape_of(lengths)}")
    return lengths.contiguous()


def prepare_slopes(op: str, slopes: Tensor, query: Tensor, sequences: int) -> Tensor:
    """(sequences, heads), contiguous, in float32 or wider."""
    heads = query.shape[1]
    _check_option(op, "alibi_slopes", slopes, query, FLOATING, "float64, float32, bfloat16 or float16")
    if slopes.shape not in ((heads,), (sequences, heads)):
        raise ValueError(
            f"{op}: alibi_slopes must have shape ({heads},) or ({sequences}, {heads}), got {shape_of(slopes)}"
        )
    return slopes.to(torch.promote_types(query.dtype, torch.float32)).expand(sequences, heads).contiguous()


def prepare_sinks(op: str, sinks: Tensor, query: Tensor) -> Tensor:
    """(heads,), contiguous, in float32 or wider."""
    heads = query.shape[1]
    _check_option(op, "sinks", sinks, query, FLOATING, "float64, float32, bfloat16 or float16")
    if sinks.shape != (heads,):
        raise ValueError(f"{op}: sinks must have shape ({heads},), one for every head of query, got {shape_of(sinks)}")
    return sinks.to(torch.promote_types(query.dtype, torch.float32)).contiguous()


# ---- packed sequences ---------------------------------------------------------------------------------------------


def check_starts(op: str, starts: Tensor, longest: int, query: Tensor, rows: int, name: str, of: str) -> Tensor:
    """Checks the boundaries of the sequences in `of`; their values only if they can be read without waiting."""
    _check_option(op, name, starts, query, _INTEGERS, "int32 or int64", "a tensor")
    if starts.dim() != 1 or starts.shape[0] == 0:
        raise ValueError(
            f"{op}: {name} must have one dimension and one element more than there are sequences, "
            f"got shape {shape_of(starts)}"
        )
    limit = name.replace("cu_seqlens", "max_seqlen")
    if not isinstance(longest, (int, torch.SymInt)):
        raise TypeError(f"{op}: {limit} must be a whole number, got {longest!r}")
    if longest < 0:
        raise ValueError(f"{op}: {limit} must not be negative, got {longest}")
    if isinstance(longest, int) and longest >= 2**62:
        raise ValueError(f"{op}: {limit} must be below 2^62, got {longest}")
    if readable(starts):
        ends = starts.tolist()
        if ends[0] != 0:
            raise ValueError(f"{op}: {name} must start with 0, got {ends[0]}")
        for s, (start, end) in enumerate(itertools.pairwise(ends)):
            if end < start:
                raise ValueError(f"{op}: {name} must not decrease, got {start} and then {end}")
            if end - start > longest:
                raise ValueError(
                    f"{op}: {limit} must cover every sequence, got {longest} and a sequence {s} of {end - start}"
                )
        if ends[-1] > rows:
            raise ValueError(f"{op}: {name} must end at or before {rows}, the rows of {of}, got {ends[-1]}")
    return starts.contiguous()
