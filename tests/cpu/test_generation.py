"""generate: against transformers' greedy and beam search on the same model, against loops, whatever the state is."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

import seqkern
from seqkern._beam_search import _in_place
from seqkern._states import chosen_rows

INFINITY = math.inf
VOCABULARY = 40


def prompts(rows=3, width=5, seed=0):
    return torch.randint(VOCABULARY, (rows, width), generator=torch.Generator().manual_seed(seed))


def table(seed=0, scale=2.0):
    return scale * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def follow(logits):
    """A step whose logits depend on the last token alone."""
    return lambda chunk, state: (logits[chunk.tokens], state)


# ---- models: of transformers, recurrent, and with caches ----------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1,
        initializer_range=0.4,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def of_transformers(model):
    def step(chunk, cache):
        made = model(chunk.tokens, past_key_values=cache, use_cache=True)
        return made.logits, made.past_key_values

    return step


class Recurrent(nn.Module):
    def __init__(self, kind, width=24, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.rnn = getattr(seqkern.nn, kind)(width, width, layers, batch_first=True)
        nn.init.normal_(self.embedding.weight)
        for weight in self.rnn.parameters():
            nn.init.normal_(weight, std=0.5)

    def forward(self, tokens):
        return self.rnn(self.embedding(tokens))[0] @ self.embedding.weight.t()

    def step(self, chunk, state):
        lengths = chunk.lengths if chunk.tokens.shape[1] > 1 else None
        output, state = self.rnn(self.embedding(chunk.tokens), state, lengths=lengths)
        return output @ self.embedding.weight.t(), state


class Decoder(nn.Module):
    """A causal transformer with rotary embeddings, on the library's layers and caches."""

    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        rope = seqkern.nn.RotaryEmbedding(width // heads)
        layer = seqkern.nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, rope=rope)
        self.layers = seqkern.nn.TransformerEncoder(layer, layers)
        nn.init.normal_(self.embedding.weight)

    def forward(self, tokens):
        return self.layers(self.embedding(tokens), is_causal=True) @ self.embedding.weight.t()

    def caches(self, rows, longest, pages=None):
        return [layer.self_attn.make_cache(rows, longest, pages=pages) for layer in self.layers.layers]

    def step(self, chunk, caches):
        hidden = self.layers(self.embedding(chunk.tokens), caches=caches)
        for cache in caches:
            cache.lengths = chunk.positions + chunk.lengths
        return hidden @ self.embedding.weight.t(), caches


def build(kind):
    torch.manual_seed(1)
    return (Decoder() if kind == "decoder" else Recurrent(kind)).eval()


def start(model, rows, longest=64, pages=None):
    return model.caches(rows, longest, pages) if isinstance(model, Decoder) else None


def by_whole(model, prompt, count, stops=()):
    """Greedily, by a call of the whole model for each token of one sequence."""
    tokens = prompt.tolist()
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] in stops:
            break
    return tokens


# ---- greedily -----------------------------------------------------------------------------------------------------


def test_greedy_as_transformers(gpt2):
    prompt = prompts()
    theirs = {
        "attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False, "eos_token_id": 18,
        "pad_token_id": 2,
    }  # fmt: skip
    ours = {"max_new_tokens": 20, "stop_tokens": 18, "pad_token": 2}
    step = of_transformers(gpt2)
    found = seqkern.generate(step, None, prompt, **ours)
    assert torch.equal(found.tokens, gpt2.generate(prompt, **theirs))
    assert found.lengths.unique().numel() > 1
    for more in ({"repetition_penalty": 1.4}, {"min_new_tokens": 9}):
        other = seqkern.generate(step, None, prompt, **ours, **more)
        assert torch.equal(other.tokens, gpt2.generate(prompt, **theirs, **more))
        assert other.tokens.tolist() != found.tokens.tolist()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "decoder"])
@torch.no_grad()
def test_prompts_of_different_lengths(kind):
    """Each row's tokens are those of its prompt alone, by the whole model; what pads a prompt is not seen."""
    model, prompt, lengths = build(kind), prompts(4, 7), torch.tensor([7, 1, 4, 6])
    stops = {by_whole(model, prompt[1, :1], 5)[-1]}  # what comes after some tokens
    expected = [by_whole(model, row[:n], 12, stops) for row, n in zip(prompt, lengths.tolist(), strict=True)]
    for fill in (0, 39):
        padded = torch.where(torch.arange(7) < lengths[:, None], prompt, fill)
        ours = seqkern.generate(
            model.step, start(model, 4), padded, prompt_lengths=lengths, max_new_tokens=12, stop_tokens=[*stops],
            pad_token=2,
        )  # fmt: skip
        for row, tokens in enumerate(expected):
            assert ours.tokens[row, : ours.lengths[row]].tolist() == tokens
            assert (ours.tokens[row, ours.lengths[row] :] == 2).all()
            assert bool(ours.finished[row]) == (tokens[-1] in stops and len(tokens) > lengths[row])
    assert ours.finished.any()
    assert not ours.finished.all()


def test_a_stop_token_ends_a_row():
    logits = torch.eye(VOCABULARY).roll(1, 1)
    found = seqkern.generate(
        follow(logits), None, torch.tensor([[5], [8]]), max_new_tokens=6, stop_tokens=9, pad_token=33
    )
    assert found.tokens.tolist() == [[5, 6, 7, 8, 9], [8, 9, 33, 33, 33]]
    assert found.lengths.tolist() == [5, 2]
    assert found.finished.all()
    later = seqkern.generate(
        follow(logits), None, torch.tensor([[8]]), max_new_tokens=3, min_new_tokens=2, stop_tokens=(9, 0)
    )
    assert later.tokens.tolist() == [[8, 1, 2, 3]]  # of the other tokens, which are equal, the first one
    no_more = seqkern.generate(follow(logits), None, torch.tensor([[9, 8]]), max_new_tokens=3)
    assert no_more.tokens.tolist() == [[9, 8, 9, 10, 11]]
    assert not no_more.finished.any()


def test_nothing_to_do():
    for beams in (1, 3):
        found = seqkern.generate(follow(table()), None, prompts(), max_new_tokens=0, beams=beams)
        assert torch.equal(found.tokens, prompts())
        assert found.lengths.tolist() == [5, 5, 5]
        none = seqkern.generate(follow(table()), None, prompts()[:0], max_new_tokens=4, beams=beams)
        assert none.tokens.shape == (0, 5)


def test_the_step_sees_what_it_should():
    seen = []

    def step(chunk, state):
        seen.append((chunk, state))
        return torch.eye(VOCABULARY)[chunk.tokens[:, -1]], state + 1

    lengths = torch.tensor([2, 3])
    seqkern.generate(step, 0, torch.tensor([[5, 6, 0], [7, 8, 9]]), prompt_lengths=lengths, max_new_tokens=3)
    assert [state for _, state in seen] == [0, 1, 2]
    assert [chunk.tokens.shape for chunk, _ in seen] == [(2, 3), (2, 1), (2, 1)]
    assert [chunk.positions.tolist() for chunk, _ in seen] == [[0, 0], [2, 3], [3, 4]]
    assert [chunk.lengths.tolist() for chunk, _ in seen] == [[2, 3], [1, 1], [1, 1]]


# ---- sampling -----------------------------------------------------------------------------------------------------


def test_draws_are_those_of_sample():
    """Row by row in a plain loop: the row's seed, its positions, its history."""
    logits, prompt, lengths = table(), prompts(), torch.tensor([2, 5, 3])
    options = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "order": "vllm"}
    seeds = torch.tensor([4, 5, 6])
    found = seqkern.generate(
        follow(logits), None, prompt, prompt_lengths=lengths, max_new_tokens=15, stop_tokens=7, seed=seeds,
        repetition_penalty=1.3, return_logprobs=True, **options,
    )  # fmt: skip
    for row in range(3):
        tokens, logprobs = prompt[row, : lengths[row]].tolist(), []
        for _ in range(15):
            token, logprob = seqkern.sample(
                logits[tokens[-1]], seed=seeds[row], position=torch.tensor(len(tokens)), return_logprob=True,
                history=torch.tensor(tokens), repetition_penalty=1.3, **options,
            )  # fmt: skip
            tokens.append(int(token))
            logprobs.append(float(logprob))
            if tokens[-1] == 7:
                break
        assert found.tokens[row, : found.lengths[row]].tolist() == tokens
        assert found.logprobs[row, : len(logprobs)].tolist() == logprobs
        assert not found.logprobs[row, len(logprobs) :].any()
    assert found.logprobs.shape[1] == int((found.lengths - lengths).max())


def test_seeds():
    logits, prompt = torch.zeros(VOCABULARY, VOCABULARY), prompts()

    def draws(**options):
        return seqkern.generate(follow(logits), None, prompt, max_new_tokens=30, **options).tokens[:, 5:]

    assert torch.equal(draws(seed=3), draws(seed=3))
    assert not torch.equal(draws(seed=3), draws(seed=4))
    assert len(draws(seed=3).unique(dim=0)) == 3
    torch.manual_seed(0)
    first, second = draws(temperature=1.0), draws(temperature=1.0)
    torch.manual_seed(0)
    assert torch.equal(draws(temperature=1.0), first)
    assert not torch.equal(first, second)


def test_callback():
    logits, seen = torch.eye(VOCABULARY).roll(1, 1), []
    found = seqkern.generate(
        follow(logits), None, torch.tensor([[5], [8]]), max_new_tokens=9, stop_tokens=9, callback=seen.append
    )
    assert [t.tolist() for t in seen] == [[6, 9], [7, 0], [8, 0], [9, 0]]
    assert found.lengths.tolist() == [5, 2]
    halted = seqkern.generate(
        follow(logits), None, torch.tensor([[5]]), max_new_tokens=9, callback=lambda t: int(t) == 7
    )
    assert halted.tokens.tolist() == [[5, 6, 7]]


@pytest.mark.parametrize("beams", [1, 2])
def test_progress(beams, capsys):
    pytest.importorskip("rich")
    seqkern.generate(follow(table()), None, prompts(), max_new_tokens=7, beams=beams, progress=True)
    assert f"{7 if beams == 1 else 6}/7" in capsys.readouterr().out


def test_log_probabilities_of_the_largest():
    logits, prompt = table(), prompts()
    plain = seqkern.generate(follow(logits), None, prompt, max_new_tokens=9, stop_tokens=3)
    found = seqkern.generate(follow(logits), None, prompt, max_new_tokens=9, stop_tokens=3, return_logprobs=True)
    assert torch.equal(found.tokens, plain.tokens)
    assert plain.logprobs is None
    assert not found.logprobs.any()  # at temperature 0 there is one token


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"repetition_penalty": 1.2}, {"beams": 2}])
@pytest.mark.parametrize("bad", [math.nan, INFINITY])
def test_bad_logits_raise(bad, options):
    logits = torch.eye(VOCABULARY).roll(1, 1) * 9
    logits[12] = bad
    with pytest.raises(RuntimeError, match="logits.* must not be nan"):
        seqkern.generate(follow(logits), None, torch.tensor([[3], [10]]), max_new_tokens=9, seed=None, **options)


def test_what_comes_after_a_rows_end_is_not_looked_at():
    logits = torch.eye(VOCABULARY).roll(1, 1)
    logits[0] = math.nan  # after pad_token
    found = seqkern.generate(follow(logits), None, torch.tensor([[5], [8]]), max_new_tokens=9, stop_tokens=9)
    assert found.tokens.tolist() == [[5, 6, 7, 8, 9], [8, 9, 0, 0, 0]]


# ---- beam search --------------------------------------------------------------------------------------------------

STOPS = [6, 37]
SEARCHES = [
    {"beams": beams, "length_penalty": penalty, "early_stopping": early}
    for beams, penalty, early in itertools.product((2, 4), (1.0, 0.0, 2.0, -1.0), (False, True, "never"))
]


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s.values())))
def test_beams_as_transformers(gpt2, search):
    """Tokens and scores of every returned sequence, with stop tokens that come often."""
    prompt = prompts(6, 4, seed=2)
    theirs = gpt2.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, num_beams=search["beams"],
        num_return_sequences=search["beams"], do_sample=False, eos_token_id=STOPS, pad_token_id=2,
        length_penalty=search["length_penalty"], early_stopping=search["early_stopping"], output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    ours = seqkern.generate(
        of_transformers(gpt2), None, prompt, max_new_tokens=12, stop_tokens=STOPS, pad_token=2,
        sequences=search["beams"], **search,
    )  # fmt: skip
    torch.testing.assert_close(ours.scores, theirs.sequences_scores)
    assert torch.equal(ours.tokens, theirs.sequences)
    assert ours.finished.any()
    assert ours.lengths.unique().numel() > 1


@pytest.mark.parametrize("search", [{}, {"early_stopping": True}, {"length_penalty": 0.0, "early_stopping": "never"}])
def test_a_sequence_does_not_depend_on_the_others(gpt2, search):
    prompt = prompts(6, 4, seed=2)
    options = {"max_new_tokens": 12, "stop_tokens": STOPS, "beams": 3, "sequences": 3} | search
    ours = seqkern.generate(of_transformers(gpt2), None, prompt, **options)
    for row in range(6):
        alone = seqkern.generate(of_transformers(gpt2), None, prompt[row : row + 1], **options)
        for i in range(3):
            n = int(alone.lengths[i])
            assert alone.tokens[i, :n].tolist() == ours.tokens[3 * row + i, : ours.lengths[3 * row + i]].tolist()


def best_by_enumeration(logits, first, length):
    """The most probable continuation of `length` tokens, and its log-probability."""
    log_p = logits.double().log_softmax(1)
    size = logits.shape[1]
    scored = [
        (sum(float(log_p[a, b]) for a, b in itertools.pairwise((first, *tokens))), tokens)
        for tokens in itertools.product(range(size), repeat=length)
    ]
    return max(scored)


def test_as_many_beams_as_there_are_find_the_best():
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(5))
    for first in range(4):
        score, tokens = best_by_enumeration(logits, first, 4)
        found = seqkern.generate(
            follow(logits), None, torch.tensor([[first]]), max_new_tokens=4, beams=64, length_penalty=0.0
        )
        assert found.tokens.tolist() == [[first, *tokens]]
        torch.testing.assert_close(found.scores, torch.tensor([score]))


def test_fewer_possible_than_wanted():
    """Of two tokens, one of which stops, three sequences of at most two tokens can be made."""
    logits = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    found = seqkern.generate(
        follow(logits), None, torch.tensor([[0]]), max_new_tokens=2, stop_tokens=1, beams=5, sequences=5
    )
    assert (found.scores > -INFINITY).tolist() == [True, True, True, False, False]
    kept = {tuple(t[:n].tolist()) for t, n in zip(found.tokens[:3], found.lengths[:3], strict=True)}
    assert kept == {(0, 1), (0, 0, 0), (0, 0, 1)}
    assert found.lengths[3:].tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "decoder", "decoder with pages"])
@torch.no_grad()
def test_every_state_is_reordered(kind):
    """As a step without a state, which runs the whole model on its tokens so far."""
    paged = kind.endswith("pages")
    model, prompt = build(kind.removesuffix(" with pages")), prompts(3, 4)
    prompt_lengths = torch.tensor([4, 1, 3])

    def whole(chunk, so_far):
        if so_far is None:
            so_far = [row[:n].tolist() for row, n in zip(chunk.tokens, chunk.lengths.tolist(), strict=True)]
        else:
            so_far = [[*row, int(token)] for row, token in zip(so_far, chunk.tokens, strict=True)]
        return torch.stack([model(torch.tensor([row]))[0, -1] for row in so_far]), so_far

    options = {"prompt_lengths": prompt_lengths, "max_new_tokens": 10, "stop_tokens": 3, "beams": 4, "sequences": 2}
    expected = seqkern.generate(
        whole, None, prompt, reorder=lambda so_far, rows: [so_far[row] for row in rows.tolist()], **options
    )
    pages = seqkern.nn.AttentionPages(3, 64, page_size=4) if paged else None
    ours = seqkern.generate(
        model.step, start(model, 3, pages=pages), prompt, state_dim=0 if kind.startswith("decoder") else 1, **options
    )
    assert torch.equal(ours.tokens, expected.tokens)
    torch.testing.assert_close(ours.scores, expected.scores)
    if pages is not None:
        assert pages.used < 12 * -(-14 // 4)  # beams of a sequence share what they have in common


# ---- states -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Parts:
    h: torch.Tensor
    name: str


class Own:
    def __init__(self, t):
        self.t, self.calls = t, 0

    def reorder(self, rows):
        self.t, self.calls = self.t[rows], self.calls + 1


def test_states_of_any_make():
    pair = collections.namedtuple("pair", "a b")
    t, rows = torch.arange(6).view(3, 2), torch.tensor([2, 0, 0, 1])
    own = Own(t)
    state = {
        "pair": pair(t, [t, None, 3, "x", True, 0.5]), "parts": Parts(t, "n"), "own": own, "again": own,
        "ordered": collections.OrderedDict(t=t), "scalar": torch.tensor(7), "tuple": (t, own),
    }  # fmt: skip
    made = chosen_rows(state, rows, 3, 0)
    assert type(made["pair"]) is pair
    for part in (made["pair"].a, made["pair"].b[0], made["parts"].h, own.t, made["ordered"]["t"], made["tuple"][0]):
        assert torch.equal(part, t[rows])
    assert made["pair"].b[1:] == [None, 3, "x", True, 0.5]
    assert made["own"] is made["again"] is own
    assert own.calls == 1
    assert made["pair"].a is made["parts"].h  # what was one tensor is one
    assert torch.equal(state["pair"].a, torch.arange(6).view(3, 2))
    assert torch.equal(chosen_rows((t,), torch.tensor([1]), 2, 1)[0], t[:, 1:])
    assert torch.equal(chosen_rows((t,), torch.tensor([1]), 2, -1)[0], t[:, 1:])


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (ValueError, {"h": torch.zeros(2, 3)}, r"state\['h'\] must have the 3 rows .* dimension 0, got shape \(2, 3\)"),
        (ValueError, [torch.zeros(3), torch.zeros(4)], r"state\[1\] must have the 3 rows"),
        (ValueError, Parts(torch.zeros(1, 3), "n"), r"state\.h must have the 3 rows"),
        (TypeError, [object()], r"beams cannot reorder state\[0\], of type object: give it a method reorder\(rows\)"),
        (TypeError, Parts, "beams cannot reorder state, of type type"),
    ],
)
def test_a_state_that_cannot_be_reordered_raises(error, state, message):
    with pytest.raises(error, match=message):
        chosen_rows(state, torch.tensor([0, 1, 2]), 3, 0)


# ---- errors -------------------------------------------------------------------------------------------------------

P = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [
        (TypeError, {"prompt": [[1]]}, "prompt must be a tensor, got list"),
        (TypeError, {"prompt": P.int()}, "prompt must be int64, got torch.int32"),
        (ValueError, {"prompt": P[0]}, r"prompt must have shape \(B, T\) with T >= 1, got \(3,\)"),
        (ValueError, {"prompt": P[:, :0]}, r"prompt must have shape \(B, T\) with T >= 1, got \(2, 0\)"),
        (TypeError, {"prompt_lengths": [1, 2]}, "prompt_lengths must be a tensor, got list"),
        (ValueError, {"prompt_lengths": P[0]}, r"prompt_lengths must have shape \(2,\), got \(3,\)"),
        (ValueError, {"prompt_lengths": torch.tensor([0, 2])}, r"prompt_lengths must be at least 1 and at most 3, got"),
        (ValueError, {"prompt_lengths": torch.tensor([1, 4])}, r"prompt_lengths must be at least 1 and at most 3, got"),
        (ValueError, {"prompt_lengths": P[:, 0].to("meta")}, "prompt_lengths must be on prompt's device cpu, got meta"),
        (ValueError, {"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        (TypeError, {"max_new_tokens": 2.0}, "max_new_tokens must be a whole number, got 2.0"),
        (TypeError, {"min_new_tokens": True}, "min_new_tokens must be a whole number, got True"),
        (ValueError, {"stop_tokens": [3, -1]}, "stop_tokens must be at least 0, got -1"),
        (TypeError, {"stop_tokens": "ab"}, "stop_tokens must be a whole number, got 'a'"),
        (TypeError, {"pad_token": None}, "pad_token must be a whole number, got None"),
        (ValueError, {"order": "best"}, 'order must be "transformers", "vllm" or "llama.cpp", got \'best\''),
        (ValueError, {"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        (ValueError, {"beams": 0}, "beams must be at least 1, got 0"),
        (TypeError, {"beams": 2.0}, "beams must be a whole number, got 2.0"),
        (ValueError, {"sequences": 2}, "sequences must be at least 1 and at most beams, 1, got 2"),
        (TypeError, {"beams": 2, "length_penalty": None}, "length_penalty must be a number, got None"),
        (ValueError, {"beams": 2, "length_penalty": INFINITY}, "length_penalty must be finite, got inf"),
        (ValueError, {"beams": 2, "early_stopping": "always"}, 'early_stopping must be False, True or "never", got'),
        (ValueError, {"beams": 2, "top_k": 5}, "top_k is not for beam search, beams=2"),
        (ValueError, {"beams": 2, "callback": print}, "callback is not for beam search, beams=2"),
        (ValueError, {"beams": 2, "return_logprobs": True}, "return_logprobs is not for beam search, beams=2"),
        (
            ValueError,
            {"beams": 2, "state": torch.zeros(3, 2)},
            "state must have the 2 rows of the batch in dimension 0",
        ),
        (TypeError, {"step": lambda c, s: (None, s)}, "step must return logits, a tensor, and the state, got NoneType"),
        (
            ValueError,
            {"step": lambda c, s: (torch.zeros(2, 4, 5), s)},
            r"step must return logits of shape \(2, V\) or \(2, 3, V\), got \(2, 4, 5\)",
        ),
    ],
)
def test_errors(error, given, message):
    arguments = {"step": follow(table()), "state": None, "prompt": P, "max_new_tokens": 3} | given
    step, state, prompt = (arguments.pop(name) for name in ("step", "state", "prompt"))
    with pytest.raises(error, match=message):
        seqkern.generate(step, state, prompt, **arguments)


def test_an_unknown_keyword_raises():
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'num_beams': use beams"):
        seqkern.generate(follow(table()), None, P, max_new_tokens=3, num_beams=3)


def test_no_gradient():
    logits = table().requires_grad_()
    found = seqkern.generate(follow(logits), None, P, max_new_tokens=3, temperature=1.0, return_logprobs=True)
    assert not found.logprobs.requires_grad


def test_first_continuations_stay_in_their_beams_place():
    """Every continuation gets a place, and its parent's state there; what is dead copies nothing."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(200):
        parents = torch.randint(5, (3, 5), generator=generator)
        alive = torch.rand(3, 5, generator=generator) < 0.7
        places, sources = _in_place(parents.tolist(), alive.tolist())
        for row in range(3):
            assert sorted(places[row]) == [0, 1, 2, 3, 4]
            living = [child for child in range(5) if alive[row, child]]
            for place, child in enumerate(places[row]):
                assert sources[row][place] == (int(parents[row, child]) if child in living else place)
            copies = sum(place != source for place, source in enumerate(sources[row]))
            assert copies == len(living) - len({int(parents[row, child]) for child in living})


def test_scores_and_logprobs_are_float32_whatever_torchs_default():
    table = torch.eye(5, dtype=torch.float32).roll(1, 1)

    def step(chunk, state):
        return table[chunk.tokens], state

    prompt = torch.tensor([[0, 1]])
    torch.set_default_dtype(torch.float64)
    try:
        for length in (0, 2):
            beams = seqkern.generate(step, None, prompt, max_new_tokens=length, beams=2)
            assert beams.scores.dtype == torch.float32
            found = seqkern.generate(step, None, prompt, max_new_tokens=length, return_logprobs=True)
            assert found.logprobs.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
