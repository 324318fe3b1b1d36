"""GPT and the recurrent language model: the same as their twins, causal, and they write what the full pass says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import seqkern
from examples import gpt, recurrent_lm, runner, twins
from seqkern.models import GPT, RecurrentLM

SIZES: dict[str, Any] = {"vocab_size": 30, "d_model": 16, "nhead": 4, "num_layers": 2}
GPTS: list[dict[str, Any]] = [
    {"positions": positions, "norm": norm, "norm_first": first, "activation": activation, "bias": bias}
    for (positions, bias), (norm, activation), first in itertools.product(
        (("learned", True), ("sinusoidal", True), ("rotary", False)),
        (("layer", "gelu"), ("rms", "swiglu")),
        (True, False),
    )
]  # fmt: skip
RECURRENT: list[dict[str, Any]] = [
    {"cell": cell, "num_layers": layers, "tie_weights": tied, "layer_norm": norm}
    for cell, (layers, tied, norm) in itertools.product(
        ("lstm", "gru", "rnn"), ((1, False, False), (2, True, True), (2, False, True))
    )
]


def pairs() -> list[Any]:
    """(model, twin) by what they are made of."""
    made = [pytest.param(GPT, twins.gpt.GPT, SIZES | o, id=f"gpt-{'-'.join(map(str, o.values()))}") for o in GPTS]
    sizes = {"vocab_size": 30, "embedding_dim": 12, "hidden_size": 12}
    return made + [
        pytest.param(RecurrentLM, twins.recurrent_lm.RecurrentLM, sizes | o, id="-".join(map(str, o.values())))
        for o in RECURRENT
    ]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("kind", "twin", "options"), pairs())
def test_loss_and_gradients_are_the_twins(kind: Any, twin: Any, options: dict[str, Any]) -> None:
    model, other = kind(**options, dtype=torch.float64), twin(**options).double()
    other.load_state_dict(model.state_dict())
    tokens, targets = torch.randint(30, (2, 3, 11))
    targets[0, 7:] = -100
    losses = [each.loss(tokens, targets) for each in (model, other)]
    torch.testing.assert_close(*losses, check_dtype=False)
    for loss in losses:
        loss.backward()
    theirs = dict(other.named_parameters())
    assert set(theirs) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad)


@pytest.mark.parametrize(("kind", "twin", "options"), pairs())
def test_later_tokens_change_nothing_before_them(kind: Any, twin: Any, options: dict[str, Any]) -> None:
    model = kind(**options)
    tokens = torch.randint(30, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 30
    before, after = (found if isinstance(found := model(t), torch.Tensor) else found[0] for t in (tokens, changed))
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


@torch.no_grad()
@pytest.mark.parametrize(("kind", "twin", "options"), pairs())
def test_it_writes_what_the_full_pass_finds_likeliest(kind: Any, twin: Any, options: dict[str, Any]) -> None:
    """Prompts of unequal length, token by token with the state, beside whole sequences again and again."""
    model = kind(**options, dtype=torch.float64).eval()
    prompt, lengths = torch.randint(30, (3, 6)), torch.tensor([6, 2, 4])
    state = model.start(3, 6 + 9)
    found = seqkern.generate(model.step, state, prompt, prompt_lengths=lengths, max_new_tokens=9)
    for row, length in enumerate(lengths.tolist()):
        tokens = prompt[row, :length].tolist()
        for _ in range(9):
            hidden = model(torch.tensor([tokens]))
            hidden = hidden if isinstance(hidden, torch.Tensor) else hidden[0]
            tokens.append(int(model.logits(hidden)[0, -1].argmax()))
        assert found.tokens[row, : length + 9].tolist() == tokens


def test_beams_carry_the_state_of_a_recurrent_model() -> None:
    """The best of beam search over all continuations is the best of all that there are."""
    model = RecurrentLM(4, 8, 8, dtype=torch.float64).eval()
    prompt = torch.randint(4, (1, 3))
    found = seqkern.generate(model.step, None, prompt, max_new_tokens=3, beams=16, length_penalty=0.0)
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))
    with torch.no_grad():
        texts = torch.cat([prompt.expand(64, 3), every], 1)
        logits = model.logits(model(texts[:, :-1])[0])[:, 2:]
    scores = logits.log_softmax(-1).gather(2, every[..., None]).sum((1, 2))
    assert torch.equal(found.tokens[0, 3:], every[scores.argmax()])


@pytest.mark.parametrize("kind", [GPT, RecurrentLM])
def test_dropout_is_of_training_alone(kind: Any) -> None:
    sizes = SIZES if kind is GPT else {"vocab_size": 30, "embedding_dim": 12, "hidden_size": 12, "num_layers": 2}
    model, plain = kind(**sizes, dropout=0.5), kind(**sizes)
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(30, (2, 12))
    assert not torch.equal(model.loss(tokens, tokens), plain.loss(tokens, tokens))
    assert torch.equal(model.eval().loss(tokens, tokens), plain.eval().loss(tokens, tokens))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: GPT(**SIZES, positions="none"), "positions must be learned, sinusoidal or rotary, got 'none'"),
        (lambda: GPT(**SIZES, norm="batch"), "norm must be layer or rms, got 'batch'"),
        (lambda: GPT(**SIZES, activation="cosine"), "activation must be one of"),
        (lambda: RecurrentLM(30, 8, 8, cell="elman"), "cell must be one of lstm, gru, rnn, got 'elman'"),
        (lambda: RecurrentLM(30, 8, 9, tie_weights=True), "embedding_dim = hidden_size, got 8 and 9"),
    ],
)
def test_errors_name_the_argument(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_positions_beyond_the_table_raise() -> None:
    model = GPT(**SIZES, max_len=8)
    model(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="positions has 8 rows"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_tied_weights_are_one_parameter() -> None:
    model = RecurrentLM(30, 8, 8, tie_weights=True)
    assert model.head.linear.weight is model.embedding.weight
    assert model.head.linear.bias is None
    loaded = RecurrentLM(30, 8, 8, tie_weights=True)
    loaded.load_state_dict(model.state_dict())
    assert loaded.head.linear.weight is loaded.embedding.weight


@pytest.mark.parametrize(
    ("system", "variant"),
    [(module.SYSTEM, variant) for module in (gpt, recurrent_lm) for variant in module.SYSTEM.recipes],
    ids=lambda value: getattr(value, "name", value),
)
def test_examples_train_and_agree_with_their_twins(
    system: runner.System, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gpt, recurrent_lm):
        monkeypatch.setattr(module, "ROWS", 2)
        monkeypatch.setattr(module, "CONTEXT", 128)
        monkeypatch.setattr(module, "HELD_OUT_BYTES", 1024)
    record, shown = runner.run(system, variant, steps=20, memory=False)
    assert [check["passed"] for check in record["checks"]] == [True]
    losses = record["seeds"][0]["runs"]["seqkern"]["losses"]
    assert losses[-1] < losses[0] - 1
    assert len("".join(piece for piece, _ in shown[0].text or ())) > 100
