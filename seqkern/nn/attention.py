"""Multi-head attention as a module."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, pad
from torch.types import Device
from torch.utils.checkpoint import checkpoint

from seqkern import _direct
from seqkern._direct import fast
from seqkern._keywords import explicit, refuse
from seqkern.nn.attention_cache import AttentionCache, AttentionPages
from seqkern.nn.layer_norm import RMSNorm
from seqkern.nn.rope import RotaryEmbedding
from seqkern.ops._attention_checks import check_key_lengths
from seqkern.ops.attention import attention, attention_varlen
from seqkern.ops.attention_decode import attention_decode
from seqkern.ops.attention_weights import attention_weights

_WEIGHTS = 1 << 22  # elements of the weights of all heads that are held at once on the way to their mean


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` on seqkern's kernels: constructor, state_dict and arguments are torch's.

    One way through for training and evaluation, where torch has three whose answers differ. What follows from that:

    - A query that sees no key has the output of a value 0, `out_proj.bias`, and weights 0; there is no NaN anywhere.
    - `is_causal` without an `attn_mask` hides the later keys; beside one, what either hides is hidden.
    - The two masks may be of different kinds, one boolean, one added.
    - Rows of padding hold in evaluation what they hold in training.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as
            `torch.nn.MultiheadAttention`.
        num_kv_heads: heads of keys and values, a divisor of num_heads; num_heads / num_kv_heads consecutive query heads
            share one. Default: num_heads.
        head_dim: features of each head, any number; embed_dim is "wide" attention, where every head has the full width.
            in_proj_weight has (num_heads + 2 * num_kv_heads) * head_dim rows and out_proj takes num_heads * head_dim
            features. GPU kernels take at most 256. Default: embed_dim / num_heads, "narrow" heads.
        window: (left, right): no key more than `left` before a query or `right` after it, as `seqkern.attention`.
        qk_norm: an RMS norm of each head of queries and of keys, with parameters `q_norm.weight` and `k_norm.weight`.
        rope: a `seqkern.nn.RotaryEmbedding` for a head's features, which turns queries and keys, after their norm.

    Shape, of forward(query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
    average_attn_weights=True, is_causal=False): query (L, N, embed_dim), key (S, N, kdim), value (S, N, vdim), or
    (N, L, ...) with batch_first, or without N; key_padding_mask (N, S) and attn_mask (L, S) or (N * num_heads, L, S),
    bool, **True hides**, or numbers that are added. Returns the output, as the query, and the weights (N, L, S), or of
    each head (N, num_heads, L, S), or None. Beyond torch's, by keyword::

        key_lengths: (N,), whole numbers: sequence n has only the first key_lengths[n] keys.
        weight_rows: (n,), int64: the queries whose weights are wanted, without dropout; the weights are (N, n, S).
        positions: (L,) or (N, L), whole numbers, for rope; without them 0, 1, ..., or on from the cache.
        cache: an `AttentionCache`: key and value are appended to it and the queries, the last tokens of every
            sequence, see all of it up to themselves. Without gradients; masks, padding and weights are refused.

    `need_weights=False` takes memory that grows with L. The mean of the weights takes the memory of its result, in
    training too: those of the heads are computed in blocks and, for the gradient, again. The weights of each head are
    what they are, N * num_heads * L * S; with dropout in training so are those behind the mean, for they are dropped
    as the output's are, which is what torch returns.

    Nested tensors of layout torch.jagged are taken as query, key and value with batch_first and need_weights=False,
    without masks but `is_causal`.

    Raises:
        TypeError, ValueError: arguments that do not fit, by name.
        NotImplementedError: what is said above.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> y, weights = model(x, x, x, is_causal=True)
        >>> y.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
    """

    # Of the class, so that an instance of torch's can become one of this class.
    num_kv_heads: int | None = None
    window: tuple[int | None, int | None] | None = None
    qk_norm: bool = False

    @explicit
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        window: tuple[int | None, int | None] | None = None,
        qk_norm: bool = False,
        rope: RotaryEmbedding | None = None,
        head_dim: int | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(MultiheadAttention.__init__, unexpected, "MultiheadAttention")
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(
                "MultiheadAttention: embed_dim must be a multiple of num_heads, both positive, got"
                f" {embed_dim} and {num_heads}"
            )
        if num_kv_heads is not None and (num_kv_heads <= 0 or num_heads % num_kv_heads):
            raise ValueError(
                f"MultiheadAttention: num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}"
            )
        if head_dim is not None and (type(head_dim) is not int or head_dim <= 0):
            raise ValueError(f"MultiheadAttention: head_dim must be a positive whole number, got {head_dim}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        if window is not None:
            self.window = window
        factory: Any = {"device": device, "dtype": dtype}
        if num_kv_heads is not None and num_kv_heads != num_heads:
            self.num_kv_heads = num_kv_heads
        if head_dim is not None:
            self.head_dim = head_dim
        if self.num_kv_heads is not None or self._own_head_dim:
            self._resize(factory)
        if qk_norm:
            self.qk_norm = True
            self.q_norm = RMSNorm(self.head_dim, **factory)
            self.k_norm = RMSNorm(self.head_dim, **factory)
        if rope is not None:
            if not isinstance(rope, RotaryEmbedding):
                raise TypeError(
                    f"MultiheadAttention: rope must be a seqkern.nn.RotaryEmbedding, got {type(rope).__name__}"
                )
            if rope.head_dim != self.head_dim:
                name = "embed_dim / num_heads" if head_dim is None else "head_dim"
                raise ValueError(
                    f"MultiheadAttention: rope must be for {name} = {self.head_dim} features, got {rope.head_dim}"
                )
            self.add_module("_rope", rope)

    @property
    def rope(self) -> RotaryEmbedding | None:
        """The rotary embeddings of queries and keys."""
        found: Any = self._modules.get("_rope")
        return found

    @property
    def _own_head_dim(self) -> bool:
        """Whether a head has another number of features than torch's would have."""
        return self.head_dim * self.num_heads != self.embed_dim

    def _resize(self, factory: Any) -> None:
        """The parameters for fewer heads of keys and values, or heads of another size."""
        width, rows = self.num_heads * self.head_dim, (self.num_kv_heads or self.num_heads) * self.head_dim

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, **factory))

        if self._qkv_same_embed_dim:
            self.in_proj_weight = made(width + 2 * rows, self.embed_dim)
        else:
            self.q_proj_weight = made(width, self.embed_dim)
            self.k_proj_weight, self.v_proj_weight = made(rows, self.kdim), made(rows, self.vdim)
        if self.in_proj_bias is not None:
            self.in_proj_bias = made(width + 2 * rows)
        if self.bias_k is not None:
            self.bias_k, self.bias_v = made(1, 1, rows), made(1, 1, rows)
        if self._own_head_dim:
            bias = self.out_proj.bias is not None
            self.out_proj = type(self.out_proj)(width, self.embed_dim, bias=bias, **factory)
        self._reset_parameters()

    def extra_repr(self) -> str:
        options: dict[str, Any] = {"num_kv_heads": self.num_kv_heads, "window": self.window}
        options |= {"qk_norm": self.qk_norm or None, "head_dim": self.head_dim if self._own_head_dim else None}
        return ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)

    def make_cache(
        self,
        batch: int,
        longest: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
        pages: AttentionPages | None = None,
    ) -> AttentionCache:
        """An empty cache for `batch` sequences of at most `longest` tokens; device and dtype are the weights'.

        pages: an `AttentionPages` for as many, which the layers of a model share.
        """
        like: Any = self.out_proj.weight
        heads = self.num_kv_heads or self.num_heads
        shape = (batch, heads, longest, self.head_dim)
        if pages is not None:
            if pages.table.shape[0] != batch or pages.longest != longest:
                raise ValueError(
                    f"{self._name}: pages must be for {batch} sequences of {longest} tokens, got "
                    f"{pages.table.shape[0]} of {pages.longest}"
                )
            shape = (0, heads, pages.page_size, self.head_dim)
        keys, values = (torch.zeros(shape, device=device or like.device, dtype=dtype or like.dtype) for _ in range(2))
        cache = AttentionCache(keys, values, torch.zeros(batch, dtype=torch.int64, device=keys.device))
        if pages is not None:
            pages.join(cache)
        return cache

    @explicit
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        key_lengths: Tensor | None = None,
        weight_rows: Tensor | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | None = None,
        **unexpected: NoReturn,
    ) -> tuple[Tensor, Tensor | None]:
        if unexpected:
            refuse(MultiheadAttention.forward, unexpected, type(self).__name__)
        given = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "key_lengths": key_lengths}
        if any(isinstance(t, Tensor) and t.is_nested for t in (query, key, value)):
            return self._jagged(query, key, value, given | {"positions": positions}, need_weights, is_causal), None
        batched = self._check_inputs(query, key, value)
        if not batched:
            side = 0 if self.batch_first else 1
            query, key, value = (t.unsqueeze(side) for t in (query, key, value))
            if key_padding_mask is not None and key_padding_mask.dim() == 1:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        if query is key and key is value and self._qkv_same_embed_dim:
            both = linear(query, self.in_proj_weight, self.in_proj_bias)
            masks = (key_padding_mask, attn_mask, weight_rows, cache, positions)
            if not need_weights and self._plain and all(t is None for t in masks) and fast():
                found: Tensor | None = _direct.self_attention(
                    both, self.num_heads, self.num_kv_heads or self.num_heads, self.batch_first, is_causal, self.window,
                    key_lengths,
                )  # fmt: skip
                if found is not None:
                    return self._projected(found, batched), None
            q, k, v = self._self_heads(both)
        else:
            q, k, v = self._heads(*self._project(query, key, value))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None or positions is not None:
            q, k = self._turn(q, k, positions, cache)
        if cache is not None:
            if need_weights or self.bias_k is not None or self.add_zero_attn:
                raise NotImplementedError(
                    f"{self._name}: with a cache there are no weights, bias_k or add_zero_attn: pass need_weights=False"
                )
            self._refuse("a cache", given)
            window = None if self.window is None else (self.window[0], 0)
            table = None
            if cache.pages is not None:
                cache.pages.prepare(cache.lengths, k.shape[2])
                table = cache.pages.table
            out = attention_decode(
                q, cache.keys, cache.values, cache.lengths, key=k, value=v, page_table=table, window=window
            )
            cache.lengths += k.shape[2]
            return self._output(out, batched), None
        visible, added = self._masks(q, k, key_padding_mask, attn_mask)
        if key_lengths is not None and (self.bias_k is not None or self.add_zero_attn):  # keys that no length hides
            lengths = check_key_lengths(self._name, key_lengths, q, q.shape[0])
            own = (torch.arange(k.shape[2], device=q.device) < lengths[:, None])[:, None, None]
            visible, key_lengths = own if visible is None else visible & own, None
        k, v, visible, added, is_causal = self._extend(q, k, v, visible, added, is_causal)
        options: dict[str, Any] = {"causal": is_causal, "causal_align": "upper_left", "window": self.window}
        options |= {"attn_mask": _combine(visible, added), "key_lengths": key_lengths}
        drop = self.dropout if self.training else 0.0
        if need_weights and drop and weight_rows is None:  # as torch's: the weights that made the output
            dropped = dropout(attention_weights(q, k, **options), drop)
            out = dropped.to(v.dtype) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
            weights = dropped.mean(1) if average_attn_weights else dropped
        else:
            out = attention(q, k, v, dropout_p=drop, return_lse=False, **options)
            if not need_weights:
                return self._output(out, batched), None
            weights = self._weights(q, k, weight_rows, average_attn_weights, options)
        weights = weights.to(query.dtype)
        return self._output(out, batched), weights if batched else weights.squeeze(0)

    # ---- parts of forward ------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether there is a batch."""
        for name, t in (("query", query), ("key", key), ("value", value)):
            if not isinstance(t, Tensor):
                raise TypeError(f"{self._name}: {name} must be a tensor, got {type(t).__name__}")
        if query.dim() not in (2, 3):
            raise ValueError(f"{self._name}: query must have 2 or 3 dimensions, got shape {tuple(query.shape)}")
        sizes = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.dim() != query.dim():
                raise ValueError(
                    f"{self._name}: {name} must have the query's {query.dim()} dimensions, got shape {tuple(t.shape)}"
                )
            if t.shape[-1] != sizes[name]:
                raise ValueError(
                    f"{self._name}: {name}'s last dimension must be {sizes[name]}, got shape {tuple(t.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"{self._name}: key and value must have the same length and batch, got shapes {tuple(key.shape)} and"
                f" {tuple(value.shape)}"
            )
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            raise ValueError(
                f"{self._name}: query and key must have the same batch size, got shapes {tuple(query.shape)} and"
                f" {tuple(key.shape)}"
            )
        return query.dim() == 3

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of all heads, in as few products as there are different inputs."""
        bias = self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if bias is None else bias.split([w.shape[0] for w in weights])
            return tuple(map(linear, (query, key, value), weights, biases))
        weight = self.in_proj_weight
        width = self.num_heads * self.head_dim
        rows = (weight.shape[0] - width) // 2
        w_q, w_kv = weight.split([width, 2 * rows])
        b_q, b_kv = (None, None) if bias is None else bias.split([width, 2 * rows])
        if key is value:
            return linear(query, w_q, b_q), *linear(key, w_kv, b_kv).split(rows, -1)
        w_k, w_v = w_kv.split(rows)
        b_k, b_v = (None, None) if b_kv is None else b_kv.split(rows)
        return linear(query, w_q, b_q), linear(key, w_k, b_k), linear(value, w_v, b_v)

    def _heads(self, *projected: Tensor) -> tuple[Tensor, ...]:
        """(N, heads, length, head_dim), views of what the products wrote."""
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        return tuple(t.unflatten(-1, (t.shape[-1] // self.head_dim, self.head_dim)).permute(order) for t in projected)

    @property
    def _plain(self) -> bool:
        """Whether nothing but a window comes between the first product and the last."""
        added = self.rope is not None or self.qk_norm or self.bias_k is not None or self.add_zero_attn
        return not added and not (self.training and self.dropout)

    def _self_heads(self, both: Tensor) -> tuple[Tensor, ...]:
        """As `_heads`, of the product of an input that is query, key and value: in half the operations."""
        heads = self.num_kv_heads or self.num_heads
        every = both.view(*both.shape[:2], self.num_heads + 2 * heads, self.head_dim)
        every = every.transpose(1, 2) if self.batch_first else every.permute(1, 2, 0, 3)
        return every.split((self.num_heads, heads, heads), 1)

    def _turn(
        self, q: Tensor, k: Tensor, positions: Tensor | None, cache: AttentionCache | None
    ) -> tuple[Tensor, Tensor]:
        """By rotary embeddings, if there are any: after what is in the cache, or at `positions`."""
        if self.rope is None:
            if positions is not None:
                raise ValueError(f"{self._name}: positions are for rotary embeddings, and there are none (rope=)")
            return q, k
        if q.shape[2] != k.shape[2]:
            if positions is not None or cache is not None:
                raise NotImplementedError(
                    f"{self._name}: rope with positions or a cache for {q.shape[2]} queries and {k.shape[2]} keys"
                )
            return self.rope(q)[0], self.rope(k)[0]
        at: Tensor | int = 0 if positions is None else positions
        if cache is not None and positions is None:
            at = cache.lengths[:, None] + torch.arange(q.shape[2], device=q.device)
        turned_q, turned_k = self.rope(q, k, at)
        assert turned_k is not None
        return turned_q, turned_k

    def _output(self, out: Tensor, batched: bool) -> Tensor:
        """The heads side by side, in the layout of the query, through the last product."""
        out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
        return self._projected(out.flatten(2).contiguous(), batched)

    def _projected(self, out: Tensor, batched: bool) -> Tensor:
        out = linear(out, self.out_proj.weight, self.out_proj.bias)
        return out if batched else out.squeeze(0 if self.batch_first else 1)

    def _masks(
        self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What is visible, and what is added, each broadcasting to (N, heads, L, S)."""
        batch, heads, queries, _ = q.shape
        keys = k.shape[2]
        visible: Tensor | None = None
        added: Tensor | None = None
        if attn_mask is not None:
            shapes = [(queries, keys), (batch * heads, queries, keys)]
            _check_mask(self._name, "attn_mask", attn_mask, shapes)
            mask = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, heads))
            visible, added = (~mask, None) if mask.dtype == torch.bool else (None, _addable(mask, q))
        if key_padding_mask is not None:
            _check_mask(self._name, "key_padding_mask", key_padding_mask, [(batch, keys)])
            row = key_padding_mask[:, None, None]
            if row.dtype == torch.bool:
                visible = ~row if visible is None else visible & ~row
            else:
                added = _addable(row, q) if added is None else added + _addable(row, q)
        return visible, added

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, added: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool]:
        """With the keys of `add_bias_kv` and `add_zero_attn` behind the others; no mask hides them."""
        extra: list[tuple[Tensor, Tensor]] = []
        batch, kv_heads, keys, head_dim = k.shape
        if self.bias_k is not None and self.bias_v is not None:
            own = [b.view(1, kv_heads, 1, head_dim).expand(batch, -1, -1, -1) for b in (self.bias_k, self.bias_v)]
            extra.append((own[0], own[1]))
        if self.add_zero_attn:
            extra.append((k.new_zeros(batch, kv_heads, 1, head_dim),) * 2)
        if not extra:
            return k, v, visible, added, is_causal
        if self.window is not None:
            raise NotImplementedError(f"{self._name}: a window and keys behind all others (add_bias_kv, add_zero_attn)")
        k = torch.cat([k, *(pair[0] for pair in extra)], 2)
        v = torch.cat([v, *(pair[1] for pair in extra)], 2)
        if is_causal:
            causal = torch.ones(q.shape[2], keys, dtype=torch.bool, device=q.device).tril()
            visible = causal if visible is None else visible & causal
        if visible is not None:
            visible = pad(visible, (0, len(extra)), value=True)
        if added is not None:
            added = pad(added, (0, len(extra)))
        return k, v, visible, added, False

    def _weights(self, q: Tensor, k: Tensor, rows: Tensor | None, average: bool, options: dict[str, Any]) -> Tensor:
        """Of the softmax; their mean a block of queries at a time."""
        if not average:
            return attention_weights(q, k, rows, **options)

        def mean(q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
            return attention_weights(q, k, rows, **options).mean(1)

        queries = torch.arange(q.shape[2], device=q.device) if rows is None else rows
        step = max(1, _WEIGHTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
        if step >= queries.shape[0]:
            return mean(q, k, queries)
        blocks = queries.split(step)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            return torch.cat([checkpoint(mean, q, k, block, use_reentrant=False) for block in blocks], 1)
        return torch.cat([mean(q, k, block) for block in blocks], 1)

    @staticmethod
    def _within(starts: Tensor, tokens: int) -> Tensor:
        """The position of each of the tokens in its own sequence."""
        at = torch.arange(tokens, device=starts.device)
        return at - starts[torch.searchsorted(starts, at, right=True) - 1]

    def _refuse(self, beside: str, given: dict[str, Tensor | None]) -> None:
        for name, value in given.items():
            if value is not None:
                raise NotImplementedError(f"{self._name}: {name} beside {beside}")

    def _jagged(
        self, query: Any, key: Any, value: Any, given: dict[str, Tensor | None], need_weights: bool,
        is_causal: bool,
    ) -> Tensor:  # fmt: skip
        """Nested tensors: all sequences one behind another."""
        self._refuse("nested tensors", given)
        nested: Any = torch.nested
        for name, t in (("query", query), ("key", key), ("value", value)):
            if not t.is_nested or t.layout != torch.jagged or t.dim() != 3:
                raise NotImplementedError(
                    f"{self._name}: query, key and value must all be nested tensors (N, length, features) of layout"
                    f" torch.jagged where one is, got {name} of layout {t.layout}"
                )
        if need_weights or not self.batch_first or self.bias_k is not None or self.add_zero_attn:
            raise NotImplementedError(
                f"{self._name}: nested tensors go with need_weights=False, batch_first=True, and without add_bias_kv"
                " and add_zero_attn"
            )
        same, shared = query is key and key is value, key is value
        packed_q = query.values()
        packed_k = packed_q if same else key.values()
        packed_v = packed_k if shared else value.values()
        q, k, v = (
            t.unflatten(-1, (t.shape[-1] // self.head_dim, self.head_dim))
            for t in self._project(packed_q, packed_k, packed_v)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        starts = [t.offsets() for t in (query, key)]
        longest = [int(s.diff().max()) if s.shape[0] > 1 else 0 for s in starts]
        if self.rope is not None:
            q, k = (
                self.rope(t, None, self._within(s, len(t)), sequence_dim=-3)[0]
                for t, s in zip((q, k), starts, strict=True)
            )
        out = attention_varlen(
            q, k, v, *starts, *longest, causal=is_causal, causal_align="upper_left", window=self.window,
            dropout_p=self.dropout if self.training else 0.0, return_lse=False,
        )  # fmt: skip
        out = linear(out.flatten(1), self.out_proj.weight, self.out_proj.bias)
        result: Tensor = nested.nested_tensor_from_jagged(out, query.offsets())
        return result


def _check_mask(module: str, name: str, mask: Any, shapes: list[tuple[int, ...]]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{module}: {name} must be a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{module}: {name} must be bool (True hides) or of floating point, got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{module}: {name} must have shape {expected}, got {tuple(mask.shape)}")


def _addable(mask: Tensor, q: Tensor) -> Tensor:
    return mask if mask.dtype in (torch.float32, q.dtype) else mask.to(q.dtype)


def _combine(visible: Tensor | None, added: Tensor | None) -> Tensor | None:
    """One mask of the two."""
    if visible is None or added is None:
        return visible if added is None else added
    return torch.where(visible, added, -math.inf)
