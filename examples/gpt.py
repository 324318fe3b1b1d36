"""GPT: a Transformer that writes Python's documentation, byte by byte.

python -m examples.gpt --twin          with Llama's parts: rotary positions, RMS norm, SwiGLU
python -m examples.gpt --variant gpt2  with GPT-2's: learned positions, layer norm, GELU

Sizes and rates were chosen by looking at the held-out metric: the text is too short for a third part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import seqkern
from examples import ngrams, runner, text, twins
from examples.runner import Exhibit, Recipe

CONTEXT, ROWS = 256, 6
HELD_OUT_BYTES = 40_000  # evaluated
ORDER, COUNTED_BYTES = 7, 1_000_000  # of the n-grams; what they are counted in at most, the end of the training part
LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"dim_feedforward": 256},
    "gpt2": {"max_len": CONTEXT},
    "post-norm": {"max_len": CONTEXT, "norm_first": False},
}
SIZES: dict[str, Any] = {"vocab_size": 256, "d_model": 96, "nhead": 4, "num_layers": 3}

corpus = runner.cached(text.load)


def bits_per_byte(model: Any, inputs: Tensor, targets: Tensor) -> float:
    """Of held-out windows, in batches of 32."""
    chunks = zip(inputs.split(32), targets.split(32), strict=True)
    return sum(model.loss(x, y).item() * len(x) for x, y in chunks) / len(inputs) / math.log(2)


@runner.cached
def baselines(corpus: text.Text) -> dict[str, float]:
    """Bits per byte by the text's own baselines, and by counting."""
    seen, unseen = corpus.train[-COUNTED_BYTES:], corpus.held_out[:HELD_OUT_BYTES]
    counted = math.log2(ngrams.kneser_ney(seen, unseen, SIZES["vocab_size"], ORDER))
    return text.baselines(corpus) | {f"{ORDER}-gram, Kneser-Ney": counted}


def continued(model: Any, corpus: text.Text, **options: Any) -> Exhibit:
    """The first held-out paragraph's beginning, and how the model goes on."""
    unseen = bytes(corpus.held_out.tolist())
    start = unseen.find(b"\n\n") + 2 if b"\n\n" in unseen[:1000] else 0
    length = CONTEXT * 5 // 8
    prompt = unseen[start : start + CONTEXT - length]
    found = seqkern.generate(
        model.step, model.start(1, CONTEXT), torch.tensor([list(prompt)]), max_new_tokens=length, seed=0, **options
    )
    written = bytes(found.tokens[0, len(prompt) :].tolist()).decode(errors="replace")
    note = "Held-out text, and how the model goes on; temperature 0.8, the 20 most probable bytes"
    return Exhibit("Written", note, text=[(prompt.decode(errors="replace"), "soft"), (written, "")])


class System(runner.System):
    name = "gpt"
    title = "GPT"
    about = (
        "A language model of causal self-attention (Radford et al. 2018; Jurafsky and Martin, section 9.8): with "
        "Llama's rotary positions, RMS norm and SwiGLU, or with GPT-2's learned positions, layer norm and GELU. After "
        "half a minute of training on 340 kB, 7-grams and LZMA are still ahead of it."
    )
    data = "the Python language reference, pydoc_data.topics of this Python; PSF licence; the last tenth is held out"
    metric, higher_is_better = "bits per byte", False
    loss, nats, tokens = "bits per byte", math.log(2), "bytes"
    against, margin, target, tolerance = "zlib", 0.08, 2.1, 0.02
    recipes: ClassVar = {name: Recipe(steps=600, learning_rate=5e-3, weight_decay=0.1) for name in VARIANTS}

    def __init__(self, corpus: text.Text | None = None) -> None:
        self._corpus = corpus

    @property
    def corpus(self) -> text.Text:
        return self._corpus or corpus()

    def model(self, variant: str) -> nn.Module:
        return seqkern.models.GPT(**SIZES, **VARIANTS[variant])

    def twin(self, variant: str) -> nn.Module:
        return twins.gpt.GPT(**SIZES, **VARIANTS[variant])

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self.corpus.batch(generator, ROWS, CONTEXT)

    def size(self, batch: tuple[Any, ...]) -> int:
        return batch[0].numel()

    def evaluate(self, variant: str, model: nn.Module) -> float:
        return bits_per_byte(model, *self.corpus.held_out_windows(CONTEXT, HELD_OUT_BYTES // CONTEXT))

    def baselines(self) -> dict[str, float]:
        return baselines(self.corpus)

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        return [continued(model, self.corpus, temperature=0.8, top_k=20)]


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
