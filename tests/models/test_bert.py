"""BERT: masks, its twin, padding, attention maps, training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from examples import bert as example
from examples import bert_classifier, runner, twins
from seqkern.models import BERT, BERTClassifier, MaskedLM, mask_tokens

SIZES: dict[str, Any] = {"vocab_size": 30, "d_model": 16, "nhead": 2, "num_layers": 3, "max_len": 12}
OPTIONS: list[dict[str, Any]] = [{}, {"norm_first": True}, {"local": 2}, {"local": 1, "norm_first": True}]
LENGTHS = torch.tensor([12, 1, 7, 3])


def models(options: dict[str, Any], kind: str = "mlm", pool: Any = "first") -> tuple[Any, Any]:
    torch.manual_seed(0)
    ours = BERT(**SIZES, **options, dtype=torch.float64)
    theirs = twins.bert.BERT(**SIZES, **options)
    if kind == "mlm":
        model: Any = MaskedLM(ours)
        twin: Any = twins.bert.MaskedLM(theirs)
        torch.nn.init.normal_(model.bias)
    else:
        model, twin = BERTClassifier(ours, 5, pool), twins.bert.BERTClassifier(theirs, 5, pool)
    twin.double().load_state_dict(model.state_dict())
    return model, twin


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(4, 30, (4, 12))
    inputs, targets = mask_tokens(tokens, LENGTHS, torch.Generator().manual_seed(0), 30, 2, 0.4, specials=4)
    return inputs, targets, LENGTHS


def agree(model: Any, twin: Any, arguments: tuple[Tensor, ...]) -> None:
    losses = [version.loss(*arguments) for version in (model, twin)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_masked_loss_and_gradients_are_the_twins(options: dict[str, Any]) -> None:
    agree(*models(options), batch())


@pytest.mark.parametrize("pool", ["first", "mean"])
@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
def test_classifiers_loss_and_gradients_are_the_twins(options: dict[str, Any], pool: str) -> None:
    tokens, _, lengths = batch()
    agree(*models(options, "classifier", pool), (tokens, torch.tensor([0, 4, 2, 2]), lengths))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_are_the_twins_and_do_not_depend_on_padding(options: dict[str, Any]) -> None:
    model, twin = models(options)
    inputs, _, lengths = batch()
    real = torch.arange(12) < lengths[:, None]
    found = model(inputs, lengths, real)
    torch.testing.assert_close(found, twin(inputs, lengths, real))
    torch.testing.assert_close(found, model(inputs, lengths)[real])
    torch.testing.assert_close(found, model(inputs.where(real, 7), lengths, real))
    alone = [model(row[None, :length])[0] for row, length in zip(inputs, lengths.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.cat(alone))


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_classes_do_not_depend_on_padding(pool: str) -> None:
    model, _ = models({}, "classifier", pool)
    tokens, _, lengths = batch()
    alone = [model(row[None, :length]) for row, length in zip(tokens, lengths.tolist(), strict=True)]
    torch.testing.assert_close(model(tokens, lengths), torch.cat(alone))


def test_every_token_sees_both_sides_and_local_blocks_near_ones() -> None:
    tokens = torch.randint(30, (1, 12))
    for local, reach in ((None, 12), (2, 2)):
        torch.manual_seed(0)
        model = BERT(**SIZES | {"num_layers": 1}, local=local, dtype=torch.float64)
        other = tokens.clone()
        other[0, 5] = (tokens[0, 5] + 1) % 30
        changed = (model(tokens) != model(other)).any(-1)[0]
        assert changed.tolist() == [abs(place - 5) <= reach for place in range(12)]


def test_attention_weights_are_those_of_the_layer() -> None:
    model, _ = models({"local": 1})
    tokens, _, lengths = batch()
    near, far = (model.bert.attention_weights(tokens, lengths, layer) for layer in (0, 1))
    assert far.shape == (4, 2, 12, 12)
    real = torch.arange(12) < lengths[:, None]
    for weights in (near, far):
        torch.testing.assert_close(weights.sum(-1)[:, 0][real], torch.ones(int(real.sum()), dtype=torch.float64))
        assert weights[2, :, :7, 7:].count_nonzero() == 0  # no key behind the length
    assert near[0, :, 0, 2:].count_nonzero() == 0
    assert (far[0] > 0).all()
    assert not model.bert.encoder.layers[0].self_attn._forward_pre_hooks


def test_masks_follow_the_recipe() -> None:
    tokens = torch.randint(4, 100, (500, 200))
    lengths = torch.randint(50, 200, (500,))
    tokens[:, 3] = 1  # a special
    found = [mask_tokens(tokens, lengths, torch.Generator().manual_seed(0), 100, 2, specials=4) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    inputs, targets = found[0]
    chosen = targets != -100
    assert not (chosen & (torch.arange(200) >= lengths[:, None])).any()
    assert not chosen[:, 3].any()
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    able = (tokens >= 4) & (torch.arange(200) < lengths[:, None])
    count = int(chosen.sum())

    def near(share: float, probability: float, draws: int) -> bool:
        return abs(share - probability) < 5 * (probability * (1 - probability) / draws) ** 0.5

    assert near(count / int(able.sum()), 0.15, int(able.sum()))
    masked, kept = inputs[chosen] == 2, inputs[chosen] == tokens[chosen]
    assert near(masked.double().mean().item(), 0.8, count)
    assert near(kept.double().mean().item(), 0.1 + 0.1 / 96, count)  # a random one may be the same
    assert inputs[chosen][~masked].min() >= 4


def test_rows_that_are_not_masked_have_no_part_in_the_loss() -> None:
    model, _ = models({})
    inputs, targets, lengths = batch()
    logits = model(inputs, lengths).log_softmax(-1)
    chosen = targets != -100
    expected = -logits[chosen].gather(1, targets[chosen][:, None]).mean()
    torch.testing.assert_close(model.loss(inputs, targets, lengths), expected)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: BERT(10, 8, 2, 1, max_len=0), "max_len"),
        (lambda: BERT(10, 8, 2, 1, local=0), "local"),
        (lambda: BERTClassifier(BERT(10, 8, 2, 1), 3, pool="last"), "pool"),  # type: ignore[arg-type]
        (lambda: mask_tokens(torch.ones(1, 1).long(), torch.ones(1), torch.Generator(), 9, 2, 1.5), "share"),
        (lambda: mask_tokens(torch.ones(1, 1).long(), torch.ones(1), torch.Generator(), 9, 2, specials=9), "specials"),
        (lambda: mask_tokens(torch.ones(1, 1).long(), torch.ones(1), torch.Generator(), 9, 9), "mask_token must"),
        (lambda: mask_tokens(torch.ones(1, 1).long(), torch.ones(1), torch.Generator(), 9, -1), "mask_token must"),
    ],
)
def test_bad_arguments_are_named(call: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        call()


def test_a_loss_of_nothing_is_nan() -> None:
    model, _ = models({})
    inputs, targets, lengths = batch()
    assert model.loss(inputs, torch.full_like(targets, -100), lengths).isnan()


def test_texts_beyond_the_table_of_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="12 rows"):
        BERT(**SIZES)(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["mlm", "classifier"])
def test_overfits_a_batch(kind: str) -> None:
    model, _ = models({}, kind)
    inputs, targets, lengths = batch()
    arguments = (inputs, targets if kind == "mlm" else torch.tensor([0, 4, 2, 1]), lengths)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        loss = model.loss(*arguments)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.loss(*arguments).item() < 0.1


def test_baselines_count_what_stands_between_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training text: "ababac", so that a b follows a more often, and between a and a there is b or nothing."""
    letters = [*example.SPECIALS, "a", "b", "c"]
    train = torch.tensor([4, 5, 4, 5, 4, 6])
    inputs, targets = torch.tensor([[4, 2, 4, 2, 2]]), torch.tensor([[-100, 5, -100, 6, 4]])
    monkeypatch.setattr(example, "alphabet", lambda: letters)
    monkeypatch.setattr(example, "train_rows", lambda: [train])
    monkeypatch.setattr(example, "held_out_batches", lambda: [(inputs, targets, torch.tensor([5]))])
    assert example.guesses_by_context([()]) == pytest.approx(100 / 3)  # a, a, a
    assert example.guesses_by_context([(-1,)]) == pytest.approx(100 / 3)  # b, b, none
    assert example.guesses_by_context([(-1,), ()]) == pytest.approx(200 / 3)  # b, b, a


@pytest.mark.parametrize(
    ("system", "variant"),
    [(example.SYSTEM, "mlm"), (bert_classifier.SYSTEM, "first"), (bert_classifier.SYSTEM, "mean")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_short_training_passes_its_checks(system: runner.System, variant: str) -> None:
    record, exhibits = runner.run(system, variant, steps=20, twin=True, memory=False)
    assert [check["name"] for check in record["checks"] if not check["passed"]] == []
    assert exhibits
