"""The attention decoder as a module: against its equations, step by step, in generation and beam search, errors."""

from __future__ import annotations

import itertools

import pytest
import torch

import seqkern
from seqkern.nn import AttentionDecoder

KINDS = [
    {"cell": cell, "order": order, "score": score, "input_feeding": feeding}
    for cell, order, score, feeding in itertools.product(
        ("lstm", "gru"), ("bahdanau", "luong"), ("additive", "bilinear", "dot"), (True, False)
    )
    if feeding or order == "luong"
]


def decoder(hidden=6, keys=6, **options):
    torch.manual_seed(3)
    return AttentionDecoder(4, hidden, keys, **options).double()


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


INPUT, MEMORY = draw(2, 5, 4), draw(2, 7, 6, seed=1)
PADDED = torch.arange(7) >= torch.tensor([7, 3])[:, None]


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("bias", [True, False])
def test_equations(options, bias):
    """From the module's own parts, step by step: its cell, its attention, its output."""
    module = decoder(bias=bias, **options)
    luong, lstm = options["order"] == "luong", options["cell"] == "lstm"
    found = module(INPUT, MEMORY, key_padding_mask=PADDED, need_weights=True)
    h, c = INPUT.new_zeros(2, 6), INPUT.new_zeros(2, 6)
    fed, outputs, contexts, weights = INPUT.new_zeros(2, 6), [], [], []
    for t in range(5):
        if not luong:
            fed, alpha = module.attention(h, MEMORY, key_padding_mask=PADDED, need_weights=True)
            context = fed
        x = torch.cat([INPUT[:, t], fed], 1) if options["input_feeding"] else INPUT[:, t]
        if lstm:
            h, c = module.cell(x, (h, c))
        else:
            h = module.cell(x, h)
        if luong:
            context, alpha = module.attention(h, MEMORY, key_padding_mask=PADDED, need_weights=True)
            fed = torch.tanh(module.output(torch.cat([context, h], 1)))
        outputs.append(fed if luong else h)
        contexts.append(context)
        weights.append(alpha)
    for a, b in zip(found[:2] + found[3:], (outputs, contexts, weights), strict=True):
        torch.testing.assert_close(a, torch.stack(b, 1))
    torch.testing.assert_close(found.state.h, h)
    assert (found.state.c is None) == (not lstm)
    assert (found.state.feed is None) == (not (luong and options["input_feeding"]))
    lengths = module(INPUT, MEMORY, key_lengths=torch.tensor([7, 3]))
    torch.testing.assert_close(lengths.output, found.output)


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(map(str, o.values())))
def test_a_step_at_a_time(options):
    module = decoder(**options)
    whole = module(INPUT, MEMORY, key_padding_mask=PADDED, need_weights=True)
    keys, state = module.project_key(MEMORY), None
    for t in range(5):
        found = module(INPUT[:, t], MEMORY, None, state, PADDED, need_weights=True, projected_key=keys)
        state = found.state
        for a, b in zip(found[:2] + found[3:], whole[:2] + whole[3:], strict=True):
            torch.testing.assert_close(a, b[:, t])
    torch.testing.assert_close(state.h, whole.state.h)


def test_sizes_and_parameters():
    """Each size of its own; values apart from keys; the state_dict's names."""
    module = AttentionDecoder(
        4, 6, 5, order="luong", value_dim=3, attention_dim=7, output_dim=8, dtype=torch.float64, bias=False
    )
    found = module(INPUT, MEMORY[..., :5], MEMORY[..., :3], need_weights=True)
    assert found.output.shape == (2, 5, 8)
    assert found.context.shape == (2, 5, 3)
    assert found.weights.shape == (2, 5, 7)
    assert found.state.feed.shape == (2, 8)
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == {
        "cell.weight_ih": (24, 4 + 8), "cell.weight_hh": (24, 6), "attention.weight": (7,),
        "attention.query_proj.weight": (7, 6), "attention.key_proj.weight": (7, 5), "output.weight": (8, 3 + 6),
    }  # fmt: skip
    assert "order='luong'" in repr(module)


def test_the_encoders_state_begins():
    """(h, c, None): there is no attended state yet, and zeros are fed."""
    module = decoder(order="luong")
    h, c = draw(2, 6, seed=4), draw(2, 6, seed=5)
    found = module(INPUT, MEMORY, state=(h, c, None))
    expected = module(INPUT, MEMORY, state=(h, c, torch.zeros(2, 6).double()))
    assert torch.equal(found.output, expected.output)
    assert not torch.equal(found.output, module(INPUT, MEMORY).output)


@pytest.mark.parametrize("options", [KINDS[0], KINDS[-2]], ids=lambda o: "-".join(map(str, o.values())))
def test_generation(options):
    """Greedy tokens are those of a loop that gives the decoder all tokens so far; beams' scores are their own."""
    module, classes = decoder(**options), 9
    embed, read = draw(classes, 4, seed=6), 3 * draw(6, classes, seed=7)

    def logits(found):
        return found.output @ read

    def step(chunk, state):
        rows = chunk.tokens.shape[0] // 2  # of each sentence
        memory, padded = MEMORY.repeat_interleave(rows, 0), PADDED.repeat_interleave(rows, 0)
        found = module(embed[chunk.tokens], memory, state=state, key_padding_mask=padded)
        return logits(found), found.state

    prompt = torch.zeros(2, 1, dtype=torch.int64)
    greedy = seqkern.generate(step, None, prompt, max_new_tokens=6)
    tokens = prompt
    for _ in range(6):
        found = module(embed[tokens], MEMORY, key_padding_mask=PADDED)
        tokens = torch.cat([tokens, logits(found)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(greedy.tokens, tokens)

    def score(sequence):
        found = logits(module(embed[sequence[:, :-1]], MEMORY, key_padding_mask=PADDED)).log_softmax(-1)
        return found.gather(2, sequence[:, 1:, None])[..., 0].sum(1)

    beams = seqkern.generate(step, None, prompt, max_new_tokens=6, beams=4, length_penalty=0.0)
    torch.testing.assert_close(beams.scores.flatten(), score(beams.tokens).to(beams.scores.dtype))


def test_gradients_of_every_parameter():
    for options in KINDS:
        module = decoder(**options)
        module(INPUT, MEMORY, key_padding_mask=PADDED).output.sin().sum().backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, (options, name)
            assert parameter.grad.abs().sum() > 0, (options, name)


def test_recorded():
    """torch.fx records the module as one call."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = decoder(order="luong")

        def forward(self, input, memory):
            return self.decoder(input, memory).output

    model = Model()
    graph = torch.fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes].count("call_module") == 1
    assert torch.equal(graph(INPUT, MEMORY), model(INPUT, MEMORY))


def test_errors():
    wrong = [
        ({"cell": "rnn"}, "cell must be one of lstm, gru, got 'rnn'"), ({"order": "x"}, "order must be one of"),
        ({"score": "concat"}, "score must be one of additive, bilinear, dot"),
        ({"input_feeding": False}, "input_feeding=False is of"), ({"output_dim": 3}, "output_dim is of"),
        ({"score": "dot", "attention_dim": 3}, "attention_dim is of"),
        ({"score": "dot", "keys": 5}, "needs key_dim = hidden_dim, got 5 and 6"),
    ]  # fmt: skip
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            decoder(**options)
    module = decoder()
    calls = [
        (("x", MEMORY), {}, TypeError, "input must be a tensor, got str"),
        ((INPUT[0, 0], MEMORY), {}, ValueError, r"input must have shape \(B, T, D\) or \(B, D\), got \(4,\)"),
        ((INPUT, MEMORY[0]), {}, ValueError, r"key must have shape \(B, Tk, D\)"),
        ((INPUT, MEMORY), {"key_padding_mask": PADDED.double()}, TypeError, "key_padding_mask must be bool"),
        ((INPUT, MEMORY), {"key_padding_mask": PADDED[:, 1:]}, ValueError, r"key_padding_mask must have shape"),
        ((INPUT, MEMORY), {"state": (draw(2, 6), None, None)}, ValueError, "state.c is there for"),
    ]  # fmt: skip
    for arguments, options, error, message in calls:
        with pytest.raises(error, match=message):
            module(*arguments, **options)
