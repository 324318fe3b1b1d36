"""Attention of a decoder to an encoder's output as modules: additive, bilinear and dot scores."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.types import Device

from seqkern._keywords import explicit, refuse
from seqkern._tensors import accumulator
from seqkern.ops.additive_attention import additive_attention
from seqkern.ops.attention import attention
from seqkern.ops.attention_weights import attention_weights


class _CrossAttention(torch.nn.Module):
    """Calls, masks and shapes; subclasses have the scores."""

    def project_key(self, key: Tensor) -> Tensor:
        """The keys as the scores take them: made once for each source sequence, for many calls with projected_key."""
        return key

    @explicit
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        *,
        key_lengths: Tensor | None = None,
        need_weights: bool = False,
        projected_key: Tensor | None = None,
        **unexpected: NoReturn,
    ) -> tuple[Tensor, Tensor | None]:
        """As the class says."""
        name = type(self).__name__
        if unexpected:
            refuse(_CrossAttention.forward, unexpected, name)
        value = key if value is None else value
        for argument, t, least in (("query", query, 2), ("key", key, 3), ("value", value, 3)):
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}: {argument} must be a tensor, got {type(t).__name__}")
            if not least <= t.dim() <= 3:
                shapes = "(B, D) or (B, Tq, D)" if argument == "query" else "(B, Tk, D)"
                raise ValueError(f"{name}: {argument} must have shape {shapes}, got {tuple(t.shape)}")
        step = query.dim() == 2
        if step:
            query = query[:, None]
        full = (query.shape[0], query.shape[1], key.shape[1])
        mask = _mask(name, key_padding_mask, attn_mask, full, query)
        keys = self.project_key(key) if projected_key is None else projected_key
        output, weights = self._attend(query, keys, value, mask, key_lengths, need_weights)
        if step:
            output, weights = output[:, 0], None if weights is None else weights[:, 0]
        return output, weights

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(query, projected key, value, mask of `attention`) -> output, and the weights if wanted."""
        raise NotImplementedError

    def _products(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, weights: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Scores query^T key, by the attention op."""
        options: dict[str, Any] = {"key_lengths": lengths, "scale": scale}
        options["attn_mask"] = None if mask is None else mask[:, None]
        output = attention(query[:, None], key[:, None], value[:, None], **options)[:, 0]
        if not weights:
            return output, None
        return output, attention_weights(query[:, None], key[:, None], **options)[:, 0].to(query.dtype)


class AdditiveAttention(_CrossAttention):
    """Bahdanau's attention: softmax(weight^T tanh(query_proj(query) + key_proj(key))) value, by one kernel.

    Args:
        query_dim, key_dim: features of queries (a decoder's state) and keys (an encoder's output).
        hidden_dim: features of the sum inside tanh. Default: query_dim.
        bias: whether query_proj has one. (key_proj needs none beside it, and none after tanh changes the softmax.)
        device, dtype: of the parameters: query_proj.weight (hidden_dim, query_dim), query_proj.bias, key_proj.weight
            (hidden_dim, key_dim), and weight (hidden_dim,), uniform in +-1 / sqrt(hidden_dim) at the start.

    Shape, of forward(query, key, value=None, key_padding_mask=None, attn_mask=None, *, key_lengths=None,
    need_weights=False, projected_key=None): query (B, Tq, query_dim), or (B, query_dim) for a single step; key
    (B, Tk, key_dim); value (B, Tk, Dv), by default key. The masks are those of torch.nn.MultiheadAttention:
    key_padding_mask (B, Tk) and attn_mask (Tq, Tk) or (B, Tq, Tk), bool, **True hides**, or numbers that are added.
    key_lengths (B,): sequence b has only its first key_lengths[b] keys. projected_key: `project_key(key)`, made
    before, when many queries come one after another. Returns the output (B, Tq, Dv), or (B, Dv), and the weights
    (B, Tq, Tk), or (B, Tk), if need_weights, else None. A query that sees no key has output and weights 0.

    Raises:
        TypeError, ValueError: arguments that do not fit, by name.

    Source: Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", 2015.

    Example:
        >>> import torch, seqkern
        >>> attend = seqkern.nn.AdditiveAttention(16, 32)
        >>> state, memory = torch.randn(2, 16), torch.randn(2, 7, 32)
        >>> context, weights = attend(state, memory, key_lengths=torch.tensor([7, 4]), need_weights=True)
        >>> context.shape, weights.shape
        (torch.Size([2, 32]), torch.Size([2, 7]))
    """

    @explicit
    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int | None = None,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(AdditiveAttention.__init__, unexpected, "AdditiveAttention")
        super().__init__()
        width = query_dim if hidden_dim is None else hidden_dim
        self.query_proj = torch.nn.Linear(query_dim, width, bias, device, dtype)
        self.key_proj = torch.nn.Linear(key_dim, width, False, device, dtype)
        self.weight = torch.nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.query_proj.reset_parameters()
        self.key_proj.reset_parameters()
        bound = 1 / math.sqrt(max(1, len(self.weight)))
        torch.nn.init.uniform_(self.weight, -bound, bound)

    def project_key(self, key: Tensor) -> Tensor:
        projected: Tensor = self.key_proj(key)
        return projected

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        projected = self.query_proj(query)
        options: dict[str, Any] = {"key_lengths": lengths, "mask": mask}
        if weights:
            output, found = additive_attention(projected, key, value, self.weight, return_weights=True, **options)
            return output, found
        output = additive_attention(projected, key, value, self.weight, **options)
        return output, None


class BilinearAttention(_CrossAttention):
    """Luong's "general" attention: softmax(query^T key_proj(key)) value, on the attention kernels.

    Args:
        query_dim, key_dim: features of queries (a decoder's state) and keys (an encoder's output).
        device, dtype: of key_proj.weight, (query_dim, key_dim).

    Shape, masks and errors: as `AdditiveAttention`.

    Source: Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", 2015.

    Example:
        >>> import torch, seqkern
        >>> attend = seqkern.nn.BilinearAttention(16, 32)
        >>> context, _ = attend(torch.randn(2, 5, 16), torch.randn(2, 7, 32))
        >>> context.shape
        torch.Size([2, 5, 32])
    """

    @explicit
    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(BilinearAttention.__init__, unexpected, "BilinearAttention")
        super().__init__()
        self.key_proj = torch.nn.Linear(key_dim, query_dim, False, device, dtype)

    def project_key(self, key: Tensor) -> Tensor:
        projected: Tensor = self.key_proj(key)
        return projected

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        return self._products(query, key, value, mask, lengths, weights, 1.0)


class DotAttention(_CrossAttention):
    """Luong's "dot" attention: softmax(scale * query^T key) value, on the attention kernels. It has no parameters.

    Args:
        scale: 1 as Luong's, a number, or None for 1 / sqrt(D), Vaswani's scaled dot product.

    Shape, masks and errors: as `AdditiveAttention`, with keys of query's features.

    Source: Luong et al. 2015; Vaswani et al. 2017.

    Example:
        >>> import torch, seqkern
        >>> context, _ = seqkern.nn.DotAttention()(torch.randn(2, 5, 16), torch.randn(2, 7, 16))
        >>> context.shape
        torch.Size([2, 5, 16])
    """

    @explicit
    def __init__(self, scale: float | None = 1.0, **unexpected: NoReturn) -> None:
        if unexpected:
            refuse(DotAttention.__init__, unexpected, "DotAttention")
        super().__init__()
        self.scale = scale

    def extra_repr(self) -> str:
        return f"scale={self.scale}"

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        return self._products(query, key, value, mask, lengths, weights, self.scale)


def _mask(
    name: str, padding: Tensor | None, mask: Tensor | None, full: tuple[int, int, int], query: Tensor
) -> Tensor | None:
    """Both masks as one of `attention`: bool, True is visible, or added numbers; 3 dimensions."""
    batch, queries, keys = full
    acc = accumulator(query.dtype)
    found: Tensor | None = None
    for argument, t, shapes in (
        ("key_padding_mask", padding, [(batch, keys)]), ("attn_mask", mask, [(queries, keys), full])
    ):  # fmt: skip
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor or None, got {type(t).__name__}")
        if tuple(t.shape) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(f"{name}: {argument} must have shape {wanted}, got {tuple(t.shape)}")
        if t.dtype != torch.bool and not t.is_floating_point():
            raise TypeError(f"{name}: {argument} must be bool, True hides, or numbers that are added, got {t.dtype}")
        if argument == "key_padding_mask":
            t = t[:, None]
        elif t.dim() == 2:
            t = t[None]
        t = ~t if t.dtype == torch.bool else t.to(acc)
        if found is None:
            found = t
        elif found.dtype == torch.bool and t.dtype == torch.bool:
            found = found & t
        else:
            found = _added(found, acc) + _added(t, acc)
    return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
