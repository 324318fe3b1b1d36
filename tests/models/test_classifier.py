"""The classifiers: their twins, padding, errors, learning; the film reviews and the example."""

import pytest
import torch

from examples import classifier, runner, twins
from examples.data import snippets
from seqkern.models import CNNClassifier, RNNClassifier, TransformerClassifier

WORDS, CLASSES = 23, 3
LENGTHS = torch.tensor([9, 1, 4, 2])
MODELS = {
    "last": (RNNClassifier, (6, 5), {}),
    "last-both-ways": (RNNClassifier, (6, 5, 2, "gru"), {"bidirectional": True}),
    "mean": (RNNClassifier, (6, 5, 1, "rnn"), {"pool": "mean", "dropout": 0.3}),
    "max": (RNNClassifier, (6, 5), {"pool": "max", "bidirectional": True, "dropout": 0.3}),
    "cnn": (CNNClassifier, (6, 5), {"dropout": 0.3}),
    "cnn-widths": (CNNClassifier, (6, 5, (1, 2)), {}),
    "transformer": (TransformerClassifier, (8, 2, 2), {"dropout": 0.3}),
    "transformer-width": (TransformerClassifier, (8, 2, 1, 12), {}),
}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(name, seed=0):
    kind, sizes, options = MODELS[name]
    torch.manual_seed(seed)
    model = kind(WORDS, CLASSES, *sizes, **options)
    for parameter in model.parameters():  # biases other than 0
        torch.nn.init.normal_(parameter, std=0.5)
    twin = getattr(twins.classifier, kind.__name__)(WORDS, CLASSES, *sizes, **options)
    twin.load_state_dict(model.state_dict())
    return model, twin


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (len(LENGTHS), int(LENGTHS.max())), generator=generator)
    return tokens, torch.randint(CLASSES, LENGTHS.shape, generator=generator), LENGTHS


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_twin(name):
    model, twin = make(name)
    losses = []
    for version in (model, twin):
        torch.manual_seed(1)  # of dropout
        losses.append(version.loss(*make_batch()))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    ours, theirs = ({name: p.grad for name, p in version.named_parameters()} for version in (model, twin))
    torch.testing.assert_close(ours, theirs)
    tokens, _, lengths = make_batch()
    torch.testing.assert_close(model.eval()(tokens, lengths), twin.eval()(tokens, lengths))


@pytest.mark.parametrize("name", MODELS)
def test_padding_does_not_matter(name):
    model = make(name)[0].eval()
    tokens, _, lengths = make_batch()
    wider = torch.cat([tokens, torch.randint(WORDS, (len(tokens), 5))], 1)
    for row, length in enumerate(lengths):
        wider[row, length:] = torch.randint(WORDS, wider[row, length:].shape)
    logits = model(tokens, lengths)
    torch.testing.assert_close(model(wider, lengths), logits)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(model(tokens[row : row + 1, :length]), logits[row : row + 1])


@pytest.mark.parametrize("name", MODELS)
def test_learns_a_batch(name):
    kind, sizes, options = MODELS[name]
    torch.manual_seed(0)
    model = kind(WORDS, CLASSES, *sizes, **{**options, "dropout": 0.0})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    batch = make_batch()
    for _ in range(60):
        loss = model.loss(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert model(batch[0], batch[2]).argmax(1).equal(batch[1])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="RNNClassifier: cell"):
        RNNClassifier(9, 2, 4, 4, cell="elman")
    with pytest.raises(ValueError, match="RNNClassifier: pool"):
        RNNClassifier(9, 2, 4, 4, pool="min")
    with pytest.raises(ValueError, match="CNNClassifier: widths"):
        CNNClassifier(9, 2, 4, 4, ())


def test_winning_windows():
    """The windows that the example shows give the filters their values."""
    model = make("cnn")[0].eval()
    tokens, _, lengths = make_batch()
    for row, length in enumerate(lengths):
        values, starts, widths = classifier.winners(model, tokens[row, :length])
        torch.testing.assert_close(values, model.pooled(tokens[row : row + 1], lengths[row : row + 1])[0])
        assert (starts + widths <= torch.maximum(length, widths)).all()


def present():
    try:
        return bool(classifier.data())
    except FileNotFoundError:
        return False


needs_data = pytest.mark.skipif("not present()", reason="vaderSentiment's source distribution is not in build/data")


def test_the_words_of_a_snippet():
    found = snippets.tokenize("It's NOT &quot;that&quot; bad, I don't can't; Amélie-like 90s")
    assert found == ["it", "'s", "not", '"', "that", '"', "bad", ",", "i", "do", "n't", "ca", "n't", ";", "amélie",
                     "-", "like", "90", "s"]  # fmt: skip


def test_a_missing_archive_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(snippets, "ARCHIVE", "absent.tar.gz")
    with pytest.raises(FileNotFoundError, match="pip download --no-deps"):
        snippets.read()


def test_another_archive_is_refused(monkeypatch, tmp_path):
    (tmp_path / "other.tar.gz").write_bytes(b"")
    monkeypatch.setattr(snippets, "ARCHIVE", "other.tar.gz")
    monkeypatch.setenv("SEQKERN_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="SHA-256"):
        snippets.read()


@needs_data
def test_snippets():
    data = classifier.data()
    assert (len(data.train), len(data.held_out)) == (9064, 1006)
    unseen = {" ".join(words) for words in data.held_out.words}
    assert unseen.isdisjoint(" ".join(words) for words in data.train.words)
    for part in (data.train, data.held_out):
        assert (part.ratings.abs() >= snippets.STRENGTH).all()
        assert 0.48 < part.labels.double().mean() < 0.52
        assert part.lengths.tolist() == [len(words) for words in part.words]
        assert (part.tokens != snippets.PAD).sum(1).equal(part.lengths)
    known = {word for words in data.train.words for word in words}
    assert known.issuperset(data.vocabulary[2:])
    again = snippets.load()
    assert again.vocabulary == data.vocabulary
    assert again.train.tokens.equal(data.train.tokens)


@needs_data
@pytest.mark.parametrize("variant", classifier.SYSTEM.recipes)
def test_the_example_starts_as_its_twin(variant):
    torch.set_default_dtype(torch.float32)
    record, exhibits = runner.run(classifier.SYSTEM, variant, steps=20, memory=False)
    assert all(check["passed"] for check in record["checks"]), record["checks"]
    assert exhibits


def test_naive_bayes_by_hand():
    """Two words and their counts plus one."""
    torch.set_default_dtype(torch.float32)
    tokens = torch.tensor([[2, 3, 0], [2, 2, 0], [3, 3, 3]])
    labels = torch.tensor([1, 1, 0])
    found = classifier.naive_bayes(tokens, labels, 4)(torch.tensor([[2, 0], [3, 0]]))
    # Each snippet counts a word once. Class 1: two of word 2, one of word 3; class 0: one of word 3.
    positive, negative = torch.tensor([3 / 5, 2 / 5]) * 2 / 3, torch.tensor([1 / 3, 2 / 3]) * 1 / 3
    torch.testing.assert_close(found.exp(), torch.stack([negative, positive], 1))


def test_naive_bayes_of_pairs_by_hand():
    """Class 1: words 2, 2, 3 and the pairs 23, 22; class 0: word 3 and the pair 33. Neither 32 nor padding counts."""
    torch.set_default_dtype(torch.float32)
    tokens, labels = torch.tensor([[2, 3, 0], [2, 2, 0], [3, 3, 3]]), torch.tensor([1, 1, 0])
    found = classifier.naive_bayes(tokens, labels, 4, pairs=True)(torch.tensor([[2, 3, 2], [3, 3, 0]]))
    # Counts plus one of 2, 3, 22, 23, 33: 3, 2, 2, 2, 1 of 10; and 1, 2, 1, 1, 2 of 7.
    positive = torch.tensor([3 * 2 * 2 / 10**3, 2 * 1 / 10**2]) * 2 / 3
    negative = torch.tensor([1 * 2 * 1 / 7**3, 2 * 2 / 7**2]) * 1 / 3
    torch.testing.assert_close(found.exp(), torch.stack([negative, positive], 1))


@needs_data
def test_baselines():
    """Pairs know more than words: the networks have to be compared with them."""
    torch.set_default_dtype(torch.float32)
    found = classifier.SYSTEM.baselines()
    assert list(found) == ["majority", "naive Bayes", classifier.PAIRS]
    assert 50 < found["majority"] < 51
    assert 80 < found["naive Bayes"] < 81 < found[classifier.PAIRS] < 82
