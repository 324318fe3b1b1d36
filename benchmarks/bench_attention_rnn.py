"""Attention decoders, teacher-forced, against plain torch: a loop over torch's cell and attention, a step at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops.attention_rnn import cost
from seqkern.testing import attention_rnn_case, check_case

# Sequences, steps, keys, inputs, state, values (an encoder of two directions): of words, and of characters or sounds.
# The last two are a step of generation, of 5 beams and of 64 rows.
SHAPES = [
    (64, 30, 30, 256, 512, 1024), (32, 60, 60, 128, 256, 512), (16, 40, 200, 256, 512, 1024),
    (5, 1, 30, 256, 512, 1024), (64, 1, 30, 256, 512, 1024),
]  # fmt: skip
KINDS = [
    ("gru", "bahdanau", "additive"), ("lstm", "bahdanau", "additive"), ("lstm", "luong", "additive"),
    ("lstm", "luong", "dot"),
]  # fmt: skip


class Decoder:
    """The same decoder by both libraries; keys are projected before."""

    def __init__(self, cell: str, order: str, score: str, sizes: tuple[int, ...], dtype: torch.dtype, device: str):
        self.cell, self.order, self.score = cell, order, score
        batch, steps, keys, inputs, hidden, columns = sizes
        gates, fed = (4 if cell == "lstm" else 3) * hidden, hidden if order == "luong" else columns
        shapes: dict[str, tuple[int, ...]] = {
            "input": (batch, steps, inputs), "key": (batch, keys, hidden), "value": (batch, keys, columns),
            "w_ih": (gates, inputs + fed), "w_hh": (gates, hidden), "b_ih": (gates,), "b_hh": (gates,),
        }  # fmt: skip
        shapes |= {"w_query": (hidden, hidden), "w_score": (hidden,)} if score == "additive" else {}
        shapes |= {"w_out": (hidden, columns + hidden)} if order == "luong" else {}
        self.names = tuple(shapes)
        self.inputs = [
            torch.randn(shape, device=device, dtype=dtype) * (shape[-1] ** -0.5 if name.startswith("w") else 1)
            for name, shape in shapes.items()
        ]

    def named(self, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
        return dict(zip(self.names, tensors, strict=True))

    def ours(self, *tensors: Tensor) -> Tensor:
        options: Any = {"cell": self.cell, "order": self.order}
        if self.score == "dot":
            options["scale"] = tensors[1].shape[2] ** -0.5
        return seqkern.attention_rnn(**self.named(tensors), **options).output

    def plain(self, *tensors: Tensor) -> Tensor:
        t = self.named(tensors)
        key, value, luong = t["key"], t["value"], self.order == "luong"
        weights = (t["w_ih"], t["w_hh"], t["b_ih"], t["b_hh"])
        h = c = key.new_zeros(len(key), t["w_hh"].shape[1])
        fed = key.new_zeros(len(key), h.shape[1] if luong else value.shape[2])

        def attend(state: Tensor) -> Tensor:
            if self.score == "additive":
                energy = torch.tanh(F.linear(state, t["w_query"])[:, None] + key) @ t["w_score"]
            else:
                energy = torch.bmm(key, state[..., None])[..., 0] * key.shape[2] ** -0.5
            return torch.bmm(energy.softmax(-1)[:, None], value)[:, 0]

        outputs = []
        for x in t["input"].unbind(1):
            if not luong:
                fed = attend(h)
            x = torch.cat([x, fed], 1)
            if self.cell == "lstm":
                h, c = torch.lstm_cell(x, (h, c), *weights)
            else:
                h = torch.gru_cell(x, h, *weights)
            if luong:
                fed = torch.tanh(F.linear(torch.cat([attend(h), h], 1), t["w_out"]))
            outputs.append(fed if luong else h)
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("part", ["forward", "forward+backward"])
def test_attention_rnn(benchmark, part, shape, kind, dtype, device):
    batch, steps, keys, inputs, hidden, columns = shape
    cell, order, score = kind
    decoder = Decoder(cell, order, score, shape, dtype, device)
    make = forward_only if part == "forward" else forward_backward
    compete(
        benchmark,
        Contest(
            op="attention_rnn",
            shape=f"{cell} {order} {score} B{batch} T{steps} keys {keys} H{hidden}, values {columns}",
            mode=part,
            dtype=dtype,
            device=device,
            ours=make(decoder.ours, decoder.inputs),
            peers={"torch": make(decoder.plain, decoder.inputs)},
            gate=lambda: check_case(attention_rnn_case(cell=cell, order=order, score=score), dtype, device=device),
            cost=cost(
                batch,
                steps,
                keys,
                inputs,
                hidden,
                hidden,
                columns,
                dtype,
                cell=cell,
                additive=score == "additive",
                outputs=hidden if order == "luong" else 0,
                backward=part != "forward",
            ),
        ),
    )
