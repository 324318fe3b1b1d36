"""Reading English words aloud: the Transformer of Vaswani et al. turns letters into phones.

python -m examples.encoder_decoder --twin
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

import seqkern
from examples import runner, twins
from examples.runner import Recipe
from examples.seq2seq import SIZES, Pronouncing

LAYERS: dict[str, Any] = {"num_encoder_layers": 2, "num_decoder_layers": 2}
WIDTHS: dict[str, Any] = {"d_model": 96, "nhead": 2, "dim_feedforward": 192, "rotary": True}
VARIANTS: dict[str, dict[str, Any]] = {"pre-norm": {"norm_first": True}}  # after the parts it needs more steps


class System(Pronouncing):
    name = "encoder_decoder"
    title = "Encoder-decoder Transformer"
    about = (
        "The Transformer (Vaswani et al. 2017; Jurafsky and Martin, equations 9.31 to 9.42): an encoder of "
        "self-attention, and a decoder that also attends to what the encoder made of the source; norms before the "
        "parts of a block, rotary positions beside the sinusoidal ones. It turns letters of English words into phones."
    )
    rows = 32
    margin, target = 0.3, 12.0
    recipes: ClassVar = {name: Recipe(steps=2600, learning_rate=2.5e-3, warmup=200) for name in VARIANTS}

    def model(self, variant: str) -> nn.Module:
        return seqkern.models.EncoderDecoder(**SIZES, **WIDTHS, **LAYERS, **VARIANTS[variant])

    def twin(self, variant: str) -> nn.Module:
        return twins.encoder_decoder.EncoderDecoder(**SIZES, **WIDTHS, **LAYERS, **VARIANTS[variant])


SYSTEM = System()

if __name__ == "__main__":
    raise SystemExit(runner.main(SYSTEM))
