"""One call for a whole model: its modules run on seqkern, in place, and back again.

A module is swapped by its `__class__`, to a subclass of the class that it has: parameters, hooks, optimisers that hold
the parameters, tied weights, state_dict and training mode are those of the same object as before. Nothing is added to
the instance, so that nothing is left behind, and `restore` needs no record of what `optimize` did.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

import seqkern
from seqkern import _rms_flavours as flavours
from seqkern._library import backend_for

Model = TypeVar("Model", bound=nn.Module)

# torch's modules, by exact type: a subclass may mean something else.
SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    getattr(torch.nn, name): getattr(seqkern.nn, name)
    for name in (
        "LayerNorm", "RMSNorm", "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell", "MultiheadAttention",
        "TransformerEncoderLayer", "TransformerDecoderLayer", "TransformerEncoder", "TransformerDecoder", "Transformer",
    )
}  # fmt: skip
_BACK = {ours: torchs for torchs, ours in SWAPS.items()}
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)  # which only call their layers
NAME = "seqkern"  # of transformers' attention

# What attention a model of transformers had before. A copy of the model is not in it: it gets "sdpa" back.
_attention_before: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Row:
    """A module of a model, or several of one kind: what runs, or why it is not seqkern."""

    module: str  # its path, with a * where that differs
    kind: str  # its class
    runs: str
    reason: str
    count: int = 1


@dataclass(frozen=True)
class ModelChoices:
    """What `explain(model)` returns: rows, and a table of them by `str()`."""

    rows: tuple[Row, ...]
    others: int  # modules for which there is no kernel here: linear layers, activations, containers

    def __str__(self) -> str:
        cells = [("module", "class", "runs", "why")]
        cells += [(f"{row.module} ({row.count})" if row.count > 1 else row.module, *_rest(row)) for row in self.rows]
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        cells.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "---"))
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]) for line in cells]
        return "\n".join([*(line.rstrip() for line in lines), f"{self.others} other modules: no kernel of seqkern's"])


def _rest(row: Row) -> tuple[str, str, str]:
    return row.kind, row.runs, row.reason


def optimize(model: Model, *, attention: bool = True) -> Model:
    """Runs a model's modules on seqkern's kernels, in place; `restore` undoes it, `explain(model)` tells what runs.

    Swapped are, by exact type, torch.nn's LayerNorm, RMSNorm, LSTM, GRU, RNN and their cells, MultiheadAttention and
    the layers and stacks of the Transformer; the RMS norms that models bring themselves (transformers has some hundred
    and eighty such classes), where a probe with numbers gives the same bits; and, in a model of transformers, its
    attention (`seqkern.integrations.transformers`). Parameters, state_dict, hooks, copies and pickles stay as they
    were. Results agree to rounding, but where torch's Transformer layers disagree with themselves: rows of padding hold
    in evaluation what they hold in training, and a query without keys is no NaN. Call it before `fully_shard` or
    parametrizations, which change the class themselves.

    Args:
        model: a module; its submodules are swapped as well.
        attention: whether transformers' attention is switched.

    Returns:
        The model itself.

    Raises:
        TypeError: not a module.
        ValueError: there is nothing in it that could be swapped.

    Example:
        >>> import torch, seqkern
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
        >>> model = seqkern.optimize(model)
        >>> model[1]
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True)
        >>> type(model[1]).__module__
        'seqkern.nn.layer_norm'
        >>> print(seqkern.explain(model).rows[0].runs.split()[0])
        C++
        >>> type(seqkern.restore(model)[1]).__module__
        'torch.nn.modules.normalization'
    """
    _check(model, "optimize")
    served = False
    if attention:  # first: an ImportError of a transformers that is too old leaves everything as it was
        for _, part in _of_transformers(model):
            served |= not _switch_attention(part)
    for _, module in _modules(model):
        reason = _why_not(module)
        if _is_ours(module):
            served = True
        elif not reason:
            found = SWAPS.get(type(module)) or flavours.fused_class(module)
            if found is not None:
                object.__setattr__(module, "__class__", found)
                served = True
    if not served:
        kinds = Counter(type(module).__name__ for _, module in _modules(model))
        has = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8))
        raise ValueError(
            f"optimize: there is nothing in {type(model).__name__} that seqkern could run (it has {has});"
            " explain(model) tells why"
        )
    return model


def restore(model: Model) -> Model:
    """Turns seqkern's modules into torch's, in place: what `optimize` did is undone.

    That is also for what must see torch's own classes: `torch.ao.quantization.quantize_dynamic`, pickles for a machine
    without seqkern. Modules made as `seqkern.nn`'s become torch's as well, but for those with options that torch has
    not, which stay.

    Args:
        model: a module, optimized or not.

    Returns:
        The model itself.

    Raises:
        TypeError: not a module.

    Example:
        >>> import torch, seqkern
        >>> model = seqkern.optimize(torch.nn.Sequential(torch.nn.LayerNorm(8)))
        >>> type(seqkern.restore(model)[0]) is torch.nn.LayerNorm
        True
    """
    _check(model, "restore")
    for _, module in _modules(model):
        if type(module) in _BACK:
            if not _own_options(module):
                object.__setattr__(module, "__class__", _BACK[type(module)])
        elif flavours.is_fused(module):
            object.__setattr__(module, "__class__", type(module).__base__)
    for _, part in _of_transformers(model):
        config: Any = part.config
        if config._attn_implementation == NAME:
            part.set_attn_implementation(_attention_before.pop(part, "sdpa"))
    return model


def explain_model(model: nn.Module) -> ModelChoices:
    """`explain` of a module."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    others = 0
    for path, module in _modules(model):
        row = _row(module)
        if row is None:
            others += 1
        else:
            key = (re.sub(r"(?<![^.])\d+(?![^.])", "*", path), type(module).__name__, *row)
            rows.setdefault(key, []).append(path or "(the model)")
    for path, part in _of_transformers(model):
        config: Any = part.config
        if config._attn_implementation == NAME:
            rows[path, "attention", _kernel("attention", part), ""] = [path or "(the model)"]
        else:
            reason = "optimize(model) switches it" if _has_interface(part) else "not through transformers' interface"
            rows[path, "attention", f"transformers {config._attn_implementation}", reason] = [path or "(the model)"]
    found = ((_common(paths), *key[1:], len(paths)) for key, paths in rows.items())
    return ModelChoices(tuple(Row(*row) for row in found), others)


def _common(paths: list[str]) -> str:
    """The one path of all, with a * for the parts in which they differ."""
    parts = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _check(model: Any, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return iter(list(model.named_modules()))


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("seqkern.nn.") or flavours.is_fused(module)


def _own_options(module: nn.Module) -> list[str]:
    """The options in force that torch's class does not have."""
    names = ["layer_norm", "peephole", "recompute", "recurrent_dropout", "zoneout"]
    names += ["weight_offset", "round_before_weight", "num_kv_heads", "window", "qk_norm", "rope"]
    found = [name for name in names if getattr(module, name, False)]
    if isinstance(module, seqkern.nn.MultiheadAttention) and module._own_head_dim:
        found.append("head_dim")
    if isinstance(module, _LAYERS):  # torch's layers do without their attention's forward, in evaluation
        found += _own_options(module.self_attn)
    return found


def _why_not(module: nn.Module) -> str:
    """Why a module that has a counterpart stays as it is; "" if it can be swapped, or has none."""
    kind = type(module)
    base = next((torchs for torchs in SWAPS if isinstance(module, torchs)), None)
    if base is None and not flavours.looks_like_one(module):
        return ""
    if "forward" in vars(module):
        return "its forward was replaced"
    device = next((p.device.type for p in module.parameters(recurse=False)), "cpu")
    if device not in ("cpu", "cuda", "meta"):
        return f"no kernels for {device}"
    if base is None or kind is base:
        return ""
    if torch.nn.utils.parametrize.is_parametrized(module):
        return f"parametrized, which made it a {kind.__name__}: optimize before that"
    if any(c.__module__.startswith("torch.distributed") for c in kind.__mro__):
        return "wrapped by FSDP: optimize before fully_shard"
    return f"a subclass of {base.__name__} may mean something else"


def _row(module: nn.Module) -> tuple[str, str] | None:
    """(what runs, why) of a module, None if seqkern has nothing for its kind."""
    if isinstance(module, _STACKS) and (_is_ours(module) or type(module) in SWAPS):
        return None
    if _is_ours(module):
        options = _own_options(module)
        reason = f"with {', '.join(options)}" if options and not flavours.is_fused(module) else ""
        if type(module) in map(SWAPS.get, _RECURRENT):
            reason = f"{reason}; " * bool(reason) + "quantize_dynamic passes it over: restore(model) first"
        return _kernel(_op_of(module), module), reason
    torchs = next((c for c in SWAPS if isinstance(module, c)), None)
    if torchs is None and not flavours.looks_like_one(module):
        return None
    reason = _why_not(module)
    if not reason and torchs is None and flavours.fused_class(module) is None:
        reason = "a probe gave other numbers than each kind of RMS norm here"
    return "torch" if torchs else "its own code", reason or "optimize(model) swaps it"


def _op_of(module: nn.Module) -> str:
    if flavours.is_fused(module):
        return "rms_norm"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, _LAYERS):
        return "add_layer_norm"
    name = type(module).__name__
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        cell = "_cell" * isinstance(module, nn.RNNCellBase)
        if name.startswith("RNN"):
            tanh = getattr(module, "nonlinearity", "tanh") == "tanh"
            return f"rnn_{'tanh' if tanh else 'relu'}{cell}"
        return name.removesuffix("Cell").lower() + cell
    return {"LayerNorm": "layer_norm", "AddLayerNorm": "add_layer_norm"}.get(
        name, "rms_norm" if name == "RMSNorm" else "add_rms_norm"
    )


def _kernel(op: str, module: nn.Module) -> str:
    tensor = next(module.parameters(), torch.empty(0))
    if tensor.device.type == "meta":
        return "seqkern, once it is off the meta device"
    probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if backend_for(op, probe) == "cpu":
        return seqkern.explain(op, probe).kernel
    return f"{backend_for(op, probe)} on {tensor.device}"


# ---- transformers -------------------------------------------------------------------------------------------------


def _of_transformers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost parts of the model that are transformers' models; without importing transformers."""
    library = sys.modules.get("transformers")
    if library is None:
        return
    found: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel) and not any(f"{path}.".startswith(f) for f in found):
            found.append(f"{path}." if path else "")
            yield path, module


def _has_interface(model: Any) -> bool:
    """Whether the model asks transformers for its attention function: T5 does, and does not declare it."""
    code = sys.modules.get(type(model).__module__)
    return bool(getattr(model, "_supports_attention_backend", False)) or hasattr(code, "ALL_ATTENTION_FUNCTIONS")


def _switch_attention(model: Any) -> str:
    """Gives a model of transformers seqkern's attention; why not, if it cannot have it."""
    if model.config._attn_implementation == NAME:
        return ""
    if not _has_interface(model):
        return "not through transformers' interface"
    from seqkern.integrations import transformers as integration

    before = model.config._attn_implementation
    model.set_attn_implementation(integration.register())
    _attention_before[model] = before
    return ""
