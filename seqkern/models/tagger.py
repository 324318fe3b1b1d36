"""Sequence labelling: a tag for every token, from a recurrent network, one that reads both ways, or an encoder."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.types import Device

import seqkern
from seqkern.models._checks import check_heads, check_positive
from seqkern.models._parts import CELLS, Embedding, forget_slowly, make_encoder


class Tagger(torch.nn.Module):
    """A tag for every token, of states that saw the tokens before it, or those on both sides.

        rnn:          h_t = cell(e_t, h_{t-1})
        birnn:        h_t = [forward h_t; backward h_t], of two networks, one of which reads from the end
        transformer:  h = Encoder(e), whose attention turns queries and keys by their position's angles
        all:          P(tag_t | w_1 .. w_n) = softmax(V h_t + b)

    Args:
        vocab_size, num_tags: kinds of tokens, and tags.
        embedding_dim: features of a token; the transformer's everywhere.
        hidden_size: of a state in each direction; the width inside the transformer's feed-forward networks.
        encoder: "birnn", "rnn" or "transformer".
        cell: of the recurrent ones: "lstm", "gru" or "rnn" (Elman's, tanh).
        num_layers: stacked.
        nhead: heads of the transformer, `seqkern.nn.TransformerEncoderLayer`, pre-norm, with gelu.
        positions: of the transformer: "rotary", or "sinusoidal", Vaswani's, which are added to sqrt(d) e.
        dropout: of embeddings and of the last states, in training.
        device, dtype: of the parameters. An LSTM's forget gates begin open: their bias is 1.

    Shape: forward(tokens (B, T), lengths (B,)) returns the states (B, T, features); without lengths rows have no
    padding. `loss(tokens, tags, lengths)`: the mean of -log P(tag) in nats; tags of -100 and those behind a row's end
    do not count. `logits(hidden)` (..., num_tags). The transformer cuts lengths beyond T to T.

    Raises:
        ValueError: an unknown encoder, cell or kind of positions, an nhead that does not divide the transformer's size,
            a size that is odd where positions are pairs, a number below 1; lengths beyond T, of recurrent networks.

    Source: Jurafsky and Martin, section 9.4; bidirectional: section 9.5, Schuster and Paliwal 1997, Huang et al. 2015;
    Vaswani et al. 2017; rotary positions: Su et al. 2021.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.Tagger(100, 5, 16, 16)
        >>> tokens, tags, lengths = torch.randint(100, (3, 9)), torch.randint(5, (3, 9)), torch.tensor([9, 2, 5])
        >>> model.loss(tokens, tags, lengths).backward()
        >>> model.logits(model(tokens, lengths)).argmax(-1).shape
        torch.Size([3, 9])
    """

    def __init__(
        self,
        vocab_size: int,
        num_tags: int,
        embedding_dim: int,
        hidden_size: int,
        encoder: Literal["birnn", "rnn", "transformer"] = "birnn",
        cell: Literal["lstm", "gru", "rnn"] = "lstm",
        num_layers: int = 1,
        *,
        nhead: int = 4,
        positions: Literal["rotary", "sinusoidal"] = "rotary",
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if encoder not in ("birnn", "rnn", "transformer"):
            raise ValueError(f"Tagger: encoder must be birnn, rnn or transformer, got {encoder!r}")
        if cell not in CELLS:
            raise ValueError(f"Tagger: cell must be one of {', '.join(CELLS)}, got {cell!r}")
        if positions not in ("rotary", "sinusoidal"):
            raise ValueError(f"Tagger: positions must be rotary or sinusoidal, got {positions!r}")
        check_positive(
            "Tagger", vocab_size=vocab_size, num_tags=num_tags, embedding_dim=embedding_dim, hidden_size=hidden_size,
            num_layers=num_layers,
        )  # fmt: skip
        if encoder == "transformer":
            check_heads("Tagger", nhead, positions == "rotary", positions == "sinusoidal", embedding_dim=embedding_dim)
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        added = encoder == "transformer" and positions == "sinusoidal"
        self.embedding = Embedding(vocab_size, embedding_dim, positions=added, **factory)
        self.encoder: Any
        if encoder == "transformer":
            features = embedding_dim
            self.encoder = make_encoder(embedding_dim, nhead, num_layers, hidden_size, not added, factory)
        else:
            both = encoder == "birnn"
            self.encoder = CELLS[cell](
                embedding_dim, hidden_size, num_layers, batch_first=True, bidirectional=both, **factory
            )
            forget_slowly(self.encoder)
            features = hidden_size * (2 if both else 1)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = seqkern.nn.LinearCrossEntropy(features, num_tags, bias=True, **factory)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        if isinstance(self.encoder, torch.nn.RNNBase):
            states, _ = self.encoder(x, lengths=lengths)
            x = states.contiguous()  # the network's are in the order of time, the loss wants rows
        else:
            x = self.encoder(x, key_lengths=lengths)
        return self.dropout(x)

    def loss(self, tokens: Tensor, tags: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            tags = tags.masked_fill(places >= lengths[:, None], self.head.ignore_index)
        found: Tensor = self.head(self(tokens, lengths), tags)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)
