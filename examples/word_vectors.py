"""Word vectors of docstrings by skip-gram with negative sampling, as a module in a training loop of one's own.

python -m examples.word_vectors --twin     trains, and shows neighbours beside those of seqkern.embeddings.Word2Vec
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import seqkern
from examples import runner, twins
from examples.data import docstrings
from examples.data.docstrings import SPECIALS
from examples.runner import Exhibit, Recipe
from seqkern.embeddings import FastText, Word2Vec

ROWS, DIM, WINDOW, NEGATIVES, SAMPLE = 4096, 64, 5, 5, 1e-3
CANDIDATES, HELD_OUT_PAIRS = 16, 20_000
SHOWN = ("returns", "file", "socket", "widget", "exception", "integer", "thread")

corpus = runner.cached(docstrings.load)


@runner.cached
def shares() -> Tensor:
    """Of each word among the words of the training part; 0 of specials, which are neither centres nor contexts."""
    counts = corpus().counts.double()
    counts[: len(SPECIALS)] = 0
    return counts / counts.sum()


@runner.cached
def noise() -> Tensor:
    """What negatives are drawn from: proportional to count^0.75."""
    return shares() ** 0.75 / (shares() ** 0.75).sum()


def pairs(tokens: Tensor, documents: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(centres, contexts) of one pass over a text, in random order.

    Of a word with share f of all words min(1, sqrt(sample / f) + sample / f) stay; those that stay move together. Each
    has a window of 1 to WINDOW words to both sides that ends with its document.
    """
    ratio = SAMPLE / shares()[tokens]
    stays = torch.rand(len(tokens), generator=generator) < ratio.sqrt() + ratio
    stays &= tokens >= len(SPECIALS)
    tokens, documents = tokens[stays], documents[stays]
    reach = torch.randint(1, WINDOW + 1, tokens.shape, generator=generator)
    found = []
    for distance in range(1, WINDOW + 1):
        near = documents[distance:] == documents[:-distance]
        left, right = tokens[:-distance], tokens[distance:]
        for centres, contexts, reaches in (
            (left, right, reach[:-distance]),
            (right, left, reach[distance:]),
        ):
            chosen = near & (reaches >= distance)
            found.append(torch.stack([centres[chosen], contexts[chosen]]))
    both = torch.cat(found, 1)
    centres, contexts = both[:, torch.randperm(both.shape[1], generator=generator)]
    return centres, contexts


@runner.cached
def texts() -> tuple[tuple[Tensor, Tensor], ...]:
    """Of both parts: tokens one after another, and the number of each one's document."""
    found = []
    for part in (corpus().train, corpus().held_out):
        lengths = torch.tensor([len(document.tokens) for document in part])
        tokens = corpus().known(torch.cat([document.tokens for document in part]))
        found.append((tokens, torch.arange(len(part)).repeat_interleave(lengths)))
    return tuple(found)


@runner.cached
def questions() -> tuple[Tensor, Tensor]:
    """Held-out centres (n,), and their candidates (n, CANDIDATES): the true context first, then false ones.

    The false ones are contexts of other held-out centres, so that frequencies alone tell nothing, and are not the true
    one, so that there is one right answer.
    """
    generator = torch.Generator().manual_seed(0)
    centres, contexts = pairs(*texts()[1], generator)
    centres, contexts = centres[:HELD_OUT_PAIRS], contexts[:HELD_OUT_PAIRS]
    false = contexts[torch.randint(len(contexts), (len(contexts), CANDIDATES - 1), generator=generator)]
    for _ in range(20):
        same = false == contexts[:, None]
        false[same] = contexts[torch.randint(len(contexts), (int(same.sum()),), generator=generator)]
    return centres, torch.cat([contexts[:, None], false], 1)


def draw(count: int, generator: torch.Generator) -> Tensor:
    """Negatives, by the inverse of the distribution function."""
    places = torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.searchsorted(distribution(), places).clamp(max=corpus().vocabulary - 1)


distribution = runner.cached(lambda: noise().cumsum(0))


def accuracy(scores: Tensor) -> float:
    """Per cent of the questions whose true candidate, the first, has the highest score; ties share it."""
    best = scores == scores.max(1, keepdim=True)[0]
    return 100 * (best[:, 0].double() / best.sum(1)).mean().item()


def sentences() -> list[list[str]]:
    """The training part for seqkern.embeddings: a list of words of each document."""
    data = corpus()
    return [[data.words[token] for token in document.tokens.tolist()] for document in data.train]


def near(vectors: Tensor, place: int, count: int = 4) -> str:
    """Words of the vocabulary with letters, nearest by cosine."""
    words = corpus().words[: len(vectors)]
    table = nn.functional.normalize(vectors, dim=-1)
    order = (table @ table[place]).argsort(descending=True).tolist()
    found = [words[other] for other in order if other != place and words[other].isalpha()]
    return ", ".join(found[:count])


class System(runner.System):
    name = "word_vectors"
    title = "Word vectors"
    about = (
        "Skip-gram with negative sampling (Mikolov et al. 2013): a word's vector tells its neighbours from other "
        "words. Whoever only wants vectors calls seqkern.embeddings.Word2Vec, which is shown beside it."
    )
    data = "docstrings of this Python's standard library, lower case; PSF licence; a tenth of the files is held out"
    metric, higher_is_better = "% of contexts found", True
    loss, tokens = "nats", "pairs"
    against, margin, target, tolerance = "counts of pairs", 1.0, 18.0, 1.0
    recipes: ClassVar = {"skip-gram": Recipe(steps=2000, learning_rate=1e-2, weight_decay=0.1)}

    def model(self, variant: str) -> nn.Module:
        return seqkern.models.SkipGram(corpus().vocabulary, DIM)

    def twin(self, variant: str) -> nn.Module:
        return twins.skip_gram.SkipGram(corpus().vocabulary, DIM)

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            centres, contexts = pairs(*texts()[0], generator)
            for start in range(0, len(centres) - ROWS + 1, ROWS):
                negatives = draw(ROWS * NEGATIVES, generator).view(ROWS, NEGATIVES)
                yield centres[start : start + ROWS], contexts[start : start + ROWS], negatives

    def size(self, batch: tuple[Any, ...]) -> int:
        return len(batch[0])

    def evaluate(self, variant: str, model: nn.Module) -> float:
        return accuracy(model(*questions()))

    def baselines(self) -> dict[str, float]:
        """The most frequent candidate; the one that stood most often near the centre; and the one that did so most
        often for its own frequency, which is pointwise mutual information."""
        centres, candidates = questions()
        size, frequency = corpus().vocabulary, shares()[candidates]
        generator = torch.Generator().manual_seed(0)
        both = torch.cat([a * size + b for a, b in (pairs(*texts()[0], generator) for _ in range(5))])
        keys, counts = both.unique(return_counts=True)
        each = torch.bincount(both % size, minlength=size)[candidates]
        wanted = centres[:, None] * size + candidates
        places = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        together = torch.where(keys[places] == wanted, counts[places], 0).double()
        return {
            "chance": 100 / CANDIDATES,
            "most frequent candidate": accuracy(frequency),
            "counts of pairs": accuracy(together + frequency),
            "mutual information of pairs": accuracy((together + 0.1) / (each + 1)),
        }

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        data, vectors = corpus(), model.vectors
        assert isinstance(vectors, Tensor)
        word2vec = Word2Vec(DIM, window=WINDOW, negative=NEGATIVES, sample=SAMPLE, epochs=10)
        report = word2vec.train(sentences())
        rows = [["word", "this model", "Word2Vec"]]
        for word in SHOWN:
            found = [w for w, _ in word2vec.most_similar(word, topn=12) if w.isalpha()]
            rows.append([word, near(vectors, data.words.index(word)), ", ".join(found[:4])])
        speed = f"{report.words / report.seconds / 1000:.0f} thousand words per second, {report.seconds:.1f} seconds"
        fasttext = FastText(DIM, window=WINDOW, negative=NEGATIVES, sample=SAMPLE, epochs=10)
        fasttext.train(sentences())
        unseen = [["word", "known", "nearest words of FastText"]]
        for word in ("fliename", "unpicklability", "subprocessing", "deserialise"):
            found = [w for w, _ in fasttext.most_similar(fasttext[word], topn=12) if w.isalpha() and w != word]
            unseen.append([word, "yes" if word in fasttext.words else "no", ", ".join(found[:4])])
        return [
            Exhibit("Nearest words", f"By cosine. seqkern.embeddings.Word2Vec: {speed} for 10 passes", table=rows),
            Exhibit(
                "Words that were never seen", "FastText's vector of a word is the mean of its parts'", table=unseen
            ),
        ]


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
