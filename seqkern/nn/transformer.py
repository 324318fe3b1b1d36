"""The layers and stacks of the Transformer as modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu
from torch.types import Device

from seqkern._keywords import explicit, refuse
from seqkern.nn.attention import AttentionCache, MultiheadAttention
from seqkern.nn.layer_norm import LayerNorm
from seqkern.nn.rope import RotaryEmbedding
from seqkern.ops.ffn import ffn
from seqkern.ops.layer_norm import add_layer_norm

Activation = str | Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu's approximation by tanh, GPT-2's."""
    return gelu(x, approximate="tanh")


# Of the activations that a layer may have, those of `ffn`; and names that torch's layers do not know.
_NAMES: dict[Any, Any] = {relu: "relu", gelu: "gelu", silu: "silu", gelu_tanh: "gelu_tanh"}
_MORE: dict[Any, Any] = {"silu": silu, "gelu_tanh": gelu_tanh}


class _Layer(torch.nn.Module):
    """What the two layers share: dropout, addition and norm in one pass, and the feed-forward block."""

    linear1: torch.nn.Linear
    linear2: torch.nn.Linear
    dropout: torch.nn.Dropout
    norm_first: bool
    activation: Any

    # torch's encoder reads this to find out whether it may hand nested tensors and raw weights to kernels of its own.
    @property
    def activation_relu_or_gelu(self) -> int:
        return 0

    @activation_relu_or_gelu.setter
    def activation_relu_or_gelu(self, value: int) -> None:
        self.__dict__["activation_relu_or_gelu"] = value  # for torch's class, should it become one again

    def _add_norm(self, x: Tensor, sublayer: Tensor, drop: Any, norm: Any) -> tuple[Tensor, Tensor]:
        """x + dropout(sublayer), and its norm."""
        fused = type(norm) in (torch.nn.LayerNorm, LayerNorm) and type(drop) is torch.nn.Dropout
        if fused and x.dtype == sublayer.dtype and not (_watched(norm) or _watched(drop)):
            shape, p = norm.normalized_shape, drop.p if drop.training else 0.0
            normal, total = add_layer_norm(sublayer, x, shape, norm.weight, norm.bias, norm.eps, p, drop.training)
            return total, normal
        total = x + drop(sublayer)
        return total, norm(total)

    def _feed_forward(self, x: Tensor) -> Tensor:
        name, one, two = _NAMES.get(self.activation), self.linear1, self.linear2
        if name and _idle(self.dropout) and all(type(m) is torch.nn.Linear and not _watched(m) for m in (one, two)):
            return ffn(x, one.weight, one.bias, two.weight, two.bias, name)
        return two(self._drop(self.dropout, self.activation(one(x))))

    @staticmethod
    def _drop(drop: Any, x: Tensor) -> Tensor:
        """drop(x), without the call of a module that does nothing."""
        return x if _idle(drop) else drop(x)


def _watched(module: torch.nn.Module) -> bool:
    """Whether somebody waits for this module to be called."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def _idle(drop: Any) -> bool:
    return type(drop) is torch.nn.Dropout and not (drop.training and drop.p) and not _watched(drop)


def _adopt(layer: torch.nn.Module, factory: Any, **options: dict[str, Any]) -> None:
    """Makes torch's attention and norms in a layer ours, with the parameters that they have, unless an option changes
    their shape."""
    for name, module in list(layer.named_children()):
        if type(module) is torch.nn.LayerNorm:
            object.__setattr__(module, "__class__", LayerNorm)
        elif isinstance(module, torch.nn.MultiheadAttention):
            own = {key: value for key, value in options[name].items() if value is not None and value is not False}
            if own:
                made = MultiheadAttention(
                    module.embed_dim,
                    module.num_heads,
                    module.dropout,
                    module.in_proj_bias is not None,
                    batch_first=module.batch_first,
                    device=factory["device"],
                    dtype=factory["dtype"],
                    num_kv_heads=own.get("num_kv_heads"),
                    window=own.get("window"),
                    qk_norm=own.get("qk_norm", False),
                    rope=own.get("rope"),
                    head_dim=own.get("head_dim"),
                )
                setattr(layer, name, made)
            else:
                object.__setattr__(module, "__class__", MultiheadAttention)


class TransformerEncoderLayer(_Layer, torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` on seqkern's kernels: constructor, state_dict and arguments are torch's.

    One way through for training and evaluation (torch's evaluation calls neither its own attention nor hooks): rows of
    padding hold in evaluation what they hold in training, a query that sees no key gives no NaN, `is_causal` needs no
    mask. Dropout, residual addition and layer norm are one pass.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
            dtype: as `torch.nn.TransformerEncoderLayer`; activation also "silu" or "gelu_tanh", GPT-2's.
        num_kv_heads, window, qk_norm, rope, head_dim: as `seqkern.nn.MultiheadAttention`.

    Shape: src (N, L, d_model) with batch_first, (L, N, d_model), or without N. forward(src, src_mask=None,
    src_key_padding_mask=None, is_causal=False): the masks as `seqkern.nn.MultiheadAttention`. By keyword key_lengths
    and cache, as there.

    Source: Vaswani et al., "Attention Is All You Need", 2017; norm_first: Xiong et al., 2020.

    Example:
        >>> import torch, seqkern
        >>> layer = seqkern.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> layer(torch.randn(2, 5, 16), is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    self_attn: MultiheadAttention

    @explicit
    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
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
            refuse(TransformerEncoderLayer.__init__, unexpected, "TransformerEncoderLayer")
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, _MORE.get(activation, activation), layer_norm_eps, batch_first,
            norm_first, bias, device, dtype,
        )  # fmt: skip
        options: dict[str, Any] = {"num_kv_heads": num_kv_heads, "window": window, "qk_norm": qk_norm, "rope": rope}
        options |= {"head_dim": head_dim}
        _adopt(self, {"device": device, "dtype": dtype}, self_attn=options)

    @explicit
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        key_lengths: Tensor | None = None,
        cache: AttentionCache | None = None,
        **unexpected: NoReturn,
    ) -> Tensor:
        if unexpected:
            refuse(TransformerEncoderLayer.forward, unexpected, "TransformerEncoderLayer")
        if src.is_nested and src.layout is torch.strided:  # from a stack of torch's, a subclass of it
            rows = src.unbind()
            lengths = torch.tensor([len(row) for row in rows], device=src.device)
            padded = self.forward(src.to_padded_tensor(0.0), src_mask, None, is_causal, key_lengths=lengths)
            return torch.nested.as_nested_tensor([y[: len(row)] for y, row in zip(padded, rows, strict=True)])
        options: dict[str, Any] = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
        options |= {"is_causal": is_causal}
        if key_lengths is not None or cache is not None:
            options |= {"key_lengths": key_lengths, "cache": cache}
        x = self.norm1(src) if self.norm_first else src
        attended = self.self_attn(x, x, x, need_weights=False, **options)[0]
        if self.norm_first:
            x, normal = self._add_norm(src, attended, self.dropout1, self.norm2)
            return x + self._drop(self.dropout2, self._feed_forward(normal))
        _, x = self._add_norm(src, attended, self.dropout1, self.norm1)
        return self._add_norm(x, self._feed_forward(x), self.dropout2, self.norm2)[1]


class TransformerDecoderLayer(_Layer, torch.nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` on seqkern's kernels: constructor, state_dict and arguments are torch's.

    As `TransformerEncoderLayer`, with attention to a memory between the two blocks.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
            dtype: as `torch.nn.TransformerDecoderLayer`.
        num_kv_heads, window, qk_norm, rope, head_dim: as `seqkern.nn.MultiheadAttention`; window and rope are of the
            attention to itself.

    Shape: tgt and memory as `TransformerEncoderLayer`'s src. forward(tgt, memory, tgt_mask=None, memory_mask=None,
    tgt_key_padding_mask=None, memory_key_padding_mask=None, tgt_is_causal=False, memory_is_causal=False): as torch's.
    By keyword memory_lengths, (N,): the keys of the memory, and cache, for decoding: an `AttentionCache` of self_attn.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    Example:
        >>> import torch, seqkern
        >>> layer = seqkern.nn.TransformerDecoderLayer(16, 4, 32, batch_first=True).eval()
        >>> memory, tokens = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
        >>> y = layer(tokens, memory, tgt_is_causal=True)
        >>> cache = layer.self_attn.make_cache(2, 5)  # the same, a token at a time
        >>> with torch.no_grad():
        ...     steps = [layer(tokens[:, i : i + 1], memory, cache=cache) for i in range(5)]
        >>> torch.allclose(torch.cat(steps, 1), y, atol=1e-5)
        True
    """

    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention

    @explicit
    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
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
            refuse(TransformerDecoderLayer.__init__, unexpected, "TransformerDecoderLayer")
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, _MORE.get(activation, activation), layer_norm_eps, batch_first,
            norm_first, bias, device, dtype,
        )  # fmt: skip
        options: dict[str, Any] = {"num_kv_heads": num_kv_heads, "qk_norm": qk_norm, "head_dim": head_dim}
        factory = {"device": device, "dtype": dtype}
        _adopt(self, factory, self_attn=options | {"window": window, "rope": rope}, multihead_attn=options)

    @explicit
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        memory_lengths: Tensor | None = None,
        cache: AttentionCache | None = None,
        **unexpected: NoReturn,
    ) -> Tensor:
        if unexpected:
            refuse(TransformerDecoderLayer.forward, unexpected, "TransformerDecoderLayer")
        own: dict[str, Any] = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask}
        own |= {"is_causal": tgt_is_causal} | ({} if cache is None else {"cache": cache})
        other: dict[str, Any] = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask}
        other |= {"is_causal": memory_is_causal} | ({} if memory_lengths is None else {"key_lengths": memory_lengths})
        x = self.norm1(tgt) if self.norm_first else tgt
        attended = self.self_attn(x, x, x, need_weights=False, **own)[0]
        if self.norm_first:
            x, normal = self._add_norm(tgt, attended, self.dropout1, self.norm2)
            attended = self.multihead_attn(normal, memory, memory, need_weights=False, **other)[0]
            x, normal = self._add_norm(x, attended, self.dropout2, self.norm3)
            return x + self._drop(self.dropout3, self._feed_forward(normal))
        _, x = self._add_norm(tgt, attended, self.dropout1, self.norm1)
        attended = self.multihead_attn(x, memory, memory, need_weights=False, **other)[0]
        _, x = self._add_norm(x, attended, self.dropout2, self.norm2)
        return self._add_norm(x, self._feed_forward(x), self.dropout3, self.norm3)[1]


class TransformerEncoder(torch.nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` without its nested tensors, which make rows of padding 0 in evaluation alone.

    Args:
        encoder_layer, num_layers, norm, mask_check: as `torch.nn.TransformerEncoder`.
        enable_nested_tensor: taken, and without effect.

    Shape: forward(src, mask=None, src_key_padding_mask=None, is_causal=None), as torch's. By keyword key_lengths, (N,),
    and caches, one for each layer, as `seqkern.nn.MultiheadAttention`.

    Example:
        >>> import torch, seqkern
        >>> encoder = seqkern.nn.TransformerEncoder(seqkern.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        >>> encoder(torch.randn(3, 5, 16), key_lengths=torch.tensor([5, 2, 4])).shape
        torch.Size([3, 5, 16])
    """

    @explicit
    def __init__(
        self,
        encoder_layer: torch.nn.TransformerEncoderLayer,
        num_layers: int,
        norm: torch.nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(TransformerEncoder.__init__, unexpected, "TransformerEncoder")
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)

    @explicit
    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        key_lengths: Tensor | None = None,
        caches: Sequence[AttentionCache] | None = None,
        **unexpected: NoReturn,
    ) -> Tensor:
        if unexpected:
            refuse(TransformerEncoder.forward, unexpected, "TransformerEncoder")
        if caches is not None and len(caches) != len(self.layers):
            raise ValueError(
                f"TransformerEncoder: caches must be one for each of the {len(self.layers)} layers, got {len(caches)}"
            )
        output = src
        for i, layer in enumerate(self.layers):
            options: dict[str, Any] = {} if key_lengths is None else {"key_lengths": key_lengths}
            options |= {} if caches is None else {"cache": caches[i]}
            output = layer(
                output, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal), **options
            )
        return output if self.norm is None else self.norm(output)


class TransformerDecoder(torch.nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder`, with lengths of the memory and caches.

    Args:
        decoder_layer, num_layers, norm: as `torch.nn.TransformerDecoder`.

    Shape: forward(tgt, memory, tgt_mask=None, memory_mask=None, tgt_key_padding_mask=None,
    memory_key_padding_mask=None, tgt_is_causal=None, memory_is_causal=False), as torch's. By keyword memory_lengths and
    caches, one for each layer, as `seqkern.nn.TransformerDecoderLayer`.

    Example:
        >>> import torch, seqkern
        >>> decoder = seqkern.nn.TransformerDecoder(seqkern.nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 2)
        >>> decoder(torch.randn(3, 5, 16), torch.randn(3, 7, 16), tgt_is_causal=True).shape
        torch.Size([3, 5, 16])
    """

    @explicit
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        memory_lengths: Tensor | None = None,
        caches: Sequence[AttentionCache] | None = None,
        **unexpected: NoReturn,
    ) -> Tensor:
        if unexpected:
            refuse(TransformerDecoder.forward, unexpected, "TransformerDecoder")
        if caches is not None and len(caches) != len(self.layers):
            raise ValueError(
                f"TransformerDecoder: caches must be one for each of the {len(self.layers)} layers, got {len(caches)}"
            )
        output = tgt
        for i, layer in enumerate(self.layers):
            options: dict[str, Any] = {} if memory_lengths is None else {"memory_lengths": memory_lengths}
            options |= {} if caches is None else {"cache": caches[i]}
            output = layer(
                output, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=bool(tgt_is_causal),
                memory_is_causal=memory_is_causal, **options,
            )  # fmt: skip
        return output if self.norm is None else self.norm(output)


class Transformer(torch.nn.Transformer):
    """`torch.nn.Transformer` of seqkern's layers: constructor, state_dict and arguments are torch's.

    Args:
        d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout, activation, custom_encoder,
            custom_decoder, layer_norm_eps, batch_first, norm_first, bias, device, dtype: as `torch.nn.Transformer`.
        num_kv_heads, window, qk_norm, rope, head_dim: of every layer, as `seqkern.nn.TransformerEncoderLayer`.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.nn.Transformer(16, 4, 2, 2, 32, batch_first=True)
        >>> model(torch.randn(3, 7, 16), torch.randn(3, 5, 16), tgt_is_causal=True).shape
        torch.Size([3, 5, 16])
    """

    @explicit
    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = relu,
        custom_encoder: Any = None,
        custom_decoder: Any = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
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
            refuse(Transformer.__init__, unexpected, "Transformer")
        factory: Any = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"num_kv_heads": num_kv_heads, "window": window, "qk_norm": qk_norm, "rope": rope}
        options |= factory | {"head_dim": head_dim}
        options |= {"dropout": dropout, "activation": activation, "layer_norm_eps": layer_norm_eps, "bias": bias}
        options |= {"batch_first": batch_first, "norm_first": norm_first, "dim_feedforward": dim_feedforward}

        def norm() -> LayerNorm:
            return LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)

        if custom_encoder is None:
            encoder_layer = TransformerEncoderLayer(d_model, nhead, **options)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, norm())
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(d_model, nhead, **options)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norm())
        super().__init__(
            d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout, activation,
            custom_encoder, custom_decoder, layer_norm_eps, batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip
