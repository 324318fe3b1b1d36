"""torch's own cases of its modules (ModuleInfo), put to ours: values, gradients, state_dict both ways.

The cases are too small for the error rule, which other tests put to the same modules: torch's own tolerances.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import seqkern

common_modules = pytest.importorskip("torch.testing._internal.common_modules")

NAMES = (
    "LayerNorm", "RMSNorm", "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell", "MultiheadAttention",
    "TransformerEncoderLayer", "TransformerDecoderLayer", "TransformerEncoder", "Transformer",
)  # fmt: skip
# Of modules that torch may have no cases for: none of these today.
KNOWN = {
    info.module_cls.__name__: info for info in common_modules.module_db if info.module_cls.__module__[:5] == "torch"
}


def cases(name: str, training: bool) -> list[Any]:
    info = KNOWN[name]
    torch.manual_seed(0)
    return list(info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training))


def through(change: Callable[[Any], Any], value: Any) -> Any:
    """Every tensor in arguments or results changed."""
    if isinstance(value, PackedSequence):
        return PackedSequence(change(value.data), *value[1:])
    if isinstance(value, (tuple, list)):
        return type(value)(through(change, v) for v in value)
    if isinstance(value, dict):
        return {k: through(change, v) for k, v in value.items()}
    return change(value)


def tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    through(lambda v: found.append(v) if isinstance(v, Tensor) and v.is_floating_point() else None, value)
    return found


def run(module: nn.Module, dtype: torch.dtype, call: Any) -> list[Tensor]:
    """Outputs, gradients of inputs and parameters."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype, copy=True).requires_grad_(value.requires_grad)

    module.zero_grad()
    args, kwargs = through(leaf, call.args), through(leaf, call.kwargs)
    found = tensors(module(*args, **kwargs))
    torch.manual_seed(1)
    sum((out * torch.randn(out.shape, dtype=torch.float64).to(dtype)).sum() for out in found).backward()  # type: ignore[union-attr]
    leaves = [t for t in tensors([args, list(kwargs.values())]) if t.requires_grad]
    return [t.detach() for t in found] + [t.grad for t in (*leaves, *module.parameters()) if t.grad is not None]


def made(name: str, case: Any, training: bool) -> tuple[nn.Module, nn.Module]:
    """torch's module and ours, by the same arguments."""
    call = case.constructor_input
    theirs = getattr(nn, name)(*copy.deepcopy(call.args), **call.kwargs)

    def own(value: Any) -> Any:  # the layer that a stack is made of
        if not isinstance(value, nn.Module):
            return value
        layer = copy.deepcopy(value)
        seqkern.optimize(layer)
        return layer

    ours = getattr(seqkern.nn, name)(*map(own, call.args), **call.kwargs)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape) * 0.3)
    return theirs.train(training), ours.train(training)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_cases(name, training):
    for case in cases(name, training):
        theirs, ours = made(name, case, training)
        assert type(ours) is getattr(seqkern.nn, name)
        first = {k: v.clone() for k, v in ours.state_dict().items()}
        ours.load_state_dict(theirs.state_dict())  # strict
        back = copy.deepcopy(theirs)
        back.load_state_dict(first)
        assert all(torch.equal(v, first[k]) for k, v in back.state_dict().items())
        for dtype in (torch.float32, torch.float64):
            expected = run(theirs.to(dtype), dtype, case.forward_input)
            found = run(ours.to(dtype), dtype, case.forward_input)
            for mine, torchs in zip(found, expected, strict=True):
                rtol, atol = (1.3e-6, 1e-5) if dtype == torch.float32 else (1e-7, 1e-7)
                atol *= max([1.0, *torchs.abs().flatten().tolist()])  # sums that cancel
                torch.testing.assert_close(mine, torchs, rtol=rtol, atol=atol)
            assert len(expected) > len(list(ours.parameters())), "an output, and gradients of all parameters"


def test_cases_are_found_for_all():
    assert set(NAMES) <= set(KNOWN)
    assert sum(len(cases(name, True)) for name in NAMES) > 300
