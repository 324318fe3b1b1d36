"""RMS norms that models bring themselves: which of the known kinds one is, found by numbers, and its fused class.

Models differ in where they round and in what the weight means:

    Llama, T5     weight * round(x / rms(x))       (weight_offset=0, round_before_weight=True)
    Gemma         round(x / rms(x) * (1 + weight)) (weight_offset=1, round_before_weight=False)
    torch         round(x / rms(x) * weight)

Their code is not read. A module that looks like one runs on numbers whose sum of squares is exact in any order, with a
random weight: a kind is the module's if every bit agrees there, and all but the last ones on random numbers.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqkern.ops.layer_norm import rms_norm


class Flavour(NamedTuple):
    """The options of `rms_norm` that tell the kinds apart."""

    weight_offset: float
    round_before_weight: bool


FLAVOURS = (Flavour(0.0, True), Flavour(1.0, False), Flavour(0.0, False), Flavour(1.0, True))
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def looks_like_one(module: nn.Module) -> bool:
    """A weight of one dimension, an eps, and nothing else."""
    parameters, weight = module._parameters, module._parameters.get("weight")
    return (
        not type(module).__module__.startswith(("torch.nn.", "seqkern.nn."))
        and weight is not None
        and weight.dim() == 1
        and [name for name, p in parameters.items() if p is not None] == ["weight"]
        and not module._modules
        and not module._buffers
        and isinstance(eps_of(module), float)
        and type(module).forward is not nn.Module.forward
    )


def fused_class(module: nn.Module) -> type[nn.Module] | None:
    """The subclass of the module's class that runs on seqkern; None if it is none of the known kinds."""
    if not looks_like_one(module) or "forward" in vars(module):
        return None
    flavour = flavour_of(module)
    return None if flavour is None else _fused(type(module), flavour)  # type: ignore[arg-type]


def is_fused(module: nn.Module) -> bool:
    return hasattr(type(module), "_seqkern_flavour")


def eps_of(module: nn.Module) -> Any:
    found = vars(module)
    return found.get("variance_epsilon", found.get("eps"))


@cache
def _fused(original: type[nn.Module], flavour: Flavour) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = self.weight
        if args or kwargs or hidden_states.dtype != weight.dtype:  # nobody has proved those
            result: Tensor = original.forward(self, hidden_states, *args, **kwargs)
            return result
        return rms_norm(hidden_states, weight.shape, weight, eps_of(self), **flavour._asdict())

    def reduce(self: Any, protocol: Any) -> Any:
        """As the original class, which can be found by name; this one is made again."""
        found: Any = nn.Module.__reduce_ex__(self, 2)
        return _revive, (original, *flavour), *found[2:]

    names = {"forward": forward, "__reduce_ex__": reduce, "_seqkern_flavour": flavour, "__doc__": original.__doc__}
    made = type(original.__name__, (original,), names | {"__module__": original.__module__})
    made.__qualname__ = original.__qualname__
    return made


def _revive(original: type[nn.Module], weight_offset: float, round_before_weight: bool) -> nn.Module:
    """An instance without attributes, for unpickling."""
    made: type[nn.Module] = _fused(original, Flavour(weight_offset, round_before_weight))  # type: ignore[arg-type]
    module: nn.Module = made.__new__(made)
    return module


@torch.no_grad()
def flavour_of(module: nn.Module) -> Flavour | None:
    """The kind that a module which looks like one is of, in its own dtype and in bfloat16, where the kinds differ."""
    weight: Any = module.weight
    if weight.device.type == "meta" or weight.dtype not in _DTYPES or not weight.numel():
        return None
    dtypes = dict.fromkeys((weight.dtype, torch.bfloat16))
    return next((f for f in FLAVOURS if all(f in _agreeing(module, dtype) for dtype in dtypes)), None)


def _agreeing(module: nn.Module, dtype: torch.dtype) -> list[Flavour]:
    weight: Any = module.weight
    generator = torch.Generator().manual_seed(0)
    size = weight.shape[0]
    drawn = torch.randn(size, generator=generator)
    exact = torch.randint(-1, 2, (4, size), generator=generator).exp2()
    exact *= torch.randint(0, 2, (4, size), generator=generator) * 2 - 1
    drawn, exact, random = (
        t.to(weight.device, dtype) for t in (drawn, exact, 3 * torch.randn(4, size, generator=generator))
    )
    stranger: Any = copy.copy(module)  # with another weight, and without calling anybody's hooks
    stranger.__dict__["_parameters"] = {"weight": nn.Parameter(drawn, requires_grad=False)}
    try:
        theirs = [stranger.forward(x) for x in (exact, random)]
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes something else
        return []
    if any(not isinstance(out, Tensor) or out.shape != exact.shape or out.dtype != dtype for out in theirs):
        return []

    def agrees(flavour: Flavour) -> bool:
        ours = [rms_norm(x, weight.shape, drawn, eps_of(module), **flavour._asdict()) for x in (exact, random)]
        near = (ours[1] - theirs[1]).abs() <= 4 * torch.finfo(dtype).eps * theirs[1].abs()
        return torch.equal(ours[0], theirs[0]) and bool(near.all())

    return [flavour for flavour in FLAVOURS if agrees(flavour)]
