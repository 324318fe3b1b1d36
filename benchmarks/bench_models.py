"""Whole models: transformers' with attention by seqkern against torch's sdpa, and torch's own modules before and after
`seqkern.optimize`.

Models of four layers with random weights. Linear layers, which seqkern does not touch, take most of the time at short
lengths: the ratios are what a user sees, not what a kernel does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqkern
from benchmarks.harness import Contest, compete
from seqkern.ops._autograd import Cost
from seqkern.testing import ErrorReport, compare

VOCABULARY, WIDTH, HEADS, LAYERS = 1000, 768, 12, 4
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
                       "n_positions": 4096, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_IDS}),
    "Llama": ("Llama", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
                        "num_attention_heads": HEADS, "num_key_value_heads": 4, "intermediate_size": 2048, **_IDS}),
    "T5": ("T5", {"vocab_size": VOCABULARY, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": LAYERS,
                  "num_heads": 8, "dropout_rate": 0.0, "decoder_start_token_id": 0, **_IDS}),
}  # fmt: skip


def made(name: str, dtype: torch.dtype, device: str, attention: str) -> Any:
    transformers = pytest.importorskip("transformers")
    from seqkern.integrations.transformers import register

    register()
    family, options = CONFIGS[name]
    kind = "ForConditionalGeneration" if name == "T5" else "LMHeadModel" if name == "GPT-2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, family + kind)(getattr(transformers, f"{family}Config")(**options))
    model.set_attn_implementation(attention)
    return model.to(device, dtype).train()


def call_of(name: str, batch: int, length: int, padded: bool, device: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (batch, length), device=device)
    found = {"input_ids": tokens}
    if padded:  # on the left, up to half of a sequence
        starts = torch.linspace(0, length // 2, batch, device=device).long()
        mask = (torch.arange(length, device=device) >= starts[:, None]).long()
        found |= {"attention_mask": mask, "input_ids": tokens * mask}
    return found | ({"decoder_input_ids": tokens[:, : length // 2].contiguous()} if name == "T5" else {})


def work(model: nn.Module, tokens: int, dtype: torch.dtype, backward: bool) -> Cost:
    """Of the linear layers: a lower bound."""
    numbers = sum(p.numel() for p in model.parameters())
    times = 3 if backward else 1
    return Cost(2 * numbers * tokens * times, numbers * dtype.itemsize * times)


def close(models: dict[str, nn.Module], run: Callable[[Any], Tensor]) -> list[ErrorReport]:
    """Both against the peer in float64."""
    with torch.no_grad():
        exact = run(copy.deepcopy(models["torch"]).double())
        return [compare(run(models["seqkern"]), run(models["torch"]), exact, name="logits")]


def step(model: Any, call: dict[str, Tensor]) -> Callable[[], Any]:
    """Forward and backward, with a loss of every token."""

    def run() -> None:
        model.zero_grad()
        model(**call).logits.float().square().mean().backward()

    return run


CASES = [
    *[(name, 1, length, False) for name in ("GPT-2", "Llama") for length in (512, 2048)],
    ("Llama", 4, 512, True), ("T5", 4, 512, False), ("T5", 4, 512, True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-B{c[1]}-N{c[2]}{'-padded' * c[3]}")
def test_training(benchmark, case, dtype, device):
    name, batch, length, padded = case
    models = {kind: made(name, dtype, device, how) for kind, how in (("seqkern", "seqkern"), ("torch", "sdpa"))}
    call = call_of(name, batch, length, padded, device)
    seen = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
    small = {key: t[:, -64:] for key, t in call.items()}

    def logits(model: Any) -> Tensor:
        out: Tensor = model(**small).logits
        return out if name == "T5" else out[seen[:, -64:]]

    compete(
        benchmark,
        Contest(
            op=f"{name} of transformers{', padded' * padded}",
            shape=f"B{batch} N{length}, {LAYERS} layers of {512 if name == 'T5' else WIDTH}",
            mode="forward+backward",
            dtype=dtype,
            device=device,
            ours=step(models["seqkern"], call),
            peers={"torch sdpa": step(models["torch"], call)},
            gate=lambda: close(models, logits),
            cost=work(models["torch"], batch * length, dtype, True),
        ),
    )


@pytest.mark.parametrize("length", [512, 2048], ids="N{}".format)
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_decoding(benchmark, name, length, dtype, device):
    """One new token on a cache of `length`, which the call shortens again."""
    from transformers import DynamicCache

    models = {kind: made(name, dtype, device, how) for kind, how in (("seqkern", "seqkern"), ("torch", "sdpa"))}
    tokens = call_of(name, 1, length + 1, False, device)["input_ids"]

    def decode(model: Any) -> Callable[[], Any]:
        model.eval()
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            model(tokens[:, :-1], past_key_values=cache, use_cache=True)

        @torch.no_grad()
        def run() -> None:
            model(tokens[:, -1:], past_key_values=cache, use_cache=True)
            cache.crop(-1)

        return run

    small = tokens[:, :64]
    compete(
        benchmark,
        Contest(
            op=f"{name} of transformers, a step of decoding",
            shape=f"B1 N{length}, {LAYERS} layers of {WIDTH}",
            mode="forward",
            dtype=dtype,
            device=device,
            ours=decode(models["seqkern"]),
            peers={"torch sdpa": decode(models["torch"])},
            gate=lambda: close(models, lambda model: model(small).logits),
            cost=work(models["torch"], 1, dtype, False),
            reads=True,
        ),
    )


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.lstm = nn.LSTM(128, 256, 2, bidirectional=True, batch_first=True)
        self.norm = nn.LayerNorm(512)
        self.head = nn.Linear(512, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.lstm(self.embedding(tokens))[0]))
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12, nn.LayerNorm(512), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.embedding(tokens))
        return out


@pytest.mark.parametrize("kind", [Tagger, Encoder], ids=lambda k: k.__name__)
def test_optimize(benchmark, kind, dtype, mode, device):
    torch.manual_seed(0)
    plain = kind().to(device, dtype)
    ours = seqkern.optimize(copy.deepcopy(plain))
    batch, length = (32, 64) if kind is Tagger else (4, 256)
    tokens = torch.randint(VOCABULARY, (batch, length), device=device)

    def run(model: nn.Module) -> Callable[[], Any]:
        def forward() -> Any:
            with torch.no_grad():
                return model(tokens)

        def both() -> Any:
            model.zero_grad()
            model(tokens).float().square().mean().backward()

        return forward if mode == "forward" else both

    compete(
        benchmark,
        Contest(
            op="optimize: bidirectional LSTM tagger" if kind is Tagger else "optimize: Transformer encoder",
            shape=f"B{batch} N{length}, " + ("2 layers of 256" if kind is Tagger else "12 layers of 512"),
            mode=mode,
            dtype=dtype,
            device=device,
            ours=run(ours),
            peers={"torch": run(plain)},
            gate=lambda: close({"seqkern": ours, "torch": plain}, lambda model: model(tokens[:2])),
            cost=work(plain, batch * length, dtype, mode != "forward"),
        ),
    )
