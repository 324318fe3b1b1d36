"""Cases of decoders that attend in every step."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal


def attention_rnn_case(
    batch: int = 3, steps: int = 7, keys: int = 11, inputs: int = 12, hidden: int = 33, columns: int = 20, *,
    channels: int = 17, outputs: int = 18, cell: Literal["lstm", "gru"] = "lstm",
    order: Literal["bahdanau", "luong"] = "bahdanau", score: str = "additive", input_feeding: bool = True,
    bias: bool = True, lengths: bool = True, mask: bool = False, state: bool = True, scale: float = 1.0,
) -> Case:  # fmt: skip
    """score: "additive", "projected" (products with projected queries) or "dot". scale: of the inputs.

    The weights do not enlarge a state's error from step to step: the error rule is about the kernels' own.
    """
    luong, lstm = order == "luong", cell == "lstm"
    channels = hidden if score == "dot" else channels
    fed = (outputs if input_feeding else 0) if luong else columns
    gates = (4 if lstm else 3) * hidden
    real = torch.tensor([keys, (keys + 1) // 2, 1])[torch.arange(batch) % 3] if lengths else None
    visible = torch.rand(batch, steps, keys, generator=torch.Generator().manual_seed(3)) < 0.7
    shapes: dict[str, tuple[int, ...]] = {
        "input": (batch, steps, inputs), "key": (batch, keys, channels), "value": (batch, keys, columns),
        "w_ih": (gates, inputs + fed), "w_hh": (gates, hidden),
    }  # fmt: skip
    shapes |= {"b_ih": (gates,), "b_hh": (gates,)} if bias else {}
    shapes |= {"w_query": (channels, hidden)} if score != "dot" else {}
    shapes |= {"b_query": (channels,)} if bias and score != "dot" else {}
    shapes |= {"w_score": (channels,)} if score == "additive" else {}
    shapes |= {"w_out": (outputs, columns + hidden)} if luong else {}
    shapes |= {"b_out": (outputs,)} if luong and bias else {}
    if state:
        shapes |= {"h": (batch, hidden)} | ({"c": (batch, hidden)} if lstm else {})
        shapes |= {"feed": (batch, outputs)} if luong and input_feeding else {}
    scaling = channels**-0.5

    def make(g: torch.Generator) -> dict[str, Tensor]:
        return {
            name: normal(g, *shape, scale=scale if name in ("input", "key", "value") else shape[-1] ** -0.5)
            for name, shape in shapes.items()
        }

    def start(t: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        zeros = t["input"].new_zeros
        h = t.get("h", zeros(batch, hidden))
        c = t.get("c", zeros(batch, hidden)) if lstm else None
        return h, c, t.get("feed", zeros(batch, outputs)) if luong and input_feeding else None

    def results(states: Tensor, c: Tensor | None, context: Tensor, attended: Tensor, weights: Tensor) -> Any:
        return (attended if luong else states, context, states[:, -1], *((c,) if lstm else ()), weights)

    def ours(**t: Tensor) -> Any:
        device = t["input"].device
        given = start(t) if state else None
        options: dict[str, Any] = {name: t.get(name) for name in ("w_query", "b_query", "w_score", "w_out", "b_out")}
        found = seqkern.attention_rnn(
            t["input"], t["key"], t["value"], t["w_ih"], t["w_hh"], t.get("b_ih"), t.get("b_hh"), **options,
            state=given, cell=cell, order=order, input_feeding=input_feeding, scale=scaling, return_weights=True,
            key_lengths=None if real is None else real.to(device), mask=visible.to(device) if mask else None,
        )  # fmt: skip
        last = (found.state.c,) if lstm else ()
        return (found.output, found.context, found.state.h, *last, found.weights)

    def plain(**t: Tensor) -> Any:
        """A loop over torch's cells, as the textbooks' decoders are written."""
        h, c, feed = start(t)
        device = h.device
        unseen = ~visible.to(device) if mask else torch.zeros(batch, steps, keys, dtype=torch.bool, device=device)
        if real is not None:
            unseen = unseen | (torch.arange(keys, device=device) >= real.to(device)[:, None])[:, None]
        weights_of_cell = (t["w_ih"], t["w_hh"], t.get("b_ih"), t.get("b_hh"))

        def attend(s: Tensor, hidden_keys: Tensor) -> tuple[Tensor, Tensor]:
            query = s if score == "dot" else F.linear(s, t["w_query"], t.get("b_query"))
            if score == "additive":
                energy = torch.tanh(query[:, None] + t["key"]).flip(-1) @ t["w_score"].flip(-1)
            else:
                energy = torch.einsum("bd,bkd->bk", query * scaling, t["key"])
            energy = energy.masked_fill(hidden_keys, -math.inf)
            found = torch.where(hidden_keys.all(-1, keepdim=True), 0, energy.softmax(-1))
            return torch.einsum("bk,bkm->bm", found, t["value"]), found

        every: list[Any] = []
        for step in range(steps):
            if not luong:
                feed, found = attend(h, unseen[:, step])
                context = feed
            x = t["input"][:, step] if feed is None else torch.cat([t["input"][:, step], feed], 1)
            if c is not None:
                h, c = torch.lstm_cell(x, (h, c), *weights_of_cell)
            else:
                h = torch.gru_cell(x, h, *weights_of_cell)
            if luong:
                context, found = attend(h, unseen[:, step])
                attended = torch.tanh(F.linear(torch.cat([context, h], 1), t["w_out"], t.get("b_out")))
                feed = attended if input_feeding else None
            every.append((h, context, attended if luong else h, found))
        states, context, attended, weights = (torch.stack(each, 1) for each in zip(*every, strict=True))
        return results(states, c, context, attended, weights)

    def expected(**t: Tensor) -> Any:
        h, c, feed = start(t)
        x_gates = F.linear(t["input"], t["w_ih"][:, :inputs], t.get("b_ih"))
        w_feed = t["w_ih"][:, inputs:] if not luong or input_feeding else None
        device = h.device
        return results(
            *reference.attention_rnn(
                x_gates, t["key"], t["value"], h, c, feed, w_feed, t["w_hh"], t.get("b_hh"), t.get("w_query"),
                t.get("b_query"), t.get("w_score"), t.get("w_out"), t.get("b_out"),
                None if real is None else real.to(device), visible.to(device) if mask else None, scaling, luong,
            )
        )  # fmt: skip

    names = ("output", "context", "h", *(("c",) if lstm else ()), "weights")
    return Case(inputs=make, ours=ours, torch=plain, reference=expected, outputs=names)
