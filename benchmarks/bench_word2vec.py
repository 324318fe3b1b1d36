"""Training of word vectors against gensim: everything from the sentences to the vectors, on one thread and on two.

The text is gensim's own of 331339 words, or the file SEQKERN_TEXT names, a sentence a line. Beside the time a result
has what the vectors are worth: the loss of sentences that were held out, and the rank correlation with people's scores
of similarity (gensim's copy of WordSim-353), of both.
"""

from __future__ import annotations

import functools
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete
from seqkern.embeddings import FastText, Word2Vec
from seqkern.ops._autograd import Cost
from seqkern.testing import check_case, sgns_loss_case

gensim = pytest.importorskip("gensim")

EPOCHS = 3
COMMON: dict[str, Any] = {
    "vector_size": 100,
    "window": 5,
    "negative": 5,
    "sample": 1e-3,
    "min_count": 5,
    "epochs": EPOCHS,
}
KINDS = {"skip-gram": (Word2Vec, True), "CBOW": (Word2Vec, False), "fastText": (FastText, True)}
Vectors = tuple[list[str], Tensor, Tensor]  # words, inputs, outputs


@functools.cache
def text() -> tuple[list[list[str]], list[list[str]]]:
    """Sentences to train on, and every thirtieth, held out."""
    own = Path(gensim.__file__).parent / "test" / "test_data" / "head500.noblanks.cor"
    with open(os.environ.get("SEQKERN_TEXT", own), encoding="utf-8") as file:
        sentences = [line.split() for line in file]
    return [s for n, s in enumerate(sentences) if n % 30], sentences[::30]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_word2vec(benchmark, kind, threads, device):
    if device != "cpu":
        pytest.skip("trains on the CPU")
    cls, sg = KINDS[kind]
    theirs_cls = gensim.models.FastText if cls is FastText else gensim.models.Word2Vec
    sentences, held = text()
    words = sum(map(len, sentences))
    made: dict[str, list[Any]] = {"seqkern": [], "gensim": []}

    def ours() -> None:
        model = cls(sg=sg, threads=threads, seed=len(made["seqkern"]) + 1, **COMMON)
        report = model.train(sentences)
        made["seqkern"].append((model, words * EPOCHS / report.seconds))

    def theirs() -> None:
        model = theirs_cls(sentences, sg=int(sg), workers=threads, seed=len(made["gensim"]) + 1, **COMMON)
        made["gensim"].append((model, words * EPOCHS / model.total_train_time))

    pairs = words * EPOCHS * (6 if sg else 1)
    outputs, columns = 6, COMMON["vector_size"]
    compete(
        benchmark,
        Contest(
            op=f"word vectors: {kind}",
            shape=f"{words} words, {threads} thread{'s' * (threads > 1)}",
            mode="training",
            dtype=torch.float32,
            device=device,
            ours=ours,
            peers={"gensim": theirs},
            gate=lambda: check_case(sgns_loss_case(), torch.float32),
            cost=Cost(int(6 * pairs * outputs * columns), int(8 * words * EPOCHS * 8 * columns)),
        ),
    )
    benchmark.extra_info["threads"] = threads
    for name, results in made.items():
        vectors = [_of(model) for model, _ in results[-3:]]
        benchmark.extra_info[f"{name}: thousand words a second of training"] = round(
            statistics.median(rate for _, rate in results) / 1e3
        )
        benchmark.extra_info[f"{name}: held-out loss"] = [round(_loss(each, held, sg), 4) for each in vectors]
        benchmark.extra_info[f"{name}: rank correlation"] = [round(_correlation(each), 4) for each in vectors]


def _of(model: Any) -> Vectors:
    if isinstance(model, Word2Vec):
        return model.words, model.vectors, model.contexts
    return model.wv.index_to_key, torch.tensor(model.wv.vectors), torch.tensor(model.syn1neg)


def _loss(vectors: Vectors, sentences: list[list[str]], sg: bool) -> float:
    """The mean loss of windows of three, with negatives that do not depend on the model."""
    words, w_in, w_out = vectors
    order = sorted(words)
    place = {word: n for n, word in enumerate(words)}
    at = torch.tensor([place[word] for word in order])
    numbers = {word: n for n, word in enumerate(order)}
    w_in, w_out = w_in[at], w_out[at]  # alphabetically, the same in every model
    ids = [[numbers[word] for word in s if word in place] for s in sentences]
    around = [[*s[max(0, n - 3) : n], *s[n + 1 : n + 4]] for s in ids for n in range(len(s))]
    middle = [word for s in ids for word in s]
    kept = [(inputs, word) for inputs, word in zip(around, middle, strict=True) if inputs]
    counts = torch.bincount(torch.tensor(middle), minlength=len(words)) + 1.0
    if sg:
        kept = [([word], target) for inputs, target in kept for word in inputs]
    context = torch.tensor([target for _, target in kept])
    negatives = torch.multinomial(
        counts**0.75, 5 * len(kept), replacement=True, generator=torch.Generator().manual_seed(0)
    ).view(-1, 5)
    flat = torch.tensor([word for inputs, _ in kept for word in inputs])
    offsets = torch.tensor([0, *(len(inputs) for inputs, _ in kept)]).cumsum(0)[:-1]
    means = F.embedding_bag(flat, w_in, offsets, mode="mean")
    return float(seqkern.sgns_loss(torch.arange(len(kept)), context, negatives, means, w_out))


def _correlation(vectors: Vectors) -> float:
    """Spearman's, over the pairs of WordSim-353 whose words there are."""
    model = Word2Vec(vectors[1].shape[1])
    model.words, model._inputs = vectors[0], vectors[1]
    model.key_to_index = {word: n for n, word in enumerate(model.words)}
    path = Path(gensim.__file__).parent / "test" / "test_data" / "wordsim353.tsv"
    lines = [line.lower().split("\t") for line in path.read_text().splitlines() if not line.startswith("#")]
    return model.evaluate_pairs((a, b, float(score)) for a, b, score in lines)[0]
