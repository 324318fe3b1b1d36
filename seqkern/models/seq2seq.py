"""Recurrent encoder-decoders with attention: Bahdanau's and Luong's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.types import Device

import seqkern
from seqkern.generation import Chunk
from seqkern.models._checks import check_positive
from seqkern.nn import GRU, LSTM, AttentionDecoder, LinearCrossEntropy

_CELLS = {"gru": GRU, "lstm": LSTM}


@dataclass
class SourceMemory:
    """What a decoder reads in every step of generation: the encoder's output, and parts made of it once.

    Beams of one source have the same memory: where every row keeps its source, reordering copies nothing.

    Attributes:
        source: (R,), the source of each row. lengths: (R,), of the sources. parts: tensors (R, S, .).
    """

    source: Tensor
    lengths: Tensor
    parts: tuple[Tensor, ...]

    def reorder(self, rows: Tensor) -> None:
        source = self.source[rows]
        if not torch.equal(source, self.source):
            self.lengths, self.parts = self.lengths[rows], tuple(t.index_select(0, rows) for t in self.parts)
        self.source = source


class RNNEncoderDecoder(torch.nn.Module):
    """A recurrent encoder-decoder with attention: P(y | x) = prod_t P(y_t | y_<t, x).

        h_i = [forward h_i ; backward h_i] of a bidirectional encoder,    s_0 = tanh(W [forward h_S ; backward h_1])
        alpha_ti = softmax_i a(s, h_i),    c_t = sum_i alpha_ti h_i
        Bahdanau's order attends with s_{t-1}:  s_t = cell([E y_{t-1} ; c_t], s_{t-1}),   P = softmax(V [c_t ; s_t] + b)
        Luong's order attends with s_t:         s_t = cell([E y_{t-1} ; o_{t-1}], s_{t-1}),
                                                o_t = tanh(U [c_t ; s_t]),                P = softmax(V o_t + b)

    The score a(s, h) is w^T tanh(W_1 s + W_2 h) (additive), s^T W h (bilinear) or s^T h (dot).

    Args:
        source_vocab, target_vocab: kinds of tokens.
        embedding_dim: features of a token.
        hidden_size: of the decoder's state, and of the encoder's output: half of it for each direction.
        num_layers: of the encoder; the decoder has one.
        cell: "gru" or "lstm", of both.
        score: "additive", "bilinear" or "dot".
        order: "bahdanau" or "luong".
        input_feeding: whether a step of Luong's order takes o_{t-1}.
        dropout: of embeddings, between the encoder's layers and before the softmax, in training.
        label_smoothing: the share of the target's probability that is spread over the vocabulary.
        device, dtype: of the parameters.

    Shape: forward(source (B, S), source_lengths (B,), target_in (B, T)) returns what the softmax reads (B, T, .).
    `loss(source, source_lengths, target_in, target_out)`: the mean of -log P(target_out) in nats, teacher-forced;
    targets of -100 do not count. `weights(source, source_lengths, target_in)`: alpha (B, T, S). `logits(hidden)`.
    `encode(source, source_lengths)`: the encoder's output (B, S, hidden_size) and s_0. `start(source, source_lengths)`
    and `step`: for `seqkern.generate`, whose prompt is the token that begins a target. `translate`: the outputs.

    Raises:
        ValueError: an unknown cell, an odd hidden_size, a number below 1; what the modules raise; in `step`
            prompts of different lengths.

    Source: Bahdanau et al. 2015; Luong et al. 2015; Sutskever et al. 2014. Jurafsky and Martin, chapter 10.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.RNNEncoderDecoder(30, 40, 16, 32)
        >>> source, lengths, target = torch.randint(30, (4, 9)), torch.tensor([9, 5, 7, 2]), torch.randint(40, (4, 8))
        >>> model.loss(source, lengths, target[:, :-1], target[:, 1:]).backward()
        >>> model.translate(source, lengths, begin=0, end=1, max_new_tokens=6, beams=3).shape
        torch.Size([4, 6])
    """

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        embedding_dim: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        cell: Literal["gru", "lstm"] = "gru",
        score: Literal["additive", "bilinear", "dot"] = "additive",
        order: Literal["bahdanau", "luong"] = "bahdanau",
        input_feeding: bool = True,
        dropout: float = 0.0,
        label_smoothing: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if cell not in _CELLS:
            raise ValueError(f"RNNEncoderDecoder: cell must be one of {', '.join(_CELLS)}, got {cell!r}")
        if hidden_size % 2:
            raise ValueError(f"RNNEncoderDecoder: hidden_size must be even, for two directions, got {hidden_size}")
        check_positive(
            "RNNEncoderDecoder", source_vocab=source_vocab, target_vocab=target_vocab, embedding_dim=embedding_dim,
            hidden_size=hidden_size, num_layers=num_layers,
        )  # fmt: skip
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        self.source_embedding = torch.nn.Embedding(source_vocab, embedding_dim, **factory)
        self.target_embedding = torch.nn.Embedding(target_vocab, embedding_dim, **factory)
        between = dropout if num_layers > 1 else 0.0
        self.encoder = _CELLS[cell](
            embedding_dim,
            hidden_size // 2,
            num_layers,
            batch_first=True,
            dropout=between,
            bidirectional=True,
            **factory,
        )
        self.lstm = cell == "lstm"
        self.bridge = torch.nn.Linear(hidden_size, hidden_size * (1 + self.lstm), **factory)
        self.decoder = AttentionDecoder(
            embedding_dim, hidden_size, hidden_size, cell=cell, order=order, score=score, input_feeding=input_feeding,
            **factory,
        )  # fmt: skip
        read = hidden_size * (2 if order == "bahdanau" else 1)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = LinearCrossEntropy(read, target_vocab, bias=True, label_smoothing=label_smoothing, **factory)

    def encode(self, source: Tensor, source_lengths: Tensor) -> tuple[Tensor, Any]:
        embedded = self.dropout(seqkern.embedding(source, self.source_embedding.weight))
        memory, last = self.encoder(embedded, lengths=source_lengths)
        last = last[0] if self.lstm else last  # (2 num_layers, B, hidden_size / 2), the last layer's directions behind
        first = torch.tanh(self.bridge(torch.cat((last[-2], last[-1]), -1)))
        h, c = first.chunk(2, -1) if self.lstm else (first, None)
        return memory, (h, c, None)

    def _decode(
        self, tokens: Tensor, memory: Tensor, lengths: Tensor, state: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        """What the softmax reads, and all that the decoder returns."""
        embedded = self.dropout(seqkern.embedding(tokens, self.target_embedding.weight))
        found = self.decoder(embedded, memory, state=state, key_lengths=lengths, **options)
        read = found.output if self.decoder.order == "luong" else torch.cat((found.context, found.output), -1)
        return self.dropout(read), found

    def forward(self, source: Tensor, source_lengths: Tensor, target_in: Tensor) -> Tensor:
        memory, state = self.encode(source, source_lengths)
        return self._decode(target_in, memory, source_lengths, state)[0]

    def loss(self, source: Tensor, source_lengths: Tensor, target_in: Tensor, target_out: Tensor) -> Tensor:
        found: Tensor = self.head(self(source, source_lengths, target_in), target_out)
        return found

    def weights(self, source: Tensor, source_lengths: Tensor, target_in: Tensor) -> Tensor:
        memory, state = self.encode(source, source_lengths)
        found: Tensor = self._decode(target_in, memory, source_lengths, state, need_weights=True)[1].weights
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)

    def start(self, source: Tensor, source_lengths: Tensor, longest: int = 0) -> tuple[SourceMemory, Any]:
        """The memory with keys that are projected once, and s_0; `longest`, as of models with caches, has no effect."""
        memory, state = self.encode(source, source_lengths)
        rows = torch.arange(len(source), device=source.device)
        return SourceMemory(rows, source_lengths, (memory, self.decoder.project_key(memory))), state

    def step(self, chunk: Chunk, state: tuple[SourceMemory, Any]) -> tuple[Tensor, tuple[SourceMemory, Any]]:
        """Logits after each token of a chunk, and the state after it."""
        if bool((chunk.lengths < chunk.tokens.shape[1]).any()):
            raise ValueError("RNNEncoderDecoder: prompts must have one length: the state goes over all of a chunk")
        source, before = state
        memory, keys = source.parts
        read, found = self._decode(chunk.tokens, memory, source.lengths, before, projected_key=keys)
        return self.logits(read), (source, found.state)

    @torch.no_grad()
    def translate(
        self, source: Tensor, source_lengths: Tensor, begin: int, end: int, max_new_tokens: int, beams: int = 1
    ) -> Tensor:
        """The tokens after `begin`, (B, at most max_new_tokens), greedily or by beam search; `end` and more fill up."""
        found = seqkern.generate(
            self.step, self.start(source, source_lengths), source.new_full((len(source), 1), begin),
            max_new_tokens=max_new_tokens, stop_tokens=end, pad_token=end, beams=beams,
        )  # fmt: skip
        return found.tokens[:, 1:]
