"""The trees of functions: tokens and names by hand, masks, splits, binary trees, subtrees left out, batches."""

import ast
import warnings
import zlib
from pathlib import Path

import pytest
import torch

from examples import tree_classifier
from examples.data import functions
from examples.data.functions import Function
from seqkern import TreeSchedule


@pytest.fixture(scope="module")
def data():
    return tree_classifier.data()


def tree_of(source):
    (function,) = ast.parse(source).body
    return functions.tree(function)


def test_a_tree_by_hand():
    source = 'def get_it(self, n=0):\n    """Gets it."""\n    total = self.data + n\n    return total is not None\n'
    parents, tokens = tree_of(source)
    assert list(zip(parents, tokens, strict=True)) == [
        (-1, "FunctionDef"),
        (0, "arguments"),
        (1, "arg:self"),
        (1, "arg"),
        (1, "Constant:0"),
        (0, "Assign"),
        (5, "Name.Store:local"),
        (5, "BinOp.Add"),
        (7, "Attribute:data"),
        (8, "Name:self"),
        (7, "Name:parameter"),
        (0, "Return"),
        (11, "Compare.IsNot"),
        (12, "Name:local"),
        (12, "Constant:None"),
    ]


def test_the_name_is_masked():
    """The function's own name, as its decorator's or namesake's too, does not come into the tree; others do."""
    source = "@prop.close\ndef close(self):\n close(self)\n super().close()\n self.open()\n return 'x', 7, True\n"
    _, tokens = tree_of(source)
    assert not any("close" in token for token in tokens)
    assert tokens.count("Attribute:<own>") == 2
    assert tokens.count("Name:<own>") == 1
    for token in ("Attribute:open", "Name:super", "Name:global", "Constant:str", "Constant:int", "Constant:True"):
        assert token in tokens


def test_docstrings_alone_are_left_out():
    with_one, without = tree_of("def f():\n    'Text.'\n    return 1"), tree_of("def f():\n    return 1")
    assert with_one == without
    assert len(tree_of("def f():\n    return 1\n    'Text.'")[0]) == len(without[0]) + 2


def test_the_largest():
    assert len(tree_of("def f():\n" + "    pass\n" * (functions.LARGEST - 2))[0]) == functions.LARGEST
    assert tree_of("def f():\n" + "    pass\n" * (functions.LARGEST - 1)) is None


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("__init__", "init"), ("getData", "get"), ("get_data", "get"), ("HTTPServer", "http"), ("_", ""),
        ("_GetItem", "get"), ("isatty", "isatty"), ("do_GET", "do"),
    ],
)  # fmt: skip
def test_first_words(name, word):
    assert functions.first_word(name) == word


def test_parts(data):
    """Files are on one side, functions are distinct, sizes and labels are what they say."""
    files = {}
    distinct = {}
    for name, numbers in functions.PARTS.items():
        part = getattr(data, name)
        files[name] = {function.file for function in part}
        assert len(part) > 400
        assert all(zlib.crc32(file.encode()) % functions.SHARES in numbers for file in files[name])
        for function in part:
            assert 1 <= len(function) <= functions.LARGEST
            assert function.parents[0] == -1
            assert all(parent < node for node, parent in enumerate(function.parents))
            assert data.words[function.label] == functions.first_word(function.name)
            assert all(0 <= token < len(data.vocabulary) for token in function.tokens)
            assert not function.file.startswith(("encodings/", "test/"))
        distinct[name] = [(*f.parents, *f.tokens) for f in part]
    assert len(set.union(*files.values())) == sum(map(len, files.values()))
    assert not set(distinct["held_out"]) & {*distinct["train"], *distinct["tuning"]}
    assert len({(f.label, *f.parents, *f.tokens) for f in data.held_out}) == len(data.held_out)
    assert len(set(data.words)) == functions.CLASSES
    assert data.words[:2] == ["init", "get"]


def test_the_vocabulary_is_the_training_parts(data):
    """Every number but that of the unknown is used there; rare attributes are not in it, frequent ones are."""
    used = {token for function in data.train for token in function.tokens}
    assert used == set(range(1, len(data.vocabulary)))
    assert {"Attribute", "Attribute:append", "Attribute:<own>", "Name:self"} <= set(data.vocabulary)
    assert len(data.vocabulary) < 400


def test_loads_the_same_again(data, monkeypatch):
    """In whatever order files are found; where warnings, as of old escapes in strings, are errors too."""
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda *arguments: reversed([*rglob(*arguments)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(functions, "files", lambda files=functions.files: [*files(), ("z.py", b's = "\\d"\n')])
        assert functions.load() == data


def test_trees_that_are_alike_as_numbers_are_held_out_once(monkeypatch):
    """`.one`, `.two` and `.three` are rare: the first two trees are one to a model. `open` is another word's."""
    names = {"train": "train.py", "tuning": "tuned.py", "held_out": "unseen.py"}
    shares = {name: zlib.crc32(file.encode()) % functions.SHARES for name, file in names.items()}
    assert len(set(shares.values())) == 3
    monkeypatch.setattr(functions, "PARTS", {name: [share] for name, share in shares.items()})
    monkeypatch.setattr(functions, "FILES", (0, 9))
    monkeypatch.setattr(functions, "DISTINCT", (0, 99))
    monkeypatch.setattr(functions, "KEPT", (0, 99))
    sources = {
        "train": "def get(self):\n return self.one\ndef close(self):\n self.one()\ndef open(self): pass\n",
        "tuning": "def get(self):\n return self.four()\n",
        "held_out": "def get_two(self):\n return self.two\ndef get(self):\n return self.four2()\n"
        "def close(self):\n return self.one\ndef get_it(self):\n return [self.two]\n"
        "def get_this(self):\n return [self.three]\ndef close_it(self):\n return [self.two]\n",
    }
    monkeypatch.setattr(functions, "files", lambda: [(names[part], text.encode()) for part, text in sources.items()])
    found = functions.load()
    assert [len(found.train), len(found.tuning)] == [3, 1]
    assert [function.name for function in found.held_out] == ["get_it", "close_it"]


def test_missing_files(monkeypatch):
    monkeypatch.setattr(functions, "files", lambda: iter([("one.py", b"def get(): pass")]))
    with pytest.raises(RuntimeError, match="350 to 900 files was expected, got 1: is"):
        functions.load()


def test_left_child_right_sibling():
    #   0          0
    #  /|\        /
    # 1 4 5  ->  1 - 4 - 5
    # |\         |
    # 2 3        2 - 3
    parents, slots = functions.left_child_right_sibling([-1, 0, 1, 1, 0, 0])
    assert parents == [-1, 0, 1, 2, 1, 4]
    assert slots == [0, 0, 0, 1, 1, 1]


def test_binary_trees_keep_everything(data):
    """From the binary tree the parents come back: up the right slots, then up a left one."""
    for function in data.held_out[:50]:
        parents, slots = functions.left_child_right_sibling(function.parents)
        for node in range(1, len(function)):
            at = node
            while slots[at] == 1:
                at = parents[at]
            assert parents[at] == function.parents[node]
        assert TreeSchedule.from_parents(parents, slots=slots).slots <= 2


def test_subtrees_are_left_out_with_all_below():
    tree = Function("", "", [-1, 0, 1, 1, 0, 4], [7, 6, 5, 4, 3, 2], 0, "")
    above = {6: 7, 5: 6, 4: 6, 3: 7, 2: 3}
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        parents, tokens = functions.pruned(tree, 0.3, generator)
        assert tokens == [token for token in tree.tokens if token in tokens]
        assert all(tokens[parents[node]] == above[tokens[node]] for node in range(1, len(tokens)))
        seen.add(tuple(tokens))
    assert {(7,), (7, 6, 5, 4, 3, 2)} <= seen
    assert functions.pruned(tree, 0.0, generator) == (tree.parents, tree.tokens)


@pytest.mark.parametrize("binary", [False, True])
def test_batch(data, binary):
    chosen = data.train[:7]
    tokens, schedule, labels, lengths = functions.batch(chosen, binary)
    assert lengths.tolist() == [len(function) for function in chosen]
    assert labels.tolist() == [function.label for function in chosen]
    assert tokens.tolist() == [token for function in chosen for token in function.tokens]
    assert schedule.nodes == len(tokens)
    assert schedule.roots.tolist() == [0, *lengths.cumsum(0)[:-1].tolist()]
    assert binary == (schedule.slots <= 2)


def test_bags():
    function = Function("", "", [-1, 0, 0], [2, 1, 2], 0, "")
    found = functions.bags([function], 4)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0, 2.0, 0.0]], dtype=torch.float64).log1p())
