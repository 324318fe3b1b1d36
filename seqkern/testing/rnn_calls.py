"""Calls of the recurrent ops, built from a description, and how their results are held against the reference.

For kernels in Triton and in CUDA C++: the launchers are called as the dispatcher calls them, with the ops' own
arguments.
"""

from __future__ import annotations

import importlib
import random
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch

from seqkern import _library, _rnn_cuda, reference
from seqkern.testing._checks import poison

LSTM, GRU, RNN_TANH, RNN_RELU, ADDITIVE, INTERPOLATED = range(6)
GATES, KEPT = (4, 3, 1, 1, 1, 2), (4, 4, 1, 1, 1, 2)
LISTS = ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr", "peephole", "norm")
RESULTS = ("grad_input", "grad_h0", "grad_c0", *(f"grad_{name}" for name in LISTS))


@dataclass
class OpCase:
    """A call of the op."""

    cell: int = LSTM
    steps: int = 3
    batch: int = 3
    inputs: int = 5
    hidden: int = 7
    directions: int = 1
    dtype: torch.dtype = torch.float32
    projection: int | None = None
    bias: bool = True
    given: bool = False  # zx comes from outside
    lengths: tuple[int, ...] | None = None
    resets: float = 0.0  # share of the steps
    mask: bool = False
    peephole: bool = False
    norm: bool = False
    zoneout: tuple[float, float] = (0.0, 0.0)
    training: bool = True
    keep: bool = True  # False: backward finds the gates again
    grads: str = "ohcs"  # which gradients arrive: of output, h_n, c_n, cells
    need_input: bool = True
    need_weights: bool = True
    strided: bool = False
    scale: float = 1.0  # of the weights
    by_steps: bool = False  # never the whole sequence in one launch
    device: str = "cpu"


def build(case: OpCase, seed: int) -> dict[str, Any]:
    """The op's arguments."""
    generator = torch.Generator().manual_seed(seed)
    t, b, h, d, g = case.steps, case.batch, case.hidden, case.directions, GATES[case.cell]
    p = case.projection or h
    acc = torch.float64 if case.dtype == torch.float64 else torch.float32

    def tensor(*shape: int, scale: float = 1.0, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        wide = (*shape[:-1], shape[-1] * (2 if case.strided else 1))
        made = (torch.randn(wide, generator=generator) * scale).to(case.device, dtype)
        return made[..., ::2] if case.strided else made

    def each(*shape: int, wanted: bool = True, **options: Any) -> list[torch.Tensor]:
        return [tensor(*shape, **options) for _ in range(d)] if wanted else []

    small = case.scale * h**-0.5
    norm = each(2 * g * h + (2 * h if case.cell == LSTM else 0), wanted=case.norm, scale=0.5, dtype=acc)
    for weights in norm:
        weights[: g * h] += 1.0
        weights[2 * g * h : 2 * g * h + h] += 1.0
    return {
        "input": tensor(t, b, d * g * h if case.given else case.inputs),
        "h0": tensor(d, b, p),
        "c0": tensor(d, b, h) if case.cell == LSTM else None,
        "w_ih": each(g * h, case.inputs, wanted=not case.given, scale=small),
        "w_hh": each(g * h, p, scale=small),
        "b_ih": each(g * h, wanted=case.bias and not case.given, scale=small),
        "b_hh": each(g * h, wanted=case.bias, scale=small),
        "w_hr": each(p, h, wanted=case.projection is not None, scale=small),
        "peephole": each(3, h, wanted=case.peephole),
        "norm": norm,
        "lengths": None if case.lengths is None else torch.tensor(case.lengths, device=case.device),
        "resets": (torch.rand(t, b, generator=generator) < case.resets).to(case.device) if case.resets else None,
        "recurrent_mask": (
            ((torch.rand(d, b, p, generator=generator) < 0.7) / 0.7).to(case.device, acc) if case.mask else None
        ),
        "seed": torch.tensor([seed * 2**33 + 12345], device=case.device) if case.training else None,
        "zoneout_h": case.zoneout[0],
        "zoneout_c": case.zoneout[1],
        "eps": 1e-3,
        "cell": case.cell,
    }


def oracle(arguments: dict[str, Any], grads: list[torch.Tensor | None]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The results of the reference in float64, and what gradients `grads` of them give, None where there is none."""

    def exact(value: Any) -> Any:
        if isinstance(value, list):
            return [exact(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().cpu().double().requires_grad_() if value.is_floating_point() else value.cpu()

    inputs = {name: exact(value) for name, value in arguments.items()}
    results = list(reference.rnn(*inputs.values()))
    loss = inputs["h0"].sum() * 0
    for result, grad in zip(results, grads, strict=False):
        if grad is not None:
            loss = loss + (result * grad.cpu().double()).sum()
    wanted: dict[str, Any] = {}
    for name in ("input", "h0", "c0", *LISTS):
        leaves = inputs[name] if isinstance(inputs[name], list) else [inputs[name]]
        if not leaves or leaves[0] is None:
            wanted[f"grad_{name}"] = None
            continue
        found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
        wanted[f"grad_{name}"] = torch.stack(found) if isinstance(inputs[name], list) else found[0]
    return [result.detach() for result in results], wanted


def near(name: str, ours: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    unit = {torch.float64: 2e-15, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert ours.shape == right.shape, (name, ours.shape, right.shape)
    assert ours.is_contiguous(), name
    if not ours.numel():
        return
    error = float((ours.detach().cpu().double() - right).abs().max())
    bound = unit * factor * max(1.0, float(right.abs().max()))
    assert error <= bound, (name, error, bound)  # a NaN fails


class Call(NamedTuple):
    """A call forward and backward."""

    arguments: dict[str, Any]
    results: tuple[torch.Tensor, ...]  # output, h_n, c_n, cells, gates, products
    bare: tuple[torch.Tensor, ...] | None  # the results where nothing is kept for backward, if the case wants that
    grads: list[torch.Tensor | None]  # that arrive: of output, h_n, c_n, cells
    found: tuple[torch.Tensor, ...]  # in the order of RESULTS


def call(case: OpCase, seed: int = 0) -> Call:
    triton = importlib.import_module("seqkern.kernels.rnn.rnn")
    kernels = _rnn_cuda if _library._backend == "cuda" else triton
    arguments = build(case, seed)
    lstm = case.cell == LSTM
    never = mock.patch.object(triton, "takes_sequence", return_value=False)
    with poison(), never if case.by_steps else mock.patch.dict({}):
        output, h_n, c_n, cells, gates, products = kernels.rnn_fwd(**arguments, keep=True)
        generator = torch.Generator().manual_seed(seed)
        grads: list[torch.Tensor | None] = []
        for name, result in zip("ohcs", (output, h_n, c_n, cells), strict=True):
            here = name in case.grads and (lstm or name in "oh")
            grad = torch.randn(result.shape, generator=generator).to(result) if here else None
            grads.append(grad if grad is None or not case.strided else grad[..., :1].expand(grad.shape))
        bare = None if case.keep else kernels.rnn_fwd(**arguments, keep=False)
        found = kernels.rnn_bwd(
            *grads, **arguments, output=output, cells=cells,
            gates=gates if case.keep else gates.new_empty(0), products=products if case.keep else gates.new_empty(0),
            need_input=case.need_input, need_weights=case.need_weights,
        )  # fmt: skip
    return Call(arguments, (output, h_n, c_n, cells, gates, products), bare, grads, found)


def check(case: OpCase, seed: int = 0) -> None:
    """One call forward and backward, against the reference."""
    arguments, (output, h_n, c_n, cells, gates, products), bare, grads, found = call(case, seed)
    if bare is not None:
        assert all(map(torch.equal, bare[:3], (output, h_n, c_n)))
        assert all(t.shape == (0,) for t in bare[3:])
    lstm = case.cell == LSTM
    results, wanted = oracle(arguments, grads)
    shape, acc = (case.directions, case.steps, case.batch), gates.dtype
    assert gates.shape == (*shape, KEPT[case.cell] * case.hidden)
    assert products.shape == ((*shape, GATES[case.cell] * case.hidden) if case.norm else (0,))
    assert acc == cells.dtype == products.dtype == found[-1].dtype
    names = ("output", "h_n", "c_n", "cells") if lstm else ("output", "h_n")
    for name, ours, exact in zip(names, (output, h_n, c_n, cells), results, strict=False):
        near(name, ours, exact, case.dtype, case.scale)
        assert ours.dtype == (acc if name == "cells" else case.dtype)
    if not lstm:
        assert c_n.shape == cells.shape == (0,)
    for name, ours in zip(RESULTS, found, strict=True):
        right = wanted[name]
        if name == "grad_input":
            right = right if case.need_input else None
        elif name in ("grad_b_ih", "grad_b_hh") and case.need_weights and not (case.given and name == "grad_b_ih"):
            right = wanted["grad_b_hh"]
            if not case.bias:
                assert ours.shape == (case.directions, GATES[case.cell] * case.hidden)
                continue
            right = wanted[name]
        elif name not in ("grad_h0", "grad_c0") and not case.need_weights:
            right = None
        if right is None:
            assert ours.shape == (0,), (name, ours.shape)
        else:
            near(name, ours, right, case.dtype, 4 * case.scale)
            assert ours.dtype == (acc if name == "grad_norm" else case.dtype)


def sample(seed: int, device: str = "cpu") -> OpCase:
    """A random call with random options."""
    r = random.Random(seed)
    cell = r.choice([LSTM, LSTM, LSTM, GRU, GRU, RNN_TANH, RNN_RELU, ADDITIVE, INTERPOLATED])
    steps, batch, hidden = r.choice([0, 1, 2, 3, 5]), r.choice([1, 2, 3, 17]), r.choice([1, 3, 8, 16, 17])
    directions = r.choice([1, 1, 2])
    projection = r.choice([None, None, 1, 5]) if cell == LSTM and hidden > 5 else None
    plain = r.random() < 0.4  # what the whole-sequence kernels take
    return OpCase(
        cell=cell, steps=steps, batch=batch, inputs=r.choice([1, 3, 8]), hidden=hidden, directions=directions,
        dtype=r.choice([torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]),
        projection=None if plain else projection, bias=r.random() < 0.7, given=r.random() < 0.3,
        lengths=tuple(r.randint(0, steps) for _ in range(batch)) if r.random() < 0.5 else None,
        resets=r.choice([0.0, 0.0, 0.3, 0.8]), mask=r.random() < 0.4,
        peephole=not plain and cell == LSTM and r.random() < 0.4, norm=not plain and r.random() < 0.4,
        zoneout=(0.0, 0.0) if plain else (r.choice([0.0, 0.3, 1.0]), r.choice([0.0, 0.2]) if cell == LSTM else 0.0),
        training=r.random() < 0.6, keep=r.random() < 0.6,
        grads="".join(name for name in "ohcs" if r.random() < 0.7) or "o", need_input=r.random() < 0.8,
        need_weights=r.random() < 0.8, strided=r.random() < 0.3, device=device,
    )  # fmt: skip
