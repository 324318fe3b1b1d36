"""Cases of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.ops._rnn_checks import ADDITIVE, CELLS, GATES, GRU, INTERPOLATED, LSTM, RNN_RELU, RNN_TANH
from seqkern.testing._checks import Case, normal


def rnn_case(
    cell: str = "lstm",
    steps: int = 65,
    batch: int = 9,
    inputs: int = 33,
    hidden: int = 65,
    *,
    num_layers: int = 1,
    bidirectional: bool = False,
    bias: bool = True,
    projection: int = 0,
    std: float = 1.0,
    lengths: Sequence[int] | None = None,
    norms: bool = False,
    peepholes: bool = False,
    recurrent_dropout: float = 0.0,
    zoneout: tuple[float, float] = (0.0, 0.0),
    training: bool = True,
    resets: bool = False,
    recompute: bool = False,
) -> Case:
    """Output and final state of `seqkern.lstm`, `gru` and so on. `std` is the input's, and scales the gates' inputs.

    For torch: its own network where it has the options, otherwise a loop over torch's ops in the same dtype.
    """
    kind, directions, width = CELLS[cell], 2 if bidirectional else 1, projection or hidden
    groups = GATES[kind]
    shapes: dict[str, tuple[int, ...]] = {}
    for run in range(num_layers * directions):
        shapes[f"w_ih {run}"] = groups * hidden, inputs if run < directions else directions * width
        shapes[f"w_hh {run}"] = groups * hidden, width
        if bias:
            shapes[f"b_ih {run}"] = shapes[f"b_hh {run}"] = (groups * hidden,)
        if projection:
            shapes[f"w_hr {run}"] = width, hidden
    for run in range(num_layers * directions):
        sides = ("ih", "hh", "c") if kind == LSTM else ("ih", "hh")
        for name in (f"norm_{side} {part}" for side in sides if norms for part in ("weight", "bias")):
            shapes[f"{name} {run}"] = (hidden if "_c" in name else groups * hidden,)
        if peepholes:
            shapes[f"peephole {run}"] = 3, hidden
    seed = torch.tensor(2**40 + 7)
    borders = torch.rand(steps, batch, generator=torch.Generator().manual_seed(3)) < 0.1
    options: dict[str, Any] = {"num_layers": num_layers, "bidirectional": bidirectional, "training": training}
    options |= {"recurrent_dropout": recurrent_dropout, "recompute": recompute}
    options |= {"zoneout": zoneout if kind == LSTM else zoneout[0]}

    def make(g: torch.Generator) -> dict[str, Tensor]:
        tensors = {"input": normal(g, steps, batch, inputs, scale=std)}
        for name, size in (("h0", width), ("c0", hidden))[: 2 if kind == LSTM else 1]:
            tensors[name] = normal(g, num_layers * directions, batch, size, scale=0.5)
        for name, shape in shapes.items():
            tensors[name] = normal(g, *shape, scale=max(hidden, shape[-1] if name.startswith("w_ih") else 1) ** -0.5)
            if kind == RNN_RELU:  # stay away from the kink: there a rounding error changes the whole gradient
                tensors[name] *= 0.25
                if name.startswith("b_ih" if bias else "norm_ih bias"):
                    tensors[name] += 4 - 8 * (torch.arange(hidden) % 2)
            if name.startswith("w_hh") and hidden == 1:  # larger weights make gradients grow from step to step
                tensors[name] *= 0.5
            if kind == ADDITIVE and name[:2] in ("w_", "b_"):  # where they grow by (1 + size)^steps, and h with them
                tensors[name] *= min(1, 4 / max(steps, 1))
            if name.startswith("norm") and "weight" in name:  # a gain of 1 for U h does the same
                tensors[name] += 0.25 if "_hh" in name else 1
        return tensors

    def named(tensors: Mapping[str, Tensor], start: str) -> list[Any]:
        return [t for name, t in tensors.items() if name.startswith(start)]

    def ours(input: Tensor, **tensors: Tensor) -> Any:
        state: Any = (tensors["h0"], tensors["c0"]) if kind == LSTM else tensors["h0"]
        weights = [t for name, t in tensors.items() if name[:2] in ("w_", "b_")]
        extra: dict[str, Any] = {"norms": named(tensors, "norm")} if norms else {}
        if peepholes:
            extra["peepholes"] = named(tensors, "peephole")
        if resets:
            extra["resets"] = borders.to(input.device)
        if training and (recurrent_dropout or any(zoneout)):
            extra["seed"] = seed.to(input.device)
        output, state = getattr(seqkern, cell)(input, state, weights, lengths=lengths, **options, **extra)
        return output, *(state if kind == LSTM else (state,))

    def expected(input: Tensor, h0: Tensor, c0: Tensor | None = None, **tensors: Tensor) -> Any:
        ends = None if lengths is None else torch.tensor(lengths)
        x, states = input, []
        if ends is not None:
            x = torch.where((torch.arange(steps)[:, None] < ends)[..., None], x, 0)
        for layer in range(num_layers):
            runs = range(layer * directions, (layer + 1) * directions)
            lists = {
                name: [tensors[f"{name} {run}"] for run in runs] if f"{name} 0" in tensors else []
                for name in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr", "peephole", "norm")
            }
            if norms:
                sides = []
                for run, w in zip(runs, lists["w_ih"], strict=True):
                    weight, shift, *others = (
                        t for name, t in tensors.items() if name.endswith(f" {run}") and "norm" in name
                    )
                    side = reference.layer_norm(x @ w.t(), weight, shift, 1e-5)
                    sides.append(side + tensors[f"b_ih {run}"] if bias else side)
                    lists["norm"].append(torch.cat(others))
                x, lists["w_ih"], lists["b_ih"] = torch.cat(sides, -1), [], []
            mask, zone_seed = masks(layer, x.dtype)[0], reference.derived_seed(seed, 3 * layer + 1)
            h, c = (None if t is None else t[runs.start : runs.stop] for t in (h0, c0))
            assert h is not None
            options = (borders if resets else None, mask, zone_seed if training and any(zoneout) else None)
            x, *state = reference.rnn(x, h, c, *lists.values(), ends, *options, *zoneout, 1e-5, kind)
            states.append(state[:2] if kind == LSTM else state)
        return x, *(torch.cat(each) for each in zip(*states, strict=True))

    def masks(layer: int, dtype: torch.dtype) -> tuple[Any, Any]:
        """A layer's factors of h, (D, B, P), and where zoneout keeps the old h and c, each (D, T, B, P or H)."""
        factors: Any = None
        stays: list[Any] = [None, None]
        if training and recurrent_dropout:
            ones = torch.ones(directions * batch, width, dtype=dtype)
            dropped = reference.dropout(ones, reference.derived_seed(seed, 3 * layer), recurrent_dropout)
            factors = dropped.view(directions, batch, width)
        for k, (p, size) in enumerate(zip(zoneout, (width, hidden), strict=True)):
            if training and p:
                rows = torch.arange(directions * 2 * steps * batch)
                kept = reference.keep_mask(reference.derived_seed(seed, 3 * layer + 1), p, rows, size)
                stays[k] = ~kept.view(directions, 2, steps, batch, size)[:, k]
        return factors, stays

    def of_torch(input: Tensor, h0: Tensor, c0: Any = None, **tensors: Tensor) -> Any:
        # The same network with its sequences, features and hidden units in reverse: in float64 torch would otherwise
        # round exactly like the oracle.
        def units(t: Tensor, dim: int, number: int) -> Tensor:
            return t.unflatten(dim, (number, -1)).flip(dim + 1).flatten(dim, dim + 1)

        flipped = {}
        for name, t in tensors.items():
            if name[:5] in ("w_hr ", "peeph"):
                t = t.flip(0, 1) if name.startswith("w") else t.flip(1)
            else:
                t = units(t, 0, 1 if name.startswith("norm_c") else groups)
            if name[:5] in ("w_ih ", "w_hh "):
                t = units(t, 1, directions if name.startswith("w_ih") and int(name.split()[1]) >= directions else 1)
            flipped[name] = t
        x, state = input.flip(1, 2), [h0.flip(1, 2), *([] if c0 is None else [c0.flip(1, 2)])]
        ends = None if lengths is None else torch.tensor(lengths).flip(0)
        if (
            kind >= ADDITIVE
            or norms
            or peepholes
            or resets
            or recurrent_dropout
            or any(zoneout)
            or (ends is not None and 0 in ends)
        ):
            output, *state = loop(x, state, flipped, ends)
        else:
            function: Any = getattr(torch._VF, cell)
            arguments = [
                state if kind == LSTM else state[0],
                list(flipped.values()),
                bias,
                num_layers,
                0.0,
                True,
                bidirectional,
            ]
            if ends is None:
                output, *state = function(x, *arguments, False)
            else:
                output, *state = packed(function, x, ends, arguments)
        return units(output, 2, directions).flip(1), *(t.flip(1, 2) for t in state)

    def packed(function: Any, x: Tensor, ends: Tensor, arguments: list[Any]) -> Any:
        data, sizes, order, back = torch.nn.utils.rnn.pack_padded_sequence(x, ends, enforce_sorted=False)
        state = arguments[0]
        arguments[0] = [t[:, order] for t in state] if kind == LSTM else state[:, order]
        output, *state = function(data, sizes, *arguments)
        packed_output = torch.nn.utils.rnn.PackedSequence(output, sizes, order, back)
        padded, _ = torch.nn.utils.rnn.pad_packed_sequence(packed_output, total_length=steps)
        return padded, *(t[:, back] for t in state)

    def loop(x: Tensor, state: list[Tensor], tensors: dict[str, Tensor], ends: Tensor | None) -> Any:
        """A loop over torch's ops, with sums in the order of `of_torch`."""
        F, device = torch.nn.functional, x.device
        flipped_borders = (
            borders.flip(1).to(device) if resets else torch.zeros(steps, batch, dtype=torch.bool, device=device)
        )
        last = torch.full((batch,), steps, device=device) if ends is None else ends.to(device)
        inside = torch.arange(steps, device=device)[:, None] < last
        x, states = torch.where(inside[..., None], x, 0), []
        for layer in range(num_layers):
            factors, stays = masks(layer, x.dtype)
            outputs = []
            for d in range(directions):
                run = layer * directions + d
                own = {name[: -len(f" {run}")]: t for name, t in tensors.items() if name.endswith(f" {run}")}
                zx = F.linear(x, own["w_ih"], None if norms else own.get("b_ih"))
                if norms:
                    zx = F.layer_norm(zx, zx.shape[2:], own["norm_ih weight"], own["norm_ih bias"])
                    zx = zx + own["b_ih"] if bias else zx
                h: Any = state[0][run]
                c: Any = state[1][run] if kind == LSTM else None
                steps_of_h: list[Any] = [None] * steps
                for t in reversed(range(steps)) if d else range(steps):
                    active = inside[t][:, None]
                    border = torch.zeros_like(inside[t])
                    if t + d < steps:
                        border = flipped_borders[t + d] & inside[t + d]
                    old_h = h * ~border[:, None]
                    old_c: Any = None if c is None else c * ~border[:, None]
                    hm = old_h if factors is None else old_h * factors[d].flip(0, 1).to(device)
                    zh = F.linear(hm, own["w_hh"], None if norms else own.get("b_hh"))
                    if norms:
                        zh = F.layer_norm(zh, zh.shape[1:], own["norm_hh weight"], own["norm_hh bias"])
                        zh = zh + own["b_hh"] if bias else zh
                    gates, gates_h = zx[t].chunk(groups, 1), zh.chunk(groups, 1)
                    if kind == LSTM:
                        i, f, g, o = (a + b for a, b in zip(gates, gates_h, strict=True))
                        p = own.get("peephole", torch.zeros(3, 1, dtype=x.dtype, device=device))
                        i, f = torch.sigmoid(i + p[0] * old_c), torch.sigmoid(f + p[1] * old_c)
                        new_c = f * old_c + i * torch.tanh(g)
                        seen = new_c
                        if norms:
                            seen = F.layer_norm(new_c, (hidden,), own["norm_c weight"], own["norm_c bias"])
                        new_h = torch.sigmoid(o + p[2] * new_c) * torch.tanh(seen)
                        new_h = F.linear(new_h, own["w_hr"]) if projection else new_h
                        c = torch.where(active, zone(new_c, old_c, 1, stays, d, t), c)
                    elif kind == GRU:
                        r, z = (torch.sigmoid(a + b) for a, b in zip(gates[:2], gates_h[:2], strict=True))
                        n = torch.tanh(gates[2] + r * gates_h[2])
                        new_h = n + z * (old_h - n)
                    elif kind == ADDITIVE:
                        new_h = old_h + torch.tanh(zx[t] + zh)
                    elif kind == INTERPOLATED:
                        f, u = (a + b for a, b in zip(gates, gates_h, strict=True))
                        new_h = torch.lerp(torch.tanh(u), old_h, torch.sigmoid(f))
                    else:
                        new_h = torch.tanh(zx[t] + zh) if kind == RNN_TANH else torch.relu(zx[t] + zh)
                    h = torch.where(active, zone(new_h, old_h, 0, stays, d, t), h)
                    steps_of_h[t] = h * active
                outputs.append(torch.stack(steps_of_h))
                states.append([h] if c is None else [h, c])
            x = torch.cat(outputs, -1)
        return x, *(torch.stack(each) for each in zip(*states, strict=True))

    def zone(new: Tensor, old: Tensor, k: int, stays: Any, d: int, t: int) -> Tensor:
        if not zoneout[k]:
            return new
        if not training:
            return zoneout[k] * old + (1 - zoneout[k]) * new
        return torch.where(stays[k][d, t].flip(0, 1).to(new.device), old, new)

    outputs = ("output", "h_n", "c_n") if kind == LSTM else ("output", "h_n")
    return Case(inputs=make, ours=ours, torch=of_torch, reference=expected, outputs=outputs)


ALL_OPTIONS: dict[str, Any] = {
    "num_layers": 2,
    "bidirectional": True,
    "lengths": [17, 0, 9, 17, 1, 3, 16],
    "norms": True,
    "recurrent_dropout": 0.2,
    "zoneout": (0.1, 0.3),
    "resets": True,
}
