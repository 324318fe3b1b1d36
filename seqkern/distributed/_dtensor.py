"""How the ops run on DTensors: which dimensions may be split, and what the results then are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from seqkern._arguments import by_name

_registered = False


def register_dtensor() -> None:
    """Lets every op take DTensors split over the batch (rows of a norm or gated unit), or attention's heads.

    Once in a process, before the first call; called again, it does nothing. It imports torch.distributed.tensor.
    All tensors of a call must be DTensors of one mesh, parameters replicated (`distribute_tensor(w, mesh,
    [Replicate()])`); gradients of parameters come back as Partial, which DTensor reduces where it is needed. Heads stay
    split where the processes divide the query's and the key's. Another dimension that is split is gathered by DTensor
    first: right, but without a gain. So are calls with dropout or zoneout, whose masks count rows of the whole batch;
    for them torch.manual_seed must have been the same on all processes. Packed sequences (`attention_varlen`) may be
    split over heads only. A sequence that is split: `ring_attention`.

    Raises:
        ImportError: a torch without torch.distributed.tensor. From a call: DTensor's RuntimeError where tensors and
            DTensors are mixed; recurrent_dropout makes a mask that is a tensor.

    Example:
        >>> import seqkern.distributed
        >>> seqkern.distributed.register_dtensor()
    """
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    for name, rule in _RULES.items():
        op = getattr(torch.ops.seqkern, name)
        register_sharding(op.default)(_sharding(op, rule))
    _registered = True


def _sharding(op: Any, rule: Callable[[dict[str, Any]], Sequence[tuple[list[Any], dict[str, Any]]]]) -> Any:
    """What torch asks for: placements of every result, then of every tensor argument, for each way to split."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def placement(what: Any) -> Any:
        return Replicate() if what is None else Partial() if what == "sum" else Shard(what)

    def sharding(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        named = by_name(op, args)
        results = len(op.default._schema.returns)
        found = []
        for outputs, inputs in [([None] * results, {}), *rule(named)]:
            given: list[Any] = []
            for name, value in named.items():
                many = isinstance(value, (list, tuple))
                given += [placement(inputs.get(name)) for t in (value if many else [value]) if hasattr(t, "placements")]
            found.append(([placement(what) for what in outputs], given))
        return found

    return sharding


def _attention_ways(a: dict[str, Any], rows: Sequence[str]) -> list[tuple[dict[str, Any], bool]]:
    """The ways to split attention's arguments, and of each whether the mask is split with them."""
    mask, ways = a["attn_mask"], []
    processes = a["query"].mesh.size()
    batch, heads = a["query"].shape[:2]
    if a["seed"] is not None:
        return []
    if a["query_starts"] is None:
        whole = mask is None or mask.shape[0] == batch
        own = {**dict.fromkeys((*rows, "key_lengths", "alibi_slopes"), 0), "attn_mask": 0 if whole else None}
        ways.append((own, whole))
    if heads % processes == 0 and a["key"].shape[1] % processes == 0:
        whole = mask is None or mask.shape[1] == heads
        own = {**dict.fromkeys((*rows, "alibi_slopes"), 1), "sinks": 0, "attn_mask": 1 if whole else None}
        ways.append((own, whole))
    return ways


def _attention_fwd(a: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    return [([own["query"]] * 2, own) for own, _ in _attention_ways(a, ("query", "key", "value"))]


def _attention_bwd(a: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    found: list[tuple[list[Any], dict[str, Any]]] = []
    for own, whole in _attention_ways(a, ("grad_out", "grad_lse", "query", "key", "value", "out", "lse")):
        at = own["query"]
        of_mask = None if not a["need_mask"] else at if whole else "sum"
        found.append(([at, at, at, of_mask, at if a["need_slopes"] else None], own))
    return found


def _layer_norm_fwd(a: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    if a["seed"] is not None:
        return []
    outputs = [0, None if a["residual"] is None else 0, 0 if a["centred"] else None, 0]
    return [(outputs, {"input": 0, "residual": 0})]


def _layer_norm_bwd(a: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    if a["seed"] is not None:
        return []
    outputs = [0, None, "sum" if a["need_weight"] else None, "sum" if a["need_bias"] else None]
    rows = ("grad_output", "grad_sum", "input", "rstd", *(("mean",) if a["centred"] else ()))
    return [(outputs, dict.fromkeys(rows, 0))]


def _elementwise(results: int, *names: str) -> Any:
    def rule(a: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
        return [([d] * results, dict.fromkeys(names, d)) for d in range(len(a["gate"].shape))]

    return rule


def _rnn_parts(a: dict[str, Any]) -> dict[str, Any]:
    """Of the arguments that forward and backward share: the batch's dimension."""
    return {"input": 1, "h0": 1, "c0": 1, "lengths": 0, "resets": 1, "recurrent_mask": 1}


def _rnn_fwd(a: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    if a["seed"] is not None or not a["w_ih"]:
        return []
    keep, lstm = a["keep"], a["c0"] is not None
    outputs = [1, 1, 1 if lstm else None, 2 if keep and lstm else None, 2 if keep else None]
    return [([*outputs, 2 if keep and a["norm"] else None], _rnn_parts(a))]


def _rnn_bwd(a: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    if a["seed"] is not None or not a["w_ih"]:
        return []
    wanted = a["need_weights"]
    lists = ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr", "peephole", "norm")
    sums = ["sum" if wanted and (a[n] or n in ("b_ih", "b_hh")) else None for n in lists]
    kept = {n: 2 for n in ("cells", "gates", "products") if a[n] is not None and len(a[n].shape) == 4}
    rows = {"grad_output": 1, "grad_h_n": 1, "grad_c_n": 1, "grad_cells": 2, "output": 1, **kept, **_rnn_parts(a)}
    outputs = [1 if a["need_input"] else None, 1, None if a["c0"] is None else 1, *sums]
    return [(outputs, rows)]


def _rnn_cell_fwd(a: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    lstm = a["c"] is not None
    return [([0, 0 if lstm else None, 0], dict.fromkeys(("x_gates", "h_gates", "h", "c"), 0))]


def _rnn_cell_bwd(a: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    from seqkern.ops._rnn_checks import GRU, LSTM

    gru, lstm = (0 if a["cell"] == cell else None for cell in (GRU, LSTM))
    rows = [n for n in ("grad_h", "grad_c", "h", "c", "c_new", "activated") if a[n] is not None and a[n].shape[0]]
    return [([0, gru, gru, lstm], dict.fromkeys(rows, 0))]


_RULES = {
    "attention_fwd": _attention_fwd,
    "attention_bwd": _attention_bwd,
    "layer_norm_fwd": _layer_norm_fwd,
    "layer_norm_bwd": _layer_norm_bwd,
    "glu_fwd": _elementwise(1, "gate", "up"),
    "glu_bwd": _elementwise(2, "grad_output", "gate", "up"),
    "rnn_fwd": _rnn_fwd,
    "rnn_bwd": _rnn_bwd,
    "rnn_cell_fwd": _rnn_cell_fwd,
    "rnn_cell_bwd": _rnn_cell_bwd,
}
