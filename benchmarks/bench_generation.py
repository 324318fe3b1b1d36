"""Generation: a small GPT against transformers' eager loop, greedily, by sampling and by beams; recurrent models
against a plain loop on torch's layers. The tokens are the same before anything is timed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqkern
from benchmarks.harness import Contest, compete
from seqkern.generation import Chunk
from seqkern.ops._autograd import Cost
from seqkern.testing import ErrorReport, compare

VOCABULARY, WIDTH, HEADS, LAYERS, PROMPT, NEW = 8192, 256, 8, 4, 32, 64


def small_gpt(device: str) -> Any:
    """transformers' GPT-2 with random weights, larger than at its start, so that its tokens are not all the same."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=256, initializer_range=0.1,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).to(device).eval()


class Twin(nn.Module):
    """The same model on seqkern's layers, with the same weights."""

    def __init__(self, gpt: Any):
        super().__init__()
        self.tokens, self.positions = gpt.transformer.wte.weight, gpt.transformer.wpe.weight
        layer = seqkern.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu_tanh", batch_first=True, norm_first=True
        )
        norm = seqkern.nn.LayerNorm(WIDTH)
        self.layers = seqkern.nn.TransformerEncoder(layer, LAYERS, norm).to(self.tokens.device)
        for mine, other in zip(self.layers.layers, gpt.transformer.h, strict=True):
            pairs = (
                (mine.self_attn.in_proj_weight, mine.self_attn.in_proj_bias, other.attn.c_attn),
                (mine.self_attn.out_proj.weight, mine.self_attn.out_proj.bias, other.attn.c_proj),
                (mine.linear1.weight, mine.linear1.bias, other.mlp.c_fc),
                (mine.linear2.weight, mine.linear2.bias, other.mlp.c_proj),
            )
            for weight, bias, of_other in pairs:
                weight.data, bias.data = of_other.weight.data.t().contiguous(), of_other.bias.data
            mine.norm1.load_state_dict(other.ln_1.state_dict())
            mine.norm2.load_state_dict(other.ln_2.state_dict())
        norm.load_state_dict(gpt.transformer.ln_f.state_dict())
        self.eval()

    def start(self, rows: int) -> list[seqkern.nn.AttentionCache]:
        return [layer.self_attn.make_cache(rows, PROMPT + NEW) for layer in self.layers.layers]

    def step(self, chunk: Chunk, caches: list[seqkern.nn.AttentionCache]) -> tuple[Tensor, Any]:
        x = seqkern.embedding(chunk.tokens, self.tokens, positions=self.positions, offset=chunk.positions)
        hidden = self.layers(x, caches=caches)
        return F.linear(hidden[:, -1], self.tokens), caches


def cost(model: nn.Module, rows: int, tokens: int) -> Cost:
    """Of the linear layers: a lower bound."""
    numbers = sum(p.numel() for p in model.parameters())
    return Cost(2 * numbers * rows * tokens, 4 * numbers * tokens)


SEARCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"do_sample": False}),
    "top_k, top_p": (
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 3},
        {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
    ),
    "4 beams": ({"beams": 4}, {"do_sample": False, "num_beams": 4}),
}


@pytest.mark.parametrize("rows", [1, 16], ids="B{}".format)
@pytest.mark.parametrize("search", SEARCHES)
@torch.no_grad()
def test_gpt(benchmark, search, rows, device):
    gpt = small_gpt(device)
    twin = Twin(gpt)
    prompt = torch.randint(2, VOCABULARY, (rows, PROMPT), device=device)
    given, of_other = SEARCHES[search]
    of_other = of_other | {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": None}

    def ours() -> Tensor:
        return seqkern.generate(twin.step, twin.start(rows), prompt, max_new_tokens=NEW, **given).tokens

    def theirs() -> Tensor:
        found: Tensor = gpt.generate(prompt, max_new_tokens=NEW, **of_other)
        return found

    def gate() -> list[ErrorReport]:
        if not of_other["do_sample"]:
            assert torch.equal(ours(), theirs())
        exact = gpt.double()(prompt).logits[:, -1]
        plain = gpt.float()(prompt).logits[:, -1]
        logits, _ = twin.step(Chunk(prompt, torch.zeros_like(prompt[:, 0]), prompt[:, 0]), twin.start(rows))
        return [compare(logits, plain, exact, name="logits")]

    compete(
        benchmark,
        Contest(
            op=f"generate, small GPT, {search}",
            shape=f"B{rows}, {PROMPT} + {NEW} tokens, {LAYERS} layers of {WIDTH}",
            mode="forward",
            dtype=torch.float32,
            device=device,
            ours=ours,
            peers={"transformers": theirs},
            gate=gate,
            cost=cost(gpt, rows, NEW),
        ),
    )


class Recurrent(nn.Module):
    def __init__(self, kind: str, library: Any):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = getattr(library, kind)(WIDTH, WIDTH, 2, batch_first=True)
        for weight in self.rnn.parameters():
            nn.init.normal_(weight, std=0.2)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.rnn(self.embedding(tokens), state)
        return F.linear(output[:, -1], self.embedding.weight), state

    def step(self, chunk: Chunk, state: Any) -> tuple[Tensor, Any]:
        return self(chunk.tokens, state)


def plain_loop(model: nn.Module, prompt: Tensor, draws: bool) -> Tensor:
    """What a user writes: the newest token in, the largest logit or a draw of the 50 largest out."""
    tokens, newest, state = [prompt], prompt, None
    for _ in range(NEW):
        logits, state = model(newest, state)
        if draws:
            best, at = (logits / 0.8).topk(50)
            newest = at.gather(1, torch.multinomial(best.softmax(-1), 1))
        else:
            newest = logits.argmax(-1, keepdim=True)
        tokens.append(newest)
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("rows", [1, 16], ids="B{}".format)
@pytest.mark.parametrize("search", ["greedy", "top_k"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@torch.no_grad()
def test_recurrent(benchmark, kind, search, rows, device):
    ours, theirs = (Recurrent(kind, library).to(device).eval() for library in (seqkern.nn, nn))
    prompt = torch.randint(VOCABULARY, (rows, PROMPT), device=device)
    given: dict[str, Any] = {} if search == "greedy" else {"temperature": 0.8, "top_k": 50, "seed": 3}

    def run() -> Tensor:
        return seqkern.generate(ours.step, None, prompt, max_new_tokens=NEW, **given).tokens

    loop = functools.partial(plain_loop, theirs, prompt, search != "greedy")

    def gate() -> list[ErrorReport]:
        if search == "greedy":
            assert torch.equal(run(), loop())
        exact = theirs.double()(prompt, None)[0]
        return [compare(ours(prompt, None)[0], theirs.float()(prompt, None)[0], exact, name="logits")]

    compete(
        benchmark,
        Contest(
            op=f"generate, {kind} language model, {search}",
            shape=f"B{rows}, {PROMPT} + {NEW} tokens, 2 layers of {WIDTH}",
            mode="forward",
            dtype=torch.float32,
            device=device,
            ours=run,
            peers={"plain loop": loop},
            gate=gate,
            cost=cost(theirs, rows, NEW),
        ),
    )
