"""What holds for every system: autocast, dropout at each of its places, open forget gates, sizes that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import seqkern
from examples import twins
from seqkern import models
from seqkern.generation import Chunk
from seqkern.models import (
    BERT,
    GPT,
    BERTClassifier,
    CharAwareLM,
    CNNClassifier,
    EncoderDecoder,
    GPTBlock,
    MaskedLM,
    RecurrentLM,
    RNNClassifier,
    RNNEncoderDecoder,
    SkipGram,
    Tagger,
    TransformerClassifier,
    TreeClassifier,
    ViT,
)
from seqkern.testing import ErrorReport, compare

GENERATOR = torch.Generator().manual_seed(0)
TOKENS, OTHERS = torch.randint(30, (2, 3, 11), generator=GENERATOR)
LENGTHS, LABELS = torch.tensor([11, 4, 7]), torch.tensor([2, 0, 1])
SPELT = torch.randint(15, (40, 9), generator=GENERATOR), torch.arange(40) % 9 + 1
TREES = seqkern.TreeSchedule.from_parents([-1, 0, 0, 2, -1, 4])
LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
TEXTS, PAIRS, SEQUENCES = (TOKENS, OTHERS), (TOKENS, LENGTHS, TOKENS, OTHERS), (TOKENS, LABELS, LENGTHS)
GUESSES = (TOKENS, OTHERS.masked_fill(OTHERS % 3 > 0, -100), LENGTHS)

Made = tuple[Any, Any, tuple[Any, ...]]


def made(file: str, kind: Any, *sizes: Any, batch: tuple[Any, ...], **options: Any) -> Callable[..., Made]:
    """Of a seed and more options of the model: a model, its twin and a batch."""

    def make(seed: int = 0, **more: Any) -> Made:
        torch.manual_seed(seed)
        twin = getattr(getattr(twins, file), kind.__name__)(*sizes, **options)
        model = kind(*sizes, **options, **more)
        twin.load_state_dict(model.state_dict())
        return model, twin, batch

    return make


def berts(kind: Any, *sizes: Any, batch: tuple[Any, ...], **options: Any) -> Callable[..., Made]:
    def make(seed: int = 0, **more: Any) -> Made:
        torch.manual_seed(seed)
        own = more if kind is BERTClassifier else {}
        model = kind(BERT(30, 16, 4, 2, **options, **more), *sizes, **own)
        twin = getattr(twins.bert, kind.__name__)(twins.bert.BERT(30, 16, 4, 2, **options), *sizes)
        twin.load_state_dict(model.state_dict())
        return model, twin, batch

    return make


SYSTEMS: dict[str, Callable[..., Made]] = {
    "gpt": made("gpt", GPT, 30, 16, 4, 2, batch=TEXTS),
    "gpt post-norm": made("gpt", GPT, 30, 16, 4, 2, norm_first=False, batch=TEXTS),
    "gpt llama": made("gpt", GPT, 30, 16, 4, 2, **LLAMA, batch=TEXTS),
    "lstm": made("recurrent_lm", RecurrentLM, 30, 16, 12, 2, layer_norm=True, batch=TEXTS),
    "gru": made("recurrent_lm", RecurrentLM, 30, 16, 16, 2, "gru", tie_weights=True, batch=TEXTS),
    "characters": made("char_lm", CharAwareLM, *SPELT, 30, 6, (3, 4, 5), 8, 2, batch=TEXTS),
    "bahdanau": made("seq2seq", RNNEncoderDecoder, 30, 30, 12, 16, 2, batch=PAIRS),
    "luong": made(
        "seq2seq", RNNEncoderDecoder, 30, 30, 12, 16, 2, cell="lstm", order="luong", score="dot", batch=PAIRS
    ),
    "encoder-decoder": made("encoder_decoder", EncoderDecoder, 30, 30, 16, 4, 1, 1, batch=PAIRS),
    "encoder-decoder pre-norm": made(
        "encoder_decoder", EncoderDecoder, 30, 30, 16, 4, 1, 1, norm_first=True, rotary=True, batch=PAIRS
    ),
    "tagger": made("tagger", Tagger, 30, 30, 16, 8, num_layers=2, batch=(TOKENS, OTHERS, LENGTHS)),
    "tagger transformer": made("tagger", Tagger, 30, 30, 16, 16, "transformer", batch=(TOKENS, OTHERS, LENGTHS)),
    "rnn classifier": made("classifier", RNNClassifier, 30, 3, 16, 8, batch=SEQUENCES),
    "cnn classifier": made("classifier", CNNClassifier, 30, 3, 16, 8, batch=SEQUENCES),
    "transformer classifier": made("classifier", TransformerClassifier, 30, 3, 16, 4, 2, batch=SEQUENCES),
    "tree": made(
        "tree_classifier", TreeClassifier, 30, 3, 16, 8, pool="max",
        batch=(TOKENS[0, :6], TREES, LABELS[:2], torch.tensor([4, 2])),
    ),
    "vit": made("vit", ViT, 8, 2, 3, 16, 4, 2, batch=(torch.rand(3, 1, 8, 8, generator=GENERATOR), LABELS)),
    "masked": berts(MaskedLM, batch=GUESSES),
    "bert classifier": berts(BERTClassifier, 3, "mean", norm_first=True, batch=SEQUENCES),
    "skip-gram": made("skip_gram", SkipGram, 30, 8, batch=(TOKENS[0], TOKENS[1], OTHERS[:2].reshape(11, 2))),
}  # fmt: skip


# ---- autocast -----------------------------------------------------------------------------------------------------


def trained(model: torch.nn.Module, batch: tuple[Any, ...], autocast: bool) -> tuple[Tensor, Tensor]:
    """The loss, and all gradients one after another in the order of their names."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model.loss(*batch)  # type: ignore[operator]
    loss.backward()
    grads = [parameter.grad.flatten() for _, parameter in sorted(model.named_parameters())]  # type: ignore[union-attr]
    return loss.detach(), torch.cat(grads)


@pytest.mark.parametrize("name", SYSTEMS)
def test_autocast(name: str) -> None:
    """Loss and gradients obey the error rule beside the twin's, in bfloat16's units, over draws as `check_case` has it:
    a relu that is about 0 may be open in one of the two."""
    reports: dict[str, list[ErrorReport]] = {"loss": [], "gradients": []}
    for seed in range(6):
        model, twin, batch = SYSTEMS[name](seed)
        wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in batch]
        exact = trained(copy.deepcopy(model).double(), tuple(wide), False)
        ours = trained(model, batch, True)
        # The tree's twin adds to float32 in place, which autocast does not serve: all of it in bfloat16 instead.
        theirs = trained(twin.bfloat16(), batch, False) if name == "tree" else trained(twin, batch, True)
        for what, *found in zip(reports, ours, theirs, exact, strict=True):
            reports[what].append(compare(found[0].bfloat16(), found[1].bfloat16(), found[2], name=what))
    for drawn in reports.values():
        error, bound = (sum(getattr(report, field) ** 2 for report in drawn) ** 0.5 for field in ("error", "bound"))
        assert error <= bound, [*map(str, drawn)]


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt", "gpt post-norm", "gpt llama", "lstm", "gru", "characters"])
def test_writing_under_autocast(name: str) -> None:
    """Token by token as the full pass."""
    model = SYSTEMS[name]()[0].eval()
    tokens = TOKENS[:, :6]
    exact = copy.deepcopy(model).double()

    def logits(model: Any) -> Tensor:
        hidden = model(tokens)
        found: Tensor = model.logits(hidden if isinstance(hidden, Tensor) else hidden[0])
        return found

    with torch.autocast("cpu", torch.bfloat16):
        state, found = model.start(3, 9), []
        for place in range(6):
            at, one = torch.full((3,), place), torch.ones(3, dtype=torch.int64)
            step, state = model.step(Chunk(tokens[:, place : place + 1], at, one), state)
            found.append(step)
        report = compare(torch.cat(found, 1).bfloat16(), logits(model).bfloat16(), logits(exact))
        assert report.passed, report
        written = seqkern.generate(model.step, model.start(3, 9), tokens, max_new_tokens=3)
    assert written.tokens.shape == (3, 9)


# ---- dropout ------------------------------------------------------------------------------------------------------

BLOCK = ("self_attn.dropout", "dropout.p", "dropout1.p", "dropout2.p")
CROSS = ("multihead_attn.dropout", "dropout3.p")


def under(prefix: str, names: tuple[str, ...], calls: int = 1) -> dict[str, int]:
    return {f"{prefix}.{name}": calls for name in names}


# Where each draws, and how often in a loss. The embeddings of the encoder-decoder, two of one place, are tested there.
PLACES: dict[str, dict[str, int]] = {
    "gpt": {"dropout": 1} | {f"blocks.{i}.{n}": 1 for i in range(2) for n in ("norm2.dropout", "dropout.p")},
    "gpt post-norm": {"dropout": 1}
    | {f"blocks.{i}.{n}": n != "dropout.p" for i in range(2) for n in ("norm1.dropout", "norm2.dropout", "dropout.p")},
    "lstm": {"dropout.p": 2, "rnn.dropout": 1},
    "gru": {"dropout.p": 2, "rnn.dropout": 1},
    "characters": {"dropout.p": 2, "rnn.dropout": 1},
    "bahdanau": {"dropout.p": 3, "encoder.dropout": 1},
    "luong": {"dropout.p": 3, "encoder.dropout": 1},
    "encoder-decoder": {"dropout": 1} | under("encoder.layers.0", BLOCK) | under("decoder.layers.0", BLOCK + CROSS),
    "tagger": {"dropout.p": 2},
    "tagger transformer": {"dropout.p": 2},
    "rnn classifier": {"dropout.p": 2},
    "cnn classifier": {"dropout.p": 2},
    "transformer classifier": {"dropout.p": 2},
    "tree": {"dropout.p": 1},
    "vit": {"dropout.p": 1} | under("encoder.layers.0", BLOCK) | under("encoder.layers.1", BLOCK),
    "masked": {"bert.dropout": 1} | under("bert.encoder.layers.0", BLOCK) | under("bert.encoder.layers.1", BLOCK),
    "bert classifier": {"bert.dropout": 1, "dropout.p": 1}
    | under("bert.encoder.layers.0", BLOCK)
    | under("bert.encoder.layers.1", BLOCK),
}


@pytest.mark.parametrize("name", PLACES)
def test_dropout_draws_at_each_place(name: str) -> None:
    """One place and one call of it at a time, the others at rest: training differs from evaluation."""
    model, _, batch = SYSTEMS[name](dropout=0.5)
    found: dict[str, tuple[Any, str]] = {}
    for path, module in model.named_modules():
        for attribute in ("p", "dropout"):
            if getattr(module, attribute, None) == 0.5:
                found[f"{path}.{attribute}".lstrip(".")] = module, attribute
    assert set(found) == set(PLACES[name])
    for module, attribute in found.values():
        setattr(module, attribute, 0.0)
    rest = model.eval().loss(*batch)
    assert torch.equal(model.train().loss(*batch), rest)
    for place, calls in PLACES[name].items():
        module, attribute = found[place]
        setattr(module, attribute, 0.5)
        for chosen in range(calls):
            seen: list[Tensor] = []

            def only(_: Any, given: Any, out: Tensor, seen: list[Tensor] = seen, chosen: int = chosen) -> Tensor:
                seen.append(out)
                return out if len(seen) - 1 == chosen else given[0]

            hook = module.register_forward_hook(only) if calls > 1 else None
            assert not torch.equal(model.loss(*batch), rest), (place, chosen)
            if hook is not None:
                assert len(seen) == calls, place
                hook.remove()
        setattr(module, attribute, 0.0)


# ---- beginnings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lstm", "gru", "characters", "tagger", "rnn classifier"])
def test_forget_gates_begin_open_and_no_others(name: str) -> None:
    """Of gates i, f, g, o; a GRU has none."""
    model, *_ = SYSTEMS[name]()
    rnn = model.encoder if name == "tagger" else model.rnn
    biases = {key: bias for key, bias in rnn.named_parameters() if key.startswith("bias")}
    assert biases
    for key, bias in biases.items():
        open_ = torch.arange(len(bias)) // rnn.hidden_size == 1
        open_ &= torch.tensor(key.startswith("bias_ih") and rnn.mode == "LSTM")
        assert torch.equal(bias == 1, open_), key


# ---- sizes that are refused ---------------------------------------------------------------------------------------

GOOD: dict[Any, dict[str, Any]] = {
    GPT: {"vocab_size": 30, "d_model": 12, "nhead": 2, "num_layers": 1, "dim_feedforward": 8, "max_len": 9,
          "num_kv_heads": 1},
    GPTBlock: {"d_model": 12, "nhead": 2, "dim_feedforward": 8},
    RecurrentLM: {"vocab_size": 30, "embedding_dim": 8, "hidden_size": 8, "num_layers": 1},
    CharAwareLM: {"characters": SPELT[0], "lengths": SPELT[1], "vocab_size": 30, "char_dim": 6, "filters": (3, 4),
                  "hidden_size": 8, "num_layers": 1, "highway_layers": 1},
    RNNEncoderDecoder: {"source_vocab": 30, "target_vocab": 30, "embedding_dim": 8, "hidden_size": 8, "num_layers": 1},
    EncoderDecoder: {"source_vocab": 30, "target_vocab": 30, "d_model": 12, "nhead": 2, "num_encoder_layers": 1,
                     "num_decoder_layers": 1, "dim_feedforward": 8},
    Tagger: {"vocab_size": 30, "num_tags": 3, "embedding_dim": 12, "hidden_size": 8, "num_layers": 1, "nhead": 2,
             "encoder": "transformer"},
    RNNClassifier: {"vocab_size": 30, "num_classes": 3, "embedding_dim": 8, "hidden_size": 8, "num_layers": 1},
    CNNClassifier: {"vocab_size": 30, "num_classes": 3, "embedding_dim": 8, "filters": 4},
    TransformerClassifier: {"vocab_size": 30, "num_classes": 3, "d_model": 12, "nhead": 2, "num_layers": 1,
                            "dim_feedforward": 8},
    TreeClassifier: {"vocab_size": 30, "num_classes": 3, "embedding_dim": 8, "hidden_size": 8, "slots": 2},
    ViT: {"image_size": 8, "patch_size": 2, "num_classes": 3, "d_model": 12, "nhead": 2, "num_layers": 1,
          "dim_feedforward": 8, "channels": 1},
    BERT: {"vocab_size": 30, "d_model": 12, "nhead": 2, "num_layers": 1, "dim_feedforward": 8, "max_len": 9,
           "local": 1},
    SkipGram: {"vocab_size": 30, "dim": 8},
}  # fmt: skip
BAD = [
    (kind, {name: bad}, name)
    for kind, sizes in GOOD.items()
    for name, good in sizes.items()
    if isinstance(good, int)
    for bad in (0, -2)
]
BAD += [(kind, {"nhead": 5}, "nhead must divide") for kind, sizes in GOOD.items() if "nhead" in sizes]
BAD += [
    (GPT, {"nhead": 4, "num_kv_heads": 4, "positions": "rotary"}, "d_model / nhead must be even, .* rotary"),
    (GPT, {"d_model": 15, "nhead": 5, "num_kv_heads": 5, "positions": "sinusoidal"}, "d_model must be even, .* sinus"),
    (GPTBlock, {"nhead": 4, "rotary": True}, "d_model / nhead must be even"),
    (EncoderDecoder, {"nhead": 4, "rotary": True}, "d_model / nhead must be even"),
    (EncoderDecoder, {"d_model": 15, "nhead": 5}, "d_model must be even"),
    (Tagger, {"nhead": 4}, "embedding_dim / nhead must be even"),
    (Tagger, {"embedding_dim": 15, "nhead": 5, "positions": "sinusoidal"}, "embedding_dim must be even"),
    (TransformerClassifier, {"d_model": 15, "nhead": 5}, "d_model must be even"),
    (CNNClassifier, {"widths": (2, 0)}, "widths"),
]


@pytest.mark.parametrize("kind", GOOD)
def test_the_sizes_are_good(kind: Any) -> None:
    """But for the changes below."""
    kind(**GOOD[kind])


@pytest.mark.parametrize(("kind", "change", "words"), BAD, ids=lambda value: getattr(value, "__name__", str(value)))
def test_bad_sizes_are_named(kind: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: .*{words}"):
        kind(**GOOD[kind] | change)


def test_a_classifier_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="BERTClassifier: num_classes must be at least 1, got 0"):
        BERTClassifier(BERT(30, 8, 2, 1), 0)


def test_every_system_is_here() -> None:
    modules = {getattr(models, name) for name in models.__all__ if isinstance(getattr(models, name), type)}
    assert modules == set(GOOD) | {MaskedLM, BERTClassifier}
