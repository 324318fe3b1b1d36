"""Word vectors by skip-gram or CBOW with negative sampling."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import numbers
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from seqkern._keywords import explicit, refuse
from seqkern.embeddings import _files
from seqkern.embeddings._vocabulary import (
    Corpus,
    alias_table,
    as_bits,
    as_bytes,
    kept_share,
    noise_weights,
    on_cpu,
    read,
)

Sentences = Iterable[Iterable[str]]
_PADDED = 16  # rows are as long as a multiple of this
_PIECE = 1 << 18  # tokens: after as many the bar moves, and Ctrl-C is heard


class TrainingReport(NamedTuple):
    """What `train` did."""

    words: int  # of the vocabulary's, epochs times those of the sentences
    pairs: int  # inputs, each with a positive and its negatives
    seconds: float  # of training, without reading the sentences
    loss: float | None  # of the last epoch, the mean of a pair, if compute_loss


class Word2Vec:
    """Word vectors by negative sampling: the words around one predict it, each by itself or (CBOW) by their mean.

    Of a window the inputs are the words around its middle, the outputs the middle word and `negative` words drawn by
    count ** ns_exponent for it and the next one; loss -log sigmoid(v u) - sum of log sigmoid(-v u'). The gradients are
    true ones: where a mean of n vectors is the input, each gets a n-th. parity="word2vec" has word2vec.c's instead,
    which gives each all of it and takes the sigmoid beyond scores of 6 for 0 or 1.

    Args:
        vector_size: dimensions of a vector, d.
        sg: skip-gram; else CBOW.
        window: words to each side, at most 100; with shrink_windows a number from 1 to that is drawn for each window.
        negative: negatives of a window, 1 to 63.
        sample: subsampling: of a word with share f of all tokens min(1, sqrt(sample / f) + sample / f) stay. 0: all.
        min_count: words that stand fewer times are left out.
        epochs: passes over the sentences.
        alpha, min_alpha: the learning rate falls from the first to the second, token by token. None: 0.025, or 0.075
            for CBOW's true gradients, which are smaller: word2vec's 0.025 teaches them little.
        ns_exponent: of the negatives' distribution.
        shrink_windows: near words count more: see window.
        parity: None, or "word2vec", for vectors most like gensim's.
        seed: of the first vectors, of subsampling, windows and negatives.
        threads: None for torch's number of threads. **With more than one the result differs from run to run**: they add
            to the same vectors without waiting. One thread is deterministic.

    Attributes:
        words: the vocabulary, most frequent first. counts: int64, (words,). key_to_index: the row of each word.
        vectors: (words, d), float32: the inputs' vectors. contexts: (words, d), the outputs'. They are not copies:
            clone what is to change, as in torch.nn.Embedding.from_pretrained(model.vectors.clone(), freeze=False).

    Raises:
        TypeError, ValueError: arguments out of range, sentences that are no lists of words, or an empty vocabulary.

    Source: Mikolov et al., "Distributed Representations of Words and Phrases and their Compositionality", 2013; shared
    negatives: Ji et al., "Parallelizing Word2Vec in Shared and Distributed Memory", 2016.

    Example:
        >>> from seqkern.embeddings import Word2Vec
        >>> model = Word2Vec(vector_size=16, min_count=1, epochs=2, threads=1)
        >>> report = model.train([["the", "cat", "sleeps"], ["the", "dog", "sleeps"]])
        >>> model.words[0], model["cat"].shape
        ('the', torch.Size([16]))
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
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(Word2Vec.__init__, unexpected, "Word2Vec")
        self._set_options(
            vector_size=vector_size, sg=sg, window=window, negative=negative, sample=sample, min_count=min_count,
            epochs=epochs, alpha=alpha, min_alpha=min_alpha, ns_exponent=ns_exponent, shrink_windows=shrink_windows,
            parity=parity, seed=seed, threads=threads,
        )  # fmt: skip

    def _set_options(self, **options: Any) -> None:
        name = type(self).__name__
        for option, least, most in (
            ("vector_size", 1, 1 << 20), ("window", 1, 100), ("negative", 1, 63),
            ("min_count", 1, 1 << 62), ("epochs", 1, 1 << 31), ("seed", 0, (1 << 62) - 1), ("threads", 1, None),
        ):  # fmt: skip
            value = options[option]
            if option == "threads" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral)):
                raise TypeError(f"{name}: {option} must be an integer, got {type(value).__name__}")
            options[option] = value = int(value)
            if value < least or (most is not None and value > most):
                limits = f"at least {least}" if most is None else f"{least} to {most}"
                raise ValueError(f"{name}: {option} must be {limits}, got {value}")
        if options["alpha"] is None:
            options["alpha"] = 0.025 if options["parity"] == "word2vec" else self._alpha(options["sg"])
        for option in ("sample", "alpha", "min_alpha", "ns_exponent"):
            value = options[option]
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name}: {option} must be a number, got {type(value).__name__}")
            options[option] = value = float(value)
            if not math.isfinite(value) or (value < 0 and option != "ns_exponent"):
                limits = "finite" if option == "ns_exponent" else "finite and at least 0"
                raise ValueError(f"{name}: {option} must be {limits}, got {value}")
        for option in ("sg", "shrink_windows"):
            if options[option] not in (False, True):
                raise TypeError(f"{name}: {option} must be True or False, got {options[option]!r}")
            options[option] = bool(options[option])
        if options["alpha"] < options["min_alpha"]:
            raise ValueError(
                f"{name}: alpha must be at least min_alpha, {options['min_alpha']}, got {options['alpha']}"
            )
        if options["parity"] not in (None, "word2vec"):
            raise ValueError(f'{name}: parity must be None or "word2vec", got {options["parity"]!r}')
        self.options = options
        self._set_words([], torch.empty(0, dtype=torch.int64, device="cpu"))
        width = -(-options["vector_size"] // _PADDED) * _PADDED
        self._inputs = self._outputs = torch.empty(0, width, dtype=torch.float32, device="cpu")

    def _set_words(self, words: list[str], counts: Tensor) -> None:
        self.words, self.counts = words, counts
        self.key_to_index = {word: n for n, word in enumerate(words)}

    @staticmethod
    def _alpha(sg: bool) -> float:
        """For true gradients: a mean's are shared out, so that its rows want larger steps."""
        return 0.025 if sg else 0.075

    # ---- training ---------------------------------------------------------------------------------------------------

    @on_cpu
    def train(self, sentences: Sentences, *, progress: bool = False, compute_loss: bool = False) -> TrainingReport:
        """Reads the sentences once, makes the vocabulary and trains from the start, whatever was trained before.

        Args:
            sentences: an iterable of sentences, each an iterable of words; it may be a generator. Their words are kept
                as numbers, 4 bytes a token.
            progress: shows a bar; needs the package rich.
            compute_loss: also reports the mean loss of a pair; takes some time.
        """
        name, o = type(self).__name__, self.options
        if isinstance(sentences, (str, bytes, os.PathLike)):
            raise TypeError(f"{name}: sentences must be lists of words, got a string: open a file and split its lines")
        corpus = read(name, sentences, o["min_count"])
        if not corpus.words:
            raise ValueError(f"{name}: no word stands {o['min_count']} times (min_count) in the sentences")
        threshold, alias = alias_table(noise_weights(corpus.counts, o["ns_exponent"]))
        keep = as_bits(kept_share(corpus.counts, o["sample"])) if o["sample"] else None
        count, tokens = len(corpus.starts) - 1, max(1, len(corpus.tokens))
        pieces = -(-tokens // _PIECE)
        bounds = [*torch.searchsorted(corpus.starts, torch.arange(pieces) * tokens // pieces).tolist(), count]
        pairs, loss, begun = 0, 0.0, time.perf_counter()
        with _bar(name, o["epochs"] * tokens, progress) as advance, _threads(o["threads"]) as racy:
            rows = self._begin(corpus)  # nothing of the model has changed before
            for epoch in range(o["epochs"]):
                of_epoch = torch.zeros(3, dtype=torch.float64)
                for first, last in itertools.pairwise(bounds):
                    done, after = (int(corpus.starts[n]) + epoch * tokens for n in (first, last))
                    begin, end = (self._rate(at / (o["epochs"] * tokens)) for at in (done, after))
                    of_epoch += torch.ops.seqkern.word2vec_train(
                        self._inputs, self._outputs, corpus.tokens, corpus.starts, keep, threshold, alias, *rows, first,
                        last, o["window"], o["negative"], not o["sg"], o["shrink_windows"], o["parity"] is not None,
                        _mixed(o["seed"], epoch), begin, end, racy, compute_loss,
                    )  # fmt: skip
                    advance(after - done)
                pairs += int(of_epoch[1])
                loss = float(of_epoch[0] / of_epoch[1].clamp(min=1))
        seconds = time.perf_counter() - begun
        return TrainingReport(o["epochs"] * len(corpus.tokens), pairs, seconds, loss if compute_loss else None)

    def _rate(self, share: float) -> float:
        return float(self.options["alpha"] + (self.options["min_alpha"] - self.options["alpha"]) * share)

    def _begin(self, corpus: Corpus) -> tuple[Tensor | None, Tensor | None]:
        """Words, and the first vectors: uniform in +-1 / 2d, and zeros of the outputs. Returns what rows words have."""
        self._set_words(corpus.words, corpus.counts)
        self._set_vectors(len(corpus.words))
        return None, None

    def _set_vectors(self, rows: int) -> None:
        self._inputs = self._uniform(rows)
        self._outputs = torch.zeros(len(self.words), self._inputs.shape[1], dtype=torch.float32)

    def _uniform(self, rows: int) -> Tensor:
        size = self.options["vector_size"]
        generator = torch.Generator().manual_seed(self.options["seed"])
        made = torch.zeros(rows, -(-size // _PADDED) * _PADDED, dtype=torch.float32)
        made[:, :size] = (torch.rand(rows, size, generator=generator, dtype=torch.float32) - 0.5) / size
        return made

    # ---- vectors ----------------------------------------------------------------------------------------------------

    @property
    def vectors(self) -> Tensor:
        return self._inputs[: len(self.words), : self.options["vector_size"]]

    @property
    def contexts(self) -> Tensor:
        return self._outputs[:, : self.options["vector_size"]]

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[str]:
        return iter(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self.key_to_index

    def __getitem__(self, word: str) -> Tensor:
        """The vector of a word, (d,); KeyError for one that is not in the vocabulary."""
        if word not in self.key_to_index:
            raise KeyError(f"{type(self).__name__}: {word!r} is not in the vocabulary of {len(self.words)} words")
        return self.vectors[self.key_to_index[word]]

    def similarity(self, first: str, second: str) -> float:
        """The cosine of two words' vectors."""
        a, b = self[first], self[second]
        return float(a @ b / (a.norm() * b.norm()).clamp(min=1e-30))

    def most_similar(
        self,
        positive: str | Tensor | Sequence[str | Tensor] = (),
        negative: str | Tensor | Sequence[str | Tensor] = (),
        topn: int = 10,
    ) -> list[tuple[str, float]]:
        """Words whose vectors are nearest by cosine to the mean of positive unit vectors and negative ones' opposites.

        king - man + woman is `most_similar(["king", "woman"], ["man"])`. The words asked with are left out.
        """
        near, far = ([w] if isinstance(w, str) or hasattr(w, "__array__") else list(w) for w in (positive, negative))
        if not near and not far:
            raise ValueError(f"{type(self).__name__}: most_similar needs a word or vector")
        if isinstance(topn, bool) or not isinstance(topn, int):
            raise TypeError(f"{type(self).__name__}: topn must be an integer, got {type(topn).__name__}")
        if topn < 1:
            raise ValueError(f"{type(self).__name__}: topn must be at least 1, got {topn}")
        every = self.vectors
        given = [(word, 1.0) for word in near] + [(word, -1.0) for word in far]
        vectors = [
            (self[each] if isinstance(each, str) else torch.as_tensor(each).to(every), sign) for each, sign in given
        ]
        total = sum((sign * v / v.norm().clamp(min=1e-30) for v, sign in vectors), torch.zeros_like(every[0]))
        scores = every @ total / (every.norm(dim=1) * total.norm()).clamp(min=1e-30)
        asked = [self.key_to_index[word] for word, _ in given if isinstance(word, str) and word in self.key_to_index]
        scores[asked] = -torch.inf
        best, numbers = scores.topk(min(topn, len(scores) - len(set(asked))))
        return [(self.words[n], score) for n, score in zip(numbers.tolist(), best.tolist(), strict=True)]

    @on_cpu
    def evaluate_pairs(
        self, pairs: str | os.PathLike[str] | Iterable[tuple[str, str, float | str]]
    ) -> tuple[float, int]:
        """Spearman's rank correlation of similarities with people's scores, and how many of the pairs it is of.

        Args:
            pairs: (word, word, score), or the path of a file with such lines, separated by tabs, as gensim's
                wordsim353.tsv; lines that begin with # are left out. Words that have no vector are looked up in lower
                case; pairs with a word that then has none are left out.

        Returns:
            (nan, number of pairs) for fewer than two.
        """
        triples: list[Any]
        if isinstance(pairs, (str, os.PathLike)):
            lines = Path(pairs).read_text(encoding="utf-8").splitlines()
            triples = [line.split("\t")[:3] for line in lines if line and not line.startswith("#")]
        else:
            triples = list(pairs)
        found = []
        for triple in triples:
            if isinstance(triple, str) or len(triple) != 3:
                raise ValueError(f"{type(self).__name__}: pairs must be of (word, word, score), got {triple!r}")
            a, b = (word if word in self else word.lower() for word in triple[:2])
            if a in self and b in self:
                found.append((self.similarity(a, b), float(triple[2])))
        if len(found) < 2:
            return float("nan"), len(found)
        ours, theirs = (_ranks(torch.tensor(each, dtype=torch.float64)) for each in zip(*found, strict=True))
        ours, theirs = ours - ours.mean(), theirs - theirs.mean()
        return float(ours @ theirs / (ours.norm() * theirs.norm())), len(found)

    # ---- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes vectors, words and options to a file in the format of safetensors."""
        words = as_bytes(json.dumps(self.words).encode())
        tensors = {"inputs": self._inputs, "outputs": self._outputs, "counts": self.counts, "words": words}
        _files.write(path, tensors | self._more(), {"kind": type(self).__name__, **self.options})

    @classmethod
    @on_cpu
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """The model that was saved there; ValueError for another file, or one of another kind."""
        tensors, settings = _files.read(path)
        kind = settings.pop("kind", None)
        if kind != cls.__name__:
            raise ValueError(f"{os.fspath(path)} has a {kind}, not a {cls.__name__}")
        try:
            model = cls(**settings)
            if set(settings) != set(model.options):
                raise KeyError(f"options {sorted(settings)}")
            model._take(tensors)
        except (KeyError, TypeError, ValueError) as error:  # of JSON and UTF-8 too
            raise ValueError(f"{os.fspath(path)} is no file of a {kind}: {error}") from None
        return model

    def _more(self) -> dict[str, Tensor]:
        return {}

    def _take(self, tensors: dict[str, Tensor]) -> None:
        self._inputs, self._outputs, self.counts = (tensors[name] for name in ("inputs", "outputs", "counts"))
        words = json.loads(bytes(tensors["words"].tolist()))
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise KeyError("words that are no list of strings")
        if len(set(words)) < len(words):
            raise KeyError("a word that is there twice")
        self._set_words(words, self.counts)
        if (self._inputs.dtype, self._outputs.dtype, self.counts.dtype) != (torch.float32, torch.float32, torch.int64):
            raise KeyError("vectors that are not float32, or counts that are not int64")
        size = self.options["vector_size"]
        width = -(-size // _PADDED) * _PADDED
        if self._outputs.shape != (len(self.words), width) or self._inputs.shape[1:] != (width,):
            raise KeyError(f"vectors of shape {tuple(self._outputs.shape)}")
        if len(self.counts) != len(self.words) or len(self._inputs) < len(self.words):
            raise KeyError(f"{len(self.counts)} counts, {len(self._inputs)} rows of {len(self.words)} words")
        if self._inputs[:, size:].any() or self._outputs[:, size:].any():
            raise KeyError(f"numbers beyond the {size} of a vector")

    def save_text(self, path: str | os.PathLike[str]) -> None:
        """Writes the vectors as word2vec's text format: a line of sizes, then a word and its numbers a line."""
        for word in self.words:
            if not word or any(c.isspace() for c in word):
                raise ValueError(f"{type(self).__name__}: the format has no words like {word!r}, with spaces or empty")
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(f"{len(self.words)} {self.options['vector_size']}\n")
            for word, vector in zip(self.words, self.vectors.tolist(), strict=True):
                file.write(f"{word} {' '.join(map(repr, vector))}\n")

    @classmethod
    @on_cpu
    def load_text(cls, path: str | os.PathLike[str]) -> Any:
        """The words and vectors of such a file, also of gensim's save_word2vec_format, to look things up.

        They cannot be trained on; counts and contexts are zero. ValueError for another file.
        """
        with open(path, encoding="utf-8", errors="surrogatepass") as file:
            try:
                count, size = map(int, file.readline().split())
                lines = [file.readline().rstrip("\n").split(" ") for _ in range(count)]
                vectors = torch.tensor([[float(n) for n in line[1:] if n] for line in lines], dtype=torch.float32)
                model = Word2Vec(size)
                words = [line[0] for line in lines]
                if vectors.shape != (count, size) or len(set(words)) < count:
                    raise ValueError(f"{len(set(words))} words, vectors of shape {tuple(vectors.shape)}")
            except (TypeError, ValueError) as error:
                raise ValueError(f"{os.fspath(path)} is no text file of word vectors: {error}") from None
        model._set_words(words, torch.zeros(count, dtype=torch.int64))
        model._set_vectors(count)
        model._inputs[:, :size] = vectors
        return model

    def __repr__(self) -> str:
        kind = "skip-gram" if self.options["sg"] else "CBOW"
        return f"{type(self).__name__}({len(self.words)} words, {self.options['vector_size']} dimensions, {kind})"


def _ranks(values: Tensor) -> Tensor:
    """From 1 on, the mean rank for equal ones."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    mean: Tensor = (last - (counts - 1) / 2)[inverse]
    return mean


def _mixed(seed: int, epoch: int) -> int:
    """Another seed for each epoch."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & (2**63 - 1)
    return mixed


@contextlib.contextmanager
def _threads(wanted: int | None) -> Iterator[bool]:
    """torch's number of threads for a while; whether they are several."""
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield (before if wanted is None else wanted) > 1
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _bar(name: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    if not shown:
        yield lambda tokens: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ModuleNotFoundError(f"{name}: progress=True needs rich: pip install rich") from error
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("words", total=total, rate="")

        def advance(tokens: int) -> None:
            progress.update(task, advance=tokens)
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed / 1e3:,.0f} k words/s" if speed else "")

        yield advance
