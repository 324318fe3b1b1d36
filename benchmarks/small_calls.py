"""What small calls cost beside torch's: `python -m benchmarks.small_calls [--quick] [--json FILE]`.

Each line: microseconds of the call in inference and in training (forward and backward), ours and torch's, and how many
times torch's speed ours has: the median over rounds that take turns (A B A B), one thread. Generation lives on such
calls, of batch 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seqkern
from seqkern import _direct

Call = Callable[[], Any]
CALLS = 50  # between two looks at the clock


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _ops() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]]:
    """By name: our function, torch's, and the tensors that both take, all with gradients."""
    x, residual, weight, bias = _leaf(8, 64), _leaf(8, 64), _leaf(64), _leaf(64)
    ops: dict[str, Any] = {
        "layer_norm 8 x 64": (
            lambda x, w, b: seqkern.layer_norm(x, (64,), w, b),
            lambda x, w, b: F.layer_norm(x, (64,), w, b),
            [x, weight, bias],
        ),
        "rms_norm 8 x 64": (
            lambda x, w: seqkern.rms_norm(x, (64,), w),
            lambda x, w: F.rms_norm(x, (64,), w),
            [x, weight],
        ),
        "add_layer_norm 8 x 64": (
            lambda x, r, w, b: seqkern.add_layer_norm(x, r, (64,), w, b)[0],
            lambda x, r, w, b: F.layer_norm(x + r, (64,), w, b),
            [x, residual, weight, bias],
        ),
        "swiglu 8 x 64": (seqkern.swiglu, lambda gate, up: F.silu(gate) * up, [x, residual]),
        "attention 1 x 4 x 16 x 32, causal": (
            lambda q, k, v: seqkern.attention(q, k, v, causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            [_leaf(1, 4, 16, 32) for _ in range(3)],
        ),
    }
    w1, b1, w2, b2 = _leaf(128, 64), _leaf(128), _leaf(64, 128), _leaf(64)
    ops["ffn 8 x 64 x 128"] = (
        seqkern.ffn,
        lambda x, w1, b1, w2, b2: F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2),
        [x, w1, b1, w2, b2],
    )
    lengths = torch.tensor([16, 9])
    visible = (torch.arange(16) < lengths[:, None])[:, None, None]
    ops["attention 2 x 4 x 16 x 32, lengths"] = (
        lambda q, k, v: seqkern.attention(q, k, v, key_lengths=lengths),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, visible),
        [_leaf(2, 4, 16, 32) for _ in range(3)],
    )
    attend, attended = (each.MultiheadAttention(64, 4, batch_first=True) for each in (seqkern.nn, torch.nn))
    attended.load_state_dict(attend.state_dict())
    ops["MultiheadAttention 2 x 16 x 64"] = (
        lambda x: attend(x, x, x, need_weights=False)[0],
        lambda x: attended(x, x, x, need_weights=False)[0],
        [_leaf(2, 16, 64)],
    )
    for mode in ("LSTM", "GRU", "RNN"):
        theirs, ours = getattr(torch.nn, mode)(64, 64), getattr(seqkern.nn, mode)(64, 64)
        ours.load_state_dict(theirs.state_dict())
        h = torch.zeros(1, 1, 64)
        hx: Any = (h, h.clone()) if mode == "LSTM" else h
        ops[f"{mode}, a step of 1 x 64"] = (
            lambda x, ours=ours, hx=hx: ours(x, hx)[0],
            lambda x, theirs=theirs, hx=hx: theirs(x, hx)[0],
            [_leaf(1, 1, 64)],
        )
        theirs, ours = getattr(torch.nn, f"{mode}Cell")(64, 64), getattr(seqkern.nn, f"{mode}Cell")(64, 64)
        ours.load_state_dict(theirs.state_dict())
        h = torch.zeros(1, 64)
        hx = (h, h.clone()) if mode == "LSTM" else h

        def first(state: Any) -> Tensor:
            h: Tensor = state[0] if isinstance(state, tuple) else state
            return h

        ops[f"{mode}Cell 1 x 64"] = (
            lambda x, ours=ours, hx=hx: first(ours(x, hx)),
            lambda x, theirs=theirs, hx=hx: first(theirs(x, hx)),
            [_leaf(1, 64)],
        )
    return ops


def _microseconds(call: Call) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def _compare(ours: Call, theirs: Call, rounds: int) -> dict[str, Any]:
    for call in (ours, theirs):
        _microseconds(call)
    pairs = [(_microseconds(ours), _microseconds(theirs)) for _ in range(rounds)]
    ratios = sorted(b / a for a, b in pairs)
    return {
        "ours_us": round(statistics.median(a for a, _ in pairs), 2),
        "torch_us": round(statistics.median(b for _, b in pairs), 2),
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(ratios[rounds // 4], 3), round(ratios[3 * rounds // 4], 3)],
    }


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, (ours, theirs, tensors) in _ops().items():
        torch.testing.assert_close(ours(*tensors), theirs(*tensors))

        def trained(function: Callable[..., Tensor], tensors: list[Tensor] = tensors) -> None:
            output = function(*tensors)
            output.backward(torch.ones_like(output))

        def inferred(function: Callable[..., Tensor], tensors: list[Tensor] = tensors) -> None:
            function(*tensors)

        with torch.no_grad():
            inference = _compare(lambda: inferred(ours), lambda: inferred(theirs), rounds)  # noqa: B023
        training = _compare(lambda: trained(ours), lambda: trained(theirs), rounds)  # noqa: B023
        rows.append({"op": name, "inference": inference, "training": training})
        print(
            f"{name:36}  inference {inference['ours_us']:7.2f} us, torch {inference['torch_us']:7.2f}: "
            f"{inference['ratio']:5.2f}   training {training['ours_us']:7.2f} us, torch {training['torch_us']:7.2f}: "
            f"{training['ratio']:5.2f}",
            flush=True,
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_calls", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, and less certain")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to store the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"fast path: {'there' if _direct.FRONTS else 'none'}")
    rows = measure(5 if options.quick else 101)
    if options.json:
        machine = {
            "processor": dict(seqkern._explain.describe_machine())["processor"],
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps({"machine": machine, "calls": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
