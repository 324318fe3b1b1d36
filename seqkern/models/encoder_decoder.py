"""The Transformer of Vaswani et al.: an encoder, and a decoder with attention to what it read."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.types import Device

import seqkern
from seqkern.generation import Chunk
from seqkern.models._checks import check_heads, check_positive
from seqkern.models.seq2seq import SourceMemory
from seqkern.nn import AttentionCache, RotaryEmbedding, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder
from seqkern.nn import TransformerEncoderLayer as EncoderLayer


class EncoderDecoder(torch.nn.Module):
    """The Transformer: P(y | x) = prod_t P(y_t | y_<t, x).

        Z = Encoder(sqrt(d) E x + PE),    h = Decoder(sqrt(d) E' y_<t + PE, Z),    P(y_t | y_<t, x) = softmax(V h + b)

    A block of the encoder is self-attention and a feed-forward network; of the decoder causal self-attention,
    attention whose queries are the decoder's and whose keys and values are Z's, and a feed-forward network. Each has a
    residual connection and a layer norm. PE are the sinusoidal positions.

    Args:
        source_vocab, target_vocab: kinds of tokens.
        d_model: features. nhead: heads of each attention.
        num_encoder_layers, num_decoder_layers: blocks.
        dim_feedforward: width inside the feed-forward networks. Default: 4 d_model.
        norm_first: norms before the parts of a block, and one after the last block; or after them, as the paper.
        rotary: whether self-attention also turns queries and keys by their positions' angles (Su et al. 2021), which
            shows it how far apart they are: training needs fewer steps.
        tie_weights: whether V is the target's embedding matrix E'; there is no bias b then.
        dropout: of embeddings and of what each part of a block adds, in training.
        label_smoothing: the share of the target's probability that is spread over the vocabulary.
        device, dtype: of the parameters.

    Shape: forward(source (B, S), source_lengths (B,), target_in (B, T)) returns the decoder's states (B, T, d_model).
    `loss(source, source_lengths, target_in, target_out)`: the mean of -log P(target_out) in nats, teacher-forced;
    targets of -100 do not count. `weights(source, source_lengths, target_in, layer=-1, rows=None)`: the decoder's
    attention to the source in one layer, a mean over heads, of all positions or those of `rows` (n,): (B, n, S).
    `logits(hidden)`. `encode(source, source_lengths)`: Z (B, S, d_model). `start(source, source_lengths, longest)` and
    `step`: for `seqkern.generate`, with caches of keys and values. `translate`: the outputs. Lengths are cut to S.

    Raises:
        ValueError: an odd d_model, or one that is no multiple of nhead; rotary with an odd d_model / nhead; a number
            below 1; what the modules raise.

    Source: Vaswani et al. 2017; norm_first: Xiong et al. 2020; tied weights: Press and Wolf 2017. Jurafsky and Martin,
    equations 9.31 to 9.42.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.EncoderDecoder(30, 40, 16, 4, 2, 2, tie_weights=True)
        >>> source, lengths, target = torch.randint(30, (4, 9)), torch.tensor([9, 5, 7, 2]), torch.randint(40, (4, 8))
        >>> model.loss(source, lengths, target[:, :-1], target[:, 1:]).backward()
        >>> model.translate(source, lengths, begin=0, end=1, max_new_tokens=6, beams=3).shape
        torch.Size([4, 6])
    """

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        d_model: int,
        nhead: int,
        num_encoder_layers: int,
        num_decoder_layers: int,
        dim_feedforward: int | None = None,
        *,
        norm_first: bool = False,
        rotary: bool = False,
        tie_weights: bool = False,
        dropout: float = 0.0,
        label_smoothing: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads("EncoderDecoder", nhead, rotary, sinusoidal=True, d_model=d_model)
        check_positive(
            "EncoderDecoder", source_vocab=source_vocab, target_vocab=target_vocab,
            num_encoder_layers=num_encoder_layers, num_decoder_layers=num_decoder_layers,
            dim_feedforward=dim_feedforward,
        )  # fmt: skip
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        options: Any = factory | {"dropout": dropout, "batch_first": True, "norm_first": norm_first}
        options["rope"] = RotaryEmbedding(d_model // nhead) if rotary else None
        width = 4 * d_model if dim_feedforward is None else dim_feedforward

        def last() -> Any:
            return seqkern.nn.LayerNorm(d_model, **factory) if norm_first else None

        self.encoder = TransformerEncoder(EncoderLayer(d_model, nhead, width, **options), num_encoder_layers, last())
        self.decoder = TransformerDecoder(
            TransformerDecoderLayer(d_model, nhead, width, **options), num_decoder_layers, last()
        )
        for parameter in self.parameters():  # the stacks copy one layer: each starts at its own numbers
            if parameter.dim() > 1:
                torch.nn.init.xavier_uniform_(parameter)
        self.source_embedding = torch.nn.Embedding(source_vocab, d_model, **factory)
        self.target_embedding = torch.nn.Embedding(target_vocab, d_model, **factory)
        self.head = seqkern.nn.LinearCrossEntropy(
            d_model, target_vocab, bias=not tie_weights, label_smoothing=label_smoothing, **factory
        )
        for table in (self.source_embedding, self.target_embedding):
            torch.nn.init.normal_(table.weight, std=d_model**-0.5)
        if tie_weights:
            self.head.linear.weight = self.target_embedding.weight
        self.dropout = dropout

    def _embed(self, tokens: Tensor, table: torch.nn.Embedding, offset: int | Tensor = 0) -> Tensor:
        options: Any = {"scale": math.sqrt(table.embedding_dim), "dropout_p": self.dropout, "training": self.training}
        return seqkern.embedding(tokens, table.weight, positions="sinusoidal", offset=offset, **options)

    def encode(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        memory: Tensor = self.encoder(self._embed(source, self.source_embedding), key_lengths=source_lengths)
        return memory

    def _decode(self, target_in: Tensor, memory: Tensor, source_lengths: Tensor) -> Tensor:
        x = self._embed(target_in, self.target_embedding)
        hidden: Tensor = self.decoder(x, memory, tgt_is_causal=True, memory_lengths=source_lengths)
        return hidden

    def forward(self, source: Tensor, source_lengths: Tensor, target_in: Tensor) -> Tensor:
        return self._decode(target_in, self.encode(source, source_lengths), source_lengths)

    def loss(self, source: Tensor, source_lengths: Tensor, target_in: Tensor, target_out: Tensor) -> Tensor:
        found: Tensor = self.head(self(source, source_lengths, target_in), target_out)
        return found

    def weights(
        self, source: Tensor, source_lengths: Tensor, target_in: Tensor, layer: int = -1, rows: Tensor | None = None
    ) -> Tensor:
        attention: Any = self.decoder.layers[layer].multihead_attn
        query: list[Tensor] = []
        hook = attention.register_forward_pre_hook(lambda module, given: query.append(given[0]))
        try:
            memory = self.encode(source, source_lengths)
            self._decode(target_in, memory, source_lengths)
        finally:
            hook.remove()
        found: Tensor = attention(query[0], memory, memory, key_lengths=source_lengths, weight_rows=rows)[1]
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head.linear.weight, self.head.linear.bias)

    def start(self, source: Tensor, source_lengths: Tensor, longest: int) -> tuple[SourceMemory, list[AttentionCache]]:
        """The encoder's output, and empty caches for targets of at most `longest` tokens."""
        rows = torch.arange(len(source), device=source.device)
        memory = SourceMemory(rows, source_lengths, (self.encode(source, source_lengths),))
        layers: Any = self.decoder.layers
        return memory, [layer.self_attn.make_cache(len(source), longest) for layer in layers]

    def step(
        self, chunk: Chunk, state: tuple[SourceMemory, list[AttentionCache]]
    ) -> tuple[Tensor, tuple[SourceMemory, list[AttentionCache]]]:
        """Logits after each token of a chunk, and the state with it."""
        source, caches = state
        x = self._embed(chunk.tokens, self.target_embedding, chunk.positions)
        hidden = self.decoder(x, source.parts[0], memory_lengths=source.lengths, caches=caches)
        for cache in caches:
            cache.lengths = chunk.positions + chunk.lengths  # padding of shorter prompts is overwritten
        return self.logits(hidden), state

    @torch.no_grad()
    def translate(
        self, source: Tensor, source_lengths: Tensor, begin: int, end: int, max_new_tokens: int, beams: int = 1
    ) -> Tensor:
        """The tokens after `begin`, (B, at most max_new_tokens), greedily or by beam search; `end` and more fill up."""
        found = seqkern.generate(
            self.step, self.start(source, source_lengths, 1 + max_new_tokens), source.new_full((len(source), 1), begin),
            max_new_tokens=max_new_tokens, stop_tokens=end, pad_token=end, beams=beams,
        )  # fmt: skip
        return found.tokens[:, 1:]
