"""Word vectors: the vocabulary, a step of training against the equations, learning, threads, files, errors."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch
import torch.nn.functional as F

from seqkern.embeddings import FastText, Word2Vec
from seqkern.embeddings._vocabulary import LONGEST, alias_table, as_bits, kept_share, noise_weights, read
from seqkern.ops import sgns_loss  # noqa: F401, registers the ops

ANIMALS = ["cat", "dog", "cow", "hen", "pig", "owl", "fox", "elk", "bee", "ant"]
TOOLS = ["saw", "axe", "nail", "file", "vice", "drill", "plane", "hammer", "chisel", "bolt"]


def corpus(sentences=300, seed=0):
    """Words of a kind stand together."""
    r = random.Random(seed)
    return [r.choices(kind, k=5) for _ in range(sentences) for kind in (ANIMALS, TOOLS)]


def assert_kinds_are_told_apart(model):
    unit = F.normalize(model.vectors[[model.words.index(w) for w in ANIMALS + TOOLS]], dim=1)
    cosines = (unit @ unit.t()).view(2, 10, 2, 10).mean((1, 3))
    assert min(cosines[0, 0], cosines[1, 1]) > cosines[0, 1] + 0.3
    for kind in (ANIMALS, TOOLS):
        assert {word for word, _ in model.most_similar(kind[0], topn=5)} < set(kind)


def small(cls=Word2Vec, **options):
    return cls(**{"vector_size": 12, "min_count": 1, "window": 3, "sample": 0, "threads": 1} | options)


# ---- the vocabulary -----------------------------------------------------------------------------------------------


def test_vocabulary():
    found = read("x", iter([["b", "a"], [], ["c", "b", "rare", "a"], ("b",)]), 2)
    assert found.words == ["b", "a"]
    assert found.counts.tolist() == [3, 2]
    assert found.tokens.tolist() == [0, 1, 0, 1, 0]
    assert found.starts.tolist() == [0, 2, 2, 4, 5]
    assert found.tokens.dtype == torch.int32


def test_long_sentences_are_cut():
    found = read("x", [["a"] * (2 * LONGEST + 5), ["a"], ["a"] * LONGEST], 1)
    assert found.starts.diff().tolist() == [LONGEST, LONGEST, 5, 1, LONGEST]


def test_subsampling_is_word2vecs():
    counts = torch.tensor([1000, 100, 1])
    share = kept_share(counts, 0.01)
    expected = [(0.01 / f) ** 0.5 + 0.01 / f for f in (1000 / 1101, 100 / 1101)]
    torch.testing.assert_close(share, torch.tensor([*expected, 1.0], dtype=torch.float64))
    assert kept_share(counts, 0).tolist() == [1, 1, 1]
    assert as_bits(torch.tensor([1.0, 0.5, 0.25])).tolist() == [-1, 2**31 - 1, 2**30 - 1]


@pytest.mark.parametrize("weights", [[1.0], [1, 1, 1], [5, 1, 1e-9, 3], list(range(1, 200))])
def test_alias_table_has_the_distribution(weights):
    threshold, other = alias_table(torch.tensor(weights, dtype=torch.float64))
    share = (threshold.long() % 2**32).double() / 2**32
    found = share.clone().index_add_(0, other.long(), 1 - share) / len(weights)
    torch.testing.assert_close(found, torch.tensor(weights).double() / sum(weights), rtol=0, atol=1e-8)


# ---- a step against the equations ---------------------------------------------------------------------------------


def vectors_of(words=9, stride=16, rows=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows or words, stride, generator=g) / 4, torch.randn(words, stride, generator=g) / 4


def train(w_in, w_out, tokens, starts, rows=(None, None), *, window=2, negatives=3, cbow=False, parity=False,
          rate=0.05, noise=None, keep=None, shrink=False, racy=False, seed=3, wants_loss=True):  # fmt: skip
    """The op, in place. noise: the one word that negatives are; None: all equally often."""
    words = len(w_out)
    threshold = torch.full((words,), 0 if noise is not None else -1, dtype=torch.int32)
    alias = torch.full((words,), noise or 0, dtype=torch.int32)
    return torch.ops.seqkern.word2vec_train(
        w_in, w_out, torch.tensor(tokens, dtype=torch.int32), torch.tensor(starts), keep, threshold, alias, *rows, 0,
        len(starts) - 1, window, negatives, cbow, shrink, parity, seed, rate, rate, racy, wants_loss,
    )  # fmt: skip


def expected_window(w_in, w_out, inputs, middle, noise, negatives, *, cbow, rows=None, parity=False, rate=0.05):
    """The tables after a window, in float64, its loss and its pairs. `inputs`: words; rows[word]: of w_in."""
    tables = [w_in.double().requires_grad_(), w_out.double().requires_grad_()]
    of_word = [tables[0][torch.tensor(rows[w] if rows else [w])].mean(0) for w in inputs]
    vectors = torch.stack(of_word).mean(0, keepdim=True) if cbow else torch.stack(of_word)
    loss = -F.logsigmoid(vectors @ tables[1][middle]).sum()
    if noise != middle:
        loss = loss - negatives * F.logsigmoid(-vectors @ tables[1][noise]).sum()
    of_in, of_out = torch.autograd.grad(loss, tables)
    if parity:  # the mean's gradient goes to each row undivided
        of_in = torch.zeros_like(of_in)
        (of_vectors,) = torch.autograd.grad(
            -F.logsigmoid((v := vectors.detach().requires_grad_()) @ tables[1][middle]).sum()
            - (0 if noise == middle else negatives * F.logsigmoid(-v @ tables[1][noise]).sum()),
            v,
        )
        for n, w in enumerate(inputs):
            for row in rows[w] if rows else [w]:
                of_in[row] += of_vectors[0 if cbow else n]
    after = [(t - rate * g).detach() for t, g in zip(tables, (of_in, of_out), strict=True)]
    return *after, float(loss), len(vectors)


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("subwords", [False, True])
@pytest.mark.parametrize("cbow", [False, True])
@pytest.mark.parametrize("negatives", [0, 1, 5, 6, 7, 20])
def test_a_step(cbow, subwords, parity, negatives, isa):
    """A sentence of two words is two windows of one input; a word in front of it and behind it takes part in both."""
    rows = [[w, 9 + w % 4, 9 + w % 3] if w % 2 else [w] for w in range(9)] if subwords else None
    if rows:
        starts = torch.tensor([0, *map(len, rows)]).cumsum(0)
        given = (starts, torch.tensor([row for each in rows for row in each], dtype=torch.int32))
    w_in, w_out = vectors_of(rows=13 if subwords else None)
    expected, total, pairs = [w_in, w_out], 0.0, 0
    for inputs, middle in (([5], 3), ([3], 5)):
        *expected, loss, count = expected_window(
            *expected, inputs, middle, 7, negatives, cbow=cbow, rows=rows, parity=parity
        )
        total, pairs = total + loss, pairs + count
    found = train(
        w_in, w_out, [3, 5], [0, 2], given if subwords else (None, None), negatives=negatives, cbow=cbow,
        parity=parity, noise=7,
    )  # fmt: skip
    torch.testing.assert_close(w_in, expected[0].float())
    torch.testing.assert_close(w_out, expected[1].float())
    torch.testing.assert_close(found.float(), torch.tensor([total, pairs, 2]))


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("cbow", [False, True])
@pytest.mark.parametrize(("window", "length"), [(4, 5), (2, 12), (3, 4), (1, 7)])
def test_a_sentence(window, length, cbow, parity, isa):
    """A word's vector is copied when a window first reaches it; its row moves as far when the last window is done."""
    w_in, w_out = vectors_of(stride=48)
    tokens = [4, 2, 2, 6, 2, 0, 4, 4, 8, 6, 1, 2][:length]
    rows, now, outputs = w_in.double(), {}, w_out.double()
    came = {}
    for middle in range(length):
        for at in range(middle + window + 1):
            if at < length and at not in came:
                came[at] = now[at] = rows[tokens[at]].clone()
        inputs = [at for at in range(max(0, middle - window), min(length, middle + window + 1)) if at != middle]
        copies = torch.stack([now[at] for at in inputs])
        copies, outputs, _, _ = expected_window(
            copies, outputs, list(range(len(inputs))), tokens[middle], 7, 5, cbow=cbow, parity=parity
        )
        now.update(zip(inputs, copies, strict=True))
        for at in range(length) if middle == length - 1 else [middle - window]:
            if at in now and (at <= middle - window or middle == length - 1):
                rows[tokens[at]] += now.pop(at) - came[at]
    train(w_in, w_out, tokens, [0, length], window=window, negatives=5, cbow=cbow, parity=parity, noise=7)
    torch.testing.assert_close(w_in, rows.float())
    torch.testing.assert_close(w_out, outputs.float())


def test_a_negative_that_is_the_middle_counts_nothing(isa):
    first, second = vectors_of(), vectors_of()
    train(*first, [3, 3], [0, 2], noise=3, negatives=5)
    train(*second, [3, 3], [0, 2], negatives=0)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("score", [-7.0, -5.0, 5.0, 7.0])
def test_far_scores(score, isa):
    """Beyond 6 word2vec.c takes the sigmoid for 0 or 1."""
    for parity in (False, True):
        w_in, w_out = torch.zeros(3, 16), torch.zeros(3, 16)
        w_in[:, 0], w_out[:2, 0] = 1.0, score
        train(w_in, w_out, [0, 1], [0, 2], noise=2, negatives=0, parity=parity, rate=0.125)
        sigmoid = torch.tensor(score).sigmoid()
        right = (sigmoid > 0.5).float() if parity and abs(score) > 6 else sigmoid
        torch.testing.assert_close(w_out[1, 0] - score, 0.125 * (1 - right))
        w_in, w_out = torch.zeros(3, 16), torch.zeros(3, 16)
        w_in[:, 0], w_out[2, 0] = 1.0, score
        train(w_in, w_out, [0, 0], [0, 2], noise=2, negatives=1, parity=parity, rate=0.125)
        first = score - 0.125 * right
        second = torch.tensor(first).sigmoid() if not parity or abs(first) <= 6 else (torch.tensor(first) > 0).float()
        torch.testing.assert_close(w_out[2, 0], first - 0.125 * second)


def test_windows_shrink_and_words_are_left_out(isa):
    tokens, starts = [n % 9 for n in range(3000)], list(range(0, 3001, 30))
    pairs = {}
    for shrink in (False, True):
        pairs[shrink] = float(train(*vectors_of(), tokens, starts, window=5, shrink=shrink)[1])
    assert pairs[False] == 100 * (30 * 10 - 2 * 15)
    assert 0.55 < pairs[True] / pairs[False] < 0.67  # (1 + ... + 5) / 25, and a little more at the ends
    kept = float(train(*vectors_of(), tokens, starts, keep=torch.full((9,), 2**30, dtype=torch.int32))[2])
    assert abs(kept / 3000 - 0.25) < 4 * (0.25 * 0.75 / 3000) ** 0.5


def test_the_rate_falls_within_a_call(isa):
    """Sentences of as many words each, whose vectors are the same: the first moves at the whole rate."""
    w_in, w_out = torch.zeros(9, 16), torch.ones(9, 16)
    tokens, threshold = torch.arange(8, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    torch.ops.seqkern.word2vec_train(
        w_in, w_out, tokens, torch.arange(0, 9, 2), None, threshold, threshold, None, None, 0, 4, 1, 0, False, False,
        False, 1, 0.4, 0.0, False, False,
    )  # fmt: skip
    torch.testing.assert_close(w_in[:8:2, 0], torch.tensor([0.2, 0.15, 0.1, 0.05]))


@pytest.mark.parametrize("length", [2, 50])
def test_negatives_have_the_distribution(length, isa):
    """Of rows that are no word of the sentences, how far each moves follows from how often it was drawn."""
    words = 40
    w_in, w_out = torch.zeros(words, 16), torch.zeros(words, 16)
    w_in[0] = 1.0
    threshold, alias = alias_table(torch.arange(1.0, words + 1))
    tokens, starts = torch.zeros(40_000, dtype=torch.int32), torch.arange(0, 40_001, length)
    torch.ops.seqkern.word2vec_train(
        w_in, w_out, tokens, starts, None, threshold, alias, None, None, 0, len(starts) - 1, 1, 5, True, False, False,
        1, 1e-9, 1e-9, False, False,
    )  # fmt: skip
    found = -w_out[1:, 0].double() / 0.5e-9  # e is half the rate
    expected = 40_000 * 5 * torch.arange(2.0, words + 1) / (words * (words + 1) / 2)
    # Two windows have the same negatives: the variance of half as many draws of two.
    assert ((found - expected).abs() < 5 * (2 * expected).sqrt()).all()


def test_sentences_are_drawn_apart():
    """Each sentence has numbers of its own: neighbours do not leave out the same places."""
    kept = []
    for first in range(64):
        tokens = torch.zeros(64 * 20, dtype=torch.int32)
        starts = torch.arange(0, 64 * 20 + 1, 20)
        total = torch.ops.seqkern.word2vec_train(
            torch.zeros(1, 16), torch.zeros(1, 16), tokens, starts, torch.tensor([2**30], dtype=torch.int32),
            torch.tensor([-1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), None, None, first, first + 1,
            1, 0, False, False, False, 5, 0.0, 0.0, False, False,
        )  # fmt: skip
        kept.append(float(total[2]))
    counts = torch.tensor(kept)
    assert abs(float(counts.mean()) - 5) < 4 * (20 * 0.25 * 0.75 / 64) ** 0.5
    change = (counts[1:] - counts[:-1]).square().mean() / 2  # of draws in a row of one sequence it would be 0.2 or so
    assert 1.8 < float(change) < 6.5


# ---- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parity", [None, "word2vec"])
@pytest.mark.parametrize("sg", [True, False])
@pytest.mark.parametrize("cls", [Word2Vec, FastText])
def test_words_of_a_kind_become_alike(cls, sg, parity, isa):
    model = small(cls, sg=sg, parity=parity, epochs=20, alpha=0.1 if cls is Word2Vec or parity else 0.4)
    report = model.train(corpus())
    assert report.words == 20 * 600 * 5
    assert report.loss is None
    assert_kinds_are_told_apart(model)


def test_the_loss_falls():
    losses = [small(epochs=epochs).train(corpus(), compute_loss=True).loss for epochs in (1, 10)]
    assert losses[1] < losses[0] < 6 * 0.694


def test_one_thread_is_deterministic(isa):
    models = [small(FastText, sample=1e-2, epochs=2, seed=seed) for seed in (4, 4, 5)]
    for model in models:
        model.train(corpus())
    assert torch.equal(models[0].vectors, models[1].vectors)
    assert torch.equal(models[0].contexts, models[1].contexts)
    assert not torch.equal(models[0].vectors, models[2].vectors)


@pytest.mark.parametrize("cls", [Word2Vec, FastText])
def test_threads(cls):
    before = torch.get_num_threads()
    model = small(cls, threads=2, epochs=20, alpha=0.1 if cls is Word2Vec else 0.4)
    model.train(corpus(2000))
    assert torch.get_num_threads() == before
    assert model.vectors.isfinite().all()
    assert_kinds_are_told_apart(model)


def test_the_rate_falls_to_its_end():
    model = small(alpha=0.5, min_alpha=0.1)
    assert [model._rate(s) for s in (0, 0.5, 1)] == pytest.approx([0.5, 0.3, 0.1])
    assert small().options["alpha"] == 0.025
    assert small(sg=False).options["alpha"] == 0.075
    assert small(FastText).options["alpha"] == 0.2
    assert small(FastText, parity="word2vec").options["alpha"] == 0.025


def test_epochs_are_drawn_apart():
    """Windows are of other sizes in the second pass."""
    once, twice = (small(epochs=epochs).train(corpus()).pairs for epochs in (1, 2))
    assert twice != 2 * once


def test_training_again_begins_anew():
    model = small()
    model.train(corpus())
    first = model.vectors.clone()
    model.train([["x", "y"]])
    assert model.words == ["x", "y"]
    model.train(corpus())
    assert torch.equal(model.vectors, first)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("cls", [Word2Vec, FastText])
def test_sizes(cls, size, isa):
    model = small(cls, vector_size=size)
    model.train(corpus(20))
    assert model.vectors.shape == model.contexts.shape == (len(model), size)
    assert model.vectors.isfinite().all()
    assert not model._inputs[:, size:].any()
    assert not model._outputs[:, size:].any()


def test_a_bar(capsys):
    small().train(corpus(5), progress=True)
    assert "words" in capsys.readouterr().err


# ---- subwords -----------------------------------------------------------------------------------------------------


def fnv(text):
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ (byte if byte < 128 else byte | 0xFFFFFF00)) * 16777619) % 2**32
    return value


@pytest.mark.parametrize("word", ["where", "a", "", "naïve", "日本語", "👍🏽x"])
def test_ngrams_are_fasttexts(word):
    least, most, buckets = 1, 4, 1000
    model = FastText(min_n=least, max_n=most, bucket=buckets)
    starts, found = model._ngrams(["xy", word])
    around = f"<{word}>"
    expected = [
        fnv(around[i : i + n]) % buckets
        for i in range(len(around))
        for n in range(least, most + 1)
        if i + n <= len(around) and around[i : i + n] not in ("<", ">")
    ]
    assert found[starts[1] : starts[2]].tolist() == expected


def test_a_word_is_the_mean_of_its_rows():
    model = small(FastText, min_n=2, max_n=3)
    model.train([["abc", "abd"], ["abc", "xyz"]])
    starts, numbers = model._row_starts.tolist(), model._row_numbers.long()
    for n, word in enumerate(model.words):
        rows = numbers[starts[n] : starts[n + 1]]
        assert rows[0] == n
        assert len(rows) == 1 + len(model._ngrams([word])[1])
        torch.testing.assert_close(model.vectors[n], model._inputs[rows, :12].mean(0))
    assert torch.equal(model["abc"], model.vectors[model.words.index("abc")])


def test_words_that_are_not_there():
    model = small(FastText, epochs=20, alpha=0.4)
    model.train([[w * 2 + "ing" if w in ANIMALS else w + "s" for w in s] for s in corpus()])
    assert "catsing" in model
    assert "catsing" not in model.words
    near = model.most_similar("catcatings", topn=1)[0][0]
    assert near == "catcating"
    with pytest.raises(KeyError, match="FastText: no n-gram of 'zzzzz' is one of the vocabulary's"):
        model["zzzzz"]
    assert "zzzzz" not in model
    with pytest.raises(KeyError, match="Word2Vec: 'zebra' is not in the vocabulary of 20 words"):
        trained()["zebra"]


# ---- vectors ------------------------------------------------------------------------------------------------------


def trained(cls=Word2Vec, **options):
    model = small(cls, **options)
    model.train(corpus(50))
    return model


def test_a_failed_training_leaves_the_model(monkeypatch):
    for cls in (Word2Vec, FastText):
        model = trained(cls)
        words, vectors = list(model.words), model.vectors.clone()
        for bad in ([["a", 1]], [], ["a string"]):
            with pytest.raises((TypeError, ValueError)):
                model.train(bad)
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "rich.progress", None)
            with pytest.raises(ModuleNotFoundError, match="progress=True needs rich"):
                model.train([["a", "b"]], progress=True)
        assert model.words == words
        assert torch.equal(model.vectors, vectors)


def test_torchs_defaults_do_not_matter(tmp_path):
    """Vectors are float32 on the CPU."""
    expected = trained(FastText)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            model = trained(FastText)
            model.save(tmp_path / "model")
            other = FastText.load(tmp_path / "model")
            near = model.most_similar("cat", topn=2)
            unknown = other["dogs"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert near == expected.most_similar("cat", topn=2)
    for each in (model, other):
        assert each.vectors.dtype == each.contexts.dtype == torch.float32
        assert torch.equal(each.vectors, expected.vectors)
    assert torch.equal(unknown, expected["dogs"])


def test_odd_words():
    odd = ["\ud800", "", "日本", "a b", "<", ">"]
    for cls in (Word2Vec, FastText):
        model = small(cls, min_n=1) if cls is FastText else small(cls)
        model.train([odd] * 20)
        assert set(model.words) == set(odd)
        assert all(model[word].isfinite().all() for word in odd)
        assert 5 not in model
        with pytest.raises(KeyError):
            model[5]


def test_noise_of_any_exponent():
    counts = torch.tensor([10000, 100, 10])
    torch.testing.assert_close(noise_weights(counts, 0.75), (counts / 10000).double() ** 0.75, rtol=1e-6, atol=0)
    assert noise_weights(counts, 100.0).tolist()[0] == 1
    assert noise_weights(counts, 5000.0).tolist() == [1, 0, 0]
    assert noise_weights(counts, -5000.0).tolist() == [0, 0, 1]
    assert noise_weights(counts, 0.0).tolist() == [1, 1, 1]


def test_most_similar():
    model = trained()
    unit = F.normalize(model.vectors, dim=1)
    at = model.words.index
    wanted = unit[at("cat")] + unit[at("saw")] - unit[at("dog")]
    scores = F.normalize(wanted, dim=0) @ unit.t()
    found = model.most_similar(["cat", "saw"], ["dog"], topn=4)
    order = [model.words[n] for n in scores.argsort(descending=True).tolist()]
    assert [w for w, _ in found] == [w for w in order if w not in ("cat", "saw", "dog")][:4]
    torch.testing.assert_close(torch.tensor(found[0][1]), scores[at(found[0][0])])
    assert model.most_similar(model["cat"])[0][0] == "cat"
    assert len(model.most_similar("cat", topn=100)) == 19
    assert model.most_similar(negative="dog") == model.most_similar([], ["dog"])
    assert model.most_similar(model["cat"].numpy())[0][0] == "cat"
    assert model.most_similar("cat", "dog") == model.most_similar(["cat"], ["dog"])
    assert model.most_similar(model["cat"].double(), model["dog"]) == model.most_similar([model["cat"]], [model["dog"]])
    with pytest.raises(ValueError, match="Word2Vec: topn must be at least 1, got 0"):
        model.most_similar("cat", topn=0)
    with pytest.raises(ValueError, match="Word2Vec: most_similar needs a word or vector"):
        model.most_similar([])


def test_evaluate_pairs(tmp_path):
    model = trained()
    words = [*ANIMALS, *TOOLS]
    pairs = [(a, b, round(model.similarity(a, b), 1)) for a in words for b in words if a < b]
    ours, count = model.evaluate_pairs([*pairs, ("zebra", "cat", 5.0)])
    scores = [model.similarity(a, b) for a, b, _ in pairs], [score for *_, score in pairs]
    ranks = [torch.tensor(each).double() for each in scores]
    means = [torch.stack([(r[:, None] > r).sum(1) + ((r[:, None] == r).sum(1) - 1) / 2])[0] for r in ranks]
    expected = torch.corrcoef(torch.stack(means).double())[0, 1]
    torch.testing.assert_close(torch.tensor(ours), expected.float(), check_dtype=False)
    assert count == len(pairs)
    assert model.evaluate_pairs([])[1] == 0
    (path := tmp_path / "pairs.tsv").write_text(
        "# of people\nWord\tOther\t1\n\n" + "".join(f"{a.upper()}\t{b}\t{s}\tmore\n" for a, b, s in pairs)
    )
    assert model.evaluate_pairs(path) == model.evaluate_pairs(pairs)
    with pytest.raises(ValueError, match=r"Word2Vec: pairs must be of \(word, word, score\), got \('cat', 'dog'\)"):
        model.evaluate_pairs([("cat", "dog")])


# ---- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Word2Vec, FastText])
def test_files(cls, tmp_path):
    model = trained(cls)
    path = tmp_path / "model.safetensors"
    model.save(path)
    other = cls.load(path)
    assert other.words == model.words
    assert other.options == model.options
    assert torch.equal(other.vectors, model.vectors)
    assert torch.equal(other.contexts, model.contexts)
    assert torch.equal(other.counts, model.counts)
    assert other.most_similar("cat") == model.most_similar("cat")
    if cls is FastText:
        assert torch.equal(other["cats"], model["cats"])
    safetensors = pytest.importorskip("safetensors.torch")
    assert torch.equal(safetensors.load_file(path)["inputs"], model._inputs)
    with pytest.raises(ValueError, match="has a "):
        ({Word2Vec, FastText} - {cls}).pop().load(path)


def test_files_that_are_none(tmp_path):
    path = tmp_path / "model.safetensors"
    trained().save(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    changes = [
        b"", data[:5], data[:-1], b"\xff" * 40, (1 << 40).to_bytes(8, "little") + data[8:], b"{}" + data[2:],
    ]  # fmt: skip
    for name, entry in (
        ("inputs", {"shape": [3, 16]}), ("inputs", {"dtype": "F99"}), ("inputs", {"data_offsets": [0, 1 << 40]}),
        ("inputs", {"data_offsets": [-64, 64]}), ("counts", {"shape": [-1, -11]}), ("words", {"dtype": "F32"}),
        ("inputs", {"dtype": "I64", "shape": [10, 16]}),
    ):  # fmt: skip
        changed = json.dumps(header | {name: header[name] | entry}).encode()
        changes.append(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    given = json.loads(header["__metadata__"]["seqkern"])
    fewer = {name: value for name, value in given.items() if name != "seed"}
    for settings in (
        given | {"window": 0},
        given | {"size": 3},
        given | {"vector_size": 40},
        given | {"vector_size": 3},
        fewer,
        [],
        3,
    ):
        entry = json.dumps(settings)
        changed = json.dumps(header | {"__metadata__": {"seqkern": entry}}).encode()
        changes.append(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    for missing in ("outputs", "words", "__metadata__"):
        changed = json.dumps({k: v for k, v in header.items() if k != missing}).encode()
        changes.append(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    for text in (b"1", b"null", b'"x"', b"[" * 100_000, json.dumps({"__metadata__": 3}).encode()):
        changes.append(len(text).to_bytes(8, "little") + text)
    words = data.find(b'"cat"')
    changes.append(data[:words] + b'"dog"' + data[words + 5 :])  # twice
    for bad in changes:
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="is no file of"):
            Word2Vec.load(path)


def test_text(tmp_path):
    model = trained()
    model.save_text(tmp_path / "vectors.txt")
    first, *lines = (tmp_path / "vectors.txt").read_text().splitlines()
    assert first == "20 12"
    for line, word, vector in zip(lines, model.words, model.vectors, strict=True):
        name, *numbers = line.split(" ")
        assert name == word
        assert torch.equal(torch.tensor([float(n) for n in numbers]), vector)
    other = Word2Vec.load_text(tmp_path / "vectors.txt")
    assert other.words == list(model) == list(other.key_to_index)
    assert torch.equal(other.vectors, model.vectors)
    for text in ("", "2 3\na 1 2 3\n", "1 2\na 1 2 3\n", "1 2\na x y\n", "2 1\na 1\na 2\n"):
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(ValueError, match="is no text file of word vectors"):
            Word2Vec.load_text(tmp_path / "bad.txt")
    model.train([["new york", "a"]])
    with pytest.raises(ValueError, match="Word2Vec: the format has no words like 'new york'"):
        model.save_text(tmp_path / "vectors.txt")


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (TypeError, {"vector_size": 1.5}, "vector_size must be an integer, got float"),
        (TypeError, {"threads": True}, "threads must be an integer, got bool"),
        (ValueError, {"vector_size": 0}, "vector_size must be 1 to 1048576, got 0"),
        (ValueError, {"window": 101}, "window must be 1 to 100, got 101"),
        (ValueError, {"negative": 64}, "negative must be 1 to 63, got 64"),
        (ValueError, {"epochs": 0}, "epochs must be 1 to 2147483648, got 0"),
        (ValueError, {"sample": -1.0}, "sample must be finite and at least 0, got -1.0"),
        (ValueError, {"alpha": 1e-5}, "alpha must be at least min_alpha, 0.0001, got 1e-05"),
        (TypeError, {"sg": 2}, "sg must be True or False, got 2"),
        (ValueError, {"alpha": float("nan")}, "alpha must be finite and at least 0, got nan"),
        (ValueError, {"ns_exponent": float("inf")}, "ns_exponent must be finite, got inf"),
        (TypeError, {"alpha": "big"}, "alpha must be a number, got str"),
        (TypeError, {"sg": "cbow"}, "sg must be True or False, got 'cbow'"),
        (ValueError, {"parity": "gensim"}, "parity must be None or \"word2vec\", got 'gensim'"),
        (TypeError, {"workers": 3}, "got an unexpected keyword argument 'workers': use threads"),
    ],
)
@pytest.mark.parametrize("cls", [Word2Vec, FastText])
def test_options(cls, error, options, message):
    with pytest.raises(error, match=message):
        cls(**options)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"min_n": 4, "max_n": 3}, "min_n and max_n must be 1 <= min_n <= max_n <= 1000, got 4 and 3"),
        (ValueError, {"bucket": 0}, r"bucket must be 1 to 2\^31, got 0"),
        (TypeError, {"min_n": 1.5}, "min_n must be an integer, got float"),
        (TypeError, {"bucket": 1e6}, "bucket must be an integer, got float"),
    ],
)
def test_options_of_subwords(error, options, message):
    with pytest.raises(error, match=f"FastText: {message}"):
        FastText(**options)


@pytest.mark.parametrize(
    ("error", "sentences", "message"),
    [
        (TypeError, "corpus.txt", "sentences must be lists of words, got a string: open a file and split its lines"),
        (TypeError, ["not split"], "a sentence must be a list of words, got a string: split it"),
        (TypeError, [[1, 2]], "words must be strings, got int"),
        (ValueError, [], r"no word stands 1 times \(min_count\) in the sentences"),
        (ValueError, [[], []], r"no word stands 1 times \(min_count\) in the sentences"),
    ],
)
def test_sentences(error, sentences, message):
    with pytest.raises(error, match=f"Word2Vec: {message}"):
        small().train(sentences)


def test_one_word():
    model = small()
    model.train([["alone"], ["alone"]])
    assert model.words == ["alone"]
    assert model.most_similar("alone") == []


T, S = torch.zeros(4, dtype=torch.int32), torch.tensor([0, 4])
WORDS = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(3, 16).double()}, "w_in must have ScalarType 6"),
        ({0: torch.zeros(3, 20)}, "w_in must have size 16 in dimension 1"),
        ({0: torch.zeros(2, 16)}, "w_in must have a row for each of 3 words"),
        ({0: torch.zeros(3, 20)[:, :16]}, "w_in must be contiguous"),
        ({0: torch.zeros(3, 20), 1: torch.zeros(3, 20)}, "rows must have a multiple of 16 numbers, got 20"),
        ({2: T + 3}, "tokens must be words below 3, got 3"),
        ({2: T - 1}, "tokens must be words below 3, got -1"),
        ({3: torch.tensor([0, 5])}, "starts must increase, up to the 4 tokens, got 0 and then 5"),
        ({3: torch.tensor([3, 1])}, "starts must increase, up to the 4 tokens, got 3 and then 1"),
        ({4: WORDS[:2]}, "keep must have size 3"),
        ({5: WORDS[:2]}, "threshold must have size 3"),
        ({6: WORDS + 3}, "alias must have words below 3, got 3"),
        ({7: S}, "row_starts and rows come together"),
        ({7: torch.tensor([0, 1, 1, 2]), 8: WORDS[:2]}, "row_starts must increase, got 1 and then 1"),
        ({7: torch.tensor([0, 1, 2, 3]), 8: WORDS + 3}, "rows must be below 3, got 3"),
        ({7: torch.tensor([0, 1, 2, 4]), 8: WORDS}, "row_starts must go from 0 to 3"),
        ({10: 2}, "sentences 0 to 2 must be among the 1"),
        ({11: 0}, "window must be 1 to 100, got 0"),
        ({12: 64}, "negatives must be 0 to 63, got 64"),
    ],
)
def test_the_op_itself_guards_its_pointers(change, message):
    given = [
        torch.zeros(3, 16), torch.zeros(3, 16), T, S, None, WORDS, WORDS, None, None, 0, 1, 2, 3, False, True, False, 1,
        0.1, 0.1, False, False,
    ]  # fmt: skip
    torch.ops.seqkern.word2vec_train(*given)
    for n, value in change.items():
        given[n] = value
    before = given[0].clone()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.seqkern.word2vec_train(*given)
    assert torch.equal(given[0], before)
