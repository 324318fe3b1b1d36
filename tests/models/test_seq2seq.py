"""The recurrent encoder-decoder: its twin, padding, generation, alignment, training."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import seqkern
from examples import twins
from seqkern.models import RNNEncoderDecoder
from seqkern.models.seq2seq import SourceMemory

SIZES = (7, 9, 6, 8)
BEGIN, END = 0, 1
OPTIONS: list[dict[str, Any]] = [
    {"cell": cell, "score": score, **order}
    for cell, score, order in itertools.product(
        ("gru", "lstm"),
        ("additive", "bilinear", "dot"),
        ({}, {"order": "luong"}, {"order": "luong", "input_feeding": False}),
    )
] + [{"num_layers": 2, "cell": "lstm"}, {"label_smoothing": 0.1}]


def ragged(seed: int = 0, rows: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sources of 1 to 6 letters and targets of 2 to 5 tokens."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(SIZES[0], (rows, 6), generator=generator)
    lengths = torch.tensor([6, 1, 4, 3, *[5] * rows])[:rows]
    target = torch.randint(2, SIZES[1], (rows, 5), generator=generator)
    counts = torch.tensor([4, 5, 2, 3, *[4] * rows])[:rows]
    target_in = torch.cat((torch.full((rows, 1), BEGIN), target[:, :-1]), 1)
    return source, lengths, target_in, target.masked_fill(torch.arange(5) >= counts[:, None], -100)


def models(options: dict[str, Any], wild: bool = False) -> tuple[RNNEncoderDecoder, twins.seq2seq.RNNEncoderDecoder]:
    """wild: with large parameters: a new model writes about the same whatever it reads."""
    torch.manual_seed(0)
    model = RNNEncoderDecoder(*SIZES, **options, dtype=torch.float64)
    for parameter in model.parameters() if wild else ():
        torch.nn.init.normal_(parameter) if parameter is not model.head.linear.bias else torch.nn.init.zeros_(parameter)
    twin = twins.seq2seq.RNNEncoderDecoder(*SIZES, **options).double()
    twin.load_state_dict(model.state_dict())
    return model, twin


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradients_are_the_twins(options: dict[str, Any]) -> None:
    model, twin = models(options)
    batch = ragged()
    losses = [each.loss(*batch) for each in (model, twin)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, msg=lambda text, name=name: f"{name}: {text}")
        assert theirs[name].grad.abs().sum() > 0, name  # every parameter takes part


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_padding_has_no_part_in_the_result(options: dict[str, Any]) -> None:
    model, _ = models(options)
    source, lengths, target_in, target_out = ragged()
    expected = model.loss(source, lengths, target_in, target_out)
    hidden = torch.arange(6) >= lengths[:, None]
    wide = torch.nn.functional.pad(source.masked_fill(hidden, 3), (0, 3), value=5)
    ends = torch.nn.functional.pad(target_in.masked_fill(target_out == -100, 4), (0, 2), value=6)
    out = torch.nn.functional.pad(target_out, (0, 2), value=-100)
    torch.testing.assert_close(model.loss(wide, lengths, ends, out), expected)


def full_pass(model: RNNEncoderDecoder, source: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Greedy tokens by a teacher-forced pass over everything so far, for each token."""
    tokens = torch.full((len(source), 1), BEGIN)
    done = torch.zeros(len(source), dtype=torch.bool)
    for _ in range(longest):
        token = model.logits(model(source, lengths, tokens))[:, -1].argmax(-1).masked_fill(done, END)
        done |= token == END
        tokens = torch.cat((tokens, token[:, None]), 1)
    return tokens[:, 1:]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_generation_is_the_full_pass_and_the_twins(options: dict[str, Any]) -> None:
    model, twin = models(options, wild=True)
    source, lengths, *_ = ragged(rows=8)
    found = model.translate(source, lengths, BEGIN, END, 9)
    expected = full_pass(model, source, lengths, 9)
    assert len(expected.unique()) >= 2  # not the same token all the time
    assert torch.equal(found, expected[:, : found.shape[1]])
    assert bool((expected[:, found.shape[1] :] == END).all())
    assert torch.equal(twin.translate(source, lengths, BEGIN, END, 9), found)


@pytest.mark.parametrize("options", [{}, {"order": "luong", "cell": "lstm", "score": "bilinear"}], ids=str)
def test_beams_are_those_of_each_source_alone_and_their_scores_the_losses(options: dict[str, Any]) -> None:
    model, _ = models(options)
    source, lengths, *_ = ragged(seed=3)
    wanted: dict[str, Any] = {"max_new_tokens": 6, "stop_tokens": END, "pad_token": END, "beams": 3, "sequences": 3}
    together = seqkern.generate(model.step, model.start(source, lengths), torch.full((4, 1), BEGIN), **wanted)
    assert together.scores is not None
    for row in range(4):
        some = source[row : row + 1, : int(lengths[row])], lengths[row : row + 1]
        alone = seqkern.generate(model.step, model.start(*some), torch.full((1, 1), BEGIN), **wanted)
        torch.testing.assert_close(alone.scores, together.scores[3 * row : 3 * row + 3])
        for beam in range(3):
            tokens = together.tokens[3 * row + beam, : together.lengths[3 * row + beam]]
            assert torch.equal(tokens, alone.tokens[beam, : alone.lengths[beam]])
            loss = model.loss(*some, tokens[None, :-1], tokens[None, 1:])  # the score is the mean log-probability
            torch.testing.assert_close(-loss.float(), together.scores[3 * row + beam])


def test_beams_of_a_source_share_its_memory() -> None:
    memory = SourceMemory(torch.arange(2), torch.tensor([3, 2]), (torch.arange(12.0).view(2, 3, 2),))
    memory.reorder(torch.tensor([0, 0, 1, 1]))
    before = memory.parts[0]
    assert torch.equal(before[:, 0, 0], torch.tensor([0.0, 0.0, 6.0, 6.0]))
    memory.reorder(torch.tensor([1, 0, 3, 3]))
    assert memory.parts[0] is before
    memory.reorder(torch.tensor([2, 3, 0, 1]))
    assert torch.equal(memory.parts[0][:, 0, 0], torch.tensor([6.0, 6.0, 0.0, 0.0]))
    assert memory.lengths.tolist() == [2, 2, 3, 3]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_are_a_distribution_over_the_letters_that_are_there(options: dict[str, Any]) -> None:
    model, _ = models(options)
    source, lengths, target_in, _ = ragged()
    weights = model.weights(source, lengths, target_in)
    assert weights.shape == (4, 5, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 5, dtype=torch.float64))
    assert not weights.masked_select((torch.arange(6) >= lengths[:, None])[:, None]).any()


def test_equations() -> None:
    """A step of Bahdanau's order as the docstring has it."""
    model, _ = models({})
    source, lengths, target_in, _ = ragged(rows=1)
    memory, (s, _, _) = model.encode(source, lengths)
    forward, backward = memory[:, -1, :4], memory[:, 0, 4:]
    torch.testing.assert_close(s, torch.tanh(model.bridge(torch.cat((forward, backward), -1))))
    attention: Any = model.decoder.attention
    inner = torch.tanh(attention.query_proj(s)[:, None] + memory @ attention.key_proj.weight.T)
    alpha = (inner @ attention.weight).softmax(-1)
    context = (alpha[:, :, None] * memory).sum(1)
    cell = torch.nn.GRUCell(6 + 8, 8, dtype=torch.float64)
    cell.load_state_dict(model.decoder.cell.state_dict())
    s = cell(torch.cat((model.target_embedding(target_in[:, 0]), context), -1), s)
    torch.testing.assert_close(model(source, lengths, target_in)[:, 0], torch.cat((context, s), -1))


def test_dropout_is_of_training_alone() -> None:
    torch.manual_seed(0)
    model = RNNEncoderDecoder(*SIZES, num_layers=2, dropout=0.5)
    batch = ragged()
    assert model.loss(*batch) != model.loss(*batch)
    model.eval()
    assert model.loss(*batch) == model.loss(*batch)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="cell must be one of gru, lstm, got 'rnn'"):
        RNNEncoderDecoder(*SIZES, cell="rnn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="score must be one of additive"):
        RNNEncoderDecoder(*SIZES, score="cosine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="order must be one of"):
        RNNEncoderDecoder(*SIZES, order="vaswani")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden_size must be even"):
        RNNEncoderDecoder(7, 9, 6, 5)
    model, _ = models({})
    source, lengths, target_in, _ = ragged()
    with pytest.raises(ValueError, match="prompts must have one length"):
        seqkern.generate(
            model.step, model.start(source, lengths), target_in, prompt_lengths=lengths.clamp(max=5), max_new_tokens=2
        )


@pytest.mark.parametrize("options", [{}, {"order": "luong", "cell": "lstm", "score": "dot"}], ids=str)
def test_overfits_a_batch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = RNNEncoderDecoder(7, 9, 16, 32, **options)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    source, lengths, target_in, target_out = ragged(rows=8)
    for _ in range(100):
        loss = model.loss(source, lengths, target_in, target_out)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1  # log(9) = 2.2 at the start


@pytest.mark.parametrize("score", ["additive", "bilinear", "dot"])
def test_reads_along_the_diagonal(score: Any) -> None:
    """A model that learned to copy attends to the letter that it writes."""
    torch.manual_seed(0)
    order: Any = "bahdanau" if score == "additive" else "luong"
    model = RNNEncoderDecoder(10, 10, 16, 32, score=score, order=order)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    lengths = torch.full((32,), 6)
    for _ in range(150):
        source = torch.randint(2, 10, (32, 6))
        loss = model.loss(source, lengths, torch.nn.functional.pad(source[:, :-1], (1, 0), value=BEGIN), source)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    source = torch.randint(2, 10, (32, 6))
    target_in = torch.nn.functional.pad(source[:, :-1], (1, 0), value=BEGIN)
    most = model.weights(source, lengths, target_in).argmax(-1).double()
    place = torch.arange(6.0).double()
    correlation = torch.stack([torch.corrcoef(torch.stack((row, place)))[0, 1].nan_to_num() for row in most]).mean()
    assert correlation > 0.9


def test_a_copy_is_the_same_model() -> None:
    model, _ = models({"order": "luong"})
    batch = ragged()
    assert copy.deepcopy(model).loss(*batch) == model.loss(*batch)
