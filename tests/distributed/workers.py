"""What the processes of the tests do."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import seqkern
import seqkern.distributed as sd
from seqkern.testing import assert_passed, compare

BATCH, LENGTH, DIM = 2, 48, 16


def every_case() -> dict[str, dict[str, Any]]:
    """Every method, layout, causal, window and number of key heads; options and dtypes besides."""
    windows = (None, (7, 3), (5, -1))
    found = {}
    for method, layout, causal, window, kv_heads in itertools.product(
        ("allgather", "ring", "ulysses"), ("zigzag", "contiguous"), (False, True), windows, (8, 4)
    ):
        name = f"{method}-{layout}-{'causal' if causal else 'full'}-{window}-{kv_heads}"
        found[name] = {"method": method, "layout": layout, "causal": causal, "window": window, "kv_heads": kv_heads}
    plain = {"layout": "zigzag", "causal": True, "window": None, "kv_heads": 4}
    for method in ("allgather", "ring", "ulysses"):
        of_method = plain | {"method": method}
        found[f"{method}-options"] = of_method | {"softcap": 5.0, "sinks": True, "slopes": True, "window": (20, None)}
        found[f"{method}-scale"] = of_method | {"scale": 0.5, "layout": "contiguous", "sinks": True}
        found[f"{method}-float64"] = of_method | {"dtype": torch.float64, "sinks": True, "slopes": True}
        found[f"{method}-bfloat16"] = of_method | {"dtype": torch.bfloat16, "sinks": True}
        found[f"{method}-float16"] = of_method | {"dtype": torch.float16, "causal": False}
    for layout, causal, window in itertools.product(("zigzag", "contiguous"), (False, True), windows[:2]):
        name = f"dropout-{layout}-{'causal' if causal else 'full'}-{window}"
        found[name] = plain | {
            "method": "allgather", "layout": layout, "causal": causal, "window": window, "dropout_p": 0.3,
        }  # fmt: skip
    found["dropout-options"] = plain | {"method": "allgather", "dropout_p": 0.3, "sinks": True, "slopes": True}
    found["dropout-bfloat16"] = plain | {"method": "allgather", "dropout_p": 0.3, "dtype": torch.bfloat16}
    return found


def attention_cases(rank: int, ranks: int, report: Any) -> None:
    for name, case in every_case().items():
        report(name, lambda case=case: attention_case(rank, ranks, **case))


def attention_case(
    rank: int, ranks: int, method: str, layout: str, causal: bool, window: Any, kv_heads: int,
    dtype: torch.dtype = torch.float32, softcap: float | None = None, sinks: bool = False, slopes: bool = False,
    scale: float | None = None, dropout_p: float = 0.0,
) -> None:  # fmt: skip
    """Output, log-sum-exp and every gradient of the group against those of one process and the float64 result."""
    g = torch.Generator().manual_seed(1)
    q, grad_out = (torch.randn(BATCH, 8, LENGTH, DIM, generator=g) for _ in range(2))
    k, v = (torch.randn(BATCH, kv_heads, LENGTH, DIM, generator=g) for _ in range(2))
    grad_lse = torch.randn(BATCH, 8, LENGTH, generator=g)
    tensors = {"query": q, "key": k, "value": v}
    if sinks:
        tensors["sinks"] = torch.randn(8, generator=g)
    if slopes:
        tensors["alibi_slopes"] = torch.rand(8, generator=g)
    options: dict[str, Any] = {
        "causal": causal, "window": window, "softcap": softcap, "scale": scale, "dropout_p": dropout_p,
        "return_lse": True,
    }  # fmt: skip
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    grad_out = grad_out.to(dtype)

    def cut(t: Tensor) -> Tensor:
        return sd.shard_sequence(t, layout=layout)

    local = {
        name: (cut(t) if name in ("query", "key", "value") else t.clone()).requires_grad_()
        for name, t in tensors.items()
    }
    torch.manual_seed(7 + rank)  # the first process decides
    out, lse = sd.ring_attention(**local, **options, method=method, layout=layout)
    assert out.dtype == dtype
    torch.autograd.backward([out, lse], [cut(grad_out), cut(grad_lse.to(lse.dtype))])
    results = {"out": out, "lse": lse} | {f"grad of {name}": t.grad for name, t in local.items()}
    for name, t in results.items():
        assert t is not None, name
        if name in ("grad of sinks", "grad of alibi_slopes"):
            results[name] = t.detach().double()
            dist.all_reduce(results[name])
            results[name] = results[name].to(dtype)
        else:
            results[name] = sd.unshard_sequence(t.detach(), layout=layout)
    if rank == 0:
        exact = whole(tensors, options, grad_out, grad_lse, torch.float64)
        # Of float64, the exact result has one process's own errors: the formula's say how large errors are.
        with seqkern.use_backend("reference" if dtype == torch.float64 else "auto"):
            one = whole(tensors, options, grad_out, grad_lse, dtype)
        assert_passed([compare(t, one[name], exact[name], name=name) for name, t in results.items()])


def whole(
    tensors: dict[str, Tensor], options: dict[str, Any], grad_out: Tensor, grad_lse: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    leaves = {name: t.to(dtype).clone().requires_grad_() for name, t in tensors.items()}
    torch.manual_seed(7)
    out, lse = seqkern.attention(**leaves, **options)
    torch.autograd.backward([out, lse], [grad_out.to(dtype), grad_lse.to(lse.dtype)])
    found = {"out": out, "lse": lse} | {f"grad of {name}": t.grad for name, t in leaves.items()}
    return {name: t.detach() for name, t in found.items() if t is not None}


def rnn_case_list() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for cell, method in itertools.product(("lstm", "gru", "rnn_tanh", "rnn_relu"), ("alltoall", "relay")):
        found[f"{cell}-{method}"] = {"cell": cell, "method": method}
        found[f"{cell}-{method}-state"] = {"cell": cell, "method": method, "state": True, "layers": 2}
    for method in ("alltoall", "relay"):
        found[f"lstm-{method}-batch_first"] = {"cell": "lstm", "method": method, "batch_first": True, "state": True}
        found[f"lstm-{method}-float64"] = {"cell": "lstm", "method": method, "dtype": torch.float64, "layers": 2}
        found[f"lstm-{method}-peepholes"] = {"cell": "lstm", "method": method, "peepholes": True, "state": True}
        found[f"gru-{method}-norms"] = {"cell": "gru", "method": method, "norms": True, "state": True}
    found["lstm-alltoall-both"] = {"cell": "lstm", "method": "alltoall", "directions": 2, "layers": 2, "state": True}
    found["gru-alltoall-lengths"] = {"cell": "gru", "method": "alltoall", "lengths": True, "directions": 2}
    found["lstm-alltoall-zigzag"] = {"cell": "lstm", "method": "alltoall", "layout": "zigzag"}
    found["lstm-relay-slices"] = {"cell": "lstm", "method": "relay", "slices": 3, "state": True}
    found["gru-relay-few"] = {"cell": "gru", "method": "relay", "slices": 20, "state": True}
    found["lstm-alltoall-bfloat16"] = {"cell": "lstm", "method": "alltoall", "dtype": torch.bfloat16}
    return found


def rnn_cases(rank: int, ranks: int, report: Any) -> None:
    for name, case in rnn_case_list().items():
        report(name, lambda case=case: rnn_case(rank, ranks, **case))


def rnn_case(
    rank: int, ranks: int, cell: str, method: str, layers: int = 1, directions: int = 1, state: bool = False,
    batch_first: bool = False, lengths: bool = False, norms: bool = False, peepholes: bool = False,
    layout: str = "contiguous", slices: int | None = None, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(2)
    steps, batch, width, hidden = 16, 8, 6, 10
    gates = {"lstm": 4, "gru": 3}.get(cell, 1) * hidden

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    weights = []
    for layer, _ in itertools.product(range(layers), range(directions)):
        inputs = width if layer == 0 else directions * hidden
        weights += [draw(gates, inputs) * 0.3, draw(gates, hidden) * 0.3, draw(gates), draw(gates)]
    x, grad_y = draw(steps, batch, width), draw(steps, batch, directions * hidden)
    hx = [draw(layers * directions, batch, hidden) for _ in range(1 + (cell == "lstm"))]
    grad_state = [draw(*t.shape) for t in hx]
    extra: dict[str, Any] = {}
    if norms:
        extra["norms"] = [draw(gates) for _ in range(4 * layers * directions)]
    if peepholes:
        extra["peepholes"] = [draw(3, hidden) for _ in range(layers * directions)]
    options: dict[str, Any] = {"num_layers": layers, "batch_first": batch_first, "bidirectional": directions == 2}
    if lengths:
        options["lengths"] = torch.randint(0, steps + 1, (batch,), generator=g)
    dim = 0
    if batch_first:
        x, grad_y, dim = x.transpose(0, 1), grad_y.transpose(0, 1), 1

    def results(function: Any, x: Tensor, grad_y: Tensor, share: int, dtype: torch.dtype, **more: Any) -> Any:
        def leaf(t: Tensor) -> Tensor:
            return t.to(dtype).detach().clone().requires_grad_()

        x, ws, state_leaves = leaf(x), [leaf(t) for t in weights], [leaf(t) for t in hx]
        others = {name: [leaf(t) for t in ts] for name, ts in extra.items()}
        given = (tuple(state_leaves) if cell == "lstm" else state_leaves[0]) if state else None
        y, end = function(x, given, ws, **others, **options, **more)
        ends = list(end) if isinstance(end, tuple) else [end]
        cotangents = [
            grad_y,
            *(t / share for t in grad_state),
        ]  # every process has the final state: a share of its loss
        torch.autograd.backward([y, *ends], [t.to(dtype) for t in cotangents])
        rows = {"output": y, "grad of input": x.grad}
        same = {f"state {i}": t for i, t in enumerate(ends)}
        leaves = [*ws, *(state_leaves if state else []), *(t for ts in others.values() for t in ts)]
        shares = {f"grad {i}": t.grad for i, t in enumerate(leaves)}
        return [{name: t.detach() for name, t in of.items() if t is not None} for of in (rows, same, shares)]

    def cut(t: Tensor) -> Tensor:
        return sd.shard_sequence(t, dim=dim, layout=layout)

    more: dict[str, Any] = {"method": method, "layout": layout}
    if slices is not None:
        more["slices"] = slices
    rows, same, shares = results(getattr(sd, cell), cut(x), cut(grad_y), ranks, dtype, **more)
    found = {name: sd.unshard_sequence(t, dim=dim, layout=layout) for name, t in rows.items()} | same
    for name, t in shares.items():
        total = t.double()
        dist.all_reduce(total)
        found[name] = total.to(dtype)
    exact, one = {}, {}
    for of in results(getattr(seqkern, cell), x, grad_y, 1, torch.float64):
        exact |= of
    with seqkern.use_backend("reference" if dtype == torch.float64 else "auto"):
        for of in results(getattr(seqkern, cell), x, grad_y, 1, dtype):
            one |= of
    assert found.keys() == exact.keys()
    assert_passed([compare(t, one[name], exact[name], name=name) for name, t in found.items()])
