"""The Tree-LSTM classifier: its twin, batches of other trees, a cell by hand, errors, learning; the example."""

import itertools

import pytest
import torch

import seqkern
from examples import runner, tree_classifier, twins
from seqkern import TreeSchedule
from seqkern.models import TreeClassifier

TOKENS, CLASSES = 11, 4
# Five trees: a chain, one node alone, a star of three children, two deeper ones.
TREES = [[-1, 0, 1, 2], [-1], [-1, 0, 0, 0], [-1, 0, 0, 1, 1, 2], [-1, 0, 1, 1, 0]]
OPTIONS = [
    {"kind": kind, "pool": pool} | ({"slots": 3} if kind == "nary" else {})
    for kind, pool in itertools.product(("child_sum", "nary"), ("root", "max", "mean"))
]
each = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(options, dropout=0.0):
    torch.manual_seed(0)
    arguments = (TOKENS, CLASSES, 8, 6)
    model = TreeClassifier(*arguments, dropout=dropout, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    twin = twins.tree_classifier.TreeClassifier(*arguments, dropout=dropout, **options)
    twin.load_state_dict(model.state_dict())
    return model, twin


def make_batch(trees=TREES, vocabulary=TOKENS):
    lengths = torch.tensor([len(tree) for tree in trees])
    schedule = TreeSchedule.from_parents([parent for tree in trees for parent in tree], lengths)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (int(lengths.sum()),), generator=generator)
    return tokens, schedule, torch.randint(CLASSES, (len(trees),), generator=generator), lengths


@each
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("vocabulary", [TOKENS, 1])
def test_equals_the_twin(options, dropout, vocabulary):
    """Of one kind of token many nodes have equal states: the maximum's gradient is that of one of them."""
    model, twin = make(options, dropout)
    losses = []
    for version in (model, twin):
        torch.manual_seed(1)  # of dropout
        losses.append(version.loss(*make_batch(vocabulary=vocabulary)))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@each
def test_a_tree_does_not_see_the_others(options):
    model, _ = make(options)
    tokens, schedule, _, lengths = make_batch()
    together = model(tokens, schedule, lengths)
    for row, own in enumerate(tokens.split(lengths.tolist())):
        alone = model(own, TreeSchedule.from_parents(TREES[row]), lengths[row : row + 1])
        torch.testing.assert_close(alone[0], together[row])


@pytest.mark.parametrize("pool", ["root", "max", "mean"])
def test_order_of_children(pool):
    """It does not count in child-sum trees, and does in N-ary ones."""
    tokens, lengths = torch.tensor([0, 1, 2, 3]), torch.tensor([4])
    swapped = tokens[[0, 2, 1, 3]]
    schedule = TreeSchedule.from_parents([-1, 0, 0, 0])
    for kind, same in (("child_sum", True), ("nary", False)):
        model, _ = make({"kind": kind, "slots": 3, "pool": pool})
        one, other = (model(t, schedule, lengths) for t in (tokens, swapped))
        assert torch.allclose(one, other) == same


@pytest.mark.parametrize("kind", ["child_sum", "nary"])
def test_a_chain_is_an_lstm(kind):
    """From the leaf to the root."""
    model, _ = make({"kind": kind, "slots": 1})
    tokens = torch.tensor([3, 1, 4, 1, 5])  # the root first
    found = model(tokens, TreeSchedule.from_parents([-1, 0, 1, 2, 3]))
    lstm = torch.nn.LSTM(8, 6)
    weights = model.tree.state_dict()
    lstm.load_state_dict({f"{name}_l0": weight for name, weight in weights.items()})
    _, (last, _) = lstm(model.embedding(tokens.flip(0)))
    torch.testing.assert_close(found, model.head.logits(last))


@each
def test_loss_is_the_mean_of_the_logits(options):
    model, _ = make(options)
    tokens, schedule, labels, lengths = make_batch()
    logits = model(tokens, schedule, lengths)
    assert logits.shape == (len(TREES), CLASSES)
    expected = -logits.log_softmax(1)[torch.arange(len(labels)), labels].mean()
    torch.testing.assert_close(model.loss(tokens, schedule, labels, lengths), expected)


def test_forget_gates_begin_open():
    tree = TreeClassifier(TOKENS, CLASSES, 8, 6, "nary", slots=3).tree
    assert tree.bias_ih[6:12].eq(1).all()
    assert not tree.bias_ih[12:].eq(1).any()


@pytest.mark.parametrize("kind", ["child_sum", "nary"])
def test_learns_a_batch(kind):
    model, _ = make({"kind": kind, "slots": 3, "pool": "max"})
    batch = make_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(*batch).backward()
        optimizer.step()
    assert model.loss(*batch) < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "binary"}, "TreeClassifier: kind must be child_sum or nary, got 'binary'"),
        ({"pool": "sum"}, "TreeClassifier: pool must be root, max or mean, got 'sum'"),
        ({"kind": "nary", "slots": 0}, "slots must be at least 1, got 0"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        TreeClassifier(TOKENS, CLASSES, 8, 6, **options)


@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 16])])
def test_a_pool_needs_lengths(lengths):
    model, _ = make({"pool": "max"})
    tokens, schedule, labels, _ = make_batch()
    with pytest.raises(ValueError, match=r"TreeClassifier: pool 'max' needs lengths of the 5 trees, got (none|2)"):
        model.loss(tokens, schedule, labels, lengths)


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize(
    ("trees", "lengths"),
    [
        ([[-1, 0], [-1]], [1, 2]),  # as many trees and nodes, and a root in each stretch
        ([[-1], [1, -1]], [2, 1]),
        ([[-1], [-1], [-1, 0]], [2, 0, 2]),
        ([[-1, 0], [-1]], [2, 2]),
        ([[-1, 0], [-1]], [4, -1]),
    ],
)
def test_lengths_must_be_the_trees(trees, lengths, pool):
    model, _ = make({"pool": pool})
    tokens, schedule, labels, own = make_batch(trees)
    model.loss(tokens, schedule, labels, own)
    with pytest.raises(ValueError, match=r"TreeClassifier: lengths must be those of the schedule's trees, got \["):
        model.loss(tokens, schedule, labels, torch.tensor(lengths))


def test_too_many_children():
    model, _ = make({"kind": "nary", "slots": 2})
    tokens, schedule, labels, _ = make_batch()
    with pytest.raises(ValueError, match="2 slots, got a schedule of 3"):
        model.loss(tokens, schedule, labels)


def test_levels_are_made_once():
    schedule = seqkern.TreeSchedule.from_parents([-1, 0, 0, 2])
    place, levels = twins.tree_classifier.levels(schedule)
    assert twins.tree_classifier.levels(schedule)[1] is levels
    assert place[schedule.order].tolist() == [0, 1, 2, 3]
    assert [(begin, end, len(children)) for begin, end, children, *_ in levels] == [(0, 2, 0), (2, 3, 1), (3, 4, 2)]


@pytest.mark.parametrize("variant", tree_classifier.SYSTEM.recipes)
def test_example(variant, monkeypatch):
    """Twenty steps, the same as the twin's."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(type(tree_classifier.SYSTEM), "baselines", lambda self: {})
    record, exhibits = runner.run(tree_classifier.SYSTEM, variant, steps=20, memory=False)
    assert record["checks"]
    assert all(check["passed"] for check in record["checks"]), record["checks"]
    tree, guesses, words = exhibits
    assert tree.figure is not None
    assert len(guesses.table) > 20
    assert sum(int(row[1]) for row in words.table[1:]) == len(tree_classifier.data().held_out)


def test_baselines_do_not_touch_the_generator():
    """A bag that tells the class is learnt; the random numbers of a training stay what they are."""
    torch.set_default_dtype(torch.float32)
    labels = torch.arange(240) % 3
    bags = torch.nn.functional.one_hot(labels, 5).float()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    fit = tree_classifier.fitted(bags, labels, 0, 0.01, 100)
    assert fit(bags).argmax(1).equal(labels)
    assert torch.rand(2).equal(expected)
