"""Transformer language models: a decoder of causal self-attention, as GPT-2's or as Llama's."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.types import Device

import seqkern
from seqkern.generation import Chunk
from seqkern.models._checks import check_heads, check_positive
from seqkern.nn import AttentionCache, MultiheadAttention
from seqkern.ops.ffn import Activation


class GPTBlock(torch.nn.Module):
    """A block of causal self-attention and a feed-forward network, each with a residual connection and a norm.

        pre-norm:   z = x + SelfAttention(Norm(x)),      y = z + FFN(Norm(z))
        post-norm:  z = Norm(x + SelfAttention(x)),      y = Norm(z + FFN(z))

    Args: as `GPT`. Shape: forward(x (B, T, d_model), cache=None) to the same.

    Source: Vaswani et al. 2017; pre-norm: Xiong et al. 2020. Jurafsky and Martin, equations 9.37 and 9.38.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        *,
        rotary: bool = False,
        norm: Literal["layer", "rms"] = "layer",
        norm_first: bool = True,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        num_kv_heads: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads("GPTBlock", nhead, rotary, d_model=d_model)
        check_positive("GPTBlock", dim_feedforward=dim_feedforward)
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        rope = seqkern.nn.RotaryEmbedding(d_model // nhead) if rotary else None
        self.attention = MultiheadAttention(
            d_model, nhead, bias=bias, batch_first=True, num_kv_heads=num_kv_heads, rope=rope, **factory
        )
        self.ffn = seqkern.nn.FeedForward(d_model, dim_feedforward, activation, bias, **factory)
        kind: Any = seqkern.nn.AddRMSNorm if norm == "rms" else seqkern.nn.AddLayerNorm
        self.norm_first = norm_first
        self.norm1 = kind(d_model, dropout=0.0 if norm_first else dropout, **factory)
        self.norm2 = kind(d_model, dropout=dropout, **factory)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: AttentionCache | None = None) -> Tensor:
        if not self.norm_first:
            x, _ = self.norm1(self._attend(x, cache), x)
            x, _ = self.norm2(self.ffn(x).to(x.dtype), x)
            return x
        normal, x = self.norm1(x)
        normal, x = self.norm2(self._attend(normal, cache), x)  # dropout, residual connection and norm in one pass
        return x + self.dropout(self.ffn(normal))

    def _attend(self, x: Tensor, cache: AttentionCache | None) -> Tensor:
        options: Any = {"is_causal": True} if cache is None else {"cache": cache}
        attended: Tensor = self.attention(x, x, x, need_weights=False, **options)[0]
        return attended.to(x.dtype)  # autocast's is narrower than the residual


class GPT(torch.nn.Module):
    """A language model of Transformer blocks in which a position sees itself and those before it.

        x = E[w] + positions,    x = Block(x) for each layer,    P(w_{t+1} | w_<=t) = softmax(E Norm(x_t))

    GPT-2's, the default: learned positions, layer norms before the blocks, gelu. GPT-1's: norm_first=False. Llama's:
    `positions="rotary", norm="rms", activation="swiglu", bias=False`, which turns queries and keys by their position's
    angles. The output matrix is the embedding matrix.

    Args:
        vocab_size: V, kinds of tokens.
        d_model: features; of each head d_model / nhead.
        nhead, num_layers: heads of a block, and blocks.
        dim_feedforward: width inside the feed-forward network. Default: 4 d_model.
        max_len: rows of the table of learned positions: longer texts raise an error.
        positions: "learned", "sinusoidal" (Vaswani's) or "rotary".
        norm: "layer" or "rms". norm_first: pre-norm, which has one more norm at the end, or post-norm.
        activation: of `seqkern.ffn`: "gelu", "relu", "swiglu", ...
        bias: of the linear layers.
        dropout: of embeddings and of what each block adds, in training.
        num_kv_heads: of keys and values, as `seqkern.nn.MultiheadAttention`.
        device, dtype: of the parameters.

    Shape: forward(tokens (B, T)) returns the last states (B, T, d_model). `loss(tokens, targets)`, both (B, T): the
    mean of -log P(target) in nats; targets of -100 do not count. `logits(hidden)` (..., V). `start(rows, longest)` and
    `step`: for `seqkern.generate`, with caches of keys and values.

    Raises:
        ValueError: unknown positions or norm, an nhead that does not divide d_model, a size that is odd where positions
            are pairs, a number below 1; what the modules raise.

    Source: Radford et al. 2018 and 2019; Touvron et al. 2023; rotary positions: Su et al. 2021. Jurafsky and Martin,
    section 9.8 and equations 9.31 to 9.38.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.GPT(100, 16, 4, 2, positions="rotary", norm="rms", activation="swiglu", bias=False)
        >>> tokens = torch.randint(100, (3, 21))
        >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        >>> found = seqkern.generate(model.step, model.start(3, 30), tokens, max_new_tokens=9)
        >>> found.tokens.shape
        torch.Size([3, 30])
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        nhead: int,
        num_layers: int,
        dim_feedforward: int | None = None,
        *,
        max_len: int = 1024,
        positions: Literal["learned", "sinusoidal", "rotary"] = "learned",
        norm: Literal["layer", "rms"] = "layer",
        norm_first: bool = True,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        num_kv_heads: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if positions not in ("learned", "sinusoidal", "rotary"):
            raise ValueError(f"GPT: positions must be learned, sinusoidal or rotary, got {positions!r}")
        if norm not in ("layer", "rms"):
            raise ValueError(f"GPT: norm must be layer or rms, got {norm!r}")
        check_heads("GPT", nhead, positions == "rotary", positions == "sinusoidal", d_model=d_model)
        check_positive(
            "GPT", vocab_size=vocab_size, num_layers=num_layers, dim_feedforward=dim_feedforward, max_len=max_len,
            num_kv_heads=num_kv_heads,
        )  # fmt: skip
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        self.embedding = torch.nn.Embedding(vocab_size, d_model, **factory)
        self.positions = positions
        self.position_embedding = torch.nn.Embedding(max_len, d_model, **factory) if positions == "learned" else None
        for table in filter(None, (self.embedding, self.position_embedding)):
            torch.nn.init.normal_(table.weight, std=d_model**-0.5)
        self.dropout = dropout
        self.blocks = torch.nn.ModuleList(
            GPTBlock(
                d_model, nhead, 4 * d_model if dim_feedforward is None else dim_feedforward,
                rotary=positions == "rotary", norm=norm, norm_first=norm_first, activation=activation, bias=bias,
                dropout=dropout, num_kv_heads=num_kv_heads, **factory,
            )
            for _ in range(num_layers)
        )  # fmt: skip
        last: Any = seqkern.nn.RMSNorm if norm == "rms" else seqkern.nn.LayerNorm
        self.norm = last(d_model, **factory) if norm_first else torch.nn.Identity()

    def _embed(self, tokens: Tensor, offset: int | Tensor = 0) -> Tensor:
        table: Any = {"learned": self.position_embedding, "sinusoidal": "sinusoidal", "rotary": None}[self.positions]
        table = table.weight if isinstance(table, torch.nn.Embedding) else table
        options: Any = {"dropout_p": self.dropout, "training": self.training}
        return seqkern.embedding(tokens, self.embedding.weight, positions=table, offset=offset, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self._embed(tokens)
        for block in self.blocks:
            x = block(x)
        hidden: Tensor = self.norm(x)
        return hidden

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        found = seqkern.linear_cross_entropy(self(tokens), self.embedding.weight, targets)
        assert isinstance(found, Tensor)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.embedding.weight)

    def start(self, rows: int, longest: int) -> list[AttentionCache]:
        """Empty caches for `rows` texts of at most `longest` tokens."""
        return [block.attention.make_cache(rows, longest) for block in self.blocks]  # type: ignore[union-attr,operator]

    def step(self, chunk: Chunk, state: list[AttentionCache]) -> tuple[Tensor, list[AttentionCache]]:
        """Logits after each token of a chunk, and the caches with it."""
        x = self._embed(chunk.tokens, chunk.positions)
        for block, cache in zip(self.blocks, state, strict=True):
            x = block(x, cache)
            cache.lengths = chunk.positions + chunk.lengths  # padding of shorter prompts is overwritten
        return self.logits(self.norm(x)), state
