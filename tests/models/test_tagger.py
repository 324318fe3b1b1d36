"""The tagger: its twin, padding, errors, learning; the roles of identifiers and the example."""

import itertools
import warnings
from pathlib import Path

import pytest
import torch

from examples import runner, tagger, twins
from examples.data import identifiers, shuffled
from examples.data.identifiers import IGNORED, ROLES
from seqkern.models import Tagger

WORDS, TAGS = 23, 4
LENGTHS = torch.tensor([9, 1, 4, 2])
OPTIONS = [
    {"encoder": encoder, "cell": cell, "num_layers": layers}
    for encoder, (cell, layers) in itertools.product(("birnn", "rnn"), (("lstm", 1), ("gru", 2), ("rnn", 1)))
]
OPTIONS += [
    {"encoder": "transformer", "num_layers": 2, "positions": positions} for positions in ("rotary", "sinusoidal")
]
each = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(options, dropout=0.0):
    torch.manual_seed(0)
    model = Tagger(WORDS, TAGS, 8, 6, dropout=dropout, **options)
    for parameter in model.parameters():  # biases other than 0
        torch.nn.init.normal_(parameter, std=0.5)
    twin = twins.tagger.Tagger(WORDS, TAGS, 8, 6, dropout=dropout, **options)
    twin.load_state_dict(model.state_dict())
    return model, twin


def make_batch():
    """Tags behind a row's end are tags like any others: lengths alone leave them out."""
    generator = torch.Generator().manual_seed(0)
    shape = len(LENGTHS), int(LENGTHS.max())
    tokens, tags = (torch.randint(n, shape, generator=generator) for n in (WORDS, TAGS))
    tags[0, 3], tags[2, 1] = IGNORED, IGNORED
    return tokens, tags, LENGTHS


@each
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_equals_the_twin(options, dropout):
    model, twin = make(options, dropout)
    losses = []
    for version in (model, twin):
        torch.manual_seed(1)  # of dropout
        losses.append(version.loss(*make_batch()))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    ours, theirs = ({name: p.grad for name, p in version.named_parameters()} for version in (model, twin))
    torch.testing.assert_close(ours, theirs)
    tokens, _, lengths = make_batch()
    own = torch.arange(tokens.shape[1]) < lengths[:, None]
    logits = [version.eval().logits(version(tokens, lengths))[own] for version in (model, twin)]
    torch.testing.assert_close(*logits)


@each
def test_padding_does_not_matter(options):
    model = make(options)[0]
    tokens, tags, lengths = make_batch()
    loss, states = model.loss(tokens, tags, lengths), model(tokens, lengths)
    wider = torch.randint(WORDS, (len(tokens), tokens.shape[1] + 5))
    targets = torch.randint(TAGS, wider.shape)
    for row, length in enumerate(lengths):
        wider[row, :length], targets[row, :length] = tokens[row, :length], tags[row, :length]
        torch.testing.assert_close(model(tokens[row : row + 1, :length])[0], states[row, :length])
    torch.testing.assert_close(model.loss(wider, targets, lengths), loss)


@each
def test_what_a_tag_depends_on(options):
    """Left to right, a state knows nothing of the tokens behind it; the others see both sides."""
    model = make(options)[0]
    tokens = make_batch()[0][:1]
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % WORDS
    moved = (model(tokens) - model(changed))[0].abs().amax(1) > 0
    assert moved[5:].all()
    assert moved[:5].all() == moved[:5].any() == (options["encoder"] != "rnn")


@each
def test_learns_a_batch(options):
    torch.manual_seed(0)
    model = Tagger(WORDS, TAGS, 8, 6, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    tokens, tags, lengths = make_batch()
    for _ in range(100):
        loss = model.loss(tokens, tags, lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="Tagger: encoder"):
        Tagger(9, 2, 4, 4, "cnn")
    with pytest.raises(ValueError, match="Tagger: cell"):
        Tagger(9, 2, 4, 4, cell="elman")
    with pytest.raises(ValueError, match="Tagger: positions"):
        Tagger(9, 2, 4, 4, positions="learned")


SOURCE = """
import os as system
def f(a, *b, c: int = 0):
    total = self.x.y[i](a, key=os.path, é="é", d=total)  # a comment
    del a; total += lambda z: z
    print(f"{a} {b}", "string", 1.5)
"""


def test_roles_of_a_source():
    found = [
        [(token, None if role == IGNORED else ROLES[role]) for token, role in zip(line.tokens, line.roles, strict=True)]
        for line in identifiers.lines("file.py", SOURCE)
    ]
    named = [" ".join(f"{token}:{role}" for token, role in line if role) for line in found]
    assert named == [
        "os:other system:other",
        "f:other a:parameter b:parameter c:parameter int:load",
        "total:store self:load x:attribute y:attribute i:load a:load key:keyword argument os:load path:attribute "
        "é:keyword argument d:keyword argument total:load",
        "a:other total:store z:parameter z:load",
        "print:load",
    ]
    assert [token for token, _ in found[-1]] == ["print", "(", "<string>", ",", "<string>", ",", "<number>", ")"]


def test_identifiers():
    data = tagger.data()
    files = [{line.file for line in part.lines} for part in (data.train, data.held_out)]
    assert files[0].isdisjoint(files[1])
    lines = [line.tokens for part in (data.train, data.held_out) for line in part.lines]
    assert len(set(lines)) == len(lines)
    rows = [[tuple(part.tokens[i, :length].tolist()) for i, length in enumerate(part.lengths)] for part in
            (data.train, data.held_out)]  # fmt: skip
    assert set(rows[1]).isdisjoint(rows[0])  # as the model sees them
    assert len(set(rows[1])) == len(rows[1])
    assert 0.05 < len(data.held_out) / len(lines) < 0.2
    known = {token for line in data.train.lines for token in line.tokens}
    assert known.issuperset(data.vocabulary[4:])
    for part in (data.train, data.held_out):
        assert part.lengths.tolist() == [len(line.tokens) for line in part.lines]
        assert (part.tokens != identifiers.PAD).sum(1).equal(part.lengths)
        for row in (0, -1):
            assert tuple(part.roles[row, : part.lengths[row]].tolist()) == part.lines[row].roles
        counted = part.roles[part.roles != IGNORED]
        shares = torch.bincount(counted, minlength=len(ROLES)) / len(counted)
        assert 0.45 < shares[ROLES.index("load")] < 0.6
        assert (shares > 0.01).all()


def test_files_come_in_the_order_of_their_names(monkeypatch):
    found, glob = identifiers.read(), Path.glob
    monkeypatch.setattr(Path, "glob", lambda *arguments: reversed([*glob(*arguments)]))
    assert identifiers.read() == found


def test_old_escapes_do_not_matter():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [line.tokens for line in identifiers.lines("file.py", 'a = "\\d"\n')] == [("a", "=", "<string>")]


def test_a_share_of_the_names_is_dropped():
    """Of the identifiers that are not "<name>" before, and of no other token."""
    train, dropped, names = tagger.data().train, 0, 0
    taken = zip(shuffled(train.lengths, tagger.ROWS, 3), tagger.SYSTEM.batches("birnn", 3), strict=False)
    for rows, (tokens, roles, _) in itertools.islice(taken, 100):
        before = train[rows][0]
        changed, could = tokens != before, (roles != IGNORED) & (before != identifiers.NAME)
        assert (tokens[changed] == identifiers.NAME).all()
        assert could[changed].all()
        dropped, names = dropped + int(changed.sum()), names + int(could.sum())
    deviation = (tagger.NAME_DROPOUT * (1 - tagger.NAME_DROPOUT) / names) ** 0.5
    assert abs(dropped / names - tagger.NAME_DROPOUT) < 4 * deviation < 0.02


def test_back_off_by_hand():
    """It takes the longest clues that were seen: open brackets and the line's first token count, where they can."""
    tokens = ("def", "del", "f", "g", "(", ")", ",", "=", ":", "pass", "a", "b", "c")
    numbers = {token: number for number, token in enumerate(tokens, identifiers.STRING + 1)}

    def part(source):
        return identifiers._part([*identifiers.lines("file.py", source)], numbers)

    train = part("def f(a, b, c=(a, b, c)): pass\ng(a, b, c, c)\n")
    start, opening, comma, closing = (numbers[token] for token in ("def", "(", ",", ")"))
    assert [clues for clues, _ in tagger.surroundings(train)][:7] == [
        (start, opening, start, 0), (opening, comma, start, 1), (comma, comma, start, 1),
        (comma, numbers["="], start, 1), (opening, comma, start, 2), (comma, comma, start, 2),
        (comma, closing, start, 2),
    ]  # fmt: skip

    def said(source):
        return [ROLES[role] for role in tagger.back_off(train, part(source))]

    assert said("def f(x, y, z=(x, y, z)): pass\n") == ["other", *["parameter"] * 3, *["load"] * 3]
    assert said("def f(x, y, z): pass\n") == ["other", *["parameter"] * 2, "load"]  # ", z)" was at another depth
    assert said("del x, y, z\n") == ["load"] * 3  # of ", y," two of three were loaded; "del" was never there


def test_baselines():
    """Each knows more than the one before."""
    found = tagger.SYSTEM.baselines()
    assert list(found) == ["majority", tagger.TOKEN, tagger.NEIGHBOURS, tagger.BACK_OFF]
    assert tagger.SYSTEM.against == tagger.BACK_OFF
    values = list(found.values())
    assert 45 < values[0] < values[1] < values[2] < 95
    assert 98.5 < values[3] < tagger.SYSTEM.target
    line = next(identifiers.lines("file.py", "a = b"))
    part = identifiers.Part(torch.empty(0), torch.empty(0), torch.empty(0), [line])
    assert list(tagger.occurrences(part)) == [("a", ("", "="), ROLES.index("store")), ("b", ("=", ""), 0)]


def test_a_broken_library_is_refused(monkeypatch):
    monkeypatch.setattr(identifiers, "read", lambda: [("file.py", SOURCE)])
    with pytest.raises(ValueError, match="standard library"):
        identifiers.load()


def test_shuffled_rows():
    lengths = torch.randint(1, 30, (203,))
    batches = list(itertools.islice(shuffled(lengths, 10, 0), 20))
    assert sorted(torch.cat(batches).tolist()) == sorted(set(torch.cat(batches).tolist()))
    again = itertools.islice(shuffled(lengths, 10, 0), 20)
    assert all(a.equal(b) for a, b in zip(batches, again, strict=True))
    assert not batches[0].equal(next(shuffled(lengths, 10, 1)))
    spread = [int(lengths[rows].max() - lengths[rows].min()) for rows in batches]
    assert sum(spread) / len(spread) < 5


@pytest.mark.parametrize("variant", tagger.SYSTEM.recipes)
def test_the_example_starts_as_its_twin(variant):
    torch.set_default_dtype(torch.float32)
    record, exhibits = runner.run(tagger.SYSTEM, variant, steps=20, memory=False)
    assert all(check["passed"] for check in record["checks"]), record["checks"]
    assert exhibits
