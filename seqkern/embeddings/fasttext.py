"""Word vectors with subwords: a word is the mean of its own vector and its n-grams'."""

from __future__ import annotations

from typing import Literal, NoReturn

import torch
from torch import Tensor

from seqkern._keywords import explicit, refuse
from seqkern.embeddings._vocabulary import Corpus, as_bytes, on_cpu
from seqkern.embeddings.word2vec import Word2Vec


class FastText(Word2Vec):
    """`Word2Vec` whose words are means of rows: a word's own and those of its n-grams of characters, hashed to buckets.

    A word that is not in the vocabulary has the mean of its n-grams' vectors. Only buckets that n-grams of the
    vocabulary fall into have rows; others say nothing about a word and are left out of its mean.

    Args:
        min_n, max_n: characters of n-grams, of the word between < and >.
        bucket: the number of buckets of n-grams: FNV-1a's hash of their UTF-8 bytes, as fastText's, modulo this.
        alpha: None for 0.2: a word's gradient is shared out among its rows, and word2vec's 0.025 teaches them little.
        others: as `Word2Vec`. parity="word2vec" here too gives every row all of the gradient, as fastText does, and has
            alpha 0.025, as gensim's.

    Attributes: as `Word2Vec`; vectors: the words' means.

    Raises:
        As `Word2Vec`.

    Source: Bojanowski et al., "Enriching Word Vectors with Subword Information", 2017.

    Example:
        >>> from seqkern.embeddings import FastText
        >>> model = FastText(vector_size=16, min_count=1, epochs=2, threads=1)
        >>> report = model.train([["sleeping", "cats", "sleep"], ["sleeping", "dogs", "sleep"]])
        >>> "sleeper" in model.words, model["sleeper"].shape
        (False, torch.Size([16]))
    """

    @explicit
    def __init__(
        self,
        vector_size: int = 100,
        *,
        sg: bool = True,
        window: int = 5,
        negative: int = 5,
        sample: float = 1e-3,
        min_count: int = 5,
        epochs: int = 5,
        alpha: float | None = None,
        min_alpha: float = 1e-4,
        ns_exponent: float = 0.75,
        shrink_windows: bool = True,
        parity: Literal["word2vec"] | None = None,
        seed: int = 1,
        threads: int | None = None,
        min_n: int = 3,
        max_n: int = 6,
        bucket: int = 2_000_000,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(FastText.__init__, unexpected, "FastText")
        for option, value in (("min_n", min_n), ("max_n", max_n), ("bucket", bucket)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"FastText: {option} must be an integer, got {type(value).__name__}")
        if not 1 <= min_n <= max_n <= 1000:
            raise ValueError(f"FastText: min_n and max_n must be 1 <= min_n <= max_n <= 1000, got {min_n} and {max_n}")
        if not 1 <= bucket <= 2**31:
            raise ValueError(f"FastText: bucket must be 1 to 2^31, got {bucket}")
        self._set_options(
            vector_size=vector_size, sg=sg, window=window, negative=negative, sample=sample, min_count=min_count,
            epochs=epochs, alpha=alpha, min_alpha=min_alpha, ns_exponent=ns_exponent, shrink_windows=shrink_windows,
            parity=parity, seed=seed, threads=threads, min_n=min_n, max_n=max_n, bucket=bucket,
        )  # fmt: skip
        self._buckets = torch.empty(0, dtype=torch.int64, device="cpu")  # those that have rows, ascending
        self._row_starts = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._row_numbers = torch.empty(0, dtype=torch.int32, device="cpu")
        self._means: Tensor | None = None

    @staticmethod
    def _alpha(sg: bool) -> float:
        return 0.2

    @on_cpu
    def _ngrams(self, words: list[str]) -> tuple[Tensor, Tensor]:
        """Where the n-grams of each word begin, and their buckets."""
        letters = [word.encode("utf-8", "surrogatepass") for word in words]
        starts = torch.tensor([0, *map(len, letters)]).cumsum(0)
        o = self.options
        starts, found = torch.ops.seqkern.word_ngrams(
            as_bytes(b"".join(letters)), starts, o["min_n"], o["max_n"], o["bucket"]
        )
        return starts, found

    def _begin(self, corpus: Corpus) -> tuple[Tensor | None, Tensor | None]:
        starts, found = self._ngrams(corpus.words)
        self._set_words(corpus.words, corpus.counts)
        self._set_rows(starts, found, torch.unique(found))
        self._set_vectors(len(self.words) + len(self._buckets))
        return self._row_starts, self._row_numbers

    def _set_rows(self, starts: Tensor, found: Tensor, buckets: Tensor) -> None:
        """A word's rows: its own, then those of its n-grams."""
        count = len(self.words)
        self._buckets, self._means = buckets, None
        rows = torch.searchsorted(buckets, found) + count
        places = torch.arange(len(found)) + torch.repeat_interleave(torch.arange(1, count + 1), starts.diff())
        self._row_starts = starts + torch.arange(count + 1)
        every = torch.empty(len(found) + count, dtype=torch.int64)
        every[self._row_starts[:-1]] = torch.arange(count)
        every[places] = rows
        self._row_numbers = every.int()

    @property
    @on_cpu
    def vectors(self) -> Tensor:
        if self._means is None:
            size = self.options["vector_size"]
            made = torch.zeros(len(self.words), size, dtype=torch.float32)
            counts = self._row_starts.diff()
            owner = torch.repeat_interleave(torch.arange(len(self.words)), counts)
            for part in torch.arange(len(owner)).split(1 << 18):
                made.index_add_(0, owner[part], self._inputs[self._row_numbers[part].long(), :size])
            self._means = made / counts[:, None]
        return self._means

    def __contains__(self, word: str) -> bool:
        return word in self.key_to_index or (isinstance(word, str) and len(self._known(word)) > 0)

    def _known(self, word: str) -> Tensor:
        """The rows of a word's n-grams, those that there are."""
        _, found = self._ngrams([word])
        at = torch.searchsorted(self._buckets, found)
        there = at < len(self._buckets)
        there[there.clone()] = self._buckets[at[there]] == found[there]
        rows: Tensor = at[there] + len(self.words)
        return rows

    def __getitem__(self, word: str) -> Tensor:
        """The vector of a word, (d,), whether it is in the vocabulary or not; KeyError if no n-gram of it has a row."""
        if word in self.key_to_index:
            return self.vectors[self.key_to_index[word]]
        rows = self._known(word) if isinstance(word, str) else ()
        if len(rows) == 0:
            raise KeyError(f"FastText: no n-gram of {word!r} is one of the vocabulary's")
        return self._inputs[rows, : self.options["vector_size"]].mean(0)

    def _more(self) -> dict[str, Tensor]:
        return {"buckets": self._buckets}

    def _take(self, tensors: dict[str, Tensor]) -> None:
        super()._take(tensors)
        starts, found = self._ngrams(self.words)
        buckets = tensors["buckets"]
        if not torch.equal(buckets, torch.unique(found)) or len(self._inputs) != len(self.words) + len(buckets):
            raise KeyError("buckets that are not those of its words")
        self._set_rows(starts, found, buckets)
