"""Two small byte-level language models, written once: the ops they use, torch's or seqkern's, are an argument.

Both read bytes (B, T) and return the logits of the next byte (B, T, 256), and both tie the output matrix to the
embedding. The transformer has pre-norm blocks with causal attention (Vaswani et al. 2017): z = x + Attention(Norm(x)),
y = z + FFN(Norm(z)); positions enter by rotating queries and keys (Su et al. 2021), which learns this text far sooner
than a table of positions (2.2 against 2.9 bits per byte after half a million bytes). The recurrent model is an LSTM
(Hochreiter & Schmidhuber 1997) with a norm on its output.

    python -m examples.language_model  parameters of both, and a check that the two versions start equal
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import seqkern
from seqkern.generation import Chunk

VOCABULARY = 256


@dataclass(frozen=True)
class Ops:
    """Everything the models take from a library: the rest is the same code."""

    name: str
    attention: Callable[..., torch.Tensor]
    LayerNorm: type[nn.LayerNorm]
    LSTM: type[nn.LSTM]
    loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of hidden states, weight and targets


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2), targets.flatten())


TORCH = Ops("torch", F.scaled_dot_product_attention, nn.LayerNorm, nn.LSTM, plain_loss)
SEQKERN = Ops(
    "seqkern",
    seqkern.scaled_dot_product_attention,
    seqkern.nn.LayerNorm,
    seqkern.nn.LSTM,
    seqkern.linear_cross_entropy,
)
LIBRARIES = {ops.name: ops for ops in (TORCH, SEQKERN)}


def rotation(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of position * 10000^(-2i/width), both (length, width / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (x[i], x[i + width / 2]) by their position's angles, so that q.k depends on the distance only."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosines - b * sines, a * sines + b * cosines], dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, ops: Ops, width: int, heads: int):
        super().__init__()
        self.ops, self.heads = ops, heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, cache: seqkern.nn.AttentionCache | None = None, context: int | None = None
    ) -> torch.Tensor:
        # (B, T, 3 * width) -> three views (B, heads, T, width / heads)
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is None:
            turn = rotation(x.size(1), query.size(-1))
            mixed = self.ops.attention(rotate(query, *turn), rotate(key, *turn), value, is_causal=True)
        else:
            query, key = seqkern.rope(query, key, cache.lengths[:, None] + torch.arange(x.size(1)))
            window = None if context is None else (context - 1, 0)
            mixed = seqkern.attention_decode(
                query, cache.keys, cache.values, cache.lengths, key=key, value=value, window=window
            )
            cache.lengths += x.size(1)
        return self.output(mixed.transpose(1, 2).flatten(-2))

    def make_cache(self, rows: int, longest: int) -> seqkern.nn.AttentionCache:
        keys, values = torch.zeros(2, rows, self.heads, longest, self.output.in_features // self.heads)
        return seqkern.nn.AttentionCache(keys, values, torch.zeros(rows, dtype=torch.int64))


class Block(nn.Module):
    def __init__(self, ops: Ops, width: int, heads: int):
        super().__init__()
        self.attention_norm = ops.LayerNorm(width)
        self.attention = CausalSelfAttention(ops, width, heads)
        self.feed_forward_norm = ops.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(
        self, x: torch.Tensor, cache: seqkern.nn.AttentionCache | None = None, context: int | None = None
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cache, context)
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    """An embedding, whose weights are the output matrix too, and between them what `hidden` does."""

    def __init__(self, ops: Ops, width: int):
        super().__init__()
        self.ops = ops
        self.embedding = nn.Embedding(VOCABULARY, width)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, T, width), normalised."""
        raise NotImplementedError

    def start(self, rows: int, longest: int) -> Any:
        """What `step` needs to begin `rows` texts of at most `longest` bytes."""
        raise NotImplementedError

    def step(self, chunk: Chunk, state: Any, context: int | None = None) -> tuple[torch.Tensor, Any]:
        """A step of `seqkern.generate`: logits of the next byte, and the state after the chunk.

        context: bytes that attention looks back on, as many as it was trained with.
        """
        raise NotImplementedError

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(tokens), self.embedding.weight)

    def bits_per_byte(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next byte in bits: tokens and targets (B, T)."""
        return self.ops.loss(self.hidden(tokens), self.embedding.weight, targets) / math.log(2)


class Transformer(LanguageModel):
    def __init__(self, ops: Ops, width: int = 96, heads: int = 4, layers: int = 3):
        super().__init__(ops, width)
        self.blocks = nn.ModuleList(Block(ops, width, heads) for _ in range(layers))
        self.norm = ops.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def start(self, rows: int, longest: int) -> list[seqkern.nn.AttentionCache]:
        attentions = [module for module in self.modules() if isinstance(module, CausalSelfAttention)]
        return [attention.make_cache(rows, longest) for attention in attentions]

    def step(
        self, chunk: Chunk, state: list[seqkern.nn.AttentionCache], context: int | None = None
    ) -> tuple[torch.Tensor, Any]:
        x = self.embedding(chunk.tokens)
        for block, cache in zip(self.blocks, state, strict=True):
            x = block(x, cache, context)
            cache.lengths = chunk.positions + chunk.lengths
        return F.linear(self.norm(x), self.embedding.weight), state


class RecurrentModel(LanguageModel):
    def __init__(self, ops: Ops, width: int = 192, layers: int = 1):
        super().__init__(ops, width)
        self.lstm = ops.LSTM(width, width, num_layers=layers, batch_first=True)
        self.norm = ops.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        for layer in range(layers):
            # Forget gates (the second quarter) start open, so that the state carries over many bytes from the start.
            nn.init.ones_(getattr(self.lstm, f"bias_ih_l{layer}").data[width : 2 * width])

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.norm(hidden)

    def start(self, rows: int, longest: int) -> None:
        return None  # zeros

    def step(self, chunk: Chunk, state: Any, context: int | None = None) -> tuple[torch.Tensor, Any]:
        hidden, state = self.lstm(self.embedding(chunk.tokens), state, lengths=chunk.lengths)
        return F.linear(self.norm(hidden), self.embedding.weight), state


MODELS: dict[str, Callable[..., LanguageModel]] = {"transformer": Transformer, "LSTM": RecurrentModel}


def build(model: str, library: str, seed: int) -> LanguageModel:
    """`model` of MODELS with the ops of `library` of LIBRARIES; the seed alone decides the parameters."""
    torch.manual_seed(seed)
    return MODELS[model](LIBRARIES[library])


def continued(model: LanguageModel, prompt: bytes, length: int, context: int, **options: Any) -> str:
    """What the model writes after `prompt`, `length` bytes, with that context; options as `seqkern.generate`."""
    tokens = torch.tensor([list(prompt)])
    state = model.start(1, len(prompt) + length)
    step = functools.partial(model.step, context=context)
    found = seqkern.generate(step, state, tokens, max_new_tokens=length, **options)
    return bytes(found.tokens[0, len(prompt) :].tolist()).decode(errors="replace")


if __name__ == "__main__":
    for name in MODELS:
        versions = [build(name, library, seed=0) for library in LIBRARIES]
        pairs = zip(*(version.state_dict().items() for version in versions), strict=True)
        equal = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
        print(f"{name}: {sum(p.numel() for p in versions[0].parameters())} parameters, start equal: {equal}")
