"""Rotary position embeddings of queries and keys: the functional API, gradients, fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import _direct, reference
from seqkern._arguments import by_name
from seqkern._direct import Context, fast, long_way
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern.ops._autograd import (
    FLOATING,
    Cost,
    apply,
    eager,
    per_sample,
    transforms_active,
    wants_gradient,
)

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@overload
def rope(
    query: Tensor,
    key: Tensor,
    positions: Tensor | int = 0,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    tables: tuple[Tensor, Tensor] | None = None,
    sequence_dim: int = -2,
) -> tuple[Tensor, Tensor]: ...
@overload
def rope(
    query: Tensor,
    key: None = None,
    positions: Tensor | int = 0,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    tables: tuple[Tensor, Tensor] | None = None,
    sequence_dim: int = -2,
) -> tuple[Tensor, None]: ...
@overload
def rope(
    query: Tensor,
    key: Tensor | None = None,
    positions: Tensor | int = 0,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    tables: tuple[Tensor, Tensor] | None = None,
    sequence_dim: int = -2,
) -> tuple[Tensor, Tensor | None]: ...


@explicit
def rope(
    query: Tensor,
    key: Tensor | None = None,
    positions: Tensor | int = 0,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    tables: tuple[Tensor, Tensor] | None = None,
    sequence_dim: int = -2,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embeddings of queries and keys, in one pass over memory.

    Pair j of features of a token is turned by the angle position * inv_freq[j], inv_freq[j] = theta^(-2 j /
    rotary_dim). In 16 bits the products are float32 and rounded once; angles are float64, exact to float32 at any
    position.

    Args:
        query: shape (B, H, N, D), or (B, N, H, D) with sequence_dim=-3; or without B. float64, float32, bfloat16 or
            float16. Features are contiguous, else copied; other strides are free.
        key: shape (B, H_kv, N, D), of any number of heads; or None.
        positions: whole numbers, shape (N,), or (B, N) for each sequence its own; or one number, that of the first
            token, the others follow.
        theta: the base of the frequencies.
        interleaved: False: features j and j + rotary_dim / 2 are a pair (GPT-NeoX, Llama). True: 2 j and 2 j + 1 are
            (RoFormer, GPT-J).
        rotary_dim: the features that are turned, the first ones, an even number; all D if None. The others are copied.
        inv_freq: the frequencies, shape (rotary_dim / 2,), instead of theta's: `nn.RotaryEmbedding` has Llama 3's and
            YaRN's.
        scaling: times cos and sin.
        tables: (cos, sin) instead of positions and frequencies, as `rope_tables` or a model makes them: shape (N, W) or
            (B or 1, N, W), W = rotary_dim / 2, or rotary_dim, a number for each feature. Any floating dtype.
        sequence_dim: of query and key, -2 or -3.

    Returns:
        (query, key), key None if it was. Of the inputs' shapes; heads and tokens lie in memory as the inputs' do.

    Gradients of every order for query and key. Tables, or inv_freq, that require gradients are differentiated by the
    reference.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes, devices or numbers that do not fit.
        NotImplementedError: the backend in force does not run on the device.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Example:
        >>> import torch, seqkern
        >>> q, k = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64)
        >>> q, k = seqkern.rope(q, k)
        >>> step_q, step_k = seqkern.rope(q[:, :, :1], k[:, :, :1], 5)  # the token at position 5
    """
    if fast():
        found: tuple[Tensor, Tensor | None] | None = _direct.rope(
            query, key, positions, tables, theta, inv_freq, scaling, rotary_dim, interleaved, sequence_dim
        )
        if found is not None and not unexpected:
            return found
    if any(map(is_proxy, (query, key, positions))):
        return record(rope, locals())
    if unexpected:
        refuse(rope, unexpected)
    _check_input("query", query)
    if sequence_dim not in (-2, -3):
        raise ValueError(f"rope: sequence_dim must be -2 or -3, got {sequence_dim!r}")
    head_dim = query.shape[-1]
    if isinstance(head_dim, Tensor):  # torch.jit.trace's
        head_dim = int(head_dim)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    _check_rotary_dim("rope", rotary_dim, head_dim)
    if key is not None:
        _check_input("key", key)
        _check_beside(query, key, sequence_dim)
    transforms_active()  # raises before Dynamo looks at a tensor
    backend = backend_for("rope", query)
    batched = query.dim() == 4
    batch, tokens = query.shape[0] if batched else 1, query.shape[sequence_dim]
    dtype = torch.promote_types(query.dtype, torch.float32)
    if tables is None:
        at = _positions("rope", positions, batch, tokens, query.device)
        cos, sin = _tables("rope", at, rotary_dim, theta, inv_freq, scaling, dtype, backend)
    else:
        if inv_freq is not None:
            raise ValueError("rope: tables and inv_freq are given: tables have the frequencies in them")
        cos, sin = (
            _check_table(t, name, batch, tokens, rotary_dim, query.device, dtype)
            for t, name in zip(_pair(tables), ("cos", "sin"), strict=True)
        )
        if cos.shape != sin.shape:
            raise ValueError(
                f"rope: tables must be of one shape, got {tuple(cos.shape)} and {tuple(sin.shape)} (cos and sin)"
            )
    # Heads and tokens in the order of memory, which is that of the results.
    swapped = query.stride(-3) < query.stride(-2) and min(query.shape[-3:-1]) > 1
    dim = sequence_dim + 4 if not swapped else -1 - sequence_dim

    def lay(t: Tensor) -> Tensor:
        t = t if batched else t.unsqueeze(0)
        return t.transpose(1, 2) if swapped else t

    def back(t: Tensor) -> Tensor:
        t = t.transpose(1, 2) if swapped else t
        return t if batched else t.squeeze(0)

    q, k = lay(query), None if key is None else lay(key)
    if backend == "reference" or wants_gradient(cos, sin):
        q_out = _formula(q, cos, sin, dim, rotary_dim, interleaved, False)
        k_out = None if k is None else _formula(k, cos, sin, dim, rotary_dim, interleaved, False)
    else:
        q_out, k_out = apply(
            _Rope, _RopeEager, wants_gradient(query, key), q, k, cos, sin, dim, rotary_dim, bool(interleaved), False
        )
    return back(q_out), None if k_out is None or k is None else back(k_out)


@explicit
def rope_tables(
    positions: Tensor,
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of `rope`, for a model that turns queries and keys in many layers by the same ones.

    Args:
        positions: whole numbers, shape (N,) or (B, N).
        rotary_dim, theta, inv_freq, scaling: as `rope`.
        dtype: float32, or float64 for float64 queries.

    Returns:
        (cos, sin), shape (*positions.shape, rotary_dim / 2): `rope`'s `tables`. Without gradients, unless inv_freq
        requires them.

    Raises:
        As `rope`.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Example:
        >>> import torch, seqkern
        >>> tables = seqkern.rope_tables(torch.arange(5), 64)
        >>> q, _ = seqkern.rope(torch.randn(2, 8, 5, 64), tables=tables)
    """
    if is_proxy(positions):
        return record(rope_tables, locals())
    if unexpected:
        refuse(rope_tables, unexpected)
    _check_rotary_dim("rope_tables", rotary_dim, None)
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"rope_tables: dtype must be torch.float32 or torch.float64, got {dtype}")
    _check_positions("rope_tables", positions)
    if positions.dim() not in (1, 2):
        raise ValueError(f"rope_tables: positions must have 1 or 2 dimensions, got shape {tuple(positions.shape)}")
    at = positions.long().reshape(1 if positions.dim() == 1 else positions.shape[0], positions.shape[-1])
    backend = backend_for("rope", at)
    cos, sin = _tables("rope_tables", at, rotary_dim, theta, inv_freq, scaling, dtype, backend)
    return (cos, sin) if positions.dim() == 2 else (cos[0], sin[0])


def cost(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Cost:
    """Work of a call on (tokens, heads, dim) numbers, or of its backward pass, without the tables."""
    return Cost(3 * tokens * heads * dim, 2 * tokens * heads * dim * dtype.itemsize)


# ---- checks -------------------------------------------------------------------------------------------------------


def _check_input(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"rope: {name} must be a tensor, got {type(t).__name__}")
    check_not_nested("rope", name, t, "give it the values of a jagged one, with positions")
    if t.dtype not in FLOATING:
        raise TypeError(f"rope: {name} must be float64, float32, bfloat16 or float16, got {t.dtype}")
    if t.dim() not in (3, 4):
        raise ValueError(f"rope: {name} must have 3 or 4 dimensions, got shape {tuple(t.shape)}")


def _check_beside(query: Tensor, key: Tensor, sequence_dim: int) -> None:
    if key.dtype != query.dtype:
        raise TypeError(f"rope: key must have the query's dtype {query.dtype}, got {key.dtype}")
    if key.device != query.device:
        raise ValueError(f"rope: key must be on the query's device {query.device}, got {key.device}")
    heads = key.dim() - 5 - sequence_dim if key.dim() == query.dim() else 0
    shapes = [[size for dim, size in enumerate(t.shape) if dim != heads] for t in (query, key)]
    if key.dim() != query.dim() or shapes[0] != shapes[1]:
        raise ValueError(
            f"rope: key must have the query's shape {tuple(query.shape)} but for the heads, got {tuple(key.shape)}"
        )


def _check_rotary_dim(op: str, rotary_dim: Any, head_dim: int | None) -> None:
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, (int, torch.SymInt)):
        raise TypeError(f"{op}: rotary_dim must be a whole number, got {rotary_dim!r}")
    if rotary_dim < 0 or rotary_dim % 2 or (head_dim is not None and rotary_dim > head_dim):
        most = "" if head_dim is None else f" and at most the query's last dimension, {head_dim}"
        raise ValueError(f"{op}: rotary_dim must be even{most}, got {rotary_dim}")


def _check_positions(op: str, positions: Any) -> None:
    if not isinstance(positions, Tensor) or positions.dtype not in _INTEGERS:
        got = positions.dtype if isinstance(positions, Tensor) else repr(positions)
        raise TypeError(f"{op}: positions must be whole numbers, a tensor of int64 or int32, got {got}")


def _positions(op: str, positions: Tensor | int, batch: int, tokens: int, device: torch.device) -> Tensor:
    """(B or 1, N), int64."""
    if isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
        return torch.arange(positions, positions + tokens, device=device)[None]
    _check_positions(op, positions)
    assert isinstance(positions, Tensor)
    shapes = [(tokens,), (1, tokens), (batch, tokens)]
    if tuple(positions.shape) not in shapes:
        raise ValueError(
            f"{op}: positions must have shape {(tokens,)} or {(batch, tokens)} (tokens, or batch and tokens), "
            f"got {tuple(positions.shape)}"
        )
    if positions.device != device:
        raise ValueError(f"{op}: positions must be on the query's device {device}, got {positions.device}")
    return positions.long().reshape(1 if positions.dim() == 1 else positions.shape[0], tokens)


def _tables(
    op: str, positions: Tensor, rotary_dim: int, theta: Any, inv_freq: Tensor | None, scaling: Any, dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not isinstance(scaling, (float, int)):
        raise TypeError(f"{op}: scaling must be a number, got {scaling!r}")
    if inv_freq is None:
        if not isinstance(theta, (float, int)):
            raise TypeError(f"{op}: theta must be a number, got {theta!r}")
        if not theta > 0:
            raise ValueError(f"{op}: theta must be positive, got {theta}")
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
        inv_freq = float(theta) ** (steps / -rotary_dim)
    elif not isinstance(inv_freq, Tensor) or not inv_freq.is_floating_point():
        got = inv_freq.dtype if isinstance(inv_freq, Tensor) else type(inv_freq).__name__
        raise TypeError(f"{op}: inv_freq must be a tensor of floating point numbers, got {got}")
    elif inv_freq.shape != (rotary_dim // 2,):
        raise ValueError(f"{op}: inv_freq must have shape {(rotary_dim // 2,)}, got {tuple(inv_freq.shape)}")
    elif inv_freq.device != positions.device:
        raise ValueError(f"{op}: inv_freq must be on the device {positions.device}, got {inv_freq.device}")
    if backend == "reference" or wants_gradient(inv_freq) or transforms_active():
        return reference.rope_tables(positions, inv_freq, float(scaling), dtype)
    found: tuple[Tensor, Tensor] = kernel("rope_tables", positions)(
        positions, inv_freq.double(), float(scaling), dtype == torch.float64
    )
    return found


def _pair(tables: Any) -> Sequence[Any]:
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        raise TypeError(f"rope: tables must be a pair, cos and sin, got {type(tables).__name__}")
    return tables


def _check_table(
    t: Any, name: str, batch: int, tokens: int, rotary_dim: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        got = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"rope: {name} of tables must be a tensor of floating point numbers, got {got}")
    fits = t.dim() in (2, 3) and t.shape[-2] == tokens and (t.dim() == 2 or t.shape[0] in (1, batch))
    if not fits or t.shape[-1] not in (rotary_dim, rotary_dim // 2):
        raise ValueError(
            f"rope: {name} of tables must have shape (N, W) or (B or 1, N, W), N = {tokens} tokens, B = {batch} and "
            f"W = {rotary_dim // 2} or {rotary_dim}, got {tuple(t.shape)}"
        )
    if t.device != device:
        raise ValueError(f"rope: {name} of tables must be on the query's device {device}, got {t.device}")
    return (t if t.dim() == 3 else t[None]).to(dtype)


# ---- autograd -----------------------------------------------------------------------------------------------------


def _formula(
    t: Tensor, cos: Tensor, sin: Tensor, sequence_dim: int, rotary_dim: int, interleaved: bool, inverse: bool
) -> Tensor:
    heads = -2 if sequence_dim == 1 else -3
    return reference.rope(t, cos.unsqueeze(heads), sin.unsqueeze(heads), rotary_dim, interleaved, inverse)


class _Rope(torch.autograd.Function):
    """Linear in query and key: its derivative is itself, and its gradient the same with `inverse` the other way."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        sequence_dim: int,
        rotary_dim: int,
        interleaved: bool,
        inverse: bool,
    ) -> Any:
        return kernel("rope", query)(query, key, cos, sin, sequence_dim, rotary_dim, interleaved, inverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, cos, sin, *ctx.options = inputs
        ctx.single = key is None
        ctx.set_materialize_grads(False)
        kept: tuple[Any, ...] = (cos, sin)
        if forward_ad._current_level >= 0:
            kept = (*kept, query, key)
            ctx.save_for_forward(*kept)
        elif ctx.single:
            ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*kept)

    @staticmethod
    def turned(ctx: Any, first: Tensor | None, second: Tensor | None, inverse: bool) -> Any:
        """A gradient or a tangent of query and of key, either of which may be None."""
        if ctx.single:
            second = None
        if first is None and second is None:
            return None, None
        (cos, sin, *_), options = ctx.saved_tensors, (*ctx.options[:-1], inverse)
        differentiable = torch.is_grad_enabled()
        if first is None:
            return None, apply(_Rope, _RopeEager, differentiable, second, None, cos, sin, *options)[0]
        found = apply(_Rope, _RopeEager, differentiable, first, second, cos, sin, *options)
        return found[0], None if second is None else found[1]

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor | None, grad_key: Tensor | None) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        return *_Rope.turned(ctx, grad_query, grad_key, not ctx.options[-1]), *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, query: Tensor | None, key: Tensor | None, *_: Any) -> Any:
        cos, sin, *inputs = ctx.saved_tensors

        def along(input: Tensor | None, tangent: Tensor | None) -> Tensor:
            if input is None:
                return cos.new_empty(0, dtype=inputs[0].dtype)
            return torch.zeros_like(input) if tangent is None else _formula(tangent, cos, sin, *ctx.options)

        return along(inputs[0], query), along(inputs[1], key)

    @staticmethod
    def plain(query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, *options: Any) -> Any:
        found = [None if t is None else _formula(t, cos, sin, *options) for t in (query, key)]
        return found[0], query.new_empty(0) if key is None else found[1]


_RopeEager = eager(_Rope)


@long_way("RopeNode")
def _backward_of_node(
    grads: Sequence[Tensor | None],
    saved: Sequence[Any],
    kept: Sequence[Tensor],
    numbers: Sequence[float],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients of query and key; they are differentiable again."""
    swapped, dim, rotary_dim, interleaved = map(int, numbers)
    context: Any = Context([t if t.dim() == 3 else t[None] for t in saved], needs)
    context.options, context.single = [dim, rotary_dim, bool(interleaved), False], len(grads) == 1
    query, key = (None if t is None else t.transpose(1, 2) if swapped else t for t in (*grads, None)[:2])
    found = _Rope.backward(context, query, key)[:2]
    return [None if t is None else t.transpose(1, 2) if swapped else t for t in found]


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::rope")
def _(query: Tensor, key: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(0 if key is None else key.shape)


@torch.library.register_fake("seqkern::rope_tables")
def _(positions: Tensor, inv_freq: Tensor, scaling: float, wide: bool) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, inv_freq.shape[0])
    dtype = torch.float64 if wide else torch.float32
    return inv_freq.new_empty(shape, dtype=dtype), inv_freq.new_empty(shape, dtype=dtype)


@torch.library.register_vmap("seqkern::rope")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    op = torch.ops.seqkern.rope
    named, dims = by_name(op, args), by_name(op, in_dims)
    tables = [named[name] for name in ("cos", "sin")]
    if any(dims[name] is not None for name in ("cos", "sin")) or tables[0].shape[0] != 1 or info.batch_size == 0:
        return per_sample(op, info.batch_size, tuple(dims.values()), tuple(named.values()))
    for name in ("query", "key"):  # samples become part of the batch
        if (t := named[name]) is not None:
            t = t.expand(info.batch_size, *t.shape) if dims[name] is None else t.movedim(dims[name], 0)
            named[name] = t.flatten(0, 1)
    query, key = op(*named.values())
    samples = (info.batch_size, query.shape[0] // info.batch_size)
    if named["key"] is None:
        return (query.unflatten(0, samples), key), (0, None)
    return (query.unflatten(0, samples), key.unflatten(0, samples)), (0, 0)
