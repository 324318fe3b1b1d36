"""The character-aware language model: its twin, words read once, padding, generation, training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import seqkern
from examples import char_lm as example
from examples import runner, twins
from seqkern.models import CharAwareLM

WORDS, VOCABULARY = 40, 30
OPTIONS: list[dict[str, Any]] = [{}, {"num_layers": 2}, {"highway_layers": 2}, {"num_characters": 20}]


def spelt() -> tuple[Tensor, Tensor]:
    """Words of 1 to 9 characters, with numbers that are not 0 behind them too: nothing may read those."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.cat([torch.arange(1, 10), torch.randint(1, 10, (WORDS - 9,), generator=generator)])
    return torch.randint(15, (WORDS, 9), generator=generator), lengths


def models(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[CharAwareLM, Any]:
    torch.manual_seed(0)
    arguments = (*spelt(), VOCABULARY, 6, (3, 4, 5, 2), 8)
    model = CharAwareLM(*arguments, **options, dtype=dtype)
    twin = twins.char_lm.CharAwareLM(*arguments, **options).to(dtype)
    twin.load_state_dict(model.state_dict())
    return model, twin


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (3, 11), generator=generator)
    targets = torch.randint(VOCABULARY, (3, 11), generator=generator)
    targets[1, 6:] = -100
    return words, targets


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradients_are_the_twins(options: dict[str, Any]) -> None:
    versions = models(options)
    losses = [version.loss(*batch()) for version in versions]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(versions[0].named_parameters(), versions[1].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_words_are_read_once_and_each_as_if_alone() -> None:
    model, _ = models({})
    words = torch.tensor([[3, 17, 3], [39, 17, 3]])
    read = []
    whole = model.encode
    model.encode = lambda *arguments: read.append(len(arguments[0])) or whole(*arguments)  # type: ignore[func-returns-value]
    vectors = model.word_vectors(words)
    assert read == [3]
    alone = [whole(model.characters[w, None, : model.lengths[w]], model.lengths[w, None]) for w in words.flatten()]
    torch.testing.assert_close(vectors.flatten(0, 1), torch.cat(alone))


def test_characters_behind_a_word_do_not_matter() -> None:
    model, twin = models({})
    before = model.word_vectors(torch.arange(WORDS))
    behind = torch.arange(9) >= model.lengths[:, None]
    model.characters[behind] = 0
    torch.testing.assert_close(model.word_vectors(torch.arange(WORDS)), before)
    torch.testing.assert_close(twin.encode(*spelt()), before)


def test_states_do_not_depend_on_padding() -> None:
    model, _ = models({"num_layers": 2})
    words, lengths = batch()[0], torch.tensor([11, 4, 1])
    hidden, _ = model(words, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(hidden[row : row + 1, :length], model(words[row : row + 1, :length])[0])


def test_greedy_words_are_the_full_passs() -> None:
    model, _ = models({"num_layers": 2})
    for parameter in model.parameters():  # a new model writes about the same whatever it reads
        torch.nn.init.normal_(parameter)
    prompt = batch()[0][:, :4]
    with torch.no_grad():
        found = seqkern.generate(model.step, model.start(3, 12), prompt, max_new_tokens=8).tokens
        best = model.logits(model(found)[0]).argmax(-1)
    assert torch.equal(found[:, 4:], best[:, 3:-1])
    assert len(found[:, 4:].unique()) > 1


@pytest.mark.parametrize("layers", [1, 2])
def test_beams_carry_the_state(layers: int) -> None:
    """The best of beam search over all continuations is the best of all that there are."""
    torch.manual_seed(0)
    model = CharAwareLM(*(t[:4] for t in spelt()), 4, 6, (3, 4, 5), 8, layers, dtype=torch.float64).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    prompt = torch.randint(4, (1, 3))
    found = seqkern.generate(model.step, model.start(1, 6), prompt, max_new_tokens=3, beams=16, length_penalty=0.0)
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))
    with torch.no_grad():
        texts = torch.cat([prompt.expand(64, 3), every], 1)
        logits = model.logits(model(texts[:, :-1])[0])[:, 2:]
    scores = logits.log_softmax(-1).gather(2, every[..., None]).sum((1, 2))
    assert torch.equal(found.tokens[0, 3:], every[scores.argmax()])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"lengths": torch.ones(WORDS - 1)}, "lengths"),
        ({"characters": torch.ones(WORDS)}, "characters"),
        ({"vocab_size": WORDS + 1}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"filters": ()}, "filters"),
        ({"filters": (3, 0)}, "filters"),
        ({"lengths": torch.arange(WORDS) % 9}, "lengths must be from 1 to 9, .* got 0 to 8"),
        ({"lengths": torch.arange(WORDS) % 10 + 1}, "lengths must be from 1 to 9, .* got 1 to 10"),
        ({"characters": spelt()[0] - 1}, "characters must be at least 0, got -1"),
        ({"num_characters": 14}, "num_characters must be at least 15, the table's, got 14"),
        ({"num_characters": 0}, "num_characters must be at least 15"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], name: str) -> None:
    characters, lengths = spelt()
    sizes: dict[str, Any] = {"vocab_size": 30, "char_dim": 6, "filters": (3, 4), "hidden_size": 8}
    with pytest.raises(ValueError, match=name):
        CharAwareLM(**{"characters": characters, "lengths": lengths} | sizes | change)


def test_overfits_a_batch() -> None:
    torch.manual_seed(0)
    model = CharAwareLM(*spelt(), VOCABULARY, 8, (16, 16, 16), 32)
    words, targets = batch()
    targets = targets.where(targets < 0, model.lengths[words])  # as the words' spelling tells
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(100):
        loss = model.loss(words, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.loss(words, targets).item() < 0.1


def test_spellings_have_a_beginning_and_an_end() -> None:
    table, lengths = example.spelt(["if", "a" * 50])
    numbers = example.alphabet()
    assert table[0, :4].tolist() == [1, numbers["i"], numbers["f"], 2]
    assert lengths.tolist() == [4, example.LONGEST_WORD + 2]
    assert table[1].tolist() == [1, *[numbers["a"]] * example.LONGEST_WORD, 2]


@pytest.mark.parametrize("variant", ["chars", "words"])
def test_a_short_training_passes_its_checks(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example.SYSTEM, "baselines", lambda: {"unigram": 300.0})  # tested with the loader
    record, exhibits = runner.run(example.SYSTEM, variant, steps=20, twin=True, memory=False)
    assert [check["name"] for check in record["checks"] if not check["passed"]] == []
    assert exhibits
