"""Attention: the functional API and its cost."""

from __future__ import annotations

from typing import Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as _torchs

from seqkern import _direct
from seqkern._arguments import AttentionNumbers, AttentionTensors
from seqkern._direct import fast
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for
from seqkern._recording import exports_onnx, is_proxy, record
from seqkern.ops._attention_autograd import rounded_lse, run
from seqkern.ops._attention_checks import (
    autocast,
    broadcast,
    check_align,
    check_band,
    check_batch,
    check_dropout,
    check_head_dim,
    check_heads,
    check_key_lengths,
    check_lengths,
    check_scale,
    check_softcap,
    check_starts,
    check_tensors,
    check_types,
    prepare_mask,
    prepare_sinks,
    prepare_slopes,
    shape_of,
    with_bias,
)
from seqkern.ops._autograd import Cost


@explicit
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unexpected: NoReturn,
) -> Tensor:
    """softmax(Q K^T * scale + mask) V: `torch.nn.functional.scaled_dot_product_attention`, argument by argument.

    Memory is O(N): the N x N scores are never stored, forward or backward, nor for double backward and forward-mode
    derivatives, which are computed by the formula, a block of queries at a time. The gradient of a mask has its size.

    Args:
        query: (..., Nq, D), float64, float32, bfloat16 or float16. The leading dimensions of the three broadcast.
            Any strides with a contiguous last dimension are read in place.
        key: (..., Nk, D), the query's dtype and device.
        value: (..., Nk, Dv), the query's dtype and device.
        attn_mask: broadcasts to (..., Nq, Nk) with the leading dimensions of the result. bool: True is visible;
            float32 or the query's dtype: added to the scores, and differentiable. Read in place, with any strides.
        dropout_p: the probability that a weight is dropped; the others are divided by 1 - dropout_p. Always applied, as
            torch's: pass 0 for evaluation. The mask follows from one number that the device's generator gives
            (torch.manual_seed), and from position: seqkern/reference/dropout.py.
        is_causal: query i sees the keys j <= i, from the upper left corner, whatever Nq and Nk are. With an attn_mask,
            what either hides is hidden.
        scale: default 1 / sqrt(D).
        enable_gqa: the heads, dimension -3, of key and value may divide the query's: consecutive query heads share one.

    Returns:
        (..., Nq, Dv), contiguous, in the query's dtype. Under autocast the inputs are cast first, as torch's op does.
        A query that sees no key has output 0 and zero gradients.

    Raises:
        TypeError: an argument that is not a tensor, or dtypes that are not floating point or differ.
        ValueError: shapes that do not fit each other, tensors on different devices, or a dropout_p that is no
            probability.
        NotImplementedError: as `attention`.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    Example:
        >>> import torch, seqkern
        >>> q, k, v = (torch.randn(2, 4, 10, 8) for _ in range(3))
        >>> mask = torch.rand(10, 10) < 0.7
        >>> y = seqkern.scaled_dot_product_attention(q, k, v, mask)
        >>> z = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        >>> torch.allclose(y, z, atol=1e-6)
        True
    """
    if attn_mask is None and type(dropout_p) is float and dropout_p == 0 and fast():
        found: Tensor | None = _direct.attention(
            query, key, value, is_causal, False, None, scale, None, enable_gqa is False, None
        )
        if found is not None and not unexpected:
            return found
    if is_proxy(query):
        return record(scaled_dot_product_attention, locals())
    if unexpected:
        refuse(scaled_dot_product_attention, unexpected)
    if exports_onnx():
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    op = "scaled_dot_product_attention"
    query, key, value = autocast(check_tensors(op, query, key, value, least=3 if enable_gqa else 2))
    check_types(op, query, key=key, value=value)
    check_head_dim(op, query, key)
    check_lengths(op, key, value)
    q, k, v = broadcast(op, query, key, value, enable_gqa)
    leading = q.shape[:-2]
    queries, keys = q.shape[-2], k.shape[-2]
    if attn_mask is not None:
        attn_mask = prepare_mask(op, attn_mask, q, (*leading, queries, keys))
    if len(leading) < 2:
        q, k, v = (t[(None,) * (2 - len(leading))] for t in (q, k, v))
    elif len(leading) > 2:
        q, k, v = (t.flatten(0, -4) for t in (q, k, v))
    backend = backend_for(op, q)
    tensors = AttentionTensors(q, k, v, attn_mask, seed=_seed(op, dropout_p, q))
    numbers = AttentionNumbers(
        max_queries=queries, max_keys=keys, diagonal=0, lower_right=False, left=-1, right=0 if is_causal else -1,
        scale=check_scale(op, scale, q.shape[-1]), softcap=0.0, dropout_p=dropout_p,
    )  # fmt: skip
    out, _ = run(backend, tensors, numbers)
    return out if len(leading) == 2 else out.view(*leading, *out.shape[-2:])


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, causal_align: str = "lower_right",
    attn_mask: Tensor | None = None, bias: Tensor | None = None, key_lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, causal_align: str = "lower_right",
    attn_mask: Tensor | None = None, bias: Tensor | None = None, key_lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, causal_align: str = "lower_right",
    attn_mask: Tensor | None = None, bias: Tensor | None = None, key_lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@explicit
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    causal_align: str = "lower_right",
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    **unexpected: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(z) V with every option, in any combination, and the log-sum-exp of the scores where wanted.

    The score of query i and key j is z = softcap * tanh(scale * q.k / softcap) - slope * |i + d - j| + mask where query
    i sees key j, else -inf. d is the diagonal: query i stands at position i + d among the keys.

    Memory is O(N): the N x N scores are never stored, forward or backward, nor for double backward and forward-mode
    derivatives, which are computed by the formula, a block of queries at a time. The gradient of a mask has its size.

    Args:
        query: (B, H, Nq, D), float64, float32, bfloat16 or float16. Any strides with a contiguous last dimension are
            read in place.
        key: (B, Hk, Nk, D) in the query's dtype, H a multiple of Hk: H / Hk consecutive query heads share a key head.
        value: (B, Hk, Nk, Dv) in the query's dtype.
        causal: hides from a query the keys after it.
        causal_align: where the diagonal lies, for causal, window and alibi_slopes. "lower_right": d = Nk - Nq, the last
            query stands at the last key, which is what decoding with cached keys needs; "upper_left": d = 0, the first
            query stands at the first key.
        attn_mask: broadcasts to (B, H, Nq, Nk). bool: True is visible; float32 or the query's dtype: added to the
            scores, and differentiable. Read in place, with any strides. On CPU a boolean matrix that is a band
            (causal, windowed, padded behind, or several of them) becomes the option; of other matrices, cells of 32 by
            32 that hide all or nothing cost nothing.
        bias: broadcasts to (B, H, Nq, Nk), float32 or the query's dtype: added to the scores, and differentiable; for
            position biases beside a boolean attn_mask. The two become one mask of their common shape.
        key_lengths: (B,), int32 or int64: sequence b has only the first key_lengths[b] keys, all for a number above Nk,
            none for one below 0. The others are never read. d does not depend on it.
        window: (left, right): a query sees no key more than `left` before it or `right` after it; -1 or None is without
            limit. With causal, right is 0.
        alibi_slopes: (H,) or (B, H), any floating dtype: what a head takes off a score for each step of distance.
            Differentiable.
        softcap: bounds the scores to (-softcap, softcap) by tanh, before everything that is added. None or 0: does not.
        sinks: (H,), any floating dtype: a score in every softmax of a head that belongs to no key. Differentiable.
        dropout_p: the probability that a weight is dropped; the others are divided by 1 - dropout_p. Pass 0 for
            evaluation. The mask follows from one number that the device's generator gives (torch.manual_seed), and from
            position: seqkern/reference/dropout.py.
        scale: default 1 / sqrt(D).
        return_lse: also return the natural logarithm of every softmax's denominator, the sink in it, from which results
            over several sets of keys can be combined: `merge_attention`. It is differentiable.

    Returns:
        The output, (B, H, Nq, Dv), contiguous, in the query's dtype; with return_lse a tuple of it and the log-sum-exp,
        (B, H, Nq), float32 (float64 for float64). A query that sees no key has output 0, log-sum-exp -inf (its sink,
        where there is one) and zero gradients.

    Raises:
        TypeError: an argument that is not a tensor or number where it must be one, or dtypes that are not floating
            point (of lengths: whole numbers) or differ.
        ValueError: shapes that do not fit each other, tensors on different devices, or a number out of its range.
        NotImplementedError: the backend in force does not run on the device, or not this: Triton takes head dimensions
            of 1 to 256, CUDA C++ as well, and no float64.

    Source: Vaswani et al. 2017; shared key heads: Ainslie et al. 2023; window: Beltagy et al. 2020; slopes: Press et
    al. 2022; softcap: Gemma 2, 2024; sinks: Xiao et al. 2023 and gpt-oss, 2025.

    Example:
        >>> import torch, seqkern
        >>> q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 50, 64), torch.randn(1, 2, 50, 64)
        >>> out, lse = seqkern.attention(q, k, v, causal=True, return_lse=True)  # the newest of 50 tokens
        >>> out.shape, lse.shape
        (torch.Size([1, 8, 1, 64]), torch.Size([1, 8, 1]))
        >>> recent = seqkern.attention(q, k, v, window=(15, 0), softcap=30.0, sinks=torch.zeros(8))
    """
    if (
        attn_mask is bias is alibi_slopes is sinks is None
        and return_lse is False
        and (causal_align == "lower_right" or causal_align == "upper_left")
        and type(dropout_p) is float
        and dropout_p == 0
        and fast()
    ):
        found: Tensor | None = _direct.attention(
            query, key, value, causal, causal_align == "lower_right", window, scale, softcap, False, key_lengths
        )
        if found is not None and not unexpected:
            return found
    if is_proxy(query):
        return record(attention, locals())
    if unexpected:
        refuse(attention, unexpected)
    op = "attention"
    lower_right = check_align(op, causal_align)
    query, key, value = autocast(check_tensors(op, query, key, value, least=4, most=4))
    check_types(op, query, key=key, value=value)
    check_head_dim(op, query, key)
    check_lengths(op, key, value)
    check_batch(op, query, key, value, ("key", "value"))
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    left, right = check_band(op, causal, window)
    diagonal = 0
    if lower_right and (causal or window is not None or alibi_slopes is not None):
        diagonal = keys - queries
    if bias is not None:
        attn_mask = with_bias(op, attn_mask, bias, query, (batch, heads, queries, keys))
    elif attn_mask is not None:
        attn_mask = prepare_mask(op, attn_mask, query, (batch, heads, queries, keys))
    if key_lengths is not None:
        key_lengths = check_key_lengths(op, key_lengths, query, batch)
    if alibi_slopes is not None:
        alibi_slopes = prepare_slopes(op, alibi_slopes, query, batch)
    if sinks is not None:
        sinks = prepare_sinks(op, sinks, query)
    backend = backend_for(op, query)
    tensors = AttentionTensors(
        query, key, value, attn_mask, key_lengths=key_lengths, alibi_slopes=alibi_slopes, sinks=sinks,
        seed=_seed(op, dropout_p, query),
    )  # fmt: skip
    numbers = AttentionNumbers(
        max_queries=queries, max_keys=keys, diagonal=diagonal, lower_right=False, left=left, right=right,
        scale=check_scale(op, scale, head_dim), softcap=check_softcap(op, softcap), dropout_p=dropout_p,
    )  # fmt: skip
    out, lse = run(backend, tensors, numbers)
    return (out, rounded_lse(lse, out)) if return_lse else out


@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, causal: bool = False, causal_align: str = "lower_right",
    attn_mask: Tensor | None = None, window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, causal: bool = False, causal_align: str = "lower_right",
    attn_mask: Tensor | None = None, window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, causal: bool = False, causal_align: str = "lower_right",
    attn_mask: Tensor | None = None, window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, scale: float | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@explicit
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    causal_align: str = "lower_right",
    attn_mask: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    **unexpected: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of sequences of different lengths that are packed one behind the other, without padding.

    Sequence s has the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1 of query and output, and those that cu_seqlens_k
    says of key and value. It has the same bits as alone. Memory is O(T).

    Args:
        query: (T, H, D), float64, float32, bfloat16 or float16: T rows in all. Any strides with a contiguous last
            dimension are read in place.
        key: (Tk, Hk, D) in the query's dtype, H a multiple of Hk. value: (Tk, Hk, Dv) likewise.
        cu_seqlens_q: (S + 1,), int32 or int64: from 0, not decreasing, at most T at the end. Rows behind the end belong
            to no sequence: their output is 0, their log-sum-exp -inf. cu_seqlens_k: likewise, for key and value. What
            they hold is checked where it can be read at once: on the CPU, not compiled and not inside a transform.
        max_seqlen_q, max_seqlen_k: no sequence has more queries or keys. Where boundaries cannot be checked, as on a
            GPU, the rows of a sequence beyond its maximum are not computed: what the output holds there is undefined.
        causal, window, softcap, sinks, scale: as `attention`, within each sequence.
        causal_align: as `attention`, from the lengths of each sequence.
        attn_mask: broadcasts to (S, H, max_seqlen_q, max_seqlen_k); of each sequence, the upper left corner counts.
        alibi_slopes: (H,) or (S, H).
        dropout_p: as `attention`; the mask depends on where a row is packed.
        return_lse: also return the log-sum-exp.

    Returns:
        The output, (T, H, Dv), contiguous, in the query's dtype; with return_lse a tuple of it and the log-sum-exp, (T,
        H), float32 (float64 for float64).

    Raises:
        As `attention`. ValueError also for boundaries or maximal lengths that do not fit.

    Source: as `attention`; the interface: Dao, "FlashAttention-2", 2023.

    Example:
        >>> import torch, seqkern
        >>> q, k, v = (torch.randn(10, 4, 8) for _ in range(3))
        >>> starts = torch.tensor([0, 3, 10])  # sequences of 3 and 7
        >>> y = seqkern.attention_varlen(q, k, v, starts, starts, 7, 7, causal=True)
        >>> first = seqkern.attention(*(t[None, :3].transpose(1, 2) for t in (q, k, v)), causal=True)
        >>> torch.equal(y[:3], first[0].transpose(0, 1))
        True
    """
    if is_proxy(query):
        return record(attention_varlen, locals())
    if unexpected:
        refuse(attention_varlen, unexpected)
    op = "attention_varlen"
    lower_right = check_align(op, causal_align)
    query, key, value = autocast(check_tensors(op, query, key, value, least=3, most=3))
    check_types(op, query, key=key, value=value)
    check_head_dim(op, query, key)
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"{op}: value must have the key's {key.shape[0]} rows and {key.shape[1]} heads, got shape {shape_of(value)}"
        )
    rows, heads, head_dim = query.shape
    check_heads(op, heads, key.shape[1])
    left, right = check_band(op, causal, window)
    query_starts = check_starts(op, cu_seqlens_q, max_seqlen_q, query, rows, "cu_seqlens_q", "query")
    key_starts = check_starts(op, cu_seqlens_k, max_seqlen_k, query, key.shape[0], "cu_seqlens_k", "key")
    if key_starts.shape != query_starts.shape:
        raise ValueError(
            f"{op}: cu_seqlens_k must be as long as cu_seqlens_q, {query_starts.shape[0]}, got {key_starts.shape[0]}"
        )
    sequences = query_starts.shape[0] - 1
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    if attn_mask is not None:
        attn_mask = prepare_mask(op, attn_mask, q, (sequences, heads, max_seqlen_q, max_seqlen_k))
    if alibi_slopes is not None:
        alibi_slopes = prepare_slopes(op, alibi_slopes, q, sequences)
    if sinks is not None:
        sinks = prepare_sinks(op, sinks, q)
    backend = backend_for(op, q)
    tensors = AttentionTensors(
        q, k, v, attn_mask, query_starts, key_starts.to(query_starts.dtype), alibi_slopes=alibi_slopes, sinks=sinks,
        seed=_seed(op, dropout_p, q),
    )  # fmt: skip
    numbers = AttentionNumbers(
        max_queries=max_seqlen_q, max_keys=max_seqlen_k, diagonal=0, lower_right=lower_right, left=left, right=right,
        scale=check_scale(op, scale, head_dim), softcap=check_softcap(op, softcap), dropout_p=dropout_p,
    )  # fmt: skip
    out, lse = run(backend, tensors, numbers)
    out = out[0].transpose(0, 1)
    return (out, rounded_lse(lse, out)[0].transpose(0, 1)) if return_lse else out


def _seed(op: str, dropout_p: float, query: Tensor) -> Tensor | None:
    """What decides the dropout mask, drawn from the device's generator; None without dropout."""
    if not check_dropout(op, dropout_p):
        return None
    return torch.randint(-(2**63), 2**63 - 1, (), device=query.device)


@explicit
def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """The attention over two sets of keys, from the outputs and log-sum-exps over each: as if it were computed at once.

    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b with lse = log(exp(lse_a) + exp(lse_b)). Differentiable, to
    any order. Where one lse is -inf, having seen no key, the other side is the result; where both are, the output is 0
    and lse -inf. Sinks belong to one of the two only.

    Args:
        out_a, out_b: (..., Dv), the same shape and dtype.
        lse_a, lse_b: the outputs' shape without the last dimension; as `attention` returns them.

    Returns:
        out in the dtype of the two, and lse, float32 (float64 for float64); computed in float32 or wider.

    Raises:
        TypeError: an argument that is not a tensor of floating point, or outputs of different dtypes.
        ValueError: shapes or devices that differ.

    Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023.

    Example:
        >>> import torch, seqkern
        >>> q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
        >>> a = seqkern.attention(q, k[:, :, :4], v[:, :, :4], return_lse=True)
        >>> b = seqkern.attention(q, k[:, :, 4:], v[:, :, 4:], return_lse=True)
        >>> out, lse = seqkern.merge_attention(*a, *b)
        >>> torch.allclose(out, seqkern.attention(q, k, v), atol=1e-6)
        True
    """
    if is_proxy(out_a):
        return record(merge_attention, locals())
    if unexpected:
        refuse(merge_attention, unexpected)
    op = "merge_attention"
    tensors = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if not t.is_floating_point():
            raise TypeError(f"{op}: {name} must be of floating point, got {t.dtype}")
        if not out_a.dim():
            raise ValueError(f"{op}: out_a must have at least 1 dimension, got shape ()")
        expected = out_a.shape if name.startswith("out") else out_a.shape[:-1]
        if t.shape != expected:
            raise ValueError(f"{op}: {name} must have shape {tuple(expected)}, as out_a asks, got {shape_of(t)}")
        if t.device != out_a.device:
            raise ValueError(f"{op}: {name} must be on the device of out_a, {out_a.device}, got {t.device}")
    if out_b.dtype != out_a.dtype:
        raise TypeError(f"{op}: out_b must have the dtype of out_a, {out_a.dtype}, got {out_b.dtype}")
    wide = torch.promote_types(out_a.dtype, torch.float32)
    a, b = lse_a.to(wide), lse_b.to(wide)
    largest = torch.maximum(a.detach(), b.detach())
    shift = largest.masked_fill(largest.isneginf(), 0)
    weight_a, weight_b = torch.exp(a - shift), torch.exp(b - shift)
    total = weight_a + weight_b
    total = total.masked_fill(total == 0, 1)
    # A side without weight is left out, whatever it holds.
    a, b = (
        torch.where(weight[..., None] == 0, 0, (weight / total)[..., None] * out.to(wide))
        for weight, out in ((weight_a, out_a), (weight_b, out_b))
    )
    out = a + b
    return out.to(out_a.dtype), largest + total.log()


def cost(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    causal: bool = False,
    diagonal: int = 0,
    window: tuple[int | None, int | None] | None = None,
    mask_bytes: int = 0,
    backward: bool = False,
) -> Cost:
    """Work of attention over the visible scores; `backward` counts the backward pass alone (five products to two).

    What a mask hides is counted as seen; `mask_bytes` is what reading it once takes.
    """
    kv_heads, value_dim = kv_heads or heads, value_dim or head_dim
    left, right = check_band("cost", causal, window)
    seen = 0
    for i in range(diagonal, diagonal + queries):
        first = max(i - left, 0) if left >= 0 else 0
        last = min(i + right + 1, keys) if right >= 0 else keys
        seen += max(last - first, 0)
    flops = 2 * batch * heads * seen * (head_dim + value_dim)
    of_queries = batch * heads * queries * (head_dim + value_dim) * dtype.itemsize  # query and output
    of_keys = batch * kv_heads * keys * (head_dim + value_dim) * dtype.itemsize  # key and value
    lse = batch * heads * queries * (8 if dtype == torch.float64 else 4)
    if backward:  # reads query, output, its gradient, key, value, lse; writes three gradients
        of_output = batch * heads * queries * value_dim * dtype.itemsize
        return Cost(flops=flops * 5 // 2, bytes=2 * of_queries + of_output + 2 * of_keys + lse + mask_bytes)
    return Cost(flops=flops, bytes=of_queries + of_keys + lse + mask_bytes)
