"""The Transformer with an encoder and a decoder: its twin, padding, generation with caches, training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import seqkern
from examples import twins
from seqkern.models import EncoderDecoder

SIZES = (7, 9, 8, 2, 2, 3)
BEGIN, END = 0, 1
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_first": True},
    {"tie_weights": True},
    {"rotary": True},
    {"norm_first": True, "rotary": True, "tie_weights": True, "dim_feedforward": 12, "label_smoothing": 0.1},
]


@pytest.fixture
def in_float64() -> Iterator[None]:
    """The twins make their positions in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def ragged(seed: int = 0, rows: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sources of 1 to 6 letters and targets of 2 to 5 tokens."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(SIZES[0], (rows, 6), generator=generator)
    lengths = torch.tensor([6, 1, 4, 3, *[5] * rows])[:rows]
    target = torch.randint(2, SIZES[1], (rows, 5), generator=generator)
    counts = torch.tensor([4, 5, 2, 3, *[4] * rows])[:rows]
    target_in = torch.cat((torch.full((rows, 1), BEGIN), target[:, :-1]), 1)
    return source, lengths, target_in, target.masked_fill(torch.arange(5) >= counts[:, None], -100)


def models(options: dict[str, Any], wild: bool = False) -> tuple[EncoderDecoder, twins.encoder_decoder.EncoderDecoder]:
    """wild: with large matrices: a new model writes about the same whatever it reads."""
    torch.manual_seed(0)
    model = EncoderDecoder(*SIZES, **options, dtype=torch.float64)
    for parameter in model.parameters() if wild else ():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter)
    twin = twins.encoder_decoder.EncoderDecoder(*SIZES, **options).double()
    twin.load_state_dict(model.state_dict())
    return model, twin


@pytest.mark.usefixtures("in_float64")
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


def full_pass(model: EncoderDecoder, source: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Greedy tokens by a teacher-forced pass over everything so far, for each token."""
    tokens = torch.full((len(source), 1), BEGIN)
    done = torch.zeros(len(source), dtype=torch.bool)
    for _ in range(longest):
        token = model.logits(model(source, lengths, tokens))[:, -1].argmax(-1).masked_fill(done, END)
        done |= token == END
        tokens = torch.cat((tokens, token[:, None]), 1)
    return tokens[:, 1:]


@pytest.mark.usefixtures("in_float64")
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


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_beams_are_those_of_each_source_alone_and_their_scores_the_losses(options: dict[str, Any]) -> None:
    model, _ = models(options)
    source, lengths, *_ = ragged(seed=3)
    wanted: dict[str, Any] = {"max_new_tokens": 6, "stop_tokens": END, "pad_token": END, "beams": 3, "sequences": 3}
    together = seqkern.generate(model.step, model.start(source, lengths, 7), torch.full((4, 1), BEGIN), **wanted)
    assert together.scores is not None
    for row in range(4):
        some = source[row : row + 1, : int(lengths[row])], lengths[row : row + 1]
        alone = seqkern.generate(model.step, model.start(*some, 7), torch.full((1, 1), BEGIN), **wanted)
        torch.testing.assert_close(alone.scores, together.scores[3 * row : 3 * row + 3])
        for beam in range(3):
            tokens = together.tokens[3 * row + beam, : together.lengths[3 * row + beam]]
            assert torch.equal(tokens, alone.tokens[beam, : alone.lengths[beam]])
            loss = model.loss(*some, tokens[None, :-1], tokens[None, 1:])  # the score is the mean log-probability
            torch.testing.assert_close(-loss.float(), together.scores[3 * row + beam])


def test_prompts_of_different_lengths() -> None:
    """A target's beginning that is given: each row goes on as it does alone."""
    model, _ = models({"norm_first": True, "rotary": True}, wild=True)
    source, lengths, target_in, _ = ragged()
    counts = torch.tensor([3, 1, 5, 2])
    together = seqkern.generate(
        model.step, model.start(source, lengths, 9), target_in, prompt_lengths=counts, max_new_tokens=4
    )
    for row, count in enumerate(counts.tolist()):
        some = source[row : row + 1], lengths[row : row + 1]
        alone = seqkern.generate(
            model.step, model.start(*some, 9), target_in[row : row + 1, :count], max_new_tokens=4
        )  # fmt: skip
        assert torch.equal(together.tokens[row, : count + 4], alone.tokens[0])


@pytest.mark.parametrize("layer", [0, -1])
def test_weights_are_a_distribution_over_the_letters_that_are_there(layer: int) -> None:
    model, _ = models({"norm_first": True})
    source, lengths, target_in, _ = ragged()
    weights = model.weights(source, lengths, target_in, layer)
    assert weights.shape == (4, 5, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 5, dtype=torch.float64))
    assert not weights.masked_select((torch.arange(6) >= lengths[:, None])[:, None]).any()
    rows = torch.tensor([3, 0])
    torch.testing.assert_close(model.weights(source, lengths, target_in, layer, rows), weights[:, rows])
    assert not model.decoder.layers[layer].multihead_attn._forward_pre_hooks


def test_dropout_is_of_training_alone() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(*SIZES, dropout=0.5)
    batch = ragged()
    assert model.loss(*batch) != model.loss(*batch)
    model.eval()
    assert model.loss(*batch) == model.loss(*batch)


def test_dropout_of_both_embeddings() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(*SIZES, dropout=0.5)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.eval()
    source, lengths, target_in, _ = ragged()
    memory = model.encode(source, lengths)
    assert not torch.equal(memory, model.encode(source, lengths))
    once, again = (model._decode(target_in, memory, lengths) for _ in range(2))
    assert not torch.equal(once, again)


def test_layers_start_at_their_own_numbers() -> None:
    model, _ = models({})
    first, second, third = model.decoder.layers
    for other in (second, third):
        assert not torch.equal(first.linear1.weight, other.linear1.weight)


def test_tied_weights_are_one() -> None:
    model, _ = models({"tie_weights": True})
    assert model.head.linear.weight is model.target_embedding.weight
    assert model.head.linear.bias is None


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="d_model must be even"):
        EncoderDecoder(7, 9, 5, 1, 1, 1)
    with pytest.raises(ValueError, match="nhead must divide d_model"):
        EncoderDecoder(7, 9, 8, 3, 1, 1)
    with pytest.raises(ValueError, match="label_smoothing"):
        EncoderDecoder(7, 9, 8, 2, 1, 1, label_smoothing=2.0)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_overfits_a_batch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(7, 9, 32, 4, 1, 1, **options)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    batch = ragged(rows=8)
    for _ in range(100):
        loss = model.loss(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1  # log(9) = 2.2 at the start
