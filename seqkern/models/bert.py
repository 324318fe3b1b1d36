"""BERT: a bidirectional Transformer encoder, trained to guess hidden words or to classify."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear
from torch.types import Device

import seqkern
from seqkern.models._checks import check_heads, check_positive


def mask_tokens(
    tokens: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    vocab_size: int,
    mask_token: int,
    share: float = 0.15,
    *,
    specials: int = 0,
) -> tuple[Tensor, Tensor]:
    """BERT's game: a share of the positions is chosen; the model sees them spoiled and has to tell what stood there.

    A chosen token becomes mask_token with probability 0.8, a random one with 0.1, and stays what it is with 0.1.

    Args:
        tokens: int64, (B, T). lengths: (B,): positions from there on are never chosen.
        generator: on tokens' device. The draws are independent for each position.
        vocab_size, mask_token, share: kinds of tokens, the one that hides, and the probability of being chosen.
        specials: tokens below this number are never chosen, and never drawn in another's place.

    Returns:
        Inputs (B, T), and targets (B, T): the token where a position was chosen, else -100.

    Raises:
        ValueError: a share that is no probability, specials or a mask_token that are not in the vocabulary.

    Source: Devlin et al. 2019, section 3.1.

    Example:
        >>> import torch, seqkern
        >>> tokens, lengths = torch.randint(4, 100, (2, 9)), torch.tensor([9, 5])
        >>> generator = torch.Generator().manual_seed(0)
        >>> inputs, targets = seqkern.models.mask_tokens(tokens, lengths, generator, 100, mask_token=2, specials=4)
        >>> torch.equal(inputs[targets == -100], tokens[targets == -100])
        True
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"mask_tokens: share must be in [0, 1], got {share}")
    if not 0 <= specials < vocab_size:
        raise ValueError(f"mask_tokens: specials must be at least 0 and below vocab_size, got {specials}")
    if not 0 <= mask_token < vocab_size:
        raise ValueError(f"mask_tokens: mask_token must be at least 0 and below vocab_size, got {mask_token}")
    options: Any = {"generator": generator, "device": tokens.device}
    real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    chosen = (torch.rand(tokens.shape, **options) < share) & real & (tokens >= specials)
    fate = torch.rand(tokens.shape, **options)
    others = torch.randint(specials, vocab_size, tokens.shape, **options)
    spoiled = torch.where(fate < 0.8, mask_token, torch.where(fate < 0.9, others, tokens))
    return torch.where(chosen, spoiled, tokens), torch.where(chosen, tokens, -100)


class BERT(torch.nn.Module):
    """An encoder in which every token sees all tokens of its text, to both sides.

        x_t = LayerNorm(E[w_t] + P[t]),    x = Block(x) for each layer

    BERT's other table, which tells a pair's two sentences apart, is left out: there is one text.

    Args:
        vocab_size: V, kinds of tokens.
        d_model, nhead, num_layers: features, heads of a block, and blocks.
        dim_feedforward: width inside the feed-forward network. Default: 4 d_model.
        max_len: rows of the table of positions: longer texts raise an error.
        local: every other block, from the first, sees so many tokens to each side and no further, which a small model
            learns far sooner. Default: every block sees all, as BERT's.
        norm_first: pre-norm blocks, which have one more norm at the end; BERT's are post-norm.
        dropout: of embeddings and in the blocks, in training.
        device, dtype: of the parameters. Matrices begin normal with the standard deviation d_model^-1/2.

    Shape: forward(tokens (B, T), lengths=None) returns the last states (B, T, d_model). lengths (B,), of texts with
    padding behind them: no state of a text depends on it; the states at padding mean nothing. Lengths are cut to T.

    Raises:
        ValueError: a number below 1, or an nhead that does not divide d_model; what the modules raise.

    Source: Devlin et al. 2019; the blocks: Vaswani et al. 2017; blocks that see near tokens in turn with those that see
    all: Warner et al. 2024 (ModernBERT). Jurafsky and Martin, equations 9.31 to 9.38.

    Example:
        >>> import torch, seqkern
        >>> bert = seqkern.models.BERT(100, 16, 4, 2)
        >>> bert(torch.randint(100, (3, 21)), lengths=torch.tensor([21, 4, 9])).shape
        torch.Size([3, 21, 16])
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        nhead: int,
        num_layers: int,
        dim_feedforward: int | None = None,
        max_len: int = 512,
        *,
        local: int | None = None,
        norm_first: bool = False,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads("BERT", nhead, d_model=d_model)
        check_positive(
            "BERT", vocab_size=vocab_size, num_layers=num_layers, dim_feedforward=dim_feedforward, max_len=max_len,
            local=local,
        )  # fmt: skip
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        self.dropout = dropout
        self.embedding = torch.nn.Embedding(vocab_size, d_model, **factory)
        self.position_embedding = torch.nn.Embedding(max_len, d_model, **factory)
        self.norm = seqkern.nn.LayerNorm(d_model, **factory)
        layer = seqkern.nn.TransformerEncoderLayer(
            d_model, nhead, 4 * d_model if dim_feedforward is None else dim_feedforward, dropout, "gelu",
            batch_first=True, norm_first=norm_first, **factory,
        )  # fmt: skip
        last = seqkern.nn.LayerNorm(d_model, **factory) if norm_first else None
        self.encoder = seqkern.nn.TransformerEncoder(layer, num_layers, last)
        for block in list(self.encoder.layers)[::2] if local is not None else []:
            block.self_attn.window = (local, local)
        for weight in self.parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=d_model**-0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        """What the blocks read, (B, T, d_model)."""
        options: Any = {"dropout_p": self.dropout, "training": self.training}
        norm = (self.norm.weight, self.norm.bias)
        table = self.position_embedding.weight
        return seqkern.embedding(tokens, self.embedding.weight, positions=table, norm=norm, **options)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.encoder(self.embed(tokens), key_lengths=lengths)
        return hidden

    def attention_weights(self, tokens: Tensor, lengths: Tensor | None = None, layer: int = -1) -> Tensor:
        """How much each token looks at each other one in a layer, by head: (B, nhead, T, T). To look at."""
        seen: list[Tensor] = []
        attention: Any = list(self.encoder.layers)[layer].self_attn
        hook = attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            self(tokens, lengths)
        finally:
            hook.remove()
        x = seen[0]
        weights: Tensor = attention(x, x, x, average_attn_weights=False, key_lengths=lengths)[1]
        return weights


class MaskedLM(torch.nn.Module):
    """BERT with a head that guesses tokens: P(w_t | the rest) = softmax(E LayerNorm(gelu(W h_t + c)) + b).

    E is BERT's embedding matrix. Only the states of the positions that are asked for are multiplied.

    Args: bert: a `BERT`.

    Shape: forward(tokens (B, T), lengths=None, chosen=None) returns logits, (B, T, V), or (n, V) of the n positions
    where chosen, bool (B, T), is True. `loss(tokens, targets, lengths=None)`: the mean of -log P(target) in nats;
    targets, (B, T), are -100 where the token was not chosen. `mask_tokens` makes both. Where none was chosen in a whole
    batch the loss is nan, as a mean of nothing is.

    Source: Devlin et al. 2019.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.MaskedLM(seqkern.models.BERT(100, 16, 4, 2))
        >>> tokens, lengths = torch.randint(4, 100, (3, 21)), torch.tensor([21, 4, 9])
        >>> generator = torch.Generator().manual_seed(0)
        >>> inputs, targets = seqkern.models.mask_tokens(tokens, lengths, generator, 100, mask_token=2, specials=4)
        >>> model.loss(inputs, targets, lengths).backward()
    """

    def __init__(self, bert: BERT) -> None:
        super().__init__()
        self.bert = bert
        like = bert.embedding.weight
        factory: Any = {"device": like.device, "dtype": like.dtype}
        self.transform = torch.nn.Linear(like.shape[1], like.shape[1], **factory)
        self.norm = seqkern.nn.LayerNorm(like.shape[1], **factory)
        self.bias = torch.nn.Parameter(torch.zeros(like.shape[0], **factory))

    def _head(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.norm(gelu(self.transform(hidden)))
        return found

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, chosen: Tensor | None = None) -> Tensor:
        hidden = self.bert(tokens, lengths)
        return linear(self._head(hidden if chosen is None else hidden[chosen]), self.bert.embedding.weight, self.bias)

    def loss(self, tokens: Tensor, targets: Tensor, lengths: Tensor | None = None) -> Tensor:
        chosen = targets != -100
        hidden = self._head(self.bert(tokens, lengths)[chosen])
        found = seqkern.linear_cross_entropy(hidden, self.bert.embedding.weight, targets[chosen], self.bias)
        assert isinstance(found, Tensor)
        return found


class BERTClassifier(torch.nn.Module):
    """BERT with a classifier: softmax(V tanh(W h + c) + b), h the state of the first token or the mean of all.

    Args:
        bert: a `BERT`. num_classes: C.
        pool: "first", BERT's, where the first token should be one that begins every text; or "mean".
        dropout: of the pooled vector, in training.

    Shape: forward(tokens (B, T), lengths=None) returns logits (B, C). `loss(tokens, targets, lengths=None)`, targets
    (B,): the mean of -log P(target) in nats.

    Raises:
        ValueError: an unknown pool, or no classes.

    Source: Devlin et al. 2019; mean: Jurafsky and Martin, equation 9.14.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.models.BERTClassifier(seqkern.models.BERT(100, 16, 4, 2), 5, pool="mean")
        >>> model.loss(torch.randint(100, (3, 21)), torch.tensor([0, 4, 2]), torch.tensor([21, 4, 9])).backward()
    """

    def __init__(
        self, bert: BERT, num_classes: int, pool: Literal["first", "mean"] = "first", *, dropout: float = 0.0
    ) -> None:
        if pool not in ("first", "mean"):
            raise ValueError(f"BERTClassifier: pool must be first or mean, got {pool!r}")
        check_positive("BERTClassifier", num_classes=num_classes)
        super().__init__()
        self.bert, self.pool = bert, pool
        like = bert.embedding.weight
        factory: Any = {"device": like.device, "dtype": like.dtype}
        self.pooler = torch.nn.Linear(like.shape[1], like.shape[1], **factory)
        self.dropout = torch.nn.Dropout(dropout)
        self.classifier = torch.nn.Linear(like.shape[1], num_classes, **factory)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        pooled = seqkern.sequence_pool(self.bert(tokens, lengths), lengths, self.pool)
        found: Tensor = self.classifier(self.dropout(torch.tanh(self.pooler(pooled))))
        return found

    def loss(self, tokens: Tensor, targets: Tensor, lengths: Tensor | None = None) -> Tensor:
        found = seqkern.cross_entropy(self(tokens, lengths), targets)
        assert isinstance(found, Tensor)
        return found
